"""The state of QDQ writing, shared by all steps: facts about the marked model, and the nodes written so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.numerics.encoding import Encoding
from bitwright.errors import ExportError
from bitwright.export.qdq.forms import Builder, Pair
from bitwright.export.qdq.half import Half
from bitwright.export.qdq.products import ProductForm
from bitwright.export.qdq.stored import Stored
from bitwright.export.targets import Target

BiasForm = Literal["int32", "marked", "float"]


ActivationForm = Literal["unsigned", "as_is"]


NoteKind = Literal[
    "float product",
    "float site",
    "no place",
    "raised scale",
    "float weight",
    "float bias",
    "replaced bias",
    "stored in float",
    "after pool",
    "half precision",
]


@dataclass(frozen=True)
class Note:
    """A note on one site for the reader of the file."""

    site: str
    kind: NoteKind
    text: str


@dataclass(frozen=True)
class Weight:
    """A quantized constant in its reader's orientation."""

    site: str
    encoding: Encoding
    shape: tuple[int, ...]


@dataclass(eq=False)
class Written:
    """Nodes of one quantizer, kept until names are final; ``places`` are its sites and their runs.

    ``pooled`` is the number of pools between what the sites mark and ``entry``.
    """

    places: list[tuple[str, int]]
    role: Literal["activation", "constant", "bias"]
    encoding: Encoding
    scale: ir.Value | None
    axis: int | None = None
    entry: ir.Value | None = None
    perm: tuple[int, ...] = ()
    pooled: int = 0


@dataclass(eq=False)
class Writing:
    """One copied model on its way to the QDQ form.

    The steps of :mod:`bitwright.export.qdq.write` fill the fields in order, each from those before it.
    """

    model: ir.Model
    encodings: dict[str, Encoding]
    bias: BiasForm
    activation: ActivationForm
    weight_only: ProductForm
    target: Target
    half: Half | None = None
    unsigned_weights: bool = False
    notes: dict[Note, None] = field(default_factory=dict)
    raised: dict[str, Encoding] = field(default_factory=dict)
    tensors: dict[str, list[ir.Value]] = field(default_factory=dict)
    written: dict[ir.Value, Written] = field(default_factory=dict)
    # values of the marked model -> the grid they lie on; quantized constants as their readers see them
    grids: dict[ir.Value, Encoding] = field(default_factory=dict)
    weights: dict[ir.Value, Weight] = field(default_factory=dict)
    # values of the QDQ model -> the pair they come from
    pairs: dict[ir.Value, Pair] = field(default_factory=dict)
    quantized: dict[tuple[ir.Value, Encoding, ir.Graph], ir.Value] = field(default_factory=dict)
    at_run_time: dict[ir.Value, tuple[ir.Value, Encoding]] = field(default_factory=dict)  # result -> what is quantized
    stored: dict[tuple[object, ...], tuple[Stored, list[ir.Value]]] = field(default_factory=dict)
    heirs: dict[ir.Value, ir.Value] = field(default_factory=dict)
    places: dict[ir.Node, tuple[str, int]] = field(default_factory=dict)
    in_float: set[ir.Node] = field(default_factory=set)  # layers that the target computes in float
    pooled: dict[ir.Node, int] = field(default_factory=dict)  # markers -> how many pools they were moved past
    float_values: set[ir.Value] = field(default_factory=set)  # read by markers without an encoding
    narrow_products: list[ir.Node] = field(default_factory=list)  # that become MatMulNBits

    builder: Builder = field(init=False)
    constants: Mapping[ir.Value, ir.TensorProtocol] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder = Builder(self.model)

    def check_opset(self, needed: int, what: str) -> None:
        """Refuse a model whose opset is older than ``what`` needs.

        Raises:
            ExportError: it is.
        """
        found = self.model.opset_imports.get("", 0)
        if found < needed:
            raise ExportError(
                what,
                f"needs opset {needed}, and the model has opset {found}",
                f"convert the model to opset {max(needed, 21)}, or export it anew with that opset",
            )

    def note(self, site: str, kind: NoteKind, text: str) -> None:
        """Add a note about ``site``, once."""
        self.notes[Note(site, kind, text)] = None

    def record(self, result: ir.Value, written: Written) -> None:
        """Record the nodes of a quantizer; ``result``: its dequantized tensor."""
        self.written[result] = written
        for site, _ in written.places:
            self.tensors.setdefault(site, []).append(result)

    def array(self, value: ir.Value) -> NDArray[Any] | None:
        """The array of a constant; ``None`` for computed values."""
        tensor = self.constants.get(value)
        return None if tensor is None else tensor.numpy()
