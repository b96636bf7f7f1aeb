"""Executors against LiteRT's kernels, operator by operator: reference kernels, and XNNPACK through the default delegate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bitwright.compare.executed_flat import FlatExecutor
from bitwright.executors.profile import find_profile
from bitwright.export.litert.flat import FlatModel, Grid
from bitwright.runtimes.adapters import session_of

pytest.importorskip("ai_edge_litert")


def answer(profile: str, content: bytes, feeds: dict[str, Any]) -> Any:
    """The output ``y`` of the runtime that a profile describes; the test is skipped where that is not installed."""
    if profile != "cmsis_nn":
        return session_of(content, reference=profile == "litert_reference").run(feeds)["y"]
    runtime = pytest.importorskip("tflite_micro").runtime
    session = runtime.Interpreter.from_bytes(content, arena_size=1 << 22)
    for port, array in enumerate(feeds.values()):
        session.set_input(array, port)
    session.invoke()
    return session.get_output(0)


PROFILES = ["litert_reference", "xnnpack", "cmsis_nn"]
POOL = {
    "table": "Pool2DOptions", "padding": 0, "strideH": 2, "strideW": 2, "filterHeight": 3, "filterWidth": 3,
    "fusedActivationFunction": 0,
}  # fmt: skip
SUM = {"fusedActivationFunction": 0, "potScaleInt16": False}
BIG, SMALL = (2, 7, 9, 3), (4, 40)
# kind -> shape of its codes, how many of them, shape of the output, options, fixed grid of the output, constant
OPERATORS: dict[str, tuple[Any, ...]] = {
    "SOFTMAX": (SMALL, 1, SMALL, {"table": "SoftmaxOptions", "beta": 1.0}, (2.0**-8, -128), None),
    "LOGISTIC": (SMALL, 1, SMALL, None, (2.0**-8, -128), None),
    "TANH": (SMALL, 1, SMALL, None, (2.0**-7, 0), None),
    "RESIZE_BILINEAR": (
        (1, 5, 6, 3), 1, (1, 11, 9, 3), {"table": "ResizeBilinearOptions", "alignCorners": False, "halfPixelCenters": True},
        "same", [11, 9],
    ),
    "LEAKY_RELU": ((4, 64), 1, (4, 64), {"table": "LeakyReluOptions", "alpha": 0.1}, None, None),
    "AVERAGE_POOL_2D": (BIG, 1, (2, 4, 5, 3), POOL, "same", None),
    "MAX_POOL_2D": (BIG, 1, (2, 4, 5, 3), POOL, "same", None),
    "MEAN": (BIG, 1, (2, 3), {"table": "ReducerOptions", "keepDims": False}, None, [1, 2]),
    "ADD": (BIG, 2, BIG, {"table": "AddOptions", **SUM}, None, None),
    "SUB": (BIG, 2, BIG, {"table": "SubOptions", **SUM}, None, None),
    "MUL": (BIG, 2, BIG, {"table": "MulOptions", "fusedActivationFunction": 0}, None, None),
}  # fmt: skip
EIGHT_BITS = ("SOFTMAX", "LOGISTIC", "TANH", "RESIZE_BILINEAR")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kind", OPERATORS)
def test_kernels_of_litert_are_met_bit_for_bit(kind: str, profile: str) -> None:
    row = find_profile(profile)
    if kind not in row.kernels:
        pytest.skip(f"{profile} leaves {kind} to LiteRT's own kernels")
    shape, count, made, options, fixed, constant = OPERATORS[kind]
    rng = np.random.default_rng(0)
    for dtype in ("int8",) if kind in EIGHT_BITS else ("int8", "int16"):
        info = np.iinfo(dtype)
        for _ in range(3):
            grids = [
                (float(np.exp(rng.uniform(-5, -1))), int(rng.integers(-100, 100)) if dtype == "int8" else 0)
                for _ in range(count + 1)
            ]
            out = grids[0] if fixed == "same" else fixed or (sum(g[0] for g in grids[:count]), grids[-1][1])
            flat, names = FlatModel(), [f"x{i}" for i in range(count)]
            tensors = [
                flat.tensor(name, shape, dtype, Grid(dtype, (g[0],), (g[1],)))
                for name, g in zip(names, grids, strict=False)
            ]
            last = flat.tensor("y", made, dtype, Grid(dtype, (out[0],), (out[1],)))
            held = [] if constant is None else [flat.constant("c", np.asarray(constant, np.int32))]
            flat.op(kind, [*tensors, *held], [last], options)
            inputs = dict(zip(names, tensors, strict=True))
            content = flat.finish(inputs, {"y": last}, {"bitwright": '{"sites": []}'})
            feeds = {name: rng.integers(info.min, info.max + 1, shape).astype(dtype) for name in names}
            seen: list[str] = []
            found = FlatExecutor(content, row).run(feeds, seen=lambda name, codes, seen=seen: seen.append(name))["y"]
            wanted = answer(profile, content, feeds)
            np.testing.assert_array_equal(found, wanted, f"{kind} {dtype}")
            assert seen == ["y"]


@pytest.mark.parametrize("profile", ["litert_reference", "xnnpack"])
def test_softmax_is_met_where_table_and_fixed_point_differ(profile: str) -> None:
    """One code in some 30,000 differs between the two kernels of LiteRT; these draws hold such codes."""
    row, made = find_profile(profile), []
    for seed, step in ((4, 0.1), (31, 0.08), (34, 0.14)):
        codes = np.random.default_rng(seed).integers(-128, 128, (512, 64)).astype(np.int8)
        flat = FlatModel()
        x = flat.tensor("x", codes.shape, "int8", Grid("int8", (step,), (0,)))
        y = flat.tensor("y", codes.shape, "int8", Grid("int8", (2.0**-8,), (-128,)))
        flat.op("SOFTMAX", [x], [y], {"table": "SoftmaxOptions", "beta": 1.0})
        content = flat.finish({"x": x}, {"y": y}, {"bitwright": '{"sites": []}'})
        made.append(FlatExecutor(content, row).run({"x": codes})["y"])
        np.testing.assert_array_equal(made[-1], answer(profile, content, {"x": codes}))
        other = {"fixed": "table", "table": "fixed"}[row.kernels["SOFTMAX"]]
        changed = replace(row, kernels={**row.kernels, "SOFTMAX": other})
        assert (FlatExecutor(content, changed).run({"x": codes})["y"] != made[-1]).sum() in (1, 2)


@pytest.mark.parametrize("kind", ["ADD", "SUB"])
def test_sums_of_16_bits_are_met_where_operands_round_once(kind: str) -> None:
    """One sum in 100,000 differs between LiteRT's default and reference kernels."""
    row, rng, other = find_profile("xnnpack"), np.random.default_rng(0), 0
    for _ in range(4):
        steps = np.exp(rng.uniform(-9, -6, 2)).astype(np.float32)
        out, shape, flat = float(steps.max() * 1.5), (8, 16, 32, 16), FlatModel()
        x, y = (
            flat.tensor(name, shape, "int16", Grid("int16", (float(s),), (0,)))
            for name, s in zip("xy", steps, strict=True)
        )
        made = flat.tensor("made", shape, "int16", Grid("int16", (out,), (0,)))
        flat.op(kind, [x, y], [made], {"table": f"{kind.capitalize()}Options", **SUM})
        content = flat.finish({"x": x, "y": y}, {"made": made}, {"bitwright": '{"sites": []}'})
        feeds = {name: rng.integers(-32768, 32768, shape).astype(np.int16) for name in "xy"}
        wanted = session_of(content).run(feeds)["made"]
        np.testing.assert_array_equal(FlatExecutor(content, row).run(feeds)["made"], wanted)
        other += int((session_of(content, reference=True).run(feeds)["made"] != wanted).sum())
    assert kind == "SUB" or other  # else these draws would not tell the kernels apart


