"""PyTorch models with one planted fault each, and some that only look as if they had one; see ``tests.support.faults``.

The line at fault bears the comment ``culprit``, or the module at fault is called so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import faults
from tests.support.faults import Fault, LookAlike

FAULTS: list[Fault] = []
LOOK_ALIKES: list[LookAlike] = []
fault, look_alike = partial(faults.fault, FAULTS), partial(faults.look_alike, LOOK_ALIKES)

SECOND = {"batch": 1, "sample": 2}
MINUS = torch.full((4,), -1.0)
CALLED = {"op": "", "line": "# culprit"}  # a call in the user's own code


def two_batches(bad: Tensor, row: int = 2) -> list[Tensor]:
    """A harmless batch of ones, and one with ``bad`` in one of its rows."""
    calm = torch.ones(4, 4, dtype=bad.dtype)
    other = calm.clone()
    other[row] = bad
    return [calm, other]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """A product, something, a product."""

    def __init__(self, middle: Callable[[Tensor], Tensor] | nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(4) + 0.1)
            self.tail.weight.fill_(1.0)
        self.middle = middle
        self.to(dtype).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.middle(self.head(x)))


def net(middle: Any, bad: Tensor, row: int = 2) -> Any:
    """A builder of ``Net(middle)`` with one bad row in the second batch."""
    return lambda: (Net(middle() if isinstance(middle, type) else middle, bad.dtype), two_batches(bad, row))


def after_head(values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A row that ``head`` turns into ``values``."""
    return torch.full((4,), values / 1.4).to(dtype)


# ================================================================================================== faults


def divide(x: Tensor) -> Tensor:
    return x / F.relu(x)  # culprit


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x)  # culprit


def logarithm(x: Tensor) -> Tensor:
    return x.log()  # culprit


def log_of_zero(x: Tensor) -> Tensor:
    return F.relu(x).log()  # culprit


def reciprocal_root(x: Tensor) -> Tensor:
    return torch.rsqrt(F.relu(x))  # culprit


def exponential(x: Tensor) -> Tensor:
    return torch.exp(x)  # culprit


def power(x: Tensor) -> Tensor:
    return x**0.5  # culprit


def inverse_power(x: Tensor) -> Tensor:
    return torch.pow(F.relu(x), -0.5)  # culprit


def naive_softmax(x: Tensor) -> Tensor:
    e = torch.exp(x)  # culprit
    return e / e.sum(-1, keepdim=True)


def arc_cosine(x: Tensor) -> Tensor:
    return torch.acos(x / 1.5)  # culprit


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.sqrt_()  # culprit
    return y


def wrong_side(x: Tensor) -> Tensor:
    logs = x.log()  # culprit
    return torch.where(x > -5, logs, 0.0)


def unbiased(x: Tensor) -> Tensor:
    one = x[:, :1]
    return x + one.var(1, keepdim=True)  # culprit


def loop(x: Tensor) -> Tensor:
    x, shares = x.round(), torch.zeros_like(x)
    for _ in range(6):
        x = x - 1.0
        shares = shares + 1.0 / x  # culprit
    return shares


