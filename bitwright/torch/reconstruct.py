"""Methods that choose weights on the grid, for torch simulations: AdaRound, BRECQ, QDrop, FlexRound, GPTQ, SeqMSE."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.algorithms.rounding import seq_mse
from bitwright.algorithms.rounding.driver import RoundingReport
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.placement.user_scheme import QuantScheme
from bitwright.core.simulation.sites import Site
from bitwright.errors import ConfigError, checks_arguments
from bitwright.export.encodings.of_simulation import site_records
from bitwright.export.encodings.versions import write_encodings
from bitwright.export.files.atomic import check_destination
from bitwright.methods.rounding import apply_reconstruction
from bitwright.torch.adapters.program import Forward
from bitwright.torch.calls.trees import walk_modules
from bitwright.torch.simulation.adopt import copied
from bitwright.torch.simulation.quantsim import QuantizationSimModel

logger = logging.getLogger("bitwright")


@dataclass(frozen=True)
class SeqMseParams:
    """What the older call ``apply_seq_mse(model, sim, data_loader, params)`` is to do; AIMET's names and defaults.

    Attributes:
        num_batches: how many batches are used; all with ``None``.
        num_candidates: fractions of the range that are tried per channel.
        inp_symmetry: what the two sides of the comparison read: ``symqt``, both the quantized predecessor's values; ``symfp``,
            both the float model's; ``asym``, each its own.
        loss_fn: ``mse``, ``l1`` or ``sqnr``.
        forward_fn: ``forward_fn(model, batch)``, when the model is not called as ``model(batch)``.

    Raises:
        ConfigError: an unknown ``inp_symmetry`` or ``loss_fn``.
    """

    num_batches: int | None = 4
    num_candidates: int = 20
    inp_symmetry: str = "symqt"
    loss_fn: str = "mse"
    forward_fn: Forward | None = None

    def __post_init__(self) -> None:
        seq_mse.Settings(loss_fn=self.loss_fn, inp_symmetry=self.inp_symmetry)  # type: ignore[arg-type]


@checks_arguments
def apply_seq_mse(
    sim: QuantizationSimModel | nn.Module,
    data_loader: Iterable[Any] | QuantizationSimModel,
    num_candidates: int | Iterable[Any] = 20,
    forward_fn: Forward | SeqMseParams | None = None,
    modules_to_exclude: Iterable[nn.Module] | None = None,
    checkpoints_config: Any = None,
    cache_dir: str | Path | None = None,
    **options: Any,
) -> RoundingReport:
    """Choose the range of every weight by its layer's output error; under AIMET's name and arguments.

    AIMET's older call, ``apply_seq_mse(model, sim, data_loader, params)``, is understood too.

    Args:
        sim: changed in place: encodings of weights are set and frozen.
        data_loader: batches, as the model's forward takes them.
        num_candidates: fractions of the range that are tried per channel.
        forward_fn: ``forward_fn(model, batch)``, when the model is not called as ``model(batch)``.
        modules_to_exclude: modules of ``sim.model`` whose weights keep their ranges.
        checkpoints_config: not needed here: no layer is computed from the model's input again.
        cache_dir: as for :func:`apply_reconstruction`, which also says what ``options`` there are.

    Raises:
        ConfigError, CalibrationError, ModelError: see :func:`apply_reconstruction`.
    """
    if isinstance(forward_fn, SeqMseParams):  # (model, sim, data_loader, params), AIMET's older call
        older, used = forward_fn, itertools.islice(num_candidates, forward_fn.num_batches)  # type: ignore[arg-type]
        return apply_seq_mse(
            data_loader, used, older.num_candidates, older.forward_fn, modules_to_exclude,  # type: ignore[arg-type]
            checkpoints_config, cache_dir, inp_symmetry=older.inp_symmetry, loss_fn=older.loss_fn, **options,
        )  # fmt: skip
    if not isinstance(sim, QuantizationSimModel) or isinstance(data_loader, QuantizationSimModel):
        raise ConfigError(
            "sim",
            f"a {type(sim).__name__} was given, and no SeqMseParams",
            "give a simulation, made by QuantizationSimModel(...), and batches; with SeqMseParams as the fourth argument, "
            "the model, its simulation and batches",
        )
    if checkpoints_config is not None:
        logger.info("apply_seq_mse: checkpoints_config is not needed, values are kept from layer to layer")
    names = {id(module): path for path, module in walk_modules(sim.model)}
    excluded = list(options.pop("exclude", ()))
    for module in modules_to_exclude or ():
        excluded += [site.op for site in _weights_at(sim, names, module, "modules_to_exclude")]
    return apply_reconstruction(
        sim,
        data_loader,
        "seq_mse",
        num_candidates=num_candidates,
        cache_dir=cache_dir,
        exclude=excluded,
        forward_fn=forward_fn,
        **options,
    )


@checks_arguments
def apply_adascale(
    qsim: QuantizationSimModel,
    data_loader: Iterable[Any],
    forward_fn: Forward | None = None,
    num_iterations: int = 1500,
    checkpoint_dir: str | Path | None = None,
    **options: Any,
) -> RoundingReport:
    """Learned divisions of weights under AIMET's name and arguments: :func:`apply_reconstruction` with ``flexround``.

    Blocks are found in any network, not only in language models; ``checkpoint_dir`` is ``cache_dir``.
    """
    return apply_reconstruction(
        qsim,
        data_loader,
        "flexround",
        iterations=num_iterations,
        forward_fn=forward_fn,
        cache_dir=checkpoint_dir,
        **options,
    )


@dataclass
class AdaroundParameters:
    """What :meth:`Adaround.apply_adaround` is to do; AIMET's names and defaults.

    Attributes:
        data_loader: batches.
        num_batches: how many of them are used.
        default_num_iterations: per layer; 10,000, or 15,000 below 8 bits.
        default_reg_param, default_beta_range, default_warm_start: of the rounding regulariser.
        forward_fn: ``forward_fn(model, batch)``, when the model is not called as ``model(batch)``.
    """

    data_loader: Iterable[Any]
    num_batches: int
    default_num_iterations: int | None = None
    default_reg_param: float = 0.01
    default_beta_range: tuple[float, float] = (20.0, 2.0)
    default_warm_start: float = 0.2
    forward_fn: Forward | None = None


class Adaround:
    """AdaRound on a float model, under AIMET's name."""

    @staticmethod
    @checks_arguments
    def apply_adaround(
        model: nn.Module,
        dummy_input: Any,
        params: AdaroundParameters,
        path: str | Path,
        filename_prefix: str,
        default_param_bw: int = 4,
        param_bw_override_list: Sequence[tuple[nn.Module, int]] | None = None,
        ignore_quant_ops_list: Sequence[nn.Module] | None = None,
        default_quant_scheme: str | QuantScheme = QuantScheme.post_training_tf_enhanced,
        default_config_file: str | Path | None = None,
        **options: Any,
    ) -> nn.Module:
        """A copy of ``model`` with rounded weights; ``<path>/<filename_prefix>.encodings`` has their grids.

        Give that file to ``sim.set_and_freeze_param_encodings`` of a simulation of the returned model.

        Args:
            model: left as it is.
            dummy_input: one input, as :class:`QuantizationSimModel` takes it.
            params: data and hyper-parameters.
            path, filename_prefix: where the encodings are written.
            default_param_bw: bits of the weights.
            param_bw_override_list: ``(module, bits)`` of modules with another width.
            ignore_quant_ops_list: modules whose weights stay in float.
            default_quant_scheme: how the ranges are chosen.
            default_config_file: rules, as for :class:`QuantizationSimModel`.
            options: as for :func:`apply_reconstruction`.

        Raises:
            ConfigError: a module that has no quantized weight, or a prefix that cannot begin the name of a file.
            CalibrationError, ModelError: see :func:`apply_reconstruction`.
            ExportError: the encodings cannot be written.
        """
        check_destination(path, filename_prefix)
        work = copied(model)
        sim = QuantizationSimModel(
            work,
            dummy_input,
            default_quant_scheme,
            default_param_bw=default_param_bw,
            config_file=default_config_file,
            in_place=True,
        )
        names = {id(module): path for path, module in walk_modules(model)}
        for site in sim.quantizers.values():
            site.enabled = site.enabled and site.is_stored
        for module, bits in param_bw_override_list or ():
            for site in _weights_at(sim, names, module, "param_bw_override_list"):
                site.spec = replace(site.quantizer.spec, format=IntFormat(bits))
        for module in ignore_quant_ops_list or ():
            for site in _weights_at(sim, names, module, "ignore_quant_ops_list"):
                site.enabled = False
        iterations = params.default_num_iterations or (15000 if default_param_bw < 8 else 10000)
        batches = itertools.islice(params.data_loader, params.num_batches)
        apply_reconstruction(
            sim,
            batches,
            iterations=iterations,
            reg_param=params.default_reg_param,
            beta_range=params.default_beta_range,
            warm_start=params.default_warm_start,
            forward_fn=params.forward_fn,
            **options,
        )
        records = [r for r in site_records(sim) if r.kind == "param"]
        write_encodings(Path(path, f"{filename_prefix}.encodings"), records, "2.0.0", quantizer_args={})
        return sim.remove()


def _weights_at(sim: QuantizationSimModel, names: Mapping[int, str], module: nn.Module, argument: str) -> list[Site]:
    """The weight sites of a module and of everything below it."""
    path = names.get(id(module))
    sites = [s for s in sim.quantizers.values() if s.is_stored]
    found = [s for s in sites if path is not None and f"{sim.graph.op(s.op).module}.".startswith(f"{path}.")]
    if not found:
        raise ConfigError(
            argument,
            f"this {type(module).__name__} {'is not a module of the model' if path is None else 'has no quantized weight'}",
            "name modules of the model that was given, such as model.conv1",
        )
    return found
