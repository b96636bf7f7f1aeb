"""Precision of every layer, chosen: groups, costs, the choice among them, and the search that evaluates it; both front ends.

``precisions`` says what can be chosen, ``choosing`` what a choice costs, ``search`` measures points, ``automatic`` tries
whole recipes. Analyses of one given simulation are in ``bitwright.analysis``.
"""
