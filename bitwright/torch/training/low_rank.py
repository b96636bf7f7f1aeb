"""Low-rank corrections of layers with integer weights: fitted to the errors that rounding leaves, or trained and merged.

A weight on its grid stays what it is, ``W_q``; the layer computes with ``W_q + B A``, of which ``A [R, K]`` and ``B [O, R]``
train (Hu et al. 2021, arXiv:2106.09685, section 4.1). :meth:`LowRankCorrection.merge` rounds ``W_q + B A`` to the same grid, so
that a file holds integers and nothing else.

Instead of by training, the product ``B A`` of rank ``r`` is chosen in closed form by :func:`correct_errors`: with the second
moment ``H`` of the inputs of the quantized model and the error ``E = W - W_q`` of the weights, it is the best approximation of
rank ``r`` of ``E H^(1/2)``, times ``H^(-1/2)``. No other one of this rank leaves less of ``E x``. Errors of earlier layers are
theirs to correct: layers that did so all at once would do it again and again.

References: Zhang et al. 2024 (LQER), arXiv:2402.02446, where ``H`` is diagonal; Liu et al. 2024 (EoRA), arXiv:2410.21271,
section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular, counted
from bitwright.torch.calls.inputs import as_call, evaluation, model_device, to_device
from bitwright.torch.quantizers.quantizer import Quantizer
from bitwright.torch.training.oscillation import quantized_weights
from bitwright.torch.training.partial import module_paths, owner_within

if TYPE_CHECKING:
    from bitwright.torch.simulation.quantsim import QuantizationSimModel

_DAMPING = 0.01  # of the mean of H's diagonal


class LowRankBranch(nn.Module):
    """A linear layer with two narrow ones beside it, whose product is zero at first.

    Args:
        layer: stays as it is.
        rank: channels between the narrow layers.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, **options)
        self.up = nn.Linear(rank, layer.out_features, **options)
        nn.init.zeros_(self.up.weight)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs] -> [..., outputs]``."""
        return self.layer(x) + self.up(self.down(x))


@checks_arguments
def add_low_rank_branches(model: nn.Module, rank: int = 8, *, layers: str | Iterable[str] = "*") -> tuple[str, ...]:
    """Put a branch of low rank beside linear layers, in place; the function of the model stays.

    Simulations leave branches in float, as adapters, unless a rule says more. :func:`correct_errors` gives them their values.

    Args:
        model: changed in place.
        rank: of each branch; at most half of the smaller side of a weight, and layers too narrow for any are left.
        layers: names or globs of modules; what lies below a module counts to it.

    Returns:
        The paths of the layers with a branch.

    Raises:
        ConfigError: the rank is not positive, or no module of ``layers`` is a linear layer wide enough.
    """
    if rank < 1:
        raise ConfigError("add_low_rank_branches", f"rank={rank}", "use at least 1")
    paths = module_paths(model, layers, "add_low_rank_branches")
    inside = {f"{path}." for path, module in model.named_modules() if isinstance(module, LowRankBranch)}
    found = {
        path: module
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and min(module.weight.shape) >= 2
        and owner_within(f"{path}.weight", paths)
        and not path.startswith(tuple(inside))
    }
    if not found:
        raise ConfigError(
            "add_low_rank_branches",
            f"no module of layers={layers!r} is a linear layer without a branch",
            "name torch.nn.Linear modules, as model.named_modules() lists them",
        )
    for path, layer in found.items():
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, LowRankBranch(layer, min(rank, min(layer.weight.shape) // 2)))
    return tuple(found)


@dataclass(frozen=True)
class Corrected:
    """One layer.

    Attributes:
        layer: its path.
        rank: of its branch.
        before, after: power of the error of its outputs over that of the outputs, without and with the branch.
    """

    layer: str
    rank: int
    before: float
    after: float


@dataclass(frozen=True)
class CorrectionReport(Tabular):
    """Result of a correction.

    Attributes:
        layers: the corrected ones.
        parameters: numbers in all branches together.
    """

    _rows = "layers"

    layers: tuple[Corrected, ...]
    parameters: int

    def __str__(self) -> str:
        lines = [f"{counted(len(self.layers), 'layer')} corrected by {self.parameters} numbers in branches"]
        lines += [f"  {x.layer}: rank {x.rank}, output error {x.before:.3g} -> {x.after:.3g}" for x in self.layers]
        return "\n".join(lines)


@checks_arguments
def correct_errors(
    sim: QuantizationSimModel, model: nn.Module, data: Iterable[Any], *, progress: bool = True
) -> CorrectionReport:
    """Fit the branches of a simulation to the errors of its weights, after these are rounded.

    Args:
        sim: of ``model``; its weights have their encodings, and may have been rounded by any method. Changed in place.
        model: the float model, with branches from :func:`add_low_rank_branches`; left as it is.
        data: batches, as ``sim.compute_encodings`` takes them; 32 samples are enough.
        progress: show a progress bar on a terminal.

    Returns:
        The error of every layer, without and with its branch.

    Raises:
        ConfigError: no branches, or a weight beside a branch that has no encoding.
        CalibrationError: no batch, or inputs that are not finite.

    Example:
        ``add_low_rank_branches(model, rank=4)``; ``sim = QuantizationSimModel(model, x, preset="w3g64")``;
        ``sim.compute_encodings()``; ``apply_gptq(sim, data)``; ``correct_errors(sim, model, data)``.
    """
    ours, theirs = _branches(sim.model), _branches(model)
    if not ours or ours.keys() != theirs.keys():
        raise ConfigError(
            "correct_errors",
            f"the simulation has branches beside {counted(len(ours), 'layer')}, and the float model beside {len(theirs)}",
            "call add_low_rank_branches(model, rank) before the simulation is made, and pass that model",
        )
    batches = list(data)
    if not batches:
        raise CalibrationError("correct_errors", "the data held no batch", "give about 32 samples")
    weights = _rounded(sim, ours)
    moments = _moments(sim, ours, progress_bar(batches, "measuring inputs", progress))
    rows = tuple(
        _fit(path, branch, theirs[path].layer.weight.detach().double(), weights[path], moments[path])
        for path, branch in ours.items()
    )
    return CorrectionReport(rows, sum(b.up.weight.numel() + b.down.weight.numel() for b in ours.values()))


def _branches(model: nn.Module) -> dict[str, LowRankBranch]:
    return {path: module for path, module in model.named_modules() if isinstance(module, LowRankBranch)}


@torch.no_grad()
def _rounded(sim: QuantizationSimModel, branches: Mapping[str, LowRankBranch]) -> dict[str, Tensor]:
    """The weights beside the branches as the simulation computes with them, float64."""
    sites = {sim.graph.values[site.value].param: site for site in sim.quantizers.values() if site.role == "weight"}
    found = {}
    for path, branch in branches.items():
        site = sites.get(f"{path}.layer.weight")
        if site is None or not site.enabled or site.encoding is None:
            raise ConfigError(
                f"{path}.layer.weight",
                "it has no encoding, so that there is no error to correct",
                "call sim.compute_encodings() first, or add branches only to layers that are quantized",
            )
        found[path] = site.quantizer(branch.layer.weight.detach()).double()
    return found


@torch.no_grad()
def _moments(
    sim: QuantizationSimModel, branches: Mapping[str, LowRankBranch], batches: Iterable[Any]
) -> dict[str, Tensor]:
    """Per branch the sum of ``x x^T`` over its inputs, float64."""
    found: dict[str, Tensor] = {}

    def watch(path: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            with torch._C.DisableTorchFunction():  # what is called here is not the model's
                rows = args[0].detach().reshape(-1, args[0].shape[-1]).double()
                found[path] = rows.T @ rows + found.get(path, 0.0)

        return note

    handles = [branch.register_forward_pre_hook(watch(path)) for path, branch in branches.items()]
    try:
        for batch in batches:
            args, kwargs = as_call(to_device(batch, model_device(sim.model)))
            with evaluation(sim.model):
                sim.model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    for path in branches:
        if path not in found:
            raise CalibrationError(path, "no batch reached it", "give other data, or leave it out of the branches")
        if not bool(found[path].isfinite().all()):
            raise CalibrationError(path, "its inputs are not finite", "look for NaN and infinity in the data")
    return found


@torch.no_grad()
def _fit(path: str, branch: LowRankBranch, weight: Tensor, rounded: Tensor, moment: Tensor) -> Corrected:
    """Set the branch to the best of its rank.

    Args:
        path, branch: where.
        weight, rounded: in float and on the grid, ``[O, K]`` float64.
        moment: sum of ``x x^T``, ``[K, K]``.
    """
    mean = moment.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
    damped = moment + _DAMPING * mean * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    values, vectors = torch.linalg.eigh(damped)
    root, back = (vectors * values**power @ vectors.T for power in (0.5, -0.5))
    U, S, V = torch.linalg.svd((weight - rounded) @ root, full_matrices=False)
    rank = branch.down.out_features
    B, A = U[:, :rank] * S[:rank].sqrt(), S[:rank, None].sqrt() * (V[:rank] @ back)
    branch.up.weight.copy_(B)
    branch.down.weight.copy_(A)
    power = (weight @ moment * weight).sum().clamp(min=torch.finfo(torch.float64).tiny)
    before, after = (
        float((delta @ moment * delta).sum() / power) for delta in (weight - rounded, weight - rounded - B @ A)
    )
    return Corrected(path, rank, before, after)


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
