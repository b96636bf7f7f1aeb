"""Commands that create quantized models: ``quantize`` and ``auto``."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from bitwright.cli.app import NO, command, data_option, export_option, methods_option, output_option
from bitwright.cli.options import (
    Config,
    Data,
    JsonFile,
    Metric,
    ModelFile,
    OptionalData,
    Preset,
    Reading,
    Scheme,
    Target,
    named,
    numbers,
    read_model,
    write_json,
)
from bitwright.errors import ConfigError
from bitwright.terminal import answer, details, is_quiet, is_verbose

_MOST_ALIKE = 3  # notes of one text that are printed one by one
_LARGE = 1 << 26  # bytes of the files that are verified without being asked


def _steps_and(incomplete: str) -> list[str]:
    """Shell completion of the last step of ``fold,equalize,...``."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in named("steps")(last)]


@command("quantize")
def quantize_model(
    model: ModelFile,
    out: Annotated[Path, output_option(help="Folder for the files; created if missing.")],
    reading: Reading,
    judged: Metric,
    data: OptionalData = None,
    held_out: Annotated[
        str | None,
        data_option(
            help="Data to score the result with, in the forms of --data; nothing is fitted to them. Take other "
            "recordings, other days. Without it, the last fifth of --data where no recipe is given."
        ),
    ] = None,
    non_finite: Annotated[
        str, data_option(help="A batch that gives NaN or Inf: error, skip it, or clamp to what is finite.")
    ] = "error",
    allow_unreached: Annotated[
        bool, data_option(help="Leave what no batch reached in float, instead of refusing it.")
    ] = True,
    preset: Preset = "w8a8",
    config: Config = None,
    scheme: Scheme = None,
    recipe: Annotated[
        str | None,
        methods_option(
            help="Methods in their order, as in fold,equalize,adaround, or a YAML file: see `bitwright list methods`. "
            "Without it, what suits the preset; `fold` alone is the fastest.",
            autocompletion=_steps_and,
        ),
    ] = None,
    effort: Annotated[
        str, methods_option(help="Without a recipe: quick, default or thorough.", autocompletion=named("efforts"))
    ] = "default",
    undo_harm: Annotated[bool, methods_option("--undo-harm", help="Undo steps that make the metric worse.")] = False,
    repair: Annotated[
        str | None, methods_option(help="saturation: 7-bit weights for the layers that saturate on CPUs without VNNI.")
    ] = None,
    fallback: Annotated[
        bool, methods_option(help="Take 16-bit activations where 8 bits are poor and 16 are not, and say so.")
    ] = True,
    allow_float: Annotated[
        bool, methods_option("--allow-float", help="Accept a model of which no layer is quantized.")
    ] = False,
    memory_budget: Annotated[
        int | None,
        methods_option(
            min=1,
            metavar="MIB",
            help="Memory for activations while calibrating; a quarter of the free memory by default.",
        ),
    ] = None,
    work_dir: Annotated[
        Path | None,
        output_option(help="Folder of the layers that methods have finished; a later call goes on from there."),
    ] = None,
    target: Target = "ort_cpu",
    file_format: Annotated[
        str | None, export_option("--format", help="onnx or tflite; tflite is short for --target litert.")
    ] = None,
    opset: Annotated[
        int | None, export_option(help="Of the written files, for compilers that read older ones; 21 by default.")
    ] = None,
    ir_version: Annotated[int | None, export_option(help="Of the written files; that of the opset by default.")] = None,
    weight_only: Annotated[
        str,
        export_option(
            help="Products of float activations with quantized weights: exact, or fused by ONNX Runtime, which is "
            "faster and quantizes the activations by itself."
        ),
    ] = "exact",
    rest: Annotated[
        str | None,
        export_option(
            help="Type of what is not quantized: float32, float16 or bfloat16; presets fp16 and bf16 have theirs."
        ),
    ] = None,
    io: Annotated[
        str | None,
        export_option(
            help="Type of inputs and outputs: float16, uint8, ..., or as in inputs=uint8,outputs=float32 or in names of them."
        ),
    ] = None,
    bytes_in: Annotated[
        str | None,
        export_option(
            "--bytes-in",
            metavar="LAYOUT",
            help="NCHW or NHWC: the file takes pixels of uint8 and normalises them itself, by --mean and --std.",
        ),
    ] = None,
    samples: Annotated[
        bool,
        export_option(
            help="Write <prefix>_samples.npz, which `verify`, `drift` and `benchmark` read; it holds a batch of data."
        ),
    ] = True,
    verify: Annotated[
        bool, export_option(help="Compare the written file with the simulation, where the files have 64 MiB at most.")
    ] = True,
    prefix: Annotated[
        str | None, output_option(help="Common start of the file names; the model's name by default.")
    ] = None,
    fail_below: Annotated[
        float,
        output_option(
            metavar="DB",
            help="Exit code 1 where the worst output is below so many dB of float; the files are written all the same. "
            "-inf for never.",
        ),
    ] = 20.0,
) -> None:
    """Quantize a model: fold batch norms, calibrate, apply methods, export.

    Data may be a .npz file (arrays named after the inputs, samples along the
    first axis), a .npy file, a folder of them, a folder per input, a folder of .npz
    files, a folder of pictures, or module:function that yields inputs. With
    --data generate the model makes them itself: pictures from the statistics of
    its batch norms, or text. Without --data, ranges come from random values,
    which shows the graph and no more.

    \b
    Examples:
      bitwright quantize model.onnx --data samples.npz --out exported/
      bitwright quantize program.pt2 --data samples.npz --out exported/
      bitwright quantize model.onnx --data generate --out exported/
      bitwright quantize model.onnx --data photos/ --mean 0.485,0.456,0.406 \\
          --std 0.229,0.224,0.225 --preset w8a16 --out exported/
      bitwright quantize model.onnx --data samples.npz --out exported/ \\
          --metric accuracy --labels labels.npy
      bitwright quantize model.onnx --data mypackage.data:feeds --preset w4a8 \\
          --recipe fold,equalize,adaround --metric mypackage.test:accuracy --out exported/

    The first line is the result: how near the worst output comes to the float
    model, on data that nothing was fitted to. With -v, the log of every step, the
    whole table of the recipe and all notes come before it.

    Exit code 0 when the files are written; 1 when they are written and poor: the
    worst output is below --fail-below, which needs --data. A target that refuses
    the files, or runs them slower than float on this machine, is a warning.
    """
    from bitwright.core.numerics.spec import check_policy
    from bitwright.export.files.atomic import check_stem
    from bitwright.export.targets import target_for
    from bitwright.methods.data_free import GENERATE, SAMPLES, generate_data
    from bitwright.onnx.model.data import example_feeds, random_feeds
    from bitwright.recipes.quantize import quantize

    policy = check_policy(non_finite, "--non-finite")
    target = target_for(target, file_format).name  # type: ignore[arg-type]
    given = read_model(model)
    if data is None:
        _warn_of_random_data(held_out, effort)
        feeds: Iterable[Any] = map(given.batch, islice(random_feeds(given.specs, 4), reading.limit))
        recipe = recipe or "fold"  # rounding for random inputs would be rounding for nothing
    elif data == GENERATE:
        example = given.batch(example_feeds(given.specs))
        feeds = generate_data(given.model, example, samples=min(reading.limit, SAMPLES), progress=not is_quiet())
    else:
        feeds = map(given.batch, reading.batches(data, given.specs))
    rating = None if held_out is None else list(map(given.batch, reading.batches(held_out, given.specs)))
    scored = held_out or (None if data == GENERATE else data)

    def to_score() -> list[Any]:
        if scored is None:
            raise ConfigError("--metric", f"there are no data to measure {judged.metric} on", "give --data as well")
        return list(map(given.batch, reading.batches(scored, given.specs)))

    labels = judged.labels_of(to_score)
    stem = check_stem(model.stem if prefix is None else prefix, "--prefix")
    with _tells_what_is_kept(out, out / f"{stem}_manifest.json"):
        result = quantize(
            given.model,
            feeds,
            preset,
            recipe=recipe if recipe is None or Path(recipe).suffix else recipe.split(","),
            effort=effort,
            config_file=config,
            quant_scheme=scheme,
            metric=judged.named(),
            labels=labels,
            lower_is_better=judged.lower_is_better,
            on_harm="undo" if undo_harm else "report",
            path=out,
            work_dir=work_dir,
            filename_prefix=stem,
            weight_only=weight_only,  # type: ignore[arg-type]
            target=target,
            rest=rest,
            io=_types(io),
            normalize=None if bytes_in is None else reading.normalization(bytes_in),
            opset=opset,
            ir_version=ir_version,
            samples=samples,
            non_finite=policy,
            allow_unreached=allow_unreached,
            allow_float=allow_float,
            memory_budget=None if memory_budget is None else memory_budget << 20,
            repair=repair,
            held_out=rating,
            poor_below=fail_below if data is not None else -math.inf,
            fallback=fallback,
            progress=not is_quiet(),
        )
    verified = _verified(result.exported, target) if verify and samples and not is_quiet() else None
    if is_verbose():
        details(*_done(result, given.notes))
    answer(result.headline)
    details(*result.summary(verified))
    if result.poor:
        raise typer.Exit(NO)


