"""Where trials run: in this process, in local worker processes, or on a Ray cluster. Results are folders, whoever makes them."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from bitwright.errors import ConfigError, close_matches
from bitwright.mixed.ladder import Trial
from bitwright.mixed.trials import Job, run_trial

logger = logging.getLogger("bitwright")
_ATTEMPTS = 3

Executor = Callable[[Job, Sequence[Trial], int], Iterator[Trial]]


def in_process(job: Job, trials: Sequence[Trial], workers: int) -> Iterator[Trial]:
    """One after the other, here."""
    for trial in trials:
        run_trial(job, trial)
        yield trial


def in_workers(job: Job, trials: Sequence[Trial], workers: int) -> Iterator[Trial]:
    """In local processes; trials of a process that is lost run again in a new one."""
    _check_sendable(job)
    left = {trial.name: trial for trial in trials}
    for attempt in range(_ATTEMPTS):
        if not left:
            return
        if attempt:
            logger.warning("a worker process was lost; %d trials run again", len(left))
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                futures = {pool.submit(run_trial, job, trial): trial for trial in left.values()}
                for trial in _finished(futures):
                    del left[trial.name]
                    yield trial
            except BrokenProcessPool:
                continue
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    yield from in_process(job, list(left.values()), 1)


def _finished(futures: dict[Future[None], Trial]) -> Iterator[Trial]:
    left = set(futures)
    while left:
        done, left = wait(left, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=lambda f: futures[f].name):
            future.result()
            yield futures[future]


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


def on_ray(job: Job, trials: Sequence[Trial], workers: int) -> Iterator[Trial]:
    """As Ray tasks, which Ray repeats when a worker is lost; the folder has to be visible to all of them.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(
            "executor", "Ray is not installed", "pip install ray, or use executor='local'"
        ) from error
    own = not ray.is_initialized()
    if own:
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        shared = ray.put(job)
        task: Any = ray.remote(num_cpus=1, max_retries=_ATTEMPTS)(run_trial)
        left = {task.remote(shared, trial): trial for trial in trials}
        while left:
            done, _ = ray.wait(list(left), num_returns=1)
            ray.get(done[0])
            yield left.pop(done[0])
    finally:
        if own:
            ray.shutdown()


EXECUTORS: dict[str, Executor] = {"local": in_workers, "ray": on_ray}


def find_executor(name: str, workers: int) -> Executor:
    """The executor called ``name``; one local worker is this process.

    Raises:
        ConfigError: there is none, or ``workers`` is no number of processes.
    """
    if name not in EXECUTORS:
        raise ConfigError(
            "executor",
            f"there is no executor {name!r}{close_matches(str(name), EXECUTORS)}",
            "use local or ray",
        )
    if not isinstance(workers, int) or workers < 1:
        raise ConfigError("workers", f"{workers!r} is no number of processes", "use 1 or more")
    return in_process if name == "local" and workers == 1 else EXECUTORS[name]
