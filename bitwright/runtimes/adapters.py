"""The runtimes: one row each, with a function that opens a file, the extra that installs it, and remedies for what it refuses.

A new runtime is a row of :data:`RUNTIMES`. ``verify``, ``drift`` and ``benchmark`` find it there.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.registry import Registry
from bitwright.errors import BitwrightError, ConfigError, ExportError, close_matches
from bitwright.runtimes.onnxruntime import (
    FLOAT_KERNELS,
    IO_KEY,
    as_file_inputs,
    inputs_for,
    new_session,
    session_options,
)

Array = NDArray[Any]


def check_not_empty(site: str, feeds: Mapping[str, Any]) -> None:
    """Refuse a batch without samples: every comparison of it would agree, and every time would be short.

    Args:
        site: for the message.
        feeds: arrays or tensors by name. One empty input beside others is right: a cache of length 0.

    Raises:
        ExportError: every input that has axes is empty.
    """
    sizes = [math.prod(np.shape(array)) for array in feeds.values() if np.ndim(array)]
    if sizes and not any(sizes):
        problem = f"the batch holds no sample: {', '.join(f'{n} is {_shape(a)}' for n, a in feeds.items())}"
        raise ExportError(site, problem, "give a batch with at least one sample")


def _shape(array: Any) -> str:
    return "x".join(map(str, np.shape(array)))


def arrays_of(output: Any) -> list[NDArray[Any]]:
    """Every array in an output, in order; the numbers that maps hold are one array, after the others.

    Args:
        output: an array, or lists, maps and ``None`` around arrays and numbers. Keys of maps are left out.

    Example:
        >>> arrays_of([{1: 0.25, 2: 0.75}, {1: 0.5, 2: 0.5}])
        [array([0.25, 0.75, 0.5 , 0.5 ])]
    """
    arrays: list[NDArray[Any]] = []
    numbers: list[Any] = []
    open_parts = [output]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, np.ndarray):
            arrays.append(part)
        elif isinstance(part, dict):
            open_parts.extend(reversed(part.values()))
        elif isinstance(part, (list, tuple)):
            open_parts.extend(reversed(part))
        elif part is not None:
            numbers.append(part)
    return arrays + ([np.array(numbers)] if numbers else [])


def one_array(output: Any) -> NDArray[Any]:
    """An output as one array: of a sequence or a map all floats in a row; empty and of integers where it holds none."""
    if isinstance(output, np.ndarray):
        return output
    floats = [array.ravel() for array in arrays_of(output) if array.dtype.kind == "f"]
    return np.concatenate(floats) if floats else np.empty(0, np.int64)


def named_arrays(outputs: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Outputs by name, where one that is not an array stands as its arrays: ``name[0]``, ``name[1]``, ..."""
    found: dict[str, NDArray[Any]] = {}
    for name, output in outputs.items():
        if isinstance(output, np.ndarray):
            found[name] = output
        else:
            found |= {f"{name}[{i}]": array for i, array in enumerate(arrays_of(output))}
    return found


@dataclass
class LitertSession:
    """A loaded file.

    Attributes:
        interpreter: of ``ai_edge_litert``.
        edges: what the file says of its inputs and outputs; see :func:`flat_edges`.
    """

    interpreter: Any
    edges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def run(self, feeds: Mapping[str, Array], outputs: Collection[str] | None = None) -> dict[str, Array]:
        """Outputs by name; inputs that the file does not have are left out.

        Args:
            feeds: by name. Where a shape differs from the file's, its free axes take that length. Floats for an input of
                codes or pixels are converted to them.
            outputs: names of the wanted ones, all by default.
        """
        run, feeds = self.interpreter, as_file_inputs(self.edges.get("inputs", {}), feeds)
        details = run.get_input_details()
        missing = [given["name"] for given in details if given["name"] not in feeds]
        if missing:
            raise ValueError(f"{', '.join(missing)} are missing from input feed")
        for given in details:
            shape = np.shape(feeds[given["name"]])
            if tuple(given["shape"]) != shape:
                run.resize_tensor_input(given["index"], shape, strict=True)
        run.allocate_tensors()
        run.reset_all_variables()  # states of recurrent layers, which stay from call to call
        for given in details:
            run.set_tensor(given["index"], np.asarray(feeds[given["name"]], given["dtype"], order="C"))
        run.invoke()
        return {
            made["name"]: run.get_tensor(made["index"])
            for made in run.get_output_details()
            if outputs is None or made["name"] in outputs
        }


