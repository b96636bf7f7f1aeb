"""Checkpoints of a simulation of an ONNX model; the files are those of :mod:`bitwright.export.checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.simulation.simulation import all_or_nothing
from bitwright.export.checkpoint import (
    check_names,
    check_tensor,
    put_statistics,
    read_checkpoint,
    settings_in,
    state_of,
    tensors_of,
    write_checkpoint,
)

_OTHER_MODEL = "build the simulation from the same model and rules, with the same methods applied to the model before"


def save_checkpoint(sim: Any, folder: str | Path) -> Path:
    """Write parameters, quantizers and calibration statistics into ``folder``, created if missing.

    ``sim`` is a :class:`bitwright.onnx.QuantizationSimModel`. An earlier checkpoint there is replaced at once: whatever stops
    this call, :func:`load_checkpoint` finds the earlier one or the new one, whole.

    Raises:
        ExportError: the folder cannot be written; an earlier checkpoint in it is as it was.
    """
    from safetensors.numpy import save

    return write_checkpoint(folder, sim, save(_parameters(sim)), state_of(sim, lambda site: {}))


def load_checkpoint(sim: Any, folder: str | Path) -> None:
    """Read a checkpoint into ``sim``, which must simulate the same model under the same rules.

    Everything is read and checked before anything changes. What calibration saw is read too: bits, range methods and symmetry
    can be changed, and files for other targets be written, without data.

    Raises:
        EncodingsError: no checkpoint there, a part of it is damaged, missing or of another checkpoint, or it is one of
            another model (which names are missing or extra).
    """
    from safetensors.numpy import load

    folder = Path(folder)
    loaded = read_checkpoint(folder, load)
    own = _parameters(sim)
    check_names(tensors_of(folder), own, loaded.tensors, _OTHER_MODEL)
    for name, tensor in loaded.tensors.items():
        check_tensor(folder, name, tensor, own[name])
    settings = settings_in(sim, folder, loaded, _OTHER_MODEL)
    with all_or_nothing(sim, parameters=True):
        for name, tensor in loaded.tensors.items():
            if tensor.tobytes() != own[name].tobytes():
                kind = sim.marked.graph.initializers[name].const_value
                assert kind is not None
                raw = kind.dtype.numpy().kind == "V"
                sim.set_parameter(name, tensor.view(kind.dtype.numpy()) if raw else tensor)
        if loaded.repairs != sim.repairs:
            sim._put_in_force(loaded.repairs)
        for name, setting in settings.items():
            setting.put(sim.quantizers[name])
        put_statistics(sim, loaded)
        sim.calibrated, sim.calibration_log = loaded.calibrated, None
        sim.forget_simulations()


def _parameters(sim: Any) -> dict[str, NDArray[Any]]:
    """Numeric initializers by name; dtypes that numpy lacks as integers of the same bytes."""
    found = {}
    for name, value in sim.marked.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.dtype.is_string():
            continue
        array = tensor.numpy()
        if array.dtype.kind == "V":
            array = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
        found[name] = np.array(array, array.dtype.newbyteorder("="), order="C")
    return found
