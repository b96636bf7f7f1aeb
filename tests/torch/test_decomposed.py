"""A simulation as an exported program of quantized_decomposed operators: the same numbers, and those of ExecuTorch's XNNPACK."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.errors import ExportError
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = x + self.point(nn.functional.relu6(self.depthwise(x)))
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def sim() -> QuantizationSimModel:
    torch.manual_seed(0)
    return calibrated(QuantizationSimModel(Residual().eval(), torch.randn(1, 3, 8, 8)), [torch.randn(8, 3, 8, 8)])


def test_codes_are_stored_and_numbers_are_those_of_the_simulation(sim: QuantizationSimModel) -> None:
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    program = sim.exported_program(x)
    with torch.no_grad():
        expected, (found,) = sim.model(x), program.module()(x)
    step = float(np.max(np.abs(expected.numpy()))) / 255
    assert (found - expected).abs().max() <= step
    stored = [t for t in program.state_dict.values() if t.dtype == torch.int8]
    assert sorted(t.numel() for t in stored) == sorted(
        p.numel() for n, p in sim.model.named_parameters() if "weight" in n
    )
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    kinds = {str(node.target) for node in calls}
    assert any("quantized_decomposed.dequantize_per_" in kind for kind in kinds)
    assert all(len(node.users) == 1 for node in calls if "dequantize_per_tensor" in str(node.target))
    assert not any("bitwright" in kind for kind in kinds)


def test_what_has_no_form_is_refused() -> None:
    sim = calibrated(QuantizationSimModel(nn.Linear(64, 4), torch.randn(2, 64), preset="w4g32"), [torch.randn(2, 64)])
    with pytest.raises(ExportError, match="weight.*no operators for scales.*per tensor or per channel"):
        sim.exported_program()


def test_a_batch_of_free_length(sim: QuantizationSimModel) -> None:
    program = sim.exported_program(torch.randn(2, 3, 8, 8), dynamic_batch=True)
    x = torch.randn(5, 3, 8, 8)
    with torch.no_grad():
        assert (program.module()(x)[0] - sim.model(x)).abs().max() < 0.02


def test_steps_of_a_recurrent_layer_are_refused() -> None:
    """One operator of the program computes all steps: quantizers inside them have no place, and would be lost."""
    x = torch.randn(2, 5, 6)
    sim = calibrated(QuantizationSimModel(nn.Sequential(nn.LSTM(6, 8, batch_first=True)).eval(), x), [x])
    with pytest.raises(
        ExportError, match="inside the steps of a recurrent layer.*export ONNX, or leave the layer in float"
    ):
        sim.exported_program(x)


def test_executorch_takes_values_that_are_read_and_returned() -> None:
    """A convolution's result that is an output, and read by another convolution and a flatten."""
    pytest.importorskip("executorch")
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = torch.relu(self.first(x))
            return y, self.second(y) + x, y.flatten(1)

    torch.manual_seed(0)
    x = torch.randn(2, 8, 8, 8)
    sim = calibrated(QuantizationSimModel(Net().eval(), x), [x])
    lowered = to_edge_transform_and_lower(sim.exported_program(x), partitioner=[XnnpackPartitioner()])
    content = lowered.to_executorch().buffer
    loaded = Runtime.get().load_program(content)
    with torch.no_grad():
        for found, expected in zip(loaded.load_method("forward").execute([x]), sim.model(x), strict=True):
            assert torch.equal(found, expected)


def test_executorch_computes_the_codes_of_the_simulation(sim: QuantizationSimModel, tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    lowered = to_edge_transform_and_lower(sim.exported_program(x), partitioner=[XnnpackPartitioner()])
    (tmp_path / "net.pte").write_bytes(lowered.to_executorch().buffer)
    (found,) = Runtime.get().load_program(tmp_path / "net.pte").load_method("forward").execute([x])
    with torch.no_grad():
        expected = sim.model(x)
    step = float(sim.quantizers["head.output[0]"].encoding.scale) if "head.output[0]" in sim.quantizers else 0.0
    assert step and ((found - expected).abs() / step).max() <= 1.001
