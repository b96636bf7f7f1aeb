"""``compress``: reduce the operations of a model of either front end to a target, checked and measured.

Sensitivities of parts can be measured in several processes, as the trials of mixed precision are run.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from bitwright.analysis.result import decibel
from bitwright.compression.bits import check_bits
from bitwright.compression.costs import (
    Prices,
    changed_ms,
    check_target,
    compare_ms,
    operator_times,
    parts_left,
    slower,
    with_ms,
)
from bitwright.compression.groups import Refusal
from bitwright.compression.prune import Pruned, PruneOptions, Ranking, Search, measure_share, prune
from bitwright.compression.ratios import Chosen
from bitwright.compression.reconstruct import Fit, Original, estimate_batch_norms, reconstruct
from bitwright.compression.widths import few_batches, noise_exceeds_variation, output_noise
from bitwright.core.simulation.calibration import samples_in
from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.export.files.atomic import write_json
from bitwright.methods.details import Detailed
from bitwright.methods.front_end import Structured, front_end_of
from bitwright.metrics.labels import inputs_and_labels
from bitwright.metrics.metric import Scorer, needs_labels, scorer
from bitwright.precision.executors import find_executor
from bitwright.recipes.recipe import checked_metric, metric_of
from bitwright.tables import Table


@dataclass(frozen=True)
class Compressed(Detailed):
    """Result of :func:`compress`; prints as a headline and a table of the groups.

    Attributes:
        model: the compressed model: a module, or an ``onnx.ModelProto`` that holds its weights (an ``onnx_ir.Model`` where it is
            too large for a message).
        rows: what became of every group of channels.
        refused: layers that were not touched, and why.
        before, after: ``macs`` of the example batch, ``params`` and ``bytes``; ``ms`` where they were measured.
        metrics: ``{"float": ..., "pruned": ..., "compressed": ...}`` when a metric was given: before, after the cut, and after
            reconstruction.
        choice: what the exact choice has measured.
        fits: layers that were fitted to the original's results.
        batch_norms: how many had their statistics estimated anew.
        sqnr: signal-to-noise ratio of the outputs against the original's in dB, on the first 64 samples of the data, which layers
            were fitted to; ``None`` where outputs are no numbers.
        states: inputs and outputs that are states of recurrent layers -> shape before and after, where it changed: the caller
            begins with narrower ones, and passes on narrower ones.
        plan: what :func:`bitwright.torch.rebuild` takes, for modules.
        seconds: that it took.
        bits: weight -> bits, where they were chosen with the widths.
        rules: ``config_file`` of :func:`bitwright.quantize` and of simulations, for these bits.
        not_in_config: why ``from_pretrained`` of a model of transformers or diffusers could not load the compressed one: no
            numbers of its configuration describe it. Its ``save_pretrained`` refuses then, but for checkpoints of a ``Trainer``;
            :meth:`save` writes any model. Empty where ``save_pretrained`` writes what ``from_pretrained`` loads.
        missed: the target of measured milliseconds that was not met, and what was; empty where all were.
        noise_exceeds_variation: whether the noise of an output is larger than what differs between samples.
    """

    _rows = "rows"

    model: Any = field(repr=False)
    rows: tuple[Pruned, ...]
    refused: tuple[Refusal, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]
    metrics: Mapping[str, float]
    choice: Chosen | None = None
    fits: tuple[Fit, ...] = ()
    batch_norms: int = 0
    sqnr: float | None = None
    states: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict, repr=False)
    seconds: float = 0.0
    bits: Mapping[str, int] = field(default_factory=dict, repr=False)
    rules: Mapping[str, Any] = field(default_factory=dict, repr=False)
    not_in_config: str = ""
    missed: str = ""
    noise_exceeds_variation: bool = False

    @property
    def summary(self) -> str:
        """As :attr:`headline`."""
        return self.headline

    @property
    def headline(self) -> str:
        """One line: a target that was missed or a slower model, costs left, SQNR against the original, and the metric."""
        metric = ""
        if "compressed" in self.metrics:
            metric = f"; metric {self.metrics['float']:.4g} -> {self.metrics['compressed']:.4g}"
            if self.metrics["pruned"] != self.metrics["compressed"]:
                metric += f" ({self.metrics['pruned']:.4g} without reconstruction)"
        outputs = "" if self.sqnr is None else f"; outputs {self.sqnr:.1f} dB before training"
        missed = f"MISSED, {self.missed}; " if self.missed else slower(self.before, self.after)
        if self.noise_exceeds_variation:
            missed += "UNCERTAIN, the noise of an output is larger than what differs between samples; "
        return f"{missed}{parts_left(self.before, self.after)}{outputs}{metric}"

    def table(self) -> Table:
        """Groups, with units before and after."""
        rows = [[row.name, row.kind, str(row.before), str(row.after)] for row in self.rows]
        return Table(["group", "kind", "before", "after"], rows, self.headline, right=(2, 3))

    def __str__(self) -> str:
        said = [str(self.table())]
        if self.fits:
            said.append(f"{sum(f.kept for f in self.fits)} of {len(self.fits)} layers fitted to the original's results")
        if self.bits:
            shared = Counter(self.bits.values())
            said.append("weights: " + ", ".join(f"{shared[n]} at {n} bits" for n in sorted(shared, reverse=True)))
        said += [f"state: {name} {list(old)} -> {list(new)}" for name, (old, new) in self.states.items()]
        if self.not_in_config:
            said.append(f"save_pretrained refuses: {self.not_in_config}")
        if self.refused:
            said.append("not touched:")
            said += [f"  {refusal}" for refusal in self.refused]
        return "\n".join(said)

    def report_html(self, path: str | os.PathLike[str], title: str = "Compressed model") -> Path:
        """Write an HTML file: costs before and after, every group, the choices that were measured, and what was not touched.

        Raises:
            ExportError: the file cannot be written.
        """
        from bitwright.report import write_report

        return write_report({}, path, title=title, compression=[self.details()])

    def save(self, folder: str | os.PathLike[str], name: str = "model") -> list[Path]:
        """Write the model: ``<name>.onnx``; or ``<name>.safetensors`` and ``<name>.plan.json``, which rebuild the module.

        Where bits were chosen, ``<name>.rules.json`` is :attr:`rules`, the last of the paths returned.

        Raises:
            ExportError: the folder cannot be written.
        """
        files = front_end_of(self.model).save_compressed(self.model, dict(self.plan), Path(folder), name)
        if self.rules:
            files.append(Path(folder) / f"{name}.rules.json")
            write_json(files[-1], dict(self.rules))
        return files


@checks_arguments
def compress(
    model: Any,
    data: Iterable[Any],
    target: Mapping[str, float | str],
    *,
    metric: str | Mapping[str, Any] | Callable[[Any], float] | None = None,
    labels: Any = None,
    transform: Callable[[Any], Any] | None = None,
    importance: str = "l2",
    lower_is_better: bool = False,
    ranking: Ranking = "exact",
    loss: Callable[[Any], Any] | None = None,
    cap: float = 0.9,
    widths: str | int = "cpu",
    bits: Iterable[int] = (),
    alike: bool | None = None,
    in_config: bool = False,
    inner: bool = False,
    averaged: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    reconstruction: bool = True,
    batch_norms: bool = True,
    seed: int = 0,
    deadline: float | None = None,
    resume: str | Path | None = None,
    workers: int = 1,
    executor: str = "local",
    providers: Any = None,
    milliseconds: bool | None = None,
    path: str | Path | None = None,
    progress: bool = True,
) -> Compressed:
    """Remove channels, heads and hidden units from a model until a target is met, and fit the rest to the original.

    Args:
        model: a ``torch.nn.Module``, or an ONNX model as a path, a message or an ``onnx_ir`` model; left as it is.
        data: batches, as :func:`bitwright.quantize` takes them; the first checks the cut, all of them serve reconstruction.
        target: cost -> the part of it that may be left, ``{"macs": 0.5}``, or several that are met together: ``macs``,
            ``params``, ``active_params`` (of experts those that one token reads), ``bytes``, ``activation_bytes`` at the peak,
            ``memory`` (both), ``cache_bytes`` (keys and values of attention), ``ms`` in ONNX Runtime on one thread. What
            is counted in bytes may be given in bytes, ``{"memory": "256KiB"}``; activations, keys and values are those of one
            sample.
            Milliseconds are estimated from those of every operator and measured after the cut, which is repeated where they were
            missed.
        metric: a name of :data:`bitwright.metrics.metric.NAMED` or ``{name: options}``, an object of torchmetrics, or
            ``metric(model) -> float`` of a module, or of the ``InferenceSession`` of an ONNX model; measured before and after.
            A function that hands recurrent states to the model reads their widths from it.
        labels, transform: as for :func:`bitwright.quantize`.
        importance: a row of :data:`bitwright.compression.importance.IMPORTANCE`.
        lower_is_better: of the metric.
        ranking: ``exact`` measures the noise that each group alone makes in the outputs when it is pruned, and solves for the
            widths of least noise; a metric is asked of the best three. ``uniform`` takes the same part of every group;
            ``global`` the units with the lowest scores, each in parts of the mean of its group.
        loss: ``loss(module)``, a number to differentiate, for ``importance="taylor"``.
        cap: largest part of the units of one group that may go.
        widths: a row of :data:`bitwright.compression.prune.WIDTHS`, or a number: what widths are multiples of.
        bits: numbers of bits that a weight may have, ``(4, 8)``: they are chosen together with the widths, for a target of bytes,
            in parts of those of the model in float. The model is not rounded; :attr:`Compressed.rules` are the rules for
            :func:`bitwright.quantize`, with which the metric and the outputs here are measured too (rounded to nearest,
            activations in float).
        alike: take as many units from groups at the same place of repeated blocks, so that one configuration describes all;
            by default for models of transformers, whose configuration is rewritten where it can say the new widths.
        in_config: leave what the configuration of a model of transformers cannot say, such as heads of BERT, so that
            ``save_pretrained`` writes what ``from_pretrained`` of its class loads.
        inner: positions within heads, and within groups of convolutions, in place of whole ones.
        averaged: also widths that a layer norm averages over, such as that of the embedding, whose removal changes what the norm
            computes.
        include, exclude: patterns for names of groups and layers.
        reconstruction: fit the layers that lost inputs to the results of the original.
        batch_norms: estimate the statistics of batch norms on the data.
        seed: of ``importance="random"``.
        deadline: seconds after which no further choice is measured, for ``ranking="exact"``.
        resume: folder that keeps what the choice measures: the same call goes on from there after a kill.
        workers: processes that measure parts of the model, for ``ranking="exact"``; 1 measures all in this one. What is measured
            is the same.
        executor: ``local``, or ``ray`` for a cluster, whose processes need access to ``resume``.
        providers: for ONNX models, as ONNX Runtime takes them.
        milliseconds: measure a run of the first batch before and after the cut, as for a target of ``ms``; by default of ONNX
            models, as a module has to be exported for it. A model that became slower says so first.
        path: folder to write to, as :meth:`Compressed.save` does.
        progress: show progress bars on a terminal.

    Raises:
        CalibrationError: ``data`` is empty, or the metric is not a number.
        ConfigError: the target cannot be met; an option is unknown; or nothing can be removed.
        ModelError: the model cannot be read or run, or does not compute what it should after the cut.
    """
    started = time.perf_counter()
    check_target(target)
    data, labels = inputs_and_labels(data, transform, labels, needs_labels(metric))
    batches = list(data)
    given = front_end_of(model).given(model, providers, None)
    score, lower = scorer(metric, lower_is_better, given, batches, labels)
    options = PruneOptions(
        importance,
        ranking,
        cap,
        widths,
        alike,
        inner,
        averaged,
        tuple(include),
        tuple(exclude),
        seed,
        "ms" not in target,
        check_bits(tuple(bits)),
        in_config,
    )
    if options.bits and ranking != "exact":
        raise ConfigError("bits", f"ranking={ranking!r} chooses widths alone", "leave ranking out, or bits")
    find_executor(executor, workers)
    if workers > 1 and ranking != "exact":
        raise ConfigError("workers", f"ranking={ranking!r} measures nothing", "leave workers out")
    search = Search(metric=score, lower_is_better=lower, deadline=deadline, resume=resume, progress=progress)
    job = _Job("compress", model, batches, options, search, reconstruction, batch_norms, providers, loss)
    job = replace(job, processes=(workers, executor))
    if score is not None:
        job = job.from_metric(checked_metric("float", metric_of(score, given.metric_target())))
    timed = not hasattr(model, "state_dict") if milliseconds is None else milliseconds
    result = job.within_ms(target) if "ms" in target else job.pruned(target, timed=timed)
    result = replace(result, seconds=time.perf_counter() - started)
    if path is not None:
        result.save(path)
    return result


_TIMED = 3  # cuts whose milliseconds are measured


@dataclass(frozen=True)
class _Job:
    """The options and data of pruning, shared by :func:`compress` and :func:`prune_model`, which works in place.

    Raises:
        CalibrationError: there is no batch.
    """

    name: str
    model: Any
    batches: Sequence[Any]
    options: PruneOptions
    search: Search
    reconstruction: bool
    batch_norms: bool
    providers: Any
    loss: Callable[[Any], Any] | None = None
    in_place: bool = False
    processes: tuple[int, str] = (1, "local")

    def __post_init__(self) -> None:
        if not self.batches:
            raise CalibrationError(self.name, "the data held no batch", "pass a non-empty list or DataLoader")

    def from_metric(self, value: float) -> _Job:
        """The job, with the metric of the model as it is."""
        return replace(self, search=replace(self.search, baseline=value))

    @cached_property
    def original(self) -> Any:
        """A ``FloatModel`` of a copy of the whole model, for what is fitted to it; ``None`` where nothing is."""
        return self._opened(False).view() if self.reconstruction or self.batch_norms else None

    def _opened(self, in_place: bool) -> Structured:
        return front_end_of(self.model).structured(self.model, self.batches[0], self.providers, in_place)

    @property
    def _readable(self) -> Any:
        return os.fspath(self.model) if isinstance(self.model, os.PathLike) else self.model

    def within_ms(self, target: Mapping[str, float | str]) -> Compressed:
        """Cut, measure, and cut again by the remaining difference to the target."""
        model, example, asked = self._readable, self.batches[0], dict(target)
        wanted = part = float(target["ms"])
        times = operator_times(model, self._opened(False).graph(), example)
        for last in (*[False] * (_TIMED - 1), True):
            result = self.pruned(asked, times)
            ms = compare_ms({"before": model, "after": result.model}, example)
            left = ms["after"] / ms["before"]
            if left <= wanted or last:
                break
            part *= wanted / left
            asked["ms"] = part
        missed = f"{left:.1%} of the ms measured where {wanted:.1%} was asked" if left > wanted else ""
        return replace(result, missed=missed, **with_ms(result.before, result.after, ms))

    def _costs(
        self, structure: Structured, model: Any, costs: dict[str, Mapping[str, float]], timed: bool
    ) -> dict[str, Any]:
        """Costs before and after; with milliseconds where they are ``timed``."""
        if not timed:
            return costs
        ms = changed_ms(self._readable, model, self.batches[0], structure.narrowed(self.batches[0]))
        return with_ms(costs["before"], costs["after"], ms)

    def pruned(
        self, target: Mapping[str, float | str], times: Mapping[str, float] | None = None, timed: bool = False
    ) -> Compressed:
        """Prune the model, and fit the rest to the original; ``timed`` measures milliseconds before and after."""
        original, batches = self.original, self.batches
        structure = self._opened(self.in_place)
        samples = max(samples_in(batches[0]), 1)
        prices, judged = Prices(structure.graph(), set(target) - {"ms"}, None, samples), few_batches(batches)
        wanted = [structure.outputs(batch) for batch in judged]
        workers, executor = self.processes
        alone = replace(self, search=Search(progress=False), processes=(1, "local"))
        measure = partial(_measure_share, alone, dict(target), times)
        shared = partial(measured_shares, measure, workers, executor, self.search.resume)
        score = self.search.metric
        if isinstance(score, Scorer):
            score = score.reading(structure.narrowed)
        search = replace(
            self.search,
            original=original if self.reconstruction else None,
            batch_norms=self.batch_norms,
            metric=score,
            times=times,
            wanted=wanted,
            shared=shared if workers > 1 or executor != "local" else None,
        )
        gradients = None if self.loss is None else partial(structure.gradients, self.loss)
        report = prune(structure, batches, target, self.options, search, gradients)
        before, after = prices.whole, prices.at(report.bits)(structure.graph())
        metrics = {} if search.baseline is None else {"float": search.baseline}

        def measured(name: str) -> None:
            if score is not None:
                with report.rounded():
                    metrics[name] = checked_metric(name, metric_of(score, structure.metric_target()))

        measured("pruned")
        whole = None if original is None else Original(original, batches)
        fits, count = tuple[Fit, ...](), 0
        if whole is not None and self.reconstruction:
            fits = reconstruct(whole, structure.view(), report.readers, search.progress)
        if whole is not None and self.batch_norms:
            count = estimate_batch_norms(whole, structure.view(), report.norms)
        structure.refresh()
        if score is not None:
            metrics["compressed"] = metrics["pruned"]
        if any(fit.kept for fit in fits) or count:
            measured("compressed")
        with report.rounded():
            noise = output_noise(structure, judged, wanted)
            exceeds = noise_exceeds_variation(structure, judged, wanted)
        model = structure.finished()
        costs = self._costs(structure, model, {"before": before, "after": after}, timed)
        if self.in_place:
            structure.give_back()
            model = self.model
        return Compressed(
            model,
            report.rows,
            report.refused,
            costs["before"],
            costs["after"],
            metrics,
            report.choice,
            fits,
            count,
            decibel(noise),
            report.states,
            structure.plan(),
            bits=report.bits,
            rules=report.rules,
            not_in_config=structure.not_in_config,
            noise_exceeds_variation=exceeds,
        )


def _measure_share(
    job: _Job, target: Mapping[str, float | str], times: Mapping[str, float] | None, share: Share, folder: Path
) -> None:
    """Measure the share of another process, which keeps it in ``folder``."""
    structure = job._opened(False)
    wanted = [structure.outputs(batch) for batch in few_batches(job.batches)]
    search = replace(
        job.search, original=job.original if job.reconstruction else None, batch_norms=job.batch_norms, times=times,
        wanted=wanted, resume=folder,
    )  # fmt: skip
    gradients = None if job.loss is None else partial(structure.gradients, job.loss)
    measure_share(structure, job.batches, target, job.options, search, gradients, share.has)


@checks_arguments
def prune_model(
    model: Any,
    data: Iterable[Any],
    *,
    macs: float | None = None,
    params: float | None = None,
    importance: str = "l2",
    ranking: Ranking = "exact",
    cap: float = 0.9,
    widths: str | int = "cpu",
    alike: bool | None = None,
    in_config: bool = False,
    inner: bool = False,
    averaged: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    reconstruction: bool = True,
    batch_norms: bool = True,
    seed: int = 0,
    providers: Any = None,
    progress: bool = True,
) -> Compressed:
    """:func:`compress` in place: the step ``prune`` of recipes.

    The inputs of the model stay as wide as they are, since the steps that follow read the same data.

    Args:
        model: a module, or a loaded ONNX model; changed in place.
        data: batches of real inputs.
        macs, params: the part that may be left.
        importance, ranking, cap, widths, alike, in_config, inner, averaged, include, exclude: as for :func:`compress`.
        reconstruction, batch_norms, seed, providers, progress: as for :func:`compress`.

    Raises:
        CalibrationError: ``data`` is empty.
        ConfigError: no target, or one that cannot be met; an option is unknown; or nothing can be removed.
        ModelError: the model cannot be run, is a path, or does not compute what it should after the cut.
    """
    target = {name: part for name, part in (("macs", macs), ("params", params)) if part is not None}
    if not target:
        raise ConfigError("prune", "it needs a target", "give macs or params (0.5 halves them)")
    check_target(target)
    options = PruneOptions(
        importance,
        ranking,
        cap,
        widths,
        alike,
        inner,
        averaged,
        tuple(include),
        tuple(exclude),
        seed,
        False,
        in_config=in_config,
    )
    search = Search(progress=progress)
    job = _Job("prune_model", model, list(data), options, search, reconstruction, batch_norms, providers, in_place=True)
    return job.pruned(target)


@dataclass(frozen=True)
class Share:
    """The parts that one process measures: every ``count``-th, from ``index`` on."""

    index: int
    count: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"share {self.index + 1} of {self.count}"

    def has(self, part: int) -> bool:
        """Whether part number ``part`` is one of them."""
        return part % self.count == self.index


@dataclass(frozen=True)
class Shares:
    """What is sent to each process.

    Attributes:
        measure: measures a share, and keeps the numbers in a folder.
        folder: of all shares.
    """

    measure: Callable[[Share, Path], None]
    folder: Path

    def run(self, share: Share, given_up: str = "") -> None:
        """Measure a share; one that is given up is measured by the process that waits for it."""
        if not given_up:
            self.measure(share, self.folder / share.name)


@contextmanager
def measured_shares(
    measure: Callable[[Share, Path], None], workers: int, executor: str, resume: str | Path | None
) -> Iterator[list[Path]]:
    """Folders with what the processes have measured, for the length of a ``with`` block.

    Args:
        measure: see :class:`Shares`; it can be sent to another process.
        workers: processes.
        executor: ``local`` or ``ray``; the processes of a cluster need access to ``resume``.
        resume: folder that keeps the measurements; a temporary one by default.

    Raises:
        ConfigError: there is no such executor, or the model cannot be sent to a process.
    """
    run = find_executor(executor, workers)
    with tempfile.TemporaryDirectory(prefix="bitwright-compress-") as temporary:
        job = Shares(measure, Path(temporary if resume is None else resume).resolve())
        shares = [Share(i, workers) for i in range(workers)]
        yield [job.folder / share.name for share in run(job, shares, workers)]
