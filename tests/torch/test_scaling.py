"""Depth: more blocks than Python's recursion limit allows calls."""

from __future__ import annotations

import pytest

from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from tests.support.cost import calls_left
from tests.support.zoo import chain, chain_input


def check(blocks: dict[bool, int], calls: int) -> None:
    """Of chains without and with residual adds."""
    x = chain_input(0)
    small = chain(2)  # loads what is loaded at the first use, which takes more calls than the limit
    fold_all_batch_norms(small, dummy_input=x)
    QuantizationSimModel(small, x).compute_encodings([x])
    with calls_left(calls):
        for residual, count in blocks.items():
            model = chain(count, residual)
            report = fold_all_batch_norms(model, dummy_input=x)
            sim = QuantizationSimModel(model, x, in_place=True)
            sim.compute_encodings([x])
            assert len(report.pairs) == count and not report.refused
            assert len(sim.quantizers) >= 3 * count and len(sim.coverage()) >= 4 * count
            assert sim.model(x).isfinite().all()


def test_chains_of_more_blocks_than_calls_are_allowed() -> None:
    check({False: 400, True: 400}, 280)


def test_the_limit_is_one_that_a_recursion_over_blocks_would_meet() -> None:
    def walk(n: int) -> int:
        return 0 if n == 0 else 1 + walk(n - 1)

    with calls_left(280):
        assert walk(250) == 250
        with pytest.raises(RecursionError):
            walk(400)


@pytest.mark.slow
def test_twenty_thousand_blocks() -> None:
    check({False: 5_000, True: 20_000}, 1000)
