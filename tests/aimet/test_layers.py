"""What the layers for torch and ONNX refuse, and training as scripts for AIMET do it."""

from __future__ import annotations

import copy
import json
import pickle
import re
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.aimet_common.defs import QuantizationDataType, QuantScheme
from bitwright.aimet_common.names import DifferenceWarning
from bitwright.aimet_onnx import QSpec
from bitwright.aimet_onnx import QuantizationSimModel as OnnxSim
from bitwright.aimet_onnx import compute_encodings as onnx_compute_encodings
from bitwright.aimet_onnx.layer_output_utils import LayerOutput
from bitwright.aimet_onnx.quantsim import set_grouped_blockwise_quantization_for_weights as onnx_set_grouped
from bitwright.aimet_onnx.quantsim import set_param_type
from bitwright.aimet_onnx.utils import build_session as onnx_build_session
from bitwright.aimet_torch import QuantizationSimModel
from bitwright.aimet_torch import quantization as Q
from bitwright.aimet_torch.batch_norm_fold import fold_all_batch_norms_to_scale, fold_given_batch_norms
from bitwright.aimet_torch.bn_reestimation import reestimate_bn_stats
from bitwright.aimet_torch.layer_output_utils import LayerOutputUtil as TorchLayerOutputUtil
from bitwright.aimet_torch.layer_output_utils import NamingScheme
from bitwright.aimet_torch.mixed_precision import MixedPrecisionConfigurator
from bitwright.aimet_torch.nn import QuantizationMixin, QuantizedLinear, QuantizedMSELoss, compute_encodings
from bitwright.aimet_torch.nn.modules.custom import Add, MatMul
from bitwright.aimet_torch.quantization.affine import Quantize, QuantizeDequantize
from bitwright.aimet_torch.quantization.tensor import QuantizedTensor
from bitwright.aimet_torch.quantsim import QuantizationSimModel as TorchSim
from bitwright.aimet_torch.quantsim import load_encodings_to_sim
from bitwright.aimet_torch.quantsim.config_utils import set_grouped_blockwise_quantization_for_weights
from bitwright.aimet_torch.utils import remove_all_quantizers
from bitwright.errors import ConfigError, GranularityError, ModelError
from tests.aimet.nets import Net, Residual, batch
from tests.aimet.onnx_nets import feeds, folded


@pytest.fixture
def sim() -> QuantizationSimModel:
    torch.manual_seed(0)
    return QuantizationSimModel(Net().eval(), batch())


def test_unknown_names_are_attribute_errors():
    from bitwright import aimet_torch

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        aimet_torch.quantsim.nonsense  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name"):
        exec("from bitwright.aimet_torch.nn import QuantizedNonsense")


def test_places_that_the_configuration_leaves_out_take_quantizers(sim):
    sim.model.conv1.output_quantizers[0] = None  # as it is
    assert sim.model.conv1.output_quantizers[0] is None
    sim.model.conv1.output_quantizers[0] = Q.affine.QuantizeDequantize((), 4, False)
    sim.model.fc.input_quantizers[0] = Q.affine.QuantizeDequantize((), 3, False)
    seen = {}
    sim.model.bn1.register_forward_pre_hook(lambda _, args: seen.update(conv1=args[0]))
    sim.compute_encodings(lambda model: model(batch()))
    before = sim.model.fc.input_quantizers[0]
    assert (before.bitwidth, sim.model.conv1.output_quantizers[0].bitwidth) == (3, 4) and before.is_initialized()
    sim.model(batch())
    assert len(seen["conv1"].unique()) <= 16
    twin = copy.deepcopy(sim)
    assert torch.equal(twin.model(batch()), sim.model(batch()))
    sim.model.conv1.output_quantizers[0] = None
    sim.model(batch())
    assert len(seen["conv1"].unique()) > 16


def test_tensors_that_the_configuration_leaves_out_are_read_and_switched_on():
    sim = OnnxSim(folded())
    off = [name for name, q in sim.qc_quantize_op_dict.items() if not q.enabled and not name.endswith("bias")]
    assert off and all(sim.qc_quantize_op_dict[name].bitwidth == 8 for name in off)
    assert not set(off) & {site.value for site in sim.quantizers.values()}  # reading adds nothing
    on = {site.value for site in sim.quantizers.values()}
    for name in off:
        sim.qc_quantize_op_dict[name].enabled = True
    sim.qc_quantize_op_dict[off[0]].set_bitwidth(4)
    sim.compute_encodings(feeds())
    table = sim.qc_quantize_op_dict
    assert all(table[name].is_initialized() for name in off) and table[off[0]].get_encodings()[0].bw == 4
    info = table[off[0]].quant_info
    assert (
        info.enabled
        and info.isIntDataType
        and not info.usePerChannelMode
        and info.tensorQuantizerRef[0].isEncodingValid
    )
    weight = table["conv1.weight"].quant_info
    assert weight.usePerChannelMode and weight.channelAxis == 0 and len(weight.encoding) == 8
    output = sim.session.run(None, feeds()[0])[0]
    for name in off:
        table[name].enabled = False
    assert {s.value for s in sim.quantizers.values() if s.enabled} == on
    assert not np.array_equal(output, sim.session.run(None, feeds()[0])[0])


def test_connected_graph_of_a_simulation(sim):
    graph = OnnxSim(folded()).connected_graph
    assert [op.name for op in graph.starting_ops] == ["conv1"] and graph.ordered_ops[-1].get_module().op_type == "Gemm"
    assert sim.connected_graph.get_op_from_module_name("fc").get_module() is sim.model.fc


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key = nn.GroupNorm(2, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.product, self.act = MatMul(), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x).transpose(1, 2)
        return self.act(self.product(self.query(x), self.key(x).transpose(1, 2)))


def grids(sim: TorchSim) -> dict[str, tuple[int, bool]]:
    model = sim.model
    found = {name: getattr(model, name).output_quantizers[0] for name in ("query", "key", "act")}
    found.update({f"norm.{name}": q for name, q in model.norm.param_quantizers.items()})
    return {name: (q.bitwidth, q.symmetric) for name, q in found.items() if q is not None}


@pytest.mark.parametrize(
    ("config", "bits", "key", "norm"),
    [
        ("htp_v73", 16, (16, True), {"norm.weight": (16, False), "norm.bias": (16, False)}),
        ("htp_v73", 8, (8, False), {"norm.weight": (8, False), "norm.bias": (8, False)}),
        ("htp_v66", 16, (8, True), {"norm.weight": (8, True)}),
    ],
)
def test_products_and_group_norms_have_the_grids_of_the_target(config, bits, key, norm):
    # as AIMET 2.42 gives them
    sim = TorchSim(Product().eval(), torch.randn(2, 8, 6), default_output_bw=bits, config_file=config)
    assert grids(sim) == {"query": (bits, False), "key": key, "act": (bits, False), **norm}


@pytest.mark.parametrize("config", ["htp_v66", "htp_v75"])
def test_float16_activations_with_constrained_ranges(config):
    x = torch.randn(2, 8, 6)
    kind = {"default_output_bw": 16, "default_param_bw": 16, "default_data_type": QuantizationDataType.float}
    sim = TorchSim(Product().eval(), x, config_file=config, **kind)
    sim.compute_encodings(lambda model: model(x))
    assert sim.model.act.output_quantizers[0].is_float16() and sim.model(x).isfinite().all()


def test_precisions_of_each_input_and_of_containers():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.add = nn.Linear(4, 4), nn.Linear(4, 4), Add()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(self.add(self.one(x), self.other(x)))

    sim = TorchSim(Twice().eval(), torch.randn(2, 4), config_file="htp_v73")
    asked = MixedPrecisionConfigurator(sim)
    asked.set_precision(sim.model.add, ["int16", None])
    asked.set_precision(sim.model.block, "int16", {"weight": "int8"})
    asked.apply(log_file="")
    bits = {name: getattr(sim.model, name).output_quantizers[0].bitwidth for name in ("one", "other", "add")}
    bits.update({f"block.{i}": sim.model.block[i].output_quantizers[0].bitwidth for i in (1, 2)})
    assert bits == {"one": 16, "other": 8, "add": 16, "block.1": 16, "block.2": 16}
    with pytest.raises(ConfigError, match=r"set_precision\(add\): 1 precisions are given, and there are 2 tensors"):
        asked.set_precision(sim.model.add, ["int16"])


