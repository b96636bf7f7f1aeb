"""The command line: what each command prints, its exit code, its files, and how it says that something is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import typer
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from typer.testing import CliRunner, Result

from bitwright import __version__
from bitwright.analysis import Analysis
from bitwright.cli import app
from bitwright.cli.app import _ORDER
from bitwright.cli.quantize import _gathered
from bitwright.core.numerics.ranges import RANGE_METHODS
from bitwright.core.numerics.spec import PRESETS
from bitwright.core.placement.aimet_config import SHIPPED
from bitwright.errors import ConfigError, ExportError
from bitwright.export.files.manifest import write_manifest
from bitwright.export.samples import read_samples, write_samples
from bitwright.export.targets import TARGETS
from bitwright.recipes.default_recipe import EFFORTS
from bitwright.recipes.recipe import KINDS
from bitwright.runtimes.adapters import RUNTIMES
from bitwright.runtimes.benchmark import BenchmarkReport
from bitwright.runtimes.timing import Ratio
from bitwright.torch import QuantizationSimModel
from tests.analysis.conftest import Net as AnalysisNet
from tests.analysis.conftest import batches
from tests.analysis.conftest import exported as exported_model
from tests.onnx.nets import Net, two_branches
from tests.support.processes import python
from tests.support.simulations import calibrated

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
    sim = calibrated(QuantizationSimModel(model, batch), [batch])
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
    for name in ("verify", "show", "doctor", "analyze", "presets", "check-config"):
        assert name in text
        assert "Examples:" in run(name, "--help").output
    assert "bitwright verify exported/" in text
    listed = text[text.index("\u2500 Commands ") :]
    assert listed.index(" quantize ") < listed.index(" verify ") < listed.index(" analyze ") < listed.index(" migrate ")
    assert set(_ORDER) == set(typer.main.get_command(app).commands)
    assert run().exit_code == 2, "no command at all prints the help too"


def test_options_stand_in_groups_and_the_data_come_first():
    text = run("quantize", "--help").output
    text = text[text.index("\u2500 Arguments ") - 1 :]
    places = [
        text.index(f"\u2500 {title} ") for title in ("Arguments", "Options", "Data", "Methods", "Export", "Output")
    ]
    assert places == sorted(places)
    assert text.index("--data ") < text.index("--batch-size") < places[3] < text.index("--recipe") < places[4]
    assert places[4] < text.index("--target") < places[5] < text.index("--out ")


@pytest.mark.parametrize(
    "line, found",
    [
        ("bitwright quantize m.onnx --preset w4a1", "w4a16"),
        ("bitwright quantize m.onnx --recipe fold,eq", "fold,equalize"),
        ("bitwright benchmark m.onnx --runtime open", "openvino"),
        ("bitwright list tar", "targets"),
        ("bitwright analy", "analyze"),
    ],
)
def test_a_shell_completes_commands_options_and_names(line, found):
    environment = {"_BITWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    result = CliRunner().invoke(app, [], env=environment, prog_name="bitwright")
    assert result.output.split() == [found]


def test_every_command_is_quiet_or_verbose_and_not_both(exported):
    result = run("verify", exported, "-q")
    assert result.output == "3 of 3 places agree: ok\n" and result.exit_code == 0
    assert run("show", exported, "-q").output == f"{run('show', exported).output.splitlines()[-1]}\n"
    result = run("verify", exported, "-q", "-v")
    assert result.exit_code == 2 and "together with --verbose" in result.output


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
    assert report["ok"] and [row["site"] for row in report["rows"]] == ["0.input[0]", "1.output[0]", "3.output[0]"]


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
    assert "int8" in weight and "per channel (axis 0)" in weight and " to " in weight
    assert "inside the supergroup Conv>Relu" in result.output


def test_show_selects_by_name(exported):
    lines = run("show", exported, "--match", "3.output[0]").output.splitlines()
    assert sum("quantized" in line for line in lines) == 1


def test_show_prints_an_encodings_file(exported):
    result = run("show", exported / "net.encodings")
    assert result.exit_code == 0
    assert "net.encodings, version 1.0.0" in result.output and "3.weight" in result.output
    result = run("show", exported / "gone.encodings")
    assert result.exit_code == 2 and "there is no such file or folder" in result.output


def test_show_names_a_sites_file_that_is_damaged(folder):
    (folder / "net_sites.json").write_text("{")
    result = run("show", folder)
    assert result.exit_code == 2
    assert "net_sites.json" in result.output and "remedy: export the model again" in result.output


def test_quantize_follows_a_recipe_and_shows_what_each_step_did(tmp_path, monkeypatch):
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    y = net("Relu", net.bn(net.conv(x, 3, 8, name="c1", bias=False), 8), name="r1")
    onnx.save(net.model(net.conv(y, 8, 4, name="c2")), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((8, 3, 8, 8), np.float32))
    (tmp_path / "rating.py").write_text(
        "import numpy as np\ndef rate(session):\n"
        "    return float(session.run(None, {'x': np.ones((1, 3, 8, 8), np.float32)})[0].mean())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    common = ("quantize", tmp_path / "net.onnx", "--data", tmp_path / "data.npz", "--out", tmp_path / "out")
    result = run(*common, "--recipe", "fold,gptq", "--metric", "rating:rate", "--undo-harm")
    assert result.exit_code == 0, result.output
    assert "metric: float " in result.output and "steps: done: fold, gptq" in result.output
    result = run(*common, "--recipe", "fold,gptq", "--metric", "rating:rate", "-v")
    assert "no step" in result.output and "gptq()" in result.output and "layers, output error x" in result.output
    result = run(*common, "--recipe", "fold", "--memory-budget", "1")
    assert result.exit_code == 0, result.output
    budgets: list[object] = []
    monkeypatch.setattr(
        "bitwright.recipes.quantize.quantize", lambda *_, memory_budget, **__: budgets.append(memory_budget)
    )
    assert run(*common, "--memory-budget", "3").exit_code == 1 and budgets == [3 << 20]
    assert run(*common, "--memory-budget", "0").exit_code == 2
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    result = run(*common, "--recipe", "fold,gtpq")
    assert result.exit_code == 2 and "there is no step 'gtpq'" in result.output
    result = run(*common, "--effort", "quick", "--verbose")
    assert result.exit_code == 0 and "gptq(num_samples=32" in result.output, result.output
    for more, message in (
        (("--effort", "quik"), "there is no effort 'quik'"),
        (("--effort", "quick", "--recipe", "fold"), "a recipe says what is done, and so does 'quick'"),
    ):
        result = run(*common, *more)
        assert result.exit_code == 2 and message in result.output
    result = run("quantize", tmp_path / "net.onnx", "--out", tmp_path / "out", "--effort", "quick")
    assert result.exit_code == 2 and "there are no data to choose by" in result.output


def test_notes_of_many_places_with_one_text_are_one_line():
    notes = [*(f"{place}: in float, because of it" for place in "abcde"), "f: alone", "a remark"]
    assert list(_gathered(notes)) == ["a, b, c and 2 more: in float, because of it", "f: alone", "a remark"]
    assert list(_gathered(notes[2:])) == notes[2:]


def test_a_file_that_its_target_refuses_is_one_warning_and_no_error_of_quantize(tmp_path, monkeypatch, caplog):
    def refuse(*_, **__):
        raise ExportError("net.onnx", "onnxruntime refuses the file: no kernel", "leave it in float")

    net = Net()
    onnx.save(net.model(net.conv(net.input("x", (1, 3, 8, 8)), 3, 8, name="c1")), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((8, 3, 8, 8), np.float32))
    common = ("quantize", tmp_path / "net.onnx", "--data", tmp_path / "data.npz", "--recipe", "fold")
    result = run(*common, "--out", tmp_path / "one")
    assert result.exit_code == 0 and "speed against float in onnxruntime, 1 thread" in result.output
    for high, told in ((1.1, False), (1.9, True)):
        monkeypatch.setattr("bitwright.compare.benchmark.ratio", lambda *_, high=high: Ratio(1.0, 0.95, high))
        result = run(*common, "--out", tmp_path / "one")
        assert ("tells little: the machine is busy" in result.output) is told
    monkeypatch.setattr("bitwright.compare.benchmark.open_file", refuse)
    caplog.clear()
    result = run(*common, "--out", tmp_path / "two")
    assert result.exit_code == 0 and "speed against float" not in result.output
    assert [record.message.count("refuses the file: no kernel") for record in caplog.records] == [1]
    assert (tmp_path / "two" / "net_manifest.json").is_file()


def test_quantize_says_what_to_do_about_a_branch_that_the_data_do_not_take(tmp_path, monkeypatch):
    onnx.save(two_branches(), tmp_path / "net.onnx")
    (tmp_path / "one_branch.py").write_text(
        "import numpy as np\ndef feeds():\n    return [{'x': np.ones((3, 4), np.float32), 'cond': np.array(True)}]\n"
    )
    common = ("quantize", tmp_path / "net.onnx", "--out", tmp_path / "out", "--recipe", "fold")
    monkeypatch.syspath_prepend(tmp_path)
    data = ("--data", "one_branch:feeds")
    refused = run(*common, *data, "--no-allow-unreached")
    assert refused.exit_code == 2 and "no calibration batch reached this site" in refused.output
    assert "--allow-unreached" in refused.output and not (tmp_path / "out").exists()
    assert run(*common, *data, "--allow-unreached").exit_code == 0


# -- presets and configurations


def test_presets_lists_every_name():
    result = run("presets")
    for name in KINDS:
        assert name in result.output
    assert result.exit_code == 0
    for name in (*PRESETS, *RANGE_METHODS, *SHIPPED, "tf_enhanced", "default_config"):
        assert name in result.output


def test_list_prints_one_kind_of_names_or_all():
    assert run("presets").output == run("list").output
    assert run("list", "presets", "-q").output.split() == list(PRESETS)
    assert run("list", "targets", "-q").output.split() == list(TARGETS)
    assert set(run("list", "methods", "-q").output.split()) == {*KINDS, *RANGE_METHODS, *EFFORTS}
    text = run("list", "runtimes").output
    assert all(name in text for name in RUNTIMES) and "adaround" not in text
    result = run("list", "preset")
    assert (
        result.exit_code == 2 and "there is no list 'preset' (did you mean 'presets' or 'profiles'?)" in result.output
    )


def test_check_config_prints_the_rules(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("preset: w4a8\nrules:\n  - {match: head, weight: int8}\n  - {op: Softmax, output: null}\n")
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
    command = [sys.executable, "-m", "bitwright"]
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
    code = "import sys, bitwright.cli; print({'torch', 'onnx', 'numpy'} & sys.modules.keys())"
    assert python("-c", code, cwd=ROOT).stdout.strip() == "set()"


@pytest.mark.parametrize(("command", "own", "all_of_them"), [("--version", 15, 200), ("show", 17, 350)])
def test_a_command_loads_few_modules(command, own, all_of_them, tmp_path):
    """Start-up is import time: what a command loads is counted, as times depend on the machine."""
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Relu", ["x"], ["y"])], "net",
            [helper.make_tensor_value_info("x", 1, [2])], [helper.make_tensor_value_info("y", 1, [2])],
        )
    )  # fmt: skip
    onnx.save(model, tmp_path / "net.onnx")
    arguments = [command, *([str(tmp_path / "net.onnx")] if command == "show" else [])]
    code = (
        "import atexit, sys; before = set(sys.modules); from bitwright.__main__ import main\n"
        "def end():\n  new = set(sys.modules) - before; mine = [m for m in new if m.partition('.')[0] == 'bitwright']\n"
        f"  print(len(mine), len(new), file=sys.stderr)\n"
        f"atexit.register(end); sys.argv[1:] = {arguments!r}; main()"
    )
    process = python("-c", code, cwd=ROOT)
    found = [int(number) for number in process.stderr.split()]
    assert found[0] <= own and found[1] <= all_of_them, found


def test_show_without_options_prints_what_the_parser_would_have_it_print(exported):
    for path in [exported, next(Path(exported).glob("*.onnx")), Path(exported) / "missing.onnx"]:
        parsed, plain = run("show", path), python("-m", "bitwright", "show", str(path), cwd=ROOT, check=False)
        assert (plain.stdout + plain.stderr, plain.returncode) == (parsed.output, parsed.exit_code)


def test_show_of_a_file_loads_what_reads_it(exported):
    """onnx_ir brings sympy, which takes longer to import than all else together."""
    files = [str(path) for path in Path(exported).glob("*.onnx")]
    code = (
        "import sys; from pathlib import Path; from bitwright.export.contents import contents; "
        f"tables = [contents(Path(path)) for path in {files!r}]; assert len(tables) > 1; "
        "print({'onnx_ir', 'sympy', 'torch', 'bitwright.core.simulation.simulation'} & sys.modules.keys())"
    )
    assert python("-c", code, cwd=ROOT).stdout.strip() == "set()"


# -- doctor


@pytest.fixture
def zeros(tmp_path: Path) -> Path:
    """``divide.onnx`` and ``data.npz``, whose third sample is divided by zero."""
    import numpy as np
    import onnx

    from tests.onnx.nets import Net

    net = Net()
    x = net.input("x", ("n", 2))
    share = net("Div", x, net("Relu", x, name="relu"), name="share")
    onnx.save(net.model(net("MatMul", share, net.weights(2, 2), name="last", out="y")), tmp_path / "divide.onnx")
    np.savez(tmp_path / "data.npz", x=np.float32([[1, 2], [3, 4], [-1, 5], [6, 7]]))
    return tmp_path


def test_doctor_names_the_operator_and_the_sample(zeros):
    result = run("doctor", zeros / "divide.onnx", "--data", zeros / "data.npz", "--batch-size", 2)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0] == "divide.onnx: not healthy (2 batches, 6 calls)"
    assert lines[1].startswith("1. share (Div): the divisor relu1 holds 1 zero")
    assert "   first in batch 1, sample 0" in lines and "   reaches y" in lines
    assert lines[-1].startswith("   remedy: add a small epsilon")


def test_doctor_on_data_without_the_sample(zeros):
    result = run("doctor", zeros / "divide.onnx", "--data", zeros / "data.npz", "--limit", 2)
    assert result.exit_code == 0
    assert result.output == "divide.onnx: healthy (2 batches, 6 calls)\n"


def test_doctor_writes_json(zeros):
    arguments = ("doctor", zeros / "divide.onnx", "--data", zeros / "data.npz", "--json")
    assert run(*arguments, zeros / "report.json").exit_code == 1
    printed = run(*arguments, "-")
    assert printed.exit_code == 1
    report = json.loads(printed.output)
    assert report == json.loads((zeros / "report.json").read_text())
    assert report["ok"] is False and report["culprits"][0]["cause"] == "division by zero"


def test_doctor_without_data_says_so(zeros):
    result = run("doctor", zeros / "divide.onnx")
    assert "note: random values were fed, no data was given" in result.output


@pytest.mark.parametrize("policy, code", [("error", 1), ("skip", 0), ("clamp", 0), ("skipp", 2)])
def test_doctor_forgives_bad_data_under_a_policy_that_does(zeros, policy, code):
    import numpy as np

    np.savez(zeros / "bad.npz", x=np.float32([[1, 2], [np.nan, 4]]))
    result = run("doctor", zeros / "divide.onnx", "--data", zeros / "bad.npz", "--policy", policy)
    assert result.exit_code == code
    assert "x (input): it holds 1 NaN" in result.output or code == 2
    other = run("doctor", zeros / "divide.onnx", "--data", zeros / "data.npz", "--policy", policy)
    assert other.exit_code == max(code, 1), "what an operator makes is a fault under every policy"


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's with models and data."""
    (tmp_path / "doctored.py").write_text(
        "import torch\n"
        "def make():\n"
        "    class Share(torch.nn.Module):\n"
        "        def forward(self, x):\n"
        "            return x / x.sum(-1, keepdim=True)\n"
        "    return Share()\n"
        "def good(): return [torch.ones(2, 3)]\n"
        "def bad():\n"
        "    yield torch.ones(2, 3)\n"
        "    yield torch.zeros(2, 3)\n"
        "def broken(): raise ValueError('no weights here')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "doctored", raising=False)
    return "doctored"


def test_doctor_of_a_pytorch_model(own_module):
    assert run("doctor", f"{own_module}:make", "--data", f"{own_module}:good").exit_code == 0
    result = run("doctor", f"{own_module}:make", "--data", f"{own_module}:bad")
    assert result.exit_code == 1
    assert "at doctored.py:5: return x / x.sum(-1, keepdim=True)" in result.output
    assert "first in batch 1, sample 0" in result.output


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (("nothing.onnx",), "the model file does not exist"),
        (("doctored:make",), "a PyTorch model does not say what it takes"),
        (("doctored:make", "--data", "doctored:nothing"), "has no attribute 'nothing'"),
        (("doctored:broken", "--data", "doctored:good"), "it failed: ValueError: no weights here"),
        (("doctored:make", "--data", "doctored:broken"), "it failed: ValueError: no weights here"),
    ],
    ids=["no-file", "no-data", "no-function", "failing-model", "failing-data"],
)
def test_doctor_on_what_it_cannot_use(own_module, arguments, problem):
    result = run("doctor", *arguments)
    assert result.exit_code == 2
    assert problem in result.output and "remedy:" in result.output


