"""A calibrated simulation as a model that holds codes, and its files: ``packed.safetensors`` and ``packed.json``.

Two forms. *Modules*: linear layers, convolutions and embeddings of the model are replaced by layers of
:mod:`~bitwright.packed.layers`; it needs the class of the model, keeps its ``forward`` and ``generate``, and is taken where only
weights and inputs of such layers are quantized. *Graph*: the program of ``torch.export`` with these layers and a quantizer at
every other site; the files hold it whole.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn  # noqa: TID251, the language of programs that torch.export returns

from bitwright.core.files import read_document
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT32_SCALE, IntFormat, parse_format
from bitwright.core.numerics.granularity import PerTensor
from bitwright.core.numerics.serialize import (
    encoding_from_json,
    encoding_to_json,
    granularity_from_json,
    granularity_to_json,
)
from bitwright.errors import CalibrationError, ConfigError, ExportError, ModelError, checks_arguments
from bitwright.export.files.atomic import atomic_files, settle
from bitwright.llm.coded import CodedEmbedding, StoredWeight
from bitwright.llm.packed import FloatWeight, PackedWeight, halves, packed_weights, unhalved
from bitwright.packed.layers import Grid, PackedLayer, Parts, layer_of
from bitwright.packed.program import from_json, nodes_of, to_json
from bitwright.tables import Tabular, text_table

TENSORS, DOCUMENT = "packed.safetensors", "packed.json"
Form = Literal["auto", "modules", "graph"]
_MOST_BYTES = 64 << 20  # of the document
_VERSION = 2  # of the files
_LAYERS: dict[type[nn.Module], str] = {
    nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d",
}  # fmt: skip
_ATEN = torch.ops.aten
_CALLS = {
    _ATEN.linear.default: "linear", _ATEN.conv1d.default: "conv1d", _ATEN.conv2d.default: "conv2d",
    _ATEN.conv3d.default: "conv3d", _ATEN.conv1d.padding: "conv1d", _ATEN.conv2d.padding: "conv2d",
    _ATEN.conv3d.padding: "conv3d",
}  # fmt: skip


@dataclass(frozen=True)
class PackedRow:
    """One quantized weight of a packed model.

    Attributes:
        layer: where it stands.
        weight: its format.
        kernel: what computes with it: ``int8``, ``int8 weights``, ``int4 weights``, ``fp8``, ``rows`` (of a table), or
            ``dequantized``.
        bytes: of codes, scales and zero points in memory.
        float_bytes: of the weight in the float model.
        reason: why no kernel of torch computes with the codes.
    """

    layer: str
    weight: str
    kernel: str
    bytes: int
    float_bytes: int
    reason: str = ""


@dataclass(frozen=True)
class Packed(Tabular):
    """Result of :func:`pack` and :func:`load_packed`.

    Attributes:
        model: the module, in evaluation.
        layers: a row per quantized weight.
        form: ``modules`` or ``graph``.
        path: folder of the files, ``None`` without one.
    """

    _rows: ClassVar[str] = "layers"
    _also: ClassVar[tuple[str, ...]] = ("bytes", "float_bytes")

    model: nn.Module = field(repr=False)
    layers: tuple[PackedRow, ...]
    form: str
    path: Path | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all tensors of the packed model."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _held(self.model))

    @property
    def float_bytes(self) -> int:
        """Bytes of its quantized weights in the float model."""
        return sum(row.float_bytes for row in self.layers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model without gradients."""
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def __str__(self) -> str:
        kernels = sum(not row.reason for row in self.layers)
        codes = sum(row.bytes for row in self.layers)
        title = f"{kernels} of {len(self.layers)} weights in torch's kernels; {codes:,} bytes of codes for {self.float_bytes:,}"
        rows = [(r.layer, r.weight, r.kernel, f"{r.bytes:,}", r.reason) for r in self.layers]
        return f"{title}\n\n{text_table(('layer', 'weight', 'kernel', 'bytes', 'why no kernel'), rows, right=(3,))}"

    def to_dict(self) -> dict[str, Any]:
        """The rows with their sums."""
        path = None if self.path is None else str(self.path)
        same = {"bytes": self.bytes, "float_bytes": self.float_bytes, "form": self.form, "path": path}
        return {"layers": [vars(row) for row in self.layers], **same}


