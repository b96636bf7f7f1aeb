"""Options that several commands share, each declared once, the names that they take, and their parsing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitwright.cli.app import NO, data_option, export_option, methods_option, output_option
from bitwright.errors import ConfigError
from bitwright.terminal import print_report

if TYPE_CHECKING:
    from bitwright.core.numerics.spec import QuantSpec
    from bitwright.onnx.model.data import InputSpec

logger = logging.getLogger("bitwright")


# ---- names that options take

Rows = list[tuple[str, ...]]


def _presets() -> Rows:
    from bitwright.core.numerics.spec import PRESETS

    return [(name, spec_text(p.weight), spec_text(p.activation)) for name, p in PRESETS.items()]


def _ranges() -> Rows:
    from bitwright.core.numerics.ranges import RANGE_METHODS, method_aliases
    from bitwright.core.registry import rows_of

    def options(row: Any) -> str:
        return ", ".join(f"{name}={d:g} ({lo:g} to {hi:g})" for name, (d, lo, hi) in row.options.items())

    return [(name, row.needs, options(row), ", ".join(method_aliases(name))) for name, row in rows_of(RANGE_METHODS)]


def _steps() -> Rows:
    from bitwright.core.registry import rows_of
    from bitwright.recipes.recipe import KINDS

    return [(name, kind.phase, kind.does) for name, kind in rows_of(KINDS)]


def _efforts() -> Rows:
    from bitwright.recipes.default_recipe import EFFORTS

    return [(name, row.does) for name, row in EFFORTS.items()]


def _configs() -> Rows:
    from bitwright.core.placement.aimet_config import ALIASES, SHIPPED

    return [(name, ", ".join(a for a, to in ALIASES.items() if to == name)) for name in SHIPPED]


def _targets() -> Rows:
    from bitwright.core.registry import rows_of
    from bitwright.export.targets import TARGETS

    return [(row.name, row.runtime, row.about) for _, row in rows_of(TARGETS)]


def _runtimes() -> Rows:
    from importlib.util import find_spec

    from bitwright.core.registry import rows_of
    from bitwright.runtimes.adapters import RUNTIMES

    def state(row: Any) -> str:
        return "yes" if find_spec(row.module.partition(".")[0]) else f"pip install 'bitwright[{row.extra}]'"

    return [(name, row.suffix, state(row)) for name, row in rows_of(RUNTIMES)]


def _metrics() -> Rows:
    from bitwright.core.registry import rows_of
    from bitwright.metrics.metric import NAMED

    rows = [(name, (make.__doc__ or "").partition("\n")[0].partition(";")[0]) for name, make in rows_of(NAMED)]
    return [*rows, ("top5", "Share of samples whose label is among the five highest scores; top1, top3 and so on too.")]


def _profiles() -> Rows:
    from bitwright.executors.profile import find_profile, profile_names

    return [(name, find_profile(name).target, find_profile(name).about) for name in profile_names()]


#: kind of names -> title, head and rows of its table
NAMES: dict[str, tuple[str, tuple[str, ...], Callable[[], Rows]]] = {
    "presets": ("Presets (--preset, preset=)", ("preset", "weights", "activations"), _presets),
    "steps": ("Steps of recipes (--recipe, recipe=)", ("step", "works on", "does"), _steps),
    "ranges": ("Range methods (--scheme, quant_scheme=)", ("method", "reads", "options", "also called"), _ranges),
    "efforts": ("Efforts, where no recipe is given (--effort, effort=)", ("effort", "does"), _efforts),
    "targets": ("Targets of export (--target, target=)", ("target", "runtime", "for"), _targets),
    "runtimes": ("Runtimes (--runtime, runtime=)", ("runtime", "reads", "installed"), _runtimes),
    "profiles": ("Profiles of targets (--as, runs_as)", ("profile", "target", "computes as"), _profiles),
    "metrics": ("Metrics (--metric, metric=)", ("metric", "is"), _metrics),
    "configs": ("Configurations (--config, config_file=)", ("configuration", "also called"), _configs),
}


def spec_text(spec: QuantSpec | None) -> str:
    """The spec of a preset for weights or activations, in words."""
    return "float" if spec is None else spec.describe()


def names_of(kind: str) -> list[str]:
    """The names in a table: a key of :data:`NAMES`."""
    return [row[0] for row in NAMES[kind][2]()]


def named(kind: str) -> Callable[[str], list[str]]:
    """Shell completion for the names of one kind."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names_of(kind) if name.startswith(incomplete)]

    return complete