@pytest.mark.parametrize(
    "policy, code, text",
    [
        ("error", 2, "batch 2, share"),
        ("skip", 0, "1 of 4 batches left out"),
        ("clamp", 0, "1 of 4 batches hold values that are not finite"),
        ("skipp", 2, "did you mean 'skip'?"),
    ],
)
def test_quantize_obeys_the_policy_for_batches_that_are_not_finite(zeros, policy, code, text):
    result = run(
        "quantize", zeros / "divide.onnx", "--data", zeros / "data.npz", "--out", zeros / "out", "--non-finite", policy
    )
    assert result.exit_code == code, result.output
    assert text in result.output
    assert (zeros / "out").exists() == (code == 0)


def test_what_compiled_libraries_print_is_no_answer() -> None:
    """The solver of mixed precision prints to the stdout of the process, past Python."""
    code = """
import os
from bitwright.cli import app, main

@app.command()
def speak() -> None:
    os.write(1, b"from C\\n")
    print("answer, \\u00fc")

main()
"""
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    process = subprocess.run(
        [sys.executable, "-c", code, "speak"], capture_output=True, encoding="utf-8", cwd=ROOT, env=environment
    )
    assert (process.returncode, process.stdout) == (0, "answer, \u00fc\n")
    assert "from C" in process.stderr


