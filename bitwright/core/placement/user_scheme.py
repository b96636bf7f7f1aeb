"""What a user says about a whole model (scheme, bit widths, preset, configuration), made into rules."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec

from bitwright.core.numerics.formats import Format, IntFormat, parse_format
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.numerics.spec import Preset, RangeMethod, activation_spec, find_preset, weight_spec
from bitwright.core.placement.rules import Rules, default_rules
from bitwright.errors import BitwrightError, ConfigError

P = ParamSpec("P")


def bit_widths(first: str, second: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorator of a constructor with the bit widths ``first`` and ``second``, next to each other in this order.

    The front ends have them in opposite orders, each in AIMET's. Where they differ and were given by position, a warning
    says which is which.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        at = list(inspect.signature(init).parameters).index(first)

        @functools.wraps(init)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            given = args[at : at + 2]
            if len(given) == 2 and given[0] != given[1]:
                warnings.warn(
                    f"bit widths by position: read as {first}={given[0]!r}, {second}={given[1]!r}; the simulations of PyTorch "
                    "and of ONNX models have the two in opposite orders, so give them by name",
                    stacklevel=2,
                )
            init(*args, **kwargs)

        return checked

    return decorate


def make_rules(
    quant_scheme: str | RangeMethod | None = None,
    preset: str | Preset | None = None,
    config_file: str | Path | dict[str, Any] | Rules | None = None,
    *,
    param_bw: int = 8,
    output_bw: int = 8,
    data_type: str = "int",
    names: tuple[str, str] = ("default_param_bw", "default_output_bw"),
) -> Rules:
    """Rules from the arguments of a ``QuantizationSimModel``.

    Args:
        quant_scheme: range method of weights and activations; ``None`` leaves the preset's.
        preset: base specs; ``None`` makes them from the bit widths.
        config_file: see :func:`bitwright.core.placement.config.load_config`; ``None`` means our default rules;
            rules of another simulation are taken as they are, and nothing else of the arguments is.
        param_bw, output_bw, data_type: bits of weights and of activations, integer or float.
        names: what the front end calls the two widths, for messages.

    Raises:
        FormatError: an impossible bit width.
        ConfigError: an unknown scheme or preset, or a configuration that cannot be read.
    """
    if isinstance(config_file, Rules):
        return config_file
    method = _method(quant_scheme)
    if preset is None:
        preset = _preset(param_bw, output_bw, data_type, names)
    return _rules(config_file, _with_method(find_preset(preset), method))


def _method(scheme: str | RangeMethod | None) -> RangeMethod | None:
    if scheme is None:
        return None
    return find_range_method(scheme)


def _format(bits: int, data_type: str, signed: bool, argument: str) -> Format:
    if data_type == "float":
        known = {16: "float16", 8: "float8_e4m3"}
        if bits not in known:
            raise ConfigError(
                argument, f"there is no float format of {bits} bits here", "use 16 or 8 bits, or a preset"
            )
        return parse_format(known[bits])
    try:
        return IntFormat(bits, signed)
    except BitwrightError as error:
        raise type(error)(argument, error.problem, error.remedy) from None


def _preset(param_bw: int, output_bw: int, data_type: str, names: tuple[str, str]) -> Preset:
    if data_type not in ("int", "float"):
        raise ConfigError("default_data_type", f"{data_type!r} is neither int nor float", "use 'int' or 'float'")
    weight = _format(param_bw, data_type, True, names[0])
    activation = _format(output_bw, data_type, False, names[1])
    symmetry = "asymmetric" if data_type == "int" else "symmetric"
    return Preset(weight_spec(weight), activation_spec(activation, symmetry=symmetry))


def _rules(config: str | Path | dict[str, Any] | None, preset: Preset) -> Rules:
    if config is None:
        return default_rules(preset.weight, preset.activation)
    from bitwright.core.placement.config import load_config

    return load_config(config, preset)


def _with_method(preset: Preset, method: RangeMethod | None) -> Preset:
    if method is None:
        return preset
    return Preset(
        None if preset.weight is None else replace(preset.weight, method=method),
        None if preset.activation is None else replace(preset.activation, method=method),
    )
