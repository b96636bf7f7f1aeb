"""Find why two executions differ at a tensor given equal inputs: suspected causes, each tested by a run without it.

A suspect whose run removes the difference is the cause. The file is tested first, with float kernels: does it hold the
weights, biases, grids and operators of the first execution? Then what a runtime makes of it: a bias or a grid of its own,
sums that saturate, products fused with activations that were not quantized, its integer kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import MOST_LSB, SLACK, Agreement, step_of
from bitwright.compare.cut import QDQ, constant_at, dequantizer, graphs_in, values_by_name
from bitwright.compare.lockstep import Edit, Key, Lockstep, clear, give, narrow, unchanged
from bitwright.compare.points import Pair
from bitwright.compare.reasons import Evidence, measure
from bitwright.compare.report import CauseName, Finding, Retry
from bitwright.compare.runtime import fix_lengths, free_inputs, how_to_fix, offers_exact_sums
from bitwright.compare.sides import Side
from bitwright.core.graph.operators import TRAITS
from bitwright.core.numerics.integer_sums import INT32_MAX
from bitwright.executors.profile import Profile, exact_kernels, find_profile
from bitwright.export.qdq.forms import Builder
from bitwright.export.qdq.markers import move_uses

Array = NDArray[Any]
#: two values to compare; ``None`` where the run cannot be made
Run = Callable[[], tuple[Array, Array] | None]


@dataclass(frozen=True)
class Suspect:
    """A cause that could explain a difference.

    Attributes:
        cause: its name.
        text: what happens, if it is the cause.
        remedy: what to do then.
        without: what is changed for the run without it.
        run: that run.
    """

    cause: CauseName
    text: str
    remedy: str
    without: str
    run: Run


class Doubt:
    """One tensor at which two executions differ although they are fed the same, and the runs that can be made for it.

    Args:
        lockstep: of the two.
        pair: the tensor.

    Attributes:
        a, b: the execution that is nearer to what was trained, and the one in question.
        wanted, found: what they make there.
        kernel: what the runtime of ``b`` ran last for it.
        place: where it is in the model of ``b``.
        ops: operator types that make it there.
    """

    def __init__(self, lockstep: Lockstep, pair: Pair) -> None:
        self.lockstep, self.pair, self.a, self.b = lockstep, pair, lockstep.a, lockstep.b
        self.wanted, self.found = lockstep.own_a[pair], lockstep.own_b[pair]
        self.kernel, self.place = lockstep.kernels[pair], lockstep.places[pair]
        self.ops = tuple(self.place.piece.ops)

    def agreement(self, one: Array, other: Array) -> Agreement:
        """Agreement of two values of the tensor on its grid."""
        return self.lockstep.agreement(self.pair, one, other)

    def again(self, edit: Edit = unchanged, **options: Any) -> Array | None:
        """Value of the second execution after an edit, or with other settings of ONNX Runtime."""

        def run(model: ir.Model, feeds: Any, types: Any) -> Any:
            return self.b.rerun(model, feeds, **options)

        found, _ = self.lockstep.locally(
            self.b, self.lockstep.feeds_b, [self.pair], edit=edit, run=run if options else None
        )
        return found.get(self.pair)

    def file(self, edit: Edit = unchanged) -> Array | None:
        """Value of the file with float kernels."""
        return self.again(edit, mode="float")

    def other_profile(self, side: Side, profile: Profile) -> tuple[Array, Array] | None:
        """Both values, where ``side`` computes its own with another profile."""
        mine = side is self.a
        edit: Edit = (lambda model: give(model, self.lockstep.rounded)) if mine else unchanged
        feeds = self.lockstep.feeds_a if mine else self.lockstep.feeds_b
        run = replace(side, profile=profile).run
        found, _ = self.lockstep.locally(side, feeds, [self.pair], edit=edit, run=run)
        if self.pair not in found:
            return None
        return (self.lockstep.on_grid(found)[self.pair], self.found) if mine else (self.wanted, found[self.pair])

    def beside(self, value: Callable[[], Array | None]) -> Run:
        """A run compared with the first execution."""
        return lambda: None if (found := value()) is None else (self.wanted, found)

    def both(self, edit: Edit) -> Run:
        """A run of a changed file, compared with the changed file in float kernels."""

        def run() -> tuple[Array, Array] | None:
            one, other = self.file(edit), self.again(edit)
            return None if one is None or other is None else (one, other)

        return run


def file_causes(doubt: Doubt) -> Iterator[Suspect]:
    """Suspected causes in the file."""
    yield from _parameters(doubt)
    yield from _grid(doubt)
    if not doubt.a.values:  # a simulation has no operators
        makers = _makers_in_a(doubt)
        yield from _limits_of_a(doubt, makers)
        yield from _limits_of_b(doubt, makers)


def unexplained(doubt: Doubt) -> tuple[str, str]:
    """Finding for a difference that no run removes."""
    if doubt.a.how == "float" and (inside := _rounded_inside(doubt)):
        remedy = "compare with the simulation, which rounds there too: @simulation instead of @float"
        return f"quantizers in the body of {inside} round what {doubt.a.label} has in float", remedy
    makers = _makers_in_a(doubt).values()
    nodes = (one for maker in makers for one in (maker, *(n for body in graphs_in(maker) for n in body.all_nodes())))
    made = [node.op_type for node in nodes if node.op_type not in QDQ]
    more = [kind for kind in made if kind not in doubt.ops]
    less = [kind for kind in doubt.ops if kind not in made] if made else []
    told = "; ".join(
        f"only {side.label} has {', '.join(dict.fromkeys(kinds))}"
        for side, kinds in ((doubt.a, more), (doubt.b, less))
        if kinds
    )
    return told or "no run without a suspected cause removes it", "compare these operators in both files"


def _parameters(doubt: Doubt) -> Iterator[Suspect]:
    """Weights, biases and other constants that are further from those of the first execution than rounding takes them."""
    if doubt.a.values:
        return
    ours, theirs = doubt.lockstep.parameters
    made = set(doubt.place.piece.made)
    by_role: dict[str, dict[Key, Array]] = {}
    worst: dict[str, float] = {}
    for key, other in doubt.lockstep.keys_in_a.items():
        a, b = ours[other], theirs[key]
        if key[0] in made and b.op not in TRAITS["clamp"]:
            apart = b.apart(a.value) if a.value.shape == b.value.shape else float("inf")
            if apart > 1.001:
                by_role.setdefault(b.role, {})[key] = a.value
                worst[b.role] = max(worst.get(b.role, 0.0), apart)
    for role, values in by_role.items():
        names = ", ".join(dict.fromkeys(theirs[key].name for key in values))
        yield Suspect(
            role,  # type: ignore[arg-type]
            f"the {role} {names} is {worst[role]:.3g} steps from that of {doubt.a.label}",
            "export again, or look for what changed it after the export",
            f"with the {role} of {doubt.a.label}",
            doubt.beside(partial(doubt.again, partial(give, values=values))),
        )


def _grid(doubt: Doubt) -> Iterator[Suspect]:
    """Suspect a scale or zero point that differs from the first execution's."""
    a, b = doubt.pair.a, doubt.pair.b
    if not (a.quantized and b.quantized) or a.scale is None or b.scale is None:
        return
    one, other = _grid_of(doubt.a.model, a.result), _grid_of(doubt.b.model, b.result)
    if one is None or other is None or _same(one, other):
        return

    def on_the_grid_of_a() -> tuple[Array, Array] | None:
        found, _ = doubt.lockstep.locally(doubt.a, doubt.lockstep.feeds_a, [doubt.pair])
        made = doubt.again(partial(_set_grid, result=b.result, grid=one))
        return None if made is None or doubt.pair not in found else (found[doubt.pair], made)

    yield Suspect(
        "grid",
        f"its scale is {_shown(other[0])} and zero point {_shown(other[1])}; {doubt.a.label} has {_shown(one[0])} "
        f"and {_shown(one[1])}",
        "export again with the encodings of the other, or load them: sim.load_encodings",
        f"on the grid of {doubt.a.label}",
        on_the_grid_of_a,
    )