fault("division by zero", "division by zero", **CALLED, **SECOND)(net(divide, MINUS))
fault("square root of a negative number", "root of a negative number", **CALLED, **SECOND)(net(root, MINUS))
fault("log of a negative number", "logarithm of a non-positive number", **CALLED, **SECOND)(net(logarithm, MINUS))
fault("log of zero", "logarithm of a non-positive number", **CALLED, **SECOND)(net(log_of_zero, MINUS))
fault("reciprocal root of zero", "reciprocal root of zero", **CALLED, **SECOND)(net(reciprocal_root, MINUS))
fault("exp overflow", "exponential overflow", problem="reaches 140", **CALLED, **SECOND)(
    net(exponential, torch.full((4,), 100.0))
)
fault("power of a negative number", "power out of domain", **CALLED, **SECOND)(net(power, MINUS))
fault("negative power of zero", "division by zero", **CALLED, **SECOND)(net(inverse_power, MINUS))
fault("softmax without its maximum taken off", "exponential overflow", **CALLED, **SECOND)(
    net(naive_softmax, torch.tensor([100.0, 0, 0, 0]))
)
fault("acos outside its domain", "argument out of domain", **CALLED, **SECOND)(net(arc_cosine, 2 * torch.ones(4)))
fault("in-place square root", "root of a negative number", **CALLED, **SECOND)(net(in_place, MINUS))
fault("where that takes the wrong side", "logarithm of a non-positive number", **CALLED, **SECOND)(
    net(wrong_side, MINUS)
)
fault("standard deviation of one element", "reduction over nothing", **CALLED)(net(unbiased, MINUS))
fault("division in the third turn of a loop", "division by zero", **CALLED, **SECOND)(
    lambda: (Net(loop), [0.1 * rows for rows in two_batches(10 * after_head(3.0))])
)


# -- masks and attention


class Masked(nn.Module):
    """Softmax behind an additive mask that is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.culprit = nn.Linear(4, 4), nn.Softmax(-1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.culprit(self.head(x) + mask)


@fault("a row that is masked throughout", "every element of a row is masked", **SECOND)
def _dead_row() -> Any:
    masks = [torch.zeros(4, 4), torch.zeros(4, 4)]
    masks[0][:, 3] = -torch.inf
    masks[1][2] = -torch.inf
    return Masked().eval(), [(normal(4, 4, seed=i), mask) for i, mask in enumerate(masks)]


def multiplied_mask(x: Tensor) -> Tensor:
    mask = (1 - torch.tensor([1.0, 1, 1, 0])) * -math.inf  # culprit
    return (x + mask).softmax(-1)


fault("a mask made by multiplication with infinity", "zero times infinity", **CALLED)(net(multiplied_mask, MINUS))


def meeting_masks(x: Tensor) -> Tensor:
    masked = x + torch.tensor([0, 0, 0, -math.inf])
    return masked - masked.amax(0)  # culprit


fault("two infinite masks that meet", "infinity minus infinity", **CALLED)(net(meeting_masks, MINUS))


class Attention(nn.Module):
    """Self-attention by hand; ``scores`` stands in its middle."""

    def __init__(self, scores: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.scores = scores

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(self.q(x) @ self.k(x).transpose(-1, -2))
        return scores.softmax(-1) @ self.v(x)


def no_scale(scores: Tensor) -> Tensor:
    return scores / torch.zeros(())  # culprit


fault("attention divided by a scale of zero", "division by zero", **CALLED)(
    lambda: (Attention(no_scale).eval(), [normal(2, 4, 4)])
)


class Fused(nn.Module):
    """Fused attention with a mask."""

    def __init__(self, mask: Tensor, factor: float) -> None:
        super().__init__()
        self.qkv, self.factor = nn.Linear(4, 12), factor
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.factor * q, self.factor * k
        return F.scaled_dot_product_attention(q, k, v, self.mask)  # culprit


@fault("fused attention whose scores overflow", "overflow", **CALLED)
def _fused_attention() -> Any:
    torch.manual_seed(0)
    return Fused(torch.zeros(4, 4), 1e20).eval(), [normal(1, 2, 4, 4)]


# -- layers


class Named(nn.Module):
    """One module called ``culprit`` between two others."""

    def __init__(self, culprit: nn.Module) -> None:
        super().__init__()
        self.first, self.culprit, self.last = nn.Conv2d(3, 3, 1, bias=False), culprit, nn.ReLU()
        nn.init.dirac_(self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.culprit(self.first(x)))


def batch_norm(variance: float, epsilon: float) -> Any:
    def build() -> Any:
        layer = nn.BatchNorm2d(3, eps=epsilon)
        assert layer.running_var is not None
        layer.running_var[1] = variance
        return Named(layer).eval(), [normal(2, 3, 4, 4)]

    return build


fault("batch norm with zero variance", "zero variance")(batch_norm(0.0, 0.0))
fault("batch norm with negative variance", "negative variance", problem="-0.5")(batch_norm(-0.5, 1e-5))


@fault("layer norm of a constant row", "zero variance", **SECOND)
def _layer_norm() -> Any:
    model = Net(nn.Identity())
    model.middle = nn.Sequential()
    model.middle.add_module("culprit", nn.LayerNorm(4, eps=0.0))
    batches = [normal(4, 4, seed=i) for i in range(2)]
    batches[1][2] = 0.0
    return model, batches


@fault("convolution that overflows", "overflow")
def _conv() -> Any:
    layer = nn.Conv2d(3, 2, 3)
    nn.init.constant_(layer.weight, 1e20)
    return Named(layer).eval(), [torch.full((1, 3, 8, 8), 1e20)]


@fault("products that grow until they overflow", "overflow", op="2")
def _growth() -> Any:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    for layer in layers:
        nn.init.constant_(layer.weight, 1e13)
    return nn.Sequential(*layers).eval(), [torch.ones(1, 4)]


@fault("a reused module, at its second use", "overflow", op="grow")
def _reused() -> Any:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grow = nn.Linear(4, 4, bias=False)
            nn.init.constant_(self.grow.weight, 1e20)

        def forward(self, x: Tensor) -> Tensor:
            return self.grow(self.grow(x)).relu()

    return Twice().eval(), [torch.ones(1, 4)]


# -- data and parameters


@fault("NaN in one sample", "bad input data", op="x", batch=2, sample=3, problem="1 NaN")
def _nan_sample() -> Any:
    batches = [normal(4, 4, seed=i) for i in range(4)]
    batches[2][3, 1] = torch.nan
    return Net(F.relu), batches


@fault("Inf in one sample", "bad input data", op="x", batch=1, sample=0, problem="1 Inf")
def _inf_sample() -> Any:
    batches = [normal(4, 4, seed=i) for i in range(2)]
    batches[1][0, 0] = torch.inf
    return Net(torch.sigmoid), batches


@fault("NaN in a weight", "bad parameter", op="tail.weight", batch=None, problem="[1, 3]")
def _nan_weight() -> Any:
    model = Net(F.relu)
    with torch.no_grad():
        model.tail.weight[1, 3] = torch.nan
    return model, [normal(4, 4)]


class Recurrent(nn.Module):
    """A fused recurrent layer and a product."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.culprit, self.last = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.culprit(x)[0])


