"""Small marked ONNX models built by hand, and their simulation one node at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from bitwright.compare.runtime import EXACT_SUMS, run_model
from bitwright.core.numerics.affine import encode, fake_quantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import parse_format
from bitwright.core.numerics.granularity import Granularity, PerTensor
from bitwright.core.numerics.integer_sums import derive_bias_encoding, fake_quantize_bias
from bitwright.core.numerics.spec import QuantSpec, Symmetry

Array = np.ndarray[Any, Any]


class Graph:
    """Builds a marked model; every method returns the value it made.

    Encodings are collected beside it: ``mark(x, site, "uint8", array)`` takes the range of ``array``.
    """

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.initializers: list[ir.Value] = []
        self.encodings: dict[str, Encoding] = {}

    def input(self, name: str, *shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.inputs.append(value)
        return value

    def param(self, name: str, array: Array | Sequence[int]) -> ir.Value:
        """An initializer; a sequence of ints is the shape of random float32 numbers."""
        if not isinstance(array, np.ndarray):
            array = self.rng.normal(size=tuple(array)).astype(np.float32)
        tensor = ir.Tensor(array, name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.initializers.append(value)
        return value

    def op(
        self, op: str, *inputs: ir.Value | None, name: str | None = None, outputs: int = 1, **attrs: Any
    ) -> ir.Value:
        node = ir.node(op, inputs, attrs, num_outputs=outputs, name=f"node_{len(self.nodes)}")
        self.nodes.append(node)
        for i, value in enumerate(node.outputs):
            value.name = (name or f"{op.lower()}_{len(self.nodes)}") + (f"_{i}" if i else "")
            value.type = ir.TensorType(ir.DataType.FLOAT)
        return node.outputs[0]

    def site(self, value: ir.Value, site: str, name: str | None = None) -> ir.Value:
        """A marker, without an encoding yet."""
        result = self.op("Site", value, name=name or f"marked_{len(self.nodes)}", site=site)
        self.nodes[-1].domain = "bitwright"
        result.type, result.shape = value.type, value.shape
        return result

    def mark(
        self,
        value: ir.Value,
        site: str,
        fmt: str = "uint8",
        data: Any = (-3.0, 3.0),
        granularity: Granularity | None = None,
        symmetry: Symmetry = "asymmetric",
        name: str | None = None,
    ) -> ir.Value:
        """A marker with the encoding of ``data``'s range."""
        self.encodings[site] = encoding_of(data, fmt, granularity or PerTensor(), symmetry)
        return self.site(value, site, name)

    def weight(
        self, value: ir.Value, fmt: str = "int8", granularity: Granularity | None = None, site: str = ""
    ) -> ir.Value:
        """A marked weight, symmetric."""
        assert value.const_value is not None
        return self.mark(value, site or str(value.name), fmt, value.const_value.numpy(), granularity, "symmetric")

    def model(self, *outputs: ir.Value, opset: int = 21) -> ir.Model:
        graph = ir.Graph(
            self.inputs,
            outputs,
            nodes=self.nodes,
            initializers=self.initializers,
            opset_imports={"": opset, "bitwright": 1},
            name="test",
        )
        return ir.Model(graph, ir_version=10)


def encoding_of(data: Any, fmt: str, granularity: Granularity, symmetry: Symmetry) -> Encoding:
    """The min-max encoding of an array, or of a ``(lo, hi)`` pair."""
    data = np.asarray(data, np.float32)
    if isinstance(granularity, PerTensor):
        lo, hi = data.min(), data.max()
    else:
        view = data.reshape(granularity.view_shape(data.shape))
        axes = tuple(i for i, n in enumerate(granularity.broadcast_shape(data.shape)) if n == 1)
        shape = granularity.param_shape(data.shape)
        lo, hi = view.min(axes).reshape(shape), view.max(axes).reshape(shape)
    return encode(lo, hi, QuantSpec(parse_format(fmt), granularity, symmetry), granularity)


def simulate(
    model: ir.Model,
    encodings: Mapping[str, Encoding],
    feeds: Mapping[str, Array],
    biases: Mapping[str, tuple[str, str]] | None = None,
) -> tuple[dict[str, list[Array]], dict[str, Array]]:
    """Run a marked model node by node: the ONNX reference for operators, `core` for markers.

    Args:
        model: marked; opset 21.
        encodings: site -> encoding; sites without one pass through.
        feeds: graph inputs.
        biases: name of a float bias -> ``(input site, weight site)`` it gets its int32 grid from.

    Returns:
        ``(values of each site, in execution order; graph outputs by name)``.
    """
    known: dict[str, Array] = dict(feeds)
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        known[str(value.name)] = value.const_value.numpy()
    for name, (input_site, weight_site) in (biases or {}).items():
        grid = derive_bias_encoding(encodings[input_site], encodings[weight_site], known[name])
        known[name] = fake_quantize_bias(known[name], grid)
    sites: dict[str, list[Array]] = {}
    for node in model.graph:
        if node.op_type == "Site":
            site = node.attributes["site"].as_string()
            x = known[str(node.inputs[0].name)]
            if site in encodings:
                x = fake_quantize(x, encodings[site])
                sites.setdefault(site, []).append(x)
            known[str(node.outputs[0].name)] = x
            continue
        names = [str(v.name) if v is not None else "" for v in node.inputs]
        proto = onnx.helper.make_graph(
            [ir.to_proto(node)],
            "node",
            [onnx.helper.make_empty_tensor_value_info(n) for n in dict.fromkeys(filter(None, names))],
            [onnx.helper.make_empty_tensor_value_info(str(v.name)) for v in node.outputs],
        )
        single = onnx.helper.make_model(proto, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
        results = evaluate(single, {n: known[n] for n in names if n})
        known.update((str(v.name), np.asarray(a)) for v, a in zip(node.outputs, results, strict=True))
    return sites, {str(v.name): known[str(v.name)] for v in model.graph.outputs}


def evaluate(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """The ONNX reference; for grouped transposed convolutions, which it lacks, ONNX Runtime unoptimised."""
    if model.graph.node[0].op_type != "ConvTranspose":
        return list(ReferenceEvaluator(model).run(None, dict(feeds)))
    for value in model.graph.input:
        dtype = onnx.helper.np_dtype_to_tensor_dtype(feeds[value.name].dtype)
        value.type.tensor_type.elem_type = dtype
    for value in model.graph.output:
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return run_plain(ir.from_proto(model), feeds)


def run_both(model: ir.Model, feeds: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Outputs by mode: float kernels, and integer kernels with exact sums."""
    return {mode: run_model(model, feeds, mode, entries=EXACT_SUMS) for mode in ("float", "integer")}  # type: ignore[arg-type]


def types(model: ir.Model) -> list[str]:
    """Operator types in execution order."""
    return [node.op_type for node in model.graph]


def run_plain(model: ir.Model, feeds: Mapping[str, Array]) -> list[Array]:
    """Graph outputs without any optimisation."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))
