"""Trained networks as LiteRT files: codes, layer by layer, and the metric of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitwright.compare.verify import verify_folder
from tests.support.deployed import in_litert, quantized
from tests.support.tasks import TASKS

pytest.importorskip("ai_edge_litert")
pytestmark = pytest.mark.slow

#: by how much the metric of the file may differ from the simulation's: half of its own standard deviation; 1 % of a perplexity
NOISE = {
    "resnet20_aux": 0.4,
    "mobilenet_v1_025": 1.2,
    "mobilenet_v2_cifar": 0.5,
    "mnist_cntk": 0.15,
    "stories260k": 0.03,
}


@pytest.mark.parametrize(
    ("name", "front_end"),
    [
        ("resnet20_aux", "torch"), ("mobilenet_v1_025", "torch"), ("mobilenet_v2_cifar", "torch"), ("mnist_cntk", "onnx"),
        ("stories260k", "torch"),
    ],
)  # fmt: skip
def test_reference_kernels_differ_by_their_roundings_alone(
    shared_data: Path, tmp_path: Path, name: str, front_end: str
) -> None:
    task = TASKS[name]()
    simulation, _ = quantized(name, front_end, task, tmp_path, target="litert")
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok, str(report)
    # every code is the one that the kernel is specified to make of the same codes
    assert [row.specified for row in report.rows] == [1.0] * len(report.rows)
    # and would be the simulation's if the kernel rescaled with one rounding
    once = [row.rounded_once for row in report.rows if row.rounded_once is not None]
    assert once and min(once) >= 0.9999, min(once)
    assert abs(task.score(in_litert(tmp_path / "model.tflite")) - task.score(simulation)) <= NOISE[name]
