"""Trained networks on real data: what quantization costs, and that the runtime agrees.

Needs the data folder (see tests/support/data.py); without it these tests are skipped and everything else still runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from tests.support.data import Images, accuracy, perplexity, trained
from tests.support.sessions import integer_session

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
    sim = QuantizationSimModel(model, calib[:1, :-1])
    sim.compute_encodings([calib[i : i + 8, :-1] for i in range(0, 32, 8)])
    assert perplexity(sim.model, test[:32]) < 1.08 * reference  # every activation in 8 bits; 1.05 here
