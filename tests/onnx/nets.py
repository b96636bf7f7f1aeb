"""Small ONNX models by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


class Net:
    """Collects nodes and initializers; ``model()`` freezes them.

    Methods named after operators would be many: ``net("Conv", "x", "w", name="c", pads=[1, 1, 1, 1])`` adds a node
    and returns the name of its output.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self._count = 0

    def input(self, name: str = "x", shape: Sequence[Any] = (1, 3, 8, 8), dtype: int = FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def const(self, value: Any, name: str = "") -> str:
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        name = name or self._fresh("const")
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def weights(self, *shape: int, name: str = "", scale: float = 0.5) -> str:
        return self.const(self.random.standard_normal(shape) * scale, name or self._fresh("weight"))

    def __call__(self, op: str, *inputs: str, name: str = "", out: str | Sequence[str] = "", **attrs: Any) -> Any:
        outs = [out or self._fresh(op.lower())] if isinstance(out, str) else list(out)
        self.nodes.append(helper.make_node(op, list(inputs), outs, name=name, **attrs))
        return outs[0] if len(outs) == 1 else outs

    def conv(
        self, x: str, cin: int = 3, cout: int = 4, *, k: int = 3, name: str = "", bias: bool = True, **attrs: Any
    ) -> str:
        prefix = name or self._fresh("conv")
        w = self.weights(cout, cin // attrs.get("group", 1), *[k] * 2, name=f"{prefix}.weight")
        b = (self.weights(cout, name=f"{prefix}.bias"),) if bias else ()
        return self("Conv", x, w, *b, name=name, out=attrs.pop("out", f"{prefix}.out"), **attrs)

    def bn(self, x: str, channels: int = 4, name: str = "bn", **attrs: Any) -> str:
        parts = [self.weights(channels, name=f"{name}.{p}") for p in ("weight", "bias", "mean")]
        var = self.const(self.random.uniform(0.5, 2, channels), f"{name}.var")
        return self("BatchNormalization", x, *parts, var, name=name, out=attrs.pop("out", f"{name}.out"), **attrs)

    def graph(
        self, *outputs: Any, name: str = "net", inputs: Sequence[onnx.ValueInfoProto] | None = None
    ) -> onnx.GraphProto:
        """Outputs are names (float, shape left open) or ``(name, dtype, shape)``."""
        infos = [
            helper.make_tensor_value_info(*o) if isinstance(o, tuple) else helper.make_tensor_value_info(o, FLOAT, None)
            for o in outputs
        ]
        return helper.make_graph(
            self.nodes, name, self.inputs if inputs is None else list(inputs), infos, self.initializers
        )

    def model(
        self, *outputs: Any, opset: int = 17, domains: Mapping[str, int] | None = None, **more: Any
    ) -> onnx.ModelProto:
        imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in (domains or {}).items())]
        return helper.make_model(
            self.graph(*outputs), opset_imports=imports, ir_version=more.pop("ir_version", 8), **more
        )

    def _fresh(self, base: str) -> str:
        self._count += 1
        return f"{base}{self._count}"


def body(*outputs: Any, net: Net, inputs: Sequence[tuple[str, int, Sequence[Any] | None]] = ()) -> onnx.GraphProto:
    """A body for If, Loop or Scan."""
    return net.graph(*outputs, name="body", inputs=[helper.make_tensor_value_info(n, t, s) for n, t, s in inputs])


def loop_step(*outputs: Any, net: Net, **states: Sequence[Any] | None) -> onnx.GraphProto:
    """A body of a Loop that goes on until its last iteration; ``states`` are the shapes of the floats that it carries."""
    going = net("Identity", "going_in", out="going_out")
    carried = [(name, FLOAT, shape) for name, shape in states.items()]
    return body((going, BOOL, ()), *outputs, net=net, inputs=[("i", INT64, ()), ("going_in", BOOL, ()), *carried])


