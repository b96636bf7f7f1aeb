"""Every Python example of the documentation runs as printed."""

from __future__ import annotations

import ast
import doctest
import logging
import re
from pathlib import Path

import pytest

from bitwright.core.registry import KINDS, table_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = [
    *PAGES,
    *sorted((ROOT / "docs").glob("decisions/*.md")),
    *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)")


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_blocks(text: str) -> list[tuple[int, str]]:
    """``(line number, source)`` of every fenced ``python`` block."""
    return [(text.count("\n", 0, m.start(1)), m[1]) for m in BLOCK.finditer(text)]


def run_block(page: Path, line: int, source: str, namespace: dict[str, object]) -> None:
    """Run one block; one that shows a prompt is compared with the output it prints."""
    if ">>> " not in source:
        exec(compile("\n" * line + source, page_id(page), "exec"), namespace)
        return
    name = f"{page.name}:{line}"  # tracebacks look up source lines by it, also those of earlier blocks
    test = doctest.DocTestParser().get_doctest(source, namespace, name, page_id(page), line)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    runner.run(test, out=report.append, clear_globs=False)
    namespace.update(test.globs)
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p.read_text())], ids=page_id)
def test_examples_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for examples that start an interpreter
    namespace: dict[str, object] = {"__name__": page.stem}
    level = logging.getLogger("bitwright").level
    try:
        for line, source in python_blocks(page.read_text()):
            run_block(page, line, source, namespace)
    finally:  # rows that an example registers, and the level of the log that it sets, are of this process
        logging.getLogger("bitwright").setLevel(level)
        for table in map(table_of, KINDS):
            for name in [name for name in dict.__iter__(table) if name not in table.own]:
                del table[name]


@pytest.mark.parametrize("page", TEXTS, ids=page_id)
def test_links_lead_somewhere(page):
    missing = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert not missing


def test_a_failing_block_is_seen(tmp_path):
    page = ROOT / "README.md"
    with pytest.raises(ZeroDivisionError):
        run_block(page, 0, "1 / 0\n", {})
    with pytest.raises(AssertionError, match="Expected"):
        run_block(page, 0, ">>> 1 + 1\n3\n", {})


def strings_of_the_package() -> str:
    """Every literal string of the package, the fixed parts of f-strings among them."""
    found = []
    for path in (ROOT / "bitwright").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        found += [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n\n".join(found)


def test_messages_of_the_troubleshooting_page_are_those_of_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = [m[1] for m in re.finditer(r"^\| `([^`]+)`", page, re.MULTILINE)]
    known = strings_of_the_package()
    missing = [(m, part) for m in messages for part in m.split("…") if part.strip() and part.strip(" ,") not in known]
    assert len(messages) > 45 and not missing


@pytest.mark.parametrize("page", TEXTS, ids=page_id)
def test_files_of_the_repository_that_a_page_names_exist(page):
    named = set(re.findall(r"`((?:bitwright|tests|tools|examples|benchmarks)/[\w/.-]+)`", page.read_text()))
    assert not {name for name in named if not (ROOT / name).exists()}
