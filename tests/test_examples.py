"""The example that ``make demo`` runs, and the notebooks of the documentation."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.processes import python
from tests.support.sources import load_script

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "quickstart.py"


@pytest.fixture
def quickstart() -> ModuleType:
    return load_script(SCRIPT)


def test_training_and_test_digits_are_apart(quickstart):
    training, test = quickstart.digits()
    assert (len(training), len(test)) == (26, 9)
    assert all(x.shape == (50, 1, 8, 8) and 0 <= x.min() and x.max() <= 1 for x, _ in training + test)
    train_images = {bytes(x.numpy().tobytes()) for batch, _ in training for x in batch}
    test_images = {bytes(x.numpy().tobytes()) for batch, _ in test for x in batch}
    assert not train_images & test_images


@pytest.mark.slow
def test_network_learns_the_digits(quickstart):
    torch.manual_seed(0)
    training, test = quickstart.digits()
    model = quickstart.DigitNet()
    quickstart.train(model, training)
    assert quickstart.accuracy(model, test) >= 97.0
    assert not model.training


@pytest.mark.slow
def test_training_a_quantized_lstm_gains_accuracy():
    percent = load_script(ROOT / "examples" / "recurrent_qat.py").main()
    assert percent["float"] >= 94.0
    assert percent["W8A8, after training"] >= percent["float"] - 1.0
    assert percent["W4A8, trained quantized"] >= percent["W4A8, after training"] + 2.0


@pytest.mark.slow
def test_training_with_a_guard_gains_accuracy_and_leaves_the_damaged_batch_out():
    percent, guard = load_script(ROOT / "examples" / "qat.py").main()
    assert percent["float"] >= 95.0
    assert percent["W4A8, trained quantized"] >= percent["W4A8, after training"] + 1.0
    assert (guard.steps, guard.skipped, guard.reasons) == (78, 3, {"loss": 3})


@pytest.mark.slow
def test_script_prints_its_five_rows(tmp_path):
    run = python(SCRIPT, tmp_path / "out", cwd=ROOT, env={"COLUMNS": "250", "PYTHONPATH": str(ROOT)})
    percent = {
        name: float(re.search(rf"{re.escape(name)} +\S (\d+\.\d+) %", run.stdout)[1])
        for name in (
            "float",
            *(f"{bits}, {what}" for bits in ("W8A8", "W4A8") for what in ("simulated", "in ONNX Runtime")),
        )
    }
    assert percent["float"] >= 97.0
    assert percent["W8A8, simulated"] >= percent["float"] - 0.5
    for bits in ("W8A8", "W4A8"):
        assert abs(percent[f"{bits}, simulated"] - percent[f"{bits}, in ONNX Runtime"]) <= 0.5
    assert percent["W4A8, simulated"] >= 90.0
    float_file = (tmp_path / "out/float/digits.safetensors").stat().st_size
    for bits in ("w8a8", "w4a8"):  # codes of 4 bits are stored as bytes, for the kernels of the default target
        assert (tmp_path / f"out/{bits}/digits.onnx").stat().st_size < float_file / 2
    assert "bitwright verify" in run.stdout


def _script(name: str) -> ModuleType:
    return load_script(ROOT / "examples" / f"{name}.py")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch and the trainers
@pytest.mark.parametrize(
    ("way", "package"),
    [
        ("loop", "torch"),
        ("checkpoint", "torch"),
        ("reentrant", "torch"),
        ("compile", "torch"),
        ("accelerate", "accelerate"),
        ("trainer", "transformers"),
        ("lightning", "lightning"),
    ],
)
def test_every_way_of_training_gains_accuracy(way, package):
    pytest.importorskip(package)
    before, after = _script("train_with").main(way)
    assert after >= before + 2.0


def _torchrun(script: Path, *arguments: str, processes: int, seconds: float, starts: str = "rank ") -> list[str]:
    """What ``torchrun`` prints; everything it started is ended after ``seconds``.

    Processes that outlive ``torchrun`` keep its pipes open, so that waiting for the end of its output would hang.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        str(script),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, errors
    return sorted(line for line in output.splitlines() if line.startswith(starts))


@pytest.mark.slow
def test_torchrun_trains_one_network_on_two_processes(tmp_path):
    lines = _torchrun(ROOT / "examples" / "train_ddp.py", str(tmp_path / "last"), processes=2, seconds=1800)
    found = [
        re.fullmatch(r"rank (\d): ([\d.]+) % before, ([\d.]+) % after training, all parameters (\w{16})", x)
        for x in lines
    ]
    assert [match[1] for match in found] == ["0", "1"]
    assert found[0][4] == found[1][4], "both ranks have the same weights and ranges"
    assert all(float(match[3]) >= float(match[2]) + 1.0 for match in found)
    assert (tmp_path / "last" / "checkpoint.json").is_file()


@pytest.mark.slow
def test_torchrun_trains_one_sharded_network_on_two_processes():
    lines = _torchrun(ROOT / "examples" / "train_with.py", "fsdp2", processes=2, seconds=300, starts="fsdp2: ")
    assert len(lines) == 2 and lines[0] == lines[1], "both ranks have the same weights and ranges"
    found = re.fullmatch(r"fsdp2: ([\d.]+) % before, ([\d.]+) % after training", lines[0])
    assert float(found[2]) >= float(found[1]) + 2.0


NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs/notebooks").glob("*.ipynb"))


def test_there_is_one_for_each_kind_of_user() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"torch", "onnx", "language_model"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_of_one_run_without_errors(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [out for cell in code for out in cell["outputs"] if out["output_type"] == "error"]
    printing = [cell for cell in code if "print(" in "".join(cell["source"]) and "@" not in "".join(cell["source"])]
    assert all(cell["outputs"] for cell in printing)
    assert isinstance(ast.parse("".join(code[-1]["source"])).body[-1], ast.Assert), "the last cell checks the results"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the extra 'dev' is not installed")
    nbformat = pytest.importorskip("nbformat", reason="the extra 'dev' is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
