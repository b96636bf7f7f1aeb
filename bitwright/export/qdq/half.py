"""Convert the float part of a file to half precision; choose the operators that stay in float32.

An operator computes in half precision where its definition has the type and its values fit it. What does not fit stays in
float32, with a reason:

- values whose magnitude comes within a factor of four of the largest number (float16: 65,504), and operators that make or read
  them; sums and means whose terms add up to more, and squares;
- values that something divides by, or takes the logarithm or root of, and that are smaller than the smallest normal number:
  half precision makes zero of them;
- constants that half precision cannot hold, such as an epsilon of 1e-12 or a mask of -3.4e38;
- numbers that count: positions, indices, arguments of sine and cosine beyond what 11 bits resolve;
- recurrent operators and what follows them, which ONNX Runtime 1.31 does not load in float16 on CPUs; weights are stored in it;
- bodies of If, Loop and Scan, and operators of other domains.

Magnitudes are measured on the example with the file itself, at every operator. Where float32 and half precision meet, one Cast
per value stands. What was quantized to integers stays as it is: kernels of integers read and make codes, and float32 scales.
Weights of the operators in half precision are stored so.

Types without CPU kernels in ONNX Runtime, bfloat16 in most operators and float64 in some, are computed in float32
(:func:`compute_in_float`): such an operator gets its inputs as float32, and its results are rounded back to the type: as
PyTorch's kernels of bfloat16 do on CPUs, which accumulate in float32 too, and closer than float32 resolves where it is float64.
Weights keep their type in the file. Inputs and outputs in bfloat16, which numpy does not have, are float32.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.recurrence import CELLS
from bitwright.core.health.report import HALVES as SMALLEST
from bitwright.core.health.report import LIMITS
from bitwright.core.numerics.encoding import Encoding
from bitwright.errors import ConfigError, ExportError, close_matches
from bitwright.export.files.onnx_file import all_nodes, save_model
from bitwright.export.opsets import bring_to
from bitwright.export.qdq.forms import Builder, after, before, read_metadata
from bitwright.export.qdq.markers import bypass, copy_model, is_site, move_uses, remove_unread
from bitwright.export.qdq.stored import HALVES
from bitwright.runtimes.onnxruntime import FLOAT_KERNELS, new_session, refusals, session_options

Array = NDArray[Any]
HalfType = Literal["float16", "bfloat16"]
D = ir.DataType

_OF_BFLOAT16 = 22  # opset from which on convolutions and pools have the type
#: how many times as large as on the example values may become
ROOM = 4.0
#: elements of the constants of a stretch of operators below which half precision would only add Casts
_LEAST_WEIGHTS = 64
_RECURRENT = ("LSTM", "GRU", "RNN")
_QDQ = frozenset(("QuantizeLinear", "DequantizeLinear"))
#: operators that stay in float32 whatever their values: they count, draw numbers, or hold a type in an attribute
_FLOAT32 = {
    **dict.fromkeys(
        ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"),
        "it turns floats into codes, or codes into floats",
    ),
    **dict.fromkeys(("Range", "CumSum"), "it counts, which 11 bits do up to 2048"),
    **dict.fromkeys(("GridSample", "RoiAlign", "MaxRoiPool", "NonMaxSuppression"), "it reads places in a picture"),
    **dict.fromkeys(
        ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "EyeLike",
         "ConstantOfShape", "CastLike"),
        "its type is an attribute of it",
    ),
    **dict.fromkeys(
        _RECURRENT,
        "ONNX Runtime has no such kernels on CPUs; its weights are stored in half precision",
    ),
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), "it holds a body, which computes in float32"),
}  # fmt: skip
#: operator -> port whose small values must not become zero
_DIVIDES = {"Div": 1, "Reciprocal": 0, "Log": 0, "Sqrt": 0, "ReduceLogSum": 0, "ReduceLogSumExp": -1}
_SUMS = frozenset(("ReduceSum", "ReduceMean", "GlobalAveragePool", "ReduceL1", "CumSum"))
_SQUARES = frozenset(("ReduceL2", "ReduceSumSquare", "LpNormalization"))
_PERIODIC = frozenset(("Sin", "Cos", "Tan"))
_ONE_INPUT = frozenset(("Relu", "Clip", "LeakyRelu", "Elu", "Identity", "Reshape", "Transpose", "MaxPool", "Flatten"))
_PERIODIC_REACH, _COUNTS_TO = 8.0, 256.0


@dataclass(frozen=True)
class Half:
    """Half-precision settings of a file's float part.

    Attributes:
        kind: the type.
        operators: ``"all"`` that can compute in it; the ``"rest"`` between quantizers, where it has weights of its own; or
            ``"none"``, so that inputs and outputs alone have the type.
        inputs, outputs: whether inputs and outputs of the file have the type too.
        feeds: an example, on which magnitudes are measured; without one only definitions and constants decide.
        newer: whether the file may have a newer opset than the model where operators have the type from there on: convolutions,
            pools and others have bfloat16 from opset 22 on.
    """

    kind: HalfType
    operators: Literal["all", "rest", "none"] = "all"
    inputs: bool = False
    outputs: bool = False
    feeds: Mapping[str, Array] | None = None
    newer: bool = True


def check_half(name: str, kind: Any) -> None:
    """Refuse a type that is not one of half precision; ``None`` and ``"float32"`` ask for none.

    Raises:
        ConfigError: with the types.
    """
    if kind not in (None, "float32", *HALVES):
        known = ("float32", *HALVES)
        problem = f"{kind!r} is not a type of floats that a file can have{close_matches(str(kind), known)}"
        raise ConfigError(name, problem, f"use one of {', '.join(map(repr, known))}")


def half_for(
    encodings: Mapping[str, Encoding],
    feeds: Mapping[str, Array] | None,
    rest: str | None = None,
    inputs: str = "float32",
    outputs: str = "float32",
    newer: bool = True,
) -> Half | None:
    """The half-precision settings for a file with ``encodings``; ``None`` where all stays float32.

    Args:
        encodings: by site; those of half precision ask for operators of it.
        feeds: see :class:`Half`.
        rest: type of what is not quantized: a half type, ``"float32"``, or ``None`` to follow the encodings.
        inputs, outputs: of the file; other types than half ones count as float32 here.
        newer: see :class:`Half`.

    Raises:
        ConfigError: two half types are asked for.
    """
    check_half("rest", rest)
    names = [encoding.format.name for encoding in encodings.values() if encoding.format.name in HALVES]
    ends = [kind for kind in (inputs, outputs) if kind in HALVES]
    asked = sorted({*names, *ends, *([rest] if rest in HALVES else [])})
    if len(asked) > 1:
        problem = f"{' and '.join(asked)} are asked for at once"
        raise ConfigError("half precision", problem, "use one of them for presets, rules, rest and io")
    if not asked:
        return None
    scope: Literal["all", "rest", "none"] = "all" if names else "rest" if rest in HALVES else "none"
    return Half(asked[0], scope, inputs in HALVES, outputs in HALVES, feeds, newer)  # type: ignore[arg-type]


@dataclass
class Halved:
    """Result of :func:`write_half`.

    Attributes:
        done: how many operators compute in half precision.
        kept: operator -> why it stays in float32, of those that could be in half precision by their kind.
        casts: how many Casts stand where the types meet.
        moved: results of quantizers that were taken out -> what they read.
    """

    done: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    casts: int = 0
    moved: dict[ir.Value, ir.Value] = field(default_factory=dict)


def write_half(builder: Builder, model: ir.Model, half: Half, kept: Iterable[ir.Value] = ()) -> Halved:
    """Give operators of ``model`` half precision, in place.

    Args:
        builder: of ``model``.
        model: as :func:`bitwright.export.qdq.write.to_qdq` writes it, with floats in float32.
        half: the type, and what has it.
        kept: values that the simulation keeps in float32; operators that make them do so as well.

    Raises:
        ExportError: the opset has no such type, or the example does not run.
    """
    if half.kind == "bfloat16" and model.opset_imports.get("", 0) < 13:
        raise ExportError("model", "bfloat16 needs opset 13", "export the model anew with opset 13 or newer")
    if half.kind == "bfloat16" and half.newer and model.opset_imports.get("", 0) < _OF_BFLOAT16:
        bring_to(model, _OF_BFLOAT16, None)
    moved = _collapse(builder, model)
    settle_types(model)
    reach, least = ({}, {}) if half.feeds is None else _measured(model, half.feeds)
    choice = _Choice(model, half, reach, least, set(kept))
    nodes = choice.nodes()
    writer = _Writer(builder, model, HALVES[half.kind])
    writer.write(nodes, half)
    return Halved(len(nodes), choice.told, writer.casts, moved)


def _collapse(builder: Builder, model: ir.Model) -> dict[ir.Value, ir.Value]:
    """Remove half-precision quantizers, which half-precision operators do not need; returns result -> operand."""
    moved = {}
    for node in tuple(model.graph):
        facts = read_metadata(node)
        if facts is None or facts["role"] != "activation" or facts["format"] not in HALVES:
            continue
        chain = _chain(node)
        source = chain[-1].inputs[0]
        assert source is not None
        moved[node.outputs[0]] = source
        node.metadata_props.clear()
        limits = [limit for step in chain for limit in step.inputs[1:] if limit is not None]
        for step in reversed(chain):
            bypass(step, builder.outputs)
        for limit in dict.fromkeys(limits):
            remove_unread(limit)
    return moved


def _chain(node: ir.Node) -> list[ir.Node]:
    """Clip, Cast and Cast back of a quantizer, in reverse order."""
    chain = [node]
    while len(chain) < 3 and (value := chain[-1].inputs[0]) is not None and (maker := value.producer()) is not None:
        if maker.op_type not in ("Cast", "Clip"):
            break
        chain.append(maker)
    return chain


def settle_types(model: ir.Model) -> None:
    """Set the types of values that inference left open from the definitions of their operators."""
    for node in all_nodes(model.graph):
        if all(value.dtype is not None for value in node.outputs):
            continue
        schema = _schema(node, model.opset_imports)
        if schema is None or any(not formal.is_homogeneous for formal in schema.outputs):
            continue  # unknown, or results of a body, which have types of their own
        known = _known_types(node, schema)
        for i, value in enumerate(node.outputs):
            kind = known.get(_port(schema.outputs, i))
            if value.dtype is None and kind is not None:
                value.type = ir.TensorType(kind)


def _known_types(node: ir.Node, schema: Any) -> dict[str, ir.DataType | None]:
    """The types of tensors that the inputs of ``node`` tell, and the attribute of a Cast, by their names in its definition."""
    known = {
        _port(schema.inputs, i): v.dtype
        for i, v in enumerate(node.inputs)
        if v is not None and isinstance(v.type, ir.TensorType)
    }
    if node.op_type == "Cast":
        known[_port(schema.outputs, 0)] = D(node.attributes["to"].as_int())
    return known


def _port(formal: Sequence[Any], i: int) -> str:
    """The name of the type that a definition gives the ``i``-th input or output; the last one may stand for several."""
    return formal[min(i, len(formal) - 1)].type_str if formal else ""


def _schema(node: ir.Node, opsets: Mapping[str, int]) -> Any:
    """The definition of an operator of standard ONNX; ``None`` of others."""
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, opsets.get("", 0)):
        return None
    return onnx.defs.get_schema(node.op_type, opsets.get("", 0))


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype == D.FLOAT


def _held(value: ir.Value) -> Array | None:
    """The array of a constant."""
    if value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def _measured(model: ir.Model, feeds: Mapping[str, Array]) -> tuple[dict[str, float], dict[str, float]]:
    """Name -> largest magnitude of every float32 value of the main graph; smallest that is not zero, of what divides.

    Raises:
        ExportError: the model does not run on the example.
    """
    copy = copy_model(model)
    graph = copy.graph
    values = [v for v in (*graph.inputs, *(v for n in graph for v in n.outputs)) if _is_float(v) and _held(v) is None]
    divisors = {value for node in graph for value in _divisors(node)}
    builder = Builder(copy)
    flat, zero = (
        builder.initializer("flat", np.array([-1], np.int64)),
        builder.initializer("zero", np.zeros(1, np.float32)),
    )
    huge = builder.initializer("huge", np.array([np.inf], np.float32))

    def add(op: str, *inputs: ir.Value, kind: ir.DataType = D.FLOAT, **attributes: int) -> ir.Value:
        made = builder.emit(graph.append, op, inputs, "measure", kind, **attributes)
        made.shape = None
        return made

    ends: dict[str, tuple[str, bool]] = {}
    for value in values:
        size = add("Abs", add("Reshape", value, flat))
        end = add("ReduceMax", add("Concat", size, zero, axis=0), keepdims=0)
        ends[str(end.name)] = str(value.name), True
        if value in divisors:
            # zeros are exact in every type
            small = add("Where", add("Equal", size, zero, kind=D.BOOL), huge, size)
            ends[str(add("ReduceMin", add("Concat", small, huge, axis=0), keepdims=0).name)] = str(value.name), False
    del graph.outputs[:]
    graph.outputs.extend(v for node in graph for v in node.outputs if v.name in ends)
    arrays = _run(copy, feeds, list(ends))
    reach = {name: float(x) for (name, largest), x in zip(ends.values(), arrays, strict=True) if largest}
    least = {name: float(x) for (name, largest), x in zip(ends.values(), arrays, strict=True) if not largest}
    return reach, least


def _divisors(node: ir.Node) -> Iterator[ir.Value]:
    """Operands of ``node`` that are divisors or arguments of a root or logarithm."""
    port = _DIVIDES.get(node.op_type, -1)
    value = node.inputs[port] if 0 <= port < len(node.inputs) and not node.domain else None
    if value is not None:
        yield value


def _run(model: ir.Model, feeds: Mapping[str, Array], wanted: Sequence[str]) -> list[Any]:
    given = {str(v.name): v for v in model.graph.inputs}
    kinds = {name: value.dtype.numpy() for name, value in given.items() if value.dtype is not None}
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, Path(folder, "model.onnx"))
            session = new_session(Path(folder, "model.onnx"), session_options(entries=FLOAT_KERNELS))
            found: list[Any] = session.run(
                list(wanted), {n: np.asarray(x).astype(kinds.get(n, x.dtype)) for n, x in feeds.items() if n in given}
            )
            return found
    except refusals() as error:
        text = str(error).strip().splitlines()[0]
        raise ExportError(
            "half precision", f"the model does not run on the example, on which its magnitudes are measured: {text}",
            "give an example of the model's own data",
        ) from error  # fmt: skip


class _Choice:
    """Chooses the operators that compute in half precision."""

    def __init__(
        self, model: ir.Model, half: Half, reach: Mapping[str, float], least: Mapping[str, float], kept: set[ir.Value]
    ) -> None:
        self.model, self.half, self.reach, self.least, self.kept = model, half, reach, least, kept
        self.limit, self.smallest = LIMITS[half.kind], SMALLEST[half.kind]
        self.told: dict[str, str] = {}
        self.type = f"tensor({half.kind})"
        self.counts_to = _COUNTS_TO if half.kind == "float16" else _COUNTS_TO / 8
        self.wide = self._wide()
        self.after = self._after_recurrent()

    def nodes(self) -> set[ir.Node]:
        """The operators of the main graph."""
        found, why = set[ir.Node](), dict[ir.Node, str]()
        if self.half.operators == "none":
            return found
        for node in self.model.graph:
            ports = self.ports(node)
            if not ports or node.op_type == "Constant":
                continue
            reason = self._why_not(node)
            if reason:
                why[node] = reason
            else:
                found.add(node)
        if self.half.operators == "rest":
            found = self._worth_it(found - self._on_codes())
        elif why:
            apart = found - (found := self._worth_it(found))
            why.update(dict.fromkeys(apart, "operators without weights between such of float32 would only get Casts"))
        for node, reason in why.items():
            if (
                node.op_type not in _QDQ
                and not _of_constants(node)
                and (self.half.operators == "all" or any(self._touches(node, found)))
            ):
                self.told[node.name or str(node.outputs[0].name)] = f"{node.op_type}: {reason}"
        return found

    def _after_recurrent(self) -> set[ir.Node]:
        """Operators that follow an LSTM, GRU or RNN: with float16 there, ONNX Runtime 1.31 crashes when it loads the file."""
        found: set[ir.Node] = set()
        for node in self.model.graph:
            makers = (value.producer() for value in node.inputs if value is not None)
            if node.op_type in _RECURRENT or any(maker in found for maker in makers):
                found.add(node)
        return found

    def ports(self, node: ir.Node) -> list[tuple[ir.Value, str, tuple[str, ...]]]:
        """The float32 values of an operator, each with the name and the types that its definition has for it."""
        schema = _schema(node, self.model.opset_imports)
        ends = ((node.inputs, schema.inputs), (node.outputs, schema.outputs)) if schema is not None else ()
        if schema is None:
            return [
                (value, "", ()) for value in (*node.inputs, *node.outputs) if value is not None and _is_float(value)
            ]
        return [
            (value, formal[min(i, len(formal) - 1)].type_str, tuple(formal[min(i, len(formal) - 1)].types))
            for values, formal in ends
            for i, value in enumerate(values)
            if value is not None and _is_float(value)
        ]

    def _touches(self, node: ir.Node, found: set[ir.Node]) -> Iterator[bool]:
        for value in node.inputs:
            yield value is not None and value.producer() in found
        for value in node.outputs:
            yield any(use.node in found for use in value.uses())

    def _wide(self) -> dict[ir.Value, str]:
        """Values that half precision cannot hold -> the reason; their producers and readers compute in float32."""
        found: dict[ir.Value, str] = {}
        values = [*self.model.graph.inputs, *(v for node in self.model.graph for v in node.outputs)]
        for value in values:
            reach = self.reach.get(str(value.name), 0.0)
            if not reach * ROOM <= self.limit:
                found[value] = f"{value.name} reaches {reach:.3g}, near or beyond {self.half.kind}'s {self.limit:.6g}"
            elif 0 < reach < self.smallest * ROOM:
                found[value] = (
                    f"{value.name} stays below {reach:.3g}, of which {self.half.kind} makes zero or has few digits"
                )
        for node in self.model.graph:
            for value, why in self._too_fine(node):
                found.setdefault(value, why)
        for value in self.kept:
            maker = value.producer()
            while maker is not None and maker.op_type in _ONE_INPUT and (source := maker.inputs[0]) is not None:
                found.setdefault(source, f"{maker.op_type} of it stays in float32")
                maker = source.producer()
        return found

    def _too_fine(self, node: ir.Node) -> Iterator[tuple[ir.Value, str]]:
        """The operand of ``node`` that half precision rounds to zero or too coarsely, and the reason."""
        kind = self.half.kind
        for value in _divisors(node):
            least = self.least.get(str(value.name), math.inf)
            if least < self.smallest * ROOM:
                yield value, f"{value.name} goes down to {least:.3g}, of which {kind} makes zero"
        first, bound = node.inputs[0] if node.inputs else None, self._exact_to(node)
        reach = 0.0 if first is None or not bound else self.reach.get(str(first.name), 0.0)
        if first is not None and reach > bound and _is_float(first):
            yield first, f"{first.name} reaches {reach:.3g}, where {kind} has too few digits"

    def _exact_to(self, node: ir.Node) -> float:
        """The magnitude up to which an operator may read half precision, where its results depend on single digits."""
        if node.op_type in _PERIODIC and not node.domain:
            return _PERIODIC_REACH
        if node.op_type == "Cast" and not node.domain:
            kind = node.attributes.get_int("to", 1)
            return 0.0 if kind in (D.FLOAT, D.FLOAT16, D.BFLOAT16, D.DOUBLE, D.BOOL) else self.counts_to
        return 0.0

    def _why_not(self, node: ir.Node) -> str:
        """The reason why an operator stays in float32; empty where it can be converted."""
        if node.op_type in _FLOAT32 and not node.domain:
            return _FLOAT32[node.op_type]
        if node in self.after:
            return "it follows a recurrent operator, after which ONNX Runtime crashes on half precision on CPUs"
        formless = self._formless(node)
        if formless:
            return formless
        if node.op_type == "Cast":
            return self._cast(node)
        wide = next((self.wide[v] for v in (*node.inputs, *node.outputs) if v in self.wide), "")
        kept = "the simulation has it in float32" if self.kept.intersection(node.outputs) else ""
        return wide or kept or self._constants(node) or self._sums(node)

    def _formless(self, node: ir.Node) -> str:
        """As :meth:`_why_not`, by the definition of an operator."""
        ports = self.ports(node)
        if not all(types for _, _, types in ports):
            return "its definition is not that of standard ONNX"
        own = [self.type in types and name not in types for _, name, types in ports]
        fixed = [name in types and _held(value) is not None for value, name, types in ports]  # constants of one type
        if not any(own) or not all(one or other for one, other in zip(own, fixed, strict=True)):
            return f"it has no form in {self.half.kind}"
        untyped = any(value is not None and value.type is None for value in node.inputs)
        return "the type of what it reads is not known" if untyped else ""

    def _cast(self, node: ir.Node) -> str:
        """As :meth:`_why_not`, of a Cast."""
        source, made = node.inputs[0], node.outputs[0]
        if source is None or _is_float(source):
            return "it converts float32" if self._exact_to(node) else self.wide.get(source, "") if source else ""
        if source.dtype in (D.FLOAT16, D.BFLOAT16, D.DOUBLE):
            return "it converts floats"
        if made in self.wide:
            return self.wide[made]
        counts = source.dtype != D.BOOL and not self.reach.get(str(made.name), math.inf) <= self.counts_to
        return f"it makes numbers beyond {self.counts_to:g} of integers" if counts else ""

    def _constants(self, node: ir.Node) -> str:
        for value in node.inputs:
            array = _held(value) if value is not None and _is_float(value) else None
            if array is None or not array.size:
                continue
            sizes = np.abs(array[np.isfinite(array)], dtype=np.float64)
            largest = float(sizes.max(initial=0.0))
            if largest > self.limit:
                return f"its constant {largest:.3g} lies beyond {self.half.kind}'s {self.limit:.6g}"
            if array.size <= 2 and 0 < largest < self.smallest:
                return f"its constant {largest:.3g} is smaller than what {self.half.kind} holds"
        return ""

    def _sums(self, node: ir.Node) -> str:
        """The reason why the sum inside an operator may overflow."""
        source = node.inputs[0] if node.inputs else None
        reach = 0.0 if source is None else self.reach.get(str(source.name), 0.0)
        if node.op_type in _SQUARES and reach**2 * ROOM > self.limit:
            return f"it squares {source and source.name}, which reaches {reach:.3g}"
        if node.op_type in _SUMS and source is not None:
            terms = _ratio(source, node.outputs[0])
            if reach * terms > self.limit:
                return f"it adds up {terms:g} numbers of up to {reach:.3g}"
        return ""

    def _on_codes(self) -> set[ir.Node]:
        """Operators that integer kernels compute: between DequantizeLinear and QuantizeLinear, without weights in float."""
        ending: set[ir.Node] = set()

        def rounds(reader: ir.Node) -> bool:
            return reader.op_type == "QuantizeLinear" or (reader in ending and reader.op_type in _ONE_INPUT)

        for node in reversed(list(self.model.graph)):
            readers = [use.node for value in node.outputs for use in value.uses()]
            if readers and all(map(rounds, readers)) and not any(value.is_graph_output() for value in node.outputs):
                ending.add(node)
        found: set[ir.Node] = set()
        for node in self.model.graph:
            if node in ending and self._reads_codes(node, found):
                found.add(node)
        return found

    def _reads_codes(self, node: ir.Node, found: set[ir.Node]) -> bool:
        """Whether all floats that an operator reads are dequantized codes, scalars, or outputs of operators in ``found``."""
        floats = [value for value in node.inputs if value is not None and _is_float(value)]
        held = [_held(value) for value in floats]
        makers = [value.producer() for value, array in zip(floats, held, strict=True) if array is None]
        codes = all(m is not None and (m.op_type == "DequantizeLinear" or m in found) for m in makers)
        return bool(makers) and codes and not any(array is not None and array.size > 1 for array in held)

    def _worth_it(self, nodes: set[ir.Node]) -> set[ir.Node]:
        """The connected groups of operators that hold weights."""
        root = {node: node for node in nodes}

        def of(node: ir.Node) -> ir.Node:
            while root[node] is not node:
                root[node] = root[root[node]]
                node = root[node]
            return node

        floats = [(node, value) for node in nodes for value in node.inputs if value is not None and _is_float(value)]
        for node, maker in ((node, value.producer()) for node, value in floats):
            if maker is not None and maker in root:
                root[of(maker)] = of(node)
        weights: Counter[ir.Node] = Counter()
        for node, value in floats:
            weights[of(node)] += _weights(value)
        return {node for node in nodes if weights[of(node)] >= _LEAST_WEIGHTS}


def _weights(value: ir.Value) -> int:
    """How many elements a constant has that an operator reads, itself or a Cast of it; 0 for others."""
    maker = value.producer()
    source = maker.inputs[0] if maker is not None and maker.op_type == "Cast" else value
    array = None if source is None else _held(source)
    return 0 if array is None else array.size


def _of_constants(node: ir.Node) -> bool:
    """Whether an operator reads constants alone, so that runtimes compute it once."""
    return all(value is None or _held(value) is not None for value in node.inputs)


def _ratio(source: ir.Value, made: ir.Value) -> float:
    """The number of elements of ``source`` per element of ``made``; unknown lengths count 1."""

    def size(value: ir.Value) -> int:
        return 1 if value.shape is None else math.prod(n for n in value.shape if isinstance(n, int))

    return max(1.0, size(source) / max(1, size(made)))


class _Writer:
    """Changes types and sets Casts."""

    def __init__(self, builder: Builder, model: ir.Model, kind: ir.DataType) -> None:
        self.builder, self.model, self.kind = builder, model, kind
        self.halves: set[ir.Value] = set()
        self._half: dict[ir.Value, ir.Value] = {}
        self._float: dict[ir.Value, ir.Value] = {}
        self._own: set[ir.Node] = set()
        self.casts = 0

    def write(self, nodes: set[ir.Node], half: Half) -> None:
        """Give ``nodes`` the half type."""
        graph = self.model.graph
        ports = {node: self._ports(node) for node in nodes}
        ends = [v for v in graph.inputs if half.inputs and not v.is_initializer()]
        made = [v for node in nodes for v in node.outputs]
        self.halves.update(filter(_is_float, (*ends, *made)))
        for value in self.halves:
            value.type = ir.TensorType(self.kind)
        for node in nodes:
            if node.op_type == "Cast" and self.halves.intersection(node.outputs):
                node.attributes.add(ir.AttrInt64("to", int(self.kind)))
        self._read_half([(node, port) for node in graph if node in nodes for port in ports[node]])
        self._read_float(nodes)
        self._write_outputs(half.outputs)

    def _read_float(self, nodes: set[ir.Node]) -> None:
        """Let all other operators, also in bodies, read outputs of ``nodes`` as float32."""
        read = [(value, use) for value in self.halves for use in value.uses() if use.node not in nodes]
        for value, use in read:
            if use.node not in self._own:
                use.node.replace_input_with(use.idx, self._in_float(value))

    def _read_half(self, places: Sequence[tuple[ir.Node, int]]) -> None:
        """Convert inputs of operators to half precision, and drop unused constants."""
        read: dict[ir.Value, None] = {}
        for node, port in places:
            source = node.inputs[port]
            if source is not None and source not in self.halves:
                node.replace_input_with(port, self._in_half(source))
                read[source] = None
        for source in read:
            self._drop(source)

    def _drop(self, value: ir.Value) -> None:
        """Remove a float32 constant without readers."""
        maker = value.producer()
        remove_unread(value)
        unread = not value.uses() and not value.is_graph_output()
        if unread and maker is not None and maker.graph is not None and maker.op_type == "Constant":
            maker.graph.remove(maker, safe=True)

    def _ports(self, node: ir.Node) -> list[int]:
        """The inputs that have the type of the operator, not one of their own."""
        schema = _schema(node, self.model.opset_imports)
        last = len(schema.inputs) - 1
        return [
            i for i, value in enumerate(node.inputs)
            if _is_float(value) and schema.inputs[min(i, last)].type_str not in schema.inputs[min(i, last)].types
        ]  # fmt: skip

    def _cast(self, value: ir.Value, kind: ir.DataType, suffix: str) -> ir.Value:
        maker = value.producer()
        first = next(iter(self.model.graph))
        place = after(maker) if maker is not None else lambda node: self.model.graph.insert_before(first, node)
        made = self.builder.emit(place, "Cast", [value], f"{value.name}_{suffix}", kind, to=int(kind))
        made_by = made.producer()
        assert made_by is not None
        self._own.add(made_by)
        self.casts += 1
        return made

    def _in_half(self, value: ir.Value) -> ir.Value:
        """``value``, float32, cast to half precision."""
        if value not in self._half:
            maker, array = value.producer(), _held(value)
            source = maker.inputs[0] if maker is not None and maker.op_type == "Cast" else None
            if source is not None and source.dtype == self.kind:
                self._half[value] = source
            elif array is not None:
                held = np.clip(array, -LIMITS["float16"], LIMITS["float16"]) if self.kind == D.FLOAT16 else array
                held = np.where(np.isfinite(array), held, array)
                name = str(value.name)
                made = self.builder.initializer(f"{name}_half", held.astype(self.kind.numpy()))
                self._half[value] = made
            else:
                self._half[value] = self._cast(value, self.kind, "half")
        return self._half[value]

    def _in_float(self, value: ir.Value) -> ir.Value:
        """``value``, half precision, cast to float32."""
        if value not in self._float:
            self._float[value] = self._cast(value, D.FLOAT, "float")
        return self._float[value]

    def _write_outputs(self, in_half: bool) -> None:
        """Convert the outputs of the file to the requested type; names stay."""
        graph, builder = self.model.graph, self.builder
        for i, value in enumerate(graph.outputs):
            if value in self.halves and not in_half:
                made = self._in_float(value)
            elif _is_float(value) and in_half and value.producer() is not None:
                made = self._in_half(value)
            else:
                continue
            name = str(value.name)
            made_by = made.producer()
            assert made_by is not None
            if not value.is_graph_input():
                value.name = builder.names.value(f"{name}_inside")
                made.name = name
            graph.outputs[i] = made


_HALF, _FLOAT, _DOUBLE = ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE
#: operators that have kernels for every type, or only pass values on to their bodies
_MOVES = frozenset(
    ("Cast", "Concat", "Constant", "ConstantOfShape", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "If", "Loop",
     "Reshape", "Scan", "ScatterElements", "ScatterND", "Shape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")
)  # fmt: skip
#: operators without a kernel of float64 in ONNX Runtime 1.31, of those whose definition has the type
_NO_DOUBLE = frozenset(
    ("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "AveragePool", "Bernoulli", "Col2Im", "Conv", "ConvTranspose", "Cosh",
     "Elu", "Erf", "Gelu", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "GroupNormalization", "GRU", "HardSigmoid",
     "HardSwish", "Hardmax", "InstanceNormalization", "LRN", "LSTM", "LeakyRelu", "LpPool", "MaxUnpool", "Mean",
     "MeanVarianceNormalization", "Mish", "NonZero", "OneHot", "PRelu", "RNN", "Resize", "Selu", "Sinh", "Softplus", "Softsign",
     "Tan", "ThresholdedRelu")
)  # fmt: skip


def compute_in_float(model: ir.Model) -> None:
    """Let every operator of ``model`` without a kernel for its type compute in float32, in place.

    Markers mark the float32 values, as quantizers compute in float32.

    Raises:
        ExportError: a recurrent layer is in bfloat16, whose steps the simulation rounds to it one by one.
    """
    builder = Builder(model)
    found = [(node, kind) for node in all_nodes(model.graph) if (kind := _lacking(node)) is not None]
    for node, kind in found:
        # the rounding comes after the bias, as in PyTorch
        _widen(builder, node, kind, rounded=kind == _DOUBLE or not _is_biased(node))
    ends = [v for v in (*model.graph.inputs, *model.graph.outputs) if v.dtype == _HALF]
    for value in dict.fromkeys(ends):
        if value.is_graph_input():
            _widen_input(builder, value)
        else:
            _widen_output(builder, value)
    if found or ends:
        model.graph.sort()


def _lacking(node: ir.Node) -> ir.DataType | None:
    """The type that ``node`` computes in without a kernel for it.

    Raises: as :func:`compute_in_float`.
    """
    kinds = {v.dtype for v in (*node.inputs, *node.outputs) if v is not None}
    if _HALF in kinds and node.op_type in CELLS:
        raise ExportError(
            str(node.name),
            f"the {node.op_type} is in bfloat16, for which ONNX Runtime has no kernels on CPUs, and in float32 its steps "
            "would give other results than the simulation's",
            "convert this layer, or the simulation, first: sim.model.float(); its encodings stay as they are",
        )
    if _HALF in kinds and node.op_type not in _MOVES:
        return _HALF
    return _DOUBLE if _DOUBLE in kinds and (node.op_type in _NO_DOUBLE or is_site(node)) else None


def _widen_output(builder: Builder, value: ir.Value) -> None:
    maker = value.producer()
    if maker is None:
        return
    wide = builder.emit(after(maker), "Cast", [value], f"{value.name}_float", _FLOAT, to=int(_FLOAT))
    name, value.name = value.name, builder.names.value(f"{value.name}_half")
    builder.outputs.replace(value, wide)
    wide.name = name


def _is_biased(node: ir.Node) -> bool:
    """Whether ``node`` is a product to which only a bias is added: one call of PyTorch, two operators in a file."""
    uses = tuple(node.outputs[0].uses())
    if node.op_type != "MatMul" or len(uses) != 1 or uses[0].node.op_type != "Add" or node.outputs[0].is_graph_output():
        return False
    bias = uses[0].node.inputs[1 - uses[0].idx]
    while bias is not None and (maker := bias.producer()) is not None and (maker.op_type == "Cast" or is_site(maker)):
        bias = maker.inputs[0]
    return bias is not None and bias.is_initializer() and bias.shape is not None and len(bias.shape) == 1


def _widen(builder: Builder, node: ir.Node, kind: ir.DataType, *, rounded: bool) -> None:
    """Cast inputs of ``node`` of type ``kind`` to float32, and its results back if they are ``rounded``."""
    for i, value in enumerate(node.inputs):
        if value is not None and value.dtype == kind:
            wide = builder.emit(before(node), "Cast", [value], f"{value.name}_float", _FLOAT, to=int(_FLOAT))
            node.replace_input_with(i, wide)
    for value in node.outputs:
        if value.dtype != kind:
            continue
        value.dtype = _FLOAT
        if not rounded:
            continue
        back = builder.emit(after(node), "Cast", [value], f"{value.name}_{kind.name.lower()}", kind, to=int(kind))
        made = back.producer()
        assert made is not None
        move_uses(value, back, keep={made})
        name, value.name = value.name, builder.names.value(f"{value.name}_wide")
        builder.outputs.replace(value, back)
        back.name = name


def _widen_input(builder: Builder, value: ir.Value) -> None:
    readers = [use.node for use in value.uses()]
    value.dtype = _FLOAT
    if not readers:
        return
    half = builder.emit(before(builder.graph[0]), "Cast", [value], f"{value.name}_half", _HALF, to=int(_HALF))
    made = half.producer()
    assert made is not None
    move_uses(value, half, keep={made})
