"""Weights that oscillate between two codes in quantization-aware training: dampening, freezing, pivot gradients.

The gradient of a rounded weight is the same on both sides of a threshold, so that a weight whose best value lies between two
codes is driven across the threshold again and again, and batch norms never see the weights they are averaged over.

Reference: Nagel et al. 2022, arXiv:2203.11086.

Pivot gradient spiking: the straight-through estimator gives a value the same gradient wherever it lies between two thresholds,
although only a value close to a threshold changes its code in the next step. Multiplying the gradients of such values lets
codes settle earlier. AIMET 2.42 has it for CUDA in ``aimet_torch.experimental.pgs`` and names no paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bitwright.core.numerics.formats import IntFormat
from bitwright.errors import ConfigError, checks_arguments
from bitwright.torch.quantizers.fake_quantize import Grid, is_fast, make_grid
from bitwright.torch.quantizers.quantizer import Quantizer
from bitwright.torch.simulation.ranges import site_tensor

if TYPE_CHECKING:
    from bitwright.torch.simulation.quantsim import QuantizationSimModel


def quantized_weights(sim: QuantizationSimModel) -> Iterator[tuple[str, Quantizer, Tensor]]:
    """Site, quantizer and parameter of every trainable weight on an integer grid, each parameter once."""
    seen: set[int] = set()
    for site in sim.quantizers.values():
        tensor = site_tensor(sim, site) if site.role == "weight" and site.enabled else None
        if tensor is None or not tensor.requires_grad or id(tensor) in seen:
            continue
        if isinstance(site.quantizer, Quantizer) and is_fast(site.quantizer.required):
            seen.add(id(tensor))
            yield site.name, site.quantizer, tensor


@checks_arguments
def dampening_loss(sim: QuantizationSimModel) -> Tensor:
    """The summed squared distance of weights inside their range from their rounded values: a term for the loss.

    It pulls weights to the middle between two thresholds, away from where they oscillate. The factor grows in the course of
    training, for example from 0 to 1e-3 along a cosine (section 4.2 of the paper).

    Raises:
        CalibrationError: a weight has no encoding yet.
        ConfigError: no weight is quantized.
    """
    terms = []
    for _, quantizer, weight in quantized_weights(sim):
        rounded = quantizer(weight.detach()).detach()
        encoding = quantizer.required
        grid = make_grid(encoding, tuple(weight.shape), weight.device)
        view = grid.view or tuple(weight.shape)
        ratio = weight.detach().reshape(view) / grid.scale
        inside = ((ratio >= grid.lo) & (ratio <= grid.hi)).reshape(weight.shape)
        terms.append(((weight - rounded) * inside).float().square().sum())
    if not terms:
        raise _nothing("dampening_loss")
    return torch.stack(terms).sum()


def _nothing(function: str) -> ConfigError:
    return ConfigError(
        function,
        "no weight of the simulation is quantized on an integer grid and trains",
        "calibrate the simulation, and leave requires_grad of its weights as it is",
    )


@dataclass
class _Track:
    """Statistics of one weight tensor; codes are on the current grid."""

    codes: Tensor
    direction: Tensor  # of the last change of the code: -1, 0 or 1
    frequency: Tensor  # moving average of how often the direction turned
    average: Tensor  # moving average of the code
    frozen: Tensor


class WeightFreezing:
    """Freezes weights whose code oscillates too often, at their most frequent code.

    Call :meth:`step` after every step of the optimizer. A frozen weight is put back to its code in every step, so the optimizer
    need not know; it follows a learned scale.

    Args:
        sim: calibrated.
        threshold: a weight is frozen where its code turns in more than this part of the steps; the paper lowers it in the
            course of training from 0.04 to 0.01 (``freezing.threshold = ...``).
        momentum: of the moving averages.

    Raises:
        ConfigError: a number is not between 0 and 1, or no weight is quantized.

    Reference: Nagel et al. 2022, arXiv:2203.11086, algorithm 1.
    """

    @checks_arguments
    def __init__(self, sim: QuantizationSimModel, threshold: float = 0.02, momentum: float = 0.01) -> None:
        for name, number in (("threshold", threshold), ("momentum", momentum)):
            if not 0 < number < 1:
                raise ConfigError(f"WeightFreezing({name}={number})", "not between 0 and 1", "use 0.02 and 0.01")
        self.threshold, self.momentum = threshold, momentum
        self._weights = list(quantized_weights(sim))
        if not self._weights:
            raise _nothing("WeightFreezing")
        self._tracks: dict[str, _Track] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Follow the codes after a step of the optimizer, and put frozen weights back."""
        for name, quantizer, weight in self._weights:
            codes, scale = _codes(quantizer, weight)
            known = self._tracks.get(name)
            if known is None:
                zero = torch.zeros_like(codes)
                self._tracks[name] = _Track(codes, zero, zero.clone(), codes.clone(), zero.bool())
                continue
            self._follow(known, codes)
            if bool(known.frozen.any()):
                values = (known.codes.reshape(scale[1]) * scale[0]).reshape(weight.shape).to(weight.dtype)
                weight.copy_(torch.where(known.frozen, values, weight))

    def _follow(self, known: _Track, codes: Tensor) -> None:
        codes = torch.where(known.frozen, known.codes, codes)
        moved = torch.sign(codes - known.codes)
        turned = (moved * known.direction < 0).float()
        known.frequency.lerp_(turned, self.momentum)
        known.average.lerp_(codes, self.momentum)
        known.direction = torch.where(moved != 0, moved, known.direction)
        freeze = (known.frequency > self.threshold) & ~known.frozen
        known.codes = torch.where(freeze, known.average.round(), codes)
        known.frozen = known.frozen | freeze

    @property
    def frozen(self) -> float:
        """The fraction of frozen weights."""
        count = sum(weight.numel() for _, _, weight in self._weights)
        return sum(int(known.frozen.sum()) for known in self._tracks.values()) / count


