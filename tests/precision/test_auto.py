"""``auto_quantize``: a best model from the first trial on, which nothing can take away."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitwright.compare.verify import verify_folder
from bitwright.errors import BitwrightError
from bitwright.precision import executors, trials
from bitwright.precision.auto import AutoResult, auto_quantize
from bitwright.precision.trials import FIRST, Trial, waves
from tests.precision.nets import accuracy, batches, model
from tests.support.stopping import Watch, in_a_copy

ROOT = Path(__file__).parents[2]

SHORT = (FIRST, Trial("w4a8-fast", "w4a8", recipe=("fold",)), Trial("w8a16-fast", "w8a16", recipe=("fold",)))


class Right:
    """Accuracy per sample, as a metric that can be sent to another process."""

    def __init__(self, front: str) -> None:
        self.front = front

    def __call__(self, target: Any) -> Any:
        return accuracy(self.front, 200)(target)


def search(front: str, folder: Path, **options: Any) -> AutoResult:
    given = {"trials": SHORT, "allowed_drop": 0.1, "progress": False, **options}
    return auto_quantize(model(front), batches(front), Right(front), folder=folder, **given)


@pytest.mark.parametrize("front", [pytest.param("torch", marks=pytest.mark.slow), "onnx"])
def test_the_cheapest_good_trial_is_on_disk(front: str, tmp_path: Path) -> None:
    result = search(front, tmp_path)
    assert [row.name for row in result.trials] == [t.name for t in SHORT]
    assert result.best is not None and result.folder == tmp_path / "trials" / result.best.name
    good = [row for row in result.trials if row.good]
    assert result.best.bit_ops == min(row.bit_ops for row in good)
    assert verify_folder(result.folder).ok
    assert json.loads((tmp_path / "best.json").read_text())["best"] == result.best.name
    assert (
        float(np.mean(Right(front)(result.sim.model if front == "torch" else result.sim.session))) == result.best.metric
    )
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert content["front"] and content["trials"][0]["name"] == FIRST.name and "best" in str(result)


def test_the_search_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search("onnx", tmp_path / "whole")
    done: list[str] = []
    real = trials.run_trial

    def stopped(job: Any, trial: Trial) -> None:
        if trial.name == SHORT[1].name and not done.count("stop"):
            done.append("stop")
            raise KeyboardInterrupt
        done.append(trial.name)
        real(job, trial)

    monkeypatch.setattr(trials, "run_trial", stopped)
    first = search("onnx", tmp_path / "parts")
    assert "Ctrl-C ended the search" in first.reason and [r.name for r in first.trials] == [FIRST.name]
    assert first.best is not None
    second = search("onnx", tmp_path / "parts")
    assert done == [FIRST.name, "stop", SHORT[1].name, SHORT[2].name]
    assert [(r.name, r.metric, r.best) for r in second.trials] == [(r.name, r.metric, r.best) for r in whole.trials]


def test_the_ladder_follows_the_causes() -> None:
    names = [trial.name for wave in waves(["outlier_channels", "few_bits", "passes_on"]) for trial in wave]
    assert "w8a8-smooth-widen" in names and "w8a8-adaround" in names and names[-1] == "mixed"
    assert len(names) == len(set(names))


def test_a_trial_that_fails_is_told_and_the_search_goes_on(tmp_path: Path) -> None:
    bad = Trial("bad", "w8a8", recipe=("fold", "no_such_step"))
    result = search("onnx", tmp_path, trials=(bad, FIRST))
    assert "no_such_step" in result.trials[0].failed and result.best is not None and result.best.name == FIRST.name
    again = search("onnx", tmp_path, trials=(bad, FIRST))
    assert again.trials == result.trials


def test_every_trial_is_tested_with_the_whole_doubt(tmp_path: Path) -> None:
    """Nothing changes on 100 samples held back: that shows a drop below 1.8 %, however many trials there are."""
    answers, right = np.arange(200) % 10 > 0, Right("onnx")

    def metric(session: Any) -> Any:
        return answers if right(session).mean() > 0.5 else ~answers

    result = auto_quantize(
        model("onnx"), batches("onnx"), metric, folder=tmp_path, trials=SHORT, allowed_drop=0.02,
        progress=False,
    )  # fmt: skip
    assert result.best is not None and result.best.bit_ops == min(row.bit_ops for row in result.trials)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished search."""
    folder = tmp_path_factory.mktemp("searched")
    search("onnx", folder, trials=(FIRST,))
    return folder


