"""Remedies of the float model: each is measured on a simulation of its own, of a copy of the model that it has changed.

What it brings is told against a simulation of the copy as it is, made under the same rules, asked for the same at every site
and calibrated on the same data, so that the difference is the remedy's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bitwright.analysis.metrics.judged import Judged
from bitwright.analysis.result import LayerRow, RemedyRow
from bitwright.analysis.subject.data import Clock
from bitwright.analysis.subject.subject import Subject, open_subject
from bitwright.errors import BitwrightError
from bitwright.methods.channels import equalize_model, smooth_model
from bitwright.methods.front_end import front_end_of

Measured = tuple[float, float | None]
"""SQNR of the outputs in dB, and the metric."""


@dataclass(frozen=True)
class Adjustment:
    """Measures what changes of the float model bring.

    Attributes:
        subject: the simulation; it is left as it is.
        batches: data to calibrate and to measure on.
        judged: what a simulation is judged by, with nothing measured.
        measure: (what it is judged by) -> the figures.
        clock: how much time is left; when it is over, no other change is begun.
    """

    subject: Subject
    batches: Sequence[Any]
    judged: Callable[[], Judged]
    measure: Callable[[Judged], Measured]
    clock: Clock

    def rows(self, layers: Sequence[LayerRow]) -> tuple[list[RemedyRow], list[str]]:
        """A row per remedy of the float model that the causes of ``layers`` suggest; and why others have none."""
        rows: list[RemedyRow] = []
        notes: list[str] = []
        asked = {name: _asking(name, layers) for name in METHODS}
        before: Measured | None = None
        for name, names in asked.items():
            if not names:
                continue
            if self.clock.over:
                notes.append(self.clock.left_out(f"{name} before the simulation"))
                continue
            try:
                after = self._with(name)
                if isinstance(after, str):
                    notes.append(f"{name} was not tried: {after}")
                    continue
                before = before or self._measured(front_end_of(self.subject.sim).float_model(self.subject.sim))
            except BitwrightError as error:
                notes.append(f"{name} was not tried: {error.site}: {error.problem}")
                continue
            rows.append(RemedyRow(f"{name} before the simulation", names, before[0], after[0], before[1], after[1]))
        return rows, notes

    def _with(self, name: str) -> Measured | str:
        """The figures with a remedy; or why it changes nothing."""
        sim = self.subject.sim
        if sim.repairs:
            return "repairs of the simulation are not part of its float model"
        model = front_end_of(sim).float_model(sim)
        providers = getattr(sim, "providers", None)
        report = METHODS[name](model, self.batches, sim.example(), providers)
        if not report.changed:
            refused = next(iter(report.refused), None)
            return "it changes nothing in this model" + ("" if refused is None else f" ({refused})")
        return self._measured(model)

    def _measured(self, model: Any) -> Measured:
        """The figures of a model, simulated as the subject is and calibrated on the data."""
        sim = front_end_of(self.subject.sim).simulated_as(self.subject.sim, model)
        sim.compute_encodings(self.batches, progress=False)
        new = open_subject(sim)

        def outputs(batch: Any, in_float: bool) -> Sequence[Any]:
            return (self.subject if in_float else new).outputs(batch, in_float)

        return self.measure(replace(self.judged(), subject=replace(new, outputs=outputs)))


def _asking(name: str, layers: Sequence[LayerRow]) -> tuple[str, ...]:
    """Layers with a cause that suggests a remedy."""
    return tuple(
        layer.name for layer in layers if any(name in cause.evidence.get("tries", ()) for cause in layer.causes)
    )


def _equalize(model: Any, batches: Sequence[Any], example: Any, providers: Any) -> Any:
    return equalize_model(model, dummy_input=example, data=batches, providers=providers, progress=False)


def _smooth(model: Any, batches: Sequence[Any], example: Any, providers: Any) -> Any:
    return smooth_model(model, batches, example, providers=providers, progress=False)


METHODS: dict[str, Callable[[Any, Sequence[Any], Any, Any], Any]] = {"equalize": _equalize, "smooth": _smooth}
"""Remedy -> what changes the model in place, and reports it."""
