"""Where trials run: in this process, in local worker processes, or on a Ray cluster.

A *job* carries out trials, each of which has a name and leaves what it finds in files: mixed precision tries precisions,
compression measures parts of a model.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, Protocol

from bitwright.errors import ConfigError, close_matches

logger = logging.getLogger("bitwright")


class Named(Protocol):
    """A trial."""

    @property
    def name(self) -> str:
        """Unique within a search."""


class Carries(Protocol):
    """A job, which can be sent to another process."""

    def run(self, trial: Any, given_up: str = "") -> None:
        """Carry out a trial; or note why it is given up."""


def _run(job: Carries, trial: Named, given_up: str = "") -> None:
    job.run(trial, given_up)


_ATTEMPTS = 3
_LOST = (
    f"its process was lost {_ATTEMPTS} times, as where memory runs out or native code crashes: "
    "try it with workers=1, or with less data"
)

Executor = Callable[[Carries, Iterable[Any], int], Iterator[Any]]
"""(job, trials, workers) -> trials as they finish; the next one is asked for when there is a worker for it."""


def in_process(job: Carries, trials: Iterable[Any], workers: int) -> Iterator[Any]:
    """Run trials one after the other in this process."""
    for trial in trials:
        _run(job, trial)
        yield trial


def in_workers(job: Carries, trials: Iterable[Any], workers: int) -> Iterator[Any]:
    """Run trials in local processes; those of a process that dies run again, each in a process of its own."""
    _check_sendable(job)
    source = iter(trials)
    while lost := (yield from _in_a_pool(job, source, workers)):
        logger.warning("a worker process was lost; %d trials run again", len(lost))
        for trial in lost:
            _alone(job, trial)
            yield trial


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _in_a_pool(job: Carries, source: Iterator[Any], workers: int) -> Generator[Any, None, list[Any]]:
    """Run trials until none is left or a process dies; returns those that were running then."""
    started: list[Any] = []
    running: dict[Future[None], Any] = {}
    with _pool(workers) as pool:
        try:
            while True:
                for trial in islice(source, workers - len(running)):
                    started.append(trial)
                    running[pool.submit(_run, job, trial)] = trial
                if not running:
                    return []
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda f: running[f].name):
                    future.result()
                    started.remove(trial := running.pop(future))
                    yield trial
        except BrokenProcessPool:  # of a future, or of the pool when it was given another trial
            return started
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _alone(job: Carries, trial: Named) -> None:
    """Run a trial again whose process died; after repeated deaths its folder records the failure."""
    for _ in range(_ATTEMPTS - 1):
        with _pool(1) as pool:
            try:
                return pool.submit(_run, job, trial).result()
            except BrokenProcessPool:
                continue
    _run(job, trial, _LOST)


def _check_sendable(job: Carries) -> None:
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.dumps(job)
    except Exception as error:
        raise ConfigError(
            "workers",
            f"the model, the data or the metric cannot be sent to another process: {type(error).__name__}: {error}",
            "define the metric and the model's class in a module that can be imported, or use workers=1",
        ) from error


def on_ray(job: Carries, trials: Iterable[Any], workers: int) -> Iterator[Any]:
    """Run trials as Ray tasks, which Ray repeats when a worker is lost; all workers need access to the folder.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError("executor", "Ray is not installed", "pip install ray, or use executor='local'") from error
    own = not ray.is_initialized()
    if own:
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, configure_logging=False)
    running: dict[Any, Any] = {}
    try:
        shared, source = ray.put(job), iter(trials)
        task: Any = ray.remote(num_cpus=1, max_retries=_ATTEMPTS - 1)(_run)
        while True:
            for trial in islice(source, workers - len(running)):
                running[task.remote(shared, trial)] = trial
            if not running:
                return
            done, _ = ray.wait(list(running), num_returns=1)
            trial = running[done[0]]
            try:
                ray.get(done[0])
            except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError):
                _run(job, trial, _LOST)
            del running[done[0]]
            yield trial
    finally:
        if own:
            ray.shutdown()
        else:
            for left in running:
                ray.cancel(left)


EXECUTORS: dict[str, Executor] = {"local": in_workers, "ray": on_ray}


def find_executor(name: str, workers: int) -> Executor:
    """The executor called ``name``; one local worker is this process.

    Raises:
        ConfigError: there is none, or ``workers`` is not a number of processes.
    """
    if name not in EXECUTORS:
        raise ConfigError(
            "executor", f"there is no executor {name!r}{close_matches(str(name), EXECUTORS)}", "use local or ray"
        )
    if not isinstance(workers, int) or workers < 1:
        raise ConfigError("workers", f"{workers!r} is not a number of processes", "use 1 or more")
    return in_process if name == "local" and workers == 1 else EXECUTORS[name]
