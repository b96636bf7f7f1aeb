"""The ``bitwright`` command.

A command is one function under ``@app.command()``: its arguments become the command line, its docstring the
help. It imports what it needs inside, so that ``--help`` answers at once; it prints through :func:`console`;
it raises the toolkit's own errors, which :class:`_Commands` turns into three lines and exit code 2; and it
ends with ``raise typer.Exit(1)`` where its answer is no.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bitwright.errors import BitwrightError, ConfigError, ExportError
from bitwright.interrupt import INTERRUPTED, Interrupts, watched

if TYPE_CHECKING:
    from bitwright.core.health.report import HealthReport
    from bitwright.core.numerics.encoding import Encoding
    from bitwright.core.numerics.granularity import Granularity
    from bitwright.core.numerics.spec import QuantSpec
    from bitwright.core.placement.rules import Rule
    from bitwright.export.encodings.sites_file import SavedSite
    from bitwright.onnx.model.data import Pictures

NO, USER_ERROR = 1, 2

# A package that a command may miss -> the extra that brings it.
_EXTRAS = {
    **dict.fromkeys(("onnx", "onnx_ir", "onnxruntime", "onnxscript", "ml_dtypes"), "onnx"),
    **dict.fromkeys(("jinja2", "plotly"), "report"),
    "torch": "torch",
}
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
            if ctx.params.get("debug") or isinstance(
                error, BrokenPipeError
            ):  # the reader of a pipe had enough
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
    """The error that is printed for what a user can mend: input, files, memory, a package that is missing."""
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    if isinstance(error, OSError):
        from bitwright.export.files.atomic import file_error

        name = error.filename if isinstance(error.filename, (str, bytes)) else "a file"
        return file_error(os.fsdecode(name), error)
    if isinstance(error, MemoryError):
        problem = f"there is not enough of it{f': {error}' if str(error) else ''}"
        return ConfigError(
            "memory", problem, "use smaller batches, fewer of them (--limit), or a larger machine"
        )
    assert isinstance(error, BitwrightError)
    return error


def _missing(error: ModuleNotFoundError) -> BitwrightError:
    """What to install for a module that is not there; an error that is not about an extra goes on."""
    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None:
        raise error
    remedy = f"pip install 'bitwright[{extra}]'"
    return ConfigError("environment", f"the package {error.name} is not installed", remedy)


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
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script."""
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
      bitwright presets                  names for preset, scheme, configuration
      bitwright check-config rules.yaml  what it says, or what is wrong in it

    Exit codes: 0 all is well; 1 the answer is no, as when verify found a
    difference; 2 the input was wrong; 130 Ctrl-C. An interrupted command
    leaves files of an earlier run as they were, or has written all new ones.
    """


# ------------------------------------------------------------------------------------------------- output


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


# ------------------------------------------------------------------------------------------------ commands

Prefix = Annotated[
    str | None, typer.Option(help="Stem of the files; needed when the folder holds several exports.")
]


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="What sim.export wrote.", show_default=False)],
    prefix: Prefix = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report here, as JSON.")
    ] = None,
) -> None:
    """Compare an exported model with its simulation, layer by layer, in ONNX Runtime.

    Every layer is fed the values that the simulation had in front of it. What
    comes out is compared with the simulation's, in steps of the grid (LSB):
    once with float kernels, once with the integer kernels of a default
    session. sim.export wrote the samples, so no data is needed.

    Exit code 1 when a place differs by more than one step, or in more than
    one code of a thousand.

    \b
    Examples:
      bitwright verify exported/
      bitwright verify exported/ --prefix digits --json report.json
    """
    from bitwright.export.files.atomic import atomic_write
    from bitwright.export.verify.samples import verify_folder

    report = verify_folder(folder, prefix)
    if json_file is not None:
        with atomic_write(json_file) as temporary:
            temporary.write_text(report.to_json(), encoding="utf-8")
    out = console()
    out.print(Text(report.to_text(width=out.width)), end="", soft_wrap=True)
    if not report.ok:
        raise typer.Exit(NO)


@app.command()
def show(
    path: Annotated[
        Path,
        typer.Argument(help="A folder that sim.export wrote, or an encodings file.", show_default=False),
    ],
    prefix: Prefix = None,
    match: Annotated[
        str, typer.Option(metavar="GLOB", help="Only names like this; * and ? are wildcards.")
    ] = "*",
) -> None:
    """Print how every tensor of an exported model, or of an encodings file, is quantized.

    Encodings files of versions 0.6.1, 1.0.0 and 2.0.0 are read, AIMET's
    included. Of several scales the smallest and the largest are printed.

    \b
    Examples:
      bitwright show exported/
      bitwright show exported/ --match 'layer1.*'
      bitwright show resnet.encodings
    """
    out = console()
    if path.is_dir():
        from bitwright.export.encodings.sites_file import read_sites
        from bitwright.export.verify.samples import find_export

        stem = find_export(path, prefix)
        saved = read_sites(path / f"{stem}_sites.json")
        out.print(table(f"Sites of {stem}", _SITE_HEAD, _site_rows(saved.sites, match)))
        floats = [(name, why) for name, why in saved.floats.items() if _like(name, match)]
        if floats:
            out.print(table("In float", ("value", "reason"), floats))
        return
    from bitwright.export.encodings.versions import read_encodings

    if not path.is_file():
        raise ExportError(str(path), "there is no such file or folder", "check the path")
    file = read_encodings(path)
    records = [(r.name, r.kind, *_cells(r.encoding)) for r in file.records if _like(r.name, match)]
    out.print(table(f"{path.name}, version {file.version}", _FILE_HEAD, records))


OnnxFile = Annotated[Path, typer.Argument(help="An .onnx file.", show_default=False)]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples per run, where the model leaves it open.")]
Limit = Annotated[int, typer.Option(min=1, help="Use at most so many batches.")]
Layout = Annotated[str, typer.Option(help="Of pictures: NCHW or NHWC.")]
Colours = Annotated[str, typer.Option(help="Of pictures: RGB, BGR or L (grey).")]
Scale = Annotated[float, typer.Option(help="Pixels, 0 to 255, are multiplied by this first.")]
Mean = Annotated[str, typer.Option(help="Then this is subtracted: one number, or one per colour.")]
Std = Annotated[str, typer.Option(help="Then it is divided by this.")]


@app.command("quantize")
def quantize_model(
    model: OnnxFile,
    out: Annotated[Path, typer.Option(help="Folder for the files; made if need be.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(help="Calibration data: see below. Without it, random values.", show_default=False),
    ] = None,
    preset: Annotated[str, typer.Option(help="See `bitwright presets`.")] = "w8a8",
    config: Annotated[str | None, typer.Option(help="Rules: a file, or the name of a target.")] = None,
    scheme: Annotated[str | None, typer.Option(help="Range method: see `bitwright presets`.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Stem of the files; the model's by default.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Methods in their order, fold,equalize,adaround, or a YAML file (see `bitwright presets`). "
            "Without it, what suits the preset; `fold` alone is the fastest."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="module:function that rates an InferenceSession, after each step of the recipe."),
    ] = None,
    lower_is_better: Annotated[bool, typer.Option(help="For metrics such as a perplexity.")] = False,
    undo_harm: Annotated[bool, typer.Option(help="Take steps back that make the metric worse.")] = False,
    non_finite: Annotated[
        str, typer.Option(help="A batch that gives NaN or Inf: error, skip it, or clamp to what is finite.")
    ] = "error",
    allow_unreached: Annotated[
        bool, typer.Option(help="Leave what no batch reached in float, instead of refusing it.")
    ] = True,
    weight_only: Annotated[
        str,
        typer.Option(
            help="Products of float activations with quantized weights: exact, or fused by ONNX Runtime, which is "
            "faster and quantizes the activations by itself."
        ),
    ] = "exact",
    memory_budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="MIB",
            help="Activations held while calibrating; a quarter of the free memory by default.",
        ),
    ] = None,
    batch_size: BatchSize = 1,
    limit: Limit = 256,
    layout: Layout = "NCHW",
    colours: Colours = "RGB",
    scale: Scale = 1 / 255,
    mean: Mean = "0",
    std: Std = "1",
) -> None:
    """Fold, calibrate and export an ONNX model.

    Data may be a .npz file (arrays named after the inputs, samples along the
    first axis), a folder of .npy files, a folder per input, a folder of .npz
    files, a folder of pictures, or module:function that yields inputs.

    \b
    Examples:
      bitwright quantize model.onnx --data samples.npz --out exported/
      bitwright quantize model.onnx --data photos/ --mean 0.485,0.456,0.406 \\
          --std 0.229,0.224,0.225 --preset w8a16 --out exported/
      bitwright quantize model.onnx --data mypackage.data:feeds --out exported/
      bitwright quantize model.onnx --data samples.npz --preset w4a8 \\
          --recipe fold,equalize,adaround --metric mypackage.test:accuracy --out exported/
    """
    from itertools import islice

    from bitwright.core.files.entry_points import load_entry_point
    from bitwright.core.numerics.spec import check_policy
    from bitwright.export.files.atomic import check_stem
    from bitwright.onnx import Pictures, load_data, load_model, quantize
    from bitwright.onnx.model.data import input_specs, random_feeds

    policy = check_policy(non_finite, "--non-finite")
    loaded = load_model(model)
    specs = input_specs(loaded.model)
    if data is None:
        feeds = random_feeds(specs, 4)
        recipe = recipe or "fold"  # rounding for random inputs would be rounding for nothing
    else:
        pictures = Pictures(layout, colours, scale, _numbers("--mean", mean), _numbers("--std", std))
        feeds = load_data(data, specs, batch_size=batch_size, pictures=pictures)
    stem = check_stem(model.stem if prefix is None else prefix, "--prefix")
    with _tells_what_is_kept(out, out / f"{stem}_manifest.json"):
        result = quantize(
            loaded.model,
            islice(feeds, limit),
            preset,
            recipe=recipe if recipe is None or Path(recipe).suffix else recipe.split(","),
            config_file=config,
            quant_scheme=scheme,
            metric=None if metric is None else load_entry_point(metric, "rates a session"),
            lower_is_better=lower_is_better,
            on_harm="undo" if undo_harm else "report",
            path=out,
            filename_prefix=stem,
            weight_only=weight_only,  # type: ignore[arg-type]
            non_finite=policy,
            allow_unreached=allow_unreached,
            memory_budget=None if memory_budget is None else memory_budget << 20,
        )
    _print_result(result, loaded.notes)


@contextmanager
def _tells_what_is_kept(folder: Path, manifest: Path) -> Iterator[None]:
    """Note on an exception what lies in ``folder`` now: an export appears whole, and its manifest last."""

    def content() -> bytes | None:
        return manifest.read_bytes() if manifest.is_file() else None

    before = content()
    try:
        yield
    except BaseException as error:
        if content() != before:
            error.add_note(f"{folder}: the new export is complete")
        elif before is None:
            error.add_note(f"{folder}: nothing was written")
        else:
            error.add_note(f"{folder}: the earlier export is as it was")
        raise


def _print_result(result: Any, notes: Iterable[str]) -> None:
    """What a conversion did, and the files that it wrote."""
    assert result.exported is not None and result.sim.calibration_log is not None
    counts = ", ".join(f"{n} {status}" for status, n in result.sim.coverage().counts.items())
    lines = [f"note: {note}" for note in (*notes, *result.exported.notes)]
    lines += [f"{len(list(result.folds))} batch norms folded; values: {counts}"]
    lines += [*result.sim.calibration_log.lines(), str(result.report)]
    if result.metrics:
        lines.append(", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items()))
    lines += [f"wrote {path}" for path in result.exported.files]
    shown = console()
    for line in lines:
        shown.print(Text(line))


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(option, f"{text!r} is not a list of numbers", "write 0.485,0.456,0.406") from error


@app.command()
def doctor(
    model: Annotated[
        str,
        typer.Argument(
            help="An .onnx file, or module:function that makes a PyTorch model.", show_default=False
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Batches, as for quantize. Without it, random values.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the report here, as JSON; - prints it."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(help="With skip or clamp, data that are not finite are no fault: calibration goes on."),
    ] = "error",
    batch_size: BatchSize = 1,
    limit: Limit = 256,
    layout: Layout = "NCHW",
    colours: Colours = "RGB",
    scale: Scale = 1 / 255,
    mean: Mean = "0",
    std: Std = "1",
) -> None:
    """Find the operator that makes NaN or Inf, and say why.

    Every batch is run. The report names the first operator that turned finite
    numbers into others, also inside loops and branches, with what it read and
    wrote, the batch and the sample, how far the values spread, and a remedy.
    Masks of -Inf and NaN that the model itself removes are no faults. A
    parameter that is not finite is named before anything runs.

    Exit code 0 when the model is healthy, 1 when an operator, a parameter or
    the data is at fault.

    \b
    Examples:
      bitwright doctor model.onnx --data samples.npz
      bitwright doctor model.onnx --data photos/ --json report.json
      bitwright doctor mypackage.models:make --data mypackage.data:batches
    """
    from bitwright.core.numerics.spec import check_policy

    tolerant = check_policy(policy, "--policy") != "error"
    if Path(model).suffix == ".onnx" or ":" not in model:
        from bitwright.onnx.model.data import Pictures

        pictures = Pictures(layout, colours, scale, _numbers("--mean", mean), _numbers("--std", std))
        report = _check_onnx(Path(model), data, batch_size, limit, pictures)
    else:
        report = _check_torch(model, data, limit)
    if json_file is None or str(json_file) != "-":
        _print_health(report)
    else:
        typer.echo(report.to_json())
    if json_file is not None and str(json_file) != "-":
        from bitwright.export.files.atomic import atomic_write

        with atomic_write(json_file) as temporary:
            temporary.write_text(report.to_json(), encoding="utf-8")
    faults = [c for c in report.culprits if not (tolerant and c.cause == "bad input data")]
    if faults or report.bad_params:
        raise typer.Exit(NO)


def _check_onnx(
    path: Path, data: str | None, batch_size: int, limit: int, pictures: Pictures
) -> HealthReport:
    from dataclasses import replace
    from itertools import islice

    from bitwright.onnx import check_model, load_data, load_model
    from bitwright.onnx.model.data import input_specs

    if data is None:
        report = check_model(path)
        return replace(report, notes=(*report.notes, "random values were fed, no data was given"))
    specs = input_specs(load_model(path).model)
    return check_model(path, islice(load_data(data, specs, batch_size=batch_size, pictures=pictures), limit))


def _check_torch(model: str, data: str | None, limit: int) -> HealthReport:
    from itertools import islice

    from bitwright.core.files.entry_points import load_entry_point
    from bitwright.torch import check_model

    if data is None:
        raise ConfigError(
            "--data", "a PyTorch model does not say what it takes", "name a function: --data module:function"
        )
    make, batches = load_entry_point(model, "makes a model"), load_entry_point(data, "yields batches")
    made = _called(model, make)
    return check_model(made, islice(_called(data, batches), limit))


def _called(text: str, function: Callable[[], Any]) -> Any:
    """What the user's function returns; where it fails, the error names it."""
    try:
        return function()
    except Exception as error:
        raise ConfigError(
            text, f"it failed: {type(error).__name__}: {error}", "call it yourself first; --debug shows where"
        ) from error


