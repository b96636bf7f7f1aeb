"""Find the call of a PyTorch model that turned finite numbers into NaN or Inf, and the reason.

The unchanged model runs on the data while a :class:`Doctor` follows NaN and Inf through its calls. It sums every result; only
where a sum is not finite does it measure the operands of the call and look up the line of the user's code. Memory from
``torch.empty`` is filled with NaN, so that a read before the first write is found in every run.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from bitwright.core.health.diagnosis import Finding, diagnose, remedy
from bitwright.core.health.report import (
    CLEAN,
    HALVES,
    Culprit,
    Event,
    Flags,
    HealthReport,
    TensorHealth,
    TensorKind,
    Tracker,
    measure_tensor,
)
from bitwright.core.simulation.calibration import refuse_empty, refuse_one_batch
from bitwright.errors import BitwrightError, CalibrationError, ConfigError
from bitwright.progress import progress as shown
from bitwright.torch.calls.functions import FUNCTIONS, SET_ITEM, Args, Func, Kwargs, function_of
from bitwright.torch.calls.inputs import (
    as_call,
    evaluation,
    flatten_tensors,
    map_tensors,
    model_device,
    named_state,
    refuse_providers,
    tensors_in,
    to_device,
    walk_modules,
)
from bitwright.torch.interception.intercept import OUTERMOST, Frame, Interceptor, Key, forward_signature
from bitwright.torch.interception.record import Recorder, explained, find_places, named_inputs, output_name

_EMPTY = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"))
_RECURRENT = {"LSTM": "ifgo", "GRU": "rzn"}  # names of the gates, in the order of their rows in the weights
_TYPES = {row.label: row.type for row in FUNCTIONS.values() if isinstance(row.type, str)}  # sqrt_ is a Sqrt
_DETAILS = 1000  # calls of one batch that are measured; a loop may make thousands
_NOTES = 16
_CODE = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)


@dataclass(eq=False)
class _Seen:
    """A tensor of a call: its health, and the recorded value that names it."""

    health: TensorHealth
    value: int | None = None


@dataclass(eq=False)
class _Detail:
    """One origin of NaN or Inf, measured when it happened."""

    key: Key
    token: str
    path: str
    label: str
    op_type: str
    attrs: dict[str, Any]
    operands: list[_Seen | None] = field(default_factory=list)
    outputs: list[_Seen] = field(default_factory=list)
    needed: float | None = None
    source: str | None = None
    batch: int = 0
    sample: int | None = None
    addition: str = ""
    event: Event | None = None
    batches: int = 1


class Doctor(Recorder):
    """A handler that runs every call unchanged and follows non-finite values.

    Attributes:
        batches: runs of the model so far.
        bad_params: parameters that are not finite, see :meth:`look_at_parameters`.
        notes: for the report.
    """

    def __init__(
        self, interceptor_of: Callable[[], Interceptor], signature: inspect.Signature | None, name: str
    ) -> None:
        super().__init__(interceptor_of, signature)
        self.name, self.batches, self.count = name, 0, 0
        self.repaired: Callable[[Key, Callable[..., Any]], Callable[..., Any]] | None = None
        self.bad_params: list[TensorHealth] = []
        self.bad_inputs: list[TensorHealth] = []
        self.notes: list[str] = []
        self._tokens: dict[Key, str] = {}
        self._labels: dict[str, tuple[Key, str]] = {}
        self._accused: dict[tuple[str, str], _Detail] = {}
        self._harmless: dict[str, str] = {}
        self._start()

    @property
    def interceptor(self) -> Interceptor:
        """The interceptor of the model's calls."""
        return self._interceptor_of()

    def _start(self) -> None:
        self.tracker = Tracker()
        self._details: dict[int, _Detail] = {}
        self._given: dict[int, str] = {}  # storage of a model input -> its name
        self._rows: int | None = None

    # -- before and around a run

    def look_at_parameters(self, model: nn.Module) -> None:
        """Record the parameters that hold NaN or Inf; a buffer of infinities is a mask."""
        for name, tensor in named_state(model):
            flags = flags_of(tensor)
            if flags.nan or (flags.bad and isinstance(tensor, nn.Parameter)):
                self.bad_params.append(measure_tensor(name, tensor, "param"))

    def begin(self, args: Args, kwargs: Mapping[str, Any]) -> None:
        """Start a batch, and check the model's inputs."""
        super().begin(args, kwargs)
        self._start()
        with torch._C.DisableTorchFunction():  # what is called here is not the model's
            self._look_at_inputs(args, kwargs)

    def _look_at_inputs(self, args: Args, kwargs: Mapping[str, Any]) -> None:
        for name, tensor in named_inputs(self.signature, args, kwargs):
            if not _is_readable(tensor):
                continue
            if self._rows is None and tensor.dim():
                self._rows = int(tensor.shape[0])
            flags = flags_of(tensor)
            self._given[_storage(tensor)] = name
            event = self.tracker.source(_storage(tensor), name, "input", flags)
            if event is not None:
                health = measure_tensor(name, tensor, "input")
                self.bad_inputs.append(replace(health, name=f"{name}, batch {self.batches}"))
                self._details[event.index] = self._of_input(name, health, event)

    def _of_input(self, name: str, health: TensorHealth, event: Event) -> _Detail:
        sample = health.first_bad[0] if health.first_bad and health.shape[0] == self._rows else None
        detail = _Detail(name, name, "", name, "input", {}, [_Seen(health)], batch=self.batches)
        detail.sample, detail.event = sample, event
        return detail

    def end(self, output: Any) -> None:
        """End a batch."""
        self.returns(output)
        super().end(output)
        self._close()

    def returns(self, output: Any) -> None:
        """Find the origin of non-finite values in the returned ``output``."""
        with torch._C.DisableTorchFunction():
            for path, tensor in flatten_tensors(output):
                if _is_readable(tensor):
                    self.tracker.output(output_name(path), _storage(tensor), flags_of(tensor))

    def fail(self, error: Exception) -> bool:
        """Handle an error of the model. Returns whether non-finite values were seen before, which then explain it."""
        if isinstance(error, BitwrightError):
            return False
        for event in self.tracker.events:
            event.reported = event.reported or not (event.meant or event.op_type in _EMPTY)
        self._live.clear()
        if not self.tracker.reported:
            return False
        self.notes.append(f"the model fails on batch {self.batches}: {type(error).__name__}: {error}")
        self._close()
        return True

    def _close(self) -> None:
        for event in self.tracker.events:
            detail = self._details.get(event.index)
            if not event.reported:
                if event.op_type not in _EMPTY and len(self._harmless) < _NOTES:
                    self._harmless.setdefault(event.op, "constant" if event.meant else event.op_type)
                continue
            known = self._accused.get((event.op, event.op_type))
            if known is not None:
                known.batches += known.batch != self.batches
            elif detail is not None:
                self._accused[event.op, event.op_type] = detail
        self.batches += 1
        self._start()

    # -- every call

    def _note(
        self, frame: Frame, key: Key, label: str, op_type: str, inputs: Sequence[int | None], attrs: dict[str, Any],
        func: Func, args: Args, kwargs: Kwargs,
    ) -> Any:  # fmt: skip
        self.count += 1
        if function_of(func) is None:
            op_type = _TYPES.get(label, op_type)
        written = _written(func, args, kwargs)
        before = _copy_of(written)
        reads = _operands(func, op_type, args, kwargs)
        values = list(map(self._value_of, reads))
        run = func if self.repaired is None or func is SET_ITEM else self.repaired(key, func)
        output = super()._note(frame, key, label, op_type, inputs, attrs, run, args, kwargs)
        made = list(filter(_is_readable, tensors_in(args[0] if func is SET_ITEM else output)))
        if label in _EMPTY:
            _fill_with_nan(made)
        flags = list(map(flags_of, made))
        if not self.tracker.busy and not any(f.bad for f in flags):
            return output
        known = reads if before is None else [before if t is written else t for t in reads]
        detail = _Detail(key, self._token(key, frame, label), frame.path, label, op_type, attrs, batch=self.batches)
        event = self._tell(detail, reads, known, list(zip(made, flags, strict=True)))
        if event is not None and len(self._details) < _DETAILS:
            detail.event = event
            self._measure(detail, known, values, made, (func, args, kwargs, written))
            self._details[event.index] = detail
        return output

    def _value_of(self, operand: Any) -> int | None:
        return self._known(operand) if isinstance(operand, torch.Tensor) else None

    def _new(
        self, kind: str, tensor: torch.Tensor, name: str, param: str | None = None,
        keep: torch.Tensor | None = None,
    ) -> int:  # fmt: skip
        return super()._new(kind, tensor, name, param)  # nothing is kept of any batch

    def _token(self, key: Key, frame: Frame, label: str) -> str:
        """Token of a call site for the tracker; readable names are resolved after all batches."""
        token = self._tokens.get(key)
        if token is None:
            token = self._tokens[key] = f"#{len(self._tokens)}"
            self._labels[token] = (key, f"{frame.path}.{label}" if frame.path else label)
        return token

    def _tell(
        self, detail: _Detail, reads: Sequence[Any], known: Sequence[Any], made: Sequence[tuple[torch.Tensor, Flags]]
    ) -> Event | None:
        """Pass a call to the tracker; returns the event if the call is its origin."""
        told: list[tuple[int, Flags]] = []
        for tensor, value in zip(reads, known, strict=True):
            if not isinstance(tensor, torch.Tensor) or not _is_readable(tensor):
                told.append((-1, CLEAN))  # keeps the ports in order
                continue
            flags, storage = flags_of(value), _storage(tensor)
            if flags.bad and not self.tracker.knows(storage):
                self._meant(tensor, storage, flags)
            told.append((storage, flags))
        storages = {storage for storage, _ in told}
        wrote = [(_storage(t), f) for t, f in made if f.bad or _storage(t) not in storages]
        return self.tracker.call(detail.token, detail.op_type, told, wrote)

    def _meant(self, tensor: torch.Tensor, storage: int, flags: Flags) -> None:
        """Record that a tensor of unknown origin holds infinities: a mask among the model's buffers and attributes."""
        name = self.interceptor.param_name(tensor) or self.interceptor.attribute_name(tensor)
        if name is not None:
            self.tracker.source(storage, name, "constant", flags)

    # -- at an origin

    def _measure(
        self,
        detail: _Detail,
        known: Sequence[Any],
        values: Sequence[int | None],
        made: Sequence[torch.Tensor],
        call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], torch.Tensor | None],
    ) -> None:
        detail.operands = [self._seen(x, v) for x, v in zip(known, values, strict=True)]
        detail.outputs = [_Seen(measure_tensor("", t), self._known(t)) for t in made]
        detail.source = source_line(sys._getframe(1))
        if any(seen.health.dtype in HALVES for seen in detail.outputs) and call[3] is None:
            detail.needed = _in_float32(*call[:3])
        if detail.label in _EMPTY:
            detail.attrs = {**detail.attrs, "uninitialised": True}
        recurrent = detail.op_type in _RECURRENT or detail.op_type == "RNN"
        if recurrent:
            detail.addition = _first_step(call[1], made)
        for seen in detail.outputs:
            first = seen.health.first_bad
            if first and recurrent and len(first) == 3:
                detail.sample = first[1 - _step_axis(call[1], made)]
                break
            if first and seen.health.shape[0] == self._rows:
                detail.sample = first[0]
                break

    def _seen(self, x: Any, value: int | None) -> _Seen | None:
        if isinstance(x, (int, float)) and not isinstance(x, bool):
            return _Seen(measure_tensor("the number", x, "constant"))
        if not isinstance(x, torch.Tensor) or not (_is_readable(x) or not x.is_floating_point()):
            return None
        name = self.interceptor.param_name(x)
        if name is not None:
            return _Seen(measure_tensor(name, x, "param"))
        given = self._given.get(_storage(x))
        kind: TensorKind = "activation" if given is None else "input"
        return _Seen(measure_tensor(given or "", x, kind), value)

    # -- the report

    def report(self) -> HealthReport:
        """The findings so far."""
        names = self._names()
        found = [self._culprit(detail, names) for detail in self._accused.values()]
        notes = [
            f"{names.get(op, op)} ({what}) makes values that are not finite; nothing of them is left at the end"
            for op, what in self._harmless.items()
            if (op, what) not in self._accused
        ]
        params = [self._of_param(health) for health in self.bad_params]
        return HealthReport(
            self.name,
            (*params, *found),
            tuple(self.bad_inputs),
            tuple(self.bad_params),
            (*self.notes, *notes),
            self.batches,
            self.count,
        )

    def _names(self) -> dict[str, str]:
        self.graph()
        calls = self.calls
        return {token: calls[key].name if key in calls else label for token, (key, label) in self._labels.items()}

    def _of_param(self, health: TensorHealth) -> Culprit:
        module, _, leaf = health.name.rpartition(".")
        problem = f"it holds {health.nan} NaN and {health.inf} Inf, the first at {list(health.first_bad or ())}"
        owner = next((m for path, m in walk_modules(self.interceptor.model) if path == module), None)
        gates = _RECURRENT.get(type(owner).__name__.removesuffix("Cell"), "")
        if gates and health.first_bad and not leaf.startswith("weight_hr"):
            gate = gates[health.first_bad[0] * len(gates) // health.shape[0]]
            problem += f", in the rows of gate {gate}"
        cause = "bad parameter"
        return Culprit(health.name, "param", module, cause, problem, remedy(cause), params=(health,))

    def _culprit(self, detail: _Detail, names: Mapping[str, str]) -> Culprit:
        operands = [None if seen is None else self._named(seen) for seen in detail.operands]
        outputs = [self._named(seen) for seen in detail.outputs]
        if detail.op_type == "input":
            health = detail.operands[0].health if detail.operands[0] else None
            assert health is not None
            problem = f"it holds {health.nan} NaN and {health.inf} Inf, the first at {list(health.first_bad or ())}"
            finding = Finding("bad input data", problem, remedy("bad input data"))
        else:
            finding = diagnose(detail.op_type, detail.attrs, operands, outputs, detail.needed, "torch")
        tensors = [x for x in operands if x is not None]
        event = detail.event
        assert event is not None
        return Culprit(
            names.get(detail.token, detail.token),
            detail.op_type,
            detail.path,
            finding.cause,
            finding.problem + detail.addition,
            finding.remedy,
            detail.source,
            detail.batch,
            detail.sample,
            tuple(x for x in tensors if x.kind != "param"),
            tuple(x for x in tensors if x.kind == "param"),
            tuple(outputs),
            event.spread,
            tuple(names.get(token, token) for token in event.names),
            tuple(event.reached),
            detail.batches,
        )

    def _named(self, seen: _Seen) -> TensorHealth:
        if seen.health.name or seen.value is None:
            return seen.health if seen.health.name else replace(seen.health, name="a tensor")
        return replace(seen.health, name=self.value_names[seen.value])


# ------------------------------------------------------------------------------------------------ looking at tensors


def _copy_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.detach().clone() if tensor is not None and _is_readable(tensor) else None


def _fill_with_nan(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.detach().fill_(torch.nan)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether the elements can be read: not in fake, transformed, sparse or integer tensors."""
    return (
        tensor.is_floating_point()
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and tensor.dtype in _SUMMED
    )


_SUMMED = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def flags_of(tensor: torch.Tensor) -> Flags:
    """Kinds of non-finite values in ``tensor``; one reduction where there are none."""
    tensor = tensor.detach()
    if not _is_readable(tensor) or bool(tensor.sum(dtype=_SUMMED[tensor.dtype]).isfinite()):
        return CLEAN
    return Flags(bool(tensor.isnan().any()), bool((tensor == torch.inf).any()), bool((tensor == -torch.inf).any()))


def _storage(tensor: torch.Tensor) -> int:
    """Key of the memory that a tensor's views share."""
    return int(tensor.untyped_storage()._cdata)


def _operands(func: Func, op_type: str, args: Args, kwargs: Mapping[str, Any]) -> list[Any]:
    """Tensors and numbers in port order, with the states and parameters of a recurrent layer."""
    row = function_of(func)
    if row is None or op_type in _RECURRENT or op_type == "RNN":
        return tensors_in((args, kwargs))
    return [value for _, value in row.operands(row.bind(args, kwargs))]


def _written(func: Func, args: Args, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor that a call writes into, if it does."""
    name = str(getattr(func, "__name__", ""))
    in_place = (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i")
        and name.endswith("__")
        and name not in ("__iter__", "__index__", "__int__", "__invert__")
    )
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]
    if args and isinstance(args[0], torch.Tensor) and (in_place or func is SET_ITEM or kwargs.get("inplace")):
        return args[0]
    return None


def _in_float32(func: Func, args: Args, kwargs: Kwargs) -> float | None:
    """Largest magnitude of the result in float32; ``None`` where the call cannot be repeated so."""
    wide_args, wide_kwargs = map_tensors((args, kwargs), lambda t: t.detach().float() if t.is_floating_point() else t)
    try:
        output = func(*wide_args, **wide_kwargs)
    except (RuntimeError, TypeError, ValueError):
        return None  # it insists on its type: the estimate from the operands stands
    floats = [t[t != -torch.inf] for t in tensors_in(output) if t.is_floating_point()]  # masks aside
    return max((float(t.abs().max()) for t in floats if t.numel()), default=None)


def _first_step(args: Args, made: Sequence[torch.Tensor]) -> str:
    """``"; the first step that shows it is 7 of 20"`` for a fused recurrent layer."""
    if not made or made[0].dim() < 2:
        return ""
    axis = _step_axis(args, made)
    bad = ~made[0].isfinite()
    steps = bad.movedim(axis, 0).reshape(made[0].shape[axis], -1).any(1)
    return f"; the first step that shows it is {int(steps.int().argmax())} of {steps.numel()}"


def _step_axis(args: Args, made: Sequence[torch.Tensor]) -> int:
    """The axis of the time steps in what a fused recurrent layer returns first."""
    flags = [value for value in args if isinstance(value, bool)]
    return 0 if made[0].dim() == 2 else int(bool(flags and flags[-1] and len(flags) >= 4))


def source_line(frame: FrameType | None) -> str | None:
    """``file.py:12: y = x / n`` of the innermost frame of the user's code within the model's forward."""
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_code is OUTERMOST:
            return None  # the stock modules alone
        if not name.startswith(_CODE) and not name.startswith("<"):
            code = linecache.getline(name, frame.f_lineno).strip()
            return f"{Path(name).name}:{frame.f_lineno}: {code}" if code else f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def check_health(model: nn.Module, data: Any, providers: Any, threads: int, progress: bool) -> HealthReport:
    """See :func:`bitwright.methods.stabilize.check_model`.

    Raises:
        ConfigError: ``providers`` or ``threads`` are given.
        CalibrationError: no data.
    """
    refuse_providers(providers)
    if threads:
        raise ConfigError("threads", f"{threads} is given for a PyTorch module", "call torch.set_num_threads instead")
    if data is None:
        raise CalibrationError(
            "check_model",
            "no data was given, and a module does not say what it takes",
            "write check_model(model, [batch])",
        )
    interceptor = Interceptor(model)
    doctor = _doctor(interceptor)
    doctor.look_at_parameters(model)
    if doctor.bad_params:
        return doctor.report()
    interceptor.attach()
    try:
        with torch.no_grad(), evaluation(model):
            return _feed(interceptor, data, progress).report()
    finally:
        interceptor.detach()


def _doctor(interceptor: Interceptor) -> Doctor:
    model = interceptor.model
    return Doctor(lambda: interceptor, forward_signature(model), type(model).__name__)


def _feed(interceptor: Interceptor, data: Iterable[Any] | Callable[..., Any], show: bool) -> Doctor:
    if not callable(data):
        refuse_one_batch(data, "check_model", "check_model(model, [batch])")
    doctor = _doctor(interceptor)
    try:
        if callable(data):
            with interceptor.handled_by(doctor):
                _run_callback(interceptor.model, data, doctor)
            return doctor
        device = model_device(interceptor.model)
        for batch in shown(data, "checking", show):
            call = as_call(to_device(batch, device))
            refuse_empty(doctor.batches, _shapes(call))
            if doctor.batches:
                _examine(doctor, *call)
            else:  # again, where layers share parameters or loop: the places are those of a simulation
                doctor = find_places(interceptor, lambda call=call: _examine(_doctor(interceptor), *call), 1)  # type: ignore[misc]
    except KeyboardInterrupt:
        doctor.notes.append(f"interrupted after {doctor.batches} batches")
        return doctor
    if not doctor.batches:
        raise CalibrationError(
            "check_model", "the data held no batch", "pass a non-empty list (a generator can be used only once)"
        )
    return doctor


def _shapes(call: tuple[Any, ...]) -> dict[str, tuple[int, ...]]:
    return {f"input {i}": tuple(tensor.shape) for i, tensor in enumerate(tensors_in(call))}


def _examine(doctor: Doctor, args: Args, kwargs: Kwargs) -> Doctor:
    """Run the model on one batch."""
    model = doctor.interceptor.model
    try:
        with doctor.interceptor.handled_by(doctor):
            model(*args, **kwargs)
    except Exception as error:
        if not doctor.fail(error):
            raise explained(model, doctor.interceptor.failed_in, args, kwargs, error) from error
    return doctor


def _run_callback(model: nn.Module, callback: Callable[..., Any], doctor: Doctor) -> None:
    """Run a callback as one batch, whose outputs are those of the model and of the callback.

    Its first call of the model tells the places, where layers share parameters or loop.
    """
    interceptor = doctor.interceptor
    told: list[bool] = []
    apart: list[bool] = []

    def tell_places(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if not apart:
            refuse_empty(0, _shapes((args, kwargs)))
        if not told:
            told.append(True)
            apart.append(True)
            find_places(interceptor, lambda: _examined_apart(interceptor, args, kwargs), 1)
            apart.clear()

    hooks = [
        model.register_forward_pre_hook(tell_places, with_kwargs=True),
        model.register_forward_hook(lambda module, args, output: None if apart else doctor.returns(output)),
    ]
    try:
        with interceptor.active():
            doctor.begin((), {})
            doctor.end(callback(model))
    finally:
        for hook in hooks:
            hook.remove()


def _examined_apart(interceptor: Interceptor, args: Args, kwargs: Mapping[str, Any]) -> Doctor:
    """Run one separate forward, also during another."""
    doctor = _doctor(interceptor)
    with interceptor.suspended(doctor), torch.no_grad():
        interceptor.model(*args, **kwargs)
    return doctor


def diagnose_batch(
    interceptor: Interceptor,
    args: Args,
    kwargs: Mapping[str, Any],
    repaired: Callable[[Key, Callable[..., Any]], Callable[..., Any]] | None = None,
) -> HealthReport:
    """The report of one batch on the float model of a simulation, also during its own forward.

    ``repaired`` gives the function that takes the place of another at a call, where repairs are in effect.
    """
    doctor = _doctor(interceptor)
    doctor.repaired = repaired
    with interceptor.suspended(doctor), torch.no_grad():
        interceptor.model(*args, **kwargs)
    return doctor.report()