def _held(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@dataclass
class _Contents:
    """The contents of the files of a packed model.

    Attributes:
        weights: name -> quantized weight.
        tensors: name -> float parameter or buffer, or constant of a program.
        layers: name -> ``call``, ``weight``, ``bias`` (name of a tensor), ``input`` (name of a grid), ``options``.
        tables: place of an embedding -> name of its weight; of a program, place of a weight that an operator reads whole.
        grids: name -> quantizer of an activation.
        program: see :mod:`bitwright.packed.program`; ``None`` where the model's own forward is kept.
        outputs: how a program returns its tensors: ``tensor``, ``tuple``, or names.
        dtype: of the model.
    """

    weights: dict[str, PackedWeight] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    grids: dict[str, Encoding] = field(default_factory=dict)
    program: dict[str, Any] | None = None
    outputs: Any = "tensor"
    dtype: str = "float32"


@checks_arguments
def pack(
    sim: Any,
    folder: str | Path | None = None,
    *,
    form: Form = "auto",
    dtype: torch.dtype | None = None,
    batch: Any = None,
    dynamic_batch: bool = True,
) -> Packed:
    """Convert a calibrated simulation to a PyTorch model that holds codes and computes with torch's kernels for them.

    Linear layers: int8 with calibrated or dynamic inputs, int8 and int4 weights with float inputs of half precision, fp8.
    Convolutions: int8 with calibrated inputs. Everything else dequantizes its codes in every call; the result says which, and
    why. The model runs under ``torch.compile``.

    Args:
        sim: calibrated :class:`bitwright.torch.QuantizationSimModel`, left as it is.
        folder: also write the files that :func:`load_packed` reads.
        form: ``modules`` replaces layers of a copy of the model; ``graph`` is a program with every quantizer; ``auto`` is the
            first where it has all quantizers.
        dtype: of what is not quantized, and that layers without quantized inputs compute in; of the model by default.
        batch: input that a graph is captured on; the simulation's example by default.
        dynamic_batch: leave the first axis of a graph free, where its example has more than one sample.

    Raises:
        CalibrationError: the simulation has no encodings yet.
        ConfigError: ``form="modules"``, and other activations than inputs of layers are quantized; or a quantized weight is
            computed of several parameters.
        ExportError: a graph cannot be captured, steps of recurrent layers are quantized, or the folder cannot be written.

    Example:
        >>> import torch, bitwright.torch
        >>> sim = bitwright.torch.QuantizationSimModel(torch.nn.Linear(64, 32), torch.ones(1, 64), preset="w8a8_dynamic")
        >>> sim.compute_encodings([torch.ones(1, 64)])
        >>> [(row.layer, row.bytes, row.float_bytes) for row in bitwright.torch.pack(sim).layers]
        [('', 2304, 8192)]
    """
    if form not in ("auto", "modules", "graph"):
        raise ConfigError("form", f"{form!r:.40} is not a form", "use auto, modules or graph")
    if not sim.calibrated:
        raise CalibrationError(
            "pack", "the simulation has no encodings yet", "call sim.compute_encodings(batches) first"
        )
    _refuse_steps(sim)
    elsewhere = _quantized_elsewhere(sim)
    if form == "modules" and elsewhere:
        raise ConfigError(
            elsewhere,
            "it is quantized, and is not the input of a linear layer or convolution of its own module alone",
            "use form='graph', or quantize inputs of layers alone (preset='w8a8_dynamic')",
        )
    if form == "modules" or (form == "auto" and not elsewhere):
        contents = _of_modules(sim)
    else:
        contents = _of_graph(sim, batch, dynamic_batch)
    model = None if contents.program is not None else sim._float_copy()
    if folder is not None:
        _write(contents, Path(folder))
    return _built(contents, model, dtype, None if folder is None else Path(folder))


@checks_arguments
def load_packed(folder: str | Path, model: Any = None, *, dtype: torch.dtype | None = None) -> Packed:
    """Load a packed model from a folder, without its simulation.

    Args:
        folder: that :func:`pack` wrote.
        model: a model of the same class, of any weights, whose layers are replaced in a copy; not needed for a graph.
        dtype: as in :func:`pack`.

    Raises:
        ModelError: the folder holds no packed model, is damaged, or was made of a model with other parameters.
        ConfigError: the files need ``model``.
    """
    contents = _read(Path(folder))
    if contents.program is None and not isinstance(model, nn.Module):
        raise ConfigError(
            "model",
            f"{folder} holds weights, and not the program that computes with them",
            "give a model of the same class",
        )
    return _built(contents, copy.deepcopy(model) if contents.program is None else None, dtype, Path(folder))


# what a simulation has


def _refuse_steps(sim: Any) -> None:
    name = next((name for name, site in sim.quantizers.items() if site.inner and site.enabled), None)
    if name is not None:
        raise ExportError(
            name,
            "it is quantized inside the steps of a recurrent layer, for which torch has no kernel",
            "leave the layer in float with Rule(..., quantized=False), or export ONNX",
        )


def _activations(sim: Any) -> list[Any]:
    """Enabled sites of activations."""
    return [site for site in sim.quantizers.values() if site.enabled and site.role not in ("weight", "bias")]


def _layer_ops(sim: Any) -> dict[str, str]:
    """Operator -> path of the module whose weight it reads, of layers that have a packed form."""
    found = {}
    for op in sim.graph.ops:
        value = None if len(op.inputs) < 2 or op.inputs[1] is None else sim.graph.values[op.inputs[1]]
        path, _, last = (value.param or "").rpartition(".") if value is not None else ("", "", "")
        if last == "weight" and _call_of(sim.model.get_submodule(path)):
            found[op.name] = path
    return found


def _call_of(module: nn.Module) -> str:
    """``linear``, ``conv2d``, ...; "" for modules without a packed form."""
    call = _LAYERS.get(type(module), "")
    return "" if call != "linear" and call and _padding(module) is None else call


def _padding(module: nn.Module) -> list[int] | None:
    """Zeros on either side of each axis; ``None`` where the sides differ, or others than zeros are added."""
    found: Any = module.padding
    kernel, dilation = (getattr(module, name) for name in ("kernel_size", "dilation"))
    if module.padding_mode != "zeros":
        return None
    if found == "valid":
        return [0] * len(kernel)
    return _same_padding(kernel, dilation) if found == "same" else list(found)


def _same_padding(kernel: Iterable[int], dilation: Iterable[int]) -> list[int] | None:
    """Zeros on either side of each axis that keep its length; ``None`` where the sides differ."""
    total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return None if any(n % 2 for n in total) else [n // 2 for n in total]


def _quantized_elsewhere(sim: Any) -> str:
    """An activation site with readers other than inputs of packed layers; "" where there is none."""
    layers, outputs = _layer_ops(sim), set(sim.graph.outputs)
    for site in _activations(sim):
        named = site.role == "input"
        readers = [(site.op, site.port)] if named else [(op.name, port) for op, port in sim.graph.consumers(site.value)]
        returned = not named and site.value in outputs
        if returned or not readers or any(op not in layers or port != 0 for op, port in readers):
            return str(site.name)
    of_layer, of_module = _inputs(sim), dict[str, Encoding | None]()
    for op, path in layers.items():
        if of_module.setdefault(path, of_layer.get(op)) != of_layer.get(op):
            return f"{op}.input[0]"
    return ""


def _inputs(sim: Any) -> dict[str, Encoding]:
    """Operator -> encoding of its first input, where it is quantized."""
    found: dict[str, Encoding] = {}
    for site in _activations(sim):
        readers = [sim.graph.op(site.op)] if site.role == "input" else [op for op, _ in sim.graph.consumers(site.value)]
        for op in readers:
            if op.inputs[0] == site.value:
                found.setdefault(op.name, site.quantizer.required)
    return found


def _of_modules(sim: Any) -> _Contents:
    """Weights and layers of the modules of the simulated model."""
    contents = _Contents(dtype=_dtype_name(sim.model))
    for weight in packed_weights(sim):
        if isinstance(weight, FloatWeight):
            contents.tensors[weight.name] = weight.values.detach().cpu().clone()
        else:
            contents.weights[weight.name] = weight
    inputs = _inputs(sim)
    encodings = {path: (op, inputs.get(op)) for op, path in _layer_ops(sim).items()}
    names: dict[Any, str] = {parameter: name for name, parameter in sim.model.named_parameters()}
    for path, module in sim.model.named_modules(remove_duplicate=False):
        parameter = getattr(module, "weight", None)
        name = names.get(parameter, "") if isinstance(parameter, nn.Parameter) else ""
        held = name in contents.weights
        if held and type(module) is nn.Embedding and module.max_norm is None:
            contents.tables[path] = name
        elif held and _call_of(module):
            contents.layers[path] = _layer_document(path, module, name, contents, *encodings.get(path, ("", None)))
    return contents


def _layer_document(
    path: str, module: Any, weight: str, contents: _Contents, op: str, encoding: Encoding | None
) -> dict[str, Any]:
    """The entry of a module's layer in the document; adds the quantizer of its input."""
    call, grid = _call_of(module), None if encoding is None else f"{op}.input"
    if grid is not None and encoding is not None:
        contents.grids[grid] = encoding
    return {
        "call": call,
        "weight": weight,
        "bias": None if module.bias is None else f"{path}.bias".removeprefix("."),
        "input": grid,
        "options": {} if call == "linear" else _options(module),
    }


def _options(module: Any) -> dict[str, Any]:
    same = {"stride": list(module.stride), "padding": _padding(module), "dilation": list(module.dilation)}
    return {**same, "groups": module.groups}


def _dtype_name(model: nn.Module) -> str:
    found = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return str(found).removeprefix("torch.")


# the program of a simulation


def _of_graph(sim: Any, batch: Any, dynamic_batch: bool) -> _Contents:
    from bitwright.torch.simulation.export import marked_program

    batch = sim.example() if batch is None else batch
    contents = _Contents(dtype=_dtype_name(sim.model))

    def make(program: Any, tensors: Any, shapes: Any) -> None:
        module = program.module(check_guards=False)
        _lower(sim, module, contents)

    free = dynamic_batch and _has_many(batch)
    marked_program(sim, batch, make, dynamic_batch=free)
    contents.outputs = _outputs(sim, batch)
    return contents


def _has_many(batch: Any) -> bool:
    from bitwright.torch.calls.inputs import flatten_tensors

    return all(t.dim() == 0 or t.shape[0] > 1 for _, t in flatten_tensors(batch))


def _outputs(sim: Any, batch: Any) -> Any:
    from bitwright.torch.calls.inputs import as_call, flatten_tensors, model_device, to_device

    args, kwargs = as_call(to_device(batch, model_device(sim.model)))
    with torch.no_grad():
        found = sim.model(*args, **kwargs)
    if isinstance(found, Tensor):
        return "tensor"
    names = [name for name, _ in flatten_tensors(found)]
    return names if isinstance(found, Mapping) else "tuple"


def _lower(sim: Any, module: fx.GraphModule, contents: _Contents) -> None:
    """Replace marks by layers and quantizers, and add their weights to ``contents``."""
    from bitwright.torch.simulation.simulate import RUN

    graph = module.graph
    sites = {
        node: sim.quantizers[str(node.args[1]).partition(RUN)[0]]
        for node in nodes_of(graph, torch.ops.bitwright.site.default)
    }
    names = _Names()
    for node in [node for node in graph.nodes if node.target in _CALLS and len(node.args) > 1]:
        if node.args[1] in sites and _is_stored(node.args[1], sites):
            _lower_layer(module, node, _CALLS[node.target], sites, contents, names)
    for node, site in sites.items():
        if node.users:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_instead(module, node, site, sites, contents, names))
        graph.erase_node(node)
    _drop_unread(graph)
    for node in (node for node in graph.nodes if node.op == "get_attr" and str(node.target) not in contents.tensors):
        node.target = _keep(contents, str(node.target).removeprefix("model."), _tensor_of(module, node))
    contents.program = to_json(graph)


def _drop_unread(graph: fx.Graph) -> None:
    """Remove nodes that no output depends on; torch's own elimination requires all layers in the module."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("get_attr", "call_function") and not node.is_impure():
            graph.erase_node(node)


def _instead(
    module: fx.GraphModule, node: fx.Node, site: Any, sites: Mapping[Any, Any], contents: _Contents, names: _Names
) -> fx.Node:
    """The replacement of a mark: a bias on its grid, a weight of codes, or a quantizer."""
    graph = module.graph
    if site.role == "bias" and _is_stored(node, sites):
        return graph.create_node("get_attr", _keep_bias(contents, module, node, sites))
    if site.role == "weight" and _is_stored(node, sites):
        name = names.new(f"{site.op}_weight")
        contents.tables[name] = _keep_weight(contents, module, node, site)
        return graph.create_node("call_module", name, ())
    name = names.new(f"{site.name}_grid")
    contents.grids[name] = site.quantizer.required
    return graph.create_node("call_module", name, (node.args[0],))


class _Names:
    """Names of layers in a program: letters, digits and underscores, each once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def new(self, wanted: str) -> str:
        """A free name similar to ``wanted``."""
        clean = "".join(c if c.isalnum() else "_" for c in wanted)
        name, number = clean, 2
        while name in self._given:
            name, number = f"{clean}_{number}", number + 1
        self._given.add(name)
        return name


def _is_stored(node: Any, sites: Mapping[Any, Any]) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and source.op == "get_attr" and sites[node].role in ("weight", "bias")


def _tensor_name(node: fx.Node) -> str:
    source: Any = node.args[0]
    return str(source.target).removeprefix("model.")


def _tensor_of(module: nn.Module, node: Any) -> Tensor:
    """The tensor of a ``get_attr`` node."""
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    assert isinstance(found, Tensor)
    return found.detach().cpu()


def _keep_bias(contents: _Contents, module: nn.Module, node: Any, sites: Mapping[Any, Any]) -> str:
    """Store a bias, on its grid where it has a mark."""
    from bitwright.core.numerics import affine

    if node not in sites:
        return _keep(contents, str(node.target).removeprefix("model."), _tensor_of(module, node))
    values = _tensor_of(module, node.args[0])
    return _keep(
        contents, f"{_tensor_name(node)} on its grid", affine.fake_quantize(values, sites[node].quantizer.required)
    )


def _keep(contents: _Contents, name: str, tensor: Tensor) -> str:
    """Store a tensor once, under a valid attribute name."""
    name = "tensor_" + "".join(c if c.isalnum() else "_" for c in name)
    held = contents.tensors.get(name)
    if held is not None and not (held.shape == tensor.shape and torch.equal(held, tensor)):
        return _keep(contents, f"{name}_", tensor)
    contents.tensors[name] = tensor.clone()
    return name


def _keep_weight(contents: _Contents, module: nn.Module, node: Any, site: Any) -> str:
    name, encoding = _tensor_name(node), site.quantizer.required
    number = 2
    while name in contents.weights and contents.weights[name].encoding != encoding:
        name, number = f"{_tensor_name(node)}_{number}", number + 1
    if name not in contents.weights:
        contents.weights[name] = PackedWeight.encoded(name, _tensor_of(module, node.args[0]).float(), encoding)
    return name


def _lower_layer(
    module: fx.GraphModule, node: fx.Node, call: str, sites: Mapping[Any, Any], contents: _Contents, names: _Names
) -> None:
    """Replace a linear layer or convolution with a stored weight by a layer of codes."""
    given = _arguments(node)
    weight, bias = given["weight"], given.get("bias")
    options = {} if call == "linear" else _node_options(call, given)
    if options is None or not (bias is None or bias.op == "get_attr" or (bias in sites and _is_stored(bias, sites))):
        return
    name = names.new(sites[weight].op)
    stored = _keep_weight(contents, module, weight, sites[weight])
    kept = None if bias is None else _keep_bias(contents, module, bias, sites)
    source, encoding = _read_through(given["input"], sites)
    grid = None if encoding is None else f"{name}.input"
    if grid is not None and encoding is not None:
        contents.grids[grid] = encoding
    contents.layers[name] = {"call": call, "weight": stored, "bias": kept, "input": grid, "options": options}
    with module.graph.inserting_before(node):
        made = module.graph.create_node("call_module", name, (source,))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    module.graph.erase_node(node)


def _read_through(source: Any, sites: Mapping[Any, Any]) -> tuple[Any, Encoding | None]:
    """The operand of a layer, and its encoding, from the mark before it, across data movement."""
    from bitwright.torch.simulation.decomposed import MOVES

    before = source
    while isinstance(before, fx.Node) and before.target in MOVES:
        before = before.args[0]
    if before not in sites or sites[before].role in ("weight", "bias"):
        return source, None
    encoding: Encoding = sites[before].quantizer.required
    if before is source:
        return before.args[0], encoding
    fixed = encoding.granularity == PerTensor() and not encoding.dynamic and isinstance(encoding.format, IntFormat)
    return source, encoding if fixed else None


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call by the names of the operator's schema, defaults included."""
    target: Any = node.target
    schema = target._schema.arguments
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    found.update(zip((argument.name for argument in schema), node.args, strict=False))
    return {**found, **node.kwargs}


def _node_options(call: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Stride, padding, dilation and groups; ``None`` where the kernels have no such padding."""
    rank = int(call[4])
    kernel = given["weight"].meta["val"].shape[2:]

    def each(value: Any) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * rank if len(values) == 1 else values

    dilation, padding = each(given["dilation"]), given["padding"]
    if padding == "same":
        padding = _same_padding(map(int, kernel), dilation)
    if padding is None:
        return None
    padding = 0 if padding == "valid" else padding
    return {"stride": each(given["stride"]), "padding": each(padding), "dilation": dilation, "groups": given["groups"]}


# the model of contents


class _Program(nn.Module):
    """A program with the output structure of its original model."""

    def __init__(self, graph: nn.Module, outputs: Any) -> None:
        super().__init__()
        self.graph, self.outputs = graph, outputs

    def forward(self, *tensors: Tensor) -> Any:
        """Run the program on the tensors of an input, in order."""
        made = self.graph(*tensors)
        if self.outputs == "tensor":
            return made[0]
        return tuple(made) if self.outputs == "tuple" else dict(zip(self.outputs, made, strict=True))


def _built(contents: _Contents, model: nn.Module | None, dtype: torch.dtype | None, path: Path | None) -> Packed:
    """Build the module, of ``model`` itself if there is one, and a row for each of its weights."""
    kind = getattr(torch, contents.dtype) if dtype is None else dtype
    layers = {name: _layer(contents, name, kind) for name in contents.layers}
    embedded = model is not None
    tables: dict[str, nn.Module] = {
        place: CodedEmbedding(stored) if embedded else stored
        for place, name in contents.tables.items()
        for stored in (StoredWeight(contents.weights[name], kind),)
    }
    made = {**{name: module for name, (module, _) in layers.items()}, **tables}
    root = _program(contents, kind, made) if model is None else _replaced(model, contents, kind, made)
    rows = [
        _row(name, contents.weights[contents.layers[name]["weight"]], module, reason)
        for name, (module, reason) in layers.items()
    ]
    reading = "" if embedded else "an operator without a kernel reads it"
    rows += [_row(place, contents.weights[contents.tables[place]], module, reading) for place, module in tables.items()]
    for name in sorted(contents.weights.keys() - _placed(contents)):
        weight = contents.weights[name]
        size = _float_bytes(weight)
        why = "its module is no linear layer, convolution or embedding"
        rows.append(PackedRow(name, str(weight.layout), "float", size, size, why))
    return Packed(root.eval(), tuple(rows), "modules" if embedded else "graph", path)


def _placed(contents: _Contents) -> set[str]:
    """Weights held by a layer or a table."""
    return {held["weight"] for held in contents.layers.values()} | set(contents.tables.values())


def _program(contents: _Contents, dtype: torch.dtype, made: Mapping[str, nn.Module]) -> nn.Module:
    """Build the program with its layers, quantizers and tensors."""
    root = nn.Module()
    for name, tensor in contents.tensors.items():
        root.register_buffer(name, _as(tensor, dtype))
    for name, encoding in contents.grids.items():
        if "." not in name:
            root.register_module(name, Grid(encoding))
    for name, module in made.items():
        root.register_module(name, module)
    assert contents.program is not None
    return _Program(from_json(root, contents.program), contents.outputs)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _layer(contents: _Contents, name: str, dtype: torch.dtype) -> tuple[PackedLayer, str]:
    held = contents.layers[name]
    bias = None if held["bias"] is None else contents.tensors[held["bias"]]
    grid = None if held["input"] is None else contents.grids[held["input"]]
    bias = None if bias is None else (bias.float() if grid is not None else _as(bias, dtype))
    return layer_of(Parts(held["call"], contents.weights[held["weight"]], bias, grid, held["options"], dtype))


def _row(name: str, weight: PackedWeight, module: Any, reason: str) -> PackedRow:
    size = sum(
        t.numel() * t.element_size()
        for n, t in module.named_buffers()
        if n not in ("bias", "grid.scale", "grid.zero_point")
    )
    kernel = getattr(module, "kernel", "dequantized")
    return PackedRow(name, str(weight.layout), kernel, size, _float_bytes(weight), reason)


def _float_bytes(weight: PackedWeight) -> int:
    return int(4 * np.prod(weight.shape, dtype=np.int64))


def _replaced(model: nn.Module, contents: _Contents, dtype: torch.dtype, made: Mapping[str, nn.Module]) -> nn.Module:
    """``model`` with packed layers, and all other parameters from the files."""
    _check_sizes(model, contents)
    model = model.to(dtype)
    state = {name: _as(tensor, dtype) for name, tensor in contents.tensors.items()}
    for name in contents.weights.keys() - _placed(contents):
        state[name] = torch.from_numpy(contents.weights[name].dequantize()).to(dtype)
    for path, module in made.items():
        if not path:
            return module
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    left = model.state_dict()
    model.load_state_dict({name: t for name, t in state.items() if name in left}, strict=False, assign=True)
    return model.requires_grad_(False)


def _check_sizes(model: nn.Module, contents: _Contents) -> None:
    """Refuse a model of another class or other sizes, or without values for tensors missing in the files."""
    kept = model.state_dict(keep_vars=True)
    shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in contents.tensors.items()}
    shapes |= {name: weight.shape for name, weight in contents.weights.items()}
    for name, shape in sorted(shapes.items()):
        if name not in kept:
            problem = f"the packed model has it and the given {type(model).__name__} does not"
            raise ModelError(name, problem, "give a model of the same class")
        if tuple(kept[name].shape) != shape:
            problem = f"it has the shape {shape} in the files and {tuple(kept[name].shape)} in the model"
            raise ModelError(name, problem, "give a model of the same sizes")
    absent = next((name for name, buffer in model.named_buffers() if buffer.is_meta and name not in kept), None)
    if absent is not None:
        raise ModelError(absent, "it is on the meta device and in no file", "make the model on the CPU")


# the files


def _write(contents: _Contents, folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {f"tensors/{name}": tensor.contiguous() for name, tensor in contents.tensors.items()}
    weights: dict[str, Any] = {}
    for name, weight in contents.weights.items():
        rows = weight.codes.reshape(len(weight.codes), -1) if weight.shape else weight.codes.reshape(1, 1)
        halved = weight.format.bits <= 4 and rows.shape[1] % 2 == 0
        rows = halves(rows) if halved else rows
        tensors[f"codes/{name}"] = torch.from_numpy(np.array(rows))
        tensors[f"scale/{name}"] = torch.from_numpy(weight.scale.copy())
        if weight.zero_point.any():
            tensors[f"zero_point/{name}"] = torch.from_numpy(weight.zero_point.copy())
        if weight.encoding.shift is not None:
            tensors[f"shift/{name}"] = torch.from_numpy(weight.encoding.shift.copy())
        weights[name] = {
            "format": weight.format.name,
            "granularity": granularity_to_json(weight.granularity),
            "shape": list(weight.shape),
            "halved": halved,
        }
    document = {
        "kind": "bitwright.packed",
        "version": _VERSION,
        "dtype": contents.dtype,
        "weights": weights,
        "layers": contents.layers,
        "tables": contents.tables,
        "grids": {name: encoding_to_json(encoding) for name, encoding in contents.grids.items()},
        "outputs": contents.outputs,
        "program": contents.program,
    }
    with atomic_files(folder, name=DOCUMENT, create=True) as staging:
        save_file(tensors, staging / TENSORS)
        document["digest"] = _digest(document, tensors)
        (staging / DOCUMENT).write_text(json.dumps(document, indent=1, allow_nan=False), encoding="utf-8")


def _digest(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Of the program and of what it reads; the numbers of the tensors, which may be gigabytes, do not count."""
    shapes = sorted((name, str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items())
    return hashlib.sha256(json.dumps([document, shapes], sort_keys=True).encode()).hexdigest()


def _read(folder: Path) -> _Contents:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not folder.is_dir() or not (folder / DOCUMENT).is_file():
        raise ModelError(str(folder), f"there is no {DOCUMENT} in it", "name the folder that pack(sim, folder) wrote")
    settle(folder)
    document = read_document(folder / DOCUMENT, ModelError, max_bytes=_MOST_BYTES)
    try:
        if document["kind"] != "bitwright.packed" or document["version"] != _VERSION:
            raise ValueError(f"it is {document['kind']!r:.40}, version {document['version']!r:.20}")
        tensors = load_file(folder / TENSORS)
        if document.pop("digest") != _digest(document, tensors):
            raise ValueError(f"{DOCUMENT}, or a shape in {TENSORS}, was changed since it was written")
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            parts.setdefault(kind, {})[name] = tensor
        contents = _Contents(
            weights={name: _weight(name, held, parts) for name, held in document["weights"].items()},
            tensors=parts.get("tensors", {}),
            layers=document["layers"],
            tables=document["tables"],
            grids={name: encoding_from_json(held, name) for name, held in document["grids"].items()},
            program=document["program"],
            outputs=document["outputs"],
            dtype=document["dtype"],
        )
        if not isinstance(getattr(torch, contents.dtype), torch.dtype):
            raise TypeError(f"{contents.dtype!r:.40} is not a type of numbers")
        for held in contents.layers.values():
            _check_layer(held, contents)
        return contents
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError, OSError) as error:
        raise ModelError(
            str(folder), f"it is not a packed model: {error!r:.200}", "pack the simulation again"
        ) from error


def _check_layer(held: Mapping[str, Any], contents: _Contents) -> None:
    """Refuse names that are missing in the files."""
    if held["call"] not in _LAYERS.values():
        raise ValueError(f"{held['call']!r:.40} is not a layer")
    for key, known in (("weight", contents.weights), ("bias", contents.tensors), ("input", contents.grids)):
        if held[key] is not None and held[key] not in known:
            raise ValueError(f"there is no {key} {held[key]!r:.60}")
    if held["call"] != "linear" and not all(
        type(n) is int for key in ("stride", "padding", "dilation") for n in held["options"][key]
    ):
        raise TypeError("options of a convolution are whole numbers")


def _weight(name: str, held: Mapping[str, Any], parts: Mapping[str, Mapping[str, Tensor]]) -> PackedWeight:
    fmt, shape = parse_format(held["format"]), tuple(held["shape"])
    codes = parts["codes"][name].numpy()
    if held["halved"]:
        codes = unhalved(codes, fmt)
    scale = parts["scale"][name].numpy()
    zero = parts.get("zero_point", {}).get(name)
    shift = parts.get("shift", {}).get(name)
    encoding = Encoding(
        fmt,
        scale,
        np.zeros(scale.shape, np.int32) if zero is None else zero.numpy(),
        granularity_from_json(held["granularity"]),
        FLOAT32_SCALE,
        shift=None if shift is None else shift.numpy(),
    )
    found = PackedWeight(name, codes.reshape(shape), encoding)
    found.check()
    return found
