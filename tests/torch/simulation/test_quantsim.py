"""QuantizationSimModel: calibration, quantizers, errors, checkpoints, encodings."""

from __future__ import annotations

import copy
import json
import logging
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright import quantize
from bitwright.core.numerics import affine
from bitwright.core.numerics.formats import IntFormat, parse_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import QuantSpec, RangeMethod
from bitwright.errors import (
    CalibrationError,
    ConfigError,
    EncodingsError,
    ExportError,
    FormatError,
    GranularityError,
    ModelError,
)
from bitwright.torch.calls.inputs import Inputs
from bitwright.torch.simulation.quantsim import QuantizationSimModel
from tests.conformance.test_state import Branch
from tests.support.simulations import calibrated


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.relu(self.conv(x)).mean((2, 3)))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 6, 6, generator=generator) for _ in range(3)]


@pytest.fixture
def sim(model: Net, batches: list[Tensor]) -> QuantizationSimModel:
    return calibrated(QuantizationSimModel(model, batches[0]), batches)


# -- what it computes


def test_the_simulation_is_the_reference_arithmetic_at_every_site(sim, model, batches):
    q = {name: site.encoding for name, site in sim.quantizers.items()}

    def fq(x: Tensor, name: str) -> Tensor:
        return affine.fake_quantize(x, q[name])

    x = fq(batches[0], "conv.input[0]")
    y = F.conv2d(x, fq(model.conv.weight.detach(), "conv.weight"), fq(model.conv.bias.detach(), "conv.bias"), padding=1)
    y = fq(F.relu(y), "relu.output[0]").mean((2, 3))
    y = F.linear(
        fq(y, "mean.output[0]"), fq(model.fc.weight.detach(), "fc.weight"), fq(model.fc.bias.detach(), "fc.bias")
    )
    assert torch.equal(sim.model(batches[0]), fq(y, "fc.output[0]"))


def test_site_names_are_those_of_the_modules(sim: QuantizationSimModel) -> None:
    assert list(sim.quantizers) == [
        "conv.input[0]", "conv.weight", "conv.bias", "relu.output[0]", "mean.output[0]", "fc.weight", "fc.bias", "fc.output[0]",
    ]  # fmt: skip


def test_ranges_are_those_of_the_data(sim: QuantizationSimModel, batches: list[Tensor], model: Net) -> None:
    data = torch.cat(batches)
    encoding = sim.quantizers["conv.input[0]"].encoding
    assert encoding.format == IntFormat(8, signed=False)
    np.testing.assert_allclose(encoding.scale, (data.max() - data.min()).item() / 255, rtol=1e-6)
    weight = sim.quantizers["conv.weight"].encoding
    assert weight.granularity == PerChannel(0)
    bound = torch.maximum(model.conv.weight.amax((1, 2, 3)) / 127, -model.conv.weight.amin((1, 2, 3)) / 128)
    np.testing.assert_allclose(weight.scale, bound.detach().numpy(), rtol=1e-6)


def test_the_bias_has_the_scale_of_the_products(sim: QuantizationSimModel) -> None:
    q = sim.quantizers
    expected = q["conv.input[0]"].encoding.scale * q["conv.weight"].encoding.scale
    assert np.array_equal(q["conv.bias"].encoding.scale, expected) and q["conv.bias"].encoding.format == IntFormat(32)
    q["conv.weight"].spec = replace(q["conv.weight"].spec, format=IntFormat(4))


@pytest.mark.parametrize(
    "scheme",
    [
        "min_max",
        "tf",
        "tf_enhanced",
        "percentile",
        "entropy",
        "mse",
        RangeMethod.of("percentile", {"percentile": 99.9}),
    ],
    ids=str,
)
def test_every_scheme_calibrates(model: Net, batches: list[Tensor], scheme) -> None:  # type: ignore[no-untyped-def]
    sim = calibrated(QuantizationSimModel(model, batches[0], scheme), batches)
    assert torch.isfinite(sim.model(batches[0])).all()


@pytest.mark.parametrize(
    "preset", ["w8a8", "w4a8", "w8a16", "w4a16", "w8", "w4", "w8a8_per_tensor", "fp8", "fp16", "bf16"]
)
def test_presets(model: Net, batches: list[Tensor], preset: str) -> None:
    sim = calibrated(QuantizationSimModel(model, batches[0], preset=preset), batches)
    assert torch.isfinite(sim.model(batches[0])).all()
    if preset in ("w8", "w4"):
        assert {s.role for s in sim.quantizers.values()} == {"weight"}


def test_float_data_type(model: Net, batches: list[Tensor]) -> None:
    sim = QuantizationSimModel(model, batches[0], default_output_bw=16, default_param_bw=16, default_data_type="float")
    sim.compute_encodings(batches)
    torch.testing.assert_close(sim.model(batches[0]), model(batches[0]), rtol=1e-2, atol=1e-2)


