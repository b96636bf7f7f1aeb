import json

import numpy as np
import onnxruntime as ort
from aimet_onnx import QuantizationSimModel, encodings_to_onnx_qdq

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
sim.compute_encodings(feeds())
qdq = sim.to_onnx_qdq()
expected = sim.session.run(None, feeds()[0])[0]
step = sim.qc_quantize_op_dict["output"].get_encodings()[0].delta
options = ort.SessionOptions()
options.add_session_config_entry("session.x64quantprecision", "1")  # exact sums on CPUs without VNNI too
got = ort.InferenceSession(qdq.SerializeToString(), options).run(None, feeds()[0])[0]
assert np.abs(got - expected).max() <= 1.01 * step
again = QuantizationSimModel.from_onnx_qdq(qdq)
assert np.abs(again.session.run(None, feeds()[0])[0] - expected).max() <= 1.01 * step
sim.export(".", "net")
made = encodings_to_onnx_qdq(folded(), json.load(open("net.encodings")))
assert any(node.op_type == "DequantizeLinear" for node in made.graph.node)