@pytest.mark.parametrize("closed", [1, 2])
def test_a_program_without_stdout_or_stderr_still_runs(closed: int) -> None:
    code = f"import os, sys; os.close({closed}); os.execv(sys.executable, [sys.executable, '-m', 'bitwright', '--version'])"
    process = python("-c", code, cwd=ROOT)
    assert process.stdout == ("" if closed == 1 else f"bitwright {__version__}\n")


@pytest.mark.parametrize(("limit", "code", "begin"), [((), 0, ""), (("--fail-below", "90"), 1, "POOR, below 90 dB; ")])
def test_quantize_ends_with_exit_code_1_where_the_result_is_poor(tmp_path, limit, code, begin):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    torch.onnx.export(model, (torch.randn(2, 8),), tmp_path / "m.onnx", dynamo=False, input_names=["x"])
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32))
    np.savez(tmp_path / "other.npz", x=np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32))
    arguments = ("quantize", tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "--batch-size", "2", "--no-fallback")
    result = run(*arguments, "--held-out", tmp_path / "other.npz", "--out", tmp_path / "out", *limit)
    assert result.exit_code == code, result.output
    first = result.output.lstrip().splitlines()[0]
    assert first.startswith(begin) and "95 % interval" in first and first.endswith("(of held_out)")
    assert ("POOR" in first) == bool(begin)
    assert (tmp_path / "out" / "m.onnx").exists() and "quantized: weights 2 of 2" in result.output


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a free batch axis, 20 samples and their right answers."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    names = {"input_names": ["x"], "dynamic_axes": {"x": {0: "n"}}}
    torch.onnx.export(model, (torch.randn(2, 8),), folder / "m.onnx", dynamo=False, **names)
    x = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
    np.savez(folder / "d.npz", x=x)
    with torch.no_grad():
        np.save(folder / "labels.npy", model(torch.from_numpy(x)).argmax(1).numpy())
    return folder


