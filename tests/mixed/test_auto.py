"""``auto_quantize``: a best model from the first trial on, which nothing can take away."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitwright.errors import BitwrightError
from bitwright.export.verify.samples import verify_folder
from bitwright.mixed import executors, trials
from bitwright.mixed.auto import AutoResult, auto_quantize
from bitwright.mixed.ladder import FIRST, Trial, waves
from tests.mixed.nets import accuracy, batches, model

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
        float(np.mean(Right(front)(result.sim.model if front == "torch" else result.sim.session)))
        == result.best.metric
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

    monkeypatch.setattr(executors, "run_trial", stopped)
    first = search("onnx", tmp_path / "parts")
    assert "Ctrl-C ended the search" in first.reason and [r.name for r in first.trials] == [FIRST.name]
    assert first.best is not None
    second = search("onnx", tmp_path / "parts")
    assert done == [FIRST.name, "stop", SHORT[1].name, SHORT[2].name]
    assert [(r.name, r.metric, r.best) for r in second.trials] == [
        (r.name, r.metric, r.best) for r in whole.trials
    ]


def test_the_ladder_follows_the_causes() -> None:
    names = [trial.name for wave in waves(["outlier_channels", "few_bits", "passes_on"]) for trial in wave]
    assert "w8a8-smooth-widen" in names and "w8a8-adaround" in names and names[-1] == "mixed"
    assert len(names) == len(set(names))


def test_a_trial_that_fails_is_told_and_the_search_goes_on(tmp_path: Path) -> None:
    bad = Trial("bad", "w8a8", recipe=("fold", "no_such_step"))
    result = search("onnx", tmp_path, trials=(bad, FIRST))
    assert (
        "no_such_step" in result.trials[0].failed
        and result.best is not None
        and result.best.name == FIRST.name
    )
    again = search("onnx", tmp_path, trials=(bad, FIRST))
    assert again.trials == result.trials


def test_every_trial_is_tested_with_the_whole_doubt(tmp_path: Path) -> None:
    """Nothing changes on 100 samples held back: that shows a drop below 1.8 %, however many trials there are."""
    answers = np.arange(200) % 10 > 0
    result = auto_quantize(
        model("onnx"), batches("onnx"), lambda session: answers, folder=tmp_path, trials=SHORT, allowed_drop=0.02,
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
def test_a_damaged_file_of_a_search_is_named(
    name: str, content: bytes, searched: Path, tmp_path: Path
) -> None:
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
        "torch",
        tmp_path / "a",
        allowed_drop=0.0,
        trials=(Trial("w2", "w4a8", recipe=("fold",)),),
        confidence=0.99,
    )
    assert result.best is None and result.sim is None and result.nearest is not None
    assert "the float model is what remains" in result.reason and result.folder is not None
    failed = search("onnx", tmp_path / "b", trials=(Trial("bad", "w8a8", recipe=("nothing",)),))
    assert failed.folder is None and "every trial failed" in failed.reason


def test_without_a_metric_the_outputs_are_compared(tmp_path: Path) -> None:
    result = auto_quantize(
        model("onnx"), batches("onnx"), folder=tmp_path, trials=SHORT, min_sqnr=30, progress=False
    )
    assert result.best is not None and result.best.sqnr_db >= 30
    assert [row.good for row in result.trials] == [row.sqnr_db >= 30 for row in result.trials]


def test_the_deadline_ends_the_search_with_a_model(tmp_path: Path) -> None:
    result = search("onnx", tmp_path, deadline=0.0)
    assert [r.name for r in result.trials] == [
        FIRST.name
    ] and "the deadline ended the search" in result.reason
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
        ({"workers": 0}, "0 is no number of processes"),
        ({"cost": "ms"}, "'ms' is not a cost of whole models"),
        ({"target": "ort_gpu_x"}, "ort_gpu_x"),
        ({"metric": not_a_number}, "of the float model it is NaN"),
        ({"metric": lambda m: np.ones(9), "workers": 2}, "cannot be sent to another process"),
    ],
    ids=["executor", "workers", "cost", "target", "NaN", "lambda"],
)
def test_bad_input(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BitwrightError, match=message):
        auto_quantize(model("onnx"), batches("onnx"), **{"folder": tmp_path, "progress": False, **options})


def numbers(result: AutoResult) -> list[Any]:
    return [(r.name, r.metric, r.weight_bytes, r.bit_ops, r.sqnr_db, r.best) for r in result.trials]


@pytest.mark.slow
def test_workers_find_what_one_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one, two = search("onnx", tmp_path / "one"), search("onnx", tmp_path / "two", workers=2)
    assert numbers(one) == numbers(two)


@pytest.mark.slow
def test_ray_finds_what_one_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    one, two = search("onnx", tmp_path / "one"), search("onnx", tmp_path / "two", workers=2, executor="ray")
    assert numbers(one) == numbers(two)


class Dies:
    """A metric whose process is lost the first time it is called in a worker."""

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
def test_trials_of_a_lost_worker_run_again(
    executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if executor == "ray":
        pytest.importorskip("ray")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    (marker := tmp_path / "lost").mkdir()
    dies = Dies("onnx", marker, os.getpid(), 1)
    found = auto_quantize(
        model("onnx"), batches("onnx"), dies, folder=tmp_path / "two", trials=SHORT, allowed_drop=0.1, workers=2,
        executor=executor, progress=False,
    )  # fmt: skip
    assert len(list(marker.glob("*"))) >= 1
    assert numbers(found) == numbers(search("onnx", tmp_path / "one"))


KILLED = """
import sys
from pathlib import Path
from tests.mixed.test_auto import search
from tests.support.stopping import Watch
folder, at = Path(sys.argv[1]), int(sys.argv[2])
watch = Watch(folder, at, "kill")
sys.addaudithook(watch)
search("onnx", folder)
print(watch.seen)
"""


@pytest.mark.slow
def test_kill_9_loses_the_running_trial_only(tmp_path: Path) -> None:
    """Before ten of the changes of files, drawn at random; the search then ends with the result of one left alone."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}

    def run(folder: Path, at: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(folder), str(at)]
        return subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)

    done = run(tmp_path / "whole", -1)
    assert done.returncode == 0, done.stderr
    changes, whole = int(done.stdout.split()[-1]), search("onnx", tmp_path / "whole")
    folder, random, killed = tmp_path / "killed", np.random.default_rng(0), 0
    for _ in range(10):
        ended = run(folder, int(random.integers(changes // 3)))
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        killed += ended.returncode != 0
        for report in folder.glob("trials/[!.]*/trial.json"):
            assert "failed" not in json.loads(report.read_text()) and verify_folder(report.parent).ok
        best = folder / "best.json"
        assert not best.exists() or json.loads(best.read_text())["best"]
    assert killed >= 5
    assert numbers(search("onnx", folder)) == numbers(whole)
