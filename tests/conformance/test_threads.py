"""What runs belongs to its thread: concurrent runs give the answers of one thread, the rest is refused by name."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import Tensor, nn

from bitwright.errors import BusyError, CalibrationError
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel, check_model
from bitwright.torch.interception.record import record
from tests.support.simulations import calibrated


class Net(nn.Module):
    """Modules with and without parameters, a fused call, a functional layer, a raw product, a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x, _ = self.gru(x)
        return F.linear(x.mean(1), self.weight)


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 4, 4, generator=generator) for _ in range(8)]


@pytest.fixture
def sim(batches: list[Tensor]) -> QuantizationSimModel:
    torch.manual_seed(0)
    return calibrated(QuantizationSimModel(Net().eval(), batches[0]), batches)


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Paused(nn.Module):
    """A layer that waits in the middle of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on, self.on = threading.Event(), threading.Event(), False
        self.layer = nn.Linear(4, 4)

    def __deepcopy__(self, memo: dict[int, Any]) -> Paused:
        new = Paused()
        new.load_state_dict(self.state_dict())
        return new

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            self.on = False
            self.inside.set()
            assert self.go_on.wait(300)
        return self.layer(x).relu()


class Meanwhile:
    """Runs a function in another thread, which waits inside the model's forward while the block runs."""

    def __init__(self, model: Paused, function: Callable[[], Any]) -> None:
        self.model, self.function, self.error = model, function, None
        model.on = True
        self.thread = threading.Thread(target=self._run, name="other")

    def _run(self) -> None:
        try:
            self.function()
        except Exception as error:
            self.error = error

    def __enter__(self) -> None:
        self.thread.start()
        assert self.model.inside.wait(300)

    def __exit__(self, *error: object) -> None:
        self.model.go_on.set()
        self.thread.join()
        self.model.inside.clear()
        self.model.go_on.clear()
        assert self.error is None


@pytest.fixture
def paused() -> QuantizationSimModel:
    sim = QuantizationSimModel(nn.Sequential(Paused(), nn.BatchNorm1d(4)).eval(), torch.randn(2, 4))
    sim.compute_encodings([torch.randn(8, 4)])
    return sim


def test_a_pool_of_threads_gives_the_answers_of_one(sim: QuantizationSimModel, batches: list[Tensor]) -> None:
    with torch.no_grad():
        expected = [sim.model(x) for x in batches]
        fresh = copy.deepcopy(
            sim
        )  # whose first forwards, with biases to derive and weights to quantize, are concurrent

        def run(i: int) -> Tensor:
            with torch.no_grad():
                found: Tensor = fresh.model(batches[i % 8])
            return found

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(run, range(160)))
    assert all(torch.equal(y, expected[i % 8]) for i, y in enumerate(found))
    assert not fresh._simulator.unseen and not fresh._interceptor.running


def test_a_web_server_that_runs_forwards_beside_its_loop(sim: QuantizationSimModel, batches: list[Tensor]) -> None:
    expected = [sim.model(x).detach() for x in batches]

    async def serve() -> list[Tensor]:
        return await asyncio.gather(*(asyncio.to_thread(sim.model, batches[i % 8]) for i in range(48)))

    assert all(torch.equal(y.detach(), expected[i % 8]) for i, y in enumerate(asyncio.run(serve())))


def test_float_and_simulated_forwards_and_captures_at_the_same_time(sim, batches):
    with torch.no_grad():
        simulated = [sim.model(x) for x in batches]
        with sim.in_float():
            floats = [sim.model(x) for x in batches]
    tapped = [sim.capture(["relu.output[0]"], x)["relu.output[0]"][0] for x in batches]

    def run(i: int) -> bool:
        x, kind = batches[i % 8], i % 3
        with torch.no_grad():
            if kind == 0:
                return torch.equal(sim.model(x), simulated[i % 8])
            if kind == 1:
                with sim.in_float():
                    return torch.equal(sim.model(x), floats[i % 8])
            return torch.equal(sim.capture(["relu.output[0]"], x)["relu.output[0]"][0], tapped[i % 8])

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(run, range(96)))


def test_an_error_in_one_thread_leaves_the_others_alone(sim: QuantizationSimModel, batches: list[Tensor]) -> None:
    expected = sim.model(batches[0]).detach()

    def run(i: int) -> str | bool | None:
        if i % 2:
            with pytest.raises(RuntimeError):
                sim.model(torch.zeros(1, 2, 4, 4))
            return sim._interceptor.failed_in
        return torch.equal(sim.model(batches[0]).detach(), expected)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(run, range(40))) == {"conv", True}


