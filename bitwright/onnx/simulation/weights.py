"""Quantized weights of large models: in one file, each written once for all models that are made of a simulation.

Calibration, the simulation, and the session that gives the samples of an export compute with the same quantized weights.
In a file they take no memory of their own, and sessions map them from there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from bitwright.core.numerics.encoding import Encoding
from bitwright.export.files.temporary import temporary_room
from bitwright.onnx.model.load import own_tensor
from bitwright.onnx.model.session import is_large, kept_in_file, weight_bytes

_FOLDER = "bitwright.folder"  # what a tensor keeps, so that models and sessions can be made of it
_Made = tuple[
    ir.TensorProtocol, ir.TensorProtocol
]  # the original, so that its identity stays its own, and what became of it


class WeightFile:
    """A file of weights that lasts as long as this, or one of the tensors that it gave.

    Attributes:
        folder: it lies there, and goes with it.
        size: its bytes.
    """

    def __init__(self) -> None:
        with temporary_room():
            self.folder = tempfile.TemporaryDirectory(prefix="bitwright-", ignore_cleanup_errors=True)
        self._path = Path(self.folder.name, "weights.data")
        self._made: dict[tuple[int, Encoding | None, bool], _Made] = {}
        self.size = 0

    def tensor(
        self,
        name: str,
        original: ir.TensorProtocol,
        encoding: Encoding | None,
        bias: bool,
        make: Callable[[], ir.TensorProtocol],
    ) -> ir.Tensor | ir.ExternalTensor:
        """What ``make`` gives for these arguments, from the file if it was asked for before; a small tensor stays in memory.

        Args:
            name: of the tensor.
            original: the float constant; told apart by identity, so its elements must not change.
            encoding, bias: how it is quantized; see :func:`bitwright.onnx.simulation.simulate.folded_constant`.
            make: computes it.

        Returns:
            A tensor of its own, which can be given another name.

        Raises:
            ExportError: the temporary folder has no room for it.
        """
        key = (id(original), encoding, bias)
        if key not in self._made:
            with temporary_room(self.folder.name), self._path.open("ab") as file:
                made = kept_in_file(name, make(), file, self._path)
                self.size = file.tell()
            self._made[key] = original, made
        tensor = own_tensor(self._made[key][1])
        tensor.meta[_FOLDER] = self.folder
        return tensor


def file_for(model: ir.Model, kept: WeightFile | None) -> WeightFile | None:
    """Where the quantized weights of a large model lie: not in ``kept`` where most of that is of no use any more."""
    if not is_large(model):
        return None
    return WeightFile() if kept is None or kept.size > 2 * weight_bytes(model) else kept
