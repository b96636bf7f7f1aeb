"""The executions that ``drift`` compares: the float model, the simulation, the exported file, the file in a runtime or as a
target computes it that is not here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.bodies import after_pools, pooled_places
from bitwright.compare.executed import CodeExecutor
from bitwright.compare.executed_flat import FlatExecutor
from bitwright.compare.litert import run_converted
from bitwright.compare.points import run_name
from bitwright.compare.runtime import run_in, run_model
from bitwright.errors import ConfigError, ExportError, close_matches
from bitwright.executors.profile import Profile, find_profile, profile_names
from bitwright.export.artefacts import Samples
from bitwright.export.edges import with_float_edges
from bitwright.export.files.manifest import read_manifest
from bitwright.export.files.onnx_file import load
from bitwright.export.qdq.lookups import restore_lookups, with_tables
from bitwright.export.samples import find_export, read_samples
from bitwright.runtimes.adapters import RUNTIMES, check_not_empty, explained, find_runtime, named_arrays, refusals_of
from bitwright.runtimes.onnxruntime import refusals

Array = NDArray[Any]
Feeds = Mapping[str, Array]

#: executions that are not runtimes, from the trained model to the exported file
_FIRST = ("float", "simulation", "file")
_FLAT = RUNTIMES["litert"]  # runs conversions of ONNX models, and of parts of them


@dataclass(frozen=True)
class Side:
    """One of the two executions.

    Attributes:
        label: what the user called it.
        how: ``float``, ``simulation``, ``file``, a row of :data:`bitwright.runtimes.adapters.RUNTIMES`, or a profile's name.
        path: of the ONNX file.
        model: the graph that is run; of a simulation the file it was exported to.
        values: of a simulation: site, graph input or graph output -> what it had there.
        profile: of a target whose executors compute it.
    """

    label: str
    how: str
    path: Path
    model: ir.Model
    values: Mapping[str, Sequence[Array]] = field(default_factory=dict)
    profile: Profile | None = None

    @property
    def in_runtime(self) -> bool:
        """Whether a runtime, or the executors of a target, compute it with kernels that they choose themselves."""
        return self.how in RUNTIMES or self.profile is not None

    @property
    def flat(self) -> bool:
        """Whether it runs conversions to LiteRT's format."""
        if self.profile is not None:
            return self.profile.reads == "tflite"
        return self.how in RUNTIMES and RUNTIMES[self.how].suffix == _FLAT.suffix

    @property
    def rank(self) -> int:
        """Position on the way from the trained model (0) to a runtime."""
        return _FIRST.index(self.how) if self.how in _FIRST else len(_FIRST)

    def run(
        self, model: ir.Model, feeds: Feeds, types: dict[str, str] | None = None, errors: dict[str, float] | None = None
    ) -> dict[str, Array]:
        """Outputs of ``model``, a part of the side's own or all of it, as the side executes it.

        Args:
            model, feeds: what is run, and on what.
            types: filled with codes -> the kernel that makes them, where the runtime tells.
            errors: filled with codes -> how far the arithmetic of that kernel is known to bring a value, in steps.

        Raises:
            ExportError: the runtime refuses it: its message, the operator it names, and what to change.
        """
        profile = self.profile
        row = _FLAT if self.flat else RUNTIMES[self.how if self.how in RUNTIMES else "onnxruntime"]
        with refusals_of(row, self.path):
            if profile is not None and self.flat:
                opened = partial(FlatExecutor, profile=profile)
                return _with_infinities(run_converted(model, feeds, types, errors, opened, profile.kernels))
            if profile is not None:
                executor = CodeExecutor(model, profile)
                made = {k.made: f"{k.node.op_type} {profile.kernels[k.node.op_type]}" for k in executor.kernels}
                (types if types is not None else {}).update(made)
                return named_arrays(executor.run(feeds))
            if self.flat:
                return _with_infinities(run_converted(model, feeds, types, errors))
            if self.in_runtime:
                return named_arrays(run_in(self.how, model, feeds, "integer", types))
            return named_arrays(run_model(model, feeds, "float"))

    def rerun(self, model: ir.Model, feeds: Feeds, **options: Any) -> dict[str, Array] | None:
        """``model`` in ONNX Runtime with other options of :func:`run_model`; ``None`` where it refuses that."""
        try:
            return named_arrays(run_model(model, feeds, **options))
        except refusals():
            return None


