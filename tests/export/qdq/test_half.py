"""Files of half precision: what computes in it, what stays in float32 and why, and that every answer is finite."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import bitwright
from bitwright.compare.verify import verify_folder
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ConfigError
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel as TorchSim
from tests.support.simulations import calibrated

FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16


class Small(nn.Module):
    """A network without anything that half precision cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 16, 3), nn.Linear(16 * 36, 64)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.fc(self.conv(x).relu().flatten(1)))).softmax(-1)


class Hard(nn.Module):
    """An overflow, two epsilons that half precision has not, a mask of -3.4e38 and a phase of hundreds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.small = nn.Parameter(torch.full((64,), 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * 1e5
        y = y / (y.abs().amax(-1, keepdim=True) + 1e-12)
        y = y * torch.rsqrt((y * self.small).pow(2).mean(-1, keepdim=True) + 1e-10)
        masked = torch.where(y > 0, torch.zeros_like(y), torch.full_like(y, torch.finfo(torch.float32).min))
        y = self.b(torch.softmax(y * 0.1 + masked, -1)) * 100
        return self.c(torch.sin(y))


def exported_float(model: nn.Module, x: Tensor, path: Path) -> Path:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
    return path


def answers(path: Path, batches: list[Tensor]) -> list[np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(str(path))
    name, kind = session.get_inputs()[0].name, session.get_inputs()[0].type
    return [session.run(None, {name: x.numpy().astype(np.float16 if "16" in kind else np.float32)})[0] for x in batches]


def ends(path: Path) -> list[int]:
    graph = onnx.load(path).graph
    return [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]


def test_a_preset_of_half_precision_writes_half_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Small().eval(), [torch.randn(4, 3, 8, 8) for _ in range(3)]
    sources = (model, exported_float(model, batches[0], tmp_path / "float.onnx"))
    for folder, source in zip((tmp_path / "torch", tmp_path / "onnx"), sources, strict=True):
        data = batches if source is model else [x.numpy() for x in batches]
        result = bitwright.quantize(
            source, data, preset="fp16", path=folder, recipe=["fold"], progress=False, measure_speed=False
        )
        written = onnx.load(result.exported.qdq)
        assert sum(node.op_type == "Cast" for node in written.graph.node) == 2  # of the input and of the output
        assert {one.data_type for one in written.graph.initializer} & {FLOAT, FLOAT16} == {FLOAT16}
        size, whole = (path.stat().st_size for path in (result.exported.qdq, result.exported.float_model))
        assert size < 0.56 * whole
        for x, y in zip(batches, answers(result.exported.qdq, batches), strict=True):
            assert sqnr(model(x).detach().numpy(), y) > 50
        assert verify_folder(folder).ok
        assert result.sim.verify(data[0]).ok


def test_no_constant_is_written_that_nothing_reads(tmp_path: Path) -> None:
    model, x = (
        nn.Sequential(nn.Linear(64, 96, bias=False), nn.SiLU(), nn.Linear(96, 64, bias=False)).eval(),
        torch.randn(2, 5, 64),
    )
    bitwright.quantize(model, [x], preset="fp16", recipe=["fold"], progress=False).sim.export(tmp_path, "net", x)
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert {held.name for held in graph.initializer} <= {name for node in graph.node for name in node.input}
    assert sum(len(held.raw_data) for held in graph.initializer) == 2 * (64 * 96 + 96 * 64)


def test_what_half_precision_cannot_hold_stays_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Hard().eval(), [torch.randn(8, 16) for _ in range(4)]
    assert float(1e5 * model.a(batches[0]).abs().max()) > 65504
    result = bitwright.quantize(
        model, batches, preset="fp16", path=tmp_path, recipe=["fold"], progress=False, measure_speed=False
    )
    for x, y in zip(batches, answers(result.exported.qdq, batches), strict=True):
        assert np.isfinite(y).all()
        assert sqnr(model(x).detach().numpy(), y) > 40
    why = " ".join(note for note in result.exported.notes if "in float32" in note)
    for reason in ("beyond float16's 65504", "of which float16 makes zero", "has too few digits", "reaches 3.4e+38"):
        assert reason in why
    halves = [one for one in onnx.load(result.exported.qdq).graph.initializer if one.data_type == FLOAT16]
    assert {"a.weight", "b.weight", "c.weight"} <= {one.name.removesuffix("_q") for one in halves}


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_calibration_leaves_values_beyond_half_precision_in_float(front: str, tmp_path: Path) -> None:
    """The largest batch is not the example: only calibration has seen it."""
    torch.manual_seed(0)
    model, small = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(2, 8)
    batches = [small, 1e6 * torch.randn(2, 8)]
    if front == "torch":
        sim: Any = calibrated(TorchSim(model, small, preset="fp16"), batches)
        exported = sim.export(tmp_path, "m", small)
    else:
        sim = OnnxSim(exported_float(model, small, tmp_path / "f.onnx"), small.numpy(), preset="fp16")
        sim.compute_encodings([x.numpy() for x in batches], progress=False)
        exported = sim.export(tmp_path, "m")
    left = [row for row in sim.coverage() if "beyond the largest number of float16, 65504" in row.how]
    assert left
    assert all(np.isfinite(y).all() for y in answers(exported.qdq, batches))


@pytest.mark.parametrize("opset", [None, 21])
def test_convolutions_compute_in_bfloat16_where_the_opset_has_them(opset: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Small().eval(), [torch.randn(4, 3, 8, 8) for _ in range(2)]
    result = bitwright.quantize(
        model, batches, preset="bf16", path=tmp_path, recipe=["fold"], progress=False, measure_speed=False, opset=opset
    )
    file = onnx.load(result.exported.qdq)
    onnx.checker.check_model(file, full_check=True)
    assert file.opset_import[0].version == (opset or 22)
    kinds = {v.name: v.type.tensor_type.elem_type for v in onnx.shape_inference.infer_shapes(file).graph.value_info}
    of_convolutions = {kinds[node.output[0]] for node in file.graph.node if node.op_type == "Conv"}
    assert of_convolutions == {FLOAT if opset else onnx.TensorProto.BFLOAT16}
    assert any("Conv: it has no form in bfloat16" in note for note in result.exported.notes) == (opset is not None)


def test_the_float_rest_of_an_integer_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(4, 3, 8, 8)
    rules = {"preset": "w8a8", "rules": [{"match": "fc", "weight": None, "output": None, "input": None}]}
    sim = calibrated(TorchSim(model, x, config_file=rules), [x])
    whole, half = (sim.export(tmp_path / str(rest), "m", x, rest=rest) for rest in (None, "float16"))
    kinds = {one.name: one.data_type for one in onnx.load(half.qdq).graph.initializer}
    assert [kind for name, kind in kinds.items() if name.startswith("fc.weight")] == [FLOAT16]
    assert onnx.TensorProto.INT8 in kinds.values()
    one, other = (answers(exported.qdq, [x])[0] for exported in (whole, half))
    assert sqnr(one, other) > 30  # a code may fall on the other side
    assert half.qdq.stat().st_size < 0.7 * whole.qdq.stat().st_size
    assert verify_folder(tmp_path / "float16").ok


def test_inputs_and_outputs_in_half_precision(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(4, 3, 8, 8)
    for preset in ("fp16", "w8a8"):
        sim = calibrated(TorchSim(model, x, preset=preset), [x])
        both = sim.export(tmp_path / preset, "m", x, io="float16")
        assert ends(both.qdq) == [FLOAT16, FLOAT16]
        assert verify_folder(tmp_path / preset).ok
        one = sim.export(tmp_path / f"{preset}1", "m", x, io={"outputs": "float16"})
        assert ends(one.qdq) == [FLOAT, FLOAT16]


def test_wrong_types_are_refused(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    sim = calibrated(TorchSim(model, x), [x])
    with pytest.raises(ConfigError, match="'float8' is not a type of floats that a file can have"):
        sim.export(tmp_path, "m", x, rest="float8")
    with pytest.raises(ConfigError, match="bfloat16 and float16 are asked for at once"):
        sim.export(tmp_path, "m", x, rest="float16", io="bfloat16")
    with pytest.raises(ConfigError, match="LiteRT files have no operators of float16"):
        sim.export(tmp_path, "m", x, rest="float16", target="litert")
    with pytest.raises(ConfigError, match="'fp32' is not a type of floats"):
        bitwright.quantize(model, [x], rest="fp32", recipe=["fold"], progress=False)


def test_activations_of_a_half_model_are_not_quantized_again_by_a_default_session(tmp_path: Path) -> None:
    """ONNX Runtime makes Reshape and Gemm of MatMul and Add, and MatMulNBits of that, which puts the activations on int8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).half().eval()
    batches = [torch.randn(2, 4, 16).half() for _ in range(3)]
    source = tmp_path / "half.onnx"
    torch.onnx.export(model, (batches[0],), source, opset_version=17, dynamo=False)
    sim = calibrated(OnnxSim(source, batches[0].numpy()), [batch.numpy() for batch in batches])
    report = sim.verify(batches[2].numpy())
    assert report.ok and all(row.as_integer.equal > 0.99 for row in report.rows), str(report)
