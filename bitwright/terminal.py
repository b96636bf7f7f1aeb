"""What commands print: results on stdout, logs on stderr, as wide as the terminal.

Without the parser of options, so that a command which needs none starts in half the time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

from rich.console import Console
from rich.text import Text

_PIPE_WIDTH = 200  # columns where there is no terminal whose width could be asked
QUIET, NORMAL, VERBOSE = -1, 0, 1
level: ContextVar[int] = ContextVar("level", default=NORMAL)
"""How much is printed by the command that runs."""


def keep_libraries_off_stdout() -> None:
    """Send the prints of compiled libraries to stderr for the rest of this process; stdout holds results only.

    The solver in SciPy 1.17 (HiGHS 1.12) prints a line whenever it repairs a solution, whatever its options say.
    """
    if sys.stdout is None or sys.stderr is None:
        return
    try:
        sys.stdout.flush()
        own = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), 1)
    except OSError:  # no descriptors: there is nothing that libraries could print to, or nowhere else to send it
        return
    old = sys.stdout
    sys.stdout = open(own, "w", encoding=old.encoding, errors=old.errors, buffering=1 if old.isatty() else -1)


def is_quiet() -> bool:
    """True where ``-q`` was given."""
    return level.get() == QUIET


def is_verbose() -> bool:
    """True where ``-v`` was given."""
    return level.get() == VERBOSE


def console(*, stderr: bool = False) -> Console:
    """Create a console as wide as the terminal, or wide enough for whole names in a pipe or a file."""
    probe = Console(stderr=stderr)
    return probe if probe.is_terminal else Console(stderr=stderr, width=max(probe.width, _PIPE_WIDTH))


def interrupted(error: BaseException) -> None:
    """Report Ctrl-C and which files are kept."""
    out = console(stderr=True)
    out.print(Text("interrupted", "bold red"))
    cause: BaseException | None = error
    while cause is not None:
        for note in getattr(cause, "__notes__", ()):
            out.print(Text(f"  {note}"))
        cause = cause.__context__


def answer(line: str) -> None:
    """Print the result line, which is never wrapped."""
    console().print(Text(line), soft_wrap=True)


def details(*parts: Any) -> None:
    """Print texts and tables, unless ``-q`` was given; a table is folded to the width of a terminal only."""
    if is_quiet():
        return
    out = console()
    for part in parts:
        is_table = not isinstance(part, str | Text)
        is_text = not (is_table and out.is_terminal)
        out.print(Text(str(part)) if is_table and is_text or isinstance(part, str) else part, soft_wrap=is_text)
        if is_table:
            out.print()


def print_report(text: str, title_style: str = "bold") -> None:
    """Print the text of a report, its remedies and notes in colour; with ``-q`` only the first line, its answer."""
    lines = text.rstrip("\n").splitlines()
    if is_quiet():
        answer(lines[0])
        return
    out = console()
    for i, line in enumerate(lines):
        shown = Text(line)
        if i == 0:
            shown.stylize(title_style)
        for word, style in (("remedy:", "bold green"), ("note:", "dim")):
            if line.lstrip().startswith(word):
                shown.stylize(style)
        out.print(shown, soft_wrap=True)


def print_contents(tables: Iterable[Any], wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Print tables of :func:`bitwright.export.contents.contents`: rows whose name is ``wanted``, then how many these are."""
    from bitwright.tables import Table

    shown = 0
    for found in tables:
        rows = [row for row in found.rows if not found.named or wanted(row[0])]
        if rows or found.named:
            details(Table(found.head, rows, found.title))
        shown += len(rows) if found.named else 0
    answer(f"{shown} tensors")
