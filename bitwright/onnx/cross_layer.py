"""The parts of equalization one by one, under AIMET's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.algorithms.channels.layers import Array
from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.algorithms.scaling import equalize as equalization
from bitwright.algorithms.scaling.equalize import EqualizeReport
from bitwright.methods.channels import equalize_bn_folded_model
from bitwright.onnx.adapters.opened import Model, open_model


class CrossLayerScaling:
    """Equalization without anything before or after it, under AIMET's name.

    Args:
        model: batch norms folded; changed in place.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def scale_model(self, dummy_input: Any = None, **options: Any) -> EqualizeReport:
        """:func:`equalize_bn_folded_model` without high biases.

        Returns:
            The report, which :meth:`HighBiasFold.bias_fold` takes.

        Raises:
            ModelError: as for :func:`equalize_model`.
        """
        return equalize_bn_folded_model(self.model, None, dummy_input, **options)


class HighBiasFold:
    """High-bias absorption after equalization, under AIMET's name.

    Args:
        model: equalized; changed in place.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def bias_fold(
        self, cls_set_info_list: EqualizeReport, bn_layers: FoldReport | Mapping[str, tuple[Array, Array]]
    ) -> EqualizeReport:
        """Move what lies three standard deviations above zero into the next layer.

        Args:
            cls_set_info_list: what :meth:`CrossLayerScaling.scale_model` returned.
            bn_layers: what ``fold_all_batch_norms`` returned, or layer -> mean and standard deviation of its output.

        Returns:
            The same report; ``absorbed`` has the layers.

        Raises:
            ModelError: the model cannot be read or run.
        """
        moments = bn_layers.moments if isinstance(bn_layers, FoldReport) else bn_layers
        opened = open_model(self.model, None, None, "bias_fold", None)
        equalization.absorb_biases(cls_set_info_list, moments, opened.view)
        opened.finish(cls_set_info_list)
        return cls_set_info_list
