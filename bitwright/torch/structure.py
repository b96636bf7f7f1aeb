"""Structured pruning of torch modules: calls that move data, attributes that hold widths, cuts.

While the module is recorded, the integers among the attributes of its modules and of their configurations are replaced by
:class:`Held`, integers that know where they are held. A call that is given one, ``x.view(b, t, self.num_heads, -1)``, shows
which attribute has to change with the width; a width that stands in the code as a number shows itself as a call whose
result has another shape than was predicted, and is refused with the name of the call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn

from bitwright.core.files import read_document
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.simulation.float_model import Array, Undo
from bitwright.errors import ConfigError, ModelError, checks_arguments, with_article
from bitwright.export.files.atomic import atomic_files
from bitwright.methods.front_end import Kept, Problem, Structured, kept_axes
from bitwright.torch.calls.functions import function_of
from bitwright.torch.calls.inputs import (
    as_call,
    evaluation,
    map_arguments,
    map_tensors,
    model_device,
    named_state,
    outputs_of,
    tensors_in,
    to_device,
    walk_modules,
)
from bitwright.torch.depth import drop_again, replaced_again
from bitwright.torch.experts import experts_again
from bitwright.torch.factors import rebuild_chain
from bitwright.torch.interception.record import Call, Slot, named_inputs, record
from bitwright.torch.pretrained import (
    configurations,
    fit_configuration,
    is_pretrained,
    refusal_of,
    refuse_to_save,
    undescribed,
)
from bitwright.torch.view import TorchView

_MOST_PLAN = 64 << 20  # bytes
_INTERNAL = frozenset(("training", "_parameters", "_buffers", "_modules", "_version", "_flat_weights", "_all_weights"))
#: calls whose arguments, behind the first one, are the sizes of the result in order
_SIZES = frozenset(("view", "reshape", "expand", "broadcast_to", "new_zeros", "new_ones", "new_full"))


class Held(int):
    """An integer that records the attribute which holds it.

    Attributes:
        place: path of the module (``.config`` appended for its configuration), name of the attribute, position in a tuple.
    """

    place: tuple[str, str, int | None]

    def __new__(cls, value: int, place: tuple[str, str, int | None]) -> Held:
        """Create ``value`` with its holder."""
        made = super().__new__(cls, value)
        made.place = place
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _holders(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(path, attributes)`` of every module and of the configurations that modules hold, each once."""
    seen: set[int] = set()
    for path, module in walk_modules(model):
        yield path, module.__dict__
        config = module.__dict__.get("config")
        held = getattr(config, "__dict__", None)
        if isinstance(held, dict) and id(config) not in seen:
            seen.add(id(config))
            yield (f"{path}.config" if path else "config"), held


def _held(path: str, name: str, value: Any) -> Any:
    """An integer, or a tuple of integers, with its holder; other values unchanged."""
    if type(value) is int:
        return Held(value, (path, name, None))
    if type(value) is tuple and value and all(type(v) is int for v in value):
        return tuple(Held(v, (path, name, i)) for i, v in enumerate(value))
    return value


@contextmanager
def _integers_held(model: nn.Module) -> Iterator[None]:
    """Replace integer attributes by ones that know their holder, inside the block."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for path, attributes in _holders(model):
        for name, value in list(attributes.items()):
            new = value if name in _INTERNAL else _held(path, name, value)
            if new is not value:
                changed.append((attributes, name, value))
                attributes[name] = new
    try:
        yield
    finally:
        for attributes, name, value in changed:
            attributes[name] = value


@dataclass(frozen=True)
class _Use:
    """A held integer among the arguments of a call; ``at``: its position among the numbers after the first argument."""

    number: Held
    at: int
    keyword: str | None


@dataclass(frozen=True)
class _Change:
    """Shapes of a call's first operand and first result, before and after a cut."""

    read: tuple[int, ...]
    made: tuple[int, ...]
    read_now: tuple[int, ...]
    made_now: tuple[int, ...]


