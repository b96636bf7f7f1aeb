"""Scales that are powers of two, for weights and activations: a shift takes the place of each multiplication."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bitwright.onnx as bo
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated

X = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
PRESET = "w8a8_power_of_two"


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()


def _is_power_of_two(scale: np.ndarray) -> bool:
    return bool((np.frexp(scale)[0] == 0.5).all())


def test_every_scale_of_the_simulation_and_of_the_file_is_a_power_of_two(tmp_path: Path) -> None:
    sim = calibrated(QuantizationSimModel(_network(), X[0], preset=PRESET), X)
    encodings = [q.encoding for q in sim.quantizers.values() if q.encoding is not None]
    assert len(encodings) == 7  # two weights, three activations, two biases: products of powers of two
    assert all(_is_power_of_two(e.scale) and not np.any(e.zero_point) for e in encodings)
    exported = sim.export(tmp_path, "net", X[0])
    scales = [t for t in onnx.load(exported.qdq).graph.initializer if t.name.endswith("_scale")]
    assert len(scales) == 7
    assert all(_is_power_of_two(onnx.numpy_helper.to_array(t)) for t in scales)
    report = sim.verify(X[0])
    assert "3 of 3 places agree" in str(report), report


def test_a_calibrated_scale_is_at_most_two_times_the_smallest_that_clips_nothing() -> None:
    sim = calibrated(QuantizationSimModel(_network(), X[0], preset=PRESET), X)
    encoding = sim.quantizers["0.input[0]"].encoding
    largest = max(float(x.abs().max()) for x in X)
    # the exponent is that of the largest value, as the MX specification has it: the largest code is 64 to 127
    assert encoding is not None and 64 <= largest / encoding.scale < 128


def test_the_onnx_front_end_finds_the_same_scales(tmp_path: Path) -> None:
    path = tmp_path / "float.onnx"
    torch.onnx.export(_network(), (X[0],), path, dynamo=True, verbose=False)
    sim = calibrated(bo.QuantizationSimModel(onnx.load(path), preset=PRESET), [x.numpy() for x in X])
    scales = [q.encoding.scale for q in sim.quantizers.values() if q.encoding is not None]
    torch_sim = calibrated(QuantizationSimModel(_network(), X[0], preset=PRESET), X)
    expected = [q.encoding.scale for q in torch_sim.quantizers.values() if q.encoding is not None]
    as_lists = [sorted(np.ravel(s).tolist() for s in each) for each in (scales, expected)]
    assert as_lists[0] == as_lists[1]


def test_a_zero_point_is_refused_with_these_scales() -> None:
    from bitwright.core.numerics.spec import activation_spec
    from bitwright.errors import ConfigError

    with pytest.raises(ConfigError, match="scales of format e8m0 go with symmetric grids, and uint8 has a zero point"):
        activation_spec("uint8", scale_format="e8m0")
