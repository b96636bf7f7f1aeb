"""ONNX operators in torch, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper

from bitwright.onnx.to_torch import as_torch

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
