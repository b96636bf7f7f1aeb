"""A torch simulation as a program of steps: its recorded calls, which can be run again.

The protocol is :class:`bitwright.methods.rounding.program.SimulatedModel`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bitwright.core.graph.graph import Graph, Value
from bitwright.core.graph.operators import op_row
from bitwright.core.graph.recurrence import RECURRENT
from bitwright.core.simulation.float_model import sqnr
from bitwright.core.simulation.sites import Site
from bitwright.errors import ModelError
from bitwright.methods.rounding.driver import parameter_readers
from bitwright.methods.rounding.program import Program, Quantize, State, Step, run
from bitwright.torch.calls import recurrent
from bitwright.torch.calls.functions import SET_ITEM, Args, Func, Function, Kwargs, function_of
from bitwright.torch.calls.inputs import (
    as_call,
    evaluation,
    map_tensors,
    model_device,
    run_batch,
    same_draws,
    tensors_in,
    to_device,
    walk_modules,
)
from bitwright.torch.interception.intercept import ACCESS, Frame, Handler, Key
from bitwright.torch.interception.record import READS, Slot
from bitwright.torch.quantizers.quantizer import Quantizer
from bitwright.torch.quantizers.sequences import OnGrid, StepFunctions
from bitwright.torch.simulation.quantsim import QuantizationSimModel
from bitwright.torch.simulation.simulate import CallPlan

Forward = Callable[[nn.Module, Any], Any]
"""Calls a model on a batch in a way of its own."""

_EXACT_ENOUGH = 80.0  # dB between a model and its steps; they make the same calls on the same tensors


class _SizeWatch(TorchDispatchMode):
    """Notes whether an operator runs whose result size depends on values, or that returns a value to Python.

    Attributes:
        decided: whether one did.
        drawn: whether one drew random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.decided = self.drawn = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer no to torch, which would otherwise import the whole compiler (two seconds) to exclude this function."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _BY_MASK:  # with integers alone the size is theirs
            self.decided |= any(t.dtype == torch.bool for t in tensors_in(args[1]))
        else:
            self.decided |= not _SIZED_BY_VALUES.isdisjoint(func.tags)
        self.drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


_SIZED_BY_VALUES = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))
_BY_MASK = frozenset(
    (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_)
)


#: functions, by name, that show numbers of a tensor to Python without an operator of torch
_SHOWN = READS | frozenset(("numpy", "__array__", "data_ptr", "__dlpack__", "__format__", "__repr__"))

#: functions, by name, whose results are drawn anew in every run
_DRAWS = frozenset(
    "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_ poisson rand rand_like randint "
    "randint_like randn randn_like random_ randperm uniform_".split()
)


