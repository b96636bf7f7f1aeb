"""Recurrent layers in both front ends: the same sites, the same encodings for the same weights and data, and files that
compute step by step what the simulations compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from bitwright.core.graph.graph import Op
from bitwright.core.graph.recurrence import CELLS
from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel as TorchSim
from tests.support.recurrent_nets import run_model
from tests.support.simulations import calibrated

LENGTH, BATCH, INPUTS, HIDDEN = 9, 5, 6, 8
LAYERS = {
    "lstm": lambda: nn.LSTM(INPUTS, HIDDEN),
    "lstm-stacked-both-ways": lambda: nn.LSTM(INPUTS, HIDDEN, num_layers=2, bidirectional=True),
    "lstm-no-bias": lambda: nn.LSTM(INPUTS, HIDDEN, bias=False),
    "gru": lambda: nn.GRU(INPUTS, HIDDEN),
    "gru-both-ways": lambda: nn.GRU(INPUTS, HIDDEN, bidirectional=True),
    "rnn-tanh": lambda: nn.RNN(INPUTS, HIDDEN),
    "rnn-relu": lambda: nn.RNN(INPUTS, HIDDEN, nonlinearity="relu"),
}
FAST = {"lstm-stacked-both-ways", "gru", "rnn-relu"}
PROJECTED = {"lstm-projected": lambda: nn.LSTM(INPUTS, HIDDEN, proj_size=3)}


class Tagger(nn.Module):
    """A recurrent layer and a linear one behind it."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        width = layer.proj_size or layer.hidden_size
        self.head = nn.Linear(width * (2 if layer.bidirectional else 1), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


def batches(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(LENGTH, BATCH, INPUTS, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def torch_sim(name: str) -> TorchSim:
    torch.manual_seed(1)
    model = Tagger({**LAYERS, **PROJECTED}[name]()).eval()
    return calibrated(TorchSim(model, batches()[0]), batches())


def layers(sim: TorchSim | OnnxSim) -> list[Op]:
    """The layers of a model, each in one direction, in execution order."""
    return [op for op in sim.graph.ops if op.type in CELLS]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LAYERS]
)
def pair(request, tmp_path_factory) -> tuple[TorchSim, OnnxSim, Path, Path]:
    """Both simulations of one model, calibrated on the same data, and both of its exported files."""
    folder = tmp_path_factory.mktemp(request.param)
    ours = torch_sim(request.param)
    files = ours.export(folder / "torch", "net", batches()[0])
    theirs = calibrated(OnnxSim(files.float_model, batches()[0].numpy(), threads=1), [x.numpy() for x in batches()])
    return ours, theirs, files.qdq, theirs.export(folder / "onnx", "net").qdq


def test_the_same_sites(pair):
    ours, theirs, *_ = pair
    for one, other in zip(layers(ours), layers(theirs), strict=True):
        assert one.type == other.type and list(one.inner) == list(other.inner)
        assert one.attrs["direction"] == other.attrs["direction"]
        named = {
            sim: {
                site.inner: site.quantizer.spec for site in sim.quantizers.values() if site.op == op.name and site.inner
            }
            for sim, op in ((ours, one), (theirs, other))
        }
        assert named[ours] == named[theirs]


def test_the_same_encodings(pair):
    ours, theirs, *_ = pair
    for one, other in zip(layers(ours), layers(theirs), strict=True):
        found, expected = (
            {site.inner: site.encoding for site in sim.quantizers.values() if site.op == op.name and site.inner}
            for sim, op in ((theirs, other), (ours, one))
        )
        for name, encoding in expected.items():
            assert found[name].format == encoding.format
            np.testing.assert_allclose(found[name].scale, encoding.scale, rtol=0.01, err_msg=name)
        for port in (1, 2):
            rows, same = (_row_scales(sim, op, port) for sim, op in ((theirs, other), (ours, one)))
            np.testing.assert_array_equal(rows, same)


def _row_scales(sim: TorchSim | OnnxSim, op: Op, port: int) -> np.ndarray:
    """Gate -> one scale per row, gates in ONNX's order."""
    (site,) = [s for s in sim.quantizers.values() if s.op == op.name and s.port == port and s.role == "weight"]
    parts = dict(zip(op.attrs["gates"], np.split(site.encoding.scale, len(op.attrs["gates"])), strict=True))
    return np.concatenate([parts[gate] for gate in CELLS[op.type].gates])


def test_the_same_outputs(pair):
    ours, theirs, from_torch, from_onnx = pair
    x = batches(5)[4]
    expected = ours.model(x).detach().numpy()
    found = {
        "simulated in ONNX": theirs.run(x.numpy())[0],
        "exported from torch": run_model(ir.load(from_torch), {"x": x.numpy()}, exact=False)[0],
        "exported from ONNX": run_model(ir.load(from_onnx), {"x": x.numpy()}, exact=False)[0],
    }
    assert {name: sqnr(expected, y) > 40 for name, y in found.items()} == dict.fromkeys(found, True)


def test_every_step_of_both_files(pair):
    ours, theirs, *_ = pair
    for sim, x in ((ours, batches(5)[4]), (theirs, batches(5)[4].numpy())):
        report = sim.verify(x)
        assert report.ok, str(report)
        inside = {site.name for site in sim.quantizers.values() if site.inner}
        assert inside <= {row.site for row in report.rows}


def test_every_step_of_a_projected_layer():
    report = torch_sim("lstm-projected").verify(batches(5)[4])
    assert report.ok, str(report)
    assert "layer.l0.forward.unprojected" in {row.site for row in report.rows}
