"""The same weights and the same data give the same encodings, whichever front end watches them."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel as TorchSim

DATA = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(i)) * (1 + i) for i in range(3)]


class Net(nn.Module):
    """A convolution and a linear layer, with what comes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.nn.functional.max_pool2d(self.conv(x).relu(), 2).flatten(1))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, onnx.ModelProto]:
    """The model in both forms."""
    torch.manual_seed(0)
    model, path = Net().eval(), tmp_path_factory.mktemp("both") / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (DATA[0],), path, input_names=["x"], opset_version=21, dynamo=True, verbose=False)
    return model, onnx.load(path)


@pytest.mark.parametrize("scheme", ["min_max", "percentile", "tf_enhanced", "entropy"])
@pytest.mark.parametrize("preset", ["w8a8", "w4a16"])
def test_encodings_of_both_front_ends(both, scheme, preset):
    model, proto = copy.deepcopy(both)
    ours, theirs = (
        OnnxSim(proto, None, scheme, preset=preset, threads=1),
        TorchSim(model, DATA[0], scheme, preset=preset),
    )
    ours.compute_encodings([{"x": x.numpy()} for x in DATA])
    theirs.compute_encodings(DATA, progress=False)
    roles = [sorted(site.role for site in sim.quantizers.values()) for sim in (ours, theirs)]
    assert roles[0] == roles[1]
    for name in ("conv.weight", "fc.weight"):
        assert ours.quantizers[name].encoding == theirs.quantizers[name].encoding
    (first,) = [s for s in ours.quantizers.values() if s.role == "input"]
    (other,) = [s for s in theirs.quantizers.values() if s.role == "input"]
    assert first.encoding == other.encoding, "the model's input is the same tensor in both"
    pairs = zip(
        *([s.encoding for s in sim.quantizers.values() if s.role == "output"] for sim in (ours, theirs)), strict=True
    )
    for one, two in pairs:  # behind a convolution, sums are rounded in another order
        assert one.format == two.format and np.allclose(one.scale, two.scale, rtol=0.01)
