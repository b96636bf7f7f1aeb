"""Learned ranges of a simulation: choice, parameters, state dict entries, and checks of training loops."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from bitwright.core.numerics.affine import with_scale
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.statistics import rows_of
from bitwright.core.simulation.simulation import all_or_nothing
from bitwright.core.simulation.sites import Site, SiteMap
from bitwright.errors import CalibrationError, ConfigError, ModelError, close_matches
from bitwright.torch.calls.inputs import model_device, walk_modules
from bitwright.torch.quantizers.learned_range import LearnedRange, check_ranges, unlearnable
from bitwright.torch.quantizers.quantizer import Quantizer
from bitwright.torch.ranks import SharedGradients
from bitwright.torch.simulation.simulated_module import SimulatedModule

logger = logging.getLogger("bitwright")

_FROZEN = "it is frozen"
_ROUNDED_FOR = "other weights are frozen, and may be rounded for the values that it has now: name it to learn it"
_MOST_LEARNED_BITS = 8
_WIDE = (
    f"its grid has more than {_MOST_LEARNED_BITS} bits, whose rounding leaves nothing to win, and the gradient of a range grows "
    "with the number of codes: name it to learn it"
)
Init = Literal["calibrated", "lsq", "lsq+"]


@dataclass(frozen=True)
class RangeReport:
    """Result of :func:`learn_ranges`.

    Attributes:
        learned: the first site of every range that trains now.
        fixed: site -> why its range stays as it is.
    """

    learned: tuple[str, ...]
    fixed: Mapping[str, str]

    def __repr__(self) -> str:
        return f"RangeReport({len(self.learned)} learned, {len(self.fixed)} fixed)"


def learn_ranges(
    sim: SimulatedModule,
    sites: str | Iterable[str] = "*",
    *,
    offsets: bool = True,
    init: Init = "calibrated",
    distributed: bool = True,
) -> RangeReport:
    """Make the ranges of ``sites`` trainable from their present values; see :mod:`bitwright.torch.quantizers.learned_range`.

    Ranges that train already keep their parameters; those of other sites are left as they are.

    Args:
        sim: calibrated.
        sites: names or globs (``"*.weight"``). ``"*"`` is all that gains by training: not grids of more than 8 bits, and where
            some weights are frozen, as rounding methods leave those that they rounded, no weights: what was rounded makes up
            for the errors that the others have now, and a range that moves by 1 % changes some of those by whole steps. A list
            is taken literally: ``["*"]`` trains wide grids, and the weights that are not frozen beside those that are.
        offsets: learn the zero points of asymmetric grids too (LSQ+), except for ranges that end at zero, as after ReLU.
        init: where weights start: ``"calibrated"``, ``"lsq"`` (``2 * mean|w| / sqrt(qmax)``) or ``"lsq+"``
            (``max(|mean - 3 std|, |mean + 3 std|)`` is the end of the grid). Activations start where calibration found
            them: LSQ+ asks for the smallest squared error, which is ``quant_scheme="mse"``.
        distributed: where a process group of several ranks is initialised, average the gradients of ranges over its ranks at the
            end of every backward pass, as ``DistributedDataParallel`` and ``fully_shard`` do with those of the model. ``False``
            leaves every rank its own.

    Raises:
        ConfigError: there is no such init or site, or no range of them can be learned.
        CalibrationError: nothing is calibrated, or one site is not.
    """
    if init not in ("calibrated", "lsq", "lsq+"):
        raise ConfigError("learn_ranges", f"there is no init {init!r}", "use 'calibrated', 'lsq' or 'lsq+'")
    if not sim.calibrated:
        problem = "the simulation is not calibrated, so that no range has a value to start from"
        raise CalibrationError("learn_ranges", problem, "call sim.compute_encodings(batches) first")
    chosen = _chosen(sim, [sites] if isinstance(sites, str) else list(sites))
    fixed: dict[str, str] = {}
    learned: dict[int, str] = {}
    rounded = sites == "*" and any(site.role == "weight" and _why_fixed(site, False) == _FROZEN for site in chosen)
    with all_or_nothing(sim):
        for site in chosen:
            reason = _why_fixed(site, rounded) or (_why_left(site) if sites == "*" else None)
            if reason is not None:
                fixed[site.name] = reason
            elif id(site.quantizer) not in learned:
                learned[id(site.quantizer)] = site.name
                _start(sim, site, offsets, init)
        if not learned:
            first = next(iter(fixed.items()), ("no site", "nothing is quantized"))
            raise ConfigError(
                "learn_ranges",
                f"no range can be learned: {first[0]}: {first[1]}",
                "choose sites with calibrated integer grids: print(sim.coverage()) lists them",
            )
        sim._shared.wanted = distributed
        share_gradients(sim)
    _tell_frozen(fixed)
    return RangeReport(tuple(learned.values()), fixed)


def _tell_frozen(fixed: Mapping[str, str]) -> None:
    """Report the ranges that stay fixed because they are frozen, as after rounding of weights."""
    frozen = [name for name, why in fixed.items() if why == _FROZEN]
    if not frozen:
        return
    others = [name for name, why in fixed.items() if why == _ROUNDED_FOR]
    more = ", ..." if len(others) > 3 else ""
    also = (
        f"; other weights ({', '.join(others[:3])}{more}) keep theirs too, because rounded weights make up for their present "
        "values: learn_ranges(name) trains one"
    )
    logger.warning(
        "learn_ranges: %d frozen ranges stay as they are, %s among them: rounding methods such as GPTQ and AdaRound freeze "
        "those of the weights that they rounded%s. To train frozen ones, set sim.quantizers[name].frozen = False and call "
        "learn_ranges again",
        len(frozen),
        frozen[0],
        also if others else "",
    )


def site_tensor(sim: SimulatedModule, site: Site) -> torch.Tensor | None:
    """The parameter of the model that ``site`` quantizes, if it is one."""
    param = sim.graph.values[site.value].param
    return None if param is None else sim._interceptor.named_tensor(param)


def bias_values(sim: SimulatedModule, computed: Mapping[str, torch.Tensor]) -> Callable[[str], torch.Tensor | None]:
    """Site of a bias -> its values: a parameter, or a value ``computed`` from parameters in the recorded run."""

    def find(name: str) -> torch.Tensor | None:
        site = sim.quantizers[name]
        parameter = site_tensor(sim, site)
        return computed.get(site.value) if parameter is None else parameter

    return find


def _chosen(sim: SimulatedModule, names: list[str]) -> list[Site]:
    chosen: dict[str, Site] = {}
    for name in names:
        try:
            found = sim.quantizers[name]
        except KeyError as error:
            raise ConfigError(
                "learn_ranges",
                f"there is no site {name!r}{close_matches(name, sim.quantizers)}",
                "print(sim.coverage()) lists the sites",
            ) from error
        for site in [found] if isinstance(found, Site) else found:
            chosen[site.name] = site
    return list(chosen.values())


def _why_fixed(site: Site, rounded: bool) -> str | None:
    """The reason why the range of a site is not learned; ``None`` where it is."""
    quantizer = site.quantizer
    if not quantizer.enabled:
        return "it is in float"
    if quantizer.derived:
        return "its grid follows from those of the input and the weight"
    if quantizer.frozen:
        return _FROZEN
    if site.role == "constant":
        return "it is a constant"
    if quantizer.is_fixed:
        return "both ends of its range are given"
    if rounded and site.role == "weight" and getattr(quantizer, "learned", None) is None:
        return _ROUNDED_FOR
    return unlearnable(quantizer.required)


def _why_left(site: Site) -> str | None:
    """The reason why the range of a site is learned only if it is named."""
    wide = site.quantizer.required.format.bits > _MOST_LEARNED_BITS
    learns = getattr(site.quantizer, "learned", None) is not None
    return _WIDE if wide and not learns else None


def _start(sim: SimulatedModule, site: Site, offsets: bool, init: Init) -> None:
    quantizer = site.quantizer
    assert isinstance(quantizer, Quantizer)
    encoding = quantizer.required
    if init != "calibrated" and site.role == "weight" and quantizer.learned is None:
        tensor = site_tensor(sim, site)
        if tensor is None:  # what the model makes of its parameters in every forward
            tensor = sim._recorded_constants()[site.value]
        quantizer.encoding = encoding = _initial(tensor, encoding, init)
    assert isinstance(encoding.format, IntFormat)
    movable = quantizer.spec.symmetry == "asymmetric" and _inside(encoding)
    quantizer.learn(offset=offsets and movable).to(model_device(sim.model))


def _inside(encoding: Encoding) -> bool:
    """Whether zero lies strictly inside some range."""
    assert isinstance(encoding.format, IntFormat)
    z = encoding.zero_point
    return bool(((z > encoding.format.qmin) & (z < encoding.format.qmax)).any())


def _initial(w: torch.Tensor, encoding: Encoding, init: Init) -> Encoding:
    """Initial scales of weights by LSQ (section 2.1) or LSQ+ (section 3.2)."""
    fmt = encoding.format
    assert isinstance(fmt, IntFormat)
    x = rows_of(w.detach().double(), encoding.granularity)
    there = rows_of(torch.ones_like(w, dtype=torch.float64), encoding.granularity)  # not where a block is padded
    count = there.sum(1)
    if init == "lsq":
        scale = 2 * x.abs().sum(1) / count / math.sqrt(max(1, fmt.qmax))
    else:
        mean = x.sum(1) / count
        std = ((x - mean[:, None]).square() * there).sum(1).div(count).sqrt()
        scale = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs()) / max(1, fmt.qmax)
    found = scale.cpu().numpy().reshape(encoding.scale.shape)
    found = np.where(found > 0, found, encoding.scale)  # a channel of zeros keeps what it has
    return with_scale(encoding, found.astype(np.float32))


# ------------------------------------------------------------------------------------------------ parameters


def learned_ranges(sim: SimulatedModule) -> Iterator[tuple[str, LearnedRange]]:
    """All learned ranges, once each, by the name of the quantizer."""
    for quantizer in sim.quantizers.unique():
        learned = getattr(quantizer, "learned", None)
        if learned is not None:
            yield quantizer.name, learned


def named_range_parameters(sim: SimulatedModule) -> Iterator[tuple[str, nn.Parameter]]:
    """``(conv1.weight.log_scale, parameter)`` of all learned ranges."""
    for name, learned in learned_ranges(sim):
        for kind, parameter in learned.parameters().items():
            yield f"{name}.{kind}", parameter


def range_parameters(sim: SimulatedModule) -> list[nn.Parameter]:
    """The parameters of all learned ranges, for a group of the optimizer.

    Raises:
        ConfigError: no range trains.
    """
    found = [parameter for _, parameter in named_range_parameters(sim)]
    if not found:
        raise ConfigError(
            "range_parameters",
            "no range of this simulation trains",
            "call sim.learn_ranges() when compute_encodings has returned",
        )
    return found


def shared_gradients(sim: SimulatedModule) -> SharedGradients:
    """Create the averaging of range gradients of ``sim`` over ranks."""
    return SharedGradients(partial(named_range_parameters, sim), partial(_contents, sim))


def share_gradients(sim: SimulatedModule) -> None:
    """Average the gradients of all learned ranges over the ranks, also those of new parameters."""
    for _, learned in learned_ranges(sim):
        learned.call_with_gradients(sim._shared.arrive, sim._shared.note)


def _contents(sim: SimulatedModule) -> dict[str, bytes]:
    """The contents of a learned range by name."""
    return {
        name: b"".join(
            (learned.base.scale.tobytes(), learned.base.zero_point.tobytes(), *(v.tobytes() for v in learned.values()))
        )
        for name, learned in learned_ranges(sim)
    }


# ------------------------------------------------------------------------------------------------ files


def refuse_corrections(sim: SimulatedModule, function: str) -> None:
    """Refuse to write a simulation with low-rank corrections of weights, which no file can hold.

    Raises:
        ModelError: naming the first such weight.
    """
    for quantizer in sim.quantizers.unique():
        if getattr(quantizer, "correction", None) is not None:
            raise ModelError(
                quantizer.name,
                f"{function}: it has a low-rank correction beside its integer weights, which no file can hold",
                "call merge() of the LowRankCorrection, which rounds it into the weights, or remove()",
            )


Values = tuple[tuple[str, tuple[float, ...]], ...]


def learned_to_json(learned: LearnedRange) -> dict[str, list[float]]:
    """The parameters of a range as plain JSON; float32 numbers survive it bit for bit."""
    return {name: p.detach().cpu().reshape(-1).tolist() for name, p in learned.parameters().items()}


def learned_from_json(saved: Any, base: Encoding) -> Values:
    """Read the values that :func:`learned_to_json` wrote for a range with this base.

    Raises:
        TypeError, ValueError, AttributeError: it is something else.
    """
    values = tuple((name, tuple(float(v) for v in numbers)) for name, numbers in saved.items())
    if {name for name, _ in values} not in ({"log_scale"}, {"log_scale", "offset"}) or unlearnable(base):
        raise ValueError(f"{[name for name, _ in values]} are not the parameters of a learned range")
    if any(len(v) != base.scale.size or not all(map(math.isfinite, v)) for _, v in values):
        raise ValueError("the parameters of a learned range are not one finite number per scale")
    return values


def restore_learned(site: Site, values: Mapping[str, tuple[float, ...]]) -> None:
    """Make the range of ``site`` learned with these parameters, as distances from its present encoding."""
    quantizer = site.quantizer
    assert isinstance(quantizer, Quantizer)
    learned = quantizer.learn(offset="offset" in values)
    base = learned.base
    shaped = {n: torch.tensor(v, dtype=torch.float32).reshape(base.scale.shape) for n, v in values.items()}
    learned.put((base, shaped))


# ------------------------------------------------------------------------------------------------ training loops

#: forwards with gradients between two looks at the ranges
LOOK_EVERY = 50


class TrainingWatch:
    """Checks of training, called at the start of every simulated forward.

    Args:
        model: that is simulated.
        sites: its quantizers.
    """

    def __init__(self, model: nn.Module, sites: SiteMap) -> None:
        self._model, self._sites = model, sites
        self._norms = [
            module
            for _, module in walk_modules(model)
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
        ]
        self._told_mode = self._told_ranges = False
        self._forwards = 0
        self._seen: tuple[list[bytes], int] | None = None

    def __call__(self) -> bool:
        """Check the modes of batch norms, and periodically the ranges.

        Returns:
            Whether this forward may read numbers on devices where that waits for them: all without gradients, few with.

        Raises:
            ModelError: a learned range on another device than the host is not finite or far off its tensor.
        """
        if not torch.is_grad_enabled():
            self._look_at_modes()
            return True
        self._forwards += 1
        looks = self._forwards % LOOK_EVERY == 1
        if looks:
            learned = [r for r in (getattr(q, "learned", None) for q in self._sites.unique()) if r is not None]
            with torch._C.DisableTorchFunction():
                check_ranges([r for r in learned if r.is_remote])  # others are checked where they are used
            if not self._told_ranges:
                self._look_at_ranges(learned)
        return looks

    def _look_at_modes(self) -> None:
        if self._told_mode or not self._norms or not self._model.training:
            return
        count = sum(norm.training for norm in self._norms)
        if count:
            self._told_mode = True
            logger.warning(
                "the simulated model ran without gradients in training mode: its %d batch norms normalise by each batch and "
                "change their running statistics; call sim.model.eval() before you evaluate it",
                count,
            )

    def _look_at_ranges(self, learned: list[LearnedRange]) -> None:
        """Warn about ranges with gradients that stay constant while the model's parameters change: no optimizer has them."""
        with torch._C.DisableTorchFunction():
            moved = sum(p._version for p in self._model.parameters() if p.requires_grad)
            now = [b"".join(values.tobytes() for values in r.values()) for r in learned]
            graded = [
                r.site
                for r in learned
                if any(p.grad is not None and bool(p.grad.any()) for p in r.parameters().values())
            ]
        before, self._seen = self._seen, (now, moved)
        if before is None or not graded or before[0] != now or before[1] == moved:
            return
        self._told_ranges = True
        logger.warning(
            "%d learned ranges (%s, ...) have gradients and did not change in %d forwards while the model's parameters did: "
            "the optimizer does not have them; add the group {'params': sim.range_parameters()} to it, or "
            "leave out sim.learn_ranges()",
            len(learned),
            graded[0],
            LOOK_EVERY,
        )
