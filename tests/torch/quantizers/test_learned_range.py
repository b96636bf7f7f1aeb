"""A learned range rounds as the fixed range with its encoding does, and trains with the gradients of the papers."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bitwright.core.numerics.affine import encode
from bitwright.core.numerics.affine import fake_quantize as reference
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PER_TENSOR, Granularity, PerBlock, PerChannel
from bitwright.core.numerics.ranges import choose_range_of
from bitwright.core.numerics.spec import QuantSpec, Symmetry
from bitwright.errors import ModelError
from bitwright.torch.quantizers import functional
from bitwright.torch.quantizers.quantizer import Quantizer
from tests.support.learned_sums import separate_operations

GRANULARITIES: dict[str, Granularity] = {
    "per-tensor": PER_TENSOR,
    "per-channel": PerChannel(0),
    "last-axis": PerChannel(3),
    "blocks": PerBlock(2, axis=1, channel_axis=0),
}
BITS = [2, 4, 8, 12]


def quantizer(x: Tensor, granularity: Granularity, bits: int, symmetry: Symmetry, role: str = "weight") -> Quantizer:  # fmt: skip
    spec = QuantSpec(IntFormat(bits, symmetry != "asymmetric"), granularity, symmetry)
    found = Quantizer("site", role, spec)  # type: ignore[arg-type]
    lo, hi = choose_range_of(x.detach(), spec, granularity)
    found.encoding = encode(0.7 * lo, 0.7 * hi, spec, granularity)  # some values lie outside
    return found


def moved(learned: object, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in learned.parameters().values():  # type: ignore[attr-defined]
            p.copy_(0.2 * torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("symmetry", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
def test_the_forward_is_that_of_a_fixed_range_bit_for_bit(granularity, bits, symmetry):
    x = torch.randn(3, 4, 5, 6) + 0.3
    learning = quantizer(x, granularity, bits, symmetry)
    fixed = learning.required
    before = learning(x)
    learned = learning.learn(offset=symmetry == "asymmetric")
    assert learning.required == fixed and torch.equal(learning(x), before)
    for seed in range(3):
        moved(learned, seed)
        encoding = learning.required
        assert encoding != fixed
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            y = x.to(dtype)
            wanted = reference(y if dtype.itemsize > 2 else y.float(), encoding).to(dtype)
            assert torch.equal(learning(y), wanted)
            with torch.no_grad():
                assert torch.equal(learning(y), wanted)
                assert torch.equal(learning.constant(y), wanted)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("role", ["weight", "output"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
def test_gradients_are_those_of_the_papers_over_the_scale(granularity, bits, role, layout):
    x = (torch.randn(3, 4, 5, 6) + 0.3).double()
    if layout != "contiguous":
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    learning = quantizer(x, granularity, bits, "asymmetric", role)
    learned = learning.learn(offset=True)
    moved(learned)
    upstream = torch.randn_like(x)
    learning(x).backward(upstream)
    grads = [x.grad, learned.log_scale.grad, learned.offset.grad]

    # the derivative of the plain formula, by automatic differentiation
    encoding, fmt = learning.required, learning.required.format
    shape = (1,) * (len(granularity.view_shape(x.shape)) - len(granularity.broadcast_shape(x.shape)))
    shape += granularity.broadcast_shape(x.shape)
    scale = torch.tensor(encoding.scale).double().reshape(shape).requires_grad_()
    zero = torch.tensor(encoding.zero_point).double().reshape(shape).requires_grad_()
    z = x.detach().clone().reshape(granularity.view_shape(x.shape)).requires_grad_()
    out = functional.quantize_dequantize(z, scale, zero, fmt.qmin, fmt.qmax)
    out.backward(upstream.reshape(z.shape))
    examples = 1 if role == "weight" else 3
    factor = 1 / math.sqrt(max(1.0, x.numel() / examples / encoding.scale.size) * fmt.steps)
    params = encoding.scale.shape
    torch.testing.assert_close(grads[0], z.grad.reshape(x.shape))
    wanted = (factor * scale.grad / scale).detach().reshape(params).float()
    torch.testing.assert_close(grads[1], wanted, rtol=1e-5, atol=1e-6)
    # zero_point = -lower / scale: the derivative by the lower end is -1 / scale of that by the zero point
    wanted = (-factor * zero.grad / scale / (fmt.steps * scale)).detach().reshape(params).float()
    torch.testing.assert_close(grads[2], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
def test_gradients_in_float32_agree_with_those_in_float64(granularity):
    x = torch.randn(8, 16, 32, 32)
    grads = []
    for dtype in (torch.float32, torch.float64):
        learning = quantizer(x, granularity, 8, "symmetric")
        learned = learning.learn(offset=False)
        learning(x.to(dtype)).backward(torch.linspace(-1, 1, x.numel(), dtype=dtype).sin().reshape(x.shape))
        grads.append(learned.log_scale.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-2, atol=1e-2 * float(grads[1].abs().max()))


def test_training_finds_the_range_of_least_error():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    learning = quantizer(x, PER_TENSOR, 4, "symmetric")
    spec = learning.spec

    def error(bound: float) -> float:
        return float((reference(x, encode(-bound, bound, spec)) - x).square().mean())

    best = min(error(b) for b in np.linspace(0.5, 4, 200))
    learning.encoding = encode(-8.0, 8.0, spec)
    learned = learning.learn(offset=False)
    optimizer = torch.optim.Adam([learned.log_scale], lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        (learning(x) - x).square().mean().backward()
        optimizer.step()
    assert float((learning(x) - x).square().mean().detach()) < 1.02 * best < 0.5 * error(8.0)


def test_an_offset_moves_to_where_the_values_are():
    x = 4 * torch.rand(4096, generator=torch.Generator().manual_seed(0)) - 3
    spec = QuantSpec(IntFormat(6, signed=False), PER_TENSOR, "asymmetric")
    errors = {}
    for offset in (False, True):
        learning = Quantizer("site", "output", spec)
        learning.encoding = encode(-1.0, 3.0, spec)  # as wide as the values are, and 2 too high
        learned = learning.learn(offset=offset)
        optimizer = torch.optim.Adam(list(learned.parameters().values()), lr=0.02)
        for _ in range(300):
            optimizer.zero_grad()
            (learning(x) - x).square().mean().backward()
            optimizer.step()
        errors[offset] = float((learning(x) - x).square().mean().detach())
    assert -4.0 < float(learning.required.min) < -2.9
    assert errors[True] < 0.3 * errors[False]


@pytest.mark.parametrize("value", [-13.8, 13.8])
def test_scales_are_positive_and_finite_whatever_a_step_does(value):
    learning = quantizer(torch.randn(4, 3), PerChannel(0), 8, "symmetric")
    learned = learning.learn(offset=False)
    huge = Encoding(IntFormat(8), np.full(4, 1e34, np.float32), np.zeros(4, np.int64), PerChannel(0))
    tiny = Encoding(IntFormat(8), np.full(4, 1e-37, np.float32), np.zeros(4, np.int64), PerChannel(0))
    for base in (learning.required, huge, tiny):
        learning.encoding = base
        with torch.no_grad():
            learned.log_scale.fill_(value)
        scale = learning.required.scale
        assert (scale > 0).all() and np.isfinite(scale).all() and np.isfinite(learning.required.min).all()
        assert bool(torch.isfinite(learning(torch.randn(4, 3))).all())


def test_a_range_that_left_its_tensor_is_named():
    learning = quantizer(torch.randn(4, 3), PerChannel(0), 8, "symmetric")
    learned = learning.learn(offset=False)
    with torch.no_grad():
        learned.log_scale[1] = 20.0
    with pytest.raises(ModelError, match=r"site: its learned scale is e\^20.0 times larger than calibration"):
        learning(torch.randn(4, 3))
    with torch.no_grad():
        learned.log_scale[1] = -20.0
    with pytest.raises(ModelError, match=r"e\^20.0 times smaller .* lower the learning rate of sim.range"):
        learning.required  # noqa: B018
    with torch.no_grad():
        learned.log_scale[1] = math.nan
    with pytest.raises(ModelError, match="a parameter of its learned range is NaN or infinite"):
        learning(torch.randn(4, 3))


def test_parameters_stay_the_optimizers_when_the_encoding_is_set_anew(caplog):
    x = torch.randn(4, 3)
    learning = quantizer(x, PerChannel(0), 8, "symmetric")
    learned = learning.learn(offset=False)
    moved(learned)
    other = encode(np.full(4, -1.0), np.full(4, 1.0), learning.spec, PerChannel(0))
    learning.encoding = None
    assert learning.encoding is None
    learning.encoding = other
    assert learning.learned is learned and learning.required == other and not learned.log_scale.any()
    learning.encoding = encode(-1.0, 1.0, learning.spec, PER_TENSOR)
    assert learning.learned is None and "give sim.range_parameters() to a new optimizer" in caplog.text


def test_remembered_parameters_come_back_into_the_same_objects():
    learning = quantizer(torch.randn(4, 3), PerChannel(0), 8, "symmetric")
    learned = learning.learn(offset=False)
    moved(learned)
    encoding, values = learning.required, learned.log_scale.detach().clone()
    undo = learning.remember()
    moved(learned, 1)
    learning.encoding = encode(-1.0, 1.0, learning.spec, PER_TENSOR)
    undo()
    assert learning.learned is learned and torch.equal(learned.log_scale, values)
    assert learning.required == encoding
    assert copy.deepcopy(learning).required == encoding


def test_writes_that_autograd_does_not_see_count():
    """An average of weights is put in place through ``.data``, which leaves the version of a tensor as it is."""
    learning = quantizer(torch.randn(4, 3), PerChannel(0), 8, "symmetric")
    learned = learning.learn(offset=False)
    before = learning.required
    learned.log_scale.data.fill_(0.5)
    assert learning.required != before
    learned.log_scale.data = torch.full((4,), 0.25)
    np.testing.assert_allclose(learning.required.scale, before.scale * np.exp(0.25), rtol=1e-6)


def test_results_may_be_written_over():
    x = torch.randn(4, 3, requires_grad=True)
    learning = quantizer(x, PER_TENSOR, 4, "symmetric", "output")
    learned = learning.learn(offset=False)
    out = learning(x)
    out += 1.0
    out.square().sum().backward()
    assert bool(learned.log_scale.grad.isfinite()) and x.grad is not None


@pytest.mark.parametrize("granularity", ["tensor", "rows"])
def test_compiled_gradients_are_those_of_separate_operations(granularity, monkeypatch):
    """Of a tensor that is large enough for compiled loops: the input's are equal bit for bit."""
    torch.manual_seed(0)
    x = torch.randn(64, 300)
    upstream = torch.randn(64, 300)
    found = []
    for compiled in (True, False):
        if not compiled:
            separate_operations(monkeypatch)
        per_tensor = granularity == "tensor"
        learning = (
            quantizer(x, PER_TENSOR, 4, "asymmetric") if per_tensor else quantizer(x, PerChannel(0), 4, "symmetric")
        )
        learned = learning.learn(offset=per_tensor)
        moved(learned)
        given = x.clone().requires_grad_()
        learning(given).backward(upstream)
        found.append((given.grad, *(p.grad for p in learned.parameters().values())))
    assert torch.equal(found[0][0], found[1][0])
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
