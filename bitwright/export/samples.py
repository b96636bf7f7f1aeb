"""Samples of a simulation, stored beside the exported model for verification without the original."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.files import read_archive
from bitwright.core.numerics.affine import dequantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.simulation.output_quality import RowOrder
from bitwright.errors import ExportError, close_matches
from bitwright.export.files.atomic import settle

Array = NDArray[Any]
_PIECE = 1 << 15  # elements that are looked at together


def write_samples(
    path: Path,
    sites: Mapping[str, Sequence[Array]],
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    encodings: Mapping[str, Encoding] | None = None,
    orders: Mapping[str, RowOrder] | None = None,
) -> None:
    """Write an ``.npz``: ``site/<i>/<name>``, ``input/<name>``, ``output/<name>``, ``order/<axis>/<name>``.

    Values on a grid of at most 256 codes are written as ``values/<i>/<name>``, float32 ``[256]`` at most, and
    ``codes/<i>/<name>``, uint8 positions in it, where that gives the same bits.

    Args:
        path: the file.
        sites: site -> its values in the simulation, float32, one array per run of its place.
        inputs: graph input -> value.
        outputs: graph output -> what the simulation returned.
        encodings: site -> the grid that its values are on, as far as it is known.
        orders: graph output whose rows an operator chose -> the indices, as integers.
    """
    coded = encodings or {}
    arrays = chain(
        (
            part
            for name, kept in sites.items()
            for i, x in enumerate(kept)
            for part in _parts(i, name, x, coded.get(name))
        ),
        ((f"input/{name}", array) for name, array in inputs.items()),
        ((f"output/{name}", array) for name, array in outputs.items()),
        ((f"order/{order.axis}/{name}", order.indices) for name, order in (orders or {}).items()),
    )  # one at a time: they may lie in a file
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays:
            content = io.BytesIO()
            np.lib.format.write_array(content, plain(array), allow_pickle=False)
            # the lowest level is 4.6 times as fast as the usual one, files 2 % larger; codes and inputs shrink little
            kind = zipfile.ZIP_DEFLATED if name.startswith("site/") else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getbuffer(), kind, compresslevel=1)


def _parts(i: int, name: str, array: Array, encoding: Encoding | None) -> Iterator[tuple[str, Array]]:
    """The archive members of one site's values, as codes where its grid is small and reproduces the bits."""
    if (
        encoding is not None and isinstance(fmt := encoding.format, IntFormat) and fmt.bits <= 8 and not encoding.dynamic
        and encoding.scale.ndim == 0 and array.dtype == np.float32 and array.size > 256
    ):  # fmt: skip
        values = dequantize(np.arange(fmt.qmin, fmt.qmax + 1), encoding)
        places = _places(array, encoding, fmt.qmin, values)
        if places is not None:
            yield f"values/{i}/{name}", values
            yield f"codes/{i}/{name}", places
            return
    yield f"site/{i}/{name}", array


def _places(array: Array, encoding: Encoding, qmin: int, values: Array) -> Array | None:
    """Where in ``values`` each element is, uint8 of the shape of ``array``; ``None`` if one has other bits than all of them.

    A piece at a time, whose buffers stay in the cache of the CPU. What is computed is where an element of the grid lies; that
    it does lie there is shown by its bits.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    places = np.empty(flat.size, np.uint8)
    numbers, found = np.empty(_PIECE, np.float32), np.empty(_PIECE, np.float32)
    zero = encoding.zero_point.astype(np.float32)
    with np.errstate(invalid="ignore"):  # of NaN, which no value equals
        for start in range(0, flat.size, _PIECE):
            piece, there = flat[start : start + _PIECE], places[start : start + _PIECE]
            number, value = numbers[: piece.size], found[: piece.size]
            np.divide(piece, encoding.scale, out=number)
            number += zero
            np.rint(number, out=number)
            number -= np.float32(qmin)
            np.copyto(there, number, casting="unsafe")
            np.take(values, there, out=value, mode="clip")
            if not np.array_equal(value.view(np.int32), piece.view(np.int32)):
                return None
    return places.reshape(array.shape)


def plain(array: Array) -> Array:
    """``array`` with strings in numpy's own dtype; ONNX Runtime returns them as objects."""
    found = np.asanyarray(array)
    return found.astype(np.str_) if found.dtype == object else found


def read_samples(path: str | os.PathLike[str]) -> tuple[dict[str, list[Array]], dict[str, Array], dict[str, Array]]:
    """``(sites, inputs, outputs)`` of :func:`write_samples`.

    Raises:
        ExportError: the file is missing or is not a samples file.
    """
    sites: dict[str, list[Array]] = {}
    inputs: dict[str, Array] = {}
    outputs: dict[str, Array] = {}
    remedy = "export the model again with samples=True"
    arrays = read_archive(path, ExportError, remedy)
    for key, array in arrays.items():
        kind, _, name = key.partition("/")
        if kind == "site":
            sites.setdefault(name.partition("/")[2], []).append(array)
        elif kind == "codes":
            values = arrays.get(f"values/{name}")
            if array.dtype != np.uint8 or values is None or values.ndim != 1 or array.max(initial=0) >= values.size:
                problem = f"it holds {key!r:.100} without the values that these codes stand for"
                raise ExportError(os.fspath(path), problem, remedy)
            sites.setdefault(name.partition("/")[2], []).append(values[array])
        elif kind in ("values", "order"):  # the second: see read_orders
            continue
        elif kind in ("input", "output"):
            {"input": inputs, "output": outputs}[kind][name] = array
        else:
            problem = f"it holds {key!r:.100}, which is not a sample of a simulation"
            raise ExportError(os.fspath(path), problem, remedy)
    return sites, inputs, outputs


def read_orders(path: str | os.PathLike[str]) -> dict[str, RowOrder]:
    """Graph output with rows chosen by an operator -> the choice in the simulation, from :func:`write_samples`.

    Args:
        path: a file that :func:`read_samples` has read.
    """
    found = {}
    with np.load(path, allow_pickle=False) as arrays:
        for key in arrays.files:
            kind, _, rest = key.partition("/")
            axis, _, name = rest.partition("/")
            if kind == "order":
                found[name] = RowOrder(int(axis), arrays[key])
    return found


def find_export(folder: str | os.PathLike[str], prefix: str | None = None) -> str:
    """The stem of the files that an export wrote into ``folder``.

    Args:
        folder: where the files lie.
        prefix: the stem to look for; needed only when the folder holds several exports.

    Raises:
        ExportError: no export there, none of this stem, or several; or see :func:`bitwright.export.files.atomic.settle`.
    """
    path = Path(folder)
    if path.is_file():
        problem = "it is a file, and an export is a folder of several"
        raise ExportError(str(path), problem, f"name the folder that sim.export wrote: {path.parent}")
    settle(path)
    found = sorted(p.name.removesuffix("_manifest.json") for p in path.glob("*_manifest.json"))
    if prefix is not None and prefix in found:
        return prefix
    if prefix is not None and found:
        problem = f"the folder holds no export called {prefix!r}{close_matches(prefix, found)}"
        raise ExportError(str(path), problem, f"name one of {', '.join(found)}")
    if not found:
        problem = "the folder holds no export" if path.is_dir() else "there is no such folder"
        raise ExportError(str(path), problem, "name the folder that sim.export wrote")
    if len(found) > 1:
        problem = f"the folder holds several exports: {', '.join(found)}"
        raise ExportError(str(path), problem, "name one of them as the prefix")
    return found[0]
