"""A torch module as structured pruning sees and changes it: which calls move data, which attributes hold widths.

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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.simulation.float_model import Array, Undo
from bitwright.errors import ConfigError, ModelError
from bitwright.export.files.atomic import atomic_files
from bitwright.methods.front_end import Kept, Problem, Structured
from bitwright.torch.calls.functions import function_of
from bitwright.torch.calls.inputs import (
    evaluation,
    map_arguments,
    model_device,
    named_state,
    outputs_of,
    tensors_in,
    to_device,
    walk_modules,
)
from bitwright.torch.interception.record import Call, Slot, record
from bitwright.torch.view import TorchView

_INTERNAL = frozenset(("training", "_parameters", "_buffers", "_modules", "_version", "_flat_weights", "_all_weights"))
#: call -> where in its arguments sizes begin that are those of its result, in order
_SIZES = {"view": 1, "reshape": 1, "expand": 1, "broadcast_to": 1}


class Held(int):
    """An integer that an attribute holds.

    Attributes:
        place: path of the module (``.config`` appended for its configuration), name of the attribute, position in a tuple.
    """

    place: tuple[str, str, int | None]

    def __new__(cls, value: int, place: tuple[str, str, int | None]) -> Held:
        """``value`` with the place that holds it."""
        made = super().__new__(cls, value)
        made.place = place
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _holders(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(path, attributes)`` of every module and of the configurations they hold, each once."""
    seen: set[int] = set()
    for path, module in walk_modules(model):
        yield path, module.__dict__
        config = module.__dict__.get("config")
        held = getattr(config, "__dict__", None)
        if isinstance(held, dict) and id(config) not in seen:
            seen.add(id(config))
            yield (f"{path}.config" if path else "config"), held


