"""A command that Ctrl-C ends has exit code 130, keeps the earlier export, and says so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bitwright.cli import app
from tests.support.processes import python


@pytest.mark.slow
def test_ctrl_c_at_step_boundaries_at_random_moments_and_in_c_code(tmp_path: Path) -> None:
    """See ``stopped_command.py``: also where the KeyboardInterrupt is lost, and where C code does not return."""
    python("-m", "tests.support.stopped_command", tmp_path)


def test_a_command_that_is_interrupted_has_exit_code_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bitwright.onnx.load_model", interrupted)
    result = CliRunner().invoke(app, ["quantize", "m.onnx", "--out", str(tmp_path)])
    assert result.exit_code == 130 and "interrupted" in result.stderr


_HANDLERS = """
import signal
from bitwright.interrupt import watched
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
try:
    with watched() as interrupts:
        signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    assert interrupts.seen and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1
    print("as before")
"""
_LONG_IMPORT = "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(0.2)\nwhole = True\n"
_IMPORTS = """
import signal, time
from bitwright.interrupt import watched
signal.signal(signal.SIGINT, signal.default_int_handler)
clock = signal.getsignal(signal.SIGALRM)
try:
    with watched() as interrupts:
        import long_import
        assert interrupts.seen and long_import.whole
        while True:
            time.sleep(0.01)
except KeyboardInterrupt:
    assert signal.getsignal(signal.SIGALRM) == clock and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    print("as before")
"""
_IGNORED = """
import signal
from bitwright.interrupt import watched
signal.signal(signal.SIGINT, signal.SIG_IGN)
with watched() as interrupts:
    signal.raise_signal(signal.SIGINT)
assert not interrupts.seen
print("as before")
"""


def alone(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The result of ``code`` in a process of its own: what other tests have loaded may handle signals too."""
    path = os.pathsep.join((str(folder), str(Path(__file__).parents[1])))
    return python("-c", code, env={"PYTHONPATH": path}, check=False)


def test_handlers_are_those_of_before_when_the_block_ends(tmp_path: Path) -> None:
    ran = alone(_HANDLERS, tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "as before\n"), ran.stderr


def test_an_import_ends_first(tmp_path: Path) -> None:
    """C++ extensions abort the process where they meet a KeyboardInterrupt while they are loaded."""
    (tmp_path / "long_import.py").write_text(_LONG_IMPORT)
    ran = alone(_IMPORTS, tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "as before\n"), ran.stderr


def test_a_program_that_ignores_ctrl_c_goes_on_doing_so(tmp_path: Path) -> None:
    ran = alone(_IGNORED, tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "as before\n"), ran.stderr


@pytest.mark.parametrize("prefix", ["../../up", "", "a/b"])
def test_the_prefix_of_a_command_cannot_lead_out_of_its_folder(tmp_path: Path, prefix: str) -> None:
    model = tmp_path / "m.onnx"
    from tests.onnx.nets import conv_chain

    model.write_bytes(conv_chain(1).SerializeToString())
    result = CliRunner().invoke(app, ["quantize", str(model), "--out", str(tmp_path / "a" / "b"), "--prefix", prefix])
    assert result.exit_code == 2 and "error: --prefix=" in result.stderr, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
