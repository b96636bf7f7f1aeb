"""A captured program decomposed as for ONNX, without the part of it that costs the same whatever the program contains.

Where torch's exporter makes ONNX of a small network, some three quarters of the time go to three things that do not depend on
the network: to list what decomposes into what, to find the composite operators among it, and to replace the kernels of all of
them while the program is retraced. The lists are kept here, and only those kernels are replaced that then do something else: for
409 of 513 (torch 2.13) the replacement calls the decomposition that torch takes anyway. What retraces the program, and all
passes after it, are the exporter's own, so the model is the same to the names of its nodes.

To leave the decomposition out where every operator has a translation was tried, and not kept. Retracing also makes others of
composite operators (``reshape``, ``flatten``, ``chunk``, ``dropout``), counts the names of nodes anew where an axis is free, and
in one network a constant folded only after it; few networks have none of these.

Torch has no setting for it. :func:`knows_steps` tells whether the private functions that are called for it, and those whose
place they take, are the ones that were read; elsewhere the exporter does all of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram

_EXPORTER, _PROGRAM = "torch.onnx._internal.exporter", "torch.export.exported_program"
_PATCH = "torch.fx.experimental._config:patch"  # of settings, for a while

#: function called for it -> its parameters
_CALLED = {
    f"{_EXPORTER}._core:_exported_program_to_onnx_program": {"exported_program", "registry", "lower"},
    f"{_EXPORTER}._core:onnxscript_apis.convert_version": {"model", "target_version"},
    f"{_EXPORTER}._decomp:get_onnx_implemented_overloads": {"registry"},
    f"{_EXPORTER}._decomp:create_onnx_friendly_decomposition_table": {"onnx_registered_ops"},
    f"{_EXPORTER}._fx_passes:insert_type_promotion_nodes": {"graph_module"},
    f"{_EXPORTER}._fx_passes:remove_assertion_nodes": {"graph_module"},
    f"{_PROGRAM}:_split_decomp_table_to_cia_and_python_decomp": {"decomp_table"},
    f"{_PROGRAM}:_decompose_exported_program": {
        "ep", "cia_to_decomp", "python_decomp_table", "joint_loss_index", "decompose_custom_triton_ops",
    },
    _PATCH: {"arg1", "arg2", "kwargs"},
    "torch._subclasses.fake_tensor:unset_fake_temporarily": set(),
}  # fmt: skip

#: function whose place is taken here -> the names in it
_REPLACED = {
    f"{_EXPORTER}._core:_prepare_exported_program_for_export": {
        "torch", "fx", "experimental", "_config", "patch", "_fx_passes", "decompose_with_registry", "graph_module",
        "insert_type_promotion_nodes", "remove_assertion_nodes", "_graph_module",
    },
    f"{_EXPORTER}._fx_passes:decompose_with_registry": {
        "set", "_decomp", "get_onnx_implemented_overloads", "create_onnx_friendly_decomposition_table",
        "run_decompositions",
    },
    f"{_PROGRAM}:ExportedProgram.run_decompositions": {
        "default_decompositions", "dict", "isinstance", "CustomDecompTable", "materialize",
        "_split_decomp_table_to_cia_and_python_decomp", "_decompose_exported_program",
    },
}  # fmt: skip

#: the name in torch of the decomposition that a composite operator has anyway
_ANYWAY = "_special_op_to_decompose_cia"


class _Tables(NamedTuple):
    """Operator -> what it decomposes into: by kernels, for the time of the retracing, and by the tracer."""

    kernels: dict[Any, Callable[..., Any]]
    traced: dict[Any, Callable[..., Any]]


@functools.cache
def knows_steps() -> bool:
    """Whether the implementation is the one that this module knows."""
    try:
        called = all(inspect.signature(resolve_name(f)).parameters.keys() == known for f, known in _CALLED.items())
        return called and all(_names(resolve_name(f)) == known for f, known in _REPLACED.items())
    except (ImportError, AttributeError):
        return False


def _names(function: Callable[..., Any]) -> set[str]:
    """What ``function`` looks up: globals, attributes, modules."""
    return set(inspect.unwrap(function).__code__.co_names)


def decomposed(program: ExportedProgram, registry: Any) -> ExportedProgram:
    """A new program, of what ``registry`` of torch's exporter translates."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.export.exported_program import _decompose_exported_program
    from torch.onnx._internal.exporter import _fx_passes

    tables = _tables(registry, len(torch._decomp.decomposition_table))
    # as in the exporter: an axis that is free may have the length 1 as well
    with resolve_name(_PATCH)(backed_size_oblivious=True):
        with unset_fake_temporarily():
            made = _decompose_exported_program(
                program,
                cia_to_decomp=tables.kernels,
                python_decomp_table=dict(tables.traced),
                joint_loss_index=None,
                decompose_custom_triton_ops=False,
            )
        _fx_passes.insert_type_promotion_nodes(made.graph_module)
        made._graph_module = _fx_passes.remove_assertion_nodes(made.graph_module)
    return made


@functools.lru_cache(maxsize=1)
def _tables(registry: Any, decompositions: int) -> _Tables:
    """The decompositions of what ``registry`` does not translate, while torch has so many of them."""
    from torch.export.exported_program import _split_decomp_table_to_cia_and_python_decomp
    from torch.onnx._internal.exporter import _decomp

    translated = set(_decomp.get_onnx_implemented_overloads(registry))
    table: Any = dict(_decomp.create_onnx_friendly_decomposition_table(translated))
    kernels, traced = _split_decomp_table_to_cia_and_python_decomp(table)
    return _Tables({op: made for op, made in kernels.items() if not _is_taken_anyway(made)}, traced)


def _is_taken_anyway(made: Callable[..., Any]) -> bool:
    return isinstance(made, functools.partial) and getattr(made.func, "__name__", "") == _ANYWAY
