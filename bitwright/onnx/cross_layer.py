"""The parts of equalization one by one, under AIMET's names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bitwright.algorithms.channels.layers import Array
from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.algorithms.scaling import equalize as equalization
from bitwright.algorithms.scaling.equalize import EqualizeReport
from bitwright.errors import ModelError, checks_arguments
from bitwright.methods.channels import equalize_bn_folded_model
from bitwright.onnx.adapters.opened import Model, OnnxOpened
from bitwright.progress import progress as bar


class CrossLayerScaling:
    """Equalization without anything before or after it, under AIMET's name.

    Args:
        model: batch norms folded; changed in place.
    """

    @checks_arguments
    def __init__(self, model: Model) -> None:
        self.model = model

    @checks_arguments
    def scale_model(self, dummy_input: Any = None, **options: Any) -> EqualizeReport:
        """:func:`equalize_bn_folded_model` without high biases.

        Returns:
            The report, which :meth:`HighBiasFold.bias_fold` takes.

        Raises:
            ModelError: as for :func:`equalize_model`.
        """
        return equalize_bn_folded_model(self.model, None, dummy_input, **options)

    @checks_arguments
    def scale_cls_sets(
        self, cls_sets: Sequence[Sequence[str]], *, progress: bool = True
    ) -> list[Array | tuple[Array, ...]]:
        """Equalize sets of layers that follow one another; the model's other layers stay as they are.

        Args:
            cls_sets: tuples of two or more names of Conv, ConvTranspose, Gemm or MatMul nodes; the middle one of three is
                depthwise.
            progress: show a progress bar on a terminal.

        Returns:
            Per set what the channels were divided by, shape [channels]; for a set of n layers a tuple of n - 1 of them.

        Raises (and leaves the model as it was):
            ModelError: neighbours of a set cannot be equalized, with the reason; or the model cannot be read or run.
        """
        opened = OnnxOpened(self.model, None, "scale_cls_sets", None)
        links = [tuple(itertools.pairwise(cls_set)) for cls_set in cls_sets]
        wanted = {link for several in links for link in several}
        report = equalization.equalize(opened.view, only=wanted, bar=partial(bar, enabled=progress))
        found = _factors(report)
        lacking = [link for link in wanted if link not in found]
        if lacking or not all(links):
            report.undo()
            raise _no_set(lacking, report)
        opened.finish(report)
        several = [tuple(found[link] for link in set_) for set_ in links]
        return [factors[0] if len(factors) == 1 else factors for factors in several]


def _no_set(lacking: Sequence[tuple[str, str]], report: EqualizeReport) -> ModelError:
    first = {producer for producer, _ in lacking}
    reasons = [str(line) for line in report.refused if line.op in first]
    named = ", ".join(f"{one} -> {other}" for one, other in lacking) or "a set of one layer"
    return ModelError(
        "scale_cls_sets",
        f"{named} cannot be equalized" + (f": {'; '.join(reasons)}" if reasons else ""),
        "name two or more layers that follow one another, with nothing but a piecewise linear activation between them",
    )


class HighBiasFold:
    """High-bias absorption after equalization, under AIMET's name.

    Args:
        model: equalized; changed in place.
    """

    @checks_arguments
    def __init__(self, model: Model) -> None:
        self.model = model

    @checks_arguments
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
        opened = OnnxOpened(self.model, None, "bias_fold", None)
        equalization.absorb_biases(cls_set_info_list, moments, opened.view)
        opened.finish(cls_set_info_list)
        return cls_set_info_list


def _factors(report: EqualizeReport) -> dict[tuple[str, str], Array]:
    """Producer and consumer -> what the channels between them were divided by."""
    return {
        (producer.op, consumer.op): factor
        for group, factor in zip(report.groups, report.factors, strict=True)
        for producer in group.producers
        for consumer, _ in group.consumers
    }
