"""What quantizers inside recurrent ONNX layers cost on top of ONNX Runtime's own operator: ratios, one thread."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import onnx_ir as ir
import onnxruntime as ort

from bitwright.export.markers import strip_sites
from bitwright.export.recurrent import expand_recurrent
from bitwright.onnx import QuantizationSimModel
from tests.recurrent_nets import Variant, feeds, layer_model

HELP = """\
Time the simulation of one recurrent layer against ONNX Runtime's operator on the same input.

Both run in this process on one thread, one right after the other in alternating order; the median of the rounds' ratios
is shown. Calibration counts all that compute_encodings does, weights and sessions included, on 8 batches.

rows of the table:
  operator        ms of the native operator
  scan            the layer as a Scan without quantizers / operator
  states          the simulation with x, h and c on a grid / operator
  all             the simulation with every gate on a grid too / operator
  min-max         compute_encodings / operator on the same batches
  exported        the exported Scan at the default level / operator
"""

SIZES = {
    "LSTM T50 B1 H128": Variant("LSTM", length=50, batch=1, inputs=128, hidden=128),
    "GRU T50 B1 H128": Variant("GRU", length=50, batch=1, inputs=128, hidden=128),
    "LSTM T100 B8 H256": Variant("LSTM", length=100, batch=8, inputs=256, hidden=256),
    "GRU T100 B8 H256": Variant("GRU", length=100, batch=8, inputs=256, hidden=256),
}
STATES_ONLY = {"rules": [{"match": f"*.{kind}", "inner": None} for kind in ("pre", "gate")]}
BATCHES = 8


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
        return measure.ratio(self.operator, step, self.rounds)

    def scan(self) -> float:
        marked = layer_model(self.v, domain="bitwright")
        own = session(strip_sites(expand_recurrent(marked)).model)
        return self.ratio(lambda: own.run(None, self.feeds))

    def simulated(self, config: dict[str, Any] | None = None) -> float:
        sim = self.sim(config)
        return self.ratio(lambda: sim.run(self.feeds))

    def calibration(self) -> float:
        sim, batches = self.sim(), [self.feeds] * BATCHES

        def operator() -> None:
            for batch in batches:
                self.native.run(None, batch)

        return measure.ratio(
            operator, lambda: sim.compute_encodings(batches, progress=False), max(2, self.rounds // 4)
        )

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
    "operator": (lambda b: 1000 * measure.median_seconds(b.operator, b.rounds), "{:.2f} ms"),
    "scan": (Bench.scan, "{:.2f} x"),
    "states": (lambda b: b.simulated(STATES_ONLY), "{:.2f} x"),
    "all": (Bench.simulated, "{:.2f} x"),
    "min-max": (Bench.calibration, "{:.2f} x"),
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
        bench = Bench(v, 5 if options.quick else 15)
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
