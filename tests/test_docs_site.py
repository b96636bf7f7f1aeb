"""The documentation site: strict links, a reference of every public name, and nothing loaded from other hosts."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.sources import load_script

ROOT = Path(__file__).parents[1]
#: what a browser loads without being asked: not the links that a reader may follow
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|object|embed)\b[^>]*?\b(?:src|href|data)=\"?(?:https?:)?//[^\s>]*"
)
LOADED_BY_STYLE = re.compile(r"(?:@import\s+[\"']?|url\([\"']?)(?:https?:)?//[^\s)]*")


def load(path: str) -> ModuleType:
    return load_script(ROOT / path)


hooks = load("docs/site/hooks.py")
CODE_PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(path for folder in ("docs", "docs/decisions") for path in (ROOT / folder).glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]


@pytest.mark.parametrize("package", ["bitwright", "bitwright.torch", "bitwright.onnx"])
def test_the_reference_has_every_public_name(package):
    module = importlib.import_module(package)
    names = hooks.public_names(package)
    assert names.keys() == set(module.__all__) - {"__version__"}
    for name, home in names.items():
        assert getattr(importlib.import_module(home), name) is getattr(module, name)
        assert f"::: {home}.{name}\n" in hooks.reference_page(package)


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("export.md", "[a](onnx.md#data)", "[a](onnx.md#data)"),
        ("decisions/0005-x.md", "[a](../rules.md)", "[a](../rules.md)"),
        ("rounding.md", "[table](../benchmarks/results/awq.md)", "[table](benchmarks/results/awq.md)"),
        ("benchmarks/results/awq.md", "[a](../../docs/rounding.md)", "[a](../../rounding.md)"),
        ("quickstart.md", "[examples/qat.py](../examples/qat.py)", "`examples/qat.py`"),
        ("quickstart.md", "[an example](../examples/qat.py)", "an example (`examples/qat.py`)"),
        ("index.md", "[a](https://onnx.ai) `[x](y.py)`", "[a](https://onnx.ai) `[x](y.py)`"),
    ],
)  # fmt: skip
def test_links_that_leave_the_documentation(source, link, expected):
    page = type("Page", (), {"file": type("File", (), {"src_uri": source})})
    assert hooks.on_page_markdown(link, page, None, None) == expected


@pytest.mark.parametrize(
    ("session", "blocks"),
    [
        (">>> a = 1\n>>> a\n1\n", [("python", "a = 1\na\n# 1")]),
        (">>> if a:\n...     a\n>>> b\n", [("python", "if a:\n    a\n\nb")]),
        (">>> f(\n...     1)\n>>> b\n\n", [("python", "f(\n    1)\nb")]),
        (">>> t\n1\n2\n3\n4\n5\n>>> b\n", [("python", "t"), ("text", "1\n2\n3\n4\n5"), ("python", "b")]),
        (">>> t\n...\n", [("python", "t")]),
        (">>> t  # doctest: +SKIP\n1\n", [("python", "t\n# 1")]),
    ],
)
def test_sessions_are_shown_as_code_that_can_be_copied(session, blocks):
    assert hooks.without_prompts(session) == blocks


def test_the_reference_lists_each_name_once():
    for package in hooks.PACKAGES:
        entries = re.findall(r"^::: \S+\.(\w+)$", hooks.reference_page(package), re.MULTILINE)
        assert sorted(entries) == sorted(hooks.public_names(package))
    names = [name for names in hooks.SECTIONS.values() for name in names]
    assert len(names) == len(set(names))
    known = {name for package in hooks.PACKAGES for name in hooks.public_names(package)}
    assert not set(names) - known


def test_arguments_described_together_have_a_row_each():
    pytest.importorskip("griffe", reason="the extra 'docs' is not installed; make docs installs it")
    text = "Does it.\n\nArgs:\n    a, b: two widths,\n        in bits.\n    c: another.\n\nSee x, y: both.\n"
    shown = load("docs/site/docstrings.py").as_markdown(text)
    assert "    a: two widths,\n        in bits.\n    b: two widths,\n        in bits.\n    c: another." in shown
    assert "See x, y: both." in shown


def test_examples_of_docstrings_are_code():
    pytest.importorskip("griffe", reason="the extra 'docs' is not installed; make docs installs it")
    text = "Does it.\n\nRaises:\n    E: no.\n\nExample:\n    >>> f(1)\n    2\n\nMore.\n"
    shown = load("docs/site/docstrings.py").as_markdown(text)
    assert "    E: no.\n\n**Example**\n\n\n```python\nf(1)\n# 2\n```\n\nMore." in shown


def test_the_page_about_aimet_has_what_the_tables_of_names_say():
    aimet = load("docs/site/aimet_names.py")
    page = aimet.PAGE.read_text("utf-8")
    written = page[page.index(aimet.FIRST) : page.index(aimet.AFTER)]
    assert written == aimet.aimet_sections(), "run: python docs/site/aimet_names.py"


def test_the_command_line_page_has_every_command_and_option():
    import typer

    from bitwright.cli import app

    page = load("docs/site/command_line.py").command_line_page()
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    waiting = [("bitwright", typer.main.get_command(app))]
    seen = 0
    for name, command in waiting:
        waiting += [(f"{name} {child}", command.commands[child]) for child in getattr(command, "commands", {})]
        for param in command.params:
            shown = param.opts if param.param_type_name == "option" else [(param.metavar or param.name).upper()]
            assert all(f"`{option}`" in sections[name] for option in shown), (name, shown)
            seen += 1
    assert len(waiting) == len(sections) > 12 and seen > 80


@pytest.mark.parametrize("path", CODE_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_is_no_wider_than_its_block(path):
    shown = hooks._SESSION.sub(hooks.copyable, path.read_text())
    blocks = re.findall(r"^```\w*\n(.*?)^```$", shown, re.MULTILINE | re.DOTALL)
    assert not [line for text in blocks for line in text.splitlines() if len(line) > 100]


def test_what_a_page_would_load_is_seen():
    for loaded in ('<script src="https://a.b/c.js">', "<link rel=x href=//a.b/c.css>", '<img src="http://a.b/c.png">'):
        assert LOADED.search(loaded)
    assert not LOADED.search('<a href="https://a.b/c">') and not LOADED.search('<script src="assets/c.js">')
    assert LOADED_BY_STYLE.search("@import 'https://a.b'") and LOADED_BY_STYLE.search("url(//a.b/c.woff)")


@pytest.mark.slow
def test_the_site_builds_with_strict_links_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed; make docs installs it")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    pages, styles = (sorted((tmp_path / "site").rglob(pattern)) for pattern in ("*.html", "*.css"))
    assert len(pages) > 40 and styles
    assert not {page.name: found for page in pages if (found := LOADED.findall(page.read_text()))}
    assert not {style.name: found for style in styles if (found := LOADED_BY_STYLE.findall(style.read_text()))}
    raw = {page.name for page in pages if "&gt;&gt;&gt; " in (text := page.read_text()) or "```" in text}
    assert not raw  # prompts, and fences that were not parsed
    assert 'id="bitwright.torch' in (tmp_path / "site/reference/bitwright.torch.html").read_text()
    assert (tmp_path / "site/search/search_index.json").stat().st_size > 100_000


def test_the_package_page_has_no_link_into_the_checkout():
    page = load("setup.py").package_page((ROOT / "README.md").read_text())
    assert "`docs/install.md`" in page
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", page)
