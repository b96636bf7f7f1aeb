"""Simulations of ONNX models as programs of steps: what reconstruction runs, recurrent layers, translations to torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from bitwright.analysis.subject import open_subject
from bitwright.core.graph.cost import multiplications
from bitwright.core.simulation.sites import values_on_grids
from bitwright.export.targets import find_target, rules_for
from bitwright.methods.rounding.program import run_step
from bitwright.onnx import QuantizationSimModel
from bitwright.onnx.program import OnnxSimulation
from bitwright.onnx.to_torch import as_torch
from bitwright.recipes.site_cost import output_errors
from bitwright.recipes.widen import ByTime, Neighbours, widen
from tests.support.recurrent_nets import Variant, feeds, layer_model
from tests.support.simulations import calibrated

SHAPE = (2, 4, 12, 10)
FEEDS = [{"x": np.random.default_rng(i).normal(size=SHAPE).astype(np.float32)} for i in range(2)]


def net(shape) -> onnx.ModelProto:
    """Two convolutions; the second multiplies by pictures of a fourth of the size."""
    rng = np.random.default_rng(0)
    one, two = (rng.normal(size=(8, n, 3, 3)).astype(np.float32) for n in (4, 8))
    nodes = [
        helper.make_node("Conv", ["x", "one"], ["a"], "first", strides=[2, 2], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "two"], ["y"], "second", pads=[1] * 4),
    ]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", None))]
    weights = [numpy_helper.from_array(one, "one"), numpy_helper.from_array(two, "two")]
    graph = helper.make_graph(nodes, "net", ports[:1], ports[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def simulated(shape) -> OnnxSimulation:
    sim = calibrated(QuantizationSimModel(net(shape), FEEDS[0], config_file=rules_for("ort_cpu", None)), FEEDS)
    return OnnxSimulation(sim)


OPEN = pytest.mark.parametrize(
    "shape", [("n", 4, "h", "w"), (2, 4, "h", "w")], ids=["all-but-channels-open", "pictures-open"]
)


def shares(model: OnnxSimulation) -> dict[str, float]:
    """What raising each would cost in ONNX Runtime."""
    values = values_on_grids(model.sites(), model.shared())
    time = ByTime(Neighbours(model.observed_graph(), values), find_target("ort_cpu").kernel_times)
    return {
        name: time.share([id(site.quantizer)])
        for name, site in model.sites().items() if site.role in ("input", "output")
    }  # fmt: skip


@OPEN
def test_lengths_that_a_model_leaves_open_are_those_of_the_data(shape):
    model = simulated(shape)
    model.program(FEEDS[0])
    graph = model.observed_graph()
    assert graph.values["b"].shape == (2, 8, 6, 5)
    assert multiplications(graph, graph.op("second")) == 2 * 8 * 6 * 5 * 8 * 9
    assert -1 in model.graph().values["b"].shape or not model.graph().values["b"].shape


@OPEN
def test_costs_of_raised_values_are_those_of_a_model_with_fixed_lengths(shape):
    assert shares(simulated(shape)) == pytest.approx(shares(simulated(SHAPE)))


@OPEN
def test_open_lengths_raise_the_same_values(shape):
    options = {
        "bits": None,
        "times": find_target("ort_cpu").kernel_times,
        "enough": 0.0,
        "allowance": 1.0,
        "memory": 1.0,
    }
    found, fixed = (widen(simulated(s), FEEDS, **options) for s in (shape, SHAPE))
    assert [(w.site, w.work) for w in found.raised] == [(w.site, pytest.approx(w.work)) for w in fixed.raised]
    assert found.raised


ALPHAS = (("activations", ["HardSigmoid", "Affine", "ScaledTanh"]), ("activation_alpha", [0.3, 0.8, 0.9]),
          ("activation_beta", [0.4, 0.1, 0.7]))  # fmt: skip
VARIANTS = {
    **{f"{op} {way}": Variant(op, way) for op in ("RNN", "GRU", "LSTM") for way in ("forward", "reverse")},
    "states": Variant("LSTM", states=True),
    "peepholes": Variant("LSTM", peepholes=True, states=True),
    "lengths": Variant("GRU", lengths=(6, 2, 4), states=True),
    "lengths, reverse": Variant("LSTM", "reverse", lengths=(6, 2, 4), states=True),
    "batch first": Variant("LSTM", layout=1, states=True),
    "batch first, reverse": Variant("GRU", "reverse", layout=1),
    "no bias": Variant("GRU", bias=False),
    "reset before": Variant("GRU", attributes=(("linear_before_reset", 1),)),
    "coupled gates": Variant("LSTM", attributes=(("input_forget", 1),)),
    "clip": Variant("LSTM", attributes=(("clip", 0.4),)),
    "functions with parameters": Variant("LSTM", attributes=ALPHAS),
    "other functions": Variant("GRU", attributes=(("activations", ["Softsign", "LeakyRelu"]),)),
    "a function of its own": Variant("RNN", attributes=(("activations", ["Softplus"]),)),
    "both directions": Variant("LSTM", "bidirectional", states=True),
}  # fmt: skip


def recurrent_sim(v: Variant, **options: Any) -> QuantizationSimModel:
    sim = QuantizationSimModel(layer_model(v), feeds(v), threads=1, **options)
    sim.compute_encodings([feeds(v, seed) for seed in range(3)])
    return sim


@pytest.mark.parametrize("name", VARIANTS)
def test_a_traced_step_computes_what_the_node_does(name: str) -> None:
    v = VARIANTS[name]
    model = OnnxSimulation(recurrent_sim(v))
    program, state = model.program(feeds(v, 9))
    assert sum(step.traced is not None for step in program.steps) == v.directions
    for i, step in enumerate(program.steps):
        real = run_step(step, state, program.constants)
        if step.traced is not None:
            assert step.traced.differentiable and not step.differentiable
            found = run_step(step.traced, state, program.constants)
            for one, other in zip(found, real, strict=True):
                np.testing.assert_allclose(one.numpy(), other.numpy(), atol=2e-5)
            inside = run_step(step.traced, state, program.constants, model.quantize)
            quantized = run_step(step, state, program.constants, model.quantize)
            for one, other in zip(inside, quantized, strict=True):
                assert (one - other).abs().max() < 0.05 and (one - other).abs().mean() < 2e-3
        program.settle(state, i, real, program.outputs)


def test_a_function_that_nobody_knows_stays_with_the_runtime() -> None:
    from bitwright.onnx.to_torch import RecurrentLayer

    node = layer_model(Variant("GRU", attributes=(("activations", ["Sigmoid", "Mish"]),))).graph[0]
    assert RecurrentLayer.of(node) is None


@pytest.mark.parametrize("op, layout", [("RNN", 0), ("GRU", 1), ("LSTM", 0)])
def test_every_site_of_a_native_layer_has_an_estimate(op: str, layout: int) -> None:
    """Weights, states and what is inside the steps: each alone makes about the noise that was estimated."""
    v = Variant(op, batch=32, length=8, hidden=8, layout=layout)
    sim = recurrent_sim(v, preset="w4a8")
    batches = [feeds(v, seed) for seed in range(3)]
    draws = [output_errors(OnnxSimulation(sim), batches, samples=96, seed=seed) for seed in range(3)]
    found = [{**errors.activations, **errors.weights} for errors in draws]
    assert not draws[0].unknown and found[0].keys() == sim.quantizers.keys()
    restore, compared = sim.remember(), 0
    subject = open_subject(sim)
    wanted = [list(subject.outputs(batch, True)) for batch in batches]
    for name in found[0]:
        for other in sim.quantizers.values():
            other.enabled = other.quantizer is sim.quantizers[name].quantizer
        measured = noise(sim, batches, wanted)
        estimate = sum(f[name] for f in found) / len(found)
        if measured > 1e-8:
            assert 0.4 < estimate / measured < 2.5, name
            compared += 1
    restore()
    assert compared >= 3


def noise(sim: QuantizationSimModel, batches: list[Any], wanted: list[list[Any]]) -> float:
    """Over signal, the mean of the outputs."""
    found = [sim.session.run(None, batch) for batch in batches]
    ratios = []
    for i in range(len(wanted[0])):
        error = sum(float(np.square(f[i] - w[i]).sum()) for f, w in zip(found, wanted, strict=True))
        ratios.append(error / sum(float(np.square(w[i]).sum()) for w in wanted))
    return float(np.mean(ratios))


RANDOM = np.random.default_rng(0)


def x(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# op, opset, inputs, attributes, outputs
CASES = [
    ("Conv", 17, [x(2, 4, 7, 6), x(6, 2, 3, 2), x(6)], {"group": 2, "pads": [1, 0, 2, 1], "strides": [2, 1]}, 1),
    ("Conv", 17, [x(1, 2, 8, 9), x(3, 2, 3, 3)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, 1),
    ("Conv", 17, [x(1, 2, 8, 9), x(3, 2, 2, 4)], {"auto_pad": "SAME_LOWER"}, 1),
    ("Conv", 17, [x(1, 2, 9), x(3, 2, 3)], {"dilations": [2]}, 1),
    ("ConvTranspose", 17, [x(1, 4, 5, 5), x(4, 2, 3, 3), x(4)],
     {"group": 2, "strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 0]}, 1),
    ("Gemm", 17, [x(3, 4), x(5, 4), x(5)], {"transB": 1, "alpha": 0.5, "beta": 2.0}, 1),
    ("MatMul", 17, [x(2, 3, 4), x(4, 5)], {}, 1),
    ("Clip", 17, [x(3, 4), np.float32(-0.5), np.float32(0.5)], {}, 1),
    ("Clip", 10, [x(3, 4)], {"min": -0.5, "max": 0.25}, 1),
    ("LeakyRelu", 17, [x(3, 4)], {"alpha": 0.2}, 1),
    ("HardSigmoid", 17, [x(3, 4)], {"alpha": 0.3, "beta": 0.4}, 1),
    ("HardSwish", 17, [x(3, 4)], {}, 1),
    ("Elu", 17, [x(3, 4)], {"alpha": 0.7}, 1),
    ("PRelu", 17, [x(2, 3, 4), x(3, 1)], {}, 1),
    ("Gelu", 20, [x(3, 4)], {"approximate": "tanh"}, 1),
    ("Softmax", 17, [x(2, 3, 4)], {"axis": 1}, 1),
    ("Softmax", 11, [x(2, 3, 4)], {"axis": 1}, 1),
    ("Squeeze", 17, [x(2, 1, 3, 1), ints(1, -1)], {}, 1),
    ("Squeeze", 17, [x(2, 1, 3, 1), np.zeros(0, np.int64)], {}, 1),
    ("Squeeze", 11, [x(2, 1, 3, 1)], {"axes": [1]}, 1),
    ("Unsqueeze", 17, [x(2, 3), ints(0, -1)], {}, 1),
    ("Reshape", 17, [x(2, 3, 4), ints(0, -1)], {}, 1),
    ("Flatten", 17, [x(2, 3, 4)], {"axis": 2}, 1),
    ("Transpose", 17, [x(2, 3, 4)], {"perm": [2, 0, 1]}, 1),
    ("Transpose", 17, [x(2, 3, 4)], {}, 1),
    ("Slice", 17, [x(4, 6), ints(1, -1), ints(3, -5), ints(0, 1), ints(1, -2)], {}, 1),
    ("Slice", 17, [x(4, 6), ints(5), ints(-100), ints(1), ints(-1)], {}, 1),
    ("Slice", 9, [x(4, 6)], {"starts": [1], "ends": [1000], "axes": [1]}, 1),
    ("Split", 17, [x(4, 6), ints(2, 4)], {"axis": 1}, 2),
    ("Split", 17, [x(4, 6)], {"axis": 0}, 2),
    ("Gather", 17, [x(4, 6), np.array([[0, -1], [2, 2]])], {"axis": 1}, 1),
    ("Gather", 17, [x(4, 6), np.array(1)], {"axis": 0}, 1),
    ("Expand", 17, [x(3, 1), ints(2, 1, 4)], {}, 1),
    ("Pad", 17, [x(2, 3), ints(1, 0, 0, 2), np.float32(0.5)], {}, 1),
    ("MaxPool", 17, [x(1, 2, 7, 7)], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 2]}, 1),
    ("AveragePool", 17, [x(1, 2, 7, 7)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}, 1),
    ("AveragePool", 17, [x(1, 2, 7, 7)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}, 1),
    ("GlobalAveragePool", 17, [x(1, 2, 7, 7)], {}, 1),
    ("ReduceMean", 17, [x(2, 3, 4)], {"axes": [-1], "keepdims": 0}, 1),
    ("ReduceMean", 18, [x(2, 3, 4), ints(0, 2)], {}, 1),
    ("ReduceSum", 17, [x(2, 3, 4)], {}, 1),
    ("ReduceSum", 17, [x(2, 3, 4)], {"noop_with_empty_axes": 1}, 1),
    ("ReduceMax", 17, [x(2, 3, 4)], {"axes": [1]}, 1),
    ("BatchNormalization", 17, [x(2, 3, 4), x(3), x(3), x(3), x(3) ** 2], {"epsilon": 1e-3}, 1),
    ("LayerNormalization", 17, [x(2, 3, 4), x(3, 4), x(3, 4)], {"axis": 1}, 1),
    ("Pow", 17, [x(2, 3) ** 2, np.float32(1.5)], {}, 1),
    ("Div", 17, [ints(-7, 7, 9), ints(2, 2, -4)], {}, 1),
    ("Where", 17, [np.array([True, False]), x(2), x(2)], {}, 1),
    ("Cast", 17, [x(3)], {"to": 7}, 1),
    ("Shape", 17, [x(2, 3, 4)], {"start": 1}, 1),
    ("Concat", 17, [x(2, 3), x(2, 1)], {"axis": -1}, 1),
]  # fmt: skip


def runtime(op: str, opset: int, inputs: list[np.ndarray], attrs: dict, outputs: int) -> list[np.ndarray]:
    names = [f"o{i}" for i in range(outputs)]
    node = helper.make_node(op, [f"i{n}" for n in range(len(inputs))], names, **attrs)
    data = [numpy_helper.from_array(np.asarray(a), f"i{n}") for n, a in enumerate(inputs)]
    free = [helper.make_tensor_value_info("unused", 1, [1])]
    results = [helper.make_empty_tensor_value_info(n) for n in names]
    graph = helper.make_graph([node], "one", free, results, data)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(names, {"unused": np.zeros(1, np.float32)})


@pytest.mark.parametrize("op, opset, inputs, attrs, outputs", CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_row(op, opset, inputs, attrs, outputs):
    expected = runtime(op, opset, inputs, attrs, outputs)
    row = as_torch(op, {**attrs, "opset": opset, "outputs": outputs}, outputs)
    assert row is not None
    found = row([torch.from_numpy(np.array(a)) for a in inputs])
    assert len(found) == outputs
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b, atol=2e-6, rtol=2e-5)
        assert a.numpy().dtype == b.dtype


@pytest.mark.parametrize(
    "op, attrs",
    [
        ("Resize", {}),
        ("Pad", {"mode": "reflect"}),
        ("MaxPool", {"kernel_shape": [2, 2], "ceil_mode": 1}),
        ("ConvTranspose", {"output_shape": [4, 4]}),
        ("BatchNormalization", {"training_mode": 1}),
    ],
)
def test_what_has_no_row_is_left_to_the_runtime(op, attrs):
    assert as_torch(op, {**attrs, "opset": 17, "outputs": 1}, 1) is None


def test_every_row_is_an_onnx_operator():
    from bitwright.onnx.to_torch import ROWS

    assert set(ROWS) <= {schema.name for schema in onnx.defs.get_all_schemas()}
