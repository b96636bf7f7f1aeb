"""Costs of quantizers by switching them: each target alone, or one after another while the outputs stay good.

A target is any set of sites: those of one quantizer, a layer, a group, all weights. A setting is a block in which the simulation
works with a target switched; :class:`Costs` scores settings within a deadline, shows progress, and keeps what it knows on
disk. :func:`in_turn` makes changes that stay.
"""

from __future__ import annotations

import itertools
import math
import numbers
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.output_quality import noise_and_signal
from bitwright.core.simulation.sites import Site, SiteMap
from bitwright.errors import ConfigError
from bitwright.export.files.run_state import read_run_state, write_run_state
from bitwright.progress import progress as bar

K = TypeVar("K")
S = TypeVar("S")
Setting = Callable[[], AbstractContextManager[Any]]

# ------------------------------------------------------------------------------------------------ settings


def by_operator(sites: Mapping[str, Site]) -> dict[str, tuple[str, ...]]:
    """Operator -> its enabled sites."""
    found: dict[str, list[str]] = {}
    for name, site in sites.items():
        if site.enabled:
            found.setdefault(site.op, []).append(name)
    return {op: tuple(names) for op, names in found.items()}


@contextmanager
def switched_off(sites: Iterable[Site], why: str = "it is compared with float") -> Iterator[None]:
    """A block in which the quantizers of these sites are off."""
    quantizers = {id(site.quantizer): site.quantizer for site in sites if site.enabled}.values()
    undos = [quantizer.remember() for quantizer in quantizers]
    try:
        for quantizer in quantizers:
            quantizer.leave_in_float(why)
        yield
    finally:
        for undo in undos:
            undo()


def only(sites: SiteMap, active: Callable[[Site], bool]) -> AbstractContextManager[None]:
    """A block in which only quantizers with an ``active`` site work."""
    kept = {id(site.quantizer) for site in sites.values() if active(site)}
    return switched_off(site for site in sites.values() if id(site.quantizer) not in kept)


def by_itself(sites: SiteMap, names: Collection[str]) -> AbstractContextManager[None]:
    """A block in which only the sites of a target are on."""
    return only(sites, lambda site: site.name in names)


def left_out(sites: SiteMap, names: Collection[str]) -> AbstractContextManager[None]:
    """A block in which only the sites of a target are off."""
    return only(sites, lambda site: site.name not in names)


@contextmanager
def changed(change: Callable[[], object], remember: Callable[[], Undo]) -> Iterator[None]:
    """A block in which a change is applied to the simulation."""
    undo = remember()
    try:
        change()
        yield
    finally:
        undo()


# ------------------------------------------------------------------------------------------------ costs


class Clock:
    """The time left of a time limit.

    Args:
        seconds: of the whole; ``None`` sets no limit.

    Raises:
        ConfigError: it is not a positive number.
    """

    def __init__(self, seconds: float | None = None) -> None:
        if seconds is not None and (not isinstance(seconds, numbers.Real) or not seconds > 0):
            raise ConfigError("deadline", f"{seconds!r} is not a time", "give seconds, for example deadline=60")
        self.limit = seconds
        self._start = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.limit is not None and time.monotonic() - self._start >= self.limit

    def left_out(self, what: str) -> str:
        """A note on targets that were not begun in time."""
        return f"{what} was not tried: the deadline of {self.limit:g} s was over"


_FILE, _VERSION = "bitwright_analysis_measured.json", 1
_EVERY = 5.0  # seconds between two writes
_MOST = 1 << 28  # bytes: a metric's value of every sample, with and without every quantizer
_REMEDY = "remove it, or name another folder"


