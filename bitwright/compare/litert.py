"""Compare a LiteRT file with the simulation tensor by tensor; each operator is fed the simulation's own codes.

The file itself is cut: after every tensor of a site its readers read a new input instead, and the tensor becomes an
output. All operators, weights, scales and options are those of the file. What comes out is compared twice: with the
runtime's reference kernels, which compute as the format's specification says, and with those that it takes by default.

The simulation rounds float sums once; LiteRT's kernels rescale integer sums in fixed point, with two roundings.
:func:`specified` computes what a reference kernel makes of the codes that it reads, which tells whether a difference is due
to these roundings alone. Source: ``tensorflow/lite/kernels/internal/reference`` and ``.../reference/integer_ops``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import Agreement, compare, level
from bitwright.compare.cut import Cut, Place, cut_by_sites
from bitwright.compare.reasons import Evidence, measured
from bitwright.compare.report import OutputRow, Row, VerifyReport
from bitwright.compare.runtime import run_model
from bitwright.errors import ExportError
from bitwright.executors.litert import FLAT_KERNELS
from bitwright.executors.profile import find_profile
from bitwright.executors.rounding import rescaling_error, wide_rescaling_error
from bitwright.executors.tensors import Call, Grid, Tensor
from bitwright.export.litert.convert import METADATA, to_tflite
from bitwright.export.litert.flat import pack, schema
from bitwright.export.qdq.forms import read_metadata
from bitwright.runtimes.adapters import LitertSession, find_runtime, flat_edges, session_of
from bitwright.runtimes.onnxruntime import as_values, refusals

Array = NDArray[Any]


def specified(kind: str, call: Call) -> Array | None:
    """The codes that the reference kernel of ``kind`` makes; ``None`` where its arithmetic is not told.

    Args:
        kind: of the operator, as the schema names it.
        call: what it reads, and the grid that it writes to; the variant ``once`` rescales with one rounding, a half to even, as
            the simulation does.
    """
    variant = find_profile("litert_reference").kernels.get(kind)
    if variant is None or call.grid.dtype not in _CODES_OF or kind not in RESCALES:
        return None
    if kind != "QUANTIZE" and any(operand is None or not operand.scale.size for operand in call.inputs[:2]):
        return None  # data or a weight in float
    if call.variant != "once":
        call = replace(call, variant=variant)
    return FLAT_KERNELS[kind][call.variant](call)


#: operators that rescale sums, whose arithmetic is told here and in which a difference is looked for
RESCALES = frozenset(
    ("QUANTIZE", "CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "BATCH_MATMUL", "MUL", "ADD", "SUB", "LEAKY_RELU")
)
_CODES_OF = (np.dtype(np.int8), np.dtype(np.int16))

# ------------------------------------------------------------------------------------------------------------- bounds

#: operators that pass on codes as they are
MOVES_CODES = frozenset(
    (
        "RESHAPE", "TRANSPOSE", "PAD", "PADV2", "STRIDED_SLICE", "SLICE", "SPLIT", "CONCATENATION", "GATHER", "MAX_POOL_2D",
        "PACK", "BROADCAST_TO", "DEPTH_TO_SPACE", "SPACE_TO_DEPTH", "RESIZE_NEAREST_NEIGHBOR", "TILE", "MAXIMUM", "MINIMUM",
        "RELU", "EXPAND_DIMS", "SQUEEZE", "DEQUANTIZE",
    )
)  # fmt: skip
_SUMS = frozenset(("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV", "BATCH_MATMUL"))
# What functions are off by, in steps of their output, over every code of 8 bits: their tables and polynomials have few bits.
# Measured over all codes and many scales; tests/export/litert/test_litert.py holds each.
FUNCTION_ERRORS = {"LOGISTIC": 0.6, "TANH": 0.6, "SOFTMAX": 0.6, "HARD_SWISH": 0.6, "GELU": 0.05}
# The same of 16 bits, of which a step is 1/32768: they interpolate between 256 or 512 points.
_WIDE_FUNCTION_ERRORS = {"LOGISTIC": 2.0, "TANH": 2.0, "SOFTMAX": 16.0}
#: of the simulation's own value before rounding, computed in single precision
FLOAT_SUMS = 0.02
_CODES, _WIDE_CODES = 255.0, 32768.0
_SLOPE_BITS = 8  # fractional bits of slopes in XNNPACK's kernels


def arithmetic_error(kind: str, inputs: Sequence[Array], output: Array, options: Any, wide: bool) -> float:
    """Largest error of a kernel's arithmetic before rounding, in steps of its output.

    Args:
        kind: of the operator.
        inputs, output: scales, float64, none of floats.
        options: fields of the operator's table.
        wide: whether activations have 16 bits.

    Returns:
        The larger one of reference and default kernels: derived from the roundings of products and sums
        (:mod:`bitwright.export.litert.flat`), and for functions what was measured over all codes.
    """
    known = (_WIDE_FUNCTION_ERRORS if wide else FUNCTION_ERRORS).get(kind, 0.0)
    factors = _factors(kind, inputs, output, options)
    if not factors:
        return max(FLOAT_SUMS, known)
    found = max(rescaling_error(factor) for factor in factors)
    if wide and kind in _SUMS:
        found = max(found, *(wide_rescaling_error(factor, _WIDE_CODES) for factor in factors))
    if kind in ("LEAKY_RELU", "PRELU"):
        found = max(found, _CODES * 2.0 ** -(_SLOPE_BITS + 1))
    return max(FLOAT_SUMS + found, known)


def _factors(kind: str, inputs: Sequence[Array], output: Array, options: Any) -> list[Array]:
    """The factors that the kernel rescales by; none where it does not, or computes in float."""
    if kind == "TRANSPOSE_CONV":  # the shape of the output comes first
        inputs = [*inputs[2:0:-1]]
    if not output.size or not inputs or not inputs[0].size:
        return []
    first = inputs[0] / output[0]
    second = inputs[1] if len(inputs) > 1 else np.empty(0)
    if kind in ("QUANTIZE", "LEAKY_RELU"):
        slope = abs(getattr(options, "alpha", 1.0) or 1.0)
        return [first, first * slope]
    if kind == "PRELU":
        return [first, first * second] if second.size else []
    if kind in ("ADD", "SUB"):
        return [2 * np.maximum(inputs[0], second) / (output[0] * (1 << 15))] if second.size else []
    return [first * second] if (kind in _SUMS or kind == "MUL") and second.size else []


Values = Mapping[str, Array | Sequence[Array]]

_DAMAGED = "export again, or copy the folder anew"


@dataclass(frozen=True)
class _Site:
    """A tensor of the file that holds the codes of a site.

    Attributes:
        places: site and run of it.
        format: of the simulated grid.
        tensor: index.
        perm: order of its axes.
        scale, zero_point: of its codes.
        dtype: numpy's type of the codes.
    """

    places: list[tuple[str, int]]
    format: str
    tensor: int
    perm: tuple[int, ...]
    scale: np.float32
    zero_point: int
    dtype: Any
    name: str

    def codes(self, values: Array) -> Array:
        """Dequantized values as codes of the file, in its order of axes."""
        info = np.iinfo(self.dtype)
        codes = np.rint(values.astype(np.float64) / float(self.scale)) + self.zero_point
        return np.ascontiguousarray(np.clip(codes, info.min, info.max).astype(self.dtype).transpose(self.perm))

    def values(self, codes: Array) -> Array:
        """Codes of the file as values, in ONNX's order of axes."""
        floats = (codes.astype(np.int64) - self.zero_point).astype(np.float32) * self.scale
        return np.asarray(floats, np.float32).transpose(np.argsort(self.perm))


