"""What ``quantize(model, data)`` does to trained networks when nothing is said: W8A8, every network, both front ends.

Needs the data folder (see tests/data.py).
"""

from __future__ import annotations

import pytest

from tests.tasks import TASKS, measured

pytestmark = pytest.mark.slow
#: the default recipe's distance from float that is allowed: points of accuracy, or a share of the perplexity
POINTS, SHARE = 0.3, 0.01
IMAGES = ("mobilenet_v2_cifar", "mobilenet_v1_025", "resnet20_aux")
DIGITS = ("mnist_cntk", "mnist_pytorch")


@pytest.mark.parametrize(
    ("name", "front_end"),
    [(name, end) for name in IMAGES for end in ("torch", "onnx")] + [(name, "onnx") for name in DIGITS],
)
def test_classification_within_three_tenths_of_a_point(shared_data, name, front_end):
    task = TASKS[name]()
    float_metric = measured(name, task, front_end, "w8a8", "float")
    assert measured(name, task, front_end, "w8a8", None) >= float_metric - POINTS


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
@pytest.mark.parametrize("name", IMAGES)
def test_one_scale_per_tensor_within_a_point(shared_data, name, front_end):
    task = TASKS[name]()
    float_metric = measured(name, task, front_end, "w8a8_per_tensor", "float")
    assert measured(name, task, front_end, "w8a8_per_tensor", None) >= float_metric - 1.0


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
@pytest.mark.parametrize("name", ["stories260k", "lstm_char"])
def test_perplexity_within_one_percent(shared_data, name, front_end):
    task = TASKS[name]()
    float_metric = measured(name, task, front_end, "w8a8", "float")
    assert measured(name, task, front_end, "w8a8", None) <= float_metric * (1 + SHARE)


def test_faces_are_found_better_than_with_nearest_rounding(shared_data):
    task = TASKS["face_slim_320"]()
    nearest = measured("face_slim_320", task, "onnx", "w8a8", ["fold"])
    assert measured("face_slim_320", task, "onnx", "w8a8", None) >= nearest
