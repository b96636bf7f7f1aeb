"""Saves a checkpoint over another, stopped at every file operation; run by ``test_checkpoint.py`` as a process of its own."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from bitwright.errors import EncodingsError
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated
from tests.support.stopping import stops


def main(work: Path) -> None:
    """Print, for both ways to stop, how often the old, the new and no checkpoint was found."""
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    sim = calibrated(QuantizationSimModel(model, x), [x])
    old = sim.model(x)
    sim.save_checkpoint(work / "old")
    with torch.no_grad():
        sim.model[0].weight.mul_(1.5)
    sim.compute_encodings([2 * x])
    new = sim.model(x)
    fresh = QuantizationSimModel(model, x)

    def folders(first: bool) -> Iterator[Path]:
        for i in itertools.count():
            folder = work / f"{first}-{i}"
            folder.mkdir() if first else shutil.copytree(work / "old", folder)
            yield folder

    def found(folder: Path) -> str:
        try:
            fresh.load_checkpoint(folder)
        except EncodingsError:
            return "none"
        y = fresh.model(x)
        return "old" if torch.equal(y, old) else "new" if torch.equal(y, new) else "mixture"

    for first, stop in itertools.product((False, True), ("kill", "interrupt")):
        outcomes = []
        for folder in stops(sim.save_checkpoint, folders(first), stop):
            outcomes.append(found(folder))
            if stop == "interrupt":
                assert not [p.name for p in folder.iterdir() if p.name.startswith(".")], folder
            sim.save_checkpoint(folder)
            assert found(folder) == "new"
            shutil.rmtree(folder)
        print("first" if first else "over", stop, *outcomes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
