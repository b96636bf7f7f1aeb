"""Changes for the kernels of a runtime: first convolutions in float where that is faster, 7-bit weights where sums saturate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

from bitwright.core.graph.cost import KernelTimes, Layouts
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.simulation.sites import Site
from bitwright.errors import ConfigError, ExportError, close_matches
from bitwright.export.targets import DEFAULT_TARGET, SlowStem, find_target
from bitwright.tables import Tabular

if TYPE_CHECKING:
    from bitwright.compare.saturation import LayerSums, SaturationReport
    from bitwright.core.simulation.quantizer import Quantizer

REPAIRS = ("saturation",)
_SATURATES = "ort_x64_avx2"  # the profile whose pairs of products saturate
_BITS = 7
_BATCHES = 4  # that sums are taken apart on
_ROUNDS = 4  # a narrower weight changes what later layers read; in the last round whole layers are narrowed
_WHY = "pairs of products saturate on CPUs without dot-product instructions"


@dataclass(frozen=True)
class SaturationRepair(Tabular):
    """Result of ``repair="saturation"``.

    Attributes:
        narrowed: weights with 7 bits in some channels or in all.
        found: sums before.
        left: sums afterwards.
        before, after: accuracy of the simulation, whose sums never saturate: the metric, or without one the signal-to-noise
            ratio of the outputs to the float model in dB.
        saturated, repaired: the same as the profile ``ort_x64_avx2`` computes the file, before and after: as ONNX Runtime does on
            a CPU without VNNI. ``None`` for files of other targets, and where nothing was narrowed.
        note: why these could not be computed.
        channels: weight -> how many of its output channels have 7 bits, and of how many.
    """

    _rows = "narrowed"

    narrowed: tuple[str, ...]
    found: SaturationReport
    left: SaturationReport
    before: float
    after: float
    saturated: float | None = None
    repaired: float | None = None
    note: str = ""
    channels: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def to_text(self) -> str:
        """A few lines."""
        if not self.narrowed:
            return "saturation: no layer saturates on CPUs without VNNI"
        there = "" if self.saturated is None else f"; on CPUs without VNNI {self.saturated:.4g} and {self.repaired:.4g}"
        each = (
            name if some == of else f"{name} in {some} of {of} channels" for name, (some, of) in self.channels.items()
        )
        return (
            f"saturation: 7-bit weights in {len(self.narrowed)} of {len(self.found.layers)} layers "
            f"({', '.join(each)}); accuracy {self.before:.4g} before, {self.after:.4g} after{there}"
            f"{self.note and f'; on CPUs without VNNI: {self.note}'}"
        )

    __str__ = to_text


def check_repair(repair: str | None) -> None:
    """Refuse an unknown value of the option ``repair``.

    Raises:
        ConfigError: with close matches.
    """
    if repair is not None and repair not in REPAIRS:
        problem = f"{repair!r} is not a repair{close_matches(str(repair), REPAIRS)}"
        raise ConfigError("repair", problem, f"use one of {', '.join(map(repr, REPAIRS))}, or leave it out")


def repair_saturation(
    sim: Any, batches: Iterable[Any], rate: Callable[[Any], float], **options: Any
) -> SaturationRepair:
    """Give 7 bits to the output channels of weights in which pairs of products saturate on ``batches``.

    The range of a channel stays, its step doubles. With 7 bits no pair can saturate: ``2 * 255 * 64 < 2 ** 15``. Weights with
    one scale have them in all channels.

    Args:
        sim: calibrated, of either front end.
        batches: at most four are run.
        rate: accuracy of what a metric takes: the simulated module, or a session.
        options: of the export that change the file.
    """
    few = list(islice(batches, _BATCHES))
    count, computed_as = sim._in_integer_kernels(few, **options)
    there = options.get("target", DEFAULT_TARGET) == DEFAULT_TARGET
    before, found = rate(sim._metric_target), count()
    deployed, note = _deployed(computed_as, rate) if found.guilty and there else ([], "")
    left, done = _narrowed(sim, found, count)
    if not done:
        return SaturationRepair((), found, left, before, before)
    if deployed:
        more, note = _deployed(computed_as, rate)
        deployed += more
    saturated, repaired = deployed if len(deployed) == 2 else (None, None)
    after = rate(sim._metric_target)
    sizes = {layer.site: layer.of for layer in found.layers}
    channels = {site: (len(narrow), sizes[site]) for site, narrow in done.items()}
    return SaturationRepair(tuple(done), found, left, before, after, saturated, repaired, note, channels)


def _narrowed(
    sim: Any, found: SaturationReport, count: Callable[[], SaturationReport]
) -> tuple[SaturationReport, dict[str, tuple[int, ...]]]:
    """Narrow weights until no pair saturates; returns the last count, and the channels with 7 bits by weight."""
    left, done = found, dict[str, tuple[int, ...]]()
    for turn in range(_ROUNDS):
        guilty = [each for each in left.layers if each.touched and each.site in sim.quantizers]
        guilty = [each for each in guilty if len(done.get(each.site, ())) < each.of]
        if not guilty:
            break
        for layer in guilty:
            done[layer.site] = _narrow(
                sim.quantizers[layer.site].quantizer, layer, done.get(layer.site, ()), turn == _ROUNDS - 1
            )
        left = count()
    return left, done


def _narrow(quantizer: Quantizer, layer: LayerSums, had: tuple[int, ...], last: bool) -> tuple[int, ...]:
    """Give 7 bits to more output channels, those in which pairs saturate, or to all of them; returns all that have them now.

    All channels keep their range, and what lies beyond it is clipped, so that no pair can saturate. A channel alone gets a step
    of twice the size in the format of 8 bits, where values that its range clipped have codes of more than 7 bits.
    """
    new = [channel for channel in layer.channels if channel not in had]
    channels = tuple(sorted({*had, *new}))
    why = f"{_BITS} bits in {len(channels)} of {layer.of} channels, in which {_WHY}"
    if new and not last and len(channels) < layer.of and quantizer.coarsen(new, _BITS, why):
        return channels
    quantizer.refine(_BITS, _WHY)
    return tuple(range(layer.of))


def _deployed(
    computed_as: Callable[[str], AbstractContextManager[Any]], rate: Callable[[Any], float]
) -> tuple[list[float], str]:
    """Accuracy as a CPU computes the file whose pairs saturate: a list of one, or of none, and why there is none."""
    try:
        with computed_as(_SATURATES) as target:
            return [rate(target)], ""
    except ExportError as error:  # a metric runs the model on lengths that the file does not have
        return [], f"not computed, {error.problem}"


# what brings an image into the form that the first convolution reads
_PREPARES = frozenset(("Add", "Sub", "Mul", "Div", "Cast", "Identity", "Transpose", "Reshape", "Pad"))


@dataclass(frozen=True)
class StemReport(Tabular):
    """Result of :func:`leave_stem_in_float`.

    Attributes:
        layers: operators that compute in float now, in execution order.
        in_float: sites that were switched off.
    """

    _rows = "in_float"

    layers: tuple[str, ...] = ()
    in_float: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.layers:
            return "no first convolution is faster in float"
        return f"in float, because faster so: {', '.join(self.layers)}"


def leave_stem_in_float(sim: Any, target: str = "ort_cpu") -> StemReport:
    """Switch off the quantizers of the first convolutions of large images, where ``target`` computes them faster in float.

    Integer kernels of ONNX Runtime on CPUs copy the pixels of an image of three channels byte by byte, and depthwise ones of few
    channels leave most of a vector empty: both take two to four times as long as float ones. The value after the last of these
    layers is quantized as before. Where it is pooled or added to, integer kernels after it find the channels of their images
    first instead of last, which may cost more than is saved: then nothing is left in float.

    Args:
        sim: a simulation of either front end; changed in place. Other presets than 8-bit weights and activations, images below
            the size that the target names, and everything after the stem are left as they are.
        target: row of :data:`bitwright.export.targets.TARGETS`.

    Returns:
        The layers and the sites switched off; the coverage of the simulation names the reason beside each site.

    Raises:
        ConfigError: there is no such target.
    """
    row = find_target(target)
    if row.slow_stem is None:
        return StemReport()
    ops, last = _stem(sim.graph, row.slow_stem)
    inside = _sites_of(sim, ops, last)
    off = [site for site in inside if site.enabled]
    if not _computed_on_8_bits(off) or _shared_beyond(sim, inside) or _lost_after(sim.graph, ops, row.kernel_times):
        return StemReport()
    for site in off:
        site.quantizer.release(f"{row.name} computes the first convolutions of large images faster in float")
    return StemReport(tuple(op.name for op in ops if op.type == "Conv"), tuple(site.name for site in off))


def _stem(graph: Graph, slow: SlowStem) -> tuple[list[Op], str]:
    """The operators that are faster in float, and the value that the last of them makes."""
    for name in graph.inputs:
        found, value = graph.follow(name, lambda op: _prepares(graph, op))
        first = graph.sole_consumer(value)
        if first is None or not _first(graph, first, slow):
            continue
        after, last = graph.follow(first.outputs[0], lambda op: _activation(op) or _narrow_depthwise(graph, op, slow))
        return [*found, first, *after], last
    return [], ""


def _prepares(graph: Graph, op: Op) -> bool:
    """Whether ``op`` brings the input of the model into the form that the network reads: its scale, its axes and their order."""
    others = [value for port, value in op.sources() if port and not graph.values[value].is_static]
    return op.calls == 1 and op.type in _PREPARES and not others


def _first(graph: Graph, op: Op, slow: SlowStem) -> bool:
    """Whether ``op`` is a convolution of an image of few channels, of a size worth two conversions."""
    image, made = _image(graph, op), graph.values[op.outputs[0]].shape
    return image is not None and image[1] <= slow.channels and prod(made[1:]) >= slow.elements


def _narrow_depthwise(graph: Graph, op: Op, slow: SlowStem) -> bool:
    """Whether ``op`` is a depthwise convolution whose kernel on integers is slow."""
    image = _image(graph, op)
    if image is None or prod(image[1:]) < slow.elements:
        return False
    return op.attrs.get("group", 1) == image[1] and 1 < image[1] <= slow.depthwise_channels


def _image(graph: Graph, op: Op) -> tuple[int, ...] | None:
    """The shape of what a convolution of images with a stored weight reads; ``None`` of other operators."""
    if op.type != "Conv" or op.calls > 1 or None in op.inputs[:2]:
        return None
    data, weight = (graph.values[str(name)] for name in op.inputs[:2])
    return data.shape if len(data.shape) == 4 and weight.is_static else None


def _activation(op: Op) -> bool:
    return op.type in TRAITS["activation"] and op.calls == 1


def _sites_of(sim: Any, ops: list[Op], last: str) -> list[Site]:
    """The sites of the stem: what its operators read, and what all but the last of them make."""
    names = {op.name for op in ops}
    values = {value for op in ops for value in (*op.inputs, *op.outputs) if value is not None} - {last}
    return [site for site in sim.quantizers.values() if site.op in names and site.value in values]


def _computed_on_8_bits(sites: list[Site]) -> bool:
    """Whether integer kernels of 8 bits would compute between these sites: activations are quantized too, all of them so."""
    formats = [site.quantizer.spec.format for site in sites if not site.quantizer.derived]
    narrow = all(isinstance(fmt, IntFormat) and fmt.bits <= 8 for fmt in formats)
    return narrow and any(site.role == "input" for site in sites)


def _lost_after(graph: Graph, ops: list[Op], times: KernelTimes | None) -> bool:
    """Whether the kernels after the stem lose more by the layout of what it makes in float than it saves."""
    if times is None:
        return False
    layouts, stem = Layouts(graph), {op.name for op in ops}
    saved = sum(codes - in_float for in_float, codes in (times.layer(graph, op) for op in ops))
    rows = graph.values[ops[0].outputs[0]].shape[0]
    before, after = (
        layouts.time(layouts.moved(where), times, rows) for where in (lambda op: True, lambda op: op.name not in stem)
    )
    return after - before > saved


def _shared_beyond(sim: Any, sites: list[Site]) -> bool:
    """Whether a quantizer of ``sites`` serves other sites too, as that of a weight which two layers have."""
    names, quantizers = {site.name for site in sites}, {id(site.quantizer) for site in sites}
    return any(id(site.quantizer) in quantizers and site.name not in names for site in sim.quantizers.values())
