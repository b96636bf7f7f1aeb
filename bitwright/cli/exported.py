"""Commands about files: verify, certify, evaluate, benchmark, show, inspect, strip, report and diff."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright.cli.app import NO, command, output_option
from bitwright.cli.options import (
    Config,
    Data,
    Export,
    ExportOrModel,
    JsonFile,
    Match,
    Metric,
    OnnxFile,
    Prefix,
    Preset,
    Profile,
    Reading,
    Runtime,
    finish,
    like,
    write_json,
)
from bitwright.errors import ConfigError, ExportError
from bitwright.terminal import answer, details, print_contents, print_report

if TYPE_CHECKING:
    from bitwright.precision.costs import MemoryPlan

Run = Annotated[Path, typer.Argument(help="What sim.export wrote, or a JSON file of an analysis.", show_default=False)]


@command()
def verify(
    folder: Export,
    prefix: Prefix = None,
    runtime: Runtime = "onnxruntime",
    certificate: Annotated[
        bool, typer.Option("--certificate", help="Repeat what the certificate of the export says instead.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Compare an exported model with its simulation, layer by layer, in a runtime.

    Every layer is fed the values that the simulation had at its inputs. What
    comes out is compared with the simulation's, in steps of the grid (LSB):
    once with float kernels, once with the integer kernels of a default
    session. sim.export wrote the samples, so no data is needed.

    With --certificate, files, versions, instruction sets and the answers of
    executors and runtime are compared with those that `bitwright certify` wrote.

    Exit code 1 when a place differs by more than one step, or in more than
    one code of a thousand; or an answer from that of the certificate.

    \b
    Examples:
      bitwright verify exported/
      bitwright verify exported/ --prefix digits --json report.json
      bitwright verify exported/ --runtime openvino
      bitwright verify exported/ --certificate
    """
    if certificate:
        from bitwright.compare.certificate import check_certificate

        finish(check_certificate(folder, prefix), json_file)
        return
    from bitwright.compare.verify import verify_folder

    finish(verify_folder(folder, prefix, runtime=runtime), json_file)


@command()
def certify(
    folder: Export,
    profile: Annotated[
        list[str] | None,
        typer.Option("--as", help="Targets whose executors answer, may be repeated; those of the export by default."),
    ] = None,
    prefix: Prefix = None,
) -> None:
    """Write down what an exported model answers on its stored samples, and all that this depends on.

    The certificate holds the hashes of all files, the versions of the packages,
    seeds and data of the export, the instruction sets of this CPU, and a hash of
    every tensor of codes and of every output, by executors and by the runtime.
    `bitwright verify --certificate` repeats it, here or on another machine, and
    `bitwright diff` compares two.

    \b
    Examples:
      bitwright certify exported/
      bitwright certify exported/ --as ort_x64
    """
    from bitwright.compare.certificate import certify as write

    file, document = write(folder, prefix, profile)
    answers = sum(map(len, document["answers"].values()))
    answer(f"wrote {file}: {answers} answers of {', '.join(document['answers'])}")


@command()
def evaluate(
    folder: Export,
    profile: Profile,
    data: Data,
    reading: Reading,
    judged: Metric,
    prefix: Prefix = None,
    json_file: JsonFile = None,
) -> None:
    """Measure an exported model as a target computes it, which need not be here.

    Every integer operator is computed by executors that follow the arithmetic of
    the target: its requantization, its accumulators, its saturation, its tables.
    Printed are the metric of the float model, of the file, and on the target.

    Without --metric: accuracy with --labels, else agreement with the float model.

    \b
    Examples:
      bitwright evaluate exported/ --as cmsis_nn --data test.npz --labels labels.npy
      bitwright evaluate exported/ --as ort_x64_avx2 --data test.npz --metric agreement
      bitwright evaluate exported/ --as my_target.toml --data test.npz --metric my:metric
    """
    from dataclasses import replace

    from bitwright.compare.sides import open_side
    from bitwright.compare.target import evaluate_target
    from bitwright.executors.profile import find_profile
    from bitwright.export.samples import find_export
    from bitwright.onnx import load_model
    from bitwright.onnx.model.data import input_specs

    find_profile(profile)
    if judged.metric is None:
        judged = replace(judged, metric="agreement" if judged.labels is None else "accuracy")
    side = open_side(folder, prefix)
    batches = list(reading.batches(data, input_specs(side.model)))
    stem = find_export(folder, prefix)
    reference = load_model(folder / f"{stem}_float.onnx").model if judged.named() in ("agreement", "kl") else side.model
    score, _ = judged.of_sessions(reference, lambda: batches)
    report = evaluate_target(folder, profile, score, prefix)
    write_json(json_file, report)
    print_report(report.to_text())


