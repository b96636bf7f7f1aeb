"""Words that readers stumbled on: none in the documentation, and never more than today in a file of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: what is written instead is on docs/vocabulary.md
WORDS = re.compile(
    r"\b(?:behind|in force|mend(?:s|ed|ing)?|tak(?:e|es|en|ing)(?: \w+)? back|accus(?:e|es|ed|ing)|offen[cs]es?|idle"
    r"|begins no group|nobody|somebody"
    r"|(?<!\bthere )(?:is|are|was|were) no (?!longer|more|less|fewer|such|other|better|worse|faster|slower|wider)\w+)\b",
    re.IGNORECASE,
)
NAMES = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")
TEXTS = [
    *(ROOT / f"{name}.md" for name in NAMES),
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name != "vocabulary.md"),
]
CODE = sorted((ROOT / "bitwright").rglob("*.py"))
#: file -> how often the words stand in it; lower a number with every text that is rewritten, and never raise one
ALLOWED: dict[str, int] = json.loads((Path(__file__).parent / "support/words_allowed.json").read_text())
QUOTED = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_documentation_uses_the_vocabulary(path: Path) -> None:
    prose = QUOTED.sub(lambda quoted: "\n" * quoted[0].count("\n"), path.read_text())
    found = [f"line {prose.count(chr(10), 0, m.start()) + 1}: {m[0]}" for m in WORDS.finditer(prose)]
    assert not found, "docs/vocabulary.md has the words to use instead"


def test_code_gains_none_of_the_words() -> None:
    for path in CODE:
        found = WORDS.findall(" ".join(path.read_text().split()))
        allowed = ALLOWED.get(str(path.relative_to(ROOT)), 0)
        assert len(found) <= allowed, f"{path}: {found}; docs/vocabulary.md has the words to use instead"


def test_the_words_are_seen() -> None:
    seen = (
        "behind; in force; mended; taken back; takes it back; accused; offence; idle; begins no group; somebody; "
        "it is no float"
    )
    assert len(WORDS.findall(seen)) == 11
    assert not WORDS.findall(
        "amend, recommend, idleness, backward; there is no float; is no longer float; the answer is no."
    )
