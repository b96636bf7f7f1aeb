"""Files of another opset: down to what the operators allow, with the same numbers, and the reason where not."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from bitwright.errors import ConfigError, ExportError
from bitwright.export.opsets import bring_to
from bitwright.onnx import QuantizationSimModel, load_model, quantize
from bitwright.torch import QuantizationSimModel as TorchSim
from tests.onnx.nets import Net, feeds_for, run
from tests.onnx.opset_cases import CASES, model_of, opsets_of
from tests.onnx.test_old_files import batches, classifier


@pytest.mark.parametrize("opset, ir_version", [(25, 13), (21, 10), (19, 9), (17, 8), (15, 8), (13, 7)])
def test_files_of_an_opset_compute_the_same(opset, ir_version, tmp_path):
    data = batches()
    result = quantize(
        classifier(11), data, recipe=["fold"], path=tmp_path, opset=opset, progress=False, measure_speed=False
    )
    for path in (result.exported.qdq, result.exported.float_model):
        model = onnx.load(path)
        assert (model.opset_import[0].version, model.ir_version) == (opset, ir_version)
    found = run(onnx.load(result.exported.qdq), data[0])[0]
    np.testing.assert_allclose(found, result.sim.run(data[0])[0], atol=0.005)
    read = QuantizationSimModel(str(result.exported.qdq), data[0])
    np.testing.assert_array_equal(read.run(data[0])[0], result.sim.run(data[0])[0])


@pytest.mark.parametrize("name", CASES)
def test_operators_are_brought_back_to_the_opset_that_they_came_from(name):
    """Of each operator whose form changed: the model at the newest opset, at every older one that has it, or a reason."""
    newest = opsets_of(name)[-1]
    model = model_of(name, newest)
    feeds = feeds_for(model)
    for opset in (21, 17, 13, 11, 9):
        loaded = load_model(model).model
        try:
            bring_to(loaded, opset, None)
        except ExportError as error:
            assert f"it cannot be written at opset {opset}: " in str(error)
            continue
        for expected, found in zip(run(model, feeds), run(loaded, feeds), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=f"opset {opset}")


@pytest.mark.parametrize(
    "name", ["ReduceMean", "ReduceSum", "squeeze_unsqueeze", "split", "split_evenly", "shapes", "pools"]
)
def test_what_13_has_is_brought_there(name):
    loaded = load_model(model_of(name, 25)).model
    bring_to(loaded, 13, None)
    assert (loaded.opset_imports[""], loaded.ir_version) == (13, 7)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


def test_modules_are_written_at_an_opset_or_name_the_operator(tmp_path):
    model, x = Transformer().eval(), torch.randn(3, 8)
    sim = TorchSim(model, x)
    sim.compute_encodings([x], progress=False)
    exported = sim.export(tmp_path, "net", x, opset=17)
    written = onnx.load(exported.qdq)
    assert "Erf" in {node.op_type for node in written.graph.node}, "Gelu came with opset 20"
    np.testing.assert_allclose(run(written, {"x": x.numpy()})[0], sim.model(x).detach().numpy(), atol=0.05)
    with pytest.raises(
        ExportError, match=r"\(LayerNormalization\): it cannot be written at opset 16: .* came with opset 17"
    ):
        sim.export(tmp_path, "net", x, opset=16)
    assert onnx.load(exported.qdq).opset_import[0].version == 17, "an export that is refused leaves the earlier one"


@pytest.mark.parametrize(
    "preset, opset, problem",
    [
        ("w8a8", 11, r"c1.weight_dq \(DequantizeLinear\).*at opset 11: .*axis.*13 knows several scales"),
        (
            "w8a16",
            20,
            r"x_q \(QuantizeLinear\).*at opset 20: there it does not take tensor\(uint16\).*21 integers of 4 and 16",
        ),
    ],
)
def test_formats_say_which_opset_they_need(preset, opset, problem, tmp_path):
    with pytest.raises(ExportError, match=problem):
        quantize(classifier(17), batches(), preset, recipe=["fold"], path=tmp_path, opset=opset, progress=False)


def test_versions_that_do_not_exist_or_do_not_fit():
    n = Net()
    model = ir.from_proto(n.model(n("Relu", n.input("x", (2, 4)), out="y"), opset=17))
    for name, given in (("opset", 6), ("opset", 99), ("ir_version", 3), ("ir_version", 14)):
        with pytest.raises(ConfigError, match=f"{name}: .* is not a version that can be written.*use "):
            quantize(n.model("y"), [], **{name: given})
    with pytest.raises(ExportError, match="ir_version: 7 has no place for opset 17.*ask for 8 or newer"):
        bring_to(model, None, 7)
    bring_to(model, 13, 9)
    assert (model.opset_imports[""], model.ir_version) == (13, 9)
