"""Commands that find errors in a model and their causes: ``analyze``, ``doctor``, ``drift`` and ``saturation``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitwright.cli.app import NO, command, data_option, methods_option, output_option
from bitwright.cli.options import (
    Config,
    Data,
    ExportOrModel,
    JsonFile,
    Metric,
    ModelFile,
    OptionalData,
    Prefix,
    Preset,
    Reading,
    Scheme,
    finish,
    read_model,
    write_json,
)
from bitwright.errors import ConfigError
from bitwright.terminal import details, print_report

if TYPE_CHECKING:
    from bitwright.core.health.report import HealthReport


@command("analyze")
def analyze_model(
    model: ModelFile,
    data: Data,
    reading: Reading,
    judged: Metric,
    mode: Annotated[str, methods_option(help="fast, exact or auto.")] = "auto",
    deadline: Annotated[
        float | None, methods_option(metavar="SECONDS", help="End after so long with what is measured.")
    ] = None,
    group: Annotated[
        list[str] | None,
        methods_option(help="Sites that are measured together, as in 'block3*'; may be given several times."),
    ] = None,
    remedies: Annotated[
        int,
        methods_option(
            min=0,
            metavar="N",
            help="Try the remedies of the N worst layers and measure them; --deadline starts anew for them.",
        ),
    ] = 0,
    preset: Preset = "w8a8",
    config: Config = None,
    scheme: Scheme = None,
    fold: Annotated[bool, methods_option(help="Fold batch norms first.")] = True,
    out: Annotated[Path | None, output_option(help="Write the report here: report.html or report.json.")] = None,
    resume: Annotated[Path | None, output_option(help="Folder that keeps measurements, to resume from.")] = None,
) -> None:
    """Find the layers that cost a quantized model its accuracy, and why.

    The model is quantized under the preset, without further methods, and
    calibrated on the data. A model that was quantized already (QDQ) keeps its
    own encodings. Every quantizer's effect on the outputs is estimated, the
    worst are measured; for every layer the report tells the error that it makes
    from the error that only passes through.

    \b
    Examples:
      bitwright analyze model.onnx --data samples.npz
      bitwright analyze model.onnx --data samples.npz --metric accuracy \\
          --labels labels.npy --out report.html
      bitwright analyze model.onnx --data photos/ --remedies 3 --out report.json
    """
    if out is not None and out.suffix not in (".html", ".json"):
        raise ConfigError(str(out), f"there is no report of the kind {out.suffix!r}", "name it .html or .json")
    from bitwright.analysis.analyze import analyze
    from bitwright.recipes.quantize import quantize

    given = read_model(model)
    batches = list(map(given.batch, reading.batches(data, given.specs)))
    recipe = ["fold"] if fold else []
    result = quantize(given.model, batches, preset, recipe=recipe, config_file=config, quant_scheme=scheme)
    found = analyze(
        result.sim,
        batches,
        judged.named(),
        mode,  # type: ignore[arg-type]
        deadline,
        labels=judged.answers(batches),
        better="lower" if judged.lower_is_better else "higher",
        groups=group or None,
        resume=resume,
    )
    if remedies:
        found.try_remedies(remedies, deadline=deadline)
    if out is not None and out.suffix == ".json":
        write_json(out, found)
    elif out is not None:
        found.report(out)
    print_report(str(found))
    if out is not None:
        details(f"wrote {out}")


@command()
def doctor(
    model: Annotated[
        str, typer.Argument(help="An .onnx file, or module:function that makes a PyTorch model.", show_default=False)
    ],
    reading: Reading,
    data: OptionalData = None,
    policy: Annotated[
        str, data_option(help="With skip or clamp, non-finite data are no fault, as calibration goes on.")
    ] = "error",
    json_file: Annotated[
        Path | None, output_option("--json", metavar="FILE", help="Write the report here, as JSON; - prints it.")
    ] = None,
) -> None:
    """Find the operator that makes NaN or Inf, and say why.

    Every batch is run; without --data one of random values. The report names
    the first operator that turned finite numbers into NaN or Inf, also inside
    loops and branches, with what it read and wrote, the batch and the sample,
    how far the values spread, and a remedy. Masks of -Inf and NaN that the model
    itself removes are no faults. A parameter that is not finite is named before
    anything runs.

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
    is_onnx = Path(model).suffix == ".onnx" or ":" not in model
    report = _check_onnx(Path(model), data, reading) if is_onnx else _check_torch(model, data, reading.limit)
    if str(json_file) == "-":
        typer.echo(report.to_json())
    else:
        write_json(json_file, report)
        print_report(report.text(), "bold green" if report.ok else "bold red")
    faults = [c for c in report.culprits if not (tolerant and c.cause == "bad input data")]
    if faults or report.bad_params:
        raise typer.Exit(NO)


