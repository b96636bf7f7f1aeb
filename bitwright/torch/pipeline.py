"""The whole path in one call: fold, simulate, calibrate and, if asked, export."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bitwright.core.spec import NonFinite, Preset
from bitwright.errors import CalibrationError
from bitwright.torch.batch_norm_fold import fold_all_batch_norms
from bitwright.torch.quantsim import QuantizationSimModel, require_module

if TYPE_CHECKING:
    from bitwright.algorithms.batch_norm_fold import FoldReport
    from bitwright.export.artefacts import Exported


@dataclass(frozen=True)
class Result:
    """What :func:`quantize` returns.

    Attributes:
        sim: the calibrated simulation; ``sim.model`` runs it.
        folds: which batch norms were folded, and why the others were not.
        exported: the files written, when a path was given.
        metrics: ``{"float": ..., "quantized": ...}`` when a metric was given.
    """

    sim: QuantizationSimModel
    folds: FoldReport
    exported: Exported | None
    metrics: dict[str, float]

    @property
    def model(self) -> nn.Module:
        """The simulated model."""
        return self.sim.model


def quantize(
    model: nn.Module,
    data: Iterable[Any],
    preset: str | Preset = "w8a8",
    *,
    config_file: str | Path | dict[str, Any] | None = None,
    quant_scheme: str | None = None,
    metric: Callable[[nn.Module], float] | None = None,
    path: str | Path | None = None,
    filename_prefix: str = "model",
    progress: bool = True,
    non_finite: NonFinite = "error",
) -> Result:
    """Quantize ``model`` in one line: fold batch norms, simulate under ``preset``, calibrate on ``data``, export.

    Args:
        model: left as it is; the work is done on a copy.
        data: calibration batches, each a tensor, a tuple of positional arguments, or a dict of keyword arguments. The first
            is also the example input; a generator is fine.
        preset: a row of ``PRESETS`` or a :class:`Preset`.
        config_file: rules, as for :class:`QuantizationSimModel`.
        quant_scheme: range method, as for :class:`QuantizationSimModel`.
        metric: ``metric(model) -> float``, measured on the float and on the simulated model.
        path: folder to export to.
        filename_prefix: stem of the files.
        progress: show a progress bar on a terminal.
        non_finite: what to do with a batch that gives NaN or Inf: ``"error"``, ``"skip"`` or ``"clamp"``, as for
            :meth:`QuantizationSimModel.compute_encodings`.

    Raises:
        CalibrationError: ``data`` is empty, or gives NaN or Inf under the policy ``"error"``.
    """
    require_module(model)
    batches = iter(data)
    first = next(batches, None)
    if first is None:
        raise CalibrationError(
            "quantize",
            "the data held no batch",
            "pass a non-empty list or DataLoader; a few hundred samples are enough",
        )
    metrics = {} if metric is None else {"float": float(metric(model))}
    work = copy.deepcopy(model)
    folds = fold_all_batch_norms(work, dummy_input=first)
    sim = QuantizationSimModel(
        work, first, preset=preset, config_file=config_file, quant_scheme=quant_scheme, in_place=True
    )
    sim.compute_encodings(itertools.chain([first], batches), progress=progress, non_finite=non_finite)
    if metric is not None:
        metrics["quantized"] = float(metric(sim.model))
    exported = None if path is None else sim.export(path, filename_prefix, first)
    return Result(sim, folds, exported, metrics)
