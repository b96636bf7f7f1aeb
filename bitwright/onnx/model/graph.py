"""Build the data-flow graph of an ONNX model for rules, placement and algorithms.

Values keep their ONNX names and operators the names of their nodes; ports are ONNX ports. Nodes whose operands are all
the same in every run become constants.

Bodies of If, Loop and Scan are part of the graph: their nodes are operators like any other, in front of the node that
holds them, which itself becomes one operator per output:

==============================  ===================================================================
what ONNX has                   what the graph has
==============================  ===================================================================
output of an If                 ``If`` of condition and both branches' values
output of a Loop or Scan        ``Loop`` or ``Scan`` of the body's value, whose elements it carries
state that enters a body        readers read the initial value, and (``Op.also``) the body's last one
slice that enters a Scan body   ``Slice`` of what is scanned
RNN, GRU or LSTM                its type, with what is computed inside a step in ``Op.inner``
==============================  ===================================================================
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import onnx_ir as ir

from bitwright.core.graph.graph import UNKNOWN_TYPE, Graph, Op, Value
from bitwright.core.graph.operators import OPS, TRAITS, is_neutral, op_row
from bitwright.core.graph.recurrence import CELLS, RETURNS, inner_values
from bitwright.export.files.onnx_file import all_graphs, all_nodes, graphs_of, is_tensor
from bitwright.export.recurrent import layer_activations, unknown_activation

UNKNOWN = -1  # an axis whose length depends on the input

_STANDARD = ("", "ai.onnx")
_RANDOM = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")
)
_DTYPES = {"float": "float32", "double": "float64"}


@dataclass(frozen=True)
class GraphView:
    """A graph with its values by name.

    Attributes:
        graph: for rules, placement and algorithms.
        value: value name -> the ONNX value; names are unique over all bodies.
        node: op name -> the node. The outputs of an If, Loop or Scan after the first, and the slices that enter a Scan,
            are operators of their own that share the node.
    """

    graph: Graph
    value: dict[str, ir.Value]
    node: dict[str, ir.Node]


def build_graph(model: ir.Model, shapes: Mapping[str, tuple[int, ...]] | None = None, whole: bool = False) -> GraphView:
    """The graph of a model that :func:`bitwright.onnx.model.load.load_model` has normalised; linear in its size.

    Args:
        model: not changed.
        shapes: of values, as seen in a run; they win over inferred ones. Without them an axis of unknown length is
            ``UNKNOWN``, and a value of unknown rank has the shape ``()``.
        whole: make operators of what is computed of floating-point initializers alone, too.
    """
    return _Reader(model, shapes or {}, whole).read()


# ------------------------------------------------------------------------------------- canonical types, attributes


@dataclass(frozen=True)
class _Node:
    """Facts about a node for the tables below."""

    node: ir.Node
    attrs: Mapping[str, Any]
    is_static: Callable[[ir.Value | None], bool]
    opset: int

    def input(self, port: int) -> ir.Value | None:
        return self.node.inputs[port] if port < len(self.node.inputs) else None

    def rank(self, port: int) -> int | None:
        value = self.input(port)
        return None if value is None or value.shape is None else len(value.shape)

    def is_float(self, port: int) -> bool:
        value = self.input(port)
        dtype = None if value is None or not is_tensor(value) else value.dtype
        return dtype is not None and dtype.is_floating_point()

    def number(self, port: int) -> float | None:
        """The single element of a constant operand, also after casts and changes of shape."""
        value = self.input(port)
        while value is not None and (maker := value.producer()) is not None and maker.op_type in TRAITS["one_element"]:
            value = maker.inputs[0]
        tensor = None if value is None else value.const_value
        return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


def _gather_type(n: _Node) -> str:
    """Gather, or an embedding where computed indices select rows of a constant table."""
    first_axis = n.attrs.get("axis", 0) in (0, -2)
    table = n.is_static(n.input(0)) and not n.is_static(n.input(1)) and n.rank(0) == 2 and n.is_float(0)
    return "Embedding" if table and first_axis else "Gather"


def _resize_type(n: _Node) -> str:
    return "ResizeNearest" if n.attrs.get("mode", "nearest") == "nearest" else "Resize"


def _cast_type(n: _Node) -> str:
    """Data movement for casts between floating-point types, else a new value."""
    floats = n.is_float(0) and ir.DataType(n.attrs.get("to", 1)).is_floating_point()
    return "Identity" if floats else "Cast"


def _pad_type(n: _Node) -> str:
    """Padding; with a constant other than zero, which may be off the grid of the input."""
    if n.attrs.get("mode", "constant") != "constant":
        return "Pad"
    filler = n.number(2) if n.input(2) is not None else float(n.attrs.get("value", 0.0))
    return "Pad" if filler == 0 else "PadConstant"


def _gemm_type(n: _Node) -> str:
    """Gemm, or MatMul for a product of two computed matrices."""
    return "Gemm" if n.is_static(n.input(1)) or n.is_static(n.input(0)) else "MatMul"


def _arithmetic_type(n: _Node) -> str:
    """A sum, difference, product, quotient or power; the first operand itself where the second one changes nothing."""
    ranks = n.rank(0), n.rank(1)
    keeps = n.is_float(0) and None not in ranks and ranks[0] >= ranks[1]  # type: ignore[operator]
    return "Identity" if keeps and is_neutral(n.node.op_type, n.number(1)) else n.node.op_type


def _several(op_type: str) -> Callable[[_Node], str]:
    """A variadic operator; Identity for a single input."""
    return lambda n: op_type if len(n.node.inputs) > 1 else "Identity"


def _cell_type(n: _Node) -> str:
    """A recurrent layer; one with an unsupported activation function is another type, and stays in float."""
    unknown = unknown_activation(n.node.op_type, n.attrs)
    return n.node.op_type if unknown is None else f"{n.node.op_type}({unknown})"


# ONNX operator -> canonical type where the two differ
_TYPES: dict[str, str | Callable[[_Node], str]] = {
    "Gather": _gather_type, "Resize": _resize_type, "Upsample": _resize_type, "Cast": _cast_type, "CastLike": "Cast",
    "Pad": _pad_type, "Gemm": _gemm_type, "Swish": "Silu", "ThresholdedRelu": "Threshold",
    "Shrink": "HardShrink", "LpPool": "AveragePool", "Scatter": "ScatterElements", "ScatterND": "ScatterElements",
    "TensorScatter": "ScatterElements", "ReverseSequence": "Flip", "CenterCropPad": "Pad",
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow"), _arithmetic_type),
    "Sum": _several("Add"), "Max": _several("Max"), "Min": _several("Min"), "Mean": _several("Mean"),
    "Reciprocal": "Reciprocal", "GlobalLpPool": "ReduceL2", **dict.fromkeys(CELLS, _cell_type),
}  # fmt: skip


def _conv_attrs(n: _Node) -> dict[str, Any]:
    rank = n.rank(1) or n.rank(0) or len(n.attrs.get("kernel_shape", ())) + 2
    spatial = rank - 2
    return {
        "group": 1, "pads": (0,) * 2 * spatial, "strides": (1,) * spatial, "dilations": (1,) * spatial, **n.attrs
    }  # fmt: skip


def _clip_attrs(n: _Node) -> dict[str, Any]:
    low, high = n.attrs.get("min"), n.attrs.get("max")
    return {"min": n.number(1) if low is None else low, "max": n.number(2) if high is None else high}


def _batch_norm_attrs(n: _Node) -> dict[str, Any]:
    # before opset 14 nothing but further outputs told that the statistics of the batch are used
    training = n.attrs.get("training_mode", 0) if n.opset >= 14 else sum(bool(v.name) for v in n.node.outputs) > 1
    return {"epsilon": 1e-5, **n.attrs, "training": bool(training)}


def _power_attrs(n: _Node) -> dict[str, Any]:
    exponent = n.number(1)
    return {} if exponent is None else {"exponent": exponent}


def _axis_attrs(n: _Node) -> dict[str, Any]:
    return {"axis": 0 if n.node.op_type == "Gather" else -1 if n.opset >= 13 else 1, **n.attrs}


def _cell_attrs(n: _Node) -> dict[str, Any]:
    names = tuple(a.name for a in layer_activations(n.node.op_type, n.attrs))
    returns = tuple(state for state, value in zip(RETURNS, n.node.outputs, strict=False) if value.name)
    return {
        "direction": "forward", "clip": 0.0, "linear_before_reset": 0, "input_forget": 0, "layout": 0, **n.attrs,
        "activations": names, "gates": CELLS[n.node.op_type].gates, "returns": returns,
    }  # fmt: skip


_ATTRS: dict[str, Callable[[_Node], dict[str, Any]]] = {
    **dict.fromkeys(CELLS, _cell_attrs),
    "Conv": _conv_attrs,
    "ConvTranspose": _conv_attrs,
    "Gemm": lambda n: {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0, **n.attrs},
    "BatchNormalization": _batch_norm_attrs,
    "InstanceNormalization": lambda n: {"epsilon": 1e-5, **n.attrs, "training": True},
    "LayerNormalization": lambda n: {"axis": -1, "epsilon": 1e-5, **n.attrs},
    "LeakyRelu": lambda n: {"alpha": 0.01, **n.attrs},
    "Clip": _clip_attrs,
    "Pow": _power_attrs,
    "Softmax": _axis_attrs,
    "LogSoftmax": _axis_attrs,
    "Gather": _axis_attrs,
    "Embedding": _axis_attrs,
}


def canonical(n: _Node) -> tuple[str, dict[str, Any]]:
    """Canonical type and attributes of a node; operators outside the standard are named with their domain."""
    node = n.node
    if node.domain not in _STANDARD:
        return f"{node.domain}::{node.op_type}", dict(n.attrs)
    entry = _TYPES.get(node.op_type, node.op_type)
    op_type = entry if isinstance(entry, str) else entry(n)
    attrs = _ATTRS.get(op_type)
    return op_type, dict(n.attrs) if attrs is None else attrs(n)


def canonical_op(node: ir.Node, opset: int) -> tuple[str, dict[str, Any]]:
    """Canonical type and attributes of one node by itself; only initializers count as constants."""

    def is_static(value: ir.Value | None) -> bool:
        return value is not None and value.is_initializer()

    return canonical(_Node(node, _plain_attrs(node), is_static, opset))


_PLAIN = {
    ir.AttributeType.FLOAT: lambda a: a.as_float(),
    ir.AttributeType.INT: lambda a: a.as_int(),
    ir.AttributeType.STRING: lambda a: a.as_string(),
    ir.AttributeType.FLOATS: lambda a: tuple(a.as_floats()),
    ir.AttributeType.INTS: lambda a: tuple(a.as_ints()),
    ir.AttributeType.STRINGS: lambda a: tuple(a.as_strings()),
}


def _plain_attrs(node: ir.Node) -> dict[str, Any]:
    """Numbers, texts and tuples of them; graphs and tensors are left out."""
    return {a.name: _PLAIN[a.type](a) for a in node.attributes.values() if a.type in _PLAIN and not a.is_ref()}


# ------------------------------------------------------------------------------------------------- the reader


@dataclass
class _State:
    """A state of a Loop or Scan body: its initial value, and the value that the body passes to its next run."""

    first: ir.Value
    next: ir.Value


@dataclass
class _Reader:
    model: ir.Model
    shapes: Mapping[str, tuple[int, ...]]
    whole: bool = False
    ops: list[Op] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    onnx_values: dict[str, ir.Value] = field(default_factory=dict)
    nodes: dict[str, ir.Node] = field(default_factory=dict)
    states: dict[ir.Value, _State] = field(default_factory=dict)
    constants: dict[ir.Value, tuple[str, ...]] = field(default_factory=dict)  # -> parameters it is made from

    def read(self) -> GraphView:
        graph = self.model.graph
        self.opset = max(self.model.opset_imports.get(domain, 0) for domain in _STANDARD)
        self.names = {str(node.name) for node in all_nodes(graph)}
        for value in graph.inputs:
            self._add(value, "input")
        for g in all_graphs(self.model.graph):
            for value in g.initializers.values():
                self._add(value, "param")
                self.constants[value] = (str(value.name),)
        for node, leaving in self._walk():
            if not leaving:
                self._enter(node)
            elif node.op_type in TRAITS["bodies"] and node.domain in _STANDARD:
                self._leave(node)
            else:
                self._plain(node)
        outputs = dict.fromkeys(name for value in graph.outputs for name in self._sources(value))
        inputs = [str(value.name) for value in graph.inputs]
        return GraphView(Graph(self.ops, self.values, inputs, list(outputs)), self.onnx_values, self.nodes)

    def _walk(self) -> Iterator[tuple[ir.Node, bool]]:
        """Yield every node after its producers; nodes with bodies also before these (``False``)."""
        waiting = [iter(self.model.graph)]
        held: list[tuple[ir.Node, int]] = []  # node with bodies, and how many of them are still waiting
        while waiting:
            node = next(waiting[-1], None)
            if node is not None:
                bodies = _bodies(node)
                if bodies:
                    yield node, False
                    waiting.extend(iter(body) for body in reversed(bodies))
                    held.append((node, len(waiting) - len(bodies)))
                else:
                    yield node, True
                continue
            waiting.pop()
            while held and held[-1][1] == len(waiting):
                yield held.pop()[0], True

    # -- values

    def _add(self, value: ir.Value, kind: Any, shape: tuple[int, ...] | None = None, dtype: str = "") -> None:
        name = str(value.name)
        found = self.shapes.get(name)
        if found is None:
            found = shape if value.shape is None else _lengths(value.shape)
        dtype = dtype if value.dtype is None else _dtype(value.dtype)
        dtype = dtype if is_tensor(value) else "sequence"
        sources = self.constants.get(value, ()) if kind == "constant" else ()
        param = name if kind == "param" else None
        self.values[name] = Value(name, kind, found or (), dtype or UNKNOWN_TYPE, param, sources)
        self.onnx_values[name] = value

    def _sources(self, value: ir.Value) -> list[str]:
        """Names of the possible sources of ``value``: itself, or the initial and later values of a body's state."""
        found: dict[str, None] = {}
        waiting, seen = [value], {value}
        while waiting:
            value = waiting.pop()
            if value not in self.states:
                found[str(value.name)] = None
                continue
            state = self.states[value]
            for other in (state.next, state.first):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return list(found)

    def _is_static(self, value: ir.Value | None) -> bool:
        return value in self.constants

    # -- nodes

    def _plain(self, node: ir.Node) -> None:
        operands = [value for value in (*node.inputs, *_captured(node)) if value is not None]
        static = node.op_type not in _RANDOM and all(value in self.constants for value in operands)
        floats = any(v.dtype is not None and v.dtype.is_floating_point() for v in operands)
        made = [v.dtype for v in node.outputs] if node.op_type == "ConstantOfShape" else []
        floats = floats or any(dtype is not None and dtype.is_floating_point() for dtype in made)
        if static and not (self.whole and floats):
            self._constant(node, operands)
            return
        op_type, attrs = canonical(_Node(node, _plain_attrs(node), self._is_static, self.opset))
        self._note(str(node.name), op_type, node, [*node.inputs, *_captured(node)], node.outputs, attrs)

    def _constant(self, node: ir.Node, operands: list[ir.Value]) -> None:
        sources = tuple(dict.fromkeys(name for value in operands for name in self.constants[value]))
        for value in node.outputs:
            if value.name:
                self.constants[value] = sources
                self._add(value, "constant")

    def _enter(self, node: ir.Node) -> None:
        """The inputs of the bodies of ``node``."""
        if node.domain not in _STANDARD or node.op_type not in ("Loop", "Scan"):
            for body in _bodies(node):
                for value in body.inputs:
                    self._add(value, "activation")
            return
        (body,) = _bodies(node)
        if node.op_type == "Loop":
            self._add(body.inputs[0], "activation")  # number of the iteration
            states = list(zip(body.inputs[1:], node.inputs[1:], body.outputs, strict=False))
        else:
            count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
            states = list(zip(body.inputs[:count], node.inputs[:count], body.outputs, strict=False))
            for value, scanned in zip(body.inputs[count:], node.inputs[count:], strict=True):
                name = self._name(f"{node.name}.{value.name}")
                self._note(name, "Slice", node, [scanned], [value], {"operator": "Scan"})
        for value, first, last in states:
            if first is None:  # the condition of a Loop may be left out: it is then true
                self._add(value, "activation")
            else:
                self.states[value] = _State(first, last)
                self.onnx_values[str(value.name)] = value

    def _leave(self, node: ir.Node) -> None:
        """The outputs of an If, Loop or Scan, each an operator of its own."""
        bodies = _bodies(node)
        skip = 1 if node.op_type == "Loop" else 0
        for i, value in enumerate(node.outputs):
            if not value.name:
                continue
            reads: list[ir.Value | None] = [body.outputs[i + skip] for body in bodies]
            if node.op_type == "If":
                reads.insert(0, node.inputs[0])
            name = str(node.name) if i == 0 else self._name(f"{node.name}.{i}")
            self._note(name, node.op_type, node, reads, [value], {})

    def _name(self, base: str) -> str:
        return _free(base, self.names)

    def _note(self, name: str, op_type: str, node: ir.Node, reads: Any, makes: Any, attrs: dict[str, Any]) -> None:
        inputs: list[str | None] = []
        also: list[tuple[int, str]] = []
        for port, value in enumerate(reads):
            names = [None] if value is None else self._sources(value)
            inputs.append(names[0])
            also.extend((port, str(later)) for later in names[1:])
        while inputs and inputs[-1] is None:
            inputs.pop()
        inner = self._inner(name, op_type, node, attrs)
        outputs = [value for value in makes if value.name]
        for value in outputs:
            self._add(value, "activation", *self._guess(op_type, inputs))
        self.nodes[name] = node
        self.ops.append(
            Op(name, op_type, tuple(inputs), tuple(str(v.name) for v in outputs), attrs,
               also=tuple(also), module=_module(node), inner=inner)
        )  # fmt: skip

    def _inner(self, name: str, op_type: str, node: ir.Node, attrs: dict[str, Any]) -> dict[str, str]:
        """The values inside a step of a recurrent layer, by inner name."""
        if op_type not in CELLS or node.domain not in _STANDARD:
            return {}
        x, hidden = node.inputs[0], node.outputs[0].name or None
        shape = () if x is None else self.values[str(x.name)].shape
        batch = shape[0 if attrs["layout"] else 1] if len(shape) == 3 else UNKNOWN
        dtype = UNKNOWN_TYPE if x is None else self.values[str(x.name)].dtype
        inner, values = inner_values(name, op_type, attrs, hidden, (batch, attrs["hidden_size"]), dtype)
        free = {value.name: _free(value.name, self._taken) for value in values}
        self.values.update((free[value.name], replace(value, name=free[value.name])) for value in values)
        return {key: free.get(value, value) for key, value in inner.items()}

    @cached_property
    def _taken(self) -> set[str]:
        """Names of all values, which only recurrent layers need."""
        return {str(v.name) for graph in all_graphs(self.model.graph) for node in graph for v in node.outputs}

    def _guess(self, op_type: str, inputs: list[str | None]) -> tuple[tuple[int, ...] | None, str]:
        """Guess the shape and type of outputs that shape inference did not reach."""
        known = [self.values[name] for name in inputs if name in self.values]
        dtype = next((v.dtype for v in known if v.is_float), "")
        if op_type not in OPS or not dtype:
            return None, dtype if op_type in OPS else ""
        if op_type in ("Conv", "ConvTranspose") and len(known) > 1:
            return (UNKNOWN,) * len(known[1].shape), dtype
        if op_type == "Gemm":
            return (UNKNOWN, UNKNOWN), dtype
        same = op_row(op_type).kind == "norm" or (op_row(op_type).kind == "pointwise" and len(known) == 1)
        return known[0].shape if same else None, dtype


