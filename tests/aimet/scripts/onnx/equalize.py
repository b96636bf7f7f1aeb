import numpy as np
import onnxruntime as ort
from aimet_onnx.cross_layer_equalization import equalize_model

from tests.aimet.onnx_nets import feeds, net

model = net()
before = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
equalize_model(model)
after = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
assert np.abs(after - before).max() < 0.2
