import numpy as np
import pytest
from aimet_onnx import QuantizationSimModel
from aimet_onnx.quantsim import load_encodings_to_sim

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
sim.compute_encodings(feeds())
sim.export(".", "net")
other = QuantizationSimModel(folded())
assert load_encodings_to_sim(other, "net.encodings", strict=True) == []
assert np.allclose(other.session.run(None, feeds()[0])[0], sim.session.run(None, feeds()[0])[0])
record = {"bitwidth": 8, "dtype": "int", "is_symmetric": "False", "max": 4.0, "min": 0.0, "offset": 0, "scale": 4 / 255}
partial = {"version": "0.6.1", "activation_encodings": {"relu1.out": [record]}, "param_encodings": {}}
third = QuantizationSimModel(folded())
load_encodings_to_sim(third, partial, disable_missing_quantizers=False, allow_overwrite=False)
assert third.qc_quantize_op_dict["input"].enabled and third.qc_quantize_op_dict["relu1.out"].is_encoding_frozen()
load_encodings_to_sim(third, partial)
assert not third.qc_quantize_op_dict["input"].enabled
with pytest.raises(ValueError):
    load_encodings_to_sim(third, {**partial, "activation_encodings": {"nothing": [record]}})
