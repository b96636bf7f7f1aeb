"""``bitwright verify``, ``show`` and ``inspect``: what lies in a folder or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bitwright.cli.app import NO, app, console, table
from bitwright.cli.options import OnnxFile, Prefix, like, write_json


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="What sim.export wrote.", show_default=False)],
    prefix: Prefix = None,
    runtime: Annotated[
        str, typer.Option(help="Whose kernels are compared: onnxruntime, openvino or litert.")
    ] = "onnxruntime",
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
      bitwright verify exported/ --runtime openvino
    """
    from bitwright.export.verify.samples import verify_folder

    report = verify_folder(folder, prefix, runtime=runtime)
    if json_file is not None:
        write_json(json_file, report.to_json())
    out = console()
    out.print(Text(report.to_text(width=out.width)), end="", soft_wrap=True)
    if not report.ok:
        raise typer.Exit(NO)


@app.command()
def show(
    path: Annotated[
        Path, typer.Argument(help="A folder that sim.export wrote, a checkpoint, or a file.", show_default=False)
    ],
    prefix: Prefix = None,
    match: Annotated[str, typer.Option(metavar="GLOB", help="Only names like this; * and ? are wildcards.")] = "*",
) -> None:
    """Print where a file comes from, and how its tensors are quantized.

    PATH is a folder that sim.export wrote, a checkpoint, or a file: .onnx and
    .tflite, of other tools too, encodings files of versions 0.6.1, 1.0.0 and
    2.0.0, AIMET's included, and a manifest. Of several scales the smallest and
    the largest are printed.

    \b
    Examples:
      bitwright show exported/
      bitwright show exported/ --match 'layer1.*'
      bitwright show exported/net.tflite
      bitwright show resnet.encodings
    """
    from bitwright.export.contents import contents

    out = console()
    for found in contents(path, prefix):
        rows = [row for row in found.rows if not found.named or like(row[0], match)]
        if rows or found.named:
            out.print(table(found.title, found.head, rows))


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
        if like(r.name, match)
    ]
    out.print(table("Values", ("value", "operator", "shape", "status", "how"), rows))
    for note in (*sim.notes, *coverage.notes):
        out.print(Text(f"note: {note}"))
    out.print(Text(", ".join(f"{n} {status}" for status, n in coverage.counts.items())))
