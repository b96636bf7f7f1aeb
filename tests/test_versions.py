"""``tools/versions.py`` installs what pyproject.toml claims, at the versions that it claims."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def versions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import versions

    return versions


def test_the_oldest_set_has_a_version_for_everything_that_users_install(versions):
    wanted = versions.requirements(PROJECT)
    oldest = versions.lower_bounds(wanted)
    assert {"numpy==2.0", "torch==2.10", "onnx==1.23", "onnxruntime==1.31"} <= set(oldest)
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in oldest), oldest
    assert len({line.partition("==")[0] for line in oldest}) == len(oldest)


def test_every_python_that_is_claimed_is_run(versions):
    claimed = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if " :: 3." in c]
    assert [versions.Combination.parse(each).python for each in versions.COMBINATIONS] == claimed
    assert {versions.Combination.parse(each).libraries for each in versions.COMBINATIONS} == set(versions.SETS)


def test_a_combination_that_does_not_exist_is_refused(versions):
    with pytest.raises(argparse.ArgumentTypeError, match="'3.12:latest' is not a version and one of .*3.12:pinned"):
        versions.Combination.parse("3.12:latest")


def test_an_interpreter_that_does_not_exist_is_none(versions):
    assert versions.interpreter("3.99") is None


def test_what_is_run_exists(versions):
    assert all((ROOT / path).exists() for path in versions.TESTS)
