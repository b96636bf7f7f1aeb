"""Feeds of a model: checks with helpful messages, and data from files, images, Python code or a random generator.

A *feed* is what one run takes: a dict from input names to arrays. Where a model has one input, the array alone is
enough; a tuple or list gives the inputs in the order of the model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.files import load_entry_point, read_archive, read_array
from bitwright.errors import CalibrationError, ConfigError, ModelError, checks_arguments, close_matches
from bitwright.tables import counted

logger = logging.getLogger("bitwright")

Array = NDArray[Any]
Feeds = dict[str, Array]
_PICTURES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"))
_NO_NUMPY = (ir.DataType.STRING, ir.DataType.BFLOAT16, ir.DataType.UNDEFINED)
_NAMELESS = "arr_0"  # what np.savez calls the first array that it is given without a name
_MOST_RANDOM = 1 << 28
_MOST_PIXELS = 120_000_000  # of a picture, which holds four bytes for each while it is read
_FREE_AXIS = 1  # length of an axis that the model leaves open, in random data


@dataclass(frozen=True)
class InputSpec:
    """One input of a model: name, numpy dtype, and its axes, ``None`` where their length is open.

    ``shape`` is ``None`` where not even the rank is known; ``dtype`` where numpy has no such type (bfloat16, strings).
    """

    name: str
    dtype: str | None
    shape: tuple[int | None, ...] | None

    @property
    def is_open(self) -> bool:
        """Whether the length of an axis, or the rank, is unknown."""
        return self.shape is None or None in self.shape

    def __str__(self) -> str:
        axes = "any shape" if self.shape is None else "x".join("?" if n is None else str(n) for n in self.shape)
        return f"{self.name} ({self.dtype or 'any type'}, {axes or 'scalar'})"


def input_specs(model: ir.Model) -> tuple[InputSpec, ...]:
    """Inputs of ``model`` in order, without initializers that may be overridden."""
    return tuple(_spec(value) for value in model.graph.inputs if not value.is_initializer())


def _spec(value: ir.Value) -> InputSpec:
    known = value.dtype is not None and value.dtype not in _NO_NUMPY
    dtype = np.dtype(value.dtype.numpy()).name if known and value.dtype is not None else None
    if value.shape is None:
        return InputSpec(str(value.name), dtype, None)
    axes = (n if isinstance(n, int) and n >= 0 else None for n in value.shape)
    return InputSpec(str(value.name), dtype, tuple(axes))


def as_feeds(given: Any, specs: Sequence[InputSpec], where: str = "feeds") -> Feeds:
    """``given`` as a dict that the model takes; lists of numbers become arrays, other dtypes are errors.

    Args:
        given: a dict, one array for a model with one input, or a tuple or list of arrays in the model's order.
        specs: of the model.
        where: for messages (``batch 3``).

    Raises:
        ModelError: a name is missing or unknown (with close matches), or an array has the wrong type or shape.
    """
    feeds = _named(given, specs, where)
    known = {spec.name: spec for spec in specs}
    for name in feeds:
        if name not in known:
            raise ModelError(
                where,
                f"the model has no input {name!r:.100}{close_matches(str(name), known)}",
                f"its inputs are {', '.join(map(str, specs))}",
            )
    missing = [spec for spec in specs if spec.name not in feeds]
    if missing:
        near = close_matches(missing[0].name, feeds)
        raise ModelError(where, f"there is no value for the input {missing[0]}{near}", "add it to the dict")
    return {spec.name: _fitting(feeds[spec.name], spec, where) for spec in specs}


def _named(given: Any, specs: Sequence[InputSpec], where: str) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    values = list(given) if isinstance(given, (tuple, list)) else [given]
    if values and all(isinstance(value, Mapping) for value in values):
        if len(values) == 1:
            return dict(values[0])
        problem = f"this is a list of {len(values)} inputs, and the model runs on one at a time"
        raise ModelError(where, problem, "give one of them: a dict from input names to arrays")
    if len(values) != len(specs):
        remedy = f"give a dict with {', '.join(map(str, specs)) or 'nothing: the model has no inputs'}"
        if len(values) > len(specs) > 0:
            remedy += "; of batches (input, label) pass the inputs alone, as [x for x, *_ in loader]"
        problem = f"{counted(len(values), 'array')} for a model with {counted(len(specs), 'input')}"
        raise ModelError(where, problem, remedy)
    return {spec.name: value for spec, value in zip(specs, values, strict=True)}


def _fitting(value: Any, spec: InputSpec, where: str) -> Array:
    try:
        array = np.asarray(value)
        plain = array if hasattr(value, "dtype") or spec.dtype is None else array.astype(spec.dtype)
    except (ValueError, TypeError, OverflowError) as error:  # rows of different lengths, texts, objects
        raise ModelError(
            where,
            f"what the input {spec} was given is not an array: {error}",
            "give an array or regular lists of numbers",
        ) from error
    if spec.dtype is not None and array.dtype.name != spec.dtype:
        if not hasattr(value, "dtype"):  # plain numbers have no type of their own
            return _shaped(plain, spec, where)
        raise ModelError(
            where,
            f"the input {spec} was given {array.dtype.name} values",
            f"convert them: array.astype(np.{spec.dtype})",
        )
    return _shaped(array, spec, where)


def _shaped(array: Array, spec: InputSpec, where: str) -> Array:
    if spec.shape is None or _fits(array.shape, spec.shape):
        return array
    remedy = "bring it to this shape; a model with a fixed batch size takes batches of that size only"
    rank = len(array.shape)
    if len(spec.shape) == rank + 1 and _fits((1, *array.shape), spec.shape):
        remedy = "add the axis of samples: array[None], or np.stack(arrays) for several"
    elif rank > 2:  # channels last for channels first, or the reverse
        for order in ((0, rank - 1, *range(1, rank - 1)), (0, *range(2, rank), 1)):
            if _fits(tuple(array.shape[axis] for axis in order), spec.shape):
                remedy = f"bring its axes into this order: array.transpose{order}"
    raise ModelError(
        where, f"the input {spec} was given an array of shape {'x'.join(map(str, array.shape)) or 'scalar'}", remedy
    )


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(axis in (None, n) for axis, n in zip(wanted, shape, strict=True))


# ------------------------------------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Pictures:
    """Preprocessing of pictures: resize, scale, normalise, layout.

    ``(pixel * scale - mean) / std`` per colour, with pixels 0..255.

    Attributes:
        layout: ``NCHW`` or ``NHWC``.
        colours: ``RGB``, ``BGR`` or ``L`` (grey).
        scale: factor of the pixels, applied first.
        mean, std: one number, or one per colour, in units of the scaled pixels.
    """

    layout: str = "NCHW"
    colours: str = "RGB"
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("layout", self.layout, ("NCHW", "NHWC")),
            ("colours", self.colours, ("RGB", "BGR", "L")),
        ):
            if value not in known:
                raise ConfigError(
                    name, f"{value!r} is not one of them{close_matches(value, known)}", f"use {', '.join(known)}"
                )
        colours = 1 if self.colours == "L" else 3
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, colours) or not np.isfinite(values).all():
                raise ConfigError(
                    name, f"{values} is not one finite number or {colours}", "give one number, or one per colour"
                )
        if not all(self.std):
            raise ConfigError(
                "std", "it holds a zero, and pixels are divided by it", "use 1 to leave a colour as it is"
            )


@checks_arguments
def load_data(
    source: str | Path, specs: Sequence[InputSpec], *, batch_size: int = 1, pictures: Pictures | None = None
) -> Iterator[Feeds]:
    """Convert a user's data to feeds.

    =====================  ===========================================================================
    ``source``             feeds
    =====================  ===========================================================================
    ``file.npz``           arrays named after the inputs, samples along axis 0
    ``file.npy``           samples along axis 0, or one sample (one input)
    folder of ``.npy``     one sample or batch per file, in the order of their names (one input)
    folder of folders      a folder per input, named after it, with equally many files
    folder of ``.npz``     one feed per file
    folder of pictures     one picture per sample (one input), prepared as ``pictures`` says
    ``module:function``    whatever the function yields
    =====================  ===========================================================================

    Args:
        source: see above.
        specs: of the model.
        batch_size: samples per feed, where the batch axis of the model is open.
        pictures: preparation of pictures.

    Raises:
        CalibrationError: there is nothing there, or nothing in it.
        ModelError: it does not fit the model.
        ConfigError: ``module:function`` cannot be imported.
    """
    text = str(source)
    path = Path(source)
    if batch_size < 1:
        raise ConfigError("batch_size", f"it is {batch_size}", "use 1 or more")
    if path.is_dir():
        yield from _from_folder(path, specs, batch_size, pictures or Pictures())
    elif path.is_file() and path.suffix == ".npz":
        yield from _from_archive(path, specs, batch_size)
    elif path.is_file() and path.suffix == ".npy":
        spec = _one(specs, path)
        yield from _cut({spec.name: _with_batch(_load(path), spec)}, specs, batch_size, text)
    elif ":" in text and not path.exists():
        for i, feeds in enumerate(load_entry_point(text)()):
            yield as_feeds(feeds, specs, f"{text}, item {i}")
    else:
        what = "is neither .npz nor .npy" if path.is_file() else "does not exist"
        raise CalibrationError(
            text, f"it {what}", "give a .npz file, a folder of .npy files or pictures, or module:function"
        )


def _from_archive(path: Path, specs: Sequence[InputSpec], batch_size: int) -> Iterator[Feeds]:
    arrays = _read_archive(path)
    if len(specs) == 1 and list(arrays) == [_NAMELESS]:
        arrays = {specs[0].name: arrays[_NAMELESS]}
    wanted = {spec.name for spec in specs}
    extra = [name for name in arrays if name not in wanted]
    if extra and wanted <= arrays.keys():
        logger.info("%s: %s not read, the model has no such input", path, ", ".join(extra))
        arrays = {name: arrays[name] for name in arrays if name in wanted}
    first = as_names(arrays, specs, str(path))
    lengths = {name: len(array) if array.ndim else 1 for name, array in first.items()}
    if len(set(lengths.values())) > 1:
        raise ModelError(
            str(path),
            f"its arrays hold different numbers of samples: {lengths}",
            "store as many samples of every input, along axis 0",
        )
    yield from _cut(first, specs, batch_size, str(path))


def as_names(arrays: Mapping[str, Array], specs: Sequence[InputSpec], where: str) -> dict[str, Array]:
    """``arrays`` if their names are those of the inputs.

    Raises:
        ModelError: a name is missing or unknown.
    """
    known = [spec.name for spec in specs]
    for name in arrays:
        if name not in known:
            raise ModelError(
                where,
                f"it holds {name!r:.100}, which is not an input of the model{close_matches(name, known)}",
                f"name the arrays {', '.join(known)}",
            )
    for spec in specs:
        if spec.name not in arrays:
            raise ModelError(
                where, f"it holds nothing for the input {spec}{close_matches(spec.name, arrays)}", "add the array"
            )
    return dict(arrays)


def _cut(arrays: Mapping[str, Array], specs: Sequence[InputSpec], batch_size: int, where: str) -> Iterator[Feeds]:
    """Slices along axis 0 of the model's batch length or ``batch_size``; an incomplete last one is dropped."""
    fixed = next((s.shape[0] for s in specs if s.shape and s.shape[0] is not None), None)
    size = batch_size if fixed is None else fixed
    sliced = {name: array for name, array in arrays.items() if array.ndim}
    total = min(map(len, sliced.values()), default=0)
    if not total or size < 1:
        what = "it holds no sample" if size else "the model takes batches of no sample"
        raise CalibrationError(where, what, "give a file with at least one sample, and a model that takes one")
    left = total % size if fixed else 0
    for first in range(0, total - left, size):
        last = min(first + size, total)
        part = {**arrays, **{name: array[first:last] for name, array in sliced.items()}}
        yield as_feeds(part, specs, f"{where}, samples {first} to {last - 1}")
    if left:
        logger.info("%s: the last %d samples do not fill a batch of %d", where, left, size)


