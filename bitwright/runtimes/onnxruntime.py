"""ONNX Runtime: opening sessions, the exceptions they raise, and profiles of the nodes that a session runs."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.errors import ConfigError, checks_arguments
from bitwright.runtimes.timing import interleaved

Array = NDArray[Any]

CPU = ("CPUExecutionProvider",)
#: of a session that keeps QuantizeLinear and DequantizeLinear as they are; all other optimisations are on
FLOAT_KERNELS = {"session.disable_quant_qdq": "1"}


def session_options(
    *, threads: int = 1, entries: Mapping[str, str] | None = None, optimized: bool = True, kept: Path | None = None
) -> Any:
    """Options of a session that prints nothing: what the runtime refuses arrives as an exception.

    Args:
        threads: of one operator; 0 for all.
        entries: settings by their full names.
        optimized: with the runtime's changes of the graph; without them every operator runs as it stands.
        kept: file that the optimized graph is written to, with large tensors in a second one: one may not exceed 2 GiB.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    entries = dict(entries or {})
    if kept is not None:
        options.optimized_model_filepath = str(kept)
        files = {"file_name": f"{kept.name}.data", "min_size_in_bytes": "1024"}
        entries |= {f"session.optimized_model_external_initializers_{key}": text for key, text in files.items()}
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


#: domains whose operators ONNX Runtime has, or makes, by itself
DOMAINS = frozenset(
    ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview.training", "com.microsoft", "com.microsoft.nchwc",
     "com.ms.internal.nhwc", "org.pytorch.aten")
)  # fmt: skip
_LIBRARIES: dict[str, None] = {}  # what the process has loaded stays loaded, so that the list is the process's as well


@checks_arguments
def register_operators(library: str | Path) -> None:
    """Load a library of custom operators into every session that this process opens from now on.

    Such operators run in float; the model around them is quantized. A file exported from the model needs the library wherever
    it runs: its manifest names it. Registering a library again changes nothing.

    Args:
        library: path of a shared library that exports ``RegisterCustomOps``, as ONNX Runtime's documentation on custom operators
            defines it.

    Raises:
        ConfigError: it is missing, built for another machine, or no library of operators.
    """
    import onnxruntime as ort

    path = Path(library).resolve()
    if str(path) in _LIBRARIES:
        return
    if not path.is_file():
        raise ConfigError(str(library), "there is no such file", "give the path of the shared library of the operators")
    try:
        ort.SessionOptions().register_custom_ops_library(str(path))
    except refusals() as error:
        raise ConfigError(
            str(library),
            f"ONNX Runtime {ort.__version__} cannot load operators from it: {_reason(error)}",
            "give a library built for this system and processor that exports RegisterCustomOps",
        ) from error
    _LIBRARIES[str(path)] = None


def operator_libraries() -> tuple[str, ...]:
    """Paths of the libraries that :func:`register_operators` loaded."""
    return tuple(_LIBRARIES)


def _reason(error: Exception) -> str:
    """ONNX Runtime's message about a library, without its prefix."""
    return str(error).split(" with error: ")[-1].strip().splitlines()[0]


def new_session(
    source: bytes | str | Path, options: Any = None, providers: Sequence[Any] = CPU, *, model: ir.Model | None = None
) -> Any:
    """An ``onnxruntime.InferenceSession``; every session of the package is opened here.

    Where the condition of an If is constant, ONNX Runtime's constant folding puts the branch in its place, forgets for the
    rest of the pass that the branch reads values from outside, and takes out what makes them once another reader (a Shape)
    is folded. It then refuses its own graph; such a model is opened again without constant folding.

    Args:
        source: a serialized model, or the path of a file.
        options: see :func:`session_options`; the runtime's own by default.
        providers: as the runtime takes them.
        model: what ``source`` holds, where it may be opened a second time.

    Raises:
        One of :func:`refusals`.
    """
    import onnxruntime as ort

    source = str(source) if isinstance(source, Path) else source
    options = ort.SessionOptions() if options is None and _LIBRARIES else options
    for library in _LIBRARIES:
        options.register_custom_ops_library(library)
    try:
        return ort.InferenceSession(source, options, providers=list(providers))
    except refusals():
        if model is None or all(node.op_type != "If" for node in model.graph.all_nodes()):
            raise
        return ort.InferenceSession(source, options, providers=list(providers), disabled_optimizers=["ConstantFolding"])


