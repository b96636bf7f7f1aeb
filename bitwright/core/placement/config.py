"""Convert a user's settings to rules: scheme, bit widths and configuration files (YAML, TOML or JSON, and AIMET's JSON).

Ours, in YAML::

    preset: w8a8
    rules:
      - {match: "layer1.*", op: Conv, weight: int4}
      - {match: head, weight: {format: int8, granularity: per_tensor}, output: null}
    supergroups: [default, [Conv, Silu]]
    recurrent: boundary_only      # or run_time, or "inside", the default: quantizers inside the steps of recurrent layers
    tail: quantized               # or "float", the default: what follows the last layer stays in float

Every key is checked; the error for an unknown key proposes the closest known one. TOML has no ``null``: write
``"float"``.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec

from bitwright.core.files import read_document
from bitwright.core.graph.patterns import DEFAULT_SUPERGROUPS, MASKED_SOFTMAX, MATMUL_ADD, Pattern
from bitwright.core.numerics.formats import Format, IntFormat, parse_format, parse_scale_format
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerGate, PerTensor, PerToken
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.numerics.spec import (
    PRESETS,
    SYMMETRIES,
    Preset,
    RangeMethod,
    activation_spec,
    check_policy,
    find_preset,
    weight_spec,
)
from bitwright.core.placement.aimet_config import (
    ALIASES,
    SECTIONS,
    SHIPPED,
    is_aimet_config,
    read_aimet_config,
    shipped_config,
)
from bitwright.core.placement.kv_cache import KvCache, parse_kv_cache
from bitwright.core.placement.rules import BOUNDARY_ONLY, FACETS, RUN_TIME, FixedRange, Rule, Rules, default_rules
from bitwright.errors import BitwrightError, ConfigError, close_matches, with_article

_TOP = ("preset", "rules", "supergroups", "recurrent", "tail", "kv_cache")
_TAILS = ("float", "quantized")
#: value of ``recurrent`` -> the rules that come first
_RECURRENT: Mapping[str, tuple[Rule, ...]] = {
    "inside": (),
    "boundary_only": (BOUNDARY_ONLY,),
    "run_time": (BOUNDARY_ONLY, RUN_TIME),
}
_PORTS = {
    **{
        p: p for p in ("output", "input", "inner", "weight", "bias", "param", "constant", "model_input", "model_output")
    },
    "all": "*",
}
_RULE = ("match", "op", "optional", *_PORTS, "params")
_GROUPS = {"default": DEFAULT_SUPERGROUPS, "masked_softmax": MASKED_SOFTMAX, "matmul_add": MATMUL_ADD}


def load_config(source: str | Path | Mapping[str, Any] | None = None, preset: Preset | None = None) -> Rules:
    """Rules from a file, a dictionary, or the name of a shipped target.

    Args:
        source: ``None`` for the default rules; a path to a ``.json``, ``.yaml``, ``.yml`` or ``.toml``
            file; a dictionary with the contents of one; or a name such as ``default`` or ``htp_v73``
            (:func:`~bitwright.core.placement.aimet_config.shipped_config`). AIMET's form is told from ours by its
            top-level keys.
        preset: base specs where the configuration names none; w8a8 if not given.

    Raises:
        ConfigError: a file that is missing or cannot be parsed (with the line), an unknown key or value
            (with close matches).
    """
    if source is None:
        chosen = preset or PRESETS["w8a8"]
        return default_rules(chosen.weight, chosen.activation)
    if isinstance(source, Mapping):
        return _read(source, preset, "configuration")
    if isinstance(source, str) and (source in SHIPPED or source in ALIASES):
        return _read(shipped_config(source), preset, source)
    path = Path(source)
    if not path.is_file() and not path.suffix:
        near = close_matches(str(path), (*SHIPPED, *ALIASES))
        raise ConfigError(
            f"configuration {str(path)!r}",
            f"it is neither a file nor a shipped target{near}",
            f"give a path, or one of {', '.join(SHIPPED)}",
        )
    return _read(read_file(path, _TOP), preset, path.name)


def _read(data: Mapping[str, Any], preset: Preset | None, source: str) -> Rules:
    if is_aimet_config(data):
        return read_aimet_config(data, preset or PRESETS["w8a8"], source)
    return read_config(data, preset, source)


# ---- files


def read_file(path: Path, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Read the mapping in a ``.json``, ``.yaml``, ``.yml`` or ``.toml`` file.

    Args:
        path: of the file.
        keys: what such a file has at its top, for messages.

    Raises:
        ConfigError: the file is missing, cannot be parsed (with the line), or holds no mapping.
    """
    data = read_document(path, ConfigError)
    if not isinstance(data, Mapping):
        problem = f"it holds {with_article(type(data).__name__)}, not keys and values"
        raise ConfigError(str(path), problem, f"write {', '.join(keys)} as {'keys' if len(keys) > 1 else 'key'}")
    return data


# ---- our form


