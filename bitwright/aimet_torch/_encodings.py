"""Encodings files with AIMET's switches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bitwright import torch as front
from bitwright.errors import EncodingsError


def versioned(source: str | Path | dict[str, Any]) -> str | Path | dict[str, Any]:
    """``source``; encodings without a version (dicts, and files of older AdaRound) get the one their layout shows."""
    if isinstance(source, dict):
        document = source
    else:
        try:
            document = json.loads(Path(source).read_text())
        except (OSError, ValueError):
            return source  # the reader says what is wrong with it
    if not isinstance(document, dict) or "version" in document:
        return source
    sections = ("param_encodings", "activation_encodings")
    if "encodings" in document:
        return {"version": "2.0.0", **document}
    if not any(key in document for key in sections):
        return {"version": "0.6.1", "activation_encodings": {}, "param_encodings": document}
    is_list = any(isinstance(document.get(key), list) for key in sections)
    empty: Any = [] if is_list else {}
    return {"version": "1.0.0" if is_list else "0.6.1", **dict.fromkeys(sections, empty), **document}


def _unserved(sim: front.QuantizationSimModel, found: tuple[str, ...]) -> list[str]:
    """The places whose quantizers have none of the encodings, and do not follow from others."""
    served = {id(sim.quantizers[name].quantizer) for name in found}
    others = ((n, site.quantizer) for n, site in sim.quantizers.items() if id(site.quantizer) not in served)
    return [name for name, quantizer in others if not quantizer.derived]


def _refuse_switched_off(sites: list[str], source: str | Path | dict[str, Any]) -> None:
    if sites:
        raise EncodingsError(
            str(source) if isinstance(source, (str, Path)) else "encodings",
            f"it has encodings for quantizers that are switched off: {', '.join(sites[:5])}",
            "switch them on before loading, or pass strict=False to leave them off",
        )


def load_encodings(
    sim: front.QuantizationSimModel,
    source: str | Path | dict[str, Any],
    strict: bool,
    partial: bool,
    allow_overwrite: bool | None,
) -> tuple[str, ...]:
    """Load encodings; what is switched off stays so.

    Raises:
        EncodingsError: (a ValueError) ``strict``, and the file has encodings for places that are switched off; or as
            :meth:`bitwright.torch.QuantizationSimModel.load_encodings`. The simulation is as it was.
    """
    restore = sim.quantizers.remember()
    off = [name for name, site in sim.quantizers.items() if not site.enabled]
    try:
        found = front.QuantizationSimModel.load_encodings(sim, versioned(source), strict, partial=True)
        if strict:
            _refuse_switched_off([name for name in off if name in found], source)
    except BaseException:
        restore()
        raise
    switched_off = off if partial else [*off, *_unserved(sim, found)]
    for name in switched_off:
        sim.quantizers[name].enabled = False
    if allow_overwrite is not None:
        for name in found:
            sim.quantizers[name].frozen = not allow_overwrite
    return found
