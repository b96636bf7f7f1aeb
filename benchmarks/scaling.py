"""Creation and folding time of long chains: seconds per 1,000 blocks must not grow with the length."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path

from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from tests.support.zoo import chain, chain_input

HELP = """\
Create a simulation of, and fold, chains of convolution, batch norm and ReLU (2 channels, 4x4), with and
without residual adds, at Python's default recursion limit.

Linear cost shows as equal seconds per 1,000 blocks in every line. AIMET 2.42 takes 22 s to create a
simulation of 1,000 blocks; ours should take less than 1 s.
"""

EXAMPLES = """\
examples:
  python benchmarks/scaling.py                     1,000 to 20,000 blocks, a few minutes
  python benchmarks/scaling.py --sizes 500 1000
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
    options = parser.parse_args(arguments)
    if min(options.sizes) < 1:
        parser.error(f"--sizes has {min(options.sizes)}; a chain has at least one block")
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
