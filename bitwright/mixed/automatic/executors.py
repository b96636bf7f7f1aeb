"""Where trials run: in this process, in local worker processes, or on a Ray cluster. Results are folders, whoever makes them."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

from bitwright.errors import ConfigError, close_matches
from bitwright.mixed.automatic.ladder import Trial
from bitwright.mixed.automatic.trials import Job, run_trial

logger = logging.getLogger("bitwright")
_ATTEMPTS = 3
_LOST = (
    f"its process was lost {_ATTEMPTS} times, as where memory runs out or native code crashes: "
    "try it with workers=1, or with less data"
)

Executor = Callable[[Job, Iterable[Trial], int], Iterator[Trial]]
"""(job, trials, workers) -> trials as they finish; the next one is asked for when there is a worker for it."""


def in_process(job: Job, trials: Iterable[Trial], workers: int) -> Iterator[Trial]:
    """One after the other, here."""
    for trial in trials:
        run_trial(job, trial)
        yield trial


def in_workers(job: Job, trials: Iterable[Trial], workers: int) -> Iterator[Trial]:
    """In local processes; trials of a process that is lost run again, each in a process of its own."""
    _check_sendable(job)
    source = iter(trials)
    while lost := (yield from _in_a_pool(job, source, workers)):
        logger.warning("a worker process was lost; %d trials run again", len(lost))
        for trial in lost:
            _alone(job, trial)
            yield trial


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _in_a_pool(job: Job, source: Iterator[Trial], workers: int) -> Generator[Trial, None, list[Trial]]:
    """Carry out trials until there are no more, or a process is lost; returns those that ran then."""
    started: list[Trial] = []
    running: dict[Future[None], Trial] = {}
    with _pool(workers) as pool:
        try:
            while True:
                for trial in islice(source, workers - len(running)):
                    started.append(trial)
                    running[pool.submit(run_trial, job, trial)] = trial
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


def _alone(job: Job, trial: Trial) -> None:
    """Carry out a trial whose process was lost; where that happens again and again, its folder says so."""
    for _ in range(_ATTEMPTS - 1):
        with _pool(1) as pool:
            try:
                return pool.submit(run_trial, job, trial).result()
            except BrokenProcessPool:
                continue
    run_trial(job, trial, _LOST)


def _check_sendable(job: Job) -> None:
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.dumps(job)
    except Exception as error:
        raise ConfigError(
            "workers",
            f"the model, the data or the metric cannot be sent to another process: {type(error).__name__}: {error}",
            "define the metric and the model's class in a module that can be imported, or use workers=1",
        ) from error


def on_ray(job: Job, trials: Iterable[Trial], workers: int) -> Iterator[Trial]:
    """As Ray tasks, which Ray repeats when a worker is lost; the folder has to be visible to all of them.

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
    running: dict[Any, Trial] = {}
    try:
        shared, source = ray.put(job), iter(trials)
        task: Any = ray.remote(num_cpus=1, max_retries=_ATTEMPTS - 1)(run_trial)
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
                run_trial(job, trial, _LOST)
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