def _print_health(report: HealthReport) -> None:
    """The report, its verdict and the remedies in colour."""
    out = console()
    for i, line in enumerate(report.text().splitlines()):
        text = Text(line)
        if i == 0:
            text.stylize("bold green" if report.ok else "bold red")
        for word, style in (("remedy:", "bold green"), ("note:", "dim")):
            if line.lstrip().startswith(word):
                text.stylize(style)
        out.print(text, soft_wrap=True)


@app.command()
def inspect(
    model: OnnxFile,
    preset: Annotated[str, typer.Option(help="See `bitwright presets`.")] = "w8a8",
    config: Annotated[str | None, typer.Option(help="Rules: a file, or the name of a target.")] = None,
    match: Annotated[str, typer.Option(metavar="GLOB", help="Only values of names like this.")] = "*",
) -> None:
    """Print what an ONNX model consists of, and what would be quantized and why not the rest.

    \b
    Examples:
      bitwright inspect model.onnx
      bitwright inspect model.onnx --preset w4a8 --match '*.weight'
    """
    from collections import Counter

    from bitwright.onnx import QuantizationSimModel

    sim = QuantizationSimModel(model, preset=preset, config_file=config)
    out = console()
    for title, names in (("inputs", map(str, sim.specs)), ("outputs", sim.output_names)):
        out.print(Text(f"{title}: {', '.join(names)}"))
    kinds = Counter(op.type for op in sim.graph.ops)
    out.print(table("Operators", ("operator", "count"), [(kind, str(n)) for kind, n in kinds.most_common()]))
    coverage = sim.coverage()
    rows = [
        (r.name, r.op_type, "x".join("?" if n < 0 else str(n) for n in r.shape), r.status, r.how)
        for r in coverage
        if _like(r.name, match)
    ]
    out.print(table("Values", ("value", "operator", "shape", "status", "how"), rows))
    for note in (*sim.notes, *coverage.notes):
        out.print(Text(f"note: {note}"))
    out.print(Text(", ".join(f"{n} {status}" for status, n in coverage.counts.items())))


