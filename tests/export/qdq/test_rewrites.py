"""A Pad with zeros in front of a convolution is its own padding; every other Pad stays. Shapes are asked of codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from bitwright.compare.runtime import optimized_types
from bitwright.export.qdq.write import to_qdq
from bitwright.onnx import QuantizationSimModel
from tests.export.marked import Array, Graph, run_both, run_plain, simulate, types

RNG = np.random.default_rng(3)
X = RNG.normal(size=(1, 4, 9, 8)).astype(np.float32)
WIDTHS = np.array([0, 0, 0, 1, 0, 0, 2, 1])  # one more row above than nothing, and so on: unlike on all sides


def padded(pad: Array, extra: tuple[Any, ...] = (), mode: str = "constant", **conv: Any) -> tuple[ir.Model, Graph]:
    """A quantized tensor, a Pad, a depthwise convolution."""
    g = Graph()
    widths = g.param("widths", pad)
    others = [None if e is None else g.param(f"extra_{i}", np.asarray(e)) for i, e in enumerate(extra)]
    x = g.mark(g.input("x", *X.shape), "x", "uint8", X)
    wide = g.op("Pad", x, widths, *others, mode=mode)
    weight = g.weight(g.param("w", (4, 1, 3, 3)))
    bias = g.param("b", (4,))
    y = g.op("Conv", wide, weight, bias, group=4, **conv)
    return g.model(g.mark(y, "y", "uint8", (-4, 4), name="out")), g


def assert_equal_and(found: int, model: ir.Model, g: Graph) -> ir.Model:
    """The file has so many Pad nodes, and gives what the simulation gives."""
    result = to_qdq(model, g.encodings).model
    assert types(result).count("Pad") == found
    wanted = simulate(model, g.encodings, {"x": X}, {"b": ("x", "w")})[1]["out"]
    exact, step = run_both(result, {"x": X}), g.encodings["y"].scale
    for outputs in exact.values():
        assert np.abs(outputs["out"] - wanted).max() <= 1.01 * step  # sums in another order
    return result


@pytest.mark.parametrize("own", [(0, 0, 0, 0), (1, 0, 0, 1)], ids=["no padding of its own", "some of its own"])
def test_a_convolution_pads_for_itself(own: tuple[int, ...]) -> None:
    model, g = padded(WIDTHS, (np.float32(0),), pads=own, strides=(2, 2))
    result = assert_equal_and(0, model, g)
    conv = next(n for n in result.graph if n.op_type == "Conv")
    assert conv.attributes.get_ints("pads") == tuple(np.add(own, (0, 1, 2, 1)))
    assert "widths" not in result.graph.initializers
    kernels = list(optimized_types(result).values())
    assert kernels.count("DequantizeLinear") == 1 and "QLinearConv" in kernels, kernels


def test_widths_that_other_constants_make_and_named_axes() -> None:
    g = Graph()
    zeros = g.op("ConstantOfShape", g.param("count", np.array([2])), value=ir.tensor(np.zeros(1, np.int64)))
    zeros.type = ir.TensorType(ir.DataType.INT64)
    widths = g.op("Concat", zeros, g.param("ends", np.array([1, 2])), axis=0)
    widths.type = ir.TensorType(ir.DataType.INT64)
    x = g.mark(g.input("x", *X.shape), "x", "uint8", X)
    wide = g.op("Pad", x, widths, None, g.param("axes", np.array([2, -1])))
    y = g.op("Conv", wide, g.weight(g.param("w", (5, 4, 3, 3))), auto_pad="VALID")
    model = g.model(g.mark(y, "y", "uint8", (-20, 20), name="out"))
    result = to_qdq(model, g.encodings).model
    assert not {"Pad", "Concat", "ConstantOfShape"} & set(types(result))
    conv = next(n for n in result.graph if n.op_type == "Conv")
    assert conv.attributes.get_ints("pads") == (0, 0, 1, 2) and "auto_pad" not in conv.attributes
    wanted = simulate(model, g.encodings, {"x": X})[1]["out"]
    for outputs in run_both(result, {"x": X}).values():
        assert np.abs(outputs["out"] - wanted).max() <= 1.01 * g.encodings["y"].scale


@pytest.mark.parametrize(
    "pad, extra, mode",
    [(WIDTHS, (np.float32(1),), "constant"), (WIDTHS, (), "reflect")],
    ids=["with ones", "by reflection"],
)
def test_other_padding_stays(pad: Array, extra: tuple[Any, ...], mode: str) -> None:
    assert_equal_and(1, *padded(pad, extra, mode))


def test_a_pad_that_cuts_off_stays() -> None:
    model, g = padded(np.array([0, 0, -1, 1, 0, 0, 2, 1]))  # ONNX's own reference has none of these
    assert types(to_qdq(model, g.encodings).model).count("Pad") == 1


def test_a_convolution_that_chooses_its_padding_keeps_the_pad() -> None:
    assert_equal_and(1, *padded(WIDTHS, auto_pad="SAME_UPPER"))


def test_what_others_read_stays() -> None:
    g = Graph()
    x = g.mark(g.input("x", *X.shape), "x", "uint8", X)
    wide = g.op("Pad", x, g.param("widths", WIDTHS))
    y = g.op("Conv", wide, g.weight(g.param("w", (5, 4, 3, 3))))
    result = to_qdq(g.model(y, g.op("Relu", wide)), g.encodings).model
    assert types(result).count("Pad") == 1


@pytest.mark.parametrize("target", ["ort_cpu", "packed"])
def test_shapes_are_asked_of_codes(target: str) -> None:
    g = Graph()
    x = g.mark(g.input("x", "n", *X.shape[1:]), "x", "uint8", X)
    y = g.mark(g.op("Conv", x, g.weight(g.param("w", (4, 4, 3, 3)))), "y", "uint8", (-9, 9))
    batch = g.op("Shape", y, start=0, end=1)
    batch.type = ir.TensorType(ir.DataType.INT64)
    lengths = g.op("Concat", batch, g.param("flat", np.array([-1])), axis=0)
    lengths.type = ir.TensorType(ir.DataType.INT64)
    flat = g.op("Reshape", y, lengths)
    z = g.op("MatMul", flat, g.weight(g.param("v", (4 * 7 * 6, 5))))
    model = g.model(g.mark(z, "z", "uint8", (-30, 30), name="out"))
    result = to_qdq(model, g.encodings, target=target).model
    (shape,) = (node for node in result.graph if node.op_type == "Shape")
    assert (shape.inputs[0].producer().op_type == "QuantizeLinear") is (target == "ort_cpu")
    kernels = list(optimized_types(result).values())
    assert kernels.count("DequantizeLinear") == (1 if target == "ort_cpu" else 2), kernels
    for batches in (1, 3):
        feeds = {"x": RNG.normal(size=(batches, *X.shape[1:])).astype(np.float32)}
        wanted = simulate(model, g.encodings, feeds, {})[1]["out"]
        for outputs in run_both(result, feeds).values():
            assert np.abs(outputs["out"] - wanted).max() <= 1.01 * g.encodings["z"].scale
    sim = QuantizationSimModel(result, X)  # what the file holds is read as it was
    np.testing.assert_array_equal(sim.run(X)[0], run_plain(result, {"x": X})[0])
