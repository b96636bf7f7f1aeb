"""Plant faults, one at a time, and count those that the tests see: ``make mutants``.

A sample of one-line faults (another comparison, another operator, a number changed by one, a condition negated) over
``bitwright/core`` and the closed-form parts of ``bitwright/methods``, drawn with a fixed seed. Each is written into a copy
of the checkout, where those tests run that run its line (one run without a fault, under coverage, says which): those of its own
module first, then the quickest of all, two minutes of them at most. What no test sees is listed with its line. The faults come
from cosmic-ray; the sample, the copies and the choice of tests are made here, because its own runs go through every fault with
one command. Every core has a copy of its own.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
import coverage
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
    "methods/scaling",
    "methods/folding",
    "methods/layers.py",
    "methods/attention.py",
    "methods/bias_correction.py",
)
#: tests that are to see the faults: all that call the parts, by themselves or by way of a front end
TESTS = (
    "bitwright/core",
    "bitwright/methods",
    *("tests/core", "tests/methods", "tests/recipes", "tests/conformance", "tests/torch", "tests/onnx", "tests/export"),
    *("tests/analysis", "tests/compare", "tests/precision", "tests/test_public_api.py", "tests/test_tables.py"),
)
#: compiled functions run without their lines being traced; these tests call them
UNTRACED = "bitwright/core/compiled"
CALLERS = ("tests/core/test_compiled.py", "tests/core/numerics", "tests/torch/quantizers")
#: these look at what modules declare, and run no line of them
DECLARED = ("tests/test_public_api.py",)
#: CPU seconds of tests that may look at one fault, beside those of its own module
ENOUGH = 120.0
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


class Coverage:
    """Which tests of ``TESTS`` run which lines, and how long each takes: found by one run of all of them without a fault.

    What a fixture of a file or of the session runs counts for every test of the file that asked first.
    """

    def __init__(self, tests_of: dict[str, dict[int, set[str]]], seconds: dict[str, float]) -> None:
        self.tests_of, self.seconds = tests_of, seconds

    @classmethod
    def of(cls, copies: list[Path]) -> Coverage:
        """Run the tests, in a process for every copy."""
        runs = []
        for index, copy in enumerate(copies):
            share = _Share(index, len(copies))
            runs.append(_FORK.Process(target=_record, args=(copy, share, copy.parent / "coverage.json")))
            runs[-1].start()
        tests_of: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        seconds: dict[str, float] = {}
        for copy, run in zip(copies, runs, strict=True):
            run.join()
            taken, found = json.loads((copy.parent / "coverage.json").read_text(encoding="utf-8"))
            names = list(taken)
            seconds |= taken
            for module, lines in found.items():
                for line, tests in lines.items():
                    tests_of[module][int(line)] |= {t if isinstance(t, str) else names[t] for t in tests}
        return cls(tests_of, seconds)

    def selection(self, module: Path, lines: range) -> list[str]:
        """Tests that pass and run one of ``lines``, or what the import of ``module`` runs there; quick files first."""
        tests_of = self.tests_of.get(str(module), {})
        contexts = {each for line in lines for each in tests_of.get(line, ())}
        declared: tuple[str, ...] = ()
        if "" in contexts:
            contexts |= {each for line in tests_of for each in tests_of[line]}
            declared = DECLARED
        files = {each for each in contexts if "::" not in each}
        untraced = CALLERS if module.is_relative_to(UNTRACED) else ()
        chosen = [
            test
            for test in self.seconds
            if test in contexts or _file(test) in files or test.startswith((*untraced, *declared))
        ]
        together: defaultdict[str, float] = defaultdict(float)
        for test in chosen:
            together[_file(test)] += self.seconds[test]
        return sorted(chosen, key=lambda test: (together[_file(test)], _file(test)))

    def files(self, tests: list[str]) -> list[str]:
        """All tests of the files that ``tests`` are of."""
        files = dict.fromkeys(_file(test) for test in tests)
        return [test for test in self.seconds if _file(test) in files]


def _file(test: str) -> str:
    return test.partition("::")[0]


class _Recorder:
    """A plugin of pytest: tells coverage which test runs, and keeps the CPU seconds of those that pass."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured, self.seconds = measured, dict[str, float]()
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.measured.switch_context(item.nodeid)
        begun = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - begun

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        self.measured.switch_context(_file(request.node.nodeid or "tests"))
        try:
            return (yield)
        finally:
            self.measured.switch_context(os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


class _Share:
    """A plugin of pytest: of all files with tests, every n-th."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = {file: n for n, file in enumerate(dict.fromkeys(_file(item.nodeid) for item in items))}
        items[:] = [item for item in items if files[_file(item.nodeid)] % self.count == self.index]


def _record(copy: Path, share: _Share, found: Path) -> None:
    """Run a share of ``TESTS`` and write, as JSON, CPU seconds by test and the places of tests in it by line and module."""
    measured = coverage.Coverage(
        data_file=None, config_file=False, include=[str(copy / module) for module in modules()]
    )
    recorder = _Recorder(measured)
    measured.start()
    _pytest(copy, list(TESTS), recorder, share)
    measured.stop()
    data = measured.get_data()
    seconds = {test: time for test, time in recorder.seconds.items() if test not in recorder.failed}
    places = {test: n for n, test in enumerate(seconds)}
    tests_of = {
        str(Path(name).relative_to(copy)): {
            line: [places.get(test, test) for test in tests] for line, tests in data.contexts_by_lineno(name).items()
        }
        for name in data.measured_files()
    }
    found.write_text(json.dumps([seconds, tests_of]), encoding="utf-8")
    os._exit(0)  # no clean-up of what belongs to the parent


class _Selection:
    """A plugin of pytest: runs the tests it was given, in that order."""

    def __init__(self, tests: list[str]) -> None:
        self.places = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.places), key=lambda i: self.places[i.nodeid])


def seen_by(copy: Path, module: Path, lines: range, known: Coverage) -> str | None:
    """The tests that fail on the copy: of the module, of those that run the line, of their files; ``None`` if none does."""
    covering = known.selection(module, lines)
    own = [test for test in covering if Path(_file(test)).stem.startswith(f"test_{module.stem}")]
    others = [test for test in covering if test not in set(own)]
    rest = [test for test in known.files(covering) if test not in set(covering)]
    for name, tests in (("own tests", own), ("tests that run it", others), ("tests of their files", rest)):
        quick = list(tests) if name == "own tests" else list(_enough(tests, known.seconds))
        if quick and (end := _fails(copy, quick, sum(known.seconds[test] for test in quick))):
            return f"{name}, {end}"
    return None


def _enough(tests: list[str], seconds: dict[str, float]) -> Iterator[str]:
    """The first tests, as far as ``ENOUGH`` reaches."""
    taken = 0.0
    for test in tests:
        taken += seconds[test]
        if taken > ENOUGH:
            return
        yield test


def _fails(copy: Path, tests: list[str], seconds: float) -> str | None:
    """How a run of ``tests`` ended badly, where it did; ``seconds`` is the CPU time it takes without a fault."""
    suite = _FORK.Process(target=_run, args=(copy, tests, int(60 + 5 * seconds)))
    suite.start()
    suite.join(20 * (60 + 5 * seconds))  # one that waits uses no CPU time
    if suite.is_alive():
        suite.kill()
        suite.join()
        return "no end"
    if suite.exitcode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    return "failed" if suite.exitcode in (1, 2, 4) else f"ended with {suite.exitcode}"


def _run(copy: Path, tests: list[str], limit: int) -> None:
    """Run tests in the copy, in a process that has imported what they need besides the package."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    files = list(dict.fromkeys(_file(test) for test in tests))
    os._exit(_pytest(copy, ["-x", *files], _Selection(tests)))


def _pytest(copy: Path, arguments: list[str], *plugins: object) -> int:
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    return int(pytest.main(["-q", "-m", "not slow", "-p", "no:cacheprovider", *arguments], plugins=[*plugins]))


def changed_lines(before: str, after: str) -> range:
    """Lines of the innermost statement that differs; of one with a body only those before it."""
    old, new = before.splitlines(), after.splitlines()
    first = next(n for n, (a, b) in enumerate(zip(old, new, strict=False), 1) if a != b)
    found = range(first, first + 1)
    for node in ast.walk(ast.parse(before)):  # outer statements come before inner ones
        if isinstance(node, ast.stmt) and node.lineno <= first <= (node.end_lineno or first):
            body = getattr(node, "body", None)
            end = body[0].lineno if body and body[0].lineno > node.lineno else (node.end_lineno or first) + 1
            if first < end:
                found = range(node.lineno, end)
    return found


def line_of(before: str, after: str) -> str:
    """The changed line, old and new."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return " -> ".join(line[1:].strip() for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def main() -> int:
    """Plant faults until the time is up; 1 when fewer than the share asked for was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long, with the first run")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same faults in the same order")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many faults: to go on with a sample")
    parser.add_argument("--least", type=float, default=85.0, help="percent that must be seen")
    options = parser.parse_args()
    for library in LIBRARIES:
        importlib.import_module(library)
    end, survived, count = time.monotonic() + 60 * options.minutes, 0, 0
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder, str(index), "checkout") for index in range(cores)]
        for copy in copies:
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
        known = Coverage.of(copies)
        print(f"{len(known.seconds)} tests pass without a fault, in {sum(known.seconds.values()):.0f} s", flush=True)
        told = _FORK.SimpleQueue()
        for index, copy in enumerate(copies):
            mutants = islice(sample(options.seed), options.skip + index, None, cores)
            _FORK.Process(target=_plant_all, args=(copy, mutants, known, end, told)).start()
        running = cores
        while running:
            line = told.get()
            if line is None:
                running -= 1
                continue
            count, survived = count + 1, survived + line.startswith("SURVIVED")
            print(line, flush=True)
    print(f"{count - survived} of {count} faults seen: {100 * (count - survived) / max(count, 1):.0f} %")
    return 0 if count - survived >= options.least / 100 * count else 1


