"""Causes of a layer's error: rules on the statistics of its sites, and the remedies that are available.

A rule looks at one site, or at the layer, and says nothing or gives a :class:`~bitwright.analysis.result.Cause`. The site
that costs the outputs most is asked first.

Remedies of the float model: each is measured on a simulation of its own, of a copy of the model that it has changed.

Its gain is measured against a simulation of the unchanged copy with the same rules, the same specs at every site and the same
calibration data, so that the difference comes from the remedy alone.

Trying what the causes suggest: each remedy is applied to the simulation, measured, and kept only while it is the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.analysis.layer_errors import SiteValues, calibrated_bounds
from bitwright.analysis.result import MOST_DB, Analysis, Cause, LayerRow, RemedyRow, SiteRow, decibel
from bitwright.analysis.sensitivity import Judged
from bitwright.analysis.subject import Subject, open_subject
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.core.numerics import affine
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerChannel, PerTensor
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.simulation.sites import Site
from bitwright.errors import BitwrightError, ConfigError
from bitwright.methods.scaling.equalize import equalize_model
from bitwright.methods.scaling.smooth import smooth_model
from bitwright.methods.switching import Clock

if TYPE_CHECKING:
    from bitwright.analysis.layer_errors import LayerErrors, Lockstep, SiteValues
    from bitwright.methods.rounding.program import SimulatedModel

_WIDE = 0.5  # share of the grid that the values should cover at least
_FEW_CODES = 0.125  # of 256 codes, 32: as good as a grid of five bits
_DISPARATE = 8.0  # largest channel over the median from which on most channels lose three bits
_FEW = 0.06  # share of the channels that still counts as a few outliers
_CUT = 0.25  # of the grid's length: calibration saw values so far outside of it
_NARROW = {"weight": 6, "constant": 6}  # bits up to which a width is a cause by itself; 7 for activations
_ENOUGH_SAMPLES = 8  # from which on their sizes are compared
_SOFTMAX_STEP = 0.1  # of the input: a step changes a probability by so much of itself
_LARGE = 0.05  # share of the noise of all layers from which on one without a fault needs more bits
_TAIL = 8.0  # largest value over the root mean square: a step is then 6 % of it, and normal values reach 4 or 5 times
_CANCELS = 8.0  # root mean square of what a sum reads over that of what it makes
_ENLARGED = 6.0  # dB lost from the site to the outputs
_FAR_ENLARGED = 12.0  # from which on it is told beside a fault
_CREDIBLE = 4.0  # noise that a factor is said to leave, over what is there
_SMALL_AMONG = 3.0  # root mean square of what an operator reads over that of what it picks
_GROWS = 3.0  # dB lost at one operator, which is then named
_CHOICES_COST = 1.0  # dB of the outputs from which on choices that changed are told
_NAMED = 4  # operators that a note names
_MATTERS = 0.02  # share of the layer's noise below which a site is not asked

REMEDIES = {
    "minmax": "a range that holds all values (method min_max)",
    "mse": "a range of least squared error (method mse; step activation_ranges)",
    "16_bits": "16 bits at this site (step widen)",
    "8_bits": "8 bits for this weight",
    "per_channel": "one scale per channel for this weight",
    "equalize": "equalized channel ranges before the simulation is made (step equalize)",
    "smooth": "outliers moved into the weights before the simulation is made (step smooth)",
    "seq_mse": "a weight range by output error (step seq_mse)",
    "gptq": "rounding with error feedback (step gptq)",
}
"""Remedy -> what it is. Those of the float model (equalize, smooth) come before the simulation is made."""

CAUSES = {
    "clipping": "values lie outside of the grid",
    "range_too_wide": "the grid is wider than the values",
    "outlier_weight_channel": "a few channels of a weight are far larger than the rest, on one scale",
    "disparate_channels": "channels of a weight differ widely, on one scale",
    "disparate_inputs": "input channels of a weight differ widely, under one scale",
    "outlier_channels": "a few channels of an activation are far larger than the rest",
    "uneven_samples": "samples differ widely in size, and one grid holds them all",
    "uneven_positions": "positions (tokens, pixels) differ widely in size, and one grid holds them all",
    "reciprocal": "a reciprocal: large where the divisor is small, and one grid holds all",
    "unlike_join": "values of unlike ranges are joined, and one grid holds all",
    "heavy_tails": "few values are far larger than the rest, and the grid reaches as far as they do",
    "difference": "a sum leaves little of it: a difference of nearly equal values",
    "enlarged": "what follows enlarges the error",
    "few_bits": "the grid has few steps",
    "few_codes": "nearly all values share a few codes",
    "softmax_input": "a step of the grid changes probabilities much",
    "norm_input": "a normalization enlarges the error of what it reads",
    "accumulating_residual": "errors add up along a residual stream",
    "rounding": "no anomaly: rounding to a grid of this width",
    "output_grid": "the model's output itself is rounded to a grid",
    "dead_channels": "channels hold nothing but zeros",
    "choice": "it chooses otherwise than in float",
    "passes_on": "the error arrives here and is not made here",
}
"""Key of a cause -> what it means."""


_HARMLESS = frozenset(("passes_on", "dead_channels"))


@dataclass(frozen=True)
class _Seen:
    """Input of a rule: a layer with the statistics of one of its sites."""

    layer: LayerRow
    op: Op
    site: Site
    values: SiteValues
    row: SiteRow
    subject: Subject
    errors: Mapping[str, LayerErrors] = field(default_factory=dict)
    reciprocals: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, SiteValues] = field(default_factory=dict)


@dataclass(frozen=True)
class Enlarged:
    """An operator that enlarges the error of what it reads.

    Attributes:
        op: its name.
        arrived, left: SQNR of what it reads, and of what it makes without its own rounding, in dB.
        why: what makes it do so.
    """

    op: str
    arrived: float
    left: float
    why: str = ""


def most_enlarged(graph: Graph, errors: Mapping[str, LayerErrors]) -> dict[str, Enlarged]:
    """Operator -> the one among those that depend on it that enlarges errors most, by 3 dB or more; in one linear pass."""
    found: dict[str, Enlarged] = {}
    for op in reversed(graph.ops):
        after = [reader for value in op.outputs for reader, _ in graph.consumers(value)]
        own = [one for reader in after if (one := _enlarged_by(reader.name, errors.get(reader.name))) is not None]
        own += [found[reader.name] for reader in after if reader.name in found]
        if own:
            found[op.name] = max(own, key=_lost)
    return found


def _enlarged_by(name: str, errors: LayerErrors | None) -> Enlarged | None:
    if errors is None or not errors.after.signal or not errors.arrived:
        return None
    picked = max(
        (one for slot in errors.weighted if (one := _picked(name, errors, slot)) is not None), key=_lost, default=None
    )
    passed = max(errors.after.noise - errors.made.noise, 0.0) / errors.after.signal
    arrived, left = decibel(errors.arrived) or 0.0, decibel(passed) or 0.0
    own = Enlarged(name, arrived, left, _why_enlarged(errors))
    found = [one for one in (picked, own) if one is not None and _lost(one) >= _GROWS]
    return max(found, key=lambda one: (bool(one.why), _lost(one)), default=None)


def _lost(one: Enlarged) -> float:
    """dB that an operator loses; below 0 dB there is nothing left to lose."""
    return max(one.arrived, 0.0) - max(one.left, 0.0)


def _picked(name: str, errors: LayerErrors, slot: int) -> Enlarged | None:
    """A product whose other factor is small where this one is large: windows, gates, bases of splines."""
    read, left = errors.operands.get(slot), errors.weighted[slot]
    if read is None or not read.value or not left.value or left.value > _CREDIBLE * (errors.after.value or 0.0):
        return None  # errors of both factors, together small or large, cancel
    why = "its other factor is small where this one is large, and what is left are small values with the errors of large ones"
    return Enlarged(name, decibel(read.value) or 0.0, decibel(left.value) or 0.0, why)


_SUMS = frozenset(
    """
    Add Sub MatMul Gemm Conv ConvTranspose GroupedMatMul Einsum Bilinear ReduceMean ReduceSum AveragePool GlobalAveragePool
    CumSum
    """.split()
)
_STEEP = frozenset(("Exp", "Expm1", "Pow", "Square", "Reciprocal", "Rsqrt", "Div", "Tan", "Sinh", "Cosh"))
_FLAT = frozenset(("Log", "Log1p", "log2", "log10"))


def _why_enlarged(errors: LayerErrors) -> str:
    """What makes an operator of this kind enlarge relative errors."""
    kind = errors.type
    if kind in ("Softmax", "LogSoftmax"):
        read = errors.operands[0]
        error = math.sqrt(read.noise / read.count)
        return f"exp makes a factor of {math.exp(min(error, 700.0)):.3g} of the error of {error:.2g} in what it reads"
    if kind in _SUMS:
        return "the terms of its sums cancel, and their errors do not"
    if op_row(kind).kind == "norm":
        return "it divides by the deviation of its rows, which is small against their errors"
    if kind in _STEEP:
        return "its relative slope is above 1"
    if kind in _FLAT:
        return "it makes small numbers of values near 1"
    if op_row(kind).kind == "movement":
        read = max(errors.operands.values(), key=lambda one: one.signal)
        before, after = math.sqrt(read.signal / max(read.count, 1)), errors.root_mean_square
        if before > _SMALL_AMONG * after:
            return f"it picks small values ({after:.2g}, root mean square) among large ones ({before:.2g}), and one grid held all"
        return "it picks other elements than in float, or those with the largest errors"
    if kind in TRAITS["activation"]:
        return "it makes little of most values, and what is left keeps its errors"
    return ""


Rule = Callable[[_Seen], Cause | None]


def causes_of(
    layer: LayerRow,
    subject: Subject,
    values: Mapping[str, SiteValues],
    rows: Mapping[str, SiteRow],
    whole: float,
    errors: Mapping[str, LayerErrors],
    reciprocals: Mapping[str, str],
    enlarging: Mapping[str, Enlarged],
) -> tuple[Cause, ...]:
    """The causes found for a layer, most costly first; each kind of cause once.

    Args:
        layer, subject: the layer, and its simulation.
        values, rows: what was seen at the sites, and their rows.
        whole: what all sites cost together.
        errors: what was seen of each operator.
        reciprocals: value that is a reciprocal -> the operator that divides.
        enlarging: of :func:`most_enlarged`.
    """
    op = subject.sim.graph.op(layer.name)
    total = sum(rows[name].cost for name in layer.sites)
    found: dict[str, Cause] = {}
    ranked = sorted(layer.sites, key=lambda name: (-rows[name].cost, not _varies(values.get(name))))
    for name in ranked:
        row = rows[name]
        if not row.enabled or row.cost < _MATTERS * total:
            continue
        seen = values.get(name, SiteValues(subject.sites[name]))
        for cause in _of_site(_Seen(layer, op, subject.sites[name], seen, row, subject, errors, reciprocals, values)):
            found.setdefault(cause.cause, cause)
    for cause in (*_choices(layer, errors.get(layer.name)), *_of_layer(layer, op, subject)):
        found.setdefault(cause.cause, cause)
    if layer.sites and total >= _LARGE * whole:
        rounding = _rounding(layer, op, subject, rows, ranked, values, enlarging.get(layer.name))
        found = _with_rounding(found, rounding)
    return tuple(found.values())


def _with_rounding(found: dict[str, Cause], rounding: Cause | None) -> dict[str, Cause]:
    """The causes with that of a costly layer: first where none is a fault, and second where what follows costs far more."""
    if rounding is None:
        return found
    if not found.keys() - _HARMLESS:
        return {rounding.cause: rounding, **found}
    if rounding.cause != "enlarged" or rounding.evidence["here_db"] - rounding.evidence["outputs_db"] < _FAR_ENLARGED:
        return found
    first, *rest = found.items()  # whose remedies come before those of what enlarges every error
    told = replace(rounding, evidence={**rounding.evidence, "tries": []})
    return dict([first, (told.cause, told), *rest])


def _varies(values: SiteValues | None) -> bool:
    """Whether more than zeros was seen: of the sites of one quantizer, an initial state is not the one to name."""
    return values is not None and bool(values.count) and (values.low != 0 or values.high != 0)


def _of_site(seen: _Seen) -> Iterator[Cause]:
    rules = _SITE_RULES if seen.values.count else (_calibration,)
    return filter(None, (rule(seen) for rule in rules))


def _rounding(
    layer: LayerRow,
    op: Op,
    subject: Subject,
    rows: Mapping[str, SiteRow],
    ranked: Sequence[str],
    values: Mapping[str, SiteValues],
    most: Enlarged | None,
) -> Cause | None:
    """Cause of a costly layer with ordinary statistics: later operators amplify its error, or it is plain rounding."""
    name = next((n for n in ranked if rows[n].enabled), None)
    if name is None or rows[name].bits is None:
        return None
    held = values.get(name, SiteValues(subject.sites[name]))
    seen = _Seen(layer, op, subject.sites[name], held, rows[name], subject)
    tries = ("seq_mse", "gptq") if subject.sites[name].role in _NARROW else ("16_bits",)
    here, out = decibel(held.noise) if held.noise else None, decibel(rows[name].cost)
    if here is not None and out is not None and here - out > _ENLARGED:
        text = f"{rows[name].bits} bits leave {here:.1f} dB here, and the layers that follow make {out:.1f} dB of it"
        facts: dict[str, Any] = {"here_db": here, "outputs_db": out, "bits": rows[name].bits}
        if most is not None:
            text += f", most at {most.op}, which {most.arrived:.1f} dB reach and {most.left:.1f} leave"
            text += f": {most.why}" if most.why else ""
            facts["most_at"] = most.op
        return _cause("enlarged", seen, text, tries, **facts)
    return _cause(
        "rounding",
        seen,
        f"No anomaly: this is plain {rows[name].bits}-bit rounding error.",
        tries,
        bits=rows[name].bits,
    )


def _cause(key: str, seen: _Seen, text: str, remedies: tuple[str, ...], **evidence: Any) -> Cause:
    shared = seen.subject.sharing[seen.site.name]
    facts = {"site": seen.site.name, "tries": list(remedies), **evidence}
    if len(shared) > 1:
        facts["shared_with"] = [n for n in shared if n != seen.site.name][:8]
    return Cause(key, f"{seen.site.name}: {text}", facts, " or ".join(REMEDIES[r] for r in remedies))


# ---- of sites


def _is_of_the_grid(spec: QuantSpec | None) -> bool:
    """Whether the grid clips by definition: a symmetric one of 2 or 3 bits whose range comes from the extremes."""
    if spec is None or not isinstance(spec.format, IntFormat) or spec.format.bits > 3 or spec.fixed_range is not None:
        return False
    return spec.symmetry == "symmetric" and spec.method.name == "minmax"


def _clipping(seen: _Seen) -> Cause | None:
    v = seen.values
    if not v.clipped or v.clip_noise <= v.round_noise or _is_of_the_grid(seen.site.spec):
        return None
    share = v.clipped / v.count
    text = f"{share:.2%} of the values are clipped: they reach {v.low:.4g} to {v.high:.4g}, the grid {_grid(seen.row)}"
    return _cause("clipping", seen, text, ("minmax", "mse"), clipped=share, minimum=v.low, maximum=v.high)


def _too_wide(seen: _Seen) -> Cause | None:
    extent = seen.values.extent
    if not extent or extent >= _WIDE:  # nothing but zeros, as in an initial state, lies on any grid
        return None
    text = f"the values use {extent:.1%} of the grid's range: they reach {seen.values.low:.4g} to {seen.values.high:.4g}, the grid {_grid(seen.row)}"  # noqa: E501
    sharing = [seen.others[name] for name in seen.subject.sharing[seen.site.name] if name in seen.others]
    largest = max(sharing, key=lambda other: other.reach, default=seen.values)
    if seen.values.reach > _WIDE * largest.reach:
        return _cause("range_too_wide", seen, text, ("minmax", "16_bits"), extent=extent)
    text += f", which {largest.site.name} has as well, where values reach {largest.reach:.4g}"
    return _cause("range_too_wide", seen, text, ("16_bits",), extent=extent, larger=largest.site.name)


def _calibration(seen: _Seen) -> Cause | None:
    """Find the cause at a site inside an operator (a recurrent layer): compare the grid with the calibrated range."""
    bounds, encoding = calibrated_bounds(seen.site), seen.site.encoding
    if bounds is None or encoding is None or not isinstance(encoding.granularity, PerTensor):
        return None
    low, high = float(encoding.min), float(encoding.max)
    facts = {"minimum": bounds[0], "maximum": bounds[1]}
    text = f"calibration saw {bounds[0]:.4g} to {bounds[1]:.4g}, the grid holds {_grid(seen.row)}"
    if max(low - bounds[0], bounds[1] - high) > _CUT * (high - low):
        return _cause("clipping", seen, text, ("minmax", "mse"), **facts)
    extent = max(abs(bounds[0]), abs(bounds[1])) / max(abs(low), abs(high))
    if 0 < extent < _WIDE:
        return _cause("range_too_wide", seen, text, ("minmax", "16_bits"), extent=extent, **facts)
    return None


def _weight_channels(seen: _Seen) -> Cause | None:
    reach = seen.values.channel_reach
    encoding = seen.site.encoding
    if seen.site.role != "weight" or reach is None or encoding is None:
        return None
    if not isinstance(encoding.granularity, PerTensor):
        return None
    middle = _median(reach)
    ratio = float(reach.max()) / middle
    if ratio < _DISPARATE:
        return None
    rest = max(float(np.quantile(reach, 1 - _FEW, method="lower")), middle)  # all but a few channels lie below
    large = int((reach > _DISPARATE * rest).sum())
    lost = int(((reach > 0) & (reach < float(encoding.scale.max()) / 2)).sum())
    few = large > 0
    text = (
        f"one scale for {reach.size} channels whose largest is {ratio:.0f} times the median"
        + (f", {large} of them outliers" if few else "")
        + (f"; {lost} become zero" if lost else "")
    )
    key = "outlier_weight_channel" if few else "disparate_channels"
    return _cause(key, seen, text, ("per_channel", "equalize"), ratio=ratio, outliers=large, lost=lost)


def _activation_channels(seen: _Seen) -> Cause | None:
    reach = seen.values.channel_reach
    if seen.site.role not in ("input", "output") or reach is None:
        return None
    ratio = float(reach.max()) / _median(reach)
    if ratio < _DISPARATE:
        return None
    worst = int(reach.argmax())
    text = f"channel {worst} reaches {ratio:.0f} times the median channel, and all share one scale"
    tries = ("16_bits", _balance(seen))
    return _cause("outlier_channels", seen, text, tries, ratio=ratio, channel=worst)


def _samples(seen: _Seen) -> Cause | None:
    """Loud and soft sounds, bright and dark pictures: the soft ones have few steps, and with a logarithm they count as much."""
    reach = np.array(seen.values.sample_reach)
    if seen.site.role not in ("input", "output") or reach.size < _ENOUGH_SAMPLES:
        return None
    ratio = float(reach.max()) / _median(reach)
    if ratio < _DISPARATE:
        return None
    text = f"the largest sample reaches {ratio:.0f} times the median sample, and one grid holds all"
    return _cause("uneven_samples", seen, text, ("16_bits",), ratio=ratio)


def _positions(seen: _Seen) -> Cause | None:
    """Tokens of padding beside others, a bright spot in a dark picture."""
    reach = np.array(seen.values.position_reach)
    if reach.size < _ENOUGH_SAMPLES or (ratio := float(reach.max()) / _median(reach)) < _DISPARATE:
        return None
    text = f"the largest position reaches {ratio:.0f} times the median position, and one grid holds all"
    return _cause("uneven_positions", seen, text, ("16_bits",), ratio=ratio)


def _reciprocal(seen: _Seen) -> Cause | None:
    op = seen.reciprocals.get(seen.site.value)
    if op is None or not seen.values.root_mean_square:
        return None
    crest = seen.values.reach / seen.values.root_mean_square
    text = f"a reciprocal made by {op}: it reaches {seen.values.reach:.3g} where its divisor is small, {crest:.1f} times its root mean square, and one grid holds all"  # noqa: E501
    return _cause("reciprocal", seen, text, ("16_bits",), divides=op, ratio=crest)


def _join(seen: _Seen) -> Cause | None:
    """Coordinates beside probabilities: the grid has the steps of the largest."""
    maker = seen.op if seen.site.role == "output" else seen.subject.sim.graph.producer(seen.site.value)
    if maker is None or maker.name not in seen.errors or op_row(maker.type).kind != "merge":
        return None
    reach = sorted(r for r in seen.errors[maker.name].operand_reach.values() if r > 0)
    if len(reach) < 2 or (ratio := reach[-1] / reach[0]) < _DISPARATE:
        return None
    text = f"{maker.name} joins values that reach {reach[0]:.3g} with others that reach {reach[-1]:.3g}, and one grid holds all"
    return _cause("unlike_join", seen, text, ("16_bits",), ratio=ratio)


def _tails(seen: _Seen) -> Cause | None:
    size = seen.values.root_mean_square
    if seen.site.role not in ("input", "output") or not size or (seen.row.bits or 0) > 8 or seen.row.lsb is None:
        return None
    if (crest := seen.values.reach / size) < _TAIL:
        return None
    step = seen.row.lsb / size
    text = f"heavy tails: the largest value is {crest:.0f} times the root mean square, and a step is {step:.0%} of that"
    return _cause("heavy_tails", seen, text, ("16_bits", "mse"), ratio=crest)


def _difference(seen: _Seen) -> Cause | None:
    """A mean of squares minus the square of a mean, two outputs that nearly agree: the error stays, the signal goes."""
    for op, _ in seen.subject.sim.graph.consumers(seen.site.value) if not seen.site.is_stored else ():
        made = seen.errors.get(op.name)
        if op.type not in ("Sub", "Add") or made is None or not made.root_mean_square:
            continue
        ratio = seen.values.root_mean_square / made.root_mean_square
        if ratio >= _CANCELS:
            text = f"{op.name} leaves 1/{ratio:.0f} of it: a difference of nearly equal values keeps the error of both"
            return _cause("difference", seen, text, ("16_bits",), ratio=ratio, reader=op.name)
    return None


def _balance(seen: _Seen) -> str:
    """The remedy that balances channels: equalization between convolutions, smoothing before linear layers."""
    place = seen.site.channels.place
    return "equalize" if place is not None and place.axis < -1 else "smooth"


def _weight_inputs(seen: _Seen) -> Cause | None:
    reach = seen.values.input_reach
    if reach is None or not (alive := reach[reach > 0]).size or _weight_channels(seen) is not None:
        return None  # one large element stands in a row and in a column
    ratio, whole = float(reach.max()) / _median(reach), float(reach.max() / alive.min())
    text = f"its input channels share scales, and the largest is {ratio:.0f} times the median"
    if ratio < _DISPARATE:
        made, held = seen.layer.made_db, decibel(seen.values.noise)
        if whole < _DISPARATE or made is None or held is None or held - made < _ENLARGED:
            return None
        ratio = whole
        text = f"its input channels share scales, the largest is {whole:.0f} times the smallest, and large inputs meet the small ones: {held:.1f} dB here are {made:.1f} dB of the product"  # noqa: E501
    balance = "equalize" if seen.op.type.startswith("Conv") else "smooth"
    return _cause("disparate_inputs", seen, text, ("seq_mse", "gptq", balance), ratio=ratio)


def _bits(seen: _Seen) -> Cause | None:
    bits = seen.row.bits
    if bits is None or bits > _NARROW.get(seen.site.role, 7):
        return None
    weight = seen.site.role in _NARROW
    text = f"{bits} bits are {2**bits} steps"
    tries = ("8_bits", "seq_mse", "gptq") if weight else ("16_bits",)
    return _cause("few_bits", seen, text, tries, bits=bits)


def _codes(seen: _Seen) -> Cause | None:
    used, extent = seen.values.codes_used, seen.values.extent
    if used is None or used > _FEW_CODES or (extent is not None and extent < _WIDE):
        return None
    if seen.row.bits is not None and seen.row.bits > 8:
        return None
    text = f"99 % of the values lie on {used:.1%} of the grid, whose ends a few large ones set"
    tries = ("seq_mse", "per_channel") if seen.site.role == "weight" else ("16_bits", "mse")
    return _cause("few_codes", seen, text, tries, codes_used=used)


def _softmax(seen: _Seen) -> Cause | None:
    if seen.op.type not in ("Softmax", "LogSoftmax") or seen.site.role != "input" or seen.row.lsb is None:
        return None
    if seen.row.lsb < _SOFTMAX_STEP:
        return None
    text = f"a step of {seen.row.lsb:.3g} before the softmax changes a probability by {seen.row.lsb:.0%}"
    return _cause("softmax_input", seen, text, ("16_bits",), lsb=seen.row.lsb)


def _output_grid(seen: _Seen) -> Cause | None:
    if seen.site.role != "output" or not seen.subject.sim.graph.is_output(seen.site.value):
        return None
    text = "the model returns it: each rounding is an error of the output"
    return _cause("output_grid", seen, text, ("16_bits",), lsb=seen.row.lsb)


def _dead(seen: _Seen) -> Cause | None:
    reach = seen.values.channel_reach
    dead = 0 if reach is None else int((reach == 0).sum())
    if not dead or reach is None:
        return None
    text = f"{dead} of {reach.size} channels hold nothing but zeros"
    return _cause("dead_channels", seen, text, (), dead=dead)


_SITE_RULES: tuple[Rule, ...] = (
    _clipping, _too_wide, _weight_channels, _reciprocal, _join, _difference, _activation_channels, _bits, _codes, _softmax,
    _output_grid, _weight_inputs, _samples, _positions, _tails, _dead,
)  # fmt: skip


# ---- of layers


_REMEDY_OF_CHOICES = "16 bits for what is compared (step widen), or training, which moves the values apart"


def _choices(layer: LayerRow, errors: LayerErrors | None) -> Iterator[Cause]:
    """Experts, codes, groups, rows: a small error turns a choice between nearly equal values, and what follows is another."""
    if errors is None or not errors.changed:
        return
    share = errors.changed / errors.decided
    text = f"{layer.name}: {share:.1%} of its {errors.decided} choices differ from those of the float model"
    yield Cause("choice", text, {"changed": share, "choices": errors.decided, "tries": []}, _REMEDY_OF_CHOICES)


def choices_note(seen: Lockstep, noise: float | None) -> str:
    """What choices that differ from those of the float model cost; empty where they cost little.

    Estimates of single quantizers do not hold it: a choice has no derivative.

    Args:
        seen: of each operator.
        noise: of the outputs of the batches in which a choice changed, over their power.
    """
    without, kept = decibel(noise), decibel(seen.kept_ratio)
    if without is None or kept is None or kept - without < _CHOICES_COST:
        return ""
    turned = sorted((e for e in seen.layers.items() if e[1].changed), key=lambda e: -e[1].changed / e[1].decided)
    named = ", ".join(f"{name} ({e.changed / e.decided:.1%} of {e.decided})" for name, e in turned[:_NAMED])
    more = f" and {len(turned) - _NAMED} more" if len(turned) > _NAMED else ""
    return (
        f"choices that differ from those of the float model cost {kept - without:.1f} dB: with the same choices the outputs "
        f"of their batches are at {kept:.1f} dB, not {without:.1f} dB. They differ at {named}{more}. Remedy: {_REMEDY_OF_CHOICES}"
    )


def _of_layer(layer: LayerRow, op: Op, subject: Subject) -> Iterator[Cause]:
    made, arrived, after = layer.made_db, layer.arrived_db, layer.after_db
    if made is None or arrived is None or after is None:
        return
    facts = {"made_db": made, "arrived_db": arrived, "after_db": after}
    if op.type == "Add" and layer.sites and _in_stream(op, subject):
        text = f"{layer.name}: a residual sum rounds the stream again: {arrived:.1f} dB arrive, {after:.1f} dB leave"
        yield Cause("accumulating_residual", text, {**facts, "tries": ["16_bits"]}, REMEDIES["16_bits"])
    lost = arrived - after
    if op_row(op.type).kind == "norm" and lost > 3 and made > after + 3:
        text = f"{layer.name}: the normalization loses {lost:.1f} dB of what it reads"
        yield Cause("norm_input", text, {**facts, "tries": ["16_bits"]}, REMEDIES["16_bits"])
    elif layer.sites and made < MOST_DB and made > after + 6 and arrived < made:
        text = f"{layer.name}: made here {made:.1f} dB, arrived {arrived:.1f} dB: look at the layers before it"
        yield Cause("passes_on", text, facts, "")


def _in_stream(op: Op, subject: Subject) -> bool:
    """Whether a sum reads another sum's output directly, or a sum reads its."""
    graph = subject.sim.graph
    before = [graph.producer(value) for value in op.inputs if value is not None]
    after = [reader for value in op.outputs for reader, _ in graph.consumers(value)]
    return any(other is not None and other.type == "Add" for other in (*before, *after))


