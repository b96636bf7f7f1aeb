"""Rewrites of the exported graph: grids after pools, and what the export notes on operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from bitwright.compare.runtime import optimized_types
from bitwright.core.numerics.granularity import PerChannel
from bitwright.errors import ExportError
from bitwright.export.qdq.forms import METADATA, note_metadata, read_metadata
from bitwright.export.qdq.write import QdqResult, to_qdq
from bitwright.export.targets import TARGETS, find_target
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


def node() -> ir.Node:
    return ir.Node("", "DequantizeLinear", [ir.Value(name="x")], name="x_dq")


def test_notes_are_read_as_they_were_written() -> None:
    noted = node()
    assert read_metadata(noted) is None
    note_metadata(noted, places=[("conv.weight", 0)], role="weight", scale=None)
    facts = read_metadata(noted)
    unset = {"scale": None, "entry": None, "axis": None, "perm": [], "pooled": 0, "reach": 0}
    assert facts == {"places": [["conv.weight", 0]], "role": "weight", **unset}
    assert noted.metadata_props[METADATA] == '{"places":[["conv.weight",0]],"role":"weight"}', (
        "what is usual is left out"
    )


def test_the_scale_that_the_operator_reads_is_not_written_again() -> None:
    noted = ir.Node("", "DequantizeLinear", [ir.Value(name="x"), ir.Value(name="s")], name="x_dq")
    note_metadata(noted, places=[("a", 0)], role="activation", scale="s", axis=1)
    assert "scale" not in noted.metadata_props[METADATA]
    facts = read_metadata(noted)
    assert facts is not None and facts["scale"] == "s" and facts["axis"] == 1
    note_metadata(noted, places=[("a", 0)], role="activation", scale="other")
    assert (read_metadata(noted) or {})["scale"] == "other"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{", id="no-json"),
        pytest.param(b'{"places": [["ac\x95", 0]]}', id="no-text"),
        pytest.param("[]", id="list"),
        pytest.param('{"role": "weight"}', id="no-places"),
        pytest.param('{"places": [["a"]]}', id="half-a-place"),
        pytest.param('{"places": [["a", "b"]]}', id="run-without-number"),
        pytest.param('{"places": 3}', id="number"),
    ],
)
def test_damaged_notes_name_the_operator(text: str) -> None:
    noted = node()
    noted.metadata_props[METADATA] = text
    with pytest.raises(ExportError, match="x_dq: what the export wrote on this operator is damaged.*export again"):
        read_metadata(noted)


FEEDS = {"x": RNG.normal(size=(2, 1, 13, 10)).astype(np.float32)}
HALVES = {"kernel_shape": [2, 2], "strides": [2, 2]}
Readers = Callable[[Graph, ir.Value], tuple[ir.Value, ...]]


def pooled(g: Graph, value: ir.Value, **attrs: Any) -> ir.Value:
    return g.op("MaxPool", value, name="pooled", **(attrs or HALVES))


def head(g: Graph, value: ir.Value) -> ir.Value:
    """An integer convolution of four channels."""
    weight = g.weight(g.param("second.weight", (3, 4, 3, 3)))
    return g.mark(g.op("Conv", value, weight, name="second"), "second.output[0]", data=(-9, 9), name="y")


def net(
    fmt: str = "uint8",
    readers: Readers = lambda g, value: (head(g, pooled(g, value)),),
    *,
    given: str = "",
    batch: int | str = 2,
    **options: Any,
) -> tuple[ir.Model, Graph]:
    """Conv and Relu of one channel, in float where no format of the input is ``given``; then ``readers``."""
    g = Graph()
    x = g.input("x", batch, 1, 13, 10)
    x = g.mark(x, "first.input[0]", given) if given else x
    weight = g.weight(g.param("first.weight", (4, 1, 5, 5)), granularity=PerChannel(0))
    conv = g.op("Conv", x, weight, g.param("first.bias", (4,)), name="first", pads=[2] * 4)
    relu = g.op("Relu", conv, name="relu")
    relu.shape = ir.Shape((batch, 4, 13, 10))
    symmetry = "symmetric" if fmt.startswith(("int", "float")) else "asymmetric"
    g.mark(relu, "relu.output[0]", fmt, options.pop("data", (0, 9)), symmetry=symmetry, **options)
    return g.model(*readers(g, g.nodes[-1].outputs[0])), g


def written(model: ir.Model, g: Graph, target: str = "ort_cpu", **options: Any) -> QdqResult:
    return to_qdq(model, g.encodings, target=target, **options)


def written_before(model: ir.Model, g: Graph, **options: Any) -> QdqResult:
    """Without the change of order."""
    return to_qdq(model, g.encodings, target=replace(find_target("ort_cpu"), pools_floats=False), **options)


def outputs(result: QdqResult) -> dict[str, list[Array]]:
    found = {mode: list(arrays.values()) for mode, arrays in run_both(result.model, FEEDS).items()}
    return {**found, "plain": run_plain(result.model, FEEDS)}


def rounds_first(result: QdqResult) -> bool:
    """Whether the first QuantizeLinear of an activation stands in front of the first pool."""
    kinds = types(result.model)
    pool = next(kind for kind in ("MaxPool", "GlobalMaxPool") if kind in kinds)
    return kinds.index("QuantizeLinear") < kinds.index(pool)


@pytest.mark.parametrize("activation", ["unsigned", "as_is"])
@pytest.mark.parametrize("fmt", ["uint8", "int8", "uint4", "int5", "uint16", "int16"])
def test_both_orders_give_the_same_bits(fmt: str, activation: str) -> None:
    model, g = net(fmt, data=(-1, 7))
    late, early = (write(model, g, activation=activation) for write in (written, written_before))
    assert not rounds_first(late) and rounds_first(early)
    if fmt.startswith("int") and activation == "as_is":
        # whose integer kernels ask for an option of the session
        np.testing.assert_array_equal(*(run_plain(result.model, FEEDS)[0] for result in (late, early)))
        return
    for mode, arrays in outputs(late).items():
        np.testing.assert_array_equal(arrays, outputs(early)[mode], err_msg=mode)


@pytest.mark.parametrize(
    "attrs",
    [
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        {**HALVES, "ceil_mode": 1},
        {"kernel_shape": [3, 3], "dilations": [2, 2]},
        {**HALVES, "auto_pad": "SAME_UPPER"},
    ],
    ids=["padded", "ceil", "dilated", "same"],
)
@pytest.mark.parametrize("low", [-9.0, 0.0])
def test_padding_and_odd_lengths(attrs: dict[str, Any], low: float) -> None:
    """Padding is the smallest number, and wins against none of a window; here all codes may lie below zero's."""
    model, g = net(readers=lambda g, value: (head(g, pooled(g, value, **attrs)),), data=(low, 4))
    late, early = outputs(written(model, g)), outputs(written_before(model, g))
    for mode, arrays in late.items():
        np.testing.assert_array_equal(arrays, early[mode], err_msg=mode)
    np.testing.assert_array_equal(late["float"][0], simulate(model, g.encodings, FEEDS)[1]["y"])


