"""The PyTorch front end: simulation, folding and export of eager modules, without tracing or edits."""

from bitwright.lazy import published

__all__, __getattr__, __dir__ = published(__name__, __file__)
