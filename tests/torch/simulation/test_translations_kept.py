"""A captured program becomes the ONNX model that ``torch.onnx.export`` makes of it."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch import library as definitions

from bitwright.torch.simulation import exported_program as translations
from bitwright.torch.simulation.exported_program import by_public_function, takes_registry, to_onnx


class Net(nn.Module):
    """Layers, a free batch axis, and an operator with a translation of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(torch.relu(self.conv(x)).mean((2, 3)))
        return self.fc(y), torch.sort(y, stable=True)[0]


def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=2)
    return torch.export.export(Net().eval(), (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: batch},))


def test_the_model_is_that_of_the_public_function() -> None:
    captured = program()
    found, wanted = (ir.to_proto(make(captured)) for make in (to_onnx, by_public_function))
    assert found.graph.node and found.SerializeToString() == wanted.SerializeToString()


def test_this_version_of_torch_takes_a_registry() -> None:
    """Otherwise exports are right and take twice the time: the arguments that are looked for have changed."""
    assert takes_registry()


def test_another_implementation_is_called_by_the_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(translations, "_NEEDED", {"an argument of the future"})
    monkeypatch.setattr(translations, "by_public_function", called.append)
    assert not takes_registry()
    to_onnx(captured := program())
    assert called == [captured]


def test_translations_are_looked_up_again_where_there_are_new_operators() -> None:
    captured = program()
    to_onnx(captured)
    before = translations._registry.cache_info()
    to_onnx(captured)
    assert translations._registry.cache_info().misses == before.misses
    operators = definitions.Library("bitwright_kept", "DEF")
    operators.define("twice(Tensor x) -> Tensor")
    to_onnx(captured)
    assert translations._registry.cache_info().misses == before.misses + 1
