"""Suspected causes of a difference, each with the run that leaves it out: what that run removes is the cause.

First the file is questioned, with float kernels: do its weights, biases, grids and operators say what the first execution
says? Then what a runtime makes of it: a bias or a grid of its own, sums that saturate, products fused with activations
that were not quantized, integer kernels at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.comparison.doubt import Doubt, Suspect
from bitwright.comparison.file_causes import file_causes, unexplained
from bitwright.comparison.lockstep import Lockstep
from bitwright.comparison.parameters import clear, narrow
from bitwright.comparison.points import Pair
from bitwright.comparison.report import Finding, Retry
from bitwright.core.sums.accumulator import INT32_MAX
from bitwright.export.files.whole import fix_lengths, free_inputs, how_to_fix
from bitwright.export.verify.agreement import MOST_LSB, SLACK, Agreement, step_of
from bitwright.export.verify.reasons import Evidence, measure
from bitwright.export.verify.runtime import offers_exact_sums

Array = NDArray[Any]

_PAIRS = ("onnxruntime", "openvino")  # whose kernels multiply uint8 by int8, in pairs where there is no VNNI
_ENOUGH = 0.99  # equal codes of a tensor where others are one step off: what summation order may do


def close(agreement: Agreement) -> bool:
    """Whether two values differ by no more than the order of summation may change."""
    return agreement.ok or (agreement.lsb <= MOST_LSB + SLACK and agreement.equal >= _ENOUGH)


def removes(before: Agreement, after: Agreement) -> bool:
    """Whether a run without a suspected cause has no difference left: not where most of the codes that differed still do."""
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
    """In the order in which they are tried: what the file says before what a runtime makes of it."""
    plain = doubt.file()
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
    before = cache(partial(_before_rounding, doubt))
    yield Suspect(
        "rounding",
        "both round the same value, which lies on the border between two codes",
        "",
        "codes that differ taken from the border",
        lambda: _levelled(doubt, before()),
    )
    error = doubt.lockstep.errors.get(doubt.place.codes, 0.0)
    if error:
        yield Suspect(
            "kernel",
            f"{doubt.kernel} of {doubt.b.how} computes on integers, and its codes lie within the "
            f"{error:.2g} of a step that the roundings of this kernel are known to bring",
            "",
            "codes within these roundings taken as equal",
            lambda: _levelled(doubt, before(), error),
        )


def _before_rounding(doubt: Doubt) -> Array | None:
    place, (cut, _) = doubt.place, doubt.lockstep._cut_b
    if place.entry.producer() is None:
        return None
    model, more = cut.before([place])
    found = doubt.b.rerun(model, {**doubt.lockstep.feeds_b, **more}, mode="float")
    return None if found is None else found.get(str(place.entry.name))


def _levelled(doubt: Doubt, before: Array | None, error: float = 0.0) -> tuple[Array, Array] | None:
    """Both values, where those that lie as near to the border as roundings may bring them are made equal."""
    one, other = doubt.wanted, doubt.found
    if before is None or before.shape != one.shape:
        return None
    step = np.broadcast_to(step_of(one, other, doubt.pair.b.facts, doubt.place.scale), one.shape)
    differ = one != other
    off, allowed = 0.0, 0.0
    if differ.any():
        off, allowed = measure(_evidence(doubt), "float", one, other, before, step, 1.0, error=error)
    return (one, np.where(differ, one, other) if off <= allowed else other)


def _evidence(doubt: Doubt) -> Evidence:
    ops, kernel, bias = frozenset(doubt.ops), doubt.kernel, doubt.place.piece.bias
    return Evidence(ops, kernel, frozenset((kernel,)), doubt.pair.b.format, frozenset(), {}, {}, 0, bias=bias)


# -- the runtime


def _four_bits(doubt: Doubt) -> Iterator[Suspect]:
    """MatMulNBits, whose activations ONNX Runtime quantizes by itself."""
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


def _bias(doubt: Doubt) -> Iterator[Suspect]:
    """A bias that the runtime rounds, or that its accumulator does not hold."""
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
    """Sums of products that 16 or 32 bits do not hold."""
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
    """Kernels that the runtime put in the place of several operators."""
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


_TEXT = (
    "the runtime computes something else there in the whole file than in these operators alone, although both are fed the same "
    "values"
)
_OTHER = "leave the layer in float: sim.quantizers[...].enabled = False, or show the runtime's maintainers this file"


def in_context(both: Lockstep, most: int) -> list[Finding]:
    """The first ``most`` tensors that the second execution, a runtime, makes otherwise in the whole file than alone."""
    if not both.b.in_runtime:
        return []
    apart = _apart(both, both.in_the_whole())
    if not apart:
        return []
    fixed = both.in_the_whole(lambda model: fix_lengths(model, both.feeds_b)) if free_inputs(both.b.model) else {}
    return [_finding(both, pair, before, fixed.get(pair)) for pair, before in list(apart.items())[:most]]


def _apart(both: Lockstep, values: Mapping[Pair, tuple[Array, Array]]) -> dict[Pair, Agreement]:
    """Where the two differ by more than the order of summation and a table inside a kernel may change."""
    compared = {pair: both.agreement(pair, *two) for pair, two in values.items()}
    return {pair: found for pair, found in compared.items() if not _alike(found)}


def _alike(agreement: Agreement) -> bool:
    return close(agreement) or agreement.lsb <= MOST_LSB + SLACK


def _finding(both: Lockstep, pair: Pair, before: Agreement, fixed: tuple[Array, Array] | None) -> Finding:
    """With the run that has the lengths of the input in the place of free axes, where there are any."""
    retries: tuple[Retry, ...] = ()
    remedy = _OTHER
    if fixed is not None:
        after = both.agreement(pair, *fixed)
        without = "with the lengths of this input instead of free axes"
        retries = (Retry("fusion", without, before, after, _alike(after)),)
        if _alike(after):
            remedy = how_to_fix({name: array.shape for name, array in both.feeds_b.items()})
    return Finding(pair.name, tuple(both.places[pair].piece.ops), "fusion", _TEXT, remedy, retries)