def _free(base: str, taken: set[str]) -> str:
    name, count = base, 0
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name


def _bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs inside a node; of an If the branch that is taken first."""
    found: list[ir.Graph] = []
    if not graphs_of(node):
        return found
    for name in ("then_branch", "else_branch", *node.attributes):
        attribute = node.attributes.get(name)
        if attribute is None or attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH and attribute.as_graph() not in found:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.as_graphs())
    return found


def _captured(node: ir.Node) -> list[ir.Value]:
    """Outputs of the bodies of an operator other than If, Loop and Scan."""
    if node.op_type in TRAITS["bodies"] and node.domain in _STANDARD:
        return []
    return [value for body in _bodies(node) for value in body.outputs]


def _lengths(shape: ir.Shape) -> tuple[int, ...]:
    return tuple(length if isinstance(length, int) else UNKNOWN for length in shape)


def _dtype(dtype: ir.DataType) -> str:
    name = dtype.name.lower()
    return _DTYPES.get(name, name)


def _module(node: ir.Node) -> str:
    """Path of the torch module a node was exported from, where the exporter noted it."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    if not scopes:
        return ""
    try:
        path = ast.literal_eval(scopes)
    except (ValueError, SyntaxError):  # another exporter's note; a name would only be a convenience
        return ""
    return str(path[-2]) if isinstance(path, list) and len(path) > 1 else ""
