"""An ONNX simulation as a :class:`bitwright.algorithms.rounding.program.SimulatedModel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.algorithms.rounding.program import Program, State, Step, run
from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.simulation.protocols import sqnr
from bitwright.core.simulation.sites import Site
from bitwright.core.sums.int32_bias import fake_quantize_bias
from bitwright.errors import ModelError
from bitwright.export.files.value_types import is_tensor
from bitwright.export.qdq.markers import Names, remove_unread, site_nodes, site_of
from bitwright.onnx.adapters.steps import Recorded, Steps, to_tensor
from bitwright.onnx.model.data import as_feeds
from bitwright.onnx.model.graph import UNKNOWN
from bitwright.onnx.model.session import open_session, run_session
from bitwright.onnx.model.view import measure_shapes
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.onnx.simulation.simulate import simulation_model

# dB between ONNX Runtime and torch: the two sum in different orders, and round in different places in half precision
_CLOSE_ENOUGH = {"float16": 25.0}


class _StraightThrough(torch.autograd.Function):
    """The reference arithmetic, with the identity as its gradient inside the range and zero outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantize: Callable[[Tensor], Tensor], lo: Tensor, hi: Tensor) -> Tensor:
        ctx.save_for_backward((x >= lo) & (x <= hi))
        return quantize(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0] * ctx.saved_tensors[0], None, None, None


