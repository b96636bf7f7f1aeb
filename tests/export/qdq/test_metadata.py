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
    unset = {"scale": None, "entry": None, "pooled": 0}
    assert facts == {"places": [["conv.weight", 0]], "role": "weight", **unset}


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
