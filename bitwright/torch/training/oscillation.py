"""Weights that oscillate between two codes while a quantized model trains: dampened, or frozen where they are mostly.

The gradient of a rounded weight is the same on both sides of a threshold, so that a weight whose best value lies between two
codes is driven across the threshold again and again, and batch norms never see the weights they are averaged over.

Reference: Nagel et al. 2022, arXiv:2203.11086.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bitwright.core.numerics.formats import IntFormat
from bitwright.errors import ConfigError, checks_arguments
from bitwright.torch.quantizers.fake_quantize import is_fast, make_grid
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
    """Squared distance of every weight inside its range from the value it is rounded to, summed: add it times a factor.

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
    """What is known of one weight tensor; codes are those of the grid of the moment."""

    codes: Tensor
    direction: Tensor  # of the last change of the code: -1, 0 or 1
    frequency: Tensor  # moving average of how often the direction turned
    average: Tensor  # moving average of the code
    frozen: Tensor


class WeightFreezing:
    """Freezes weights whose code turns back and forth too often, at the code they are at most of the time.

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
        """The part of the weights that is frozen."""
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