def test_weights_of_batched_products_have_one_scale_per_column():
    weight = np.random.default_rng(0).normal(size=(2, 4, 5)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "batched",
        [onnx.helper.make_tensor_value_info("x", 1, [2, 3, 4])],
        [onnx.helper.make_tensor_value_info("y", 1, [2, 3, 5])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    sim = OnnxSim(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9))
    sim.compute_encodings([{"x": np.ones((2, 3, 4), np.float32)}])
    found = [e.max for e in sim.qc_quantize_op_dict["w"].get_encodings()]
    scale = np.maximum(weight.max((0, 1)) / 127, -weight.min((0, 1)) / 128)
    np.testing.assert_allclose(found, 127 * scale, rtol=1e-5)


def test_replaced_list_of_quantizers_is_refused(sim):
    sim.model.conv1.output_quantizers = nn.ModuleList([None])
    with pytest.raises(ModelError, match="conv1.output_quantizers: it was replaced.*assign its items"):
        sim.compute_encodings(lambda model: model(batch()))


def test_quantizers_that_do_not_fit_are_refused_and_change_nothing(sim):
    weight = sim.model.fc.param_quantizers["weight"]
    with pytest.raises(GranularityError, match="does not fit its tensor"):
        sim.model.fc.param_quantizers["weight"] = Q.affine.QuantizeDequantize((3, 1), 8, True)
    with pytest.raises(ConfigError, match=r"block_grouping \(1, 2\).*let all blocks of a channel"):
        sim.model.fc.param_quantizers["weight"] = Q.affine.GroupedBlockQuantizeDequantize(
            (10, 4), 4, True, 8, block_size=(1, 50), block_grouping=(1, 2)
        )
    with pytest.raises(ConfigError, match=r"multiples of 1 bits.*8 for 4"):
        set_grouped_blockwise_quantization_for_weights(sim, [nn.Linear], 4, True, 5, 50)
    with pytest.raises(TypeError, match="not a Linear"):
        sim.model.fc.param_quantizers["weight"] = nn.Linear(2, 2)
    assert weight.bitwidth == 8 and weight.shape == (10, 1)
    with pytest.raises(ConfigError, match="assign None"):
        del sim.model.fc.param_quantizers["weight"]


def test_quantizer_of_another_place_is_copied_with_a_warning(sim):
    sim.model.relu1.output_quantizers[0].bitwidth = 16
    with pytest.warns(DifferenceWarning, match="is copied"):
        sim.model.relu2.output_quantizers[0] = sim.model.relu1.output_quantizers[0]
    assert sim.model.relu2.output_quantizers[0].bitwidth == 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.model.relu2.output_quantizers[0] = sim.model.relu2.output_quantizers[0]


def test_assigned_quantizer_stands_for_the_place_also_in_copies(sim):
    mine = Q.affine.QuantizeDequantize((), 8, False)
    sim.model.relu1.output_quantizers[0] = mine
    sim.compute_encodings(lambda model: model(batch()))
    mine.bitwidth = 4
    assert sim.model.relu1.output_quantizers[0].bitwidth == 4
    twin = copy.deepcopy(mine)
    twin.bitwidth = 8
    assert sim.model.relu1.output_quantizers[0].bitwidth == 4


def test_codes_of_a_quantizer_that_stands_for_a_place_are_those_of_the_place(sim):
    quantizer = Q.affine.Quantize((), 8, False)
    sim.model.relu1.output_quantizers[0] = quantizer
    sim.compute_encodings(lambda model: model(batch()))
    place, x = sim.model.relu1.output_quantizers[0], torch.rand(3, 5)
    codes = quantizer(x)
    assert codes.quantized_repr().dtype == torch.uint8 and torch.equal(codes.dequantize(), place(x))
    assert torch.equal(quantizer.get_scale(), place.get_scale()) and quantizer.get_max() == place.get_max()


def on_grid(shape: tuple[int, ...] = ()) -> torch.Tensor:
    quantizer = Q.affine.QuantizeDequantize(shape, 8, False)
    quantizer.set_range(0.0, 2.55)
    return quantizer(torch.linspace(0, 2.5, 6).reshape(2, 3)).detach()


@pytest.mark.parametrize("shape", [(), (1, 1)])
@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.chunk(2)[1], lambda t: torch.split(t, 1)[0], lambda t: t.t(), lambda t: t.mT, lambda t: t.T,
        lambda t: t.hsplit(3)[2], lambda t: t.as_strided((2, 2), (1, 2)),
        lambda t: torch.gather(t, 1, torch.tensor([[2], [0]])), lambda t: t.tile(2), lambda t: t.unbind()[1],
        lambda t: torch.index_select(t, 1, torch.tensor([1])), lambda t: t.reshape(6), lambda t: t[0, 1], lambda t: t.flip(0),
        lambda t: t.masked_select(t > 1), lambda t: t.tensor_split(2, 1)[0], lambda t: t.rot90(),
        lambda t: t.swapaxes(0, 1), lambda t: torch.narrow(t, 0, 0, 1), lambda t: t.unfold(1, 2, 1), lambda t: t.movedim(0, 1),
    ],
)  # fmt: skip
def test_elements_that_are_moved_keep_their_encoding(shape, call):
    moved = call(on_grid(shape))
    assert type(moved) is Q.DequantizedTensor
    torch.testing.assert_close(moved.quantize().dequantize().as_subclass(torch.Tensor), moved.as_subclass(torch.Tensor))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.mul_(3), lambda t: t.copy_(t + 9), lambda t: t.fill_(7.0), lambda t: t.__setitem__(0, 5.0),
        lambda t: torch.add(t, 5, out=t), lambda t: torch.nn.functional.relu(t, inplace=True),
    ],
)  # fmt: skip
def test_a_tensor_that_is_written_to_has_no_encoding_any_more(change):
    values = on_grid()
    change(values)
    with pytest.raises(RuntimeError, match="the tensor has no encoding"):
        values.quantize()


@pytest.mark.parametrize("change", [lambda t: t.t_(), lambda t: t.unsqueeze_(0), lambda t: t.resize_(3, 2)])
def test_a_tensor_whose_shape_changes_in_place_is_itself_and_keeps_its_encoding(change):
    values = on_grid()
    encoding = values.encoding
    assert change(values) is values and values.encoding is encoding


def test_a_change_in_place_returns_the_tensor_and_copies_have_encodings_of_their_own():
    values = on_grid()
    twin = values.clone()
    assert twin.encoding is not values.encoding and twin.encoding.scale is not values.encoding.scale
    assert values.mul_(2) is values and values.encoding is None and twin.encoding is not None


def test_elements_that_are_moved_between_channels_lose_their_encoding_and_keep_their_type():
    quantizer = Q.affine.QuantizeDequantize((2, 1), 8, True)
    quantizer.set_range(-1.0, 1.0)
    moved = quantizer(torch.ones(2, 3)).t()
    assert type(moved) is Q.DequantizedTensor and moved.encoding is None


def test_a_state_of_the_range_alone_is_taken_and_halves_that_were_not_set_stay_so():
    quantizer, other = (Q.affine.QuantizeDequantize((3,), 8, True) for _ in range(2))
    quantizer.load_state_dict({"min": torch.full((3,), -2.0), "max": torch.full((3,), 2.0)})
    assert quantizer.is_initialized() and torch.equal(quantizer.get_max(), quantizer.get_scale() * 127)
    with torch.no_grad():
        other.min.mul_(2)
    other.load_state_dict(other.state_dict())
    assert not other.is_initialized()
    with torch.no_grad():
        other.max.mul_(2)
    assert other.is_initialized()


def test_codes_have_the_dtype_of_the_input_or_an_error():
    quantizer = Q.affine.Quantize((), 16, False)
    quantizer.set_range(0.0, 1.0)
    assert quantizer(torch.rand(3)).dtype == torch.float32
    narrow = Q.affine.QuantizeDequantize((), 16, False)
    narrow.set_range(0.0, 1.0)
    assert torch.equal(narrow.half()(torch.tensor([0.0, 2.0])), torch.tensor([0.0, 1.0]))
    with pytest.raises(RuntimeError, match=r"bfloat16 does not hold the codes 0 to 65535"):
        quantizer(torch.rand(3, dtype=torch.bfloat16))


