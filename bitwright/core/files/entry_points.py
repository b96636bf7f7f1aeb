"""Functions of the user's own, named on the command line as ``module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from bitwright.errors import ConfigError


def load_entry_point(text: str, what: str = "yields feeds") -> Callable[..., Any]:
    """The function that ``text`` names.

    Args:
        text: ``package.module:function``; the module is imported.
        what: what the function does, for the error.

    Raises:
        ConfigError: there is no such module or function, or it is not a function.

    >>> load_entry_point("json:dumps").__name__
    'dumps'
    """
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            text, f"it cannot be imported: {error}", "write module:function, with the module's folder in PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigError(text, f"{name} is a {type(found).__name__}, not a function", f"name a function that {what}")
    function: Callable[..., Any] = found
    return function
