"""What the docstrings of this code base write in reStructuredText, as the Markdown that the site renders."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|data|mod|attr|exc):`~?([^`]+)`")
_ROW = re.compile(r"^(\s+)(\*{0,2}\w+(?:, \*{0,2}\w+)+)(?: \([^)]*\))?: (.*)$")
without_prompts = runpy.run_path(str(Path(__file__).parent / "sessions.py"))["without_prompts"]


class MarkdownDocstrings(griffe.Extension):
    """Converts every docstring before its sections are read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """``text`` with roles as code, sessions and simple tables as blocks of code, and a row for every argument.

    >>> print(as_markdown("See :func:`~a.b.c`."))
    See `a.b.c`.
    """
    text = _ROLE.sub(r"`\1`", text)
    lines = _examples_outdented(_rows_apart(text.splitlines()))
    out: list[str] = []
    while lines:
        indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
        end = next((i for i, line in enumerate(lines) if not line.strip()), len(lines))
        block = [line.removeprefix(indent) for line in lines[:end]]
        if block and block[0].startswith(">>> "):
            shown = without_prompts("\n".join(block))
        elif block and re.fullmatch(r"=+( +=+)+", block[0]):
            shown = [("text", "\n".join(block))]
        else:
            out.append(lines.pop(0))
            continue
        for language, code in shown:
            out += ["", *(indent + line for line in [f"```{language}", *code.split("\n"), "```"])]
        del lines[:end]
    return "\n".join(out)


def _examples_outdented(lines: list[str]) -> list[str]:
    """Sections "Example:" as a heading and paragraphs, which griffe would show as they are written."""
    out: list[str] = []
    base: str | None = None
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        if line.strip() in ("Example:", "Examples:"):
            base = indent
            out += [f"{indent}**{line.strip(' :')}**", ""]
            continue
        if base is not None and line.strip() and not line.startswith(f"{base}    "):
            base = None
        out.append(line if base is None or not line.strip() else base + line[len(base) + 4 :])
    return out


def _rows_apart(lines: list[str]) -> list[str]:
    """Rows of "Args:" and "Attributes:" that describe several names, as one row for each name."""
    out: list[str] = []
    inside = ""
    i = 0
    while i < len(lines):
        line = lines[i]
        i += 1
        if line.strip() in ("Args:", "Attributes:"):
            inside = line[: len(line) - len(line.lstrip())] + "    "
        elif line.strip() and inside and not line.startswith(inside):
            inside = ""
        row = _ROW.match(line)
        if not (inside and row and row[1] == inside):
            out.append(line)
            continue
        more = []
        while i < len(lines) and lines[i].startswith(inside + " "):
            more.append(lines[i])
            i += 1
        for name in row[2].split(", "):
            out += [f"{inside}{name}: {row[3]}", *more]
    return out