class Kept:
    """A file of measurements, from which a long analysis continues after Ctrl-C, a deadline or a crash.

    Args:
        folder: where; created if missing. ``None`` keeps nothing.
        name: fingerprint of simulation, data and metric.
        file: name of the file.

    Raises:
        ConfigError: the folder has measurements of something else, or a file that cannot be read.
    """

    def __init__(self, folder: str | Path | None = None, name: str = "", file: str = _FILE) -> None:
        self._path = None if folder is None else Path(folder) / file
        self._name = name
        self._written = time.monotonic()

    def load(self) -> dict[str, Any]:
        """Read earlier measurements; empty if there are none."""
        if self._path is None or not self._path.exists():
            return {}
        content = read_run_state(self._path, max_bytes=_MOST)
        if content.get("version") != _VERSION or content.get("fingerprint") != self._name:
            raise ConfigError(
                str(self._path),
                "it holds measurements of another model, other data or another metric",
                "name another folder with resume=..., or remove this file to measure anew",
            )
        return dict(content["measured"])

    def damaged(self, problem: str) -> ConfigError:
        """The error for a file with other content."""
        return ConfigError(str(self._path), problem, _REMEDY)

    def save(self, measured: Callable[[], Mapping[str, Any]], *, now: bool = False) -> None:
        """Write the measurements atomically, every few seconds or ``now``."""
        if self._path is None or not (now or time.monotonic() - self._written >= _EVERY):
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {"version": _VERSION, "fingerprint": self._name, "measured": dict(measured())}
        write_run_state(self._path, content, indent=None, allow_nan=True)  # the noise of an output may be NaN
        self._written = time.monotonic()


@dataclass
class Costs:
    """Scores settings one at a time until all are done, time is up, or Ctrl-C.

    Attributes:
        clock, kept, show: when to stop, where to keep what is known, and whether to show progress.
        stopped: what ended it early; empty while nothing did.
    """

    clock: Clock = field(default_factory=Clock)
    kept: Kept = field(default_factory=Kept)
    show: bool = False
    stopped: str = ""

    def known(self) -> Mapping[str, Any]:
        """Measurements kept on disk, as JSON types."""
        return {}

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """A block that Ctrl-C ends, keeping the measurements so far."""
        try:
            yield
        except KeyboardInterrupt:
            self.stopped = "Ctrl-C"
        finally:
            self.kept.save(self.known, now=True)

    def over(self, keys: Iterable[K], title: str) -> Iterator[K]:
        """Yield ``keys`` until the time is up."""
        for key in bar(list(keys), title, self.show):
            if self.clock.over:
                self.stopped = self.stopped or f"the deadline of {self.clock.limit:g} s"
                return
            yield key
            self.kept.save(self.known)

    def scores(
        self, settings: Mapping[K, Sequence[Setting]], score: Callable[[K], S], title: str = ""
    ) -> Iterator[tuple[K, list[S]]]:
        """Each key with the score of each of its settings."""
        for key in self.over(settings, title):
            found = []
            for setting in settings[key]:
                with setting():
                    found.append(score(key))
            yield key, found


def in_turn(
    changes: Mapping[K, Callable[[], object]],
    good: Callable[[K], bool],
    remember: Callable[[K], Undo],
    *,
    keep_going: bool = False,
    track: Callable[[Iterable[K]], Iterable[K]] = iter,
) -> None:
    """Apply changes one at a time until the first that is not good.

    Args:
        changes: what is made, by key.
        good: whether the simulation as it stands, with the change of a key, is accepted.
        remember: keeps what the change of a key changes.
        keep_going: leave a change that is not good out, and go on with those after it.
        track: goes over the keys, for example with a progress bar.
    """
    for key in track(changes):
        undo, stays = remember(key), False
        try:
            changes[key]()
            stays = good(key)
        finally:
            if not stays:
                undo()
        if not (stays or keep_going):
            return


# ------------------------------------------------------------------------------------------------ group by group


@dataclass(frozen=True)
class Step:
    """The result of quantizing one more group of operators.

    Attributes:
        ops: their names.
        sqnr: of the model's outputs against float, in dB; ``inf`` where they are equal, NaN where an output is not finite.
        good: whether it stayed quantized.
        reason: why not.
    """

    ops: tuple[str, ...]
    sqnr: float
    good: bool
    reason: str = ""


