"""Documents and pages: what is in them, how large they are, what is refused, and what differs between two runs."""

from __future__ import annotations

import base64
import copy
import json
import re
import zlib

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import bitwright
from bitwright.cli import app
from bitwright.core.numerics.statistics import measure
from bitwright.errors import CalibrationError, ConfigError, ExportError
from bitwright.onnx import QuantizationSimModel
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.report import diff_runs, read_run, report_document, simulation_document, write_report
from bitwright.report.document import _histogram, in_order, level
from bitwright.report.page import MAX_BYTES, page
from bitwright.torch import QuantizationSimModel as TorchSim
from tests.support.reports import analysis, parts
from tests.support.simulations import calibrated


def data_of(html: str) -> dict:
    """What the page's program reads."""
    packed = re.search(r'id="data">([^<]*)</script>', html)
    assert packed
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A simulation of either front end, and the torch one's export."""
    torch.manual_seed(0)
    folder, xs = tmp_path_factory.mktemp("report"), [torch.randn(4, 3, 8, 8) for _ in range(3)]
    sim = calibrated(TorchSim(Small().eval(), xs[0]), xs)
    files = sim.export(folder / "one", "net")
    onnx = OnnxSim(files.float_model)
    feeds = [{onnx.graph.inputs[0]: x.numpy()} for x in xs]
    onnx.compute_encodings(feeds)
    return {"torch": (sim, xs), "onnx": (onnx, feeds), "folder": folder}


@pytest.mark.parametrize("which", ["torch", "onnx"])
def test_a_simulation_has_a_report(made, tmp_path, which):
    sim, data = made[which]
    path = sim.report(tmp_path / "report.html", data, verification=True, title="My net")
    html = path.read_text()
    found = data_of(html)
    assert "<title>My net</title>" in html and found["model"]["front_end"] == which
    assert [layer["name"] for layer in found["layers"]] == [op.name for op in sim.graph.ops]
    assert {site["name"] for site in found["sites"]} == set(sim.quantizers)
    assert found["verification"]["rows"] and found["coverage"]["rows"] and found["health"]["rows"]
    conv = next(layer for layer in found["layers"] if layer["op"] == "Conv")
    assert conv["multiplications"] == 4 * 4 * 6 * 6 * 27 and conv["made_db"] > 20
    assert any(site.get("histogram") for site in found["sites"])
    readers = [layer for layer in found["layers"] if found["layers"].index(conv) in layer["inputs"]]
    assert readers and found["output"]["sqnr_db"] > 10


def test_without_data_errors_are_of_the_example_and_the_report_says_so(made, tmp_path):
    found = data_of(made["torch"][0].report(tmp_path / "r.html").read_text())
    assert any("example input alone" in note for note in found["notes"])


@pytest.mark.parametrize("which", ["torch", "onnx"])
def test_an_uncalibrated_simulation_is_refused(made, tmp_path, which):
    sim, data = made[which]
    fresh = TorchSim(Small(), data[0]) if which == "torch" else OnnxSim(made["folder"] / "one" / "net_float.onnx")
    with pytest.raises(CalibrationError, match=r"not calibrated.*call sim\.compute_encodings"):
        fresh.report(tmp_path / "r.html", data)
    assert not (tmp_path / "r.html").exists()


def test_an_analysis_and_data_for_another_one_are_refused(made):
    with pytest.raises(ConfigError, match="an analysis, and data for another one"):
        simulation_document(made["torch"][0], made["torch"][1], analysis=analysis())


def test_an_export_has_a_report(made, tmp_path):
    found = read_run(made["folder"] / "one", verify=True)
    layers = {layer["name"]: layer for layer in found["layers"]}
    conv = next(layer for layer in layers.values() if layer["op"] == "Conv")
    assert {name.rpartition(".")[2] for name in conv["sites"]} >= {"weight", "bias"}
    assert found["verification"]["ok"] and {f["name"] for f in found["files"]} >= {"net.onnx", "net_float.onnx"}
    assert all(site["digest"] for site in found["sites"])
    assert data_of(write_report(found, tmp_path / "r.html").read_text())["title"] == "net"


def test_an_analysis_beside_an_export_brings_the_errors(made):
    sim, data = made["torch"]
    folder = made["folder"] / "two"
    sim.export(folder, "net")
    from bitwright.analysis.analyze import analyze

    (folder / "net_analysis.json").write_text(analyze(sim, data).to_json())
    found = read_run(folder)
    assert all(site.get("digest") for site in found["sites"])
    assert any(layer.get("made_db") for layer in found["layers"])