def test_the_block_of_one_thread_does_not_catch_the_calls_of_another(sim, batches):
    with sim.active(), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(lambda: sim._interceptor.running).result()
        assert torch.equal(pool.submit(torch.relu, torch.tensor([-1.0, 2.0])).result(), torch.tensor([0.0, 2.0]))


def test_replicas_compute_with_their_own_parameters(sim: QuantizationSimModel, batches: list[Tensor]) -> None:
    """As ``nn.parallel.replicate`` makes them, which needs more devices than one."""
    expected = sim.model(batches[0]).detach()
    copies = {id(m): m._replicate_for_data_parallel() for m in sim.model.modules()}
    for module in sim.model.modules():
        replica = copies[id(module)]
        for name, child in module._modules.items():
            setattr(replica, name, copies[id(child)])
        replica._former_parameters = {}
        for name, parameter in module._parameters.items():
            value = None if parameter is None else parameter.detach().clone()
            setattr(replica, name, value)
            if value is not None:
                replica._former_parameters[name] = value
    root = copies[id(sim.model)]
    with torch.no_grad(), ThreadPoolExecutor(2) as pool:
        found = pool.submit(root, batches[0]).result()
        assert torch.equal(found, expected) and not sim._simulator.unseen
        root.weight.mul_(2.0)  # its own, not that of the original
        assert not torch.equal(pool.submit(root, batches[0]).result(), expected)
    assert torch.equal(sim.model(batches[0]).detach(), expected)


def test_calibration_refuses_a_second_thread_by_name(paused: QuantizationSimModel) -> None:
    x, model = torch.randn(8, 4), paused.model[0]
    fresh = copy.deepcopy(paused)
    with Meanwhile(model, lambda: paused.compute_encodings([x])):
        for use in (lambda: paused.model(x), lambda: paused.compute_encodings([x]), lambda: paused.capture([], x)):
            with pytest.raises(BusyError, match=r"thread 'other' is changing it \(calibration\)"):
                use()
        fresh.model(x)  # the remedy: a copy of its own
    paused.model(x)  # and the other one: afterwards


def test_calibration_is_refused_while_another_thread_runs_the_model(paused: QuantizationSimModel) -> None:
    x, model = torch.randn(8, 4), paused.model[0]
    expected = paused.model(x).detach()
    with Meanwhile(model, lambda: paused.model(x)):
        with pytest.raises(BusyError, match="calibration: .*thread 'other' is running it.*deepcopy"):
            paused.compute_encodings([x * 3])
        with pytest.raises(BusyError, match="export: .*thread 'other' is running it"):
            paused.verify()
        assert torch.equal(paused.model(x).detach(), expected)  # what was refused changed nothing
    assert torch.equal(paused.model(x).detach(), expected)


def test_a_callback_that_calibrates_from_several_threads_is_refused(sim, batches):
    def callback(model: nn.Module) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(model, batches))

    with pytest.raises(BusyError, match=r"is changing it \(calibration\)"):
        sim.compute_encodings(callback)


def test_training_statistics_take_one_thread(paused: QuantizationSimModel) -> None:
    x, model = torch.randn(8, 4), paused.model[0]
    paused.model.train()
    with (
        Meanwhile(model, lambda: paused.model(x)),
        pytest.raises(BusyError, match="1: this BatchNorm1d updates its running statistics.*thread"),
    ):
        paused.model(x)
    paused.model(x)
    paused.model.eval()
    with Meanwhile(model, lambda: paused.model(x)):
        paused.model(x)
    paused.model.train()
    with Meanwhile(model, lambda: paused.model(x)), pytest.raises(BusyError, match="capture"):
        paused.capture([], x)


def test_a_model_that_is_recorded_runs_in_other_threads_as_it_is() -> None:
    paused = Paused().eval()
    model = nn.Sequential(paused)
    x = torch.randn(2, 4)
    expected = model(x).detach()
    for look in (lambda: record(model, [x]), lambda: check_model(model, [x], progress=False)):
        with Meanwhile(paused, look):
            assert torch.equal(model(x).detach(), expected)
    assert "forward" not in vars(paused)


def test_a_thread_that_ended_inside_a_block_blocks_nobody(paused: QuantizationSimModel) -> None:
    def leave_open() -> None:
        paused._interceptor._open(paused._interceptor.here)

    thread = threading.Thread(target=leave_open)
    thread.start()
    thread.join()
    paused.compute_encodings([torch.randn(4, 4)])


