"""Choose ranges and places of activation quantizers: least squared error, and inputs of layers only.

:func:`activation_ranges` chooses the range of least squared error where the rules keep everything that was seen.

:func:`layer_inputs` quantizes only what layers with stored weights read and leaves the rest in float. That is what W8A8
means for transformers: the products with weights, nearly all of the work, run on integers, while residual sums, gates,
rotary positions and the products inside the attention, which lose far more accuracy than they cost time, do not. Some integer
kernels return codes only, as those of convolutions in ONNX Runtime: outputs of layers that are faster on them stay quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from bitwright.core.graph.cost import KernelTimes, is_image, size
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.core.simulation.simulation import Simulation
from bitwright.core.simulation.sites import Site
from bitwright.export.targets import Target, find_target
from bitwright.methods.attention import has_attention
from bitwright.methods.layers import holds_layer_weight
from bitwright.tables import Tabular


@dataclass(frozen=True)
class RangesReport(Tabular):
    """Sites whose range method was changed.

    Attributes:
        method: its name.
        sites: those whose ranges were chosen anew.
    """

    _rows = "sites"

    method: str
    sites: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether a range was changed."""
        return bool(self.sites)

    @property
    def summary(self) -> str:
        """One line."""
        return f"{len(self.sites)} activations with ranges by {self.method}"

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  {name}" for name in self.sites)])


def activation_ranges(sim: Simulation, calibrate: Callable[[Any], None], *, method: str = "mse") -> RangesReport:
    """Choose ranges by another method for the activations with min-max ranges.

    It is done from the statistics of the last calibration where these tell (:func:`keep_histograms`), otherwise by another.

    Sites with another method, a fixed range, a format of more than 8 bits, or a frozen encoding stay as they are.

    Args:
        sim: calibrated; changed in place.
        calibrate: finds its encodings; called where it is needed.
        method: a row of ``RANGE_METHODS``.

    Raises:
        ConfigError: there is no such method.
    """
    chosen = find_range_method(method)
    quantizers = [q for q in _with_plain_bounds(sim) if chosen.name != "minmax"]
    for quantizer in quantizers:
        quantizer.spec = replace(quantizer.spec, method=chosen)
    if any(quantizer.encoding is None for quantizer in quantizers):  # its statistics did not tell
        calibrate(sim)
    return RangesReport(chosen.name, tuple(q.name for q in quantizers))


def keep_histograms(sim: Simulation, but: Collection[str] = ()) -> None:
    """Let the next calibration collect the statistics that :func:`activation_ranges` reads.

    Args:
        sim: the simulation; changed in place.
        but: sites that will be in float.
    """
    for quantizer in _with_plain_bounds(sim):
        quantizer.keeps_histogram = quantizer.name not in but


def _with_plain_bounds(sim: Simulation) -> list[Quantizer]:
    """The quantizers of narrow activations with min-max ranges."""
    found = {
        id(site.quantizer): site.quantizer
        for site in sim.quantizers.values()
        if site.role in ("input", "output") and site.enabled and not site.frozen
    }
    return [q for q in found.values() if _has_plain_bounds(q)]


def _has_plain_bounds(quantizer: Quantizer) -> bool:
    spec = quantizer.spec
    narrow = isinstance(spec.format, IntFormat) and spec.format.bits <= 8
    return narrow and spec.method.name == "minmax" and not quantizer.is_fixed and not quantizer.derived


@dataclass(frozen=True)
class LayerInputsReport(Tabular):
    """Sites that stay quantized, and those that were disabled.

    Attributes:
        kept: sites of values that a layer reads, or inside a recurrent layer.
        in_float: sites that were switched off.
        why_not: why there is none.
    """

    _rows = "in_float"

    kept: tuple[str, ...]
    in_float: tuple[str, ...]
    why_not: str = "layers read every quantized activation"

    @property
    def changed(self) -> bool:
        """Whether a site was switched off."""
        return bool(self.in_float)

    @property
    def summary(self) -> str:
        """One line."""
        if not self.in_float:
            return f"no change: {self.why_not}"
        return f"{len(self.in_float)} activations between layers in float, {len(self.kept)} that layers read quantized"

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  in float  {name}" for name in self.in_float)])


def layer_inputs(
    sim: Simulation, *, only_with_attention: bool = False, export_target: str | Target | None = None
) -> LayerInputsReport:
    """Switch off the quantizers of activations that no layer with a stored weight reads.

    A layer reads what it is handed, and what was only moved on the way to it: reshaped, transposed, sliced.
    Activations of more than 8 bits, or of a floating-point format, are left as they are. A quantizer that several
    sites share stays when a layer reads one of them.

    Args:
        sim: the simulation; changed in place.
        only_with_attention: leave models without an attention as they are.
        export_target: row of :data:`bitwright.export.targets.TARGETS`. Outputs of layers whose kernels return codes only there
            stay quantized, and all activations where the target computes whole networks on codes.

    Raises:
        ConfigError: there is no such target.
    """
    row = None if export_target is None else find_target(export_target)
    why_not = _why_not(sim, only_with_attention, row)
    if why_not is not None:
        return LayerInputsReport(tuple(site.name for site in _narrow(sim)), (), why_not)
    off = _between(sim, row)
    read = set() if row is None else {id(site.quantizer) for site in _needed(sim)}
    for site in off:
        if row is not None and id(site.quantizer) in read:
            site.quantizer.release(f"{row.name} computes what reads it faster in float")
        else:
            site.quantizer.release("no layer with a stored weight reads it")
    return LayerInputsReport(tuple(site.name for site in _narrow(sim)), tuple(site.name for site in off))


