"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitwright.errors import ConfigError

if TYPE_CHECKING:
    from bitwright.onnx.model.data import InputSpec, Pictures

Prefix = Annotated[str | None, typer.Option(help="Stem of the files; needed when the folder holds several exports.")]
OnnxFile = Annotated[Path, typer.Argument(help="An .onnx file.", show_default=False)]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples per run, where the model leaves it open.")]
Limit = Annotated[int, typer.Option(min=1, help="Use at most so many batches.")]
NamedMetric = Annotated[
    str | None,
    typer.Option(
        help="accuracy (with --labels), agreement, kl, or module:function that rates an InferenceSession: "
        "one value per sample, or one number."
    ),
]
RightAnswers = Annotated[
    Path | None, typer.Option(help="Right answers: a .npy file, one per sample.", show_default=False)
]
Layout = Annotated[str, typer.Option(help="Of pictures: NCHW or NHWC.")]
Colours = Annotated[str, typer.Option(help="Of pictures: RGB, BGR or L (grey).")]
Scale = Annotated[float, typer.Option(help="Pixels, 0 to 255, are multiplied by this first.")]
Mean = Annotated[str, typer.Option(help="Then this is subtracted: one number, or one per colour.")]
Std = Annotated[str, typer.Option(help="Then it is divided by this.")]


def numbers(option: str, text: str) -> tuple[float, ...]:
    """``0.485,0.456,0.406`` of ``option`` as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(option, f"{text!r} is not a list of numbers", "write 0.485,0.456,0.406") from error


def read_pictures(layout: str, colours: str, scale: float, mean: str, std: str) -> Pictures:
    """How pictures become inputs, by the options of that name."""
    from bitwright.onnx.model.data import Pictures

    return Pictures(layout, colours, scale, numbers("--mean", mean), numbers("--std", std))


def read_batches(
    data: str, specs: Sequence[InputSpec], batch_size: int, limit: int, pictures: Pictures
) -> Iterator[Any]:
    """What ``--data`` names, as feeds for ``specs``, ``limit`` of them at most."""
    from bitwright.onnx import load_data

    return islice(load_data(data, specs, batch_size=batch_size, pictures=pictures), limit)


def called(text: str, function: Callable[[], Any]) -> Any:
    """What the user's function returns; where it fails, the error names it."""
    try:
        return function()
    except Exception as error:
        raise ConfigError(
            text, f"it failed: {type(error).__name__}: {error}", "call it yourself first; --debug shows where"
        ) from error


def like(name: str, glob: str) -> bool:
    """Whether ``name`` matches; brackets are part of site names and not special."""
    import fnmatch

    return fnmatch.fnmatchcase(name, glob.replace("[", "[[]"))


def write_json(path: Path, text: str) -> None:
    """Write what ``--json FILE`` asked for, whole or not at all."""
    from bitwright.export.files.atomic import atomic_write

    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_metric(text: str | None) -> Any:
    """A name, or the function that ``module:function`` names."""
    if text is None or ":" not in text:
        return text
    from bitwright.core.files.entry_points import load_entry_point

    return load_entry_point(text, "rates a session")


def read_labels(path: Path, batches: Sequence[Any]) -> Any:
    """As many labels as the data has samples: ``--limit`` may leave some out."""
    import numpy as np

    from bitwright.analysis.subject.data import rows_of

    try:
        found = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise ConfigError(str(path), f"it is not an array: {error}", "write it with numpy.save") from error
    return found[: sum(map(rows_of, batches))]
