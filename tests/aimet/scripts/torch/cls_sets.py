import torch
from aimet_torch.cross_layer_equalization import ClsSetInfo, CrossLayerScaling, HighBiasFold

from tests.aimet.nets import Separable

model, x = Separable(), torch.randn(2, 3, 8, 8)
before = model(x)
factors = CrossLayerScaling.scale_cls_set_with_depthwise_layers((model.conv1, model.depthwise, model.conv3))
assert len(factors) == 2 and torch.allclose(model(x), before, atol=1e-5)
factor = CrossLayerScaling.scale_cls_set_with_conv_layers((model.depthwise, model.conv3))
assert len(factor) == 6
info = ClsSetInfo(ClsSetInfo.ClsSetLayerPairInfo(model.depthwise, model.conv3, factor, True))
norm = torch.nn.BatchNorm2d(6)
norm.bias.data.fill_(5.0)
HighBiasFold.bias_fold([info], {model.depthwise: norm})
assert torch.isfinite(model(x)).all()
