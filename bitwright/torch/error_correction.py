"""Low-rank branches beside quantized layers, fitted to the errors that rounding leaves.

A layer computes ``W_q x + B (A x)``: its weight on the grid, and two narrow matrices in float. The product ``B A`` of rank ``r``
is chosen in closed form: with the second moment ``H`` of the inputs of the quantized model and the error ``E = W - W_q`` of
the weights, it is the best approximation of rank ``r`` of ``E H^(1/2)``, times ``H^(-1/2)``. No other one of this rank leaves
less of ``E x``. Errors of earlier layers are theirs to correct: layers that did so all at once would do it again and again.

References: Zhang et al. 2024 (LQER), arXiv:2402.02446, where ``H`` is diagonal; Liu et al. 2024 (EoRA), arXiv:2410.21271,
section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular, counted
from bitwright.torch.calls.inputs import as_call, evaluation, model_device, to_device
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
