"""ONNX Runtime on one CPU thread in the two modes that verification compares, and files that it computes differently as a whole.

Some files give other results as a whole than with free axes fixed, or with every quantized value observed
(:func:`computed_otherwise`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.cut import MOVES
from bitwright.errors import ExportError
from bitwright.export.files.atomic import temporary_room
from bitwright.export.files.onnx_file import all_nodes, array_of, load
from bitwright.progress import collector_paused
from bitwright.runtimes.adapters import open_file
from bitwright.runtimes.onnxruntime import FLOAT_KERNELS, new_session, run_named, session_options

Array = NDArray[Any]

# an output this near to the simulation, in dB, is not looked at; one that comes so much nearer was computed otherwise: codes
# that round differently move both alike
_NEAR, _NEARER = 60.0, 20.0

Edit = Callable[[ir.Model], None]


@dataclass(frozen=True)
class Otherwise:
    """An output that a runtime computes differently in the whole file than operator by operator.

    Attributes:
        runtime: which.
        output: its name.
        whole: signal-to-noise ratio of the file to the simulation, in dB.
        other: the same with the lengths of the input in place of free axes; or with every quantized value an output.
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
    """Remedy text: how to fix the inputs to ``shapes``."""
    given = {name: list(shape) for name, shape in shapes.items()}
    return (
        f"fix the lengths of the inputs in the session (OpenVINO: model.reshape({given}) before compile_model), or write the "
        f"file so: dynamic_batch=False, or an ONNX model without free axes"
    )


def free_inputs(model: ir.Model) -> list[ir.Value]:
    """Inputs with an axis of any length."""
    return [value for value in model.graph.inputs if value.shape is None or not value.shape.is_static()]


def fix_lengths(model: ir.Model, feeds: Mapping[str, Array]) -> None:
    """Set the input shapes to those of the feeds, and drop the stored shapes of later tensors."""
    for value in free_inputs(model):
        if value.name is not None and value.name in feeds:
            value.shape = ir.Shape(feeds[value.name].shape)
    for node in model.graph:
        for made in node.outputs:
            made.shape = None


def observe(model: ir.Model) -> None:
    """Add every quantized activation to the outputs.

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
    """The first output that a runtime computes differently with free axes, or when no inner value is an output.

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


Mode = Literal["float", "integer"]
MODES: tuple[Mode, ...] = ("float", "integer")

# part of the integer kernel in front of them, or none
_AFTER = ("QuantizeLinear", "DequantizeLinear", "Relu", "Clip")
_ENTRIES: dict[Mode, dict[str, str]] = {"float": FLOAT_KERNELS, "integer": {}}
#: of a session whose integer sums are exact on any CPU. On x86 without VNNI it makes int8 weights uint8 when the file loads;
#: kernels of two unsigned factors add their products in 32 bits. Other CPUs ignore it. ONNX Runtime 1.31 refuses models of which
#: two products share a weight or its zero point (it adds the uint8 copy twice), or that have int8 weights with a scale per
#: block (it gives them a zero point of one value).
EXACT_SUMS = {"session.x64quantprecision": "1"}
# Bytes of weights beyond which a model goes through a file: a message takes three copies of them, and six times as long.
_ONE_MESSAGE_LIMIT = 1 << 22


def run_model(
    model: ir.Model,
    feeds: Mapping[str, Array],
    mode: Mode,
    types: dict[str, str] | None = None,
    *,
    entries: Mapping[str, str] | None = None,
    optimized: bool = True,
    path: Path | None = None,
) -> dict[str, Array]:
    """Graph outputs of ``model`` by name.

    Args:
        model: any model.
        feeds: by name of graph input; what the model does not read is left out.
        mode: ``"float"`` keeps QuantizeLinear and DequantizeLinear as they are; ``"integer"`` is the default.
        types: filled with what :func:`optimized_types` tells, at no further session.
        entries: settings of the session beside those of ``mode``.
        optimized: with the runtime's changes of the graph; without them every operator runs as it stands.
        path: of a file that holds ``model`` as it is, which is then not written for the runtime.

    Raises:
        One of :func:`refusals`: the runtime cannot load or run the model.
    """
    entries = entries or {}
    if entries.keys() >= EXACT_SUMS.keys() and not _takes_exact_sums(model):
        model, path = _separated(model), None
    return run_named(_session(model, mode, types, entries, optimized, path), feeds)


