"""Outputs that a runtime makes otherwise of the whole file, with a runtime that the tests play."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir
import pytest

from bitwright.export.runtime_faults import Edit, Otherwise, computed_otherwise

FEEDS = {"x": np.zeros((2, 3), np.float32)}


def model(batch: int | None) -> ir.Model:
    """``x -> QuantizeLinear -> DequantizeLinear -> Relu -> y``, and a weight of codes."""
    return ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{"N" if batch is None else batch}, 3] x) => (float[M, 3] y)
        <float s = {{0.1}}, uint8 z = {{0}}, int8[3] codes = {{1, 2, 3}}, int8 zero = {{0}}> {{
            q = QuantizeLinear(x, s, z)
            d = DequantizeLinear(q, s, z)
            w = DequantizeLinear(codes, s, zero)
            h = Mul(d, w)
            y = Relu(h)
        }}"""
    )


def found(batch: int | None, whole: float, **better: float) -> Otherwise | None:
    """The verdict on an output that is at ``whole`` dB, and at those of ``better`` after the edits."""

    def changed(edit: Edit) -> Callable[[str], float]:
        copied = model(batch)
        edit(copied)
        outputs = [value.name for value in copied.graph.outputs]
        assert outputs in (["y"], ["y", "d"]), "of quantized activations alone"
        return lambda name: better.get("observed" if "d" in outputs else "fixed", whole)

    return computed_otherwise(model(batch), [("y", whole)], FEEDS, changed, "openvino")


@pytest.mark.parametrize("batch", [2, None])
def test_what_is_right_while_it_is_observed_is_wrong_otherwise(batch: int | None) -> None:
    told = found(batch, 27.9, observed=150.0)
    assert told is not None and told.shapes is None and (told.whole, told.other) == (27.9, 150.0)
    assert "output y is 27.9 dB from the simulation, and 150.0 dB where every quantized value is an output too" in str(
        told
    )
    assert "make values in between outputs of the model, or use another runtime" in str(told)


def test_free_axes_are_tried_first_and_have_their_own_remedy() -> None:
    told = found(None, 27.9, observed=150.0, fixed=60.0)
    assert told is not None and told.other == 60.0
    assert "model.reshape({'x': [2, 3]})" in str(told) and "`bitwright drift` names the operator" in str(told)
    told = found(2, 27.9, fixed=60.0)
    assert told is None, "nothing is free"


@pytest.mark.parametrize(("whole", "observed"), [(61.0, 150.0), (40.0, 59.0), (40.0, -100.0)])
def test_outputs_that_are_near_or_come_no_nearer_are_not_told(whole: float, observed: float) -> None:
    assert found(2, whole, observed=observed) is None


def test_nothing_runs_where_all_outputs_are_near() -> None:
    def edits() -> Iterator[Edit]:
        raise AssertionError("a run")

    assert computed_otherwise(model(None), [("y", 61.0)], FEEDS, lambda _: next(edits()), "openvino") is None
