"""Opening ONNX Runtime sessions: what the simulation needs of them, and errors that say what to do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from bitwright.errors import ConfigError, ModelError, close_matches
from bitwright.export.runtime import refusals

Order = Literal["fast", "frugal", "written"]
Providers = Sequence[str | tuple[str, dict[str, Any]]]

# Protobuf refuses messages of 2 GiB; larger models go to the runtime as files.
_ONE_MESSAGE_LIMIT = 3 << 29
_CPU = ("CPUExecutionProvider",)


def open_session(
    model: ir.Model, providers: Providers | None = None, *, threads: int = 0, order: Order = "fast"
) -> Any:
    """An ``onnxruntime.InferenceSession`` that leaves QuantizeLinear and DequantizeLinear as they are.

    All other optimisations are on. Without ``session.disable_quant_qdq`` the runtime would put integer kernels in
    the place of quantizers, and move quantizers to where they are not.

    Args:
        model: any model whose opset the runtime knows.
        providers: as ONNX Runtime takes them; the CPU by default.
        threads: of one operator; 0 leaves the number to the runtime.
        order: ``"frugal"`` runs every node as soon as the order of the model allows and keeps the plain memory
            layout, so that a tensor is gone once its readers are through; ``"fast"`` is the runtime's default, which
            may keep every tensor that is also an output's source until the end; ``"written"`` is frugal and optimises
            nothing, so that every node of the model runs.

    Raises:
        ConfigError: a provider is not available.
        ModelError: the runtime refuses the model; its message, which names the node, is part of the problem.
    """
    import onnxruntime as ort

    chosen = check_providers(providers)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # refusals arrive as exceptions; the log would only repeat them
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if order != "fast":
        levels = ort.GraphOptimizationLevel
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.graph_optimization_level = (
            levels.ORT_ENABLE_EXTENDED if order == "frugal" else levels.ORT_DISABLE_ALL
        )
    try:
        if _fits_a_message(model):
            return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=chosen)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            ir.save(model, path, external_data="model.onnx.data")
            return ort.InferenceSession(str(path), options, providers=chosen)
    except refusals() as error:
        raise ModelError(
            model.graph.name or "model",
            f"ONNX Runtime cannot load it: {first_line(error)}",
            "run the float model in ONNX Runtime first; a model that it refuses cannot be simulated",
        ) from error


def check_providers(providers: Providers | None) -> list[Any]:
    """``providers`` as a list, the CPU where none are named.

    Raises:
        ConfigError: one is not available in the installed ONNX Runtime.
    """
    import onnxruntime as ort

    known = ort.get_available_providers()
    chosen = list(_CPU if providers is None else providers)
    for provider in chosen:
        name = provider if isinstance(provider, str) else provider[0]
        if name not in known:
            raise ConfigError(
                "providers",
                f"{name!r} is not available in this ONNX Runtime{close_matches(str(name), known)}",
                f"use {' or '.join(known)}, or install a build of onnxruntime that has it",
            )
    return chosen


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()),
        f"{type(error).__name__}, without a message",
    )


def free_memory() -> int:
    """Bytes that this process may still take: what the machine has free, and less where a control group says so."""
    free = [1 << 30]
    try:
        text = Path("/proc/meminfo").read_text()
        free = [
            int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemAvailable")
        ] or free
    except OSError:  # not Linux: what the C library knows
        if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free.append(max(0, limit - used))
    return min(free)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return None


def _fits_a_message(model: ir.Model) -> bool:
    """Whether the model can be handed over in memory: small enough, and no tensor in another file."""
    values = (v for graph in model.graphs() for v in graph.initializers.values())
    tensors = [v.const_value for v in values if v.const_value is not None]
    external = any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors)
    return not external and sum(tensor.nbytes for tensor in tensors) < _ONE_MESSAGE_LIMIT
