"""Outputs of every layer, in float and simulated, in files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from bitwright import LayerOutputUtil
from bitwright.analysis.layer_outputs import layer_values
from bitwright.errors import CalibrationError, ConfigError, ExportError
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel as TorchSim


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        low, high = torch.relu(self.conv(x)).split(2, 1)
        return self.fc(torch.cat([low, high], 1).mean((2, 3)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.manual_seed(0)
    folder, x = tmp_path_factory.mktemp("layers"), torch.randn(3, 3, 8, 8)
    sim = TorchSim(Net().eval(), x)
    sim.compute_encodings([x])
    files = sim.export(folder, "net")
    onnx = OnnxSim(files.float_model)
    feed = {onnx.graph.inputs[0]: x.numpy()}
    onnx.compute_encodings([feed])
    return {"torch": (sim, x), "onnx": (onnx, feed), "folder": folder}


@pytest.mark.slow_variants("torch")
@pytest.mark.parametrize("which", ["torch", "onnx"])
def test_float_and_simulated_values_are_those_of_the_model(made, which, tmp_path):
    sim, batch = made[which]
    folder = LayerOutputUtil(sim, tmp_path).generate_layer_outputs(batch)
    told = json.loads((folder / "names.json").read_text())["order"]
    assert [row["layer"].partition("[")[0] for row in told if row["layer"]][0] == sim.graph.ops[0].name
    last = told[-1]["file"]
    quantized = np.load(folder / "quantized" / f"{last}.npy")
    real = np.load(folder / "float" / f"{last}.npy")
    if which == "torch":
        expected = sim.model(batch).detach().numpy()
        with sim.in_float():
            exact = sim.model(batch).detach().numpy()
    else:
        expected = sim.run(batch)[0]
        exact = None
    np.testing.assert_allclose(quantized, expected, atol=1e-5)
    if exact is not None:
        np.testing.assert_allclose(real, exact, atol=1e-5)
    assert not np.array_equal(real, quantized) and told[-1]["sqnr_db"] > 20
    assert (folder / "inputs").is_dir() and len(list((folder / "float").iterdir())) == len(told)
    again = LayerOutputUtil(sim, tmp_path).generate_layer_outputs(batch)
    assert (folder.name, again.name) == ("batch_0", "batch_1")


def test_names_are_those_of_the_exported_file(made, tmp_path):
    sim, batch = made["torch"]
    util = LayerOutputUtil(sim, tmp_path, exported=made["folder"], form="safetensors")
    folder = util.generate_layer_outputs(batch)
    rows = {row["layer"]: row for row in json.loads((folder / "names.json").read_text())["order"]}
    graph = made["onnx"][0].graph
    assert rows["conv"]["tensor"] in graph.values or rows["fc"]["tensor"] in graph.values
    named = [row for row in rows.values() if row["tensor"]]
    assert named and all(row["tensor"] in graph.values for row in named)
    held = load_file(folder / "float.safetensors")
    assert held.keys() == {row["file"] for row in rows.values()}
    assert sorted(path.name for path in folder.iterdir()) == [
        "float.safetensors", "inputs.safetensors", "names.json", "quantized.safetensors",
    ]  # fmt: skip


def test_raw_layout_has_a_folder_per_sample(made, tmp_path):
    sim, batch = made["torch"]
    folder = LayerOutputUtil(sim, tmp_path, form="raw").generate_layer_outputs(batch)
    for i in range(3):
        numbers = np.fromfile(folder / "quantized" / f"layer_outputs_{i}" / "fc.raw", np.float32)
        np.testing.assert_allclose(numbers, sim.model(batch)[i].detach().numpy(), atol=1e-5)


def test_names_that_differ_in_case_or_marks_alone_are_files_of_their_own(tmp_path):
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A, self.a = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.a(self.A(x))

    sim = TorchSim(Twins(), torch.ones(1, 2))
    sim.compute_encodings([torch.ones(1, 2)])
    folder = LayerOutputUtil(sim, tmp_path).generate_layer_outputs(torch.ones(1, 2))
    assert len({path.name.lower() for path in (folder / "float").iterdir()}) == 2


def test_a_layer_that_runs_twice_has_two_values():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            h = torch.zeros(1, 2)
            for step in range(2):  # over time: one place
                h = self.fc(x[:, step] + h)
            return h

    x = torch.ones(1, 2, 2)
    sim = TorchSim(Twice(), x)
    sim.compute_encodings([x])
    names = [name for name, _, _ in layer_values(sim, x)]
    assert [name for name in names if name.startswith("fc")] == ["fc", "fc#1"]


def test_bad_input(made, tmp_path):
    sim, _ = made["torch"]
    with pytest.raises(ConfigError, match="no form 'npz'.*use one of npy"):
        LayerOutputUtil(sim, tmp_path, form="npz")
    with pytest.raises(ExportError, match="no export"):
        LayerOutputUtil(sim, tmp_path, exported=tmp_path)
    fresh = TorchSim(Net(), torch.zeros(1, 3, 8, 8))
    with pytest.raises(CalibrationError, match="not calibrated"):
        LayerOutputUtil(fresh, tmp_path / "none").generate_layer_outputs(torch.zeros(1, 3, 8, 8))
    assert not list((tmp_path / "none").iterdir())
