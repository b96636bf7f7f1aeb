"""Writes an export over another, stopped at every file operation; run by ``test_interrupted.py`` as a process of its own."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from typer.testing import CliRunner

import bitwright.onnx as bo
from bitwright.cli import app
from bitwright.compare.verify import verify_folder
from bitwright.export.files.manifest import read_manifest
from bitwright.export.samples import find_export, read_samples
from bitwright.onnx.simulation import quantsim as deployment
from tests.onnx.nets import conv_chain, feeds_for
from tests.support.simulations import calibrated
from tests.support.stopping import stops


def prepared(sim: bo.QuantizationSimModel, samples: bool) -> Any:
    """What ``sim.export`` gives to ``write_artefacts``: with it, a forked process needs no session."""
    with mock.patch.object(deployment, "write_artefacts") as write:
        sim.export("unused", "net", samples=samples)
    args, options = list(write.call_args.args), dict(write.call_args.kwargs)
    if samples:
        result = deployment.to_qdq(sim.marked, sim._encodings())
        kept = options["samples"](result, None)
        options["samples"] = lambda _, rows: kept
        options["check"] = None
    return lambda folder: deployment.write_artefacts(args[0], folder, *args[2:], **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def main(work: Path) -> None:
    """Print, for both ways to stop, how often the old and the new export was found."""
    model = conv_chain(2)
    ((name, x),) = feeds_for(model).items()
    writers = {}
    for export, scale in (("old", 1.0), ("new", 3.0)):
        sim = calibrated(bo.QuantizationSimModel(model, x), [scale * x])
        writers[export] = prepared(sim, samples=export == "old")
        writers[export](work / export)
    reader_sim = bo.QuantizationSimModel(model, x)
    whole = {name: content(work / name) for name in writers}
    assert whole["new"].keys() < whole["old"].keys()  # the samples of the old export must not stay

    def folders(stop: str) -> Iterator[Path]:
        for i in itertools.count():
            shutil.copytree(work / "old", work / f"{stop}-{i}")
            yield work / f"{stop}-{i}"

    def read(folder: Path, at: int) -> str:
        """Whichever reader comes first finds one whole export."""
        reader = at % 3
        if reader == 0:
            assert find_export(folder) == "net"
        elif reader == 1:
            assert CliRunner().invoke(app, ["show", str(folder)]).exit_code == 0
        else:
            reader_sim.load_encodings(folder / "net.encodings")
        read_manifest(folder / "net_manifest.json", check=True)
        found = content(folder)
        return next(name for name, files in whole.items() if files == found)

    for stop in ("kill", "interrupt"):
        outcomes = []
        for at, folder in enumerate(stops(writers["new"], folders(stop), stop)):  # type: ignore[arg-type]
            outcomes.append(read(folder, at))
            if stop == "interrupt":
                assert not [path.name for path in folder.iterdir() if path.name.startswith(".")], folder
            writers["new"](folder)
            assert read(folder, 0) == "new"
            shutil.rmtree(folder)
        print(stop, *outcomes)
    sites, inputs, _ = read_samples(work / "old" / "net_samples.npz")
    assert sites and np.array_equal(inputs[name], x)
    assert verify_folder(work / "old").ok


if __name__ == "__main__":
    main(Path(sys.argv[1]))
