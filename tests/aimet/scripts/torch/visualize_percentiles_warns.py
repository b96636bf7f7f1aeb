"""The page with percentiles."""

import os

from aimet_torch.quantsim import QuantizationSimModel
from aimet_torch.visualization_tools import visualize_advanced_stats

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
sim.compute_encodings(lambda model: model(batch()))
visualize_advanced_stats(sim, batch(), save_path="./advanced.html", additional_percentiles=[1, 99])
assert os.path.isfile("advanced.html")
