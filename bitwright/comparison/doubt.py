"""A tensor at which two executions differ although they are fed the same, and the runs that can be made for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.comparison.lockstep import Edit, Lockstep, unchanged
from bitwright.comparison.points import Pair
from bitwright.comparison.report import CauseName
from bitwright.comparison.sides import Side
from bitwright.export.verify.agreement import Agreement
from bitwright.export.verify.cut import Place

Array = NDArray[Any]
#: two values to compare; ``None`` where the run cannot be made
Run = Callable[[], tuple[Array, Array] | None]


@dataclass(frozen=True)
class Suspect:
    """A cause that could explain a difference.

    Attributes:
        cause: its name.
        text: what happens, if it is the cause.
        remedy: what to do then.
        without: what is changed for the run without it.
        run: that run.
    """

    cause: CauseName
    text: str
    remedy: str
    without: str
    run: Run


@dataclass(frozen=True)
class Doubt:
    """One tensor at which two executions differ although they are fed the same.

    Attributes:
        lockstep: of the two.
        pair: the tensor.
    """

    lockstep: Lockstep
    pair: Pair

    @property
    def a(self) -> Side:
        """The execution that is nearer to what was trained."""
        return self.lockstep.a

    @property
    def b(self) -> Side:
        """The execution in question."""
        return self.lockstep.b

    @property
    def wanted(self) -> Array:
        """What the first execution makes there."""
        return self.lockstep.own_a[self.pair]

    @property
    def found(self) -> Array:
        """What the second execution makes there."""
        return self.lockstep.own_b[self.pair]

    @property
    def kernel(self) -> str:
        """What the runtime of the second execution ran last for it."""
        return self.lockstep.kernels[self.pair]

    @property
    def place(self) -> Place:
        """Where it is in the second model."""
        return self.lockstep.places[self.pair]

    @property
    def ops(self) -> tuple[str, ...]:
        """Operator types that make it there."""
        return tuple(self.place.piece.ops)

    def agreement(self, one: Array, other: Array) -> Agreement:
        """How two values of the tensor compare on its grid."""
        return self.lockstep.agreement(self.pair, one, other)

    def again(self, edit: Edit = unchanged, **options: Any) -> Array | None:
        """What the second execution makes there after an edit, or with other settings of ONNX Runtime."""

        def run(model: ir.Model, feeds: Any, types: Any) -> Any:
            return self.b.rerun(model, feeds, **options)

        found, _ = self.lockstep.locally(
            self.b, self.lockstep.feeds_b, [self.pair], edit=edit, run=run if options else None
        )
        return found.get(self.pair)

    def file(self, edit: Edit = unchanged) -> Array | None:
        """What the file says there, with float kernels."""
        return self.again(edit, mode="float")

    def beside(self, value: Callable[[], Array | None]) -> Run:
        """A run whose result is compared with what the first execution has."""

        def run() -> tuple[Array, Array] | None:
            found = value()
            return None if found is None else (self.wanted, found)

        return run

    def both(self, edit: Edit) -> Run:
        """A run of a changed file, compared with the changed file in float kernels."""

        def run() -> tuple[Array, Array] | None:
            one, other = self.file(edit), self.again(edit)
            return None if one is None or other is None else (one, other)

        return run
