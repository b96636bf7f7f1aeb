"""Costs of models, against what layers are known to cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright import model_costs
from bitwright.errors import ConfigError


class Tied(nn.Module):
    """A module that runs twice, and a matrix that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.Linear(4, 4)

    def forward(self, x):
        y = self.conv(x).mean((2, 3))
        return self.fc(self.fc(y))


def test_module_and_file_cost_what_their_layers_do(tmp_path):
    net, x = Tied().eval(), torch.zeros(2, 3, 8, 8)
    torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=False)
    macs, params = 2 * 16 * 4 * 27 + 2 * 2 * 16, 4 * 27 + 4 + 16 + 4
    for found in (model_costs(net, [x]), model_costs(tmp_path / "net.onnx")):
        assert found["macs"] == macs
        assert sum(r.params for r in found.rows if r.type in ("Conv", "Gemm")) == params
        assert found["activation_bytes"] == 4 * (2 * 3 * 64 + 2 * 4 * 16)  # of the convolution: what it reads and makes
        assert found["memory"] == found["activation_bytes"] + found["bytes"]
    with pytest.raises(ConfigError, match="milliseconds were not measured"):
        found["ms"]
    with pytest.raises(ConfigError, match="no cost 'mac' \\(did you mean 'macs'"):
        found["mac"]
    assert str(found).splitlines()[1].split() == ["operator", "type", "MACs", "params", "bytes", "activations"]


def test_milliseconds_are_measured_node_by_node(tmp_path):
    net, x = Tied().eval(), torch.zeros(2, 3, 8, 8)
    torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=False)
    found = model_costs(tmp_path / "net.onnx", milliseconds=True, rounds=3)
    assert found["ms"] > 0 and next(r for r in found.rows if r.type == "Conv").ms > 0


def test_a_module_without_data_is_refused():
    with pytest.raises(ConfigError, match="does not say the shapes of its inputs"):
        model_costs(nn.Linear(2, 2))
