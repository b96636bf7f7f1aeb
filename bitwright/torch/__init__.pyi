from bitwright.algorithms.bias_correct import QuantParams as QuantParams
from bitwright.core.health.repair import Stabilized as Stabilized
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
from bitwright.torch.adapters.view import TorchView as TorchView
from bitwright.torch.batch_norm_fold import fold_given_batch_norms as fold_given_batch_norms
from bitwright.torch.calls.batches import Inputs as Inputs
from bitwright.torch.cross_layer import CrossLayerScaling as CrossLayerScaling
from bitwright.torch.cross_layer import HighBiasFold as HighBiasFold
from bitwright.torch.prepare import prepare_model as prepare_model
from bitwright.torch.ranks import gather_batches as gather_batches
from bitwright.torch.reconstruct import (
    Adaround as Adaround,
)
from bitwright.torch.reconstruct import (
    AdaroundParameters as AdaroundParameters,
)
from bitwright.torch.reconstruct import (
    SeqMseParams as SeqMseParams,
)
from bitwright.torch.reconstruct import (
    apply_adascale as apply_adascale,
)
from bitwright.torch.reconstruct import (
    apply_seq_mse as apply_seq_mse,
)
from bitwright.torch.simulation.quantsim import (
    QuantizationDataType as QuantizationDataType,
)
from bitwright.torch.simulation.quantsim import (
    QuantizationSimModel as QuantizationSimModel,
)
from bitwright.torch.simulation.quantsim import (
    QuantScheme as QuantScheme,
)
from bitwright.torch.training import Distillation as Distillation
from bitwright.torch.training import LowRankCorrection as LowRankCorrection
from bitwright.torch.training import TrainingGuard as TrainingGuard
from bitwright.torch.training import WeightFreezing as WeightFreezing
from bitwright.torch.training import dampening_loss as dampening_loss
from bitwright.torch.training import distillation_loss as distillation_loss
from bitwright.torch.training import fold_all_batch_norms_to_scale as fold_all_batch_norms_to_scale
from bitwright.torch.training import freeze_batch_norms as freeze_batch_norms
from bitwright.torch.training import parameter_groups as parameter_groups
from bitwright.torch.training import pivot_gradients as pivot_gradients
from bitwright.torch.training import reestimate_bn_stats as reestimate_bn_stats
