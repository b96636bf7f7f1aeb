"""What becomes of an export when its process is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_an_export_that_is_stopped_anywhere_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """Killed or interrupted before every change of a file; whoever reads first: verify, show, load_encodings."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.onnx.stopped_export", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert [stop for stop, *_ in lines] == ["kill", "interrupt"]
    for _, *outcomes in lines:
        switch = outcomes.index("new")
        assert switch > 8 and len(outcomes) - switch > 8
        assert set(outcomes[:switch]) == {"old"} and set(outcomes[switch:]) == {"new"}