def _grid(row: SiteRow) -> str:
    return "" if row.grid is None else f"{row.grid['low']:.4g} to {row.grid['high']:.4g}"


def _median(reach: np.ndarray[Any, Any]) -> float:
    """Median over the channels that are not zero throughout."""
    alive = reach[reach > 0]
    return float(np.median(alive)) if alive.size else 1.0


Measured = tuple[float, float | None]
"""SQNR of the outputs in dB, and the metric."""


@dataclass(frozen=True)
class Adjustment:
    """Measures the gain of changes to the float model.

    Attributes:
        subject: the simulation; it is left as it is.
        batches: data to calibrate and to measure on.
        judged: what a simulation is judged by, with nothing measured.
        measure: (what it is judged by) -> the figures.
        clock: how much time is left; when it is over, no other change is begun.
    """

    subject: Subject
    batches: Sequence[Any]
    judged: Callable[[], Judged]
    measure: Callable[[Judged], Measured]
    clock: Clock

    def rows(self, layers: Sequence[LayerRow]) -> tuple[list[RemedyRow], list[str]]:
        """One row per remedy of the float model that the causes of ``layers`` suggest, and the reasons why others have none."""
        rows: list[RemedyRow] = []
        notes: list[str] = []
        asked = {name: _asking(name, layers) for name in METHODS}
        before: Measured | None = None
        for name, names in asked.items():
            if not names:
                continue
            if self.clock.over:
                notes.append(self.clock.left_out(f"{name} before the simulation"))
                continue
            try:
                after = self._with(name)
                if isinstance(after, str):
                    notes.append(f"{name} was not tried: {after}")
                    continue
                before = before or self._measured(self.subject.sim._float_copy())
            except BitwrightError as error:
                notes.append(f"{name} was not tried: {error.site}: {error.problem}")
                continue
            rows.append(RemedyRow(f"{name} before the simulation", names, before[0], after[0], before[1], after[1]))
        return rows, notes

    def _with(self, name: str) -> Measured | str:
        """The figures with a remedy, or the reason why it changes nothing."""
        sim = self.subject.sim
        if sim.repairs:
            return "repairs of the simulation are not part of its float model"
        model = sim._float_copy()
        providers = getattr(sim, "providers", None)
        report = METHODS[name](model, self.batches, sim.example(), providers)
        if not report.changed:
            refused = next(iter(report.refused), None)
            return "it changes nothing in this model" + ("" if refused is None else f" ({refused})")
        return self._measured(model)

    def _measured(self, model: Any) -> Measured:
        """The figures of a model, simulated as the subject is and calibrated on the data."""
        sim = self.subject.sim._again(model)
        sim.compute_encodings(self.batches, progress=False)
        new = open_subject(sim)

        def outputs(batch: Any, in_float: bool) -> Sequence[Any]:
            return (self.subject if in_float else new).outputs(batch, in_float)

        return self.measure(replace(self.judged(), subject=replace(new, outputs=outputs)))


