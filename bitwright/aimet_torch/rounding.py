"""Methods that choose the weights of a simulation, under AIMET's names: AdaRound, SeqMSE, AdaScale, GPTVQ.

Home of ``aimet_torch.adaround.adaround_weight``, ``seq_mse``, ``adascale``, ``gptvq`` and ``experimental.omniquant``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright import torch as front
from bitwright.aimet_common.defs import QuantScheme, range_method
from bitwright.aimet_common.names import absent_names, differs
from bitwright.aimet_torch.module_quantizers import SiteQuantizer, below
from bitwright.aimet_torch.quantizers import QuantizeDequantize
from bitwright.aimet_torch.quantsim import QuantizationSimModel
from bitwright.aimet_torch.utils import Unlabelled, default_forward_fn, remove_activation_quantizers
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.simulation.sites import Site
from bitwright.errors import ConfigError, close_matches
from bitwright.export.encodings.of_simulation import site_records
from bitwright.export.encodings.write import write_encodings
from bitwright.export.files.atomic import check_destination
from bitwright.methods.rounding import gptvq, seq_mse
from bitwright.torch.calls.inputs import walk_modules
from bitwright.torch.simulation.quantsim import copied

__all__ = [
    "AdaScale", "AdaScaleModelConfig", "Adaround", "AdaroundParameters", "GPTVQ", "GPTVQParameters", "Omniquant",
    "SeqMseParams", "SequentialMse", "adascale_model_config_dict", "apply_adascale", "apply_omniquant", "apply_seq_mse",
    "get_candidates", "optimize_module",
]  # fmt: skip

__getattr__ = absent_names(__name__)


def _batches(loader: Iterable[Any], forward_fn: Any) -> Iterable[Any]:
    """The loader as our methods take it: without labels, unless ``forward_fn`` knows what to do with them."""
    return loader if forward_fn is not None else Unlabelled(loader)


# ------------------------------------------------------------------------------------ AdaRound


@dataclass
class AdaroundParameters:
    """Options of :meth:`Adaround.apply_adaround`.

    Attributes:
        data_loader: batches; the second element of a batch of two is dropped as its labels, unless there is a ``forward_fn``.
        num_batches: how many of them are used.
        default_num_iterations: per layer; 10,000, or 15,000 below 8 bits.
        default_reg_param, default_beta_range, default_warm_start: of the rounding regulariser.
        forward_fn: ``forward_fn(model, batch)``, when the model is not called as ``model(batch)``.

    Raises:
        ConfigError: (a ValueError) more batches than the loader has.
    """

    data_loader: Iterable[Any]
    num_batches: int
    default_num_iterations: int | None = None
    default_reg_param: float = 0.01
    default_beta_range: tuple[float, float] = (20.0, 2.0)
    default_warm_start: float = 0.2
    forward_fn: Any = None

    def __post_init__(self) -> None:
        held = len(self.data_loader) if isinstance(self.data_loader, Sized) else self.num_batches
        if held < self.num_batches:
            raise ConfigError("num_batches", f"{self.num_batches} batches of a loader of {held}", f"use at most {held}")


class Adaround:
    """AdaRound on a float model."""

    @classmethod
    def apply_adaround(
        cls,
        model: nn.Module,
        dummy_input: Any,
        params: AdaroundParameters,
        path: str | Path,
        filename_prefix: str,
        default_param_bw: int = 4,
        param_bw_override_list: Sequence[tuple[nn.Module, int]] | None = None,
        ignore_quant_ops_list: Sequence[nn.Module] | None = None,
        default_quant_scheme: Any = QuantScheme.post_training_tf_enhanced,
        default_config_file: str | Path | None = None,
        cached_dataset: Any = None,
        checkpoints_config: str | None = None,
        **options: Any,
    ) -> nn.Module:
        """A copy of ``model`` with rounded weights; ``<path>/<filename_prefix>.encodings`` has their grids.

        The file has ``param_encodings`` (version 0.6.1), for ``sim.set_and_freeze_param_encodings`` of a simulation of the
        returned model.

        Args:
            model: left as it is.
            dummy_input: one input, as :class:`QuantizationSimModel` takes it.
            params: data and hyper-parameters.
            path, filename_prefix: where the encodings are written.
            default_param_bw: bits of the weights.
            param_bw_override_list: ``(module, bits)`` of modules with another width.
            ignore_quant_ops_list: modules whose weights stay in float; those without a weight have no effect.
            default_quant_scheme: how the ranges are chosen.
            default_config_file: rules, as for :class:`QuantizationSimModel`.
            cached_dataset, checkpoints_config: of :meth:`apply_adaround_with_cache`; not read, since no layer is computed from
                the model's input again.
            options: as for :func:`bitwright.torch.apply_reconstruction`.

        Raises:
            ConfigError: a module that has no quantized weight, or a prefix that cannot begin the name of a file.
            CalibrationError, ModelError: as for :func:`bitwright.torch.apply_reconstruction`.
            ExportError: the encodings cannot be written.
        """
        check_destination(path, filename_prefix)
        if checkpoints_config is not None:
            differs("apply_adaround_with_cache(checkpoints_config=...)", "not needed and not read")
        sim = front.QuantizationSimModel(
            copied(model), dummy_input, range_method(default_quant_scheme), default_param_bw=default_param_bw,
            config_file=default_config_file or "default", in_place=True,
        )  # fmt: skip
        _keep_weights(sim, model, param_bw_override_list or (), ignore_quant_ops_list or ())
        front.apply_reconstruction(
            sim,
            itertools.islice(_batches(params.data_loader, params.forward_fn), params.num_batches),
            iterations=params.default_num_iterations or (15000 if default_param_bw < 8 else 10000),
            reg_param=params.default_reg_param,
            beta_range=params.default_beta_range,
            warm_start=params.default_warm_start,
            forward_fn=params.forward_fn,
            **options,
        )
        records = [record for record in site_records(sim) if record.kind == "param"]
        write_encodings(Path(path, f"{filename_prefix}.encodings"), records, "0.6.1", quantizer_args={})
        return sim.remove()

    apply_adaround_with_cache = apply_adaround


def _keep_weights(
    sim: front.QuantizationSimModel,
    model: nn.Module,
    widths: Sequence[tuple[nn.Module, int]],
    ignored: Sequence[nn.Module],
) -> None:
    """Switch off all quantizers but those of weights; give weights below modules of ``widths`` their bits, ignore others."""
    names = {id(module): name for name, module in walk_modules(model)}
    for site in sim.quantizers.values():
        site.enabled = site.enabled and site.is_stored
    for module, bits in widths:
        for site in _weights_at(sim, names, module, "param_bw_override_list"):
            site.spec = replace(site.quantizer.spec, format=IntFormat(bits))
    for module in ignored:
        if id(module) not in names or any(parameter.dim() > 1 for parameter in module.parameters()):
            for site in _weights_at(sim, names, module, "ignore_quant_ops_list"):
                site.enabled = False


def _weights_at(
    sim: front.QuantizationSimModel, names: Mapping[int, str], module: nn.Module, argument: str
) -> list[Site]:
    """The weight sites of a module and of everything below it; ``names`` are paths of modules by identity.

    Raises:
        ConfigError: the module is unknown, or has no quantized weight.
    """
    path = names.get(id(module))
    stored = [site for site in sim.quantizers.values() if site.is_stored]
    found = [s for s in stored if path is not None and f"{sim.graph.op(s.op).module}.".startswith(f"{path}.")]
    if not found:
        raise ConfigError(
            argument,
            f"this {type(module).__name__} {'is not a module of the model' if path is None else 'has no quantized weight'}",
            "name modules of the model that was given, such as model.conv1",
        )
    return found


# ------------------------------------------------------------------------------------ SeqMSE


@dataclass
class SeqMseParams:
    """Options of the older call ``apply_seq_mse(model, sim, data_loader, params)``.

    Attributes:
        num_batches: how many batches are used; all with ``None``.
        num_candidates: fractions of the range that are tried per channel.
        inp_symmetry: what the two sides of the comparison read: ``symqt``, both the quantized predecessor's values; ``symfp``,
            both the float model's; ``asym``, each its own.
        loss_fn: ``mse``, ``l1`` or ``sqnr``.
        forward_fn: ``forward_fn(model, batch)``.

    Raises:
        ConfigError: (a ValueError) a value that AIMET does not know either.
    """

    num_batches: int | None = 4
    num_candidates: int = 20
    inp_symmetry: str = "symqt"
    loss_fn: str = "mse"
    forward_fn: Any = default_forward_fn

    def __post_init__(self) -> None:
        seq_mse.Settings(loss_fn=self.loss_fn, inp_symmetry=self.inp_symmetry)  # type: ignore[arg-type]


def apply_seq_mse(*args: Any, **kwargs: Any) -> Any:
    """Choose the range of every weight by its layer's output error, and freeze it: it does not train either.

    Two calls: ``(sim, data_loader, num_candidates=20, forward_fn=..., modules_to_exclude=None, checkpoints_config=None,
    cache_dir=None)``, and the older ``(model, sim, data_loader, params, modules_to_exclude=None, checkpoints_config=None,
    cache_dir=None)``. Modules to exclude may be those of the simulation or of the model it was made from.

    Returns:
        Our report (AIMET returns nothing).
    """
    older = isinstance(args[0], nn.Module) if args else "model" in kwargs
    return (_older_seq_mse if older else _seq_mse)(*args, **kwargs)


class SequentialMse:
    """The older form of :func:`apply_seq_mse`, and its steps on one module."""

    apply_seq_mse = staticmethod(apply_seq_mse)

    @staticmethod
    def get_candidates(
        num_candidates: int, per_channel_max: torch.Tensor, per_channel_min: torch.Tensor | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Fractions ``1/n, 2/n, ..., 1`` of a range as pairs ``(max, min)``; symmetric without ``per_channel_min``."""
        low = -per_channel_max if per_channel_min is None else per_channel_min
        parts = [(i + 1) / num_candidates for i in range(num_candidates)]
        return [(per_channel_max * part, low * part) for part in parts]

    @staticmethod
    def optimize_module(
        quant_module: nn.Module, x: Iterable[torch.Tensor], xq: Iterable[torch.Tensor], params: SeqMseParams
    ) -> None:
        """Choose the range of the weight of one quantized module by the error of its output, and freeze it.

        Args:
            quant_module: its weight has a quantizer.
            x: batches of its input in the float model; read with ``inp_symmetry="symfp"``.
            xq: batches of its input in the simulation; read with ``symqt``.
            params: the options; ``asym``, which compares both, needs the models: :func:`apply_seq_mse`.

        Raises:
            ConfigError: ``asym``, or the weight has no quantizer.
        """
        module: Any = quant_module
        quantizer = module.param_quantizers["weight"]
        if params.inp_symmetry == "asym" or quantizer is None:
            why = "inp_symmetry is asym" if quantizer is not None else "the weight has no quantizer"
            raise ConfigError("optimize_module", why, "call apply_seq_mse(model, sim, data_loader, params)")
        batches = list(itertools.islice(x if params.inp_symmetry == "symfp" else xq, params.num_batches))
        sim = QuantizationSimModel(module.get_original_module(), batches[0])
        own: Any = sim.model
        with torch.no_grad(), quantizer.compute_encodings():
            quantizer(module.weight)
        own.param_quantizers["weight"] = QuantizeDequantize.from_encodings(quantizer.get_encodings())
        remove_activation_quantizers(own)
        _seq_mse(sim, batches, params.num_candidates, loss_fn=params.loss_fn, inp_symmetry=params.inp_symmetry)
        found = own.param_quantizers["weight"]
        quantizer.set_range(found.get_min(), found.get_max())
        quantizer.allow_overwrite(False)
        quantizer.requires_grad_(False)


