"""Quantizers of a simulation of a torch model, and those that modules hold themselves."""

import copy

import pytest
import torch
from torch import nn

from tests.aimet.nets import Mlp, Net, Residual, batch


def bitwidth_after_calibration():
    from aimet_torch import QuantizationSimModel

    sim = QuantizationSimModel(Net().eval(), batch())
    sim.compute_encodings(lambda model: model(batch()))
    quantizer = sim.model.relu1.output_quantizers[0]
    low, high = quantizer.get_min(), quantizer.get_max()
    quantizer.bitwidth = 4
    assert torch.allclose(quantizer.get_max(), high) and torch.allclose(quantizer.get_min(), low)
    assert torch.allclose(quantizer.get_scale(), (high - low) / 15)


def block_affine():
    import aimet_torch.quantization as Q

    x = torch.randn(5, 10)
    q = Q.affine.Quantize(shape=(5, 1), bitwidth=8, symmetric=False, block_size=(1, 10))
    with q.compute_encodings():
        q(x)
    codes = q(x)
    assert isinstance(codes, Q.QuantizedTensor) and codes.quantized_repr().dtype == torch.uint8
    assert codes.encoding.granularity == "blockwise"
    values = codes.dequantize()
    assert isinstance(values, Q.DequantizedTensor) and (values - x).abs().max() <= q.get_scale().max()
    assert torch.equal(values.quantize(), codes)


def block_analyzers():
    from aimet_torch.quantization.encoding_analyzer import (
        MinMaxEncodingAnalyzer,
        PercentileEncodingAnalyzer,
        SqnrEncodingAnalyzer,
    )

    x = torch.randn(10000)
    analyzer = MinMaxEncodingAnalyzer(shape=(1,))
    with pytest.raises(RuntimeError):
        analyzer.compute_encodings(num_steps=255, is_symmetric=False)
    analyzer.update_stats(x)
    low, high = analyzer.compute_encodings(num_steps=2**8 - 1, is_symmetric=False)
    assert torch.allclose(high - low, x.max() - x.min())
    tail = PercentileEncodingAnalyzer(shape=(1,), num_bins=2048, percentile=99)
    tail.update_stats(x)
    assert tail.compute_encodings(255, False)[1] < high
    best = SqnrEncodingAnalyzer(shape=())
    best.update_stats(x)
    assert best.compute_encodings(15, True)[1] < high


def block_float():
    import aimet_torch.quantization as Q

    x = torch.tensor([[1.8998, -0.0947, -1.0891, -0.1727]])
    half = Q.float.FloatQuantizeDequantize(exponent_bits=5, mantissa_bits=10)
    assert half.is_float16() and torch.equal(half(x), x.half().float())
    small = Q.float.FloatQuantizeDequantize(dtype=torch.float8_e4m3fn)
    with small.compute_encodings():
        small(x)
    assert (small(x) - x).abs().max() < 0.07 and small.bitwidth == 8


def block_functional():
    import aimet_torch.quantization.affine as affine

    x = torch.tensor([[0.3, 70.0], [-0.3, -70.0]])
    scale, offset = torch.tensor([0.5], requires_grad=True), torch.tensor([0.0])
    codes = affine.quantize(x, scale, offset, -128, 127)
    assert codes.tolist() == [[1, 127], [-1, -128]]
    assert affine.quantize(x, scale, offset, bitwidth=8, signed=True).equal(codes)
    assert affine.quantize(x, scale, offset, num_steps=255, signed=True).equal(codes)
    assert affine.dequantize(codes, scale, offset).tolist() == [[0.5, 63.5], [-0.5, -64.0]]
    affine.quantize_dequantize(x, scale, offset, bitwidth=4).sum().backward()
    assert scale.grad is not None


