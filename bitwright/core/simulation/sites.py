"""Sites and their mapping: the user's interface to quantizers."""

from __future__ import annotations

import copy
import fnmatch
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bitwright.core.graph.constant_channels import ChannelWatch, channel_axes
from bitwright.core.graph.float_values import MASKED, holds_mask, mask_values
from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import resolve_granularity
from bitwright.core.health.report import HealthReport, HealthTable, site_health
from bitwright.core.numerics.arrays import Array
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.numerics.statistics import Histogram, MinMax, Statistics, bounds_of, measure, start
from bitwright.core.placement.plan import Plan, Role, SitePlan
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.quantizer import DerivedBias, OnlyKnownAttributes, Quantizer
from bitwright.errors import CalibrationError, ConfigError, close_matches
from bitwright.tables import Tabular, html_table

logger = logging.getLogger("bitwright")

UNREACHED = "no calibration batch reached it"


class Site(OnlyKnownAttributes):
    """A place that holds a quantizer: ``conv1.weight``, ``conv1.output[0]``, ``conv1.input[0]``.

    Sites of one sharing group have one quantizer, so a change at one of them is a change at all (``shared_with``).
    """

    _ATTRIBUTES = frozenset(("_graph", "_plan", "_values", "channels", "quantizer"))

    def __init__(self, plan: SitePlan, quantizer: Quantizer, graph: Graph) -> None:
        self._plan, self.quantizer, self._graph = plan, quantizer, graph
        self._values: Callable[[str], Array | None] | None = None
        self.channels = ChannelWatch()  # of this site alone, whoever shares the quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        """The copy knows the values of weights where the simulation that holds them is copied too."""
        memo[id(self)] = made = Site.__new__(type(self))
        state = dict(self.__dict__)
        owner = getattr(self._values, "__self__", None)
        if owner is not None and id(owner) not in memo:
            state["_values"] = None
        made.__dict__.update(copy.deepcopy(state, memo))
        return made

    @property
    def name(self) -> str:
        """Unique name of the site."""
        return self._plan.name

    @property
    def role(self) -> Role:
        """``weight``, ``bias``, ``constant``, ``input`` or ``output``."""
        return self._plan.role

    @property
    def op(self) -> str:
        """Name of the operator the site belongs to."""
        return self._plan.op

    @property
    def port(self) -> int:
        """Input port of the operator; for role ``output`` the index of its output."""
        return self._plan.port

    @property
    def value(self) -> str:
        """Name of the graph's value that is quantized."""
        return self._plan.value

    @property
    def group(self) -> str:
        """Name of the site whose encoding this one shares; its own name if it shares none."""
        return self._plan.group

    @property
    def follows(self) -> tuple[str, str] | None:
        """For an int32 bias, the sites of the input and the weight whose scales it multiplies."""
        return self._plan.follows

    @property
    def inner(self) -> str | None:
        """Name inside the steps of a recurrent layer (``cell``, ``input.pre``, ...), if it is there."""
        return self._plan.inner

    @property
    def spec(self) -> QuantSpec | None:
        """The requested spec. A new spec may leave its axes open; they are filled in from the operator.

        What was calibrated stays so where the new spec needs no data: ranges are chosen again from the statistics, and
        those of weights from their values.
        """
        return self.quantizer.spec if self.quantizer.enabled else None

    @spec.setter
    def spec(self, spec: QuantSpec | None) -> None:
        if spec is None:
            self.enabled = False
            return
        if isinstance(spec, QuantSpec) and self.role in ("weight", "bias", "constant"):
            op, value = self._graph.op(self._plan.op), self._graph.values[self._plan.value]
            granularity = resolve_granularity(op.type, op.attrs, self._plan.port, spec.granularity, value.shape)
            granularity.param_shape(value.shape, self.name)  # blocks must divide, axes exist
            spec = replace(spec, granularity=granularity)
        calibrated = self.quantizer.encoding is not None
        self.quantizer.spec = spec
        self.quantizer.enabled = True
        if calibrated:
            self._choose_again()

    def _choose_again(self) -> None:
        """Choose the range of a calibrated weight again, for the spec that it has now."""
        quantizer = self.quantizer
        if quantizer.encoding is None and self._values is not None and not (quantizer.frozen or quantizer.derived):
            values = self._values(self.name) if self.is_stored else None
            if values is not None:
                quantizer.observe_once(values)

    @property
    def is_stored(self) -> bool:
        """Whether its values are stored in the model: a weight or another constant, but no bias."""
        return self._plan.is_stored

    @property
    def encoding(self) -> Encoding | None:
        """The encoding in effect; ``None`` until calibration. Set it to use a grid of your own: the spec follows it."""
        return self.quantizer.encoding

    @encoding.setter
    def encoding(self, encoding: Encoding | None) -> None:
        if encoding is not None and not isinstance(encoding, Encoding):
            raise ConfigError(
                self.name,
                f"encoding must be an Encoding or None, not {type(encoding).__name__}",
                "build one with bitwright.core.numerics.affine.encode(lo, hi, spec, granularity)",
            )
        if encoding is not None:
            shape = self._graph.values[self._plan.value].shape
            expected = encoding.granularity.param_shape(shape, self.name)
            if encoding.scale.shape != expected:
                raise ConfigError(
                    self.name,
                    f"the encoding has scales of shape {encoding.scale.shape}, but {encoding.granularity} of a tensor of "
                    f"shape {shape} has {expected}",
                    "give one scale per channel (or block) of this tensor",
                )
        if encoding is None:
            self.quantizer.encoding = None
        else:
            self.quantizer.take(encoding)

    @property
    def enabled(self) -> bool:
        """Whether the quantizer is on; a disabled site is in float."""
        return self.quantizer.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self.quantizer.enabled = bool(enabled)

    @property
    def frozen(self) -> bool:
        """Whether calibration leaves the encoding alone."""
        return self.quantizer.frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self.quantizer.frozen = bool(frozen)

    @property
    def row(self) -> dict[str, Any]:
        """The site as plain data; bounds are those of the encoding, over all its channels."""
        quantizer, found = self.quantizer, self.encoding
        return {
            "name": self.name,
            "role": self.role,
            "operator": self.op,
            "format": quantizer.spec.format.name,
            "bits": quantizer.spec.format.bits,
            "spec": quantizer.spec.describe(),
            "enabled": self.enabled,
            "why_float": "" if self.enabled else quantizer.state,
            "shared_with": self.group,
            "calibrated": found is not None,
            "minimum": None if found is None else float(found.min.min()),
            "maximum": None if found is None else float(found.max.max()),
            "largest_scale": None if found is None else float(found.scale.max()),
        }

    def __repr__(self) -> str:
        state = "" if self.enabled else ", disabled"
        return f"Site({self.name}: {self.quantizer.spec.describe()}, encoding={self.encoding}{state})"


