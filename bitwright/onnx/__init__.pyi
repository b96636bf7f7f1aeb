from bitwright.algorithms.bias_correct import QuantParams as QuantParams
from bitwright.core.health.repair import Stabilized as Stabilized
from bitwright.core.health.report import HealthReport as HealthReport
from bitwright.core.placement.user_scheme import (
    QuantizationDataType as QuantizationDataType,
)
from bitwright.core.placement.user_scheme import (
    QuantScheme as QuantScheme,
)
from bitwright.core.simulation.sites import Site as Site
from bitwright.core.simulation.sites import SiteGroup as SiteGroup
from bitwright.core.simulation.sites import SiteMap as SiteMap
from bitwright.methods.bias import add_biases as add_biases
from bitwright.methods.bias import apply_bias_correction as apply_bias_correction
from bitwright.methods.bias import correct_bias as correct_bias
from bitwright.methods.channels import apply_spinquant as apply_spinquant
from bitwright.methods.channels import awq_model as awq_model
from bitwright.methods.channels import equalize_bn_folded_model as equalize_bn_folded_model
from bitwright.methods.channels import equalize_model as equalize_model
from bitwright.methods.channels import fold_norms as fold_norms
from bitwright.methods.channels import rotate_model as rotate_model
from bitwright.methods.channels import smooth_model as smooth_model
from bitwright.methods.folding import fold_all_batch_norms as fold_all_batch_norms
from bitwright.methods.folding import fold_all_batch_norms_to_weight as fold_all_batch_norms_to_weight
from bitwright.methods.health import check_model as check_model
from bitwright.methods.pipeline import Result as Result
from bitwright.methods.pipeline import quantize as quantize
from bitwright.methods.rounding import apply_gptq as apply_gptq
from bitwright.methods.rounding import apply_reconstruction as apply_reconstruction
from bitwright.methods.stabilization import progressive as progressive
from bitwright.methods.stabilization import stabilize as stabilize
from bitwright.onnx.cross_layer import CrossLayerScaling as CrossLayerScaling
from bitwright.onnx.cross_layer import HighBiasFold as HighBiasFold
from bitwright.onnx.model.data import Pictures as Pictures
from bitwright.onnx.model.data import load_data as load_data
from bitwright.onnx.model.load import Loaded as Loaded
from bitwright.onnx.model.load import load_model as load_model
from bitwright.onnx.model.view import OnnxView as OnnxView
from bitwright.onnx.reconstruct import (
    apply_adaround as apply_adaround,
)
from bitwright.onnx.reconstruct import (
    apply_adascale as apply_adascale,
)
from bitwright.onnx.reconstruct import (
    apply_seq_mse as apply_seq_mse,
)
from bitwright.onnx.simulation.quantsim import QuantizationSimModel as QuantizationSimModel
