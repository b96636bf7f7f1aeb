"""AWQ: scales of input channels, searched by the output error that the quantized weights make.

A weight that multiplies a large activation does more harm when it is rounded. Multiplied by ``s > 1`` before rounding,
and its channel divided by ``s`` where it is made, it is rounded on a grid that is finer for it. ``s`` follows the mean
magnitude of the channel, ``s = mean|x| ** alpha``; ``alpha`` is searched per group of layers that read one value.

Reference: Lin et al. 2023, arXiv:2306.00978, section 3.2. Other than in the paper's code, the error is that of the linear
layers' own outputs, so that no block has to be run again. Beyond the paper: values of attention whose heads serve several
query heads. The search of weight ranges that the paper's code adds is :mod:`bitwright.methods.rounding.seq_mse`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.core.graph.operators import weight_axes
from bitwright.core.numerics.formats import FLOAT32_SCALE
from bitwright.core.numerics.granularity import PerBlock
from bitwright.core.numerics.ranges import on_grid
from bitwright.core.numerics.spec import Preset, QuantSpec, RangeMethod
from bitwright.core.placement.config import make_rules
from bitwright.core.placement.place import place
from bitwright.core.placement.rules import Rules
from bitwright.core.simulation.calibration import samples_in
from bitwright.core.simulation.float_model import FloatModel, SetParam, Undo
from bitwright.errors import ConfigError, checks_arguments
from bitwright.export.files.atomic import FinishedLayers
from bitwright.export.files.manifest import Fingerprint
from bitwright.methods.front_end import front_end_of
from bitwright.methods.layers import (
    Array,
    Bar,
    Check,
    Group,
    Layer,
    Layers,
    Refused,
    Reversible,
    log_refused,
    no_bar,
    rescaling,
    sift,
)
from bitwright.methods.scaling.rotate import rotatable_heads
from bitwright.methods.scaling.smooth import linear_groups, observe, refuse_no_data
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular, counted

logger = logging.getLogger("bitwright")

#: bytes of what the layers read that are kept, unless told otherwise
MEMORY_BUDGET = 1 << 30
#: rows below which the error of a layer says little
_FEWEST_ROWS = 32


# -------------------------------------------------------------------------------------------- mathematics


def channel_scales(magnitude: Array, alpha: float) -> Array:
    """``magnitude ** alpha``, divided by ``sqrt(max * min)`` of itself.

    Args:
        magnitude: mean of \\|x\\| per channel, shape [C], >= 0. A channel without any gets the smallest scale of the others.
        alpha: 0 scales nothing, 1 makes all channels alike.

    Returns:
        Shape [C], float64, > 0.

    Example:
        >>> channel_scales(np.array([16.0, 1.0, 0.0]), 0.5)
        array([2. , 0.5, 0.5])

    Reference: arXiv:2306.00978, eq. 4; the division is the paper's code's.
    """
    x = np.asarray(magnitude, np.float64)
    live = x > 0
    if not live.any():
        return np.ones_like(x)
    s = np.where(live, x, x[live].min()) ** alpha
    return np.asarray(s / np.sqrt(s.max() * s.min()))


class Inputs:
    """Statistics of a layer's input that determine its output error.

    The sum of squares of ``x @ d.T`` over all rows ``x`` is ``trace(d H d.T)`` with the second moment ``H``, which takes
    the place of the rows as soon as there are more rows than channels. Where ``H`` needs more room than is given, some
    rows are kept instead, evenly spaced in every part.

    Args:
        channels: of a row.
        room: how many rows' worth of float32 numbers may be kept.
        parts: how often :meth:`add` will be called.
    """

    def __init__(self, channels: int, room: int, parts: int) -> None:
        self.total, self.rows = np.zeros(channels), 0
        self._room, self._parts, self._part = room, parts, 0
        self._moment: Array | None = None
        self._kept: list[Array] = []

    def add(self, rows: Array) -> None:
        """Take rows in, shape [n, channels], float32."""
        self.rows += len(rows)
        self.total += np.abs(rows).sum(axis=0, dtype=np.float64)
        if 2 * len(self.total) > self._room:  # no room for H
            self._kept.append(self._some(rows))
        elif self.rows <= len(self.total):
            self._kept.append(rows.astype(np.float32))
        else:
            for part in (*self._kept, rows):
                wide = part.astype(np.float64)
                self._moment = wide.T @ wide + (0.0 if self._moment is None else self._moment)
            self._kept = []

    def _some(self, rows: Array) -> Array:
        """Draw the rows that are due after the number of parts seen."""
        due = [self._room * min(part, self._parts) // self._parts for part in (self._part, self._part + 1)]
        self._part += 1
        share = min(len(rows), due[1] - due[0])
        return rows[np.arange(share) * len(rows) // max(1, share)].astype(np.float32)

    @property
    def magnitude(self) -> Array:
        """Mean of \\|x\\| per channel, shape [channels], over all rows that came."""
        return self.total / max(1, self.rows)

    def energy(self, delta: Array) -> float:
        """Sum of squares of ``x @ delta.T`` over the rows; ``delta`` has shape [outputs, channels]."""
        found = 0.0 if self._moment is None else float(((delta @ self._moment) * delta).sum())
        return found + sum(float(np.square(delta @ rows.T).sum()) for rows in self._kept)


@dataclass(frozen=True)
class Reader:
    """A linear layer that reads the channels of a group.

    Attributes:
        weight: shape [outputs, inputs].
        inputs: what it reads.
        fake_quantize: weight of that shape -> its values on the grid it would have.
        spread: scales per channel -> per input.
    """

    weight: Array
    inputs: Inputs
    fake_quantize: Callable[[Array], Array]
    spread: Callable[[Array], Array] = lambda scales: scales

    def error(self, scales: Array) -> float:
        """Sum of squares of the output's error over the data, with input channels multiplied by ``scales``."""
        s = self.spread(scales)
        return self.inputs.energy(self.fake_quantize(self.weight * s) / s - self.weight)


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        alpha: the best; 0 where scaling does not help.
        scales: of the channels, shape [C]; ones where ``alpha`` is 0.
        before, after: power of the outputs' error over that of the outputs, all layers together.
    """

    alpha: float
    scales: Array = field(repr=False)
    before: float
    after: float


def search_scales(
    magnitude: Array, readers: Sequence[Reader], alphas: int = 20, *, powers_of_two: bool = False
) -> Found:
    """Find the ``alpha`` with the smallest output error.

    Args:
        magnitude: mean of \\|x\\| per channel, shape [C].
        readers: the layers that read the channels.
        alphas: steps of the grid ``0, 1/alphas, ..., 1``.
        powers_of_two: round the scales to such, which what is stored of a layer's scales takes along unchanged.

    Reference: arXiv:2306.00978, eq. 5.
    """

    power = sum(reader.inputs.energy(reader.weight) for reader in readers)

    def error(scales: Array) -> float:
        return sum(reader.error(scales) for reader in readers) / power if power > 0 else 0.0

    ones = np.ones(len(magnitude))
    before = error(ones)
    best = Found(0.0, ones, before, before)
    for i in range(1, alphas + 1):
        scales = channel_scales(magnitude, i / alphas)
        if powers_of_two:
            scales = np.exp2(np.rint(np.log2(scales)))
        after = error(scales)
        if after < best.after:
            best = Found(i / alphas, scales, before, after)
    return best


# ---------------------------------------------------------------------------------------------- on a model


@dataclass(frozen=True)
class Scaled:
    """A group of layers and what was found for it."""

    group: Group
    found: Found

    def __str__(self) -> str:
        errors = f"output error {self.found.before:.3g} -> {self.found.after:.3g}"
        return f"{self.group}: alpha {self.found.alpha:.2f}, {errors} of the output's power"


@dataclass
class AwqReport(Tabular, Reversible):
    """Result of AWQ.

    Attributes:
        scaled: groups whose channels were scaled.
        untouched: groups for which no scale was better than none.
        refused: norms and linear layers that begin no group, with the reasons.
        samples: how many were measured.
        judged: power of the error of the model's outputs over that of the outputs, with all weights rounded, without the
            scales and with them; ``None`` where there were none to judge. No group is scaled where the latter is larger.
    """

    _rows = "scaled"
    _also = ("gain",)

    scaled: tuple[Scaled, ...] = ()
    untouched: tuple[Scaled, ...] = ()
    refused: tuple[Refused, ...] = ()
    samples: int = 0
    judged: tuple[float, float] | None = None
    _undos: list[Undo] = field(default_factory=list, repr=False)

    @property
    def changed(self) -> bool:
        """Whether channels were scaled."""
        return bool(self.scaled)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The scaled ones."""
        return tuple(item.group for item in self.scaled)

    @property
    def factors(self) -> tuple[Array, ...]:
        """The divisors of the channels of each scaled group."""
        return tuple(item.found.scales for item in self.scaled)

    @property
    def gain(self) -> float:
        """Geometric mean over all groups of the error after over the error before."""
        found = [item.found for item in (*self.scaled, *self.untouched)]
        ratios = [max(f.after, 1e-12) / f.before for f in found if f.before > 0]
        return float(np.exp(np.mean(np.log(ratios)))) if ratios else 1.0

    def __str__(self) -> str:
        lines = [
            f"{counted(len(self.scaled), 'group')} scaled on {self.samples} samples, output error x {self.gain:.2f}; "
            f"{len(self.untouched)} better as they are, {counted(len(self.refused), 'layer')} without a partner"
        ]
        if self.judged is not None:
            kept = "" if self.scaled else ", so that NOTHING is scaled"
            lines.append(f"  error of the model's outputs {self.judged[0]:.3g} -> {self.judged[1]:.3g}{kept}")
        lines += [f"  scaled     {item}" for item in self.scaled]
        lines += [f"  untouched  {item}" for item in self.untouched]
        lines += [f"  left       {refused}" for refused in self.refused]
        return "\n".join(lines)


