"""Reach: what works on architectures that nobody here wrote, stage by stage of a user's day.

    python benchmarks/reach.py                     every architecture, one process each; what is done is kept
    python benchmarks/reach.py --only 'Llama*' --fresh
    python benchmarks/reach.py --markdown          writes benchmarks/results/reach.md
    python benchmarks/reach.py --limit 300         on a machine that is busy with other things

Needs the extras ``reach``. Each process has a time limit; a result lies in ``build/reach`` as soon as it is there, so that an
interrupted run goes on where it stopped. Architectures whose package cannot be imported have no row; the table says so once.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import importlib
import importlib.metadata
import json
import logging
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import ROOT, machine  # puts the repository on the path and fixes one thread
from reach_models import ARCHITECTURES, Architecture
from torch.utils._python_dispatch import TorchDispatchMode

from bitwright.compare.verify import verify_folder
from bitwright.core.graph.operators import op_row
from bitwright.core.simulation.float_model import sqnr
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms, quantize
from bitwright.torch.calls.inputs import flatten_tensors
from tests.support.cases import vary_norms_and_biases

STAGES = (
    "simulate", "calibrate", "forward", "coverage", "generate", "train", "fold", "export", "verify", "recipe",
)  # fmt: skip
RESULTS, STATE = ROOT / "benchmarks" / "results" / "reach.md", ROOT / "build" / "reach"
_MOST_DECLARED = 50
LIMIT = 120.0  # seconds an architecture may take
WORST = 8.0  # dB that a network of random weights may lose at eight bits before something must be wrong

aten = torch.ops.aten
#: operators below autograd -> how many products they are
PRODUCTS = {
    aten.mm: 1, aten.addmm: 1, aten.bmm: 1, aten.baddbmm: 1, aten.mv: 1, aten.dot: 1, aten.convolution: 1,
    aten._grouped_mm: 1, aten._scaled_dot_product_flash_attention_for_cpu: 2, aten._scaled_dot_product_attention_math: 2,
}  # fmt: skip


class Missing(Exception):
    """A stage cannot be tried; the text says why."""


class Wrong(Exception):
    """A stage went through and its result is not right."""


class ProductCount(TorchDispatchMode):
    """Counts products and convolutions where torch carries them out, whoever called them."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += PRODUCTS.get(func.overloadpacket, 0)
        return func(*args, **(kwargs or {}))


class Day:
    """What a user does with one architecture; each method is a stage and returns what the cell says."""

    def __init__(self, architecture: Architecture) -> None:
        torch.manual_seed(0)
        self.architecture = architecture
        self.model = architecture.build()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1 and not parameter.any():
                    parameter.normal_(std=0.5)  # tokens that training would have moved off zero
        vary_norms_and_biases(self.model)
        self.batches = [architecture.batch(seed) for seed in range(3)]
        self.sim: QuantizationSimModel
        self.folder = tempfile.TemporaryDirectory()  # what is exported, for as long as the day lasts

    def outputs(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """Tensors of floating point that the model returns for the first batch."""
        with torch.no_grad():
            found = flatten_tensors(model(**copy.deepcopy(self.batches[0])))
        return [t for _, t in found if t.is_floating_point() and t.numel()]

    def simulate(self) -> str:
        self.sim = QuantizationSimModel(self.model, self.batches[0])
        return "ok"

    def calibrate(self) -> str:
        self.sim.compute_encodings(self.batches, progress=False)
        return "ok"

    def forward(self) -> str:
        return self._decibels(self.outputs(self.sim.model))

    def _decibels(self, found: Sequence[torch.Tensor]) -> str:
        wanted = self.outputs(self.model)
        if not all(bool(t.isfinite().all()) for t, w in zip(found, wanted, strict=True) if bool(w.isfinite().all())):
            raise Wrong("the output is not finite")
        lost = sqnr(wanted[0].numpy(), found[0].detach().numpy())
        if lost < WORST:
            raise Wrong(f"{lost:.1f} dB")
        return "equal" if math.isinf(lost) else f"{lost:.0f} dB"

    def coverage(self) -> str:
        """Every product that torch carries out is an operator of the graph, or computed from constants."""
        with ProductCount() as count, self.sim.in_float():
            self.outputs(self.sim.model)
        seen = sum(
            op.calls for op in self.sim.graph.ops if op_row(op.type).kind == "compute" and op.type != "Embedding"
        )
        # what is computed from constants alone has an empty plan: such products are known, and not quantized
        static = [key for key, plan in self.sim._simulator.plans.items() if not plan.op]
        known = sum(str(key[2]) in ("matmul", "linear", "bmm", "einsum", "mm", "baddbmm") for key in static)
        if count.found > seen + known:
            raise Wrong(f"{count.found - seen - known} of {count.found} products not seen")
        weights = [s for s in self.sim.quantizers.values() if s.role == "weight"]
        if not all(s.enabled and s.encoding is not None for s in weights):
            raise Wrong("weights without encoding")
        return f"{count.found} of {count.found}"

    def generate(self) -> str:
        if not self.architecture.generates:
            raise Missing("no generate")
        batch = {k: v for k, v in self.batches[0].items() if not k.startswith("decoder_")}
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        ids = self.sim.model.generate(**batch, **options)
        # a method that calls the encoder on its own is noted too, and its parts are simulated
        lost = [name for name, why in self.sim._simulator.unseen.items() if "the parts are simulated" not in why]
        if ids.shape[-1] < 4 or lost:  # some return what is new only
            raise Wrong(f"calls that were not recorded: {', '.join(lost[:3])}")
        return "ok"

    def train(self) -> str:
        sim = QuantizationSimModel(self.model, self.batches[0])
        sim.compute_encodings(self.batches, progress=False)
        sim.model.train()
        found = [t for _, t in flatten_tensors(sim.model(**self.batches[0])) if t.requires_grad]
        if not found:
            raise Missing("its outputs need no gradient")
        optimizer = torch.optim.SGD(sim.model.parameters(), lr=1e-3)
        sum(t.float().square().mean() for t in found).backward()  # type: ignore[union-attr]
        grads = [p.grad for p in sim.model.parameters() if p.grad is not None]
        if not grads or not all(bool(g.isfinite().all()) for g in grads):
            raise Wrong("a gradient is not finite")
        optimizer.step()
        return "ok"

    def fold(self) -> str:
        model = copy.deepcopy(self.model)
        folds = fold_all_batch_norms(model, dummy_input=self.batches[0], progress=False)
        for one, other in zip(self.outputs(self.model), self.outputs(model), strict=True):
            if not torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max())):
                raise Wrong("the function changed")
        return str(len(list(folds)))

    def export(self) -> str:
        self.sim.export(self.folder.name, "model")
        return "ok"

    def verify(self) -> str:
        if not any(Path(self.folder.name).iterdir()):
            raise Missing("nothing was exported")
        report = verify_folder(self.folder.name)
        if not report.ok:
            raise Wrong(str(report).rstrip().rpartition("\n")[2])
        return "ok"

    def recipe(self) -> str:
        result = quantize(self.model, self.batches, progress=False)
        return self._decibels(self.outputs(result.model))


