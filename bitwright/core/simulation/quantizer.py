"""One quantizer: its spec, statistics and encoding. Front ends apply it to tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.health.report import check_parameters
from bitwright.core.numerics import affine, ranges, statistics
from bitwright.core.numerics.arrays import Array, to_numpy
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT32_SCALE, FloatFormat, IntFormat
from bitwright.core.numerics.granularity import PerChannel, PerTensor
from bitwright.core.numerics.integer_sums import derive_bias_encoding, floor_weight_scale, underivable
from bitwright.core.numerics.spec import QuantSpec, Symmetry
from bitwright.core.placement.plan import RangeFrom, Role
from bitwright.core.simulation.float_model import Undo
from bitwright.errors import CalibrationError, ConfigError, UnknownAttributeError, close_matches

logger = logging.getLogger("bitwright")


class OnlyKnownAttributes:
    """Base class that refuses to set unknown attributes, which would have no effect."""

    _ATTRIBUTES: frozenset[str] = frozenset()

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._ATTRIBUTES and not hasattr(type(self), name):
            known = [each for each in {*dir(type(self)), *self._ATTRIBUTES} if not each.startswith("_")]
            raise UnknownAttributeError(
                f"quantizer {getattr(self, 'name', '')}",
                f"{name!r} is not an attribute of a quantizer{close_matches(name, known)}",
                "set enabled, frozen, spec or encoding; bits are part of the spec: "
                "quantizer.spec = dataclasses.replace(quantizer.spec, format=parse_format('int4'))",
            )
        super().__setattr__(name, value)


#: attributes that are the state of a quantizer, beside its encoding
_STATE = (
    "_spec", "statistics", "empty", "_enabled", "frozen", "why_float", "why_spec", "range_note", "poor_range",
)  # fmt: skip


class Quantizer(OnlyKnownAttributes):
    """Holds one encoding; every site of a sharing group refers to the same quantizer.

    Attributes:
        name: the first site that uses it.
        role: ``weight``, ``bias``, ``constant``, ``input`` or ``output``.
        spec: what is asked for. Under a new spec the range is chosen again from the statistics where these can serve it
            (other bits, another symmetry, another range method); otherwise encoding and statistics are forgotten.
        enabled: a disabled quantizer lets the tensor through.
        frozen: a frozen encoding survives calibration.
        derivation: how the encoding follows from others (an int32 bias), so that it is never calibrated.
        masking: its values go to a softmax or the like, to which a large negative number is nothing (``masks``).
        why_float: why calibration switched it off, if it did.
        why_spec: why a step of a recipe changed the spec or switched it off, if one did.
        range_from: what fixes the range (see :class:`~bitwright.core.placement.plan.SitePlan`), so that calibration looks
            whether the data agree with it; empty where it is not fixed, or not looked at.
        least_reach: that an observed range has at least, in place of a fixed one.
        range_note: what is to be said of the range that calibration chose, see :class:`ranges.ChosenRange`.
        poor_range: whether that range has far more noise than another one.
        empty: how many tensors without elements calibration met; they are in no statistics.
        keeps_histogram: calibration counts values even where the range method reads their bounds alone, so that another
            method can choose from the same statistics.
    """

    _ATTRIBUTES = frozenset((
        "_enabled", "_encoding", "_spec", "derivation", "empty", "frozen", "keeps_histogram", "least_reach", "masking", "name",
        "poor_range", "range_from", "range_note", "role",
        "statistics", "why_float", "why_spec",
    ))  # fmt: skip

    def __init__(self, name: str, role: Role, spec: QuantSpec) -> None:
        self.name, self.role = name, role
        self._spec = spec
        self._encoding: Encoding | None = None
        self._enabled, self.why_float, self.why_spec = True, "", ""
        self.frozen, self.masking = False, False
        self.derivation: DerivedBias | None = None
        self.statistics: statistics.Statistics | None = None
        self.empty = 0
        self.keeps_histogram = False
        self.range_note, self.poor_range = "", False
        self.range_from: RangeFrom = ""
        self.least_reach = 0.0

    # -- its state

    def remember(self) -> Undo:
        """Keep the whole state; the function returned brings it back."""
        kept, encoding = self._state(), self._encoding

        def restore() -> None:
            self._put(kept, encoding)

        return restore

    def become(self, other: Quantizer) -> None:
        """Take the state of the quantizer at the same place of an earlier graph; a trained range is kept."""
        self._put(other._state(), other.encoding)

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def _put(self, state: Mapping[str, Any], encoding: Encoding | None) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.encoding = encoding

    @property
    def trains_elsewhere(self) -> bool:
        """Whether the scale follows from parameters that train on a device other than the host."""
        return False

    @property
    def derived(self) -> bool:
        """Whether the encoding follows from others."""
        return self.derivation is not None

    @property
    def enabled(self) -> bool:
        """Whether the quantizer is on. Set by the user, it survives calibration."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled, self.why_float = bool(enabled), ""

    def leave_in_float(self, why: str) -> None:
        """Switch it off until the next calibration decides anew."""
        self._enabled, self.why_float = False, why

    def reconsider(self) -> None:
        """Switch it on again if a calibration switched it off."""
        if self.why_float:
            self.enabled = True

    # -- what is asked for and what came out

    @property
    def spec(self) -> QuantSpec:
        """The spec in effect."""
        return self._spec

    @spec.setter
    def spec(self, spec: QuantSpec) -> None:
        if not isinstance(spec, QuantSpec):
            raise ConfigError(
                self.name,
                f"spec must be a QuantSpec, not {type(spec).__name__}",
                "use dataclasses.replace(quantizer.spec, format=parse_format('int4')), "
                "or quantizer.enabled = False to leave the site in float",
            )
        if spec.rotation is None:  # what stands around the grid is a matter of the place
            spec = replace(spec, rotation=self._spec.rotation)
        if spec.rotation != self._spec.rotation:
            raise ConfigError(
                self.name,
                "a rotation stands around the grid of keys and values only, from the start",
                'make the simulation with kv_cache={"key": {"format": "int4", "rotated": True}}, or leave out rotation',
            )
        if spec != self._spec:
            calibrated = self._encoding is not None
            served = _can_serve(self.statistics, self._spec, spec)
            self._spec, self.why_spec = spec, ""
            self.statistics = self.statistics if served else None
            self.encoding = None
            if calibrated and self.role in ("input", "output") and (served or self.is_fixed):
                self.freeze()

    def refine(self, bits: int, why: str) -> None:
        """Give a calibrated integer quantizer another grid for its range; the coverage shows ``why``."""
        encoding = self.required
        assert isinstance(self._spec.format, IntFormat)
        self.spec = replace(self._spec, format=replace(self._spec.format, bits=bits))
        self.why_spec = why
        if self._encoding is None:  # no statistics: the encoding was given
            lo, hi = encoding.min, encoding.max
            self.encoding = affine.encode(lo, hi, self._spec, encoding.granularity, self.name)

    def coarsen(self, channels: Sequence[int], bits: int, why: str) -> bool:
        """Give some channels of a calibrated symmetric weight the steps of ``bits`` bits; the others keep theirs.

        The format stays. Codes of these channels lie within ``bits`` bits as long as the range did not clip their values.

        Args:
            channels: indices of output channels.
            bits: below those of the format.
            why: what the coverage shows.

        Returns:
            Whether it could be done: there is one scale per output channel, and one step per float32.
        """
        encoding = self.required
        held = isinstance(encoding.granularity, PerChannel) and encoding.scale_format == FLOAT32_SCALE
        if not held or not encoding.symmetric or not isinstance(encoding.format, IntFormat):
            return False
        flat = encoding.scale.reshape(-1).copy()
        flat[list(channels)] *= np.float32(2.0 ** (encoding.format.bits - bits))
        self.encoding = affine.with_scale(encoding, flat.reshape(encoding.scale.shape))
        self.range_note = why
        return True

    def ask_as(self, other: Quantizer) -> None:
        """Take the requested spec of another quantizer, without what its calibration decided."""
        self.spec, self.keeps_histogram = other.spec, other.keeps_histogram
        self.enabled = other.enabled or bool(other.why_float)
        self.why_spec = other.why_spec

    def release(self, why: str) -> None:
        """Leave its values in float, also after another calibration; the coverage shows ``why``."""
        self.enabled = False
        self.why_spec = why

    @property
    def described(self) -> str:
        """The spec in effect in one phrase, with the reason where it is not what the rules asked for."""
        why = self.why_spec and f", because {self.why_spec}"
        return f"{self._spec.describe()}{why}{self.range_note and f' ({self.range_note})'}"

    @property
    def encoding(self) -> Encoding | None:
        """The encoding in effect; ``None`` until calibration."""
        return self._current()

    @encoding.setter
    def encoding(self, encoding: Encoding | None) -> None:
        self._set_encoding(encoding)

    def _set_encoding(self, encoding: Encoding | None) -> None:
        self._encoding = encoding
        self.range_note, self.poor_range = "", False

    def _take_range(self, chosen: ranges.ChosenRange) -> None:
        self.encoding = affine.encode(chosen.lo, chosen.hi, self._spec, self._spec.granularity, self.name)
        self.range_note, self.poor_range = chosen.remark, chosen.poor

    def _current(self) -> Encoding | None:
        """The encoding that was set; a front end that trains ranges has the trained one."""
        return self._encoding

    def take(self, encoding: Encoding) -> None:
        """Use a given encoding; the spec follows it."""
        if not _fits(self._spec, encoding):
            self.spec = fulfilled_by(self._spec, encoding)
        self.encoding = encoding

    @property
    def required(self) -> Encoding:
        """The encoding.

        Raises:
            CalibrationError: there is none yet.
        """
        encoding = self.encoding
        if encoding is None and self.frozen:
            raise CalibrationError(
                self.name,
                "the quantizer has no encoding and is frozen, so that calibration passes it over",
                f"set sim.quantizers[{self.name!r}].frozen = False and calibrate, or give it an encoding of your own",
            )
        if encoding is None:
            raise CalibrationError(
                self.name,
                "the quantizer has no encoding: calibration never reached this site",
                "calibrate with data that reaches it, set sim.quantizers[...].enabled = False for it, "
                "or allow it to run in float with compute_encodings(..., allow_unreached=True)",
            )
        return encoding

    @property
    def state(self) -> str:
        """``enabled``, or ``disabled`` with the reason if calibration did it."""
        if self.enabled:
            return "enabled"
        why = self.why_float or self.why_spec
        return f"disabled, because {why}" if why else "disabled"

    # -- calibration

    @property
    def needs(self) -> statistics.Kind:
        """The kind of statistics to take: what the range method reads, or richer ones that exist already or are to be kept."""
        if self.statistics is not None:
            return statistics.kind_of(self.statistics)
        if self.checks_range:
            return "energy"
        kind = ranges.needs(self._spec.method.name)
        return "histogram" if kind == "minmax" and self.keeps_histogram else kind

    def observe(self, x: Array) -> None:
        """Add the values of ``x`` (numpy array or torch tensor) to the statistics."""
        shape = tuple(x.shape)
        if self.frozen or self._spec.dynamic:
            return
        if 0 in shape:
            self.empty += 1
            return
        if self.statistics is None:
            self.statistics = statistics.start(self.needs, self._spec.granularity.param_shape(shape, self.name))
        self.statistics = statistics.update(self.statistics, x, self._spec.granularity)  # type: ignore[type-var]

    def observe_statistics(self, seen: statistics.Statistics) -> None:
        """Add statistics of the kind :attr:`needs` that were taken elsewhere."""
        if self.frozen:
            return
        self.statistics = seen if self.statistics is None else statistics.merge(self.statistics, seen)  # type: ignore[type-var]

    @property
    def is_fixed(self) -> bool:
        """Whether both ends of the range are given, so that no data is needed."""
        fixed = self._spec.fixed_range
        unscaled = isinstance(self._spec.format, FloatFormat) and not self._spec.format.scaled
        return unscaled or self._spec.dynamic or (fixed is not None and None not in fixed)

    @property
    def follows_data(self) -> bool:
        """Whether calibration needs data for it, or looks at data."""
        return self.role in ("input", "output") and (not self.is_fixed or (self.checks_range and bool(self.range_from)))

    @property
    def checks_range(self) -> bool:
        """Whether calibration asks the data if the fixed range serves them."""
        fixed = self.is_fixed and not self._spec.dynamic
        if isinstance(self._spec.format, FloatFormat):  # without a scale: what lies beyond its largest number is lost
            return fixed and self.role in ("input", "output")
        return bool(self.range_from) and fixed

    def freeze(self) -> None:
        """Turn the statistics into the encoding; does nothing when nothing was seen or the encoding is frozen."""
        if self.frozen:
            return
        if self.is_fixed:
            self._freeze_fixed(())
            if self.checks_range and isinstance(self.statistics, statistics.Energy):
                self._check_range(self.statistics)
        elif self.statistics is not None:
            assert not isinstance(self.statistics, statistics.Moments)
            self._take_range(ranges.explained_range(self.statistics, self._spec, self.name))

    def _freeze_fixed(self, shape: tuple[int, ...]) -> None:
        """Freeze a range without data: both ends are given, the format has none (fp16, bf16), or every run computes its own."""
        if self._spec.dynamic:
            spec, one = self._spec, np.ones((), np.float32)
            encoding = Encoding(
                spec.format, one, np.zeros((), np.int64), spec.granularity, spec.scale_format, None, True
            )
            self.encoding = encoding
            return
        lo, hi = self._spec.fixed_range or (None, None)
        granularity = self._spec.granularity
        if lo is None or hi is None:  # a format without a scale, whatever one end of the range is
            lo, hi, granularity = 0.0, 0.0, PerTensor()
        params = granularity.param_shape(shape, self.name)
        self.encoding = affine.encode(np.full(params, lo), np.full(params, hi), self._spec, granularity, self.name)

    def _check_range(self, seen: statistics.Energy) -> None:
        """Replace a fixed range by that of the data where these use too little of the grid.

        A range that the definition of the operator gives is replaced by the observed one. Where a kernel of the target
        computes on this grid only, the values stay in float. What a rule of the user's says stays, and is warned of.
        """
        fixed, spec = self.required, replace(self._spec, fixed_range=None)
        if isinstance(fixed.format, FloatFormat):
            most = float(max(-seen.lo.min(), seen.hi.max()))
            if most > fixed.format.max:
                what = f"its values reach {most:.4g}, beyond the largest number of {fixed.format.name}"
                self.leave_in_float(f"{what}, {fixed.format.max:.6g}")
            return
        reach = np.maximum(seen.hi, self.least_reach)
        observed = affine.encode(seen.lo, reach, spec, spec.granularity, self.name)
        if not ranges.is_contradicted(seen, fixed.scale, observed.scale).any():
            return
        assert isinstance(fixed.format, IntFormat)
        used = int(np.ceil((seen.hi.max() - min(seen.lo.min(), 0.0)) / fixed.scale.min())) + 1
        lo, hi = self._spec.fixed_range or (0.0, 0.0)
        what = f"the data use {used} of the {fixed.format.steps + 1} codes of the fixed range {lo:g} to {hi:g}"
        if self.range_from == "operator":
            self.encoding = observed
            self.range_note = f"{what}, so the observed range is taken"
        elif self.range_from == "target":
            self.leave_in_float(f"{what}, the only one that kernels of the target compute")
        else:
            self.range_note, self.poor_range = f"{what}, which a rule gives", True

    def observe_once(self, x: Array) -> None:
        """Calibrate on ``x`` alone: what weights and other constants need."""
        shape = tuple(x.shape)
        if self._encoding is not None or 0 in shape:
            return
        if self.role != "constant":
            check_parameters({self.name: x})
        if self.is_fixed:
            self._freeze_fixed(shape)
            return
        self._spec.granularity.param_shape(shape, self.name)  # blocks must divide, axes exist
        self._take_range(ranges.explained_range_of(x, self._spec, self._spec.granularity, self.name))

    def __repr__(self) -> str:
        state = "" if self.enabled else ", disabled"
        return f"{type(self).__name__}({self.name}: {self._spec.describe()}, encoding={self.encoding}{state})"