def _limits_of_a(doubt: Doubt, makers: dict[str, ir.Node]) -> Iterator[Suspect]:
    """Suspect a Relu or Clip before the tensor that only the first execution has."""
    theirs = dict(zip(doubt.place.piece.made, doubt.ops, strict=False))
    ends = {doubt.pair.a.entry, doubt.pair.a.result, *doubt.pair.b.names}

    def limited(low: float, high: float) -> Array:
        return doubt.lockstep.on_grid({doubt.pair: np.clip(doubt.found, low, high)})[doubt.pair]

    for name, node in makers.items():
        kind = node.op_type
        if kind in TRAITS["clamp"] and theirs.get(name) != kind and kind not in doubt.ops and name in ends:
            low, high = _limits(node)
            yield Suspect(
                "clip",
                f"{doubt.a.label} limits it to [{low:.4g}, {high:.4g}] by {kind} {name}, {doubt.b.label} does not",
                "export again: the operator was taken out, or its limits were lost",
                f"limited to [{low:.4g}, {high:.4g}]",
                doubt.beside(partial(limited, low, high)),
            )


def _limits_of_b(doubt: Doubt, makers: dict[str, ir.Node]) -> Iterator[Suspect]:
    """Suspect a Relu or Clip that only the second execution has."""
    ours = {name for name, node in makers.items() if node.op_type not in QDQ}
    if not ours or doubt.pair.a.entry in doubt.pair.b.names:
        return
    theirs = dict(zip(doubt.place.piece.made, doubt.ops, strict=False))
    unknown = theirs.keys() - ours - set(doubt.pair.a.names)

    def skip(model: ir.Model, name: str) -> None:
        value = values_by_name(model)[name]
        node = value.producer()
        assert node is not None and node.inputs[0] is not None
        move_uses(value, node.inputs[0])

    for node in doubt.b.model.graph:
        name = str(node.outputs[0].name)
        if node.op_type in TRAITS["clamp"] and name in unknown:
            yield Suspect(
                "clip",
                f"{doubt.b.label} limits {name} by {node.op_type}, {doubt.a.label} does not",
                "export again: the operator was put in after the export",
                f"without {node.op_type}",
                doubt.beside(partial(doubt.again, partial(skip, name=name))),
            )


