"""Inputs of an analysis for either front end: the simulation and its steps, the data with labels, and the targets.

A target is what is measured together: the quantizer of a site, a layer, a block, all weights, all activations, or what a
pattern of the user's matches.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.graph.graph import Graph
from bitwright.core.simulation.calibration import arrays_in, refuse_one_batch, samples_in, with_samples
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.sites import Site, SiteMap
from bitwright.errors import BitwrightError, CalibrationError, ConfigError, ModelError, close_matches, with_article
from bitwright.methods.front_end import front_end_of
from bitwright.methods.rounding.program import Program, SimulatedModel, Step, block_units, run_step
from bitwright.methods.switching import by_operator, switched_off

Array = NDArray[Any]


def listed(data: Iterable[Any], where: str = "analyze") -> list[Any]:
    """The batches; those of a generator are kept.

    Raises:
        CalibrationError: (of ``where``) it is one batch instead of several, or there is none.
    """
    refuse_one_batch(data, where)
    batches = list(with_samples(data))
    if not batches:
        raise CalibrationError(
            where,
            "the data held no batch",
            "pass a non-empty list or DataLoader (a generator can be used only once); a few hundred samples are enough",
        )
    return batches


def first_rows(batches: Sequence[Any], samples: int) -> list[Any]:
    """Take the first batches that hold ``samples`` rows; a batch is not divided."""
    found: list[Any] = []
    count = 0
    for batch in batches:
        found.append(batch)
        count += samples_in(batch)
        if count >= samples:
            break
    return found


def fingerprint(batches: Sequence[Any], more: Iterable[bytes]) -> str:
    """Hash of the data and of ``more``."""
    found = hashlib.sha256()
    for batch in batches:
        for array in arrays_in(batch):
            plain = np.ascontiguousarray(array.detach().cpu().float() if hasattr(array, "detach") else array)
            found.update(f"{plain.shape}{plain.dtype}".encode() + plain.tobytes())
    for part in more:
        found.update(part)
    return found.hexdigest()


Active = Callable[[str], bool]
"""Whether the quantizer at a site works."""


class QuantizedSteps:
    """Runs steps of a simulation; the quantized form of a constant is computed once.

    Args:
        model: a calibrated simulation.
    """

    def __init__(self, model: SimulatedModel) -> None:
        self._model, self.sites = model, model.sites()
        self._constants: dict[str, tuple[Tensor, Tensor]] = {}
        self._inside: dict[str, list[str]] = {}
        for name, site in self.sites.items():
            self._inside.setdefault(site.op, []).append(name)

    def quantize(self, name: str, x: Tensor) -> Tensor:
        """``x`` as the quantizer at a site leaves it."""
        if self.sites[name].role not in ("weight", "constant", "bias"):
            return self._model.quantize(name, x)
        held = self._constants.get(name)
        if held is None or held[0] is not x:
            held = self._constants[name] = (x, self._model.quantize(name, x))
        return held[1]

    def inside(self, step: Step) -> list[str]:
        """Sites within a step: those of a recurrent layer's own steps."""
        if step.inside is None:
            return []
        outside = {site for _, site in (*step.operands, *step.results)}
        return [name for name in self._inside.get(step.op, ()) if name not in outside]

    def run(
        self, step: Step, state: Mapping[int, Tensor], constants: Mapping[int, Tensor], active: Active
    ) -> Sequence[Tensor]:
        """Outputs of ``step`` with the ``active`` quantizers enabled."""
        inside = [name for name in self.inside(step) if self.sites[name].enabled]
        working = [name for name in inside if active(name)]

        def quantize(name: str, x: Tensor) -> Tensor:
            return self.quantize(name, x) if active(name) else x

        if not working:
            return run_step(replace(step, inside=None), state, constants, quantize)
        off = [self.sites[name] for name in inside if name not in working]
        with switched_off(off):
            return run_step(step, state, constants, quantize)

    def places(self, program: Program) -> dict[str, list[int]]:
        """Site -> indices of the steps at which it quantizes."""
        found: dict[str, list[int]] = {}
        for i, step in enumerate(program.steps):
            outer = (site for _, site in (*step.operands, *step.results))
            for name in dict.fromkeys((*outer, *self.inside(step))):
                found.setdefault(name, []).append(i)
        return found


Groups = Mapping[str, str | Sequence[str]] | Sequence[str]
"""Name -> pattern or patterns of site names, or patterns that are names too."""