def _from_folder(path: Path, specs: Sequence[InputSpec], batch_size: int, pictures: Pictures) -> Iterator[Feeds]:
    entries = sorted(p for p in path.iterdir() if not p.name.startswith("."))
    folders = [p for p in entries if p.is_dir()]
    if folders:
        yield from _from_folders(path, {p.name: p for p in folders}, specs, pictures)
        return
    archives = [p for p in entries if p.suffix == ".npz"]
    for archive in archives:
        yield as_feeds(_read_archive(archive), specs, str(archive))
    if archives:
        return
    spec = _one(specs, path)
    yield from _batches(spec.name, _arrays(path, spec, pictures), specs, batch_size)


def _from_folders(
    path: Path, folders: Mapping[str, Path], specs: Sequence[InputSpec], pictures: Pictures
) -> Iterator[Feeds]:
    known = [spec.name for spec in specs]
    for spec in specs:
        if spec.name not in folders:
            near = close_matches(spec.name, folders)
            raise ModelError(str(path), f"there is no folder for the input {spec}{near}", f"make {', '.join(known)}")
    streams = [_arrays(folders[spec.name], spec, pictures) for spec in specs]
    for i, parts in enumerate(zip(*streams, strict=False)):
        feeds = {spec.name: _with_batch(a, spec) for spec, a in zip(specs, parts, strict=True)}
        yield as_feeds(feeds, specs, f"{path}, file {i}")


