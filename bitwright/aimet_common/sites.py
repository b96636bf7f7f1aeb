"""Sites, grids and graphs as AIMET describes them, in our terms; without any framework.

AIMET's targets also ask for grids at several places together: of operands of products, and of what joins and means read and
write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.numerics.affine import choose_qparams, encode, grid, with_scale
from bitwright.core.numerics.encoding import Encoding, signed_as
from bitwright.core.numerics.formats import FloatFormat, Format, IntFormat, ScaleFormat, int_format, parse_scale_format
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.simulation.sites import Site, values_on_grids
from bitwright.errors import ConfigError

# ------------------------------------------------------------------------------------ grids


def steps_format(num_steps: float, *, signed: bool) -> IntFormat | None:
    """The integer format with ``num_steps`` intervals; a power of two counts as one less, as AIMET's examples write it."""
    steps = int(num_steps)
    bits = max(2, (steps - 1).bit_length())
    if steps in ((1 << bits) - 1, 1 << bits):
        return IntFormat(bits, signed)
    return IntFormat(bits, narrow=True) if steps == (1 << bits) - 2 else None


def range_encoding(lo: Any, hi: Any, spec: QuantSpec, granularity: Granularity) -> Encoding:
    """The encoding whose grid ends lie at ``lo`` and ``hi``, as AIMET's ``set_range`` means it.

    :func:`bitwright.core.numerics.affine.encode` instead widens a symmetric range until it holds both bounds.
    """
    if isinstance(spec.format, FloatFormat):
        return encode(lo, hi, spec, granularity)
    fmt = spec.format
    scale, zero_point = choose_qparams(lo, hi, fmt, symmetric=False)
    if spec.symmetry != "asymmetric":
        zero_point = np.full_like(zero_point, (fmt.qmin + fmt.qmax + 1) // 2)
    return with_scale(Encoding(fmt, scale, zero_point, granularity), scale, spec.scale_format)


def grouped_scale_format(bitwidth: int, decompressed_bw: int, site: str) -> ScaleFormat:
    """Scale format of LPBQ: multiples of one number per channel, with ``decompressed_bw - bitwidth`` bits.

    Raises:
        ConfigError: multiples of this width are not supported.
    """
    bits = int(decompressed_bw) - int(bitwidth)
    if not 2 <= bits <= 12:
        raise ConfigError(
            site,
            f"LPBQ with bitwidth={bitwidth} and decompressed_bw={decompressed_bw} has multiples of {bits} bits",
            "choose decompressed_bw 2 to 12 above bitwidth, for example 8 for 4",
        )
    return parse_scale_format(f"uint{bits}")


def grouped_bits(scale_format: ScaleFormat) -> int | None:
    """Bits of the multiples where scales are stored as LPBQ has them; else ``None``."""
    multiples = scale_format.multiples
    return multiples.bits if scale_format.shared == "channel" and multiples is not None else None


def asked_format(spec: QuantSpec) -> Format:
    """The grid that ``spec`` makes of its format for a range that reaches below zero."""
    return grid(spec.format, spec.symmetry, -1.0)


def affine_records(
    version: str, bits: int, symmetric: bool, kind: str, ends: tuple[Sequence[float], Sequence[float]],
    scale: Sequence[float], offset: Sequence[float],
) -> Any:  # fmt: skip
    """An encoding as AIMET's files have it: a list of records, one per scale (0.6.1), or one record of a ``kind`` (1.0.0)."""
    offsets = [int(o) for o in offset]
    if version == "0.6.1":
        return [
            {"bitwidth": bits, "dtype": "int", "is_symmetric": str(symmetric), "max": hi, "min": lo, "offset": o, "scale": s}
            for lo, hi, s, o in zip(*ends, scale, offsets, strict=True)
        ]  # fmt: skip
    return {"bw": bits, "dtype": "INT", "enc_type": kind, "is_sym": symmetric, "offset": offsets, "scale": list(scale)}


def granularity_of(
    params: tuple[int, ...], block_size: tuple[int, ...] | None, shape: tuple[int, ...]
) -> Granularity | None:
    """Our granularity for parameters of AIMET's shape on a tensor of ``shape``; ``None`` where we have none for it."""
    if int(np.prod(params)) == 1 and not block_size:
        return _of_one_scale(params, shape)
    if len(params) != len(shape) or any(n < p or n % p for n, p in zip(shape, params, strict=True)):
        return None
    many = [axis for axis, count in enumerate(params) if count > 1]
    blocked = [axis for axis in many if shape[axis] > params[axis]]
    whole = tuple(axis for axis in many if axis not in blocked)
    if len(blocked) == 1:
        (axis,) = blocked
        return PerBlock(shape[axis] // params[axis], axis, whole)
    if blocked:
        return None
    if block_size is not None:
        return _of_one_block(block_size, shape, whole)
    return PerChannel(whole[0]) if len(whole) == 1 else None


def _of_one_scale(params: tuple[int, ...], shape: tuple[int, ...]) -> Granularity:
    """Per channel where the tensor has several axes and one channel, as AIMET's shape ``(1, 1, ...)`` says."""
    single = len(params) == len(shape) and 1 in shape and int(np.prod(shape)) > 1
    return PerChannel(shape.index(1)) if single else PerTensor()


def _of_one_block(block_size: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> Granularity | None:
    """Where the block is as long as its axis, which AIMET writes as -1."""
    if len(whole) < 2:
        return PerChannel(whole[0]) if whole else PerTensor()
    size = next((n for n, b in zip(shape, block_size, strict=True) if b in (-1, n) and n > 1), 0)
    axis = next((axis for axis, n in enumerate(shape) if axis not in whole and n == size), None)
    return PerBlock(size, axis, whole) if size and axis is not None else None


def aimet_shape(granularity: Granularity, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the parameters as AIMET has it."""
    if isinstance(granularity, PerChannel):
        return granularity.broadcast_shape(shape)
    return granularity.param_shape(shape)


def aimet_blocks(granularity: Granularity, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """AIMET's block size, one number per axis; ``None`` without blocks."""
    if not isinstance(granularity, PerBlock):
        return None
    return tuple(n // p for n, p in zip(shape, granularity.param_shape(shape), strict=True))


# ------------------------------------------------------------------------------------ sites


class SiteView:
    """The quantizer of one place; it holds no state of its own, so that two views of a place agree."""

    def __init__(self, sites: tuple[Site, ...]) -> None:
        self.__dict__["sites"] = sites

    sites: tuple[Site, ...]

    @property
    def _site(self) -> Site:
        return self.sites[0]

    @property
    def _spec(self) -> QuantSpec:
        spec: QuantSpec = self._site.quantizer.spec
        return spec

    @property
    def _encoding(self) -> Encoding | None:
        return self._site.encoding

    @property
    def _value_shape(self) -> tuple[int, ...]:
        return self._site._graph.values[self._site.value].shape

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name):
            raise AttributeError(f"a quantizer of a simulation has no attribute {name!r} that could be set")
        object.__setattr__(self, name, value)

    def _respec(self, spec: QuantSpec, encoding: Encoding | None) -> None:
        for site in self.sites:
            enabled = site.enabled
            site.spec = spec
            if encoding is not None:
                site.encoding = encoding
            site.enabled = enabled

    # -- grid

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of scale and offset."""
        return aimet_shape(self._granularity, self._value_shape)

    @property
    def block_size(self) -> tuple[int, ...] | None:
        """Elements per block, axis by axis; ``None`` without blocks."""
        return aimet_blocks(self._granularity, self._value_shape)

    @property
    def _granularity(self) -> Any:
        encoding = self._encoding
        return self._spec.granularity if encoding is None else encoding.granularity

    @property
    def _format(self) -> Any:
        encoding = self._encoding
        if encoding is not None:
            return encoding.format
        fmt = self._spec.format
        if isinstance(fmt, IntFormat) and self._spec.symmetry == "symmetric":
            return replace(fmt, signed=True)
        return fmt

    @property
    def bitwidth(self) -> int:
        """Bits of the number format; setting it keeps the range."""
        return int(self._format.bits)

    @bitwidth.setter
    def bitwidth(self, bitwidth: int) -> None:
        fmt = self._spec.format
        if isinstance(fmt, FloatFormat):
            raise ConfigError(self._site.name, "it is a float quantizer", "put an affine quantizer in its place")
        self._regrid(replace(self._spec, format=replace(fmt, bits=int(bitwidth))), bits=int(bitwidth))

    def _regrid(self, spec: QuantSpec, bits: int | None = None) -> None:
        """Another format or symmetry on the range in effect."""
        encoding = self._site.encoding
        if encoding is None:
            self._respec(spec, None)
            return
        fmt: Any = encoding.format
        fmt = replace(fmt, bits=bits) if bits is not None else asked_format(spec)
        moved = replace(spec, format=fmt)
        self._respec(spec, range_encoding(encoding.min, encoding.max, moved, encoding.granularity))

    @property
    def symmetric(self) -> bool:
        """Whether the zero point is kept in the middle of the grid; setting it keeps the range."""
        return self._spec.symmetry != "asymmetric"

    @symmetric.setter
    def symmetric(self, symmetric: bool) -> None:
        if bool(symmetric) != self.symmetric:
            self._regrid(replace(self._spec, symmetry="symmetric" if symmetric else "asymmetric"))

    use_symmetric_encodings = symmetric

    @property
    def signed(self) -> bool:
        """Whether codes may be negative; setting it keeps the values of the grid."""
        fmt = self._format
        return isinstance(fmt, FloatFormat) or bool(fmt.signed)

    @signed.setter
    def signed(self, signed: bool) -> None:
        fmt, encoding = self._spec.format, self._site.encoding
        if isinstance(fmt, FloatFormat) or (self.symmetric and signed == self.signed):
            return
        if self.symmetric and not signed:
            raise ConfigError(self._site.name, "a symmetric grid is signed here", "leave it: the values are the same")
        moved = None if encoding is None else signed_as(encoding, bool(signed))
        self._respec(replace(self._spec, format=replace(fmt, signed=bool(signed))), moved)

    @property
    def qmin(self) -> int:
        """Lowest code."""
        return int(self._format.qmin)

    @property
    def qmax(self) -> int:
        """Highest code."""
        return int(self._format.qmax)

    # -- range

    def is_initialized(self) -> bool:
        """Whether there is a range."""
        return self._site.encoding is not None or self._site.quantizer.is_fixed

    def set_core(self, encoding: Encoding) -> None:
        """Put one of our encodings into effect."""
        for site in self.sites:
            site.encoding = encoding

    def set_ends(self, lo: Any, hi: Any) -> None:
        """Put the ends of the grid at these numbers: one value each, or one per scale.

        Raises:
            ConfigError: the numbers of values do not fit.
            RangeError: an end is not finite, or they are exchanged.
        """
        spec, site = self._spec, self._site.name
        params = spec.granularity.param_shape(self._value_shape, site)
        low, high = (ends(end, params, site) for end in (lo, hi))
        asked = replace(spec, format=asked_format(spec))
        self.set_core(range_encoding(low, high, asked, spec.granularity))

    # -- use

    @property
    def enabled(self) -> bool:
        """Whether the quantizer works."""
        return self._site.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        for site in self.sites:
            site.enabled = enabled

    def allow_overwrite(self, mode: bool | None = None, **ends: bool) -> None:
        """Whether calibration may change the range; for both ends alike."""
        allowed = all(ends.values()) if mode is None else bool(mode)
        for site in self.sites:
            site.frozen = not allowed

    def is_overwrite_allowed(self, name: str | None = None) -> bool:
        """Whether calibration may change the range."""
        return not self._site.frozen

    def freeze_encoding(self) -> None:
        """Keep the range through calibration."""
        self.allow_overwrite(False)


@contextmanager
def activations_in_float(sim: Any) -> Iterator[None]:
    """Switch the quantizers of activations off and keep their encodings inside the block."""
    sites = [site for site in sim.quantizers.values() if site.role in ("input", "output")]
    kept = [(site.quantizer, site.quantizer.enabled, site.quantizer.frozen) for site in sites]
    for quantizer, _, _ in kept:
        quantizer.enabled, quantizer.frozen = False, True
    try:
        yield
    finally:
        for quantizer, enabled, frozen in kept:
            quantizer.enabled, quantizer.frozen = enabled, frozen


def ends(value: Any, params: tuple[int, ...], site: str) -> Any:
    """An end of a range, in the parameter shape of a place.

    Raises:
        ConfigError: neither one value nor one per scale.
    """
    array = np.asarray(value, np.float64)
    count = int(np.prod(params))
    if array.size not in (1, count):
        raise ConfigError(site, f"{array.size} values for {count} scales", "give one value, or one per scale")
    return array.reshape(params) if array.size == count else np.full(params, array.item())


def int_format_of(quantizer: Any, site: str) -> IntFormat:
    """The integer format with the ends of ``quantizer``'s grid.

    Raises:
        ConfigError: there is none.
    """
    fmt = int_format(quantizer.qmin, quantizer.qmax)
    if fmt is None:
        raise ConfigError(
            site,
            f"a grid from {quantizer.qmin} to {quantizer.qmax} is not an integer format",
            "use bitwidth=..., or the ends of a signed or unsigned integer type",
        )
    return fmt


# ------------------------------------------------------------------------------------ graphs


class GraphOp:
    """One operator.

    Attributes:
        name, type: of the operator; types are ONNX's where there is one.
        inputs, outputs: names of its tensors.
        dotted_name: path of the module that computes it; the name itself in an ONNX model.
    """

    def __init__(self, op: Op, holder: Any) -> None:
        self.name, self.type = op.name, op.type
        self.inputs = [name for name in op.inputs if name is not None]
        self.outputs = list(op.outputs)
        self.dotted_name = op.module or op.name
        self.groups = int(op.attrs.get("group", 1))
        self._holder = holder

    def get_module(self) -> Any:
        """The module that computes it (torch) or its node (ONNX); ``None`` where there is none."""
        return self._holder

    def __repr__(self) -> str:
        return f"{self.name} ({self.type})"


class ConnectedGraph:
    """The operators of a model in the order in which they are computed.

    Attributes:
        model: the model it was made from.
        ordered_ops: the operators.
        starting_ops: those that read what the model is given, and nothing that another operator makes.
    """

    def __init__(self, model: Any, graph: Graph, holders: Mapping[str, Any]) -> None:
        self.model = model
        self.ordered_ops = [GraphOp(op, holders.get(op.module or op.name)) for op in graph.ops]
        self._by_name = {op.name: op for op in self.ordered_ops}
        made = {name for op in graph.ops for name in op.outputs}
        self.starting_ops = [op for op in self.ordered_ops if made.isdisjoint(op.inputs)]

    def get_all_ops(self) -> dict[str, GraphOp]:
        """Operators by name."""
        return dict(self._by_name)

    def get_op_from_module_name(self, name: str) -> GraphOp | None:
        """The operator that the module (or node) called ``name`` computes."""
        return next((op for op in self.ordered_ops if op.dotted_name == name), None)


# ------------------------------------------------------------------------------------ equalized layers


class ClsSetInfo:
    """A set of equalized layers: one pair, or two with a depthwise layer in the middle.

    Attributes:
        cls_pair_info_list: the pairs.
    """

    class ClsSetLayerPairInfo:
        """Two neighbouring layers and what the channels between them were divided by."""

        def __init__(self, layer1: Any, layer2: Any, scale_factor: Any, relu_activation_between_layers: bool) -> None:
            self.layer1, self.layer2 = layer1, layer2
            self.scale_factor, self.relu_activation_between_layers = (scale_factor, relu_activation_between_layers)

    def __init__(self, cls_pair_1: ClsSetLayerPairInfo, cls_pair_2: ClsSetLayerPairInfo | None = None) -> None:
        self.cls_pair_info_list = [cls_pair_1] if cls_pair_2 is None else [cls_pair_1, cls_pair_2]


class ClsSetInfos(list[ClsSetInfo]):
    """Result of :meth:`CrossLayerScaling.scale_model`; ``report`` has the details, with what was left and why."""

    report: Any = None

    @classmethod
    def of(cls, report: Any, holder: Callable[[str], Any]) -> ClsSetInfos:
        """Each producer of a group with each of its consumers; a depthwise consumer in one set with the layer after it.

        Args:
            report: of the equalization.
            holder: name of an operator -> its layer, as AIMET hands it over.
        """
        pairs = list(_pairs(report, holder))
        follower = {id(pair.layer1): pair for pair in pairs}
        infos, used = cls(), set()
        infos.report = report
        for pair in pairs:
            if id(pair) not in used:
                after = follower.get(id(pair.layer2)) if getattr(pair.layer2, "groups", 1) > 1 else None
                used.add(id(after))
                infos.append(ClsSetInfo(pair, after))
        return infos


def is_before_relu(graph: Graph, op: str) -> bool:
    """Whether a ReLU, PReLU or clamp reads the operator ``op``."""
    return any(reader.type in ("Relu", "PRelu", "Clip") for reader, _ in graph.consumers(graph.op(op).outputs[0]))


def _pairs(report: Any, holder: Callable[[str], Any]) -> Iterator[ClsSetInfo.ClsSetLayerPairInfo]:
    graph = report.view.graph()
    for group, factor in zip(report.groups, report.factors, strict=True):
        for producer in group.producers:
            relu = is_before_relu(graph, producer.op)
            for consumer, _ in group.consumers:
                yield ClsSetInfo.ClsSetLayerPairInfo(holder(producer.op), holder(consumer.op), factor, relu)


def fit_products(sim: Any) -> None:
    """Give what products of two activations read the grids that AIMET's targets multiply.

    The second operand is symmetric: before V73 it has 8 bits; from V73 on one of 16 bits asks the first to have 16 bits as well.
    An operand without a quantizer has that of what it is computed from, along first operands.
    """
    version = sim.rules.hw_version
    if version is None:
        return
    at = _on_integers(sim)
    bits = 8 if version < 73 else 16
    makers = {value: op for op in sim.graph.ops for value in op.outputs}
    for op in (op for op in sim.graph.ops if op.type == "MatMul"):
        one, other = (_nearest(name, at, makers) for name in op.inputs[:2])
        if one and other and bits in (8, other.spec.format.bits):
            other.spec = replace(other.spec, format=replace(other.spec.format, bits=bits), symmetry="symmetric")
            one.spec = replace(one.spec, format=replace(one.spec.format, bits=max(bits, one.spec.format.bits)))


def _on_integers(sim: Any) -> dict[str, Any]:
    """Value -> the site of its grid of integers, if it is on."""
    first = {id(s.quantizer): s for s in sim.quantizers.values() if s.enabled and isinstance(s.spec.format, IntFormat)}
    grids = values_on_grids(sim.quantizers, sim.plan.shared)
    return {value: first.get(key) for key, values in grids.items() for value in values}


def _nearest(value: str | None, at: Mapping[str, Any], makers: Mapping[str, Op]) -> Any:
    """The site of a value, or of the first one before it that has one."""
    while value is not None and at.get(value) is None:
        maker = makers.get(value)
        value = None if maker is None else next((v for _, v in maker.sources()), None)
    return None if value is None else at.get(value)


#: operators whose output has the grid of what they read, as AIMET ties them: of one reader alone, or of all
_TIED = {
    **dict.fromkeys(("Concat", "ScatterElements", "ScatterND"), True),
    **dict.fromkeys(("AveragePool", "Resize", "Upsample"), False),
}


def tie_joined(sim: Any) -> None:
    """Give joins, means over windows and resizings one quantizer with what they read, where both are asked for alike."""
    first = {id(s.quantizer): s for s in sim.quantizers.values() if s.role in ("input", "output")}
    grids = values_on_grids(sim.quantizers, sim.plan.shared)
    at = {value: first[key] for key, values in grids.items() for value in values}
    held: dict[int, list[Site]] = {}
    for site in sim.quantizers.values():
        held.setdefault(id(site.quantizer), []).append(site)
    for source, out in _ties(sim.graph, at):
        _tie(source, out, held)


def _ties(graph: Graph, at: Mapping[str, Site]) -> Iterator[tuple[Site, Site]]:
    """Sites of what an operator reads and of its output, where AIMET ties them; ``at`` has the site of a value's grid."""
    for op in (op for op in reversed(graph.ops) if op.type in _TIED and op.outputs[0] in at):
        for value in (v for v in op.inputs[: 1 if op.type != "Concat" else None] if v is not None and v in at):
            if not _TIED[op.type] or all(len(graph.consumers(name)) == 1 for name in {value, at[value].value}):
                yield at[value], at[op.outputs[0]]


def _tie(source: Site, out: Site, held: dict[int, list[Site]]) -> None:
    """Let every site with the quantizer of ``source`` have that of ``out``, if both are on and asked for alike."""
    if source.quantizer is out.quantizer or source.spec != out.spec or not (source.enabled and out.enabled):
        return
    moved = held.pop(id(source.quantizer))
    for site in moved:
        site.quantizer = out.quantizer
    held[id(out.quantizer)] += moved
