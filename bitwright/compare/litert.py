"""A LiteRT file against the simulation, tensor by tensor, each operator fed the simulation's own codes.

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
from dataclasses import dataclass
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
from bitwright.export.litert.convert import METADATA, to_tflite
from bitwright.export.litert.flat import (
    pack,
    quantize_multiplier,
    rescaled,
    rescaled_once,
    rescaled_wide,
    rescaling_error,
    schema,
    wide_rescaling_error,
)
from bitwright.export.qdq.forms import read_metadata
from bitwright.runtimes.adapters import LitertSession, find_runtime, session_of
from bitwright.runtimes.onnxruntime import refusals

Array = NDArray[Any]
_ADD_SHIFT = {np.dtype(np.int8): 20, np.dtype(np.int16): 15}  # bits that sums are computed finer by


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file in one run.

    Attributes:
        values: codes, or floats.
        scale: float32; empty of floats, one per channel of some weights.
        zero_point: of the first scale; others have the same.
    """

    values: Array
    scale: Array
    zero_point: int = 0

    @property
    def step(self) -> np.float32:
        """The only scale."""
        return np.float32(self.scale[0])

    @property
    def centred(self) -> Array:
        """Codes from zero on, int64."""
        return self.values.astype(np.int64) - self.zero_point


@dataclass(frozen=True)
class Call:
    """One operator in one run.

    Attributes:
        inputs: ``None`` where one is left out.
        output: its grid; the values are those that the runtime made.
        options: fields of the operator's table.
        once: rescale with one rounding, a half to even, as the simulation does, instead of as the kernel does.
    """

    inputs: tuple[Tensor | None, ...]
    output: Tensor
    options: Any
    once: bool = False

    def read(self, port: int) -> Tensor:
        """An input that must be there."""
        found = self.inputs[port]
        assert found is not None
        return found


def specified(kind: str, call: Call) -> Array | None:
    """The codes that the reference kernel of ``kind`` makes; ``None`` where its arithmetic is not told here.

    Args:
        kind: of the operator, as the schema names it.
        call: what it reads, and the grid that it writes to.
    """
    kernel = KERNELS.get(kind)
    if kernel is None or call.output.values.dtype not in _ADD_SHIFT:
        return None
    if kind != "QUANTIZE" and any(operand is None or not operand.scale.size for operand in call.inputs[:2]):
        return None  # data or a weight in float
    sums = kernel(call)
    info = np.iinfo(call.output.values.dtype)
    low, high = float(info.min), float(info.max)
    activation = getattr(call.options, "fusedActivationFunction", 0)
    if activation:
        bounds = {1: (0.0, np.inf), 2: (-1.0, 1.0), 3: (0.0, 6.0)}[activation]
        ends = [b if np.isinf(b) else _away(np.float32(b) / call.output.step) for b in bounds]
        low, high = (max(low, ends[0] + call.output.zero_point), min(high, ends[1] + call.output.zero_point))
    return np.asarray(np.clip(sums + call.output.zero_point, low, high)).astype(call.output.values.dtype)


def _away(values: Any) -> Any:
    """To nearest, a half away from zero, as C's ``round``."""
    return np.sign(values) * np.floor(np.abs(values) + np.asarray(0.5, np.asarray(values).dtype))


def _scaled(call: Call, sums: Array, factor: Any) -> Array:
    """Sums on the grid of the output; ``factor`` broadcasts against them from the last axis."""
    wide = call.output.values.dtype == np.int16
    return _times(call, sums, factor, rescaled_wide if wide else rescaled)


def _times(call: Call, sums: Array, factor: Any, rescale: Callable[..., Array] = rescaled) -> Array:
    """``sums * factor``, rounded by ``rescale``, or once where the call asks for that."""
    if call.once:
        return np.rint(sums * np.asarray(factor, np.float64)).astype(np.int64)
    return rescale(sums, *quantize_multiplier(factor))


def _quantize(call: Call) -> Array:
    source = call.read(0)
    if not source.scale.size:
        steps = source.values.astype(np.float32) / call.output.step
        return np.asarray((np.rint if call.once else _away)(steps)).astype(np.int64)
    return _times(call, source.centred, np.float64(source.step) / np.float64(call.output.step))


def _product(call: Call, sums: Array, rescale: Callable[..., Array] | None = None) -> Array:
    """Sums of products with a weight, and the bias, on the grid of the output; a factor per output channel."""
    data, weight = call.read(0), call.read(1)
    bias = call.inputs[2] if len(call.inputs) > 2 else None
    sums = sums if bias is None else sums + bias.values.astype(np.int64)
    factor = np.float64(data.step) * weight.scale.astype(np.float64) / np.float64(call.output.step)
    return _scaled(call, sums, factor) if rescale is None else _times(call, sums, factor, rescale)


