"""Build models with markers at the placed sites, and the simulation from them.

There is one marked model per simulation. What runs (calibration, simulation) and what is exported are both derived
from it, by the same writer of quantizers (:mod:`bitwright.export.qdq.forms`), so that they cannot drift apart.

Quantized weights of large models are written once, into one file: calibration, the simulation and the session that gives the
samples of an export compute with the same ones, and map them from there, so that they take no memory of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.integer_sums import fake_quantize_bias
from bitwright.core.numerics.rotations import random_rotation
from bitwright.core.placement.plan import SitePlan
from bitwright.export.files.atomic import temporary_room
from bitwright.export.files.onnx_file import all_graphs, all_nodes, let_go
from bitwright.export.qdq.forms import Builder, write_activation
from bitwright.export.qdq.markers import (
    ATTRIBUTE,
    DOMAIN,
    OP_TYPE,
    Names,
    Outputs,
    bypass,
    close,
    copy_model,
    move_uses,
    remove_unread,
    site_nodes,
    site_of,
)
from bitwright.export.qdq.products import guard_outputs
from bitwright.export.qdq.stored import unsigned
from bitwright.export.qdq.trace import find_constants
from bitwright.export.recurrent import INNER_SITES, expand_recurrent
from bitwright.onnx.model.load import own_tensor
from bitwright.onnx.model.rewrites import is_layer
from bitwright.onnx.model.session import is_large, kept_in_file, weight_bytes, weights
from bitwright.progress import collector_paused

_FOLDER = "bitwright.folder"  # what a tensor keeps, so that models and sessions can be made of it
_Made = tuple[
    ir.TensorProtocol, ir.TensorProtocol
]  # the original, so that its identity stays its own, and what became of it


class WeightFile:
    """A file of weights that exists as long as this object or one of its tensors.

    Attributes:
        folder: it lies there, and goes with it.
        size: its bytes.
    """

    def __init__(self) -> None:
        with temporary_room():
            self.folder = tempfile.TemporaryDirectory(prefix="bitwright-", ignore_cleanup_errors=True)
        self._path = Path(self.folder.name, "weights.data")
        self._made: dict[tuple[int, Encoding | None, bool], _Made] = {}
        self.size = 0

    def tensor(
        self,
        name: str,
        original: ir.TensorProtocol,
        encoding: Encoding | None,
        bias: bool,
        make: Callable[[], ir.TensorProtocol],
    ) -> ir.Tensor | ir.ExternalTensor:
        """Result of ``make`` for these arguments, from the file if it exists; small tensors stay in memory.

        Args:
            name: of the tensor.
            original: the float constant; told apart by identity, so its elements must not change.
            encoding, bias: how it is quantized; see :func:`bitwright.onnx.simulation.marked_model.folded_constant`.
            make: computes it.

        Returns:
            A tensor of its own, which can be given another name.

        Raises:
            ExportError: the temporary folder has no room for it.
        """
        key = (id(original), encoding, bias)
        if key not in self._made:
            self._made[key] = original, self._written(name, make())
        return self._of_its_own(self._made[key][1])

    def kept(self, name: str, tensor: ir.TensorProtocol) -> ir.Tensor | ir.ExternalTensor:
        """``tensor``, mapped from the file unless it is small.

        Raises:
            ExportError: the temporary folder has no room for it.
        """
        return self._of_its_own(self._written(name, tensor))

    def _written(self, name: str, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        with temporary_room(self.folder.name), self._path.open("ab") as file:
            made = kept_in_file(name, tensor, file, self._path)
            self.size = file.tell()
        return made

    def _of_its_own(self, tensor: ir.TensorProtocol) -> ir.Tensor | ir.ExternalTensor:
        own = own_tensor(tensor)
        own.meta[_FOLDER] = self.folder
        return own


def file_for(model: ir.Model, kept: WeightFile | None) -> WeightFile | None:
    """File of a large model's quantized weights: a new one where most of ``kept`` is stale."""
    if not is_large(model):
        return None
    return WeightFile() if kept is None or kept.size > 2 * weight_bytes(model) else kept


@dataclass(frozen=True)
class MarkedSimulation:
    """A model that computes with quantized constants and, where they have encodings, quantized activations.

    Attributes:
        model: standard ONNX; graph inputs and outputs keep their names and order.
        taps: activation site -> the float tensors that enter it, each with the graph in which the site stands.
        results: activation site -> what its readers see.
        file: in which the weights of a large model lie while this exists; sessions share them.
    """

    model: ir.Model
    taps: dict[str, list[tuple[ir.Value, ir.Graph]]] = field(default_factory=dict)
    results: dict[str, list[ir.Value]] = field(default_factory=dict)
    file: WeightFile | None = None


