"""Making, calibrating, reading and exporting a simulation of an ONNX model."""

import json
import os

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization.onnx_model import ONNXModel

from tests.aimet.onnx_nets import feeds, folded


def blockwise():
    from aimet_onnx import QSpec, QuantizationSimModel
    from aimet_onnx.quantsim import set_blockwise_quantization_for_weights, set_param_type

    sim = QuantizationSimModel(folded())
    set_blockwise_quantization_for_weights(sim, ("Gemm", "Conv"), 4, True, 64, nodes_to_exclude=["conv2"])
    sim.compute_encodings(feeds())
    assert len(sim.qc_quantize_op_dict["fc.weight"].get_encodings()) == 10 * 8
    assert len(sim.qc_quantize_op_dict["conv1.weight"].get_encodings()) == 8, "64 does not divide its 3 channels"
    with pytest.raises(ValueError):
        set_blockwise_quantization_for_weights(sim, "Conv", 4, True, 64, strict=True)
    set_param_type(sim, QSpec.per_tensor("int16"), op_types="Conv")
    sim.compute_encodings(feeds())
    assert len(sim.qc_quantize_op_dict["conv1.weight"].get_encodings()) == 1


def clamp_activations():
    from aimet_onnx import QuantizationSimModel
    from aimet_onnx.quantsim import clamp_activation_encodings

    sim = QuantizationSimModel(folded())
    sim.compute_encodings(feeds())
    clamp_activation_encodings(sim, 1.5)
    for name in sim.activation_names:
        quantizer = sim.qc_quantize_op_dict[name]
        if quantizer.enabled:
            assert quantizer.get_encodings()[0].max <= 1.52
    sim.session.run(None, feeds()[0])


def compute_encodings_callback():
    from aimet_onnx.quantsim import QuantizationSimModel

    sim = QuantizationSimModel(folded())
    seen = []

    def callback(session, args):
        seen.append(args)
        for feed in feeds():
            session.run(None, feed)

    sim.compute_encodings(callback, None)
    sim.compute_encodings(forward_pass_callback=callback, forward_pass_callback_args=7)
    assert seen == [None, 7]
    sim.compute_encodings(lambda session: session.run(["output"], feeds()[0]))


def compute_encodings_context():
    import aimet_onnx

    sim = aimet_onnx.QuantizationSimModel(folded())
    with aimet_onnx.compute_encodings(sim):
        for feed in feeds():
            sim.session.run(None, feed)
    inside = sim.qc_quantize_op_dict["input"].get_encodings()[0].delta
    sim.compute_encodings(inputs=feeds())
    assert sim.qc_quantize_op_dict["input"].get_encodings()[0].delta == inside


def custom_libraries():
    from aimet_onnx import QuantizationSimModel

    QuantizationSimModel(folded(), user_onnx_libs=None, providers=["CPUExecutionProvider"], path="/nowhere")
    with pytest.raises(ValueError, match="custom.so.*no such file"):
        QuantizationSimModel(folded(), user_onnx_libs=["custom.so"])
    with pytest.raises(TypeError, match="no arguments"):
        QuantizationSimModel(folded(), bits=3)


def export_files():
    from aimet_onnx import QuantizationSimModel

    sim = QuantizationSimModel(folded())
    sim.compute_encodings(feeds())
    sim.export("out", "net", encoding_version="0.6.1")
    assert {"net.onnx", "net.encodings"} <= set(os.listdir("out"))
    assert {node.op_type for node in onnx.load("out/net.onnx").graph.node} == {"Conv", "Relu", "Flatten", "Gemm"}
    encodings = json.load(open("out/net.encodings"))
    assert encodings["version"] == "0.6.1" and "conv1.weight" in encodings["param_encodings"]
    sim.export("only", "net", export_model=False)
    assert os.listdir("only") == ["net.encodings"]


def fixed_range_and_freeze():
    from aimet_onnx import QuantizationSimModel

    sim = QuantizationSimModel(folded())
    sim.qc_quantize_op_dict["relu1.out"].set_fixed_encoding_range((0.0, 4.0))
    sim.compute_encodings(feeds())
    (encoding,) = sim.qc_quantize_op_dict["relu1.out"].get_encodings()
    assert encoding.min == 0 and np.isclose(encoding.max, 4)
    quantizer = sim.qc_quantize_op_dict["input"]
    before = quantizer.get_encodings()[0].max
    quantizer.freeze_encodings()
    assert quantizer.is_encoding_frozen()
    sim.compute_encodings([{"input": 10 * feeds()[0]["input"]}])
    assert quantizer.get_encodings()[0].max == before


