"""Open ONNX Runtime sessions with the settings of the simulation, and explain their errors."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.errors import BitwrightError, ConfigError, ModelError, close_matches
from bitwright.export.files.atomic import no_room, temporary_room
from bitwright.export.files.onnx_file import all_graphs, check_results, free_memory, write_elements
from bitwright.progress import collector_paused
from bitwright.runtimes.onnxruntime import CPU, FLOAT_KERNELS, new_session, refusals, session_options

Order = Literal["fast", "frugal", "written"]
Providers = Sequence[str | tuple[str, dict[str, Any]]]


#: bytes of weights up to which a model is held whole and handed over as one message, which takes three copies of it and
#: more time than a file beyond this size
IN_MEMORY = 1 << 22
_WEIGHTS_IN = "session.model_external_initializers_file_folder_path"
_PAGE = 4096  # bytes; what lies at a multiple of it can be mapped into memory
_UNKNOWN_OPERATOR = ("is not a registered function/op", "No opset registered for domain", "No Op registered for")
_LARGE = 1024  # bytes of a tensor that is kept out of messages and optimised files


def open_session(
    model: ir.Model, providers: Providers | None = None, *, threads: int = 0, order: Order = "fast", arena: bool = True,
    packed: bool | None = None,
) -> Any:  # fmt: skip
    """An ``onnxruntime.InferenceSession`` that leaves QuantizeLinear and DequantizeLinear as they are.

    All other optimisations are on. Without ``session.disable_quant_qdq`` the runtime would put integer kernels in
    the place of quantizers, and move quantizers to where they are not.

    Args:
        model: any model whose opset the runtime knows.
        providers: as ONNX Runtime takes them; the CPU by default.
        threads: of one operator; see :func:`threads_of`.
        order: ``"frugal"`` runs every node as soon as the order of the model allows and keeps the plain memory
            layout, so that a tensor is gone once its readers are through; ``"fast"`` is the runtime's default, which
            may keep every tensor that is also an output's source until the end; ``"written"`` is frugal and optimises
            nothing, so that every node of the model runs.
        arena: keep the memory of one run for the next.
        packed: copy weights into the layout of the kernels, which is faster and sums in another order. Otherwise weights that
            lie in files stay there, mapped, and their pages can be taken back when memory is short. By default where the
            weights take at most half of the free memory.

    Raises:
        ConfigError: a provider is not available.
        ModelError: the runtime refuses the model; its message, which names the node, is part of the problem.
    """
    import onnxruntime as ort

    chosen = check_providers(providers)
    options = _options(threads, arena)
    if not (weight_bytes(model) <= free_memory() // 2 if packed is None else packed):
        options.add_session_config_entry("session.disable_prepacking", "1")
    if order != "fast":
        levels = ort.GraphOptimizationLevel
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED if order == "frugal" else levels.ORT_DISABLE_ALL
    with _explained(model.graph.name or "model"):
        return _open(model, options, chosen)


def _open(model: ir.Model, options: Any, providers: list[Any]) -> Any:
    """Open a model whose large weights lie in a file, which the session maps one by one."""
    check_results(model)

    @collector_paused()
    def opened(folder: str | None) -> Any:
        if folder is not None:
            options.add_session_config_entry(_WEIGHTS_IN, os.path.abspath(folder))
        return new_session(ir.to_proto(model).SerializeToString(), options, providers, model=model)

    folder = weights_folder(model)
    if folder is not None or fits_a_message(model):
        return opened(folder)
    with temporary_room(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        before = _write_weights(model, own)
        try:
            return opened(own)
        finally:
            for value, tensor in before.items():
                value.const_value = tensor


def save_optimized(model: ir.Model, path: Path) -> None:
    """Write the model as ONNX Runtime optimises it for this CPU; large tensors into a second file beside it.

    Args:
        model: any.
        path: of the file.

    Raises:
        ExportError: the folder of ``path`` has no room for it.
        ModelError: the runtime refuses the model.
    """
    entries = {**FLOAT_KERNELS, "session.disable_prepacking": "1"}  # nothing will run here
    options = session_options(entries=entries, kept=path)
    try:
        with _explained(model.graph.name or "model"):
            _open(model, options, list(CPU))
    except ModelError as error:
        _check_room(path.parent, weight_bytes(model))
        raise error
    return_memory()


def _check_room(folder: Path, size: int) -> None:
    """Distinguish a full temporary folder from a model that the runtime refuses.

    Raises:
        ExportError: ``folder`` has no room for a file of so many bytes.
    """
    probe = folder / "room"
    try:
        with open(probe, "wb") as file:
            for _ in range(0, size + (1 << 20), 1 << 20):  # and as much for the graph itself
                file.write(bytes(1 << 20))
    except OSError as error:
        raise no_room(str(folder), error.strerror or str(error), size) from error
    finally:
        probe.unlink(missing_ok=True)


def open_file(path: Path, *, threads: int = 0, arena: bool = True) -> Any:
    """A session on the CPU that runs an optimised file without further optimisation; see :func:`open_session`."""
    import onnxruntime as ort

    options = _options(threads, arena)
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False  # its plan is another block of memory beside that of the first run
    with _explained(path.name):
        return new_session(path, options)


def threads_of(asked: int) -> int:
    """``asked``, or for 0 ``OMP_NUM_THREADS``, which the runtime itself ignores; 0: the runtime's default."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # OpenMP has a number per level of nesting
    return asked or (int(first) if first.isdecimal() else 0)


