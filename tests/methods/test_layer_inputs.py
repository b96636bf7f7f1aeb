"""Which activations are left in float when only layers' inputs are quantized, and models of which no layer can be quantized."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from torch import nn

import bitwright
from bitwright.errors import ModelError
from bitwright.methods.activations import layer_inputs
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from tests.methods.transformer import Decoder
from tests.onnx.nets import Net
from tests.support.simulations import calibrated


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x):
        return self.lstm(x + x)[0] * 2


def convolutional():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Sigmoid())


def layer_reads(sim):
    """Data operands of products with stored weights, by value; of recurrent layers, the states too."""
    layers = [
        op
        for op in sim.graph.ops
        if op.type in ("Gemm", "MatMul", "Conv", "LSTM") and sim.graph.values[op.inputs[1]].is_static
    ]
    return {value for op in layers for value in (op.inputs if op.type == "LSTM" else op.inputs[:1])}


def check(sim, run):
    before = {name for name, site in sim.quantizers.items() if site.enabled}
    report = layer_inputs(sim)
    enabled = {name for name, site in sim.quantizers.items() if site.enabled}
    read = layer_reads(sim)
    assert set(report.in_float) == before - enabled and report.in_float
    for name, site in sim.quantizers.items():
        if site.role in ("input", "output") and site.inner is None and name in enabled:
            shared = [s for s in sim.quantizers.values() if s.quantizer is site.quantizer]
            carried = {v for v, group in sim.plan.shared.items() if group in {s.name for s in shared}}
            assert carried & read or any(s.value in read for s in shared), name
        if site.role == "weight":
            assert (name in enabled) == (name in before)
    assert np.isfinite(run()).all()
    assert layer_inputs(sim).in_float == ()  # done once


def test_a_transformer_in_torch_and_onnx():
    torch.manual_seed(0)
    model, x = Decoder(tied=False), torch.randint(0, 11, (2, 6))
    sim = calibrated(QuantizationSimModel(model, x), [x])
    check(sim, lambda: sim.model(x).detach().numpy())
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert program is not None
    other = calibrated(OnnxSim(program.model_proto, x.numpy()), [x.numpy()])
    check(other, lambda: other.run(x.numpy())[0])


def test_recurrent_layers_keep_what_is_inside_them():
    x = torch.randn(5, 2, 8)
    sim = calibrated(QuantizationSimModel(Recurrent().eval(), x), [x])
    inner = {name for name, site in sim.quantizers.items() if site.inner is not None and site.enabled}
    check(sim, lambda: sim.model(x).detach().numpy())
    assert inner and all(sim.quantizers[name].enabled for name in inner)


def test_models_without_attention_can_be_left_alone():
    x = torch.randn(2, 3, 8, 8)
    sim = calibrated(QuantizationSimModel(convolutional().eval(), x), [x])
    report = layer_inputs(sim, only_with_attention=True)
    assert report.in_float == () and report.summary == "no change: the model has no attention"
    assert layer_inputs(sim).in_float  # the output of the sigmoid


def test_sixteen_bits_stay():
    x = torch.randn(2, 3, 8, 8)
    sim = QuantizationSimModel(convolutional().eval(), x, preset="w8a16")
    assert layer_inputs(sim).in_float == ()


class Hybrid(nn.Module):
    """A residual convolution, a depthwise one, and an attention over the places of the image."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = self.depthwise(x + self.body(x)).flatten(2).transpose(1, 2)
        x = self.norm(x)
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_convolutions_keep_their_outputs_where_kernels_return_codes_only(front, tmp_path):
    torch.manual_seed(0)
    model, x = Hybrid().eval(), torch.randn(2, 8, 12, 12)
    kernels = {}
    for target in ("ort_cpu", "openvino_cpu"):
        given, data = model, x
        if front == "onnx":
            program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
            assert program is not None
            given, data = program.model_proto, x.numpy()
        result = bitwright.quantize(
            given,
            [data],
            recipe=["layer_inputs"],
            target=target,
            path=tmp_path / target,
            progress=False,
            measure_speed=False,
        )
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"{target}.onnx")
        ort.InferenceSession(result.exported.qdq, options, providers=["CPUExecutionProvider"])
        kernels[target] = Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)
        assert result.sim.verify(data)
        said = any("ort_cpu computes what reads it faster in float" in row.how for row in result.sim.coverage())
        assert said is (target == "ort_cpu")
    # ONNX Runtime: the residual one too, not the depthwise one, which is faster in float; OpenVINO's return floats
    assert kernels["ort_cpu"]["QLinearConv"] == 2
    assert kernels["openvino_cpu"]["QLinearConv"] == 1


def test_all_activations_stay_where_a_target_computes_whole_networks_on_codes():
    torch.manual_seed(0)
    model, x = Decoder(tied=False), torch.randint(0, 11, (2, 6))
    sim = QuantizationSimModel(model, x)
    report = layer_inputs(sim, export_target="qnn")
    assert not report.changed and report.summary == "no change: qnn computes whole networks on codes"
    assert len(report.kept) > len(layer_inputs(sim, export_target="litert").kept) > len(layer_inputs(sim).kept)


def test_linear_layers_of_litert_run_on_codes(tmp_path):
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    torch.manual_seed(0)
    model, x = Attending().eval(), torch.randn(2, 5, 8)
    result = bitwright.quantize(
        model, [x], recipe=["layer_inputs"], target="litert", path=tmp_path, progress=False, measure_speed=False
    )
    interpreter = litert.Interpreter(str(next(tmp_path.glob("*.tflite"))))
    interpreter.allocate_tensors()
    types = {one["index"]: one["dtype"] for one in interpreter.get_tensor_details()}
    layers = [op for op in interpreter._get_ops_details() if op["op_name"] == "FULLY_CONNECTED"]
    assert len(layers) == 3 and all(types[op["outputs"][0]] == np.int8 for op in layers)
    assert result.sim.verify(x, runtime="litert")