class FlatFile:
    """A LiteRT file that an export of ours wrote.

    Args:
        content: its bytes.
        name: for messages.

    Raises:
        ExportError: it is another kind of file, or another tool wrote it.
    """

    def __init__(self, content: bytes, name: str = "the LiteRT file") -> None:
        known = schema()
        try:
            self.model = known.ModelT.InitFromObj(known.Model.GetRootAsModel(content, 0))
            noted = {entry.name.decode(): entry.buffer for entry in self.model.metadata or []}
            facts = json.loads(bytes(self.model.buffers[noted[METADATA]].data))
            self.facts: dict[str, Any] = facts
            self.sites = [self._site(found) for found in facts["sites"]]
            self.graph = self.model.subgraphs[0]
            names = {v: k for k, v in vars(known.BuiltinOperator).items() if not k.startswith("_")}
            self.kinds = [names[code.builtinCode] for code in self.model.operatorCodes]
            self._check_indices()
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
            problem = "it is not a LiteRT file with the notes of an export"
            raise ExportError(name, problem, _DAMAGED) from error
        except Exception as error:  # flatbuffers raises struct.error and classes of its own
            raise ExportError(name, f"it cannot be read as a LiteRT file: {error}", _DAMAGED) from error
        self.makers = {int(out): i for i, op in enumerate(self.graph.operators) for out in op.outputs}

    def _check_indices(self) -> None:
        """Raise an IndexError where an operator, a tensor or the graph counts beyond what the file holds."""
        graph, count = self.graph, len(self.graph.tensors)
        operators = graph.operators
        tensors = [i for op in operators for i in (*op.outputs, *(i for i in op.inputs if i != -1))]
        inside = (
            all(0 <= i < count for i in (*tensors, *graph.inputs, *graph.outputs))
            and all(len(op.outputs) and 0 <= op.opcodeIndex < len(self.kinds) for op in operators)
            and all(0 <= tensor.buffer < len(self.model.buffers) for tensor in graph.tensors)
        )
        if not inside:
            raise IndexError

    def _site(self, found: Mapping[str, Any]) -> _Site:
        tensor = self.model.subgraphs[0].tensors[found["tensor"]]
        grid, known = tensor.quantization, schema().TensorType
        return _Site(
            [(str(site), int(run)) for site, run in found["places"]],
            str(found["format"]),
            int(found["tensor"]),
            tuple(found["perm"]),
            np.float32(grid.scale[0]),
            int(grid.zeroPoint[0]),
            {known.INT8: np.int8, known.INT16: np.int16}[tensor.type],
            tensor.name.decode(),
        )

    def tensor(self, index: int, values: Array) -> Tensor:
        """``values`` on the grid of a tensor of the file."""
        grid = self.graph.tensors[index].quantization
        scale = [] if grid is None or grid.scale is None else grid.scale
        zero = int(grid.zeroPoint[0]) if len(scale) else 0
        return Tensor(values, np.asarray(scale, np.float32), zero)

    def kernels(self, site: _Site) -> list[str]:
        """Kinds of the operators between the sites before ``site`` and itself, in execution order."""
        return [self.kinds[self.graph.operators[i].opcodeIndex] for i in self.indices(site)]

    def kernel_of(self, site: _Site, variants: Mapping[str, str] = MappingProxyType({})) -> str:
        """Kind and type of the kernel that makes the codes of ``site``, such as ``CONV_2D int8``; ``float`` where none does.

        Args:
            site: where codes are made.
            variants: kind -> how a target computes it; the last of these on the way, if there is one, is named with it.
        """
        kinds = self.kernels(site)
        named = [kind for kind in kinds if kind in variants and kind != "QUANTIZE"]
        if named:
            return f"{named[-1]} {variants[named[-1]]}"
        return f"{kinds[-1]} {np.dtype(site.dtype).name}" if kinds and kinds[-1] != "QUANTIZE" else "float"

    def indices(self, site: _Site) -> list[int]:
        """Places of these operators in the file."""
        ends, makers = {one.tensor for one in self.sites if one is not site}, self.makers
        found: set[int] = set()
        stack = [site.tensor]
        while stack:
            index = makers.get(stack.pop())
            if index is None or index in found:
                continue
            found.add(index)
            inputs = self.graph.operators[index].inputs
            stack.extend(int(i) for i in inputs if i >= 0 and int(i) not in ends)
        return sorted(found)

    def bound(self, site: _Site) -> float:
        """Largest error of the arithmetic of the kernels before ``site``, in steps of its grid."""

        def scales(tensor: int) -> Array:  # none of floats, and of an input that is left out
            grid = self.graph.tensors[int(tensor)].quantization if tensor >= 0 else None
            return np.asarray([] if grid is None or grid.scale is None else grid.scale, np.float64)

        wide, errors = np.dtype(site.dtype).itemsize > 1, [0.0]
        for op in (self.graph.operators[i] for i in self.indices(site)):
            kind, inputs = self.kinds[op.opcodeIndex], [scales(i) for i in op.inputs]
            errors.append(arithmetic_error(kind, inputs, scales(op.outputs[0]), op.builtinOptions, wide))
        return max(errors)

    def cut(self, sites: Sequence[_Site]) -> bytes:
        """The file with an input after each of ``sites``, called ``site:<i>``, and the sites as outputs ``made:<i>``."""
        known, graph = schema(), self.graph
        tensors = {site.tensor: i for i, site in enumerate(sites)}
        copies: dict[int, int] = {}
        saved = (list(graph.tensors), list(graph.inputs), list(graph.outputs), [op.inputs for op in graph.operators])
        names = [tensor.name for tensor in graph.tensors]
        for tensor, i in tensors.items():
            source, made = graph.tensors[tensor], known.TensorT()
            for key, value in vars(source).items():
                setattr(made, key, value)
            made.name, source.name = f"site:{i}".encode(), f"made:{i}".encode()
            copies[tensor] = len(graph.tensors)
            graph.tensors.append(made)
        for op in graph.operators:
            op.inputs = np.asarray([copies.get(int(i), int(i)) for i in op.inputs], np.int32)
        graph.inputs = [*saved[1], *copies.values()]
        graph.outputs = list(tensors)
        signatures, self.model.signatureDefs = self.model.signatureDefs, None
        content = pack(self.model)
        self.model.signatureDefs = signatures
        graph.tensors, graph.inputs, graph.outputs = saved[:3]
        for op, inputs in zip(graph.operators, saved[3], strict=True):
            op.inputs = inputs
        for tensor, name in zip(graph.tensors, names, strict=True):
            tensor.name = name
        return content