def test_the_page_asks_nothing_of_a_network(tmp_path):
    html = write_report(analysis(), tmp_path / "r.html", **parts()).read_text()
    text = html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|src=|url\(|@import|href=\"(?!#)", text)
    assert "default-src 'none'" in html


def test_without_scripts_the_verdict_and_the_worst_layers_are_there(tmp_path):
    found = analysis()
    html = write_report(found, tmp_path / "r.html").read_text().partition('id="data"')[0]
    for words in (found["layers"][0]["name"], "accuracy: 0.9 in float, 0.87 quantized", "24.5 dB", "a note"):
        assert words in html, words


@pytest.mark.parametrize("sites, channels", [(1000, 8), (1000, 1024)])
def test_a_thousand_sites_fit(sites, channels):
    html = page(report_document(analysis(sites // 2, channels), **parts()))
    found = data_of(html)
    assert len(html.encode()) <= MAX_BYTES < 5_000_000 and len(found["sites"]) == sites
    assert all("histogram" in site for site in found["sites"])
    assert all(len(site["channels"]["low"]) <= 256 for site in found["sites"] if "channels" in site)
    wide = found["sites"][0].get("channels")
    assert wide is None or wide["count"] == channels


def test_what_does_not_fit_is_left_out_where_it_costs_least(monkeypatch):
    monkeypatch.setattr("bitwright.report.page.MAX_BYTES", 90_000)
    found = data_of(page(report_document(analysis(200, 64))))
    kept = [site for site in found["sites"] if "histogram" in site]
    assert 0 < len(kept) < 400 and any("left out" in note for note in found["notes"])
    assert min(s["noise"] for s in kept) >= max(s["noise"] for s in found["sites"] if "histogram" not in s)


def test_equal_documents_are_equal_files(tmp_path):
    one, other = (write_report(analysis(), tmp_path / name, **parts()).read_bytes() for name in "ab")
    assert one == other


def test_order_needs_no_deep_stack_and_survives_loops():
    chain = [{"name": str(i), "inputs": [str(i + 1)]} for i in range(20_000)]
    assert [layer["name"] for layer in in_order(chain)] == [str(i) for i in reversed(range(20_000))]
    loop = [{"name": "a", "inputs": ["b"]}, {"name": "b", "inputs": ["a", "unknown"]}, {"name": "c", "inputs": ["b"]}]
    assert sorted(layer["name"] for layer in in_order(loop)) == ["a", "b", "c"]


@pytest.mark.parametrize("values", [[-3.0, -1.0, 0.0, 0.5, 2.0], [1.0, 2.0, 3.0], [0.0], [-5.0, -4.0]])
def test_histograms_of_calibration_count_every_value_between_its_edges(values):
    x = np.repeat(np.float32(values), 7)
    found = _histogram(measure("histogram", x))
    assert found is not None and len(found["edges"]) == len(found["counts"]) + 1 <= 65
    assert sum(found["counts"]) == x.size and found["edges"] == sorted(found["edges"])
    for value in values:
        inside = sum(
            n for n, a, b in zip(found["counts"], found["edges"], found["edges"][1:], strict=False) if a <= value <= b
        )
        assert inside >= 7


@pytest.mark.parametrize(
    "content, message",
    [
        ("[1]", "holds a list, not a report"),
        ('{"format": "other", "version": 1}', "is neither an analysis nor a report"),
        ('{"format": "bitwright-analysis", "version": 9}', "version 9"),
        ("{", "nothing|line"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path / "x.json")


def test_a_path_to_nothing_is_refused(tmp_path):
    with pytest.raises(ExportError, match="no such file or folder.*Analysis.to_json"):
        read_run(tmp_path / "nothing")


def runs():
    one = analysis(5)
    return one, copy.deepcopy(one)


def diff(one, other):
    return diff_runs(report_document(one), report_document(other), ("one", "other"))


def test_equal_runs_have_no_difference():
    found = diff(*runs())
    assert found.equal and found.same == 10 and not found.layers
    assert "0 sites differ, 10 are equal" in str(found)


def test_every_kind_of_change_is_named():
    one, other = runs()
    sites = other["sites"]
    sites[0]["bits"], sites[0]["dtype"] = 4, "int4"
    sites[1]["grid"] = {"low": -4.0, "high": 4.0, "steps": 255}
    sites[2]["enabled"] = False
    one["sites"][3]["enabled"] = False
    gone = sites.pop(4)["name"]
    sites.append({**sites[5], "name": "new.weight"})
    worse = other["layers"][0]
    worse["after_db"] -= 9
    other["layers"][1]["after_db"] += 4
    other["output"]["sqnr_db"] = 20.0
    found = diff(one, other)
    kinds = {change.name: change.kind for change in found.sites}
    names = [site["name"] for site in one["sites"]]
    assert kinds == {
        names[0]: "format", names[1]: "range", names[2]: "now in float", names[3]: "now quantized",
        gone: "only in the first", "new.weight": "only in the second",
    }  # fmt: skip
    assert [(c.name, round(c.change, 6)) for c in found.layers] == [
        (worse["name"], -9),
        (other["layers"][1]["name"], 4),
    ]
    text = str(found)
    for words in ("int8 in -2 to 2", "int4", "Layers that are worse", "-9.0 dB", "24.5", "20"):
        assert words in text, words
    html = found.to_html()
    assert worse["name"] in html and "://" not in html
    assert json.loads(found.to_json())["layers"][0]["change"] == -9


def test_runs_of_other_models_are_refused():
    one, other = runs()
    for site in other["sites"]:
        site["name"] = "x." + site["name"]
    with pytest.raises(ConfigError, match="no quantizer site in common.*one model"):
        diff(one, other)


def linear(weight: np.ndarray) -> onnx.ModelProto:
    node = onnx.helper.make_node("Gemm", ["x", "w"], ["y"], name="fc", transB=1)
    value = lambda name, shape: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)  # noqa: E731
    held = onnx.numpy_helper.from_array(weight, "w")
    graph = onnx.helper.make_graph([node], "net", [value("x", ["n", 4])], [value("y", ["n", 3])], [held])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=10)


def test_exports_are_compared_channel_by_channel(tmp_path):
    weight = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    changed = weight.copy()
    changed[np.abs(weight).max(1).argmin()] *= 1.01  # a channel within the widest range
    x = np.ones((2, 4), np.float32)
    for name, value in (("a", weight), ("b", weight), ("c", changed)):
        sim = calibrated(QuantizationSimModel(linear(value), x), [x])
        sim.export(tmp_path / name, "net", samples=False)
    assert diff_runs(read_run(tmp_path / "a"), read_run(tmp_path / "b")).equal
    found = diff_runs(read_run(tmp_path / "a"), read_run(tmp_path / "c"))
    assert "w" in {change.name for change in found.sites}
    assert "layers are not compared" in str(found)


def test_command_line(tmp_path):
    one, other = runs()
    other["sites"][0]["bits"] = 4
    for name, run in (("one", one), ("other", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    first, second = (str(tmp_path / f"{name}.json") for name in ("one", "other"))
    run = CliRunner().invoke(app, ["diff", first, first])
    assert run.exit_code == 0, run.output
    html, found = tmp_path / "d.html", tmp_path / "d.json"
    run = CliRunner().invoke(app, ["diff", first, second, "--html", str(html), "--json", str(found)])
    assert run.exit_code == 1 and "1 sites differ" in run.output
    assert html.read_text().startswith("<!doctype html>") and not json.loads(found.read_text())["equal"]
    run = CliRunner().invoke(app, ["report", first, "--out", str(tmp_path / "r.html")])
    assert run.exit_code == 0 and "5 layers, 10 sites" in run.output
    assert (tmp_path / "r.html").stat().st_size > 40_000
    run = CliRunner().invoke(app, ["report", str(tmp_path / "missing")])
    assert run.exit_code == 2


def test_an_export_of_quantize_shows_its_metric_its_error_and_both_sizes(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(16, 8)
    result = bitwright.quantize(model, [x], recipe=["fold"], metric=lambda m: 0.75, path=tmp_path, progress=False)
    found = read_run(tmp_path)
    assert found["metric"]["float"] == found["metric"]["quantized"] == 0.75
    worst = result.quality.worst
    assert found["output"]["name"] == worst.name and abs(found["output"]["sqnr_db"] - worst.sqnr) < 0.05
    assert found["output"]["level"] == level(worst.sqnr)
    paths = {"float": result.exported.float_model, "quantized": result.exported.qdq}
    assert found["size"] == {which: path.stat().st_size for which, path in paths.items()}
    bare = result.sim.export(tmp_path / "again", "model", x)
    found = read_run(bare.manifest.parent)
    assert found["metric"] is None and found["output"] is None, "the simulation may have changed since"


@pytest.mark.parametrize(
    "sqnr, words",
    [(np.inf, "excellent (40 dB or more)"), (40, "excellent (40 dB or more)"), (39.9, "good (30 dB or more)"),
     (25, "fair (20 dB or more)"), (19.9, "poor (below 20 dB)"), (-np.inf, "poor (below 20 dB)")],
)  # fmt: skip
def test_an_error_of_the_outputs_in_a_word(sqnr, words):
    assert level(sqnr) == words