def read_config(data: Mapping[str, Any], preset: Preset | None = None, source: str = "configuration") -> Rules:
    """The rules of a configuration in our form.

    Args:
        data: keys ``preset``, ``rules``, ``supergroups``, ``recurrent``, ``tail`` and ``kv_cache``, each optional.
        preset: base specs if ``data`` names no preset.
        source: name for messages.

    Raises:
        ConfigError: an unknown key or a value that cannot be; the message names it and lists close matches.
    """
    _keys(data, source, (*_TOP,), also=SECTIONS)
    chosen = find_preset(data["preset"]) if "preset" in data else preset or PRESETS["w8a8"]
    entries = data.get("rules") or []
    if not isinstance(entries, list):
        raise ConfigError(f"{source}: rules", f"it is {with_article(type(entries).__name__)}", "write a list of rules")
    rules = [rule for i, entry in enumerate(entries) for rule in _rules(entry, f"{source}: rules[{i}]")]
    rules[:0] = _RECURRENT[_one_of(data.get("recurrent", "inside"), f"{source}: recurrent", (*_RECURRENT,))]
    groups = _supergroups(data.get("supergroups", ["default"]), f"{source}: supergroups")
    in_float = _one_of(data.get("tail", "float"), f"{source}: tail", _TAILS) == "float"
    cache = parse_kv_cache(data.get("kv_cache"), f"{source}: kv_cache")
    return Rules(
        chosen.weight, chosen.activation, tuple(rules), groups, float_tail=in_float, source=source, kv_cache=cache
    )


def _keys(data: Any, at: str, known: tuple[str, ...], also: tuple[str, ...] = ()) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(
            at, f"it is {with_article(type(data).__name__)}, not keys and values", f"use {', '.join(known)}"
        )
    for key in data:
        if key not in known:
            near = close_matches(str(key), (*known, *also))
            raise ConfigError(at, f"unknown key {key!r}{near}", f"use {', '.join(known)}")
    return data


def _rules(entry: Any, at: str) -> list[Rule]:
    """Convert one entry of ``rules`` to one rule per kind of tensor that it names."""
    entry = _keys(entry, at, _RULE)
    selector: dict[str, Any] = {"name": entry.get("match", "*"), "op": _types(entry.get("op", "*"), f"{at}.op")}
    if not isinstance(selector["name"], str):
        problem = f"{selector['name']!r} is not a name"
        raise ConfigError(f"{at}.match", problem, 'write a module, operator or site name, or "*"')
    if _boolean(entry.get("optional", False), f"{at}.optional"):
        selector["optional"] = True
    rules = []
    for key, value in entry.items():
        if key in _PORTS:
            rules.append(_rule(value, f"{at}.{key}", {**selector, "port": _PORTS[key]}))
        elif key == "params":
            if not isinstance(value, Mapping):
                raise ConfigError(f"{at}.params", f"{value!r} is not a mapping", "write {running_mean: null}")
            for name, facets in value.items():
                where = f"{at}.params.{name}"
                rules.append(_rule(facets, where, {**selector, "port": "param", "param": str(name)}))
    if not rules:
        raise ConfigError(at, "the rule sets nothing", f"add one of {', '.join(_PORTS)}, such as weight: int4")
    return rules


def _types(value: Any, at: str) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise ConfigError(at, f"{value!r} is not an operator type", "write a type such as Conv, or a list of types")


def _rule(value: Any, at: str, selector: Mapping[str, Any]) -> Rule:
    facets: dict[str, Any]
    if value is None or value == "float":
        facets = {"quantized": False}
    elif value == "derived" and selector["port"] == "bias":
        facets = {"quantized": "derived"}
    elif isinstance(value, str):
        facets = {"format": _at(at, parse_format, value)}
    else:
        facets = _facets(_keys(value, at, FACETS), at)
    origin = ", ".join(f"{k}={v!r}" for k, v in selector.items() if v != "*" and k != "optional")
    try:
        return Rule(**selector, **facets, origin=f"{at} ({origin or 'all tensors'})")
    except BitwrightError as error:
        raise ConfigError(at, error.problem, error.remedy) from error


def _at(at: str, read: Any, value: Any) -> Any:
    """``read(value)``, with the place in the file on any error."""
    try:
        return read(value)
    except BitwrightError as error:
        raise ConfigError(at, error.problem, error.remedy) from error


def _facets(entry: Mapping[str, Any], at: str) -> dict[str, Any]:
    readers: dict[str, Callable[[Any, str], Any]] = {
        "quantized": _boolean,
        "format": lambda value, where: _at(where, parse_format, value),
        "symmetry": _symmetry,
        "granularity": _granularity,
        "method": _range_method,
        "fixed_range": _range,
        "non_finite": check_policy,
        "scale_format": lambda value, where: _at(where, parse_scale_format, value),
        "dynamic": _boolean,
    }
    return {key: readers[key](value, f"{at}.{key}") for key, value in entry.items()}


