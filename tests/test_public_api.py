"""The public names are exactly the published list, and each of them loads."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import bitwright
import bitwright.core
import bitwright.methods
from tests.support.signatures import PINNED, Signature, found, signature
from tests.support.sources import statements

PUBLIC = {
    "__version__", "quantize", "analyze", "mixed_precision", "measure_times", "auto_quantize", "drift", "LayerOutputUtil",
    "compress", "model_costs", "register", "quantize_pipeline", "PipelineResult", "generate_data", "GeneratedData",
    "set_precisions", "PrecisionRequest",
    "QuantSpec", "RangeMethod", "Preset", "PRESETS", "Rule",
    "IntFormat", "FloatFormat", "PerTensor", "PerChannel", "PerBlock", "PerGate", "PerToken",
    "BitwrightError", "BusyError", "CalibrationError", "ConfigError", "EncodingsError", "ExportError", "FormatError",
    "GranularityError", "ModelError", "RangeError", "UnknownArgumentError", "UnknownAttributeError",
}  # fmt: skip


def test_dir_is_exactly_the_published_list():
    assert set(dir(bitwright)) == PUBLIC == set(bitwright.__all__)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_loads(name):
    value = getattr(bitwright, name)
    assert getattr(value, "__name__", name) == name, "a public name is the name of the thing itself"


def test_star_import_brings_the_published_list():
    namespace: dict[str, object] = {}
    exec("from bitwright import *", namespace)
    assert namespace.keys() - {"__builtins__"} == PUBLIC


def test_every_error_class_is_public():
    from bitwright import errors

    classes = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert classes <= PUBLIC


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'bitwright' has no attribute 'quantise'"):
        bitwright.quantise  # noqa: B018


def test_modules_of_the_package_load_at_first_use():
    """``import bitwright`` is enough for ``bitwright.llm.quantize``, and loads no framework before."""
    names = ("llm.quantize", "torch.QuantizationSimModel", "onnx.QuantizationSimModel", "compression", "testing.check")
    names += ("metrics", "aimet_torch.quantsim", "aimet_onnx.quantsim")
    program = "import sys, bitwright; assert 'torch' not in sys.modules; " + "; ".join(f"bitwright.{n}" for n in names)
    subprocess.run([sys.executable, "-c", program], check=True)


def test_unknown_name_gets_the_close_match():
    """Python proposes the close match from ``dir()`` when the error reaches the user."""
    run = subprocess.run([sys.executable, "-c", "import bitwright; bitwright.quantise"], capture_output=True, text=True)
    assert "Did you mean: 'quantize'?" in run.stderr


# A parameter of this kind takes what one of the other kinds takes, and more.
_WIDER = {"KEYWORD_ONLY": {"POSITIONAL_OR_KEYWORD"}, "POSITIONAL_ONLY": {"POSITIONAL_OR_KEYWORD"}}


def refused_calls(pinned: Signature, now: Signature) -> list[str]:
    """Calls that ``pinned`` allows and ``now`` does not, or understands otherwise."""
    at = {name: (place, kind, default) for place, (name, kind, default) in enumerate(now)}
    found = []
    for place, (name, kind, default) in enumerate(pinned):
        new_place, new_kind, new_default = at.get(name, (-1, "", ""))
        if new_kind != kind and new_kind not in _WIDER.get(kind, ()):
            found.append(f"{name} is {new_kind or 'gone'}, was {kind}")
        elif kind.startswith("POSITIONAL") and new_place != place:
            found.append(f"{name} is argument {new_place}, was {place}")
        elif default not in ("", new_default):  # a default where there was none forbids nothing
            found.append(f"{name} is {new_default} by default, was {default}")
    known = {name for name, _, _ in pinned}
    required = [n for n, kind, default in now if n not in known and not default and "VAR" not in kind]
    return found + [f"{name} is new and must be given" for name in required]


# ONNX models know their shapes: these functions take the example input (after the folded pairs) where a module's shapes stand.
# `test_positional_calls_of_onnx_models_are_understood` makes the calls.
_ONE_PLACE_EARLIER = {
    f"bitwright.onnx.{name}" for name in ("equalize_model", "fold_all_batch_norms", "fold_norms", "rotate_model")
}
# `inputs` was the second argument of these: `test_batches_of_onnx_models_may_be_named_inputs` makes the calls.
_ANOTHER_NAME = {"bitwright.onnx.apply_gptq", "bitwright.onnx.apply_reconstruction"}
# Public in both front ends, and not one thing.
_TWO = {"QuantizationSimModel"}


def test_front_ends_publish_the_same_functions() -> None:
    import bitwright.onnx
    import bitwright.torch

    both = set(bitwright.torch.__all__) & set(bitwright.onnx.__all__)
    assert {n for n in both if getattr(bitwright.torch, n) is not getattr(bitwright.onnx, n)} == _TWO


def test_every_call_of_a_public_name_is_still_understood() -> None:
    pinned, now = json.loads(PINNED.read_text()), found()
    missing = pinned.keys() - now.keys()
    assert not missing, f"public names went away: {sorted(missing)}"
    changed = {
        name: refused_calls(pinned[name], now[name]) for name in pinned.keys() - _ONE_PLACE_EARLIER - _ANOTHER_NAME
    }
    assert not {name: lines for name, lines in changed.items() if lines}


def test_every_public_name_is_pinned() -> None:
    missing = found().keys() - json.loads(PINNED.read_text()).keys()
    assert not missing, f"run python -m tests.support.signatures: it writes {sorted(missing)}"


@pytest.mark.parametrize(
    "pinned, now, line",
    [
        ("a, b", "b, a", "a is argument 1, was 0"),
        ("a, *, b=1", "a, *, b=2", "b is 2 by default, was 1"),
        ("a", "a, b", "b is new and must be given"),
        ("a, b=1", "a, *, b=1", "b is KEYWORD_ONLY, was POSITIONAL_OR_KEYWORD"),
        ("a, b=1", "a", "b is gone, was POSITIONAL_OR_KEYWORD"),
    ],
)
def test_a_changed_signature_is_seen(pinned: str, now: str, line: str) -> None:
    old, new = (signature(eval(f"lambda {parameters}: None")) for parameters in (pinned, now))
    assert line in refused_calls(old, new)
    assert not refused_calls(old, old)


def test_a_name_whose_package_is_missing_says_which_extra_brings_it() -> None:
    code = """
