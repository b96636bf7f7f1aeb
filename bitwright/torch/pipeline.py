"""A module on its way through :func:`bitwright.quantize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bitwright.algorithms.front_ends import Pipeline
from bitwright.algorithms.search.recipe_report import metric_of
from bitwright.errors import ConfigError
from bitwright.torch.calls.batches import named_outputs_of, outputs_of, refuse_providers
from bitwright.torch.simulation.adopt import adopt, copied, require_module
from bitwright.torch.simulation.quantsim import QuantizationSimModel

if TYPE_CHECKING:
    from bitwright.export.artefacts import Exported


class TorchPipeline(Pipeline):
    """A model of this front end.

    Raises:
        ModelError: ``model`` is not a module that can be simulated.
        ConfigError: ``providers`` or a ``memory_budget`` are given, which only ONNX models have.
    """

    def __init__(self, model: nn.Module, providers: Any, memory_budget: int | None) -> None:
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

    def work(self, first: Any) -> nn.Module:
        """A copy of the module, made as a simulation makes its own."""
        return adopt(self._model, first, in_place=False)

    def copied(self, work: nn.Module) -> nn.Module:
        """Another one."""
        return copied(work)

    def float_outputs(self, batch: Any) -> Sequence[Any]:
        """Of the module as given."""
        named = named_outputs_of(self._model, batch)
        self._names = [name for name, _ in named]
        return [array for _, array in named]

    def output_names(self) -> Sequence[str]:
        """Their paths in what the module returns: ``logits``, ``output[1]``."""
        return self._names

    def rate_float(self, metric: Callable[[Any], float]) -> float:
        """Of the module as given."""
        return metric_of(metric, self._model)

    def rate(self, sim: QuantizationSimModel, metric: Callable[[Any], float]) -> float:
        """Of the simulated module."""
        return metric_of(metric, sim.model)

    def reference(self, work: nn.Module) -> nn.Module:
        """A copy: the simulation is made in place, and methods of rounding write into it."""
        return copied(work)

    def simulation(self, work: nn.Module, first: Any, rules: Mapping[str, Any]) -> QuantizationSimModel:
        """In place."""
        return QuantizationSimModel(work, first, **rules, in_place=True)

    def outputs(self, sim: QuantizationSimModel, batch: Any) -> Sequence[Any]:
        """Of the simulated module."""
        return outputs_of(sim.model, batch)

    def export(self, sim: QuantizationSimModel, path: str | Path, prefix: str, first: Any, **options: Any) -> Exported:
        """The batch axis is free unless the module forbids it."""
        return sim.export(path, prefix, first, dynamic_batch="auto", **options)
