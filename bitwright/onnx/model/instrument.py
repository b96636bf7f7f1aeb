"""Instrument a model to observe its tensors: reductions beside them, and outputs out of bodies.

A :class:`Tap` is one tensor with the quantizer that watches it; an :class:`Instrument` adds what a tap reads to a model.

Minima and maxima pass over NaN, so something has to look for it. A sum does, at the price of a pass over the tensor. Yet a
convolution of finite numbers is finite unless it overflows, and that the bounds of its input rule out: no partial sum
is larger than the number of products times the largest weight times the largest input. So a tensor needs no pass of its own
where operators of this kind make it of tensors whose bounds are known and that were found finite themselves
(:func:`finite_proofs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.constant_channels import ChannelWatch, channels_within
from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.core.numerics import statistics
from bitwright.core.numerics.granularity import PerTensor
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.errors import ModelError
from bitwright.export.files.onnx_file import all_nodes, let_go
from bitwright.export.qdq.forms import Builder, Place, after, before
from bitwright.onnx.model.data import Feeds

Array = NDArray[Any]
_SKIPPED = "bitwright.skipped"  # of a stack of iterations: some of them do not make the tensor
_PIXELS = 4  # of either axis of an image that are looked at first
_SCALARS: tuple[tuple[str, ir.DataType, Any, str], ...] = (
    ("ReduceMin", ir.DataType.FLOAT, np.float32(np.inf), "ReduceMin"),
    ("ReduceMax", ir.DataType.FLOAT, np.float32(-np.inf), "ReduceMax"),
    ("Size", ir.DataType.INT64, np.int64(0), "ReduceSum"),
    ("ReduceSum", ir.DataType.FLOAT, np.float32(0), "ReduceSum"),
    ("ReduceSumSquare", ir.DataType.FLOAT, np.float32(0), "ReduceSum"),
)  # operator, its type, its value where nothing ran, how the iterations of a loop are joined


@dataclass(eq=False)
class Tap:
    """One tensor and the quantizer that watches it.

    Attributes:
        quantizer: gets the statistics.
        value: of the main graph: the tensor, or what carries it out of a body (after :meth:`settle`).
        times: how many sites of the quantizer see this tensor; each counts.
        leading: axes that loops put in front of the tensor's own.
        scalars: minimum, maximum and size, of the main graph; empty where the tensor itself is fetched.
        total: its sum, which tells whether it holds NaN; ``None`` where ``finite`` does. Where ``squares``, its sum of
            squares, which tells that too, and how large its elements are.
        finite: what else shows that it holds none.
        floor: the least value that the operator before it can return; the minimum is one of a part of the tensor then, which
            is that of all where it is this value.
        bring_out: makes the value that carries a reduced tensor out of its body, and counts the axes in front.
        inside: whether the tensor stands in a body, where no elements may also mean that the body did not run.
        watches: what the sites show of their channels.
        axis, channels: axis of the channels, counted from the end, and their minima and maxima; samples may be left in front,
            axes of length one after. Empty where the tensor itself is looked at, or stands in a body.
        least: of a tensor that is fetched and has ``channels``, what no element was below in the last batch; ``None`` where
            some were not finite.
        sampled: whether the minima are those of a few pixels: a channel whose maximum is above them is not constant, and one
            whose maximum is the least value of the tensor is.
        pooled: the maxima, where a pool takes them, which the runtime has in its own layout of images, too.
        pixels: the few pixels; ``None`` of a tensor without, or so small that it is looked at whole.
    """

    quantizer: Quantizer
    value: ir.Value
    times: int = 1
    leading: int = 0
    scalars: tuple[ir.Value, ...] = ()
    total: ir.Value | None = None
    squares: bool = False
    finite: Magnitude | None = None
    floor: float | None = None
    bring_out: Callable[[], tuple[ir.Value, int]] | None = None
    inside: bool = False
    watches: list[ChannelWatch] = field(default_factory=list)
    axis: int = -1
    channels: tuple[ir.Value, ...] = ()
    least: float | None = None
    sampled: bool = False
    pooled: ir.Value | None = None
    pixels: ir.Value | None = None

    def settle(self) -> None:
        """Reduce a tensor after its body, since a loop would store it for all iterations."""
        if self.bring_out is not None:
            self.value, self.leading = self.bring_out()
            self.bring_out = None

    @property
    def followed(self) -> bool:
        """Whether further data can change the channel statistics."""
        return (bool(self.channels) or not self.scalars) and any(watch.wanted for watch in self.watches)

    @property
    def cheap(self) -> bool:
        """Whether observing channels costs almost nothing, by maxima that are computed anyway."""
        shape = self.value.shape
        return bool(self.channels and self.scalars) and (
            self.sampled or shape is not None and (len(shape) <= 2 or _is_image(self.value))
        )

    @property
    def unordered(self) -> bool:
        """Whether the order of the tensor's elements is irrelevant."""
        return isinstance(self.quantizer.spec.granularity, PerTensor)

    def observe_channels_of(self, x: Array) -> None:
        """Observe the channels of the tensor itself."""
        for watch in self.watches:
            watch.observe(x)

    def observe_channels(self, ends: Sequence[Array], least: float | None) -> bool:
        """Take minima and maxima per channel, or maxima alone; those of a tensor of no elements are none.

        Args:
            ends: the bounds.
            least: no element is below this; ``None`` where that is not known.

        Returns:
            Whether that was enough to tell which channels are still constant.
        """
        if not ends[-1].size or self.quantizer.frozen or not self.followed:
            return True
        if least is None:
            return False
        *lo, hi = (end.reshape(-1, end.shape[self.axis]) for end in ends)
        top = hi.max(0)
        if not lo and any(least < value and top[i] == value for i, value in self._constants()):
            return False
        seen = channels_within(lo[0].min(0) if lo else np.full_like(top, least), top)
        if self.sampled and lo and any(watch.would_keep(seen, least) for watch in self.watches):
            return False
        for watch in self.watches:
            watch.add(seen)
        return True

    def _constants(self) -> Iterator[tuple[int, float]]:
        """Channels that are constant so far at any of the sites, and their value."""
        for watch in self.watches:
            if watch.seen is not None:
                yield from zip(watch.seen.index.tolist(), watch.seen.value.tolist(), strict=True)

    def is_least(self, value: float) -> bool:
        """Whether every channel that is constant so far holds ``value``."""
        return all(constant == value for _, constant in self._constants())

    def note_empty(self) -> None:
        """Record an empty tensor."""
        if not self.inside:
            self.quantizer.empty += self.times

    def observe(self, x: Array) -> None:
        """Give the tensor to the quantizer."""
        if self.quantizer.frozen:
            return
        if self.leading and self.value.meta.get(_SKIPPED):
            x, self.leading = taken(x, self.value, self.leading), 1
        if x.size == 0:
            self.note_empty()
            return
        if self.scalars or not self.channels:
            self.observe_channels_of(x)
        before = self._excluded()
        self._observe(x)
        self.least = self.lowest if before == self._excluded() else None

    @property
    def lowest(self) -> float:
        """A lower bound of the finite elements that the quantizer has seen."""
        seen = self.quantizer.statistics
        if not isinstance(seen, statistics.MinMax | statistics.Histogram):
            return -np.inf
        return float(statistics.bounds_of(seen).lo.min())

    def _excluded(self) -> int:
        """Number of non-finite elements that the quantizer has seen."""
        seen = self.quantizer.statistics
        if not isinstance(seen, statistics.MinMax | statistics.Histogram):
            return 0
        bounds = statistics.bounds_of(seen)
        return int((bounds.nan_count + bounds.inf_count).sum())

    def _observe(self, x: Array) -> None:
        parts: Iterable[Array] = (x,)
        if self.leading and not self.unordered:
            parts = x.reshape(-1, *x.shape[self.leading :])
        for part in parts:
            if self.times == 1:
                self.quantizer.observe(part)
                continue
            granularity = self.quantizer.spec.granularity
            granularity.param_shape(part.shape, self.quantizer.name)
            seen = statistics.measure(self.quantizer.needs, part, granularity)
            for _ in range(self.times):
                self.quantizer.observe_statistics(seen)