def _one(specs: Sequence[InputSpec], path: Path) -> InputSpec:
    if len(specs) == 1:
        return specs[0]
    raise ModelError(
        str(path),
        f"the model has {len(specs)} inputs, and files do not say which they are for",
        f"use a .npz with {', '.join(s.name for s in specs)}, or a folder per input, named after it",
    )


def _arrays(path: Path, spec: InputSpec, pictures: Pictures) -> Iterator[Array]:
    files = sorted(p for p in path.iterdir() if p.suffix == ".npy" or p.suffix.lower() in _PICTURES)
    if not files:
        raise CalibrationError(
            str(path), "it holds no .npy, .npz or picture file", "point to the folder that holds the files themselves"
        )
    for file in files:
        yield _load(file) if file.suffix == ".npy" else _picture(file, spec, pictures)


def _load(path: Path) -> Array:
    return read_array(path, CalibrationError)


def _read_archive(path: Path) -> dict[str, Array]:
    return read_archive(path, CalibrationError, "write it with np.savez, arrays named after the inputs")


def _with_batch(array: Array, spec: InputSpec) -> Array:
    """``array`` with a batch axis in front where it lacks one."""
    return array[None] if spec.shape is not None and array.ndim == len(spec.shape) - 1 else array


def _batches(name: str, arrays: Iterable[Array], specs: Sequence[InputSpec], batch_size: int) -> Iterator[Feeds]:
    """Samples gathered into batches; a file that is a batch already stays one."""
    (spec,) = specs
    fixed = spec.shape[0] if spec.shape else None
    size, waiting, first = fixed or batch_size, [], 0
    for i, array in enumerate(arrays):
        if _with_batch(array, spec) is array:
            yield from _cut({name: array}, specs, max(size, len(array)) if array.ndim else size, f"file {i}")
            continue
        waiting.append(array)
        if (array.shape, array.dtype) != (waiting[0].shape, waiting[0].dtype):
            raise ModelError(
                f"file {i}",
                f"it holds {array.dtype} of shape {array.shape}, and the first of its batch {waiting[0].dtype} of shape "
                f"{waiting[0].shape}",
                "store samples of one type and shape, or use a batch size of 1",
            )
        if len(waiting) == size:
            yield as_feeds({name: np.stack(waiting)}, specs, f"files {first} to {i}")
            waiting, first = [], i + 1
    if waiting and not fixed:
        yield as_feeds({name: np.stack(waiting)}, specs, f"files from {first}")
    elif waiting:
        logger.info("the last %d samples do not fill a batch of %d", len(waiting), size)


