"""Runtimes that execute exported files, one adapter each, and what is measured in them.

A runtime is an extra of the installation: ``pip install 'bitwright[openvino]'``.
"""
