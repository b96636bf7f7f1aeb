"""The analysis of trained models: planted faults found, estimates against measurements, what it costs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import torch
from scipy.stats import spearmanr

import bitwright
import bitwright.onnx
from bitwright.analysis import Analysis
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from tests.support import data
from tests.support.plant import PLANTS, layer_sites

HELP = """\
Analyze the trained models of the developer data set.

plants: a fault is planted in one layer (its range too wide, its range too narrow, one outlier channel in its
weight, a weight of two bits), and the default call is asked which layer is the worst and why.
ranks: the estimate of every layer and of every quantizer (mode fast) against its measurement (mode exact).
cost: seconds of each mode as multiples of one float run over the same data, passes over the data, operator runs of exact; and
the evaluations of AIMET's QuantAnalyzer, as its user guide counts them: float, weights alone, activations alone, and every
layer with quantizers (N) once alone and once switched off, which is 2 N + 3.
"""

PARTS = ("plants", "ranks", "cost")


@dataclass(frozen=True)
class Subject:
    """A trained model: ``make`` returns a new calibrated simulation, and ``samples`` its data."""

    name: str
    make: Callable[[], Any]
    samples: Callable[[], list[Any]]


def torch_subject(name: str, samples: Callable[[], list[Any]], fold: bool = True) -> Subject:
    def make() -> Any:
        model, batches = data.trained(name), samples()
        if fold:
            fold_all_batch_norms(model, dummy_input=batches[0], progress=False)
        sim = QuantizationSimModel(model, batches[0], preset="w8a8")
        sim.compute_encodings(batches, progress=False)
        return sim

    return Subject(name, make, samples)


def onnx_subject(name: str, samples: Callable[[], list[Any]]) -> Subject:
    def make() -> Any:
        return bitwright.onnx.quantize(
            str(data.onnx_file(name)), samples(), "w8a8", recipe=["fold"], progress=False
        ).sim

    return Subject(f"{name}.onnx", make, samples)


def split(x: Any, size: int) -> list[Any]:
    return [x[i : i + size] for i in range(0, len(x), size)]


def characters() -> list[torch.Tensor]:
    return split(data.shakespeare("test")[: 32 * 48].reshape(32, 48), 16)


def pictures(count: int) -> list[torch.Tensor]:
    return split(data.cifar("train").x[:count], 32)


def digits() -> list[np.ndarray[Any, Any]]:
    return split(data.mnist()[0].astype(np.float32)[:64, None], 1)


MODELS = {
    s.name: s
    for s in (
        torch_subject("mobilenet_v1_025", lambda: split(data.imagenet("calibration").x[:12], 12)),
        torch_subject("mobilenet_v2_cifar", lambda: pictures(64)),
        torch_subject("resnet20_aux", lambda: pictures(64)),
        torch_subject("lstm_char", characters, fold=False),
        torch_subject("stories260k", lambda: split(data.stories("calib")[:16, :65], 8), fold=False),
        onnx_subject("mnist_cntk", digits),
        onnx_subject("resnet20_aux", lambda: [x.numpy() for x in pictures(64)]),
        onnx_subject("lstm_char", lambda: [x.numpy() for x in characters()]),
    )
}


# ---- plants

PLANT_COLUMNS = ["model", "fault", "layer", "named first", "cause named first", "found"]


def plants(subject: Subject) -> Iterator[list[str]]:
    """A row per kind of fault, each in another layer."""
    for i, (kind, plant) in enumerate(PLANTS.items()):
        sim, batches = subject.make(), subject.samples()
        sites = layer_sites(sim, weight=plant.weight)
        ops = list(sites)
        op = ops[(2 * i + 1) * len(ops) // (2 * len(PLANTS))]
        plant.apply(sim, sites[op], batches)
        worst = bitwright.analyze(sim, batches, progress=False).worst(1)[0]
        cause = worst.causes[0].cause if worst.causes else ""
        found = worst.name == op and cause in plant.causes
        yield [subject.name, kind, op, worst.name, cause, "yes" if found else "no"]


# ---- ranks

RANK_COLUMNS = [
    "model", "layers", "rank correlation", "worst five by exact among worst ten by fast", "quantizers",
    "rank correlation of quantizers",
]  # fmt: skip


def ranks(subject: Subject) -> list[str]:
    sim, batches = subject.make(), subject.samples()
    estimated = bitwright.analyze(sim, batches, mode="fast", progress=False)
    measured = bitwright.analyze(sim, batches, mode="exact", progress=False)
    fast, exact = layer_costs(estimated), layer_costs(measured)
    names = [name for name in exact if name in fast]
    if len(names) < 3:
        return [subject.name, str(len(names)), "no estimate: no derivatives", "", "", ""]
    correlation = spearmanr([fast[n] for n in names], [exact[n] for n in names]).statistic
    found, wanted = ({r.name: r.cost for r in a.sites if r.cost} for a in (estimated, measured))
    sites = [name for name in wanted if name in found]
    of_sites = spearmanr([found[n] for n in sites], [wanted[n] for n in sites]).statistic
    five, ten = (sorted(names, key=lambda n: -costs[n])[:k] for costs, k in ((exact, 5), (fast, 10)))
    return [
        subject.name,
        str(len(names)),
        f"{correlation:.3f}",
        f"{len(set(five) & set(ten))} of {len(five)}",
        str(len(sites)),
        f"{of_sites:.3f}",
    ]


def layer_costs(found: Analysis) -> dict[str, float]:
    return {row.name: row.noise for row in found.layers if row.noise}


# ---- cost

COST_COLUMNS = [
    "model", "samples", "quantizers", "float s", "fast", "auto", "exact", "passes of fast", "of auto", "of exact",
    "operator runs of exact / (2 evaluations per quantizer)", "layers (N)", "AIMET: evaluations (2 N + 3)",
]  # fmt: skip


def cost(subject: Subject) -> list[str]:
    sim, batches = subject.make(), subject.samples()
    if subject.name == "mobilenet_v2_cifar":
        batches = pictures(200)
    from bitwright.analysis.subject import open_subject

    opened = open_subject(sim)
    base = measure.median_seconds(lambda: [opened.outputs(batch, True) for batch in batches], 3)
    times, passes = [], []
    for mode in ("fast", "auto", "exact"):
        start = time.process_time()
        found = bitwright.analyze(sim, batches, mode=mode, progress=False)  # type: ignore[arg-type]
        times.append((time.process_time() - start) / base)
        passes.append(f"{found.data['passes']:.1f}")
    layers = len({site.op for site in sim.quantizers.values() if site.enabled and not site.quantizer.derived})
    return [
        subject.name, str(found.data["samples"]), str(len(list(sim.quantizers.unique()))), f"{base:.2f}",
        *(f"{ratio:.0f} x" for ratio in times), *passes, f"{run_share(sim, batches):.2f}", str(layers), str(2 * layers + 3),
    ]  # fmt: skip


def run_share(sim: Any, batches: Sequence[Any]) -> float:
    """Operator runs of measuring every quantizer alone and switched off, over those of as many whole evaluations."""
    from bitwright.analysis.exact import Exact
    from bitwright.analysis.subject import open_subject

    exact = Exact(open_subject(sim).steps(), batches[:1], budget=1 << 30)
    names = [n for n, s in sim.quantizers.items() if s.enabled and s.name == s.group and not s.quantizer.derived]
    exact.measure({name: frozenset([name]) for name in names}, iter)
    return exact.runs / (2 * len(names) * exact.steps)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    options = parser.parse_args(arguments)
    if not data.have_shared_data():
        print(data.why_not(), file=sys.stderr)
        return 2
    tables: list[tuple[str, list[str], list[list[str]]]] = []
    subjects = [MODELS[name] for name in options.models]
    if "plants" in options.parts:
        rows = [row for subject in subjects for row in told(plants(subject))]
        found = sum(row[-1] == "yes" for row in rows)
        tables.append((f"Planted faults: {found} of {len(rows)} named first with the right cause", PLANT_COLUMNS, rows))
    if "ranks" in options.parts:
        tables.append(("Estimate against measurement", RANK_COLUMNS, list(told(map(ranks, subjects)))))
    if "cost" in options.parts:
        tables.append(("Cost, as multiples of a float run", COST_COLUMNS, list(told(map(cost, subjects)))))
    for title, head, rows in tables:
        measure.show(title, head, rows)
    if options.markdown:
        pages = [measure.markdown(title, head, rows) for title, head, rows in tables]
        measure.write(options.markdown, "\n".join(pages))
    return 0


def told(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    for row in rows:
        print(" | ".join(row), file=sys.stderr, flush=True)
        yield row


if __name__ == "__main__":
    sys.exit(main())
