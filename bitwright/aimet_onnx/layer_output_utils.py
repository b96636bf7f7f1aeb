"""``aimet_onnx.layer_output_utils``: outputs of every node as files."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from bitwright.aimet_common.layer_outputs import RawFiles
from bitwright.aimet_onnx._models import proto_of
from bitwright.aimet_onnx.quantsim import QuantizationSimModel
from bitwright.aimet_onnx.utils import build_session
from bitwright.analysis.layer_outputs import layer_values

__all__ = ["LayerOutput", "LayerOutputUtil"]


class LayerOutput:
    """What the nodes of a model return, by the names of their tensors.

    Args:
        model: a float model (``ModelProto``, ``ONNXModel``, a path), or a calibrated :class:`QuantizationSimModel`. (AIMET takes
            the model inside of a simulation; here quantizers are not nodes of it.)
        dir_path, providers: AIMET's arguments; sessions are on the CPU unless ``providers`` says otherwise.
    """

    def __init__(self, model: Any, dir_path: str, providers: Any = None) -> None:
        self._sim = model if isinstance(model, QuantizationSimModel) else None
        self._session: Any = None
        if self._sim is not None:
            return
        watched = onnx.shape_inference.infer_shapes(proto_of(model))
        self._names = [name for node in watched.graph.node for name in node.output if name]
        there = {value.name for value in watched.graph.output}
        watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._names if name not in there)
        self._session = build_session(watched, providers or ["CPUExecutionProvider"])

    def get_outputs(self, input_dict: dict[str, Any]) -> dict[str, Any]:
        """Tensor -> value of every output of a node, in execution order."""
        if self._sim is not None:
            graph = self._sim.graph
            values = {name: quantized for name, _, quantized in layer_values(self._sim, input_dict)}
            return {graph.op(name).outputs[0]: x for name, x in values.items() if "[" not in name and "#" not in name}
        found = self._session.run(self._names, input_dict)
        return {
            n: x
            for n, x in zip(self._names, found, strict=True)
            if isinstance(x, np.ndarray) and x.dtype.kind in "fiub"
        }


class LayerOutputUtil:
    """Writes the outputs of every node for inputs, one by one, as raw float32 files.

    Args:
        model: as for :class:`LayerOutput`.
        dir_path: folder, made if need be.
        device: AIMET's argument; sessions run on the CPU.
    """

    def __init__(self, model: Any, dir_path: str, device: int = 0) -> None:
        self._model = model
        self.layer_output = LayerOutput(model, dir_path)
        self.save_input_output = RawFiles(dir_path)

    def generate_layer_outputs(self, input_instance: Any) -> None:
        """Run one input (an array, or arrays in the model's order) and write it with every node's output."""
        feed = input_instance
        if not isinstance(feed, dict):
            arrays = feed if isinstance(feed, tuple | list) else [feed]
            feed = dict(zip(self._inputs(), arrays, strict=True))
        self.save_input_output.save(
            list(input_instance.values()) if isinstance(input_instance, dict) else input_instance,
            self.layer_output.get_outputs(feed),
        )

    def _inputs(self) -> list[str]:
        if isinstance(self._model, QuantizationSimModel):
            return [spec.name for spec in self._model.specs]
        graph = proto_of(self._model).graph
        held = {value.name for value in graph.initializer}
        return [value.name for value in graph.input if value.name not in held]
