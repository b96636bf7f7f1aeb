"""Runs ``bitwright quantize`` in forked copies of a process, and presses Ctrl-C; ``test_ctrl_c.py`` runs it by itself.

Every function whose name begins with ``at_`` or ``in_`` is given to ``--metric``: it is called with the float model, before
the recipe, and after each of its steps.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import bitwright.onnx  # before the forks
from bitwright.cli import main
from tests.onnx.nets import conv_chain

CALLS = itertools.count()


def at_a_boundary(session: Any) -> float:
    """Ctrl-C in the call of this number."""
    if next(CALLS) == int(os.environ["AT"]):
        os.kill(os.getpid(), signal.SIGINT)
    return 1.0


def in_a_finalizer(session: Any) -> float:
    """The KeyboardInterrupt is raised where Python drops it."""

    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)

    if not next(CALLS):
        Finalized()
    return 1.0


def in_an_extension(session: Any) -> float:
    """The KeyboardInterrupt is turned into another error."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
    except KeyboardInterrupt as error:
        raise RuntimeError("KeyboardInterrupt: <no message>") from error
    return 1.0


def _count() -> None:
    hashlib.pbkdf2_hmac("sha512", b"", b"", 2**31 - 1)


def in_a_kernel(session: Any) -> float:
    """C code that does not return."""
    main = threading.main_thread().ident
    assert main is not None

    def say_so() -> None:
        # Python lets another thread run where a function begins and, on its only line, in the C code.
        frame = sys._current_frames()[main]
        while frame.f_code is not _count.__code__ or frame.f_lineno == _count.__code__.co_firstlineno:
            time.sleep(0.01)
            frame = sys._current_frames()[main]
        print("in C", flush=True)

    threading.Thread(target=say_so, daemon=True).start()
    _count()
    return 1.0


def quantize(work: Path, out: Path, metric: str, meanwhile: Callable[[int, int], None]) -> tuple[int, str]:
    """Exit code and what was printed of a command; ``meanwhile`` is given its process and what it prints to."""
    steps = "fold,equalize,gptq,bias_correction"
    arguments = ["--data", work / "data.npz", "--out", out, "--recipe", steps, "--metric", f"{__spec__.name}:{metric}"]
    near, far = os.pipe()
    child = os.fork()
    if not child:
        code = 99
        try:
            os.dup2(far, 1), os.dup2(far, 2)
            signal.signal(
                signal.SIGINT, signal.default_int_handler
            )  # ignored where a shell runs tests in the background
            sys.argv = ["bitwright", "quantize", str(work / "net.onnx"), "--prefix", "net", *map(str, arguments)]
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        except KeyboardInterrupt:  # a second one, after the command has cleaned up: a shell reports this
            code = 130
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(far)
    meanwhile(child, near)
    with os.fdopen(near, "rb") as printed:
        text = printed.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def run(work: Path) -> None:
    """Asserts everything; prints how often a random Ctrl-C left the old and the new export."""
    onnx.save(conv_chain(2), work / "net.onnx")
    shape = (8, *(d.dim_value for d in conv_chain(2).graph.input[0].type.tensor_type.shape.dim[1:]))
    np.savez(work / "data.npz", x=np.random.default_rng(0).normal(size=shape).astype(np.float32))
    out, wait = work / "out", lambda child, near: None
    for at in range(6):  # the float model, no step, and four steps
        os.environ["AT"] = str(at)
        code, text = quantize(work, out, "at_a_boundary", wait)
        assert code == 130 and "interrupted" in text and "nothing was written" in text, (at, code, text)
        assert ("during the step" in text) == (at > 1), text
        assert not out.exists()
    os.environ["AT"] = "99"
    code, text = quantize(work, out, "at_a_boundary", wait)
    assert code == 0 and "wrote" in text, text
    old = content(out)
    for metric in ("in_a_finalizer", "in_an_extension"):
        code, text = quantize(work, out, metric, wait)
        assert code == 130 and "interrupted" in text, (metric, code, text)
        assert metric == "in_a_finalizer" or ("the earlier export is as it was" in text and content(out) == old)

    def twice(child: int, near: int) -> None:
        assert os.read(near, 4) == b"in C"
        os.kill(child, signal.SIGINT)
        text = b""
        while b"again ends at once" not in text:
            more = os.read(near, 1000)
            assert more, text  # it ended
            text += more
        os.kill(child, signal.SIGINT)

    before = content(out)
    assert quantize(work, out, "in_a_kernel", twice)[0] == 130
    assert content(out) == before
    start = time.monotonic()
    quantize(work, out, "at_a_boundary", wait)
    length, chance = time.monotonic() - start, random.Random(0)
    for _ in range(12):
        code, text = quantize(
            work, out, "at_a_boundary", lambda child, near: (
                time.sleep(0.02 + chance.random() * length), os.kill(child, signal.SIGINT)
            ),
        )  # fmt: skip
        assert code in (0, 130) and (code == 0) == ("interrupted" not in text), (code, text)
        assert not [name for name in content(out) if name.startswith(".")]
        assert bitwright.onnx.load_model(out / "net.onnx") and len(content(out)) == len(before)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
