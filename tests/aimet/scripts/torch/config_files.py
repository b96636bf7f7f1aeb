import json

from aimet_common.quantsim_config.utils import get_path_for_per_channel_config, get_path_for_per_tensor_config
from aimet_torch import QuantizationSimModel
from aimet_torch.common.quantsim_config.config_utils import get_path_for_target_config

from tests.aimet.nets import Net, batch

for path, count in ((get_path_for_per_channel_config(), 8), (get_path_for_per_tensor_config(), 1)):
    sim = QuantizationSimModel(Net().eval(), batch(), config_file=path)
    sim.compute_encodings(lambda model: model(batch()))
    assert sim.model.conv1.param_quantizers["weight"].get_scale().numel() == count
QuantizationSimModel(Net().eval(), batch(), config_file=get_path_for_target_config("htp_quantsim_config_v73"))
with open(get_path_for_per_channel_config()) as file:
    config = json.load(file)
config["model_output"] = {"is_output_quantized": "True"}
with open("config.json", "w") as file:
    json.dump(config, file)
QuantizationSimModel(Net().eval(), batch(), config_file="config.json")
