"""PyTorch side of :class:`bitwright.methods.front_end.FrontEnd`: modules opened for a change, quantized, or bias-corrected."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bitwright.core.simulation.float_model import Undo, sqnr
from bitwright.errors import ConfigError, ModelError
from bitwright.methods.folding import batch_norm_fold
from bitwright.methods.folding.batch_norm_fold import FoldReport
from bitwright.methods.front_end import Correctable, FrontEnd, GivenModel, Opened, Part
from bitwright.methods.layers import Array, Layer, Reversible
from bitwright.progress import progress as progress_bar
from bitwright.torch.calls.functions import Args, Func, Function, Kwargs
from bitwright.torch.calls.inputs import (
    Inputs,
    as_call,
    evaluation,
    flatten_tensors,
    map_tensors,
    model_device,
    named_outputs_of,
    refuse_providers,
    same_draws,
    to_device,
    walk_modules,
)
from bitwright.torch.captured import as_module
from bitwright.torch.depth import TorchBlocks
from bitwright.torch.experts import TorchMixtures
from bitwright.torch.interception.intercept import Frame, Key
from bitwright.torch.pretrained import refuse_to_save
from bitwright.torch.program import Forward, TorchSimulation
from bitwright.torch.ranks import batches_of_ranks
from bitwright.torch.simulation.quantsim import QuantizationSimModel, adopt, copied, require_module
from bitwright.torch.simulation.simulate import Simulator, Stage
from bitwright.torch.structure import TorchStructure, save_compressed
from bitwright.torch.view import TorchView

Watch = Callable[[torch.Tensor], torch.Tensor]


class Watching(Simulator):
    """A simulator that passes the raw results of some operators through functions."""

    def __init__(self, simulator: Simulator, watches: Mapping[str, Watch]) -> None:
        vars(self).update(vars(simulator))  # shared, as variants of a simulator share it
        self._watches = watches

    def call(self, frame: Frame, key: Key, row: Function, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run a call, and apply the function of its operator, if any."""
        plan = self.plans.get(key)
        watch = None if plan is None else self._watches.get(plan.op)
        if watch is None:
            return super().call(frame, key, row, func, args, kwargs)

        def raw(*args: Any, **kwargs: Any) -> Any:
            result = func(*args, **kwargs)
            with torch._C.DisableTorchFunction():  # what is called here is not the model's
                return watch(result)

        return super().call(frame, key, row, raw, args, kwargs)


class TorchCorrectable(Correctable):
    """A torch simulation and its float model.

    Raises:
        CalibrationError: it is not calibrated.
    """

    sim: QuantizationSimModel
    reference: QuantizationSimModel

    def __init__(self, sim: QuantizationSimModel, reference: QuantizationSimModel | None = None) -> None:
        sim._simulator.begin((), {})  # refuses one that is not calibrated
        super().__init__(sim, reference)

    def errors(self, layers: Sequence[Layer], batch: object) -> dict[str, tuple[Array, float]]:
        """Run the model in float and quantized."""
        batch = to_device(batch, model_device(self.sim.model))
        means: dict[str, torch.Tensor] = {}
        shifts: dict[str, tuple[Array, float]] = {}

        def noting(layer: Layer) -> Watch:
            def watch(y: torch.Tensor) -> torch.Tensor:
                means[layer.op] = _means(y, layer)
                return y

            return watch

        def shifting(layer: Layer) -> Watch:
            def watch(y: torch.Tensor) -> torch.Tensor:
                if layer.op not in means:
                    return y
                shift = _means(y, layer) - means[layer.op]
                shifts[layer.op] = shift.cpu().numpy(), y.numel() / max(1, shift.numel())
                shape = [-1 if axis == layer.channel_axis else 1 for axis in range(y.dim())]
                return y - shift.to(y.dtype).reshape(shape)

            return watch

        self._run(self.reference, "float", batch, {layer.adder or layer.op: noting(layer) for layer in layers})
        self._run(self.sim, "simulate", batch, {layer.adder or layer.op: shifting(layer) for layer in layers})
        return shifts

    def _run(self, sim: QuantizationSimModel, stage: Stage, batch: Any, watches: Mapping[str, Watch]) -> None:
        handler = Watching(sim._simulator.variant(stage), watches)
        args, kwargs = as_call(batch)
        with sim._interceptor.handled_by(handler), torch.no_grad(), evaluation(sim.model):
            sim.model(*args, **kwargs)

    def param(self, name: str) -> Array:
        """A parameter or buffer."""
        return np.array(self.sim._interceptor.named_tensor(name).detach().float().cpu().numpy())

    def set_param(self, name: str, value: Array) -> None:
        """In place."""
        with torch.no_grad():
            self.sim._interceptor.named_tensor(name).copy_(torch.from_numpy(np.ascontiguousarray(value)))


