"""The page about the architecture: its table has every folder, its walks every file that runs, its answers exist."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bitwright"
PAGE = (ROOT / "docs/architecture.md").read_text()


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def files_in(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.py)`", text))


def test_the_table_of_folders_lists_exactly_those_that_exist():
    folders = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_dir() and not path.name.startswith("_") and any(file.is_file() for file in path.iterdir())
    }
    rows = re.findall(r"^\| `([\w/]+)` \| \S", section("All folders"), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == {"bitwright", *folders}


def test_every_file_that_the_page_names_exists():
    assert not {file for file in files_in(PAGE) if not (PACKAGE / file).exists() and not (ROOT / file).exists()}


def entered(call: Callable[[], object]) -> set[str]:
    """The files of the package whose functions ``call`` enters."""
    found: set[str] = set()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # not the body of a module or class
            found.add(frame.f_code.co_filename)

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(previous)
    return {Path(file).relative_to(PACKAGE).as_posix() for file in found if file.startswith(f"{PACKAGE}/")}


@pytest.fixture
def example():
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)]
    return nn.Sequential(*layers).eval(), [torch.randn(4, 3, 8, 8) for _ in range(6)]


@pytest.mark.slow
def test_the_walks_name_every_file_that_runs(example, tmp_path):
    import bitwright
    from bitwright.torch import apply_gptq

    model, data = example
    results = []

    def quantize():
        results.append(bitwright.quantize(model, data, recipe=["fold"], progress=False))

    walks = {
        "Walk: `quantize`": quantize,
        "Walk: export": lambda: results[0].sim.export(tmp_path, "net", data[0]),
        "Walk: one method": lambda: apply_gptq(results[0].sim, data, progress=False),
    }
    for title, call in walks.items():
        call()  # imports
        unnamed = {file for file in entered(call) if not file.endswith("__init__.py")} - files_in(section(title))
        assert not unnamed, title


def test_the_answers_name_what_is_there():
    rows = re.findall(r"^\| [a-z].*? \| (`.+`) \| `(\w+)` \|$", section("Where is the code that ..."), re.MULTILINE)
    assert len(rows) >= 30
    for files, name in rows:
        for file in files_in(files):
            tree = ast.parse((PACKAGE / file).read_text())
            defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
            targets = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
            targets += [n.target for n in tree.body if isinstance(n, ast.AnnAssign)]
            assert name in defined | {t.id for t in targets if isinstance(t, ast.Name)}, (file, name)
