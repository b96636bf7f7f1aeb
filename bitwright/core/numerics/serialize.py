"""Specs and encodings as plain JSON values and back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bitwright.core.numerics.affine import is_sayable
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT32_SCALE, IntFormat, parse_format, parse_scale_format
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, PerToken
from bitwright.core.numerics.spec import QuantSpec, RangeMethod
from bitwright.errors import BitwrightError, EncodingsError

JsonDict = dict[str, Any]
_MEND = "export or save the simulation again; the file is damaged, or was edited"


def granularity_to_json(granularity: Granularity) -> JsonDict:
    """``{"kind": "per_channel", "axis": 0}``."""
    if isinstance(granularity, PerChannel):
        return {"kind": "per_channel", "axis": granularity.axis}
    if isinstance(granularity, PerBlock):
        channels = granularity.channel_axis
        return {
            "kind": "per_block",
            "size": granularity.size,
            "axis": granularity.axis,
            "channel_axis": list(channels) if isinstance(channels, tuple) else channels,
        }
    if isinstance(granularity, PerToken):
        return {"kind": "per_token", "block": granularity.block, "axis": granularity.axis}
    return {"kind": "per_tensor"}


def granularity_from_json(data: JsonDict) -> Granularity:
    """Inverse of :func:`granularity_to_json`."""
    kind = data["kind"]
    if kind == "per_channel":
        return PerChannel(_axis(data["axis"]))
    if kind == "per_block":
        size = data["size"]
        if type(size) is not int:
            raise TypeError(f"the size {size!r:.40} is not a whole number")
        channels = data["channel_axis"]
        if not isinstance(channels, list):
            return PerBlock(size, _axis(data["axis"]), _axis(channels))
        held = tuple(axis for axis in map(_axis, channels) if axis is not None)
        return PerBlock(size, _axis(data["axis"]), held)
    if kind == "per_token":
        axis = _axis(data["axis"])
        return PerToken(data["block"], -1 if axis is None else axis)
    if kind != "per_tensor":
        raise ValueError(f"{kind!r:.40} is not a granularity")
    return PerTensor()


def _axis(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not -64 <= value < 64):
        raise TypeError(f"{value!r:.40} is not an axis")
    return value


def encoding_to_json(encoding: Encoding) -> JsonDict:
    """Scales are written as the shortest decimals that give the same float32 back."""
    return {
        "format": encoding.format.name,
        "granularity": granularity_to_json(encoding.granularity),
        "shape": list(encoding.scale.shape),
        "scale": encoding.scale.ravel().tolist(),
        "zero_point": encoding.zero_point.ravel().tolist(),
        **_scale_format_to_json(encoding),
        **({} if encoding.shift is None else {"shift": encoding.shift.ravel().tolist()}),
        **({"dynamic": True} if encoding.dynamic else {}),
        **({} if encoding.vectors is None else {"vectors": list(encoding.vectors)}),
    }


def _scale_format_to_json(encoding: Encoding) -> JsonDict:
    """Nothing for float32 scales."""
    if encoding.scale_format == FLOAT32_SCALE:
        return {}
    common = encoding.common
    return {
        "scale_format": encoding.scale_format.name,
        **({} if common is None else {"common": common.ravel().tolist(), "common_shape": list(common.shape)}),
    }


def encoding_from_json(data: JsonDict, site: str = "encoding") -> Encoding:
    """Inverse of :func:`encoding_to_json`; nothing in ``data`` is trusted.

    Args:
        data: parsed JSON.
        site: for messages.

    Raises:
        EncodingsError: it is not an encoding, a scale is not positive and finite, or a zero point lies outside the grid.
    """
    with _explained(site, "an encoding"):
        fmt, granularity = parse_format(data["format"]), granularity_from_json(data["granularity"])
        shape = tuple(data["shape"])
        if len(shape) != _rank(granularity, len(shape)):
            raise ValueError(f"parameters of shape {shape} are not {type(granularity).__name__}")
        scale = np.array(_numbers(data["scale"], int, float), np.float64).reshape(shape).astype(np.float32)
        zero_point = np.array(_numbers(data["zero_point"], int), np.int64).reshape(shape)
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise ValueError("a scale is not a positive finite number")
        lowest, highest = (fmt.qmin, fmt.qmax) if isinstance(fmt, IntFormat) else (0, 0)
        if ((zero_point < lowest) | (zero_point > highest)).any():
            raise ValueError(f"a zero point lies outside {lowest} to {highest}, the grid of {fmt.name}")
        scale_format = parse_scale_format(data.get("scale_format", FLOAT32_SCALE))
        dynamic = data.get("dynamic", False) is True
        common = None
        if scale_format.shared != "none":
            common = np.array(_numbers(data["common"], int, float), np.float64).astype(np.float32)
            common = common.reshape(tuple(data["common_shape"]))
        shift = None
        if "shift" in data:
            shift = np.array(_numbers(data["shift"], int, float), np.float64).reshape(shape).astype(np.float32)
            if not isinstance(fmt, IntFormat) or fmt.signed or not np.isfinite(shift).all():
                raise ValueError(f"its zero points are real numbers, which {fmt.name} has none of, or not finite")
        vectors = None
        if "vectors" in data:
            size, axis = _numbers(data["vectors"], int)
            if not 1 <= size <= 8 or axis not in (-1, -2):
                raise ValueError(f"vectors of {size} codes along axis {axis} are none of a codebook")
            vectors = (int(size), int(axis))
        encoding = Encoding(fmt, scale, zero_point, granularity, scale_format, common, dynamic, shift, vectors)
        if not is_sayable(encoding):
            raise ValueError(f"its scales are not of the format {scale_format.name}")
        return encoding


def _rank(granularity: Granularity, given: int) -> int:
    """Axes of the parameters; those of blocks have as many as the tensor."""
    fixed = {PerTensor: 0, PerToken: 0, PerChannel: 1}
    return fixed.get(type(granularity), max(1, given))


def _numbers(values: Any, *kinds: type) -> list[Any]:
    if not isinstance(values, list) or not set(map(type, values)) <= set(kinds):
        raise TypeError(f"{values!r:.40} is not a list of numbers")
    return values


@contextmanager
def _explained(site: str, what: str) -> Iterator[None]:
    """Turn every error that the values of a file cause into one kind of error."""
    try:
        yield
    except BitwrightError as error:
        raise EncodingsError(site, f"it is not {what}: {error.site}: {error.problem}", _MEND) from error
    except KeyError as error:
        raise EncodingsError(site, f"it is not {what}: the key {error} is missing", _MEND) from error
    except (TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
        raise EncodingsError(site, f"it is not {what}: {error}", _MEND) from error


def spec_to_json(spec: QuantSpec) -> JsonDict:
    """The spec as JSON values, with its open axes."""
    return {
        "format": spec.format.name,
        "granularity": granularity_to_json(spec.granularity),
        "symmetry": spec.symmetry,
        "method": spec.method.name,
        "options": dict(spec.method.options),
        "fixed_range": None if spec.fixed_range is None else list(spec.fixed_range),
        **({} if spec.non_finite is None else {"non_finite": spec.non_finite}),
        **({} if spec.scale_format == FLOAT32_SCALE else {"scale_format": spec.scale_format.name}),
        **({"dynamic": True} if spec.dynamic else {}),
        **({} if spec.recent is None else {"recent": list(spec.recent)}),
        **({} if spec.rotation is None else {"rotation": spec.rotation}),
    }


def spec_from_json(data: JsonDict, site: str = "spec") -> QuantSpec:
    """Inverse of :func:`spec_to_json`; nothing in ``data`` is trusted.

    Args:
        data: parsed JSON.
        site: for messages.

    Raises:
        EncodingsError: it is not a spec.
    """
    from bitwright.core.numerics.ranges import find_range_method

    with _explained(site, "a spec"):
        fixed = data["fixed_range"]
        if fixed is not None:
            _numbers(fixed, int, float, type(None))
        if not isinstance(data["method"], str):
            raise TypeError(f"{data['method']!r:.40} is not a range method")
        options = dict(data["options"])
        _numbers(list(options.values()), int, float)
        find_range_method(data["method"], options)
        return QuantSpec(
            parse_format(data["format"]),
            granularity_from_json(data["granularity"]),
            data["symmetry"],
            RangeMethod.of(data["method"], options),
            None if fixed is None else (fixed[0], fixed[1]),
            data.get("non_finite"),
            parse_scale_format(data.get("scale_format", FLOAT32_SCALE)),
            data.get("dynamic", False) is True,
            None if data.get("recent") is None else (int(data["recent"][0]), int(data["recent"][1])),
            None if data.get("rotation") is None else int(data["rotation"]),
        )
