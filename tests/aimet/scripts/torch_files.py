"""What is written and read: exports, encodings, checkpoints, layer outputs, analyses."""

import copy
import json
import os

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from tests.aimet.nets import Net, Residual, batch, images


def checkpoint():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.quantsim import load_checkpoint, save_checkpoint

    model, x = Net().eval(), batch()
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings(lambda m: m(x))
    save_checkpoint(sim, "checkpoint")
    with pytest.raises(RuntimeError, match="load_checkpoint"):
        load_checkpoint("checkpoint")
    other = QuantizationSimModel(model, x)
    other.load_checkpoint("checkpoint")
    assert other.model(x).equal(sim.model(x))


def export_every_tensor():
    from aimet_torch import QuantizationSimModel

    class Branches(Net):
        def forward(self, x):
            x = self.relu1(self.bn1(self.conv1(x)))
            a = self.pool(self.relu2(self.bn2(self.conv2(x))))
            return self.fc(torch.cat((a[:, :4], a[:, 4:]), 1).flatten(1)), a.transpose(1, 2).sigmoid()

    model, x = Branches().eval(), batch()
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings(lambda m: m(x))
    sim.onnx.export((x,), "net.onnx", dynamo=False)
    entries = {e["name"]: e for e in json.load(open("net.encodings"))["activation_encodings"]}
    graph = onnx.load("net.onnx").graph
    kinds = {node.op_type: node.output[0] for node in graph.node}
    pool = next(node for node in graph.node if node.op_type == "MaxPool")
    for kind in ("MaxPool", "Slice", "Concat", "Reshape", "Transpose"):
        assert entries[kinds[kind]]["scale"] == entries[pool.input[0]]["scale"], kind

    other = QuantizationSimModel(model, x)
    other.load_encodings("net.encodings")
    assert torch.equal(other.model(x)[0], sim.model(x)[0])


def export_files():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.onnx_utils import OnnxExportApiArgs

    model, x = Net().eval(), batch()
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings(lambda m: m(x))
    sim.export("out", "net", dummy_input=x)
    assert {"net.onnx", "net.encodings", "net_torch.encodings"} <= set(os.listdir("out"))
    session = ort.InferenceSession("out/net.onnx")
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.allclose(output, model(x).detach().numpy(), atol=1e-4), "<prefix>.onnx is the float model"
    encodings = json.load(open("out/net.encodings"))
    assert any(entry["name"] == "conv1.weight" for entry in encodings["param_encodings"])
    sim.export("other", "net", x, export_model=False)
    assert {"net.encodings", "net_torch.encodings"} <= set(os.listdir("other"))
    assert not any(name.endswith(".onnx") for name in os.listdir("other"))
    assert OnnxExportApiArgs(opset_version=11).kwargs["opset_version"] == 11


def export_names():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.onnx_utils import OnnxExportApiArgs

    model, x = Net().eval(), batch()
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings(lambda m: m(x))
    sim.onnx.export(x, "net.onnx", input_names=["image"], output_names=["logits"], dynamo=False)
    (logits,) = ort.InferenceSession("net.onnx").run(["logits"], {"image": x.numpy()})
    assert np.allclose(logits, model(x).detach().numpy(), atol=1e-4)
    names = {entry["name"] for entry in json.load(open("net.encodings"))["activation_encodings"]}
    assert {"image", "logits"} <= names
    other = QuantizationSimModel(model, x)
    other.load_encodings("net.encodings")
    sim.export(".", "older", x, onnx_export_args=OnnxExportApiArgs(input_names=["image"], output_names=["logits"]))
    ort.InferenceSession("older.onnx").run(["logits"], {"image": x.numpy()})


