"""Handlers of intercepted calls while a simulation calibrates, runs or is exported.

A :class:`CallPlan` says which quantizers belong to a call. A call and the quantizer of its result may be one pass over
memory. For the ONNX exporter, quantizers are markers of their sites.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, Literal

import numpy as np
import torch

from bitwright.core.graph.constant_channels import ChannelWatch, channels_within
from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import op_row
from bitwright.core.graph.recurrence import CELLS, RECURRENT
from bitwright.core.health.diagnosis import Repair
from bitwright.core.numerics.granularity import PerTensor
from bitwright.core.numerics.statistics import MinMax
from bitwright.core.simulation.calibration import Observer, refuse_empty
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.quantizer import DerivedBias
from bitwright.core.simulation.simulation import Lock
from bitwright.core.simulation.sites import Site
from bitwright.errors import CalibrationError
from bitwright.torch.calls import recurrent
from bitwright.torch.calls.decompose import EXPORTABLE
from bitwright.torch.calls.functions import (
    SET_ITEM,
    Args,
    Func,
    Function,
    Kwargs,
    applies_mask,
    function_of,
    writes_first,
)
from bitwright.torch.calls.inputs import flatten_tensors, map_arguments, map_tensors, tensors_in
from bitwright.torch.interception.intercept import ACCESS, Frame, Handler, Key, constant_for_compilers
from bitwright.torch.interception.record import refuse_nested, refuse_transforms
from bitwright.torch.quantizers.fake_quantize import Grid, clamp_on_grid, is_plain, on_host, sum_on_grid
from bitwright.torch.quantizers.quantizer import Quantizer
from bitwright.torch.quantizers.sequences import Columns, Keep, OnGrid, StepFunctions


def writes(row: Function, kwargs: Kwargs) -> bool:
    """Whether the call overwrites its first argument."""
    return row.in_place or bool(kwargs.get("inplace"))


def joined(row: Function, bound: Mapping[str, Any], grid: Grid, in_place: bool) -> torch.Tensor | None:
    """Compute an activation or a sum and quantize it in one call; ``None`` where two calls are needed."""
    x = bound["input"]
    if row.type == "Add":
        plain = bound.keys() == {"input", "other"} and isinstance(bound["other"], torch.Tensor)
        return sum_on_grid(x, bound["other"], grid, in_place=in_place) if plain else None
    ends = clamped_ends(row, bound)
    if ends is None:
        return None
    return clamp_on_grid(x, grid, ends, in_place=in_place or bool(bound.get("inplace")))


#: activations whose gradient is that of ``hardtanh``; that of ``clamp`` passes at the ends
_CLAMPS = ("relu", "relu_", "relu6", "hardtanh", "hardtanh_")


def clamped_ends(row: Function, bound: Mapping[str, Any]) -> tuple[float, float] | None:
    """The ends of an activation that clamps its input."""
    if row.label not in _CLAMPS or not bound.keys() <= {"input", "inplace", "min_val", "max_val"}:
        return None
    attrs = {"min": 0.0, "max": math.inf} if row.attrs is None else row.attrs(bound)
    low, high = attrs["min"], attrs["max"]
    return (low, high) if low is not None and high is not None and low <= high else None


@dataclass(frozen=True)
class Place:
    """A quantizer at a port (or output index) of a call, with its site name and its channel statistics."""

    site: str
    at: int
    quantizer: Quantizer
    channels: ChannelWatch
    repeated: bool = False  # the place was called several times in a recorded forward

    def observe(self, x: torch.Tensor) -> None:
        """Add a tensor to the statistics of calibration."""
        if not self.quantizer.frozen:
            self.quantizer.observe(x)
            self.channels.observe(x)

    @property
    def reads_bounds(self) -> bool:
        """Whether column bounds are all that is observed of a matrix."""
        quantizer, channels = self.quantizer, self.channels.place
        alone = quantizer.needs == "minmax" and isinstance(quantizer.spec.granularity, PerTensor)
        return alone and (channels is None or channels.axis == -1)

    def observe_columns(self, seen: Columns) -> None:
        """Add a matrix by its column bounds, where :attr:`reads_bounds`."""
        none, count = np.zeros((), np.int64), np.array(seen.lo.size * seen.rows)
        lo, hi = (np.array(end, np.float64) for end in (seen.lo.min(), seen.hi.max()))
        self.quantizer.observe_statistics(MinMax(lo, hi, count, none, none, none))
        self.channels.add(channels_within(seen.lo, seen.hi))


@dataclass(frozen=True)
class CallPlan:
    """Quantizers of one place of the model; ``inside`` has the inner tensors of a recurrent layer, by name."""

    op: str
    operands: tuple[Place, ...] = ()
    outputs: tuple[Place, ...] = ()
    inside: Mapping[str, Place] = field(default_factory=dict)

    def observe_steps(
        self, kept: Mapping[str, Sequence[torch.Tensor]], bounds: Mapping[str, Sequence[Columns]]
    ) -> None:
        """Add data from inside a recurrent layer, by name: tensors of its steps, or bounds of their columns."""
        for name, steps in kept.items():
            if steps:
                self.inside[name].observe(steps[0] if len(steps) == 1 else torch.cat(list(steps)))
        for name, columns in bounds.items():
            for seen in columns:
                self.inside[name].observe_columns(seen)


def call_plans(graph: Graph, sites: Mapping[str, Site]) -> dict[str, CallPlan]:
    """Plans by operator: quantizers of its inputs, of its outputs, and inside it."""
    by_op: dict[str, list[Site]] = {}
    for site in sites.values():
        by_op.setdefault(site.op, []).append(site)
    return {op: _call_plan(op, held, graph.op(op).calls > 1) for op, held in by_op.items()}


def _call_plan(op: str, sites: Sequence[Site], repeated: bool) -> CallPlan:
    outer = [site for site in sites if site.inner is None]
    return CallPlan(
        op,
        tuple(_place_of(site, repeated) for site in outer if site.role != "output"),
        tuple(_place_of(site, repeated) for site in outer if site.role == "output"),
        {site.inner: _place_of(site, False) for site in sites if site.inner is not None},
    )


def _place_of(site: Site, repeated: bool) -> Place:
    assert isinstance(site.quantizer, Quantizer)
    return Place(site.name, site.port, site.quantizer, site.channels, repeated)


#: between the name of a site and the number of the run of its place, in a mark of a captured program
RUN = "\n"


def mark(x: torch.Tensor, site: str) -> torch.Tensor:
    """``x`` as the exporter sees it: a node ``bitwright::Site`` in the ONNX graph, an identity that carries a name."""
    out: torch.Tensor = torch.ops.bitwright.site(x, site)
    return out


def _copied(x: torch.Tensor, site: str) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


# an operator with two arguments: each of those of ``torch.onnx.ops.symbolic``, which has eight, costs the exporter half as
# much again
_OPERATORS = torch.library.Library("bitwright", "FRAGMENT")
_OPERATORS.define("site(Tensor x, str site) -> Tensor")
_OPERATORS.impl("site", _copied, "CompositeExplicitAutograd")


logger = logging.getLogger("bitwright")

#: factor between the ranges of calls from which a shared grid is told: three of its eight bits are lost on the smallest.
#: Measured on four calls in a row, the output loses 3 to 6 dB at 2, 6 to 11 at 4, 10 to 19 at 8 and 19 to 32 at 32; calls
#: over time (cells, Elman networks) differ by less than 4.
UNLIKE = 8.0
#: factor from which on a call holds nothing but the rounding of float32: sums that cancel, zero but for the last digit
ROUNDING = 2.0**23

_UNSEEN = "first seen after the example input was recorded"
_UNSEEN_MASK = f"{_UNSEEN}; it applies a mask, which takes no quantizer"

Stage = Literal["uncalibrated", "observe", "simulate", "mark", "float"]


class Simulator(Handler, Observer):
    """The handler of a :class:`QuantizationSimModel`.

    Threads share it in the stages ``simulate`` and ``float``: what is written meanwhile is written whole. A thread with
    a stage or taps of its own has a :meth:`variant`.

    Attributes:
        plans: what to do, by call key; a recorded call without quantizers has an empty plan.
        stage: what the quantizers do with the tensors they are given.
        unseen: calls that ran without having been recorded, by readable name: they run in float.
    """

    def __init__(self, plans: Mapping[Key, CallPlan]) -> None:
        self.plans = dict(plans)
        self.stage: Stage = "uncalibrated"
        self.unseen: dict[str, str] = {}
        self.taps: dict[str, list[torch.Tensor]] | None = None
        self.biases: list[DerivedBias] = []
        self.lengths: dict[str, int] = {}  # recurrent layer -> most steps in calibration
        self.longer: dict[str, int] = {}  # recurrent layer -> steps of a longer sequence that was simulated
        # repeated place -> largest value of its quietest and its loudest call
        self.ranges: dict[str, tuple[float, float]] = {}
        self.named_unlike: set[str] = set()  # sites of which it was said that their calls are unlike
        self.runs = 0
        self.repairs: dict[str, Repair] = {}  # op -> what becomes of its output
        self.moving = False  # whether a call that only moves data has a quantizer: it joins different grids
        self.unlisted = (
            False  # whether a call of a function that is in no table has one: it reads an input of the model
        )
        self.blame: Callable[[Any, Any], None] | None = None  # names the operator that makes NaN of finite values
        self.told = False  # whether it did
        self.prepare_grids: Callable[[], None] = _nothing
        self.say: Callable[[str], None] = logger.warning  # logs a warning of the simulation
        self._gaps: dict[str, bool] = {}  # calls that :attr:`unseen` has and integers could compute -> whether logged
        self.watch: Callable[[], bool] | None = None  # is told of every simulated forward
        self._marks: dict[str, int] = {}  # site -> number of its last mark
        self._inside: tuple[Mapping[Key, CallPlan], dict[Key, list[CallPlan]]] = ({}, {})  # of these plans
        self._given: dict[int, tuple[Any, Any, bool]] = {}  # thread -> what the model was called with
        self._lock = Lock()

    def variant(self, stage: Stage | None = None, taps: dict[str, list[torch.Tensor]] | None = None) -> Simulator:
        """This simulator with another stage or other taps, sharing all other state."""
        new = copy.copy(self)
        new._lock, new._marks = self._lock, {}
        new.stage, new.taps = stage or self.stage, self.taps if taps is None else taps
        return new

    def remember(self) -> Undo:
        """Save the stage, the repairs and the notes of calibration; the function returned restores them."""
        stage, repairs, runs = self.stage, self.repairs, self.runs
        lengths, longer = dict(self.lengths), dict(self.longer)

        def restore() -> None:
            self.stage, self.repairs, self.runs = stage, repairs, runs
            self.lengths, self.longer = dict(lengths), dict(longer)

        return restore

    # -- handler

    def begin(self, args: Args, kwargs: Mapping[str, Any]) -> None:
        """Refuse to simulate before calibration, and where tensors hold no values."""
        refuse_transforms()
        for name, tensor in flatten_tensors((args, dict(kwargs)), "input"):
            refuse_nested(name, tensor)
        if self.stage == "uncalibrated":
            raise CalibrationError(
                "QuantizationSimModel",
                "the model was run before calibration, so no quantizer has an encoding yet",
                "call sim.compute_encodings(batches) or sim.load_encodings(path) first",
            )
        looks = self._begin_simulation() if self.stage in ("simulate", "mark") else True
        if self._looks_for_nan():
            self._given[get_ident()] = (args, kwargs, looks)
        if self.stage == "observe":
            self._begin_observation((args, kwargs) if args or kwargs else None)

    def _begin_simulation(self) -> bool:
        """Decide whether this forward reads values on devices where reading waits."""
        if torch.compiler.is_dynamo_compiling():
            self.prepare_compilation()
            return True
        looks = self.stage != "simulate" or self.watch is None or self.watch()
        self.refresh_biases(everywhere=looks)
        return looks

    def _begin_observation(self, given: tuple[tuple[Any, ...], Mapping[str, Any]] | None) -> None:
        if not self.runs:
            self.lengths, self.longer, self.ranges = {}, {}, {}
        self.told = False
        if self.gate is not None:
            if given is not None:
                shapes = {f"input {i}": tuple(t.shape) for i, t in enumerate(tensors_in(given))}
                refuse_empty(self.gate.next_number, shapes)
            self.gate.open(given)

    def whole(self, key: Key, args: Args) -> bool:
        """Run a fused call of 16-bit numbers as it is where nothing inside is quantized or looked at.

        Its kernel does not round what lies in between to 16 bits, as its parts would.
        """
        half = any(isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16) for x in args)
        if not half or self.stage not in ("simulate", "float") or self.taps is not None or self.repairs:
            return False
        inside = self._plans_inside().get(key, ())
        places = (place for plan in inside for place in (*plan.operands, *plan.outputs))
        return bool(inside) and (self.stage == "float" or not any(place.quantizer.enabled for place in places))

    def _plans_inside(self) -> Mapping[Key, Sequence[CallPlan]]:
        """The plans of the calls that a fused call, by its key, was recorded as."""
        plans, found = self._inside
        if plans is not self.plans:
            found = {}
            for key, plan in self.plans.items():
                if isinstance(key, tuple):
                    found.setdefault(key[0], []).append(plan)
            self._inside = self.plans, found
        return found

    def part(self, path: str, caller: str | None) -> bool:
        """Allow parts of the model to run directly; calls around them are not simulated, which is reported once."""
        if caller is not None and self.stage == "simulate":
            with self._lock:
                known = caller in self.unseen
                self.unseen.setdefault(
                    caller, "a method that calls parts of the model outside of its forward; the parts are simulated"
                )
            if not known:
                logger.warning(
                    "%s calls %s outside the model's forward: the part is simulated, what the method computes itself is in "
                    "float; put the call into `with sim.active():` to simulate both",
                    caller,
                    path,
                )
        return True

    @constant_for_compilers
    def prepare_compilation(self) -> None:
        """Prepare the grids of all weights, which needs values; those made while a compiler traces are not kept."""
        self.refresh_biases()
        self.prepare_grids()

    def refresh_biases(self, *, everywhere: bool = True) -> None:
        """Update derived bias grids from the encodings that they follow, except those that train on other devices."""
        with self._lock:  # another thread must not see one that is being derived
            for bias in self.biases:
                if everywhere or not bias.quantizer.trains_elsewhere:
                    bias.refresh()

    def end(self, output: Any) -> None:
        """Count the forwards of a calibration; check the outputs of a simulation for NaN until one is found."""
        if self._looks_for_nan():
            args, kwargs, looks = self._given.pop(get_ident(), ((), {}, False))
            if (args or kwargs) and _holds_nan(output, anywhere=looks):
                assert self.blame is not None
                self.told = True
                self.blame(args, kwargs)
        if self.stage == "observe":
            self.runs += 1
            if self.gate is not None:
                self.gate.close()
        else:
            self.warn_of_gaps()

    def _looks_for_nan(self) -> bool:
        wanted = self.stage == "simulate" and not self.told and self.taps is None and self.blame is not None
        return wanted and not torch.compiler.is_compiling()  # a look at values would break the compiled graph

    def other(self, frame: Frame, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run calls without quantizers, except data movement that joins several grids."""
        watching = self.moving or self.taps is not None or self.repairs
        row = function_of(func) if watching else None
        if row is None:
            name = getattr(func, "__name__", "call")
            known = function_of(func) is not None or name in ACCESS
            if known or not (self.repairs or self.unlisted or self.taps is not None):
                return func(*args, **kwargs)
            return self._unlisted(self.plans.get(frame.other_key(name), CallPlan("")), func, args, kwargs)
        plan = self.plans.get(frame.movement_key(row.label))
        func = self._mended(plan, func)
        if plan is not None and (plan.outputs or plan.operands):
            output = self._planned(plan, row, func, args, kwargs)
        else:
            output = func(*args, **kwargs)
        if self.taps is not None:
            self._tap(plan, output)
        return output

    def call(self, frame: Frame, key: Key, row: Function, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run a call that may have quantizers."""
        plan = self.plans.get(key)
        if self.stage == "mark":
            func = EXPORTABLE.get(row.label, func)
        if self.repairs and func is not recurrent.layer:
            func = self._mended(plan, func)
        if plan is None:
            output = func(*args, **kwargs)
            # a batch norm that counts its batches has an integer result
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                self._note_unseen(frame, row, args, kwargs, first)
            return output
        if func is recurrent.layer:
            output = self._recurrent(plan, row, args, kwargs)
        else:
            output = self._planned(plan, row, func, args, kwargs)
        if self.taps is not None:
            self._tap(plan, output)
        return output

    def mended_at(self, key: Key, func: Func) -> Callable[..., Any]:
        """``func`` with the repair of the call ``key``, if any."""
        return self._mended(self.plans.get(key), func)

    def simulated_at(self, key: Key, func: Func) -> Callable[..., Any]:
        """``func`` as the simulation runs it at the call ``key``."""
        plan, row = self.plans.get(key), function_of(func)
        func = self._mended(plan, func)
        if plan is None or row is None or func is recurrent.layer or not (plan.operands or plan.outputs):
            return func
        return lambda *args, **kwargs: self._planned(plan, row, func, args, kwargs)

    def _mended(self, plan: CallPlan | None, func: Func) -> Callable[..., Any]:
        repair = None if plan is None else self.repairs.get(plan.op)
        return func if repair is None else repaired(func, repair)

    def _planned(self, plan: CallPlan, row: Function, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run the call with its quantizers."""
        if isinstance(kwargs.get("out"), torch.Tensor):
            return self._into_target(plan, row, func, args, kwargs)
        written = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if plan.operands:
            bound = row.bind(args, kwargs)
            operands = dict(row.operands(bound))
            if torch.is_grad_enabled() and writes(row, kwargs) and written is not None:
                operands = _with_copy_of(written, operands)
            new = {
                place.at: self._operand(place, operands[place.at])
                for place in plan.operands
                if isinstance(operands.get(place.at), torch.Tensor) and operands[place.at].is_floating_point()
            }
            args, kwargs = row.replace(args, kwargs, new)
        if plan.outputs:
            return self._with_outputs(plan, row, func, args, kwargs, written)
        output = func(*args, **kwargs)
        if writes(row, kwargs) and output is not written and args and output is args[0] and written is not None:
            return written.copy_(output)  # an in-place call on an operand that was quantized out of place
        return output

    def _unlisted(self, plan: CallPlan, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run a call of a function without a row, with its quantizers; its ports are its tensors in order."""
        original, func = func, self._mended(plan, func)
        tensors = tensors_in((args, kwargs))
        new = {
            id(tensors[place.at]): self._operand(place, tensors[place.at])
            for place in plan.operands
            if place.at < len(tensors) and tensors[place.at].is_floating_point()
        }
        given, named = map_arguments(args, kwargs, lambda t: new.get(id(t), t)) if new else (args, kwargs)
        output = func(*given, **named)
        if given and args[0] is not given[0] and (output is given[0] or original is SET_ITEM):
            args[0].copy_(given[0])  # it was written into, out of place
            output = None if output is None else args[0]
        for place in plan.outputs:
            made = tensors_in(output)[place.at : place.at + 1]
            output = _exchanged(output, {id(t): self._output(place, t, overwrite=False) for t in made})
        if self.taps is not None:
            self._tap(plan, args[0] if original is SET_ITEM else output)
        return output

    def _into_target(self, plan: CallPlan, row: Function, func: Func, args: Args, kwargs: Kwargs) -> torch.Tensor:
        """Fill ``out`` with the quantized result."""
        rest = dict(kwargs)
        target: torch.Tensor = rest.pop("out")
        result = self._planned(plan, row, func, args, rest)
        if target.shape != result.shape:
            target.resize_(result.shape)
        return target.copy_(result)

    def _with_outputs(
        self, plan: CallPlan, row: Function, func: Func, args: Args, kwargs: Kwargs,
        written: torch.Tensor | None,
    ) -> Any:  # fmt: skip
        at_once = self._at_once(plan.outputs[0], row, args, kwargs)
        if at_once is not None:
            return at_once
        if writes(row, kwargs) and torch.is_grad_enabled() and written is not None and args:
            # autograd keeps the result of some in-place calls, so the grid must not be written over it
            result = self._output(plan.outputs[0], func(args[0].clone(), *args[1:], **kwargs), overwrite=False)
            return written.copy_(result)
        output = func(*args, **kwargs)
        if isinstance(output, torch.Tensor):
            # other calls that return what they were given (a cast to the type it has) leave it to its other readers
            alias = writes(row, kwargs) and len(args) > 0 and output is args[0]
            result = self._output(plan.outputs[0], output, overwrite=row.fresh or alias)
            if written is None or not alias:
                return result
            return written if result is written else written.copy_(result)
        items = list(output)
        for place in plan.outputs:
            if isinstance(items[place.at], torch.Tensor):
                items[place.at] = self._output(place, items[place.at], overwrite=False)
        return type(output)(items) if not hasattr(output, "_fields") else type(output)(*items)

    def _at_once(self, place: Place, row: Function, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
        """Run the call and quantize its result in one pass over memory; ``None`` where two are needed."""
        joins = row.type in ("Relu", "Clip", "Add") and self.stage == "simulate" and self.taps is None
        if not joins or self.repairs or not place.quantizer.enabled or torch.compiler.is_dynamo_compiling():
            return None
        if not args or not isinstance(args[0], torch.Tensor):
            return None
        quantizer, in_place = place.quantizer, writes(row, kwargs)
        grid = quantizer.plain_grid(args[0])
        if grid is not None:
            return joined(row, row.bind(args, kwargs), grid, in_place)
        bound = row.bind(args, kwargs)
        ends = None if quantizer.learned is None else clamped_ends(row, bound)
        if ends is None:
            return None
        return quantizer.joined_with(bound["input"], ends, in_place=in_place or bool(bound.get("inplace")))

    # -- recurrent layers

    def _recurrent(self, plan: CallPlan, row: Function, args: Args, kwargs: Kwargs) -> Any:
        """Run a layer with quantizers inside its steps; their data are merged once per call."""
        if self.stage == "mark":
            return self._marked_layer(plan, row, args, kwargs)
        self._note_length(plan.op, args)
        kept: dict[str, list[torch.Tensor]] = {}
        bounds: dict[str, list[Columns]] = {}
        functions = StepFunctions() if self.stage == "float" else self._step_functions(plan, kept, bounds)
        tapped = self._tap_steps(plan.op, kwargs["cell"], functions, kept) if self.taps is not None else {}
        inside = functions or None  # without a quantizer inside, torch's own operator does the work
        output = self._planned(plan, row, recurrent.layer, args, {**kwargs, "inside": inside})
        plan.observe_steps({name: steps for name, steps in kept.items() if name not in tapped}, bounds)
        for name, taken in tapped.items():
            steps = kept[name][::-1] if kwargs.get("reverse") else kept[name]  # in the order of time
            taken.append(torch.cat(steps) if args[4] is not None else torch.stack(steps))
        return output

    def _marked_layer(self, plan: CallPlan, row: Function, args: Args, kwargs: Kwargs) -> Any:
        """The layer as a node with the names of its sites; weights are marked in the node's order of gates."""
        operands = [p for p in plan.operands if p.at not in recurrent.WEIGHT_PORTS]
        weights = {p.at: p.site for p in plan.operands if p.at in recurrent.WEIGHT_PORTS and _is_live(p)}
        sites = {name: p.site for name, p in plan.inside.items() if _is_live(p)}
        layer = functools.partial(recurrent.marked_layer, mark=mark, weights=weights, sites=sites)
        return self._planned(replace(plan, operands=tuple(operands)), row, layer, args, kwargs)

    def _step_functions(
        self, plan: CallPlan, kept: dict[str, list[torch.Tensor]], bounds: dict[str, list[Columns]]
    ) -> StepFunctions:
        """Functions for the inner tensors of every step; ``kept`` or ``bounds`` collect the observed data."""
        found = StepFunctions()
        for name, place in plan.inside.items():
            quantizer = place.quantizer
            if not quantizer.enabled:
                continue
            if self.stage != "observe" or quantizer.frozen:
                found[name] = quantizer if name == RECURRENT else OnGrid(quantizer)  # the state itself stays in float
            elif not quantizer.is_fixed:
                columns = bounds.setdefault(name, []) if place.reads_bounds else None
                found[name] = Keep(kept.setdefault(name, []), columns)
        return found

    def _tap_steps(
        self, op: str, cell: str, functions: StepFunctions, kept: dict[str, list[torch.Tensor]]
    ) -> dict[str, list[torch.Tensor]]:
        """Requested inner tensors, and their destinations; ``functions`` keep them from now on."""
        assert self.taps is not None
        tapped = {}
        for name in (*(inner.name for inner in CELLS[cell].inner), RECURRENT):
            taken = self.taps.get(f"{op}.{name}")
            if taken is not None and name not in kept:
                tapped[name] = taken
                copies = functools.partial(_keep_copy, kept.setdefault(name, []), functions.get(name))
                functions[name] = copies
        return tapped

    def _note_length(self, op: str, args: Args) -> None:
        """Record the longest sequence of calibration, and warn once about a longer one."""
        length = len(args[0] if args[4] is None else args[4])
        if self.stage == "observe":
            self.lengths[op] = max(length, self.lengths.get(op, 0))
        elif self.stage == "simulate" and self.lengths.get(op, length) < length and op not in self.longer:
            with self._lock:
                first = not self.longer
                self.longer[op] = length
            if first:
                logger.info(
                    "%s: a sequence of %d steps, and calibration saw at most %d; its states may leave the ranges found",
                    op,
                    length,
                    self.lengths[op],
                )

    # -- the stages

    def _operand(self, place: Place, x: torch.Tensor) -> torch.Tensor:
        """The operand behind its quantizer, inside the rotation that stands around it, if one does."""
        quantizer = place.quantizer
        if quantizer.spec.rotation is None or not quantizer.enabled or self.stage == "float":
            return self._on_grid(place, x)
        return quantizer.turned(self._on_grid(place, quantizer.turned(x)), back=True)

    def _on_grid(self, place: Place, x: torch.Tensor) -> torch.Tensor:
        quantizer = place.quantizer
        if self.stage == "mark":
            return self._marked(place, x)
        if not quantizer.enabled or self.stage == "float":
            return self._passed(place, x)
        if quantizer.role in ("input", "output"):  # of a later call whose input another call's output shares
            return self._activation(place, x, overwrite=False)
        if quantizer.derivation is not None and (self.stage == "observe" or quantizer.encoding is None):
            quantizer.derivation.see(x)
            return x  # its grid follows from the input's and the weight's, or it stays in float
        if self.stage == "observe":
            quantizer.observe_once(x.detach())
            if quantizer.encoding is None:  # an empty tensor
                return x
        result = quantizer.constant(x)
        if self.taps is not None and place.site in self.taps:
            take(self.taps[place.site], result)
        return result

    def _output(self, place: Place, x: torch.Tensor, *, overwrite: bool) -> torch.Tensor:
        quantizer = place.quantizer
        if self.stage == "mark":
            return self._marked(place, x)
        if not quantizer.enabled or self.stage == "float" or not x.is_floating_point():
            return self._passed(place, x)
        return self._activation(place, x, overwrite=overwrite)

    def _passed(self, place: Place, x: torch.Tensor) -> torch.Tensor:
        """The result of a disabled quantizer; in float, :meth:`_tap` takes the results of operators."""
        if self.taps is not None and self.stage == "simulate" and place.site in self.taps:
            take(self.taps[place.site], x)
        return x

    def _marked(self, place: Place, x: torch.Tensor) -> torch.Tensor:
        if not _is_live(place):
            return x
        run = self._marks[place.site] = self._marks.get(place.site, -1) + 1
        return mark(x, f"{place.site}{RUN}{run}")

    def _activation(self, place: Place, x: torch.Tensor, *, overwrite: bool) -> torch.Tensor:
        quantizer = place.quantizer
        if self.stage == "observe":
            place.observe(x)
            if place.repeated and x.numel():
                self._note_range(place.site, x)
            return quantizer(x, overwrite) if quantizer.frozen else x
        result = quantizer(x, overwrite)
        if self.taps is not None and place.site in self.taps:
            take(self.taps[place.site], result)
        return result

    # -- notes

    def _note_range(self, site: str, x: torch.Tensor) -> None:
        lo, hi = torch.aminmax(x.detach())
        largest = max(-float(lo), float(hi))
        if 0.0 < largest < math.inf:
            low, high = self.ranges.get(site, (largest, largest))
            high = max(high, largest)
            self.ranges[site] = (min(value for value in (low, largest, high) if value * ROUNDING > high), high)

    def warn_of_ranges(self) -> None:
        """Say, once for a site, where the calls of one place are so unlike that those with small values lose most of their
        grid.
        """
        unlike = {
            site: high / low
            for site, (low, high) in self.ranges.items()
            if high > UNLIKE * low and site not in self.named_unlike
        }
        self.named_unlike.update(unlike)
        if unlike:
            worst = max(unlike, key=unlike.__getitem__)
            logger.warning(
                "%s%s: several calls share this grid, and the largest values of the calls differ by a factor of %.3g. If "
                "they are steps over time, give the grid 16 bits: sim.quantizers[%r].spec = QuantSpec(IntFormat(16)). If "
                "they are layers that share a weight, give each call a module of its own with the same parameter "
                "(second.weight = first.weight): each has a grid of its own then, and all one weight",
                worst,
                f" and {len(unlike) - 1} other{'s' if len(unlike) > 2 else ''}" if len(unlike) > 1 else "",
                unlike[worst],
                worst,
            )

    def _tap(self, plan: CallPlan | None, output: Any) -> None:
        if plan is None or self.taps is None:
            return
        tensors = tensors_in(output)
        for i, tensor in enumerate(tensors):
            name = f"{plan.op}.output[{i}]"
            kept = self.taps.get(name)
            if kept is not None and not any(place.site == name for place in plan.outputs if self.stage == "simulate"):
                take(kept, tensor)

    def _note_unseen(self, frame: Frame, row: Function, args: Args, kwargs: Kwargs, result: torch.Tensor) -> None:
        name = f"{frame.path}.{row.label}" if frame.path else row.label
        if self.unseen.get(name) == _UNSEEN:
            return
        bound = row.bind(args, kwargs)
        kind = row.op_type(bound)
        if self.stage != "mark" and applies_mask(row, bound, result):
            self.unseen.setdefault(name, _UNSEEN_MASK)
            return
        with self._lock:
            self.unseen[name] = _UNSEEN
            if op_row(kind).integer:
                self._gaps.setdefault(name, False)

    def warn_of_gaps(self) -> None:
        """Warn, once for a simulation, of calls that the example did not make and that integers could compute."""
        if torch.compiler.is_compiling() or all(self._gaps.values()):
            return
        with self._lock:
            new = [name for name, told in self._gaps.items() if not told]
            first = len(new) == len(self._gaps)
            self._gaps.update(dict.fromkeys(new, True))
        names = ", ".join(new[:3]) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
        one = len(new) == 1
        what = "this call did" if one else f"these {len(new)} calls did"
        tell = self.say if first else logger.info
        tell(
            f"{names}: {what} not happen on the example input, so {'it has' if one else 'they have'} no quantizer and "
            f"run{'s' if one else ''} in float; sim.coverage() lists every such call. Give the simulation an example that "
            f"reaches {'it' if one else 'them'}: examples=[batch], a batch of this shape or on this path"
        )


def _nothing() -> None:
    return None


class WithGradient(list[torch.Tensor]):
    """A list of tapped tensors that stay in the autograd graph."""


def take(taken: list[torch.Tensor], x: torch.Tensor) -> None:
    """Add a copy of ``x``, since later calls may overwrite it."""
    taken.append(x.clone() if isinstance(taken, WithGradient) else x.detach().clone())


def _with_copy_of(written: torch.Tensor, operands: Mapping[int, Any]) -> dict[int, Any]:
    """Copy what autograd saved of a quantizer's input where the call overwrites it."""
    return {port: x.clone() if x is written else x for port, x in operands.items()}


def _exchanged(output: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """Replace tensors in the result of a call, by their ids."""
    return map_tensors(output, lambda t: new.get(id(t), t))


def _holds_nan(output: Any, *, anywhere: bool) -> bool:
    tensors = [t for t in tensors_in(output) if t.is_floating_point() and is_plain(t)]
    return any(bool(t.detach().isnan().any()) for t in tensors if anywhere or on_host(t.device))


def _is_live(place: Place) -> bool:
    return place.quantizer.enabled and place.quantizer.encoding is not None


def _keep_copy(
    steps: list[torch.Tensor], function: Callable[[torch.Tensor], torch.Tensor] | None, x: torch.Tensor
) -> torch.Tensor:
    out = x if function is None else function(x)
    steps.append(out.detach().clone())
    return out


def repaired(func: Func, repair: Repair) -> Callable[..., Any]:
    """``func`` with its results repaired, in place where it writes in place."""

    def applied(x: torch.Tensor, written: tuple[Any, ...]) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        new = x.nan_to_num(repair.nan, repair.hi, repair.lo)
        if repair.kind == "clamp":
            new = new.clamp(repair.lo, repair.hi)
        return x.copy_(new) if any(x is argument for argument in written) else new

    def run(*args: Any, **kwargs: Any) -> Any:
        written = (*(args[:1] if writes_first(func, kwargs) else ()), kwargs.get("out"))
        return map_tensors(func(*args, **kwargs), lambda x: applied(x, written))

    return run
