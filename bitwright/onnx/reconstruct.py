"""Methods that choose weights on the grid, for ONNX simulations: AdaRound, BRECQ, QDrop, FlexRound, GPTQ, SeqMSE."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bitwright.errors import checks_arguments
from bitwright.methods.rounding import apply_reconstruction
from bitwright.onnx.simulation.quantsim import QuantizationSimModel

if TYPE_CHECKING:
    from bitwright.algorithms.rounding.driver import RoundingReport


@checks_arguments
def apply_adaround(
    sim: QuantizationSimModel,
    inputs: Iterable[Any],
    num_iterations: int = 10000,
    nodes_to_include: Iterable[str] | None = None,
    **options: Any,
) -> RoundingReport:
    """AdaRound under AIMET's name and arguments: :func:`apply_reconstruction` with ``adaround``."""
    return apply_reconstruction(sim, inputs, "adaround", iterations=num_iterations, include=nodes_to_include, **options)


@checks_arguments
def apply_seq_mse(
    sim: QuantizationSimModel,
    inputs: Iterable[Any],
    num_candidates: int = 20,
    nodes_to_exclude: Iterable[str] | None = None,
    **options: Any,
) -> RoundingReport:
    """Range search under AIMET's name and arguments: :func:`apply_reconstruction` with ``seq_mse``."""
    return apply_reconstruction(
        sim, inputs, "seq_mse", num_candidates=num_candidates, exclude=nodes_to_exclude or (), **options
    )


@checks_arguments
def apply_adascale(
    sim: QuantizationSimModel,
    inputs: Iterable[Any],
    adascale_model_config: Any = None,
    num_iterations: int = 1500,
    **options: Any,
) -> RoundingReport:
    """Learned divisions of weights under AIMET's name and arguments: :func:`apply_reconstruction` with ``flexround``.

    Blocks are found from the graph of any network: ``adascale_model_config`` and ``topology`` are not needed.
    """
    options.pop("topology", None)
    return apply_reconstruction(sim, inputs, "flexround", iterations=num_iterations, **options)
