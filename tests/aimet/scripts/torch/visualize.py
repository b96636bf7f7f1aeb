"""Pages of ranges of weights, before and after equalization, and of a simulation."""

import copy
import os

from aimet_torch.cross_layer_equalization import equalize_model
from aimet_torch.quantsim import QuantizationSimModel
from aimet_torch.visualization_tools import visualize_stats
from aimet_torch.visualize_model import (
    visualize_changes_after_optimization,
    visualize_relative_weight_ranges_to_identify_problematic_layers,
    visualize_weight_ranges,
)

from tests.aimet.nets import Net, batch

os.makedirs("visualization", exist_ok=True)
model = Net().eval()
equalized = copy.deepcopy(model)
equalize_model(equalized, (1, 3, 12, 12))
visualize_weight_ranges(model, results_dir="./visualization", selected_layers=["conv1", "conv2"])
visualize_relative_weight_ranges_to_identify_problematic_layers(model, "./visualization")
visualize_changes_after_optimization(model, equalized, "./visualization")
sim = QuantizationSimModel(equalized, batch())
sim.compute_encodings(lambda model: model(batch()))
visualize_stats(sim, batch(), save_path="./visualization/stats.html")
assert {
    "visualize_weight_ranges.html",
    "visualize_relative_weight_ranges_to_identify_problematic_layers.html",
    "visualize_changes_after_optimization.html",
    "stats.html",
} <= set(os.listdir("visualization"))