def session_of(content: bytes, *, threads: int = 1, reference: bool = False, keeps: bool = False) -> LitertSession:
    """A session of a file in memory.

    Args:
        content: of the file.
        threads: number of threads.
        reference: kernels that compute as the format's specification says, instead of XNNPACK's and the optimised ones. A file
            with an operator that has no such kernel (ELU, ROUND, CEIL) runs without delegates instead.
        keeps: every tensor can be read after a run.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    plain = (OpResolverType.BUILTIN_REF, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    kinds = plain if reference else (OpResolverType.AUTO,)
    for kind in kinds:
        try:
            found = Interpreter(
                model_content=content,
                num_threads=threads,
                experimental_op_resolver_type=kind,
                experimental_preserve_all_tensors=keeps,
            )
        except ValueError as error:
            if kind is kinds[-1] or "Didn't find op" not in str(error):
                raise
        else:
            return LitertSession(found, flat_edges(content))
    raise AssertionError("the last kind of kernels returns or raises")


def flat_edges(content: bytes) -> dict[str, dict[str, Any]]:
    """What a LiteRT file says of ``"inputs"`` and ``"outputs"`` of integers under :data:`IO_KEY`, by name; empty without any."""
    from ai_edge_litert.schema_py_generated import Model

    model = Model.GetRootAs(content, 0)
    for entry in (model.Metadata(i) for i in range(model.MetadataLength())):
        if entry.Name() == IO_KEY.encode():
            found: dict[str, dict[str, Any]] = json.loads(model.Buffers(entry.Buffer()).DataAsNumpy().tobytes())
            return found
    return {}


@dataclass(frozen=True)
class Session:
    """A loaded file.

    Attributes:
        run: inputs by name -> outputs by name; inputs that the file does not have are left out.
        kernels: operator name -> what computes it in this runtime, where the runtime tells; integer kernels of OpenVINO
            end in ``i8`` or ``u8``.
    """

    run: Callable[[Mapping[str, Array]], dict[str, Array]]
    kernels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Runtime:
    """A runtime.

    Attributes:
        name: what ``runtime=`` takes.
        module: the package that is imported.
        extra: of this package, which brings it.
        suffix: of the files that it reads.
        remedy: what to change when it refuses a file.
        open: ``(path, threads, reference) -> Session``; 0 threads are all, and ``reference`` asks for the plain kernels.
    """

    name: str
    module: str
    extra: str
    suffix: str
    remedy: str
    open: Callable[[Path, int, bool], Session]


# OpenVINO 2026.4, where the batch is free: products on integers whose result is reshaped into the heads of an attention
_LENGTHS = ("src/core/shape_inference",)
_FIXED_LENGTHS = (
    "fix the lengths of the inputs: a session of your own does it with model.reshape({'input': [1, 3, 8, 8]}) before "
    "compile_model, or export a model without free axes; or leave the layer in float (sim.quantizers[...].enabled = False)"
)
_OTHER_INPUTS = ("are missing from input feed",)

#: what runtimes say of an operator that they do not have at all
_UNKNOWN = ("No conversion rule found for operations", "is not a registered function/op", "No Op registered for")
_WITHOUT_IT = (
    "the runtime does not have this operator, not even in float: write that part of the model with other operators, compute it "
    "outside the file, or deploy to a runtime that has it"
)
#: what runtimes say of inputs and outputs other than tensors
_NO_TENSOR = ("Unsupported value_info type",)
_TENSORS_ALONE = (
    "the runtime takes tensors alone: give the model outputs that are tensors (skl2onnx: options={'zipmap': False}), or deploy "
    "to ONNX Runtime"
)
#: what runtimes say of a file that none of them could read
_DAMAGED = (
    "Protobuf parsing failed", "No graph was found in the protobuf", "Unable to read the model", "Model can't be parsed",
    "not a valid Flatbuffer", "`model_content` must be specified",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------- ONNX Runtime


def _open_ort(path: Path, threads: int, reference: bool) -> Session:
    session = new_session(path, session_options(threads=threads, entries=FLOAT_KERNELS if reference else None))
    wanted = [out.name for out in session.get_outputs()]
    last: list[Any] = [
        None,
        {},
    ]  # the feeds of the last run, and what the file takes for them, which is not part of its time

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        if last[0] is not feeds:
            last[:] = feeds, inputs_for(session, feeds)
        return dict(zip(wanted, session.run(wanted, last[1]), strict=True))

    return Session(run)


# ----------------------------------------------------------------------------------------------------- OpenVINO


def _open_openvino(path: Path, threads: int, reference: bool) -> Session:
    import openvino

    core = openvino.Core()
    # float operators in float32: CPUs with AMX would compute them in bfloat16, 8 bits of mantissa
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    # what is in float in front of quantized weights stays so: it would be quantized in groups of 32 values, unlike simulated
    options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    if threads:
        options["INFERENCE_NUM_THREADS"] = threads
    compiled = core.compile_model(core.read_model(str(path)), "CPU", options)
    names = {port.get_any_name() for port in compiled.inputs}

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        found = compiled({name: array for name, array in feeds.items() if name in names})
        # one tensor has several names where the plugin made one operator of two
        return {name: np.array(found[port]) for port in compiled.outputs for name in port.get_names()}

    return Session(run, dict(_openvino_kernels(compiled)))


def _openvino_kernels(compiled: Any) -> Iterator[tuple[str, str]]:
    """Name of the original operator -> kernel (``Convolution i8``), from the runtime graph of the plugin."""
    for node in compiled.get_runtime_model().get_ordered_ops():
        facts = node.get_rt_info()
        kind, kept, precision = (
            facts[key].astype(str) for key in ("layerType", "originalLayersNames", "runtimePrecision")
        )
        for name in kept.split(","):
            yield name, f"{kind} {precision}"


# ------------------------------------------------------------------------------------------------------- LiteRT


def _open_litert(path: Path, threads: int, reference: bool) -> Session:
    found = session_of(path.read_bytes(), threads=threads or os.cpu_count() or 1, reference=reference)
    return Session(found.run)  # the interpreter does not tell what computes an operator


# ------------------------------------------------------------------------------------------------ Qualcomm's HTP

_HTP = "QNNExecutionProvider"


def _htp_devices() -> list[Any]:
    """The provider's devices; it is registered once for the process, which has no other place for it."""
    import onnxruntime
    import onnxruntime_qnn

    if all(device.ep_name != _HTP for device in onnxruntime.get_ep_devices()):
        onnxruntime.register_execution_provider_library(_HTP, onnxruntime_qnn.get_library_path())
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == _HTP]