class TorchStructure(Structured):
    """A module opened for cuts; it is changed in place.

    Args:
        model: the caller's copy.
        examples: inputs to record it on.
    """

    def __init__(self, model: nn.Module, examples: Sequence[Any]) -> None:
        self.model = model
        self._examples = [to_device(example, model_device(model)) for example in examples]
        self._graph: Graph | None = None
        self._sizes: set[tuple[int, int]] = set()  # lengths of axes before and after the cuts
        self._narrowings: list[dict[str, tuple[Any, ...]]] = []  # of each cut: input -> what stays of its axes
        self.steps: list[dict[str, Any]] = []

    def view(self) -> TorchView:
        """The view through which methods read and change the module."""
        return TorchView(self.model, self._examples, self.narrowed)

    def narrowed(self, batch: Any) -> Any:
        """As the base class says."""
        for cut in self._narrowings:
            args, kwargs = as_call(batch)
            axes = {id(t): cut[name] for name, t in named_inputs(self._signature, args, kwargs) if name in cut}
            batch = map_tensors(batch, partial(_narrower, axes))
        return batch

    def finished(self) -> nn.Module:
        """The module; its configuration has the new widths where it can express them, else it refuses to be saved with it."""
        fit = fit_configuration(self.model, self._sizes, self.narrowed(self._examples[0]))
        if fit.changed:
            holders = configurations(self.model)
            for holder, numbers in fit.attributes.items():
                holders[holder].update(numbers)
            self.steps.append({"kind": "cut", "parameters": {}, "attributes": fit.attributes})
        self.not_in_config = fit.reason
        refuse_to_save(self.model, fit.reason, self.plan())
        return self.model

    def give_back(self) -> None:
        """Does nothing: the module was changed in place."""

    def undescribed(self) -> str:
        """Why the configuration of a model of transformers or diffusers cannot say the present widths."""
        return undescribed(self.model, self._sizes)

    def one_configuration(self) -> bool:
        """Whether the model is saved as a configuration and weights, as in transformers."""
        return is_pretrained(self.model)

    def metric_target(self) -> nn.Module:
        """The module."""
        return self.model

    def gradients(self, loss: Callable[[Any], Any], names: Sequence[str]) -> dict[str, Array]:
        """Gradients of one backward pass; existing gradients of the module are neither included nor changed.

        Raises:
            ConfigError: the loss is no number that depends on the parameters.
        """
        self.graph()
        wanted = {name: self._tensors[name] for name in names}
        frozen = [t for t in wanted.values() if not t.requires_grad and t.is_floating_point()]
        for tensor in frozen:
            tensor.requires_grad_(True)
        try:
            with evaluation(self.model), torch.enable_grad():
                value = loss(self.model)
                if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
                    raise ConfigError(
                        "loss", f"it returned {value!r:.80}, which cannot be differentiated",
                        "return a tensor of one number computed by the model that it is given",
                    )  # fmt: skip
                found = torch.autograd.grad(value.reshape(()), list(wanted.values()), allow_unused=True)
        finally:
            for tensor in frozen:
                tensor.requires_grad_(False)
        return {n: np.asarray(g.float().cpu().numpy()) for n, g in zip(wanted, found, strict=True) if g is not None}

    def directional_gradients(self, batch: Any, names: Sequence[str], seed: int) -> dict[str, Array]:
        """By one backward pass."""
        rng = torch.Generator().manual_seed(seed)
        given = to_device(self.narrowed(batch), model_device(self.model))

        def summed(model: nn.Module) -> torch.Tensor:
            args, kwargs = as_call(given)
            made = [t for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point() and t.requires_grad]
            if not made:
                raise ConfigError(
                    "importance", "hessian needs outputs of floating point that depend on the weights",
                    "use importance='activation'",
                )  # fmt: skip
            signs = [(torch.randint(2, t.shape, generator=rng) * 2 - 1).to(t.device, t.dtype) for t in made]
            return torch.stack([(t * sign).sum().float() for t, sign in zip(made, signs, strict=True)]).sum()

        return self.gradients(summed, names)

    # -- reading

    def graph(self) -> Graph:
        """The recorded graph, including operators on parameters alone."""
        if self._graph is None:
            with _integers_held(self.model):
                recorder = record(self.model, [self.narrowed(e) for e in self._examples], whole=True)
            self._graph = recorder.graph()
            self._signature = recorder.signature
            self._made_with = {recorder.value_names[value]: given for value, given in recorder.sizes.items()}
            self._filled = frozenset(recorder.value_names[value] for value in recorder.filled)
            self._calls: dict[str, Call] = {call.name: call for call in recorder.calls.values()}
            self._names = recorder.value_names
            self._constants = recorder.constants()
            self._tensors: dict[str, torch.Tensor] = {}
            for name, tensor in named_state(self.model):
                self._tensors.setdefault(name, tensor)
        return self._graph

    def refresh(self) -> None:
        """Forget the recording."""
        self._graph = None

    def param(self, name: str) -> Array:
        """A copy of a parameter or buffer as numpy, float32 or wider."""
        self.graph()
        tensor = self._tensors[name].detach().cpu()
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            tensor = tensor.float()
        return np.array(tensor.numpy())

    def set_param(self, name: str, value: Array) -> None:
        """Write a parameter or buffer in place."""
        self.graph()
        with torch.no_grad():
            self._tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))

    def outputs(self, batch: Any) -> list[Array]:
        """Outputs of the model for a batch."""
        with torch.no_grad(), evaluation(self.model):
            return outputs_of(self.model, to_device(self.narrowed(batch), model_device(self.model)))

    def moved(self, op: Op, elements: Sequence[Array | None]) -> list[Array] | None:
        """Run the call on element indices in float64; other operands must be stored or only give a shape."""
        call = self._calls[op.name]
        graph = self.graph()
        numbers = torch.from_numpy(np.asarray(elements[0]) + 1.0)  # 0 is what the call fills in
        possible = True

        def fill(slot: Slot) -> torch.Tensor:
            nonlocal possible
            name = self._names[slot.value]
            value = graph.values[name]
            if name == op.inputs[0]:
                return numbers
            if value.param is not None:
                return self._tensors[value.param].detach().cpu()
            if name in self._constants:
                return self._constants[name].detach().cpu()
            if getattr(call.func, "__name__", "").endswith("_as"):
                return torch.zeros(value.shape, dtype=torch.float64)
            possible = False
            return numbers

        args, kwargs = map_arguments(call.args, call.kwargs, fill, Slot)
        if not possible:
            return None
        with torch.no_grad():
            found = [t.double().numpy() for t in tensors_in(call.func(*args, **kwargs))]
        count = numbers.numel()
        return [np.where((f >= 1) & (f <= count), f - 1, -1).astype(np.int64) for f in found]

    def kept_axes(self, op: Op) -> tuple[int | None, ...]:
        """The kept axes, from the argument ``dim``, else from the shapes."""
        graph = self.graph()
        shape, result = graph.values[str(op.inputs[0])].shape, graph.values[op.outputs[0]].shape
        dim = self.argument(op, "dim")
        if dim is None and len(result) == len(shape):
            gone = {i for i, (n, m) in enumerate(zip(shape, result, strict=True)) if n != m}
        elif dim is None:
            gone = set(range(len(shape)))
        else:
            gone = {int(d) % len(shape) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}
        return kept_axes(len(shape), len(result), gone)

    def argument(self, op: Op, name: str) -> Any:
        """An argument of the call by its name."""
        call = self._calls[op.name]
        row = function_of(call.func)
        if name == "dim" and op.type in ("Concat", "Stack") and len(call.args) > 1:
            return call.args[1]  # behind the operands
        return None if row is None else row.bind(call.args, call.kwargs).get(name, call.kwargs.get(name))

    def equal_pieces(self, op: Op) -> list[list[int]]:
        """All of a ``chunk`` or a ``split`` into equal pieces; else those whose length is the same attribute."""
        call = self._calls[op.name]
        name = getattr(call.func, "__name__", "")
        size = call.args[1] if len(call.args) > 1 else next((v for k, v in call.kwargs.items() if k != "dim"), None)
        if name in ("chunk", "split", "tensor_split") and isinstance(size, int):
            return [list(range(len(op.outputs)))]
        held: dict[Any, list[int]] = {}
        for i, length in enumerate(size if isinstance(size, (list, tuple)) else ()):
            if isinstance(length, Held):
                held.setdefault(length.place, []).append(i)
        return [pieces for pieces in held.values() if len(pieces) > 1]

    def filled(self) -> frozenset[str]:
        """Constants that a call fills with one number, whose sizes it is given."""
        self.graph()
        return self._filled

    def tied(self) -> list[list[tuple[str, int, int]]]:
        """The layers of a recurrent module, which have one hidden size for all layers and directions."""
        names: dict[int, str] = {}
        for name, tensor in named_state(self.model):
            names.setdefault(id(tensor), name)
        recurrent = [module for _, module in walk_modules(self.model) if isinstance(module, nn.RNNBase)]
        found = []
        for module, kind in ((module, kind) for module in recurrent for kind in ("weight_hh", "weight_hr")):
            own = [p for n, p in module._parameters.items() if n.startswith(kind) and p is not None]
            found.append([(names[id(p)], p.dim() - 1, 1) for p in own])
        return [places for places in found if len(places) > 1]

    # -- changing

    def cut(self, kept: Kept) -> Undo:
        """Slice parameters and buffers, and set the attributes that hold the widths.

        Raises:
            ConfigError: one attribute would have to hold two widths.
        """
        self.graph()
        undos: list[Any] = []
        new = self._widths(kept)
        parameters, touched = self._cut_tensors(kept, undos)
        paths = {id(module): path for path, module in walk_modules(self.model)}
        for module in touched:
            wrong = {n: w for n, w in _conventional(module).items() if module.__dict__.get(n) != w}
            new = {**{(paths[id(module)], name): width for name, width in wrong.items()}, **new}
        holders = dict(_holders(self.model))
        attributes = _set_attributes(holders, new, undos)
        for module in filter(_is_fused, touched):
            module.flatten_parameters()
        step = {"kind": "cut", "parameters": parameters, "attributes": attributes}
        self.steps.append(step)
        narrowing = {name: kept.axes(name) for name in self.graph().inputs if kept.axes(name)}
        narrowings, self._narrowings = self._narrowings, [*self._narrowings, *([narrowing] if narrowing else [])]
        sizes = self._sizes
        self._sizes = sizes | _changed_lengths(self.graph(), kept)

        def undo() -> None:
            self.steps.remove(step)
            self._narrowings, self._sizes = narrowings, sizes
            while undos:
                function, *args = undos.pop()
                function(*args)

        return undo

    def _cut_tensors(self, kept: Kept, undos: list[Any]) -> tuple[dict[str, dict[str, list[int]]], list[nn.Module]]:
        """Slice parameters and buffers; returns the kept positions of each, and the modules that hold them."""
        owners = {
            id(tensor): module
            for _, module in walk_modules(self.model)
            for tensor in (*module._parameters.values(), *module._buffers.values())
        }
        parameters: dict[str, dict[str, list[int]]] = {}
        touched: dict[int, nn.Module] = {}
        for value in self.graph().values.values():
            axes = kept.axes(value.name) if value.param is not None else ()
            if not axes:
                continue
            tensor = self._tensors[str(value.param)]
            undos.append((setattr, tensor, "data", tensor.data))
            left = {axis: positions for axis, positions in enumerate(axes) if positions is not None}
            tensor.data = _taken(tensor.data, {axis: positions.tolist() for axis, positions in left.items()})
            tensor.grad = None
            touched[id(owners[id(tensor)])] = owners[id(tensor)]
            parameters[str(value.param)] = {str(axis): positions.tolist() for axis, positions in left.items()}
        return parameters, list(touched.values())

    def _widths(self, kept: Kept) -> dict[tuple[str, str], Any]:
        """``(holder, attribute) -> new value`` for the held integers among the arguments of calls."""
        found: dict[tuple[str, str, int | None], tuple[int, str]] = {}
        uses = [
            (op.name, use.number, self._width(op, use, kept))
            for op in self.graph().ops
            for use in _uses(self._calls[op.name])
        ]
        for user, number, width in (*uses, *self._made_widths(kept)):
            known = (width, user) if width is None else found.setdefault(number.place, (width, user))
            if known[0] != width:
                path, name, _ = number.place
                raise ConfigError(
                    f"{path}.{name}".strip("."),
                    f"{known[1]} would need {known[0]} there and {user} {width}, and both read this one attribute",
                    "remove as many units from both: alike=True",
                )
        holders = dict(_holders(self.model))
        new: dict[tuple[str, str], Any] = {}
        for (path, name, at), (width, _) in found.items():
            value = new.get((path, name), holders[path][name])
            renewed = width if at is None else (*value[:at], width, *value[at + 1 :])
            if renewed != value:
                new[path, name] = renewed
        return new

    def _made_widths(self, kept: Kept) -> Iterator[tuple[str, Held, int]]:
        """``(constant, held integer, new value)`` for widths that constants such as states are created with."""
        for value, given in self._made_with.items():
            shape = self.graph().values[value].shape
            for axis, positions in enumerate(kept.axes(value)):
                if positions is not None:
                    held = [n for n in _sizes_of(given, shape, axis) if isinstance(n, Held) and int(n) == shape[axis]]
                    yield from ((value, number, len(positions)) for number in held)

    def _fixed_states(self, kept: Kept) -> str:
        """Report constants that cannot become narrower because their width is a literal in the code."""
        held = {name for name, _, _ in self._made_widths(kept)}
        fixed = sorted(name for name in self._made_with.keys() - held if kept.axes(name))
        if not fixed:
            return self._fixed_pieces(kept)
        shape = self.graph().values[fixed[0]].shape
        return f"; {fixed[0]} of the shape {shape} has a width that stands in the code, in place of an attribute of a module"

    def _fixed_pieces(self, kept: Kept) -> str:
        """Report a split of cut positions into pieces of given lengths."""
        given = (
            op.name
            for op in self.graph().ops
            if op.type == "Split" and getattr(self._calls[op.name].func, "__name__", "").startswith("split")
            if any(kept.axes(value) for value in op.outputs)
        )
        name = next(given, None)
        return (
            "" if name is None else f"; {name} is given the lengths of its pieces: use chunk, or take them from a shape"
        )

    def _width(self, op: Op, use: _Use, kept: Kept) -> int | None:
        """New value of a held integer after the cut; ``None`` if the call does not use it as a width."""
        if not op.outputs or op.inputs[:1] in ((), (None,)):
            return None
        graph, call = self.graph(), self._calls[op.name]
        source, result = str(op.inputs[0]), op.outputs[0]
        change = _Change(
            graph.values[source].shape, graph.values[result].shape, kept.shape(source, graph.values[source].shape),
            kept.shape(result, graph.values[result].shape),
        )  # fmt: skip
        name = getattr(call.func, "__name__", "")
        if name in _SIZES and use.keyword is None:
            return change.made_now[use.at] if use.at < len(change.made_now) else None
        if name == "unflatten":
            return change.made_now[int(call.args[1]) % len(change.read) + use.at - 1] if use.at else None
        rule = _WIDTHS.get(op.type)
        return None if rule is None else rule(self, op, use, kept, change)

    def _groups_of_conv(self, op: Op, use: _Use, kept: Kept, change: _Change) -> int | None:
        groups, place = int(use.number), _number_of(self._calls[op.name], "groups")
        if groups == 1 or use.keyword not in (None, "groups") or (use.keyword is None and use.at != place):
            return None
        within = kept.axes(op.inputs[1])
        return groups if within and within[1] is not None else change.read_now[1] * groups // change.read[1]

    def _groups_of_norm(self, op: Op, use: _Use, kept: Kept, change: _Change) -> int | None:
        groups = int(use.number)
        return change.read_now[1] * groups // change.read[1] if groups == self.argument(op, "num_groups") else None

    def _normalized(self, op: Op, use: _Use, kept: Kept, change: _Change) -> int | None:
        shape = self.argument(op, "normalized_shape")
        if not isinstance(shape, tuple) or use.at >= len(shape):
            return None
        return change.read_now[len(change.read) - len(shape) + use.at]

    def _padding(self, op: Op, use: _Use, kept: Kept, change: _Change) -> int | None:
        axis, value = len(change.made) - 1 - use.at // 2, int(use.number)
        positions = (kept.axes(op.outputs[0]) or (None,) * len(change.made))[axis]
        if positions is None:
            return value
        front = use.at % 2 == 0
        return int((positions < value).sum() if front else (positions >= change.made[axis] - value).sum())

    def _piece(self, op: Op, use: _Use, kept: Kept, change: _Change) -> int | None:
        call, graph = self._calls[op.name], self.graph()
        several = len(call.args) > 1 and isinstance(call.args[1], (list, tuple))
        piece = op.outputs[use.at] if several else op.outputs[0]
        old = graph.values[piece].shape
        lengths = zip(old, kept.shape(piece, old), change.read, strict=False)
        return next((m for n, m, whole in lengths if n == int(use.number) != whole), None)

    def _end(self, op: Op, use: _Use, kept: Kept, change: _Change) -> int | None:
        cut = [(axis, a) for axis, a in enumerate(kept.axes(op.inputs[0])) if a is not None]
        if len(cut) != 1 or (len(change.made) == len(change.read) and change.made[cut[0][0]] == change.read[cut[0][0]]):
            return None  # another axis is sliced
        return int((cut[0][1] < int(use.number)).sum())

    def _of_that_length(self, op: Op, use: _Use, kept: Kept, change: _Change) -> int | None:
        before, after = (*change.read, *change.made), (*change.read_now, *change.made_now)
        widths = {m for n, m in zip(before, after, strict=True) if n == int(use.number)}
        return widths.pop() if len(widths) == 1 else None

    def problem(self, kept: Kept, predicted: Graph) -> Problem | None:
        """The fault after a cut: the call that fails, or whose shape differs from the predicted one."""
        try:
            graph = record(self.model, [self.narrowed(e) for e in self._examples], whole=True).graph()
        except ModelError as error:
            _, _, where = error.site.partition(", in ")
            cause = error.__cause__ or error
            said = ": ".join([type(cause).__name__, *str(cause).splitlines()[:1]])
            if isinstance(dict(walk_modules(self.model)).get(where), nn.MultiheadAttention):
                return Problem(where, _ONE_WIDTH)
            return Problem(where, f"the model fails after the cut: {said}{self._fixed_states(kept)}")
        ops = {op.name: op for op in graph.ops}
        for op in predicted.ops:
            if op.name not in ops:
                return Problem(op.name, "the model takes another path after the cut")
            for value, found in zip(op.outputs, ops[op.name].outputs, strict=False):
                want, have = kept.shape(value, predicted.values[value].shape), graph.values[found].shape
                if want != have:
                    return Problem(
                        op.name,
                        f"its result has the shape {have} after the cut and not {want}: a width stands in the code",
                    )
        return None


