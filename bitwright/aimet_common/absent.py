"""Names of AIMET that these packages lack, and what to use instead.

One table for all of it: module ``__getattr__`` functions, placeholder modules and ``bitwright migrate`` read it.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_LATER = "it is not in this version of Bitwright"
_TABLE = json.loads(Path(__file__).with_name("absent.json").read_text("utf-8"))

#: dotted name below ``bitwright`` (a module, or a name in one) -> what to do instead
ABSENT: dict[str, str] = {name: why for why, several in _TABLE["absent"].items() for name in several.split()}
#: dotted prefix of AIMET's own parts, which documented scripts do not call -> the call that does their work; a name of
#: ``names.json`` that is not here gets that of its longest prefix
INSTEAD: dict[str, str] = {prefix: call for call, several in _TABLE["calls"].items() for prefix in several.split()}


def absence(name: str) -> str | None:
    """Why ``name`` (dotted, below ``bitwright``) is not there, by its own entry or that of a package above it."""
    while name:
        if name in ABSENT:
            return ABSENT[name]
        name = name.rpartition(".")[0]
    return None


@dataclass(frozen=True)
class Difference:
    """A row of the table of AIMET's documented names.

    Attributes:
        package: ``"aimet_torch"`` or ``"aimet_onnx"``.
        names: calls, as Markdown.
        status: ``"same"``, or what else they are.
        difference: what is different about them here, as Markdown.
        at: name that a script reads or calls -> the difference in short.
    """

    package: str
    names: str
    status: str
    difference: str
    at: Mapping[str, str]


def differences() -> tuple[Difference, ...]:
    """Differences from AIMET 2.42: the rows of ``differences.json``."""
    rows = json.loads(Path(__file__).with_name("differences.json").read_text("utf-8"))
    return tuple(Difference(**row) for row in rows)


@functools.cache
def names() -> dict[str, tuple[str, ...]]:
    """AIMET 2.42's public modules, dotted below ``bitwright``, and the public classes and functions of each."""
    table = json.loads(Path(__file__).with_name("names.json").read_text("utf-8"))
    return {module: tuple(line.split()) for module, line in table.items()}


@functools.cache
def packages() -> frozenset[str]:
    """AIMET 2.42's public modules and the packages above them, dotted below ``bitwright``."""
    return frozenset(module.rsplit(".", depth)[0] for module in names() for depth in range(module.count(".") + 1))


def reason(name: str) -> str | None:
    """Why a name of AIMET (a module, or a name in one; dotted, below ``bitwright``) is not here, and what to call instead.

    ``None`` for what AIMET does not have either. Whether the name is here is not looked up.

    Example:
        >>> reason("aimet_torch.adaround.AdaroundWrapper")
        'it is a part of AIMET that scripts do not call; call apply_adaround(sim, ...)'
        >>> reason("aimet_torch.nonsense") is None
        True
    """
    known = absence(name)
    module, _, last = name.rpartition(".")
    if known is not None or not (name in packages() or last in names().get(module, ())):
        return known
    while name not in INSTEAD:
        name = name.rpartition(".")[0]
    return f"it is a part of AIMET that scripts do not call; {INSTEAD[name]}"


def refuse(module: str) -> NoReturn:
    """Fail the import of a module that has no counterpart.

    Raises:
        ImportError: with what to do instead.
    """
    name = module.removeprefix("bitwright.")
    raise ImportError(f"{name} has no counterpart here: {reason(name) or _LATER}", name=module)


def absent_names(module: str) -> Callable[[str], Any]:
    """A module ``__getattr__`` that says where AIMET's names went.

    It raises ImportError for names of the table (Python hides the message of an AttributeError in
    ``from module import name``) and AttributeError for all others.
    """

    def missing(name: str) -> Any:
        here = module.removeprefix("bitwright.")
        full = f"{here}.{name}"
        told = full in ABSENT or name in names().get(here, ())  # submodules refuse for themselves
        why = reason(full) if told else None
        if why is not None:
            raise ImportError(f"{full} has no counterpart here: {why}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


def absent_attribute(owner: str, name: str) -> AttributeError:
    """The error for an attribute that an object of AIMET's class ``owner`` (dotted) has and ours has not."""
    why = ABSENT.get(f"{owner}.{name}")
    kind = owner.rpartition(".")[2]
    return AttributeError(f"{kind!r} object has no attribute {name!r}" + (f": {why}" if why else ""))


class DifferenceWarning(UserWarning):
    """Something is understood, and means less or something else than in AIMET."""


def differs(what: str, here: str) -> None:
    """Warn of a difference of meaning; Python's default filter shows each place of a script once."""
    warnings.warn(f"{what}: {here}", DifferenceWarning, stacklevel=3)