def weight_rules(
    weight: str | Preset | QuantSpec,
    config_file: str | Path | dict[str, Any] | Rules | None = None,
    quant_scheme: str | RangeMethod | None = None,
) -> Rules:
    """The rules of a simulation with these weights.

    Raises:
        ConfigError: an unknown preset or scheme, or a configuration that cannot be read.
    """
    preset = Preset(weight, None) if isinstance(weight, QuantSpec) else weight
    return make_rules(quant_scheme, preset, config_file)


def awq(
    view: FloatModel,
    batches: Sequence[Any],
    rules: Rules,
    check: Check | None = None,
    *,
    alphas: int = 20,
    memory_budget: int = MEMORY_BUDGET,
    bar: Bar = no_bar,
    finished: FinishedLayers | None = None,
) -> AwqReport:
    """Scale the channels between norms or linear layers and the linear layers after them, where that lowers the error.

    The model is changed at the end, in one step: what stops the search leaves it as it was.

    Args:
        view: the model; changed in place, its function stays.
        batches: samples of real data.
        rules: of the simulation that is to be made; they say on which grid each weight will lie.
        check: says what is wrong with the model's function, or ``None``; without it, values of attention are left.
        alphas: steps of the grid.
        memory_budget: bytes that may be kept of what the layers read.
        bar: shows batches, groups and checks.
        finished: keeps the scales of every group, from which an interrupted search goes on.

    Returns:
        The report; ``report.undo()`` gives the model back as it was.

    Raises:
        ConfigError: ``alphas`` is below 1, or ``memory_budget`` too small.
        CalibrationError: no batch, or an activation that is NaN or infinite.
    """
    if alphas < 1:
        raise ConfigError("alphas", f"it is {alphas}", "give the number of steps of the grid; 20 is the usual choice")
    if not batches:
        refuse_no_data("awq")
    layers = Layers(view.graph(), view)
    specs = _weight_specs(layers, rules)
    groups, refused = linear_groups(layers)
    groups, why_not = _searchable([*groups, *(value_groups(layers) if check else ())], specs)
    if not groups:
        return AwqReport(refused=(*refused, *why_not))  # nothing to measure
    searched = _searched(view, layers, groups, specs, batches, alphas, memory_budget, bar, finished)

    def divide(some: Sequence[Scaled]) -> Undo:
        return view.edit(rescaling(view, [x.group for x in some], [x.found.scales for x in some])[0])

    kept, rejected = sift([item for item in searched if item.found.alpha > 0], divide, check, bar)
    treated = {layer.op for item in searched for layer in item.group.producers}
    reasons = {line.op: line for line in (*refused, *why_not) if line.op not in treated}
    refused = [*reasons.values(), *(Refused(x.group.producers[0].op, reason) for x, reason in rejected)]
    log_refused(refused, "scaled")
    untouched = [item for item in searched if item.found.alpha == 0]
    judged = _judged(view, layers, specs, lambda: divide(kept), batches) if kept else None
    if judged is not None and judged[1] > judged[0]:
        logger.info("not scaled: the outputs of the model would lose, %.3g -> %.3g of their power", *judged)
        untouched, kept = [*untouched, *kept], []
    samples = sum(map(samples_in, batches))
    return AwqReport(tuple(kept), tuple(untouched), tuple(refused), samples, judged, [divide(kept)])