def _picture(path: Path, spec: InputSpec, pictures: Pictures) -> Array:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ConfigError(str(path), "reading pictures needs Pillow", "pip install pillow") from error
    height, width = _frame(spec, pictures)
    try:
        with Image.open(path) as file:
            mode = "L" if pictures.colours == "L" else "RGB"
            if file.width * file.height > _MOST_PIXELS:
                raise ValueError(f"it has {file.width} x {file.height} pixels, and at most {_MOST_PIXELS:,} are read")
            image = file if file.mode == mode else file.convert(mode)  # which copies
            pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), np.float32)
    except Exception as error:  # decoders of damaged pictures raise anything: OSError, SyntaxError, struct.error, ...
        raise CalibrationError(
            str(path),
            f"it cannot be read as a picture: {error}",
            "remove it, or save the picture again, smaller if it is large",
        ) from error
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    pixels = pixels[..., ::-1] if pictures.colours == "BGR" else pixels
    mean, std = np.asarray(pictures.mean, np.float32), np.asarray(pictures.std, np.float32)
    pixels = (pixels * np.float32(pictures.scale) - mean) / std
    pixels = np.ascontiguousarray(pixels.transpose(2, 0, 1) if pictures.layout == "NCHW" else pixels)
    return pixels.astype(spec.dtype or "float32")


