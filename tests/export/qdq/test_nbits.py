"""4-bit weights as ONNX Runtime's own operator: equal to the simulation in a default session, and read back as they were."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from bitwright.compare.verify import verify_folder
from bitwright.errors import ConfigError
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated


class Net(nn.Module):
    """Products of several forms: with and without bias, on two and three axes, shared, and of an odd inner length."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.plain, self.odd = nn.Linear(64, 48), nn.Linear(48, 33, bias=False), nn.Linear(33, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(torch.tanh(self.plain(torch.tanh(self.wide(x)))))


def simulated(shape: tuple[int, ...], preset: str) -> tuple[QuantizationSimModel, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(*shape)
    sim = calibrated(QuantizationSimModel(Net().eval(), x, preset=preset), [x])
    return sim, x


@pytest.mark.parametrize(
    ("preset", "shape"), [("w4g32", (2, 3, 64)), ("w4", (3, 64))], ids=["matmul in blocks", "gemm per channel"]
)
def test_a_default_session_computes_the_simulation(tmp_path: Path, preset: str, shape: tuple[int, ...]) -> None:
    import onnxruntime

    sim, x = simulated(shape, preset)
    exported = sim.export(tmp_path, "net", x, weight_only="nbits")
    nodes = [node for node in onnx.load(exported.qdq).graph.node if node.op_type == "MatMulNBits"]
    assert nodes, "nothing was written as the operator"
    assert all({a.name: a.i for a in node.attribute}["accuracy_level"] == 1 for node in nodes)
    session = onnxruntime.InferenceSession(exported.qdq, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    wanted = sim.model(x).detach().numpy()
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert sim.verify(x, weight_only="nbits").ok
    assert any("MatMulNBits" in note for note in exported.notes)
    again, kept = (
        [s.encoding for s in one.quantizers.values() if s.role == "weight"] for one in (OnnxSim(exported.qdq), sim)
    )
    for found, given in zip(again, kept, strict=True):
        assert found is not None and given is not None and found.format == given.format
        assert np.array_equal(np.unique(found.scale), np.unique(given.scale))


def test_unknown_form_is_refused(tmp_path: Path) -> None:
    sim, x = simulated((3, 64), "w4g32")
    with pytest.raises(ConfigError, match="'nbit' is not a value of this option .did you mean 'nbits'"):
        sim.export(tmp_path, "net", x, weight_only="nbit")


def test_the_target_decides(tmp_path: Path) -> None:
    """ONNX Runtime gets its own operator unasked; others get standard ONNX, also where they are only compared."""
    sim, x = simulated((2, 3, 64), "w4g32")
    counts = {}
    litert = ["litert"] if find_spec("ai_edge_litert") else []  # an extra
    for target in ("ort_cpu", "openvino_cpu", "packed", *litert):
        exported = sim.export(tmp_path / target, "net", x, target=target)
        counts[target] = sum(node.op_type == "MatMulNBits" for node in onnx.load(exported.qdq).graph.node)
    assert counts["ort_cpu"] > 0 and not sum(counts.values()) - counts["ort_cpu"], counts


@pytest.mark.parametrize(
    ("preset", "target", "said"),
    [
        ("w4g32", "packed", "with target='ort_cpu' or weight_only='nbits', 3 run as MatMulNBits"),
        ("w8", "packed", "(MatMulNBits has no form for them)"),
        ("w8", "ort_cpu", "(MatMulNBits has no form for them)"),
    ],
)
def test_the_note_offers_the_operator_only_where_it_helps(tmp_path: Path, preset: str, target: str, said: str) -> None:
    sim, x = simulated((2, 3, 64), preset)
    (note,) = [note for note in sim.export(tmp_path, "net", x, target=target).notes if "MatMulNBits" in note]
    assert said in note and note.count("MatMulNBits") == 1, note


def test_a_runtime_is_compared_with_the_form_for_it(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    pytest.importorskip("ai_edge_litert")
    torch.manual_seed(0)
    x = torch.randn(2, 64)
    sim = QuantizationSimModel(
        nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32)).eval(), x, preset="w4g32"
    )
    sim.compute_encodings([x])
    sim.export(tmp_path, "net", x)
    read = OnnxSim(tmp_path / "net_float.onnx", preset="w4g32")
    feeds = {next(iter(read.example())): x.numpy()}
    read.compute_encodings([feeds])
    for one, batch in ((sim, x), (read, feeds)):
        for runtime in ("onnxruntime", "openvino", "litert"):
            assert one.verify(batch, runtime=runtime).ok
            assert one.drift("file", runtime, batch).ok


def test_openvino_computes_the_operator_as_simulated(tmp_path: Path) -> None:
    """Also of an inner length that no block divides: as DequantizeLinear and Gemm it rounded the activations of that layer."""
    pytest.importorskip("openvino")
    sim, x = simulated((2, 3, 64), "w4g32")
    sim.export(tmp_path, "net", x)
    assert verify_folder(tmp_path, runtime="openvino").ok


@pytest.mark.parametrize("preset", ["w8", "w4"])
@pytest.mark.parametrize("bias", [False, True])
def test_half_precision_products_are_exact_in_a_default_session(preset: str, bias: bool, tmp_path: Path) -> None:
    """The runtime takes the Casts of a float16 weight out, and made a MatMulNBits of the product that rounds activations."""
    random = np.random.default_rng(0)
    weight, shift = (random.standard_normal(shape).astype(np.float16) / 11 for shape in ((128, 64), (64,)))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["t" if bias else "y"], name="product")]
    if bias:
        nodes.append(helper.make_node("Add", ["t", "b"], ["y"], name="shift"))
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n", 7, n])] for name, n in (("x", 128), ("y", 64))
    ]
    stored = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(shift, "b")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *ends, stored), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    sim, feeds = OnnxSim(model, preset=preset), {"x": random.standard_normal((2, 7, 128)).astype(np.float16)}
    sim.compute_encodings([feeds])
    sim.export(tmp_path, "m")
    (wanted,), (got,) = sim.session.run(None, feeds), ort.InferenceSession(tmp_path / "m.onnx").run(None, feeds)
    error = np.square(np.subtract(got, wanted, dtype=np.float64)).sum()
    assert error < 1e-6 * np.square(wanted.astype(np.float64)).sum(), (
        "60 dB: half precision leaves 70, rounding to 8 bits 47"
    )
    assert sim.verify(feeds).ok
