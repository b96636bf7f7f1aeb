"""The suite of architectures: what its cells say, and a sample of three where the packages are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "benchmarks"
SAMPLE = ("LlamaForCausalLM", "ResNetForImageClassification", "AutoencoderTiny")


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import reach

    monkeypatch.setattr(reach, "STATE", tmp_path)
    return reach


class Net(nn.Module):
    """A convolution, a product, and one more that ``hidden`` keeps from being seen."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc, self.hidden = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), hidden

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(self.conv(x).relu().mean((2, 3)))
        return torch.ops.aten.mm(y, self.fc.weight) if self.hidden else y @ self.fc.weight


def architecture(reach: Any, hidden: bool) -> Any:
    batch = {"x": torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))}
    return reach.Architecture("Net", "torch", lambda: Net(hidden).eval(), lambda seed: batch)


def test_a_product_that_interception_does_not_see_is_counted(reach: Any) -> None:
    day = reach.Day(architecture(reach, hidden=False))
    assert (day.simulate(), day.calibrate(), day.coverage()) == ("ok", "ok", "3 of 3")
    with reach.ProductCount() as count:
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
    assert count.found == 2


def test_a_cell_that_fails_has_its_reason_below_the_table(reach: Any, tmp_path: Path) -> None:
    cells = {"simulate": "ok", "calibrate": "FAILS: CalibrationError: a|b", "forward": ""}
    (tmp_path / "Net.json").write_text(json.dumps({"cells": cells, "running": None}))
    text = reach.markdown([architecture(reach, hidden=False)], {})
    assert "| Net | torch | ok | **fails** (1) |" in text
    assert "1. CalibrationError: a\\|b" in text
    assert "| **works** | | 1 of 1 | 0 of 1 | 0 of 0 |" in text


def test_a_package_that_cannot_be_imported_is_said_once(reach: Any) -> None:
    far = [reach.Architecture(name, "no_such_package", Net, dict) for name in ("A", "B")]
    absent = reach.import_all(far)
    assert absent["no_such_package"] == "ModuleNotFoundError: No module named 'no_such_package'"
    text = reach.markdown([*far, architecture(reach, hidden=False)], absent)
    assert text.count("Without rows: 2 of no_such_package (ModuleNotFoundError") == 1
    assert "0 of 1 architectures have run" in text and "| A |" not in text


def test_a_method_that_calls_a_simulated_part_is_no_lost_call(reach: Any) -> None:
    class Generator(Net):
        def generate(self, **_: Any) -> Tensor:
            self.fc(torch.ones(1, 4))
            return torch.ones(1, 9)

    made = reach.Architecture("G", "torch", lambda: Generator(False).eval(), architecture(reach, False).batch, True)
    day = reach.Day(made)
    assert (day.simulate(), day.calibrate(), day.generate()) == ("ok", "ok", "ok")
    assert day.sim._simulator.unseen  # it is noted


def test_the_commits_of_the_rows_are_counted(reach: Any, tmp_path: Path) -> None:
    nets = [reach.Architecture(name, "torch", Net, dict) for name in ("A", "B", "C", "D")]
    for name, commit in (("A", "one"), ("B", "two"), ("C", "one")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"cells": {}, "running": None, "commit": commit}))
    assert reach.commits(nets) == "one (2 rows), two (1 rows)"
    assert reach.commits(nets[:1]) == "one"


def test_what_has_a_result_is_not_run_again(reach: Any, tmp_path: Path) -> None:
    (tmp_path / "Net.json").write_text(json.dumps({"cells": {"simulate": "ok"}, "running": None}))
    said: list[str] = []
    reach.run_all([architecture(reach, hidden=False)], False, said.append)
    assert said == []


def test_there_are_enough_architectures_with_names_of_their_own(reach: Any) -> None:
    names = [a.name for a in reach.ARCHITECTURES]
    assert len(set(names)) == len(names) >= 60
    assert {a.package for a in reach.ARCHITECTURES} == {"transformers", "diffusers", "timm"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_works_from_simulation_to_verification(reach: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(a for a in reach.ARCHITECTURES if a.name == name)
    pytest.importorskip(found.package, reason=f"the extra `reach` is not installed, so there is no {found.package}")
    day = reach.Day(found)
    for stage in reach.STAGES:
        if stage != "generate" or found.generates:
            getattr(day, stage)()