_ONE_WIDTH = (
    "nn.MultiheadAttention has one number for the width of its input and of all its heads: an ONNX file of the model can lose "
    "heads, and so can attention that is written with linear layers"
)
#: operator -> what a held integer among its arguments has to be after a cut
_WIDTHS: dict[str, Callable[..., int | None]] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), TorchStructure._groups_of_conv),
    "GroupNormalization": TorchStructure._groups_of_norm,
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), TorchStructure._normalized),
    "Pad": TorchStructure._padding,
    "Split": TorchStructure._piece,
    "Slice": TorchStructure._end,
    **dict.fromkeys((*TRAITS["reshape"], "Expand", "Tile"), TorchStructure._of_that_length),
}


def _uses(call: Call) -> Iterator[_Use]:
    """The held integers among the arguments of a call."""
    for at, item in enumerate(_flat(call.args[1:])):
        if isinstance(item, Held):
            yield _Use(item, at, None)
    for keyword, argument in call.kwargs.items():
        for at, item in enumerate(_flat((argument,))):
            if isinstance(item, Held):
                yield _Use(item, at, keyword)


def _sizes_of(given: Sequence[Any], shape: Sequence[int], axis: int) -> list[int]:
    """The numbers that a constant was created with: the one of an axis where they are its shape, else all of them."""
    sizes = [item for item in _flat(given) if isinstance(item, int) and not isinstance(item, bool)]
    return sizes[axis : axis + 1] if list(map(int, sizes)) == list(shape) else sizes