def _htp_session(path: Path, threads: int, lengths: Mapping[str, int]) -> Any:
    """A session with fixed lengths of free axes."""
    import onnxruntime
    import onnxruntime_qnn

    options = session_options(threads=threads)
    for axis, length in lengths.items():
        options.add_free_dimension_override_by_name(axis, length)
    options.add_provider_for_devices(_htp_devices(), {"backend_path": onnxruntime_qnn.get_qnn_htp_path()})
    return onnxruntime.InferenceSession(str(path), options)


def _open_qnn(path: Path, threads: int, reference: bool) -> Session:
    """ONNX Runtime with Qualcomm's provider: the HTP, on x86 its simulator; what that leaves runs on the CPU.

    It takes fixed lengths only, so that a session is opened for each set of lengths.
    """
    if reference:
        return _open_ort(path, threads, True)
    import onnx

    given = onnx.load(path, load_external_data=False).graph.input
    axes = {v.name: [dim.dim_param for dim in v.type.tensor_type.shape.dim] for v in given}
    opened: dict[frozenset[tuple[str, int]], Any] = {}

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        fed = axes.keys() & feeds.keys()
        lengths = {axis: n for name in fed for axis, n in zip(axes[name], np.shape(feeds[name]), strict=True) if axis}
        key = frozenset(lengths.items())
        session = opened[key] = opened.get(key) or _htp_session(path, threads, lengths)
        wanted = [out.name for out in session.get_outputs()]
        return dict(zip(wanted, session.run(wanted, inputs_for(session, feeds)), strict=True))

    return Session(run)


