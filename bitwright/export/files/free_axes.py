"""Files that a runtime computes otherwise with free axes than with the lengths of an input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]

# an output this near to the simulation, in dB, is not looked at; one that comes so much nearer with fixed lengths was computed
# otherwise: codes that round differently move both alike
_NEAR, _NEARER = 60.0, 20.0


@dataclass(frozen=True)
class FreeAxes:
    """An output that a runtime makes otherwise where axes are free.

    Attributes:
        runtime: which.
        output: its name.
        free, fixed: signal-to-noise ratio to the simulation, with the file's free axes and with the lengths of the input, in dB.
        shapes: of the inputs, as they were fixed.
    """

    runtime: str
    output: str
    free: float
    fixed: float
    shapes: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        return (
            f"{self.runtime} computes the whole file otherwise with free axes than with lengths: output {self.output} is "
            f"{self.free:.1f} dB from the simulation, and {self.fixed:.1f} dB with the lengths of this input: "
            f"{how_to_fix(self.shapes)}; `bitwright drift` names the operator"
        )


def how_to_fix(shapes: Mapping[str, Sequence[int]]) -> str:
    """What a user does to give inputs the ``shapes``."""
    given = {name: list(shape) for name, shape in shapes.items()}
    return (
        f"fix the lengths of the inputs in the session (OpenVINO: model.reshape({given}) before compile_model), or write the "
        f"file so: dynamic_batch=False, or an ONNX model without free axes"
    )


def free_inputs(model: ir.Model) -> list[ir.Value]:
    """Inputs with an axis of any length."""
    return [value for value in model.graph.inputs if value.shape is None or not value.shape.is_static()]


def fix_lengths(model: ir.Model, feeds: Mapping[str, Array]) -> None:
    """Give inputs the lengths of what is fed, and forget what was known of the tensors after them."""
    for value in free_inputs(model):
        if value.name is not None and value.name in feeds:
            value.shape = ir.Shape(feeds[value.name].shape)
    for node in model.graph:
        for made in node.outputs:
            made.shape = None


def computed_otherwise(
    levels: Iterable[tuple[str, float]],
    feeds: Mapping[str, Array],
    fixed: Callable[[], Callable[[str], float]],
    runtime: str,
) -> FreeAxes | None:
    """The first output that a runtime makes otherwise with free axes.

    Args:
        levels: output -> its ratio to the simulation, with the axes as they are.
        feeds: the input.
        fixed: runs the file with the lengths of the input; gives the ratio of each of its outputs.
        runtime: its name.
    """
    doubtful = [(name, free) for name, free in levels if free < _NEAR]
    level = fixed() if doubtful else None
    for name, free in doubtful:
        if level is not None and level(name) - free > _NEARER:
            shapes = {given: array.shape for given, array in feeds.items()}
            return FreeAxes(runtime, name, free, level(name), shapes)
    return None