def _means(y: torch.Tensor, layer: Layer) -> torch.Tensor:
    axes = [axis for axis in range(y.dim()) if axis != layer.channel_axis]
    return y.mean(axes, dtype=torch.float64)


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
        """Outputs of the recorded run, or of another run where they may differ."""
        with same_draws():
            view.graph()
        result = view.take_result()
        return self._outputs() if result is None else _named_floats(result)

    def _outputs(self) -> list[tuple[str, torch.Tensor]]:
        return float_outputs(self.model, self.example)

    def changed(self) -> str | None:
        """A description of the difference on the example input; ``None`` within rounding."""
        return what_changed(self._outputs, self._before)

    def fold(self, progress: bool, unchecked: bool = False) -> FoldReport:
        """As the base class says; the recording of the folded model is its check, which costs nothing."""
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
        report = batch_norm_fold.fold_batch_norms(
            self.view, changed, only=only, bar=partial(progress_bar, enabled=progress)
        )
        report.keep()
        return report

    def finish(self, report: Reversible) -> None:
        """Nothing to do: the module is changed in place, and ``report.undo()`` stays possible."""

    def undescribed(self, reason: str, plan: Mapping[str, Any]) -> Undo:
        """By its ``save_pretrained``, of models of transformers and diffusers."""
        return refuse_to_save(self.model, reason, plan)

    def give_back(self) -> None:
        """Let the view read the module anew."""
        self.view.refresh()

    def runnable(self) -> nn.Module:
        """The module."""
        return self.model

    def outputs(self, batches: Iterable[Any]) -> Iterator[Sequence[Array]]:
        """As the base class says; in evaluation mode."""
        for batch in batches:
            yield [array for _, array in named_outputs_of(self.model, map_tensors(batch, torch.clone))]


class TorchGiven(GivenModel):
    """A model of this front end.

    Raises:
        ModelError: ``model`` is not a module that can be simulated.
        ConfigError: ``providers`` or a ``memory_budget`` are given, which only ONNX models have.
    """

    def __init__(self, model: Any, providers: Any, memory_budget: int | None) -> None:
        model = as_module(model)
        require_module(model)
        refuse_providers(providers)
        if memory_budget is not None:
            raise ConfigError(
                "memory_budget",
                f"{memory_budget!r} is given for a PyTorch module, whose activations are seen one by one",
                "leave it out",
            )
        self._model = model
        self._names: list[str] = []

    def copy(self, first: Any) -> nn.Module:
        """Made as a simulation makes its own."""
        return adopt(self._model, first, in_place=False)

    def copied(self, work: nn.Module) -> nn.Module:
        """As the base class says."""
        return copied(work)

    def example(self) -> Any:
        """As the base class says: there is none, modules do not say what they take."""
        problem = "a PyTorch module does not say the shape of its input"
        raise ConfigError(
            "generate_data", problem, "give an example: generate_data(model, torch.zeros(1, 3, 224, 224))"
        )

    def outputs(self, batch: Any) -> Sequence[Any]:
        """As the base class says."""
        with same_draws():
            named = named_outputs_of(self._model, batch)
        self._names = [name for name, _ in named]
        return [array for _, array in named]

    def output_names(self) -> Sequence[str]:
        """Their paths in what the module returns: ``logits``, ``output[1]``."""
        return self._names

    def metric_target(self) -> nn.Module:
        """The module itself."""
        return self._model

    def answers(self, target: nn.Module, batch: Any) -> Sequence[Any]:
        """As the base class says; in evaluation mode."""
        with same_draws():
            return [array for _, array in named_outputs_of(target, batch)]

    def reference(self, work: nn.Module) -> nn.Module:
        """A copy: the simulation is made in place, and methods of rounding write into it."""
        return copied(work)

    def simulation(self, work: nn.Module, first: Any, rules: Mapping[str, Any]) -> QuantizationSimModel:
        """In place."""
        return QuantizationSimModel(work, first, **rules, in_place=True)


