"""``aimet_onnx.analysis``, ``quant_analyzer`` and ``layer_output_utils``: sensitivities, ranges, outputs of layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx

from bitwright.aimet_common.analyzer import QuantAnalyzerBase, RawFiles, Scores, checked, scores_of, write_ranges
from bitwright.aimet_common.defs import CallbackFunc, QuantScheme
from bitwright.aimet_common.names import names_below
from bitwright.aimet_common.sites import activations_in_float
from bitwright.aimet_onnx.float_methods import fold_all_batch_norms_to_weight
from bitwright.aimet_onnx.quantsim import QuantizationSimModel
from bitwright.aimet_onnx.utils import build_session, example_feeds, peak_signal_to_noise, proto_of, shown_outputs
from bitwright.analysis.layer_outputs import layer_values
from bitwright.analysis.subject import open_subject
from bitwright.core.files import read_document
from bitwright.errors import CalibrationError, ConfigError, with_article
from bitwright.report.page import scores_chart, write_data, write_page

__all__ = [
    "CallbackFunc", "LayerOutput", "LayerOutputUtil", "QuantAnalyzer", "SensitivityMetric",
    "analyze_per_layer_sensitivity", "analyze_per_quantizer_sensitivity", "get_quantizer_op_names",
    "group_by_op_name", "load_sensitivity_results", "make_topk_logit_psnr_metric", "save_sensitivity_plot",
    "save_sensitivity_results", "visualize_stats",
]  # fmt: skip

__path__: list[str] = []  # its older submodules are rows of the table of aliases
__getattr__ = names_below(__name__)


# ------------------------------------------------------------------------------------ layers


class QuantAnalyzer(QuantAnalyzerBase):
    """The sensitivity of a model to the quantization of each layer, measured by an evaluation function.

    Args:
        model: ``ModelProto`` or ONNX Runtime's ``ONNXModel`` wrapper; left as it is.
        dummy_input: an example of its input.
        forward_pass_callback, eval_callback: functions of an ``InferenceSession``: one runs calibration data, one returns a
            number.
    """

    def analyze(
        self,
        quant_scheme: QuantScheme = QuantScheme.post_training_tf_enhanced,
        default_param_bw: int = 8,
        default_activation_bw: int = 8,
        config_file: str | None = None,
        results_dir: str = "./tmp/",
    ) -> None:
        """Do every step and write its files into ``results_dir``: pages, and their numbers as JSON."""
        sim = self.create_quantsim_and_encodings(quant_scheme, default_param_bw, default_activation_bw, config_file)
        self._all_steps(sim, results_dir, histograms=quant_scheme == QuantScheme.post_training_tf_enhanced)

    def create_quantsim_and_encodings(
        self, quant_scheme: Any, default_param_bw: int, default_activation_bw: int, config_file: str | None
    ) -> QuantizationSimModel:
        """A calibrated simulation of a copy of the model, with its batch norms folded."""
        model = copy.deepcopy(proto_of(self._model))
        fold_all_batch_norms_to_weight(model)
        sim = QuantizationSimModel(
            model,
            quant_scheme=quant_scheme,
            default_param_bw=default_param_bw,
            default_activation_bw=default_activation_bw,
            config_file=config_file,
            dummy_input=self._dummy_input,
        )
        sim.compute_encodings(self._forward_pass_callback)
        return sim

    def _float_score(self, subject: Any) -> float:
        with subject.in_float():
            return checked(self._eval_callback, subject.runnable(), "eval_callback")

    def perform_per_layer_analysis_by_enabling_quantizers(
        self, sim: Any, results_dir: str | None = None, filename: str | None = None
    ) -> Scores:
        """Node -> evaluation with only its quantizers; as ``per_layer_quant_enabled`` in ``results_dir``."""
        return self._per_layer(sim, results_dir, filename, alone=True)

    def perform_per_layer_analysis_by_disabling_quantizers(
        self, sim: Any, results_dir: str | None = None, filename: str | None = None
    ) -> Scores:
        """Node -> evaluation with all quantizers but its own; as ``per_layer_quant_disabled`` in ``results_dir``."""
        return self._per_layer(sim, results_dir, filename, alone=False)


def analyze_per_layer_sensitivity(
    sim: QuantizationSimModel, eval_fn: Callable[[Any], float], filename: str | None = None
) -> Scores:
    """Node -> what ``eval_fn`` says of a session with only this node's quantizers.

    Args:
        sim: as it was afterwards; without calibration, of the quantizers of parameters alone.
        eval_fn: function of an ``InferenceSession``.
        filename: of an HTML page about it.
    """
    analyzer = QuantAnalyzer(None, None, eval_fn, eval_fn)
    if sim._all_calibrated():
        return analyzer.perform_per_layer_analysis_by_enabling_quantizers(sim, None, filename)
    with activations_in_float(sim):
        sim.compute_encodings([example_feeds(sim._source)])
        return analyzer.perform_per_layer_analysis_by_enabling_quantizers(sim, None, filename)


# ------------------------------------------------------------------------------------ outputs of layers


class LayerOutput:
    """Outputs of the nodes of a model, by tensor name.

    Args:
        model: a float model (``ModelProto``, ``ONNXModel``, a path), a calibrated :class:`QuantizationSimModel`, or the model
            inside of one, ``sim.model.model``.
        providers: of the session; the CPU by default. Older scripts give the folder here, and the providers after it.
        dir_path: AIMET's argument; nothing is written there.
    """

    def __init__(self, model: Any, providers: Any = None, dir_path: str | None = None) -> None:
        if isinstance(providers, str):  # older scripts give the folder first
            providers = dir_path
        self._sim = model if isinstance(model, QuantizationSimModel) else None
        self._session: Any = None
        if self._sim is not None:
            return
        watched = onnx.shape_inference.infer_shapes(proto_of(model))
        pairs = shown_outputs(watched) or [(name, name) for node in watched.graph.node for name in node.output if name]
        self._names, self._shown = [name for name, _ in pairs], [shown for _, shown in pairs]
        there = {value.name for value in watched.graph.output}
        watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._shown if name not in there)
        self._session = build_session(watched, providers or ["CPUExecutionProvider"])

    def get_outputs(self, input_dict: dict[str, Any]) -> dict[str, Any]:
        """Tensor -> value of every input of the model and output of a node, in execution order."""
        if self._sim is not None:
            return _quantized_inputs(self._sim, input_dict) | _quantized_outputs(self._sim, input_dict)
        found = self._session.run(self._shown, input_dict)
        return {
            n: x
            for n, x in (*input_dict.items(), *zip(self._names, found, strict=True))
            if isinstance(x, np.ndarray) and x.dtype.kind in "fiub"
        }


def _quantized_inputs(sim: QuantizationSimModel, feed: dict[str, Any]) -> dict[str, Any]:
    table = sim.qc_quantize_op_dict
    on = {name for name in feed if name in table and table[name].enabled}
    return {name: table[name].quantize_dequantize(x) if name in on else x for name, x in feed.items()}


def _quantized_outputs(sim: QuantizationSimModel, feed: dict[str, Any]) -> dict[str, Any]:
    values = {name: quantized for name, _, quantized in layer_values(sim, feed)}
    return {sim.graph.op(name).outputs[0]: x for name, x in values.items() if "[" not in name and "#" not in name}


class LayerOutputUtil:
    """Writes the outputs of every node for inputs, one by one, as raw float32 files.

    Args:
        model: as for :class:`LayerOutput`.
        dir_path: folder, created if missing.
        device: AIMET's argument; sessions run on the CPU.
    """

    def __init__(self, model: Any, dir_path: str, device: int = 0) -> None:
        self._model = model
        self.layer_output = LayerOutput(model)
        self.save_input_output = RawFiles(dir_path)

    def generate_layer_outputs(self, input_instance: Any) -> None:
        """Run one input (an array, or arrays in the model's order) and write it with every node's output."""
        feed = input_instance
        if not isinstance(feed, dict):
            arrays = feed if isinstance(feed, tuple | list) else [feed]
            feed = dict(zip(self._inputs(), arrays, strict=True))
        self.save_input_output.save(
            list(input_instance.values()) if isinstance(input_instance, dict) else input_instance,
            self.layer_output.get_outputs(feed),
        )

    def _inputs(self) -> list[str]:
        if isinstance(self._model, QuantizationSimModel):
            return [spec.name for spec in self._model.specs]
        graph = proto_of(self._model).graph
        held = {value.name for value in graph.initializer}
        return [value.name for value in graph.input if value.name not in held]


# ------------------------------------------------------------------------------------ quantizers


GroupFunction = Callable[[str], str | None]


class SensitivityMetric:
    """A function of a session with a name, and whether more of it is worse.

    Raises:
        ConfigError: (a ValueError) ``eval_fn`` is not a function.
    """

    def __init__(self, name: str, eval_fn: Callable[[Any], float], higher_is_worse: bool = True) -> None:
        if not callable(eval_fn):
            raise ConfigError(
                "eval_fn",
                f"it is {with_article(type(eval_fn).__name__)}, not a function",
                "pass a function of a session",
            )
        self.name, self.eval_fn, self.higher_is_worse = name, eval_fn, higher_is_worse

    def __call__(self, session: Any) -> float:
        """Rate a session."""
        return self.eval_fn(session)

    def sensitivity_score(self, score: float) -> float:
        """``score`` so that more is more sensitive."""
        return score if self.higher_is_worse else -score


def make_topk_logit_psnr_metric(
    fp_session: Any, inputs: Iterable[dict[str, Any]], k: int = 10, logit_output_index: int = 0
) -> SensitivityMetric:
    """Peak signal to noise of the ``k`` largest scores of the float session at every position; more is better."""
    feeds = list(inputs)
    places, wanted = [], []
    for feed in feeds:
        scores = np.asarray(fp_session.run(None, feed)[logit_output_index], np.float32)
        few = min(k, scores.shape[-1])
        places.append(np.argpartition(scores, -few, axis=-1)[..., -few:])
        wanted.append(np.take_along_axis(scores, places[-1], -1).ravel())

    def rate(session: Any) -> float:
        found = []
        for feed, place in zip(feeds, places, strict=True):
            scores = np.asarray(session.run(None, feed)[logit_output_index], np.float32)
            found.append(np.take_along_axis(scores, place, -1).ravel())
        return peak_signal_to_noise(np.concatenate(wanted), np.concatenate(found))

    return SensitivityMetric(f"Top{k}LogitPSNR", rate, higher_is_worse=False)


def _tensors(sim: QuantizationSimModel) -> dict[str, tuple[str, ...]]:
    """Tensor -> the sites of its quantizer, of those that work."""
    found: dict[str, list[str]] = {}
    for name, site in sim.quantizers.items():
        if site.enabled:
            value = sim.graph.values[site.value]
            found.setdefault(value.param or value.name, []).append(name)
    return {tensor: tuple(names) for tensor, names in found.items()}


def get_quantizer_op_names(sim: QuantizationSimModel) -> dict[str, str]:
    """Tensor with a quantizer -> the node it belongs to: a parameter's reader, an activation's maker, an input's reader."""
    return {tensor: sim.quantizers[names[0]].op for tensor, names in _tensors(sim).items()}


def group_by_op_name(sim: QuantizationSimModel) -> GroupFunction:
    """A ``group_fn`` that puts the quantizers of one node together."""
    return get_quantizer_op_names(sim).get


def analyze_per_quantizer_sensitivity(
    sim: QuantizationSimModel, metric: SensitivityMetric, group_fn: GroupFunction | None = None
) -> Scores:
    """Group of quantizers -> the metric with only these, the most sensitive first.

    Args:
        sim: calibrated; as it was afterwards.
        metric: rates a session.
        group_fn: tensor -> name of its group, or ``None`` to leave it out; by default every tensor is one.

    Raises:
        CalibrationError: (a RuntimeError) no quantizer works, or none is in a group.
    """
    groups: dict[str, list[str]] = {}
    for tensor, names in _tensors(sim).items():
        key = tensor if group_fn is None else group_fn(tensor)
        if key is not None:
            groups.setdefault(key, []).extend(names)
    if not groups:
        raise CalibrationError(
            "analyze_per_quantizer_sensitivity",
            "no quantizer that works is in a group",
            "calibrate the simulation, enable quantizers, or let group_fn return a name for some of them",
        )
    scores = scores_of(open_subject(sim), metric, groups, alone=True)
    return dict(sorted(scores.items(), key=lambda item: item[1], reverse=metric.higher_is_worse))


def save_sensitivity_results(
    scores: Mapping[str, float], save_path: str = "./sensitivity_results.json", details: Mapping[str, str] | None = None
) -> None:
    """Write scores as JSON in their order."""
    told = details or {}
    write_data(save_path, {"ranking": [
        {"rank": i, "name": name, "score": score, **({"detail": told[name]} if name in told else {})}
        for i, (name, score) in enumerate(scores.items(), 1)
    ]})  # fmt: skip


def load_sensitivity_results(input_path: str) -> Scores:
    """Read the file that :func:`save_sensitivity_results` wrote.

    Raises:
        ConfigError: the file cannot be read, or is another one.
    """
    remedy = "give a file that save_sensitivity_results wrote"
    document = read_document(input_path, ConfigError, remedy=remedy, kind=".json")
    try:
        return {str(row["name"]): float(row["score"]) for row in document["ranking"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(str(input_path), f"it holds no ranking: {error!r}", remedy) from error


def save_sensitivity_plot(
    scores: Mapping[str, float],
    metric: SensitivityMetric,
    save_path: str = "./sensitivity_plot.html",
    highlight_patterns: list[str] | None = None,
    details: Mapping[str, str] | None = None,
    details_label: str = "Details",
) -> None:
    """Write scores as a page with a chart and a table; patterns are for AIMET's interactive page and have no effect."""
    told = details or {}
    named = {f"{name} ({details_label}: {told[name]})" if name in told else name: s for name, s in scores.items()}
    write_page(save_path, f"Sensitivity by {metric.name}", scores_chart(named, metric.name))


# ------------------------------------------------------------------------------------ ranges


def visualize_stats(sim: QuantizationSimModel, save_path: str = "./quant_stats_visualization.html") -> None:
    """Write the lowest and highest value of every quantizer's grid as two pages, with a chart and a table each.

    Args:
        sim: calibrated.
        save_path: what the names of the pages begin with: ``<path>_activations.html`` and ``<path>_weights.html``.

    Raises:
        ConfigError: (a ValueError) ``save_path`` has not the suffix ``.html``.
        CalibrationError: the simulation is not calibrated.
    """
    write_ranges(sim, save_path, "Ranges of the quantizers", apart=True)
