"""Layers as channel methods see them; batch norms as scale and shift, against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from bitwright.errors import ModelError
from bitwright.methods.layers import Layers, bn_affine, fold_backward, fold_forward, forward_obstacle, unit_variance
from tests.core.graphs import Build

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def layer(op_type, attrs, x, W, b):
    """The layer in torch, float64."""
    x, W, b = (None if t is None else torch.from_numpy(np.asarray(t, np.float64)) for t in (x, W, b))
    n, group = W.dim() - 2, attrs.get("group", 1)
    stride, pad = attrs.get("strides", 1), (attrs.get("pads") or (0,) * n)[:n]
    if op_type == "Conv":
        return CONV[n](x, W, b, stride, pad, attrs.get("dilations", 1), group).numpy()
    if op_type == "ConvTranspose":
        extra = attrs.get("output_padding", 0)
        return CONV_TRANSPOSE[n](x, W, b, stride, pad, extra, group, attrs.get("dilations", 1)).numpy()
    product = x @ (W.T if attrs.get("transB") else W) * attrs.get("alpha", 1.0)
    return (product if b is None else product + attrs.get("beta", 1.0) * b).numpy()


def over_channels(values, ndim):
    return values.reshape(1, -1, *(1,) * (ndim - 2))


# id, type, attributes, weight shape, input shape, input channels, output channels
LAYERS = [
    ("conv1d", "Conv", {}, (6, 4, 3), (2, 4, 9)),
    ("conv2d", "Conv", {}, (6, 4, 3, 2), (2, 4, 7, 7)),
    ("conv2d-strided-dilated", "Conv", {"strides": (2, 1), "dilations": (1, 2)}, (6, 4, 3, 3), (2, 4, 9, 9)),
    ("conv3d", "Conv", {}, (5, 4, 2, 2, 2), (1, 4, 4, 4, 4)),
    ("grouped", "Conv", {"group": 2}, (6, 2, 3, 3), (2, 4, 5, 5)),
    ("depthwise", "Conv", {"group": 4}, (4, 1, 3, 3), (2, 4, 5, 5)),
    ("depthwise-multiplier-2", "Conv", {"group": 4}, (8, 1, 3, 3), (2, 4, 5, 5)),
    ("transposed1d", "ConvTranspose", {"strides": (2,)}, (4, 6, 3), (2, 4, 5)),
    (
        "transposed2d",
        "ConvTranspose",
        {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)},
        (4, 6, 3, 3),
        (2, 4, 5, 5),
    ),
    ("transposed3d", "ConvTranspose", {}, (4, 3, 2, 2, 2), (1, 4, 3, 3, 3)),
    ("transposed-grouped", "ConvTranspose", {"group": 2}, (4, 3, 3, 3), (2, 4, 5, 5)),
    ("transposed-depthwise", "ConvTranspose", {"group": 4}, (4, 1, 3, 3), (2, 4, 5, 5)),
    ("transposed-depthwise-multiplier-2", "ConvTranspose", {"group": 4}, (4, 2, 3, 3), (2, 4, 5, 5)),
    ("transposed-single", "ConvTranspose", {"group": 2}, (4, 3, 1, 1), (2, 4, 5, 5)),
    ("linear", "Gemm", {"transB": 1}, (6, 4), (3, 4)),
    ("gemm", "Gemm", {}, (4, 6), (3, 4)),
    ("gemm-alpha-beta", "Gemm", {"alpha": 0.5, "beta": -2.0}, (4, 6), (3, 4)),
    ("matmul", "MatMul", {}, (4, 6), (3, 4)),
]
NAMES = [row[0] for row in LAYERS]


def case(row, seed=0):
    _, op_type, attrs, w_shape, x_shape = row
    rng = np.random.default_rng(seed)
    x, W = rng.standard_normal(x_shape), rng.standard_normal(w_shape)
    outputs = layer(op_type, attrs, x, W, None).shape[1]
    return rng, op_type, attrs, x, W, rng.standard_normal(outputs), outputs


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("row", LAYERS, ids=NAMES)
def test_the_layer_before_absorbs_scale_and_shift(row, bias):
    rng, op_type, attrs, x, W, b, outputs = case(row)
    b = b if bias else None
    scale, shift = rng.standard_normal(outputs), rng.standard_normal(outputs)
    before = layer(op_type, attrs, x, W, b)
    expected = before * over_channels(scale, before.ndim) + over_channels(shift, before.ndim)
    folded, folded_bias = fold_backward(op_type, attrs, W, b, scale, shift)
    assert folded.shape == W.shape and folded.dtype == np.float64
    np.testing.assert_allclose(layer(op_type, attrs, x, folded, folded_bias), expected, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("row", LAYERS, ids=NAMES)
def test_the_layer_behind_absorbs_what_is_constant_for_it(row, bias):
    rng, op_type, attrs, x, W, b, _ = case(row)
    b = b if bias else None
    scale, shift = rng.standard_normal(x.shape[1]), rng.standard_normal(x.shape[1])
    if op_type == "ConvTranspose" and W.shape[2:] != (1, 1):
        with pytest.raises(ModelError, match=r"^ConvTranspose: .*not a constant.*only one without a shift"):
            fold_forward(op_type, attrs, W, b, scale, shift)
        shift = np.zeros_like(shift)
    given = x * over_channels(scale, x.ndim) + over_channels(shift, x.ndim)
    folded, folded_bias = fold_forward(op_type, attrs, W, b, scale, shift)
    expected = layer(op_type, attrs, given, W, b)
    np.testing.assert_allclose(layer(op_type, attrs, x, folded, folded_bias), expected, atol=1e-12)


def test_padding_stands_against_a_shift_and_not_against_a_scale():
    W, scale = np.ones((2, 3, 3, 3)), np.float64([1, 2, 3])
    padded = {"pads": (0, 1, 0, 0)}
    with pytest.raises(ModelError, match=r"^Conv: it pads with zeros.*without a shift"):
        fold_forward("Conv", padded, W, None, scale, np.float64([0, 0, 1]))
    assert fold_forward("Conv", padded, W, None, scale, np.zeros(3))[1] is None


@pytest.mark.parametrize(
    "op_type, attrs, kernel, allowed",
    [
        ("Conv", {"pads": (0, 0, 0, 0)}, (3, 3), True),
        ("Conv", {"pads": (0, 0, 0, 1)}, (3, 3), False),
        ("Conv", {"pads": (1, 1, 1, 1)}, (1, 1), False),
        ("Conv", {"auto_pad": "SAME_UPPER"}, (3, 3), False),
        ("Conv", {"auto_pad": "SAME_UPPER"}, (1, 1), True),
        ("Conv", {"auto_pad": "VALID"}, (3, 3), True),
        ("ConvTranspose", {}, (1, 1), True),
        ("ConvTranspose", {"strides": (2, 1)}, (1, 1), False),
        ("ConvTranspose", {"output_padding": (0, 1)}, (1, 1), False),
        ("ConvTranspose", {}, (2, 1), False),
        ("Gemm", {}, (), True),
    ],
)
def test_where_a_shift_is_a_constant(op_type, attrs, kernel, allowed):
    assert (forward_obstacle(op_type, attrs, kernel, np.ones(2)) is None) == allowed
    assert forward_obstacle(op_type, attrs, kernel, np.zeros(2)) is None


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-12, 1e-5, 1e-3, 0.5]))
def test_scale_and_shift_are_torchs_batch_norm(seed, eps):
    rng = np.random.default_rng(seed)
    gamma, beta, mean = rng.standard_normal((3, 5))
    var, x = rng.uniform(0, 3, 5), rng.standard_normal((2, 5, 3))
    scale, shift = bn_affine(gamma, beta, mean, var, eps)
    tensors = [torch.from_numpy(t) for t in (x, mean, var, gamma, beta)]
    expected = F.batch_norm(*tensors, eps=eps).numpy()
    np.testing.assert_allclose(over_channels(scale, 3) * x + over_channels(shift, 3), expected, rtol=1e-7)


def test_missing_weight_and_bias_are_one_and_zero():
    scale, shift = bn_affine(None, None, np.float32([1, 2]), np.float32([4, 1]), 0.0)
    assert scale.tolist() == [0.5, 1.0] and shift.tolist() == [-0.5, -2.0]


@pytest.mark.parametrize(
    "which, value, text",
    [
        (0, np.nan, "its weight is nan in channel 2"),
        (1, np.inf, "its bias is inf in channel 2"),
        (2, np.nan, "its mean is nan in channel 2"),
        (3, np.nan, "its variance is nan in channel 2"),
        (3, -0.5, "its variance with epsilon 1e-05 is -0.5 in channel 2"),
    ],
)
def test_broken_parameters_are_named_with_the_channel(which, value, text):
    tensors = [np.ones(4) for _ in range(4)]
    tensors[which][2] = value
    with pytest.raises(ModelError, match=f"^batch norm: {text}. Remedy: find where"):
        bn_affine(*tensors, 1e-5)


def test_no_bias_appears_where_none_is_needed():
    assert fold_backward("Conv", {}, np.ones((2, 1, 1)), None, np.ones(2), np.zeros(2))[1] is None
    assert fold_backward("Conv", {}, np.ones((2, 1, 1)), None, np.ones(2), np.ones(2))[1].tolist() == [1, 1]


def test_other_operators_and_other_channels_are_refused():
    with pytest.raises(ModelError, match=r"^Relu: .*cannot be folded.*Conv, ConvTranspose, Gemm, MatMul"):
        fold_backward("Relu", {}, np.ones((2, 2)), None, np.ones(2), np.ones(2))
    with pytest.raises(ModelError, match=r"^Conv: it has 3 output channels, the batch norm 2"):
        fold_backward("Conv", {}, np.ones((3, 2, 1)), None, np.ones(2), np.ones(2))
    with pytest.raises(ModelError, match=r"^Conv: it has 2 input channels, the batch norm 3"):
        fold_forward("Conv", {}, np.ones((3, 2, 1)), None, np.ones(3), np.ones(3))


@given(st.floats(1e-30, 1.0))
def test_the_neutral_variance_is_exact(eps):
    assert np.float32(unit_variance(eps)) + np.float32(eps) == np.float32(1)
    assert np.float64(unit_variance(eps, "float64")) + eps == 1


@given(st.sampled_from([1e-12, 1e-5, 1e-3, 1e-2, 0.5]), st.sampled_from([torch.float32, torch.float64]))
def test_a_batch_norm_of_neutral_variance_is_an_exact_identity(eps, dtype):
    x = torch.randn(3, 4, 5, dtype=dtype) * 100
    var = torch.full((4,), unit_variance(eps, str(dtype).removeprefix("torch.")), dtype=dtype)
    assert torch.equal(F.batch_norm(x, torch.zeros(4, dtype=dtype), var, eps=eps), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_it_is_an_identity_too(dtype):
    x, zeros = torch.randn(3, 4, 5).to(dtype), torch.zeros(4, dtype=dtype)
    var = torch.full((4,), unit_variance(1e-5, str(dtype).removeprefix("torch.")), dtype=dtype)
    assert torch.equal(F.batch_norm(x, zeros, var, eps=1e-5), x)


@pytest.mark.parametrize(
    ("kind", "shape", "bias"),
    [
        ("param", (8,), "b"),
        ("param", (3, 8), None),
        ("param", (1,), None),
        ("input", (8,), None),
        ("input", (2, 8), None),
    ],
)
def test_the_bias_of_a_product_is_a_stored_vector_that_is_added(kind, shape, bias):
    b = Build()
    product = b.op("MatMul", b.input(shape=(2, 4)), b.param("w", (4, 8)), name="product", shape=(2, 8))
    other = b.param("b", shape) if kind == "param" else b.input("b", shape)
    graph = b.graph(b.op("Add", product, other, name="add", shape=(2, 8)))
    layer = Layers(graph).of["product"]
    assert layer.bias == bias and layer.adder == (None if bias is None else "add")