def test_quantize_ends_with_metric_size_verification_files_and_steps(small, tmp_path):
    common = ("quantize", small / "m.onnx", "--data", small / "d.npz", "--recipe", "fold", "--out", tmp_path)
    lines = run(*common, "--metric", "accuracy", "--labels", small / "labels.npy").output.splitlines()
    assert re.search(r"output 7 \d.*(excellent|good|fair) \(\d+ dB or more\)", lines[0])
    found = {line.partition(":")[0]: line for line in lines}
    assert found["metric"].startswith("metric: float 1 -> quantized ")
    sizes = [(tmp_path / name).stat().st_size / 1e3 for name in ("m_float.onnx", "m.onnx")]
    assert "(95 % interval " in lines[0] and "on 4 batches that calibration saw: give held_out (--held-out)" in lines[0]
    assert ("the file is LARGER than the float file by " in lines[0]) == (sizes[1] > sizes[0])
    assert found["size"].startswith(f"size: float {sizes[0]:.1f} kB -> quantized {sizes[1]:.1f} kB")
    assert found["verify"] == "verify: 3 of 3 places agree: ok"
    assert "speed against float in onnxruntime, 1 thread" in found
    names = found[f"wrote 6 files to {tmp_path}"].partition(": ")[2].split(", ")
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    assert any(
        line.startswith("m_samples.npz holds a batch of your data; ") and "--no-samples" in line for line in lines
    )
    assert lines[-1] == "steps: no change: fold"
    quiet = run(*common, "-q")
    assert quiet.output.count("\n") == 1 and "dB" in quiet.output
    told = run(*common, "-v").output
    assert "batch norms folded; values: " in told and re.search(r"^\d\d:\d\d:\d\d fold\(\): ", told, re.MULTILINE)


