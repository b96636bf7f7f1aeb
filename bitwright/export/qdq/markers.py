"""Marked ONNX models: every site is a node ``Site`` of the domain ``bitwright``.

A marker has one input, one output and the string attribute ``site``, and means identity. Front ends leave
markers where the simulation quantizes; this module finds them, names tensors after them, and takes them out
again. A site may occur several times (a loop over time steps that was unrolled), and several sites may mark
one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from bitwright.errors import ExportError, close_matches
from bitwright.export.files.onnx_file import all_graphs, all_nodes
from bitwright.progress import collector_paused

STATES = "bitwright.states"  # key of the metadata of a Scan that is a recurrent layer

DOMAIN, OP_TYPE, ATTRIBUTE = "bitwright", "Site", "site"


@dataclass(frozen=True)
class Stripped:
    """A model without markers.

    Attributes:
        model: the float model; graph inputs and outputs keep their names.
        tensors: site -> names of the tensors it marked, in execution order, usually one.
    """

    model: ir.Model
    tensors: dict[str, tuple[str, ...]]


class Names:
    """Unique names of values and nodes over a graph and all nested graphs."""

    def __init__(self, model: ir.Model) -> None:
        self._values: set[str] = set()
        self._nodes: set[str] = set()
        self._next: dict[tuple[int, str], int] = {}
        for graph in all_graphs(model.graph):
            self._values.update(v.name for v in (*graph.inputs, *graph.initializers.values()) if v.name)
        for node in all_nodes(model.graph):
            self._nodes.add(node.name or "")
            self._values.update(v.name for v in node.outputs if v.name)

    def value(self, base: str) -> str:
        """The first free name of ``base``, ``base_1``, ``base_2``, ...; marks it as taken."""
        return self._free(base, self._values)

    def node(self, base: str) -> str:
        """As :meth:`value`, among node names, which ONNX Runtime wants unique too."""
        return self._free(base, self._nodes)

    def _free(self, base: str, taken: set[str]) -> str:
        name, counter = base, (id(taken), base)
        count = self._next.get(counter, 0)
        while name in taken:
            count += 1
            name = f"{base}_{count}"
        self._next[counter] = count
        taken.add(name)
        return name


class Outputs:
    """Index of the graph outputs of each value, for replacement without a search."""

    def __init__(self, model: ir.Model) -> None:
        self._slots: dict[ir.Value, list[tuple[ir.Graph, int]]] = {}
        for graph in all_graphs(model.graph):
            for i, value in enumerate(graph.outputs):
                self._slots.setdefault(value, []).append((graph, i))

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Replace the graph output ``old`` by ``new``, under its name."""
        slots = self._slots.pop(old, [])
        for graph, i in slots:
            graph.outputs[i] = new
        if slots:
            self._slots.setdefault(new, []).extend(slots)
            new.name = old.name


def is_site(node: ir.Node) -> bool:
    """Whether ``node`` is a marker."""
    return node.domain == DOMAIN and node.op_type == OP_TYPE


def site_of(node: ir.Node) -> str:
    """The name of a marker's site.

    Raises:
        ExportError: the marker is malformed.
    """
    attribute = node.attributes.get(ATTRIBUTE)
    ok = len(node.inputs) == len(node.outputs) == 1 and node.inputs[0] is not None
    if attribute is None or attribute.type != ir.AttributeType.STRING or not ok:
        raise ExportError(
            f"node {node.name!r}",
            f"a {DOMAIN}::{OP_TYPE} marker needs one input, one output and a string attribute {ATTRIBUTE!r}",
            "mark the model again with the front end of this version",
        )
    return attribute.as_string()


def site_nodes(model: ir.Model) -> list[ir.Node]:
    """Every marker in execution order, bodies of If, Loop and Scan included."""
    return [node for node in all_nodes(model.graph) if is_site(node)]


def site_names(model: ir.Model) -> list[str]:
    """The names of all marked sites, once each, in execution order."""
    return list(dict.fromkeys(site_of(node) for node in site_nodes(model)))


def copy_model(model: ir.Model) -> ir.Model:
    """A copy whose graph can be edited; tensors are shared, functions that hold markers are inlined.

    Constants that the exporter noted on intermediate values are forgotten: renaming such a value would rename
    the tensor that the caller's model shares.
    """
    copy = model.clone()
    if any(is_site(node) for function in copy.functions.values() for node in all_nodes(function)):
        copy = InlinePass()(copy).model
    for node in all_nodes(copy.graph):
        for value in node.outputs:
            value.const_value = None
    return copy


