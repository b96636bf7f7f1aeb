"""What the library of precisions changes, it brings back."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bitwright.analysis.subject import Subject, open_subject
from bitwright.onnx import QuantizationSimModel
from bitwright.precision.candidates import as_candidates, find_groups
from bitwright.precision.library import Library

CANDIDATES = as_candidates(["w8a8", "w4a8"])


def transposed(tied: bool) -> onnx.ModelProto:
    """A table of words and two layers whose weights a Transpose makes; ``tied`` where the second one's is the table."""
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(0, 1, shape).astype(np.float32)
        for name, shape in (("table", (12, 8)), ("w", (8, 8)), ("out", (12, 8)))
    }
    last = "table" if tied else "out"
    nodes = [
        helper.make_node("Gather", ["table", "words"], ["rows"], "embedding"),
        helper.make_node("Transpose", ["w"], ["w_t"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "w_t"], ["h"], "hidden"),
        helper.make_node("Tanh", ["h"], ["a"], "tanh"),
        helper.make_node("Transpose", [last], ["out_t"], perm=[1, 0]),
        helper.make_node("MatMul", ["a", "out_t"], ["y"], "head"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("words", TensorProto.INT64, [4, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 6, 12])],
        [numpy_helper.from_array(t, name) for name, t in tensors.items() if name != "out" or not tied],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def opened(tied: bool) -> tuple[Subject, list[dict[str, Any]]]:
    rng = np.random.default_rng(1)
    data = [{"words": rng.integers(0, 12, (4, 6))} for _ in range(5)]
    sim = QuantizationSimModel(transposed(tied), data[0])
    sim.compute_encodings(data, progress=False)
    return open_subject(sim), data


@pytest.mark.slow_variants("False")
@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_a_node_computes_are_rounded_at_each_width_and_brought_back(tied: bool) -> None:
    subject, data = opened(tied)
    before = [np.array(subject.outputs(batch, False)[0]) for batch in data]
    in_float = np.array(subject.outputs(data[0], True)[0])
    groups = find_groups(subject.sim, CANDIDATES)
    library = Library(subject, groups, CANDIDATES, {}, data)
    points = {}
    for choice in [(0,) * len(groups), (1,) * len(groups)]:
        library.fit(choice)
        points[choice] = np.array(subject.outputs(data[0], False)[0])
    library.restore()
    for batch, wanted in zip(data, before, strict=True):
        np.testing.assert_array_equal(subject.outputs(batch, False)[0], wanted)
    for choice, wanted in points.items():
        library.fit(choice)
        np.testing.assert_array_equal(subject.outputs(data[0], False)[0], wanted)
    high, low = (np.abs(found - in_float).max() for found in points.values())
    assert high < low / 3