def test_an_export_without_samples_has_no_data_of_the_user(small, tmp_path):
    common = ("quantize", small / "m.onnx", "--data", small / "d.npz", "--recipe", "fold", "--out", tmp_path)
    result = run(*common, "--no-samples")
    assert result.exit_code == 0 and "samples.npz" not in result.output
    assert not (tmp_path / "m_samples.npz").exists() and len(list(tmp_path.iterdir())) == 5
    result = run("verify", tmp_path)
    assert result.exit_code == 2 and "has no samples" in result.output


@pytest.mark.parametrize("limit, count", [((), 20), (("--limit", 7), 7)], ids=["all", "limit"])
@pytest.mark.parametrize("size", [(), ("--batch-size", 3)], ids=["", "batches-of-3"])
def test_every_command_reads_the_same_samples(small, tmp_path, limit, count, size, monkeypatch):
    seen: dict[str, int] = {}

    def counted(name):
        def run(*arguments, **_):
            batches = next(a for a in arguments if not isinstance(a, str | Path) and hasattr(a, "__iter__"))
            seen[name] = sum(len(feeds["x"]) for feeds in batches)
            raise ConfigError(name, "it is counted", "nothing")

        return run

    monkeypatch.setattr("bitwright.precision.auto.auto_quantize", counted("auto"))  # first: it imports the next one
    monkeypatch.setattr("bitwright.recipes.quantize.quantize", counted("quantize"))
    monkeypatch.setattr("bitwright.onnx.check_model", counted("doctor"))
    monkeypatch.setattr("bitwright.compare.saturation.saturation", counted("saturation"))
    monkeypatch.setattr("bitwright.compression.compress.compress", counted("compress"))
    common = (small / "m.onnx", "--data", small / "d.npz", *limit, *size)
    for command in ("quantize", "analyze", "doctor", "auto", "saturation", "compress"):
        out = ("--out", tmp_path / command) if command in ("quantize", "auto", "compress") else ()
        out += ("--macs", "0.5") if command == "compress" else ()
        assert run(command, *common, *out).exit_code == 2
        name = "quantize" if command == "analyze" else command
        assert seen.pop(name) == count, command


