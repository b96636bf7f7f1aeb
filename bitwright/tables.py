"""Reports as text for terminals, as HTML for notebooks, and as plain data for programs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum
from html import escape
from typing import Any, ClassVar

from bitwright.errors import ConfigError

_MOST_ROWS = 1000  # a notebook keeps its outputs in its file


@dataclasses.dataclass(frozen=True)
class Table:
    """A table in the style of all reports and commands: columns two spaces apart, a line below the heads.

    ``str`` aligns the text itself, because rich takes 200 times as long (two seconds for 2,000 rows). In a terminal rich prints
    the table in the same style and folds cells that do not fit.

    Attributes:
        head: titles of the columns.
        rows: cells, as many as ``head`` has.
        title: a line above.
        right: columns of numbers, aligned at the right.
        widest: a cell that is longer than this widens its own row only.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    right: Sequence[int] = ()
    widest: int = 48

    def __str__(self) -> str:
        cells = [tuple(self.head), *map(tuple, self.rows)]
        last = len(self.head) - 1
        widths = [min(self.widest, max(len(row[i]) for row in cells)) for i in range(len(self.head))]
        if last not in self.right:
            widths[last] = 0  # the last column may be of any length
        lines = [
            "  ".join(
                cell.rjust(width) if i in self.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        line = "-" * max(len(lines[0]), sum(widths) + 2 * last)
        return "\n".join([*([self.title] if self.title else []), lines[0], line, *lines[1:]])

    def __rich__(self) -> Any:
        from rich.box import Box
        from rich.table import Table as RichTable
        from rich.text import Text

        line = Box("    \n    \n -- \n    \n    \n    \n    \n    \n")
        made = RichTable(
            title=Text(self.title) if self.title else None, title_justify="left", title_style="bold", box=line,
            show_edge=False, pad_edge=False, padding=(0, 2, 0, 0),
        )  # fmt: skip
        for i, name in enumerate(self.head):
            made.add_column(Text(name), no_wrap=i == 0, overflow="fold", justify="right" if i in self.right else "left")
        for row in self.rows:
            made.add_row(*map(Text, row))
        return made


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """The text of a :class:`Table`.

    >>> print(text_table(("site", "note"), [("a", "b"), ("conv", "")]))
    site  note
    ----------
    a     b
    conv
    """
    return str(Table(head, list(rows), right=right))


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
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows[:_MOST_ROWS])
    table = f"<table>{caption}<thead><tr>{heading}</tr></thead><tbody>{body}</tbody></table>"
    return table + "".join(f"<p>{escape(note)}</p>" for note in notes)


def html_text(text: str) -> str:
    """Preformatted, escaped text for ``_repr_html_``.

    >>> html_text("a < b")
    '<pre>a &lt; b</pre>'
    """
    return f"<pre>{escape(text)}</pre>"


class Tabular:
    """Base class of reports: plain data, JSON, a pandas table, and a view for notebooks.

    A subclass names the attribute that holds its rows in :attr:`_rows`, and properties that its data contain beside its fields
    in :attr:`_also`. :attr:`_digits` limits the significant digits of its numbers.
    """

    _rows: ClassVar[str] = ""
    _also: ClassVar[tuple[str, ...]] = ()
    _digits: ClassVar[int | None] = None

    def to_dict(self) -> dict[str, Any]:
        """The report as mappings, lists, strings and numbers; non-finite numbers are strings."""
        found: dict[str, Any] = plain(self, self._digits)
        return found

    def to_json(self, indent: int | None = 1) -> str:
        """The report as JSON text; infinities are the strings ``"inf"`` and ``"-inf"``."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)

    def records(self) -> list[dict[str, Any]]:
        """One mapping per row."""
        rows = getattr(self, self._rows)
        items = ({"name": key, "value": value} for key, value in rows.items()) if isinstance(rows, Mapping) else rows
        return [row if isinstance(row := plain(item, self._digits), dict) else {"row": row} for item in items]

    def to_pandas(self) -> Any:
        """The rows as a ``pandas.DataFrame``.

        Raises:
            ConfigError: pandas is not installed.
        """
        return data_frame(self.records())

    def _repr_html_(self) -> str:
        return html_text(str(self))


def data_frame(records: list[dict[str, Any]]) -> Any:
    """Rows as a ``pandas.DataFrame``.

    Raises:
        ConfigError: pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        remedy = "pip install pandas, or use to_dict() or records(), which need no package"
        raise ConfigError("to_pandas", "the package pandas is not installed", remedy) from error
    return pandas.DataFrame(records)


def plain(tree: Any, digits: int | None = None) -> Any:
    """Convert ``tree`` to what JSON can hold, without recursion; objects of other types become strings.

    Keys become strings; dataclasses become mappings of the fields that their ``repr`` shows and of the properties in
    ``_also``, or strings where their class sets ``_as_text``; arrays become lists; non-finite numbers become strings, and other
    floats are rounded to ``digits`` significant digits if given.

    >>> plain({"a": (1, float("inf")), 2: {"c"}})
    {'a': [1, 'inf'], '2': ['c']}
    >>> plain([1 / 3, 1e-9 / 3], 3)
    [0.333, 3.33e-10]
    """
    root: list[Any] = [None]
    stack: list[tuple[Any, Any, Any]] = [(root, 0, tree)]
    while stack:
        target, key, value = stack.pop()
        parts = _parts(value)
        if isinstance(parts, dict):
            target[key] = dict.fromkeys(parts)
        elif isinstance(parts, list):
            target[key] = [None] * len(parts)
        else:
            target[key] = float(f"{parts:.{digits}g}") if digits and isinstance(parts, float) else parts
            continue
        children = parts.items() if isinstance(parts, dict) else enumerate(parts)
        stack.extend((target[key], k, child) for k, child in children)
    return root[0]


def _parts(value: Any) -> Any:
    """Convert one level of :func:`plain`: a mapping, a list, or a scalar."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if getattr(type(value), "_as_text", False):
        return str(value)
    if _has_fields(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): child for key, child in value.items()}
    if isinstance(value, Set):
        return sorted(value, key=str)
    if isinstance(value, list | tuple):
        return list(value)
    # arrays, tensors and their scalars of whatever package
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _has_fields(value: Any) -> bool:
    return isinstance(value, Tabular) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _fields(value: Any) -> dict[str, Any]:
    told = {name: getattr(value, name) for name in getattr(type(value), "_also", ())}
    if not dataclasses.is_dataclass(value):
        return told
    shown = (f.name for f in dataclasses.fields(value) if f.repr and not f.name.startswith("_"))
    return {**told, **{name: getattr(value, name) for name in shown}}


def counted(number: int, one: str, more: str = "") -> str:
    """``1 zero``, ``3 zeros``."""
    return f"{number} {one if number == 1 else more or f'{one}s'}"
