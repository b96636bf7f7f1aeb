"""Creation and folding time of long graphs: seconds per 1,000 blocks, or per operator, must not grow with the length."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path

from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx import fold_all_batch_norms as fold_onnx
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from tests.onnx.nets import assorted, conv_chain, feeds_for, relu_chain
from tests.support.zoo import chain, chain_input

HELP = """\
Create a simulation of, and fold, chains of convolution, batch norm and ReLU (2 channels, 4x4), with and
without residual adds, at Python's default recursion limit.

With --onnx: CPU milliseconds an operator of ONNX graphs, for creation, folding, and calibration, export and verification on
one sample.

Linear cost shows as equal seconds per 1,000 blocks in every line. AIMET 2.42 takes 22 s to create a
simulation of 1,000 blocks; ours should take less than 1 s.
"""

EXAMPLES = """\
examples:
  python benchmarks/scaling.py                     1,000 to 20,000 blocks, a few minutes
  python benchmarks/scaling.py --sizes 500 1000
  python benchmarks/scaling.py --onnx --sizes 1000 10000
  python benchmarks/scaling.py --markdown benchmarks/results/scaling.md
"""

SIZES = (1000, 2000, 5000, 20000)
COLUMNS = ["blocks", "residual", "creation s", "per 1,000", "folding s", "per 1,000", "folded", "peak MiB so far"]


def measure_chain(blocks: int, residual: bool) -> dict[str, Any]:
    """Seconds of creating a simulation of a new chain, and of folding the chain."""
    model, x = chain(blocks, residual), chain_input()
    creation = measure.seconds(lambda: QuantizationSimModel(model, dummy_input=x))
    pairs: list[Any] = []
    folding = measure.seconds(lambda: pairs.extend(fold_all_batch_norms(model, dummy_input=x)))
    return {
        "blocks": blocks,
        "residual": residual,
        "creation": creation,
        "folding": folding,
        "folded": len(pairs),
        "peak_mib": measure.peak_mib(),
    }


#: network -> how it is made, and its operators a block
ONNX: dict[str, tuple[Callable[[int], Any], int]] = {
    "Relu": (relu_chain, 1),
    "residual blocks": (conv_chain, 4),
    "assorted": (assorted, 16),
}
ONNX_COLUMNS = [
    "graph",
    "operators",
    "creation",
    "folding",
    "calibration",
    "export",
    "verify",
    "sum of the first two, s",
]


def measure_onnx(name: str, operators: int, whole: bool = True) -> dict[str, Any]:
    """CPU milliseconds an operator by phase; without ``whole`` only of creation and folding."""
    build, each = ONNX[name]
    blocks = operators // each
    model = build(blocks)
    x, found, sims = feeds_for(model), {}, []

    def export() -> None:
        with tempfile.TemporaryDirectory() as folder:
            sims[0].export(folder, "m")

    phases = {
        "creation": lambda: sims.append(OnnxSim(model, threads=1)),
        "folding": lambda: fold_onnx(model),
        "calibration": lambda: sims[0].compute_encodings([x], progress=False, allow_unreached=True),
        "export": export,
        "verify": lambda: sims[0].verify(x),
    }
    for phase, call in list(phases.items())[: None if whole else 2]:
        found[phase] = measure.seconds(call) * 1000 / (blocks * each)
    return {"graph": name, "operators": blocks * each, **found}


def onnx_row(found: dict[str, Any]) -> list[str]:
    """A line of the second table."""
    count = found["operators"]
    times = [f"{found[phase]:.2f}" if phase in found else "" for phase in ONNX_COLUMNS[2:7]]
    return [found["graph"], f"{count:,}", *times, f"{(found['creation'] + found['folding']) * count / 1000:.1f}"]


def measure_graphs(sizes: Sequence[int], whole: int, json: Path | None, markdown: Path | None) -> None:
    """The table of ONNX graphs; those of more than ``whole`` operators are created and folded only."""
    for name in ONNX:
        measure_onnx(name, 32)  # what is imported at first use is not part of the first line
    results = []
    for name in ONNX:
        for operators in sizes:
            print(f"{name}, {operators} operators ...", file=sys.stderr, flush=True)
            results.append(measure_onnx(name, operators, operators <= whole))
    title = "ONNX graphs of many operators: CPU milliseconds an operator (one thread)"
    rows = [onnx_row(found) for found in results]
    measure.show(title, ONNX_COLUMNS, rows)
    measure.save(json, markdown, title, ONNX_COLUMNS, rows, results)


def row_of(found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    blocks, times = found["blocks"], []
    for key in ("creation", "folding"):
        times += [f"{found[key]:.2f}", f"{found[key] / blocks * 1000:.3f}"]
    residual = "yes" if found["residual"] else "no"
    return [f"{blocks:,}", residual, *times, f"{found['folded']:,}", f"{found['peak_mib']:.0f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="numbers of blocks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--onnx", action="store_true", help="ONNX graphs instead, --sizes in operators")
    parser.add_argument(
        "--whole", type=int, default=2000, metavar="N", help="operators up to which --onnx does all phases"
    )
    options = parser.parse_args(arguments)
    if min(options.sizes) < 1:
        parser.error(f"--sizes has {min(options.sizes)}; a chain has at least one block")
    if options.onnx:
        measure_graphs(options.sizes, options.whole, options.json, options.markdown)
        return
    measure_chain(10, False)  # what is imported at first use is not part of the first line
    results = []
    for blocks in options.sizes:
        for residual in (False, True):
            print(f"{blocks} blocks{', residual' if residual else ''} ...", file=sys.stderr, flush=True)
            results.append(measure_chain(blocks, residual))
    title = f"Chains of conv-bn-relu blocks (one thread, recursion limit {sys.getrecursionlimit()})"
    rows = [row_of(found) for found in results]
    measure.show(title, COLUMNS, rows)
    measure.save(options.json, options.markdown, title, COLUMNS, rows, results)


if __name__ == "__main__":
    main()
