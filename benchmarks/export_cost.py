"""What making ONNX of a simulation costs, with what torch's exporter does for every program alike kept, and without.

    python benchmarks/export_cost.py

CPU seconds of :func:`~bitwright.torch.simulation.export.marked_onnx`, the median of 5 repetitions in which both take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest import mock

import measure  # noqa: F401  first: it puts the repository on the path
import torch
from torch import Tensor, nn

from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from bitwright.torch.simulation import exported_program as translations
from bitwright.torch.simulation.export import marked_onnx
from tests.support.zoo import ZOO

REPETITIONS = 5


def two_layers() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(2, 8)


def resnet() -> tuple[nn.Module, Tensor]:
    model, x = of_zoo("resnet18")
    fold_all_batch_norms(model, dummy_input=x)
    return model, x


def of_zoo(name: str) -> tuple[nn.Module, Tensor]:
    case = ZOO[name]
    return case.build(), case.example().args[0]


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "two layers": two_layers,
    "ResNet-18, folded": resnet,
    "transformer encoder": lambda: of_zoo("encoder-pre-norm"),
}


def seconds(sim: QuantizationSimModel, x: Tensor, kept: bool) -> float:
    with mock.patch.object(translations, "knows_steps", lambda: kept):
        start = time.process_time()
        marked_onnx(sim, x)
        return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}\n\n| network | without | kept |\n|---|---:|---:|")
    for name, build in NETWORKS.items():
        torch.manual_seed(0)
        model, x = build()
        sim = QuantizationSimModel(model, x)
        sim.compute_encodings([x], progress=False)
        found: dict[bool, list[float]] = {False: [], True: []}
        for repetition in range(REPETITIONS + 1):
            for kept, values in found.items():
                value = seconds(sim, x, kept)
                if repetition:  # the first fills what is kept
                    values.append(value)
        print(f"| {name} | {statistics.median(found[False]):.3f} | {statistics.median(found[True]):.3f} |")


if __name__ == "__main__":
    main()
