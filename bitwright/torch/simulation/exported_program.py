"""The program of an export: from ``torch.export``, or from a recorded run where that fails.

A forward can tell that it is captured (``torch.compiler.is_exporting()``, ``is_compiling()``), and take another path then:
around a cache, with a mask that is left out where nothing is masked. Quantizers belong to calls by their place in the
forward, so one call more or less puts them on other values. :func:`captured` compares the calls of both runs wherever a
quantizer stands. Where they differ, or ``torch.export`` gives up, the program is that of a real run, recorded by ``make_fx``.
It holds one path: it is refused where activations decide on that, and noted where inputs do.

**Decomposition.** Where torch's exporter makes ONNX of a small network, some three quarters of the time go to three things
that do not depend on the network: to list what decomposes into what, to find the composite operators among it, and to replace
the kernels of all of them while the program is retraced. The lists are kept here, and only those kernels are replaced that
then do something else: for 409 of 513 (torch 2.13) the replacement calls the decomposition that torch takes anyway. What
retraces the program, and all passes after it, are the exporter's own, so the model is the same to the names of its nodes.

Where no axis is free and every operator has a translation or a row of
:mod:`bitwright.torch.simulation.decompose_nodes`, the program is not retraced at all.

Torch has no setting for it. :func:`knows_steps` tells whether the private functions that are called for it, and those whose
place they take, are the ones that were read; elsewhere the exporter does all of it.

**Translation.** Operators that the exporter translates wrongly, or not at all, have a function in :data:`TRANSLATIONS`: a row
for ``custom_translation_table`` of ``torch.onnx.export``, with the arguments of the operator.

``torch.onnx.export`` finds out for every model what it can translate: it reads the signatures of some 500 functions from their
source text, which takes longer than the export of a small network does, and has no setting for it. Where its implementation
takes a registry of translations as an argument, :func:`to_onnx` gives it one that was made before; elsewhere it calls the
public function.

**Optimization.** The exporter tries some 70 rules at every node, twice, and loses constants. :func:`optimized` asks first whether
the operator of a node is that at which the pattern of a rule ends, which takes a tenth of the time and gives the same model.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import math
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import onnxscript
import torch
from onnx.defs import OpSchema
from onnx_ir.passes import common as common_passes
from onnxscript import optimizer, rewriter
from onnxscript.optimizer import _constant_folding, _optimizer
from onnxscript.rewriter import _matcher
from torch import fx, nn  # noqa: TID251, the language of programs that torch.export returns
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: TID251, of a real run, see docs/decisions/0022
from torch.fx.traceback import preserve_node_meta, set_stack_trace  # noqa: TID251, of the recording
from torch.overrides import TorchFunctionMode

import bitwright.torch.simulation.simulate  # noqa: F401, which defines the operator of marks
from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.errors import BusyError, ModelError
from bitwright.export.files.onnx_file import all_nodes
from bitwright.export.qdq.markers import ATTRIBUTE, DOMAIN, OP_TYPE, is_site, site_of
from bitwright.torch.calls.functions import Args, Func, Function, Kwargs, function_of
from bitwright.torch.calls.inputs import map_tensors, named_state, same_draws, tensors_in
from bitwright.torch.interception.intercept import Frame, Handler, Key, scripted_code
from bitwright.torch.simulation.complex_pairs import complex_as_pairs
from bitwright.torch.simulation.decompose_nodes import decomposed_by_node
from bitwright.torch.simulation.simulate import RUN, CallPlan
from bitwright.torch.simulation.simulated_module import SimulatedModule

_EXPORTER, _PROGRAM = "torch.onnx._internal.exporter", "torch.export.exported_program"
_RUN = "bitwright.run"  # of a mark of an ONNX model, which run of its place it is
_PATCH = "torch.fx.experimental._config:patch"  # of settings, for a while

#: function called for it -> its parameters
_CALLED = {
    f"{_EXPORTER}._core:_exported_program_to_onnx_program": {"exported_program", "registry", "lower"},
    f"{_EXPORTER}._core:onnxscript_apis.convert_version": {"model", "target_version"},
    f"{_EXPORTER}._decomp:get_onnx_implemented_overloads": {"registry"},
    f"{_EXPORTER}._decomp:create_onnx_friendly_decomposition_table": {"onnx_registered_ops"},
    f"{_EXPORTER}._fx_passes:insert_type_promotion_nodes": {"graph_module"},
    f"{_EXPORTER}._fx_passes:remove_assertion_nodes": {"graph_module"},
    f"{_PROGRAM}:_split_decomp_table_to_cia_and_python_decomp": {"decomp_table"},
    f"{_PROGRAM}:_decompose_exported_program": {
        "ep", "cia_to_decomp", "python_decomp_table", "joint_loss_index", "decompose_custom_triton_ops",
    },
    _PATCH: {"arg1", "arg2", "kwargs"},
    "torch._subclasses.fake_tensor:unset_fake_temporarily": set(),
}  # fmt: skip

#: function whose place is taken here -> the names in it
_REPLACED = {
    f"{_EXPORTER}._core:_prepare_exported_program_for_export": {
        "torch", "fx", "experimental", "_config", "patch", "_fx_passes", "decompose_with_registry", "graph_module",
        "insert_type_promotion_nodes", "remove_assertion_nodes", "_graph_module",
    },
    f"{_EXPORTER}._fx_passes:decompose_with_registry": {
        "set", "_decomp", "get_onnx_implemented_overloads", "create_onnx_friendly_decomposition_table",
        "run_decompositions",
    },
    f"{_PROGRAM}:ExportedProgram.run_decompositions": {
        "default_decompositions", "dict", "isinstance", "CustomDecompTable", "materialize",
        "_split_decomp_table_to_cia_and_python_decomp", "_decompose_exported_program",
    },
}  # fmt: skip

#: the name in torch of the decomposition that a composite operator has anyway
_ANYWAY = "_special_op_to_decompose_cia"


class _Tables(NamedTuple):
    """Decompositions of operators: by kernels, temporarily while retracing, and by the tracer; and what is translated."""

    kernels: dict[Any, Callable[..., Any]]
    traced: dict[Any, Callable[..., Any]]
    translated: frozenset[Any]

    def is_translated(self, target: Any) -> bool:
        """Whether an operator has a translation, and is not replaced by its parts before."""
        return target in self.translated and target not in self.traced


@functools.cache
def knows_steps() -> bool:
    """Whether the implementation is the one that this module knows."""
    try:
        called = all(inspect.signature(resolve_name(f)).parameters.keys() == known for f, known in _CALLED.items())
        return called and all(_names(resolve_name(f)) == known for f, known in _REPLACED.items())
    except (ImportError, AttributeError):
        return False


def _names(function: Callable[..., Any]) -> set[str]:
    """Names of globals, attributes and modules that ``function`` looks up."""
    return set(inspect.unwrap(function).__code__.co_names)


def decomposed(program: ExportedProgram, registry: Any) -> ExportedProgram:
    """The program, of what ``registry`` of torch's exporter translates: changed in place where that is possible, or a new one."""
    tables = _tables(registry, len(torch._decomp.decomposition_table))
    return program if decomposed_by_node(program, tables.is_translated) else retraced(program, tables)


