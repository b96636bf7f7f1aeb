"""choose_mixed_precision: candidates, both callbacks, the Pareto list and its files."""

import os

import torch
from aimet_torch.amp.mixed_precision_algo import EvalCallbackFactory
from aimet_torch.common.defs import CallbackFunc, QuantizationDataType
from aimet_torch.mixed_precision import choose_mixed_precision
from aimet_torch.quantsim import QuantizationSimModel

from tests.aimet.nets import Net, images

model = Net().eval()
loader = images(16)
with torch.no_grad():
    labels = [model(x).argmax(1) for x, _ in loader]

sim = QuantizationSimModel(model, next(iter(loader))[0], default_param_bw=16, default_output_bw=16)


def forward_pass(model, _):
    with torch.no_grad():
        for x, _ in loader:
            model(x)


def agreement(model, _):
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).float().mean() for (x, _), y in zip(loader, labels, strict=True)]
    return float(sum(right) / len(right))


sim.compute_encodings(forward_pass, None)
kind = QuantizationDataType.int
candidates = [((16, kind), (16, kind)), ((16, kind), (8, kind)), ((8, kind), (8, kind)), ((8, kind), (4, kind))]
unlabelled = torch.utils.data.DataLoader(loader.dataset.tensors[0], batch_size=4)
phase1 = EvalCallbackFactory(unlabelled, forward_fn=lambda model, x: model(x)).sqnr(8)
pareto = choose_mixed_precision(
    sim,
    next(iter(loader))[0],
    candidates,
    phase1,
    CallbackFunc(agreement, None),
    0.1,
    "./amp",
    True,
    CallbackFunc(forward_pass, None),
    use_all_amp_candidates=True,
)
assert pareto is None or all(len(entry) == 4 for entry in pareto)
assert os.path.isdir("amp")
assert agreement(sim.model, None) >= 0.9
