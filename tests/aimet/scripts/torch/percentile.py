from aimet_common.defs import QuantScheme
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch(), quant_scheme=QuantScheme.post_training_percentile)
sim.compute_encodings(lambda model: model(batch()))
widest = sim.model.relu2.output_quantizers[0].get_max()
sim.set_percentile_value(99)
sim.compute_encodings(lambda model: model(batch()))
assert sim.model.relu2.output_quantizers[0].get_max() < widest