def _asking(name: str, layers: Sequence[LayerRow]) -> tuple[str, ...]:
    """Layers with a cause that suggests a remedy."""
    return tuple(
        layer.name for layer in layers if any(name in cause.evidence.get("tries", ()) for cause in layer.causes)
    )


def _equalize(model: Any, batches: Sequence[Any], example: Any, providers: Any) -> Any:
    return equalize_model(model, dummy_input=example, data=batches, providers=providers, progress=False)


def _smooth(model: Any, batches: Sequence[Any], example: Any, providers: Any) -> Any:
    return smooth_model(model, batches, example, providers=providers, progress=False)


METHODS: dict[str, Callable[[Any, Sequence[Any], Any, Any], Any]] = {"equalize": _equalize, "smooth": _smooth}
"""Remedy -> what changes the model in place, and reports it."""


_WORTH = 0.1  # dB that a remedy must bring to be kept; less is luck
_NAMES = ("per_channel", "8_bits", "16_bits", "minmax", "mse", "seq_mse", "gptq")


@dataclass(frozen=True)
class Trials:
    """Inputs of the trials of remedies.

    Attributes:
        subject, model: the simulation, and its steps; ``None`` where it has none.
        batches, judged: data, and what is measured on it.
        values: what was seen at each site.
    """

    subject: Subject
    model: SimulatedModel | None
    batches: Sequence[Any]
    judged: Callable[[], Judged]
    values: Mapping[str, SiteValues]

    def __call__(
        self, analysis: Analysis, n: int, *, keep: bool = False, deadline: float | None = None, float_model: bool = True
    ) -> tuple[RemedyRow, ...]:
        """See :func:`try_remedies`."""
        return try_remedies(self, analysis, n, keep=keep, deadline=deadline, float_model=float_model)

    def measure(self, judged: Judged | None = None) -> tuple[float, float | None]:
        """SQNR of the outputs in dB, and the metric, of the simulation as it stands; or of another that is judged."""
        judged = judged or self.judged()
        for batch, labels in zip(self.batches, judged.labels, strict=True):
            judged.batch(batch, labels)
        metric = judged.whole.score(judged.named)
        if judged.function is not None:
            metric = float(judged.called("quantized").mean())
        sqnr = judged.output["sqnr_db"]
        assert sqnr is not None
        return sqnr, metric


