"""Reconstruction: learn rounded weights so that a layer or block reproduces its float outputs.

One loop serves every variant. A variant is a row of :data:`VARIANTS`: what is reconstructed together (layers or blocks),
how a weight on the grid is parametrised (AdaRound, FlexRound), and whether quantizers of activations are dropped at
random meanwhile (QDrop). Inputs come from the quantized predecessor, targets from the float model.

AdaRound (Nagel et al. 2020, arXiv:2004.10568) learns for every weight whether it is rounded up or down. Letters of the
paper: ``V`` is learned, ``h(V)`` in [0, 1] is how far a weight is rounded up, ``beta`` anneals the regulariser that drives
every ``h`` to 0 or 1.

FlexRound (Lee et al. 2023, arXiv:2306.00317, eq. 2) learns a divisor: ``W_q = s1 round(W / (s1 S2 s3))``, with ``s1`` the
scale of the grid, ``S2`` one factor per weight and ``s3`` one per output channel. The factors are learned as logarithms,
so they stay positive (as in AdaScale); all start at 1, where the result is rounding to nearest.

AutoRound (Cheng et al. 2023, arXiv:2309.05516, eqs. 3 to 5) learns what is added to each weight before it is rounded, at most
half a step, and the fractions of its range that each scale covers, by the signs of their gradients at a rate that falls to zero.

OmniQuant's learnable weight clipping (Shao et al. 2023, arXiv:2308.13137, eq. 2) learns these fractions alone, by Adam. They are
confined by clipping instead of a sigmoid. Its equivalent transformation is not learned: see AWQ and SmoothQuant.

Distillation block by block trains the weights themselves, and their ranges, through the rounding (Chen et al. 2024,
arXiv:2407.11062, section 3.2, Block-AP), where the others choose among the neighbours of a weight. Here the weights move in steps
of their grid, so that one rate serves every layer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bitwright.core.graph.operators import TRAITS
from bitwright.errors import ConfigError
from bitwright.methods.rounding.driver import Choice, Run, Task, Walk, are_pairs, check_finite, check_rows
from bitwright.methods.rounding.matrices import RECURRENT, Grid, Layer, grid_encoding, sample_rows
from bitwright.methods.rounding.program import Program, State, Step, Unit, block_units, layer_units, run_step

ZETA, GAMMA = 1.1, -0.1  # the stretch of the sigmoid, section 3.2


def rectified_sigmoid(v: Tensor) -> Tensor:
    """``h(V) = clip(sigmoid(V) (zeta - gamma) + gamma, 0, 1)``, eq. 23."""
    return torch.clamp(torch.sigmoid(v) * (ZETA - GAMMA) + GAMMA, 0, 1)


def inverse_rectified_sigmoid(h: Tensor) -> Tensor:
    """``V`` with ``h(V) = h``, for ``h`` in [0, 1].

    >>> h = torch.tensor([0.0, 0.25, 1.0])
    >>> torch.allclose(rectified_sigmoid(inverse_rectified_sigmoid(h)), h)
    True
    """
    return -torch.log((ZETA - GAMMA) / (h - GAMMA) - 1)


def regulariser(h: Tensor, beta: float) -> Tensor:
    """``sum of 1 - |2 h - 1|^beta``, eq. 24: zero when every ``h`` is 0 or 1."""
    return (1 - (2 * h - 1).abs().pow(beta)).sum()


def annealed_beta(done: float, beta_range: tuple[float, float], warm_start: float) -> float | None:
    """The exponent after the fraction ``done`` of all iterations; ``None`` during the warm start.

    Cosine from the first value of ``beta_range`` to the second.
    """
    if done < warm_start:
        return None
    start, end = beta_range
    along = (done - warm_start) / (1 - warm_start)
    return end + 0.5 * (start - end) * (1 + math.cos(along * math.pi))


class _SoftRound(torch.autograd.Function):
    """``scale * clip(floor + gap h(V), lo, hi)``; its gradient has the regulariser's added.

    By hand, because the power function costs as much as the rest of the layer: it is needed once, not twice, and the
    regulariser's own value never.
    """

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, floor: Tensor, gap: Tensor, gate: Tensor, grid: Grid, weight: float, beta: float
    ) -> Tensor:
        sigmoid = torch.sigmoid(v)
        h = (sigmoid * (ZETA - GAMMA)).add_(GAMMA).clamp_(0, 1)
        codes = floor + (h if grid.format is None else gap * h)
        ctx.save_for_backward(sigmoid, h)
        ctx.gate, ctx.weight, ctx.beta = gate, weight, beta
        return torch.clamp(codes, grid.lo, grid.hi).mul_(grid.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        sigmoid, h = ctx.saved_tensors
        result = ctx.gate * grads[0]  # in this order: the result lies as the weights do, not transposed
        if ctx.weight:
            centred = (h * 2).sub_(1)
            slope = centred.abs().pow_(ctx.beta - 1).copysign_(centred)
            result.add_(slope, alpha=-2 * ctx.beta * ctx.weight)
        # of the sigmoid, stretched, and of the clamp after it: one pass each
        result = torch.ops.aten.sigmoid_backward(result, sigmoid).mul_(ZETA - GAMMA)
        return torch.ops.aten.hardtanh_backward(result, h, 0, 1), None, None, None, None, None, None


class AdaptiveRounding:
    """One weight matrix with learned rounding.

    Args:
        w: the float weights, ``[G, O, K]`` or any shape that ``grid`` broadcasts against.
        grid: where they may go.
    """

    def __init__(self, w: Tensor, grid: Grid) -> None:
        self.grid = grid
        ratio = w / grid.scale
        self.floor, self.gap = grid.below(ratio)
        # a step of the scale where both codes are on the grid: elsewhere the output does not depend on the choice
        self.gate = grid.scale * self.gap * ((self.floor >= grid.lo) & (self.floor < grid.hi))
        share = ((ratio - self.floor) / self.gap).clamp(0, 1)
        self.v = inverse_rectified_sigmoid(share).requires_grad_()

    def parameters(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimiser, each with a factor of the learning rate."""
        return [{"params": [self.v], "factor": 1.0}]

    def soft(self, weight: float = 0.0, beta: float = 2.0) -> Tensor:
        """The weights between two codes; ``weight`` of the regulariser with exponent ``beta`` in their gradient."""
        result: Tensor = _SoftRound.apply(self.v, self.floor, self.gap, self.gate, self.grid, weight, beta)
        return result

    @torch.no_grad()
    def undecided(self) -> float:
        """Fraction of the weights whose ``h`` is neither 0 nor 1."""
        h = rectified_sigmoid(self.v)
        return float(((h > 1e-3) & (h < 1 - 1e-3)).float().mean())

    @torch.no_grad()
    def hard(self) -> tuple[Tensor, Grid]:
        """The chosen codes, and their grid."""
        up = (self.v >= 0).to(self.floor.dtype) * self.gap
        return torch.clamp(self.floor + up, self.grid.lo, self.grid.hi), self.grid


