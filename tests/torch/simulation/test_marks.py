"""Marks of sites on their way through the exporter, and layouts that it changes around layers."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import bitwright.torch
from bitwright.export.qdq.markers import ATTRIBUTE, DOMAIN, OP_TYPE
from bitwright.torch.simulation.exported_program import TRANSLATIONS
from bitwright.torch.simulation.simulate import mark


class Marked(nn.Module):
    """A value that is marked twice and returned beside what is computed of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = mark(x.permute(0, 2, 1), "one.output[0]")
        return y, mark(y * 2, "two.output[0]")


def test_a_mark_is_an_identity_that_the_exporter_writes_with_its_name() -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(mark(x, "a"), x)
    program = torch.onnx.export(
        Marked().eval(), (x,), dynamo=True, verbose=False, custom_translation_table=TRANSLATIONS
    )
    assert program is not None
    nodes = [node for node in program.model_proto.graph.node if node.domain == DOMAIN]
    assert [node.op_type for node in nodes] == [OP_TYPE, OP_TYPE]
    assert [[a.s.decode() for a in node.attribute if a.name == ATTRIBUTE] for node in nodes] == [
        ["one.output[0]"], ["two.output[0]"],
    ]  # fmt: skip


def test_a_mark_of_a_view_is_no_alias_of_it() -> None:
    x = torch.zeros(2, 3)
    made = mark(x.t(), "a")
    made += 1
    assert not x.any() and (made == 1).all()


def test_a_mark_keeps_type_device_and_gradient_free_shape_under_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made = mark(torch.empty(2, 5, dtype=torch.float16), "a")
    assert made.shape == (2, 5) and made.dtype == torch.float16


class Permuted(nn.Module):
    """A Linear along the channels of an image, as in ConvNeXt and Swin."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 6, 3), nn.Linear(6, 5, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.slow_variants("bias")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_a_linear_after_a_permutation_is_a_product_on_integers(tmp_path: Path, bias: bool) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    result = bitwright.torch.quantize(Permuted(bias).eval(), batches, recipe=["fold"], path=tmp_path, progress=False)
    report = result.sim.verify(batches[1])
    assert report.ok, str(report)
    kernels = {row.site: row.kernel for row in report.rows}
    assert kernels["linear.output[0]"] != "float", kernels
    model = onnx.load(tmp_path / "model.onnx")
    assert not [node for node in model.graph.node if node.domain == DOMAIN]
    named = {row.site for row in report.rows}
    assert {"conv.output[0]", "linear.output[0]"} <= named