def _flat(arguments: Sequence[Any]) -> Iterator[Any]:
    """Yield the values of arguments, with lists and slices flattened."""
    stack = list(reversed(arguments))
    while stack:
        item = stack.pop()
        if isinstance(item, (tuple, list)):
            stack.extend(reversed(item))
        elif isinstance(item, slice):
            stack.extend((item.stop, item.start))
        else:
            yield item


def _number_of(call: Call, name: str) -> int:
    """The position of an argument among the numbers after the first argument."""
    row = function_of(call.func)
    assert row is not None
    at = 0
    for i, argument in enumerate(call.args[1:], 1):
        if i < len(row.signature) and row.signature[i] == name:
            return at
        at += len(argument) if isinstance(argument, (tuple, list)) else 1
    return -1


def _conventional(module: nn.Module) -> dict[str, Any]:
    """Module attributes that state the shapes of their parameters, with the present values."""
    if isinstance(module, nn.RNNBase):
        return _recurrent_widths(module)
    if isinstance(module, nn.RNNCellBase):
        return {"input_size": module.weight_ih.shape[1], "hidden_size": module.weight_hh.shape[1]}
    weight: torch.Tensor | None = module._parameters.get("weight")
    if weight is None:
        weight = module._buffers.get("running_mean")
    if weight is None:
        return {}
    if isinstance(module, nn.modules.conv._ConvNd):
        return _conv_widths(module, weight)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return {"normalized_shape": tuple(weight.shape)}
    for kinds, axes in _SHAPES:
        if isinstance(module, kinds):
            return {name: weight.shape[axis] for name, axis in axes.items()}
    if {"nf", "nx"} <= vars(module).keys() and weight.dim() == 2:  # transformers' Conv1D
        return {"nf": weight.shape[1], "nx": weight.shape[0]}
    return {}


