"""One family of errors: where it happened, what was seen, how to go on."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

_LONGEST = 4_000  # characters of a part of a message


class BitwrightError(Exception):
    """Base of every error that a user can cause and correct.

    Args:
        site: layer, tensor, file or argument the error is about; an empty one, the path of the root module, is "the model".
        problem: what was found there, with the value seen.
        remedy: what to do about it.

    The message reads ``site: problem. Remedy: remedy``; the parts stay available as attributes. A part of more than
    4,000 characters, as a value from a damaged file can be, loses its middle; what no encoding can write is escaped.
    """

    def __init__(self, site: str, problem: str, remedy: str) -> None:
        parts = site if site.strip() else "the model", problem, remedy
        self.site, self.problem, self.remedy = map(_shortened, parts)
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


class GranularityError(BitwrightError, ValueError, RuntimeError):
    """A granularity that does not fit the shape of its tensor; torch and AIMET raise RuntimeError for shapes."""


class RangeError(BitwrightError, ValueError):
    """A range with a NaN or infinite bound, or with its bounds exchanged."""


class ConfigError(BitwrightError, ValueError):
    """A configuration, rule or argument that cannot be understood."""


class UnknownArgumentError(ConfigError, TypeError):
    """A keyword argument that a function does not take; Python raises TypeError for these."""


class EncodingsError(BitwrightError, ValueError, RuntimeError):
    """An encodings file that is malformed or belongs to another model; AIMET's loaders raise RuntimeError for these."""


class UnknownAttributeError(BitwrightError, AttributeError):
    """An attribute that an object does not have is assigned, which would have no effect."""


class CalibrationError(BitwrightError, RuntimeError):
    """Calibration got no data, or a simulation was used before it was calibrated."""


class ModelError(BitwrightError, RuntimeError):
    """The user's model cannot be run, recorded or edited as asked."""


class BusyError(BitwrightError, RuntimeError):
    """A thread used a simulation while another one was doing what cannot be shared, such as calibrating it."""


class ExportError(BitwrightError, RuntimeError):
    """A model or its encodings could not be written or read back."""


_LONGEST_NAME = 200  # characters; the time of a comparison grows with the square


def close_matches(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'a' or 'b'?)"``, or an empty string when nothing is close."""
    short = [word for word in known if len(word) <= _LONGEST_NAME]
    found = difflib.get_close_matches(name[:_LONGEST_NAME], short, n=3, cutoff=0.5)
    found = found or [word for word in short if word.casefold() == name.casefold()]
    return f" (did you mean {' or '.join(repr(f) for f in found)}?)" if found else ""