_ENCODING_HEAD = ("format", "granularity", "scale", "zero point", "range")
_SITE_HEAD = ("site", "role", "state", *_ENCODING_HEAD)
_FILE_HEAD = ("name", "kind", *_ENCODING_HEAD)


def _site_rows(sites: Mapping[str, SavedSite], match: str) -> Iterator[tuple[str, ...]]:
    for name, site in sites.items():
        if not _like(name, match):
            continue
        empty = (site.spec.format.name, "", "", "", "")
        state = "quantized" if site.encoding is not None else "no encoding"
        cells = empty if site.encoding is None else _cells(site.encoding)
        yield name, site.role, state if site.enabled else "float", *cells


def _cells(encoding: Encoding) -> tuple[str, ...]:
    """An encoding under the columns of ``_ENCODING_HEAD``."""
    scale, zero = encoding.scale, encoding.zero_point
    return (
        encoding.format.name,
        _where(encoding.granularity),
        _span(scale.min(), scale.max()),
        _span(zero.min(), zero.max()),
        f"{encoding.min.min():.5g} to {encoding.max.max():.5g}",
    )


def _where(granularity: Granularity) -> str:
    """``per channel, axis 0``; no axis while it is open."""
    size, axis = getattr(granularity, "size", None), getattr(granularity, "axis", None)
    kind = {"PerTensor": "per tensor", "PerChannel": "per channel", "PerBlock": f"per block of {size}"}
    return kind[type(granularity).__name__] + ("" if axis is None else f", axis {axis}")