def _searched(
    view: FloatModel, layers: Layers, groups: Sequence[Group], specs: Mapping[str, QuantSpec], batches: Sequence[Any],
    alphas: int, memory_budget: int, bar: Bar, finished: FinishedLayers | None,
) -> list[Scaled]:  # fmt: skip
    """The scales of every group, those that are finished already taken from there."""
    keys = (
        [""] * len(groups) if finished is None else _keys(view, layers, groups, specs, batches, (alphas, memory_budget))
    )
    known = {i: found for i, key in enumerate(keys) if (found := _kept(finished, key)) is not None}
    wanted = [group for i, group in enumerate(groups) if i not in known]
    seen = _observed(view, layers, groups, wanted, batches, memory_budget, bar) if wanted else {}
    for i, group in enumerate(bar(groups, "searching scales")):
        if i not in known:
            known[i] = found = _search(view, layers, group, specs, seen, alphas)
            if finished is not None:
                errors = np.array([found.alpha, found.before, found.after])
                finished.put(keys[i], {"scales": found.scales, "alpha and errors": errors})
    return [Scaled(group, known[i]) for i, group in enumerate(groups)]


def _keys(
    view: FloatModel, layers: Layers, groups: Sequence[Group], specs: Mapping[str, QuantSpec], batches: Sequence[Any],
    settings: tuple[int, int],
) -> list[str]:  # fmt: skip
    """A key per group of everything that its scales depend on."""
    seen = Fingerprint()
    seen.update((settings, batches, dict(specs), layers.graph.plain()))
    for value in layers.graph.values.values():
        if value.kind == "param":
            seen.update((value.name, view.param(value.param or value.name)))
    return [
        hashlib.sha256(f"awq {seen} {[layer.op for layer in group.layers]}".encode()).hexdigest() for group in groups
    ]