# ---- options

OnnxFile = Annotated[Path, typer.Argument(help="An .onnx file.", show_default=False)]
ModelFile = Annotated[
    Path, typer.Argument(help="An .onnx file, or a .pt2 file of torch.export.save.", show_default=False)
]
Export = Annotated[Path, typer.Argument(help="A folder that sim.export wrote.", show_default=False)]
ExportOrModel = Annotated[
    Path, typer.Argument(help="A folder that sim.export wrote, or a quantized model.", show_default=False)
]
Prefix = Annotated[
    str | None, typer.Option(help="Common start of the file names; needed when the folder holds several exports.")
]
Match = Annotated[str, typer.Option(metavar="GLOB", help="Only names like this; * and ? are wildcards.")]
JsonFile = Annotated[Path | None, output_option("--json", metavar="FILE", help="Also write the report here, as JSON.")]
Preset = Annotated[str, methods_option(help="See `bitwright list presets`.", autocompletion=named("presets"))]
Config = Annotated[
    str | None,
    methods_option(help="Rules: a file, or a name of `bitwright list configs`.", autocompletion=named("configs")),
]
Scheme = Annotated[
    str | None, methods_option(help="Range method: see `bitwright list methods`.", autocompletion=named("ranges"))
]
Target = Annotated[
    str,
    export_option(
        help="Runtime that the files are for: see `bitwright list targets`.", autocompletion=named("targets")
    ),
]
Runtime = Annotated[str, typer.Option(help="onnxruntime, openvino or litert.", autocompletion=named("runtimes"))]
Profile = Annotated[
    str,
    typer.Option(
        "--as", help="Target: see `bitwright list profiles`, or a .toml file.", autocompletion=named("profiles")
    ),
]
Data = Annotated[
    str,
    data_option(
        help="A .npz or .npy file, a folder of files or pictures, or module:function; see `bitwright quantize --help`."
    ),
]
OptionalData = Annotated[
    str | None,
    data_option(
        help="A .npz or .npy file, a folder of files or pictures, or module:function; see `bitwright quantize --help`."
    ),
]


@dataclass(frozen=True)
class Reading:
    """Options for reading ``--data``; every command reads the same samples."""

    batch_size: Annotated[int, data_option(min=1, help="Samples per run, where the model leaves it open.")] = 1
    limit: Annotated[int, data_option(min=1, help="Read so many samples at most.")] = 256
    layout: Annotated[str, data_option(help="Axes of pictures: NCHW or NHWC.")] = "NCHW"
    colours: Annotated[str, data_option(help="Colours of pictures: RGB, BGR or L (grey).")] = "RGB"
    scale: Annotated[float, data_option(help="Factor of pixels, which are 0 to 255; applied first.")] = 1 / 255
    mean: Annotated[str, data_option(help="Subtracted from pixels next: one number, or one per colour.")] = "0"
    std: Annotated[str, data_option(help="Divides pixels last: one number, or one per colour.")] = "1"

    def normalization(self, layout: str) -> dict[str, Any]:
        """The normalisation of pictures, to be folded into a file that takes pixels in ``layout``."""
        mean, std = list(numbers("--mean", self.mean)), list(numbers("--std", self.std))
        return {"mean": mean, "std": std, "scale": self.scale, "layout": layout}

    def batches(self, data: str, specs: Sequence[InputSpec]) -> Iterator[Any]:
        """The first ``limit`` samples of ``data``, as feeds for ``specs``.

        A batch that the model's fixed batch size does not let divide is read whole.
        """
        from bitwright.core.simulation.calibration import samples_in
        from bitwright.onnx import load_data
        from bitwright.onnx.model.data import Pictures

        mean, std = numbers("--mean", self.mean), numbers("--std", self.std)
        pictures = Pictures(self.layout, self.colours, self.scale, mean, std)
        is_open = all(spec.shape is None or spec.shape[:1] == (None,) for spec in specs)
        used = 0
        for feeds in load_data(data, specs, batch_size=self.batch_size, pictures=pictures):
            rows = samples_in(feeds)
            kept = min(rows, self.limit - used) if is_open else rows
            if used >= self.limit or kept < rows:
                logger.info("%s: it holds more than the first %d samples; --limit reads more", data, self.limit)
            if used >= self.limit:
                return
            used += kept
            yield {name: array[:kept] if array.ndim and len(array) == rows else array for name, array in feeds.items()}


