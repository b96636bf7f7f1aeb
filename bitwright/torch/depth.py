"""Blocks of a module: members of its containers whose output has the shape of their input.

A block that was replaced is a :class:`Replaced`, which :func:`put_block` puts there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.core.graph.graph import Graph
from bitwright.core.simulation.float_model import Array, Undo
from bitwright.errors import ConfigError, ModelError
from bitwright.methods.front_end import Blocks, plan_of
from bitwright.torch.calls.inputs import outputs_of, tensors_in, walk_modules
from bitwright.torch.view import TorchView

#: what configurations call the number of layers
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


class _HandOn:
    """A hook that passes on what a module reads in place of what it makes; it notes both."""

    def __init__(self, active: bool) -> None:
        self.active, self.runs, self.fits = active, 0, True

    @property
    def reason(self) -> str:
        """Why the module is no block; empty where it is one."""
        return "it does not run once" if self.runs != 1 else "" if self.fits else "it makes another shape than it reads"

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, made: Any) -> Any:
        read, results = tensors_in((args, kwargs)), tensors_in(made)
        self.runs += 1
        first = isinstance(made, torch.Tensor) or (
            isinstance(made, tuple) and made and isinstance(made[0], torch.Tensor)
        )
        self.fits = bool(first and read and read[0].shape == results[0].shape and read[0].dtype == results[0].dtype)
        if not self.active:
            return None
        return read[0] if isinstance(made, torch.Tensor) else (read[0], *made[1:])


def _members(modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, int]]:
    """Members of containers that hold several layers -> path of the container, position."""
    containers = ((path, m) for path, m in modules.items() if isinstance(m, (nn.ModuleList, nn.Sequential)))
    return {
        f"{path}.{key}" if path else key: (path, i)
        for path, container in containers
        for i, (key, child) in enumerate(container._modules.items())
        if child is not None and sum(bool(m._parameters) for m in child.modules()) > 1
    }


def _inside(name: str, others: Collection[str]) -> bool:
    """Whether a module is part of another one."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in others for n in range(1, len(parts)))


class TorchBlocks(Blocks):
    """The blocks of a module.

    Args:
        model: changed in place.
        example: an input.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.model, self._modules = model, dict(walk_modules(model))
        self._at = _members(self._modules)
        hooks = {name: _HandOn(False) for name in self._at}
        handles = [self._modules[n].register_forward_hook(hook, with_kwargs=True) for n, hook in hooks.items()]
        try:
            outputs_of(model, example)
        finally:
            for handle in handles:
                handle.remove()
        reasons = {name: hook.reason for name, hook in hooks.items()}
        fitting = {name for name, reason in reasons.items() if not reason}
        self.names = [name for name in reasons if name in fitting and not _inside(name, fitting)]
        self.refused = {name: reason for name, reason in reasons.items() if reason}
        self._graph = TorchView(model, [example]).graph()

    def graph(self) -> Graph:
        """As it was recorded."""
        return self._graph

    def gone(self, names: Sequence[str]) -> set[str]:
        """Operators whose path is below that of a block."""
        below = set(names)
        return {op.name for op in self._graph.ops if _inside(f"{op.name}.", below)}

    def without(self, names: Sequence[str]) -> Undo:
        """By hooks."""
        handles = [self._modules[n].register_forward_hook(_HandOn(True), with_kwargs=True) for n in names]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    def outputs(self, batch: Any) -> list[Array]:
        """Outputs of the module."""
        return outputs_of(self.model, batch)

    def remove(self, names: Sequence[str], batch: Any) -> dict[str, Any]:
        """From their containers; numbers of layers in modules and in the configuration follow."""
        undo = self.without(names)
        wanted = self.outputs(batch)
        undo()
        places: dict[str, list[int]] = {}
        for path, i in sorted(map(self._at.__getitem__, names)):
            places.setdefault(path, []).append(i)
        steps = [{"kind": "drop", "container": path, "indices": indices} for path, indices in places.items()]
        undos = [_drop(self.model, step) for step in steps]
        try:
            found = self.outputs(batch)
            same = all(np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, wanted, strict=True))
            problem = "" if same else "its outputs are not those with the blocks left out"
        except (
            RuntimeError,
            ValueError,
            IndexError,
            KeyError,
            AttributeError,
            TypeError,
        ) as error:  # of the model's code
            problem = f"it fails: {error}".splitlines()[0]
        if problem:
            for back in reversed(undos):
                back()
            raise ModelError("drop_blocks", f"the model without {', '.join(names)}: {problem}", "exclude these blocks")
        return plan_of(steps)


def _drop(model: nn.Module, step: Mapping[str, Any]) -> Undo:
    """Delete members of a container; what numbers layers follows.

    Raises:
        ConfigError: the model has no such container, or fewer members.
    """
    path, indices = str(step["container"]), [int(i) for i in step["indices"]]
    container = dict(walk_modules(model)).get(path)
    if not isinstance(container, (nn.ModuleList, nn.Sequential)) or not indices or max(indices) >= len(container):
        raise ConfigError(
            path, f"the plan takes out {indices}, and it has no such members", "rebuild the original class"
        )
    before, length = dict(container._modules), len(container)
    kept = [child for i, child in enumerate(container._modules.values()) if i not in set(indices) and child is not None]
    written = [(attributes, name, attributes[name]) for attributes, name, _ in _numbers(model, kept, length, indices)]
    for attributes, name, value in list(_numbers(model, kept, length, indices)):
        attributes[name] = value
    container._modules.clear()
    container._modules.update({str(i): child for i, child in enumerate(kept)})

    def undo() -> None:
        container._modules.clear()
        container._modules.update(before)
        for attributes, name, value in written:
            attributes[name] = value

    return undo


def _numbers(
    model: nn.Module, kept: Sequence[nn.Module], length: int, indices: Sequence[int]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the attributes that number or count layers: holder, name, new value."""
    for i, child in enumerate(kept):
        yield from ((vars(m), "layer_idx", i) for m in child.modules() if isinstance(vars(m).get("layer_idx"), int))
    configuration = getattr(getattr(model, "config", None), "__dict__", {})
    yield from ((configuration, n, length - len(indices)) for n in _COUNTS if configuration.get(n) == length)
    types = configuration.get("layer_types")
    if isinstance(types, list) and len(types) == length:
        yield configuration, "layer_types", [t for i, t in enumerate(types) if i not in set(indices)]