class Instrument:
    """Adds outputs and reductions for tensors to a model, and opens sessions on some of them."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.builder = Builder(model)
        self._owners = {
            graph: node
            for node in all_nodes(model.graph)
            for attribute in node.attributes.values()
            if attribute.type == ir.AttributeType.GRAPH
            for graph in (attribute.as_graph(),)
        }
        self._first = next(iter(model.graph), None)
        self._axes: dict[tuple[int, ...], ir.Value] = {}

    def owner(self, graph: ir.Graph) -> ir.Node | None:
        """The node that ``graph`` is a body of; ``None`` for the main graph."""
        return self._owners.get(graph)

    def tap(
        self,
        quantizer: Quantizer,
        value: ir.Value,
        graph: ir.Graph,
        axis: int | None = None,
        finite: Magnitude | None = None,
    ) -> Tap:
        """Create the tap of ``value`` in ``graph``, with the nodes that lift it into the main graph.

        Args:
            axis: of its channels, counted from the end, where they are to be looked at.
            finite: what shows that it holds no NaN, where something does.
        """
        if not is_reducible(quantizer, value):
            return self._tap_whole(quantizer, value, graph, axis)
        tap = Tap(quantizer, value, finite=finite, squares=quantizer.needs == "energy")
        if graph is self.model.graph:  # in a body it would cost much at every step
            self._add_pixels(tap)
            if axis is not None:
                self._add_channels(tap, axis)
        else:  # its scalars come out; the tensor itself only if it is asked for
            tap.inside = True
            tap.bring_out = partial(self.lift, value, graph, np.zeros(0, np.float32), None)
        place = self.right_after(value, graph)
        found = []
        chosen = list(_SCALARS[:3])
        if tap.squares or finite is None:
            chosen.append(_SCALARS[4 if tap.squares else 3])
        for op, dtype, neutral, merge in chosen:
            source, at = self._source(tap, op, place)
            attributes = {} if op == "Size" else {"keepdims": 0}
            scalar = self.builder.emit(at, op, [source], f"{value.name}_{op}", dtype, **attributes)
            scalar.shape = ir.Shape([])
            found.append(self.lift(scalar, graph, np.asarray(neutral), merge)[0])
        tap.scalars, tap.total = tuple(found[:3]), found[3] if found[3:] else None
        return tap

    def _tap_whole(self, quantizer: Quantizer, value: ir.Value, graph: ir.Graph, axis: int | None) -> Tap:
        """The tap of a tensor that is fetched as a whole."""
        outer, leading = self.lift(value, graph, np.zeros(0, _numpy_type(value)), None)
        tap = Tap(quantizer, outer, leading=leading, inside=graph is not self.model.graph)
        if axis == -3 and outer is value and tap.unordered and value.dtype == ir.DataType.FLOAT:
            self._add_pixels(tap)
            if tap.pixels is not None:  # else to look at the tensor itself costs nothing
                self._add_channels(tap, axis)
        return tap

    def _source(self, tap: Tap, op: str, place: Place) -> tuple[ir.Value, Place]:
        """Source and position of a scalar of a tensor."""
        part = tap.value
        if op == "ReduceMax" and tap.pooled is not None:
            part = tap.pooled
        elif op == "ReduceMin" and tap.floor is not None and tap.pixels is not None:
            part = tap.pixels
        return (part, place) if part is tap.value else (part, after(_producer(part)))

    def _add_pixels(self, tap: Tap) -> None:
        """A few pixels of every channel, by a pool of windows of one pixel: in the runtime's own layout of images, too."""
        if _is_image(tap.value):
            shape = tap.value.shape
            assert shape is not None
            steps = [-(-int(n) // _PIXELS) for n in shape[2:]]  # type: ignore[arg-type]
            if max(steps) > 1:
                place, name = self.right_after(tap.value, self.model.graph), f"{tap.value.name}_pixels"
                tap.pixels = self.builder.emit(place, "MaxPool", [tap.value], name, ir.DataType.FLOAT)
                tap.pixels.shape = None
                for key, lengths in (("kernel_shape", [1, 1]), ("strides", steps)):
                    _producer(tap.pixels).attributes.add(ir.AttrInt64s(key, lengths))
                tap.floor = _floor(tap.value)

    def _add_channels(self, tap: Tap, axis: int) -> None:
        """Bounds of channels over the axes after them, one after the other in front; of features, over all axes."""
        value, rank = tap.value, 1 - axis  # of what a convolution makes
        if value.shape is not None:
            rank = len(value.shape)
        axes = tuple(range(axis + 1, 0)) or tuple(range(rank - 1))
        if not axes or (value.shape is None and axis == -1):
            return
        place, floats = self.right_after(value, self.model.graph), ir.DataType.FLOAT
        tap.axis = axis
        for op in ("ReduceMin", "ReduceMax"):
            name = f"{value.name}_{op}_channels"
            if op == "ReduceMax" and axis == -3 and _is_image(value):
                end = tap.pooled = self.builder.emit(place, "GlobalMaxPool", [value], name, floats)
            else:
                source = value
                if op == "ReduceMin" and axis == -3 and tap.pixels is not None and _is_image(value):
                    source, place, tap.sampled = tap.pixels, after(_producer(tap.pixels)), True
                operands = [source, self._constant_axes(axes)]
                end = self.builder.emit(place, op, operands, name, floats, keepdims=int(axis != -1))
            end.shape = None
            tap.channels += (end,)

    def look_whole(self, tap: Tap) -> None:
        """Compute minima from all pixels from now on."""
        if tap.scalars and tap.floor is not None:
            _producer(tap.scalars[0]).replace_input_with(0, tap.value)
            tap.floor = None
        if tap.sampled:
            _producer(tap.channels[0]).replace_input_with(0, tap.value)
            tap.sampled = False

    def drop(self, values: Sequence[ir.Value]) -> None:
        """Remove main graph nodes that compute ``values`` without other readers, since the runtime would run them."""
        for value in values:
            node = value.producer()
            if node is not None and not value.uses():
                self.model.graph.remove(node, safe=True)

    def _constant_axes(self, axes: tuple[int, ...]) -> ir.Value:
        if axes not in self._axes:
            self._axes[axes] = self.builder.initializer("axes", np.asarray(axes, np.int64))
        return self._axes[axes]

    def join(self, columns: Iterable[Sequence[ir.Value]]) -> list[ir.Value]:
        """Concatenate scalars into one vector per column, so that the number of outputs stays small."""
        joined = []
        for column in filter(None, columns):
            place, name = self.model.graph.append, str(column[0].name)
            dtype = _type_of(column[0])
            several = self.builder.emit(place, "SequenceConstruct", column, f"{name}_several", dtype)
            several.type, several.shape = ir.SequenceType(ir.TensorType(dtype)), None
            vector = self.builder.emit(
                place, "ConcatFromSequence", [several], f"{name}_joined", dtype, axis=0, new_axis=1
            )
            vector.shape = ir.Shape([len(column)])
            joined.append(vector)
        return joined

    def right_after(self, value: ir.Value, graph: ir.Graph) -> Place:
        """The position right after ``value``, where it is still in the cache."""
        node = value.producer()
        if node is not None and node.graph is graph:
            return after(node)
        first = next(iter(graph), None)
        return graph.append if first is None else before(first)

    def lift(self, value: ir.Value, graph: ir.Graph, neutral: Array, merge: str | None) -> tuple[ir.Value, int]:
        """``value`` as a value of the main graph, and the number of axes that loops prepend.

        A branch that is not taken yields ``neutral``; iterations are joined by the operator ``merge``, or stacked. Entries of a
        stack have one shape: iterations that do not take the branch are NaN throughout, which :func:`taken` leaves out.
        """
        leading = 0
        skipped = self._is_skipped_in_loops(graph, merge)
        neutral = _absent(value, neutral, skipped)
        while graph is not self.model.graph:
            owner = self._owners[graph]
            # ONNX Runtime leaves one of two outputs of a body unwritten when they are the same value
            if value.producer() is None or value.graph is not graph or value.is_graph_output():
                value = self.builder.emit(
                    self.right_after(value, graph), "Identity", [value], f"{value.name}_seen", _type_of(value)
                )
            graph.outputs.append(value)
            dtype = _type_of(value)
            if owner.op_type == "If":
                self._neutral_branches(owner, graph, neutral, dtype)
            elif owner.op_type == "Scan":
                _extend_scan(owner)
            owner.resize_outputs(len(owner.outputs) + 1)
            outer = owner.outputs[-1]
            outer.name = self.builder.names.value(f"{value.name}_out")
            outer.type = ir.TensorType(dtype)
            assert owner.graph is not None
            value, graph = outer, owner.graph
            if owner.op_type in ("Loop", "Scan"):
                if merge is None:
                    leading += 1
                else:
                    value = self.builder.emit(after(owner), merge, [outer], f"{outer.name}_all", dtype, keepdims=0)
                    value.shape = ir.Shape([])
        if skipped:
            value.meta[_SKIPPED] = True
        return value, leading

    def _is_skipped_in_loops(self, graph: ir.Graph, merge: str | None) -> bool:
        """Whether a graph is a branch of an If that iterations of the loop around it may not take, which are stacked."""
        branch = False
        while merge is None and graph is not self.model.graph:
            owner = self._owners[graph]
            if owner.op_type in ("Loop", "Scan"):
                return branch
            branch = branch or owner.op_type == "If"
            assert owner.graph is not None
            graph = owner.graph
        return False

    def _neutral_branches(self, owner: ir.Node, taken: ir.Graph, neutral: Array, dtype: ir.DataType) -> None:
        for attribute in owner.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH and attribute.as_graph() is not taken:
                branch = attribute.as_graph()
                node = ir.Node(
                    "",
                    "Constant",
                    [],
                    [ir.AttrTensor("value", ir.Tensor(neutral))],
                    name=self.builder.names.node("none"),
                )
                node.outputs[0].name = self.builder.names.value("none")
                node.outputs[0].type = ir.TensorType(dtype)
                branch.append(node)
                branch.outputs.append(node.outputs[0])

    def open(self, wanted: Sequence[ir.Value], opener: Any) -> Any:
        """A session of the model that also returns ``wanted``; the model is as before afterwards."""
        graph = self.model.graph
        count = len(graph.outputs)
        there = set(graph.outputs)
        graph.outputs.extend([value for value in dict.fromkeys(wanted) if value not in there])
        try:
            return opener(self.model)
        finally:
            graph.outputs[count:] = []  # del would leave their marks as outputs

    def sizing(self, values: Sequence[ir.Value], opener: Any) -> Any:
        """A session that returns the number of elements of each value, and nothing else."""
        graph = self.model.graph
        sizes = [
            self.builder.emit(self.right_after(v, graph), "Size", [v], f"{v.name}_elements", ir.DataType.INT64)
            for v in values
        ]
        for size in sizes:
            size.shape = ir.Shape([])
        outputs = list(graph.outputs)
        graph.outputs.clear()
        graph.outputs.extend(sizes)
        try:
            return opener(self.model)
        finally:
            graph.outputs.clear()
            graph.outputs.extend(outputs)
            for size in sizes:
                node = size.producer()
                assert node is not None
                graph.remove(node, safe=True)

    def symbols(self, feeds: Feeds) -> dict[str, int]:
        """Lengths of the named axes of inputs."""
        return lengths_of(self.model, feeds)


def lengths_of(model: ir.Model, feeds: Feeds) -> dict[str, int]:
    """Lengths of the named axes of a model's inputs in a run."""
    found: dict[str, int] = {}
    for value in model.graph.inputs:
        array = feeds.get(str(value.name))
        if array is not None and value.shape is not None and len(value.shape) == array.ndim:
            for axis, n in zip(value.shape, array.shape, strict=True):
                if isinstance(axis, ir.SymbolicDim) and axis.value is not None:
                    found.setdefault(str(axis.value), n)
    return found


def settle_lengths(model: ir.Model, feeds: Feeds) -> None:
    """Give named axes of what bodies make the lengths that they have in a run; the model then serves runs of these lengths.

    What stands for a tensor in iterations that do not compute it must have its shape (:meth:`Instrument.lift`).
    """
    lengths = lengths_of(model, feeds)
    if not lengths:
        return
    made = (value for node in all_nodes(model.graph) if node.graph is not model.graph for value in node.outputs)
    for value in made:
        if value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape([n if isinstance(n, int) else lengths.get(str(n.value), n) for n in value.shape])


def _absent(value: ir.Value, neutral: Array, skipped: bool) -> Array:
    """The placeholder for a tensor in loop iterations that do not compute it; ``neutral`` where none does.

    Raises:
        ModelError: its shape is not known.
    """
    if neutral.size or not skipped:
        return neutral
    shape = value.shape
    lengths = [] if shape is None else [n for n in shape if isinstance(n, int)]
    if shape is None or len(lengths) != len(shape) or neutral.dtype.kind != "f":
        raise ModelError(
            str(value.name),
            f"this tensor in a branch of an If inside a loop has the shape {shape}, and iterations that do not take the branch "
            "can only be told from others where all lengths are known",
            "fix the lengths of the model's inputs (onnxruntime.tools.make_dynamic_shape_fixed)",
        )
    return np.full(lengths, np.nan, neutral.dtype)


def taken(array: Array, value: ir.Value, leading: int) -> Array:
    """A stack of iterations without those that skipped the tensor's branch; ``leading`` axes merged."""
    if not leading or not value.meta.get(_SKIPPED):
        return array
    entries = array.reshape(-1, *array.shape[leading:])
    made = ~np.isnan(entries.reshape(len(entries), -1)).all(1)
    return entries[made]


def is_reducible(quantizer: Quantizer, value: ir.Value) -> bool:
    """Whether reductions inside the graph give all statistics that a quantizer needs."""
    per_tensor = quantizer.needs in ("minmax", "energy") and isinstance(quantizer.spec.granularity, PerTensor)
    return per_tensor and value.dtype in (None, ir.DataType.FLOAT)


def _floor(value: ir.Value) -> float | None:
    """A lower bound of the outputs of the operator that computes ``value``."""
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Relu":
        return 0.0
    bound = node.inputs[1] if node.op_type == "Clip" and len(node.inputs) > 1 else None
    tensor = None if bound is None else bound.const_value
    return None if tensor is None else float(tensor.numpy())


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None, value.name
    return node


def _is_image(value: ir.Value) -> bool:
    """Whether a tensor is known to have pixels, as pooling needs."""
    shape = value.shape
    return shape is not None and len(shape) == 4 and all(isinstance(n, int) and n > 0 for n in shape[1:])


def _extend_scan(node: ir.Node) -> None:
    """Add a scan output to a Scan; a reverse one stores it in the order of its input."""
    directions = node.attributes.get_ints("scan_input_directions", ())
    backwards = int(bool(directions) and all(directions))
    states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    for name, last in (("scan_output_axes", 0), ("scan_output_directions", backwards)):
        attribute = node.attributes.get(name)
        if attribute is not None or last:
            known = [0] * (len(node.outputs) - states) if attribute is None else list(attribute.as_ints())
            node.attributes.add(ir.AttrInt64s(name, [*known, last]))


def _type_of(value: ir.Value) -> ir.DataType:
    return value.dtype or ir.DataType.FLOAT


def _numpy_type(value: ir.Value) -> np.dtype[Any]:
    return np.dtype(_type_of(value).numpy())


def itemsize(value: ir.Value) -> int:
    """Bytes of an element."""
    return _numpy_type(value).itemsize


def static_bytes(value: ir.Value, symbols: Mapping[str, int]) -> int | None:
    """Bytes of a tensor whose named axes are ``symbols`` long; ``None`` where an axis is not known."""
    if value.shape is None:
        return None
    size = itemsize(value)
    for axis in value.shape:
        n = axis if isinstance(axis, int) else symbols.get(str(axis.value))
        if n is None:
            return None
        size *= n
    return size


_LIMIT = 1e28  # leaves sums over 10 billion elements, as means take them, and rounding, within float32
_SOURCES = 8  # tensors that a proof may rest on
_LARGE = 1 << 26  # bytes of a constant that is not looked through: a sum costs nothing beside the product with it
_SAME = frozenset(
    ("Relu", "Clip", "HardSwish", "AveragePool", "GlobalAveragePool", "ReduceMean", "Neg", "Abs", "Concat")
)
_BETWEEN = frozenset(("Sigmoid", "Tanh", "Softmax"))  # -1 and 1


@dataclass(frozen=True)
class Magnitude:
    """A bound on a tensor, and on all values computed between ``sources`` and it.

    Attributes:
        sources: tensors whose bounds are known when the model has run.
        gain, offset: no magnitude is above ``gain`` times the largest of ``sources`` plus ``offset``.
        cap: a bound whatever the sources are, as long as they are finite.
    """

    sources: frozenset[ir.Value]
    gain: float = 0.0
    offset: float = 0.0
    cap: float = math.inf

    def holds(self, known: Mapping[ir.Value, float]) -> bool:
        """Whether the tensor is finite, where ``known`` are the magnitudes of the tensors that were found finite."""
        largest = max((known.get(value, math.inf) for value in self.sources), default=0.0)
        return self.gain * largest + self.offset < _LIMIT  # False for NaN

    def scaled(self, factor: float) -> Magnitude:
        """Magnitude of the tensor times numbers of at most ``factor``; never below its own, as both must be finite."""
        factor = max(1.0, factor) if not math.isnan(factor) else math.inf
        return replace(self, gain=self.gain * factor, offset=self.offset * factor, cap=self.cap * factor)


def finite_proofs(graph: ir.Graph, watched: Collection[ir.Value]) -> dict[ir.Value, Magnitude]:
    """Bounds on ``watched`` tensors that follow from bounds of earlier tensors.

    Args:
        graph: in an order in which it can run.
        watched: tensors whose minima and maxima are taken in every run.
    """
    watched = frozenset(watched)
    found: dict[ir.Value, Magnitude | None] = {
        value: Magnitude(frozenset((value,)), 1.0) for value in graph.inputs if value in watched
    }
    proofs: dict[ir.Value, Magnitude] = {}
    for node in graph:
        made = _of_node(node, found)
        for value in node.outputs:
            proof = made if value.dtype == ir.DataType.FLOAT else None
            found[value] = proof
            if value in watched:
                found[value] = Magnitude(frozenset((value,)), 1.0, cap=math.inf if proof is None else proof.cap)
                if proof is not None:
                    proofs[value] = proof
    return proofs


def _of_node(node: ir.Node, found: dict[ir.Value, Magnitude | None]) -> Magnitude | None:
    rule = None if node.domain else _rule(node.op_type)
    if rule is None or any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values()):
        return None
    inputs = [value for value in node.inputs if value is not None and value.dtype in (None, ir.DataType.FLOAT)]
    given = [_of_value(value, found) for value in inputs]
    known = [magnitude for magnitude in given if magnitude is not None]
    made = rule(node, known) if known and len(known) == len(given) else None
    return made if made is not None and len(made.sources) <= _SOURCES else None


def _of_value(value: ir.Value, found: dict[ir.Value, Magnitude | None]) -> Magnitude | None:
    """Magnitude of a value or of a constant."""
    if value not in found:
        tensor = value.const_value
        found[value] = None if tensor is None else _of_constant(tensor)
    return found[value]


def _of_constant(tensor: ir.TensorProtocol) -> Magnitude | None:
    if tensor.dtype != ir.DataType.FLOAT or tensor.nbytes > _LARGE:
        return None
    array = tensor.numpy()
    ends = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)  # NaN where there is one
    let_go(tensor)
    largest = max(map(abs, ends))
    return Magnitude(frozenset(), 0.0, largest, largest) if all(map(math.isfinite, ends)) else None