def _fully_connected(call: Call) -> Array:
    data, weight = call.read(0), call.read(1)
    sums = _exact_product(data.centred.reshape(-1, weight.values.shape[1]), weight.centred.T)
    if weight.scale.size > 1:
        return _product(call, sums, rescaled_once).reshape(call.output.values.shape)
    bias = call.inputs[2] if len(call.inputs) > 2 else None
    sums = sums if bias is None else sums + bias.values.astype(np.int64)
    # the kernel multiplies the scales in single precision
    factor = np.float64(data.step * np.float32(weight.scale[0])) / np.float64(call.output.step)
    return _scaled(call, sums, factor).reshape(call.output.values.shape)


def _exact_product(a: Array, b: Array) -> Array:
    """A product of integer matrices whose sums stay below 2 ** 53, by the fast float one."""
    return np.rint(a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)


def _batch_matmul(call: Call) -> Array:
    a, b = call.read(0), call.read(1)
    one = a.centred.swapaxes(-1, -2) if call.options.adjX else a.centred
    other = b.centred.swapaxes(-1, -2) if call.options.adjY else b.centred
    factor = np.float64(a.step * b.step) / np.float64(call.output.step)
    return _scaled(call, _exact_product(one, other), factor)


def _windows(call: Call) -> Array:
    """What every position of the filter reads: ``[batch, rows, columns, filter rows, filter columns, channels]``."""
    data, weight, options = call.read(0), call.read(1), call.options
    size = weight.values.shape[1:3]
    stride, dilation = (options.strideH, options.strideW), (options.dilationHFactor, options.dilationWFactor)
    out = call.output.values.shape[1:3]
    pads = []
    for n, k, s, d, o in zip(data.values.shape[1:3], size, stride, dilation, out, strict=True):
        missing = max((o - 1) * s + (k - 1) * d + 1 - n, 0)
        pads.append((missing // 2, missing - missing // 2))
    image = np.pad(data.centred, [(0, 0), *pads, (0, 0)])
    reach = [(k - 1) * d + 1 for k, d in zip(size, dilation, strict=True)]
    views = np.lib.stride_tricks.sliding_window_view(image, reach, (1, 2))
    views = views[:, :: stride[0], :: stride[1], :, :: dilation[0], :: dilation[1]]
    return views[:, : out[0], : out[1]].transpose(0, 1, 2, 4, 5, 3)


def _conv(call: Call) -> Array:
    windows, weight = _windows(call), call.read(1)
    groups = windows.shape[-1] // weight.values.shape[-1]
    parts = zip(np.split(windows, groups, -1), np.split(weight.centred, groups), strict=True)
    sums = [
        _exact_product(rows.reshape(*rows.shape[:3], -1), filters.reshape(len(filters), -1).T)
        for rows, filters in parts
    ]
    return _product(call, np.concatenate(sums, -1))


def _depthwise(call: Call) -> Array:
    windows, weight = _windows(call), call.read(1)
    windows = np.repeat(windows, call.options.depthMultiplier, -1)
    sums = np.einsum("nhwijc,ijc->nhwc", windows, weight.centred[0])
    return _product(call, sums)


def _mul(call: Call) -> Array:
    a, b = call.read(0), call.read(1)
    factor = np.float64(a.step * b.step / call.output.step)  # in single precision, as the kernel
    return _times(call, a.centred * b.centred, factor)


def _sum(sign: int, call: Call) -> Array:
    a, b = call.read(0), call.read(1)
    bits = _ADD_SHIFT[call.output.values.dtype]
    twice = 2 * np.float64(max(a.step, b.step))
    one, other = (_times(call, t.centred << bits, np.float64(t.step) / twice) for t in (a, b))
    factor = twice / np.float64(np.float32(1 << bits) * call.output.step)
    return _times(call, one + sign * other, factor)


def _leaky_relu(call: Call) -> Array:
    source = call.read(0)
    step = np.float64(source.step) / np.float64(call.output.step)
    slope = np.float64(np.float32(source.step * np.float32(call.options.alpha))) / np.float64(call.output.step)
    kept, bent = (_times(call, source.centred, factor) for factor in (step, slope))
    return np.where(source.centred >= 0, kept, bent)


KERNELS: Mapping[str, Callable[[Call], Array]] = {
    "QUANTIZE": _quantize,
    "CONV_2D": _conv,
    "DEPTHWISE_CONV_2D": _depthwise,
    "FULLY_CONNECTED": _fully_connected,
    "BATCH_MATMUL": _batch_matmul,
    "MUL": _mul,
    "ADD": lambda call: _sum(1, call),
    "SUB": lambda call: _sum(-1, call),
    "LEAKY_RELU": _leaky_relu,
}


# ------------------------------------------------------------------------------------------------------------- bounds

#: operators that hand on codes as they are
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
    """How far the arithmetic of a kernel may bring a value before it is rounded, in steps of its output.

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
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
            problem = "it is not a LiteRT file with the notes of an export"
            raise ExportError(name, problem, _DAMAGED) from error
        except Exception as error:  # flatbuffers raises struct.error and classes of its own
            raise ExportError(name, f"it cannot be read as a LiteRT file: {error}", _DAMAGED) from error
        self.graph = self.model.subgraphs[0]
        names = {v: k for k, v in vars(known.BuiltinOperator).items() if not k.startswith("_")}
        self.kinds = [names[code.builtinCode] for code in self.model.operatorCodes]
        self.makers = {int(out): i for i, op in enumerate(self.graph.operators) for out in op.outputs}

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

    def kernels(self, site: _Site) -> list[str]:
        """Kinds of the operators between the sites before ``site`` and itself, in execution order."""
        return [self.kinds[self.graph.operators[i].opcodeIndex] for i in self.indices(site)]

    def kernel_of(self, site: _Site) -> str:
        """Kind and type of the kernel that makes the codes of ``site``, such as ``CONV_2D int8``; ``float`` where none does."""
        kinds = self.kernels(site)
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
        """How far the arithmetic of the kernels before ``site`` may bring a value, in steps of its grid: the most over them."""

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
    known = {(site, run): place for place in cut.places for site, run in place.facts["places"]}
    found = [(site, known[site.places[0]]) for site in file.sites if site.places[0] in known]
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
    ran = [_ran(content, reference, graph_inputs)[1] for reference in (True, False)]
    whole = tuple(OutputRow(name, *(level(array, one.get(name)) for one in ran)) for name, array in outputs.items())
    return VerifyReport(tuple(rows), whole, cut.unchecked, {}, {}, "litert")


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
    """What float kernels make in front of the quantizer of ``place``; ``None`` at an input, or where it is refused."""
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
    """What every operator of a file made in a run, against what its reference kernel is specified to make of the same codes.

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
                kind, call = self._call(index)
                codes = specified(kind, call)
                self._found[index] = None if codes is None else float((codes == call.output.values).mean())
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
        return specified(*self._call(index, once=True)) if index is not None and self._makes_codes(index) else None

    def _call(self, index: int, once: bool = False) -> tuple[str, Call]:
        def tensor(index: int) -> Tensor:
            grid = self._file.graph.tensors[index].quantization
            scale = [] if grid is None or grid.scale is None else grid.scale
            zero = int(grid.zeroPoint[0]) if len(scale) else 0
            return Tensor(self._session.interpreter.get_tensor(index), np.asarray(scale, np.float32), zero)

        op = self._file.graph.operators[index]
        inputs = tuple(None if i < 0 else tensor(int(i)) for i in op.inputs)
        return self._file.kinds[op.opcodeIndex], Call(inputs, tensor(int(op.outputs[0])), op.builtinOptions, once)


# ------------------------------------------------------------------------------------------ parts of a model


def run_converted(
    model: ir.Model,
    feeds: Mapping[str, Array],
    types: dict[str, str] | None = None,
    errors: dict[str, float] | None = None,
) -> dict[str, Array]:
    """Graph outputs of ``model`` by name, as the kernels that LiteRT takes by default make them.

    Args:
        model: as ``to_qdq`` wrote it, or a part of it that begins and ends in floats.
        feeds: by name of graph input; what the model does not read is left out.
        types: filled with the codes of every site -> kernel, such as ``CONV_2D int8``; ``float`` where none makes them.
        errors: filled with the codes of every site -> how far the arithmetic of these kernels may bring a value, in steps.

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
            (types if types is not None else {})[codes] = "float" if site is None else file.kernel_of(site)
            (errors if errors is not None else {})[codes] = 0.0 if site is None else file.bound(site)
    return session_of(content).run(feeds)


def _codes(model: ir.Model) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The codes of every site, and its first place."""
    for node in model.graph:
        facts, codes = read_metadata(node), node.inputs[0] if node.inputs else None
        if facts is not None and facts["role"] == "activation" and codes is not None:
            yield str(codes.name), tuple(facts["places"][0])
