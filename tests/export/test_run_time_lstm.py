"""LSTMs whose products read their operands on ranges chosen at run time, and the operator that computes them."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.spec import weight_spec
from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated

RUN_TIME = {"recurrent": "run_time"}
Array = NDArray[np.float32]


class _Tagger(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, **{"hidden_size": 64, "batch_first": True, **options})  # type: ignore[arg-type]
        self.out = nn.LazyLinear(5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, (h, _) = self.lstm(x)
        return self.out(y), h


def _tagger(**options: object) -> tuple[_Tagger, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = _Tagger(**options)
    batches = [torch.randn(3, 11, 12) for _ in range(3)]
    model(batches[0])
    return model.eval(), batches


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # with several, parts of a batch have ranges of their own
    options.add_session_config_entry("session.x64quantprecision", "1")  # exact sums on CPUs without VNNI too
    return onnxruntime.InferenceSession(path, options)


def _kinds(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def test_each_step_is_the_equation_with_the_range_of_its_own_hidden_state() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(8, 64)
    x, h, c = torch.randn(7, 3, 8), torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    sim = calibrated(QuantizationSimModel(layer, (x, (h, c)), config_file=RUN_TIME), [(x, (h, c))])
    grid = sim.quantizers["l0.forward.recurrent"].encoding
    weights = sim.dequantized_state_dict()

    def product(a: Array, end: str) -> torch.Tensor:
        on_grid = torch.from_numpy(fake_quantize(a, grid))
        return on_grid @ weights[f"weight_{end}_l0"].T + weights[f"bias_{end}_l0"]

    entered, hidden, cell, wanted = product(x.numpy(), "ih"), h[0], c[0], []
    for step in entered:
        i, f, g, o = (step + product(hidden.numpy(), "hh")).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        wanted.append(hidden.detach())
    with torch.no_grad():
        found, (last, memory) = sim.model(x, (h, c))
    assert torch.allclose(found, torch.stack(wanted), atol=1e-6)
    assert torch.allclose(last[0], hidden, atol=1e-6) and torch.allclose(memory[0], cell, atol=1e-6)
    assert {name for name, site in sim.quantizers.items() if site.inner} == {"l0.forward.recurrent"}


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=["plain", "stack"])
def test_a_module_is_written_with_the_operator_and_equals_its_simulation(
    tmp_path: Path, options: dict[str, object]
) -> None:
    model, batches = _tagger(**options)
    sim = calibrated(QuantizationSimModel(model, batches[0], config_file=RUN_TIME), batches)
    exported = sim.export(tmp_path, "net", batches[0], target="ort_cpu")
    kinds = _kinds(tmp_path / "net.onnx")
    assert kinds["DynamicQuantizeLSTM"] == (4 if options else 1) and not kinds["LSTM"] and not kinds["Scan"]
    assert any("written as DynamicQuantizeLSTM" in note for note in exported.notes)
    session = _session(tmp_path / "net.onnx")
    found = session.run(None, {session.get_inputs()[0].name: batches[1].numpy()})
    with torch.no_grad():
        wanted = sim.model(batches[1])
        real = model(batches[1])
    for one, other, given in zip(wanted, found, real, strict=True):
        assert sqnr(one.numpy(), other) > 100 and sqnr(given.numpy(), other) > 30
    assert sim.verify(batches[1], target="ort_cpu").ok


def test_weights_are_stored_unsigned_where_signed_sums_may_saturate(tmp_path: Path) -> None:
    """Pairs of products of uint8 and int8 saturate on CPUs without VNNI; two unsigned factors are summed exactly on every CPU."""
    model, batches = _tagger(num_layers=2)
    with torch.no_grad():
        for weight in model.lstm.parameters():
            weight.copy_(torch.where(torch.rand_like(weight) < 0.5, -0.4, 0.4) + 0.01 * torch.randn_like(weight))
    sim = calibrated(QuantizationSimModel(model, batches[0], config_file=RUN_TIME), batches)
    sim.export(tmp_path, "net", batches[0], target="ort_cpu", unsigned_weights=True)
    graph = onnx.load(tmp_path / "net.onnx").graph
    held = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    layers = [node for node in graph.node if node.op_type == "DynamicQuantizeLSTM"]
    assert len(layers) == 2 and all(held[name].dtype == np.uint8 for node in layers for name in node.input[1:3])
    assert all((held[name] == 128).all() for node in layers for name in (node.input[9], node.input[11]))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", options)  # as a user opens it
    with torch.no_grad():
        wanted = sim.model(batches[1])
    for one, other in zip(wanted, session.run(None, {session.get_inputs()[0].name: batches[1].numpy()}), strict=True):
        assert sqnr(one.numpy(), other) > 60


def _bidirectional(path: Path) -> list[dict[str, Array]]:
    random = np.random.default_rng(0)
    size, width = 64, 8
    held = {
        "W": random.normal(0, 0.3, (2, 4 * size, width)), "R": random.normal(0, 0.1, (2, 4 * size, size)),
        "B": random.normal(0, 0.1, (2, 8 * size)), "P": random.normal(0, 0.1, (2, 3 * size)),
    }  # fmt: skip
    node = helper.make_node(
        "LSTM", ["x", "W", "R", "B", "", "h", "c", "P"], ["y", "y_h", "y_c"], "lstm", hidden_size=size,
        direction="bidirectional", clip=2.0, layout=0,
    )  # fmt: skip
    inputs = {"x": ["t", "b", width], "h": [2, "b", size], "c": [2, "b", size]}
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in held.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    shapes = {"x": (9, 2, width), "h": (2, 2, size), "c": (2, 2, size)}
    return [{name: random.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(3)]


def test_a_file_with_peepholes_clip_and_initial_states_is_written_with_the_operator(tmp_path: Path) -> None:
    feeds = _bidirectional(tmp_path / "float.onnx")
    sim = calibrated(OnnxSim(str(tmp_path / "float.onnx"), feeds[0], config_file=RUN_TIME), feeds[:2])
    sim.export(tmp_path / "out", "net", target="ort_cpu")
    assert _kinds(tmp_path / "out" / "net.onnx")["DynamicQuantizeLSTM"] == 2
    session = _session(tmp_path / "out" / "net.onnx")
    real = onnxruntime.InferenceSession(tmp_path / "float.onnx").run(None, feeds[2])
    for one, other, given in zip(sim.run(feeds[2]), session.run(None, feeds[2]), real, strict=True):
        assert sqnr(one, other) > 100 and sqnr(given, other) > 30
    assert sim.verify(feeds[2], target="ort_cpu").ok


@pytest.mark.parametrize(
    "preset, options",
    [("w4a8", {}), ("w8a16", {}), ("w8a8", {"proj_size": 8}), ("w8a8", {"hidden_size": 48})],
    ids=["4-bit weights", "16-bit activations", "projection", "few units"],
)
def test_layers_without_the_operator_compute_their_steps_in_float(
    tmp_path: Path, preset: str, options: dict[str, object]
) -> None:
    model, batches = _tagger(**options)
    sim = calibrated(QuantizationSimModel(model, batches[0], preset=preset, config_file=RUN_TIME), batches)
    assert not any(site.inner or site.spec.dynamic for site in sim.quantizers.values())
    sim.export(tmp_path, "net", batches[0], target="ort_cpu")
    assert not _kinds(tmp_path / "net.onnx")["DynamicQuantizeLSTM"]


def test_a_layer_whose_weight_got_other_bits_is_written_as_it_is_simulated(tmp_path: Path) -> None:
    model, batches = _tagger()
    sim = calibrated(QuantizationSimModel(model, batches[0], config_file=RUN_TIME), batches)
    sim.quantizers["lstm.weight_hh_l0"].spec = weight_spec("int4")
    sim.compute_encodings(batches)
    sim.export(tmp_path, "net", batches[0], target="ort_cpu")
    assert _kinds(tmp_path / "net.onnx")["Scan"] == 1
    session = _session(tmp_path / "net.onnx")
    found = session.run(None, {session.get_inputs()[0].name: batches[1].numpy()})
    with torch.no_grad():
        assert sqnr(sim.model(batches[1])[0].numpy(), found[0]) > 100


def test_gradients_pass_the_ranges_of_every_step() -> None:
    model, batches = _tagger()
    sim = calibrated(QuantizationSimModel(model, batches[0], config_file=RUN_TIME), batches)
    sim.model(batches[0])[0].square().mean().backward()
    gradient = sim.model.lstm.weight_hh_l0.grad
    assert gradient is not None and bool(torch.isfinite(gradient).all()) and float(gradient.abs().max()) > 0


def test_a_cell_stays_in_float_operators(tmp_path: Path) -> None:
    """Of a single step the operator takes longer than that of floats."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(12, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = x.new_zeros(len(x), 64), x.new_zeros(len(x), 64)
            for step in x.unbind(1):
                state = self.cell(step, state)
            return state[0]

    batches = [torch.randn(3, 4, 12) for _ in range(2)]
    sim = QuantizationSimModel(Loop().eval(), batches[0], config_file=RUN_TIME)
    assert not any(site.inner or site.spec.dynamic for site in sim.quantizers.values())
