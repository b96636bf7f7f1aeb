"""Models that other people wrote, deep ones, parts called outside of forward, and every model of the zoo."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import CalibrationError, ExportError, ModelError
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from bitwright.torch.calls.inputs import Inputs, flatten_tensors
from bitwright.torch.interception.record import record
from tests.support.cost import calls_left
from tests.support.sessions import integer_session
from tests.support.zoo import ZOO, Case, MobileNetV2, chain, chain_input


class Two(nn.Module):
    """Two linear layers, and whatever a subclass does with them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 8)


def calibrated(model: nn.Module, x: Tensor, **options: Any) -> QuantizationSimModel:
    sim = QuantizationSimModel(model.eval(), x, **options)
    sim.compute_encodings([x], progress=False)
    return sim


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class DeadRows(Two):
    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :1] > x[:1, 0]  # the first row may attend to nothing
        q = self.l(x)[None]
        return self.m(F.scaled_dot_product_attention(q, q, q, attn_mask=mask.expand(4, 4)))


def test_a_query_that_may_attend_to_nothing_gets_zeros_as_in_torch() -> None:
    model = DeadRows().eval()
    sim = calibrated(model, X, default_output_bw=16, default_param_bw=16)
    with torch.no_grad():
        want = model(X)
        assert sqnr(want.numpy(), sim.model(X).numpy()) > 45
        with sim.in_float():
            torch.testing.assert_close(sim.model(X), want)
    sim.model(X).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in sim.model.parameters())


