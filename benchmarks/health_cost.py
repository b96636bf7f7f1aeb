"""What watching for NaN and Inf costs: in calibration, and in a run of the doctor."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import torch
from torch_speed import SUBJECTS, Bench, Settings

from bitwright.core.graph.constant_channels import ChannelWatch
from bitwright.core.health.report import check_parameters
from bitwright.core.numerics import statistics
from bitwright.core.numerics.statistics import MinMax
from bitwright.core.simulation.calibration import BatchGate
from bitwright.torch import QuantizationSimModel, check_model

HELP = """\
Time calibration with everything that watches for NaN and Inf against calibration without any of it, and check_model
against the float model. Both sides run in this process on one thread, one right after the other in alternating order.
The target for calibration is 1.03 x.

On a busy machine two runs of the same calibration differ by more than that: the rows "per batch" and "weights" count the
parts themselves, at their best of many, and give them as a share of one float forward.

rows of the table:
  min-max      compute_encodings / the same without counts, batch policies and the check of the weights
  histogram    the same with quant_scheme="tf_enhanced"
  per batch    the look at every site's counts and at every bound / one float forward, in percent
  weights      the check of all weights, once per calibration / one float forward, in percent
  doctor       check_model on some batches / float forwards of the same batches
  channels     the look at channels that may be constant, of a calibration with min-max on the batches, in percent of its CPU
               time; most of it is spent on the first batch
  channels, ONNX   the CPU time of compute_encodings of the ONNX model / the same without a look at channels, each the lowest
               of the rounds
