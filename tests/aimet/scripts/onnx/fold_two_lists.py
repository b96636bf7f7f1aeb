import onnxruntime as ort
from aimet_onnx.batch_norm_fold import fold_all_batch_norms_to_weight

from tests.aimet.onnx_nets import feeds, net

model = net()
before = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
conv_bn, bn_conv = fold_all_batch_norms_to_weight(model)
assert [(conv.name, bn.name) for conv, bn in conv_bn] == [("conv1", "bn1"), ("conv2", "bn2")] and not bn_conv
assert not any(node.op_type == "BatchNormalization" for node in model.graph.node)
after = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
assert abs(after - before).max() < 1e-4