def try_remedies(
    trials: Trials,
    analysis: Analysis,
    n: int = 3,
    *,
    keep: bool = False,
    deadline: float | None = None,
    float_model: bool = True,
) -> tuple[RemedyRow, ...]:
    """Measure the remedies suggested for the worst layers, one after the other.

    A remedy that brings at least 0.1 dB stays while the next layers are tried; of several for one layer the best does.

    Args:
        trials: the simulation and its data.
        analysis: whose causes are gone through.
        n: how many of its worst layers.
        keep: leave the simulation with the remedies that were kept; otherwise it is as it was.
        deadline: seconds after which no other remedy is begun; the one that runs then is finished.
        float_model: whether to try those of the float model as well, which take a simulation each.

    Returns:
        One row per remedy tried. Those of the float model (equalize, smooth) come last, each measured on a simulation of its
        own: see :mod:`bitwright.analysis.causes`. They are never kept, because they come before the simulation is made;
        they are begun first. What was suggested and not tried is in the notes of ``analysis``, with the reason.

    Raises:
        ConfigError: ``n`` or ``deadline`` is not positive.
        KeyboardInterrupt: Ctrl-C; the simulation is as it was.
    """
    if n < 1:
        raise ConfigError("try_remedies", f"{n} layers are none", "give at least 1")
    clock = Clock(deadline)
    adjustment = Adjustment(trials.subject, trials.batches, trials.judged, trials.measure, clock)
    with trials.subject.exclusive():
        adjusted, notes = adjustment.rows(analysis.worst(n) if float_model else ())
        restore = trials.subject.remember(parameters=True)
        done = False
        try:
            rows = _layers(trials, analysis.worst(n), notes, clock)
            done = True
        finally:
            if not (keep and done):
                restore()
    analysis.notes = tuple(dict.fromkeys((*analysis.notes, *notes)))
    return (*rows, *adjusted)