def export_warns():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.onnx_utils import OnnxExportApiArgs

    x = batch()
    sim = QuantizationSimModel(Net().eval(), x)
    sim.compute_encodings(lambda m: m(x))
    sim.export(".", "net", x, onnx_export_args=OnnxExportApiArgs(opset_version=13))
    with pytest.raises(ValueError):
        sim.export(".", "net", x, export_to_torchscript=True)

    axes = {"image": {0: "batch"}, "logits": {0: "batch"}}
    sim.onnx.export((x[:1],), "free.onnx", input_names=["image"], output_names=["logits"], dynamic_axes=axes)
    (logits,) = ort.InferenceSession("free.onnx").run(["logits"], {"image": x.numpy()})
    assert logits.shape == (4, 10)


def layer_outputs():
    """Outputs of all layers, in float and simulated, as files."""
    from aimet_torch.layer_output_utils import LayerOutputUtil, NamingScheme
    from aimet_torch.quantsim import QuantizationSimModel

    model = Net().eval()
    loader = images()
    first = next(iter(loader))[0]
    sim = QuantizationSimModel(model, first)
    sim.compute_encodings(lambda model: model(first))

    for name, subject in (("fp32", model), ("quantsim", sim.model)):
        util = LayerOutputUtil(model=subject, dir_path=f"./{name}", naming_scheme=NamingScheme.PYTORCH)
        for x, _ in loader:
            util.generate_layer_outputs(x)
        with open(f"{name}/layer_output_name_order.json") as file:
            order = json.load(file)["layer_output_names"]
        assert order[0].startswith("conv1") and order[-1].startswith("fc")
        assert len(os.listdir(f"{name}/inputs")) == 2 and len(os.listdir(f"{name}/outputs")) == 2
        found = np.fromfile(f"{name}/outputs/layer_outputs_1/fc.raw", np.float32)
        assert found.shape == (4 * 10,)
    named = LayerOutputUtil(sim.model, "./onnx", NamingScheme.ONNX, first)
    named.generate_layer_outputs(first)
    assert os.listdir("onnx/outputs/layer_outputs_0")


def load_encodings_partial():
    from aimet_torch import QuantizationSimModel

    model, x = Net().eval(), batch()
    sim = QuantizationSimModel(model, x)
    record = {
        "bitwidth": 8,
        "dtype": "int",
        "is_symmetric": "False",
        "max": 4.0,
        "min": 0.0,
        "offset": 0,
        "scale": 4 / 255,
    }
    partial = {"activation_encodings": {"relu1": {"output": {"0": record}}}, "param_encodings": {}}
    sim.load_encodings(partial, strict=True, partial=True, requires_grad=None, allow_overwrite=False)
    assert sim.model.relu1.output_quantizers[0].get_max().isclose(sim.model.relu1.output_quantizers[0].max)
    assert sim.model.relu2.output_quantizers[0] is not None, "quantizers without an encoding stay on"
    sim.compute_encodings(lambda m: m(x))
    assert abs(float(sim.model.relu1.output_quantizers[0].get_max()) - 4) < 1e-5
    sim.load_encodings(partial, partial=False)
    sim.model.relu1.output_quantizers[0] = None
    with pytest.raises(ValueError):
        sim.load_encodings(partial, strict=True)
    sim.load_encodings(partial, strict=False)
    assert sim.model.relu1.output_quantizers[0] is None
    with pytest.raises(ValueError):
        sim.load_encodings({"activation_encodings": {"nobody": {"output": {"0": record}}}, "param_encodings": {}})


def load_encodings_to_sim():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.quantsim import load_encodings_to_sim

    model, x = Net().eval(), batch()
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings(lambda m: m(x))
    sim.export(".", "net", x)
    other = QuantizationSimModel(model, x)
    load_encodings_to_sim(other, "net_torch.encodings")
    assert other.model(x).equal(sim.model(x))
    frozen = QuantizationSimModel(model, x)
    frozen.load_and_freeze_encodings("net_torch.encodings")
    frozen.compute_encodings(lambda m: m(3 * x))
    assert frozen.model(x).equal(sim.model(x))


