"""A module opened for a change: its view, what it computed before, and what differs since."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from bitwright.algorithms.channels.trial import Reversible
from bitwright.algorithms.folding import batch_norm_fold
from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.algorithms.front_ends import FrontEnd, Opened, Repairable
from bitwright.comparison.saturation import SaturationReport
from bitwright.core.health.repair import Repair
from bitwright.core.simulation.protocols import Array, sqnr
from bitwright.errors import ModelError
from bitwright.progress import progress as bar
from bitwright.torch.adapters.bias_correct import TorchCorrectable
from bitwright.torch.adapters.program import Forward, TorchSimulation
from bitwright.torch.adapters.view import TorchView
from bitwright.torch.calls.batches import as_call, evaluation, model_device, refuse_providers, to_device
from bitwright.torch.calls.trees import flatten_tensors, map_tensors, walk_modules
from bitwright.torch.ranks import batches_of_ranks
from bitwright.torch.simulation.quantsim import QuantizationSimModel

logger = logging.getLogger("bitwright")

# dB that the outputs before and after must agree to: what the rounding of the weights' own dtype leaves in a deep network
_FLOORS = {torch.float16: 30.0, torch.bfloat16: 12.0}


class TorchOpened(Opened):
    """A model of this front end."""

    def __init__(self, model: nn.Module, shapes: Any, dummy_input: Any, function: str) -> None:
        self.model = model
        example = example_input(model, shapes, function) if dummy_input is None else dummy_input
        self.example = to_device(example, model_device(model))
        self.view = self._view()
        self._before = self._outputs_of(self.view)  # explains an example that does not fit

    def _view(self) -> TorchView:
        return TorchView(self.model, [map_tensors(self.example, torch.clone)])  # a model may write into its input

    def _outputs_of(self, view: TorchView) -> list[tuple[str, torch.Tensor]]:
        """What the model computes when it is recorded, or in another run where that may differ."""
        view.graph()
        result = view.take_result()
        return self._outputs() if result is None else _named_floats(result)

    def _outputs(self) -> list[tuple[str, torch.Tensor]]:
        return float_outputs(self.model, self.example)

    def changed(self) -> str | None:
        """What is different on the example input; ``None`` when only rounding is."""
        return what_changed(self._outputs, self._before)

    def fold(self, progress: bool) -> FoldReport:
        """Fold batch norms; the view shows the folded model then."""
        folded = self._view()
        checks: list[str | None] = []

        def changed() -> str | None:
            """As :meth:`changed`; the first time by recording the model, which gives the view of the folded one."""
            outputs = partial(self._outputs_of, folded) if not checks else self._outputs
            checks.append(what_changed(outputs, self._before))
            return checks[-1]

        report = self._folded(progress, changed)
        if list(report):
            self.view = folded if checks == [None] else self._view()
        return report

    def fold_last(self, progress: bool, only: set[str] | None = None) -> FoldReport:
        """Fold batch norms, of the names ``only`` if given; nothing is asked of the view any more."""
        return self._folded(progress, self.changed, only)

    def _folded(self, progress: bool, changed: Callable[[], str | None], only: set[str] | None = None) -> FoldReport:
        if any(module.training for _, module in walk_modules(self.model)):
            logger.warning(
                "the model is in training mode: folding uses the running statistics of its batch norms, so the folded model "
                "computes what this one computes after model.eval(); call model.eval() first"
            )
        report = batch_norm_fold.fold_all_batch_norms(self.view, changed, only=only, bar=partial(bar, enabled=progress))
        report.keep()
        return report

    def finish(self, report: Reversible) -> None:
        """Nothing to do: the module is changed in place, and ``report.undo()`` stays possible."""

    def give_back(self) -> None:
        """Let the view read the module anew."""
        self.view.refresh()


class TorchRepairable(Repairable):
    """A simulation of this front end; what is not a floating-point tensor passes a repair unchanged."""

    def __init__(self, sim: QuantizationSimModel) -> None:
        self._simulator = sim._simulator
        self.ops = {plan.op for plan in self._simulator.plans.values()}

    def put_in_force(self, repairs: Sequence[Repair]) -> None:
        """At the calls of the operators."""
        self._simulator.repairs = {repair.op: repair for repair in repairs}


class TorchFrontEnd(FrontEnd):
    """Models and simulations of this front end."""

    knows_shapes = False

    def open_model(self, model: nn.Module, shapes: Any, dummy_input: Any, function: str, providers: Any) -> TorchOpened:
        """As the base class says.

        Raises:
            ConfigError: ``providers`` are given.
            ModelError: neither ``shapes`` nor ``dummy_input``, or the model fails on the input.
        """
        refuse_providers(providers)
        return TorchOpened(model, shapes, dummy_input, function)

    def fold(
        self, model: nn.Module, shapes: Any, dummy_input: Any, function: str, providers: Any, progress: bool
    ) -> FoldReport:
        """As the base class says."""
        return self.open_model(model, shapes, dummy_input, function, providers).fold_last(progress)

    def float_model(self, sim: QuantizationSimModel) -> nn.Module:
        """As the base class says."""
        return copy.deepcopy(sim).remove()

    def simulated_as(self, sim: QuantizationSimModel, model: nn.Module) -> QuantizationSimModel:
        """As the base class says; ``model`` is simulated in place."""
        rules: Any = sim.rules
        found = QuantizationSimModel(
            model, sim.examples[0], in_place=True, config_file=rules, examples=sim.examples[1:]
        )
        found.quantizers.ask_as(sim.quantizers)
        return found

    def correctable(self, sim: QuantizationSimModel, reference: nn.Module | None = None) -> TorchCorrectable:
        """As the base class says."""
        if reference is None:
            return TorchCorrectable(sim)
        return TorchCorrectable(sim, QuantizationSimModel(reference, sim.examples[0], examples=sim.examples[1:]))

    def batches_of_all(self, batches: Iterable[Any]) -> Iterable[Any]:
        """As the base class says."""
        return batches_of_ranks(batches)

    def steppable(self, sim: QuantizationSimModel, forward_fn: Forward | None) -> TorchSimulation:
        """As the base class says."""
        return TorchSimulation(sim, forward_fn)

    def repairable(self, sim: QuantizationSimModel) -> TorchRepairable:
        """The results of its operators."""
        return TorchRepairable(sim)

    def saturation_count(
        self, sim: QuantizationSimModel, batches: Sequence[Any], options: dict[str, Any]
    ) -> Callable[[], SaturationReport]:
        """As the base class says."""
        from bitwright.torch.simulation.export import saturation_count

        return saturation_count(sim, batches, **options)

    def simulated_outputs(self, sim: QuantizationSimModel, batch: Any) -> list[Array]:
        """As the base class says."""
        args, kwargs = as_call(to_device(batch, model_device(sim.model)))
        with torch.no_grad(), evaluation(sim.model):
            outputs = flatten_tensors(sim.model(*args, **kwargs))
        return [t.double().cpu().numpy() for _, t in outputs if t.is_floating_point()]


FRONT_END = TorchFrontEnd()


def example_input(model: nn.Module, shapes: Any, function: str) -> Any:
    """Random inputs of the shapes given, in the model's dtype.

    Raises:
        ModelError: no shapes.
    """
    if shapes is None:
        raise ModelError(
            function,
            "neither dummy_input nor input_shapes was given, so the model cannot be run once",
            "pass dummy_input=x, or input_shapes=(1, 3, 224, 224)",
        )
    several = len(shapes) > 0 and isinstance(shapes[0], Sequence)
    generator = torch.Generator().manual_seed(0)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = tuple(torch.randn(tuple(s), generator=generator).to(dtype) for s in (shapes if several else [shapes]))
    return inputs if several else inputs[0]


def float_outputs(model: nn.Module, example: Any) -> list[tuple[str, torch.Tensor]]:
    """Name and value of every floating-point output of the model on an input, in evaluation mode."""
    args, kwargs = as_call(map_tensors(example, torch.clone))  # a model may write into its input
    with torch.no_grad(), evaluation(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _named_floats(model(*args, **kwargs))


def _named_floats(output: Any) -> list[tuple[str, torch.Tensor]]:
    return [(n, t.detach().clone()) for n, t in flatten_tensors(output) if t.is_floating_point()]


def what_changed(
    outputs: Callable[[], list[tuple[str, torch.Tensor]]], before: list[tuple[str, torch.Tensor]]
) -> str | None:
    """What is different in ``outputs()`` since ``before`` was taken of it; ``None`` when only rounding is."""
    try:
        after = outputs()
    except Exception as error:  # in the model's own code, which may rely on what the folds have changed
        return f"the model fails: {type(error).__name__}: {error}"
    for (name, old), (_, new) in zip(before, after, strict=True):
        finite = torch.isfinite(old)  # mask constants and the like must stay where they are
        if not torch.equal(finite, torch.isfinite(new)):
            return f"{name} has NaN or infinite elements in other places"
        agreement = sqnr(old[finite].double().cpu().numpy(), new[finite].double().cpu().numpy())
        if agreement < _FLOORS.get(old.dtype, 60.0):
            return f"{name} agrees with the original to {agreement:.1f} dB only"
    return None
