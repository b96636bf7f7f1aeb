"""``bitwright drift`` and ``saturation``: where two executions of a model part, and which sums do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from bitwright.cli.app import NO, app, console
from bitwright.cli.options import BatchSize, Limit, Prefix, read_batches, read_pictures, write_json


@app.command()
def drift(
    a: Annotated[str, typer.Argument(help="PATH, PATH@HOW or HOW.", show_default=False)],
    b: Annotated[str, typer.Argument(help="The same of the other one.", show_default=False)],
    data: Annotated[
        str | None, typer.Option(help="Input, as for quantize; the samples of the export by default.")
    ] = None,
    prefix: Prefix = None,
    batch_size: BatchSize = 1,
    diagnoses: Annotated[
        int, typer.Option(min=1, help="Look for the cause at so many tensors, the first that differ.")
    ] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report here, as JSON.")
    ] = None,
) -> None:
    """Find the first operator at which two executions of a model part, and why.

    PATH is a folder that sim.export wrote, an ONNX file, or the .tflite file of
    an export. HOW is float, simulation, file (float kernels, every quantizer as
    it stands), or a runtime: onnxruntime, openvino, litert. HOW alone is about
    the path of the other one.

    Every operator is fed the same in both, and compared on its grid; then both
    run from the input on, which shows how the difference grows. Suspected causes
    are tested by runs without them.

    Exit code 1 when an operator differs beyond its grid for another reason than
    rounding.

    \b
    Examples:
      bitwright drift exported/@simulation onnxruntime
      bitwright drift exported/@float exported/@file
      bitwright drift exported/ exported/@openvino --data samples.npz
      bitwright drift exported/@simulation exported/net.tflite
      bitwright drift float.onnx other_tool_int8.onnx@onnxruntime --data samples.npz
    """
    from bitwright.comparison.drift import drift as compare

    feeds = None if data is None else _feeds(a, b, data, prefix, batch_size)
    report = compare(a, b, feeds, prefix=prefix, diagnoses=diagnoses)
    if json_file is not None:
        write_json(json_file, report.to_json())
    console().print(Text(report.to_text()), soft_wrap=True)
    if not report.ok:
        raise typer.Exit(NO)


def _feeds(a: str, b: str, data: str, prefix: str | None, batch_size: int) -> Any:
    """The first batch of ``data``, for the model that is run."""
    from bitwright.comparison.sides import open_sides

    sides = open_sides(a, b, prefix)
    return next(_batches(data, max(sides, key=lambda side: side.rank).model, batch_size, 1))


def _batches(data: str, model: Any, batch_size: int, limit: int) -> Iterator[Any]:
    """Batches of ``data`` for a model; pictures with values from 0 to 1."""
    from bitwright.onnx.model.data import input_specs

    pictures = read_pictures("NCHW", "RGB", 1 / 255, "0", "1")
    return read_batches(data, input_specs(model), batch_size, limit, pictures)


@app.command()
def saturation(
    path: Annotated[
        Path, typer.Argument(help="A folder that sim.export wrote, or a quantized model.", show_default=False)
    ],
    data: Annotated[
        str | None, typer.Option(help="Input, as for quantize; the samples of the export by default.")
    ] = None,
    prefix: Prefix = None,
    batch_size: BatchSize = 1,
    limit: Limit = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report here, as JSON.")
    ] = None,
) -> None:
    """Find the layers whose sums saturate or overflow in integer kernels.

    CPUs without dot-product instructions (VNNI) add pairs of products in 16 bits,
    and every kernel adds all of them in 32. The table has what the weights allow
    and what was counted on data. `bitwright quantize --repair saturation` gives
    7 bits to the weights of the layers that need it.

    Exit code 1 when a layer has a fault.

    \b
    Examples:
      bitwright saturation exported/
      bitwright saturation model_int8.onnx --data samples.npz
    """
    from bitwright.comparison.saturation import saturation as take_apart
    from bitwright.comparison.sides import open_side, sample_inputs
    from bitwright.errors import ExportError

    side = open_side(path, prefix)
    if data is None:
        kept = sample_inputs(side)
        if kept is None:
            problem = "there is nothing to run it on: no samples lie beside it"
            raise ExportError(str(path), problem, "give --data")
        batches = iter([kept])
    else:
        batches = _batches(data, side.model, batch_size, limit)
    report = take_apart(side.model, batches)
    if json_file is not None:
        write_json(json_file, report.to_json())
    console().print(Text(report.to_text()), soft_wrap=True)
    if not report.ok:
        raise typer.Exit(NO)