def _layers(trials: Trials, layers: Sequence[LayerRow], notes: list[str], clock: Clock) -> list[RemedyRow]:
    """Try the suggested remedies layer by layer; the simulation keeps the best."""
    rows: list[RemedyRow] = []
    now = None
    for layer in layers:
        if clock.over:
            names = [f"{remedy} at {site.name}" for remedy, site in _suggested(trials, layer)]
            notes += [clock.left_out(name) for name in names]
            continue
        now = now or trials.measure()
        tried, now = _layer(trials, layer, now, notes, clock)
        rows += tried
    return rows


def _layer(
    trials: Trials, layer: LayerRow, before: tuple[float, float | None], notes: list[str], clock: Clock
) -> tuple[list[RemedyRow], tuple[float, float | None]]:
    """Try the remedies suggested for one layer and keep the best."""
    rows: list[RemedyRow] = []
    best, again = before, None
    restore = trials.subject.remember(parameters=True)
    try:
        for remedy, site in _suggested(trials, layer):
            if clock.over:
                notes.append(clock.left_out(f"{remedy} at {site.name}"))
                continue
            try:
                if not _apply(trials, remedy, site):
                    continue
                after = trials.measure()
            except BitwrightError as error:
                notes.append(f"{remedy} was not tried at {site.name}: {error.problem}")
                continue
            finally:
                kept = trials.subject.remember(parameters=True)
                restore()
            rows.append(RemedyRow(f"{remedy} at {site.name}", (layer.name,), before[0], after[0], before[1], after[1]))
            if after[0] > best[0] + (_WORTH if again is None else 0):
                best, again = after, (kept, len(rows) - 1)
    except BaseException:
        restore()
        raise
    if again is not None:
        again[0]()
        rows[again[1]] = replace(rows[again[1]], kept=True)
    return rows, best