def _kept(finished: FinishedLayers | None, key: str) -> Found | None:
    """The scales of a group that an earlier run found."""
    arrays = None if finished is None else finished.get(key)
    if arrays is None:
        return None
    alpha, before, after = arrays["alpha and errors"].tolist()
    return Found(alpha, arrays["scales"], before, after)


_JUDGED = 4  # batches that the judge runs


def _judged(
    view: FloatModel, layers: Layers, specs: Mapping[str, QuantSpec], scale: Callable[[], Undo], batches: Sequence[Any]
) -> tuple[float, float]:
    """Relative error power of the model's outputs, without and with the scales.

    Each layer's own error does not tell how those of several add up, least of all on grids whose scales are powers of two.
    """
    outputs = [name for name in layers.graph.outputs if layers.graph.values[name].is_float]

    def run(batch: Any) -> list[Array]:
        (captured,) = view.capture(outputs, [batch])
        return [np.asarray(array, np.float64) for name in outputs for array in captured[name]]

    def noise(batch: Any, wanted: Sequence[Array]) -> float:
        restore = _rounded(view, layers, specs)
        try:
            found = run(batch)
        finally:
            restore()
        return sum(float(np.square(one - other).sum()) for one, other in zip(found, wanted, strict=True))

    power, plain, scaled = 0.0, 0.0, 0.0
    for batch in batches[:_JUDGED]:
        wanted = run(batch)
        power += sum(float(np.square(array).sum()) for array in wanted)
        plain += noise(batch, wanted)
        undo = scale()
        try:
            scaled += noise(batch, wanted)
        finally:
            undo()
    return plain / (power or 1.0), scaled / (power or 1.0)