def test_analyzers_of_another_shape_or_without_bins_are_refused():
    from bitwright.aimet_torch.quantization.encoding_analyzer import MinMaxEncodingAnalyzer, SqnrEncodingAnalyzer

    assert MinMaxEncodingAnalyzer(3).shape == (3,)
    with pytest.raises(RuntimeError):
        Q.affine.QuantizeDequantize((2, 3), 8, True, MinMaxEncodingAnalyzer((4,)))
    with pytest.raises(ValueError, match="a histogram has no 0 bins"):
        SqnrEncodingAnalyzer((), 0)


@pytest.mark.parametrize(
    ("shape", "blocks"), [((), None), ((6, 1), None), ((4,), None), ((6, 2), (-1, 2)), ((3, 4), (2, -1))]
)
def test_rows_of_a_quantized_table_have_the_encoding_of_the_table(shape, blocks):
    from bitwright.aimet_torch.nn import QuantizedEmbedding

    table, rows = QuantizedEmbedding(6, 4), torch.tensor([[0, 5], [2, 2]])
    quantizer = table.param_quantizers["weight"] = Q.affine.QuantizeDequantize(shape, 8, True, block_size=blocks)
    table.compute_param_encodings()
    whole, found = quantizer(table.weight), table(rows)
    assert torch.equal(found, whole[rows]) and torch.equal(found.quantize(), whole.quantize()[rows])


