"""The benchmarks and tools measure what they say: ratios, peaks, versions, cells of the suite of architectures."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import measure

    return measure


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FOLDER / script), *arguments], capture_output=True, text=True)


def test_ratio_is_that_of_the_times(measure, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure.time, "process_time", lambda: now[0])

    def takes(seconds: float):
        return lambda: now.__setitem__(0, now[0] + seconds)

    assert measure.ratio(takes(2.0), takes(8.0), rounds=5) == 4.0


def test_rounds_alternate_after_one_run_of_each(measure):
    order = []
    measure.ratio(lambda: order.append("a"), lambda: order.append("b"), rounds=2)
    assert "".join(order) == "ababba"


@pytest.mark.slow
def test_peak_is_that_of_the_phase(measure, tmp_path):
    script = tmp_path / "child.py"
    lines = [
        f"import json, sys; sys.path.insert(0, {str(FOLDER)!r}); import measure",
        "before = measure.peak_mib(); block = bytearray(64 << 20)",
        "print(json.dumps(measure.peak_mib() - before))",
    ]
    script.write_text("\n".join(lines))
    parent = bytearray(500 << 20)  # the child must not inherit this
    assert 60 < measure.in_fresh_process(str(script)) < 80
    del parent


def test_fresh_process_reports_its_error(measure, tmp_path):
    script = tmp_path / "child.py"
    script.write_text("import json, sys\nprint('noise')\nprint(json.dumps(sys.argv[1:]))")
    assert measure.in_fresh_process(str(script), "a", "b") == ["a", "b"]
    script.write_text("raise SystemExit('no such phase')")
    with pytest.raises(RuntimeError, match=r"child.py a failed:\nno such phase"):
        measure.in_fresh_process(str(script), "a")


def test_files_hold_the_table_and_the_machine(measure, tmp_path):
    measure.save(tmp_path / "r.json", tmp_path / "r.md", "Title", ["", "x"], [["row", "1.00"]], {"row": 1.0})
    raw = json.loads((tmp_path / "r.json").read_text())
    assert raw["results"] == {"row": 1.0} and raw["machine"]["threads"] == "1"
    assert "# Title\n\n|  | x |\n|---|---:|\n| row | 1.00 |\n" in (tmp_path / "r.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", "r.md"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("torch_speed.py", "--models mobilenet_v2 --rows forward"),
        ("recurrent_speed.py", "--length 20 --hidden 64"),
        ("ptq_speed.py", "--iterations 100 --features 256"),
        ("scaling.py", "--sizes 500 1000"),
        ("preparation.py", "--models chain --rounds 3"),
        ("memory.py", "--scale 0.1"),
    ],
)
def test_help_shows_an_example(script, words):
    shown = run(script, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "examples:" in shown.stdout and words in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_scripts_import_what_exists(folder: str) -> None:
    """Most scripts run by hand only, so that a function that moved would be missed for weeks."""
    missing = []
    for file in sorted((FOLDER.parent / folder).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("bitwright", "tests"):
                module = importlib.import_module(str(node.module))
                missing += [f"{file}: {node.module}.{a.name}" for a in node.names if not _importable(module, a.name)]
    assert not missing


def _importable(module: Any, name: str) -> bool:
    is_package = hasattr(module, "__path__")
    return hasattr(module, name) or is_package and importlib.util.find_spec(f"{module.__name__}.{name}") is not None


@pytest.mark.slow
def test_scaling_runs(tmp_path):
    ran = run("scaling.py", "--sizes", "20", "--json", str(tmp_path / "s.json"))
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / "s.json").read_text())["results"]
    assert [r["folded"] for r in results] == [20, 20]


@pytest.mark.slow
def test_ptq_speed_runs(tmp_path):
    options = ["--iterations", "10", "--features", "32", "--rounds", "1", "--json", str(tmp_path / "s.json")]
    ran = run("ptq_speed.py", *options)
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / "s.json").read_text())["results"]
    assert len(results) == 5 and all(parts["whole"] > 0 for parts in results.values())


@pytest.mark.slow
def test_recurrent_onnx_speed_runs(tmp_path):
    options = ["--quick", "--rows", "scan", "all", "--json", str(tmp_path / "s.json")]
    ran = run("recurrent_speed_onnx.py", *options)
    assert ran.returncode == 0, ran.stderr
    layers = json.loads((tmp_path / "s.json").read_text())["results"]["layers"]
    assert len(layers) == 4 and all(layer["all"] > 0 for layer in layers.values())


@pytest.mark.slow
def test_recurrent_speed_runs(tmp_path):
    sizes = ["--length", "4", "--batch", "2", "--hidden", "8", "--rounds", "1"]
    ran = run("recurrent_speed.py", *sizes, "--json", str(tmp_path / "s.json"))
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / "s.json").read_text())["results"]
    assert list(results) == ["LSTM", "GRU", "RNN"] and all(r["training step"] > 0 for r in results.values())


@pytest.mark.slow
def test_health_cost_runs(tmp_path):
    rows = ["min-max", "per batch", "weights", "doctor", "channels", "channels, ONNX"]
    options = ["--quick", "--models", "encoder", "--rounds", "1", "--batches", "1", "--json", str(tmp_path / "h.json")]
    ran = run("health_cost.py", *options, "--rows", *rows)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "h.json").read_text())["results"]["encoder"]
    assert list(found) == rows and all(value > 0 for value in found.values())


@pytest.mark.slow
def test_memory_runs(tmp_path):
    options = ["--models", "pictures", "--scale", "0.01", "--json", str(tmp_path / "m.json")]
    ran = run("memory.py", *options, "--folder", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / "m.json").read_text())["results"]
    assert [r["phase"] for r in results] == ["min-max", "histogram"]
    assert all(r["ours"] > 1 and r["float"] > 1 for r in results)
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


@pytest.mark.slow
def test_speed_runs(tmp_path):
    rows = ["creation", "min-max", "forward", "training step", "learned ranges", "memory"]
    options = [
        "--quick",
        "--models",
        "mobilenet_v2",
        "--rounds",
        "1",
        "--batches",
        "1",
        "--json",
        str(tmp_path / "s.json"),
    ]
    ran = run("torch_speed.py", *options, "--rows", *rows)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "s.json").read_text())["results"]["models"]["mobilenet_v2"]
    assert list(found) == rows
    assert found["memory"]["float"] > 1 and all(found[row] > 0 for row in rows[:-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("torch_speed.py", ["--rounds", "0"], "--rounds is 0"),
        ("scaling.py", ["--sizes", "0"], "--sizes has 0"),
        ("memory.py", ["--scale", "0"], "--scale is 0"),
    ],
)
def test_impossible_arguments_are_refused(script, arguments, message):
    ran = run(script, *arguments)
    assert ran.returncode == 2
    assert message in ran.stderr


def test_times_of_tests_are_added_up_and_costly_tests_written(tmp_path):
    lines = ["1.00s call     tests/a.py::test_x[one]", "0.20s setup    tests/a.py::test_x[two words]"]
    lines += [
        "0.70s call     tests/a.py::test_x[two words]",
        "3.00s call     tests/b/c.py::test_y",
        "0.90s call     tests/b/c.py::test_z",
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    tool = run(
        "../tools/test_time.py", str(tmp_path / "log"), "--seconds", "0.92", "--write", str(tmp_path / "costly.txt")
    )
    assert tool.stdout.splitlines() == [
        "   3.00 s in   1 variants  tests/b/c.py::test_y", "   1.90 s in   2 variants  tests/a.py::test_x",
        "    3.9 s  tests/b", "    1.9 s  tests", "    5.8 s  together, 4.9 s of it in 2 costly tests",
    ]  # fmt: skip
    assert (tmp_path / "costly.txt").read_text() == "a.py::test_x\nb/c.py::test_y\n"


ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def versions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import versions

    return versions


def test_the_oldest_set_has_a_version_for_everything_that_users_install(versions):
    wanted = versions.requirements(PROJECT)
    oldest = versions.lower_bounds(wanted)
    assert {"numpy==2.0", "torch==2.10", "onnx==1.23", "onnxruntime==1.31"} <= set(oldest)
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in oldest), oldest
    assert len({line.partition("==")[0] for line in oldest}) == len(oldest)


def test_every_python_that_is_claimed_is_run(versions):
    claimed = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if " :: 3." in c]
    assert [versions.Combination.parse(each).python for each in versions.COMBINATIONS] == claimed
    assert {versions.Combination.parse(each).libraries for each in versions.COMBINATIONS} == set(versions.SETS)


def test_a_combination_that_does_not_exist_is_refused(versions):
    with pytest.raises(argparse.ArgumentTypeError, match="'3.12:latest' is not a version and one of .*3.12:pinned"):
        versions.Combination.parse("3.12:latest")


def test_an_interpreter_that_does_not_exist_is_none(versions):
    assert versions.interpreter("3.99") is None


def test_what_is_run_exists(versions):
    assert all((ROOT / path).exists() for path in versions.TESTS)


SAMPLE = ("LlamaForCausalLM", "ResNetForImageClassification", "AutoencoderTiny")


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import reach

    monkeypatch.setattr(reach, "STATE", tmp_path)
    return reach


class Net(nn.Module):
    """A convolution, a product, and one more that ``hidden`` keeps from being seen."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc, self.hidden = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), hidden

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(self.conv(x).relu().mean((2, 3)))
        return torch.ops.aten.mm(y, self.fc.weight) if self.hidden else y @ self.fc.weight


