"""Sites for the encodings that a model brings with it: those of the rules where they fit, new ones elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.placement.plan import Plan, Role, SitePlan
from bitwright.core.simulation.quantizer import fulfilled_by
from bitwright.core.simulation.sites import SiteMap
from bitwright.errors import ModelError
from bitwright.onnx.given.read_qdq import Given


@dataclass(frozen=True)
class Adopted:
    """A plan with the sites of a model that was quantized already.

    Attributes:
        plan: as the rules made it, with these sites among the others.
        encodings: site -> the encoding that came with the model.
        unused: sites of the rules that the model has in float.
    """

    plan: Plan
    encodings: dict[str, Encoding]
    unused: tuple[str, ...]

    def put_in_force(self, sites: SiteMap) -> tuple[str, bool]:
        """Take over the encodings, which survive calibration; what there is to note, and whether that calibrates all sites."""
        for name, encoding in self.encodings.items():
            quantizer = sites[name].quantizer
            quantizer.encoding, quantizer.frozen = encoding, True
        for name in self.unused:
            sites[name].enabled = False
        missing = [s for s in sites.values() if s.enabled and s.encoding is None]
        others = f"; {len(self.unused)} other sites of the rules are in float, as there" if self.unused else ""
        return (
            f"the model brought {len(self.encodings)} encodings with it, which are in effect and frozen{others}",
            all(site.quantizer.derived for site in missing),
        )


def adopt(plan: Plan, graph: Graph, given: Iterable[Given]) -> Adopted:
    """Find or make the site of every encoding in ``given``.

    Where the model quantizes activations, it computes what it computed: every other site that the rules ask for is unused.
    Where it only holds quantized constants, the rules decide about all the rest.

    Raises:
        ModelError: an operator that read a quantized tensor is gone.
    """
    return _Adopter(plan, graph).run(list(given))


class _Adopter:
    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        self.sites = dict(plan.sites)
        self.at = {(s.op, s.port): s for s in plan.sites.values() if s.role != "output"}
        self.made = {s.value: s for s in plan.sites.values() if s.role == "output"}
        self.encodings: dict[str, Encoding] = {}

    def run(self, given: list[Given]) -> Adopted:
        biases: dict[str, Encoding] = {}
        for one in given:
            if one.everywhere and not self._is_asked_for_at_readers(one):
                self._take(self.made.get(one.value) or self._output(one), one)
            else:
                self._take_at_readers(one, biases)
        self._regroup()
        unused: list[str] = []
        if any(not one.constant for one in given):
            free = (s for s in self.sites.values() if s.name not in self.encodings)
            unused = sorted(site.name for site in free if not self._fits(site, biases))
        return Adopted(replace(self.plan, sites=self._ordered()), self.encodings, tuple(unused))

    def _take_at_readers(self, one: Given, biases: dict[str, Encoding]) -> None:
        """Take an encoding where its tensor is read; those of ``biases`` follow from others."""
        for op, port in one.readers:
            site = self.at.get((op, port))
            if site is not None and site.follows is not None:
                biases[site.name] = one.encoding
            elif not _is_bias(one.encoding):
                site = site or self._input(one, op, port)
                if site is not None:
                    self._take(site, one)

    def _is_asked_for_at_readers(self, one: Given) -> bool:
        """Whether the rules put the quantizers of a tensor where it is read, and not where it is made."""
        if one.value in self.made or self.graph.is_output(one.value):
            return False
        sites = [self.at.get(place) for place in one.readers]
        return bool(sites) and all(s is not None and s.value == one.value and s.role == "input" for s in sites)

    def _fits(self, bias: SitePlan, biases: Mapping[str, Encoding]) -> bool:
        """Whether the grid that follows for a bias is the one the model has."""
        given = biases.get(bias.name)
        if given is None or bias.follows is None:
            return False
        source, weight = (self.encodings.get(name) for name in bias.follows)
        if source is None or weight is None or source.scale.size != 1:
            return False
        follows = np.multiply(source.scale, weight.scale.reshape(-1), dtype=np.float32)
        return bool((follows == given.scale.reshape(-1)).all())

    def _take(self, site: SitePlan, one: Given) -> None:
        self.encodings[site.name] = one.encoding
        self.sites[site.name] = replace(site, spec=replace(fulfilled_by(site.spec, one.encoding), fixed_range=None))

    def _output(self, one: Given) -> SitePlan:
        op = self.graph.producer(one.value)
        if op is None:
            raise _lost(one)
        index = op.outputs.index(one.value)
        return self._new(f"{op.name}.output[{index}]", "output", op.name, index, one)

    def _input(self, one: Given, op: str, port: int) -> SitePlan | None:
        try:
            self.graph.op(op)
        except KeyError:
            if one.constant:  # computed from constants alone: its value is on the grid already
                return None
            raise _lost(one) from None
        role: Role = "constant" if one.constant or self.graph.values[one.value].is_static else "input"
        return self._new(f"{op}.input[{port}]", role, op, port, one)

    def _new(self, name: str, role: Role, op: str, index: int, one: Given) -> SitePlan:
        count, free = 0, name
        while free in self.sites:
            count += 1
            free = f"{name}_{count}"
        site = SitePlan(free, fulfilled_by(QuantSpec(), one.encoding), role, op, index, one.value, free)
        self.sites[free] = site
        if role != "output":
            self.at[op, index] = site
        return site

    def _regroup(self) -> None:
        """Sites share a quantizer when the rules say so and the model gives them the same encoding."""
        first: dict[tuple[str, Encoding | None], str] = {}
        for site in self.sites.values():
            group = first.setdefault((site.group, self.encodings.get(site.name)), site.name)
            self.sites[site.name] = replace(site, group=group, follows=self._follows(site))

    def _follows(self, site: SitePlan) -> tuple[str, str] | None:
        """The input of a bias's operator may be quantized where it is read."""
        if site.follows is None:
            return None
        reads = self.at.get((site.op, 0))
        here = reads is not None and reads.role == "input" and reads.name in self.encodings
        return (reads.name if here and reads is not None else site.follows[0], site.follows[1])

    def _ordered(self) -> dict[str, SitePlan]:
        order = {op.name: i for i, op in enumerate(self.graph.ops)}
        ranked = sorted(self.sites.values(), key=lambda s: (order[s.op], s.role == "output", s.port))
        return {site.name: site for site in ranked}


def _is_bias(encoding: Encoding) -> bool:
    return isinstance(encoding.format, IntFormat) and encoding.format.bits == 32


def _lost(one: Given) -> ModelError:
    return ModelError(
        one.value,
        "the model quantizes this tensor, and no operator of the converted model has the place",
        "export the model again with opset 21",
    )