def kinds(sites: Mapping[str, Site]) -> dict[str, tuple[str, ...]]:
    """All weights, and all activations."""
    weights = tuple(n for n, s in sites.items() if s.enabled and s.role in ("weight", "bias", "constant"))
    held = frozenset(weights)
    rest = tuple(n for n, s in sites.items() if s.enabled and n not in held)
    return {name: found for name, found in (("all weights", weights), ("all activations", rest)) if found}


def layers(sites: Mapping[str, Site]) -> dict[str, tuple[str, ...]]:
    """Operators with several enabled sites."""
    return {op: names for op, names in by_operator(sites).items() if len(names) > 1}


def blocks(graph: Graph, sites: Mapping[str, Site]) -> dict[str, tuple[str, ...]]:
    """Residual blocks, transformer layers and the like, as the graph shows them; those of a single layer are left out."""
    weighted = dict.fromkeys(s.op for s in sites.values() if s.role == "weight" and s.enabled)
    by_op = by_operator(sites)
    found = {}
    for unit in block_units(graph, list(weighted)):
        names = tuple(name for op in unit.ops for name in by_op.get(op, ()))
        if len(unit.layers) > 1 and names:
            found[f"block {unit.name}"] = names
    return found


def chosen(groups: Groups | None, sites: Mapping[str, Site]) -> dict[str, tuple[str, ...]]:
    """The user's groups.

    Raises:
        ConfigError: a pattern matches no site, or only sites in float.
    """
    if groups is None:
        return {}
    if isinstance(groups, str):
        groups = [groups]
    named = groups if isinstance(groups, Mapping) else {str(pattern): pattern for pattern in groups}
    found = {}
    for name, patterns in named.items():
        held: dict[str, None] = {}
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            held.update(dict.fromkeys(_matching(pattern, sites)))
        found[name] = tuple(held)
    return found


def _matching(pattern: str, sites: Mapping[str, Site]) -> list[str]:
    glob = pattern.replace("[", "[[]")  # brackets are part of site names
    names = [n for n, s in sites.items() if fnmatch.fnmatchcase(n, glob) or s.op == pattern]
    if not names:
        raise ConfigError(
            "groups",
            f"{pattern!r} matches no site{close_matches(pattern, [*sites, *{s.op for s in sites.values()}])}",
            "use names of sites or layers as in sim.quantizers; * and ? are wildcards",
        )
    enabled = [n for n in names if sites[n].enabled]
    if not enabled:
        raise ConfigError(
            "groups", f"{pattern!r} matches sites in float only", "name a site that is quantized, see sim.coverage()"
        )
    return enabled