class TorchPart(Part):
    """A module that a program calls; hooks record its inputs and replace its outputs."""

    def __init__(self, model: nn.Module) -> None:
        require_module(model)
        self.target: nn.Module = model

    def holds(self, other: Part) -> bool:
        """As the base class says."""
        return any(module is other.target for _, module in walk_modules(self.target))

    @contextmanager
    def recorded(self, keep: Callable[[Any], None]) -> Iterator[None]:
        """As the base class says."""

        def record(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
            call = Inputs(args, kwargs) if args and kwargs else kwargs or args
            keep(map_tensors(call, lambda tensor: tensor.detach().clone()))

        with self._hooked(self.target.register_forward_pre_hook(record, with_kwargs=True)):
            yield

    @contextmanager
    def replaced(self, sim: QuantizationSimModel) -> Iterator[None]:
        """As the base class says; the module runs as well, since a hook can replace only what it returned."""

        def answer(module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
            return sim.model(*args, **kwargs)

        with self._hooked(self.target.register_forward_hook(answer, with_kwargs=True)):
            yield

    @contextmanager
    def _hooked(self, handle: RemovableHandle) -> Iterator[None]:
        try:
            with torch.no_grad(), evaluation(self.target):
                yield
        finally:
            handle.remove()

    def same_draws(self) -> AbstractContextManager[None]:
        """As the base class says."""
        return same_draws()


class TorchFrontEnd(FrontEnd):
    """Models and simulations of this front end."""

    def given(self, model: nn.Module, providers: Any, memory_budget: int | None) -> TorchGiven:
        """As the base class says."""
        return TorchGiven(model, providers, memory_budget)

    def structured(self, model: nn.Module, first: Any, providers: Any, in_place: bool = False) -> TorchStructure:
        """As the base class says.

        Raises:
            ConfigError: ``providers`` are given.
        """
        refuse_providers(providers)
        model = model if in_place else as_module(model)
        require_module(model)
        return TorchStructure(model if in_place else copied(model), [first])

    def part(self, model: nn.Module) -> TorchPart:
        """As the base class says."""
        return TorchPart(model)

    def mixtures(self, model: nn.Module, batches: Sequence[Any], providers: Any) -> TorchMixtures:
        """As the base class says.

        Raises:
            ConfigError: ``providers`` are given.
        """
        refuse_providers(providers)
        require_module(model)
        return TorchMixtures(model, batches)

    def blocks(self, model: nn.Module, first: Any, providers: Any) -> TorchBlocks:
        """As the base class says.

        Raises:
            ConfigError: ``providers`` are given.
        """
        refuse_providers(providers)
        require_module(model)
        return TorchBlocks(model, first)

    def save_compressed(self, model: nn.Module, plan: dict[str, Any], folder: Path, name: str) -> list[Path]:
        """``<name>.safetensors`` and ``<name>.plan.json``."""
        return save_compressed(model, plan, folder, name)

    def open_model(self, model: nn.Module, shapes: Any, dummy_input: Any, function: str, providers: Any) -> TorchOpened:
        """As the base class says.

        Raises:
            ConfigError: ``providers`` are given.
            ModelError: neither ``shapes`` nor ``dummy_input``, or the model fails on the input.
        """
        refuse_providers(providers)
        require_module(model)
        return TorchOpened(model, shapes, dummy_input, function)

    def fold(
        self, model: nn.Module, shapes: Any, dummy_input: Any, function: str, providers: Any, progress: bool
    ) -> FoldReport:
        """As the base class says."""
        return self.open_model(model, shapes, dummy_input, function, providers).fold_last(progress)

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


FRONT_END = TorchFrontEnd()


def example_input(model: nn.Module, shapes: Any, function: str) -> Any:
    """Random inputs of the shapes given, in the model's dtype.

    Raises:
        ModelError: no shapes, or something else in their place, such as the example itself.
    """
    remedy = "pass dummy_input=x, or input_shapes=(1, 3, 224, 224)"
    if shapes is None:
        problem = "neither dummy_input nor input_shapes was given, so the model cannot be run once"
        raise ModelError(function, problem, remedy)
    several = isinstance(shapes, Sequence) and len(shapes) > 0 and isinstance(shapes[0], Sequence)
    each = list(shapes) if several else [shapes]
    if not all(isinstance(shape, Sequence) and all(isinstance(n, Integral) for n in shape) for shape in each):
        raise ModelError(
            function, f"input_shapes is no shape and no list of shapes, but {type(shapes).__name__}", remedy
        )
    generator = torch.Generator().manual_seed(0)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = tuple(torch.randn(tuple(s), generator=generator).to(dtype) for s in each)
    return inputs if several else inputs[0]


def float_outputs(model: nn.Module, example: Any) -> list[tuple[str, torch.Tensor]]:
    """Name and value of every floating-point output of the model on an input, in evaluation mode."""
    args, kwargs = as_call(map_tensors(example, torch.clone))  # a model may write into its input
    with torch.no_grad(), evaluation(model), same_draws():
        return _named_floats(model(*args, **kwargs))


def _named_floats(output: Any) -> list[tuple[str, torch.Tensor]]:
    return [(n, t.detach().clone()) for n, t in flatten_tensors(output) if t.is_floating_point()]


def what_changed(
    outputs: Callable[[], list[tuple[str, torch.Tensor]]], before: list[tuple[str, torch.Tensor]]
) -> str | None:
    """The difference of ``outputs()`` from ``before``, in words; ``None`` within rounding."""
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
