"""Find the role of every parameter of a language model from the graph of its operators.

No table of architectures and no names: queries, keys and values are what the two products of an attention read; a gate and the
layer beside it meet in a product; a router ends in a choice of the largest; the output layer makes the logits. What is not
recognised is named.

==================  ===================================================================================================
role                parameter
==================  ===================================================================================================
``embedding``       table that tokens select rows of
``position``        table of positions
``q``, ``k``, ``v``  projections that one attention reads; ``kv`` and ``qkv`` where one layer makes several
``o``               layer that reads the result of an attention
``gate``, ``up``    layers of a feed-forward network that widen: the one through the activation, and the one it multiplies; a
                    network without a gate has only ``up``; ``gate_up`` where one layer makes both
``down``            layer that reads them
``router``          layer that chooses experts, or weighs one that all tokens pass
``expert``          weights of experts
``lm_head``         layer that makes the logits
``norm``            weight or bias of a normalisation
``bias``            bias of a layer
``other``           not recognised; ``why`` says what was seen
==================  ===================================================================================================

Rules name them as ``role:down``, and what attention reads of its cache as ``role:key_cache`` and ``role:value_cache``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from bitwright.core.graph.attention import attention_products
from bitwright.core.graph.graph import Graph, Op, Value
from bitwright.core.graph.normalisations import find_normalisations
from bitwright.core.graph.operators import TRAITS
from bitwright.errors import ConfigError, close_matches

ROLES = (
    "embedding", "position", "q", "k", "v", "kv", "qkv", "o", "gate", "up", "gate_up", "down", "router", "expert", "lm_head",
    "norm", "bias", "other",
)  # fmt: skip
#: in rules, operands of attention
CACHES = ("key_cache", "value_cache")
ROLE = "role:"
_LAYERS = (*TRAITS["layer"], "GroupedMatMul")
_NORMS = ("LayerNormalization", "RMSNormalization", "GroupNormalization", "LpNormalization")
_MOVES = frozenset((
    *TRAITS["identity"], *TRAITS["reshape"], "Transpose", "Slice", "Split", "Expand", "Tile", "Cast", "Concat", "Stack",
))  # fmt: skip
_CURVES = frozenset((*TRAITS["activation"], "Erf", "Softmax", "Pow", "Square"))
_CHOICES = frozenset(("TopK", "ArgMax"))


@dataclass(frozen=True)
class Use:
    """Use of a parameter in the graph; see :class:`Part`."""

    role: str
    why: str = ""
    axis: int | None = None


UNREAD = Use("other", "no operator of the example's run reads it")


def roles_of(graph: Graph, *, whole: bool = True) -> dict[str, Use]:
    """Parameter -> its role. A tied table has the role of the embedding.

    Args:
        graph: of a model, or of one block.
        whole: whether its outputs are logits.
    """
    return _Search(graph).run(whole)


def check_role(pattern: str, known: tuple[str, ...] = ROLES) -> str:
    """The glob of roles that ``role:down`` or ``role:*cache`` names.

    Raises:
        ConfigError: there is no such role, with close names.
    """
    wanted = pattern.removeprefix(ROLE)
    if not fnmatch.filter(known, wanted):
        raise ConfigError(
            pattern, f"there is no such role{close_matches(wanted, known)}", f"use one of {', '.join(known)}"
        )
    return wanted


def named_by_role(graph: Graph) -> dict[str, str]:
    """Operator, parameter or operand (``matmul.input[1]``) -> the name that rules have for it, ``role:q``."""
    search = _Search(graph)
    found = {name: use.role for name, use in search.run(True).items()}
    for op in graph.ops:
        if search.is_norm(op):
            found[op.name] = "norm"
        elif search.is_table(op):
            found[op.name] = next((found[name] for name in search.table_of(op)), "other")
    found.update(search.role)
    for scores, product in attention_products(graph):
        found.update({f"{scores.name}.input[1]": CACHES[0], f"{product.name}.input[1]": CACHES[1]})
    return {name: f"{ROLE}{role}" for name, role in found.items()}


def ends_of(graph: Graph) -> dict[str, str]:
    """Operator -> ``embedding`` or ``lm_head``: the tables of tokens of a language model, and the layers that make logits of
    as many tokens. None where attention, tables or such layers are missing, as in a classifier.
    """
    tables = {op.name: op for op in graph.ops if op.type in ("Embedding", "Gather")}
    if not tables or next(attention_products(graph), None) is None:
        return {}
    search = _Search(graph)
    search.run(True)
    tables = {name: op for name, op in tables.items() if search.is_table(op) and search.reads_tokens(op)}
    tokens = {graph.values[str(op.inputs[0])].shape[0] for op in tables.values()}
    heads = {
        name: role
        for name, role in search.role.items()
        if role == "lm_head" and graph.values[graph.op(name).outputs[0]].shape[-1] in tokens
    }
    return {**dict.fromkeys(tables, "embedding"), **heads} if heads else {}


def _projection(letters: Set[str]) -> str:
    """The role of a layer that computes these operands (letters) of an attention."""
    both = "".join(letter for letter in "qkv" if letter in letters)
    return both if both in ROLES else "qkv"


def _parameters(value: Value | None) -> tuple[str, ...]:
    if value is None or not value.is_static:
        return ()
    return (value.param or value.name,) if value.kind == "param" else value.sources


class _Search:
    """One pass over the layers of a graph; every walk ends at the next layer, so that all of them are linear."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        static = graph.static()
        self.norms = find_normalisations(graph, static)
        self.layers: dict[str, tuple[str, ...]] = {}
        for op in graph.ops:
            port = 1 if op.type in _LAYERS else None
            if port is not None and len(op.inputs) > port and op.inputs[port] is not None:
                weights = _parameters(graph.values.get(str(op.inputs[port])))
                if weights:
                    self.layers[op.name] = weights
        self.role: dict[str, str] = {}

    def run(self, whole: bool) -> dict[str, Use]:
        """See :func:`roles_of`."""
        self._attention()
        for name in self.layers:
            if name not in self.role:
                self._choice(self.graph.op(name))
        self._experts()
        self._networks()
        for name in self.layers:
            if whole and name not in self.role and self._makes_output(self.graph.op(name)):
                self.role[name] = "lm_head"
        self._feeders()
        return self._by_parameter()

    # ---- walks

    def _before(self, op: Op, port: int, *, through_sums: bool) -> dict[str, bool]:
        """Layers that an input comes from, and whether a path passes an activation function; sums of activations may end it."""
        found: dict[str, bool] = {}
        seen: set[tuple[str, bool]] = set()
        waiting = [(op.inputs[port], False)]
        while waiting:
            value, curved = waiting.pop()
            maker = None if value is None else self.graph.producer(value)
            if value is None or maker is None or (value, curved) in seen:
                continue
            seen.add((value, curved))
            if maker.name in self.layers:
                found[maker.name] = found.get(maker.name, False) or curved
            elif not self.is_table(maker) and (through_sums or not self._is_sum(maker)):
                curved |= self._is_curve(maker)
                waiting += [(source, curved) for source in maker.inputs]
        return found

    def _is_curve(self, op: Op) -> bool:
        """Whether ``op`` is an activation function outside of normalisations."""
        return op.type in _CURVES and op.name not in self.norms

    def _is_sum(self, op: Op) -> bool:
        """Whether ``op`` adds activations of one shape, as residual sums do, outside of normalisations."""
        if op.type != "Add" or op.name in self.norms:
            return False
        shapes = {self.graph.values[s].shape for s in op.inputs if s is not None and not self.graph.values[s].is_static}
        moving = [s for s in op.inputs if s is not None and not self.graph.values[s].is_static]
        return len(moving) == 2 and len(shapes) == 1

    def _after(self, values: Iterable[str], *, through_sums: bool = False) -> Iterator[Op]:
        """Operators that read values, up to and including the next layers; a sum of activations ends a path."""
        seen: set[str] = set()
        waiting = list(values)
        while waiting:
            for reader, _ in self.graph.consumers(waiting.pop()):
                if reader.name in seen:
                    continue
                seen.add(reader.name)
                yield reader
                if reader.name not in self.layers and (through_sums or not self._is_sum(reader)):
                    waiting += reader.outputs

    # ---- rules

    def _attention(self) -> None:
        uses: dict[str, set[str]] = {}
        for scores, product in attention_products(self.graph):
            for use, op, port in (("q", scores, 0), ("k", scores, 1), ("v", product, 1)):
                for name in self._before(op, port, through_sums=True):
                    uses.setdefault(name, set()).add(use)
            for reader in self._after(product.outputs):
                if reader.name in self.layers:
                    self.role[reader.name] = "o"
        self.role.update((name, _projection(letters)) for name, letters in uses.items())

    def _choice(self, op: Op) -> None:
        """A layer whose outputs are ranked chooses experts; one with a single output weighs one."""
        width = self.graph.values[op.outputs[0]].shape[-1:]
        for reader in self._after(op.outputs, through_sums=True):
            gates = reader.type == "Sigmoid" and width == (1,)
            if reader.type in _CHOICES or gates:
                self.role[op.name] = "router"
                return

    def _experts(self) -> None:
        """Stacks of matrices, and the layers with one output for each matrix of a stack."""
        counts = set()
        for name in self.layers:
            op = self.graph.op(name)
            shape = self.graph.values[str(op.inputs[1])].shape
            stacked = op.type == "MatMul" and len(shape) > 2
            if name not in self.role and (op.type == "GroupedMatMul" or stacked):
                self.role[name] = "expert"
                counts.add(shape[0])
        for name in self.layers:
            op = self.graph.op(name)
            if name not in self.role and op.type in ("Gemm", "MatMul") and self._width(op) in counts:
                self.role[name] = "router"

    def _width(self, op: Op) -> int:
        return self.graph.values[op.outputs[0]].shape[-1]

    def _networks(self) -> None:
        """Layers that read other layers' outputs through a curve, and those that they read."""
        for name in self.layers:
            if name in self.role:
                continue
            op = self.graph.op(name)
            sources = {
                source: curved
                for source, curved in self._before(op, 0, through_sums=False).items()
                if self.role.get(source, "up") in ("up", "gate", "gate_up")
            }
            if not sources or not self._curve_between(op):
                continue
            self.role[name] = "down"
            for source, curved in sources.items():
                self.role.setdefault(source, self._widening(source, curved=curved, gated=len(sources) > 1))

    def _widening(self, name: str, *, curved: bool, gated: bool) -> str:
        """The role of a layer that ``down`` reads; in a gated network there are several of them."""
        if gated:
            return "gate" if curved else "up"
        return "gate_up" if self._is_halved(name) else "up"

    def _curve_between(self, op: Op) -> bool:
        """Whether any path back to the previous layers passes an activation function."""
        seen: set[str] = set()
        waiting = [op.inputs[0]]
        while waiting:
            value = waiting.pop()
            maker = None if value is None else self.graph.producer(value)
            if maker is None or maker.name in seen or maker.name in self.layers or self._is_sum(maker):
                continue
            seen.add(maker.name)
            if self._is_curve(maker):
                return True
            waiting += maker.inputs
        return False

    def _is_halved(self, name: str) -> bool:
        """Whether the output is split into two halves that are multiplied with each other."""
        return any(
            reader.type in ("Split", "Slice", "Glu")
            for reader in self._after(self.graph.op(name).outputs)
            if reader.name not in self.layers
        )

    def _makes_output(self, op: Op) -> bool:
        waiting, seen = list(op.outputs), set[str]()
        while waiting:
            value = waiting.pop()
            if self.graph.is_output(value):
                return True
            for reader, _ in self.graph.consumers(value):
                if reader.name not in seen and reader.name not in self.layers and not self._is_sum(reader):
                    seen.add(reader.name)
                    waiting += reader.outputs
        return False

    def _feeders(self) -> None:
        """Layers whose only readers have a role of attention: the first half of a projection in two parts."""
        for name in self.layers:
            if name in self.role:
                continue
            after = self._after(self.graph.op(name).outputs)
            roles = {self.role.get(reader.name, "") for reader in after if reader.name in self.layers}
            if roles and roles <= {"q", "k", "v", "kv", "qkv"}:
                self.role[name] = _projection({letter for role in roles for letter in role})

    # ---- parameters

    def _by_parameter(self) -> dict[str, Use]:
        found: dict[str, Use] = {}
        for op in self.graph.ops:
            for port, name in enumerate(op.inputs):
                for parameter in _parameters(self.graph.values.get(name or "")):
                    use = self._use(op, port, parameter)
                    if parameter not in found or (found[parameter].role == "other" and use.role != "other"):
                        found[parameter] = use
        return found

    def _use(self, op: Op, port: int, parameter: str) -> Use:
        if op.name in self.layers:
            return self._use_of_layer(op, port, parameter)
        if self.is_table(op) and port == 0:
            return Use("embedding" if self.reads_tokens(op) else "position", axis=-1)
        if self.is_norm(op):
            return Use("norm")
        shape = self.graph.values[str(op.inputs[port])].shape
        maker = self._other_maker(op, port)
        if op.type == "Add" and maker is not None and maker.name in self.layers:
            return Use("bias")
        if len(shape) == 1 and maker is not None and self.is_norm(maker):
            return Use("norm")
        if len(shape) == 2 and op.type == "Add" and shape == self.graph.values[op.outputs[0]].shape[-2:]:
            return Use("position")
        return Use("other", f"read by {op.name} ({op.type})")

    def _use_of_layer(self, op: Op, port: int, parameter: str) -> Use:
        if parameter not in self.layers[op.name] or port != 1:
            return Use("bias")
        axis = self._summed(op)
        if op.name in self.role:
            return Use(self.role[op.name], axis=axis)
        return Use("other", f"weight of {op.name} ({op.type}), which is in no attention and no network", axis)

    def is_norm(self, op: Op) -> bool:
        """Whether ``op`` is a normalisation, or a part of one."""
        return op.type in _NORMS or op.name in self.norms

    def table_of(self, op: Op) -> tuple[str, ...]:
        """The parameters of the table that an operator selects rows of."""
        return _parameters(self.graph.values.get(op.inputs[0] or "")) if op.inputs else ()

    def is_table(self, op: Op) -> bool:
        """Whether ``op`` selects rows of a stored matrix."""
        if op.type == "Embedding":
            return True
        first_axis = op.type == "Gather" and not op.attrs.get("axis")
        return first_axis and bool(self.table_of(op)) and len(self.graph.values[op.inputs[0] or ""].shape) == 2

    def reads_tokens(self, op: Op) -> bool:
        """Whether the rows are selected by an input of the model."""
        return self._is_token(op.inputs[1])

    def _summed(self, op: Op) -> int | None:
        """The axis of the stored matrix that a product sums over; a constant made of a parameter is its transpose."""
        if op.type == "Conv" or op.type == "ConvTranspose":
            return None
        transposed = bool(op.attrs.get("transB")) != (self.graph.values[str(op.inputs[1])].kind != "param")
        return -1 if transposed else -2

    def _other_maker(self, op: Op, port: int) -> Op | None:
        """Producer of the other operand of a parameter's operator, across data movement."""
        others = [name for other, name in enumerate(op.inputs) if other != port and name is not None]
        maker = self.graph.producer(others[0]) if others else None
        while maker is not None and maker.type in _MOVES and maker.inputs and maker.inputs[0] is not None:
            maker = self.graph.producer(maker.inputs[0])
        return maker

    def _is_token(self, value: str | None) -> bool:
        """Whether an index is an input of the model, across operators that only move it."""
        while value is not None:
            if self.graph.values[value].kind == "input":
                return True
            maker = self.graph.producer(value)
            if maker is None or maker.type not in _MOVES:
                return False
            value = maker.inputs[0]
        return False
