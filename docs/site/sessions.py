"""Interpreter sessions as code that can be copied: prompts removed, short outputs as comments."""

from __future__ import annotations

import re

#: outputs of more lines than this follow the code as a block of their own
MOST_COMMENTED = 4
_DIRECTIVE = re.compile(r" *# doctest: \+.*$", re.MULTILINE)
_COMPOUND = re.compile(r"(class|def|with|for|try|if|while|@)\b")


def without_prompts(source: str) -> list[tuple[str, str]]:
    """The session ``source`` as ``(language, text)`` blocks in reading order.

    >>> without_prompts(">>> a = 1\\n>>> a + 1\\n2\\n")
    [('python', 'a = 1\\na + 1\\n# 2')]
    """
    blocks: list[tuple[str, str]] = []
    code: list[str] = []
    for is_code, lines in _runs(source):
        if is_code:
            code += lines
        elif len(lines) <= MOST_COMMENTED:
            code += [f"# {line}" if line else "#" for line in lines]
        else:
            blocks += [("python", "\n".join(code)), ("text", "\n".join(lines))]
            code = []
    return [*blocks, ("python", "\n".join(code))] if code else blocks


def _runs(source: str) -> list[tuple[bool, list[str]]]:
    """Consecutive lines of code and of output; the blank lines around an output are dropped."""
    runs: list[tuple[bool, list[str]]] = []
    opened = ""  # first line of the latest statement
    for line in _DIRECTIVE.sub("", source).splitlines():
        is_code = line.startswith((">>>", "..."))
        if is_code and line == "..." and runs and not runs[-1][0]:
            is_code = False  # an ellipsis that stands for lines of output
        if not runs or runs[-1][0] != is_code:
            runs.append((is_code, []))
        if (
            line.startswith(">>>")
            and runs[-1][1]
            and runs[-1][1][-1].startswith(" ")
            and _COMPOUND.match(opened)
        ):
            runs[-1][1].append("")
        opened = line[4:] if line.startswith(">>>") else opened
        runs[-1][1].append(line[4:] if is_code else line)
    kept = []
    for is_code, lines in runs:
        text = "\n".join(lines).strip("\n")
        if text.strip() and (is_code or text.strip() != "..."):
            kept.append((is_code, text.split("\n")))
    return kept
