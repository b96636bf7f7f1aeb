"""``bitwright quantize``."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from bitwright.cli.app import NO, app, console
from bitwright.cli.options import (
    BatchSize,
    Colours,
    Layout,
    Limit,
    Mean,
    OnnxFile,
    Scale,
    Std,
    read_batches,
    read_pictures,
)

_MOST_ALIKE = 3  # notes of one text that are told one by one


@app.command("quantize")
def quantize_model(
    model: OnnxFile,
    out: Annotated[Path, typer.Option(help="Folder for the files; made if need be.", show_default=False)],
    data: Annotated[
        str | None, typer.Option(help="Calibration data: see below. Without it, random values.", show_default=False)
    ] = None,
    preset: Annotated[str, typer.Option(help="See `bitwright presets`.")] = "w8a8",
    config: Annotated[str | None, typer.Option(help="Rules: a file, or the name of a target.")] = None,
    scheme: Annotated[str | None, typer.Option(help="Range method: see `bitwright presets`.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Stem of the files; the model's by default.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Methods in their order, fold,equalize,adaround, or a YAML file (see `bitwright presets`). "
            "Without it, what suits the preset; `fold` alone is the fastest."
        ),
    ] = None,
    effort: Annotated[
        str, typer.Option(help="Without a recipe: quick, default or thorough; see `bitwright presets`.")
    ] = "default",
    metric: Annotated[
        str | None, typer.Option(help="module:function that rates an InferenceSession, after each step of the recipe.")
    ] = None,
    lower_is_better: Annotated[bool, typer.Option(help="For metrics such as a perplexity.")] = False,
    undo_harm: Annotated[bool, typer.Option(help="Undo steps that make the metric worse.")] = False,
    non_finite: Annotated[
        str, typer.Option(help="A batch that gives NaN or Inf: error, skip it, or clamp to what is finite.")
    ] = "error",
    allow_unreached: Annotated[
        bool, typer.Option(help="Leave what no batch reached in float, instead of refusing it.")
    ] = True,
    allow_float: Annotated[bool, typer.Option(help="Go on with a model of which no layer is quantized.")] = False,
    weight_only: Annotated[
        str,
        typer.Option(
            help="Products of float activations with quantized weights: exact, or fused by ONNX Runtime, which is "
            "faster and quantizes the activations by itself."
        ),
    ] = "exact",
    target: Annotated[str, typer.Option(help="Runtime that the files are for: see `bitwright presets`.")] = "ort_cpu",
    opset: Annotated[
        int | None, typer.Option(help="Of the written files, for compilers that read older ones; 21 by default.")
    ] = None,
    ir_version: Annotated[
        int | None, typer.Option(help="Of the written files; that of the opset by default.", show_default=False)
    ] = None,
    file_format: Annotated[
        str | None,
        typer.Option("--format", help="onnx or tflite; tflite is short for --target litert.", show_default=False),
    ] = None,
    repair: Annotated[
        str | None,
        typer.Option(
            help="saturation: 7-bit weights for the layers that saturate on CPUs without VNNI.", show_default=False
        ),
    ] = None,
    memory_budget: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="MIB", help="Activations held while calibrating; a quarter of the free memory by default."
        ),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            help="Data that rate the result and that nothing is fitted to, as --data: other recordings, other days. "
            "Without it, the last fifth of --data where no recipe is given.",
            show_default=False,
        ),
    ] = None,
    fail_below: Annotated[
        float,
        typer.Option(
            metavar="DB",
            help="Exit code 1 where the worst output is below so many dB of float; the files are written all the same. "
            "-inf for never.",
        ),
    ] = 20.0,
    fallback: Annotated[
        bool, typer.Option(help="Take 16-bit activations where 8 bits are poor and 16 are not, and say so.")
    ] = True,
    batch_size: BatchSize = 1,
    limit: Limit = 256,
    layout: Layout = "NCHW",
    colours: Colours = "RGB",
    scale: Scale = 1 / 255,
    mean: Mean = "0",
    std: Std = "1",
) -> None:
    """Fold, calibrate and export an ONNX model.

    Data may be a .npz file (arrays named after the inputs, samples along the
    first axis), a .npy file, a folder of them, a folder per input, a folder of .npz
    files, a folder of pictures, or module:function that yields inputs.

    \b
    Examples:
      bitwright quantize model.onnx --data samples.npz --out exported/
      bitwright quantize model.onnx --data photos/ --mean 0.485,0.456,0.406 \\
          --std 0.229,0.224,0.225 --preset w8a16 --out exported/
      bitwright quantize model.onnx --data mypackage.data:feeds --out exported/
      bitwright quantize model.onnx --data samples.npz --preset w4a8 \\
          --recipe fold,equalize,adaround --metric mypackage.test:accuracy --out exported/

    The first line says how near the worst output comes to the float model, on
    data that nothing was fitted to.

    Exit code 0 when the files are written; 1 when they are written and poor: the
    worst output is below --fail-below, which needs --data. A target that refuses
    the files, or runs them slower than float on this machine, is a warning.
    """
    from itertools import islice

    from bitwright.core.files.entry_points import load_entry_point
    from bitwright.core.numerics.spec import check_policy
    from bitwright.errors import ConfigError
    from bitwright.export.files.atomic import check_stem
    from bitwright.export.targets import target_for
    from bitwright.onnx import load_model, quantize
    from bitwright.onnx.model.data import input_specs, random_feeds

    policy = check_policy(non_finite, "--non-finite")
    target = target_for(target, file_format).name  # type: ignore[arg-type]
    loaded = load_model(model)
    specs = input_specs(loaded.model)
    if data is None:
        feeds: Iterator[Any] = islice(random_feeds(specs, 4), limit)
        if held_out is not None:
            raise ConfigError("--held-out", "there are no data to calibrate on", "give --data as well")
        if effort != "default":
            raise ConfigError("--effort", "there are no data to choose by", "give --data, or leave --effort out")
        logging.getLogger("bitwright").warning(
            "calibrating on random data: ranges of activations will be wrong, and accuracy with them; "
            "give --data (a hundred samples are enough)"
        )
        recipe = recipe or "fold"  # rounding for random inputs would be rounding for nothing
    else:
        pictures = read_pictures(layout, colours, scale, mean, std)
        feeds = read_batches(data, specs, batch_size, limit, pictures)
    rating = None if held_out is None else list(read_batches(held_out, specs, batch_size, limit, pictures))
    stem = check_stem(model.stem if prefix is None else prefix, "--prefix")
    with _tells_what_is_kept(out, out / f"{stem}_manifest.json"):
        result = quantize(
            loaded.model,
            feeds,
            preset,
            recipe=recipe if recipe is None or Path(recipe).suffix else recipe.split(","),
            effort=effort,
            config_file=config,
            quant_scheme=scheme,
            metric=None if metric is None else load_entry_point(metric, "rates a session"),
            lower_is_better=lower_is_better,
            on_harm="undo" if undo_harm else "report",
            path=out,
            filename_prefix=stem,
            weight_only=weight_only,  # type: ignore[arg-type]
            target=target,
            opset=opset,
            ir_version=ir_version,
            non_finite=policy,
            allow_unreached=allow_unreached,
            allow_float=allow_float,
            memory_budget=None if memory_budget is None else memory_budget << 20,
            repair=repair,
            held_out=rating,
            poor_below=fail_below if data is not None else -math.inf,
            fallback=fallback,
        )
    _print_result(result, loaded.notes)
    assert result.exported is not None
    _print_speed(result.exported.speed, target)
    if result.poor:
        raise typer.Exit(NO)


@contextmanager
def _tells_what_is_kept(folder: Path, manifest: Path) -> Iterator[None]:
    """Note on an exception what lies in ``folder`` now: an export appears whole, and its manifest last."""

    def content() -> bytes | None:
        return manifest.read_bytes() if manifest.is_file() else None

    before = content()
    try:
        yield
    except BaseException as error:
        if content() != before:
            error.add_note(f"{folder}: the new export is complete")
        elif before is None:
            error.add_note(f"{folder}: nothing was written")
        else:
            error.add_note(f"{folder}: the earlier export is as it was")
        raise


def _print_speed(speed: Any, target: str) -> None:
    """How fast the files are beside the float model, where that was measured; what is wrong with it is in the log."""
    from bitwright.export.targets import find_target

    if speed is not None:
        runtime = find_target(target).runtime
        busy = (
            ""
            if speed.steady
            else ", which tells little: the machine is busy; run `bitwright benchmark` when it is not"
        )
        console().print(Text(f"speed against float in {runtime}, 1 thread: {speed}{busy}"), soft_wrap=True)


def _gathered(notes: Iterable[str]) -> Iterator[str]:
    """The notes, each text once where many places have it; the manifest has all of them."""
    places: dict[str, list[str]] = {}
    for note in notes:
        place, _, text = note.partition(": ")
        places.setdefault(text, []).append(place)
    for text, several in places.items():
        if text and len(several) > _MOST_ALIKE:
            yield f"{', '.join(several[:_MOST_ALIKE])} and {len(several) - _MOST_ALIKE} more: {text}"
        else:
            yield from (f"{place}: {text}" if text else place for place in several)


def _print_result(result: Any, notes: Iterable[str]) -> None:
    """What a conversion did, and the files that it wrote."""
    assert result.exported is not None and result.sim.calibration_log is not None
    counts = ", ".join(f"{n} {status}" for status, n in result.sim.coverage().counts.items())
    shown = console()
    for line in filter(None, (result.headline, result.advice, result.quantized)):
        shown.print(Text(line), soft_wrap=True)  # whole lines, for scripts that read the first
    lines = [f"note: {note}" for note in _gathered((*notes, *result.exported.notes))]
    lines += [f"{len(list(result.folds))} batch norms folded; values: {counts}"]
    lines += [*result.sim.calibration_log.lines(), str(result.report)]
    lines += [] if result.repair is None else [str(result.repair)]
    lines += [str(result.stem)] if result.stem.layers else []
    if result.metrics:
        lines.append(", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items()))
    lines += [f"wrote {path}" for path in result.exported.files]
    for line in lines:
        shown.print(Text(line))
