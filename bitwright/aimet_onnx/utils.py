"""``aimet_onnx.utils``: models and sessions as AIMET's scripts hand them over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bitwright.aimet_common.names import absent_names
from bitwright.aimet_common.utils import CachedDataset as CachedDataset
from bitwright.errors import ModelError
from bitwright.onnx.model.data import input_specs, random_feeds
from bitwright.onnx.model.load import load_model
from bitwright.onnx.model.session import open_session
from bitwright.runtimes.onnxruntime import new_session, register_operators

__all__ = [
    "CachedDataset", "OrtInferenceSession", "ParamUtils", "build_session", "disable_quantizers",
    "get_ordered_dict_of_nodes", "get_weights", "make_dummy_input", "make_psnr_eval_fn", "remove_nodes_with_type",
    "replace_node_with_op", "replace_relu6_with_relu",
]  # fmt: skip

__getattr__ = absent_names(__name__)


# ------------------------------------------------------------------------------------ models


def proto_of(model: Any) -> onnx.ModelProto:
    """The protobuf of a ``ModelProto``, of ONNX Runtime's ``ONNXModel`` wrapper, or of a file."""
    if isinstance(model, (str, os.PathLike)):
        return onnx.load(str(model))
    inner = getattr(model, "model", None)
    return inner if isinstance(inner, onnx.ModelProto) else model


def wrapped(model: onnx.ModelProto) -> Any:
    """A model in ONNX Runtime's wrapper."""
    from onnxruntime.quantization.onnx_model import ONNXModel

    return ONNXModel(model)


def remove_nodes_with_type(node_type: str, onnx_graph: onnx.GraphProto) -> None:
    """Take the nodes of a type out of a graph; who read an output reads the first input."""
    gone = {node.output[0]: node.input[0] for node in onnx_graph.node if node.op_type == node_type}
    kept = [node for node in onnx_graph.node if node.op_type != node_type]
    for node in kept:
        node.input[:] = [_before(gone, name) for name in node.input]
    del onnx_graph.node[:]
    onnx_graph.node.extend(kept)


def _before(gone: dict[str, str], name: str) -> str:
    while name in gone:
        name = gone[name]
    return name


def replace_node_with_op(node_type: str, new_type: str, onnx_graph: onnx.GraphProto) -> None:
    """Give the nodes of a type another type."""
    for node in onnx_graph.node:
        if node.op_type == node_type:
            node.op_type = new_type


def get_weights(name: str, onnx_graph: onnx.GraphProto) -> bytes:
    """The raw data of an initializer.

    Raises:
        ModelError: (a RuntimeError) there is none of this name.
    """
    for tensor in onnx_graph.initializer:
        if tensor.name == name:
            return bytes(tensor.raw_data)
    raise ModelError("get_weights", f"there is no initializer {name!r}", "use the name of one of the graph")