def _codes(quantizer: Quantizer, weight: Tensor) -> tuple[Tensor, tuple[Tensor | float, tuple[int, ...]]]:
    """Codes less the zero point, in the shape of the weight; the scale, and the shape it broadcasts against."""
    encoding = quantizer.required
    assert isinstance(encoding.format, IntFormat)
    grid = make_grid(encoding, tuple(weight.shape), weight.device)
    view = grid.view or tuple(weight.shape)
    codes = (weight.detach().float().reshape(view) / grid.scale).round_().clamp_(grid.lo, grid.hi)
    return codes.reshape(weight.shape), (grid.scale, view)


class _Spiked(torch.autograd.Function):
    """The identity, with its gradient multiplied where the mask is set.

    The multiplier is a tensor without axes: ``torch.compile`` takes a number that changed between calls for a symbol, which
    it cannot hand to the backward of a function.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, near: Tensor, multiplier: Tensor) -> Tensor:
        ctx.save_for_backward(near, multiplier)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        near, multiplier = ctx.saved_tensors
        return torch.where(near, grad * multiplier, grad), None, None


@dataclass(frozen=True)
class PivotGradient:
    """Modifies the gradients of a quantizer's input.

    Attributes:
        eps: width of the zone about every threshold, in steps; above 0, at most 1.
        multiplier: of the gradients in it.

    Raises:
        ConfigError: (a ValueError) a number that has no meaning.
    """

    eps: float = 0.05
    multiplier: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.eps <= 1:
            raise ConfigError("eps", f"it is {self.eps}", "use a part of a step: above 0, at most 1; 0.05 is usual")
        if not (self.multiplier >= 0 and self.multiplier < float("inf")):
            raise ConfigError("multiplier", f"it is {self.multiplier}", "use a finite number of at least 0; 3 is usual")

    def __call__(self, x: Tensor, grid: Grid) -> Tensor:
        """``x`` with its gradient multiplied where it lies within ``eps / 2`` steps of a threshold of ``grid``."""
        steps = x.detach().reshape(grid.view or x.shape) / grid.scale
        near = (steps - steps.round()).abs() > (1 - self.eps) / 2
        multiplier = torch.full((), self.multiplier, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        spiked: Tensor = _Spiked.apply(x, near.reshape(x.shape), multiplier)
        return spiked


@checks_arguments
def pivot_gradients(sim: QuantizationSimModel, eps: float = 0.05, multiplier: float = 3.0) -> None:
    """Multiply the gradients of values close to where their code changes, at every integer quantizer of up to 16 bits.

    The forward pass stays as it is, bit for bit; gradients outside of a grid stay zero.

    Args:
        sim: changed in place; it need not be calibrated yet.
        eps: width of the zone about every threshold, in steps.
        multiplier: of the gradients in it; 1 leaves all gradients as they are.

    Raises:
        ConfigError: ``eps`` is not above 0 and at most 1, or ``multiplier`` is negative or not finite.
    """
    pivot = PivotGradient(eps, multiplier)
    for site in sim.quantizers.values():
        if isinstance(site.quantizer, Quantizer):
            site.quantizer.pivot = None if multiplier == 1 else pivot
