"""Operators of images and sequences, with channels-last kernels: convolutions, pooling, resizing, means over all of an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.numerics.arrays import conv_pads
from bitwright.export.litert.arithmetic import on_one_grid, reduce, reduce_axes, reduce_to
from bitwright.export.litert.flat import Grid
from bitwright.export.litert.lowering import Domain, Held, Lowering, channels_last

Array = NDArray[Any]
SAME, VALID = 0, 1


@dataclass(frozen=True)
class Window:
    """Window of a kernel with two spatial axes; for a sequence the first axis has length 1.

    Attributes:
        size, stride, dilation: per spatial axis.
        before, after: padding.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def reach(self) -> tuple[int, ...]:
        """Length of the dilated kernel."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.size, self.dilation, strict=True))

    @property
    def padded(self) -> bool:
        """Whether the window reaches beyond the image."""
        return any((*self.before, *self.after))

    def as_same(self, image: Sequence[int]) -> bool:
        """Whether SAME pads as much at each side of an image of this size."""
        asked = {"auto_pad": "SAME_UPPER", "strides": self.stride, "dilations": self.dilation}
        return (*self.before, *self.after) == conv_pads(asked, image, self.size)

    def without_padding(self) -> Window:
        """The same after a PAD."""
        none = (0,) * len(self.size)
        return replace(self, before=none, after=none)

    def plane(self) -> Window:
        """The window with two spatial axes."""
        if len(self.size) == 2:
            return self
        return Window((1, *self.size), (1, *self.stride), (1, *self.dilation), (0, *self.before), (0, *self.after))


def window_of(node: ir.Node, size: Sequence[int], image: Sequence[int], out: Sequence[int]) -> Window:
    """The window of a convolution or a pool; ``image`` and ``out`` are the spatial sizes."""
    rank, attributes = len(size), node.attributes
    stride = tuple(attributes.get_ints("strides", (1,) * rank))
    dilation = tuple(attributes.get_ints("dilations", (1,) * rank))
    auto, given = attributes.get_string("auto_pad", "NOTSET"), attributes.get_ints("pads", ())
    asked = {"auto_pad": auto, "pads": given, "strides": stride, "dilations": dilation}
    pads = conv_pads(asked, image, size)
    found = Window(tuple(size), stride, dilation, pads[:rank], pads[rank:])
    if attributes.get_int("ceil_mode", 0) and not auto.startswith("SAME"):
        after = tuple(
            max((o - 1) * s + reach - n - b, a)
            for o, s, reach, n, b, a in zip(out, stride, found.reach, image, found.before, found.after, strict=True)
        )
        found = replace(found, after=after)
    return found


@dataclass(frozen=True)
class Image:
    """A value in the layout of image kernels: ``[batch, height, width, channels]``; sequences have height 1."""

    held: Held

    @property
    def spatial(self) -> tuple[int, ...]:
        """Spatial sizes."""
        return self.held.shape[2:]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as stored."""
        n, c, *rest = self.held.shape
        return (n, *((1, *rest) if len(rest) == 1 else rest), c)

    @property
    def free(self) -> tuple[bool, ...]:
        """Free axes, as stored."""
        n, c, *rest = self.held.free
        return (n, *((False, *rest) if len(rest) == 1 else rest), c)


def read_image(low: Lowering, domain: Domain, held: Held) -> int:
    """The tensor of an image; a sequence gets an axis."""
    tensor = low.read(domain, held.name, channels_last(held.rank))
    if held.rank != 3:
        return tensor
    image, grid = Image(held), held.grid if domain.integer else None
    wide = low.scratch(f"{held.name}_plane", image.shape, image.free, held.dtype, grid)
    low.reshape(tensor, wide, asked(image.shape, image.free))
    return wide


