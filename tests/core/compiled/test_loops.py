"""When compiled loops are used, and on what."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from bitwright.core.compiled.loops import flat

SAYS = "from bitwright.core.compiled.loops import loops; import sys; print(loops() is None, 'numba' in sys.modules)"


def says(program: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip()


def test_the_switch_leaves_numba_unloaded() -> None:
    assert says(SAYS, BITWRIGHT_COMPILED="0") == "True False"


def test_without_numba_there_are_no_loops() -> None:
    assert says("import sys; sys.modules['numba'] = None; " + SAYS) == "True True"


def test_importing_the_package_loads_no_numba() -> None:
    program = "import bitwright.torch, bitwright.core.numerics.statistics, sys; print('numba' in sys.modules)"
    assert says(program) == "False"


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 3), np.float32),
        np.zeros((2, 3), np.float32).T,
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=["numpy", "fortran", "tensor", "channels-last"],
)
def test_memory_in_one_piece_is_shared(x: np.ndarray | torch.Tensor) -> None:
    found = flat(x)
    assert found is not None and found.ndim == 1
    found[:] = 1
    assert bool((x == 1).all())


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((4, 4), np.float32)[:, ::2],
        np.zeros(3),
        torch.zeros(4, 4)[:, ::2],
        torch.zeros(3, dtype=torch.float16),
        torch.zeros(3, device="meta"),
        torch.zeros(3, 3).to_sparse(),
    ],
    ids=["gaps", "float64", "tensor with gaps", "half", "meta", "sparse"],
)
def test_everything_else_is_left_to_array_functions(x: np.ndarray | torch.Tensor) -> None:
    assert flat(x) is None
