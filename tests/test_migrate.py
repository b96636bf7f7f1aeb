"""Scripts that use AIMET, rewritten: their imports, and what the reader should know."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bitwright.cli import app
from bitwright.errors import ConfigError
from bitwright.migrate import migrate


@pytest.mark.parametrize(
    "before, after",
    [
        ("import aimet_torch", "from bitwright import aimet_torch"),
        ("import aimet_torch as at", "import bitwright.aimet_torch as at"),
        (
            "import aimet_torch.quantsim",
            "import bitwright.aimet_torch.quantsim; from bitwright import aimet_torch",
        ),
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
        "from aimet_torch.compress import ModelCompressor\n"
        "from aimet_torch.batch_norm_fold import fold_all_batch_norms, fold_all_batch_norms_to_scale\n"
        "aimet_torch.nn.QuantizedLinear(1, 1)\n"
        "aimet_torch.nn.QuantizedNonsense\n"
        "sim.export('.', 'x', export_to_torchscript=True)\n"
    )
    assert [(f.line, f.name) for f in found.missing] == [
        (2, "aimet_torch.compress.ModelCompressor"),
        (3, "aimet_torch.batch_norm_fold.fold_all_batch_norms_to_scale"),
        (5, "aimet_torch.nn.QuantizedNonsense"),
    ]
    assert {(f.line, f.name) for f in found.findings if not f.missing} == {
        (6, "export"),
        (6, "export_to_torchscript"),
    }


def test_text_that_is_no_python_is_refused():
    with pytest.raises(ConfigError, match="line 1: it is no Python"):
        migrate("import aimet_torch as")


def test_command_writes_the_script_and_answers_with_its_exit_code(tmp_path):
    script = tmp_path / "ptq.py"
    script.write_text("from aimet_torch.quantsim import QuantizationSimModel\n")
    result = CliRunner().invoke(app, ["migrate", str(script)])
    assert result.exit_code == 0, result.output
    assert (
        (tmp_path / "ptq_bitwright.py").read_text().startswith("from bitwright.aimet_torch.quantsim import")
    )
    script.write_text("from aimet_torch.peft import PeftQuantUtils\n")
    result = CliRunner().invoke(app, ["migrate", str(script), "--output", str(tmp_path / "new.py")])
    assert result.exit_code == 1 and "no counterpart" in result.output
    assert (tmp_path / "new.py").exists()
    assert CliRunner().invoke(app, ["migrate", str(tmp_path / "nothing.py")]).exit_code == 2
