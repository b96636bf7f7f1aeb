"""The sections about AIMET's names on the page about AIMET, from the tables that the packages read.

``python docs/site/aimet_names.py`` writes them into docs/aimet.md.
"""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

FIRST, AFTER = "## All names: PyTorch\n", "## Measured against AIMET 2.42\n"
PAGE = Path(__file__).parent.parent / "aimet.md"
_TITLES = {"aimet_torch": "PyTorch", "aimet_onnx": "ONNX"}


def aimet_sections() -> str:
    """Markdown: what is here and how it differs, what is not here and what to call instead, and how many names are which."""
    from bitwright.aimet_common.names import ABSENT, differences

    parts = []
    for package, title in _TITLES.items():
        parts += [f"## All names: {title}\n"]
        if package == "aimet_torch":
            parts += [
                'Paths are below `bitwright.`; "same" means the same arguments and the same meaning.\n'
            ]
        rows = [row for row in differences() if row.package == package]
        parts += ["| AIMET | status | difference |", "|---|---|---|"]
        parts += [
            f"| {row.names} | {row.status} | {row.difference} |".replace("|  |", "| |")
            for row in rows
        ]
        parts += [""]
    parts += [
        "## Names without a counterpart\n",
        "Importing or reading one raises an error with the text of its row.\n",
    ]
    by_reason: dict[str, list[str]] = {}
    for name, reason in ABSENT.items():
        by_reason.setdefault(reason, []).append(name)
    parts += ["| AIMET | instead |", "|---|---|"]
    parts += [f"| {_joined(names)} | {reason} |" for reason, names in by_reason.items()]
    here, absent = counts()
    parts += ["", "## Every public name\n"]
    parts += [
        f"AIMET 2.42 has {here.total() + absent.total()} classes and functions without a leading underscore. {here.total()} are"
        f" here under the same path. The other {absent.total()} are mostly parts that AIMET's own code calls; they raise an"
        " `ImportError` that says what to call instead. Modules of which nothing is here are one row.\n",
        "| modules | here | not here |",
        "|---|---|---|",
        *(f"| `{group}` | {here[group]} | {absent[group]} |" for group in sorted(here)),
        f"| others | 0 | {sum(absent[group] for group in absent.keys() - here.keys())} |",
        "",
        "",
    ]
    return "\n".join(parts)


def _joined(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def counts() -> tuple[Counter[str], Counter[str]]:
    """By package and the module below it: how many of AIMET's names are here, and how many raise an error."""
    from bitwright.aimet_common.names import names

    here: Counter[str] = Counter()
    absent: Counter[str] = Counter()
    for module, several in names().items():
        group = ".".join(module.split(".")[:2])
        for name in several:
            (here if is_here(module, name) else absent)[group] += 1
    return here, absent


def is_here(module: str, name: str) -> bool:
    """Whether ``from bitwright.<module> import <name>`` works; the error of one that does not is an ImportError."""
    try:
        getattr(importlib.import_module(f"bitwright.{module}"), name)
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(
        text[: text.index(FIRST)] + aimet_sections() + text[text.index(AFTER) :], "utf-8"
    )