# --------------------------------------------------------------------------------------------------- ExecuTorch


def _open_executorch(path: Path, threads: int, reference: bool) -> Session:
    """Programs of torch are made of the file by the ONNX front end, which is loaded here alone."""
    found: Session = import_module("bitwright.onnx.executorch").open_model(path, threads, reference)
    return found


# --------------------------------------------------------------------------------------------------------- ncnn


def _open_ncnn(path: Path, threads: int, reference: bool) -> Session:
    """ncnn's files are made of the ONNX file by the ONNX front end, which is loaded here alone."""
    found: Session = import_module("bitwright.onnx.ncnn").open_model(path, threads, reference)
    return found


# ----------------------------------------------------------------------------------------------------- the table


def _checked_runtime(name: str, row: Any) -> Runtime:
    """A runtime of a plug-in."""
    found = row() if callable(row) else row
    if not isinstance(found, Runtime) or found.name != name or found.suffix not in (".onnx", ".tflite"):
        problem = f"{found!r:.100} is not a Runtime of that name for .onnx or .tflite files"
        raise ConfigError(f"runtime {name!r}", problem, "register Runtime(name, module, extra, suffix, remedy, open)")
    return found


_OWN: dict[str, Runtime] = {
    row.name: row
    for row in (
        Runtime(
            "onnxruntime", "onnxruntime", "onnx", ".onnx",
            "leave the layers that it names in float (sim.quantizers[...].enabled = False), or update onnxruntime", _open_ort,
        ),
        Runtime(
            "openvino", "openvino", "openvino", ".onnx",
            "export with target='openvino_cpu', or leave the layer in float (sim.quantizers[...].enabled = False)",
            _open_openvino,
        ),
        Runtime(
            "qnn", "onnxruntime_qnn", "qnn", ".onnx",
            "export with target='qnn', or leave the layer in float (sim.quantizers[...].enabled = False)", _open_qnn,
        ),
        Runtime(
            "executorch", "executorch", "executorch", ".onnx",
            "leave the layer in float (sim.quantizers[...].enabled = False), or compare with another runtime", _open_executorch,
        ),
        Runtime(
            "ncnn", "ncnn", "ncnn", ".onnx",
            "export with target='ncnn', or leave the layer in float (sim.quantizers[...].enabled = False)", _open_ncnn,
        ),
        Runtime(
            "litert", "ai_edge_litert", "litert", ".tflite",
            "update ai-edge-litert; if it has no kernel for the operator that it names, leave that in float "
            "(sim.quantizers[...].enabled = False) and export anew", _open_litert,
        ),
    )
}  # fmt: skip


RUNTIMES: Registry[Runtime] = Registry("runtimes", _OWN, _checked_runtime)


