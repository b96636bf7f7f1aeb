"""Parts of a model's architecture that a target runs slowly: a table of rules about operators, for models of either front end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.core.graph.graph import Graph, Op
from bitwright.errors import with_article
from bitwright.report.page import write_page
from bitwright.tables import Tabular, html_table

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_CHANNELS = 32
_ACTIVATIONS = ("Relu", "Clip", "LeakyRelu", "PRelu")
_OTHER_ACTIVATIONS = (
    "Elu", "Celu", "Selu", "Gelu", "Sigmoid", "HardSigmoid", "HardSwish", "Mish", "Softplus", "Softsign", "Tanh", "Silu",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One operator that a rule is about: its name and type, what is the matter, and what to do."""

    op: str
    type: str
    rule: str
    issue: str
    recommendation: str


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: key.
        target: what it holds for.
        fact: what is known of the target.
        recommendation: what to do.
        find: what is the matter with an operator of a graph, or ``None``.
    """

    name: str
    target: str
    fact: str
    recommendation: str
    find: Callable[[Op, Graph], str | None]


def _weight(op: Op, graph: Graph) -> tuple[int, ...]:
    name = op.inputs[1] if op.type in _CONVOLUTIONS and len(op.inputs) > 1 else None
    return () if name is None else graph.values[name].shape


def _channels(op: Op, graph: Graph) -> tuple[int, int] | None:
    """Input and output channels of a convolution that is not depthwise."""
    shape, group = _weight(op, graph), int(op.attrs.get("group", 1))
    if len(shape) < 2 or group > 1:
        return None
    return (shape[0], shape[1]) if op.type == "ConvTranspose" else (shape[1], shape[0])


def _few_channels(op: Op, graph: Graph) -> str | None:
    found = _channels(op, graph)
    return f"{found[1]} output channels" if found is not None and found[1] < _CHANNELS else None


def _odd_channels(op: Op, graph: Graph) -> str | None:
    found = _channels(op, graph)
    if found is None or found[1] < _CHANNELS or found[1] % _CHANNELS == 0:
        return None
    return f"{found[1]} output channels, no multiple of {_CHANNELS}"


def _slow_activation(op: Op, graph: Graph) -> str | None:
    return f"it is {with_article(op.type)}" if op.type in _OTHER_ACTIVATIONS else None


def _padding_between(op: Op, graph: Graph) -> str | None:
    """A padded convolution whose only reader is, directly or after an activation, another padded convolution."""
    if not _padded(op):
        return None
    reader = _next_layer(op, graph)
    return f"it pads, and so does {reader.name} right after it" if reader is not None and _padded(reader) else None


def _padded(op: Op) -> bool:
    return op.type in _CONVOLUTIONS and any(int(n) > 0 for n in _numbers(op.attrs.get("pads")))


def _numbers(pads: Any) -> Iterator[int]:
    if isinstance(pads, int):
        yield pads
    elif isinstance(pads, list | tuple):
        yield from (int(n) for n in pads if isinstance(n, int))


def _next_layer(op: Op, graph: Graph) -> Op | None:
    here: Op | None = op
    for _ in range(3):
        here = None if here is None else graph.sole_consumer(here.outputs[0])
        if here is None or here.type in _CONVOLUTIONS:
            return here
    return None


_HTP = "Hexagon Tensor Processor"
_DOCUMENTED = "as its vendor documents"
#: the table of rules; another one is another row
RULES: tuple[Rule, ...] = (
    Rule(
        "few_channels",
        _HTP,
        f"convolutions run on {_CHANNELS} channels at a time, {_DOCUMENTED}",
        f"use {_CHANNELS} channels or more, or join small convolutions",
        _few_channels,
    ),
    Rule(
        "channel_multiple",
        _HTP,
        f"channels are filled up to a multiple of {_CHANNELS}, {_DOCUMENTED}",
        f"use a multiple of {_CHANNELS} channels",
        _odd_channels,
    ),
    Rule(
        "activation",
        _HTP,
        f"activations of the ReLU family are part of the convolution before them, others run alone, {_DOCUMENTED}",
        "use ReLU, ReLU6 or PReLU where accuracy allows it",
        _slow_activation,
    ),
    Rule(
        "intermediate_padding",
        _HTP,
        f"every padded layer moves its input, {_DOCUMENTED}",
        "pad once before the first layer of the sequence",
        _padding_between,
    ),
)
#: of batch norms that cannot be folded; whoever folds knows them
FOLDING = Rule(
    "batch_norm",
    "every target",
    "a batch norm that stays is an operator of its own with its own rounding",
    "see the reason; docs/folding.md says which places fold",
    lambda op, graph: None,
)


@dataclass(frozen=True)
class ArchitectureReport(Tabular):
    """Findings of the rules, rule by rule in execution order."""

    _rows = "findings"

    findings: tuple[Finding, ...]

    @property
    def raw_report(self) -> dict[str, list[Finding]]:
        """Operator -> what was found there."""
        found: dict[str, list[Finding]] = {}
        for finding in self.findings:
            found.setdefault(finding.op, []).append(finding)
        return found

    def __str__(self) -> str:
        lines = [f"{f.op} ({f.type}): {f.issue}. {f.recommendation}" for f in self.findings]
        return "\n".join(lines or ["no rule found anything"])

    def export_to_html(self, result_dir: str | Path) -> Path:
        """Write ``arch_checker_report.html`` into a folder."""
        rows = [(f.op, f.type, f.rule, f.issue, f.recommendation) for f in self.findings]
        head = ("operator", "type", "rule", "issue", "recommendation")
        return write_page(Path(result_dir) / "arch_checker_report.html", "Architecture", html_table(head, rows))


def check_architecture(
    graph: Graph, rules: Sequence[Rule] = RULES, unfolded: Iterable[tuple[str, str]] = ()
) -> ArchitectureReport:
    """Check a model by rules.

    Args:
        graph: of its simulation, ``sim.graph``.
        rules: instead of :data:`RULES`.
        unfolded: batch norms that cannot be folded, with the reasons: ``skipped`` of the report of folding.
    """
    found = [
        Finding(op.name, op.type, rule.name, issue, rule.recommendation)
        for rule in rules
        for op in graph.ops
        if (issue := rule.find(op, graph)) is not None
    ]
    found += [
        Finding(norm, "BatchNormalization", FOLDING.name, f"it cannot be folded: {why}", FOLDING.recommendation)
        for norm, why in unfolded
    ]
    return ArchitectureReport(tuple(found))
