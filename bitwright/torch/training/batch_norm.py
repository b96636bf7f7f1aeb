"""Batch norms in training of a simulated model: statistics re-estimated or frozen.

Batch norms of a trained simulation absorbed by the scales of the weights before them: integer weights stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT32_SCALE, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel
from bitwright.core.numerics.statistics import ExactSum
from bitwright.core.simulation.float_model import Handle
from bitwright.core.simulation.sites import Site
from bitwright.errors import CalibrationError, ConfigError, ModelError, checks_arguments
from bitwright.methods.folding import batch_norm_fold as algorithm
from bitwright.methods.folding.batch_norm_search import Fold, Refusal, find_folds
from bitwright.progress import progress as bar
from bitwright.torch.calls.inputs import as_call, evaluation, model_device, named_state, to_device, walk_modules
from bitwright.torch.interception.intercept import Interceptor
from bitwright.torch.opened import float_outputs, what_changed
from bitwright.torch.ranks import Ranks, calibrating_ranks
from bitwright.torch.view import TorchView

if TYPE_CHECKING:
    from bitwright.torch.simulation.quantsim import QuantizationSimModel

logger = logging.getLogger("bitwright")

Norm = nn.modules.batchnorm._BatchNorm
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def batch_norms(model: nn.Module) -> dict[str, Norm]:
    """The batch norms of ``model`` that keep running statistics, by path."""
    found = {}
    for path, module in walk_modules(model):
        if isinstance(module, Norm) and module.running_mean is not None:
            found[path] = module
    return found


def _required_norms(model: nn.Module, function: str, remedy: str) -> dict[str, Norm]:
    norms = batch_norms(model)
    if not norms:
        problem = "the model has no batch norm with running statistics: they are folded, or there were none"
        raise ModelError(function, problem, remedy)
    return norms


def _remembered(norms: Mapping[str, Norm]) -> Callable[[], None]:
    """Restores the present statistics."""
    held = [(norm, name, getattr(norm, name)) for norm in norms.values() for name in _BUFFERS]
    kept = [(norm, name, value.clone()) for norm, name, value in held if value is not None]

    def undo() -> None:
        with torch.no_grad():
            for norm, name, value in kept:
                getattr(norm, name).copy_(value)

    return undo


class _Pool:
    """Count, sum and sum of squares of a batch norm's inputs; exact over batches, in any order.

    Sums within a batch are float64.
    """

    def __init__(self, channels: int) -> None:
        self.count = self.broken = 0
        self.sum, self.squares = ExactSum(channels), ExactSum(channels)

    def add(self, x: torch.Tensor) -> None:
        """Add an input of a batch norm, ``[N, C, ...]``."""
        with torch._C.DisableTorchFunction():  # a simulation looks at the calls of its model, and this is none of them
            values = (x.detach().transpose(0, 1).flatten(1) if x.ndim > 2 else x.detach().t()).double()
            sums = torch.stack([values.sum(1), values.square().sum(1)]).cpu().numpy()
        if not np.isfinite(sums).all():
            self.broken += 1
            return
        self.count += int(values.shape[1])
        self.sum.add(sums[0])
        self.squares.add(sums[1])

    def merge(self, ranks: Ranks) -> None:
        """Merge with the pools of all ranks."""
        self.count, self.broken = ranks.total(self.count), ranks.total(self.broken)
        for part in (self.sum, self.squares):
            part.limbs = ranks.reduce(part.limbs, "sum")

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean, and variance without bias, as in running statistics of training; each rounded once."""
        n = self.count
        sums, squares = self.sum.values(), self.squares.values()
        mean = [float(total / n) for total in sums]
        # the sums of squares were rounded, so that what is left of constant values may lie below zero
        variance = [
            float(max(square - total * total / n, Fraction(0)) / (n - 1))
            for total, square in zip(sums, squares, strict=True)
        ]
        return torch.tensor(mean, dtype=torch.float64), torch.tensor(variance, dtype=torch.float64)


