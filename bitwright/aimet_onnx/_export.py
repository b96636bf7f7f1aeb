"""AIMET's names of exported files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from bitwright.errors import ConfigError


def option(bias: bool | None, activation: str | None) -> dict[str, Any]:
    """Our options for AIMET's.

    Raises:
        ConfigError: signed activations.
    """
    if activation == "signed":
        raise ConfigError("force_activation_as", "'signed' grids are not written here", "use 'unsigned' or None")
    return {"bias": "float" if bias is False else "int32", "activation": "as_is" if activation is None else activation}


def export_files(
    write: Callable[..., Any], folder: Path, prefix: str, export_model: bool, options: dict[str, Any]
) -> None:
    """Write the float ``<prefix>.onnx``, ``<prefix>.encodings`` and ``<prefix>_qdq.onnx``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = write(work, "model", samples=False, **options)
        os.replace(made.encodings, folder / f"{prefix}.encodings")
        if export_model:
            moved_model(made.float_model, folder / f"{prefix}.onnx")
            moved_model(made.qdq, folder / f"{prefix}_qdq.onnx")


def moved_model(source: Path, target: Path) -> None:
    """Give a model's file another name; weights in a file of their own go with it."""
    if not source.with_name(f"{source.name}.data").exists():
        os.replace(source, target)
        return
    onnx.save(onnx.load(str(source)), str(target), save_as_external_data=True, location=f"{target.name}.data")


def qdq_model(write: Callable[..., Any], options: dict[str, Any]) -> onnx.ModelProto:
    """The QDQ model of an export."""
    with tempfile.TemporaryDirectory() as work:
        return onnx.load(str(write(work, "model", samples=False, **options).qdq))