def test_functions_in_float_have_the_last_bits_of_the_target() -> None:
    """XNNPACK's softmax of floats has an exponential of its own, and a last bit decides on the border of two codes."""
    flat = FlatModel()
    x, y = (flat.tensor(name, (64, 32), "float32") for name in "xy")
    flat.op("SOFTMAX", [x], [y], {"table": "SoftmaxOptions", "beta": 1.0})
    content = flat.finish({"x": x}, {"y": y}, {"bitwright": '{"sites": []}'})
    feeds = {"x": np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32) * 3}
    made = {p: FlatExecutor(content, find_profile(p)).run(feeds)["y"] for p in ("litert_reference", "xnnpack")}
    for profile, found in made.items():
        np.testing.assert_array_equal(found, answer(profile, content, feeds))
    assert (made["xnnpack"] != made["litert_reference"]).any()


@pytest.mark.parametrize("profile", PROFILES)
def test_resized_images_are_met_for_every_size_and_option(profile: str) -> None:
    rng, row = np.random.default_rng(1), find_profile(profile)
    for size, made in (((7, 7), (3, 4)), ((4, 5), (13, 5)), ((8, 8), (16, 16)), ((1, 6), (5, 7))):
        for aligned, halves in ((False, False), (True, False), (False, True)):
            flat, grid = FlatModel(), Grid("int8", (0.1,), (3,))
            x = flat.tensor("x", (2, *size, 5), "int8", grid)
            y = flat.tensor("y", (2, *made, 5), "int8", grid)
            options = {"table": "ResizeBilinearOptions", "alignCorners": aligned, "halfPixelCenters": halves}
            flat.op("RESIZE_BILINEAR", [x, flat.constant("c", np.asarray(made, np.int32))], [y], options)
            content = flat.finish({"x": x}, {"y": y}, {"bitwright": '{"sites": []}'})
            feeds = {"x": rng.integers(-128, 128, (2, *size, 5)).astype(np.int8)}
            wanted = answer(profile, content, feeds)
            np.testing.assert_array_equal(
                FlatExecutor(content, row).run(feeds)["y"], wanted, f"{size} {made} {aligned}"
            )


