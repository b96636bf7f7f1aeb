"""Sensitivities of a model's parts measured in several processes, as the trials of mixed precision are run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bitwright.precision.executors import find_executor


@dataclass(frozen=True)
class Share:
    """The parts that one process measures: every ``count``-th, from ``index`` on."""

    index: int
    count: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"share {self.index + 1} of {self.count}"

    def has(self, part: int) -> bool:
        """Whether part number ``part`` is one of them."""
        return part % self.count == self.index


@dataclass(frozen=True)
class Shares:
    """What is sent to each process.

    Attributes:
        measure: measures a share, and keeps the numbers in a folder.
        folder: of all shares.
    """

    measure: Callable[[Share, Path], None]
    folder: Path

    def run(self, share: Share, given_up: str = "") -> None:
        """Measure a share; one that is given up is measured by the process that waits for it."""
        if not given_up:
            self.measure(share, self.folder / share.name)


@contextmanager
def measured_shares(
    measure: Callable[[Share, Path], None], workers: int, executor: str, resume: str | Path | None
) -> Iterator[list[Path]]:
    """Folders with what the processes have measured, for the length of a ``with`` block.

    Args:
        measure: see :class:`Shares`; it can be sent to another process.
        workers: processes.
        executor: ``local`` or ``ray``; the processes of a cluster need access to ``resume``.
        resume: folder that keeps the measurements; a temporary one by default.

    Raises:
        ConfigError: there is no such executor, or the model cannot be sent to a process.
    """
    run = find_executor(executor, workers)
    with tempfile.TemporaryDirectory(prefix="bitwright-compress-") as temporary:
        job = Shares(measure, Path(temporary if resume is None else resume).resolve())
        shares = [Share(i, workers) for i in range(workers)]
        yield [job.folder / share.name for share in run(job, shares, workers)]