def live(architecture: Architecture, path: Path) -> None:
    """A whole day, in this process; ``path`` holds the cells so far."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cells: dict[str, str] = {}
    path.write_text(json.dumps({"cells": cells, "running": "build"}))
    try:
        day = Day(architecture)
    except Exception as error:
        path.write_text(json.dumps({"cells": {"simulate": f"not run: {_said(error)}"}, "running": None}))
        return
    for stage in STAGES:
        path.write_text(json.dumps({"cells": cells, "running": stage}))
        try:
            cells[stage] = getattr(day, stage)()
        except Missing:
            cells[stage] = ""
        except Exception as error:
            cells[stage] = f"FAILS: {_said(error)}"
            if stage in ("simulate", "calibrate"):
                break
    path.write_text(json.dumps({"cells": cells, "running": None}))


def _said(error: BaseException) -> str:
    """The error in one line."""
    text = (
        " ".join(str(error).split())
        if isinstance(error, Wrong)
        else f"{type(error).__name__}: {' '.join(str(error).split())}"
    )
    return text[:300]


def _import_torchvision() -> Any:
    """Import torchvision, also one whose operators were built for another torch; what keeps their declarations alive.

    timm and transformers want the package; none of the models here uses its operators. It fails at the first of them that
    its library did not register, so each is declared without a kernel.
    """

    declared = torch.library.Library("torchvision", "FRAGMENT")
    for _ in range(_MOST_DECLARED):
        try:
            importlib.import_module("torchvision")
            return declared
        except ModuleNotFoundError:
            return declared
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            declared.define(f"{missing[1]}(Tensor x) -> Tensor")
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
    return declared


def import_all(architectures: Sequence[Architecture]) -> dict[str, str]:
    """Import what every process needs, once, because they are copies of this one; package -> why it cannot be imported."""
    absent = {}
    parts = ("bitwright.torch.simulation.export", "bitwright.export.encodings.of_simulation", "transformers.generation")
    for package in (*dict.fromkeys(a.package for a in architectures), *parts):
        try:
            importlib.import_module(package)
        except Exception as error:
            absent[package] = _said(error)
    return absent


def run_all(
    architectures: Sequence[Architecture], fresh: bool, out: Callable[[str], None], limit: float = LIMIT
) -> None:
    """A process per architecture that has no result yet; one that takes longer than ``limit`` seconds is ended."""
    STATE.mkdir(parents=True, exist_ok=True)
    commit = machine()["commit"]
    for architecture in architectures:
        path = STATE / f"{architecture.name}.json"
        if path.exists() and not fresh and json.loads(path.read_text())["running"] is None:
            continue
        start = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=live, args=(architecture, path))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
        found = json.loads(path.read_text())
        if found["running"] is not None:
            how = (
                f"no end within {limit:.0f} s"
                if time.monotonic() - start >= limit
                else f"the process died ({process.exitcode})"
            )
            found = {"cells": {**found["cells"], found["running"]: f"FAILS: {how}"}, "running": None}
        path.write_text(json.dumps({**found, "commit": commit}))
        bad = [stage for stage, cell in found["cells"].items() if cell.startswith(("FAILS", "not run"))]
        out(f"{architecture.name:40s} {time.monotonic() - start:5.1f} s  {', '.join(bad) or 'ok'}")


def rows(architectures: Sequence[Architecture]) -> Iterator[tuple[Architecture, dict[str, str]]]:
    """The results that there are."""
    for architecture in architectures:
        path = STATE / f"{architecture.name}.json"
        if path.exists():
            yield architecture, json.loads(path.read_text())["cells"]


def markdown(architectures: Sequence[Architecture], absent: Mapping[str, str]) -> str:
    """The table, what each stage reaches, and the reason for every cell that fails.

    Args:
        architectures: that were to be run.
        absent: package that cannot be imported -> why; its architectures have no row.
    """
    able = [a for a in architectures if a.package not in absent]
    found = list(rows(able))
    reasons: list[str] = []
    lines = ["| architecture | package | " + " | ".join(STAGES) + " |", "|---" * (len(STAGES) + 2) + "|"]
    for architecture, cells in found:
        shown = []
        for stage in STAGES:
            cell = cells.get(stage, "")
            if cell.startswith(("FAILS", "not run")):
                reason = cell.removeprefix("FAILS: ").replace("|", "\\|")
                if reason not in reasons:
                    reasons.append(reason)
                cell = f"{'not run' if cell.startswith('not run') else '**fails**'} ({reasons.index(reason) + 1})"
            shown.append(cell)
        lines.append(f"| {architecture.name} | {architecture.package} | " + " | ".join(shown) + " |")
    counts = []
    for stage in STAGES:
        tried = [c[stage] for _, c in found if c.get(stage) and not c[stage].startswith("not run")]
        counts.append(f"{sum(not c.startswith('FAILS') for c in tried)} of {len(tried)}")
    lines.append("| **works** | | " + " | ".join(counts) + " |")
    notes = [f"{n}. {reason}" for n, reason in enumerate(reasons, 1)]
    state = [
        f"Without rows: {sum(a.package == package for a in architectures)} of {package} ({why})."
        for package, why in absent.items()
    ]
    if len(found) < len(able):
        state.append(f"{len(found)} of {len(able)} architectures have run; the command goes on with the others.")
    return "\n".join(
        [*_HEAD, *(line for sentence in state for line in (sentence, "")), *lines, "", "Reasons:", "", *notes, ""]
    )


def commits(architectures: Sequence[Architecture]) -> str:
    """The commits that the rows were measured on, each with its number of rows where there are several."""
    paths = (STATE / f"{architecture.name}.json" for architecture in architectures)
    found = Counter(json.loads(path.read_text()).get("commit", "unknown") for path in paths if path.exists())
    return ", ".join(f"{commit} ({n} rows)" if len(found) > 1 else commit for commit, n in found.most_common())


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("transformers", "diffusers", "timm")}


_HEAD = (
    "# Reach: architectures that nobody here wrote",
    "",
    "`make reach` writes this table: tiny random configurations, eight bits, three batches. `forward` and `recipe` give the",
    "signal-to-noise ratio of the first output, `coverage` the products and convolutions that torch carried out and the graph",
    "knows, `fold` the batch norms folded. Where `verify` fails, the count is of compared places.",
    "",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and write the table if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="*", help="architectures, as a glob")
    parser.add_argument("--fresh", action="store_true", help="run again what has a result")
    parser.add_argument("--markdown", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds an architecture may take")
    given = parser.parse_args(arguments)
    chosen = [a for a in ARCHITECTURES if fnmatch.fnmatchcase(a.name, given.only)]
    declared = _import_torchvision()  # held as long as this runs
    absent = import_all(chosen)
    able = [a for a in chosen if a.package not in absent]
    run_all(able, given.fresh, lambda line: print(line, flush=True), given.limit)
    if given.markdown:
        facts = {**machine(), "commit": commits(able), **_versions()}
        where = ", ".join(f"{key}: {value}" for key, value in facts.items())
        RESULTS.write_text(f"{markdown(ARCHITECTURES, absent)}\n{where}\n", encoding="utf-8")
    del declared
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
