"""The key-value cache of attention: specifications of keys and values, and their places in a model.

Keys and values are quantized where the products of attention read them, which is what a cache holds: after rotary positions,
before heads are repeated, whatever the model calls them and whether it has a cache of its own, static or growing. Both
operands of such products are found from the graph (:func:`bitwright.core.graph.attention.attention_products`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from numpy.typing import NDArray

from bitwright.core.graph.attention import attention_products, unrepeated
from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat, parse_format
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerTensor, PerToken
from bitwright.core.numerics.rotations import is_hadamard
from bitwright.core.numerics.spec import QuantSpec, activation_spec, dynamic_spec
from bitwright.errors import BitwrightError, ConfigError, close_matches, with_article

Shared = Literal["per_channel", "per_head", "per_token", "per_tensor"]
_SHARED: tuple[str, ...] = ("per_channel", "per_head", "per_token", "per_tensor")
_DEFAULT = {"key": "per_channel", "value": "per_token"}
_FACETS = ("format", "granularity", "group", "symmetric", "rotated")
_GROUP = 16  # tokens of a channel that share a scale with fewer than 8 bits
_WHOLE = 1 << 24  # longer than any sequence: one block of all tokens
_MOST_WITH_ZERO_POINT = (
    8  # bits; 4-bit grids without a zero point leave half of their codes unused on one-sided channels
)


@dataclass(frozen=True)
class CacheSpec:
    """Storage of keys or values: the number format, and the elements that share a scale.

    ``per_token`` is one scale per token and head, chosen when the token is written. ``per_channel`` with a ``group`` is one
    scale per channel and ``group`` tokens, chosen when these are written (KIVI, Liu et al. 2024, arXiv:2402.02750); of a
    forward pass over a whole text a group takes in tokens that come later. The others are calibrated. Integer formats have a
    zero point, unless they are ``symmetric``, as kernels that store a cache in int8 want them.

    ``rotated`` multiplies the channels of every head by an orthogonal matrix in front of the grid and by its transpose behind
    it, so that no channel is larger than the others (R3 of SpinQuant, Liu et al. 2024, arXiv:2405.16406): a Hadamard matrix
    with random signs, or a random orthogonal one where there is none of this size.
    """

    format: str
    granularity: Shared
    group: int = 0
    symmetric: bool = False
    rotated: bool = False

    def spec(self, rank: int, token_axis: int, channel_axis: int) -> QuantSpec:
        """The spec of an operand of ``rank`` axes with tokens and channels on these (counted from the end)."""
        found = self._upright(rank, token_axis, channel_axis)
        return replace(found, rotation=channel_axis) if self.rotated else found

    def _upright(self, rank: int, token_axis: int, channel_axis: int) -> QuantSpec:
        fmt = parse_format(self.format)
        if isinstance(fmt, IntFormat) and fmt.bits <= _MOST_WITH_ZERO_POINT and not self.symmetric:
            fmt = IntFormat(fmt.bits, signed=False)
        if self.granularity == "per_token":
            return dynamic_spec(fmt, PerToken(axis=channel_axis))
        if self.group:
            return dynamic_spec(fmt, PerToken(self.group, axis=token_axis))
        tokens, channels = token_axis % rank, channel_axis % rank
        heads = (1,) if rank > 3 else ()
        kept: dict[str, Granularity] = {
            "per_channel": PerBlock(_WHOLE, tokens, (*heads, channels)),
            "per_head": PerBlock(_WHOLE, tokens, heads),
            "per_tensor": PerTensor(),
        }
        symmetry = "asymmetric" if isinstance(fmt, IntFormat) and not fmt.signed else "symmetric"
        return activation_spec(fmt, granularity=kept[self.granularity], symmetry=symmetry)


@dataclass(frozen=True)
class KvCache:
    """Specification of a cache.

    Attributes:
        key, value: ``None`` leaves them in float.
        recent: how many of the last tokens stay in float, as long as they are the last (a residual window).
    """

    key: CacheSpec | None = None
    value: CacheSpec | None = None
    recent: int = 0


def parse_kv_cache(given: KvCache | Mapping[str, Any] | None, at: str = "kv_cache") -> KvCache | None:
    """Parse a user's setting: ``{"key": "int8", "value": {"format": "int4", "granularity": "per_token"}, "recent": 32}``.

    Keys are per channel and values per token where no granularity is given. With fewer than 8 bits, per channel is per channel
    and 16 tokens, unless ``group`` says how many (0: one calibrated scale for all tokens). ``"symmetric": True`` leaves zero
    points out; ``"rotated": True`` puts a Hadamard matrix in front of the grid and its transpose behind it.

    Raises:
        ConfigError: an unknown key, format or granularity, with close matches; nothing is asked for.
    """
    if given is None or isinstance(given, KvCache):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(at, f"it is {with_article(type(given).__name__)}", 'write {"key": "int8", "value": "int8"}')
    known = ("key", "value", "recent")
    for name in given:
        if name not in known:
            raise ConfigError(at, f"unknown key {name!r}{close_matches(str(name), known)}", f"use {', '.join(known)}")
    recent = given.get("recent", 0)
    if not isinstance(recent, int) or isinstance(recent, bool) or recent < 0:
        raise ConfigError(f"{at}.recent", f"{recent!r} is not a number of tokens", "write 0 or more, such as 32")
    found = {part: _part(given[part], part, f"{at}.{part}") for part in ("key", "value") if given.get(part) is not None}
    if not found:
        raise ConfigError(at, "it asks for neither keys nor values", 'write {"key": "int8", "value": "int8"}')
    return KvCache(found.get("key"), found.get("value"), recent)


def _part(given: Any, part: str, at: str) -> CacheSpec:
    if isinstance(given, CacheSpec):
        return given
    entry = {"format": given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or "format" not in entry:
        raise ConfigError(
            at, f"{given!r:.100} is no format", 'write a format, or {"format": "int4", "granularity": "per_token"}'
        )
    for name in entry:
        if name not in _FACETS:
            raise ConfigError(
                at, f"unknown key {name!r}{close_matches(str(name), _FACETS)}", f"use {', '.join(_FACETS)}"
            )
    granularity: Any = entry.get("granularity", _DEFAULT[part])
    if granularity not in _SHARED:
        near = close_matches(str(granularity), _SHARED)
        raise ConfigError(at, f"{granularity!r} is not a granularity of a cache{near}", f"use {', '.join(_SHARED)}")
    try:
        fmt = parse_format(entry["format"])
        group = entry.get("group", _GROUP if granularity == "per_channel" and fmt.bits < 8 else 0)
        if (
            not isinstance(group, int)
            or isinstance(group, bool)
            or group < 0
            or (group and granularity != "per_channel")
        ):
            raise ConfigError(
                at,
                f"group {group!r} does not go with {granularity}",
                "give a number of tokens with per_channel, such as 16",
            )
        made = CacheSpec(fmt.name, granularity, group, _flag(entry, "symmetric", at), _flag(entry, "rotated", at))
        made.spec(4, -2, -1)
    except BitwrightError as error:
        raise ConfigError(at, error.problem, error.remedy) from error
    return made


def _flag(entry: Mapping[str, Any], name: str, at: str) -> bool:
    value = entry.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(at, f"{name} is {value!r}", "write true or false")
    return value


@dataclass(frozen=True)
class CachePlace:
    """Keys or values of one attention: the operand, its spec, and its size.

    Attributes:
        part: ``key`` or ``value``.
        op, port: the product that reads them.
        spec: resolved for the operand; the residual window is in it.
        size: channels of a head.
        elements: numbers that one token adds to the cache, heads that are repeated counted once.
        bits: that one token adds, scales of its own (float16) included.
    """

    part: str
    op: str
    port: int
    spec: QuantSpec
    size: int
    elements: int
    bits: int


def _token_bits(elements: int, shared: int, spec: QuantSpec) -> int:
    """Bits of ``elements`` numbers, and of their float16 scales and zero points where ``shared`` have one, chosen at run time."""
    scales = elements * 16 // shared if spec.dynamic else 0
    return elements * spec.format.bits + scales * (2 if spec.has_zero_point else 1)


def cache_places(graph: Graph, cache: KvCache | None) -> dict[tuple[str, int], CachePlace]:
    """Operators and ports that read keys and values.

    Raises:
        ConfigError: the model has no attention.
    """
    if cache is None:
        return {}
    found: dict[tuple[str, int], CachePlace] = {}
    for scores, product in attention_products(graph):
        for part, asked, op, token, channel in (
            ("key", cache.key, scores, -1, -2), ("value", cache.value, product, -2, -1),
        ):  # fmt: skip
            operand = op.inputs[1]
            if asked is None or operand is None or graph.values[operand].is_static:
                continue
            shape = graph.values[operand].shape
            spec = asked.spec(len(shape), token, channel)
            spec = replace(spec, recent=(token, cache.recent)) if cache.recent else spec
            elements = _per_token(graph, operand, shape[token])
            shared = asked.group or max(1, shape[channel])
            found[op.name, 1] = CachePlace(
                part, op.name, 1, spec, shape[channel], elements, _token_bits(elements, shared, spec)
            )
    if not found:
        raise ConfigError(
            "kv_cache",
            "the model has no attention: no product of two activations that a softmax leads to another one from",
            "leave out kv_cache, or write attention as scaled_dot_product_attention or matmul, softmax, matmul",
        )
    return found


def with_heads(encoding: Encoding, heads: int) -> Encoding:
    """A calibrated encoding of keys or values for a run in which heads are not repeated as often, or more often.

    Repeated heads stand next to each other and have equal scales.
    """
    known = encoding.scale.shape[1] if encoding.scale.ndim == 4 else heads
    if known in (1, heads) or max(known, heads) % min(known, heads):
        return encoding

    def moved(values: NDArray[Any]) -> NDArray[Any]:
        return values[:, :: known // heads] if known > heads else values.repeat(heads // known, 1)

    return replace(encoding, scale=moved(encoding.scale), zero_point=moved(encoding.zero_point))


def _per_token(graph: Graph, value: str, tokens: int) -> int:
    """Numbers per token of the tensor that is repeated and moved to ``value``, for one sequence of the batch."""
    least = math.prod(graph.values[unrepeated(graph, value)].shape)
    first = next((graph.values[name].shape for name in graph.inputs if graph.values[name].shape), (1,))
    return max(1, least // max(1, tokens * first[0]))


def describe(places: Mapping[tuple[str, int], CachePlace]) -> str:
    """One sentence: the bytes of a token in the cache, its bytes in float16, and what is rotated by which matrix."""
    bits, elements = sum(p.bits for p in places.values()), sum(p.elements for p in places.values())
    stored = f"{-(-bits // 8):,} bytes per token at {len(places)} operands of attention"
    turned = {(f"{p.part}s", p.size) for p in places.values() if p.spec.rotation is not None}
    by = {
        size: "a Hadamard matrix"
        if is_hadamard(size)
        else "a random orthogonal matrix, as no Hadamard matrix has this size,"
        for _, size in turned
    }
    rotated = "".join(f", {part} rotated by {by[size]} of {size} channels" for part, size in sorted(turned))
    return f"key-value cache: {stored}, {2 * elements:,} in float16{rotated}"
