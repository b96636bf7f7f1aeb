"""Record a run of the model as a ``core.Graph``: which tensor came from which call.

Several runs may be recorded into one graph; calls with the same key are the same op, so both sides of a data-dependent
branch, or a longer sequence, extend the graph and never duplicate it. So are the two kinds of forward calls of ``generate``:
on all tokens of an input, then on one token with a cache.
"""

from __future__ import annotations

import inspect
import logging
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn

from bitwright.core.graph.graph import Graph, Op, Value
from bitwright.core.graph.operators import op_row
from bitwright.core.graph.recurrence import CELLS, inner_values
from bitwright.errors import ModelError
from bitwright.torch.calls.functions import SET_ITEM, Args, Func, Function, Kwargs, function_of
from bitwright.torch.calls.inputs import (
    ARRAYS,
    Continuation,
    as_call,
    caches_in,
    evaluation,
    flatten_tensors,
    holds_arrays,
    is_leaf,
    map_arguments,
    map_tensors,
    named_state,
    same_draws,
    tensors_in,
)
from bitwright.torch.interception.intercept import ACCESS, Frame, Handler, Interceptor, Key, forward_signature
from bitwright.torch.interception.places import Trace, Where, find_loops, find_repeats, find_turns


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a recorded call, with its value."""

    value: int


@dataclass
class Call:
    """Facts about one op: its first run, and the operands of later runs."""

    key: Key
    label: str
    type: str
    inputs: tuple[int | None, ...]
    attrs: dict[str, Any]
    path: str
    module: nn.Module | None
    param: str | None
    func: Func
    args: Args
    kwargs: Kwargs
    outputs: list[int] = field(default_factory=list)
    also: dict[tuple[int, int], None] = field(default_factory=dict)
    runs: int = 1
    name: str = ""


@dataclass
class _Tensor:
    kind: str
    shape: tuple[int, ...]
    dtype: str
    name: str
    param: str | None = None
    constant: torch.Tensor | None = None
    sources: tuple[str, ...] = ()
    made_anew: bool = False
    read_by_code: bool = False


def _part(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key for the memory that a tensor views; unique as long as the memory is held."""
    if _is_batched(tensor) or tensor.layout != torch.strided:
        return (id(tensor),)  # without a memory of its own
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()._cdata
        return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


AnyRecorder = TypeVar("AnyRecorder", bound="Recorder")


