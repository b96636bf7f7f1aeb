"""Run tests with other versions of Python and of the libraries than those of constraints.txt.

A combination is an interpreter and a set of libraries: ``oldest`` are the lower bounds of pyproject.toml, literally;
``pinned`` is constraints.txt; ``newest`` is whatever the package index offers. Each gets an environment of its own, into which
the checkout is installed with the extras that users install, and runs the tests named; the last lines are a table row each.

    python tools/versions.py                          # Python 3.11 oldest, 3.12 pinned, 3.13 newest
    python tools/versions.py 3.13:pinned 3.11:newest  # others
    python tools/versions.py 3.11:oldest --tests tests/core -- -x -k graph
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETS = ("oldest", "pinned", "newest")
COMBINATIONS = ("3.11:oldest", "3.12:pinned", "3.13:newest")
#: extras that users install; their lower bounds are claims
EXTRAS = ("torch", "onnx", "analysis", "fast", "litert")
#: what runs the tests; its versions are no claim
RUNNERS = ("pytest>=8.2", "pytest-xdist>=3.6", "pytest-benchmark>=5.0", "hypothesis>=6.100", "pillow>=11.0")
TESTS = (
    "tests/core",
    "tests/torch/test_calls.py",
    "tests/onnx/model",
    "tests/export",
    "tests/conformance",
    "tests/test_cli.py",
)
SHOWN = ("torch", "onnx", "onnx-ir", "onnxruntime", "numpy")


@dataclass(frozen=True)
class Combination:
    """A version of Python, such as ``3.12``, and a set of libraries, one of ``SETS``."""

    python: str
    libraries: str

    @classmethod
    def parse(cls, text: str) -> Combination:
        """``3.12:pinned`` as a combination.

        Raises:
            argparse.ArgumentTypeError: another form, or a set that does not exist.
        """
        found = re.fullmatch(rf"(3\.\d+):({'|'.join(SETS)})", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not a version and one of {SETS}, such as 3.12:pinned")
        return cls(*found.groups())

    def __str__(self) -> str:
        return f"{self.python}:{self.libraries}"


def requirements(project: dict[str, object]) -> list[str]:
    """What users install: the dependencies of the package and of ``EXTRAS``."""
    section = project["project"]
    assert isinstance(section, dict)
    extras = section["optional-dependencies"]
    wanted = [*section["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    return [line for line in wanted if not line.startswith(f"{section['name']}[")]


def lower_bounds(lines: list[str]) -> list[str]:
    """Each requirement at the oldest version that it allows.

    >>> lower_bounds(["numpy>=2.0", "mkdocs>=1.6,<2"])
    ['numpy==2.0', 'mkdocs==1.6']
    """
    return [re.sub(r">=([\w.]+).*", r"==\1", line) for line in lines]


def interpreter(version: str) -> str | None:
    """An executable of Python ``version`` that starts: on the path, then among pyenv's and uv's; ``None`` without one."""
    homes = (Path.home() / ".pyenv/versions", Path.home() / ".local/share/uv/python")
    kept = [str(p) for home in homes for p in sorted(home.glob(f"*{version}.*/bin/python{version}"))]
    for candidate in (shutil.which(f"python{version}"), *kept):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    return None


def install(combination: Combination, folder: Path, pip_flags: list[str]) -> Path:
    """Make the environment of a combination, or bring it up to date, and return its Python.

    Raises:
        subprocess.CalledProcessError: an installation failed; pip has said why.
        FileNotFoundError: the interpreter does not exist here.
    """
    home = folder / str(combination).replace(":", "-")
    python = home / "bin" / "python"
    if not python.exists():
        base = interpreter(combination.python)
        if base is None:
            raise FileNotFoundError(f"no Python {combination.python} was found")
        subprocess.run([base, "-m", "venv", str(home)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    pip += pip_flags
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    if combination.libraries == "oldest":
        bounds = home / "oldest.txt"
        bounds.write_text("\n".join(lower_bounds(wanted)), encoding="utf-8")
        pip += ["-c", str(bounds)]
    elif combination.libraries == "pinned":
        pip += ["-c", str(ROOT / "constraints.txt")]
    else:
        pip += ["--upgrade", "--upgrade-strategy", "eager"]
    subprocess.run([*pip, *wanted, *RUNNERS], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """The versions of ``SHOWN`` in an environment."""
    code = f"from importlib.metadata import version as v; print(*[v(n) for n in {SHOWN!r}])"
    run = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(SHOWN, run.stdout.split(), strict=True))


def run_tests(python: Path, tests: list[str], more: list[str]) -> str:
    """Run tests in an environment; pytest's closing line."""
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests, *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return next((line.strip("= \n") for line in reversed(lines) if line.strip()), "no output")


def main() -> int:
    """Install and run every combination; 1 when one has no interpreter, cannot be installed or fails a test."""
    more = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    known = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "combinations",
        nargs="*",
        type=Combination.parse,
        default=[Combination.parse(text) for text in COMBINATIONS],
        metavar="PYTHON:SET",
        help=f"such as 3.12:pinned; sets are {', '.join(SETS)}; default: {' '.join(COMBINATIONS)}",
    )
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="what pytest runs; -- and more of its options")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="where environments are kept")
    parser.add_argument("--pip-flags", default="", help="given to every pip install, such as --index-url=...")
    parser.add_argument("--install-only", action="store_true", help="make the environments, and run nothing")
    options = parser.parse_args(known)
    rows, failed = [], False
    for combination in options.combinations:
        print(f"--- {combination}", flush=True)
        try:
            python = install(combination, options.folder, options.pip_flags.split())
            result = "installed" if options.install_only else run_tests(python, options.tests, more)
            found = versions(python)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            result, found = f"not installed: {error}", dict.fromkeys(SHOWN, "")
        failed |= "failed" in result or "error" in result or "not installed" in result
        rows.append(" | ".join(["", str(combination), *found.values(), result, ""]).strip())
    print(f"\n| combination | {' | '.join(SHOWN)} | result |\n|---|{'---|' * len(SHOWN)}---|")
    print("\n".join(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