@pytest.mark.parametrize("name", ["auto.json", "float.json", f"trials/{FIRST.name}/trial.json"])
@pytest.mark.parametrize("content", [b'{"a": ', b"\xff\xfe", b"[]"])
def test_a_damaged_file_of_a_search_is_named(name: str, content: bytes, searched: Path, tmp_path: Path) -> None:
    shutil.copytree(searched, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BitwrightError, match=f"{name}: it .*remove .*, and the same call goes on"):
        search("onnx", tmp_path, trials=(FIRST,))
    if "trials" in name:
        shutil.rmtree((tmp_path / name).parent)
    else:
        (tmp_path / name).unlink()
    assert search("onnx", tmp_path, trials=(FIRST,)).best is not None


def test_nothing_is_good_enough(tmp_path: Path) -> None:
    result = search(
        "torch", tmp_path / "a", allowed_drop=0.0, trials=(Trial("w2", "w4a8", recipe=("fold",)),), confidence=0.99
    )
    assert result.best is None and result.sim is None and result.nearest is not None
    assert "the float model is what remains" in result.reason and result.folder is not None
    failed = search("onnx", tmp_path / "b", trials=(Trial("bad", "w8a8", recipe=("nothing",)),))
    assert failed.folder is None and "every trial failed" in failed.reason


def test_without_a_metric_the_outputs_are_compared(tmp_path: Path) -> None:
    result = auto_quantize(model("onnx"), batches("onnx"), folder=tmp_path, trials=SHORT, min_sqnr=30, progress=False)
    assert result.best is not None and result.best.sqnr_db >= 30
    assert [row.good for row in result.trials] == [row.sqnr_db >= 30 for row in result.trials]


def test_the_deadline_ends_the_search_with_a_model(tmp_path: Path) -> None:
    result = search("onnx", tmp_path, deadline=0.0)
    assert [r.name for r in result.trials] == [FIRST.name] and "the deadline ended the search" in result.reason
    assert result.best is not None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"allowed_drop": 0.2}, "it belongs to a search with another allowed drop: 0.1, and here it is 0.2"),
        ({"seed": 4}, "another seed"),
    ],
    ids=["drop", "seed"],
)
def test_a_folder_of_other_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    search("onnx", tmp_path, trials=SHORT[:1])
    with pytest.raises(BitwrightError, match=message):
        search("onnx", tmp_path, **options)


def other_model() -> Any:
    proto = model("onnx")
    proto.graph.name = "other"
    return proto


def test_a_folder_of_another_model_or_data(tmp_path: Path) -> None:
    search("onnx", tmp_path, trials=SHORT[:1])
    with pytest.raises(BitwrightError, match="it belongs to a search with another data"):
        auto_quantize(model("onnx"), batches("onnx", 5), Right("onnx"), folder=tmp_path, allowed_drop=0.1)
    with pytest.raises(BitwrightError, match="it belongs to a search with another model"):
        auto_quantize(other_model(), batches("onnx"), Right("onnx"), folder=tmp_path, allowed_drop=0.1)


def not_a_number(target: Any) -> float:
    return float("nan")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"executor": "cluster"}, "there is no executor 'cluster'"),
        ({"workers": 0}, "0 is not a number of processes"),
        ({"cost": "ms"}, "milliseconds are wanted and times is None"),
        ({"cost": "size"}, "there is no cost 'size'"),
        ({"times": {}}, "the table has no preset that all of its rows have: it is empty"),
        (
            {"times": {"Conv": {"w8a8": 1}, "Gem": {"w8a8": 1}}},
            "neither a layer .* nor an operator type: 'Gem' .did you mean",
        ),
        ({"target": "ort_gpu_x"}, "ort_gpu_x"),
        ({"metric": not_a_number}, "of the float model it is NaN"),
        ({"metric": lambda m: np.ones(9), "workers": 2}, "cannot be sent to another process"),
    ],
    ids=["executor", "workers", "no times", "cost", "empty times", "slip in times", "target", "NaN", "lambda"],
)
def test_bad_input(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BitwrightError, match=message):
        auto_quantize(model("onnx"), batches("onnx"), **{"folder": tmp_path, "progress": False, **options})


def numbers(result: AutoResult) -> list[Any]:
    return [(r.name, r.metric, r.weight_bytes, r.bit_ops, r.sqnr_db, r.best) for r in result.trials]