def module_import_encodings():
    """Encodings of one module are moved to the same module of another simulation."""
    from aimet_torch.nn import QuantizedLinear
    from aimet_torch.quantization.affine import QuantizeDequantize
    from aimet_torch.quantsim import QuantizationSimModel

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    x = torch.randn(32, 8)
    sims = [QuantizationSimModel(copy.deepcopy(model), x[:1]) for _ in range(2)]
    first, second = sims
    first.compute_encodings(lambda m: m(x))
    second.compute_encodings(lambda m: m(3 * x))

    for kind in ("param", "input", "output"):
        for there, here in zip(first.model, second.model, strict=True):
            records = getattr(there, f"export_{kind}_encodings")("0.6.1")
            assign = getattr(here, f"import_{kind}_encodings")
            assign(
                {k: r for k, r in records.items() if r},
                strict=True,
                partial=True,
                requires_grad=None,
                allow_overwrite=False,
            )
    with torch.no_grad():
        assert torch.equal(first.model(x), second.model(x))
    assert not second.model[0].param_quantizers["weight"].is_overwrite_allowed()

    # what is not there is an error; what is not said is switched off unless the import is partial
    try:
        second.model[1].import_input_encodings(
            {"0": {"bitwidth": 8, "is_symmetric": "False", "min": -1, "max": 1}}, True, True, None, True
        )
        raise SystemExit("a record for a place without a quantizer was taken")
    except (RuntimeError, ValueError):
        pass
    third = QuantizationSimModel(copy.deepcopy(model), x[:1])
    third.compute_encodings(lambda m: m(x))
    third.model[2].import_output_encodings({}, strict=True, partial=False, requires_grad=None, allow_overwrite=True)
    assert third.model[2].output_quantizers[0] is None

    # a quantized module of its own has the same methods
    linear = QuantizedLinear(8, 4)
    linear.param_quantizers["weight"] = QuantizeDequantize((), bitwidth=8, symmetric=True)
    records = first.model[0].export_param_encodings("0.6.1")
    linear.param_quantizers["weight"] = QuantizeDequantize((16, 1), bitwidth=4, symmetric=True)
    linear.import_param_encodings({"weight": records["weight"]}, True, True, True, True)
    assert linear.param_quantizers["weight"].bitwidth == 8
    torch.testing.assert_close(
        linear.param_quantizers["weight"].get_scale().flatten(),
        first.model[0].param_quantizers["weight"].get_scale().flatten(),
        rtol=1e-5,
        atol=0,
    )


def onnx_export():
    import aimet_torch
    from aimet_torch import QuantizationSimModel

    x = batch()
    sim = QuantizationSimModel(Net().eval(), x)
    sim.compute_encodings(lambda model: model(x))
    sim.onnx.export(x, "net.onnx", encoding_version="1.0.0")
    assert json.load(open("net.encodings"))["version"] == "1.0.0"
    aimet_torch.onnx.export(sim, x, "qdq.onnx", export_int32_bias=True)
    assert any(node.op_type == "QuantizeLinear" for node in onnx.load("qdq.onnx").graph.node)
    assert not any(node.op_type == "QuantizeLinear" for node in onnx.load("net.onnx").graph.node)


def quant_analyzer():
    """QuantAnalyzer: which layers lose, with its files."""
    from aimet_torch.common.defs import CallbackFunc, QuantScheme
    from aimet_torch.quant_analyzer import QuantAnalyzer

    loader = images(16)
    model = Net().eval()
    with torch.no_grad():
        wanted = [model(x) for x, _ in loader]

    def forward_pass(model, _):
        with torch.no_grad():
            for x, _ in loader:
                model(x)

    def evaluate(model, _):
        with torch.no_grad():
            return -float(sum((model(x) - y).square().mean() for (x, _), y in zip(loader, wanted, strict=True)))

    analyzer = QuantAnalyzer(
        model=model,
        dummy_input=next(iter(loader))[0],
        forward_pass_callback=CallbackFunc(forward_pass, func_callback_args=None),
        eval_callback=CallbackFunc(evaluate, func_callback_args=None),
        modules_to_ignore=[model.relu1],
    )
    unlabelled = torch.utils.data.DataLoader(loader.dataset.tensors[0], batch_size=4)
    analyzer.enable_per_layer_mse_loss(unlabeled_dataset_iterable=unlabelled, num_batches=2)
    analyzer.analyze(
        quant_scheme=QuantScheme.post_training_tf_enhanced,
        default_param_bw=8,
        default_output_bw=8,
        config_file=None,
        results_dir="./results/",
    )
    for name in ("per_layer_quant_enabled", "per_layer_quant_disabled", "per_layer_mse_loss"):
        assert os.path.isfile(f"results/{name}.html")
        with open(f"results/{name}.json") as file:
            assert {"conv1", "conv2", "fc"} <= set(json.load(file))
    for kind in ("weights", "activations"):
        assert os.path.isfile(f"results/min_max_ranges/{kind}.json")
    assert os.listdir("results/weights_pdf") and os.listdir("results/activations_pdf")


