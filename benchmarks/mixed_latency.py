"""Milliseconds as the cost of mixed precision: predicted against measured, of the models that searches choose, in ONNX Runtime.

    python benchmarks/mixed_latency.py --results latency.jsonl --markdown benchmarks/results/mixed_latency.md

Times of layers are measured once per network (W8A8, W8A16, W4A8 and W4A16 for all). Searches then make milliseconds small for
SQNRs a quarter, half and three quarters of the way from W8A8 to W8A16. The file of each choice runs in turns with the others: CPU
time, one thread, batch of one, the least of 21 rounds.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import onnx

from bitwright import measure_times, mixed_precision
from bitwright.precision.search import CANDIDATES
from bitwright.runtimes.adapters import open_file
from bitwright.runtimes.timing import interleaved
from tests.support import data
from tests.support.tasks import TASKS, exported

CASES = ("mobilenet_v1_025", "mobilenet_v2_cifar", "resnet20_aux", "lstm_char", "stories260k")
WAYS = (0.25, 0.5, 0.75)
ROUNDS = 21


def rows(name: str) -> list[dict[str, Any]]:
    """One row per SQNR of one network."""
    task = TASKS[name]()
    proto = onnx.load(data.onnx_file(task.file)) if task.file else exported(name, task)
    batches = [x.numpy() for x in task.batches(0)[0][:10].split(1)]
    times = measure_times(proto, batches, rounds=ROUNDS)
    with tempfile.TemporaryDirectory() as text:
        files, found = {}, []
        ends = [
            mixed_precision(proto, batches, [c], budget=1.0, rounding=False).points[0].sqnr_db
            for c in ("w8a8", "w8a16")
        ]
        for way in WAYS:
            level = ends[0] + way * (ends[1] - ends[0])
            result = mixed_precision(
                proto, batches, cost="ms", times=times, min_sqnr=level, rounding=False, evaluations=8
            )
            point = result.chosen
            if point is None:
                continue
            files[way] = result.sim.export(Path(text, str(way)), "m", samples=False).qdq
            wide = sum(c.endswith("a16") for c in point.choice.values()) / len(point.choice)
            found.append({"name": name, "level": level, "way": way, "wide": wide, "predicted": point.costs["ms"]})
        opened = {str(way): open_file("onnxruntime", path, threads=1) for way, path in files.items()}
        given = onnx.load(next(iter(files.values()))).graph.input[0].name
        steps = {k: (lambda session=session: session.run({given: batches[0]})) for k, session in opened.items()}
        taken = interleaved(steps, rounds=ROUNDS, clock=time.process_time)
        for row in found:
            row["measured"] = 1e3 * min(taken[str(row["way"])].rounds)
            row["uniform"] = times["whole"]
    return found


def table(found: list[dict[str, Any]]) -> str:
    """All rows as Markdown."""
    head = ["network", "SQNR asked for", "groups with 16-bit activations", "predicted ms", "measured ms", "ratio",
            *(f"{c} for all, ms" for c in CANDIDATES)]  # fmt: skip
    lines = [
        [r["name"], f"{r['level']:.1f} dB", f"{r['wide']:.0%}", f"{r['predicted']:.3f}", f"{r['measured']:.3f}",
         f"{r['predicted'] / r['measured']:.2f}", *(f"{r['uniform'][c]:.3f}" for c in CANDIDATES)]
        for r in found
    ]  # fmt: skip
    return measure.markdown(
        "Milliseconds of chosen mixed precisions in ONNX Runtime: predicted against measured", head, lines
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; networks there are not run again")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--networks", nargs="*", default=CASES)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    known = measure.read_rows(options.results)
    for name in options.networks:
        if name not in {r["name"] for r in known}:
            new = rows(name)
            known += new
            with options.results.open("a") as file:
                file.writelines(json.dumps(r) + "\n" for r in new)
    text = table(known)
    print(text)
    if options.markdown:
        measure.write(options.markdown, text)


if __name__ == "__main__":
    main()