def test_weights_changed_through_data_are_seen(sim: QuantizationSimModel, batches: list[Tensor]) -> None:
    with torch.no_grad():
        first = sim.model(batches[0])
        for change in (lambda w: w.data.mul_(0.5), lambda w: w.data.neg_(), lambda w: w.mul_(0.9)):
            change(sim.model.conv.weight)
            second = sim.model(batches[0])
            assert not torch.equal(first, second)
            first = second


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_elements_exchanged_through_data_are_seen(model, batches, layout):
    """The sum and almost every element stay what they were, and so do address and version."""
    sim = calibrated(QuantizationSimModel(model.to(memory_format=layout), batches[0]), batches)
    with torch.no_grad():
        before = sim.model(batches[0])
        weight = sim.model.conv.weight
        version, address = weight._version, weight.data_ptr()
        weight.data[:, :, 1, [0, 2]] = weight.data[:, :, 1, [2, 0]]
        assert (weight._version, weight.data_ptr()) == (version, address)
        expected = copy.deepcopy(sim).model(batches[0])  # a copy has quantized nothing yet
        assert torch.equal(sim.model(batches[0]), expected) and not torch.equal(before, expected)
        weight.data[3, 1, 0, 0], weight.data[5, 2, 2, 2] = (weight[5, 2, 2, 2].clone(), weight[3, 1, 0, 0].clone())
        assert torch.equal(sim.model(batches[0]), copy.deepcopy(sim).model(batches[0]))


def test_a_training_step_gives_back_what_an_evaluation_kept_of_the_weights(sim, batches):
    """A copy of every weight and its values on the grid: as much again as model and gradients."""
    weight, quantizer = sim.model.conv.weight, sim.quantizers["conv.weight"].quantizer
    with torch.no_grad():
        kept = weakref.ref(quantizer.constant(weight))
        assert kept() is quantizer.constant(weight)
    sim.model(batches[0]).sum().backward()
    assert kept() is None


def test_a_weight_that_is_a_view_with_gaps_is_followed(batches: list[Tensor]) -> None:
    class Gaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 12)[:, ::2], requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    x = batches[0].reshape(-1, 6)
    sim = calibrated(QuantizationSimModel(Gaps(), x), [x])
    sim.model(x)
    sim.model.weight.data = torch.randn(8, 12)[:, ::2] * sim.model.weight.abs().mean()
    sim.model(x)
    sim.model.weight.data[[0, 1]] = sim.model.weight.data[[1, 0]]
    assert torch.equal(sim.model(x), copy.deepcopy(sim).model(x))


def test_calibration_accepts_callbacks_tuples_and_dicts(model: Net, batches: list[Tensor]) -> None:
    encodings = []
    for data, args in (
        (batches, None),
        ([(b,) for b in batches], None),
        ([{"x": b} for b in batches], None),
        ([Inputs((b,)) for b in batches], None),
        (lambda m: [m(b) for b in batches], None),
        (lambda m, data: [m(b) for b in data], batches),
        ((b for b in batches), None),
    ):
        sim = calibrated(QuantizationSimModel(model, batches[0]), data, args)
        encodings.append({n: s.encoding for n, s in sim.quantizers.items()})
    assert all(e == encodings[0] for e in encodings)


def test_training_flags_and_gradients_come_back(model: Net, batches: list[Tensor]) -> None:
    sim = QuantizationSimModel(model, batches[0])
    sim.model.train()
    sim.model.relu.eval()
    sim.compute_encodings(batches)
    assert sim.model.training and sim.model.conv.training and not sim.model.relu.training
    sim.model(batches[0]).sum().backward()
    assert sim.model.conv.weight.grad is not None


