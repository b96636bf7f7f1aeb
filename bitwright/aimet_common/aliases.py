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

from bitwright.aimet_common.absent import ABSENT, absence, absent_names, refuse

_ROOT = "bitwright."

#: package below ``bitwright`` -> the package whose modules it has as well
PREFIXES: dict[str, str] = {
    "aimet_torch.v2": "aimet_torch",
    "aimet_torch.common": "aimet_common",
    "aimet_onnx.common": "aimet_common",
}

#: module below ``bitwright`` -> its home, dotted below ``bitwright``; "" for a package that holds modules only
ALIASES: dict[str, str] = {
    "aimet_common.auto_quant": "aimet_common.search",
    "aimet_common.connected_graph": "aimet_common.sites",
    "aimet_common.quantsim": "aimet_common.utils",
    "aimet_common.quantsim_config": "",
    "aimet_common.quantsim_config.config_utils": "aimet_common.utils",
    "aimet_common.quantsim_config.quantsim_config": "aimet_common.utils",
    "aimet_common.quantsim_config.utils": "aimet_common.utils",
    "aimet_onnx.adaround": "aimet_onnx.rounding",
    "aimet_onnx.adaround.adaround_weight": "aimet_onnx.rounding",
    "aimet_onnx.adascale": "aimet_onnx.rounding",
    "aimet_onnx.amp": "",
    "aimet_onnx.amp.mixed_precision_algo": "aimet_onnx.mixed_precision",
    "aimet_onnx.amp.quantizer_groups": "aimet_onnx.mixed_precision",
    "aimet_onnx.analysis.sensitivity": "aimet_onnx.analysis",
    "aimet_onnx.analysis.visualization": "aimet_onnx.analysis",
    "aimet_onnx.auto_quant": "aimet_common.search",
    "aimet_onnx.batch_norm_fold": "aimet_onnx.float_methods",
    "aimet_onnx.cross_layer_equalization": "aimet_onnx.float_methods",
    "aimet_onnx.layer_output_utils": "aimet_onnx.analysis",
    "aimet_onnx.lite_mp": "aimet_onnx.mixed_precision",
    "aimet_onnx.meta": "",
    "aimet_onnx.meta.connectedgraph": "aimet_onnx.float_methods",
    "aimet_onnx.quant_analyzer": "aimet_onnx.analysis",
    "aimet_onnx.sequential_mse": "",
    "aimet_onnx.sequential_mse.seq_mse": "aimet_onnx.rounding",
    "aimet_onnx.spinquant": "aimet_onnx.float_methods",
    "aimet_torch.adaround": "aimet_torch.rounding",
    "aimet_torch.adaround.adaround_weight": "aimet_torch.rounding",
    "aimet_torch.adascale": "aimet_torch.rounding",
    "aimet_torch.adascale.adascale_optimizer": "aimet_torch.rounding",
    "aimet_torch.amp": "",
    "aimet_torch.amp.mixed_precision_algo": "aimet_torch.mixed_precision",
    "aimet_torch.amp.quantizer_groups": "aimet_torch.mixed_precision",
    "aimet_torch.arch_checker": "aimet_torch.checks",
    "aimet_torch.arch_checker.arch_checker": "aimet_torch.checks",
    "aimet_torch.auto_quant": "aimet_common.search",
    "aimet_torch.batch_norm_fold": "aimet_torch.float_methods",
    "aimet_torch.bias_correction": "aimet_torch.float_methods",
    "aimet_torch.bn_reestimation": "torch.training.batch_norm",
    "aimet_torch.cross_layer_equalization": "aimet_torch.float_methods",
    "aimet_torch.defs": "aimet_torch.compress",
    "aimet_torch.elementwise_ops": "aimet_torch.quantized_modules",
    "aimet_torch.experimental": "aimet_torch.quantsim",
    "aimet_torch.experimental.adascale": "aimet_torch.rounding",
    "aimet_torch.experimental.adascale.adascale_optimizer": "aimet_torch.rounding",
    "aimet_torch.experimental.pgs": "aimet_torch.quantsim",
    "aimet_torch.experimental.quantsim_utils": "aimet_torch.quantsim",
    "aimet_torch.experimental.spinquant": "aimet_torch.float_methods",
    "aimet_torch.experimental.spinquant.spinquant_optimizer": "aimet_torch.float_methods",
    "aimet_torch.layer_output_utils": "aimet_torch.analysis",
    "aimet_torch.meta": "",
    "aimet_torch.meta.connectedgraph": "aimet_torch.float_methods",
    "aimet_torch.model_preparer": "aimet_torch.float_methods",
    "aimet_torch.model_validator": "",
    "aimet_torch.model_validator.model_validator": "aimet_torch.checks",
    "aimet_torch.nn.base": "aimet_torch.quantized_modules",
    "aimet_torch.nn.custom": "aimet_torch.quantized_modules",
    "aimet_torch.nn.modules": "",
    "aimet_torch.nn.modules.custom": "aimet_torch.quantized_modules",
    "aimet_torch.nn.true_quant": "aimet_torch.nn",
    "aimet_torch.onnx": "aimet_torch.quantsim",
    "aimet_torch.onnx_utils": "aimet_torch.quantsim",
    "aimet_torch.quant_analyzer": "aimet_torch.analysis",
    "aimet_torch.quantization": "aimet_torch.quantizers",
    "aimet_torch.quantization.affine": "aimet_torch.quantizers",
    "aimet_torch.quantization.affine.backends": "aimet_torch.quantizers",
    "aimet_torch.quantization.affine.encoding": "aimet_torch.quantizers",
    "aimet_torch.quantization.affine.quantizer": "aimet_torch.quantizers",
    "aimet_torch.quantization.base": "aimet_torch.quantizers",
    "aimet_torch.quantization.base.encoding": "aimet_torch.quantizers",
    "aimet_torch.quantization.base.quantizer": "aimet_torch.quantizers",
    "aimet_torch.quantization.encoding_analyzer": "aimet_torch.quantizers",
    "aimet_torch.quantization.float": "aimet_torch.float_quantizers",
    "aimet_torch.quantization.float.encoding": "aimet_torch.float_quantizers",
    "aimet_torch.quantization.float.quantizer": "aimet_torch.float_quantizers",
    "aimet_torch.quantization.tensor": "aimet_torch.quantizers",
    "aimet_torch.quantsim.config_utils": "aimet_torch.quantsim",
    "aimet_torch.quantsim.quantsim": "aimet_torch.quantsim",
    "aimet_torch.quantsim_config": "",
    "aimet_torch.quantsim_config.quantsim_config": "aimet_common.utils",
    "aimet_torch.seq_mse": "aimet_torch.rounding",
    "aimet_torch.spinquant": "aimet_torch.float_methods",
    "aimet_torch.spinquant.spinquant_optimizer": "aimet_torch.float_methods",
    "aimet_torch.visualization_tools": "aimet_torch.analysis",
    "aimet_torch.visualize_model": "aimet_torch.analysis",
}


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
        refused = home is None and absence(name) is not None
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