@pytest.mark.parametrize("profile", PROFILES)
def test_slopes_are_met_within_and_beyond_the_scales_that_xnnpack_takes(profile: str) -> None:
    rng, row = np.random.default_rng(2), find_profile(profile)
    codes = np.arange(-128, 128).astype(np.int8).reshape(4, 64)
    for alpha in (0.01, 0.001, 0.3, 1.5, -0.2, 5.0):
        for ratio in (2.0**-9, 0.05, 0.9, 7.0, 100.0, 300.0):
            flat, step = FlatModel(), float(np.exp(rng.uniform(-6, 1)))
            grids = [Grid("int8", (scale,), (int(rng.integers(-128, 128)),)) for scale in (step, step / ratio)]
            x, y = (flat.tensor(name, (4, 64), "int8", grid) for name, grid in zip("xy", grids, strict=True))
            flat.op("LEAKY_RELU", [x], [y], {"table": "LeakyReluOptions", "alpha": alpha})
            content = flat.finish({"x": x}, {"y": y}, {"bitwright": '{"sites": []}'})
            wanted = answer(profile, content, {"x": codes})
            found = FlatExecutor(content, row).run({"x": codes})["y"]
            np.testing.assert_array_equal(found, wanted, f"{alpha} {ratio}")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("padding", [0, 1])
def test_transposed_convolutions_are_met_bit_for_bit(profile: str, per_channel: bool, padding: int) -> None:
    rng, row = np.random.default_rng(3), find_profile(profile)
    for kernel, stride, biased in ((2, 2, True), (3, 2, False), (4, 2, True), (3, 1, True), (5, 3, True)):
        flat, channels, image = FlatModel(), 6, (5, 7)
        # SAME lets any size stand that makes an image of this one; VALID the whole
        made = [n * stride if padding == 0 else (n - 1) * stride + kernel for n in image]
        scales = np.exp(rng.uniform(-7, -4, channels if per_channel else 1)).astype(np.float32)
        step, axis = float(np.float32(np.exp(rng.uniform(-5, -1)))), 0 if per_channel else None
        x = flat.tensor("x", (2, *image, 4), "int8", Grid("int8", (step,), (int(rng.integers(-100, 100)),)))
        weight = rng.integers(-127, 128, (channels, kernel, kernel, 4)).astype(np.int8)
        held = flat.tensor(
            "w", weight.shape, "int8", Grid("int8", tuple(map(float, scales)), (0,) * len(scales), axis), data=weight
        )
        terms = rng.integers(-9000, 9000, channels).astype(np.int32)
        grid = Grid("int32", tuple(float(step * s) for s in scales), (0,) * len(scales), axis)
        bias = flat.tensor("b", (channels,), "int32", grid, data=terms)
        out = Grid("int8", (float(step * scales.mean() * 150),), (int(rng.integers(-60, 60)),))
        y = flat.tensor("y", (2, *made, channels), "int8", out)
        shape = flat.constant("shape", np.asarray((2, *made, channels), np.int32))
        options = {"table": "TransposeConvOptions", "padding": padding, "strideH": stride, "strideW": stride,
                   "fusedActivationFunction": 0}  # fmt: skip
        flat.op("TRANSPOSE_CONV", [shape, held, x, *([bias] if biased else [])], [y], options)
        content = flat.finish({"x": x}, {"y": y}, {"bitwright": '{"sites": []}'})
        feeds = {"x": rng.integers(-128, 128, (2, *image, 4)).astype(np.int8)}
        wanted = answer(profile, content, feeds)
        seen: list[str] = []
        found = FlatExecutor(content, row).run(feeds, seen=lambda name, codes, seen=seen: seen.append(name))["y"]
        np.testing.assert_array_equal(found, wanted, f"{kernel} {stride}")
        assert seen == ["y"]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("several", [False, True], ids=["per-tensor", "per-channel"])
