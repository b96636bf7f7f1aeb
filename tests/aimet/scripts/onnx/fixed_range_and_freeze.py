import numpy as np
from aimet_onnx import QuantizationSimModel

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
sim.qc_quantize_op_dict["relu1.out"].set_fixed_encoding_range((0.0, 4.0))
sim.compute_encodings(feeds())
(encoding,) = sim.qc_quantize_op_dict["relu1.out"].get_encodings()
assert encoding.min == 0 and np.isclose(encoding.max, 4)
quantizer = sim.qc_quantize_op_dict["input"]
before = quantizer.get_encodings()[0].max
quantizer.freeze_encodings()
assert quantizer.is_encoding_frozen()
sim.compute_encodings([{"input": 10 * feeds()[0]["input"]}])
assert quantizer.get_encodings()[0].max == before
