"""``aimet_onnx.analysis``: sensitivity of single quantizers, and ranges as a page."""

from bitwright.aimet_onnx.analysis.sensitivity import (
    SensitivityMetric,
    analyze_per_quantizer_sensitivity,
    get_quantizer_op_names,
    group_by_op_name,
    load_sensitivity_results,
    make_topk_logit_psnr_metric,
    save_sensitivity_plot,
    save_sensitivity_results,
)
from bitwright.aimet_onnx.analysis.visualization import visualize_stats
from bitwright.aimet_onnx.quant_analyzer import analyze_per_layer_sensitivity

__all__ = [
    "SensitivityMetric",
    "analyze_per_layer_sensitivity",
    "analyze_per_quantizer_sensitivity",
    "get_quantizer_op_names",
    "group_by_op_name",
    "load_sensitivity_results",
    "make_topk_logit_psnr_metric",
    "save_sensitivity_plot",
    "save_sensitivity_results",
    "visualize_stats",
]
