"""Methods that choose weights on the grid: AdaRound, BRECQ, QDrop, FlexRound, AutoRound, GPTQ, GPTAQ, SeqMSE.

They are written on torch, which is loaded when one is called.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.export.files.atomic import FinishedLayers
from bitwright.methods.front_end import front_end_of
from bitwright.progress import progress as progress_bar
from bitwright.tables import counted

if TYPE_CHECKING:
    from bitwright.methods.rounding.driver import RoundingReport
    from bitwright.methods.rounding.scales import LearnedScales


@checks_arguments
def apply_reconstruction(
    sim: Any,
    data: Iterable[Any] | None = None,
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
    forward_fn: Any = None,
    progress: bool = True,
    inputs: Iterable[Any] | None = None,
    distributed: bool = True,
    **options: Any,
) -> RoundingReport:
    """Choose the weights of a simulation so that its layers or blocks compute what they compute in float.

    The weights (of ``sim.model``, or the initializers of an ONNX simulation) become numbers on their grids, whose encodings
    are frozen: a later ``compute_encodings`` finds the ranges of the activations anew and leaves the weights. Where ``sim``
    is calibrated, activations are quantized meanwhile; else only weights are. The methods work on torch tensors, for ONNX
    models too, and load torch when they are called.

    ====================  ==========================================================================================
    method                what it does
    ====================  ==========================================================================================
    ``adaround``          learns each weight's rounding, layer after layer (arXiv:2004.10568)
    ``brecq``             the same, block after block (arXiv:2102.05426, without its Fisher weights)
    ``qdrop``             as ``brecq``, with activation quantizers dropped at random (arXiv:2203.05740)
    ``flexround``         learns what each weight is divided by, and the scale (arXiv:2306.00317)
    ``learned_clipping``  learns the ends of ranges (arXiv:2308.13137, without its transforms)
    ``distill``           trains the weights themselves, block after block, without labels (arXiv:2407.11062, Block-AP)
    ``autoround``         learns what is added before rounding, and ranges, by signs of gradients (arXiv:2309.05516)
    ``gptq``              rounds column by column with error feedback (arXiv:2210.17323)
    ``gptaq``             the same, aiming at the outputs of the float model (arXiv:2504.02692)
    ``gptvq``             vectors of a codebook for neighbouring weights, with error feedback (arXiv:2402.15319)
    ``codebook``          a codebook of 2 to 256 numbers a layer, with error feedback or by k-means (arXiv:2306.07629)
    ``seq_mse``           chooses the range only, by the layer's output error
    ====================  ==========================================================================================

    Args:
        sim: of either front end; changed in place.
        data: batches, as ``sim.compute_encodings`` takes them; 256 to 1024 samples.
        method: see above.
        num_samples: use so many; all with ``None``.
        include, exclude: names or globs of layers; every layer by default.
        blocks: for block-wise methods, names of the operators that belong together; found from the graph by default.
        seed: same seed, same result.
        memory_budget: bytes of activations held in memory, 4 GiB by default; what goes beyond lies in temporary files.
        spill_dir: where these are made.
        cache_dir: folder that keeps finished layers: a call with the same model, data and options takes them from there.
        forward_fn: ``forward_fn(model, batch)``, when a module is not called as ``model(batch)``; not for ONNX models.
        progress: show a progress bar on a terminal.
        inputs: ``data`` under the name that it had for ONNX simulations.
        distributed: of PyTorch simulations, where a process group is initialised: work on the batches of all ranks
            (:func:`bitwright.torch.gather_batches`), so that every rank finds the same weights, bit for bit, however many there
            are. Each must call this then; ``False`` works on those of this rank alone.
        options: of the method: ``iterations``, ``batch``, ``lr``, ``reg_param``, ``beta_range``, ``warm_start``, ``rows``,
            ``drop`` (learned methods); ``damping``, ``act_order``, ``block``, ``match_float`` (``gptq``), ``share``
            (``gptaq``), ``refit`` (both);
            ``vector``, ``entries`` (``gptvq``), ``bits`` (``codebook``), ``rounds`` (both);
            ``num_candidates``, ``loss_fn`` (``mse``, ``l1``, ``sqnr``), ``inp_symmetry`` (``symqt``, ``symfp``, ``asym``;
            ``seq_mse``).

    Returns:
        The error of every layer before and after, and the layers that were left with the reason; a table when printed.

    Raises:
        ConfigError: torch is missing; an unknown method, option or layer; an option that the front end does not have; layers
            that hold codes in place of float weights.
        CalibrationError: no batch, activations that are not finite, or no memory and disk for them.
        ModelError: the model fails on a batch, or a batch does not fit it.
    """
    require_torch(method)
    from bitwright.methods.rounding.driver import NO_CACHE, Cache
    from bitwright.methods.rounding.table import choose_weights

    front_end, batches = front_end_of(sim), _one_of(data, inputs)
    _refuse_codes(sim, method)
    finished = None if cache_dir is None else FinishedLayers(cache_dir)
    return choose_weights(
        front_end.steppable(sim, forward_fn),
        front_end.batches_of_all(batches) if distributed else batches,
        method,
        options,
        num_samples=num_samples,
        include=include,
        exclude=exclude,
        blocks=blocks,
        seed=seed,
        memory_budget=memory_budget,
        spill_dir=None if spill_dir is None else str(spill_dir),
        cache=NO_CACHE if finished is None else Cache(finished.get, finished.put),
        progress=lambda units: progress_bar(units, method, progress),
    )


@checks_arguments
def apply_gptq(
    sim: Any, data: Iterable[Any] | None = None, *, inputs: Iterable[Any] | None = None, **options: Any
) -> RoundingReport:
    """:func:`apply_reconstruction` with ``gptq``."""
    return apply_reconstruction(sim, data, "gptq", inputs=inputs, **options)


@checks_arguments
def learn_scales(
    sim: Any,
    data: Iterable[Any],
    *,
    iterations: int = 100,
    batch: int = 8,
    lr: float = 2e-2,
    shift: bool = True,
    seed: int = 0,
    forward_fn: Any = None,
    progress: bool = True,
) -> LearnedScales:
    """Learn factors and shifts of channels through the quantizers of a simulation, block by block (OmniQuant), in place.

    They stand between norms or linear layers and the linear layers that read them, between the values of an attention and its
    output projection, and between queries and keys where these are quantized, and are merged into the parameters: the model
    computes the same function, and its quantized blocks come closer to it. Shifts need biases on both sides. The ranges of
    weights, and of activations that have calibrated ones, are chosen anew. ``apply_reconstruction(sim, data,
    "learned_clipping")``, or another method, follows.

    Args:
        sim: of either front end, calibrated; its parameters are changed.
        data: batches, as ``sim.compute_encodings`` takes them; about 128 samples.
        iterations: of Adam, per block.
        batch: samples of an iteration.
        lr: of the logarithms of the factors.
        shift: learn shifts too.
        seed: same seed, same result.
        forward_fn: ``forward_fn(model, batch)``, when a module is not called as ``model(batch)``; not for ONNX models.
        progress: show a progress bar on a terminal.

    Returns:
        The error of the outputs of every block before and after, and what was left as it is, with the reasons.

    Raises:
        ConfigError: torch is missing, or an option out of its range; layers that hold codes in place of float weights.
        CalibrationError: no batch, or the simulation is not calibrated.

    Reference: Shao et al. 2023, arXiv:2308.13137, eqs. 3 to 5.
    """
    require_torch("learn_scales")
    from bitwright.methods.rounding.scales import Settings, learn

    front_end, batches = front_end_of(sim), list(data)
    _refuse_codes(sim, "learn_scales")
    report = learn(
        front_end.correctable(sim),
        lambda: front_end.steppable(sim, forward_fn),
        batches,
        Settings(iterations, batch, lr, shift),
        seed=seed,
        progress=lambda units: progress_bar(units, "learn_scales", progress),
    )
    sites = [site for site in sim.quantizers.values() if site.enabled and site.role in ("input", "output")]
    if report.changed and any(not site.spec.dynamic for site in sites):
        run = None if forward_fn is None else lambda model: [forward_fn(model, batch) for batch in batches]
        sim.compute_encodings(run or batches, progress=False)
    return report


def require_torch(method: str) -> None:
    """Refuse ``method`` where torch is not installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            method,
            "it learns by gradients and works on torch tensors, and torch is not installed",
            "pip install 'bitwright[torch]'; folding, equalization, calibration and export do without it",
        )


def _refuse_codes(sim: Any, method: str) -> None:
    """Refuse a model whose layers hold codes instead of float weights."""
    modules = getattr(getattr(sim, "model", None), "named_modules", None)
    codes = [name for name, module in modules() if hasattr(module, "codes")] if callable(modules) else []
    held = [name.removesuffix(".stored").removesuffix(".weight") for name in codes]
    if held:
        raise ConfigError(
            method,
            f"{counted(len(held), 'layer')} with codes instead of float weights, {held[0]} first",
            f"give it the float model; of a language model bitwright.llm.quantize(model, recipe={method!r}) makes such layers",
        )


def _one_of(data: Iterable[Any] | None, inputs: Iterable[Any] | None) -> Iterable[Any]:
    """The batches, under either argument name."""
    given = [batches for batches in (data, inputs) if batches is not None]
    if len(given) != 1:
        raise CalibrationError(
            "apply_reconstruction",
            "both data and inputs were given" if given else "no batches were given",
            "pass the batches as data; inputs is another name for it",
        )
    return given[0]
