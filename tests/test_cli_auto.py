"""``bitwright auto``: what it prints, the files that it writes, and what it refuses; each remedy is followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.test_cli import run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small models, their data, and labels that are the first model's answers."""
    folder = tmp_path_factory.mktemp("auto")
    random = np.random.default_rng(0)
    x = random.standard_normal((32, 6)).astype(np.float32)
    for name in ("net", "other"):
        w, v = (random.standard_normal(shape).astype(np.float32) for shape in ((6, 8), (8, 3)))
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
            helper.make_node("Relu", ["h"], ["r"], "relu"),
            helper.make_node("MatMul", ["r", "v"], ["y"], "second"),
        ]
        ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", k])] for n, k in (("x", 6), ("y", 3))]
        weights = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(v, "v")]
        graph = helper.make_graph(nodes, "net", *ends, weights)
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / f"{name}.onnx"
        )
        if name == "net":
            np.save(folder / "labels.npy", (np.maximum(x @ w, 0) @ v).argmax(1))
    np.savez(folder / "data.npz", x=x)
    np.savez(folder / "more.npz", x=x * 2)
    return folder


def constant(session: Any) -> float:
    """A metric that does not look at the model."""
    return 0.5


def not_a_number(session: Any) -> float:
    return float("nan")


def right(session: Any) -> float:
    """The share of answers that are the first model's: higher is better."""
    random = np.random.default_rng(0)
    x, w, v = (random.standard_normal(shape).astype(np.float32) for shape in ((32, 6), (6, 8), (8, 3)))
    return float(np.mean(session.run(None, {"x": x})[0].argmax(1) == (np.maximum(x @ w, 0) @ v).argmax(1)))


def lost(session: Any) -> float:
    """The share of wrong answers, which is to be small."""
    return 1.0 - right(session)


def auto(files: Path, out: Path, *options: object, model: str = "net", data: str = "data") -> object:
    return run(
        "auto", files / f"{model}.onnx", "--data", files / f"{data}.npz", "--out", out, "--batch-size", 8,
        "--deadline", 0, *options,
    )  # fmt: skip


def test_the_best_model_is_on_disk_and_every_trial_was_told(files: Path, tmp_path: Path) -> None:
    found = auto(files, tmp_path, "--json", tmp_path / "result.json")
    assert found.exit_code == 0, found.output
    assert "trial w8a8-fast" in found.output and "the deadline ended the search" in found.output
    assert "0 s are less than one trial takes" in " ".join(found.output.split())
    assert f"the best one: {tmp_path / 'trials' / 'w8a8-fast'}" in found.output
    assert (tmp_path / "trials/w8a8-fast/model.onnx").is_file() and (tmp_path / "report.html").is_file()
    assert json.loads((tmp_path / "result.json").read_text())["best"]["name"] == "w8a8-fast"
    again = auto(files, tmp_path)
    assert again.exit_code == 0 and "w8a8-fast" in again.output


@pytest.mark.slow_variants("accuracy", "kl")
@pytest.mark.parametrize("metric", [("agreement",), ("accuracy", "--labels"), ("kl",)], ids=lambda m: m[0])
def test_metrics_by_name(metric: tuple[str, ...], files: Path, tmp_path: Path) -> None:
    labels = [files / "labels.npy"] if metric[1:] else []
    found = auto(files, tmp_path, "--metric", *metric, *labels, "--allowed-drop", 0.9)
    assert found.exit_code == 0, found.output
    kept = json.loads((tmp_path / "trials/w8a8-fast/trial.json").read_text())
    assert kept["metric"] is not None and kept["share"] == 1


def test_nothing_good_enough_says_what_comes_closest(files: Path, tmp_path: Path) -> None:
    found = auto(files, tmp_path, "--min-sqnr", 90)
    assert found.exit_code == 1 and "the float model is what remains" in found.output
    assert "w8a8-fast comes closest" in found.output


def test_a_folder_of_something_else_is_refused_and_both_remedies_work(files: Path, tmp_path: Path) -> None:
    assert auto(files, tmp_path / "a").exit_code == 0
    for options, problem in (
        ({"data": "more"}, "a search with another data"),
        ({"model": "other"}, "a search with another model"),
    ):
        found = auto(files, tmp_path / "a", **options)
        assert found.exit_code == 2 and problem in " ".join(found.output.split())
        assert "name an empty folder" in " ".join(found.output.split())
        assert auto(files, tmp_path / options.popitem()[1], **options).exit_code == 0
    assert auto(files, tmp_path / "a").exit_code == 0


@pytest.mark.slow_variants("constant metric", "an error as the metric", "a score as an error")
@pytest.mark.parametrize(
    "options, problem",
    [
        (("--allowed-drop", "0.01"), "there is no metric that could drop"),
        (("--metric", "accuracy"), "no labels are given"),
        (("--metric", "acuracy"), "there is no metric 'acuracy' (did you mean 'accuracy'?)"),
        (("--metric", "no_such_module:f"), "it cannot be imported"),
        (("--metric", "agreement", "--lower-is-better"), "the direction of 'agreement' is known"),
        (("--metric", "agreement", "--allowed-drop", "some"), "'some' is not a list of numbers"),
        (("--cost", "ms"), "milliseconds are wanted and times is None"),
        (("--cost", "size"), "there is no cost 'size'"),
        (("--cost", "ms", "--times", "no_such.json"), "the file cannot be read"),
        (("--metric", "tests.test_cli_auto:constant"), "it is 0.5 for outputs that are mostly noise"),
        (("--metric", "tests.test_cli_auto:not_a_number"), "of the float model it is NaN"),
        (("--metric", "tests.test_cli_auto:lost"), "and higher is better"),
        (("--metric", "tests.test_cli_auto:right", "--lower-is-better"), "and lower is better"),
        (("--deadline", "-1"), "-1.0 is not a time"),
        (("--deadline", "nan"), "nan is not a time"),
    ],
    ids=[
        "drop",
        "labels",
        "name",
        "module",
        "direction",
        "number",
        "no times",
        "cost",
        "no file of times",
        "constant metric",
        "metric not a number",
        "an error as the metric",
        "a score as an error",
        "negative deadline",
        "deadline not a number",
    ],
)
def test_what_cannot_be_answered_is_refused(
    options: tuple[str, ...], problem: str, files: Path, tmp_path: Path
) -> None:
    found = auto(files, tmp_path, *options)
    assert found.exit_code == 2 and problem in " ".join(found.output.split())