def fulfilled_by(spec: QuantSpec, encoding: Encoding) -> QuantSpec:
    """``spec`` with the format, granularity and symmetry of an encoding that came from elsewhere."""
    fmt, symmetry = encoding.format, spec.symmetry
    if isinstance(fmt, IntFormat):
        middle: Symmetry = "symmetric" if fmt.signed else "unsigned_symmetric"
        plain = (encoding.zero_point == 0).all()
        symmetry = middle if plain and spec.symmetry != "asymmetric" else "asymmetric"
        if encoding.shift is not None:
            symmetry = "float_zero_point"
        elif fmt.narrow and plain:
            symmetry = "strict_symmetric"
    if encoding.dynamic:
        symmetry = "symmetric" if isinstance(fmt, FloatFormat) or fmt.signed else "asymmetric"
    return replace(
        spec, format=fmt, granularity=encoding.granularity, symmetry=symmetry, dynamic=encoding.dynamic,
        fixed_range=None if encoding.dynamic else spec.fixed_range,
    )  # fmt: skip


def _can_serve(seen: statistics.Statistics | None, before: QuantSpec, spec: QuantSpec) -> bool:
    """Whether statistics that were taken under ``before`` hold what the range method of ``spec`` reads."""
    kinds = {"minmax": statistics.MinMax | statistics.Histogram, "histogram": statistics.Histogram}
    read = kinds.get(ranges.needs(spec.method.name))
    return spec.granularity == before.granularity and read is not None and isinstance(seen, read)


