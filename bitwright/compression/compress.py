"""``compress``: fewer operations in a model of either front end, checked, measured, and an ordinary model afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright.compression.costs import size_costs
from bitwright.compression.groups import Refusal
from bitwright.compression.prune import Pruned, PruneOptions, Ranking, checked_target, prune
from bitwright.compression.reconstruct import Fit, estimate_batch_norms, reconstruct
from bitwright.errors import CalibrationError, checks_arguments
from bitwright.methods.front_end import front_end_of
from bitwright.metrics.labels import inputs_and_labels
from bitwright.metrics.metric import needs_labels, scorer
from bitwright.recipes.recipe import checked_metric, metric_of
from bitwright.tables import Table, Tabular


@dataclass(frozen=True)
class Compressed(Tabular):
    """What :func:`compress` returns; a table of the groups when printed, result first.

    Attributes:
        model: the compressed model: a module, or an ``onnx.ModelProto``.
        rows: what became of every group of channels.
        refused: layers that were not touched, and why.
        before, after: ``macs`` of the example batch, ``params`` and ``bytes``.
        metrics: ``{"float": ..., "pruned": ..., "compressed": ...}`` when a metric was given: before, after the cut, and after
            reconstruction.
        fits: layers that were fitted to the original's results.
        batch_norms: how many had their statistics estimated anew.
        plan: what :func:`bitwright.torch.rebuild` takes, for modules.
        seconds: that it took.
    """

    _rows = "rows"

    model: Any = field(repr=False)
    rows: tuple[Pruned, ...]
    refused: tuple[Refusal, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]
    metrics: Mapping[str, float]
    fits: tuple[Fit, ...] = ()
    batch_norms: int = 0
    plan: Mapping[str, Any] = field(default_factory=dict, repr=False)
    seconds: float = 0.0

    @property
    def headline(self) -> str:
        """One line: what is left, and the metric."""
        parts = ", ".join(f"{self.after[n] / self.before[n]:.1%} of the {n}" for n in self.after if self.before[n])
        metric = ""
        if "compressed" in self.metrics:
            metric = f"; metric {self.metrics['float']:.4g} -> {self.metrics['compressed']:.4g}"
            if self.metrics["pruned"] != self.metrics["compressed"]:
                metric += f" ({self.metrics['pruned']:.4g} without reconstruction)"
        return f"{parts} left{metric}"

    def table(self) -> Table:
        """Groups, with units before and after."""
        rows = [[row.name, row.kind, str(row.before), str(row.after)] for row in self.rows]
        return Table(["group", "kind", "before", "after"], rows, self.headline, right=(2, 3))

    def __str__(self) -> str:
        said = [str(self.table())]
        if self.fits:
            said.append(f"{sum(f.kept for f in self.fits)} of {len(self.fits)} layers fitted to the original's results")
        if self.refused:
            said.append("not touched:")
            said += [f"  {refusal}" for refusal in self.refused]
        return "\n".join(said)

    def save(self, folder: str | os.PathLike[str], name: str = "model") -> list[Path]:
        """Write the model: ``<name>.onnx``; or ``<name>.safetensors`` and ``<name>.plan.json``, which rebuild the module.

        Raises:
            ExportError: the folder cannot be written.
        """
        return front_end_of(self.model).save_compressed(self.model, dict(self.plan), Path(folder), name)


@checks_arguments
def compress(
    model: Any,
    data: Iterable[Any],
    target: Mapping[str, float],
    *,
    metric: str | Mapping[str, Any] | Callable[[Any], float] | None = None,
    labels: Any = None,
    transform: Callable[[Any], Any] | None = None,
    importance: str = "l2",
    ranking: Ranking = "uniform",
    loss: Callable[[Any], Any] | None = None,
    cap: float = 0.9,
    widths: str | int = "cpu",
    alike: bool | None = None,
    inner: bool = False,
    averaged: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    reconstruction: bool = True,
    batch_norms: bool = True,
    seed: int = 0,
    providers: Any = None,
    path: str | Path | None = None,
    progress: bool = True,
) -> Compressed:
    """Remove channels, heads and hidden units from a model until a target is met, and fit what is left to the original.

    Args:
        model: a ``torch.nn.Module``, or an ONNX model as a path, a message or an ``onnx_ir`` model; left as it is.
        data: batches, as :func:`bitwright.quantize` takes them; the first checks the cut, all of them serve reconstruction.
        target: cost -> the part of it that may be left, ``{"macs": 0.5}``; costs are ``macs``, ``params``, ``bytes``.
        metric: a name of :data:`bitwright.metrics.metric.NAMED` or ``{name: options}``, an object of torchmetrics, or
            ``metric(model) -> float`` of a module, or of the ``InferenceSession`` of an ONNX model; measured before and after.
        labels, transform: as for :func:`bitwright.quantize`.
        importance: a row of :data:`bitwright.compression.importance.IMPORTANCE`.
        ranking: ``uniform`` takes the same part of every group; ``global`` the units with the lowest scores, each in parts of
            the mean of its group.
        loss: ``loss(module)``, a number to differentiate, for ``importance="taylor"``.
        cap: largest part of the units of one group that may go.
        widths: a row of :data:`bitwright.compression.prune.WIDTHS`, or a number: what widths are multiples of.
        alike: take as many units from groups at the same place of repeated blocks, so that one configuration describes all;
            by default for models of transformers, whose configuration is rewritten where it can say the new widths.
        inner: positions within heads, and within groups of convolutions, in the place of whole ones.
        averaged: also widths that a layer norm averages over, such as that of the embedding, whose removal changes what the norm
            computes.
        include, exclude: patterns for names of groups and layers.
        reconstruction: fit the layers that lost inputs to the results of the original.
        batch_norms: estimate the statistics of batch norms on the data.
        seed: of ``importance="random"``.
        providers: for ONNX models, as ONNX Runtime takes them.
        path: folder to write to, as :meth:`Compressed.save` does.
        progress: show progress bars on a terminal.

    Raises:
        CalibrationError: ``data`` is empty, or the metric is not a number.
        ConfigError: the target cannot be met; an option is unknown; or nothing can be removed.
        ModelError: the model cannot be read or run, or does not compute what it should after the cut.
    """
    started = time.perf_counter()
    checked_target(target)
    front = front_end_of(model)
    data, labels = inputs_and_labels(data, transform, labels, needs_labels(metric))
    batches = list(data)
    if not batches:
        raise CalibrationError("compress", "the data held no batch", "pass a non-empty list or DataLoader")
    given = front.given(model, providers, None)
    metrics: dict[str, float] = {}
    score, _ = scorer(metric, False, given, batches, labels)
    if score is not None:
        metrics["float"] = checked_metric("float", metric_of(score, given.metric_target()))
    structure = front.structured(model, batches[0], providers)
    same = structure.one_configuration() if alike is None else alike
    options = PruneOptions(
        importance, ranking, cap, widths, same, inner, averaged, tuple(include), tuple(exclude), seed
    )
    before = size_costs(structure.graph())
    gradients = None if loss is None else lambda names: structure.gradients(loss, names)
    report = prune(structure, batches, target, options, gradients)
    after = size_costs(structure.graph())

    def measured(name: str) -> None:
        if score is not None:
            metrics[name] = checked_metric(name, metric_of(score, structure.metric_target()))

    measured("pruned")
    view = structure.view()
    original = front.structured(model, batches[0], providers).view() if reconstruction or batch_norms else None
    fits = reconstruct(original, view, report.readers, batches, progress) if reconstruction else ()
    count = estimate_batch_norms(original, view, report.norms, batches, progress) if batch_norms else 0
    structure.refresh()
    if score is not None:
        metrics["compressed"] = metrics["pruned"]
    if any(fit.kept for fit in fits) or count:
        measured("compressed")
    result = Compressed(
        structure.finished(), report.rows, report.refused, before, after, metrics, fits, count,
        {"format": 1, "steps": structure.steps}, time.perf_counter() - started,
    )  # fmt: skip
    if path is not None:
        result.save(path)
    return result
