"""Steps of a simulation with a chosen set of quantizers, and where in a program the sites are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from bitwright.algorithms.rounding.program import Program, SimulatedModel, Step, run_step
from bitwright.core.simulation.sites import Site

Active = Callable[[str], bool]
"""Whether the quantizer at a site works."""


class QuantizedSteps:
    """Runs steps of a simulation; the quantized form of a constant is computed once.

    Args:
        model: a calibrated simulation.
    """

    def __init__(self, model: SimulatedModel) -> None:
        self._model, self.sites = model, model.sites()
        self._constants: dict[str, tuple[Tensor, Tensor]] = {}
        self._inside: dict[str, list[str]] = {}
        for name, site in self.sites.items():
            self._inside.setdefault(site.op, []).append(name)

    def quantize(self, name: str, x: Tensor) -> Tensor:
        """``x`` as the quantizer at a site leaves it."""
        if self.sites[name].role not in ("weight", "constant", "bias"):
            return self._model.quantize(name, x)
        held = self._constants.get(name)
        if held is None or held[0] is not x:
            held = self._constants[name] = (x, self._model.quantize(name, x))
        return held[1]

    def inside(self, step: Step) -> list[str]:
        """Sites within a step: those of a recurrent layer's own steps."""
        if step.inside is None:
            return []
        outside = {site for _, site in (*step.operands, *step.results)}
        return [name for name in self._inside.get(step.op, ()) if name not in outside]

    def run(
        self, step: Step, state: Mapping[int, Tensor], constants: Mapping[int, Tensor], active: Active
    ) -> Sequence[Tensor]:
        """What ``step`` writes with the ``active`` quantizers."""
        inside = [name for name in self.inside(step) if self.sites[name].enabled]
        working = [name for name in inside if active(name)]

        def quantize(name: str, x: Tensor) -> Tensor:
            return self.quantize(name, x) if active(name) else x

        if not working:
            return run_step(replace(step, inside=None), state, constants, quantize)
        off = [self.sites[name] for name in inside if name not in working]
        with _switched_off(off):
            return run_step(step, state, constants, quantize)

    def places(self, program: Program) -> dict[str, list[int]]:
        """Site -> indices of the steps at which it quantizes."""
        found: dict[str, list[int]] = {}
        for i, step in enumerate(program.steps):
            outer = (site for _, site in (*step.operands, *step.results))
            for name in dict.fromkeys((*outer, *self.inside(step))):
                found.setdefault(name, []).append(i)
        return found


@contextmanager
def _switched_off(sites: Iterable[Site]) -> Iterator[None]:
    quantizers: dict[int, Any] = {id(site.quantizer): site.quantizer for site in sites}
    undos = [quantizer.remember() for quantizer in quantizers.values()]
    try:
        for quantizer in quantizers.values():
            quantizer.leave_in_float("it is compared with float")
        yield
    finally:
        for undo in undos:
            undo()