class Attending(nn.Module):
    """Heads are split off by a slice and a view, and put together by a transposition and a view, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.fc = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], 2, 4).transpose(1, 2) for t in self.qkv(x).split(8, dim=2))
        h = (torch.softmax(q @ k.transpose(2, 3) / 2, -1) @ v).transpose(1, 2).contiguous().view(x.shape)
        return self.fc(self.drop(torch.relu(x + self.proj(h).view(-1, 8).view(x.shape))))


MULTI_HEAD = {"by hand": Attending, "fused": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)}


@pytest.mark.parametrize("make", MULTI_HEAD.values(), ids=list(MULTI_HEAD))
@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_every_layer_behind_an_attention_reads_a_grid(make, front):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(2, 5, 8)
    if front == "torch":
        sim = calibrated(QuantizationSimModel(model, x), [x])
    else:
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
        assert program is not None
        sim = calibrated(OnnxSim(program.model_proto, x.numpy()), [x.numpy()])
    check(sim, lambda: sim.model(x).detach().numpy() if front == "torch" else sim.run(x.numpy())[0])
    by_value = {}
    for site in sim.quantizers.values():
        if site.enabled and site.role in ("input", "output"):
            by_value.setdefault(site.value, site)
    values = layer_reads(sim)
    assert values
    for value in values:
        site = by_value.get(value) or sim.quantizers[sim.plan.shared[value]]
        assert site.enabled and site.spec.format.bits == 8, value
    for site in sim.quantizers.values():
        if site.follows:
            assert all(sim.quantizers[name].enabled for name in site.follows), site
            assert site.encoding is not None and site.encoding.format.bits == 32
            assert sim.coverage().find(site.value).status == "quantized"


def test_a_bias_is_float_where_its_input_is():
    x = torch.randn(2, 8)
    sim = calibrated(QuantizationSimModel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), x), [x])
    sim.quantizers["1.output[0]"].enabled = False
    row = sim.coverage().find("2.bias")
    assert row.status == "float"
    assert row.how == "2.bias: disabled, because 1.output[0] is in float"
    assert sim.coverage().find("0.bias").status == "quantized"


def test_the_notes_of_an_export_say_why(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    program = torch.onnx.export(Attending().eval(), (x,), dynamo=True, verbose=False)
    assert program is not None
    sim = calibrated(OnnxSim(program.model_proto, x.numpy()), [x.numpy()])
    found = layer_inputs(sim)
    by_hand = sim.quantizers["fc.bias"].follows[0]
    sim.quantizers[by_hand].enabled = False
    notes = sim.export(tmp_path, "net").notes
    assert found.in_float
    for site in found.in_float:
        assert f"{site}: in float, because no layer with a stored weight reads it" in notes
    assert "fc.bias: in float, because its input or its weight is in float" in notes
    assert [note for note in notes if "has no encoding" in note] == [f"{by_hand}: has no encoding and stays in float"]


X = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)


def trees(scaled: bool) -> onnx.ModelProto:
    """A tree of two leaves, of the input or of what a scaler makes of it."""
    n = Net()
    x = n.input("x", ("n", 4))
    if scaled:
        x = n("Div", n("Sub", x, n.const(np.ones(4)), name="sub"), n.const(np.full(4, 2.0)), name="div")
    tree = helper.make_node(
        "TreeEnsembleRegressor", [x], ["y"], "tree", domain="ai.onnx.ml", n_targets=1, nodes_treeids=[0, 0, 0],
        nodes_nodeids=[0, 1, 2], nodes_featureids=[1, 0, 0], nodes_values=[0.3, 0.0, 0.0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
        target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0], target_weights=[1.5, -2.0],
    )  # fmt: skip
    n.nodes.append(tree)
    return n.model("y", domains={"ai.onnx.ml": 3})


@pytest.mark.parametrize("scaled", [False, True])
def test_what_a_tree_compares_stays_in_float(scaled):
    coverage = OnnxSim(trees(scaled), {"x": X}).coverage()
    assert coverage.find("x").status == "float"
    assert "tree compares it" in coverage.find("x").how


@pytest.mark.parametrize("front_end", ["onnx", "torch"])
def test_no_layer_is_an_error(front_end, tmp_path, caplog):
    model, data = (trees(False), [X]) if front_end == "onnx" else (nn.Sequential(nn.ReLU()).eval(), [torch.tensor(X)])
    kind = "1 ai.onnx.ml::TreeEnsembleRegressor" if front_end == "onnx" else "1 Relu"
    problem = f"the model has no layer that could be quantized; its operators are {kind}. Remedy: .*allow_float=True"
    with pytest.raises(ModelError, match=problem):
        bitwright.quantize(model, data, path=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())
    result = bitwright.quantize(model, data, recipe=["fold"], allow_float=True, progress=False, measure_speed=False)
    assert "no layer that could be quantized" in caplog.text and result.sim is not None


def test_layers_that_all_stay_in_float_are_an_error_unless_rules_say_so(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    preset = bitwright.Preset(None, None)
    with pytest.raises(ModelError, match="no layer of the model is quantized; of its tensors, .*stay in float under"):
        bitwright.quantize(model, [torch.tensor(X)], preset, progress=False)
    rules = {"rules": [{"match": "*", "weight": None, "input": None, "output": None, "bias": None}]}
    bitwright.quantize(model, [torch.tensor(X)], config_file=rules, recipe=["fold"], progress=False)
    assert "no layer of the model is quantized" in caplog.text