@contextmanager
def _integers_held(model: nn.Module) -> Iterator[None]:
    """The integers among attributes know where they are held, while the context is open."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for path, attributes in _holders(model):
        for name, value in list(attributes.items()):
            if name in _INTERNAL:
                continue
            if type(value) is int:
                new: Any = Held(value, (path, name, None))
            elif type(value) is tuple and value and all(type(v) is int for v in value):
                new = tuple(Held(v, (path, name, i)) for i, v in enumerate(value))
            else:
                continue
            changed.append((attributes, name, value))
            attributes[name] = new
    try:
        yield
    finally:
        for attributes, name, value in changed:
            attributes[name] = value


@dataclass(frozen=True)
class _Use:
    """A held integer among the arguments of a call; ``at`` is its place among the numbers after the first argument."""

    number: Held
    at: int
    keyword: str | None


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
        self.steps: list[dict[str, Any]] = []

    def view(self) -> TorchView:
        """How methods read and change the module as it stands."""
        return TorchView(self.model, self._examples)

    def finished(self) -> nn.Module:
        """The module."""
        return self.model

    def metric_target(self) -> nn.Module:
        """The module."""
        return self.model

    def gradients(self, loss: Callable[[Any], Any], names: Sequence[str]) -> dict[str, Array]:
        """Of one backward pass; the gradients that the module had are left out of it and stay.

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

    # -- reading

    def graph(self) -> Graph:
        """The recorded graph, with what is computed of parameters as operators."""
        if self._graph is None:
            with _integers_held(self.model):
                recorder = record(self.model, self._examples, whole=True)
            self._graph = recorder.graph()
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
        """What the model returns for a batch."""
        with torch.no_grad(), evaluation(self.model):
            return outputs_of(self.model, to_device(batch, model_device(self.model)))

    def moved(self, op: Op, elements: Sequence[Array | None]) -> list[Array] | None:
        """The call on the numbers of the elements, as float64; other operands must be stored or only give a shape."""
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
        """From the argument ``dim``; without one, from the shapes."""
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

    def equal_pieces(self, op: Op) -> bool:
        """Whether it is a ``chunk``, or a ``split`` into pieces of one length."""
        call = self._calls[op.name]
        name = getattr(call.func, "__name__", "")
        size = call.args[1] if len(call.args) > 1 else next((v for k, v in call.kwargs.items() if k != "dim"), None)
        return name in ("chunk", "split", "tensor_split") and isinstance(size, int)

    def tied(self) -> list[list[tuple[str, int, int]]]:
        """Recurrent modules have one hidden size for all layers and directions."""
        names: dict[int, str] = {}
        for name, tensor in named_state(self.model):
            names.setdefault(id(tensor), name)
        found = []
        for _, module in walk_modules(self.model):
            if not isinstance(module, nn.RNNBase):
                continue
            for kind in ("weight_hh", "weight_hr"):
                own = {n: p for n, p in module._parameters.items() if n.startswith(kind) and p is not None}
                found.append([(names[id(p)], p.dim() - 1, 1) for p in own.values()])
        return [places for places in found if len(places) > 1]

    # -- changing

    def cut(self, kept: Kept) -> Undo:
        """Cut parameters and buffers, and change the attributes that hold the widths.

        Raises:
            ConfigError: one attribute would have to hold two widths.
        """
        graph = self.graph()
        undos: list[Any] = []
        step: dict[str, Any] = {"kind": "cut", "parameters": {}, "attributes": {}}
        new = self._widths(kept)
        owners = {id(t): module for _, module in walk_modules(self.model)
                  for t in (*module._parameters.values(), *module._buffers.values()) if t is not None}  # fmt: skip
        touched: dict[int, nn.Module] = {}
        for value in graph.values.values():
            axes = kept.axes(value.name) if value.param is not None else ()
            if not axes:
                continue
            assert value.param is not None
            tensor = self._tensors[value.param]
            before = tensor.data
            cut = before
            for axis, positions in enumerate(axes):
                if positions is not None:
                    cut = cut.index_select(axis, torch.from_numpy(positions).to(cut.device))
            tensor.data = cut.contiguous()
            if tensor.grad is not None:
                tensor.grad = None
            undos.append((setattr, tensor, "data", before))
            touched[id(owners[id(tensor)])] = owners[id(tensor)]
            step["parameters"][value.param] = {
                str(axis): positions.tolist() for axis, positions in enumerate(axes) if positions is not None
            }
        paths = {id(module): path for path, module in walk_modules(self.model)}
        for module in touched.values():
            for name, width in _conventional(module).items():
                if module.__dict__.get(name) != width:
                    new.setdefault((paths[id(module)], name), width)
        holders = dict(_holders(self.model))
        for (path, name), width in new.items():
            undos.append((holders[path].__setitem__, name, holders[path][name]))
            holders[path][name] = width
            step["attributes"].setdefault(path, {})[name] = list(width) if isinstance(width, tuple) else width
        for module in touched.values():
            if isinstance(module, nn.RNNBase) and next(module.parameters()).is_cuda:
                module.flatten_parameters()
        self.steps.append(step)

        def undo() -> None:
            self.steps.remove(step)
            while undos:
                function, *args = undos.pop()
                function(*args)

        return undo

    def _widths(self, kept: Kept) -> dict[tuple[str, str], Any]:
        """``(holder, attribute) -> new value`` for the held integers that calls are given."""
        found: dict[tuple[str, str, int | None], tuple[int, str]] = {}
        for op in self.graph().ops:
            for use in _uses(self._calls[op.name]):
                width = self._width(op, use, kept)
                if width is None:
                    continue
                known = found.setdefault(use.number.place, (width, op.name))
                if known[0] != width:
                    path, name, _ = use.number.place
                    raise ConfigError(
                        f"{path}.{name}".strip("."),
                        f"{known[1]} would need {known[0]} there and {op.name} {width}, and both read this one attribute",
                        "remove as many units from both, uniform=True",
                    )
        holders = dict(_holders(self.model))
        new: dict[tuple[str, str], Any] = {}
        for (path, name, at), (width, _) in found.items():
            old = holders[path][name]
            if at is None:
                if old != width:
                    new[path, name] = width
            elif old[at] != width:
                value = list(new.get((path, name), old))
                value[at] = width
                new[path, name] = tuple(value)
        return new

    def _width(self, op: Op, use: _Use, kept: Kept) -> int | None:
        """What a held integer has to be after the cut; ``None`` where the call does not take it for a width."""
        graph, call = self.graph(), self._calls[op.name]
        if not op.outputs or op.inputs[:1] in ((), (None,)):
            return None
        source, result = str(op.inputs[0]), op.outputs[0]
        shape, made = graph.values[source].shape, graph.values[result].shape
        now, then = kept.shape(source, shape), kept.shape(result, made)
        name = getattr(call.func, "__name__", "")
        value = int(use.number)
        if op.type in ("Conv", "ConvTranspose"):
            if use.keyword not in (None, "groups") or value != op.attrs.get("group"):
                return None
            if value == 1 or (use.keyword is None and use.at != _number_of(call, "groups")):
                return None
            within = kept.axes(op.inputs[1])
            return value if within and within[1] is not None else now[1] * value // shape[1]
        if op.type == "GroupNormalization":
            return now[1] * value // shape[1] if value == self.argument(op, "num_groups") else None
        if op.type == "LayerNormalization" or op.type == "RMSNormalization":
            shape_given = self.argument(op, "normalized_shape")
            if not isinstance(shape_given, tuple) or use.at >= len(shape_given):
                return None
            return now[len(shape) - len(shape_given) + use.at]
        if name in _SIZES and use.keyword is None and use.at < len(then):
            return then[use.at]
        if name == "unflatten":
            return then[int(call.args[1]) % len(shape) + use.at - 1] if use.at else None
        if op.type == "Pad":
            axis = len(made) - 1 - use.at // 2
            positions = (kept.axes(result) or (None,) * len(made))[axis]
            if positions is None:
                return value
            front = value if use.at % 2 == 0 else made[axis] - value
            return int((positions < front).sum() if use.at % 2 == 0 else (positions >= front).sum())
        if op.type == "Split":
            piece = (
                op.outputs[use.at] if isinstance(call.args[1] if len(call.args) > 1 else 0, (list, tuple)) else result
            )
            old, cut = graph.values[piece].shape, kept.shape(piece, graph.values[piece].shape)
            return next((m for n, m, whole in zip(old, cut, shape, strict=True) if n == value != whole), None)
        if op.type == "Slice":
            changed = [a for a in (kept.axes(source) or ()) if a is not None]
            return int((changed[0] < value).sum()) if len(changed) == 1 else None
        if op.type not in TRAITS["reshape"] and op.type not in ("Expand", "Tile"):
            return None
        widths = {m for n, m in zip((*shape, *made), (*now, *then), strict=True) if n == value}
        return widths.pop() if len(widths) == 1 else None

    def problem(self, kept: Kept, predicted: Graph) -> Problem | None:
        """What does not work after a cut: the call that fails, or that makes another shape than predicted."""
        try:
            graph = record(self.model, self._examples, whole=True).graph()
        except ModelError as error:
            _, _, where = error.site.partition(", in ")
            cause = error.__cause__ or error
            return Problem(
                where, f"the model fails after the cut: {type(cause).__name__}: {str(cause).splitlines()[0]}"
            )
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


