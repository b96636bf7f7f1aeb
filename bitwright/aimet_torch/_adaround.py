"""``aimet_torch.adaround.adaround_weight``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bitwright import torch as front
from bitwright.aimet_common.absent import absent_names, differs
from bitwright.aimet_common.defs import QuantScheme, range_method
from bitwright.aimet_torch._core import rewrite_encodings, walk_modules
from bitwright.aimet_torch.utils import unlabelled

__all__ = ["Adaround", "AdaroundParameters"]

__getattr__ = absent_names(__name__)


class Unlabelled:
    """The batches of a loader without labels; gone through as often as the loader."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return (unlabelled(batch) for batch in self._loader)


def batches_for(loader: Iterable[Any], forward_fn: Any) -> Iterable[Any]:
    """The loader as our methods take it: without labels, unless ``forward_fn`` knows what to do with them."""
    return loader if forward_fn is not None else Unlabelled(loader)


@dataclass
class AdaroundParameters(front.AdaroundParameters):
    """As :class:`bitwright.torch.AdaroundParameters`; the second element of a batch of two is dropped as its labels."""


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
        **options: Any,
    ) -> nn.Module:
        """A copy of ``model`` with rounded weights; see :meth:`bitwright.torch.Adaround.apply_adaround`.

        ``<path>/<filename_prefix>.encodings`` has ``param_encodings`` (version 0.6.1), for
        ``sim.set_and_freeze_param_encodings``. Modules without a weight in ``ignore_quant_ops_list`` have no effect.
        """
        own = front.AdaroundParameters(
            batches_for(params.data_loader, params.forward_fn),
            params.num_batches,
            params.default_num_iterations,
            params.default_reg_param,
            params.default_beta_range,
            params.default_warm_start,
            params.forward_fn,
        )
        made = front.Adaround.apply_adaround(
            model, dummy_input, own, path, filename_prefix, default_param_bw, param_bw_override_list,
            _with_weights(model, ignore_quant_ops_list or ()), range_method(default_quant_scheme),
            default_config_file or "default", **options,
        )  # fmt: skip
        rewrite_encodings(Path(path, f"{filename_prefix}.encodings"), "0.6.1")
        return made

    @classmethod
    def apply_adaround_with_cache(
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
        """:meth:`apply_adaround`: no layer is computed from the model's input again, so that there is nothing to cache."""
        if checkpoints_config is not None:
            differs("apply_adaround_with_cache(checkpoints_config=...)", "not needed and not read")
        return cls.apply_adaround(
            model, dummy_input, params, path, filename_prefix, default_param_bw, param_bw_override_list,
            ignore_quant_ops_list, default_quant_scheme, default_config_file, **options,
        )  # fmt: skip


def _with_weights(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that are not of the model, for our error, or have a weight of two dimensions or more below them."""
    known = {id(module) for _, module in walk_modules(model)}
    return [module for module in modules if id(module) not in known or any(p.dim() > 1 for p in module.parameters())]