def save_load_encodings():
    from aimet_torch import QuantizationSimModel

    model, x = Net().eval(), batch()
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings(lambda m: m(x))
    sim.save_encodings_to_json(".", "encodings")
    other = QuantizationSimModel(model, x)
    other.load_encodings("encodings.json")
    assert torch.equal(other.model(x), sim.model(x))


def validator():
    from aimet_torch.model_validator.model_validator import ModelValidator

    assert ModelValidator.validate_model(Residual(), model_input=torch.randn(1, 3, 8, 8))


def validator_and_arch_checker():
    """ModelValidator, model preparation and ArchChecker."""
    from aimet_torch.arch_checker.arch_checker import ArchChecker
    from aimet_torch.model_preparer import prepare_model
    from aimet_torch.model_validator.model_validator import ModelValidator
    from aimet_torch.quantsim import QuantizationSimModel

    assert ModelValidator.validate_model(Net().eval(), model_input=batch())
    prepared = prepare_model(Residual().eval())
    assert ModelValidator.validate_model(prepared, batch())
    sim = QuantizationSimModel(prepared, batch())
    sim.compute_encodings(lambda model: model(batch()))

    os.makedirs("arch")
    ArchChecker.check_model_arch(Net().eval(), batch(), result_dir="./arch")
    assert os.listdir("arch") == ["arch_checker_report.html"]


def visualize():
    """Pages of ranges of weights, before and after equalization, and of a simulation."""
    from aimet_torch.cross_layer_equalization import equalize_model
    from aimet_torch.quantsim import QuantizationSimModel
    from aimet_torch.visualization_tools import visualize_stats
    from aimet_torch.visualize_model import (
        visualize_changes_after_optimization,
        visualize_relative_weight_ranges_to_identify_problematic_layers,
        visualize_weight_ranges,
    )

    os.makedirs("visualization", exist_ok=True)
    model = Net().eval()
    equalized = copy.deepcopy(model)
    equalize_model(equalized, (1, 3, 12, 12))
    visualize_weight_ranges(model, results_dir="./visualization", selected_layers=["conv1", "conv2"])
    visualize_relative_weight_ranges_to_identify_problematic_layers(model, "./visualization")
    visualize_changes_after_optimization(model, equalized, "./visualization")
    sim = QuantizationSimModel(equalized, batch())
    sim.compute_encodings(lambda model: model(batch()))
    visualize_stats(sim, batch(), save_path="./visualization/stats.html")
    assert {
        "visualize_weight_ranges.html",
        "visualize_relative_weight_ranges_to_identify_problematic_layers.html",
        "visualize_changes_after_optimization.html",
        "stats.html",
    } <= set(os.listdir("visualization"))


def visualize_percentiles_warns():
    """The page with percentiles."""
    from aimet_torch.quantsim import QuantizationSimModel
    from aimet_torch.visualization_tools import visualize_advanced_stats

    sim = QuantizationSimModel(Net().eval(), batch())
    sim.compute_encodings(lambda model: model(batch()))
    visualize_advanced_stats(sim, batch(), save_path="./advanced.html", additional_percentiles=[1, 99])
    assert os.path.isfile("advanced.html")