def test_onnx_runtime_pools_floats_then() -> None:
    """It moves a QuantizeLinear back across a MaxPool where nothing stands between them."""
    model, g = net()
    late, early = (list(optimized_types(write(model, g).model).values()) for write in (written, written_before))
    assert late.index("MaxPool") < late.index("QuantizeLinear")
    assert early.index("QuantizeLinear") < early.index("MaxPool")


def test_pools_in_a_row_and_a_free_batch() -> None:
    def readers(g: Graph, value: ir.Value) -> tuple[ir.Value, ...]:
        return (head(g, g.op("MaxPool", pooled(g, value), kernel_shape=[3, 3], pads=[1] * 4)),)

    model, g = net(readers=readers, batch="batch")
    result = written(model, g)
    kinds = types(result.model)
    assert kinds[kinds.index("MaxPool") :][:4] == ["MaxPool", "MaxPool", "Concat", "QuantizeLinear"]
    for mode, arrays in outputs(result).items():
        np.testing.assert_array_equal(arrays, outputs(written_before(model, g))[mode], err_msg=mode)


def test_the_site_is_found_at_the_pool_and_a_note_says_so() -> None:
    model, g = net()
    result = written(model, g)
    (tensor,) = result.tensors["relu.output[0]"]
    assert tensor.startswith("pooled")
    (note,) = [note for note in result.notes if note.kind == "after pool"]
    assert note.site == "relu.output[0]" and "rounded after the MaxPool" in note.text
    assert "after pool" not in {note.kind for note in written_before(model, g).notes}


