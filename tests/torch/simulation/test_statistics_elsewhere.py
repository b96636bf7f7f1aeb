"""A checkpoint holds what calibration saw: another process changes bits, methods and the target without data."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from bitwright import RangeMethod
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated

DATA = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()


def changed(sim: QuantizationSimModel) -> dict[str, list[object]]:
    """The encodings of ``sim`` after other bits, symmetry and range methods were asked of it."""
    percentile = RangeMethod.of("percentile", {"percentile": 99.0})
    for site in sim.quantizers.values():
        if site.spec is not None and site.spec.symmetry == "asymmetric":
            site.spec = dataclasses.replace(site.spec, format="int4", symmetry="symmetric", method=percentile)
        elif site.spec is not None:
            site.spec = dataclasses.replace(site.spec, format="int4", method=RangeMethod("mse"))
    return {
        name: [site.encoding.format.name, site.encoding.scale.tolist(), site.encoding.zero_point.tolist()]
        for name, site in sim.quantizers.items()
        if site.encoding is not None
    }


_OTHER = """
import json, sys
from tests.torch.simulation.test_statistics_elsewhere import DATA, changed, network
from bitwright.torch import QuantizationSimModel
import torch
sim = QuantizationSimModel(network(), torch.zeros(1, 3, 8, 8), "mse")
sim.load_checkpoint(sys.argv[1])
found = changed(sim)
sim.export(sys.argv[2], "net", torch.zeros(1, 3, 8, 8), target="openvino_cpu")
print(json.dumps(found))
"""


def test_another_process_changes_bits_symmetry_method_and_target(tmp_path: Path) -> None:
    sim = calibrated(QuantizationSimModel(network(), DATA[0], "mse"), DATA)
    before = {name: site.encoding for name, site in sim.quantizers.items()}
    sim.save_checkpoint(tmp_path / "saved")
    command = [sys.executable, "-c", _OTHER, str(tmp_path / "saved"), str(tmp_path / "exported")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.strip().splitlines()[-1])
    # bit for bit what the process that saw the data finds
    assert found == changed(sim)
    assert len(found) == 5
    # biases have no int32 grid of their own beside inputs of 4 bits
    assert all(found[name][1] != before[name].scale.tolist() for name in found)
    assert (tmp_path / "exported").is_dir() and list((tmp_path / "exported").glob("*.onnx"))
