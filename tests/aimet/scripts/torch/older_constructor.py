"""Keywords of the constructor that scripts for older versions write."""

from aimet_torch.common.defs import QuantScheme
from aimet_torch.quantsim import QuantizationSimModel

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(
    Net().eval(),
    dummy_input=batch(),
    quant_scheme=QuantScheme.post_training_tf_enhanced,
    rounding_mode="nearest",
    default_output_bw=8,
    default_param_bw=8,
    in_place=False,
)
sim.compute_encodings(lambda model, _: model(batch()), None)
try:
    QuantizationSimModel(Net().eval(), batch(), rounding_mode="stochastic")
except ValueError as error:
    assert "nearest" in str(error)
else:
    raise AssertionError("stochastic rounding was accepted")
