"""Conversion of old models: what is taken as unchanged is unchanged by the standard's own definitions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bitwright.onnx.load import load_model
from bitwright.onnx.opset import _UNCHANGED_SINCE, OPSET, modernize
from tests.onnx.nets import Net, feeds_for, run

Optional = onnx.defs.OpSchema.FormalParameterOption.Optional


@pytest.mark.parametrize("op", _UNCHANGED_SINCE)
def test_unchanged_operators_only_gained_options(op):
    old, new = onnx.defs.get_schema(op, _UNCHANGED_SINCE[op]), onnx.defs.get_schema(op, OPSET)
    gone = old.attributes.keys() - new.attributes.keys()
    assert not gone, f"attributes were removed: {gone}"
    for name, attribute in old.attributes.items():
        assert attribute.default_value == new.attributes[name].default_value or name in _CLARIFIED, name
    assert all(not new.attributes[name].required for name in new.attributes.keys() - old.attributes.keys())
    assert [i.name for i in new.inputs][: len(old.inputs)] == [i.name for i in old.inputs] or len(
        old.inputs
    ) == 1
    assert all(i.option == Optional for i in new.inputs[len(old.inputs) :])
    assert len(new.outputs) >= len(old.outputs)


# Defaults that were left unsaid at first and written down later with the meaning that every runtime gave them.
_CLARIFIED = {
    "dilations",
    "strides",
    "pads",
    "output_padding",
    "output_shape",
    "axis",
    "storage_order",
    "epsilon",
}


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
