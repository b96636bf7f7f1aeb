"""The table of variants that are slow tests: each exists, and none is all that is left of its test."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE: dict[str, list[str]] = json.loads((ROOT / "tests/support/long_variants.json").read_text())
LOG = """
1.00s call     tests/a.py::test_x[one]
0.20s setup    tests/a.py::test_x[two words]
0.70s call     tests/a.py::test_x[two words]
3.00s call     tests/b/c.py::test_y
"""


def test_all_of_a_test_is_added_up_and_its_quickest_variant_stays() -> None:
    spec = importlib.util.spec_from_file_location("test_time", ROOT / "tools/test_time.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    seconds = tool.times(LOG)
    assert seconds["tests/a.py::test_x[two words]"] == pytest.approx(0.9)
    assert tool.by_folder(seconds) == pytest.approx({"tests/b": 3.0, "tests": 1.9})
    assert tool.long_variants(seconds, 0.5) == {"tests/a.py::test_x": ["one"]}


@pytest.mark.slow
def test_long_variants_exist_and_leave_a_quick_one() -> None:
    files = sorted({test.partition("::")[0] for test in TABLE})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = defaultdict(set)
    for line in run.stdout.splitlines():
        if line.endswith("]"):
            test, _, variant = line[:-1].partition("[")
            found[test].add(variant)
    for test, variants in TABLE.items():
        assert set(variants) < found[test], f"{test}: choose anew, with tools/test_time.py"
