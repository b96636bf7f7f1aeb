"""``aimet_torch.arch_checker``: what of a model runs slower, or less exactly, on a target than it could."""

from bitwright.aimet_torch.arch_checker.arch_checker import RULES, ArchChecker, ArchCheckerReport, Finding, Rule

__all__ = ["RULES", "ArchChecker", "ArchCheckerReport", "Finding", "Rule"]
