"""The same numbers for every target, in the form that its runtime has kernels for."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from bitwright.compare.runtime import optimized_types
from bitwright.compare.verify import verify_folder
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel
from bitwright.errors import ConfigError
from bitwright.export.qdq.write import to_qdq
from bitwright.export.targets import TARGETS
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.runtimes.adapters import open_file
from bitwright.torch import QuantizationSimModel, quantize
from tests.export.marked import Graph, run_both
from tests.support.simulations import calibrated

RNG = np.random.default_rng(3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(128, 4)
    ).eval()


BATCHES = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def types(path: Path) -> set[str]:
    """Types of the stored weights."""
    model = onnx.load(path)
    names = {onnx.TensorProto.INT4: "int4", onnx.TensorProto.INT8: "int8", onnx.TensorProto.UINT4: "uint4"}
    return {names[t.data_type] for t in model.graph.initializer if t.name.endswith("_q") and t.data_type in names}


@pytest.fixture(scope="module")
def simulated() -> QuantizationSimModel:
    """The network with 4-bit weights."""
    return quantize(net(), BATCHES, "w4a8", recipe=["fold"]).sim


@pytest.mark.parametrize(("target", "stored"), [("ort_cpu", "int8"), ("openvino_cpu", "int8"), ("packed", "int4")])
def test_4_bit_weights_stay_4_bit_in_everything_but_their_storage(simulated, tmp_path, target, stored):
    exported = simulated.export(tmp_path, "model", BATCHES[0], target=target)
    assert types(exported.qdq) == {stored}
    report = simulated.verify(BATCHES[0], target=target)
    assert report.ok
    integers = {"ort_cpu": ["QLinearConv", "QLinearConv", "QGemm"], "packed": ["float"] * 3}
    kernels = [row.kernel for row in report.rows if row.kernel != "constant"]
    assert kernels[1:] == integers.get(target, integers["ort_cpu"])
    weights = {site: s for site, s in json.loads(exported.sites.read_text())["sites"].items() if s["role"] == "weight"}
    assert {s["encoding"]["format"] for s in weights.values()} == {"int4"}
    again = OnnxSim(exported.qdq)
    read = [s for s in again.quantizers.values() if s.role == "weight"]
    assert len(read) == 3 and all(s.encoding is not None and s.encoding.format == IntFormat(4) for s in read)
    assert json.loads(exported.manifest.read_text())["settings"]["target"] == target


def test_all_targets_compute_the_same() -> None:
    g = Graph()
    x = g.mark(g.input("x", 2, 6), "x", "uint8", RNG.normal(size=(2, 6)).astype(np.float32))
    w = g.weight(g.param("w", RNG.normal(size=(6, 5)).astype(np.float32)), "int4", PerChannel(1))
    model = g.model(g.mark(g.op("MatMul", x, w), "y", "uint8", name="y"))
    feeds = {"x": RNG.normal(size=(2, 6)).astype(np.float32)}
    found = [run_both(to_qdq(model, g.encodings, target=name).model, feeds)["float"]["y"] for name in TARGETS]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@pytest.mark.parametrize("fmt", ["int2", "int3", "int4", "uint4"])
def test_weights_of_float_products_stay_packed(fmt: str) -> None:
    """No integer kernel reads them: their size is what they are for."""
    g = Graph()
    w = g.weight(g.param("w", RNG.normal(size=(8, 5)).astype(np.float32)), fmt, PerBlock(4, 0, 1))
    made = to_qdq(g.model(g.op("MatMul", g.input("x", 2, 8), w, name="y")), g.encodings, target="ort_cpu").model
    assert {v.dtype for n, v in made.graph.initializers.items() if n.endswith("_q")} <= {
        ir.DataType.INT4,
        ir.DataType.UINT4,
    }


def test_unknown_target_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target: 'ort_gpu' is not.*did you mean 'ort_cpu'.*use one of 'ort_cpu'"):
        quantize(net(), BATCHES, path=tmp_path / "out", target="ort_gpu")
    assert not (tmp_path / "out").exists()
    sim = calibrated(QuantizationSimModel(net(), BATCHES[0]), BATCHES)
    with pytest.raises(ConfigError, match="target"):
        sim.export(tmp_path / "out", "net", target="ort_gpu")


# ------------------------------------------------------------------------------------------------ recurrent layers


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, **getattr(kind, "keywords", {})}
        self.rnn, self.head = kind(6, **sizes, batch_first=True), nn.Linear(8, 3)  # type: ignore[call-arg]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


STEPS = [torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.mark.parametrize(("kind", "preset"), [(nn.LSTM, "w4a8"), (nn.GRU, "w8a8")])
def test_quantize_simulates_recurrent_layers_as_the_target_computes_them(tmp_path, kind, preset):
    result = quantize(Recurrent(kind).eval(), STEPS, preset, recipe=["fold"], path=tmp_path, progress=False)
    assert result.exported is not None
    model = ir.load(result.exported.qdq)
    kinds = [node.op_type for node in model.graph]
    assert kind.__name__ in kinds and "Scan" not in kinds
    tensors = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    stored = {tensor.dtype for tensor in tensors if tensor.size > 40}
    assert stored == {ir.DataType.INT8}, "weights take one byte in the file"
    assert result.sim.verify(STEPS[0]).ok and verify_folder(tmp_path).ok
    again = OnnxSim(result.exported.qdq)
    expected = result.sim.model(STEPS[0]).detach().numpy()
    np.testing.assert_array_equal(again.run({"x": STEPS[0].numpy()})[0], expected)
    weights = [
        s.encoding.format.name for s in again.quantizers.values() if s.role == "weight" and s.encoding is not None
    ]
    assert set(weights) == {f"int{preset[1]}"}


def test_recurrent_weights_are_constants_for_the_runtime(tmp_path: Path) -> None:
    """A DequantizeLinear would be computed in every run."""
    made = quantize(Recurrent(nn.GRU).eval(), STEPS, recipe=["fold"], path=tmp_path, progress=False).exported
    assert made is not None
    kinds = optimized_types(ir.load(made.qdq))
    assert "GRU" in kinds.values() and not {"Cast", "Sub", "Mul"} & set(kinds.values())


@pytest.mark.parametrize("granularity", ["per_tensor", "per_gate"])
def test_folded_weights_of_every_granularity(tmp_path: Path, granularity: str) -> None:
    rules = {"recurrent": "boundary_only", "rules": [{"op": "LSTM", "weight": {"granularity": granularity}}]}
    sim = calibrated(QuantizationSimModel(Recurrent(nn.LSTM).eval(), STEPS[0], config_file=rules), STEPS)
    found = sim.export(tmp_path, "net", STEPS[0])
    assert verify_folder(tmp_path).ok
    read = OnnxSim(found.qdq)
    np.testing.assert_array_equal(read.run({"x": STEPS[0].numpy()})[0], sim.model(STEPS[0]).detach().numpy())


def test_asymmetric_weights_of_recurrent_layers(tmp_path: Path) -> None:
    rules = {
        "recurrent": "boundary_only",
        "rules": [{"op": "LSTM", "weight": {"format": "uint8", "symmetry": "asymmetric"}}],
    }
    sim = calibrated(QuantizationSimModel(Recurrent(nn.LSTM).eval(), STEPS[0], config_file=rules), STEPS)
    found = sim.export(tmp_path, "net", STEPS[0])
    assert verify_folder(tmp_path).ok and "Sub" in {n.op_type for n in ir.load(found.qdq).graph}
    read = OnnxSim(found.qdq)
    np.testing.assert_array_equal(read.run({"x": STEPS[0].numpy()})[0], sim.model(STEPS[0]).detach().numpy())


def test_steps_that_are_quantized_inside_stay_a_scan_and_the_notes_say_what_is_faster(tmp_path: Path) -> None:
    sim = calibrated(QuantizationSimModel(Recurrent(nn.LSTM).eval(), STEPS[0]), STEPS)
    found = sim.export(tmp_path, "net", STEPS[0])
    assert "Scan" in {node.op_type for node in ir.load(found.qdq).graph}
    (note,) = (note for note in found.notes if "written as Scan" in note)
    assert "recurrent: boundary_only" in note and "recurrent='native'" in note


@pytest.mark.parametrize(
    ("inside", "options", "told"),
    [
        (False, {}, "rnn.l0.forward: written as LSTM, whose steps are in float, as simulated; what an integer kernel"),
        (True, {"recurrent": "native"}, "rnn.l0.forward: written as LSTM, whose steps are in float: 10 tensors inside"),
        (True, {"target": "packed"}, "rnn.l0.forward: written as Scan, which rounds 11 tensors in every step"),
    ],
    ids=["boundary", "native", "scan"],
)
def test_the_form_of_every_recurrent_layer_is_told_with_what_it_loses(tmp_path, inside, options, told):
    rules = None if inside else {"recurrent": "boundary_only"}
    sim = calibrated(QuantizationSimModel(Recurrent(nn.LSTM).eval(), STEPS[0], config_file=rules), STEPS)
    notes = sim.export(tmp_path, "net", STEPS[0], **options).notes
    assert sum("written as" in note for note in notes) == 1 and any(note.startswith(told) for note in notes), notes


@pytest.mark.slow
def test_every_form_of_recurrent_layers_can_be_compared(tmp_path: Path) -> None:
    """Steps in float are not those that were simulated, and the comparison says so."""
    sim = calibrated(QuantizationSimModel(Recurrent(nn.LSTM).eval(), STEPS[0], default_param_bw=7), STEPS)
    files = sim.export(tmp_path, "net", STEPS[0])
    read = calibrated(OnnxSim(files.float_model, default_param_bw=7), [{"x": batch.numpy()} for batch in STEPS])
    verified = sim.verify()
    assert verified.ok and read.verify().ok
    for one in (sim, read):
        assert one.verify(recurrent="scan").ok
        with pytest.raises(ConfigError, match="recurrent: 'scann' is not a value.*did you mean 'scan'"):
            one.verify(recurrent="scann")
        with pytest.raises(ConfigError, match="recurrent: 'scann'"):
            one.drift(recurrent="scann")
        with pytest.raises(ConfigError, match="recurrent: 'scann'"):
            one.saturation(recurrent="scann")
    in_float = sim.verify(recurrent="native")
    assert min(row.as_integer for row in in_float.outputs) < min(row.as_integer for row in verified.outputs)


def test_an_option_that_a_comparison_does_not_have_is_named() -> None:
    sim = calibrated(QuantizationSimModel(net(), BATCHES[0]), BATCHES)
    with pytest.raises(
        ConfigError,
        match=r"sim.verify: there is no argument 'tarjet' \(did you mean 'target'.*Remedy: use runtime, bias",
    ):
        sim.verify(tarjet="packed")
    with pytest.raises(ConfigError, match="sim.drift: there is no argument 'runtime'"):
        sim.drift(runtime="openvino")
    with pytest.raises(ConfigError, match="sim.saturation: there is no argument 'samples'"):
        sim.saturation(samples=True)


def test_states_that_nobody_reads_are_told_once(tmp_path: Path) -> None:
    sim = QuantizationSimModel(Recurrent(nn.LSTM).eval(), STEPS[0], config_file={"recurrent": "boundary_only"})
    sim.compute_encodings(STEPS)
    notes = [note for note in sim.export(tmp_path, "net", STEPS[0]).notes if "output[1]" in note]
    assert len(notes) == 1 and "not in the exported graph" in notes[0], notes


@pytest.mark.slow
def test_openvino_loads_recurrent_layers(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    result = quantize(
        Recurrent(nn.LSTM).eval(),
        STEPS,
        recipe=["fold"],
        path=tmp_path,
        target="openvino_cpu",
        repair="saturation",  # sums are exact on any CPU
        progress=False,
    )
    assert result.exported is not None
    (found,) = open_file("openvino", result.exported.qdq).run({"x": STEPS[0].numpy()}).values()
    np.testing.assert_allclose(found, result.sim.model(STEPS[0]).detach().numpy(), atol=2e-2)


@pytest.mark.parametrize(
    ("kind", "options", "rules"),
    [
        (nn.LSTM, {}, None),
        (nn.GRU, {}, None),
        (nn.LSTM, {"proj_size": 8, "hidden_size": 12}, {"recurrent": "boundary_only"}),
    ],
    ids=["lstm", "gru", "projection"],
)
def test_openvino_runs_scans_that_hold_their_constants(tmp_path, kind, options, rules):
    """It counts what a body reads from outside among the inputs of the Scan, and refuses that."""
    pytest.importorskip("openvino")
    model = Recurrent(partial(kind, **options) if options else kind)  # type: ignore[arg-type]
    sim = QuantizationSimModel(model.eval(), STEPS[0], config_file=rules)
    for site in ("head.weight", "head.output[0]"):  # sums of integers saturate on CPUs without VNNI
        sim.quantizers[site].enabled = False
    sim.compute_encodings(STEPS)
    found = sim.export(tmp_path, "net", STEPS[0], target="openvino_cpu")
    kept = ir.load(found.qdq)
    (scan,) = (node for node in kept.graph if node.op_type == "Scan")
    body = scan.attributes["body"].as_graph()
    own = {*body.inputs, *body.initializers.values(), *(v for node in body for v in node.outputs)}
    assert all(value is None or value in own for node in body for value in node.inputs)
    expected = sim.model(STEPS[1]).detach().numpy()
    for runtime in ("onnxruntime", "openvino"):
        (made,) = open_file(runtime, found.qdq).run({"x": STEPS[1].numpy()}).values()
        np.testing.assert_allclose(made, expected, atol=1e-5)
    assert verify_folder(tmp_path).ok
    read = OnnxSim(found.qdq)
    np.testing.assert_allclose(read.run({"x": STEPS[1].numpy()})[0], expected, atol=1e-6)


def convolutions(*float_sites: str, preset: str = "w8a8", net: nn.Module | None = None) -> QuantizationSimModel:
    """A calibrated simulation of convolutions, of which some sites stay in float."""
    torch.manual_seed(0)
    made = net or nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)
    )
    sim = QuantizationSimModel(made.eval(), BATCHES[0], preset=preset)
    for site in float_sites:
        sim.quantizers[site].enabled = False
    sim.compute_encodings(BATCHES)
    return sim


def weights_dequantized_in_every_run(path: Path) -> int:
    return sum(
        kind == "DequantizeLinear" and ("weight" in name or "bias" in name)
        for name, kind in optimized_types(ir.load(path)).items()
    )


@pytest.mark.parametrize("target", ["ort_cpu", "openvino_cpu", "packed"])
def test_weights_of_convolutions_in_float_are_computed_when_the_file_loads(tmp_path: Path, target: str) -> None:
    """A DequantizeLinear in every run keeps the float kernels from arranging them: 10 microseconds became 51."""
    sim = convolutions("1.output[0]")
    made = sim.export(tmp_path, "net", BATCHES[0], target=target).qdq
    # the first reads codes and returns float, the second reads float; the third is on integers
    casts = [node for node in ir.load(made).graph if node.op_type == "Mul"]
    assert len(casts) == {"ort_cpu": 3, "openvino_cpu": 1, "packed": 0}[target]  # two weights and one int32 bias
    if target == "ort_cpu":
        assert weights_dequantized_in_every_run(made) == 0
        tensors = [v.const_value for v in ir.load(made).graph.initializers.values() if v.const_value is not None]
        assert {t.dtype for t in tensors if t.size > 40} == {ir.DataType.INT8}, "they take one byte in the file"
    assert sim.verify(BATCHES[0], target=target).ok and verify_folder(tmp_path).ok
    read = OnnxSim(made)
    np.testing.assert_array_equal(read.run({"input": BATCHES[0].numpy()})[0], sim.model(BATCHES[0]).detach().numpy())
    assert sum(s.role == "weight" and s.encoding is not None for s in read.quantizers.values()) == 3


@pytest.mark.parametrize("preset", ["w8a8", "w8a16"])
def test_weights_of_convolutions_between_two_grids_are_not(tmp_path: Path, preset: str) -> None:
    """ONNX Runtime quantizes a float weight there by itself, with one scale: 0.1 off where the output is about 1."""
    sim = convolutions(preset=preset)
    made = sim.export(tmp_path, "net", BATCHES[0]).qdq
    assert "Mul" not in {node.op_type for node in ir.load(made).graph}
    assert sim.verify(BATCHES[0]).ok


@pytest.mark.parametrize("preset", ["w8", "w4g32"])
def test_weights_beside_float_activations_are_constants_for_the_runtime(tmp_path: Path, preset: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 32, 3), nn.ReLU(), nn.ConvTranspose2d(32, 8, 2))
    sim = convolutions(preset=preset, net=net)
    made = sim.export(tmp_path, "net", BATCHES[0]).qdq
    assert weights_dequantized_in_every_run(made) == 0
    assert sim.verify(BATCHES[0]).ok and verify_folder(tmp_path).ok


class Residual(nn.Module):
    """A sum that a runtime fuses with the convolution before it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(x))
        return torch.relu(self.b(x) + x)


