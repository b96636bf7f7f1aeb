"""The simulation that is analysed, of whichever front end: what the analysis asks of it beside its steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.algorithms.rounding.program import SimulatedModel
from bitwright.core.simulation.protocols import Undo
from bitwright.core.simulation.sites import Site, SiteMap
from bitwright.errors import BitwrightError, CalibrationError, ConfigError, ModelError
from bitwright.methods.front_end import front_end_of

Array = NDArray[Any]


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
        """Its quantizer sites."""
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
        """Keep its state; the function returned brings it back."""
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

    @contextmanager
    def only(self, active: Callable[[Site], bool]) -> Iterator[Any]:
        """A block in which only quantizers with an ``active`` site work; yields what a user's metric is given."""
        kept = {id(site.quantizer) for site in self.sites.values() if active(site)}
        undo = self.sites.remember()
        try:
            for quantizer in self.sites.unique():
                if id(quantizer) not in kept and quantizer.enabled:
                    quantizer.leave_in_float("it is compared with float")
            yield self.runnable()
        finally:
            undo()

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
    """The simulation as an analysis sees it.

    Raises:
        ConfigError: it is not a simulation.
        CalibrationError: it has no encodings yet.
    """
    if type(sim).__name__ != "QuantizationSimModel" and not hasattr(sim, "quantizers"):
        raise ConfigError(
            "analyze",
            f"it is given a {type(sim).__name__}, not a simulation",
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

    from bitwright.torch.calls.batches import outputs_of
    from bitwright.torch.calls.trees import named_state

    def outputs(batch: Any, in_float: bool) -> Sequence[Array]:
        with sim.in_float() if in_float else nullcontext():
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
    from bitwright.onnx.simulation.simulate import simulation_model
    from bitwright.runtimes.outputs import one_array

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