def test_fully_connected_layers_of_16_bits_round_as_their_kernel_does(several: bool, profile: str) -> None:
    rng, row, n = np.random.default_rng(3), find_profile(profile), 5
    options = {
        "table": "FullyConnectedOptions", "fusedActivationFunction": 0, "weightsFormat": 0, "keepNumDims": False,
        "asymmetricQuantizeInputs": False,
    }  # fmt: skip
    for biased in [True, False] * 10:
        step, ratio = float(rng.choice([0.1, 0.3, 0.7, 0.001])), float(rng.choice([0.5, 1.5, 2.5, 0.2]))
        scales = rng.choice([0.1, 0.3, 0.02], n if several else 1)
        zeros, axis = (0,) * len(scales), 0 if several else None
        flat = FlatModel()
        x = flat.tensor("x", (64, 40), "int16", Grid("int16", (step,), (0,)))
        codes = rng.integers(-9, 10, (n, 40)).astype(np.int8)
        w = flat.tensor(
            "w", (n, 40), "int8", Grid("int8", tuple(map(float, scales)), zeros, axis), axis=axis, data=codes
        )
        grid = Grid("int64", tuple(float(step * s) for s in scales), zeros, axis)
        b = flat.tensor("b", (n,), "int64", grid, axis=axis, data=rng.integers(-9000, 9000, n))
        y = flat.tensor("y", (64, n), "int16", Grid("int16", (float(step * scales.mean() * 8 / ratio),), (0,)))
        flat.op("FULLY_CONNECTED", [x, w, b if biased else -1], [y], options)
        content = flat.finish({"x": x}, {"y": y}, {"bitwright": '{"sites": []}'})
        feeds = {"x": rng.integers(-3000, 3000, (64, 40)).astype(np.int16)}
        found = FlatExecutor(content, row).run(feeds)["y"]
        np.testing.assert_array_equal(found, answer(profile, content, feeds), f"bias {biased}")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kind", ["CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"])
def test_layers_of_litert_are_met_bit_for_bit(kind: str, profile: str) -> None:
    rng, row = np.random.default_rng(5), find_profile(profile)
    window = {
        "padding": 0,
        "strideH": 2,
        "strideW": 2,
        "dilationHFactor": 1,
        "dilationWFactor": 1,
        "fusedActivationFunction": 1,
    }
    for k in range(6):
        n, channels = int(rng.integers(1, 9)), int(rng.integers(1, 9))
        shapes: dict[str, tuple[Any, ...]] = {  # of data, weight and output; the axis of its channels; options
            "CONV_2D": ((1, 8, 9, channels), (n, 3, 3, channels), (1, 4, 5, n), 0, {"table": "Conv2DOptions", **window}),
            "DEPTHWISE_CONV_2D": (
                (1, 8, 9, channels), (1, 3, 3, channels), (1, 4, 5, channels), 3,
                {"table": "DepthwiseConv2DOptions", "depthMultiplier": 1, **window},
            ),
            "FULLY_CONNECTED": (
                (3, 40), (n, 40), (3, n), 0,
                {"table": "FullyConnectedOptions", "fusedActivationFunction": 0, "weightsFormat": 0, "keepNumDims": False,
                 "asymmetricQuantizeInputs": False},
            ),
        }  # fmt: skip
        given, held, made, channel, options = shapes[kind]
        axis = 0 if k % 2 else None
        place = None if axis is None else channel
        step = float(np.float32(np.exp(rng.uniform(-5, -1))))
        scales = np.exp(rng.uniform(-7, -4, held[channel] if k % 2 else 1)).astype(np.float32)
        weight = rng.integers(-127, 128, held).astype(np.int8)
        zeros = (0,) * len(scales)
        flat = FlatModel()
        x = flat.tensor("x", given, "int8", Grid("int8", (step,), (int(rng.integers(-100, 100)),)))
        w = flat.tensor(
            "w", held, "int8", Grid("int8", tuple(map(float, scales)), zeros, axis), axis=place, data=weight
        )
        grid = Grid("int32", tuple(float(step * s) for s in scales), zeros, axis)
        terms = rng.integers(-9000, 9000, made[-1]).astype(np.int32)
        b = flat.tensor("b", (made[-1],), "int32", grid, axis=None if axis is None else 0, data=terms)
        spread = 9 if kind == "DEPTHWISE_CONV_2D" else weight[0].size
        out = Grid("int8", (float(step * scales.mean() * 50 * spread**0.5),), (int(rng.integers(-60, 60)),))
        y = flat.tensor("y", made, "int8", out)
        flat.op(kind, [x, w, b], [y], options)
        content = flat.finish({"x": x}, {"y": y}, {"bitwright": '{"sites": []}'})
        feeds = {"x": rng.integers(-128, 128, given).astype(np.int8)}
        np.testing.assert_array_equal(
            FlatExecutor(content, row).run(feeds)["y"], answer(profile, content, feeds), f"{kind} {k}"
        )


