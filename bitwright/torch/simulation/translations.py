"""ONNX for operators of torch that the exporter translates wrongly, or not at all.

Each function in :data:`TRANSLATIONS` is a row for ``custom_translation_table`` of ``torch.onnx.export``; its arguments are those
of the operator.

``torch.onnx.export`` finds out for every model what it can translate: it reads the signatures of some 500 functions from their
source text, which takes longer than the export of a small network does, and has no setting for it. Where its implementation
takes a registry of translations as an argument, :func:`to_onnx` gives it one that was made before; elsewhere it calls the
public function. What the exporter does for every program alike before it translates is kept as well, see
:mod:`bitwright.torch.calls.decompositions`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from onnx.defs import OpSchema
from onnx_ir.passes import common as common_passes
from onnxscript import optimizer
from torch.export import ExportedProgram

import bitwright.torch.simulation.simulate  # noqa: F401, which defines the operator of marks
from bitwright.export.qdq.markers import ATTRIBUTE, DOMAIN, OP_TYPE
from bitwright.torch.calls.decompositions import decomposed, knows_steps

op: Any = onnxscript.opset21  # its annotations are those of a script, in which numbers are tensors
#: types that TopK of ONNX Runtime has a kernel for
_SORTED = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64, ir.DataType.INT32))


def squeeze_dim(self: Any, dim: int) -> Any:
    """``aten.squeeze.dim``: torch leaves an axis alone that is longer than 1, ``Squeeze`` refuses it.

    An axis of free length is longer: ``torch.export`` writes those of length 1 as constants.
    """
    return op.Squeeze(self, [dim]) if self.shape and self.shape[dim] == 1 else op.Identity(self)


def sort_stable(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """``aten.sort.stable``: ``TopK`` over the whole axis, which puts the lower index first where values are equal."""
    if not self.shape:
        return op.Identity(self), op.Constant(value_int=0)
    kept = self.dtype in _SORTED
    wide = ir.DataType.FLOAT if self.dtype.is_floating_point() else ir.DataType.INT64
    keys = self if kept else op.Cast(self, to=wide)
    length = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]), axis=0)
    values, indices = op.TopK(keys, length, axis=dim, largest=int(descending), sorted=1)
    return values if kept else op.Cast(values, to=self.dtype), indices


_FLOATS = ["tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"]
_SITE: Any = onnxscript.values.Op(
    onnxscript.values.Opset(DOMAIN, 1),
    OP_TYPE,
    OpSchema(
        OP_TYPE, DOMAIN, 1,
        inputs=[OpSchema.FormalParameter("x", "T")], outputs=[OpSchema.FormalParameter("y", "T")],
        type_constraints=[("T", _FLOATS, "of what is quantized")],
        attributes=[OpSchema.Attribute(ATTRIBUTE, OpSchema.AttrType.STRING)],
    ),
)  # fmt: skip


def site(x: Any, site: str) -> Any:
    """``bitwright::site``: a marker, see :mod:`bitwright.export.qdq.markers`."""
    return _SITE(x, **{ATTRIBUTE: site})


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.squeeze.dim: squeeze_dim,
    torch.ops.aten.sort.stable: sort_stable,
    torch.ops.bitwright.site.default: site,
}

OPSET = 21
# what the rules of the exporter take for zero and for one, with a margin
_NEXT_TO_ZERO, _NEXT_TO_ONE = 1e-7, 1e-4
#: arguments without which the implementation is another one than this module knows
_NEEDED = {"registry", "dynamic_shapes", "optimize", "opset_version", "verbose"}


def to_onnx(program: ExportedProgram) -> ir.Model:
    """``program`` as ONNX of opset 21, optimized, with :data:`TRANSLATIONS`.

    Raises:
        Whatever the exporter raises: an operator without a translation, for one.
    """
    if not takes_registry():
        return by_public_function(program)
    registry = _registry(len(torch._C._dispatch_get_all_op_names()))
    return by_steps(program, registry) if knows_steps() else by_registry(program, registry)


def by_steps(program: ExportedProgram, registry: Any) -> ir.Model:
    """The steps of torch's exporter one by one, with ``registry``; the first is :func:`decomposed`."""
    from torch.onnx._internal.exporter import _core

    made = _core._exported_program_to_onnx_program(decomposed(program, registry), registry=registry)
    made.model = _core.onnxscript_apis.convert_version(made.model, OPSET)
    return optimized(made)


