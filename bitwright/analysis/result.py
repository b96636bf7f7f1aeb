"""Result of an analysis: rows of sites and layers, worst first, and their JSON form (``docs/analysis.md``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from bitwright.errors import ConfigError, checks_arguments
from bitwright.metrics.intervals import Difference
from bitwright.metrics.metric import MetricRow
from bitwright.tables import Tabular, data_frame, html_table, plain, text_table

FORMAT, VERSION = "bitwright-analysis", 1
MOST_DB = 200.0  # what stands for no error at all, so that every number written is finite
_SHOWN = 10

Number = float
Noise = float
"""Power of an error over the power of the signal it was added to."""


def decibel(noise: Noise | None) -> float | None:
    """Signal-to-quantization-noise ratio in dB; ``None`` of what was not measured.

    >>> decibel(0.01), decibel(0.0), decibel(None)
    (20.0, 200.0, None)
    """
    if noise is None:
        return None
    if math.isnan(noise) or noise == math.inf:
        return -MOST_DB
    return max(-MOST_DB, min(MOST_DB, -10 * math.log10(noise))) if noise > 0 else MOST_DB


def noise_of(db: float) -> Noise:
    """The inverse of :func:`decibel`; 0 for its largest value."""
    return 0.0 if db >= MOST_DB else float(10 ** (-db / 10))


@dataclass(frozen=True)
class Cause:
    """Cause of a layer's error.

    Attributes:
        cause: key, one of :data:`bitwright.analysis.causes.CAUSES`.
        text: one sentence with the numbers seen.
        evidence: these numbers by name, and ``site``, where they were seen.
        remedy: what to do about it, as ``Analysis.try_remedies`` knows it or as a step of a recipe.
    """

    cause: str
    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""


@dataclass
class SiteRow:
    """One quantizer site. What was not measured is ``None``.

    Attributes:
        name, role, layer, op: the site, its role, the operator it belongs to and that operator's type.
        dtype, bits: of its grid (``int8``); of a site in float, what the rules asked for.
        enabled, why_float: whether it quantizes, and why not.
        noise: estimate of what its quantizer alone costs: noise over signal at the model's outputs.
        only_db: SQNR of the outputs with only this site quantized.
        without_db: SQNR of the outputs with all sites quantized but this one.
        metric_only, metric_without: the same for the metric.
        codes_used: share of the grid that holds 99 % of the values, 0 to 1.
        clipped: share of the values that lie outside of the grid.
        lsb: the largest step of the grid, in units of the tensor.
        minimum, maximum: of the values seen.
        histogram: ``{"edges": [...], "counts": [...]}`` of the values seen.
        grid: ``{"low", "high", "steps"}``.
        channels: ``{"low": [...], "high": [...]}`` of the values seen, one entry per channel.
    """

    name: str
    role: str
    layer: str
    op: str
    dtype: str = ""
    bits: int | None = None
    enabled: bool = True
    why_float: str = ""
    noise: Noise | None = None
    only_db: float | None = None
    without_db: float | None = None
    metric_only: float | None = None
    metric_without: float | None = None
    codes_used: float | None = None
    clipped: float | None = None
    lsb: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    histogram: dict[str, Any] | None = None
    grid: dict[str, Any] | None = None
    channels: dict[str, Any] | None = None
    _also: ClassVar[tuple[str, ...]] = ("sqnr_db",)

    @property
    def sqnr_db(self) -> float | None:
        """:attr:`noise` as SQNR."""
        return decibel(self.noise)

    @property
    def cost(self) -> Noise:
        """Sort key: noise at the outputs, measured where available, else estimated."""
        if self.only_db is not None:
            return noise_of(self.only_db)
        return self.noise or 0.0


@dataclass
class LayerRow:
    """One operator. Errors are SQNR in dB, higher is better; what was not measured is ``None``.

    Attributes:
        name, op: the operator and its type.
        sites: names of its quantizer sites.
        inputs: the operators whose values it reads.
        noise: what its sites cost together: noise over signal at the model's outputs.
        made_db: error made here, of the layer's outputs: quantized against float, both fed with float values.
        made_quantized_db: the same, both fed with what the quantized layers before it make.
        arrived_db: error of what it reads.
        after_db: error of what it makes in the quantized model.
        made_lsb: root mean square of the error made, in steps of the output's grid.
        jump: dB lost from ``arrived_db`` to ``after_db``; inputs better than 60 dB count as 60.
        causes: why, the most important first.
    """

    name: str
    op: str
    sites: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    noise: Noise | None = None
    made_db: float | None = None
    made_quantized_db: float | None = None
    arrived_db: float | None = None
    after_db: float | None = None
    made_lsb: float | None = None
    jump: float | None = None
    causes: tuple[Cause, ...] = ()


@dataclass
class GroupRow:
    """Several sites together: a block, all weights, all activations, a pattern of the user's."""

    name: str
    sites: tuple[str, ...]
    noise: Noise | None = None
    only_db: float | None = None
    without_db: float | None = None


