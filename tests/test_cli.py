"""The command line: what each command prints, its exit code, and how it says that something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from bitwright import __version__
from bitwright.cli import app
from bitwright.core.aimet_config import SHIPPED
from bitwright.core.ranges import RANGE_METHODS
from bitwright.core.spec import PRESETS
from bitwright.errors import ExportError
from bitwright.export.manifest import write_manifest
from bitwright.export.samples import read_samples, write_samples
from bitwright.torch import QuantizationSimModel

ROOT = Path(__file__).parents[1]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    batch = torch.randn(2, 1, 4, 4, generator=generator)
    sim = QuantizationSimModel(model, batch)
    sim.compute_encodings([batch])
    folder = tmp_path_factory.mktemp("exported")
    sim.export(folder, "net", batch)
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


# -- the whole


def test_help_shows_every_command_with_an_example():
    text = run("--help").output
    for name in ("verify", "show", "presets", "check-config"):
        assert name in text
        assert "Examples:" in run(name, "--help").output
    assert "bitwright verify exported/" in text
    assert run().exit_code == 2, "no command at all prints the help too"


def test_version():
    assert run("--version").output == f"bitwright {__version__}\n"


def test_unknown_command_gets_the_close_match():
    result = run("verfy")
    assert result.exit_code == 2
    assert "Did you mean 'verify'" in result.output.replace("\n", " ")


# -- verify


def test_verify_prints_every_place_and_says_ok(exported, tmp_path):
    result = run("verify", exported, "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    for site in ("0.input[0]", "1.output[0]", "3.output[0]"):
        assert site in result.output
    assert "3 of 3 places agree: ok" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] and [row["site"] for row in report["rows"]] == [
        "0.input[0]",
        "1.output[0]",
        "3.output[0]",
    ]


def test_verify_answers_a_difference_with_exit_code_1(folder):
    sites, inputs, outputs = read_samples(folder / "net_samples.npz")
    sites["1.output[0]"][0] += 1.0
    write_samples(folder / "net_samples.npz", sites, inputs, outputs)
    write_manifest(folder / "net_manifest.json", folder=folder)
    result = run("verify", folder)
    assert result.exit_code == 1
    assert "NOT ok" in result.output


def test_verify_refuses_files_that_changed(folder):
    (folder / "net.onnx").write_bytes((folder / "net.onnx").read_bytes()[:-1])
    result = run("verify", folder)
    assert result.exit_code == 2
    assert "net.onnx has" in result.output and "remedy: export again" in result.output


@pytest.mark.parametrize(
    "arguments, parts",
    [
        pytest.param(
            ("gone",),
            ("gone", "there is no such folder", "remedy: name the folder that sim.export"),
            id="no-folder",
        ),
        pytest.param((".",), ("the folder holds no export",), id="empty-folder"),
        pytest.param(
            ("{folder}", "--prefix", "nett"),
            ("holds no export called 'nett' (did you mean 'net'?)", "remedy: name one of net"),
            id="unknown-prefix",
        ),
    ],
)  # fmt: skip
def test_verify_names_place_problem_and_remedy(folder, tmp_path, monkeypatch, arguments, parts):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    result = run("verify", *(a.format(folder=folder) for a in arguments))
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    for part in parts:
        assert part in result.output


def test_several_exports_in_one_folder_need_the_prefix(folder):
    for path in list(folder.iterdir()):
        shutil.copy(path, path.with_name(path.name.replace("net", "other")))
    result = run("show", folder)
    assert result.exit_code == 2
    assert "the folder holds several exports: net, other" in result.output
    assert "remedy: name one of them as the prefix" in result.output
    assert run("show", folder, "--prefix", "other").exit_code == 0


def test_debug_shows_the_traceback(tmp_path):
    result = run("--debug", "verify", tmp_path / "gone")
    assert isinstance(result.exception, ExportError)


def test_a_missing_package_is_answered_with_the_extra(exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "onnxruntime.capi", None)
    result = run("verify", exported)
    assert result.exit_code == 2
    assert "is not installed" in result.output and "remedy: pip install 'bitwright[onnx]'" in result.output


# -- show


def test_show_prints_the_sites_of_a_folder(exported):
    result = run("show", exported)
    assert result.exit_code == 0, result.output
    weight = next(line for line in result.output.splitlines() if "0.weight" in line)
    assert "int8" in weight and "per channel, axis 0" in weight and " to " in weight
    assert "inside the supergroup Conv>Relu" in result.output


def test_show_selects_by_name(exported):
    lines = run("show", exported, "--match", "3.output[0]").output.splitlines()
    assert sum("quantized" in line for line in lines) == 1


def test_show_prints_an_encodings_file(exported):
    result = run("show", exported / "net.encodings")
    assert result.exit_code == 0
    assert "net.encodings, version 1.0.0" in result.output and "3.weight" in result.output
    result = run("show", exported / "net.onnx")
    assert result.exit_code == 2 and "net.onnx" in result.output and "remedy" in result.output
    result = run("show", exported / "gone.encodings")
    assert result.exit_code == 2 and "there is no such file or folder" in result.output


def test_show_names_a_sites_file_that_is_damaged(folder):
    (folder / "net_sites.json").write_text("{")
    result = run("show", folder)
    assert result.exit_code == 2
    assert "net_sites.json" in result.output and "remedy: export the model again" in result.output


# -- presets and configurations


def test_presets_lists_every_name():
    result = run("presets")
    assert result.exit_code == 0
    for name in (*PRESETS, *RANGE_METHODS, *SHIPPED, "tf_enhanced", "default_config"):
        assert name in result.output


def test_check_config_prints_the_rules(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(
        "preset: w4a8\nrules:\n  - {match: head, weight: int8}\n  - {op: Softmax, output: null}\n"
    )
    result = run("check-config", path)
    assert result.exit_code == 0, result.output
    assert "weights      int4 symmetric per channel, minmax" in result.output
    head, softmax = (line for line in result.output.splitlines() if "rules[" in line)
    assert "names head" in head and "format=int8" in head
    assert "operators Softmax" in softmax and "quantized=False" in softmax


@pytest.mark.parametrize("name", SHIPPED)
def test_check_config_reads_every_shipped_configuration(name):
    result = run("check-config", name)
    assert result.exit_code == 0, result.output
    assert "model_input" in result.output and "Add>Relu" in result.output


def test_check_config_says_what_is_wrong(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("rules:\n  - {match: head, wieght: int8}\n")
    result = run("check-config", path)
    assert result.exit_code == 2
    assert "rules.yaml: rules[0]" in result.output and "did you mean 'weight'" in result.output
    assert run("check-config", "htp_v73", "--preset", "w9").exit_code == 2


# -- as a program


def test_as_a_program_it_ends_with_three_lines_and_no_traceback(tmp_path):
    command = [sys.executable, "-m", "bitwright.cli"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [*command, "verify", "gone"], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert process.returncode == 2
    assert process.stdout == ""
    assert [line.split(":")[0].strip() for line in process.stderr.splitlines()] == [
        "error",
        "there is no such folder",
        "remedy",
    ]


def test_help_loads_no_framework():
    code = "import sys, bitwright.cli; print({'torch', 'onnx', 'numpy', 'pydantic'} & sys.modules.keys())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert process.stdout.strip() == "set()", process.stderr
