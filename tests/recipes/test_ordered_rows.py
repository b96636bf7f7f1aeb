"""Rows of outputs that were chosen by a score before the last layers are compared by the index that chose them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
import bitwright.onnx
from bitwright.compare.report import OutputRow
from bitwright.compare.verify import verify_folder, verify_layers
from bitwright.core.graph.float_values import ordered_rows
from bitwright.core.simulation.output_quality import RowOrder
from bitwright.export.samples import read_orders, read_samples
from bitwright.torch import QuantizationSimModel
from tests.onnx.nets import Array, Net, run

ROWS, KEPT = 40, 12


class Queries(nn.Module):
    """An encoder, the rows with the best scores, and layers on these, as in RT-DETR."""

    def __init__(self, spelling: str = "gather") -> None:
        super().__init__()
        self.spelling = spelling
        self.encoder, self.score = nn.Linear(16, 16), nn.Linear(16, 3)
        self.decoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.logits, self.boxes = nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.relu(self.encoder(x))
        index = torch.topk(self.score(seen).max(-1).values, KEPT, dim=1).indices
        if self.spelling == "gather":
            rows = seen.gather(1, index.unsqueeze(-1).repeat(1, 1, seen.shape[-1]))
        else:
            rows = seen[torch.arange(len(x))[:, None], index]
        rows = rows + self.decoder(rows)
        return self.logits(rows), self.boxes(rows).sigmoid()


def queries() -> Any:
    """The same as an ONNX model."""
    n = Net()
    x = n.input("x", (4, ROWS, 16))
    seen = n("Relu", n("MatMul", x, n.weights(16, 16), name="encoder"))
    scores = n("ReduceMax", n("MatMul", seen, n.weights(16, 3), name="score"), axes=[2], keepdims=0)
    _, index = n("TopK", scores, n.const(np.int64([KEPT])), axis=1, name="choose", out=["best", "index"])
    wide = n("Expand", n("Unsqueeze", index, n.const(np.int64([2]))), n.const(np.int64([4, KEPT, 16])))
    rows = n("GatherElements", seen, wide, axis=1)
    rows = n("Add", rows, n("MatMul", n("Relu", n("MatMul", rows, n.weights(16, 32))), n.weights(32, 16)))
    logits, boxes = n("MatMul", rows, n.weights(16, 3), out="logits"), n("MatMul", rows, n.weights(16, 4), out="boxes")
    return n.model(logits, boxes)


BATCHES = [torch.randn(4, ROWS, 16, generator=torch.Generator().manual_seed(i)) for i in range(8)]


def by_position(want: Array, got: Array) -> float:
    return float(10 * np.log10((want**2).sum() / ((want - got) ** 2).sum()))


@pytest.mark.parametrize("front", ["gather", "index", "onnx"])
def test_rows_that_change_places_are_compared_by_their_index(front: str) -> None:
    torch.manual_seed(0)
    model: Any = queries() if front == "onnx" else Queries(front).eval()
    data: list[Any] = [{"x": x.numpy()} for x in BATCHES] if front == "onnx" else BATCHES
    result = bitwright.quantize(model, data, recipe=["fold"], held_out=data[-2:], progress=False)
    said = str(result).splitlines()[0]
    found = re.search(r"(\d+\.\d) dB", said)
    assert found and float(found[1]) > 25 and "POOR" not in said
    share = re.search(r"rows are compared by the index that chose them, (\d+)% are chosen by both", said)
    assert share and 70 < int(share[1]) <= 100
    with torch.no_grad():
        pairs = [_both(model, result.sim, x) for x in data[-2:]]
        worst = min(by_position(want, got) for pair in pairs for want, got in zip(*pair, strict=True))
    assert worst < 15, "position by position nearly nothing is left: this is what the comparison must not do"


def _both(model: Any, sim: Any, x: Any) -> tuple[list[Array], list[Array]]:
    if isinstance(x, dict):
        return run(model, x), sim.run(x)
    return [y.numpy() for y in model(x)], [y.numpy() for y in sim.model(x)]


def test_an_error_of_the_rows_themselves_still_counts() -> None:
    """Boxes whose last layer has two bits are poor, whatever the order."""
    torch.manual_seed(0)
    rules = {
        "rules": [{"match": "boxes", "weight": {"format": "int2"}}, {"match": "logits", "weight": {"format": "int2"}}]
    }
    result = bitwright.quantize(
        Queries().eval(), BATCHES, recipe=["fold"], held_out=BATCHES[-2:], config_file=rules, progress=False
    )
    assert str(result).startswith("POOR") and "rows are compared by the index" in str(result).splitlines()[0]


class Routed(nn.Module):
    """Each token takes the two best of four experts: nothing is an order of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 2) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        best, index = torch.topk(self.router(tokens).softmax(-1), 2)
        made = torch.stack([expert(tokens) for expert in self.experts], 1)
        rows = made.gather(1, index.unsqueeze(-1).expand(-1, -1, 2))
        return (rows * best.unsqueeze(-1)).sum(1).view(*x.shape[:2], 2)


