from aimet_torch import QuantizationSimModel
from aimet_torch.utils import remove_activation_quantizers

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch(), default_param_bw=4)
remove_activation_quantizers(sim.model)
sim.compute_encodings(lambda model: None)
sim.model(batch())