def _rounded(view: FloatModel, layers: Layers, specs: Mapping[str, QuantSpec]) -> Undo:
    """Round the weights of all layers to nearest."""
    edits: dict[str, SetParam] = {}
    for layer in layers.of.values():
        if layer.op in specs and layer.kind == "layer":
            W = np.asarray(view.param(layer.weight))
            edits[layer.weight] = SetParam(layer.weight, on_grid(W, specs[layer.op], layer.weight))
    return view.edit(list(edits.values()))


def _weight_specs(layers: Layers, rules: Rules) -> dict[str, QuantSpec]:
    """Layer -> spec of its weight; without layers whose weight stays in float."""
    sites = place(layers.graph, rules).sites.values()
    return {site.op: site.spec for site in sites if site.role == "weight" and site.port == 1 and not site.inner}


def value_groups(layers: Layers) -> list[Group]:
    """The values of every attention with the layer that reads them, head by head."""
    found = []
    for heads in rotatable_heads(layers):
        value, output = heads.value, heads.output
        assert value is not None and output is not None
        if output.axes.inputs % value.axes.outputs == 0:
            repeat = output.axes.inputs // value.axes.outputs
            found.append(Group((value,), ((output, repeat),), (), value.axes.outputs, heads.value_dim))
    return found


def _searchable(groups: Sequence[Group], specs: Mapping[str, QuantSpec]) -> tuple[list[Group], list[Refused]]:
    """Groups whose scales can be searched, and the reasons of the others."""
    good, refused = [], []
    for group in groups:
        reason = _why_not(group, specs)
        if reason is None:
            good.append(group)
        else:
            refused.append(Refused(group.producers[0].op, reason))
    return good, refused


def _why_not(group: Group, specs: Mapping[str, QuantSpec]) -> str | None:
    for layer, _ in group.consumers:
        if layer.type not in ("Gemm", "MatMul"):
            return f"{layer.op} ({layer.type}) reads it, and is not a linear layer"
    if not any(layer.op in specs for layer, _ in group.consumers):
        return "the weights of what reads it stay in float"
    for layer in group.producers:
        if layer.op in specs and not _own_scales(layer, specs[layer.op]):
            return (
                f"the weight of {layer.op} is quantized {specs[layer.op].describe()}, so that scales of its output "
                "channels would change its own rounding"
            )
    return None


def _own_scales(layer: Layer, spec: QuantSpec) -> bool:
    """Whether every output channel has its own scales, which absorb a factor of the channel."""
    held = spec.granularity
    axes = held.channel_axes if isinstance(held, PerBlock) else (getattr(held, "axis", None),)
    return weight_axes(layer.type, layer.attrs, 1, 2)[0] in axes and None not in axes


def _observed(
    view: FloatModel, layers: Layers, groups: Sequence[Group], wanted: Sequence[Group], batches: Sequence[Any],
    memory_budget: int, bar: Bar,
) -> dict[str, Inputs]:  # fmt: skip
    """Collect the inputs of every layer of the groups ``wanted``, by value name; the room is divided among all groups."""
    widths = {_input(layers, layer): layer.axes.inputs for group in groups for layer, _ in group.consumers}
    row = 4 * sum(widths.values())
    room = memory_budget // max(1, row)
    if room < _FEWEST_ROWS:
        raise ConfigError(
            "memory_budget",
            f"{memory_budget} bytes hold {room} rows of what the layers read",
            f"give {_FEWEST_ROWS * row} bytes at least",
        )
    read = dict.fromkeys(_input(layers, layer) for group in wanted for layer, _ in group.consumers)
    seen = {value: Inputs(widths[value], room, len(batches)) for value in read}
    shown = bar(batches, "measuring activations")
    observe(view, dict.fromkeys(seen, -1), shown, lambda value, rows: seen[value].add(rows), "awq")
    return seen


