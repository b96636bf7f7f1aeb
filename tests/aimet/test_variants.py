"""What scripts of AIMET do in other ways than its documentation: schemes, optimizers, targets, inputs and files."""

from __future__ import annotations

import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bitwright.aimet_common.defs import QuantizationDataType, QuantScheme
from bitwright.aimet_onnx import QuantizationSimModel as OnnxSim
from bitwright.aimet_onnx.utils import build_session
from bitwright.aimet_torch import QuantizationSimModel
from bitwright.aimet_torch.quantization.affine import AffineEncoding, MinMaxQuantizer, QuantizeDequantize
from bitwright.aimet_torch.quantization.base import QuantizerBase
from tests.aimet.nets import Net, batch
from tests.aimet.onnx_nets import feeds, folded


def simulated(model: nn.Module | None = None, x: Tensor | None = None, **options: object) -> QuantizationSimModel:
    x = batch() if x is None else x
    sim = QuantizationSimModel((model or Net()).eval(), x, **options)
    sim.compute_encodings(lambda model, _: model(x), None)
    return sim


def ranges(sim: QuantizationSimModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in sim.model.named_parameters() if "quantizers" in name}


def test_ranges_train_with_momentum_from_squared_errors() -> None:
    sim = simulated(quant_scheme=QuantScheme.training_range_learning_with_tf_enhanced_init)
    before = ranges(sim)
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        sim.model(batch()).pow(2).mean().backward()
        optimizer.step()
    moved = [name for name, value in ranges(sim).items() if not torch.equal(value, before[name])]
    assert len(moved) > 0.7 * len(before)


def test_ranges_stay_in_a_group_of_parameters_without_a_rate() -> None:
    sim = simulated()
    own = [p for name, p in sim.model.named_parameters() if "quantizers" in name]
    others = [p for name, p in sim.model.named_parameters() if "quantizers" not in name]
    before, weight = ranges(sim), sim.model.fc.weight.detach().clone()
    optimizer = torch.optim.Adam([{"params": own, "lr": 0.0}, {"params": others, "lr": 1e-2}])
    sim.model(batch()).sum().backward()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in ranges(sim).items())
    assert not torch.equal(sim.model.fc.weight, weight)
    for module in sim.model.modules():
        if isinstance(module, QuantizerBase):
            module.requires_grad_(False)
    assert not any(p.requires_grad for p in own)


def test_state_and_pickle_of_a_simulation_compute_the_same() -> None:
    torch.manual_seed(0)
    model = Net()
    sim, fresh = simulated(model), QuantizationSimModel(model, batch())
    fresh.model.load_state_dict(sim.model.state_dict())
    for other in (fresh.model, pickle.loads(pickle.dumps(sim.model))):
        torch.testing.assert_close(
            other(batch()), sim.model(batch()), rtol=0, atol=1e-6
        )  # scales of ends that are read


def test_lists_of_quantizers_are_joined_and_are_of_their_classes() -> None:
    layer = simulated().model.conv1
    several = [*(layer.input_quantizers + layer.output_quantizers), *layer.param_quantizers.values()]
    assert all(isinstance(q, QuantizerBase) for q in several if q is not None)
    assert isinstance(QuantizeDequantize((), 8, True), MinMaxQuantizer)


def test_encodings_of_nobody_as_a_dict_are_refused() -> None:
    record = {
        "name": "nobody",
        "dtype": "INT",
        "bw": 8,
        "is_sym": False,
        "enc_type": "PER_TENSOR",
        "scale": [0.1],
        "offset": [-3],
    }
    sim = simulated()
    before = sim.model(batch())
    with pytest.raises(RuntimeError, match="nobody"):
        sim.load_encodings({"version": "1.0.0", "activation_encodings": [record], "param_encodings": []})
    assert torch.equal(sim.model(batch()), before)


def test_blocks_are_written_and_read_in_version_2() -> None:
    quantizer, weight = QuantizeDequantize((4, 2), 4, True, block_size=(1, 4)), torch.randn(4, 8)
    with quantizer.compute_encodings():
        quantizer(weight)
    record = quantizer.get_encodings().to_qnn_encoding_dict("2.0.0")
    assert (record["output_dtype"], record["axis"], record["block_size"]) == ("int4", 1, 4)
    again = AffineEncoding.from_qnn_encoding_dict(record)
    torch.testing.assert_close(again.scale.reshape(4, 2), quantizer.get_scale().detach().reshape(4, 2))


@pytest.mark.parametrize("target", ["htp_v66", "htp_v73", "htp_v85", "enpu_v6"])
def test_float16_on_every_kind_of_target(target: str) -> None:
    float16 = dict(default_output_bw=16, default_param_bw=16, default_data_type=QuantizationDataType.float)
    sim = simulated(config_file=target, **float16)
    wanted = sim.get_original_model(sim.model)(batch())
    torch.testing.assert_close(sim.model(batch()), wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))


@pytest.mark.parametrize("target, bits", [("htp_v68", 8), ("htp_v75", 16)])
def test_second_operand_of_a_product_is_symmetric(target: str, bits: int) -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a @ b

    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    sim = QuantizationSimModel(Product(), (a, b), default_output_bw=16, config_file=target)
    sim.compute_encodings(lambda model: model(a, b))
    second = [q for name, q in sim.named_quantizers() if "input" in name][1]
    assert second.symmetric and second.bitwidth == bits


def test_session_needs_no_providers_and_computes_the_simulation() -> None:
    sim = OnnxSim(folded())
    sim.compute_encodings(feeds())
    left_off = next(q for q in sim.qc_quantize_op_dict.values() if not q.enabled)
    left_off.enabled = True
    left_off.set_bitwidth(16)
    sim.compute_encodings(feeds())
    assert left_off.is_initialized() and left_off.quant_info is not None
    (inside,), (wanted,) = (s.run(None, feeds()[0]) for s in (build_session(sim.model.model), sim.session))
    assert (inside == wanted).all()


def test_weights_and_encodings_are_given_by_name(tmp_path) -> None:
    sim = simulated()
    sim.export_weights_to_safetensors(tmp_path / "new", "w")
    written = load_file(tmp_path / "new" / "w.safetensors")
    assert written.keys() == sim.get_original_model(sim.model).state_dict().keys()
    assert torch.equal(written["conv1.weight"], sim.model.conv1.weight)
    activations, parameters = sim.get_activation_param_encodings()
    weight = sim.model.conv1.param_quantizers["weight"]
    assert [record["bitwidth"] for record in parameters["conv1.weight"]] == [8] * 8
    assert parameters["conv1.weight"][3]["max"] == pytest.approx(float(weight.get_max().flatten()[3]))
    (entry,) = activations["conv1"]["input"].values()
    assert entry["min"] == pytest.approx(float(sim.model.conv1.input_quantizers[0].get_min()))


def test_optional_inputs_and_outputs_by_name() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
            h = self.a(x) + (0 if y is None else self.b(y))
            return {"h": h, "p": torch.softmax(h, -1)}

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    sim = QuantizationSimModel(Model().eval(), (x, y))
    sim.compute_encodings(lambda model, args: model(*args), (x, y))
    assert sim.model(x, y).keys() == {"h", "p"} and sim.model(x)["h"].shape == (3, 4)


@pytest.mark.parametrize(
    "wrong, error", [(dict(default_param_bw=1), ValueError), (dict(quant_scheme="nonsense"), ValueError)]
)
def test_wrong_arguments_are_errors_of_python(wrong: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        QuantizationSimModel(Net().eval(), batch(), **wrong)
    with pytest.raises(RuntimeError):
        QuantizeDequantize((), 8, True)(torch.randn(3))
