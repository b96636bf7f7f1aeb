"""Intercept every torch function that a model calls while its forward runs.

A :class:`TorchFunctionMode` sees the calls, and what stands in place of each module's forward tells which module is
running. What runs belongs to its thread: threads share the plan of a simulation, never where they are in it. A call is
identified by its *key*: where in the module tree it happens and where in that module's forward, counted from the last use
of parameters:

- a module that owns parameters or buffers is one place, however often it runs (time steps share their sites);
- a call that reads a parameter directly is the place of that parameter;
- where either stands on several lines of code, one after the other in the data flow, each line is a place of its own: layers
  that share a weight, and not a layer over time (:func:`bitwright.torch.interception.places.find_turns`);
- where one line calls either in a loop as layers of a chain, and not over time, each turn is a place of its own
  (:mod:`bitwright.torch.interception.places`);
- anything else counts from the last such place in the same forward: ``for l in self.layers: x = x + l(x)`` gives one
  addition per layer, ``h = tanh(self.ih(x) + self.hh(h))`` the same addition at every time step. Only in a loop that uses
  no parameters is it the line of code that counts (:mod:`bitwright.torch.interception.places`).

A model gets a mode, one hook, and an object in place of each forward. Every thread has its own :class:`Frame` stack, handler
and replica. Functions of ``torch.jit.script`` run outside Python, so what they compute is not seen; what ``torch.compile`` would
not show is refused.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.nn.modules.batchnorm import _NormBase as _Statistics
from torch.overrides import TorchFunctionMode

from bitwright.core.graph.operators import op_row
from bitwright.core.simulation.simulation import Occupancy
from bitwright.errors import BusyError, ModelError
from bitwright.torch.calls.decompose import DECOMPOSITIONS, Decomposition
from bitwright.torch.calls.functions import (
    FUNCTIONS,
    ONE_HIDDEN_CALL,
    SHOWN,
    Args,
    Func,
    Function,
    Kwargs,
    as_function,
    function_of,
    hidden_call,
    results,
    settled,
)
from bitwright.torch.calls.inputs import ATOMS, flatten_tensors, named_state, walk_modules
from bitwright.torch.interception.places import CALLS, Trace, Where, frame_of_region, line_of_code, region_of_call

Key = Hashable


@dataclass(slots=True)
class Frame:
    """A running forward of a module, or of the decomposition of a fused call."""

    key: Key
    path: str
    module: nn.Module | None
    anchor: Hashable = None
    counts: dict[Hashable, int] = field(default_factory=dict)
    where: Hashable = None
    turn: Hashable = None  # the line of code of the layer that is told apart by it, and of those around it
    turns: dict[Hashable, int] = field(default_factory=dict)  # place -> how often it was called here

    def __post_init__(self) -> None:
        if self.where is None:
            self.where = self.key

    def next(self, label: Hashable) -> int:
        """Count ``label``, and return its count since the anchor."""
        n = self.counts.get(label, 0)
        self.counts[label] = n + 1
        return n

    def movement_key(self, label: str) -> Key:
        """The key of a call that only moves data; such calls are counted separately, since most handlers skip them."""
        return (self.key, self.anchor, label, self.next(("moves", label)))

    def other_key(self, name: str) -> Key:
        """The key of a call without a row in the table; such calls are counted separately."""
        return (self.key, self.anchor, name, self.next(("other", name)))

    def set_anchor(self, anchor: Hashable) -> None:
        """Start counting anew at a parameter's place."""
        self.anchor = anchor
        self.counts.clear()

    def next_turn(self, place: Hashable) -> int:
        """Count a call at the place of a parameter, and return its count in this forward."""
        n = self.turns.get(place, 0)
        self.turns[place] = n + 1
        return n

    def copy(self) -> Frame:
        """A copy of the frame in its present state."""
        return replace(self, counts=dict(self.counts), turns=dict(self.turns))


