from aimet_onnx.batch_norm_fold import find_all_batch_norms_to_fold
from aimet_onnx.meta.connectedgraph import ConnectedGraph

from tests.aimet.onnx_nets import net

model = net()
graph = ConnectedGraph(model)
conv_bn, bn_conv = find_all_batch_norms_to_fold(graph)
assert [(conv.name, bn.name) for conv, bn in conv_bn] == [("conv1", "bn1"), ("conv2", "bn2")] and not bn_conv
assert sum(node.op_type == "BatchNormalization" for node in model.graph.node) == 2  # found, not folded
assert graph.get_all_ops()["conv1"].get_module().op_type == "Conv"