def between_layers(
    sim: Simulation, *, only_with_attention: bool = False, export_target: str | Target | None = None
) -> tuple[str, ...]:
    """The sites that :func:`layer_inputs` would switch off."""
    row = None if export_target is None else find_target(export_target)
    return () if _why_not(sim, only_with_attention, row) else tuple(site.name for site in _between(sim, row))


def _why_not(sim: Simulation, only_with_attention: bool, target: Target | None) -> str | None:
    """Why no activation is to be in float; ``None`` where some may be."""
    if target is not None and not target.mixes:
        return f"{target.name} computes whole networks on codes"
    return "the model has no attention" if only_with_attention and not has_attention(sim.graph) else None


def _narrow(sim: Simulation) -> list[Site]:
    """Sites of activations of at most 8 bits."""
    return list(filter(_is_narrow_activation, sim.quantizers.values()))


def _between(sim: Simulation, target: Target | None) -> list[Site]:
    """Sites of narrow activations that no layer on integer kernels reads, nor makes on a kernel that returns codes only."""
    narrow, gains = _narrow(sim), {} if target is None else _gains_on_codes(sim, target)
    on_grid = {site.value for site in narrow if site.role == "output"}
    made = {_rounded(sim.graph, sim.graph.op(name).outputs[0], on_grid) for name, gain in gains.items() if gain}
    read = _needed(sim, {name for name, gain in gains.items() if not gain})
    needed = {id(site.quantizer) for site in (*read, *(site for site in narrow if site.value in made))}
    return [site for site in narrow if id(site.quantizer) not in needed]


def _gains_on_codes(sim: Simulation, target: Target) -> dict[str, bool]:
    """Layers whose integer kernels in ``target`` return codes only -> whether these are faster than float ones."""
    graph, times = sim.graph, target.kernel_times
    weights = {site.op for site in sim.quantizers.values() if site.enabled and site.role == "weight"}
    layers = (op for op in graph.ops if op.type in target.code_results and op.name in weights)
    return {op.name: times is None or _gains(graph, op, times, weights) for op in layers}


def _gains(graph: Graph, op: Op, times: KernelTimes, layers: Collection[str]) -> bool:
    """Whether ``op`` takes less time on codes, with the conversions of its input and its output.

    Layers before and behind it are taken to hold codes, other operators floats. A convolution of images in float converts
    on both sides in any case, as its kernel has a layout of its own.
    """
    in_float, on_codes = times.layer(graph, op)
    images = is_image(graph, op.outputs[0])
    read, made = str(op.inputs[0]), op.outputs[0]
    for value, beside_layer in ((read, _made_by(graph, read, layers)), (made, _read_by(graph, made, layers))):
        conversion = size(graph, value) * times.conversion
        in_float += conversion * (images or beside_layer)
        on_codes += conversion * (not beside_layer)
    return on_codes < in_float


def _made_by(graph: Graph, value: str, layers: Collection[str]) -> bool:
    """Whether a layer makes ``value``, apart from movement and from operators that are fused into the layer."""
    while (maker := graph.producer(value)) is not None and maker.name not in layers:
        if (read := _carried(graph, maker)) is None:
            return False
        value = read
    return maker is not None


def _read_by(graph: Graph, value: str, layers: Collection[str]) -> bool:
    """Whether only layers read ``value``, apart from movement and from operators that are fused into its maker."""
    _, value = graph.follow(value, lambda op: op.name not in layers and _carried(graph, op) is not None)
    return not graph.is_output(value) and all(reader.name in layers for reader, _ in graph.consumers(value))


def _carried(graph: Graph, op: Op) -> str | None:
    """The value that ``op`` moves, clamps or adds a constant to; ``None`` if it does something else."""
    read = [value for _, value in op.sources() if not graph.values[value].is_static]
    carries = op_row(op.type).kind == "movement" or op.type == "Add" or op.type in TRAITS["clamp"]
    return read[0] if carries and len(read) == 1 else None


def _rounded(graph: Graph, value: str, on_grid: Collection[str]) -> str:
    """``value``, or what the operators behind it that are fused into its layer make of it, where that is rounded."""
    while value not in on_grid and (reader := graph.sole_consumer(value)) is not None:
        if sum(not graph.values[v].is_static for _, v in reader.sources()) > 1:
            break
        value = reader.outputs[0]
    return value


def _needed(sim: Simulation, in_float: Collection[str] = ()) -> Iterator[Site]:
    """Sites of weights, of values inside operators, and of inputs of layers with weights but for those ``in_float``."""
    sites = sim.quantizers.values()
    layers = {site.op for site in sites if holds_layer_weight(sim.graph, site.op, site.role, site.port)} - {*in_float}
    read = {value for name in layers for value in sim.graph.op(name).inputs if value is not None}
    # a value that was only moved (heads put together again after an attention) lies on the grid of another's site
    grids = {sim.plan.shared[value] for value in read if value in sim.plan.shared}
    for site in sites:
        of_layer = _layer_of(sim, site) in layers and site.role != "output"
        if of_layer or site.role == "weight" or site.inner is not None:
            yield site
        elif site.value in read or site.name in grids:
            yield site


def _layer_of(sim: Simulation, site: Site) -> str:
    """The operator that reads ``site``; for a bias, the layer before the Add."""
    return sim.quantizers[site.follows[1]].op if site.follows else site.op


def _is_narrow_activation(site: Site) -> bool:
    if not site.enabled or site.role == "weight":
        return False
    fmt = site.quantizer.spec.format
    return isinstance(fmt, IntFormat) and (site.quantizer.derived or fmt.bits <= 8)
