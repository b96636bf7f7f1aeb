"""``aimet_onnx.quant_analyzer``: which layers a quantized model loses by."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from bitwright.aimet_common.analyzer import QuantAnalyzerBase, Scores, checked
from bitwright.aimet_common.defs import CallbackFunc, QuantScheme
from bitwright.aimet_onnx._models import proto_of
from bitwright.aimet_onnx.float_methods import fold_all_batch_norms_to_weight
from bitwright.aimet_onnx.quantsim import QuantizationSimModel

__all__ = ["CallbackFunc", "QuantAnalyzer", "analyze_per_layer_sensitivity"]


class QuantAnalyzer(QuantAnalyzerBase):
    """The sensitivity of a model, layer by layer, rated by a function of the user's.

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
        sim: calibrated; as it was afterwards.
        eval_fn: function of an ``InferenceSession``.
        filename: of an HTML page about it.
    """
    analyzer = QuantAnalyzer(None, None, eval_fn, eval_fn)
    return analyzer.perform_per_layer_analysis_by_enabling_quantizers(sim, None, filename)