@dataclass(frozen=True)
class Progression:
    """Result of :func:`quantize_progressively`: its steps in execution order."""

    steps: tuple[Step, ...]

    @property
    def stopped_at(self) -> Step | None:
        """The first group that turned bad; ``None`` if none did."""
        return next((step for step in self.steps if not step.good), None)

    def __str__(self) -> str:
        lines = [
            f"{'quantized' if step.good else 'in float '}  {step.sqnr:7.1f} dB  {', '.join(step.ops)}"
            + (f"  {step.reason}" if step.reason else "")
            for step in self.steps
        ]
        return "\n".join(lines)


def quantize_progressively(
    sites: SiteMap,
    outputs: Callable[[], Sequence[NDArray[Any]]],
    *,
    threshold: float = 10.0,
    groups: Sequence[Sequence[str]] | None = None,
    keep_going: bool = False,
    track: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Progression:
    """Switch sites on group by group in execution order, and stop at the first that turns the outputs bad.

    All calibrated sites start in float. A group that makes an output NaN or Inf, or the signal-to-quantization-noise ratio
    fall below ``threshold``, goes back to float, and so does everything after it unless ``keep_going``.

    Args:
        sites: of a calibrated simulation.
        outputs: runs the simulation as it stands on fixed data; its outputs.
        threshold: in dB.
        groups: names of operators that are switched on together; each operator by itself by default.
        keep_going: leave bad groups in float and go on with those after them.
        track: goes over the groups, for example with a progress bar.

    Returns:
        One step per group that was tried. Ctrl-C ends the search and leaves the groups found good.
    """
    held = _groups(sites, groups)
    steps: list[Step] = []

    def remember(ops: tuple[str, ...]) -> Undo:  # a quantizer may be shared with a group that was good
        return partial(_switch, held[ops], [site.enabled for site in held[ops]])

    def good(ops: tuple[str, ...]) -> bool:
        steps.append(_judged(ops, reference, outputs(), threshold))
        return steps[-1].good

    restore = sites.remember()
    try:
        _switch([site for site in sites.values() if site.enabled], itertools.repeat(False))
        reference = [np.asarray(out, np.float64) for out in outputs()]
        changes = {ops: partial(_switch, members, itertools.repeat(True)) for ops, members in held.items()}
        in_turn(changes, good, remember, keep_going=keep_going, track=track)
    except KeyboardInterrupt:
        pass  # the groups so far are the result
    except BaseException:
        restore()
        raise
    return Progression(tuple(steps))


def _groups(sites: SiteMap, groups: Sequence[Sequence[str]] | None) -> dict[tuple[str, ...], list[Site]]:
    """Operators that are switched on together, with their enabled sites; without empty groups."""
    working = by_operator(sites)
    chosen = map(tuple, [[op] for op in working] if groups is None else groups)
    found = {ops: [sites[name] for op in ops for name in working.get(op, ())] for ops in chosen}
    return {ops: members for ops, members in found.items() if members}


def _switch(sites: Iterable[Site], on: Iterable[bool]) -> None:
    for site, enabled in zip(sites, on, strict=False):
        site.enabled = enabled


def _judged(
    ops: tuple[str, ...], reference: Sequence[NDArray[Any]], found: Sequence[NDArray[Any]], threshold: float
) -> Step:
    sqnr = math.inf
    for i, (wanted, out) in enumerate(zip(reference, found, strict=True)):
        values = np.asarray(out, np.float64)
        bad = int((~np.isfinite(values)).sum())
        if bad and np.isfinite(wanted).all():
            return Step(ops, math.nan, False, f"output {i} holds {bad} NaN or Inf")
        wanted = np.where(np.isfinite(values), wanted, np.nan)  # what is not finite in either is left out
        noise, signal = (float(part.sum()) for part in noise_and_signal(wanted, values))
        if noise:
            sqnr = min(sqnr, 10 * math.log10(signal / noise) if signal else -math.inf)
    low = sqnr < threshold
    return Step(ops, sqnr, not low, f"below {threshold:g} dB" if low else "")
