"""Pooling of images and sequences, and means over all of an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.litert.arithmetic import reduce, reduce_axes, reduce_to
from bitwright.export.litert.flat import Grid
from bitwright.export.litert.images import SAME, VALID, Image, Window, asked, padded, read_image, window_of, write_image
from bitwright.export.litert.lowering import Domain, Held, Lowering, channels_last

Array = NDArray[Any]
_FAR = np.float32(-3.4e38)  # padding of a maximum


def _max_pool(low: Lowering, node: ir.Node) -> None:
    held = low.get(node.inputs[0])
    window = _pool_window(low, node, held)
    if len(node.outputs) > 1 and node.outputs[1].uses():
        low.refuse(node, "its indices are read", "export format='onnx'")
    domain = low.carried(node, node.inputs[0])
    source = read_image(low, domain, held)
    if window.padded and not window.as_same(Image(held).shape[1:3]):
        source = padded(low, domain, held, source, window, _FAR)
        window = window.without_padding()
    write_image(low, domain, lambda out: low.flat.op("MAX_POOL_2D", [source], [out], _pool_options(window)))


def _pool_options(window: Window) -> dict[str, Any]:
    return {
        "table": "Pool2DOptions", "padding": SAME if window.padded else VALID, "strideH": window.stride[0],
        "strideW": window.stride[1], "filterHeight": window.size[0], "filterWidth": window.size[1],
    }  # fmt: skip


def _pool_window(low: Lowering, node: ir.Node, held: Held) -> Window:
    size = node.attributes.get_ints("kernel_shape", ())
    if held.rank not in (3, 4) or any(d != 1 for d in node.attributes.get_ints("dilations", (1,))):
        low.refuse(node, "LiteRT pools sequences and images without dilation", "export format='onnx'")
    out = low.trace.shapes[str(node.outputs[0].name)][2:]
    return window_of(low, node, size, held.shape[2:], out).plane()


def _average_pool(low: Lowering, node: ir.Node) -> None:
    """On integers as a depthwise convolution with equal weights, which rounds once, onto the grid of the output.

    AVERAGE_POOL_2D rounds on the grid of its input, and a half away from zero.
    """
    held = low.get(node.inputs[0])
    window = _pool_window(low, node, held)
    counts = bool(node.attributes.get_int("count_include_pad", 0)) or not window.padded
    uneven = node.attributes.get_int("ceil_mode", 0) and window.padded
    unless = None if counts and not uneven else "its kernel would count the padding, or round twice"
    domain = low.domain(node, node.inputs[:1], unless=unless)
    source, image = read_image(low, domain, held), Image(held)
    if domain.integer or (counts and window.padded and not uneven):
        if window.padded:
            source, window = padded(low, domain, held, source, window), window.without_padding()
    elif window.padded and not window.as_same(image.shape[1:3]):
        _weighted_average(low, domain, node, held, source, window, counts)
        return
    if not domain.integer:
        options = {**_pool_options(window), "fusedActivationFunction": domain.activation}
        write_image(low, domain, lambda out: low.flat.op("AVERAGE_POOL_2D", [source], [out], options))
        return
    write_image(low, domain, lambda out: _mean_of_windows(low, domain, held, source, window, out))


def _mean_of_windows(low: Lowering, domain: Domain, held: Held, source: int, window: Window, out: int) -> None:
    """The means of all windows of an image of codes."""
    channels, count = held.shape[1], int(np.prod(window.size))
    grid = Grid("int8", (1 / (127 * count),), (0,))
    ones = np.full((1, *window.size, channels), 127, np.int8)
    filters = low.flat.tensor(f"{domain.result}_mean", ones.shape, "int8", grid, data=ones)
    options = {
        "table": "DepthwiseConv2DOptions", "padding": VALID, "strideH": window.stride[0], "strideW": window.stride[1],
        "depthMultiplier": 1, "fusedActivationFunction": domain.activation,
    }  # fmt: skip
    assert held.grid is not None
    wide = "int64" if held.grid.dtype == "int16" else "int32"
    zero = Grid(wide, (held.grid.scale[0] / (127 * count),), (0,))
    bias = low.flat.tensor(f"{domain.result}_no_bias", (channels,), wide, zero, data=np.zeros(channels, wide))
    low.flat.op("DEPTHWISE_CONV_2D", [source, filters, bias], [out], options)


def _global_average(low: Lowering, node: ir.Node) -> None:
    held = low.get(node.inputs[0])
    _mean_of_image(low, node, held, keeps=True)


def _reduce_mean(low: Lowering, node: ir.Node) -> None:
    held = low.get(node.inputs[0])
    axes = reduce_axes(low, node, held.rank)
    spatial = held.rank in (3, 4) and axes == list(range(2, held.rank)) and channels_last(held.rank) in held.orders()
    if spatial:
        _mean_of_image(low, node, held, keeps=bool(node.attributes.get_int("keepdims", 1)))
    else:
        reduce("MEAN", low, node)


def _mean_of_image(low: Lowering, node: ir.Node, held: Held, *, keeps: bool) -> None:
    """On codes as a convolution, which rounds once: MEAN rounds to a whole step of the sum before it divides."""
    domain = low.domain(node, node.inputs[:1], fuses=False)
    if not domain.integer or held.rank not in (3, 4):
        reduce_to(low, domain, "MEAN", held, range(2, held.rank), keeps)
        return
    size = held.shape[2:] if held.rank == 4 else (1, *held.shape[2:])
    window = Window(tuple(size), (1, 1), (1, 1), (0, 0), (0, 0))
    source, image = read_image(low, domain, held), Image(held)
    made = low.held.setdefault(domain.result, low.fresh(domain.result))
    if made.rank == 4:
        _mean_of_windows(low, domain, held, source, window, low.write(domain, channels_last(4)))
        return
    free = (image.free[0], False, False, False)
    whole = low.scratch(f"{domain.result}_image", (image.shape[0], 1, 1, image.shape[3]), free, grid=domain.grid)
    _mean_of_windows(low, domain, held, source, window, whole)
    low.reshape(whole, low.write(domain, made.identity), asked(made.shape, made.free))


def _weighted_average(
    low: Lowering, domain: Domain, node: ir.Node, held: Held, source: int, window: Window, counts: bool
) -> None:
    """An average whose windows hold different numbers of elements: sums of the padded image, times one over their number."""
    image = Image(held)
    inside = np.pad(np.ones(image.shape[1:3], np.float32), [*zip(window.before, window.after, strict=True)])
    if counts:  # what ceil_mode adds at the end does not count, the padding that was asked for does
        pads = node.attributes.get_ints("pads", (0,) * 4)
        before, after = pads[: len(pads) // 2], pads[len(pads) // 2 :]
        size = [n + b for n, b in zip(image.shape[1:3], ([0] * (2 - len(after))) + list(after), strict=True)]
        inside[: size[0] + ([0] * (2 - len(before)) + list(before))[0], : size[1] + before[-1]] = 1
    rows, columns = low_windows(inside, window)
    number = rows * columns
    source = padded(low, domain, held, source, window)
    made = Image(low.fresh(domain.result))
    mean = low.scratch(f"{domain.result}_whole", made.shape, made.free)
    low.flat.op("AVERAGE_POOL_2D", [source], [mean], _pool_options(window.without_padding()))
    factor = (np.prod(window.size) / number).astype(np.float32)[None, :, :, None]
    constant = low.flat.tensor(f"{domain.result}_share", factor.shape, "float32", data=factor)
    options = {"table": "MulOptions", "fusedActivationFunction": domain.activation}
    write_image(low, domain, lambda out: low.flat.op("MUL", [mean, constant], [out], options))


def low_windows(inside: Array, window: Window) -> tuple[Array, Array]:
    """Numbers of elements of each window that count, as rows ``[h, 1]`` and columns ``[1, w]``."""
    views = np.lib.stride_tricks.sliding_window_view(inside, window.size)[:: window.stride[0], :: window.stride[1]]
    return views.sum((2, 3), dtype=np.float32), np.ones((1, 1), np.float32)


LOWERINGS: dict[str, Callable[[Lowering, ir.Node], None]] = {
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global_average,
    "ReduceMean": _reduce_mean,
}
