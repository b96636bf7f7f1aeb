"""``FloatModel`` of a torch module, through which framework-independent algorithms read and change it.

An edit may put a :class:`ChannelClamp` in place of an activation: it clips every channel at bounds of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.core.graph.graph import Graph
from bitwright.core.simulation.calibration import with_samples
from bitwright.core.simulation.float_model import (
    AddBias,
    Array,
    Chain,
    Clamp,
    Edit,
    Seen,
    SetParam,
    Undo,
    Untie,
    carry_out,
)
from bitwright.errors import ModelError, checks_arguments
from bitwright.torch.calls.functions import function_of
from bitwright.torch.calls.inputs import (
    as_call,
    evaluation,
    map_arguments,
    model_device,
    named_state,
    run_batch,
    to_device,
    walk_modules,
)
from bitwright.torch.factors import chain_of_modules, chain_plan, no_chain
from bitwright.torch.interception.intercept import Interceptor
from bitwright.torch.interception.record import Call, Recorder, Slot, named_inputs, record
from bitwright.torch.simulation.simulate import CallPlan, Simulator, WithGradient


class ChannelClamp(nn.Module):
    """``min(max(x, low[c]), high[c])`` for each channel ``c``: a ReLU6 with rescaled channels.

    Args:
        low, high: bounds, shape [C], of the dtype and on the device of the activations.
        axis: of the channels.
        rank: of the activations.
    """

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, low: torch.Tensor, high: torch.Tensor, axis: int, rank: int) -> None:
        super().__init__()
        shape = [-1 if i == axis else 1 for i in range(rank)]
        self.register_buffer("low", low.reshape(shape[axis:]))
        self.register_buffer("high", high.reshape(shape[axis:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Clamp ``x``, of any shape that the bounds broadcast to."""
        return torch.clamp(x, self.low, self.high)

    def extra_repr(self) -> str:
        """Number of channels."""
        return f"{self.low.numel()} channels"


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)


