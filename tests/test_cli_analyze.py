"""``bitwright analyze``: the table that it prints, the files that it writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from bitwright.analysis import Analysis
from tests.analysis.conftest import Net, batches, exported
from tests.test_cli import run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its data, and labels that are nearly always its answers."""
    folder = tmp_path_factory.mktemp("analyze")
    model, data = Net().eval(), batches(2)
    onnx.save(exported(model, data[0]), folder / "net.onnx")
    np.savez(folder / "data.npz", x=np.concatenate([x.numpy() for x in data]))
    np.save(folder / "labels.npy", np.concatenate([model(x).argmax(-1).numpy() for x in data]))
    return folder


def test_the_worst_layers_are_printed_and_the_report_is_json(files, tmp_path):
    result = run(
        "analyze", files / "net.onnx", "--data", files / "data.npz", "--metric", "accuracy",
        "--labels", files / "labels.npy", "--group", "*conv*", "--remedies", 1, "--out", tmp_path / "report.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "32 samples" in result.output and "accuracy: float 1" in result.output
    assert "/conv1/Conv" in result.output and f"wrote {tmp_path / 'report.json'}" in result.output
    found = Analysis.from_dict(json.loads((tmp_path / "report.json").read_text()))
    assert found.metric.difference.n == 32 and "*conv*" in [group.name for group in found.groups]
    assert found.mode == "auto" and found.worst(1)[0].noise > 0


def test_a_function_rates_the_session(files, monkeypatch):
    (files / "rating.py").write_text(
        "import numpy as np\n"
        f"data = np.load({str(files / 'data.npz')!r})['x']\n"
        "def spread(session):\n"
        "    return session.run(None, {'x': data})[0].std(1)\n"
    )
    monkeypatch.syspath_prepend(str(files))
    monkeypatch.delitem(sys.modules, "rating", raising=False)
    result = run(
        "analyze", files / "net.onnx", "--data", files / "data.npz", "--metric", "rating:spread", "--mode", "fast",
        "--lower-is-better", "--no-fold",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "spread: float" in result.output and "95 % interval" in result.output


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (("--metric", "accuracy"), "no labels are given"),
        (("--metric", "acc"), "there is no metric 'acc'"),
        (("--out", "report.pdf"), "there is no report of the kind '.pdf'"),
        (("--group", "conv9*"), "'conv9*' matches no site"),
        (("--mode", "slow"), "there is no mode 'slow'"),
    ],
    ids=["no-labels", "metric", "out", "group", "mode"],
)
def test_what_cannot_be_answered_is_refused(files, arguments, problem):
    result = run("analyze", files / "net.onnx", "--data", files / "data.npz", *arguments)
    assert result.exit_code == 2 and problem in result.output


def test_the_report_is_one_page(files, tmp_path):
    result = run("analyze", files / "net.onnx", "--data", files / "data.npz", "--out", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "report.html").read_text().lower().startswith("<!doctype html>")
