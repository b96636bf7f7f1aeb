"""Shared parts of the AIMET-compatible packages ``bitwright.aimet_torch`` and ``bitwright.aimet_onnx``.

These packages have AIMET's module paths, names and signatures, so that a script moves by changing its imports
(``bitwright migrate`` does it). They hold no arithmetic and no algorithm: every function maps its arguments, calls
Bitwright's own API and maps the result. New code is better written against :mod:`bitwright.torch` and
:mod:`bitwright.onnx`.
"""

from bitwright.aimet_common.names import install

install()