def _with_infinities(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Outputs of a LiteRT file, which holds the largest number of float32 where the model has an infinity, as in masks."""
    found = named_arrays(outputs)
    ends = np.finfo(np.float32)
    for name, array in found.items():
        if array.dtype == np.float32 and array.size and max(array.max(), -array.min()) >= ends.max:
            found[name] = np.where(np.abs(array) >= ends.max, np.copysign(np.float32(np.inf), array), array)
    return found


def open_sides(
    one: str | os.PathLike[str], other: str | os.PathLike[str], prefix: str | None = None
) -> tuple[Side, Side]:
    """Both sides of a comparison.

    Args:
        one, other: a folder that an export wrote, the ``.tflite`` file in it, or an ONNX file, with ``@float``,
            ``@simulation``, ``@file``, ``@<runtime>`` or ``@<profile>`` after it; or only that word, about what the other one
            names.
        prefix: stem of the files; needed only where a folder holds several exports.

    Raises:
        ConfigError: the word is none of these, no path is named, or the runtime is not installed.
        ExportError: there is no such file, or it cannot be read.
    """
    parts = [_split(os.fspath(text)) for text in (one, other)]
    known = [path for path, _ in parts if path]
    if not known:
        raise ConfigError(f"{one} {other}", "neither names a folder or a file", _how_to_name())
    first, second = (_open(path or known[0], how, prefix) for path, how in parts)
    if (first.how, first.path, first.profile) == (second.how, second.path, second.profile):
        problem = f"both are {first.label}, which does not differ from itself"
        raise ConfigError(f"{one} {other}", problem, "compare it with another execution or another file")
    return first, second


def open_side(path: str | os.PathLike[str], prefix: str | None = None) -> Side:
    """The file of an export, or an ONNX file.

    Raises:
        ExportError: there is no such file, or it cannot be read.
    """
    return _open(os.fspath(path), "", prefix)


def sides_in_memory(
    words: tuple[str, str], float_model: ir.Model, file_model: ir.Model, samples: Samples
) -> list[Side]:
    """The two sides that ``words`` name, of an export held in memory.

    Raises:
        ConfigError: a word is none, both are the same, or the runtime is not installed.
    """
    if words[0] == words[1]:
        problem = f"both are {words[0]!r}, which does not differ from itself"
        raise ConfigError("drift", problem, "compare it with another execution")
    values = {name: [array] for name, array in {**samples.outputs, **samples.inputs}.items()}
    file_model = with_tables(file_model)
    sides, known = [], _words()
    for word in words:
        profile = _profile_of(word)
        if word not in known and profile is None:
            problem = f"{word!r} is not an execution{close_matches(word, known)}"
            raise ConfigError("drift", problem, f"use one of {', '.join(known)}")
        _check_runtime(word, profile)
        kept = {**values, **_by_run(samples.sites, file_model)} if word == "simulation" else {}
        model = float_model if word == "float" else file_model
        sides.append(Side(word, word if profile is None else profile.name, Path("model.onnx"), model, kept, profile))
    return sides


def _words() -> tuple[str, ...]:
    """The executions that a side can name."""
    return (*_FIRST, *RUNTIMES, *profile_names())


def _profile_of(how: str) -> Profile | None:
    """The profile that a word names, if it is that of a target or of a TOML file."""
    return find_profile(how) if how.endswith(".toml") or how in profile_names() else None


def _check_runtime(how: str, profile: Profile | None) -> None:
    if how in RUNTIMES:
        find_runtime(how)
    if profile is not None and profile.reads == "tflite":
        find_runtime(_FLAT.name)


def _how_to_name() -> str:
    return f"write PATH, PATH@HOW or HOW: {', '.join(_words())}, or the path of a profile (.toml)"


def _split(text: str) -> tuple[str, str]:
    """The path and the execution that ``PATH@HOW`` names; either may be empty."""
    words = _words()
    if text.endswith(".toml") and "@" not in text:
        return "", text
    if Path(text).exists():
        return text, ""
    if text in words:
        return "", text
    path, at, how = text.rpartition("@")
    if not at and Path(text).suffix != ".onnx" and Path(text).name == text:
        problem = f"it is neither a file or folder nor an execution{close_matches(text, words)}"
        raise ConfigError(text, problem, _how_to_name())
    if not at:
        return text, ""
    if how not in words and not how.endswith(".toml"):
        problem = f"{how!r} is not an execution{close_matches(how, words)}"
        raise ConfigError(text, problem, _how_to_name())
    return path, how


def _open(text: str, how: str, prefix: str | None) -> Side:
    path, profile = Path(text), _profile_of(how)
    _check_runtime(how, profile)
    if not path.exists():
        raise ExportError(text, "there is no such file or folder", "check the path")
    if path.suffix == _FLAT.suffix:
        return _open_flat(path, how, profile)
    name = how if profile is None else profile.name
    if not path.is_dir():
        model = read_model(path)
        name = name or ("file" if has_quantizers(model) else "float")
        _check_file(text, name, model)
        return Side(f"{text}@{how or name}", name, path, model, profile=profile)
    stem, name = find_export(path, prefix), name or "file"
    if name == _FLAT.name or (profile is not None and profile.reads == "tflite"):
        _check_flat(path, stem)
    file = path / (f"{stem}_float.onnx" if name == "float" else f"{stem}.onnx")
    model = read_model(file)
    values = samples_of(path, stem, model) if name == "simulation" else {}
    return Side(f"{text}@{how or name}", name, file, model, values, profile)


def _check_file(text: str, how: str, model: ir.Model) -> None:
    """Refuse what an ONNX file alone does not keep."""
    if how == "simulation":
        problem = "a file alone does not keep what the simulation computed"
        raise ExportError(text, problem, "name the folder of the export, or compare with @file")
    if how == "float" and has_quantizers(model):
        problem = "the file holds quantizers, and a file alone does not keep the float model"
        raise ExportError(text, problem, "name the folder of the export, or the float model's own file")


def _open_flat(path: Path, how: str, profile: Profile | None) -> Side:
    """A LiteRT file: the model that it was converted from lies beside it."""
    if how not in ("", _FLAT.name) and (profile is None or profile.reads != "tflite"):
        problem = f"{path.name} is a LiteRT file, which only {_FLAT.name} runs"
        raise ExportError(f"{path}@{how}", problem, f"name the folder of the export: {path.parent}@{how}")
    if not path.with_name(f"{path.stem}_manifest.json").is_file():
        problem = "no export lies beside it, which says what its tensors are called in the model"
        raise ExportError(str(path), problem, "name the folder of an export with target='litert'")
    return _open(str(path.parent), how or _FLAT.name, path.stem)


def _check_flat(folder: Path, stem: str) -> None:
    """Refuse an export whose LiteRT file no longer matches its ONNX model, from which parts are converted."""
    names = (f"{stem}{_FLAT.suffix}", f"{stem}.onnx")
    if not (folder / names[0]).is_file():
        return
    told = read_manifest(folder / f"{stem}_manifest.json").problems(folder, names)
    if told:
        remedy = f"export again, or compare {names[1]}@{_FLAT.name}, which is converted anew"
        raise ExportError(str(folder / names[0]), "; ".join(told), remedy)


def samples_of(folder: Path, stem: str, model: ir.Model) -> dict[str, Sequence[Array]]:
    """Site, graph input or graph output -> the simulation's values that the export of ``model`` keeps.

    Raises:
        ExportError: it keeps none.
    """
    file = folder / f"{stem}_samples.npz"
    if not file.is_file():
        problem = "the export has no samples, which hold what the simulation computed"
        raise ExportError(str(file), problem, "export the model again with samples=True, or compare with @file")
    sites, inputs, outputs = read_samples(file)
    return {**{name: [array] for name, array in {**outputs, **inputs}.items()}, **_by_run(sites, model)}


def _by_run(sites: Mapping[str, Sequence[Array]], model: ir.Model) -> dict[str, Sequence[Array]]:
    """The simulation's value at each run of a site, by the name of the run, in the shapes that ``model`` has."""
    late = pooled_places(model)
    return {
        run_name(site, i, pooled=(site, i) in late): [array]
        for site, runs in after_pools(model, sites).items()
        for i, array in enumerate(runs)
    }


def sample_inputs(side: Side) -> dict[str, Array] | None:
    """The inputs that the export of ``side`` keeps with its samples, if there are any."""
    stem = side.path.stem.removesuffix("_float") if side.how == "float" else side.path.stem
    file = side.path.parent / f"{stem}_samples.npz"
    return read_samples(file)[1] if file.is_file() else None


def read_file(path: Path) -> ir.Model:
    """The model in a file.

    Raises:
        ExportError: it is missing, or is not an ONNX model.
    """
    if not path.is_file():
        raise ExportError(str(path), "there is no such file", "export the model again, or check the path")
    try:
        return load(path)
    except Exception as error:  # protobuf's own errors are not importable through onnx
        problem = f"it cannot be read as an ONNX model: {explained(error)}"
        raise ExportError(str(path), problem, "name an .onnx file, or the folder of an export") from error


def read_model(path: Path) -> ir.Model:
    """:func:`read_file`, with quantized tables as constants in front of the operators that look rows up in them."""
    model = with_float_edges(read_file(path))
    # files of old exporters list every initializer among the inputs as well
    for value in [v for v in model.graph.inputs if v.is_initializer()]:
        model.graph.inputs.remove(value)
    restore_lookups(model)
    return model


def has_quantizers(model: ir.Model) -> bool:
    """Whether ``model`` holds a QuantizeLinear or DequantizeLinear."""
    return any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in model.graph.all_nodes())


