"""Recurrent layers of marked models, written as a Scan with markers inside or as the native operator.

The arithmetic of a step is :mod:`bitwright.core.graph.recurrence`; quantizers are written by :mod:`bitwright.export.qdq`.
"""