def _plant_all(copy: Path, mutants: Iterator[Mutant], known: Coverage, end: float, told: Any) -> None:
    """Plant faults in a copy until the time is up; tell a line of each, and ``None`` at the end."""
    try:
        for number, mutant in enumerate(mutants):
            if time.monotonic() > end:
                break
            before = (copy / mutant.module).read_text(encoding="utf-8")
            after = mutant.applied(before)
            if after is None or after == before or _computations(after) == _computations(before):
                continue
            seen = _planted(copy, mutant.module, before, after, known, stamp=2 * number)
            told.put(f"{f'seen by {seen}' if seen else 'SURVIVED'}  {mutant.module}: {line_of(before, after)}")
    finally:
        told.put(None)


def _computations(source: str) -> str:
    """A module without what says how its functions may be called: a ``*`` among parameters is no product."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            node.defaults = [*node.defaults, *(default for default in node.kw_defaults if default is not None)]
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
    return ast.dump(tree)


def _planted(copy: Path, module: Path, before: str, after: str, known: Coverage, stamp: int) -> str | None:
    """Plant a fault, run tests, and take it out; ``stamp`` tells Python that its bytecode is of another text."""
    for number, text in enumerate((after, before)):
        (copy / module).write_text(text, encoding="utf-8")
        os.utime(copy / module, (stamp + number + 1, stamp + number + 1))
        if text is after:
            seen = seen_by(copy, module, changed_lines(before, after), known)
    return seen


if __name__ == "__main__":
    sys.exit(main())
