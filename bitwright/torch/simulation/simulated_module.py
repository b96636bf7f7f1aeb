"""``SimulatedModule``: a module whose calls are intercepted, with its quantizers and its state.

Calibration, training and files are those of :class:`~bitwright.torch.simulation.quantsim.QuantizationSimModel`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from bitwright.core.health.diagnosis import Repair
from bitwright.core.health.report import HealthReport, HealthTable
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.output_quality import one_of_runs
from bitwright.core.simulation.simulation import Occupancy
from bitwright.core.simulation.sites import Site
from bitwright.errors import ModelError, checks_arguments
from bitwright.export.encodings.of_simulation import SimulationFiles
from bitwright.torch.calls.inputs import (
    as_call,
    evaluation,
    model_device,
    named_arrays,
    named_state,
    outputs_of,
    run_batch,
    same_draws,
    to_device,
    trainable_tensors,
    walk_modules,
)
from bitwright.torch.interception.intercept import Interceptor
from bitwright.torch.interception.record import record
from bitwright.torch.quantizers.quantizer import Quantizer
from bitwright.torch.ranks import SharedGradients
from bitwright.torch.simulation.simulate import Simulator

logger = logging.getLogger("bitwright")


class SavesDequantized:
    """``save_pretrained`` of a simulated transformers model: writes the weights on their grids."""

    def __init__(self, sim: SimulatedModule) -> None:
        self.sim = sim

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the class with the dequantized state dict."""
        if kwargs.get("state_dict") is None:
            kwargs["state_dict"] = self.sim.dequantized_state_dict()
            others = [
                name
                for name, site in self.sim.quantizers.items()
                if site.enabled and site.role not in ("weight", "bias")
            ]
            logger.warning(
                "save_pretrained writes the weights as the simulation computes with them, on their grids, in the type of the "
                "model%s; sim.export writes integers, and sim.remove().save_pretrained the float weights",
                f", and none of the {len(others)} quantizers of activations" if others else "",
            )
        model = self.sim.model
        return type(model).save_pretrained(model, *args, **kwargs)  # type: ignore[attr-defined]


