"""Values of sites that the file rounds after the pools that read them, as they are after these pools.

See :mod:`bitwright.export.qdq.rewrites.pools`. The largest of quantized numbers is one of them, so that pools of the simulation's
values give what it has there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.qdq.forms import damaged_metadata, read_metadata
from bitwright.export.verify.bodies import runs_of
from bitwright.export.verify.runtime import refusals, run_model

Array = NDArray[Any]
Values = Mapping[str, Array | Sequence[Array]]


def after_pools(model: ir.Model, values: Values) -> dict[str, Array | Sequence[Array]]:
    """``values``, of the shapes that the tensors of ``model`` have.

    Args:
        model: as ``to_qdq`` wrote it.
        values: site -> the simulation's values, one array per run. Those of other sites, and those that the pools do not take
            because they have another number of axes, stay as they are.

    Raises:
        ExportError: what the export wrote on an operator is damaged.
    """
    found = dict(values)
    for (site, run), pools in pooled_places(model).items():
        several = list(runs_of(found.get(site)))
        if run < len(several):
            several[run] = _pooled(pools, several[run], model.opset_imports[""])
            found[site] = several
    return found


def pooled_places(model: ir.Model) -> dict[tuple[str, int], tuple[ir.Node, ...]]:
    """(site, run) of every quantizer that stands after pools of what the site is -> these pools, in execution order.

    Raises:
        ExportError: what the export wrote on an operator is damaged.
    """
    noted = [(node, read_metadata(node)) for node in model.graph]
    found: dict[tuple[str, int], tuple[ir.Node, ...]] = {}
    for node, facts in noted:
        if facts is not None and facts["pooled"]:
            pools = _pools_before(node, str(facts["entry"]), facts["pooled"])
            found.update(((site, run), pools) for site, run in facts["places"])
    return found


def _pools_before(node: ir.Node, entry: str, count: int) -> tuple[ir.Node, ...]:
    """The last ``count`` operators that lead to ``entry``, of the quantizer that ``node`` ends."""
    value: ir.Value | None = node.outputs[0]
    while value is not None and value.name != entry:
        value = _read(value)
    found: list[ir.Node] = []
    while value is not None and value.producer() is not None and len(found) < count:
        found.insert(0, value.producer())  # type: ignore[arg-type]
        value = _read(value)
    if len(found) < count:
        raise damaged_metadata(node)
    return tuple(found)


def _read(value: ir.Value) -> ir.Value | None:
    """What the maker of ``value`` reads first."""
    maker = value.producer()
    return maker.inputs[0] if maker is not None and maker.inputs else None


def _pooled(pools: Sequence[ir.Node], array: Array, opset: int) -> Array:
    """What ``pools`` make of ``array``, one after the other."""
    given = ir.Value(
        name="x", type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape)
    )
    nodes: list[ir.Node] = []
    for pool in pools:
        read = nodes[-1].outputs[0] if nodes else given
        nodes.append(ir.Node("", pool.op_type, [read], list(pool.attributes.values()), num_outputs=1))
        nodes[-1].outputs[0].name, nodes[-1].outputs[0].type = f"y{len(nodes)}", given.type
    made = nodes[-1].outputs[0]
    graph = ir.Graph([given], [made], nodes=nodes, opset_imports={"": opset}, name="pools")
    model = ir.Model(graph, ir_version=10)
    try:
        return run_model(model, {"x": np.ascontiguousarray(array)}, "float")[str(made.name)]
    except refusals():
        return array  # another number of axes: the comparison of shapes says so