def two_branches() -> onnx.ModelProto:
    """``y = x W`` with one of two weights, as ``cond`` says."""
    then, other, net = Net(1), Net(2), Net()
    then("MatMul", "x", then.weights(4, 4), name="mt", out="t1")
    other("MatMul", "x", other.weights(4, 4), name="mo", out="o1")
    net.input("x", (3, 4))
    net.input("cond", (), BOOL)
    branches = {"then_branch": body("t1", net=then), "else_branch": body("o1", net=other)}
    return net.model(net("If", "cond", name="branch", out="y", **branches))


def run(model: Any, feeds: Mapping[str, Array], *, optimize: bool = False) -> list[Array]:
    """Outputs of a proto or an ``onnx_ir`` model in ONNX Runtime, as written unless ``optimize``: with exact integer sums."""
    import onnx_ir as ir
    import onnxruntime as ort

    from bitwright.compare.runtime import EXACT_SUMS

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in EXACT_SUMS.items():
        options.add_session_config_entry(key, value)
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def feeds_for(model: onnx.ModelProto, seed: int = 0, **lengths: int) -> dict[str, Array]:
    """Random feeds for every input that is not an initializer; symbolic lengths by name, else 2."""
    random, given = np.random.default_rng(seed), {i.name for i in model.graph.initializer}
    found = {}
    for info in model.graph.input:
        if info.name in given:
            continue
        tensor = info.type.tensor_type
        shape = [d.dim_value or lengths.get(d.dim_param, 2) for d in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        value = random.standard_normal(shape) if np.dtype(dtype).kind == "f" else random.integers(0, 2, shape)
        found[info.name] = value.astype(dtype)
    return found


def conv_chain(blocks: int, channels: int = 2) -> onnx.ModelProto:
    """``blocks`` of convolution, batch norm, ReLU and a shortcut: four nodes each."""
    net = Net()
    x = net.input("x", (1, channels, 4, 4))
    for i in range(blocks):
        y = net.bn(net.conv(x, channels, channels, k=1, name=f"{i}.conv", bias=False), channels, f"{i}.bn")
        x = net("Add", net("Relu", y, name=f"{i}.relu", out=f"{i}.relu.out"), x, name=f"{i}.add", out=f"{i}.out")
    return net.model(x)


def relu_chain(count: int) -> onnx.ModelProto:
    """``count`` times Relu."""
    net = Net()
    x = net.input("x", (1, 4, 4, 4))
    for _ in range(count):
        x = net("Relu", x)
    return net.model(x)


def assorted(blocks: int) -> onnx.ModelProto:
    """``blocks`` of 16 operators of many kinds, two of them in the bodies of an If; reductions as before opset 18."""
    net = Net()
    x = net.input("x", (1, 4, 4, 4))
    flat, image = net.const(np.int64([1, 64])), net.const(np.int64([1, 4, 4, 4]))
    for i in range(blocks):
        y = net("Relu", net.conv(x, 4, 4, k=1, name=f"{i}.first"))
        y = net("Add", net("Mul", y, net("Sigmoid", y)), net.weights(1))
        rows = net("MatMul", net("Reshape", y, flat), net.weights(64, 64, scale=0.1))
        rows = net("LayerNormalization", rows, net.const(np.ones(64)), net.const(np.zeros(64)))
        y = net.conv(net("Concat", net("Reshape", rows, image), y, axis=1), 8, 4, k=1, name=f"{i}.second")
        mean = net("ReduceMean", y, axes=[0, 1, 2, 3], keepdims=0)
        bodies = {}
        for branch, op in (("then_branch", "Tanh"), ("else_branch", "Relu")):
            inner = Net()
            bodies[branch] = body(inner(op, y, out=f"{i}.{branch}"), net=inner)
        x = net("If", net("Greater", mean, net.const(np.float32(0))), out=f"{i}.out", **bodies)
    return net.model(x)
