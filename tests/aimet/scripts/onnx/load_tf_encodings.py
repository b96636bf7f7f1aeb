from aimet_onnx import QuantizationSimModel

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
sim.compute_encodings(feeds())
quantizer = sim.qc_quantize_op_dict["relu2.out"]
(encoding,) = quantizer.get_encodings()
encoding.max *= 2
quantizer.load_encodings([encoding])
assert quantizer.encodings[0].max > encoding.max * 0.99
record = quantizer.export_encodings("0.6.1")[0]
assert record["bitwidth"] == 8 and record["is_symmetric"] == "False"
assert quantizer.export_encodings("1.0.0")["enc_type"] == "PER_TENSOR"
