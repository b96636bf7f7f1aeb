"""Experts of mixtures: which contribute least, by what the router gives them and how large their results are (REAP).

A mixture is a module with a container of experts, a list or dictionary of modules or parameters ``[experts, ...]`` of one module,
and a router, whose weight has a row per expert. Of each expert the saliency is the mean, over the tokens that are routed to it,
of its gate times the norm of its result: the error that the sum makes without it.

Reference: Lasby et al. 2025, arXiv:2510.13999 (REAP).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bitwright.core.simulation.float_model import Array, Undo
from bitwright.errors import ConfigError, ModelError
from bitwright.methods.front_end import Mixtures, plan_of
from bitwright.progress import progress as progress_bar
from bitwright.torch.calls.inputs import evaluation, model_device, outputs_of, tensors_in, to_device, walk_modules
from bitwright.torch.pretrained import configurations, fit_configuration, refuse_to_save

_ROUTERS = re.compile("gate|router|classifier")
_NUMBERS = re.compile("expert")
_OTHER_NUMBERS = re.compile("per_tok|top|shared|group|dim|size")
_NEVER = -1e9  # logit of an expert that is not chosen


@dataclass(frozen=True)
class Mixture:
    """A container of experts and its router.

    Attributes:
        name: path of the container.
        block: path of the module that holds it.
        router: path of the router.
        experts: how many.
        stacked: parameters of one module hold all experts.
    """

    name: str
    block: str
    router: str
    experts: int
    stacked: bool


def _parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Own parameters and buffers of a module."""
    found = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _count(module: nn.Module) -> tuple[int, bool]:
    """How many experts a module may hold, and whether they are stacked; 0 for none."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        alike = len({type(child) for child in module.children()}) == 1
        return (len(module) if alike and len(module) > 1 else 0), False
    if type(module).__module__.startswith("torch.nn."):  # kernels of a convolution are no experts
        return 0, False
    lengths = {t.shape[0] for t in module._parameters.values() if t is not None and t.dim() == 3}
    return (lengths.pop() if len(lengths) == 1 else 0), True


def _rows_of(module: nn.Module, count: int) -> dict[tuple[nn.Module, str], torch.Tensor]:
    """Parameters and buffers of a module and those inside it with a row per expert."""
    return {
        (inner, name): tensor
        for inner in module.modules()
        for name, tensor in _parameters(inner).items()
        if tensor.dim() and tensor.shape[0] == count
    }


def mixtures(model: nn.Module) -> list[Mixture]:
    """The mixtures of a model, in order: containers beside a module whose weight has a row per expert."""
    places = ((path, block, name) for path, block in walk_modules(model) for name, _ in block.named_children())
    return [found for place in places if (found := _mixture(*place)) is not None]


def _mixture(path: str, block: nn.Module, name: str) -> Mixture | None:
    """The mixture whose experts are the child ``name`` of a module."""
    count, stacked = _count(getattr(block, name))
    if count < 2:
        return None
    beside = [n for n, m in block.named_children() if n != name and _routes(m, count)]
    named = [n for n in beside if _ROUTERS.search(n)] or beside
    if len(named) != 1:
        return None
    container, router = (f"{path}.{n}".lstrip(".") for n in (name, named[0]))
    return Mixture(container, path, router, count, stacked)


def _routes(module: nn.Module, count: int) -> bool:
    return any(t.dim() == 2 and t.shape[0] == count for t in _rows_of(module, count).values())


# ------------------------------------------------------------------------------------------------- saliency


class _Saliency:
    """Sums of gate times norm of the result, and tokens, of each expert of a mixture, over the runs inside :meth:`watched`."""

    def __init__(self, model: nn.Module, mixture: Mixture) -> None:
        self.mixture = mixture
        modules = dict(walk_modules(model))
        self._container, self._block = modules[mixture.name], modules[mixture.block]
        self.sums, self.tokens = np.zeros(mixture.experts), np.zeros(mixture.experts, np.int64)
        self._made: list[tuple[int, torch.Tensor]] = []

    def add(self, expert: int, gates: torch.Tensor, results: torch.Tensor) -> None:
        """Count the tokens of one expert: gates ``[tokens]``, results ``[tokens, width]``."""
        routed = gates != 0
        self.sums[expert] += float((gates * results.float().norm(dim=-1))[routed].abs().sum())
        self.tokens[expert] += int(routed.sum())

    def hooks(self) -> list[Any]:
        """The hooks that look on."""
        if self.mixture.stacked:
            return [self._container.register_forward_pre_hook(self._of_stack)]
        experts = [
            child.register_forward_hook(self._of_expert(i)) for i, child in enumerate(self._container.children())
        ]
        before = self._block.register_forward_pre_hook(self._before_block)
        return [*experts, before, self._block.register_forward_hook(self._of_block)]

    def _of_stack(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A stack is given tokens, the experts of each, and their gates: it is run for each expert alone, with gates of 1."""
        if len(args) < 3 or args[1].is_floating_point() or args[1].shape != args[2].shape:
            raise ModelError(
                self.mixture.name, "its forward does not take tokens, numbers of experts and gates, one after the other",
                "hold the experts in a ModuleList",
            )  # fmt: skip
        x, chosen, gates = args[:3]
        with torch.no_grad():
            for expert in range(self.mixture.experts):
                rows, at = torch.where(chosen == expert)
                if len(rows):
                    one = torch.full((len(rows), 1), expert, dtype=chosen.dtype, device=chosen.device)
                    made = module.forward(x[rows], one, torch.ones_like(one, dtype=gates.dtype))
                    self.add(expert, gates[rows, at].float(), made)

    def _of_expert(self, expert: int) -> Callable[..., torch.Tensor]:
        def hook(module: nn.Module, args: Any, made: torch.Tensor) -> torch.Tensor:
            leaf = made.detach().requires_grad_(True)
            self._made.append((expert, leaf))
            return leaf

        return hook

    def _before_block(self, module: nn.Module, args: Any) -> None:
        self._made.clear()
        torch.set_grad_enabled(True)

    def _of_block(self, module: nn.Module, args: Any, made: Any) -> None:
        """The block is linear in the results of experts: its derivative by a result is the gate."""
        try:
            leaves = [leaf for _, leaf in self._made]
            first = tensors_in(made)[0].sum()
            gates = torch.autograd.grad(first, leaves, allow_unused=True) if leaves and first.requires_grad else []
        finally:
            torch.set_grad_enabled(False)
        for (expert, leaf), gate in zip(self._made, gates, strict=False):
            if gate is not None:
                self.add(expert, gate.float().mean(-1).reshape(-1), leaf.detach().reshape(-1, leaf.shape[-1]))


