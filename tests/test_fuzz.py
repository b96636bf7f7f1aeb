"""A short run of ``tools/fuzz.py``: damaged input of every kind gets an answer.

The workers of a run are forks. A fork of a process that has threads (ONNX Runtime's, torch's) can wait for a lock that no
thread of it will release, so each run begins in a process of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import python

ROOT = Path(__file__).parents[1]
KINDS = """
import os, time
from bitwright.errors import ModelError

def raises(rng, folder):
    def use():
        raise KeyError("shown raw")
    return use

def ends(rng, folder):
    return lambda: os._exit(3)

def waits(rng, folder):
    return lambda: time.sleep(30)

def grows(rng, folder):
    return lambda: bytearray(80 << 20)

def answers(rng, folder):
    def use():
        raise ModelError("m.onnx", "it is damaged", "export it again")
    return use

def tarries(rng, folder):  # beyond the limit and its two seconds; not beyond four limits and two seconds
    return lambda: time.sleep(3.2)

fuzz.KINDS = {use.__name__: use for use in (raises, ends, waits, grows, answers, tarries)}
"""


def run_of(each: int, limits: str, seconds: float, setup: str = "") -> tuple[list[list[str]], bool]:
    """Case and kind of each finding of a run in a new process, and whether ``each`` cases of every kind ran."""
    program = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import fuzz
{setup}
count = {each} * len(fuzz.KINDS)
*found, ran = fuzz.fuzz(list(fuzz.KINDS), seed=0, seconds={seconds}, count=count, limits=fuzz.Limits({limits}))
print(json.dumps([[[one.case, one.what] for one in found], ran == count]))
"""
    return tuple(json.loads(python("-c", program).stdout.splitlines()[-1]))


FAST = "fuzz.KINDS = {name: case for name, case in fuzz.KINDS.items() if name not in fuzz.fuzz_readers.SLOW}"


@pytest.mark.parametrize(
    "each, setup", [pytest.param(3, FAST, id="short"), pytest.param(20, "", id="long", marks=pytest.mark.slow)]
)
def test_damaged_input_gets_an_answer(each, setup):
    found, every_case_ran = run_of(each, "", seconds=600.0, setup=setup)
    assert not found and every_case_ran


def test_what_is_not_an_answer_is_found():
    found, every_case_ran = run_of(1, "seconds=0.5, memory=40", seconds=60.0, setup=KINDS)
    assert found == [
        ["raises:0", "KeyError"], ["ends:1", "crash, exit code 3"], ["waits:2", "hang"], ["grows:3", "memory"],
    ]  # fmt: skip
    assert every_case_ran


def test_tensors_without_elements_are_damaged_too(monkeypatch):
    """A tensor that was cut to nothing may be cut again."""
    import torch

    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import fuzz_readers

    for shape in ((), (0,), (0, 3), (3, 0), (2, 3)):
        made = [fuzz_readers._other(torch.zeros(shape), np.random.default_rng(seed), torch) for seed in range(40)]
        assert len({tuple(tensor.shape) for tensor in made}) > 1 or shape == (0,)