get_candidates, optimize_module = SequentialMse.get_candidates, SequentialMse.optimize_module


def _seq_mse(
    sim: front.QuantizationSimModel,
    data_loader: Iterable[Any],
    num_candidates: int = 20,
    forward_fn: Any = default_forward_fn,
    modules_to_exclude: Iterable[nn.Module] | None = None,
    checkpoints_config: str | None = None,
    cache_dir: str | Path | None = None,
    *,
    model: nn.Module | None = None,
    **options: Any,
) -> Any:
    forward = None if forward_fn is default_forward_fn else forward_fn
    names = {id(module): name for name, module in walk_modules(sim.model)}
    names |= {id(module): name for module, name in getattr(sim, "original_names", {}).items()}
    names |= {id(module): name for name, module in (walk_modules(model) if model is not None else ())}
    excluded = list(options.pop("exclude", ()))
    for module in modules_to_exclude or ():
        if id(module) not in names or any(parameter.dim() > 1 for parameter in module.parameters()):
            excluded += [site.op for site in _weights_at(sim, names, module, "modules_to_exclude")]
    free = list(filter(SiteQuantizer.is_overwrite_allowed, _shown(sim)))
    report = front.apply_reconstruction(
        sim, _batches(data_loader, forward), "seq_mse", num_candidates=num_candidates, cache_dir=cache_dir,
        exclude=excluded, forward_fn=forward, **options,
    )  # fmt: skip
    for quantizer in itertools.filterfalse(SiteQuantizer.is_overwrite_allowed, free):
        quantizer.requires_grad_(False)
    return report