def test_a_slow_file_is_no_failure_of_benchmark_unless_it_is_asked_for(exported, monkeypatch):
    for file, low, high in (("slow", 0.4, 0.5), ("fast", 1.9, 2.0)):
        report = BenchmarkReport("onnxruntime", (), {}, {1: Ratio(low, low, high)})
        monkeypatch.setattr("bitwright.onnx.benchmark.benchmark_path", lambda *_, report=report, **__: report)
        result = run("benchmark", exported)
        assert result.exit_code == 0
        assert result.output.splitlines()[-1].startswith(f"speed against float in onnxruntime: {low:.2f}x")
        assert run("benchmark", exported, "--fail-if-slower").exit_code == (file == "slow")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its data, and labels that are nearly always its answers."""
    folder = tmp_path_factory.mktemp("analyze")
    model, data = AnalysisNet().eval(), batches(2)
    onnx.save(exported_model(model, data[0]), folder / "net.onnx")
    np.savez(folder / "data.npz", x=np.concatenate([x.numpy() for x in data]))
    np.save(folder / "labels.npy", np.concatenate([model(x).argmax(-1).numpy() for x in data]))
    return folder


def test_the_worst_layers_are_printed_and_the_report_is_json(files, tmp_path):
    result = run(
        "analyze", files / "net.onnx", "--data", files / "data.npz", "--metric", "accuracy",
        "--labels", files / "labels.npy", "--group", "*conv*", "--remedies", 1, "--out", tmp_path / "report.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "32 samples" in result.output and "accuracy: float 1" in result.output
    assert "/conv1/Conv" in result.output and f"wrote {tmp_path / 'report.json'}" in result.output
    found = Analysis.from_dict(json.loads((tmp_path / "report.json").read_text()))
    assert found.metric.difference.n == 32 and "*conv*" in [group.name for group in found.groups]
    assert found.mode == "auto" and found.worst(1)[0].noise > 0


def test_a_function_rates_the_session(files, monkeypatch):
    (files / "rating.py").write_text(
        "import numpy as np\n"
        f"data = np.load({str(files / 'data.npz')!r})['x']\n"
        "def spread(session):\n"
        "    return session.run(None, {'x': data})[0].std(1)\n"
    )
    monkeypatch.syspath_prepend(str(files))
    monkeypatch.delitem(sys.modules, "rating", raising=False)
    result = run(
        "analyze", files / "net.onnx", "--data", files / "data.npz", "--metric", "rating:spread", "--mode", "fast",
        "--lower-is-better", "--no-fold",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "spread: float" in result.output and "95 % interval" in result.output


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (("--metric", "accuracy"), "no labels are given"),
        (("--metric", "acc"), "there is no metric 'acc'"),
        (("--out", "report.pdf"), "there is no report of the kind '.pdf'"),
        (("--group", "conv9*"), "'conv9*' matches no site"),
        (("--mode", "slow"), "there is no mode 'slow'"),
    ],
    ids=["no-labels", "metric", "out", "group", "mode"],
)
def test_what_cannot_be_answered_is_refused(files, arguments, problem):
    result = run("analyze", files / "net.onnx", "--data", files / "data.npz", *arguments)
    assert result.exit_code == 2 and problem in result.output


def test_the_report_is_one_page(files, tmp_path):
    result = run("analyze", files / "net.onnx", "--data", files / "data.npz", "--out", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "report.html").read_text().lower().startswith("<!doctype html>")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small models, their data, and labels that are the first model's answers."""
    folder = tmp_path_factory.mktemp("auto")
    random = np.random.default_rng(0)
    x = random.standard_normal((32, 6)).astype(np.float32)
    for name in ("net", "other"):
        w, v = (random.standard_normal(shape).astype(np.float32) for shape in ((6, 8), (8, 3)))
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
            helper.make_node("Relu", ["h"], ["r"], "relu"),
            helper.make_node("MatMul", ["r", "v"], ["y"], "second"),
        ]
        ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", k])] for n, k in (("x", 6), ("y", 3))]
        weights = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(v, "v")]
        graph = helper.make_graph(nodes, "net", *ends, weights)
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / f"{name}.onnx"
        )
        if name == "net":
            np.save(folder / "labels.npy", (np.maximum(x @ w, 0) @ v).argmax(1))
    np.savez(folder / "data.npz", x=x)
    np.savez(folder / "more.npz", x=x * 2)
    return folder


