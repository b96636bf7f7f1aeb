"""``aimet_torch.nn.transformers.models``: quantized classes of modules of transformers, made when they are asked for.

For modules used on their own; simulations quantize what the modules of transformers compute as they are.
"""

from __future__ import annotations

import importlib
from typing import Any

from bitwright.aimet_common.names import names
from bitwright.aimet_torch.quantized_modules import quantized_class

_MODELS = "aimet_torch.nn.transformers.models."
#: quantized class -> the package of transformers that has its class
HOMES = {
    name: module.removeprefix(_MODELS).partition(".")[0]
    for module, several in names().items()
    if module.startswith(_MODELS)
    for name in several
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    model, plain = HOMES[name], name.removeprefix("Quantized")
    for home in (f"transformers.models.{model}.modeling_{model}", "transformers.activations"):
        try:
            return quantized_class(getattr(importlib.import_module(home), plain))
        except (AttributeError, ModuleNotFoundError):
            continue
    raise ImportError(f"{name} needs a version of transformers that has {plain} in {model}", name=__name__)
