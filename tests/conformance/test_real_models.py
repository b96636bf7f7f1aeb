"""Trained networks on real data: what quantization costs, and that the runtime agrees; modules and ONNX files.

Needs the data folder (see tests/support/data.py); without it these tests are skipped and everything else still runs.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx import fold_all_batch_norms, load_model
from bitwright.torch import QuantizationSimModel
from tests.support import data
from tests.support.data import Images, accuracy, perplexity, trained
from tests.support.sessions import integer_session
from tests.support.simulations import calibrated

CALIBRATION, TEST = 200, 1000


def simulate(name: str, calibration: list[Tensor], fold: bool = True, **options: object) -> QuantizationSimModel:
    model = trained(name)
    if fold:
        fold_all_batch_norms(model, dummy_input=calibration[0])
    sim = QuantizationSimModel(model, calibration[0][:2], **options)  # type: ignore[arg-type]
    sim.compute_encodings(calibration)
    return sim


def runtime(path: Path, images: Tensor) -> np.ndarray:
    session = integer_session(path)
    return np.concatenate([session.run(None, {session.get_inputs()[0].name: b.numpy()})[0] for b in images.split(100)])


@pytest.mark.parametrize("name", ["resnet20_aux", "mobilenet_v2_cifar"])
def test_w8a8_keeps_the_accuracy_and_the_runtime_agrees(name: str, cifar, cifar_train, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    images, labels = cifar.x[:TEST], cifar.y[:TEST]
    calibration = list(cifar_train.x[:CALIBRATION].split(50))
    reference = accuracy(trained(name), Images(images, labels))
    sim = simulate(name, calibration)
    simulated = accuracy(sim.model, Images(images, labels))
    assert simulated >= reference - 1.0
    report = sim.verify(calibration[0][:4])
    assert report.ok, str(report.to_text())
    assert sum(row.kernel.startswith("QLinear") for row in report.rows) >= 0.8 * len(report.rows)
    exported = sim.export(tmp_path, name, calibration[0][:4], dynamic_batch=True)
    integer = (runtime(exported.qdq, images).argmax(1) == np.asarray(labels)).mean() * 100
    assert abs(integer - simulated) <= 1.0
    assert exported.qdq.stat().st_size < 0.6 * exported.float_model.stat().st_size


def test_per_tensor_weights_lose_what_per_channel_weights_keep(cifar, cifar_train) -> None:  # type: ignore[no-untyped-def]
    data = Images(cifar.x[:TEST], cifar.y[:TEST])
    calibration = list(cifar_train.x[:CALIBRATION].split(50))
    per_tensor = accuracy(simulate("mobilenet_v2_cifar", calibration, preset="w8a8_per_tensor").model, data)
    per_channel = accuracy(simulate("mobilenet_v2_cifar", calibration).model, data)
    assert per_tensor < 35 and per_channel > 72  # 23 % and 75 % with plain fake quantization elsewhere


def test_four_bit_weights(cifar, cifar_train) -> None:  # type: ignore[no-untyped-def]
    data = Images(cifar.x[:TEST], cifar.y[:TEST])
    calibration = list(cifar_train.x[:CALIBRATION].split(50))
    assert accuracy(simulate("resnet20_aux", calibration, preset="w4a8").model, data) > 80


def test_mobilenet_v1_on_photographs(imagenet, imagenet_calibration) -> None:  # type: ignore[no-untyped-def]
    calibration = list(imagenet_calibration.x[:64].split(16))
    reference = accuracy(trained("mobilenet_v1_025"), imagenet)
    sim = simulate("mobilenet_v1_025", calibration)
    assert accuracy(sim.model, imagenet) >= reference - 5.0


def test_a_language_model(shared_data) -> None:  # type: ignore[no-untyped-def]
    from tests.support.data import stories

    calib, test = stories("calib"), stories("test")
    model = trained("stories260k")
    reference = perplexity(model, test[:32])
    sim = calibrated(QuantizationSimModel(model, calib[:1, :-1]), [calib[i : i + 8, :-1] for i in range(0, 32, 8)])
    assert perplexity(sim.model, test[:32]) < 1.08 * reference  # every activation in 8 bits; 1.05 here


Array = NDArray[Any]


def session(path: Path) -> Any:
    """ONNX Runtime as a user opens it, also where the CPU has no VNNI: integer kernels where it has them."""
    return integer_session(path)


@dataclass(frozen=True)
class Three:
    """One model three times: as it came, simulated, and as written for integer kernels."""

    plain: Any
    simulated: Any
    integer: Any
    sim: OnnxSim

    def outputs(self, batches: Sequence[Array]) -> list[list[Array]]:
        """For each of the three its outputs, over all batches."""
        found = []
        for one in (self.plain, self.simulated, self.integer):
            name = one.get_inputs()[0].name
            runs = [one.run(None, {name: batch}) for batch in batches]
            found.append([np.concatenate(parts) for parts in zip(*runs, strict=True)])
        return found


def quantized(path: Path, batches: Sequence[Array], folder: Path) -> Three:
    loaded = load_model(path)
    fold_all_batch_norms(loaded, batches[0])
    sim = calibrated(OnnxSim(loaded.model, batches[0], threads=1), batches)
    exported = sim.export(folder, path.stem, samples=False)
    return Three(session(path), sim.session, session(exported.qdq), sim)


def correct(logits: Array, labels: Array) -> float:
    """Per cent of the rows whose largest entry is that of the label."""
    return 100 * float(np.mean(logits.argmax(1) == labels))


NORMALISED: Callable[[Array], Array] = lambda x: (x / 255 - np.float32(0.1307)) / np.float32(0.3081)  # noqa: E731


@pytest.mark.parametrize("name, prepare, plain", [("mnist_pytorch", NORMALISED, 99.2), ("mnist_cntk", None, 99.1)])
def test_mnist(shared_data: Path, tmp_path: Path, name: str, prepare: Any, plain: float):
    pixels, labels = data.mnist()
    x = pixels.astype(np.float32)[:, None]
    x = x if prepare is None else prepare(x)
    three = quantized(data.onnx_file(name), np.split(x[:64], 64), tmp_path)
    found = [correct(outputs[0], labels) for outputs in three.outputs(np.split(x, len(x)))]
    assert found[0] == pytest.approx(plain, abs=0.05)
    assert all(abs(one - plain) <= 0.3 for one in found[1:]), "three of a thousand pictures"
    assert three.sim.verify().ok


@pytest.mark.slow
def test_resnet20_with_two_outputs(shared_data: Path, tmp_path: Path):
    batches = [x.numpy() for x in data.cifar("train")[:200].batches(50)]
    three = quantized(data.onnx_file("resnet20_aux"), batches, tmp_path)
    test = data.cifar()
    outputs = three.outputs([x.numpy() for x in test.batches(100)])
    labels = test.y.numpy()
    main, side = ([correct(three[i], labels) for three in outputs] for i in range(2))
    assert main[0] == pytest.approx(86.4, abs=0.05) and side[0] == pytest.approx(56.15, abs=0.05)
    assert all(abs(one - main[0]) <= 0.5 for one in main) and all(abs(one - side[0]) <= 1 for one in side)
    assert three.sim.verify().ok


def photographs(count: int, width: int, height: int) -> Array:
    """``[count, 3, height, width]`` as the face detector takes them: ``(RGB - 127) / 128``."""
    from PIL import Image

    found = []
    with np.load(data.DATA / "imagenet_sample_dev.npz") as file:
        jpeg, offset = file["jpeg"].tobytes(), file["offset"]
    for first, last in zip(offset[:count], offset[1 : count + 1], strict=True):
        picture = Image.open(io.BytesIO(jpeg[first:last])).convert("RGB")
        pixels = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR), np.float32)
        found.append((pixels.transpose(2, 0, 1) - 127) / 128)
    return np.stack(found)


def f1(expected: Array, found: Array) -> float:
    """Of the anchors above a score of 0.7, per cent."""
    one, other = expected[..., 1] > 0.7, found[..., 1] > 0.7
    return 200 * float((one & other).sum()) / float(one.sum() + other.sum())


@pytest.mark.slow
def test_face_detector(shared_data: Path, tmp_path: Path):
    """Weights alone at eight bits leave 17.9 dB of the boxes and an F1 of 76 %, over 24 anchors above the threshold."""
    pictures = photographs(120, 320, 240)
    three = quantized(data.onnx_file("face_slim_320"), np.split(pictures[80:], 40), tmp_path)
    plain, simulated, integer = three.outputs(np.split(pictures[:80], 80))
    for scores, boxes in (simulated, integer):
        assert sqnr(plain[0], scores) > 38 and sqnr(plain[1], boxes) > 15
        assert f1(plain[0], scores) > 60
    assert sqnr(simulated[0], integer[0]) > 44 and sqnr(simulated[1], integer[1]) > 37
    # the softmax follows the last layer and is float; ONNX Runtime's integer one is a step off for half of the codes
    report = three.sim.verify()
    assert report.ok and "QLinearSoftmax" not in {row.kernel for row in report.rows}
    assert not [row for row in report.rows if row.verdict == "within"]


@pytest.mark.slow
def test_eight_bits_per_token_cost_a_language_model_little(shared_data: Path) -> None:
    """Perplexity 3.558 in float; torchao's dynamic W8A8 has 3.564."""
    sim = QuantizationSimModel(trained("stories260k"), data.stories("calib")[:1, :-1], preset="w8a8_dynamic")
    sim.compute_encodings(progress=False)
    assert perplexity(sim.model, data.stories()) <= 3.57