def write_image(low: Lowering, domain: Domain, emit: Callable[[int], None]) -> None:
    """Let ``emit`` write the result of an operator on images; for a sequence, through a tensor with one more axis."""
    held = low.held.setdefault(domain.result, low.fresh(domain.result))
    perm = channels_last(held.rank)
    if held.rank != 3:
        emit(low.write(domain, perm))
        return
    image = Image(held)
    wide = low.scratch(f"{held.name}_plane", image.shape, image.free, held.dtype, domain.grid)
    emit(wide)
    low.reshape(wide, low.write(domain, perm), asked([held.shape[i] for i in perm], [held.free[i] for i in perm]))


def asked(shape: Sequence[int], free: Sequence[bool]) -> list[int]:
    """The shape for RESHAPE, with -1 on a free axis."""
    return [-1 if f else n for n, f in zip(shape, free, strict=True)]


def padded(
    low: Lowering, domain: Domain, held: Held, tensor: int, window: Window, filler: np.float32 | None = None
) -> int:
    """PAD around an image: with zero, or ``filler``."""
    image, grid = Image(held), held.grid if domain.integer else None
    pads = np.array([(0, 0), *zip(window.before, window.after, strict=True), (0, 0)], np.int32)
    shape = [n + int(a) + int(b) for n, (a, b) in zip(image.shape, pads, strict=True)]
    out = low.scratch(f"{held.name}_padded", shape, image.free, held.dtype, grid)
    inputs = [tensor, low.flat.constant("pads", pads)]
    if filler is None:
        low.flat.op("PAD", inputs, [out], {"table": "PadOptions"})
    else:
        value = np.asarray(filler) if grid is None else np.asarray(np.iinfo(grid.dtype).min, grid.dtype)
        inputs.append(low.flat.tensor(f"{held.name}_filler", (), value.dtype.name, grid, data=value))
        low.flat.op("PADV2", inputs, [out], {"table": "PadV2Options"})
    return out


# ------------------------------------------------------------------------------------------------- convolutions


def weight_problem(grid: Grid | None, axis: int) -> str | None:
    """The reason why integer kernels refuse a weight on this grid, with output channels along ``axis``."""
    if grid is None:
        return "its weight is in float"
    if grid.dtype != "int8":
        return f"its weight has {grid.dtype[3:]} bits, the kernel takes 8"
    if not grid.symmetric:
        return "its weight has a zero point; quantize it symmetrically"
    if grid.axis not in (None, axis):
        return f"its weight has one scale per index of axis {grid.axis}, not per output channel"
    return None


def bias_problem(bias: Held | None, data: Grid | None, weight: Grid | None) -> str | None:
    """The reason why integer kernels refuse this bias; a float one is rounded to the grid of the products."""
    if bias is None or data is None or weight is None:
        return None
    if not bias.constant:
        return "its bias is computed"
    scale = product_scale(data, weight)
    if bias.grid is not None and bias.grid.dtype == "int32":
        wanted = np.asarray(bias.grid.scale, np.float32)
        if wanted.size in (1, scale.size) and np.allclose(wanted, scale, rtol=1e-5):
            return None
    if np.max(np.abs(bias.floats().reshape(-1) / scale), initial=0.0) > np.iinfo(np.int32).max:
        return "its bias does not fit 32 bits in steps of input scale times weight scale"
    return None


def product_scale(data: Grid, weight: Grid) -> Array:
    """Scale of the sums that an integer kernel adds its bias to: one, or one per output channel."""
    return np.float32(data.scale[0]) * np.asarray(weight.scale, np.float32)


def weight_tensor(
    low: Lowering, domain: Domain, held: Held, perm: Sequence[int], shape: Sequence[int], axis: int
) -> int:
    """A constant weight, permuted and reshaped; its scales lie along ``axis`` of the result."""
    perm = tuple(perm)
    if not domain.integer and held.grid is not None and held.array is not None and held.array.size > 256:
        codes = low.flat.tensor(
            held.name, shape, held.grid.dtype, held.grid, axis=axis, data=held.array.transpose(perm).reshape(shape)
        )
        floats = low.flat.tensor(f"{held.name}_float", shape, "float32")
        low.flat.op("DEQUANTIZE", [codes], [floats], {"table": "DequantizeOptions"})
        return floats
    array = held.array if domain.integer else held.floats()
    assert array is not None
    grid = held.grid if domain.integer else None
    stored = array.transpose(perm).reshape(shape)
    return low.flat.tensor(held.name, shape, stored.dtype.name, grid, axis=axis, data=stored)


