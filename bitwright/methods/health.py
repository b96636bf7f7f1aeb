"""Which operator of a model turned finite numbers into NaN or Inf, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bitwright.core.health.report import HealthReport
from bitwright.errors import checks_arguments
from bitwright.methods.front_end import health_check_of


@checks_arguments
def check_model(
    model: Any,
    data: Iterable[Any] | Callable[..., Any] | None = None,
    providers: Any = None,
    *,
    threads: int = 0,
    progress: bool = True,
) -> HealthReport:
    """Look for the operator that made the first NaN or Inf.

    Parameters come first: where one holds NaN or Inf nothing is run. An operator is named when what it made of finite
    numbers reaches an output of the model, or falsifies one; a mask of -Inf before a softmax, or a NaN that ``where`` (in
    torch also ``masked_fill`` or ``nan_to_num``) removes, is not.

    A module runs in eval mode without gradients, once per batch, in about twice the time of its own forward; the first
    batch again where layers share parameters or a loop is found, whose places are told apart as in a simulation. An ONNX
    model runs as it is written, without graph optimisation, and half-precision values keep their rounding; so an overflow
    is found that a CPU, which computes in float32 in between, would not show. Bodies of If, Loop and Scan are looked into,
    iteration by iteration.

    Args:
        model: any eager module; or the path of an ONNX file, a proto or an ``onnx_ir`` model. Left as it is.
        data: batches: for a module each a tensor, a tuple of positional arguments, or a dict of keyword arguments; for an
            ONNX model each a dict, an array where there is one input, or a tuple in the model's order. ``None`` runs an ONNX
            model on random values. For a module also a callback that runs it: ``callback(model)``; what that calls outside
            of the model's forward, such as other methods, belongs to one batch.
        providers: of ONNX Runtime, for an ONNX model; the CPU by default.
        threads: of one operator of an ONNX model; 0 takes ``OMP_NUM_THREADS``, where it is set, or leaves the number to ONNX
            Runtime.
        progress: show a bar on a terminal when it takes more than two seconds.

    Returns:
        The report; ``report.ok``, ``print(report)``, ``report.to_json()``. After Ctrl-C of the batches until then, which a
        note says.

    Raises:
        ModelError: the model cannot be read, a batch does not fit it, or it fails on a batch and nothing that is not finite
            was seen before.
        CalibrationError: there is no batch.
        ConfigError: a provider is not available, or an option that the front end does not have.

    Example:
        >>> import torch
        >>> class Mean(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x / x.sum(-1, keepdim=True)
        >>> check_model(Mean(), [torch.zeros(2, 3)]).culprit.cause
        'division by zero'
    """
    return health_check_of(model)(model, data, providers, threads, progress)