class Recorder(Handler):
    """A handler that runs every call unchanged and records its operands and results."""

    def __init__(
        self,
        interceptor_of: Callable[[], Interceptor],
        signature: inspect.Signature | None,
        keep_arguments: bool = True,
        whole: bool = False,
    ) -> None:
        self._interceptor_of, self.signature, self._keep_arguments = (interceptor_of, signature, keep_arguments)
        self._whole = whole
        self.calls: dict[Key, Call] = {}
        self.values: list[_Tensor] = []
        self.inputs: dict[str, int] = {}
        # constant -> arguments of the call that made it; of whole recordings
        self.sizes: dict[int, tuple[Any, ...]] = {}
        # constants that hold one number everywhere, made by a call that is given their sizes
        self.filled: set[int] = set()
        self.outputs: dict[int, None] = {}
        self.returned: dict[str, int] = {}
        self.result: Any = None  # of the last forward, while whoever recorded it has not taken it
        self.static: set[Key] = set()
        self.loops: frozenset[Where] = frozenset()  # the interceptor's, for others that run the model
        self.turns: frozenset[Key] = frozenset()  # likewise
        self.repeats: dict[Key, int] = {}  # likewise
        self._trace = interceptor_of().trace
        self._params: dict[str, int] = {}
        self._continues = False  # whether this run was given a cache, which is then among its results
        self._parts: dict[tuple[Any, ...], int] = {}  # place and part of a stored tensor -> its value
        self._lengths: set[int] = set()  # that a part of a parameter has where it is cut for the input of this run
        self._live: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    # -- handler

    def begin(self, args: Args, kwargs: Mapping[str, Any]) -> None:
        """Name the model's inputs after the parameters of its forward."""
        self._live.clear()
        self._lengths.clear()
        self._continues = bool(caches_in((args, dict(kwargs))))
        if self._trace is not None:
            self._trace.begin()
        for path, tensor in named_inputs(self.signature, args, kwargs):
            if path not in self.inputs:
                self.inputs[path] = self._new("input", tensor, path)
            self._bind(tensor, self.inputs[path])
            with torch._C.DisableTorchFunction():
                self._lengths.update(_lengths_of(tensor))

    def end(self, output: Any) -> None:
        """Note which values the model returns."""
        self.returned = {n: self._value(t) for n, t in flatten_tensors(output, caches=self._continues)}
        self.result = output if self._keep_arguments else None
        for value in self.returned.values():
            self.outputs[value] = None
        self._live.clear()

    def call(self, frame: Frame, key: Key, row: Function, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run a call of a known function and note it as an op."""
        bound = row.bind(args, kwargs)
        operands = [t if isinstance(t, torch.Tensor) else None for _, t in row.operands(bound)]
        if row.label == "getitem":
            while operands[-1] is None:
                operands.pop()
        inputs = [None if t is None else self._value(t) for t in operands]
        attrs = row.attrs(bound) if row.attrs else {}
        # a view only reads the graph; a simulation has to measure
        if (
            not self._keep_arguments
            and any(map(_is_batched, operands))
            and op_row(row.op_type(bound)).kind != "movement"
        ):
            raise ModelError(
                f"{frame.path}.{row.label}" if frame.path else row.label,
                "it is called inside a torch.func transform (vmap, grad, jvp, ...), whose tensors hold no values that "
                "could be measured",
                "write this part without the transform: call the layer on the whole batch instead of under vmap, and "
                "simulate the model inside a grad rather than around it",
            )
        op_type = row.op_type(bound)
        return self._note(frame, key, row.called(kwargs), op_type, inputs, attrs, func, args, kwargs)

    def other(self, frame: Frame, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run any other call; it becomes an op when it computes tensors from tensors that depend on the input."""
        row = function_of(func)
        if row is not None:
            key = frame.movement_key(row.label)
            return self.call(frame, key, row, func, args, kwargs)
        name = getattr(func, "__name__", "call")
        if name in ACCESS:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        key = frame.other_key(name)
        inputs = [self._value(t) for t in tensors]
        if name in READS:
            for value in inputs:
                self.values[value].read_by_code = True
        return self._note(frame, key, name.strip("_"), name.strip("_"), inputs, {}, func, args, kwargs)

    # -- notes

    def _note(
        self, frame: Frame, key: Key, label: str, op_type: str, inputs: Sequence[int | None], attrs: dict[str, Any],
        func: Func, args: Args, kwargs: Kwargs,
    ) -> Any:  # fmt: skip
        known = self.calls.get(key)
        keeps = known is None and self._keep_arguments
        template = map_arguments(args, kwargs, self._slot) if keeps else ((), {})
        output = func(*args, **kwargs)
        produced = tensors_in(args[0] if func is SET_ITEM else output)
        if not produced:
            return output
        read = [self.values[i] for i in inputs if i is not None]
        if self._trace is not None:
            self._trace.call(frame.path, op_type, args, kwargs, self._is_fixed, produced)
        if _is_constant(op_type, read) and not self._keeps(read):
            follows = self._follows_input(op_type, read, produced)
            self._note_constants(key, label, inputs, read, produced, follows)
            self._note_sizes(op_type, inputs, produced, args, kwargs)
            return output
        self._note_lengths(func, read, produced)
        if known is None:
            params = (value.param for value in read)
            known = self.calls[key] = Call(
                key, label, op_type, tuple(inputs), attrs, frame.path, frame.module,
                next(filter(None, params), None), func, template[0], template[1],
            )  # fmt: skip
        else:
            _note_again(known, op_type, inputs, attrs)
        known.outputs += [self._new("activation", tensor, label) for tensor in produced[len(known.outputs) :]]
        for tensor, value in zip(produced, known.outputs, strict=False):
            self._bind(tensor, value)
        return output

    def _keeps(self, read: Sequence[_Tensor]) -> bool:
        """Whether calls on parameters alone become operators."""
        return self._whole and any(v.kind == "param" for v in read)

    def _note_constants(
        self, key: Key, label: str, inputs: Sequence[int | None], read: Sequence[_Tensor], produced: Sequence[torch.Tensor],
        follows: bool,
    ) -> None:  # fmt: skip
        """Record the results of a call on parameters and constants only, which are the same in every run.

        Args:
            follows: whether it has a size of the input.
        """
        self.static.add(key)
        sources = tuple(dict.fromkeys(name for v in read for name in ((v.param,) if v.param else v.sources)))
        anew = not sources or follows or any(v.made_anew for v in read)
        for tensor in produced:
            if len(inputs) == 1 and self._known(tensor) == inputs[0]:
                continue
            part = (key, sources, _part(tensor))
            if anew or part not in self._parts:
                self._parts[part] = self._new("constant", tensor, label, keep=tensor)
                self.values[-1].sources, self.values[-1].made_anew = sources, anew
            self._bind(tensor, self._parts[part])  # another run of the place that reads the same numbers

    def _note_sizes(
        self,
        op_type: str,
        inputs: Sequence[int | None],
        produced: Sequence[torch.Tensor],
        args: Args,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Keep the sizes that a constant was created with; constants computed from it inherit them."""
        given = (
            (args, tuple(kwargs.values())) if not inputs else self.sizes.get(inputs[0] if inputs[0] is not None else -1)
        )
        for tensor in produced if given else ():
            value = self._known(tensor)
            if value is not None and given:
                self.sizes[value] = given
                if op_type in _FILLS if not inputs else op_type in _FILLS_ALIKE and inputs[0] in self.filled:
                    self.filled.add(value)

    def _follows_input(self, op_type: str, read: Sequence[_Tensor], produced: Sequence[torch.Tensor]) -> bool:
        """Whether a call slices or expands stored data to the length of an input axis, or to one of relative distances.

        Sizes are numbers in the code, of which nobody can tell where they come from; features are left out. So is how often
        something is repeated: as often as the batch has samples, also where that is once.
        """
        if op_type not in _RESIZING or len(read) != 1:
            return False
        if op_type == "Tile" and produced[0].dim() >= len(read[0].shape):
            old = (1,) * (produced[0].dim() - len(read[0].shape)) + tuple(read[0].shape)
            times = {after // before for before, after in zip(old, produced[0].shape, strict=True) if before}
            if times == {1} or not self._lengths.isdisjoint(times - {1}):
                return True
        changed = Counter(produced[0].shape) - Counter(read[0].shape)
        return not self._lengths.isdisjoint(changed)

    def _note_lengths(self, func: Func, read: Sequence[_Tensor], produced: Sequence[torch.Tensor]) -> None:
        """Record lengths that depend on values: predicted durations, rows that a condition selects, buffers filled in parts."""
        fills = func is SET_ITEM
        if not fills and all(v.kind in ("param", "constant") or v.dtype.startswith(("float", "bfloat")) for v in read):
            return
        known = {n for v in read for n in v.shape}
        for tensor in produced:
            if fills or not known.issuperset(tensor.shape):
                self._lengths.update(_lengths_of(tensor))

    def _is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or was computed from parameters alone."""
        known = self._known(tensor)
        if known is None:
            return self._interceptor_of().param_name(tensor) is not None
        return self.values[known].kind in ("param", "constant")

    def _slot(self, tensor: torch.Tensor) -> Slot:
        return Slot(self._value(tensor))

    def _new(
        self, kind: str, tensor: torch.Tensor, name: str, param: str | None = None, keep: torch.Tensor | None = None
    ) -> int:
        refuse_nested(name, tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        kept = None if keep is None else keep.detach()
        self.values.append(_Tensor(kind, tuple(tensor.shape), dtype, name, param, kept))
        return len(self.values) - 1

    def _bind(self, tensor: torch.Tensor, value: int) -> None:
        self._live[id(tensor)] = (weakref.ref(tensor), value)

    def _known(self, tensor: torch.Tensor) -> int | None:
        found = self._live.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _value(self, tensor: torch.Tensor) -> int:
        value = self._known(tensor)
        if value is not None:
            return value
        name = self._interceptor_of().param_name(tensor)
        if name is None:
            # a tensor from outside: an attribute of a module stays what it is, one inside an opaque argument does not
            attribute = self._interceptor_of().attribute_name(tensor)
            kind = "input" if attribute is None else "constant"
            frame = self._interceptor_of().here.frames[-1:]
            refuse_nested(attribute or (frame[0].path if frame else "") or "forward", tensor)
            value = self._new(kind, tensor, attribute or "hidden", keep=None if attribute is None else tensor)
            self._bind(tensor, value)
            return value
        if name not in self._params:
            self._params[name] = self._new("param", tensor, name, param=name)
        return self._params[name]

    # -- the graph

    def graph(self) -> Graph:
        """The graph recorded so far, with readable, unique names."""
        name_calls(list(self.calls.values()))
        names = self._names_of_values()
        values = {
            names[i]: Value(names[i], t.kind, t.shape, t.dtype, t.param, t.sources, t.made_anew, t.read_by_code)  # type: ignore[arg-type]
            for i, t in enumerate(self.values)
        }
        inner = {call.key: self._inner(call, names, values) for call in self.calls.values()}
        ops = [
            Op(
                call.name, call.type, tuple(None if i is None else names[i] for i in call.inputs),
                tuple(names[i] for i in call.outputs), call.attrs, call.runs,
                tuple((port, names[value]) for port, value in call.also), call.path, inner[call.key],
            )
            for call in self.calls.values()
        ]  # fmt: skip
        self.value_names = names
        return Graph(ops, values, list(self.inputs), [names[i] for i in self.outputs])

    def _names_of_values(self) -> dict[int, str]:
        """Value -> its name in the graph."""
        calls = self.calls.values()
        names = {value: f"{call.name}.output[{i}]" for call in calls for i, value in enumerate(call.outputs)}
        inputs = set(self.inputs)
        for i, tensor in enumerate(self.values):
            name = tensor.param or tensor.name
            if tensor.kind == "constant" or (tensor.kind == "input" and name not in inputs):
                name = f"{name}#{i}"
            elif tensor.kind == "param" and name in inputs:
                name = f"{name}#param"
            names.setdefault(i, name)
        return names

    def _inner(self, call: Call, names: Mapping[int, str], values: dict[str, Value]) -> dict[str, str]:
        """Operators inside a recurrent layer; their values are added to ``values``."""
        if call.type not in CELLS:
            return {}
        hidden, last = names[call.outputs[0]], self.values[call.outputs[1]]
        shape = (last.shape[0], call.attrs["hidden_size"])
        inner, made = inner_values(call.name, call.type, call.attrs, hidden, shape, last.dtype)
        values.update((value.name, value) for value in made)
        return inner

    @property
    def decomposed(self) -> bool:
        """Whether calls were replaced by decompositions, which are equal up to rounding."""
        return self._interceptor_of().decomposed

    @property
    def hidden(self) -> bool:
        """Whether a float tensor has an unknown origin: no recorded call computed it, and it is not an input."""
        given = set(self.inputs.values())
        return any(
            v.kind == "input" and i not in given and v.dtype in ("float32", "float16", "bfloat16", "float64")
            for i, v in enumerate(self.values)
        )

    def unread(self, model: nn.Module) -> list[str]:
        """Parameters that no recorded call read."""
        return [n for n, t in named_state(model) if isinstance(t, nn.Parameter) and n not in self._params]

    def output_values(self) -> dict[str, str]:
        """Graph output (``output``, ``output.logits``) -> value, for the last recorded run; valid after :meth:`graph`."""
        names = output_names(list(self.returned), self.inputs)
        return {names[path]: self.value_names[value] for path, value in self.returned.items()}

    def constants(self) -> dict[str, torch.Tensor]:
        """The constants that calls read, by value name; valid after :meth:`graph`."""
        return {self.value_names[i]: t.constant for i, t in enumerate(self.values) if t.constant is not None}


def refuse_nested(name: str, tensor: torch.Tensor) -> None:
    """Refuse nested tensors, whose rows have no common shape."""
    if tensor.is_nested:
        raise ModelError(
            name,
            "it is a nested tensor, whose rows of different lengths have no common shape that could be quantized",
            "pad the rows, torch.nested.to_padded_tensor(x, 0.0), and give the model a mask of what is padding",
        )


def refuse_transforms() -> None:
    """Refuse torch.func transforms: quantizers read values and cache results for weights."""
    if torch.compiler.is_compiling():  # the compiler's stand-in for the stack of transforms is never None
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ModelError(
            "QuantizationSimModel",
            "sim.model was called inside a torch.func transform (vmap, grad, jvp, ...), which quantizers cannot be part of",
            "call sim.model on the whole batch instead of under vmap, and use loss.backward() instead of torch.func.grad",
        )
    if torch._C._get_tracing_state() is not None:
        raise ModelError(
            "QuantizationSimModel",
            "sim.model was called by torch.jit.trace, which would write quantizers down as constants of one run",
            "call sim.export(folder, name) for an ONNX model with its quantizers, or trace the float model",
        )


def _is_batched(tensor: torch.Tensor | None) -> bool:
    """Whether a float tensor is batched by a torch.func transform; masks are often made that way, and are allowed."""
    if tensor is None or not tensor.is_floating_point():
        return False
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _is_constant(op_type: str, read: Sequence[_Tensor]) -> bool:
    """Whether a call reads only parameters and constants."""
    return all(v.kind in ("param", "constant") for v in read) and not _first_step(op_type, read)


def _first_step(op_type: str, read: Sequence[_Tensor]) -> bool:
    """Whether a layer is applied to a tensor created in every run: the zero state of a loop over time, positions."""
    return op_row(op_type).kind == "compute" and any(
        v.kind == "constant" and (v.made_anew or not v.sources) for v in read
    )


#: functions, by name, that give a tensor to Python code as a number or a truth
READS = frozenset(
    ("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "item", "tolist", "is_nonzero", "equal",
     "allclose")
)  # fmt: skip
#: calls that make a tensor of one number
_FILLS = frozenset(("zeros", "ones", "full"))
_FILLS_ALIKE = frozenset(("zeros_like", "ones_like", "full_like"))
#: movements that change the length of an axis
_RESIZING = frozenset(("Slice", "Expand", "Tile", "Resize", "ResizeNearest", "Pad", "PadConstant"))


def _lengths_of(tensor: torch.Tensor) -> set[int]:
    """The lengths of input axes other than features, and the lengths of relative position tables for each."""
    features = {2: 1, 3: 2, 4: 1, 5: 1}.get(tensor.dim()) if tensor.is_floating_point() else None
    axes = {int(n) for i, n in enumerate(tensor.shape) if i != features and n > 1}
    return axes | {m for n in axes for m in (n - 1, n + 1, 2 * n - 1, 2 * n, 2 * n + 1)}


def named_inputs(
    signature: inspect.Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """Every tensor among the arguments of a forward, named after its parameter: ``x``, ``batch.image``, ``args.0``."""
    bound: dict[str, Any]
    try:
        bound = dict(signature.bind(*args, **kwargs).arguments) if signature else {"args": tuple(args), **kwargs}
    except TypeError:
        bound = {"args": tuple(args), **kwargs}  # the model's own call will say what is wrong
    found = []
    for name, value in bound.items():
        found.extend(flatten_tensors(value, name, caches=True))
    return found


def output_name(path: str) -> str:
    """Graph output for a place in the model's result: ``output``, ``output.0``, ``output.logits``."""
    return path if path == "output" else f"output.{path}"


def output_names(paths: Sequence[str], inputs: Collection[str]) -> dict[str, str]:
    """Path in the result -> graph output: :func:`output_name`, with a number appended where an input of the model has that
    name, which stays the model's.

    >>> output_names(["output"], ["output"])
    {'output': 'output_1'}
    """
    names = {path: output_name(path) for path in paths}
    taken = {*names.values(), *inputs}
    for path, name in names.items():
        if name in inputs:
            names[path] = next(n for i in count(1) if (n := f"{name}_{i}") not in taken)
            taken.add(names[path])
    return names


def name_calls(calls: Sequence[Call]) -> None:
    """Name every call after its module's path, or the module's path and the function.

    ``layer1.0.conv1`` for the convolution of that module, ``layer1.0.add`` for an addition in the forward of ``layer1.0``,
    ``attn.in_proj`` for a function that reads the parameter ``attn.in_proj_weight``, ``attn.q_proj``, ``attn.k_proj`` and
    ``attn.v_proj`` for those that read parts of it; repeats get ``_1``, ``_2``, ...
    """
    projections = _projections(calls)
    of_leaves = [call for call in calls if call.module is not None and _is_stock_leaf(call.module)]
    main = {_frame_of(call): call for call in reversed(of_leaves)}
    # the last one that is more than a movement: a convolution may pad first
    main |= {_frame_of(call): call for call in of_leaves if op_row(call.type).kind != "movement"}
    taken: dict[str, int] = {}
    for call in calls:
        base = call.name = projections.get(id(call)) or _base_name(call, main.get(_frame_of(call)) is call)
        n = taken.get(base, 0)
        taken[base] = n + 1
        while n and call.name in taken:
            call.name, n = f"{base}_{n}", n + 1
        taken.setdefault(call.name, 1)


def _base_name(call: Call, is_main: bool) -> str:
    """Base of a call's name; ``is_main``: it is the main call of its module."""
    if is_main and call.path:
        return call.path
    if call.param and call.param.endswith(("_weight", ".weight")) and len(call.param) > 7:
        return call.param[:-7]
    return f"{call.path}.{call.label}" if call.path else call.label


def _projections(calls: Sequence[Call]) -> dict[int, str]:
    """Names of the projections of queries, keys and values by parts of one weight, by id of the call."""
    found: dict[Key, list[Call]] = {}
    for call in calls:
        part = call.path.rpartition(".")[2]
        # no module calls the parts of an attention that is taken apart
        if call.label == "linear" and part == "attention" and call.module is None and call.param is None:
            found.setdefault(_frame_of(call), []).append(call)
    roles = ("q_proj", "k_proj", "v_proj")
    return {
        id(call): ".".join(filter(None, (call.path.rpartition(".")[0], role)))
        for several in found.values()
        if len(several) == len(roles)
        for call, role in zip(several, roles, strict=True)
    }


def _frame_of(call: Call) -> Key:
    return call.key[0] if isinstance(call.key, tuple) else call.key


def _is_stock_leaf(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules") and is_leaf(module)


def record(
    model: nn.Module, examples: Sequence[Any], interceptor: Interceptor | None = None, whole: bool = False
) -> Recorder:
    """Run ``model`` on each example (see :func:`~bitwright.torch.calls.inputs.as_call`) in eval mode and record every call.

    With an ``interceptor`` that is attached already, its hooks serve, and the arguments of the calls are not kept.
    ``whole`` makes operators of what is computed of parameters alone, too.

    Raises:
        ModelError: the model fails on an example; its own error is the cause, and the message names the module it was in.
    """
    running = interceptor or Interceptor(model)
    if interceptor is None:
        running.attach()
    try:
        with running.occupancy.exclusive("recording"):
            recorder = find_places(
                running, lambda: _run(model, examples, running, interceptor is None, whole), len(examples)
            )
    finally:
        if interceptor is None:
            running.detach()
    if not recorder.calls:
        raise ModelError(
            type(model).__name__,
            "its forward made no torch call on the example input, so there is nothing to quantize",
            "pass an example input on which the model computes something; a forward with `yield` computes only when it is "
            "iterated, so wrap it in a module that returns list(generator)",
        )
    return recorder


def find_places(running: Interceptor, run: Callable[[], AnyRecorder], forwards: int) -> AnyRecorder:
    """Record ``run``, and again while more places of loops are found.

    Args:
        running: gets its ``turns`` and ``loops``.
        run: runs the same ``forwards`` forwards each time, recorded by a new recorder.
    """
    running.loops, running.seen, running.recording = frozenset(), {}, True
    running.turns, running.repeats, running.lines = frozenset(), {}, {}
    running.trace = Trace()
    try:
        recorder = run()
        trace, running.trace = running.trace, None
        running.repeats = find_repeats(trace, running.lines)
        running.turns = find_turns(recorder.calls.values(), running.lines, forwards)
        if running.turns or running.repeats:  # layers that share a weight are places of their own
            running.seen = {}
            recorder = run()
        running.loops, running.seen = find_loops(recorder.calls.values(), running.seen), None
        if running.loops:  # the places of a loop over time are one place each
            recorder = run()
    finally:
        running.seen, running.recording, running.lines, running.trace = None, False, {}, None
    return recorder


def _run(
    model: nn.Module, examples: Sequence[Any], running: Interceptor, keep_arguments: bool, whole: bool = False
) -> Recorder:
    recorder = Recorder(lambda: running, forward_signature(model), keep_arguments, whole)
    recorder.loops, recorder.turns, running.fused = running.loops, running.turns, {}
    recorder.repeats = running.repeats
    with running.handled_by(recorder), torch.no_grad(), evaluation(model):
        for example in examples:
            args, kwargs = as_call(example)
            try:
                model(*args, **kwargs)
            except Exception as error:
                raise explained(model, running.failed_in, args, kwargs, error) from error
    return recorder


def explained(model: nn.Module, where: str | None, args: Args, kwargs: Kwargs, error: Exception) -> ModelError:
    """The error of a model on its input, with the module where it happened and the input's shapes."""
    if isinstance(error, ModelError):
        return error
    if any(frame.filename.endswith("flex_attention.py") for frame in traceback.extract_tb(error.__traceback__)):
        return ModelError(
            f"{type(model).__name__}{f', in {where}' if where else ''}",
            "it calls flex_attention, which torch compiles as a whole, so that the calls inside cannot be seen",
            "use F.scaled_dot_product_attention with a mask in its place while the model is quantized "
            "(in transformers: model.set_attn_implementation('sdpa'))",
        )
    if isinstance(error, NotImplementedError) and type(model).forward is nn.Module.forward:
        return ModelError(
            type(model).__name__,
            "it has no forward(); it is used through other methods",
            "wrap it in a module whose forward calls the method you deploy, for example "
            "class Entry(nn.Module): ... def forward(self, x): return self.model.encode(x)",
        )
    if holds_arrays(args, kwargs):
        return ModelError("example input", *ARRAYS)
    shapes = ", ".join(
        f"{n}: {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
        for n, t in named_inputs(forward_signature(model), args, kwargs)
    )
    return ModelError(
        f"{type(model).__name__}{f', in {where}' if where else ''}",
        f"the model fails on the example input ({shapes or 'no tensors'}): {type(error).__name__}: {error}",
        f"{_pairs(model, args, error)}pass an example (dummy_input, or the first batch of the data) as the model's forward takes "
        "it: a tensor, a tuple of positional arguments, or a dict of keyword arguments, of a shape, dtype and device it accepts; "
        "the model's own error is the __cause__ of this one",
    )


def _pairs(model: nn.Module, args: Args, error: Exception) -> str:
    """A remedy for batches with more values than the forward has parameters, such as (input, label) of a loader."""
    signature = forward_signature(model)
    if signature is None or len(args) < 2 or not isinstance(error, TypeError):
        return ""
    try:
        signature.bind(*args)
    except TypeError:
        return "of batches (input, label) pass the inputs alone, as [x for x, *_ in loader]; else "
    return ""


def _note_again(call: Call, op_type: str, inputs: Sequence[int | None], attrs: Mapping[str, Any]) -> None:
    """Record another run of a call, whose operands and attributes may differ from the first.

    A factor that was 1 in some runs is a factor.
    """
    call.runs += 1
    call.type = op_type if call.type == "Identity" else call.type
    if attrs != call.attrs and not call.attrs.get("varies"):
        call.attrs = {**call.attrs, "varies": True}
    for port, value in enumerate(inputs):
        if value is not None and (port >= len(call.inputs) or call.inputs[port] != value):
            call.also[port, value] = None


logger = logging.getLogger("bitwright")

#: inputs of a forward that ``generate`` makes itself
_MADE = (
    "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "labels", "position_ids", "cache_position",
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "logits_to_keep",
)  # fmt: skip
_TOKENS = 2


def generates(model: nn.Module) -> bool:
    """Whether ``model`` is one of transformers that generates tokens with a cache."""
    can: Any = getattr(model, "can_generate", None)
    return callable(getattr(model, "generate", None)) and callable(can) and bool(can())


def generated_calls(model: nn.Module, example: Any) -> list[Continuation]:
    """The forward calls while ``model`` generates two tokens from ``example``; none, with a log entry, where it cannot.

    Args:
        model: see :func:`generates`; whatever runs at its calls does so here, too.
        example: input of its forward. One with a cache is a call of that kind itself.
    """
    if caches_in(example):
        return []
    found: list[Continuation] = []

    def note(_model: nn.Module, args: Args, kwargs: Mapping[str, Any]) -> None:
        found.append(map_tensors(Continuation(args, dict(kwargs)), torch.clone))

    args, kwargs = as_call(example)
    signature = forward_signature(model)
    if signature is not None and args:
        kwargs = {**signature.bind_partial(*args).arguments, **kwargs}
    named = {name: value for name, value in kwargs.items() if name not in _MADE and value is not None}
    generate: Any = model.generate
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad(), evaluation(model), same_draws():
            generate(**named, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, do_sample=False, num_beams=1)
    except Exception as error:
        logger.info(
            "generate fails on the example, whose forward alone is recorded: %s: %s", type(error).__name__, error
        )
        return []
    finally:
        hook.remove()
    return found


class UnseenCalls(Handler):
    """Computes in float; ``found``: whether a call with an integer kernel was at a place not in ``known``."""

    def __init__(self, known: Container[Key]) -> None:
        self._known, self.found = known, False

    def begin(self, args: Args, kwargs: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    def end(self, output: Any) -> None:
        """Nothing is kept."""

    def call(self, frame: Frame, key: Key, row: Function, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """The call itself."""
        if not self.found and key not in self._known:
            self.found = op_row(row.op_type(row.bind(args, kwargs))).integer
        return func(*args, **kwargs)

    def other(self, frame: Frame, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """The call itself."""
        return func(*args, **kwargs)
