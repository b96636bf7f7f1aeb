"""Detector heads: boxes in pixels and probabilities in one tensor keep their detections, in both front ends and the file."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright.analysis.subject import open_subject
from bitwright.core.placement.rules import Rule, default_rules
from bitwright.core.simulation.calibration import unlike_joins
from bitwright.onnx.program import OnnxSimulation
from bitwright.precision.measure import Noise
from bitwright.recipes.widen import widen
from bitwright.torch.program import TorchSimulation
from tests.conformance.test_exact import simulated
from tests.conformance.test_ptq import exported
from tests.support.simulations import calibrated

CLASSES = 3


class Detector(nn.Module):
    """One level of a detector; ``head`` says how its boxes and scores are decoded and joined."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.head = head
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
        self.box = nn.Conv2d(32, 16 if head == "expectation" else 4, 1)
        self.score = nn.Conv2d(32, CLASSES, 1)
        self.mix = nn.Linear(4 + CLASSES, 4 + CLASSES)
        self.register_buffer("bins", torch.arange(4.0).view(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        box, score = self.box(features).flatten(2), self.score(features).flatten(2)
        if self.head == "plain":
            return self.mix(torch.cat([box, score], 1).transpose(1, 2))
        score = score.mul(8).sigmoid()
        if self.head == "expectation":  # of a softmax over stored distances
            box = (
                nn.functional.conv2d(box.view(len(x), 4, 4, -1).transpose(1, 2).softmax(1), self.bins).flatten(1, 2)
                * 100
            )
        else:
            box = box.exp() * 200
        if self.head == "written":  # into a part of the answer
            answer = torch.cat([box, score], 1)
            answer[:, :2] = answer[:, :2] * 2 + 1
            return answer
        if self.head == "stack":
            return torch.stack([box[:, :CLASSES], score], 1).flatten(1, 2)
        joined = torch.cat([box, score], 1)
        return self.mix(joined.transpose(1, 2)).transpose(1, 2) if self.head == "mixed" else joined


def made(head: str) -> tuple[Detector, Tensor]:
    torch.manual_seed(0)
    return Detector(head).eval(), torch.rand(8, 3, 32, 32)


def matched(wanted: np.ndarray, found: np.ndarray) -> float:
    """Share of the scores of at least 0.6 that are at least 0.5 in ``found``, with coordinates within 5 % of the largest."""
    clear = wanted[:, -CLASSES:] >= 0.6
    near = (np.abs(wanted[:, :-CLASSES] - found[:, :-CLASSES]) < 0.05 * wanted[:, :-CLASSES].max()).all(
        1, keepdims=True
    )
    assert 0.02 < clear.mean() < 0.98
    return float((clear & (found[:, -CLASSES:] >= 0.5) & near).sum() / clear.sum())


@pytest.mark.parametrize("front", ["torch", "onnx"])
@pytest.mark.parametrize("head", ["joined", "expectation", "written", "stack"])
def test_detections_stay(front: str, head: str) -> None:
    model, x = made(head)
    wanted = model(x).detach().numpy()
    _, found = simulated(front, model, x)
    assert matched(wanted, found) >= 0.99
    assert len(np.unique(found[:, -CLASSES:])) > 100  # a grid shared with the boxes has one or two values for them


def test_the_exported_file_has_them_too(tmp_path: Path) -> None:
    model, x = made("joined")
    sim, found = simulated("torch", model, x)
    sim.export(tmp_path, "detector", dummy_input=x)
    session = onnxruntime.InferenceSession(tmp_path / "detector.onnx", providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert matched(model(x).detach().numpy(), answer) >= 0.99
    assert np.abs(answer[:, -CLASSES:] - found[:, -CLASSES:]).max() < 0.05


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_a_join_of_unlike_ranges_before_a_layer_is_warned_of(front: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = made("mixed")
    with caplog.at_level("WARNING", "bitwright"):
        sim, _ = simulated(front, model, x)
    (told,) = [r.message for r in caplog.records if r.message.startswith("joins of unlike ranges: ")]
    (join,) = unlike_joins(sim.graph, sim.quantizers, sim.plan.shared)
    assert join.site in told and join.large[0] in told and join.small[0] in told
    assert "from 0 to 1 share one grid with a step of" in told
    assert f"Remedy: leave the join in float with Rule('{join.site}', port='output', quantized=False)" in told
    assert join.large[1][1] > 100 and join.small[1] == pytest.approx((0.0, 1.0)) and join.codes < 2


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_the_remedy_of_the_warning_ends_it(front: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = made("mixed")
    sim, _ = simulated(front, model, x)
    (join,) = unlike_joins(sim.graph, sim.quantizers, sim.plan.shared)
    wide = default_rules().extended([Rule(join.site, port="output", format="uint16")])
    sim, _ = simulated(front, model, x, config_file=wide)
    assert not unlike_joins(sim.graph, sim.quantizers, sim.plan.shared)


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_joins_of_like_ranges_are_not_warned_of(front: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = made("plain")
    with caplog.at_level("WARNING", "bitwright"):
        sim, _ = simulated(front, model, x)
    assert not unlike_joins(sim.graph, sim.quantizers, sim.plan.shared)
    assert not [r for r in caplog.records if "unlike" in r.message]


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_the_default_recipe_raises_a_join_that_loses_an_operand(front: str) -> None:
    model, x = made("mixed")
    sim, _ = simulated(front, model, x)
    (join,) = unlike_joins(sim.graph, sim.quantizers, sim.plan.shared)
    program, batch = (TorchSimulation, x) if front == "torch" else (OnnxSimulation, x.numpy())
    report = widen(program(sim), [batch], allowance=0.0, memory=0.0)
    assert join.site in [raised.site for raised in report.raised]


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_a_join_that_the_model_returns_is_raised_where_rules_keep_it_on_a_grid(front: str) -> None:
    model, x = made("joined")
    joined = replace(default_rules(), float_tail=False, split_joins=False)
    sim, lost = simulated(front, model, x, config_file=joined)
    program, batch = (TorchSimulation, x) if front == "torch" else (OnnxSimulation, x.numpy())
    (join,) = unlike_joins(sim.graph, sim.quantizers, sim.plan.shared)
    assert len(np.unique(lost[:, -CLASSES:])) < 4
    report = widen(program(sim), [batch])
    assert join.site in [raised.site for raised in report.raised]


class Choosing(nn.Module):
    """Returns the boxes that its scores choose; ``how`` says what the choice is followed by."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU())
        self.box, self.score, self.last = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 1, 1), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        box, score = self.box(features).flatten(2).transpose(1, 2), self.score(features).flatten(1).sigmoid()
        best, places = score.topk(20, 1)
        places = places.unsqueeze(-1).expand(-1, -1, 4)
        chosen = torch.gather(box, 1, places) * 50
        if self.how == "put back":  # experts of a language model: rows return to where they were
            return self.last(torch.zeros_like(box).scatter(1, places, chosen))
        if self.how == "levels":  # rows of each size are read from a level of their own, and put back among the others
            rows = chosen.flatten(0, 1)
            large, read = rows[:, 0] > rows[:, 0].mean(), torch.zeros_like(rows)
            for size in (large, ~large):
                at = size.nonzero()[:, 0]
                read = read.index_put((at,), rows[at])
            chosen = self.last(read).unflatten(0, chosen.shape[:2])
        if self.how == "two stages":
            chosen = self.last(chosen)
        answer = chosen[best > best.mean()]
        return (answer, best) if self.how == "one stage" else answer


@pytest.mark.parametrize("front", ["torch", "onnx"])
@pytest.mark.parametrize("how", ["one stage", "two stages", "levels", "put back"])
def test_outputs_whose_rows_are_chosen_are_judged_before_the_choice(front: str, how: str) -> None:
    torch.manual_seed(0)
    model, batches = Choosing(how).eval(), [torch.rand(4, 3, 32, 32) for _ in range(2)]
    options: dict[str, Any] = {"recipe": ["fold"], "progress": False}
    if front == "torch":
        result: Any = bt.quantize(model, batches, **options)
    else:
        result = bo.quantize(exported(model, batches[0]), [x.numpy() for x in batches], **options)
    names = [part.name.removesuffix("/Conv").removeprefix("/") for part in result.quality.parts]
    if how == "put back":
        assert len(names) == 1 and not {"box", "score"} & {*names} and "chooses" not in result.headline
        return
    assert names == ["box", "score"] and "before the model chooses rows" in result.headline
    assert result.quality.worst.sqnr > 30  # row by row, lost and exchanged rows are noise without a bound
    data = batches if front == "torch" else [x.numpy() for x in batches]
    assert 0 < Noise(open_subject(result.sim), data).measure() < 1e-3  # by which precisions are chosen


@pytest.mark.parametrize("front", ["torch", "onnx"])
@pytest.mark.parametrize("how", ["two stages", "levels"])
def test_weights_after_a_selection_of_rows_are_fitted_to_matching_rows(front: str, how: str) -> None:
    torch.manual_seed(0)
    model, batches = Choosing(how).eval(), [torch.rand(4, 3, 32, 32) for _ in range(4)]
    options: dict[str, Any] = {
        "recipe": ["gptq"],
        "progress": False,
        "preset": "w4a8",
    }  # the choice differs in many places
    if front == "torch":
        sim: Any = bt.quantize(model, batches, **options).sim
        program: Any = TorchSimulation(sim)
    else:
        sim = bo.quantize(exported(model, batches[0]), [x.numpy() for x in batches], **options).sim
        program = OnnxSimulation(sim)
    (site,) = (site for site in sim.quantizers.values() if site.role == "weight" and "last" in site.name)
    wanted, found = model.last.weight.detach(), program.weight(site.name)
    off = (found if found.shape == wanted.shape else found.T) - wanted
    assert float((off.abs().amax(1) / torch.tensor(np.asarray(site.encoding.scale))).max()) < 2.5


def test_a_quantizer_that_is_switched_off_is_captured() -> None:
    model, x = made("joined")
    sim, _ = simulated("torch", model, x)
    wanted = sim.capture(["box.output[0]"], x)["box.output[0]"]
    for site in sim.quantizers.values():
        site.enabled = False
    (found,) = sim.capture(["box.output[0]"], x)["box.output[0]"]
    assert torch.equal(found, model.box(model.body(x))) and not torch.equal(found, wanted[0])


class Trained(nn.Module):
    """As the detectors of ultralytics: given a batch with labels, its forward is the loss; parts stand in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList([nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)])
        self.heads = nn.ModuleDict({"box": nn.Conv2d(8, 4, 1), "score": nn.Conv2d(8, CLASSES, 1)})

    def predict(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            box, score = self.predict(batch["img"])
            return nn.functional.l1_loss(box, batch["box"]) + nn.functional.cross_entropy(score, batch["cls"])
        for layer in self.model:
            batch = layer(batch).relu()
        box, score = self.heads["box"](batch), self.heads["score"](batch)
        if self.training:
            return box.mean((2, 3)), score.mean((2, 3))
        return torch.cat([box.flatten(2).exp() * 100, score.flatten(2).sigmoid()], 1)

    forward = predict  # a class may call its forward anything


def test_a_trainer_of_another_package_trains_averages_saves_and_loads_a_simulation() -> None:
    torch.manual_seed(0)
    model, x = Trained().eval(), torch.rand(4, 3, 32, 32)
    sim = calibrated(bt.QuantizationSimModel(model, x, preset="w4a8"), [x])
    before = sim.model(x).detach()
    average, optimizer = copy.deepcopy(sim.model).eval(), torch.optim.AdamW(sim.model.parameters(), 1e-2)
    labels = {"img": x, "box": torch.rand(4, 4), "cls": torch.arange(4) % CLASSES}
    losses = []
    sim.model.train()
    for _ in range(8):
        loss = sim.model(labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    with torch.no_grad():
        for name, value in average.state_dict().items():
            value.lerp_(sim.model.state_dict()[name], 0.9)
    file = io.BytesIO()
    torch.save(copy.deepcopy(average).half(), file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False).float().eval()
    sim.model.load_state_dict(average.half().float().state_dict())
    sim.model.eval()
    assert torch.equal(loaded(x), sim.model(x))
    assert not torch.equal(sim.model(x), before)
    with sim.in_float():
        assert not torch.equal(loaded(x), sim.model(x))  # the weights that were loaded are still on their grids


class Listed(nn.Module):
    """As the detectors of torchvision: a list of images; in training losses by name, else what each image shows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.box, self.score = nn.Conv2d(8, 4, 1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        features = self.body(torch.stack(images))
        boxes, scores = self.box(features).flatten(2), self.score(features).flatten(2)
        if self.training:
            assert targets is not None
            wanted, kinds = (torch.stack([one[key] for one in targets]) for key in ("boxes", "labels"))
            losses = nn.functional.l1_loss(boxes.mean(2), wanted), nn.functional.cross_entropy(scores.mean(2), kinds)
            return dict(zip(("loss_box", "loss_class"), losses, strict=True))
        found = []
        for one, likely in zip(boxes, scores.softmax(1).amax(1), strict=True):
            at = (likely > likely.mean()).nonzero()[:, 0]
            found.append({"boxes": one.T[at] * 10, "scores": likely[at]})
        return found


def test_a_detector_that_returns_losses_in_training_is_trained_and_finds_boxes_afterwards() -> None:
    torch.manual_seed(0)
    model, images = Listed().eval(), list(torch.rand(4, 3, 32, 32))
    targets = [{"boxes": torch.rand(4), "labels": torch.tensor(i % CLASSES)} for i in range(4)]
    sim = calibrated(bt.QuantizationSimModel(model, (images,), preset="w4a8"), [(images,)])
    before, optimizer = sim.model(images), torch.optim.AdamW(sim.model.parameters(), 1e-2)
    sums = []
    for _ in range(8):
        losses = sim.model.train()(images, targets)
        assert [*losses] == ["loss_box", "loss_class"]
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        sums.append(sum(losses.values()).item())
    assert sums[-1] < 0.9 * sums[0]
    after = sim.model.eval()(images)
    assert [[*one] for one in after] == [["boxes", "scores"]] * 4 and len(before) == 4
    with torch.no_grad(), sim.in_float():
        assert not torch.equal(sim.model(images)[0]["boxes"], after[0]["boxes"])  # weights stay on their grids
