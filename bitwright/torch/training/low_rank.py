"""Train low-rank corrections of frozen integer weights, and merge them into the grid at the end.

A weight on its grid stays what it is, ``W_q``; the layer computes with ``W_q + B A``, of which ``A [R, K]`` and ``B [O, R]``
train (Hu et al. 2021, arXiv:2106.09685, section 4.1). :meth:`LowRankCorrection.merge` rounds ``W_q + B A`` to the same grid, so
that a file holds integers and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bitwright.errors import ConfigError, checks_arguments
from bitwright.torch.quantizers.quantizer import Quantizer
from bitwright.torch.training.oscillation import quantized_weights
from bitwright.torch.training.partial import module_paths, owner_within

if TYPE_CHECKING:
    from bitwright.torch.simulation.quantsim import QuantizationSimModel


class _Pair(nn.Module):
    """The two factors for one weight; ``B`` starts at zero, so that nothing changes at first.

    Args:
        weight: of at least two axes; the first is that of outputs, as a matrix has it.
        rank: of the product.
        scale: of the product.
    """

    def __init__(self, weight: Tensor, rank: int, scale: float) -> None:
        super().__init__()
        outputs, inputs = weight.shape[0], weight[0].numel()
        self.a = nn.Parameter(torch.empty(rank, inputs, device=weight.device))
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=weight.device))
        nn.init.kaiming_uniform_(self.a, math.sqrt(5))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        """``weight`` with the correction added, in its dtype."""
        return weight + ((self.b @ self.a) * self.scale).reshape(weight.shape).to(weight.dtype)


class LowRankCorrection(nn.Module):
    """Low-rank corrections of the quantized weights of some layers; its parameters go to an optimizer.

    From now on the weights take no gradients. Files and checkpoints of the simulation are refused until :meth:`merge` or
    :meth:`remove` is called; ``state_dict()`` of this module keeps the factors meanwhile.

    Args:
        sim: calibrated.
        rank: of each correction; at most the smaller side of the weight is used.
        layers: names or globs of modules; what lies below a module counts to it.
        alpha: the product is multiplied by ``alpha / rank``; ``None`` means ``rank``, a factor of 1.

    Raises:
        ConfigError: the rank is not positive, no weight of ``layers`` is quantized on an integer grid and trains, or a weight
            has a correction already.

    Example:
        ``correction = LowRankCorrection(sim, rank=8)``; ``torch.optim.Adam(correction.parameters(), lr=1e-3)``; after training
        ``correction.merge()``.
    """

    @checks_arguments
    def __init__(
        self, sim: QuantizationSimModel, rank: int = 8, *, layers: str | Iterable[str] = "*", alpha: float | None = None
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ConfigError("LowRankCorrection", f"rank={rank}", "use at least 1")
        paths = module_paths(sim.model, layers, "LowRankCorrection")
        chosen = [
            (name, quantizer, weight)
            for name, quantizer, weight in quantized_weights(sim)
            if weight.ndim > 1 and owner_within(name, paths)
        ]
        if not chosen:
            raise ConfigError(
                "LowRankCorrection",
                f"no weight of layers={layers!r} is quantized on an integer grid and trains",
                "calibrate the simulation, or choose other layers: print(sim.coverage()) lists them",
            )
        for name, quantizer, _ in chosen:
            if quantizer.correction is not None:
                raise ConfigError(
                    name, "it has a low-rank correction already", "call merge() or remove() of that one first"
                )
        self.pairs = nn.ModuleDict()
        self._weights: dict[str, tuple[Quantizer, Tensor]] = {}
        for name, quantizer, weight in chosen:
            most = min(rank, weight.shape[0], weight[0].numel())
            pair = _Pair(weight, most, 1.0 if alpha is None else alpha / most)
            self.pairs[name.replace(".", "/")] = pair
            self._weights[name] = quantizer, weight
            weight.requires_grad_(False)
            quantizer.correction = pair

    @property
    def layers(self) -> tuple[str, ...]:
        """The sites of the corrected weights; empty after :meth:`merge` or :meth:`remove`."""
        return tuple(self._weights)

    @torch.no_grad()
    def merge(self) -> dict[str, float]:
        """Round every corrected weight to its grid, and remove the corrections.

        Returns:
            Site -> the part of the correction, by norm, that the grid could not take: what was rounded away or clipped. Where
            much is lost, more bits, a higher rank of training, or training of the weights themselves helps.
        """
        lost = {}
        for name, (quantizer, weight) in self._weights.items():
            pair, quantizer.correction = quantizer.correction, None
            assert pair is not None
            before = quantizer(weight.detach())
            wanted = pair(before)
            weight.copy_(quantizer(wanted))
            size = float((wanted - before).norm())
            lost[name] = float((weight - wanted).norm()) / size if size else 0.0
        self.remove()
        return lost

    def remove(self) -> None:
        """Remove the corrections; the weights are the original or merged ones, and train again."""
        for quantizer, weight in self._weights.values():
            quantizer.correction = None
            weight.requires_grad_(True)
        self._weights = {}