def run_in(
    runtime: str,
    model: ir.Model,
    feeds: Mapping[str, Array],
    mode: Mode,
    types: dict[str, str] | None = None,
    *,
    entries: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> dict[str, Array]:
    """:func:`run_model`, whose mode ``"integer"`` is what ``runtime`` does by default.

    Float kernels are ONNX Runtime's in any case: they tell what the file says, and ``runtime`` what becomes of it. ``entries``
    and ``path`` are for ONNX Runtime alone.

    Raises:
        ExportError: ``runtime`` refuses the model.
        One of :func:`refusals`: ONNX Runtime does.
    """
    if runtime == "onnxruntime" or mode == "float":
        return run_model(model, feeds, mode, types, entries=entries, path=path)
    with temporary_room(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        ir.save(model, path)
        try:
            session = open_file(runtime, path)
            if types is not None:
                types.update(_kernels_by_tensor(model, session.kernels))
            return session.run(feeds)
        except ExportError as error:  # of a file that only this function knows
            site = error.site.removeprefix(str(path)).removeprefix(": ") or "the model"
            raise ExportError(site, error.problem, error.remedy) from error


def _kernels_by_tensor(model: ir.Model, kernels: Mapping[str, str]) -> dict[str, str]:
    """Tensor -> kernel, from operator -> kernel; what a runtime computes in floats is ``float``."""
    found: dict[str, str] = {}
    for node in model.graph:
        kernel = kernels.get(str(node.name), "float")
        if not kernel.endswith(("i8", "u8")) or kernel.startswith("FakeQuantize"):
            source = node.inputs[0] if node.op_type in _AFTER and node.inputs else None
            kernel = "float" if source is None else found.get(str(source.name), "float")
        found.update((str(value.name), kernel) for value in node.outputs)
    return found


def optimized_types(model: ir.Model) -> dict[str, str]:
    """Tensor name -> type of the operator that makes it after the runtime's default optimisation.

    A Transpose or Reshape that the runtime put after a kernel, of another layout or of two axes, counts as that kernel.
    """
    types: dict[str, str] = {}
    _session(model, "integer", types, {}, True)
    return types


def offers_exact_sums(model: ir.Model) -> bool:
    """Whether ONNX Runtime runs ``model`` as it stands with :data:`EXACT_SUMS`, and all its sums are exact then.

    Version 1.31 leaves weights that a body of a Loop, Scan or If reads as they are: int8 ones, that is.
    """
    in_bodies = any(node.graph is not model.graph and _is_int8(node) for node, _ in _dequantized_codes(model))
    return not in_bodies and _takes_exact_sums(model)


def _takes_exact_sums(model: ir.Model) -> bool:
    return not _shared(model) and not any(_per_block(node) for node, _ in _dequantized_codes(model))


def _per_block(node: ir.Node) -> bool:
    return _is_int8(node) and node.attributes.get_int("block_size", 0) > 0


def _is_int8(node: ir.Node) -> bool:
    return node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.INT8


def _dequantized_codes(model: ir.Model) -> Iterator[tuple[ir.Node, set[ir.Value]]]:
    """``(DequantizeLinear, its codes and zero points)`` where these are initializers."""
    for node in all_nodes(model.graph):
        if node.op_type == "DequantizeLinear" and node.inputs[0] is not None and node.inputs[0].is_initializer():
            yield node, {value for i, value in enumerate(node.inputs) if i != 1 and value is not None}


def _shared(model: ir.Model) -> list[tuple[ir.Node, list[Any]]]:
    """``(DequantizeLinear of codes, its readers)`` except for the first reader of every code and zero point."""
    found = []
    seen: set[ir.Value] = set()
    for node, constants in _dequantized_codes(model):
        readers = [*node.outputs[0].uses()]
        if readers:
            found.append((node, readers if constants & seen else readers[1:]))
            seen |= constants
    return [(node, readers) for node, readers in found if readers]


def _separated(model: ir.Model) -> ir.Model:
    """A copy in which every reader of a dequantized constant has constants of its own, and those per block are uint8."""
    copy = model.clone()
    for node, _ in [*_dequantized_codes(copy)]:
        if _per_block(node):
            _become_unsigned(copy.graph, node)
    for node, readers in _shared(copy):
        made, graph = node.outputs[0], node.graph
        assert graph is not None
        for k, (reader, i) in enumerate(readers):
            inputs = [_own(copy.graph, value, f"{made.name}/{k}") for value in node.inputs]
            name = f"{node.name}/{k}"
            out = ir.Value(name=f"{made.name}/{k}", type=made.type, shape=made.shape)
            own = ir.Node("", node.op_type, inputs, [*node.attributes.values()], outputs=[out], name=name)
            graph.insert_after(node, own)
            reader.replace_input_with(i, out)
        if not made.uses() and not made.is_graph_output():
            graph.remove(node, safe=True)
    return copy


def _become_unsigned(graph: ir.Graph, node: ir.Node) -> None:
    """Codes of int8 and their zero points 128 higher, as uint8: the same values."""
    codes, scale, zero = (*node.inputs, None)[:3]
    for i, value in ((0, codes), (2, zero)):
        shape = scale if value is None else value  # no zero point is one of 0 per scale
        assert shape is not None and shape.const_value is not None
        held = np.zeros(shape.const_value.shape.numpy(), np.int8) if value is None else np.asarray(array_of(value))
        name = f"{node.outputs[0].name}/unsigned/{i}"
        tensor = ir.tensor((held.astype(np.int16) + 128).astype(np.uint8), name=name)
        own = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(held.shape), const_value=tensor)
        graph.register_initializer(own)
        node.resize_inputs(max(len(node.inputs), i + 1))
        node.replace_input_with(i, own)


def _own(graph: ir.Graph, value: ir.Value | None, reader: str) -> ir.Value | None:
    if value is None or not value.is_initializer():
        return value
    own = ir.Value(name=f"{reader}/{value.name}", type=value.type, shape=value.shape, const_value=value.const_value)
    graph.register_initializer(own)
    return own


def _session(
    model: ir.Model,
    mode: Mode,
    types: dict[str, str] | None,
    entries: Mapping[str, str],
    optimized: bool,
    path: Path | None = None,
) -> Any:
    with temporary_room(), tempfile.TemporaryDirectory() as folder:
        kept = None if types is None else Path(folder, "optimized.onnx")
        options = session_options(entries={**_ENTRIES[mode], **entries}, optimized=optimized, kept=kept)
        session = new_session(path or _source(model, Path(folder, "model.onnx")), options, model=model)
        if types is not None and kept is not None:
            types.update(_types(load(kept)))
    return session


@collector_paused()
def _source(model: ir.Model, path: Path) -> bytes | str:
    """The model as one message, or a file for what a message cannot hold: large and external tensors."""
    tensors = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    external = any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors)
    if not external and sum(tensor.nbytes for tensor in tensors) < _ONE_MESSAGE_LIMIT:
        return bytes(ir.to_proto(model).SerializeToString())
    ir.save(model, path, external_data=f"{path.name}.data")
    return str(path)


def _types(optimized: ir.Model) -> dict[str, str]:
    types: dict[str, str] = {}
    for node in all_nodes(optimized.graph):
        source = node.inputs[0] if node.op_type in MOVES else None
        kind = node.op_type if source is None else types.get(str(source.name), node.op_type)
        kind = node.op_type if kind in ("QuantizeLinear", "DequantizeLinear") else kind
        types.update((str(value.name), kind) for value in node.outputs)
    return types
