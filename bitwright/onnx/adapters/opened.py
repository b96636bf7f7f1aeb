"""An ONNX model opened for a change: its view, what it computed before, and what differs since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.algorithms.front_ends import FrontEnd, Opened, Repairable
from bitwright.comparison.saturation import SaturationReport
from bitwright.core.graph.graph import Graph
from bitwright.core.graph.traits import TRAITS
from bitwright.core.health.repair import Repair
from bitwright.core.simulation.protocols import Array, sqnr
from bitwright.errors import ConfigError, ModelError
from bitwright.export.files.value_types import restore_types
from bitwright.export.qdq.markers import strip_sites
from bitwright.onnx.adapters.bias_correct import OnnxCorrectable
from bitwright.onnx.adapters.folding import fold_batch_norms
from bitwright.onnx.model.data import as_feeds, input_specs, random_feeds
from bitwright.onnx.model.load import Loaded, Source, load_model
from bitwright.onnx.model.session import Providers, open_session, run_session
from bitwright.onnx.model.view import OnnxView, measure_shapes, run_measured, tensor_names
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.onnx.simulation.repairs import REPAIRED, float_results, nodes_of, put_in_force
from bitwright.runtimes.outputs import arrays_of

Model = onnx.ModelProto | ir.Model | Loaded
_LEAST_AGREEMENT = 60.0  # dB between the outputs before and after: beyond it only rounding differs
_LEAST_IN_HALF = 30.0


class OnnxOpened(Opened):
    """A model of this front end."""

    def __init__(self, model: Model, dummy_input: Any, function: str, providers: Providers | None) -> None:
        self._given, self._providers = model, providers
        self.loaded = _loaded(model, function)
        specs = input_specs(self.loaded.model)
        self.example = next(random_feeds(specs)) if dummy_input is None else as_feeds(dummy_input, specs, "dummy_input")
        self._folds_without_check = dummy_input is None
        self._shapes, outputs = run_measured(self.loaded.model, self.example, self._providers)
        self._untold = frozenset(tensor_names(self.loaded.model)) - self._shapes.keys()  # of branches not taken
        self._before = [arrays_of(output) for output in outputs]
        self.view = self._view()

    def _view(self) -> OnnxView:
        """The model as it stands; what a change leaves has the shapes that it had."""
        if any(n not in self._shapes and n not in self._untold for n in tensor_names(self.loaded.model)):
            self._shapes = measure_shapes(self.loaded.model, self.example, self._providers)
        view = OnnxView(self.loaded, self._providers, self._shapes)
        view.materialize(_computed_weights(view.graph()))
        return view

    def changed(self) -> str | None:
        """What is different on the example input; ``None`` when only rounding is."""
        return what_changed(self.view, self.example, self._before)

    def fold(self, progress: bool) -> FoldReport:
        """Fold batch norms; the view shows the folded model then."""
        known = None if self._folds_without_check else (self._shapes, self._before)
        report = _folded(self.loaded, known and self.example, self._providers, progress, known)
        self.view = self._view()
        return report

    def give_back(self) -> None:
        """Write the model as it stands into what the caller gave."""
        self.view.tidy()
        give_back(self.loaded, self._given)


class OnnxRepairable(Repairable):
    """A simulation of this front end."""

    def __init__(self, sim: QuantizationSimModel) -> None:
        self._sim, self._nodes = sim, nodes_of(sim)
        self.ops = {op.name for op in sim.graph.ops}

    def obstacle(self, op: str) -> str | None:
        """Nothing reads the results, or they are in another type."""
        if float_results(self._nodes.get(op)):
            return None
        return f"the operator has no result in {', '.join(REPAIRED.values())} that anything reads"

    def put_in_force(self, repairs: Sequence[Repair]) -> None:
        """As nodes after the operators."""
        put_in_force(self._sim, tuple(repairs))


class OnnxFrontEnd(FrontEnd):
    """Models and simulations of this front end."""

    knows_shapes = True

    def open_model(self, model: Model, shapes: Any, dummy_input: Any, function: str, providers: Any) -> OnnxOpened:
        """As the base class says; ``shapes`` may be the example input.

        Raises:
            ModelError: the model cannot be read or run, ``dummy_input`` does not fit, or ``model`` is a path.
        """
        return OnnxOpened(model, shapes if dummy_input is None else dummy_input, function, providers)

    def fold(
        self, model: Model, shapes: Any, dummy_input: Any, function: str, providers: Any, progress: bool
    ) -> FoldReport:
        """As the base class says; without an example input the outputs are not compared."""
        loaded = _loaded(model, function)
        example = shapes if dummy_input is None else dummy_input
        feeds = None if example is None else as_feeds(example, input_specs(loaded.model), "dummy_input")
        report = _folded(loaded, feeds, providers, progress)
        give_back(loaded, model)
        return report

    def float_model(self, sim: QuantizationSimModel) -> ir.Model:
        """As the base class says; the arrays of weights are shared until they change."""
        return strip_sites(sim.marked).model

    def simulated_as(self, sim: QuantizationSimModel, model: Source) -> QuantizationSimModel:
        """As the base class says."""
        rules: Any = sim.rules
        found = QuantizationSimModel(
            model, sim.example(), config_file=rules, providers=sim.providers,
            memory_budget=sim.memory_budget, threads=sim.threads,
        )  # fmt: skip
        found.quantizers.ask_as(sim.quantizers)
        return found

    def correctable(self, sim: QuantizationSimModel, reference: Source | None = None) -> OnnxCorrectable:
        """As the base class says."""
        if reference is None:
            return OnnxCorrectable(sim)
        return OnnxCorrectable(sim, QuantizationSimModel(reference, sim.example(), providers=sim.providers))

    def batches_of_all(self, batches: Iterable[Any]) -> Iterable[Any]:
        """As the base class says: ONNX models are simulated in one process."""
        return batches

    def steppable(self, sim: QuantizationSimModel, forward_fn: Any) -> Any:
        """As the base class says.

        Raises:
            ConfigError: ``forward_fn`` is given.
        """
        # on torch, which not every user of ONNX has
        from bitwright.onnx.adapters.program import OnnxSimulation

        if forward_fn is not None:
            raise ConfigError("forward_fn", "it is given for an ONNX model, which is called in one way", "leave it out")
        return OnnxSimulation(sim)

    def repairable(self, sim: QuantizationSimModel) -> OnnxRepairable:
        """The results of its operators."""
        return OnnxRepairable(sim)

    def saturation_count(
        self, sim: QuantizationSimModel, batches: Sequence[Any], options: dict[str, Any]
    ) -> Callable[[], SaturationReport]:
        """As the base class says."""
        return lambda: sim.saturation(batches, **options)

    def simulated_outputs(self, sim: QuantizationSimModel, batch: Any) -> list[Array]:
        """As the base class says."""
        return [np.asarray(y, np.float64) for y in sim.run(batch) if _is_float(y)]


FRONT_END = OnnxFrontEnd()


def _is_float(output: Any) -> bool:
    """Whether an output is a floating-point tensor; sequences are lists, numpy has no kind of its own for bfloat16."""
    return isinstance(output, np.ndarray) and (output.dtype.kind == "f" or output.dtype.name == "bfloat16")


def _folded(
    loaded: Loaded,
    feeds: dict[str, Array] | None,
    providers: Providers | None,
    progress: bool,
    known: tuple[dict[str, tuple[int, ...]], list[list[Array]]] | None = None,
) -> FoldReport:
    """Folds; ``known`` are the shapes and the outputs on ``feeds``, where they were measured already."""
    if not any(node.op_type == "BatchNormalization" for node in loaded.model.graph.all_nodes()):
        feeds = None  # nothing will be folded, so nothing needs to be compared
    shapes, before = (None, []) if known is None or feeds is None else known
    if feeds is not None and shapes is None:
        shapes = measure_shapes(loaded.model, feeds, providers)

    def changed(view: OnnxView) -> str | None:
        assert feeds is not None
        return what_changed(view, feeds, before)

    def opened(view: OnnxView) -> None:
        if feeds is not None and not before:
            before.extend(float_outputs(view, feeds))

    return fold_batch_norms(loaded, providers, shapes, opened, None if feeds is None else changed, progress)


def _loaded(model: Any, function: str) -> Loaded:
    if not isinstance(model, (onnx.ModelProto, ir.Model, Loaded)):
        raise ModelError(
            function,
            f"a {type(model).__name__} cannot be changed in place",
            "load the file first: model = onnx.load(path), or bitwright.onnx.load_model(path)",
        )
    return model if isinstance(model, Loaded) else load_model(model)


def _computed_weights(graph: Graph) -> Iterator[str]:
    """Weights that the model computes from constants, as a transposed initializer."""
    for op in graph.ops:
        for value in op.inputs[1:] if op.type in TRAITS["layer"] else ():
            if value is not None and graph.values[value].kind == "constant" and graph.values[value].is_float:
                yield value


def give_back(loaded: Loaded, model: Model) -> None:
    """Write the changed copy into what the caller gave."""
    if isinstance(model, Loaded):
        return
    graph = loaded.model.graph
    listed = {str(v.name): v for v in (*graph.initializers.values(), *graph.inputs)}
    graph.inputs.clear()
    graph.inputs.extend(listed[name] for name in loaded.inputs if name in listed)
    if isinstance(model, onnx.ModelProto):
        proto = ir.to_proto(loaded.model)
        restore_types(proto)
        model.CopyFrom(proto)
    else:
        model.graph = graph
        model.functions.clear()
        model.ir_version = loaded.model.ir_version


def float_outputs(view: OnnxView, feeds: dict[str, Array]) -> list[list[Array]]:
    """The outputs of the model as it stands, each as the arrays in it."""
    return [arrays_of(output) for output in run_session(open_session(view.model, view.providers), feeds, "the model")]


def what_changed(view: OnnxView, feeds: dict[str, Array], before: Sequence[Sequence[Array]]) -> str | None:
    """What is different since ``before`` was taken; ``None`` when only rounding is."""
    for value, old, new in zip(view.model.graph.outputs, before, float_outputs(view, feeds), strict=True):
        if len(old) != len(new):
            return f"{value.name} holds {len(new)} tensors, not {len(old)}"
        for one, other in zip(old, new, strict=True):
            difference = _difference(one, other)
            if difference:
                return f"{value.name} {difference}"
    return None


def _difference(old: Array, new: Array) -> str | None:
    if old.dtype.kind != "f":
        return None
    finite = np.isfinite(old)
    if old.shape != new.shape or not np.array_equal(finite, np.isfinite(new)):
        return "has another shape, or NaN or infinite elements in other places"
    agreement = sqnr(old[finite], new[finite])
    if agreement < (_LEAST_IN_HALF if old.dtype == np.float16 else _LEAST_AGREEMENT):
        return f"agrees with the original to {agreement:.1f} dB only"
    return None
