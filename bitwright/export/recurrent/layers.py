"""A recurrent layer of a marked model: the ports of its node, its inner sites, and what its attributes say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from bitwright.core.graph.recurrence import CELLS, Variant
from bitwright.errors import ExportError
from bitwright.export.qdq.forms import Builder
from bitwright.export.qdq.markers import ATTRIBUTE, DOMAIN, OP_TYPE
from bitwright.export.recurrent.activations import Activation, layer_activations

INNER_SITES = "inner_sites"
X, W, R, B, LENGTHS, INITIAL_H, INITIAL_C, P, PROJECTION = range(9)  # ports
#: outputs of the node, in order; GRU and RNN have the first two
OUTPUTS = ("Y", "Y_h", "Y_c")


def is_recurrent(node: ir.Node) -> bool:
    """Whether ``node`` is a recurrent layer of a marked model."""
    return node.domain == DOMAIN and node.op_type in CELLS


def inner_sites(node: ir.Node) -> dict[str, str]:
    """Inner tensor -> site, of a recurrent layer of a marked model."""
    attribute = node.attributes.get(INNER_SITES)
    pairs = () if attribute is None else attribute.as_strings()
    return {name: site for name, _, site in (pair.partition("=") for pair in pairs)}


def recurrent_nodes(model: ir.Model) -> list[ir.Node]:
    """Every recurrent layer of a marked model, bodies of If, Loop and Scan included."""
    return [node for node in model.graph.all_nodes() if is_recurrent(node)]


def site_node(value: ir.Value, site: str, builder: Builder) -> ir.Node:
    """A marker of ``site`` that reads ``value``, not yet in a graph."""
    name = builder.names.node(f"{site}/site")
    marker = ir.Node(DOMAIN, OP_TYPE, [value], [ir.AttrString(ATTRIBUTE, site)], name=name)
    marker.outputs[0].name = builder.names.value(f"{value.name}_site")
    marker.outputs[0].type, marker.outputs[0].shape = value.type, value.shape
    return marker


def layer_input(node: ir.Node, port: int) -> ir.Value | None:
    """What ``node`` reads at ``port``; ``None`` where it is left out."""
    return node.inputs[port] if port < len(node.inputs) else None


# ----------------------------------------------------------------------------------------------- the layer's facts


@dataclass(frozen=True)
class Layer:
    """What a recurrent node says."""

    node: ir.Node
    hidden: int
    activations: tuple[Activation, ...]
    variant: Variant
    sites: Mapping[str, str]
    reverse: bool
    batch_first: bool
    clip: float | None
    dtype: ir.DataType

    @classmethod
    def of(cls, node: ir.Node) -> Layer:
        """Read the attributes of ``node``.

        Raises:
            ExportError: the node is malformed.
        """
        attrs = {a.name: a.value for a in node.attributes.values()}
        direction = node.attributes.get_string("direction", "forward")
        if direction not in ("forward", "reverse") or "hidden_size" not in attrs:
            raise ExportError(
                f"node {node.name!r}",
                f"a {DOMAIN}::{node.op_type} layer needs hidden_size and one direction, and has {direction!r}",
                "mark the model again with the front end of this version",
            )
        x = node.inputs[X]
        assert x is not None
        variant = Variant(
            linear_before_reset=bool(attrs.get("linear_before_reset", 0)),
            input_forget=bool(attrs.get("input_forget", 0)),
            projected=layer_input(node, PROJECTION) is not None,
        )
        return cls(
            node,
            int(attrs["hidden_size"]),
            layer_activations(node.op_type, attrs),
            variant,
            inner_sites(node),
            direction == "reverse",
            bool(attrs.get("layout", 0)),
            attrs.get("clip") or None,
            x.dtype or ir.DataType.FLOAT,
        )

    @property
    def gates(self) -> tuple[str, ...]:
        """Gates in the order of the operator's weights."""
        return CELLS[self.node.op_type].gates

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Gates whose pre-activations are added together in one go: those that read the same hidden state."""
        return (self.gates[:2], self.gates[2:]) if self.node.op_type == "GRU" else (self.gates,)

    @property
    def late_bias(self) -> bool:
        """Whether the candidate's recurrent bias is reset too, and cannot join the other biases."""
        return self.node.op_type == "GRU" and self.variant.linear_before_reset


def is_read(node: ir.Node, output: int) -> bool:
    """Whether anything reads that output of ``node``, or the graph returns it."""
    value = node.outputs[output] if output < len(node.outputs) else None
    return value is not None and (bool(value.uses()) or value.is_graph_output())
