"""The model is the same with the lists of decompositions kept, and without the kernels that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from bitwright.torch.simulation import exported_program as decompositions
from bitwright.torch.simulation import exported_program as translations
from bitwright.torch.simulation.exported_program import by_registry, knows_steps, to_onnx
from tests.support.zoo import ZOO, Call


class Written(nn.Module):
    """Values written into a tensor, by index and in place, a dead value, and a sum of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        torch.tanh(y)
        counts = torch.arange(4)
        z = y.clone()
        z[:, torch.tensor([0, 2])] = 1.0
        z.mul_(2).relu_()
        return (z + counts).reshape(-1), y.half().softmax(-1)


PINNED = dict(
    line.split("==")
    for line in (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    if line.startswith("torch==")
)["torch"]
#: in place, composite, recurrent, half precision, attention, sizes that depend on data, random in training
_CASES = ("vit-half", "rnn-projected-lstm", "in-place", "boolean-index", "data-movement", "dropout")


def exported(model: nn.Module, call: Call, free: bool, to_model: Callable[[Any], ir.Model]) -> bytes:
    """The whole model, to the exporter's notes; of a new program, as torch decomposes one with sizes that depend on data once."""
    shapes: Any = None
    if free:
        shapes = tuple({0: torch.export.Dim.AUTO} if isinstance(a, Tensor) else None for a in call.args)
    with torch.no_grad():
        program = torch.export.export(model, call.args, call.kwargs, dynamic_shapes=shapes, strict=False)
        return ir.to_proto(to_model(program)).SerializeToString()


def with_registry(program: Any) -> ir.Model:
    return by_registry(program, translations._registry(len(torch._C._dispatch_get_all_op_names())))


@pytest.mark.quick_variants("dropout")
@pytest.mark.parametrize("name", _CASES)
def test_the_model_is_that_of_the_exporter(name: str) -> None:
    case = ZOO[name]
    model, call = case.build(), case.example()
    assert exported(model, call, False, to_onnx) == exported(model, call, False, with_registry)


@pytest.mark.slow_variants("rnn-projected-lstm")
@pytest.mark.parametrize("name", ["layer-loop", "rnn-projected-lstm"])
def test_so_it_is_with_a_free_axis(name: str) -> None:
    case = ZOO[name]
    model, call = case.build(), case.example()
    assert exported(model, call, True, to_onnx) == exported(model, call, True, with_registry)


@pytest.mark.slow_variants("free")
@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
def test_so_it_is_of_tensors_that_are_written_into(free: bool) -> None:
    torch.manual_seed(0)
    model, call = Written().eval(), Call((torch.randn(3, 4),), {})
    assert exported(model, call, free, to_onnx) == exported(model, call, free, with_registry)


def test_the_program_stays_as_it_is() -> None:
    program = torch.export.export(Written().eval(), (torch.randn(3, 4),), strict=False)
    before = str(program)
    first = ir.to_proto(to_onnx(program)).SerializeToString()
    assert str(program) == before
    assert ir.to_proto(to_onnx(program)).SerializeToString() == first


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != PINNED, reason=f"another torch than the {PINNED} of constraints.txt"
)
def test_this_version_of_torch_has_the_known_steps() -> None:
    """Otherwise exports are right and take two to three times as long: what the exporter consists of has changed."""
    assert knows_steps()


@pytest.mark.skipif(not knows_steps(), reason="torch's exporter does all of it")
def test_kernels_that_change_nothing_are_left_alone() -> None:
    registry = translations._registry(len(torch._C._dispatch_get_all_op_names()))
    tables = decompositions._tables(registry, len(torch._decomp.decomposition_table))
    assert 0 < len(tables.kernels) < 200
    assert torch.ops.aten.linear.default in tables.kernels  # kept whole: it has a translation
    assert torch.ops.aten.reshape_as.default not in tables.kernels


@pytest.mark.parametrize("table", ["_CALLED", "_REPLACED"])
def test_other_steps_are_left_to_the_exporter(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, set[str]] = getattr(decompositions, table)
    place = next(iter(known))
    monkeypatch.setitem(known, place, known[place] | {"of_the_future"})
    knows_steps.cache_clear()
    called: list[object] = []
    monkeypatch.setattr(translations, "by_registry", lambda program, registry: called.append(program))
    try:
        assert not knows_steps()
        program = torch.export.export(nn.Linear(2, 2).eval(), (torch.randn(1, 2),), strict=False)
        to_onnx(program)
        assert called == [program]
    finally:
        knows_steps.cache_clear()


def test_a_name_that_is_gone_is_another_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(decompositions._CALLED, "torch.export.of_the_past:gone", set())
    knows_steps.cache_clear()
    try:
        assert not knows_steps()
    finally:
        knows_steps.cache_clear()