def helpers():
    from aimet_onnx import QuantizationSimModel
    from aimet_onnx.utils import make_dummy_input, make_psnr_eval_fn

    assert make_dummy_input(folded())["input"].shape[1:] == (3, 12, 12)
    sim = QuantizationSimModel(folded())
    psnr = make_psnr_eval_fn(sim.session, feeds())
    assert psnr(sim.session) == 100
    sim.compute_encodings(feeds())
    assert 20 < psnr(sim.session) < 100
    assert QuantizationSimModel.remove_quantizers(sim.model).model.graph.node


def layer_outputs():
    """Outputs of all nodes of a float model as files."""
    from aimet_onnx.layer_output_utils import LayerOutputUtil

    util = LayerOutputUtil(model=folded(), dir_path="./fp32")
    for feed in feeds():
        util.generate_layer_outputs(feed["input"])
    with open("fp32/layer_output_name_order.json") as file:
        assert len(json.load(file)["layer_output_names"]) >= 6
    assert len(os.listdir("fp32/outputs")) == 3
    assert np.fromfile("fp32/outputs/layer_outputs_0/output.raw", np.float32).shape == (2 * 10,)


def legacy_arguments():
    from aimet_common.defs import QuantScheme
    from aimet_onnx.quantsim import QuantizationSimModel

    sim = QuantizationSimModel(
        model=ONNXModel(folded()),
        dummy_input=feeds()[0],
        quant_scheme=QuantScheme.post_training_tf_enhanced,
        rounding_mode="nearest",
        default_param_bw=4,
        default_activation_bw=16,
        use_symmetric_encodings=False,
        use_cuda=False,
    )
    sim.compute_encodings(lambda session, args: [session.run(None, feed) for feed in args], feeds())
    assert sim.qc_quantize_op_dict["conv1.weight"].bitwidth == 4
    assert sim.qc_quantize_op_dict["input"].bitwidth == 16
    assert isinstance(sim.model, ONNXModel)
    positional = QuantizationSimModel(folded(), feeds()[0], QuantScheme.min_max, "nearest", 8, 8, True, False)
    assert positional.qc_quantize_op_dict["input"].use_symmetric_encodings


def load_encodings_to_sim():
    from aimet_onnx import QuantizationSimModel
    from aimet_onnx.quantsim import load_encodings_to_sim

    sim = QuantizationSimModel(folded())
    sim.compute_encodings(feeds())
    sim.export(".", "net")
    other = QuantizationSimModel(folded())
    assert load_encodings_to_sim(other, "net.encodings", strict=True) == []
    assert np.allclose(other.session.run(None, feeds()[0])[0], sim.session.run(None, feeds()[0])[0])
    record = {
        "bitwidth": 8,
        "dtype": "int",
        "is_symmetric": "False",
        "max": 4.0,
        "min": 0.0,
        "offset": 0,
        "scale": 4 / 255,
    }
    partial = {"version": "0.6.1", "activation_encodings": {"relu1.out": [record]}, "param_encodings": {}}
    third = QuantizationSimModel(folded())
    load_encodings_to_sim(third, partial, disable_missing_quantizers=False, allow_overwrite=False)
    assert third.qc_quantize_op_dict["input"].enabled and third.qc_quantize_op_dict["relu1.out"].is_encoding_frozen()
    load_encodings_to_sim(third, partial)
    assert not third.qc_quantize_op_dict["input"].enabled
    with pytest.raises(ValueError):
        load_encodings_to_sim(third, {**partial, "activation_encodings": {"nothing": [record]}})


def load_tf_encodings():
    from aimet_onnx import QuantizationSimModel

    sim = QuantizationSimModel(folded())
    sim.compute_encodings(feeds())
    quantizer = sim.qc_quantize_op_dict["relu2.out"]
    (encoding,) = quantizer.get_encodings()
    encoding.max *= 2
    quantizer.load_encodings([encoding])
    assert quantizer.encodings[0].max > encoding.max * 0.99
    record = quantizer.export_encodings("0.6.1")[0]
    assert record["bitwidth"] == 8 and record["is_symmetric"] == "False"
    assert quantizer.export_encodings("1.0.0")["enc_type"] == "PER_TENSOR"