def _suggested(trials: Trials, layer: LayerRow) -> Iterator[tuple[str, Site]]:
    """``(remedy, site)``, each once, of causes in their order."""
    seen = set()
    for cause in layer.causes:
        names = [cause.evidence["site"]] if "site" in cause.evidence else layer.sites
        for name in names:
            site = trials.subject.sites[name]
            for remedy in cause.evidence.get("tries", ()):
                if remedy in _NAMES and site.enabled and (remedy, name) not in seen:
                    seen.add((remedy, name))
                    yield remedy, site


def _apply(trials: Trials, remedy: str, site: Site) -> bool:
    """Apply a remedy; returns whether it changed anything."""
    if remedy in ("seq_mse", "gptq"):
        return _choose(trials, remedy, site)
    return _SITE_REMEDIES[remedy](trials, site)


def _choose(trials: Trials, method: str, site: Site) -> bool:
    from bitwright.methods.rounding.table import choose_weights

    if trials.model is None:
        return False
    return bool(len(choose_weights(trials.model, trials.batches, method, {}, include=[site.op])))


def _with_bits(bits: int) -> Callable[[Trials, Site], bool]:
    def apply(trials: Trials, site: Site) -> bool:
        fmt = site.quantizer.spec.format
        if not isinstance(fmt, IntFormat) or fmt.bits >= bits:
            return False
        if site.is_stored:
            site.spec = replace(site.quantizer.spec, format=replace(fmt, bits=bits))
        else:
            site.quantizer.refine(bits, f"{bits} bits were tried as a remedy")
        return True

    return apply