#: classes -> attribute -> axis of the weight whose length it is
_SHAPES: tuple[tuple[tuple[type[nn.Module], ...], dict[str, int]], ...] = (
    ((nn.Linear,), {"out_features": 0, "in_features": 1}),
    ((nn.modules.batchnorm._NormBase,), {"num_features": 0}),
    ((nn.GroupNorm,), {"num_channels": 0}),
    ((nn.Embedding, nn.EmbeddingBag), {"embedding_dim": 1}),
    ((nn.PReLU,), {"num_parameters": 0}),
)


def _changed_lengths(graph: Graph, kept: Kept) -> set[tuple[int, int]]:
    pairs: set[tuple[int, int]] = set()
    for name, value in graph.values.items():
        left = kept.axes(name)
        pairs.update((n, len(k)) for n, k in zip(value.shape, left, strict=False) if k is not None)
    return pairs


def _is_fused(module: nn.Module) -> TypeGuard[nn.RNNBase]:
    return isinstance(module, nn.RNNBase) and next(module.parameters()).is_cuda


def _recurrent_widths(module: nn.RNNBase) -> dict[str, Any]:
    recurrent, entering = module._parameters["weight_hh_l0"], module._parameters["weight_ih_l0"]
    assert recurrent is not None and entering is not None
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    projected = {"proj_size": recurrent.shape[1]} if module.proj_size else {}
    return {"input_size": entering.shape[1], "hidden_size": recurrent.shape[0] // gates, **projected}


def _conv_widths(module: nn.modules.conv._ConvNd, weight: torch.Tensor) -> dict[str, Any]:
    """Attributes of a convolution after a cut; the number of groups changes where the channels per group stay."""
    made, read = (1, 0) if module.transposed else (0, 1)
    first, second = (module.in_channels, module.out_channels)[:: 1 if module.transposed else -1]
    groups = module.groups
    if groups > 1 and weight.shape[1] == second // groups:
        groups = weight.shape[0] // (first // groups)
    width = {0: weight.shape[0], 1: weight.shape[1] * groups}
    return {"out_channels": width[made], "in_channels": width[read]}


_STEPS: dict[str, Callable[[nn.Module, Mapping[str, Any]], None]] = {
    "chain": rebuild_chain, "drop": drop_again, "experts": experts_again, "replace": replaced_again,
}  # fmt: skip


@checks_arguments
def rebuild(model: nn.Module, plan: Mapping[str, Any]) -> nn.Module:
    """Reshape a module of the original class to the shapes of a compressed model, so that its state dict can be loaded.

    Args:
        model: of the class and with the arguments of the model that was compressed; changed in place.
        plan: ``result.plan``, or what ``plan.json`` holds.

    Returns:
        ``model``.

    Raises:
        ConfigError: the plan is of another model: a parameter or an attribute is not there, or shorter than what is kept of it.
    """
    if plan.get("format") != 1 or not isinstance(plan.get("steps"), list):
        raise ConfigError(
            "plan", "it is not a plan that compress() has written", "give result.plan or the file plan.json"
        )
    for step in plan["steps"]:
        kind = step.get("kind") if isinstance(step, Mapping) else step
        if isinstance(kind, str) and kind in _STEPS:
            _STEPS[kind](model, step)
            continue
        if kind != "cut":
            raise ConfigError("plan", f"it has a step {kind!r} that is not known", "use the version that wrote it")
        if not _is_cut(step):
            raise ConfigError(
                "plan", "a step does not say what is kept of each axis, and widths, as compress() writes them",
                "give result.plan or the file plan.json as it was written",
            )  # fmt: skip
        _cut_again(model, step)
    refuse_to_save(model, refusal_of(plan), plan)
    return model


def _is_cut(step: Mapping[str, Any]) -> bool:
    """Whether a step of a plan is a cut: kept positions of parameters, and widths in module attributes."""
    parameters, attributes = step.get("parameters"), step.get("attributes")
    if not (isinstance(parameters, Mapping) and isinstance(attributes, Mapping)):
        return False
    if not all(isinstance(rows, Mapping) for rows in (*parameters.values(), *attributes.values())):
        return False
    kept = [row for axes in parameters.values() for row in axes.items()]
    return all(
        str(axis).isdecimal() and isinstance(places, list) and places and all(type(p) is int and p >= 0 for p in places)
        for axis, places in kept
    ) and all(isinstance(w, int | float | list | tuple) for widths in attributes.values() for w in widths.values())


def _cut_again(model: nn.Module, step: Mapping[str, Any]) -> None:
    tensors, holders = dict(named_state(model)), {**configurations(model), **dict(_holders(model))}
    strange = [name for name in step["parameters"] if name not in tensors]
    if strange:
        raise ConfigError(
            strange[0], "the plan cuts it, and the model has no such parameter", "rebuild the original class"
        )
    strange = [path for path in step["attributes"] if path not in holders]
    if strange:
        raise ConfigError(
            strange[0], "the plan changes its widths, and the model has no such module", "rebuild the original class"
        )
    for name, axes in step["parameters"].items():
        _check_fits(name, tensors[name], axes)
        tensors[name].data = _taken(tensors[name].data, {int(axis): positions for axis, positions in axes.items()})
    for path, attributes in step["attributes"].items():
        holders[path].update((name, tuple(v) if isinstance(v, list) else v) for name, v in attributes.items())


def _check_fits(name: str, tensor: torch.Tensor, axes: Mapping[str, Sequence[int]]) -> None:
    for axis, positions in axes.items():
        if int(axis) >= tensor.dim() or max(positions, default=0) >= tensor.shape[int(axis)]:
            raise ConfigError(
                name,
                f"the plan keeps position {max(positions)} of axis {axis}, and its shape is {tuple(tensor.shape)}",
                "rebuild a model with the arguments of the one that was compressed",
            )


def _taken(tensor: torch.Tensor, axes: Mapping[int, Sequence[int]]) -> torch.Tensor:
    """Select the kept positions of a tensor."""
    for axis, positions in axes.items():
        tensor = tensor.index_select(axis, torch.tensor(positions, device=tensor.device))
    return tensor.contiguous()


def _set_attributes(
    holders: Mapping[str, dict[str, Any]], new: Mapping[tuple[str, str], Any], undos: list[Any]
) -> dict[str, dict[str, Any]]:
    """Give attributes new widths; returns them by holder, as a plan has them."""
    attributes: dict[str, dict[str, Any]] = {}
    for (path, name), width in new.items():
        undos.append((holders[path].__setitem__, name, holders[path][name]))
        holders[path][name] = width
        attributes.setdefault(path, {})[name] = list(width) if isinstance(width, tuple) else width
    return attributes


def _narrower(axes: Mapping[int, Sequence[Any]], tensor: torch.Tensor) -> torch.Tensor:
    """The kept positions of an input, found by its id."""
    left = {axis: kept.tolist() for axis, kept in enumerate(axes.get(id(tensor), ())) if kept is not None}
    return _taken(tensor, left) if left else tensor


def save_compressed(model: nn.Module, plan: Mapping[str, Any], folder: Path, name: str) -> list[Path]:
    """Write the state dict as safetensors, and the plan that gives a module of the original class its shapes.

    Returns:
        The files: ``<name>.safetensors``, ``<name>.plan.json``.

    Raises:
        ExportError: the folder cannot be written.
    """
    from safetensors.torch import save_file

    state, seen = {}, set[int]()
    for key, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in seen:  # a tied one is stored once
            seen.add(tensor.data_ptr() if tensor.numel() else -1)
            state[key] = tensor.detach().cpu().contiguous()
    with atomic_files(folder, name=f"{name}.plan.json", create=True) as room:
        save_file(state, room / f"{name}.safetensors")
        (room / f"{name}.plan.json").write_text(json.dumps(plan, separators=(",", ":")), encoding="utf-8")
    return [folder / f"{name}.safetensors", folder / f"{name}.plan.json"]


@checks_arguments
def load_compressed(model: nn.Module, folder: str | os.PathLike[str], name: str = "model") -> nn.Module:
    """Turn a module of the original class into the compressed model that was saved in a folder.

    Args:
        model: of the class and with the arguments of the model that was compressed; changed in place.
        folder, name: as :meth:`bitwright.compression.compress.Compressed.save` was given.

    Returns:
        ``model``.

    Raises:
        ConfigError: the plan is of another model.
        ModelError: a file is missing, or the tensors do not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    plan_file, weights = Path(folder) / f"{name}.plan.json", Path(folder) / f"{name}.safetensors"
    for file in (plan_file, weights):
        if not file.is_file():
            raise ModelError(str(file), "there is no such file", "give the folder and the name that save() was given")
    remedy = "copy the files that save() wrote once more"
    plan = read_document(plan_file, ModelError, remedy=remedy, max_bytes=_MOST_PLAN)
    if not isinstance(plan, dict):
        raise ModelError(str(plan_file), f"it holds {with_article(type(plan).__name__)}, not a plan", remedy)
    try:
        state = load_file(weights)
    except (
        SafetensorError,
        ValueError,
        TypeError,
    ) as error:  # of the library, and of torch for dtypes it does not know
        raise ModelError(str(weights), f"it is no safetensors file, or damaged: {error}", remedy) from error
    rebuild(model, plan)
    own = model.state_dict()
    wrong = [k for k, t in state.items() if k not in own or own[k].shape != t.shape]
    if wrong:
        raise ModelError(wrong[0], "the tensor in the file does not fit the module", "rebuild the original class")
    model.load_state_dict(state, strict=False)
    return model
