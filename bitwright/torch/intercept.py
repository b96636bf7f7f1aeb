"""Interception at the call: every torch function a model calls passes through here while its forward runs.

A :class:`TorchFunctionMode` sees the calls, forward hooks tell which module is running. A call is identified by its
*key*: where in the module tree it happens and where in that module's forward, counted from the last use of parameters:

- a module that owns parameters or buffers is one place, however often it runs (time steps share their sites);
- a call that reads a parameter directly is the place of that parameter;
- anything else counts from the last such place in the same forward: ``for l in self.layers: x = x + l(x)`` gives one
  addition per layer, ``h = tanh(self.ih(x) + self.hh(h))`` the same addition at every time step. Only in a loop that uses
  no parameters is it the line of code that counts (:mod:`bitwright.torch.loops`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bitwright.core.ops import op_row
from bitwright.errors import ModelError
from bitwright.torch.decompose import DECOMPOSITIONS, Decomposition
from bitwright.torch.functions import FUNCTIONS, Function, function_of
from bitwright.torch.loops import Where, line_of_code
from bitwright.torch.trees import flatten_tensors, named_state, walk_modules

Key = Hashable
#: reading and writing attributes of tensors: nothing that a model computes
ACCESS = ("__get__", "__set__")


@dataclass(slots=True)
class Frame:
    """One running forward: of a module, or of the decomposition of a fused call."""

    key: Key
    path: str
    module: nn.Module | None
    anchor: Hashable = None
    counts: dict[Hashable, int] = field(default_factory=dict)
    where: Hashable = None

    def __post_init__(self) -> None:
        if self.where is None:
            self.where = self.key

    def next(self, label: Hashable) -> int:
        """How often ``label`` was seen since the anchor; counts this time."""
        n = self.counts.get(label, 0)
        self.counts[label] = n + 1
        return n

    def movement_key(self, label: str) -> Key:
        """The key of a call that only moves data; such calls are counted apart, as most handlers pass them by."""
        return (self.key, self.anchor, label, self.next(("moves", label)))

    def other_key(self, name: str) -> Key:
        """The key of a call that is in no table; such calls are counted apart too."""
        return (self.key, self.anchor, name, self.next(("other", name)))

    def set_anchor(self, anchor: Hashable) -> None:
        """Count from here on."""
        self.anchor = anchor
        self.counts.clear()


class Handler(Protocol):
    """What happens to the calls: recording, calibration, simulation, export."""

    def call(
        self,
        frame: Frame,
        key: Key,
        row: Function,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Carry out a call of a function of the table."""

    def other(
        self, frame: Frame, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Carry out a call of any other torch function."""

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model's forward starts."""

    def end(self, output: Any) -> None:
        """The model's forward returned ``output``."""


_MODULE_TABLES = frozenset(vars(nn.Module()))

#: functions that only ever move data: they hold no quantizer and are not counted
_PASSIVE = {
    function
    for function, row in FUNCTIONS.items()
    if row.label == "getitem" or isinstance(row.type, str) and op_row(row.type).kind == "movement"
}


class _Mode(TorchFunctionMode):
    def __init__(self, owner: Interceptor) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.owner.dispatch(func, args, kwargs or {})


class _Enter:
    def __init__(self, owner: Interceptor, path: str, owns: bool) -> None:
        self.owner, self.path, self.owns = owner, path, owns

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.owner.enter(self, module)


class _Leave:
    def __init__(self, owner: Interceptor) -> None:
        self.owner = owner

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.owner.leave(module)


class Interceptor:
    """Leads every torch call that a model's forward makes to a handler.

    Hooks on the modules below the model, and :meth:`forward` in the place of its own, are all that is added to it: its
    classes, parameters, buffers and ``state_dict`` stay as they are. (A hook would not do for the model itself: hooks
    are not told of a KeyboardInterrupt, and an interception left open would catch whatever is called next.)
    """

    def __init__(self, model: nn.Module, handler: Handler) -> None:
        self.model, self.handler = model, handler
        self.frames: list[Frame] = []
        self._mode: _Mode | None = None
        self._depth = 0
        self._names: dict[int, str] | None = None
        self._attributes: dict[int, str] | None = None
        self._handles: list[Any] = []
        self._original: Callable[..., Any] = model.forward
        self._outer_error: BaseException | None = None
        self.failed_in: str | None = None
        self.loops: frozenset[Where] = frozenset()  # places that are told apart by the line of code
        self.seen: dict[Key, Where] | None = None  # where counted places stand, while a model is recorded

    # -- attaching

    def attach(self) -> None:
        """Take the place of the model's forward and register the hooks, two per module below."""
        modules = list(walk_modules(self.model))
        owners: set[str] = set()
        for path, module in modules:
            if any(p is not None for p in (*module._parameters.values(), *module._buffers.values())):
                while path not in owners:
                    owners.add(path)
                    if not path:
                        break
                    path = path.rpartition(".")[0]
        for path, module in modules:
            if isinstance(module, torch.jit.ScriptModule):  # noqa: TID251, refused here
                raise ModelError(
                    path or type(self.model).__name__,
                    "it is a TorchScript module, whose calls run outside Python and cannot be seen",
                    "put the eager module that it was made from in its place",
                )
        self._original = self.model.forward
        self.model.forward = (
            self.forward
        )  # a bound method: copies of the model get an interceptor of their own
        for path, module in modules[1:]:
            enter = _Enter(self, path, path in owners)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(_Leave(self), always_call=True))

    def detach(self) -> None:
        """Take the hooks off again and give the model its forward back."""
        if getattr(vars(self.model).get("forward"), "__self__", None) is self:
            del self.model.forward
            if getattr(self._original, "__func__", None) is not type(self.model).forward:
                self.model.forward = self._original  # it was the instance's own, or another interception's
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __getstate__(self) -> dict[str, Any]:
        # a copy has its own modules and parameters: names are looked up anew, a running forward is not copied
        return {
            **self.__dict__,
            "frames": [],
            "_mode": None,
            "_depth": 0,
            "_names": None,
            "_attributes": None,
            "_handles": [],
            "_outer_error": None,
            "seen": None,
        }

    # -- running

    @property
    def running(self) -> bool:
        """Whether calls are being intercepted right now."""
        return bool(self.frames)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Intercept everything called inside the block as if the model's forward had called it."""
        self._open()
        try:
            yield
        finally:
            self._close()

    @contextmanager
    def suspended(self, handler: Handler) -> Iterator[None]:
        """Let the model run anew under another handler inside the block, also in the middle of a forward of its own."""
        saved = (self.frames, self._mode, self._depth, self.handler, self._outer_error, self.failed_in)
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
        self.frames, self._mode, self._depth, self.handler = [], None, 0, handler
        try:
            yield
        finally:
            self.frames, self._mode, self._depth, self.handler, self._outer_error, self.failed_in = saved
            if self._mode is not None:
                self._mode.__enter__()

    def _open(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._outer_error, self.failed_in = sys.exc_info()[1], None
            self.frames = [Frame("", "", self.model)]
            self._mode = _Mode(self)
            self._mode.__enter__()

    def _close(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            mode, self._mode, self.frames = self._mode, None, []
            assert mode is not None
            mode.__exit__(None, None, None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, intercepted; a forward within it (a model that calls itself) is part of it."""
        self._open()
        outermost = self._depth == 1
        if not outermost:
            self.frames.append(Frame("", "", self.model))
        depth = len(self.frames)
        try:
            if outermost:
                self.handler.begin(args, kwargs)
            output = self._original(*args, **kwargs)
            if outermost:
                self.handler.end(output)
            return output
        except BaseException:
            if self.failed_in is None and self.frames:
                self.failed_in = self.frames[-1].path
            raise
        finally:
            if not outermost:
                del self.frames[depth - 1 :]
            self._close()

    def enter(self, hook: _Enter, module: nn.Module) -> None:
        """The forward of a module below the model starts."""
        if not self.frames and torch._C._current_graph_task_id() != -1:
            raise ModelError(
                hook.path,
                f"the backward pass computes this {type(module).__name__} again (activation checkpointing), where its "
                "quantizers would be lost and the gradients would be those of another function",
                "train the simulation without activation checkpointing: set the model's own switch for it to False "
                "before the forward",
            )
        if not self.frames:
            raise ModelError(
                hook.path,
                f"this {type(module).__name__} was called outside the forward of the simulated model "
                "(through another method, or on its own), where its quantizers would be lost",
                "call the model itself, or put the code in a `with sim.active():` block",
            )
        parent = self.frames[-1]
        if hook.owns:
            parent.set_anchor(hook.path)
            self.frames.append(Frame(hook.path, hook.path, module))
        else:
            key, where = self._counted(parent, hook.path, modules=1)
            self.frames.append(Frame(key, hook.path, module, where=where))

    def leave(self, module: nn.Module) -> None:
        """It returned or raised; the innermost module that raised is kept in ``failed_in``."""
        error = sys.exc_info()[1]
        if error is not None and error is not self._outer_error and self.failed_in is None and self.frames:
            self.failed_in = self.frames[-1].path
        while len(self.frames) > 1:
            if self.frames.pop().module is module:
                return

    def param_name(self, tensor: torch.Tensor) -> str | None:
        """The first name of a parameter or buffer of the model; ``None`` for other tensors."""
        if self._names is None:
            self._names = {}
            for name, value in named_state(self.model):
                self._names.setdefault(id(value), name)
        return self._names.get(id(tensor))

    def attribute_name(self, tensor: torch.Tensor) -> str | None:
        """Where a module keeps ``tensor`` as a plain attribute (also in a list, tuple or dict); ``None`` if nowhere."""
        if self._attributes is None:
            self._attributes = {}
            for path, module in walk_modules(self.model):
                for name, value in vars(module).items():
                    if name.startswith("_") and name in _MODULE_TABLES:
                        continue
                    for where, found in flatten_tensors(value, name):
                        self._attributes.setdefault(id(found), f"{path}.{where}" if path else where)
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
        """Look parameter names up anew: the model was edited."""
        self._names = self._attributes = None

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One torch function was called."""
        if not self.frames:
            return func(*args, **kwargs)
        frame = self.frames[-1]
        row = function_of(func)
        if row is None:
            decomposition = DECOMPOSITIONS.get(func)
            if decomposition is not None and decomposition.applies(args, kwargs):
                return self._decompose(decomposition, args, kwargs)
            return self.handler.other(frame, func, args, kwargs)
        if func in _PASSIVE:
            return self.handler.other(frame, func, args, kwargs)
        return self.handler.call(frame, self._key(frame, row, args, kwargs), row, func, args, kwargs)

    def _key(self, frame: Frame, row: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
        label = row.called(kwargs)
        return self._place_of(frame, label, (*args, *kwargs.values()))

    def _place_of(self, frame: Frame, label: str, values: Sequence[Any]) -> Key:
        """The key of a call with the arguments ``values``: the place of its first parameter, or the next one here."""
        for value in values:
            kind = type(value)
            if kind is nn.Parameter or (kind is not torch.Tensor and isinstance(value, nn.Parameter)):
                name = self.param_name(value)
                if name is None:
                    self.forget_names()  # a parameter that was exchanged since the names were read
                    name = self.param_name(value)
                if name is not None:
                    frame.set_anchor(name)
                    return (frame.key, name, label)
        return self._counted(frame, label)[0]

    def _counted(self, frame: Frame, label: str, modules: int = 0) -> tuple[Key, Hashable]:
        """Key of the next ``label`` of a frame, or of this line of code in a loop; and where it stands."""
        if not self.loops and self.seen is None:
            key = (frame.key, frame.anchor, label, frame.next(label))
            return key, key
        line = line_of_code(_FORWARD, modules)
        where: Where = (frame.where, frame.anchor, label, line)
        if where in self.loops:
            return where, where
        key = (frame.key, frame.anchor, label, frame.next(label))
        if self.seen is not None:
            self.seen[key] = where
        return key, where

    def _decompose(self, decomposition: Decomposition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parent, label = self.frames[-1], decomposition.label
        if decomposition.owner:
            lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list)]
            key = self._place_of(
                parent, label, (*args, *kwargs.values(), *(v for found in lists for v in found))
            )
            module = parent.module if decomposition.owner == "module" else None
            self.frames.append(Frame(key, parent.path, module))
        else:
            key, where = self._counted(parent, label)
            path = f"{parent.path}.{label}" if parent.path else label
            self.frames.append(Frame(key, path, None, where=where))
        depth = len(self.frames)
        assert self._mode is not None
        try:
            with self._mode:
                return decomposition.run(*args, **kwargs)
        finally:
            del self.frames[depth - 1 :]


_FORWARD = Interceptor.forward.__code__


def forward_signature(model: nn.Module) -> inspect.Signature | None:
    """The signature of the model's own forward, whatever stands before it; ``None`` where Python cannot tell."""
    forward: Any = model.forward
    while isinstance(owner := getattr(forward, "__self__", None), Interceptor):
        forward = owner._original
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None
