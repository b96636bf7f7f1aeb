"""Rows of other packages: by entry points and by ``register``; conformance tests, which the rows here pass too; messages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
from bitwright.core.numerics.ranges import RANGE_METHODS, RangeRow, minmax_range
from bitwright.core.registry import KINDS, table_of
from bitwright.errors import BitwrightError, ConfigError
from bitwright.export.targets import TARGETS
from bitwright.metrics.metric import OutputMetric
from bitwright.testing import CHECKS, check
from bitwright.torch import QuantizationSimModel

ROOT = Path(__file__).parents[2]
NET = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
BATCHES = [torch.randn(4, 1, 8, 8) for _ in range(2)]


@pytest.fixture
def tables():
    """Every table as it was, afterwards."""
    before = {kind: dict(dict.items(table_of(kind))) for kind in KINDS}
    yield
    for kind, rows in before.items():
        table_of(kind).clear()
        table_of(kind).update(rows)


@pytest.fixture
def package(tmp_path, monkeypatch, tables):
    """An installed package with entry points: two rows, one of which cannot be loaded."""
    (tmp_path / "mine.py").write_text(
        "from bitwright.core.numerics.ranges import RangeRow, minmax_range\nHALF = RangeRow("
        "lambda stats, fmt, symmetry: tuple(end / 2 for end in minmax_range(stats, fmt, symmetry)), 'minmax')\n"
    )
    folder = tmp_path / "mine-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "[bitwright.range_methods]\nhalf = mine:HALF\nbroken = mine:NO_SUCH_THING\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("mine", None)


def test_a_row_of_an_entry_point_is_found_by_its_name(package):
    assert "half" in list(RANGE_METHODS)  # listed before it is loaded
    whole = QuantizationSimModel(NET, BATCHES[0])
    half = QuantizationSimModel(NET, BATCHES[0], "half")
    for sim in (whole, half):
        sim.compute_encodings(BATCHES, progress=False)
    name = "1.output[0]"
    ratio = half.quantizers[name].encoding.scale / whole.quantizers[name].encoding.scale
    assert float(ratio) == pytest.approx(0.5)
    assert bitwright.quantize(NET, BATCHES, quant_scheme="half", recipe=["fold"]).sim.calibrated
    with pytest.raises(
        ConfigError, match="plug-in 'broken' of range_methods: mine:NO_SUCH_THING cannot be loaded.*repair"
    ):
        QuantizationSimModel(NET, BATCHES[0], "broken")
    with pytest.raises(ConfigError, match="use one of minmax, percentile, mse, sqnr, entropy, hqq, half, broken"):
        QuantizationSimModel(NET, BATCHES[0], "none")


def test_registered_rows_are_used(tables):
    @bitwright.register("metrics", "first_class")
    def first_class():
        """Share of samples of class 0."""
        return OutputMetric("first_class", "higher", lambda y, w, labels: (y[0].argmax(1) == 0).astype(float))

    @bitwright.register("steps", "shrink")
    def shrink(sim, *, factor=0.5):
        for site in sim.quantizers.values():
            if site.role == "weight":
                site.encoding = replace(site.encoding, scale=site.encoding.scale * np.float32(factor))
        return "shrunk"

    bitwright.register("targets", "mine", replace(TARGETS["packed"], name="mine", about="mine"))
    result = bitwright.quantize(NET, BATCHES, metric="first_class", recipe=["fold", {"shrink": {"factor": 0.25}}])
    assert result.metric.name == "first_class" and [o.note for o in result.report][-1] == "shrunk"
    plain = bitwright.quantize(NET, BATCHES, recipe=["fold"]).sim.quantizers["3.weight"].encoding.scale
    assert np.array_equal(result.sim.quantizers["3.weight"].encoding.scale, plain * np.float32(0.25))
    assert bitwright.quantize(NET, BATCHES, target="mine", recipe=["fold"]).sim.calibrated


@pytest.mark.parametrize(
    "call",
    [
        lambda: bitwright.QuantSpec(method=bitwright.RangeMethod("mine")),
        lambda: bitwright.Rule("*", method="mine"),
        lambda: bitwright.Rule("*", method=bitwright.RangeMethod("mine")),
        lambda: bitwright.QuantSpec("mine"),
        lambda: bitwright.quantize(NET, BATCHES, recipe=["mine"]),
        lambda: bitwright.quantize(NET, BATCHES, target="mine"),
        lambda: bitwright.quantize(NET, BATCHES, metric="mine"),
        lambda: QuantizationSimModel(NET, BATCHES[0]).verify(BATCHES[0], runtime="mine"),
        lambda: bitwright.register("mine", "x", 1),
        lambda: check("metrics", "mine"),
    ],
    ids=["spec", "rule", "rule-object", "format", "step", "target", "metric", "runtime", "kind", "check"],
)
def test_unknown_names_are_refused_with_the_list(call):
    with pytest.raises(BitwrightError, match="(no|not a|not calibrated).*Remedy: (use|register|call)"):
        call()


@pytest.mark.parametrize(
    "kind, name, row, message",
    [
        ("range_methods", "minmax", RANGE_METHODS["mse"], "range_methods of this package has a row of that name"),
        ("range_methods", "x", 3, "3 is no range method. Remedy: register a function"),
        (
            "range_methods",
            "x",
            RangeRow(lambda a: a, "minmax"),
            r"its function takes \(a\). Remedy: let it take stats, fmt",
        ),
        ("formats", "x", bitwright.FloatFormat("y", 2, 1, 6.0, scaled=True), "format 'x': its name is 'y'"),
        (
            "formats",
            "x",
            bitwright.FloatFormat("x", 1, 1, 1.0, True, (-1.0, 0.0, 1.0)),
            "its codebook needs 8 different",
        ),
        ("steps", "x", lambda other: None, "its first parameter is 'other'"),
        ("targets", "x", TARGETS["packed"], "is not a Target of that name"),
        ("files", "x", 1, "1 is not a FileFormat of that name"),
        ("files", "onnx", replace(table_of("files")["gguf"], name="onnx"), "are made of a simulation"),
        ("runtimes", "x", 1, "1 is not a Runtime of that name"),
        ("metrics", "x", 1, "1 is not a metric"),
    ],
)
def test_what_is_no_row_is_refused(tables, kind, name, row, message):
    with pytest.raises(BitwrightError, match=message):
        bitwright.register(kind, name, row)


def test_a_plug_in_that_breaks_a_conformance_test_is_told_which(tables):
    wide = RangeRow(lambda *given: tuple(end + 1 for end in minmax_range(*given)), "minmax")
    bitwright.register("range_methods", "wide", wide)
    with pytest.raises(
        ConfigError, match="range_methods 'wide': it breaks the conformance test 'inside': the range of normal"
    ):
        check("range_methods", "wide")
    bitwright.register("range_methods", "fails", RangeRow(lambda stats, fmt, symmetry: stats.no, "minmax"))
    with pytest.raises(ConfigError, match="it fails in the conformance test 'finite': AttributeError"):
        check("range_methods", "fails")
    lossy = replace(table_of("files")["torchao"], name="lossy", read=lambda folder: iter(()))
    bitwright.register("files", "lossy", lossy)
    with pytest.raises(ConfigError, match="'gives back': its files are taken for torchao"):
        check("files", "lossy")
    wrong = OutputMetric("wrong", "lower", lambda y, w, right: (y[0].argmax(1) == right).astype(float), True)
    bitwright.register("metrics", "wrong", wrong)
    with pytest.raises(ConfigError, match="'values': right answers have 1, random ones .* lower is better"):
        check("metrics", "wrong")


OWN = [
    (kind, name)
    for kind in ("range_methods", "formats", "files", "runtimes", "targets")
    for name in sorted(table_of(kind).own)
]
OWN += [("metrics", name) for name in ("accuracy", "f1", "kl", "agreement")]


@pytest.mark.parametrize("kind, name", OWN, ids=[f"{kind}-{name}" for kind, name in OWN])
def test_rows_of_this_package_conform(kind, name):
    if kind == "runtimes":
        pytest.importorskip(table_of(kind)[name].module)
    check(kind, name)


def test_a_runtime_that_is_not_installed_names_the_extra(monkeypatch):
    table = table_of("runtimes")
    monkeypatch.setitem(table, "litert", replace(table["litert"], module="not_installed"))
    with pytest.raises(ConfigError, match=r"not_installed is not installed.*bitwright\[litert\]"):
        check("runtimes", "litert")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(set(table_of("steps").own) - {"drop_blocks", "drop_experts", "replace_blocks"})
)  # that network has none
def test_steps_of_this_package_conform(name):
    check("steps", name, options={"macs": 0.7} if name in ("prune", "svd") else None)


@pytest.mark.slow
def test_the_example_package_is_built_and_conforms(tmp_path):
    source = shutil.copytree(ROOT / "examples" / "plugin", tmp_path / "plugin")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        tmp_path / "site",
    ]
    subprocess.run([*pip, source], check=True)
    path = os.pathsep.join([str(ROOT), str(tmp_path / "site")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_plugin.py"]
    subprocess.run(command, cwd=source, check=True, env={**os.environ, "PYTHONPATH": path})
    assert {kind: len(tests) for kind, tests in CHECKS.items()}["range_methods"] == 5