class _Tracer(Handler):
    """A handler that runs every call unchanged and records it as a :class:`Step`.

    Attributes:
        deciding: value -> tensor, of what is computed of the input and decides how large results are: masks by which rows
            are taken, how often each is repeated.
        read: whether Python code, or a call that is not written down, saw numbers of a tensor.
    """

    def __init__(self, plans: Mapping[Key, CallPlan], parameters: frozenset[int]) -> None:
        self._plans, self._parameters = plans, parameters
        self.steps: list[Step] = []
        self.constants: dict[int, Tensor] = {}
        self.inputs: State = {}
        self.outputs: list[Tensor] = []
        self.deciding: dict[int, Tensor] = {}
        self.read = False
        self._computed: set[int] = set()  # values that floating-point numbers of the input lead to
        self._live: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._named: dict[int, int] = {}
        self._count = 0

    def begin(self, args: Args, kwargs: Mapping[str, Any]) -> None:
        """Note the model's inputs."""
        for tensor in tensors_in((args, kwargs)):
            if self._known(tensor) is None:
                value = self._bind(tensor)
                self.inputs[value] = tensor
                if tensor.is_floating_point():
                    self._computed.add(value)

    def end(self, output: Any) -> None:
        """Record the model's outputs."""
        self.outputs = tensors_in(output)
        self.returned = tuple(self._value(tensor) for tensor in self.outputs)

    def call(self, frame: Frame, key: Key, row: Function, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """A call of a known function."""
        return self._note(key, row, func, args, kwargs)

    def other(self, frame: Frame, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Any other call."""
        row = function_of(func)
        name = getattr(func, "__name__", "call")
        if row is None and name in ACCESS:
            return func(*args, **kwargs)
        self.read |= name in _SHOWN
        key = frame.other_key(name) if row is None else frame.movement_key(row.label)
        return self._note(key, row, func, args, kwargs)

    def _note(self, key: Key, row: Function | None, func: Func, args: Args, kwargs: Kwargs) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            # tensors inside torch.vmap hold no values; what it returns (a mask) is a constant of this run
            self.read = True
            return func(*args, **kwargs)
        plan = self._plans.get(key, CallPlan(""))
        reads = [self._value(t) for t in tensors_in((args, kwargs))]
        slots = {value: i for i, value in enumerate(dict.fromkeys(reads))}
        template = map_tensors((args, kwargs), lambda t: Slot(slots[self._value(t)]))
        places = self._places(row, args, kwargs, slots)
        output = self._run(row, func, args, kwargs, slots)
        produced = tensors_in(args[0] if func is SET_ITEM else output)
        if self._is_given(func, plan, slots, produced) or not produced:
            return output
        in_place = func is SET_ITEM or (row is not None and (row.in_place or bool(kwargs.get("inplace"))))
        self.steps.append(
            Step(
                plan.op,
                tuple(slots),
                self._bind_computed(plan.op, slots, produced),
                _Replay(func, template, in_place),
                places,
                tuple((places[p.at], p.site) for p in plan.operands if p.at in places),
                tuple((p.at, p.site) for p in plan.outputs if p.at < len(produced)),
                inside=self._inside(plan, func, template),
            )
        )
        return output

    def _is_given(self, func: Func, plan: CallPlan, slots: Mapping[int, int], produced: Sequence[Tensor]) -> bool:
        """Keep results that depend on no input: random numbers belong to this batch, others are constants."""
        if getattr(func, "__name__", "") in _DRAWS:
            self.inputs.update({self._bind(tensor): tensor.detach().clone() for tensor in produced})
            return True
        constant = not plan.op and slots.keys() <= self.constants.keys()
        if constant:
            self._keep_constants(produced, slots)
        return constant

    def _bind_computed(self, op: str, reads: Mapping[int, int], produced: Sequence[Tensor]) -> tuple[int, ...]:
        """Values of a call's results; records those that depend on floating-point inputs."""
        written = tuple(self._bind(t) for t in produced)
        if (op and any(t.is_floating_point() for t in produced)) or not self._computed.isdisjoint(reads):
            self._computed.update(written)
        return written

    def _run(self, row: Function | None, func: Func, args: Args, kwargs: Kwargs, reads: Mapping[int, int]) -> Any:
        """Run the call; operands that determine the size of its result are kept from before the call."""
        plain = row is not None and isinstance(row.type, str) and op_row(row.type).kind not in ("movement", "merge")
        if plain or self._computed.isdisjoint(reads):
            return func(*args, **kwargs)
        operands = {self._value(t): t for t in tensors_in((args, kwargs))}
        floats = all(t.is_floating_point() for t in operands.values())
        before = {
            value: t.clone()
            for value, t in operands.items()
            if value in self._computed and (floats or not t.is_floating_point())
        }
        with _SizeWatch() as watch:
            output = func(*args, **kwargs)
        if watch.decided and (func is SET_ITEM or tensors_in(output)):
            self.deciding.update(before)
        return output

    def _keep_constants(self, produced: Sequence[Tensor], reads: Mapping[int, int]) -> None:
        """Keep results computed from constants alone, except operands that a call returns unchanged."""
        if len(reads) == 1 and all(self._known(tensor) in reads for tensor in produced):
            return
        for tensor in produced:  # a transposed parameter follows its parameter, a part computed of it stays
            kept = tensor.detach()
            self.constants[self._bind(tensor)] = kept if self._is_view(tensor) else kept.clone()

    def _inside(self, plan: CallPlan, func: Func, template: Any) -> _Inside | None:
        """A recurrent layer with its quantizers inside."""
        if func is not recurrent.layer or not plan.inside:
            return None
        return _Inside(template, {name: place.site for name, place in plan.inside.items()})

    def _places(self, row: Function | None, args: Args, kwargs: Kwargs, slots: Mapping[int, int]) -> dict[int, int]:
        if row is None:  # of what is in no table the ports are its tensors in order
            return {port: slots[self._value(t)] for port, t in enumerate(tensors_in((args, kwargs)))}
        operands = row.operands(row.bind(args, kwargs))
        return {port: slots[self._value(t)] for port, t in operands if isinstance(t, Tensor)}

    def _is_view(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._parameters

    def _known(self, tensor: Tensor) -> int | None:
        found = self._live.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _bind(self, tensor: Tensor) -> int:
        self._count += 1
        self._live[id(tensor)] = (weakref.ref(tensor), self._count)
        return self._count

    def _value(self, tensor: Tensor) -> int:
        value = self._known(tensor)
        if value is None:  # a parameter, a buffer, or a tensor from outside: the same in every run
            value = self._bind(tensor)
            self.constants[value] = tensor
        return value


class _Replay:
    """A recorded call as a function of its tensors."""

    __slots__ = ("func", "template", "in_place")

    def __init__(self, func: Func, template: Any, in_place: bool) -> None:
        self.func, self.template, self.in_place = func, template, in_place

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        args, kwargs = map_tensors(self.template, lambda slot: tensors[slot.value], leaf=Slot)
        if self.in_place:
            args = (args[0].clone(), *args[1:])
        output = self.func(*args, **kwargs)
        return tensors_in(args[0] if self.func is SET_ITEM else output)

    def same(self, other: _Replay) -> bool:
        """Whether both are the same call with the same arguments other than tensors."""
        return self.func is other.func and bool(self.template == other.template)


class _Inside:
    """A recorded call of a recurrent layer as a function of its tensors and its inner quantizers."""

    __slots__ = ("template", "sites")

    def __init__(self, template: Any, sites: Mapping[str, str]) -> None:
        self.template, self.sites = template, sites

    def __call__(self, tensors: Sequence[Tensor], quantize: Quantize) -> Sequence[Tensor]:
        args, kwargs = self.template
        model = getattr(quantize, "__self__", None)
        if isinstance(model, TorchSimulation) and quantize == model.quantize and not torch.is_grad_enabled():
            inside: Mapping[str, Any] = model.inside(self.sites)
        else:
            inside = {name: functools.partial(quantize, site) for name, site in self.sites.items()}
        return _Replay(recurrent.layer, (args, {**kwargs, "inside": inside}), False)(tensors)


class TorchSimulation:
    """A :class:`QuantizationSimModel` as reconstruction sees it.

    Args:
        sim: calibrated or not; weights without an encoding get theirs.
        forward: how a batch is run; the model is called on it by default.

    Raises:
        CalibrationError: a weight's range cannot be found.
    """

    def __init__(self, sim: QuantizationSimModel, forward: Forward | None = None) -> None:
        self.sim, self._forward = sim, forward or _call
        self._programs: list[Program] = []
        self._repeatable: list[tuple[_Layout, Program]] = []
        self._checked = False
        self._computed: dict[str, Tensor] | None = None
        for site in sim.quantizers.values():
            if site.is_stored and site.enabled and not site.quantizer.derived:
                param = sim.graph.values[site.value].param
                if param is not None:
                    site.quantizer.observe_once(sim._interceptor.named_tensor(param).detach())

    def graph(self) -> Graph:
        """The graph of the simulation."""
        return self.sim.graph

    def observed_graph(self) -> Graph:
        """The graph of the simulation, with the shapes of its recorded run."""
        return self.sim.graph

    def sites(self) -> Mapping[str, Site]:
        """The sites of the simulation."""
        return self.sim.quantizers

    def shared(self) -> Mapping[str, str]:
        """The plan's groups of values that are only moved."""
        return self.sim.plan.shared

    def _tensor(self, site: str) -> Tensor:
        """The parameter at a weight site, or the part of one, or its transpose, that the model reads there."""
        found = self._stored(self.sim.graph.values[self.sim.plan.sites[site].value])
        assert found is not None, site
        return found

    def _stored(self, value: Value) -> Tensor | None:
        """The tensor of a weight, if it shares memory with a parameter."""
        if value.param is not None:
            return self.sim._interceptor.named_tensor(value.param)
        if len(value.sources) != 1:
            return None
        if self._computed is None:
            self._computed = self.sim._recorded_constants()
        found = self._computed.get(value.name)
        return found if found is not None and _lies_in(found, self._source(value)) else None

    def _source(self, value: Value) -> Tensor:
        return self.sim._interceptor.named_tensor(value.sources[0])

    def weight(self, site: str) -> Tensor:
        """A copy of the parameter at a weight site."""
        return self._tensor(site).detach().clone()

    def why_fixed(self, site: str) -> str | None:
        """Only parameters and buffers can be written, and views of them that no other operator reads."""
        value, op = self.sim.graph.values[self.sim.plan.sites[site].value], self.sim.plan.sites[site].op
        if self._stored(value) is None:
            return "its weight is computed in the model and no parameter"
        for source in value.sources:
            other = next((name for name in self._readers.get(source, ()) if name != op), None)
            if other is not None:
                return f"its parameter {source} is also read by {other}, which would change with it"
        return None

    @functools.cached_property
    def _readers(self) -> Mapping[str, set[str]]:
        return parameter_readers(self.sim.graph)

    def set_weight(self, site: str, value: Tensor) -> None:
        """Write a parameter in place."""
        with torch.no_grad():
            self._tensor(site).copy_(value)

    def quantize(self, site: str, x: Tensor) -> Tensor:
        """``x`` as the quantizer of ``site`` leaves it; the grid of a bias follows from those of its layer as they are now."""
        quantizer = self._in_effect(site)
        return x if quantizer is None or not x.is_floating_point() else quantizer(x)

    def inside(self, sites: Mapping[str, str]) -> StepFunctions:
        """The quantizers of the ``sites`` inside a recurrent layer, as the simulation runs them: the gates of a step at once."""
        found = {name: self._in_effect(site) for name, site in sites.items()}
        working = ((name, quantizer) for name, quantizer in found.items() if quantizer is not None)
        return StepFunctions({name: q if name == RECURRENT else OnGrid(q) for name, q in working})

    def _in_effect(self, site: str) -> Quantizer | None:
        """The quantizer of ``site``, if it is on and has an encoding."""
        quantizer = self.sim.quantizers[site].quantizer
        assert isinstance(quantizer, Quantizer)
        if quantizer.derivation is not None:
            quantizer.derivation.refresh()
        return quantizer if quantizer.enabled and quantizer.encoding is not None else None

    def program(self, batch: Any) -> tuple[Program, State]:
        """The calls of one run; runs that make the same calls share one program.

        A batch of known shapes is not run where nothing in the run of an earlier one, of the same shapes, depended on numbers,
        random draws, or attributes that a run changes.

        Raises:
            ModelError: the model fails on the batch, or repeating its calls gives something else (it changes tensors
                through views of them).
        """
        sim = self.sim
        self.sim._simulator.refresh_biases()
        for layout, same in self._repeatable:
            inputs = layout.inputs(sim.model, batch)
            if inputs is not None:
                return same, inputs
        held = frozenset(p.untyped_storage().data_ptr() for p in sim.model.parameters())
        tracer = _Tracer(sim._simulator.plans, held)
        before, device = _attributes(sim.model), model_device(sim.model)
        with sim._interceptor.handled_by(tracer), torch.no_grad(), evaluation(sim.model), same_draws():
            generated = torch.get_rng_state()
            with _SizeWatch() as watch:
                self._forward(sim.model, batch)
            # kernels of recurrent layers and attentions say that they draw, and do so for a dropout only
            drawn = watch.drawn and not (_is_cpu(device) and torch.equal(generated, torch.get_rng_state()))
        program = Program(tuple(tracer.steps), tracer.constants, tracer.returned)
        self._check(program, tracer)
        if tracer.deciding:
            program = _decided(program, tracer.deciding)
        known = next((p for p in self._programs if _same(p, program)), None)
        if known is None:
            self._programs.append(program)
        depends = watch.decided or drawn or tracer.read or tracer.deciding or self._forward is not _call
        if not depends and before == _attributes(sim.model):
            self._repeatable.append((_Layout(sim.model, batch), known or program))
        return known or program, dict(tracer.inputs)

    def _check(self, program: Program, tracer: _Tracer) -> None:
        if self._checked:
            return
        whole = Program(
            (*program.steps, Step("", tuple(dict.fromkeys(tracer.returned)), (), lambda tensors: ())),
            program.constants,
            program.outputs,
        )
        state = dict(tracer.inputs)
        run(whole, state, 0, len(program.steps))
        for value, expected in zip(tracer.returned, tracer.outputs, strict=True):
            found = state.get(value, program.constants.get(value))
            if found is None or not expected.is_floating_point():
                continue
            finite = torch.isfinite(expected)
            agreement = sqnr(expected[finite].cpu().double().numpy(), found[finite].cpu().double().numpy())
            if agreement < _EXACT_ENOUGH:
                raise ModelError(
                    type(self.sim.model).__name__,
                    f"its calls, repeated one by one, give another output ({agreement:.0f} dB): it changes tensors "
                    "through views of them, or draws random numbers",
                    "write x = torch.cat(...) instead of assigning into a view, and seed what is random",
                )
        self._checked = True


class _Layout:
    """The arguments of a run with the numbers of its tensors left out."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._template, tensors = _divided_call(model, batch)
        self._kinds = [_kind(tensor) for tensor in tensors]

    def inputs(self, model: nn.Module, batch: Any) -> State | None:
        """The tensors of a batch of this layout by their values; ``None`` if it has another."""
        template, tensors = _divided_call(model, batch)
        if self._kinds != [_kind(tensor) for tensor in tensors] or not _alike(template, self._template):
            return None
        return dict(enumerate(tensors, 1))


def _divided_call(model: nn.Module, batch: Any) -> tuple[Any, list[Tensor]]:
    """Arguments with slots in place of tensors; and the tensors, each once, in the order of a tracer."""
    call = as_call(to_device(batch, model_device(model)))
    tensors = list({id(tensor): tensor for tensor in tensors_in(call)}.values())
    places = {id(tensor): i for i, tensor in enumerate(tensors)}
    return map_tensors(call, lambda tensor: Slot(places[id(tensor)])), tensors


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.stride()


def _alike(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # arguments of kinds that do not compare
        return False


def _attributes(model: nn.Module) -> list[tuple[int, str, int, int]]:
    """Objects that the modules of a model hold besides parameters, with their lengths or version counters."""
    found = []
    for _, module in walk_modules(model):
        held = {**vars(module), **module._buffers}
        for name, value in held.items():
            size = value._version if isinstance(value, Tensor) else len(value) if type(value) in _GROWING else 0
            found.append((id(module), name, id(value), size))
    return found


_GROWING = (list, dict, set)


def _decided(program: Program, deciding: Mapping[int, Tensor]) -> Program:
    """The program with the operands that determine the sizes of results fixed to their recorded float values.

    Sizes that the model read are numbers among the arguments of its calls, which hold for these rows only; and a row of the
    float model is compared with the same row of the quantized one. The calls that compute the decision write what nothing
    reads.
    """
    fresh = count(1 + max(v for step in program.steps for v in (*step.reads, *step.writes)))
    unread = {value: next(fresh) for value in deciding}
    steps = tuple(
        replace(step, writes=tuple(unread.get(v, v) for v in step.writes)) if deciding.keys() & step.writes else step
        for step in program.steps
    )
    outputs = tuple(unread.get(v, v) for v in program.outputs)
    return Program(steps, {**program.constants, **deciding}, outputs)


def _lies_in(view: Tensor, parameter: Tensor) -> bool:
    """Whether every element of ``view`` is an element of ``parameter`` and no two are the same."""
    same = view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    return same and all(step > 0 or n == 1 for n, step in zip(view.shape, view.stride(), strict=True))


def _is_cpu(device: torch.device | None) -> bool:
    return device is None or device.type == "cpu"


def _call(model: nn.Module, batch: Any) -> Any:
    args, kwargs = as_call(to_device(batch, model_device(model)))
    return run_batch(model, args, kwargs)


def _same(one: Program, other: Program) -> bool:
    """Whether two runs made the same calls, so that one program serves both."""
    if len(one.steps) != len(other.steps) or one.constants.keys() != other.constants.keys():
        return False
    pairs = zip(one.steps, other.steps, strict=True)
    if not all(a == b and a.function.same(b.function) for a, b in pairs):  # type: ignore[attr-defined]
        return False
    return all(t is other.constants[v] or _equal(t, other.constants[v]) for v, t in one.constants.items())


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