def _rounded_inside(doubt: Doubt) -> str:
    """An operator in ``b`` on the way to this tensor whose bodies hold quantizers of activations, by type and name."""
    made = set(doubt.place.piece.made)
    for node in doubt.b.model.graph:
        inner = (one for body in graphs_in(node) for one in body.all_nodes())
        if any(one.op_type == "QuantizeLinear" for one in inner) and not made.isdisjoint(
            str(v.name) for v in node.outputs
        ):
            return f"{node.op_type} {node.outputs[0].name}"
    return ""


def _makers_in_a(doubt: Doubt) -> dict[str, ir.Node]:
    """Tensors that ``a`` makes on the way to this one -> operator, quantizers too; empty for a simulation."""
    if doubt.a.values:
        return {}
    named = values_by_name(doubt.a.model)
    borders = {p.a.result for p in doubt.lockstep.pairs} - {doubt.pair.a.result}
    found: dict[str, ir.Node] = {}
    stack = [named[doubt.pair.a.entry]]
    while stack:
        value = stack.pop()
        node = value.producer()
        if node is None or str(value.name) in found or (str(value.name) in borders and found):
            continue
        found[str(value.name)] = node
        stack.extend(v for v in node.inputs if v is not None)
    return found


def _grid_of(model: ir.Model, result: str) -> tuple[Array, Array] | None:
    """Scale and zero point of the DequantizeLinear that makes ``result``."""
    node = dequantizer(values_by_name(model)[result])
    scale, zero = (None, None) if node is None else (constant_at(node, 1), constant_at(node, 2))
    return None if scale is None or zero is None else (scale, zero)


