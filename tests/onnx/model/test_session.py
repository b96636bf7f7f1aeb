"""How sessions are opened."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from bitwright.onnx.model.session import open_session
from tests.onnx.nets import conv_chain


@pytest.mark.parametrize(
    ("asked", "environment", "given"),
    [(0, "3", 3), (0, "2,4", 2), (5, "3", 5), (0, "", 0), (0, "all", 0), (0, "-1", 0), (0, "0", 0)],
)
def test_threads_are_those_asked_for_or_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, asked: int, environment: str, given: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    session = open_session(ir.from_proto(conv_chain(1)), threads=asked)
    assert session.get_session_options().intra_op_num_threads == given
