"""``aimet_torch.arch_checker`` and ``aimet_torch.model_validator``: what a model should have before it is quantized."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bitwright import torch as front
from bitwright.core.graph.graph import Graph, Op
from bitwright.errors import ConfigError, ModelError, with_article
from bitwright.report.page import write_page
from bitwright.tables import Tabular, html_table

__all__ = ["ArchChecker", "ArchCheckerReport", "Finding", "ModelValidator", "RULES", "Rule"]


# ------------------------------------------------------------------------------------ layers that a target runs slowly


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
#: the table of rules; another one is another row, given to ``check_model_arch(rules=...)``
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
_FOLDING = Rule(
    "batch_norm",
    "every target",
    "a batch norm that stays is an operator of its own with its own rounding",
    "see the reason; docs/folding.md says which places fold",
    lambda op, graph: None,
)


@dataclass(frozen=True)
class ArchCheckerReport(Tabular):
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

    def export_to_html(self, result_dir: str) -> Path:
        """Write ``arch_checker_report.html``."""
        rows = [(f.op, f.type, f.rule, f.issue, f.recommendation) for f in self.findings]
        head = ("operator", "type", "rule", "issue", "recommendation")
        return write_page(Path(result_dir) / "arch_checker_report.html", "Architecture", html_table(head, rows))


class ArchChecker:
    """Checks a model against :data:`RULES`, and for batch norms that cannot be folded."""

    @staticmethod
    def check_model_arch(
        model: nn.Module, dummy_input: Any, result_dir: str | None = None, *, rules: tuple[Rule, ...] = RULES
    ) -> ArchCheckerReport:
        """Check a model by the rules.

        Args:
            model: left as it is.
            dummy_input: an example of its input.
            result_dir: folder for ``arch_checker_report.html``; AIMET writes it in any case.
            rules: instead of the table of this module.
        """
        given = tuple(dummy_input) if isinstance(dummy_input, list) else dummy_input
        graph = front.QuantizationSimModel(model, given).graph
        found = [
            Finding(op.name, op.type, rule.name, issue, rule.recommendation)
            for rule in rules
            for op in graph.ops
            if (issue := rule.find(op, graph)) is not None
        ]
        folds = front.fold_all_batch_norms(copy.deepcopy(model), dummy_input=given, progress=False)
        found += [
            Finding(norm, "BatchNormalization", _FOLDING.name, f"it cannot be folded: {why}", _FOLDING.recommendation)
            for norm, why in folds.skipped
        ]
        report = ArchCheckerReport(tuple(found))
        if result_dir is not None:
            report.export_to_html(result_dir)
        return report

    @staticmethod
    def add_node_check(check_target_type: Any, arch_check: Any) -> None:
        """AIMET keeps checks for the whole process; here they are given to :meth:`check_model_arch`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "ArchChecker.add_node_check",
            "checks are not kept for the process",
            "pass them: ArchChecker.check_model_arch(model, dummy_input, rules=(*RULES, Rule(...)))",
        )

    @staticmethod
    def add_pattern_check(arch_check: Any) -> None:
        """As :meth:`add_node_check`.

        Raises:
            ConfigError: always.
        """
        ArchChecker.add_node_check(None, arch_check)

    @staticmethod
    def set_export_dir(dir_path: str) -> None:
        """AIMET keeps one folder for the whole process; here it is given to :meth:`check_model_arch`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "ArchChecker.set_export_dir",
            "a folder is not kept for the process",
            f"pass it: ArchChecker.check_model_arch(model, dummy_input, result_dir={dir_path!r})",
        )


# ------------------------------------------------------------------------------------ what stands in the way of a simulation


class ModelValidator:
    """Reused modules and functional calls are not obstacles here; a model that cannot be recorded is one."""

    @staticmethod
    def validate_model(
        model: nn.Module, model_input: Any, checks: tuple[Callable[..., bool], ...] = (), **kwargs: Any
    ) -> bool:
        """Whether ``model`` runs on ``model_input`` and its operators can be seen; ``checks`` are asked as well.

        A check is ``check(model, model_input, **kwargs) -> bool``.
        """
        try:
            front.QuantizationSimModel(model, model_input)
        except ModelError:
            return False
        return all(check(model, model_input, **kwargs) for check in checks)

    @staticmethod
    def add_check(validation_check: Callable[..., bool]) -> None:
        """AIMET keeps checks for the whole process; here they are given to :meth:`validate_model`.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "ModelValidator.add_check",
            "checks are not kept for the process",
            "pass them: ModelValidator.validate_model(model, model_input, checks=(check,))",
        )