def test_modules_compute_with_values_where_quantizers_give_codes():
    from bitwright.aimet_torch.nn import QuantizedLinear

    layers = [QuantizedLinear(4, 4) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x, found = torch.rand(2, 4), []
    for layer, kind in zip(layers, (Q.affine.Quantize, Q.affine.QuantizeDequantize), strict=True):
        layer.input_quantizers[0], layer.output_quantizers[0] = kind((), 8, False), kind((), 8, False)
        layer.param_quantizers["weight"] = kind((4, 1), 8, True)
        with layer.compute_encodings():
            layer(x)
        found.append(layer(layer.input_quantizers[0](x)))
    assert type(found[0]) is Q.DequantizedTensor and torch.equal(*found)


def test_what_computes_on_tensors_with_encodings_returns_ordinary_ones():
    values = on_grid()
    for found in (values + 1, values.softmax(0), torch.cat([values, values]), values.sum(), *values.max(0)):
        assert type(found) is torch.Tensor
    assert values.quantize().quantized_repr().dtype == torch.uint8  # and it is as it was


def test_encodings_keep_their_kind_and_all_their_tensors_when_they_are_moved():
    quantizer = Q.affine.GroupedBlockQuantizeDequantize((4, 2), 4, True, 8, block_size=(1, 8), block_grouping=(1, -1))
    with quantizer.compute_encodings():
        quantizer(torch.randn(4, 16))
    moved = quantizer.get_encodings().to(torch.float64)
    assert moved.per_channel_scale.dtype == moved.scale.dtype == moved.offset.dtype == torch.float64
    assert torch.equal(moved.per_block_int_scale, quantizer.get_encodings().per_block_int_scale.double())
    assert type(quantizer(torch.randn(4, 16)).encoding) is type(moved)


@pytest.mark.parametrize(
    "args, kwargs, ends",
    [
        ((-8, 7), {}, (-8, 7)),
        ((4, True), {}, (-8, 7)),
        ((4,), {}, (0, 15)),
        ((4,), {"signed": True}, (-8, 7)),
        ((), {"num_steps": 14, "signed": True}, (-7, 7)),
        ((), {"qmin": -8, "qmax": 7}, (-8, 7)),
        ((), {"bitwidth": 4}, (0, 15)),
    ],
)
def test_a_grid_is_given_to_functions_and_encodings_in_the_same_forms(args, kwargs, ends):
    x, scale, offset = torch.linspace(-4, 4, 64), torch.tensor(0.25), torch.tensor(0.0)
    codes = Q.affine.quantize(x, scale, offset, *args, **kwargs)
    assert (codes.min(), codes.max()) == ends
    encoding = Q.affine.AffineEncoding(scale, offset, *args, **kwargs)
    assert (encoding.qmin, encoding.qmax) == ends and torch.equal(encoding.quantize(x), codes)
    blocks = Q.affine.quantize(
        x.reshape(4, 16), torch.full((4, 2), 0.25), torch.zeros(4, 2), *args, block_size=(1, 8), **kwargs
    )
    assert torch.equal(blocks.flatten(), codes)
    with pytest.raises(TypeError, match="unknown arguments.*the grid is one of"):
        Q.affine.quantize(x, scale, offset, *args, bits=3, **kwargs)


def test_a_grid_that_is_not_given_names_the_forms():
    with pytest.raises(TypeError, match="give the grid as one of: qmin, qmax; bitwidth"):
        Q.affine.quantize(torch.ones(2), torch.tensor(1.0), torch.tensor(0.0))
    with pytest.raises(ConfigError, match="zero_point_shift: 0.5: codes between the integers"):
        Q.affine.QuantizeDequantize((), 0, 15, False, zero_point_shift=0.5)


def test_module_with_quantizers_of_its_own_is_refused_in_a_simulation():
    layer = QuantizedLinear(4, 4)
    QuantizationSimModel(nn.Sequential(layer), torch.randn(1, 4))  # without quantizers it is a plain layer
    layer.input_quantizers[0] = Q.affine.QuantizeDequantize((), 8, False)
    with pytest.raises(ModelError, match="it has quantizers of its own.*get_original_module"):
        QuantizationSimModel(nn.Sequential(layer), torch.randn(1, 4))
    with pytest.raises(RuntimeError, match="QuantizationMixin.implements"):
        QuantizationMixin.from_module(nn.Sequential(nn.Linear(1, 1)))


def test_recurrent_weights_are_quantized_in_modules_of_their_own():
    torch.manual_seed(0)
    layer = QuantizationMixin.from_module(nn.LSTM(4, 4))
    x = torch.randn(3, 2, 4)
    before = layer(x)[0]
    layer.param_quantizers["weight_ih_l0"] = Q.affine.QuantizeDequantize((), 2, True)
    layer.compute_param_encodings()
    assert not torch.equal(layer(x)[0], before)
    layer.param_quantizers["weight_ih_l0"] = None
    assert torch.equal(layer(x)[0], before)


def test_calibration_of_a_part_keeps_all_other_encodings(sim):
    sim.compute_encodings(lambda model: model(batch()))
    first = sim.model.relu1.output_quantizers[0].get_scale().clone()
    second = sim.model.relu2.output_quantizers[0].get_scale().clone()
    with compute_encodings(sim.model.relu2):
        sim.model(5 * batch())
    assert torch.equal(sim.model.relu1.output_quantizers[0].get_scale(), first)
    assert sim.model.relu2.output_quantizers[0].get_scale() > second
    with pytest.raises(ModelError, match="is not a module of a simulation"):
        with compute_encodings(nn.Linear(1, 1)):
            pass


def test_functional_calls_are_reached_by_names_and_by_removal():
    x = torch.randn(1, 3, 8, 8)
    sim = QuantizationSimModel(Residual(), x)
    names = dict(sim.named_quantizers())
    inside = "conv2.input_quantizers.0"  # conv2 reads what ``+`` computes
    assert names[inside].bitwidth == 8 and not any(name.startswith("add") for name in names)
    from bitwright.aimet_torch.utils import remove_activation_quantizers

    with remove_activation_quantizers(sim.model):
        assert inside not in dict(sim.named_quantizers())
    assert inside in dict(sim.named_quantizers())


def test_what_a_functional_call_computes_has_its_quantizer_at_the_module_that_reads_it():
    x = torch.randn(1, 3, 8, 8)
    sim = QuantizationSimModel(Residual(), x)
    (site,) = [s for s in sim.quantizers.values() if s.op.startswith("add") and s.role == "output"]
    sim.model.conv2.input_quantizers[0].bitwidth = 5
    assert site.spec.format.bits == 5
    sim.model.conv2.input_quantizers[0] = None
    assert not site.enabled


@pytest.mark.parametrize("asked", [True, False])
def test_inputs_that_a_configuration_asks_for_show_what_computes_them(asked: bool):
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.matmul = nn.ReLU(), MatMul()

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.matmul(a, self.relu(b).reshape(3, 2))

    op_type = {"MatMul": {"is_input_quantized": "True"}} if asked else {}
    empty = dict.fromkeys(("params", "model_input", "model_output"), {})
    defaults = {"ops": {"is_output_quantized": "True"}, "params": {}, "hw_version": "default"}
    config = {"defaults": defaults, "op_type": op_type, "supergroups": [], **empty}
    sim = QuantizationSimModel(Product(), (torch.randn(2, 3), torch.randn(3, 2)), config_file=config)
    seen = sim.model.matmul.input_quantizers[1]
    assert (seen is not None) == asked
    with remove_all_quantizers(sim.model.matmul):
        assert sim.model.relu.output_quantizers[0] is not None  # which is not of ``matmul``


@pytest.mark.parametrize(("version", "bits"), [("V66", 8), ("V73", 16), ("default", 16)])
def test_operands_of_products_are_fitted_behind_what_has_no_quantizer(version: str, bits: int):
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tanh, self.relu, self.matmul = nn.Tanh(), nn.ReLU(), MatMul()

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.matmul(self.tanh(a), self.relu(self.tanh(b)).reshape(3, 2))

    ops = {"Relu": {"is_output_quantized": "False"}}
    empty = dict.fromkeys(("params", "model_input", "model_output"), {})
    defaults = {"ops": {"is_output_quantized": "True"}, "params": {}, "hw_version": version}
    config = {"defaults": defaults, "op_type": ops, "supergroups": [], **empty}
    x = (torch.randn(2, 3), torch.randn(3, 2))
    sim = QuantizationSimModel(Product(), x, config_file=config, default_output_bw=16)
    _, behind = (s for s in sim.quantizers.values() if s.op.startswith("tanh") and s.role == "output")
    assert behind.spec.format.bits == bits and (behind.spec.symmetry == "symmetric") == (version != "default")


@pytest.mark.parametrize("bits", [4, 31])
def test_onnx_sequential_mse_freezes_weights_of_every_width(bits: int):
    from bitwright.aimet_onnx.sequential_mse.seq_mse import SeqMseParams, SequentialMse

    model = folded()
    sim = OnnxSim(copy.deepcopy(model), default_param_bw=bits)
    searched = SequentialMse(model, sim, SeqMseParams(num_batches=1, num_candidates=2), feeds())
    searched.apply_seq_mse_algo()
    assert searched.sim is sim
    weights = [site.quantizer for site in sim.quantizers.values() if site.role == "weight"]
    assert weights and all(quantizer.frozen for quantizer in weights)


class Mapped(nn.Module):
    """Reads one mapping."""

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return given["a"] * given["b"]


def test_an_example_may_be_the_mapping_that_a_model_reads():
    given = {"a": torch.randn(2, 3), "b": torch.randn(2, 3)}
    sim = QuantizationSimModel(Mapped(), given)
    sim.compute_encodings(lambda model, args: model(args), given)
    assert sim.model(given).shape == (2, 3)


def test_statistics_of_batch_norms_stay_while_several_simulations_are_calibrated():
    from bitwright.aimet_torch.quantsim import compute_encodings_for_sims

    x = torch.randn(4, 3, 8, 8)
    sims = [QuantizationSimModel(nn.Sequential(nn.BatchNorm2d(3)).train(), x) for _ in range(2)]
    sims[1].model.train()
    compute_encodings_for_sims(sims, lambda models, _: models[1](models[0](x)), None)
    assert all((sim.model[0].running_mean == 0).all() for sim in sims) and sims[1].model.training


def test_our_own_calls_work_on_the_layers_simulation(sim):
    from bitwright.torch import apply_gptq

    sim.compute_encodings([batch()])
    apply_gptq(sim, [batch()], progress=False)
    assert sim.coverage() and sim.health() and sim.quantizers["conv1.weight"].frozen


def test_copies_of_a_model_and_of_its_simulation(sim):
    sim.compute_encodings(lambda model: model(batch()))
    alone = copy.deepcopy(sim.model)
    assert torch.equal(alone(batch()), sim.model(batch()))
    for twin in (alone, copy.deepcopy(sim).model):
        with compute_encodings(twin):
            twin(3 * batch())
        wider = twin.relu1.output_quantizers[0].get_scale()
        assert wider > sim.model.relu1.output_quantizers[0].get_scale()


class Attention(nn.Module):
    """Attention by a function, whose parts have quantizers, between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) * 0.5


def test_one_block_per_channel_is_grouped_too():
    sim = QuantizationSimModel(nn.Linear(8, 6), torch.randn(2, 8))
    set_grouped_blockwise_quantization_for_weights(sim, [nn.Linear], 4, True, 8, 8)
    sim.compute_encodings(lambda model: model(torch.randn(2, 8)))
    encoding = sim.model.param_quantizers["weight"].get_encodings()
    assert torch.equal(encoding.per_block_int_scale, torch.full((6, 1), 16.0))
    assert encoding.per_channel_scale.shape == (6, 1)


def test_parts_of_a_function_belong_to_the_module_that_calls_it():
    x = torch.randn(2, 5, 8)
    sim = QuantizationSimModel(nn.Sequential(Attention(), nn.Linear(8, 3)), x)
    inner = [name for name in sim.quantizers if "attention" in name]
    assert inner, "the function's parts have sites"
    with compute_encodings(sim.model):  # all of the model: nothing is kept
        sim.model(x)
    assert sim.calibrated
    sim.exclude_layers_from_quantization([sim.model[0]])
    assert not any(site.enabled for name, site in sim.quantizers.items() if name.startswith("0."))


def test_error_of_an_unknown_module_has_its_classes():
    from torch import nn

    from bitwright.aimet_torch.nn import QuantizationMixin, UnknownModuleError

    with pytest.raises(RuntimeError, match=r"Sequential: .*Remedy: write one") as caught:
        QuantizationMixin.from_module(nn.Sequential(nn.Linear(1, 1)))
    code = caught.value.generate_code_example()
    made: dict[str, type] = {"Sequential": type("Sequential", (nn.Module,), {}), "QuantizationMixin": QuantizationMixin}
    exec(code, made)
    assert issubclass(made["QuantizedSequential"], QuantizationMixin)
    assert isinstance(caught.value, UnknownModuleError)
    assert (caught.value.module_cls, caught.value.mixin_cls) == (nn.Sequential, QuantizationMixin)
    assert str(UnknownModuleError(nn.Sequential, QuantizationMixin)) == str(caught.value)


def test_arch_checker_keeps_no_folder_for_the_process():
    from bitwright.aimet_torch.arch_checker import ArchChecker

    with pytest.raises(ValueError, match=r"result_dir='here'"):
        ArchChecker.set_export_dir("here")


X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def make(scheme: object) -> TorchSim:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    model.train()(X)  # running statistics
    sim = TorchSim(model.eval(), X, scheme, default_param_bw=4)
    sim.compute_encodings(lambda m: m(X))
    return sim


@pytest.mark.parametrize(
    "load",
    [load_encodings_to_sim, QuantizationSimModel.load_encodings, QuantizationSimModel.set_and_freeze_param_encodings],
    ids=["load_encodings_to_sim", "load_encodings", "set_and_freeze_param_encodings"],
)
def test_encodings_of_another_model_are_a_runtime_error_and_change_nothing(sim, load):
    record = {
        "bitwidth": 8,
        "dtype": "int",
        "is_symmetric": "False",
        "max": 2.55,
        "min": 0.0,
        "offset": 0,
        "scale": 0.01,
    }
    file = {"version": "0.6.1", "activation_encodings": {}, "param_encodings": {"nowhere.weight": [record]}}
    before = {name: (site.enabled, site.encoding) for name, site in sim.quantizers.items()}
    with pytest.raises(RuntimeError, match="nowhere"):
        load(sim, file)
    assert before == {name: (site.enabled, site.encoding) for name, site in sim.quantizers.items()}


@pytest.mark.parametrize(
    "grid, record",
    [
        (((), 0, 255, False), {"output_dtype": "uint8", "y_scale": 0.5, "y_zero_point": 2}),
        (((), -128, 127, True), {"output_dtype": "int8", "y_scale": 0.5}),
        (((3, 1), -8, 7, True), {"output_dtype": "int4", "y_scale": [0.5] * 3, "axis": 0}),
        (
            ((2, 2), -8, 7, True, (1, 4)),
            {"output_dtype": "int4", "y_scale": [[0.5] * 2] * 2, "axis": 1, "block_size": 4},
        ),
    ],
    ids=["asymmetric", "symmetric", "per-channel", "blocks"],
)
def test_encodings_of_version_2_are_written_and_read(grid, record):
    shape, qmin, qmax, symmetric, *blocks = grid
    offset = torch.full(shape, 0.0 if symmetric else -2.0)
    encoding = Q.affine.AffineEncoding(torch.full(shape, 0.5), offset, qmin, qmax, symmetric, *blocks)
    assert encoding.to_qnn_encoding_dict("2.0.0") == record
    for version in ("0.6.1", "1.0.0", "2.0.0") if not blocks else ("2.0.0",):
        again = type(encoding).from_qnn_encoding_dict(encoding.to_qnn_encoding_dict(version), ndim=len(shape) or None)
        assert torch.equal(again.min, encoding.min) and torch.equal(again.max, encoding.max)
        assert (again.qmin, again.qmax, again.symmetry, again.block_size) == (
            qmin,
            qmax,
            symmetric,
            *(blocks or (None,)),
        )
    with pytest.raises(RuntimeError, match="version '3.0.0' is not known"):
        encoding.to_qnn_encoding_dict("3.0.0")


def test_factors_of_block_scales_are_kept_in_version_2():
    quantizer = Q.affine.GroupedBlockQuantizeDequantize((4, 3), 4, True, 8, block_size=(1, 8), block_grouping=(1, 3))
    quantizer.set_range(-torch.rand(4, 3) - 0.1, torch.rand(4, 3) + 0.1)
    encoding = quantizer.get_encodings()
    record = encoding.to_qnn_encoding_dict("2.0.0")
    assert set(record) == {"output_dtype", "per_block_int_scale", "per_channel_float_scale", "axis", "block_size"}
    again = Q.affine.AffineEncoding.from_qnn_encoding_dict(record)
    assert torch.equal(again.scale, encoding.scale) and again.decompressed_bw == 8


def test_quantizers_of_onnx_export_version_2(onnx_sim):
    onnx_sim.compute_encodings(feeds())
    weight = onnx_sim.qc_quantize_op_dict[
        next(n for n, q in onnx_sim.get_qc_quantize_op().items() if len(q.get_encodings() or ()) > 1)
    ]
    record = weight.export_encodings("2.0.0")
    assert record["output_dtype"] == "int8" and record["axis"] == 0
    assert record["y_scale"] == [e.delta for e in weight.get_encodings()]
    with pytest.raises(RuntimeError, match="version '3' is not known"):
        weight.export_encodings("3")


@pytest.mark.parametrize("scheme", [QuantScheme.training_range_learning_with_tf_init, QuantScheme.post_training_tf])
def test_ranges_are_parameters_of_the_model_and_train_with_it(scheme):
    sim = QuantizationSimModel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), X, quant_scheme=scheme)
    names = [name for name, _ in sim.model.named_parameters() if "quantizers" in name]
    assert names == [
        f"{place}.{end}"
        for place in ("0.param_quantizers.weight", "0.input_quantizers.0", "1.output_quantizers.0")
        for end in ("min", "max")
    ]
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.1)  # before there are ranges
    sim.compute_encodings(lambda m: m(X))
    before = {name: (q.get_min(), q.get_max()) for name, q in sim.named_quantizers()}
    frozen = sim.model[0].input_quantizers[0].requires_grad_(False)
    sim.model(X).square().mean().backward()
    optimizer.step()
    moved = [n for n, q in sim.named_quantizers() if not all(map(torch.equal, before[n], (q.get_min(), q.get_max())))]
    assert moved == ["0.param_quantizers.weight", "1.output_quantizers.0"] and frozen.min.grad is None


@pytest.mark.parametrize("place", ["input_quantizers.0", "param_quantizers.weight"])
def test_gradients_of_ends_are_those_of_the_quantizer_alone(place):
    """Both with the derivatives of AIMET's quantizers: rounding passes straight through."""
    sim = QuantizationSimModel(nn.Linear(8, 16).eval(), torch.randn(32, 8), default_param_bw=4)
    values = torch.randn(16, 8)
    sim.compute_encodings(lambda m: m(torch.randn(32, 8)))
    own = sim.model.get_submodule(place)
    assert isinstance(own, Q.base.QuantizerBase) and isinstance(own, Q.affine.QuantizeDequantize)
    with torch.no_grad():
        own.min.mul_(0.7)
        own.max.mul_(0.6)
    alone = Q.affine.QuantizeDequantize(tuple(own.shape), own.bitwidth, own.symmetric)
    alone.set_range(own.min, own.max)
    one, other = (values.clone().requires_grad_() for _ in range(2))
    upstream = torch.randn(16, 8)
    out = own.sites[0].quantizer(one)
    torch.testing.assert_close(out, alone(other).as_subclass(torch.Tensor))
    out.backward(upstream)
    alone(other).backward(upstream)
    torch.testing.assert_close(one.grad, other.grad.as_subclass(torch.Tensor))
    for end in ("min", "max"):
        assert bool(getattr(alone, end).grad.abs().max() > 0.1)
        torch.testing.assert_close(getattr(own, end).grad, getattr(alone, end).grad)


def test_state_of_quantizers_is_saved_and_loaded_under_names_of_aimet(tmp_path):
    sim = make(QuantScheme.post_training_tf)
    with torch.no_grad():
        sim.model[0].param_quantizers["weight"].max.mul_(0.5)
        wanted = sim.model(X)
    torch.save(sim.model.state_dict(), tmp_path / "state.pth")
    again = QuantizationSimModel(sim.get_original_model(sim.model), X, default_param_bw=4)
    state = torch.load(tmp_path / "state.pth")
    again.model.load_state_dict({name: value for name, value in state.items() if not name.endswith("_extra_state")})
    with torch.no_grad():
        assert torch.equal(again.model(X), wanted)
    torch.save(sim.model, tmp_path / "model.pth")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "model.pth", weights_only=False)(X), wanted)
    own = {name for name in state if "quantizers" in name}
    assert sim.quantizer_state_dict().keys() == own and {n.rpartition(".")[2] for n in own} == {
        "min",
        "max",
        "_extra_state",
    }
    with pytest.raises(RuntimeError, match="size mismatch for 0.param_quantizers.weight.min"):
        again.model.load_state_dict({**state, "0.param_quantizers.weight.min": torch.ones(3)})


