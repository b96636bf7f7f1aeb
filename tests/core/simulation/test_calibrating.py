"""``with sim.calibrating()``: the calibration of a loop of the user's own, for both front ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from bitwright import onnx as onnx_front
from bitwright import torch as torch_front
from bitwright.core.simulation.sites import SiteMap
from bitwright.errors import CalibrationError

BATCHES = [np.random.default_rng(i).normal(size=(4, 6)).astype(np.float32) * (i + 1) for i in range(6)]
Run = Callable[[Any, Any], None]


def torch_sim() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return torch_front.QuantizationSimModel(model.train(), torch.ones(4, 6), quant_scheme="tf_enhanced")


def onnx_sim() -> Any:
    graph = onnx.parser.parse_graph("main (float[N, 6] x) => (float[N, 8] y) { h = MatMul(x, w)  y = Relu(h) }")
    weight = np.random.default_rng(7).normal(size=(6, 8)).astype(np.float32)
    graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    return onnx_front.QuantizationSimModel(model, quant_scheme="tf_enhanced")


def run_torch(model: Any, batch: Any) -> None:
    model(torch.from_numpy(batch))


def run_onnx(session: Any, batch: Any) -> None:
    session.run(None, {"x": batch})


@pytest.fixture(params=[(torch_sim, run_torch), (onnx_sim, run_onnx)], ids=["torch", "onnx"])
def front(request: Any) -> tuple[Any, Run]:
    make, run = request.param
    return make(), run


def encodings(sim: Any) -> dict[str, Any]:
    return {name: site.encoding for name, site in sim.quantizers.items()}


def test_block_finds_what_a_call_finds_and_freezes_once(front, monkeypatch):
    sim, run = front
    sim.compute_encodings(lambda model: [run(model, batch) for batch in BATCHES])
    expected, frozen, plain = encodings(sim), [], SiteMap.freeze_activations
    monkeypatch.setattr(SiteMap, "freeze_activations", lambda self: (frozen.append(1), plain(self))[1])
    with sim.calibrating() as model:
        for batch in BATCHES:
            run(model, batch)
        assert not frozen
    assert frozen == [1]
    assert encodings(sim) == expected and sim.calibrated


def test_resumed_block_adds_to_the_statistics(front):
    sim, run = front
    sim.compute_encodings(lambda model: [run(model, batch) for batch in BATCHES])
    expected = encodings(sim)
    for part, resume in ((BATCHES[:2], False), (BATCHES[2:], True)):
        with sim.calibrating(resume=resume) as model:
            for batch in part:
                run(model, batch)
    assert encodings(sim) == expected


def test_block_that_fails_leaves_the_earlier_encodings(front):
    sim, run = front
    sim.compute_encodings(lambda model: run(model, BATCHES[0]))
    expected = encodings(sim)
    with pytest.raises(ZeroDivisionError), sim.calibrating() as model:
        run(model, BATCHES[3])
        raise ZeroDivisionError
    with pytest.raises(CalibrationError, match=r"did not run in the block.*inside the block"), sim.calibrating():
        pass
    assert encodings(sim) == expected and sim.calibrated
    with sim.calibrating() as model:  # and another one can start
        run(model, BATCHES[3])
    assert encodings(sim) != expected


def test_block_inside_of_another_is_refused_and_the_outer_one_goes_on(front):
    sim, run = front
    sim.compute_encodings(lambda model: [run(model, batch) for batch in BATCHES[:2]])
    expected = encodings(sim)
    with sim.calibrating() as model:
        run(model, BATCHES[0])
        with pytest.raises(CalibrationError, match="being calibrated already"):
            sim.compute_encodings(lambda other: run(other, BATCHES[5]))
        run(model, BATCHES[1])
    assert encodings(sim) == expected


def test_interrupted_block_keeps_what_it_saw(front, caplog):
    sim, run = front
    sim.compute_encodings(lambda model: run(model, BATCHES[2]))
    expected = encodings(sim)
    with pytest.raises(KeyboardInterrupt), sim.calibrating() as model:
        run(model, BATCHES[2])
        raise KeyboardInterrupt
    assert encodings(sim) == expected and "resume=True" in caplog.text


def test_torch_modules_get_their_training_flags_back():
    sim = torch_sim()
    sim.model.train()
    with sim.calibrating() as model:
        assert not model.training and not torch.is_grad_enabled()
        run_torch(model, BATCHES[0])
    assert sim.model.training and torch.is_grad_enabled()


def test_session_of_an_ended_calibration_is_refused():
    sim = onnx_sim()
    with sim.calibrating() as session:
        run_onnx(session, BATCHES[0])
    with pytest.raises(CalibrationError, match=r"has ended"):
        run_onnx(session, BATCHES[0])
