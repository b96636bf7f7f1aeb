"""``aimet_onnx.utils``: models and sessions as AIMET's scripts hand them over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bitwright.aimet_common.absent import absent_names
from bitwright.onnx.model.data import input_specs, random_feeds
from bitwright.onnx.model.load import load_model
from bitwright.onnx.model.session import open_session
from bitwright.runtimes.onnxruntime import new_session

__all__ = ["OrtInferenceSession", "build_session", "make_dummy_input", "make_psnr_eval_fn"]

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


_SIMULATION = (
    "bitwright.simulation"  # property of a model: pairs of a tensor of the float model and the one that shows it
)


def simulated_proto(model: ir.Model, outputs: Sequence[tuple[str, str]]) -> onnx.ModelProto:
    """The protobuf of a simulation, which notes what it is, and which of its tensors shows one of the float model."""
    proto: onnx.ModelProto = ir.to_proto(model)
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
    model: Any, providers: Sequence[Any], user_onnx_libs: list[str] | None = None, path: str | None = None
) -> Any:
    """A session of ONNX Runtime; of ``sim.model.model`` one that computes the simulation, with float kernels."""
    proto = proto_of(model)
    if shown_outputs(proto) is not None:
        return open_session(ir.from_proto(proto), providers)
    return new_session(proto.SerializeToString(), providers=providers)


OrtInferenceSession = build_session


def make_psnr_eval_fn(
    fp_session: Any, inputs: Iterable[dict[str, Any]], output_indices: int | list[int] | None = None
) -> Callable[[Any], float]:
    """A function that gives the mean peak signal-to-noise ratio, in dB and 100 at most, of a session against ``fp_session``."""
    feeds = list(inputs)
    expected = [fp_session.run(None, feed) for feed in feeds]
    count = len(expected[0]) if expected else 0
    chosen = range(count) if output_indices is None else np.atleast_1d(output_indices).tolist()

    def evaluate(session: Any) -> float:
        found = []
        for feed, wanted in zip(feeds, expected, strict=True):
            got = session.run(None, feed)
            found += [peak_signal_to_noise(wanted[i], got[i]) for i in chosen]
        return float(np.mean(found))

    return evaluate


def peak_signal_to_noise(expected: Any, actual: Any) -> float:
    """Peak signal-to-noise ratio in dB, 100 at most."""
    error = float(np.mean((np.asarray(expected, np.float64) - actual) ** 2))
    peak = float(np.max(np.abs(expected)))
    return 100.0 if error == 0 or peak == 0 else min(100.0, 10 * float(np.log10(peak**2 / error)))


def example_feeds(model: Any) -> dict[str, Any]:
    """Random values for the inputs of a model."""
    return dict(next(random_feeds(input_specs(load_model(model).model))))