class SiteGroup:
    """The sites a glob matched; setting ``spec``, ``enabled`` or ``frozen`` sets it on each of them, or on none."""

    def __init__(self, sites: dict[str, Site]) -> None:
        object.__setattr__(self, "sites", sites)

    sites: dict[str, Site]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("spec", "enabled", "frozen", "encoding"):
            raise AttributeError(f"{name!r} cannot be set on a group of sites; set spec, enabled, frozen or encoding")
        undos = [site.quantizer.remember() for site in self.sites.values()]
        try:
            for site in self.sites.values():
                setattr(site, name, value)
        except BaseException:
            for undo in reversed(undos):
                undo()
            raise

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites.values())

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        return f"SiteGroup({len(self)} sites: {', '.join(list(self.sites)[:4])}{', ...' if len(self) > 4 else ''})"


class SiteMap(Tabular, Mapping[str, Any]):
    """Sites by name. ``sim.quantizers["layer1.0.conv1.weight"]`` is a :class:`Site`; a glob gives a :class:`SiteGroup`.

    ``[`` has its plain meaning in an exact name (``conv1.output[0]``); in a glob only ``*`` and ``?`` are special.

    Args:
        sites: by name.
        values: site of a weight or a constant -> its values; ``None`` where they are not known.
    """

    _rows = "rows"
    _also = ("rows",)

    def __init__(self, sites: dict[str, Site], values: Callable[[str], Array | None] | None = None) -> None:
        self._sites = sites
        self._said: set[str] = set()  # warnings that were logged
        self._says_unreached = True
        for site in sites.values():
            site._values = values
        self._find_masks()
        self._find_channels()

    def _find_masks(self) -> None:
        """Mark the quantizers of masks, whose values reach only a softmax or the like."""
        graphs = {id(site._graph): site._graph for site in self._sites.values()}
        values = {key: mask_values(graph) for key, graph in graphs.items()}
        for quantizer in self.unique():
            quantizer.masking = True
        for site in self._sites.values():
            on_the_way = site.role in ("input", "output") and site._plan.value in values[id(site._graph)]
            site.quantizer.masking = site.quantizer.masking and on_the_way

    def _find_channels(self) -> None:
        """Set the channel axis of every activation site."""
        graphs = {id(site._graph): site._graph for site in self._sites.values()}
        places = {key: channel_axes(graph) for key, graph in graphs.items()}
        for site in self._sites.values():
            if site.role in ("input", "output"):
                site.channels.place = places[id(site._graph)].get(site._plan.value)

    def __getitem__(self, name: str) -> Any:
        if name in self._sites:
            return self._sites[name]
        if "*" in name or "?" in name:
            found = self.select(lambda site: fnmatch.fnmatchcase(site.name, name.replace("[", "[[]")))
            if found:
                return found
        raise KeyError(
            f"there is no quantizer site {name!r}{close_matches(name, self._sites)}; sim.coverage() lists them all"
        )

    def select(self, condition: Callable[[Site], bool]) -> SiteGroup:
        """The sites for which ``condition`` holds, as a group."""
        return SiteGroup({name: site for name, site in self._sites.items() if condition(site)})

    def unique(self) -> Iterator[Quantizer]:
        """Each quantizer once, in execution order of its first site."""
        return iter({id(site.quantizer): site.quantizer for site in self._sites.values()}.values())

    def remember(self) -> Undo:
        """Save the state of every quantizer; the function returned restores it."""
        kept = [quantizer.remember() for quantizer in self.unique()]
        channels = [(site.channels, site.channels.seen) for site in self._sites.values()]

        def restore() -> None:
            for undo in kept:
                undo()
            for watch, seen in channels:
                watch.seen = seen

        return restore

    def ask_as(self, other: SiteMap) -> None:
        """Copy the requested specs of the sites that have the same name and role in another simulation."""
        for quantizer in self.unique():
            site = other._sites.get(quantizer.name)
            if site is not None and site.role == quantizer.role:
                quantizer.ask_as(site.quantizer)

    def reconsider(self) -> None:
        """Switch on again the sites that the last calibration left in float, since more data may decide otherwise."""
        for quantizer in self.unique():
            quantizer.reconsider()

    def forget(self) -> None:
        """Drop the statistics and encodings of every quantizer that is not frozen."""
        self.forget_statistics()
        for quantizer in self.unique():
            if not quantizer.frozen:
                quantizer.encoding = None

    def forget_statistics(self) -> None:
        """Drop the statistics of every quantizer that is not frozen, and keep the encodings."""
        for quantizer in self.unique():
            if not quantizer.frozen:
                quantizer.statistics, quantizer.empty = None, 0
        for site in self._sites.values():
            if not site.frozen:
                site.channels.seen = None

    def freeze_activations(self) -> None:
        """Compute the encoding of every enabled activation site from its statistics; report non-finite values.

        A site that saw mask constants is left in float: on a grid that holds them nothing else could be told apart.
        """
        for quantizer in self.unique():
            if not quantizer.enabled or quantizer.role not in ("input", "output"):
                continue
            if quantizer.masking and not quantizer.frozen and holds_mask(quantizer.statistics):
                quantizer.leave_in_float(MASKED)
                logger.info("%s: left in float, because %s", quantizer.name, MASKED)
            else:
                quantizer.freeze()
        self._warn_of_non_finite()

    def _warn_of_non_finite(self) -> None:
        found = []
        for quantizer in self.unique():
            if quantizer.enabled and isinstance(quantizer.statistics, MinMax | Histogram):
                bounds = bounds_of(quantizer.statistics)
                nan, inf = int(bounds.nan_count.sum()), int(bounds.inf_count.sum())
                if nan or inf:
                    found.append(f"{quantizer.name} ({nan} NaN, {inf} infinite)")
        if found:
            more = f", and {len(found) - 1} sites after it" if len(found) > 1 else ""
            logger.warning(
                "calibration met values that are not finite, first at %s%s; ranges leave them out", found[0], more
            )

    def changes(self, plan: Plan) -> dict[str, str]:
        """Map each site that changed since ``plan`` to its new spec, or to the reason why it is disabled."""
        changed = {}
        for name, site in self._sites.items():
            if not site.enabled:
                changed[name] = site.quantizer.state
            elif missing := self._float_sources(site):
                changed[name] = f"disabled, because {' and '.join(missing)} {'are' if missing[1:] else 'is'} in float"
            elif site.quantizer.spec != plan.sites[site.quantizer.name].spec or site.quantizer.range_note:
                changed[name] = site.quantizer.described
        return changed

    def _float_sources(self, site: Site) -> list[str]:
        """For a bias with the scales of input and weight: those of the two that are not quantized."""
        return [name for name in site._plan.follows or () if not self._sites[name].enabled]

    def health(self, parameters: Mapping[str, Array]) -> HealthTable:
        """The health of every enabled activation site that was calibrated, and of the weights among ``parameters``.

        Args:
            parameters: site -> its values.
        """
        found = HealthTable()
        for name, site in self._sites.items():
            quantizer, value = site.quantizer, site._graph.values[site._plan.value]
            seen: Statistics | None = quantizer.statistics
            granularity = quantizer.spec.granularity
            if site.role == "weight" and name in parameters and site.enabled:
                granularity = _channelwise(site, granularity)
                seen = measure("minmax", parameters[name], granularity)
            elif seen is None and quantizer.empty:
                seen = start("minmax")
            if site.enabled and isinstance(seen, MinMax | Histogram):
                found.append(
                    site_health(
                        name, seen, value.dtype, quantizer.empty, channels=site.channels.seen, layer=_maker(site),
                        kind="blocks" if isinstance(granularity, PerBlock) else "channels",
                    )
                )  # fmt: skip
        return found

    def unreached(self) -> list[Site]:
        """The enabled sites that calibration left without an encoding."""
        return [s for s in self._sites.values() if s.enabled and s.encoding is None and not s.quantizer.derived]

    def require_reached(self) -> None:
        """Raise an error for sites that no batch reached.

        Raises:
            CalibrationError: there are such sites; the first is the place, the message counts them.
        """
        unreached = self.unreached()
        if unreached:
            raise CalibrationError(
                unreached[0].name,
                f"no calibration batch reached this site{_and_more(unreached)}",
                "add data that takes this branch of the model, or leave such sites in float with "
                "allow_unreached=True (bitwright quantize --allow-unreached)",
            )

    def describe_nan(self, report: HealthReport, graph: Graph) -> str:
        """A sentence about NaN in a simulation: the operator that a report on it names, and the sites it reads from."""
        culprit = report.culprit
        if culprit is None:
            return f"the simulation returns NaN and float does not; the operator was not found ({report.model})"
        ops = {op.name: op for op in graph.ops}
        read = set(ops[culprit.op].inputs) if culprit.op in ops else set()
        near = [n for n, s in self._sites.items() if s.enabled and (s.op == culprit.op or s._plan.value in read)]
        remedy = " and ".join(f"sim.quantizers[{name!r}].enabled = False" for name in near[:3])
        return (
            f"{culprit.op} ({culprit.op_type}) makes NaN in the simulation and not in float: {culprit.problem}; "
            f"it reads {', '.join(near) or 'no quantizer of its own'}. "
            f"Remedy: {remedy or 'leave what leads to it in float'}, or more bits there"
        )

    @contextmanager
    def _calibrated_on_part(self) -> Iterator[None]:
        """Log no unreached site inside the block, where calibration reads a part of the data."""
        before, self._says_unreached = self._says_unreached, False
        try:
            yield
        finally:
            self._says_unreached = before

    def _say_once(self, text: str) -> None:
        """Log a warning that the simulations of one call have not logged yet."""
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)

    def _share_log(self, said: set[str]) -> None:
        """Skip log lines that are in ``said``, and add new ones, so that simulations of one call repeat nothing."""
        self._said = said

    def settle_unreached(self, *, allow: bool, quiet: bool = False) -> None:
        """Report once what calibration left open: sites without an encoding, which are switched off if that is allowed, and
        ranges that are not what was asked for.
        """
        unreached = self.unreached()
        for site in unreached if allow else ():
            site.quantizer.leave_in_float(UNREACHED)
        if unreached and not quiet and self._says_unreached:
            what = "left in float" if allow else "without an encoding; using them is an error"
            shown = ", ".join(site.name for site in unreached[:8])
            more = f" and {len(unreached) - 8} more" if len(unreached) > 8 else ""
            self._say_once(f"calibration never reached {len(unreached)} site(s), {what}: {shown}{more}")
        if not quiet and self._says_unreached:
            self._tell_of_ranges()

    def _tell_of_ranges(self) -> None:
        """Log the ranges that have remarks, poor ones as a warning; :meth:`changes` has all of them."""
        for poor in (True, False):
            noted = [q for q in self.unique() if q.enabled and q.range_note and q.poor_range == poor]
            lines = {f"{q.name} ({q.spec.describe()}): {q.range_note}" for q in noted[:1]} - self._said
            self._said |= lines
            more = f", and {len(noted) - 1} more sites; sim.coverage() has all" if len(noted) > 1 else ""
            for line in lines:
                logger.log(logging.WARNING if poor else logging.INFO, "%s%s", line, more)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every site as plain data: its spec, and its encoding where there is one."""
        return [site.row for site in self._sites.values()]

    def __repr__(self) -> str:
        done = sum(site.encoding is not None for site in self._sites.values())
        return f"SiteMap({len(self)} sites, {done} calibrated)"

    def _repr_html_(self, title: str = "") -> str:
        head = ("site", "spec", "shared with", "enabled", "calibrated")
        rows = [
            (name, site.quantizer.spec.describe(), "" if site.group == name else site.group)
            + tuple("yes" if fact else "no" for fact in (site.enabled, site.encoding is not None))
            for name, site in self._sites.items()
        ]
        return html_table(head, rows, title or repr(self))


def _and_more(sites: list[Site]) -> str:
    return "" if len(sites) == 1 else f", nor {len(sites) - 1} others"


def _channelwise(site: Site, granularity: Granularity) -> Granularity:
    """``granularity`` of a weight, or that of its output channels where it has one scale for all of them."""
    if not isinstance(granularity, PerTensor):
        return granularity
    op, value = site._graph.op(site._plan.op), site._graph.values[site._plan.value]
    return resolve_granularity(op.type, op.attrs, site._plan.port, PerChannel(), value.shape)


def _maker(site: Site) -> str:
    """The layer that makes the channels of an activation, where it is not the site's own operator."""
    place = site.channels.place
    return "" if place is None or place.layer == site.op else place.layer