@checks_arguments
def reestimate_bn_stats(
    model: nn.Module,
    dataloader: Iterable[Any],
    num_batches: int = 100,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    *,
    distributed: bool = True,
) -> Handle:
    """Re-estimate the running statistics of every batch norm from its inputs in the quantized model.

    Weights that oscillate between two codes change the statistics from step to step, so that running averages are of weights
    that are gone (Nagel et al. 2022, arXiv:2203.11086, section 2.3.1). Batch norms normalise by the statistics of each batch
    meanwhile, as they do in training; all other modules are in evaluation mode, and nothing takes gradients. Sums over batches
    are exact, whatever the sizes and the order of the batches.

    Args:
        model: ``sim.model``, or any other.
        dataloader: batches; labels are left out by ``forward_fn``.
        num_batches: at most so many are used.
        forward_fn: ``forward_fn(model, batch)``; by default batches are given as the model's forward takes them.
        distributed: where a process group of several ranks is initialised, every rank calls this with batches of its own, which
            may be none, and all get the statistics of all batches, bit for bit the same however they are spread. ``False``
            looks at this rank alone.

    Returns:
        A handle: ``remove()``, or the end of its ``with`` block, brings the old statistics back.

    Raises:
        ModelError: the model has no batch norm with running statistics.
        CalibrationError: no batch came, or no batch norm was run.
        ConfigError: ``num_batches`` is not positive.
    """
    if num_batches < 1:
        raise ConfigError("reestimate_bn_stats", f"num_batches={num_batches}", "use at least 1")
    remedy = (
        "make the simulation from the model with its batch norms, train and re-estimate, then call "
        "fold_all_batch_norms_to_scale(sim)"
    )
    norms = _required_norms(model, "reestimate_bn_stats", remedy)
    undo = _remembered(norms)
    ranks = calibrating_ranks(distributed)
    with nullcontext() if ranks is None else ranks.together():
        try:
            pools = _observed(model, norms, dataloader, num_batches, forward_fn)
        finally:
            undo()
        _merge(pools, norms, ranks)
        found = _found(pools)
    with torch.no_grad():
        for path, norm in norms.items():
            statistics = found[path]
            assert norm.running_mean is not None and norm.running_var is not None
            if statistics is not None:
                norm.running_mean.copy_(statistics[0])
                norm.running_var.copy_(statistics[1])
    return Handle(undo)


def _merge(pools: dict[str, _Pool], norms: dict[str, Norm], ranks: Ranks | None) -> None:
    """Merge the pools of all ranks."""
    if ranks is None:
        return
    ranks.meet()
    ranks.require_equal(
        {path: str(norm.num_features).encode() for path, norm in norms.items()},
        "another rank has another model",
        "call reestimate_bn_stats on every rank for the same model, or with distributed=False",
    )
    for pool in pools.values():
        pool.merge(ranks)


def _found(pools: dict[str, _Pool]) -> dict[str, tuple[torch.Tensor, torch.Tensor] | None]:
    """The statistics of every batch norm."""
    if not any(pool.count or pool.broken for pool in pools.values()):
        raise CalibrationError(
            "reestimate_bn_stats", "no batch came, or no batch norm was run", "pass a non-empty list or DataLoader"
        )  # fmt: skip
    return {path: _statistics(path, pool) for path, pool in pools.items()}