def let_workers_start(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread each, and the tests, whose metrics they are sent, on their path."""
    if executor == "ray":
        pytest.importorskip("ray")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))


@pytest.mark.slow
def test_workers_find_what_one_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_workers_start("local", monkeypatch)
    one, two = search("onnx", tmp_path / "one"), search("onnx", tmp_path / "two", workers=2)
    assert numbers(one) == numbers(two)


@pytest.mark.slow
def test_ray_finds_what_one_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_workers_start("ray", monkeypatch)
    one, two = search("onnx", tmp_path / "one"), search("onnx", tmp_path / "two", workers=2, executor="ray")
    assert numbers(one) == numbers(two)


class Dies:
    """A metric whose process is lost the first ``times`` that it is called in a worker."""

    def __init__(self, front: str, marker: Path, parent: int, times: int) -> None:
        self._right, self._marker, self._parent, self._times = Right(front), marker, parent, times

    def __call__(self, target: Any) -> Any:
        lost = len(list(self._marker.glob("*")))
        if os.getpid() != self._parent and lost < self._times:
            (self._marker / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._right(target)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", "ray"])
def test_trials_of_a_lost_worker_run_again(executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_workers_start(executor, monkeypatch)
    (marker := tmp_path / "lost").mkdir()
    dies = Dies("onnx", marker, os.getpid(), 1)
    found = auto_quantize(
        model("onnx"), batches("onnx"), dies, folder=tmp_path / "two", trials=SHORT, allowed_drop=0.1, workers=2,
        executor=executor, progress=False,
    )  # fmt: skip
    assert len(list(marker.glob("*"))) >= 1
    assert numbers(found) == numbers(search("onnx", tmp_path / "one"))


@pytest.mark.slow
def test_kill_9_loses_the_running_trial_only(tmp_path: Path) -> None:
    """Before ten of the changes of files, drawn at random; the search then ends with the result of one left alone."""

    def run(folder: Path, at: int | None) -> int:
        def searched() -> int:
            sys.addaudithook(watch := Watch(folder, at, "kill"))
            search("onnx", folder)
            (tmp_path / "changes").write_text(str(watch.seen))
            return 0

        return in_a_copy(searched)

    assert run(tmp_path / "whole", None) == 0
    changes, whole = int((tmp_path / "changes").read_text()), search("onnx", tmp_path / "whole")
    folder, random, killed = tmp_path / "killed", np.random.default_rng(0), 0
    for _ in range(10):
        ended = run(folder, int(random.integers(changes // 3)))
        assert ended in (0, -signal.SIGKILL), ended
        killed += ended != 0
        for report in folder.glob("trials/[!.]*/trial.json"):
            assert "failed" not in json.loads(report.read_text()) and verify_folder(report.parent).ok
        best = folder / "best.json"
        assert not best.exists() or json.loads(best.read_text())["best"]
    assert killed >= 5
    assert numbers(search("onnx", folder)) == numbers(whole)


# -- what a metric must be able to tell


def test_a_metric_that_does_not_look_at_the_model_is_refused(tmp_path: Path) -> None:
    def constant(target: Any) -> Any:
        return np.arange(200) % 10 > 0

    with pytest.raises(BitwrightError, match="outputs that are mostly noise.*the same as in float"):
        auto_quantize(model("onnx"), batches("onnx"), constant, folder=tmp_path, trials=SHORT, progress=False)
    with pytest.raises(BitwrightError, match="the same as in float"):  # the trial is there by now
        auto_quantize(model("onnx"), batches("onnx"), constant, folder=tmp_path, trials=SHORT, progress=False)


class Wrong(Right):
    """An error, which is better when lower."""

    def __call__(self, target: Any) -> Any:
        return 1.0 - super().__call__(target)


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_an_error_as_the_metric_is_noticed_and_the_remedy_works(front: str, tmp_path: Path) -> None:
    two = Trial("w2", "w8a8", recipe=("fold",))
    given = (model(front), batches(front), Wrong(front))
    harmed = Trial("harmed", "w4a8", "percentile", ("fold",))
    options: dict[str, Any] = {"trials": (two, harmed), "allowed_drop": 0.1, "progress": False}
    with pytest.raises(BitwrightError, match="higher is better.*pass lower_is_better=True"):
        auto_quantize(*given, folder=tmp_path / "a", **options)
    found = auto_quantize(*given, folder=tmp_path / "b", lower_is_better=True, **options)
    assert found.best is not None and found.better == "lower"


def test_both_the_metric_and_the_outputs_have_to_be_good(tmp_path: Path) -> None:
    found = search("onnx", tmp_path, min_sqnr=30.0, allowed_drop=0.5)
    assert [row.good for row in found.trials] == [row.sqnr_db >= 30 for row in found.trials]
    assert {row.good for row in found.trials} == {True, False}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"allowed_drop": 0.1}, "allowed_drop: there is no metric that could drop"),
        ({"lower_is_better": True}, "lower_is_better: there is no metric that it could be for"),
        ({"labels": [1]}, "labels: there is no metric"),
        ({"metric": Right("onnx"), "labels": [1]}, "labels: the metric is a function"),
        ({"metric": "agreement", "lower_is_better": True}, "the direction of 'agreement' is known"),
        ({"min_sqnr": float("nan")}, "min_sqnr: nan is not a number of dB"),
        ({"deadline": float("nan")}, "deadline: nan is not a time"),
        ({"deadline": -1}, "deadline: -1 is not a time"),
        ({"confidence": 90}, "confidence: 90 is not a share"),
        ({"trials": ()}, "trials: the list is empty"),
        ({"trials": (FIRST, FIRST)}, "w8a8-fast stands there twice"),
        ({"trials": (Trial("../up", "w8a8"),)}, r"\.\./up"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BitwrightError, match=message):
        auto_quantize(model("onnx"), batches("onnx"), folder=tmp_path, progress=False, **options)
    assert not list(tmp_path.iterdir())


# -- what a folder belongs to


def test_weights_in_a_file_beside_the_model_are_part_of_it(tmp_path: Path) -> None:
    import onnx

    proto = model("onnx")
    onnx.save(
        proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0,
        convert_attribute=False,
    )  # fmt: skip
    path = str(tmp_path / "m.onnx")
    first = trials.identity(path, [], OPTIONS)
    assert first == trials.identity(path, [], OPTIONS)
    content = bytearray((tmp_path / "m.data").read_bytes())
    content[7] ^= 1
    (tmp_path / "m.data").write_bytes(bytes(content))
    assert first != trials.identity(path, [], OPTIONS)


OPTIONS: dict[str, Any] = {"labels": None, "evaluation_data": None, "config_file": None, "times": None}


def test_modules_and_rules_are_part_of_what_a_folder_belongs_to(tmp_path: Path) -> None:
    from torch import nn

    one, other = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.GELU())
    other.load_state_dict(one.state_dict())
    assert trials.identity(one, [], OPTIONS) != trials.identity(other, [], OPTIONS)
    rules = tmp_path / "rules.json"
    found = []
    for text in ("{}", '{"recurrent": "boundary_only"}'):
        rules.write_text(text)
        found.append(trials.identity(one, [], {**OPTIONS, "config_file": str(rules)}))
    assert found[0] != found[1]


def test_a_trial_of_the_same_name_has_to_be_the_same(searched: Path, tmp_path: Path) -> None:
    shutil.copytree(searched, tmp_path, dirs_exist_ok=True)
    other = Trial(FIRST.name, "w4a8", recipe=("fold",))
    with pytest.raises(BitwrightError, match="w8a8-fast was another one when it ran.*remove the folder of the trial"):
        search("onnx", tmp_path, trials=(other,))
    shutil.rmtree(tmp_path / "trials" / FIRST.name)
    assert [row.preset for row in search("onnx", tmp_path, trials=(other,)).trials] == ["w4a8"]


# -- what is to be small

CHIP = {
    "Conv": {"w8a8": 3.0, "w4a8": 2.0, "w4a16": 9.0},
    "Gemm": {"w8a8": 1.0, "w4a8": 0.5},
    "Add": {"w8a8": 0.25, "w4a8": 0.25, "w4a16": 0.5},
}


@pytest.mark.parametrize("front", [pytest.param("torch", marks=pytest.mark.slow), "onnx"])
def test_milliseconds_of_a_chip_choose_among_its_presets(front: str, tmp_path: Path) -> None:
    """What a row of the table lacks is not tried: activations in float here."""
    (tmp_path / "times.json").write_text(json.dumps(CHIP))
    found = search(front, tmp_path / "out", trials=None, cost="ms", times=tmp_path / "times.json", allowed_drop=0.2)
    assert {row.preset for row in found.trials} <= {"w8a8", "w4a8", "mixed"} and len(found.trials) > 4
    tried = {row.name: row for row in found.trials if not row.failed}
    assert tried["w8a8-fast"].ms == 7.25 and tried["w4a8-recipe"].ms == 4.75  # two convolutions
    widened = next(row for row in found.trials if row.name == "w8a8-recipe")
    assert "weights of 8 bits and activations of 32, and the table has times for w8a8, w4a8" in widened.failed
    assert found.best is not None
    assert found.best.ms == min(row.ms for row in tried.values() if row.good and row.ms is not None)
    assert " ms " in str(found) and ">ms<" in (tmp_path / "out" / "report.html").read_text()
    changed = {**CHIP, "Add": {"w8a8": 0.5, "w4a8": 0.5}}
    (tmp_path / "times.json").write_text(json.dumps(changed))
    with pytest.raises(BitwrightError, match="a search with another times"):
        search(front, tmp_path / "out", trials=None, cost="ms", times=tmp_path / "times.json", allowed_drop=0.2)


def test_bytes_of_activations_are_a_cost_too(tmp_path: Path) -> None:
    found = search("onnx", tmp_path, cost="activation_bytes")
    by_name = {row.name: row.activation_bytes for row in found.trials}
    assert by_name["w8a16-fast"] > by_name["w8a8-fast"] == by_name["w4a8-fast"]
    assert found.best is not None and found.best.name == "w4a8-fast" and "activations" in str(found)


MIXED = Trial("mixed", "w8a16", mixed=("w8a8", "w8a16", "w4a8", "w4a16"))


def test_the_deadline_ends_a_search_for_mixed_precision_with_its_best_point(tmp_path, monkeypatch):
    """It counts in this call, and runs again where a later one has time left."""

    def run(**options: Any) -> AutoResult:
        return auto_quantize(
            model("onnx"), batches("onnx"), folder=tmp_path, min_sqnr=40, progress=False, trials=(MIXED,), **options
        )  # fmt: skip

    monkeypatch.setattr(trials, "_left", lambda job: 0.0)
    first = run(deadline=0.0)
    assert [row.name for row in first.trials] == ["mixed"] and not first.trials[0].failed
    report = json.loads((tmp_path / "trials" / "mixed" / "trial.json").read_text())
    points = [p for p in report["mixed_precision"]["points"] if p["sqnr_db"] is not None]
    assert report["cut"] == "the search ended because time was used up" and len(points) == 1
    monkeypatch.undo()
    again = run()
    assert [row.name for row in again.trials] == ["mixed", "mixed-2"]
    assert again.trials[1].good and again.trials[1].bit_ops <= again.trials[0].bit_ops
    assert [row.name for row in run().trials] == ["mixed", "mixed-2"]  # which nothing cut short


def test_a_deadline_without_time_for_one_point_is_no_failure_for_good(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "_left", lambda job: 0.0)
    first = search("onnx", tmp_path, trials=(FIRST, MIXED), deadline=1e6)
    assert "one evaluation of the metric takes" in first.trials[1].failed and first.best is not None
    monkeypatch.undo()
    again = search("onnx", tmp_path, trials=(FIRST, MIXED))
    assert [row.name for row in again.trials] == [FIRST.name, "mixed", "mixed-2"]
    assert again.trials[2].good


class Interrupted(Right):
    """Ctrl-C while the second point of a search for mixed precision is measured."""

    def __init__(self, front: str) -> None:
        super().__init__(front)
        self.calls = 0

    def __call__(self, target: Any) -> Any:
        self.calls += 1
        if self.calls == 5:  # float, float of the search, its first point, noise in its place
            raise KeyboardInterrupt
        return super().__call__(target)


@pytest.mark.slow
def test_ctrl_c_within_a_search_for_mixed_precision_ends_the_whole_one(tmp_path: Path) -> None:
    """The best point so far is a trial, no other trial begins, and the same call goes on with the search cut short."""
    given: dict[str, Any] = {"trials": (MIXED, FIRST), "allowed_drop": 0.02}
    metric = Interrupted("onnx")
    first = auto_quantize(model("onnx"), batches("onnx"), metric, folder=tmp_path, progress=False, **given)
    assert metric.calls >= 5 and "Ctrl-C ended the search" in first.reason
    assert [row.name for row in first.trials] == ["mixed"] and not first.trials[0].failed
    again = auto_quantize(model("onnx"), batches("onnx"), metric, folder=tmp_path, progress=False, **given)
    assert [row.name for row in again.trials] == ["mixed", "mixed-2", FIRST.name]


# -- what is shown


def test_the_table_grows_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    search("onnx", tmp_path, progress=True)
    shown = capsys.readouterr().err
    seen = [shown.index(trial.name) for trial in SHORT]
    assert seen == sorted(seen) and shown.count(FIRST.name) >= len(SHORT) and "best" in shown


def test_without_a_terminal_the_log_has_a_line_per_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "bitwright")
    search("onnx", tmp_path, progress=True)
    lines = [text for text in caplog.messages if text.startswith("trial ")]
    assert len(lines) == len(SHORT) and "trial w8a8-fast" in lines[0] and "drop" in lines[0]


def test_the_page_of_a_search_has_the_front(searched: Path, tmp_path: Path) -> None:
    text = (searched / "report.html").read_text()
    assert "Pareto front" in text and FIRST.name in text and text.count("<svg") == 2
    assert "<script" not in text and "http" not in text.replace("http-equiv", "")


def test_nothing_good_is_told_on_disk_too(tmp_path: Path) -> None:
    found = search("onnx", tmp_path, allowed_drop=0.0, trials=(Trial("w4", "w4a8", recipe=("fold",)),))
    kept = json.loads((tmp_path / "best.json").read_text())
    assert found.best is None and kept["best"] is None and kept["nearest"] == "w4"
    assert "the float model is what remains" in kept["reason"]
    assert found.simulation("w4").calibrated
    with pytest.raises(BitwrightError, match="no finished trial 'w5' .did you mean 'w4'.*name one of w4"):
        found.simulation("w5")


# -- the deadline, Ctrl-C and lost processes


def test_workers_begin_no_trial_after_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def one_by_one(job: Any, given: Any, workers: int) -> Any:
        for trial in given:
            asked.append(trial.name)
            trials.run_trial(job, trial)
            yield trial

    monkeypatch.setitem(executors.EXECUTORS, "local", one_by_one)
    found = search("onnx", tmp_path, workers=2, deadline=0.001)
    assert asked == [FIRST.name] and found.best is not None
    assert "0.001 s are less than one trial takes" in found.reason


def test_ctrl_c_that_became_another_error_is_no_failed_trial(tmp_path: Path) -> None:
    calls = []

    class Interrupted(Right):
        def __call__(self, target: Any) -> Any:
            calls.append(0)
            if len(calls) == 2:  # the first one is of the float model
                raise SystemError("a result with an exception set") from KeyboardInterrupt()
            return super().__call__(target)

    given: dict[str, Any] = {"trials": SHORT[:1], "allowed_drop": 0.1, "progress": False, "folder": tmp_path}
    found = auto_quantize(model("onnx"), batches("onnx"), Interrupted("onnx"), **given)
    assert not found.trials and "Ctrl-C ended the search" in found.reason
    assert not list((tmp_path / "trials").iterdir())
    assert auto_quantize(model("onnx"), batches("onnx"), Interrupted("onnx"), **given).best is not None


def test_an_error_of_any_kind_is_a_row_of_the_table(tmp_path: Path) -> None:
    class Odd(Exception):
        pass

    class Fails(Right):
        def __call__(self, target: Any) -> Any:
            found = super().__call__(target)
            if found.mean() < 0.6:
                raise Odd("what a runtime of its own raises")
            return found

    bad = Trial("bad", "w4a8", "percentile", ("fold", "no_such_step"))
    found = auto_quantize(
        model("onnx"), batches("onnx"), Fails("onnx"), trials=(bad, FIRST), allowed_drop=0.1, progress=False,
        folder=tmp_path,
    )  # fmt: skip
    assert found.trials[0].failed and found.best is not None


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", "ray"])
def test_a_trial_that_always_loses_its_worker_is_a_failed_one(executor, tmp_path, monkeypatch):
    let_workers_start(executor, monkeypatch)
    (marker := tmp_path / "lost").mkdir()
    dies = Dies("onnx", marker, os.getpid(), 1000)
    found = auto_quantize(
        model("onnx"), batches("onnx"), dies, folder=tmp_path / "s", trials=(FIRST,), allowed_drop=0.1, workers=2,
        executor=executor, progress=False,
    )  # fmt: skip
    assert len(list(marker.glob("*"))) == 3 and "its process was lost 3 times" in found.trials[0].failed
    assert "the float model is what remains" in found.reason