def check_feeds(side: Side, feeds: Feeds) -> dict[str, Array]:
    """``feeds`` as ``side`` takes them.

    Raises:
        ExportError: an input has no value, or one of another type or shape: the data is of another model. There is no sample,
            or NaN where the input is quantized.
    """
    inputs = {str(v.name): v for v in side.model.graph.inputs if not v.is_initializer()}
    missing = next((name for name in inputs if name not in feeds), None)
    if missing is not None:
        raise ExportError(
            side.label,
            f"the data has no input {missing!r}{close_matches(missing, feeds)}; it holds {', '.join(feeds) or 'none'}",
            "give the data of this model, with arrays named after its inputs",
        )
    arrays = {name: np.asarray(feeds[name]) for name in inputs}
    check_not_empty(side.label, arrays)
    for name, value in inputs.items():
        _check_array(side, value, arrays[name])
    return arrays


def _check_array(side: Side, value: ir.Value, array: Array) -> None:
    axes = array.shape if value.shape is None else [n if isinstance(n, int) else "?" for n in value.shape]
    fits = (n in ("?", m) for n, m in zip(axes, array.shape, strict=False))
    if len(axes) != array.ndim or not all(fits):
        shown, given = ("x".join(map(str, shape)) for shape in (axes, array.shape))
        problem = f"its input {value.name!r} is {shown}, and the data has {given}"
        raise ExportError(side.label, problem, "give the data of this model")
    # NaN has no code, and every runtime makes another one of it
    quantized = any(use.node.op_type == "QuantizeLinear" for use in value.uses())
    if quantized and np.issubdtype(array.dtype, np.floating) and np.isnan(array).any():
        problem = f"its input {value.name!r} is quantized, and the data holds {int(np.isnan(array).sum())} NaN there"
        raise ExportError(side.label, problem, "leave these samples out, or repair what makes them")
