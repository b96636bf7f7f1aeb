"""Which tensors are quantized and how: rules, configuration files, and the plan that follows from them.

A plan is a pure function of graph, rules and operator table. Ranges and scales are found later, in
:mod:`bitwright.core.simulation`.
"""
