"""The whole path in one call: fold, simulate, calibrate and, if asked, export."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright.core.spec import NonFinite, Preset
from bitwright.errors import CalibrationError
from bitwright.export.artefacts import Exported
from bitwright.onnx.batch_norm_fold import fold_all_batch_norms
from bitwright.onnx.load import Source, load_model
from bitwright.onnx.quantsim import QuantizationSimModel
from bitwright.onnx.session import Providers

if TYPE_CHECKING:
    from bitwright.algorithms.batch_norm_fold import FoldReport


@dataclass(frozen=True)
class Result:
    """What :func:`quantize` returns.

    Attributes:
        sim: the calibrated simulation; ``sim.run(feeds)`` runs it.
        folds: which batch norms were folded, and why the others were not.
        exported: the files written, when a path was given.
    """

    sim: QuantizationSimModel
    folds: FoldReport
    exported: Exported | None


def quantize(
    model: Source,
    data: Iterable[Any],
    preset: str | Preset = "w8a8",
    *,
    config_file: str | Path | dict[str, Any] | None = None,
    quant_scheme: str | None = None,
    providers: Providers | None = None,
    memory_budget: int | None = None,
    path: str | Path | None = None,
    filename_prefix: str = "model",
    progress: bool = True,
    non_finite: NonFinite = "error",
) -> Result:
    """Quantize ``model`` in one line: fold batch norms, simulate under ``preset``, calibrate on ``data``, export.

    Args:
        model: path, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        data: feeds, each a dict, an array for a model with one input, or a tuple in the model's order. The first is also
            the example input; a generator is fine.
        preset: a row of ``PRESETS`` or a :class:`Preset`.
        config_file, quant_scheme, providers, memory_budget: as for :class:`QuantizationSimModel`.
        path: folder to export to.
        filename_prefix: stem of the files.
        progress: show a progress bar on a terminal.
        non_finite: what to do with a batch that gives NaN or Inf: ``"error"``, ``"skip"`` or ``"clamp"``, as for
            :meth:`QuantizationSimModel.compute_encodings`.

    Raises:
        CalibrationError: ``data`` is empty, or gives NaN or Inf under the policy ``"error"``.
        ModelError: the model cannot be read or run, or a feed does not fit.
    """
    batches = iter(data)
    first = next(batches, None)
    if first is None:
        raise CalibrationError(
            "quantize", "the data held no batch", "give at least one; a few hundred samples are enough"
        )
    loaded = load_model(model)
    folds = fold_all_batch_norms(loaded, first, providers=providers)
    sim = QuantizationSimModel(
        loaded.model,
        first,
        quant_scheme,
        config_file=config_file,
        providers=providers,
        preset=preset,
        memory_budget=memory_budget,
    )
    sim.compute_encodings(itertools.chain([first], batches), progress=progress, non_finite=non_finite)
    exported = None if path is None else sim.export(path, filename_prefix)
    return Result(sim, folds, exported)
