"""Mean average precision of detectors, as COCO's evaluation defines it, with a value per image.

What an image adds is found once: which of its boxes are right at each threshold of the overlap. Leaving an image out then only
takes its rows out of sorted lists. Checked against ``torchmetrics`` and ``pycocotools`` in the tests.

Reference: Lin et al. 2014, arXiv:1405.0312, and ``cocoeval.py`` of the COCO API: 101 points of recall, overlaps of 0.5 to 0.95,
at most 100 boxes per image and class; areas and crowds are not told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import ConfigError
from bitwright.metrics.labels import as_array

Array = NDArray[Any]
Boxes = tuple[Array, Array, Array]
"""Boxes of one image: corners [n, 4], scores [n], classes [n]."""
OVERLAPS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0, 1, 101)
_MOST = 100  # boxes of a class in an image
_REMEDY = (
    "give {'map': {'decode': function}}, whose function makes of the outputs of a batch a list with (boxes, scores, classes) of "
    "each image, boxes as left, top, right, bottom"
)


def decoded(outputs: Sequence[Array], rows: int, *, score: float, overlap: float) -> list[Boxes]:
    """The boxes of each image, from the layouts that detectors have.

    Args:
        outputs: torchvision's (boxes [n, 4], labels [n], scores [n] of each image in turn); [N, n, 6] with corners, score and
            class; boxes [N, n, 4], scores [N, n] and classes [N, n]; or [N, 4 + classes, places] with centre and size, from
            which boxes are chosen here.
        rows: images of the batch.
        score, overlap: below and above which boxes of the last layout are dropped.

    Raises:
        ConfigError: none of these layouts fits.
    """
    batched = [y for y in outputs if y.ndim and len(y) == rows]
    floats = [y for y in batched if y.ndim == 3 and y.dtype.kind == "f"]
    found = _of_each_image(outputs, rows) or _rows_of_six(floats) or _beside_boxes(floats, batched)
    found = found or _raw(floats, score, overlap)
    if not found:
        shapes = [tuple(y.shape) for y in outputs]
        raise ConfigError("metric map", f"outputs of shapes {shapes} have no layout of boxes that is known", _REMEDY)
    return found


def _raw(floats: Sequence[Array], score: float, overlap: float) -> list[Boxes] | None:
    """Decode an output [N, 4 + classes, places]."""
    raw = next((y for y in floats if y.shape[2] > y.shape[1] > 4), None)
    return None if raw is None else [_suppressed(image, score, overlap) for image in raw]


def _rows_of_six(floats: Sequence[Array]) -> list[Boxes] | None:
    """Decode an output [N, n, 6]."""
    rows = next((y for y in floats if y.shape[2] == 6), None)
    return None if rows is None else [(image[:, :4], image[:, 4], image[:, 5].astype(np.int64)) for image in rows]


def _beside_boxes(floats: Sequence[Array], batched: Sequence[Array]) -> list[Boxes] | None:
    """Decode boxes [N, n, 4] with scores and classes in separate arrays."""
    boxes = next((y for y in floats if y.shape[2] == 4), None)
    if boxes is None:
        return None
    rows, places = boxes.shape[:2]
    pair = _scores_and_classes([y.reshape(rows, -1) for y in batched if y.ndim in (2, 3) and y.size == rows * places])
    return None if pair is None else [(b, s, c.astype(np.int64)) for b, s, c in zip(boxes, *pair, strict=True)]


def _of_each_image(outputs: Sequence[Array], rows: int) -> list[Boxes] | None:
    """Torchvision's lists of dictionaries, flattened."""
    starts = [i for i, y in enumerate(outputs) if y.ndim == 2 and y.shape[1] == 4 and y.dtype.kind == "f"]
    if len(starts) != rows or not rows or len(outputs) % rows:
        return None
    width, found = len(outputs) // rows, []
    for boxes, begin in zip((outputs[i] for i in starts), range(0, len(outputs), width), strict=True):
        pair = _scores_and_classes([y for y in outputs[begin : begin + width] if y.ndim == 1])
        if pair is None or len(pair[0]) != len(boxes):
            return None
        found.append((boxes, pair[0], pair[1].astype(np.int64)))
    return found


def _scores_and_classes(arrays: Sequence[Array]) -> tuple[Array, Array] | None:
    """Tell scores from classes: the array of integers holds the classes."""
    if len(arrays) < 2:
        return None
    first, second = arrays[:2]
    kinds = [y.dtype.kind in "iu" for y in (first, second)]
    if kinds[0] != kinds[1]:
        return (second, first) if kinds[0] else (first, second)
    whole = [bool(np.array_equal(y, np.round(y)) and (y.size == 0 or y.max() >= 1)) for y in (first, second)]
    return (second, first) if whole[0] and not whole[1] else (first, second)


def _suppressed(image: Array, score: float, overlap: float) -> Boxes:
    """Boxes of one image, [4 + classes, places]: each class by itself, the best first, without those that lie on a better one."""
    boxes, scores = image[:4].T, image[4:].T
    places, classes = np.nonzero(scores > score)
    order = np.argsort(-scores[places, classes], kind="stable")[:3000]
    places, classes = places[order], classes[order]
    half = boxes[places, 2:] / 2
    corners = np.concatenate([boxes[places, :2] - half, boxes[places, :2] + half], 1)
    kept: list[int] = []
    left = np.arange(len(corners))
    while len(left) and len(kept) < 300:
        first, left = int(left[0]), left[1:]
        kept.append(first)
        on = overlaps(corners[first : first + 1], corners[left])[0] > overlap
        left = left[~(on & (classes[left] == classes[first]))]
    return corners[kept], scores[places[kept], classes[kept]], classes[kept]