def check_keywords(function: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse keyword arguments that a function does not take.

    Args:
        function: its name, as a user calls it.
        given, known: names of arguments.

    Raises:
        UnknownArgumentError: names the first one, close matches of it, and what there is.

    >>> check_keywords("export", ["op_set"], ["opset", "io"])
    Traceback (most recent call last):
    bitwright.errors.UnknownArgumentError: export: there is no argument 'op_set' (did you mean 'opset'?). Remedy: use opset, io
    """
    for name in given:
        if name not in known:
            problem = f"there is no argument {name!r}{close_matches(name, known)}"
            raise UnknownArgumentError(function, problem, f"use {', '.join(known)}" if known else "it takes none")


def first_few(names: Sequence[str], shown: int = 3) -> str:
    """``a, b, c, ...``."""
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")


def some_of(names: Sequence[str], shown: int = 3) -> str:
    """``a, b, c and 4 more``."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


P = ParamSpec("P")
R = TypeVar("R")


def _is_listed(value: object) -> bool:
    """Whether a ``for`` goes over its items; a data set needs ``__getitem__`` only, and a text is not meant as its letters."""
    listed = isinstance(value, Iterable) or hasattr(type(value), "__getitem__")
    return listed and not isinstance(value, (str, bytes))


def _is_simulation(value: object) -> bool:
    return not isinstance(value, type) and hasattr(value, "quantizers") and hasattr(value, "compute_encodings")


def _is_model(value: object) -> bool:
    """Whether it may be a model: a path of one, or something that is made of parts; the front ends say more."""
    plain = (bool, int, float, complex, bytes, list, tuple, set, frozenset, dict, type, type(None), type(len))
    return not isinstance(value, plain) and not inspect.isroutine(value)


def _has_name(*names: str) -> Callable[[Any], bool]:
    """Whether a value is of a class of that name: the packages whose classes these are need not be loaded."""
    return lambda x: any(c.__name__ in names for c in type(x).__mro__)


def with_article(noun: str) -> str:
    """``an Add``, ``a Conv``, ``an LSTM``, ``a GRU``: capitals in a row are read letter by letter."""
    spelled = noun[:2].isupper() or noun == "ndarray"
    vowels = "AEFHILMNORSX" if spelled else "AEIOU"
    return f"{'an' if noun[:1].upper() in vowels else 'a'} {noun}"


_Kind = tuple[Callable[[Any], bool], str]
_LIST: _Kind = (_is_listed, "a list")
_DICTIONARY: _Kind = (lambda x: isinstance(x, Mapping), "a dictionary")
_FUNCTION: _Kind = (lambda x: callable(x) and not isinstance(x, type), "a function")
_SIMULATION: _Kind = (_is_simulation, "a simulation, made by QuantizationSimModel(...)")
_MODULE: _Kind = (_has_name("Module"), "a torch.nn.Module (bitwright.onnx takes ONNX models)")
_MODEL: _Kind = (_is_model, "a model: a torch.nn.Module, or an ONNX model or its path")
_TEXT: _Kind = (lambda x: isinstance(x, str), "a string")
_TENSOR: _Kind = (_has_name("Tensor"), "a tensor")

# name in an annotation -> what is accepted for it, and what it is called
_KINDS: dict[str, _Kind] = {
    "None": (lambda x: x is None, "None"),
    "bool": (lambda x: isinstance(x, (bool, int)) or type(x).__name__ in ("bool_", "bool"), "True or False"),
    "str": _TEXT,
    "int": (lambda x: hasattr(type(x), "__index__"), "an integer"),
    "float": (lambda x: hasattr(type(x), "__float__") or hasattr(type(x), "__index__"), "a number"),
    **dict.fromkeys(("Path", "PathLike"), (lambda x: isinstance(x, (str, os.PathLike)), "a path")),
    "Callable": _FUNCTION,
    "Forward": _FUNCTION,
    **dict.fromkeys(("Iterable", "Sequence", "Collection", "list"), _LIST),
    **dict.fromkeys(("Mapping", "dict", "Feeds"), _DICTIONARY),
    "Rules": (lambda x: hasattr(x, "supergroups"), "rules that were read"),
    "QuantizationSimModel": _SIMULATION,
    "Module": _MODULE,
    "Source": _MODEL,
    "Model": _MODEL,
    "Providers": (_is_listed, "a list of providers"),
    "RecipeLike": (lambda x: isinstance(x, (str, os.PathLike)) or _is_listed(x), "a list of steps, or the path of one"),
    "Groups": (lambda x: _is_listed(x) or isinstance(x, Mapping), "a list of patterns or a dictionary of them"),
    **dict.fromkeys(("Tensor", "torch.Tensor"), _TENSOR),
    "dtype": (_has_name("dtype"), "a torch.dtype"),
    # options that are one of a few words
    **dict.fromkeys(
        (
            "ActivationForm", "Better", "BiasForm", "FileFormat", "Form", "Init", "Mode", "NonFinite", "OnHarm", "ProductForm",
            "Ranking", "RecurrentForm", "Symmetry", "What",
        ),
        _TEXT,
    ),
    # classes, each under its own name
    **{
        name: (_has_name(name), with_article(name))
        for name in (
            "EqualizeReport", "FoldReport", "Graph", "HealthReport", "IntFormat", "KvCache", "Loaded", "Optimizer",
            "Pictures", "Preset", "QuantSpec", "RangeMethod",
        )
    },
}  # fmt: skip
#: parameter whose annotation says nothing -> the same; a name keeps one meaning in all public functions
_NAMED: dict[str, tuple[_Kind, ...]] = {
    "sim": (_SIMULATION,),
    "forward_fn": (_FUNCTION, _KINDS["None"]),
    "providers": (_KINDS["Providers"], _KINDS["None"]),
    "batches": (_LIST, _KINDS["None"]),
}
_LONGEST_VALUE = 60  # characters of a value in a message


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse arguments of a public function that are of another kind than its annotations say.

    What is checked are kinds that a user may mistake: text, numbers, paths, functions, lists, dictionaries, simulations, models
    and classes of this package. Whether the values make sense is the function's to say. The module of ``function`` has
    annotations that are not evaluated. What is accepted stands in the attribute ``kinds``: argument -> checks.

    Raises:
        ConfigError: by the decorated function, before it has done anything; the message names the argument.
        UnknownArgumentError: the same, for a keyword that it does not take.

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
        _check_call(function, signature, wanted, args, kwargs)
        return function(*args, **kwargs)

    checked.kinds = wanted  # type: ignore[attr-defined]
    return checked


def _check_call(
    function: Callable[..., Any],
    signature: inspect.Signature,
    wanted: Mapping[str, tuple[_Kind, ...]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    parameters = signature.parameters
    if not kwargs.keys() <= parameters.keys() and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        keywords = [n for n, p in parameters.items() if p.kind is not p.POSITIONAL_ONLY and n != "self"]
        check_keywords(_called(function, args[0] if "self" in parameters and args else None), kwargs, keywords)
    given: Mapping[str, Any] = {}
    with suppress(TypeError):  # Python says below which argument is missing, or one too many
        given = signature.bind(*args, **kwargs).arguments
    for name, kinds in wanted.items():
        if name in given and not any(fits(given[name]) for fits, _ in kinds):
            raise _wrong_kind(_called(function, given.get("self")), name, given[name], kinds)


def _called(function: Callable[..., Any], owner: object) -> str:
    """The name of a function or method as a user calls it."""
    name = function.__qualname__ if owner is None else f"{type(owner).__name__}.{function.__name__}"
    return name.removesuffix(".__init__")


C = TypeVar("C", bound=type)


def checks_methods(cls: C) -> C:
    """:func:`checks_arguments` for every public method that a class defines."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_") and not hasattr(method, "kinds"):
            setattr(cls, name, checks_arguments(method))
    return cls


def _kinds(parameter: inspect.Parameter) -> tuple[_Kind, ...]:
    """Kinds of values that an annotation or the parameter's name allows; empty if other values are allowed too."""
    if not isinstance(parameter.annotation, str) or parameter.kind in (
        parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD
    ):  # fmt: skip
        return ()
    if parameter.annotation == "Any":
        kinds = _NAMED.get(parameter.name, ())
        return (*kinds, _KINDS["None"]) if kinds and parameter.default is None else kinds
    node, parts = ast.parse(parameter.annotation, mode="eval").body, []
    while isinstance(node, ast.BinOp):
        parts.append(node.right)
        node = node.left
    names = [ast.unparse(part).partition("[")[0].rpartition(".")[2] for part in (node, *reversed(parts))]
    if not all(name in _KINDS for name in names):
        return ()
    return tuple(_KINDS[name] for name in names)


def _wrong_kind(function: str, name: str, value: object, kinds: tuple[_Kind, ...]) -> ConfigError:
    text = repr(value)
    text = text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
    accepted = " or ".join(dict.fromkeys(said for _, said in kinds))
    found = "is a class" if isinstance(value, type) else f"is {with_article(type(value).__name__)}"
    return ConfigError(name, f"{text} {found}", f"give {accepted}; see help({function})")