def _per_channel(trials: Trials, site: Site) -> bool:
    spec = site.quantizer.spec
    if site.role != "weight" or not isinstance(spec.granularity, PerTensor):
        return False
    site.spec = replace(spec, granularity=PerChannel())
    return site.encoding is not None and site.encoding.scale.size > 1


def _minmax(trials: Trials, site: Site) -> bool:
    """The range of what was seen at all sites with this quantizer."""
    sharing = trials.subject.sharing[site.name]
    values = [trials.values[name] for name in sharing if name in trials.values]
    bounds = [(v.low, v.high) for v in values if v.count and (v.low or v.high)]
    bounds = bounds or [found for found in (calibrated_bounds(site),) if found is not None]
    encoding = site.encoding
    if encoding is None or not bounds or not isinstance(encoding.granularity, PerTensor):
        return False
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    spec = replace(site.quantizer.spec, fixed_range=None)
    site.quantizer.encoding = affine.encode(low, high, spec, encoding.granularity, site.name)
    return True


def _mse(trials: Trials, site: Site) -> bool:
    """Chosen again from the statistics of the calibration, where it took those that the method reads."""
    spec = replace(site.quantizer.spec, method=find_range_method("mse"))
    if spec == site.quantizer.spec:
        return False
    site.spec = spec
    return site.encoding is not None


_SITE_REMEDIES: dict[str, Callable[[Trials, Site], bool]] = {
    "16_bits": _with_bits(16),
    "8_bits": _with_bits(8),
    "per_channel": _per_channel,
    "minmax": _minmax,
    "mse": _mse,
}
