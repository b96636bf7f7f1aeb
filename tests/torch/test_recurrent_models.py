"""Recurrent models of every kind: they run, keep their sites at any length, keep their accuracy, and are exported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from bitwright.aimet_torch.model_preparer import prepare_model
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ExportError
from bitwright.torch import QuantizationSimModel
from tests.support import data
from tests.support.recurrent_zoo import RECURRENT_ZOO, Recurrent, Stateful
from tests.support.sessions import integer_session

CASES = [pytest.param(case, id=name) for name, case in RECURRENT_ZOO.items()]


def build(case: Recurrent) -> nn.Module:
    torch.manual_seed(1)
    return case.build().eval()


def simulated(case: Recurrent, model: nn.Module, length: int = 5) -> QuantizationSimModel:
    sim = QuantizationSimModel(model, case.example(length, 0))
    sim.compute_encodings([case.example(length, seed) for seed in range(4)])
    return sim


@pytest.mark.quick_variants("quasi-rnn", "halting", "siamese", "stateful")
@pytest.mark.parametrize("case", CASES)
def test_it_runs_at_any_length_with_the_same_sites(case: Recurrent) -> None:
    model = build(case)
    sim = simulated(case, model)
    for length in (5, 1, 8):
        example = case.example(length, 9)
        found = sim.model(*copy.deepcopy(example)).detach()
        assert found.shape == build(case)(*example).shape
    assert not sim._simulator.unseen
    for length in (2, 7):
        assert list(simulated(case, build(case), length).quantizers) == list(sim.quantizers)


@pytest.mark.slow_variants("teacher-forcing")
@pytest.mark.parametrize("case", CASES)
def test_it_stays_near_the_float_model(case: Recurrent) -> None:
    sim = simulated(case, build(case))
    ratios = []
    for seed in range(10, 14):
        example = case.example(5, seed)
        expected = build(case)(*example).detach()
        if isinstance(sim.model, Stateful):
            sim.model.state = None
        ratios.append(sqnr(expected.numpy(), sim.model(*example).detach().numpy()))
    assert np.median(ratios) > case.sqnr, ratios


@pytest.mark.slow_variants("residual")
@pytest.mark.parametrize("case", CASES)
def test_it_can_be_trained(case: Recurrent) -> None:
    sim = simulated(case, build(case))
    sim.model.train()
    sim.model(*case.example(4, 3)).square().mean().backward()
    reached = [name for name, p in sim.model.named_parameters() if p.grad is not None and bool(p.grad.any())]
    assert {"weight_hh", "weight_hh_l0", "weight"} & {name.rpartition(".")[2] for name in reached}


@pytest.mark.parametrize("case", CASES)
def test_prepare_model_returns_the_same_function(case: Recurrent) -> None:
    example = case.example(4, 2)
    assert torch.equal(prepare_model(build(case))(*example), build(case)(*example))


def test_both_sides_of_teacher_forcing_share_the_decoder() -> None:
    case = RECURRENT_ZOO["attention"]
    forced = RECURRENT_ZOO["teacher-forcing"].example(5, 0)
    one = QuantizationSimModel(build(case), case.example(5, 0))
    both = QuantizationSimModel(build(case), case.example(5, 0), examples=[forced])
    assert set(one.quantizers) == set(both.quantizers)


def test_a_longer_example_adds_nothing_to_a_halting_model() -> None:
    case = RECURRENT_ZOO["halting"]
    model = build(case)
    sim = simulated(case, model)
    model.halt.bias.data.fill_(-6.0)  # never sure: eight steps
    with torch.no_grad():
        sim.model.halt.bias.fill_(-6.0)
        expected, found = model(*case.example(1, 5)), sim.model(*case.example(1, 5))
    assert sqnr(expected.numpy(), found.numpy()) > 20 and not sim._simulator.unseen


# ---- a trained language model


def language_model(preset: str, **rules: object) -> tuple[nn.Module, QuantizationSimModel]:
    """The character model and its simulation, calibrated on 64 rows of 128 characters."""
    model, text = data.trained("lstm_char"), data.shakespeare("train")
    batches = list(text[: 4 * 16 * 128].view(4, 16, 128))
    sim = QuantizationSimModel(model, batches[0], preset=preset, config_file=rules or None)
    sim.compute_encodings(batches)
    return model, sim


def rows(every: int) -> Tensor:
    """Rows of 129 characters of the test text, one in ``every``."""
    text = data.shakespeare("test")
    return text[: len(text) // 129 * 129].view(-1, 129)[::every]


def layer_sqnr(model: nn.Module, sim: QuantizationSimModel) -> float:
    """Decibels of the hidden states of the second layer."""
    ids, site = rows(27)[:, :-1], "lstm.l1.forward.output[0]"
    with torch.no_grad():
        expected = model.lstm(model.embedding(ids))[0].transpose(0, 1)
    return sqnr(expected.numpy(), sim.capture([site], ids)[site][0].numpy())


def test_eight_bits_keep_the_perplexity_of_a_language_model(shared_data: object) -> None:
    model, sim = language_model("w8a8")
    expected, found = (data.perplexity(m, rows(16)) for m in (model, sim.model))
    assert found < 1.01 * expected
    assert layer_sqnr(model, sim) > 35


# name in docs/recurrent.md -> preset, rules, bounds of the perplexity relative to float, least SQNR of the second layer
LANGUAGE_MODEL = {
    "W8A8": ("w8a8", {}, (0.999, 1.005), 36),
    "W8A16": ("w8a16", {}, (0.999, 1.004), 38),
    "W4A8": ("w4a8", {}, (1.02, 1.07), 15),
    "W8A8, cell in 8 bits": ("w8a8", {"rules": [{"match": "*.cell", "inner": "int8"}]}, (1.03, 1.10), 14),
    "W8A8, pre-activations in 8 bits": (
        "w8a8", {"rules": [{"match": "*.pre", "inner": "int8"}]}, (0.999, 1.006), 31,
    ),
    "W8A8, boundary only": ("w8a8", {"recurrent": "boundary_only"}, (0.999, 1.005), 36),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODEL)
def test_the_table_of_the_language_model(name: str, shared_data: object) -> None:
    preset, rules, (low, high), least = LANGUAGE_MODEL[name]
    model, sim = language_model(preset, **rules)
    expected, found = (data.perplexity(m, rows(4)) for m in (model, sim.model))
    assert low * expected < found < high * expected
    assert layer_sqnr(model, sim) > least


@pytest.mark.parametrize("make", [
    lambda: nn.LSTM(32, 64), lambda: nn.LSTM(32, 64, 2, bidirectional=True), lambda: nn.GRU(32, 64), lambda: nn.RNN(32, 64),
], ids=["lstm", "lstm-2-both", "gru", "rnn"])  # fmt: skip
def test_eight_bits_keep_thirty_decibels(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    batches = [torch.randn(50, 8, 32) for _ in range(4)]
    sim = QuantizationSimModel(model, batches[0])
    sim.compute_encodings(batches[:3])
    with torch.no_grad():
        assert sqnr(model(batches[3])[0].numpy(), sim.model(batches[3])[0].numpy()) > 30


# ---- export


#: models whose steps depend on values, or that keep a state of their own: torch.export refuses them, or they change as they run
NOT_EXPORTED = {"halting", "speech", "stateful"}
#: which hypotheses survive depends on sums that kernels round in their own way
NOT_EQUAL = {"beams"}


#: the quick ones
EXPORTED_QUICKLY = {"residual", "siamese"}


@pytest.mark.slow_variants("residual")
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in EXPORTED_QUICKLY else pytest.mark.slow)
    for name in RECURRENT_ZOO if name not in NOT_EXPORTED | NOT_EQUAL
])  # fmt: skip
def test_every_step_agrees_with_the_runtime(name: str) -> None:
    case = RECURRENT_ZOO[name]
    report = simulated(case, build(case)).verify(case.example(5, 7))
    assert not report.unchecked and not report.failures
    for row in report.rows:
        assert row.ok or row.as_float.lsb <= 1, row


def test_a_loop_as_long_as_an_integer_input_says_is_exported_with_that_length(tmp_path: Path) -> None:
    case = RECURRENT_ZOO["beams"]
    exported = simulated(case, build(case)).export(tmp_path, "beams", case.example(5, 7))
    (note,) = [note for note in exported.notes if note.startswith("path:")]
    assert "recurrent_zoo.py" in note and "in forward" in note


@pytest.mark.slow_variants("halting")
@pytest.mark.parametrize("name", ["speech", "halting"])
def test_what_cannot_be_exported_says_why(name: str) -> None:
    case = RECURRENT_ZOO[name]
    with pytest.raises(ExportError, match="cannot be exported to ONNX: .*Remedy: make the part it names independent"):
        simulated(case, build(case)).verify(case.example(5, 7))


@pytest.mark.slow_variants("per_channel-scan")
@pytest.mark.parametrize("form", ["scan", "native"])
@pytest.mark.parametrize("granularity", [
    pytest.param("per_tensor", marks=pytest.mark.slow), pytest.param("per_gate", marks=pytest.mark.slow), "per_channel",
])  # fmt: skip
def test_files_run_at_any_length_and_batch(form: str, granularity: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rules = {"rules": [{"op": ["LSTM"], "weight": {"granularity": granularity}}]}
    x = torch.randn(6, 3, 5)
    sim = QuantizationSimModel(nn.LSTM(5, 8, 2, bidirectional=True), x, config_file=rules)
    sim.compute_encodings([x])
    auto = torch.export.Dim.AUTO
    files = sim.export(tmp_path, "net", dynamic_shapes={"input": {0: auto, 1: auto}}, recurrent=form)
    kinds = {node.op_type for node in ir.load(files.qdq).graph}
    assert ("Scan" if form == "scan" else "LSTM") in kinds
    assert "LSTM" in {node.op_type for node in ir.load(files.float_model).graph}
    session = integer_session(files.qdq)
    for shape in ((6, 3, 5), (1, 2, 5), (11, 4, 5)):
        x = torch.randn(shape)
        (found, *_), expected = session.run(None, {"input": x.numpy()}), sim.model(x)[0].detach().numpy()
        assert sqnr(expected, found) > (60 if form == "scan" else 25)


def test_encodings_name_gates_and_directions(tmp_path: Path) -> None:
    x = torch.randn(6, 3, 5)
    sim = QuantizationSimModel(nn.GRU(5, 8, bidirectional=True), x)
    sim.compute_encodings([x])
    for version in ("0.6.1", "2.0.0"):
        files = sim.export(tmp_path / version, "net", encoding_version=version)
        text = files.encodings.read_text()
        for name in ("l0.forward.update.gate", "l0.reverse.reset.pre", "l0.reverse.W"):
            assert f'"{name}"' in text, (version, name)
