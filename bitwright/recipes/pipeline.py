"""Quantize several networks together, from runs of the program that calls them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.spec import Preset
from bitwright.core.simulation.calibration import refuse_one_batch
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.export.files.atomic import atomic_write, check_destination, check_stem
from bitwright.methods.front_end import Part, front_end_of
from bitwright.recipes.quantize import Result, quantize
from bitwright.report.document import POOR
from bitwright.tables import Tabular, plain, text_table

Array = NDArray[Any]
_FILE = "pipeline.json"


@dataclass(frozen=True)
class WholeOutput:
    """One output of the whole program, float against quantized, over all inputs that judge.

    Attributes:
        name: its path in what ``run`` returns.
        sqnr: dB over the inputs whose shapes agree; ``None`` for integers, booleans and text.
        equal: share of values that are the same; of text, of texts.
        other_shape: inputs for which the quantized program returned another shape, or lacked it.
        inputs: how many were compared.
    """

    name: str
    sqnr: float | None
    equal: float
    other_shape: int
    inputs: int


@dataclass(frozen=True)
class NetworkRow:
    """One network of a pipeline.

    Attributes:
        name: as in ``networks``.
        calls: how often the calibration runs called it.
        kept: of these, how many it was calibrated with.
        sqnr: dB of the worst of its own outputs, on calls that judge.
        whole_alone: dB of the worst output of the whole program where this network alone is quantized.
        files: folder of its files, relative to the pipeline's; empty without a path.
    """

    name: str
    calls: int
    kept: int
    sqnr: float | None
    whole_alone: float | None
    files: str = ""


@dataclass(frozen=True)
class PipelineResult(Tabular):
    """Result of :func:`quantize_pipeline`; ``result["unet"]`` is the result of one network.

    Attributes:
        networks: a row per network.
        whole: a row per output of the program, all networks quantized.
        judged: on which inputs the whole was compared.
        poor_below: dB below which the whole is called poor.
        results: what :func:`bitwright.quantize` returned for each network.
        path: folder of the files, ``None`` without one.
    """

    _rows: ClassVar[str] = "networks"

    networks: tuple[NetworkRow, ...]
    whole: tuple[WholeOutput, ...]
    judged: str
    poor_below: float
    results: Mapping[str, Result] = field(repr=False)
    path: Path | None
    _program: _Program = field(repr=False)

    def __getitem__(self, name: str) -> Result:
        return self.results[name]

    def run(self, item: Any) -> Any:
        """Result of ``run`` for one input with all networks quantized."""
        return self._program.run(item, {name: result.sim for name, result in self.results.items()})

    @property
    def sqnr(self) -> float | None:
        """dB of the worst output of the whole; ``None`` where it has no numbers."""
        return _worst(self.whole)

    @property
    def headline(self) -> str:
        """One line: the worst output of the whole program, or the reason why it has no rating."""
        lost = sum(row.other_shape > 0 for row in self.whole)
        shapes = f"; {lost} of {len(self.whole)} outputs change their shape for some inputs" if lost else ""
        if self.sqnr is None:
            equal = min((row.equal for row in self.whole), default=None)
            said = (
                "no outputs to compare" if equal is None else f"{equal:.1%} of the values of the worst output are equal"
            )
            return f"whole pipeline: {said}, {self.judged}{shapes}"
        poor = f"POOR, below {self.poor_below:g} dB; " if self.sqnr < self.poor_below else ""
        return f"{poor}whole pipeline: worst output {self.sqnr:.1f} dB, {self.judged}{shapes}"

    def __str__(self) -> str:
        head = ("network", "calls", "used", "own output", "whole with it alone")
        rows = [(r.name, str(r.calls), str(r.kept), _decibel(r.sqnr), _decibel(r.whole_alone)) for r in self.networks]
        outputs = [(r.name, _decibel(r.sqnr), f"{r.equal:.1%}", str(r.other_shape)) for r in self.whole]
        tables = [text_table(head, rows, right=(1, 2, 3, 4))]
        tables += [text_table(("output", "all quantized", "equal", "other shape"), outputs, right=(1, 2, 3))]
        each = [f"{name}: {result.headline}" for name, result in self.results.items()]
        return "\n".join([self.headline, *each, "", "\n\n".join(tables)])


@checks_arguments
def quantize_pipeline(
    networks: Mapping[str, Any],
    run: Callable[..., Any],
    inputs: Iterable[Any],
    preset: str | Preset | Mapping[str, Any] = "w8a8",
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    calls: int = 64,
    path: str | Path | None = None,
    poor_below: float = POOR,
    progress: bool = True,
) -> PipelineResult:
    """Quantize several networks together: calibrate each on its inputs in the whole program, and rate the whole.

    The float program runs once per input. What it passes to each network, over all of its steps, calibrates that network;
    every network is quantized by :func:`bitwright.quantize`, against its own float outputs. Then the program runs with all
    networks quantized, and with each alone, on inputs that no calibration saw.

    Args:
        networks: name -> ``torch.nn.Module`` that the program calls (not a method of it: ``vae.decoder``, not ``vae``, where
            the program calls ``vae.decode``), or ONNX model, as a path or in memory. Kinds may be mixed. They are left as
            they are.
        run: ``run(networks, item)`` runs the program for one input. It is given the modules themselves, which it may ignore
            where it holds them, and for an ONNX model an object with ``run(output_names, feeds)``, ``get_inputs()`` and
            whatever else an ``InferenceSession`` has. Random numbers of torch begin at the same seed in every run.
        inputs: of the program: prompts, pictures, recordings. From five on, the last fifth judges and calibrates nothing.
        preset: for all networks, or name -> preset.
        options: name -> arguments of :func:`bitwright.quantize` for that network: ``recipe``, ``config_file``, ``target``, ...
        calls: how many calls of each network are kept at most, drawn evenly from all (reservoir sampling with a fixed seed).
        path: folder to export to: ``<path>/<name>/<name>.onnx`` and what lies beside it, and ``pipeline.json``, the report.
        poor_below: dB of the worst output of the whole below which the result is called poor.
        progress: show progress bars on a terminal.

    Raises:
        CalibrationError: there is no input; or the float program answers twice differently.
        ConfigError: there is no network; a name that cannot be that of a folder; a network inside another; a preset or options
            of a name that is not among the networks, options that the pipeline sets itself; or a network that ``run``
            does not call.
        ModelError: a network cannot be read or quantized.

    Reference: Vitter 1985, "Random Sampling with a Reservoir", algorithm R.
    """
    options = {} if options is None else options
    parts = _parts_of(networks, path, calls)
    presets = _presets_of(networks, preset, options)
    refuse_one_batch(inputs, "quantize_pipeline")
    items = list(inputs)
    if not items:
        raise CalibrationError("quantize_pipeline", "there is no input", "give a few prompts, pictures or recordings")
    program = _Program(parts, run)
    runs = program.observed(items, calls)

    results: dict[str, Result] = {}
    for name, model in networks.items():
        files = None if path is None else Path(path) / name
        results[name] = quantize(
            model, runs.seen[name].batches(), presets[name], held_out=runs.judged[name].batches() or None, path=files,
            filename_prefix=name, progress=progress, **options.get(name, {}),
        )  # fmt: skip

    sims = {name: result.sim for name, result in results.items()}
    whole = program.compared(runs, sims)
    alone = {name: _worst(program.compared(runs, {name: sim})) for name, sim in sims.items()}
    rows = tuple(
        NetworkRow(
            name, runs.seen[name].count, len(runs.seen[name].kept), getattr(result.quality.worst, "sqnr", None),
            alone[name], "" if path is None else name,
        )
        for name, result in results.items()
    )  # fmt: skip
    done = PipelineResult(rows, whole, runs.where, poor_below, results, None if path is None else Path(path), program)
    if done.path is not None:
        _write(done, done.path / _FILE)
    return done


def _write(done: PipelineResult, path: Path) -> None:
    each = {name: result.headline for name, result in done.results.items()}
    document = {"headline": done.headline, "networks": done.networks, "outputs": done.whole, "judged": done.judged}
    with atomic_write(path) as file:
        file.write_text(json.dumps(plain({**document, "each": each}), indent=1), encoding="utf-8")


@dataclass(frozen=True)
class _Runs:
    """The float runs: inputs of every network, and what the program returned for the inputs that judge."""

    seen: Mapping[str, _Calls]
    judged: Mapping[str, _Calls]
    judging: Sequence[Any]
    reference: Sequence[Mapping[str, Any]]
    where: str


class _Program:
    """The user's function, with its networks in float or quantized."""

    def __init__(self, parts: Mapping[str, Part], run: Callable[[Mapping[str, Any], Any], Any]) -> None:
        self._parts, self._run = parts, run
        self._targets = {name: part.target for name, part in parts.items()}

    def run(self, item: Any, sims: Mapping[str, Any] | None = None) -> Any:
        with ExitStack() as stack:
            for part in self._parts.values():
                stack.enter_context(part.same_draws())
            for name, sim in (sims or {}).items():
                stack.enter_context(self._parts[name].replaced(sim))
            return self._run(self._targets, item)

    def observed(self, items: Sequence[Any], calls: int) -> _Runs:
        """Run the float program on everything; the last fifth judges."""
        held = len(items) // 5
        seen = {name: _Calls(calls) for name in self._parts}
        judged = {name: _Calls(max(1, calls // 4)) for name in self._parts}
        for item in items[: len(items) - held - 1]:
            with self._recorded(seen):
                self.run(item)
        last = items[len(items) - held - 1]
        with self._recorded(seen):
            reference = [_arrays(self.run(last))]
        if held:
            with self._recorded(judged):
                reference = [_arrays(self.run(item)) for item in items[len(items) - held :]]
        judging = items[len(items) - held :] if held else [last]
        _check_calls(seen)
        _check_repeats(reference[0], _arrays(self.run(judging[0])))
        where = f"on {held} of {len(items)} inputs, which nothing was fitted to"
        seen_too = "on the last input, which calibration saw too: give five or more"
        return _Runs(seen, judged, judging, reference, where if held else seen_too)

    def compared(self, runs: _Runs, sims: Mapping[str, Any]) -> tuple[WholeOutput, ...]:
        """Every output over all inputs that judge, the networks of ``sims`` quantized."""
        quantized = [_arrays(self.run(item, sims)) for item in runs.judging]
        found = []
        for name in dict.fromkeys(name for answer in runs.reference for name in answer):
            pairs = [(a[name], b.get(name)) for a, b in zip(runs.reference, quantized, strict=True) if name in a]
            found.append(_output(name, pairs))
        return tuple(found)

    @contextmanager
    def _recorded(self, calls: Mapping[str, _Calls]) -> Iterator[None]:
        with ExitStack() as stack:
            for name, part in self._parts.items():
                stack.enter_context(part.recorded(calls[name].add))
            yield


class _Calls:
    """At most ``size`` inputs of a network, sampled uniformly, in order."""

    def __init__(self, size: int) -> None:
        self.count, self._size = 0, size
        self.kept: list[tuple[int, Any]] = []
        self._random = np.random.default_rng(0)

    def add(self, call: Any) -> None:
        if self.count < self._size:
            self.kept.append((self.count, call))
        elif (place := int(self._random.integers(self.count + 1))) < self._size:
            self.kept[place] = (self.count, call)
        self.count += 1

    def batches(self) -> list[Any]:
        return [call for _, call in sorted(self.kept, key=lambda kept: kept[0])]


def _parts_of(networks: Mapping[str, Any], path: str | Path | None, calls: int) -> dict[str, Part]:
    if not networks:
        raise ConfigError("networks", "there is none", 'name the networks: {"encoder": encoder, "decoder": decoder}')
    if calls < 1:
        raise ConfigError("calls", f"{calls} is below 1", "64 calls of each network are usually enough")
    for name in networks:
        check_stem(name, "networks")
        if path is not None:
            check_destination(Path(path) / name, name)
    parts = {name: front_end_of(model).part(model) for name, model in networks.items()}
    for outer, part in parts.items():
        for inner, other in parts.items():
            if inner != outer and part.holds(other):
                problem = f"it is the network {outer!r}, or inside it, and would be quantized twice"
                raise ConfigError(f"networks[{inner!r}]", problem, "name one of the two")
    return parts


_OWN = {"model", "data", "preset", "held_out", "path", "filename_prefix", "progress"}


def _presets_of(networks: Mapping[str, Any], preset: Any, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The preset of each network; refuses options that the pipeline sets itself."""
    _check_names("options", options, networks)
    for name, given in options.items():
        if taken := sorted(given.keys() & _OWN):
            raise ConfigError(f"options[{name!r}]", f"{taken[0]!r} is set by the pipeline", "leave it out")
    if not isinstance(preset, Mapping):
        return dict.fromkeys(networks, preset)
    _check_names("preset", preset, networks)
    return dict.fromkeys(networks, "w8a8") | dict(preset)


def _check_names(argument: str, given: Mapping[str, Any], networks: Mapping[str, Any]) -> None:
    if unknown := sorted(given.keys() - networks.keys()):
        known = ", ".join(networks)
        raise ConfigError(argument, f"there is no network {unknown[0]!r}", f"use a name of networks: {known}")


def _check_calls(seen: Mapping[str, _Calls]) -> None:
    for name, calls in seen.items():
        if not calls.count:
            raise ConfigError(
                f"networks[{name!r}]",
                "the program did not call it",
                "name the module whose forward the program calls (vae.decoder where it calls vae.decode), or, of an ONNX "
                "model, let run(networks, item) use networks[name] instead of its own session",
            )


def _check_repeats(first: Mapping[str, Any], again: Mapping[str, Any]) -> None:
    """Refuse a program whose float answers differ from run to run: differences would not be those of quantization."""
    equal = first.keys() == again.keys() and all(_same(first[name], again[name]) for name in first)
    if not equal:
        raise CalibrationError(
            "run",
            "the float program gives two answers for one input",
            "seed what it draws inside run (torch.Generator().manual_seed(0), numpy.random.default_rng(0)), and begin from "
            "the same state",
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        close = one.shape == other.shape and np.issubdtype(one.dtype, np.number)
        return bool(np.allclose(one, other, 1e-3, 1e-5, equal_nan=True)) if close else np.array_equal(one, other)
    return bool(one == other)


def _arrays(answer: Any) -> dict[str, Any]:
    """Tensors, arrays, pictures, numbers and text in what a program returned, by path; nested containers are opened."""
    found: dict[str, Any] = {}
    stack: list[tuple[str, Any]] = [("output", answer)]
    while stack:
        name, item = stack.pop()
        if hasattr(item, "detach"):  # a tensor of torch
            item = item.detach().cpu()
            found[name] = (item.float() if item.is_floating_point() else item).numpy()
        elif isinstance(item, Mapping):
            stack.extend((f"{name}.{key}", value) for key, value in reversed(list(item.items())))
        elif isinstance(item, (list, tuple)):
            stack.extend((f"{name}[{i}]", value) for i, value in reversed(list(enumerate(item))))
        elif isinstance(item, (str, bytes)):
            found[name] = item
        elif isinstance(item, (int, float, np.ndarray, np.generic)) or hasattr(item, "__array_interface__"):
            found[name] = np.asarray(item)
    return found


def _output(name: str, pairs: Sequence[tuple[Any, Any]]) -> WholeOutput:
    """One output over all inputs; pictures (uint8) count as numbers."""
    good = [(a, b) for a, b in pairs if b is not None and np.shape(a) == np.shape(b)]
    equal = [float(np.mean(np.asarray(a) == np.asarray(b))) for a, b in good if np.size(a)]
    share = sum(equal) / (len(equal) + len(pairs) - len(good)) if equal else float(len(good) == len(pairs))
    numbers = [(np.ravel(a), np.ravel(b)) for a, b in good if isinstance(a, np.ndarray) and _is_measured(a)]
    ratio = sqnr(*map(np.concatenate, zip(*numbers, strict=True))) if numbers else None
    return WholeOutput(name, ratio, share, len(pairs) - len(good), len(pairs))


def _is_measured(array: Array) -> bool:
    return bool(np.issubdtype(array.dtype, np.floating)) or array.dtype == np.uint8


def _worst(rows: Iterable[WholeOutput]) -> float | None:
    return min((row.sqnr for row in rows if row.sqnr is not None), default=None)


def _decibel(value: float | None) -> str:
    if value is None:
        return "-"
    return "equal" if value == math.inf else f"{value:.1f} dB"
