"""``aimet_torch.arch_checker`` and ``aimet_torch.model_validator``: what a model should have before it is quantized."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from bitwright import torch as front
from bitwright.analysis.architecture import RULES, Finding, Rule, check_architecture
from bitwright.analysis.architecture import ArchitectureReport as ArchCheckerReport
from bitwright.errors import ConfigError, ModelError

__all__ = ["RULES", "ArchChecker", "ArchCheckerReport", "Finding", "ModelValidator", "Rule"]


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
            rules: instead of the table of :mod:`bitwright.analysis.architecture`.
        """
        given = tuple(dummy_input) if isinstance(dummy_input, list) else dummy_input
        graph = front.QuantizationSimModel(model, given).graph
        folds = front.fold_all_batch_norms(copy.deepcopy(model), dummy_input=given, progress=False)
        report = check_architecture(graph, rules, folds.skipped)
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