def mark_sites(model: ir.Model, sites: Iterable[SitePlan], node_of: Mapping[str, ir.Node]) -> ir.Model:
    """A copy of ``model`` with a ``bitwright::Site`` marker at every site.

    A recurrent layer with sites inside its steps becomes the node of :mod:`bitwright.export.recurrent` that says so.

    Args:
        model: names of nodes and values are unique over all graphs; left as it is.
        sites: as :func:`bitwright.core.placement.place.place` gives them.
        node_of: operator -> its node in ``model``.
    """
    copy = copy_model(model)
    add_sites(copy, sites, {op: str(node.name) for op, node in node_of.items()})
    return copy


def add_sites(marked: ir.Model, sites: Iterable[SitePlan], node_of: Mapping[str, str]) -> None:
    """Put markers into a model in place, which may have others; ``node_of`` has the names of nodes by operator."""
    nodes = {node.name: node for node in all_nodes(marked.graph)}
    made = chain.from_iterable(node.outputs for node in nodes.values())
    given = chain.from_iterable(graph.inputs for graph in all_graphs(marked.graph))
    values = {value.name: value for value in chain(made, given)}
    names, outputs = Names(marked), Outputs(marked)
    inner: dict[ir.Node, list[str]] = {}
    for site in sites:
        node = nodes[node_of[site.op]]
        if site.inner is not None:
            inner.setdefault(node, []).append(f"{site.inner}={site.name}")
        elif site.role == "output":
            _mark_output(values[site.value], site.name, names, outputs)
        elif not _is_branching(node):
            _mark_input(node, site.port, site.name, names, site.spec.rotation)
        else:
            _mark_returned(values[site.value], site.name, names, outputs)
    for node in nodes.values():
        if node in inner or _is_batch_first(node):
            node.domain = DOMAIN
            node.attributes.add(ir.AttrStrings(INNER_SITES, inner.get(node, [])))
    for graph in all_graphs(marked.graph):
        graph.opset_imports[DOMAIN] = 1


def _is_branching(node: ir.Node) -> bool:
    return node.op_type == "If" and not node.domain


def _is_batch_first(node: ir.Node) -> bool:
    """Whether ``node`` is a recurrent layer of layout 1, for which ONNX Runtime has no kernels."""
    return is_layer(node) and node.attributes.get_int("layout", 0) == 1


def _mark_input(node: ir.Node, port: int, site: str, names: Names, rotation: int | None) -> None:
    value = node.inputs[port]
    assert value is not None and node.graph is not None, (site, port)
    if rotation is not None:
        value = _turned(value, node, rotation, names)
    marker = _marker(value, site, names)
    node.graph.insert_before(node, marker)
    result = marker.outputs[0]
    node.replace_input_with(port, result if rotation is None else _turned(result, node, rotation, names, back=True))


def _turned(value: ir.Value, reader: ir.Node, axis: int, names: Names, *, back: bool = False) -> ir.Value:
    """``value`` with its channels along ``axis`` multiplied by a rotation, or its transpose, in front of ``reader``."""
    assert value.shape is not None and value.dtype is not None and reader.graph is not None
    size = value.shape[axis]
    assert isinstance(size, int), (value.name, axis)
    R = random_rotation(size).astype(value.dtype.numpy())
    tensor = ir.Tensor(R.T.copy() if back == (axis == -1) else R, name=names.value(f"{value.name}_rotation"))
    held = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    reader.graph.register_initializer(held)
    product = ir.Node(
        "", "MatMul", [value, held] if axis == -1 else [held, value], name=names.node(f"{value.name}/rotation")
    )
    result = product.outputs[0]
    result.name, result.type, result.shape = names.value(f"{value.name}_rotated"), value.type, value.shape
    reader.graph.insert_before(reader, product)
    return result


def _mark_returned(value: ir.Value, site: str, names: Names, outputs: Outputs) -> None:
    """Mark the result of an If's branch, for the reader of the If alone."""
    assert value.graph is not None
    marker = _marker(value, site, names)
    value.graph.append(marker)
    name = str(value.name)
    outputs.replace(value, marker.outputs[0])
    value.name = names.value(f"{name}_raw")


def _mark_output(value: ir.Value, site: str, names: Names, outputs: Outputs) -> None:
    node, graph = value.producer(), value.graph
    marker = _marker(value, site, names)
    if node is not None and node.graph is not None:
        node.graph.insert_after(node, marker)
    else:  # what enters a body
        assert graph is not None
        graph.insert_before(next(iter(graph)), marker)
    move_uses(value, marker.outputs[0], keep={marker})
    if value.is_graph_output():
        name = str(value.name)
        outputs.replace(value, marker.outputs[0])
        value.name = names.value(f"{name}_raw")


def _marker(value: ir.Value, site: str, names: Names) -> ir.Node:
    name = names.node(f"{site}/site")
    marker = ir.Node(DOMAIN, OP_TYPE, [value], [ir.AttrString(ATTRIBUTE, site)], name=name)
    marker.outputs[0].name = names.value(f"{value.name}_site")
    marker.outputs[0].type, marker.outputs[0].shape = value.type, value.shape
    return marker


