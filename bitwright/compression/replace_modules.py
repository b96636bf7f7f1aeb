"""Blocks of a module that can be replaced: innermost modules of several layers whose output has the shape of their input."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.compression.replace_space import LinearFit, ReplaceSpace, no_block
from bitwright.compression.widths import few_batches, output_noise
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.simulation.float_model import Array, Undo
from bitwright.methods.front_end import plan_of
from bitwright.torch.calls.inputs import evaluation, model_device, outputs_of, tensors_in, to_device, walk_modules
from bitwright.torch.depth import Replaced, put_block
from bitwright.torch.pretrained import refuse_to_save
from bitwright.torch.view import TorchView


@dataclass(frozen=True)
class Block:
    """A module that can be replaced: how it is called; see :class:`Replaced`."""

    name: str
    width: int
    images: bool
    results: int
    reads: str

    def made(self, variant: str) -> Replaced:
        """A module in its place."""
        return Replaced(variant, self.width, self.images, self.results, self.reads)


class _Watch:
    """A hook that notes how a module is called, and sums the products that the linear fit needs.

    Attributes:
        block: how it is called; ``None`` where it cannot be replaced.
        reason: why not.
        fit: of what it makes by what it reads, from :meth:`collect` on.
    """

    def __init__(self, name: str) -> None:
        self.name, self.reason = name, "it does not run"
        self.block: Block | None = None
        self.fit: LinearFit | None = None
        self._runs = 0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
        if self.fit is not None:
            self._add(self.fit, args, kwargs, made)
            return
        self._runs += 1
        reads = "" if args else next((key for key, v in kwargs.items() if isinstance(v, torch.Tensor)), "")
        x = args[0] if args else kwargs.get(reads)
        results = made if isinstance(made, tuple) else (made,)
        self.block, self.reason = None, self._problem(module, x, results)
        if not self.reason:
            images = x.dim() == 4 and any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())
            width = x.shape[1] if images else x.shape[-1]
            self.block = Block(self.name, width, images, len(results) if isinstance(made, tuple) else 0, reads)

    def _problem(self, module: nn.Module, x: Any, results: Sequence[Any]) -> str:
        """Why a module cannot be replaced; empty where it can."""
        tensors = isinstance(x, torch.Tensor) and isinstance(results[0], torch.Tensor)
        reasons = {
            "it runs several times": self._runs > 1,
            "it does not read and make a tensor first": not tensors,
            "it makes another shape than it reads": tensors
            and (x.shape != results[0].shape or x.dtype != results[0].dtype or x.dim() < 2),
            "it makes several results": any(r is not None for r in results[1:]),
            "caches count the tokens of the first layer": getattr(module, "layer_idx", None) == 0,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def collect(self) -> None:
        """From now on, sum products."""
        assert self.block is not None
        self.fit = LinearFit(self.block.width)

    def _add(self, fit: LinearFit, args: Any, kwargs: Any, made: Any) -> None:
        block = self.block
        assert block is not None
        fit.add(*(self._rows(t) for t in (kwargs[block.reads] if block.reads else args[0], tensors_in(made)[0])))

    def _rows(self, t: torch.Tensor) -> Array:
        assert self.block is not None
        t = t.movedim(1, -1) if self.block.images else t
        return t.detach().reshape(-1, self.block.width).double().cpu().numpy()


def _candidates(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Modules of several layers, but the model itself and lists."""
    modules = (
        (path, m) for path, m in walk_modules(model) if path and not isinstance(m, (nn.ModuleList, nn.ModuleDict))
    )
    several = [path for path, module in modules if sum(bool(m._parameters) for m in module.modules()) > 1]
    return [path for path in several if any(fnmatch.fnmatchcase(path, p) for p in patterns)]


def _watched(
    model: nn.Module, patterns: Sequence[str], batches: Sequence[Any]
) -> tuple[dict[str, _Watch], dict[str, str]]:
    """The innermost blocks, with what their linear fits need; and why other modules are none.

    Raises:
        ConfigError: there is no block.
    """
    watches = {name: _Watch(name) for name in _candidates(model, patterns)}
    _hooked(model, watches, batches[:1])
    refused = {name: watch.reason for name, watch in watches.items() if watch.block is None}
    fitting = [name for name in watches if name not in refused]
    inner = {n: watches[n] for n in fitting if not any(other.startswith(f"{n}.") for other in fitting)}
    if not inner:
        raise no_block(refused, "no module has several layers")
    for watch in inner.values():
        watch.collect()
    _hooked(model, inner, batches)
    return inner, refused