#: metadata of a file whose inputs and outputs have other types than the model's: scales, zero points and normalisations
IO_KEY = "bitwright.io"


def as_file_inputs(facts: Mapping[str, Any], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Convert float32 inputs of the model to those of the file.

    Args:
        facts: name -> what the file says of an input under :data:`IO_KEY`.
        feeds: name -> float32; what is of another type is given as it is.
    """
    found = dict(feeds)
    for name, fact in facts.items():
        if name in found and found[name].dtype.kind == "f":
            found[name] = quantized(found[name], fact)
    return found


def quantized(array: Array, fact: Mapping[str, Any]) -> Array:
    """Codes, or pixels, that stand for ``array``; see :data:`IO_KEY`."""
    if "mean" not in fact:
        kind = np.dtype(fact["type"])
        codes = np.rint(array.astype(np.float32) / np.float32(fact["scale"])) + fact["zero_point"]
        return np.asarray(np.clip(codes, np.iinfo(kind).min, np.iinfo(kind).max).astype(kind))
    mean, std = (np.asarray(fact[key], np.float32).reshape(1, -1, 1, 1) for key in ("mean", "std"))
    pixels = np.clip(np.rint((array * std + mean) / np.float32(fact["pixel"])), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)) if fact["layout"] == "NHWC" else pixels


def as_values(facts: Mapping[str, Any], found: Mapping[str, Array]) -> dict[str, Array]:
    """Convert outputs of the file to float32, as the model has them.

    Args:
        facts: name -> what the file says of an output under :data:`IO_KEY`.
        found: name -> what the file returned; outputs without facts are returned as they are.
    """
    return {
        name: (array.astype(np.float32) - fact["zero_point"]) * np.float32(fact["scale"])
        if (fact := facts.get(name)) is not None
        else array
        for name, array in found.items()
    }


_FLOATS = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(double)": np.float64}


def inputs_for(session: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The feeds that a session has an input for, each in the type of that input."""
    kinds = {given.name: given.type for given in session.get_inputs()}
    given = {name: array for name, array in feeds.items() if name in kinds}
    told = session.get_modelmeta().custom_metadata_map.get(IO_KEY)
    if told:
        given = as_file_inputs(json.loads(told)["inputs"], given)
    for name, array in given.items():
        kind = _FLOATS.get(kinds[name])
        if kind is not None and isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.dtype != kind:
            given[name] = array.astype(kind)
    return given


def run_named(session: Any, feeds: Mapping[str, Array]) -> dict[str, Any]:
    """Outputs by name, of :func:`inputs_for` a session."""
    wanted = [out.name for out in session.get_outputs()]
    return dict(zip(wanted, session.run(wanted, inputs_for(session, feeds)), strict=True))


def refusals() -> tuple[type[Exception], ...]:
    """The exceptions ONNX Runtime raises when it cannot load or run a model; they share no base class."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kinds = (getattr(state, name) for name in dir(state))
    return (*(k for k in kinds if isinstance(k, type) and issubclass(k, Exception)), RuntimeError)


class Profile:
    """A session that notes the time of its nodes.

    Args:
        path: of an ONNX file.
        folder: an empty one, in which the runtime writes what it notes.
        threads: of one operator.

    Attributes:
        graph: the graph that it runs.
    """

    def __init__(self, path: Path, folder: Path, threads: int = 1) -> None:
        folder.mkdir(exist_ok=True)
        options = session_options(threads=threads, kept=folder / "optimized.onnx")
        options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
        self.session = new_session(path, options)
        self.graph = ir.load(folder / "optimized.onnx").graph

    def times(self) -> dict[tuple[str, str], list[float]]:
        """(name, operator type) of every node -> microseconds of its runs; the first, which warms up, only where it is alone."""
        events = json.loads(Path(self.session.end_profiling()).read_text())
        found: dict[tuple[str, str], list[float]] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                key = (event["name"].removesuffix("_kernel_time"), event["args"]["op_name"])
                found.setdefault(key, []).append(float(event["dur"]))
        return {key: taken[1:] or taken for key, taken in found.items()}


# ------------------------------------------------------------------------------------- what runs, and why in float

Kind = Literal["integer", "convert", "float", "move"]

#: operators that ONNX Runtime has integer kernels for where their inputs and their output are quantized to 8 bits
HAS_INTEGER_KERNEL = frozenset((
    "Conv", "MatMul", "Gemm", "Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu", "Softmax",
    "Where",
))  # fmt: skip
_MOVES = frozenset((
    "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "MaxPool", "Gather", "Slice", "Split", "Concat", "Identity",
    "Pad", "Resize", "Expand", "Tile", "ReorderInput", "ReorderOutput", "Shape", "Cast", "DepthToSpace", "SpaceToDepth",
))  # fmt: skip
_CONVERTS = frozenset(("QuantizeLinear", "DequantizeLinear"))


@dataclass(frozen=True)
class Ran:
    """One operator of the optimized file.

    Attributes:
        name, op: of the node as the runtime runs it.
        micros: median time of one run.
        kind: ``integer``, ``convert`` for QuantizeLinear and DequantizeLinear that stand alone, ``float``, or ``move``.
        why: why it is float although it reads what was quantized; empty elsewhere.
    """

    name: str
    op: str
    micros: float
    kind: Kind
    why: str = ""


def profile(path: Path, feeds: Mapping[str, Array], *, threads: int = 1, runs: int = 10) -> list[Ran]:
    """Every operator that a default session runs for the file at ``path``, in order, with its time."""
    with tempfile.TemporaryDirectory() as folder:
        profiled = Profile(path, Path(folder), threads)
        for _ in range(runs + 1):
            run_named(profiled.session, feeds)
        nodes = {str(node.name): node for node in profiled.graph}
        rows = []
        for (name, op), taken in profiled.times().items():
            kind, node = _kind(op), nodes.get(name)
            why = _why_float(node) if kind == "float" and node is not None else ""
            rows.append(Ran(name, op, statistics.median(taken), kind, why))
        return rows


def _kind(op: str) -> Kind:
    if op in _CONVERTS:
        return "convert"
    if op.startswith("QLinear") or op in ("QGemm", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeLSTM"):
        return "integer"
    if op in _MOVES:
        return "move"
    return "float"


def _why_float(node: ir.Node) -> str:
    """The reason why ``node`` runs in float although it reads a quantized value; empty where it reads none."""
    codes = [_codes_of(value) for value in node.inputs]
    if not any(code is not None for code in codes):
        return ""
    if node.op_type not in HAS_INTEGER_KERNEL:
        return f"the runtime has no integer kernel for {node.op_type}"
    for port, (code, value) in enumerate(zip(codes, node.inputs, strict=True)):
        reason = _why_no_codes(value, port) if code is None else _why_other_codes(code, port)
        if reason:
            return reason
    readers = [use.node.op_type for use in node.outputs[0].uses()]
    if "QuantizeLinear" in readers:
        return "its neighbours lie on grids that the kernel does not take together"
    after = f"{readers[0]} reads it in float" if readers else "it is an output in float"
    return f"its output is not quantized: {after}"


def _codes_of(value: ir.Value | None) -> ir.Value | None:
    """The codes that a DequantizeLinear turns into ``value``, if one does."""
    maker = None if value is None else value.producer()
    return maker.inputs[0] if maker is not None and maker.op_type == "DequantizeLinear" else None


def _why_no_codes(value: ir.Value | None, port: int) -> str:
    if value is None or port > 1:
        return ""
    what = "weight" if value.const_value is not None else f"input {value.name}"
    return f"its {what} is in float"


def _why_other_codes(codes: ir.Value, port: int) -> str:
    reads = next((use.node.inputs for use in codes.uses() if len(use.node.inputs) > 2), ())
    zero_point = reads[2] if reads else None
    kind = codes.dtype if zero_point is None else zero_point.dtype  # files state the type of one of the two
    if kind is None or kind.bitwidth == 8 or (port == 2 and kind.bitwidth == 32):
        return ""
    what = "weight" if codes.const_value is not None else "input"
    return f"its {what} has {kind.name.lower()} codes, and the kernels take 8 bits"


# ---------------------------------------------------------------------------------------------- times of layers

_ROUNDS = 15  # of which the least counts: what else the machine does makes a run longer, never shorter
_RENAMED = re.compile(r"(_token_\d+|_nchwc|_quant|/duplicated)+$")  # what optimizers append to names of operators


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds of one file.

    Attributes:
        layers: layer -> its kernel, and everything between it and the layers before it.
        conversions: layer -> the QuantizeLinear of what it reads that stand alone; part of ``layers``.
        rest: what belongs to no layer.
        whole: of one run of the file.
    """

    layers: Mapping[str, float]
    conversions: Mapping[str, float]
    rest: float
    whole: float


def layer_times(
    files: Mapping[str, Path], feeds: Mapping[str, Array], layers: Collection[str], *, rounds: int = _ROUNDS
) -> dict[str, LayerTimes]:
    """Time the layers of several files of one network: all files in turns, the least of each node.

    Args:
        files: name -> ONNX file, each with nodes of the names of ``layers``.
        feeds: one input, by name.
        layers: operators that times are wanted of; what else runs counts for the layer that reads it.
        rounds: of every file, besides a first one.
    """
    with tempfile.TemporaryDirectory() as folder:
        profiled = {name: Profile(path, Path(folder, str(i))) for i, (name, path) in enumerate(files.items())}
        for _ in range(rounds + 1):
            for one in profiled.values():
                run_named(one.session, feeds)
        nodes = {
            name: {node: min(taken) / 1e3 for (node, _), taken in one.times().items()} for name, one in profiled.items()
        }
    whole = whole_times(files, dict.fromkeys(files, feeds), rounds=rounds)
    return {name: _attributed(profiled[name].graph, taken, {*layers}, whole[name]) for name, taken in nodes.items()}


def whole_times(
    files: Mapping[str, Path], feeds: Mapping[str, Mapping[str, Array]], *, rounds: int = _ROUNDS
) -> dict[str, float]:
    """Milliseconds of one run of each file with its feeds on one thread: all files in turns, the least of each."""
    sessions = {name: new_session(path, session_options()) for name, path in files.items()}
    steps = {name: partial(run_named, session, feeds[name]) for name, session in sessions.items()}
    whole = interleaved(steps, rounds=rounds, clock=time.process_time)
    return {name: 1e3 * min(times.rounds) for name, times in whole.items()}


def _attributed(graph: Any, taken: Mapping[str, float], layers: set[str], whole: float) -> LayerTimes:
    """Times of layers, scaled to add up to ``whole``: a profile of single nodes misses some time and adds some."""
    nodes = [node for node in graph if node.name in taken]  # those of bodies are part of the node with the body
    owner = _owners(nodes, layers)
    factor = whole / max(sum(taken[node.name] for node in nodes), 1e-9)
    found = dict.fromkeys(sorted(layers), 0.0)
    conversions = dict.fromkeys(sorted(layers), 0.0)
    rest = 0.0
    for node in nodes:
        name, spent = owner.get(node.name), factor * taken[node.name]
        if name is None:
            rest += spent
            continue
        found[name] += spent
        if node.op_type == "QuantizeLinear":
            conversions[name] += spent
    return LayerTimes(found, conversions, rest, whole)


def _owners(nodes: list[Any], layers: set[str]) -> dict[str, str]:
    """Node -> its layer: itself, the layer that reads it, or at the end of the graph the layer before it."""
    names = {node.name: _RENAMED.sub("", node.name).removeprefix("fused ") for node in nodes}
    found = {node: name for node, name in names.items() if name in layers}
    for node in reversed(nodes):
        _belongs(node, found, (use.node for value in node.outputs for use in value.uses()))
    for node in nodes:
        _belongs(node, found, (v.producer() for v in node.inputs if v is not None))
    return found


def _belongs(node: Any, found: dict[str, str], neighbours: Iterable[Any]) -> None:
    """Assign a node without a layer to the layer of its first neighbour that has one."""
    owners = (found[n.name] for n in neighbours if n is not None and n.name in found)
    owner = next(owners, None)
    if owner is not None:
        found.setdefault(node.name, owner)
