"""Samples of a simulation, kept beside the exported model so that it can be verified without the original."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.files import read_archive
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.errors import ExportError, close_matches
from bitwright.export.files.atomic import settle

Array = NDArray[Any]


def write_samples(
    path: Path,
    sites: Mapping[str, Sequence[Array]],
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    encodings: Mapping[str, Encoding] | None = None,
) -> None:
    """Write an ``.npz``: ``site/<i>/<name>``, ``input/<name>``, ``output/<name>``.

    Values that lie on the integer grid of their site are ``codes/<i>/<name>`` beside ``grid/<i>/<name>``, its scale and zero
    point: a quarter of the bytes at 8 bits. Nothing is compressed, which took most of the time of an export.

    Args:
        path: the file.
        sites: site -> its values in the simulation, float32, one array per run of its place.
        inputs: graph input -> value.
        outputs: graph output -> what the simulation returned.
        encodings: site -> its grid, where it has one.
    """
    grids = encodings or {}
    arrays = chain(
        chain.from_iterable(
            _on_grid(f"{i}/{name}", array, grids.get(name))
            for name, kept in sites.items()
            for i, array in enumerate(kept)
        ),
        ((f"input/{name}", array) for name, array in inputs.items()),
        ((f"output/{name}", array) for name, array in outputs.items()),
    )  # one at a time: they may lie in a file
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, plain(array), allow_pickle=False)


def _on_grid(name: str, array: Array, encoding: Encoding | None) -> Iterator[tuple[str, Array]]:
    """The entries of the values of a site: codes and grid where these give the same values, else the values."""
    fmt = None if encoding is None else encoding.format
    if encoding is not None and isinstance(fmt, IntFormat) and fmt.bits <= 16 and encoding.scale.size == 1:
        scale, zero = encoding.scale.reshape(()), encoding.zero_point.reshape(())
        numbers = np.asarray(array, np.float32) / scale
        np.rint(numbers, out=numbers)
        numbers += np.float32(zero)
        np.clip(numbers, fmt.qmin, fmt.qmax, out=numbers)
        with np.errstate(invalid="ignore"):  # NaN has no code, and is seen below
            codes = numbers.astype(np.min_scalar_type(fmt.qmin if fmt.qmin < 0 else fmt.qmax))
        if np.array_equal(_values(codes, scale, zero), array):
            yield f"codes/{name}", codes
            yield f"grid/{name}", np.array([scale, zero], np.float64)
            return
    yield f"site/{name}", array


def _values(codes: Array, scale: Any, zero: Any) -> Array:
    """What codes stand for, as ``DequantizeLinear`` computes it."""
    with np.errstate(all="ignore"):  # a damaged file may say anything
        found = codes.astype(np.float32)
        found -= np.float32(zero)
        found *= np.float32(scale)
    return found


def plain(array: Array) -> Array:
    """``array`` with strings as numpy stores them; ONNX Runtime hands them out as objects."""
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
    held = read_archive(path, ExportError, remedy)
    for key, array in held.items():
        kind, _, name = key.partition("/")
        if kind == "site":
            sites.setdefault(name.partition("/")[2], []).append(array)
        elif kind == "codes":
            grid = held.get(f"grid/{name}", np.zeros(0))
            if grid.shape != (2,) or grid.dtype != np.float64 or array.dtype.kind not in "iu":
                problem = f"the codes {name!r:.100} have no grid"
                raise ExportError(os.fspath(path), problem, remedy)
            sites.setdefault(name.partition("/")[2], []).append(_values(array, *grid))
        elif kind == "grid":
            continue
        elif kind in ("input", "output"):
            {"input": inputs, "output": outputs}[kind][name] = array
        else:
            problem = f"it holds {key!r:.100}, which is not a sample of a simulation"
            raise ExportError(os.fspath(path), problem, remedy)
    return sites, inputs, outputs


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