@dataclass(frozen=True)
class Subject:
    """A calibrated simulation.

    Attributes:
        sim: the user's object.
        name: of the model.
        front_end: ``torch`` or ``onnx``.
        outputs: (batch, in float) -> the outputs of a run of the simulation.
        runnable: what a user's metric is given: the module or the session, as the simulation stands.
        in_float: a block in which ``runnable`` computes in float.
        exclusive: a block in which no other thread uses the simulation.
        parameters: name -> shape of the model's parameters.
    """

    sim: Any
    name: str
    front_end: str
    outputs: Callable[[Any, bool], Sequence[Array]]
    runnable: Callable[[], Any]
    in_float: Callable[[], AbstractContextManager[Any]]
    exclusive: Callable[[], AbstractContextManager[Any]]
    parameters: Mapping[str, tuple[int, ...]]

    @property
    def sites(self) -> SiteMap:
        """All quantizer sites."""
        found: SiteMap = self.sim.quantizers
        return found

    @cached_property
    def sharing(self) -> dict[str, tuple[str, ...]]:
        """Site -> all sites with its quantizer: they can only be switched together."""
        by_quantizer: dict[int, list[str]] = {}
        for name, site in self.sites.items():
            by_quantizer.setdefault(id(site.quantizer), []).append(name)
        return {name: tuple(by_quantizer[id(site.quantizer)]) for name, site in self.sites.items()}

    def remember(self, *, parameters: bool = False) -> Undo:
        """Save the state; returns a function that restores it."""
        undo: Undo = self.sim.remember(parameters=parameters)
        return undo

    def steps(self) -> SimulatedModel:
        """The simulation as steps of torch functions.

        Raises:
            ConfigError: torch is not installed.
        """
        if importlib.util.find_spec("torch") is None:
            raise ConfigError(
                "analyze", "it runs models as torch functions, and torch is not installed", "pip install 'bitwright[torch]'"
            )  # fmt: skip
        steps: SimulatedModel = front_end_of(self.sim).steppable(self.sim, None)
        return steps

    def size(self) -> dict[str, int]:
        """``parameters`` (elements), ``bytes_float``, and ``bytes_quantized`` with the bits of the sites as they stand."""
        count = {name: int(np.prod(shape, dtype=np.int64)) for name, shape in self.parameters.items()}
        bits = dict.fromkeys(count, 32)
        for site in self.sites.values():
            param = self.sim.graph.values[site.value].param
            if param in bits and site.enabled and site.is_stored:
                bits[param] = site.quantizer.spec.format.bits
        total = sum(count.values())
        return {
            "parameters": total,
            "bytes_float": 4 * total,
            "bytes_quantized": sum(-(-count[name] * bits[name] // 8) for name in count),
        }


def open_subject(sim: Any) -> Subject:
    """Open a simulation for analysis.

    Raises:
        ConfigError: it is not a simulation.
        CalibrationError: it has no encodings yet.
    """
    if type(sim).__name__ != "QuantizationSimModel" and not hasattr(sim, "quantizers"):
        raise ConfigError(
            "analyze",
            f"it is given {with_article(type(sim).__name__)}, not a simulation",
            "pass a calibrated QuantizationSimModel, for example bitwright.quantize(model, data).sim",
        )
    if not sim.calibrated:
        raise CalibrationError(
            "analyze",
            "the simulation is not calibrated, so no quantizer has an encoding yet",
            "call sim.compute_encodings(batches) or sim.load_encodings(path) first",
        )
    if not any(site.enabled for site in sim.quantizers.values()):
        raise CalibrationError(
            "analyze",
            "no quantizer of the simulation is enabled, so there is nothing to compare with float",
            "enable sites: sim.quantizers['*'].enabled = True",
        )
    return _onnx_subject(sim) if hasattr(sim, "marked") else _torch_subject(sim)


def _torch_subject(sim: Any) -> Subject:
    from contextlib import nullcontext

    from bitwright.torch.calls.inputs import named_state, outputs_of, same_draws

    def outputs(batch: Any, in_float: bool) -> Sequence[Array]:
        with sim.in_float() if in_float else nullcontext(), same_draws():
            return outputs_of(sim.model, batch)

    return Subject(
        sim,
        type(sim.model).__name__,
        "torch",
        _explained(outputs),
        lambda: sim.model,
        sim.in_float,
        lambda: sim._interceptor.occupancy.exclusive("analyze"),
        {name: tuple(t.shape) for name, t in named_state(sim.model) if t.is_floating_point()},
    )


def _onnx_subject(sim: Any) -> Subject:
    from bitwright.onnx.model.data import as_feeds
    from bitwright.onnx.model.session import open_session
    from bitwright.onnx.simulation.marked_model import simulation_model
    from bitwright.runtimes.adapters import one_array

    sessions: dict[str, Any] = {}

    def float_session() -> Any:
        if "float" not in sessions:
            model = simulation_model(sim.marked, {}).model
            sessions["float"] = open_session(model, sim.providers, threads=sim.threads)
        return sessions["float"]

    state = {"float": False}

    @contextmanager
    def in_float() -> Iterator[None]:
        state["float"] = True
        try:
            yield
        finally:
            state["float"] = False

    def outputs(batch: Any, wanted_in_float: bool) -> Sequence[Array]:
        feeds = dict(as_feeds(batch, sim.specs))
        found = float_session().run(sim.output_names, feeds) if wanted_in_float else sim.run(feeds)
        return [one_array(y) for y in found]

    graph = sim.marked.graph
    shapes = {
        name: tuple(value.const_value.shape.numpy())
        for name, value in graph.initializers.items()
        if value.const_value is not None and value.const_value.dtype.is_floating_point()
    }
    return Subject(
        sim,
        str(graph.name or "model"),
        "onnx",
        _explained(outputs),
        lambda: float_session() if state["float"] else sim.session,
        in_float,
        lambda: sim._occupancy.exclusive("analyze"),
        shapes,
    )


def _explained(outputs: Callable[[Any, bool], Sequence[Array]]) -> Callable[[Any, bool], Sequence[Array]]:
    """``outputs`` whose failures name the data."""

    def run(batch: Any, in_float: bool) -> Sequence[Array]:
        try:
            return outputs(batch, in_float)
        except (BitwrightError, KeyboardInterrupt):
            raise
        except Exception as error:
            hint = (
                "; a tuple or list is taken as positional arguments, so leave labels out and pass labels=..."
                if isinstance(batch, (tuple, list)) and len(batch) > 1
                else ""
            )
            raise ModelError(
                "analyze",
                f"the model fails on a batch of the data: {type(error).__name__}: {error}",
                f"give batches as the model's forward takes them{hint}",
            ) from error

    return run
