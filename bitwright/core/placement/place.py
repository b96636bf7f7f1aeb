"""Where quantizers go: a pure function of graph, rules and op table.

:func:`place` decides in four linear passes, none of which depends on where an operator stands in the graph:

1. which values are the same in every run (parameters, constants, and what only moves those);
2. which chains are supergroups, and which operators only prepare the mask of a softmax;
3. what every operator's output is: a site of its own, on the grid of another site, or float, with the reason;
4. what every operator reads: weights, biases, constants, and activations that are not quantized yet.

The first two are :mod:`bitwright.core.placement.facts`, the others :mod:`bitwright.core.placement.outputs` and
:mod:`bitwright.core.placement.operands`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bitwright.core.graph.graph import Graph, Op, Value
from bitwright.core.graph.ops import op_row
from bitwright.core.placement.facts import Facts
from bitwright.core.placement.ledger import MOVED, Ledger
from bitwright.core.placement.operands import Operands
from bitwright.core.placement.outputs import Outputs
from bitwright.core.placement.plan import Plan
from bitwright.core.placement.rules import Rules
from bitwright.errors import close_matches


def place(graph: Graph, rules: Rules) -> Plan:
    """Decide for every float value and parameter of ``graph`` whether and how it is quantized.

    Site names: a parameter has its own name at the first operator that reads it and ``<param>@<op>`` at
    others; weights and biases computed from parameters are ``<op>.weight`` and ``<op>.bias``, other
    constants and activations that are quantized where they are read ``<op>.input[port]``, outputs
    ``<op>.output[index]``, what is computed inside a recurrent layer ``<op>.<inner name>``.

    Args:
        graph: the model.
        rules: base specs, rules and supergroups.

    Returns:
        A plan in which each float value is in ``sites`` (as the value of one), in ``shared``, or in
        ``floats``. Time and memory are linear in the graph.

    Raises:
        GranularityError: an axis asked for does not exist in its tensor, or blocks do not divide it.
        ConfigError: two operators ask for different symmetries of the value they both read.
    """
    facts = Facts(graph, rules)
    ledger = Ledger(facts)
    outputs, operands = Outputs(ledger), Operands(ledger)
    for op in graph.ops:
        if op.name not in facts.static_ops:
            outputs.decide(op)
    for op in graph.ops:
        if op.name in facts.static_ops:
            _note_moved(ledger, op)
            continue
        operands.decide(op)
        for value in (*op.inner.values(), *op.outputs):
            if value in ledger.outputs:
                ledger.sites[ledger.outputs[value].name] = ledger.outputs[value]
    _share_model_inputs(ledger)
    notes = (*map(str, facts.misses), *rules.notes)
    return Plan(ledger.sites, _floats(ledger), ledger.shared, tuple(facts.matches), notes, tuple(_unused(ledger)))


def _share_model_inputs(ledger: Ledger) -> None:
    """A model input that is first moved is on the grid of the sites that read it, and so is what carries it."""
    graph = ledger.facts.graph
    covered = {site.value for site in ledger.sites.values()}
    for value, origin in [*((name, name) for name in graph.inputs), *ledger.origin.items()]:
        at = ledger.read_at.get(origin)
        if at and graph.values[origin].kind == "input" and value not in covered:
            ledger.shared.setdefault(value, ledger.sites[at[0]].group)


def _note_moved(ledger: Ledger, op: Op) -> None:
    """A parameter that is moved before it is used is quantized where it is used."""
    for source in ledger.facts.data(op, op_row(op.type)):
        ledger.why.setdefault(source, MOVED)
        ledger.origin.update(dict.fromkeys(op.outputs, ledger.origin.get(source, source)))


def _floats(ledger: Ledger) -> dict[str, str]:
    """The reason for every float value that has neither a site nor another's grid."""
    facts = ledger.facts
    covered = {site.value for site in ledger.sites.values()} | ledger.shared.keys()
    computed = _computed_of_params(ledger)
    return {
        value.name: computed.get(value.name) or _reason(ledger, value)
        for value in facts.graph.values.values()
        if value.name in facts.float_values and value.name not in covered
    }


def _computed_of_params(ledger: Ledger) -> dict[str, str]:
    """Parameters that no operator reads but in what is the same in every run, such as rows of constant places in a table."""
    graph = ledger.facts.graph
    made: dict[str, list[str]] = {}
    read = (value for value in graph.values.values() if value.kind == "constant" and graph.consumers(value.name))
    for source, name in ((source, value.name) for value in read for source in value.sources):
        made.setdefault(source, []).append(name)
    sites: dict[str, str] = {}
    for site in ledger.sites.values():
        sites.setdefault(site.value, site.name)
    unread = (value for value in graph.values.values() if value.param in made and not graph.consumers(value.name))
    return {value.name: _computed_alike(made[value.param or ""], sites) for value in unread}


def _computed_alike(names: Sequence[str], sites: Mapping[str, str]) -> str:
    at = [sites[name] for name in names if name in sites]
    end = f"; that is quantized at {', '.join(at[:3])}{' and others' if len(at) > 3 else ''}" if at else ""
    return f"operators read {names[0]}, which is computed of it alike in every run{end}"


def _reason(ledger: Ledger, value: Value) -> str:
    reason = ledger.why.get(value.name)
    if not reason:
        return _unspoken_reason(ledger, value)
    if at := ledger.read_at.get(value.name):
        return f"{reason}; quantized at {', '.join(at[:3])}{' and others' if len(at) > 3 else ''}"
    return reason


def _unspoken_reason(ledger: Ledger, value: Value) -> str:
    """Why a value is in float about which no decision was made on its own."""
    facts = ledger.facts
    if match := facts.inner.get(value.name):
        group = ledger.group_of.get(match.output)
        end = f"quantized at {group}" if group else "which is in float"
        return f"inside the supergroup {match.pattern}, {end}"
    if value.name in facts.mask_values:
        return f"mask of the softmax {facts.mask_values[value.name]}"
    readers = facts.graph.consumers(value.name)
    if readers and not any(value.name in op.inputs for op, _ in readers):
        return f"only a later run of {readers[0][0].name} reads it, at an input where the first run needs no quantizer"
    if readers:
        return "no operator computes with it"
    if value.is_static or value.kind == "input":
        return "no operator of the recorded run reads it"
    return "not recorded"


def _unused(ledger: Ledger) -> Iterator[str]:
    """What is wrong with each rule that changed nothing."""
    unused = [
        (index, rule)
        for index, rule in enumerate(ledger.facts.rules.rules)
        if index not in ledger.used and not rule.optional and not rule.reaches_producer
    ]
    types = {op.type for op in ledger.facts.graph.ops} if unused else set()
    names: list[str] = []
    for index, rule in unused:
        unknown = [t for t in rule.types if t not in types | {"*"}]
        if index in ledger.unused:
            site, reason = ledger.unused[index]
            yield f"{rule}: no effect; it matches {site}, but {reason}"
        elif unknown:
            found = close_matches(unknown[0], types)
            yield f"{rule}: the model has no operator of type {unknown[0]!r}{found}"
        else:
            names = names or list(_names(ledger))
            yield f"{rule}: nothing in the model has this name and port{close_matches(rule.name, names)}"


def _names(ledger: Ledger) -> Iterator[str]:
    graph = ledger.facts.graph
    yield from (op.name for op in graph.ops[:2000])  # close matches compare every pair of letters
    yield from list(ledger.sites)[:2000]
    yield from graph.inputs
