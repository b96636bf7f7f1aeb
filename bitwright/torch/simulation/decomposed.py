"""A simulation as an ``ExportedProgram`` with ``quantized_decomposed`` operators, which ExecuTorch and inductor lower.

Weights are stored as codes, read through ``dequantize_per_channel`` or ``dequantize_per_tensor``; activations pass a pair of
``quantize_per_tensor`` and ``dequantize_per_tensor``. Unsigned grids of 8 bits are written as int8: the zero point moves by 128,
the numbers on the grid stay. Biases are floats on their grid, which runtimes find again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch import fx, nn  # noqa: TID251, the language of programs that torch.export returns
from torch.export import ExportedProgram

from bitwright.core.numerics import affine
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerChannel, PerTensor
from bitwright.core.simulation.sites import Site
from bitwright.errors import ExportError
from bitwright.torch.simulation.simulate import RUN

_OPS = torch.ops.quantized_decomposed
_TYPES = {8: torch.int8, 16: torch.int16}
_ATEN = torch.ops.aten
#: operators that return values of their first argument alone
MOVES = frozenset((
    _ATEN.flatten.using_ints, _ATEN.view.default, _ATEN.reshape.default, _ATEN.permute.default, _ATEN.transpose.int,
    _ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.unsqueeze.default, _ATEN.slice.Tensor,
    _ATEN.max_pool2d.default, _ATEN.expand.default, _ATEN.contiguous.default,
))  # fmt: skip


def with_decomposed(
    program: ExportedProgram, sites: Any, tensors: tuple[torch.Tensor, ...], shapes: Any
) -> ExportedProgram:
    """Replace the mark at every site of ``program`` by a quantizer.

    Args:
        program: of a simulation.
        sites: name -> site.
        tensors: what the program takes.
        shapes: ``dynamic_shapes`` of ``torch.export``.

    Raises:
        ExportError: a site has a grid for which the operators have no form.
    """
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    marks = [node for node in module.graph.nodes if node.target is torch.ops.bitwright.site.default]
    _refuse_steps(sites, {str(node.args[1]).partition(RUN)[0] for node in marks})
    for i, node in enumerate(marks):
        site: Site = sites[str(node.args[1]).partition(RUN)[0]]
        encoding = site.quantizer.required
        with module.graph.inserting_before(node):
            made = _stored(module, node, site, encoding, i) if site.is_stored or site.role == "bias" else None
            made = _passing(module, node, site, encoding, i) if made is None else made
        node.replace_all_uses_with(made)
        module.graph.erase_node(node)
    _keep_on_grid(module.graph)
    _part_readers(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    axes = None if shapes is None else tuple(shapes["tensors"])
    return torch.export.export(module, tensors, dynamic_shapes=axes, strict=False)


def _keep_on_grid(graph: fx.Graph) -> None:
    """Put data movement on the grid of its input: delegates take operators with quantizers on both sides.

    No value changes. Without it a linear layer after a flatten is computed in float.
    """
    for node in graph.nodes:
        source = node.args[0] if node.target in MOVES and node.args else None
        if not isinstance(source, fx.Node) or source.target is not _OPS.dequantize_per_tensor.default:
            continue
        if all(user.target is _OPS.quantize_per_tensor.default for user in node.users):
            continue
        readers = list(node.users)
        with graph.inserting_after(node):
            codes = graph.call_function(_OPS.quantize_per_tensor.default, (node, *source.args[1:]))
        with graph.inserting_after(codes):
            again = graph.call_function(_OPS.dequantize_per_tensor.default, (codes, *source.args[1:]))
        for reader in readers:
            reader.replace_input_with(node, again)


def _part_readers(graph: fx.Graph) -> None:
    """Let every reader of an activation dequantize its codes for itself.

    The pass of ExecuTorch 1.5 that inserts copies in another layout gives the copy for one reader to all readers of a
    dequantizer.
    """
    for node in graph.nodes:
        if node.target is _OPS.dequantize_per_tensor.default:
            for reader in list(node.users)[1:]:
                with graph.inserting_after(node):
                    reader.replace_input_with(node, graph.node_copy(node))


def _refuse_steps(sites: Any, marked: set[str]) -> None:
    """Refuse recurrent layers whose steps are quantized: one operator of the program computes all of them."""
    inside = (name for name, site in sites.items() if site.inner and (site.enabled or name in marked))
    name = next(inside, None)
    if name is not None:
        problem = "it is quantized inside the steps of a recurrent layer, which is one operator in an exported program"
        raise ExportError(name, problem, "export ONNX, or leave the layer in float")


def _stored(module: fx.GraphModule, node: fx.Node, site: Site, encoding: Encoding, number: int) -> fx.Node | None:
    """A parameter as codes, or a bias as floats on its grid; ``None`` where it is computed from several parameters."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return None
    value = _attribute(module, str(source.target)).detach()
    codes = affine.quantize(value.cpu().numpy(), encoding)
    if site.role == "bias":
        floats = affine.dequantize(codes, encoding).astype(np.float32)
        return _held(module, f"_bias_{number}", torch.from_numpy(floats))
    dtype, _, shift = _grid(site, encoding)
    stored = _held(module, f"_codes_{number}", torch.from_numpy(np.asarray(codes) - shift).to(dtype))
    return _dequantized(module, stored, site, encoding, number)