def retraced(program: ExportedProgram, tables: _Tables) -> ExportedProgram:
    """A new program, of what the exporter translates, as the exporter makes it."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.export.exported_program import _decompose_exported_program
    from torch.onnx._internal.exporter import _fx_passes

    # as in the exporter: an axis that is free may have the length 1 as well
    with resolve_name(_PATCH)(backed_size_oblivious=True):
        with unset_fake_temporarily():
            made = _decompose_exported_program(
                program,
                cia_to_decomp=tables.kernels,
                python_decomp_table=dict(tables.traced),
                joint_loss_index=None,
                decompose_custom_triton_ops=False,
            )
        _fx_passes.insert_type_promotion_nodes(made.graph_module)
        made._graph_module = _fx_passes.remove_assertion_nodes(made.graph_module)
    return made


@functools.lru_cache(maxsize=1)
def _tables(registry: Any, decompositions: int) -> _Tables:
    """The decompositions of operators that ``registry`` does not translate."""
    from torch.export.exported_program import _split_decomp_table_to_cia_and_python_decomp
    from torch.onnx._internal.exporter import _decomp

    translated = set(_decomp.get_onnx_implemented_overloads(registry))
    table: Any = dict(_decomp.create_onnx_friendly_decomposition_table(translated))
    kernels, traced = _split_decomp_table_to_cia_and_python_decomp(table)
    return _Tables(
        {op: made for op, made in kernels.items() if not _is_taken_anyway(made)}, traced, frozenset(translated)
    )


def _is_taken_anyway(made: Callable[..., Any]) -> bool:
    return isinstance(made, functools.partial) and getattr(made.func, "__name__", "") == _ANYWAY


op: Any = onnxscript.opset21  # its annotations are those of a script, in which numbers are tensors
#: types that TopK of ONNX Runtime has a kernel for
_SORTED = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64, ir.DataType.INT32))


def squeeze_dim(self: Any, dim: int) -> Any:
    """``aten.squeeze.dim``: torch keeps an axis longer than 1, ``Squeeze`` refuses it.

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


