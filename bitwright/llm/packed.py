"""Weights of a checkpoint: codes with their scales, or floats.

:class:`PackedWeight` is what writers of files take and readers return. Its values are those that a simulation computes with,
bit for bit: the codes come from the same arithmetic and the same encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.graph.attention import attention_products
from bitwright.core.numerics import affine
from bitwright.core.numerics.arrays import to_numpy
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import BFLOAT16, FLOAT16, FloatFormat, Format, IntFormat
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.errors import ConfigError, GranularityError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Layout:
    """The storage of one weight, in the terms by which engines distinguish formats.

    Attributes:
        format: of the elements.
        group: elements along the summed axis that share a scale: a number, ``"channel"`` or ``"tensor"``.
        symmetric: whether no zero point is needed beside the middle of the grid.
        scale_format: name of the row of ``SCALE_FORMATS``.
    """

    format: Format
    group: int | str
    symmetric: bool
    scale_format: str = "float32"
    float_zero_point: bool = False

    @property
    def bits(self) -> int:
        """Bits of one element, without its scale."""
        return self.format.bits

    def __str__(self) -> str:
        grouped = f"groups of {self.group}" if isinstance(self.group, int) else f"one scale per {self.group}"
        kind = "" if isinstance(self.format, FloatFormat) else (" symmetric" if self.symmetric else " asymmetric")
        kind = " with zero points that are real numbers" if self.float_zero_point else kind
        scales = "" if self.scale_format == "float32" else f", {self.scale_format} scales"
        return f"{self.format.name}{kind}, {grouped}{scales}"


@dataclass(frozen=True)
class WeightPlan:
    """Name, shape and storage of one weight before it is quantized; ``layout`` is ``None`` where it stays in float.

    ``axis`` is the one that groups run along, and that a layer sums over.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout | None
    axis: int = -1

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class FloatWeight:
    """A parameter or buffer that stays in float: norms, biases, tables that no one quantized.

    Attributes:
        name: in the state dictionary of the model.
        values: the tensor, of any floating dtype.
    """

    name: str
    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.values.shape)

    @property
    def plan(self) -> WeightPlan:
        """Name and shape."""
        return WeightPlan(self.name, self.shape, None)

    def dequantize(self) -> NDArray[np.float32]:
        """The values in float32."""
        return np.asarray(self.values.detach().to("cpu").float().numpy(), np.float32)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """One quantized weight: codes, scales, zero points.

    Attributes:
        name: of the parameter in the state dictionary of the model, ``model.layers.0.mlp.up_proj.weight``.
        codes: of the weight's shape. Integer formats: int8, uint8 or wider. Float formats: the bit
            pattern of each number (sign, exponent, mantissa), uint8, or uint16 for float16 and bfloat16; of codebooks the
            place in it.
        encoding: format, scales, zero points and granularity.

    Example:
        >>> weight = PackedWeight.nearest("up.weight", np.float32([[0.1, -0.7]]), QuantSpec("int4", PerChannel()))
        >>> weight.codes, weight.dequantize()
        (array([[ 1, -8]], dtype=int8), array([[ 0.0875, -0.7   ]], dtype=float32))
    """

    name: str
    codes: NDArray[Any]
    encoding: Encoding

    @classmethod
    def nearest(cls, name: str, values: Any, spec: QuantSpec) -> PackedWeight:
        """Round each value to the nearest number of the grid that ``spec`` asks for.

        Args:
            name: of the parameter.
            values: numpy array or torch tensor, rows are output channels.
            spec: format, granularity (open axes mean rows and blocks of the last axis), symmetry, range method.

        Raises:
            GranularityError: blocks do not divide the last axis; names a size that does.
            CalibrationError: a value is NaN or infinite.
        """
        spec = replace(spec, granularity=of_rows(spec.granularity, len(values.shape)))
        check_groups(planned(name, tuple(values.shape), spec))
        quantizer = Quantizer(name, "weight", spec)
        quantizer.observe_once(values)
        return cls.encoded(name, values, quantizer.required)

    @classmethod
    def encoded(cls, name: str, values: Any, encoding: Encoding) -> PackedWeight:
        """The codes of ``values`` under an encoding: those that a simulation with this encoding computes."""
        codes = to_numpy(affine.quantize(values, encoding))
        if isinstance(encoding.format, FloatFormat):
            codes = float_bits(codes, encoding.format)
        return cls(name, codes, encoding)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.codes.shape)

    @property
    def format(self) -> Format:
        """The grid of the codes."""
        return self.encoding.format

    @property
    def scale(self) -> NDArray[np.float32]:
        """Scales, of the shape that the granularity gives."""
        return self.encoding.scale

    @property
    def zero_point(self) -> NDArray[Any]:
        """Zero points, of the shape of the scales."""
        return self.encoding.zero_point

    @property
    def granularity(self) -> Granularity:
        """Granularity of the scales."""
        return self.encoding.granularity

    @property
    def layout(self) -> Layout:
        """The layout that engines distinguish formats by."""
        free = self.encoding.shift is not None
        symmetric, stored = not free and not signed(self)[1].any(), self.encoding.scale_format.name
        return Layout(self.format, group_of(self.granularity), symmetric, stored, float_zero_point=free)

    @property
    def plan(self) -> WeightPlan:
        """Name, shape and layout."""
        return WeightPlan(self.name, self.shape, self.layout, _axis(self.granularity, len(self.shape)))

    def check(self) -> None:
        """Refuse codes outside of the encoding, as in damaged files.

        Raises:
            GranularityError, ValueError: scales and zero points do not fit the shape of the codes, or a code is beyond the bits
                of the format.
        """
        shape = self.granularity.param_shape(self.shape, self.name)
        if self.scale.shape != shape or self.zero_point.shape != shape:
            raise ValueError(
                f"{self.name}: codes of shape {self.shape} have scales of shape {self.scale.shape}, not {shape}"
            )
        patterns = self.codes.size and isinstance(self.format, FloatFormat) and self.codes.dtype.kind in "iu"
        if patterns and not 0 <= int(self.codes.min()) <= int(self.codes.max()) < 1 << self.format.bits:
            raise ValueError(
                f"{self.name}: its bit patterns have more than the {self.format.bits} bits of {self.format.name}"
            )

    def dequantize(self, dtype: str = "float32") -> NDArray[Any]:
        """The dequantized values, equal bit for bit to those of a simulation."""
        codes = self.codes
        if isinstance(self.format, FloatFormat):
            codes = float_values(codes, self.format)
        return np.asarray(affine.dequantize(codes, self.encoding, dtype))


