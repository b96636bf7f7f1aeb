"""The application that commands register with, how they print, and what becomes of errors and of Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NoReturn

import typer
import typer.core
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bitwright.errors import BitwrightError, ConfigError
from bitwright.interrupt import INTERRUPTED, Interrupts, watched
from bitwright.lazy import how_to_install

NO, USER_ERROR = 1, 2

_PIPE_WIDTH = 200  # columns where there is no terminal whose width could be asked


class _Commands(typer.core.TyperGroup):
    """The group of all commands; user errors end here, without a traceback unless ``--debug`` asks for it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for; Ctrl-C ends it with exit code 130, whatever it was turned into."""
        try:
            result = self._answered(ctx)
        except KeyboardInterrupt as stop:
            _stop(stop)
        except Exception as error:
            if isinstance(ctx.obj, Interrupts) and ctx.obj.seen:
                _stop(error)
            raise
        if isinstance(ctx.obj, Interrupts) and ctx.obj.seen:
            _stop(KeyboardInterrupt())
        return result

    def _answered(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (BitwrightError, ModuleNotFoundError, OSError, MemoryError) as error:
            if ctx.params.get("debug") or isinstance(error, BrokenPipeError):  # the reader of a pipe had enough
                raise
            _fail(_explained(error))


def _stop(error: BaseException) -> NoReturn:
    """Say that Ctrl-C came, and what is kept; exit code 130."""
    out = console(stderr=True)
    out.print(Text("interrupted", "bold red"))
    cause: BaseException | None = error
    while cause is not None:
        for note in getattr(cause, "__notes__", ()):
            out.print(Text(f"  {note}"))
        cause = cause.__context__
    raise typer.Exit(INTERRUPTED)


def _explained(error: Exception) -> BitwrightError:
    """The error that is printed for what a user can repair: input, files, memory, a package that is missing."""
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    if isinstance(error, OSError):
        from bitwright.export.files.atomic import file_error

        name = error.filename if isinstance(error.filename, (str, bytes)) else "a file"
        return file_error(os.fsdecode(name), error)
    if isinstance(error, MemoryError):
        problem = f"there is not enough of it{f': {error}' if str(error) else ''}"
        return ConfigError("memory", problem, "use smaller batches, fewer of them (--limit), or a larger machine")
    assert isinstance(error, BitwrightError)
    return error


def _missing(error: ModuleNotFoundError) -> BitwrightError:
    """What to install for a module that is not there; an error that is not about an extra goes on."""
    remedy = how_to_install(error)
    if remedy is None:
        raise error
    return ConfigError("environment", f"the package {error.name} is not installed", remedy)


def _fail(error: BitwrightError) -> NoReturn:
    """Print site, problem and remedy, and end with exit code 2."""
    out = console(stderr=True)
    out.print(Text.assemble(("error: ", "bold red"), (error.site, "bold")))
    out.print(Text(f"  {error.problem}"))
    out.print(Text.assemble(("  remedy: ", "green"), error.remedy))
    raise typer.Exit(USER_ERROR)


def _keep_libraries_off_stdout() -> None:
    """What compiled libraries print goes to stderr, for the rest of this process: stdout holds answers only.

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


app = typer.Typer(
    name="bitwright",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script."""
    _keep_libraries_off_stdout()
    with watched() as interrupts:
        app(prog_name="bitwright", obj=interrupts)


def _print_version(wanted: bool) -> None:
    if wanted:
        from bitwright import __version__

        typer.echo(f"bitwright {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Look at quantized models and check them, from the command line.

    sim.export writes a folder. These commands work on such a folder, on an
    ONNX model, on an encodings file, or on a configuration; none needs your
    model's code.

    \b
    Examples:
      bitwright quantize m.onnx --data d.npz --out exported/
      bitwright doctor m.onnx --data d.npz   where do NaN and Inf come from?
      bitwright inspect m.onnx        what would be quantized, and why not the rest
      bitwright verify exported/         does it compute what the simulation did?
      bitwright show exported/           every site: format, scale, range
      bitwright report exported/         one HTML file that shows all of it
      bitwright diff one/ other/         what differs between two runs
      bitwright auto m.onnx --data d.npz --out search/   tries what there is
      bitwright presets                  names for preset, scheme, configuration
      bitwright check-config rules.yaml  what it says, or what is wrong in it

    Exit codes: 0 all is well; 1 the answer is no, as when verify found a
    difference; 2 the input was wrong; 130 Ctrl-C. An interrupted command
    leaves files of an earlier run as they were, or has written all new ones.
    """


def console(*, stderr: bool = False) -> Console:
    """Where a command prints: as wide as the terminal, or wide enough for whole names in a pipe or a file."""
    probe = Console(stderr=stderr)
    return probe if probe.is_terminal else Console(stderr=stderr, width=max(probe.width, _PIPE_WIDTH))


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column, the name, is never cut; cells are plain text, without markup."""
    made = Table(title=Text(title), title_justify="left")
    for i, name in enumerate(head):
        made.add_column(name, no_wrap=i == 0, overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made
