"""Methods are one function for both front ends, and take every form of call that each front end had."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import bitwright
import bitwright.onnx
import bitwright.torch
from bitwright.core.health.diagnosis import Repair
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.methods.front_end import front_end_of
from tests.support.simulations import calibrated

FEED = {"x": np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)}


def network(batch_norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(8)] if batch_norm else []
    return nn.Sequential(nn.Conv2d(3, 8, 3), *norm, nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()


def proto(batch_norm: bool = True) -> onnx.ModelProto:
    """The same network; channels of the first convolution differ by a thousand."""
    generator = np.random.default_rng(1)
    arrays = {
        "w1": generator.standard_normal((8, 3, 3, 3)) * np.logspace(-2, 1, 8)[:, None, None, None],
        "b1": np.zeros(8),
        "scale": np.ones(8), "shift": np.zeros(8), "mean": np.full(8, 0.1), "var": np.full(8, 2.0),
        "w2": generator.standard_normal((4, 8, 1, 1)),
        "b2": np.zeros(4),
    }  # fmt: skip
    nodes = [helper.make_node("Conv", ["x", "w1", "b1"], ["c"])]
    if batch_norm:
        nodes.append(helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"]))
    nodes.append(helper.make_node("Relu", ["n" if batch_norm else "c"], ["r"]))
    nodes.append(helper.make_node("Conv", ["r", "w2", "b2"], ["y"]))
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4, 6, 6])],
        [numpy_helper.from_array(a.astype(np.float32), name) for name, a in arrays.items() if name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def weight(model: onnx.ModelProto) -> np.ndarray[Any, Any]:
    arrays = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    return next(a for a in arrays.values() if a.shape == (8, 3, 3, 3))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda f, m: f(m), id="alone"),
        pytest.param(lambda f, m: f(m, FEED), id="input-second"),
        pytest.param(lambda f, m: f(m, FEED["x"]), id="array-second"),
        pytest.param(lambda f, m: f(m, dummy_input=FEED), id="by-name"),
        pytest.param(lambda f, m: f(m, None, FEED), id="as-of-a-module"),
    ],
)
@pytest.mark.parametrize("name", ["equalize_model", "fold_all_batch_norms"])
def test_positional_calls_of_onnx_models_are_understood(name: str, call: Callable[..., Any]) -> None:
    found, expected = proto(), proto()
    call(getattr(bitwright.onnx, name), found)
    getattr(bitwright.torch, name)(expected, dummy_input=FEED)
    assert not np.array_equal(weight(found), weight(proto()))
    np.testing.assert_array_equal(weight(found), weight(expected))


@pytest.mark.parametrize("name", ["fold_norms", "rotate_model"])
def test_an_input_that_does_not_fit_is_seen_as_the_second_argument(name: str) -> None:
    with pytest.raises(ModelError, match="dummy_input"):
        getattr(bitwright.onnx, name)(proto(), {"z": FEED["x"]})


def test_what_was_folded_before_is_given_to_equalization_by_name() -> None:
    model = proto()
    folds = bitwright.onnx.fold_all_batch_norms(model, FEED)
    assert len(folds) == 1
    again, unknown, expected = (onnx.ModelProto(), onnx.ModelProto(), proto())
    again.CopyFrom(model)
    unknown.CopyFrom(model)
    report = bitwright.onnx.equalize_model(model, FEED, folds=folds)
    bitwright.onnx.equalize_model(again, FEED, folds=dict(folds.moments))
    bitwright.onnx.equalize_model(unknown, FEED)
    bitwright.onnx.equalize_model(expected, FEED)
    assert report.factors and report.statistics.keys() == folds.moments.keys()
    np.testing.assert_array_equal(weight(model), weight(expected))
    np.testing.assert_array_equal(weight(model), weight(again))
    assert not np.array_equal(weight(model), weight(unknown))


def test_a_module_of_either_package_is_changed_by_either_name() -> None:
    one, two = network(), network()
    bitwright.onnx.equalize_model(one, (1, 3, 8, 8), progress=False)
    bitwright.torch.equalize_model(two, (1, 3, 8, 8), progress=False)
    assert torch.equal(one[0].weight, two[0].weight)
    assert not torch.equal(one[0].weight, network()[0].weight)


def test_classes_of_users_are_of_the_front_end_that_they_derive_from() -> None:
    class Net(nn.Module):
        pass

    assert front_end_of(Net()) is front_end_of(nn.Linear(1, 1))
    assert front_end_of(proto()) is front_end_of(bitwright.onnx.load_model(proto()))
    sim = bitwright.onnx.QuantizationSimModel(proto(), FEED)
    assert front_end_of(sim) is front_end_of(proto())


def test_what_no_front_end_reads_is_refused() -> None:
    with pytest.raises(ModelError, match="a dict is not a model of PyTorch or ONNX.*onnx.load"):
        bitwright.torch.equalize_model({}, (1, 3))


def test_a_path_is_not_changed_in_place(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="a str cannot be changed in place.*load_model"):
        bitwright.onnx.fold_all_batch_norms(str(tmp_path / "m.onnx"))


def test_providers_of_a_module_are_refused() -> None:
    with pytest.raises(ConfigError, match="providers.*runs where its parameters are.*model.to"):
        bitwright.torch.equalize_model(network(), (1, 3, 8, 8), providers=["CPUExecutionProvider"])


def test_biases_are_added_to_either(tmp_path: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    assert bitwright.torch.add_biases(net, torch.ones(1, 4)) == ("0", "2")
    assert net[0].bias is not None and not net[0].bias.any()


def test_quantize_takes_a_module_a_proto_a_path_and_a_simulation_is_made_of_each(tmp_path: Any) -> None:
    onnx.save(proto(), tmp_path / "m.onnx")
    assert bitwright.quantize is bitwright.torch.quantize is bitwright.onnx.quantize
    for model in (proto(), str(tmp_path / "m.onnx"), tmp_path / "m.onnx"):
        result = bitwright.quantize(model, [FEED], recipe=["fold"], progress=False)
        assert isinstance(result.sim, bitwright.onnx.QuantizationSimModel) and len(result.folds) == 1
    result = bitwright.quantize(network(), [torch.from_numpy(FEED["x"])], recipe=["fold"], progress=False)
    assert isinstance(result.sim, bitwright.torch.QuantizationSimModel) and result.model is result.sim.model


def test_options_of_onnx_models_are_refused_for_modules() -> None:
    x = [torch.from_numpy(FEED["x"])]
    with pytest.raises(ConfigError, match="memory_budget: 1024 is given for a PyTorch module.*leave it out"):
        bitwright.quantize(network(), x, memory_budget=1024)
    with pytest.raises(ConfigError, match="providers.*runs where its parameters are"):
        bitwright.quantize(network(), x, providers=["CPUExecutionProvider"])
    with pytest.raises(ModelError, match="a list is not a model of PyTorch or ONNX"):
        bitwright.quantize([], x)


@pytest.mark.parametrize("call", [lambda f, sim: f(sim, [FEED]), lambda f, sim: f(sim, inputs=[FEED])])
@pytest.mark.parametrize("name", ["apply_gptq", "apply_reconstruction"])
def test_batches_of_onnx_models_may_be_named_inputs(name: str, call: Callable[..., Any]) -> None:
    options = {"progress": False, **({} if name == "apply_gptq" else {"iterations": 2})}
    sim = calibrated(bitwright.onnx.QuantizationSimModel(proto(batch_norm=False), FEED, default_param_bw=4), [FEED])
    report = call(partial(getattr(bitwright.onnx, name), **options), sim)
    assert {choice.layer for choice in report} == {op.name for op in sim.graph.ops if op.type == "Conv"}


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "apply_reconstruction: no batches were given. Remedy: pass the batches as data"),
        ({"data": [FEED], "inputs": [FEED]}, "apply_reconstruction: both data and inputs were given"),
    ],
)
def test_batches_of_a_weight_method_are_given_once(given: dict[str, Any], message: str) -> None:
    sim = bitwright.onnx.QuantizationSimModel(proto(batch_norm=False), FEED)
    with pytest.raises(CalibrationError, match=message):
        bitwright.onnx.apply_gptq(sim, **given)


def test_forward_fn_is_refused_for_an_onnx_model() -> None:
    sim = bitwright.onnx.QuantizationSimModel(proto(batch_norm=False), FEED)
    with pytest.raises(ConfigError, match="forward_fn: it is given for an ONNX model, which is called in one way"):
        bitwright.onnx.apply_gptq(sim, [FEED], forward_fn=lambda model, batch: model(batch))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"providers": ["CPUExecutionProvider"]}, ConfigError, "providers: .* is given for a PyTorch module"),
        ({"threads": 2}, ConfigError, "threads: 2 is given for a PyTorch module. Remedy: call torch.set_num_threads"),
        ({}, CalibrationError, "check_model: no data was given, and a module does not say what it takes"),
    ],
)
def test_check_model_refuses_for_a_module_what_only_onnx_models_have(options, error, message):
    data = {} if error is CalibrationError else {"data": [torch.zeros(1, 3, 8, 8)]}
    with pytest.raises(error, match=message):
        bitwright.torch.check_model(network(), **data, **options)


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_stabilize_changes_everything_or_nothing(front_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after sites were switched off, before the repairs are in force."""
    package = getattr(bitwright, front_end)
    model, example = (network(), torch.ones(2, 3, 8, 8)) if front_end == "torch" else (proto(), FEED)
    sim = package.QuantizationSimModel(model, example)
    first, second = [op.name for op in sim.graph.ops if op.type == "Conv"]
    repairs = [Repair(op, kind) for op, kind in ((first, "float"), (second, "clamp"))]
    enabled = {name: site.enabled for name, site in sim.quantizers.items()}

    def interrupted(self: Any, repairs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(package.QuantizationSimModel, "_put_in_force", interrupted)
        with pytest.raises(KeyboardInterrupt):
            package.stabilize(sim, repairs=repairs)
    assert {name: site.enabled for name, site in sim.quantizers.items()} == enabled
    assert sim.repairs == ()

    done = package.stabilize(sim, repairs=repairs)
    assert [repair.op for repair in sim.repairs] == [second]
    assert {site.op for name, site in sim.quantizers.items() if site.enabled is not enabled[name]} == {first}
    done.undo()
    assert {name: site.enabled for name, site in sim.quantizers.items()} == enabled
    assert sim.repairs == ()