def kept_axes(rank: int, result: int, gone: set[int]) -> tuple[int | None, ...]:
    """Axis of a reduction's input -> axis of its result, or ``None``."""
    if result == rank:
        return tuple(None if i in gone else i for i in range(rank))
    kept = [i for i in range(rank) if i not in gone]
    return tuple(kept.index(i) if i in kept and kept.index(i) < result else None for i in range(rank))


def _uses(call: Call) -> Iterator[_Use]:
    """The held integers among the arguments of a call."""
    at = 0
    for argument in call.args[1:]:
        stack = [argument]
        while stack:
            item = stack.pop(0)
            if isinstance(item, (tuple, list)) and not isinstance(item, Slot):
                stack = [*item, *stack]
                continue
            if isinstance(item, slice):
                stack = [item.start, item.stop, *stack]
                continue
            if isinstance(item, Held):
                yield _Use(item, at, None)
            at += 1
    for keyword, argument in call.kwargs.items():
        items = argument if isinstance(argument, (tuple, list)) else (argument,)
        for i, item in enumerate(items):
            if isinstance(item, Held):
                yield _Use(item, i, keyword)


def _number_of(call: Call, name: str) -> int:
    """The place of an argument among the numbers after the first argument."""
    row = function_of(call.func)
    assert row is not None
    at = 0
    for i, argument in enumerate(call.args[1:], 1):
        if i < len(row.signature) and row.signature[i] == name:
            return at
        at += len(argument) if isinstance(argument, (tuple, list)) else 1
    return -1


