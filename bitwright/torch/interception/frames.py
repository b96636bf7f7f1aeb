"""What a thread runs of a model: the forwards it is in, the handler of its calls, the replica in the model's place."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from bitwright.torch.calls.functions import Function
from bitwright.torch.calls.trees import walk_modules

Key = Hashable


@dataclass(slots=True)
class Frame:
    """One running forward: of a module, or of the decomposition of a fused call."""

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

    def next_turn(self, place: Hashable) -> int:
        """How often the place of a parameter was called in this forward; counts this time."""
        n = self.turns.get(place, 0)
        self.turns[place] = n + 1
        return n

    def copy(self) -> Frame:
        """The frame as it stands."""
        return replace(self, counts=dict(self.counts), turns=dict(self.turns))


class Handler(ABC):
    """What happens to the calls: recording, calibration, simulation, export."""

    @abstractmethod
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

    @abstractmethod
    def other(self, frame: Frame, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a call of any other torch function."""

    @abstractmethod
    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model's forward starts; without arguments, something of it that is called on its own."""

    def part(self, path: str, caller: str | None) -> bool:
        """Whether a module below the model may be called on its own, by the method ``caller`` of ``"Class.method"``.

        By default only whole forwards may.
        """
        return False

    @abstractmethod
    def end(self, output: Any) -> None:
        """The model's forward returned ``output``."""


class Thread:
    """What one thread runs of a model.

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
        """``error`` passes the module at ``path``; the first one that it passes is where it happened."""
        known, self._error = self._error, error
        if error is not known and (known is None or error.__context__ is not known):
            self.failed_in = path

    def forget_error(self) -> None:
        """Let go of the error, and with it of the frames that its traceback holds."""
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
    """The asyncio task that runs in this thread, if one does."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None
