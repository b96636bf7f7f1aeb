"""A torch simulation as bias correction sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bitwright.algorithms.bias_correct import Correctable
from bitwright.algorithms.channels.layers import Array, Layer
from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.affine import fake_quantize
from bitwright.torch.calls.batches import as_call, evaluation, model_device, to_device
from bitwright.torch.calls.functions import Function
from bitwright.torch.interception.frames import Frame, Handler, Key
from bitwright.torch.simulation.quantsim import QuantizationSimModel
from bitwright.torch.simulation.simulate import Simulator, Stage

Watch = Callable[[torch.Tensor], torch.Tensor]


class Watching(Handler):
    """A simulator whose calls at some operators hand their raw result through a function."""

    def __init__(self, simulator: Simulator, watches: Mapping[str, Watch]) -> None:
        self._simulator, self._watches = simulator, watches

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """As the simulator."""
        self._simulator.begin(args, kwargs)

    def part(self, path: str, caller: str | None) -> bool:
        """As the simulator."""
        return self._simulator.part(path, caller)

    def end(self, output: Any) -> None:
        """As the simulator."""
        self._simulator.end(output)

    def other(
        self, frame: Frame, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As the simulator."""
        return self._simulator.other(frame, func, args, kwargs)

    def call(
        self,
        frame: Frame,
        key: Key,
        row: Function,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The call of the simulator."""
        plan = self._simulator.plans.get(key)
        watch = None if plan is None else self._watches.get(plan.op)
        if watch is None:
            return self._simulator.call(frame, key, row, func, args, kwargs)

        def raw(*args: Any, **kwargs: Any) -> Any:
            result = func(*args, **kwargs)
            with torch._C.DisableTorchFunction():  # what is called here is not the model's
                return watch(result)

        return self._simulator.call(frame, key, row, raw, args, kwargs)


class TorchCorrectable(Correctable):
    """A torch simulation and its float model.

    Args:
        sim: calibrated.
        reference: the float model whose means are the goal; the simulation itself in float by default.

    Raises:
        CalibrationError: it is not.
    """

    def __init__(self, sim: QuantizationSimModel, reference: QuantizationSimModel | None = None) -> None:
        sim._simulator.begin((), {})  # refuses one that is not calibrated
        self.sim, self.reference = sim, reference or sim
        self.graph: Graph = sim.graph

    def errors(self, layers: Sequence[Layer], batch: object) -> dict[str, tuple[Array, float]]:
        """As the protocol says; the model runs twice."""
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

        self._run(
            self.reference, "float", batch, {layer.adder or layer.op: noting(layer) for layer in layers}
        )
        self._run(self.sim, "simulate", batch, {layer.adder or layer.op: shifting(layer) for layer in layers})
        return shifts

    def _run(self, sim: QuantizationSimModel, stage: Stage, batch: Any, watches: Mapping[str, Watch]) -> None:
        handler = Watching(sim._simulator.variant(stage), watches)
        args, kwargs = as_call(batch)
        with sim._interceptor.handled_by(handler), torch.no_grad(), evaluation(sim.model):
            sim.model(*args, **kwargs)

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self.sim._interceptor.named_tensor(name)
        assert tensor is not None
        return tensor

    def weight(self, layer: Layer) -> tuple[Array, Array]:
        """As the protocol says."""
        W = self._tensor(layer.weight).detach().float().cpu().numpy()
        site = next(
            (s for s in self.sim.quantizers.values() if s.op == layer.op and s.role == "weight"), None
        )
        live = site is not None and site.enabled and site.encoding is not None
        return W, np.asarray(fake_quantize(W, site.encoding)) if live else W  # type: ignore[union-attr]

    def bias(self, layer: Layer) -> Array:
        """As the protocol says."""
        assert layer.bias is not None
        return self._tensor(layer.bias).detach().float().cpu().numpy()

    def set_bias(self, layer: Layer, value: Array) -> None:
        """As the protocol says."""
        assert layer.bias is not None
        with torch.no_grad():
            self._tensor(layer.bias).copy_(torch.from_numpy(np.ascontiguousarray(value)))


def _means(y: torch.Tensor, layer: Layer) -> torch.Tensor:
    axes = [axis for axis in range(y.dim()) if axis != layer.channel_axis]
    return y.mean(axes, dtype=torch.float64)