def values_on_grids(sites: Mapping[str, Site], shared: Mapping[str, str]) -> dict[int, dict[str, None]]:
    """Quantizer (its ``id``) -> the values that lie on its grid.

    Args:
        sites: of a simulation.
        shared: value that only carries elements of another -> the group of sites on whose grid they lie.
    """
    found: dict[int, dict[str, None]] = {}
    by_group = {}
    for site in sites.values():
        if site.role in ("input", "output"):
            found.setdefault(id(site.quantizer), {}).setdefault(site.value)
            by_group[site.group] = id(site.quantizer)
    for value, group in shared.items():
        if group in by_group:
            found[by_group[group]].setdefault(value)
    return found


def place_quantizers(
    plan: Plan,
    graph: Graph,
    values: Callable[[str], Array | None],
    kind: type[Quantizer] = Quantizer,
    known: Mapping[str, Site] | None = None,
) -> SiteMap:
    """The sites of a plan, with a quantizer for each of its groups; those that are ``known`` stay."""
    quantizers: dict[str, Quantizer] = {}
    sites: dict[str, Site] = {}
    for planned in plan.sites.values():
        if known is not None and planned.name in known:
            sites[planned.name] = known[planned.name]
            continue
        if planned.group not in quantizers:
            quantizers[planned.group] = kind(planned.name, planned.role, planned.spec)
            quantizers[planned.group].range_from = planned.range_from
            quantizers[planned.group].least_reach = _least_reach(planned, graph)
        sites[planned.name] = Site(planned, quantizers[planned.group], graph)
    return SiteMap(sites, values)


