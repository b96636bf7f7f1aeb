"""Reading a model into the form the toolkit works on: a private copy whose names are unique and whose shapes are
known.

What is done, in this order; none of it changes the function, the inputs, the outputs or their names:

1. initializers that are listed as inputs too, also of a body, become plain initializers (noted, because they can no longer
   be fed), and the IR version becomes one in which they need not be listed;
2. functions of the model are inlined, and opset 7 becomes 8, in which every operator of it means the same;
3. ``Constant`` nodes become initializers;
4. names of nodes, and of values inside the bodies of If, Loop and Scan, become unique;
   operators that ONNX Runtime's optimizer wrote become those of the standard;
5. nodes are put into execution order where they are not;
6. bidirectional RNN, GRU and LSTM nodes become one node per direction;
7. what no iteration of a Loop or Scan changes is read from outside its body;
8. shapes and types are inferred;
9. ``CastLike`` becomes ``Cast`` where the type is known, and stored biases of ``Gemm`` become vectors that are added once;
10. initializers of bodies move to the main graph.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass, LiftSubgraphInitializersToMainGraphPass

from bitwright.core.graph.operators import is_neutral
from bitwright.errors import ModelError, first_few
from bitwright.export.files.atomic import settle, temporary_room
from bitwright.export.files.onnx_file import (
    all_graphs,
    all_nodes,
    checked_on_failure,
    from_proto,
    graphs_of,
    has_map,
    is_tensor,
    note_type,
    write_elements,
)
from bitwright.export.qdq.markers import DOMAIN as MARKER_DOMAIN
from bitwright.onnx.model.integer_operators import write_as_qdq
from bitwright.onnx.model.rewrites import (
    drop_unchanged_states,
    drop_unread_masks,
    split_directions,
    undo_optimizations,
    write_plain_biases,
)
from bitwright.onnx.model.session import open_session, weights
from bitwright.onnx.model.untrusted import (
    check_external_data,
    check_lengths,
    check_names,
    check_nodes,
    check_tensors,
    graph_protos,
    infer_past_wrong_shapes,
    read_proto,
    tensor_attributes,
)
from bitwright.runtimes.onnxruntime import DOMAINS

Source = str | os.PathLike[str] | onnx.ModelProto | ir.Model

#: lowest opset that ONNX Runtime has kernels for
LOWEST_OPSET = 7
# the next one differs only in that Max, Min, Mean and Sum broadcast and MaxPool may return indices
_NEXT_OPSET = 8
# ONNX Runtime 1.31 reads files up to this IR version; the number says how the file is laid out, not what it computes
_MOST_IR = 13
# from which on an initializer need not be an input; before, ONNX Runtime refuses one that is not and that nothing reads
_LEAST_IR = 4
_STANDARD = ("", "ai.onnx")
_TENSOR = re.compile(r"tensor\((\w+)\)")  # how ONNX Runtime writes types
_SMALL = 1024  # bytes; larger initializers cannot hold a shape and are left out of shape inference
_HELD = 1 << 26  # bytes of weights inside a file up to which they are held in memory
_ALIGNED = 64  # bytes
_WHOLE_BYTES = frozenset(
    dtype for dtype in ir.DataType if dtype not in (ir.DataType.UNDEFINED, ir.DataType.STRING) and dtype.bitwidth >= 8
)  # narrower ones take more room as arrays


@dataclass(frozen=True)
class Loaded:
    """An ONNX model as :func:`load_model` read and normalised it.

    Attributes:
        model: private copy, normalised as the module says; external data is read when it is asked for.
        path: the file it came from, if it came from one.
        opset: version of the standard operators.
        notes: what was normalised, and what a user should know about the model, one sentence each.
        inputs: names of all inputs of the original, initializers that it lists as inputs too included, in their order.
    """

    model: ir.Model
    path: Path | None
    opset: int
    notes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


def load_model(model: Source) -> Loaded:
    """A private, normalised copy of a model.

    Args:
        model: path of a ``.onnx`` file, also one with external data or above 2 GB; or a proto; or an ``onnx_ir``
            model. It is left as it is. External data of a proto is looked for in the working directory.

    Raises:
        ModelError: the file is missing, is not an ONNX model or is truncated; external data is missing; the opset is below
            7 or not known yet; an output is not a tensor; a name is given to two values, is read but made by nothing, or
            depends on itself.
    """
    path = Path(model) if isinstance(model, (str, os.PathLike)) else None
    with checked_on_failure(model, "model" if path is None else str(path)):
        return _load(model, path)


def _load(model: Source, path: Path | None) -> Loaded:
    copy = _read(path) if path is not None else _private(model)
    site = str(path) if path is not None else copy.graph.name or "model"
    opset = _check_opset(copy, site)
    check_external_data(copy, path)
    _check_interface(copy, site)
    notes: list[str] = []
    inputs = tuple(str(value.name) for value in copy.graph.inputs)
    _drop_initializers_from_inputs(copy, notes)
    check_nodes(copy, opset)
    copy = _inline(copy, notes)
    drop_unread_masks(copy)
    if opset < _NEXT_OPSET:
        opset = _NEXT_OPSET
        stamp_opset(copy, opset)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(copy)
    _name_uniquely(copy, notes)
    notes += undo_optimizations(copy, opset, clone_model)
    _order(copy, site, notes)
    notes += write_as_qdq(copy)
    _split_directions(copy, notes)
    drop_unchanged_states(copy)
    _put_neutral_numbers_second(copy)
    wrong = infer_shapes(copy)
    _ask_types(copy)
    _type_states(copy)
    if wrong:
        some = first_few(sorted(wrong))
        notes.append(f"shapes that the model states and its operators contradict are ignored: {some}")
    _name_types(copy)
    write_plain_biases(copy)
    LiftSubgraphInitializersToMainGraphPass()(copy)
    notes += _foreign_domains(copy)
    if copy.ir_version > _MOST_IR:
        notes.append(f"IR version {copy.ir_version} was lowered to {_MOST_IR}, the newest that ONNX Runtime reads")
        copy.ir_version = _MOST_IR
    return Loaded(copy, path, opset, tuple(notes), inputs)


# ------------------------------------------------------------------------------------------------ reading


def _read(path: Path) -> ir.Model:
    settle(path.parent)  # a model and its external data are a pair
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ModelError(str(path), f"the model file {problem}", "pass the path of an .onnx file")
    proto = read_proto(path)
    if not proto.ir_version or not (proto.graph.node or proto.graph.output):
        raise ModelError(
            str(path), f"it holds no ONNX graph ({path.stat().st_size} bytes)", "export or download the file again"
        )
    return _deserialize(proto, str(path), path.parent)


def _deserialize(proto: onnx.ModelProto, site: str, folder: Path | None) -> ir.Model:
    check_names(proto, site)
    check_tensors(proto)
    try:
        model = from_proto(proto)
    except (ir.serde.SerdeError, ValueError, TypeError) as error:
        raise _why_not_read(proto, site, error) from error
    if folder is not None:
        _detach(model)
        ir.external_data.set_base_dir(model.graph, folder)
        for graph in all_graphs(model.graph):
            ir.external_data.set_base_dir(graph, folder)
    return model


def _detach(model: ir.Model) -> None:
    """Copy large weights out of the message they were read from, so that it can be freed.

    A tensor of a message also copies its elements each time it is asked for them. Very large weights are mapped from a
    private copy, whose file has no name: the system takes their memory back while nothing reads them.

    Raises:
        ExportError: the temporary folder has no room for the copy.
    """
    found = [(value, tensor) for value, tensor in weights(model) if _is_of_a_message(tensor)]
    if sum(tensor.nbytes for _, tensor in found) <= _HELD:
        for value, tensor in found:
            value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
        return
    with temporary_room(), tempfile.TemporaryFile() as file:
        starts = []
        for _, tensor in found:
            file.write(b"\0" * (-file.tell() % _ALIGNED))
            starts.append(file.tell())
            write_elements(tensor, file)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for (value, tensor), start in zip(found, starts, strict=True):
        elements = np.frombuffer(mapped, np.uint8, tensor.nbytes, start).view(tensor.dtype.numpy())
        shape = tensor.shape.numpy()
        value.const_value = ir.Tensor(elements.reshape(shape), dtype=tensor.dtype, name=tensor.name)


def _is_of_a_message(tensor: ir.TensorProtocol) -> bool:
    return isinstance(tensor, ir.TensorProtoTensor) and tensor.nbytes > _SMALL and tensor.dtype in _WHOLE_BYTES


def _why_not_read(proto: onnx.ModelProto, site: str, error: Exception) -> ModelError:
    counts = Counter(name for node in proto.graph.node for name in node.output if name)
    counts.update({i.name for i in proto.graph.input} | {i.name for i in proto.graph.initializer})
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        return _defined_twice(site, twice)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return ModelError(site, f"it cannot be read: {cause}", "check the file with onnx.checker.check_model")


def _defined_twice(site: str, name: str) -> ModelError:
    return ModelError(
        site,
        f"two values of one graph bear the name {name!r}",
        "give every node output its own name; a graph like this has no defined meaning",
    )


def _not_a_tensor(site: str, name: str, what: str) -> ModelError:
    return ModelError(
        site,
        f"its input {name!r} is not a tensor but a {what}, and data are arrays",
        "export the model with tensors as inputs, or cut it after the operators that read this one",
    )


def _private(model: object) -> ir.Model:
    """A copy whose names can be changed; the tensors of initializers are renamed with them."""
    if isinstance(model, onnx.ModelProto):
        copy = _deserialize(model, model.graph.name or "model", None)
    elif isinstance(model, ir.Model):
        copy = clone_model(model)
    else:
        what = type(model).__name__
        raise ModelError("model", f"a {what} is not a model", "pass a path, an onnx.ModelProto or an onnx_ir.Model")
    for value, tensor in weights(copy):
        if tensor.dtype != ir.DataType.STRING:
            value.const_value = own_tensor(tensor)
    for node in all_nodes(copy.graph):
        _own_attributes(node)
        for value in node.outputs:
            value.const_value = None
    return copy


def _own_attributes(node: ir.Node) -> None:
    """Let the tensors among the attributes of ``node`` have names of their own."""
    for name, tensor in tensor_attributes(node):
        if tensor.dtype != ir.DataType.STRING:
            node.attributes[name] = ir.AttrTensor(name, own_tensor(tensor))


def clone_model(model: ir.Model) -> ir.Model:
    """A copy that shares the tensors, also of a model that is not valid."""
    try:
        return model.clone()
    except (RuntimeError, ValueError):  # clone wants nodes in execution order; what is wrong otherwise is told later
        return from_proto(ir.to_proto(model))


def own_tensor(tensor: ir.TensorProtocol) -> ir.Tensor | ir.ExternalTensor:
    """A tensor with a new name that shares the elements."""
    if not isinstance(tensor, ir.ExternalTensor):
        return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
    own = ir.ExternalTensor(
        tensor.location, tensor.offset, tensor.length, tensor.dtype,
        shape=tensor.shape, name=tensor.name or "", base_dir=tensor.base_dir,
    )  # fmt: skip
    own.meta.update(tensor.meta)  # what keeps a temporary file
    return own


# ------------------------------------------------------------------------------------------------- checks


def _check_opset(model: ir.Model, site: str) -> int:
    opset = max((model.opset_imports[domain] for domain in _STANDARD if domain in model.opset_imports), default=0)
    if opset < LOWEST_OPSET:
        found = f"opset {opset}" if opset else "no opset of the standard operators"
        raise ModelError(
            site,
            f"it has {found}, and ONNX Runtime has no kernels below opset {LOWEST_OPSET}",
            "export the model again with opset 13 or newer, or convert it with onnx.version_converter",
        )
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        raise ModelError(
            site,
            f"it has opset {opset}, and the installed onnx {onnx.__version__} knows operators up to opset {newest}",
            "export the model again with opset 21, or install newer versions of onnx and onnxruntime",
        )
    return int(opset)


def stamp_opset(model: ir.Model, opset: int) -> None:
    """Set the opset of ``model`` without converting anything."""
    for imports in (model.opset_imports, *(graph.opset_imports for graph in all_graphs(model.graph))):
        for domain in _STANDARD:
            if domain in imports:
                imports[domain] = opset
    model.opset_imports.setdefault("", opset)


def _check_interface(model: ir.Model, site: str) -> None:
    graph = model.graph
    for value in graph.inputs:
        if has_map(value):
            raise _not_a_tensor(site, str(value.name), "map")
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise _not_a_tensor(site, str(value.name), type(value.type).__name__.removesuffix("Type").lower())
    if not graph.outputs:
        raise ModelError(site, "the graph has no outputs", "export the model again")
    for value in graph.outputs:
        if value.producer() is None and not value.is_graph_input() and not value.is_initializer():
            raise ModelError(
                site, f"no node makes the output {value.name!r}", "remove the output, or export the model again"
            )


def _foreign_domains(model: ir.Model) -> Iterator[str]:
    found: dict[str, dict[str, None]] = {}
    for node in all_nodes(model.graph):
        if node.domain not in DOMAINS and node.domain != MARKER_DOMAIN:
            found.setdefault(node.domain, {})[node.op_type] = None
    for domain, types in found.items():
        yield (
            f"operators of the domain {domain!r} ({', '.join(types)}) stay in float; ONNX Runtime runs them only "
            "with the library that implements them (register_operators)"
        )


# ---------------------------------------------------------------------------------------------- normal form


def _drop_initializers_from_inputs(model: ir.Model, notes: list[str]) -> None:
    dropped = [str(value.name) for value in model.graph.inputs if value.is_initializer()]
    model.ir_version = max(model.ir_version or 0, _LEAST_IR)
    for graph in chain(all_graphs(model.graph), *(function.subgraphs() for function in model.functions.values())):
        inputs = list(graph.inputs)
        graph.inputs.clear()
        graph.inputs.extend(value for value in inputs if not value.is_initializer())
        for value in filter(ir.Value.is_initializer, inputs):
            # one that nothing reads is not a tensor of the model any more; ONNX Runtime refuses such an initializer
            if not value.uses() and not value.is_graph_output():
                graph.initializers.pop(str(value.name))
    if dropped:
        notes.append(f"initializers that are listed as inputs too are constants from now on: {first_few(dropped)}")


def _inline(model: ir.Model, notes: list[str]) -> ir.Model:
    if not model.functions:
        return model
    names = ", ".join(sorted({f.name for f in model.functions.values()}))
    notes.append(f"functions of the model were inlined: {names}")
    interface = [[v.name for v in values] for values in (model.graph.inputs, model.graph.outputs)]
    inlined = InlinePass()(model).model
    assert interface == [[v.name for v in values] for values in (inlined.graph.inputs, inlined.graph.outputs)]
    return inlined


def _name_uniquely(model: ir.Model, notes: list[str]) -> None:
    """Give every node and value a name that is unique over all graphs.

    Names of the main graph win; a node without a name is called after its first output.
    """
    _name_values(model)
    nodes = {str(node.name): 0 for node in _nodes(model) if node.name}
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for node in _nodes(model):
        if not node.name:
            base = next((value.name for value in node.outputs if value.name), None)
            node.name = _free(base or node.op_type, nodes)
        elif node.name in seen:
            twice[node.name] = None
            node.name = _free(node.name, nodes)
        seen.add(str(node.name))
    if twice:
        notes.append(f"nodes that shared a name were told apart by a number: {first_few(list(twice))}")


def _name_values(model: ir.Model) -> None:
    taken = _main_names(model, model.graph.name or "model")
    bodies = [graph for graph in all_graphs(model.graph) if graph is not model.graph]
    for value in chain.from_iterable(map(_values_of, bodies)):
        value.name = _free(value.name or "value", taken)
    for value in _values_of(model.graph):
        if not value.name:
            value.name = _free("value", taken)
    for node in chain.from_iterable(all_graphs(model.graph)):
        for value in node.outputs:
            if not value.name and value.uses():
                value.name = _free(f"{node.name or node.op_type}_output", taken)


def _main_names(model: ir.Model, site: str) -> dict[str, int]:
    taken: dict[str, int] = {}
    for value in _values_of(model.graph):
        if value.name in taken:
            raise _defined_twice(site, str(value.name))
        if value.name:
            taken[value.name] = 0
    return taken


def _values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from (v for v in list(graph.initializers.values()) if not v.is_graph_input())
    for node in graph:
        yield from (value for value in node.outputs if value.name or value.is_graph_output())


def _free(base: str, taken: dict[str, int]) -> str:
    """The first free name of ``base``, ``base_1``, ``base_2``, ...; marks it as taken."""
    name = base
    while name in taken:
        taken[base] += 1
        name = f"{base}_{taken[base]}"
    taken[name] = 0
    return name


def _nodes(model: ir.Model) -> Iterable[ir.Node]:
    return all_nodes(model.graph)


def _order(model: ir.Model, site: str, notes: list[str]) -> None:
    """Sort nodes topologically; refuse values without a producer, and cycles."""
    place = {node: i for graph in all_graphs(model.graph) for i, node in enumerate(graph)}
    for graph in all_graphs(model.graph):
        _check_made(graph.outputs, f"graph {graph.name!r} returns", site)
    unsorted: dict[ir.Graph, None] = {}
    for node in _nodes(model):
        for maker in _makers(node, site):
            if maker.graph is node.graph and place[maker] >= place[node]:
                assert node.graph is not None
                unsorted[node.graph] = None
    for graph in unsorted:
        try:
            graph.sort()
        except ValueError as error:
            raise ModelError(
                site,
                f"its nodes form a circle, at {_in_a_circle(graph)}",
                "no value can depend on itself; use Loop or Scan for what is repeated",
            ) from error
    if unsorted:
        notes.append("nodes were put into execution order")


def _makers(node: ir.Node, site: str) -> Iterator[ir.Node]:
    """The nodes that make what ``node`` reads."""
    _check_made(node.inputs, f"node {node.name!r} ({node.op_type}) reads", site)
    makers = (value.producer() for value in node.inputs if value is not None)
    yield from (maker for maker in makers if maker is not None)


def _check_made(values: Iterable[ir.Value | None], reader: str, site: str) -> None:
    """Refuse values that are no inputs, have no initializers and are made by no node."""
    for value in values:
        if value is not None and not (value.is_graph_input() or value.is_initializer() or value.producer()):
            raise ModelError(
                site,
                f"{reader} {value.name!r}, which nothing makes",
                "export the model again; a node or an initializer is missing",
            )


def _split_directions(model: ir.Model, notes: list[str]) -> None:
    names = split_directions(model)
    if names:
        notes.append(f"bidirectional layers are a forward and a reverse one from now on: {first_few(names)}")


def _name_types(model: ir.Model) -> None:
    for node in _nodes(model):
        like = node.inputs[1] if node.op_type == "CastLike" and node.domain in _STANDARD else None
        if like is not None and like.dtype is not None:
            node.op_type = "Cast"
            node.resize_inputs(1)
            node.attributes.add(ir.AttrInt64("to", int(like.dtype)))


def _put_neutral_numbers_second(model: ir.Model) -> None:
    """Exchange the operands of ``1 * x`` and ``0 + x``, which pass on ``x`` as ``x * 1`` and ``x + 0`` do."""
    for node in _nodes(model):
        if node.op_type not in ("Mul", "Add") or node.domain not in _STANDARD or len(node.inputs) != 2:
            continue
        first, second = node.inputs
        tensor = None if first is None else first.const_value
        if second is None or second.const_value is not None or tensor is None or tensor.size != 1:
            continue
        if is_neutral(node.op_type, float(tensor.numpy().reshape(-1)[0])):
            node.replace_input_with(0, second)
            node.replace_input_with(1, first)


def _in_a_circle(graph: ir.Graph) -> str:
    """Name of a node in a cycle, found by topological sorting."""
    waits = {node: sum(maker.graph is graph for maker in set(node.predecessors())) for node in graph}
    ready = [node for node, count in waits.items() if not count]
    while ready:
        node = ready.pop()
        del waits[node]
        for reader in waits.keys() & set(node.successors()):
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    first = next(iter(waits), None)
    return "a node of a body" if first is None else f"node {first.name!r} ({first.op_type})"


# ------------------------------------------------------------------------------------------ shape inference


def infer_shapes(model: ir.Model) -> set[str]:
    """Set shapes and types on the values of ``model``, as far as ONNX shape inference knows them.

    Values are found by name, which must be unique over all graphs. Large initializers stay where they are: inference
    sees them as inputs, so that models above 2 GB work. Returns the names of values whose shapes were stated wrongly.
    """
    skeleton = _skeleton(model)
    check_lengths(skeleton)
    try:
        inferred, wrong = infer_past_wrong_shapes(skeleton)
    except (onnx.shape_inference.InferenceError, RuntimeError) as error:
        raise ModelError(
            model.graph.name or "model",
            f"its shapes contradict each other: {error}",
            "check the file with onnx.checker.check_model(path, full_check=True)",
        ) from error
    known = {
        info.name: info
        for graph in graph_protos((inferred.graph,))
        if isinstance(graph, onnx.GraphProto)
        for info in (*graph.value_info, *graph.output)
    }
    inputs = chain.from_iterable(graph.inputs for graph in all_graphs(model.graph) if graph is not model.graph)
    made = chain.from_iterable(node.outputs for node in chain.from_iterable(all_graphs(model.graph)))
    for value in chain(inputs, made):
        info = known.get(value.name or "")
        value.shape = None if value.name in wrong else value.shape
        if info is not None and info.type.WhichOneof("value") is not None:
            _note_inferred(value, info.type)
    return wrong


def _type_states(model: ir.Model) -> None:
    """Give the states of loops, which inference leaves without one, the types that they begin with: sequences are no tensors."""
    for node in all_nodes(model.graph):
        for body in graphs_of(node) if node.op_type == "Loop" else ():
            for inside, outside in zip(body.inputs[2:], node.inputs[2:], strict=False):
                if inside.type is None and outside is not None:
                    inside.type = outside.type


def _ask_types(model: ir.Model) -> None:
    """Set types and shapes that only ONNX Runtime infers: those of its own operators.

    A model that the runtime refuses, for one whose library of operators is missing, stays as it is: running it says why.
    """
    unknown = {str(v.name): v for v in _made_values(model) if v.name and v.type is None and not has_map(v)}
    if not unknown:
        return
    try:
        found = open_session(_showing(model, unknown), order="written").get_outputs()
    except ModelError:
        return
    for out in found:
        value, kind = unknown.get(out.name), _TENSOR.fullmatch(out.type)
        if value is not None and kind is not None:
            value.type = ir.TensorType(ir.DataType[kind[1].upper()])
            value.shape = ir.Shape(out.shape) if out.shape else None  # [] also where it is unknown
    infer_shapes(model)


def _showing(model: ir.Model, names: Collection[str]) -> ir.Model:
    """A copy of ``model`` that gives out what its nodes make under these names."""
    copy = clone_model(model)
    there = set(copy.graph.outputs)
    copy.graph.outputs.extend(v for v in _made_values(copy) if v.name in names and v not in there)
    return copy


def _made_values(model: ir.Model) -> Iterator[ir.Value]:
    """Names of all node outputs of the main graph."""
    return chain.from_iterable(node.outputs for node in model.graph)


def _note_inferred(value: ir.Value, kind: onnx.TypeProto) -> None:
    note_type(value, kind)
    shape = ir.serde.deserialize_type_proto_for_shape(kind) if is_tensor(value) else None
    if shape is not None:
        value.shape = shape


def _skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto without the data of large initializers; ``model`` is as before afterwards."""
    graph, inputs = model.graph, list(model.graph.inputs)
    large: dict[ir.Value, ir.TensorProtocol] = {}
    for value in list(graph.initializers.values()):
        if value.const_value is not None and value.const_value.nbytes > _SMALL:
            large[value] = value.const_value
    try:
        for value, tensor in large.items():
            graph.initializers.pop(str(value.name))
            value.const_value = None
            value.shape, value.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        graph.inputs.extend(large)
        return ir.to_proto(model)
    finally:
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        for value, tensor in large.items():
            value.const_value = tensor
            graph.initializers[str(value.name)] = value
