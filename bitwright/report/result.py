"""Summary of a result of ``quantize`` in a few lines: error against float, metric, size, speed, files, steps."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bitwright.core.simulation.output_quality import PartQuality, gain
from bitwright.core.simulation.sites import Site
from bitwright.errors import BitwrightError, ConfigError
from bitwright.export.targets import find_target
from bitwright.report.document import level
from bitwright.report.page import simulation_report
from bitwright.tables import Tabular

logger = logging.getLogger("bitwright")
_MOST_PARAM = 500  # characters of a parameter in MLflow


def _tracker(logger: Any) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """How an experiment tracker takes a scalar, a text and a parameter.

    Raises:
        ConfigError: it is none that is known.
    """
    if hasattr(logger, "add_scalar"):
        keep = getattr(logger, "add_text", lambda name, text: None)
        # TensorBoard reads Markdown: indented lines keep their breaks
        return (
            lambda name, value, step: logger.add_scalar(name, value, step),
            lambda name, text: keep(name, "\n".join(f"    {line}" for line in text.splitlines())),
            keep,
        )
    if hasattr(logger, "log_metric"):
        return (
            lambda name, value, step: logger.log_metric(name, value, step=step),
            lambda name, text: logger.log_text(text, f"{name}.txt"),
            lambda name, value: logger.log_param(name, value[:_MOST_PARAM]),
        )
    problem = f"{type(logger).__name__} has neither add_scalar nor log_metric"
    raise ConfigError("result.log", problem, "give a SummaryWriter of TensorBoard, or the module mlflow")


_LITTLE = 0.01  # share of an output that differs between samples, below which the noise is compared with it too
_NO_SHARE = -200.0  # dB, below which the noise in per cent of the output says nothing


_ADVICE_FOR_OFFSETS = (
    'try config_file={"rules": [{"match": "*", "model_output": "uint16"}]}, or None for float, if the output lies far from zero; '
    "or held-out samples that differ more"
)


def _output(name: str) -> str:
    return name if name.startswith("output") else f"output {name}"


def _part(share: float) -> str:
    """How much noise is of something: in per cent below all of it, else how many times as much.

    >>> _part(0.013), _part(4.64)
    ('1.3 % of', '4.6 times')
    """
    return f"{100 * share:.2g} % of" if share < 1 else f"{share:.2g} times"


_HARMLESS = ("passes_on", "dead_channels")
_CAUSES = 2  # layers whose causes are told


def main_causes(sim: Any, batches: Sequence[Any]) -> tuple[str, ...]:
    """Why the outputs of a calibrated simulation are noisy: causes of the layers that cost most, in sentences.

    A fast analysis: about ten forward passes and one backward. Empty where there is none, or the model cannot be analyzed.
    """
    from bitwright import analyze  # by its public name: it writes reports itself

    try:
        found = analyze(sim, batches, mode="fast", progress=False)
    except BitwrightError as error:
        logger.info("no cause of the noise was found: %s", error)
        return ()
    chosen = [note for note in found.notes if note.startswith("choices that differ")]
    faults = (next((c.text for c in layer.causes if c.cause not in _HARMLESS), None) for layer in found.worst(_CAUSES))
    return (*chosen, *(text for text in faults if text is not None))


class Reported(Tabular):
    """Base class of the result of ``quantize``: what it prints, and its HTML report. Its rows are the steps of the recipe.

    Attributes:
        sim, exported, report, metrics, quality, plain, repair, stem, poor_below, tried, asked, causes: see
            :class:`bitwright.recipes.quantize.Result`.
    """

    _rows = "report"

    sim: Any
    exported: Any
    report: Any
    metrics: dict[str, float]
    metric: Any
    quality: Any
    plain: Any
    repair: Any
    stem: Any
    poor_below: float
    tried: str
    asked: tuple[str, ...]
    causes: tuple[str, ...]

    @property
    def poor(self) -> bool:
        """True where the worst part of the outputs is below ``poor_below``."""
        worst = self.quality.worst
        return worst is not None and worst.sqnr < self.poor_below

    @property
    def headline(self) -> str:
        """One line: anything that went wrong, then the error of the worst part of the outputs, in dB and in a word."""
        worst, parts = self.quality.worst, len(self.quality.parts)
        if worst is None:
            figure = "the outputs hold no numbers to compare with float"
        else:
            which = f"worst of {parts} outputs: {worst.name}" if parts > 1 else _output(worst.name)
            figure = f"{which} {worst.figure}{self._meaning(worst)}, {self.quality.where}"
        wrong = [f"{step}, which the recipe names, changed nothing" for step in self.asked]
        if self.poor:
            wrong.append(f"POOR, below {self.poor_below:g} dB")
        elif worst is not None and (why := self._uncertain(worst)):
            wrong.append(f"UNCERTAIN, {why}")
        wrong += [self.tried] if self.tried else []
        return "; ".join([*wrong, *self._worse_files, figure])

    @property
    def _worse_files(self) -> list[str]:
        """In what the quantized file is worse than the float file, whatever its outputs."""
        sizes, speed = self._sizes, None if self.exported is None else self.exported.speed
        found = []
        if sizes and sizes[1] > sizes[0]:
            found.append(f"the file is LARGER than the float file by {sizes[1] - sizes[0]:,} bytes")
        if speed is not None and speed.slower:
            found.append(f"the file is SLOWER than the float file on this machine, {speed}")
        return found

    def _uncertain(self, worst: PartQuality) -> str:
        """Why other data may be poor though the samples that judge are not; empty where their interval says that they are not."""
        if self._noise_exceeds_variation:
            noisiest = max(self.quality.parts, key=lambda part: part.noise_of_varying or 0.0)
            return f"the noise of {_output(noisiest.name)} is larger than what differs between samples"
        few = self._few_samples(worst)
        return f"{few}: more held-out samples would tell" if few else ""

    @property
    def _noise_exceeds_variation(self) -> bool:
        return any(part.noise_exceeds_variation for part in self.quality.parts)

    def _few_samples(self, worst: PartQuality) -> str:
        """Why the samples that judge are too few; empty where they are not."""
        if math.isinf(worst.sqnr):
            return ""
        if worst.low is None:
            return "a single sample judges, and others may be worse"
        if self.quality.too_few:
            return "calibration saw the samples that judge, and others may be worse"
        if worst.low < self.poor_below:
            return f"the interval reaches below {self.poor_below:g} dB"
        few = worst.few and (worst.another or -math.inf) < self.poor_below
        return f"{worst.units} samples judge, and another one may be below {self.poor_below:g} dB" if few else ""

    @property
    def _sizes(self) -> list[int]:
        """Bytes of the exported float model and of the quantized one, with their external data; empty once they were removed."""
        done = self.exported
        models = [] if done is None else [done.float_model, done.tflite or done.qdq]
        if not all(file.is_file() for file in models):
            return []
        return [
            sum(path.stat().st_size for path in done.files if path.name in (file.name, f"{file.name}.data"))
            for file in models
        ]

    def _meaning(self, worst: PartQuality) -> str:
        """Rate an SQNR in a word, unless the headline already says POOR, and give the noise as a share of the output.

        Where little of the output differs between samples, the noise is also given as a share of that.
        """
        sqnr, varying = worst.sqnr, worst.varying
        if math.isinf(sqnr):
            return ""
        word = "" if self.poor else f", {level(sqnr)}"
        if sqnr <= _NO_SHARE:
            return word
        share = worst.noise_of_varying if varying is not None and 0 < varying < _LITTLE else None
        of_varying = "" if share is None else f" and {_part(share)} what differs between samples"
        return f"{word}, noise {_part(10 ** (-sqnr / 20))} it{of_varying}"

    @property
    def advice(self) -> str:
        """Suggestions for a poor result, or one whose noise is larger than what differs between samples; empty otherwise."""
        if not self.poor:
            return _ADVICE_FOR_OFFSETS if self._noise_exceeds_variation else ""
        bits = _counted(self.sim, lambda site: site.role in ("input", "output"))[2]
        wider = 'preset="w8a16" (16-bit activations), ' if 16 not in bits and "16-bit" not in self.tried else ""
        more = "" if not self.quality.seen else "five or more batches, "
        return (
            f'try {more}{wider}effort="thorough", calibration data of more kinds, or float where bitwright.analyze(result.sim, '
            "data) finds the noise"
        )

    @property
    def quantized(self) -> str:
        """One line: how many of the requested quantizers are active, and with how many bits."""
        kinds = {
            "weights": _counted(self.sim, lambda site: site.role == "weight"),
            "activations": _counted(self.sim, lambda site: site.role in ("input", "output")),
        }
        shown = []
        for kind, (done, asked, bits) in kinds.items():
            widths = ", ".join(f"{count} with {width} bits" for width, count in sorted(bits.items()) if width)
            shown.append(
                f"{kind} {done} of {asked}{f' ({widths})' if len(bits) > 1 else ''}" if asked else f"no {kind}"
            )
        done, asked, _ = kinds["activations"]
        alone = "; NO ACTIVATION IS QUANTIZED: the model has quantized weights only" if asked and not done else ""
        return f"quantized: {', '.join(shown)}{self._released}{alone}"

    @property
    def _released(self) -> str:
        """Why a step left activations in float that the rules place a quantizer at: reasons that several of them share."""
        quantizers = {
            id(s.quantizer): s.quantizer for s in self.sim.quantizers.values() if s.role in ("input", "output")
        }
        reasons = Counter(q.why_spec for q in quantizers.values() if not (q.enabled or q.derived) and q.why_spec)
        told = [f"{count} because {why}" for why, count in reasons.most_common() if count > 1]
        return f" (in float: {', '.join(told)})" if told else ""

    def report_html(self, path: str | os.PathLike[str], data: Any = None, **options: Any) -> Path:
        """Write an HTML file that shows the simulation, the effect of each step of the recipe, and the metric.

        Args:
            path: of the file.
            data: batches on which errors are measured; by default the example input alone.
            options: as for :func:`bitwright.report.simulation_document`.

        Raises:
            ExportError: the file cannot be written.
        """
        notes: Iterable[str] = options.pop("notes", ())
        said = [
            self.headline,
            *filter(None, [self.advice]),
            *(f"cause: {cause}" for cause in self.causes),
            self.quantized,
        ]
        return simulation_report(
            self.sim, path, data, recipe=self.report, measured=self.metrics, notes=[*said, *notes], **options
        )

    def log(self, logger: Any, prefix: str = "quantize") -> None:
        """Write numbers and text of the result to an experiment tracker.

        Scalars: dB of every part of the outputs, float and quantized metric, bytes of the files, and metric and dB after each
        step of the recipe, whose number is the step of the curve. Text: the printed result. Parameters: preset, recipe and data.

        Args:
            logger: a ``SummaryWriter`` of TensorBoard, or what has its ``add_scalar(name, value, step)`` and ``add_text(name,
                text)``; or the module ``mlflow``, inside a run, or what has its ``log_metric``, ``log_param`` and ``log_text``.
            prefix: names begin with it.

        Raises:
            ConfigError: it has neither.
        """
        scalar, text, param = _tracker(logger)
        for name, value, step in self._numbers():
            scalar(f"{prefix}/{name}", value, step)
        for name, value in self.sim.origin.items():
            param(f"{prefix}.{name}", value)
        text(f"{prefix}/result", str(self))

    def _numbers(self) -> Iterator[tuple[str, float, int]]:
        """Name, value and step of everything that is finite."""
        found = [(f"sqnr_db/{part.name}", part.sqnr, 0) for part in self.quality.parts]
        found += [(f"metric/{which}", value, 0) for which, value in self.metrics.items()]
        found += [(f"bytes/{which}", size, 0) for which, size in zip(("float", "quantized"), self._sizes, strict=False)]
        for step, outcome in enumerate(self.report):
            found += [("recipe/metric", outcome.metric, step)] if outcome.metric is not None else []
            found += (
                [("recipe/sqnr_db", outcome.sqnr[1 if outcome.kept else 0], step)] if outcome.sqnr is not None else []
            )
        return ((name, float(value), step) for name, value, step in found if math.isfinite(value))

    def summary(self, verified: str | None = None) -> Iterator[str]:
        """The lines below the headline: metric, size, speed, verification, files, and what was done.

        Args:
            verified: result of a verification of the files, where one was run.
        """
        if self.advice:
            yield self.advice
        yield from (f"cause: {cause}" for cause in self.causes)
        if self.metrics:
            before, after = self.metrics["float"], self.metrics["quantized"]
            row = self.metric
            said = f"metric: float {before:.5g} -> quantized {after:.5g} ({after - before:+.3g})"
            yield said if row is None else f"{said}; {row.name}: {row.difference.text}"
        yield from self._against_plain
        yield self.quantized
        if self.exported is not None:
            yield from self._files(verified)
        if self.sim.calibration_log is not None:
            yield from self.sim.calibration_log.lines()
        yield from (str(part) for part in (self.repair, self.stem if self.stem.layers else None) if part is not None)
        yield self._steps

    @property
    def _against_plain(self) -> Iterator[str]:
        """One line: the worst part beside that of the plain simulation, where the default recipe ran and is in effect."""
        worst, before = self.quality.worst, () if self.plain is None else self.plain.parts
        same = next((part for part in before if worst is not None and part.name == worst.name), None)
        found = None if worst is None or same is None or self.quality == self.plain else gain(worst, same)
        if found is not None and same is not None:
            open_ = found.low is None or found.low < 0
            said = ", which so few samples do not tell from none" if open_ else ""
            yield f"plain simulation: {same.sqnr:.1f} dB there; this result: {found}{said}"

    def _files(self, verified: str | None) -> Iterator[str]:
        """Size, speed, verification and names of the files."""
        done = self.exported
        sizes = self._sizes
        if not sizes:
            yield f"the files written to {done.manifest.parent} are there no more"
            return
        larger = (
            ": larger, as its quantizers take more than the integers of its weights save" if sizes[1] > sizes[0] else ""
        )
        yield f"size: float {_bytes(sizes[0])} -> quantized {_bytes(sizes[1])} ({sizes[1] / sizes[0]:.0%}){larger}"
        if done.speed is not None:
            runtime = find_target(done.target).runtime
            busy = ", which tells little: the machine is busy; run `bitwright benchmark` when it is not"
            yield f"speed against float in {runtime}, 1 thread: {done.speed}{'' if done.speed.steady else busy}"
        folder = done.manifest.parent
        if verified is not None:
            yield f"verify: {verified}"
        elif done.samples is not None:
            yield f"verify: not run; `bitwright verify {folder}` compares the file with the simulation"
        yield f"wrote {len(done.files)} files to {folder}: {', '.join(path.name for path in done.files)}"
        if done.samples is not None:
            yield f"{done.samples.name} holds a batch of your data; samples=False (--no-samples) leaves it out"
        if done.notes:
            count = len(done.notes)
            yield f"{count} note{'s' * (count != 1)} on what is in float or written otherwise: -v, or exported.notes"

    @property
    def _steps(self) -> str:
        """One line: steps that are in effect, steps that changed nothing, and steps that are not in effect."""
        kinds: dict[str, list[str]] = {"done": [], "no change": [], "undone or left out": []}
        for outcome in self.report:
            name, bracket, _ = outcome.step.partition("(")
            if bracket:  # the first two lines are no steps
                kind = "undone or left out" if not outcome.kept else "done" if outcome.changed else "no change"
                kinds[kind].append(name)
        return "steps: " + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.summary()])


def _bytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _counted(sim: Any, which: Any) -> tuple[int, int, dict[int, int]]:
    """Count the quantizers of the sites that ``which`` accepts: active ones, all, and active ones by bits."""
    found: dict[int, Site] = {
        id(s.quantizer): s for s in sim.quantizers.values() if which(s) and not s.quantizer.derived
    }
    working = [site for site in found.values() if site.enabled]
    bits: dict[int, int] = {}
    for site in working:
        width = getattr(site.quantizer.spec.format, "bits", 0) or 0
        bits[width] = bits.get(width, 0) + 1
    return len(working), len(found), bits
