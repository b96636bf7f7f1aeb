"""Checkpoints of a simulation: parameters in safetensors, quantizers in JSON; no pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bitwright.core.serialize import encoding_from_json, encoding_to_json, spec_from_json, spec_to_json
from bitwright.errors import EncodingsError
from bitwright.export.atomic import atomic_files
from bitwright.export.encodings import names_error
from bitwright.torch.trees import named_state

if TYPE_CHECKING:
    from bitwright.torch.quantsim import QuantizationSimModel

_TENSORS, _QUANTIZERS = "model.safetensors", "quantizers.json"
_VERSION = 1


def save_checkpoint(sim: QuantizationSimModel, folder: str | Path) -> Path:
    """Write ``model.safetensors`` and ``quantizers.json`` into ``folder``, which is made if need be.

    Tied parameters are stored once, under their first name.

    Raises:
        ExportError: the folder cannot be written; nothing is left half-written.
    """
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named_state(sim.model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    quantizers = {
        site.name: {
            "spec": spec_to_json(site.quantizer.spec),
            "encoding": None if site.encoding is None else encoding_to_json(site.encoding),
            "enabled": site.enabled,
            "frozen": site.frozen,
        }
        for site in sim.quantizers.values()
    }
    state = {"version": _VERSION, "stage": sim._simulator.stage, "quantizers": quantizers}
    with atomic_files(folder, create=True, last=_QUANTIZERS) as staging:
        (staging / _TENSORS).write_bytes(save(tensors))
        (staging / _QUANTIZERS).write_text(json.dumps(state, indent=1))
    return Path(folder)


def load_checkpoint(sim: QuantizationSimModel, folder: str | Path) -> None:
    """Read a checkpoint into ``sim``, which must simulate the same model under the same rules.

    Raises:
        EncodingsError: no checkpoint there, or one of another model (which names are missing or extra).
    """
    from safetensors.torch import load

    folder = Path(folder)
    try:
        state: dict[str, Any] = json.loads((folder / _QUANTIZERS).read_text())
        tensors = load((folder / _TENSORS).read_bytes())
    except (OSError, ValueError) as error:
        raise EncodingsError(
            str(folder),
            f"no readable checkpoint there: {error}",
            "pass the folder that save_checkpoint wrote",
        ) from error
    own = dict(named_state(sim.model))
    first: dict[int, str] = {}
    for name, tensor in own.items():
        first.setdefault(id(tensor), name)
    mismatch = names_error(str(folder), [*first.values(), *sim.quantizers], [*tensors, *state["quantizers"]])
    if mismatch:
        raise mismatch
    for name, tensor in tensors.items():
        if tuple(own[name].shape) != tuple(tensor.shape):
            raise EncodingsError(
                str(folder),
                f"{name} has shape {tuple(tensor.shape)} in the checkpoint and {tuple(own[name].shape)} in the model",
                "build the simulation from the same model",
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    for name, saved in state["quantizers"].items():
        quantizer = sim.quantizers[name].quantizer
        quantizer.spec = spec_from_json(saved["spec"])
        quantizer.encoding = None if saved["encoding"] is None else encoding_from_json(saved["encoding"])
        quantizer.enabled, quantizer.frozen = saved["enabled"], saved["frozen"]
    sim._simulator.stage = state["stage"]