def verify_litert(
    content: bytes, model: ir.Model, values: Values, graph_inputs: Mapping[str, Array], outputs: Mapping[str, Array]
) -> VerifyReport:
    """Compare a LiteRT file with the simulation.

    Args:
        content: of the file.
        model: the QDQ model that it was made of, in which values before rounding are computed.
        values: site -> what the simulation had there, as :func:`bitwright.compare.verify.verify_layers` takes it.
        graph_inputs: name -> value.
        outputs: name -> what the simulation returned.

    Returns:
        A report whose modes are the reference kernels (``as_float``) and the default ones (``as_integer``).

    Raises:
        ExportError: the file is damaged, or the runtime refuses it.
    """
    file, cut = FlatFile(content), cut_by_sites(model, values, {})
    found = _places(file, cut)
    feeds = {**graph_inputs, **{f"site:{i}": site.codes(place.expected) for i, (site, place) in enumerate(found)}}
    flat = file.cut([site for site, _ in found])
    session, by_reference = _ran(flat, True, feeds)
    made = (by_reference, _ran(flat, False, feeds)[1])
    specified = _Specified(FlatFile(flat), session)
    rows: list[Row] = []
    for i, (site, place) in enumerate(found):
        codes = [site.values(one[f"made:{i}"]) for one in made]
        ends = [compare(place.expected, one, place.facts, place.scale) for one in codes]
        if not all(a.ok for a in ends):
            ends = _measured(file, site, place, ends, codes, _before_rounding(cut, place, graph_inputs))
        rows += _rows(file, site, place, ends, specified)
    edges = flat_edges(content).get("outputs", {})
    ran = [as_values(edges, _ran(content, reference, graph_inputs)[1]) for reference in (True, False)]
    whole = tuple(OutputRow(name, *(level(array, one.get(name)) for one in ran)) for name, array in outputs.items())
    return VerifyReport(tuple(rows), whole, cut.unchecked, {}, {}, "litert")