def test_a_layer_of_one_output_channel_is_quantized_per_channel(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    sim = QuantizationSimModel(nn.Sequential(nn.Conv2d(3, 1, 3), nn.Flatten(), nn.Linear(16, 1)).eval(), x)
    sim.compute_encodings(lambda model: model(x))
    for layer, shape in ((0, (1, 1, 1, 1)), (2, (1, 1))):
        quantizer = sim.model[layer].param_quantizers["weight"]
        assert quantizer.shape == quantizer.min.shape == quantizer.get_scale().shape == shape
    sim.export(tmp_path, "m", x)
    records = json.loads((tmp_path / "m.encodings").read_text())["param_encodings"]
    assert {r["enc_type"] for r in records if r["name"].endswith("weight")} == {"PER_CHANNEL"}
    found = onnxruntime.InferenceSession(tmp_path / "m_qdq.onnx").run(None, {"input": x.numpy()})[0]
    np.testing.assert_allclose(found, sim.model(x).detach(), atol=1e-6)
    sim.model[0].param_quantizers["weight"] = QuantizeDequantize((1, 1, 1, 1), 4, True)
    assert sim.model[0].param_quantizers["weight"].shape == (1, 1, 1, 1)


class Twice(nn.Module):
    """A module that is called twice with values of other ranges, and calls of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.first(x))
        z = self.relu(self.second(y) * 20)
        return torch.sigmoid(y + z) - y


def test_state_holds_the_ranges_of_every_call_and_of_functions(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Twice(), Twice()).eval()
    x = torch.randn(8, 5)
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings(lambda model: model(x))
    torch.save(sim.model.state_dict(), tmp_path / "state.pth")
    state, wanted = torch.load(tmp_path / "state.pth"), sim.model(x)
    again = QuantizationSimModel(model, x)
    again.model.load_state_dict(state)
    assert again.calibrated and torch.equal(again.model(x), wanted)
    half = QuantizationSimModel(model, x)
    half.model[0].load_state_dict(sim.model[0].state_dict())
    known = {name for name, site in half.quantizers.items() if site.encoding is not None}
    assert {name for name in half.quantizers if name.startswith("0.")} <= known | {"0.first.bias", "0.second.bias"}
    assert not any(name.startswith("1.") for name in known)
    half.model.load_state_dict(sim.quantizer_state_dict(), strict=False)
    assert torch.equal(half.model(x), wanted)
    plain = {name: value for name, value in state.items() if "calls." not in name and "call_quantizers" not in name}
    assert str(half.model.load_state_dict(plain)) == "<All keys matched successfully>"  # a state that AIMET wrote
    original = sim.get_original_model(sim.model)
    assert original.state_dict().keys() == model.state_dict().keys()
    assert not original[0]._state_dict_hooks and not original[0]._load_state_dict_pre_hooks


def test_loaded_and_frozen_encodings_do_not_train():
    sim = make(QuantScheme.post_training_tf)
    record = {
        "bitwidth": 8,
        "dtype": "int",
        "is_symmetric": "False",
        "max": 2.55,
        "min": 0.0,
        "offset": 0,
        "scale": 0.01,
    }
    sim.load_and_freeze_encodings({"activation_encodings": {"2": {"output": {"0": record}}}, "param_encodings": {}})
    train = [name for name, p in sim.model.named_parameters() if "quantizers" in name and p.requires_grad]
    assert train and not any(name.startswith("2.output_quantizers") for name in train)


class Between(nn.Module):
    """A sum that no module reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.conv(x) + x) * x


