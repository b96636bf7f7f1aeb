"""QuantAnalyzer: which layers lose, with its files."""

import json
import os

import torch
from aimet_torch.common.defs import CallbackFunc, QuantScheme
from aimet_torch.quant_analyzer import QuantAnalyzer

from tests.aimet.nets import Net, images

loader = images(16)
model = Net().eval()
with torch.no_grad():
    wanted = [model(x) for x, _ in loader]


def forward_pass(model, _):
    with torch.no_grad():
        for x, _ in loader:
            model(x)


def evaluate(model, _):
    with torch.no_grad():
        return -float(sum((model(x) - y).square().mean() for (x, _), y in zip(loader, wanted, strict=True)))


analyzer = QuantAnalyzer(
    model=model,
    dummy_input=next(iter(loader))[0],
    forward_pass_callback=CallbackFunc(forward_pass, func_callback_args=None),
    eval_callback=CallbackFunc(evaluate, func_callback_args=None),
    modules_to_ignore=[model.relu1],
)
unlabelled = torch.utils.data.DataLoader(loader.dataset.tensors[0], batch_size=4)
analyzer.enable_per_layer_mse_loss(unlabeled_dataset_iterable=unlabelled, num_batches=2)
analyzer.analyze(
    quant_scheme=QuantScheme.post_training_tf_enhanced,
    default_param_bw=8,
    default_output_bw=8,
    config_file=None,
    results_dir="./results/",
)
for name in ("per_layer_quant_enabled", "per_layer_quant_disabled", "per_layer_mse_loss"):
    assert os.path.isfile(f"results/{name}.html")
    with open(f"results/{name}.json") as file:
        assert {"conv1", "conv2", "fc"} <= set(json.load(file))
for kind in ("weights", "activations"):
    assert os.path.isfile(f"results/min_max_ranges/{kind}.json")
assert os.listdir("results/weights_pdf") and os.listdir("results/activations_pdf")
