"""Scripts that use AIMET, rewritten: their imports, and what the reader should know."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from bitwright.aimet_common.names import differences
from bitwright.cli import app
from bitwright.errors import ConfigError
from bitwright.migrate import migrate, migrate_file


@pytest.mark.parametrize(
    "before, after",
    [
        ("import aimet_torch", "from bitwright import aimet_torch"),
        ("import aimet_torch as at", "import bitwright.aimet_torch as at"),
        ("import aimet_torch.quantsim", "import bitwright.aimet_torch.quantsim; from bitwright import aimet_torch"),
        ("import os, aimet_torch as at", "import os; import bitwright.aimet_torch as at"),
        ("from aimet_common.defs import QuantScheme", "from bitwright.aimet_common.defs import QuantScheme"),
        (
            "def f():\n    from aimet_torch.seq_mse import (\n        apply_seq_mse,  # ü\n    )\n    return 1",
            "def f():\n    from bitwright.aimet_torch.seq_mse import (\n        apply_seq_mse,  # ü\n    )\n    return 1",
        ),
        ("x = 'ä'; import aimet_torch  # why", "x = 'ä'; from bitwright import aimet_torch  # why"),
        ("import torch\nfrom .aimet_torch import x\n", "import torch\nfrom .aimet_torch import x\n"),
    ],
)
def test_imports_are_rewritten_and_nothing_else(before, after):
    assert migrate(before).source == after


def test_what_is_missing_and_what_differs_is_listed_by_line():
    found = migrate(
        "import aimet_torch\n"
        "from aimet_torch.winnow import ReShape\n"
        "from aimet_torch.batch_norm_fold import fold_all_batch_norms, fold_all_batch_norms_to_scale\n"
        "aimet_torch.nn.QuantizedLinear(1, 1)\n"
        "aimet_torch.nn.QuantizedNonsense\n"
        "sim.export('.', 'x', export_to_torchscript=True)\n"
    )
    assert [(f.line, f.name) for f in found.missing] == [
        (2, "aimet_torch.winnow.ReShape"),
        (5, "aimet_torch.nn.QuantizedNonsense"),
    ]
    assert {(f.line, f.name) for f in found.findings if not f.missing} == {(6, "export"), (6, "export_to_torchscript")}


@pytest.mark.parametrize("package", ["aimet_torch", "aimet_onnx"])
def test_each_difference_is_named_at_its_line(package):
    notes = {name: note for row in differences() if row.package == package for name, note in row.at.items()}
    script = f"import {package}\n" + "".join(f"{package}.some.{name}\n" for name in notes)
    found = {(f.line, f.name): f.note for f in migrate(script).findings if not f.missing}
    assert found == {(line, name): notes[name] for line, name in enumerate(notes, 2)}


def test_text_that_is_no_python_is_refused():
    with pytest.raises(ConfigError, match="line 1: it is not Python"):
        migrate("import aimet_torch as")


def test_command_writes_the_script_and_answers_with_its_exit_code(tmp_path):
    script = tmp_path / "ptq.py"
    script.write_text("from aimet_torch.quantsim import QuantizationSimModel\n")
    result = CliRunner().invoke(app, ["migrate", str(script)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "ptq_bitwright.py").read_text().startswith("from bitwright.aimet_torch.quantsim import")
    script.write_text("from aimet_torch.winnow import ReShape\n")
    result = CliRunner().invoke(app, ["migrate", str(script), "--output", str(tmp_path / "new.py")])
    assert result.exit_code == 1 and "no counterpart" in result.output
    assert (tmp_path / "new.py").exists()
    assert CliRunner().invoke(app, ["migrate", str(tmp_path / "nothing.py")]).exit_code == 2


@pytest.mark.parametrize(
    "before, after",
    [
        (b"import aimet_torch as a\r\nx = 1\r\n", b"import bitwright.aimet_torch as a\r\nx = 1\r\n"),
        (
            b"# coding: latin-1\nimport aimet_torch as a  # caf\xe9\n",
            b"# coding: latin-1\nimport bitwright.aimet_torch as a  # caf\xe9\n",
        ),
        (b"\xef\xbb\xbfimport aimet_torch as a\n", b"\xef\xbb\xbfimport bitwright.aimet_torch as a\n"),
        (b"x = 1\x0c\nimport aimet_torch as a", b"x = 1\x0c\nimport bitwright.aimet_torch as a"),
        (b"from\taimet_torch import nn", b"from\tbitwright.aimet_torch import nn"),
        (
            b"%matplotlib inline\nfor _ in x:\n    !ls\nimport aimet_torch as a\nf = !ls\na?\n",
            b"%matplotlib inline\nfor _ in x:\n    !ls\nimport bitwright.aimet_torch as a\nf = !ls\na?\n",
        ),
    ],
    ids=["crlf", "latin-1", "byte order mark", "form feed", "tab", "IPython"],
)
def test_bytes_of_a_script_change_in_its_imports_alone(before, after):
    assert migrate_file(before)[0] == after


def test_text_in_another_encoding_than_it_says_is_refused():
    with pytest.raises(ConfigError, match=r"cannot be decoded.*coding: latin-1"):
        migrate_file(b"# caf\xe9\nimport aimet_torch\n")


def test_notebook_is_rewritten_cell_by_cell():
    def code(source):
        return {"cell_type": "code", "source": source, "outputs": [{"text": "kept"}], "metadata": {}}

    cells = [
        {"cell_type": "markdown", "source": ["import aimet_torch"], "metadata": {}},
        code(["%matplotlib inline\n", "from aimet_torch.quantsim import QuantizationSimModel\n", "!pip list"]),
        code("%%bash\nimport aimet_torch"),
        code("%%time\nfrom aimet_torch.winnow import ReShape"),
    ]
    notebook = {"cells": cells, "metadata": {"ü": 1}, "nbformat": 4, "nbformat_minor": 5}
    content, found = migrate_file(json.dumps(notebook).encode(), "a.ipynb")
    new = json.loads(content)
    expected = [dict(cell) for cell in cells]
    expected[1]["source"] = [
        "%matplotlib inline\n", "from bitwright.aimet_torch.quantsim import QuantizationSimModel\n", "!pip list",
    ]  # fmt: skip
    expected[3]["source"] = "%%time\nfrom bitwright.aimet_torch.winnow import ReShape"
    assert new == notebook | {"cells": expected}
    assert found.changed == 2 and [f.where for f in found.missing] == ["cell 3:2"]
    with pytest.raises(ConfigError, match=r"not a notebook: UnicodeEncodeError.*format 4"):
        migrate_file(b'{"cells": [{"cell_type": "code", "source": "a = \'\\ud800\'"}]}', "a.ipynb")
    with pytest.raises(ConfigError, match=r"not a notebook: TypeError.*format 4"):
        migrate_file(b'{"cells": [{"cell_type": "code", "source": ["import torch", []]}]}', "a.ipynb")
    with pytest.raises(ConfigError, match=r"not a notebook.*format 4"):
        migrate_file(b"[]", "a.ipynb")


def test_names_of_modules_in_texts_are_listed():
    (finding,) = migrate('m = importlib.import_module("aimet_torch.quantsim"); print("aimet_torch is")').findings
    assert "write 'bitwright.aimet_torch.quantsim'" in finding.note and not finding.missing


def test_what_has_another_owner_is_no_difference():
    found = migrate(
        "import torch\nimport torch.onnx as to\n"
        "from aimet_torch.quantsim import QuantizationSimModel as Q\n"
        "class Writer:\n    def export(self): ...\n"
        "w = Writer()\nself.writer = Writer()\n"
        "torch.onnx.export(model, x, 'f.onnx')\nto.export(model, x)\ntorch.export.export(model, (x,))\n"
        "w.export()\nself.writer.export()\nw.export = print\nrun(export=True)\n"
        "sim = Q(model, x)\nself.sim = Q(model, x)\n"
        "sim.onnx.export(x, 'f.onnx')\n"
        "sim.export('.', 'x', x)\nself.sim.export('.', 'x', x)\n"
        "def save(sim2, w2):\n    sim2.export('.', 'x', x)\n"
    )
    assert [(f.line, f.name) for f in found.findings] == [(n, "export") for n in (17, 18, 19, 21)]
    assert "opset is 21" in found.findings[0].note and "no .pth" in found.findings[1].note


def test_notes_are_those_of_the_front_end():
    (finding,) = migrate("import aimet_onnx\nsim.export('.', 'x')").findings
    assert finding.note == "the QDQ model is written too, as <prefix>_qdq.onnx"
    (finding,) = migrate(
        "import aimet_torch\nfrom aimet_onnx.quantsim import QuantizationSimModel\n"
        "sim = QuantizationSimModel(m)\nsim.export('.', 'x')"
    ).findings
    assert finding.note == "the QDQ model is written too, as <prefix>_qdq.onnx"


def test_import_that_may_fail_is_not_missing():
    found = migrate(
        "try:\n    from aimet_torch.v1.quantsim import QuantizationSimModel\n"
        "except (ImportError, KeyError):\n    from aimet_torch.quantsim import QuantizationSimModel\n"
        "try:\n    import aimet_torch.winnow\nexcept KeyError:\n    pass\n"
    )
    assert [(f.line, f.missing) for f in found.findings] == [(2, False), (6, True)]
    assert "except clause" in found.findings[0].note


def test_model_that_an_export_does_not_pickle_is_named_where_it_is_loaded():
    found = migrate(
        "from aimet_torch.quantsim import QuantizationSimModel\n"
        "sim = QuantizationSimModel(model, x)\n"
        "sim.export('out', 'm', x)\n"
        "again = torch.load('out/m.pth')\n"
        "weights = torch.load('resnet.pth')\n"
    )
    (finding,) = [f for f in found.findings if f.name.endswith(".pth")]
    assert finding.line == 4 and "torch.save(sim.get_original_model(sim.model), path)" in finding.note


def test_note_of_the_other_package_is_not_given_where_the_package_is_known():
    found = migrate(
        "from aimet_onnx.llm_topology import analyze_llm_topology\nfrom aimet_torch.utils import analyze_llm_topology\n"
    )
    assert [(f.line, f.missing) for f in found.findings] == [(1, False), (2, True)]


def test_a_script_that_is_nested_too_deeply_is_refused():
    with pytest.raises(ConfigError, match="a.py, line 1: it is not Python: it is nested too deeply"):
        migrate_file(b"a = " + b"-" * 100_000 + b"1", "a.py")