def get_ordered_dict_of_nodes(onnx_graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Nodes by name, in the order of the graph."""
    return {node.name: node for node in onnx_graph.node}


class ParamUtils:
    """Parameters of a node of a model by port."""

    @staticmethod
    def get_param(model: Any, node: Any, param_index: int) -> onnx.TensorProto | None:
        """The initializer (or the value of the Constant) at an input of ``node``; ``None`` for an activation."""
        return ParamUtils.get_param_by_name(model, node.input[param_index]) if len(node.input) > param_index else None

    @staticmethod
    def get_param_by_name(model: Any, param_name: str) -> onnx.TensorProto | None:
        """The initializer, or the value of the Constant, called ``param_name``."""
        graph = proto_of(model).graph
        constants = (n.attribute[0].t for n in graph.node if n.op_type == "Constant" and param_name in n.output)
        return next((t for t in graph.initializer if t.name == param_name), None) or next(constants, None)

    @staticmethod
    def get_shape(model: Any, node: Any, param_index: int) -> list[int] | None:
        """The shape of a parameter."""
        found = ParamUtils.get_param(model, node, param_index)
        return None if found is None else list(found.dims)


@contextmanager
def disable_quantizers(sim: Any, quantizer_names: Iterable[str]) -> Iterator[None]:
    """Switch the quantizers of tensors off inside the block.

    Raises:
        ModelError: (a RuntimeError) there is no such tensor.
    """
    table, names = sim.qc_quantize_op_dict, list(quantizer_names)
    missing = sorted(set(names) - set(table))
    if missing:
        raise ModelError(
            "disable_quantizers", f"there are no tensors {missing}", "use names of sim.qc_quantize_op_dict"
        )
    kept = [(site, site.enabled) for name in names for site in table[name].sites]
    for site, _ in kept:
        site.enabled = False
    try:
        yield
    finally:
        for site, enabled in kept:
            site.enabled = enabled


def _lowest(model: Any, clip: Any) -> float | None:
    """The lower bound of a Clip, from its input or, in old models, its attribute."""
    given = ParamUtils.get_param(model, clip, 1)
    if given is not None:
        return float(onnx.numpy_helper.to_array(given))
    return next((a.f for a in clip.attribute if a.name == "min"), None)


def replace_relu6_with_relu(model: Any) -> None:
    """Make a Relu of every Clip from zero between two convolutions, in place."""
    graph = proto_of(model).graph
    made = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        if node.op_type != "Clip":
            continue
        around = [made.get(node.input[0]), *readers.get(node.output[0], [None])]
        if _lowest(model, node) == 0 and all(n is not None and n.op_type in ("Conv", "ConvTranspose") for n in around):
            node.op_type = "Relu"
            del node.input[1:], node.attribute[:]


#: property of a model: pairs of a tensor of the float model and the one that shows it
_SIMULATION = "bitwright.simulation"


def simulated_proto(model: ir.Model, outputs: Sequence[tuple[str, str]]) -> onnx.ModelProto:
    """The protobuf of a simulation, which notes what it is, and which of its tensors shows one of the float model.

    Quantized weights have the names that the weights have in the float model.
    """
    proto: onnx.ModelProto = ir.to_proto(model)
    plain = {t.name: t.name.removesuffix("_simulated") for t in proto.graph.initializer}
    plain = {name: short for name, short in plain.items() if short != name and short not in plain}
    for tensor in proto.graph.initializer:
        tensor.name = plain.get(tensor.name, tensor.name)
    for node in proto.graph.node:
        node.input[:] = [plain.get(name, name) for name in node.input]
    proto.metadata_props.add(key=_SIMULATION, value=json.dumps(outputs))
    return proto


def shown_outputs(proto: onnx.ModelProto) -> list[tuple[str, str]] | None:
    """Tensor of the float model -> the one that shows it, for a simulation's :func:`simulated_proto`; ``None`` for others."""
    noted = next((p.value for p in proto.metadata_props if p.key == _SIMULATION), None)
    if noted is None:
        return None
    there = {name for node in proto.graph.node for name in node.output}
    return [(name, shown) for name, shown in json.loads(noted) if shown in there]


# ------------------------------------------------------------------------------------ sessions


def make_dummy_input(model: Any, dynamic_size: int = 1) -> dict[str, Any]:
    """Random values for the inputs of a model; Bitwright chooses the lengths of free axes."""
    return example_feeds(proto_of(model))


def build_session(
    model: Any, providers: Sequence[Any] | None = None, user_onnx_libs: list[str] | None = None, path: str | None = None
) -> Any:
    """A session of ONNX Runtime; of ``sim.model.model`` one that computes the simulation, with float kernels."""
    for library in user_onnx_libs or ():
        register_operators(library)
    proto, providers = proto_of(model), providers or ["CPUExecutionProvider"]
    if shown_outputs(proto) is not None:
        return open_session(ir.from_proto(proto), providers)
    return new_session(proto.SerializeToString(), providers=providers)


OrtInferenceSession = build_session


def make_psnr_eval_fn(
    fp_session: Any, inputs: Iterable[dict[str, Any]], output_indices: int | list[int] | None = None
) -> Callable[[Any], float]:
    """A function that gives the peak signal-to-noise ratio of a session against ``fp_session``, in dB and 100 at most.

    It is the mean over the inputs, and of several outputs the lowest; of the floating-point ones unless others are chosen.
    """
    feeds = list(inputs)
    expected = [fp_session.run(None, feed) for feed in feeds]
    floats = [i for i, value in enumerate(expected[0] if expected else ()) if np.asarray(value).dtype.kind == "f"]
    chosen = floats if output_indices is None else np.atleast_1d(output_indices).tolist()

    def evaluate(session: Any) -> float:
        outputs = [session.run(None, feed) for feed in feeds]
        pairs = list(zip(expected, outputs, strict=True))
        return min(float(np.mean([peak_signal_to_noise(w[i], got[i]) for w, got in pairs])) for i in chosen)

    return evaluate


def peak_signal_to_noise(expected: Any, actual: Any) -> float:
    """Peak signal-to-noise ratio in dB, 100 at most."""
    error = float(np.mean((np.asarray(expected, np.float64) - actual) ** 2))
    peak = float(np.max(np.abs(expected)))
    return 100.0 if error == 0 or peak == 0 else min(100.0, 10 * float(np.log10(peak**2 / error)))


def example_feeds(model: Any) -> dict[str, Any]:
    """Random values for the inputs of a model."""
    return dict(next(random_feeds(input_specs(load_model(model).model))))