def test_uncalibrated_is_said_in_every_thread(batches: list[Tensor]) -> None:
    sim = QuantizationSimModel(Net().eval(), batches[0])
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(sim.model, batches[0]) for _ in range(4)]:
            assert isinstance(future.exception(), CalibrationError)


def test_a_task_that_awaits_inside_a_block_is_told_apart_from_others_of_its_thread(sim, batches):
    """What another task computes meanwhile is its own; a simulation that it runs then is refused, and works elsewhere."""
    sims = [sim, copy.deepcopy(sim)]
    x = batches[0]
    plain = Net().eval()
    wanted, expected = plain(x), sims[0].model(x)

    async def holder(inside: asyncio.Event, done: asyncio.Event) -> Tensor:
        with sims[0].active():
            inside.set()
            await done.wait()
            return sims[0].model(x)

    async def main() -> Tensor:
        inside, done = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(holder(inside, done))
        await inside.wait()
        assert torch.equal(plain(x), wanted)
        assert torch.equal(sims[1].model(x), sims[1].model(x))
        for sim in sims:
            with pytest.raises(BusyError, match=r"another asyncio task.*Remedy: await outside"), sim.active():
                pass
        with pytest.raises(BusyError, match="another asyncio task"):
            sims[0].model(x)
        assert torch.equal(await asyncio.to_thread(sims[0].model, x), expected)
        done.set()
        return await first

    assert torch.equal(asyncio.run(main()), expected)
    assert torch.equal(plain(x), wanted) and torch.equal(sims[0].model(x), expected)


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
def arrays() -> list[Any]:
    generator = np.random.default_rng(1)
    return [generator.normal(size=(2, 3, 8, 8)).astype(np.float32) for _ in range(4)]


@pytest.fixture
def onnx_sim(arrays: list[Any]) -> OnnxSim:
    return calibrated(OnnxSim(_model(), threads=1), arrays)


def test_concurrent_runs_open_one_session_and_agree(onnx_sim: OnnxSim, arrays: list[Any]) -> None:
    expected = [onnx_sim.run(x)[0] for x in arrays]
    onnx_sim.forget_simulations()
    with ThreadPoolExecutor(8) as pool:
        sessions = list(pool.map(lambda _: onnx_sim.session, range(16)))
        found = list(pool.map(lambda i: onnx_sim.run(arrays[i % 4])[0], range(64)))
    assert len(set(map(id, sessions))) == 1
    assert all(np.array_equal(y, expected[i % 4]) for i, y in enumerate(found))


def test_concurrent_captures_agree(onnx_sim: OnnxSim, arrays: list[Any]) -> None:
    names = [name for name, site in onnx_sim.quantizers.items() if site.role in ("input", "output")]
    expected = onnx_sim.capture(names, arrays[0])
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: onnx_sim.capture(names, arrays[0]), range(12)):
            assert all(np.array_equal(found[n][0], expected[n][0]) for n in names)


def test_calibration_of_an_onnx_model_refuses_a_second_thread_by_name(onnx_sim, arrays, tmp_path):
    inside, go_on, session = threading.Event(), threading.Event(), onnx_sim.session
    expected, fresh = onnx_sim.run(arrays[0])[0], OnnxSim(_model(), threads=1)
    fresh.load_encodings(onnx_sim.save_encodings(tmp_path / "before"))

    def callback(calibration: Any) -> None:
        calibration.run(None, {"x": arrays[0]})
        inside.set()
        assert go_on.wait(300)

    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        future = pool.submit(onnx_sim.compute_encodings, callback)
        try:
            assert inside.wait(300)
            for use in (
                lambda: onnx_sim.run(arrays[0]),
                lambda: onnx_sim.session,
                lambda: onnx_sim.compute_encodings(arrays),
            ):
                with pytest.raises(BusyError, match=r"thread 'other_0' is changing it \(calibration\)"):
                    use()
            # a session that was opened before, and another simulation, are not concerned
            assert np.array_equal(session.run(None, {"x": arrays[0]})[0], expected)
            assert np.array_equal(fresh.run(arrays[0])[0], expected)
        finally:
            go_on.set()
        future.result()
    onnx_sim.run(arrays[0])


def test_a_callback_that_calibrates_an_onnx_model_from_several_threads_is_refused(onnx_sim, arrays):
    def callback(session: Any) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda x: session.run(None, {"x": x}), arrays))

    with pytest.raises(BusyError, match=r"is changing it \(calibration\)"):
        onnx_sim.compute_encodings(callback)