class LearnedDivision:
    """One weight matrix with a learned division.

    Args:
        w: the float weights, ``[G, O, K]``.
        grid: where they may go; its scale is learned per row where every row has scales of its own.
    """

    def __init__(self, w: Tensor, grid: Grid) -> None:
        self.w, self.grid = w, grid
        self.element = torch.zeros_like(w).requires_grad_()
        self.row = w.new_zeros((*w.shape[:2], 1)).requires_grad_()
        self.step = w.new_zeros((*w.shape[:2], 1) if grid.own_rows else (1, 1, 1)).requires_grad_()

    def parameters(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimiser, each with a factor of the learning rate."""
        return [{"params": [self.element, self.row], "factor": 1.0}, {"params": [self.step], "factor": 0.5}]

    def _scale(self) -> Tensor:
        scale = self.grid.scale * self.step.exp()
        with torch.no_grad():
            difference = self.grid.stored(scale) - scale
        return scale + difference

    def _ratio(self, scale: Tensor) -> Tensor:
        return self.w / (scale * (self.element + self.row).exp())

    def soft(self, weight: float = 0.0, beta: float = 2.0) -> Tensor:
        """The weights on the grid; gradients pass the rounding straight."""
        scale = self._scale()
        ratio = self._ratio(scale)
        if self.grid.format is not None:
            ratio = torch.clamp(ratio, self.grid.lo, self.grid.hi)
        with torch.no_grad():
            difference = (self.grid.to_codes(ratio) if self.grid.format is None else self.grid.rounded(ratio)) - ratio
        return torch.clamp(ratio + difference, self.grid.lo, self.grid.hi) * scale

    @torch.no_grad()
    def hard(self) -> tuple[Tensor, Grid]:
        """The codes that were learned, and the grid they lie on."""
        scale = self.grid.stored(self._scale())
        return self.grid.rounded(self._ratio(scale)), replace(self.grid, scale=scale)


class SignedRounding:
    """One weight matrix whose rounding and range are moved by the signs of gradients (AutoRound).

    Args:
        w: the float weights, ``[G, O, K]``.
        grid: where they may go, with ``index``; its zero points are learned along where it has them.
    """

    def __init__(self, w: Tensor, grid: Grid) -> None:
        assert grid.index is not None
        self.w, self.grid = w, grid
        self.offset = torch.zeros_like(w).requires_grad_()
        count = int(grid.index.max()) + 1
        self.low, self.high = (w.new_ones(count).requires_grad_() for _ in range(2))

    def parameters(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimiser, each with a factor of the learning rate."""
        return [{"params": [self.offset, *self._ends()], "factor": 1.0}]

    def _ends(self) -> list[Tensor]:
        return [self.low, self.high] if self.grid.steps and not self.grid.stores_offsets else [self.high]

    @torch.no_grad()
    def confine(self) -> None:
        """Clamp offsets to half a step, and ranges to between half and all of their original width."""
        self.offset.clamp_(-0.5, 0.5)
        self.low.clamp_(0.5, 1.0)
        self.high.clamp_(0.5, 1.5 if self.grid.format is not None else 1.0)

    def _grid(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scale, lowest and highest code of every weight; gradients pass roundings straight."""
        grid, index = self.grid, self.grid.index
        assert index is not None
        if not grid.steps or grid.stores_offsets:
            scale = grid.scale * self.high[index]
            with torch.no_grad():
                stored = grid.stored(scale) - scale
            scale = scale + stored
            if not grid.stores_offsets:
                return scale, grid.lo, grid.hi
            lo = grid.lo * grid.scale / scale  # the lowest value stays
            return scale, lo, lo + grid.steps
        # ends move towards zero, or towards the middle of the grid where zero may lie beyond it
        middle = (grid.lo + grid.hi) / 2 if grid.free else 0.0
        low, high = (
            (middle + (end - middle) * part[index]) * grid.scale
            for end, part in ((grid.lo, self.low), (grid.hi, self.high))
        )
        scale = (high - low) / grid.steps
        with torch.no_grad():
            stored = grid.stored(scale.clamp(min=torch.finfo(torch.float32).tiny)) - scale
        scale = scale + stored
        lo = low / scale
        if grid.free:
            return scale, lo, lo + grid.steps
        with torch.no_grad():
            whole = lo.round().clamp(-grid.steps, 0) - lo
        lo = lo + whole
        return scale, lo, lo + grid.steps

    def _codes(self, scale: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
        ratio = self.w / scale
        if self.grid.format is None:
            moved = ratio + self.offset
            with torch.no_grad():
                difference = replace(self.grid, lo=lo).to_codes(moved) - moved
            return torch.clamp(moved + difference, lo, hi)
        # cut first: the rounding of a float format saturates, and what is beyond its ends moves with the scale
        moved = torch.clamp(ratio + self.offset * self.grid.below(ratio.detach())[1], lo, hi)
        with torch.no_grad():
            difference = self.grid.rounded(moved) - moved
        return moved + difference

    def soft(self, weight: float = 0.0, beta: float = 2.0) -> Tensor:
        """The weights on the grid; gradients pass the rounding straight."""
        scale, lo, hi = self._grid()
        return self._codes(scale, lo, hi) * scale

    @torch.no_grad()
    def hard(self) -> tuple[Tensor, Grid]:
        """The codes that were learned, and the grid they lie on."""
        scale, lo, hi = self._grid()
        codes = self._codes(scale, lo, hi)
        if self.grid.format is not None:
            return self.grid.rounded(codes), replace(self.grid, scale=scale)
        if not self.grid.free:
            codes, lo, hi = codes.round(), lo.round(), hi.round()
        return codes, replace(self.grid, scale=scale, lo=lo, hi=hi)


class LearnedClipping(SignedRounding):
    """One weight matrix with learned ends of ranges and nearest rounding."""

    def parameters(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimiser, each with a factor of the learning rate."""
        return [{"params": self._ends(), "factor": 1.0}]


class TrainedWeights(SignedRounding):
    """One weight matrix that is trained, with the ends of its ranges, straight through the rounding.

    ``offset`` is how far a weight has moved, in steps of its grid, without bounds.
    """

    def parameters(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimiser, each with a factor of the learning rate."""
        moved, *ends = super().parameters()[0]["params"]
        return [{"params": [moved], "factor": 1.0}, {"params": ends, "factor": 0.1}]

    @torch.no_grad()
    def confine(self) -> None:
        """Clamp ranges to between half and all of their original width."""
        moved = self.offset.clone()
        super().confine()
        self.offset.copy_(moved)


logger = logging.getLogger("bitwright")

_CHECK = 250  # iterations between two looks at whether everything is decided
_EVALUATE = 4096  # rows at once when an error is measured
# The paper's regulariser weight of 0.01 per weight is relative to losses in the units of activations. Here losses are
# relative to that of nearest rounding, so that one weight serves every layer: 0.01 stands for 10 on their mean.
_REGULARISER = 1000.0


#: a weight matrix on its way to the grid
Rounding = AdaptiveRounding | LearnedDivision | SignedRounding


@dataclass(frozen=True)
class Settings:
    """Options of the optimisation loop.

    Attributes:
        iterations: steps of the optimiser per layer or block.
        batch: rows of a layer's matrix product per step; blocks take whole samples, as many as the data's batches have.
        lr: learning rate; the variant's own by default.
        reg_param: weight of the rounding regulariser.
        beta_range: exponents between which the regulariser is annealed.
        warm_start: fraction of the iterations without regulariser.
        rows: most rows of a layer that are drawn from the data.
        drop: probability for QDrop; the variant's own by default.
    """

    iterations: int = 2000
    batch: int = 256
    lr: float | None = None
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20.0, 2.0)
    warm_start: float = 0.2
    rows: int = 1 << 15
    drop: float | None = None

    def __post_init__(self) -> None:
        checks = {
            "iterations": self.iterations >= 1,
            "batch": self.batch >= 1,
            "rows": self.rows >= 1,
            "warm_start": 0 <= self.warm_start < 1,
            "drop": self.drop is None or 0 <= self.drop <= 1,
            "lr": self.lr is None or self.lr > 0,
        }
        for name, fine in checks.items():
            if not fine:
                remedy = "counts are at least 1, warm_start is in [0, 1), drop in [0, 1], lr above 0"
                raise ConfigError(name, f"it is {getattr(self, name)!r}", remedy)


@dataclass(frozen=True)
class SignedSettings(Settings):
    """Options of AutoRound: as :class:`Settings`, with the iterations of the paper."""

    iterations: int = 200


@dataclass(frozen=True)
class Variant:
    """A row of :data:`VARIANTS`.

    Attributes:
        together: what is reconstructed together.
        rounding: how a weight is parametrised; float weights and their grid -> :class:`Rounding`.
        drop: probability that an activation quantizer lets an element through in float.
        lr: learning rate of Adam; with ``signed``, ``None`` is one over the iterations.
        signed: whether only the signs of gradients count, at a rate that falls linearly to zero.
        settings: the class of its options.
    """

    together: Literal["layer", "block"]
    rounding: Callable[[Tensor, Grid], Rounding]
    drop: float = 0.0
    lr: float | None = 0.05
    signed: bool = False
    settings: type[Settings] = Settings


VARIANTS: dict[str, Variant] = {
    "adaround": Variant("layer", AdaptiveRounding),
    "brecq": Variant("block", AdaptiveRounding),
    "qdrop": Variant("block", AdaptiveRounding, drop=0.5),
    "flexround": Variant("block", LearnedDivision, drop=0.5, lr=2e-3),
    "learned_clipping": Variant("block", LearnedClipping, lr=5e-3),
    "distill": Variant("block", TrainedWeights, lr=0.03),
    "autoround": Variant("block", SignedRounding, lr=None, signed=True, settings=SignedSettings),
}


# ---------------------------------------------------------------------------------------------------------- the loop


def optimise(
    problem: LayerProblem | BlockProblem,
    roundings: Sequence[Rounding],
    settings: Settings,
    lr: float,
    scale: float,
    generator: torch.Generator,
    signed: bool = False,
) -> int:
    """Optimise ``roundings`` for the loss of ``problem``, until every weight lies on its grid.

    Args:
        scale: the loss is divided by it.
        signed: move by the signs of gradients alone.

    Returns:
        Iterations done: fewer than asked for when every weight was decided.
    """
    groups = [{"params": g["params"], "lr": lr * g["factor"]} for r in roundings for g in r.parameters()]
    optimiser: _Signs | torch.optim.Adam = _Signs(groups) if signed else torch.optim.Adam(groups, fused=True)
    count = sum(r.soft().numel() for r in roundings)
    anneals = all(isinstance(r, AdaptiveRounding) for r in roundings)
    weight, beta = 0.0, 2.0
    for i in range(settings.iterations):
        done = i / settings.iterations
        if i % _CHECK == 0 and i > settings.warm_start * settings.iterations and _all_decided(roundings):
            return i
        if i % _CHECK == 0:
            drawn = min(_CHECK, settings.iterations - i)
            index = torch.randint(problem.size, (drawn, problem.batch), generator=generator)
        if anneals:
            weight, beta = _regulariser(settings, done, count)
        elif isinstance(optimiser, _Signs):
            optimiser.left = 1 - done
        else:
            _lower_rates(optimiser, 1 - done)
        loss = problem.loss(index[i % _CHECK], [r.soft(weight, beta) for r in roundings]) / scale
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        _confine(roundings)
    return settings.iterations


class _Signs:
    """Moves by the signs of gradients, at ``left`` of the first rate.

    Args:
        groups: of parameters, each with its rate, as optimisers of torch take them.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.groups, self.left = groups, 1.0

    def zero_grad(self) -> None:
        """Forget gradients."""
        for group in self.groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        for group in self.groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * self.left)


def _confine(roundings: Sequence[Rounding]) -> None:
    """Clamp parameters to their bounds."""
    for rounding in roundings:
        if isinstance(rounding, SignedRounding):
            rounding.confine()


def _all_decided(roundings: Sequence[Rounding]) -> bool:
    """Whether all roundings are decided; a learned division never is."""
    return all(isinstance(r, AdaptiveRounding) and not r.undecided() for r in roundings)


def _regulariser(settings: Settings, done: float, count: int) -> tuple[float, float]:
    """Weight and exponent of the rounding regulariser for ``count`` weights after the fraction ``done`` of iterations."""
    beta = annealed_beta(done, settings.beta_range, settings.warm_start)
    return (0.0, 2.0) if beta is None else (_REGULARISER * settings.reg_param / count, beta or 2.0)


def _lower_rates(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the learning rates as they are: over the iterations the factors compound.

    With factors of 1 - i/n the rate after i of n iterations is about exp(-i**2 / 2n) of the first: nearly all that is
    learned is learned in the first 2 sqrt(n) iterations.
    """
    for group in optimiser.param_groups:
        group["lr"] *= factor


def solve(task: Task, variant: Variant, settings: Settings) -> list[Choice]:
    """Choose the weights of a unit by ``variant``; nearest rounding stays where learning is not better."""
    layers = list(task.layers.values())
    weights = [task.weight(layer) for layer in layers]
    grids = [task.grid(layer, w) for layer, w in zip(layers, weights, strict=True)]
    problem = _problem(task, variant, settings)
    codes = [(grid.nearest(w), grid) for grid, w in zip(grids, weights, strict=True)]
    before = problem.error(_values(codes))
    roundings = [variant.rounding(w, grid) for w, grid in zip(weights, grids, strict=True)]
    if before > 0:
        own = 1 / settings.iterations if variant.lr is None else variant.lr
        lr = own if settings.lr is None else settings.lr
        optimise(problem, roundings, settings, lr, before, task.generator, variant.signed)
    learned = [r.hard() for r in roundings]
    after, note = problem.error(_values(learned)), ""
    if after < before:
        codes = learned
    else:
        after, note = before, "nearest rounding kept"
    return [
        Choice(layer.name, layer.tensor(w), grid_encoding(grid, task.encoding(layer), layer), before, after, note)
        for layer, w, (_, grid) in zip(layers, _values(codes), codes, strict=True)
    ]


def _problem(task: Task, variant: Variant, settings: Settings) -> LayerProblem | BlockProblem:
    layers = list(task.layers.values())
    if len(layers) == 1 and (variant.together == "layer" or not _is_block(task)):
        return layer_problem(task, layers[0], task.weight(layers[0]), settings)
    return BlockProblem(task, layers, settings.drop if settings.drop is not None else variant.drop)


def _values(codes: Sequence[tuple[Tensor, Grid]]) -> list[Tensor]:
    return [grid.values(of_weight) for of_weight, grid in codes]


# ------------------------------------------------------------------------------------------------------------ layers


@dataclass
class LayerProblem:
    """Rows drawn from a layer's inputs: ``f(X_q W^T + b_q)`` should equal ``f(X W^T + b)``.

    Attributes:
        x: inputs from the quantized predecessor, ``[G, P, K]``.
        y: outputs of the float model, ``[G, P, O]``.
        bias: as the simulation adds it, ``[G, 1, O]``, or ``None``.
        function: the activation function after the layer, or ``None``.
    """

    x: Tensor
    y: Tensor
    bias: Tensor | None
    function: Callable[[Tensor], Tensor] | None
    batch: int
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = int(self.x.shape[1])
        self.batch = min(self.batch, self.size)

    def loss(self, index: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Squared errors of the rows ``index``, summed over outputs and averaged over rows."""
        if len(index) == self.size:
            return self._squared(self.x, self.y, weights[0])
        index = index.to(self.x.device)
        return self._squared(self.x.index_select(1, index), self.y.index_select(1, index), weights[0])

    def _squared(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (predict(x, w, self.bias, self.function) - y).square().sum() / x.shape[1]

    @torch.no_grad()
    def error(self, weights: Sequence[Tensor]) -> float:
        """The error over all drawn rows."""
        parts = zip(self.x.split(_EVALUATE, 1), self.y.split(_EVALUATE, 1), strict=True)
        return sum(float(self._squared(x, y, weights[0])) * x.shape[1] for x, y in parts) / max(1, self.size)


def predict(x: Tensor, w: Tensor, bias: Tensor | None, function: Callable[[Tensor], Tensor] | None) -> Tensor:
    """``f(x w^T + b)``: ``[G, P, K]``, ``[G, O, K]`` -> ``[G, P, O]``."""
    y = x @ w.transpose(1, 2) if bias is None else torch.baddbmm(bias, x, w.transpose(1, 2))
    return y if function is None else function(y)


def layer_problem(task: Task, layer: Layer, w: Tensor, settings: Settings) -> LayerProblem:
    """Draw rows of the layer's inputs and compute their targets."""
    walk = task.walk
    total = sum(layer.positions(real) for real, _ in walk.inputs(layer))
    groups, _, inputs = (int(n) for n in w.shape)
    check_rows(walk, layer, total, inputs)
    most = min(total, settings.rows)
    places = (walk.store.empty((groups, most, inputs)), walk.store.empty((groups, most, inputs)))
    places = (places[0].to(w.device), places[1].to(w.device))
    sample_rows(layer, walk.inputs(layer), total, most, task.generator, places)
    real, quantized = layer_biases(task, layer, w)
    function = _function(task)
    with torch.no_grad():
        y = predict(places[0], w, real, function)
    check_finite(layer, places[1])
    check_finite(layer, y)
    return LayerProblem(places[1], y, quantized, function, settings.batch)


def layer_biases(task: Task, layer: Layer, w: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The float and the quantized bias, ``[G, 1, O]``."""
    step, model = task.walk.step(layer.op), task.walk.model
    bias_free = layer.is_routed or layer.type in RECURRENT
    if bias_free or 2 not in step.ports or not layer.has_rows_as_outputs:
        return None, None
    slot = step.ports[2]
    bias = task.walk.constants(layer.op).constants[step.reads[slot]].detach()
    site = next((s for place, s in step.operands if place == slot), None)
    quantized = bias if site is None else model.quantize(site, bias).detach()
    shape = (int(w.shape[0]), 1, int(w.shape[1]))
    return bias.float().reshape(shape), quantized.float().reshape(shape)


def _function(task: Task) -> Callable[[Tensor], Tensor] | None:
    """The activation function after the layer: the unit's other operator."""
    (layer,) = task.layers.values()
    others = [op for op in task.unit.ops if op != layer.op]
    if len(others) != 1 or not layer.has_rows_as_outputs:
        return None
    if (
        task.walk.model.graph().op(others[0]).type not in TRAITS["activation"]
    ):  # a flatten, say: no function of one number
        return None
    step = task.walk.step(others[0])
    constants = task.walk.constants(others[0]).constants
    free = [i for i, value in enumerate(step.reads) if value not in constants]
    if len(free) != 1 or not step.differentiable:
        return None
    given = [constants.get(value) for value in step.reads]

    def function(y: Tensor) -> Tensor:
        return step.function([y if t is None else t for t in given])[0]

    return function


# ------------------------------------------------------------------------------------------------------------ blocks


def _is_block(task: Task) -> bool:
    """Whether the unit is more than a layer with a function after it."""
    return len(task.unit.ops) > 2


def why_no_block(walk: Walk, unit: Unit) -> str | None:
    """The reason why the operators of a unit cannot be reconstructed together."""
    reasons = (_why_no_block_of(r, walk, unit) for r in walk.runs)
    return next((reason for reason in reasons if reason is not None), None)


def _why_no_block_of(r: Run, walk: Walk, unit: Unit) -> str | None:
    span = r.program.span(unit.ops)
    if span is None:
        return "some batches do not run it"
    steps = _steps(r.program, span)
    looped = next((op for op in unit.layers if walk.model.graph().op(op).type in RECURRENT), None)
    if looped is not None:
        return f"{looped} is a loop over time"
    runs = [step.op for step in steps if step.op in unit.layers]
    if len(runs) > len(set(runs)):
        return "a layer in it runs several times"
    opaque = next((step.op for step in steps if not step.differentiable), None)
    return None if opaque is None else f"there is no gradient through {opaque}"


class BlockProblem:
    """The operators of a block, with the weights of its layers replaced.

    When every batch takes the same steps on tensors whose first axis is the batch, rows of all batches are mixed;
    otherwise one batch is taken per iteration.
    """

    def __init__(self, task: Task, layers: Sequence[Layer], drop: float) -> None:
        self.walk, self.layers, self.drop = task.walk, layers, drop
        self.generator = task.generator
        runs = self.walk.runs
        self.spans = [_span(r, task) for r in runs]
        self.reads, self.writes = _border(runs[0].program, self.spans[0])
        self.silent = self._leaving_sites(_steps(runs[0].program, self.spans[0]))
        self.targets = [self._target(r, span) for r, span in zip(runs, self.spans, strict=True)]
        rows = {int(t.shape[0]) if t.dim() else -1 for t in self._tensors()}
        self.mixed = self.walk.one_program and len(rows) == 1 and min(rows) > 0
        self.batch = min(rows) if self.mixed else 1
        self.size = self.batch * len(runs)
        if self.mixed:
            self.inputs = {v: self._joined([r.quantized[v] for r in runs]) for v in self.reads}
            self.joined = list(map(self._joined, zip(*self.targets, strict=True)))
        for tensor in self.targets[0]:
            check_finite(layers[-1], tensor)

    def _leaving_sites(self, steps: Sequence[Step]) -> set[str]:
        return {site for s in steps for i, site in s.results if s.writes[i] in self.writes}

    def _tensors(self) -> list[Tensor]:
        inputs = [r.quantized[v] for r in self.walk.runs for v in self.reads]
        return inputs + [t for target in self.targets for t in target]

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        if tensors[0].dtype != torch.float32 or tensors[0].device.type != "cpu":
            return torch.cat(list(tensors))
        shape = (sum(int(t.shape[0]) for t in tensors), *tensors[0].shape[1:])
        return torch.cat(list(tensors), out=self.walk.store.empty(shape))

    @torch.no_grad()
    def _target(self, run: Run, span: tuple[int, int]) -> list[Tensor]:
        source = run.real
        if any(map(self.walk.follows_selection, self.layers)):
            paired = all(are_pairs(run.real[v], run.quantized[v]) for v in self.reads)
            source = run.real if paired else run.quantized  # rows of the float stream are others
        state = {v: source[v] for v in self.reads}
        return [t.detach() for t in self._forward(run.program, span, state, (), None)]

    def _forward(
        self, program: Program, span: tuple[int, int], state: State, weights: Sequence[Tensor],
        quantize: Callable[[str, Tensor], Tensor] | None,
    ) -> list[Tensor]:  # fmt: skip
        by_op = {layer.op: layer.tensor(w) for layer, w in zip(self.layers, weights, strict=False)}
        for step in _steps(program, span):
            given = {step.ports[1]: by_op[step.op]} if step.op in by_op else None
            state.update(zip(step.writes, run_step(step, state, program.constants, quantize, given), strict=True))
        return [state[v] for v in self.writes]

    def _quantize(self, site: str, x: Tensor) -> Tensor:
        return x if site in self.silent else self.walk.model.quantize(site, x)

    def _dropping(self, site: str, x: Tensor) -> Tensor:
        result = self._quantize(site, x)
        if result is x or self.walk.model.sites()[site].role not in ("input", "output"):
            return result
        # elementwise, as in QDrop, eq. 9; mixing keeps both gradients
        dropped = torch.rand(x.shape, generator=self.generator).to(x.device) < self.drop
        return torch.where(dropped, x, result)

    def loss(self, index: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Squared errors of samples, summed over each sample's outputs."""
        quantize = self._dropping if self.drop else self._quantize
        if not self.mixed:
            i = int(index[0])
            return self._batch_loss(i, weights, quantize)
        state = {v: t.index_select(0, index.to(t.device)) for v, t in self.inputs.items()}
        found = self._forward(self.walk.program, self.spans[0], state, weights, quantize)
        wanted = [t.index_select(0, index.to(t.device)) for t in self.joined]
        return _squared(found, wanted)

    def _batch_loss(self, i: int, weights: Sequence[Tensor], quantize: Callable[[str, Tensor], Tensor]) -> Tensor:
        run = self.walk.runs[i]
        state = {v: run.quantized[v] for v in self.reads}
        return _squared(self._forward(run.program, self.spans[i], state, weights, quantize), self.targets[i])

    @torch.no_grad()
    def error(self, weights: Sequence[Tensor]) -> float:
        """The error over all batches."""
        parts = [float(self._batch_loss(i, weights, self._quantize)) for i in range(len(self.walk.runs))]
        return sum(parts) / len(parts)


def _squared(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    parts = [(f.float() - w.float()).square().sum() / max(1, w.shape[0]) for f, w in zip(found, wanted, strict=True)]
    return torch.stack(parts).sum()


def _span(run: Run, task: Task) -> tuple[int, int]:
    span = run.program.span(task.unit.ops)
    assert span is not None, task.unit.name
    return span


def _steps(program: Program, span: tuple[int, int]) -> Sequence[Step]:
    return program.steps[span[0] : span[1]]


def _border(program: Program, span: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Values that enter the steps of ``span``, and floating-point values that leave them."""
    made: dict[int, None] = {}
    read: dict[int, None] = {}
    for step in _steps(program, span):
        read.update((v, None) for v in step.reads if v not in made and v not in program.constants)
        made.update((v, None) for v in step.writes)
    outputs = set(program.outputs)
    leaving = [v for v in made if program.last_read.get(v, -1) >= span[1] or v in outputs]
    return list(read), leaving


def variant_units(variant: Variant) -> Callable[[Walk, Sequence[str]], list[Unit]]:
    """The units of a variant; blocks that cannot be run as one become layers."""
    if variant.together == "layer":
        return lambda walk, layers: layer_units(walk.model.graph(), layers)
    return lambda walk, layers: feasible(walk, block_units(walk.model.graph(), layers))


def feasible(walk: Walk, units: Sequence[Unit]) -> list[Unit]:
    """``units``, split into layers where their operators cannot be reconstructed together."""
    found: list[Unit] = []
    for unit in units:
        reason = why_no_block(walk, unit) if len(unit.ops) > 1 else None
        if reason is None:
            found.append(unit)
        else:
            logger.info("%s: layer by layer, as %s", unit.name, reason)
            found += layer_units(walk.model.graph(), unit.layers)
    return found


def method(variant: Variant, settings: Settings) -> Callable[[Task], Sequence[Choice]]:
    """:func:`solve` for :func:`bitwright.methods.rounding.driver.apply`."""
    return lambda task: solve(task, variant, settings)
