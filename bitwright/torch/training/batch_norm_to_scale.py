"""Batch norms of a trained simulation absorbed by the scales of the weights before them: integer weights stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from bitwright.algorithms.folding import batch_norm_fold as algorithm
from bitwright.algorithms.folding.batch_norm_search import find_folds
from bitwright.algorithms.folding.folds import Fold, Refusal
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT32_SCALE, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel
from bitwright.core.simulation.sites import Site
from bitwright.errors import CalibrationError, checks_arguments
from bitwright.progress import progress as bar
from bitwright.torch.adapters.opened import float_outputs, what_changed
from bitwright.torch.adapters.view import TorchView
from bitwright.torch.calls.batches import evaluation, model_device, to_device
from bitwright.torch.calls.trees import named_state
from bitwright.torch.interception.intercept import Interceptor

if TYPE_CHECKING:
    from bitwright.torch.simulation.quantsim import QuantizationSimModel

Doubles = NDArray[np.float64]


@checks_arguments
def fold_all_batch_norms_to_scale(sim: QuantizationSimModel, *, progress: bool = True) -> algorithm.FoldReport:
    """Fold every batch norm into the layer before it, with the integer weights as they are: the scales take its factors.

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
        return _folded(sim, progress)


def _folded(sim: QuantizationSimModel, progress: bool) -> algorithm.FoldReport:
    restore = _remember(sim)
    report = algorithm.FoldReport()
    try:
        weights = _on_grid(sim)
        sim._interceptor.detach()
        device = model_device(sim.model)
        examples = [to_device(example, device) for example in sim.examples]
        view = TorchView(sim.model, examples)
        wanted, refused = _eligible(sim, *find_folds(view.graph(), view))
        with torch.no_grad():
            for tensor, value in weights:
                tensor.copy_(value)
        with evaluation(sim.model):
            before = float_outputs(sim.model, examples[0])
            report = algorithm.fold_all_batch_norms(
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
    """Every quantized weight with the value of its codes."""
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
    """Batch norms that scales can take, and why the others stay."""
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
    """The encoding of ``weight * factors`` with the same codes, or those of the other sign."""
    along = _along_channels(encoding, factors)
    fmt = encoding.format
    assert along is not None and isinstance(fmt, IntFormat)
    exact = encoding.scale.astype(np.float64) * np.where(along == 0, 1.0, np.abs(along))
    scale = np.clip(exact, np.finfo(np.float32).tiny, None).astype(np.float32)
    turned = np.broadcast_to(along < 0, scale.shape)
    reflected = encoding.zero_point if encoding.symmetric else fmt.qmin + fmt.qmax - encoding.zero_point
    return replace(encoding, scale=scale, zero_point=np.where(turned, reflected, encoding.zero_point))


def _place_anew(sim: QuantizationSimModel, folds: Sequence[Fold]) -> None:
    """Record the folded model and give its sites the quantizers of the sites they were."""
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
