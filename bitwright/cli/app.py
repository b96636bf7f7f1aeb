"""The application: registration of commands, their output, and the handling of errors and Ctrl-C."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
import typer.core
from rich.text import Text

from bitwright.errors import BitwrightError, ConfigError
from bitwright.interrupt import INTERRUPTED, Interrupts, watched
from bitwright.lazy import how_to_install
from bitwright.terminal import NORMAL, QUIET, VERBOSE, console, interrupted, keep_libraries_off_stdout, level

NO, USER_ERROR = 1, 2
#: groups of options in --help, in their order, and what declares an option of each
GROUPS = ("Data", "Methods", "Export", "Output")
data_option, methods_option, export_option, output_option = (
    functools.partial(typer.Option, rich_help_panel=group) for group in GROUPS
)


#: commands in the order of --help, which is that of a first use; others follow
_ORDER = (
    "inspect", "quantize", "verify", "benchmark", "report", "analyze", "doctor", "auto", "compress", "llm", "show", "diff",
    "evaluate", "saturation", "drift", "certify", "strip", "list", "presets", "check-config", "migrate",
)  # fmt: skip


class _Commands(typer.core.TyperGroup):
    """The group of all commands; prints user errors without a traceback, unless ``--debug`` is given."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of ``--help``."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))

    def invoke(self, ctx: Any) -> Any:
        """Run a command; Ctrl-C ends it with exit code 130, even where a library replaced the KeyboardInterrupt."""
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
    """Report Ctrl-C and which files are kept; exit code 130."""
    interrupted(error)
    raise typer.Exit(INTERRUPTED)


def _explained(error: Exception) -> BitwrightError:
    """Convert an exception that a user can solve (input, files, memory, a missing package) into the error to print."""
    if isinstance(error, ModuleNotFoundError):
        remedy = how_to_install(error)
        if remedy is None:
            raise error
        return ConfigError("environment", f"the package {error.name} is not installed", remedy)
    if isinstance(error, OSError):
        from bitwright.export.files.atomic import file_error

        name = error.filename if isinstance(error.filename, (str, bytes)) else "a file"
        return file_error(os.fsdecode(name), error)
    if isinstance(error, MemoryError):
        problem = f"there is not enough memory{f': {error}' if str(error) else ''}"
        return ConfigError("memory", problem, "use smaller batches, fewer samples (--limit), or a larger machine")
    assert isinstance(error, BitwrightError)
    return error


def _fail(error: BitwrightError) -> NoReturn:
    """Print site, problem and remedy, and end with exit code 2."""
    out = console(stderr=True)
    out.print(Text.assemble(("error: ", "bold red"), (error.site, "bold")))
    out.print(Text(f"  {error.problem}"))
    out.print(Text.assemble(("  remedy: ", "green"), error.remedy))
    raise typer.Exit(USER_ERROR)


app = typer.Typer(
    name="bitwright",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script."""
    keep_libraries_off_stdout()
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
    """Quantize ONNX models, and inspect and check quantized ones, from the command line.

    sim.export writes a folder. These commands work on such a folder, on an
    ONNX model, on an encodings file, or on a configuration; none needs your
    model's code.

    \b
    Examples:
      bitwright quantize m.onnx --data d.npz --out exported/
      bitwright doctor m.onnx --data d.npz   where do NaN and Inf come from?
      bitwright inspect m.onnx           what would be quantized, and why not the rest
      bitwright compress m.onnx --data d.npz --macs 0.5 --out small/   fewer operations
      bitwright verify exported/         does it compute what the simulation did?
      bitwright show exported/           every site: format, scale, range
      bitwright report exported/         one HTML file that shows all of it
      bitwright diff one/ other/         what differs between two runs
      bitwright auto m.onnx --data d.npz --out search/   the cheapest model that is good enough
      bitwright list targets             names that the options take
      bitwright check-config rules.yaml  what it says, or what is wrong in it

    Every command takes -v (log each step), -q (print only the result line)
    and --library (shared library of custom ONNX operators).

    Exit codes: 0 all is well; 1 the answer is no, as when verify found a
    difference; 2 the input was wrong; 130 Ctrl-C. An interrupted command
    leaves files of an earlier run as they were, or has written all new ones.
    """


# ---- commands


def group(name: str, help: str) -> typer.Typer:
    """Register a group of commands, ``bitwright name command``; commands are registered with ``command(..., under=group)``."""
    made = typer.Typer(name=name, help=help, no_args_is_help=True, rich_markup_mode="rich")
    app.add_typer(made)
    return made


def command(
    name: str | None = None, *, under: typer.Typer | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command, of a group or of the application, with the options ``-v``, ``-q`` and ``--library``.

    A parameter whose type is a dataclass stands for the options that its fields declare, so that commands share them.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, Any] = {}
        flat: list[inspect.Parameter] = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            kind: Any = parameter.annotation
            if dataclasses.is_dataclass(kind):
                groups[parameter.name] = kind
                flat += inspect.signature(cast(Any, kind), eval_str=True).parameters.values()
            else:
                flat.append(parameter)
        flat += inspect.signature(_common, eval_str=True).parameters.values()

        @functools.wraps(function)
        def run(**values: Any) -> None:
            wanted = _common(values.pop("verbose"), values.pop("quiet"), values.pop("library"))
            made = {
                key: group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
                for key, group in groups.items()
            }
            with _logged(wanted):
                function(**values, **made)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in sorted(flat, key=_place)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__  # its signature is that of `function`
        return (under or app).command(name)(run)

    return register


def _place(parameter: inspect.Parameter) -> tuple[int, bool]:
    """Sort key of an option in ``--help``: by group, with ``--data`` first in its group."""
    group = next(
        (getattr(info, "rich_help_panel", None) for info in getattr(parameter.annotation, "__metadata__", ())), None
    )
    return GROUPS.index(group) if group in GROUPS else -1, parameter.name != "data"


def _common(
    verbose: Annotated[bool, output_option("--verbose", "-v", help="Log every step, with times.")] = False,
    quiet: Annotated[bool, output_option("--quiet", "-q", help="Print only the result line.")] = False,
    library: Annotated[
        list[Path] | None, data_option(metavar="FILE", help="Library of custom ONNX operators; may be repeated.")
    ] = None,
) -> int:
    """Check and apply the options that every command has; returns how much is printed."""
    if verbose and quiet:
        raise ConfigError("--quiet", "it is given together with --verbose", "leave one of them out")
    if library:
        from bitwright.runtimes.onnxruntime import register_operators

        for file in library:
            register_operators(file)
    return VERBOSE if verbose else QUIET if quiet else NORMAL


@contextmanager
def _logged(wanted: int) -> Iterator[None]:
    """Print and log as ``wanted`` asks for inside the block: steps on stderr with -v, errors alone with -q."""
    logger, token = logging.getLogger("bitwright"), level.set(wanted)
    before, handler = logger.level, logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    if wanted == VERBOSE:
        logger.addHandler(handler)
    if wanted != NORMAL:
        logger.setLevel(logging.INFO if wanted == VERBOSE else logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        level.reset(token)
