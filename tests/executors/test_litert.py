"""Executors against LiteRT's kernels, operator by operator: reference kernels, and XNNPACK through the default delegate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitwright.compare.executed_flat import FlatExecutor
from bitwright.executors.profile import find_profile
from bitwright.export.litert.flat import FlatModel, Grid
from bitwright.runtimes.adapters import session_of

pytest.importorskip("ai_edge_litert")

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


@pytest.mark.parametrize("profile", ["litert_reference", "xnnpack"])
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
            wanted = session_of(content, reference=profile == "litert_reference").run(feeds)["y"]
            np.testing.assert_array_equal(found, wanted, f"{kind} {dtype}")
            assert seen == ["y"]


@pytest.mark.parametrize("profile", ["litert_reference", "xnnpack"])
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
            wanted = session_of(content, reference=profile == "litert_reference").run(feeds)["y"]
            np.testing.assert_array_equal(
                FlatExecutor(content, row).run(feeds)["y"], wanted, f"{size} {made} {aligned}"
            )


@pytest.mark.parametrize("profile", ["litert_reference", "xnnpack"])
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
            wanted = session_of(content, reference=profile == "litert_reference").run({"x": codes})["y"]
            found = FlatExecutor(content, row).run({"x": codes})["y"]
            np.testing.assert_array_equal(found, wanted, f"{alpha} {ratio}")
