"""Mixtures of experts: products with a weight of their own per group of rows, however a model writes them, trained too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import ModelProto, TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bitwright.core.numerics.granularity import PerBlock
from bitwright.core.simulation.float_model import sqnr
from bitwright.methods.rounding.driver import find_layers
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx import QuantizationSimModel as OnnxSimulation
from bitwright.onnx import apply_gptq, apply_reconstruction
from bitwright.torch import QuantizationSimModel, TorchView, quantize
from bitwright.torch import apply_reconstruction as apply_reconstruction_torch
from bitwright.torch.program import TorchSimulation
from tests.support.sessions import integer_session
from tests.support.simulations import calibrated

EXPERTS, WIDTH, HIDDEN = 4, 8, 16


class Experts(nn.Module):
    """Top-2 routing, then two layers per expert; ``how`` the products are written."""

    def __init__(self, how: str, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.gate = nn.Linear(width, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, hidden, width))
        self.down = nn.Parameter(torch.randn(EXPERTS, width, hidden))
        with torch.no_grad():
            self.up *= torch.tensor([1.0, 8.0, 0.1, 2.0]).reshape(-1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = torch.topk(self.gate(x).softmax(-1), 2)
        token = torch.arange(x.size(0)).repeat_interleave(2)
        rows, expert = x[token], chosen.reshape(-1)
        made = getattr(self, self.how)(rows, expert) * share.reshape(-1, 1)
        return made.reshape(-1, 2, x.size(1)).sum(1)

    def grouped(self, rows: Tensor, expert: Tensor) -> Tensor:
        order = torch.sort(expert)[1]
        ends = torch.cumsum(F.one_hot(expert, EXPERTS).sum(0), 0).to(torch.int32)
        hidden = F.grouped_mm(rows[order], self.up.transpose(-2, -1), offs=ends).relu()
        out = F.grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)
        return out[torch.sort(order)[1]]

    def picked(self, rows: Tensor, expert: Tensor) -> Tensor:
        hidden = torch.bmm(self.up[expert], rows.unsqueeze(-1)).relu()
        return torch.bmm(self.down[expert], hidden).squeeze(-1)

    def looped(self, rows: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for e in torch.unique(expert):
            at = torch.where(expert == e)[0]
            out = out.index_copy(0, at, F.linear(F.linear(rows[at], self.up[e]).relu(), self.down[e]))
        return out


def batch(seed: int, rows: int = 24, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def correlated(seed: int) -> Tensor:
    """Rows of 32 features that depend on one another, as those of real data do."""
    mix = torch.randn(32, 32, generator=torch.Generator().manual_seed(9))
    return batch(seed, 96, 32) @ mix / 5


@pytest.mark.parametrize("how", ["grouped", "picked", "looped"])
def test_every_expert_has_scales_of_its_own(how: str) -> None:
    model = Experts(how).eval()
    sim = calibrated(QuantizationSimModel(model, batch(0), preset="w8a16"), [batch(seed) for seed in range(3, 30)])
    weights = {id(s.quantizer): s for s in sim.quantizers.values() if s.role == "weight"}.values()
    shapes = sorted(s.encoding.scale.shape for s in weights if len(s.encoding.scale.shape) == 3)
    channels = sorted([(EXPERTS, 1, HIDDEN), (EXPERTS, 1, WIDTH)])
    assert shapes == (channels if how == "grouped" else sorted([(EXPERTS, HIDDEN, 1), (EXPERTS, WIDTH, 1)]))
    with torch.no_grad():
        for seed in (7, 8):  # other experts than in the example take other rows
            assert sqnr(model(batch(seed)).numpy(), sim.model(batch(seed)).numpy()) > 33
    assert not sim._simulator.unseen


def test_a_weight_picked_by_a_computed_index_is_quantized_whole() -> None:
    """What was picked on the example is not what is picked later, though it comes from a parameter alone."""

    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.tensor([[1.0, -1.0], [100.0, -50.0]]))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.table[(x[:, 0] > 0).long().max()].unsqueeze(-1)

    x = torch.tensor([[-1.0, 2.0]])
    sim = calibrated(QuantizationSimModel(Pick(), x, preset="w8a16"), [x, -x])
    with torch.no_grad():
        assert sqnr(Pick()(-x).numpy(), sim.model(-x).numpy()) > 35
    assert sim.quantizers["table"].encoding.scale.shape == (2,)


def test_grouped_products_are_exported_with_a_scale_per_expert_and_column(tmp_path: Path) -> None:
    sim = quantize(Experts("grouped").eval(), [batch(s) for s in range(3)], recipe=["fold"], progress=False).sim
    exported = sim.export(tmp_path, "experts")
    report = sim.verify(batch(4))  # rows of one expert stand in the same order in the file
    assert report.ok, str(report)
    session = integer_session(exported.qdq)
    with torch.no_grad():
        x, want = batch(0), sim.model(batch(0)).numpy()
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert sqnr(want, np.asarray(found)) > 40
    size = sum(p.stat().st_size for p in tmp_path.iterdir() if p.name.startswith("experts.onnx"))
    assert size < 40_000, "scales are not written once per element"


def test_a_grouped_product_is_recorded_quantized_and_trained() -> None:
    sim = calibrated(QuantizationSimModel(Experts("grouped"), batch(0)), [batch(0)])
    assert {op.type for op in sim.graph.ops} >= {"GroupedMatMul"}
    sim.model.train()
    sim.model(batch(1)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (sim.model.up, sim.model.down))


def blocked(how: str, preset: str = "w4g32") -> QuantizationSimModel:
    sim = QuantizationSimModel(Experts(how, 32, 64).eval(), correlated(0), preset=preset)
    sim.compute_encodings([correlated(seed) for seed in range(1, 5)], progress=False)
    return sim


@pytest.mark.parametrize("how", ["grouped", "picked", "looped"])
def test_every_expert_has_block_scales_of_its_own(how: str) -> None:
    sim = blocked(how)
    weights = {id(s.quantizer): s.encoding for s in sim.quantizers.values() if s.role == "weight"}.values()
    found = sorted(
        (e.granularity.axis, e.granularity.channel_axis, e.scale.shape) for e in weights if e.scale.ndim == 3
    )
    if how == "grouped":
        assert found == [(1, (0, 2), (EXPERTS, 1, 64)), (1, (0, 2), (EXPERTS, 2, 32))]
    else:  # blocks of what is summed over, whichever way the matrices are picked
        assert found == [(2, (0, 1), (EXPERTS, 32, 2)), (2, (0, 1), (EXPERTS, 64, 1))]


@pytest.mark.parametrize("preset", ["w4g32", "w4lpbq"])
def test_block_scales_of_experts_go_through_files(preset: str, tmp_path: Path) -> None:
    sim = blocked("grouped", preset)
    exported, x = sim.export(tmp_path, "experts"), correlated(7)
    assert sim.verify(x).ok
    read = OnnxSimulation(str(exported.qdq))
    wanted = {s.encoding.scale.shape for s in sim.quantizers.values() if s.encoding.scale.ndim == 3}
    assert wanted <= {s.encoding.scale.shape for s in read.quantizers.values() if s.role == "weight"}
    for version in ("1.0.0", "2.0.0"):
        path = tmp_path / f"{version}.encodings"
        sim.save_encodings(path, version=version)
        again = QuantizationSimModel(Experts("grouped", 32, 64).eval(), x, preset=preset)
        again.load_encodings(path)
        assert torch.equal(again.model(x), sim.model(x)), version


def test_experts_whose_width_the_blocks_do_not_divide_have_a_shorter_last_block() -> None:
    sim = QuantizationSimModel(Experts("grouped", 24, 40).eval(), batch(0, width=24), preset="w4g32")
    granularities = {s.spec.granularity for s in sim.quantizers.values() if s.op.startswith("grouped_mm")}
    assert granularities == {PerBlock(24, 1, (0, 2)), PerBlock(32, 1, (0, 2))}


@pytest.mark.parametrize("method", ["gptq", "seq_mse", "adaround", "brecq"])
def test_methods_of_rounding_treat_every_expert_with_its_own_rows(method: str) -> None:
    sim = blocked("grouped")
    model, held = Experts("grouped", 32, 64).eval(), [correlated(seed) for seed in range(40, 44)]

    def decibels() -> float:
        with torch.no_grad():
            made = [torch.cat([m(x) for x in held]).numpy() for m in (model, sim.model)]
        return sqnr(*made)

    nearest, data = decibels(), [correlated(seed) for seed in range(1, 13)]
    if method == "gptq":
        report = apply_gptq(sim, data, progress=False)
    else:
        options = {} if method == "seq_mse" else {"iterations": 100 if method == "adaround" else 300}
        report = apply_reconstruction(sim, data, method, progress=False, **options)
    assert {"grouped_mm", "grouped_mm_1"} <= {row.layer for row in report}, report
    assert decibels() > nearest + (3 if method == "gptq" else 0.3)


def test_an_expert_that_no_row_reaches_keeps_nearest_rounding() -> None:
    model = Experts("grouped", 32, 64).eval()
    with torch.no_grad():
        model.gate.bias[2] = -1e3
    before = model.up.detach().clone()
    sim = QuantizationSimModel(model, correlated(0), preset="w4g32")
    data = [correlated(seed) for seed in range(1, 5)]
    sim.compute_encodings(data, progress=False)
    site = sim.quantizers["grouped_mm.weight"]
    nearest = site.quantizer(before.transpose(1, 2)).transpose(1, 2)
    report = apply_gptq(sim, data, progress=False)
    assert {row.note for row in report} == {"1 of 4 matrices saw no input"}
    same = (sim.model.up == nearest).flatten(1).all(1)
    assert same.tolist() == [False, False, True, False]
    others = (sim.model.up - nearest).abs().flatten(1).amax(1)
    assert (others[[0, 1, 3]] > 0).all()


def test_a_weight_of_which_two_operators_read_parts_is_left() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Parameter(torch.randn(64, 32))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.both[:32]).relu(), self.both[32:])

    sim = calibrated(QuantizationSimModel(Halves(), correlated(0), preset="w4"), [correlated(1)])
    found, skipped = find_layers(TorchSimulation(sim))
    assert not found and all("its parameter both is also read by" in why for why in skipped.values())


def test_a_transposed_parameter_is_rounded_by_gptq() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(32, 48))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.table.t())

    model, data = Turned(), [correlated(seed) for seed in range(1, 9)]
    sim = calibrated(QuantizationSimModel(model, correlated(0), preset="w4"), data)
    x, wanted = correlated(20), model(correlated(20)).detach().numpy()
    before = sqnr(wanted, sim.model(x).detach().numpy())
    (row,) = apply_gptq(sim, data, progress=False)
    assert row.after < 0.6 * row.before
    assert sqnr(wanted, sim.model(x).detach().numpy()) > before + 2


class Biased(nn.Module):
    """Attention scores to which a bias per head and position is added, as BLOOM does; it depends on nothing but the length."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).reshape(-1, 1, 1)
        return torch.baddbmm(slopes * torch.arange(k.size(1)), q, k.transpose(1, 2)).softmax(-1)