@collector_paused()
def strip_sites(model: ir.Model) -> Stripped:
    """The float model without markers; tensors keep their names.

    Where a marker's output is a graph output, the marked tensor takes over that name; if the marked tensor
    is a graph input, an initializer or an output itself, an Identity stays between the two. ``model`` is
    left as it is.

    Raises:
        ExportError: a marker is malformed.
    """
    copy = copy_model(model)
    outputs = Outputs(copy)
    marked: dict[str, list[ir.Value]] = {}
    for node in site_nodes(copy):
        source = node.inputs[0]
        assert source is not None
        marked.setdefault(site_of(node), []).append(source)
        bypass(node, outputs)
    close(copy)
    return Stripped(copy, {site: tuple(str(v.name) for v in values) for site, values in marked.items()})


def rename_values(model: ir.Model, names: Mapping[str, str]) -> ir.Model:
    """A copy of a marked model in which the tensors marked by a site bear the name given for it.

    Names stay unique: one that is taken gets ``_1``, ``_2``, ... after it. Graph inputs, graph outputs and
    initializers keep their names, and of several sites on one tensor the first names it.

    Raises:
        ExportError: ``names`` holds a site that the model is not marked with.
    """
    copy = copy_model(model)
    nodes = site_nodes(copy)
    known = {site_of(node) for node in nodes}
    for site in names:
        if site not in known:
            raise ExportError(
                site,
                f"the model has no marker for this site{close_matches(site, known)}",
                "name sites that site_names(model) lists",
            )
    unique, done = Names(copy), set()
    for node in nodes:
        value, name = node.inputs[0], names.get(site_of(node))
        assert value is not None
        fixed = value.producer() is None or value.is_graph_output() or value in done
        if name is None or fixed or value.name == name:
            continue
        done.add(value)
        value.name = unique.value(name)
    return copy


def bypass(node: ir.Node, outputs: Outputs) -> None:
    """Take a one-input node out of its graph, or make it an Identity where an output name needs a node."""
    source, result = node.inputs[0], node.outputs[0]
    assert source is not None
    if result.is_graph_output():
        if source.producer() is None or source.is_graph_output() or source.graph is not result.graph:
            node.domain, node.op_type = "", "Identity"
            node.attributes.clear()
            move_uses(result, source)
            return
        outputs.replace(result, source)
    move_uses(result, source)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def move_uses(old: ir.Value, new: ir.Value, *, keep: frozenset[ir.Node] | set[ir.Node] = frozenset()) -> None:
    """Replace ``old`` by ``new`` in all readers except the nodes in ``keep``; graph outputs stay."""
    for node, index in tuple(old.uses()):
        if node not in keep:
            node.replace_input_with(index, new)


def remove_unread(value: ir.Value) -> bool:
    """Remove ``value``, if unused, and the nodes computed only for it; returns whether it was removed."""
    removed = False
    stack = [value]
    while stack:
        top = stack.pop()
        if _is_read(top) or top.is_graph_input():
            continue
        node = top.producer()
        if top.is_initializer():
            assert top.graph is not None and top.name is not None
            top.graph.initializers.pop(top.name, None)
        elif node is not None and node.graph is not None:
            if any(map(_is_read, node.outputs)):
                continue
            stack.extend(filter(None, node.inputs))
            node.graph.remove(node, safe=True)
        removed = True
    return removed


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def close(model: ir.Model) -> None:
    """Drop the markers' domain from the opset imports."""
    for graph in all_graphs(model.graph):
        graph.opset_imports.pop(DOMAIN, None)


def note_states(scan: ir.Node, sites: Sequence[str | None], lengths: str | None) -> None:
    """Write on a Scan which sites its states pass at every step, and the tensor with the lengths of its sequences.

    Args:
        scan: the loop of a recurrent layer.
        sites: by state; ``None`` for a state that passes none.
        lengths: name of the tensor; ``None`` where all sequences have the length of the input.
    """
    scan.metadata_props[STATES] = json.dumps({"sites": list(sites), "lengths": lengths})
