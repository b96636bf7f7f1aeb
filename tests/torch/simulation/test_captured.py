"""What an export is made from where the forward takes another path while it is traced, or cannot be traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import ExportError
from bitwright.torch import QuantizationSimModel


def simulated(model: nn.Module, *batches: Any) -> QuantizationSimModel:
    model.eval()
    with torch.no_grad():
        model(*batches[0])  # it has run before
    sim = QuantizationSimModel(model, batches[0])
    sim.compute_encodings(list(batches), progress=False)
    return sim


def in_runtime(file: Any, *inputs: Tensor) -> np.ndarray:
    """The outputs of float kernels, which compute as the simulation does where the quantizers are in the right places."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(file), options)
    feeds = {found.name: given.numpy() for found, given in zip(session.get_inputs(), inputs, strict=True)}
    return session.run(None, feeds)[0]


class Cached(nn.Module):
    """A table that is computed once, and anew while the model is exported: with one product and one sigmoid more."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.kept = nn.Linear(8, 8), nn.Linear(8, 8), {}

    def table(self, n: int) -> Tensor:
        if n not in self.kept or torch.compiler.is_exporting():
            made = (torch.arange(2 * n, dtype=torch.float32) * 0.1)[:n].sigmoid()
            if torch.compiler.is_exporting():
                return made
            self.kept[n] = made
        return self.kept[n]

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b((h * self.table(x.shape[1])).sigmoid())


class Masked(nn.Module):
    """A mask that is only applied where something is masked, which a trace cannot tell."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.q, self.o = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        scores = self.q(x) @ x.transpose(1, 2) * 0.5
        if not bool(mask.all()):
            scores = scores + (mask[:, None].float() - 1) * 100
        return self.o(scores.softmax(-1) @ x)


class Extra(nn.Module):
    """Another call while it is traced, where no quantizer depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.b(h.nan_to_num() if torch.compiler.is_exporting() else h)


def test_quantizers_are_at_the_values_of_the_simulation_where_a_cache_is_passed_by_in_the_trace(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(16, 8),) for _ in range(3)]
    sim = simulated(Cached(), *batches)
    exported = sim.export(tmp_path, "m", batches[0])
    np.testing.assert_allclose(in_runtime(exported.qdq, *batches[1]), sim.model(*batches[1]).detach(), atol=1e-6)
    assert sim.verify(batches[1]).ok
    assert not [note for note in exported.notes if "not in the exported graph" in note]


def test_a_mask_that_an_input_decides_on_is_that_of_the_example_and_noted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randint(0, 20, (2, 5)), torch.ones(2, 5, dtype=torch.bool)) for _ in range(3)]
    sim = simulated(Masked(), *batches)
    exported = sim.export(tmp_path, "m", batches[0])
    np.testing.assert_allclose(in_runtime(exported.qdq, *batches[1]), sim.model(*batches[1]).detach(), atol=1e-5)
    (note,) = [note for note in exported.notes if note.startswith("path:")]
    assert "test_captured.py" in note and "in forward" in note


def test_with_a_free_axis_another_path_is_refused_and_auto_fixes_the_axis(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    sim = simulated(Cached(), (x,))
    with pytest.raises(ExportError, match=r"mul: the forward makes other calls there while it is traced"):
        sim.export(tmp_path, "m", x, dynamic_batch=True)
    exported = sim.export(tmp_path, "m", x, dynamic_batch="auto")
    assert any("the size is fixed to 16" in note and "other calls" in note for note in exported.notes)
    assert sim.verify(x).ok


def test_a_call_that_moves_no_quantizer_keeps_the_trace(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    sim = simulated(Extra(), (x,))
    exported = sim.export(tmp_path, "m", x, dynamic_batch=True)
    more = torch.randn(5, 8)
    np.testing.assert_allclose(in_runtime(exported.qdq, more), sim.model(more).detach(), atol=1e-6)


def test_a_path_that_activations_decide_on_is_refused_with_its_line() -> None:
    class Halting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.fc = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            while x.abs().sum() > 1:
                x = self.fc(x) * 0.1
            return x

    ids = torch.tensor([[1, 2, 3]])
    sim = simulated(Halting(), (ids,))
    with pytest.raises(ExportError, match=r"test_captured\.py:\d+, in forward: a number that Python reads there"):
        sim.verify(ids)


class Checked(nn.Module):
    """Checks on values, of which the exporter has no operator for all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, picture: Tensor) -> Tensor:
        h = self.words(ids)
        here = (ids == 3)[..., None].expand_as(h)
        torch._check_tensor_all(here.sum() == picture.numel())
        torch._assert_async((ids < 20).all())
        torch._check(bool((ids >= 0).all()))
        return self.layer(h.masked_scatter(here, picture))


def test_checks_on_values_are_left_out_of_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = (torch.tensor([[3, 3, 5, 6, 7, 8]]), torch.randn(2, 8))
    model = Checked().eval()
    sim = QuantizationSimModel(model, batch)
    sim.compute_encodings([batch], allow_unreached=True, progress=False)
    exported = sim.export(tmp_path, "m", batch)
    np.testing.assert_allclose(in_runtime(exported.qdq, *batch), sim.model(*batch).detach(), atol=1e-6)
    assert sim.verify(batch).ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_buffer_of_another_type_that_is_cast_where_it_is_used_is_exported(dtype: torch.dtype, tmp_path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("positions", torch.randn(4, 8).to(dtype))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.positions.to(x.dtype))

    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    sim = simulated(Positions(), (x,))
    exported = sim.export(tmp_path, "m", x)
    np.testing.assert_allclose(in_runtime(exported.qdq, x), sim.model(x).detach(), atol=1e-6)
    assert sim.verify(x).ok
