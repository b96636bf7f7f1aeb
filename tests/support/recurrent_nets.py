"""Recurrent ONNX models of every variant, for the tests of export and of the ONNX front end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@dataclass(frozen=True)
class Variant:
    """One recurrent node; sizes are those of the example input, length and batch of the model are free."""

    op_type: str = "LSTM"
    direction: str = "forward"
    length: int = 6
    batch: int = 3
    inputs: int = 4
    hidden: int = 5
    bias: bool = True
    lengths: tuple[int, ...] | None = None
    states: bool = False
    peepholes: bool = False
    layout: int = 0
    attributes: tuple[tuple[str, Any], ...] = ()
    dtype: str = "float32"
    seed: int = 0

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1


def layer_model(v: Variant, *, domain: str = "", inner_sites: tuple[str, ...] = ()) -> ir.Model:
    """A model of one node ``rnn`` with weights ``W``, ``R``, ``B``, ``P``; outputs ``Y``, ``Y_h`` and ``Y_c``."""
    rng = np.random.default_rng(v.seed)
    rows, dtype = GATES[v.op_type] * v.hidden, np.dtype(v.dtype)
    kind = ir.DataType.from_numpy(dtype)

    def constant(name: str, *shape: int) -> ir.Value:
        array = (rng.standard_normal(shape) * 0.5).astype(dtype)
        return ir.Value(
            name=name, const_value=ir.Tensor(array, name=name), shape=ir.Shape(shape), type=ir.TensorType(kind)
        )

    def given(name: str, shape: tuple[Any, ...], of: ir.DataType = kind) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(of))

    first = ("B", "T") if v.layout else ("T", "B")
    x = given("X", (*first, v.inputs))
    weights = [constant("W", v.directions, rows, v.inputs), constant("R", v.directions, rows, v.hidden)]
    bias = constant("B", v.directions, 2 * rows) if v.bias else None
    lengths = given("lengths", ("B",), ir.DataType.INT32) if v.lengths is not None else None
    state = ("B", v.directions, v.hidden) if v.layout else (v.directions, "B", v.hidden)
    h = given("h", state) if v.states else None
    inputs: list[ir.Value | None] = [x, *weights, bias, lengths, h]
    c = given("c", state) if v.states and v.op_type == "LSTM" else None
    peepholes = constant("P", v.directions, 3 * v.hidden) if v.peepholes else None
    inputs += [c, peepholes] if v.op_type == "LSTM" else []
    while inputs[-1] is None:
        inputs.pop()
    attributes: dict[str, Any] = {"hidden_size": v.hidden, "direction": v.direction, **dict(v.attributes)}
    if v.layout:
        attributes["layout"] = v.layout
    if inner_sites:
        attributes["inner_sites"] = list(inner_sites)
    names = ("Y", "Y_h", "Y_c")[: 3 if v.op_type == "LSTM" else 2]
    node = ir.node(v.op_type, inputs, attributes, domain=domain, num_outputs=len(names), name="rnn")
    for name, value in zip(names, node.outputs, strict=True):
        value.name, value.type = name, ir.TensorType(kind)
    graph = ir.Graph(
        [value for value in (x, lengths, h, c) if value is not None],
        node.outputs,
        nodes=[node],
        initializers=[value for value in (*weights, bias, peepholes) if value is not None],
        opset_imports={"": 21, "bitwright": 1} if domain else {"": 21},
        name="net",
    )
    return ir.Model(graph, ir_version=10)


def feeds(v: Variant, seed: int = 1) -> dict[str, NDArray[Any]]:
    """Random inputs for :func:`layer_model`."""
    rng = np.random.default_rng(seed)
    shape = (v.batch, v.length) if v.layout else (v.length, v.batch)
    found: dict[str, NDArray[Any]] = {"X": rng.standard_normal((*shape, v.inputs)).astype(v.dtype)}
    if v.lengths is not None:
        found["lengths"] = np.asarray(v.lengths, np.int32)
    state = (v.batch, v.directions, v.hidden) if v.layout else (v.directions, v.batch, v.hidden)
    if v.states:
        found["h"] = rng.standard_normal(state).astype(v.dtype)
        if v.op_type == "LSTM":
            found["c"] = rng.standard_normal(state).astype(v.dtype)
    return found


def run_model(model: ir.Model, given: dict[str, NDArray[Any]], *, exact: bool = True) -> list[NDArray[Any]]:
    """Outputs in ONNX Runtime, with float kernels, or where not ``exact`` with integer kernels."""
    from bitwright.compare import runtime

    found = runtime.run_model(model, given, "float" if exact else "integer", entries=runtime.EXACT_SUMS)
    return [*found.values()]


def native_outputs(v: Variant, seed: int = 1) -> list[NDArray[Any]]:
    """What ONNX Runtime's operator returns; it has no layout 1, which is layout 0 with axes exchanged."""
    given = feeds(v, seed)
    if not v.layout:
        return run_model(layer_model(v), given)
    turned = {name: x if name == "lengths" else x.swapaxes(0, 1) for name, x in given.items()}
    y, *states = run_model(layer_model(replace(v, layout=0)), turned)
    return [y.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in states)]
