"""Layers and networks that hold codes beside torchao's: time, memory and error; one thread, one command."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.runtimes.timing import interleaved, ratio
from bitwright.torch import QuantizationSimModel, pack

HELP = """\
One nn.Linear of random weights without bias, packed by bitwright.torch.pack and quantized by torchao, each under torch.compile;
with --networks whole networks: encoder (two blocks of attention and two linear layers, 768 wide, random weights, 64 tokens).

Times are CPU time of one thread; ours and torchao are how many times as fast as the float model of the same type they are, with
the quartiles. bytes: of the weights that pack returns, relative to float32. off: largest difference to the simulation relative
to the largest output.
"""
COLUMNS = ("kind", "inner x outputs", "rows", "float (us)", "ours", "torchao", "bytes", "off")
OF_NETWORKS = ("kind", "network", "tokens", "float (us)", "ours", "torchao", "bytes", "off")
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


class Block(nn.Module):
    """Attention and two linear layers, each added to what it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "encoder": lambda: (nn.Sequential(*(Block(768, 12) for _ in range(2))).eval(), torch.randn(1, 64, 768))
}
"""A network in float32, and one sample."""


def row(kind: str, size: int, rows: int, seconds: float) -> tuple[list[str], dict[str, float]]:
    """Cells and raw numbers of one layer."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(size, size, bias=False)).eval()
    return compare(kind, f"{size} x {size}", rows, layer, torch.randn(rows, size), seconds)


def network_row(kind: str, name: str, seconds: float) -> tuple[list[str], dict[str, float]]:
    """Cells and raw numbers of one network."""
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    return compare(kind, name, x.shape[1], model, x, seconds)


def compare(
    kind: str, name: str, rows: int, model: nn.Module, x: torch.Tensor, seconds: float
) -> tuple[list[str], dict[str, float]]:
    """Cells and raw numbers of a model in float, packed, and quantized by torchao."""
    from torchao.quantization import quantize_

    torch.compiler.reset()  # it gives up on code that it compiled eight times
    if "weights" in kind:
        model = model.to(torch.bfloat16)
        x = x.to(torch.bfloat16)
    sim = QuantizationSimModel(model, x, preset=PRESETS[kind])
    sim.compute_encodings([x], progress=False)
    packed, theirs = pack(sim), copy.deepcopy(model)
    with torch.no_grad():
        expected = sim.model(x).float()
    models: dict[str, nn.Module] = {"float": model, "ours": packed.model}
    try:
        quantize_(theirs, config(kind))
        models["torchao"] = theirs
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        print(f"torchao, {kind}: {type(error).__name__}: {error}")
    steps: dict[str, Callable[[], Any]] = {}
    with torch.no_grad():
        for title, one in models.items():
            made = torch.compile(one)
            try:
                made(x)
            except Exception as error:  # of its compiler
                print(f"{title}, {kind}: {type(error).__name__}: {str(error)[:200]}")
                continue
            steps[title] = lambda made=made: made(x)
        found = steps["ours"]().float()
        times = interleaved(steps, seconds=seconds, clock=time.process_time)
    speeds = {title: ratio(times["float"], times[title]) for title in steps if title != "float"}
    off = float((found - expected).abs().max() / expected.abs().max())
    share = packed.bytes / packed.float_bytes
    cells = [kind, name, str(rows), f"{1e6 * times['float'].median:.0f}", str(speeds["ours"])]
    cells += [str(speeds.get("torchao", "-")), f"{share:.3f}", f"{off:.1e}"]
    return cells, {title: float(speed.median) for title, speed in speeds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), help="instead of layers")
    parser.add_argument("--kinds", nargs="+", choices=tuple(PRESETS), default=tuple(PRESETS))
    parser.add_argument("--seconds", type=float, default=2.0, help="for the rounds of each line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    columns = OF_NETWORKS if options.networks else COLUMNS
    if options.networks:
        found = [network_row(kind, name, options.seconds) for name in options.networks for kind in options.kinds]
    else:
        sizes = [(kind, size, rows) for kind in options.kinds for size in options.sizes for rows in options.rows]
        found = [row(*one, options.seconds) for one in sizes]
    cells, raw = [line for line, _ in found], [numbers for _, numbers in found]
    what = "Networks that hold" if options.networks else "One linear layer that holds"
    title = f"{what} codes, under torch.compile (one thread): times as fast as float"
    measure.show(title, columns, cells)
    measure.save(options.json, options.markdown, title, columns, cells, raw)


if __name__ == "__main__":
    main()
