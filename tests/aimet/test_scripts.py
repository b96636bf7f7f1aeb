"""Scripts in the style of AIMET's documentation run when their imports are prefixed, and nothing else is changed.

Every public function of ``scripts/*.py`` is one script. They are not collected as modules: they import AIMET under its own name.
"""

from __future__ import annotations

import ast
import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitwright.aimet_common.names import DifferenceWarning
from bitwright.migrate import migrate

FILES = sorted((Path(__file__).parent / "scripts").glob("*.py"))
SCRIPTS = [
    (path, node.name)
    for path in FILES
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
]


@functools.cache
def migrated(path: Path) -> dict[str, Any]:
    """The names of a file of scripts, with its imports prefixed."""
    found = migrate(path.read_text(), path.name)
    assert found.changed, "the scripts import nothing of AIMET"
    assert not found.missing, found.missing
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(found.source, str(path), "exec"), names)
    return names


@pytest.mark.parametrize("path, name", [pytest.param(p, n, id=f"{p.stem.partition('_')[0]}-{n}") for p, n in SCRIPTS])
def test_script_runs(path, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DifferenceWarning)  # a script that means something else here says so
        if "warns" in name:
            warnings.simplefilter("ignore", DifferenceWarning)
        migrated(path)[name]()
