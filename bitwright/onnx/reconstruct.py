"""Methods that choose weights on the grid, for ONNX simulations: AdaRound, BRECQ, QDrop, FlexRound, GPTQ, SeqMSE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright.errors import ConfigError
from bitwright.export.files.finished import FinishedLayers
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.progress import progress as bar

if TYPE_CHECKING:
    from bitwright.algorithms.rounding.driver import RoundingReport


def apply_reconstruction(
    sim: QuantizationSimModel,
    inputs: Iterable[Any],
    method: str = "adaround",
    *,
    num_samples: int | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    blocks: Sequence[Sequence[str]] | None = None,
    seed: int = 0,
    memory_budget: int | None = None,
    spill_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> RoundingReport:
    """Choose the weights of a simulation so that its layers or blocks compute what they compute in float.

    The same methods as :func:`bitwright.torch.apply_reconstruction`, by the same code; they need torch, which is loaded
    by the call. The initializers of the simulation become numbers on their grids, whose encodings are frozen.

    Args:
        sim: changed in place.
        inputs: feeds, as ``sim.compute_encodings`` takes them; 256 to 1024 samples.
        method: ``adaround``, ``brecq``, ``qdrop``, ``flexround``, ``gptq`` or ``seq_mse``.
        num_samples: use so many; all with ``None``.
        include, exclude, blocks: names of nodes; globs for the first two.
        seed, memory_budget, spill_dir, cache_dir, progress, options: as in torch.

    Raises:
        ConfigError: torch is missing; an unknown method, option or node.
        CalibrationError: no batch, activations that are not finite, or no memory and disk for them.
        ModelError: a feed does not fit, or the model fails on it.
    """
    require_torch(method)
    from bitwright.algorithms.rounding.table import choose_weights
    from bitwright.onnx.adapters.program import OnnxSimulation

    return choose_weights(
        OnnxSimulation(sim),
        inputs,
        method,
        options,
        num_samples=num_samples,
        include=include,
        exclude=exclude,
        blocks=blocks,
        seed=seed,
        memory_budget=memory_budget,
        spill_dir=None if spill_dir is None else str(spill_dir),
        cache=None if cache_dir is None else FinishedLayers(cache_dir),
        progress=lambda units: bar(units, method, progress),
    )


def require_torch(method: str) -> None:
    """Refuse ``method`` where torch is not installed.

    Raises:
        ConfigError: it is not.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise ConfigError(
            method,
            "it learns by gradients and works on torch tensors, and torch is not installed",
            "pip install 'bitwright[torch]'; folding, equalization, calibration and export do without it",
        )


def apply_adaround(
    sim: QuantizationSimModel,
    inputs: Iterable[Any],
    num_iterations: int = 10000,
    nodes_to_include: Iterable[str] | None = None,
    **options: Any,
) -> RoundingReport:
    """AdaRound under AIMET's name and arguments: :func:`apply_reconstruction` with ``adaround``."""
    return apply_reconstruction(
        sim, inputs, "adaround", iterations=num_iterations, include=nodes_to_include, **options
    )


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


def apply_gptq(sim: QuantizationSimModel, inputs: Iterable[Any], **options: Any) -> RoundingReport:
    """:func:`apply_reconstruction` with ``gptq``."""
    return apply_reconstruction(sim, inputs, "gptq", **options)
