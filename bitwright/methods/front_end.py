"""Which front end a model belongs to, and what methods ask of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, cast

from bitwright.algorithms.bias_correct import Correctable, QuantParams
from bitwright.algorithms.channels.trial import Reversible
from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.core.health.repair import Repair
from bitwright.core.health.report import HealthReport
from bitwright.core.simulation.protocols import Array
from bitwright.errors import ModelError

if TYPE_CHECKING:
    from bitwright.comparison.saturation import SaturationReport

# Top-level module of a class of models -> the front end that reads it. Classes that users derive from these are found too.
_FRONT_ENDS = {"torch": "torch", "onnx": "onnx", "onnx_ir": "onnx"}


class Opened(Protocol):
    """A model opened for a change.

    Attributes:
        view: how algorithms read and change it.
    """

    view: Any  # a FloatModel; both front ends have more

    def changed(self) -> str | None:
        """What the model computes differently on its example input since it was opened; ``None`` for nothing."""

    def fold(self, progress: bool) -> FoldReport:
        """Fold batch norms for good; ``view`` shows the folded model then."""

    def finish(self, report: Reversible) -> None:
        """Write a change into what the caller gave; where that cannot be undone, ``report`` says so by being kept."""

    def give_back(self) -> None:
        """Write the model as it stands into what the caller gave."""

    def simulation(self, params: QuantParams) -> Any:
        """A simulation of the model as it stands."""


class Repairable(Protocol):
    """A simulation whose operators' results can be repaired.

    Attributes:
        ops: names of its operators.
    """

    ops: set[str]

    def obstacle(self, op: str) -> str | None:
        """Why the result of an operator cannot be repaired; ``None`` when it can."""

    def put_in_force(self, repairs: Sequence[Repair]) -> None:
        """Apply exactly these repairs, none of them ``float``, and no other."""


class FrontEnd(Protocol):
    """The module of a front end that opens models and simulations for methods.

    Attributes:
        knows_shapes: whether models say what shape their inputs have.
    """

    knows_shapes: bool

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

    def fold(
        self, model: Any, shapes: Any, dummy_input: Any, function: str, providers: Any, progress: bool
    ) -> FoldReport:
        """Fold batch norms for good."""

    def float_model(self, sim: Any) -> Any:
        """The float model of a simulation, as a copy that may be changed."""

    def simulated_as(self, sim: Any, model: Any) -> Any:
        """A simulation of ``model`` under the rules of ``sim`` and with what its sites are asked for; not calibrated."""

    def correctable(self, sim: Any, reference: Any = None) -> Correctable:
        """A simulation as bias correction sees it; ``reference`` is the float model that is its goal."""

    def steppable(self, sim: Any, forward_fn: Any) -> Any:
        """A simulation as the methods that choose weights see it.

        Raises:
            ConfigError: ``forward_fn`` for a front end whose models are called in one way.
        """

    def batches_of_all(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches of all processes that work together, in an order that does not depend on who had which.

        Raises:
            ConfigError: a batch holds what cannot be sent.
            CalibrationError: another process ended, or did not come.
        """

    def repairable(self, sim: Any) -> Repairable:
        """A simulation whose operators' results can be repaired."""

    def saturation_count(
        self, sim: Any, batches: Sequence[Any], options: dict[str, Any]
    ) -> Callable[[], SaturationReport]:
        """What counts saturated sums of the file of a simulation, as its encodings are then; the model is recorded once.

        Raises: as the simulation's ``saturation``.
        """

    def simulated_outputs(self, sim: Any, batch: Any) -> Sequence[Array]:
        """Every floating-point output of a simulation, as float64."""


def front_end_of(model: Any) -> FrontEnd:
    """What changes a model, or reads a simulation, of either front end.

    Raises:
        ModelError: it is of neither.
    """
    return cast(FrontEnd, importlib.import_module(f"bitwright.{_name_of(model)}.adapters.opened"))


def health_check_of(model: Any) -> Callable[..., HealthReport]:
    """``check(model, data, providers, threads, progress)`` of a model of either front end.

    Raises:
        ModelError: it is of neither.
    """
    module = importlib.import_module(f"bitwright.{_name_of(model)}.health")
    return cast(Callable[..., HealthReport], module.check_health)


def pipeline_of(model: Any, providers: Any, memory_budget: int | None) -> Any:
    """A model of either front end on its way through :func:`bitwright.quantize`.

    Raises:
        ModelError: it is of neither, or cannot be read.
        ConfigError: an option that its front end does not have.
    """
    name = _name_of(model)
    module = importlib.import_module(f"bitwright.{name}.pipeline")
    return getattr(module, f"{name.title()}Pipeline")(model, providers, memory_budget)


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
