"""What methods for language models leave of the perplexity, format by format, against rounding to nearest.

    make bench-llm                                                # some ten minutes of a quiet core
    python benchmarks/llm_methods.py --rows mxfp4                  # one format

``stories260k`` on 128 stories, 32 to calibrate; 35 matrices of the blocks are quantized, embedding and output layer are
in float. Weights of ``int`` rows are asymmetric in groups of 32, those of ``float zero`` rows have real zero points and
ranges of least squared error. Activations of ``a8`` and ``a4`` rows are quantized per token, with ranges chosen at run
time, where a matrix reads them; ``a4u`` with zero points. Bits per weight count scales, and zero points, as they are
stored. ``--check`` ends with an error where a method leaves more than nearest rounding does. Needs the developer data
set (see tests/support/data.py).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import measure  # first: it puts the repository on the path
import torch

from bitwright.core.numerics.granularity import PerBlock
from bitwright.core.numerics.spec import PRESETS, Preset, QuantSpec, RangeMethod, dynamic_spec, find_preset, weight_spec
from bitwright.torch import (
    QuantizationSimModel,
    add_low_rank_branches,
    apply_reconstruction,
    awq_model,
    correct_errors,
    rotate_model,
    transform_model,
)
from tests.support import data


def _grouped(bits: int) -> Preset:
    return Preset(weight_spec(f"uint{bits}", PerBlock(32), symmetry="asymmetric"), None)


def _with(preset: Preset, activation: str) -> Preset:
    return Preset(preset.weight, dynamic_spec(activation))


FORMATS = {
    "int4": _grouped(4),
    "int3": _grouped(3),
    "int4 float zero": find_preset("w4g32_float_zero"),
    "int3 float zero": find_preset("w3g32_float_zero"),
    "int2 float zero": find_preset("w2g32_float_zero"),
    "int4 hqq": Preset(replace(find_preset("w4g32_float_zero").weight, method=RangeMethod("hqq")), None),
    "mxfp4": PRESETS["mxfp4"],
    "nvfp4": PRESETS["nvfp4"],
    "nf4": PRESETS["nf4"],
    "lpbq": PRESETS["w4lpbq"],
    "fp8": Preset(PRESETS["fp8"].weight, None),
    "int4 a8": _with(_grouped(4), "int8"),
    "int4 a4": _with(_grouped(4), "int4"),
    "int4 float zero a8": _with(find_preset("w4g32_float_zero"), "int8"),
    "int4 float zero a4": _with(find_preset("w4g32_float_zero"), "int4"),
    "int4 float zero a4u": _with(find_preset("w4g32_float_zero"), "uint4"),
}
#: methods in order; "rotate" merges R1 and R2, "rotate+" puts R4 in front of down projections too; "transform" puts fitted
#: products there, "transform+" in front of queries, keys, values and gates too
METHODS = {
    "nearest": (),
    "awq": ("awq",),
    "seq_mse": ("seq_mse",),
    "gptq": ("gptq",),
    "gptaq": ("gptaq",),
    "seq_mse, gptq": ("seq_mse", "gptq"),
    "awq, seq_mse, gptq": ("awq", "seq_mse", "gptq"),
}
#: "branch4": low-rank branches of rank 4 beside the layers, fitted after rounding; 16 bits a number
BRANCHED = {"branch2": ("branch2",), "branch4": ("branch4",), "branch8": ("branch8",)}
BRANCHED |= {f"gptq, {name}": ("gptq", name) for name in BRANCHED}
ROTATED = {
    "nearest": (),
    "rotate": ("rotate",),
    "rotate+": ("rotate+",),
    "rotate+, gptq": ("rotate+", "gptq"),
    "rotate+, gptaq": ("rotate+", "gptaq"),
    "rotate+, seq_mse, gptq": ("rotate+", "seq_mse", "gptq"),
    "rotate, transform": ("rotate", "transform"),
    "rotate, transform, gptaq": ("rotate", "transform", "gptaq"),
    "rotate, transform+, gptaq": ("rotate", "transform+", "gptaq"),
}
#: perplexity of the model in float
FLOAT = 3.558
_NOISE = 0.02  # of two perplexities that mean the same


def methods_for(format: str) -> dict[str, tuple[str, ...]]:
    """The methods whose rows a format has: rotations where activations have 4 bits."""
    if " a4" in format:
        return ROTATED
    if format in ("int3 float zero", "int2 float zero"):
        return METHODS | BRANCHED
    return {"nearest": (), "gptq": ("gptq",)} if " a8" in format or "hqq" in format else METHODS


def bits_per_weight(spec: QuantSpec, group: int = 64) -> float:
    """Bits of a weight with its share of scales, 16 bits each where they are plain floats, and zero points."""
    size = spec.granularity.size if isinstance(spec.granularity, PerBlock) else group
    scale = {"e8m0": 8, "e4m3": 8, "uint4": 4}.get(spec.scale_format.name, 16)
    zero = {"asymmetric": spec.format.bits, "float_zero_point": 16}.get(spec.symmetry, 0)
    return spec.format.bits + (scale + zero) / size


def branch_bits(methods: Sequence[str]) -> float:
    """Bits of branches per weight of the 35 matrices, 16 bits a number."""
    sides = ((64, 64), (64, 32), (64, 32), (64, 64), (64, 172), (172, 64), (64, 172))
    numbers = sum(min(rank, min(side) // 2) * sum(side) for rank in _ranks(methods) for side in sides)
    return 16 * numbers / sum(rows * columns for rows, columns in sides)


def _ranks(methods: Sequence[str]) -> list[int]:
    return [int(name.removeprefix("branch")) for name in methods if name.startswith("branch")]


def score(preset: Preset, methods: Sequence[str], batches: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Perplexity of the simulation, and the seconds of CPU that the methods took."""
    model = data.trained("stories260k")
    for rank in _ranks(methods):
        add_low_rank_branches(model, rank, layers="layers.*")
    start = time.process_time()
    for name in methods:
        if name.startswith("rotate"):
            rotate_model(model, None, batches[0][:1], online=name.endswith("+"), progress=False)
        elif name.startswith("transform"):
            transform_model(model, batches, shared=name.endswith("+"), progress=False)
        elif name == "awq":
            awq_model(model, batches, weight=preset.weight, progress=False)
    sim = QuantizationSimModel(model, batches[0][:1], preset=preset)
    for name in list(sim.quantizers):
        if name.startswith(("tok_embeddings", "output")):
            sim.quantizers[name].enabled = False
    sim.compute_encodings()
    for name in methods:
        if name != "awq" and not name.startswith(("rotate", "transform", "branch")):
            apply_reconstruction(sim, batches, name, progress=False)
    if _ranks(methods):
        correct_errors(sim, model, batches, progress=False)
    seconds = time.process_time() - start
    with torch.no_grad():
        return data.perplexity(sim.model, data.stories()), seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--methods", nargs="+", help="these alone, beside nearest rounding")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--check", action="store_true", help="fail where a method is worse than rounding to nearest")
    options = parser.parse_args(arguments)
    logging.getLogger("bitwright").setLevel(logging.ERROR)
    batches = list(data.stories("calib")[:, :-1].split(8))
    rows: list[list[str]] = []
    raw: list[dict[str, object]] = []
    worse: list[str] = []
    for format in options.rows:
        weight, nearest = FORMATS[format].weight, 0.0
        assert weight is not None
        bits = bits_per_weight(weight)
        for name, methods in methods_for(format).items():
            if options.methods and name not in ("nearest", *options.methods):
                continue
            found, seconds = score(FORMATS[format], methods, batches)
            nearest = nearest or found
            worse += [f"{format}, {name}: {found:.3f} against {nearest:.3f}"] if found > nearest + _NOISE else []
            above = f"{100 * (found / FLOAT - 1):+.1f} %"
            held = bits + branch_bits(methods)
            rows.append([format, f"{held:.2f}", name, f"{found:.3f}", above, f"{seconds:.1f}"])
            raw.append({"format": format, "bits": held, "method": name, "perplexity": found, "seconds": seconds})
            print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    title = "Perplexity of stories260k by format and method"
    columns = ["format", "bits per weight", "method", "perplexity", "above float", "CPU s of the methods"]
    measure.show(title, columns, rows)
    measure.save(options.json, options.markdown, title, columns, rows, raw)
    if options.check and worse:
        sys.exit("worse than rounding to nearest: " + "; ".join(worse))


if __name__ == "__main__":
    main()
