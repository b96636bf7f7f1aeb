"""The simulation that a search begins with, of a model that is given as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.core.numerics.spec import Preset
from bitwright.errors import ConfigError
from bitwright.mixed.candidates import Candidate

_STEPS: tuple[Any, ...] = ("fold", {"layer_inputs": {"only_with_attention": True}})


def simulation_of(model: Any, batches: Sequence[Any], candidate: Candidate, config_file: Any = None) -> Any:
    """``model`` itself where it is a simulation, else one that is folded, placed and calibrated.

    Ranges are chosen by least squared error, from histograms, which serve every number of bits.
    """
    if hasattr(model, "quantizers") and hasattr(model, "remember"):
        if config_file is not None:
            raise ConfigError(
                "config_file",
                "the simulation has its rules already",
                "pass it to the simulation, or the model here",
            )
        return model
    preset = Preset(candidate.weight, candidate.activation)
    options: dict[str, Any] = {
        "recipe": [s for s in _STEPS if config_file is None or s == "fold"],
        "quant_scheme": "mse",
        "config_file": config_file,
        "progress": False,
    }
    quantize = front_end_of(model)
    return quantize(model, batches, preset, **options).sim


def front_end_of(model: Any) -> Any:
    """``quantize`` of the front end that ``model`` belongs to.

    Raises:
        ConfigError: it is neither a module nor anything that ONNX models come in.
    """
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from bitwright.torch.pipeline import quantize

        return quantize
    kinds = {f"{t.__module__}.{t.__qualname__}".split(".")[0] for t in type(model).__mro__}
    if isinstance(model, str) or hasattr(model, "__fspath__") or kinds & {"onnx", "onnx_ir"}:
        from bitwright.onnx.pipeline import quantize as quantize_onnx

        return quantize_onnx
    raise ConfigError(
        "model",
        f"it is a {type(model).__name__}, neither a model nor a simulation",
        "pass a torch.nn.Module, a calibrated QuantizationSimModel, or an ONNX model: a path or a ModelProto",
    )
