"""Runs of a library on this CPU as if it had no integer dot products, in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
_START = (
    "import ctypes, sys\nassert ctypes.CDLL(sys.argv[1]).without_vnni() == 0, 'CPUID does not fault here'\n"
)


@cache
def _why_not() -> str:
    """Why this machine cannot do it; empty where it can."""
    info = Path("/proc/cpuinfo")
    if not info.is_file() or "cpuid_fault" not in info.read_text():
        return "this machine cannot hide instructions from a process (no cpuid_fault)"
    return "" if shutil.which("cc") else "no C compiler"


def run_without_vnni(code: str, folder: Path, *arguments: str) -> str:
    """What a fresh process prints that runs ``code`` on AVX2 kernels; ``sys.argv[2:]`` are the arguments.

    Skips the test on machines that cannot hide instructions.
    """
    if reason := _why_not():
        pytest.skip(reason)
    library, script = folder / "without_vnni.so", folder / "script.py"
    if not library.is_file():
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    script.write_text(_START + code)
    run = subprocess.run(
        [sys.executable, str(script), str(library), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
