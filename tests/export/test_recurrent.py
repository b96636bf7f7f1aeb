"""The Scan that a recurrent layer becomes computes what ONNX Runtime's own operator computes, for every option."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.core.graph.recurrence import CELLS, inner_names
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import parse_format
from bitwright.errors import ExportError
from bitwright.export.qdq.markers import close, site_names, strip_sites
from bitwright.export.qdq.write import to_qdq
from bitwright.export.recurrent import (
    expand_recurrent,
    layer_activations,
    recurrent_nodes,
    restore_native,
    unknown_activation,
)
from tests.support.cost import steps
from tests.support.recurrent_nets import Variant, feeds, layer_model, native_outputs, run_model

TYPES = ("RNN", "GRU", "LSTM")
FUNCTIONS = (
    "Relu", "Tanh", "Sigmoid", "Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu",
    "Softsign", "Softplus",
)  # fmt: skip


def scan_outputs(v: Variant):
    """Outputs of the Scan written for ``v``."""
    model = expand_recurrent(layer_model(v, domain="bitwright"))
    close(model)
    assert {node.op_type for node in model.graph.all_nodes()}.isdisjoint(TYPES)
    return run_model(model, feeds(v))


def check_equal(v: Variant, tolerance: float = 1e-5) -> None:
    """The Scan gives what the operator gives."""
    found, expected = scan_outputs(v), native_outputs(v)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op_type", TYPES)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("lengths", [None, (6, 2, 4), (1, 3, 0)], ids=["full", "lengths", "empty-row"])
@pytest.mark.parametrize("states", [False, True], ids=["zero", "given"])
@pytest.mark.parametrize("layout", [0, 1])
def test_direction_lengths_states_layout(op_type, direction, lengths, states, layout):
    check_equal(Variant(op_type, direction, lengths=lengths, states=states, layout=layout))


def slots():
    """Every activation function in every place of every type, with parameters and without."""
    for op_type in TYPES:
        for place in range(len(CELLS[op_type].activations)):
            for name in FUNCTIONS:
                for given_too in (False, True):
                    yield pytest.param(op_type, place, name, given_too,
                                       id=f"{op_type}-{place}-{name}{'-given' * given_too}")  # fmt: skip


@pytest.mark.parametrize("op_type, place, name, given_too", list(slots()))
def test_activation_functions(op_type, place, name, given_too):
    names = list(CELLS[op_type].activations)
    names[place] = name
    parameters = (("activation_alpha", [0.3]), ("activation_beta", [0.2])) if given_too else ()
    check_equal(Variant(op_type, length=4, attributes=(("activations", names), *parameters)))


def test_parameters_go_to_the_functions_that_have_them():
    attributes = {
        "activations": ["HardSigmoid", "tanh", "ScaledTanh", "LeakyRelu", "Sigmoid", "Affine"],
        "activation_alpha": [0.3, 0.7, 0.1],
        "activation_beta": [0.4, 0.9],
        "direction": "bidirectional",
    }
    found = [(a.name, a.alpha, a.beta) for a in layer_activations("LSTM", attributes)]
    assert found == [("HardSigmoid", 0.3, 0.4), ("Tanh", None, None), ("ScaledTanh", 0.7, 0.9),
                     ("LeakyRelu", 0.1, None), ("Sigmoid", None, None), ("Affine", 0.0, 0.0)]  # fmt: skip
    one_way = (("activations", attributes["activations"][:3]), ("activation_alpha", [0.3, 0.7]),
               ("activation_beta", [0.4, 0.9]))  # fmt: skip
    check_equal(Variant("LSTM", attributes=one_way))


def options(op_type: str):
    """Attributes that change the equations of a type."""
    flags = {"LSTM": ("input_forget",), "GRU": ("linear_before_reset",), "RNN": ()}[op_type]
    return st.tuples(
        *(st.tuples(st.just(flag), st.integers(0, 1)) for flag in flags),
        st.tuples(st.just("clip"), st.sampled_from([0.0, 0.3, 1.5])),
    ).map(lambda pairs: tuple((key, value) for key, value in pairs if value))


@st.composite
def variants(draw):
    """Any recurrent node of one direction."""
    op_type = draw(st.sampled_from(TYPES))
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    lengths = st.lists(st.integers(0, length), min_size=batch, max_size=batch).map(tuple)
    return Variant(
        op_type,
        draw(st.sampled_from(["forward", "reverse"])),
        length,
        batch,
        draw(st.integers(1, 6)),
        draw(st.integers(1, 6)),
        draw(st.booleans()),
        draw(st.none() | lengths),
        draw(st.booleans()),
        op_type == "LSTM" and draw(st.booleans()),
        draw(st.integers(0, 1)),
        draw(options(op_type)),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=80, deadline=None)
@given(variants())
def test_every_variant(v):
    check_equal(v)


@pytest.mark.parametrize("op_type", TYPES)
def test_half_precision(op_type):
    check_equal(Variant(op_type, dtype="float16"), tolerance=2e-3)


def test_length_and_batch_are_free():
    v = Variant("LSTM", length=6, batch=3)
    model = expand_recurrent(layer_model(v, domain="bitwright"))
    close(model)
    for other in (replace(v, length=1), replace(v, length=11, batch=1)):
        for one, expected in zip(run_model(model, feeds(other)), native_outputs(other), strict=True):
            np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op_type", TYPES)
def test_inner_sites_are_marked_once_in_order_of_computation(op_type):
    names = inner_names(op_type)
    pairs = tuple(f"{name}=rnn.{name}" for name in names)
    model = expand_recurrent(layer_model(Variant(op_type), domain="bitwright", inner_sites=pairs))
    assert site_names(model) == [f"rnn.{name}" for name in names]
    found = run_model(strip_sites(model).model, feeds(Variant(op_type)))
    for one, other in zip(found, native_outputs(Variant(op_type)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_sequence_that_nobody_reads_is_not_returned():
    model = layer_model(Variant("GRU"), domain="bitwright")
    del model.graph.outputs[0]
    (scan,) = [node for node in expand_recurrent(model).graph if node.op_type == "Scan"]
    assert len(scan.outputs) == 1


@pytest.mark.parametrize("op_type", TYPES)
def test_native_operator_again(op_type):
    v = Variant(op_type, states=True)
    marked = layer_model(v, domain="bitwright", inner_sites=("candidate.pre=rnn.pre", "hidden=rnn.output[0]"))
    native = restore_native(marked)
    assert not recurrent_nodes(native) and site_names(native) == ["rnn.output[0]"]
    stripped = strip_sites(native)
    assert stripped.tensors == {"rnn.output[0]": ("Y", "Y_h")}
    (node,) = stripped.model.graph
    assert (node.domain, node.op_type) == ("", op_type) and "inner_sites" not in node.attributes
    for one, other in zip(run_model(stripped.model, feeds(v)), native_outputs(v), strict=True):
        np.testing.assert_array_equal(one, other)


def projected(v: Variant, size: int) -> ir.Model:
    """An LSTM whose hidden state is projected to ``size``, as PyTorch has it."""
    model = layer_model(replace(v, hidden=size), domain="bitwright")  # R: [1, 4 * size, size]
    rng, rows = np.random.default_rng(5), 4 * v.hidden
    (node,) = model.graph
    node.resize_inputs(9)
    shapes = {"W": (1, rows, v.inputs), "R": (1, rows, size), "B": (1, 2 * rows), "projection": (1, size, v.hidden)}
    for port, (name, shape) in zip((1, 2, 3, 8), shapes.items(), strict=True):
        model.graph.initializers.pop(name, None)
        tensor = ir.Tensor(rng.standard_normal(shape).astype(np.float32), name=name)
        value = ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype))
        model.graph.register_initializer(value)
        node.replace_input_with(port, value)
    node.attributes.add(ir.AttrInt64("hidden_size", v.hidden))
    return model


@pytest.mark.parametrize("native", [False, True], ids=["scan", "native-asked-for"])
def test_projection(native):
    """Against the equations, written out."""
    v = Variant("LSTM", length=3, batch=2, hidden=4)
    model = projected(v, 3)
    w, r, b, p = (model.graph.initializers[k].const_value.numpy()[0] for k in ("W", "R", "B", "projection"))
    written = (restore_native if native else expand_recurrent)(model)
    close(written)
    x = feeds(v)["X"]
    h, c, steps = np.zeros((2, 3)), np.zeros((2, 4)), []
    for x_t in x:
        i, o, f, g = np.split(x_t @ w.T + h @ r.T + b[:16] + b[16:], 4, axis=1)
        i, o, f = (1 / (1 + np.exp(-gate)) for gate in (i, o, f))
        c = f * c + i * np.tanh(g)
        h = (o * np.tanh(c)) @ p.T
        steps.append(h)
    found = run_model(written, {"X": x})
    for one, other in zip(found, (np.stack(steps)[:, None], h[None], c[None]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_models_without_layers_are_handed_back():
    v = Variant("GRU")
    native = layer_model(v)
    assert expand_recurrent(native) is native and restore_native(native) is native


def test_unknown_activation_function_is_named():
    assert unknown_activation("GRU", {"activations": ("Sigmoid", "Mish")}) == "Mish"
    assert unknown_activation("GRU", {}) is None
    v = Variant("GRU", attributes=(("activations", ["Sigmoid", "Mish"]),))
    with pytest.raises(ExportError, match="'Mish' is not an activation function.*use one of Relu, Tanh"):
        expand_recurrent(layer_model(v, domain="bitwright"))


def test_two_directions_are_refused():
    v = Variant("GRU", direction="bidirectional")
    with pytest.raises(ExportError, match="node 'rnn'.*one direction, and has 'bidirectional'"):
        expand_recurrent(layer_model(v, domain="bitwright"))


def test_the_last_state_is_not_put_on_the_grid_of_the_first():
    v = Variant("GRU", states=True)
    model = layer_model(v, domain="bitwright")
    (node,) = model.graph
    marker = ir.node("Site", [node.inputs[5]], {"site": "start"}, domain="bitwright", name="marker")
    marker.outputs[0].name, marker.outputs[0].type = "h_site", node.inputs[5].type
    model.graph.insert_before(node, marker)
    node.replace_input_with(5, marker.outputs[0])
    coarse = Encoding(parse_format("uint8"), np.float32(0.5), np.int64(128))
    written = to_qdq(expand_recurrent(model), {"start": coarse}).model
    given = feeds(v)
    expected = run_model(layer_model(v), {**given, "h": fake_quantize(given["h"], coarse)})
    for one, other in zip(run_model(written, given), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def many(count: int) -> ir.Model:
    """``count`` layers that read the same input."""
    model = layer_model(Variant("GRU"), domain="bitwright", inner_sites=("hidden=rnn.output[0]",))
    (first,) = model.graph
    for i in range(count - 1):
        node = ir.node("GRU", first.inputs, dict(first.attributes), domain="bitwright", num_outputs=2, name=f"rnn_{i}")
        for value, name in zip(node.outputs, ("Y", "Y_h"), strict=True):
            value.name, value.type = f"{name}_{i}", first.outputs[0].type
        model.graph.append(node)
        model.graph.outputs.extend(node.outputs)
    return model


def test_cost_is_linear_in_the_number_of_layers():
    counts = {}
    for count in (20, 40):
        model = many(count)
        counts[count] = steps(lambda model=model: expand_recurrent(model))
    assert counts[40] < 2.2 * counts[20]
