from aimet_common.defs import QuantizationDataType
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

model, x = Net().eval(), batch()
sim = QuantizationSimModel(
    model, x, default_output_bw=16, default_param_bw=16, default_data_type=QuantizationDataType.float
)
sim.compute_encodings(lambda m: m(x))
assert sim.model.relu1.output_quantizers[0].is_float16()
assert (sim.model(x) - model(x)).abs().max() < 0.01