def constant(session: Any) -> float:
    """A metric that does not look at the model."""
    return 0.5


def not_a_number(session: Any) -> float:
    return float("nan")


def right(session: Any) -> float:
    """The share of answers that are the first model's: higher is better."""
    random = np.random.default_rng(0)
    x, w, v = (random.standard_normal(shape).astype(np.float32) for shape in ((32, 6), (6, 8), (8, 3)))
    return float(np.mean(session.run(None, {"x": x})[0].argmax(1) == (np.maximum(x @ w, 0) @ v).argmax(1)))


def lost(session: Any) -> float:
    """The share of wrong answers, which is to be small."""
    return 1.0 - right(session)


def auto(files: Path, out: Path, *options: object, model: str = "net", data: str = "data") -> object:
    return run(
        "auto", files / f"{model}.onnx", "--data", files / f"{data}.npz", "--out", out, "--batch-size", 8,
        "--deadline", 0, *options,
    )  # fmt: skip


def test_the_best_model_is_on_disk_and_every_trial_was_told(saved: Path, tmp_path: Path) -> None:
    found = auto(saved, tmp_path, "--json", tmp_path / "result.json")
    assert found.exit_code == 0, found.output
    assert "trial w8a8-fast" in found.output and "the deadline ended the search" in found.output
    assert "0 s are less than one trial takes" in " ".join(found.output.split())
    assert f"the best one: {tmp_path / 'trials' / 'w8a8-fast'}" in found.output
    assert (tmp_path / "trials/w8a8-fast/model.onnx").is_file() and (tmp_path / "report.html").is_file()
    assert json.loads((tmp_path / "result.json").read_text())["best"]["name"] == "w8a8-fast"
    again = auto(saved, tmp_path)
    assert again.exit_code == 0 and "w8a8-fast" in again.output


