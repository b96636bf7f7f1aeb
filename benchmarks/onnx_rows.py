"""The rows of ONNX models in the table of speed: calibration on a few batches, equalization, export, import; one command."""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import onnx_speed

from bitwright.core.compiled.loops import loops
from bitwright.onnx import QuantizationSimModel, equalize_model

HELP = """\
CPU seconds and ratios of MobileNetV2, 224 x 224, batch 4, as an ONNX model: least and median over the rounds, in each of which
every row runs once, after one unmeasured round. Run it on one core (taskset -c 0): ONNX Runtime's threads wait actively.

rows of the table:
  float            seconds of the batches in the float session
  min-max          compute_encodings on the same batches, all that it opens and searches included; ratio to float
  histogram        the same with quant_scheme="percentile"
  creation         seconds of QuantizationSimModel
  equalization     seconds of equalize_model
  export           seconds of sim.export without samples
  export, samples  seconds of sim.export with the samples that verification needs
  import           seconds of importing bitwright.onnx and its QuantizationSimModel in a fresh process
"""
_IMPORT = (
    "import time; start = time.process_time(); import bitwright.onnx; bitwright.onnx.QuantizationSimModel; "
    "print(time.process_time() - start)"
)


def steps_of(bench: onnx_speed.Bench) -> dict[str, Callable[[], Any]]:
    """Row -> what is timed."""
    sims = {row: bench.sim(scheme) for row, scheme in (("min-max", "min_max"), ("histogram", "percentile"))}
    calibrated = bench.calibrated()

    def export(samples: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            calibrated.export(folder, "model", samples=samples)

    return {
        "float": bench.float_pass,
        **{row: (lambda sim=sim: sim.compute_encodings(bench.batches, progress=False)) for row, sim in sims.items()},
        "creation": lambda: QuantizationSimModel(bench.model, bench.batches[0], threads=1),
        "equalization": lambda: equalize_model(copy.deepcopy(bench.model), bench.batches[0], progress=False),
        "export": lambda: export(False),
        "export, samples": lambda: export(True),
    }  # fmt: skip


def import_seconds() -> float:
    """CPU seconds of the import in a fresh process."""
    run = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
    return float(run.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8, metavar="N")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    options = parser.parse_args(arguments)
    steps = steps_of(onnx_speed.Bench("mobilenet_v2", 224, options.batches, options.rounds))
    for step in steps.values():
        step()
    found: dict[str, list[float]] = {row: [] for row in (*steps, "import")}
    for i in range(options.rounds):
        print(f"round {i + 1} of {options.rounds} ...", file=sys.stderr, flush=True)
        for row, step in steps.items():
            found[row].append(measure.seconds(step))
        found["import"].append(import_seconds())
    title = f"ONNX: MobileNetV2, {options.batches} batches of 4, CPU time, one core"
    columns = ["", "least", "median", "least / float", "median / float"]
    base = found["float"]
    rows = [
        [row, *(f"{of(times):.3f} s" for of in (min, statistics.median))]
        + [f"{of(times) / of(base):.2f}" if row in ("min-max", "histogram") else "" for of in (min, statistics.median)]
        for row, times in found.items()
    ]  # fmt: skip
    measure.show(title, columns, rows)
    raw = {"batches": options.batches, "numba": loops() is not None, "seconds": found, "numpy": np.__version__}
    measure.save(options.json, options.markdown, title, columns, rows, raw)


if __name__ == "__main__":
    main()
