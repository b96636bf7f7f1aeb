"""The public names are exactly the published list, and each of them loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import bitwright

PUBLIC = {
    "__version__", "quantize",
    "QuantSpec", "RangeMethod", "Preset", "PRESETS", "Rule",
    "IntFormat", "FloatFormat", "PerTensor", "PerChannel", "PerBlock", "PerGate",
    "BitwrightError", "BusyError", "CalibrationError", "ConfigError", "EncodingsError", "ExportError", "FormatError",
    "GranularityError", "ModelError", "RangeError",
}  # fmt: skip


def test_dir_is_exactly_the_published_list():
    assert set(dir(bitwright)) == PUBLIC == set(bitwright.__all__)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_loads(name):
    value = getattr(bitwright, name)
    assert getattr(value, "__name__", name) == name, "a public name is the name of the thing itself"


def test_star_import_brings_the_published_list():
    namespace: dict[str, object] = {}
    exec("from bitwright import *", namespace)
    assert namespace.keys() - {"__builtins__"} == PUBLIC


def test_every_error_class_is_public():
    from bitwright import errors

    classes = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert classes <= PUBLIC


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'bitwright' has no attribute 'quantise'"):
        bitwright.quantise  # noqa: B018


def test_unknown_name_gets_the_close_match():
    """Python proposes the close match from ``dir()`` when the error reaches the user."""
    run = subprocess.run(
        [sys.executable, "-c", "import bitwright; bitwright.quantise"], capture_output=True, text=True
    )
    assert "Did you mean: 'quantize'?" in run.stderr