class TorchView:
    """A module seen through :class:`bitwright.core.simulation.float_model.FloatModel`.

    Args:
        model: the module; edits change it in place.
        examples: inputs to record it on, each as :func:`~bitwright.torch.calls.inputs.as_call` takes them.
        prepared: makes of a batch, or an example, what the module takes.
    """

    @checks_arguments
    def __init__(
        self, model: nn.Module, examples: Sequence[Any], prepared: Callable[[Any], Any] = lambda batch: batch
    ) -> None:
        self.model = model
        self._prepared = prepared
        self._examples = [to_device(prepared(e), model_device(model)) for e in examples]
        self._graph: Graph | None = None
        self._edited = False  # since it was recorded: constants are those of the recording
        self._recorder: Recorder
        self._calls: dict[str, Call]
        self._constants: dict[str, torch.Tensor]
        self._added: dict[str, str] = {}
        self._replaced: dict[str, nn.Module] = {}

    def graph(self) -> Graph:
        """The recorded graph; recorded anew after edits."""
        if self._graph is None:
            state = torch.get_rng_state()
            self._recorder = record(self.model, self._examples)
            self._is_random = not torch.equal(state, torch.get_rng_state())
            self._graph, self._edited = self._recorder.graph(), False
            self._calls = {call.name: call for call in self._recorder.calls.values()}
            self._constants = self._recorder.constants()
            self._tensors: dict[str, torch.Tensor] = {}
            for name, tensor in named_state(self.model):
                self._tensors.setdefault(name, tensor)
            self._device = model_device(self.model)
            self._added.clear()
            self._replaced.clear()
        return self._graph

    def take_result(self) -> Any:
        """The outputs of the recorded run on the last example; ``None`` where another run may differ.

        That is so where it draws random numbers, or takes fused kernels that a recording does not; the result is let go of.
        """
        self.graph()
        result, self._recorder.result = self._recorder.result, None
        fused = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
        if (
            self._is_random
            or self._recorder.decomposed
            or self._device != torch.device("cpu")  # elsewhere random numbers have states of their own
            or any(isinstance(module, fused) for _, module in walk_modules(self.model))
        ):
            return None
        return result

    def _tensor(self, name: str) -> torch.Tensor:
        self.graph()
        if name not in self._tensors:
            raise KeyError(f"the model has no parameter or buffer {name!r}")
        return self._tensors[name]

    def param(self, name: str) -> Array:
        """A copy of a parameter or buffer as numpy, float32 or wider."""
        tensor = self._tensor(name).detach().cpu()
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            tensor = tensor.float()
        return np.array(tensor.numpy())

    def constant(self, name: str) -> Array | None:
        """Array of a value computed from parameters and constants alone, float32 or wider; recomputed after edits."""
        if self._edited:
            self.refresh()
        self.graph()
        tensor = self._constants[name].detach().cpu()
        return np.array(
            (tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor).numpy()
        )

    def set_param(self, name: str, value: Array) -> None:
        """Write a parameter or buffer in place; its dtype, device and identity stay."""
        tensor = self._tensor(name)
        if tuple(value.shape) != tuple(tensor.shape):
            raise ModelError(
                name, f"the new value has shape {value.shape}, the parameter {tuple(tensor.shape)}", "keep the shape"
            )
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(value)))

    def capture(self, values: Sequence[str], batches: Iterable[Any]) -> Iterator[dict[str, list[Array]]]:
        """Run the batches one by one; yield the named inputs and op outputs of each, one array per run of the op."""
        for taps in self._runs(batches, lambda _: {name: [] for name in values}):
            yield {name: [_as_array(t) for t in kept] for name, kept in taps.items()}

    def walk(self, values: Sequence[str], batches: Sequence[Any], seen: Seen) -> None:
        """Run the batches one by one, and hand over each named value before it is read; see ``FloatModel.walk``."""

        def taps(batch: int) -> dict[str, list[torch.Tensor]]:
            return {name: _Handed(partial(seen, name, range(batch, batch + 1))) for name in values}

        for _ in self._runs(batches, taps):
            pass

    def tapped(self, batch: Any, values: Sequence[str], gradients: bool) -> tuple[Any, dict[str, list[torch.Tensor]]]:
        """Run a batch in the model's current mode; return its output and a copy of every named value, a list per name.

        Args:
            batch: as the model takes it.
            values: names of the graph.
            gradients: the copies are part of the graph of autograd.
        """
        with self._intercepted() as simulator:
            simulator.taps = {name: WithGradient() if gradients else [] for name in values}
            args, kwargs = as_call(batch)
            return run_batch(self.model, args, kwargs), simulator.taps

    @contextmanager
    def _intercepted(self) -> Iterator[Simulator]:
        """Inside the block, a simulator in float sees what the model calls."""
        self.graph()
        simulator = Simulator(
            {
                **dict.fromkeys(self._recorder.static, CallPlan("")),
                **{key: CallPlan(call.name) for key, call in self._recorder.calls.items()},
            }
        )
        simulator.stage = "float"
        interceptor = Interceptor(self.model)
        interceptor.loops, interceptor.turns = self._recorder.loops, self._recorder.turns
        interceptor.repeats = self._recorder.repeats
        interceptor.attach()
        try:
            with interceptor.handled_by(simulator):
                yield simulator
        finally:
            interceptor.detach()

    def _runs(
        self, batches: Iterable[Any], taps: Callable[[int], dict[str, list[torch.Tensor]]]
    ) -> Iterator[dict[str, list[torch.Tensor]]]:
        """Run the batches; yield the lists that ``taps`` made for each, with a copy of every value of that name."""
        device = model_device(self.model)
        with self._intercepted() as simulator, torch.no_grad(), evaluation(self.model):
            for i, batch in enumerate(with_samples(batches)):
                simulator.taps = taps(i)
                args, kwargs = as_call(to_device(self._prepared(batch), device))
                for name, tensor in named_inputs(self._recorder.signature, args, kwargs):
                    if name in simulator.taps:
                        simulator.taps[name].append(tensor.clone())  # a model may write into its input
                run_batch(self.model, args, kwargs)
                yield simulator.taps

    def local(self, op: str) -> Callable[..., Array]:
        """The op as a function of its activation inputs (numpy, in port order); parameters are read at each call."""
        graph = self.graph()
        call = self._calls[op]
        names = self._recorder.value_names
        activations: dict[int, None] = {}
        slots: list[Slot] = []
        map_arguments(call.args, call.kwargs, slots.append, Slot)
        for slot in slots:
            if not graph.values[names[slot.value]].is_static:
                activations.setdefault(slot.value)
        order = list(activations)

        def run(*inputs: Array) -> Array:
            if op in self._replaced:
                with torch.no_grad():
                    return np.array(self._replaced[op](torch.from_numpy(np.asarray(inputs[0])).to(self._device)).cpu())
            given = {}
            for value, x in zip(order, inputs, strict=True):
                dtype = getattr(torch, graph.values[names[value]].dtype)  # as recorded: layers may differ
                given[value] = torch.from_numpy(np.ascontiguousarray(x)).to(self._device, dtype)

            def fill(slot: Slot) -> torch.Tensor:
                if slot.value in given:
                    return given[slot.value]
                value = graph.values[names[slot.value]]
                return self._tensors[value.param] if value.param else self._constants[value.name]

            args, kwargs = map_arguments(call.args, call.kwargs, fill, Slot)
            if op in self._added:
                row = function_of(call.func)
                assert row is not None
                args, kwargs = row.replace(args, kwargs, {2: self._tensors[self._added[op]]})
            with torch.no_grad():
                return np.array(call.func(*args, **kwargs).float().cpu().numpy())

        return run

    # -- edits

    def can_edit(self, edit: Edit) -> str | None:
        """The reason why ``edit`` cannot be done on this module; ``None`` where it can."""
        self.graph()
        if isinstance(edit, SetParam):
            return None if edit.name in self._tensors else f"there is no parameter {edit.name}"
        call = self._calls[edit.op]
        if isinstance(edit, AddBias):
            return self._no_bias_place(call)
        if isinstance(edit, Clamp):
            return self._no_clamp(call)
        if isinstance(edit, Untie):
            return None if self._own_attribute(edit) else "it is not a parameter of a module that makes the call"
        if isinstance(edit, Chain):
            return self._no_chain(call)
        if call.module is None or type(call.module) not in BATCH_NORMS or call.path == "":
            return "it is a call in the model's own code, not a batch-norm module that could be replaced by an identity"
        return self._read_elsewhere(call)

    def _read_elsewhere(self, call: Call) -> str | None:
        """Another call that reads the parameters or buffers of ``call``'s module."""
        graph = self.graph()
        for value in graph.op(call.name).inputs[1:]:
            tensor = self._tensors.get(graph.values[value].param or "") if value else None
            for reader, _ in graph.consumers(value) if value and tensor is not None else ():
                holder = self._calls[reader.name].module
                if reader.name != call.name and (holder is None or not _holds(holder, tensor)):
                    return f"{reader.name} also reads {value}"
        return None

    def _no_bias_place(self, call: Call) -> str | None:
        module = call.module
        if module is None or "bias" not in module._parameters or module._parameters["bias"] is not None:
            return "the call is not made by a module with an empty bias"
        weight = f"{call.path}.weight" if call.path else "weight"
        if call.param != weight:
            return f"it reads the weight {call.param}, which is not the module's own"
        explicit = len(call.args) > 2 or "bias" in call.kwargs
        if type(module) not in _LAYERS and not explicit:
            return "the module's forward passes no bias to the call"
        return None

    def edit(self, edits: Sequence[Edit]) -> Undo:
        """Carry out the edits; the function returned undoes them in reverse order."""
        return carry_out(edits, self._one, self.refresh)

    def _one(self, edit: Edit) -> Undo:
        if isinstance(edit, SetParam):
            tensor = self._tensor(edit.name)
            before = tensor.detach().clone()
            self.set_param(edit.name, edit.value)
            self._edited = True

            def restore() -> None:
                self._edited = True
                with torch.no_grad():
                    tensor.copy_(before)

            return restore
        reason = self.can_edit(edit)
        if reason:
            raise ModelError(edit.op, f"{type(edit).__name__} is impossible: {reason}", "ask can_edit first")
        if isinstance(edit, AddBias):
            return self._add_bias(edit)
        if isinstance(edit, Untie):
            return self._untie(edit)
        if isinstance(edit, Chain):
            return self._chain(edit)
        return self._clamp(edit) if isinstance(edit, Clamp) else self._replace(edit.op, nn.Identity())

    def _no_clamp(self, call: Call) -> str | None:
        if call.module is None or type(call.module) not in (nn.ReLU6, nn.Hardtanh) or call.path == "":
            return "it is a call in the model's own code, not a ReLU6 or Hardtanh module that could be replaced"
        others = [other.name for other in self._calls.values() if other.module is call.module and other is not call]
        return f"{others[0]} runs the same module" if others else None

    def _no_chain(self, call: Call) -> str | None:
        module, path = self._replaceable(call.name)
        if module is None or path == "":
            return "it is a call in the model's own code, not a module that could be replaced"
        reason = no_chain(module, path, call.name)
        if reason is None and not isinstance(module, nn.RNNBase):
            return self._read_elsewhere(call)
        return reason

    def _replaceable(self, op: str) -> tuple[nn.Module | None, str]:
        """The module that makes a call, or that a recurrent operator belongs to, and its path."""
        call, graph_op = self._calls[op], self.graph().op(op)
        if call.module is None and graph_op.type in ("LSTM", "GRU", "RNN") and graph_op.module:
            return self.model.get_submodule(graph_op.module), graph_op.module
        return call.module, call.path

    def chain_step(self, edit: Chain, bias: bool) -> dict[str, Any]:
        """A step of a plan from which :func:`bitwright.torch.rebuild` makes the modules of a chain.

        Args:
            edit: that has not been carried out.
            bias: whether the last module gets one that the original does not have.
        """
        module, path = self._replaceable(edit.op)
        assert module is not None
        rows = chain_plan(module, edit)
        rows[-1]["bias"] = rows[-1].get("bias", False) or bias
        return {"kind": "chain", "module": path, "layers": rows}

    def _chain(self, edit: Chain) -> Undo:
        module, _ = self._replaceable(edit.op)
        assert module is not None
        return self._replace(edit.op, chain_of_modules(module, edit))

    def _clamp(self, edit: Clamp) -> Undo:
        value = self.graph().values[self.graph().op(edit.op).outputs[0]]
        dtype, device = getattr(torch, value.dtype), self._device
        low, high = (torch.from_numpy(np.array(end)).to(device, dtype) for end in (edit.low, edit.high))
        return self._replace(edit.op, ChannelClamp(low, high, edit.axis, len(value.shape)))

    def _own_attribute(self, edit: Untie) -> str | None:
        """The name under which the module of a call holds the parameter that the call reads."""
        graph, module = self.graph(), self._calls[edit.op].module
        value = graph.op(edit.op).inputs[edit.port]
        tensor = None if value is None else self._tensors.get(graph.values[value].param or "")
        held = {} if module is None or tensor is None else module._parameters
        return next((name for name, own in held.items() if own is tensor), None)

    def _untie(self, edit: Untie) -> Undo:
        module, name = self._calls[edit.op].module, self._own_attribute(edit)
        assert module is not None and name is not None
        shared = module._parameters[name]
        assert shared is not None
        module._parameters[name] = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
        self.refresh()

        def restore() -> None:
            module._parameters[name] = shared
            self.refresh()

        return restore

    def _add_bias(self, edit: AddBias) -> Undo:
        call = self._calls[edit.op]
        module = call.module
        assert module is not None
        weight = module._parameters["weight"]
        assert weight is not None
        name = f"{call.path}.bias" if call.path else "bias"
        value = torch.from_numpy(np.ascontiguousarray(edit.value)).to(weight.device, weight.dtype)
        module.bias = nn.Parameter(value, requires_grad=weight.requires_grad)
        self._tensors[name], self._added[edit.op] = module.bias, name

        def restore() -> None:
            module._parameters["bias"] = None
            self._tensors.pop(name, None)
            self._added.pop(edit.op, None)  # not there where the model was recorded since

        return restore

    def _replace(self, op: str, module: nn.Module) -> Undo:
        """Put ``module`` in place of the module of the call ``op``, under all its parents."""
        target, _ = self._replaceable(op)
        module.training = bool(target is not None and target.training)
        places = self._parents().get(id(target), [])
        for parent, name in places:
            parent._modules[name] = module
        self._replaced[op] = module

        def restore() -> None:
            for parent, name in places:
                parent._modules[name] = target
            self._replaced.pop(op, None)  # not there where it was recorded since

        return restore

    def _parents(self) -> dict[int, list[tuple[nn.Module, str]]]:
        """Parent and attribute of every module; read once per recording."""
        if getattr(self, "_parent_graph", None) is not self._graph:
            table: dict[int, list[tuple[nn.Module, str]]] = {}
            for _, module in walk_modules(self.model):
                for name, child in module._modules.items():
                    if child is not None:
                        table.setdefault(id(child), []).append((module, name))
            self._parent_table, self._parent_graph = table, self._graph
        return self._parent_table

    def refresh(self) -> None:
        """Forget the recording, since the model was changed."""
        self._graph = None


class _Handed(list[torch.Tensor]):
    """A list that passes on what is appended and stores nothing."""

    def __init__(self, to: Callable[[list[list[Array]]], None]) -> None:
        self._to = to

    def append(self, x: torch.Tensor) -> None:
        """Hand ``x`` over."""
        self._to([[_as_array(x)]])


def _as_array(x: torch.Tensor) -> Array:
    return np.asarray(x.float().cpu().numpy())


def _holds(module: nn.Module, tensor: torch.Tensor | None) -> bool:
    return any(own is tensor for own in (*module._parameters.values(), *module._buffers.values()))
