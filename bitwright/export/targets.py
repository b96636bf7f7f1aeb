"""The runtimes that a file can be written for, one row each: which forms of equal value suit them.

Every row gives the same numbers, the simulation's; rows differ in how these are stored and in which operators compute them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from bitwright.errors import ConfigError, close_matches

RecurrentForm = Literal["scan", "native"]


@dataclass(frozen=True)
class Target:
    """How files are written for one runtime.

    Attributes:
        name: what ``target=`` takes.
        about: one line for the user.
        widens: bits of a weight -> bits its codes are stored in beside a quantized activation, where the runtime has an
            integer kernel for the wider type only.
        folds: whether weights of recurrent operators are written so that the runtime computes their float value once, when it
            loads: as Cast and Mul, which every optimiser folds. A DequantizeLinear is computed in every run, and keeps the
            operator from arranging its weights beforehand.
        recurrent: form of recurrent layers whose steps hold no quantizers.
        runtime: the adapter that runs the file, see :mod:`bitwright.runtimes`.
    """

    name: str
    about: str
    widens: tuple[tuple[int, int], ...]
    folds: bool
    recurrent: RecurrentForm
    runtime: str

    def stored_bits(self, bits: int, *, beside_codes: bool) -> int:
        """Bits in which codes of ``bits`` bits are stored; ``beside_codes`` where an integer kernel may read them."""
        return dict(self.widens).get(bits, bits) if beside_codes else bits


#: no runtime here has a kernel for products of 4-bit weights with quantized activations
_ON_8_BITS = ((2, 8), (3, 8), (4, 8))

TARGETS: dict[str, Target] = {
    row.name: row
    for row in (
        Target("ort_cpu", "ONNX Runtime on CPUs: narrow weights on 8-bit kernels", _ON_8_BITS, True, "native", "onnxruntime"),
        Target("openvino_cpu", "OpenVINO on CPUs: narrow weights on 8-bit kernels", _ON_8_BITS, True, "native", "openvino"),
        Target("packed", "compilers, and the smallest file: 4-bit weights take 4 bits", (), False, "scan", "onnxruntime"),
    )
}  # fmt: skip
DEFAULT_TARGET = "ort_cpu"


def find_target(name: str | Target) -> Target:
    """The row of ``name``.

    Raises:
        ConfigError: there is none, with close matches.

    Example:
        >>> find_target("ort_cpu").stored_bits(4, beside_codes=True)
        8
    """
    if isinstance(name, Target):
        return name
    if name not in TARGETS:
        raise ConfigError(
            "target",
            f"{name!r} is not a target{close_matches(str(name), TARGETS)}",
            f"use one of {listed(TARGETS)}",
        )
    return TARGETS[name]


def rules_for(target: str, config_file: Any) -> Any:
    """The rules that a simulation for ``target`` follows where the user names none, ``config_file`` where they do.

    A runtime that computes recurrent layers in operators of its own rounds nothing inside their steps, and neither does the
    simulation then.
    """
    if config_file is None and find_target(target).recurrent == "native":
        return {"recurrent": "boundary_only"}
    return config_file


def listed(names: Iterable[str]) -> str:
    """``'a', 'b'`` for messages."""
    return ", ".join(map(repr, names))
