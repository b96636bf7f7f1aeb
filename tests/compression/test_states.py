"""States of recurrent layers that the code makes, and states that the caller hands on, become as narrow as the layers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

import bitwright
from bitwright.compression.checks import checked_dependencies
from bitwright.errors import ConfigError
from bitwright.methods.front_end import front_end_of
from bitwright.torch import prune_model

FRAMES = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1))


class Steps(nn.Module):
    """A cell in a loop of the code; ``made`` says how its first state comes about."""

    def __init__(self, made: str, kind: str = "GRUCell") -> None:
        super().__init__()
        self.made, self.width = made, 8
        self.cell, self.out = getattr(nn, kind)(6, 8), nn.Linear(8, 3)

    def first(self, x: torch.Tensor) -> torch.Tensor | None:
        return {
            "left out": lambda: None,
            "width of the cell": lambda: torch.zeros(len(x), self.cell.hidden_size),
            "width of the model": lambda: torch.zeros((len(x), self.width), dtype=x.dtype),
            "like the input": lambda: x.new_zeros(len(x), self.width),
            "number": lambda: torch.zeros(len(x), 8),
        }[self.made]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        c = self.first(x) if isinstance(self.cell, nn.LSTMCell) else None
        for t in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(x[:, t], None if h is None else (h, c))
            else:
                h = self.cell(x[:, t], h)
        return self.out(h)


class Streamed(nn.Module):
    """Two layers of an LSTM; the caller hands on both states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        y, (h, c) = self.lstm(x, (h, c))
        return self.out(y), h, c


class Packed(nn.Module):
    """One step of a cell, with both states in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        h, c = self.cell(x, state.chunk(2, -1))
        return self.out(h), torch.cat([h, c], -1)


def without_units(model: nn.Module, recurrent: nn.Module, gone: list[int]) -> None:
    """Units that nothing reads: their columns are zero."""
    with torch.no_grad():
        for name, tensor in recurrent.named_parameters():
            if "weight_hh" in name or "weight_ih_l1" in name:
                tensor[:, gone] = 0
        model.out.weight[:, gone] = 0


@pytest.mark.parametrize("kind", ["GRUCell", "LSTMCell", "RNNCell"])
@pytest.mark.parametrize("made", ["left out", "width of the cell", "width of the model", "like the input"])
def test_states_made_in_the_code(made: str, kind: str) -> None:
    """Half of the units is read by nothing: without them the model computes the same."""
    torch.manual_seed(0)
    model = Steps(made, kind).eval()
    without_units(model, model.cell, [0, 1, 4, 6])
    result = bitwright.compress(
        model, [FRAMES], {"params": 0.6}, widths=1, ranking="uniform", reconstruction=False, progress=False
    )
    assert result.model.cell.hidden_size < 8
    with torch.no_grad():
        np.testing.assert_allclose(result.model(FRAMES), model(FRAMES), atol=1e-6)
    again = bitwright.torch.rebuild(Steps(made, kind).eval(), result.plan)
    again.load_state_dict(result.model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(FRAMES), result.model(FRAMES))


def test_a_state_made_in_a_file(tmp_path: Path) -> None:
    """A width that stands in the code is a constant of the file, which is cut."""
    torch.manual_seed(0)
    model = Steps("number").eval()
    without_units(model, model.cell, [0, 1, 4, 6])
    with pytest.raises(ConfigError, match=r"zeros.*\(4, 8\) has a width that stands in the code"):
        bitwright.compress(model, [FRAMES], {"params": 0.6}, widths=1, progress=False)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.onnx.export(model, (FRAMES,), str(tmp_path / "m.onnx"), dynamo=True, verbose=False)
    result = bitwright.compress(
        str(tmp_path / "m.onnx"), [FRAMES.numpy()], {"params": 0.8}, widths=1, ranking="uniform", progress=False
    )
    session = ort.InferenceSession(result.model.SerializeToString(), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        np.testing.assert_allclose(session.run(None, {"x": FRAMES.numpy()})[0], model(FRAMES), atol=1e-5)


@pytest.mark.parametrize(("kind", "form"), [(Streamed, "torch"), (Streamed, "onnx"), (Packed, "torch")])
def test_states_of_the_caller(kind: type[nn.Module], form: str, tmp_path: Path) -> None:
    """Inputs and outputs become narrower together; a second call on what the first returned computes the same."""
    torch.manual_seed(0)
    model = kind().eval()
    recurrent = model.lstm if kind is Streamed else model.cell
    without_units(model, recurrent, [0, 3, 5, 7])
    states = [torch.randn(2, 4, 8), torch.randn(2, 4, 8)] if kind is Streamed else [torch.randn(4, 16)]
    given = (FRAMES if kind is Streamed else FRAMES[:, 0], *states)
    with torch.no_grad():
        y, *handed_on = model(*given)
        wanted = [y, model(given[0], *handed_on)[0]]
    if form == "onnx":
        torch.onnx.export(model, given, str(tmp_path / "m.onnx"), dynamo=True, verbose=False)
        names = [i.name for i in ort.InferenceSession(str(tmp_path / "m.onnx")).get_inputs()]
        source: Any = str(tmp_path / "m.onnx")
        data: Any = [dict(zip(names, (t.numpy() for t in given), strict=True))]
    else:
        source, data = model, [given]
    result = bitwright.compress(source, data, {"params": 0.6}, metric="agreement", widths=1, progress=False)
    kept = np.setdiff1d(np.arange(8), result.rows[0].removed)
    if kind is Streamed:
        assert {old[-1] for old, _ in result.states.values()} == {8} and len(result.states) == 4
    else:
        assert [(old[-1], new[-1]) for old, new in result.states.values()] == [(16, 2 * len(kept))] * 2
        kept = np.concatenate([kept, kept + 8])
    assert "state: " in str(result) and result.sqnr is not None and result.sqnr > 80
    assert result.metrics["compressed"] == result.metrics["float"]
    narrow = [t[..., kept] for t in states]
    if form == "onnx":
        session = ort.InferenceSession(result.model.SerializeToString(), providers=["CPUExecutionProvider"])

        def run(*values: Any) -> Any:
            return session.run(None, dict(zip(names, (np.asarray(v) for v in values), strict=True)))
    else:
        run = result.model
    with torch.no_grad():
        y, *handed_on = run(given[0], *narrow)
        found = [y, run(given[0], *handed_on)[0]]
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_inputs_that_are_no_states_of_the_model() -> None:
    """A state that is given and not returned is what the caller computed; in place, inputs stay as they are."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.out = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            return self.out(self.gru(x, h)[0])

    batch = (FRAMES, torch.zeros(1, 4, 8))
    found = checked_dependencies(front_end_of(Decoder()).structured(Decoder().eval(), batch, None), batch)
    assert not found.groups and not found.given
    assert "begins with the input h, which the caller computes" in str(found.refused[0])
    states = (FRAMES, torch.zeros(2, 4, 8), torch.zeros(2, 4, 8))
    with pytest.raises(ConfigError, match="inputs stay as they are where a model is pruned in place"):
        prune_model(Streamed().eval(), [states], params=0.6, progress=False)
