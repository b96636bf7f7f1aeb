"""Depth: more blocks than Python's recursion limit has calls, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import sys
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from tests.support.zoo import chain, chain_input
blocks, x = int(sys.argv[1]), chain_input(0)
small = chain(2)  # loads what is loaded at the first use, which takes more calls than the limit
fold_all_batch_norms(small, dummy_input=x)
QuantizationSimModel(small, x).compute_encodings([x])
sys.setrecursionlimit(int(sys.argv[2]))
for residual in (False, True):
    model = chain(blocks, residual)
    report = fold_all_batch_norms(model, dummy_input=x)
    sim = QuantizationSimModel(model, x, in_place=True)
    sim.compute_encodings([x])
    y = sim.model(x)
    rows = sim.coverage()
    print(len(report.pairs), len(sim.quantizers), len(rows), bool(y.isfinite().all()))
"""


def run(blocks: int, limit: int) -> None:
    command = [sys.executable, "-c", CODE, str(blocks), str(limit)]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == 2
    for folded, sites, rows, finite in lines:
        assert int(folded) == blocks and finite == "True"
        assert int(sites) >= 3 * blocks and int(rows) >= 4 * blocks


def test_chains_of_more_blocks_than_calls_are_allowed() -> None:
    run(400, 300)


@pytest.mark.slow
def test_twenty_thousand_blocks() -> None:
    run(20_000, 1000)