def _least_reach(planned: SitePlan, graph: Graph) -> float:
    """Least range of a softmax for ONNX Runtime's kernel; 0 for other operators.

    QLinearSoftmax sums exponentials of up to ``2 ** 32 / (n exp(5))`` over its ``n`` entries and multiplies each by the inverse
    of the output's scale, in 32 bits: with scales below ``1 / (148 n)``, which nearly equal entries get, that overflows.
    """
    op, shape = graph.op(planned.op), graph.values[planned.value].shape
    if op.type != "Softmax" or planned.range_from != "operator" or not shape:
        return 0.0
    entries = shape[int(op.attrs.get("axis", -1)) % len(shape)]
    return 255 / (147 * entries) if entries else 0.0


def required_encodings(sites: Mapping[str, Site]) -> dict[str, Encoding]:
    """Site -> encoding of every enabled site; biases without a derived grid stay in float.

    Raises:
        CalibrationError: another one has none.
    """
    enabled = (site for site in sites.values() if site.enabled)
    return {
        site.name: site.quantizer.required for site in enabled if not (site.quantizer.derived and site.encoding is None)
    }


def derived_biases(sites: Mapping[str, Site], operand: Callable[[str], Any]) -> dict[str, DerivedBias]:
    """Site -> the bias whose grid follows from others; ``operand`` gives the values at a site, where they are known."""
    found = {}
    for site in sites.values():
        if site.role == "bias" and site.follows:
            source, weight = (sites[name].quantizer for name in site.follows)
            stored = site._graph.values[site.value].param is not None
            found[site.name] = DerivedBias(
                site.name, site.quantizer, source, weight, operand(site.name), computed=not stored
            )
    return found
