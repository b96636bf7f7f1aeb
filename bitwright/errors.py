"""One family of errors: where it happened, what was seen, how to go on."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

_LONGEST = 4_000  # characters of a part of a message


class BitwrightError(Exception):
    """Base of every error that a user can cause and correct.

    Args:
        site: layer, tensor, file or argument the error is about.
        problem: what was found there, with the value seen.
        remedy: what to do about it.

    The message reads ``site: problem. Remedy: remedy``; the parts stay available as attributes. A part of more than
    4,000 characters, as a value from a damaged file can be, loses its middle; what no encoding can write is escaped.
    """

    def __init__(self, site: str, problem: str, remedy: str) -> None:
        self.site, self.problem, self.remedy = _shortened(site), _shortened(problem), _shortened(remedy)
        site, problem, remedy = self.site, self.problem, self.remedy
        super().__init__(f"{site}: {problem}. Remedy: {remedy}")

    def __reduce__(self) -> tuple[type[BitwrightError], tuple[str, str, str]]:
        return type(self), (self.site, self.problem, self.remedy)


def _shortened(text: str) -> str:
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


class FormatError(BitwrightError, ValueError):
    """A number format that does not exist or has an impossible width."""


class GranularityError(BitwrightError, ValueError):
    """A granularity that does not fit the shape of its tensor."""


class RangeError(BitwrightError, ValueError):
    """A range with a NaN or infinite bound, or with its bounds exchanged."""


class ConfigError(BitwrightError, ValueError):
    """A configuration, rule or argument that cannot be understood."""


class EncodingsError(BitwrightError, ValueError):
    """An encodings file that is malformed or belongs to another model."""


class CalibrationError(BitwrightError, RuntimeError):
    """Calibration got no data, or a simulation was used before it was calibrated."""


class ModelError(BitwrightError, RuntimeError):
    """The user's model cannot be run, recorded or edited as asked."""


class BusyError(BitwrightError, RuntimeError):
    """A thread wants to use a simulation while another one does what cannot be shared, such as calibration."""


class ExportError(BitwrightError, RuntimeError):
    """A model or its encodings could not be written or read back."""


_LONGEST_NAME = 200  # characters; the time of a comparison grows with the square


def close_matches(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'a' or 'b'?)"``, or an empty string when nothing is close."""
    short = [word for word in known if len(word) <= _LONGEST_NAME]
    found = difflib.get_close_matches(name[:_LONGEST_NAME], short, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(repr(f) for f in found)}?)" if found else ""


def first_few(names: Sequence[str], shown: int = 3) -> str:
    """``a, b, c, ...``."""
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")


def some_of(names: Sequence[str], shown: int = 3) -> str:
    """``a, b, c and 4 more``."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


P = ParamSpec("P")
R = TypeVar("R")


def _is_listed(value: object) -> bool:
    """Whether a ``for`` goes over it; a data set needs ``__getitem__`` only."""
    return isinstance(value, Iterable) or hasattr(type(value), "__getitem__")


# name in an annotation -> what is accepted for it, and what it is called; a parameter with any other name is not checked
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "None": (lambda x: x is None, "None"),
    "str": (lambda x: isinstance(x, str), "a string"),
    "int": (lambda x: hasattr(type(x), "__index__"), "an integer"),
    "float": (lambda x: hasattr(type(x), "__float__") or hasattr(type(x), "__index__"), "a number"),
    "Path": (lambda x: isinstance(x, (str, os.PathLike)), "a path"),
    "Callable": (callable, "a function"),
    "Iterable": (_is_listed, "a list"),
    "Sequence": (_is_listed, "a list"),
    "Collection": (_is_listed, "a list"),
    "Mapping": (lambda x: isinstance(x, Mapping), "a dictionary"),
    "dict": (lambda x: isinstance(x, Mapping), "a dictionary"),
    "Rules": (lambda x: hasattr(x, "supergroups"), "rules that were read"),
}
_LONGEST_VALUE = 60  # characters of a value in a message


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse arguments of a public function that are of another kind than its annotations say.

    What is checked are kinds that a user may mistake: text, numbers, paths, functions, lists, dictionaries. Whether the values
    make sense is the function's to say. The module of ``function`` has annotations that are not evaluated.

    Raises:
        ConfigError: by the decorated function, before it has done anything; the message names the argument.

    Example:
        >>> @checks_arguments
        ... def analyze(data: Iterable[float], samples: int | None = None) -> None: ...
        >>> analyze([1.0], samples="many")
        Traceback (most recent call last):
            ...
        bitwright.errors.ConfigError: samples: 'many' is a str. Remedy: give an integer or None; see help(analyze)
    """
    signature = inspect.signature(function)
    wanted = {n: kinds for n, p in signature.parameters.items() if (kinds := _kinds(p))}

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python says which argument is missing, or one too many
        for name, kinds in wanted.items():
            if name in given and not any(_KINDS[kind][0](given[name]) for kind in kinds):
                raise _wrong_kind(function.__name__, name, given[name], kinds)
        return function(*args, **kwargs)

    return checked


def _kinds(parameter: inspect.Parameter) -> tuple[str, ...]:
    """Rows of the table that an annotation allows; none where it allows something else as well."""
    if not isinstance(parameter.annotation, str) or parameter.kind in (
        parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD
    ):  # fmt: skip
        return ()
    node, parts = ast.parse(parameter.annotation, mode="eval").body, []
    while isinstance(node, ast.BinOp):
        parts.append(node.right)
        node = node.left
    names = [ast.unparse(part).partition("[")[0] for part in (node, *reversed(parts))]
    return tuple(names) if all(name in _KINDS for name in names) else ()


def _wrong_kind(function: str, name: str, value: object, kinds: tuple[str, ...]) -> ConfigError:
    text = repr(value)
    text = text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
    accepted = " or ".join(dict.fromkeys(_KINDS[kind][1] for kind in kinds))
    article = "an" if type(value).__name__[0] in "aeiouAEIOU" else "a"
    return ConfigError(
        name, f"{text} is {article} {type(value).__name__}", f"give {accepted}; see help({function})"
    )
