"""``sim.runs_as`` and ``bitwright evaluate``: an exported model as a target computes it, without the target."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.executed import CodeExecutor
from bitwright.compare.executed_flat import FlatExecutor
from bitwright.compare.sides import Side, check_feeds, open_side, read_model
from bitwright.errors import ConfigError, ExportError
from bitwright.executors.profile import Profile, find_profile
from bitwright.export.files.manifest import read_manifest
from bitwright.export.litert.convert import to_tflite
from bitwright.export.samples import find_export
from bitwright.export.targets import DEFAULT_TARGET
from bitwright.runtimes.adapters import find_runtime
from bitwright.runtimes.onnxruntime import FLOAT_KERNELS, new_session, session_options
from bitwright.tables import Tabular, html_table, text_table

Array = NDArray[Any]
Feeds = Mapping[str, Array]
Seen = Callable[[str, Array], None]


@dataclass(frozen=True)
class Port:
    """A graph input or output, with the attributes of ONNX Runtime's ``NodeArg``.

    Attributes:
        name: its name.
        shape: number or name of every axis, ``None`` for one that has neither; empty where the file states none.
    """

    name: str
    shape: Sequence[int | str | None] = ()

    @classmethod
    def of(cls, value: ir.Value) -> Port:
        """The port of a graph input or output."""
        axes = () if value.shape is None else value.shape
        return cls(str(value.name), [n if isinstance(n, int) else n.value for n in axes])


class TargetSession:
    """An exported model as a target computes it; used like a session of ONNX Runtime, so that metrics take it.

    Args:
        executor: of the file.
        model: the QDQ model that was exported, for names, types and shapes.
        label: for messages.
        exported: the target that the file was written for, where that is known.

    Attributes:
        profile: of the target.
        notes: what the profile does not settle, or other kernels computed.
    """

    def __init__(
        self, executor: CodeExecutor | FlatExecutor, model: ir.Model, label: str, exported: str | None = None
    ) -> None:
        self._executor, self._model, self._label = executor, model, label
        self.profile = executor.profile
        notes = [f"{key}: no public document of {self.profile.name} settles it" for key in self.profile.assumed]
        if isinstance(executor, FlatExecutor) and executor.by_reference:
            kinds = ", ".join(executor.by_reference)
            notes.append(f"{kinds}: computed by LiteRT's {self.profile.others} kernel, as the profile does not name it")
        if exported is not None and exported != self.profile.target:
            notes.append(
                f"the file was exported for {exported}, and {self.profile.name} computes files for {self.profile.target}: "
                f"its grids and biases may be none that the target takes; export with target={self.profile.target!r}"
            )
        self.notes = tuple(notes)

    def run(self, output_names: Sequence[str] | None, input_feed: Feeds, seen: Seen | None = None) -> list[Array]:
        """Outputs in the order of ``output_names``, all by default.

        Args:
            output_names: of graph outputs.
            input_feed: inputs by name; arrays of the exported model's shapes.
            seen: called with each tensor of codes that an integer kernel writes.

        Raises:
            ExportError: an input is missing or has another shape: the data is of another model.
        """
        feeds = check_feeds(self._side, input_feed)
        found = self._executor.run(feeds, output_names, seen)
        names = [port.name for port in self.get_outputs()] if output_names is None else output_names
        unknown = [name for name in names if name not in found]
        if unknown:
            problem = (
                f"it has no output {unknown[0]!r}; its outputs are {', '.join(p.name for p in self.get_outputs())}"
            )
            raise ExportError(self._label, problem, "name one of these")
        return [found[name] for name in names]

    @property
    def _side(self) -> Side:
        return Side(self._label, "file", Path(self._label), self._model)

    def get_inputs(self) -> list[Port]:
        """Graph inputs."""
        return [Port.of(v) for v in self._model.graph.inputs if not v.is_initializer()]

    def get_outputs(self) -> list[Port]:
        """Graph outputs."""
        return [Port.of(v) for v in self._model.graph.outputs]

    def __repr__(self) -> str:
        return f"TargetSession({self._label} as {self.profile.name})"


def target_of(profile: str | os.PathLike[str] | Profile, target: str) -> tuple[Profile, str]:
    """The profile, and the row of ``TARGETS`` that files for it are written for: its own where ``target`` is the default.

    Raises:
        ConfigError: there is no such profile, or files for ``target`` are of another format.
    """
    found = find_profile(profile)
    if target == DEFAULT_TARGET:
        target = found.target
    if found.reads == "tflite":
        find_runtime("litert")
    return found, target


def session_in_memory(model: ir.Model, example: Feeds, profile: Profile) -> TargetSession:
    """A session of a file that an export would write.

    Args:
        model: as ``to_qdq`` wrote it.
        example: one input by name.
        profile: of the target.

    Raises:
        ExportError: an operator has no form in LiteRT, for profiles that read such files.
    """
    if profile.reads == "onnx":
        return TargetSession(CodeExecutor(model, profile), model, "the model")
    content = to_tflite(model, example).content
    return TargetSession(FlatExecutor(content, profile, in_batches=counts_samples(model)), model, "the model")


def open_target(
    path: str | os.PathLike[str], profile: str | os.PathLike[str] | Profile, prefix: str | None = None
) -> TargetSession:
    """A session of an exported folder, or of a QDQ file.

    Args:
        path: a folder that an export wrote, or an ONNX file.
        profile: of the target: a name, or the path of a TOML file.
        prefix: stem of the files; needed only where a folder holds several exports.

    Raises:
        ConfigError: there is no such profile, or LiteRT is not installed and the profile reads its files.
        ExportError: there is no such file, or it was exported for another target.
    """
    found, place = find_profile(profile), Path(path)
    if found.reads == "onnx":
        side = open_side(place, prefix)
        manifest = side.path.with_name(f"{side.path.stem}_manifest.json")
        exported = str(read_manifest(manifest).settings.get("target", DEFAULT_TARGET)) if manifest.is_file() else None
        return TargetSession(CodeExecutor(side.model, found), side.model, str(path), exported)
    find_runtime("litert")
    if not place.is_dir():
        problem = f"profile {found.name} computes .tflite files, which lie in the folder of an export"
        raise ExportError(str(path), problem, f"name a folder that was exported with target={found.target!r}")
    stem = find_export(place, prefix)
    flat = place / f"{stem}.tflite"
    if not flat.is_file():
        problem = f"it holds no {flat.name}, which profile {found.name} computes"
        raise ExportError(str(path), problem, f"export with target={found.target!r}")
    model = read_model(place / f"{stem}.onnx")
    executor = FlatExecutor(flat.read_bytes(), found, in_batches=counts_samples(model))
    return TargetSession(executor, model, str(path))


def counts_samples(model: ir.Model) -> bool:
    """Whether the first axis of every input and output is the one that exports call ``batch``."""
    ends = [value for value in (*model.graph.inputs, *model.graph.outputs) if not value.is_initializer()]
    return all(v.shape is not None and len(v.shape) > 0 and str(v.shape[0]) == "batch" for v in ends)


@dataclass(frozen=True)
class TargetRow:
    """One way to compute a model.

    Attributes:
        how: ``float``, ``file`` (float kernels, every quantizer as it stands), or a profile.
        score: the metric.
        equal: share of output values equal to those of the file; ``None`` of the float model.
        seconds: of all batches.
    """

    how: str
    score: float
    equal: float | None
    seconds: float


@dataclass(frozen=True)
class TargetReport(Tabular):
    """Result of :func:`evaluate_target`."""

    _rows = "rows"

    rows: tuple[TargetRow, ...]
    profile: str
    notes: tuple[str, ...] = ()

    def to_text(self) -> str:
        """The answer, a table, and notes."""
        last, before = self.rows[-1], self.rows[-2]
        first = f"{self.profile}: {last.score:.6g}; the file itself {before.score:.6g}"
        return "\n".join([first, text_table(_HEAD, self._cells()), *(f"note: {note}" for note in self.notes)])

    __str__ = to_text

    def _cells(self) -> Iterable[tuple[str, ...]]:
        for row in self.rows:
            equal = "" if row.equal is None else f"{row.equal:.2%}"
            yield row.how, f"{row.score:.6g}", equal, f"{row.seconds:.2f} s"

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._cells(), f"On {self.profile}", [f"note: {note}" for note in self.notes])


_HEAD = ("computed as", "metric", "outputs equal to the file", "time")


class _Timed:
    """A session whose runs are timed, and whose outputs are kept."""

    def __init__(self, session: Any) -> None:
        self._session, self.seconds, self.kept = session, 0.0, list[Array]()

    def run(self, output_names: Sequence[str] | None, input_feed: Feeds, *options: Any) -> list[Array]:
        start = time.perf_counter()
        found: list[Array] = self._session.run(output_names, dict(input_feed))
        self.seconds += time.perf_counter() - start
        self.kept.extend(found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def evaluate_target(
    path: str | os.PathLike[str],
    profile: str | os.PathLike[str] | Profile,
    score: Callable[[Any], float],
    prefix: str | None = None,
) -> TargetReport:
    """The metric of a float model, of its exported file, and of the file as a target computes it.

    Args:
        path: a folder that an export wrote.
        profile: of the target: a name, or the path of a TOML file.
        score: from a session, with ``run(None, feeds)``, to the metric.
        prefix: stem of the files; needed only where a folder holds several exports.

    Raises:
        ConfigError, ExportError: see :func:`open_target`; the data is of another model; a model file was changed since it was
            exported.
    """
    place, rows = Path(path), list[TargetRow]()
    files = {"file": place}
    if place.is_dir():
        stem = find_export(place, prefix)
        _check_unchanged(place, stem)
        files = {"float": place / f"{stem}_float.onnx", "file": place / f"{stem}.onnx"}
    target = open_target(path, profile, prefix)
    reference: list[Array] = []
    for how, file in files.items():
        if file.is_file():
            session = _Timed(_Checked(new_session(file, session_options(entries=FLOAT_KERNELS)), target))
            found = float(score(session))
            reference = session.kept
            rows.append(TargetRow(how, found, 1.0 if how == "file" else None, session.seconds))
    timed = _Timed(target)
    found = float(score(timed))
    pairs = list(zip(reference, timed.kept, strict=False))
    same = sum(int((a == b).sum()) for a, b in pairs) / max(sum(a.size for a, _ in pairs), 1)
    rows.append(TargetRow(target.profile.name, found, same, timed.seconds))
    if not np.isfinite([row.score for row in rows]).all():
        raise ConfigError("metric", "it is not a finite number", "check the data and the labels")
    return TargetReport(tuple(rows), target.profile.name, target.notes)


def _check_unchanged(folder: Path, stem: str) -> None:
    """Refuse model files that are not those of the export: the float file, the file and the target would be three models."""
    manifest = folder / f"{stem}_manifest.json"
    if not manifest.is_file():
        return
    known = read_manifest(manifest)
    models = {entry.name for entry in known.files if entry.name.startswith((f"{stem}.", f"{stem}_float."))}
    changed = known.problems(folder, {name for name in models if (folder / name).is_file()})
    if changed:
        raise ExportError(str(manifest), "; ".join(changed), "export again, or restore the files")


class _Checked:
    """A session of ONNX Runtime that refuses data of another model as the target's does."""

    def __init__(self, session: Any, target: TargetSession) -> None:
        self._session, self._target = session, target

    def run(self, output_names: Sequence[str] | None, input_feed: Feeds, *options: Any) -> list[Array]:
        checked = check_feeds(self._target._side, input_feed)
        found: list[Array] = self._session.run(output_names, checked)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
