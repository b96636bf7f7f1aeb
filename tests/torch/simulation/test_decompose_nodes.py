"""Decomposition node by node gives the model that torch's retracing gives, and leaves alone what it has no rows for."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import export

from bitwright.torch.simulation import exported_program as programs
from bitwright.torch.simulation.decompose_nodes import decomposed_by_node
from bitwright.torch.simulation.exported_program import optimized


class Pictures(nn.Module):
    """Layers whose operators become others: norms, pools, steps in place, transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deconvolution = nn.ConvTranspose2d(8, 4, 2, 2, output_padding=1, dilation=2)
        self.classify = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu_(self.norm(self.first(x)))
        y = F.relu6(x + 1.0)
        y.add_(x).mul_(0.5)
        pooled = F.dropout(F.adaptive_avg_pool2d(y, 1), 0.5, self.training).flatten(1)
        return self.classify(pooled), self.deconvolution(y)


class Rows(nn.Module):
    """Attention, whose halves are split, transposed and put together again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.halves, self.norm = nn.Embedding(9, 8), nn.Linear(8, 16), nn.LayerNorm(8)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        one, other = self.halves(self.embed(ids)).chunk(2, -1)
        one, other = (t.reshape(2, 5, 2, 4).transpose(1, 2) for t in (one, other))
        weights = (one @ other.transpose(-1, -2) / 2.0).masked_fill(~keep[:, None, None, :], -1e9).softmax(-1)
        return F.gelu(self.norm((weights @ other).transpose(1, 2).contiguous().reshape(2, 5, 8)))


def described(model: ir.Model) -> list[Any]:
    """Everything of a model but where its operators came from."""
    nodes = [
        (n.domain, n.op_type, [v and v.name for v in n.inputs], [(v.name, str(v.shape), str(v.type)) for v in n.outputs],
         sorted((name, str(a.value)) for name, a in n.attributes.items()))
        for n in model.graph.all_nodes()
    ]  # fmt: skip
    constants = [(name, v.const_value and v.const_value.tobytes()) for name, v in model.graph.initializers.items()]
    return [nodes, sorted(constants), [v.name for v in (*model.graph.inputs, *model.graph.outputs)]]


def registry() -> Any:
    return programs._registry(len(torch._C._dispatch_get_all_op_names()))


def tables() -> Any:
    return programs._tables(registry(), len(torch._decomp.decomposition_table))


def as_onnx(program: Any) -> ir.Model:
    from torch.onnx._internal.exporter import _core

    return optimized(_core._exported_program_to_onnx_program(program, registry=registry()).model)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Pictures(), (torch.randn(2, 3, 8, 8),)),
        (Rows(), (torch.arange(10).reshape(2, 5) % 9, torch.ones(2, 5, dtype=torch.bool))),
        (nn.Sequential(nn.Linear(8, 4), nn.ReLU()), (torch.randn(2, 8),)),  # its input is named as a function of Python
    ],
    ids=["pictures", "rows", "sequential"],
)
def test_the_model_is_that_of_the_retraced_program(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    model.eval()
    program, other = (programs.translatable(export(model, inputs), programs.line_of) for _ in range(2))
    assert decomposed_by_node(program, tables().is_translated)
    assert described(as_onnx(program)) == described(as_onnx(programs.retraced(other, tables())))


class Half(nn.Module):
    """Writes into a part of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        y[:, 0].mul_(2)
        return y


class Whole(nn.Module):
    """Writes into a tensor of which a part is read."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        part = y[:, 0]
        y.mul_(2)
        return part


class Given(nn.Module):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) + 1


class Mixed(nn.Module):
    """Adds integers to floats."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.argmax(0)


class Counted(nn.Module):
    """Writes into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1.0)
        return x + self.seen


@pytest.mark.parametrize(
    "model", [Half(), Whole(), Given(), Mixed(), Counted(), nn.AdaptiveAvgPool2d(2), nn.BatchNorm2d(3).train()]
)
def test_what_has_no_row_is_left_as_it_was(model: nn.Module) -> None:
    program = export(model, (torch.randn(2, 3, 4, 4),))
    before = str(program.graph)
    assert not decomposed_by_node(program, tables().is_translated)
    assert str(program.graph) == before


def test_free_axes_are_left_to_torch() -> None:
    program = export(nn.ReLU(), (torch.randn(2, 3),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert not decomposed_by_node(program, tables().is_translated)
