"""Placement: every float value is quantized, shared, or in float for a reason a person understands."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bitwright.core.graph.graph import Graph, Value
from bitwright.core.graph.operators import OPS
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import PRESETS, activation_spec, weight_spec
from bitwright.core.placement.config import load_config
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Plan
from bitwright.core.placement.rules import Rule, Rules, default_rules
from bitwright.errors import ConfigError, GranularityError
from tests.core.graphs import Build, conv_chain, worked_example
from tests.support.cost import steps

#: what follows the last layer as what is before it
ALIKE = replace(default_rules(), float_tail=False, split_joins=False)


def plan(graph: Graph, *rules: Rule, base: Rules | None = None) -> Plan:
    made = place(graph, (base or default_rules()).extended(rules))
    check(graph, made)
    return made


def check(graph: Graph, made: Plan) -> None:
    """What is true of every plan."""
    at = {site.value for site in made.sites.values()}
    for value in graph.values.values():
        homes = (value.name in at) + (value.name in made.shared and value.name not in at) + (value.name in made.floats)
        assert homes == (1 if value.is_float else 0), value
    for name, site in made.sites.items():
        assert site.name == name
        assert made.sites[site.group].spec == site.spec
        assert all(followed in made.sites for followed in site.follows or ())
        if isinstance(site.spec.granularity, (PerChannel, PerBlock)):
            assert site.spec.granularity.axis is not None
    assert all(group in made.sites for group in made.shared.values())
    assert all(made.floats.values()), "a reason is missing"
    places = [(s.op, s.port, s.role == "output") for s in made.sites.values()]
    assert len(set(places)) == len(places), "two quantizers at one place"
    assert [r.name for r in made.coverage(graph)] == list(graph.values)


# ---- the usual case


def test_a_convolution_with_batch_norm_and_relu_has_three_quantizers_and_a_derived_bias():
    b = Build()
    graph = b.graph(b.op("Relu", b.bn(b.conv(b.input(), "conv", inputs=3), "bn"), name="relu"))
    made = plan(graph)
    assert list(made.sites) == ["conv.input[0]", "conv.weight", "conv.bias", "relu.output[0]"]
    assert made.sites["conv.input[0]"].spec == activation_spec("uint8")
    assert made.sites["conv.weight"].spec == weight_spec("int8", PerChannel(0))
    bias = made.sites["conv.bias"]
    assert bias.role == "bias"
    assert bias.follows == ("conv.input[0]", "conv.weight")
    assert bias.spec.format == IntFormat(32)
    assert bias.spec.granularity == PerChannel(0)
    chain = "inside the supergroup Conv>BatchNormalization>Relu, quantized at relu.output[0]"
    assert made.floats["conv.output[0]"] == made.floats["bn.output[0]"] == chain
    assert made.floats["bn.weight"] == "normalisation parameters stay in float"


def test_the_worked_example_under_the_default_rules():
    made = plan(worked_example())
    assert [name for name, site in made.sites.items() if site.role in ("input", "output")] == [
        "c1.input[0]",
        "r1.output[0]",
        "c2.output[0]",
        "r2.output[0]",
        "dw.output[0]",
        "silu.output[0]",
        "cat.output[0]",
        "avgpool.output[0]",
        "fc.input[0]",
        "fc.output[0]",
    ]
    assert made.shared == {"maxpool.output[0]": "cat.output[0]", "flatten.output[0]": "avgpool.output[0]"}
    assert made.sites["fc.input[0]"].value == "norm.output[0]"
    assert made.floats["softmax.output[0]"] == "Softmax follows the last layer, where float is as fast and more exact"


# Rows and columns as measured with AIMET 2.42 (torch), batch norm not folded. "a": asymmetric, "s":
# symmetric, "c": per channel, "-": no quantizer. Where we differ by design the text beside the table says so.
AIMET = {
    #                    default  v73   v68   enpu_v6
    "x": "               a a a s",
    "c1.weight": "       sc sc sc s",
    "c2.weight": "       sc sc sc s",
    "dw.weight": "       sc sc sc s",
    "b1.weight": "       - - - -",
    "b1.running_var": "  - - - -",
    "c1.output[0]": "    - - - -",
    "b1.output[0]": "    - - a -",
    "r1.output[0]": "    a a a s",
    "c2.output[0]": "    a a a s",
    "add.output[0]": "   - - - -",
    "r2.output[0]": "    a a a s",
    "dw.output[0]": "    a a a s",
    "silu.output[0]": "  a a a s",
    "cat.output[0]": "   a a a s",
    "maxpool.output[0]": "- - - -",
    "flatten.output[0]": "- - - -",
    "avgpool.output[0]": "a a a s",
    "norm.weight": "     a a a a",
    "norm.bias": "       - - - -",
    "norm.output[0]": "  a a a s",
    "fc.weight": "       sc sc s s",
    "fc.output[0]": "    a a a s",
    "softmax.output[0]": "a a a s",
}


@pytest.mark.parametrize("column, name", list(enumerate(["default", "htp_v73", "htp_v68", "enpu_v6"])))
def test_the_worked_example_under_the_shipped_targets(column, name):
    """Equal to AIMET's placement but for biases: it leaves them in float, we simulate the target's int32."""
    graph = worked_example()
    made = plan(graph, base=load_config(name))
    by_value = {site.value: site for site in made.sites.values()}
    found = {}
    for value in AIMET:
        site = by_value.get(value)
        symmetry = "-" if site is None else "a" if site.spec.symmetry == "asymmetric" else "s"
        found[value] = symmetry + ("c" if site and isinstance(site.spec.granularity, PerChannel) else "")
    assert found == {value: row.split()[column] for value, row in AIMET.items()}
    pinned = made.sites["softmax.output[0]"].spec.fixed_range
    assert pinned == (None if name in ("default", "htp_v68") else (0.0, 1.0))
    assert [s.name for s in made.sites.values() if s.role == "bias"] == ["c1.bias", "c2.bias", "dw.bias", "fc.bias"]
    assert made.unused == ()


# ---- inputs and what carries them


def test_all_readers_of_a_model_input_share_one_quantizer():
    b = Build()
    x = b.input()
    one, two = b.conv(x, "one", inputs=3), b.conv(x, "two", inputs=3)
    made = plan(b.graph(one, two))
    assert made.sites["two.input[0]"].group == "one.input[0]"
    assert made.groups["one.input[0]"] == ("one.input[0]", "two.input[0]")


def test_a_model_input_that_is_moved_first_is_quantized_behind_the_move():
    b = Build()
    flat = b.op("Transpose", b.op("Flatten", b.input(), name="flatten"), name="t", shape=(1, 8))
    made = plan(b.graph(b.linear(flat, "fc")))
    assert made.sites["fc.input[0]"].value == "t.output[0]"
    assert made.shared == {"x": "fc.input[0]", "flatten.output[0]": "fc.input[0]"}


def test_movement_shares_the_group_of_its_input_however_long_the_way():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    for op_type in ("MaxPool", "Transpose", "Reshape", "Dropout", "Slice"):
        y = b.op(op_type, y, name=op_type.lower())
    b.op("Split", y, name="split", outputs=2)
    made = plan(b.graph("split.output[0]", "split.output[1]"))
    assert set(made.shared.values()) == {"conv.output[0]"}
    assert len(made.shared) == 7


def test_integer_and_boolean_tensors_are_left_alone():
    b = Build()
    ids, table = b.input("ids", (1, 4), "int64"), b.param("embed.weight", (10, 8))
    graph = b.graph(b.op("Embedding", table, ids, name="embed", shape=(1, 4, 8)))
    made = plan(graph)
    assert list(made.sites) == ["embed.weight", "embed.output[0]"]
    assert str(made.coverage(graph)[0]) == "ids (Embedding, 1x4): integer, int64 is not a floating-point type"


def test_an_operator_that_reads_only_the_shape_gets_no_quantizer():
    b = Build()
    x = b.input()
    b.op("Shape", x, name="shape", shape=(4,), dtype="int64")
    b.op("zeros_like", x, name="zeros")
    made = plan(b.graph("shape.output[0]", "zeros.output[0]"))
    assert made.sites == {}
    assert made.floats["x"] == "shape reads only its shape"


# ---- what stays in float


def test_normalisations_stay_in_float_between_grids():
    b = Build()
    y = b.linear(b.input(shape=(1, 8)), "fc1", 8)
    normed = b.op("LayerNormalization", y, b.param("n.weight", (8,)), None, name="n", shape=(1, 8))
    made = plan(b.graph(b.linear(normed, "fc2")))
    assert made.sites["fc2.input[0]"].value == "n.output[0]"
    assert made.sites["fc2.bias"].follows == ("fc2.input[0]", "fc2.weight")


def test_a_written_out_rms_norm_stays_in_float():
    b = Build()
    y = b.linear(b.input(shape=(1, 8)), "fc", 8)
    squared = b.op("Pow", y, None, name="pow", exponent=2.0)
    mean = b.op("ReduceMean", squared, name="mean")
    shifted = b.op("Add", mean, None, name="add")
    root = b.op("Rsqrt", shifted, name="rsqrt")
    made = plan(b.graph(b.op("Mul", y, root, name="mul")))
    for value in ("pow.output[0]", "mean.output[0]", "add.output[0]", "rsqrt.output[0]"):
        assert made.floats[value] == "float: inside the normalisation that mul completes"
    assert made.floats["mul.output[0]"] == "Mul completes a normalisation, which runs in float on integer runtimes"


def test_readers_of_one_float_value_share_one_quantizer():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    z = b.op("Exp", y, name="exp")
    moved = b.op("Reshape", z, name="reshape")
    made = plan(b.graph(b.op("Mul", y, z, name="mul"), b.op("Add", y, moved, name="add")), base=ALIKE)
    assert made.sites["add.input[1]"].group == "mul.input[1]"
    assert made.sites["mul.input[1]"].value == "exp.output[0]"
    assert made.sites["add.input[1]"].value == "reshape.output[0]"


def test_a_float_value_that_is_moved_tells_where_it_is_quantized():
    b = Build()
    z = b.op("Exp", b.conv(b.input(), "conv", inputs=3), name="exp")
    made = plan(b.graph(b.conv(b.op("Reshape", z, name="r"), "conv2")))
    assert made.floats["exp.output[0]"] == "Exp runs in float on integer runtimes; quantized at conv2.input[0]"


def test_unknown_operators_run_in_float():
    b = Build()
    y = b.op("Frobnicate", b.input(), b.param("f.theta", (3,)), name="f")
    made = plan(b.graph(y))
    assert list(made.sites) == ["f.input[0]"]
    assert made.floats["f.output[0]"] == "Frobnicate runs in float on integer runtimes"
    assert made.floats["f.theta"] == "Frobnicate runs in float on integer runtimes"


def test_a_preset_without_activations_quantizes_weights_alone():
    made = plan(conv_chain(2), base=default_rules(PRESETS["w4"].weight, None))
    assert list(made.sites) == ["0.conv.weight", "1.conv.weight"]
    assert made.floats["0.conv.bias"] == "float: its input or weight is not quantized"
    assert made.floats["1.relu.output[0]"] == "activations stay in float under default rules"
    assert made.floats["x"] == "activations stay in float under default rules"


def test_a_preset_without_weights_says_so():
    made = plan(conv_chain(1), base=default_rules(None, PRESETS["w8a8"].activation))
    assert made.floats["0.conv.weight"] == "weights stay in float under default rules"


def test_values_nobody_reads():
    b = Build()
    b.param("spare", (3,))
    b.const("unused", (3,))
    made = plan(b.graph(b.conv(b.input(), "conv", inputs=3), b.input("y")))
    assert made.floats == {
        "spare": "no operator of the recorded run reads it",
        "unused": "no operator of the recorded run reads it",
        "y": "no operator of the recorded run reads it",
    }


# ---- weights and constants


@pytest.mark.parametrize(
    "op_type, shape, attrs, expected",
    [
        pytest.param("Conv", (8, 4, 3, 3), {"group": 2}, PerChannel(0), id="grouped-conv"),
        pytest.param("ConvTranspose", (8, 4, 3, 3), {}, PerChannel(1), id="conv-transpose"),
        pytest.param("ConvTranspose", (8, 4, 3, 3), {"group": 2}, PerBlock(4, 0, 1), id="grouped-conv-transpose"),
        pytest.param("ConvTranspose", (8, 1, 3, 3), {"group": 8}, PerChannel(0), id="depthwise-conv-transpose"),
        pytest.param("ConvTranspose", (4, 1, 3, 3), {"group": 2}, PerBlock(2, 0, 1), id="summed-conv-transpose"),
        pytest.param("Gemm", (4, 8), {"transB": 1}, PerChannel(0), id="linear"),
        pytest.param("Gemm", (8, 4), {}, PerChannel(1), id="gemm"),
        pytest.param("MatMul", (8, 4), {}, PerChannel(1), id="matmul"),
        pytest.param("MatMul", (8,), {}, PerTensor(), id="matmul-vector"),
        pytest.param("Einsum", (8, 4), {}, PerTensor(), id="einsum"),
    ],
)
def test_per_channel_means_the_output_channels_of_the_consumer(op_type, shape, attrs, expected):
    b = Build()
    graph = b.graph(b.op(op_type, b.input(), b.param("w", shape), name="op", **attrs))
    site = plan(graph).sites["w"]
    assert (site.role, site.port, site.spec.granularity) == ("weight", 1, expected)


@pytest.mark.parametrize(
    "op_type, shape, attrs",
    [
        pytest.param("ConvTranspose", (3, 8, 3, 3), {}, id="conv-transpose"),
        pytest.param("ConvTranspose", (8, 4, 3, 3), {"group": 2}, id="grouped-conv-transpose"),
        pytest.param("ConvTranspose", (8, 1, 3, 3), {"group": 8}, id="depthwise-conv-transpose"),
        pytest.param("ConvTranspose", (16, 1, 3, 3), {"group": 8}, id="summed-conv-transpose"),
        pytest.param("Gemm", (4, 8), {}, id="gemm"),
    ],
)
def test_one_scale_per_output_channel_derives_a_bias(op_type, shape, attrs):
    b = Build()
    graph = b.graph(b.op(op_type, b.input(), b.param("w", shape), b.param("b", (8,)), name="op", **attrs))
    assert plan(graph).sites["b"].follows == ("op.input[0]", "w")


def test_a_constant_on_the_left_of_a_product_has_its_channels_along_its_rows():
    b = Build()
    graph = b.graph(b.op("MatMul", b.param("w", (4, 8)), b.input(shape=(8, 2)), name="matmul"))
    made = plan(graph)
    assert (made.sites["w"].port, made.sites["w"].spec.granularity) == (0, PerChannel(0))
    assert made.sites["matmul.input[1]"].port == 1


def test_a_weight_with_two_consumers_has_a_site_at_each():
    b = Build()
    w = b.param("tied.weight", (8, 8))
    x = b.input(shape=(1, 8))
    y = b.op("Gemm", x, w, name="encode", transB=1)
    z = b.op("Gemm", y, w, name="again", transB=1)
    made = plan(b.graph(b.op("Gemm", z, w, name="decode")))
    assert made.sites["tied.weight@again"].group == "tied.weight"
    assert made.sites["tied.weight@again"].op == "again"
    assert made.sites["tied.weight"].spec.granularity == PerChannel(0)
    assert made.sites["tied.weight@decode"].group == "tied.weight@decode"
    assert made.sites["tied.weight@decode"].spec.granularity == PerChannel(1)


def test_a_weight_that_is_moved_first_is_named_after_its_operator():
    b = Build()
    turned = b.op("Transpose", b.param("w", (4, 8)), name="t", shape=(8, 4))
    made = plan(b.graph(b.op("MatMul", b.input(shape=(1, 8)), turned, name="matmul", shape=(1, 4))))
    site = made.sites["matmul.weight"]
    assert (site.role, site.value, site.spec.granularity) == ("weight", "t.output[0]", PerChannel(1))
    assert made.floats == {"w": "only moved where it is read; quantized at matmul.weight"}


def test_a_weight_computed_from_parameters_is_named_after_its_operator():
    b = Build()
    w, shift = b.const("mul#3", (8, 3, 3, 3)), b.const("sub#4", (8,))
    made = plan(b.graph(b.op("Conv", b.input(), w, shift, name="conv")))
    assert list(made.sites) == ["conv.input[0]", "conv.weight", "conv.bias", "conv.output[0]"]


def test_a_table_looked_up_by_index_is_a_weight():
    b = Build()
    table, ids = b.param("table", (10, 8)), b.input("ids", (4,), "int64")
    made = plan(b.graph(b.op("Gather", table, ids, name="gather", shape=(4, 8))))
    assert made.sites["table"].spec.granularity == PerChannel(0)
    assert "gather.output[0]" in made.sites


def test_a_positional_embedding_is_a_constant_and_a_scalar_stays_in_float():
    b = Build()
    y = b.linear(b.input(shape=(1, 8)), "fc", 8)
    placed = b.op("Add", y, b.param("position", (5, 8)), name="add")
    made = plan(b.graph(b.op("Mul", placed, b.param("gain", (1,)), name="mul")), base=ALIKE)
    assert made.sites["position"].role == "constant"
    assert made.sites["position"].spec == activation_spec("uint8")
    assert made.floats["gain"] == "scalar"


def test_settings_are_not_data():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    z = b.op("Clip", y, b.const("lo"), b.const("hi"), name="clip")
    made = plan(b.graph(b.op("Resize", z, b.const("roi", (8,)), b.const("scales", (4,)), name="resize")))
    assert made.floats["lo"] == "a setting of clip, not data"
    assert made.floats["scales"] == "a setting of resize, not data"


def test_a_place_whose_runs_read_different_weights_watches_them_all():
    b = Build()
    first, second = b.param("a", (4, 8)), b.param("b", (4, 8))
    x = b.input(shape=(1, 8))
    graph = b.graph(b.op("Gemm", x, first, None, name="fc", also=((1, second),), transB=1))
    made = plan(graph)
    assert made.sites["fc.weight"].role == "input"
    assert made.shared == {"b": "fc.weight"}


def test_a_weight_made_from_activations_is_quantized_where_it_is_made():
    b = Build()
    x, shift = b.input(shape=(1, 8)), b.param("shift", (4,))
    w = b.op("Reshape", b.linear(x, "hyper", 32), name="w", shape=(4, 8))
    made = plan(b.graph(b.op("Gemm", x, w, shift, name="fc", transB=1)))
    assert made.shared["w.output[0]"] == "hyper.output[0]"
    assert made.floats["shift"] == "float: its weight is not the same in every run"


@pytest.mark.parametrize(
    "rules, reason",
    [
        ([Rule(port="weight", quantized=False)], "float: its input or weight is not quantized"),
        ([Rule(port="weight", format="int16")], "float: its input has more than 16 bits or its weight more than 8"),
        ([Rule(port="weight", format="fp8")], "float: its input or weight is not on an integer grid"),
        ([Rule(port="input", granularity=PerChannel())], "float: its input has several scales"),
        (
            [Rule(port="weight", granularity=PerChannel(1))],
            "float: its weight has scales that do not belong to one output channel each",
        ),
        (
            [Rule(port="weight", granularity=PerBlock(4))],
            "float: its weight has scales that do not belong to one output channel each",
        ),
        ([Rule(port="bias", quantized=False)], "float by rule Rule('*', port='bias', quantized=False)"),
    ],
)
def test_a_bias_that_cannot_be_int32_says_why(rules, reason):
    b = Build()
    made = plan(b.graph(b.linear(b.input(shape=(1, 8)), "fc")), *rules)
    assert made.floats["fc.bias"] == reason


def test_a_bias_of_another_shape_stays_in_float():
    b = Build()
    w, matrix = b.param("w", (8, 4)), b.param("m", (2, 4))
    made = plan(b.graph(b.op("Gemm", b.input(shape=(2, 8)), w, matrix, name="fc")))
    assert made.floats["m"] == "float: integer kernels add one number per output channel, and it has shape (2, 4)"


def test_different_biases_in_different_runs_stay_in_float():
    b = Build()
    w, one, two = b.param("w", (4, 8)), b.param("one", (4,)), b.param("two", (4,))
    x = b.input(shape=(1, 8))
    made = plan(b.graph(b.op("Gemm", x, w, one, name="fc", also=((2, two),), transB=1)))
    assert made.floats["one"] == made.floats["two"] == "float: runs of fc read different biases"


def test_a_bias_may_be_quantized_like_any_parameter():
    made = plan(conv_chain(1), Rule(port="bias", quantized=True, symmetry="asymmetric"))
    bias = made.sites["0.conv.bias"]
    assert bias.follows is None
    assert bias.spec == weight_spec("int8", PerTensor(), symmetry="asymmetric")


# ---- joins, masks, fixed ranges


def test_a_concat_of_one_grid_is_movement_and_of_several_has_its_own():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    b.op("Split", y, name="split", outputs=2)
    same = b.op("Concat", "split.output[1]", "split.output[0]", name="same")
    made = plan(b.graph(b.op("Concat", same, b.conv("x", "conv2", inputs=3), name="other")), base=ALIKE)
    assert made.shared["same.output[0]"] == "conv.output[0]"
    assert "other.output[0]" in made.sites


def test_a_float_operand_of_a_concat_is_quantized_there():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    made = plan(b.graph(b.op("Concat", y, b.op("Exp", y, name="exp"), name="cat")), base=ALIKE)
    assert made.sites["cat.input[1]"].value == "exp.output[0]"


def test_a_comparison_does_not_quantize_its_operands():
    b = Build()
    b.op("Greater", b.input(), None, name="greater", dtype="bool")
    made = plan(b.graph("greater.output[0]"))
    assert made.floats == {"x": "greater makes no floating-point result of it"}


def test_where_is_movement_on_one_grid_and_float_on_two():
    b = Build()
    condition = b.input("condition", dtype="bool")
    y = b.conv(b.input(), "conv", inputs=3)
    flipped = b.op("Flip", y, name="flip")
    same = b.op("Where", condition, y, flipped, name="same")
    z = b.conv("x", "conv2", inputs=3)
    made = plan(b.graph(same, b.op("Where", condition, y, z, name="mixed"), b.op("MaskedFill", y, condition, name="f")))
    assert made.shared["same.output[0]"] == "conv.output[0]"
    assert made.floats["mixed.output[0]"] == (
        "Where joins values of different grids and it runs in float on integer runtimes"
    )
    assert "f.output[0]" in made.floats


def attention(*, mask: str) -> Graph:
    b = Build()
    q, k = (b.linear(b.input("q", (1, 4, 8)), "fq", 8, rank=3), b.linear(b.input("k", (1, 8, 4)), "fk", 8, rank=3))
    scores = b.op("Div", b.op("MatMul", q, k, name="scores"), None, name="div")
    if mask == "input":
        masked = b.op("Add", scores, b.input("mask", (4, 4)), name="masked")
    elif mask == "constant":
        masked = b.op("Add", scores, b.const("mask", (4, 4)), name="masked")
    elif mask == "computed":
        inverse = b.op("Sub", None, b.input("mask", (4, 4)), name="inverse")
        masked = b.op("Add", scores, b.op("Mul", inverse, None, name="large"), name="masked")
    else:
        masked = b.op("MaskedFill", scores, b.input("mask", (4, 4), "bool"), name="masked")
    return b.graph(b.op("MatMul", b.op("Softmax", masked, name="softmax"), "fk.output[0]", name="context"))


@pytest.mark.parametrize("mask", ["input", "constant", "computed", "boolean"])
def test_masks_stay_in_float(mask):
    made = plan(attention(mask=mask))
    assert "scores.output[0]" in made.sites, "the product before the mask has a quantizer of its own"
    assert made.sites["softmax.output[0]"].spec.fixed_range == (0.0, 1.0)
    assert "inside the supergroup" in made.floats["div.output[0]"]
    assert not [name for name in made.sites if name.startswith(("masked", "inverse", "large", "mask"))]
    if mask in ("input", "computed"):
        assert made.floats["mask"] == "mask of the softmax softmax"
    if mask == "computed":
        assert made.floats["large.output[0]"] == made.floats["inverse.output[0]"] == "mask of the softmax softmax"
    if mask == "constant":
        assert made.floats["mask"] == "inside the supergroup Div>Add>Softmax, as its mask or factor"


def test_scores_that_are_given_stay_in_float_with_what_is_computed_of_them():
    b = Build()
    scaled = b.op("Div", b.input("scores", (1, 4, 4)), None, name="div")
    masked = b.op("Add", scaled, b.input("mask", (4, 4)), name="masked")
    made = plan(b.graph(b.op("Softmax", masked, name="softmax")))
    assert list(made.sites) == ["softmax.output[0]"]
    assert made.floats["scores"] == "inside the supergroup Div>Add>Softmax"


def test_a_sum_of_two_products_before_a_softmax_has_no_mask():
    b = Build()
    x = b.input(shape=(1, 8))
    y = b.op("Add", b.linear(x, "one"), b.linear(x, "two"), name="add")
    made = plan(b.graph(b.op("Softmax", y, name="softmax")), base=ALIKE)
    assert {"one.output[0]", "two.output[0]", "softmax.output[0]"} <= made.sites.keys()


@pytest.mark.parametrize("op_type, expected", [("Sigmoid", (0.0, 1.0)), ("Softmax", (0.0, 1.0)), ("Tanh", (-1.0, 1.0))])
def test_known_ranges_are_pinned(op_type, expected):
    b = Build()
    graph = b.graph(b.op("Reshape", b.op(op_type, b.conv(b.input(), "conv", inputs=3), name="f"), name="r"))
    made = plan(graph, base=ALIKE)
    assert made.sites["f.output[0]"].spec.fixed_range == expected
    assert made.shared["r.output[0]"] == "f.output[0]"
    calibrated = plan(graph, Rule(op=op_type, port="output", fixed_range=(None, None)))
    assert calibrated.sites["f.output[0]"].spec.fixed_range is None


def test_a_symmetric_grid_is_pinned_only_by_a_symmetric_range():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    graph = b.graph(b.op("Tanh", y, name="tanh"), b.op("Sigmoid", y, name="sigmoid"))
    made = plan(graph, Rule(port="output", symmetry="symmetric"), base=ALIKE)
    assert made.sites["tanh.output[0]"].spec.fixed_range == (-1.0, 1.0)
    assert made.sites["sigmoid.output[0]"].spec.fixed_range is None


# ---- supergroups and their surroundings


def test_a_convolution_that_is_returned_and_read_by_a_relu_keeps_its_quantizer():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    made = plan(b.graph(y, b.op("Relu", y, name="relu")))
    assert {"conv.output[0]", "relu.output[0]"} <= made.sites.keys()
    assert made.notes == ("conv: not fused as Conv>Relu, because conv.output[0] is also an output of the model",)


def test_a_convolution_with_two_readers_keeps_its_quantizer():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    made = plan(b.graph(b.op("Relu", y, name="relu"), b.op("Tanh", y, name="tanh")))
    assert "conv.output[0]" in made.sites
    assert "is read 2 times, by relu, tanh" in made.notes[0]


def test_where_an_operator_stands_does_not_matter():
    """The same convolution, alone, behind a branch, or with a returned output, has the same weight spec."""
    specs = set()
    for outputs in (["c.output[0]"], ["r.output[0]"], ["c.output[0]", "r.output[0]", "a.output[0]"]):
        b = Build()
        a = b.conv(b.input(), "a", inputs=3)
        b.op("Relu", b.conv(a, "c"), name="r")
        specs.add(plan(b.graph(*outputs)).sites["c.weight"].spec)
    assert len(specs) == 1


def test_look_alike_names_do_not_meet():
    b = Build()
    x = b.input()
    y = b.conv(x, "hidden_output", inputs=3)
    z = b.conv(x, "hidden_output_1", inputs=3)
    made = plan(b.graph(y, z), Rule("hidden_output", port="weight", format="int4"))
    assert made.sites["hidden_output.weight"].spec.format == IntFormat(4)
    assert made.sites["hidden_output_1.weight"].spec.format == IntFormat(8)


def test_the_bias_of_a_matrix_product_is_added_in_the_accumulator():
    b = Build()
    y = b.op("MatMul", b.input(shape=(1, 8)), b.param("w", (8, 4)), name="matmul", shape=(1, 4))
    made = plan(b.graph(b.op("Add", y, b.param("b", (4,)), name="add", shape=(1, 4))))
    assert made.floats == {"matmul.output[0]": "inside the supergroup MatMul>Add, quantized at add.output[0]"}
    bias = made.sites["b"]
    assert (bias.role, bias.op, bias.port, bias.follows) == ("bias", "add", 1, ("matmul.input[0]", "w"))
    assert bias.spec == replace(bias.spec, format=IntFormat(32), granularity=PerChannel(0))


@pytest.mark.parametrize(
    "weight, bias, reason",
    [
        pytest.param((8,), (1,), "its weight has no output channels", id="vector"),
        pytest.param((8, 4), (1,), "integer kernels add one number per output channel", id="one-number"),
        pytest.param(None, (4,), "its weight is not the same in every run", id="no-weight"),
    ],
)
def test_what_is_added_to_a_matrix_product_without_a_grid_that_follows_stays_in_float(weight, bias, reason):
    b = Build()
    other = b.input("other", (8, 4)) if weight is None else b.param("w", weight)
    shape = (1, 4) if weight != (8,) else (1,)
    y = b.op("MatMul", b.input(shape=(1, 8)), other, name="matmul", shape=shape)
    made = plan(b.graph(b.op("Add", y, b.param("b", bias), name="add", shape=shape)))
    assert reason in made.floats["b"] and "b" not in made.sites


# ---- loops


@pytest.mark.parametrize(
    "activation, given, shares",
    [
        pytest.param("Relu", False, True, id="relu-constant"),
        pytest.param("Relu", True, True, id="relu-input"),
        pytest.param("Tanh", False, True, id="tanh-constant"),
        pytest.param("Tanh", True, False, id="tanh-input"),
    ],
)
def test_a_recurrence_returns_to_its_sites(activation, given, shares):
    """The first state has the grid of the later ones, unless that is pinned and the state is given."""
    b = Build()
    x = b.input(shape=(1, 8))
    start = b.input("h0", (1, 8)) if given else b.const("h0", (1, 8))
    here, weight = b.linear(x, "ih", 8), b.param("hh.weight", (8, 8))
    there = b.op("Gemm", start, weight, None, name="hh", transB=1, also=((0, "f.output[0]"),))
    made = plan(b.graph(b.op(activation, b.op("Add", here, there, name="add"), name="f")))
    site = made.sites["hh.input[0]"]
    assert (site.value, site.group) == ("h0", "f.output[0]" if shares else "hh.input[0]")


def test_a_state_that_is_moved_between_steps_has_a_grid_of_its_own():
    b = Build()
    start = b.input("h0", (1, 8))
    moved = b.op("Reshape", start, name="reshape", also=((0, "tanh.output[0]"),))
    made = plan(b.graph(b.op("Tanh", b.linear(moved, "hh", 8), name="tanh")))
    assert made.sites["reshape.output[0]"].group == "reshape.output[0]"
    assert made.sites["hh.bias"].follows == ("reshape.output[0]", "hh.weight")


def test_a_moved_value_that_only_a_later_run_makes_has_a_grid_of_its_own():
    b = Build()
    moved = b.op("Reshape", None, name="reshape", also=((0, "tanh.output[0]"),))
    made = plan(b.graph(b.op("Tanh", b.linear(moved, "fc", 8), name="tanh")))
    assert made.sites["reshape.output[0]"].group == "reshape.output[0]"


# ---- anything at all


def any_graph(seed: int) -> Graph:
    """Operators of every type, wired at random, with loops, empty ports and parameters in odd places."""
    rng, b = random.Random(seed), Build()
    values = [b.input(), b.input("mask", (8, 8)), b.input("ids", (4,), "int64")]
    static = [b.param("w", (8, 8, 3, 3)), b.param("v", (8, 8)), b.const("k", (8, 8))]
    count = rng.randint(1, 14)
    for i in range(count):
        ports = [rng.choice([*values, *values, *static, None]) for _ in range(rng.randint(1, 5))]
        later = (rng.randrange(len(ports)), f"op{rng.randrange(count)}.output[0]")
        made = b.op(
            rng.choice([*OPS, *COMMON]),
            *ports,
            name=f"op{i}",
            outputs=rng.choice([1, 1, 2]),
            also=(later,) if rng.random() < 0.25 else (),
            dtype=rng.choice(["float32"] * 9 + ["bool"]),
            group=rng.choice([1, 8]),
        )
        values.append(made)
    return b.graph(*rng.sample(values, 2))


COMMON = ("Mystery", "Conv", "Add", "Relu", "MatMul", "Softmax", "Concat", "Reshape", "BatchNormalization")


@pytest.mark.parametrize("name", [None, "htp_v73", "enpu_v6"])
def test_every_graph_has_a_complete_plan(name):
    rules = load_config(name)
    for seed in range(300):
        graph = any_graph(seed)
        check(graph, place(graph, rules))


# ---- rules


def test_float_by_rule_names_the_rule():
    rule = Rule("0.conv", port="weight", quantized=False)
    made = plan(conv_chain(1), rule)
    assert made.floats["0.conv.weight"] == "float by rule Rule('0.conv', port='weight', quantized=False)"


def test_the_reader_of_an_output_in_float_quantizes_it_for_itself():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    graph = b.graph(b.conv(y, "conv2"))
    made = plan(graph, Rule("conv", quantized=False))
    assert [s for s in made.sites if s.startswith("conv.")] == []
    assert made.sites["conv2.input[0]"].value == "conv.output[0]"
    assert "conv.output[0]" not in plan(graph, Rule("conv", quantized=False), Rule(port="input", quantized=False)).sites


def test_a_rule_can_quantize_what_runs_in_float():
    made = plan(worked_example(), Rule("norm", port="output", quantized=True, format="int16"))
    assert made.sites["norm.output[0]"].spec.format == IntFormat(16)
    assert "fc.input[0]" not in made.sites


def test_a_model_output_has_its_own_port():
    made = plan(worked_example(), Rule(port="model_output", quantized=False), Rule(port="model_input", format="uint16"))
    assert made.floats["softmax.output[0]"].startswith("float by rule")
    assert made.sites["c1.input[0]"].spec.format == IntFormat(16, signed=False)
    assert made.sites["r1.output[0]"].spec.format == IntFormat(8, signed=False)


def test_readers_of_one_input_with_different_specs_do_not_share():
    b = Build()
    x = b.input()
    made = plan(
        b.graph(b.conv(x, "one", inputs=3), b.conv(x, "two", inputs=3)), Rule("two", port="input", format="uint16")
    )
    assert made.sites["two.input[0]"].group == "two.input[0]"


def test_a_movement_operator_named_by_type_gets_its_own_quantizer():
    graph = worked_example()
    assert "maxpool.output[0]" not in plan(graph, Rule(port="output", quantized=True)).sites
    assert "maxpool.output[0]" in plan(graph, Rule(op="MaxPool", port="output", quantized=True)).sites


def test_per_channel_activations_take_the_channel_axis():
    made = plan(worked_example(), Rule(port="output", granularity=PerChannel()))
    assert made.sites["r1.output[0]"].spec.granularity == PerChannel(1)
    assert made.sites["fc.output[0]"].spec.granularity == PerChannel(1)


@pytest.mark.parametrize("name", ["w4g32", "mxfp4"])
def test_blocks_of_a_preset_are_padded_where_they_do_not_divide(name):
    b = Build()
    x = b.linear(b.linear(b.input(shape=(1, 172)), "odd", 24, 172), "short", 8, 24)
    graph = b.graph(x)
    preset = PRESETS[name]
    made = place(graph, default_rules(preset.weight, preset.activation))
    assert made.sites["odd.weight"].spec.granularity == PerBlock(32, 1, 0)
    assert made.sites["short.weight"].spec.granularity == PerChannel(0)  # one block is all of a channel


@pytest.mark.parametrize(
    "shape, reason",
    [
        ((1, 4), ""),
        ((1,), "float: integer kernels add one number per output channel, and it has shape (1,)"),
        ((2, 4), "float: integer kernels add one number per output channel, and it has shape (2, 4)"),
    ],
)
def test_a_bias_may_have_leading_axes_of_one(shape, reason):
    b = Build()
    x, w = b.input(shape=(2, 8)), b.param("fc.weight", (4, 8))
    made = plan(b.graph(b.op("Gemm", x, w, b.param("fc.bias", shape), name="fc", shape=(2, 4), transB=1)))
    if reason:
        assert made.floats["fc.bias"] == reason
    else:
        assert made.sites["fc.bias"].spec.granularity == PerChannel(1)
        assert made.sites["fc.bias"].follows == ("fc.input[0]", "fc.weight")


@pytest.mark.parametrize("port", ["weight", "input", "output", "bias"])
@pytest.mark.parametrize("axis", [9, -9, 1 << 40])
def test_an_axis_that_a_tensor_lacks_is_refused_by_its_name(port, axis):
    rule = Rule(port=port, format="int8", granularity=PerChannel(axis))
    if port == "bias":  # its axes follow from the layer
        assert plan(conv_chain(1), rule).sites["0.conv.bias"]
        return
    with pytest.raises(GranularityError, match=rf"^0\.\w+\.{port}.*: axis {axis} does not exist in a tensor of rank 4"):
        plan(conv_chain(1), rule)


@pytest.mark.parametrize(
    "rule, message",
    [
        (
            Rule("0.cnov", port="weight", format="int4"),
            "nothing in the model has this name and port (did you mean '0.conv'",
        ),
        (Rule(op="Convolution", format="int4"), "the model has no operator of type 'Convolution' (did you mean 'Conv'"),
        (
            Rule("0.conv", port="output", format="int16"),
            "no effect; it matches 0.conv.output[0], but it is inside the supergroup "
            "Conv>BatchNormalization>Relu; name 0.relu",
        ),
        (
            Rule("0.bn", port="weight", format="int16"),
            "no effect; it matches 0.bn.weight, but normalisation parameters stay in float",
        ),
    ],
)
def test_rules_without_effect_are_reported(rule, message):
    (line,) = plan(conv_chain(1), rule).unused
    assert line.startswith(str(rule))
    assert message in line


def test_rules_with_effect_and_optional_rules_are_not_reported():
    rules = [Rule("0", format="int4"), Rule("0.relu", port="output", quantized=False), Rule(op="LSTM", optional=True)]
    assert plan(conv_chain(1), *rules).unused == ()


def test_a_format_inside_a_recurrent_layer_makes_the_spec_of_an_activation():
    b = Build()
    weights = b.param("w", (1, 16, 3)), b.param("r", (1, 16, 4))
    made = b.op("LSTM", b.input(shape=(5, 2, 3)), *weights, name="lstm", shape=(5, 1, 2, 4))
    b.values["cell"] = Value("cell", "activation", (5, 1, 2, 4))
    b.ops[-1] = replace(b.ops[-1], inner={"cell": "cell"})
    made = plan(b.graph(made), Rule("lstm", port="inner", format="int8"), base=default_rules(activation=None))
    inner = [site.spec for site in made.sites.values() if site.inner]
    assert inner and all(spec.granularity == PerTensor() and spec.symmetry == "asymmetric" for spec in inner)


def test_a_movement_operator_cannot_have_another_format():
    (line,) = plan(worked_example(), Rule("maxpool", port="output", format="int16")).unused
    assert line.endswith("no effect; it matches maxpool.output[0], but it shares the encoding of cat.output[0]")


def test_a_symmetry_can_reach_back_to_the_producer():
    b = Build()
    y = b.op("Reshape", b.conv(b.input(), "conv", inputs=3), name="r")
    graph = b.graph(b.op("MatMul", y, b.conv("x", "conv2", inputs=3), name="matmul"))
    made = plan(graph, Rule(op="MatMul", port="input", symmetry="symmetric", reaches_producer=True))
    assert made.sites["conv.output[0]"].spec.symmetry == "symmetric"
    assert made.sites["matmul.output[0]"].spec.symmetry == "asymmetric"


def test_two_operators_may_not_ask_for_different_symmetries():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    graph = b.graph(b.op("Tanh", y, name="tanh"), b.op("Relu", y, name="relu"))
    rules = [
        Rule(op="Tanh", port="input", symmetry="symmetric", reaches_producer=True),
        Rule(op="Relu", port="input", symmetry="asymmetric", reaches_producer=True),
    ]
    with pytest.raises(ConfigError, match="tanh asks for a symmetric encoding, relu for an asymmetric one"):
        plan(graph, *rules)


# ---- the report


def test_coverage_tells_how_each_value_fares():
    graph = worked_example()
    rows = {row.name: str(row) for row in plan(graph).coverage(graph)}
    assert rows["c1.weight"] == (
        "c1.weight (Conv, 8x3x3x3): quantized, int8 symmetric per channel (axis 0), minmax at c1.weight"
    )
    assert rows["c1.bias"] == (
        "c1.bias (Conv, 8): quantized, int32 from the scales of c1.input[0] and c1.weight at c1.bias"
    )
    assert rows["maxpool.output[0]"] == "maxpool.output[0] (MaxPool, 1x8x8x8): shared, with cat.output[0]"
    assert rows["b1.bias"] == "b1.bias (BatchNormalization, 8): float, normalisation parameters stay in float"


# ---- size


@pytest.mark.parametrize("name", [None, "htp_v73"])
def test_cost_grows_linearly(name):
    rules = load_config(name)

    def cost(blocks: int) -> int:
        graph = conv_chain(blocks)
        return steps(lambda: place(graph, rules))

    assert cost(480) <= 8 * cost(60)
    place(conv_chain(1_000), rules)  # 3,000 operators at the default recursion limit


def test_a_long_chain_of_movement_needs_no_recursion():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    for i in range(5_000):
        y = b.op("Identity", y, name=f"i{i}")
    made = place(b.graph(b.op("Relu", y, name="relu")), default_rules())
    assert made.floats["i4999.output[0]"] == "inside the supergroup Conv>Relu, quantized at relu.output[0]"
