"""A torch simulation as bias correction sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bitwright.algorithms.bias_correct import Correctable
from bitwright.algorithms.channels.layers import Array, Layer
from bitwright.torch.calls.batches import as_call, evaluation, model_device, to_device
from bitwright.torch.calls.functions import Function
from bitwright.torch.interception.frames import Frame, Key
from bitwright.torch.simulation.quantsim import QuantizationSimModel
from bitwright.torch.simulation.simulate import Simulator, Stage

Watch = Callable[[torch.Tensor], torch.Tensor]


class Watching(Simulator):
    """A simulator whose calls at some operators hand their raw result through a function."""

    def __init__(self, simulator: Simulator, watches: Mapping[str, Watch]) -> None:
        vars(self).update(vars(simulator))  # shared, as variants of a simulator share it
        self._watches = watches

    def call(
        self,
        frame: Frame,
        key: Key,
        row: Function,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """With the function of its operator, if there is one."""
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
        """The model runs twice."""
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
