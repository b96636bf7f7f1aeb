"""Suspected causes of a difference, each with the run that leaves it out: what that run removes is the cause.

First the file is questioned, with float kernels: do its weights, biases, grids and operators say what the first execution
says? Then what a runtime makes of it: a bias or a grid of its own, sums that saturate, products fused with activations
that were not quantized, integer kernels at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.comparison.lockstep import Feeds, Lockstep, unchanged
from bitwright.comparison.parameters import Key, Parameter, clear, give, narrow
from bitwright.comparison.points import Pair, values_by_name
from bitwright.comparison.report import CauseName, Finding, Retry
from bitwright.core.graph.traits import TRAITS
from bitwright.core.sums.accumulator import INT32_MAX
from bitwright.export.verify.agreement import MOST_LSB, SLACK, Agreement, step_of
from bitwright.export.verify.cut import QDQ, Place
from bitwright.export.verify.reasons import Evidence, measure
from bitwright.export.verify.runtime import offers_exact_sums

Array = NDArray[Any]

_PAIRS = ("onnxruntime", "openvino")  # whose kernels multiply uint8 by int8, in pairs where there is no VNNI
_ENOUGH = 0.99  # equal codes of a tensor where others are one step off: what summation order may do


@dataclass(frozen=True)
class Suspect:
    """A cause that could explain a difference.

    Attributes:
        cause: its name.
        text: what happens, if it is the cause.
        remedy: what to do then.
        without: what is changed for the run without it.
        run: that run: the two values to compare, or ``None`` where it cannot be made.
    """

    cause: CauseName
    text: str
    remedy: str
    without: str
    run: Callable[[], tuple[Array, Array] | None]


def close(agreement: Agreement) -> bool:
    """Whether two values differ by no more than the order of summation may change."""
    return agreement.ok or (agreement.lsb <= MOST_LSB + SLACK and agreement.equal >= _ENOUGH)


def removes(before: Agreement, after: Agreement) -> bool:
    """Whether a run without a suspected cause has no difference left: not where most of the codes that differed still do."""
    fewer = after.lsb < before.lsb / 2 or 2 * (1 - after.equal) <= 1 - before.equal
    return close(after) and fewer


@dataclass
class Doubt:
    """One tensor at which two executions differ although they are fed the same.

    Attributes:
        lockstep: of the two.
        pair: the tensor.
    """

    lockstep: Lockstep
    pair: Pair
    _retries: list[Retry] = field(default_factory=list)

    def settled(self) -> Finding | None:
        """The finding that both round the same value, or that a kernel does so in a way that is known; ``None`` otherwise."""
        return self._first_of(self._roundings())

    def diagnose(self) -> Finding:
        """The cause that a run confirms, where it is not how they round."""
        found = self._first_of(self.suspects())
        return found or Finding(
            self.pair.name, self.ops, "operators", *self.unexplained(), tuple(self._retries)
        )

    def _first_of(self, suspects: Iterator[Suspect]) -> Finding | None:
        before = self.lockstep.agreement(self.pair, self.wanted, self.lockstep.own_b[self.pair])
        for suspect in suspects:
            values = suspect.run()
            if values is None:
                continue
            after = self.lockstep.agreement(self.pair, *values)
            removed = removes(before, after)
            self._retries.append(Retry(suspect.cause, suspect.without, before, after, removed))
            if removed:
                said = (suspect.cause, suspect.text, suspect.remedy)
                return Finding(self.pair.name, self.ops, *said, tuple(self._retries))
        return None

    @property
    def wanted(self) -> Array:
        """What the first execution makes there."""
        return self.lockstep.own_a[self.pair]

    @property
    def place(self) -> Place:
        """Where it is in the second model."""
        return self.lockstep.places[self.pair]

    @property
    def ops(self) -> tuple[str, ...]:
        """Operator types that make it there."""
        return tuple(self.place.piece.ops)

    def suspects(self) -> Iterator[Suspect]:
        """In the order in which they are tried: what the file says before what a runtime makes of it."""
        plain = self.file()
        if not self.lockstep.b.in_runtime or plain is None or not self._agrees(plain):
            yield from self._parameters()
            yield from self._grid()
            yield from self._bounds()
            return
        yield from self._four_bits()
        yield from self._bias()
        yield from self._saturation(plain)
        yield from self._fusion(plain)

    def unexplained(self) -> tuple[str, str]:
        """What to say where no run removes the difference."""
        if self.lockstep.a.how == "float" and (inside := self._rounded_inside()):
            remedy = "compare with the simulation, which rounds there too: @simulation in the place of @float"
            return (
                f"quantizers in the body of {inside} round what {self.lockstep.a.label} has in float",
                remedy,
            )
        made = [node.op_type for maker in self._makers_in_a().values() for node in _with_bodies(maker)]
        made = [kind for kind in made if kind not in QDQ]
        more = [kind for kind in made if kind not in self.ops]
        less = [kind for kind in self.ops if kind not in made] if made else []
        told = "; ".join(
            f"only {side.label} has {', '.join(dict.fromkeys(kinds))}"
            for side, kinds in ((self.lockstep.a, more), (self.lockstep.b, less))
            if kinds
        )
        return told or "no run without a suspected cause removes it", "compare these operators in both files"

    # ------------------------------------------------------------------------------------------ runs

    def file(self, edit: Callable[[ir.Model], object] = unchanged) -> Array | None:
        """What the file says there, with float kernels."""
        return self._run(lambda model, feeds, types: self.lockstep.b.rerun(model, feeds, mode="float"), edit)

    def _again(self, edit: Callable[[ir.Model], object] = unchanged, **options: Any) -> Array | None:
        """What the second execution makes there after an edit, or with other settings of ONNX Runtime."""
        if not options:
            return self._run(None, edit)
        return self._run(lambda model, feeds, types: self.lockstep.b.rerun(model, feeds, **options), edit)

    def _run(self, run: Any, edit: Callable[[ir.Model], object]) -> Array | None:
        side, feeds = self.lockstep.b, self.lockstep.feeds_b
        found, _ = self.lockstep.locally(side, feeds, [self.pair], edit=edit, run=run)
        return found.get(self.pair)

    def _agrees(self, value: Array) -> bool:
        return close(self.lockstep.agreement(self.pair, self.wanted, value))

    def _beside(self, value: Callable[[], Array | None]) -> Callable[[], tuple[Array, Array] | None]:
        """A run whose result is compared with what the first execution has."""

        def run() -> tuple[Array, Array] | None:
            found = value()
            return None if found is None else (self.wanted, found)

        return run

    def _both(self, edit: Callable[[ir.Model], object]) -> Callable[[], tuple[Array, Array] | None]:
        """A run of a changed file, compared with the changed file in float kernels."""

        def run() -> tuple[Array, Array] | None:
            one, other = self.file(edit), self._again(edit)
            return None if one is None or other is None else (one, other)

        return run

    # ------------------------------------------------------------------------------------------ the file

    def _roundings(self) -> Iterator[Suspect]:
        """Codes one step apart, whose common value lies on the border between them, or as near as a kernel computes it."""
        found = self.lockstep.agreement(self.pair, self.wanted, self.lockstep.own_b[self.pair])
        if not self.pair.b.quantized or found.lsb > MOST_LSB + SLACK:
            return
        yield Suspect(
            "rounding",
            "both round the same value, which lies on the border between two codes",
            "",
            "codes that differ taken from the border",
            self._levelled,
        )
        error = self.lockstep.errors.get(self.place.codes, 0.0)
        if error:
            yield Suspect(
                "kernel",
                f"{self.lockstep.kernels[self.pair]} of {self.lockstep.b.how} computes on integers, and its codes lie within the "
                f"{error:.2g} of a step that the roundings of this kernel are known to bring",
                "",
                "codes within these roundings taken as equal",
                lambda: self._levelled(error),
            )

    def _levelled(self, error: float = 0.0) -> tuple[Array, Array] | None:
        """Both values, where those that lie as near to the border as roundings may bring them are made equal."""
        place, one, other = self.place, self.wanted, self.lockstep.own_b[self.pair]
        before = self._before_rounding
        if before is None or before.shape != one.shape:
            return None
        step = np.broadcast_to(step_of(one, other, self.pair.b.facts, place.scale), one.shape)
        differ = one != other
        off, allowed = 0.0, 0.0
        if differ.any():
            off, allowed = measure(self._evidence(), "float", one, other, before, step, 1.0, error=error)
        return (one, np.where(differ, one, other) if off <= allowed else other)

    @cached_property
    def _before_rounding(self) -> Array | None:
        cut = self.lockstep._cut_b[0]
        if self.place.entry.producer() is None:
            return None
        model, more = cut.before([self.place])
        found = self.lockstep.b.rerun(model, {**self.lockstep.feeds_b, **more}, mode="float")
        return None if found is None else found.get(str(self.place.entry.name))

    def _evidence(self) -> Evidence:
        kernel = self.lockstep.kernels[self.pair]
        return Evidence(
            frozenset(self.ops),
            kernel,
            frozenset((kernel,)),
            self.pair.b.format,
            frozenset(),
            {},
            {},
            0,
            bias=self.place.piece.bias,
        )

    def _parameters(self) -> Iterator[Suspect]:
        """Weights, biases and other constants that are further from those of the first execution than rounding takes them."""
        if self.lockstep.a.values:
            return
        by_role: dict[str, dict[Key, Array]] = {}
        worst: dict[str, float] = {}
        named: dict[str, list[str]] = {}
        for key, a, b in self._known():
            apart = b.apart(a.value) if a.value.shape == b.value.shape else float("inf")
            if apart > 1.001:
                by_role.setdefault(b.role, {})[key] = a.value
                named.setdefault(b.role, []).append(b.name)
                worst[b.role] = max(worst.get(b.role, 0.0), apart)
        for role, values in by_role.items():
            names = ", ".join(dict.fromkeys(named[role]))
            yield Suspect(
                role,  # type: ignore[arg-type]
                f"the {role} {names} is {worst[role]:.3g} steps from that of {self.lockstep.a.label}",
                "export again, or look for what changed it after the export",
                f"with the {role} of {self.lockstep.a.label}",
                self._beside(lambda values=values: self._again(lambda model: give(model, values))),  # type: ignore[misc]
            )

    def _known(self) -> Iterator[tuple[Key, Parameter, Parameter]]:
        """Constants that the operators of this piece read, in both models."""
        ours, theirs = self.lockstep.parameters
        made = set(self.place.piece.made)
        for key, other in self.lockstep.keys_in_a.items():
            if key[0] in made and theirs[key].op not in TRAITS["clamp"]:
                yield key, ours[other], theirs[key]

    def _grid(self) -> Iterator[Suspect]:
        """Another scale or zero point than the first execution has there."""
        a, b = self.pair.a, self.pair.b
        if not (a.quantized and b.quantized) or a.scale is None or b.scale is None:
            return
        one, other = (
            _grid_of(side.model, p.result) for side, p in ((self.lockstep.a, a), (self.lockstep.b, b))
        )
        if one is None or other is None or _same(one, other):
            return
        yield Suspect(
            "grid",
            f"its scale is {_shown(other[0])} and zero point {_shown(other[1])}; {self.lockstep.a.label} has {_shown(one[0])} "
            f"and {_shown(one[1])}",
            "export again with the encodings of the other, or load them: sim.load_encodings",
            f"on the grid of {self.lockstep.a.label}",
            self._on_other_grid(one),
        )

    def _on_other_grid(self, grid: tuple[Array, Array]) -> Callable[[], tuple[Array, Array] | None]:
        def run() -> tuple[Array, Array] | None:
            found, _ = self.lockstep.locally(self.lockstep.a, self.lockstep.feeds_a, [self.pair])
            other = self._again(lambda model: _set_grid(model, self.pair.b.result, grid))
            return None if other is None or self.pair not in found else (found[self.pair], other)

        return run

    def _bounds(self) -> Iterator[Suspect]:
        """A Relu or Clip that only one of the two has."""
        theirs = dict(zip(self.place.piece.made, self.ops, strict=False))
        for name, kind in self._made_by_a().items():
            if (
                kind in TRAITS["clamp"]
                and theirs.get(name) != kind
                and kind not in self.ops
                and self._ends_here(name)
            ):
                low, high = _limits(self.lockstep.a.model, name)
                yield Suspect(
                    "clip",
                    f"{self.lockstep.a.label} limits it to [{low:.4g}, {high:.4g}] by {kind} {name}, {self.lockstep.b.label} "
                    "does not",
                    "export again: the operator was taken out, or its limits were lost",
                    f"limited to [{low:.4g}, {high:.4g}]",
                    self._beside(lambda low=low, high=high: self._limited(low, high)),  # type: ignore[misc]
                )
        ours = set(self._made_by_a())
        for node in self.lockstep.b.model.graph:
            name = str(node.outputs[0].name)
            if ours and node.op_type in TRAITS["clamp"] and name in theirs and self._unknown_to_a(name, ours):
                yield Suspect(
                    "clip",
                    f"{self.lockstep.b.label} limits {name} by {node.op_type}, {self.lockstep.a.label} does not",
                    "export again: the operator was put in after the export",
                    f"without {node.op_type}",
                    self._beside(lambda name=name: self._again(lambda model: _skip(model, name))),  # type: ignore[misc]
                )

    def _unknown_to_a(self, name: str, ours: set[str]) -> bool:
        return (
            name not in ours and name not in self.pair.a.names and self.pair.a.entry not in self.pair.b.names
        )

    def _ends_here(self, name: str) -> bool:
        """Whether the operator of ``a`` that makes ``name`` is the last one in front of the tensor."""
        return name in (self.pair.a.entry, self.pair.a.result) or name in self.pair.b.names

    def _limited(self, low: float, high: float) -> Array | None:
        found = self.lockstep.own_b[self.pair]
        return self.lockstep.on_grid({self.pair: np.clip(found, low, high)})[self.pair]

    def _rounded_inside(self) -> str:
        """An operator in ``b`` on the way to this tensor whose bodies hold quantizers of activations, by type and name."""
        made = set(self.place.piece.made)
        for node in self.lockstep.b.model.graph:
            if made.intersection(str(value.name) for value in node.outputs):
                bodies = list(_with_bodies(node))[1:]
                if any(one.op_type == "QuantizeLinear" for one in bodies):
                    return f"{node.op_type} {node.outputs[0].name}"
        return ""

    def _made_by_a(self) -> dict[str, str]:
        """Tensors that the operators of ``a`` make on the way to this one -> operator type; empty for a simulation."""
        made = {name: node.op_type for name, node in self._makers_in_a().items()}
        return {name: kind for name, kind in made.items() if kind not in QDQ}

    def _makers_in_a(self) -> dict[str, ir.Node]:
        """The same with the operators themselves, and with quantizers."""
        if self.lockstep.a.values:
            return {}
        named = values_by_name(self.lockstep.a.model)
        borders = {p.a.result for p in self.lockstep.pairs} - {self.pair.a.result}
        found: dict[str, ir.Node] = {}
        stack = [named[self.pair.a.entry]]
        while stack:
            value = stack.pop()
            node = value.producer()
            if node is None or str(value.name) in found or (str(value.name) in borders and found):
                continue
            found[str(value.name)] = node
            stack.extend(v for v in node.inputs if v is not None)
        return found

    # ------------------------------------------------------------------------------------------ the runtime

    def _four_bits(self) -> Iterator[Suspect]:
        """MatMulNBits, whose activations ONNX Runtime quantizes by itself."""
        if self.lockstep.b.how != "onnxruntime":
            return
        kernels: dict[str, str] = {}

        def default(model: ir.Model, feeds: Feeds, types: dict[str, str]) -> dict[str, Array] | None:
            return self.lockstep.b.rerun(model, feeds, mode="integer", types=kernels)

        self._run(default, unchanged)
        if "MatMulNBits" not in kernels.values():
            return
        yield Suspect(
            "4-bit fusion",
            "ONNX Runtime runs it as MatMulNBits and quantizes its activations to int8, which was not simulated",
            "export with weight_only='exact', or set session.qdq_matmulnbits_accuracy_level to 1 where the file is run",
            "with session.qdq_matmulnbits_accuracy_level = 1",
            self._beside(
                lambda: self._again(mode="integer", entries={"session.qdq_matmulnbits_accuracy_level": "1"})
            ),
        )

    def _bias(self) -> Iterator[Suspect]:
        """A bias that the runtime rounds, or that its accumulator does not hold."""
        zeros = {
            key: np.zeros_like(b.value)
            for key, b in self.lockstep.parameters[1].items()
            if key[0] in self.place.piece.made and b.role == "bias"
        }
        if zeros:
            yield Suspect(
                "bias",
                "the runtime does not add the bias that the file holds: it quantizes a float bias by itself, and an int32 bias "
                "beyond the accumulator wraps around",
                "export with bias='int32', which raises the weight's scale where the bias needs it",
                "without the bias, on both sides",
                self._both(lambda model: clear(model, zeros)),
            )

    def _saturation(self, plain: Array) -> Iterator[Suspect]:
        """Sums of products that 16 or 32 bits do not hold."""
        # OpenVINO does not tell of every operator that it fused into which kernel
        if self.lockstep.kernels[self.pair] == "float" and self.lockstep.b.how != "openvino":
            return
        largest = self.place.piece.accumulated
        made = set(self.place.piece.made)
        if largest > INT32_MAX:
            bits = int(np.ceil(np.log2(largest / INT32_MAX))) + 1
            yield Suspect(
                "overflow",
                f"the int32 accumulator overflows: sums reach {largest:.3g} and it holds {INT32_MAX:.3g}",
                "leave its input in float, split the layer along its inner axis, or give its weight fewer bits",
                f"with {bits} bits less in its weight, on both sides",
                self._both(lambda model: narrow(model, made, bits)),
            )
        if self.lockstep.b.how not in _PAIRS or not largest:  # no weight is multiplied there
            return
        yield Suspect(
            "saturation",
            "sums of two products of uint8 and int8 saturate at 16 bits: this CPU, or what the runtime sees of it, has no VNNI",
            self._exact_sums
            + "quantize again with repair='saturation', which gives the layers that need it 7-bit weights",
            "with 7 bits in its weight, on both sides",
            self._both(lambda model: narrow(model, made, 1)),
        )

    @property
    def _exact_sums(self) -> str:
        """The remedy that costs no accuracy, where there is one."""
        side = self.lockstep.b
        fits = side.how == "onnxruntime" and offers_exact_sums(side.model)
        return "open the session with session.x64quantprecision = 1, or " if fits else ""

    def _fusion(self, plain: Array) -> Iterator[Suspect]:
        """Kernels that the runtime put in the place of several operators."""
        kernel = self.lockstep.kernels[self.pair]
        if self.lockstep.b.how == "onnxruntime":
            yield Suspect(
                "fusion",
                "changes of the graph that keep its quantizers already change its values",
                "set the session's graph_optimization_level lower where the file is run, and report it to ONNX Runtime",
                "with integer kernels, and no other change of the graph",
                self._beside(
                    lambda: None if kernel != "float" else self._again(mode="float", optimized=False)
                ),
            )
        fused = (
            f"the integer kernel {kernel}"
            if kernel != "float"
            else "what the runtime made of these operators"
        )
        yield Suspect(
            "fusion",
            f"{fused} computes something else than the operators and quantizers that the file has",
            f"leave {self.pair.name} in float: sim.quantizers[{self.pair.name!r}].enabled = False",
            "with float kernels, every quantizer as it stands",
            self._beside(lambda: plain),
        )


def _with_bodies(node: ir.Node) -> Iterator[ir.Node]:
    """``node``, and what its bodies consist of."""
    yield node
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()


def _grid_of(model: ir.Model, result: str) -> tuple[Array, Array] | None:
    """Scale and zero point of the DequantizeLinear that makes ``result``."""
    node = values_by_name(model)[result].producer()
    if node is None or node.op_type != "DequantizeLinear" or len(node.inputs) < 3:
        return None
    scale, zero = (
        None if v is None or v.const_value is None else v.const_value.numpy() for v in node.inputs[1:3]
    )
    return None if scale is None or zero is None else (scale, zero)


def _same(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Whether two grids hold the same values: the zero points of a signed and an unsigned type are 128 apart."""
    shifted = [
        zero.astype(np.int64) - (np.iinfo(zero.dtype).min if zero.dtype.kind == "i" else 0)
        for _, zero in (one, other)
    ]
    return np.array_equal(one[0], other[0]) and np.array_equal(shifted[0], shifted[1])


