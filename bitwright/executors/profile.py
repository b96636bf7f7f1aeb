"""Target profiles: which operators a target computes on integers, and with which arithmetic; data files with their sources."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from bitwright.core.files import read_document
from bitwright.errors import ConfigError, close_matches
from bitwright.executors.kernels import CODE_KERNELS
from bitwright.executors.litert import FLAT_KERNELS

FOLDER = Path(__file__).with_name("profiles")
#: format of a file -> operator -> variant of its arithmetic -> kernel
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {"onnx": CODE_KERNELS, "tflite": FLAT_KERNELS}
#: variants that compute what the simulation does: the exact product, rounded once, a half to even; the first that a kernel has
_EXACT = ("once", "divided", "float32", "table")
_ACCUMULATORS = (16, 24, 32)
_RELU = ("redundant", "always")


@dataclass(frozen=True)
class Profile:
    """The arithmetic of a target.

    Attributes:
        name: what ``sim.runs_as`` takes.
        about: one line for the user.
        reads: ``"onnx"`` (QDQ) or ``"tflite"``: the file of an export whose operators are computed.
        target: row of ``TARGETS`` that such files are written for.
        sources: documents and source files that say so.
        proof: what it was compared with, and how far it agrees.
        assumed: keys that no public document settles.
        kernels: operator -> variant of its arithmetic; others are computed in float.
        pairs: uint8 times int8 products are added in pairs of 16 bits, which saturate.
        accumulator: bits of sums, 16, 24 or 32; they wrap around.
        bias: ``"int32"`` adds the stored codes, ``"float32"`` the bias that they stand for, after the sum is a float.
        relu: ``"redundant"``: Relu and Clip join a kernel where the grid after them clips alike; ``"always"``: whatever it is.
        signed: int8 activations are computed as such; else kernels shift them to uint8.
        others: of LiteRT files, whose kernels compute operators in float and those that ``kernels`` does not name:
            ``"reference"``, or ``"default"`` where the target is LiteRT with its default delegate.
    """

    name: str
    about: str
    reads: str
    target: str
    sources: tuple[str, ...]
    proof: str
    assumed: tuple[str, ...] = ()
    kernels: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    accumulator: int = 32
    bias: str = "int32"
    relu: str = "redundant"
    signed: bool = False
    others: str = "reference"


def exact_kernels(profile: Profile) -> Profile:
    """The profile with kernels that compute exactly as the simulation, where they exist.

    Example:
        >>> exact_kernels(find_profile("ort_arm")).kernels["Conv"]
        'once'
    """
    table = VARIANTS[profile.reads]
    found = {op: next((v for v in _EXACT if v in table[op]), given) for op, given in profile.kernels.items()}
    return replace(profile, kernels=found)


def profile_names() -> list[str]:
    """Names of the profiles that are shipped, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_profile(profile: str | os.PathLike[str] | Profile) -> Profile:
    """A shipped profile by its name, or the one in a TOML file.

    Raises:
        ConfigError: there is no such profile, with close matches; a file has an unknown key or value, or lacks one.

    Example:
        >>> find_profile("ort_x64_avx2").pairs
        True
    """
    if isinstance(profile, Profile):
        return profile
    text = os.fspath(profile)
    if not text.endswith(".toml"):
        known = profile_names()
        if text not in known:
            problem = f"{text!r} is not a profile{close_matches(text, known)}"
            raise ConfigError(
                "profile", problem, f"use one of {', '.join(map(repr, known))}, or the path of a .toml file"
            )
        return _shipped(text)
    return read_profile(Path(text))


@cache
def _shipped(name: str) -> Profile:
    return read_profile(FOLDER / f"{name}.toml")


def read_profile(path: Path) -> Profile:
    """The profile in a TOML file; its name is that of the file.

    Raises:
        ConfigError: it cannot be read, a key is unknown or missing, or a value is of another kind.
    """
    document = read_document(path, ConfigError, kind=".toml")
    site, known = str(path), {one.name: one for one in fields(Profile)}
    if not isinstance(document, Mapping):
        raise ConfigError(site, "it holds no table", "see the profiles that are shipped")
    for key in document:
        if key not in known or key == "name":
            problem = f"{key!r} is not a key of a profile{close_matches(str(key), known)}"
            raise ConfigError(site, problem, f"use {', '.join(name for name in known if name != 'name')}")
    missing = [key for key in ("about", "reads", "target", "sources", "proof") if key not in document]
    if missing:
        raise ConfigError(site, f"it has no {missing[0]!r}", "say it: a profile without its source proves nothing")
    given = {**document, "sources": tuple(document["sources"]), "assumed": tuple(document.get("assumed", ()))}
    found = Profile(path.stem, **given)
    _check(site, found)
    return found


def _check(site: str, found: Profile) -> None:
    def one_of(key: str, value: Any, allowed: Any) -> None:
        if value not in allowed:
            close = close_matches(value, allowed) if isinstance(value, str) else ""
            problem = f"{key} is {value!r}{close}"
            raise ConfigError(site, problem, f"use one of {', '.join(map(repr, allowed))}")

    one_of("reads", found.reads, tuple(VARIANTS))
    one_of("accumulator", found.accumulator, _ACCUMULATORS)
    one_of("bias", found.bias, ("int32", "float32"))
    one_of("relu", found.relu, _RELU)
    one_of("others", found.others, ("reference", "default"))
    table = VARIANTS[found.reads]
    for operator, variant in found.kernels.items():
        if operator not in table:
            problem = f"there is no executor for {operator!r}{close_matches(operator, table)}"
            raise ConfigError(site, problem, f"use some of {', '.join(table)}; what is left out is computed in float")
        one_of(f"kernels.{operator}", variant, tuple(table[operator]))
