import aimet_onnx
import numpy as np
import onnxruntime as ort
from aimet_onnx.batch_norm_fold import fold_all_batch_norms_to_weight

from tests.aimet.onnx_nets import feeds, net

model = net()
expected = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
fold_all_batch_norms_to_weight(model)
sim = aimet_onnx.QuantizationSimModel(model, param_type="int8", activation_type=aimet_onnx.int8)
sim.compute_encodings(feeds())
(output,) = sim.session.run(None, feeds()[0])
assert 0 < np.abs(output - expected).max() < 0.2
sim.export(path=".", filename_prefix="net")
