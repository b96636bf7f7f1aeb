"""Scripts in the style of AIMET's documentation run when their imports are prefixed, and nothing else is changed."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from bitwright.aimet_common.absent import DifferenceWarning
from bitwright.migrate import migrate

SCRIPTS = Path(__file__).parent / "scripts"
FILES = sorted(SCRIPTS.rglob("*.py"))


def run(path: Path) -> None:
    """Run a script with its imports prefixed; its assertions are the test."""
    found = migrate(path.read_text(), path.name)
    assert found.changed, "the script imports nothing of AIMET"
    assert not found.missing, found.missing
    torch.manual_seed(0)
    np.random.seed(0)
    exec(compile(found.source, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})


SLOW = {"torch/auto_quant_warns", "onnx/auto_quant_warns"}  # searches that export every trial


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=f"{path.parent.name}-{path.stem}",
            marks=[pytest.mark.slow] if f"{path.parent.name}/{path.stem}" in SLOW else [],
        )
        for path in FILES
    ],
)
def test_script_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DifferenceWarning)  # a script that means something else here says so
        if "warns" in path.stem:
            warnings.simplefilter("ignore", DifferenceWarning)
        run(path)
