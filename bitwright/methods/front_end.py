"""Protocols of the front ends for methods: models opened for a change, models to be quantized, simulations."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.health.report import HealthReport
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.simulation import Simulation
from bitwright.errors import ModelError, with_article
from bitwright.methods.folding.batch_norm_search import FoldReport
from bitwright.methods.layers import Array, Layer, Reversible


class Opened(ABC):
    """A model opened for a change.

    Attributes:
        view: how algorithms read and change it.
        reopens: what was given stays as it is until :meth:`give_back`, so that it can be opened again.
    """

    reopens = False
    view: Any  # a FloatModel; both front ends have more

    @abstractmethod
    def changed(self) -> str | None:
        """The change of the model's outputs on its example input since it was opened; ``None`` for none."""

    @abstractmethod
    def fold(self, progress: bool, unchecked: bool = False) -> FoldReport:
        """Fold batch norms for good; ``view`` shows the folded model then.

        Args:
            progress: show a bar.
            unchecked: whoever asks compares the outputs later, and opens the model again where they differ. Each fold is
                checked by itself all the same.
        """

    def finish(self, report: Reversible) -> None:
        """Write a change into the caller's model; where it cannot be undone, ``report`` is kept."""
        report.keep()
        self.give_back()

    def undescribed(self, reason: str, plan: Mapping[str, Any]) -> Undo:
        """Let a model that saves itself as a configuration and weights refuse to, since no configuration describes it.

        Args:
            reason: of the refusal.
            plan: what rebuilds the model.
        """
        return lambda: None

    @abstractmethod
    def give_back(self) -> None:
        """Write the present model into the caller's."""

    @abstractmethod
    def runnable(self) -> Any:
        """The argument of a metric: the module, or a session of the ONNX model."""

    @abstractmethod
    def outputs(self, batches: Iterable[Any]) -> Iterable[Sequence[Array]]:
        """Outputs of the current model for each batch."""


class Correctable(ABC):
    """A simulation as bias correction sees it: float and quantized in one.

    Args:
        sim: calibrated.
        reference: of the float model whose means are the goal; the simulation itself in float by default.
    """

    def __init__(self, sim: Simulation, reference: Simulation | None = None) -> None:
        self.sim, self.reference = sim, reference or sim
        self.graph: Graph = sim.graph

    @abstractmethod
    def errors(self, layers: Sequence[Layer], batch: object) -> dict[str, tuple[Array, float]]:
        """Run one batch in float, then quantized with each layer's output shifted to its float mean.

        Returns:
            Layer -> the shift taken off its output, float64, shape [outputs], and how many values it is the mean of; without
            layers that the batch did not reach.
        """

    def why_not_measured(self, layer: Layer) -> str | None:
        """The reason why :meth:`errors` cannot measure the shift of a layer; ``None`` where it can."""
        return None

    @abstractmethod
    def param(self, name: str) -> Array:
        """The value of a parameter, float32; a copy."""

    @abstractmethod
    def set_param(self, name: str, value: Array) -> None:
        """Replace a parameter; the grid of a bias follows."""

    def weight(self, layer: Layer) -> tuple[Array, Array]:
        """The weight of a layer, in float and as the simulation computes with it."""
        W = self.param(layer.weight)
        for site in self.sim.quantizers.values():
            if site.op == layer.op and site.role == "weight":
                live = site.enabled and site.encoding is not None
                return W, np.asarray(fake_quantize(W, site.encoding)) if live else W
        return W, W

    def bias(self, layer: Layer) -> Array:
        """The float bias of a layer that has one."""
        assert layer.bias is not None
        return self.param(layer.bias)

    def set_bias(self, layer: Layer, value: Array) -> None:
        """Replace the bias; its grid follows."""
        assert layer.bias is not None
        self.set_param(layer.bias, value)