class Square(Queries):
    """As many numbers in a row as rows: which axis has the rows is not known."""

    def forward(self, x: torch.Tensor) -> Any:
        logits, _ = super().forward(x)
        return logits @ logits.transpose(1, 2)


@pytest.mark.parametrize("model, x", [(Routed(), torch.randn(3, 5, 8)), (Square(), BATCHES[0])])
def test_what_is_no_order_of_rows_stays_as_it_is(model: nn.Module, x: torch.Tensor) -> None:
    graph = QuantizationSimModel(model.eval(), x).graph
    assert not ordered_rows(graph, {v.name for v in graph.values.values() if v.is_static})[1]


@pytest.mark.parametrize("front", [pytest.param("gather", marks=pytest.mark.slow), "onnx"])
def test_verify_compares_rows_of_simulation_and_file_by_their_index(front: str, tmp_path: Path) -> None:
    """Rows in another order are equal; a row that only one chose counts in the share, one with other numbers in the ratio."""
    torch.manual_seed(0)
    if front == "onnx":
        sim: Any = bitwright.onnx.QuantizationSimModel(queries(), {"x": BATCHES[0].numpy()})
        data: Any = {"x": BATCHES[0].numpy()}
    else:
        sim, data = QuantizationSimModel(Queries(front).eval(), BATCHES[0]), BATCHES[0]
    sim.compute_encodings([data], progress=False)
    sim.export(tmp_path, "net", **({} if front == "onnx" else {"dummy_input": data}))
    for report in [verify_folder(tmp_path), *([sim.verify()] if front == "onnx" else [])]:
        assert report.ok and len(report.outputs) == 2
        assert all(end.both is not None and end.both > 0.9 and end.as_integer > 40 for end in report.outputs)
        assert "rows are compared by the index that chose them" in str(report)
    sites, inputs, outputs = read_samples(tmp_path / "net_samples.npz")
    orders = read_orders(tmp_path / "net_samples.npz")
    name, order = next(iter(orders.items()))
    assert order.axis == 1 and order.indices.shape == (4, KEPT) and [*orders] == [*outputs]
    other = {key: RowOrder(1, one.indices[:, ::-1]) for key, one in orders.items()}
    turned = {key: array[:, ::-1] for key, array in outputs.items()}

    def seen(values: Any, chosen: Any) -> OutputRow:
        return verify_layers(tmp_path / "net.onnx", sites, inputs, outputs=values, orders=chosen).outputs[0]

    plain, same = seen(outputs, orders), seen(turned, other)
    assert (same.as_float, same.as_integer, same.both) == (plain.as_float, plain.as_integer, plain.both)
    assert seen(turned, None).as_float < 10 and seen(turned, None).both is None
    less = np.where(
        np.arange(KEPT) < 3, -1 - np.arange(KEPT), order.indices
    )  # three rows that the file does not choose
    assert seen(outputs, {name: RowOrder(1, less)}).both == pytest.approx(9 / 12, abs=0.1)
    assert seen({**outputs, name: 2 * outputs[name]}, orders).as_float == pytest.approx(20 * np.log10(2), abs=0.1)
    assert seen(outputs, {name: RowOrder(1, -1 - order.indices)}).both == 0