def saliencies(
    model: nn.Module, found: Sequence[Mixture], batches: Sequence[Any], progress: bool
) -> list[tuple[Array, Array]]:
    """``(saliency, tokens)`` of the experts of every mixture.

    Raises:
        ModelError: a stack of experts has another forward than those of transformers.
    """
    watching = [_Saliency(model, mixture) for mixture in found]
    handles = [handle for one in watching for handle in one.hooks()]
    try:
        with torch.no_grad(), evaluation(model):
            for batch in progress_bar(batches, "Experts", progress):
                outputs_of(model, to_device(batch, model_device(model)))
    finally:
        for handle in handles:
            handle.remove()
    return [(one.sums / np.maximum(one.tokens, 1), one.tokens) for one in watching]


# ------------------------------------------------------------------------------------------------- removal


class _Masked(TorchFunctionMode):
    """Gives the logits of removed experts a number with which no router chooses them."""

    def __init__(self, routers: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        super().__init__()
        self._routers = routers  # id of a weight -> number of experts, those removed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for argument in args if isinstance(made, torch.Tensor) else ():
            count, gone = self._routers.get(id(argument), (0, ()))
            if count and made is not argument and made.dim() and made.shape[-1] == count and made.is_floating_point():
                at = torch.tensor(gone, device=made.device)
                return made.index_fill(-1, at, _NEVER)
        return made


@contextmanager
def _never_chosen(model: nn.Module, gone: Mapping[Mixture, Sequence[int]]) -> Iterator[None]:
    """Inside the block no token is routed to the experts that go."""
    modules, routers, biases = dict(walk_modules(model)), {}, []
    for mixture, numbers in gone.items():
        for tensor in _rows_of(modules[mixture.router], mixture.experts).values():
            if tensor.dim() == 2:
                routers[id(tensor)] = mixture.experts, numbers
            elif not isinstance(tensor, nn.Parameter):  # added behind the logits
                biases.append((tensor, tensor.clone()))
                tensor[list(numbers)] = _NEVER
    try:
        with _Masked(routers):
            yield
    finally:
        for tensor, before in biases:
            tensor.copy_(before)


def _remove(model: nn.Module, mixture: Mixture, kept: Sequence[int]) -> list[Undo]:
    """Take experts out of a container, and their rows out of the router; numbers of experts in modules follow."""
    modules = dict(walk_modules(model))
    container, router = modules[mixture.name], modules[mixture.router]
    rows, undos = list(_rows_of(router, mixture.experts).values()), list[Undo]()
    if mixture.stacked:
        rows += [t for t in _parameters(container).values() if t.dim() and t.shape[0] == mixture.experts]
    else:
        undos.append(_shorten(container, kept))
    undos += [_set(t, t.data.index_select(0, torch.tensor(list(kept), device=t.device))) for t in rows]
    for module in (container, router, modules[mixture.block]):
        undos += _renumber(module, mixture.experts, len(kept), module is router)
    return undos


def _shorten(container: nn.Module, kept: Sequence[int]) -> Undo:
    before = dict(container._modules)
    left = [child for i, child in enumerate(before.values()) if i in set(kept)]

    def put(children: Mapping[str, nn.Module | None]) -> None:
        container._modules.clear()
        container._modules.update(children)

    put(dict(zip(before, left, strict=False)))
    return partial(put, before)


def _renumber(module: nn.Module, before: int, after: int, routes: bool) -> list[Undo]:
    """Give integers of a module that count experts their new value."""
    held, undos = vars(module), list[Undo]()
    for name, value in list(held.items()):
        counts = _counts_experts(name) or (routes and name == "out_features")
        if counts and type(value) is int and value == before:
            held[name] = after
            undos.append(partial(held.__setitem__, name, value))
    return undos


def _counts_experts(name: str) -> bool:
    return bool(_NUMBERS.search(name)) and not _OTHER_NUMBERS.search(name)


def _set(tensor: torch.Tensor, value: torch.Tensor) -> Undo:
    before = tensor.data
    tensor.data, tensor.grad = value, None

    def undo() -> None:
        tensor.data = before

    return undo


def experts_again(model: nn.Module, step: Mapping[str, Any]) -> None:
    """Carry out a step of a plan.

    Raises:
        ConfigError: the step is damaged, or of another model.
    """
    known = {mixture.name: mixture for mixture in mixtures(model)}
    for name, kept in _checked_step(step).items():
        mixture = known.get(name)
        if mixture is None or max(kept) >= mixture.experts:
            raise ConfigError(
                name,
                f"the plan keeps the experts {kept}, and the model has no such experts",
                "rebuild the original class",
            )
        _remove(model, mixture, kept)


def _checked_step(step: Mapping[str, Any]) -> Mapping[str, list[int]]:
    kept = step.get("kept")
    rows = list(kept.values()) if isinstance(kept, Mapping) else [None]
    if not all(isinstance(row, list) and row and all(type(i) is int and i >= 0 for i in row) for row in rows):
        raise ConfigError("plan", "a step does not say which experts are kept", "give the plan as it was written")
    assert isinstance(kept, Mapping)
    return kept


class TorchMixtures(Mixtures):
    """The mixtures of a module.

    Args:
        model: changed in place.
        batches: of real inputs.
    """

    looked_for = "the model has no module with experts, in a list or stacked, beside a router with a row for each"

    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self._model, self._batches = model, batches
        self._first = to_device(batches[0], model_device(model))
        self._found = {mixture.name: mixture for mixture in mixtures(model)}

    def counts(self) -> Mapping[str, int]:
        """As the base class says."""
        return {name: mixture.experts for name, mixture in self._found.items()}

    def saliencies(self, names: Sequence[str], needed: bool, progress: bool) -> list[tuple[Array, Array]]:
        """As :func:`saliencies`."""
        return saliencies(self._model, [self._found[name] for name in names], self._batches, progress)

    def _outputs(self) -> list[Array]:
        with torch.no_grad(), evaluation(self._model):
            return list(outputs_of(self._model, self._first))

    def without(self, gone: Mapping[str, Sequence[int]]) -> list[Array]:
        """As the base class says."""
        with torch.no_grad(), _never_chosen(self._model, {self._found[name]: i for name, i in gone.items()}):
            return self._outputs()

    def size(self) -> float:
        """As the base class says."""
        return float(sum(parameter.numel() for parameter in self._model.parameters()))

    def remove(self, kept: Mapping[str, Sequence[int]]) -> tuple[list[Array], Undo]:
        """As the base class says; a model that fails is as it was."""
        undos = [undo for name, left in kept.items() for undo in _remove(self._model, self._found[name], left)]

        def undo() -> None:
            for step in reversed(undos):
                step()

        try:
            return self._outputs(), undo
        except BaseException:
            undo()
            raise

    def finish(self, kept: Mapping[str, Sequence[int]]) -> tuple[Mapping[str, Any], str]:
        """The plan; the configuration of a model of transformers follows."""
        steps: list[dict[str, Any]] = [{"kind": "experts", "kept": {name: list(left) for name, left in kept.items()}}]
        counts = {(self._found[name].experts, len(left)) for name, left in kept.items()}
        fit = fit_configuration(self._model, counts, self._batches[0])
        holders = configurations(self._model)
        for holder, numbers in fit.attributes.items():
            holders[holder].update(numbers)
        if fit.changed:
            steps.append({"kind": "cut", "parameters": {}, "attributes": fit.attributes})
        plan = plan_of(steps, fit.reason)
        refuse_to_save(self._model, fit.reason, plan)
        return plan, fit.reason
