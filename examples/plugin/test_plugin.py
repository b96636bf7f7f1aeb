"""The conformance tests of Bitwright, for every row of the package: `pytest` in this folder, once it is installed."""

import pytest

from bitwright.testing import CHECKS, check

NAMES = {
    "range_methods": "three_sigma",
    "formats": "float5_e2m2",
    "steps": "shrink_weights",
    "operators": "bitwright_example::project",
    "files": "example_npz",
    "targets": "example_chip",
    "runtimes": "onnx_reference",
    "metrics": "margin",
}


@pytest.mark.parametrize("kind, test", [(kind, test) for kind in NAMES for test in CHECKS[kind]])
def test_conforms(kind: str, test: str) -> None:
    """What Bitwright asks of a row of this kind."""
    check(kind, NAMES[kind], test)
