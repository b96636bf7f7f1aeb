"""Traits of operators: every operator is answered for, and no second table says what a trait says."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_args

import pytest

from bitwright.core.graph.operators import OPS, TRAITS, WITHOUT, Trait

ROOT = Path(__file__).parents[3] / "bitwright"
#: facts of a runtime, of a file format or of AIMET, which may be those of the model by chance
ELSEWHERE = (
    *("runtimes", "aimet_torch", "aimet_onnx", "export/litert"),
    *("core/placement/aimet_config.py", "onnx/simulation/calibrator.py"),
)
FILES = [
    p
    for p in sorted(ROOT.rglob("*.py"))
    if p.name not in ("operators.py",) and not str(p.relative_to(ROOT)).startswith(ELSEWHERE)
]


def unanswered() -> set[str]:
    """Operators of the op table with no trait, that nobody said is without."""
    return OPS.keys() - {op for ops in TRAITS.values() for op in ops} - WITHOUT


def test_every_operator_is_answered_for() -> None:
    missing = unanswered()
    assert not missing, f"give {sorted(missing)} their traits in core/graph/operators.py, or name them in WITHOUT"


def test_an_operator_that_is_not_answered_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "Asinh", OPS["Relu"])
    assert unanswered() == {"Asinh"}


def test_traits_name_operators_of_the_op_table_once() -> None:
    assert TRAITS.keys() == set(get_args(Trait))
    for trait, ops in TRAITS.items():
        assert len(set(ops)) == len(ops) > 1, trait
        assert OPS.keys() >= set(ops), trait
        assert not WITHOUT.intersection(ops), trait
    assert OPS.keys() >= WITHOUT


def copies(source: str) -> list[str]:
    """Tables of ``source`` that list the operators of a trait, or of three and more with others beside them."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for part in ast.walk(node.value):
                names: set[Any] = set()
                if isinstance(part, (ast.Tuple, ast.List, ast.Set)):
                    names = {e.value if isinstance(e, ast.Constant) else None for e in part.elts}
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    names = set(part.value.split())
                found += [
                    f"line {part.lineno}: {trait}"
                    for trait, ops in TRAITS.items()
                    if names == set(ops) or (len(ops) > 2 and names >= set(ops))
                ]
    return found


def test_no_other_table_repeats_a_trait() -> None:
    for path in FILES:
        assert not copies(path.read_text(encoding="utf-8")), path.relative_to(ROOT)


def test_a_table_that_repeats_a_trait_is_seen() -> None:
    assert copies('_FUSED = frozenset(("Clip", "Relu"))') == ["line 1: clamp"]
    assert not copies('_FUSED = ("Clip", "Relu", "Tanh")')
    assert copies('_BODIES = "If Loop Scan Call".split()') == ["line 1: bodies"]
    assert not copies('_BODIES = (*TRAITS["bodies"], "Call")')
