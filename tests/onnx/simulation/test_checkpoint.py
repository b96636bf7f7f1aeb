"""Checkpoints of simulated ONNX models: another process changes bits and range methods, and exports, without data."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bitwright.core.numerics.formats import parse_format
from bitwright.core.numerics.spec import RangeMethod
from bitwright.errors import EncodingsError
from bitwright.onnx import QuantizationSimModel, apply_gptq
from tests.onnx.nets import Net

X = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
FEEDS = {"x": X}


def network() -> onnx.ModelProto:
    net = Net()
    x = net.input(shape=(4, 3, 8, 8))
    return net.model(net("Relu", net.conv(net("Relu", net.conv(x, name="c1")), 4, 4, name="c2")))


def calibrated(scheme: str = "mse") -> QuantizationSimModel:
    sim = QuantizationSimModel(network(), FEEDS, scheme)
    sim.compute_encodings([FEEDS, {"x": 3 * X}], progress=False)
    return sim


def change(sim: Any, bits: str, method: str) -> None:
    for site in sim.quantizers.values():
        if site.role in ("input", "output"):
            site.spec = replace(site.quantizer.spec, format=parse_format(bits), method=RangeMethod.of(method))


@pytest.mark.parametrize("scheme", ["min_max", "mse"])
def test_other_bits_and_range_methods_need_no_data_after_loading(tmp_path: Path, scheme: str) -> None:
    sims = [calibrated(scheme), QuantizationSimModel(network(), FEEDS, scheme)]
    sims[1].load_checkpoint(sims[0].save_checkpoint(tmp_path))
    for method in ["minmax"] if scheme == "min_max" else ["minmax", "mse", "percentile", "entropy"]:
        for bits in ("uint4", "uint8"):
            for sim in sims:
                change(sim, bits, method)
            one, other = ({name: site.encoding for name, site in sim.quantizers.items()} for sim in sims)
            assert one == other and None not in one.values()
            for found, expected in zip(sims[1].run(FEEDS), sims[0].run(FEEDS), strict=True):
                np.testing.assert_array_equal(found, expected)
    before = sims[1].quantizers["c1.input[0]"].encoding.max
    sims[1].compute_encodings([{"x": 10 * X}], resume=True, progress=False)  # and calibration goes on
    assert sims[1].quantizers["c1.input[0]"].encoding.max > before


def test_weights_that_a_method_chose_are_kept(tmp_path: Path) -> None:
    sim = calibrated("min_max")
    apply_gptq(sim, [FEEDS], progress=False)
    fresh = QuantizationSimModel(network(), FEEDS, "min_max")
    fresh.load_checkpoint(sim.save_checkpoint(tmp_path))
    np.testing.assert_array_equal(fresh.run(FEEDS)[0], sim.run(FEEDS)[0])
    assert fresh.calibrated and fresh.quantizers["c1.weight"].frozen == sim.quantizers["c1.weight"].frozen


def test_a_checkpoint_of_another_model_or_a_damaged_one_changes_nothing(tmp_path: Path) -> None:
    folder = calibrated().save_checkpoint(tmp_path)
    net = Net()
    other = QuantizationSimModel(net.model(net.conv(net.input(shape=(4, 3, 8, 8)), name="c1")), FEEDS)
    with pytest.raises(EncodingsError, match=r"c2\.weight.*build the simulation from the same model"):
        other.load_checkpoint(folder)
    assert not other.calibrated
    path = folder / "statistics.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    fresh = QuantizationSimModel(network(), FEEDS)
    with pytest.raises(EncodingsError, match=r"statistics\.safetensors.*another content.*restore the file"):
        fresh.load_checkpoint(folder)
    assert not fresh.calibrated and all(
        site.encoding is None for site in fresh.quantizers.values() if site.role == "input"
    )


@pytest.mark.slow
def test_another_process_writes_other_bits_without_data(tmp_path: Path) -> None:
    folder = calibrated().save_checkpoint(tmp_path / "saved")
    onnx.save(network(), tmp_path / "net.onnx")
    script = (
        "import sys, numpy as np\n"
        "from bitwright.onnx import QuantizationSimModel\n"
        "sim = QuantizationSimModel(sys.argv[1], {'x': np.zeros((4, 3, 8, 8), np.float32)}, 'mse')\n"
        "sim.load_checkpoint(sys.argv[2])\n"
        "from tests.onnx.simulation.test_checkpoint import change\n"
        "change(sim, 'uint4', 'mse')\n"
        "np.save(sys.argv[3], sim.quantizers['relu1.output[0]'].encoding.scale)\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, tmp_path / "net.onnx", folder, tmp_path / "scale.npy"],
        check=True,
        cwd=Path(__file__).parents[3],
    )
    here = calibrated()
    change(here, "uint4", "mse")
    np.testing.assert_array_equal(np.load(tmp_path / "scale.npy"), here.quantizers["relu1.output[0]"].encoding.scale)
