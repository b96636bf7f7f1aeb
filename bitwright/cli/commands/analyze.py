"""``bitwright analyze``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bitwright.cli.app import app, console
from bitwright.cli.options import (
    BatchSize,
    Colours,
    Layout,
    Limit,
    Mean,
    NamedMetric,
    OnnxFile,
    RightAnswers,
    Scale,
    Std,
    read_batches,
    read_labels,
    read_metric,
    read_pictures,
    write_json,
)
from bitwright.errors import ConfigError

if TYPE_CHECKING:
    from bitwright.analysis.result import Analysis
    from bitwright.onnx.model.data import Pictures


@app.command("analyze")
def analyze_model(
    model: OnnxFile,
    data: Annotated[str, typer.Option(help="Batches, as for quantize.", show_default=False)],
    metric: NamedMetric = None,
    labels: RightAnswers = None,
    lower_is_better: Annotated[bool, typer.Option(help="For metrics such as a perplexity.")] = False,
    mode: Annotated[str, typer.Option(help="fast, exact or auto.")] = "auto",
    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End with what there is after so long.")
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(help="Sites that are measured together, as in 'block3*'; may be given several times."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the report here: report.html or report.json.", show_default=False)
    ] = None,
    remedies: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Try the remedies of the N worst layers, and measure them; --deadline counts anew for them.",
        ),
    ] = 0,
    resume: Annotated[
        Path | None, typer.Option(help="Folder that keeps measurements, to go on from.", show_default=False)
    ] = None,
    preset: Annotated[str, typer.Option(help="See `bitwright presets`.")] = "w8a8",
    config: Annotated[str | None, typer.Option(help="Rules: a file, or the name of a target.")] = None,
    scheme: Annotated[str | None, typer.Option(help="Range method: see `bitwright presets`.")] = None,
    fold: Annotated[bool, typer.Option(help="Fold batch norms first.")] = True,
    batch_size: BatchSize = 16,
    limit: Limit = 256,
    layout: Layout = "NCHW",
    colours: Colours = "RGB",
    scale: Scale = 1 / 255,
    mean: Mean = "0",
    std: Std = "1",
) -> None:
    """Find the layers that cost a quantized model its accuracy, and why.

    The model is quantized under the preset, without further methods, and
    calibrated on the data. A model that was quantized already (QDQ) keeps its
    own encodings. Every quantizer's effect on the outputs is estimated, the
    worst are measured; every layer shows the error that it makes and the error
    that only passes through.

    \b
    Examples:
      bitwright analyze model.onnx --data samples.npz
      bitwright analyze model.onnx --data samples.npz --metric accuracy \\
          --labels labels.npy --out report.html
      bitwright analyze model.onnx --data photos/ --remedies 3 --out report.json
    """
    if out is not None and out.suffix not in (".html", ".json"):
        raise ConfigError(str(out), f"there is no report of the kind {out.suffix!r}", "name it .html or .json")
    pictures = read_pictures(layout, colours, scale, mean, std)
    sim, batches = _simulated(model, data, batch_size, limit, pictures, preset, config, scheme, fold)
    from bitwright.analysis.analyze import analyze

    found = analyze(
        sim,
        batches,
        read_metric(metric),
        mode,  # type: ignore[arg-type]
        deadline,
        labels=None if labels is None else read_labels(labels, batches),
        better="lower" if lower_is_better else "higher",
        groups=group or None,
        resume=resume,
    )
    if remedies:
        found.try_remedies(remedies, deadline=deadline)
    _print(found)
    if out is not None:
        if out.suffix == ".json":
            write_json(out, found.to_json())
        else:
            found.report(out)
        console().print(Text(f"wrote {out}"))


def _simulated(
    path: Path,
    data: str,
    batch_size: int,
    limit: int,
    pictures: Pictures,
    preset: str,
    config: str | None,
    scheme: str | None,
    fold: bool,
) -> tuple[Any, list[Any]]:
    """The calibrated simulation and its data."""
    from bitwright.onnx import load_model, quantize
    from bitwright.onnx.model.data import input_specs

    loaded = load_model(path)
    batches = list(read_batches(data, input_specs(loaded.model), batch_size, limit, pictures))
    result = quantize(
        loaded.model, batches, preset, recipe=["fold"] if fold else [], config_file=config, quant_scheme=scheme
    )
    return result.sim, batches


def _print(found: Analysis) -> None:
    out = console()
    for i, line in enumerate(str(found).splitlines()):
        text = Text(line)
        if i == 0:
            text.stylize("bold")
        for word, style in (("remedy:", "bold green"), ("note:", "dim")):
            if line.startswith(word):
                text.stylize(style)
        out.print(text, soft_wrap=True)