class BiasedByAdd(nn.Module):
    """The same with a sum of its own, and slopes that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25, 0.125, 0.0625]).reshape(-1, 1, 1))

    def forward(self, q, k):
        return (q @ k.transpose(1, 2) + self.slopes * torch.arange(k.size(1))).relu()


def test_what_is_added_to_products_of_any_length_is_no_stack_of_matrices():
    torch.manual_seed(0)
    q, k = torch.randn(4, 3, 8), torch.randn(4, 12, 8)
    sim = calibrated(QuantizationSimModel(Biased(), (q, k)), [(q, k)])
    for length in (10, 11, 12):
        assert sqnr(Biased()(q, k[:, :length]).numpy(), sim.model(q, k[:, :length]).numpy()) > 25


@pytest.mark.parametrize("model", [Biased(), BiasedByAdd()], ids=["baddbmm", "add"])
def test_a_bias_per_position_is_no_weight_and_is_as_long_as_the_data_it_was_calibrated_on(model):
    """The example is short, the data of the calibration is long: nothing saturates."""
    torch.manual_seed(0)
    q, k = torch.randn(4, 3, 8), torch.randn(4, 48, 8)
    sim = QuantizationSimModel(model, (q, k[:, :12]))
    assert not [s.name for s in sim.quantizers.values() if s.role in ("weight", "constant")]
    sim.compute_encodings([(q, k)], progress=False)
    for length in (6, 12, 48):
        wanted = model(q, k[:, :length]).detach().numpy()
        assert sqnr(wanted, sim.model(q, k[:, :length]).detach().numpy()) > 25


def test_an_addend_of_a_product_is_in_float_with_its_reason():
    sim = QuantizationSimModel(Biased(), (torch.randn(4, 3, 8), torch.randn(4, 12, 8)))
    assert "added to the product of baddbmm before anything is rounded" in str(sim.coverage())


TOKEN = 32


class Classifier(nn.Module):
    """Rows of a picture as tokens; every token goes to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = (nn.Linear(8, TOKEN), nn.Parameter(torch.randn(8, TOKEN) * 0.1))
        self.experts, self.head = (Experts("grouped", TOKEN, 64), nn.Linear(8 * TOKEN, 10))
        for weight in (self.experts.up, self.experts.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x) + self.position
        mixed = self.experts(tokens.reshape(-1, TOKEN)).reshape(tokens.shape)
        return self.head((tokens + mixed).flatten(1))


