"""A torch model or simulation as the protocols of :mod:`bitwright.algorithms` see it."""
