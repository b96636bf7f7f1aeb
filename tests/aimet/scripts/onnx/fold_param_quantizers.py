import numpy as np
from aimet_onnx import QuantizationSimModel

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded(), param_type="int4")
sim.compute_encodings(feeds())
before = sim.session.run(None, feeds()[0])[0]
step = sim.qc_quantize_op_dict["output"].get_encodings()[0].delta
sim.fold_param_quantizers()
assert not sim.qc_quantize_op_dict["conv1.weight"].enabled
assert np.abs(sim.session.run(None, feeds()[0])[0] - before).max() <= 1.01 * step
