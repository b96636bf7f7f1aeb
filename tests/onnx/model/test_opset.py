"""Conversion of old models: what is taken as unchanged is unchanged by the standard's own definitions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bitwright.errors import ModelError
from bitwright.onnx.model.load import load_model
from bitwright.onnx.model.opset import _UNCHANGED_SINCE, OPSET, modernize
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from tests.onnx.nets import Net, feeds_for, run
from tests.onnx.opset_cases import CASES, model_of, opsets_of, turning_points

Optional = onnx.defs.OpSchema.FormalParameterOption.Optional


@pytest.mark.parametrize("op", _UNCHANGED_SINCE)
def test_unchanged_operators_only_gained_options(op):
    old, new = onnx.defs.get_schema(op, _UNCHANGED_SINCE[op]), onnx.defs.get_schema(op, OPSET)
    gone = old.attributes.keys() - new.attributes.keys()
    assert not gone, f"attributes were removed: {gone}"
    for name, attribute in old.attributes.items():
        assert attribute.default_value == new.attributes[name].default_value or name in _CLARIFIED, name
    assert all(not new.attributes[name].required for name in new.attributes.keys() - old.attributes.keys())
    assert [i.name for i in new.inputs][: len(old.inputs)] == [i.name for i in old.inputs] or len(old.inputs) == 1
    assert all(i.option == Optional for i in new.inputs[len(old.inputs) :])
    assert len(new.outputs) >= len(old.outputs)


# Defaults that were left unsaid at first and written down later with the meaning that every runtime gave them.
_CLARIFIED = {"dilations", "strides", "pads", "output_padding", "output_shape", "axis", "storage_order", "epsilon"}


@pytest.mark.parametrize("opset", [9, 11, 13, 17])
def test_models_of_unchanged_operators_get_the_new_number(opset):
    n = Net()
    model = n.model(n("Relu", n.conv(n.input(), name="c"), out="y"), opset=opset)
    loaded = modernize(load_model(model))
    assert loaded.opset == OPSET and loaded.model.opset_imports[""] == OPSET and not loaded.notes
    assert np.array_equal(run(loaded.model, feeds_for(model))[0], run(model, feeds_for(model))[0])


def test_others_are_converted_and_compared():
    n = Net()
    y = n("Softmax", n("Squeeze", n.input("x", (1, 4, 6)), axes=[0]), axis=0, out="y")
    model = n.model(y, opset=11)
    loaded = modernize(load_model(model))
    assert loaded.notes == (f"converted from opset 11 to {OPSET}",)
    assert np.allclose(run(loaded.model, feeds_for(model))[0], run(model, feeds_for(model))[0], atol=1e-7)


@pytest.mark.slow_variants("if_", "loop")
@pytest.mark.parametrize("name", CASES)
def test_operators_of_every_opset_are_converted_to_the_same_function(name):
    for opset in turning_points(name):
        model = model_of(name, opset)
        feeds = feeds_for(model)
        loaded = modernize(load_model(model), feeds)
        assert loaded.opset >= OPSET
        for expected, found in zip(run(model, feeds), run(loaded.model, feeds), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=f"opset {opset}")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_operators_of_every_opset_are_simulated(name):
    """In float the simulation is the model; quantized, it stays near it."""
    for opset in opsets_of(name):
        if opset not in (opsets_of(name)[0], 9, 11, 13, 17, 21, 23, 25):
            continue
        model = model_of(name, opset)
        feeds = feeds_for(model)
        sim = QuantizationSimModel(model, feeds, threads=1)
        sim.compute_encodings([feeds], progress=False)
        assert all(np.isfinite(found).all() for found in sim.run(feeds))
        sim.quantizers["*"].enabled = False
        for expected, found in zip(run(model, feeds), sim.run(feeds), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=f"opset {opset}")


def test_a_conversion_that_changes_the_function_names_the_operator():
    n = Net()
    x = n("Relu", n.input("x", (1, 3, 4, 4)), name="first")
    model = n.model(n("Neg", n("Hardmax", x, name="the_one", axis=1), name="last", out="y"), opset=11)
    with pytest.raises(ModelError) as error:
        modernize(load_model(model), feeds_for(model))
    assert str(error.value) == (
        "net: conversion from opset 11 to 21 changes its output 'y': Hardmax (the_one) is converted wrongly. "
        "Remedy: export the model again with opset 21"
    )


def test_a_group_norm_of_unknown_width_is_refused():
    n = Net()
    x = n.input("x", (1, "c", 4, 4))
    y = n("GroupNormalization", x, n.weights(2), n.weights(2), num_groups=2, name="norm", out="y")
    with pytest.raises(
        ModelError, match="the GroupNormalization 'norm' cannot be converted to opset 21: how many channels"
    ):
        modernize(load_model(n.model(y, opset=18)))
