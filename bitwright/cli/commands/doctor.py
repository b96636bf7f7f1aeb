"""``bitwright doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from bitwright.cli.app import NO, app, console
from bitwright.cli.options import (
    BatchSize,
    Colours,
    Layout,
    Limit,
    Mean,
    Scale,
    Std,
    called,
    read_batches,
    read_pictures,
    write_json,
)
from bitwright.errors import ConfigError

if TYPE_CHECKING:
    from bitwright.core.health.report import HealthReport
    from bitwright.onnx.model.data import Pictures


@app.command()
def doctor(
    model: Annotated[
        str, typer.Argument(help="An .onnx file, or module:function that makes a PyTorch model.", show_default=False)
    ],
    data: Annotated[
        str | None, typer.Option(help="Batches, as for quantize. Without it, random values.", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report here, as JSON; - prints it.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="With skip or clamp, data that are not finite are not fault: calibration goes on.")
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
    Masks of -Inf and NaN that the model itself removes are not faults. A
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
        pictures = read_pictures(layout, colours, scale, mean, std)
        report = _check_onnx(Path(model), data, batch_size, limit, pictures)
    else:
        report = _check_torch(model, data, limit)
    if json_file is None or str(json_file) != "-":
        _print_health(report)
    else:
        typer.echo(report.to_json())
    if json_file is not None and str(json_file) != "-":
        write_json(json_file, report.to_json())
    faults = [c for c in report.culprits if not (tolerant and c.cause == "bad input data")]
    if faults or report.bad_params:
        raise typer.Exit(NO)


def _check_onnx(path: Path, data: str | None, batch_size: int, limit: int, pictures: Pictures) -> HealthReport:
    from dataclasses import replace

    from bitwright.onnx import check_model, load_model
    from bitwright.onnx.model.data import input_specs

    if data is None:
        report = check_model(path)
        return replace(report, notes=(*report.notes, "random values were fed, no data was given"))
    specs = input_specs(load_model(path).model)
    return check_model(path, read_batches(data, specs, batch_size, limit, pictures))


def _check_torch(model: str, data: str | None, limit: int) -> HealthReport:
    from itertools import islice

    from bitwright.core.files.entry_points import load_entry_point
    from bitwright.torch import check_model

    if data is None:
        raise ConfigError(
            "--data", "a PyTorch model does not say what it takes", "name a function: --data module:function"
        )
    make, batches = load_entry_point(model, "makes a model"), load_entry_point(data, "yields batches")
    made = called(model, make)
    return check_model(made, islice(called(data, batches), limit))


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
