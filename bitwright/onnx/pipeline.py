"""An ONNX model on its way through :func:`bitwright.quantize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bitwright.algorithms.front_ends import Pipeline
from bitwright.algorithms.search.recipe_report import metric_of
from bitwright.core.simulation.protocols import Array
from bitwright.export.artefacts import Exported
from bitwright.onnx.given.read_qdq import has_quantizers
from bitwright.onnx.model.data import as_feeds, input_specs
from bitwright.onnx.model.load import Loaded, Source, load_model
from bitwright.onnx.model.opset import modernize
from bitwright.onnx.model.session import Providers, open_session, run_session
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.runtimes.outputs import one_array


class OnnxPipeline(Pipeline):
    """A model of this front end.

    Raises:
        ModelError: the model cannot be read.
    """

    def __init__(self, model: Source, providers: Providers | None, memory_budget: int | None) -> None:
        self._source, self._providers, self._budget = model, providers, memory_budget
        self._loaded: Loaded | None = load_model(model)

    def work(self, first: Any) -> Loaded:
        """The model as it was loaded, which no step before needs any more, at an opset that every step knows.

        One with quantizers keeps its opset until the simulation has taken them out: converted, they are no longer found.
        """
        loaded, self._loaded = self._loaded, None
        loaded = load_model(self._source) if loaded is None else loaded
        return loaded if has_quantizers(loaded.model) else modernize(loaded, first)

    def copied(self, work: Loaded) -> Loaded:
        """Another one, with the same arrays of weights."""
        return replace(work, model=work.model.clone())

    @cached_property
    def _float(self) -> tuple[Any, Any]:
        """Session and inputs of the model as given, opened with the first batch: steps change what was loaded."""
        loaded = load_model(self._source)
        return open_session(loaded.model, self._providers), input_specs(loaded.model)

    def float_outputs(self, batch: Any) -> Sequence[Array]:
        """Of the model as given."""
        session, specs = self._float
        return _arrays(run_session(session, as_feeds(batch, specs), "the float model"))

    def output_names(self) -> Sequence[str]:
        """Of the model as given."""
        return [output.name for output in self._float[0].get_outputs()]

    def rate_float(self, metric: Callable[[Any], float]) -> float:
        """Of a session of the model as given."""
        assert self._loaded is not None  # before the steps begin
        return metric_of(metric, open_session(self._loaded.model, self._providers))

    def rate(self, sim: QuantizationSimModel, metric: Callable[[Any], float]) -> float:
        """Of the session of the simulation."""
        return metric_of(metric, sim.session)

    def reference(self, work: Loaded) -> Any:
        """The model itself: a simulation has its own, and methods of rounding leave this one."""
        return work.model

    def simulation(self, work: Loaded, first: Any, rules: Mapping[str, Any]) -> QuantizationSimModel:
        """Of a copy."""
        return QuantizationSimModel(work.model, first, **rules, providers=self._providers, memory_budget=self._budget)

    def outputs(self, sim: QuantizationSimModel, batch: Any) -> Sequence[Array]:
        """Of the simulation."""
        return _arrays(sim.run(batch))

    def export(self, sim: QuantizationSimModel, path: str | Path, prefix: str, first: Any, **options: Any) -> Exported:
        """Files."""
        return sim.export(path, prefix, **options)


def _arrays(outputs: Iterable[Any]) -> list[Array]:
    """Outputs as a judge takes them, one array each: of a sequence or a map all floats in a row."""
    return [one_array(y) for y in outputs]
