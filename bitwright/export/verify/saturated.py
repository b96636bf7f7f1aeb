"""Where a default session of ONNX Runtime saturates on this CPU, by a comparison with a session of exact sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.verify.agreement import Agreement, compare
from bitwright.export.verify.cut import Cut
from bitwright.export.verify.runtime import EXACT_SUMS, offers_exact_sums, run_model

Array = NDArray[Any]

_MOST_NAMED = 5


@dataclass(frozen=True)
class Saturated:
    """What a default session computes otherwise than one with exact sums.

    Attributes:
        places: site -> agreement of its codes in both sessions, where they do not agree; the worst run of several.
        refused: ONNX Runtime refuses the file where sums are to be exact, or does not make all of them so.
    """

    places: dict[str, Agreement]
    refused: bool

    def __str__(self) -> str:
        worst = sorted(self.places, key=lambda site: self.places[site].equal)
        named = [f"{site} ({self.places[site].equal:.1%} equal)" for site in worst[:_MOST_NAMED]]
        named += ["..."] * (len(worst) > _MOST_NAMED)
        remedy = "" if self.refused else "open the session with session.x64quantprecision = 1, or "
        return (
            "this CPU has no VNNI: with the default settings of a session, sums of uint8 times int8 saturate at 16 bits in "
            f"{len(worst)} places, {', '.join(named)}; {remedy}quantize with repair='saturation'"
        )


def saturated_places(model: ir.Model, cut: Cut, feeds: Mapping[str, Array]) -> Saturated | None:
    """Where the sums of a default session saturate; ``None`` if nowhere, as on other CPUs, after one small product.

    Args:
        model: the file, which ONNX Runtime takes.
        cut: of it.
        feeds: values of the graph's inputs and of what else all parts read.
    """
    if not sums_saturate():
        return None
    found: dict[str, Agreement] = {}
    for part, places, more in cut.parts():
        given = {**feeds, **more}
        exact = run_model(part, given, "integer", entries=EXACT_SUMS)
        default = run_model(part, given, "integer")
        for place in places:
            name = str(place.result.name)
            agreement = compare(exact[name], default[name], place.facts, place.scale)
            for site, _ in place.facts["places"]:
                if not agreement.ok and (site not in found or agreement.equal < found[site].equal):
                    found[site] = agreement
    return Saturated(found, not offers_exact_sums(model)) if found else None


def sums_saturate() -> bool:
    """Whether a default session of ONNX Runtime adds pairs of products of uint8 and int8 in 16 bits on this CPU."""
    x_codes, w_codes = np.full((1, 2), 255, np.uint8), np.full((2, 1), 127, np.int8)
    values = [_constant("w", w_codes)]
    values += [_constant(name, np.float32(value)) for name, value in (("one", 1.0), ("step", 500.0))]
    values += [_constant("u", np.uint8(0)), _constant("s", np.int8(0))]
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape((1, 2)))
    w, one, step, u, s = values
    product = ir.node("QLinearMatMul", [x, one, u, w, one, s, step, u])
    (y,) = product.outputs
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.UINT8), ir.Shape((1, 1))
    graph = ir.Graph([x], [y], nodes=[product], initializers=values, opset_imports={"": 21}, name="pair")
    (code,) = run_model(ir.Model(graph, ir_version=10), {"x": x_codes}, "integer")["y"].ravel()
    return int(code) != round(2 * 255 * 127 / 500)  # 130; saturated 66


def _constant(name: str, array: Any) -> ir.Value:
    tensor = ir.tensor(np.asarray(array), name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(np.shape(array)), const_value=tensor)
