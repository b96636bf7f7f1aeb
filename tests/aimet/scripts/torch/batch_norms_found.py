import torch
from aimet_torch.batch_norm_fold import find_all_batch_norms_to_fold, find_standalone_batchnorm_ops
from aimet_torch.meta.connectedgraph import ConnectedGraph
from torch import nn

from tests.aimet.nets import Net

model, x = Net().eval(), torch.randn(1, 3, 12, 12)
conv_bn, bn_conv = find_all_batch_norms_to_fold(model, (1, 3, 12, 12))
assert conv_bn == [(model.conv1, model.bn1), (model.conv2, model.bn2)] and not bn_conv
assert isinstance(model.bn1, nn.BatchNorm2d)  # found, not folded

graph = ConnectedGraph(model, x)
assert [op.type for op in graph.ordered_ops][:3] == ["Conv", "BatchNormalization", "Relu"]
assert graph.get_op_from_module_name("conv1").get_module() is model.conv1
assert not find_standalone_batchnorm_ops(graph)

alone = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
(op,) = find_standalone_batchnorm_ops(ConnectedGraph(alone, x))
assert op.get_module() is alone[1] and op.dotted_name == "1"