def find_runtime(name: str) -> Runtime:
    """The row called ``name``, if its package is installed.

    Raises:
        ConfigError: there is no such runtime, with close matches, or its package is not installed, with the extra.
    """
    if name not in RUNTIMES:
        problem = f"{name!r} is not a runtime{close_matches(str(name), RUNTIMES)}"
        raise ConfigError("runtime", problem, f"use one of {', '.join(map(repr, RUNTIMES))}")
    row = RUNTIMES[name]
    try:
        import_module(row.module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != row.module:
            raise
        problem = f"the package {row.module} is not installed"
        raise ConfigError(f"runtime {name}", problem, f"pip install 'bitwright[{row.extra}]'") from error
    return row


def open_file(runtime: str, path: str | os.PathLike[str], *, threads: int = 1, reference: bool = False) -> Session:
    """Load a file.

    Args:
        runtime: row of :data:`RUNTIMES`.
        path: of the file.
        threads: 0 for all.
        reference: plain kernels: those that keep QuantizeLinear and DequantizeLinear in ONNX Runtime.

    Raises:
        ConfigError: see :func:`find_runtime`.
        ExportError: the file is missing, is of another kind, or the runtime refuses it: its message, the operator that it
            names, and what to change.
    """
    row, file = find_runtime(runtime), Path(path)
    if not file.is_file():
        raise ExportError(str(file), "there is no such file", "check the path")
    if file.suffix != row.suffix:
        problem = f"{row.name} reads {row.suffix} files"
        raise ExportError(str(file), problem, f"name the {row.suffix} file of the export")
    with refusals_of(row, file):
        session = row.open(file, threads, reference)

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        with refusals_of(row, file):
            return session.run(feeds)

    return Session(run, session.kernels)


@contextmanager
def refusals_of(row: Runtime, file: Path) -> Iterator[None]:
    """Turn what a runtime raises about ``file`` into an :class:`ExportError` with a remedy.

    Errors that no runtime raises about a file, as of a missing key, are errors of the code around it and are raised as they are.
    """
    try:
        yield
    except (BitwrightError, MemoryError, LookupError, AttributeError, AssertionError):
        raise
    except Exception as error:
        message = explained(error)
        named = _operator_in(message, file)
        site = f"{file}: {named}" if named else str(file)
        raise ExportError(site, f"{row.name} refuses the file: {message}", _remedy(row, message)) from error


def _remedy(row: Runtime, message: str) -> str:
    """The remedy for a file that ``row`` refuses with ``message``."""
    if any(words in message for words in _DAMAGED):
        return "export again, or copy the file anew: it is damaged"
    if any(words in message for words in _NO_TENSOR):
        return _TENSORS_ALONE
    if any(words in message for words in _OTHER_INPUTS):
        return "give data of this model, or export again: what it was run on belongs to another file"
    if any(words in message for words in _LENGTHS):
        return _FIXED_LENGTHS
    return _WITHOUT_IT if any(words in message for words in _UNKNOWN) else row.remedy


def explained(error: BaseException) -> str:
    """The informative lines of a runtime's message, joined to at most 400 characters."""
    skipped = ("Exception from", "Check '", "\n")
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(skipped)] or [line for line in lines if line]
    text = " ".join(told) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:397]}..."


def _operator_in(message: str, file: Path) -> str | None:
    """``node (Type)`` of the first operator of an ONNX file whose name stands in ``message``, or else its type."""
    if file.suffix != ".onnx":
        return None
    import onnx_ir as ir

    try:
        nodes = list(ir.load(file).graph.all_nodes())
    except Exception:  # a file that nothing can read has no operators to name
        return None
    message = message.replace(str(file), "")
    named = (n for n in nodes if n.name and n.name in message and _stands_alone(n.name, message))
    of_type = {node.op_type: node for node in reversed(nodes)}
    typed = (of_type[word] for word in re.findall(r"\w+", message) if word in of_type)
    node = max(named, key=lambda n: len(n.name or ""), default=None) or next(typed, None)
    return None if node is None else f"{node.name} ({node.op_type})" if node.name else node.op_type


def _stands_alone(name: str, message: str) -> bool:
    """Whether ``name`` is a word of its own in ``message``: operators may be called ``0`` or ``a``."""
    return re.search(rf"(?<![\w/.]){re.escape(name)}(?![\w/])", message) is not None
