"""What the export notes on operators, read back: as it was, or refused."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from bitwright.errors import ExportError
from bitwright.export.qdq.forms import METADATA, note_metadata, read_metadata


def node() -> ir.Node:
    return ir.Node("", "DequantizeLinear", [ir.Value(name="x")], name="x_dq")


def test_notes_are_read_as_they_were_written() -> None:
    noted = node()
    assert read_metadata(noted) is None
    note_metadata(noted, places=[("conv.weight", 0)], role="weight", scale=None)
    facts = read_metadata(noted)
    unset = {"scale": None, "entry": None, "axis": None, "perm": [], "pooled": 0}
    assert facts == {"places": [["conv.weight", 0]], "role": "weight", **unset}
    assert noted.metadata_props[METADATA] == '{"places":[["conv.weight",0]],"role":"weight"}', (
        "what is usual is left out"
    )


def test_the_scale_that_the_operator_reads_is_not_written_again() -> None:
    noted = ir.Node("", "DequantizeLinear", [ir.Value(name="x"), ir.Value(name="s")], name="x_dq")
    note_metadata(noted, places=[("a", 0)], role="activation", scale="s", axis=1)
    assert "scale" not in noted.metadata_props[METADATA]
    facts = read_metadata(noted)
    assert facts is not None and facts["scale"] == "s" and facts["axis"] == 1
    note_metadata(noted, places=[("a", 0)], role="activation", scale="other")
    assert (read_metadata(noted) or {})["scale"] == "other"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{", id="no-json"),
        pytest.param(b'{"places": [["ac\x95", 0]]}', id="no-text"),
        pytest.param("[]", id="list"),
        pytest.param('{"role": "weight"}', id="no-places"),
        pytest.param('{"places": [["a"]]}', id="half-a-place"),
        pytest.param('{"places": [["a", "b"]]}', id="run-without-number"),
        pytest.param('{"places": 3}', id="number"),
    ],
)
def test_damaged_notes_name_the_operator(text: str) -> None:
    noted = node()
    noted.metadata_props[METADATA] = text
    with pytest.raises(ExportError, match="x_dq: what the export wrote on this operator is damaged.*export again"):
        read_metadata(noted)
