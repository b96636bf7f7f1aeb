"""Simulation, calibration, training and GPTQ on a GPU, beside the float model, torch's own operators and torchao; one JSON."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure  # noqa: F401  first of ours: it puts the repository on the path
import torch
from torch import Tensor, nn

from bitwright.core.numerics.affine import choose_qparams
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.torch import QuantizationSimModel, apply_gptq, fold_all_batch_norms
from bitwright.torch.quantizers.fake_quantize import fake_quantize, make_grid
from tests.support.zoo import Encoder, MobileNetV2, ResNet18

HELP = """\
Milliseconds by the clock, least and median of the rounds, with the device synchronized before and after. Rows:

  fake quantization   of 2^26 numbers: ours, and torch.fake_quantize_per_tensor_affine; a copy of the tensor bounds both
  forward             of ResNet-18, MobileNetV2, an encoder: float and simulated; with torch.compile and with CUDA graphs
  calibration         min-max and tf_enhanced of 8 batches, everything included, and the float forwards of the same batches
  training step       forward, backward, SGD: float and simulated
  gptq                of a block of 1.1e9 parameters (hidden 8192), 4 bits in groups of 128, from 2,048 tokens; seconds
  torchao             int8 weights by torchao.quantize_ and its forward, where the package is installed

Each row has the peak memory of the device beyond what was there before. On a CPU (--device cpu) sizes are a hundredth and rows
of CUDA are left out: that shows only that the program runs.
"""


@dataclass(frozen=True)
class Bench:
    """Where and how long is measured."""

    device: torch.device
    rounds: int
    until: float

    @property
    def small(self) -> bool:
        return self.device.type == "cpu"

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def row(self, step: Callable[[], Any], rounds: int | None = None) -> dict[str, float]:
        """``least`` and ``median`` in milliseconds, ``mib`` of memory beyond what was taken before."""
        step()
        self.wait()
        before = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        times = []
        for _ in range(rounds or self.rounds):
            start = time.perf_counter()
            step()
            self.wait()
            times.append((time.perf_counter() - start) * 1e3)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else before
        return {"least": min(times), "median": statistics.median(times), "mib": (peak - before) / 2**20}


def kernels(bench: Bench) -> dict[str, Any]:
    """One scale for the tensor, and one per channel, beside torch's operators and a copy."""
    rows = 1 << (6 if bench.small else 13)
    x = torch.randn(rows, 1 << 13, device=bench.device)
    found: dict[str, Any] = {"copy": bench.row(x.clone)}
    encoding = Encoding(
        IntFormat(8, signed=False), *choose_qparams(-4.0, 4.0, IntFormat(8, signed=False), symmetric=False)
    )
    grid = make_grid(encoding, tuple(x.shape), x.device)
    found["ours"] = bench.row(lambda: fake_quantize(x, encoding, grid))
    scale, zero = float(encoding.scale), int(encoding.zero_point)
    theirs = torch.fake_quantize_per_tensor_affine  # noqa: TID251 what ours is compared with
    found["torch"] = bench.row(lambda: theirs(x, scale, zero, 0, 255))
    return found


def networks(bench: Bench) -> dict[str, tuple[nn.Module, Tensor]]:
    """Networks on the device, in eval mode, with batch norms folded, and an input of each."""
    size, batch = (64, 2) if bench.small else (224, 64)
    shapes = {ResNet18: (batch, 3, size, size), MobileNetV2: (batch, 3, size, size), Encoder: (batch, 128, 256)}
    found = {}
    for build, shape in shapes.items():
        torch.manual_seed(0)
        model = build().eval()
        fold_all_batch_norms(model, dummy_input=torch.randn(1, *shape[1:]))
        found[build.__name__] = model.to(bench.device), torch.randn(shape, device=bench.device)
    return found


def simulation(bench: Bench, model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Forward, calibration and training step of one network."""
    batches = [x] * (2 if bench.small else 8)
    found: dict[str, Any] = {}
    with torch.no_grad():
        found["float batches"] = bench.row(lambda: [model(batch) for batch in batches], 3)
    for scheme in ("min_max", "tf_enhanced"):
        sim = QuantizationSimModel(copy.deepcopy(model), x, quant_scheme=scheme)
        found[f"calibration, {scheme}"] = bench.row(lambda sim=sim: sim.compute_encodings(batches, progress=False), 3)
    with torch.no_grad():
        found["forward, float"] = bench.row(lambda: model(x))
        found["forward"] = bench.row(lambda: sim.model(x))
        if not bench.small:
            found["forward, CUDA graph"] = bench.row(graphed(lambda: sim.model(x)))
            compiled = torch.compile(sim.model)
            found["forward, torch.compile"] = bench.row(lambda: compiled(x))
    for name, module in (("training step, float", copy.deepcopy(model)), ("training step", sim.model)):
        module.train()
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
        found[name] = bench.row(lambda module=module, optimizer=optimizer: step_of(module, optimizer, x))
    return found


def graphed(step: Callable[[], Any]) -> Callable[[], Any]:
    """``step`` captured into a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def step_of(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step()


class Block(nn.Module):
    """The products of a transformer block with a gated feed-forward part."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, 4 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def gptq(bench: Bench) -> dict[str, Any]:
    """Seconds of GPTQ of one block, and its parameters."""
    hidden = 128 if bench.small else 8192
    torch.manual_seed(0)
    with torch.device(bench.device):
        block = Block(hidden).eval()
        tokens = [torch.randn(1, 256, hidden) for _ in range(2 if bench.small else 8)]
    sim = QuantizationSimModel(block, tokens[0], preset="w4")
    sim.compute_encodings(tokens, progress=False)
    bench.wait()
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    start = time.perf_counter()
    apply_gptq(sim, tokens, progress=False)
    bench.wait()
    peak = torch.cuda.max_memory_allocated(bench.device) / 2**20 if bench.device.type == "cuda" else 0.0
    parameters = sum(p.numel() for p in block.parameters())
    return {"seconds": time.perf_counter() - start, "parameters": parameters, "mib": peak}


def torchao(bench: Bench, model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Int8 weights of torchao; what is missing is said."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        return {"missing": str(error)}
    own = copy.deepcopy(model)
    start = time.perf_counter()
    quantize_(own, Int8WeightOnlyConfig())
    bench.wait()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        return {"quantize_": seconds * 1e3, "forward": bench.row(lambda: own(x))}


def parts(bench: Bench) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is measured, by name, the most important first."""
    models = networks(bench)
    return {
        "fake quantization": lambda: kernels(bench),
        **{name: (lambda found=found: simulation(bench, *found)) for name, found in models.items()},
        "gptq of a block": lambda: gptq(bench),
        "torchao, Encoder": lambda: torchao(bench, *models["Encoder"]),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where a part failed, with its error in its place."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=240.0, help="no part is begun later than this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args(arguments)
    bench = Bench(torch.device(options.device), options.rounds, time.monotonic() + options.seconds)
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "rounds": options.rounds, "parts": {}}
    failed = False
    for part, run in parts(bench).items():
        if time.monotonic() > bench.until:
            found["parts"][part] = {"left out": f"{options.seconds:g} s were over"}
            continue
        try:
            found["parts"][part] = run()
        except Exception as error:  # the other parts are worth their time
            failed, found["parts"][part] = True, {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        print(part, json.dumps(found["parts"][part]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