import sys
sys.modules.update(torch=None, onnx=None)
import bitwright, bitwright.torch, bitwright.onnx
for load in (
    lambda: bitwright.quantize, lambda: bitwright.torch.QuantizationSimModel, lambda: bitwright.onnx.QuantizationSimModel
):
    try:
        load()
    except ModuleNotFoundError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.partition(" needs ")[0] for line in run.stdout.splitlines()] == [
        "bitwright.quantize", "bitwright.torch.QuantizationSimModel", "bitwright.onnx.QuantizationSimModel",
    ]  # fmt: skip
    for line in run.stdout.splitlines():
        assert re.search(r"needs (torch|onnx), which is not installed; remedy: pip install 'bitwright\[\1\]'$", line), (
            line
        )


@pytest.mark.parametrize("package", ["bitwright.torch", "bitwright.onnx"])
def test_front_ends_publish_names_that_load(package: str) -> None:
    """And none that is also a module of the package, which would stand in its place once imported."""
    module = importlib.import_module(package)
    modules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    assert not modules & set(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(dir(module)) == set(module.__all__)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'equalise_model'"):
        module.equalise_model  # noqa: B018


ROOT = Path(__file__).parents[1]
ENTRY = re.compile(r"^    ((?:\*{0,2}\w+, )*\w+): ", re.MULTILINE)


def documented(cls: ast.ClassDef) -> set[str]:
    """Names under ``Attributes:`` in the docstring of ``cls``."""
    section = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", ast.get_docstring(cls) or "", re.MULTILINE)
    return {name for match in ENTRY.findall(section[1]) for name in match.split(", ")} if section else set()


def members(cls: ast.ClassDef) -> set[str]:
    """Fields, methods and what methods assign on ``self``."""
    own = {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    own |= {n.name for n in cls.body if isinstance(n, ast.FunctionDef)}
    return own | {
        n.attr
        for n in ast.walk(cls)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    }


def undocumented_by(tree: ast.Module) -> list[str]:
    classes = [node for node in statements(tree) if isinstance(node, ast.ClassDef) and not node.bases]
    return [f"{c.name}.{name}" for c in classes if (named := documented(c)) for name in sorted(named - members(c))]


def test_every_documented_field_exists() -> None:
    paths = sorted((ROOT / "bitwright").rglob("*.py"))
    assert ROOT / "bitwright" / "__init__.py" in paths
    for path in paths:
        assert not undocumented_by(ast.parse(path.read_text())), path.relative_to(ROOT)


def test_a_field_that_is_not_there_is_seen() -> None:
    source = 'class Op:\n    """An op.\n\n    Attributes:\n        a, b: two.\n        c: one.\n    """\n    a: int\n    b: int\n'
    assert undocumented_by(ast.parse(source)) == ["Op.c"]


@pytest.mark.parametrize(
    ("package", "collect"),
    [
        (bitwright.core, {"Event", "CalibrationLog"}),
        (
            bitwright.methods,
            {
                *(
                    "AwqReport",
                    "BiasReport",
                    "EqualizeReport",
                    "NormReport",
                    "RotateReport",
                    "TransformReport",
                    "SmoothReport",
                ),
                *("Costs", "LayerProblem", "Run", "_Component"),
            },
        ),
    ],
)
def test_data_classes_are_frozen_but_those_that_collect(package: ModuleType, collect: set[str]) -> None:
    """Decisions are values: two parts may share one, and it may be a key."""
    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    classes = {
        each
        for module in modules
        for each in vars(importlib.import_module(module.name)).values()
        if isinstance(each, type) and dataclasses.is_dataclass(each) and each.__module__ == module.name
    }
    assert len(classes) > 40
    assert {each.__name__ for each in classes if not each.__dataclass_params__.frozen} == collect
