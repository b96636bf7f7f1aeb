"""Measuring: interleaved ratios, seconds, peak memory of a fresh process; and where the numbers go.

Import this before ``tests`` or ``bitwright``: it puts the repository on the path, so that the benchmarks run
from a checkout, and fixes one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

torch.set_num_threads(1)

Step = Callable[[], Any]
Row = Callable[[str, str], list[str]]


def seconds(step: Step) -> float:
    """CPU seconds of one run of ``step``, whatever else the machine does; garbage is collected first, outside the time."""
    gc.collect()
    start = time.process_time()
    step()
    return time.process_time() - start


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file, JSON lines; none if there is no file yet."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def median_seconds(step: Step, rounds: int) -> float:
    """The median time of ``step``, after one unmeasured run."""
    step()
    return statistics.median(seconds(step) for _ in range(rounds))


def ratio(base: Step, ours: Step, rounds: int) -> float:
    """Time of ``ours`` / time of ``base``, the median over ``rounds`` rounds.

    Each round runs both, one right after the other and in alternating order, and gives one ratio: what slows
    the machine down for a while slows both. One unmeasured run of each comes first.
    """
    base()
    ours()
    ratios = []
    for i in range(rounds):
        times = {step: seconds(step) for step in ((base, ours) if i % 2 == 0 else (ours, base))}
        ratios.append(times[ours] / times[base])
    return statistics.median(ratios)


def peak_mib() -> float:
    """The largest resident size of this process since its start or :func:`forget_peak`, in MiB."""
    # Linux keeps ru_maxrss across exec: a child would start with its parent's peak. VmHWM is this program's.
    with contextlib.suppress(FileNotFoundError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def forget_peak() -> None:
    """Let :func:`peak_mib` start again from the present size, where the system can (Linux)."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")


def in_fresh_process(script: str, *arguments: str) -> Any:
    """Run ``script`` with ``arguments`` in a new interpreter and read the JSON on its last line of output."""
    run = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"{Path(script).name} {' '.join(arguments)} failed:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(FileNotFoundError), open("/proc/cpuinfo") as info:
        names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _commit() -> str:
    run = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one table, the first column left, the rest right."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text: str = "") -> str:
    """The table as Markdown, with ``text`` above it and the machine below."""
    lines = [
        f"# {title}",
        "",
        *([text, ""] if text else []),
        "| " + " | ".join(columns) + " |",
        "|---|" + "---:|" * (len(columns) - 1),
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", ", ".join(f"{k}: {v}" for k, v in machine().items()), ""])


def write(path: Path, text: str) -> None:
    """Write ``text`` under a temporary name, then move it into place."""
    handle, name = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)  # mkstemp makes private files
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def save(
    json_path: Path | None,
    markdown_path: Path | None,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    raw: Any,
    text: str = "",
) -> None:
    """Write the raw numbers and the table, with ``text`` above it, where the command line asked for them."""
    if json_path is not None:
        write(json_path, json.dumps({"machine": machine(), "results": raw}, indent=2) + "\n")
    if markdown_path is not None:
        write(markdown_path, markdown(title, columns, rows, text))


def run_rows(
    title: str, columns: Sequence[str], cases: Sequence[tuple[str, str]], row: Row, text: str | None = None
) -> None:
    """The command line of a table with one row per model and front end: ``--only``, ``--markdown``, ``--json``.

    Args:
        title: of the table.
        columns: heads of its columns.
        cases: model and front end of each row.
        row: measures one of them and returns its cells.
        text: what ``--help`` says.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="models")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, front_end in cases:
        if options.only and name not in options.only:
            continue
        rows.append(row(name, front_end))
        print(*rows[-1], sep="  ", flush=True)
    show(title, columns, rows)
    raw = [dict(zip(columns, one, strict=True)) for one in rows]
    save(options.json, options.markdown, title, columns, rows, raw)