class GivenModel(ABC):
    """A model that :func:`bitwright.quantize` was given; the work is done on copies of it."""

    @abstractmethod
    def copy(self, first: Any) -> Any:
        """Make the copy of the model that steps change; ``first`` is an example input."""

    @abstractmethod
    def copied(self, work: Any) -> Any:
        """A copy of the model that steps change."""

    @abstractmethod
    def example(self) -> Any:
        """An input of random values, of a model that knows the shapes of its inputs but for the batch.

        Raises:
            ConfigError: it does not.
        """

    @abstractmethod
    def outputs(self, batch: Any) -> Sequence[Any]:
        """Outputs of the model, as arrays."""

    @abstractmethod
    def output_names(self) -> Sequence[str]:
        """Names of the last result of :meth:`outputs`, in its order."""

    @abstractmethod
    def metric_target(self) -> Any:
        """The argument of a metric: the module, or a session; requested before the first :meth:`copy`."""

    @abstractmethod
    def answers(self, target: Any, batch: Any) -> Sequence[Any]:
        """Outputs of a model from :meth:`metric_target`, as arrays."""

    @abstractmethod
    def reference(self, work: Any) -> Any:
        """The float model of a simulation to be created, for bias correction."""

    @abstractmethod
    def simulation(self, work: Any, first: Any, rules: Mapping[str, Any]) -> Any:
        """A simulation of the model, which it may own."""


class Part(ABC):
    """A network that runs inside a larger program, for :func:`bitwright.quantize_pipeline`.

    Attributes:
        target: what the program calls: the module itself, or an object that stands for a session.
    """

    target: Any

    @abstractmethod
    def holds(self, other: Part) -> bool:
        """Whether ``other`` is this network or one inside it."""

    @abstractmethod
    def recorded(self, keep: Callable[[Any], None]) -> AbstractContextManager[None]:
        """Pass a copy of the input of every call to ``keep``, in the form that ``quantize`` takes."""

    @abstractmethod
    def replaced(self, sim: Any) -> AbstractContextManager[None]:
        """Answer calls of the network by its simulation."""

    @abstractmethod
    def same_draws(self) -> AbstractContextManager[None]:
        """Seed the framework's random numbers alike in every such block."""


class Kept(Protocol):
    """Positions of every value that are kept when channels are removed."""

    def axes(self, value: str | None) -> tuple[Array | None, ...]:
        """The kept positions of each axis, ascending, or ``None`` for all; ``()`` where the whole value stays."""

    def shape(self, value: str, shape: Sequence[int]) -> tuple[int, ...]:
        """``shape`` after the cut."""


@dataclass(frozen=True)
class Problem:
    """The reason why a cut fails.

    Attributes:
        where: operator, or path of the module.
        text: what happens there.
    """

    where: str
    text: str


class Blocks(ABC):
    """Blocks of a model that can be left out; the model is changed by :meth:`remove` only.

    Attributes:
        names: in the order of the model.
        refused: parts that are like blocks -> why they are none.
    """

    names: Sequence[str]
    refused: Mapping[str, str]

    @abstractmethod
    def graph(self) -> Graph:
        """Graph of the whole model."""

    @abstractmethod
    def gone(self, names: Sequence[str]) -> Collection[str]:
        """Operators that are removed with the blocks."""

    @abstractmethod
    def without(self, names: Sequence[str]) -> Callable[[], None]:
        """Leave blocks out; the function returned restores them."""

    @abstractmethod
    def outputs(self, batch: Any) -> list[Array]:
        """Outputs of the current model."""

    @abstractmethod
    def remove(self, names: Sequence[str], batch: Any) -> Mapping[str, Any]:
        """Remove blocks for good; returns the plan, empty for ONNX files.

        Raises:
            ModelError: the model then does not compute what it did with the blocks left out; it is as it was.
        """


def plan_of(steps: Sequence[Mapping[str, Any]], not_in_config: str = "") -> dict[str, Any]:
    """The plan of a compression, as plain data: its steps, and why no configuration describes the result, where none does."""
    return {"format": 1, "steps": steps, **({"not_in_config": not_in_config} if not_in_config else {})}


