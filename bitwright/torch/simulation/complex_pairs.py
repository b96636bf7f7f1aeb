"""Rewrite complex tensors of an exported program as pairs of real ones, since ONNX has no complex operators.

What moves, adds or scales elements does so to the real and to the imaginary part; products, quotients, absolute values and the
like are written out. A Fourier transform takes and returns the complex tensor, for which torch's exporter has a real one with
one more axis, the last, of length two. So have files for inputs, outputs and buffers that are complex.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx  # noqa: TID251, the language of programs that torch.export returns
from torch.export import ExportedProgram

from bitwright.errors import ModelError

_aten: Any = torch.ops.aten

#: complex type -> the type of its parts
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

#: what does the same to both parts: movements, sums, means, signs
_OF_EACH = frozenset(
    (
        "_unsafe_view", "add", "alias", "broadcast_to", "cat", "chunk", "clone", "concat", "constant_pad_nd", "contiguous",
        "copy", "cumsum", "detach", "detach_", "diagonal", "diff", "dropout", "expand", "flatten", "flip", "gather", "index",
        "index_add", "index_copy", "index_put", "index_select", "lift_fresh_copy", "masked_fill", "masked_select", "mean", "mT",
        "movedim", "narrow", "neg", "new_zeros", "numpy_T", "pad", "permute", "repeat", "repeat_interleave", "reshape",
        "roll", "scatter", "scatter_add", "select", "select_scatter", "slice", "slice_scatter", "split",
        "split_with_sizes", "squeeze", "stack", "sub", "sum", "swapaxes", "swapdims", "t", "take_along_dim", "tensor_split",
        "tile", "transpose", "tril", "triu", "unbind", "unflatten", "unsqueeze", "view", "where", "zeros_like",
    )
)  # fmt: skip
#: what makes tensors of one value out of sizes
_MADE = ("zeros", "empty", "ones", "full")
#: their operands that may be real while another is complex
_JOINED = ("self", "other", "tensors", "value", "values", "source", "src")
#: what takes complex tensors in a file as well, or returns them
_TRANSFORMS = ("_fft_", "fft_", "stft", "istft")


class _Pair(NamedTuple):
    """The parts of a complex value, or of a list of complex values."""

    real: Any
    imag: Any


def complex_as_pairs(program: ExportedProgram, line_of: Callable[[fx.Node], str]) -> ExportedProgram:
    """``program`` with real and imaginary parts in place of complex values; unchanged without any.

    Args:
        program: what ``torch.export`` captured.
        line_of: the line of the model that a node is from, for errors.

    Raises:
        ModelError: an operator on complex numbers that this module has no arithmetic for.
    """
    if not any(_is_complex(node) for node in program.graph.nodes):
        return program
    program = program.run_decompositions({})  # after which nothing is written in place
    module = program.graph_module
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        _Rewriting(module.graph, line_of).run()
    module.recompile()
    return program


def _is_complex(node: fx.Node) -> bool:
    made = node.meta.get("val")
    return any(
        isinstance(v, torch.Tensor) and v.is_complex() for v in (made if isinstance(made, list | tuple) else [made])
    )


class _Rewriting:
    """Rewrites the nodes of a graph in one pass."""

    def __init__(self, graph: fx.Graph, line_of: Callable[[fx.Node], str]) -> None:
        self._graph, self._line_of = graph, line_of
        self._tracer = fx.proxy.GraphAppendingTracer(graph)
        self._pairs: dict[fx.Node, _Pair] = {}

    def run(self) -> None:
        """Replace every node that computes or reads complex values by nodes on their parts."""
        old = []
        for node in list(self._graph.nodes):
            if node.op not in ("call_function", "output") or not any(map(_is_complex, [node, *node.all_input_nodes])):
                continue
            with self._graph.inserting_before(node):
                if node.op == "output" or _name(node).startswith(_TRANSFORMS):
                    self._read_whole(node)
                    continue
                made = self._rewritten(node)
            old.append(node)
            if isinstance(made, _Pair):
                self._pairs[node] = made
            else:
                made.node.meta.update(node.meta)
                node.replace_all_uses_with(made.node)
        for node in reversed(old):
            self._graph.erase_node(node)

    def _rewritten(self, node: fx.Node) -> _Pair | fx.Proxy:
        args = fx.node.map_aggregate(node.args, self._operand)
        kwargs: Any = fx.node.map_aggregate(node.kwargs, self._operand)
        name = _name(node)
        if name in _RULES:
            return _RULES[name](*args, **kwargs)
        if name in _MADE:
            call = partial(self._tracer.create_proxy, "call_function", kwargs=_side(kwargs, 0))
            if name == "full":
                return _Pair(*(call(node.target, (args[0], fill)) for fill in _parts(args[1])))
            return _Pair(call(node.target, args), call(_aten.zeros.default, args))
        if name in _OF_EACH and not isinstance(kwargs.get("alpha"), _Pair):
            return _of_each(node.target, args, kwargs)
        raise ModelError(
            self._line_of(node),
            f"{name} of complex numbers has no operator in a file",
            "compute it from the real and imaginary parts there, by sums and products",
        )

    def _operand(self, value: Any) -> Any:
        """An argument of a node, in the form that rules take."""
        if isinstance(value, complex):
            return _Pair(value.real, value.imag)
        if not isinstance(value, fx.Node):
            return value
        proxy = fx.Proxy(value, self._tracer)
        if not _is_complex(value):
            return proxy
        if value not in self._pairs:
            both = _aten.view_as_real.default(proxy)
            self._pairs[value] = _Pair(_aten.select.int(both, -1, 0), _aten.select.int(both, -1, 1))
        return self._pairs[value]

    def _read_whole(self, node: fx.Node) -> None:
        """Let ``node`` read complex tensors, assembled from their parts."""
        for source in node.all_input_nodes:
            if source in self._pairs and source.op == "call_function" and not _name(source).startswith(_TRANSFORMS):
                made = _aten.complex.default(*self._pairs[source]).node
                made.meta["val"] = source.meta["val"]
                node.replace_input_with(source, made)


def _name(node: fx.Node) -> str:
    schema: Any = getattr(node.target, "_schema", None)
    return str(getattr(node.target, "__name__", "")) if schema is None else schema.name.removeprefix("aten::")


def _of_each(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Pair:
    """Apply the call to the real parts, and to the imaginary parts."""
    names = [argument.name for argument in target._schema.arguments]
    given = [_parts(value) if name in _JOINED else value for name, value in zip(names, args, strict=False)]
    named = {name: _parts(value) if name in _JOINED else value for name, value in kwargs.items()}
    return _Pair(*(target(*_side(given, i), **_side(named, i)) for i in (0, 1)))


def _parts(value: Any) -> Any:
    """The parts of an operand; the imaginary part of a real one is zero."""
    if isinstance(value, list | tuple) and not isinstance(value, _Pair):
        return [_parts(v) for v in value]
    if isinstance(value, fx.Proxy):
        return _Pair(value, _aten.zeros_like.default(value))
    return _Pair(value, 0.0) if isinstance(value, int | float) else value


def _side(value: Any, i: int) -> Any:
    """Replace pairs by their real (0) or imaginary (1) parts."""
    if isinstance(value, _Pair):
        return value[i]
    if isinstance(value, list | tuple):
        return [_side(v, i) for v in value]
    if isinstance(value, dict):
        return {name: _side(v, i) for name, v in value.items()}
    return _PARTS.get(value, value) if isinstance(value, torch.dtype) else value


# ------------------------------------------------------------------------------- arithmetic of two parts


def _product(times: Callable[[Any, Any], Any], a: Any, b: Any) -> _Pair:
    """A product that is linear in both operands, of which one may be real."""
    if not isinstance(b, _Pair):
        return _Pair(times(a.real, b), times(a.imag, b))
    if not isinstance(a, _Pair):
        return _Pair(times(a, b.real), times(a, b.imag))
    return _Pair(times(a.real, b.real) - times(a.imag, b.imag), times(a.real, b.imag) + times(a.imag, b.real))


_mul = partial(_product, operator.mul)


def _einsum(equation: str, operands: list[Any], path: Any = None) -> _Pair:
    """A sum of products of any number of operands, each complex or real: of n complex ones 2^n sums of real products."""
    parts = [value if isinstance(value, _Pair) else (value,) for value in operands]
    found: list[Any] = [None, None]
    for choice in itertools.product(*(range(len(sides)) for sides in parts)):
        term = _aten.einsum.default(equation, [sides[i] for sides, i in zip(parts, choice, strict=True)])
        half_turns, side = divmod(sum(choice) % 4, 2)  # i to the power of how many imaginary parts there are
        term = -term if half_turns else term
        found[side] = term if found[side] is None else found[side] + term
    return _Pair(*found)


def _affine(times: Callable[[Any, Any], Any], a: Any, b: Any, added: Any = None) -> _Pair:
    """A product with an addend."""
    made = _product(times, a, b)
    if added is None:
        return made
    more = _parts(added)
    return _Pair(made.real + more.real, made.imag + more.imag)


def _conjugate(a: _Pair) -> _Pair:
    return _Pair(a.real, -a.imag)


def _divide(a: Any, b: Any) -> _Pair:
    if not isinstance(b, _Pair):
        return _Pair(a.real / b, a.imag / b)
    squared = b.real * b.real + b.imag * b.imag
    over = _mul(a, _conjugate(b))
    return _Pair(over.real / squared, over.imag / squared)


def _abs(a: _Pair) -> Any:
    return torch.sqrt(a.real * a.real + a.imag * a.imag)


def _angle(a: _Pair) -> Any:
    return torch.atan2(a.imag, a.real)


def _polar(length: Any, angle: Any) -> _Pair:
    return _Pair(length * torch.cos(angle), length * torch.sin(angle))


def _sign(a: _Pair) -> _Pair:
    length = _abs(a)
    length = torch.where(length == 0, 1.0, length)
    return _Pair(a.real / length, a.imag / length)


def _power(a: Any, exponent: Any) -> _Pair:
    if isinstance(exponent, int) and 1 <= exponent <= 4:
        made = a
        for _ in range(exponent - 1):
            made = _mul(made, a)
        return made
    return _polar(_abs(a) ** exponent, _angle(a) * exponent)


def _converted(value: Any, *args: Any, **kwargs: Any) -> Any:
    """``to``; a complex value becomes its real part in a real type."""
    dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
    if dtype is None:
        return value
    parts = _Pair(*(_aten.to.dtype(part, _PARTS.get(dtype, dtype)) for part in _parts(value)))
    return parts if dtype in _PARTS else parts.real


#: operator -> what it computes of pairs and of real values
_RULES: dict[str, Callable[..., Any]] = {
    "_conj": _conjugate,
    "_conj_physical": _conjugate,
    "_neg_view": lambda a: _Pair(-a.real, -a.imag),
    "_to_copy": _converted,
    "abs": _abs,
    "addmm": lambda added, a, b: _affine(_aten.mm.default, a, b, added),
    "angle": _angle,
    "baddbmm": lambda added, a, b: _affine(_aten.bmm.default, a, b, added),
    "bmm": partial(_product, _aten.bmm.default),
    "complex": _Pair,
    "conj": _conjugate,
    "conj_physical": _conjugate,
    "div": _divide,
    "einsum": _einsum,
    "exp": lambda a: _polar(torch.exp(a.real), a.imag),
    "getitem": lambda a, i: _Pair(a.real[i], a.imag[i]),
    "imag": lambda a: a.imag,
    "linear": partial(_affine, _aten.linear.default),
    "log": lambda a: _Pair(torch.log(_abs(a)), _angle(a)),
    "matmul": partial(_product, _aten.matmul.default),
    "mm": partial(_product, _aten.mm.default),
    "mul": _mul,
    "outer": partial(_product, _aten.outer.default),
    "polar": _polar,
    "pow": _power,
    "real": lambda a: a.real,
    "reciprocal": lambda a: _divide(1.0, a),
    "resolve_conj": lambda a: a,
    "resolve_neg": lambda a: a,
    "rsub": lambda a, b, alpha=1: _of_each(_aten.sub.Tensor, (b, a), {"alpha": alpha}),
    "sgn": _sign,
    "square": lambda a: _mul(a, a),
    "to": _converted,
    "view_as_complex": lambda a: _Pair(_aten.select.int(a, -1, 0), _aten.select.int(a, -1, 1)),
    "view_as_real": lambda a: _aten.stack.default([a.real, a.imag], -1),
}
