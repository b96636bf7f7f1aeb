import torch
from aimet_common.utils import AimetLogger, Handle
from aimet_torch import utils

from tests.aimet.nets import Net, batch

model = Net()
AimetLogger.get_area_logger(AimetLogger.LogAreas.Quant).debug("nothing")
assert utils.get_layer_name(model, model.conv1) == "conv1"
assert utils.get_module_to_name_dict(model)[model.fc] == "fc" and not utils.is_model_on_gpu(model)
assert utils.is_leaf_module(model.fc) and utils.get_device(model) == torch.device("cpu")
with utils.in_eval_mode(model):
    assert not model.training and not model.fc.training
assert model.training
assert utils.create_rand_tensors_given_shapes((1, 2), torch.device("cpu"))[0].shape == (1, 2)
utils.replace_modules(model, lambda m: isinstance(m, torch.nn.ReLU), lambda m: torch.nn.ReLU6())
assert isinstance(model.relu1, torch.nn.ReLU6)
utils.default_forward_fn(model.eval(), [batch(), torch.zeros(4)])
done = []
with Handle(lambda: done.append(1)):
    pass
assert done == [1]