class SimulatedModule(SimulationFiles):
    """A module that computes with its quantizers in a given stage.

    Attributes:
        model: the module, of the user's own class.
        examples: the inputs that it was recorded on.
    """

    _export_options = {"dynamic_batch": "auto"}  # noqa: RUF012

    model: nn.Module
    examples: list[Any]
    _interceptor: Interceptor
    _simulator: Simulator
    _shared: SharedGradients  # of ranges that train

    @property
    def _occupancy(self) -> Occupancy:
        return self._interceptor.occupancy

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        with trainable_tensors(), self._occupancy.exclusive(what):
            yield

    def _set_calibrated(self) -> None:
        self._simulator.stage = "simulate"

    def _refresh_biases(self) -> None:
        self._simulator.refresh_biases()

    def _unseen(self) -> Mapping[str, str]:
        return self._simulator.unseen

    def _repairable(self) -> dict[str, str | None]:
        return dict.fromkeys(plan.op for plan in self._simulator.plans.values())

    def _put_in_force(self, repairs: Sequence[Repair]) -> None:
        """Apply repairs at the operators' calls; only floating-point tensors are changed."""
        self._simulator.repairs = {repair.op: repair for repair in repairs}

    def _outputs(self, batch: Any) -> list[Any]:
        with same_draws():
            return outputs_of(self.model, batch)

    def _outputs_and(self, names: Sequence[str]) -> Callable[[Any], list[Any]]:
        def answer(batch: Any) -> list[Any]:
            taps, output = self._captured(names, batch)
            values = (one_of_runs([t.float().cpu().numpy() for t in taps[name]]) for name in names)
            return [*(array for _, array in named_arrays(output)), *values]

        return answer

    def _name_nan(self, args: Any, kwargs: Any) -> None:
        """Name the operator that produces NaN in the simulation but not in float."""
        from bitwright.torch.nan_doctor import diagnose_batch

        try:
            float_report = diagnose_batch(self._interceptor, args, kwargs, self._simulator.mended_at)
            if not float_report.ok or float_report.bad_inputs:
                return  # the model does so itself
            report = diagnose_batch(self._interceptor, args, kwargs, self._simulator.simulated_at)
        except Exception as error:  # a model that cannot be run twice on one input
            report = HealthReport(f"running it again ended in {type(error).__name__}: {error}")
        logger.warning("%s", self.quantizers.describe_nan(report, self.graph))

    def _prepare_grids(self) -> None:
        """Prepare the grid of every quantizer for its recorded shape."""
        device = model_device(self.model) or torch.device("cpu")
        for site in self.quantizers.values():
            assert isinstance(site.quantizer, Quantizer)
            site.quantizer.prepare(self.graph.values[site.value].shape, device)

    def _values_of(self, site: str) -> torch.Tensor | None:
        """The weight or constant at a site; values computed from parameters need a run of the model."""
        value = self.graph.values[self.plan.sites[site].value]
        found = (
            self._recorded_constants().get(value.name)
            if value.param is None
            else self._interceptor.named_tensor(value.param)
        )
        return None if found is None else found.detach()

    def _recorded_constants(self) -> dict[str, torch.Tensor]:
        """Tensors that the model computes from its parameters alone, by value name, for its present parameters."""
        device = model_device(self.model)
        recorder = record(self.model, [to_device(e, device) for e in self.examples], self._interceptor)
        recorder.graph()
        return recorder.constants()

    # -- its state

    @checks_arguments
    def remember(self, *, parameters: bool = False) -> Undo:
        """Save the state of the simulation: quantizers, stage, repairs, notes of calibration.

        Args:
            parameters: keep a copy of all parameters and buffers too.

        Returns:
            A function that brings the state back, as often as it is called.
        """
        quantizers, simulator, log = (self.quantizers.remember(), self._simulator.remember(), self.calibration_log)
        tensors = {n: t.detach().clone() for n, t in named_state(self.model)} if parameters else {}

        def restore() -> None:
            with torch.no_grad():
                for name, tensor in named_state(self.model) if tensors else ():
                    tensor.copy_(tensors[name])
            quantizers()
            simulator()
            self.calibration_log = log

        return restore

    # -- use

    @contextmanager
    def active(self) -> Iterator[None]:
        """Simulate all calls inside the block: other methods of the model, or parts of it."""
        with self._interceptor.active():
            self._handler.begin((), {})
            yield
            self._handler.warn_of_gaps()

    @contextmanager
    def in_float(self) -> Iterator[None]:
        """Let ``sim.model`` compute in float inside the block, in this thread (as ``torch.no_grad`` does)."""
        with self._interceptor.handled_by(self._handler.variant("float")):
            yield

    @property
    def _handler(self) -> Simulator:
        """The simulator of the calling thread."""
        own = self._interceptor.here.handler
        return own if isinstance(own, Simulator) else self._simulator

    @contextmanager
    def _evaluation(self, what: str) -> Iterator[None]:
        """No gradients, and every module in eval mode; where that changes modes, no other thread may run."""
        training = any(module.training for _, module in walk_modules(self.model))
        alone = self._occupancy.exclusive(what) if training else nullcontext()
        with alone, torch.no_grad(), evaluation(self.model):
            yield

    def health(self) -> HealthTable:
        """Health of calibration values and weights at every site: NaN, Inf, zero and constant channels, saturation."""
        found = self._quantized_parameters()
        sites = {n: self.graph.values[s.value].param for n, s in self.quantizers.items()}
        return self.quantizers.health({n: found[p] for n, p in sites.items() if p in found})

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """Repairs that :func:`~bitwright.torch.stabilize` applied, in order."""
        return tuple(self._simulator.repairs.values())

    @property
    def calibrated(self) -> bool:
        """Whether the simulation can run."""
        return self._simulator.stage == "simulate"

    @checks_arguments
    def capture(self, names: Sequence[str], batch: Any) -> dict[str, list[torch.Tensor]]:
        """Values at sites or op outputs while ``sim.model`` runs ``batch``; one tensor per run of the place."""
        return self._captured(names, batch)[0]

    def _captured(self, names: Sequence[str], batch: Any, make: Callable[[], Any] = list) -> tuple[dict[str, Any], Any]:
        """Captured values in the lists that ``make`` creates for each name, and the result of ``sim.model``."""
        taps = {name: make() for name in names}
        args, kwargs = as_call(to_device(batch, model_device(self.model)))
        handled = self._interceptor.handled_by(self._handler.variant(taps=taps))
        with handled, self._evaluation("capture"), same_draws():
            output = run_batch(self.model, args, kwargs)
        return taps, output

    def example(self) -> Any:
        """The first of the inputs that the model was recorded on."""
        return self.examples[0]

    def _stored_sites(self) -> dict[str, Site]:
        """Sites of weights, and of biases that are not left in float."""
        sites = {n: s for n, s in self.quantizers.items() if s.enabled and s.role in ("weight", "bias")}
        return {n: s for n, s in sites.items() if s.encoding is not None or not getattr(s.quantizer, "derived", False)}

    def dequantized_state_dict(self) -> dict[str, torch.Tensor]:
        """``sim.model.state_dict()`` with every quantized parameter on its grid.

        Raises:
            CalibrationError: a weight has no encoding yet.
            ModelError: what is quantized is no parameter but computed of some, or one is read on two grids.
        """
        state = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        aliases: dict[int, list[str]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            aliases.setdefault(id(tensor), []).append(name)
        done: dict[int, str] = {}
        stored = self._stored_sites()
        reads = self._read_parameters(stored)
        for name, site in stored.items():
            param, axes = reads.get(name, ("", ()))
            tensor = self._interceptor.named_tensor(param) if param else None
            if tensor is None or id(tensor) not in aliases:
                raise ModelError(
                    name,
                    "what is quantized here is computed of parameters in every run, so that no state dict can hold it",
                    "write files with sim.export, or keep simulation and float weights with sim.save_checkpoint",
                )
            assert isinstance(site.quantizer, Quantizer)
            found = on_grid(site.quantizer, tensor.detach(), axes)
            first = aliases[id(tensor)][0]
            if id(tensor) in done and not torch.equal(state[first], found):
                raise ModelError(
                    name,
                    f"its parameter is read on another grid at {done[id(tensor)]}, and one tensor cannot hold both",
                    "give both places one grid with a rule, or write files with sim.export",
                )
            done[id(tensor)] = name
            state.update(dict.fromkeys(aliases[id(tensor)], found))
        return state

    def _read_parameters(self, sites: Iterable[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Site -> the parameter that it reads as a whole, and the order of its axes: ``(1, 0)`` for ``x @ weight.T``.

        Sites that read a part of a parameter, or what the model computes from parameters, are missing.
        """
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        constants: dict[str, torch.Tensor] | None = None
        for name in sites:
            value = self.graph.values[self.quantizers[name].value]
            if value.param is not None:
                found[name] = value.param, tuple(range(len(value.shape)))
            elif len(value.sources) == 1:
                constants = self._recorded_constants() if constants is None else constants
                read = constants.get(value.name)
                axes = None if read is None else _axes_of(read, self._interceptor.named_tensor(value.sources[0]))
                if axes is not None:
                    found[name] = value.sources[0], axes
        return found

    def remove(self) -> nn.Module:
        """Remove the simulation and return the model; useful with ``in_place``."""
        self._interceptor.detach()
        if isinstance(vars(self.model).get("save_pretrained"), SavesDequantized):
            del vars(self.model)["save_pretrained"]
        return self.model


def on_grid(quantizer: Quantizer, parameter: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """A parameter on its grid, where the quantizer sees its axes in the order ``axes``."""
    back = sorted(range(len(axes)), key=axes.__getitem__)
    return quantizer.constant(parameter.permute(axes)).permute(back)


def _axes_of(view: torch.Tensor, whole: torch.Tensor) -> tuple[int, ...] | None:
    """The order of the axes of ``whole`` in a view of all of it; ``None`` for other tensors."""
    if view.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() or view.numel() != whole.numel():
        return None
    for axes in itertools.permutations(range(whole.dim())):
        turned = whole.permute(axes)
        if turned.shape == view.shape and turned.stride() == view.stride():
            return axes
    return None