def _check_onnx(path: Path, data: str | None, reading: Reading) -> HealthReport:
    from bitwright.onnx import check_model, load_model
    from bitwright.onnx.model.data import input_specs

    if data is None:
        report = check_model(path)
        return replace(report, notes=(*report.notes, "random values were fed, no data was given"))
    return check_model(path, reading.batches(data, input_specs(load_model(path).model)))


def _check_torch(model: str, data: str | None, limit: int) -> HealthReport:
    from itertools import islice

    from bitwright.core.files import load_entry_point
    from bitwright.torch import check_model

    if data is None:
        raise ConfigError(
            "--data", "a PyTorch model does not say what it takes", "name a function: --data module:function"
        )
    make, batches = load_entry_point(model, "makes a model"), load_entry_point(data, "yields batches")
    made, given = (_called(text, function) for text, function in ((model, make), (data, batches)))
    return check_model(made, islice(given, limit))


def _called(text: str, function: Any) -> Any:
    """Call a function of the user's; an error names it."""
    try:
        return function()
    except Exception as error:
        raise ConfigError(
            text, f"it failed: {type(error).__name__}: {error}", "call it yourself first; --debug shows where"
        ) from error


@command()
def drift(
    a: Annotated[str, typer.Argument(help="PATH, PATH@HOW or HOW.", show_default=False)],
    b: Annotated[str, typer.Argument(help="The same of the other execution.", show_default=False)],
    reading: Reading,
    data: OptionalData = None,
    prefix: Prefix = None,
    diagnoses: Annotated[
        int, typer.Option(min=1, help="Look for the cause at the first so many tensors that differ.")
    ] = 3,
    json_file: JsonFile = None,
) -> None:
    """Find the first operator at which two executions of a model diverge, and why.

    PATH is a folder that sim.export wrote, an ONNX file, or the .tflite file of
    an export. HOW is float, simulation, file (float kernels, every quantizer as
    it stands), a runtime: onnxruntime, openvino, litert, or a target that is not
    here: a name of `bitwright list profiles`, or a .toml file. HOW alone takes
    the path of the other argument.

    Every operator is fed the same in both, and compared on its grid; then both
    run from the input on, which shows how the difference grows. Suspected causes
    are tested by runs without them. The first batch of --data is run; without
    it, the samples of the export.

    Exit code 1 when an operator differs beyond its grid for another reason than
    rounding.

    \b
    Examples:
      bitwright drift exported/@simulation onnxruntime
      bitwright drift exported/@float exported/@file
      bitwright drift exported/ exported/@openvino --data samples.npz
      bitwright drift exported/@simulation exported/net.tflite
      bitwright drift float.onnx other_tool_int8.onnx@onnxruntime --data samples.npz
      bitwright drift exported/@simulation exported/@cmsis_nn
    """
    from bitwright.compare.drift import drift as compare
    from bitwright.compare.sides import open_sides
    from bitwright.onnx.model.data import input_specs

    feeds = None
    if data is not None:
        run = max(open_sides(a, b, prefix), key=lambda side: side.rank)
        feeds = next(reading.batches(data, input_specs(run.model)))
    finish(compare(a, b, feeds, prefix=prefix, diagnoses=diagnoses), json_file)


@command()
def saturation(
    path: ExportOrModel, reading: Reading, data: OptionalData = None, prefix: Prefix = None, json_file: JsonFile = None
) -> None:
    """Find the layers whose sums saturate or overflow in integer kernels.

    CPUs without dot-product instructions (VNNI) add pairs of products in 16 bits,
    and every kernel adds all of them in 32. The table shows what the weights allow
    and what was counted on the data; without --data, on the samples of the export.
    `bitwright quantize --repair saturation` gives 7 bits to the weights of the
    layers that need it.

    Exit code 1 when a layer has a fault.

    \b
    Examples:
      bitwright saturation exported/
      bitwright saturation model_int8.onnx --data samples.npz
    """
    from bitwright.compare.saturation import saturation as take_apart
    from bitwright.compare.sides import open_side, sample_inputs
    from bitwright.errors import ExportError
    from bitwright.onnx.model.data import input_specs

    side = open_side(path, prefix)
    kept = sample_inputs(side) if data is None else None
    if data is None and kept is None:
        raise ExportError(str(path), "there is nothing to run it on: no samples lie beside it", "give --data")
    batches: Any = iter([kept]) if data is None else reading.batches(data, input_specs(side.model))
    finish(take_apart(side.model, batches), json_file)
