import numpy as np
import pytest
from aimet_onnx import QuantizationSimModel, float16, int4, int16, qtype

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded(), param_type=int4, activation_type=int16)
table = sim.qc_quantize_op_dict
assert table["conv1.weight"].bitwidth == 4 and table["input"].bitwidth == 16
half = QuantizationSimModel(folded(), param_type="float16", activation_type=float16)
half.compute_encodings(feeds())
full = QuantizationSimModel(folded()).session.run(None, feeds()[0])[0]
assert np.abs(half.session.run(None, feeds()[0])[0] - full).max() < 0.01
assert half.qc_quantize_op_dict["input"].precision() == qtype.float(5, 10) == float16
with pytest.raises(ValueError):
    QuantizationSimModel(folded(), param_type="int7000")