"""


class _Open(BatchGate):
    """A gate that lets every batch through and looks at nothing."""

    def open(self, batch: Any = None) -> None:
        """Nothing."""

    def close(self) -> bool:
        """Nothing."""
        return True


class _Bare(QuantizationSimModel):
    """A simulation whose calibration does not watch for values that are not finite."""

    def _gate(self, observer: Any, policy: Any) -> BatchGate:
        return _Open(())

    def _quantized_parameters(self) -> dict[str, torch.Tensor]:
        return {}


def _bounds_alone(x: Any, granularity: Any) -> MinMax:
    """Bounds of ``x`` and nothing else."""
    rows = statistics.rows_of(x, granularity)
    shape = granularity.param_shape(tuple(x.shape))
    lo, hi = (end.numpy().astype(np.float64) for end in statistics.row_bounds(rows))
    none = np.zeros(lo.shape, np.int64).reshape(shape)
    count = np.full(lo.shape, rows.shape[1], np.int64).reshape(shape)
    return MinMax(lo.reshape(shape), hi.reshape(shape), count, none, none, none)


@contextmanager
def _uncounted() -> Iterator[None]:
    """Bounds are taken without a look at whether they are finite, inside the block."""
    measures = statistics._MEASURES
    counted, measures[MinMax] = measures[MinMax], _bounds_alone
    try:
        yield
    finally:
        measures[MinMax] = counted


def calibration(scheme: str) -> Callable[[Bench], float]:
    """The row of one range method."""

    def row(bench: Bench) -> float:
        ours, bare = (
            kind(bench.model, dummy_input=bench.x, quant_scheme=scheme) for kind in (QuantizationSimModel, _Bare)
        )

        def without() -> None:
            with _uncounted():
                bare.compute_encodings(bench.batches, progress=False)

        return bench.ratio(without, lambda: ours.compute_encodings(bench.batches, progress=False))

    return row


def doctor(bench: Bench) -> float:
    """The row of ``check_model``."""
    return bench.ratio(bench.float_pass, lambda: check_model(bench.model, bench.batches, progress=False))


def per_batch(bench: Bench) -> float:
    """The row of the gate: a batch in which every site was seen."""
    sim = bench.calibrated()
    gate = BatchGate([q for q in sim.quantizers.unique() if q.enabled and q.role in ("input", "output")])
    ends = [np.ones(1)] * 2 * len(gate.quantizers)

    def look() -> None:
        gate.open()
        gate._before = [None] * len(gate.quantizers)
        assert gate.close()
        assert all(map(statistics._all_finite, ends))

    return 100 * _best(look, 50) / _forward(bench)


def weights(bench: Bench) -> float:
    """The row of the check of the parameters, which calibration makes once for all and once for each."""
    parameters = bench.calibrated()._quantized_parameters()
    return 100 * 2 * _best(lambda: check_parameters(parameters), 10) / _forward(bench)


def channels(bench: Bench) -> float:
    """The row of the channels: the share that their observation has in the calibration it is part of."""
    sim = QuantizationSimModel(bench.model, dummy_input=bench.x)
    spent = [0.0]
    observe = ChannelWatch.observe

    def timed(watch: ChannelWatch, x: Any) -> None:
        start = time.process_time()
        observe(watch, x)
        spent[0] += time.process_time() - start

    def share() -> float:
        spent[0], start = 0.0, time.process_time()
        sim.compute_encodings(bench.batches, progress=False)
        return spent[0] / (time.process_time() - start)

    ChannelWatch.observe = timed  # type: ignore[method-assign]
    try:
        return 100 * min(share() for _ in range(bench.settings.rounds))
    finally:
        ChannelWatch.observe = observe  # type: ignore[method-assign]


def channels_onnx(bench: Bench) -> float:
    """The row of the channels in ONNX, where most of it is done by the runtime."""
    from bitwright.onnx import QuantizationSimModel as OnnxSimulation

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(bench.model, (bench.x,), opset_version=21, dynamo=True, verbose=False)
    assert exported is not None
    data = [x.numpy() for x in bench.batches]
    ours, bare = (OnnxSimulation(exported.model_proto, data[0], threads=1) for _ in range(2))
    for site in bare.quantizers.values():
        site.channels.place = None
    times: dict[Any, list[float]] = {ours: [], bare: []}
    for i in range(2 * bench.settings.rounds):
        sim = (ours, bare)[i % 2]
        start = time.process_time()
        sim.compute_encodings(data, progress=False)
        times[sim].append(time.process_time() - start)
    return min(times[ours]) / min(times[bare])


def _forward(bench: Bench) -> float:
    with torch.no_grad():
        return _best(lambda: bench.model(bench.x), 5)


def _best(step: Callable[[], Any], times: int) -> float:
    return min(measure.seconds(step) for _ in range(times))


# row -> (how to measure it, how to print it)
ROWS: dict[str, tuple[Callable[[Bench], float], str]] = {
    "min-max": (calibration("min_max"), "{:.3f} x"),
    "histogram": (calibration("tf_enhanced"), "{:.3f} x"),
    "per batch": (per_batch, "{:.2f} %"),
    "weights": (weights, "{:.2f} %"),
    "doctor": (doctor, "{:.2f} x"),
    "channels": (channels, "{:.2f} %"),
    "channels, ONNX": (channels_onnx, "{:.3f} x"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller inputs, fewer rounds")
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), metavar="NAME")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--rounds", type=int, help="rounds per ratio (9; 5 with --quick)")
    parser.add_argument("--batches", type=int, help="batches of 4 (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    settings = Settings(options.quick, True, options.rounds or (5 if options.quick else 9), options.batches or 4)
    raw: dict[str, dict[str, float]] = {}
    for name in options.models:
        bench, raw[name] = Bench(name, settings), {}
        for row in options.rows:
            print(f"{name}: {row} ...", file=sys.stderr, flush=True)
            raw[name][row] = ROWS[row][0](bench)
    title = "Watching for NaN and Inf: time against a run that does not"
    columns = ["", *options.models]
    table = [[row, *(ROWS[row][1].format(raw[name][row]) for name in options.models)] for row in options.rows]
    measure.show(title, columns, table)
    measure.save(options.json, options.markdown, title, columns, table, raw)


if __name__ == "__main__":
    main()
