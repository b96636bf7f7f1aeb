"""Threads that share an ONNX simulation: runs agree with those of one thread, calibration takes one thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from bitwright.errors import BusyError
from bitwright.onnx import QuantizationSimModel


def _model() -> onnx.ModelProto:
    generator = np.random.default_rng(0)

    def array(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "v", "d"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3, 8, 8])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 4])],
        [array("w", 6, 3, 3, 3), array("b", 6), array("v", 4, 6), array("d", 4)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    generator = np.random.default_rng(1)
    return [generator.normal(size=(2, 3, 8, 8)).astype(np.float32) for _ in range(4)]


@pytest.fixture
def sim(batches: list[Any]) -> QuantizationSimModel:
    sim = QuantizationSimModel(_model(), threads=1)
    sim.compute_encodings(batches)
    return sim


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_concurrent_runs_open_one_session_and_agree(sim: QuantizationSimModel, batches: list[Any]) -> None:
    expected = [sim.run(x)[0] for x in batches]
    sim.forget_simulations()
    with ThreadPoolExecutor(8) as pool:
        sessions = list(pool.map(lambda _: sim.session, range(16)))
        found = list(pool.map(lambda i: sim.run(batches[i % 4])[0], range(64)))
    assert len(set(map(id, sessions))) == 1
    assert all(np.array_equal(y, expected[i % 4]) for i, y in enumerate(found))


def test_concurrent_captures_agree(sim: QuantizationSimModel, batches: list[Any]) -> None:
    names = [name for name, site in sim.quantizers.items() if site.role in ("input", "output")]
    expected = sim.capture(names, batches[0])
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: sim.capture(names, batches[0]), range(12)):
            assert all(np.array_equal(found[n][0], expected[n][0]) for n in names)


def test_calibration_refuses_a_second_thread_by_name(
    sim: QuantizationSimModel, batches: list[Any], tmp_path: Path
) -> None:
    inside, go_on, session = threading.Event(), threading.Event(), sim.session
    expected, fresh = sim.run(batches[0])[0], QuantizationSimModel(_model(), threads=1)
    fresh.load_encodings(sim.save_encodings(tmp_path / "before"))

    def callback(calibration: Any) -> None:
        calibration.run(None, {"x": batches[0]})
        inside.set()
        assert go_on.wait(300)

    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        future = pool.submit(sim.compute_encodings, callback)
        try:
            assert inside.wait(300)
            for use in (lambda: sim.run(batches[0]), lambda: sim.session, lambda: sim.compute_encodings(batches)):
                with pytest.raises(BusyError, match=r"thread 'other_0' is changing it \(calibration\)"):
                    use()
            # a session that was opened before, and another simulation, are not concerned
            assert np.array_equal(session.run(None, {"x": batches[0]})[0], expected)
            assert np.array_equal(fresh.run(batches[0])[0], expected)
        finally:
            go_on.set()
        future.result()
    sim.run(batches[0])


def test_a_callback_that_calibrates_from_several_threads_is_refused(
    sim: QuantizationSimModel, batches: list[Any]
) -> None:
    def callback(session: Any) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda x: session.run(None, {"x": x}), batches))

    with pytest.raises(BusyError, match=r"is changing it \(calibration\)"):
        sim.compute_encodings(callback)
