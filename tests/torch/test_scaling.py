"""Depth: thousands of blocks at Python's default recursion limit, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import sys
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from tests.support.zoo import chain, chain_input
assert sys.getrecursionlimit() == 1000
blocks, residual = int(sys.argv[1]), sys.argv[2] == "residual"
model, x = chain(blocks, residual), chain_input(0)
report = fold_all_batch_norms(model, dummy_input=x)
sim = QuantizationSimModel(model, x, in_place=True)
sim.compute_encodings([x])
y = sim.model(x)
rows = sim.coverage()
print(len(report.pairs), len(sim.quantizers), len(rows), bool(y.isfinite().all()))
"""


def run(blocks: int, kind: str) -> None:
    command = [sys.executable, "-c", CODE, str(blocks), kind]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    folded, sites, rows, finite = result.stdout.split()
    assert int(folded) == blocks and finite == "True"
    assert int(sites) >= 3 * blocks and int(rows) >= 4 * blocks


@pytest.mark.parametrize("kind", ["plain", "residual"])
def test_two_thousand_blocks(kind: str) -> None:
    run(2_000, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "residual"])
def test_twenty_thousand_blocks(kind: str) -> None:
    run(20_000, kind)
