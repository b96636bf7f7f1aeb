from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
sim.compute_encodings(lambda model: model(batch()))
(record,) = sim.model.relu1.output_quantizers[0].get_legacy_encodings()
assert record["bitwidth"] == 8 and record["is_symmetric"] == "False" and record["offset"] <= 0
weights = sim.model.conv1.param_quantizers["weight"].get_legacy_encodings()
assert len(weights) == 8 and weights[0]["offset"] == -128
sim.model.relu1.output_quantizers[0].set_legacy_encodings([{**record, "max": 2 * record["max"]}])
assert sim.model.relu1.output_quantizers[0].get_max() > record["max"]
