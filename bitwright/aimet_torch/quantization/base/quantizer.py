"""What all quantizers of the building blocks offer."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bitwright.aimet_torch.quantization.base.encoding import EncodingBase
from bitwright.errors import CalibrationError


class QuantizerBase(abc.ABC, nn.Module):
    """A module that quantizes its input.

    A quantizer that was put in a place of a simulation (``module.output_quantizers[0] = q``) shows and changes the quantizer
    of that place from then on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._overwrite: dict[str, bool] = {}
        self.__dict__["_bound"] = None
        self.__dict__["_observing"] = 0

    # -- being the quantizer of a place in a simulation

    @property
    def bound(self) -> Any:
        """The quantizer of a simulation that this one stands for; ``None`` if none."""
        return self.__dict__["_bound"]

    def bind(self, view: Any) -> None:
        """Stand for the quantizer of a simulation."""
        self.__dict__["_bound"] = view

    # -- what a script asks

    @abc.abstractmethod
    def is_initialized(self) -> bool:
        """Whether there is a range."""

    @abc.abstractmethod
    def get_encodings(self) -> Any:
        """The encoding; ``None`` until there is a range."""

    def get_encoding(self) -> Any:
        """:meth:`get_encodings` under its older name."""
        return self.get_encodings()

    def set_encodings(self, encodings: EncodingBase) -> None:
        """Take grid and range of an encoding."""
        raise NotImplementedError(f"{type(self).__name__}.set_encodings")

    @classmethod
    @abc.abstractmethod
    def from_encodings(cls, encodings: EncodingBase) -> Any:
        """A quantizer with the grid and range of an encoding; ``None`` for encodings of another kind."""

    @abc.abstractmethod
    def get_legacy_encodings(self) -> list[dict[str, Any]] | None:
        """The encoding as files of version 0.6.1 have it; ``None`` without a range."""

    @abc.abstractmethod
    def set_legacy_encodings(self, encodings: list[dict[str, Any]]) -> None:
        """Take records of version 0.6.1."""

    @contextmanager
    def compute_encodings(self) -> Iterator[None]:
        """Find the range from what passes inside the block."""
        self._start()
        self.__dict__["_observing"] += 1
        try:
            yield
            self._finish()
        finally:
            self.__dict__["_observing"] -= 1

    @property
    def observing(self) -> bool:
        """Whether a :meth:`compute_encodings` block is open."""
        return bool(self.__dict__["_observing"])

    @abc.abstractmethod
    def _start(self) -> None: ...

    @abc.abstractmethod
    def _finish(self) -> None: ...

    def allow_overwrite(self, mode: bool | None = None, **ends: bool) -> None:
        """Whether :meth:`compute_encodings` may change the range, or single ends of it (``min=False``).

        Args:
            mode: for all parameters of the quantizer.
            ends: by the name of the parameter.
        """
        names = list(self._overwrite)
        self._overwrite.update(dict.fromkeys(names, bool(mode)) if mode is not None else {})
        self._overwrite.update({name: bool(allowed) for name, allowed in ends.items()})
        if self.bound is not None:
            self.bound.allow_overwrite(all(self._overwrite.values()))

    def is_overwrite_allowed(self, name: str | None = None) -> bool:
        """Whether :meth:`compute_encodings` may change the parameter called ``name``, or all of them."""
        return self._overwrite[name] if name is not None else all(self._overwrite.values())

    def _refuse_uninitialized(self) -> None:
        if not self.is_initialized():
            raise CalibrationError(
                type(self).__name__,
                "the quantizer has no range yet",
                "run data through it inside `with quantizer.compute_encodings():`, or call set_range(min, max)",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizerBase:
        """A copy that stands on its own, with the range of the place it stood for."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        import copy

        state = {key: value for key, value in self.__dict__.items() if key not in ("_bound", "_observing")}
        made.__dict__.update(copy.deepcopy(state, memo))
        made.__dict__.update(_bound=copy.deepcopy(self.bound, memo), _observing=0)
        return made


def check_input(input: Any, quantizer: object) -> torch.Tensor:
    """``input``, if it is a floating-point tensor.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(input, torch.Tensor) or not input.is_floating_point():
        kind = input.dtype if isinstance(input, torch.Tensor) else type(input).__name__
        raise TypeError(f"{type(quantizer).__name__} quantizes floating-point tensors, not {kind}")
    return input
