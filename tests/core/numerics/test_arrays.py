"""The array functions: the same answers for numpy arrays and torch tensors."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from bitwright.core.numerics import arrays

LIBRARIES = {"numpy": np.asarray, "torch": lambda x: torch.tensor(np.asarray(x))}


@pytest.fixture(params=LIBRARIES)
def make(request):
    return LIBRARIES[request.param]


def test_importing_core_arithmetic_loads_no_framework():
    code = (
        "import sys, numpy as np; from bitwright.core.numerics import arrays, affine, statistics, ranges; "
        "arrays.as_array([1.0]); assert not {'torch', 'onnx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_namespace_follows_the_array():
    assert arrays.namespace(torch.zeros(1)) is torch and arrays.namespace(torch.nn.Parameter(torch.zeros(1))) is torch
    assert arrays.namespace(np.zeros(1)) is np and arrays.namespace([1]) is np
    assert not arrays.is_torch("torch")


def test_rint_rounds_ties_to_even(make):
    assert arrays.to_numpy(arrays.rint(make([0.5, 1.5, 2.5, -0.5, -1.5]))).tolist() == [0, 2, 2, 0, -2]


def test_dtype_names_are_the_same_words(make):
    assert arrays.dtype_name(make(np.float32([1]))) == "float32"
    assert arrays.dtype_name(arrays.cast(make(np.float32([1])), "int16")) == "int16"
    assert arrays.is_floating(make(np.float16([1]))) and not arrays.is_floating(make([1]))


def test_cast_does_not_copy_what_has_the_dtype_already(make):
    x = make(np.float32([1]))
    assert arrays.cast(x, "float32") is x


def test_bfloat16_comes_to_the_host_as_float32():
    assert arrays.to_numpy(torch.tensor([1.5], dtype=torch.bfloat16)).dtype == np.float32
    assert arrays.is_floating(np.zeros(1, ml_dtypes.bfloat16))


def test_as_array_drops_gradients():
    assert not arrays.as_array(torch.zeros(1, requires_grad=True)).requires_grad


def test_row_bounds_propagate_nan(make):
    lo, hi = arrays.row_bounds(make(np.float32([[1, -2, 3], [1, np.nan, 3]])))
    assert arrays.to_numpy(lo)[0] == -2 and arrays.to_numpy(hi)[0] == 3
    assert np.isnan(arrays.to_numpy(lo)[1]) and np.isnan(arrays.to_numpy(hi)[1])


def test_counts(make):
    codes = make(np.int16([0, 2, 2, 3]))
    assert arrays.bincount(codes, 5).tolist() == [1, 0, 2, 1, 0] and arrays.bincount(codes, 5).dtype == np.int64
    assert arrays.nonzeros(make(np.float32([0, -0.0, 1e-45, -3]))) == 2


def test_like_takes_library_dtype_and_shape(make):
    made = arrays.like(np.arange(3), make(np.float32([1])), "float64")
    assert type(made) is type(make([1])) and arrays.dtype_name(made) == "float64" and tuple(made.shape) == (3,)


def test_transpose_is_a_view(make):
    x = make(np.zeros((2, 3, 4)))
    y = arrays.transpose(x, (2, 0, 1))
    assert tuple(y.shape) == (4, 2, 3)
    y[0, 0, 0] = 1
    assert float(x[0, 0, 0]) == 1
