"""Metrics by name, of outputs and right answers, and how sure their differences are."""
