"""``aimet_onnx.sequential_mse.seq_mse``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bitwright import onnx as front
from bitwright.aimet_common.absent import absent_names
from bitwright.errors import ConfigError

__all__ = ["SeqMseParams", "SequentialMse", "apply_seq_mse"]

__getattr__ = absent_names(__name__)


def apply_seq_mse(
    sim: front.QuantizationSimModel,
    inputs: Iterable[Any],
    num_candidates: int = 20,
    nodes_to_exclude: list[str] | None = None,
    **options: Any,
) -> None:
    """:func:`bitwright.onnx.apply_seq_mse`: choose the range of every weight by its layer's output error, and freeze it."""
    front.apply_seq_mse(sim, inputs, num_candidates, nodes_to_exclude, **options)


@dataclass
class SeqMseParams:
    """What :class:`SequentialMse` is to do.

    Attributes:
        num_batches: how many batches are used; all with ``None``.
        num_candidates: fractions of the range that are tried per channel.
        inp_symmetry: ``symqt``, ``symfp`` or ``asym``; AIMET has the first.
        loss_fn: ``mse``, ``l1`` or ``sqnr``.

    Raises:
        ConfigError: (a ValueError) an unknown one.
    """

    num_batches: int | None = None
    num_candidates: int = 20
    inp_symmetry: str = "symqt"
    loss_fn: str = "mse"

    def __post_init__(self) -> None:
        known = {"inp_symmetry": ("symqt", "symfp", "asym"), "loss_fn": ("mse", "l1", "sqnr")}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ConfigError(name, f"it is {getattr(self, name)!r}", f"use one of {', '.join(values)}")


class SequentialMse:
    """The older form of :func:`apply_seq_mse`."""

    def __init__(
        self, model: Any, sim: front.QuantizationSimModel, params: SeqMseParams, data_loader: Iterable[Any],
        nodes_to_exclude: list[str] | None = None,
    ) -> None:  # fmt: skip
        self._call = (sim, params, data_loader, nodes_to_exclude)

    def apply_seq_mse_algo(self) -> None:
        """Choose the ranges."""
        sim, params, loader, excluded = self._call
        apply_seq_mse(
            sim, list(itertools.islice(loader, params.num_batches)), params.num_candidates, excluded,
            inp_symmetry=params.inp_symmetry, loss_fn=params.loss_fn,
        )  # fmt: skip

    @staticmethod
    def apply_seq_mse(model: Any, sim: Any, params: SeqMseParams, data_loader: Iterable[Any]) -> None:
        """Choose the ranges."""
        SequentialMse(model, sim, params, data_loader).apply_seq_mse_algo()
