"""Milliseconds that were measured, as a cost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bitwright import measure_times, mixed_precision
from bitwright.errors import BitwrightError
from bitwright.precision.costs import TIMES_FORMAT
from bitwright.runtimes.timing import _attributed
from tests.precision.nets import batches, model, simulation

PRESETS = ("w8a8", "w8a16")


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("times") / "times.json"
    found = measure_times(model("onnx"), batches("onnx"), PRESETS, path=path, rounds=3)
    assert json.loads(path.read_text()) == found
    return found, path


def test_every_layer_has_a_time_at_every_candidate(times: Any) -> None:
    found, path = times
    assert found["format"] == TIMES_FORMAT and {tuple(row) for row in found["layers"].values()} == {PRESETS}
    assert {"/stem/Conv", "/body/Conv", "/head/Gemm"} <= found["layers"].keys()
    for c in PRESETS:  # what belongs to no layer is in none of them
        assert 0 < sum(row[c] for row in found["layers"].values()) <= found["whole"][c] * (1 + 1e-9)
    # kept: the second call measures nothing, and so gives the same numbers
    assert measure_times(model("onnx"), batches("onnx"), PRESETS, path=path) == found


def fixed(found: Any, **milliseconds: Any) -> dict[str, Any]:
    """The same layers with times that a test knows."""
    table = {layer: {"w8a8": 1.0, "w8a16": 3.0} for layer in found["layers"]}
    reads = {layer: {"w8a8": 0.0, "w8a16": 0.25} for layer in found["layers"]}
    return {**found, "layers": table, "conversions": reads, "fixed": 0.5, **milliseconds}


def test_a_kernel_is_as_wide_as_what_it_reads_and_makes(times: Any) -> None:
    """A layer of 8 bits whose result is read at 16 takes as long as one of 16; the other way around it is converted."""
    data = batches("onnx")
    known = fixed(times[0])
    layers = len(known["layers"])
    result = mixed_precision(
        simulation("onnx"), data, PRESETS, cost="ms", times=known, min_sqnr=1.0, rounding=False, evaluations=3
    )
    assert result.chosen is not None and set(result.precisions.values()) == {"w8a8"}
    assert result.chosen.costs["ms"] == pytest.approx(0.5 + layers)
    by_group = {g.name: g for g in result.groups}
    for point in result.points:
        wide = [by_group[name] for name, c in point.choice.items() if c == "w8a16"]
        if len(wide) == 1 and "/head/Gemm" in wide[0].layers:  # what makes its input is as wide
            assert point.costs["ms"] >= 0.5 + layers + 2 * len(wide[0].layers) + 2 - 1e-9
        if len(wide) == len(result.groups):
            assert point.costs["ms"] == pytest.approx(0.5 + 3 * layers)


def test_a_search_with_measured_times_ends_on_what_is_fast(times: Any) -> None:
    result = mixed_precision(
        model("onnx"), batches("onnx"), PRESETS, cost="ms", times=times[1], budget=1.0, rounding=False, evaluations=2
    )
    assert result.chosen is not None and result.chosen.costs["ms"] > 0


@pytest.mark.quick_variants("machine")
@pytest.mark.parametrize("change, message", [
    (
        lambda found: {**found, "of": {**found["of"], "machine": "another"}},
        "its times are of another machine.*remove it to measure again",
    ),
    (lambda found: {**found, "of": {**found["of"], "graph": "x"}}, "its times are of another graph"),
    (lambda found: {"Conv": {"w8a8": 1.0}}, "it holds no times that were measured"),
], ids=["machine", "graph", "a table of a user"])  # fmt: skip
def test_times_of_something_else_are_refused(change: Any, message: str, times: Any, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(change(times[0])))
    with pytest.raises(BitwrightError, match=message):
        measure_times(model("onnx"), batches("onnx"), PRESETS, path=path)
    path.unlink()
    assert measure_times(model("onnx"), batches("onnx"), PRESETS, path=path, rounds=2)["format"] == TIMES_FORMAT


def test_a_module_is_told_what_to_do() -> None:
    with pytest.raises(BitwrightError, match="layers of a module have other names.*export the module to ONNX"):
        measure_times(model("torch"), batches("torch"), PRESETS)


def node(name: str, op: str, inputs: list[Any], *outputs: Any) -> Any:
    made = SimpleNamespace(name=name, op_type=op, inputs=inputs, outputs=list(outputs))
    for value in outputs:
        value.producer = lambda: made
    for value in inputs:
        value.readers.append(SimpleNamespace(node=made))
    return made


def value() -> Any:
    readers: list[Any] = []
    return SimpleNamespace(readers=readers, uses=lambda: readers, producer=lambda: None)


def test_what_stands_between_layers_counts_for_the_one_that_reads_it() -> None:
    x, a, q, d, b, y = (value() for _ in range(6))
    graph = [
        node("one_nchwc", "Conv", [x], a), node("a_q", "QuantizeLinear", [a], q), node("a_dq", "DequantizeLinear", [q], d),
        node("two_token_7", "QLinearConv", [d], b), node("last", "Reorder", [b], y),
    ]  # fmt: skip
    taken = {"one_nchwc": 1.0, "a_q": 0.25, "a_dq": 0.25, "two_token_7": 2.0, "last": 0.5}
    found = _attributed(graph, taken, {"one", "two"}, 8.0)  # twice what the nodes say
    assert found.layers == {"one": 2.0, "two": 6.0} and found.conversions == {"one": 0.0, "two": 0.5} and not found.rest
