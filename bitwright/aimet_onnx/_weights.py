"""Number formats and blocks of the weights of several nodes at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bitwright.aimet_common.defs import qtype
from bitwright.aimet_onnx import _core, defs
from bitwright.aimet_onnx.qc_quantize_op import QcQuantizeOp, quantizer_of
from bitwright.errors import ConfigError, GranularityError

if TYPE_CHECKING:
    from bitwright.aimet_onnx.quantsim import QuantizationSimModel


def _weight_quantizers(
    sim: QuantizationSimModel, op_types: Any, include: Iterable[str] | None, exclude: Iterable[str] | None
) -> list[QcQuantizeOp]:
    types = None if op_types is None else {op_types} if isinstance(op_types, str) else set(op_types)
    unwanted, wanted = set(exclude or ()), None if include is None else set(include)
    known = {op.name for op in sim.graph.ops}
    missing = sorted((unwanted | (wanted or set())) - known)
    if missing:
        raise ConfigError("nodes", f"there are no nodes {missing}", "use names of nodes of the model")
    return [
        quantizer_of(site.value, (site,))
        for site in sim.quantizers.values()
        if site.role == "weight" and site.enabled and site.op not in unwanted
        and (wanted is None or site.op in wanted)
        and (types is None or sim.graph.op(site.op).type in types)
    ]  # fmt: skip


def set_blockwise_quantization_for_weights(
    sim: QuantizationSimModel,
    op_types: str | tuple[str, ...],
    bitwidth: int,
    symmetric: bool,
    block_size: int,
    strict: bool = False,
    nodes_to_exclude: list[str] | None = None,
    *,
    excluded_nodes: list[str] | None = None,
) -> None:
    """Give weights one scale per block along the input channels.

    Args:
        op_types: types of nodes.
        strict: blocks that do not divide a weight are an error; otherwise it stays as it is.
        nodes_to_exclude: names of nodes to leave alone.

    Raises:
        GranularityError: ``strict``, and blocks that do not divide a weight; nothing is changed.
    """
    found = _weight_quantizers(sim, op_types, None, nodes_to_exclude or excluded_nodes)
    _set_blocks(found, defs.QSpec(qtype.int(bitwidth), defs.Blockwise(block_size), symmetric), strict)


def _set_blocks(found: list[QcQuantizeOp], spec: defs.QSpec, strict: bool) -> None:
    blocks: Any = spec.granularity
    fitting = []
    for quantizer in found:
        site = quantizer._site
        op, shape = site._graph.op(site.op), quantizer._value_shape
        axes = _core.block_axes(op.type, op.attrs, site.port, shape)
        granularity = _core.PerBlock(blocks.block_size).resolve(*axes)
        try:
            granularity.param_shape(shape, site.name)
        except GranularityError:
            if strict:
                raise
            continue
        fitting.append(quantizer)
    for quantizer in fitting:
        quantizer.set_qspec(spec)


def set_grouped_blockwise_quantization_for_weights(
    sim: QuantizationSimModel,
    op_types: str | tuple[str, ...],
    bitwidth: int,
    decompressed_bw: int,
    block_size: int,
    strict: bool = False,
    nodes_to_exclude: list[str] | None = None,
    *,
    excluded_nodes: list[str] | None = None,
) -> None:
    """Give weights one scale per block that is an integer multiple of one per channel (LPBQ).

    Args:
        op_types, strict, nodes_to_exclude: as for :func:`set_blockwise_quantization_for_weights`.
        decompressed_bw: bits of code times multiple.

    Raises:
        ConfigError: multiples of ``decompressed_bw - bitwidth`` bits are not supported; nothing is changed.
        GranularityError: ``strict``, and blocks that do not divide a weight; nothing is changed.
    """
    _core.grouped_scale_format(bitwidth, decompressed_bw, "set_grouped_blockwise_quantization_for_weights")
    spec = defs.QSpec.lpbq(qtype.int(bitwidth), block_size, decompressed_bw - bitwidth)
    found = _weight_quantizers(sim, op_types, None, nodes_to_exclude or excluded_nodes)
    _set_blocks(found, spec, strict)


def set_lpbq_for_params(
    sim: QuantizationSimModel,
    bitwidth: int,
    block_size: int,
    *,
    op_types: str | Iterable[str] | None = None,
    nodes_to_exclude: Iterable[str] | None = None,
    nodes_to_include: Iterable[str] | None = None,
    strict: bool | None = None,
) -> None:
    """LPBQ with multiples of ``bitwidth`` bits, for types of nodes or for nodes by name.

    Args:
        strict: see :func:`set_grouped_blockwise_quantization_for_weights`; always, for ``nodes_to_include``.

    Raises:
        ValueError: both or neither of ``op_types`` and ``nodes_to_include``, or a node named twice.
        TypeError: ``strict`` beside ``nodes_to_include``.
        ConfigError, GranularityError: see there.
    """
    if (op_types is None) == (nodes_to_include is None) or (nodes_to_include and nodes_to_exclude):
        raise ValueError("give either op_types (and nodes_to_exclude), or nodes_to_include")
    if nodes_to_include is not None and strict is not None:
        raise TypeError("strict goes with op_types: nodes named one by one must fit")
    _core.grouped_scale_format(bitwidth, 2 * bitwidth, "set_lpbq_for_params")
    spec = defs.QSpec.lpbq(qtype.int(bitwidth), block_size, bitwidth)
    found = _weight_quantizers(sim, op_types, nodes_to_include, nodes_to_exclude)
    _set_blocks(found, spec, nodes_to_include is not None or bool(strict))


def set_param_type(
    sim: QuantizationSimModel,
    param_type: Any,
    *,
    op_types: Any = None,
    nodes_to_include: Iterable[str] | None = None,
    nodes_to_exclude: Iterable[str] | None = None,
    strict: bool = True,
    shift_zero_point: bool = False,
) -> None:
    """Give weights another number format and granularity.

    Args:
        param_type: a :class:`QSpec`, a number format or its name.
        op_types, nodes_to_include, nodes_to_exclude: which nodes; all by default.
        strict: blocks that do not divide a weight are an error; otherwise it stays as it is.

    Raises:
        ConfigError: a shifted zero point.
        GranularityError: see ``strict``.
    """
    spec = param_type if isinstance(param_type, defs.QSpec) else defs.QSpec(qtype.as_qtype(param_type))
    found = _weight_quantizers(sim, op_types, nodes_to_include, nodes_to_exclude)
    if shift_zero_point:
        spec = defs.QSpec(spec.dtype, spec.granularity, spec.symmetric, True)
    if isinstance(spec.granularity, defs.Blockwise) and not spec.shift_zero_point:
        _set_blocks(found, spec, strict)
        return
    for quantizer in found:
        quantizer.set_qspec(spec)