@fault("Inf in a recurrent weight", "bad parameter", op="culprit.weight_hh_l0", batch=None, problem="gate f")
def _inf_recurrent() -> Any:
    layer = nn.LSTM(3, 4)
    with torch.no_grad():
        layer.weight_hh_l0[5, 1] = torch.inf
    return Recurrent(layer).eval(), [normal(5, 2, 3)]


@fault("RNN whose state grows without bound", "overflow", sample=1, problem="step that shows it is 5 of 8")
def _rnn() -> Any:
    layer = nn.RNN(3, 4, nonlinearity="relu")
    nn.init.ones_(layer.weight_ih_l0), nn.init.constant_(layer.weight_hh_l0, 1e8)
    x = torch.ones(8, 2, 3)
    x[:, 0] = 0.0
    layer.bias_ih_l0.data.zero_(), layer.bias_hh_l0.data.zero_()
    return Recurrent(layer).eval(), [x]


@fault("RNN that is given its batch first and grows", "overflow", sample=1, problem="step that shows it is 5 of 8")
def _batch_first() -> Any:
    model, (x,) = _rnn()
    model.culprit.batch_first = True
    return model, [x.transpose(0, 1)]


@fault("NaN in the data of an LSTM", "bad input data", op="x", batch=1)
def _lstm_data() -> Any:
    batches = [normal(5, 2, 3, seed=i) for i in range(2)]
    batches[1][4, 1, 2] = torch.nan
    return Recurrent(nn.LSTM(3, 4)).eval(), batches