def _join(magnitudes: Iterable[Magnitude]) -> Magnitude:
    several = list(magnitudes)
    return Magnitude(
        frozenset().union(*(m.sources for m in several)),
        max(m.gain for m in several),
        max(m.offset for m in several),
        max(m.cap for m in several),
    )


def _same(node: ir.Node, given: list[Magnitude]) -> Magnitude | None:
    if any(name in node.attributes for name in ("min", "max", "ceil_mode")):
        return None  # Clip of an old opset; an average over padding alone is none
    joined = _join(given)
    bounded = node.op_type == "Clip" and len(given) == 3 and not (given[1].sources or given[2].sources)
    return replace(joined, cap=max(given[1].cap, given[2].cap)) if bounded else joined


def _between(node: ir.Node, given: list[Magnitude]) -> Magnitude | None:
    joined = _join(given)
    return replace(joined, offset=max(joined.offset, 1.0), cap=1.0)


def _sum(node: ir.Node, given: list[Magnitude]) -> Magnitude | None:
    joined = _join(given)
    return Magnitude(
        joined.sources, sum(m.gain for m in given), sum(m.offset for m in given), sum(m.cap for m in given)
    )


def _product(node: ir.Node, given: list[Magnitude]) -> Magnitude | None:
    """Magnitude of the product of two tensors, one of known magnitude."""
    if len(given) != 2:
        return None
    factor, other = sorted(given, key=lambda m: m.cap)
    if not math.isfinite(factor.cap):
        return None
    return _join((other.scaled(factor.cap), replace(factor, cap=0.0)))


def _layer(node: ir.Node, given: list[Magnitude]) -> Magnitude | None:
    """Magnitude of the result of a convolution or matrix product with a constant."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if weight is None or weight.const_value is None or len(given) < 2 or given[1].sources:
        return None
    factors = (node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0))
    if max(map(abs, factors)) > 1:
        return None
    products = weight.const_value.size  # no output is a sum of more
    made = given[0].scaled(products * given[1].cap)
    return made if len(given) == 2 else _sum(node, [made, *given[2:]])


_RULES: dict[str, Callable[[ir.Node, list[Magnitude]], Magnitude | None]] = {
    **dict.fromkeys(_SAME, _same), **dict.fromkeys(_BETWEEN, _between), **dict.fromkeys(("Add", "Sub", "Sum"), _sum),
    **dict.fromkeys(TRAITS["layer"], _layer), "Mul": _product,
}  # fmt: skip


def _rule(op_type: str) -> Any:
    rule = _RULES.get(op_type)
    return _same if rule is None and op_row(op_type).kind == "movement" else rule