class OnnxSimulation:
    """A :class:`QuantizationSimModel` of ONNX as reconstruction sees it.

    Args:
        sim: calibrated or not; weights without an encoding get theirs.
    """

    def __init__(self, sim: QuantizationSimModel) -> None:
        self.sim = sim
        self._recorded: list[Recorded] = []  # programs, the last one used first
        self._initializers = {
            value: to_tensor(value.const_value.numpy()).clone()
            for value in sim.marked.graph.initializers.values()
            if value.const_value is not None and not value.is_graph_input()
        }
        self._names: Names | None = None
        self._markers = {site_of(node): node for node in site_nodes(sim.marked)}
        self._first: Mapping[str, NDArray[Any]] | None = None  # batch
        self._observed: Graph | None = None
        for site in sim.quantizers.values():
            if site.name in sim.constants and site.enabled and not site.quantizer.derived:
                site.quantizer.observe_once(sim.constants[site.name])

    def graph(self) -> Graph:
        """The graph of the simulation."""
        return self.sim.graph

    def observed_graph(self) -> Graph:
        """The graph with the lengths of the first batch, or before there was one of the example input, where they are open."""
        if self._observed is None:
            graph = self.sim.graph
            open_ones = {
                name for name, value in graph.values.items() if value.kind == "activation" or value.kind == "input"
                if not value.shape or UNKNOWN in value.shape
            }  # fmt: skip
            shapes = self._shapes() if open_ones else {}
            values = {
                name: replace(value, shape=shapes[name]) if name in open_ones & shapes.keys() else value
                for name, value in graph.values.items()
            }
            self._observed = Graph(graph.ops, values, graph.inputs, graph.outputs)
        return self._observed

    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        feeds = self.sim.example() if self._first is None else self._first
        return measure_shapes(simulation_model(self.sim.marked, {}).model, feeds, self.sim.providers)

    def sites(self) -> Mapping[str, Site]:
        """The sites of the simulation."""
        return self.sim.quantizers

    def shared(self) -> Mapping[str, str]:
        """What the plan says of values that are only moved."""
        return self.sim.plan.shared

    def weight(self, site: str) -> Tensor:
        """A copy of the initializer at a weight site."""
        return to_tensor(self.sim.constants[site]).clone()

    def why_fixed(self, site: str) -> str | None:
        """Weights can be written, also in bodies, and those that nodes compute from initializers."""
        known = site in self.sim.constants and site in self._markers
        return None if known else "its weight is computed from the input"

    def set_weight(self, site: str, value: Tensor) -> None:
        """Replace an initializer of the simulation's model."""
        param = self.sim.graph.values[self.sim.plan.sites[site].value].param
        array = value.detach().cpu().numpy()
        if param is not None:
            self.sim.set_parameter(param, array)
        else:
            self._set_computed(site, array)
        for recorded in self._recorded:
            if site in recorded.source_of:
                constant = recorded.program.constants[recorded.source_of[site]]
                constant.copy_(value.to(constant.dtype))

    def _set_computed(self, site: str, array: NDArray[Any]) -> None:
        """Let the operator read an initializer of its own in the place of what nodes computed from others."""
        marker = self._markers[site]
        source, before = marker.inputs[0], self.sim.constants[site]
        assert source is not None
        if self._names is None:
            self._names = Names(self.sim.marked)
        name = self._names.value(f"{source.name}_chosen")
        tensor = ir.Tensor(np.ascontiguousarray(array).astype(before.dtype), name=name)
        new = ir.Value(name=name, shape=source.shape, type=source.type, const_value=tensor)
        self.sim.marked.graph.register_initializer(new)
        self._initializers[new] = to_tensor(tensor.numpy())
        marker.replace_input_with(0, new)
        remove_unread(source)
        self.sim.constants[site] = tensor.numpy()
        self.sim.forget_simulations()

    def quantize(self, site: str, x: Tensor) -> Tensor:
        """``x`` as the quantizer of ``site`` leaves it."""
        quantizer = self.sim.quantizers[site].quantizer
        encoding = quantizer.encoding
        if not quantizer.enabled or encoding is None or not x.is_floating_point():
            return x
        if quantizer.role == "bias" and encoding.format == IntFormat(32):
            return to_tensor(fake_quantize_bias(x.detach().cpu().numpy(), encoding)).to(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return torch.as_tensor(fake_quantize(x, encoding))
        shape = encoding.granularity.broadcast_shape(tuple(x.shape))
        lo, hi = (
            torch.from_numpy(np.asarray(v, np.float32).reshape(shape)).to(x) for v in (encoding.min, encoding.max)
        )
        return _StraightThrough.apply(x, lambda t: torch.as_tensor(fake_quantize(t, encoding)), lo, hi)

    def program(self, batch: Any) -> tuple[Program, State]:
        """The steps of the model, the same for batches that take the same branches and iterations, and the batch's own inputs.

        Raises:
            ModelError: the batch does not fit, or the steps do not compute what ONNX Runtime computes.
        """
        feeds = as_feeds(batch, self.sim.specs)
        self._first = feeds if self._first is None else self._first
        for i, known in enumerate(self._recorded):
            state = known.state(feeds)
            if known.suits(state):
                self._recorded.insert(0, self._recorded.pop(i))
                return known.program, state
        recorded = Steps(self.sim, self._initializers, feeds).record()
        state = recorded.state(feeds)
        self._check(recorded.program, state, feeds)
        self._recorded.insert(0, recorded)
        return recorded.program, state

    @cached_property
    def _session(self) -> Any:
        return open_session(simulation_model(self.sim.marked, {}).model, self.sim.providers)

    def _check(self, program: Program, inputs: State, feeds: Mapping[str, NDArray[Any]]) -> None:
        whole = Program((*program.steps, Step("", program.outputs, (), lambda tensors: ())), program.constants, ())
        state = dict(inputs)
        run(whole, state, 0, len(program.steps))
        outputs = zip(self.sim.marked.graph.outputs, self.sim.output_names, strict=True)
        names = [name for value, name in outputs if is_tensor(value)]
        # tensors come first among the outputs of the program; what sequences and maps are made of follows
        for value, name, expected in zip(
            program.outputs,
            names,
            run_session(self._session, feeds, "the float model", names) if names else (),
            strict=False,
        ):
            found = state.get(value, program.constants.get(value))
            if found is None or expected.dtype.kind != "f":
                continue
            finite = np.isfinite(expected)
            agreement = sqnr(expected[finite], found.numpy()[finite])
            if agreement < _CLOSE_ENOUGH.get(expected.dtype.name, 50.0):
                raise ModelError(
                    name,
                    f"its operators, run one by one, agree with ONNX Runtime to {agreement:.0f} dB only",
                    "report the model; its other methods (calibration, export) do not depend on this",
                )