def lpbq():
    from aimet_onnx import QuantizationSimModel
    from aimet_onnx.qc_quantize_op import GroupedBlockQuantizeDequantize
    from aimet_onnx.quantsim import set_grouped_blockwise_quantization_for_weights, set_lpbq_for_params

    sim = QuantizationSimModel(folded())
    set_grouped_blockwise_quantization_for_weights(
        sim, ("Gemm", "Conv"), bitwidth=4, decompressed_bw=8, block_size=64, nodes_to_exclude=["conv2"]
    )
    sim.compute_encodings(feeds())
    quantizer = sim.qc_quantize_op_dict["fc.weight"]
    assert isinstance(quantizer, GroupedBlockQuantizeDequantize) and quantizer.decompressed_bw == 8
    assert len(quantizer.get_encodings()) == 10 * 8
    assert len(sim.qc_quantize_op_dict["conv1.weight"].get_encodings()) == 8, "64 does not divide its 3 channels"

    sim.export(".", "lpbq")
    with open("lpbq.encodings") as file:
        written = {entry["name"]: entry for entry in json.load(file)["param_encodings"]}["fc.weight"]
    assert written["enc_type"] == "LPBQ" and (written["bw"], written["compressed_bw"]) == (8, 4)
    assert written["block_size"] == 64 and len(written["scale"]) == 10 and len(written["per_block_int_scale"]) == 80
    record = quantizer.export_encodings("1.0.0")
    assert {key: written[key] for key in record} == record

    set_lpbq_for_params(sim, bitwidth=4, block_size=32, op_types={"Gemm"})
    set_lpbq_for_params(sim, bitwidth=4, block_size=32, nodes_to_include={"fc"})
    sim.compute_encodings(feeds())
    assert len(sim.qc_quantize_op_dict["fc.weight"].get_encodings()) == 10 * 16
    with pytest.raises(ValueError):
        set_lpbq_for_params(sim, bitwidth=4, block_size=32)
    with pytest.raises(ValueError):
        set_lpbq_for_params(sim, bitwidth=4, block_size=64, nodes_to_include={"conv1"})


def number_formats():
    from aimet_onnx import QuantizationSimModel, float16, int4, int16, qtype

    sim = QuantizationSimModel(folded(), param_type=int4, activation_type=int16)
    table = sim.qc_quantize_op_dict
    assert table["conv1.weight"].bitwidth == 4 and table["input"].bitwidth == 16
    half = QuantizationSimModel(folded(), param_type="float16", activation_type=float16)
    half.compute_encodings(feeds())
    full = QuantizationSimModel(folded()).session.run(None, feeds()[0])[0]
    assert np.abs(half.session.run(None, feeds()[0])[0] - full).max() < 0.01
    assert half.qc_quantize_op_dict["input"].precision() == qtype.float(5, 10) == float16
    with pytest.raises(ValueError):
        QuantizationSimModel(folded(), param_type="int7000")


def onnx_qdq():
    from aimet_onnx import QuantizationSimModel, encodings_to_onnx_qdq

    sim = QuantizationSimModel(folded())
    sim.compute_encodings(feeds())
    qdq = sim.to_onnx_qdq()
    expected = sim.session.run(None, feeds()[0])[0]
    step = sim.qc_quantize_op_dict["output"].get_encodings()[0].delta
    options = ort.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # exact sums on CPUs without VNNI too
    got = ort.InferenceSession(qdq.SerializeToString(), options).run(None, feeds()[0])[0]
    assert np.abs(got - expected).max() <= 1.01 * step
    again = QuantizationSimModel.from_onnx_qdq(qdq)
    assert np.abs(again.session.run(None, feeds()[0])[0] - expected).max() <= 1.01 * step
    sim.export(".", "net")
    made = encodings_to_onnx_qdq(folded(), json.load(open("net.encodings")))
    assert any(node.op_type == "DequantizeLinear" for node in made.graph.node)