def _boolean(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(at, f"{value!r} is not a boolean", "write true or false")
    return value


def _symmetry(value: Any, at: str) -> str:
    if value not in SYMMETRIES:
        near = close_matches(str(value), SYMMETRIES)
        raise ConfigError(at, f"{value!r} is not a symmetry{near}", f"use {', '.join(SYMMETRIES)}")
    return str(value)


def _granularity(value: Any, at: str) -> Granularity:
    words: dict[str, Granularity] = {
        "per_tensor": PerTensor(), "per_channel": PerChannel(), "per_gate": PerGate(), "per_token": PerToken(),
    }  # fmt: skip
    with_number = {"per_channel": PerChannel, "per_block": PerBlock, "per_token": PerToken}
    if isinstance(value, str) and value in words:
        return words[value]
    if isinstance(value, Mapping) and len(value) == 1:
        (word, number), *_ = value.items()
        if word in with_number and isinstance(number, int) and not isinstance(number, bool):
            made: Granularity = _at(at, with_number[word], number)
            return made
    word = next(iter(value), "") if isinstance(value, Mapping) else value
    near = close_matches(str(word), (*words, "per_block"))
    raise ConfigError(
        at,
        f"{value!r} is not a granularity{near}",
        "use per_tensor, per_channel, per_gate, per_token, {per_channel: axis}, {per_block: size} or {per_token: size}",
    )


def _range_method(value: Any, at: str) -> RangeMethod:
    from bitwright.core.numerics.ranges import find_range_method

    if isinstance(value, Mapping):
        options = {str(k): v for k, v in value.items() if k != "name"}
        if "name" not in value or not all(isinstance(v, (int, float)) for v in options.values()):
            problem = f"{value!r} is not a range method with options"
            raise ConfigError(at, problem, "write {name: percentile, percentile: 99.9}")
        method: RangeMethod = _at(at, lambda v: find_range_method(str(v["name"]), options), value)
        return method
    found: RangeMethod = _at(at, find_range_method, value)
    return found


def _range(value: Any, at: str) -> FixedRange:
    ends = value if isinstance(value, (list, tuple)) else ()
    if len(ends) != 2 or any(e is not None and (isinstance(e, bool) or not isinstance(e, (int, float))) for e in ends):
        raise ConfigError(at, f"{value!r} is not a range", "write [lowest, highest], with null for a calibrated end")
    return ends[0], ends[1]


def _one_of(value: Any, at: str, words: tuple[str, ...]) -> str:
    """Check that ``value`` is one of the words that a key takes."""
    if value not in words:
        near = close_matches(str(value), words)
        raise ConfigError(at, f"{value!r} is not a way to place them{near}", f"use {', '.join(words)}")
    return str(value)


def _supergroups(value: Any, at: str) -> tuple[Pattern, ...]:
    if isinstance(value, str):
        value = [value]
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ConfigError(
            at, f"it is {with_article(type(value).__name__)}", "write a list of chains, such as [[Conv, Relu]]"
        )
    found: list[Pattern] = []
    for i, entry in enumerate(value):
        if isinstance(entry, str):
            if entry not in _GROUPS:
                near = close_matches(entry, _GROUPS)
                raise ConfigError(f"{at}[{i}]", f"{entry!r} is not a set of chains{near}", f"use {', '.join(_GROUPS)}")
            found.extend(_GROUPS[entry])
        elif isinstance(entry, list) and len(entry) > 1 and all(isinstance(t, str) for t in entry):
            found.append(Pattern(tuple(entry)))
        else:
            raise ConfigError(f"{at}[{i}]", f"{entry!r} is not a chain", "list at least two operator types")
    return tuple(dict.fromkeys(found))


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
    kv_cache: KvCache | Mapping[str, Any] | None = None,
) -> Rules:
    """Rules from the arguments of a ``QuantizationSimModel``.

    Args:
        quant_scheme: range method of weights and activations; ``None`` leaves the preset's.
        preset: base specs; ``None`` makes them from the bit widths.
        config_file: see :func:`bitwright.core.placement.config.load_config`; ``None`` means our default rules;
            rules of another simulation are taken as they are, and nothing else of the arguments is.
        param_bw, output_bw, data_type: bits of weights and of activations, integer or float.
        names: what the front end calls the two widths, for messages.
        kv_cache: what keys and values of attention are stored as; ``None`` is what the configuration says.

    Raises:
        FormatError: an impossible bit width.
        ConfigError: an unknown scheme or preset, or a configuration that cannot be read.
    """
    cache = parse_kv_cache(kv_cache)
    if isinstance(config_file, Rules):
        return config_file if cache is None else replace(config_file, kv_cache=cache)
    method = _method(quant_scheme)
    if preset is None:
        preset = _preset(param_bw, output_bw, data_type, names)
    rules = _scheme_rules(config_file, _with_method(find_preset(preset), method))
    return rules if cache is None else replace(rules, kv_cache=cache)


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


def _scheme_rules(config: str | Path | dict[str, Any] | None, preset: Preset) -> Rules:
    if config is None:
        return default_rules(preset.weight, preset.activation)

    return load_config(config, preset)


def _with_method(preset: Preset, method: RangeMethod | None) -> Preset:
    if method is None:
        return preset
    return Preset(
        None if preset.weight is None else replace(preset.weight, method=method),
        None if preset.activation is None else replace(preset.activation, method=method),
    )
