"""What the steps of one ``quantize(model, data)`` cost, in float passes over the calibration data (CPU time).

    python benchmarks/recipe_split.py                                   # networks of the developer data set, minutes
    python benchmarks/recipe_split.py --networks resnet20_aux --rounds 3 --markdown split.md

Each network runs in a process of its own. Float passes and calls of ``quantize`` take turns; of every row the least over the
rounds is divided by the least of the float pass. Time in a function that has a row of its own is not counted where it was
called from, so that the rows add up to the whole call but for what the clock itself takes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import default_recipe
import measure

REST = "everything else"
#: row of the table -> functions whose time it is, without that of other rows below them
ROWS = {
    "fold": ("recipes.attempt.Attempt.fold",),
    "copies, simulations made": (
        "recipes.attempt.Attempt._placed",
        "recipes.attempt.Attempt.keep",
        "torch.opened.TorchGiven.copy",
        "torch.opened.TorchGiven.copied",
    ),
    "calibration": ("recipes.attempt.Attempt.calibrate", "recipes.attempt.Attempt._calibrated_on_some"),
    "judge: float outputs": ("torch.opened.TorchGiven.outputs",),
    "judge: simulations": ("recipes.judge.Judge.rate",),
    "equalize: values": ("methods.scaling.equalize.measured_extremes", "methods.scaling.equalize.measured_moments"),
    "equalize: factors": ("methods.scaling.equalize._factors",),
    "equalize: rest": ("recipes.attempt.Attempt.equalize",),
    "smooth": ("methods.scaling.smooth.smooth_model",),
    "widen: derivatives": ("recipes.widen.output_errors",),
    "widen: choice": ("recipes.attempt.Attempt.widen",),
    "gptq: both streams": (
        "methods.rounding.driver.Walk.__init__",
        "methods.rounding.driver.Walk.advance",
        "methods.rounding.driver.Walk.leave",
        "methods.rounding.driver._reads",
    ),
    "gptq: moments": ("methods.rounding.driver.moments",),
    "gptq: codes": ("methods.rounding.gptq.round_columns", "methods.rounding.gptq.least_squares"),
    "gptq: rest": ("recipes.attempt.Attempt.choose_weights",),
}


class Clock:
    """CPU time by row; the innermost row that runs is charged."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._rows = [REST]
        self._since = time.process_time()

    def enter(self, row: str) -> None:
        """Charge ``row`` from now on."""
        self._charge()
        self._rows.append(row)

    def leave(self) -> None:
        """Charge the row before."""
        self._charge()
        self._rows.pop()

    def _charge(self) -> None:
        now = time.process_time()
        self.spent[self._rows[-1]] = self.spent.get(self._rows[-1], 0.0) + now - self._since
        self._since = now

    def timed(self, row: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, charged to ``row``."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.enter(row)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return wrapper


@contextlib.contextmanager
def clocked() -> Iterator[Clock]:
    """Context manager: charge the functions of :data:`ROWS`."""
    with contextlib.ExitStack() as stack:
        clock = Clock()
        for row, names in ROWS.items():
            for owner, attribute in map(_owner, names):
                function = clock.timed(row, getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, function))
        yield clock
        clock.leave()


def _owner(name: str) -> tuple[Any, str]:
    """The module or class that holds a function, and its name there."""
    path, _, attribute = name.rpartition(".")
    before, _, last = path.rpartition(".")
    if last[:1].isupper():
        return getattr(importlib.import_module(f"bitwright.{before}"), last), attribute
    return importlib.import_module(f"bitwright.{path}"), attribute


def split(name: str, way: str, rounds: int) -> dict[str, float]:
    """Row -> float passes, of the network ``name``."""
    found = default_recipe.case(name)
    batches, run = found.batches(0), default_recipe.of_torch(found.model)
    passes: list[float] = []
    spent: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        passes.append(measure.seconds(lambda: [run(batch) for batch in batches]))
        with clocked() as clock:
            default_recipe.run_of(way, found, 0)
        spent.append(clock.spent)
    one = min(passes[1:])
    return {row: min(s.get(row, 0.0) for s in spent[1:]) / one for row in (*ROWS, REST)}


def main(arguments: Sequence[str] | None = None) -> None:
    networks = default_recipe.FROM_DATA_SET
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=default_recipe.NETWORKS, default=list(networks))
    parser.add_argument("--effort", default="default", choices=default_recipe.EFFORTS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--of", metavar="NETWORK", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if options.of:
        print(json.dumps(split(options.of, options.effort, options.rounds)))
        return
    found = {}
    for name in options.networks:
        given = ["--of", name, "--effort", options.effort, "--rounds", str(options.rounds)]
        found[name] = measure.in_fresh_process(__file__, *given)
        print(name, f"{sum(found[name].values()):.1f}", file=sys.stderr, flush=True)
    rows = [[row, *(f"{of[row]:.2f}" for of in found.values())] for row in (*ROWS, REST)]
    rows.append(["together", *(f"{sum(of.values()):.1f}" for of in found.values())])
    title = (
        f"What the steps of quantize cost, effort {options.effort}: float passes over the calibration data (CPU time)"
    )
    columns = ["step", *found]
    measure.show(title, columns, rows)
    measure.save(None, options.markdown, title, columns, rows, None)


if __name__ == "__main__":
    main()
