"""AIMET's analyzer, sensitivities, plots and layer outputs under its names."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from bitwright import aimet_onnx, aimet_torch
from bitwright.aimet_common.defs import QuantizationDataType
from bitwright.aimet_common.names import DifferenceWarning
from bitwright.aimet_onnx import analysis
from bitwright.aimet_onnx.layer_output_utils import LayerOutputUtil as OnnxOutputs
from bitwright.aimet_onnx.quant_analyzer import QuantAnalyzer as OnnxAnalyzer
from bitwright.aimet_onnx.utils import make_psnr_eval_fn
from bitwright.aimet_torch.common.defs import CallbackFunc, QuantScheme
from bitwright.aimet_torch.layer_output_utils import LayerOutputUtil, NamingScheme
from bitwright.aimet_torch.quant_analyzer import QuantAnalyzer
from bitwright.aimet_torch.visualization_tools import visualize_advanced_stats, visualize_stats
from bitwright.aimet_torch.visualize_model import (
    visualize_changes_after_optimization,
    visualize_relative_weight_ranges_to_identify_problematic_layers,
    visualize_weight_ranges,
)
from bitwright.torch import QuantizationSimModel
from tests.aimet.onnx_nets import folded


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.relu(self.bn(self.conv(x))).mean((2, 3)))


X = torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


def rated(net):
    with torch.no_grad():
        wanted = net(X)

    def rate(model, scale):
        with torch.no_grad():
            return -scale * float((model(X) - wanted).square().mean())

    return CallbackFunc(rate, 1.0)


def test_torch_analyzer_writes_aimets_files(net, tmp_path):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    analyzer = QuantAnalyzer(net, X, CallbackFunc(lambda model, _: model(X)), rated(net))
    analyzer.enable_per_layer_mse_loss([X, X * 0.5], 2)
    analyzer.analyze(QuantScheme.post_training_tf_enhanced, 4, 8, None, str(tmp_path))
    enabled = json.loads((tmp_path / "per_layer_quant_enabled.json").read_text())
    disabled = json.loads((tmp_path / "per_layer_quant_disabled.json").read_text())
    assert enabled.keys() == disabled.keys() >= {"conv", "fc"}
    assert min(enabled, key=enabled.get) in ("conv", "fc")  # four-bit weights cost most
    assert all(score <= 0 for score in enabled.values())
    ranges = tmp_path / "min_max_ranges"
    weights = json.loads((ranges / "weights.json").read_text())
    assert len(weights["conv_weight"]) == 4 and (ranges / "conv_weight.html").is_file()
    activations = json.loads((ranges / "activations.json").read_text())
    assert activations["conv_input_0"][0] < 0 < activations["conv_input_0"][1]
    assert (tmp_path / "weights_pdf" / "conv" / "conv_weight_3.html").is_file()
    assert list((tmp_path / "activations_pdf").glob("conv_input_q0_0.html"))
    losses = json.loads((tmp_path / "per_layer_mse_loss.json").read_text())
    assert losses["fc"] > 0 and (tmp_path / "per_layer_mse_loss.html").is_file()
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 8 and not [p for p in pages if "//" in p.read_text().replace("</", "")]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_torch_single_steps_leave_the_simulation_as_it_was(net, tmp_path):
    analyzer = QuantAnalyzer(net, X, lambda model: model(X), rated(net), modules_to_ignore=[net.fc])
    sim = analyzer._create_quantsim_and_encodings(QuantScheme.post_training_tf, 8, 8, None)
    assert not any(site.enabled for site in sim.quantizers.values() if site.op == "fc")
    before = sim.model(X).detach()
    real, weights, activations = analyzer.check_model_sensitivity_to_quantization(sim)
    assert real == 0 and weights < 0 and activations < 0
    scores = analyzer.perform_per_layer_analysis_by_enabling_quant_wrappers(sim, str(tmp_path))
    assert "fc" not in scores
    analyzer.perform_per_layer_analysis_by_disabling_quant_wrappers(sim, str(tmp_path))
    assert torch.equal(sim.model(X), before)
    with pytest.raises(RuntimeError, match="enable_per_layer_mse_loss"):
        analyzer.export_per_layer_mse_loss(sim, str(tmp_path))


def test_bad_arguments(net):
    with pytest.raises(ValueError, match="forward_pass_callback.*not a function"):
        QuantAnalyzer(net, X, None, rated(net))
    with pytest.raises(ValueError, match="2 batches are asked for, and the data holds 1"):
        QuantAnalyzer(net, X, print, rated(net)).enable_per_layer_mse_loss([X], 2)
    with pytest.raises(ValueError, match="not part of the model"):
        QuantAnalyzer(net, X, print, rated(net), [nn.ReLU()])
    analyzer = QuantAnalyzer(net, X, lambda model: model(X), lambda model: float("nan"))
    with pytest.raises(ValueError, match="the evaluation returned NaN"):
        analyzer.analyze(results_dir="unused")


@pytest.fixture(scope="module")
def onnx_case():
    model = folded()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    spec = session.get_inputs()[0]
    shape = [n if isinstance(n, int) else 2 for n in spec.shape]
    feed = {spec.name: np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)}
    return model, session, feed


def onnx_sim(case):
    model, _, feed = case
    sim = aimet_onnx.QuantizationSimModel(model, dummy_input=feed)
    sim.compute_encodings([feed])
    return sim


def test_onnx_analyzer_writes_aimets_files(onnx_case, tmp_path):
    model, session, feed = onnx_case
    rate = make_psnr_eval_fn(session, [feed])
    analyzer = OnnxAnalyzer(model, feed, lambda s: s.run(None, feed), rate)
    analyzer.enable_per_layer_mse_loss([feed], 1)
    analyzer.analyze(results_dir=str(tmp_path))
    enabled = json.loads((tmp_path / "per_layer_quant_enabled.json").read_text())
    assert enabled and all(20 < score <= 100 for score in enabled.values())
    assert (tmp_path / "per_layer_quant_disabled.html").is_file()
    assert (tmp_path / "min_max_ranges" / "activations.json").is_file()
    assert json.loads((tmp_path / "per_layer_mse_loss.json").read_text())


def test_onnx_sensitivity_of_layers_and_quantizers(onnx_case, tmp_path):
    _, session, feed = onnx_case
    sim = onnx_sim(onnx_case)
    before = sim.session.run(None, feed)[0]
    page = tmp_path / "layers.html"
    layers = aimet_onnx.analyze_per_layer_sensitivity(sim, make_psnr_eval_fn(session, [feed]), str(page))
    assert layers.keys() <= {op.name for op in sim.graph.ops} and page.is_file()
    metric = analysis.make_topk_logit_psnr_metric(session, [feed], k=2)
    assert not metric.higher_is_worse and metric.sensitivity_score(2.0) == -2.0
    scores = analysis.analyze_per_quantizer_sensitivity(sim, metric)
    assert list(scores.values()) == sorted(scores.values())  # the most sensitive, the lowest, first
    assert scores.keys() == analysis.get_quantizer_op_names(sim).keys()
    by_node = analysis.analyze_per_quantizer_sensitivity(sim, metric, analysis.group_by_op_name(sim))
    assert by_node.keys() == set(analysis.get_quantizer_op_names(sim).values())
    np.testing.assert_array_equal(sim.session.run(None, feed)[0], before)
    one = next(iter(scores))
    only = analysis.analyze_per_quantizer_sensitivity(sim, metric, lambda name: name if name == one else None)
    assert only == {one: scores[one]}
    with pytest.raises(RuntimeError, match="no quantizer that works is in a group"):
        analysis.analyze_per_quantizer_sensitivity(sim, metric, lambda name: None)
    analysis.save_sensitivity_results(scores, str(tmp_path / "s.json"), {one: "a detail"})
    assert list(analysis.load_sensitivity_results(str(tmp_path / "s.json")).items()) == list(scores.items())
    analysis.save_sensitivity_plot(scores, metric, str(tmp_path / "s.html"), details={one: "a detail"})
    assert "a detail" in (tmp_path / "s.html").read_text()
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no ranking"):
        analysis.load_sensitivity_results(str(tmp_path / "bad.json"))
    analysis.visualize_stats(sim, str(tmp_path / "stats.html"))
    assert (tmp_path / "stats_weights.html").is_file() and (tmp_path / "stats_activations.html").is_file()
    with pytest.raises(ValueError, match="does not end with .html"):
        analysis.visualize_stats(sim, str(tmp_path / "stats"))


def test_plots_of_weights_and_ranges(net, tmp_path):
    with torch.no_grad():
        net.conv.weight[1] *= 50
    rows = visualize_weight_ranges(net, str(tmp_path))
    assert [row["layer"] for row in rows] == ["conv", "fc"] and len(rows[0]["min"]) == 4
    worst = visualize_relative_weight_ranges_to_identify_problematic_layers(net, str(tmp_path))
    assert worst[0]["layer"] == "conv" and max(worst[0]["relative"]) > 20
    other = Net()
    changes = visualize_changes_after_optimization(net, other, str(tmp_path), ["conv"])
    assert [row["layer"] for row in changes] == ["conv"]
    sim = aimet_torch.QuantizationSimModel(net, X)
    sim.compute_encodings(lambda model, _: model(X), None)
    visualize_stats(sim, X, str(tmp_path / "stats.html"))
    with pytest.warns(DifferenceWarning, match="percentiles are not drawn"):
        visualize_advanced_stats(sim, X, str(tmp_path / "advanced.html"))
    assert len(list(tmp_path.glob("*.html"))) == 5
    with pytest.raises(ValueError, match="not a module with a weight.*did you mean 'conv'"):
        visualize_weight_ranges(net, str(tmp_path), ["conw"])


def test_torch_layer_outputs(net, tmp_path):
    LayerOutputUtil(net, str(tmp_path / "float")).generate_layer_outputs(X)
    outputs = tmp_path / "float" / "outputs" / "layer_outputs_0"
    np.testing.assert_allclose(np.fromfile(outputs / "fc.raw", np.float32), net(X).detach().numpy().ravel())
    order = json.loads((tmp_path / "float" / "layer_output_name_order.json").read_text())
    assert order["layer_output_names"] == ["conv", "bn", "relu", "fc"]
    assert (tmp_path / "float" / "inputs" / "input_0.raw").is_file()
    sim = aimet_torch.QuantizationSimModel(net, X)
    sim.compute_encodings(lambda model, _: model(X), None)
    util = LayerOutputUtil(sim.model, str(tmp_path / "sim"))
    for _ in range(2):
        util.generate_layer_outputs((X,))
    again = np.fromfile(tmp_path / "sim" / "outputs" / "layer_outputs_1" / "fc.raw", np.float32)
    np.testing.assert_allclose(again, sim.model(X).detach().numpy().ravel(), atol=1e-6)
    named = LayerOutputUtil(sim.model, str(tmp_path / "named"), NamingScheme.ONNX, X)
    named.generate_layer_outputs(X)
    assert list((tmp_path / "named" / "outputs" / "layer_outputs_0").iterdir())
    for scheme, message in ((NamingScheme.TORCHSCRIPT, "TorchScript"), (NamingScheme.ONNX, "pass dummy_input=")):
        with pytest.raises(ValueError, match=message):
            LayerOutputUtil(net, str(tmp_path), scheme)


def test_onnx_layer_outputs(onnx_case, tmp_path):
    model, session, feed = onnx_case
    (array,) = feed.values()
    for name, given in (("float", model), ("sim", onnx_sim(onnx_case))):
        OnnxOutputs(given, str(tmp_path / name)).generate_layer_outputs(array)
        order = json.loads((tmp_path / name / "layer_output_name_order.json").read_text())["layer_output_names"]
        found = np.fromfile(tmp_path / name / "outputs" / "layer_outputs_0" / f"{order[-1]}.raw", np.float32)
        wanted = session.run(None, feed)[0].ravel()
        np.testing.assert_allclose(found, wanted, atol=1e-5 if name == "float" else 0.2)


def test_our_own_simulations_are_analyzed_too(net):
    """The steps take any calibrated simulation."""
    sim = QuantizationSimModel(net, X)
    sim.compute_encodings([X])
    with warnings.catch_warnings():
        warnings.simplefilter("error", DifferenceWarning)
        real, *_ = QuantAnalyzer(net, X, print, rated(net)).check_model_sensitivity_to_quantization(sim)
    assert real == 0


def test_supported_kernels_are_those_of_the_configuration(net, onnx_case):
    from bitwright.core.placement.aimet_config import shipped_config

    kernel = {"activation": {"bitwidth": 16, "dtype": "int"}, "param": {"bitwidth": 8, "dtype": "int"}}
    config = shipped_config("default")
    config["op_type"]["Conv"] = {**config["op_type"].get("Conv", {}), "supported_kernels": [kernel]}
    sim = aimet_torch.QuantizationSimModel(net, X, config_file=config)
    told = {port: {**width, "dtype": QuantizationDataType.int} for port, width in kernel.items()}
    assert sim.get_supported_kernels() == {"defaults": [], "Conv": [told]}
    other = aimet_onnx.QuantizationSimModel(onnx_case[0], config_file=config)
    assert other.get_supported_kernels() == sim.get_supported_kernels()


def test_architecture_is_checked_by_a_table_of_rules(tmp_path):
    from bitwright.aimet_torch.arch_checker import RULES, ArchChecker, Rule

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 40, 3, padding=1), nn.Conv2d(40, 64, 3, padding=1)
            self.c, self.bn, self.act = nn.Conv2d(64, 8, 1), nn.BatchNorm2d(8), nn.SiLU()

        def forward(self, x):
            x = self.c(self.b(torch.relu(self.a(x))))
            return self.act(self.bn(x) + x.mean())

    model = Odd().eval()
    report = ArchChecker.check_model_arch(model, X, str(tmp_path))
    found = {(f.op, f.rule) for f in report.findings}
    assert {
        ("a", "channel_multiple"),
        ("c", "few_channels"),
        ("a", "intermediate_padding"),
        ("bn", "batch_norm"),
    } <= found
    assert not {("b", "channel_multiple"), ("b", "few_channels"), ("a", "few_channels")} & found
    assert any(f.rule == "activation" for f in report.findings)
    assert "40 output channels, no multiple of 32" in (tmp_path / "arch_checker_report.html").read_text()
    assert report.raw_report["c"][0].issue == "8 output channels" and len(report.records()) == len(report.findings)
    mine = Rule("sums", "mine", "it adds", "do not", lambda op, graph: "it is a sum" if op.type == "Add" else None)
    assert any(f.rule == "sums" for f in ArchChecker.check_model_arch(model, X, rules=(*RULES, mine)).findings)
    with pytest.raises(ValueError, match="rules="):
        ArchChecker.add_node_check(nn.Conv2d, print)