def _frame(spec: InputSpec, pictures: Pictures) -> tuple[int, int]:
    shape = spec.shape if spec.shape is not None and len(spec.shape) == 4 else (None,) * 4
    height, width = shape[2:] if pictures.layout == "NCHW" else shape[1:3]
    if height is None or width is None:
        raise ModelError(
            spec.name,
            f"the input {spec} does not say how large pictures are to be",
            "prepare the pictures yourself and give .npy files",
        )
    return height, width


def random_feeds(specs: Sequence[InputSpec], count: int = 1, seed: int = 0) -> Iterator[Feeds]:
    """Random data within the declared types and shapes; open axes get length 1.

    Floats are standard normal, integers and booleans 0 or 1, which index any table. They tell the shapes of a graph; encodings
    from such data are good for a look at the graph and for nothing else, which the caller says who calibrates on them.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield {spec.name: random_array(spec, rng) for spec in specs}


def example_feeds(specs: Sequence[InputSpec]) -> Feeds:
    """Random data for a model whose lengths are known, but for that of the batch.

    Raises:
        ConfigError: they are not.
    """
    for spec in specs:
        if spec.shape is None or None in spec.shape[1:]:
            problem = f"the input {spec} leaves more lengths open than that of the batch"
            raise ConfigError("generate_data", problem, "give an example: generate_data(model, {name: array})")
    return next(random_feeds(specs))


def random_array(spec: InputSpec, rng: np.random.Generator) -> Array:
    """One value for an input.

    Raises:
        ModelError: the type or the rank of the input is not known.
    """
    if spec.dtype is None or spec.shape is None:
        raise ModelError(spec.name, f"no random data can be made for the input {spec}", "give data of your own")
    shape = tuple(_FREE_AXIS if n is None else n for n in spec.shape)
    if math.prod(shape) > _MOST_RANDOM:
        problem = f"the input {spec} has more than {_MOST_RANDOM} elements, too many for random data"
        raise ModelError(spec.name, problem, "give data of your own, or correct the shape of the input")
    if np.dtype(spec.dtype).kind == "f":
        return rng.standard_normal(shape).astype(spec.dtype)
    return rng.integers(0, 2, shape).astype(spec.dtype)