class Structured(ABC):
    """A model opened for the removal of channels; it is changed in place.

    Attributes:
        steps: what was done, as a plan of compression has it.
        not_in_config: why the configuration that the model is saved with cannot describe it; set by :meth:`finished`.
    """

    steps: list[dict[str, Any]]
    not_in_config: str = ""

    def plan(self) -> dict[str, Any]:
        """What was done, as plain data."""
        return plan_of(self.steps, self.not_in_config)

    @abstractmethod
    def graph(self) -> Graph:
        """The graph with operators on parameters, and all shapes known."""

    @abstractmethod
    def refresh(self) -> None:
        """Forget the graph after a change of the model."""

    @abstractmethod
    def param(self, name: str) -> Array:
        """A copy of a parameter, float32 or wider."""

    @abstractmethod
    def set_param(self, name: str, value: Array) -> None:
        """Give it another value of the same shape."""

    @abstractmethod
    def narrowed(self, batch: Any) -> Any:
        """A batch of the whole model without what cuts took from its inputs, which are states of recurrent layers."""

    @abstractmethod
    def outputs(self, batch: Any) -> list[Array]:
        """Outputs of the model for a batch of the whole model."""

    @abstractmethod
    def moved(self, op: Op, elements: Sequence[Array | None]) -> list[Array] | None:
        """Input element number of each output element of a data movement operator; -1 where it fills in a value.

        ``None`` where it depends on values that the model computes.
        """

    @abstractmethod
    def kept_axes(self, op: Op) -> tuple[int | None, ...]:
        """For each axis of the first input of a reduction: the axis of the result, or ``None`` where it is reduced."""

    @abstractmethod
    def argument(self, op: Op, name: str) -> Any:
        """An argument of the call, an attribute or a constant input; ``None`` where there is none."""

    @abstractmethod
    def equal_pieces(self, op: Op) -> list[list[int]]:
        """Pieces of a split that have one length and cannot be told others."""

    @abstractmethod
    def filled(self) -> frozenset[str]:
        """Constants that hold one number everywhere, and follow the width that the code gives them."""

    @abstractmethod
    def tied(self) -> list[list[tuple[str, int, int]]]:
        """Parameters whose widths the model holds in one number: ``(parameter, axis, blocks)``."""

    @abstractmethod
    def cut(self, kept: Kept) -> Callable[[], None]:
        """Remove what does not stay from parameters, attributes and operators; the function returned takes it back.

        Raises:
            ConfigError: the model cannot have these widths at once.
        """

    @abstractmethod
    def problem(self, kept: Kept, predicted: Graph) -> Problem | None:
        """The fault after a cut whose graph was ``predicted``; ``None`` where all shapes are as predicted."""

    @abstractmethod
    def view(self) -> Any:
        """A ``FloatModel`` of the model as it stands."""

    @abstractmethod
    def finished(self) -> Any:
        """The model, as its users hold it."""

    @abstractmethod
    def give_back(self) -> None:
        """Write the model as it stands into the one that was opened in place."""

    def undescribed(self) -> str:
        """Why the configuration that a model is saved with cannot say the present widths; empty where it can, or is none."""
        return ""

    def one_configuration(self) -> bool:
        """Whether one set of numbers describes the widths of all blocks of the model."""
        return False

    @abstractmethod
    def metric_target(self) -> Any:
        """The model as a metric takes it."""

    @abstractmethod
    def gradients(self, loss: Callable[[Any], Any], names: Sequence[str]) -> Mapping[str, Array]:
        """Gradients of a loss by parameters.

        Raises:
            ConfigError: the front end has none, or the loss is no number to differentiate.
        """

    @abstractmethod
    def directional_gradients(self, batch: Any, names: Sequence[str], seed: int) -> Mapping[str, Array]:
        """Gradients, by parameters, of the outputs of a batch in a random direction: of their sum with random signs.

        Raises:
            ConfigError: the front end has no gradients.
        """


def taken(axes: Sequence[Array | None], array: Array) -> Array:
    """The positions of an array that stay, per axis; ``None`` where all do."""
    for axis, positions in enumerate(axes):
        if positions is not None:
            array = array.take(positions, axis)
    return array


def kept_axes(rank: int, result: int, gone: set[int]) -> tuple[int | None, ...]:
    """Axis of a reduction's input -> axis of its result, or ``None``."""
    if result == rank:
        return tuple(None if i in gone else i for i in range(rank))
    kept = [i for i in range(rank) if i not in gone]
    return tuple(kept.index(i) if i in kept and kept.index(i) < result else None for i in range(rank))