@dataclass(frozen=True)
class RemedyRow:
    """One remedy that :meth:`Analysis.try_remedies` measured, before and after, on the data of the analysis."""

    remedy: str
    layers: tuple[str, ...]
    before_db: float
    after_db: float
    metric_before: float | None = None
    metric_after: float | None = None
    kept: bool = False


@dataclass
class Analysis(Tabular):
    """Result of :func:`bitwright.analyze`.

    Attributes:
        model: ``name``, ``front_end``, ``parameters``, ``bytes_float``, ``bytes_quantized``.
        data: ``samples``, and ``passes``: work done, in forward passes over all of the data.
        mode: ``fast``, ``exact`` or ``auto``.
        sites, layers: worst first.
        output: ``sqnr_db`` of the quantized model's outputs, ``kl`` of its answers' probabilities where it has any.
        metric: the user's metric, if there is one.
        groups: sensitivity of several sites together.
        remedies: what :meth:`try_remedies` measured.
        notes: what a reader should know.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    mode: str
    sites: tuple[SiteRow, ...] = ()
    layers: tuple[LayerRow, ...] = ()
    output: dict[str, Any] = field(default_factory=lambda: {"sqnr_db": None, "kl": None})
    metric: MetricRow | None = None
    groups: tuple[GroupRow, ...] = ()
    remedies: tuple[RemedyRow, ...] = ()
    notes: tuple[str, ...] = ()
    _also: ClassVar[tuple[str, ...]] = ("format", "version")
    _digits: ClassVar[int | None] = 6
    _try: Callable[..., tuple[RemedyRow, ...]] | None = field(default=None, repr=False, compare=False)

    @checks_arguments
    def worst(self, n: int = 5) -> tuple[LayerRow, ...]:
        """The ``n`` most costly layers."""
        return self.layers[:n]

    @checks_arguments
    def try_remedies(self, n: int = 3, **options: Any) -> tuple[RemedyRow, ...]:
        """Measure the remedies suggested for the ``n`` worst layers (:func:`bitwright.analysis.causes.try_remedies`)."""
        if self._try is None:
            raise ConfigError(
                "try_remedies",
                "this analysis was read from a file and has no simulation",
                "call bitwright.analyze(sim, data) again",
            )
        self.remedies = self._try(self, n, **options)
        return self.remedies

    # -- forms

    @property
    def format(self) -> str:
        """Value of the dictionary's ``format`` key."""
        return FORMAT

    @property
    def version(self) -> int:
        """Version of the dictionary's layout."""
        return VERSION

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Analysis:
        """Rebuild from the result of :meth:`to_dict`.

        Raises:
            ConfigError: it is not an analysis, or of another version.
        """
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            raise ConfigError(
                "analysis",
                f"format {content.get('format')!r}, version {content.get('version')!r}",
                f"give what Analysis.to_dict() returned: format {FORMAT!r}, version {VERSION}",
            )
        metric = content["metric"]
        return cls(
            dict(content["model"]),
            dict(content["data"]),
            content["mode"],
            tuple(SiteRow(**{k: v for k, v in row.items() if k != "sqnr_db"}) for row in content["sites"]),
            tuple(_layer(row) for row in content["layers"]),
            dict(content["output"]),
            None if metric is None else MetricRow(**{**metric, "difference": Difference(**metric["difference"])}),
            tuple(GroupRow(**{**row, "sites": tuple(row["sites"])}) for row in content["groups"]),
            tuple(RemedyRow(**{**row, "layers": tuple(row["layers"])}) for row in content["remedies"]),
            tuple(content["notes"]),
        )

    def records(self, what: str = "layers") -> list[dict[str, Any]]:
        """One mapping per row of ``layers``, ``sites``, ``groups`` or ``remedies``.

        Raises:
            ConfigError: there is no such table.
        """
        tables = ("layers", "sites", "groups", "remedies")
        if what not in tables:
            raise ConfigError("records", f"there is no table {what!r}", f"use {', '.join(tables)}")
        return [plain(row, self._digits) for row in getattr(self, what)]

    def to_pandas(self, what: str = "layers") -> Any:
        """The same as a ``pandas.DataFrame``.

        Raises:
            ConfigError: there is no such table, or pandas is not installed.
        """
        return data_frame(self.records(what))

    @checks_arguments
    def report(self, path: str | Path) -> Path:
        """Write the report as one HTML file that needs no network; see :mod:`bitwright.report`."""
        from bitwright.report import write_report  # type: ignore[import-not-found, unused-ignore]

        return Path(write_report(self.to_dict(), path))

    # -- shown

    @property
    def summary(self) -> str:
        """Lines on the whole model."""
        sqnr = self.output["sqnr_db"]
        lines = [f"{self.model['name']}: outputs at {_db(sqnr)} SQNR, {self.data['samples']} samples"]
        if self.metric is not None:
            m = self.metric
            lines.append(f"{m.name}: float {m.float:.4g}, quantized {m.quantized:.4g}; {m.difference.text}")
        return "\n".join(lines)

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                layer.name,
                layer.op,
                _db(decibel(layer.noise)),
                _db(layer.made_db),
                _db(layer.arrived_db),
                _db(layer.after_db),
                "; ".join(c.text for c in layer.causes[:2] if c.cause != "passes_on"),  # the columns show it
            )
            for layer in self.layers
            if layer.sites
        ]

    def __str__(self) -> str:
        lines = [self.summary, text_table(_HEAD, self._cells()[:_SHOWN])]
        more = len([layer for layer in self.layers if layer.sites]) - _SHOWN
        lines += [f"and {more} more layers"] if more > 0 else []
        lines += [f"remedy: {line}" for line in self._remedies()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _remedies(self) -> Sequence[str]:
        if self.remedies:
            return [
                f"{row.remedy} at {', '.join(row.layers)}: {row.before_db:.1f} dB to {row.after_db:.1f} dB"
                + (", kept" if row.kept else "")
                for row in self.remedies
            ]
        worst = [layer for layer in self.layers[:3] if layer.causes]
        return [f"{layer.name}: {layer.causes[0].remedy}" for layer in worst if layer.causes[0].remedy]

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._cells(), self.summary, [*self._remedies(), *self.notes])


_HEAD = ("layer", "operator", "costs alone", "made", "arrived", "after", "causes")


def _layer(row: Mapping[str, Any]) -> LayerRow:
    causes = tuple(Cause(**cause) for cause in row["causes"])
    return LayerRow(**{**row, "sites": tuple(row["sites"]), "inputs": tuple(row["inputs"]), "causes": causes})


def _db(value: float | None) -> str:
    if value is None:
        return ""
    return "exact" if value >= MOST_DB else f"{value:.1f} dB"
