"""What the results of ``quantize`` of both front ends have in common beside their fields: what they say first."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bitwright.core.simulation.sites import Site
from bitwright.report.of_simulation import simulation_report
from bitwright.tables import Tabular

POOR = 20.0  # dB: the noise is a tenth of the output


class Reported(Tabular):
    """A result with a simulation, a report and a rating; its rows are the steps of the recipe.

    Attributes:
        sim, report, metrics, quality, poor_below, tried, asked: see :class:`bitwright.methods.pipeline.Result`.
    """

    _rows = "report"

    sim: Any
    report: Any
    metrics: dict[str, float]
    quality: Any
    poor_below: float
    tried: str
    asked: tuple[str, ...]

    @property
    def poor(self) -> bool:
        """Whether the worst part of the outputs is below ``poor_below``."""
        worst = self.quality.worst
        return worst is not None and worst.sqnr < self.poor_below

    @property
    def headline(self) -> str:
        """One line: what is wrong, if anything is, and the worst part of the outputs."""
        worst, parts = self.quality.worst, len(self.quality.parts)
        if worst is None:
            figure = "the outputs hold no numbers to compare with float"
        else:
            noise = f", noise {100 * 10 ** (-worst.sqnr / 20):.2g} % of it" if worst.sqnr > -200 else ""
            which = f"worst of {parts} outputs: " if parts > 1 else "" if worst.name.startswith("output") else "output "
            figure = f"{which}{worst}{'' if worst.sqnr == float('inf') else noise}, {self.quality.where}"
        wrong = [f"{step}, which the recipe names, changed nothing" for step in self.asked]
        if self.poor:
            wrong.append(f"POOR, below {self.poor_below:g} dB")
        wrong += [self.tried] if self.tried else []
        return "; ".join([*wrong, figure])

    @property
    def advice(self) -> str:
        """What to try where the result is poor; empty otherwise."""
        if not self.poor:
            return ""
        bits = _counted(self.sim, lambda site: site.role in ("input", "output"))[2]
        wider = 'preset="w8a16" (16-bit activations), ' if 16 not in bits and "16-bit" not in self.tried else ""
        more = "" if not self.quality.seen else "five or more batches, "
        return (
            f'try {more}{wider}effort="thorough", calibration data of more kinds, or float where bitwright.analyze(result.sim, '
            "data) finds the noise"
        )

    @property
    def quantized(self) -> str:
        """One line: of the quantizers that were asked for, how many work, and with how many bits."""
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
        return f"quantized: {', '.join(shown)}{alone}"

    def report_html(self, path: str | os.PathLike[str], data: Any = None, **options: Any) -> Path:
        """Write one HTML file that shows the simulation, what each step of the recipe brought, and the metric.

        Args:
            path: of the file.
            data: batches on which errors are measured; by default the example input alone.
            options: as for :func:`bitwright.report.simulation_document`.

        Raises:
            ExportError: the file cannot be written.
        """
        notes: Iterable[str] = options.pop("notes", ())
        said = [self.headline, *filter(None, [self.advice]), self.quantized]
        return simulation_report(
            self.sim, path, data, recipe=self.report, measured=self.metrics, notes=[*said, *notes], **options
        )

    def __str__(self) -> str:
        lines = [self.headline, self.advice]
        if self.metrics:
            lines.append("metric: " + ", ".join(f"{name} {value:.5g}" for name, value in self.metrics.items()))
        return "\n".join(line for line in [*lines, self.quantized, str(self.report)] if line)


def _counted(sim: Any, which: Any) -> tuple[int, int, dict[int, int]]:
    """Of the quantizers of some sites: how many work, how many there are, and how many by bits."""
    found: dict[int, Site] = {
        id(s.quantizer): s for s in sim.quantizers.values() if which(s) and not s.quantizer.derived
    }
    working = [site for site in found.values() if site.enabled]
    bits: dict[int, int] = {}
    for site in working:
        width = getattr(site.quantizer.spec.format, "bits", 0) or 0
        bits[width] = bits.get(width, 0) + 1
    return len(working), len(found), bits