@dataclass(frozen=True)
class Given:
    """The model of a command.

    Attributes:
        model: as ``quantize`` takes it.
        specs: its inputs.
        batch: a feed by names of inputs -> a batch of the model.
        notes: what was normalised while it was read.
    """

    model: Any
    specs: Sequence[InputSpec]
    batch: Callable[[dict[str, Any]], Any] = lambda feeds: feeds
    notes: Sequence[str] = ()


def read_model(path: Path) -> Given:
    """Read an ONNX file, or a program of ``torch.export``.

    Raises:
        ModelError: it cannot be read.
    """
    from bitwright.onnx.model.data import InputSpec, input_specs

    if path.suffix == ".pt2":
        from functools import partial

        from bitwright.torch.captured import as_inputs, input_shapes, read_program

        program = read_program(path)
        specs = [InputSpec(*found) for found in input_shapes(program)]
        return Given(program, specs, partial(as_inputs, program))
    from bitwright.onnx import load_model

    loaded = load_model(path)
    return Given(loaded.model, input_specs(loaded.model), notes=loaded.notes)


@dataclass(frozen=True)
class Metric:
    """The metric of a command, beside the error of the outputs."""

    metric: Annotated[
        str | None,
        data_option(
            help="With --labels: accuracy, top5, f1, miou, psnr, ssim, perplexity, wer, map, map50; options as "
            "f1,average=micro. Without: agreement, kl, or module:function that scores an InferenceSession.",
            autocompletion=lambda incomplete: [n for n in names_of("metrics") if n.startswith(incomplete)],
        ),
    ] = None
    labels: Annotated[
        Path | None,
        data_option(
            help="Right answers, one per sample: .npy, .csv (last column), .txt (lines), .json (a list, or COCO boxes)."
        ),
    ] = None
    lower_is_better: Annotated[bool, data_option("--lower-is-better", help="For metrics such as a perplexity.")] = False

    def named(self) -> Any:
        """``None``, a name, or the function that ``module:function`` names."""
        if self.metric is None or ":" not in self.metric:
            return self.metric
        from bitwright.core.files import load_entry_point

        return load_entry_point(self.metric, "scores a session")

    def answers(self, batches: Sequence[Any]) -> Any:
        """Read the labels of the samples in ``batches``, which ``--limit`` may shorten; ``None`` without labels."""
        if self.labels is None:
            return None
        from bitwright.core.simulation.calibration import samples_in
        from bitwright.metrics.labels import read_labels

        return read_labels(self.labels)[: sum(map(samples_in, batches))]

    def labels_of(self, batches: Callable[[], Sequence[Any]]) -> Any:
        """Labels for a metric by name; ``batches`` gives the samples, and refuses where there are none."""
        metric = self.named()
        return None if metric is None or callable(metric) else self.answers(batches())

    def of_sessions(self, model: Any, batches: Callable[[], Sequence[Any]]) -> tuple[Any, bool]:
        """A function from a session to a number, and whether lower is better; ``(None, False)`` without a metric.

        Args:
            model: the float model, whose answers ``agreement`` and ``kl`` compare with.
            batches: gives the samples that a named metric is measured on.
        """
        metric = self.named()
        if metric is None or callable(metric):
            return metric, self.lower_is_better
        from bitwright.methods.front_end import front_end_of
        from bitwright.metrics.metric import scorer

        samples = batches()
        given = front_end_of(model).given(model, None, None)
        return scorer(metric, self.lower_is_better, given, samples, self.answers(samples))


def numbers(option: str, text: str) -> tuple[float, ...]:
    """``0.485,0.456,0.406`` of ``option`` as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(option, f"{text!r} is not a list of numbers", "write 0.485,0.456,0.406") from error


def like(name: str, glob: str) -> bool:
    """True where ``name`` matches; brackets are literal, as they are part of site names."""
    import fnmatch

    return fnmatch.fnmatchcase(name, glob.replace("[", "[[]"))


def finish(report: Any, json_file: Path | None) -> None:
    """Write and print a report that is ok or not, and end with exit code 1 where it is not."""
    write_json(json_file, report)
    print_report(report.to_text(), "bold green" if report.ok else "bold red")
    if not report.ok:
        raise typer.Exit(NO)


def write_json(path: Path | None, report: Any) -> None:
    """Write ``report.to_json()`` where ``--json FILE`` asks for it, whole or not at all."""
    if path is None:
        return
    from bitwright.export.files.atomic import atomic_write

    with atomic_write(path) as temporary:
        temporary.write_text(report.to_json(), encoding="utf-8")