def block_grouped():
    import aimet_torch.v2.quantization as Q

    weight = torch.randn(8, 64)
    q = Q.affine.GroupedBlockQuantizeDequantize(
        shape=(8, 4), bitwidth=4, symmetric=True, decompressed_bw=8, block_size=(1, 16), block_grouping=(1, -1)
    )
    with q.compute_encodings():
        q(weight)
    encoding = q.get_encodings()
    assert encoding.per_channel_scale.shape == (8, 1) and q.get_per_channel_scale().shape == (8, 1)
    assert encoding.per_block_int_scale.max() == 16 and encoding.per_block_int_scale.min() >= 1
    assert torch.allclose(encoding.per_block_int_scale * encoding.per_channel_scale, q.get_scale())


def block_qdq_trained():
    from aimet_torch.quantization.affine import QuantizeDequantize

    qdq = QuantizeDequantize(shape=(), qmin=0, qmax=15, symmetric=False)
    x = torch.linspace(-1, 1, 101)
    with qdq.compute_encodings():
        qdq(x)
    optimizer = torch.optim.SGD(qdq.parameters(), lr=0.1)
    before = float(qdq.get_scale().detach())
    for _ in range(20):
        optimizer.zero_grad()
        (qdq(3 * x) - 3 * x).square().mean().backward()
        optimizer.step()
    assert qdq.get_scale() > before, "the range learned to hold the wider values"


def block_several_axes():
    import aimet_torch.quantization.affine as affine

    x = torch.randn(4, 6)
    q = affine.QuantizeDequantize((2, 3), 8, True, block_size=(2, 2))
    with q.compute_encodings():
        q(x)
    tile = x[:2, :2]
    assert torch.isclose(q.get_scale()[0, 0], torch.maximum(tile.max() / 127, -tile.min() / 128))
    assert (q(x) - x).abs().max() <= q.get_scale().max()


def block_state_dict():
    from aimet_torch.quantization.affine import AffineEncoding, QuantizeDequantize

    q = QuantizeDequantize((), 8, False)
    q.set_range(torch.tensor(-1.0), torch.tensor(3.0))
    other = QuantizeDequantize((), 8, False)
    other.load_state_dict(q.state_dict())
    assert other.is_initialized() and other.get_offset() == q.get_offset() == -64
    encoding = q.get_encodings()
    assert isinstance(encoding, AffineEncoding) and not encoding.symmetry and encoding.num_steps == 255
    third = QuantizeDequantize.from_encodings(encoding)
    x = torch.randn(100)
    assert torch.equal(third(x), q(x)) and torch.equal(encoding.quantize_dequantize(x), q(x))
    assert encoding.to_qnn_encoding_dict("0.6.1")[0]["offset"] == -64


def elementwise_ops():
    from aimet_torch import QuantizationSimModel, elementwise_ops
    from aimet_torch.nn.modules.custom import Concat, MatMul

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.add, self.cat, self.matmul = elementwise_ops.Add(), Concat(axis=-1), MatMul()

        def forward(self, x):
            y = self.cat(self.add(x, x.flip(0)), x)
            return self.matmul(y, y.transpose(0, 1))

    x = torch.randn(4, 4)
    sim = QuantizationSimModel(Model(), x)
    sim.compute_encodings(lambda model: model(x))
    assert sim.model.add.output_quantizers[0].bitwidth == 8
    assert sim.model.matmul.output_quantizers[0].bitwidth == 8


def float16():
    from aimet_common.defs import QuantizationDataType
    from aimet_torch import QuantizationSimModel

    model, x = Net().eval(), batch()
    sim = QuantizationSimModel(
        model, x, default_output_bw=16, default_param_bw=16, default_data_type=QuantizationDataType.float
    )
    sim.compute_encodings(lambda m: m(x))
    assert sim.model.relu1.output_quantizers[0].is_float16()
    assert (sim.model(x) - model(x)).abs().max() < 0.01