@pytest.fixture(scope="module")
def trained() -> tuple[Classifier, Tensor, Tensor, Tensor]:
    """The network, pictures to calibrate on, and others with their labels."""
    digits = load_digits()
    x, y = torch.from_numpy(digits.images.astype(np.float32) / 16), torch.from_numpy(digits.target)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(15):
        for at in torch.randperm(1000, generator=torch.Generator().manual_seed(epoch)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[at]), y[at]).backward()
            optimizer.step()
    return model.eval(), x[:256], x[1000:], y[1000:]


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return 100 * float((scores.argmax(1) == labels).float().mean())


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "bits"), [("w8a8", 8), ("w4a8", 4)])
def test_the_default_recipe_keeps_what_the_experts_have_learned(preset, bits, trained, tmp_path):
    model, data, x, labels = trained
    with torch.no_grad():
        in_float = accuracy(model(x), labels)
    assert in_float > 85
    result = quantize(model, list(data.split(64)), preset, progress=False)
    experts = [
        site
        for site in result.sim.quantizers.values()
        if site.name in ("experts.up", "experts.down") or "grouped" in site.op
    ]
    experts = [site for site in experts if site.role == "weight"]
    assert len(experts) == 2 and all(site.enabled and site.spec.format.bits == bits for site in experts)
    assert all(site.encoding.scale.size >= EXPERTS * TOKEN for site in experts)
    with torch.no_grad():
        simulated = result.model(x)
    assert accuracy(simulated, labels) > in_float - (0.5 if bits == 8 else 2)
    result.sim.export(tmp_path, "experts", x)
    session = integer_session(tmp_path / "experts.onnx")
    exported = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    assert accuracy(exported, labels) == pytest.approx(accuracy(simulated, labels), abs=0.2)
    assert result.sim.verify(x).ok


