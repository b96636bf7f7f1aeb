"""``bitwright benchmark``: what an exported file costs beside its float model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bitwright.cli.app import NO, app, console
from bitwright.cli.options import Prefix, write_json
from bitwright.errors import ExportError


@app.command()
def benchmark(
    path: Annotated[
        Path, typer.Argument(help="A folder that sim.export wrote, or a quantized model.", show_default=False)
    ],
    prefix: Prefix = None,
    runtime: Annotated[str, typer.Option(help="onnxruntime, openvino or litert.")] = "onnxruntime",
    threads: Annotated[
        list[int] | None, typer.Option(help="Number of threads, may be repeated; 1 and all by default.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for the rounds of each number of threads.")] = 2.0,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Also try changes of the file, with speed and accuracy of each.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report here, as JSON.")
    ] = None,
) -> None:
    """Measure a quantized file beside its float model: time, size, memory, and the operators that cost it.

    Both files run in turns, so that what slows the machine slows both; the
    spread over the rounds is in the table, and a note says when it is too wide
    to tell anything. A model without a float file beside it is compared with
    itself without its quantizers.

    Exit code 1 when the quantized file is slower than float.

    \b
    Examples:
      bitwright benchmark exported/
      bitwright benchmark exported/ --runtime openvino --threads 1
      bitwright benchmark model_int8.onnx --suggest
    """
    from bitwright.onnx.deployed import benchmark_path

    if not path.exists():
        raise ExportError(str(path), "there is no such file or folder", "check the path")
    report = benchmark_path(path, prefix, runtime=runtime, threads=threads, seconds=seconds, suggest=suggest)
    if json_file is not None:
        write_json(json_file, report.to_json())
    console().print(Text(report.to_text()), soft_wrap=True)
    if report.slower:
        raise typer.Exit(NO)
