"""Requests for precisions: what they reach, how they meet, and what the target allows."""

from __future__ import annotations

from typing import Any

import pytest

from bitwright.errors import BitwrightError
from bitwright.precision.manual import MODEL_INPUT, MODEL_OUTPUT, PrecisionRequest, set_precisions
from tests.precision.nets import FRONTS, simulation

INT = {"activation": {"bitwidth": 8, "dtype": "int"}, "param": {"bitwidth": 8, "dtype": "int"}}
WIDE = {"activation": {"bitwidth": 16, "dtype": "int"}, "param": {"bitwidth": 8, "dtype": "int"}}


def config(**op_types: Any) -> dict[str, Any]:
    return {
        "defaults": {
            "ops": {"is_output_quantized": "True"}, "params": {"is_quantized": "True", "is_symmetric": "True"},
            "per_channel_quantization": "True",
        },
        "params": {}, "op_type": {n: {"supported_kernels": k} for n, k in op_types.items()},
        "supergroups": [], "model_input": {"is_input_quantized": "True"}, "model_output": {},
    }  # fmt: skip


def bits(sim: Any, op: str) -> tuple[set[int], set[int]]:
    """Of what the operator reads, and of its weights."""
    layer = next(o for o in sim.graph.ops if op in o.name and o.type in ("Conv", "Gemm", "MatMul"))
    values = {v for _, v in layer.sources()}
    a = {
        s.spec.format.bits
        for s in sim.quantizers.values()
        if s.value in values and s.role in ("input", "output") and s.enabled
    }
    w = {s.spec.format.bits for s in sim.quantizers.values() if s.value in values and s.role == "weight"}
    return a, w


def name_of(sim: Any, part: str) -> str:
    return next(o.name for o in sim.graph.ops if part in o.name and o.type in ("Conv", "Gemm", "MatMul"))


@pytest.mark.parametrize("front", FRONTS)
def test_a_request_reaches_what_a_layer_reads_and_its_weight(front: str) -> None:
    sim = simulation(front)
    report = set_precisions(sim, [PrecisionRequest(name_of(sim, "stem"), "int16", "int4")])
    assert bits(sim, "stem") == ({16}, {4}) and bits(sim, "body")[1] == {8}
    assert all(s.encoding is not None for s in sim.quantizers.values() if s.enabled and not s.quantizer.derived)
    assert {c.now for c in report.changes} == {"uint16", "int4"} and "stem" in str(report)
    assert "because the request for" in str(sim.coverage())


@pytest.mark.parametrize("front", FRONTS)
def test_types_patterns_and_the_ends_of_the_model(front: str) -> None:
    sim = simulation(front)
    set_precisions(
        sim,
        [
            PrecisionRequest("Conv", weight="int4"),
            PrecisionRequest(MODEL_INPUT, "int16"),
            PrecisionRequest(MODEL_OUTPUT, "fp16"),
        ],
    )
    assert bits(sim, "stem") == ({16}, {4}) and bits(sim, "body")[1] == {4} and bits(sim, "head")[1] == {8}
    ends = {s.spec.format.name for s in sim.quantizers.values() if s.value in sim.graph.outputs and s.role == "output"}
    assert ends <= {"float16"}


def test_later_requests_win_for_the_same_layer() -> None:
    sim = simulation("torch")
    set_precisions(sim, [PrecisionRequest("Conv", weight="int4"), PrecisionRequest("body", weight="int8")])
    assert bits(sim, "stem")[1] == {4} and bits(sim, "body")[1] == {8}


@pytest.mark.parametrize("front", FRONTS)
def test_a_quantizer_that_two_requests_share(front: str) -> None:
    sim = simulation(front)
    add = next(o.name for o in sim.graph.ops if o.type == "Add")
    requests = [PrecisionRequest(name_of(sim, "body"), "int16"), PrecisionRequest(add, "int8")]
    before = {n: s.encoding for n, s in sim.quantizers.items()}
    with pytest.raises(BitwrightError, match="asks for uint?16|asks for int16"):
        set_precisions(sim, requests)
    assert all(s.encoding is before[n] for n, s in sim.quantizers.items())
    report = set_precisions(sim, requests, strict=False)
    assert report.compromises and "it has the larger" in report.compromises[0] and bits(sim, "body")[0] == {16}


def test_what_the_target_has_no_kernel_for() -> None:
    sim = simulation("torch", config_file=config(Conv=[INT, WIDE]))
    with pytest.raises(
        BitwrightError,
        match="no kernel of Conv for 8-bit activations and 4-bit weights.*activations int8, weights int8",
    ):
        set_precisions(sim, [PrecisionRequest("stem", "int8", "int4")])
    report = set_precisions(sim, [PrecisionRequest("stem", "int8", "int4")], strict=False)
    assert bits(sim, "stem") == ({8}, {8}) and "it has activations int8, weights int8" in report.compromises[0]


def test_a_search_keeps_to_the_kernels_of_the_target() -> None:
    from bitwright.precision.search import mixed_precision
    from tests.precision.nets import batches

    sim = simulation("torch", config_file=config(Conv=[INT]))
    result = mixed_precision(sim, batches("torch"), ["w8a8", "w4a8"], budget=1.0, rounding=False)
    conv = next(g for g in result.groups if "stem.weight" in g.weights)
    assert "w4a8" in conv.refused


def test_before_calibration() -> None:
    import bitwright.torch as bt
    from tests.precision.nets import batches, trained

    sim = bt.QuantizationSimModel(trained(), batches("torch")[0])
    set_precisions(sim, [PrecisionRequest("stem", "int16", "int4")])
    sim.compute_encodings(batches("torch"), progress=False)
    assert bits(sim, "stem") == ({16}, {4})


@pytest.mark.parametrize(
    "request_, message",
    [
        (PrecisionRequest("stemm", "int8"), "no operator has this name"),
        (PrecisionRequest("stem", "int99"), "99 is not a bit width"),
    ],
)
def test_bad_requests(request_: PrecisionRequest, message: str) -> None:
    with pytest.raises(BitwrightError, match=message):
        set_precisions(simulation("torch"), [request_])