def _same(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Whether two grids hold the same values: the zero points of a signed and an unsigned type are 128 apart."""
    shifted = [
        zero.astype(np.int64) - (np.iinfo(zero.dtype).min if zero.dtype.kind == "i" else 0) for _, zero in (one, other)
    ]
    return np.array_equal(one[0], other[0]) and np.array_equal(shifted[0], shifted[1])


def _set_grid(model: ir.Model, result: str, grid: tuple[Array, Array]) -> None:
    last = values_by_name(model)[result].producer()
    assert last is not None and last.inputs[0] is not None
    builder = Builder(model)
    scale, zero = builder.initializer("given_scale", grid[0]), builder.initializer("given_zero", grid[1])
    for node in (last, last.inputs[0].producer()):
        if node is not None and node.op_type in QDQ:
            node.replace_input_with(1, scale)
            node.replace_input_with(2, zero)


def _limits(node: ir.Node) -> tuple[float, float]:
    if node.op_type == "Relu":
        return 0.0, float("inf")
    ends = []
    for port, default, attribute in ((1, -np.inf, "min"), (2, np.inf, "max")):
        known = constant_at(node, port)
        ends.append(float(known) if known is not None else node.attributes.get_float(attribute, float(default)))
    return ends[0], ends[1]


def _shown(array: Array) -> str:
    return f"{float(array.min()):.4g}" if array.min() == array.max() else f"{array.min():.4g} to {array.max():.4g}"


_PAIRS = ("onnxruntime", "openvino")  # whose kernels multiply uint8 by int8, in pairs where there is no VNNI
_PROFILES = {"qnn": "htp"}  # runtime -> the profile of its kernels
_WIDEST = 64  # bits of sums in runs without an overflow
_ENOUGH = 0.99  # equal codes of a tensor where others are one step off: what summation order may do


def close(agreement: Agreement) -> bool:
    """Whether two values differ by no more than the order of a sum explains."""
    return agreement.ok or (agreement.lsb <= MOST_LSB + SLACK and agreement.equal >= _ENOUGH)


def removes(before: Agreement, after: Agreement) -> bool:
    """Whether the run without a suspected cause removes the difference: most codes that differed are equal there."""
    fewer = after.lsb < before.lsb / 2 or 2 * (1 - after.equal) <= 1 - before.equal
    return close(after) and fewer


def settled(doubt: Doubt) -> Finding | tuple[Retry, ...]:
    """The finding that both round the same value, or that a kernel does so in a known way; otherwise what was tried."""
    return _first_of(doubt, _roundings(doubt), ())


def diagnose(doubt: Doubt, tried: tuple[Retry, ...]) -> Finding:
    """The cause that a run confirms, where it is not how they round, which was ``tried``."""
    found = _first_of(doubt, suspects(doubt), tried)
    if isinstance(found, Finding):
        return found
    return Finding(doubt.pair.name, doubt.ops, "operators", *unexplained(doubt), found)


def _first_of(doubt: Doubt, suspected: Iterable[Suspect], tried: tuple[Retry, ...]) -> Finding | tuple[Retry, ...]:
    """The first suspect that is the cause; all that was tried where none is."""
    before = doubt.agreement(doubt.wanted, doubt.found)
    for suspect in suspected:
        values = suspect.run()
        if values is None:
            continue
        after = doubt.agreement(*values)
        removed = removes(before, after)
        tried += (Retry(suspect.cause, suspect.without, before, after, removed),)
        if removed:
            said = (suspect.cause, suspect.text, suspect.remedy)
            return Finding(doubt.pair.name, doubt.ops, *said, tried)
    return tried


def suspects(doubt: Doubt) -> Iterator[Suspect]:
    """Suspects in the order of trial: first those in the file, then those of the runtime."""
    plain = doubt.file()
    if doubt.a.profile is not None or doubt.b.profile is not None:
        yield from file_causes(doubt)
        yield from _of_profiles(doubt)
        if plain is not None:
            yield from _fusion(doubt, plain)
        return
    if not doubt.b.in_runtime or plain is None or not close(doubt.agreement(doubt.wanted, plain)):
        yield from file_causes(doubt)
        return
    yield from _four_bits(doubt)
    yield from _bias(doubt)
    yield from _saturation(doubt)
    yield from _fusion(doubt, plain)


# -- rounding


def _roundings(doubt: Doubt) -> Iterator[Suspect]:
    """Codes one step apart, whose common value lies on the border between them, or as near as a kernel computes it."""
    if not doubt.pair.b.quantized or doubt.agreement(doubt.wanted, doubt.found).lsb > MOST_LSB + SLACK:
        return
    place = doubt.place
    values: dict[str, Array] = {}
    if place.entry.producer() is not None:
        model, more = doubt.lockstep.cut_b[0].before([place])
        values = doubt.b.rerun(model, {**doubt.lockstep.feeds_b, **more}, mode="float") or {}
    before = values.get(str(place.entry.name))

    def levelled(error: float) -> tuple[Array, Array] | None:
        """Both values, where those that lie as near to the border as roundings may bring them are made equal."""
        one, other = doubt.wanted, doubt.found
        if before is None or before.shape != one.shape:
            return None
        step = np.broadcast_to(step_of(one, other, doubt.pair.b.facts, place.scale), one.shape)
        evidence, differ = Evidence.of(place, {}, {place.codes: doubt.kernel}), one != other
        near = True
        if differ.any():
            off, allowed = measure(evidence, "float", one, other, before, step, 1.0, error=error)
            near = off <= allowed
        return (one, np.where(differ, one, other) if near else other)

    yield Suspect(
        "rounding",
        "both round the same value, which lies on the border between two codes",
        "",
        "codes that differ taken from the border",
        partial(levelled, 0.0),
    )
    yield from _roundings_of_profiles(doubt)
    error = doubt.lockstep.errors.get(place.codes, 0.0)
    if error:
        yield Suspect(
            "kernel",
            f"{doubt.kernel} of {doubt.b.how} computes on integers, and its codes lie within the "
            f"{error:.2g} of a step that the roundings of this kernel are known to bring",
            "",
            "codes within these roundings taken as equal",
            partial(levelled, error),
        )


# -- the runtime


def _four_bits(doubt: Doubt) -> Iterator[Suspect]:
    """Suspect a MatMulNBits whose activations ONNX Runtime quantizes itself."""
    if doubt.b.how != "onnxruntime":
        return
    kernels: dict[str, str] = {}
    doubt.again(mode="integer", types=kernels)
    if "MatMulNBits" not in kernels.values():
        return
    level = {"session.qdq_matmulnbits_accuracy_level": "1"}
    yield Suspect(
        "4-bit fusion",
        "ONNX Runtime runs it as MatMulNBits and quantizes its activations to int8, which was not simulated",
        "export with weight_only='exact', or set session.qdq_matmulnbits_accuracy_level to 1 where the file is run",
        "with session.qdq_matmulnbits_accuracy_level = 1",
        doubt.beside(partial(doubt.again, mode="integer", entries=level)),
    )


@dataclass(frozen=True)
class _Part:
    """A part of a target's arithmetic that may explain a difference, and what it is replaced with."""

    cause: CauseName
    change: Mapping[str, Any]
    text: str
    remedy: str
    without: str


def _parts(profile: Profile, other: Side, accumulated: int) -> Iterator[_Part]:
    """Yield the losses that a target's accumulators may cause.

    Args:
        profile: of the target.
        other: the execution that it is compared with.
        accumulated: the largest sum there.
    """
    pairs = "adds products of uint8 and int8 in pairs, whose sums saturate at 16 bits"
    narrower = "quantize again with repair='saturation', which gives the layers that need it 7-bit weights"
    if profile.pairs:
        without = "with sums of pairs that do not saturate"
        yield _Part("saturation", {"pairs": False}, f"{profile.name} {pairs}", narrower, without)
    elif other.how in _PAIRS and profile.reads == "onnx":
        without = "with sums of pairs that saturate"
        yield _Part("saturation", {"pairs": True}, f"{other.label} {pairs}", narrower, without)
    if profile.accumulator < _WIDEST // 2 or accumulated > INT32_MAX:
        yield _Part(
            "overflow",
            {"accumulator": _WIDEST},
            f"sums of {profile.name} have {profile.accumulator} bits and wrap around",
            "leave its input in float, split the layer along its inner axis, or give its weight fewer bits",
            f"with sums of {_WIDEST} bits",
        )
    if profile.bias == "float32":
        yield _Part(
            "bias",
            {"bias": "int32"},
            f"{profile.name} adds the bias in float32, after the sum is one",
            f"export with target={profile.target!r}, which keeps the bias in float",
            "with an int32 bias, added to the sum",
        )


def _of_profiles(doubt: Doubt) -> Iterator[Suspect]:
    """The arithmetic of a target, whichever of the two it is: each part of it with what leaves sums exact in its place."""
    for side, other in ((doubt.b, doubt.a), (doubt.a, doubt.b)):
        if side.profile is not None:
            yield from _without(doubt, side, list(_parts(side.profile, other, doubt.place.piece.accumulated)))


def _without(doubt: Doubt, side: Side, parts: Sequence[_Part]) -> Iterator[Suspect]:
    """Runs without each part, without it and the roundings of the kernels, and without all."""
    assert side.profile is not None
    exact = exact_kernels(side.profile)
    for one in parts:
        run = partial(doubt.other_profile, side, replace(side.profile, **one.change))
        yield Suspect(one.cause, one.text, one.remedy, one.without, run)
        run = partial(doubt.other_profile, side, replace(exact, **one.change))
        text = f"{one.text}, and its kernels round otherwise"
        yield Suspect(one.cause, text, one.remedy, f"{one.without}, rounded once", run)
    if len(parts) > 1:
        together = {key: value for one in parts for key, value in one.change.items()}
        run = partial(doubt.other_profile, side, replace(exact, **together))
        texts, without = "; ".join(one.text for one in parts), ", ".join(one.without for one in parts)
        yield Suspect(parts[0].cause, texts, parts[0].remedy, without, run)


def _roundings_of_profiles(doubt: Doubt) -> Iterator[Suspect]:
    """How the kernels of a target bring sums onto the grid, against those of another target, or one exact rounding."""
    known = _PROFILES.get(doubt.b.how)
    if known is not None and doubt.a.profile is None:

        def measured() -> tuple[Array, Array] | None:
            side = replace(doubt.b, profile=find_profile(known))
            found, _ = doubt.lockstep.locally(doubt.b, doubt.lockstep.feeds_b, [doubt.pair], run=side.run)
            return (found[doubt.pair], doubt.found) if doubt.pair in found else None

        text = f"the kernels of {doubt.b.how} round otherwise, as profile {known} says"
        yield Suspect("kernel", text, "", f"computed by the executors of profile {known}", measured)
    for side, other in ((doubt.b, doubt.a), (doubt.a, doubt.b)):
        profile = side.profile
        if profile is None:
            continue
        changed, without = exact_kernels(profile), "with the exact product and one rounding, a half to even"
        if other.profile is not None and other.profile.reads == profile.reads:
            changed, without = (
                replace(profile, kernels=other.profile.kernels),
                f"with the kernels of {other.profile.name}",
            )
        text = f"the kernels of {profile.name} round otherwise: {doubt.kernel}"
        yield Suspect("rounding", text, "", without, partial(doubt.other_profile, side, changed))


def _bias(doubt: Doubt) -> Iterator[Suspect]:
    """Suspect a bias that the runtime rounds, or that exceeds its accumulator."""
    zeros = {
        key: np.zeros_like(b.value)
        for key, b in doubt.lockstep.parameters[1].items()
        if key[0] in doubt.place.piece.made and b.role == "bias"
    }
    if zeros:
        yield Suspect(
            "bias",
            "the runtime does not add the bias that the file holds: it quantizes a float bias by itself, and an int32 bias "
            "beyond the accumulator wraps around",
            "export with bias='int32', which raises the weight's scale where the bias needs it",
            "without the bias, on both sides",
            doubt.both(lambda model: clear(model, zeros)),
        )


def _saturation(doubt: Doubt) -> Iterator[Suspect]:
    """Suspect sums of products that overflow 16 or 32 bits."""
    how = doubt.b.how
    # OpenVINO does not tell of every operator that it fused into which kernel
    if doubt.kernel == "float" and how != "openvino":
        return
    largest = doubt.place.piece.accumulated
    made = set(doubt.place.piece.made)
    if largest > INT32_MAX:
        bits = int(np.ceil(np.log2(largest / INT32_MAX))) + 1
        yield Suspect(
            "overflow",
            f"the int32 accumulator overflows: sums reach {largest:.3g} and it holds {INT32_MAX:.3g}",
            "leave its input in float, split the layer along its inner axis, or give its weight fewer bits",
            f"with {bits} bits less in its weight, on both sides",
            doubt.both(lambda model: narrow(model, made, bits)),
        )
    if how not in _PAIRS or not largest:  # no weight is multiplied there
        return
    exact = "open the session with session.x64quantprecision = 1, or "  # costs no accuracy
    yield Suspect(
        "saturation",
        "sums of two products of uint8 and int8 saturate at 16 bits: this CPU, or what the runtime sees of it, has no VNNI",
        (exact if how == "onnxruntime" and offers_exact_sums(doubt.b.model) else "")
        + "quantize again with repair='saturation', which gives the layers that need it 7-bit weights",
        "with 7 bits in its weight, on both sides",
        doubt.both(lambda model: narrow(model, made, 1)),
    )


def _fusion(doubt: Doubt, plain: Array) -> Iterator[Suspect]:
    """Suspect a fused kernel that replaces several operators."""
    kernel, name = doubt.kernel, doubt.pair.name
    if doubt.b.how == "onnxruntime":
        yield Suspect(
            "fusion",
            "changes of the graph that keep its quantizers already change its values",
            "set the session's graph_optimization_level lower where the file is run, and report it to ONNX Runtime",
            "with integer kernels, and no other change of the graph",
            doubt.beside(lambda: None if kernel != "float" else doubt.again(mode="float", optimized=False)),
        )
    fused = f"the integer kernel {kernel}" if kernel != "float" else "what the runtime made of these operators"
    yield Suspect(
        "fusion",
        f"{fused} computes something else than the operators and quantizers that the file has",
        f"leave {name} in float: sim.quantizers[{name!r}].enabled = False",
        "with float kernels, every quantizer as it stands",
        doubt.beside(lambda: plain),
    )


def in_context(both: Lockstep, most: int) -> list[Finding]:
    """The first ``most`` tensors whose operators the runtime computes differently within the whole file than alone."""
    if not both.b.in_runtime:
        return []

    def alike(agreement: Agreement) -> bool:  # the order of summation and a table inside a kernel may change as much
        return close(agreement) or agreement.lsb <= MOST_LSB + SLACK

    compared = {pair: both.agreement(pair, *two) for pair, two in both.in_the_whole().items()}
    apart = [(pair, before) for pair, before in compared.items() if not alike(before)][:most]
    fixed: Mapping[Pair, tuple[Array, Array]] = {}
    if apart and free_inputs(both.b.model):  # a run with the lengths of the input in place of free axes
        fixed = both.in_the_whole(lambda model: fix_lengths(model, both.feeds_b))
    text = (
        "the runtime computes something else there in the whole file than in these operators alone, although both are fed the "
        "same values"
    )
    found = []
    for pair, before in apart:
        retries: tuple[Retry, ...] = ()
        remedy = (
            "leave the layer in float: sim.quantizers[...].enabled = False, or show the runtime's maintainers this file"
        )
        if pair in fixed:
            after = both.agreement(pair, *fixed[pair])
            without = "with the lengths of this input instead of free axes"
            retries = (Retry("fusion", without, before, after, alike(after)),)
            if alike(after):
                remedy = how_to_fix({name: array.shape for name, array in both.feeds_b.items()})
        found.append(Finding(pair.name, tuple(both.places[pair].piece.ops), "fusion", text, remedy, retries))
    return found
