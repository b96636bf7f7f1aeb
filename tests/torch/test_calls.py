"""Calls of torch: the table of functions, operators of exported programs, decompositions, trees of tensors."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ModelError
from bitwright.torch import QuantizationSimModel
from bitwright.torch.calls.functions import FUNCTIONS
from bitwright.torch.calls.inputs import flatten_tensors, map_tensors, tensors_in
from bitwright.torch.simulation import exported_program as decompositions
from bitwright.torch.simulation import exported_program as translations
from bitwright.torch.simulation.exported_program import by_registry, knows_steps, to_onnx
from tests.support.simulations import calibrated
from tests.support.zoo import ZOO, Call


@pytest.mark.parametrize(
    "function, args, kwargs, ends",
    [
        (torch.clamp, (), {"max": 6.0}, (None, 6.0)),
        (torch.Tensor.clamp_, (), {"min": 0.0}, (0.0, None)),
        (torch.clip, (-2, 3), {}, (-2.0, 3.0)),
        (F.hardtanh, (), {}, (-1.0, 1.0)),
        (F.hardtanh, (), {"max_val": 4.0}, (-1.0, 4.0)),
        (F.relu6, (), {}, (0.0, 6.0)),
    ],
    ids=["above", "below", "both", "hardtanh", "hardtanh above", "relu6"],
)
def test_ends_of_a_clamp(function, args, kwargs, ends):
    row = FUNCTIONS[function]
    assert row.attrs is not None
    attrs = row.attrs(row.bind((torch.zeros(3), *args), kwargs))
    assert (attrs["min"], attrs["max"]) == ends


def test_a_clamp_with_one_end_has_no_other_in_the_graph() -> None:
    class Clamped(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp(min=0) * 2

    sim = QuantizationSimModel(Clamped(), torch.randn(2, 3))
    (op,) = [op for op in sim.graph.ops if op.type == "Clip"]
    assert (op.attrs["min"], op.attrs["max"]) == (0.0, None)


NEUTRAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times-one": lambda x: x * 1.0,
    "one-times": lambda x: 1 * x,
    "over-one": lambda x: x / 1,
    "plus-zero": lambda x: x + 0.0,
    "zero-plus": lambda x: 0 + x,
    "minus-zero": lambda x: x - 0,
    "power-of-one": lambda x: x**1,
    "in-place": lambda x: x.mul_(1.0),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "cast": lambda x: x.to(torch.float32),
}


class Wrapped(torch.nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.function(self.first(x)))


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_changes_nothing_has_no_grid_of_its_own(name: str) -> None:
    sim = QuantizationSimModel(Wrapped(NEUTRAL[name]).eval(), torch.randn(16, 8))
    assert [site.op for site in sim.quantizers.values() if site.role == "output"] == ["first", "second"]


def test_a_factor_of_one_that_the_exporter_removes(tmp_path: Path) -> None:
    """Two trained ranges would not be equal: the file would round twice what the simulation rounds after the product."""
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    sim = calibrated(QuantizationSimModel(Wrapped(NEUTRAL["times-one"]).eval(), x), [x])
    for site, factor in zip([s for s in sim.quantizers.values() if s.role == "output"], (0.8, 0.9), strict=False):
        site.encoding = replace(site.encoding, scale=site.encoding.scale * np.float32(factor))
    sim.export(tmp_path, "model", x)
    result = sim.verify(x)
    assert result.ok and [row.site for row in result.rows if "mul" in row.site] == []


@pytest.mark.parametrize(
    ("function", "op_type"),
    [
        (lambda x: x * 2.0, "Mul"),
        (lambda x: 1.0 / x, "Div"),
        (lambda x: 0.0 - x, "Sub"),
        (lambda x: 1.0**x, "Pow"),
        (lambda x: x * 0.0, "Mul"),
        (lambda x: torch.div(x, 1.0, rounding_mode="floor"), "Div"),
        (lambda x: x * torch.ones(8), "Mul"),
        (lambda x: (x > 0).long() * 1.0 + x, "Mul"),
    ],
)
def test_what_changes_something_is_an_operator(function: Callable[..., Any], op_type: str) -> None:
    sim = QuantizationSimModel(Wrapped(function).eval(), torch.randn(4, 8))
    assert op_type in {op.type for op in sim.graph.ops}


@pytest.mark.parametrize("factors", [(1.0, 3.0), (3.0, 1.0)])
def test_a_factor_that_is_one_in_some_runs_is_a_factor(factors: tuple[float, ...]) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            return torch.relu(self.layer(x) * factor)

    first, second = ((torch.randn(4, 8), f) for f in factors)
    sim = QuantizationSimModel(Scaled().eval(), first, examples=[second])
    assert "Mul" in {op.type for op in sim.graph.ops}


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
    for line in (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
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


@pytest.mark.parametrize("name", _CASES)
def test_the_model_is_that_of_the_exporter(name: str) -> None:
    case = ZOO[name]
    model, call = case.build(), case.example()
    assert exported(model, call, False, to_onnx) == exported(model, call, False, with_registry)


@pytest.mark.parametrize("name", ["layer-loop", "rnn-projected-lstm"])
def test_so_it_is_with_a_free_axis(name: str) -> None:
    case = ZOO[name]
    model, call = case.build(), case.example()
    assert exported(model, call, True, to_onnx) == exported(model, call, True, with_registry)


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


class Core(nn.Module):
    """A layer of each kind that the decompositions rewrite."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.BatchNorm2d(8)
        self.up, self.groups = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.GroupNorm(2, 8)
        self.layer_norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.line, self.head = nn.Conv1d(8, 8, 3, padding="same", dilation=2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.gelu(self.norm(self.conv(x))), 2)
        y = self.groups(self.up(y)).flatten(2).transpose(1, 2)
        y = self.layer_norm(y)
        y = y + self.attention(y, y, y)[0]
        y = self.line(y.transpose(1, 2)).mean(2)
        return F.log_softmax(self.head(y), -1)


