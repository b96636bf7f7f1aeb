"""What quantizers inside recurrent ONNX layers cost on top of ONNX Runtime's own operator: ratios, one thread."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import onnx_ir as ir
import onnxruntime as ort

from bitwright.export.qdq.markers import strip_sites
from bitwright.export.recurrent import expand_recurrent
from bitwright.onnx import QuantizationSimModel
from tests.support.recurrent_nets import Variant, feeds, layer_model

HELP = """\
Time the simulation of one recurrent layer against ONNX Runtime's operator on the same input.

Both run in this process on one thread, one right after the other; the fastest of the rounds counts, because a run of half a
millisecond is shorter than a turn of the system's scheduler. Calibration is of a batch, without what is done once.

rows of the table:
  operator        ms of the native operator
  scan            the layer as a Scan without quantizers / operator
  states          the simulation with x, h and c on a grid / operator
  all             the simulation with every gate on a grid too / operator
  min-max         a batch of min-max calibration / operator
  once            ms that calibration takes beside its batches: weights, sessions
  exported        the exported Scan at the default level / operator
"""

SIZES = {
    "LSTM T50 B1 H128": Variant("LSTM", length=50, batch=1, inputs=128, hidden=128),
    "GRU T50 B1 H128": Variant("GRU", length=50, batch=1, inputs=128, hidden=128),
    "LSTM T100 B8 H256": Variant("LSTM", length=100, batch=8, inputs=256, hidden=256),
    "GRU T100 B8 H256": Variant("GRU", length=100, batch=8, inputs=256, hidden=256),
}
STATES_ONLY = {"rules": [{"match": f"*.{kind}", "inner": None} for kind in ("pre", "gate")]}


class Bench:
    """One layer and its input."""

    def __init__(self, v: Variant, rounds: int) -> None:
        self.v, self.rounds = v, rounds
        self.model, self.feeds = layer_model(v), feeds(v)
        self.native = session(self.model)

    def operator(self) -> None:
        self.native.run(None, self.feeds)

    def sim(self, config: dict[str, Any] | None = None) -> QuantizationSimModel:
        sim = QuantizationSimModel(self.model, self.feeds, config_file=config, threads=1)
        sim.compute_encodings([self.feeds], progress=False)
        return sim

    def ratio(self, step: Callable[[], Any]) -> float:
        return self.best(step) / self.best(self.operator)

    def best(self, step: Callable[[], Any]) -> float:
        """Seconds of the fastest of many runs, the operator's own runs between them."""
        times = []
        for _ in range(self.rounds):
            self.operator()
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return min(times)

    def scan(self) -> float:
        marked = layer_model(self.v, domain="bitwright")
        own = session(strip_sites(expand_recurrent(marked)).model)
        return self.ratio(lambda: own.run(None, self.feeds))

    def simulated(self, config: dict[str, Any] | None = None) -> float:
        sim = self.sim(config)
        return self.ratio(lambda: sim.run(self.feeds))

    def calibration(self) -> float:
        calibrator = self.sim()._calibrator()
        return self.ratio(lambda: calibrator.run(self.feeds))

    def once(self) -> float:
        sim = self.sim()
        whole = min(measure.seconds(lambda: sim.compute_encodings([self.feeds], progress=False)) for _ in range(3))
        return 1000 * whole

    def exported(self) -> float:
        with tempfile.TemporaryDirectory() as folder:
            own = session(ir.load(self.sim().export(folder, "model", samples=False).qdq))
        return self.ratio(lambda: own.run(None, self.feeds))


def session(model: ir.Model) -> Any:
    """A default session on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    content = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


ROWS: dict[str, tuple[Callable[[Bench], float], str]] = {
    "operator": (lambda b: 1000 * b.best(b.operator), "{:.2f} ms"),
    "scan": (Bench.scan, "{:.2f} x"),
    "states": (lambda b: b.simulated(STATES_ONLY), "{:.2f} x"),
    "all": (Bench.simulated, "{:.2f} x"),
    "min-max": (Bench.calibration, "{:.2f} x"),
    "once": (Bench.once, "{:.0f} ms"),
    "exported": (Bench.exported, "{:.2f} x"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, float]] = {}
    for name, v in SIZES.items():
        bench = Bench(v, 20 if options.quick else 100)
        found[name] = {}
        for row in options.rows:
            print(f"{name}: {row} ...", file=sys.stderr, flush=True)
            found[name][row] = ROWS[row][0](bench)
    title = "Cost of quantizers inside recurrent ONNX layers (one thread)"
    rows = [[row, *(ROWS[row][1].format(found[name][row]) for name in SIZES)] for row in options.rows]
    measure.show(title, ["", *SIZES], rows)
    measure.save(options.json, options.markdown, title, ["", *SIZES], rows, {"layers": found})


if __name__ == "__main__":
    main()
