"""The benchmarks measure what they say: ratios of interleaved runs, the peak of a phase, files on request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert len(results) == 3 and all(parts["whole"] > 0 for parts in results.values())


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


def test_times_of_tests_are_added_up_by_folder(tmp_path):
    lines = ["1.00s call     tests/a.py::test_x[one]", "0.20s setup    tests/a.py::test_x[two words]"]
    lines += ["0.70s call     tests/a.py::test_x[two words]", "3.00s call     tests/b/c.py::test_y"]
    (tmp_path / "log").write_text("\n".join(lines))
    tool = run("../tools/test_time.py", str(tmp_path / "log"), "--seconds", "0.8")
    assert [line.split("s  ", 1) for line in tool.stdout.splitlines()[:4]] == [
        ["   1.00 ", "tests/a.py::test_x[one]"], ["   0.90 ", "tests/a.py::test_x[two words]"],
        ["    3.0 ", "tests/b"], ["    1.9 ", "tests"],
    ]  # fmt: skip