def _span(lowest: Any, highest: Any) -> str:
    return f"{lowest:.5g}" if lowest == highest else f"{lowest:.5g} to {highest:.5g}"


def _like(name: str, glob: str) -> bool:
    """Whether ``name`` matches; brackets are part of site names and not special."""
    import fnmatch

    return fnmatch.fnmatchcase(name, glob.replace("[", "[[]"))


@app.command()
def migrate(
    script: Annotated[
        Path, typer.Argument(help="A Python script or notebook that uses AIMET.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option(help="Where the new script goes; <script>_bitwright.py by default.")
    ] = None,
) -> None:
    """Rewrite the imports of an AIMET script, and list what has no counterpart and what behaves differently.

    Exit code 1: something has no counterpart.
    """
    from bitwright.migrate import migrate_file

    try:
        content = script.read_bytes()
    except OSError as error:
        raise ConfigError(str(script), f"it cannot be read: {error}", "give the path of a script") from error
    rewritten, found = migrate_file(content, str(script))
    target = output or script.with_name(f"{script.stem}_bitwright{script.suffix}")
    target.write_bytes(rewritten)
    out = console()
    for finding in found.findings:
        kind = ("no counterpart", "red") if finding.missing else ("different", "yellow")
        out.print(Text.assemble(f"{script}:{finding.where} ", kind, f" {finding.name}: {finding.note}"))
    out.print(
        Text(
            f"{found.changed} import statements rewritten in {target}; {len(found.missing)} names without a counterpart"
        )
    )
    if found.missing:
        raise typer.Exit(NO)


@app.command()
def presets() -> None:
    """List the names that the Python calls and the configuration files know.

    Presets go into preset=, range methods into quant_scheme= and method:,
    configurations into config_file=, steps into recipe=.

    \b
    Examples:
      quantize(model, data, preset="w4a8")
      QuantizationSimModel(model, x, "percentile", config_file="htp_v73")
    """
    from bitwright.algorithms.search.recipe import KINDS
    from bitwright.core.numerics.ranges import RANGE_METHODS, method_aliases
    from bitwright.core.numerics.spec import PRESETS
    from bitwright.core.placement.aimet_config import ALIASES, SHIPPED

    out = console()
    specs = [(name, _spec(p.weight), _spec(p.activation)) for name, p in PRESETS.items()]
    out.print(table("Presets", ("preset", "weights", "activations"), specs))
    methods = [
        (name, row.needs, _options_of(row.options), ", ".join(method_aliases(name)))
        for name, row in RANGE_METHODS.items()
    ]
    out.print(table("Range methods", ("method", "reads", "options", "also called"), methods))
    targets = [(name, ", ".join(a for a, to in ALIASES.items() if to == name)) for name in SHIPPED]
    out.print(table("Configurations", ("configuration", "also called"), targets))
    kinds = [(name, kind.phase, kind.does) for name, kind in KINDS.items()]
    out.print(table("Steps of recipes", ("step", "works on", "does"), kinds))


def _spec(spec: QuantSpec | None) -> str:
    return "float" if spec is None else spec.describe()


def _options_of(options: Any) -> str:
    """``percentile=100 (50 to 100)`` for every option of a range method."""
    return ", ".join(f"{name}={d:g} ({lo:g} to {hi:g})" for name, (d, lo, hi) in options.items())


@app.command("check-config")
def check_config(
    file: Annotated[
        str,
        typer.Argument(help="Rules in YAML, TOML or JSON, AIMET's quantsim JSON, or a name such as htp_v73."),
    ],
    preset: Annotated[
        str, typer.Option(help="Specs that the rules start from, where the file names none.")
    ] = "w8a8",
) -> None:
    """Read a configuration and print the rules it stands for, or what is wrong in it.

    Rules are applied from top to bottom, and a later one wins. Whether a rule
    matches anything depends on the model: QuantizationSimModel reports those
    that do not.

    \b
    Examples:
      bitwright check-config rules.yaml
      bitwright check-config default_config.json
      bitwright check-config htp_v73 --preset w4a8
    """
    from bitwright.core.numerics.spec import find_preset
    from bitwright.core.placement.config import load_config

    rules = load_config(file, find_preset(preset))
    out = console()
    out.print(Text(f"weights      {_spec(rules.weight)}"))
    out.print(Text(f"activations  {_spec(rules.activation)}"))
    rows = [(str(i), *_rule_cells(rule)) for i, rule in enumerate(rules.rules)]
    out.print(
        table(f"{len(rules.rules)} rules", ("", "about", "port", "parameter", "sets", "written in"), rows)
    )
    out.print(Text(f"{len(rules.supergroups)} supergroups: {', '.join(map(str, rules.supergroups))}"))
    for note in rules.notes:
        out.print(Text(f"note: {note}"))


def _rule_cells(rule: Rule) -> tuple[str, ...]:
    """Which tensors a rule is about, what it sets, and where it was written."""
    about = [f"names {rule.name}"] if rule.name != "*" else []
    about += [f"operators {' '.join(rule.types)}"] if rule.types != ("*",) else []
    port = "all" if rule.port == "*" else rule.port
    sets = []
    for facet in ("quantized", "format", "symmetry", "method", "fixed_range"):
        value = getattr(rule, facet)
        sets += [] if value is None else [f"{facet}={getattr(value, 'name', value)}"]
    sets += [] if rule.granularity is None else [_where(rule.granularity)]
    return ", ".join(about) or "everything", port, rule.param or "", ", ".join(sets), rule.origin


if __name__ == "__main__":
    main()
