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
def _facts() -> frozenset[str]:
    """Words of what Linux tells of the CPU: its features among them."""
    info = Path("/proc/cpuinfo")
    return frozenset(info.read_text().split() if info.is_file() else ())


def lacks_vnni() -> bool:
    """Whether this CPU is an x86 one without integer dot products."""
    return "avx2" in _facts() and not any("vnni" in word for word in _facts())


@cache
def _why_not() -> str:
    """Why this machine cannot do it; empty where it can."""
    if "cpuid_fault" not in _facts():
        return "this machine cannot hide instructions from a process (no cpuid_fault)"
    return "" if shutil.which("cc") else "no C compiler"


def run_without_vnni(code: str, folder: Path, *arguments: str) -> str:
    """What a fresh process prints that runs ``code`` on AVX2 kernels; ``sys.argv[2:]`` are the arguments.

    Runs the code as it stands where the CPU has none, and skips the test on other machines that cannot hide instructions.
    """
    library, script = folder / "without_vnni.so", folder / "script.py"
    if not lacks_vnni():
        if reason := _why_not():
            pytest.skip(reason)
        if not library.is_file():
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    script.write_text(("import sys\n" if lacks_vnni() else _START) + code)
    run = subprocess.run(
        [sys.executable, str(script), str(library), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
