"""Python in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def python(
    *arguments: str | Path, env: Mapping[str, str] | None = None, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with one thread for each library, and return what it printed.

    Args:
        arguments: of the interpreter: ``"-c", code`` or ``"-m", module``.
        env: variables beside those of this process.
        check: whether it has to end with exit code 0.
        options: of ``subprocess.run``.
    """
    ran = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, **options,
    )  # fmt: skip
    assert not check or ran.returncode == 0, ran.stdout + ran.stderr
    return ran