def _fits(spec: QuantSpec, encoding: Encoding) -> bool:
    """Whether calibration under ``spec`` could end in an encoding like this one."""
    if spec.dynamic or encoding.dynamic:
        return spec.dynamic == encoding.dynamic and (spec.format, spec.granularity) == (
            encoding.format,
            encoding.granularity,
        )
    same_width = spec.format.bits == encoding.format.bits and type(spec.format) is type(encoding.format)
    symmetric = spec.has_zero_point or encoding.symmetric
    if (spec.symmetry == "float_zero_point") != (encoding.shift is not None):
        return False
    return same_width and symmetric and spec.granularity == encoding.granularity


class DerivedBias:
    """A bias whose int32 grid follows from its operator's input and weight.

    Args:
        site: name, for messages.
        quantizer: the bias's own; its encoding is kept up to date here.
        source, weight: the quantizers whose scales are multiplied.
        operand: the bias (numpy array or torch tensor, read anew each time); ``None`` where it is not known.
        computed: the model computes it of its parameters in every run, as another tensor each time.
    """

    def __init__(
        self,
        site: str,
        quantizer: Quantizer,
        source: Quantizer,
        weight: Quantizer,
        operand: Array | None,
        *,
        computed: bool = False,
    ) -> None:
        self.site, self.quantizer, self.operand, self.computed = site, quantizer, operand, computed
        self.source, self.weight = source, weight
        quantizer.derivation = self
        # input's and weight's encodings, and what followed from them
        self._derived_from: tuple[Encoding | None, Encoding | None, Encoding | None] | None = None
        self.reason: str | None = None

    def replace(self, operand: Array) -> None:
        """Set new values; the grid is derived again at its next use."""
        self.operand, self._derived_from = operand, None

    def see(self, values: Array) -> None:
        """Record the bias of this run, where the model computes it in every run."""
        if self.computed:
            # a copy: shards that were put together for the run are freed after it
            self.replace(to_numpy(values).copy())

    def refresh(self) -> None:
        """Derive the grid anew if the input's or the weight's encoding changed; raise the weight's scale where it must be.

        The scale of a weight channel grows when the bias would not fit an int32 accumulator in steps of
        ``s_x * s_w``. Where no integer bias follows from the two, the bias stays in float and ``reason`` says why.
        """
        source = self.source.encoding if self.source.enabled else None
        weight = self.weight.encoding if self.weight.enabled else None
        if (
            self._derived_from is not None
            and self._derived_from[0] is source
            and self._derived_from[1] is weight
            and self._derived_from[2] is self.quantizer.encoding  # it may have been brought back
        ):
            return
        self.quantizer.encoding, self.reason = None, None
        if source is None or weight is None:
            self.reason = "its input or its weight is in float"
        elif self.operand is None:
            self.reason = "it is computed anew in every run, and not of parameters alone"
        else:
            weight = self._derive(source, weight, np.asarray(to_numpy(self.operand), np.float32))
        self._derived_from = (source, weight, self.quantizer.encoding)

    def _derive(self, source: Encoding, weight: Encoding, values: NDArray[np.float32]) -> Encoding:
        """Set the bias's encoding or the reason why there is none; returns the weight's encoding in effect."""
        self.reason = underivable(source, weight, values.size)
        if self.reason is not None:
            return weight
        floored = floor_weight_scale(weight, source, values, self.site)
        if floored is not weight:
            if self.weight.frozen:
                self.reason = "it does not fit int32 in steps of input scale times the frozen weight scale"
                return weight
            logger.info("%s: weight scale raised so that the bias fits int32", self.site)
            noted = self.weight.range_note, self.weight.poor_range
            self.weight.encoding = weight = floored
            self.weight.range_note, self.weight.poor_range = noted
        self.quantizer.encoding = derive_bias_encoding(source, weight, values, self.site)
        return weight
