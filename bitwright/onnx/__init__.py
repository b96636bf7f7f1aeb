"""The front end for ONNX models, on ``onnx_ir`` and ONNX Runtime."""

from bitwright.core.health.repair import Stabilized
from bitwright.core.health.report import HealthReport
from bitwright.core.placement.user_scheme import QuantizationDataType, QuantScheme
from bitwright.core.simulation.sites import Site, SiteGroup, SiteMap
from bitwright.onnx.batch_norm_fold import fold_all_batch_norms, fold_all_batch_norms_to_weight
from bitwright.onnx.health.check import check_model
from bitwright.onnx.model.data import Pictures, load_data
from bitwright.onnx.model.load import Loaded, load_model
from bitwright.onnx.model.view import OnnxView
from bitwright.onnx.pipeline import Result, quantize
from bitwright.onnx.ptq import (
    CrossLayerScaling,
    HighBiasFold,
    QuantParams,
    add_biases,
    apply_bias_correction,
    apply_spinquant,
    awq_model,
    correct_bias,
    equalize_bn_folded_model,
    equalize_model,
    fold_norms,
    rotate_model,
    smooth_model,
)
from bitwright.onnx.reconstruct import (
    apply_adaround,
    apply_adascale,
    apply_gptq,
    apply_reconstruction,
    apply_seq_mse,
)
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.onnx.stabilize import progressive, stabilize

__all__ = [
    "CrossLayerScaling",
    "HealthReport",
    "HighBiasFold",
    "Loaded",
    "OnnxView",
    "Pictures",
    "QuantParams",
    "QuantScheme",
    "QuantizationDataType",
    "QuantizationSimModel",
    "Result",
    "Site",
    "SiteGroup",
    "SiteMap",
    "Stabilized",
    "add_biases",
    "apply_adaround",
    "apply_adascale",
    "apply_bias_correction",
    "apply_gptq",
    "apply_reconstruction",
    "apply_seq_mse",
    "apply_spinquant",
    "awq_model",
    "check_model",
    "correct_bias",
    "equalize_bn_folded_model",
    "equalize_model",
    "fold_all_batch_norms",
    "fold_all_batch_norms_to_weight",
    "fold_norms",
    "load_data",
    "load_model",
    "progressive",
    "quantize",
    "rotate_model",
    "smooth_model",
    "stabilize",
]
