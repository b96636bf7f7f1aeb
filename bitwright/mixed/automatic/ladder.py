"""The trials of an automatic search, from cheap to dear: fixed ones first, then what the analysis of the first one suggests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Trial:
    """One way to quantize the model.

    Attributes:
        name: unique; also of its folder.
        preset: of the simulation.
        scheme: range method; ``None`` leaves it to the preset and the recipe.
        recipe: steps, by name or as ``{name: options}``; ``None`` is the default recipe of the preset.
        mixed: candidates of a search for mixed precision; empty for one precision.
        why: what it is for.
    """

    name: str
    preset: str
    scheme: str | None = None
    recipe: tuple[str | Mapping[str, Any], ...] | None = None
    mixed: tuple[str, ...] = ()
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


FIRST = Trial("w8a8-fast", "w8a8", recipe=("fold",), why="nearest rounding: the fastest answer")

_RANGES = tuple(
    Trial(f"w8a8-{scheme}", "w8a8", scheme, ("fold",), why=f"ranges by {scheme}") for scheme in ("mse", "percentile")
)
_PRESETS = ("w8a8", "w8a16", "w4a8", "w4a16")
_RECIPES = tuple(Trial(f"{preset}-recipe", preset, why=f"the default recipe of {preset}") for preset in _PRESETS)
_MIXED = Trial("mixed", "w8a16", mixed=_PRESETS, why="a precision for every layer")

# Cause that the analysis of the first trial found -> recipe that is made for it.
_DIRECTED: dict[str, tuple[str, ...]] = {
    "outlier_channels": ("fold", "smooth", "widen"),
    "disparate_channels": ("fold", "equalize", "bias_correction"),
    "disparate_inputs": ("fold", "equalize", "bias_correction"),
    "outlier_weight_channel": ("fold", "equalize", "bias_correction"),
    "softmax_input": ("fold", "widen"),
    "uneven_samples": ("fold", "widen"),
    "few_bits": ("fold", "adaround"),
    "few_codes": ("fold", "activation_ranges", "widen"),
    "range_too_wide": ("fold", "activation_ranges", "gptq"),
    "clipping": ("fold", "activation_ranges"),
    "accumulating_residual": ("fold", "widen"),
}


def waves(causes: Iterable[str], presets: Sequence[str] = _PRESETS) -> list[list[Trial]]:
    """Trials in groups; those of one group do not depend on each other.

    Args:
        presets: that trials may have.
        causes: keys of ``bitwright.analysis.causes.causes.CAUSES`` that were found in :data:`FIRST`, most frequent first.
    """
    recipes: dict[tuple[str, ...], str] = {}
    for cause in causes:
        if cause in _DIRECTED:
            recipes.setdefault(_DIRECTED[cause], cause)
    directed = [
        Trial(
            f"w8a8-{'-'.join(recipe[1:])}", "w8a8", recipe=recipe, why=f"the analysis found {cause.replace('_', ' ')}"
        )
        for recipe, cause in recipes.items()
    ]
    able = tuple(name for name in _PRESETS if name in presets)
    mixed = []
    if len(able) > 1:
        mixed = [replace(_MIXED, preset="w8a16" if "w8a16" in able else able[0], mixed=able)]
    found = [[*_RECIPES[:1], *_RANGES], directed, [*_RECIPES[1:], *mixed]]
    return [[trial for trial in wave if trial.preset in presets] for wave in found]
