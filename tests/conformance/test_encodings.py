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


@pytest.mark.slow_variants("w8a8-min_max", "w8a8-percentile", "w8a8-tf_enhanced")
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


class Flat(nn.Module):
    """Functions whose range is known, of values that use little or much of it."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.fc = length, nn.Linear(8, 8)
        with torch.no_grad():
            self.fc.weight.mul_(0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.fc(x) @ x.transpose(-1, -2)
        return (scores.softmax(-1) @ x) * scores.sigmoid().mean(-1, keepdim=True)


@pytest.mark.parametrize("length", [8, 600])
@pytest.mark.parametrize("scheme", ["min_max", "mse"])
def test_a_fixed_range_that_the_data_contradict_is_observed(length, scheme, tmp_path):
    """Even rows of a softmax over 600 have values of 0.0017: on steps of 1/255 all of them are zero."""
    torch.manual_seed(0)
    model, data = Flat(length).eval(), [torch.randn(1, length, 8) for _ in range(2)]
    torch.onnx.export(model, (data[0],), tmp_path / "net.onnx", input_names=["x"], dynamo=True, verbose=False)
    theirs, ours = TorchSim(model, data[0], scheme), OnnxSim(str(tmp_path / "net.onnx"), None, scheme, threads=1)
    theirs.compute_encodings(data, progress=False)
    ours.compute_encodings([{"x": x.numpy()} for x in data])
    float_output = model(data[0]).detach().numpy()
    for sim, got in (
        (theirs, theirs.model(data[0]).detach().numpy()),
        (ours, ours.session.run(None, {"x": data[0].numpy()})[0]),
    ):
        rows = {row.op_type: row for row in sim.coverage() if row.op_type in ("Softmax", "Sigmoid")}
        (softmax,) = [s for s in sim.quantizers.values() if s.role == "output" and s.value == rows["Softmax"].name]
        if length == 8:
            assert float(softmax.encoding.scale) == np.float32(1 / 255) and "observed" not in rows["Softmax"].how
        else:
            assert float(softmax.encoding.max) < 0.02
            assert "codes of the fixed range 0 to 1, so the observed range is taken" in rows["Softmax"].how
        assert "observed" not in rows["Sigmoid"].how
        assert 10 * np.log10((float_output**2).sum() / ((float_output - got) ** 2).sum()) > 25
    found = (
        [q.encoding for q in ours.quantizers.unique() if q.range_note],
        [q.encoding for q in theirs.quantizers.unique() if q.range_note],
    )
    for one, two in zip(*found, strict=True):
        assert np.allclose(one.scale, two.scale, rtol=1e-5)


def test_a_range_of_another_calibration_is_decided_anew():
    torch.manual_seed(0)
    model, even = Flat(300).eval(), [torch.randn(1, 300, 8)]
    sim = TorchSim(model, even[0])
    sim.compute_encodings(even, progress=False)
    (softmax,) = [q for q in sim.quantizers.unique() if q.name.startswith("softmax")]
    assert softmax.range_note and softmax.spec.fixed_range == (0.0, 1.0)
    softmax.refine(16, "asked for")
    assert not softmax.range_note and float(softmax.encoding.max) == pytest.approx(1.0), "16 bits tell the values apart"
    sim.quantizers[softmax.name].spec = None
    assert sim.coverage().find(sim.quantizers[softmax.name].value).status == "float"
    peaked = [x * 60 for x in even]
    sim = TorchSim(model, peaked[0])
    sim.compute_encodings(even, progress=False)
    sim.compute_encodings(peaked, progress=False)
    (softmax,) = [q for q in sim.quantizers.unique() if q.name.startswith("softmax")]
    assert not softmax.range_note and float(softmax.encoding.scale) == np.float32(1 / 255)


def test_a_range_of_a_rule_stays_and_is_warned_of(caplog):
    torch.manual_seed(0)
    model, data = Flat(600).eval(), [torch.randn(1, 600, 8)]
    rules = {"preset": "w8a8", "rules": [{"op": "Softmax", "output": {"fixed_range": [0.0, 1.0]}}]}
    sim = TorchSim(model, data[0], config_file=rules)
    sim.compute_encodings(data, progress=False)
    (softmax,) = [q for q in sim.quantizers.unique() if q.name.startswith("softmax")]
    assert softmax.poor_range and float(softmax.encoding.max) == pytest.approx(1.0)
    assert "codes of the fixed range 0 to 1, which a rule gives" in caplog.text


def test_a_range_that_kernels_of_the_target_need_leaves_the_values_in_float():
    from bitwright.export.targets import rules_for

    torch.manual_seed(0)
    model, data = Flat(600).eval(), [torch.randn(1, 600, 8)]
    sim = TorchSim(model, data[0], config_file=rules_for("litert", None))
    sim.compute_encodings(data, progress=False)
    row = next(row for row in sim.coverage() if row.op_type == "Softmax")
    assert row.status == "float" and "the only one that kernels of the target compute" in row.how
