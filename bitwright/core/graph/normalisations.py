"""Find normalisations written out operator by operator, by what they compute.

A normalisation divides a tensor by a statistic of itself: a mean of squares, a variance, a norm, a sum. Integer runtimes have no
kernel for it, and what it computes on its way (squares, a difference of two means, a reciprocal root of very different size from
sample to sample) has no place on an integer grid. Written as one operator it computes all of this in float; written out it has to
do so as well.

Each value gets a *form*: of which tensors it is a product of powers, and whether a reduction has gone over it. A square has the
power 2, a mean of squares the power 2 and is reduced, its reciprocal root has the power -1. Shifts by a constant and bounds keep
the form of a statistic, and so do a difference of two values of the same form (a mean of squares minus the square of a mean) and
the product with a stored weight. Where a tensor meets a reduced form of itself with the opposite sign, in a product or a
quotient, it is normalised; the stored weight and bias that follow are part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import LENGTHS, TRAITS, op_row

_MOST_TENSORS = 3  # that a form is a product of
#: the elements stay what they are, under another shape
_SAME = frozenset((*TRAITS["identity"], *TRAITS["reshape"], "Transpose", "Expand"))
#: operator -> (power, whether it is a reduction) of a function of one tensor
_POWERS: Mapping[str, tuple[float, bool]] = {
    "Square": (2, False), "Sqrt": (0.5, False), "Rsqrt": (-0.5, False), "Reciprocal": (-1, False), "Abs": (1, False),
    "Neg": (1, False), "Clip": (1, False),
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "CumSum", "AveragePool", "GlobalAveragePool"), (1, True)),
    **dict.fromkeys(("ReduceL1", "ReduceL2"), (1, True)), "ReduceSumSquare": (2, True), "Variance": (2, True),
}  # fmt: skip
_BOUNDS = frozenset(("Clip", "Max", "Min"))


@dataclass(frozen=True)
class _Form:
    """A value as a product of powers of tensors.

    Attributes:
        powers: tensor -> power; those of power 0 are kept, since they tell what was normalised.
        reduced: whether a reduction has gone over all of it.
        normalised: whether it is a tensor divided by a statistic of itself.
        raw: whether it is a plain product of two tensors, of which nothing else is known.
    """

    powers: Mapping[str, float]
    reduced: bool = False
    normalised: bool = False
    raw: bool = False

    def to(self, power: float) -> _Form:
        """The form raised to a power."""
        return replace(self, powers={name: power * p for name, p in self.powers.items()}, raw=False)

    def times(self, other: _Form) -> _Form | None:
        """The form of the product; ``None`` where it has too many factors."""
        names = dict.fromkeys((*self.powers, *other.powers))
        if len(names) > _MOST_TENSORS:
            return None
        powers = {name: self.powers.get(name, 0) + other.powers.get(name, 0) for name in names}
        both = self.reduced and other.reduced
        if both and any(powers.values()):  # a mean over what a mask leaves: the sum of a product by the sum of the mask
            powers = {name: power for name, power in powers.items() if power}
        return _Form(powers, both)

    def divides(self, other: _Form) -> bool:
        """Whether this is a statistic of the factors of ``other``, with powers of opposite sign."""
        shared = self.powers.keys() & other.powers.keys()
        return self.reduced and bool(shared) and all(self.powers[name] * other.powers[name] < 0 for name in shared)


def find_normalisations(graph: Graph, static: set[str]) -> dict[str, str]:
    """The operators of normalisations, each with the last operator of its normalisation.

    Args:
        graph: the model; of a place that runs several times the first run is looked at.
        static: values that are the same in every run.

    Returns:
        Operator -> the last operator of its normalisation. What those operators compute is inside the normalisation,
        except for what others read of it. Linear in the graph.
    """
    search = _Search(graph, static)
    for op in graph.ops:
        search.visit(op)
    return search.members()


class _Search:
    def __init__(self, graph: Graph, static: set[str]) -> None:
        self.graph, self.fixed = graph, set(static)
        self.forms: dict[str, _Form] = {}
        self.root: dict[str, str] = {}  # a tensor under another shape or type -> the tensor
        self.going: dict[str, Op] = {}  # normalised value -> the operator that makes it

    def visit(self, op: Op) -> None:
        """Compute the forms of the outputs of ``op``."""
        data = [v for v in op.inputs if v is not None]
        if not data or not op.outputs:
            return
        if op.type in LENGTHS or self.fixed.issuperset(data):
            self.fixed.update(op.outputs)
        elif op.type in _SAME:
            self._same(data[0], op.outputs[0])
        elif form := self._form(op):
            self.forms[op.outputs[0]] = form
            if op.type == "Variance" and len(op.outputs) > 1:  # the mean beside it
                self.forms[op.outputs[1]] = _Form({self._origin(data[0]): 1}, reduced=True)
        for value in op.outputs:
            if value in self.forms and self.forms[value].normalised:
                self.going[value] = op

    def _same(self, value: str, out: str) -> None:
        self.root[out] = self._origin(value)
        if value in self.forms:
            self.forms[out] = self.forms[value]

    def _origin(self, value: str) -> str:
        return self.root.get(value, value)

    def _form(self, op: Op) -> _Form | None:
        moving = [v for v in op.inputs if v is not None and v not in self.fixed]
        if len(moving) > 2:
            return None
        if op.type in ("Mul", "Div"):
            return self._product(op, moving)
        if op.type in ("Add", "Sub", *_BOUNDS) and not (op.type == "Clip" and len(moving) > 1):
            return self._shifted(op, moving[0]) if len(moving) == 1 else self._sum(op, moving)
        power, reduces = _POWERS.get(op.type, (0, False))
        if op.type == "Pow":
            power = float(op.attrs.get("exponent", 0))
        if op.type == "Variance" and op.attrs.get("root"):
            power = 1
        return self._raised(moving[0], power, reduces) if power and len(moving) == 1 else None

    def _raised(self, value: str, power: float, reduces: bool) -> _Form | None:
        """The form of a power or a reduction."""
        form = self.forms.get(value)
        if form is None or form.normalised or (form.raw and not reduces):
            if not reduces and power not in (1, 2):
                return None  # the root of a tensor is no statistic of it
            form = _Form({self._origin(value): 1})
        form = form.to(power)
        return replace(form, reduced=True) if reduces else form

    def _shifted(self, op: Op, value: str) -> _Form | None:
        """A sum with a constant, or a bound: epsilon, the bias of a normalisation."""
        form = self.forms.get(value)
        if form is None or form.raw or not (form.reduced or form.normalised):
            return None
        if form.normalised and not form.reduced and (op.type in _BOUNDS or not self._per_channel(op)):
            return None
        return form

    def _per_channel(self, op: Op) -> bool:
        """Whether the constants that ``op`` reads are stored scalars or one number per channel, unlike angles or positions."""
        constants = [self.graph.values[v] for v in op.inputs if v in self.fixed]
        return all(sum(n > 1 for n in value.shape) < 2 and not value.made_anew for value in constants)

    def _sum(self, op: Op, values: list[str]) -> _Form | None:
        """A sum, difference or bound of values of the same form: a tensor minus its mean, two moments, two normalised parts."""
        for one in self._readings(values[0]):
            for other in self._readings(values[1]):
                if one.powers == other.powers and (one.reduced or other.reduced or one.normalised and other.normalised):
                    both = one.reduced and other.reduced
                    return _Form(one.powers, both, one.normalised or other.normalised)
        return None

    def _readings(self, value: str) -> Iterator[_Form]:
        """Possible readings of a value: its form, or a plain tensor."""
        if value in self.forms:
            yield self.forms[value]
        yield _Form({self._origin(value): 1})

    def _product(self, op: Op, moving: list[str]) -> _Form | None:
        if len(moving) == 1:
            return self._scaled(op, moving[0])
        one, other = moving
        if op.type == "Mul" and self._origin(one) == self._origin(other):
            return self._raised(one, 2, False)
        sign = 1 if op.type == "Mul" else -1
        pairs = ((a, b.to(sign)) for a in self._readings(one) for b in self._readings(other))
        met = next(((a, b) for a, b in pairs if b.divides(a) or (sign > 0 and a.divides(b))), None)
        form = None if met is None else met[0].times(met[1])
        if form is None:
            return self._joined(one, other, sign)
        return form if form.reduced and any(form.powers.values()) else replace(form, normalised=True)

    def _joined(self, one: str, other: str, sign: int) -> _Form | None:
        """The form of a product that normalises nothing: of statistics, or of two tensors."""
        a, b = next(self._readings(one)), next(self._readings(other))
        if a.normalised or b.normalised or a.reduced != b.reduced:
            return None
        form = a.times(b.to(sign)) if a.reduced or sign > 0 else None
        return form and replace(form, raw=not form.reduced)

    def _scaled(self, op: Op, value: str) -> _Form | None:
        """The form of a product with a constant: a weight, a number of elements."""
        form = self.forms.get(value)
        if form is None or form.raw or (form.normalised and not form.reduced and not self._per_channel(op)):
            return None
        return form if op.type == "Mul" or op.inputs[0] == value else form.to(-1)

    # ---- which operators

    def members(self) -> dict[str, str]:
        """Operator -> the last operator of its normalisation."""
        found = self._ends()
        seen: set[str] = set()
        waiting = [(op, found[op.name]) for op in self.going.values() if op.name in found]
        while waiting:
            op, end = waiting.pop()
            if op.name not in seen:
                seen.add(op.name)
                found.setdefault(op.name, end)
                makers = (self._inside(value) for value in op.inputs if value is not None)
                waiting += [(maker, end) for maker in makers if maker is not None]
        return found

    def _ends(self) -> dict[str, str]:
        """Operator that computes a normalised value -> last operator of the normalisation, without data movement."""
        ends: dict[str, str] = {}
        for value, op in reversed(self.going.items()):
            readers = [ends[r.name] for r, _ in self.graph.consumers(value) if ends.get(r.name)]
            ends[op.name] = readers[0] if readers else "" if op.type in _SAME else op.name
        return {name: end for name, end in ends.items() if end}

    def _inside(self, value: str) -> Op | None:
        """The operator that computes a value inside a normalisation; ``None`` for the tensor that is normalised."""
        if value in self.fixed:  # one plus the weight
            return self.graph.producer(value)
        form = self.forms.get(value)
        if form is None:
            return None
        if form.raw and not all(op_row(r.type).kind == "reduce" for r, _ in self.graph.consumers(value)):
            return None
        return self.graph.producer(value)
