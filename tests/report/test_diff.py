"""What differs between two runs."""

from __future__ import annotations

import copy
import json

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from bitwright.cli import app
from bitwright.errors import ConfigError
from bitwright.onnx import QuantizationSimModel
from bitwright.report import diff_runs, read_run, report_document
from tests.support.reports import analysis


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
        sim = QuantizationSimModel(linear(value), x)
        sim.compute_encodings([x])
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
