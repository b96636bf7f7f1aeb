"""``Simulation``, the base class of both front ends' simulations; changes of one that happen whole or not at all; its threads.

Any number of threads may run a simulation, or one thread may change what all of them read (:class:`Occupancy`).
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np

from bitwright.core.graph.float_values import chosen_outputs, ordered_rows
from bitwright.core.graph.graph import Graph
from bitwright.core.health.diagnosis import Repair
from bitwright.core.numerics.arrays import Array
from bitwright.core.numerics.formats import FLOAT32_SCALE
from bitwright.core.numerics.granularity import PerTensor
from bitwright.core.numerics.spec import NonFinite, activation_spec, check_policy, weight_spec
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Coverage, Plan, SitePlan
from bitwright.core.placement.rules import Rules
from bitwright.core.simulation.calibration import (
    BatchGate,
    CalibrationLog,
    Observer,
    nested_calibration,
    refuse_one_batch,
    warn_of_unlike_joins,
)
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.output_quality import RowOrder
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.core.simulation.sites import SiteMap, place_quantizers
from bitwright.errors import BusyError, CalibrationError, checks_methods
from bitwright.tables import Tabular

logger = logging.getLogger("bitwright")


class Occupancy:
    """Counts the threads that run a simulation, and holds the one that changes it.

    A copy is unoccupied: it belongs to another simulation.

    Args:
        instead: what a thread can do that does not want to wait, for messages.
    """

    def __init__(self, instead: str) -> None:
        self._instead = instead
        self._lock = threading.Lock()
        self._running: dict[threading.Thread, int] = {}
        self._owners: list[tuple[threading.Thread, str]] = []  # all of one thread; the innermost last

    def __getstate__(self) -> dict[str, str]:
        return {"instead": self._instead}

    def __setstate__(self, state: dict[str, str]) -> None:
        Occupancy.__init__(self, **state)

    def enter(self) -> None:
        """Begin a run of the simulation in this thread.

        Raises:
            BusyError: another thread is changing it.
        """
        me = threading.current_thread()
        with self._lock:
            self._refuse_owner(me)
            self._running[me] = self._running.get(me, 0) + 1

    def leave(self) -> None:
        """End the run that this thread began."""
        me = threading.current_thread()
        with self._lock:
            left = self._running.get(me, 0) - 1
            if left > 0:
                self._running[me] = left
            else:
                self._running.pop(me, None)

    def check(self) -> None:
        """Refuse this thread while another one is changing the simulation.

        Raises:
            BusyError: with the name of the thread and what it does.
        """
        with self._lock:
            self._refuse_owner(threading.current_thread())

    @property
    def crowded(self) -> bool:
        """Whether another thread runs the simulation right now."""
        return bool(self._others())

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """No other thread runs or changes the simulation inside the block; ``what`` is done there, for messages.

        Raises:
            BusyError: another thread runs it or changes it.
        """
        me = threading.current_thread()
        with self._lock:
            self._refuse_owner(me)
            others = self._others()
            if others:
                names = ", ".join(repr(thread.name) for thread in others)
                raise BusyError(
                    what,
                    f"it changes what every run of the simulation reads, and thread {names} is running it",
                    f"let that run end first, or {self._instead}",
                )
            self._owners.append((me, what))
        try:
            yield
        finally:
            with self._lock:
                self._owners.pop()

    def _others(self) -> list[threading.Thread]:
        me = threading.current_thread()
        # a thread that ended inside a block of `sim.active()` runs nothing any more
        return [thread for thread in list(self._running) if thread is not me and thread.is_alive()]

    def _refuse_owner(self, me: threading.Thread) -> None:
        if not self._owners:
            return
        thread, what = self._owners[-1]
        if thread is not me and thread.is_alive():
            raise BusyError(
                "QuantizationSimModel",
                f"thread {thread.name!r} is changing it ({what}), so no other thread can use it",
                f"wait until that has ended, or {self._instead}",
            )


class Lock:
    """A reentrant lock; a copy of its owner gets a new one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        Lock.__init__(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


@checks_methods
class Simulation(Tabular, ABC):
    """Base class of the simulations of both front ends.

    Attributes:
        graph: the data flow that the quantizers were placed on.
        quantizers: every site by name.
        rules: what was asked for.
        plan: where the rules put quantizers, and why not elsewhere; which values lie on their grids.
        origin: how the simulation was made, as far as its maker says: preset, recipe, data.
        calibration_log: what became of the batches of the last calibration.
        output_values: output of an exported model -> the graph's value after it, where the two have different names.
    """

    _also = ("calibrated", "quantizers")

    graph: Graph
    quantizers: SiteMap
    rules: Rules
    plan: Plan
    origin: dict[str, str]
    calibration_log: CalibrationLog | None
    output_values: Mapping[str, str]
    _observer: Observer | None  # of the calibration under way
    _observed_object = ("model", "sim.model")  # what a calibration watches, and what a user calls for it

    def _set_up(self, rules: Rules) -> None:
        """Set the attributes of a new simulation."""
        self.rules, self.origin, self.calibration_log, self._observer = rules, {}, None, None

    def _plan(self) -> Plan:
        """Place quantizers by the rules; warn about rules that match nothing."""
        plan = place(self.graph, self.rules)
        for line in plan.unused:
            logger.warning(line)
        return plan

    def _add_left_out(
        self, values: Callable[[str], Array | None], kind: type[Quantizer], *, inputs: bool
    ) -> dict[str, SitePlan]:
        """Give the activations that the rules leave out quantizers, switched off; front ends put them in place.

        Returns:
            The sites that are new.
        """
        asked, weight = self.rules.activation, self.rules.weight or weight_spec()
        usual = asked is None or asked.dynamic or not isinstance(asked.granularity, PerTensor)
        activation = activation_spec() if usual or asked is None else asked
        weight = replace(weight, granularity=PerTensor(), scale_format=FLOAT32_SCALE)
        added = self.plan.left_out(self.graph, activation, weight, inputs=inputs)
        self.plan = self.plan.with_sites(added, self.graph)
        self.quantizers = place_quantizers(self.plan, self.graph, values, kind, dict(self.quantizers))
        for name in added:
            self.quantizers[name].enabled = False
        return added

    # -- what each front end says of itself

    @property
    @abstractmethod
    def calibrated(self) -> bool:
        """Whether the simulation can run."""

    @property
    @abstractmethod
    def repairs(self) -> tuple[Repair, ...]:
        """Repairs made by :func:`~bitwright.torch.stabilize`, in order: they keep operators from propagating NaN and Inf."""

    @property
    @abstractmethod
    def _occupancy(self) -> Occupancy:
        """The threads that run or change it."""

    @abstractmethod
    def remember(self, *, parameters: bool = False) -> Undo:
        """Keep its state; the function returned brings it back."""

    @abstractmethod
    def example(self) -> Any:
        """The example input."""

    @abstractmethod
    def _values_of(self, site: str) -> Any:
        """The weight or constant at a site, if it has one."""

    @abstractmethod
    def _set_calibrated(self) -> None:
        """Put the encodings of the sites into effect."""

    @abstractmethod
    def _refresh_biases(self) -> None:
        """Let the grids of biases follow those of inputs and weights."""

    def _merging(self, ranks: Any) -> AbstractContextManager[None]:
        """Merge the statistics of several processes before a block that computes encodings."""
        return nullcontext()

    @abstractmethod
    def _begin(self, resume: bool, ranks: Any, runs: bool) -> Observer:
        """Prepare to observe; drops earlier encodings and statistics unless ``resume``.

        Without ``runs`` nothing will be run: weights get their encodings of their values.
        """

    @abstractmethod
    def _gate(self, observer: Observer, policy: NonFinite) -> BatchGate:
        """The policy that decides which observed batches count."""

    @abstractmethod
    def _observed(self, observer: Observer) -> AbstractContextManager[Any]:
        """Context in which the runs of a calibration are observed; yields the target for a calibration callback."""

    @abstractmethod
    def _find_encodings(self, observer: Observer) -> None:
        """Compute encodings from the statistics."""

    def _changing(self, what: str) -> AbstractContextManager[None]:
        """No other thread runs or changes the simulation inside the block; ``what`` is done there, for messages."""
        return self._occupancy.exclusive(what)

    def _unseen(self) -> Mapping[str, str]:
        """Unrecorded calls -> the reason why they are in float."""
        return {}

    # -- what methods ask of a simulation

    @abstractmethod
    def _outputs(self, batch: Any) -> Sequence[Any]:
        """Outputs of the simulated model, as arrays."""

    @abstractmethod
    def _outputs_and(self, names: Sequence[str]) -> Callable[[Any], Sequence[Any]]:
        """A function of a batch that returns the outputs, and an array for each named site or value, from one run.

        What is returned is for the simulation as it stands.
        """

    def _chosen_outputs(self) -> tuple[list[int], dict[str, str]]:
        """The outputs of numbers whose rows are chosen after the last layer, and what the layers before that compute.

        Returns:
            Places of outputs, and layer -> the site of its result, or the value itself where that has none.
        """
        graph = self.graph
        chosen, layers = chosen_outputs(graph, graph.static())
        sites = {site.value: name for name, site in self.quantizers.items() if site.role == "output"}
        places = [i for i, value in enumerate(graph.outputs) if value in chosen]
        return places, {op.name: self._site_after(op.outputs[0], sites) for op in layers}

    def _ordered_rows(self) -> tuple[str, dict[int, int]]:
        """The value with the indices that order rows of outputs, and place of an output -> axis of its rows; see there."""
        graph = self.graph
        indices, rows = ordered_rows(graph, graph.static())
        return indices, {i: rows[value] for i, value in enumerate(graph.outputs) if value in rows}

    def _row_orders(self, runs: Sequence[Any], outputs: Sequence[str]) -> dict[str, RowOrder]:
        """The choices that order rows of ``outputs``; none where their names do not tell their places in the graph.

        Args:
            runs: what :meth:`_ordered_rows` names, in each run of the operator.
            outputs: names that a file has, in the order of the answer.
        """
        _, rows = self._ordered_rows()
        if len(runs) != 1 or len(outputs) != len(self.graph.outputs):
            return {}
        indices = np.asarray(runs[0]).astype(np.int64)
        return {outputs[place]: RowOrder(axis, indices) for place, axis in rows.items()}

    def _site_after(self, value: str, sites: Mapping[str, str]) -> str:
        """The site of what a layer makes: a clamp or a norm is computed with it; ``value`` itself where there is none."""
        reached = value
        while reached not in sites:
            readers = self.graph.consumers(reached)
            if len(readers) != 1 or not readers[0][0].outputs:
                return value
            reached = readers[0][0].outputs[0]
        return sites[reached]

    @property
    @abstractmethod
    def _metric_target(self) -> Any:
        """Argument of a metric: the simulated module, or the session."""

    _export_options: Mapping[str, Any] = {}  # of `export`, where a recipe has made the simulation

    @abstractmethod
    def _float_copy(self) -> Any:
        """The float model, as a copy that may be changed."""

    @abstractmethod
    def _again(self, model: Any) -> Any:
        """An uncalibrated simulation of ``model`` with the same rules and requested specs."""

    @abstractmethod
    def _in_integer_kernels(
        self, batches: Sequence[Any], **options: Any
    ) -> tuple[Callable[[], Any], Callable[[str], AbstractContextManager[Any]]]:
        """The operators that integer kernels would run in the exported file under the current encodings; records the model once.

        Returns:
            A function that counts saturated sums on ``batches``; and one from the name of a profile to a block in which there is
            what a metric takes, as that target computes it.
        """

    @abstractmethod
    def _repairable(self) -> dict[str, str | None]:
        """Operator -> why its result cannot be repaired; ``None`` where it can."""

    @abstractmethod
    def _put_in_force(self, repairs: Sequence[Repair]) -> None:
        """Apply exactly these repairs, none of them ``float``, and no other."""

    # -- calibration

    @property
    def needs_data(self) -> bool:
        """Whether the range of some quantizer follows from data: not where weights alone are quantized."""
        return any(
            (quantizer.enabled or quantizer.why_float) and not quantizer.frozen and quantizer.follows_data
            for quantizer in self.quantizers.unique()
        )

    def _without_runs(self, data: Any) -> bool:
        """Whether a calibration runs nothing, because no quantizer needs data.

        Raises:
            CalibrationError: data were given that are neither batches nor a callback.
        """
        if self.needs_data or (data is not None and any(q.checks_range for q in self.quantizers.unique() if q.enabled)):
            return False
        if data is not None:
            if not callable(data):
                fed(data, None, None)
            logger.info("compute_encodings: no range follows from data, so nothing is run; weights alone are read")
        return True

    @contextmanager
    def _calibration(
        self, resume: bool, allow_unreached: bool, non_finite: NonFinite, ranks: Any = None, *, runs: bool = True
    ) -> Iterator[Any]:
        """Observe every run in a block; at its end the encodings are found. An exception brings the earlier state back.

        Args:
            resume, allow_unreached, non_finite: as for ``compute_encodings``.
            ranks: the processes that calibrate together; ``None`` for this one alone.
            runs: whether the block runs the model.
        """
        policy = check_policy(non_finite)
        interrupt: KeyboardInterrupt | None = None
        together = nullcontext() if ranks is None else ranks.together()
        with together, self._occupancy.exclusive("calibration"):
            if self._observer is not None:
                raise nested_calibration()
            with all_or_nothing(self):
                observer = self._begin(resume, ranks, runs)
                gate = observer.gate = self._gate(observer, policy)
                if resume and self.calibration_log is not None:
                    gate.log = self.calibration_log.copy()
                self._observer = observer
                try:
                    with self._observed(observer) as observed:
                        yield observed
                    gate.finish()
                except KeyboardInterrupt as stopped:
                    if not observer.runs:
                        raise
                    interrupt = stopped
                finally:
                    gate.abandon()
                    self.calibration_log, self._observer, observer.gate = gate.log, None, None
                with self._merging(ranks):
                    self._finish(observer, interrupt is not None, allow_unreached)
        if interrupt is not None:
            raise interrupt

    def _finish(self, observer: Observer, interrupted: bool, allow_unreached: bool) -> None:
        """Put the encodings of what was observed into effect."""
        if not observer.runs and self.needs_data:
            what, call = self._observed_object
            raise CalibrationError(
                "calibrating", f"the {what} did not run in the block", f"call {call} inside the block"
            )
        self._find_encodings(observer)
        self._set_calibrated()
        self._refresh_biases()
        self.quantizers.settle_unreached(allow=allow_unreached or interrupted, quiet=interrupted)
        if not interrupted:
            warn_of_unlike_joins(self.graph, self.quantizers, self.plan.shared)
            return
        logger.warning(
            "calibration interrupted after %d runs; the statistics so far are in effect, "
            "compute_encodings(rest, resume=True) adds to them",
            observer.runs,
        )

    def _quantized_parameters(self) -> dict[str, Any]:
        """Parameter name -> the parameter, of every enabled weight and bias."""
        found = {}
        for site in self.quantizers.values():
            param = self.graph.values[site.value].param
            if param is not None and site.enabled and site.role in ("weight", "bias"):
                value = self._values_of(site.name)
                if value is not None:
                    found[param] = value
        return found

    # -- what it shows

    def coverage(self) -> Coverage:
        """A printable report of every value and parameter: how it is quantized, the grid it shares, or why it stays in float."""
        return Coverage.of(self.plan, self.graph, self.quantizers.changes(self.plan), self._unseen())

    def records(self) -> list[dict[str, Any]]:
        """One mapping per quantizer site."""
        return self.quantizers.rows

    def _repr_html_(self) -> str:
        return self.quantizers._repr_html_(repr(self))


def fed(data: Any, args: Any, target: Any) -> Iterable[Any]:
    """The batches given to ``compute_encodings``; a callback is called here with ``target`` and yields none.

    Args:
        data: batches, or a callback.
        args: second argument of the callback.
        target: what the callback runs.

    Raises:
        CalibrationError: it is neither.
    """
    if callable(data):
        data(target) if args is None else data(target, args)
        return ()
    refuse_one_batch(data, "compute_encodings", "sim.compute_encodings([batch])")
    return cast("Iterable[Any]", data)


def nothing_ran(data: Any, callback: str, uses: str) -> CalibrationError:
    """The error of a calibration in which nothing ran; ``callback`` says so of a callback, which should call ``uses``."""
    return CalibrationError(
        "compute_encodings",
        callback if callable(data) else "the data held no batch, so the model never ran",
        f"pass a non-empty list or DataLoader (a generator can be used only once), or a callback that calls {uses}",
    )


@contextmanager
def all_or_nothing(sim: Simulation, *, parameters: bool = False) -> Iterator[None]:
    """Restore the state of ``sim`` when the block ends in any exception, also Ctrl-C.

    Args:
        sim: a simulation.
        parameters: keep the values of parameters and buffers too, for a block that changes them.
    """
    restore = sim.remember(parameters=parameters)
    try:
        yield
    except BaseException:
        restore()
        raise
