"""One family of errors: where it happened, what was seen, how to go on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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
