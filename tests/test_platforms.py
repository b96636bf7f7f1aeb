"""The package calls nothing that exists on Linux alone, unless another way is at hand where it is missing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import bitwright

_PACKAGE = Path(bitwright.__file__).parent
#: modules of the standard library that Windows does not have
_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "spwd", "syslog", "termios", "tty"}
#: functions and constants of ``os`` and ``signal`` that Windows or macOS do not have
_NAMES = {
    "fork", "forkpty", "getuid", "getgid", "killpg", "mkfifo", "posix_fadvise", "posix_fallocate", "sched_getaffinity",
    "sched_setaffinity", "setsid", "statvfs", "wait4", "SIGALRM", "SIGKILL", "SIGUSR1", "SIGUSR2", "setitimer",
}  # fmt: skip


def _linux_only(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each use of something that is not on every system."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names if one.name in _MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in _MODULES:
            yield node.lineno, node.module
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("os", "signal") and node.attr in _NAMES:
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(("/proc", "/dev/"))
        ):
            yield node.lineno, node.value
        elif isinstance(node, ast.Constant) and node.value in ("fork", "forkserver"):
            yield node.lineno, f"{node.value!r}"


def _uses(text: str) -> set[str]:
    return {name for _, name in _linux_only(ast.parse(text))}


#: what is used, and what happens where it is missing (each was read)
_WITH_ANOTHER_WAY = {
    ("llm/quantized.py", "resource"): "returns 0 on Windows before the import",
    ("export/files/atomic.py", "fcntl"): "None on Windows: folders are not locked",
    ("runtimes/benchmark.py", "os.sched_getaffinity"): "os.cpu_count",
    ("compare/certificate.py", "/proc/cpuinfo"): "an empty list",
    ("interrupt.py", "signal.SIGALRM"): "only where the system has it",
    ("interrupt.py", "signal.setitimer"): "only where the system has it",
}


def test_every_use_of_a_linux_only_name_has_another_way():
    found = {
        (path.relative_to(_PACKAGE).as_posix(), name)
        for path in _PACKAGE.rglob("*.py")
        for _, name in _linux_only(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(_WITH_ANOTHER_WAY), "give it another way, test that way, and add a row"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import resource", {"resource"}),
        ("def f():\n    from fcntl import flock", {"fcntl"}),
        ("import os\nos.fork()", {"os.fork"}),
        ("open('/proc/self/status')", {"/proc/self/status"}),
        ("get_context('fork')", {"'fork'"}),
        ("import os\nos.cpu_count()", set()),
    ],
)
def test_the_search_sees_each_kind_of_use(text, names):
    assert _uses(text) == names
