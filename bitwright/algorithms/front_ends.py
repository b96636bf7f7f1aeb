"""What methods ask of a front end: models opened for a change, models on their way through a recipe, simulations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitwright.algorithms.bias_correct import Correctable
from bitwright.algorithms.channels.trial import Reversible
from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.core.health.repair import Repair
from bitwright.core.simulation.protocols import Array


class Opened(ABC):
    """A model opened for a change.

    Attributes:
        view: how algorithms read and change it.
    """

    view: Any  # a FloatModel; both front ends have more

    @abstractmethod
    def changed(self) -> str | None:
        """What the model computes differently on its example input since it was opened; ``None`` for nothing."""

    @abstractmethod
    def fold(self, progress: bool) -> FoldReport:
        """Fold batch norms for good; ``view`` shows the folded model then."""

    def finish(self, report: Reversible) -> None:
        """Write a change into what the caller gave; where that cannot be undone, ``report`` says so by being kept."""
        report.keep()
        self.give_back()

    @abstractmethod
    def give_back(self) -> None:
        """Write the model as it stands into what the caller gave."""


class Repairable(ABC):
    """A simulation whose operators' results can be repaired.

    Attributes:
        ops: names of its operators.
    """

    ops: set[str]

    def obstacle(self, op: str) -> str | None:
        """Why the result of an operator cannot be repaired; ``None`` when it can, as by default."""
        return None

    @abstractmethod
    def put_in_force(self, repairs: Sequence[Repair]) -> None:
        """Apply exactly these repairs, none of them ``float``, and no other."""


class FrontEnd(ABC):
    """What opens models and simulations of a front end for methods; one object each.

    Attributes:
        knows_shapes: whether models say what shape their inputs have.
    """

    knows_shapes: bool

    @abstractmethod
    def open_model(self, model: Any, shapes: Any, dummy_input: Any, function: str, providers: Any) -> Opened:
        """Open a model for the method ``function``.

        Args:
            model: as its users hold it.
            shapes: of random inputs; or, for a front end whose models know their shapes, the example input itself.
            dummy_input: the example input.
            function: named in errors.
            providers: where a runtime computes.

        Raises:
            ModelError: the model cannot be read or run, or the input does not fit.
        """

    @abstractmethod
    def fold(
        self, model: Any, shapes: Any, dummy_input: Any, function: str, providers: Any, progress: bool
    ) -> FoldReport:
        """Fold batch norms for good."""

    @abstractmethod
    def float_model(self, sim: Any) -> Any:
        """The float model of a simulation, as a copy that may be changed."""

    @abstractmethod
    def simulated_as(self, sim: Any, model: Any) -> Any:
        """A simulation of ``model`` under the rules of ``sim`` and with what its sites are asked for; not calibrated."""

    @abstractmethod
    def correctable(self, sim: Any, reference: Any = None) -> Correctable:
        """A simulation as bias correction sees it; ``reference`` is the float model that is its goal."""

    @abstractmethod
    def steppable(self, sim: Any, forward_fn: Any) -> Any:
        """A simulation as the methods that choose weights see it.

        Raises:
            ConfigError: ``forward_fn`` for a front end whose models are called in one way.
        """

    @abstractmethod
    def batches_of_all(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches of all processes that work together, in an order that does not depend on who had which.

        Raises:
            ConfigError: a batch holds what cannot be sent.
            CalibrationError: another process ended, or did not come.
        """

    @abstractmethod
    def repairable(self, sim: Any) -> Repairable:
        """A simulation whose operators' results can be repaired."""

    @abstractmethod
    def saturation_count(self, sim: Any, batches: Sequence[Any], options: dict[str, Any]) -> Callable[[], Any]:
        """What counts saturated sums of the file of a simulation, as its encodings are then; the model is recorded once.

        Raises: as the simulation's ``saturation``.
        """

    @abstractmethod
    def simulated_outputs(self, sim: Any, batch: Any) -> Sequence[Array]:
        """Every floating-point output of a simulation, as float64."""


class Pipeline(ABC):
    """A model of one front end on its way through :func:`quantize`."""

    @abstractmethod
    def work(self, first: Any) -> Any:
        """What the steps change in the place of the model that was given; ``first`` is an example input."""

    @abstractmethod
    def copied(self, work: Any) -> Any:
        """A copy of what the steps change."""

    @abstractmethod
    def float_outputs(self, batch: Any) -> Sequence[Any]:
        """What the model as given returns."""

    @abstractmethod
    def output_names(self) -> Sequence[str]:
        """Of what :meth:`float_outputs` returned last, in its order."""

    @abstractmethod
    def rate_float(self, metric: Callable[[Any], float]) -> float:
        """The metric of the model as given."""

    @abstractmethod
    def rate(self, sim: Any, metric: Callable[[Any], float]) -> float:
        """The metric of the simulated model."""

    @abstractmethod
    def reference(self, work: Any) -> Any:
        """The float model that a simulation is about to be made of, as bias correction takes it."""

    @abstractmethod
    def simulation(self, work: Any, first: Any, rules: Mapping[str, Any]) -> Any:
        """A simulation of it."""

    @abstractmethod
    def outputs(self, sim: Any, batch: Any) -> Sequence[Any]:
        """What the simulated model returns."""

    @abstractmethod
    def export(self, sim: Any, path: str | Path, prefix: str, first: Any, **options: Any) -> Any:
        """Write the files."""