@pytest.mark.parametrize("metric", [("agreement",), ("accuracy", "--labels"), ("kl",)], ids=lambda m: m[0])
def test_metrics_by_name(metric: tuple[str, ...], saved: Path, tmp_path: Path) -> None:
    labels = [saved / "labels.npy"] if metric[1:] else []
    found = auto(saved, tmp_path, "--metric", *metric, *labels, "--allowed-drop", 0.9)
    assert found.exit_code == 0, found.output
    kept = json.loads((tmp_path / "trials/w8a8-fast/trial.json").read_text())
    assert kept["metric"] is not None and kept["share"] == 1


def test_nothing_good_enough_says_what_comes_closest(saved: Path, tmp_path: Path) -> None:
    found = auto(saved, tmp_path, "--min-sqnr", 90)
    assert found.exit_code == 1 and "the float model is what remains" in found.output
    assert "w8a8-fast comes closest" in found.output


def test_a_folder_of_something_else_is_refused_and_both_remedies_work(saved: Path, tmp_path: Path) -> None:
    assert auto(saved, tmp_path / "a").exit_code == 0
    for options, problem in (
        ({"data": "more"}, "a search with another data"),
        ({"model": "other"}, "a search with another model"),
    ):
        found = auto(saved, tmp_path / "a", **options)
        assert found.exit_code == 2 and problem in " ".join(found.output.split())
        assert "name an empty folder" in " ".join(found.output.split())
        assert auto(saved, tmp_path / options.popitem()[1], **options).exit_code == 0
    assert auto(saved, tmp_path / "a").exit_code == 0


@pytest.mark.parametrize(
    "options, problem",
    [
        (("--allowed-drop", "0.01"), "there is no metric that could drop"),
        (("--metric", "accuracy"), "no labels are given"),
        (("--metric", "acuracy"), "there is no metric 'acuracy' (did you mean 'accuracy'?)"),
        (("--metric", "no_such_module:f"), "it cannot be imported"),
        (("--metric", "agreement", "--lower-is-better"), "the direction of 'agreement' is known"),
        (("--metric", "agreement", "--allowed-drop", "some"), "'some' is not a list of numbers"),
        (("--cost", "ms"), "milliseconds are wanted and times is None"),
        (("--cost", "size"), "there is no cost 'size'"),
        (("--cost", "ms", "--times", "no_such.json"), "the file cannot be read"),
        (("--metric", "tests.test_cli:constant"), "it is 0.5 for outputs that are mostly noise"),
        (("--metric", "tests.test_cli:not_a_number"), "of the float model it is NaN"),
        (("--metric", "tests.test_cli:lost"), "and higher is better"),
        (("--metric", "tests.test_cli:right", "--lower-is-better"), "and lower is better"),
        (("--deadline", "-1"), "-1.0 is not a time"),
        (("--deadline", "nan"), "nan is not a time"),
    ],
    ids=[
        "drop",
        "labels",
        "name",
        "module",
        "direction",
        "number",
        "no times",
        "cost",
        "no file of times",
        "constant metric",
        "metric not a number",
        "an error as the metric",
        "a score as an error",
        "negative deadline",
        "deadline not a number",
    ],
)
def test_what_auto_cannot_answer_is_refused(options, problem, saved, tmp_path):
    found = auto(saved, tmp_path, *options)
    assert found.exit_code == 2 and problem in " ".join(found.output.split())


def test_strip_gives_a_float_file_with_the_values_of_the_codes(folder: Path, tmp_path: Path) -> None:
    import onnxruntime as ort

    quantized, stripped = next(p for p in folder.glob("*.onnx") if "float" not in p.name), tmp_path / "float.onnx"
    done = run("strip", quantized, "--out", stripped)
    assert done.exit_code == 0 and "quantizers taken out, 4 of constants" in done.output
    assert {node.op_type for node in onnx.load(stripped).graph.node} == {"Conv", "Relu", "Reshape", "Gemm"}
    before, after = ort.InferenceSession(next(folder.glob("*float*.onnx"))), ort.InferenceSession(stripped)
    feeds = {i.name: np.random.default_rng(0).normal(size=(2, 1, 4, 4)).astype(np.float32) for i in before.get_inputs()}
    wanted, found = before.run(None, feeds)[0], after.run(None, feeds)[0]
    assert np.abs(wanted - found).max() < 0.05 * np.abs(wanted).max()
    again = run("strip", stripped, "--out", tmp_path / "again.onnx")
    assert again.exit_code == 2 and "it has no quantizers" in again.output and not (tmp_path / "again.onnx").exists()