class ByHand(nn.Module):
    """A recurrence in Python over a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for x_t in x:
            h = torch.tanh(self.cell(h)) + torch.log(x_t)  # culprit
        return h


@fault("logarithm at the fourth step of a recurrence", "logarithm of a non-positive number", **CALLED)
def _by_hand() -> Any:
    x = normal(6, 2, 4).abs() + 0.1
    x[3, 1, 2] = -1
    return ByHand().eval(), [x]


# -- half precision


def half_square(x: Tensor) -> Tensor:
    return (x * x).sqrt()  # culprit


def half_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True))  # culprit


def half_bias(x: Tensor) -> Tensor:
    bias = torch.tensor([4e4, 4e4, 4e4, -torch.inf], dtype=HALF)
    return (x * x + bias).softmax(-1)  # culprit


def to_half(x: Tensor) -> Tensor:
    return x.half().float()  # culprit


HALF, BRAIN = torch.float16, torch.bfloat16
fault("half-precision square", "half-precision overflow", problem="reaches 8.9", **CALLED, **SECOND)(
    net(half_square, after_head(300.0, HALF))
)
fault("half-precision norm that becomes zero", "half-precision overflow", **CALLED, **SECOND)(
    net(half_norm, after_head(300.0, HALF))
)
fault("half-precision scores that overflow where a mask is added", "half-precision overflow", problem="reaches",
      **CALLED, **SECOND)(net(half_bias, after_head(200.0, HALF)))  # fmt: skip
fault("cast to half precision", "half-precision overflow", **CALLED, **SECOND)(net(to_half, after_head(1e6)))
fault("bfloat16 square", "half-precision overflow", **CALLED, **SECOND)(net(half_square, after_head(1e25, BRAIN)))


@fault("half-precision product", "half-precision overflow", op="tail", **SECOND)
def _half_product() -> Any:
    model = Net(nn.Identity(), HALF)
    nn.init.constant_(model.tail.weight, 100.0)
    return model, two_batches(torch.full((4,), 500.0, dtype=HALF))


# -- memory, indices


def uninitialised(x: Tensor) -> Tensor:
    room = torch.empty_like(x)  # culprit
    room[:, :2] = x[:, :2]
    return room


fault("memory that nothing was written to", "uninitialised memory", **CALLED)(net(uninitialised, MINUS))


class Best(nn.Module):
    """Chooses a word by logarithms."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x).argmax(-1)  # culprit


fault("NaN that an argmax hides", "logarithm of a non-positive number", batch=1, **CALLED)(
    lambda: (Best(), two_batches(torch.tensor([-1.0, 2, 2, 2])))
)


def two_faults(x: Tensor) -> Tensor:
    first = torch.log(x)  # culprit
    return first + torch.sqrt(x)


fault("two faults, of which the first is to be named first", "logarithm of a non-positive number", **CALLED,
      **SECOND)(net(two_faults, MINUS))  # fmt: skip


# ================================================================================================== look-alikes


@look_alike("-inf mask before a softmax")
def _mask() -> Any:
    causal = torch.full((4, 4), -torch.inf).triu(1)
    return Attention(lambda s: s + causal).eval(), [normal(2, 4, 4)]


@look_alike("masked_fill with -inf before a softmax")
def _masked_fill() -> Any:
    later = torch.ones(4, 4).triu(1).bool()
    return Attention(lambda s: s.masked_fill(later, -torch.inf)).eval(), [normal(2, 4, 4)]


