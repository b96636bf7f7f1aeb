"""Recording: names a person recognises, the same place for the same code, loops and branches, no recursion."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.errors import ModelError
from bitwright.torch import QuantizationSimModel
from bitwright.torch.interception.record import record
from tests.support.processes import python
from tests.support.simulations import calibrated


def ops(model: nn.Module, *examples: object) -> dict[str, str]:
    return {op.name: op.type for op in record(model.eval(), examples).graph().ops}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
        self.conv2 = nn.Conv2d(4, 4, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv1(x))
        y = self.conv2(y)
        y += x
        return self.relu(y)


def test_names_follow_the_modules_and_the_functions() -> None:
    model = nn.Sequential(Block(), nn.Sequential(Block(), nn.Flatten(), nn.Linear(64, 2)))
    assert ops(model, torch.randn(1, 4, 4, 4)) == {
        "0.conv1.pad": "Pad", "0.conv1": "Conv", "0.relu": "Relu", "0.conv2": "Conv", "0.add": "Add", "0.relu_1": "Relu",
        "1.0.conv1.pad": "Pad", "1.0.conv1": "Conv", "1.0.relu": "Relu", "1.0.conv2": "Conv", "1.0.add": "Add",
        "1.0.relu_1": "Relu", "1.1": "Flatten", "1.2": "Gemm",
    }  # fmt: skip


def test_names_are_the_same_in_another_process() -> None:
    code = (
        "import torch; from tests.torch.interception.test_record import Block, ops; from torch import nn;"
        "print(list(ops(nn.Sequential(Block(), Block()), torch.ones(1, 4, 4, 4))))"
    )
    # other hashes than here, where they are random unless the same variable is set
    hashes = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    output = python("-c", code, env={"PYTHONHASHSEED": hashes, "PYTHONPATH": ":".join(sys.path)}).stdout
    here = list(ops(nn.Sequential(Block(), Block()), torch.ones(1, 4, 4, 4)))
    assert output == f"{here}\n" and "0.conv1" in here


class Residuals(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_a_loop_over_layers_has_one_place_per_layer() -> None:
    names = list(ops(Residuals(3), torch.randn(2, 4)))
    assert names == ["layers.0", "tanh", "add", "layers.1", "tanh_1", "add_1", "layers.2", "tanh_2", "add_2"]


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1], 4)
        for t in range(x.shape[0]):
            h = torch.tanh(self.ih(x[t]) + self.hh(h))
        return h


def test_a_loop_over_time_has_one_place_for_any_length() -> None:
    short, long = (record(Recurrence(), [torch.randn(n, 2, 3)]).graph() for n in (2, 9))
    compute = [op.name for op in long.ops if op.type != "Slice"]
    assert compute == [op.name for op in short.ops if op.type != "Slice"] == ["ih", "hh", "add", "tanh"]
    assert long.op("tanh").calls == 9
    # later steps read the state of the step before, and the graph knows
    assert (0, "tanh.output[0]") in long.op("hh").also
    assert {op.name for op, _ in long.consumers("tanh.output[0]")} == {"hh"} and long.is_output("tanh.output[0]")


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.a(x)) if x.sum() > 0 else torch.sigmoid(self.b(x))


def test_examples_extend_the_graph_to_both_sides_of_a_branch() -> None:
    x = torch.ones(1, 2)
    assert set(ops(Branch(), x)) == {"a", "relu", "sum", "gt"}
    assert set(ops(Branch(), x, -x)) == {"a", "relu", "b", "sigmoid", "sum", "gt"}


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.fc_weight = nn.Parameter(torch.randn(4, 4))
        self.position = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.conv2d(x, self.kernel)).mean((2, 3))
        return (y + self.position) @ self.fc_weight.t()


def test_raw_parameters_are_places() -> None:
    graph = record(Raw(), [torch.randn(1, 3, 5, 5)]).graph()
    assert [op.name for op in graph.ops] == ["conv2d", "relu", "mean", "add", "matmul"]
    assert graph.op("conv2d").inputs[1] == "kernel" and graph.values["kernel"].param == "kernel"
    right = graph.values[graph.op("matmul").inputs[1] or ""]
    assert right.kind == "constant" and right.shape == (4, 4)


def test_attention_is_taken_apart() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    kinds = ops(model, torch.randn(2, 5, 8))
    assert {n: t for n, t in kinds.items() if t in ("Gemm", "MatMul", "Softmax")} == {
        "self_attn.in_proj": "Gemm", "self_attn.attention.matmul": "MatMul", "self_attn.attention.softmax": "Softmax",
        "self_attn.attention.matmul_1": "MatMul", "self_attn.out_proj": "Gemm", "linear1": "Gemm", "linear2": "Gemm",
    }  # fmt: skip


def test_projections_by_parts_of_one_weight_are_named_by_role():
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)  # a module of this name tells nothing

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return self.attention(x, memory, memory)[0] + F.linear(x, 2 * self.attention.out_proj.weight)

    q, memory = torch.randn(3, 2, 8), torch.randn(4, 2, 8)
    names = [op.name for op in record(Cross().eval(), [(q, memory)]).graph().ops]
    assert [name for name in names if "_proj" in name or "linear" in name] == [
        "attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.out_proj", "linear",
    ]  # fmt: skip


@pytest.mark.parametrize("need_weights", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("same", [False, True], ids=["cross", "self"])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6, "vdim": 7}], ids=str
)
def test_decomposed_attention_equals_the_fused_call(need_weights: bool, same: bool, options: dict) -> None:
    if same and "kdim" in options:
        options = {}
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, **options).eval()
    q = torch.randn(5, 3, 8)
    k, v = (q, q) if same else (torch.randn(4, 3, options.get("kdim", 8)), torch.randn(4, 3, options.get("vdim", 8)))
    padding = torch.zeros(3, len(k), dtype=torch.bool)
    padding[0, -1] = True
    mask = torch.zeros(5, len(k)).masked_fill(torch.rand(5, len(k)) > 0.7, -2.0)
    kwargs = {"key_padding_mask": padding, "need_weights": need_weights, "attn_mask": mask}
    expected = model(q, k, v, **kwargs)

    class Keep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = model

        def forward(self, *args: Tensor) -> Tensor:
            self.result = self.attention(*args, **kwargs)
            return self.result[0]

    keep = Keep()
    record(keep, [(q, k, v)])
    torch.testing.assert_close(keep.result[0], expected[0], rtol=1e-5, atol=1e-5)
    if need_weights:
        torch.testing.assert_close(keep.result[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("gqa", [False, True], ids=["mha", "gqa"])
def test_decomposed_product_attention_equals_the_fused_call(causal: bool, gqa: bool) -> None:
    from bitwright.torch.calls.decompose import scaled_dot_product_attention

    q, k, v = (torch.randn(2, 4, 5, 8), torch.randn(2, 2 if gqa else 4, 5, 8), torch.randn(2, 2 if gqa else 4, 5, 8))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa), expected)


def test_the_model_is_left_as_it_was() -> None:
    model = Block().train()
    keys = list(model.state_dict())
    record(model, [torch.randn(1, 4, 4, 4)])
    assert model.training and list(model.state_dict()) == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_failing_example_names_the_module_and_keeps_the_cause() -> None:
    model = nn.Sequential(Block(), nn.Sequential(nn.Flatten(), nn.Linear(63, 2)))
    with pytest.raises(
        ModelError, match=r"Sequential, in 1\.1: the model fails .*\(1, 4, 4, 4\) float32.*Remedy"
    ) as info:
        record(model, [torch.randn(1, 4, 4, 4)])
    assert isinstance(info.value.__cause__, RuntimeError)


def test_a_model_without_forward_gets_the_remedy() -> None:
    class Codec(nn.Module):
        def encode(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ModelError, match=r"has no forward\(\).*wrap it in a module"):
        record(Codec(), [torch.randn(1)])


pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight).tanh()


def _act(x: Tensor) -> Tensor:
    return x * x.sigmoid()


fused = torch.jit.script(_plain)
unused = torch.jit.script(_plain)


def helper(x: Tensor, weight: Tensor) -> Tensor:
    return fused(x, weight)  # type: ignore[no-any-return]


class ScriptedBlock(nn.Module):
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
def test_scripted_functions_are_named_with_their_parameters(direct, last, caplog):
    with caplog.at_level(logging.WARNING, "bitwright"):
        sim = QuantizationSimModel(nn.Sequential(ScriptedBlock(direct, last)), X)
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
    sim = calibrated(QuantizationSimModel(Sums().eval(), batches[0]), batches[:2])
    sim.export(tmp_path, "model", batches[0])
    report = sim.verify(batches[2])
    assert report.ok and {"add.output[0]", "b.output[0]"} <= {row.site for row in report.rows}
