"""Placement of quantizers: rules, configuration files, and the plan made from them.

A plan is a pure function of graph, rules and operator table. Ranges and scales are found later, in
:mod:`bitwright.core.simulation`.
"""
