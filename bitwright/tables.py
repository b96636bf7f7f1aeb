"""Tables for terminals and notebooks: plain text, and HTML without styles or scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_MOST_ROWS = 1000  # a notebook keeps its outputs in its file


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]], widest: int = 48) -> str:
    """Left-aligned columns, separated by two spaces; the last column may be of any length.

    Args:
        head: titles of the columns.
        rows: cells, as many as ``head`` has.
        widest: where a cell is longer than this, its own row alone is wider.

    >>> print(text_table(("site", "note"), [("a", "b"), ("conv", "")]))
    site  note
    ----------
    a     b
    conv
    """
    cells = [tuple(head), *map(tuple, rows)]
    widths = [min(widest, max(len(row[i]) for row in cells)) for i in range(len(head) - 1)]
    lines = [
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * max(len(lines[0]), sum(widths) + 2 * len(widths)), *lines[1:]])


def html_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", notes: Iterable[str] = ()
) -> str:
    """A table for ``_repr_html_``: every cell escaped, 1,000 rows at most.

    >>> html_table(("site",), [("<b>",)], notes=["1 row"])
    '<table><thead><tr><th>site</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table><p>1 row</p>'
    """
    rows, notes = list(rows), list(notes)
    if len(rows) > _MOST_ROWS:
        notes.insert(0, f"and {len(rows) - _MOST_ROWS} more rows; print it to see them all")
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    heading = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows[:_MOST_ROWS]
    )
    table = f"<table>{caption}<thead><tr>{heading}</tr></thead><tbody>{body}</tbody></table>"
    return table + "".join(f"<p>{escape(note)}</p>" for note in notes)


def html_text(text: str) -> str:
    """Lines of a report for ``_repr_html_``, escaped and as they stand.

    >>> html_text("a < b")
    '<pre>a &lt; b</pre>'
    """
    return f"<pre>{escape(text)}</pre>"