def _set_grid(model: ir.Model, result: str, grid: tuple[Array, Array]) -> None:
    from bitwright.export.qdq.forms import Builder

    last = values_by_name(model)[result].producer()
    assert last is not None and last.inputs[0] is not None
    builder = Builder(model)
    scale, zero = builder.initializer("given_scale", grid[0]), builder.initializer("given_zero", grid[1])
    for node in (last, last.inputs[0].producer()):
        if node is not None and node.op_type in QDQ:
            node.replace_input_with(1, scale)
            node.replace_input_with(2, zero)


def _limits(model: ir.Model, name: str) -> tuple[float, float]:
    node = values_by_name(model)[name].producer()
    assert node is not None
    if node.op_type == "Relu":
        return 0.0, float("inf")
    ends = []
    for port, default, attribute in ((1, -np.inf, "min"), (2, np.inf, "max")):
        value = node.inputs[port] if len(node.inputs) > port else None
        known = None if value is None or value.const_value is None else value.const_value.numpy()
        ends.append(
            float(known) if known is not None else node.attributes.get_float(attribute, float(default))
        )
    return ends[0], ends[1]


def _skip(model: ir.Model, name: str) -> None:
    """Let readers of ``name`` read what its operator reads."""
    value = values_by_name(model)[name]
    node = value.producer()
    assert node is not None and node.inputs[0] is not None
    for use in tuple(value.uses()):
        use.node.replace_input_with(use.idx, node.inputs[0])


def _shown(array: Array) -> str:
    return (
        f"{float(array.min()):.4g}"
        if array.min() == array.max()
        else f"{array.min():.4g} to {array.max():.4g}"
    )
