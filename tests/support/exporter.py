"""What torch's ONNX exporter finds out anew for every export is found out once per process of tests.

The exporter reads the signatures of its some 600 translations from their source text whenever it is called, and looks up the
composite operators of C++ once per namespace: a third of the time that the export of a small network takes. Every export of
the tests still gets a registry of its own, which it may add to; operators are looked up again when there are new ones. Child
processes (commands, examples, notebooks) run the exporter as it is.
"""

from __future__ import annotations

import copy
import functools

import torch
import torch._export.utils as operators
from torch.onnx._internal.exporter._registration import ONNXRegistry

#: the exporter's own constructor of a registry, from an opset
from_torchlib = ONNXRegistry.from_torchlib
#: the exporter's own look at every composite operator
materialize = operators._materialize_cpp_cia_ops
_materialized: list[str] = []


@functools.cache
def _read_once(opset_version: int) -> ONNXRegistry:
    return from_torchlib(opset_version)


def registry(cls: type[ONNXRegistry], opset_version: int = ONNXRegistry().opset_version) -> ONNXRegistry:
    """A registry as ``from_torchlib`` makes it; its lists are the caller's."""
    made = copy.copy(_read_once(opset_version))
    made.functions = {target: list(rows) for target, rows in made.functions.items()}
    return made


def materialize_new_ones() -> None:
    """What ``materialize`` does, where an operator was registered since it was called last."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    if names != _materialized:
        materialize()
        _materialized[:] = names


def read_once() -> None:
    """Let the exporter find these things out once in this process."""
    operators._materialize_cpp_cia_ops = materialize_new_ones
    ONNXRegistry.from_torchlib = classmethod(registry)  # type: ignore[method-assign]
