"""Samples of a simulation in a file: values on a small grid as codes, everything read back bit for bit."""

import numpy as np
import pytest

from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import parse_format
from bitwright.errors import ExportError
from bitwright.export.samples import read_samples, write_samples


def _encoding(fmt="uint8", scale=0.0173, zero_point=3):
    return Encoding(parse_format(fmt), np.float32(scale), np.int32(zero_point))


@pytest.mark.parametrize(
    "fmt, zero_point, coded", [("uint8", 3, True), ("int8", 0, True), ("uint4", 2, True), ("int16", 0, False)]
)
def test_values_come_back_bit_for_bit_and_small_grids_as_codes(tmp_path, fmt, zero_point, coded):
    encoding, drawn = _encoding(fmt, zero_point=zero_point), np.random.default_rng(0)
    runs = [fake_quantize(drawn.normal(size=shape).astype(np.float32), encoding) for shape in [(4, 100), (3, 7, 50)]]
    inputs, outputs = {"x": drawn.normal(size=(4, 100)).astype(np.float32)}, {"y": np.array(["a", "bc"], object)}
    write_samples(tmp_path / "s.npz", {"conv/1": runs}, inputs, outputs, {"conv/1": encoding})
    assert any(name.startswith("codes/") for name in np.load(tmp_path / "s.npz")) == coded
    sites, read_inputs, read_outputs = read_samples(tmp_path / "s.npz")
    assert [x.tobytes() for x in sites["conv/1"]] == [x.tobytes() for x in runs]
    assert read_inputs["x"].tobytes() == inputs["x"].tobytes() and list(read_outputs["y"]) == ["a", "bc"]


def test_values_that_are_not_on_the_grid_stay_as_they_are(tmp_path):
    x = np.random.default_rng(0).normal(size=400).astype(np.float32)
    on_grid = fake_quantize(np.full(400, -1e-9, np.float32), _encoding())
    on_grid[0] = -0.0  # equal to a number of the grid, and not the same bits
    write_samples(tmp_path / "s.npz", {"a": [x], "b": [on_grid]}, {}, {}, {"a": _encoding(), "b": _encoding()})
    assert all(name.startswith("site/") for name in np.load(tmp_path / "s.npz"))
    sites = read_samples(tmp_path / "s.npz")[0]
    assert sites["a"][0].tobytes() == x.tobytes() and sites["b"][0].tobytes() == on_grid.tobytes()


@pytest.mark.parametrize("values", [None, np.zeros(3, np.float32), np.zeros((2, 2), np.float32)])
def test_codes_without_their_values_are_an_error(tmp_path, values):
    parts = {} if values is None else {"values/0/a": values}
    np.savez(tmp_path / "s.npz", **parts, **{"codes/0/a": np.arange(5, dtype=np.uint8)})
    with pytest.raises(ExportError, match="'codes/0/a' without the values.*Remedy: export the model again"):
        read_samples(tmp_path / "s.npz")
