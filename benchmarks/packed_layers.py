"""Linear layers that hold codes beside torchao's: time, memory and error of one layer; one thread, one command."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import torch
from torch import nn

from bitwright.runtimes.timing import interleaved, ratio
from bitwright.torch import QuantizationSimModel, pack

HELP = """\
One nn.Linear of random weights without bias, packed by bitwright.torch.pack and quantized by torchao, each under torch.compile.

Times are CPU time of one thread; ours and torchao are how many times as fast as the float layer of the same type they are, with
the quartiles. bytes: of the layer that pack returns, relative to float32. off: largest difference to the simulation relative to
the largest output.
"""
COLUMNS = ("kind", "inner x outputs", "rows", "float (us)", "ours", "torchao", "bytes", "off")
PRESETS = {"int8 dynamic": "w8a8_dynamic", "int8 weights": "w8", "int4 weights": "w4g32", "fp8 dynamic": "fp8_dynamic"}


def config(kind: str) -> Any:
    """The configuration of torchao that says the same."""
    from torchao.prototype.float8_opaque_tensor import Float8DynamicActivationFloat8WeightOpaqueTensorConfig
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, PerRow

    if kind == "int8 dynamic":
        return Int8DynamicActivationInt8WeightConfig()
    if kind == "int8 weights":
        return Int8WeightOnlyConfig()
    if kind == "int4 weights":
        return PrototypeInt4WeightOnlyConfig(group_size=32)
    return Float8DynamicActivationFloat8WeightOpaqueTensorConfig(granularity=PerRow())


def row(kind: str, size: int, rows: int, seconds: float) -> tuple[list[str], dict[str, float]]:
    """Cells and raw numbers."""
    from torchao.quantization import quantize_

    torch.compiler.reset()  # it gives up on code that it compiled eight times
    torch.manual_seed(0)
    half = torch.bfloat16 if "weights" in kind else torch.float32
    layer = nn.Sequential(nn.Linear(size, size, bias=False)).eval().to(half)
    x = torch.randn(rows, size, dtype=half)
    sim = QuantizationSimModel(layer, x, preset=PRESETS[kind])
    sim.compute_encodings([x], progress=False)
    packed, theirs = pack(sim), copy.deepcopy(layer)
    with torch.no_grad():
        expected = sim.model(x).float()
    models: dict[str, nn.Module] = {"float": layer, "ours": packed.model}
    try:
        quantize_(theirs, config(kind))
        models["torchao"] = theirs
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        print(f"torchao, {kind}: {type(error).__name__}: {error}")
    steps: dict[str, Callable[[], Any]] = {}
    with torch.no_grad():
        for name, model in models.items():
            made = torch.compile(model)
            try:
                made(x)
            except Exception as error:  # of its compiler
                print(f"{name}, {kind}: {type(error).__name__}: {str(error)[:200]}")
                continue
            steps[name] = lambda made=made: made(x)
        found = steps["ours"]().float()
        times = interleaved(steps, seconds=seconds, clock=time.process_time)
    speeds = {name: ratio(times["float"], times[name]) for name in steps if name != "float"}
    off = float((found - expected).abs().max() / expected.abs().max())
    share = packed.layers[0].bytes / packed.float_bytes
    cells = [kind, f"{size} x {size}", str(rows), f"{1e6 * times['float'].median:.0f}", str(speeds["ours"])]
    cells += [str(speeds.get("torchao", "-")), f"{share:.3f}", f"{off:.1e}"]
    return cells, {name: float(speed.median) for name, speed in speeds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--kinds", nargs="+", choices=tuple(PRESETS), default=tuple(PRESETS))
    parser.add_argument("--seconds", type=float, default=2.0, help="for the rounds of each line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = [(kind, size, rows) for kind in options.kinds for size in options.sizes for rows in options.rows]
    found = [row(*one, options.seconds) for one in sizes]
    cells, raw = [line for line, _ in found], [numbers for _, numbers in found]
    title = "One linear layer that holds codes, under torch.compile (one thread): times as fast as float"
    measure.show(title, COLUMNS, cells)
    measure.save(options.json, options.markdown, title, COLUMNS, cells, raw)


if __name__ == "__main__":
    main()