def amax(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """``aten.amax``: of all values where no axis is given, for which torch's exporter has no default (2.13)."""
    return (
        op.ReduceMax(self, op.Constant(value_ints=list(dim)), keepdims=int(keepdim))
        if dim
        else op.ReduceMax(self, keepdims=int(keepdim))
    )


def amin(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """``aten.amin``, as :func:`amax`."""
    return (
        op.ReduceMin(self, op.Constant(value_ints=list(dim)), keepdims=int(keepdim))
        if dim
        else op.ReduceMin(self, keepdims=int(keepdim))
    )


def cumprod(self: Any, dim: int, dtype: int | None = None) -> Any:
    """``aten.cumprod``: the products of the rows of a triangle; operator ``CumProd`` is of opset 26."""
    x = self if dtype is None else op.Cast(self, to=dtype)
    if not self.shape:
        return op.Identity(x)
    rank = len(self.shape)
    axis = dim % rank
    last = [*(i for i in range(rank) if i != axis), axis]
    length = op.Shape(self, start=axis, end=axis + 1)
    square = op.Expand(op.CastLike(op.Constant(value_float=1.0), x), op.Concat(length, length, axis=0))
    below = op.Cast(op.Trilu(op.Cast(square, to=ir.DataType.FLOAT), upper=0), to=ir.DataType.BOOL)
    rows = op.Where(below, op.Unsqueeze(op.Transpose(x, perm=last), op.Constant(value_ints=[-2])), square)
    made = op.ReduceProd(rows, op.Constant(value_ints=[-1]), keepdims=0)
    return op.Transpose(made, perm=[last.index(i) for i in range(rank)])


#: of points from which on torch computes Euclidean distances by a product
_MANY = 25


def cdist(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
    """``aten._cdist_forward``: distances between the points of two sets, in the p-norm.

    Euclidean ones of many points are computed by a product, as torch does, the others of the differences of coordinates.
    """
    last, before = op.Constant(value_ints=[-1]), op.Constant(value_ints=[-2])
    many = any(not isinstance(x.shape[-2], int) or x.shape[-2] > _MANY for x in (x1, x2))
    if p == 2 and compute_mode != 2 and (many or compute_mode == 1):
        one, other = (op.ReduceSumSquare(x, last, keepdims=1) for x in (x1, x2))
        order = [*range(len(x2.shape) - 2), len(x2.shape) - 1, len(x2.shape) - 2]
        product = op.MatMul(x1, op.Transpose(x2, perm=order))
        two = op.CastLike(op.Constant(value_float=2.0), x1)
        squared = op.Sub(op.Add(one, op.Transpose(other, perm=order)), op.Mul(two, product))
        return op.Sqrt(op.Max(squared, op.CastLike(op.Constant(value_float=0.0), x1)))
    apart = op.Sub(op.Unsqueeze(x1, before), op.Unsqueeze(x2, op.Constant(value_ints=[-3])))
    if p == 2:
        return op.ReduceL2(apart, last, keepdims=0)
    apart = op.Abs(apart)
    if p == 1:
        return op.ReduceSum(apart, last, keepdims=0)
    if math.isinf(p):
        return op.ReduceMax(apart, last, keepdims=0)
    if p == 0:
        zero = op.CastLike(op.Constant(value_float=0.0), x1)
        return op.ReduceSum(op.CastLike(op.Greater(apart, zero), x1), last, keepdims=0)
    power, root = (op.CastLike(op.Constant(value_float=float(e)), x1) for e in (p, 1 / p))
    return op.Pow(op.ReduceSum(op.Pow(apart, power), last, keepdims=0), root)


def det(self: Any) -> tuple[Any, Any, Any]:
    """``aten._linalg_det``, whose factors are not part of what torch's functions return."""
    return op.Det(self), op.Identity(self), op.Identity(self)


def slogdet(self: Any) -> tuple[Any, Any, Any, Any]:
    """``aten._linalg_slogdet``: sign and logarithm of the absolute value of a determinant, as of ``logdet`` too.

    The rows are divided by their norms first, whose logarithms are added: the determinant of such a matrix is at most 1
    (Hadamard), where that of the matrix itself may be too large for float32.
    """
    last = op.Constant(value_ints=[-1])
    zero, one = (op.CastLike(op.Constant(value_float=value), self) for value in (0.0, 1.0))
    norms = op.ReduceL2(self, last, keepdims=1)
    norms = op.Where(op.Greater(norms, zero), norms, one)  # a row of zeros makes a determinant of zero
    made = op.Det(op.Div(self, norms))
    lengths = op.ReduceSum(op.Squeeze(op.Log(norms), last), last, keepdims=0)
    return op.Sign(made), op.Add(op.Log(op.Abs(made)), lengths), op.Identity(self), op.Identity(self)


def solve_triangular(self: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """``aten.linalg_solve_triangular`` by the inverse, which is made of blocks, each of two of half its size.

    ``[[P, 0], [C, Q]]`` has the inverse ``D - D [[0, 0], [C, 0]] D`` with ``D = [[P^-1, 0], [0, Q^-1]]``. A series of powers of
    the part below the diagonal would be as short, but its terms may be far larger than the inverse.

    Raises:
        ValueError: the number of rows is not known.
    """
    count = self.shape[-1]
    if not isinstance(count, int):
        raise ValueError(f"the number of rows, {count}, is not fixed")
    places = np.arange(count)
    one = op.CastLike(op.Constant(value_float=1.0), self)

    def constant(mask: Any) -> Any:
        return op.CastLike(op.Constant(value=ir.tensor(mask.astype(np.float32))), self)

    diagonal = constant(np.eye(count))
    inverse = (
        diagonal
        if unitriangular
        else op.Mul(diagonal, op.Div(one, op.Add(op.Mul(self, diagonal), op.Sub(one, diagonal))))
    )
    size = 1
    while size < count:
        block = places // size
        below = (block[:, None] % 2 == 1) & (block[None] == block[:, None] - 1)
        part = op.Mul(self, constant(below.T if upper else below))
        inverse = op.Sub(inverse, op.MatMul(op.MatMul(inverse, part), inverse))
        size *= 2
    return op.MatMul(inverse, B) if left else op.MatMul(B, inverse)


def rrelu(
    self: Any, noise: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> tuple[Any, Any]:
    """``aten.rrelu_with_noise_functional`` in evaluation, where the slope of negative values is the mean of its ends."""
    return op.LeakyRelu(self, alpha=(lower + upper) / 2), op.Identity(noise)


def adaptive_avg_pool3d(self: Any, output_size: Sequence[int]) -> Any:
    """``aten._adaptive_avg_pool3d``, where sizes of the input are multiples of those of the output.

    Raises:
        ValueError: they are not, or not known.
    """
    sizes = self.shape[-3:]
    if any(not isinstance(size, int) or size % want for size, want in zip(sizes, output_size, strict=True)):
        raise ValueError(f"sizes {list(sizes)} are no multiples of {list(output_size)}")
    steps = [size // want for size, want in zip(sizes, output_size, strict=True)]
    return op.AveragePool(self, kernel_shape=steps, strides=steps)


#: reduction of torch -> that of ``ScatterElements``, and the number that leaves its other operand as it is
_SCATTERED: dict[str, tuple[str, float | None]] = {
    "sum": ("add", 0.0),
    "mean": ("add", 0.0),
    "prod": ("mul", 1.0),
    "amax": ("max", None),
    "amin": ("min", None),
}


def scatter_reduce(self: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """``aten.scatter_reduce.two``; torch's exporter (2.13) writes a mean that is not a mean."""
    reduction, neutral = _SCATTERED[reduce]

    def filled(value: float) -> Any:
        return op.Expand(op.CastLike(op.Constant(value_float=value), src), op.Shape(index))

    start = self
    if not include_self:  # the largest and the smallest begin at one of their own values
        start = op.ScatterElements(self, index, src if neutral is None else filled(neutral), axis=dim)
    made = op.ScatterElements(start, index, src, axis=dim, reduction=reduction)
    if reduce != "mean":
        return made
    ones = op.Expand(op.CastLike(op.Constant(value_float=1.0), src), op.Shape(self))
    counted = ones if include_self else op.ScatterElements(ones, index, filled(0.0), axis=dim)
    return op.Div(made, op.ScatterElements(counted, index, filled(1.0), axis=dim, reduction="add"))


def unfold_backward(grad_in: Any, input_sizes: Any, dim: int, size: int, step: int) -> Any:
    """``aten.unfold_backward``: overlap-add of windows of a signal, the last axis (``istft``).

    Its decomposition writes indices of 32 bits, which ``ScatterND`` does not take.
    """
    rank = len(grad_in.shape) - 1
    axis = dim % rank
    one = op.Constant(value_int=1)
    count = op.Squeeze(op.Shape(grad_in, start=axis, end=axis + 1))
    starts = op.Mul(op.Range(op.Constant(value_int=0), count, one), op.Constant(value_int=step))
    offsets = op.Range(op.Constant(value_int=0), op.Constant(value_int=size), one)
    places = op.Add(op.Unsqueeze(starts, op.Constant(value_ints=[1])), offsets)
    order = [*range(axis + 1), rank, *range(axis + 1, rank)]
    rest = [op.Shape(grad_in, start=i, end=i + 1) if i != axis else op.Constant(value_ints=[-1]) for i in range(rank)]
    windows = op.Reshape(op.Transpose(grad_in, perm=order), op.Concat(*rest, axis=0))
    zeros = op.CastLike(op.Expand(op.Constant(value_float=0.0), input_sizes), grad_in)
    first, end, along = (op.Constant(value_ints=[i]) for i in (0, 1, axis))
    windows = op.Expand(
        windows, op.Shape(op.Slice(zeros, first, end, along))
    )  # one signal of windows serves all others
    indices = op.Reshape(places, op.Constant(value_ints=[-1 if i == axis else 1 for i in range(rank)]))
    return op.ScatterElements(zeros, op.Expand(indices, op.Shape(windows)), windows, axis=axis, reduction="add")


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
    torch.ops.aten.amax.default: amax,
    torch.ops.aten.amin.default: amin,
    torch.ops.aten._cdist_forward.default: cdist,
    torch.ops.aten.cumprod.default: cumprod,
    torch.ops.aten._linalg_det.default: det,
    torch.ops.aten._linalg_slogdet.default: slogdet,
    torch.ops.aten.linalg_solve_triangular.default: solve_triangular,
    torch.ops.aten.scatter_reduce.two: scatter_reduce,
    torch.ops.aten.rrelu_with_noise_functional.default: rrelu,
    torch.ops.aten._adaptive_avg_pool3d.default: adaptive_avg_pool3d,
    torch.ops.aten.unfold_backward.default: unfold_backward,
    torch.ops.bitwright.site.default: site,
}

OPSET = 21
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
    """Run the steps of torch's exporter one by one with ``registry``, starting with :func:`decomposed`."""
    from torch.onnx._internal.exporter import _core

    made = _core._exported_program_to_onnx_program(decomposed(program, registry), registry=registry)
    made.model = _core.onnxscript_apis.convert_version(made.model, OPSET)
    return optimized(made.model)


def by_registry(program: ExportedProgram, registry: Any) -> ir.Model:
    """Export by the implementation of ``torch.onnx.export``, with the translations of ``registry``."""
    from torch.onnx._internal.exporter import _core

    made = _core.export(
        program, (), registry=registry, dynamic_shapes={}, optimize=False, opset_version=OPSET, verbose=False
    )
    return optimized(made.model)


def takes_registry() -> bool:
    """Whether the implementation is the one that this module knows."""
    try:
        from torch.onnx._internal.exporter import _core, _registration
    except ImportError:
        return False
    known = hasattr(_registration, "ONNXRegistry") and hasattr(torch._C, "_dispatch_get_all_op_names")
    return known and _NEEDED <= inspect.signature(_core.export).parameters.keys()


def by_public_function(program: ExportedProgram) -> ir.Model:
    """Export by ``torch.onnx.export``."""
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
    return optimized(made.model)


@lru_cache(maxsize=1)
def _registry(operators: int) -> Any:
    """The exporter's registry, cached by torch's number of operators, since packages that add operators add translations."""
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry.from_torchlib(opset_version=OPSET)
    for target, function in TRANSLATIONS.items():
        registry.register_op(target, function, is_complex=False)
    return registry


Passed = list[tuple[Key, tuple[Any, ...], str]]
"""The calls of a run in order: the place of each, the shapes of what it returned, and the name of a layer, norm or activation."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTIONS = os.path.join(_TORCH, "distributions") + os.sep
_PACKAGES = (_TORCH, str(Path(__file__).parents[2]) + os.sep)
_TOOLS = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (ir, onnxscript))

_aten = torch.ops.aten
#: what takes only the shape of its other operands
_SHAPED_LIKE = {_aten.expand_as.default, _aten.view_as.default, _aten.reshape_as.default, _aten.type_as.default}
#: what reads a number out of a tensor
_READS = {_aten.item.default, _aten._local_scalar_dense.default}
#: what only stops a run, or reads a number for that
_CHECKS = {
    _aten._assert_async.default, _aten._assert_async.msg, _aten._assert_scalar.default, _aten._assert_tensor_metadata.default,
    _aten.sym_constrain_range.default, _aten.sym_constrain_range_for_size.default,
    _aten._functional_assert_async.msg, _aten._functional_assert_scalar.default,
    _aten._functional_sym_constrain_range.default, _aten._functional_sym_constrain_range_for_size.default,
}  # fmt: skip


def group_of(key: Key) -> Key:
    """The calls that are distinguished by counting, so that an additional one shifts the others."""
    if not isinstance(key, tuple):
        return key
    held = key[:3] if len(key) == 4 and isinstance(key[3], int) else key
    return tuple(group_of(part) for part in held)


def other_path(plans: dict[Key, CallPlan], recorded: Passed, traced: Passed) -> str | None:
    """The first place where a traced run makes other calls than the recorded one; ``None`` if none.

    Calls with quantizers count, and layers, norms and activations with and without: a trace that has one more is of another
    network.
    """
    held = {group_of(key): name for key, _, name in (*recorded, *traced) if name}
    held |= {group_of(key): plan.op for key, plan in plans.items() if plan.operands or plan.outputs or plan.inside}
    one, other = (
        [(group_of(key), shapes) for key, shapes, _ in run if group_of(key) in held] for run in (recorded, traced)
    )
    for (group, shapes), (found, seen) in zip(one, other, strict=False):
        if group != found or not _fits(shapes, seen):
            return held[group]
    longer = one[len(other) :] or other[len(one) :]
    return held[longer[0][0]] if longer else None


def _fits(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    if len(one) != len(other) or any(len(a) != len(b) for a, b in zip(one, other, strict=True)):
        return False
    pairs = (pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True))
    return all(a == b or a is None or b is None for a, b in pairs)


def captured(
    sim: SimulatedModule, flat: nn.Module, call: tuple[Any, Any], tensors: tuple[torch.Tensor, ...], shapes: Any
) -> tuple[ExportedProgram, list[str]]:
    """The program of ``sim.model`` with a mark at every site, and notes on it.

    Args:
        sim: the simulation, whose calls nobody handles at present.
        flat: its model, from ``tensors`` to tensors.
        call: the arguments of the model that hold ``tensors``; left alone.
        tensors: what ``flat`` takes.
        shapes: ``dynamic_shapes`` of ``torch.export``.

    Raises:
        ModelError: the model makes other calls while it is traced, and cannot be recorded, or has axes of free length.
        Whatever ``torch.export`` raises, or ``make_fx`` where that is more to the point, with the other as its cause.
    """
    code = scripted_code(sim.model)
    traced: Passed = []
    try:
        recorded = _recorded_run(sim, *call)
        with sim._interceptor.handled_by(_Noting(sim._simulator.variant("mark"), traced), code):
            with same_draws():
                program = torch.export.export(flat, tensors, dynamic_shapes=shapes, strict=False)
        place = other_path(sim._simulator.plans, recorded, traced)
        if place is None:
            return translatable(program, line_of), []
        raise ModelError(
            place,
            "the forward makes other calls there while it is traced than on data, so that its quantizers would be at other "
            "values",
            "let the forward take one path, whatever torch.compiler.is_exporting() and is_compiling() say, or leave the axes at "
            "the lengths of the example (dynamic_batch=False)",
        )
    except BusyError:
        raise
    except Exception as error:
        if shapes is not None:
            raise
        first = error
    try:
        with sim._interceptor.handled_by(sim._simulator.variant("mark")):
            return recorded_program(flat, sim.model, tensors)
    except ModelError as error:
        raise error from first
    except Exception as error:
        raise first from error


class _Noting(Handler):
    """A handler that notes the calls of another handler."""

    def __init__(self, handler: Handler, passed: Passed) -> None:
        self._handler, self._passed = handler, passed

    def begin(self, args: Args, kwargs: Mapping[str, Any]) -> None:
        """As the other handler."""
        self._handler.begin(args, kwargs)

    def end(self, output: Any) -> None:
        """As the other handler."""
        self._handler.end(output)

    def part(self, path: str, caller: str | None) -> bool:
        """As the other handler."""
        return self._handler.part(path, caller)

    def call(self, frame: Frame, key: Key, row: Function, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """As the other handler."""
        output = self._handler.call(frame, key, row, func, args, kwargs)
        name = ""
        if (
            op_row(kind := row.op_type(row.bind(args, kwargs))).kind in ("compute", "norm")
            or kind in TRAITS["activation"]
        ):
            name = f"{frame.path}.{row.label}" if frame.path else row.label
        self._passed.append((key, _shapes_of(output), name))
        return output

    def other(self, frame: Frame, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """As the other handler; notes counted data movement, since some of it has a quantizer."""
        row = function_of(func)
        counted = ("moves", None if row is None else row.label)
        before = frame.counts.get(counted, 0)
        output = self._handler.other(frame, func, args, kwargs)
        if frame.counts.get(counted, 0) > before:
            self._passed.append(((frame.key, frame.anchor, counted[1], before), _shapes_of(output), ""))
        return output


def _shapes_of(output: Any) -> tuple[Any, ...]:
    """The shapes of the tensors in ``output``; ``None`` for an axis of free length."""
    return tuple(tuple(n if type(n) is int else None for n in t.shape) for t in tensors_in(output))


def _recorded_run(sim: SimulatedModule, args: Any, kwargs: Any) -> Passed:
    """The calls of an untraced forward."""
    passed: Passed = []
    given, named = map_tensors((args, kwargs), lambda t: t.clone())
    with sim._interceptor.handled_by(_Noting(sim._simulator.variant("float"), passed)), same_draws():
        sim.model(*given, **named)
    return passed


class _Recorded(nn.Module):
    """The calls of one run, on the parameters of the model."""

    def __init__(self, model: nn.Module, program: fx.GraphModule, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.program, self._names = model, program, list(names)

    def forward(self, *tensors: torch.Tensor) -> Any:
        state = dict(named_state(self.model))
        with preserve_node_meta():  # the lines of code of the calls
            return fx.Interpreter(self.program).run([state[name] for name in self._names], *tensors)


def recorded_program(
    flat: nn.Module, model: nn.Module, tensors: Sequence[torch.Tensor]
) -> tuple[ExportedProgram, list[str]]:
    """A program of the calls that ``flat`` makes on ``tensors`` untraced, and notes on numbers that it fixes.

    Args:
        flat: a module around ``model``.
        model: has the parameters.
        tensors: its inputs.

    Raises:
        ModelError: values that the model computes decide on what it computes next, or calls are made where they cannot be seen.
        Whatever ``torch.export`` raises of the calls.
    """
    state: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for name, tensor in named_state(model):
        if id(tensor) not in known:
            known.add(id(tensor))
            state[name] = tensor
    given = [t.clone() for t in tensors]  # whatever the run writes into

    def run(_parameters: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
        return flat(*inputs)

    record = make_fx(
        run,
        pre_dispatch=True,
        _allow_non_fake_inputs=True,
        _error_on_data_dependent_ops=False,
        record_stack_traces=True,
    )
    with same_draws(), preserve_node_meta(), _Recording():
        traced = record(list(state.values()), *given)
    _refuse_transformed(traced)
    notes = _fixed(traced, list(state.values()), tensors)
    without_checks(traced)
    names = list(state)
    program = torch.export.export(_Recorded(model, traced, names).eval(), tuple(tensors), strict=False)
    return translatable(program, line_of), notes


class _Recording(TorchFunctionMode):
    """Adds to a recording what calls alone do not show.

    That is the line of code of each call, of which torch keeps those of functions called ``forward`` alone, and a read of a
    number where numpy gets a tensor's values.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        set_stack_trace(_innermost_line())
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and args[0].numel():
            args[0].detach().reshape(-1)[0].item()
        return func(*args, **(kwargs or {}))


def _innermost_line() -> list[str]:
    """The line of the innermost calling function outside of torch and this package, as in a traceback."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_PACKAGES, "<")):
        frame = frame.f_back
    if frame is None:
        return []
    return [f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n']


def _refuse_transformed(traced: fx.GraphModule) -> None:
    for name, tensor in vars(traced).items():
        if isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise ModelError(
                type(traced).__name__,
                f"a torch.func transform (vmap, grad, ...) computes {name}, whose calls cannot be recorded",
                "write this part without the transform",
            )


def _fixed(traced: fx.GraphModule, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[str]:
    """Fix shapes that depend on input values, and note them and the numbers that the run read.

    Args:
        traced: takes the parameters, then the inputs; what finds rows by a condition becomes a constant.
        parameters, tensors: what it was recorded on.

    Raises:
        ModelError: the run took a number from what it computed of float inputs, or of inputs and parameters.
    """
    lines: dict[str, None] = {}
    found: list[fx.Node] = []
    for node, learned in _of_inputs(traced, parameters, tensors):
        reads = node.target in _READS
        finds = torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())
        if not (reads or finds) or _only_checks(node):
            continue
        if reads and learned:
            raise _two_paths(node)
        if not learned:
            lines[line_of(node)] = None
            found += [node] if finds else []
    if found:
        _write_down(traced, found, parameters, tensors)
    if not lines:
        return []
    return [
        "path: the file computes what the model computes of this example, also for inputs of which it would compute something "
        f"else: {'; '.join(lines)} reads numbers out of inputs, which are constants in the file"
    ]


_BY_TENSORS = (
    "choose by tensors, torch.where(condition, a, b), give a loop a fixed number of turns, or leave the check out while the "
    "model is exported"
)
_AS_FOUND = (
    "let this loop go over all parts, such as all experts, and not over those that nonzero found: for a part without rows it "
    "adds nothing, and the outputs are the same"
)
_MOVES = frozenset((
    _aten.select.int, _aten.unbind.int, _aten.squeeze.default, _aten.squeeze.dim, _aten.view.default, _aten.reshape.default,
    _aten.flatten.using_ints, _aten.slice.Tensor, _aten.detach.default, _aten.to.dtype, operator.getitem,
))  # fmt: skip


def _two_paths(node: fx.Node) -> ModelError:
    return ModelError(
        line_of(node),
        "a number that Python reads there out of a computed tensor decides on what is computed next, and a file holds one path",
        _AS_FOUND if _is_found(node) else _BY_TENSORS,
    )


def _is_found(node: fx.Node) -> bool:
    """Whether a number that is read is the place of something that a condition found."""
    while node.all_input_nodes and (node.target in _READS or node.target in _MOVES):
        node = node.all_input_nodes[0]
    return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())


def _of_inputs(
    traced: fx.GraphModule, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[fx.Node, bool]]:
    """Values that depend on inputs -> whether on float inputs or parameters."""
    given = (*parameters, *tensors)
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    of_inputs = set(placeholders[len(parameters) :])
    learned = {node for node, tensor in zip(placeholders, given, strict=True) if tensor.is_floating_point()}
    for node in traced.graph.nodes:
        sources = node.all_input_nodes[: 1 if node.target in _SHAPED_LIKE else None]
        if of_inputs.intersection(sources):
            of_inputs.add(node)
        if learned.intersection(sources):
            learned.add(node)
        if node in of_inputs:
            yield node, node in learned


class _Values(fx.Interpreter):
    """Runs a program and keeps the results of some of its nodes."""

    def __init__(self, program: fx.GraphModule, wanted: Sequence[fx.Node]) -> None:
        super().__init__(program)
        self.kept: dict[fx.Node, Any] = dict.fromkeys(wanted)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self.kept:
            self.kept[n] = result
        return result


def _write_down(
    traced: fx.GraphModule,
    nodes: Sequence[fx.Node],
    parameters: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> None:
    """Replace nodes by their results in this run."""
    values = _Values(traced, nodes)
    with same_draws():
        values.run([t.clone() for t in parameters], *(t.clone() for t in tensors))
    for node, value in values.kept.items():
        if isinstance(value, torch.Tensor):
            name = f"_found_{node.name}"
            traced.register_buffer(name, value)
            with traced.graph.inserting_before(node):
                node.replace_all_uses_with(traced.graph.get_attr(name))
            _erase(traced.graph, node)
    traced.recompile()


def simplify(program: ExportedProgram) -> None:
    """Remove from a captured program what no output depends on, including marks, and batch norms that change nothing.

    Folding leaves such batch norms where a module computes more than its norm, or a forward calls the function. Between
    a layer and its quantizer they would keep the layer on float kernels.
    """
    held = {**program.constants, **program.state_dict}
    names = {**program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers}
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
        given, *others = node.args[:5]
        tensors = [held.get(names.get(other.name, "")) if isinstance(other, fx.Node) else other for other in others]
        if isinstance(given, fx.Node) and not node.args[5] and _changes_nothing(tensors, node.args[7]):
            node.replace_all_uses_with(given)
    for part in _graphs(program.graph_module):
        part.graph.eliminate_dead_code()
        part.recompile()


def _changes_nothing(params: Sequence[Any], eps: Any) -> bool:
    """Whether a batch norm of these parameters (weight, bias, mean, variance; ``None`` is none) returns what it is given."""
    weight, bias, mean, variance = params
    known = isinstance(mean, torch.Tensor) and isinstance(variance, torch.Tensor) and isinstance(eps, float)
    if not known or not all(one is None or isinstance(one, torch.Tensor) for one in (weight, bias)):
        return False
    exact = bool((mean == 0).all()) and bool((variance + eps == 1).all())
    return exact and (weight is None or bool((weight == 1).all())) and (bias is None or bool((bias == 0).all()))


def take_runs(model: ir.Model) -> dict[str, list[int]]:
    """Site -> the runs of its place in a converted program, in the order of its marks.

    The exporter keeps marks apart whose numbers differ. Here the numbers are taken out, and of calls on the same value one is
    left, which stands for the first of their runs.
    """
    for node in _marks_of(model):
        name, _, run = site_of(node).partition(RUN)
        if run:
            node.meta[_RUN] = int(run)
            node.attributes[ATTRIBUTE] = ir.AttrString(ATTRIBUTE, name)
    common_passes.CommonSubexpressionEliminationPass()(model)
    left: dict[str, list[int]] = {}
    for node in _marks_of(model):
        if _RUN in node.meta:
            left.setdefault(site_of(node), []).append(node.meta[_RUN])
    return left


def _marks_of(model: ir.Model) -> list[ir.Node]:
    """All marks, including those in functions."""
    parts: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    return [node for part in parts for node in all_nodes(part) if is_site(node)]


def line_of(node: fx.Node) -> str:
    """The innermost line of code, outside of torch and this package, that made the call: ``model.py:12, in forward``."""
    own = [place for place in _stack(node) if not place[0].startswith(_PACKAGES)]
    if not own:
        return "a line that is not known"
    path, line, function = own[-1]
    return f"{Path(path).name}:{line}, in {function}"


_NO_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='(\w+)\.(\w+)'")


def untranslated(program: ExportedProgram, message: str) -> str:
    """The function that torch's exporter cannot translate, with the lines that call it; "" for other errors."""
    named = _NO_OPERATOR.search(message)
    if named is None:
        return ""
    name = named[2].strip("_")  # what a decomposition calls often has an underscore more
    nodes = (node for part in _graphs(program.graph_module) for node in part.graph.nodes)
    called = [node for node in nodes if str(node.target).split(".")[1:2] in ([name], [named[2]])]
    lines = dict.fromkeys(map(line_of, called))
    return f"{named[1]}.{named[2]}" + (f", called at {'; '.join(lines)}" if lines else "")


def raised_at(error: BaseException | None) -> str | None:
    """The innermost line outside of torch and this package that raised the first error of a chain, as in :func:`line_of`.

    ``None`` where there is none: torch's converter failed on a graph, with no forward around it.
    """
    found: str | None = None
    while error is not None and found is None:
        for frame, line in traceback.walk_tb(error.__traceback__):
            path = frame.f_code.co_filename
            if not path.startswith((*_PACKAGES, *_TOOLS, "<")) and os.path.dirname(path) != os.path.dirname(
                os.__file__
            ):
                found = f"{Path(path).name}:{line}, in {frame.f_code.co_name}"
        error = error.__cause__ or error.__context__
    return found


def _only_checks(node: fx.Node) -> bool:
    """Whether the code that reads the number only raises errors.

    That are functions of torch, its own checks and those of distributions; and the model's assertions, and conditions under
    which it does nothing but raise.
    """
    stack = _stack(node)
    own = [i for i, place in enumerate(stack) if not place[0].startswith(_PACKAGES)]
    if own and int(stack[own[-1]][1]) in _lines_of_checks(stack[own[-1]][0]):
        return True
    return any(
        function.startswith("_check") or path.startswith(_DISTRIBUTIONS)
        for path, _, function in stack[own[-1] + 1 if own else 0 :]
        if path.startswith(_TORCH)
    )


@lru_cache(maxsize=64)
def _lines_of_checks(path: str) -> frozenset[int]:
    """The lines of a file with statements that can only raise; none if the file cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return frozenset()
    found: set[int] = set()
    for node in ast.walk(tree):
        checked: ast.AST | None = None
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Expr) and _calls_check(node.value)):
            checked = node
        elif isinstance(node, ast.If) and not node.orelse and all(isinstance(one, ast.Raise) for one in node.body):
            checked = node.test
        if checked is not None and not any(isinstance(part, ast.NamedExpr) for part in ast.walk(checked)):
            found.update(range(checked.lineno, (checked.end_lineno or checked.lineno) + 1))  # type: ignore[attr-defined]
    return frozenset(found)


def _calls_check(value: ast.expr) -> bool:
    """Whether an expression is ``torch._check(...)``, ``torch._assert(...)`` or another of torch's checks."""
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr.startswith(("_check", "_assert"))


def _stack(node: fx.Node) -> list[tuple[str, str, str]]:
    return re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")


def without_checks(module: fx.GraphModule) -> None:
    """Remove assertions, which ONNX has no operators for, and nodes computed only for them."""
    for part in _graphs(module):
        dropped = [
            node for node in part.graph.nodes if node.target in _CHECKS or (node.target in _READS and not node.users)
        ]
        for node in dropped:
            _erase(part.graph, node)
        if dropped:
            part.recompile()


def translatable(program: ExportedProgram, line_of: Callable[[fx.Node], str]) -> ExportedProgram:
    """A program without operators that torch's ONNX exporter lacks or translates wrongly.

    Raises:
        ModelError: it holds what cannot be rewritten, see :func:`in_order_of_memory` and :func:`complex_as_pairs`.
    """
    without_checks(program.graph_module)
    scatter_what_is_placed(program.graph_module)
    in_order_of_memory(program.graph_module)
    subtract_from_numbers(program.graph_module)
    return complex_as_pairs(program, line_of)


def in_order_of_memory(module: fx.GraphModule) -> None:
    """Permute inputs of ``as_strided`` into their memory order.

    ``as_strided`` counts elements of the memory; its translation of torch's exporter counts those of the tensor in the order of
    its axes, which is another one after a transpose, and answers other values without a word.

    Raises:
        ModelError: the elements are not dense in memory (expanded, sliced), or others than those of the tensor are read.
    """
    for part in _graphs(module):
        found = [node for node in part.graph.nodes if node.target is _aten.as_strided.default]
        for node in found:
            _read_in_order(part.graph, node)
        if found:
            part.recompile()


def _read_in_order(graph: fx.Graph, node: fx.Node) -> None:
    """Permute the input of one call of ``as_strided``."""
    tensor: Any = node.args[0]
    size: Any = node.args[1]
    stride: Any = node.args[2]
    read, first = tensor.meta["val"], _first_read(node)
    order = sorted(range(read.dim()), key=read.stride, reverse=True)
    lengths, steps = ([n.meta["val"] if isinstance(n, fx.Node) else n for n in of] for of in (size, stride))
    last = first + sum((n - 1) * step for n, step in zip(lengths, steps, strict=True))
    if not read.permute(order).is_contiguous() or first < 0 or last >= read.numel():
        raise ModelError(
            line_of(node),
            f"as_strided reads memory there that the tensor, of shape {tuple(read.shape)} and strides {read.stride()}, does not "
            "hold in this order",
            "call .contiguous() on the tensor before, or use unfold or indices, which a file has operators for",
        )
    with graph.inserting_before(node):
        ordered = graph.call_function(_aten.permute.default, (tensor, order))
    ordered.meta["val"] = read.permute(order)
    node.args, node.kwargs = (ordered, size, stride, first), {}


def _first_read(node: fx.Node) -> int:
    """The offset of the first element that ``as_strided`` reads; -1 where it depends on a free axis."""
    tensor: Any = node.args[0]
    offset: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    if offset is None:
        return 0
    return int(offset - tensor.meta["val"].storage_offset()) if isinstance(offset, int) else -1


def subtract_from_numbers(module: fx.GraphModule) -> None:
    """Write ``1.0 - x`` of integers, as models compute masks, as ``-x + 1.0``.

    Torch's exporter writes the difference with the number in front, for which it then finds no operator of two types (2.13).
    """
    rsub = (_aten.rsub.Scalar, _aten.rsub.Tensor)
    for part in _graphs(module):
        found = [node for node in part.graph.nodes if node.target in rsub and _is_of_integers(node)]
        for node in found:
            value: Any = node.args[0]
            number = node.args[1]
            factor: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
            with part.graph.inserting_before(node):
                taken = part.graph.call_function(_aten.mul.Scalar, (value, -factor))
            taken.meta["val"] = value.meta["val"] * -1
            node.target = _aten.add.Tensor if isinstance(number, fx.Node) else _aten.add.Scalar
            node.args, node.kwargs = (taken, number), {}
        if found:
            part.recompile()


def scatter_what_is_placed(module: fx.GraphModule) -> None:
    """Slice the values of ``scatter`` to the shape of its index.

    Torch leaves the rest unread; ONNX's ScatterElements takes values and indices of one shape.
    """
    scatters = (_aten.scatter.src, _aten.scatter_add.default, _aten.scatter_reduce.two)
    for part in _graphs(module):
        found = [node for node in part.graph.nodes if node.target in scatters]
        for node in found:
            _, _, index, values, *rest = node.args
            for axis, size in enumerate(index.meta["val"].shape):
                held = values.meta["val"]
                if size == held.shape[axis]:
                    continue
                with part.graph.inserting_before(node):
                    cut = part.graph.call_function(_aten.slice.Tensor, (values, axis, 0, size))
                cut.meta["val"], values = torch.narrow(held, axis, 0, size), cut
            node.args = (*node.args[:3], values, *rest)
        if found:
            part.recompile()


def _is_of_integers(node: fx.Node) -> bool:
    """Whether the subtracted tensor holds integers and the result floats."""
    value: Any = node.args[0]
    return not value.meta["val"].is_floating_point() and bool(node.meta["val"].is_floating_point())


def _graphs(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    return (part for part in module.modules() if isinstance(part, fx.GraphModule))


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    pending = [node]
    while pending:
        last = pending.pop()
        if last.users or last._erased or last.op in ("placeholder", "output"):
            continue
        sources = last.all_input_nodes
        graph.erase_node(last)
        pending += [source for source in sources if not _writes(source)]


def _writes(node: fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


# what the rules of the exporter take for zero and for one, with a margin
_NEXT_TO_ZERO, _NEXT_TO_ONE = 1e-7, 1e-4
#: the names in the function whose place :func:`_optimize` takes, and attributes of rules that it reads
_KNOWN = {
    "_constant_folding", "FoldConstantsPass", "InlinePass", "LiftConstantsToInitializersPass", "ir", "passes", "PassManager",
    "LiftSubgraphInitializersToMainGraphPass", "DeduplicateInitializersPass", "CommonSubexpressionEliminationPass",
    "OutputFixPass", "NameFixPass", "RewritePass", "_DEFAULT_REWRITE_RULES", "RemoveUnusedFunctionsPass", "in_place", "model",
    "RemoveUnusedNodesPass", "RemoveUnusedOpsetsPass", "Sequential", "common_passes", "rewriter",
}  # fmt: skip


class _Rule:
    """A rule of the exporter that checks the operator of a node first."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self.name, self.remove_nodes, self.as_function = rule.name, rule.remove_nodes, rule.as_function
        self.graph_pre_visitor, self.graph_post_visitor = rule.graph_pre_visitor, rule.graph_post_visitor
        end = rule._target_pattern.output_nodes[0].op_identifier()
        self._end = end if isinstance(rule._matcher, _matcher.SimplePatternMatcher) else None

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        """As the rule; ``None`` where nothing matches."""
        if self._end is not None and (node.op_type != self._end[1] or node.domain != self._end[0]):
            return None
        return self._rule.try_rewrite(model, graph, node, **options)


@functools.cache
def _rules() -> Any:
    """The rules of the exporter; ``None`` where this module does not support its implementation."""
    try:
        known = set(inspect.unwrap(_optimizer.optimize_ir).__code__.co_names) == _KNOWN
        rules: list[Any] = [_Rule(rule) for rule in rewriter._DEFAULT_REWRITE_RULES]
        return rewriter.RewriteRuleSet(rules) if known else None
    except AttributeError:
        return None


def _optimize(model: ir.Model) -> None:
    """As ``onnxscript.optimizer.optimize_ir``."""
    rules = _rules()
    if rules is None:
        optimizer.optimize_ir(model)
        return
    limits = (
        _constant_folding.DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
        _constant_folding.DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
    )
    steps = (
        _constant_folding.FoldConstantsPass(
            shape_inference=True, input_size_limit=limits[0], output_size_limit=limits[1], should_fold=lambda node: None
        ),
        rewriter.RewritePass(rules),
        common_passes.RemoveUnusedNodesPass(),
        common_passes.RemoveUnusedFunctionsPass(),
        common_passes.RemoveUnusedOpsetsPass(),
    )
    ir.passes.Sequential(
        common_passes.InlinePass(),
        ir.passes.PassManager(steps, steps=2, early_stop=True),
        common_passes.RemoveUnusedNodesPass(),
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common_passes.LiftSubgraphInitializersToMainGraphPass(),
        common_passes.DeduplicateInitializersPass(),
        common_passes.CommonSubexpressionEliminationPass(),
        common_passes.OutputFixPass(),
        common_passes.NameFixPass(),
    )(model)


def optimized(model: ir.Model) -> ir.Model:
    """The model of an exported program, optimized as torch's exporter does, without losing constants.

    Its rules take an addition of up to 1e-8 for one of zero, and a product with up to 1.00001 for one with one: of
    ``x / (y + 1e-15)`` they leave ``x / y``. Such constants are inputs of the graph while the rules look at it. So are
    parameters of equal values, of which it would keep one: each has a name and an encoding of its own.
    """
    hidden = _hide(model)
    _optimize(model)
    graph = model.graph
    for value in [value for value in graph.inputs if value.name in hidden]:
        graph.inputs.remove(value)
        if value.uses():
            value.const_value = hidden[str(value.name)]
            graph.register_initializer(value)
    if hidden:
        optimizer.fold_constants(model)
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        common_passes.RemoveUnusedNodesPass()(model)
    return model


def _hide(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Turn constants that a rule would mistake for zero or one, or merge with equal ones, into inputs; returns them by name."""
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
    for name, stored in _merged_or_mistaken(model):
        hidden[name] = stored
        value = model.graph.initializers.pop(name)
        value.const_value = None
        model.graph.inputs.append(value)
    return hidden


def _merged_or_mistaken(model: ir.Model) -> list[tuple[str, ir.TensorProtocol]]:
    """Initializers that the exporter would merge with an equal one, or mistake for zero or one."""
    largest = common_passes.DeduplicateInitializersPass().size_limit
    seen: set[tuple[Any, ...]] = set()
    found = []
    for name, value in model.graph.initializers.items():
        stored = value.const_value
        if stored is None or value.is_graph_output():
            continue
        content = (stored.dtype, tuple(stored.shape), stored.tobytes()) if stored.size <= largest else (name,)
        if content in seen or _is_mistaken(stored):
            found.append((name, stored))
        seen.add(content)
    return found


def _is_mistaken(tensor: ir.TensorProtocol) -> bool:
    """Whether a scalar is close to zero or one but not equal to it."""
    if len(tensor.shape) or not tensor.dtype.is_floating_point():
        return False
    value = float(tensor.numpy())
    return (abs(value) <= _NEXT_TO_ZERO and value != 0) or (abs(value - 1) <= _NEXT_TO_ONE and value != 1)
