"""Who may import whom, read from the source of every file; that importing stays light; what protocols ask."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import python
from tests.support.sources import statements

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "bitwright").rglob("*.py"))

# Part of the package -> (parts of it, outside packages) that its files may import, anywhere in the file.
# A new part needs a row. The standard library is free; a part may always import itself.
# "google" is protobuf, whose errors onnx raises.
NUMPY, ONNX = {"numpy"}, {"onnx", "onnx_ir", "onnxruntime", "onnxscript", "ml_dtypes", "google", "psutil"}
FILES_OUT = {"yaml", "safetensors", "rich"}
ANYTHING = NUMPY | ONNX | FILES_OUT | {"torch", "typer", "scipy", "ray"}
BELOW = {
    "errors", "core", "lazy", "progress", "tables", "metrics", "runtimes", "export", "compare", "methods", "recipes"
}  # fmt: skip
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "__init__": ({"lazy"}, set()),
    "__main__": ({"cli", "export", "interrupt", "terminal"}, set()),
    "errors": (set(), set()),
    "progress": (set(), {"rich"}),
    "tables": ({"errors"}, {"pandas", "rich"}),
    "lazy": (set(), set()),
    "interrupt": (set(), set()),
    "terminal": ({"tables"}, {"rich"}),
    "core": ({"errors", "tables"}, NUMPY),
    # how sure a difference is, is computed by scipy; objects of torchmetrics are given tensors
    "metrics": ({"errors", "core"}, NUMPY | {"scipy"}),
    "executors": ({"errors", "core", "tables"}, NUMPY),
    "runtimes": ({"errors", "tables", "core"}, NUMPY | ONNX | {"onnxruntime_qnn", "openvino", "ai_edge_litert"}),
    "export": ({"errors", "core", "progress", "runtimes", "tables"}, NUMPY | ONNX | FILES_OUT),
    "compare": ({"errors", "core", "executors", "export", "progress", "runtimes", "tables"}, NUMPY | ONNX | FILES_OUT),
    # `front_end` loads the front end of the model that it is given
    "methods": (BELOW - {"recipes"}, NUMPY),
    "recipes": (BELOW | {"report"}, NUMPY),
    "torch": (BELOW | {"report"}, NUMPY | ONNX | FILES_OUT | {"torch"}),
    "onnx": (BELOW | {"report"}, NUMPY | ONNX | FILES_OUT),
    # computes with the steps of either front end, which are torch functions
    "analysis": (BELOW | {"torch", "onnx", "report"}, NUMPY | FILES_OUT | {"torch", "scipy", "pandas"}),
    # an analysis, which writes reports itself, is made by its public name
    "report": ({"errors", "core", "export", "compare", "analyze", "onnx", "tables"}, NUMPY),
    "precision": (
        BELOW | {"analysis", "torch", "onnx", "report"},
        NUMPY | ONNX | FILES_OUT | {"torch", "scipy", "ray"},
    ),
    # makes models smaller of either front end, which `front_end` loads
    "compression": (BELOW | {"analysis", "interrupt", "precision", "torch", "onnx", "report"}, NUMPY | {"torch"}),
    # AIMET's names on the public API; nobody imports them
    "aimet_common": ({"errors", "core", "methods", "analysis", "precision", "report"}, NUMPY),
    "aimet_torch": (
        BELOW | {"analysis", "compression", "precision", "report", "torch", "aimet_common"},
        NUMPY | {"torch", "onnx", "safetensors"},
    ),
    "aimet_onnx": (BELOW | {"analysis", "precision", "onnx", "report", "aimet_common"}, NUMPY | ONNX),
    # conformance tests of plug-ins, which load what they test inside
    "testing": (BELOW, NUMPY),
    "migrate": ({"errors", "aimet_common"}, set()),
    # weights of simulated PyTorch models, and the files of engines
    "llm": (BELOW | {"__version__", "torch"}, NUMPY | FILES_OUT | {"torch", "transformers", "tokenizers"}),
    # simulated PyTorch models as models that hold codes
    "packed": (BELOW | {"llm", "torch"}, NUMPY | FILES_OUT | {"torch"}),
    "cli": (
        BELOW
        | {
            "executors",
            "interrupt",
            "terminal",
            "llm",
            "torch",
            "onnx",
            "analysis",
            "compression",
            "precision",
            "migrate",
            "report",
        },
        ANYTHING,
    ),
}
# Files and folders that may import more than their part. Inside their functions: configuration files may be YAML, and
# calibration data pictures; compiled loops are numba's where it is installed. Methods that learn weights, and estimates by
# gradients, are written in torch, which both front ends load when one of them is called.
EXTRA: dict[str, set[str]] = {
    "export/litert": {"ai_edge_litert", "flatbuffers"},
    "methods/rounding": {"torch"},
    "methods/batch_norm_pictures.py": {"torch"},
    "recipes/site_cost.py": {"torch"},
    "recipes/widen.py": {"torch"},
    "core/compiled/loops.py": {"numba"},
    "core/files.py": {"yaml"},
    "llm/decoder_export.py": {"onnx_ir"},
    "llm/openvino_export.py": {"openvino", "openvino_tokenizers"},
    "onnx/executorch.py": {"torch", "executorch"},
    "onnx/ncnn.py": {"ncnn"},
    "onnx/program.py": {"torch"},
    "onnx/to_torch.py": {"torch"},
    "onnx/model/data.py": {"PIL"},
}
# The command line answers `--help` at once: only these load with it, the rest inside the commands.
LIGHT_FOR_CLI = {
    "typer", "rich", "bitwright.cli", "bitwright.errors", "bitwright.interrupt", "bitwright.lazy", "bitwright.terminal",
}  # fmt: skip


def part_of(path: Path) -> str:
    """``core`` for ``bitwright/core/numerics/spec.py``, ``cli`` for ``bitwright/cli/app.py``."""
    return path.relative_to(ROOT / "bitwright").with_suffix("").parts[0]


def imported(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """``(line, dotted name)`` of every import below ``tree``; ``from a import b`` counts as ``a.b``."""
    package = path.relative_to(ROOT).parent.parts
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def breaches(path: Path, source: str) -> list[str]:
    """What ``path`` imports and may not, as readable lines."""
    here = part_of(path)
    parts, outside = ALLOWED[here]
    inner = path.relative_to(ROOT / "bitwright")
    outside = outside | EXTRA.get(inner.as_posix(), set()) | EXTRA.get(inner.parent.as_posix(), set())
    found = []
    for line, name in imported(path, ast.parse(source)):
        top, _, rest = name.partition(".")
        if top == "__future__" or top in sys.stdlib_module_names:
            continue
        ok = rest.split(".")[0] in parts | {here, "__version__"} if top == "bitwright" else top in outside
        if not ok:
            found.append(f"{path.relative_to(ROOT)}:{line} imports {name}; {here} may import {parts | outside}")
    return found


def test_import_directions():
    for path in FILES:
        assert part_of(path) in ALLOWED, f"{part_of(path)} is new: give it a row in ALLOWED"
    assert not [breach for path in FILES for breach in breaches(path, path.read_text())]


@pytest.mark.parametrize(
    "file, source",
    [
        pytest.param("core/x.py", "import torch", id="core-takes-torch"),
        pytest.param("core/x.py", "def f():\n    from torch import nn", id="core-takes-torch-in-a-function"),
        pytest.param("core/x.py", "from bitwright.torch import sim", id="core-takes-front-end"),
        pytest.param("core/x.py", "from ..torch import sim", id="core-takes-front-end-relatively"),
        pytest.param("torch/x.py", "from bitwright import onnx", id="torch-takes-onnx-front-end"),
        pytest.param("onnx/x.py", "import torch.nn", id="onnx-takes-torch"),
        pytest.param("torch/x.py", "from bitwright.aimet_torch import nn", id="torch-takes-aimet-names"),
        pytest.param("methods/x.py", "import bitwright.torch.sim", id="method-takes-front-end"),
        pytest.param("__init__.py", "import numpy", id="package-takes-numpy"),
    ],
)
def test_a_breach_is_seen(file, source):
    assert breaches(ROOT / "bitwright" / file, source)


def test_command_line_imports_heavy_modules_inside_its_commands():
    for path in (p for p in FILES if part_of(p) == "cli"):
        for node in ast.parse(path.read_text()).body:
            for line, name in imported(path, node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
                light = any(f"{name}.".startswith(f"{ok}.") for ok in LIGHT_FOR_CLI)
                top = name.partition(".")[0]
                assert light or top in sys.stdlib_module_names, f"{path.name}:{line} imports {name} at its top"


@pytest.mark.parametrize(
    "statement, kept_out",
    [
        ("import bitwright", {"numpy", "torch", "onnx", "onnxruntime", "rich"}),
        ("import bitwright; bitwright.ConfigError; dir(bitwright)", {"numpy", "torch", "onnx"}),
        ("import bitwright; bitwright.QuantSpec", {"torch", "onnx", "onnxruntime"}),
        ("import bitwright.export", {"torch", "onnx", "onnxruntime"}),
        ("import bitwright.onnx, bitwright.torch", {"numpy", "torch", "onnx", "onnxruntime", "rich"}),
        (
            "import torch; from bitwright.torch import QuantizationSimModel as Sim; x = torch.ones(1, 2); "
            "sim = Sim(torch.nn.Linear(2, 2), x); sim.compute_encodings([x], progress=False); sim.model(x)",
            {"torch._dynamo"},  # the compiler takes longer to load than the package
        ),
        (
            "import torch; from bitwright.torch import QuantizationSimModel as Sim, apply_gptq; x = torch.ones(4, 2, 8, 8)\n"
            "class Every(torch.nn.Module):\n  def forward(self, x): return x[:, :, ::2, ::2]\n"
            "sim = Sim(torch.nn.Sequential(torch.nn.Conv2d(2, 2, 1), Every(), torch.nn.Conv2d(2, 2, 1)), x)\n"
            "sim.compute_encodings([x], progress=False); apply_gptq(sim, [x], progress=False)",
            {"torch._dynamo"},  # indexing is watched for sizes that values decide
        ),
    ],
)
def test_importing_stays_light(statement, kept_out):
    code = f"import sys; {statement}; print(*{kept_out} & sys.modules.keys())"
    run = python("-c", code, cwd=ROOT)
    assert run.stdout.strip() == "", "these loaded although nobody used them"


def test_a_configuration_is_checked_without_torch_and_onnx():
    code = (
        "import atexit, sys; from bitwright.cli.app import main; sys.argv[1:] = ['check-config', 'htp_v73']\n"
        "loaded = lambda: {'torch', 'onnx', 'onnx_ir', 'onnxruntime'} & sys.modules.keys()\n"
        "atexit.register(lambda: print('loaded:', *loaded())); main()"
    )
    run = python("-c", code, cwd=ROOT)
    assert "per channel" in run.stdout and run.stdout.splitlines()[-1].strip() == "loaded:"
