"""Runtimes that execute exported files, one adapter each, and measurements in them.

A runtime is an extra of the installation: ``pip install 'bitwright[openvino]'``.
"""
