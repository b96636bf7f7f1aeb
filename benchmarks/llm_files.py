"""Checkpoint files of a language model, each loaded by its engine: are the codes the same, and the answers?

    python benchmarks/llm_files.py                      # two minutes on one core

``stories260k`` as a Llama of transformers, its ``down_proj`` layers (172 inputs, no multiple of 32) in float, for
GPTQ and AWQ also the other two of each MLP. Where the engine unpacks to bfloat16 the model is simulated as transformers loads it
in bfloat16, and for GGUF with inputs of layers rounded as llama.cpp rounds them. The perplexity is of 32 stories, of GGUF of 240
tokens of 3 stories (its engine takes a call for each); tokens are 32 greedy ones after each of 8 beginnings of stories. Needs the
developer data set (see tests/support/data.py) and ``pip install 'bitwright[engines]'``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import numpy as np
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from bitwright.core.numerics.formats import SCALE_FORMATS
from bitwright.core.numerics.granularity import PerBlock, PerToken
from bitwright.core.numerics.spec import PRESETS, Preset, QuantSpec, activation_spec, dynamic_spec, weight_spec
from bitwright.core.placement.config import make_rules
from bitwright.core.placement.rules import Rule, default_rules
from bitwright.llm import PackedWeight, open_engine, packed_weights, perplexity, read_checkpoint, write_simulation
from bitwright.llm.packed import signed
from bitwright.torch import QuantizationSimModel
from tests.llm.models import greedy, llama_cpp, write_tokenizer
from tests.support import data

G32 = PerBlock(32)
ROWS: list[tuple[str, str, QuantSpec | str]] = [
    ("compressed-tensors", "int4 g32", QuantSpec("int4", G32)),
    ("compressed-tensors", "uint4 g32 asymmetric", QuantSpec("uint4", G32, "asymmetric")),
    ("compressed-tensors", "int8 per channel", PRESETS["w8"].weight),  # type: ignore[list-item]
    ("compressed-tensors", "W8A8, static inputs", "w8a8"),
    ("compressed-tensors", "W8A8, int8 per token", dynamic_spec("int8")),
    ("compressed-tensors", "W8A8, int8c per token", dynamic_spec("int8c")),
    ("compressed-tensors", "W8A8, uint8 per token", dynamic_spec("uint8")),
    ("compressed-tensors", "fp8, inputs per token", PRESETS["fp8_dynamic"].activation),  # type: ignore[list-item]
    ("compressed-tensors", "NVFP4", PRESETS["nvfp4"].weight),  # type: ignore[list-item]
    ("compressed-tensors", "MXFP4", PRESETS["mxfp4"].weight),  # type: ignore[list-item]
    ("torchao", "int4 g32", QuantSpec("int4", G32)),
    ("torchao", "float8 per channel", PRESETS["fp8"].weight),  # type: ignore[list-item]
    ("gptq", "int4 g32", QuantSpec("int4", G32)),
    ("awq", "uint4 g32 asymmetric", QuantSpec("uint4", G32, "asymmetric")),
    ("gguf", "Q8_0", QuantSpec("int8", G32, scale_format="float16")),
    ("gguf", "Q4_0", QuantSpec("int4", G32, scale_format="float16")),
    ("gguf", "Q4_1", QuantSpec("uint4", G32, "asymmetric", scale_format="float12")),
]
IN_BFLOAT16 = ("NVFP4", "MXFP4")  # compressed-tensors unpacks them to it
#: format of inputs at run time -> format of the weights beside them
_WEIGHTS = {"int8": "int8", "int8c": "int8", "uint8": "int8", "float8_e4m3": "float8_e4m3"}


def simulated(model: Any, kind: str, spec: QuantSpec | str) -> QuantizationSimModel:
    rules: Any = None
    if isinstance(spec, QuantSpec):  # of inputs, if it is dynamic
        rules = Preset(weight_spec(_WEIGHTS[spec.format.name]), spec) if spec.dynamic else Preset(spec, None)
    batches = [batch[:, :-1] for batch in data.stories("calib").split(8)]
    config = None
    if kind == "gguf":
        inputs = dynamic_spec("int8", PerToken(32), scale_format=SCALE_FORMATS["float16"])
        off = ("role:embedding", "role:lm_head", "*down_proj*")
        config = make_rules(None, Preset(spec, inputs)).extended([Rule(match, quantized=False) for match in off])  # type: ignore[arg-type]
        rules = None
    elif rules is None:
        config = default_rules(weight_spec("int8"), activation_spec("int8", symmetry="symmetric")).extended(
            [
                Rule("*", port="output", quantized=False),
                Rule("*", port="input", quantized=False),
                Rule("*", op="Gemm", port="input", format="int8"),
            ]
        )
    sim = QuantizationSimModel(model, {"input_ids": batches[0][:1]}, preset=rules, config_file=config)
    for site in sim.quantizers.values():
        # words of eight codes do not hold 172 outputs
        left = ("gate_proj", "up_proj") if kind in ("gptq", "awq") else ()
        if any(name in site.name for name in ("embed_tokens", "lm_head", "down_proj", *left)):
            site.enabled = False
    sim.compute_encodings(batches, progress=False)
    return sim


def in_bfloat16(model: Any) -> Any:
    """The model as transformers loads it in bfloat16: angles of positions stay in float32."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def row_of(model: Any, kind: str, name: str, spec: QuantSpec | str) -> list[str]:
    sim = simulated(in_bfloat16(model) if name in IN_BFLOAT16 else model, kind, spec)
    begun, scored = data.stories()[:8, :6], data.stories()[:3, :80] if kind == "gguf" else data.stories()[:32]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(Path(folder), 300)
        write_simulation(f"{folder}/out", sim, to=kind, tokenizer=tokenizer)
        back = {weight.name: weight for weight in read_checkpoint(f"{folder}/out")}
        codes = [w for w in packed_weights(sim) if isinstance(w, PackedWeight)]
        equal = np.mean([(signed(w)[0] == signed(back[w.name])[0]).mean() for w in codes])  # type: ignore[arg-type]
        expected = greedy(sim.model, begun)
        here = data.perplexity(lambda x: sim.model(x).logits.float(), scored)
        there = "-"
        if kind == "gguf":
            tokens, _ = llama_cpp(Path(folder, "out/model.gguf"), begun.tolist())
            there = f"{perplexity(open_engine(f'{folder}/out').logits, scored, context=scored.shape[1]).value:.4f}"
        elif kind in ("gptq", "awq"):
            return [kind, name, f"{equal:.0%}", f"{here:.4f}", "-", "-"]
        else:
            # transformers 5.23 has no room for packed zero points, and loads such layers unpacked
            unpacked = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if "asymmetric" in name else {}
            engine = AutoModelForCausalLM.from_pretrained(f"{folder}/out", dtype="auto", **unpacked).eval()
            tokens = greedy(engine, begun)
            there = f"{data.perplexity(lambda x: engine(x).logits.float(), scored):.4f}"
    same = (tokens == expected).all(1).sum().item()
    return [
        kind,
        name,
        f"{equal:.0%}",
        f"{here:.4f}",
        there,
        f"{(tokens == expected).sum().item()} of 256, {same} of 8 prompts",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[name for _, name, _ in ROWS], help="these alone")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args(arguments)
    logging.getLogger("bitwright").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = data.stories_of_transformers()
    print(f"float: {data.perplexity(lambda x: model(x).logits, data.stories()[:32]):.4f}", file=sys.stderr)
    rows = []
    for kind, name, spec in ROWS:
        if options.rows and name not in options.rows:
            continue
        rows.append(row_of(model, kind, name, spec))
        print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    title = "Checkpoint files of stories260k, and what their engines compute"
    columns = ["files", "weights", "codes equal", "perplexity, simulation", "perplexity, engine", "greedy tokens equal"]
    measure.show(title, columns, rows)
    measure.save(
        options.json, options.markdown, title, columns, rows, [dict(zip(columns, row, strict=True)) for row in rows]
    )


if __name__ == "__main__":
    main()