def bias_tensor(low: Lowering, domain: Domain, bias: Held | None, sums: Array, count: int) -> list[int]:
    """The bias as the last input; zeros where the operator has none, since kernels require one.

    Args:
        low, domain: of the operator.
        bias: a constant.
        sums: :func:`product_scale` of an operator on integers.
        count: number of output channels.
    """
    if not domain.integer:
        if bias is None:
            return [low.flat.constant("no_bias", np.zeros(count, np.float32))]
        floats = np.broadcast_to(bias.floats().reshape(-1), (count,)).astype(np.float32)
        return [low.flat.tensor(bias.name, (count,), "float32", data=floats)]
    wide = "int64" if domain.grid is not None and domain.grid.dtype == "int16" else "int32"
    scale = tuple(float(s) for s in sums.reshape(-1))
    made = Grid(wide, scale, (0,) * len(scale), None if len(scale) == 1 else 0)
    codes = np.broadcast_to(_bias_codes(bias, sums), (count,)).astype(wide)
    name = "no_bias" if bias is None else bias.name
    return [low.flat.tensor(name, (count,), wide, made, axis=0, data=codes)]


def _bias_codes(bias: Held | None, sums: Array) -> Array:
    if bias is None:
        return np.zeros(1, np.int64)
    grid = bias.grid
    if grid is not None and grid.dtype == "int32" and np.allclose(np.asarray(grid.scale, np.float32), sums, rtol=1e-5):
        assert bias.array is not None
        return np.asarray(bias.array.reshape(-1))
    return np.asarray(np.rint(bias.floats().reshape(-1).astype(np.float64) / sums))


def sums_of(domain: Domain, data: Held, weight: Held) -> Array:
    """:func:`product_scale` where the operator is computed on integers."""
    if not domain.integer or data.grid is None or weight.grid is None:
        return np.ones(1, np.float32)
    return product_scale(data.grid, weight.grid)


def bias_of(low: Lowering, node: ir.Node) -> Held | None:
    """The bias of a convolution, which is a constant."""
    value = node.inputs[2] if len(node.inputs) > 2 else None
    if value is None:
        return None
    held = low.get(value)
    if not held.constant:
        low.refuse(node, "its bias is computed", "write it as an Add after it")
    return held


def _conv_domain(low: Lowering, node: ir.Node, axis: int, data: Held) -> Domain:
    """The domain of an operator with weight and bias."""
    weight = low.get(node.inputs[1])
    why = weight_problem(weight.grid, axis) or bias_problem(bias_of(low, node), data.grid, weight.grid)
    return low.domain(node, node.inputs[:1], unless=why)


