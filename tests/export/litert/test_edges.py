"""Inputs and outputs of integers in LiteRT files: codes of either sign, and pixels that the file normalises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.compare.litert import FlatFile
from bitwright.compare.target import open_target
from bitwright.compare.verify import verify_folder
from bitwright.errors import ExportError
from bitwright.export.targets import rules_for
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.runtimes.adapters import flat_edges
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated

interpreter = pytest.importorskip("ai_edge_litert.interpreter")
Array = np.ndarray[Any, Any]
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.fixture(scope="module")
def frames() -> Array:
    """Camera frames: [N, H, W, C], uint8, with black and white."""
    found = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    found[0, 0, 0] = 0, 255, 255
    return found


def normalized(frames: Array, mean: Any = MEAN, std: Any = STD) -> torch.Tensor:
    """What a program makes of frames in front of a model."""
    mean, std = (np.float32(x).reshape(1, -1, 1, 1) for x in (mean, std))
    return torch.from_numpy((frames.transpose(0, 3, 1, 2) * np.float32(1 / 255) - mean) / std)


def simulated(x: torch.Tensor, preset: str = "w8a8") -> QuantizationSimModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)).eval()
    return calibrated(QuantizationSimModel(model, x, preset=preset, config_file=rules_for("litert", None, preset)), [x])


@pytest.fixture(scope="module")
def sim(frames: Array) -> QuantizationSimModel:
    return simulated(normalized(frames))


def answer(exported: Any, x: Array) -> Array:
    """What LiteRT's interpreter makes of exactly these bytes or codes."""
    runner = interpreter.Interpreter(str(exported.tflite)).get_signature_runner()
    assert runner.get_input_details()["input"]["dtype"] == x.dtype
    found: Array = runner(input=np.ascontiguousarray(x))["output"]
    return found


def kinds(exported: Any) -> list[str]:
    file = FlatFile(exported.tflite.read_bytes())
    return [file.kinds[op.opcodeIndex] for op in file.graph.operators]


@pytest.fixture(scope="module")
def plain(sim: QuantizationSimModel, frames: Array, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return sim.export(tmp_path_factory.mktemp("plain"), "m", normalized(frames), target="litert")


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_codes_in_and_out_are_those_of_the_float_file(
    sim: Any, plain: Any, frames: Array, tmp_path: Path, kind: str
) -> None:
    x = normalized(frames)
    coded = sim.export(tmp_path, "m", x, target="litert", io=kind)
    facts = flat_edges(coded.tflite.read_bytes())
    given, made = facts["inputs"]["input"], facts["outputs"]["output"]
    assert (given["type"], made["type"]) == (kind, kind)
    ends = np.iinfo(kind)
    codes = np.clip(np.rint(x.numpy() / np.float32(given["scale"])) + given["zero_point"], ends.min, ends.max)
    found = answer(coded, codes.astype(kind))
    assert found.dtype == kind
    back = (found.astype(np.float32) - made["zero_point"]) * np.float32(made["scale"])
    np.testing.assert_array_equal(back, answer(plain, x.numpy()))
    changed = ["QUANTIZE"] * (kind == "uint8")
    assert kinds(coded) == [*changed, *kinds(plain)[1:-1], *changed]
    assert verify_folder(tmp_path, runtime="litert").ok
    assert verify_folder(tmp_path).ok  # the ONNX file beside it
    np.testing.assert_array_equal(open_target(tmp_path, "xnnpack").run(None, {"input": x.numpy()})[0], back)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_camera_frame_goes_in_as_bytes(sim: Any, plain: Any, frames: Array, tmp_path: Path, layout: str) -> None:
    x = normalized(frames)
    camera = sim.export(tmp_path, "m", x, target="litert", normalize={"mean": MEAN, "std": STD, "layout": layout})
    given = frames if layout == "NHWC" else frames.transpose(0, 3, 1, 2)
    step = 0.05 * float(np.ptp(answer(plain, x.numpy())))  # a rounding error may move a code of the input by one
    np.testing.assert_allclose(answer(camera, given), answer(plain, x.numpy()), atol=step)
    assert verify_folder(tmp_path, runtime="litert").ok
    # channels last are the order that the kernels read, so that one transposition of the float file is gone
    assert kinds(camera).count("TRANSPOSE") == kinds(plain).count("TRANSPOSE") - (layout == "NHWC")


def test_pixels_that_are_codes_cost_nothing(frames: Array, tmp_path: Path) -> None:
    """The range 0 to 1 of 255 steps is the grid of pixels: the file reads them as codes."""
    x = normalized(frames, 0, 1)
    sim = simulated(x)
    plain = sim.export(tmp_path / "a", "m", x, target="litert")
    camera = sim.export(tmp_path / "b", "m", x, target="litert", normalize={"layout": "NHWC"}, dynamic_batch=True)
    assert kinds(camera)[:2] == ["QUANTIZE", "CONV_2D"]
    np.testing.assert_array_equal(answer(camera, frames), answer(plain, x.numpy()))


def test_the_same_of_an_onnx_file(sim: Any, plain: Any, frames: Array, tmp_path: Path) -> None:
    x = normalized(frames).numpy()
    other = calibrated(OnnxSim(str(plain.float_model), x, config_file=rules_for("litert", None, "w8a8")), [x])
    asked = {"mean": MEAN, "std": STD, "layout": "NHWC"}
    exported = other.export(tmp_path, "m", target="litert", io="uint8", normalize=asked)
    assert answer(exported, frames).dtype == np.uint8
    assert verify_folder(tmp_path, runtime="litert").ok


def test_codes_of_16_bits_are_signed(frames: Array, tmp_path: Path) -> None:
    x = normalized(frames)
    sim = simulated(x, "w8a16")
    with pytest.raises(ExportError, match=r"kernels of LiteRT take no codes of uint16.*io=\{'input': 'int16'\}"):
        sim.export(tmp_path, "m", x, target="litert", io="uint16")
    assert not list(tmp_path.iterdir())
    coded = sim.export(tmp_path, "m", x, target="litert", io="int16")
    assert answer(coded, np.zeros((4, 3, 8, 8), np.int16)).dtype == np.int16
    with pytest.raises(ExportError, match="its codes are u?int16, and uint8 were asked for"):
        sim.export(tmp_path, "m", x, target="litert", io="uint8")
