"""What the docstrings of this code base write in reStructuredText, as the Markdown that the site renders."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|data|mod|attr|exc):`~?([^`]+)`")


class MarkdownDocstrings(griffe.Extension):
    """Converts every docstring before its sections are read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """``text`` with roles as code, and sessions and simple tables as blocks of code.

    >>> print(as_markdown("See :func:`~a.b.c`."))
    See `a.b.c`.
    """
    lines: list[str] = []
    block = ""
    for line in _ROLE.sub(r"`\1`", text).splitlines():
        block = _block_after(line, block, lines)
        lines.append(line)
    return "\n".join([*lines, *(["```"] if block else [])])


def _block_after(line: str, block: str, lines: list[str]) -> str:
    """Open or close a block of code in front of ``line``; returns the kind that is open."""
    stripped = line.strip()
    if block and not stripped:
        lines.append(" " * _indent(lines[-1]) + "```")
        return ""
    kind = "python" if stripped.startswith(">>> ") else "text" if re.fullmatch(r"=+( +=+)+", stripped) else ""
    if kind and not block:
        lines.extend(["", " " * _indent(line) + f"```{kind}"])
        return kind
    return block


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