def by_registry(program: ExportedProgram, registry: Any) -> ir.Model:
    """The same by the implementation of ``torch.onnx.export``, which takes the translations from ``registry``."""
    from torch.onnx._internal.exporter import _core

    made = _core.export(
        program, (), registry=registry, dynamic_shapes={}, optimize=False, opset_version=OPSET, verbose=False
    )
    return optimized(made)


def takes_registry() -> bool:
    """Whether the implementation is the one that this module knows."""
    try:
        from torch.onnx._internal.exporter import _core, _registration
    except ImportError:
        return False
    known = hasattr(_registration, "ONNXRegistry") and hasattr(torch._C, "_dispatch_get_all_op_names")
    return known and _NEEDED <= inspect.signature(_core.export).parameters.keys()


def by_public_function(program: ExportedProgram) -> ir.Model:
    """The same by ``torch.onnx.export``."""
    made = torch.onnx.export(
        program,
        (),
        dynamo=True,
        opset_version=OPSET,
        optimize=False,
        verbose=False,
        custom_translation_table=TRANSLATIONS,
    )
    assert made is not None
    return optimized(made)


def optimized(made: Any) -> ir.Model:
    """The model of an exported program, optimized by torch's exporter with no constant lost.

    Its rules take an addition of up to 1e-8 for one of zero, and a product with up to 1.00001 for one with one: of
    ``x / (y + 1e-15)`` they leave ``x / y``. Such constants are inputs of the graph while the rules look at it.
    """
    hidden = _hide(made.model)
    made.optimize()
    graph = made.model.graph
    for value in [value for value in graph.inputs if value.name in hidden]:
        graph.inputs.remove(value)
        if value.uses():
            value.const_value = hidden[str(value.name)]
            graph.register_initializer(value)
    if hidden:
        optimizer.fold_constants(made.model)
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(made.model)
        common_passes.RemoveUnusedNodesPass()(made.model)
    return made.model


def _hide(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Make inputs of the constants that a rule would take for zero or one; by name, what they are."""
    hidden: dict[str, ir.TensorProtocol] = {}
    for node in [node for node in model.graph.all_nodes() if node.op_type == "Constant" and not node.domain]:
        given = node.attributes.get("value")
        if given is None or node.outputs[0].is_graph_output() or not _is_mistaken(given.as_tensor()):
            continue
        tensor, old = given.as_tensor(), node.outputs[0]
        name = f"{old.name}_exact_{len(hidden)}"
        value = ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(tensor.dtype))
        for use in tuple(old.uses()):
            use.node.replace_input_with(use.idx, value)
        model.graph.inputs.append(value)
        hidden[name] = tensor
    for name, value in list(model.graph.initializers.items()):
        if value.const_value is not None and not value.is_graph_output() and _is_mistaken(value.const_value):
            hidden[name] = value.const_value
            del model.graph.initializers[name]
            value.const_value = None
            model.graph.inputs.append(value)
    return hidden


def _is_mistaken(tensor: ir.TensorProtocol) -> bool:
    """Whether a scalar is next to zero or one without being it."""
    if len(tensor.shape) or not tensor.dtype.is_floating_point():
        return False
    value = float(tensor.numpy())
    return (abs(value) <= _NEXT_TO_ZERO and value != 0) or (abs(value - 1) <= _NEXT_TO_ONE and value != 1)


@lru_cache(maxsize=1)
def _registry(operators: int) -> Any:
    """What the exporter can translate while torch has so many operators: a package that brings more brings translations."""
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry.from_torchlib(opset_version=OPSET)
    for target, function in TRANSLATIONS.items():
        registry.register_op(target, function, is_complex=False)
    return registry