def product(x: tuple[int, ...], w: tuple[int, ...]) -> ModelProto:
    """``y = x @ w``; matrices of the stack differ in size by a factor of 100."""
    weight = np.random.default_rng(0).standard_normal(w).astype(np.float32)
    weight *= np.geomspace(0.1, 10, w[0]).reshape(-1, *[1] * (len(w) - 1)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], "stack",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def batches(shape: tuple[int, ...], count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    mix = rng.standard_normal((64, 64))
    return [{"x": (rng.standard_normal(shape) @ mix).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize("preset, blocks", [("w4g32", 2), ("w4", 1)])
def test_matrices_of_a_stack_do_not_share_scales(preset: str, blocks: int) -> None:
    sim = calibrated(OnnxSim(product((4, 16, 64), (4, 64, 24)), preset=preset), batches((4, 16, 64), 2))
    assert sim.quantizers["w"].encoding.scale.shape == (4, blocks, 24)


@pytest.mark.parametrize(
    "x, w",
    [((4, 16, 64), (4, 64, 24)), ((16, 64), (4, 64, 24)), ((2, 4, 16, 64), (4, 64, 24)), ((3, 1, 16, 64), (3, 4, 64, 8))],
    ids=["rows-of-each", "rows-for-all", "batch", "two-axes"],
)  # fmt: skip
def test_methods_of_rounding_treat_stacks(x: tuple[int, ...], w: tuple[int, ...]) -> None:
    data = batches(x, 8)
    for method, options in ((apply_gptq, {}), (apply_reconstruction, {"iterations": 50})):
        sim = calibrated(OnnxSim(product(x, w), preset="w4g32"), data)
        (row,) = method(sim, data, **options)
        assert row.after < 0.75 * row.before


@pytest.mark.parametrize("how", ["grouped", "picked"])
def test_a_router_is_in_float_unless_a_rule_asks_for_it(how: str) -> None:
    sim = QuantizationSimModel(Experts(how).eval(), batch(0), preset="w8a8")
    assert not [site for site in sim.quantizers if site.startswith("gate")]
    row = next(row for row in sim.coverage() if row.name.endswith("gate.weight"))
    assert row.status == "float" and "chooses experts" in row.how and "chooses others when it is rounded" in row.how
    rules = {"preset": "w8a8", "rules": [{"match": "gate", "weight": {"format": "int8"}}]}
    assert "gate.weight" in QuantizationSimModel(Experts(how).eval(), batch(0), config_file=rules).quantizers


def test_a_layer_as_wide_as_there_are_experts_that_chooses_nothing_is_quantized() -> None:
    class Wide(Experts):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.pad(self.side(x).relu(), (0, WIDTH - EXPERTS))

    model = Wide("grouped")
    model.side = nn.Linear(WIDTH, EXPERTS)
    sim = QuantizationSimModel(model.eval(), batch(0), preset="w8a8")
    assert "side.weight" in sim.quantizers and "gate.weight" not in sim.quantizers


@pytest.mark.parametrize("method", ["gptq", "gptaq"])
def test_experts_that_no_token_reaches_keep_nearest_rounding_and_are_counted(method: str) -> None:
    model = Experts("grouped", 32, 64).eval()
    with torch.no_grad():
        model.gate.bias[:2] = 50.0  # the first two take every token
    sim = calibrated(QuantizationSimModel(model, correlated(0), preset="w4g32"))
    nearest = {s.name: s.quantizer(sim._interceptor.named_tensor(p).detach()) for s in sim.quantizers.values()
               if s.role == "weight" and (p := sim.graph.values[s.value].param)}  # fmt: skip
    report = apply_reconstruction_torch(sim, [correlated(seed) for seed in range(3)], method, progress=False)
    notes = [row.note for row in report if "matrices saw no input" in row.note]
    assert len(notes) == 2 and all("2 of 4 matrices saw no input" in note for note in notes), str(report)
    for name, rounded in nearest.items():
        now = sim._interceptor.named_tensor(sim.graph.values[sim.quantizers[name].value].param).detach()
        assert torch.allclose(now[2:], rounded[2:]) and not torch.allclose(now[:2], rounded[:2])


_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
# name -> classes of transformers, and the sizes of the mixture
MIXTURES = {
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "olmoe": ("Olmoe", {"num_experts": 8}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "head_dim": 8}),
}


def language_model(name: str) -> nn.Module:
    import transformers

    cls, sizes = MIXTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{cls}Config")(**_SIZES, **sizes, num_experts_per_tok=2)
    model: nn.Module = getattr(transformers, f"{cls}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights are so small that the experts would add nothing
            parameter.mul_(3.0).add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def text(seed: int, tokens: int = 32) -> dict[str, Any]:
    found = torch.randint(2, 64, (4, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": found, "use_cache": False}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_language_models_are_rounded_with_statistics_of_their_own(name: str) -> None:
    model = language_model(name)
    sim = calibrated(QuantizationSimModel(model, text(0), preset="w4g32"))

    def decibels() -> float:
        with torch.no_grad():
            return float(np.mean([sqnr(model(**x).logits.numpy(), sim.model(**x).logits.numpy()) for x in held]))

    held, nearest = [text(seed) for seed in range(20, 24)], 0.0
    nearest = decibels()
    report = apply_gptq(sim, [text(seed) for seed in range(1, 9)], progress=False)
    experts = [row for row in report if "experts.grouped_mm" in row.layer]
    assert len(experts) == 2 and all(row.after < 0.7 * row.before for row in experts), report
    assert decibels() > nearest + 0.5
    routers = [row for row in sim.coverage() if row.name.endswith(("mlp.gate.weight", "mlp.router.weight"))]
    assert [row.status for row in routers] == ["float"] and "chooses experts" in routers[0].how
    biases = [row for row in sim.coverage() if row.name.endswith("proj_bias")]
    assert len(biases) == (2 if name == "gpt_oss" else 0) and all(row.status == "float" for row in biases)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_language_models_that_no_token_reaches_are_counted(name: str) -> None:
    sim = calibrated(QuantizationSimModel(language_model(name), text(0), preset="w4g32"))
    few = text(1, 1)
    report = apply_gptq(sim, [{**few, "input_ids": few["input_ids"][:1]}], progress=False)  # one token, two experts
    notes = {row.note for row in report if "experts.grouped_mm" in row.layer}
    assert notes == {"6 of 8 matrices saw no input"}


@pytest.mark.parametrize("other", [False, True], ids=["same", "other"])
def test_a_place_that_reads_one_matrix_in_every_run_has_one_weight_and_one_that_reads_parts_has_several(
    other: bool,
) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            first = 8 if other and x.shape[0] > 3 else 0
            return x @ self.table[first : first + 8].t()

    graph = TorchView(Part(), [torch.randn(3, 8), torch.randn(5, 8)]).graph()
    (op,) = [op for op in graph.ops if op.type in ("MatMul", "Gemm")]
    assert len({op.inputs[1], *(value for port, value in op.also if port == 1)}) == 1 + other
