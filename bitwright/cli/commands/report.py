"""``bitwright report`` and ``diff``: one HTML file about a run, and what differs between two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bitwright.cli.app import NO, app, console
from bitwright.cli.options import Prefix, write_json

Run = Annotated[Path, typer.Argument(help="What sim.export wrote, or a JSON file of an analysis.", show_default=False)]


@app.command()
def report(
    path: Run,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The HTML file.")] = Path("report.html"),
    prefix: Prefix = None,
    verify: Annotated[
        bool, typer.Option(help="Also compare the exported model with its simulation, as verify does.")
    ] = False,
    title: Annotated[str, typer.Option(help="Heading; the model's name by default.")] = "",
) -> None:
    """Write one HTML file that shows a quantized model; it needs no network.

    The network as a heat map, every layer and quantizer with its grid and
    range, what stayed in float and why. With the JSON of an analysis, or an
    export that has <prefix>_analysis.json beside it, also the errors of every
    layer, their causes and remedies.

    \b
    Examples:
      bitwright report exported/ --out report.html
      bitwright report exported/ --verify
      bitwright report analysis.json
    """
    from bitwright.report import read_run, write_report

    document = read_run(path, prefix, verify=verify)
    written = write_report(document, out, title=title)
    layers, sites = len(document["layers"]), len(document["sites"])
    console().print(Text(f"wrote {written}: {layers} layers, {sites} sites, {written.stat().st_size / 1e6:.2f} MB"))


@app.command()
def diff(
    first: Run,
    second: Run,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the differences here.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write them here, as JSON.")
    ] = None,
    most: Annotated[int, typer.Option("--rows", min=1, help="Print at most so many rows per table.")] = 20,
) -> None:
    """Compare two runs of a model: encodings, layers, metrics, sizes.

    Layers are compared where both runs were analysed.

    Exit code 1 when an encoding differs.

    \b
    Examples:
      bitwright diff exported/ exported-again/
      bitwright diff before.json after.json --html diff.html
    """
    from bitwright.report import diff_runs, read_run

    found = diff_runs(read_run(first), read_run(second), (str(first), str(second)))
    if html is not None:
        found.report(html)
    if json_file is not None:
        write_json(json_file, found.to_json())
    console().print(Text(found.to_text(most)), soft_wrap=True)
    if not found.equal:
        raise typer.Exit(NO)