def test_training_lowers_the_loss_of_the_quantized_model(model: Net, batches: list[Tensor]) -> None:
    sim = calibrated(QuantizationSimModel(model, batches[0], default_param_bw=4, default_output_bw=4), batches)
    target = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.Adam(sim.model.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        loss = F.mse_loss(sim.model(batches[0]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_after_calibration(sim: QuantizationSimModel, batches: list[Tensor], dtype: torch.dtype) -> None:
    expected = sim.model(batches[0])
    sim.model.to(dtype)
    got = sim.model(batches[0].to(dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, rtol=0.1, atol=0.1)


# -- quantizers as a mapping


def test_quantizers_can_be_read_changed_and_switched_off(sim, model, batches):
    site = sim.quantizers["fc.weight"]
    site.spec = QuantSpec(IntFormat(4), PerBlock(4))
    assert site.spec.granularity == PerBlock(4, 1, 0) and site.encoding.scale.shape == (4, 2)
    sim.compute_encodings(batches)
    assert site.encoding.scale.shape == (4, 2)
    sim.quantizers["*"].enabled = False
    assert torch.equal(sim.model(batches[0]), model(batches[0]))
    sim.quantizers["conv.*"].enabled = True
    assert not torch.equal(sim.model(batches[0]), model(batches[0]))
    assert "disabled" in str(sim.coverage().find("fc.weight"))


def test_an_encoding_of_your_own(sim: QuantizationSimModel, batches: list[Tensor]) -> None:
    site = sim.quantizers["relu.output[0]"]
    site.encoding = affine.encode(0.0, 1.0, site.spec)
    captured = sim.capture(["relu.output[0]"], batches[0])["relu.output[0]"][0]
    assert captured.max() <= 1.0 and captured.min() == 0.0
    site.frozen = True
    sim.compute_encodings(batches)
    assert float(site.encoding.max) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match=r"conv\.weight: the encoding has scales of shape \(3,\).*has \(8,\)"):
        sim.quantizers["conv.weight"].encoding = replace_granularity(site.encoding)
    with pytest.raises(ConfigError, match="encoding must be an Encoding"):
        site.encoding = 0.5  # type: ignore[assignment]


def replace_granularity(encoding):  # type: ignore[no-untyped-def]
    from bitwright.core.numerics.encoding import Encoding

    return Encoding(encoding.format, np.ones(3, np.float32), np.zeros(3), PerChannel(0))


def test_unknown_site_gets_close_matches(sim: QuantizationSimModel) -> None:
    with pytest.raises(KeyError, match=r"no quantizer site 'conv.wieght'.*did you mean 'conv.weight'"):
        sim.quantizers["conv.wieght"]
    with pytest.raises(ConfigError, match="spec must be a QuantSpec"):
        sim.quantizers["conv.weight"].spec = 8  # type: ignore[assignment]


def test_an_axis_that_a_weight_lacks_names_site_and_remedy(sim: QuantizationSimModel) -> None:
    with pytest.raises(
        GranularityError, match=r"fc\.weight: axis 4 does not exist.*Remedy: name an axis the tensor has"
    ):
        sim.quantizers["fc.weight"].spec = QuantSpec(IntFormat(4), PerBlock(3, 4))


def test_coverage_prints_every_value_with_its_reason(sim: QuantizationSimModel) -> None:
    text = str(sim.coverage())
    for part in (
        "conv.weight",
        "int8 symmetric per channel (axis 0)",
        "inside the supergroup Conv>Relu, quantized at relu.output[0]",
        "int32 from the scales of",
    ):
        assert part in text
    assert sim.coverage().counts["quantized"] == 8


# -- inputs and outputs of every kind


@dataclass
class Batch:
    image: Tensor
    mask: Tensor | None
    ids: Tensor


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, batch: Batch, scale: float = 1.0, *, extra: dict | None = None) -> dict[str, object]:
        y = self.fc(batch.image * scale) + self.embed(batch.ids)
        if batch.mask is not None:
            y = y.masked_fill(batch.mask, 0.0)
        if extra is not None:
            y = y + extra["bias"][0]
        return {"y": y, "pair": (y.sum(), None), "n": len(batch.ids)}


def test_dataclasses_dicts_none_integers_and_booleans() -> None:
    def batch(mask: bool) -> Inputs:
        return Inputs(
            (
                Batch(
                    torch.randn(3, 4),
                    torch.tensor([[True], [False], [False]]) if mask else None,
                    torch.tensor([0, 1, 4]),
                ),
            ),
            {"scale": 0.5, "extra": {"bias": [torch.ones(4)]}},
        )

    sim = QuantizationSimModel(Structured(), batch(True), examples=[batch(False)])
    assert sim.graph.inputs[:1] == ("batch.image",) and "extra.bias.0" in sim.graph.inputs
    sim.compute_encodings([batch(True), batch(False)])
    out = sim.model(*batch(True).args)
    assert set(out) == {"y", "pair", "n"} and out["n"] == 3 and out["pair"][1] is None


def test_a_call_first_seen_after_calibration_runs_in_float_and_is_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(1, 2)
    model = Branch(nn.Linear(2, 2))
    sim = calibrated(QuantizationSimModel(model, x), [x])
    with caplog.at_level(logging.WARNING, "bitwright"):
        assert torch.equal(sim.model(-x), model(-x))
        sim.model(-x)
    assert sum("did not happen on the example input" in r.message for r in caplog.records) == 1
    assert "b.linear" in str(sim.coverage())
    with sim.quantizers._calibrated_on_part(), pytest.raises(KeyError):
        sim.quantizers["of another model"]
    assert sim.quantizers._says_unreached  # an error inside the block does not leave the warnings switched off
    both = calibrated(QuantizationSimModel(model, x, examples=[-x]), [x, -x])
    assert not torch.equal(both.model(-x), model(-x))


class RowByRow(nn.Module):
    """Applies its layer to one row after the other: each row is a call of its own, and from three rows on there are more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [self.linear(row) for row in x]
        if len(rows) < 3:
            return torch.stack(rows)
        shifted = rows[0] + rows[1]
        scaled = shifted * rows[2]
        return torch.stack(rows) + torch.tanh(scaled - shifted)


@pytest.mark.parametrize("when", ["calibration", "simulation", "active"])
def test_calls_that_the_example_did_not_make_are_one_warning(when: str, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(5, 2)
    sim = calibrated(QuantizationSimModel(RowByRow(), x[:2]), [x] if when == "calibration" else [x[:2]])
    if when == "active":
        with sim.active():
            sim.model(x)
    sim.model(x)
    told = [r.message for r in caplog.records if "did not happen on the example input" in r.message]
    assert len(told) == 1 and "add, mul, sub and 1 more: these 4 calls" in told[0], told
    assert len(sim.coverage().unseen) == 4
    caplog.clear()
    whole = QuantizationSimModel(RowByRow(), x[:2], examples=[x])  # the remedy of the warning
    whole.compute_encodings([x], progress=False)
    whole.model(x)
    assert not whole.coverage().unseen and "did not happen" not in caplog.text


def test_other_methods_get_an_error_with_the_remedy_and_work_inside_active(sim, batches):
    conv = sim.model.conv(batches[0])
    assert torch.equal(conv, sim.capture(["conv.output[0]"], batches[0])["conv.output[0]"][0])
    with sim.active():
        y = sim.model.relu(sim.model.conv(batches[0]))
    assert torch.equal(y, sim.capture(["relu.output[0]"], batches[0])["relu.output[0]"][0])


def test_ctrl_c_inside_a_forward_leaves_nothing_open(sim: QuantizationSimModel, batches: list[Tensor]) -> None:
    expected = sim.model(batches[0])

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    handle = sim.model.relu.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sim.model(batches[0])
    handle.remove()
    assert not sim._interceptor.running
    assert torch.equal(torch.relu(torch.tensor([-1.0])), torch.tensor([0.0]))
    assert torch.equal(sim.model(batches[0]), expected)


def test_calling_forward_directly_is_simulated_too(sim: QuantizationSimModel, batches: list[Tensor]) -> None:
    assert torch.equal(sim.model.forward(batches[0]), sim.model(batches[0]))


def test_in_place_simulation_can_be_taken_off(model: Net, batches: list[Tensor]) -> None:
    before = model(batches[0])
    sim = calibrated(QuantizationSimModel(model, batches[0], in_place=True), batches)
    assert sim.model is model and not torch.equal(model(batches[0]), before)
    assert torch.equal(sim.remove()(batches[0]), before)
    assert "forward" not in vars(model) and not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "copy"])
def test_a_simulated_model_is_not_simulated_again(sim, model, batches, in_place):
    for given, where in ((sim.model, "Net: "), (nn.Sequential(sim.model), "0: "), (sim.model.conv, "Conv2d: ")):
        with pytest.raises(ModelError, match=f"^{where}it is simulated already") as caught:
            QuantizationSimModel(given, batches[0], in_place=in_place)
        assert "copy.deepcopy(sim).remove()" in caught.value.remedy
    plain = copy.deepcopy(sim).remove()
    assert torch.equal(plain(batches[0]), model(batches[0]))
    QuantizationSimModel(plain, batches[0], in_place=in_place)
    assert sim.calibrated and not torch.equal(sim.model(batches[0]), model(batches[0]))


def test_a_copy_of_a_simulation_has_its_own_weights_and_one_of_a_site_has_none(sim, batches):
    sim.compute_encodings(batches)
    twin = copy.deepcopy(sim)
    with torch.no_grad():
        twin.model.conv.weight.mul_(2)
    sites = [each.quantizers["conv.weight"] for each in (sim, twin)]
    for site in sites:
        site.spec = replace(site.spec, format=IntFormat(4, True))
    assert sites[0].encoding is not None and sites[1].encoding is not None
    assert np.allclose(sites[1].encoding.scale, 2 * sites[0].encoding.scale)
    alone = copy.deepcopy(sites[0])  # and not the simulation with it
    alone.spec = replace(alone.spec, format=IntFormat(8, True))
    assert alone.encoding is None and sites[0].spec.format.bits == 4


def test_copy_of_the_model_alone_has_quantizers_of_its_own(sim: QuantizationSimModel, batches: list[Tensor]) -> None:
    sim.compute_encodings(batches)
    quantized = sim.model(batches[0])
    twin = copy.deepcopy(sim.model)
    assert torch.equal(twin(batches[0]), quantized)
    sim.quantizers["conv.weight"].enabled = False
    assert torch.equal(twin(batches[0]), quantized) and not torch.equal(sim.model(batches[0]), quantized)


def test_partial_encodings_leave_other_sites_as_they_are(sim, model, batches, tmp_path):
    sim.compute_encodings(batches)
    path = sim.save_encodings(tmp_path / "all.json", "1.0.0")
    document = json.loads(path.read_text())
    document["activation_encodings"] = []
    other = QuantizationSimModel(model, batches[0])
    with pytest.raises(EncodingsError, match="names of the model are missing"):
        other.load_encodings(document)
    found = other.load_encodings(document, partial=True)
    assert set(found) == {"conv.weight", "fc.weight"}
    assert all(site.enabled for site in other.quantizers.values())
    document["param_encodings"][0]["name"] = "nobody.weight"
    with pytest.raises(EncodingsError, match="nobody.weight"):
        other.load_encodings(document, partial=True)


def test_exported_by_torch_export(sim: QuantizationSimModel, batches: list[Tensor]) -> None:
    program = torch.export.export(sim.model, (batches[0],), strict=False)
    torch.testing.assert_close(program.module()(batches[0]), sim.model(batches[0]))


# -- errors


@pytest.mark.parametrize(
    ("argument", "bits"), [("default_output_bw", 1), ("default_param_bw", 64), ("default_param_bw", 0)]
)
def test_impossible_widths(model: Net, batches: list[Tensor], argument: str, bits: int) -> None:
    with pytest.raises(FormatError, match=rf"{argument}: {bits} is not a bit width between 2 and 32"):
        QuantizationSimModel(model, batches[0], **{argument: bits})


def test_unknown_names(model: Net, batches: list[Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"tf_enhanced"):
        QuantizationSimModel(model, batches[0], "tf_enhansed")
    with pytest.raises(ConfigError, match=r"preset 'w8a9'.*did you mean"):
        QuantizationSimModel(model, batches[0], preset="w8a9")
    with pytest.raises(ConfigError, match=r"'double' is neither int nor float"):
        QuantizationSimModel(model, batches[0], default_data_type="double")
    with pytest.raises(ModelError, match=r"it is a str, not a torch\.nn\.Module\. Remedy: pass the module itself"):
        QuantizationSimModel("model.onnx", batches[0])  # type: ignore[arg-type]


def test_example_of_wrong_shape_or_kind(model: Net, batches: list[Tensor]) -> None:
    with pytest.raises(ModelError, match=r"Net, in conv: the model fails .* \(x: \(1, 7, 4, 4\) float32 on cpu\)"):
        QuantizationSimModel(model, torch.randn(1, 7, 4, 4))
    with pytest.raises(
        ModelError, match=r"the model fails on the example input.*Remedy: .*pass an example .dummy_input"
    ):
        QuantizationSimModel(model, (batches[0], batches[0]))


def test_example_on_a_device_it_cannot_leave(model: Net) -> None:
    with pytest.raises(ModelError, match=r"input: its tensors are on meta .*cpu.*create the input on cpu"):
        QuantizationSimModel(model, torch.empty(1, 3, 6, 6, device="meta"))


def test_no_data(model: Net, batches: list[Tensor]) -> None:
    sim = QuantizationSimModel(model, batches[0])
    with pytest.raises(CalibrationError, match="the data held no batch"):
        sim.compute_encodings([])
    with pytest.raises(CalibrationError, match="the callback never ran the model"):
        sim.compute_encodings(lambda m: None)
    with pytest.raises(CalibrationError, match=r"not a list of batches.*compute_encodings\(\[batch\]\)"):
        sim.compute_encodings(batches[0])
    empty = batches[0][:0]
    for data in ([batches[0], empty], lambda m: [m(batches[0]), m(empty)]):
        with pytest.raises(CalibrationError, match=r"batch 1: it holds no sample: input 0 is 0x.*leave empty batches"):
            sim.compute_encodings(data)
    with pytest.raises(CalibrationError, match="batch 0: it holds no sample"):
        quantize(model, [empty], progress=False)
    with pytest.raises(
        CalibrationError, match=r"batch 1, in conv: the model fails .* as the model's forward takes them"
    ):
        sim.compute_encodings([batches[0], torch.randn(1, 2, 3, 3)])
    with pytest.raises(CalibrationError, match=r"leave labels out"):
        sim.compute_encodings([(batches[0], torch.zeros(4))])


def test_use_before_calibration(model: Net, batches: list[Tensor], tmp_path: Path) -> None:
    sim = QuantizationSimModel(model, batches[0])
    with pytest.raises(CalibrationError, match="run before calibration.*compute_encodings"):
        sim.model(batches[0])
    with pytest.raises(CalibrationError, match="no encodings yet"):
        sim.export(tmp_path, "net")


class Cached(nn.Module):
    """Keys behind those of a cache, which is empty at first."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        past = torch.tensor([]) if past is None else past
        keys = torch.cat([past, self.key(x)], dim=-2)
        return self.query(x) @ keys.transpose(-1, -2), keys


def test_a_cache_that_starts_empty_needs_no_site_and_serves_later_steps() -> None:
    torch.manual_seed(0)
    model, x = Cached().eval(), torch.randn(2, 3, 4)
    sim = calibrated(QuantizationSimModel(model, x), [x, torch.randn(2, 3, 4)])
    assert not any("cat" in name for name in sim.quantizers)
    assert "it has no elements" in set(sim.plan.floats.values())
    scores, keys = sim.model(x)
    step, longer = sim.model(x[:, :1], keys)
    assert longer.shape == (2, 4, 4) and torch.equal(longer[:, :3], keys)
    assert torch.equal(step[..., :3], scores[:, :1])
    assert (scores - model(x)[0]).norm() < 0.05 * scores.norm()


def test_an_empty_tensor_passes_a_site_that_calibration_did_not_reach() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            chosen = x[:, 0] > 0
            return torch.cat([self.a(x[chosen]), self.b(x[~chosen])])

    x = torch.tensor([[1.0, 2.0], [-1.0, 2.0]])
    sim = calibrated(QuantizationSimModel(Halves(), x), [x[:1]])
    assert sim.model(x[:1]).shape == (1, 2)
    with pytest.raises(CalibrationError, match=r"b\..*calibration never reached this site"):
        sim.model(x)


def test_weights_that_no_batch_reached_are_calibrated_from_their_values() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.gain = nn.Parameter(torch.tensor([[1.0], [4.0]]))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else F.linear(self.b(x), self.gain * self.a.weight)

    x = torch.ones(1, 2)
    model = Branch()
    sim = calibrated(QuantizationSimModel(model, x, examples=[-x]), [x], allow_unreached=True)
    alone = calibrated(QuantizationSimModel(model, x, examples=[-x]), [x, -x])
    weights = [site for site in sim.quantizers.values() if site.role == "weight"]
    assert len(weights) == 3
    for site in weights:
        assert site.encoding == alone.quantizers[site.name].encoding
    sim.compute_encodings([x, -x])  # what was left in float for lack of data is quantized when data come
    assert all(site.enabled for site in sim.quantizers.values())
    assert torch.equal(sim.model(-x), alone.model(-x))


def test_quantize_leaves_unreached_branches_in_float_or_refuses_them_before_any_work(caplog):
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor, other: bool = False) -> Tensor:
            y = self.a(x)
            return y + self.b(x) if bool((x < 0).all()) else y

    data = [-torch.rand(4, 2), *(torch.rand(4, 2) for _ in range(3))]

    class Loader:  # the first batch drawn is the example; calibration goes without it
        drawn = False

        def __iter__(self):  # type: ignore[no-untyped-def]
            if not self.drawn:
                self.drawn = True
                yield data[0]
            yield from data[1:]

    result = quantize(Branch(), Loader(), recipe=["fold", "gptq"], progress=False)
    assert "calibration never reached" in caplog.text
    assert result.sim.quantizers["b.weight"].encoding is not None
    assert torch.isfinite(result.model(data[0])).all()
    assert "no calibration batch reached it" in str(result.sim.coverage())
    with pytest.raises(CalibrationError, match=r"no calibration batch reached this site.*allow_unreached=True"):
        quantize(Branch(), Loader(), recipe=["fold", "gptq"], progress=False, allow_unreached=False)


def test_values_that_are_not_finite_are_left_out_and_named(model, batches, caplog):
    spoilt = batches[0].clone()
    spoilt[0, 0, 0, 0], spoilt[0, 0, 0, 1] = float("nan"), float("inf")
    sim = QuantizationSimModel(model, batches[0])
    with caplog.at_level(logging.WARNING, "bitwright"):
        sim.compute_encodings([spoilt, *batches], non_finite="clamp")
    assert any("first at conv.input[0] (1 NaN, 1 infinite), and 3 sites after it" in r.message for r in caplog.records)
    assert all(np.isfinite(s.encoding.scale).all() for s in sim.quantizers.values())
    with pytest.raises(CalibrationError, match=r"conv\.input\[0\]"):
        sim.compute_encodings([torch.full_like(spoilt, float("nan"))], non_finite="clamp")


def test_ctrl_c_keeps_the_statistics_and_resumes(model, batches, caplog):
    def interrupted():  # type: ignore[no-untyped-def]
        yield batches[0]
        raise KeyboardInterrupt

    sim = QuantizationSimModel(model, batches[0])
    with caplog.at_level(logging.WARNING, "bitwright"), pytest.raises(KeyboardInterrupt):
        sim.compute_encodings(interrupted())
    assert any("interrupted after 1 runs" in r.message and "resume=True" in r.message for r in caplog.records)
    assert torch.isfinite(sim.model(batches[0])).all()
    sim.compute_encodings(batches[1:], resume=True)
    whole = calibrated(QuantizationSimModel(model, batches[0]), batches)
    assert {n: s.encoding for n, s in sim.quantizers.items()} == {n: s.encoding for n, s in whole.quantizers.items()}


# -- files


@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0"])
def test_encodings_come_back_bit_for_bit(sim, model, batches, tmp_path, version):
    sim.save_encodings(tmp_path / "net.encodings", version)
    fresh = QuantizationSimModel(model, batches[0])
    fresh.load_encodings(tmp_path / "net.encodings")
    assert {n: s.encoding for n, s in fresh.quantizers.items() if s.enabled and not s.quantizer.derived} == {
        n: s.encoding for n, s in sim.quantizers.items() if not s.quantizer.derived
    }
    assert torch.equal(fresh.model(batches[1]), sim.model(batches[1]))


def test_saving_encodings_warns_only_where_an_encoding_is_lost(sim, tmp_path, caplog):
    sim.save_encodings(tmp_path / "net.encodings")
    assert not caplog.records
    sim.quantizers["fc.weight"].spec = QuantSpec(parse_format("float8_e4m3"), PerChannel())
    sim.compute_encodings([torch.randn(4, 3, 6, 6)])
    sim.save_encodings(tmp_path / "net.encodings", "1.0.0")
    assert [r.message for r in caplog.records] == ["fc.weight: version 1.0.0 cannot describe float8_e4m3; left out"]


def test_encodings_of_another_model_say_what_is_missing_and_extra(sim: QuantizationSimModel, tmp_path: Path) -> None:
    sim.save_encodings(tmp_path / "net.encodings")
    other = QuantizationSimModel(nn.Sequential(nn.Linear(3, 3)), torch.randn(1, 3))
    with pytest.raises(EncodingsError, match=r"names .* are missing.*0\.weight.*not in the model.*conv\.weight"):
        other.load_encodings(tmp_path / "net.encodings")
    (tmp_path / "broken.encodings").write_text("{")
    with pytest.raises(EncodingsError, match=r"JSON"):
        sim.load_encodings(tmp_path / "broken.encodings")


def test_frozen_parameters_survive_calibration(sim, model, batches, tmp_path):
    sim.quantizers["conv.weight"].encoding = affine.encode(
        np.full(8, -1.0), np.full(8, 1.0), sim.quantizers["conv.weight"].spec, PerChannel(0)
    )
    sim.save_encodings(tmp_path / "w.encodings", "1.0.0")
    fresh = QuantizationSimModel(model, batches[0])
    fresh.set_and_freeze_param_encodings(tmp_path / "w.encodings")
    fresh.compute_encodings(batches)
    assert fresh.quantizers["conv.weight"].encoding == sim.quantizers["conv.weight"].encoding


def test_checkpoints_hold_everything_without_pickle(sim, model, batches, tmp_path):
    sim.quantizers["fc.output[0]"].enabled = False
    with torch.no_grad():
        sim.model.conv.weight.mul_(0.99)
    folder = sim.save_checkpoint(tmp_path / "checkpoint")
    assert {p.suffix for p in folder.iterdir()} == {".safetensors", ".json"}
    fresh = QuantizationSimModel(model, batches[0])
    fresh.load_checkpoint(folder)
    assert torch.equal(fresh.model(batches[1]), sim.model(batches[1]))
    other = QuantizationSimModel(nn.Sequential(nn.Linear(3, 3)), torch.randn(1, 3))
    with pytest.raises(EncodingsError, match="missing.*not in the model"):
        other.load_checkpoint(folder)
    with pytest.raises(EncodingsError, match="no readable checkpoint there"):
        fresh.load_checkpoint(tmp_path / "nowhere")


def test_tied_parameters_are_stored_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embed(ids)))

    ids = torch.tensor([[0, 5, 3]])
    model = Tied()
    sim = calibrated(QuantizationSimModel(model, ids), [ids])
    sim.save_checkpoint(tmp_path)
    fresh = QuantizationSimModel(model, ids)
    fresh.load_checkpoint(tmp_path)
    assert fresh.model.head.weight is fresh.model.embed.weight
    assert torch.equal(fresh.model(ids), sim.model(ids))