def _statistics(path: str, pool: _Pool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Mean and variance; ``None`` with a warning where there was no data."""
    if pool.broken:
        raise CalibrationError(
            path,
            "its inputs have NaN or infinite values, so it has no statistics; every batch norm keeps those it had",
            "find the operator with check_model(model, batches), or leave the batch out",
        )
    if pool.count < 2:
        logger.warning("%s: no batch reached it, so it keeps its statistics", path)
        return None
    return pool.statistics()


def _observed(
    model: nn.Module,
    norms: dict[str, Norm],
    dataloader: Iterable[Any],
    num_batches: int,
    forward_fn: Callable[[nn.Module, Any], Any] | None,
) -> dict[str, _Pool]:
    pools = {path: _Pool(norm.num_features) for path, norm in norms.items()}
    device = model_device(model)
    with torch.no_grad(), evaluation(model), _in_training(norms), ExitStack() as stack:
        for path, norm in norms.items():
            hook = norm.register_forward_pre_hook(lambda _, args, pool=pools[path]: pool.add(args[0]))
            stack.callback(hook.remove)
        for i, batch in enumerate(dataloader):
            if i == num_batches:
                break
            if forward_fn is not None:
                forward_fn(model, batch)
            else:
                args, kwargs = as_call(to_device(batch, device))
                model(*args, **kwargs)
    return pools


@contextmanager
def _in_training(norms: dict[str, Norm]) -> Iterator[None]:
    for norm in norms.values():
        norm.training = True
    try:
        yield
    finally:
        for norm in norms.values():
            norm.training = False


@checks_arguments
def freeze_batch_norms(model: nn.Module, after: int = 0) -> Handle:
    """Use running statistics in batch norms from step ``after`` on, also in training mode.

    Args:
        model: ``sim.model``, or any other.
        after: so many forward passes in training mode go by before.

    Returns:
        A handle: ``remove()`` lets them go on as ``model.train()`` says.

    Raises:
        ModelError: the model has no batch norm with running statistics.
        ConfigError: ``after`` is negative.
    """
    if after < 0:
        raise ConfigError("freeze_batch_norms", f"after={after}", "use 0 to freeze them at once")
    norms = _required_norms(model, "freeze_batch_norms", "leave the call out")
    seen = 0
    switched: dict[int, Norm] = {}

    def before(module: nn.Module, args: Any) -> None:
        nonlocal seen
        if not module.training or not torch.is_grad_enabled():
            return
        seen += 1
        for norm in norms.values() if seen > after else ():
            if norm.training:
                switched[id(norm)] = norm
                norm.training = False

    hook = model.register_forward_pre_hook(before)

    def undo() -> None:
        hook.remove()
        for norm in switched.values():
            norm.training = model.training

    return Handle(undo)


Doubles = NDArray[np.float64]


@checks_arguments
def fold_all_batch_norms_to_scale(sim: QuantizationSimModel, *, progress: bool = True) -> algorithm.FoldReport:
    """Fold every batch norm into the scales of the layer before it; integer weights stay.

    The codes that training ended with stay what they are, while folding before a simulation, or into weights that are rounded
    anew, moves them. Weights become the values of their codes, and the encodings of the layer's output are those that the batch
    norm's output had. Where a factor is negative, codes change their sign; the lowest code of a grid without its opposite
    becomes the highest.

    Args:
        sim: calibrated, made from a model whose batch norms are not folded; changed in place.
        progress: show a progress bar on a terminal.

    Returns:
        A report; iterating it gives the folded ``(layer, batch norm)`` name pairs, ``report.refused`` has the others with the
        reasons: a weight with one scale per tensor, a batch norm before its layer, a weight in float.

    Raises:
        CalibrationError: the simulation is not calibrated.

    Reference: Jacob et al. 2018, arXiv:1712.05877, section 3.2, for the formula.
    """
    if not sim.calibrated:
        raise CalibrationError(
            "fold_all_batch_norms_to_scale",
            "the simulation is not calibrated, so there are no scales to fold into",
            "call sim.compute_encodings(batches) first, or fold the model before simulating it",
        )
    with sim._interceptor.occupancy.exclusive("fold_all_batch_norms_to_scale"):
        return fold_to_scale(sim, progress)


def fold_to_scale(
    sim: QuantizationSimModel, progress: bool, only: Container[str] | None = None
) -> algorithm.FoldReport:
    """:func:`fold_all_batch_norms_to_scale` for ``only`` some batch norms, by name."""
    restore = _remember(sim)
    report = algorithm.FoldReport()
    try:
        weights = _on_grid(sim)
        sim._interceptor.detach()
        device = model_device(sim.model)
        examples = [to_device(example, device) for example in sim.examples]
        view = TorchView(sim.model, examples)
        wanted, refused = _eligible(sim, *find_folds(view.graph(), view))
        wanted = {name for name in wanted if only is None or name in only}
        refused = [refusal for refusal in refused if only is None or refusal.bn in only]
        with torch.no_grad():
            for tensor, value in weights:
                tensor.copy_(value)
        with evaluation(sim.model):
            before = float_outputs(sim.model, examples[0])
            report = algorithm.fold_batch_norms(
                view,
                lambda: what_changed(lambda: float_outputs(sim.model, examples[0]), before),
                only=wanted,
                bar=partial(bar, enabled=progress),
            )
        _place_anew(sim, report.folded)
    except BaseException:
        report.undo()
        restore()
        raise
    report.keep()
    return algorithm.FoldReport(report.folded, [*refused, *report.refused], report.max_error)


def _remember(sim: QuantizationSimModel) -> Callable[[], None]:
    tensors = {name: tensor.detach().clone() for name, tensor in named_state(sim.model)}
    interceptor, placed = sim._interceptor, (sim.graph, sim.plan, sim.quantizers, sim.output_values)
    simulator = dict(vars(sim._simulator))

    def restore() -> None:
        if sim._interceptor is not interceptor:
            sim._interceptor.detach()
        with torch.no_grad():
            for name, tensor in named_state(sim.model):
                tensor.copy_(tensors[name])
        sim._interceptor = interceptor
        sim.graph, sim.plan, sim.quantizers, sim.output_values = placed
        vars(sim._simulator).update(simulator)
        interceptor.attach()

    return restore


def _on_grid(sim: QuantizationSimModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every quantized weight, dequantized."""
    found = []
    with torch.no_grad():
        for site in sim.quantizers.values():
            param = sim.graph.values[site.value].param
            if site.role == "weight" and site.enabled and param is not None:
                tensor = sim._interceptor.named_tensor(param)
                found.append((tensor, site.quantizer(tensor.detach())))
    return found


def _eligible(
    sim: QuantizationSimModel, folds: Sequence[Fold], refusals: Sequence[Refusal]
) -> tuple[set[str], list[Refusal]]:
    """Batch norms that can be folded into scales, and the reasons of the others."""
    wanted: set[str] = set()
    refused = list(refusals)
    for fold in folds:
        reason = _obstacle(sim, fold)
        if reason is None:
            wanted.update(fold.batch_norms)
        else:
            layers = {bn: layer for layer, bn in reversed(fold.pairs)}
            refused.extend(Refusal(layers[bn], bn, reason) for bn in fold.batch_norms)
    return wanted, refused


def _obstacle(sim: QuantizationSimModel, fold: Fold) -> str | None:
    if fold.direction != "backward":
        return "it stands before the layer, whose input channels have no scales of their own"
    for layer, _ in fold.layers:
        sites = _weights(sim, layer)
        if not sites:
            return f"the weight of {layer} is in float; fold before simulating"
        for site in sites:
            encoding = site.quantizer.required
            if not isinstance(encoding.format, IntFormat) or encoding.scale_format != FLOAT32_SCALE:
                return f"{site.name} has {encoding.format.name} with scales that cannot take any factor"
            if _along_channels(encoding, np.asarray(fold.of_layer(layer, fold.scale))) is None:
                return (
                    f"{site.name} has no scale per output channel; use PerChannel() for it, or fold before simulating"
                )
    return None


def _weights(sim: QuantizationSimModel, layer: str) -> list[Site]:
    return [s for s in sim.quantizers.values() if s.op == layer and s.role == "weight" and s.enabled]


def _along_channels(encoding: Encoding, factors: Doubles) -> Doubles | None:
    """The factors in a shape that broadcasts against the scales; ``None`` where scales are not per output channel."""
    granularity, shape = encoding.granularity, encoding.scale.shape
    if isinstance(granularity, PerChannel) and shape == factors.shape:
        return factors
    if isinstance(granularity, PerBlock) and len(granularity.channel_axes) == 1:
        axis = granularity.channel_axes[0] % len(shape)
        if shape[axis] == factors.size:
            return factors.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return None


def _scaled(encoding: Encoding, factors: Doubles) -> Encoding:
    """The encoding of ``weight * factors`` with the same codes, negated for negative factors."""
    along = _along_channels(encoding, factors)
    fmt = encoding.format
    assert along is not None and isinstance(fmt, IntFormat)
    exact = encoding.scale.astype(np.float64) * np.where(along == 0, 1.0, np.abs(along))
    scale = np.clip(exact, np.finfo(np.float32).tiny, None).astype(np.float32)
    turned = np.broadcast_to(along < 0, scale.shape)
    reflected = encoding.zero_point if encoding.symmetric else fmt.qmin + fmt.qmax - encoding.zero_point
    shift = None if encoding.shift is None else np.where(turned, -encoding.shift, encoding.shift)
    return replace(encoding, scale=scale, zero_point=np.where(turned, reflected, encoding.zero_point), shift=shift)


def _place_anew(sim: QuantizationSimModel, folds: Sequence[Fold]) -> None:
    """Record the folded model, and give its sites their earlier quantizers."""
    old = dict(sim.quantizers)
    stage = sim._simulator.stage
    scaled: dict[str, Encoding] = {}
    renamed: dict[str, str] = {}
    for fold in folds:
        for layer, chain in fold.layers:
            renamed[f"{layer}.output[0]"] = f"{chain[-1]}.output[0]"
            for site in _weights(sim, layer):
                scaled[site.name] = _scaled(site.quantizer.required, np.asarray(fold.of_layer(layer, fold.scale)))
    sim._interceptor = Interceptor(sim.model, sim._simulator)
    sim._interceptor.attach()
    sim._place()
    done: set[int] = set()
    for name, site in sim.quantizers.items():
        was: Any = old.get(name) or old.get(renamed.get(name, ""))
        if was is None or site.quantizer.derived or id(site.quantizer) in done:
            continue
        done.add(id(site.quantizer))
        site.quantizer.take_over(was.quantizer, scaled.get(name))
    sim._simulator.stage = stage
    sim._simulator.refresh_biases()
    missing = [s.name for s in sim.quantizers.values() if s.enabled and s.encoding is None and not s.quantizer.derived]
    assert not missing, missing  # supergroups place the quantizer at the same end of the chain
