"""Programs of ``torch.export`` and ``.pt2`` files as models."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from typer.testing import CliRunner

import bitwright
from bitwright.cli import app
from bitwright.errors import ModelError
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from bitwright.torch.captured import as_inputs, as_module, input_shapes, read_program
from tests.support.simulations import calibrated

DATA = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(5)]


class Net(nn.Module):
    """A normalised convolution, and a scale that is given by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(144, 3)
        self.norm.running_mean.uniform_(-1, 1)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.fc(y if scale is None else y * scale)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def program(model: nn.Module | None = None, **kwargs: object) -> ExportedProgram:
    return torch.export.export(model or net(), (DATA[0],), **kwargs)


def test_a_program_is_quantized_as_its_model() -> None:
    captured = program()
    before = {name: tensor.clone() for name, tensor in captured.state_dict.items()}
    plain, found = (bitwright.quantize(m, DATA, recipe=["fold"], progress=False) for m in (net(), captured))
    with torch.no_grad():
        assert torch.equal(found.sim.model(DATA[0]), plain.sim.model(DATA[0]))
    assert all(torch.equal(before[name], tensor) for name, tensor in captured.state_dict.items())
    assert not any(module.training for module in as_module(captured).modules())


def test_a_file_is_quantized_in_python_and_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    batch = Dim("batch", min=1, max=64)
    scale = torch.tensor(0.5)
    free = torch.export.export(net(), (DATA[0],), {"scale": scale}, dynamic_shapes={"x": {0: batch}, "scale": None})
    torch.export.save(free, path)
    assert input_shapes(read_program(path)) == [("x", "float32", (None, 3, 8, 8)), ("scale", "float32", ())]
    call = as_inputs(free, {"x": DATA[0].numpy(), "scale": np.float32(0.5).reshape(())})
    sim = calibrated(QuantizationSimModel(path, call), [call])
    with torch.no_grad():
        assert torch.allclose(sim.model(DATA[0], scale=scale), net()(DATA[0], scale), atol=0.05)

    for at in range(3):
        np.savez(tmp_path / f"{at}.npz", x=DATA[at].numpy(), scale=np.float32(0.5))
    data = tmp_path / "data"
    data.mkdir()
    for at in range(3):
        (tmp_path / f"{at}.npz").rename(data / f"{at}.npz")
    out = tmp_path / "out"
    command = ["quantize", str(path), "--data", str(data), "--out", str(out), "--recipe", "fold", "--batch-size", "4"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert (out / "net.onnx").is_file() and "dB" in done.output


def test_other_shapes_are_refused_with_those_that_were_captured() -> None:
    with pytest.raises(ModelError, match=r"captured for x: 4x3x8x8, and gets x: 3x3x8x8.*dynamic_shapes"):
        bitwright.quantize(program(), [*DATA, DATA[0][:3]], recipe=["fold"], progress=False)
    bounded = program(dynamic_shapes=({0: Dim("batch", min=2, max=6)},))
    with pytest.raises(ModelError, match=r"x: \(2 to 6\)x3x8x8, and gets x: 8x3x8x8"):
        QuantizationSimModel(bounded, torch.cat(DATA[:2]))


class Counts(nn.Module):
    """A state that every run changes, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) + self.state[:, 0]
        self.state[:, 0].add_(1)
        return y


class Writes(nn.Module):
    """It changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0].mul_(2)
        return x.relu() @ torch.ones(8, 8)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Net().train(), "norm.*statistics of each batch.*captured for training.*model.eval"),
        (
            nn.Sequential(nn.Conv2d(3, 2, 1), nn.Dropout(0.2)).train(),
            "1.*drops values at random.*captured for training",
        ),
        (nn.Sequential(nn.Conv2d(3, 2, 1), Counts()).eval(), "1.state.*changes this buffer.*as an input"),
        (Writes().eval(), "x.*writes into this input.*instead of"),
    ],
    ids=["batch-norm", "dropout", "buffer", "input"],
)
def test_what_no_simulation_can_show_is_refused_by_name(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        as_module(program(model))


def test_a_changed_buffer_is_found_in_core_operators_too() -> None:
    with pytest.raises(ModelError, match="state.*changes this buffer"):
        as_module(program(Counts().eval()).run_decompositions({}))


def test_what_only_looks_like_training_is_taken() -> None:
    class Free(nn.Module):
        """Statistics of the batch by design, dropout of nothing, a state that is only read."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.state = nn.BatchNorm2d(3, track_running_stats=False), nn.Buffer(torch.ones(3, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.state.expand(3, 8, 8).clone()
            y.add_(1)
            return nn.functional.dropout(self.norm(x), 0.0) * y

    assert torch.equal(as_module(program(Free().eval()))(DATA[0]), Free().eval()(DATA[0]))


def test_a_cast_with_a_layout_is_a_cast() -> None:
    """As masks of transformers are captured."""

    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            whole = torch.ops.aten.to.dtype_layout(x.relu().round(), dtype=torch.int64, layout=torch.strided)
            return whole.to(torch.float32) @ torch.ones(8, 8)

    sim = calibrated(QuantizationSimModel(program(Cast().eval()), DATA[0], preset="w8a16"), DATA)
    with torch.no_grad():
        assert torch.allclose(sim.model(DATA[0]), Cast()(DATA[0]), atol=0.01)


def test_methods_that_change_a_module_in_place_ask_for_it() -> None:
    with pytest.raises(ModelError, match=r"ExportedProgram.*program.module\(\)"):
        fold_all_batch_norms(program(), dummy_input=DATA[0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("net/data/constants/custom_obj_0", b"x", "is a pickle, which runs code"),
        ("net/data/weights/model.pt", b"x", "is a pickle"),
        ("net/data/sample_inputs/model.pt", b"cos\nsystem\n(S'true'\ntR.", "is a pickle"),
        ("net/data/weights/model_weights_config.json", b'{"config": {"w": {"use_pickle": true}}}', "config.json: w is a"),
        ("net/data/weights/model_weights_config.json", b"{", "no archive of torch.export"),
        ("net/data/weights/model_weights_config.json", b'{"config": 0.5}', "no archive of torch.export.*no attribute 'items'"),
        ("net/models/model.json", b"{}", "torch.export.load cannot read it with torch"),
    ],
)  # fmt: skip
def test_archives_that_run_code_or_are_damaged_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / "net.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    with pytest.raises(ModelError, match=message):
        read_program(path)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    with pytest.raises(ModelError, match="does not exist"):
        read_program(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"no archive of torch.export.*torch.export.save"):
        bitwright.quantize(path, DATA)