def test_nothing_is_left_behind_when_a_folder_cannot_be_written(sim: QuantizationSimModel, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ExportError, match="file"):
        sim.save_checkpoint(blocked / "checkpoint")
    with pytest.raises(ExportError, match=r"missing|does not exist|no such"):
        sim.save_encodings(tmp_path / "none" / "x.encodings")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_configuration_errors_name_the_key(model: Net, batches: list[Tensor], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"presett.*did you mean 'preset'"):
        QuantizationSimModel(model, batches[0], config_file={"presett": "w8a8"})
    with pytest.raises(ConfigError, match=r"missing\.json"):
        QuantizationSimModel(model, batches[0], config_file=tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("{not json")
    with pytest.raises(ConfigError, match=r"bad\.json"):
        QuantizationSimModel(model, batches[0], config_file=tmp_path / "bad.json")


def test_our_rules_and_the_aimet_file(model: Net, batches: list[Tensor], tmp_path: Path) -> None:
    rules = {"preset": "w8a8", "rules": [{"match": "fc", "weight": "int4", "output": None}]}
    sim = QuantizationSimModel(model, batches[0], config_file=rules)
    assert sim.quantizers["fc.weight"].spec.format == IntFormat(4) and "fc.output[0]" not in sim.quantizers
    aimet = {
        "defaults": {"ops": {"is_output_quantized": "True"}, "params": {"is_quantized": "True", "is_symmetric": "True"}},
        "params": {"bias": {"is_quantized": "False"}}, "op_type": {}, "supergroups": [{"op_list": ["Conv", "Relu"]}],
        "model_input": {"is_input_quantized": "True"}, "model_output": {},
    }  # fmt: skip
    path = tmp_path / "aimet.json"
    path.write_text(json.dumps(aimet))
    sim = QuantizationSimModel(model, batches[0], config_file=str(path), default_param_bw=4)
    assert sim.quantizers["conv.weight"].spec.granularity == PerTensor()
    assert sim.quantizers["conv.weight"].spec.format.bits == 4
    assert "conv.output[0]" not in sim.quantizers and "relu.output[0]" in sim.quantizers


def test_deepcopy_is_independent(sim: QuantizationSimModel, batches: list[Tensor]) -> None:
    twin = copy.deepcopy(sim)
    with torch.no_grad():
        twin.model.conv.weight.zero_()
    twin.quantizers["fc.weight"].enabled = False
    assert torch.equal(sim.model(batches[0]), copy.deepcopy(sim).model(batches[0]))
    assert sim.quantizers["fc.weight"].enabled and not torch.equal(twin.model(batches[0]), sim.model(batches[0]))


def test_repr_says_where_it_stands(sim: QuantizationSimModel) -> None:
    assert "8 sites, 8 calibrated" in repr(sim) and "stage=simulate" in repr(sim)


def test_encodings_of_a_model_whose_mask_was_left_in_float_are_read_back(tmp_path: Path) -> None:
    """Calibration finds the mask by its values; a simulation that has seen none does not know it yet."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores = torch.maximum(self.layer(x) + mask, torch.tensor(torch.finfo(torch.float32).min))
            return self.last(scores.softmax(-1))

    torch.manual_seed(0)
    mask = torch.zeros(4, 8).masked_fill(torch.rand(4, 8) > 0.7, torch.finfo(torch.float32).min)
    batch = (torch.randn(4, 8), mask)
    sim, fresh = (QuantizationSimModel(Masked().eval(), batch) for _ in range(2))
    fresh.model.load_state_dict(sim.model.state_dict())
    sim.compute_encodings([batch], progress=False)
    floats = [name for name, site in sim.quantizers.items() if not site.enabled]
    assert floats
    fresh.load_encodings(sim.save_encodings(tmp_path / "model.encodings"))
    assert [name for name, site in fresh.quantizers.items() if not site.enabled] == floats
    assert torch.equal(fresh.model(*batch), sim.model(*batch))


def test_encodings_are_read_where_the_user_had_switched_a_site_off(model, batches, tmp_path):
    sim, other = (QuantizationSimModel(model, batches[0]) for _ in range(2))
    sim.compute_encodings(batches, progress=False)
    path = sim.save_encodings(tmp_path / "model.encodings")
    name = next(name for name, site in other.quantizers.items() if site.role == "output")
    other.quantizers[name].enabled = False
    assert name in other.load_encodings(path)
    assert other.quantizers[name].enabled
    assert torch.equal(other.model(batches[0]), sim.model(batches[0]))


class Counted(nn.Module):
    """Counts its forwards; every kind of constant that a preset of weights quantizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(20, 8), nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 4)
        self.factor, self.runs = nn.Parameter(torch.randn(4, 4)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.head(self.lstm(self.table(x))[0]) @ self.factor


@pytest.mark.parametrize("preset", ["w4g32", "nf4"])
@pytest.mark.parametrize("data", [None, [torch.zeros(2, 3, dtype=torch.long)], []], ids=["none", "data", "empty"])
def test_no_range_that_follows_from_data_needs_a_run(preset: str, data: list[Tensor] | None) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 20, (2, 5))
    sim = QuantizationSimModel(Counted(), x, preset=preset)
    before = sim.model.runs
    assert not sim.needs_data
    sim.compute_encodings(data)
    assert sim.model.runs == before and not sim.quantizers.unreached()
    with sim.calibrating() as model:
        model(x)  # as in a calibration of activations
    with sim.calibrating():
        pass
    assert torch.isfinite(sim.model(x)).all()
    assert QuantizationSimModel(Counted(), x, preset="w8a8").needs_data


