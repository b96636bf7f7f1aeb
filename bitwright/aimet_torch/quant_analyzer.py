"""``aimet_torch.quant_analyzer``: which layers a quantized model loses by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from bitwright.aimet_common.analyzer import QuantAnalyzerBase, Scores, checked
from bitwright.aimet_common.defs import CallbackFunc, QuantScheme
from bitwright.aimet_torch._core import walk_modules
from bitwright.aimet_torch.float_methods import fold_all_batch_norms
from bitwright.aimet_torch.quantsim import QuantizationSimModel
from bitwright.errors import ConfigError

__all__ = ["CallbackFunc", "QuantAnalyzer"]


class QuantAnalyzer(QuantAnalyzerBase):
    """The sensitivity of a model, layer by layer, rated by a function of the user's.

    Args:
        model: in float; left as it is.
        dummy_input: an example of its input.
        forward_pass_callback, eval_callback: functions of the model: one runs calibration data, one returns a number.
        modules_to_ignore: modules of ``model`` that are left in float.

    Raises:
        ConfigError: (a ValueError) a callback is not a function, or a module is none of ``model``'s.
    """

    def __init__(
        self,
        model: nn.Module,
        dummy_input: Any,
        forward_pass_callback: Callable[[nn.Module], Any],
        eval_callback: Callable[[nn.Module], float],
        modules_to_ignore: Sequence[nn.Module] | None = None,
    ) -> None:
        super().__init__(model, dummy_input, forward_pass_callback, eval_callback)
        names = {id(module): name for name, module in walk_modules(model)}
        self._ignored = []
        for module in modules_to_ignore or ():
            if id(module) not in names:
                problem = f"a {type(module).__name__} of it is not part of the model"
                raise ConfigError("modules_to_ignore", problem, "pass modules of the model that is analyzed")
            self._ignored.append(names[id(module)])

    def analyze(
        self,
        quant_scheme: QuantScheme = QuantScheme.post_training_tf_enhanced,
        default_param_bw: int = 8,
        default_output_bw: int = 8,
        config_file: str | None = None,
        results_dir: str = "./tmp/",
    ) -> None:
        """Do every step and write its files into ``results_dir``: pages, and their numbers as JSON."""
        sim = self._create_quantsim_and_encodings(quant_scheme, default_param_bw, default_output_bw, config_file)
        self._all_steps(sim, results_dir, histograms=quant_scheme == QuantScheme.post_training_tf_enhanced)

    def _create_quantsim_and_encodings(
        self, quant_scheme: Any, default_param_bw: int, default_output_bw: int, config_file: str | None
    ) -> QuantizationSimModel:
        """A calibrated simulation of a copy of the model, with its batch norms folded."""
        model = copy.deepcopy(self._model)
        fold_all_batch_norms(model, None, self._dummy_input)
        sim = QuantizationSimModel(
            model,
            self._dummy_input,
            quant_scheme,
            default_output_bw=default_output_bw,
            default_param_bw=default_param_bw,
            config_file=config_file,
            in_place=True,
        )
        for name in self._ignored:
            for site in sim.quantizers.values():
                if site.op == name or site.op.startswith(f"{name}."):
                    site.enabled = False
        sim.compute_encodings(self._forward_pass_callback)
        return sim

    def _float_score(self, subject: Any) -> float:
        return checked(self._eval_callback, self._model, "eval_callback")

    def perform_per_layer_analysis_by_enabling_quant_wrappers(self, sim: Any, results_dir: str) -> Scores:
        """Layer -> evaluation with only its quantizers; as ``per_layer_quant_enabled`` in ``results_dir``."""
        return self._per_layer(sim, results_dir, None, alone=True)

    def perform_per_layer_analysis_by_disabling_quant_wrappers(self, sim: Any, results_dir: str) -> Scores:
        """Layer -> evaluation with all quantizers but its own; as ``per_layer_quant_disabled`` in ``results_dir``."""
        return self._per_layer(sim, results_dir, None, alone=False)
