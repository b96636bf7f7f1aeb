"""Precision of every layer, chosen: groups, costs, the choice among them, and the search that evaluates it; both front ends."""