@look_alike("-inf mask among the arguments")
def _mask_argument() -> Any:
    return Masked().eval(), [(normal(4, 4), torch.tensor([0, 0, -torch.inf, -torch.inf]).expand(4, 4).clone())]


@look_alike("dead rows that are filled in behind the softmax")
def _dead_rows() -> Any:
    dead = torch.tensor([False, True, False, False])

    def scores(s: Tensor) -> Tensor:
        return s.masked_fill(dead[:, None], -torch.inf)

    class Filled(Attention):
        def forward(self, x: Tensor) -> Tensor:
            p = self.scores(self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)
            return p.masked_fill(dead[:, None], 0.0) @ self.v(x)

    return Filled(scores).eval(), [normal(2, 4, 4)]


@look_alike("causal fused attention with a boolean mask")
def _fused() -> Any:
    torch.manual_seed(0)
    return Fused(torch.ones(4, 4).tril().bool(), 1.0).eval(), [normal(1, 2, 4, 4)]


@look_alike("multi-head attention with padding")
def _multi_head() -> Any:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    return Heads().eval(), [(normal(2, 4, 4), torch.tensor([[False, False, True, True]] * 2))]


def kept_log(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.log(), torch.zeros(()))


def replaced(x: Tensor) -> Tensor:
    return x.sqrt().nan_to_num(0.0)


def filled(x: Tensor) -> Tensor:
    y = x.sqrt()
    y[y.isnan()] = 0.0
    return y


def manual_sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def cut(x: Tensor) -> Tensor:
    return x.log()[:2]


def buffer(x: Tensor) -> Tensor:
    room = torch.empty_like(x)
    room[:, :2] = x[:, 2:]
    room[:, 2:] = x[:, :2]
    return room


def bounds(x: Tensor) -> Tensor:
    return x.clamp(0.0, math.inf)


def running_maximum(x: Tensor) -> Tensor:
    peak, total = torch.full_like(x, -torch.inf), torch.zeros_like(x)
    for i in range(3):
        new = torch.maximum(peak, x + i)
        total = total * torch.exp(peak - new) + torch.exp(x + i - new)
        peak = new
    return total


def large(x: Tensor) -> Tensor:
    return x.sigmoid() * 3e38 / 3e38


look_alike("logarithm kept where it is defined")(net(kept_log, MINUS))
look_alike("NaN replaced by zero")(net(replaced, MINUS))
look_alike("NaN written over")(net(filled, MINUS))
look_alike("sigmoid from an exponential that overflows")(net(manual_sigmoid, torch.full((4,), -200.0)))
look_alike("rows of padding that are cut off")(net(cut, MINUS, row=3))
look_alike("memory that is filled before it is read")(net(buffer, MINUS))
look_alike("bounds that are infinite")(net(bounds, MINUS))
look_alike("running maximum that starts at -inf")(net(running_maximum, MINUS))
look_alike("numbers whose sum overflows")(net(large, MINUS))


@look_alike("missing values in the data, filled in by the model")
def _missing() -> Any:
    class Filled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.where(x.isnan(), 0.0, x))

    return Filled(F.relu), [torch.tensor([[1, torch.nan, 2, 3]] * 4)]


@look_alike("words that a model must not say")
def _suppressed() -> Any:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(x).masked_fill(torch.tensor([False, False, True, False]), -torch.inf)
            return logits, logits.argmax(-1)

    return Words().eval(), [normal(4, 4)]


@look_alike("half-precision mask that overflows to -inf")
def _half_mask() -> Any:
    mask = torch.tensor([0, 0, -65504, -65504], dtype=HALF)
    return Net(lambda x: (x * x + mask + mask).softmax(-1), HALF), [normal(4, 4).half()]


def nobody(x: Tensor) -> Tensor:
    apart = x.abs().masked_fill(torch.tensor([False, False, True, False]), torch.inf)
    return 1 / (1 + apart)


look_alike("distances that are infinite where there is nobody")(net(nobody, MINUS))
