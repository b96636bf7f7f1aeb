"""What importance is a property of: the function of the network, not the way in which its weights are written."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
from bitwright.compression.groups import Dependencies
from bitwright.compression.importance import Evidence, criterion
from bitwright.errors import ConfigError
from bitwright.methods.front_end import front_end_of
from bitwright.torch import fold_all_batch_norms


def scores(model: nn.Module, x: torch.Tensor, name: str) -> dict[str, np.ndarray]:
    structure = front_end_of(model).structured(model, x, None)
    found = Dependencies(structure)
    return {g.name: criterion(name)(g, Evidence(found.graph, structure.param)) for g in found.groups}


@pytest.mark.parametrize("name", ["l1", "l2", "lamp"])
def test_batch_norms_count_as_if_they_were_folded(name: str) -> None:
    """A batch norm undoes the scale of the rows in front of it: norms before and after folding are the same."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 10), nn.BatchNorm1d(10),
        nn.Linear(10, 4),
    ).eval()  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, -2, 2)
            nn.init.uniform_(module.running_var, 0.01, 4)
    x = torch.randn(2, 3, 8, 8)
    folded = copy.deepcopy(model)
    fold_all_batch_norms(folded, dummy_input=x)
    before, after = scores(model, x, name), scores(folded, x, name)
    assert list(before) == list(after) == ["0", "6", "10"]
    for group in before:
        np.testing.assert_allclose(before[group], after[group], rtol=1e-5)


def test_the_scale_of_rows_in_front_of_a_batch_norm_says_nothing() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x, before = torch.randn(2, 3, 8, 8), None
    for factor in (1.0, 50.0):
        model[0].weight.data[0] *= factor
        model[0].bias.data[0] *= factor
        model[1].running_var[0] = (model[1].running_var[0] + 1e-5) * factor**2 - 1e-5
        found = scores(model, x, "l2")["0"]
        before = found if before is None else before
    np.testing.assert_allclose(found, before, rtol=1e-5)


class Halves(nn.Module):
    """Units of one layer, each twice as loud as the one before in its product, however that is shared by both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.read = nn.Linear(6, 8, bias=False), nn.Linear(8, 5)
        share = 2.0 ** torch.tensor([3.0, -2.0, 0.0, 5.0, -4.0, 1.0, 2.0, -1.0])[:, None]
        with torch.no_grad():
            rows = nn.functional.normalize(torch.randn(8, 6)) * 2.0 ** torch.arange(8)[:, None]
            self.make.weight.copy_(rows * share)
            self.read.weight.copy_(nn.functional.normalize(torch.randn(5, 8), dim=0) / share.T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.make(x).relu())


def test_hessian_is_the_change_of_the_outputs() -> None:
    torch.manual_seed(0)
    net, batches = Halves(), [torch.randn(16, 6) for _ in range(4)]
    result = bitwright.compress(net, batches, {"params": 0.6}, importance="hessian", ranking="uniform", widths=1)
    (row,) = result.rows
    assert set(row.removed) == set(range(row.before - row.after))  # the quietest, which norms of rows do not see
    wrong = bitwright.compress(net, batches, {"params": 0.6}, importance="l1", ranking="uniform", widths=1)
    assert wrong.rows[0].removed != row.removed
    assert all(p.grad is None for p in net.parameters())


def test_files_have_no_gradients(tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    torch.onnx.export(Halves().eval(), (torch.randn(2, 6),), str(file), dynamo=True, verbose=False)
    with pytest.raises(ConfigError, match="an ONNX model has not.*importance='activation'"):
        bitwright.compress(str(file), [torch.randn(2, 6).numpy()], {"params": 0.6}, importance="hessian")