class OutArguments(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            joined, product = torch.empty(4, 16), torch.empty(4, 8)
            torch.cat([self.l(x), self.m(x)], 1, out=joined)
            torch.mul(x, 3.0, out=product)
        return joined[:, :8] + product


def test_results_written_to_out_are_quantized_under_that_name_too() -> None:
    sim = calibrated(OutArguments(), X)
    with torch.no_grad():
        for name in ("cat.output[0]", "mul.output[0]"):
            if name in sim.quantizers:
                scale = float(sim.quantizers[name].encoding.scale)
                codes = sim.capture([name], X)[name][0] / scale
                torch.testing.assert_close(codes, codes.round())
    assert sim.verify(X).ok


class Windows(Two):
    """The same norm and the same view three times, once with a roll between them, as in a shifted-window transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.k = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for shift, layer in ((0, self.l), (1, self.m), (0, self.k)):
            normed = self.norm(x)
            x = x + layer((torch.roll(normed, shift, 0) if shift else normed).view(2, 2, 8)).view(4, 8)
        return x


def test_a_movement_with_a_quantizer_of_its_own_is_calibrated_and_saved(tmp_path: Path) -> None:
    sim = calibrated(Windows(), X)
    site = sim.quantizers["view.output[0]"]  # one grid for what comes from the norm and from the roll
    assert site.encoding is not None
    with torch.no_grad():
        codes = sim.capture(["view.output[0]"], X)["view.output[0]"][0] / float(site.encoding.scale)
        torch.testing.assert_close(codes, codes.round())
        sim.save_encodings(tmp_path / "e.json")
        fresh = QuantizationSimModel(Windows().eval(), X)
        fresh.load_encodings(tmp_path / "e.json")
        assert torch.equal(fresh.model(X), sim.model(X))
    assert sim.verify(X).ok


def test_torchscript_parts_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.ReLU())))  # noqa: TID251
    for run in (lambda: QuantizationSimModel(model, X), lambda: fold_all_batch_norms(model, dummy_input=X)):
        with pytest.raises(ModelError, match="1: it is a TorchScript module") as caught:
            run()
        assert "eager module" in caught.value.remedy
    assert model(X).shape == (4, 8)


def test_parameters_without_values_are_refused_with_a_remedy_that_works() -> None:
    trained = Two().eval()
    model = nn.Sequential(nn.Linear(8, 8), copy.deepcopy(trained.l).to("meta"))
    for run in (lambda: QuantizationSimModel(model, X), lambda: fold_all_batch_norms(model, dummy_input=X)):
        with pytest.raises(ModelError, match="1: its parameters are on the meta device") as caught:
            run()
        assert "assign=True" in caught.value.remedy
    model[1].load_state_dict(trained.l.state_dict(), assign=True)
    assert calibrated(model, X).model(X).shape == (4, 8)


def test_a_layer_that_another_tool_quantized_is_not_in_the_way() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    model[2] = torch.ao.nn.quantized.dynamic.Linear.from_float(with_dynamic_qconfig(model[2]))  # without a derivative
    result = bitwright.quantize(model, [X] * 6, progress=False)
    assert result.sim.quantizers["0.weight"].encoding is not None
    assert "weights 1 of 1" in str(result)


def with_dynamic_qconfig(layer: nn.Linear) -> nn.Linear:
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return layer


class Mapped(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.m(torch.vmap(lambda row: torch.tanh(row @ self.l.weight))(x))


def test_layers_inside_vmap_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="matmul: it is called inside a torch.func transform") as caught:
        QuantizationSimModel(Mapped(), X)
    assert "whole batch" in caught.value.remedy
    fold_all_batch_norms(Mapped(), dummy_input=X)  # which only looks at batch norms


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Opaque(Two):
    def forward(self, x: Tensor) -> Holder:
        return Holder(self.m(self.l(x).relu()))


def test_a_result_in_which_no_tensor_is_found_is_simulated_but_not_exported(tmp_path: Path) -> None:
    sim = calibrated(Opaque(), X)
    assert sim.model(X).tensor.shape == (4, 8)
    with pytest.raises(ExportError, match="Opaque: it returns no tensor that can be found") as caught:
        sim.export(tmp_path, "m", X)
    assert "dataclasses" in caught.value.remedy


class Yielding(Two):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield self.l(x)


def test_a_generator_is_named_as_the_reason_that_nothing_ran() -> None:
    with pytest.raises(ModelError, match="its forward made no torch call") as caught:
        QuantizationSimModel(Yielding(), X)
    assert "yield" in caught.value.remedy


class Autocast(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.m(self.l(x).relu()).float()


def test_layers_that_autocast_puts_in_bfloat16_are_exported_as_they_are() -> None:
    sim = calibrated(Autocast(), X)
    assert torch.isfinite(sim.model(X)).all()
    assert (report := sim.verify(X)).ok, report.to_text()


class HalfInside(nn.Module):
    """A part in bfloat16 that takes the type of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Linear(8, 5)
        self.body = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU()).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.stem(x).relu().to(self.body[0].weight.dtype))
        return self.head(y.to(self.head.weight.dtype).mean((2, 3)))


def test_parts_in_bfloat16_are_exported_as_they_are_and_converted() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    sim = calibrated(HalfInside(), x)
    assert (report := sim.verify(x)).ok, report.to_text()
    encodings = {name: site.encoding for name, site in sim.quantizers.items()}
    sim.model.float()
    assert sim.verify(x).ok
    assert encodings == {name: site.encoding for name, site in sim.quantizers.items()}


