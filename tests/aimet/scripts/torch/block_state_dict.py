import torch
from aimet_torch.quantization.affine import AffineEncoding, QuantizeDequantize

q = QuantizeDequantize((), 8, False)
q.set_range(torch.tensor(-1.0), torch.tensor(3.0))
other = QuantizeDequantize((), 8, False)
other.load_state_dict(q.state_dict())
assert other.is_initialized() and other.get_offset() == q.get_offset() == -64
encoding = q.get_encodings()
assert isinstance(encoding, AffineEncoding) and not encoding.symmetry and encoding.num_steps == 255
third = QuantizeDequantize.from_encodings(encoding)
x = torch.randn(100)
assert torch.equal(third(x), q(x)) and torch.equal(encoding.quantize_dequantize(x), q(x))
assert encoding.to_qnn_encoding_dict("0.6.1")[0]["offset"] == -64
