"""The default recipe for each preset and effort."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright.core.numerics.granularity import PerTensor
from bitwright.core.numerics.spec import Preset, find_preset
from bitwright.errors import ConfigError, close_matches
from bitwright.recipes.recipe import Step, integer_bits, load_recipe, parse_recipe

# shares of the weights' noise at nearest rounding that gptq leaves: measured 0.02 to 0.17 at 8 bits, 0.18 below
_LEFT = (0.05, 0.2)
# less noise than this in the search is no gain that outputs show: ResNet-20 has 1.3 dB there, and 0.1 in its outputs
_EQUALIZED = {"keep_bounds": True, "only_without_attention": True, "worth": 2.0}


@dataclass(frozen=True)
class Effort:
    """A row of :data:`EFFORTS`: options of the default recipe's steps at one level of effort.

    Attributes:
        does: one phrase, for tables and ``--help``.
        ranges: whether ranges of activations are chosen by least squared error.
        widen: options of that step.
        weights: options of the steps that choose weights of fewer than 8 bits. Each doubling of the samples takes 0.5 dB off the
            noise, and as long again; of the rows of a layer, 64 for each input say what all do.
        eight: those for weights of 8 bits, whose noise after rounding is far below that of the activations.
        equalize: options of that step.
        judged: batches held out at most.
    """

    does: str
    ranges: bool = True
    widen: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)
    eight: Mapping[str, Any] = field(default_factory=dict)
    equalize: Mapping[str, Any] = field(default_factory=dict)
    judged: int = 16

    def rounding(self, bits: int) -> Mapping[str, Any]:
        """Options of the steps that choose weights of ``bits``."""
        return self.weights if bits < 8 else self.eight


EFFORTS: dict[str, Effort] = {
    "quick": Effort(
        "weights from 32 samples, ranges of everything seen",
        ranges=False,
        widen={"samples": 16},
        weights={"num_samples": 32, "rows_per_input": 8},
        eight={"num_samples": 32, "rows_per_input": 8},
        equalize={"samples": 64},
        judged=1,
    ),
    "default": Effort(
        "weights from 128 samples (256 below 8 bits), ranges of least squared error",
        widen={"samples": 16},
        weights={"num_samples": 256, "rows_per_input": 64},
        eight={"num_samples": 128, "rows_per_input": 16},
        equalize={"samples": 64},
    ),
    "thorough": Effort(
        "weights from all samples and four times the rows, weight ranges by output error at eight bits too",
        widen={"samples": 64},
        weights={"rows_per_input": 256},
        eight={"rows_per_input": 256},
    ),
}


def _quieter(bits: int) -> dict[str, float]:
    """What the search for factors, which takes weights as rounded to nearest at 8 bits, is told of later rounding."""
    return {"weight_noise": _LEFT[0]} if bits == 8 else {}


def find_effort(effort: str) -> Effort:
    """The row called ``effort``.

    Raises:
        ConfigError: there is none.
    """
    if effort not in EFFORTS:
        raise ConfigError(
            "effort",
            f"there is no effort {effort!r}{close_matches(str(effort), EFFORTS)}",
            f"use one of {', '.join(EFFORTS)}",
        )
    return EFFORTS[effort]


def default_recipe(
    preset: Preset, *, effort: str = "default", own_rules: bool = False, own_scheme: bool = False
) -> tuple[Step, ...]:
    """The recipe used when none is given. It needs no labels and no settings, and takes seconds to minutes.

    Batch norms are folded; for one scale per tensor channels are equalized. Where activations have at most 8 bits, channels of
    models without an attention are equalized with the bounds of activations kept, transformers are smoothed and only what their
    layers read is quantized, ranges are chosen by least squared error, and the
    few activations that cost the output most get 16 bits. Integer weights are rounded with error feedback; those of 8 bits
    with one scale per tensor have their biases corrected instead. A judge decides which of these steps stay.

    Args:
        preset: of the simulation.
        effort: a row of :data:`EFFORTS`.
        own_rules: whether a configuration of the user's says which activations are quantized.
        own_scheme: whether the user says how ranges are chosen.

    Raises:
        ConfigError: there is no such effort.

    Example:
        >>> from bitwright.core.numerics.spec import find_preset
        >>> [step.name for step in default_recipe(find_preset("w8a8"))]
        ['fold', 'equalize', 'smooth', 'layer_inputs', 'activation_ranges', 'widen', 'gptq']
        >>> default_recipe(find_preset("w8"), effort="quick")[-1].options
        {'num_samples': 32, 'rows_per_input': 8, 'damping': 0.1}
    """
    chosen = find_effort(effort)
    bits, activation_bits = integer_bits(preset.weight), integer_bits(preset.activation)
    coarse = bits <= 8 and preset.weight is not None and preset.weight.granularity == PerTensor()
    rounded = bits < 8 or (bits == 8 and not coarse)
    narrow = activation_bits <= 8
    own_ranges = narrow and not own_rules and not own_scheme
    left = {"weights": _LEFT[bits < 8]} if rounded else {}
    weights = chosen.rounding(bits)
    return tuple(
        step
        for step, wanted in (
            (Step("fold"), True),
            (Step("equalize", optional=True), coarse),
            # channels that fill the range of their tensor lose less to its one scale
            (
                Step("equalize", {**_EQUALIZED, **_quieter(bits), **chosen.equalize}, optional=True),
                narrow and not coarse,
            ),
            (Step("smooth", optional=True), narrow),
            (Step("layer_inputs", {"only_with_attention": True}), narrow and not own_rules),
            # at four bits of activations the ranges are most of the result, whatever the effort
            (Step("activation_ranges"), own_ranges and (chosen.ranges or activation_bits < 8)),
            (Step("widen", {**left, **chosen.widen}, optional=True), narrow and not own_rules),
            (Step("seq_mse", weights, optional=True), rounded and (bits < 8 or effort == "thorough")),
            # 0.1 is 0.1 to 0.9 dB better than the paper's 0.01 on data that was not seen
            (Step("gptq", {**weights, "damping": 0.1}, optional=True), rounded),
            (Step("bias_correction", optional=True), bits == 8 and not rounded),
        )
        if wanted
    )


RecipeLike = str | Path | Iterable[str | Callable[..., Any] | Mapping[Any, Any] | Step]


def as_recipe(
    recipe: RecipeLike | None,
    preset: str | Preset = "w8a8",
    *,
    effort: str = "default",
    own_rules: bool = False,
    own_scheme: bool = False,
) -> tuple[Step, ...]:
    """Steps from a list, the path of a recipe file, or ``None`` for :func:`default_recipe`.

    Raises:
        ConfigError: see :func:`parse_recipe` and :func:`load_recipe`; an unknown preset or effort; or a recipe beside an effort.
    """
    if recipe is None:
        return default_recipe(find_preset(preset), effort=effort, own_rules=own_rules, own_scheme=own_scheme)
    find_effort(effort)
    if effort != "default":
        raise ConfigError("effort", f"a recipe says what is done, and so does {effort!r}", "leave one of them out")
    if isinstance(recipe, (str, Path)) and Path(recipe).suffix:
        return load_recipe(recipe)
    return parse_recipe(recipe)  # type: ignore[arg-type]
