"""What making ONNX of a simulation costs, with what torch's exporter does for every program alike kept, and without.

    python benchmarks/export_cost.py

CPU seconds of :func:`~bitwright.torch.simulation.export.marked_onnx`, the median of 5 repetitions in which both take turns.

    python benchmarks/export_cost.py --split [--markdown FILE]

What a whole ``sim.export`` spends on its parts instead, in both front ends, as CPU time over a float forward pass of the same
batch (4 pictures of 224 x 224): least of 2 repetitions, each part timed by a wrapper around its function.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import measure  # first: it puts the repository on the path
import torch
from torch import Tensor, nn

from bitwright.export import artefacts
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx.model.session import open_session
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from bitwright.torch.simulation import export as torch_export
from bitwright.torch.simulation import exported_program as translations
from bitwright.torch.simulation.export import marked_onnx
from tests.support.zoo import ZOO, MobileNetV2, ResNet18

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


def pictures(build: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    model, x = build().eval(), torch.randn(4, 3, 224, 224)
    fold_all_batch_norms(model, dummy_input=x)
    return model, x


SPLIT: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "ResNet-18": lambda: pictures(ResNet18),
    "MobileNetV2": lambda: pictures(MobileNetV2),
}


def seconds(sim: QuantizationSimModel, x: Tensor, kept: bool) -> float:
    with mock.patch.object(translations, "knows_steps", lambda: kept):
        start = time.process_time()
        marked_onnx(sim, x)
        return time.process_time() - start


#: part -> the module and the name of its function, as the export calls it
PARTS: dict[str, tuple[Any, str]] = {
    "trace and translation": (torch_export, "marked_onnx"),
    "QDQ graph and integer weights": (artefacts, "to_qdq"),
    "float graph": (artefacts, "strip_sites"),
    "model files": (artefacts, "save_model"),
    "samples: simulation and its values": (artefacts, "_few_enough"),
    "samples: file": (artefacts, "write_samples"),
    "encodings and sites": (artefacts, "_write_encodings"),
}


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """CPU seconds by part, filled while exports run in the block."""
    found = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                found[part] += time.process_time() - start

        return run

    with ExitStack() as stack:
        for part, (module, name) in PARTS.items():
            stack.enter_context(mock.patch.object(module, name, timed(part, getattr(module, name))))
        yield found


def split(export: Callable[[str, bool], Any], forward: Callable[[], Any]) -> dict[str, float]:
    """Part -> float forwards, of an export with and without samples."""
    rows: dict[str, list[float]] = {}
    for repetition in range(3):
        base = min(measure.seconds(forward) for _ in range(3))
        with tempfile.TemporaryDirectory() as folder, watched() as parts:
            whole = measure.seconds(lambda folder=folder: export(folder, True))
        with tempfile.TemporaryDirectory() as folder:
            bare = measure.seconds(lambda folder=folder: export(folder, False))
        found = {
            "whole": whole,
            "without samples": bare,
            **parts,
            "file run on its samples, all else": whole - sum(parts.values()),
        }
        for part, value in found.items():
            rows.setdefault(part, []).extend([value / base] if repetition else [])  # the first opens and imports
    return {part: min(values) for part, values in rows.items()}


def split_table(networks: list[str]) -> tuple[list[str], list[list[str]]]:
    """The split of every network in both front ends."""
    found: dict[str, dict[str, float]] = {}
    for name in networks:
        torch.manual_seed(0)
        model, x = SPLIT[name]()
        sim = QuantizationSimModel(model, x)
        sim.compute_encodings([x], progress=False)
        with torch.no_grad():
            found[f"{name}, PyTorch"] = split(
                lambda folder, kept, sim=sim, x=x: sim.export(folder, "m", x, samples=kept),
                lambda model=model, x=x: model(x),
            )
        with tempfile.TemporaryDirectory() as folder:
            own = OnnxSim(sim.export(folder, "m", x, samples=False).float_model, threads=1)
            feeds = {own.specs[0].name: x.numpy()}
            own.compute_encodings([feeds], progress=False)
            session = open_session(own._float_copy(), threads=1)
            found[f"{name}, ONNX"] = split(
                lambda folder, kept, own=own: own.export(folder, "m", samples=kept),
                lambda session=session, feeds=feeds: session.run(None, feeds),
            )
    parts = next(iter(found.values()))
    return ["part", *found], [[part, *(f"{rows[part]:.1f}" for rows in found.values())] for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", action="store_true", help="what a whole export spends on its parts")
    parser.add_argument("--networks", nargs="+", choices=SPLIT, default=list(SPLIT), help="of --split")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table of --split there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.split:
        title = "What an export costs: CPU time over a float forward pass of the same batch"
        columns, rows = split_table(options.networks)
        measure.show(title, columns, rows)
        measure.save(None, options.markdown, title, columns, rows, [])
        return
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