def _conv(low: Lowering, node: ir.Node) -> None:
    held, weight = low.get(node.inputs[0]), low.get(node.inputs[1])
    if not weight.constant:
        low.refuse(node, "its weight is computed", "use a constant weight")
    if held.rank == 5:
        _conv3d(low, node)
        return
    if held.rank not in (3, 4):
        low.refuse(node, f"its input has {held.rank} axes", "LiteRT convolves sequences, images and volumes")
    domain = _conv_domain(low, node, 0, held)
    spatial = low.trace.shapes[str(node.outputs[0].name)][2:]
    window = window_of(node, weight.shape[2:], held.shape[2:], spatial).plane()
    source, image = read_image(low, domain, held), Image(held)
    if window.padded and not window.as_same(image.shape[1:3]):
        source, window = padded(low, domain, held, source, window), window.without_padding()
    padding = SAME if window.padded else VALID
    group, channels = node.attributes.get_int("group", 1), held.shape[1]
    depthwise = group == channels and group > 1
    kernel, filters = _filters(low, domain, weight, depthwise)
    options: dict[str, Any] = {
        "padding": padding, "strideH": window.stride[0], "strideW": window.stride[1],
        "dilationHFactor": window.dilation[0], "dilationWFactor": window.dilation[1],
        "fusedActivationFunction": domain.activation,
    }  # fmt: skip
    options |= (
        {"table": "DepthwiseConv2DOptions", "depthMultiplier": weight.shape[0] // channels}
        if depthwise
        else {"table": "Conv2DOptions"}
    )
    inputs = [
        source,
        filters,
        *bias_tensor(low, domain, bias_of(low, node), sums_of(domain, held, weight), weight.shape[0]),
    ]
    write_image(low, domain, lambda out: low.flat.op(kernel, inputs, [out], options))


def _filters(low: Lowering, domain: Domain, weight: Held, depthwise: bool) -> tuple[str, int]:
    """The kernel's name and its filters: ``[out, h, w, in]``, or ``[1, h, w, out]`` where each reads one channel."""
    spatial = weight.shape[2:] if weight.rank == 4 else (1, *weight.shape[2:])
    last = (*range(2, weight.rank),)
    if depthwise:
        shape = (1, *spatial, weight.shape[0])
        return "DEPTHWISE_CONV_2D", weight_tensor(low, domain, weight, (1, *last, 0), shape, 3)
    shape = (weight.shape[0], *spatial, weight.shape[1])
    return "CONV_2D", weight_tensor(low, domain, weight, (0, *last, 1), shape, 0)


def _conv3d(low: Lowering, node: ir.Node) -> None:
    held, weight = low.get(node.inputs[0]), low.get(node.inputs[1])
    if node.attributes.get_int("group", 1) != 1:
        low.refuse(node, "CONV_3D has no groups", "use a convolution without groups, or export format='onnx'")
    domain = low.domain(node, node.inputs[:1], unless="LiteRT convolves volumes in float only")
    out = low.trace.shapes[str(node.outputs[0].name)][2:]
    window = window_of(node, weight.shape[2:], held.shape[2:], out)
    source = low.read(domain, held.name, channels_last(5))
    if window.padded and not window.as_same(held.shape[2:]):
        source, window = padded(low, domain, held, source, window), window.without_padding()
    filters = weight_tensor(low, domain, weight, (2, 3, 4, 1, 0), [weight.shape[i] for i in (2, 3, 4, 1, 0)], 4)
    options = {
        "table": "Conv3DOptions",
        "padding": SAME if window.padded else VALID,
        "fusedActivationFunction": domain.activation,
    }
    options |= {f"stride{a}": n for a, n in zip("DHW", window.stride, strict=True)}
    options |= {f"dilation{a}Factor": n for a, n in zip("DHW", window.dilation, strict=True)}
    inputs = [
        source,
        filters,
        *bias_tensor(low, domain, bias_of(low, node), sums_of(domain, held, weight), weight.shape[0]),
    ]
    low.flat.op("CONV_3D", inputs, [low.write(domain, channels_last(5))], options)


def _conv_transpose(low: Lowering, node: ir.Node) -> None:
    """Write TRANSPOSE_CONV of the whole image, and slice off its borders by ``pads``."""
    held, weight = low.get(node.inputs[0]), low.get(node.inputs[1])
    dilation = node.attributes.get_ints("dilations", (1,))
    if held.rank not in (3, 4) or node.attributes.get_int("group", 1) != 1 or any(d != 1 for d in dilation):
        low.refuse(
            node, "TRANSPOSE_CONV has no groups, no dilation and two spatial axes at most",
            "export format='onnx', or use Resize and a convolution",
        )  # fmt: skip
    domain = _conv_domain(low, node, 1, held)
    out_held = low.fresh(domain.result)
    rank = held.rank - 2
    stride = tuple(node.attributes.get_ints("strides", (1,) * rank))
    before = tuple(node.attributes.get_ints("pads", (0,) * (2 * rank)))[:rank]
    window = Window(weight.shape[2:], stride, (1,) * rank, before, before).plane()
    image, made = Image(held), Image(out_held)
    whole = [(n - 1) * s + k for n, s, k in zip(image.shape[1:3], window.stride, window.size, strict=True)]
    needed = [max(w, b + n) for w, b, n in zip(whole, window.before, made.shape[1:3], strict=True)]
    channels = weight.shape[1]
    filters = weight_tensor(
        low, domain, weight, (1, *range(2, weight.rank), 0), (channels, *window.size, weight.shape[0]), 0
    )
    if any(image.free):
        low.refuse_batch(node, "TRANSPOSE_CONV wants the size of its output in the file, the batch too")
    full = (image.shape[0], *whole, channels)
    argument = low.flat.constant("shape", np.asarray(full, np.int32))
    source = read_image(low, domain, held)
    inputs = [
        argument,
        filters,
        source,
        *bias_tensor(low, domain, bias_of(low, node), sums_of(domain, held, weight), channels),
    ]
    options = {
        "table": "TransposeConvOptions", "padding": VALID, "strideH": window.stride[0], "strideW": window.stride[1],
        "fusedActivationFunction": domain.activation,
    }  # fmt: skip
    if needed != whole:
        low.refuse(node, "output_padding reaches beyond what the kernel makes", "choose output_padding 0")

    def emit(out: int) -> None:
        if full == made.shape:
            low.flat.op("TRANSPOSE_CONV", inputs, [out], options)
            return
        large = low.scratch(f"{domain.result}_whole", full, (False,) * 4, held.dtype, domain.grid)
        low.flat.op("TRANSPOSE_CONV", inputs, [large], options)
        start = low.flat.constant("begin", np.asarray((0, *window.before, 0), np.int32))
        size = low.flat.constant("size", np.asarray(made.shape, np.int32))
        low.flat.op("SLICE", [large, start, size], [out], {"table": "SliceOptions"})

    write_image(low, domain, emit)


# ----------------------------------------------------------------------------------------------------- resizing


def _resize(low: Lowering, node: ir.Node) -> None:
    held, attributes = low.get(node.inputs[0]), node.attributes
    out = low.trace.shapes[str(node.outputs[0].name)]
    mode = attributes.get_string("mode", "nearest")
    where = attributes.get_string("coordinate_transformation_mode", "half_pixel")
    if held.rank != 4 or out[:2] != held.shape[:2] or mode not in ("nearest", "linear"):
        low.refuse(node, "LiteRT resizes height and width, nearest or linear", "export format='onnx'")
    nearest = mode == "nearest"
    rounding = attributes.get_string("nearest_mode", "round_prefer_floor")
    flags = _sampling(held.shape[2:], out[2:], where, rounding if nearest else None)
    if flags is None:
        low.refuse(
            node,
            f"LiteRT has no sampling like {where}{f' with {rounding}' if nearest else ''} from {held.shape[2:]} to {out[2:]}",
            "resize by whole factors, or with half_pixel or align_corners",
        )  # fmt: skip
    domain = (
        low.carried(node, node.inputs[0])
        if nearest
        else low.domain(node, node.inputs[:1], fuses=False, accepts=on_one_grid)
    )
    perm = channels_last(4)
    kernel, table = (
        ("RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions")
        if nearest
        else ("RESIZE_BILINEAR", "ResizeBilinearOptions")
    )
    size = low.flat.constant("size", np.asarray(out[2:], np.int32))
    options = {"table": table, "alignCorners": flags[0], "halfPixelCenters": flags[1]}
    low.flat.op(kernel, [low.read(domain, held.name, perm), size], [low.write(domain, perm)], options)


def _sampling(old: Sequence[int], new: Sequence[int], where: str, rounding: str | None) -> tuple[bool, bool] | None:
    """``(align_corners, half_pixel_centers)`` that sample as ONNX does; of nearest neighbours as far as these sizes go."""
    found = {
        "half_pixel": (False, True), "pytorch_half_pixel": (False, True), "align_corners": (True, False),
        "asymmetric": (False, False),
    }.get(where)  # fmt: skip
    if where == "pytorch_half_pixel" and 1 in new:
        return None
    if rounding is None:
        return found
    for flags in ((False, True), (False, False), (True, False)):
        if all(
            np.array_equal(_nearest(o, n, where, rounding), _nearest_of_kernel(o, n, *flags))
            for o, n in zip(old, new, strict=True)
        ):
            return flags
    return None


def _nearest(old: int, new: int, where: str, rounding: str) -> Array:
    """Source of every new pixel in ONNX."""
    x = np.arange(new, dtype=np.float64)
    if where in ("half_pixel", "pytorch_half_pixel"):
        at = (x + 0.5) * old / new - 0.5
    elif where == "align_corners":
        at = x * (old - 1) / max(new - 1, 1)
    else:
        at = x * old / new
    rounded = {
        "floor": np.floor(at), "ceil": np.ceil(at), "round_prefer_floor": np.ceil(at - 0.5),
        "round_prefer_ceil": np.floor(at + 0.5),
    }[rounding]  # fmt: skip
    return np.clip(rounded, 0, old - 1).astype(np.int64)


def _nearest_of_kernel(old: int, new: int, align: bool, half: bool) -> Array:
    """Source of every new pixel in RESIZE_NEAREST_NEIGHBOR, which computes in float32."""
    ratio = np.float32((old - 1) / (new - 1)) if align and new > 1 else np.float32(old / new)
    at = (np.arange(new, dtype=np.float32) + np.float32(0.5 if half else 0)) * ratio
    rounded = np.floor(at + np.float32(0.5)) if align else np.floor(at)
    return np.clip(rounded, 0, old - 1).astype(np.int64)


def _depth_to_space(kernel: str, low: Lowering, node: ir.Node) -> None:
    """Channels last the kernel takes channels in the order DCR; CRD is written as changes of shape by the caller."""
    if kernel == "DEPTH_TO_SPACE" and node.attributes.get_string("mode", "DCR") != "DCR":
        _pixel_shuffle(low, node)
        return
    domain, perm = low.carried(node, node.inputs[0]), channels_last(4)
    options = {
        "table": "DepthToSpaceOptions" if kernel == "DEPTH_TO_SPACE" else "SpaceToDepthOptions",
        "blockSize": node.attributes.get_int("blocksize", 1),
    }
    low.flat.op(kernel, [low.read(domain, node.inputs[0], perm)], [low.write(domain, perm)], options)


def _pixel_shuffle(low: Lowering, node: ir.Node) -> None:
    """DepthToSpace of mode CRD, after reordering the channels to DCR."""
    held, block = low.get(node.inputs[0]), node.attributes.get_int("blocksize", 1)
    domain, perm, channels = low.carried(node, node.inputs[0]), channels_last(4), held.shape[1]
    order = np.arange(channels).reshape(-1, block, block).transpose(1, 2, 0).reshape(-1)
    shape, free = [held.shape[i] for i in perm], [held.free[i] for i in perm]
    sorted_channels = low.scratch(f"{held.name}_ordered", shape, free, held.dtype, domain.grid)
    indices = low.flat.constant("channels", order.astype(np.int32))
    source = low.read(domain, held.name, perm)
    low.flat.op("GATHER", [source, indices], [sorted_channels], {"table": "GatherOptions", "axis": 3})
    options = {"table": "DepthToSpaceOptions", "blockSize": block}
    low.flat.op("DEPTH_TO_SPACE", [sorted_channels], [low.write(domain, perm)], options)


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
    return window_of(node, size, held.shape[2:], out).plane()


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
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Resize": _resize,
    "DepthToSpace": partial(_depth_to_space, "DEPTH_TO_SPACE"),
    "SpaceToDepth": partial(_depth_to_space, "SPACE_TO_DEPTH"),
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global_average,
    "ReduceMean": _reduce_mean,
}