def _places(file: FlatFile, cut: Cut) -> list[tuple[_Site, Place]]:
    """The sites that kernels make, each with its place; codes that the file is fed are made by none."""
    known = {(site, run): place for place in cut.places for site, run in place.facts["places"]}
    given = set(map(int, file.graph.inputs))
    return [(s, known[s.places[0]]) for s in file.sites if s.places[0] in known and s.tensor not in given]


def _rows(file: FlatFile, site: _Site, place: Place, ends: Sequence[Agreement], specified: _Specified) -> Iterator[Row]:
    ops, share, once = file.kernels(site), specified.share(file.indices(site)), None
    if ends[0].equal < 1 and (codes_once := specified.rounded_once(site)) is not None:
        once = compare(place.expected, site.values(codes_once), place.facts, place.scale).equal
    why = _why(ops, ends, share, once)
    facts = (site.name, site.format, tuple(ops), file.kernel_of(site), ends[0], ends[1], why, share, once)
    yield from (Row(name, run, *facts) for name, run in site.places)


def _measured(
    file: FlatFile, site: _Site, place: Place, ends: Sequence[Agreement], codes: Sequence[Array], before: Array | None
) -> list[Agreement]:
    """Agreements that fail, with the distance of their codes from the value before rounding."""
    bound = file.bound(site)
    known = [Evidence.of(place, {"float": end}, {}) for end in ends]
    return [
        end if end.ok else measured(evidence, "float", place, code, place.expected, before, bound)
        for end, evidence, code in zip(ends, known, codes, strict=True)
    ]