def _types(io: str | None) -> str | dict[str, str] | None:
    """Parse --io: one type, or types by input name.

    Raises:
        ConfigError: a name has no type.
    """
    if io is None or "=" not in io:
        return io
    pairs = [part.partition("=") for part in io.split(",")]
    wrong = next((f"{name}{sign}{kind}" for name, sign, kind in pairs if not name or not kind), None)
    if wrong is not None:
        raise ConfigError(
            "--io", f"{wrong!r} is not a name and a type", "write it as in --io inputs=uint8,outputs=float32"
        )
    return {name: kind for name, _, kind in pairs}


def _warn_of_random_data(held_out: str | None, effort: str) -> None:
    """Warn that nothing is calibrated on real data.

    Raises:
        ConfigError: an option that needs data is given.
    """
    if held_out is not None:
        raise ConfigError("--held-out", "there are no data to calibrate on", "give --data as well")
    if effort != "default":
        raise ConfigError("--effort", "there are no data to choose by", "give --data, or leave --effort out")
    logging.getLogger("bitwright").warning(
        "calibrating on random data: ranges of activations will be wrong, and accuracy with them; "
        "give --data (a hundred samples are enough)"
    )


@contextmanager
def _tells_what_is_kept(folder: Path, manifest: Path) -> Iterator[None]:
    """Add a note to exceptions that says which export is in ``folder``: the manifest is the last file that is replaced."""

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


