"""Methods that choose the weights of an ONNX simulation, under AIMET's names: AdaRound, SeqMSE, AdaScale.

Home of ``aimet_onnx.adaround.adaround_weight``, ``aimet_onnx.sequential_mse.seq_mse`` and ``aimet_onnx.adascale``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bitwright import onnx as front
from bitwright.aimet_common.names import absent_names, differs
from bitwright.methods.rounding import seq_mse

__all__ = [
    "AdaScale", "AdaScaleModelConfig", "Adaround", "SeqMseParams", "SequentialMse", "adascale_model_config_dict",
    "apply_adaround", "apply_adascale", "apply_seq_mse",
]  # fmt: skip

__getattr__ = absent_names(__name__)


def apply_adaround(
    sim: front.QuantizationSimModel,
    inputs: Iterable[Any],
    num_iterations: int = 10000,
    nodes_to_include: list[str] | None = None,
    *,
    node_names_to_optimize: list[str] | None = None,
    **options: Any,
) -> Any:
    """Round the weights of a simulation in place, layer after layer, and freeze them.

    Returns:
        Our report (AIMET returns nothing).
    """
    included = nodes_to_include or node_names_to_optimize
    return front.apply_reconstruction(sim, inputs, "adaround", iterations=num_iterations, include=included, **options)


class Adaround:
    """The function as a method, as AIMET has it too."""

    apply_adaround = staticmethod(apply_adaround)


def apply_seq_mse(
    sim: front.QuantizationSimModel,
    inputs: Iterable[Any],
    num_candidates: int = 20,
    nodes_to_exclude: list[str] | None = None,
    **options: Any,
) -> Any:
    """Choose the range of every weight by its layer's output error, and freeze it.

    Returns:
        Our report (AIMET returns nothing).
    """
    report = front.apply_reconstruction(
        sim, inputs, "seq_mse", num_candidates=num_candidates, exclude=nodes_to_exclude or (), **options
    )
    wide = (s for s in sim.quantizers.values() if s.role == "weight" and getattr(s.spec.format, "bits", 0) > 16)
    for site in wide:  # nothing was searched: the largest candidate is the best
        site.quantizer.frozen = site.quantizer.frozen or site.op not in (nodes_to_exclude or ())
    return report


@dataclass
class SeqMseParams:
    """Options of :class:`SequentialMse`.

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
        seq_mse.Settings(loss_fn=self.loss_fn, inp_symmetry=self.inp_symmetry)  # type: ignore[arg-type]


class SequentialMse:
    """The older form of :func:`apply_seq_mse`; ``sim`` is the simulation."""

    def __init__(
        self, model: Any, sim: front.QuantizationSimModel, params: SeqMseParams, data_loader: Iterable[Any],
        nodes_to_exclude: list[str] | None = None,
    ) -> None:  # fmt: skip
        self.sim, self._call = sim, (params, data_loader, nodes_to_exclude)

    def apply_seq_mse_algo(self) -> None:
        """Choose the ranges."""
        params, loader, excluded = self._call
        apply_seq_mse(
            self.sim, list(itertools.islice(loader, params.num_batches)), params.num_candidates, excluded,
            inp_symmetry=params.inp_symmetry, loss_fn=params.loss_fn,
        )  # fmt: skip

    @staticmethod
    def apply_seq_mse(model: Any, sim: Any, params: SeqMseParams, data_loader: Iterable[Any]) -> None:
        """Choose the ranges."""
        SequentialMse(model, sim, params, data_loader).apply_seq_mse_algo()


@dataclass
class AdaScaleModelConfig:
    """AIMET's learning rates for a type of model; accepted by :func:`apply_adascale`, which sets them itself."""

    model_type: str
    beta_gamma_lr: float = 1e-3
    scales_lr: float = 5e-4


adascale_model_config_dict = {
    name: AdaScaleModelConfig(name)
    for name in "llama mistral phi3 qwen2 qwen2_5_vl qwen3 qwen3_vl qwen3_5 qwen3_5_text".split()
}


def apply_adascale(
    sim: front.QuantizationSimModel,
    inputs: Iterable[Any],
    adascale_model_config: Any = None,
    num_iterations: int = 1500,
    *,
    topology: Any = None,
    loss_fn: Any = None,
    **options: Any,
) -> Any:
    """Learned divisions of weights (FlexRound), in place; blocks are found in any network, no configuration is read.

    Returns:
        Our report (AIMET returns nothing).
    """
    if loss_fn is not None:
        differs("apply_adascale(loss_fn=...)", "the loss is the mean squared error of a block's output")
    return front.apply_reconstruction(sim, inputs, "flexround", iterations=num_iterations, **options)


class AdaScale:
    """The function as a method, as AIMET has it."""

    apply_adascale = staticmethod(apply_adascale)