def test_half_precision_needs_no_data_and_asks_those_that_it_is_given() -> None:
    x = torch.randint(0, 20, (2, 5))
    sim = QuantizationSimModel(Counted(), x, preset="fp16")
    before = sim.model.runs
    assert not sim.needs_data
    sim.compute_encodings()
    assert sim.model.runs == before and not sim.quantizers.unreached() and torch.isfinite(sim.model(x)).all()
    with torch.no_grad():
        sim.model.head.bias[0] = 1e6
    sim.compute_encodings([x])
    assert "beyond the largest number of float16" in sim.quantizers["head.output[0]"].quantizer.state
    assert sim.model(x).isfinite().all()


def test_what_no_calibration_reads_is_refused_if_it_is_not_data() -> None:
    sim = QuantizationSimModel(nn.Linear(8, 4), torch.randn(2, 8), preset="w4")
    with pytest.raises(
        CalibrationError, match=r"data is a Tensor, not a list of batches.*compute_encodings\(\[batch\]\)"
    ):
        sim.compute_encodings(torch.randn(2, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_of_16_bits_is_rounded_inside_only_where_it_is_quantized(dtype: torch.dtype) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in self.parts(x).chunk(3, 2))
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    torch.manual_seed(0)
    model, x = Attention().to(dtype), torch.randn(2, 12, 16, dtype=dtype)
    sim = calibrated(QuantizationSimModel(model, x, preset="w8"))
    kernel = Attention().to(dtype)
    kernel.load_state_dict(model.state_dict())
    weight = affine.fake_quantize(model.parts.weight.detach().float().numpy(), sim.quantizers["parts.weight"].encoding)
    kernel.parts.weight.data = torch.from_numpy(weight).to(dtype)
    with torch.no_grad():
        assert torch.equal(sim.model(x), kernel(x))
    quantized = calibrated(QuantizationSimModel(model, x, preset="w8", kv_cache={"value": "int8"}), [x])
    with torch.no_grad():
        assert not torch.equal(quantized.model(x), kernel(x))
        assert (quantized.model(x) - kernel(x)).abs().max() < 0.05
