"""A captured program as ONNX: what ``torch.onnx.export`` makes of it, in less than half the time.

``torch.onnx.export`` finds out for every model what it can translate: it reads the signatures of some 500 functions from their
source text, which takes longer than the export of a small network does, and has no setting for it. Where its implementation
takes a registry of translations as an argument, it is given one that was made before; elsewhere the public function is called.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import onnx_ir as ir
import torch
from torch.export import ExportedProgram

from bitwright.torch.simulation.translations import TRANSLATIONS

OPSET = 21
#: arguments without which the implementation is another one than this module knows
_NEEDED = {"registry", "dynamic_shapes", "optimize", "opset_version", "verbose"}


def to_onnx(program: ExportedProgram) -> ir.Model:
    """``program`` as ONNX of opset 21, optimized, with :data:`TRANSLATIONS`.

    Raises:
        Whatever the exporter raises: an operator without a translation, for one.
    """
    if not takes_registry():
        return by_public_function(program)
    from torch.onnx._internal.exporter import _core

    registry = _registry(len(torch._C._dispatch_get_all_op_names()))
    made = _core.export(
        program,
        (),
        registry=registry,
        dynamic_shapes={},
        optimize=True,
        opset_version=OPSET,
        verbose=False,
    )
    return made.model


def takes_registry() -> bool:
    """Whether the implementation is the one that this module knows."""
    try:
        from torch.onnx._internal.exporter import _core, _registration
    except ImportError:
        return False
    known = hasattr(_registration, "ONNXRegistry") and hasattr(torch._C, "_dispatch_get_all_op_names")
    return known and _NEEDED <= inspect.signature(_core.export).parameters.keys()


def by_public_function(program: ExportedProgram) -> ir.Model:
    """The same by ``torch.onnx.export``."""
    made = torch.onnx.export(
        program,
        (),
        dynamo=True,
        opset_version=OPSET,
        optimize=True,
        verbose=False,
        custom_translation_table=TRANSLATIONS,
    )
    assert made is not None
    return made.model


@lru_cache(maxsize=1)
def _registry(operators: int) -> Any:
    """What the exporter can translate while torch has so many operators: a package that brings more brings translations."""
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry.from_torchlib(opset_version=OPSET)
    for target, function in TRANSLATIONS.items():
        registry.register_op(target, function, is_complex=False)
    return registry
