"""What becomes of an export when its process is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_an_export_that_is_stopped_anywhere_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """Killed or interrupted before every change of a file; whoever reads first: verify, show, load_encodings."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.onnx.stopped_export", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert [stop for stop, *_ in lines] == ["kill", "interrupt"]
    for _, *outcomes in lines:
        switch = outcomes.index("new")
        assert switch > 8 and len(outcomes) - switch > 8
        assert set(outcomes[:switch]) == {"old"} and set(outcomes[switch:]) == {"new"}


@pytest.mark.slow_variants("500")
@pytest.mark.parametrize("limit", [500, 9000])
def test_a_full_temporary_folder_is_named(tmp_path: Path, limit: int) -> None:
    """The limit on file sizes stands for a full disk: ONNX Runtime writes its optimised model into a temporary folder."""
    code = f"""
import resource
import bitwright.onnx as bo
from bitwright.errors import ExportError
from tests.onnx.nets import conv_chain, feeds_for
model = conv_chain(3, 16)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    bo.quantize(model, [feeds_for(model)], recipe=["fold"], path={str(tmp_path / "out")!r})
except ExportError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert "the temporary folder has no room for" in ran.stdout and "in TMPDIR" in ran.stdout, ran.stderr
    assert not (tmp_path / "out").exists()


def test_a_full_temporary_folder_is_named_by_what_writes_there_itself() -> None:
    """Weights of a large model are spilled; one whose tensors lie in another file is opened and verified through a file."""
    code = """
import resource
import numpy as np
import onnx
import onnx_ir as ir
import bitwright.onnx as bo
from onnx import helper
from bitwright.errors import ExportError
from bitwright.export.verify import runtime
from bitwright.onnx.model.session import open_session
w = onnx.numpy_helper.from_array(np.eye(1100, dtype=np.float32), "w")
values = [helper.make_tensor_value_info(name, 1, [2, 1100]) for name in ("x", "y")]
graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [w])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
x = np.ones((2, 1100), np.float32)
sim = bo.QuantizationSimModel(model, x, threads=1)
loaded = ir.from_proto(model)
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
for what in (
    lambda: sim.compute_encodings([x], progress=False),
    lambda: open_session(loaded),
    lambda: runtime.optimized_types(loaded),
):
    try:
        what()
    except ExportError as error:
        print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.stdout.count("the temporary folder has no room for what is to be written") == 3, ran.stderr + ran.stdout
    assert "in TMPDIR" in ran.stdout
