"""Distillation of a compressed model from the original, whose layers no longer pair one to one.

Places of both graphs are paired by name, through the plan of the compression: layers behind a block that was taken out have
other numbers, a layer that was written as factors ends at the last of them, and of one that lost channels those that are left
are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.compression.importance import channel_axis
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS, weight_axes
from bitwright.errors import ConfigError, checks_arguments, close_matches
from bitwright.torch.calls.inputs import model_device, named_state, to_device, walk_modules
from bitwright.torch.structure import rebuild
from bitwright.torch.training.distill import distillation_loss, logits_of
from bitwright.torch.view import TorchView


@dataclass(frozen=True)
class Site:
    """A place of the compressed model, and the one of the original that it is compared with.

    Attributes:
        name: operator of the original.
        value, original: names of both values.
        axis, kept: which positions of which axis of the original are left; ``None`` for all.
    """

    name: str
    value: str
    original: str
    axis: int = -1
    kept: tuple[int, ...] | None = None


class CompressedDistillation:
    """Runs a batch through the compressed and the original model, and returns the loss between them.

    The loss is that of the outputs (:func:`bitwright.torch.distillation_loss`) and the mean over sites of the squared error in
    parts of the original's mean square.

    Args:
        student: the compressed module, trained by the caller.
        teacher: the original; a copy in evaluation mode is kept.
        example: an input.
        plan: ``result.plan`` of the compression; needed where channels, blocks or layers are not those of the original.
        sites: operators of the original, by name (``"layer3.1.conv2"``); all layers that pair by default.
        site_weight: of the mean over sites, beside the outputs.
        temperature: of the outputs.
        output: takes the logits from what a model returns; by default the tensor named ``logits``, else the first.

    Attributes:
        sites: what is compared.

    Raises:
        ConfigError: a site that no place of the student pairs with; a plan of another model.

    Example:
        ``loss, output = distillation(images)``; ``loss.backward()``.
    """

    @checks_arguments
    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        example: Any,
        *,
        plan: Mapping[str, Any] | None = None,
        sites: Sequence[str] | None = None,
        site_weight: float = 1.0,
        temperature: float = 1.0,
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.student, self.site_weight, self.temperature = student, site_weight, temperature
        self._output = output or logits_of
        self._own = TorchView(student, [example])
        self._original = TorchView(copy.deepcopy(teacher).eval().requires_grad_(False), [example])
        found = paired_sites(self._own.graph(), self._original.graph(), _Origin(self._original.model, plan))
        names = list(found) if sites is None else list(sites)
        for name in names:
            if name not in found:
                raise ConfigError(
                    "sites", f"no layer of the compressed model pairs with {name!r}{close_matches(name, found)}",
                    "give the plan of the compression, or name layers that are left",
                )  # fmt: skip
        self.sites = tuple(found[name] for name in names)

    def __call__(self, batch: Any, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Loss and the student's output.

        Args:
            batch: as the model's forward takes it.
            mask: see :func:`bitwright.torch.distillation_loss`.
        """
        given = to_device(batch, model_device(self.student))
        with torch.no_grad():
            wanted, theirs = self._original.tapped(given, [site.original for site in self.sites], False)
        output, own = self._own.tapped(given, [site.value for site in self.sites], True)
        loss = distillation_loss(self._output(output), self._output(wanted), self.temperature, mask=mask)
        terms = [
            _apart(a, _left(b, site))
            for site in self.sites
            for a, b in zip(own[site.value], theirs[site.original], strict=False)
        ]
        return (loss + self.site_weight * torch.stack(terms).mean() if terms else loss), output


def _left(target: Tensor, site: Site) -> Tensor:
    if site.kept is None:
        return target
    return target.index_select(site.axis, torch.tensor(site.kept, device=target.device))


def _apart(own: Tensor, target: Tensor) -> Tensor:
    size = target.float().square().mean().clamp(min=torch.finfo(torch.float32).tiny)
    return F.mse_loss(own.float(), target.float()) / size


class _Origin:
    """Where modules and channels of the compressed model come from: the plan, carried out on copies of the original.

    Attributes:
        modules: path -> path in the original, of modules that the plan keeps.
        channels: axis 0 and 1 -> parameter -> the original's positions along it.
    """

    def __init__(self, teacher: nn.Module, plan: Mapping[str, Any] | None) -> None:
        self.modules: dict[str, str] = {}
        self.channels: list[dict[str, tuple[int, ...]]] = []
        for axis in (0, 1):
            made = copy.deepcopy(teacher)
            modules = list(walk_modules(made))  # held, so that no new module takes the id of one that the plan removes
            before = {id(module): path for path, module in modules}
            for _, tensor in named_state(made):
                _number(tensor, axis)
            if plan is not None:
                rebuild(made, plan)
            self.modules = {path: before[id(m)] for path, m in walk_modules(made) if id(m) in before}
            self.channels.append({name: numbers for name, t in named_state(made) if (numbers := _numbers(t, axis))})

    def name(self, op: Op) -> str:
        """The name of an operator in the original."""
        parts = op.name.split(".")
        for n in range(len(parts), 0, -1):
            path = ".".join(parts[:n])
            if path in self.modules:
                return ".".join([self.modules[path], *parts[n:]]).lstrip(".")
        return op.name


@torch.no_grad()
def _number(tensor: Tensor, axis: int) -> None:
    """Set every element to its position along an axis."""
    if tensor.dim() > axis and tensor.is_floating_point():
        row = torch.arange(tensor.shape[axis], dtype=torch.float32, device=tensor.device)
        tensor.data = row.reshape([-1 if i == axis else 1 for i in range(tensor.dim())]).expand(tensor.shape).clone()


def _numbers(tensor: Tensor, axis: int) -> tuple[int, ...]:
    if tensor.dim() <= axis or not tensor.is_floating_point() or not tensor.numel():
        return ()
    return tuple(tensor.detach().movedim(axis, 0).reshape(tensor.shape[axis], -1)[:, 0].long().tolist())


def paired_sites(own: Graph, original: Graph, origin: _Origin) -> dict[str, Site]:
    """Operator of the original -> the site; of layers that are in both graphs, whose results can be compared."""
    theirs = {op.name: op for op in original.ops if op.type in TRAITS["layer"]}
    ends: dict[str, Op] = {}
    for op in own.ops:
        name = origin.name(op)
        whole = name if name in theirs else name.rpartition(".")[0]  # part of a layer that was written as factors
        if whole in theirs and op.outputs:
            ends[whole] = op
    found = {name: _site(own, original, op, theirs[name], origin) for name, op in ends.items()}
    return {name: site for name, site in found.items() if site is not None}


def _site(own: Graph, original: Graph, op: Op, other: Op, origin: _Origin) -> Site | None:
    value, target = op.outputs[0], other.outputs[0]
    shape, whole = own.values[value].shape, original.values[target].shape
    if shape == whole:
        return Site(other.name, value, target)
    axis = channel_axis(op)
    stored = own.values[op.inputs[1]].param if len(op.inputs) > 1 and op.inputs[1] is not None else None
    if stored is None or len(shape) != len(whole):
        return None
    rank = len(own.values[str(op.inputs[1])].shape)
    out, _ = weight_axes(op.type, op.attrs, 1, rank)
    kept = origin.channels[out].get(stored, ()) if out in (0, 1) else ()
    narrow = [n if i != axis % len(shape) else len(kept) for i, n in enumerate(whole)]
    fits = narrow == list(shape) and (not kept or max(kept) < whole[axis])
    return Site(other.name, value, target, axis, kept) if fits else None
