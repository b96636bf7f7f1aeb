"""``bitwright verify``, ``show`` and ``inspect``: what lies in a folder or a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bitwright.cli.app import NO, app, console, table
from bitwright.cli.options import OnnxFile, Prefix, like, write_json
from bitwright.errors import ExportError

if TYPE_CHECKING:
    from bitwright.core.numerics.encoding import Encoding
    from bitwright.core.numerics.granularity import Granularity
    from bitwright.export.encodings.sites_file import SavedSite


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
        from bitwright.export.files.origin import read_origin
        from bitwright.export.verify.samples import find_export

        stem = find_export(path, prefix)
        saved = read_sites(path / f"{stem}_sites.json")
        told = read_origin(path / f"{stem}.onnx")
        if told:
            out.print(table("Origin", ("", "what the file says of itself"), told.items()))
        out.print(table(f"Sites of {stem}", _SITE_HEAD, _site_rows(saved.sites, match)))
        floats = [(name, why) for name, why in saved.floats.items() if like(name, match)]
        if floats:
            out.print(table("In float", ("value", "reason"), floats))
        return
    from bitwright.export.encodings.versions import read_encodings

    if not path.is_file():
        raise ExportError(str(path), "there is no such file or folder", "check the path")
    file = read_encodings(path)
    records = [(r.name, r.kind, *_cells(r.encoding)) for r in file.records if like(r.name, match)]
    out.print(table(f"{path.name}, version {file.version}", _FILE_HEAD, records))


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


_ENCODING_HEAD = ("format", "granularity", "scale", "zero point", "range")
_SITE_HEAD = ("site", "role", "state", *_ENCODING_HEAD)
_FILE_HEAD = ("name", "kind", *_ENCODING_HEAD)


def _site_rows(sites: Mapping[str, SavedSite], match: str) -> Iterator[tuple[str, ...]]:
    for name, site in sites.items():
        if not like(name, match):
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
        where(encoding.granularity),
        _span(scale.min(), scale.max()),
        _span(zero.min(), zero.max()),
        f"{encoding.min.min():.5g} to {encoding.max.max():.5g}",
    )


def where(granularity: Granularity) -> str:
    """``per channel, axis 0``; no axis while it is open."""
    size, axis = getattr(granularity, "size", None), getattr(granularity, "axis", None)
    kind = {"PerTensor": "per tensor", "PerChannel": "per channel", "PerBlock": f"per block of {size}"}
    return kind[type(granularity).__name__] + ("" if axis is None else f", axis {axis}")


def _span(lowest: Any, highest: Any) -> str:
    return f"{lowest:.5g}" if lowest == highest else f"{lowest:.5g} to {highest:.5g}"
