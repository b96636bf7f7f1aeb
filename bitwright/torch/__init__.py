"""The PyTorch front end: simulation, folding and export of eager modules, without tracing or rewriting them."""

from bitwright.core.health.repair import Stabilized
from bitwright.core.simulation.sites import Site, SiteGroup, SiteMap
from bitwright.torch.adapters.view import TorchView
from bitwright.torch.batch_norm_fold import fold_all_batch_norms, fold_given_batch_norms
from bitwright.torch.calls.batches import Inputs
from bitwright.torch.cross_layer import CrossLayerScaling, HighBiasFold
from bitwright.torch.health import check_model
from bitwright.torch.pipeline import Result, quantize
from bitwright.torch.prepare import prepare_model
from bitwright.torch.ptq import (
    QuantParams,
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
from bitwright.torch.reconstruct import (
    Adaround,
    AdaroundParameters,
    SeqMseParams,
    apply_adascale,
    apply_gptq,
    apply_reconstruction,
    apply_seq_mse,
)
from bitwright.torch.simulation.quantsim import QuantizationDataType, QuantizationSimModel, QuantScheme
from bitwright.torch.stabilize import progressive, stabilize
from bitwright.torch.training import TrainingGuard

__all__ = [
    "Adaround",
    "AdaroundParameters",
    "CrossLayerScaling",
    "HighBiasFold",
    "Inputs",
    "QuantParams",
    "QuantScheme",
    "QuantizationDataType",
    "QuantizationSimModel",
    "Result",
    "SeqMseParams",
    "Site",
    "SiteGroup",
    "SiteMap",
    "Stabilized",
    "TorchView",
    "TrainingGuard",
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
    "fold_given_batch_norms",
    "fold_norms",
    "prepare_model",
    "progressive",
    "quantize",
    "rotate_model",
    "smooth_model",
    "stabilize",
]