def several(g: Graph, value: ir.Value) -> tuple[ir.Value, ...]:
    return head(g, pooled(g, value)), g.op("Neg", value)


def with_indices(g: Graph, value: ir.Value) -> tuple[ir.Value, ...]:
    pool = g.op("MaxPool", value, name="pooled", outputs=2, **HALVES)
    indices = g.nodes[-1].outputs[1]
    indices.type = ir.TensorType(ir.DataType.INT64)
    return head(g, pool), indices


def regridded(g: Graph, value: ir.Value) -> tuple[ir.Value, ...]:
    return (head(g, g.mark(pooled(g, value), "pool.output[0]", "uint8", (0, 5))),)


LEFT: dict[str, dict[str, Any]] = {
    "several readers": {"readers": several},
    "a value that is returned": {"readers": lambda g, value: (value, head(g, pooled(g, value)))},
    "a pool that is returned": {"readers": lambda g, value: (pooled(g, value),)},
    "indices": {"readers": with_indices},
    "a grid after the pool": {"readers": regridded},
    "an integer convolution": {"given": "uint8"},
    "a float grid": {"fmt": "float8_e4m3"},
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT)
def test_what_is_left_as_it_is(case: dict[str, Any]) -> None:
    model, g = net(**case)
    result, before = written(model, g), written_before(model, g)
    assert types(result.model) == types(before.model) and result.notes == before.notes


def test_a_scale_per_channel_is_left_as_it_is() -> None:
    data = np.arange(1, 5, dtype=np.float32).reshape(1, 4, 1, 1) * np.float32([0, 1]).reshape(2, 1, 1, 1)
    model, g = net(granularity=PerChannel(1), data=data)
    assert types(written(model, g).model) == types(written_before(model, g).model)


@pytest.mark.parametrize("case", [{"given": "uint16"}, {"given": "uint8", "fmt": "uint16"}], ids=["read", "made"])
def test_wide_grids_have_no_integer_kernel(case: dict[str, Any]) -> None:
    model, g = net(**case)
    late, early = written(model, g), written_before(model, g)
    assert types(late.model).count("MaxPool") == 1 and "Concat" in types(late.model)
    for mode, arrays in outputs(late).items():
        np.testing.assert_array_equal(arrays, outputs(early)[mode], err_msg=mode)


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "ort_cpu"])
def test_other_targets_keep_the_order_of_the_simulation(target: str) -> None:
    model, g = net()
    assert rounds_first(written(model, g, target))


def test_a_pool_of_whole_pictures() -> None:
    def readers(g: Graph, value: ir.Value) -> tuple[ir.Value, ...]:
        flat = g.op("Flatten", g.op("GlobalMaxPool", value))
        return (g.op("Gemm", flat, g.weight(g.param("fc.weight", (3, 4))), transB=1, name="y"),)

    model, g = net(readers=readers)
    late, early = written(model, g), written_before(model, g)
    assert not rounds_first(late) and rounds_first(early)
    for mode, arrays in outputs(late).items():
        np.testing.assert_array_equal(arrays, outputs(early)[mode], err_msg=mode)


def test_it_is_read_back_as_an_encoding(tmp_path: Path) -> None:
    from bitwright.onnx import QuantizationSimModel

    model, g = net()
    result = written(model, g)
    ir.save(result.model, tmp_path / "net.onnx")
    again = QuantizationSimModel(tmp_path / "net.onnx", FEEDS)
    ops = {node.op_type for node in again.marked.graph}
    assert not ops & {"Concat", "QuantizeLinear"}, ops
    np.testing.assert_array_equal(again.run(FEEDS)[0], outputs(result)["float"][0])


def _silu(g: Graph, x: ir.Value) -> ir.Value:
    return g.op("Mul", g.op("Sigmoid", x), x)


