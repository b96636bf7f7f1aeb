from aimet_onnx import QuantizationSimModel
from aimet_onnx.utils import make_dummy_input, make_psnr_eval_fn

from tests.aimet.onnx_nets import feeds, folded

assert make_dummy_input(folded())["input"].shape[1:] == (3, 12, 12)
sim = QuantizationSimModel(folded())
psnr = make_psnr_eval_fn(sim.session, feeds())
assert psnr(sim.session) == 100
sim.compute_encodings(feeds())
assert 20 < psnr(sim.session) < 100
assert QuantizationSimModel.remove_quantizers(sim.model).model.graph.node