def architecture(reach: Any, hidden: bool) -> Any:
    batch = {"x": torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))}
    return reach.Architecture("Net", "torch", lambda: Net(hidden).eval(), lambda seed: batch)


def test_a_product_that_interception_does_not_see_is_counted(reach: Any) -> None:
    day = reach.Day(architecture(reach, hidden=False))
    assert (day.simulate(), day.calibrate(), day.coverage()) == ("ok", "ok", "3 of 3")
    with reach.ProductCount() as count:
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
    assert count.found == 2


def test_a_cell_that_fails_has_its_reason_below_the_table(reach: Any, tmp_path: Path) -> None:
    cells = {"simulate": "ok", "calibrate": "FAILS: CalibrationError: a|b", "forward": ""}
    (tmp_path / "Net.json").write_text(json.dumps({"cells": cells, "running": None}))
    text = reach.markdown([architecture(reach, hidden=False)], {})
    assert "| Net | torch | ok | **fails** (1) |" in text
    assert "1. CalibrationError: a\\|b" in text
    assert "| **works** | | 1 of 1 | 0 of 1 | 0 of 0 |" in text


def test_a_package_that_cannot_be_imported_is_said_once(reach: Any) -> None:
    far = [reach.Architecture(name, "no_such_package", Net, dict) for name in ("A", "B")]
    absent = reach.import_all(far)
    assert absent["no_such_package"] == "ModuleNotFoundError: No module named 'no_such_package'"
    text = reach.markdown([*far, architecture(reach, hidden=False)], absent)
    assert text.count("Without rows: 2 of no_such_package (ModuleNotFoundError") == 1
    assert "0 of 1 architectures have run" in text and "| A |" not in text


