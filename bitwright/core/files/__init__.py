"""Reading what comes from outside, within stated limits: documents, arrays, functions named on the command line.

What the documents mean is decided where it is needed: rules in :mod:`bitwright.core.placement`, encodings in ``export``.
"""
