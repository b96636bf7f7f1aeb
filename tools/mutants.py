"""Plant faults, one at a time, and count those that the tests see: ``make mutants``.

A sample of one-line faults (another comparison, another operator, a number changed by one, a condition negated) over
``bitwright/core`` and the closed-form parts of ``bitwright/algorithms``, drawn with a fixed seed. Each is written into a copy
of the checkout, where the tests of its own module run first, then those of its part. What no test sees is listed with its
line. The faults come from cosmic-ray; the sample, the copy and the choice of tests are made here, because its own runs go
through every fault with one command.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
import pytest
from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).parents[1]
_FORK = multiprocessing.get_context("fork")
#: imported once: every run of tests is a fork of this process, so that it begins with them in memory
LIBRARIES = (
    "numpy",
    "torch",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "hypothesis",
    "scipy.stats",
    "typer.testing",
)
PARTS = (
    "core",
    "algorithms/scaling",
    "algorithms/folding",
    "algorithms/channels",
    "algorithms/bias_correct.py",
)
_PAIRS = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Div", "Pow_Mul", "Mod_Mul", "BitAnd_BitOr")
_COMPARED = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
OPERATORS = (
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in _PAIRS),
    *(f"core/ReplaceComparisonOperator_{pair}" for pair in _COMPARED),
    "core/NumberReplacer", "core/AddNot", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd", "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue", "core/ReplaceContinueWithBreak", "core/ReplaceUnaryOperator_USub_UAdd",
    "core/ReplaceUnaryOperator_Delete_Not", "core/ZeroIterationForLoop",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault: an operator of cosmic-ray at its n-th place in a module."""

    module: Path  # below the checkout
    operator: str
    occurrence: int

    def applied(self, source: str) -> str | None:
        """The module with the fault; ``None`` when it has no such place."""
        changed: str | None = mutate_code(source, _operator(self.operator), self.occurrence)
        return changed


class _Counter(Visitor):
    """Counts the places of an operator."""

    def __init__(self, operator: Any) -> None:
        self.operator, self.count = operator, 0

    def visit(self, node: object) -> object:
        """Count at one node."""
        self.count += len(list(self.operator.mutation_positions(node)))
        return node


def _operator(name: str) -> Any:
    return cosmic_ray.plugins.get_operator(name)()


def modules() -> Iterator[Path]:
    """Modules that faults are planted in, below the checkout."""
    for part in PARTS:
        path = ROOT / "bitwright" / part
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        yield from (file.relative_to(ROOT) for file in files if file.name != "__init__.py")


def sample(seed: int) -> Iterator[Mutant]:
    """Faults in random order: a module by its number of places, then a place in it."""
    places: list[Mutant] = []
    for module in modules():
        tree = get_ast((ROOT / module).read_text(encoding="utf-8"))
        for name in OPERATORS:
            counter = _Counter(_operator(name))
            counter.walk(tree)
            places += [Mutant(module, name, occurrence) for occurrence in range(counter.count)]
    random.Random(seed).shuffle(places)
    yield from places


def suites(module: Path) -> list[list[str]]:
    """Tests that are to see a fault in ``module``: its own, then those of its part, then of the methods and both front ends."""
    inside = module.relative_to("bitwright")
    own = [str(p.relative_to(ROOT)) for p in (ROOT / "tests" / inside.parent).glob(f"test_{inside.stem}*.py")]
    return [own, [f"tests/{inside.parts[0]}"], ["tests/conformance", "tests/methods"]]


def seen_by(copy: Path, module: Path, limit: float) -> str | None:
    """The first suite that fails on the copy; ``None`` when none does."""
    for tests in suites(module):
        if not tests:
            continue
        suite = _FORK.Process(target=_run, args=(copy, tests))
        suite.start()
        suite.join(limit)
        if suite.is_alive():
            suite.kill()
            suite.join()
            return f"{' '.join(tests)} (no end)"
        if suite.exitcode != 0:
            return " ".join(tests)
    return None


def _run(copy: Path, tests: list[str]) -> None:
    """Run tests in the copy, in a process that has imported what they need besides the package."""
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    code = pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests])
    os._exit(int(code))  # no clean-up of what belongs to the parent


def line_of(before: str, after: str) -> str:
    """The changed line, old and new."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return " -> ".join(
        line[1:].strip() for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")
    )


def main() -> int:
    """Plant faults until the time is up; 1 when fewer than the share asked for was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long faults are planted")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same faults in the same order")
    parser.add_argument("--least", type=float, default=85.0, help="percent that must be seen")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds after which a suite counts as failing"
    )
    options = parser.parse_args()
    for library in LIBRARIES:
        importlib.import_module(library)
    end, survived, count = time.monotonic() + 60 * options.minutes, [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "checkout")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
        for mutant in sample(options.seed):
            if time.monotonic() > end:
                break
            before = (ROOT / mutant.module).read_text(encoding="utf-8")
            after = mutant.applied(before)
            if after is None or after == before:
                continue
            (copy / mutant.module).write_text(after, encoding="utf-8")
            seen = seen_by(copy, mutant.module, options.limit)
            (copy / mutant.module).write_text(before, encoding="utf-8")
            count += 1
            line = f"{mutant.module}: {line_of(before, after)}"
            survived += [] if seen else [line]
            print(f"{'seen    ' if seen else 'SURVIVED'}  {line}", flush=True)
    share = 100 * (count - len(survived)) / max(count, 1)
    print(f"{count - len(survived)} of {count} faults seen: {share:.0f} %")
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