def _verified(exported: Any, target: str) -> str:
    """Verify files of at most 64 MiB and give the result in one line; errors are part of it, as the files are complete."""
    from bitwright.compare.verify import verify_folder
    from bitwright.errors import BitwrightError
    from bitwright.export.targets import find_target

    folder, size = exported.qdq.parent, sum(path.stat().st_size for path in exported.files)
    if size > _LARGE:
        return f"not run, as the files have {size / 2**20:.0f} MiB; `bitwright verify {folder}` does it"
    try:
        prefix = exported.manifest.name.removesuffix("_manifest.json")
        report = verify_folder(folder, prefix, runtime=find_target(target).runtime)
    except BitwrightError as reason:
        return f"not possible: {reason}"
    more = "" if report.ok else f"; `bitwright verify {folder}` shows where"
    return f"{report.answer}{more}"


def _gathered(notes: Iterable[str]) -> Iterator[str]:
    """Group notes with the same text; the manifest lists each of them."""
    places: dict[str, list[str]] = {}
    for note in notes:
        place, _, text = note.partition(": ")
        places.setdefault(text, []).append(place)
    for text, several in places.items():
        if text and len(several) > _MOST_ALIKE:
            yield f"{', '.join(several[:_MOST_ALIKE])} and {len(several) - _MOST_ALIKE} more: {text}"
        else:
            yield from (f"{place}: {text}" if text else place for place in several)


def _done(result: Any, notes: Iterable[str]) -> Iterator[str]:
    """The details of a conversion, for -v."""
    counts = ", ".join(f"{n} {status}" for status, n in result.sim.coverage().counts.items())
    yield from (f"note: {note}" for note in _gathered((*notes, *result.exported.notes)))
    yield f"{len(list(result.folds))} batch norms folded; values: {counts}"
    yield from result.sim.calibration_log.lines()
    yield str(result.report)
    yield ""


@command("auto")
def auto_command(
    model: ModelFile,
    data: Data,
    out: Annotated[Path, output_option(help="Folder of the trials; a search that is there is resumed.")],
    reading: Reading,
    judged: Metric,
    allowed_drop: Annotated[
        str | None, methods_option(help="Of the metric: 0.01 in its units, or 1% of its float value (the default).")
    ] = None,
    min_sqnr: Annotated[
        float | None, methods_option(metavar="DB", help="Least SQNR of the outputs; without a metric 20 by default.")
    ] = None,
    deadline: Annotated[float | None, methods_option(metavar="SECONDS", help="No trial begins after so long.")] = None,
    cost: Annotated[
        str,
        methods_option(help="What to minimise: bit_ops, weight_bytes, activation_bytes, memory, or ms (with --times)."),
    ] = "bit_ops",
    times: Annotated[
        Path | None, methods_option(metavar="JSON", help="Milliseconds per layer or operator type and preset.")
    ] = None,
    config: Config = None,
    workers: Annotated[int, methods_option(min=1, help="Trials at a time, each in a process.")] = 1,
    executor: Annotated[str, methods_option(help="local or ray.")] = "local",
    target: Target = "ort_cpu",
    json_file: JsonFile = None,
) -> None:
    """Search for the cheapest quantized model that is good enough.

    Trials go from cheap to dear: presets, range methods, recipes, mixed
    precision. Each finished one is a folder in OUT/trials with the model,
    its encodings and a report; OUT/best.json names the best one, and
    OUT/report.html shows all. An interrupted search resumes with the same
    command.

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
    from bitwright.precision.auto import auto_quantize

    given = read_model(model)
    feeds = list(map(given.batch, reading.batches(data, given.specs)))
    drop = allowed_drop if allowed_drop is None or "%" in allowed_drop else numbers("--allowed-drop", allowed_drop)[0]
    with _logged_trials():
        result = auto_quantize(
            model,
            feeds,
            judged.named(),
            allowed_drop=drop,
            lower_is_better=judged.lower_is_better,
            min_sqnr=min_sqnr,
            deadline=deadline,
            folder=out,
            cost=cost,
            times=times,
            labels=judged.answers(feeds),
            config_file=config,
            target=target,
            workers=workers,
            executor=executor,
            filename_prefix="model",
        )
    write_json(json_file, result)
    details(str(result))
    answer("no trial is good enough" if result.best is None else f"the best one: {result.folder}")
    if result.best is None:
        raise typer.Exit(NO)


@contextmanager
def _logged_trials() -> Iterator[None]:
    """Write a line to stderr for each finished trial where no table can grow, as in the file of a nightly job."""
    if sys.stderr.isatty() or is_quiet() or is_verbose():
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
