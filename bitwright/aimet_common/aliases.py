"""The module paths of AIMET that have no file of their own: one table, and the finder that imports them.

AIMET keeps older paths of its modules (``aimet_torch.v2.quantsim``), and each package has its copy of what both share
(``aimet_torch.common.defs``). A path of the table is imported as a module whose names are those of its home. Modules that have
no counterpart here raise the ImportError of :mod:`bitwright.aimet_common.absent`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

from bitwright.aimet_common.absent import absence, absent_names, refuse

_ROOT = "bitwright."

#: package below ``bitwright`` -> the package whose modules it has as well
PREFIXES: dict[str, str] = {
    "aimet_torch.v2": "aimet_torch",
    "aimet_torch.common": "aimet_common",
    "aimet_onnx.common": "aimet_common",
}

#: module below ``bitwright`` -> its home, dotted below ``bitwright``; "" for a package that holds modules only
ALIASES: dict[str, str] = {
    "aimet_common.quantsim_config": "",
    "aimet_common.quantsim_config.config_utils": "aimet_common._quantsim_config",
    "aimet_common.quantsim_config.utils": "aimet_common._quantsim_config",
    "aimet_onnx.adaround": "",
    "aimet_onnx.adascale": "aimet_onnx.rounding",
    "aimet_onnx.adaround.adaround_weight": "aimet_onnx.rounding",
    "aimet_onnx.auto_quant": "aimet_common.auto_quant",
    "aimet_onnx.batch_norm_fold": "aimet_onnx.float_methods",
    "aimet_onnx.cross_layer_equalization": "aimet_onnx.float_methods",
    "aimet_onnx.meta": "",
    "aimet_onnx.meta.connectedgraph": "aimet_onnx.float_methods",
    "aimet_onnx.sequential_mse": "",
    "aimet_onnx.sequential_mse.seq_mse": "aimet_onnx.rounding",
    "aimet_onnx.spinquant": "aimet_onnx.float_methods",
    "aimet_torch.adaround": "",
    "aimet_torch.adaround.adaround_weight": "aimet_torch.rounding",
    "aimet_torch.adascale": "aimet_torch.rounding",
    "aimet_torch.amp": "",
    "aimet_torch.amp.mixed_precision_algo": "aimet_torch.mixed_precision",
    "aimet_torch.arch_checker": "aimet_torch._arch_checker",
    "aimet_torch.arch_checker.arch_checker": "aimet_torch._arch_checker",
    "aimet_torch.auto_quant": "aimet_common.auto_quant",
    "aimet_torch.batch_norm_fold": "aimet_torch.float_methods",
    "aimet_torch.bias_correction": "aimet_torch.float_methods",
    "aimet_torch.bn_reestimation": "torch.training.batch_norm",
    "aimet_torch.cross_layer_equalization": "aimet_torch.float_methods",
    "aimet_torch.defs": "",
    "aimet_torch.elementwise_ops": "aimet_torch.nn.modules.custom",
    "aimet_torch.experimental": "",
    "aimet_torch.experimental.adascale": "aimet_torch.rounding",
    "aimet_torch.experimental.pgs": "aimet_torch._pgs",
    "aimet_torch.experimental.spinquant": "aimet_torch.float_methods",
    "aimet_torch.meta": "",
    "aimet_torch.meta.connectedgraph": "aimet_torch.float_methods",
    "aimet_torch.model_preparer": "aimet_torch.float_methods",
    "aimet_torch.model_validator": "",
    "aimet_torch.model_validator.model_validator": "aimet_torch._model_validator",
    "aimet_torch.nn.base": "aimet_torch._registry",
    "aimet_torch.seq_mse": "aimet_torch.rounding",
    "aimet_torch.spinquant": "aimet_torch.float_methods",
}


def home_of(name: str) -> str | None:
    """The home of a module path, both dotted below ``bitwright``; "" for a package of modules, ``None`` for none.

    Example:
        >>> home_of("aimet_torch.v2.quantsim.config_utils"), home_of("aimet_torch.v2.meta.connectedgraph")
        ('aimet_torch.quantsim.config_utils', 'aimet_torch.float_methods')
        >>> home_of("aimet_torch.adaround"), home_of("aimet_torch.quantsim")
        ('', None)
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


def names_of(module: str, path: str) -> Callable[[str], Any]:
    """A module ``__getattr__`` that finds the names of another module, and its submodules.

    Args:
        module: where the names are.
        path: the module that has the function; what AIMET's has and ours has not is found under it.
    """

    def found(name: str) -> Any:
        if name.startswith("__"):
            if name == "__all__":
                home = importlib.import_module(module)
                own = [n for n, v in vars(home).items() if getattr(v, "__module__", None) == module and n[0] != "_"]
                return getattr(home, "__all__", own)
            raise AttributeError(name)
        home = importlib.import_module(module)
        if not hasattr(home, name):
            return missing(name)
        return getattr(home, name)

    missing = absent_names(path)
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
        refused = home is None and absence(name) is not None
        if not refused and (home is None or (home and not _exists(_ROOT + home))):
            return None
        return spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        home = home_of(module.__name__.removeprefix(_ROOT))
        if home is None:
            refuse(module.__name__)
        module.__doc__ = f"The names of ``{_ROOT}{home}``." if home else "A package of modules."
        name = module.__name__
        module.__dict__["__getattr__"] = names_of(_ROOT + home, name) if home else absent_names(name)


FINDER = _Aliases()


def install() -> None:
    """Let ``import`` find the paths of the tables; a second call does nothing."""
    if FINDER not in sys.meta_path:
        sys.meta_path.append(FINDER)
