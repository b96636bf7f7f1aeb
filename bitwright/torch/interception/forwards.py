"""What is added to a model in order to intercept its calls: a mode, one hook, and what stands in the place of each forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bitwright.errors import BusyError
from bitwright.torch.calls.operators import ONE_HIDDEN_CALL
from bitwright.torch.interception.frames import Replica, Thread, running_task

if TYPE_CHECKING:
    from bitwright.torch.interception.intercept import Interceptor


class CallMode(TorchFunctionMode):
    """Leads the torch functions that one thread calls to the interceptor ``owner``."""

    def __init__(self, owner: Interceptor, here: Thread) -> None:
        super().__init__()
        self.owner, self.here = owner, here

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.here.task is not None and self.here.task is not running_task():
            return func(*args, **(kwargs or {}))  # another task's, while this one awaits
        return self.owner.dispatch(self.here, func, args, kwargs or {})


class Forward:
    """Stands in the place of the forward of one module; signature and attributes are those of the forward itself.

    Attributes:
        call: the module's forward as it was.
    """

    def __init__(self, owner: Interceptor, module: nn.Module, path: str, owns: bool) -> None:
        self.owner, self.module, self.path, self.owns = owner, module, path, owns
        self.hidden = ONE_HIDDEN_CALL.get(type(module))
        self.link(vars(module).get("forward"))

    def link(self, before: Callable[..., Any] | None) -> None:
        """Call ``before``: the instance's own forward or another interception's; ``None`` is the forward of the class."""
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
        """The forward of the module, or of the one that stands in its place in ``replica``."""
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

    def __getattr__(self, name: str) -> Any:
        if name == "call" or (name.startswith("__") and name.endswith("state__")):
            raise AttributeError(name)  # while a copy is made
        return getattr(self.call, name)


class ReplicaHook:
    """A hook of the whole model that notes which copy of it is called: a forward cannot tell."""

    def __init__(self, owner: Interceptor) -> None:
        self.owner = owner

    def __call__(self, module: nn.Module, args: Any) -> None:
        """``module`` is about to run; torch calls this before its forward."""
        self.owner.here.called = None if module is self.owner.model else module


def interleaved() -> BusyError:
    """The error of a call that comes while another task of its thread is inside a block of ``active``."""
    return BusyError(
        "active",
        "another asyncio task of this thread awaits inside a `with sim.active():` block, and what it intercepts would mix "
        "with the calls of this task",
        "await outside of the block, call sim.model(...) without a block, or run the block in a thread "
        "(await asyncio.to_thread(...))",
    )


def interceptions(module: nn.Module) -> list[Forward]:
    """The interceptions that stand in the place of a module's forward, outermost first."""
    found, forward = [], vars(module).get("forward")
    while isinstance(forward, Forward):
        found.append(forward)
        forward = forward.before
    return found


def forward_signature(model: nn.Module) -> inspect.Signature | None:
    """The signature of the model's own forward, whatever stands before it; ``None`` where Python cannot tell."""
    forward: Any = model.forward
    while isinstance(forward, Forward):
        forward = forward.call
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None