def lpbq():
    import aimet_torch.v2.quantization as Q
    from aimet_torch.v2.quantsim import QuantizationSimModel
    from aimet_torch.v2.quantsim.config_utils import set_grouped_blockwise_quantization_for_weights

    x = torch.randn(4, 16)
    sim = QuantizationSimModel(Mlp(), x)
    set_grouped_blockwise_quantization_for_weights(
        sim, [torch.nn.Linear], bitwidth=4, symmetric=True, decompressed_bw=8, block_size=8, block_grouping=-1
    )
    sim.compute_encodings(lambda model: model(x))

    quantizer = sim.model.fc1.param_quantizers["weight"]
    assert isinstance(quantizer, Q.affine.GroupedBlockQuantizeDequantize)
    assert quantizer.bitwidth == 4 and quantizer.decompressed_bw == 8
    assert quantizer.get_scale().shape == (32, 2)
    assert quantizer.get_per_channel_scale().shape == (32, 1)
    encoding = quantizer.get_encodings()
    multiples = encoding.per_block_int_scale
    assert torch.equal(multiples.amax(1), torch.full((32,), 16.0)), (
        "the largest block of a channel has the largest multiple"
    )
    assert torch.equal(encoding.scale, multiples * encoding.per_channel_scale)

    # the same building block on its own finds the same scales
    block = Q.affine.GroupedBlockQuantizeDequantize((32, 2), 4, True, 8, block_size=(1, 8), block_grouping=(1, -1))
    with block.compute_encodings():
        block(sim.model.fc1.weight)
    assert torch.allclose(block.get_scale(), quantizer.get_scale().as_subclass(torch.Tensor), rtol=1e-6)


def module_methods():
    from aimet_torch import QuantizationSimModel

    sim = QuantizationSimModel(Net().eval(), batch(), default_param_bw=4)
    conv = sim.model.conv1
    conv.compute_param_encodings()
    assert conv.param_quantizers["weight"].is_initialized()
    with sim.model.relu1.compute_encodings():
        sim.model(batch())
    assert sim.model.relu1.output_quantizers[0].is_initialized()
    assert not sim.model.relu2.output_quantizers[0].is_initialized()
    sim.compute_encodings(lambda model: model(batch()))
    exported = conv.export_param_encodings("1.0.0")
    assert exported["weight"]["bw"] == 4 and len(exported["weight"]["scale"]) == 8
    assert sim.model.relu1.export_output_encodings("0.6.1")["0"][0]["bitwidth"] == 8
    plain = conv.get_original_module()
    assert type(plain) is nn.Conv2d and plain.weight is conv.weight and not hasattr(plain, "param_quantizers")
    assert hasattr(conv, "param_quantizers")
    conv.fold_param_quantizers()
    assert conv.param_quantizers["weight"] is None and conv.weight.unique().numel() <= 8 * 16