def test_ranges_inside_of_forwards_train_when_their_parameters_are_asked_for():
    x = batch()
    sim = QuantizationSimModel(Between().eval(), x)
    sim.compute_encodings(lambda m: m(x))
    of_model = {id(p) for p in sim.model.parameters()}
    inside = {name: p for name, p in sim.named_quantizer_parameters() if id(p) not in of_model}
    assert inside and not any("quantizers" in name for name in inside)
    sim.model(x).square().mean().backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in inside.values())


def test_batch_norms_are_estimated_anew_and_folded_into_scales():
    sim = make(QuantScheme.post_training_tf)
    conv, norm = sim.model[0], sim.model[1]
    mean = norm.running_mean.clone()
    handle = reestimate_bn_stats(sim.model, [X, X], num_batches=2)
    assert not torch.equal(norm.running_mean, mean)
    handle.remove()
    assert torch.equal(norm.running_mean, mean)
    with torch.no_grad():
        before = sim.model(X)
    pairs = fold_all_batch_norms_to_scale(sim)
    assert list(pairs) == [(conv, norm)] and isinstance(sim.model[1], nn.Identity)
    with torch.no_grad():
        after = sim.model(X)
    assert sim.model[0].param_quantizers["weight"].bitwidth == 4
    assert float((after - before).abs().max()) < 0.05 * float(before.abs().max())


@pytest.mark.slow
def test_pivot_gradients_of_a_thread_reach_compiled_models():
    import threading

    from bitwright.aimet_torch.experimental.pgs import disable_pgs, enable_pgs, is_pgs_enabled

    torch.manual_seed(0)
    x = torch.randn(8, 4)
    sim = TorchSim(nn.Linear(4, 4).eval(), x, default_param_bw=4)
    sim.compute_encodings(lambda m: m(x))
    compiled = torch.compile(sim.model, backend="aot_eager")

    def gradient(model):
        sim.model.zero_grad()
        model(x).square().sum().backward()
        return sim.model.weight.grad.clone()

    plain = gradient(compiled)
    try:
        for multiplier in (3.0, 5.0):  # changed after compiling
            enable_pgs(eps=0.5, multiplier=multiplier)
            spiked = gradient(sim.model)
            assert not torch.allclose(spiked, plain)
            torch.testing.assert_close(gradient(compiled), spiked)
        elsewhere = []
        other = threading.Thread(target=lambda: elsewhere.append(is_pgs_enabled()))
        other.start()
        other.join()
        assert elsewhere == [False]
    finally:
        disable_pgs()
    torch.testing.assert_close(gradient(compiled), plain)


@pytest.fixture
def onnx_sim() -> OnnxSim:
    return OnnxSim(folded())


def test_precision_of_several_tensors_is_all_or_nothing(onnx_sim):
    with pytest.raises(ConfigError, match="no quantizer in effect at 'nothing'"):
        onnx_sim.set_tensor_precision(["input", "nothing"], "int16")
    assert onnx_sim.qc_quantize_op_dict["input"].bitwidth == 8


def test_what_cannot_be_simulated_is_refused(onnx_sim):
    with pytest.raises(ConfigError, match=r"LPBQ.*go with symmetric integer grids"):
        set_param_type(onnx_sim, QSpec.lpbq("float16", 8), strict=False)
    with pytest.raises(ConfigError, match=r"multiples of 1 bits"):
        onnx_set_grouped(onnx_sim, "Gemm", 4, 5, 8)
    with pytest.raises(ConfigError, match="shifted zero points"):
        set_param_type(onnx_sim, "int4", shift_zero_point=True)
    with pytest.raises(ConfigError, match="there are no nodes"):
        set_param_type(onnx_sim, "int4", nodes_to_include={"nobody"})
    with pytest.raises(ConfigError, match="there is no node 'nobody'"):
        onnx_sim.get_op_quantizers("nobody")


def test_model_of_an_onnx_simulation_computes_the_simulation(onnx_sim):
    feed = feeds()[0]
    assert onnx_sim.model.model == folded(), "nothing is calibrated"
    onnx_sim.compute_encodings(feeds())
    (wanted,) = onnx_sim.session.run(None, feed)
    (inside,) = onnx_build_session(onnx_sim.model.model, ["CPUExecutionProvider"]).run(None, feed)
    assert np.array_equal(inside, wanted)
    assert onnx_sim.remove_quantizers(onnx_sim.model).model == folded()
    found, simulated = (LayerOutput(model, "").get_outputs(feed) for model in (onnx_sim.model.model, onnx_sim))
    assert list(found) == list(simulated) and np.array_equal(found["output"], wanted)
    float_outputs = LayerOutput(folded(), "").get_outputs(feed)
    for name, value in found.items():
        np.testing.assert_allclose(value, simulated[name], atol=1e-5)
        assert not np.array_equal(value, float_outputs[name])


def test_session_is_the_simulation_again_after_the_block(onnx_sim):
    with onnx_compute_encodings(onnx_sim):
        inside = onnx_sim.session.run(None, feeds()[0])[0]
    outside = onnx_sim.session.run(None, feeds()[0])[0]
    assert inside.shape == outside.shape and not np.array_equal(inside, outside)
    with pytest.raises(ZeroDivisionError):
        with onnx_compute_encodings(onnx_sim):
            1 / 0  # noqa: B018
    assert np.array_equal(onnx_sim.session.run(None, feeds()[0])[0], outside)


def test_our_own_calls_work_on_the_onnx_layers_simulation(onnx_sim):
    from bitwright.onnx import apply_gptq

    onnx_sim.compute_encodings(feeds(), progress=False)
    apply_gptq(onnx_sim, feeds(), progress=False)
    assert onnx_sim.coverage() and onnx_sim.health() and onnx_sim.quantizers["conv1.weight"].frozen


def test_example_made_up_for_a_simulation_is_not_called_calibration(caplog):
    from bitwright.aimet_onnx.utils import make_dummy_input

    onnx_sim = OnnxSim(folded())
    onnx_sim.example()
    make_dummy_input(folded())
    onnx_sim.compute_encodings(feeds())
    assert "random data" not in caplog.text


# ------------------------------------------------------------------------------------ helpers that scripts import