class Handler(ABC):
    """Protocol of the handlers of intercepted calls: recording, calibration, simulation, export."""

    @abstractmethod
    def call(self, frame: Frame, key: Key, row: Function, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Carry out a call of a function of the table."""

    @abstractmethod
    def other(self, frame: Frame, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Carry out a call of any other torch function."""

    def whole(self, key: Key, args: Args) -> bool:
        """Whether a fused call that could be carried out as several runs as it is; by default it does not."""
        return False

    @abstractmethod
    def begin(self, args: Args, kwargs: Mapping[str, Any]) -> None:
        """The model's forward starts; without arguments, a part of it that is called directly."""

    def part(self, path: str, caller: str | None) -> bool:
        """Whether a submodule may be called directly, by the method ``caller``, ``"Class.method"``.

        By default only whole forwards may.
        """
        return False

    @abstractmethod
    def end(self, output: Any) -> None:
        """The model's forward returned ``output``."""


class Thread:
    """The state of one thread that runs the model.

    Attributes:
        handler: where its calls go; ``None`` means to the interceptor's own.
        frames: the forwards it is in, outermost first; empty when it runs nothing.
        failed_in: path of the innermost module that raised the last error to leave the model.
        replica: the copy of the model that runs in its place, if one does.
        task: the asyncio task that is inside a block of :meth:`Interceptor.active`; other tasks of the thread are not.
        trains: whether the outermost forward keeps what a backward pass needs.
        unseen: code of Python functions whose calls are not intercepted.
    """

    __slots__ = (
        *("_error", "called", "depth", "failed_in", "frames", "handler", "mode", "replica", "task", "trains"),
        "unseen",
    )

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.frames: list[Frame] = []
        self.mode: TorchFunctionMode | None = None
        self.depth = 0
        self.failed_in: str | None = None
        self.replica: Replica | None = None
        self.called: nn.Module | None = None
        self.task: Any = None
        self.trains = False
        self.unseen: Collection[CodeType] = ()
        self._error: BaseException | None = None

    def note(self, error: BaseException, path: str) -> None:
        """Record that ``error`` left the module at ``path``; the first such module is its origin."""
        known, self._error = self._error, error
        if error is not known and (known is None or error.__context__ is not known):
            self.failed_in = path

    def forget_error(self) -> None:
        """Release the error, and the frames that its traceback holds."""
        self._error = None


class Replica:
    """A copy of a model that shares the interception of the original, as ``torch.nn.DataParallel`` makes them.

    Attributes:
        modules: path -> module.
        parameters: id of a parameter -> its name; the parameters of a replica are plain tensors.
        names: the same of parameters and buffers.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules = dict(walk_modules(root))
        self.parameters: dict[int, str] = {}
        buffers: dict[int, str] = {}
        for path, module in self.modules.items():
            prefix = f"{path}." if path else ""
            parameters = vars(module).get("_former_parameters") or module._parameters
            for table, found in ((parameters, self.parameters), (module._buffers, buffers)):
                held = ((name, tensor) for name, tensor in table.items() if tensor is not None)
                for name, tensor in held:
                    found.setdefault(id(tensor), prefix + name)
        self.names = {**buffers, **self.parameters}


def running_task() -> asyncio.Task[Any] | None:
    """The asyncio task of this thread, if any."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


logger = logging.getLogger("bitwright")

Call = TypeVar("Call", bound=Callable[..., Any])

_FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


# What torch.compiler offers for the next two loads the whole compiler, which takes longer than the rest of this package.


def without_compiler(function: Call) -> Call:
    """Run ``function`` and all that it calls without a compiler, as ``torch.compiler.disable`` does."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def constant_for_compilers(function: Call) -> Call:
    """Let a compiler call ``function`` while it traces and keep the result, as ``torch.compiler.assume_constant_result`` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compiled_only_inside_others(function: Call) -> Call:
    """Let a compiler trace ``function`` inside its callers, but start no graph at it.

    Where a graph breaks further inside, the compiler would begin anew in ``function`` and run parts of the graph while calls are
    intercepted: what quantizers compute in a part would be taken for calls of the model.
    """
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def compiler_gave_up() -> bool:
    """Whether a compiler traces in this thread but has left the present function out of its graph."""
    return eval_frame.get_eval_frame_callback() is not None


def tell_broken(model: nn.Module) -> None:
    """Warn that a compiler broke the graph of the forward of ``model``."""
    logger.warning(
        "%s: torch.compile breaks its graph inside this model, so the simulation runs without being compiled; "
        "TORCH_LOGS=graph_breaks says where, and nn.RNN, nn.GRU and nn.LSTM are compiled with "
        "torch._dynamo.config.allow_rnn = True",
        type(model).__name__,
    )


def refuse_fused_layers(model: nn.Module) -> None:
    """Refuse layers that would run as one kernel.

    Raises:
        ModelError: there is one, in inference.
    """
    if torch.is_grad_enabled() or not torch.backends.mha.get_fastpath_enabled():
        return
    for path, module in walk_modules(model):
        if isinstance(module, _FUSED) and not module.training:
            raise ModelError(
                path,
                "torch.compile takes the fused kernel of this attention layer in inference, which has no quantizers",
                "call torch.backends.mha.set_fastpath_enabled(False) and torch._dynamo.reset(), and compile the model anew",
            )


def refuse_hidden_functions(model: nn.Module, hidden: Mapping[str, tuple[str, str]]) -> None:
    """Refuse a model that calls a function which a compiler hides.

    Args:
        model: for the message.
        hidden: path of a module -> the function's name, and what to write instead.

    Raises:
        ModelError: there is one.
    """
    for path, (name, instead) in hidden.items():
        raise ModelError(
            path or type(model).__name__,
            f"torch.compile does not show {name} to a simulation, so its output would have no quantizer",
            f"use {instead} there, or run the simulation without compiling",
        )


def scripted_functions(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Path of a module -> TorchScript functions, by name, that its methods refer to, directly or through Python functions."""
    by_class: dict[type, dict[str, Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    for path, module in walk_modules(model):
        kind = type(module)
        if kind not in by_class:
            by_class[kind] = {} if kind.__module__.startswith("torch.") else _named_by(kind)
        held = {name: value for name, value in vars(module).items() if _is_scripted_function(value)}
        names = {**by_class[kind], **held}
        if names:
            found[path] = names
    return found


def scripted_code(model: nn.Module) -> frozenset[CodeType]:
    """The Python code of TorchScript functions, which ``torch.export`` runs in their place."""
    functions = (value for names in scripted_functions(model).values() for value in names.values())
    sources = (inspect.unwrap(getattr(value, "_torchdynamo_inline", value)) for value in functions)
    return frozenset(source.__code__ for source in sources if isinstance(source, FunctionType))


def called_from(code: Collection[CodeType], ends: Collection[CodeType]) -> bool:
    """Whether the present call is made in ``code`` or below it, inside the innermost forward (code in ``ends``)."""
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code not in ends:
        if frame.f_code in code:
            return True
        frame = frame.f_back
    return False


def _named_by(kind: type) -> dict[str, Any]:
    """The TorchScript functions that the methods of a class refer to."""
    pending = list(_methods(kind))
    seen: set[FunctionType] = set(pending)
    names: dict[str, Any] = {}
    while pending:
        function = inspect.unwrap(pending.pop())
        if not isinstance(function, FunctionType):
            continue
        for name, value in _referenced(function):
            if _is_scripted_function(value):
                names[value.name or name] = value
            elif isinstance(value, FunctionType) and value not in seen and not _is_of_torch(value):
                seen.add(value)
                pending.append(value)
    return names


def _methods(kind: type) -> Iterator[FunctionType]:
    for own in kind.__mro__:
        if issubclass(own, nn.Module) and own is not nn.Module:
            yield from (value for value in vars(own).values() if isinstance(value, FunctionType))


def _referenced(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Name and value of every global and closure variable in the code of a function and its inner functions."""
    codes: list[CodeType] = [function.__code__]
    while codes:
        code = codes.pop()
        codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
        yield from ((n, function.__globals__[n]) for n in code.co_names if n in function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue


def _is_scripted_function(value: Any) -> bool:
    return isinstance(value, torch.jit.ScriptFunction)  # noqa: TID251, looked for here


def _is_of_torch(function: FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] == "torch"


class CallMode(TorchFunctionMode):
    """Sends the torch functions that one thread calls to the interceptor ``owner``."""

    def __init__(self, owner: Interceptor, here: Thread) -> None:
        super().__init__()
        self.owner, self.here = owner, here

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if self.here.task is not None and self.here.task is not running_task():
            return func(*args, **(kwargs or {}))  # another task's, while this one awaits
        return self.owner.dispatch(self.here, func, args, kwargs or {})


class Forward:
    """Replaces the forward of one module, with the same signature and attributes.

    Attributes:
        call: the module's forward as it was.
    """

    def __init__(self, owner: Interceptor, module: nn.Module, path: str, owns: bool) -> None:
        self.owner, self.module, self.path, self.owns = owner, module, path, owns
        self.hidden = ONE_HIDDEN_CALL.get(type(module))
        self.link(vars(module).get("forward"))

    def link(self, before: Callable[..., Any] | None) -> None:
        """Call ``before``: the instance's own forward or another interception; ``None``: the forward of the class."""
        self.before = before
        self.call: Callable[..., Any] = self._of_class(self.module) if before is None else before

    def _of_class(self, module: nn.Module) -> Callable[..., Any]:
        held = vars(module).pop("forward", None)
        try:
            return module.forward
        finally:
            if held is not None:
                vars(module)["forward"] = held

    def call_of(self, replica: Replica | None) -> Callable[..., Any]:
        """The forward of the module, or of its copy in ``replica``."""
        if replica is None:
            return self.call
        module = replica.modules[self.path]
        if self.before is None:
            return self._of_class(module)
        bound_to = getattr(self.before, "__self__", None)
        return self.before.__func__.__get__(module) if bound_to is self.module else self.before  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, intercepted; the first one that a thread enters opens the interception."""
        owner, here = self.owner, self.owner.here
        if not here.depth:
            return owner.run(self, here, args, kwargs)
        if here.task is not None and here.task is not running_task():
            raise interleaved()
        if here.trains:
            owner.note_region(here)
        depth = len(here.frames)
        owner.enter(here, self)
        if torch.compiler.is_dynamo_compiling():
            if self.hidden is None:
                output = self.call(*args, **kwargs)
            else:
                place = 1 if self.module.inplace else 0  # compilers of older versions do not take a bool for an index
                output = self.hidden[place](*args, *kwargs.values())
            del here.frames[depth:]
            return output
        try:
            return self.call_of(here.replica)(*args, **kwargs)
        except BaseException as error:
            here.note(error, self.path)
            raise
        finally:
            del here.frames[depth:]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.call

    def __getstate__(self) -> dict[str, Any]:
        # pickle looks up a method by its function's name in the module, which has none of that name where the class takes its
        # forward from elsewhere, as containers do
        function = getattr(self.call, "__func__", None)
        bound = self.before is None and function is not None
        return {**vars(self), "call": function, "bound": True} if bound else vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if vars(self).pop("bound", False):
            self.call = self.call.__get__(self.module)

    def __getattr__(self, name: str) -> Any:
        if name == "call" or (name.startswith("__") and name.endswith("state__")):
            raise AttributeError(name)  # while a copy is made
        return getattr(self.call, name)


class ReplicaHook:
    """A hook of the whole model that records which copy is called, since a forward cannot tell."""

    def __init__(self, owner: Interceptor) -> None:
        self.owner = owner

    def __call__(self, module: nn.Module, args: Any) -> None:
        """``module`` is about to run; torch calls this before its forward."""
        self.owner.here.called = None if module is self.owner.model else module


def interleaved() -> BusyError:
    """The error of a call made while another task of its thread is inside a block of ``active``."""
    return BusyError(
        "active",
        "another asyncio task of this thread awaits inside a `with sim.active():` block, and what it intercepts would mix "
        "with the calls of this task",
        "await outside of the block, call sim.model(...) without a block, or run the block in a thread "
        "(await asyncio.to_thread(...))",
    )


def interceptions(module: nn.Module) -> list[Forward]:
    """The interceptions of a module's forward, outermost first."""
    found, forward = [], vars(module).get("forward")
    while isinstance(forward, Forward):
        found.append(forward)
        forward = forward.before
    return found


def forward_signature(model: nn.Module) -> inspect.Signature | None:
    """The signature of the model's own forward, under all interceptions; ``None`` where Python cannot tell."""
    forward: Any = model.forward
    while isinstance(forward, Forward):
        forward = forward.call
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


#: reading and writing attributes of tensors: nothing that a model computes
ACCESS = ("__get__", "__set__")
_MODULE_TABLES = frozenset(vars(nn.Module()))

#: functions that only ever move data: they hold no quantizer and are not counted
_PASSIVE = {
    function
    for function, row in FUNCTIONS.items()
    if row.label == "getitem" or isinstance(row.type, str) and op_row(row.type).kind == "movement"
}


class Interceptor:
    """Sends every torch call that a model's forward makes to a handler.

    A :class:`Forward` in place of the forward of each module, and one hook that tells replicas apart, are all that is
    added to a model: its classes, parameters, buffers and ``state_dict`` stay as they are. (Hooks would not do instead:
    they are not told of a KeyboardInterrupt, and an interception left open would catch whatever is called next.)

    Args:
        model: the module.
        handler: of threads that have none of their own (:meth:`handled_by`); without any, a thread runs the model as it is.

    Attributes:
        occupancy: the threads that run the model.
        loops: places that are told apart by the line of code.
        seen: where counted places stand, while a model is recorded.
        fused: frame and label of a fused call -> its places.
        decomposed: whether a call was carried out as several while the model was recorded.
        turns: places of parameters that are told apart by the line of code.
        repeats: places that a loop calls as a chain -> its turns, which are told apart
            (:mod:`bitwright.torch.interception.places`); those beyond are at the place of the last.
        lines: how often each line called the place of a parameter, while a model is recorded.
        trace: what ran, while a model is recorded.
        hidden: path of a module -> a function that it calls and a compiler would not show, and what to call instead.
    """

    def __init__(self, model: nn.Module, handler: Handler | None = None) -> None:
        self.model, self.handler = model, handler
        self.occupancy = Occupancy("work on a copy that was made before, copy.deepcopy(sim)")
        self._threads = threading.local()
        self._names: dict[int, str] | None = None
        self._attributes: dict[int, str] | None = None
        self._hook: Any = None
        self.attached = False
        self.loops: frozenset[Where] = frozenset()
        self.seen: dict[Key, Where] | None = None
        self.fused: dict[Key, set[Key]] = {}
        self.decomposed = False
        self.recording = False
        self.turns: frozenset[Key] = frozenset()
        self.repeats: dict[Key, int] = {}
        self.lines: dict[Where, dict[Where, int]] = {}
        self.trace: Trace | None = None
        self.hidden: dict[str, tuple[str, str]] = {}
        self._told_broken = False

    # -- attaching

    def attach(self) -> None:
        """Replace the forward of every module that is not replaced yet."""
        modules = list(walk_modules(self.model))
        scripted = next((path for path, module in modules if _is_scripted(module)), None)
        if scripted is not None:
            raise ModelError(
                scripted or type(self.model).__name__,
                "it is a TorchScript module, whose calls run outside Python and cannot be seen",
                "put the eager module that it was made from in its place",
            )
        empty = next((path for path, module in modules if _is_empty(module)), None)
        if empty is not None:
            raise ModelError(
                empty or type(self.model).__name__,
                "its parameters are on the meta device, which holds shapes without values",
                "load the weights first: model.to_empty(device='cpu'), then model.load_state_dict(...); or "
                "model.load_state_dict(..., assign=True)",
            )
        owners = _owners(modules)
        for path, module in modules:
            if not any(forward.owner is self for forward in interceptions(module)):
                vars(module)["forward"] = Forward(self, module, path, path in owners)
        hooks = self.model._forward_pre_hooks.values()
        if not any(isinstance(hook, ReplicaHook) and hook.owner is self for hook in hooks):
            self._hook = self.model.register_forward_pre_hook(ReplicaHook(self))
        self.attached = True

    def detach(self) -> None:
        """Restore the forward of every module."""
        for _, module in walk_modules(self.model):
            outer: Forward | None = None
            for forward in interceptions(module):
                if forward.owner is not self:
                    outer = forward
                elif outer is not None:
                    outer.link(forward.before)
                elif forward.before is not None:
                    vars(module)["forward"] = forward.before  # the instance's own, or another interception's
                else:
                    del vars(module)["forward"]
        if self._hook is not None:
            self._hook.remove()
        self.attached = False

    def __getstate__(self) -> dict[str, Any]:
        # a copy has its own modules and parameters: names are looked up anew, a running forward is not copied
        state = {**self.__dict__, "_names": None, "_attributes": None, "seen": None}
        del state["_threads"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _threads=threading.local())

    # -- running

    @property
    def here(self) -> Thread:
        """The state of the calling thread."""
        try:
            return self._threads.state
        except AttributeError:
            self._threads.state = Thread()
            return self._threads.state

    @property
    def running(self) -> bool:
        """Whether calls of this thread are intercepted now."""
        return bool(self.here.frames)

    @property
    def failed_in(self) -> str | None:
        """Path of the innermost module that raised this thread's last error."""
        return self.here.failed_in

    @contextmanager
    def active(self) -> Iterator[None]:
        """Intercept everything that this thread calls inside the block as if the model's forward had called it."""
        here, task = self.here, running_task()
        # torch keeps one stack of modes per thread, in the order in which they are left again
        for mode in torch.overrides._get_current_function_mode_stack():
            if isinstance(mode, CallMode) and mode.here.task not in (None, task):
                raise interleaved()
        self._open(here)
        outer, here.task = here.task, task
        try:
            yield
        finally:
            here.task = outer
            self._close(here)

    @contextmanager
    def handled_by(self, handler: Handler, unseen: Collection[CodeType] = ()) -> Iterator[None]:
        """Send the calls of this thread to another handler inside the block, except those from the code ``unseen``."""
        here = self.here
        before = here.handler, here.unseen
        here.handler, here.unseen = handler, unseen
        try:
            yield
        finally:
            here.handler, here.unseen = before

    @contextmanager
    def suspended(self, handler: Handler) -> Iterator[None]:
        """Let the model run under another handler inside the block, also during one of its own forwards."""
        here = self.here
        saved = (here.frames, here.mode, here.depth, here.failed_in, here.replica, here.trains)
        if here.mode is not None:
            here.mode.__exit__(None, None, None)
        here.frames, here.mode, here.depth, here.replica, here.trains = [], None, 0, None, False
        try:
            with self.handled_by(handler):
                yield
        finally:
            here.frames, here.mode, here.depth, here.failed_in, here.replica, here.trains = saved
            if here.mode is not None:
                here.mode.__enter__()

    def note_region(self, here: Thread) -> None:
        """Save the frames for the backward pass, if this call is the first of a checkpointed region."""
        if torch.compiler.is_compiling() or here.handler is None and self.handler is None:
            return
        region = region_of_call()
        if region is None or region.known_to(self):
            return
        frames, replica = [frame.copy() for frame in here.frames], here.replica
        handler = here.handler or self.handler
        assert handler is not None

        @contextmanager
        def resumed() -> Iterator[None]:
            now = self.here  # the backward pass of another device runs in a thread of its own
            with self.suspended(handler):
                self._open(now, replica)
                now.frames = [frame.copy() for frame in frames]
                try:
                    yield
                finally:
                    self._close(now)

        region.resume_with(self, resumed, line_of_code(_FORWARDS, start=frame_of_region()))

    def _open(self, here: Thread, replica: Replica | None = None) -> None:
        if not here.depth:
            self.occupancy.enter()
            here.failed_in, here.replica, here.trains = None, replica, torch.is_grad_enabled()
            here.frames = [Frame("", "", self.model)]
            here.mode = CallMode(self, here)
            here.mode.__enter__()
        here.depth += 1

    def _close(self, here: Thread) -> None:
        here.depth -= 1
        if not here.depth:
            mode, here.mode, here.frames, here.replica = here.mode, None, [], None
            assert mode is not None
            mode.__exit__(None, None, None)
            here.forget_error()
            self.occupancy.leave()

    @compiled_only_inside_others
    def run(self, forward: Forward, here: Thread, args: Args, kwargs: Kwargs) -> Any:
        """Run the outermost forward of a thread: that of the model, or of a submodule called directly."""
        handler = here.handler or self.handler
        called, here.called = here.called, None
        replica = None if called is None or forward.path else Replica(called)
        if handler is None:
            return forward.call_of(replica)(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._traced(forward, here, args, kwargs, handler)
        if not self._told_broken and compiler_gave_up():
            self._told_broken = True
            tell_broken(self.model)
        return self._intercepted(forward, here, replica, args, kwargs, handler)

    @without_compiler
    def _intercepted(
        self, forward: Forward, here: Thread, replica: Replica | None, args: Args, kwargs: Kwargs, handler: Handler
    ) -> Any:
        """Run without a compiler: after a graph break it would compile parts, whose calls are not seen."""
        call = forward.call_of(replica)
        if forward.path:
            self._check_part(forward, handler)
        self._open(here, replica)
        try:
            self._refuse_shared_statistics()
            if forward.path:
                handler.begin((), {})
                self.enter(here, forward)
            else:
                handler.begin(args, kwargs)
            output = call(*args, **kwargs)
            handler.end(output)
            return output
        except BaseException as error:
            here.note(error, forward.path)
            raise
        finally:
            self._close(here)

    def _traced(self, forward: Forward, here: Thread, args: Args, kwargs: Kwargs, handler: Handler) -> Any:
        """Run under ``torch.compile`` without tracking threads and errors, so that one graph is traced."""
        self._before_tracing()
        self._refuse_hidden_functions()
        here.frames = [Frame("", "", self.model)]
        here.mode, here.depth = CallMode(self, here), 1
        handler.begin(args, kwargs)
        with here.mode:
            if forward.path:
                self.enter(here, forward)
            output = forward.call(*args, **kwargs)
        handler.end(output)
        here.frames, here.mode, here.depth = [], None, 0
        return output

    @constant_for_compilers
    def _before_tracing(self) -> bool:
        """Prepare the lookups that a compiler needs, and refuse calls that it would hide."""
        self.forget_names()
        self._name_parameters()
        refuse_fused_layers(self.model)
        return True

    @constant_for_compilers
    def _refuse_hidden_functions(self) -> bool:
        refuse_hidden_functions(self.model, self.hidden)
        return True

    def _refuse_shared_statistics(self) -> None:
        """Refuse batch norms in training mode in several threads: they write buffers that all threads read."""
        if not self.model.training or not self.occupancy.crowded:
            return
        for path, module in walk_modules(self.model):
            if isinstance(module, _Statistics) and module.training and module.running_mean is not None:
                raise BusyError(
                    path,
                    f"this {type(module).__name__} updates its running statistics in training, and another thread runs the "
                    "model at the same time",
                    "call sim.model.eval() for inference, train in one thread at a time, or give each thread a copy, "
                    "copy.deepcopy(sim)",
                )

    def _check_part(self, forward: Forward, handler: Handler) -> None:
        """Check a submodule that is called directly; its places are those within the model's forward."""
        if torch._C._current_graph_task_id() != -1:
            raise ModelError(
                forward.path,
                f"the backward pass computes this {type(forward.module).__name__} again by a function that is not of "
                "torch.utils.checkpoint, so that the places of its quantizers are not known",
                "checkpoint by torch.utils.checkpoint.checkpoint, or train the simulation without activation checkpointing: "
                "set the model's own switch for it to False before the forward",
            )
        if handler.part(forward.path, _caller()):
            return
        raise ModelError(
            forward.path,
            f"this {type(forward.module).__name__} was called outside the forward of the simulated model "
            "(through another method, or on its own), where its quantizers would be lost",
            "call the model itself, or put the code in a `with sim.active():` block",
        )

    def enter(self, here: Thread, forward: Forward) -> None:
        """Enter the forward of a module within another one; a model that calls itself is part of its own forward."""
        if not forward.path:
            here.frames.append(Frame("", "", self.model))
            return
        parent = here.frames[-1]
        if forward.owns:
            line = self._line(parent, (parent.key, forward.path), modules=1)
            turn = parent.turn if line is None else (parent.turn, line)
            owner: Key = forward.path if turn is None else (forward.path, turn)
            parent.set_anchor(owner)
            here.frames.append(Frame(owner, forward.path, forward.module, turn=turn))
        else:
            key, where = self._counted(parent, forward.path, modules=1)
            here.frames.append(Frame(key, forward.path, forward.module, where=where, turn=parent.turn))

    def param_name(self, tensor: torch.Tensor) -> str | None:
        """The first name of a parameter or buffer of the model; ``None`` for other tensors."""
        replica = self.here.replica
        if replica is not None:
            return replica.names.get(id(tensor))
        return (self._names or self._name_parameters()).get(id(tensor))

    def _name_parameters(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for name, value in named_state(self.model):
            names.setdefault(id(value), name)
        self._names = names  # whole: other threads read it meanwhile
        return names

    def attribute_name(self, tensor: torch.Tensor) -> str | None:
        """The attribute (also in a list, tuple or dict) in which a module keeps ``tensor``; ``None`` if there is none."""
        if self._attributes is None:
            self._attributes = _attributes_of(self.model)
        return self._attributes.get(id(tensor))

    def named_tensor(self, name: str) -> torch.Tensor:
        """The parameter or buffer called ``name``; KeyError if there is none."""
        path, _, leaf = name.rpartition(".")
        module = self.model
        for part in path.split(".") if path else ():
            child = module._modules[part]
            assert child is not None
            module = child
        found: torch.Tensor | None = module._parameters.get(leaf)
        if found is None:
            found = module._buffers[leaf]
        if found is None:
            raise KeyError(name)
        return found

    def forget_names(self) -> None:
        """Forget parameter names after an edit of the model."""
        self._names = self._attributes = None

    def dispatch(self, here: Thread, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Handle one call of a torch function."""
        handler = here.handler or self.handler
        if not here.frames or handler is None or (here.unseen and called_from(here.unseen, _FORWARDS)):
            return func(*args, **kwargs)
        if here.trains:
            self.note_region(here)
        frame = here.frames[-1]
        func = SHOWN.get(func, func)
        if isinstance(func, torch._ops.OpOverload):
            known, given, named = as_function(func, args, kwargs)
            if known is not func:
                return results(func, self.dispatch(here, known, given, named), args, kwargs)
        args, kwargs = settled(func, args, kwargs)
        row = function_of(func)
        if row is None:
            decomposition = DECOMPOSITIONS.get(func)
            if decomposition is not None and decomposition.applies(args, kwargs):
                return self._decompose(here, handler, decomposition, func, args, kwargs)
            return handler.other(frame, func, args, kwargs)
        self._note_hidden(frame, row.label)
        if func in _PASSIVE:
            return handler.other(frame, func, args, kwargs)
        key = self._place_of(here, frame, row.called(kwargs), (*args, *kwargs.values()))
        return handler.call(frame, key, row, func, args, kwargs)

    def _note_hidden(self, frame: Frame, label: str) -> None:
        """While recording: note a function that a compiler would hide."""
        if self.seen is not None and type(frame.module) not in ONE_HIDDEN_CALL:
            hidden = hidden_call(label)
            if hidden is not None:
                self.hidden.setdefault(frame.path, hidden)

    def _place_of(self, here: Thread, frame: Frame, label: str, values: Sequence[Any]) -> Key:
        """The key of a call with the arguments ``values``: the place of its first parameter, else the next one in the frame."""
        for value in values:
            kind = type(value)
            if kind is nn.Parameter or (kind is not torch.Tensor and isinstance(value, nn.Parameter)):
                name = self.param_name(value) or self._param_name_anew(value)
            elif here.replica is not None and isinstance(value, torch.Tensor):
                name = here.replica.parameters.get(id(value))
            else:
                continue
            if name is not None:
                key = (frame.key, name, label)
                line = self._line(frame, key)
                if line is None:
                    frame.set_anchor(name)
                    return key
                frame.set_anchor((name, line))
                return (*key, line)
        return self._counted(frame, label)[0]

    def _param_name_anew(self, parameter: nn.Parameter) -> str | None:
        """The name of a parameter that may have been replaced since the names were read."""
        self.forget_names()
        return self.param_name(parameter)

    def _line(self, frame: Frame, place: Where, modules: int = 0) -> Where | None:
        """The line of code, or the turn, of a call at a parameter's place, where it distinguishes places."""
        most = self.repeats.get(place)
        if most is not None:
            return (min(frame.next_turn(place), most - 1),)
        if self.seen is None and place not in self.turns:
            return None
        line = line_of_code(_FORWARDS, modules)
        if self.seen is not None:
            calls = self.lines.setdefault(place, {})
            calls[line] = calls.get(line, 0) + 1
            if self.trace is not None:
                self.trace.start(place, frame.next_turn(place))
        return line if place in self.turns else None

    def _counted(self, frame: Frame, label: str, modules: int = 0) -> tuple[Key, Hashable]:
        """Key of the next ``label`` of a frame, or of this line of code in a loop, and its location."""
        if not self.loops and self.seen is None:
            key = (frame.key, frame.anchor, label, frame.next(label))
            return key, key
        line = line_of_code(_FORWARDS, modules)
        where: Where = (frame.where, frame.anchor, label, line)
        if where in self.loops:
            return where, where
        key = (frame.key, frame.anchor, label, frame.next(label))
        if self.seen is not None:
            self.seen[key] = where
        return key, where

    def _fused(self, frame: Frame, label: str, key: Key) -> Key:
        """The key of a fused call; the only such call of a module keeps its key, whatever layers ran before it.

        (An attention to keys that a cache holds runs without the projections that made them.)
        """
        if self.recording:
            self.fused.setdefault((frame.key, label), set()).add(key)
            return key
        known = self.fused.get((frame.key, label), set())
        return next(iter(known)) if len(known) == 1 and frame.counts.get(label) == 1 else key

    def _decompose(
        self, here: Thread, handler: Handler, decomposition: Decomposition, func: Any, args: Args,
        kwargs: Kwargs,
    ) -> Any:  # fmt: skip
        depth = len(here.frames)
        parent, label = here.frames[-1], decomposition.label
        self.decomposed = self.decomposed or self.recording
        if decomposition.owner:
            lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list)]
            values = (*args, *kwargs.values(), *(v for found in lists for v in found))
            key = self._place_of(here, parent, label, values)
            module = parent.module if decomposition.owner == "module" else None
            here.frames.append(Frame(key, parent.path, module, turn=parent.turn))
        else:
            key, where = self._counted(parent, label)
            key = self._fused(parent, label, key)
            if not self.recording and handler.whole(key, args):
                return func(*args, **kwargs)
            path = f"{parent.path}.{label}" if parent.path else label
            here.frames.append(Frame(key, path, None, where=where, turn=parent.turn))
        assert here.mode is not None
        try:
            with here.mode:
                return decomposition.run(*args, **kwargs)
        finally:
            del here.frames[depth:]


def _caller() -> str | None:
    """``Class.method`` of the module method that makes the outermost call; ``None`` for code outside of modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code in (*_FORWARDS, *CALLS)
        or frame.f_globals.get("__name__", "").startswith((__name__, "torch._dynamo."))
    ):
        frame = frame.f_back
    owner = None if frame is None else frame.f_locals.get("self")
    return f"{type(owner).__name__}.{frame.f_code.co_name}" if frame and isinstance(owner, nn.Module) else None


OUTERMOST = Interceptor._intercepted.__code__
"""State of the outermost forward of a thread."""
_FORWARDS = (Forward.__call__.__code__, OUTERMOST)


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)  # noqa: TID251, to refuse it


def _is_empty(module: nn.Module) -> bool:
    return any(p is not None and p.is_meta for p in module._parameters.values())


def _owners(modules: Sequence[tuple[str, nn.Module]]) -> set[str]:
    """Paths of modules with parameters or buffers, and of their parents."""
    owners: set[str] = set()
    for path, module in modules:
        own = (*module._parameters.values(), *module._buffers.values())
        if all(tensor is None for tensor in own):
            continue
        while path not in owners:
            owners.add(path)
            path = path.rpartition(".")[0]
    return owners


def _attributes_of(model: nn.Module) -> dict[int, str]:
    """Id of a tensor in a plain attribute -> its location."""
    found: dict[int, str] = {}
    for path, module in walk_modules(model):
        prefix = f"{path}." if path else ""
        for name, value in vars(module).items():
            if type(value) in ATOMS or (name.startswith("_") and name in _MODULE_TABLES):
                continue
            for where, tensor in flatten_tensors(value, name):
                found.setdefault(id(tensor), prefix + where)
    return found
