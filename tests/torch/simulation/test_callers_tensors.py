"""A simulation writes over no tensor that the model still reads, whichever operator hands its operand on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.health.diagnosis import Repair
from bitwright.torch import QuantizationSimModel
from bitwright.torch.simulation.simulate import repaired

#: calls that return their operand, or a view of it, where they have nothing to do
HANDS_ON: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "to-type": lambda x: x.to(torch.float32),
    "to-device": lambda x: x.to("cpu"),
    "to-other": lambda x: x.to(x),
    "type": lambda x: x.type(torch.float32),  # type: ignore[return-value]
    "type_as": lambda x: x.type_as(x),
    "cpu": lambda x: x.cpu(),
    "contiguous": lambda x: x.contiguous(),
    "alias": torch.ops.aten.alias.default,
    "reshape": lambda x: x.reshape(x.shape),
    "view": lambda x: x.view(x.shape),
    "view_as": lambda x: x.view_as(x),
    "flatten": lambda x: x.flatten(3),
    "unflatten": lambda x: x.unflatten(3, (6,)),
    "ravel": lambda x: x.view(-1).ravel().view(x.shape),
    "squeeze": lambda x: x.squeeze(),
    "squeeze-axis": lambda x: x.squeeze(1),
    "expand": lambda x: x.expand(x.shape),
    "expand_as": lambda x: x.expand_as(x),
    "broadcast_to": lambda x: x.broadcast_to(x.shape),
    "permute": lambda x: x.permute(0, 1, 2, 3),
    "transpose": lambda x: x.transpose(1, 1),
    "movedim": lambda x: x.movedim(1, 1),
    "slice": lambda x: x[:],
    "ellipsis": lambda x: x[...],
    "narrow": lambda x: x.narrow(0, 0, x.shape[0]),
    "split": lambda x: x.split(x.shape[0])[0],
    "chunk": lambda x: x.chunk(1)[0],
    "cat-of-one": lambda x: torch.cat([x]),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "dropout-of-nothing": lambda x: F.dropout(x, 0.0),
    "dropout2d": lambda x: F.dropout2d(x, 0.5, training=False),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=False),
    "identity": nn.Identity(),
    "pad-by-nothing": lambda x: F.pad(x, (0, 0)),
    "adaptive-pool": lambda x: F.adaptive_avg_pool2d(x, (6, 6)),
    "pool-of-one": lambda x: F.max_pool2d(x, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=1.0),
    "repeat": lambda x: x.repeat(1, 1, 1, 1),
    "flip": lambda x: x.flip(()),
    "roll": lambda x: x.roll(0, 0),
    "tril": lambda x: x.tril(9),
    "sum-of-one": lambda x: x[None].sum(0),
    "mean-of-one": lambda x: x[None].mean(0),
    "times-one": lambda x: x * 1.0,
    "plus-nothing": lambda x: x + 0,
    "relu": lambda x: x.relu(),
    "clamp": lambda x: x.clamp(-9, 9),
}


class Up(nn.Module):
    def __init__(self, hand_on: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.b, self.hand_on = nn.Conv2d(4, 2, 1), hand_on

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.interpolate(self.hand_on(x), scale_factor=2.0))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Skips a layer in its first frame, so that what follows gets values of two grids."""

    def __init__(self, hand_on: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.time, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1), Up(hand_on)

    def forward(self, x: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        if not first:
            h = self.time(h)
        h = h.view(h.shape)
        return self.up(h), h


class Frames(nn.Module):
    def __init__(self, hand_on: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.decoder = Decoder(hand_on)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        frames = [self.decoder(frame, i == 0) for i, frame in enumerate((x, x.flip(0)))]
        return frames[0][0] + frames[1][0], frames[0][1]


@pytest.mark.parametrize("hand_on", HANDS_ON.values(), ids=HANDS_ON)
def test_what_an_operator_hands_on_stays_as_it_was_for_other_readers(hand_on: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(2, 3, 6, 6), Frames(hand_on).eval()
    with torch.no_grad():
        model.decoder.time.weight.mul_(6)  # so that the grids differ
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings([x], progress=False)
    with torch.no_grad():
        found = sim.model(x)[1]
    encoding = sim.quantizers["decoder.a.output[0]"].encoding
    assert encoding is not None
    codes = found.double() / float(encoding.scale)
    assert float((codes - codes.round()).abs().max()) < 1e-3
    outputs = sim.model(x)
    assert torch.equal(outputs[1].detach(), found)
    sum(y.pow(2).mean() for y in outputs).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in sim.model.parameters())


@pytest.mark.parametrize("call", [torch.Tensor.float, torch.Tensor.contiguous, torch.Tensor.resolve_conj])
def test_a_repair_is_of_the_result_and_not_of_what_the_call_was_given(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([1.0, float("nan"), 3.0])
    made = repaired(call, Repair("cast", "clamp", -2.0, 2.0))(x)
    assert made.tolist() == [1.0, 0.0, 2.0] and x[2] == 3.0 and x[1].isnan()
    assert repaired(torch.Tensor.relu_, Repair("cast", "clamp", -2.0, 2.0))(x) is x
    assert x.tolist() == [1.0, 0.0, 2.0]
