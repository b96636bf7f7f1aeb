"""Tables whose rows other packages add to: by entry points, which load when their name is asked for, or by :func:`register`.

An entry point of the group ``bitwright.<kind>`` names a row, as ``"percentile99"`` of ``range_methods``; what it refers to is the
row, or a function that returns it. A table with a broken entry point works for all other names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from bitwright.errors import ConfigError, checks_arguments, close_matches

Row = TypeVar("Row")
Checked = Callable[[str, Any], Row]
"""(name, what was registered) -> the row; raises :class:`~bitwright.errors.ConfigError` where it is none."""


@lru_cache(maxsize=64)
def _points_of(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Entry points of a group, kept for the folders of ``path``: to read those of all packages takes 50 ms."""
    return tuple(entry_points(group=group))


class Registry(dict[str, Row]):
    """Rows by name.

    Args:
        kind: of the rows; the group of entry points is ``bitwright.<kind>``.
        rows: those of this package.
        checked: see :data:`Checked`.
    """

    def __init__(self, kind: str, rows: dict[str, Row], checked: Checked[Row]) -> None:
        super().__init__(rows)
        self.kind, self._checked = kind, checked
        self.own = frozenset(rows)

    def add(self, name: str, row: Any) -> None:
        """Add a row.

        Raises:
            ConfigError: it is no row of this kind, or this package has one of that name.
        """
        if name in self.own:
            problem = f"{self.kind} of this package has a row of that name"
            raise ConfigError(f"plug-in {name!r}", problem, "give it another name")
        dict.__setitem__(self, name, self._checked(name, row))

    def _points(self) -> dict[str, EntryPoint]:
        """Entry points whose rows are not loaded."""
        points = _points_of(f"bitwright.{self.kind}", tuple(sys.path))
        return {p.name: p for p in points if not dict.__contains__(self, p.name)}

    def _load(self, name: object) -> bool:
        point = self._points().get(name) if isinstance(name, str) else None
        if point is None:
            return False
        try:
            found = point.load()
        except Exception as error:  # whatever another package raises when it is imported
            problem = f"{point.value} cannot be loaded: {type(error).__name__}: {error}"
            raise ConfigError(f"plug-in {name!r} of {self.kind}", problem, "repair or remove the package") from error
        self.add(point.name, found)
        return True

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name) or self._load(name)

    def __missing__(self, name: str) -> Row:
        if self._load(name):
            return dict.__getitem__(self, name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """The names of all rows, loaded or not."""
        yield from (*dict.__iter__(self), *self._points())


@checks_arguments
def register(kind: str, name: str, row: Any = None) -> Any:
    """Add a row to a table of this process; without ``row`` it is a decorator.

    Args:
        kind: ``range_methods``, ``steps``, ``formats``, ``operators``, ``targets``, ``files``, ``runtimes``, ``metrics`` or
            ``channel_rules``.
        name: what options take.
        row: see ``docs/plugins.md`` for each kind. Worker processes load rows by entry points only.

    Raises:
        ConfigError: there is no such kind, the row is not of it, or this package has one of that name.
    """
    table = table_of(kind)
    if row is not None:
        table.add(name, row)
        return row

    def decorated(made: Any) -> Any:
        table.add(name, made)
        return made

    return decorated


#: kind -> module and name of its table
_TABLES = {
    "range_methods": ("bitwright.core.numerics.ranges", "RANGE_METHODS"),
    "formats": ("bitwright.core.numerics.formats", "FLOAT_FORMATS"),
    "steps": ("bitwright.recipes.recipe", "KINDS"),
    "operators": ("bitwright.core.graph.operators", "OPS"),
    "targets": ("bitwright.export.targets", "TARGETS"),
    "files": ("bitwright.llm.files.table", "FILE_FORMATS"),
    "runtimes": ("bitwright.runtimes.adapters", "RUNTIMES"),
    "metrics": ("bitwright.metrics.metric", "NAMED"),
    "channel_rules": ("bitwright.compression.rules", "CHANNEL_RULES"),
}
KINDS = tuple(_TABLES)


def table_of(kind: str) -> Registry[Any]:
    """The table of a kind.

    Raises:
        ConfigError: there is none, with the kinds.
    """
    from importlib import import_module

    if kind not in _TABLES:
        raise ConfigError(
            "plug-in", f"{kind!r} is no kind of plug-in{close_matches(kind, KINDS)}", f"use {', '.join(KINDS)}"
        )
    module, name = _TABLES[kind]
    found: Registry[Any] = getattr(import_module(module), name)
    return found


def rows_of(table: Registry[Row]) -> list[tuple[str, Row]]:
    """All rows; loads the packages that add some."""
    return [(name, table[name]) for name in table]


__all__ = ["KINDS", "Registry", "register", "rows_of", "table_of"]