@pytest.mark.parametrize(
    ("profile", "kind"),
    [
        (profile, kind)
        for profile in PROFILES
        for kind in ("QUANTIZE", "MUL", "MEAN", "BATCH_MATMUL", "FULLY_CONNECTED")
        if kind in find_profile(profile).kernels
    ],
)
def test_values_on_the_border_of_two_codes_are_met_bit_for_bit(profile: str, kind: str) -> None:
    """Scales of few digits bring many values to a half, where one bit of a factor or the order of roundings decides."""
    rng, row = np.random.default_rng(11), find_profile(profile)
    shapes: dict[str, tuple[Any, ...]] = {  # of the operands and the output; the gain of the sum; options
        "QUANTIZE": ([(16, 64)], (16, 64), 1, None),
        "MUL": ([(16, 64)] * 2, (16, 64), 16, {"table": "MulOptions", "fusedActivationFunction": 0}),
        "MEAN": ([(40, 3, 4, 16)], (40, 16), 1, {"table": "ReducerOptions", "keepDims": False}),
        "BATCH_MATMUL": ([(256, 64), (64, 5)], (256, 5), 512, {"table": "BatchMatMulOptions", "adjX": False, "adjY": False}),
        "FULLY_CONNECTED": (
            [(256, 64), (5, 64)], (256, 5), 512,
            {"table": "FullyConnectedOptions", "fusedActivationFunction": 0, "weightsFormat": 0, "keepNumDims": False,
             "asymmetricQuantizeInputs": False},
        ),
    }  # fmt: skip
    given, made, gain, options = shapes[kind]
    for _ in range(20):
        steps = [float(rng.choice([0.1, 0.3, 0.7, 0.05, 1.1, 0.03, 0.9])) for _ in given]
        ratio = float(rng.choice([0.5, 0.25, 1.5, 0.75, 2.5, 0.125, 0.2, 0.4, 3.5]))
        zeros = [int(zero) for zero in rng.integers(-20, 20, 3)]
        codes = [rng.integers(-128, 128, shape).astype(np.int8) for shape in given]
        flat = FlatModel()
        tensors = [
            flat.tensor(f"x{i}", shape, "int8", Grid("int8", (step,), (zero,)))
            for i, (shape, step, zero) in enumerate(zip(given, steps, zeros, strict=False))
        ]
        inputs = {f"x{i}": tensor for i, tensor in enumerate(tensors)}
        if kind == "FULLY_CONNECTED":
            weight = Grid("int8", (steps[1],), (0,))
            tensors[1] = flat.tensor("w", given[1], "int8", weight, data=rng.integers(-9, 10, given[1]).astype(np.int8))
            inputs = {"x0": tensors[0]}
        held = [flat.constant("axes", np.asarray([1, 2], np.int32))] if kind == "MEAN" else []
        out = Grid("int8", (float(np.prod(steps)) * gain / ratio,), (zeros[2],))
        y = flat.tensor("y", made, "int8", out)
        flat.op(kind, [*tensors, *held], [y], options)
        content = flat.finish(inputs, {"y": y}, {"bitwright": '{"sites": []}'})
        feeds = dict(zip(inputs, codes, strict=False))
        found = FlatExecutor(content, row).run(feeds)["y"]
        np.testing.assert_array_equal(found, answer(profile, content, feeds), f"{kind} {steps} {ratio}")
