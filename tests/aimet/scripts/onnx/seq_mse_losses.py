import numpy as np
from aimet_onnx import QuantizationSimModel
from aimet_onnx.sequential_mse.seq_mse import SeqMseParams, SequentialMse

from tests.aimet.onnx_nets import feeds, folded

scales = []
for loss_fn in ("mse", "l1", "sqnr"):
    model = folded()
    sim = QuantizationSimModel(model, param_type="int2")
    params = SeqMseParams(num_batches=2, num_candidates=10, loss_fn=loss_fn)
    SequentialMse(model, sim, params, feeds()).apply_seq_mse_algo()
    quantizer = sim.qc_quantize_op_dict["conv2.weight"]
    assert quantizer.is_encoding_frozen()
    scales.append([encoding.delta for encoding in quantizer.get_encodings()])
assert not np.array_equal(scales[0], scales[1])