def overlaps(a: Array, b: Array) -> Array:
    """Intersection over union of boxes [n, 4] and [m, 4]: [n, m]."""
    low, high = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
    common = np.prod(np.clip(high - low, 0, None), 2)
    areas = [np.prod(np.clip(x[:, 2:] - x[:, :2], 0, None), 1) for x in (a, b)]
    union = areas[0][:, None] + areas[1][None] - common
    return np.divide(common, union, out=np.zeros_like(common, np.float64), where=union > 0)


def right_boxes(label: Any) -> tuple[Array, Array]:
    """Corners [n, 4] and classes [n] of a label.

    Raises:
        ConfigError: it is not of that form.
    """
    try:
        if isinstance(label, Mapping):
            boxes, classes = as_array(label["boxes"]), as_array(label["labels"])
        else:
            rows = as_array(label).reshape(-1, 5)
            boxes, classes = rows[:, :4], rows[:, 4]
        return boxes.reshape(-1, 4).astype(np.float64), classes.reshape(-1).astype(np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "labels",
            f"one of them holds no boxes ({type(error).__name__}: {error})",
            'give of each image {"boxes": [n, 4], "labels": [n]}, or rows of left, top, right, bottom, class',
        ) from error


def evidence(found: Boxes, label: Any) -> Array:
    """Evidence of one image: rows of class, score and a match flag per IoU threshold; labels have score -1."""
    boxes, scores, classes = found
    wanted, of_class = right_boxes(label)
    rows = [np.concatenate([[c, -1.0], np.ones(len(OVERLAPS))]) for c in of_class]
    for c in np.unique(classes):
        mine = np.flatnonzero(classes == c)
        mine = mine[np.argsort(-scores[mine], kind="stable")][:_MOST]
        right = _matched(overlaps(np.asarray(boxes[mine], np.float64), wanted[of_class == c]))
        rows += [np.concatenate([[c, scores[i]], right[:, k]]) for k, i in enumerate(mine)]
    return np.array(rows).reshape(-1, 2 + len(OVERLAPS))


def _matched(both: Array) -> Array:
    """Match boxes, best score first, each to the best free label, at each IoU threshold: [thresholds, boxes]."""
    right = np.zeros((len(OVERLAPS), len(both)))
    for t, least in enumerate(OVERLAPS):
        free = np.ones(both.shape[1], bool)
        for k, row in enumerate(both):
            left = np.where(free, row, -1.0)
            if left.size and left.max() >= min(least, 1 - 1e-10):
                free[len(left) - 1 - int(left[::-1].argmax())] = False  # of equal ones the last, as in cocoeval
                right[t, k] = 1
    return right


def average_precisions(parts: Array, at: slice) -> Array:
    """Leave-one-out influence of each image; the mean over images is the mean average precision.

    Args:
        parts: of each image, as :func:`evidence`.
        at: which overlaps.
    """
    images = [np.asarray(part, np.float64).reshape(-1, 2 + len(OVERLAPS)) for part in parts]
    n = len(images)
    rows = np.concatenate(images) if images else np.empty((0, 2 + len(OVERLAPS)))
    owner = np.repeat(np.arange(n), [len(image) for image in images])
    total, classes = 0.0, 0
    sums, counts = np.zeros(n), np.zeros(n)  # how sum and number of classes change without an image
    for c in np.unique(rows[rows[:, 1] < 0, 0]):
        mine = rows[:, 0] == c
        answers = np.bincount(owner[mine & (rows[:, 1] < 0)], minlength=n)
        boxes = np.flatnonzero(mine & (rows[:, 1] >= 0))
        boxes = boxes[np.argsort(-rows[boxes, 1], kind="stable")]
        right, whose = rows[boxes, 2:][:, at].T, owner[boxes]
        whole = _average(right, int(answers.sum()))
        total, classes = total + whole, classes + 1
        for i in np.flatnonzero(np.bincount(whose, minlength=n) + answers):
            left = int(answers.sum() - answers[i])
            sums[i] += (_average(right[:, whose != i], left) if left else 0.0) - whole
            counts[i] -= not left
    if not classes:
        raise ConfigError("labels", "no image has a box", "give labels of images with objects")
    value = total / classes
    without = (total + sums) / np.maximum(classes + counts, 1)
    pseudo = n * value - (n - 1) * without
    return np.asarray(pseudo + value - pseudo.mean())


def _average(right: Array, answers: int) -> float:
    """Mean over overlaps of the average precision of one class; boxes are sorted."""
    if not right.shape[1]:
        return 0.0
    hits = right.cumsum(1)
    recall, precision = hits / answers, hits / np.arange(1, right.shape[1] + 1)
    best = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
    best = np.concatenate([best, np.zeros((len(best), 1))], 1)
    found = [row[np.searchsorted(r, _RECALLS, side="left")].mean() for row, r in zip(best, recall, strict=True)]
    return float(np.mean(found))


__all__ = ["Boxes", "average_precisions", "decoded", "evidence", "overlaps", "right_boxes"]
