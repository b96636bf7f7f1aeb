"""Prepare every precision of every quantizer once, so that a trial only selects them.

Weights of fewer bits are rounded with error feedback (ranges by ``seq_mse`` below 8 bits, then ``gptq``), all of them at each
width, and kept; activations keep the encodings that follow from their statistics. These weights make up for errors of their
own layer only, so that the noise of layers adds up whatever the others have. :meth:`PreparedPrecisions.fit` rounds the weights of
one choice once more, each layer seeing the errors of those before it, as the default recipe does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bitwright.analysis.subject import Subject
from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.simulation.float_model import Undo
from bitwright.errors import BitwrightError
from bitwright.methods.layers import holds_layer_weight
from bitwright.precision.candidates import Candidate, Group, highest, spec_at
from bitwright.recipes.site_cost import OutputErrors, output_errors

if TYPE_CHECKING:
    from torch import Tensor

    from bitwright.core.simulation.sites import Site
    from bitwright.methods.rounding.program import Program, SimulatedModel, State

Floats = NDArray[np.float64]
Key = tuple[str, QuantSpec | None]
_GPTQ: Mapping[str, Any] = {"damping": 0.1, "rows_per_input": 64}  # as the default recipe has it
_WORST = 1e6  # noise over signal of what is not finite


class PreparedPrecisions:
    """States of quantizers and weights of a simulation.

    Args:
        subject: the simulation.
        groups, candidates: as :func:`bitwright.precision.candidates.find_groups` takes and gives them.
        least: site -> bits that it has at least.
        data: batches for the rounding of weights.
        rounding: whether weights are rounded with error feedback; otherwise each goes to its nearest code.
        samples: rows for the rounding.

    Attributes:
        refused: group -> candidate -> why a site of it cannot have it.
    """

    def __init__(
        self,
        subject: Subject,
        groups: Sequence[Group],
        candidates: Sequence[Candidate],
        least: Mapping[str, int],
        data: Iterable[Any],
        *,
        rounding: bool = True,
        samples: int = 256,
    ) -> None:
        self._subject, self.groups, self.candidates, self._least = subject, groups, candidates, least
        self._data, self._rounding, self._samples = data, rounding, samples
        self.steps: SimulatedModel = subject.steps()
        self.refused: dict[int, dict[int, str]] = {}
        self._states: dict[Key, Undo] = {}
        self._weights: dict[Key, Tensor] = {}
        self._planned = {name: subject.sites[name].quantizer.spec for group in groups for name in group.sites}
        self._original: dict[str, Tensor] = {}
        self._base = subject.remember()
        self._now: list[int | None] = [None] * len(groups)
        self.restore()
        for candidate in candidates:
            for i, group in enumerate(groups):
                for name in group.activations:
                    if (key := (name, self._spec(name, candidate))) not in self._states:
                        self._ready(i, candidate, key)
        for candidate in candidates:
            self._prepare_weights(candidate)
        self.restore()

    def restore(self) -> None:
        """Restore the simulation to its state before the search."""
        self._base()
        for site, tensor in self._original.items():
            self.steps.set_weight(site, tensor)
        self._base()  # whatever a new weight does to its quantizer
        self._now = [None] * len(self.groups)

    # -- making ready

    def _prepare_weights(self, candidate: Candidate) -> None:
        keys = {name: (name, self._spec(name, candidate)) for group in self.groups for name in group.weights}
        if all(key in self._states for key in keys.values()):
            return
        self.restore()
        best = self.candidates[highest(self.candidates)]
        for group in self.groups:  # rounding sees activations that are as good as they get
            for name in group.activations:
                if (undo := self._states.get((name, self._spec(name, best)))) is not None:
                    undo()
        for i, group in enumerate(self.groups):
            for name in group.weights:
                self._ready(i, candidate, keys[name])
        if self._rounding and isinstance(candidate.weight and candidate.weight.format, IntFormat):
            self._round(candidate, keys)

    def _ready(self, group: int, candidate: Candidate, key: Key) -> None:
        """Set a spec at one site and keep the state; a site that cannot have it refuses its group the candidate."""
        name, spec = key
        site: Site = self._subject.sites[name]
        before = site.quantizer.remember()
        try:
            if spec is None:
                site.enabled = False
            elif site.quantizer.statistics is None and site.role in ("input", "output"):
                _regrid(site, spec)
            else:
                site.spec = spec
            if spec is not None and site.encoding is None:
                raise _NoRange
        except (BitwrightError, _NoRange) as error:
            before()
            why = (
                f"{name}: {error.problem}"
                if isinstance(error, BitwrightError)
                else f"{name}: its statistics do not serve {spec.describe() if spec else 'it'}; calibrate under it"
            )
            for i, c in enumerate(self.candidates):
                if self._spec(name, c) == spec:
                    self.refused.setdefault(group, {})[i] = why
            return
        self._states[key] = site.quantizer.remember()

    def _round(self, candidate: Candidate, keys: Mapping[str, Key]) -> None:
        assert candidate.weight is not None
        bits = candidate.weight.format.bits
        known = [name for name in keys if self.steps.why_fixed(name) is None]
        for name in known:
            self._original.setdefault(name, self.steps.weight(name))
        if bits < 8:
            self._choose("seq_mse", known)
        if bits <= 8:
            self._choose("gptq", known, **_GPTQ, match_float=False)
        for name in known:
            if (key := keys[name]) in self._states:
                self._states[key] = self._subject.sites[name].quantizer.remember()
                self._weights[key] = self.steps.weight(name)

    def _choose(self, method: str, names: Sequence[str], **options: Any) -> None:
        """Round ``names``, as far as a method can; all other weights stay, which nothing would bring back."""
        from bitwright.methods.rounding.table import choose_weights

        graph, sites = self.steps.graph(), [self._subject.sites[name] for name in names]
        layers = [s.op for s in sites if holds_layer_weight(graph, s.op, s.role, s.port)]
        if layers:
            choose_weights(
                self.steps, self._data, method, options, num_samples=self._samples, include=dict.fromkeys(layers)
            )  # fmt: skip

    def fit(self, choice: Sequence[int]) -> None:
        """Set a candidate at every group, then round weights again, each layer with the errors of earlier ones in its input."""
        self.apply(choice)
        if not self._rounding:
            return
        names = [
            name
            for i, c in enumerate(choice)
            for name in self.groups[i].weights
            if name in self._original and (name, self._spec(name, self.candidates[c])) in self._weights
        ]
        for name in names:
            self.steps.set_weight(name, self._original[name])
        self.apply_states(choice)
        self._choose("gptq", names, **_GPTQ)
        for i, group in enumerate(self.groups):  # what was fitted holds for this choice alone
            if group.weights:
                self._now[i] = None

    def _spec(self, name: str, candidate: Candidate) -> QuantSpec | None:
        planned = self._planned[name]
        weight = self._subject.sites[name].is_stored
        wanted = candidate.weight if weight else candidate.activation
        if wanted is None:
            return None
        least = self._least.get(name, 0)
        return planned if not weight and least > wanted.format.bits else spec_at(planned, wanted)

    # -- setting

    def apply(self, choice: Sequence[int]) -> None:
        """Set a candidate at every group."""
        for i, c in enumerate(choice):
            if self._now[i] == c:
                continue
            for name in self.groups[i].sites:
                key = (name, self._spec(name, self.candidates[c]))
                self._states[key]()
                if name in self._original:
                    self.steps.set_weight(name, self._weights.get(key, self._original[name]))
            self._now[i] = c

    def apply_states(self, choice: Sequence[int]) -> None:
        """Restore the quantizers of weights, which a new weight may have changed."""
        for i, c in enumerate(choice):
            for name in self.groups[i].weights:
                self._states[name, self._spec(name, self.candidates[c])]()

    def same(self, group: int, one: int, other: int) -> bool:
        """Whether two candidates give a group the same precision."""
        a, b = self.candidates[one], self.candidates[other]
        return all(self._spec(name, a) == self._spec(name, b) for name in self.groups[group].sites)

    def errors(self, candidate: int, batches: Iterable[Any], *, samples: int, seed: int) -> OutputErrors:
        """Output error of each quantizer with every group at ``candidate``; groups that cannot have it are unchanged."""
        self.restore()
        rounded: dict[str, Tensor] = {}
        for i, group in enumerate(self.groups):
            if candidate in self.refused.get(i, {}):
                continue
            for name in group.sites:
                key = (name, self._spec(name, self.candidates[candidate]))
                self._states[key]()
                if key in self._weights:
                    rounded[name] = self._weights[key]
        rounded = {name: self.steps.quantize(name, value).detach() for name, value in rounded.items()}
        found = output_errors(_Rounded(self.steps, rounded), batches, samples=samples, seed=seed)
        self.restore()
        return found


class _NoRange(Exception):
    """Raised where statistics give no range."""


def _regrid(site: Site, spec: QuantSpec) -> None:
    """Recompute the grid from the stored range where there are no statistics."""
    from bitwright.core.numerics import affine

    encoding = site.quantizer.required
    lo, hi = encoding.min, encoding.max
    site.spec = spec
    if site.encoding is None and spec.granularity == encoding.granularity:
        site.quantizer.encoding = affine.encode(lo, hi, spec, encoding.granularity, site.name)


class _Rounded:
    """A simulated model whose weights are in float, and whose quantizers give the rounded ones."""

    def __init__(self, model: SimulatedModel, rounded: Mapping[str, Tensor]) -> None:
        self._model, self._rounded = model, rounded

    def graph(self) -> Graph:
        return self._model.graph()

    def observed_graph(self) -> Graph:
        return self._model.observed_graph()

    def sites(self) -> Mapping[str, Site]:
        return self._model.sites()

    def shared(self) -> Mapping[str, str]:
        return self._model.shared()

    def weight(self, site: str) -> Tensor:
        return self._model.weight(site)

    def why_fixed(self, site: str) -> str | None:
        return "it is looked at only"

    def set_weight(self, site: str, value: Tensor) -> None:
        raise AssertionError(site)

    def program(self, batch: Any) -> tuple[Program, State]:
        return self._model.program(batch)

    def quantize(self, site: str, x: Tensor) -> Tensor:
        known = self._rounded.get(site)
        return self._model.quantize(site, x) if known is None or known.shape != x.shape else known.to(x)


def _by_quantizer(made: Mapping[str, float], sites: Mapping[str, Site]) -> dict[int, float]:
    """The noise of all sites of each quantizer, by its id."""
    found: dict[int, float] = {}
    for name, noise in made.items():
        key = id(sites[name].quantizer)
        found[key] = found.get(key, 0.0) + (noise if np.isfinite(noise) else _WORST)
    return found


def noise_table(
    prepared: PreparedPrecisions, batches: Sequence[Any], *, samples: int, seed: int
) -> tuple[Floats, tuple[str, ...]]:
    """Noise that each group makes in the outputs at each candidate.

    Returns:
        ``[groups, candidates]``; sites whose noise is not known, which count as the worst known ones.
    """
    table = np.zeros((len(prepared.groups), len(prepared.candidates)))
    places = [(i, name) for i, group in enumerate(prepared.groups) for name in group.sites]
    unknown: dict[str, None] = {}
    met: set[str] = set()
    for c in range(len(prepared.candidates)):
        errors = prepared.errors(c, batches, samples=samples, seed=seed)
        made = {**errors.activations, **errors.weights, **errors.constants}
        met.update(made)
        quantizers = prepared.steps.sites()
        by_quantizer = _by_quantizer(made, quantizers)
        worst = max(by_quantizer.values(), default=0.0)
        for i, name in places:
            found = by_quantizer.get(id(quantizers[name].quantizer))
            if found is None and name in errors.unknown:
                unknown[name] = None
                found = worst
            table[i, c] += found or 0.0
    # a quantizer that was never met, as of an operator that is one step of its own, is not one that costs nothing
    for name in (n for group in prepared.groups if not met & set(group.weights) for n in group.weights):
        unknown[name] = None
    return table, tuple(unknown)