def test_a_method_that_calls_a_simulated_part_is_no_lost_call(reach: Any) -> None:
    class Generator(Net):
        def generate(self, **_: Any) -> Tensor:
            self.fc(torch.ones(1, 4))
            return torch.ones(1, 9)

    made = reach.Architecture("G", "torch", lambda: Generator(False).eval(), architecture(reach, False).batch, True)
    day = reach.Day(made)
    assert (day.simulate(), day.calibrate(), day.generate()) == ("ok", "ok", "ok")
    assert day.sim._simulator.unseen  # it is noted


def test_the_commits_of_the_rows_are_counted(reach: Any, tmp_path: Path) -> None:
    nets = [reach.Architecture(name, "torch", Net, dict) for name in ("A", "B", "C", "D")]
    for name, commit in (("A", "one"), ("B", "two"), ("C", "one")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"cells": {}, "running": None, "commit": commit}))
    assert reach.commits(nets) == "one (2 rows), two (1 rows)"
    assert reach.commits(nets[:1]) == "one"


def test_what_has_a_result_is_not_run_again(reach: Any, tmp_path: Path) -> None:
    (tmp_path / "Net.json").write_text(json.dumps({"cells": {"simulate": "ok"}, "running": None}))
    said: list[str] = []
    reach.run_all([architecture(reach, hidden=False)], False, said.append)
    assert said == []


def test_there_are_enough_architectures_with_names_of_their_own(reach: Any) -> None:
    names = [a.name for a in reach.ARCHITECTURES]
    assert len(set(names)) == len(names) >= 60
    assert {a.package for a in reach.ARCHITECTURES} == {"transformers", "diffusers", "timm"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_works_from_simulation_to_verification(reach: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(a for a in reach.ARCHITECTURES if a.name == name)
    pytest.importorskip(found.package, reason=f"the extra `reach` is not installed, so there is no {found.package}")
    day = reach.Day(found)
    for stage in reach.STAGES:
        if stage != "generate" or found.generates:
            getattr(day, stage)()


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import size

    return size


def test_no_modules_of_the_package_import_each_other(size: Any) -> None:
    assert size.cycles(ROOT / "bitwright") == []


def test_an_import_inside_a_function_closes_a_cycle(size: Any, tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    for name, source in {
        "__init__": "",
        "a": "from pack import b",
        "b": "def f():\n    import pack.a",
        "c": "",
    }.items():
        (package / f"{name}.py").write_text(source)
    assert size.cycles(package) == [["pack.a", "pack.b"]]


def test_lines_of_code_leave_out_docstrings_and_comments(size: Any, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        '"""Doc.\n\nMore.\n"""\n\n# remark\nx = (\n    1,\n)\n\n\ndef f():\n    """Doc."""\n    return x\n'
    )
    assert size.lines_of_code(tmp_path / "x.py") == 5