def op_quantizers():
    from aimet_onnx import QuantizationSimModel

    sim = QuantizationSimModel(folded())
    inputs, outputs, params = sim.get_op_quantizers("conv1")
    assert len(inputs) == 1 and not outputs and params["weight"].enabled
    inputs, outputs, params = sim.get_op_quantizers(next(n for n in folded().graph.node if n.op_type == "Gemm"))
    assert len(outputs) == 1
    weights, activations = sim.get_all_quantizers()
    assert sum(q.enabled for q in weights) == 3


def param_encodings_frozen():
    from aimet_onnx import QuantizationSimModel

    sim = QuantizationSimModel(folded(), param_type="int4")
    sim.compute_encodings(feeds())
    sim.export(".", "net")
    other = QuantizationSimModel(folded(), param_type="int4")
    other.set_and_freeze_param_encodings(encoding_path="net.encodings")
    assert other.qc_quantize_op_dict["fc.weight"].is_encoding_frozen()
    other.compute_encodings(feeds())


def precision_by_tensor():
    """Mixed precision by hand: tensors and types of nodes."""
    import aimet_onnx
    from aimet_onnx import QuantizationSimModel, int4, int8, int16
    from aimet_onnx.quantsim import set_param_type

    sim = QuantizationSimModel(folded(), param_type=int8, activation_type=int8)
    sim.set_tensor_precision(["input", "output"], int16)
    sim.set_tensor_precision("fc.weight", "int16")
    set_param_type(sim, int4, op_types=("Conv",))
    set_param_type(sim, aimet_onnx.float16, nodes_to_include=["conv1"])
    sim.compute_encodings(feeds())
    table = sim.qc_quantize_op_dict
    assert [table[name].bitwidth for name in ("input", "output", "fc.weight", "conv2.weight")] == [16, 16, 16, 4]
    assert sim.session.run(None, feeds()[0])[0].shape == (2, 10)


def quantizer_dict():
    from aimet_onnx import QuantizationSimModel

    sim = QuantizationSimModel(folded())
    for name in sim.param_names:
        quantizer = sim.qc_quantize_op_dict[name]
        if quantizer.enabled:
            quantizer.set_bitwidth(4)
            quantizer.use_symmetric_encodings = True
    sim.qc_quantize_op_dict["output"].enabled = False
    sim.compute_encodings(feeds())
    weights = sim.get_qc_quantize_op()["conv1.weight"].get_encodings()
    assert len(weights) == 8 and all(e.bw == 4 and e.offset == -8 for e in weights)
    assert sim.qc_quantize_op_dict["output"].get_encodings() is None
    assert not sim.qc_quantize_op_dict["conv1.out"].enabled, "the activation behind it has the quantizer"
    assert {"input", "relu1.out", "output"} <= set(sim.activation_names)


def session_before_calibration():
    from aimet_onnx import QuantizationSimModel

    model = folded()
    sim = QuantizationSimModel(model)
    before = sim.session.run(None, feeds()[0])[0]
    assert np.allclose(before, ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0], atol=1e-5)
    sim.compute_encodings(feeds())
    assert not np.allclose(sim.session.run(None, feeds()[0])[0], before, atol=1e-5)


def set_quantizers():
    from aimet_onnx import QuantizationSimModel

    sim = QuantizationSimModel(folded())
    other = QuantizationSimModel(folded(), activation_type="int16")
    other.compute_encodings(feeds())
    sim.set_quantizers({"input": other.qc_quantize_op_dict["input"]})
    assert sim.qc_quantize_op_dict["input"].bitwidth == 16
    assert (
        sim.qc_quantize_op_dict["input"].get_encodings()[0].max
        == other.qc_quantize_op_dict["input"].get_encodings()[0].max
    )


def tensor_precision():
    from aimet_onnx import QuantizationSimModel, int16

    sim = QuantizationSimModel(folded())
    sim.set_tensor_precision(["relu1.out", "conv2.weight"], int16)
    sim.set_tensor_precision("input", "float32")
    assert not sim.qc_quantize_op_dict["input"].enabled
    with pytest.raises(ValueError):
        sim.set_tensor_precision("nothing", "int8")
    sim.set_tensor_precision("nothing", "int8", strict=False)
    sim.compute_encodings(feeds())
    assert sim.qc_quantize_op_dict["conv2.weight"].get_encodings()[0].bw == 16
