"""Right answers: of each batch, out of pairs of inputs and answers, and read from files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.files import read_archive, read_array, read_bytes, read_document
from bitwright.core.simulation.calibration import samples_in
from bitwright.errors import ConfigError

Array = NDArray[Any]


def as_array(value: Any) -> Array:
    """Convert a tensor or array to an array."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def label_array(labels: Any) -> Array:
    """Labels with one entry per sample: numbers, or objects where they are texts, boxes, or of different lengths.

    Args:
        labels: an array; a list with one entry per sample; or a list of arrays, one per batch, of more than a sample each.
    """
    if hasattr(labels, "shape"):
        return as_array(labels)
    parts = list(labels)
    if parts and all(hasattr(part, "shape") and len(part.shape) for part in parts):
        arrays = [as_array(part) for part in parts]
        if len({array.shape[1:] for array in arrays}) == 1:
            return np.concatenate(arrays)
        return _objects(arrays)
    if parts and all(isinstance(part, (int, float, bool, np.generic)) for part in parts):
        return np.asarray(parts)
    return _objects(parts)


def _objects(entries: Sequence[Any]) -> Array:
    found = np.empty(len(entries), object)
    found[:] = entries
    return found


def split_labels(labels: Any, batches: Sequence[Any]) -> list[Array] | None:
    """Labels of each batch.

    Args:
        labels: one per sample in the order of the data, or one array per batch; ``None`` where there are none.

    Raises:
        ConfigError: there are more or fewer of them than samples, or they are the name of a file.
    """
    if labels is None:
        return None
    if isinstance(labels, (str, Path)):
        raise ConfigError(
            "labels", f"{str(labels)!r} is a text, not one label per sample", "read the file: numpy.load(path)"
        )
    rows = [samples_in(batch) for batch in batches]
    if isinstance(labels, (list, tuple)) and len(labels) == len(batches) and all(map(_is_batch, labels, rows)):
        return [label_array(part) for part in labels]
    flat = label_array(labels) if hasattr(labels, "__len__") else np.asarray(labels)
    if flat.ndim == 0 or len(flat) != sum(rows):
        raise ConfigError(
            "labels",
            f"there are {len(flat) if flat.ndim else 1} for {sum(rows)} samples",
            "give one label per sample, in the order of the data",
        )
    return np.split(flat, np.cumsum(rows)[:-1])


def _is_batch(part: Any, rows: int) -> bool:
    """Whether ``part`` holds the labels of a batch of ``rows`` samples."""
    if hasattr(part, "shape"):
        return len(part.shape) > 0 and part.shape[0] == rows
    return isinstance(part, (list, tuple)) and len(part) == rows


class _Inputs:
    """The inputs of batches, made again in every pass."""

    def __init__(self, data: Iterable[Any], transform: Callable[[Any], Any]) -> None:
        self._data, self._transform = data, transform

    def __iter__(self) -> Iterator[Any]:
        return map(self._transform, iter(self._data))


def inputs_of(data: Iterable[Any], transform: Callable[[Any], Any] | None) -> Iterable[Any]:
    """``data`` as the model takes them; what can be gone through again stays so."""
    if transform is None:
        return data
    return map(transform, data) if iter(data) is data else _Inputs(data, transform)


def inputs_and_labels(
    data: Iterable[Any], transform: Callable[[Any], Any] | None, labels: Any, needed: bool
) -> tuple[Iterable[Any], Any]:
    """Inputs, and labels by batch or as given.

    Args:
        data: batches as the model takes them; or pairs of an input and its labels, where labels are needed and not given.
        transform: makes of a batch what the model takes.
        labels: one per sample, a function that takes them from a batch, or ``None``.
        needed: whether the metric compares with labels. Only then the data are kept.

    Raises:
        ConfigError: labels are needed, and there are none.
    """
    if labels is None and not needed:
        return inputs_of(data, transform), None
    if labels is not None and not callable(labels):
        return inputs_of(data, transform), labels
    batches = list(data)
    if labels is None:
        if not batches or not all(isinstance(batch, (tuple, list)) and len(batch) == 2 for batch in batches):
            raise ConfigError(
                "metric",
                "it compares with the right answers, and no labels are given",
                "give labels=..., one per sample in the order of the data; labels=lambda batch: ..., which takes them from a "
                "batch; or batches that are pairs (input, labels)",
            )
        labels, transform = (lambda batch: batch[1]), transform or (lambda batch: batch[0])
    return [batch if transform is None else transform(batch) for batch in batches], [
        label_array(labels(b)) for b in batches
    ]


def read_labels(path: Path) -> Any:
    """Labels of a file: ``.npy``; ``.npz`` with one array; ``.json`` (a list, or COCO's annotations); ``.csv``; ``.txt``.

    A row of a table ends in the label of a sample; a line of a text file is the text of one. Of COCO's files the boxes of each
    image are read, images in the order of their file names, as pictures of a folder are.

    Raises:
        ConfigError: the file is of another kind, or does not hold labels.
    """
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise ConfigError(
            str(path), f"labels are not read from files of the kind {kind!r}", f"use {', '.join(sorted(_READERS))}"
        )
    try:
        return _READERS[kind](path)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, csv.Error) as error:
        raise ConfigError(str(path), f"it holds no labels: {error!r:.200}", _REMEDY) from error


_REMEDY = "write an array with numpy.save, one label per sample"
_MOST_BYTES = 1 << 29  # annotations of the largest public collections take that


def _array(path: Path) -> Any:
    return read_array(path, ConfigError, _REMEDY)


def _archive(path: Path) -> Any:
    found = read_archive(path, ConfigError, _REMEDY)
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} arrays")
    return next(iter(found.values()))


def _json(path: Path) -> Any:
    content = read_document(path, ConfigError, remedy=_REMEDY, max_bytes=_MOST_BYTES)
    return content if isinstance(content, list) else _coco(content)


def _coco(content: Mapping[str, Any]) -> list[dict[str, Array]]:
    """Boxes as left, top, right, bottom; classes as their place among the categories, or their number where it counts from 0."""
    classes = {c["id"]: i for i, c in enumerate(sorted(content["categories"], key=lambda c: c["id"]))}
    images = sorted(content["images"], key=lambda image: str(image["file_name"]))
    boxes: dict[Any, list[list[float]]] = {image["id"]: [] for image in images}
    for row in content["annotations"]:
        if not row.get("iscrowd"):
            x, y, w, h = map(float, row["bbox"])
            boxes[row["image_id"]].append([x, y, x + w, y + h, classes[row["category_id"]]])
    found = [np.array(boxes[image["id"]], np.float64).reshape(-1, 5) for image in images]
    return [{"boxes": rows[:, :4], "labels": rows[:, 4].astype(np.int64)} for rows in found]


def _table(path: Path) -> Any:
    last = [row[-1] for row in csv.reader(io.StringIO(_text(path), newline="")) if row]
    for begin in (0, 1):  # the first row may be a heading
        try:
            return np.array([int(cell) for cell in last[begin:]])
        except ValueError:
            continue
    return last


def _lines(path: Path) -> Any:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    return read_bytes(path, _MOST_BYTES, ConfigError).decode("utf-8")


_READERS: dict[str, Callable[[Path], Any]] = {
    ".npy": _array, ".npz": _archive, ".json": _json, ".csv": _table, ".txt": _lines,
}  # fmt: skip

__all__ = [
    "as_array", "inputs_and_labels", "inputs_of", "label_array", "read_labels", "split_labels",
]  # fmt: skip
