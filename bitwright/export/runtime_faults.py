"""Files that a runtime computes otherwise as a whole than with free axes fixed, or with every quantized value observed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]

# an output this near to the simulation, in dB, is not looked at; one that comes so much nearer was computed otherwise: codes
# that round differently move both alike
_NEAR, _NEARER = 60.0, 20.0

Edit = Callable[[ir.Model], None]


@dataclass(frozen=True)
class Otherwise:
    """An output that a runtime makes otherwise of the whole file, as it is, than of the same operators.

    Attributes:
        runtime: which.
        output: its name.
        whole: signal-to-noise ratio of the file to the simulation, in dB.
        other: the same with the lengths of the input in the place of free axes; or with every quantized value an output.
        shapes: of the inputs, as they were fixed; ``None`` where values were observed instead.
    """

    runtime: str
    output: str
    whole: float
    other: float
    shapes: Mapping[str, tuple[int, ...]] | None

    def __str__(self) -> str:
        if self.shapes is None:
            than, where = "than its operators", "where every quantized value is an output too"
            remedy = (
                "make values in between outputs of the model, or use another runtime, and show the file to the maintainers of "
                "this one"
            )
        else:
            than, where = "with free axes than with lengths", "with the lengths of this input"
            remedy = f"{how_to_fix(self.shapes)}; `bitwright drift` names the operator"
        return (
            f"{self.runtime} computes the whole file otherwise {than}: output {self.output} is {self.whole:.1f} dB from the "
            f"simulation, and {self.other:.1f} dB {where}: {remedy}"
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


def observe(model: ir.Model) -> None:
    """Make every quantized activation an output too.

    What layers make before it is rounded stays inside: OpenVINO 2026.4 computes zeros then of a network that is right without.
    """
    known = set(model.graph.outputs)
    pairs = (node for node in model.graph if node.op_type == "DequantizeLinear")
    model.graph.outputs.extend(
        pair.outputs[0]
        for pair in pairs
        if pair.outputs[0] not in known and pair.inputs[0] is not None and pair.inputs[0].producer() is not None
    )


def computed_otherwise(
    model: ir.Model,
    levels: Iterable[tuple[str, float]],
    feeds: Mapping[str, Array],
    changed: Callable[[Edit], Callable[[str], float]],
    runtime: str,
) -> Otherwise | None:
    """The first output that a runtime makes otherwise with free axes, or while nothing observes what lies before it.

    Args:
        model: the file.
        levels: output -> its ratio to the simulation, of the file as it is.
        feeds: the input.
        changed: runs a copy of the file after an edit; gives the ratio of each of its outputs.
        runtime: its name.
    """
    doubtful = [(name, whole) for name, whole in levels if whole < _NEAR]
    if not doubtful:
        return None
    tried: list[tuple[Edit, Mapping[str, tuple[int, ...]] | None]] = [(observe, None)]
    if free_inputs(model):
        shapes = {given: array.shape for given, array in feeds.items()}
        tried.insert(0, (lambda copied: fix_lengths(copied, feeds), shapes))
    for edit, fixed in tried:
        level = changed(edit)
        for name, whole in doubtful:
            if level(name) - whole > _NEARER:
                return Otherwise(runtime, name, whole, level(name), fixed)
    return None