def _shown(sim: front.QuantizationSimModel) -> Iterator[Any]:
    """The quantizers that modules of a simulation show."""
    slots = (slot for record in below(sim.model) for _, slot in record.slots())
    return (quantizer for slot in slots if (quantizer := slot.get()) is not None)


def _older_seq_mse(
    model: nn.Module,
    sim: front.QuantizationSimModel,
    data_loader: Iterable[Any],
    params: SeqMseParams,
    modules_to_exclude: Iterable[nn.Module] | None = None,
    checkpoints_config: str | None = None,
    cache_dir: str | Path | None = None,
    **options: Any,
) -> Any:
    batches = itertools.islice(data_loader, params.num_batches)
    return _seq_mse(
        sim, batches, params.num_candidates, params.forward_fn, modules_to_exclude, checkpoints_config, cache_dir,
        model=model, inp_symmetry=params.inp_symmetry, loss_fn=params.loss_fn, **options,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ AdaScale


def apply_adascale(
    qsim: front.QuantizationSimModel,
    data_loader: Iterable[Any],
    forward_fn: Any = None,
    num_iterations: int = 1500,
    checkpoint_dir: str | None = None,
    *,
    loss_fn: Any = None,
    **options: Any,
) -> Any:
    """Learned divisions of weights (FlexRound), in place; blocks are found in any network.

    Returns:
        Our report (AIMET returns nothing).
    """
    if loss_fn is not None:
        differs("apply_adascale(loss_fn=...)", "the loss is the mean squared error of a block's output")
    return front.apply_reconstruction(
        qsim, _batches(data_loader, forward_fn), "flexround", iterations=num_iterations, forward_fn=forward_fn,
        cache_dir=checkpoint_dir, **options,
    )  # fmt: skip


class AdaScale:
    """The function as a method, as AIMET has it too."""

    apply_adascale = staticmethod(apply_adascale)


@dataclass
class AdaScaleModelConfig:
    """The class of the blocks of a model, and learning rates; accepted, and not read: blocks are found in any network."""

    block_type: Any = None
    beta_gamma_lr: float = 1e-3
    scales_lr: float = 5e-4


#: AIMET's registry of models; entries of scripts are accepted and not needed
adascale_model_config_dict: dict[Any, AdaScaleModelConfig] = {}


# ------------------------------------------------------------------------------------ OmniQuant


def apply_omniquant(
    quant_sim: front.QuantizationSimModel,
    dataloader: Iterable[Any],
    forward_fn: Any = None,
    num_iterations: int = 800,
    output_path: str | Path = "./aimet_omniquant_artifact/",
    **options: Any,
) -> Any:
    """Learn block by block the factors and shifts between channels, then how far the ranges of weights are clipped, in place.

    Blocks are found in any network. AIMET writes the factors to ``output_path``; here they are merged into the model, nothing is
    written, and a warning says so. A simulation without encodings is calibrated first.

    Returns:
        Our report of the clipping (AIMET returns nothing).

    Reference: Shao et al. 2023, arXiv:2308.13137.
    """
    differs("apply_omniquant", "merges the learned scales into the model, and writes nothing to output_path")
    batches = list(_batches(dataloader, forward_fn))
    if not quant_sim.calibrated:
        run = None if forward_fn is None else lambda model: [forward_fn(model, batch) for batch in batches]
        quant_sim.compute_encodings(run or batches)
    front.learn_scales(quant_sim, batches, iterations=num_iterations, forward_fn=forward_fn)
    return front.apply_reconstruction(
        quant_sim, batches, "learned_clipping", iterations=num_iterations, forward_fn=forward_fn, **options
    )


class Omniquant:
    """The function as a method, as AIMET has it too."""

    apply_omniquant = staticmethod(apply_omniquant)


# ------------------------------------------------------------------------------------ GPTVQ


@dataclass
class GPTVQParameters:
    """Options of :meth:`GPTVQ.apply_gptvq`.

    Attributes:
        data_loader: batches; the second element of a batch of two is dropped as its labels, unless there is a ``forward_fn``.
        forward_fn: ``forward_fn(model, batch)``, when the model is not called as ``model(batch)``.
        row_axis, col_axis: outputs and inputs of a weight; vectors lie along the inputs.
        rows_per_block, cols_per_block: weights that share a codebook in AIMET; here a layer has one.
        vector_dim: neighbouring weights that one index stands for, 1 to 8.
        vector_bw: bits of the codes of a codebook.
        vector_stride: 1, the weights of a vector lie side by side.
        index_bw: bits of an index, 1 to 8.
        num_of_kmeans_iterations, assignment_chunk_size: not read: k-means runs 25 times, on all vectors at once.

    Raises:
        ConfigError: (a ValueError) another axis or stride, or a number out of its range.
    """

    data_loader: Iterable[Any]
    forward_fn: Any = default_forward_fn
    row_axis: int = 0
    col_axis: int = 1
    rows_per_block: int = 32
    cols_per_block: int = 256
    vector_dim: int = 2
    vector_bw: int = 8
    vector_stride: int = 1
    index_bw: int = 6
    num_of_kmeans_iterations: int = 100
    assignment_chunk_size: int | None = None

    def __post_init__(self) -> None:
        lies = (self.row_axis, self.col_axis, self.vector_stride)
        if lies != (0, 1, 1):
            raise ConfigError(
                "GPTVQParameters", f"row_axis, col_axis and vector_stride are {lies}",
                "leave them at 0, 1 and 1: the weights of a vector are neighbours along the inputs of a layer",
            )  # fmt: skip
        if self.index_bw not in range(1, 9):
            raise ConfigError("index_bw", f"it is {self.index_bw!r}", "give 1 to 8 bits: an index is at most a byte")
        gptvq.Settings(vector=self.vector_dim, entries=2**self.index_bw)


class GPTVQ:
    """Vectors of a codebook in place of the weights of linear layers."""

    @classmethod
    def apply_gptvq(
        cls,
        model: nn.Module,
        dummy_input: Any,
        gptvq_params: GPTVQParameters,
        param_encoding_path: str | Path,
        module_names_to_exclude: Sequence[str] | None = None,
        block_level_module_names: Sequence[Sequence[str]] | None = None,
        file_name_prefix: str = "gptvq",
        config_file_path: str | Path | None = None,
        **options: Any,
    ) -> QuantizationSimModel:
        """A simulation of ``model`` whose linear layers have weights of a codebook, frozen.

        ``<param_encoding_path>/<file_name_prefix>.encodings`` has the grids of these weights (version 0.6.1), for
        ``sim.set_and_freeze_param_encodings`` of another simulation.

        Args:
            model: left as it is.
            dummy_input: one input, as :class:`QuantizationSimModel` takes it.
            gptvq_params: data and sizes.
            param_encoding_path, file_name_prefix: where the encodings are written.
            module_names_to_exclude: linear layers that stay as they are.
            block_level_module_names: linear layers that are treated, in lists (which are flattened: every layer reads what
                the treated ones before it compute); all without it.
            config_file_path: rules, as for :class:`QuantizationSimModel`.
            options: as for :func:`bitwright.torch.apply_reconstruction`.

        Returns:
            The simulation; its activations are still to be calibrated.

        Raises:
            ConfigError: a name that is not a linear layer with a quantized weight, or a prefix that cannot begin the name of
                a file; weights that are not quantized symmetrically.
            CalibrationError, ModelError: as for :func:`bitwright.torch.apply_reconstruction`.
            ExportError: the encodings cannot be written.

        Reference: van Baalen et al. 2024, arXiv:2402.15319.
        """
        check_destination(param_encoding_path, file_name_prefix)
        sizes = f"{gptvq_params.rows_per_block} x {gptvq_params.cols_per_block}"
        differs("apply_gptvq", f"a layer has one codebook, where AIMET has one for {sizes} weights")
        sim = QuantizationSimModel(
            model, dummy_input, QuantScheme.post_training_tf, default_param_bw=gptvq_params.vector_bw,
            config_file=None if config_file_path is None else str(config_file_path),
        )  # fmt: skip
        treated = _linear_sites(sim, block_level_module_names, module_names_to_exclude or ())
        forward = None if gptvq_params.forward_fn is default_forward_fn else gptvq_params.forward_fn
        front.apply_reconstruction(
            sim, _batches(gptvq_params.data_loader, forward), "gptvq", vector=gptvq_params.vector_dim,
            entries=2**gptvq_params.index_bw, include=[site.op for site in treated], forward_fn=forward, **options,
        )  # fmt: skip
        names = {site.name for site in treated}
        records = [record for record in site_records(sim) if record.name in names]
        write_encodings(Path(param_encoding_path, f"{file_name_prefix}.encodings"), records, "0.6.1", quantizer_args={})
        return sim


def _linear_sites(
    sim: QuantizationSimModel, wanted: Sequence[Sequence[str]] | None, excluded: Sequence[str]
) -> list[Site]:
    """The weights of linear modules, of all or of those in the lists, without the excluded ones.

    Raises:
        ConfigError: a name in either is no linear module with a quantized weight.
    """
    modules = {name: module for name, module in walk_modules(sim.model) if isinstance(module, nn.Linear)}
    paths = {sim.graph.op(site.op).module: site for site in sim.quantizers.values() if site.role == "weight"}
    held = {name: paths[name] for name in modules if name in paths}
    given = list(held) if wanted is None else list(itertools.chain.from_iterable(wanted))
    unknown = [name for name in (*given, *excluded) if name not in held]
    if unknown:
        raise ConfigError(
            "apply_gptvq",
            f"{unknown[0]!r} is no linear layer with a quantized weight{close_matches(unknown[0], held)}",
            "name nn.Linear modules of the model that was given",
        )
    return [held[name] for name in given if name not in excluded]