def residual(folder: Path, target: str) -> tuple[onnx.ModelProto, dict[str, Any]]:
    torch.manual_seed(0)
    data = [torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    options: dict[str, Any] = {"recipe": ["fold"], "progress": False, "measure_speed": False, "filename_prefix": "net"}
    quantize(Residual().eval(), data, path=folder, target=target, **options)
    return onnx.load(folder / "net.onnx"), json.loads((folder / "net.encodings").read_text())


def test_files_for_tensorrt_follow_its_rules(tmp_path: Path) -> None:
    """Symmetric int8, biases in float, and no quantizer between layers that TensorRT fuses."""
    model, _ = residual(tmp_path, "tensorrt")
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    quantizers = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    for node in quantizers:
        zero = held[node.input[2]]
        assert zero.dtype == np.int8 and not zero.any() and (held[node.input[1]] > 0).all()
    assert all(array.dtype != np.int32 for array in held.values())
    weights = [array for name, array in held.items() if array.dtype == np.int8 and array.ndim == 4]
    assert len(weights) == 2 and min(array.min() for array in weights) == -127
    order = [node.op_type for node in model.graph.node if node.op_type != "DequantizeLinear"]
    assert order == ["QuantizeLinear", "Conv", "Relu", "QuantizeLinear", "Conv", "Add", "Relu", "QuantizeLinear"]


def test_files_for_qualcomm_hold_encodings_of_version_2(tmp_path: Path) -> None:
    model, encodings = residual(tmp_path, "qnn")
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    zeros = [held[node.input[2]] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert {zero.dtype for zero in zeros} == {np.dtype(np.uint8)}
    assert [array.dtype for name, array in held.items() if array.ndim == 4] == [np.int8] * 2
    assert encodings["version"] == "2.0.0"
    assert {entry["output_dtype"] for entry in encodings["encodings"]} == {"uint8", "int8", "int32"}