def test_decomposed_programs_are_quantized_like_the_module() -> None:
    torch.manual_seed(0)
    model, x = Core().eval(), torch.randn(4, 3, 6, 6)
    program = torch.export.export(model, (x,)).run_decompositions()
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"aten.convolution.default", "aten.native_layer_norm.default", "aten.addmm.default"} <= targets
    sim = QuantizationSimModel(program.module(), x)
    types = {op.type for op in sim.graph.ops}
    assert not [t for t in types if "." in t], "no operator is unknown"
    weighted = [op.type for op in sim.graph.ops if op.type in ("Conv", "ConvTranspose", "Gemm", "MatMul")]
    assert sorted(weighted) == ["Conv", "Conv", "ConvTranspose", "Gemm", "Gemm", "MatMul", "MatMul", "MatMul"]
    sim.compute_encodings([x], progress=False)
    assert sum(site.role == "weight" for site in sim.quantizers.values()) == 6
    with torch.no_grad():
        assert sqnr(model(x).numpy(), sim.model(x).numpy()) > 25


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_and_the_remedy_works(layout: torch.layout) -> None:
    rows = [torch.randn(3, 8), torch.randn(5, 8)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    said = r"nested tensor.*Remedy: pad the rows, torch\.nested\.to_padded_tensor\(x, 0\.0\)"
    with pytest.raises(ModelError, match=said):
        QuantizationSimModel(model, nested)
    sim = QuantizationSimModel(model, torch.nested.to_padded_tensor(nested, 0.0))
    with pytest.raises(ModelError, match=said):
        sim.compute_encodings([nested], progress=False)
    sim.compute_encodings([torch.nested.to_padded_tensor(nested, 0.0)], progress=False)
    with pytest.raises(ModelError, match=said):
        sim.model(nested)


def test_a_nested_tensor_made_inside_is_refused_too() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            nested = torch.nested.nested_tensor([x[0, :2], x[1]], layout=torch.jagged)
            return torch.nested.to_padded_tensor(self.fc(nested), 0.0)

    with pytest.raises(ModelError, match=r"^forward: it is a nested tensor"):
        QuantizationSimModel(Inside(), torch.randn(2, 3, 8))


class Attention(nn.Module):
    def __init__(self, flex: bool) -> None:
        super().__init__()
        self.qkv, self.flex = nn.Linear(16, 16), flex

    def forward(self, x: Tensor) -> Tensor:
        q = self.qkv(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return flex_attention(q, q, q) if self.flex else F.scaled_dot_product_attention(q, q, q)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_refused_and_the_remedy_works() -> None:
    x = torch.randn(1, 16, 16)
    with pytest.raises(ModelError, match=r"calls flex_attention.*Remedy: use F\.scaled_dot_product_attention"):
        QuantizationSimModel(Attention(True), x)
    sim = calibrated(QuantizationSimModel(Attention(False), x), [x])
    assert any(op.type == "Softmax" for op in sim.graph.ops)


Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Held:
    image: Any
    scale: float = 1.0


A, B, C = (torch.full((2,), float(i)) for i in range(3))
PACKED = torch.nn.utils.rnn.pack_sequence([A, B[:1]])
CASES = {
    "tensor": A,
    "atom": 3,
    "nothing": None,
    "flat": (A, 1, "same", B),
    "nested": [(A, {"b": B, "n": None}), [C], ()],
    "named": Pair(A, Pair(B, 2.0)),
    "ordered": OrderedDict(x=A, y=(B,)),
    "dataclass": (Held(A), Held(Held(B))),
    "size": (A, torch.Size([2, 3]), torch.float16),
    "packed": (PACKED, C),
    "twice": (A, [A, A]),
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_without_paths_are_those_with_paths(case: str) -> None:
    found = tensors_in(CASES[case])
    assert [id(t) for t in found] == [id(t) for _, t in flatten_tensors(CASES[case])]


@pytest.mark.parametrize("case", CASES)
def test_mapping_visits_tensors_in_order_and_keeps_types(case: str) -> None:
    seen: list[torch.Tensor] = []
    copy = map_tensors(CASES[case], lambda t: seen.append(t) or t)
    outside = [t for t in tensors_in(CASES[case]) if not any(t is part for part in PACKED)]  # it stays whole
    assert sorted(map(id, seen)) == sorted(map(id, outside))
    # a size becomes a plain tuple: what stands in its place need not be numbers
    assert repr(copy).replace("torch.Size([2, 3])", "(2, 3)") == repr(CASES[case]).replace(
        "torch.Size([2, 3])", "(2, 3)"
    )


def test_paths_name_keys_fields_and_places() -> None:
    given = {"batch": Held((A, 1)), "rest": [B, Pair(2, C)]}
    assert [path for path, _ in flatten_tensors(given)] == ["batch.image.0", "rest.0", "rest.1.right"]


class OwnLength(tuple):  # type: ignore[type-arg]
    """As the irreducible representations of e3nn, which have a dimension and refuse to have a length."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_of_a_class_of_its_own_is_not_asked_for_its_length() -> None:
    held = OwnLength((A, 1))
    assert [path for path, _ in flatten_tensors({"kind": held})] == ["kind.0"]
    assert tensors_in(held)[0] is A
    assert map_tensors((held, B), lambda t: t)[0] is held
    model = torch.nn.Linear(4, 4)
    model.kind = OwnLength((1, -1))  # type: ignore[assignment]
    sim = calibrated(QuantizationSimModel(model, torch.randn(2, 4)), [torch.randn(2, 4)])
    assert sim.model(torch.randn(2, 4)).shape == (2, 4)


@dataclass
class Guarded:
    """As configurations of transformers with layers of unlike sizes, which refuse to say one size for all."""

    size: int
    weight: torch.Tensor
    later: int = field(init=False)

    def __getattribute__(self, name: str) -> Any:
        if name == "size":
            raise RuntimeError("it differs from layer to layer")
        return super().__getattribute__(name)


def test_fields_of_a_dataclass_are_read_where_they_are_stored() -> None:
    held = Guarded(3, A)
    assert [path for path, _ in flatten_tensors({"config": held})] == ["config.weight"]
    assert tensors_in(held)[0] is A
    model = torch.nn.Linear(4, 4)
    model.config = Guarded(3, torch.ones(1))  # type: ignore[assignment]
    sim = calibrated(QuantizationSimModel(model, torch.randn(2, 4)), [torch.randn(2, 4)])
    assert sim.model(torch.randn(2, 4)).shape == (2, 4)
