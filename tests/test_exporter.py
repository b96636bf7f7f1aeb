"""The exporter's translations that the tests keep are those that it would read."""

from __future__ import annotations

import torch
import torch._export.utils as operators
from torch.onnx._internal.exporter._registration import ONNXRegistry

from tests.support.exporter import from_torchlib, materialize


def test_the_translations_that_are_kept_are_those_that_would_be_read():
    used = ONNXRegistry.from_torchlib()
    target = next(iter(used.functions))
    used.functions[target].clear()
    used.functions["a::b"] = []
    kept, fresh = ONNXRegistry.from_torchlib(), from_torchlib()
    assert kept.opset_version == fresh.opset_version
    assert len(fresh.functions) > 500 and kept.functions == fresh.functions


def test_composite_operators_that_are_new_are_found():
    operators._collect_all_valid_cia_ops()
    library = torch.library.Library("exporter_test", "DEF")
    library.define("twice(Tensor x) -> Tensor", tags=())
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
    found = operators._collect_all_valid_cia_ops()
    materialize()
    assert found == operators._collect_all_valid_cia_ops()
    assert torch.ops.exporter_test.twice.default in found
