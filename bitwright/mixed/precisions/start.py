"""The simulation that a search begins with, of a model that is given as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.core.numerics.spec import Preset
from bitwright.errors import ConfigError
from bitwright.methods.pipeline import quantize
from bitwright.mixed.precisions.candidates import Candidate

_STEPS: tuple[Any, ...] = ("fold", {"layer_inputs": {"only_with_attention": True}})


def simulation_of(model: Any, batches: Sequence[Any], candidate: Candidate, config_file: Any = None) -> Any:
    """``model`` itself where it is a simulation, else one that is folded, placed and calibrated.

    Ranges are chosen by least squared error, from histograms, which serve every number of bits.
    """
    if hasattr(model, "quantizers") and hasattr(model, "remember"):
        if config_file is not None:
            raise ConfigError(
                "config_file", "the simulation has its rules already", "pass it to the simulation, or the model here"
            )
        return model
    preset = Preset(candidate.weight, candidate.activation)
    options: dict[str, Any] = {
        "recipe": [s for s in _STEPS if config_file is None or s == "fold"],
        "quant_scheme": "mse",
        "config_file": config_file,
        "progress": False,
    }
    return quantize(model, batches, preset, **options).sim
