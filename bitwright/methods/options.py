"""Options of steps and methods, checked by the annotations of what takes them."""

from __future__ import annotations

import functools
import inspect
import numbers
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from bitwright.errors import ConfigError, close_matches

#: name -> annotation
Options = Mapping[str, Any]

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "null",
}


def keyword_options(
    function: Callable[..., Any], bound: Collection[str] = (), *, by_place: bool = False
) -> dict[str, Any]:
    """The keyword-only parameters of ``function`` that are not ``bound``, with their annotations.

    Args:
        function: it, or a partial of it.
        bound: names that are not options.
        by_place: also those that may be given by their place.
    """
    parameters = inspect.signature(function).parameters.values()
    while isinstance(function, functools.partial):
        function = function.func
    hints = get_type_hints(function)
    kinds = {inspect.Parameter.KEYWORD_ONLY, *((inspect.Parameter.POSITIONAL_OR_KEYWORD,) if by_place else ())}
    names = [p.name for p in parameters if p.kind in kinds and p.name not in bound]
    return {name: hints.get(name, Any) for name in names}


def check_options(site: str, given: Mapping[str, Any], known: Options) -> None:
    """Refuse unknown options, and values that do not match their annotations.

    Args:
        site: the step or method.
        given: option -> value.
        known: see :func:`keyword_options`.

    Raises:
        ConfigError: names the option, its value and what it takes; or close matches of its name.

    >>> check_options("gptq", {"damping": [1]}, {"damping": float})
    Traceback (most recent call last):
    bitwright.errors.ConfigError: gptq: the option 'damping' is [1]. Remedy: give a number
    """
    for option, value in given.items():
        if option not in known:
            problem = f"there is no option {option!r}{close_matches(option, known)}"
            raise ConfigError(site, problem, f"use {', '.join(known)}" if known else "it takes none")
        if not takes(known[option], value):
            raise ConfigError(site, f"the option {option!r} is {value!r:.100}", f"give {phrase(known[option])}")


def check_required(site: str, function: Callable[..., Any], given: Collection[str], known: Options) -> None:
    """Refuse a call without the keywords that ``function`` has no default for.

    Args:
        site: the step or method.
        function: that is going to be called.
        given: names that have a value.
        known: see :func:`keyword_options`.

    Raises:
        ConfigError: names the first of them, and what it takes.

    >>> def halve(*, keep: float) -> None: ...
    >>> check_required("halve", halve, [], {"keep": float})
    Traceback (most recent call last):
    bitwright.errors.ConfigError: halve: the option 'keep' is not given. Remedy: give a number
    """
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty and name not in given:
            raise ConfigError(site, f"the option {name!r} is not given", f"give {phrase(known.get(name, Any))}")


def takes(annotation: Any, value: Any) -> bool:
    """Whether ``value``, from Python or from a file, matches ``annotation``; for other classes, an instance."""
    origin = get_origin(annotation)
    if annotation is Any:
        return True
    if annotation is None or annotation in _WORDS:
        return _takes_plain(annotation, value)
    if origin is Literal:
        return value in get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(takes(one, value) for one in get_args(annotation))
    if isinstance(origin, type):
        return _takes_many(origin, get_args(annotation), value)
    return not isinstance(annotation, type) or isinstance(value, annotation)


def _takes_plain(annotation: Any, value: Any) -> bool:
    if annotation in (None, type(None)):
        return value is None
    if annotation is bool:
        return isinstance(value, (bool, np.bool_))
    if annotation is Path:
        return isinstance(value, (str, Path))
    number: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}
    if annotation in number:
        return isinstance(value, number[annotation]) and not isinstance(value, (bool, np.bool_))
    return isinstance(value, annotation)


def _takes_many(origin: type, inner: tuple[Any, ...], value: Any) -> bool:
    """Whether a container matches; iterators are not consumed."""
    if issubclass(origin, Mapping) or not issubclass(origin, Iterable):
        return isinstance(value, origin)
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return False
    if not isinstance(value, Collection):
        return not issubclass(origin, Collection)
    if origin is tuple and inner[-1:] != (...,):
        return len(value) == len(inner) and all(map(takes, inner, value))
    return not inner or all(takes(inner[0], one) for one in value)


def phrase(annotation: Any) -> str:
    """Describe in words the values that an annotation takes.

    >>> phrase(float | None), phrase(tuple[float, float]), phrase(Literal["mse", "minmax"])
    ('a number or null', 'a list of 2: a number, a number', "'mse' or 'minmax'")
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation in _WORDS:
        return _WORDS[type(None) if annotation is None else annotation]
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(map(phrase, inner))
    if origin is tuple and inner[-1:] != (...,):
        return f"a list of {len(inner)}: {', '.join(map(phrase, inner))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "keys and values"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return f"a list, of each {phrase(inner[0])}" if inner else "a list"
    return f"a {getattr(annotation, '__name__', annotation)}"
