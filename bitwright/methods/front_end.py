"""The protocol between methods and front ends, and which front end a model belongs to."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

from bitwright.core.health.diagnosis import Repair
from bitwright.core.health.report import HealthReport
from bitwright.core.simulation.float_model import Array
from bitwright.errors import ModelError
from bitwright.methods.bias_correction import Correctable
from bitwright.methods.folding.batch_norm_fold import FoldReport
from bitwright.methods.layers import Reversible


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


# Top-level module of a class of models -> the front end that reads it. Classes that users derive from these are found too.
_FRONT_ENDS = {"torch": "torch", "onnx": "onnx", "onnx_ir": "onnx"}


def front_end_of(model: Any) -> FrontEnd:
    """What changes a model, or reads a simulation, of either front end.

    Raises:
        ModelError: it is of neither.
    """
    module = importlib.import_module(f"bitwright.{_name_of(model)}.opened")
    return cast(FrontEnd, module.FRONT_END)


def health_check_of(model: Any) -> Callable[..., HealthReport]:
    """``check(model, data, providers, threads, progress)`` of a model of either front end.

    Raises:
        ModelError: it is of neither.
    """
    module = importlib.import_module(f"bitwright.{_name_of(model)}.nan_doctor")
    return cast(Callable[..., HealthReport], module.check_health)


def pipeline_of(model: Any, providers: Any, memory_budget: int | None) -> Pipeline:
    """A model of either front end on its way through :func:`bitwright.quantize`.

    Raises:
        ModelError: it is of neither, or cannot be read.
        ConfigError: an option that its front end does not have.
    """
    name = _name_of(model)
    module = importlib.import_module(f"bitwright.{name}.opened")
    return cast(Pipeline, getattr(module, f"{name.title()}Pipeline")(model, providers, memory_budget))


def _name_of(model: Any) -> str:
    if isinstance(model, (str, PathLike)):  # of a file
        return "onnx"
    for cls in type(model).__mro__:
        parts = cls.__module__.split(".")
        name = parts[1] if parts[0] == "bitwright" and len(parts) > 1 else _FRONT_ENDS.get(parts[0])
        if name in ("torch", "onnx"):
            return name
    raise ModelError(
        "model",
        f"a {type(model).__name__} is not a model of PyTorch or ONNX",
        "give a torch.nn.Module, or a loaded ONNX model: onnx.load(path), bitwright.onnx.load_model(path)",
    )