def _before_rounding(cut: Cut, place: Place, graph_inputs: Mapping[str, Array]) -> Array | None:
    """Float value before the quantizer of ``place``; ``None`` at an input, or where the runtime refuses the part."""
    if not place.chain or place.entry.producer() is None:
        return None
    model, feeds = cut.before([place])
    try:
        return run_model(model, {**graph_inputs, **feeds}, "float")[str(place.entry.name)]
    except refusals():
        return None


def _ran(content: bytes, reference: bool, feeds: Mapping[str, Array]) -> tuple[LitertSession, dict[str, Array]]:
    """A session that keeps its tensors, and its outputs.

    Raises:
        ExportError: the runtime refuses the file.
    """
    try:
        session = session_of(content, reference=reference, keeps=reference)
        return session, session.run(feeds)
    except (RuntimeError, ValueError) as error:
        problem = f"LiteRT refuses the file: {' '.join(str(error).split())[:400]}"
        raise ExportError("the LiteRT file", problem, find_runtime("litert").remedy) from error


def _why(ops: Sequence[str], found: Sequence[Agreement], specified: float | None, once: float | None) -> str | None:
    if all(a.equal == 1 for a in found):
        return None
    named = [kind for kind in ops if kind in FUNCTION_ERRORS]
    if any(not (a.ok or a.within) for a in found):
        return "unexplained: the operator computes something else than the simulation"
    if named:
        return f"{named[-1]} of LiteRT approximates on integers"
    if specified == 1:
        return (
            "reference kernels of LiteRT rescale in fixed point, with two roundings (QUANTIZE: a half away from zero), where the "
            "simulation rounds float sums once, a half to even; computed as they are specified, every code is equal"
            + ("" if once is None else f"; with one rounding {once:.2%} would be those of the simulation")
        )
    return "kernels of LiteRT rescale in fixed point, where the simulation rounds float sums"