Weight = PackedWeight | FloatWeight


@dataclass(frozen=True)
class LayerInput:
    """How the input of a layer is quantized.

    Attributes:
        spec: what is asked for; a dynamic one has no encoding.
        encoding: what calibration found, per tensor.
    """

    spec: QuantSpec
    encoding: Encoding | None


def signed(weight: PackedWeight) -> tuple[NDArray[Any], NDArray[Any]]:
    """Codes and zero points on the signed grid of the same width; unsigned ones are shifted.

    Float formats keep theirs.
    """
    fmt = weight.format
    if not isinstance(fmt, IntFormat) or fmt.signed:
        return weight.codes, weight.zero_point
    middle = 1 << (fmt.bits - 1)
    kind = affine.storage_dtype(IntFormat(fmt.bits))
    return (weight.codes.astype(np.int64) - middle).astype(kind), weight.zero_point.astype(np.int64) - middle


def halves(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """Codes ``[O, I]`` of four bits or less, two in a byte, ``[O, I / 2]``, the first in the lower bits; signed ones plus 8."""
    # two codes as one number: of its bytes the first code is the lower one
    pairs = np.ascontiguousarray(codes).view("<u2")
    high = pairs >> 4
    high &= 0xF0
    low = pairs & 0x0F
    low |= high
    if codes.dtype == np.int8:
        low ^= 0x88  # plus 8, of four bits
    return low.astype(np.uint8)


def unhalved(pairs: NDArray[np.uint8], fmt: Format) -> NDArray[Any]:
    """The codes of :func:`halves`, one in a byte: int8 for signed integers, else uint8."""
    codes = np.empty((len(pairs), 2 * pairs.shape[1]), np.uint8)
    codes[:, ::2], codes[:, 1::2] = pairs & 15, pairs >> 4
    return codes.view(np.int8) - np.int8(8) if isinstance(fmt, IntFormat) and fmt.signed else codes


def group_of(granularity: Granularity) -> int | str:
    """Elements that share a scale along the summed axis; ``"channel"``: a whole channel, ``"tensor"``: all."""
    if isinstance(granularity, PerBlock):
        return granularity.size
    return "channel" if isinstance(granularity, PerChannel) else "tensor"


def of_rows(granularity: Granularity, rank: int) -> Granularity:
    """``granularity`` with its open axes filled in for a weight whose last axis is summed over.

    >>> of_rows(PerBlock(32), 2), of_rows(PerBlock(32), 3), of_rows(PerChannel(), 2)
    (PerBlock(size=32, axis=1, channel_axis=0), PerBlock(size=32, axis=2, channel_axis=(0, 1)), PerChannel(axis=0))
    """
    channels = tuple(range(rank - 1))
    if isinstance(granularity, PerBlock):
        return granularity.resolve(channels, rank - 1)
    return granularity.resolve(0 if rank > 1 else None, rank - 1)


def packed_weights(sim: Any) -> Iterator[Weight]:
    """Yield the parameters and buffers of a simulated PyTorch model one by one, as codes where they are quantized.

    Args:
        sim: a calibrated :class:`bitwright.torch.QuantizationSimModel`.

    Yields:
        In the order of the model: a :class:`PackedWeight` whose :meth:`~PackedWeight.dequantize` equals the simulation's
        values bit for bit, or a :class:`FloatWeight`. Tied parameters come once, under their first name.

    Raises:
        CalibrationError: a quantizer has no encoding.
        ConfigError: two operators read one parameter with different encodings.
    """
    found = weight_encodings(sim)
    biases = {
        sim.graph.values[site.value].param: site.quantizer.encoding
        for site in sim.quantizers.values()
        if site.role == "bias" and site.enabled
    }
    for name, tensor in (*sim.model.named_parameters(), *stored_buffers(sim.model)):
        values = tensor.detach()
        if name in found:
            yield PackedWeight.encoded(name, values, found[name])
        elif biases.get(name) is not None:  # engines add biases in float: those that the simulation adds
            yield FloatWeight(name, affine.fake_quantize(values, biases[name]))
        else:
            yield FloatWeight(name, values)


def layer_inputs(sim: Any) -> dict[str, LayerInput]:
    """The quantized inputs of a simulated model's layers, by the name of the layer.

    Raises:
        ConfigError: something else than inputs of layers with quantized weights and the cache is quantized, which files of
            engines cannot say.
        CalibrationError: an input has no encoding.
    """
    sites = list(sim.quantizers.values())
    layers = {
        site.op: str(sim.graph.values[site.value].param).removesuffix(".weight")
        for site in sites
        if site.role == "weight" and site.enabled
    }
    found: dict[str, LayerInput] = {}
    of_cache = {place for pair in _cache_operands(sim) for place in pair}
    for site in sites:
        if not site.enabled or site.role in ("weight", "bias") or (site.op, site.port) in of_cache:
            continue
        if site.role != "input" or site.port != 0 or site.op not in layers:
            raise ConfigError(
                site.name,
                f"the simulation quantizes this {site.role}, and files of engines say how inputs of layers with quantized "
                "weights and the cache are quantized, and of nothing else",
                "leave it in float with rules: Rule('*', port='output', quantized=False), Rule('*', port='input', "
                "quantized=False), and then Rule('*', op='Gemm', port='input', format='int8') for inputs of layers",
            )
        spec = site.quantizer.spec
        found[layers[site.op]] = LayerInput(spec, None if getattr(spec, "dynamic", False) else site.quantizer.required)
    return found


def _cache_operands(sim: Any) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """Operator and port of the keys and of the values of every attention."""
    return (((scores.name, 1), (product.name, 1)) for scores, product in attention_products(sim.graph))


def cache_encodings(sim: Any) -> dict[str, tuple[Encoding, Encoding]]:
    """The encodings of a simulated model's cache, keys and values, by the name of the attention module.

    Raises:
        ConfigError: only keys or only values are quantized, or the newest tokens stay in float, or they are rotated.
        CalibrationError: one of them has no encoding.
    """
    sites = {(site.op, site.port): site for site in sim.quantizers.values() if site.role == "input" and site.enabled}
    found: dict[str, tuple[Encoding, Encoding]] = {}
    for places in _cache_operands(sim):
        pair = [sites[place] for place in places if place in sites]
        if pair:
            _check_whole_cache(pair)
            keys, values = (site.quantizer.required for site in pair)
            found[_module_of(sim.model, places[0][0])] = (keys, values)
    return found


def _check_whole_cache(pair: Sequence[Any]) -> None:
    """Refuse the sites of one attention that files cannot say."""
    why = ""
    if len(pair) < 2:
        why = "only one of keys and values is quantized"
    elif any(site.spec.recent for site in pair):
        why = "the newest tokens of the cache stay in float there"
    elif any(site.spec.rotation is not None for site in pair):
        why = "the cache is rotated there, which these files do not say"
    if why:
        raise ConfigError(
            pair[0].name,
            why,
            'quantize both, without recent and rotated: kv_cache={part: {"format": "fp8", "granularity": "per_tensor"} for part '
            'in ("key", "value")}',
        )


def _module_of(model: Any, op: str) -> str:
    """The name of the innermost module that an operator belongs to."""
    modules, path = dict(model.named_modules()), op
    while path not in modules:
        path = path.rpartition(".")[0]
    return path


def weight_encodings(sim: Any) -> dict[str, Encoding]:
    """The encoding of every quantized parameter of a simulated model, by the parameter's name; biases are left out.

    Raises:
        CalibrationError, ConfigError: as :func:`packed_weights`.
    """
    found: dict[str, Encoding] = {}
    for site in sim.quantizers.values():
        param = sim.graph.values[site.value].param
        if site.role != "weight" or not site.enabled:
            continue
        if param is None:
            raise ConfigError(
                site.name,
                f"what is quantized there is {site.value}, which the model computes of a parameter, so that a file of parameters "
                "would hold it in float",
                f"leave it in float: sim.quantizers[{site.name!r}].enabled = False, or write ONNX with sim.export",
            )
        encoding = site.quantizer.required
        if found.setdefault(param, encoding) != encoding:
            raise ConfigError(
                param,
                f"{site.op} reads it with another encoding than an operator before it, and a file holds it once",
                f"give both the same: sim.quantizers[{site.name!r}].encoding = the encoding of the other site",
            )
    return found


def plans(sim: Any) -> list[WeightPlan]:
    """Plan what :func:`packed_weights` will yield from the specs alone, without calibration or computation."""
    specs: dict[str, QuantSpec] = {}
    for site in sim.quantizers.values():
        param = sim.graph.values[site.value].param
        if site.role == "weight" and param is not None and site.enabled:
            specs.setdefault(param, site.quantizer.spec)
    return [
        planned(name, tuple(tensor.shape), specs.get(name))
        for name, tensor in (*sim.model.named_parameters(), *stored_buffers(sim.model))
    ]


def planned(name: str, shape: Iterable[int], spec: QuantSpec | None) -> WeightPlan:
    """The plan of one weight under ``spec``; ``None`` leaves it in float."""
    if spec is None:
        return WeightPlan(name, tuple(shape), None)
    free = spec.symmetry == "float_zero_point"
    layout = Layout(
        spec.format, group_of(spec.granularity), not spec.has_zero_point, spec.scale_format.name, float_zero_point=free
    )
    shape = tuple(shape)
    return WeightPlan(name, shape, layout, _axis(spec.granularity, len(shape)))


def check_groups(plan: WeightPlan) -> None:
    """Refuse groups that do not divide their axis: files cannot store partial groups.

    Raises:
        GranularityError: names the sizes that do.
    """
    if plan.layout is None or not isinstance(plan.layout.group, int):
        return
    last = plan.shape[plan.axis] if plan.shape else 1
    if last % plan.layout.group:
        sizes = [str(size) for size in (256, 128, 64, 32, 16) if last % size == 0]
        fix = (
            f"use groups of {' or '.join(sizes)}" if sizes else "no group of 16 or more does: use one scale per channel"
        )
        raise GranularityError(
            plan.name,
            f"it sums over {last} elements, which groups of {plan.layout.group} do not divide",
            f"{fix}, or leave it in float",
        )


def _axis(granularity: Granularity, rank: int) -> int:
    """The axis that groups run along, counted from the end; the last one where nothing says another."""
    if isinstance(granularity, PerBlock) and granularity.axis is not None:
        return granularity.axis % rank - rank
    if isinstance(granularity, PerChannel) and granularity.axis is not None and rank == 2:
        return -1 if granularity.axis % rank == 0 else -2
    return -1


def stored_buffers(model: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of the buffers that files hold."""
    kept = model.state_dict(keep_vars=True)
    return ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


@cache
def _numbers(fmt: FloatFormat) -> NDArray[np.float32]:
    """The numbers of a format of at most 8 bits without their signs, by bit pattern."""
    pattern = np.arange(1 << (fmt.bits - 1))
    exponent, mantissa = pattern >> fmt.mantissa_bits, pattern & ((1 << fmt.mantissa_bits) - 1)
    lead = np.where(exponent == 0, 0.0, 1.0) + mantissa * 2.0**-fmt.mantissa_bits
    return np.asarray(lead * 2.0 ** np.maximum(exponent - fmt.bias, fmt.min_exponent), np.float32)


def float_bits(values: NDArray[Any], fmt: FloatFormat) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """The bit patterns of numbers of ``fmt``: sign, exponent, mantissa in the lower bits of uint8, or uint16 for half formats.

    Those of a codebook are places in it.

    >>> [f"{b:04b}" for b in float_bits(np.float32([0.5, -6.0]), FloatFormat("float4_e2m1", 2, 1, 6.0, scaled=True))]
    ['0001', '1111']
    """
    if fmt == FLOAT16:
        return values.astype(np.float16).view(np.uint16)
    if fmt == BFLOAT16:
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if fmt.codebook:
        return np.asarray(affine.codebook_indices(values, fmt), np.uint8)
    magnitude = np.searchsorted(_numbers(fmt), np.abs(values)).astype(np.uint8)
    return magnitude | (np.signbit(values).astype(np.uint8) << (fmt.bits - 1))


def float_values(bits: NDArray[Any], fmt: FloatFormat) -> NDArray[np.float32]:
    """The numbers of ``fmt`` that have these bit patterns, float32; see :func:`float_bits`."""
    if fmt == FLOAT16:
        return bits.view(np.float16).astype(np.float32)
    if fmt == BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if fmt.codebook:
        return np.asarray(fmt.codebook, np.float32)[bits]
    numbers = _numbers(fmt)
    return np.asarray(np.concatenate((numbers, -numbers))[bits], np.float32)
