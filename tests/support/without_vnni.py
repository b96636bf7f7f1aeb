"""Runs of a library on this CPU as if it had no integer dot products, in a process that lives as long as the tests.

Started as a script, with the path of the library where there is one: executes the scripts that standard input names.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest

SOURCE = Path(__file__).with_suffix(".c")


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


@cache
def _process() -> subprocess.Popen[str]:
    """Imports and the exporter's tables are loaded once; the process ends when its input does, with this one."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "without_vnni.so")
        if not lacks_vnni():
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.without_vnni", *([] if lacks_vnni() else [str(library)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def run_without_vnni(code: str, folder: Path, *arguments: str) -> str:
    """What ``code`` prints when it runs on AVX2 kernels; ``sys.argv[1:]`` are the arguments.

    Runs the code as it stands where the CPU has none, and skips the test on other machines that cannot hide instructions.
    """
    if not lacks_vnni() and (reason := _why_not()):
        pytest.skip(reason)
    script = folder / "script.py"
    script.write_text("import sys\n" + code)
    process = _process()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([str(script), *arguments]) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, f"the process ended with {process.wait()}"
    printed, error = json.loads(answer)
    assert not error, error
    return str(printed)


def _answers(requests: IO[str]) -> Iterator[str]:
    """What each script prints, and the traceback of one that fails."""
    for request in requests:
        sys.argv[:] = json.loads(request)
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__file__ = sys.argv[0]
        printed, error = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec"), main.__dict__)
        except Exception:
            error = traceback.format_exc()
        yield json.dumps([printed.getvalue(), error])


if __name__ == "__main__":
    if sys.argv[1:]:
        assert ctypes.CDLL(sys.argv[1]).without_vnni() == 0, "CPUID does not fault here"
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    print("ready", file=replies, flush=True)
    for reply in _answers(sys.stdin):
        print(reply, file=replies, flush=True)
