"""Select what trains in a simulated model: some layers, ranges alone, or biases and norms alone."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from bitwright.errors import ConfigError, checks_arguments, close_matches
from bitwright.torch.calls.inputs import walk_modules
from bitwright.torch.simulation.ranges import named_range_parameters

if TYPE_CHECKING:
    from bitwright.torch.simulation.quantsim import QuantizationSimModel

What = Literal["all", "ranges", "biases_and_norms"]
_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.modules.instancenorm._InstanceNorm,
)


def _parameters_below(model: nn.Module, paths: Collection[str], what: What) -> Iterator[nn.Parameter]:
    for module in (module for path, module in walk_modules(model) if path in paths):
        for name, parameter in module.named_parameters(recurse=False):
            if what == "all" or (what == "biases_and_norms" and _is_bias_or_norm(module, name)):
                yield parameter


@checks_arguments
def parameter_groups(
    sim: QuantizationSimModel,
    what: What = "all",
    *,
    layers: str | Iterable[str] = "*",
    lr: float | None = None,
    range_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Optimizer groups of the parameters to train and of the ranges; all others stop taking gradients.

    Args:
        sim: with :meth:`learn_ranges` called, where ranges are to train.
        what: ``"all"``, ``"ranges"`` (no parameter of the model), ``"biases_and_norms"`` (vectors that add or normalise).
        layers: names or globs of modules (``"layer3*"``, ``["conv1", "head"]``); what lies below a module counts to it.
            Ranges are those of the sites of these modules.
        lr: of the model's parameters; ``None`` leaves the optimizer's.
        range_lr: of the ranges; ``None`` leaves the optimizer's.

    Returns:
        One or two groups, each with a ``name``.

    Raises:
        ConfigError: there is no such choice or module, or nothing would train.
    """
    if what not in ("all", "ranges", "biases_and_norms"):
        raise ConfigError(
            "parameter_groups", f"there is no choice {what!r}", "use 'all', 'ranges' or 'biases_and_norms'"
        )
    paths = module_paths(sim.model, layers, "parameter_groups")
    chosen = list(_parameters_below(sim.model, paths, what))
    ranges = [p for name, p in named_range_parameters(sim) if owner_within(name, paths)]
    if not chosen and not ranges:
        raise ConfigError(
            "parameter_groups",
            f"nothing would train: {what!r} of layers={layers!r} has no parameter, and no range of them is learned",
            "call sim.learn_ranges() first, or choose other layers",
        )
    kept = {id(p) for p in (*chosen, *ranges)}
    for parameter in (*sim.model.parameters(), *(p for _, p in named_range_parameters(sim))):
        parameter.requires_grad_(id(parameter) in kept)
    groups: list[dict[str, Any]] = []
    for name, parameters, rate in (("parameters", chosen, lr), ("ranges", ranges, range_lr)):
        if parameters:
            unique = list({id(p): p for p in parameters}.values())
            groups.append({"name": name, "params": unique, **({} if rate is None else {"lr": rate})})
    return groups


def module_paths(model: nn.Module, layers: str | Iterable[str], function: str) -> set[str]:
    """The modules that match a name or glob in ``layers``, with their submodules; ``function`` is for the error."""
    patterns = [layers] if isinstance(layers, str) else list(layers)
    known = [path for path, _ in walk_modules(model)]
    found: set[str] = set()
    for pattern in patterns:
        named = {path for path in known if fnmatch.fnmatchcase(path, pattern)}
        if not named:
            raise ConfigError(
                function,
                f"no module is called {pattern!r}{close_matches(pattern, known)}",
                "use names of sim.model.named_modules(), or globs",
            )
        found |= named
    below = tuple(f"{path}." for path in found if path)
    return set(known) if "" in found else found | {path for path in known if path.startswith(below)}


def owner_within(site: str, paths: set[str]) -> bool:
    """Whether the module of a site is one of ``paths``; sites of the model's own calls belong to the root."""
    parts = site.split(".")
    prefixes = [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
    return any(prefix in paths for prefix in prefixes) or "" in paths


def _is_bias_or_norm(module: nn.Module, name: str) -> bool:
    return name.startswith("bias") or isinstance(module, _NORMS)