def _passing(module: fx.GraphModule, node: fx.Node, site: Site, encoding: Encoding, number: int) -> fx.Node:
    """An activation through its quantizer."""
    if encoding.dynamic:
        raise ExportError(
            site.name, "its range is chosen at run time, for which there is no form here", "use fixed ranges"
        )
    dtype, (qmin, qmax), shift = _grid(site, encoding)
    graph, source = module.graph, node.args[0]
    if encoding.granularity == PerTensor():
        grid = (float(encoding.scale), int(encoding.zero_point) - shift, qmin, qmax, dtype)
        codes = graph.call_function(_OPS.quantize_per_tensor.default, (source, *grid))
        return graph.call_function(_OPS.dequantize_per_tensor.default, (codes, *grid))
    axis, scales, zeros = _channels(module, site, encoding, shift, number)
    codes = graph.call_function(_OPS.quantize_per_channel.default, (source, scales, zeros, axis, qmin, qmax, dtype))
    return graph.call_function(_OPS.dequantize_per_channel.default, (codes, scales, zeros, axis, qmin, qmax, dtype))


def _dequantized(module: fx.GraphModule, codes: fx.Node, site: Site, encoding: Encoding, number: int) -> fx.Node:
    dtype, (qmin, qmax), shift = _grid(site, encoding)
    if encoding.granularity == PerTensor():
        grid = (float(encoding.scale), int(encoding.zero_point) - shift, qmin, qmax, dtype)
        return module.graph.call_function(_OPS.dequantize_per_tensor.default, (codes, *grid))
    axis, scales, zeros = _channels(module, site, encoding, shift, number)
    return module.graph.call_function(
        _OPS.dequantize_per_channel.default, (codes, scales, zeros, axis, qmin, qmax, dtype)
    )


def _grid(site: Site, encoding: Encoding) -> tuple[torch.dtype, tuple[int, int], int]:
    """Dtype and ends of the codes, and the offset that is subtracted from those of the encoding."""
    fmt = encoding.format
    bits = fmt.bits if isinstance(fmt, IntFormat) else 0
    wide = next((n for n in _TYPES if 0 < bits <= n), 0)
    if not wide or not isinstance(fmt, IntFormat) or encoding.shift is not None:
        problem = f"quantized_decomposed has no operators for {site.quantizer.described}"
        raise ExportError(site.name, problem, "use integers of 16 bits at most, or export ONNX")
    shift = 0 if fmt.signed else 1 << (bits - 1)
    return _TYPES[wide], (fmt.qmin - shift, fmt.qmax - shift), shift


def _channels(
    module: fx.GraphModule, site: Site, encoding: Encoding, shift: int, number: int
) -> tuple[int, fx.Node, fx.Node]:
    granularity = encoding.granularity
    if not isinstance(granularity, PerChannel) or not isinstance(granularity.axis, int):
        problem = f"quantized_decomposed has no operators for scales {granularity}"
        raise ExportError(site.name, problem, "use one scale per tensor or per channel, or export ONNX")
    scales = torch.from_numpy(encoding.scale.reshape(-1).copy())
    zeros = torch.from_numpy(encoding.zero_point.reshape(-1).astype(np.int64) - shift)
    return granularity.axis, _held(module, f"_scales_{number}", scales), _held(module, f"_zeros_{number}", zeros)


def _held(module: fx.GraphModule, name: str, tensor: torch.Tensor) -> fx.Node:
    module.register_buffer(name, tensor)
    return module.graph.get_attr(name)


def _attribute(module: nn.Module, path: str) -> torch.Tensor:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    assert isinstance(found, torch.Tensor)
    return found
