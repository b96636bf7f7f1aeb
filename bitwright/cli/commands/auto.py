"""``bitwright auto``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bitwright.cli.app import NO, app, console
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
    numbers,
    read_batches,
    read_labels,
    read_metric,
    read_pictures,
    write_json,
)


@app.command("auto")
def auto_command(
    model: OnnxFile,
    data: Annotated[str, typer.Option(help="Calibration data, as for `bitwright quantize`.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder of the trials; one that is there goes on.", show_default=False)],
    metric: NamedMetric = None,
    labels: RightAnswers = None,
    allowed_drop: Annotated[
        str | None, typer.Option(help="Of the metric: 0.01 in its units, or 1% of its float value (the default).")
    ] = None,
    lower_is_better: Annotated[bool, typer.Option(help="For metrics such as a perplexity.")] = False,
    min_sqnr: Annotated[
        float | None, typer.Option(help="Least SQNR of the outputs in dB; without a metric 20 by default.")
    ] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds; no trial begins after that.")] = None,
    cost: Annotated[
        str, typer.Option(help="What is to be small: bit_ops, weight_bytes, activation_bytes, or ms (with --times).")
    ] = "bit_ops",
    times: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Milliseconds per layer or operator type and preset.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="Rules: a file, or the name of a shipped configuration.")] = None,
    target: Annotated[str, typer.Option(help="The runtime that the files are for.")] = "ort_cpu",
    workers: Annotated[int, typer.Option(min=1, help="Trials at a time, each in a process.")] = 1,
    executor: Annotated[str, typer.Option(help="local or ray.")] = "local",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result here, as JSON.")
    ] = None,
    batch_size: BatchSize = 1,
    limit: Limit = 256,
    layout: Layout = "NCHW",
    colours: Colours = "RGB",
    scale: Scale = 1 / 255,
    mean: Mean = "0",
    std: Std = "1",
) -> None:
    """Find the cheapest quantized model that is good enough.

    Trials go from cheap to dear: presets, range methods, recipes, mixed
    precision. Each finished one is a folder in OUT/trials with the model,
    its encodings and a report; OUT/best.json names the best one, and
    OUT/report.html shows all. Stop it at any time, however you like: the same command goes on from there.

    Exit code 1 when no trial is good enough.

    \b
    Examples:
      bitwright auto model.onnx --data samples.npz --out search/
      bitwright auto model.onnx --data samples.npz --out search/ \\
          --metric mypackage.test:right_answers --allowed-drop 0.01
      bitwright auto model.onnx --data samples.npz --out search/ \\
          --metric accuracy --labels labels.npy
      bitwright auto model.onnx --data photos/ --out search/ --deadline 600
    """
    from bitwright.mixed.automatic.auto import auto_quantize
    from bitwright.onnx import load_model
    from bitwright.onnx.model.data import input_specs

    pictures = read_pictures(layout, colours, scale, mean, std)
    feeds = list(read_batches(data, input_specs(load_model(model).model), batch_size, limit, pictures))
    drop = allowed_drop if allowed_drop is None or "%" in allowed_drop else numbers("--allowed-drop", allowed_drop)[0]
    with _lines():
        result = auto_quantize(
            model,
            feeds,
            read_metric(metric),
            allowed_drop=drop,
            lower_is_better=lower_is_better,
            min_sqnr=min_sqnr,
            deadline=deadline,
            folder=out,
            cost=cost,
            times=times,
            labels=None if labels is None else read_labels(labels, feeds),
            config_file=config,
            target=target,
            workers=workers,
            executor=executor,
            filename_prefix="model",
        )
    if json_file is not None:
        write_json(json_file, result.to_json())
    shown = console()
    shown.print(Text(str(result)), soft_wrap=True)
    if result.best is not None:
        shown.print(Text(f"the best one: {result.folder}"), soft_wrap=True)
    else:
        raise typer.Exit(NO)


@contextmanager
def _lines() -> Iterator[None]:
    """Where no table can grow, as in a file of a job that runs at night: a line on stderr for each trial that finished."""
    if sys.stderr.isatty():
        yield
        return
    logger, handler = logging.getLogger("bitwright.trials"), logging.StreamHandler(sys.stderr)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