def test_parts_in_float16_are_exported_as_they_are() -> None:
    """Where a value is rounded to float16 before its grid, a kernel may be one code off; nothing else may differ."""
    torch.manual_seed(0)
    model, x = HalfInside().to(torch.float32), torch.randn(8, 3, 12, 12)
    model.body.half()
    sim = calibrated(model, x)
    assert (report := sim.verify(x)).ok and not report.unchecked, report.to_text()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def keys(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.k(memory), self.v(memory)

    def forward(self, x: Tensor, memory: Tensor, cached: tuple[Tensor, Tensor] | None = None) -> Tensor:
        q = self.q(x)
        k, v = self.keys(memory) if cached is None else cached
        found: Tensor = self.out(F.scaled_dot_product_attention(q, k, v))
        return found


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.attention = Attention()
        self.act = nn.ReLU()
        self.head = nn.Linear(8, 4)

    def decode(self, x: Tensor, memory: Tensor, cached: tuple[Tensor, Tensor] | None = None) -> Tensor:
        found: Tensor = self.head(self.act(x + self.attention(x, memory, cached)))
        return found

    def forward(self, x: Tensor, source: Tensor, cached: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return self.decode(x, self.encoder(source), cached)

    def encode(self, source: Tensor) -> Tensor:
        return F.normalize(self.encoder(source), dim=-1)


ROWS, SOURCE = (torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (3, 5))


@pytest.fixture
def sim() -> QuantizationSimModel:
    torch.manual_seed(0)
    sim = QuantizationSimModel(EncoderDecoder().eval(), (ROWS, SOURCE))
    sim.compute_encodings([(ROWS, SOURCE)])
    return sim


@torch.no_grad()
def test_a_module_called_on_its_own_computes_what_it_does_within_the_forward(sim: QuantizationSimModel) -> None:
    inside = sim.capture(["encoder.2.output[0]", "attention.q.output[0]"], (ROWS, SOURCE))
    seen: list[Tensor] = []
    handle = sim.model.encoder.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    sim.model(ROWS, SOURCE)
    handle.remove()
    assert torch.equal(sim.model.encoder(SOURCE), seen[0])
    with sim.in_float():
        assert not torch.equal(sim.model.encoder(SOURCE), seen[0])
    assert torch.equal(sim.model.encoder.forward(SOURCE), seen[0]), inside.keys()
    assert not sim._simulator.unseen and not sim._interceptor.running


@torch.no_grad()
def test_a_method_is_simulated_and_what_is_not_is_said_once(sim, caplog):
    with caplog.at_level(logging.WARNING, "bitwright"):
        first = sim.model.encode(SOURCE)
        assert torch.equal(sim.model.encode(SOURCE), first)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1 and said[0].startswith("EncoderDecoder.encode calls encoder outside the model's forward")
    assert torch.equal(first, F.normalize(sim.model.encoder(SOURCE), dim=-1))
    assert "not recorded: EncoderDecoder.encode: a method that calls parts" in str(sim.coverage())
    with sim.active():  # the remedy
        sim.model.encode(SOURCE)


@torch.no_grad()
def test_an_attention_to_cached_keys_keeps_its_sites(sim: QuantizationSimModel) -> None:
    expected = sim.model(ROWS, SOURCE)
    with sim.active():
        cached = sim.model.attention.keys(sim.model.encoder(SOURCE))
    assert torch.equal(sim.model(ROWS, SOURCE, cached), expected)
    assert not sim._simulator.unseen


def test_parts_take_part_in_calibration_and_training(sim: QuantizationSimModel) -> None:
    sim.compute_encodings(lambda model: (model(ROWS, SOURCE), model.encoder(SOURCE * 3)))
    assert float(sim.quantizers["encoder.0.input[0]"].encoding.max) > 2 * float(SOURCE.max())
    sim.model.encoder(SOURCE).sum().backward()
    assert sim.model.encoder[0].weight.grad is not None
    with pytest.raises(CalibrationError, match="not finite"):
        sim.compute_encodings(lambda model: model.encoder(SOURCE * torch.inf), allow_unreached=True)


def test_a_part_is_refused_before_calibration_and_where_a_whole_forward_is_needed() -> None:
    sim = QuantizationSimModel(EncoderDecoder().eval(), (ROWS, SOURCE))
    with pytest.raises(CalibrationError, match="before calibration"):
        sim.model.encoder(SOURCE)
    recorder = record(EncoderDecoder().eval(), [(ROWS, SOURCE)])
    with (
        sim._interceptor.handled_by(recorder),
        pytest.raises(ModelError, match=r"encoder: this Sequential was called outside the forward.*sim\.active\(\)"),
    ):
        sim.model.encoder(SOURCE)


def test_ctrl_c_inside_a_part_leaves_nothing_open(sim: QuantizationSimModel) -> None:
    expected = sim.model.encoder(SOURCE)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    handle = sim.model.encoder[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sim.model.encoder(SOURCE)
    handle.remove()
    assert not sim._interceptor.running
    assert torch.equal(sim.model.encoder(SOURCE), expected)
    assert torch.equal(copy.deepcopy(sim).model.encoder(SOURCE), expected)


def check(blocks: dict[bool, int], calls: int) -> None:
    """Of chains without and with residual adds."""
    x = chain_input(0)
    small = chain(2)  # loads what is loaded at the first use, which takes more calls than the limit
    fold_all_batch_norms(small, dummy_input=x)
    QuantizationSimModel(small, x).compute_encodings([x])
    with calls_left(calls):
        for residual, count in blocks.items():
            model = chain(count, residual)
            report = fold_all_batch_norms(model, dummy_input=x)
            sim = QuantizationSimModel(model, x, in_place=True)
            sim.compute_encodings([x])
            assert len(report.pairs) == count and not report.refused
            assert len(sim.quantizers) >= 3 * count and len(sim.coverage()) >= 4 * count
            assert sim.model(x).isfinite().all()


def test_chains_of_more_blocks_than_calls_are_allowed() -> None:
    check({False: 400, True: 400}, 280)


def test_the_limit_is_one_that_a_recursion_over_blocks_would_meet() -> None:
    def walk(n: int) -> int:
        return 0 if n == 0 else 1 + walk(n - 1)

    with calls_left(280):
        assert walk(250) == 250
        with pytest.raises(RecursionError):
            walk(400)


@pytest.mark.slow
def test_ten_thousand_blocks() -> None:
    check({False: 2_000, True: 10_000}, 1000)


CASES = [pytest.param(case, id=name) for name, case in ZOO.items()]


def example(case: Case, seed: int = 0) -> Inputs:
    call = case.example(seed)
    return Inputs(call.args, call.kwargs)


def run(model: torch.nn.Module, case: Case, seed: int = 0) -> list[torch.Tensor]:
    return [t for _, t in flatten_tensors(case.run(model, seed)) if t.is_floating_point()]


def simulated(case: Case, **options: Any) -> QuantizationSimModel:
    sim = QuantizationSimModel(case.build(), example(case), **options)
    sim.compute_encodings([example(case, seed) for seed in range(3)], allow_unreached=True)
    return sim


@pytest.mark.parametrize("case", CASES)
def test_sixteen_bits_change_nothing_a_person_would_see(case: Case) -> None:
    sim = simulated(case, default_output_bw=16, default_param_bw=16)
    model = case.build()
    for old, new in zip(run(model, case), run(sim.model, case), strict=True):
        assert new.dtype == old.dtype and new.shape == old.shape
        low = old.dtype in (torch.float16, torch.bfloat16)
        assert sqnr(old.float().numpy(), new.float().numpy()) > (20 if low else 45)


@pytest.mark.parametrize("case", CASES)
def test_the_model_keeps_its_class_its_state_and_its_function_in_float(case: Case) -> None:
    model = case.build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    sim = QuantizationSimModel(model, example(case))
    assert type(sim.model) is type(model) and sim.model is not model
    assert list(sim.model.state_dict()) == list(before)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    with sim.in_float():
        for old, new in zip(run(model, case), run(sim.model, case), strict=True):
            # attention is computed as its documented parts: equal to rounding, everything else bit for bit
            low = old.dtype in (torch.float16, torch.bfloat16)
            torch.testing.assert_close(new, old, rtol=2e-2 if low else 1e-4, atol=5e-2 if low else 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_copies_and_repeats_are_bit_identical(case: Case) -> None:
    sim = simulated(case)
    first = run(sim.model, case)
    twin = copy.deepcopy(sim)
    again = simulated(case)
    for a, b, c, d in zip(first, run(sim.model, case), run(twin.model, case), run(again.model, case), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c) and torch.equal(a, d)
    assert list(twin.quantizers) == list(sim.quantizers)
    twin.quantizers["*"].enabled = False
    assert all(site.enabled or site.encoding is None for site in sim.quantizers.values())


@pytest.mark.parametrize("case", CASES)
def test_every_float_value_is_accounted_for(case: Case) -> None:
    sim = QuantizationSimModel(case.build(), example(case))
    rows = {row.name: row for row in sim.coverage()}
    floats = [v.name for v in sim.graph.values.values() if v.is_float]
    assert set(floats) <= set(rows)
    assert all(row.how for row in rows.values())
    sites = {site for site in sim.quantizers}
    assert {p.name for p in sim.plan.sites.values()} == sites


@pytest.mark.parametrize("case", [c for c in CASES if "half" not in c.id and "bfloat" not in c.id])
def test_gradients_reach_every_trained_parameter_the_float_model_trains(case: Case) -> None:
    sim = simulated(case)
    float_model = case.build()
    call = case.example(0)

    def trained(model: torch.nn.Module) -> set[str]:
        outputs = [
            t for _, t in flatten_tensors(model(*call.args, **call.kwargs)) if t.is_floating_point() and t.requires_grad
        ]
        sum(t.float().square().mean() for t in outputs).backward()  # type: ignore[union-attr]
        return {n for n, p in model.named_parameters() if p.grad is not None and torch.isfinite(p.grad).all()}

    try:
        expected = trained(float_model)
    except RuntimeError:
        pytest.fail("the float model itself cannot be trained; give the case a tag")
    call = case.example(0)
    assert trained(sim.model) == expected


def test_statistics_do_not_depend_on_batches_or_their_order() -> None:
    net = MobileNetV2(0.25, classes=10, stages=3).eval()
    batches = [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    for scheme in ("min_max", "tf_enhanced", "percentile", "entropy", "mse"):
        encodings = []
        for data in (batches, batches[::-1], [torch.cat(batches)]):
            sim = QuantizationSimModel(net, batches[0], quant_scheme=scheme)
            sim.compute_encodings(data)
            encodings.append({n: s.encoding for n, s in sim.quantizers.items() if s.role == "input"})
        assert encodings[0] == encodings[1] == encodings[2]
        assert all(np.isfinite(e.scale).all() for e in encodings[0].values())


class RelativePositions(nn.Module):
    """Keys of relative positions, of a table, once for each sample of the batch, as DeBERTa has them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.key, self.out = nn.Parameter(torch.randn(8, 16)), nn.Linear(16, 16), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        keys = self.key(self.table).view(8, 4, 4).transpose(0, 1).repeat(batch, 1, 1)
        queries = x.view(batch, -1, 4, 4).transpose(1, 2).reshape(batch * 4, -1, 4)
        return self.out(torch.bmm(queries, keys.transpose(1, 2))).view(batch, 4, -1, 3)


@pytest.mark.parametrize("first", [1, 2])
def test_what_is_repeated_for_each_sample_serves_any_batch(first: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = RelativePositions().eval(), torch.randn(first, 6, 16)
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings([x], progress=False)
    for batch in (1, 2, 3):
        given = torch.randn(batch, 6, 16)
        assert sim.model(given).shape == model(given).shape
    result = bitwright.quantize(model, [torch.randn(first, 6, 16) for _ in range(6)], recipe=["fold"], path=tmp_path)
    session = integer_session(result.exported.qdq)
    for batch in (1, 2, 3):
        given = torch.randn(batch, 6, 16)
        (found,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
        assert sqnr(result.sim.model(given).detach().numpy(), found) > 60
