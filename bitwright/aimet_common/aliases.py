"""The module paths of AIMET that have no file of their own: one table, and the finder that imports them.

AIMET keeps older paths of its modules (``aimet_torch.v2.quantsim``), and each package has its copy of what both share
(``aimet_torch.common.defs``). A path of the table is imported as a module whose names are those of its home. Modules that have
no counterpart here raise the ImportError of :mod:`bitwright.aimet_common.absent`.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from bitwright.aimet_common.absent import ABSENT, absence, absent_names, packages, refuse

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
