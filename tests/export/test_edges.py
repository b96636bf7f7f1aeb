"""Inputs and outputs of integers: codes, and pixels that the file normalises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from bitwright.compare.verify import verify_folder
from bitwright.errors import ConfigError, ExportError
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.fixture(scope="module")
def frames() -> np.ndarray[Any, Any]:
    """Camera frames: [N, H, W, C], uint8."""
    return np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)


def normalized(frames: np.ndarray[Any, Any], mean: Any = MEAN, std: Any = STD, scale: float = 1 / 255) -> torch.Tensor:
    """What a program makes of frames in front of a model."""
    pixels = frames.transpose(0, 3, 1, 2).astype(np.float32)
    mean, std = (np.float32(x).reshape(1, -1, 1, 1) for x in (mean, std))
    return torch.from_numpy((pixels * np.float32(scale) - mean) / std)


@pytest.fixture(scope="module")
def sim(frames: np.ndarray[Any, Any]) -> QuantizationSimModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)).eval()
    x = normalized(frames)
    return calibrated(QuantizationSimModel(model, x), [x])


def run(path: Path, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(str(path))
    found: np.ndarray[Any, Any] = session.run(None, {session.get_inputs()[0].name: x})[0]
    return found


def facts(path: Path) -> Any:
    (text,) = (one.value for one in onnx.load(path).metadata_props if one.key == "bitwright.io")
    return json.loads(text)


def test_codes_in_and_out_are_those_of_the_float_file(sim: Any, frames: Any, tmp_path: Path) -> None:
    x = normalized(frames)
    plain, coded = sim.export(tmp_path / "a", "m", x), sim.export(tmp_path / "b", "m", x, io="uint8")
    told = facts(coded.qdq)
    (given,), (made,) = told["inputs"].values(), told["outputs"].values()
    codes = np.clip(np.rint(x.numpy() / np.float32(given["scale"])) + given["zero_point"], 0, 255).astype(np.uint8)
    answer = run(coded.qdq, codes)
    assert answer.dtype == np.uint8
    back = (answer.astype(np.float32) - made["zero_point"]) * np.float32(made["scale"])
    np.testing.assert_array_equal(back, run(plain.qdq, x.numpy()))
    assert verify_folder(tmp_path / "b").ok
    ops = [[node.op_type for node in onnx.load(one.qdq).graph.node] for one in (plain, coded)]
    assert ops[1].count("QuantizeLinear") == ops[0].count("QuantizeLinear") - 1
    assert ops[1].count("DequantizeLinear") == ops[0].count("DequantizeLinear") - 1


def test_a_camera_frame_goes_in_as_bytes(sim: Any, frames: Any, tmp_path: Path) -> None:
    x = normalized(frames)
    plain = sim.export(tmp_path / "a", "m", x)
    for layout, given in (("NHWC", frames), ("NCHW", frames.transpose(0, 3, 1, 2))):
        asked = {"mean": MEAN, "std": STD, "layout": layout}
        camera = sim.export(tmp_path / layout, "m", x, normalize=asked)
        step = 0.05 * float(np.ptp(run(plain.qdq, x.numpy())))  # a rounding error may move a code of the input by one
        np.testing.assert_allclose(run(camera.qdq, np.ascontiguousarray(given)), run(plain.qdq, x.numpy()), atol=step)
        assert verify_folder(tmp_path / layout).ok


def test_pixels_that_are_codes_cost_nothing(frames: Any, tmp_path: Path) -> None:
    """The range 0 to 1 of 255 steps is the grid of pixels: the file reads them as codes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    frames = frames.copy()
    frames[0, 0, 0] = 0, 255, 255
    x = normalized(frames, 0, 1)
    sim = calibrated(QuantizationSimModel(model, x), [x])
    plain = sim.export(tmp_path / "a", "m", x)
    camera = sim.export(tmp_path / "b", "m", x, normalize={"layout": "NHWC"})
    ops = {node.op_type for node in onnx.load(camera.qdq).graph.node}
    assert not ops & {"Cast", "Mul", "Sub"}
    np.testing.assert_array_equal(run(camera.qdq, frames), run(plain.qdq, x.numpy()))


def test_the_same_of_an_onnx_file(frames: Any, sim: Any, tmp_path: Path) -> None:
    x = normalized(frames)
    source = sim.export(tmp_path / "source", "m", x).float_model
    other = calibrated(OnnxSim(str(source), x.numpy()), [x.numpy()])
    exported = other.export(tmp_path / "a", "m", io="uint8", normalize={"mean": MEAN, "std": STD, "layout": "NHWC"})
    assert run(exported.qdq, frames).dtype == np.uint8
    assert verify_folder(tmp_path / "a").ok


@pytest.mark.parametrize(
    "options, error, text",
    [
        (
            {"io": "uint9"},
            ConfigError,
            "'uint9' is not a type of inputs and outputs, did you mean|'uint9' is not a type",
        ),
        ({"io": "int8"}, ExportError, "its codes are uint8, and int8 were asked for"),
        ({"io": {"inptu": "uint8"}}, ExportError, r"no input or output of this name.*did you mean 'input'"),
        ({"normalize": {"mean": [0.1, 0.2]}}, ExportError, "the normalisation has 2 channels, and the input 3"),
        ({"normalize": {"std": 0}}, ConfigError, "std above 0"),
        ({"normalize": {"layout": "CHW"}}, ConfigError, "'CHW' is not a layout"),
        ({"normalize": {"means": 0}}, ConfigError, "'means' is not a key of it.*did you mean 'mean'"),
        ({"io": "int8", "normalize": {}}, ConfigError, "pixels are of uint8, and the input is asked to be of int8"),
    ],
)
def test_what_cannot_be_done_is_refused(
    sim: Any, frames: Any, tmp_path: Path, options: Any, error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        sim.export(tmp_path, "m", normalized(frames), **options)
    assert not list(tmp_path.iterdir())


def test_an_end_without_codes_is_refused_with_who_reads_it(frames: Any, tmp_path: Path) -> None:
    x = normalized(frames)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    sim = calibrated(QuantizationSimModel(model, x, preset="w8"), [x])
    with pytest.raises(ExportError, match=r"no quantizer stands at this input, which Conv reads in float.*'float32'"):
        sim.export(tmp_path, "m", x, io={"inputs": "uint8"})
    with pytest.raises(ExportError, match=r"no quantizer stands at this output, which Gemm makes in float"):
        sim.export(tmp_path, "m", x, io={"outputs": "uint8"})
    flat = QuantizationSimModel(nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4))
    flat.compute_encodings([torch.randn(2, 4)], progress=False)
    with pytest.raises(ExportError, match="no inputs have the four axes of pictures"):
        flat.export(tmp_path, "m", torch.randn(2, 4), normalize={})
