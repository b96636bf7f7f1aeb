"""Functions compiled by torch.jit.script run in float, and are named with the parameters that only they read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitwright.torch import QuantizationSimModel

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight).tanh()


def _act(x: Tensor) -> Tensor:
    return x * x.sigmoid()


fused = torch.jit.script(_plain)
unused = torch.jit.script(_plain)


def helper(x: Tensor, weight: Tensor) -> Tensor:
    return fused(x, weight)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, direct: bool, last: bool) -> None:
        super().__init__()
        self.a, self.direct, self.last = nn.Linear(8, 8), direct, last
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = fused(self.a(x), self.weight) if self.direct else helper(self.a(x), self.weight)
        return x if self.last else x + 1


X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("last", [False, True], ids=["inside", "last"])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "through-a-helper"])
def test_scripted_functions_are_named_with_their_parameters(
    direct: bool, last: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "bitwright"):
        sim = QuantizationSimModel(nn.Sequential(Block(direct, last)), X)
    said = [r.getMessage() for r in caplog.records if "torch.jit.script" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("0._plain: a torch.jit.script function") and "with 0.weight;" in said[0]
    sim.compute_encodings([X])
    assert "not recorded: 0._plain: a torch.jit.script function" in str(sim.coverage())
    with torch.no_grad(), sim.in_float():
        assert torch.equal(sim.model(X), nn.Sequential(*sim.model)(X))


def test_a_scripted_function_held_by_a_module_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = torch.jit.script(_act)
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.act(self.fc(x)))  # type: ignore[no-any-return]

    QuantizationSimModel(Held(), X)
    assert any(r.getMessage().startswith("act: a torch.jit.script function") for r in caplog.records)


def test_what_is_not_called_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor, deploy: bool = False) -> Tensor:
            return unused(x, x) if deploy else self.fc(x)  # type: ignore[no-any-return]

    QuantizationSimModel(Careful(), X)
    assert not [r for r in caplog.records if "torch.jit.script" in r.getMessage()]


def _sum(x: Tensor, weight: Tensor) -> Tensor:
    return x * 2 + torch.mm(x, weight)


summed = torch.jit.script(_sum)


class Sums(nn.Module):
    """The scripted function adds, and so does the model afterwards; functions of modules are named too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        rows = [summed(row[None], self.weight)[0] for row in x]
        return self.b(torch.stack(rows) + x)  # type: ignore[no-any-return]


def test_what_a_scripted_function_calls_has_no_quantizers_in_the_file(tmp_path: Path) -> None:
    """The exporter runs the Python code of such a function, whose calls are not those that were recorded."""
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    sim = QuantizationSimModel(Sums().eval(), batches[0])
    sim.compute_encodings(batches[:2], progress=False)
    sim.export(tmp_path, "model", batches[0])
    report = sim.verify(batches[2])
    assert report.ok and {"add.output[0]", "b.output[0]"} <= {row.site for row in report.rows}
