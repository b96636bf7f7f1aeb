"""The data of an analysis: batches, how many samples they hold, their labels, and how long the analysis may take."""

from __future__ import annotations

import hashlib
import numbers
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.simulation.calibration import arrays_in, with_samples
from bitwright.errors import CalibrationError, ConfigError

Array = NDArray[Any]


def listed(data: Iterable[Any]) -> list[Any]:
    """The batches; those of a generator are kept.

    Raises:
        CalibrationError: it is one batch instead of several, or there is none.
    """
    if isinstance(data, Mapping) or hasattr(data, "shape") or not isinstance(data, Iterable):
        raise CalibrationError(
            "analyze",
            f"data is a {type(data).__name__}, not a list of batches",
            "write bitwright.analyze(sim, [batch]) for a single batch",
        )
    batches = list(with_samples(data))
    if not batches:
        raise CalibrationError(
            "analyze",
            "the data held no batch",
            "pass a non-empty list or DataLoader (a generator can be used only once); a few hundred samples are enough",
        )
    return batches


def rows_of(batch: Any) -> int:
    """Samples of a batch: the length of its first array with an axis; 1 where it has none."""
    return next((int(array.shape[0]) for array in arrays_in(batch) if len(array.shape)), 1)


def first_rows(batches: Sequence[Any], samples: int) -> list[Any]:
    """As many of the first batches as hold ``samples`` rows; a batch is not divided."""
    found: list[Any] = []
    count = 0
    for batch in batches:
        found.append(batch)
        count += rows_of(batch)
        if count >= samples:
            break
    return found


def split_labels(labels: Any, batches: Sequence[Any]) -> list[Array] | None:
    """Labels of each batch.

    Args:
        labels: one per sample in the order of the data, or one array per batch; ``None`` where there are none.

    Raises:
        ConfigError: there are more or fewer of them than samples.
    """
    if labels is None:
        return None
    if isinstance(labels, (list, tuple)) and all(hasattr(part, "shape") and len(part.shape) for part in labels):
        parts = [np.asarray(part) for part in labels]
        flat = np.concatenate(parts) if parts else np.empty(0)
    else:
        flat = np.asarray(labels)
    rows = [rows_of(batch) for batch in batches]
    if flat.ndim == 0 or len(flat) != sum(rows):
        raise ConfigError(
            "labels",
            f"there are {len(flat) if flat.ndim else 1} for {sum(rows)} samples",
            "give one label per sample, in the order of the data",
        )
    return np.split(flat, np.cumsum(rows)[:-1])


def fingerprint(batches: Sequence[Any], more: Iterable[bytes]) -> str:
    """A name for data and for what ``more`` holds."""
    found = hashlib.sha256()
    for batch in batches:
        for array in arrays_in(batch):
            plain = np.ascontiguousarray(array.detach().cpu().float() if hasattr(array, "detach") else array)
            found.update(f"{plain.shape}{plain.dtype}".encode() + plain.tobytes())
    for part in more:
        found.update(part)
    return found.hexdigest()


class Clock:
    """How much of a time is left.

    Args:
        seconds: of the whole; ``None`` sets no limit.

    Raises:
        ConfigError: it is not a positive number.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and (not isinstance(seconds, numbers.Real) or not seconds > 0):
            raise ConfigError("deadline", f"{seconds!r} is not a time", "give seconds, for example deadline=60")
        self.limit = seconds
        self._start = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.limit is not None and time.monotonic() - self._start >= self.limit

    def left_out(self, what: str) -> str:
        """A note on ``what`` was not begun in time."""
        return f"{what} was not tried: the deadline of {self.limit:g} s was over"
