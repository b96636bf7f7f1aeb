import numpy as np
from aimet_onnx.batch_norm_fold import BNLayer
from aimet_onnx.cross_layer_equalization import CrossLayerScaling, HighBiasFold

from tests.aimet.onnx_nets import folded

model = folded()
cls_set_info_list = CrossLayerScaling(model).scale_model()
pair = cls_set_info_list[0].cls_pair_info_list[0]
assert pair.layer1.name == "conv1" and pair.layer2.name == "conv2" and pair.relu_activation_between_layers
bn_layers = {"conv1": BNLayer(gamma=np.ones(8), beta=np.full(8, 5.0))}
HighBiasFold(model).bias_fold(cls_set_info_list, bn_layers)
