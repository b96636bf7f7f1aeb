"""Activation functions of recurrent layers: their parameters, and how each is written in operators of ONNX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitwright.core.graph.recurrence import CELLS
from bitwright.errors import ExportError


@dataclass(frozen=True)
class Activation:
    """An activation function of a layer: ONNX name, and alpha and beta where the function has them."""

    name: str
    alpha: float | None = None
    beta: float | None = None


# (operator, its operands or attributes) in order; "alpha" and "beta" are filled in, x is what came before
_Recipe = tuple[tuple[str, str | None, tuple[str, ...]], ...]


@dataclass(frozen=True)
class _Function:
    """How an activation function is written: ``recipe`` rows are (operator, constant operand, attributes)."""

    name: str
    recipe: _Recipe
    alpha: float | None = None
    beta: float | None = None


def _plain(name: str, *attributes: str, alpha: float | None = None, beta: float | None = None) -> _Function:
    return _Function(name, ((name, None, attributes),), alpha, beta)


#: lower-case name -> function, with the values of alpha and beta that a layer without them has: those of the operator
#: of the same name, and 0 where there is none, as ONNX Runtime has it
FUNCTIONS: dict[str, _Function] = {
    f.name.lower(): f
    for f in (
        *map(_plain, ("Relu", "Tanh", "Sigmoid", "Softsign", "Softplus")),
        _plain("LeakyRelu", "alpha", alpha=0.01),
        _plain("ThresholdedRelu", "alpha", alpha=0.0),
        _plain("HardSigmoid", "alpha", "beta", alpha=0.2, beta=0.5),
        _plain("Elu", "alpha", alpha=1.0),
        _Function("Affine", (("Mul", "alpha", ()), ("Add", "beta", ())), 0.0, 0.0),
        _Function("ScaledTanh", (("Mul", "beta", ()), ("Tanh", None, ()), ("Mul", "alpha", ())), 0.0, 0.0),
    )
}


def unknown_activation(op_type: str, attrs: Mapping[str, Any]) -> str | None:
    """The first activation function of a layer that ONNX Runtime does not know either, or ``None``."""
    names = attrs.get("activations") or CELLS[op_type].activations
    return next((str(name) for name in names if str(name).lower() not in FUNCTIONS), None)


def layer_activations(op_type: str, attrs: Mapping[str, Any]) -> tuple[Activation, ...]:
    """The activation functions of a node, of its directions one after the other, alpha and beta filled in.

    ``activation_alpha`` and ``activation_beta`` hold values for those functions only that have such a parameter, in
    order, as ONNX Runtime reads them.

    Args:
        op_type: ``RNN``, ``GRU`` or ``LSTM``.
        attrs: of the node, names -> plain values.

    Raises:
        ExportError: a function is unknown.
    """
    directions = 2 if attrs.get("direction") == "bidirectional" else 1
    names = attrs.get("activations") or CELLS[op_type].activations * directions
    alphas, betas = (iter(attrs.get(f"activation_{key}") or ()) for key in ("alpha", "beta"))
    found = []
    for name in names:
        function = FUNCTIONS.get(str(name).lower())
        if function is None:
            raise ExportError(
                f"{op_type} layer",
                f"{name!r} is not an activation function of recurrent layers",
                f"use one of {', '.join(f.name for f in FUNCTIONS.values())}",
            )
        alpha = None if function.alpha is None else float(next(alphas, function.alpha))
        beta = None if function.beta is None else float(next(betas, function.beta))
        found.append(Activation(function.name, alpha, beta))
    return tuple(found)
