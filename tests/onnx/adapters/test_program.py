"""What methods are told of an ONNX simulation."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bitwright.core.graph.cost import multiplications
from bitwright.export.targets import find_target, rules_for
from bitwright.onnx import QuantizationSimModel
from bitwright.onnx.program import OnnxSimulation
from bitwright.recipes.judge import values_on_grids
from bitwright.recipes.widen import ByTime, Neighbours, widen

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
    sim = QuantizationSimModel(net(shape), FEEDS[0], config_file=rules_for("ort_cpu", None))
    sim.compute_encodings(FEEDS, progress=False)
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
