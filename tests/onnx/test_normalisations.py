"""Normalisations as exporters of JAX, Keras and torch write them keep the precision of the one operator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx import QuantizationSimModel

D = 32
Node = tuple[str, str, str]  # operator, what it reads, what it makes

MEAN: list[Node] = [("ReduceMean", "h", "m"), ("Sub", "h m", "c")]
TORCH: list[Node] = [
    *MEAN, ("Pow", "c two", "c2"), ("ReduceMean", "c2", "v"), ("Add", "v eps", "ve"), ("Sqrt", "ve", "sd"), ("Div", "c sd", "n"),
    ("Mul", "n g", "ng"), ("Add", "ng b", "o"),
]  # fmt: skip
KERAS: list[Node] = [
    *MEAN, ("Mul", "c c", "c2"), ("ReduceMean", "c2", "v"), ("Add", "v eps", "ve"), ("Sqrt", "ve", "sd"),
    ("Reciprocal", "sd", "r"), ("Mul", "r g", "rg"), ("Mul", "h rg", "a"), ("Mul", "m rg", "mm"), ("Sub", "b mm", "s"),
    ("Add", "a s", "o"),
]  # fmt: skip
FLAX: list[Node] = [
    ("ReduceSum", "h ax", "s1"), ("Div", "s1 count", "m"), ("Mul", "h h", "h2"), ("ReduceSum", "h2 ax", "s2"),
    ("Div", "s2 count", "q"), ("Mul", "m m", "mm"), ("Sub", "q mm", "v0"), ("Max", "v0 zero", "v"), ("Add", "v eps", "ve"),
    ("Sqrt", "ve", "sd"), ("Reciprocal", "sd", "r"), ("Mul", "r g", "rg"), ("Sub", "h m", "c"), ("Mul", "c rg", "ng"),
    ("Add", "ng b", "o"),
]  # fmt: skip
SHAPED: list[Node] = [  # the number of elements read off the shape, as with lengths that are not fixed
    ("Shape", "h", "shape"), ("Gather", "shape ax", "length"), ("Cast", "length", "count_2"), ("ReduceSum", "h ax", "s1"),
    ("Div", "s1 count_2", "m"), ("Sub", "h m", "c"), ("Mul", "c c", "c2"), ("ReduceSum", "c2 ax", "s2"),
    ("Div", "s2 count_2", "v"), ("Add", "v eps", "ve"), ("Sqrt", "ve", "sd"), ("Div", "c sd", "n"), ("Mul", "n g", "ng"),
    ("Add", "ng b", "o"),
]  # fmt: skip
RMS: list[Node] = [
    ("Mul", "h h", "h2"), ("ReduceMean", "h2", "v"), ("Add", "v eps", "ve"), ("Sqrt", "ve", "sd"), ("Reciprocal", "sd", "r"),
    ("Mul", "h r", "n"), ("Add", "g one", "g1"), ("Mul", "n g1", "o"),
]  # fmt: skip
NORM: list[Node] = [
    ("ReduceL2", "h", "l"),
    ("Max", "l eps", "lb"),
    ("Div", "h lb", "n"),
    ("Mul", "n g", "ng"),
    ("Add", "ng b", "o"),
]
FORMS = {"torch": TORCH, "keras": KERAS, "flax": FLAX, "shaped": SHAPED, "rms": RMS, "norm": NORM}


def network(norm: Sequence[Node]) -> onnx.ModelProto:
    """A product, a normalisation, a product; weight and bias of the normalisation are not trivial."""
    rng = np.random.default_rng(0)
    stored = {
        "two": np.float32(2), "eps": np.float32(1e-6), "zero": np.float32(0), "one": np.float32(1), "count": np.float32(D),
        "ax": np.array([-1]), "g": rng.uniform(0.3, 3, D).astype(np.float32), "b": rng.normal(0, 0.3, D).astype(np.float32),
        "w1": (rng.normal(size=(D, D)) / 6).astype(np.float32), "w2": (rng.normal(size=(D, 8)) / 6).astype(np.float32),
    }  # fmt: skip
    nodes = [helper.make_node("MatMul", ["x", "w1"], ["h"], "first")]
    for op, reads, makes in norm:
        attributes = {
            "ReduceMean": {"axes": [-1]}, "ReduceL2": {"axes": [-1]}, "Cast": {"to": 1}, "LayerNormalization": {"epsilon": 1e-6},
        }.get(op, {})  # fmt: skip
        nodes.append(helper.make_node(op, reads.split(), [makes], f"make_{makes}", **attributes))
    nodes.append(helper.make_node("MatMul", ["o", "w2"], ["y"], "last"))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", 1, ["n", D])],
        [helper.make_tensor_value_info("y", 1, ["n", 8])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def batches() -> list[dict[str, np.ndarray]]:
    """Rows of which every fourth is padding."""
    rng = np.random.default_rng(1)
    found = [rng.normal(size=(16, D)).astype(np.float32) for _ in range(4)]
    for rows in found:
        rows[::4] = 0
    return [{"x": rows} for rows in found]


def decibels(norm: Sequence[Node], data: list[dict[str, np.ndarray]]) -> tuple[float, QuantizationSimModel]:
    model = network(norm)
    sim = QuantizationSimModel(model)
    sim.compute_encodings(data, progress=False)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    want = np.asarray(session.run(None, data[0])[0])
    keep = data[0]["x"].any(1)
    return sqnr(want[keep], sim.run(data[0])[0][keep]), sim


@pytest.mark.parametrize("name", FORMS)
def test_written_out_a_normalisation_has_the_precision_of_the_one_operator(name: str) -> None:
    data = batches()
    one, _ = decibels([("LayerNormalization", "h g b", "o")], data)
    written, sim = decibels(FORMS[name], data)
    assert one > 28
    assert written > one - 2
    assert set(sim.quantizers) == {"first.input[0]", "w1", "first.output[0]", "last.input[0]", "w2", "last.output[0]"}


def test_the_file_of_a_written_normalisation_agrees_with_its_simulation(tmp_path: Path) -> None:
    data = batches()
    _, sim = decibels(FLAX, data)
    sim.export(tmp_path, "net")
    assert sim.verify(data[0]).ok
