"""``aimet_torch.mixed_precision``: manual and automatic mixed precision under AIMET's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, get_args

import torch
from torch import nn

from bitwright.aimet_common.defs import CallbackFunc, QuantizationDataType
from bitwright.aimet_common.names import differs, names_below
from bitwright.aimet_common.search import MOST_BATCHES, AMPSearchAlgo, choose
from bitwright.core.graph.graph import Op
from bitwright.errors import ConfigError
from bitwright.precision.manual import MODEL_INPUT, MODEL_OUTPUT, PrecisionReport, PrecisionRequest, set_precisions
from bitwright.torch.calls.inputs import walk_modules

__all__ = [
    "AMPSearchAlgo", "EvalCallbackFactory", "MixedPrecisionConfigurator", "Precision", "SupportedDType",
    "choose_mixed_precision",
]  # fmt: skip

__path__: list[str] = []  # its older submodules are rows of the table of aliases
__getattr__ = names_below(__name__)


SupportedDType = Literal["int16", "int8", "int4", "fp16"]


@dataclass(order=True)
class Precision:
    """A number format; int before float of the same width.

    Attributes:
        bitwidth, data_type: as AIMET has them.
    """

    _order: tuple[int, bool] = field(init=False, repr=False)
    data_type: QuantizationDataType = field(compare=False)
    bitwidth: int = field(compare=False)

    def __post_init__(self) -> None:
        self._order = self.bitwidth, self.data_type is not QuantizationDataType.int

    def __repr__(self) -> str:
        return f"{self.data_type.name}{self.bitwidth}"


class MixedPrecisionConfigurator:
    """Requests for precisions, put to a simulation at once by :meth:`apply`.

    Args:
        sim: the simulation.
    """

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self._requests: list[PrecisionRequest] = []
        self._ends: list[PrecisionRequest] = []  # of what they return to the caller of the model, unless it has its own

    def set_precision(
        self, arg: Any, activation: str | Sequence[str | None], param: dict[str, str] | None = None
    ) -> None:
        """Ask for a precision of modules, and of all modules below them.

        Args:
            arg: a module of ``sim.model``, a type of modules, or a list of these.
            activation: of what they read: ``"int16"``, ``"int8"``, ``"int4"``, ``"fp16"``; or one for each input.
            param: of their parameters: ``{"weight": "int8"}``.

        Raises:
            ConfigError: (a ValueError) no module of the simulation, another number of precisions than a module has inputs, or
                another name of a precision.
        """
        several = activation if isinstance(activation, (list, tuple)) else [activation]
        _check_precisions([*several, *(param or {}).values()])
        weight, ops = (param or {}).get("weight"), self._named(arg)
        if not isinstance(activation, str) and activation is not None:
            for op in ops:
                reads = [v for _, v in op.sources() if not self._sim.graph.values[v].is_static]
                self._requests.append(PrecisionRequest(op.name, None, weight))
                self._requests += _each(f"set_precision({op.module})", op.name, activation, reads)
            return
        self._requests.append(PrecisionRequest(tuple(sorted({op.module for op in ops})), activation, weight))
        made = {name for op in ops for name in op.outputs}
        ends = [f"{MODEL_OUTPUT}[{i}]" for i, name in enumerate(self._sim.graph.outputs) if name in made]
        self._ends += [PrecisionRequest(place, activation) for place in ends]

    def _named(self, arg: Any) -> list[Op]:
        """Operators of modules, types of modules, or a list of these."""
        several = list(arg) if isinstance(arg, (list, tuple, set)) else [arg]
        types = tuple(item for item in several if isinstance(item, type))
        wanted = {id(m) for item in several if isinstance(item, nn.Module) for m in item.modules()}
        paths = {
            path
            for path, module in walk_modules(self._sim.model)
            if path and (id(module) in wanted or any(_is_a(module, kind) for kind in types))
        }
        ops = [op for op in self._sim.graph.ops if op.module in paths]
        if not ops:
            raise ConfigError(
                "set_precision",
                f"{arg!r} is not a module of the simulation",
                "pass modules of sim.model, or their type",
            )
        return ops

    def set_model_input_precision(self, activation: str | Sequence[str | None]) -> None:
        """Ask for a precision of what the model takes: one of all inputs, or one per input, ``None`` to leave it."""
        self._requests += _at_ends(MODEL_INPUT, activation, self._sim.graph.inputs)

    def set_model_output_precision(self, activation: str | Sequence[str | None]) -> None:
        """Ask for a precision of what the model returns: one of all outputs, or one per output, ``None`` to leave it."""
        self._requests += _at_ends(MODEL_OUTPUT, activation, self._sim.graph.outputs)
        self._ends = []

    def apply(self, log_file: str | IO[str] = "./mmp_log.txt", strict: bool = True) -> PrecisionReport:
        """Carry the requests out, all of them or none.

        Args:
            log_file: path or open file, which gets what changed and why.
            strict: of :func:`bitwright.set_precisions`.
        """
        report = set_precisions(self._sim, [*self._requests, *self._ends], strict=strict)
        if hasattr(log_file, "write"):
            log_file.write(f"{report}\n")
        elif log_file:
            Path(log_file).write_text(f"{report}\n", encoding="utf-8")
        self._requests, self._ends = [], []
        return report


def _check_precisions(names: Iterable[str | None]) -> None:
    for name in names:
        if name is not None and name.lower() not in get_args(SupportedDType):
            raise ConfigError("set_precision", f"there is no precision {name!r}", f"use {get_args(SupportedDType)}")


def _at_ends(place: str, activation: str | Sequence[str | None], values: Sequence[str]) -> list[PrecisionRequest]:
    """Requests for the inputs or outputs of a model."""
    if isinstance(activation, str):
        return [PrecisionRequest(place, activation)]
    return _each(f"set_{place}_precision", place, activation, values)


def _each(call: str, place: str, activation: Sequence[str | None], values: Sequence[str]) -> list[PrecisionRequest]:
    """Requests for each of the tensors that a place has."""
    if len(activation) != len(values):
        raise ConfigError(
            call,
            f"{len(activation)} precisions are given, and there are {len(values)} tensors",
            "give one per tensor, None to leave it, or a single one for all",
        )
    return [PrecisionRequest(f"{place}[{i}]", text) for i, text in enumerate(activation) if text is not None]


def _is_a(module: nn.Module, kind: type) -> bool:
    return isinstance(module, kind) or type(module).__name__ == kind.__name__


def choose_mixed_precision(
    sim: Any,
    dummy_input: Any,
    candidates: list[Any],
    eval_callback_for_phase1: CallbackFunc,
    eval_callback_for_phase2: CallbackFunc,
    allowed_accuracy_drop: float | None,
    results_dir: str,
    clean_start: bool = True,
    forward_pass_callback: CallbackFunc | None = None,
    use_all_amp_candidates: bool = False,
    phase2_reverse: bool = False,
    phase1_optimize: bool = True,
    amp_search_algo: AMPSearchAlgo = AMPSearchAlgo.Binary,
) -> list[tuple[float, float, Any, float]]:
    """Choose the precision of every group of layers; see :func:`bitwright.mixed_precision`.

    Sensitivities are estimated from derivatives, so the callback of phase 1 is not called; the search is the same for every
    ``amp_search_algo``.

    Args:
        sim: calibrated; changed in place.
        dummy_input: a batch.
        candidates: ``((activation bits, type), (weight bits, type))``.
        eval_callback_for_phase2: ``CallbackFunc(f, args)``: ``f(model, args)`` is the metric; higher is better.
        allowed_accuracy_drop: of the metric; ``None`` takes the cheapest.
        forward_pass_callback: runs data through the model, on whose first batches sensitivities are estimated; on ``dummy_input``
            without it.
        results_dir: gets ``pareto_list.json`` and ``accuracy_list.json``.

    Returns:
        The Pareto list: (relative bit operations, metric, group -> candidate, predicted dB).
    """
    if not clean_start:
        differs("clean_start=False", "sensitivities take seconds and are always estimated anew")
    data = ([] if forward_pass_callback is None else _batches(sim, forward_pass_callback)) or [dummy_input]
    return choose(
        sim, data, candidates, eval_callback_for_phase2, allowed_accuracy_drop, results_dir, forward_pass_callback
    )


def _batches(sim: Any, forward_pass_callback: Callable[[Any], Any]) -> list[Any]:
    """The first batches that a function runs the model on."""
    found: list[Any] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(found) < MOST_BATCHES and not (args and kwargs):
            found.append(kwargs or (args[0] if len(args) == 1 else args))

    handle = sim.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with sim.in_float(), torch.no_grad():
            forward_pass_callback(sim.model)
    finally:
        handle.remove()
    return found


def _run(model: Any, batch: Any) -> Any:
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _energy(x: torch.Tensor) -> float:
    return float(x.double().square().sum())


class EvalCallbackFactory:
    """Callbacks that compare a model's outputs with the float model's.

    Args:
        data_loader: batches.
        forward_fn: ``forward_fn(model, batch)``; ``model(batch)`` by default, ``model(*batch)`` of several tensors.
    """

    def __init__(self, data_loader: Iterable[Any], forward_fn: Callable[[Any, Any], Any] | None = None) -> None:
        self._data = data_loader
        self._forward = forward_fn or _run

    def _first_batches(self, rows: int) -> list[Any]:
        """As many as hold ``rows`` rows."""
        batches: list[Any] = []
        for batch in self._data:
            batches.append(batch)
            rows -= len(batch) if isinstance(batch, torch.Tensor) else 1
            if rows <= 0:
                break
        return batches

    def sqnr(self, sim: Any = None, num_samples: int = 128) -> CallbackFunc:
        """SQNR of the outputs in dB, against those of the first call's model in float, over ``num_samples`` rows.

        The first argument may be the number, as in AIMET; a simulation there is not needed.
        """
        num_samples = sim if isinstance(sim, int) else num_samples
        batches = self._first_batches(num_samples)
        wanted: list[torch.Tensor] = []

        def evaluate(model: nn.Module, _: Any = None) -> float:
            with torch.no_grad():
                found = [self._first(self._forward(model, batch)) for batch in batches]
            if not wanted:
                wanted.extend(found)
            noise = sum(_energy(a - b) for a, b in zip(wanted, found, strict=True))
            signal = sum(map(_energy, wanted))
            return 100.0 if noise == 0 else float(10 * torch.log10(torch.tensor(signal / noise)))

        return CallbackFunc(evaluate)

    @staticmethod
    def _first(output: Any) -> torch.Tensor:
        found = output
        while not isinstance(found, torch.Tensor):
            found = next(iter(found.values())) if isinstance(found, dict) else found[0]
        return found