@command()
def benchmark(
    path: ExportOrModel,
    prefix: Prefix = None,
    runtime: Runtime = "onnxruntime",
    threads: Annotated[
        list[int] | None, typer.Option(help="Number of threads, may be repeated; 1 and all by default.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for the rounds of each number of threads.")] = 2.0,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Also try changes of the file, with speed and accuracy of each.")
    ] = False,
    fail_if_slower: Annotated[
        bool, typer.Option("--fail-if-slower", help="Exit code 1 when the quantized file is slower than float.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure a quantized file beside its float model: time, size, memory, and the operators that take the time.

    Both files run in turns, so that what slows the machine slows both; the
    spread over the rounds is in the table, and a note says when it is too wide
    to tell anything. A model without a float file beside it is compared with
    itself without its quantizers.

    Exit code 0 when it was measured; 1 with --fail-if-slower when the quantized
    file is slower than float, beyond the noise of the measurement.

    \b
    Examples:
      bitwright benchmark exported/
      bitwright benchmark exported/ --runtime openvino --threads 1
      bitwright benchmark model_int8.onnx --suggest
      bitwright benchmark exported/ --fail-if-slower
    """
    from bitwright.onnx.benchmark import benchmark_path

    if not path.exists():
        raise ExportError(str(path), "there is no such file or folder", "check the path")
    report = benchmark_path(path, prefix, runtime=runtime, threads=threads, seconds=seconds, suggest=suggest)
    write_json(json_file, report)
    details(report.to_text(), "")
    speeds = [f"{found} with {n} thread{'s' * (n != 1)}" for n, found in report.speed.items()]
    answer(f"speed against float in {report.runtime}: {', '.join(speeds) or 'not measured'}")
    if fail_if_slower and report.slower:
        raise typer.Exit(NO)


@command()
def show(
    path: Annotated[
        Path, typer.Argument(help="A folder that sim.export wrote, a checkpoint, or a file.", show_default=False)
    ],
    prefix: Prefix = None,
    match: Match = "*",
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

    print_contents(contents(path, prefix), lambda name: like(name, match))


def _answer_memory(plan: MemoryPlan, bound: int) -> None:
    unknown = f"note: {len(plan.unknown)} activations have axes of unknown length, which count as 1"
    details(plan.table(), *([unknown] if plan.unknown else []))
    answer(plan.answer(bound))
    if plan.total > bound:
        raise typer.Exit(NO)


@command()
def inspect(
    model: OnnxFile,
    preset: Preset = "w8a8",
    config: Config = None,
    match: Match = "*",
    costs: Annotated[
        bool,
        typer.Option("--costs", help="Print multiplications, bytes, memory and milliseconds of the operators instead."),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Print whether weights and activations fit into so much memory, as 512KiB."),
    ] = None,
) -> None:
    """Print what an ONNX model consists of, and what would be quantized and why not the rest.

    \b
    Examples:
      bitwright inspect model.onnx
      bitwright inspect model.onnx --preset w4a8 --match '*.weight'
      bitwright inspect model.onnx --costs
      bitwright inspect model.onnx --preset w4a8 --memory 512KiB

    With --memory: weights and, operator by operator, the activations that are
    kept while it runs, at the bits of the preset. Exit code 1 when the peak
    does not fit.
    """
    bound = None
    if memory is not None:
        from bitwright.core.graph.cost import parse_bytes
        from bitwright.precision.costs import memory_plan

        bound = parse_bytes(memory, "--memory")
    if costs:
        from bitwright.compression.costs import COSTS, model_costs

        found = model_costs(model, milliseconds=True)
        details(found.table())
        answer(", ".join(f"{value:,.6g} {COSTS[name]}" for name, value in found.totals().items()))
        return
    from collections import Counter

    from bitwright.onnx import QuantizationSimModel
    from bitwright.tables import Table

    sim = QuantizationSimModel(model, preset=preset, config_file=config)
    if bound is not None:
        _answer_memory(memory_plan(sim), bound)
        return
    details(f"inputs: {', '.join(map(str, sim.specs))}", f"outputs: {', '.join(sim.output_names)}")
    kinds = Counter(op.type for op in sim.graph.ops)
    coverage = sim.coverage()
    rows = [
        (r.name, r.op_type, "x".join("?" if n < 0 else str(n) for n in r.shape), r.status, r.how)
        for r in coverage
        if like(r.name, match)
    ]
    details(
        Table(("operator", "count"), [(kind, str(n)) for kind, n in kinds.most_common()], "Operators"),
        Table(("value", "operator", "shape", "status", "how"), rows, "Values"),
        *(f"note: {note}" for note in (*sim.notes, *coverage.notes)),
    )
    answer(", ".join(f"{n} {status}" for status, n in coverage.counts.items()))


@command()
def strip(
    model: OnnxFile,
    out: Annotated[Path, output_option("--out", metavar="FILE", help="The float model.", show_default=False)],
) -> None:
    """Take the quantizers out of an ONNX file: a float file again.

    Weights have the values of their codes, so what rounding lost stays lost;
    activations are float. QDQ files, operators on integers (QLinearConv,
    MatMulInteger, ...) and packed weights (MatMulNBits) are read. A Relu that
    another tool folded into a grid that begins at 0 is restored.

    \b
    Examples:
      bitwright strip quantized.onnx --out float.onnx
    """
    from bitwright.export.files.onnx_file import save_model
    from bitwright.onnx.existing_quantizers import take_quantizers
    from bitwright.onnx.model.load import load_model

    loaded = load_model(model)
    taken = take_quantizers(loaded.model)
    if not taken:
        raise ConfigError(str(model), "it has no quantizers", "nothing is to be done: it is a float model")
    files = save_model(loaded.model, out)
    weights = sum(one.constant for one in taken)
    answer(f"{len(taken)} quantizers taken out, {weights} of constants; wrote {', '.join(map(str, files))}")


@command()
def report(
    path: Run,
    prefix: Prefix = None,
    verify: Annotated[
        bool, typer.Option(help="Also compare the exported model with its simulation, as verify does.")
    ] = False,
    title: Annotated[str, output_option(help="Heading; the model's name by default.")] = "",
    out: Annotated[Path, output_option(metavar="FILE", help="The HTML file.")] = Path("report.html"),
) -> None:
    """Write one HTML file that shows a quantized model; it needs no network.

    It holds the network as a heat map, every layer and quantizer with its grid
    and range, and what stayed in float and why. With the JSON of an analysis, or
    an export that has <prefix>_analysis.json beside it, it also holds the errors
    of every layer, their causes and remedies.

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
    answer(f"wrote {written}: {layers} layers, {sites} sites, {written.stat().st_size / 1e6:.2f} MB")


@command()
def diff(
    first: Run,
    second: Run,
    most: Annotated[int, output_option("--rows", min=1, help="Print at most so many rows per table.")] = 20,
    html: Annotated[Path | None, output_option(metavar="FILE", help="Also write the differences here.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare two runs of a model: encodings, layers, metrics, sizes; or two certificates or manifests.

    Layers are compared where both runs were analysed. Of two certificates, as
    from two machines, the files, versions and instruction sets that differ are
    named, and the first tensor that was answered otherwise. Of two manifests the
    files, settings, data, seeds and versions that differ.

    Exit code 1 when an encoding, an answer of a certificate, or a file differs.

    \b
    Examples:
      bitwright diff exported/ exported-again/
      bitwright diff before.json after.json --html diff.html
      bitwright diff here/net_certificate.json there/net_certificate.json
      bitwright diff here/net_manifest.json there/net_manifest.json
    """
    from bitwright.compare.certificate import compare_certificates, compare_manifests, is_certificate, is_manifest

    if is_certificate(first) or is_certificate(second):
        finish(compare_certificates(first, second), json_file)
        return
    if is_manifest(first) and is_manifest(second):
        finish(compare_manifests(first, second), json_file)
        return
    from bitwright.report import diff_runs, read_run

    found = diff_runs(read_run(first), read_run(second), (str(first), str(second)))
    if html is not None:
        found.report(html)
    write_json(json_file, found)
    details(found.to_text(most), "")
    answer(f"{len(found.sites)} sites differ, {found.same} are equal")
    if not found.equal:
        raise typer.Exit(NO)
