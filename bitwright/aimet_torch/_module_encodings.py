"""Encodings of one module as encodings files have them: records by parameter name, or by index of an input or output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bitwright.errors import EncodingsError

#: what a place is called in an encodings file, its quantizer (``None``: none in effect), and how it is switched off
Place = tuple[str, Any, Callable[[], None]]


def places_of(quantizers: Any) -> list[Place]:
    """The places of a list or a dict of quantizers."""
    keys = quantizers.keys() if hasattr(quantizers, "keys") else range(len(quantizers))
    return [(str(key), quantizers[key], _switch(quantizers, key)) for key in keys]


def _switch(quantizers: Any, key: Any) -> Callable[[], None]:
    def off() -> None:
        quantizers[key] = None

    return off


def export_encodings(quantizers: Any, encoding_version: str) -> dict[str, Any]:
    """Encodings by place; ``None`` where there is none."""
    found = {name: None if q is None else q.get_encodings() for name, q, _ in places_of(quantizers)}
    return {name: None if one is None else one.to_qnn_encoding_dict(encoding_version) for name, one in found.items()}


def import_encodings(
    quantizers: Any,
    encodings: Mapping[str, Any],
    strict: bool,
    partial: bool,
    requires_grad: bool | None,
    allow_overwrite: bool,
) -> None:
    """Take records of version 0.6.1, by place; a quantizer whose range is fixed keeps it.

    Args:
        encodings: records (a list, or one) by the name of a parameter, or the index of an input or output as text.
        strict: a record for a place without a quantizer is an error; else it is passed over.
        partial: quantizers without a record stay; else they are switched off.
        requires_grad: whether ranges train; ``None`` leaves that as it is.
        allow_overwrite: whether calibration may change what was taken.

    Raises:
        EncodingsError: (a ValueError) ``strict`` and no quantizer, or no record of version 0.6.1; nothing is changed.
    """
    found: list[tuple[Any, list[Any]]] = []
    dangling = []
    for name, quantizer, off in places_of(quantizers):
        if quantizer is not None and not quantizer.is_overwrite_allowed():
            continue
        given = encodings.get(name)
        if not given:
            dangling.append(off)
        elif quantizer is not None:
            found.append((quantizer, _records(name, given)))
        elif strict:
            raise EncodingsError(
                f"import of encodings, {name!r}",
                "there is a record and no quantizer to take it",
                "put a quantizer there first, or pass strict=False",
            )
    for quantizer, records in found:
        quantizer.set_legacy_encodings(records)
        if requires_grad is not None:
            quantizer.requires_grad_(requires_grad)
        quantizer.allow_overwrite(allow_overwrite)
    for off in dangling if not partial else ():
        off()


_KEYS = {"int": {"bitwidth", "is_symmetric", "min", "max"}, "float": {"bitwidth"}}


def _records(name: str, given: Any) -> list[Any]:
    records: Iterable[Any] = [given] if isinstance(given, Mapping) else list(given)
    for record in records:
        if not isinstance(record, Mapping) or not _KEYS.get(record.get("dtype", "int"), {""}) <= set(record):
            raise EncodingsError(
                f"import of encodings, {name!r}",
                f"no record of version 0.6.1: {record!r}",
                'give what export_..._encodings("0.6.1") returns, or load the whole file with sim.load_encodings',
            )
    return list(records)