def _conventional(module: nn.Module) -> dict[str, Any]:
    """Attributes of modules that say what shapes their parameters have, as these are now."""
    weight = module._parameters.get("weight")
    if isinstance(module, nn.RNNBase):
        own = module._parameters
        recurrent, entering = own["weight_hh_l0"], own["weight_ih_l0"]
        assert recurrent is not None and entering is not None
        gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
        projected = {"proj_size": recurrent.shape[1]} if module.proj_size else {}
        return {"input_size": entering.shape[1], "hidden_size": recurrent.shape[0] // gates, **projected}
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d)):
        held = weight if weight is not None else module._buffers.get("running_mean")
        return {} if held is None else {"num_features": held.shape[0]}
    if weight is None:
        return {}
    if isinstance(module, nn.Linear):
        return {"out_features": weight.shape[0], "in_features": weight.shape[1]}
    if isinstance(module, nn.modules.conv._ConvNd):
        assert isinstance(weight, torch.Tensor)
        # the number of groups may have changed with the channels: what enters a group stays
        made, read = (1, 0) if module.transposed else (0, 1)
        groups = module.groups
        if groups > 1 and weight.shape[read] == module.in_channels // groups and not module.transposed:
            share = module.out_channels // groups
            groups = weight.shape[0] // share
        elif groups > 1 and module.transposed and weight.shape[1] == module.out_channels // groups:
            groups = weight.shape[0] // (module.in_channels // groups)
        width = {made: weight.shape[made], read: weight.shape[read]}
        width[1] *= groups
        return {"out_channels": width[made], "in_channels": width[read]}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return {"normalized_shape": tuple(weight.shape)}
    if isinstance(module, nn.GroupNorm):
        return {"num_channels": weight.shape[0]}
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return {"embedding_dim": weight.shape[1]}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": weight.shape[0]}
    if {"nf", "nx"} <= vars(module).keys() and weight.dim() == 2:  # transformers' Conv1D
        return {"nf": weight.shape[1], "nx": weight.shape[0]}
    return {}


def rebuild(model: nn.Module, plan: Mapping[str, Any]) -> nn.Module:
    """Give a module of the original class the shapes that a compression left; its state dict fits afterwards.

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
        if step.get("kind") != "cut":
            raise ConfigError(
                "plan", f"it has a step {step.get('kind')!r} that is not known", "use the version that wrote it"
            )
        tensors = dict(named_state(model))
        for name, axes in step["parameters"].items():
            tensor = tensors.get(name)
            if tensor is None:
                raise ConfigError(
                    name, "the plan cuts it, and the model has no such parameter", "rebuild the original class"
                )
            for axis, positions in axes.items():
                if int(axis) >= tensor.dim() or max(positions, default=0) >= tensor.shape[int(axis)]:
                    raise ConfigError(
                        name,
                        f"the plan keeps position {max(positions)} of axis {axis}, and its shape is {tuple(tensor.shape)}",
                        "rebuild a model with the arguments of the one that was compressed",
                    )
                tensor.data = tensor.data.index_select(
                    int(axis), torch.tensor(positions, device=tensor.device)
                ).contiguous()
        holders = dict(_holders(model))
        for path, attributes in step["attributes"].items():
            if path not in holders:
                raise ConfigError(
                    path, "the plan changes its widths, and the model has no such module", "rebuild the original class"
                )
            for name, value in attributes.items():
                holders[path][name] = tuple(value) if isinstance(value, list) else value
    return model


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


def load_compressed(model: nn.Module, folder: str | os.PathLike[str], name: str = "model") -> nn.Module:
    """Make a module of the original class the compressed one that was saved in a folder.

    Args:
        model: of the class and with the arguments of the model that was compressed; changed in place.
        folder, name: as :meth:`bitwright.compression.compress.Compressed.save` was given.

    Returns:
        ``model``.

    Raises:
        ConfigError: the plan is of another model.
        ModelError: a file is missing, or the tensors do not fit.
    """
    from safetensors.torch import load_file

    plan_file, weights = Path(folder) / f"{name}.plan.json", Path(folder) / f"{name}.safetensors"
    for file in (plan_file, weights):
        if not file.is_file():
            raise ModelError(str(file), "there is no such file", "give the folder and the name that save() was given")
    rebuild(model, json.loads(plan_file.read_text(encoding="utf-8")))
    state = load_file(weights)
    own = model.state_dict()
    wrong = [k for k, t in state.items() if k not in own or own[k].shape != t.shape]
    if wrong:
        raise ModelError(wrong[0], "the tensor in the file does not fit the module", "rebuild the original class")
    model.load_state_dict(state, strict=False)
    return model