def drop_again(model: nn.Module, step: Mapping[str, Any]) -> None:
    """Carry out a step of a plan.

    Raises:
        ConfigError: the step is damaged, or of another model.
    """
    indices = step.get("indices")
    if (
        not isinstance(step.get("container"), str)
        or not isinstance(indices, list)
        or not all(type(i) is int and i >= 0 for i in indices)
    ):
        raise ConfigError(
            "plan", "a step does not say which members of a container go", "give the plan as it was written"
        )
    _drop(model, step)


VARIANTS = ("linear", "identity", "none")


class Replaced(nn.Module):
    """In place of a block: a linear layer, the input as it is, or zeros; other results of the block are ``None``.

    Args:
        variant: one of ``linear``, ``identity``, ``none``.
        width: channels of the input.
        images: channels are the second axis, and not the last.
        results: how many results the block returned as a tuple; 0 where it returned a tensor.
        reads: keyword under which the block is given its input; empty for the first argument.
    """

    def __init__(self, variant: str, width: int, images: bool = False, results: int = 0, reads: str = "") -> None:
        super().__init__()
        self.variant, self.images, self.results, self.reads = variant, images, results, reads
        self.linear = nn.Linear(width, width) if variant == "linear" else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the block that it replaces."""
        x = kwargs[self.reads] if self.reads else args[0]
        if self.linear is not None:
            made = self.linear(x.movedim(1, -1)).movedim(-1, 1) if self.images else self.linear(x)
        else:
            made = x if self.variant == "identity" else torch.zeros_like(x)
        return (made, *[None] * (self.results - 1)) if self.results else made


def put_block(model: nn.Module, name: str, module: nn.Module) -> Undo:
    """Put a module in place of the one of that path; the function returned takes it back."""
    modules = dict(walk_modules(model))
    parent, _, last = name.rpartition(".")
    before = modules[name]
    modules[parent]._modules[last] = module

    def undo() -> None:
        modules[parent]._modules[last] = before

    return undo


def replaced_again(model: nn.Module, step: Mapping[str, Any]) -> None:
    """Carry out a step of a plan.

    Raises:
        ConfigError: the step is damaged, or of another model.
    """
    name: Any = step.get("module")
    options: Any = step.get("with")
    known = {"variant": str, "width": int, "images": bool, "results": int, "reads": str}
    good = isinstance(options, Mapping) and options.keys() == known.keys()
    if not isinstance(name, str) or not good or not all(type(options[k]) is kind for k, kind in known.items()):
        raise ConfigError(
            "plan", "a step does not say what stands in place of a block", "give the plan as it was written"
        )
    if name not in dict(walk_modules(model)) or not name or options["variant"] not in VARIANTS or options["width"] < 1:
        raise ConfigError(name, "the plan replaces it, and the model has no such block", "rebuild the original class")
    put_block(model, name, Replaced(**options))