def _options(threads: int, arena: bool = True) -> Any:
    options = session_options(threads=threads_of(threads), entries=FLOAT_KERNELS)
    options.enable_cpu_mem_arena = arena
    return options


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Convert the runtime's refusals to ModelError."""
    try:
        yield
    except BitwrightError:  # of ours, and a RuntimeError like some of the runtime's
        raise
    except refusals() as error:
        remedy = "run the float model in ONNX Runtime first; a model that it refuses cannot be simulated"
        if any(words in str(error) for words in _UNKNOWN_OPERATOR):
            remedy = (
                "load the library of the operator first: bitwright.onnx.register_operators(path), or --library on the command "
                "line; if it has none, replace the operator by standard ones"
            )
        raise ModelError(name, f"ONNX Runtime cannot load it: {first_line(error)}", remedy) from error


def check_providers(providers: Providers | None) -> list[Any]:
    """``providers`` as a list, the CPU where none are named.

    Raises:
        ConfigError: one is not available in the installed ONNX Runtime.
    """
    import onnxruntime as ort

    known = ort.get_available_providers()
    chosen = list(CPU if providers is None else providers)
    for provider in chosen:
        name = provider if isinstance(provider, str) else provider[0]
        if name not in known:
            raise ConfigError(
                "providers",
                f"{name!r} is not available in this ONNX Runtime{close_matches(str(name), known)}",
                f"use {' or '.join(known)}, or install a build of onnxruntime that has it",
            )
    return chosen


def run_session(
    session: Any, feeds: Mapping[str, NDArray[Any]], site: str, names: Sequence[str] | None = None
) -> list[Any]:
    """Run a session on ``feeds``; returns the outputs of ``names``, all of them by default.

    Raises:
        ModelError: the model fails on them; ``site`` says what was run.
    """
    try:
        return list(session.run(names, dict(feeds)))
    except refusals() as error:
        raise ModelError(
            site,
            f"ONNX Runtime cannot run it: {first_line(error)}",
            "run the float model in ONNX Runtime with this input first",
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), f"{type(error).__name__}, without a message"
    )


def return_memory() -> None:
    """Return freed memory to the system, where the C library supports it (glibc).

    It keeps freed blocks below 32 MiB, among them the weights of a session, for allocations to come. Where those do not
    fit into the holes, each session that is opened in place of another one takes more.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(ctypes.c_size_t(0))


@cache
def _malloc_trim() -> Any:
    """The function of glibc, looked up once: every handle on a library makes a class of its own."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _write_weights(model: ir.Model, folder: str) -> dict[ir.Value, ir.TensorProtocol]:
    """Move all large initializers to one file in ``folder``; returns the previous tensors."""
    path, before = Path(folder, "weights.data"), dict[ir.Value, ir.TensorProtocol]()
    try:
        with path.open("wb") as file:
            for value, tensor in weights(model):
                if tensor.dtype != ir.DataType.STRING:
                    value.const_value = kept_in_file(str(value.name), tensor, file, path)
                    before[value] = tensor
    except BaseException:
        for value, tensor in before.items():
            value.const_value = tensor
        raise
    return before


def kept_in_file(name: str, tensor: ir.TensorProtocol, file: BinaryIO, path: Path) -> ir.TensorProtocol:
    """Append a large tensor to ``file``, and return it mapped; a small one stays in memory.

    Args:
        name: of the tensor.
        tensor: is let go of where it lies in another file.
        file: ``path``, open for writing.
    """
    if tensor.nbytes < _LARGE:
        external = isinstance(tensor, ir.ExternalTensor)
        return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=name) if external else tensor
    file.write(b"\0" * (-file.tell() % _PAGE))
    start = file.tell()
    write_elements(tensor, file)
    return ir.ExternalTensor(
        path.name, start, file.tell() - start, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()),
        name=name, base_dir=str(path.parent),
    )  # fmt: skip


def weights_folder(model: ir.Model) -> str | None:
    """The one folder in which the large tensors of ``model`` lie; ``None`` where they lie in memory or in several."""
    folders, held = set(), 0
    for _, tensor in weights(model):
        if isinstance(tensor, ir.ExternalTensor):
            folders.add(str(tensor.base_dir))
        else:
            held += tensor.nbytes
    return folders.pop() if len(folders) == 1 and held <= IN_MEMORY else None


def fits_a_message(model: ir.Model) -> bool:
    """Whether the model fits into one message in memory: small enough, without external tensors."""
    external = any(isinstance(tensor, ir.ExternalTensor) for _, tensor in weights(model))
    return not external and not is_large(model)


def is_large(model: ir.Model) -> bool:
    """Whether a model is too large to hold as a whole."""
    return weight_bytes(model) > IN_MEMORY


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers."""
    return sum(tensor.nbytes for _, tensor in weights(model))


def weights(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Every non-empty initializer with its elements."""
    for graph in all_graphs(model.graph):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value, value.const_value