def _hooked(model: nn.Module, watches: Mapping[str, _Watch], batches: Iterable[Any]) -> None:
    modules = dict(walk_modules(model))
    handles = [modules[name].register_forward_hook(watch, with_kwargs=True) for name, watch in watches.items()]
    try:
        with torch.no_grad(), evaluation(model):
            for batch in batches:
                outputs_of(model, to_device(batch, model_device(model)))
    finally:
        for handle in handles:
            handle.remove()


class ModuleSpace(ReplaceSpace):
    """Blocks of a module.

    Args:
        model: changed by :meth:`apply`.
        watches: by block, with what they have summed up.
        refused: modules that are no blocks -> why.
        batches: on which outputs are compared.
        variants: what a block may become.
    """

    def __init__(
        self, model: nn.Module, watches: Mapping[str, _Watch], refused: Mapping[str, str], batches: Sequence[Any],
        variants: Sequence[str],
    ) -> None:  # fmt: skip
        self.model, self._batches = model, batches
        graph = TorchView(model, [batches[0]]).graph()
        self._wanted = [self._outputs(batch) for batch in batches]
        self.blocks: dict[str, Block] = {n: w.block for n, w in watches.items() if w.block is not None}
        inside = {name: [op for op in graph.ops if _is_inside(op, name)] for name in self.blocks}
        rows = {name: _rows(graph, block) for name, block in self.blocks.items()}
        fits = {name: w.fit for name, w in watches.items() if w.fit is not None}
        super().__init__(graph, inside, rows, fits, variants, refused)

    def _outputs(self, batch: Any) -> list[Array]:
        with torch.no_grad(), evaluation(self.model):
            return [np.array(y) for y in outputs_of(self.model, to_device(batch, model_device(self.model)))]

    def replaced(self, name: str, variant: str) -> Replaced:
        """A module in place of a block, with its weights."""
        made = self.blocks[name].made(variant)
        first = next(self.model.parameters())
        if made.linear is not None:
            W = torch.from_numpy(self.weights[name])
            with torch.no_grad():
                made.linear.weight.copy_(W[:, :-1])
                made.linear.bias.copy_(W[:, -1])
        return made.to(first.device, first.dtype).train(self.model.training)

    def apply(self, choice: Sequence[int]) -> Undo:
        """Put modules in place of blocks."""
        picked = self.picked(choice)
        undos = [
            put_block(self.model, name, self.replaced(name, variant)) for name, variant in picked.items() if variant
        ]

        def undo() -> None:
            for back in reversed(undos):
                back()

        return undo

    def outputs(self, batch: Any) -> list[Array]:
        """Outputs of the present model."""
        return self._outputs(batch)

    def noise(self) -> float:
        """Noise-to-signal power ratio of the outputs, mean over batches and outputs."""
        return output_noise(self, self._batches, self._wanted) or 0.0  # type: ignore[arg-type]

    def runnable(self) -> Any:
        """The module."""
        return self.model

    def finished(self, choice: Sequence[int]) -> dict[str, Any]:
        """The plan; the model refuses to be saved as its class from now on."""
        steps = [
            {"kind": "replace", "module": name, "with": {"variant": variant, **_arguments(self.blocks[name])}}
            for name, variant in self.picked(choice).items()
            if variant
        ]
        plan = plan_of(steps)
        refuse_to_save(self.model, "blocks are replaced, which no configuration describes", plan)
        return plan


def _is_inside(op: Op, name: str) -> bool:
    """Whether an operator is one of a module, or of a module in it."""
    return f"{op.name}.".startswith(f"{name}.") or f"{op.module}.".startswith(f"{name}.")


def _rows(graph: Graph, block: Block) -> int:
    """How many rows of channels a block reads in the example."""
    made = [op for op in graph.ops if f"{op.name}.".startswith(f"{block.name}.") and op.outputs]
    shapes = [graph.values[op.outputs[0]].shape for op in made[-1:]]
    return int(np.prod(shapes[0])) // block.width if shapes else 1


def _arguments(block: Block) -> dict[str, Any]:
    return {"width": block.width, "images": block.images, "results": block.results, "reads": block.reads}


def module_space(
    model: nn.Module, batches: Sequence[Any], patterns: Sequence[str], variants: Sequence[str]
) -> ModuleSpace:
    """The blocks of a module, with their linear fits.

    Raises:
        ConfigError: there is none.
    """
    watches, refused = _watched(model, patterns, batches)
    return ModuleSpace(model, watches, refused, few_batches(batches), variants)