@pytest.mark.parametrize("batch", [torch.arange(3), (torch.ones(2), torch.zeros(1)), {"a": torch.ones(2, 2)}])
def test_batches_are_cached_in_files(batch, tmp_path):
    from bitwright.aimet_torch.utils import CachedDataset

    data = CachedDataset([batch, batch, batch], 2, str(tmp_path / "cache"))
    again = CachedDataset(None, 2, str(tmp_path / "cache"))
    for found in (*data, *again):
        torch.testing.assert_close(found, batch)
    assert len(data) == len(again) == 2
    with pytest.raises(ValueError, match="2 batches are there, 5 are asked for"):
        CachedDataset(None, 5, str(tmp_path / "cache"))


def test_onnx_helpers_of_scripts(onnx_sim, tmp_path):
    from bitwright.aimet_onnx.utils import CachedDataset, ParamUtils, disable_quantizers

    model = folded()
    conv = model.graph.node[0]
    assert ParamUtils.get_shape(model, conv, 1) == list(ParamUtils.get_param(model, conv, 1).dims)
    assert ParamUtils.get_param(model, conv, 0) is None
    data = CachedDataset(feeds(), 2, str(tmp_path))
    assert all(np.array_equal(found["input"], feed["input"]) for found, feed in zip(data, feeds(), strict=False))
    weights = [name for name in onnx_sim.param_names if onnx_sim.qc_quantize_op_dict[name].enabled]
    with disable_quantizers(onnx_sim, weights):
        assert not any(onnx_sim.qc_quantize_op_dict[name].enabled for name in weights)
    assert all(onnx_sim.qc_quantize_op_dict[name].enabled for name in weights)
    with pytest.raises(RuntimeError, match="there are no tensors"), disable_quantizers(onnx_sim, ["nowhere"]):
        pass


