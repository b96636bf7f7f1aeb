"""Candidates: what weights and activations of a group may become, and what that makes of a site's spec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerChannel, PerTensor
from bitwright.core.numerics.spec import PRESETS, Preset, QuantSpec, activation_spec, find_preset, weight_spec
from bitwright.errors import ConfigError

_FLOAT_BITS = 32


@dataclass(frozen=True)
class Candidate:
    """A precision that a group may have.

    Attributes:
        name: ``w4a8``.
        weight, activation: what is asked for; ``None`` leaves them in float.
    """

    name: str
    weight: QuantSpec | None
    activation: QuantSpec | None

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of weights and of activations; 32 for float."""
        return bits_of(self.weight), bits_of(self.activation)


def bits_of(spec: QuantSpec | None) -> int:
    """Bits per element; 32 where nothing is quantized."""
    return _FLOAT_BITS if spec is None else spec.format.bits


def as_candidates(given: str | Preset | Iterable[Any]) -> tuple[Candidate, ...]:
    """Candidates from names of presets, presets, or AIMET's pairs ``((activation bits, type), (weight bits, type))``.

    Raises:
        ConfigError: none, an unknown preset, a pair that cannot be read, or two of one name.
    """
    if isinstance(given, (str, Preset)):
        given = (given,)
    if not isinstance(given, Iterable):
        raise ConfigError(
            "candidates",
            f"{given!r} is not a list of precisions",
            'pass presets, for example ["w8a8", "w8a16", "w4a8"]',
        )
    found = [_candidate(item) for item in given]
    names = [c.name for c in found]
    if not found:
        raise ConfigError("candidates", "the list is empty", 'pass presets, for example ["w8a8", "w8a16", "w4a8"]')
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError("candidates", f"{min(repeated)} stands there twice", "name each candidate once")
    return tuple(found)


def _candidate(item: Any) -> Candidate:
    if isinstance(item, Candidate):
        return item
    if isinstance(item, (str, Preset)):
        preset = find_preset(item)
        name = item if isinstance(item, str) else next((n for n, p in PRESETS.items() if p == item), "")
        w, a = bits_of(preset.weight), bits_of(preset.activation)
        return Candidate(name or f"w{w}a{a}", preset.weight, preset.activation)
    try:
        (activation, activation_type), (weight, weight_type) = item
        names = [_format(activation, activation_type), _format(weight, weight_type)]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "candidates",
            f"{item!r} is neither a preset nor a pair of precisions",
            'write "w8a16", or ((16, "int"), (8, "int")): activations first',
        ) from error
    a_spec = None if names[0] == "float32" else _activation(names[0])
    w_spec = None if names[1] == "float32" else weight_spec(names[1])
    kind = "" if "int" in names[0] and "int" in names[1] else "f"
    return Candidate(f"w{weight}a{activation}{kind}", w_spec, a_spec)


def _format(bits: int, kind: Any) -> str:
    text = str(getattr(kind, "name", kind))
    return f"int{int(bits)}" if text == "int" else {16: "float16", 8: "float8_e4m3", 32: "float32"}[int(bits)]


def _activation(name: str) -> QuantSpec:
    return activation_spec(f"u{name}") if name.startswith("int") else activation_spec(name, symmetry="symmetric")


def spec_at(planned: QuantSpec, wanted: QuantSpec) -> QuantSpec:
    """``planned`` at the precision of ``wanted``: what the rules said of grid and range stays.

    Of an integer format only the bits are taken; of others the format. A granularity that is not the default of its kind
    (blocks), and a format of the scales, are part of the precision.
    """
    changes: dict[str, Any] = {}
    if not isinstance(wanted.granularity, PerTensor | PerChannel):
        changes["granularity"] = wanted.granularity
    if wanted.scale_format != planned.scale_format:
        changes["scale_format"] = wanted.scale_format
    if isinstance(wanted.format, IntFormat) and isinstance(planned.format, IntFormat):
        changes["format"] = replace(planned.format, bits=wanted.format.bits)
    else:
        changes.update(format=wanted.format, symmetry=wanted.symmetry, fixed_range=None)
    return replace(planned, **changes)


def coarser(one: Candidate, other: Candidate) -> bool:
    """Whether ``one`` cannot be more precise than ``other``: integers of no more bits, in weights and in activations."""
    return one != other and _no_finer(one.weight, other.weight) and _no_finer(one.activation, other.activation)


def _no_finer(one: QuantSpec | None, other: QuantSpec | None) -> bool:
    if one is None or other is None:
        return other is None
    integers = isinstance(one.format, IntFormat) and isinstance(other.format, IntFormat)
    return one == other or (integers and one.granularity == other.granularity and one.format.bits <= other.format.bits)


def highest(candidates: Sequence[Candidate]) -> int:
    """Place of the candidate with the most bits."""
    return max(range(len(candidates)), key=lambda i: (sum(candidates[i].bits), candidates[i].bits[1]))
