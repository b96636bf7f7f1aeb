"""Where an exported file comes from, in its own metadata: tool, preset, recipe, data and a hash of all encodings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import onnx
import onnx_ir as ir

from bitwright.core.numerics.spec import Preset
from bitwright.core.simulation.calibration import CalibrationLog
from bitwright.errors import ConfigError, ExportError
from bitwright.export.files.manifest import fingerprint

_PREFIX = "bitwright."


def origin_of(preset: str | Preset, steps: Iterable[str], first: Any, log: CalibrationLog | None) -> dict[str, str]:
    """Preset, recipe and calibration data of one call of ``quantize``; data that has no bytes goes without a fingerprint."""
    found = {"preset": preset if isinstance(preset, str) else repr(preset), "recipe": ", ".join(steps)}
    try:
        batches = f"{log.batches} batches, the first " if log is not None else ""
        found["data"] = f"{batches}{fingerprint([first])}"
    except ConfigError:
        pass
    return found


def scores_of(metrics: Mapping[str, float], worst: Any) -> dict[str, str]:
    """Metric and SQNR of the worst output, as the files of one call of ``quantize`` keep them.

    Args:
        metrics: ``float`` and ``quantized``, or nothing.
        worst: a ``PartQuality``, or ``None``.
    """
    found = {f"metric_{which}": f"{value:.6g}" for which, value in metrics.items()}
    return found if worst is None else {**found, "output": worst.name, "sqnr_db": f"{worst.sqnr:.4g}"}


def write_origin(model: ir.Model, facts: Mapping[str, str]) -> None:
    """Put ``facts`` into the metadata of ``model``, in place."""
    model.metadata_props.update({f"{_PREFIX}{key}": text for key, text in facts.items()})


def read_origin(path: str | os.PathLike[str]) -> dict[str, str]:
    """What :func:`write_origin` put into the file at ``path``; empty for files that tell nothing.

    Raises:
        ExportError: there is no such file, or it is not an ONNX model.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own errors are not importable through onnx
        problem = f"it cannot be read as an ONNX model: {error}"
        raise ExportError(os.fspath(path), problem, "export the simulation again, or check the path") from error
    return {prop.key.removeprefix(_PREFIX): prop.value for prop in model.metadata_props if prop.key.startswith(_PREFIX)}
