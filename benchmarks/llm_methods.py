"""What methods for language models leave of the perplexity, format by format, against rounding to nearest.

    python benchmarks/llm_methods.py                              # some ten minutes of a quiet core
    python benchmarks/llm_methods.py --rows mxfp4                  # one format

``stories260k`` on 128 stories, 32 to calibrate; 35 matrices of the blocks are quantized, embedding and output layer are in
float. Weights of ``int`` rows are asymmetric in groups of 32. Activations of ``a8`` and ``a4`` rows are quantized per token, with
ranges chosen at run time, where a matrix reads them. Needs the developer data set (see tests/support/data.py).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import measure  # first: it puts the repository on the path
import torch

from bitwright.core.numerics.granularity import PerBlock
from bitwright.core.numerics.spec import PRESETS, Preset, dynamic_spec, weight_spec
from bitwright.torch import QuantizationSimModel, apply_reconstruction, awq_model, rotate_model
from tests.support import data


def _grouped(bits: int) -> Preset:
    return Preset(weight_spec(f"uint{bits}", PerBlock(32), symmetry="asymmetric"), None)


def _with(preset: Preset, activation: str) -> Preset:
    return Preset(preset.weight, dynamic_spec(activation))


FORMATS = {
    "int4": _grouped(4),
    "int3": _grouped(3),
    "mxfp4": PRESETS["mxfp4"],
    "nvfp4": PRESETS["nvfp4"],
    "nf4": PRESETS["nf4"],
    "int4 a8": _with(_grouped(4), "int8"),
    "int4 a4": _with(_grouped(4), "int4"),
}
#: methods in order; "rotate" merges R1 and R2, "rotate+" puts R4 in front of down projections too
METHODS = {
    "nearest": (),
    "awq": ("awq",),
    "seq_mse": ("seq_mse",),
    "gptq": ("gptq",),
    "gptaq": ("gptaq",),
    "seq_mse, gptq": ("seq_mse", "gptq"),
    "awq, seq_mse, gptq": ("awq", "seq_mse", "gptq"),
}
ROTATED = {
    "nearest": (),
    "rotate": ("rotate",),
    "rotate+": ("rotate+",),
    "rotate+, gptq": ("rotate+", "gptq"),
    "rotate+, seq_mse, gptq": ("rotate+", "seq_mse", "gptq"),
}


def score(preset: Preset, methods: Sequence[str], batches: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Perplexity of the simulation, and the seconds of CPU that the methods took."""
    model = data.trained("stories260k")
    start = time.process_time()
    for name in methods:
        if name.startswith("rotate"):
            rotate_model(model, None, batches[0][:1], online=name.endswith("+"), progress=False)
        elif name == "awq":
            awq_model(model, batches, weight=preset.weight, progress=False)
    sim = QuantizationSimModel(model, batches[0][:1], preset=preset)
    for name in list(sim.quantizers):
        if name.startswith(("tok_embeddings", "output")):
            sim.quantizers[name].enabled = False
    sim.compute_encodings()
    for name in methods:
        if name != "awq" and not name.startswith("rotate"):
            apply_reconstruction(sim, batches, name, progress=False)
    seconds = time.process_time() - start
    with torch.no_grad():
        return data.perplexity(sim.model, data.stories()), seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args(arguments)
    logging.getLogger("bitwright").setLevel(logging.ERROR)
    batches = list(data.stories("calib")[:, :-1].split(8))
    rows: list[list[str]] = []
    raw: list[dict[str, object]] = []
    for format in options.rows:
        for name, methods in (ROTATED if " a" in format else METHODS).items():
            found, seconds = score(FORMATS[format], methods, batches)
            rows.append([format, name, f"{found:.3f}", f"{100 * (found / 3.558 - 1):+.1f} %", f"{seconds:.1f}"])
            raw.append({"format": format, "method": name, "perplexity": found, "seconds": seconds})
            print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    title = "Perplexity of stories260k by format and method"
    columns = ["format", "method", "perplexity", "above float", "CPU s of the methods"]
    measure.show(title, columns, rows)
    measure.save(options.json, options.markdown, title, columns, rows, raw)


if __name__ == "__main__":
    main()