class Mixtures(ABC):
    """The mixtures of a model of one front end, which is changed in place."""

    #: where they were looked for, for the message that there is none
    looked_for: str

    @abstractmethod
    def counts(self) -> Mapping[str, int]:
        """Name of each mixture -> number of its experts."""

    @abstractmethod
    def saliencies(self, names: Sequence[str], needed: bool, progress: bool) -> list[tuple[Array, Array]]:
        """``(saliency, tokens)`` of the experts of every mixture.

        Raises:
            ModelError: the results of experts cannot be told apart, and saliencies are ``needed``; else they are 0.
        """

    @abstractmethod
    def without(self, gone: Mapping[str, Sequence[int]]) -> list[Array]:
        """Outputs for the first batch of the model that never chooses these experts."""

    @abstractmethod
    def size(self) -> float:
        """Number of parameters."""

    @abstractmethod
    def remove(self, kept: Mapping[str, Sequence[int]]) -> tuple[list[Array], Undo]:
        """Take experts out; the outputs for the first batch, and what puts them back."""

    @abstractmethod
    def finish(self, kept: Mapping[str, Sequence[int]]) -> tuple[Mapping[str, Any], str]:
        """Let the caller's model be the changed one; its plan, and why no configuration describes it."""


class FrontEnd(ABC):
    """A front end for methods: opens its models and simulations; one object each."""

    @abstractmethod
    def given(self, model: Any, providers: Any, memory_budget: int | None) -> GivenModel:
        """A model for :func:`bitwright.quantize`.

        Raises:
            ModelError: it cannot be read.
            ConfigError: an option that the front end does not have.
        """

    @abstractmethod
    def part(self, model: Any) -> Part:
        """A network of a pipeline; of an ONNX model its session is opened.

        Raises:
            ModelError: it cannot be read, or is no module.
        """

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
    def structured(self, model: Any, first: Any, providers: Any, in_place: bool = False) -> Structured:
        """A copy of a model, opened for the removal of channels; ``first`` is an example input.

        With ``in_place`` the model itself is changed, at the latest by :meth:`Structured.give_back`.

        Raises:
            ModelError: it cannot be read or run; or in place, it is a path.
        """

    @abstractmethod
    def mixtures(self, model: Any, batches: Sequence[Any], providers: Any) -> Mixtures:
        """The mixtures of experts of a model, which is changed in place.

        Raises:
            ModelError: it cannot be read or run, or is a path.
        """

    @abstractmethod
    def blocks(self, model: Any, first: Any, providers: Any) -> Blocks:
        """The blocks of a model, which is changed in place; ``first`` is an example input.

        Raises:
            ModelError: it cannot be read or run, or is a path.
        """

    @abstractmethod
    def save_compressed(self, model: Any, plan: dict[str, Any], folder: Path, name: str) -> list[Path]:
        """Write a compressed model, and the plan that rebuilds it.

        Raises:
            ExportError: the folder cannot be written.
        """

    @abstractmethod
    def fold(
        self, model: Any, shapes: Any, dummy_input: Any, function: str, providers: Any, progress: bool
    ) -> FoldReport:
        """Fold batch norms for good."""

    @abstractmethod
    def correctable(self, sim: Any, reference: Any = None) -> Correctable:
        """A simulation for bias correction; ``reference``: its float target."""

    @abstractmethod
    def steppable(self, sim: Any, forward_fn: Any) -> Any:
        """A simulation for the methods of rounding.

        Raises:
            ConfigError: ``forward_fn`` for a front end whose models are called in one way.
        """

    @abstractmethod
    def batches_of_all(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches of all cooperating processes, in an order that does not depend on their distribution.

        Raises:
            ConfigError: a batch holds what cannot be sent.
            CalibrationError: another process ended, or did not come.
        """


# Top-level module of a class of models -> the front end that reads it. Classes that users derive from these are found too.
_FRONT_ENDS = {"torch": "torch", "onnx": "onnx", "onnx_ir": "onnx"}


def front_end_of(model: Any) -> FrontEnd:
    """The front end of a model or simulation.

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


def _name_of(model: Any) -> str:
    if isinstance(model, (str, PathLike)):  # of a file
        return "torch" if Path(model).suffix == ".pt2" else "onnx"
    for cls in type(model).__mro__:
        parts = cls.__module__.split(".")
        name = parts[1] if parts[0] == "bitwright" and len(parts) > 1 else _FRONT_ENDS.get(parts[0])
        if name in ("torch", "onnx"):
            return name
    raise ModelError(
        "model",
        f"{with_article(type(model).__name__)} is not a model of PyTorch or ONNX",
        "give a torch.nn.Module, a program of torch.export, or a loaded ONNX model: onnx.load(path), "
        "bitwright.onnx.load_model(path)",
    )