def _gelu(spelling: str) -> Callable[[Graph, ir.Value], ir.Value]:
    """``x / 2 * (1 + erf(x / sqrt(2)))``, multiplied in the order that the word says."""

    def build(g: Graph, x: ir.Value) -> ir.Value:
        def number(value: float) -> ir.Value:
            return g.param(f"number_{value:.3f}_{len(g.nodes)}", np.array(value, np.float32))

        by_product = spelling == "half first"
        scaled = g.op("Mul", x, number(0.5**0.5)) if by_product else g.op("Div", x, number(2**0.5))
        plus = g.op("Add", g.op("Erf", scaled), number(1.0))
        if spelling == "x first":
            return g.op("Mul", g.op("Mul", x, plus), number(0.5))
        if spelling == "half of x":
            return g.op("Mul", g.op("Div", x, number(2.0)), plus)
        return g.op("Mul", x, g.op("Mul", number(0.5), plus))

    return build


_SPELLINGS = {"silu": _silu, **{word: _gelu(word) for word in ("x first", "half first", "half of x")}}


@pytest.mark.parametrize("word", _SPELLINGS)
def test_an_activation_between_grids_is_one_operator(word: str) -> None:
    g = Graph()
    x = g.mark(g.input("x", *X.shape), "x", "uint8", X)
    model = g.model(g.mark(_SPELLINGS[word](g, x), "y", "uint8", (-0.5, 3.0), name="out"))
    result = to_qdq(model, g.encodings, target="ort_cpu").model
    kind = "QuickGelu" if word == "silu" else "Gelu"
    assert types(result).count(kind) == 1 and not {"Sigmoid", "Erf", "Mul", "Add", "Div"} & set(types(result))
    assert not any(name.startswith("number") for name in result.graph.initializers)
    wanted = simulate(model, g.encodings, {"x": X})[1]["out"]
    off = np.abs(run_plain(result, {"x": X})[0] - wanted) / g.encodings["y"].scale
    assert off.max() < 1.01 and (off > 0.5).mean() < 0.01  # a tie of float32 may fall to the other side


def test_activations_of_which_a_part_is_read_stay_as_they_are() -> None:
    for read in ("gate", "grid", "other", "target"):
        g = Graph()
        x = g.mark(g.input("x", *X.shape), "x", "uint8", X)
        gate = g.op("Sigmoid", x)
        if read == "grid":
            gate = g.mark(gate, "gate", "uint8", (0.0, 1.0))
        y = g.op("Mul", gate, g.op("Relu", x) if read == "other" else x)
        if read == "gate":
            y = g.op("Add", y, gate)
        model = g.model(g.mark(y, "y", "uint8", (-0.5, 3.0), name="out"))
        target = "openvino_cpu" if read == "target" else "ort_cpu"
        assert "QuickGelu" not in types(to_qdq(model, g.encodings, target=target).model), read


@pytest.mark.parametrize(
    "axes, keepdims, pooled", [((2, 3), 1, True), ((-1, -2), 1, True), ((2, 3), 0, False), ((3,), 1, False)]
)
def test_the_mean_of_an_image_runs_on_codes(axes: tuple[int, ...], keepdims: int, pooled: bool) -> None:
    g = Graph()
    x = g.mark(g.input("x", *X.shape), "x", "uint8", X)
    x.shape = ir.Shape(X.shape)
    y = g.op("ReduceMean", x, g.param("axes", np.array(axes)), keepdims=keepdims)
    model = g.model(g.mark(y, "y", "uint8", (-0.5, 0.5), name="out"))
    result = to_qdq(model, g.encodings, target="ort_cpu").model
    assert ("GlobalAveragePool" in types(result)) is pooled
    assert ("QLinearGlobalAveragePool" in optimized_types(result).values()) is pooled
    wanted = simulate(model, g.encodings, {"x": X})[1]["out"]
    for outputs in run_both(result, {"x": X}).values():
        assert np.abs(outputs["out"] - wanted).max() <= 1.01 * g.encodings["y"].scale
    assert "GlobalAveragePool" not in types(to_qdq(model, g.encodings).model)