def marked_constants(marked: ir.Model) -> dict[str, NDArray[Any]]:
    """Site -> value, of every site that marks a constant (also one that is computed from constants).

    bfloat16 is given as float32. Large models are read lazily: an array that views a mapped file costs nothing yet.
    """
    known = find_constants(marked)
    found: dict[str, NDArray[Any]] = {}
    for node in site_nodes(marked):
        source = node.inputs[0]
        if source in known:
            array = known[source].numpy()
            found[site_of(node)] = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    return found


@collector_paused()
def simulation_model(
    marked: ir.Model, encodings: Mapping[str, Encoding], biases: Container[str] = (), file: WeightFile | None = None
) -> MarkedSimulation:
    """The model that computes the quantized results in float.

    Constants become their fake-quantized float values, and their originals are dropped. Activations pass
    QuantizeLinear and DequantizeLinear. A site without encoding lets its tensor through.

    Args:
        marked: from :func:`mark_sites`; left as it is.
        encodings: site -> encoding.
        biases: sites of biases, whose int32 codes are rounded to float32 as DequantizeLinear does.
        file: with the quantized weights of earlier models made of ``marked``; one of its own by default, if it is large.

    Raises:
        EncodingsError, ExportError: an encoding does not fit its tensor.
    """
    copy = copy_model(expand_recurrent(marked))
    builder, constants = Builder(copy), find_constants(copy)
    simulation = MarkedSimulation(copy)
    file = file_for(marked, file)
    folded: dict[tuple[ir.Value, Encoding], ir.Value] = {}
    for node in site_nodes(copy):
        site, source = site_of(node), node.inputs[0]
        assert source is not None and node.graph is not None
        encoding = encodings.get(site)
        if source not in constants:
            simulation.taps.setdefault(site, []).append((source, node.graph))
            result = _write_site(node, source, encoding, site, builder)
            simulation.results.setdefault(site, []).append(result)
            continue
        if encoding is not None:
            key = (source, encoding)
            if key not in folded:
                name = f"{source.name}_simulated"
                tensor = _simulated(name, constants[source], encoding, bias=site in biases, file=file)
                folded[key] = builder.initializer_of(name, tensor)
            node.replace_input_with(0, folded[key])
        bypass(node, builder.outputs)
    for source in dict.fromkeys(source for source, _ in folded):
        remove_unread(source)
    guard_outputs(builder, all_nodes(copy.graph))
    close(copy)
    return simulation if file is None else _kept_in_file(simulation, file)


def _write_site(node: ir.Node, source: ir.Value, encoding: Encoding | None, site: str, builder: Builder) -> ir.Value:
    """Replace a marker by a quantizer; returns the value for its readers."""
    if encoding is not None:
        return write_activation(builder, node, encoding, unsigned(encoding), site).value
    result = node.outputs[0]
    bypass(node, builder.outputs)
    return source if node.graph is None else result  # it stays where the name of an output needs a node


def _kept_in_file(simulation: MarkedSimulation, file: WeightFile) -> MarkedSimulation:
    """Move large unquantized weights into the file of the others, since a session reads from one folder."""
    for value, tensor in weights(simulation.model):
        there = isinstance(tensor, ir.ExternalTensor) and tensor.base_dir == file.folder.name
        if not there and tensor.dtype != ir.DataType.STRING:
            value.const_value = file.tensor(str(value.name), tensor, None, False, partial(_unchanged, tensor))
    return replace(simulation, file=file)


def _unchanged(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return tensor


def _simulated(
    name: str, tensor: ir.TensorProtocol, encoding: Encoding, *, bias: bool, file: WeightFile | None
) -> ir.Tensor | ir.ExternalTensor:
    """Quantize a constant, into a ``file`` so that the weights of a large model are never all in memory."""

    def fold() -> ir.Tensor:
        array = folded_constant(tensor.numpy(), encoding, bias=bias)
        let_go(tensor)
        return ir.Tensor(array, dtype=tensor.dtype)

    return fold() if file is None else file.tensor(name, tensor, encoding, bias, fold)


def folded_constant(array: NDArray[Any], encoding: Encoding, *, bias: bool) -> NDArray[Any]:
    """The quantized value of a constant in a simulation; its dtype stays.

    Args:
        array: the constant.
        encoding: its grid.
        bias: whether int32 codes are rounded to float32 as DequantizeLinear does.
    """
    if bias and encoding.format == IntFormat(32):
        return fake_quantize_bias(array, encoding).astype(array.dtype)
    wide = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    result: NDArray[Any] = np.asarray(fake_quantize(wide, encoding)).astype(array.dtype, copy=False)
    return result
