"""Small ONNX models and feeds that the scripts take for the user's own."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def _bn(rng: np.random.Generator, name: str, channels: int) -> dict[str, np.ndarray]:
    return {
        f"{name}.weight": rng.uniform(0.5, 1.5, channels),
        f"{name}.bias": rng.normal(size=channels) * 0.3,
        f"{name}.running_mean": rng.normal(size=channels) * 0.2,
        f"{name}.running_var": rng.uniform(0.5, 1.5, channels),
    }


def net() -> onnx.ModelProto:
    """Convolutions with batch norms, and a linear layer."""
    rng = np.random.default_rng(0)
    weights = {
        "conv1.weight": rng.normal(size=(8, 3, 3, 3)) * 0.3,
        "conv1.bias": rng.normal(size=8) * 0.1,
        **_bn(rng, "bn1", 8),
        "conv2.weight": rng.normal(size=(8, 8, 3, 3)) * 0.2,
        "conv2.bias": rng.normal(size=8) * 0.1,
        **_bn(rng, "bn2", 8),
        "fc.weight": rng.normal(size=(10, 8 * 64)) * 0.05,
        "fc.bias": rng.normal(size=10) * 0.1,
    }
    norm = ("weight", "bias", "running_mean", "running_var")
    nodes = [
        helper.make_node("Conv", ["input", "conv1.weight", "conv1.bias"], ["conv1.out"], "conv1"),
        helper.make_node("BatchNormalization", ["conv1.out", *(f"bn1.{n}" for n in norm)], ["bn1.out"], "bn1"),
        helper.make_node("Relu", ["bn1.out"], ["relu1.out"], "relu1"),
        helper.make_node("Conv", ["relu1.out", "conv2.weight", "conv2.bias"], ["conv2.out"], "conv2"),
        helper.make_node("BatchNormalization", ["conv2.out", *(f"bn2.{n}" for n in norm)], ["bn2.out"], "bn2"),
        helper.make_node("Relu", ["bn2.out"], ["relu2.out"], "relu2"),
        helper.make_node("Flatten", ["relu2.out"], ["flat.out"], "flatten"),
        helper.make_node("Gemm", ["flat.out", "fc.weight", "fc.bias"], ["output"], "fc", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, 12, 12])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def folded() -> onnx.ModelProto:
    """:func:`net` without its batch norms."""
    from bitwright.onnx import fold_all_batch_norms

    model = net()
    fold_all_batch_norms(model, progress=False)
    return model


def feeds(count: int = 3) -> list[dict[str, np.ndarray]]:
    """Batches of two images."""
    rng = np.random.default_rng(1)
    return [{"input": rng.normal(size=(2, 3, 12, 12)).astype(np.float32)} for _ in range(count)]
