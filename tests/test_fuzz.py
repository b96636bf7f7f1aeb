"""A short run of ``tools/fuzz.py``: damaged input of every kind gets an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitwright.errors import ModelError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import fuzz

    return fuzz


@pytest.mark.parametrize("each", [pytest.param(3, id="short"), pytest.param(40, id="long", marks=pytest.mark.slow)])
def test_damaged_input_gets_an_answer(fuzz, each):
    count = each * len(fuzz.KINDS)
    *found, ran = fuzz.fuzz(list(fuzz.KINDS), seed=0, seconds=600.0, count=count, limits=fuzz.Limits())
    assert not found and ran == count


def test_what_is_not_an_answer_is_found(fuzz, monkeypatch):
    def raises(rng, folder):
        def use():
            raise KeyError("shown raw")

        return use

    def ends(rng, folder):
        import os

        return lambda: os._exit(3)

    def waits(rng, folder):
        import time

        return lambda: time.sleep(30)

    def grows(rng, folder):
        return lambda: bytearray(80 << 20)

    def answers(rng, folder):
        def use():
            raise ModelError("m.onnx", "it is damaged", "export it again")

        return use

    kinds = {"raises": raises, "ends": ends, "waits": waits, "grows": grows, "answers": answers}
    monkeypatch.setattr(fuzz, "KINDS", kinds)
    limits = fuzz.Limits(seconds=0.5, memory=40)
    *found, count = fuzz.fuzz(list(kinds), seed=0, seconds=60.0, count=len(kinds), limits=limits)
    assert [(one.case, one.what) for one in found] == [
        ("raises:0", "KeyError"), ("ends:1", "crash, exit code 3"), ("waits:2", "hang"), ("grows:3", "memory"),
    ]  # fmt: skip
    assert count == len(kinds)
