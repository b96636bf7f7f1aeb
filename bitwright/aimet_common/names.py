"""Names of AIMET: the module paths without a file of their own, and what these packages lack, with what to use instead.

One table lists what is absent: module ``__getattr__`` functions, placeholder modules and ``bitwright migrate`` read it.

AIMET keeps older paths of its modules (``aimet_torch.v2.quantsim``), and each package has its copy of what both share
(``aimet_torch.common.defs``). A path of the table of modules is imported as a module whose names are those of its home. Modules
that have no counterpart here raise an ImportError that says so.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
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


_ROOT = "bitwright."

#: package below ``bitwright`` -> the package whose modules it has as well
PREFIXES: dict[str, str] = {
    "aimet_torch.v2": "aimet_torch",
    "aimet_torch.common": "aimet_common",
    "aimet_onnx.common": "aimet_common",
}

#: module below ``bitwright`` -> its home, dotted below ``bitwright``; "" for a package that holds modules only
ALIASES: dict[str, str] = json.loads(Path(__file__).with_name("modules.json").read_text("utf-8"))


def home_of(name: str) -> str | None:
    """The home of a module path, both dotted below ``bitwright``; "" for a package of modules, ``None`` for none.

    Example:
        >>> home_of("aimet_torch.v2.quantsim.config_utils"), home_of("aimet_torch.v2.meta.connectedgraph")
        ('aimet_torch.quantsim', 'aimet_torch.float_methods')
        >>> home_of("aimet_torch.adaround"), home_of("aimet_torch.quantsim")
        ('aimet_torch.rounding', None)
    """
    if name in ALIASES:
        return ALIASES[name]
    for package, home in PREFIXES.items():
        if name == package:
            return home
        if name.startswith(f"{package}."):
            there = home + name.removeprefix(package)
            return ALIASES.get(there, there)
    return None


def _public_names(module: str) -> Sequence[str]:
    """``__all__`` of a module, or the public names that it defines."""
    names = importlib.import_module(module)
    own = [n for n, v in vars(names).items() if getattr(v, "__module__", None) == module and n[0] != "_"]
    return getattr(names, "__all__", own)


def _by_its_package(name: str) -> str:
    """A module path, dotted below ``bitwright``, in the package that has its module: prefixes are replaced."""
    for package, real in PREFIXES.items():
        if name.startswith(f"{package}."):
            name = real + name.removeprefix(package)
    return name


def names_below(path: str, home: str | None = None) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module ``path``: the names of ``home``, its submodules of the table, and those that are absent.

    Args:
        path: the module that gets the function.
        home: the module whose names it has; ``None`` for one with names of its own.
    """
    name_of = _by_its_package(path.removeprefix(_ROOT))
    missing = absent_names(_ROOT + name_of)

    def found(name: str) -> Any:
        if name == "__all__" and home is not None:
            return _public_names(home)
        if name.startswith("__"):
            raise AttributeError(name)
        there = None if home is None else importlib.import_module(home)
        if hasattr(there, name) and f"{name_of}.{name}" not in ABSENT:
            return getattr(there, name)
        below = f"{path}.{name}"
        if home_of(below.removeprefix(_ROOT)) is not None and _FINDER.find_spec(below) is not None:
            return importlib.import_module(below)
        return missing(name)

    return found


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # what is above it is no package
        return False


class _Aliases(MetaPathFinder, Loader):
    """Finds what the tables name, where no file has the path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(_ROOT)
        if name == fullname or not name.startswith("aimet_"):
            return None
        home = home_of(name)
        module = _by_its_package(name)
        refused = home is None and (absence(module) is not None or module in packages())
        if not refused and (home is None or (home and not _exists(_ROOT + home))):
            return None
        return spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        home = home_of(module.__name__.removeprefix(_ROOT))
        if home is None:
            refuse(module.__name__)
        module.__doc__ = f"The names of ``{_ROOT}{home}``." if home else "A package of modules."
        module.__dict__["__getattr__"] = names_below(module.__name__, _ROOT + home if home else None)


_FINDER = _Aliases()


def install() -> None:
    """Let ``import`` find the paths of the tables; a second call does nothing."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
