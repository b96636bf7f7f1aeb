import json

import pytest
from aimet_onnx import QuantizationSimModel
from aimet_onnx.qc_quantize_op import GroupedBlockQuantizeDequantize
from aimet_onnx.quantsim import set_grouped_blockwise_quantization_for_weights, set_lpbq_for_params

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
set_grouped_blockwise_quantization_for_weights(
    sim, ("Gemm", "Conv"), bitwidth=4, decompressed_bw=8, block_size=64, nodes_to_exclude=["conv2"]
)
sim.compute_encodings(feeds())
quantizer = sim.qc_quantize_op_dict["fc.weight"]
assert isinstance(quantizer, GroupedBlockQuantizeDequantize) and quantizer.decompressed_bw == 8
assert len(quantizer.get_encodings()) == 10 * 8
assert len(sim.qc_quantize_op_dict["conv1.weight"].get_encodings()) == 8, "64 does not divide its 3 channels"

sim.export(".", "lpbq")
with open("lpbq.encodings") as file:
    written = {entry["name"]: entry for entry in json.load(file)["param_encodings"]}["fc.weight"]
assert written["enc_type"] == "LPBQ" and (written["bw"], written["compressed_bw"]) == (8, 4)
assert written["block_size"] == 64 and len(written["scale"]) == 10 and len(written["per_block_int_scale"]) == 80
record = quantizer.export_encodings("1.0.0")
assert {key: written[key] for key in record} == record

set_lpbq_for_params(sim, bitwidth=4, block_size=32, op_types={"Gemm"})
set_lpbq_for_params(sim, bitwidth=4, block_size=32, nodes_to_include={"fc"})
sim.compute_encodings(feeds())
assert len(sim.qc_quantize_op_dict["fc.weight"].get_encodings()) == 10 * 16
with pytest.raises(ValueError):
    set_lpbq_for_params(sim, bitwidth=4, block_size=32)
with pytest.raises(ValueError):
    set_lpbq_for_params(sim, bitwidth=4, block_size=64, nodes_to_include={"conv1"})
