"""Recurrent layers in marked models: as a Scan with markers inside, or as the native operator again.

A marked model holds a recurrent layer as a node of domain ``bitwright``, operator ``LSTM``, ``GRU`` or ``RNN``: one
direction, with inputs, outputs and attributes of the ONNX operator, and beside them

- the attribute ``inner_sites``, strings ``"<inner tensor>=<site>"`` with the names of
  :mod:`bitwright.core.graph.recurrence`, of the inner tensors that have a site; ``hidden`` is the first output;
- perhaps a ninth input (port 8), the projection matrix ``[1, projection, hidden]`` of an LSTM, which ONNX has not.
"""

from __future__ import annotations

import onnx_ir as ir

from bitwright.core.graph.recurrence import RETURNS
from bitwright.errors import ConfigError, close_matches
from bitwright.export.qdq.forms import Builder, after
from bitwright.export.qdq.markers import copy_model, move_uses
from bitwright.export.recurrent.layers import (
    INNER_SITES,
    PROJECTION,
    inner_sites,
    is_read,
    layer_input,
    recurrent_nodes,
    site_node,
)
from bitwright.export.recurrent.scan import expand
from bitwright.export.targets import RecurrentForm


def write_recurrent(model: ir.Model, form: RecurrentForm) -> ir.Model:
    """Recurrent layers as asked for: ``"scan"`` is :func:`expand_recurrent`, ``"native"`` :func:`restore_native`.

    Raises:
        ConfigError: unknown ``form``.
    """
    if form not in ("scan", "native"):
        raise ConfigError(
            "recurrent",
            f"{form!r} is not a value of this option{close_matches(str(form), ('scan', 'native'))}",
            "use 'scan', with quantizers inside the steps, or 'native', the operators with float insides",
        )
    return expand_recurrent(model) if form == "scan" else restore_native(model)


def expand_recurrent(model: ir.Model) -> ir.Model:
    """Write every recurrent layer as a Scan, with a marker in its body for every inner site.

    Args:
        model: marked; left as it is.

    Returns:
        A copy that computes the same; ``model`` itself where it holds no recurrent layer.

    Raises:
        ExportError: a layer is malformed.
    """
    if not recurrent_nodes(model):
        return model
    copy = copy_model(model)
    builder = Builder(copy)
    for node in recurrent_nodes(copy):
        expand(node, builder)
    return copy


def restore_native(model: ir.Model) -> ir.Model:
    """Write every recurrent layer as the ONNX operator, whose insides have no markers.

    The sites of the hidden state and of the cell mark the operator's outputs. A layer with a projection, which the
    operator has not, becomes a Scan.

    Args:
        model: marked; left as it is.

    Returns:
        A copy; ``model`` itself where it holds no recurrent layer.
    """
    if not recurrent_nodes(model):
        return model
    copy = copy_model(model)
    builder = Builder(copy)
    for node in recurrent_nodes(copy):
        if layer_input(node, PROJECTION) is not None:
            expand(node, builder)
            continue
        sites = inner_sites(node)
        node.attributes.pop(INNER_SITES, None)
        node.domain = ""
        for i in reversed(range(len(node.outputs))):  # what is inserted last stands first
            if RETURNS[i] in sites and is_read(node, i):
                _mark_behind(node, node.outputs[i], sites[RETURNS[i]], builder)
    return copy


def _mark_behind(node: ir.Node, value: ir.Value, site: str, builder: Builder) -> None:
    marker = site_node(value, site, builder)
    after(node)(marker)
    move_uses(value, marker.outputs[0], keep={marker})
    if value.is_graph_output():
        name = str(value.name)
        builder.outputs.replace(value, marker.outputs[0])
        value.name = builder.names.value(f"{name}_raw")
