"""Batch-norm folding."""

from __future__ import annotations

from typing import Any

from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.errors import checks_arguments
from bitwright.methods.front_end import front_end_of
from bitwright.progress import collector_paused


@checks_arguments
def fold_all_batch_norms(
    model: Any, input_shapes: Any = None, dummy_input: Any = None, *, providers: Any = None, progress: bool = True
) -> FoldReport:
    """Fold every batch norm that can be folded into the convolution or linear layer beside it, in place.

    Each fold is checked numerically on random input; then the model's outputs on the example input are compared with
    those before, and folds that changed them are found and undone. What was not folded is listed with the reason in
    ``report.refused`` and in the log.

    Args:
        model: changed in place. In a module weights and biases are rewritten, and folded batch norms become
            ``nn.Identity``. Of an ONNX model functions are inlined and constants become initializers (see
            :mod:`bitwright.onnx.model.load`); layers are Conv, ConvTranspose, Gemm, and MatMul of a 2-D input with or
            without an Add after it; inputs and outputs keep names and order.
        input_shapes: shape of the input of a module, or a list of shapes for several; random inputs are made of them. An
            ONNX model knows its shapes: the second argument is its example input.
        dummy_input: one input instead. Of a module a tensor, a tuple of positional arguments, or a dict of keyword
            arguments; of an ONNX model its feeds, without which its outputs before and after are not compared.
        providers: of ONNX Runtime, for an ONNX model; the CPU by default.
        progress: show a progress bar on a terminal.

    Returns:
        A report; iterating it gives the folded ``(layer, batch norm)`` name pairs.

    Raises:
        ModelError: a module without ``input_shapes`` and ``dummy_input``, a path, or a model that cannot be read or run
            on the input.

    Reference: Jacob et al. 2018, arXiv:1712.05877, section 3.2.
    """
    with collector_paused():
        return front_end_of(model).fold(model, input_shapes, dummy_input, "fold_all_batch_norms", providers, progress)