def _input(layers: Layers, layer: Layer) -> str:
    return str(layers.graph.op(layer.op).inputs[0])


def _search(
    view: FloatModel, layers: Layers, group: Group, specs: Mapping[str, QuantSpec], seen: Mapping[str, Inputs],
    alphas: int,
) -> Found:  # fmt: skip
    readers, magnitudes = [], []
    for layer, repeat in group.consumers:
        inputs = seen[_input(layers, layer)]
        magnitudes.append(group.gathered(inputs.magnitude, repeat).mean(axis=1))
        if layer.op in specs:
            readers.append(_reader(view, layer, inputs, specs[layer.op], group, repeat))
    # scales that are powers of two, or multiples of few bits, take no other factor along without rounding other codes
    coarse = any(
        layer.op in specs
        and specs[layer.op].scale_format != FLOAT32_SCALE
        and specs[layer.op].scale_format.number is None
        for layer in group.producers
    )
    return search_scales(np.mean(magnitudes, axis=0), readers, alphas, powers_of_two=coarse)


def _reader(view: FloatModel, layer: Layer, inputs: Inputs, spec: QuantSpec, group: Group, repeat: int) -> Reader:
    W = np.asarray(view.param(layer.weight))
    turned = not layer.axes.outputs_first

    def quantized(matrix: Array) -> Array:
        # float32 as the simulation sees it
        result = on_grid(matrix.T if turned else matrix, spec, layer.weight).astype(np.float64)
        return result.T if turned else result

    matrix = np.asarray(W.T if turned else W, np.float64)
    return Reader(matrix, inputs, quantized, lambda scales: group.spread(scales, repeat))


@checks_arguments
def awq_model(
    model: Any,
    data: Iterable[Any],
    dummy_input: Any = None,
    *,
    weight: str | Preset | QuantSpec = "w4a16",
    config_file: str | Path | dict[str, Any] | Rules | None = None,
    quant_scheme: str | RangeMethod | None = None,
    alphas: int = 20,
    memory_budget: int = MEMORY_BUDGET,
    cache_dir: str | Path | None = None,
    providers: Any = None,
    progress: bool = True,
) -> AwqReport:
    """Scale channels so that the weights which read large activations lose less in rounding (AWQ), in place.

    For weights of 4 bits or fewer. AWQ applies to norms and linear layers that feed linear layers, gates (SwiGLU) included, and
    to the values of attention. For each group it searches the exponent of the scales at which the outputs of the layers with
    quantized weights differ least from the float outputs. The model computes the same function.

    Args:
        model: changed in place.
        data: batches (feeds) of real data, as ``compute_encodings`` takes them; 128 samples are enough.
        dummy_input: the example input; the first batch by default.
        weight: what the weights will be quantized to: a preset, its name, or the spec of the weights alone.
        config_file, quant_scheme: rules and range method of the simulation, as for :class:`QuantizationSimModel`.
        alphas: steps of the search from 0 to 1.
        memory_budget: bytes kept of what the layers read; 1 GiB by default.
        cache_dir: folder that keeps the scales of every group: a call with the same model, data and options takes them from
            there.
        providers: as for :func:`equalize_model`.
        progress: show a progress bar on a terminal.

    Returns:
        The report; of a module ``report.undo()`` gives it back as it was. The change of an ONNX model is final.

    Raises:
        ConfigError: ``alphas`` is below 1, ``memory_budget`` too small, or an unknown preset.
        CalibrationError: no batch, or an activation that is NaN or infinite.

    Reference: Lin et al. 2023, arXiv:2306.00978.
    """
    batches = list(data)
    if not batches:
        refuse_no_data("awq")
    rules = weight_rules(weight, config_file, quant_scheme)
    example = batches[0] if dummy_input is None else dummy_input
    opened = front_end_of(model).open_model(model, None, example, "awq_model", providers)
    report = awq(
        opened.view, batches, rules, opened.changed, alphas=alphas, memory_budget=memory_budget,
        bar=partial(progress_bar, enabled=progress),
        finished=None if cache_dir is None else FinishedLayers(cache_dir),
    )  # fmt: skip
    opened.finish(report)
    return report
