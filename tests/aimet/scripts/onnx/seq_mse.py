from aimet_onnx import QuantizationSimModel, apply_seq_mse
from aimet_onnx.sequential_mse.seq_mse import SeqMseParams, SequentialMse

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded(), param_type="int4")
apply_seq_mse(sim, feeds(), num_candidates=4, nodes_to_exclude=["fc"])
assert sim.qc_quantize_op_dict["conv1.weight"].is_encoding_frozen()
assert not sim.qc_quantize_op_dict["fc.weight"].is_encoding_frozen()
older = QuantizationSimModel(folded(), param_type="int4")
SequentialMse(folded(), older, SeqMseParams(num_batches=1, num_candidates=4), feeds()).apply_seq_mse_algo()
assert older.qc_quantize_op_dict["fc.weight"].is_encoding_frozen()