class _Specified:
    """Codes of every operator in a run beside those that its reference kernel is specified to compute from the same inputs.

    Args:
        file: that ran.
        session: that ran it and kept its tensors.
    """

    def __init__(self, file: FlatFile, session: LitertSession) -> None:
        self._file, self._session = file, session
        self._found: dict[int, float | None] = {}

    def share(self, operators: Sequence[int]) -> float | None:
        """The lowest share of codes equal to the specified ones over these operators; ``None`` where one cannot be told.

        Operators that only move codes, or compute in float, are left out.
        """
        shares: list[float] = []
        for index in filter(self._makes_codes, operators):
            if index not in self._found:
                kind, call, made = self._call(index)
                codes = specified(kind, call)
                self._found[index] = None if codes is None else float((codes == made).mean())
            share = self._found[index]
            if share is None:
                return None
            shares.append(share)
        return min(shares, default=None)

    def _makes_codes(self, index: int) -> bool:
        op = self._file.graph.operators[index]
        grid = self._file.graph.tensors[int(op.outputs[0])].quantization
        moves = self._file.kinds[op.opcodeIndex] in MOVES_CODES
        return not moves and grid is not None and grid.scale is not None and len(grid.scale) > 0

    def rounded_once(self, site: _Site) -> Array | None:
        """The codes of ``site``, if the operator that makes them rounded once; ``None`` where that cannot be told."""
        index = self._file.makers.get(site.tensor)
        if index is None or not self._makes_codes(index):
            return None
        kind, call, _ = self._call(index)
        return specified(kind, replace(call, variant="once"))

    def _call(self, index: int) -> tuple[str, Call, Array]:
        """The kind of an operator, what it reads, and what it made."""

        def tensor(index: int) -> Tensor:
            return self._file.tensor(index, self._session.interpreter.get_tensor(index))

        op = self._file.graph.operators[index]
        inputs = tuple(None if i < 0 else tensor(int(i)) for i in op.inputs)
        made = tensor(int(op.outputs[0]))
        options = {} if op.builtinOptions is None else vars(op.builtinOptions)
        call = Call(inputs, Grid(made.values.dtype, made.step, made.zero_point), options, "")
        return self._file.kinds[op.opcodeIndex], call, made.values


# ------------------------------------------------------------------------------------------ parts of a model


def run_converted(
    model: ir.Model,
    feeds: Mapping[str, Array],
    types: dict[str, str] | None = None,
    errors: dict[str, float] | None = None,
    opened: Callable[[bytes], Any] = session_of,
    variants: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Array]:
    """Graph outputs of ``model`` by name, as the kernels that LiteRT takes by default make them.

    Args:
        model: as ``to_qdq`` wrote it, or a part of it that begins and ends in floats.
        feeds: by name of graph input; what the model does not read is left out.
        types: filled with the codes of every site -> kernel, such as ``CONV_2D int8``; ``float`` where none makes them.
        errors: filled with the codes of every site -> how far the arithmetic of these kernels may bring a value, in steps.
        opened: what runs the file that the model is converted to.
        variants: kind of operator -> how a target computes it; ``types`` has that in place of the type of codes.

    Raises:
        ConfigError: LiteRT is not installed.
        ExportError: an operator has no form in LiteRT.
    """
    find_runtime("litert")
    names = [str(value.name) for value in model.graph.inputs if not value.is_initializer()]
    content = to_tflite(model, {name: np.asarray(feeds[name]) for name in names}, fixed=True).content
    if types is not None or errors is not None:
        file = FlatFile(content)
        sites = {tuple(site.places[0]): site for site in file.sites}
        for codes, place in _codes(model):
            site = sites.get(place)
            (types if types is not None else {})[codes] = "float" if site is None else file.kernel_of(site, variants)
            (errors if errors is not None else {})[codes] = 0.0 if site is None else file.bound(site)
    found: dict[str, Array] = opened(content).run(feeds)
    return found


def _codes(model: ir.Model) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The codes of every site, and its first place."""
    for node in model.graph:
        facts, codes = read_metadata(node), node.inputs[0] if node.inputs else None
        if facts is not None and facts["role"] == "activation" and codes is not None:
            yield str(codes.name), tuple(facts["places"][0])