def mxfp4_nvfp4_weights():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.nn import QuantizedLinear

    torch.manual_seed(0)
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])

    layer = QuantizedLinear(64, 8)
    before = layer.weight.detach().clone()
    layer.set_weight_quantizer_to_mxfp4_int8(block_size=32)
    blocks = layer.weight.detach().reshape(8, 2, 32)
    scale = 2.0 ** torch.floor(torch.log2(before.reshape(8, 2, 32).abs().amax(2, keepdim=True) / 4))
    assert torch.isin((blocks / scale).abs(), grid).all()
    assert layer.param_quantizers["weight"].bitwidth == 8 and layer.param_quantizers["weight"].shape == (8, 1)

    model, x = nn.Sequential(nn.Conv2d(32, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), torch.randn(2, 32, 6, 6)
    sim = QuantizationSimModel(model, x, default_param_bw=4)
    scales = torch.full((8, 2, 1, 1), 0.5).to(torch.float8_e4m3fn)
    sim.model[0].set_weight_quantizer_to_nvfp4_int8(scales, 0.02)
    assert torch.isin((sim.model[0].weight.detach() / 0.01).abs().round(decimals=3), grid).all()
    assert sim.model[0].param_quantizers["weight"].bitwidth == 8
    sim.compute_encodings(lambda m: m(x))
    try:
        sim.model[2].set_weight_quantizer_to_mxfp4_int8()
    except (RuntimeError, ValueError):
        pass
    else:
        raise AssertionError("blocks of 32 in 8 channels")


def named_quantizers():
    from aimet_torch import QuantizationSimModel

    sim = QuantizationSimModel(Residual(), torch.randn(1, 3, 8, 8))
    names = dict(sim.named_quantizers())
    assert "conv1.param_quantizers.weight" in names and "relu.output_quantizers.0" in names
    assert len(list(sim.quantizers())) == len(names)
    assert [name for name, _ in sim.named_qmodules()] == ["conv1", "relu", "conv2"]
    assert len(list(sim.qmodules())) == 3


def param_quantizer_bitwidth():
    from aimet_torch import QuantizationSimModel

    sim = QuantizationSimModel(Net().eval(), batch())
    for _, module in sim.named_qmodules():
        if module.param_quantizers.get("weight"):
            module.param_quantizers["weight"].bitwidth = 4
    sim.compute_encodings(lambda model: model(batch()))
    assert sim.model.fc.param_quantizers["weight"].get_encodings().bitwidth == 4
    codes = sim.model.fc.param_quantizers["weight"](sim.model.fc.weight).quantize()
    assert codes.min() >= -8 and codes.max() <= 7


def param_quantizer_read():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.quantization.affine import QuantizeDequantize

    sim = QuantizationSimModel(Net().eval(), batch())
    sim.compute_encodings(lambda model: model(batch()))
    quantizer = sim.model.conv1.param_quantizers["weight"]
    assert isinstance(quantizer, QuantizeDequantize)
    assert quantizer.bitwidth == 8 and quantizer.symmetric and quantizer.signed
    weight = sim.model.conv1.weight
    expected = weight.detach().abs().amax(dim=(1, 2, 3), keepdim=True)
    assert quantizer.get_scale().shape == (8, 1, 1, 1)
    assert torch.all(quantizer.get_max() <= expected * (1 + 1e-6))
    assert torch.equal(quantizer.get_offset(), torch.zeros(8, 1, 1, 1))
    assert (quantizer(weight) - weight).abs().max() <= quantizer.get_scale().max() / 2 + 1e-6


def pivot_gradients():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.experimental.pgs import disable_pgs, enable_pgs, get_pgs_eps, get_pgs_multiplier, is_pgs_enabled

    sim = QuantizationSimModel(Net().eval(), batch(), default_param_bw=4)
    sim.compute_encodings(lambda model: model(batch()))

    def gradient():
        sim.model.zero_grad()
        sim.model(batch()).square().sum().backward()
        return sim.model.conv1.weight.grad.clone()

    plain = gradient()
    enable_pgs(eps=0.3, multiplier=3.0)
    assert is_pgs_enabled() and get_pgs_eps() == 0.3 and get_pgs_multiplier() == 3.0
    assert not torch.equal(gradient(), plain)
    disable_pgs()
    assert not is_pgs_enabled() and torch.equal(gradient(), plain)
    try:
        enable_pgs(eps=0.0)
    except ValueError:
        pass
    else:
        raise AssertionError("eps of 0 was accepted")


def quant_wrappers():
    from aimet_torch.quantsim import QuantizationSimModel

    sim = QuantizationSimModel(Net().eval(), batch())
    found = {}
    for name, wrapper in sim.quant_wrappers():
        for quantizer in (*wrapper.input_quantizers, *wrapper.output_quantizers, *wrapper.param_quantizers.values()):
            if quantizer and quantizer.enabled:
                found.setdefault(name, []).append(quantizer.bitwidth)
    assert found["conv1"] == [8, 8] and found["fc"] == [8, 8]


def quantized_custom_module():
    import aimet_torch.v2.quantization as Q
    from aimet_torch.v2.nn import QuantizationMixin
    from aimet_torch.v2.quantsim import QuantizationSimModel

    class MaskedAdd(torch.nn.Module):
        def forward(self, x, mask):
            return x + mask

    @QuantizationMixin.implements(MaskedAdd)
    class QuantizedMaskedAdd(QuantizationMixin, MaskedAdd):
        def __quant_init__(self):
            super().__quant_init__()
            self.input_quantizers = torch.nn.ModuleList([None, None])
            self.output_quantizers = torch.nn.ModuleList([None])

        def forward(self, x, mask):
            if self.input_quantizers[0]:
                x = self.input_quantizers[0](x)
            out = super().forward(x, mask)
            if self.output_quantizers[0]:
                out = self.output_quantizers[0](out)
            return out

    QuantizationMixin.ignore(torch.nn.Identity)
    one = QuantizationMixin.from_module(MaskedAdd())
    assert isinstance(one, QuantizedMaskedAdd)
    one.output_quantizers[0] = Q.affine.QuantizeDequantize((), 8, False)
    x = torch.randn(3, 4)
    with one.compute_encodings():
        one(x, x)
    assert (one(x, x) - 2 * x).abs().max() < 0.1

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.add = torch.nn.Linear(4, 4), MaskedAdd()

        def forward(self, x):
            return self.add(self.fc(x), x)

    sim = QuantizationSimModel(Model(), x)
    sim.compute_encodings(lambda model: model(x))
    assert sim.model.add.output_quantizers[0] is not None


def quantized_modules():
    import aimet_torch.quantization as Q
    from aimet_torch.nn import QuantizationMixin, QuantizedConv2d, QuantizedLinear

    linear = torch.nn.Linear(10, 4)
    qlinear = QuantizedLinear.from_module(linear)
    assert qlinear.weight is linear.weight and qlinear.input_quantizers[0] is None
    qlinear.input_quantizers[0] = Q.affine.QuantizeDequantize((), 8, False)
    qlinear.output_quantizers[0] = Q.affine.QuantizeDequantize((), 8, False)
    qlinear.param_quantizers["weight"] = Q.affine.QuantizeDequantize((4, 1), 4, True)
    x = torch.randn(6, 10)
    with qlinear.compute_encodings():
        qlinear(x)
    y = qlinear(x)
    assert isinstance(y, Q.DequantizedTensor) and 0 < (y - linear(x)).abs().max() < 1
    y.sum().backward()
    assert linear.weight.grad is not None and qlinear.param_quantizers["weight"].min.grad is not None
    assert type(qlinear.get_original_module()) is torch.nn.Linear
    assert isinstance(QuantizedConv2d(3, 4, 1), QuantizationMixin) and isinstance(qlinear, torch.nn.Linear)


def quantized_tensor_copies():
    """Tensors that carry their encoding are copied with it."""
    from aimet_torch.quantization import DequantizedTensor, QuantizedTensor, QuantizedTensorBase
    from aimet_torch.quantization.affine import Quantize
    from aimet_torch.quantization.float import FloatQuantizeDequantize

    quantizer = Quantize((), bitwidth=8, symmetric=True)
    quantizer.set_range(-1.0, 1.0)
    codes = quantizer(torch.linspace(-1, 1, 9))
    assert isinstance(codes, QuantizedTensorBase) and isinstance(codes, QuantizedTensor)
    for same in (codes.clone(), codes.detach(), copy.deepcopy(codes.detach())):
        assert isinstance(same, QuantizedTensor) and torch.equal(same.dequantize(), codes.dequantize())
        assert same.quantized_repr().dtype == torch.int8
    values = codes.dequantize()
    assert isinstance(values, DequantizedTensor) and torch.equal(values.quantize(), codes)
    assert isinstance(codes.new_empty((2, 3)), QuantizedTensor) and codes.new_empty((2, 3)).shape == (2, 3)

    # a float quantizer takes the encoding of another one
    half, eight = FloatQuantizeDequantize(dtype=torch.float16), FloatQuantizeDequantize(4, 3)
    half.set_encodings(eight.get_encodings())
    assert (half.exponent_bits, half.mantissa_bits) == (4, 3)


def quantizer_blockwise():
    import aimet_torch.v2.quantization as Q
    from aimet_torch.v2.quantsim import QuantizationSimModel

    x = torch.randn(4, 16)
    sim = QuantizationSimModel(Mlp(), x)
    sim.model.fc2.param_quantizers["weight"] = Q.affine.QuantizeDequantize(
        shape=(16, 4), bitwidth=4, symmetric=True, block_size=(1, 8)
    )
    sim.compute_encodings(lambda model: model(x))
    assert sim.model.fc2.param_quantizers["weight"].get_scale().shape == (16, 4)
    assert sim.model.fc2.param_quantizers["weight"].block_size == (1, 8)


def quantizer_legacy_encodings():
    from aimet_torch import QuantizationSimModel

    sim = QuantizationSimModel(Net().eval(), batch())
    sim.compute_encodings(lambda model: model(batch()))
    (record,) = sim.model.relu1.output_quantizers[0].get_legacy_encodings()
    assert record["bitwidth"] == 8 and record["is_symmetric"] == "False" and record["offset"] <= 0
    weights = sim.model.conv1.param_quantizers["weight"].get_legacy_encodings()
    assert len(weights) == 8 and weights[0]["offset"] == -128
    sim.model.relu1.output_quantizers[0].set_legacy_encodings([{**record, "max": 2 * record["max"]}])
    assert sim.model.relu1.output_quantizers[0].get_max() > record["max"]


def quantizer_none():
    from aimet_torch import QuantizationSimModel

    model, x = Net().eval(), batch()
    sim = QuantizationSimModel(model, x)
    for module in sim.qmodules():
        for i in range(len(module.input_quantizers)):
            module.input_quantizers[i] = None
        for i, _ in enumerate(module.output_quantizers):
            module.output_quantizers[i] = None
        for name in module.param_quantizers:
            module.param_quantizers[name] = None
    assert not list(sim.quantizers())
    assert torch.allclose(sim.model(x), model(x), atol=1e-6)


def quantizer_replace():
    import aimet_torch.quantization as Q
    from aimet_torch import QuantizationSimModel

    sim = QuantizationSimModel(Net().eval(), batch())
    mine = Q.affine.QuantizeDequantize(shape=(), bitwidth=16, symmetric=False)
    sim.model.relu1.output_quantizers[0] = mine
    sim.model.fc.param_quantizers["weight"] = Q.affine.QuantizeDequantize(shape=(10, 1), bitwidth=4, symmetric=True)
    sim.compute_encodings(lambda model: model(batch()))
    assert sim.model.relu1.output_quantizers[0].bitwidth == 16
    assert mine.is_initialized() and mine.get_scale() == sim.model.relu1.output_quantizers[0].get_scale()
    assert sim.model.fc.param_quantizers["weight"].bitwidth == 4


def quantizer_set_range():
    from aimet_torch import QuantizationSimModel

    sim = QuantizationSimModel(Net().eval(), batch())
    quantizer = sim.model.relu2.output_quantizers[0]
    quantizer.set_range(torch.tensor(0.0), torch.tensor(6.0))
    quantizer.allow_overwrite(False)
    sim.compute_encodings(lambda model: model(batch()))
    assert torch.allclose(quantizer.max, torch.tensor(6.0)) and quantizer.min == 0
    with torch.no_grad():
        quantizer.max.copy_(torch.tensor(3.0))  # a parameter
    assert torch.allclose(quantizer.get_max(), torch.tensor(3.0))
    with pytest.raises(ValueError, match="set_range"):
        quantizer.get_min().copy_(torch.tensor(-1.0))  # a value read


def quantizer_symmetric():
    from aimet_torch import QuantizationSimModel

    sim = QuantizationSimModel(Net().eval(), batch())
    sim.model.relu1.output_quantizers[0].symmetric = True
    sim.model.conv2.param_quantizers["weight"].symmetric = False
    sim.compute_encodings(lambda model: model(batch()))
    activation = sim.model.relu1.output_quantizers[0].get_encodings()
    assert activation.symmetry and activation.min == -activation.max - activation.scale
    assert not sim.model.conv2.param_quantizers["weight"].get_encodings().symmetry
