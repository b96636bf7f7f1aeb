import numpy as np
import onnxruntime as ort
from aimet_onnx import QuantizationSimModel

from tests.aimet.onnx_nets import feeds, folded

model = folded()
sim = QuantizationSimModel(model)
before = sim.session.run(None, feeds()[0])[0]
assert np.allclose(before, ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0], atol=1e-5)
sim.compute_encodings(feeds())
assert not np.allclose(sim.session.run(None, feeds()[0])[0], before, atol=1e-5)
