"""Checkpoints of a simulated module; the files are those of :mod:`bitwright.export.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.serialize import encoding_from_json, encoding_to_json
from bitwright.core.simulation.simulation import all_or_nothing
from bitwright.core.simulation.sites import Site
from bitwright.errors import EncodingsError, ModelError
from bitwright.export.checkpoint import (
    OTHER,
    Checkpoint,
    Setting,
    check_names,
    check_tensor,
    parsed,
    put_statistics,
    read_checkpoint,
    settings_in,
    state_of,
    tensors_of,
    write_checkpoint,
)
from bitwright.torch.calls.inputs import model_device, named_state
from bitwright.torch.quantizers.learned_range import RangeEnds
from bitwright.torch.simulation.ranges import (
    learned_from_json,
    learned_ranges,
    learned_to_json,
    refuse_corrections,
    restore_learned,
    share_gradients,
)
from bitwright.torch.simulation.simulated_module import SimulatedModule

Learned = Mapping[str, tuple[Encoding, tuple[tuple[str, tuple[float, ...]], ...]]]


def save_checkpoint(sim: SimulatedModule, folder: str | Path) -> Path:
    """Write the checkpoint into ``folder``, created if missing.

    ``model.safetensors`` holds parameters and buffers, tied ones once, under their first name; ``quantizers.json`` specs and
    encodings; ``statistics.safetensors`` what calibration saw, from which other bits and range methods are chosen without data;
    ``checkpoint.json`` their hashes. An earlier checkpoint there is replaced at once: whatever stops this call,
    :func:`load_checkpoint` finds the earlier one or the new one, whole.

    Raises:
        ExportError: the folder cannot be written; an earlier checkpoint in it is as it was.
        ModelError: the simulation is being calibrated.
    """
    from safetensors.torch import save

    state = _state(sim)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named_state(sim.model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    return write_checkpoint(folder, sim, save(tensors), state)


def _state(sim: SimulatedModule) -> dict[str, Any]:
    """The state of a simulation without the model's tensors, as plain JSON."""
    if sim._simulator.stage not in ("simulate", "uncalibrated"):
        raise ModelError(
            "save_checkpoint", "the simulation is being calibrated", "call it when compute_encodings has returned"
        )
    refuse_corrections(sim, "save_checkpoint")
    return state_of(sim, _learned, lengths=dict(sim._simulator.lengths))


def _learned(site: Site) -> dict[str, Any]:
    """The parameters of a learned range, and the encoding that they are relative to."""
    learned = getattr(site.quantizer, "learned", None)
    if learned is None or site.encoding is None or isinstance(learned, RangeEnds):
        return {}  # ends follow from the encoding
    return {"learned": {"base": encoding_to_json(learned.base), "parameters": learned_to_json(learned)}}


def state_dict(sim: SimulatedModule) -> dict[str, Any]:
    """The simulation as tensors and plain values, for ``torch.save``: ``model`` is ``sim.model.state_dict()``."""
    return {"model": sim.model.state_dict(), "simulation": _state(sim)}


def load_state_dict(sim: SimulatedModule, state: Mapping[str, Any]) -> None:
    """Load what :func:`state_dict` returned for a simulation of the same model under the same rules; all or nothing.

    Raises:
        EncodingsError: it is no such state, or one of another model.
    """
    if set(state) != {"model", "simulation"}:
        raise EncodingsError(
            "load_state_dict",
            f"the state has the keys {sorted(map(str, state))}, not 'model' and 'simulation'",
            "pass what sim.state_dict() returned; sim.model.load_state_dict() takes the weights alone",
        )
    where = Path("load_state_dict")
    try:
        loaded = parsed({}, state["simulation"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EncodingsError("load_state_dict", f"no readable state: {error!r:.300}", OTHER) from error
    remedy = _remedy(sim, state["model"])
    settings = settings_in(sim, where, loaded, remedy)
    learned = _learned_in(loaded)
    with all_or_nothing(sim, parameters=True):
        try:
            sim.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise EncodingsError("load_state_dict", f"the tensors do not fit the model: {error}", remedy) from error
        _put(sim, loaded, settings, learned)


def load_checkpoint(sim: SimulatedModule, folder: str | Path) -> None:
    """Read a checkpoint into ``sim``, which must simulate the same model under the same rules.

    Everything is read and checked before anything changes; a call that fails or is interrupted leaves weights, quantizers
    and stage as they were. What calibration saw is read too: bits, range methods and symmetry can be changed without data.

    Raises:
        EncodingsError: no checkpoint there, a part of it is damaged, missing or of another checkpoint, or it is one of
            another model (which names are missing or extra).
    """
    from safetensors.torch import load

    folder = Path(folder)
    loaded = read_checkpoint(folder, load)
    own = dict(named_state(sim.model))
    first: dict[int, str] = {}
    for name, tensor in own.items():
        first.setdefault(id(tensor), name)
    remedy = _remedy(sim, loaded.tensors)
    check_names(tensors_of(folder), first.values(), loaded.tensors, remedy)
    settings = settings_in(sim, folder, loaded, remedy)
    learned = _learned_in(loaded)
    for name, tensor in loaded.tensors.items():
        check_tensor(folder, name, tensor, own[name])
    with all_or_nothing(sim, parameters=True):
        for name in list(loaded.tensors):
            own[name].detach().copy_(loaded.tensors.pop(name))
        _put(sim, loaded, settings, learned)


def _learned_in(loaded: Checkpoint) -> Learned:
    """Site -> base and parameters of its learned range.

    Raises:
        EncodingsError: naming the site whose range cannot be read.
    """
    found = {}
    for name, saved in loaded.quantizers.items():
        if "learned" not in saved:
            continue
        try:
            base = encoding_from_json(saved["learned"]["base"], name)
            found[name] = (base, learned_from_json(saved["learned"]["parameters"], base))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            problem = f"what is saved of its quantizer cannot be read: {type(error).__name__}: {error}"
            raise EncodingsError(name, problem, OTHER) from error
    return found


def _put(sim: SimulatedModule, loaded: Checkpoint, settings: Mapping[str, Setting], learned: Learned) -> None:
    """Restore the state that a checkpoint holds besides the tensors."""
    for name, setting in settings.items():
        setting.put(sim.quantizers[name])
    for name, (base, parameters) in learned.items():
        sim.quantizers[name].quantizer.encoding = base
        restore_learned(sim.quantizers[name], dict(parameters))
    put_statistics(sim, loaded)
    for _, trained in learned_ranges(sim):
        trained.to(model_device(sim.model))
    share_gradients(sim)
    sim._simulator.repairs = {repair.op: repair for repair in loaded.repairs}
    sim._simulator.lengths, sim._simulator.longer = dict(loaded.lengths), {}
    sim._simulator.stage = "simulate" if loaded.calibrated else "uncalibrated"
    sim.calibration_log = None


def _remedy(sim: SimulatedModule, saved: Iterable[str]) -> str:
    """The remedy where the tensor names ``saved`` differ from the model's; often only one of the two is folded."""
    here, there = (
        {name for name in names if name.endswith(".running_mean")}
        for names in ((name for name, _ in named_state(sim.model)), saved)
    )
    if here != there:
        return (
            "fold the batch norms as before it was saved: fold_all_batch_norms(model, dummy_input=...) before the simulation is "
            "built, or compute_encodings and fold_all_batch_norms_to_scale(sim) after it, or neither"
        )
    return "build the simulation from the same model and rules"