@pytest.mark.parametrize("lowest, wanted", [(0.0, "Relu"), (-1.0, "Clip")])
def test_clip_between_convolutions_becomes_relu_where_it_begins_at_zero(lowest, wanted):
    import onnx

    from bitwright.aimet_onnx.utils import replace_relu6_with_relu

    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[1,2,4,4] x) => (float[1,2,4,4] y) <
        float[2,2,1,1] w = {1, 0, 0, 1}, float lo = {%f}, float hi = {6}> { a = Conv(x, w) b = Clip(a, lo, hi) y = Conv(b, w) }"""
    model = onnx.parser.parse_model(text % lowest)
    replace_relu6_with_relu(model)
    assert model.graph.node[1].op_type == wanted
    onnx.checker.check_model(model)


def test_version_of_files_is_set_for_the_process_as_in_aimet(sim, tmp_path, monkeypatch):
    from bitwright.aimet_common import quantsim

    sim.compute_encodings(lambda model: model(batch()))
    monkeypatch.setattr(quantsim, "encoding_version", "2.0.0", raising=False)
    sim.save_encodings_to_json(tmp_path, "net")
    assert '"version": "2.0.0"' in (tmp_path / "net.json").read_text()


def test_weights_are_clipped_and_second_operands_get_eight_symmetric_bits():
    from bitwright.aimet_torch.v2.experimental import (
        clip_weights_to_7f7f,
        set_matmul_second_input_producer_to_8bit_symmetric,
    )

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) @ self.k(x).transpose(-1, -2)

    x = torch.randn(2, 4, 8)
    sim = QuantizationSimModel(Attention().eval(), x, default_output_bw=16, default_param_bw=16)
    set_matmul_second_input_producer_to_8bit_symmetric(sim)
    first, second = (sim.model.get_submodule(name).output_quantizers[0] for name in ("q", "k"))
    assert (first.bitwidth, first.symmetric, second.bitwidth, second.symmetric) == (16, False, 8, True)
    sim.compute_encodings(lambda model: model(x))
    clip_weights_to_7f7f(sim)
    codes = sim.model.q.weight / sim.model.q.param_quantizers["weight"].get_scale()
    assert float(codes.max()) <= 0x7F7F + 0.5


def test_evaluation_of_autoquant_may_take_a_number_of_samples():
    from bitwright.aimet_torch.auto_quant import AutoQuant

    model = nn.Linear(4, 2).eval()
    counts = []
    search = AutoQuant(model, torch.randn(1, 4), [torch.randn(2, 4)], lambda m, n: counts.append(n) or 1.0)
    assert search._metric(model) == 1.0 and counts == [None]
    good = {"model": model, "dummy_input": None, "data_loader": [], "eval_callback": float}
    for name, wrong in (("eval_callback", "accuracy"), ("model", nn.Linear), ("data_loader", 7), ("results_dir", 7)):
        with pytest.raises(ValueError, match=name):
            AutoQuant(**{**good, name: wrong})
    with pytest.raises(TypeError, match="no argument 'param_bits'.*did you mean 'param_bw'"):
        AutoQuant(**good, param_bits=8)
    with pytest.raises(ValueError, match="allowed_accuracy_drop: -1"):
        search.optimize(allowed_accuracy_drop=-1)


@pytest.mark.parametrize("given", [torch.tensor([1, 2]), torch.tensor([True])])
def test_what_is_no_float_passes_quantizers(given):
    assert Q.affine.QuantizeDequantize((), 8, False)(given) is given


def test_losses_are_quantized():
    loss = QuantizedMSELoss()
    loss.output_quantizers[0] = Q.affine.QuantizeDequantize((), 8, False)
    a, b = torch.rand(4, 3), torch.rand(4, 3)
    with loss.compute_encodings():
        loss(a, b)
    assert float(loss(a, b)) == pytest.approx(float(nn.functional.mse_loss(a, b)), rel=1e-2)


def test_given_batch_norms_of_a_simulation_are_folded_into_its_scales(sim):
    model = sim.model
    sim.compute_encodings(lambda m: m(batch()))
    wanted = model(batch())
    fold_given_batch_norms(model, [(model.conv1, model.bn1)])
    assert isinstance(model.bn1, nn.Identity) and isinstance(model.bn2, nn.BatchNorm2d)
    assert (model(batch()) - wanted).abs().max() < 0.05 * wanted.abs().max()
    with pytest.raises(ModelError, match="is not a module of the model"):
        fold_given_batch_norms(model, [(nn.Conv2d(3, 8, 3), model.bn2)])


@pytest.mark.parametrize("simulated", [False, True])
def test_layer_outputs_are_called_after_tensors_of_the_exported_model(sim, tmp_path, simulated):
    sim.compute_encodings(lambda m: m(batch()))
    model = sim.model if simulated else Net().eval()
    util = TorchLayerOutputUtil(model, str(tmp_path), NamingScheme.ONNX, dummy_input=batch())
    util.generate_layer_outputs(batch())
    leaves = [
        name for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.ReLU | nn.Linear)
    ]
    files = [file.stem for file in (tmp_path / "outputs" / "layer_outputs_0").iterdir()]
    assert len(files) >= len(leaves) and all(re.fullmatch(r"\w+", name) for name in files)
    with pytest.raises(ConfigError, match="pass dummy_input="):
        TorchLayerOutputUtil(Net(), str(tmp_path), NamingScheme.ONNX)


def test_percentile_of_another_scheme_is_without_effect(sim):
    with pytest.warns(DifferenceWarning, match="no quantizer uses percentiles"):
        sim.set_percentile_value(90.0)
    with pytest.raises(ConfigError, match="not between 50 and 100"):
        sim.set_percentile_value(30.0)


def test_registered_class_with_sub_modules_is_quantized_at_its_edges():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x).sigmoid() * self.other(x)

    @QuantizationMixin.implements(Pair)
    class QuantizedPair(QuantizationMixin, Pair):
        pass

    x = torch.randn(4, 3)
    sim = TorchSim(nn.Sequential(Pair(), nn.Linear(3, 2)).eval(), x)
    assert isinstance(sim.model[0], QuantizedPair) and not hasattr(sim.model[0].one, "param_quantizers")
    assert [site.name for site in sim.quantizers.values() if site.enabled and site.name.startswith("0.one")] == [
        "0.one.input[0]"
    ]
    sim.model[0].output_quantizers[0] = Q.affine.QuantizeDequantize((), 4, False)
    sim.compute_encodings(lambda m: m(x))
    assert len(sim.model[0](x).unique()) <= 16
    made = QuantizationMixin.from_module(Pair())
    assert type(made) is QuantizedPair and type(made.one) is nn.Linear


def test_quantizers_are_shown_with_blocks_and_dtypes():
    shown = [
        repr(Q.affine.QuantizeDequantize((2, 4), 8, True, block_size=(1, 2))),
        repr(Q.float.FloatQuantizeDequantize(dtype=torch.float16)),
    ]
    assert shown == [
        "QuantizeDequantize(shape=(2, 4), block_size=(1, 2), qmin=-128, qmax=127, symmetric=True)",
        "FloatQuantizeDequantize(dtype=torch.float16)",
    ]
    with pytest.raises(RuntimeError, match="LPBQ is symmetric"):
        Q.affine.GroupedBlockQuantizeDequantize((2, 4), 4, False, 8, block_size=(1, 2), block_grouping=(1, -1))


@pytest.mark.parametrize("kind", [Q.tensor.QuantizedTensor, Q.tensor.DequantizedTensor])
def test_tensors_keep_their_encoding_through_casts(kind):
    tensor = torch.arange(8.0).as_subclass(kind)
    tensor.encoding = Q.affine.AffineEncoding(torch.tensor(0.5), torch.tensor(0.0), 8)
    assert tensor.float() is tensor and tensor.cpu() is tensor and tensor.to(torch.float32) is tensor
    half = tensor.half()
    assert type(half) is kind and half.dtype is torch.float16 and half.half() is half
    assert half.encoding is not tensor.encoding and torch.equal(half.encoding.scale, tensor.encoding.scale)
    assert type(tensor.int()) is torch.Tensor
    with pytest.raises(RuntimeError, match="scales are not integers"):
        tensor.encoding.to(torch.int32)


def test_scales_of_other_shapes_are_runtime_errors_as_in_torch():
    with pytest.raises(RuntimeError, match="does not broadcast"):
        Q.affine.quantize(torch.randn(2, 3), torch.rand(2), torch.zeros(2), 8)


def test_encoding_analyzers_of_a_simulation_are_those_of_its_scheme():
    sims = {name: TorchSim(Net().eval(), batch(), quant_scheme=name) for name in ("tf", "tf_enhanced", "percentile")}
    found = {name: sim.model.fc.param_quantizers["weight"].encoding_analyzer for name, sim in sims.items()}
    kinds = Q.encoding_analyzer
    assert isinstance(found["tf"], kinds.MinMaxEncodingAnalyzer)
    assert isinstance(found["tf_enhanced"], kinds.SqnrEncodingAnalyzer)
    sims["percentile"].set_percentile_value(99.0)
    assert sims["percentile"].model.fc.param_quantizers["weight"].encoding_analyzer.percentile == 99.0


@pytest.mark.parametrize("cls", [Quantize, QuantizeDequantize])
@pytest.mark.parametrize("symmetric", [True, False])
def test_ends_are_parameters_before_a_range_is_known(cls, symmetric):
    """An optimizer made before calibration has them; copies, pickles and state dicts know whether there is a range."""
    quantizer = cls((3,), 8, symmetric)
    ends = dict(quantizer.named_parameters())
    assert set(ends) == {"min", "max"} and not quantizer.is_initialized() and quantizer.get_scale() is None
    with pytest.raises(RuntimeError, match="the quantizer has no range yet"):
        quantizer(torch.zeros(3))
    for other in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))):
        assert torch.equal(other.min, quantizer.min) and not other.is_initialized()
    other = cls((3,), 8, symmetric)
    other.load_state_dict(quantizer.state_dict())
    assert not other.is_initialized()
    with quantizer.compute_encodings():
        quantizer(torch.tensor([[-1.0, 2.0, 3.0]]))
    assert quantizer.is_initialized() and quantizer.min is ends["min"]
    other.load_state_dict({name: end.detach() for name, end in ends.items()}, strict=False)
    for made in (other, copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))):
        assert made.is_initialized() and torch.equal(made.get_scale(), quantizer.get_scale())
    quantizer.set_range(None, None)
    assert not quantizer.is_initialized()


def test_quantizers_of_a_module_are_taken_away_for_a_block():
    layer = QuantizationMixin.from_module(nn.Linear(3, 2))
    layer.input_quantizers[0], layer.output_quantizers[0] = (
        QuantizeDequantize((), 8, False),
        QuantizeDequantize((), 8, False),
    )
    layer.param_quantizers["weight"] = QuantizeDequantize((), 4, True)
    x = torch.randn(2, 3)
    with layer.compute_encodings():
        layer(x)
    own = {
        "input": layer.input_quantizers[0],
        "output": layer.output_quantizers[0],
        "param": layer.param_quantizers["weight"],
    }
    removed = {
        "input": {"input"},
        "output": {"output"},
        "param": {"param"},
        "activation": {"input", "output"},
        "all": set(own),
    }
    for kind, gone in removed.items():
        with getattr(layer, f"_remove_{kind}_quantizers")():
            here = {
                "input": layer.input_quantizers[0],
                "output": layer.output_quantizers[0],
                "param": layer.param_quantizers["weight"],
            }
            assert {name for name, quantizer in here.items() if quantizer is None} == gone
        assert layer.input_quantizers[0] is own["input"] and layer.param_quantizers["weight"] is own["param"]
    with layer._remove_all_quantizers():
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_the_text_of_a_simulation_lists_its_layers(sim):
    assert all(name in str(sim) for name in ("conv1.weight", "conv1.output[0]", "int8", "QuantizationSimModel("))


def test_a_quantized_tensor_is_not_made_of_integers():
    with pytest.raises(RuntimeError, match=r"QuantizedTensor: it is made of torch.int64.*as codes.float\(\)"):
        QuantizedTensor(torch.arange(4))


@pytest.mark.parametrize(
    "name, arguments, inputs, outputs",
    [("LSTM", (8, 5), 3, 3), ("GRU", (8, 5), 2, 2), ("LSTMCell", (8, 5), 3, 2), ("EmbeddingBag", (10, 4), 1, 1)]
    + [("GaussianNLLLoss", (), 3, 1), ("NLLLoss", (), 1, 1), ("DynamicConv2d", (), 3, 1), ("BatchNorm", (), 5, 1)],
)
def test_a_module_has_a_quantizer_for_each_tensor_that_it_takes_and_returns(name, arguments, inputs, outputs):
    from bitwright.aimet_torch import nn as quantized

    module = getattr(quantized, f"Quantized{name}")(*arguments)
    assert (len(module.input_quantizers), len(module.output_quantizers)) == (inputs, outputs)


def test_states_of_recurrent_modules_are_quantized_by_quantizers_of_their_own():
    from bitwright.aimet_torch.nn import QuantizedLSTM
    from bitwright.aimet_torch.quantization.affine import QuantizeDequantize

    torch.manual_seed(0)
    module, x, state = QuantizedLSTM(8, 5), torch.randn(2, 3, 8), (torch.randn(1, 3, 5), torch.randn(1, 3, 5))
    for holder in (module.input_quantizers, module.output_quantizers):
        for index in range(3):
            holder[index] = QuantizeDequantize((), 4, False)
    with torch.no_grad(), module.compute_encodings():
        module(x, state)
    seen = [t for t in (x, *state)]
    for quantizer, tensor in zip(module.input_quantizers, seen, strict=True):
        assert float(quantizer.max - quantizer.min) == pytest.approx(float(tensor.max() - tensor.min()), rel=1e-5)
    output, (h, c) = module(x, state)
    assert all(len(t.unique()) <= 16 for t in (output, h, c))


def test_a_module_is_calibrated_on_float_activations_and_quantized_weights():
    from bitwright.aimet_torch.nn import QuantizedLinear
    from bitwright.aimet_torch.quantization.affine import QuantizeDequantize

    torch.manual_seed(0)
    module, x = QuantizedLinear(8, 6), torch.randn(4, 8)
    module.input_quantizers[0], module.output_quantizers[0] = (QuantizeDequantize((), 3, False) for _ in range(2))
    module.param_quantizers["weight"] = QuantizeDequantize((), 3, True)
    with torch.no_grad(), module.compute_encodings():
        inside = module(x)
    weight = module.param_quantizers["weight"](module.weight)
    wanted = torch.nn.functional.linear(x, weight, module.bias)
    assert torch.equal(inside, wanted) and len(module(x).unique()) <= 8
    output = module.output_quantizers[0]
    assert float(output.max - output.min) == pytest.approx(float(wanted.max() - wanted.min()), rel=1e-5)
