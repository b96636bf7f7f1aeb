"""What torch's ONNX exporter finds out anew for every export is found out once per process of tests.

The exporter reads the signatures of its some 600 translations from their source text whenever it is called: 0.3 s, of 0.5 s
that the export of a small network takes. Every export of the tests still gets a registry of its own, which it may add to.
Child processes (commands, examples, notebooks) run the exporter as it is.
"""

from __future__ import annotations

import copy
import functools

from torch.onnx._internal.exporter._registration import ONNXRegistry

#: the exporter's own constructor of a registry, from an opset
from_torchlib = ONNXRegistry.from_torchlib


@functools.cache
def _read_once(opset_version: int) -> ONNXRegistry:
    return from_torchlib(opset_version)


def registry(cls: type[ONNXRegistry], opset_version: int = ONNXRegistry().opset_version) -> ONNXRegistry:
    """A registry as ``from_torchlib`` makes it; its lists are the caller's."""
    made = copy.copy(_read_once(opset_version))
    made.functions = {target: list(rows) for target, rows in made.functions.items()}
    return made


def read_once() -> None:
    """Let the exporter read its translations once in this process."""
    ONNXRegistry.from_torchlib = classmethod(registry)  # type: ignore[method-assign]
