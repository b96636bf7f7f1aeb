"""Memory of training adapters beside a packed base (QLoRA): a generated Llama of 62 million parameters.

    python benchmarks/llm_adapters.py                # needs peft

``codes``: what its matrices and tables take at 4 bits, with a number of 16 bits for every group of 64. ``base``: all tensors of
the model but its adapters. ``peak``: the largest anonymous memory of training steps on one row of 128 tokens, beyond that of the
same process before the model was made, with a small model trained first. ``adapters``: of rank 8 beside queries and values
(PEFT's default), with gradients and AdamW's two moments. ``rest``: the peak less base and adapters, which are activations,
their gradients, and what is dequantized at a time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import torch
from llm_memory import Anonymous

SIZE = {
    "vocab_size": 9600, "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 10, "num_attention_heads": 10,
    "num_key_value_heads": 10,
}  # fmt: skip
SMALL = {**SIZE, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2}  # fmt: skip
TOKENS = 128
TEXT = """\
A generated Llama, rank 8 beside queries and values, one row of 128 tokens, AdamW, float32. `codes`: 4 bits and a number of
16 bits for every group of 64. `rest`: the peak less base and adapters: activations, their gradients, and what is
dequantized at a time. The last ratio: the peak without adapters and without what the same training needs beside the base in
float. Command: `python benchmarks/llm_adapters.py --markdown benchmarks/results/llm_adapters.md` (needs peft)."""


def adapted(size: dict[str, int], packed: bool) -> Any:
    """A model with adapters, whose base holds codes if ``packed``."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from bitwright.llm import quantize

    torch.manual_seed(0)
    model: Any = get_peft_model(LlamaForCausalLM(LlamaConfig(**size)), LoraConfig(r=8))  # type: ignore[arg-type]
    if packed:
        quantize(model, "w4g64", embedding="w4g64", lm_head="w4g64", in_place=True, progress=False)
    return model


def steps(model: Any, vocabulary: int, count: int = 4) -> None:
    """Train on random tokens."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-3)
    for _ in range(count):
        tokens = torch.randint(0, vocabulary, (1, TOKENS))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def run(packed: bool) -> dict[str, Any]:
    """One row in this process."""
    torch.set_num_threads(1)
    steps(adapted(SMALL, packed), SMALL["vocab_size"])  # what is imported and allocated at the first call
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    start = Anonymous._now()
    model = adapted(SIZE, packed)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    everything = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    adapters = sum(4 * t.nbytes for t in model.parameters() if t.requires_grad)  # weights, gradients, two moments
    base = sum(t.untyped_storage().nbytes() for t in everything.values() if not t.requires_grad)
    watch, began = Anonymous(), time.process_time()
    steps(model, SIZE["vocab_size"])
    watch.stop()
    taken = time.process_time() - began
    return {"base": base, "adapters": adapters, "peak": watch.peak - start, "seconds": taken}


def _measured(kind: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", kind]
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    found = subprocess.run(command, capture_output=True, text=True, env=exact)
    if found.returncode:
        sys.exit(found.stderr)
    row: dict[str, Any] = json.loads(found.stdout.strip().splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=["packed", "float"], help=argparse.SUPPRESS)
    parser.add_argument("--markdown", type=Path, help="write the table there")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(given.one == "packed")))
        return
    h, inner, layers, vocabulary = (
        SIZE[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    )
    numbers = layers * (4 * h * h + 3 * h * inner) + 2 * vocabulary * h
    codes = numbers * (4 + 16 / 64) / 8
    found = {kind: _measured(kind) for kind in ("float", "packed")}
    for row in found.values():
        row["rest"] = row["peak"] - row["base"] - row["adapters"]
    rows = []
    for kind, row in found.items():
        cells = [f"{row[name] / 1e6:.1f}" for name in ("base", "adapters", "rest", "peak")]
        beyond = row["peak"] - row["adapters"] - found["float"]["rest"]
        rows.append([kind, *cells, f"{row['base'] / codes:.2f}", f"{beyond / codes:.2f}", f"{row['seconds'] / 4:.2f}"])
    title = (
        f"Training adapters beside a base of {numbers / 1e6:.1f} M parameters, whose codes take {codes / 1e6:.1f} MB"
    )
    columns = ["base", "base MB", "adapters MB", "rest MB", "peak MB", "base / codes", "peak without adapters and the rest of "
               "float / codes", "CPU s a step"]  # fmt: skip
    measure.show(title, columns, rows)
    measure.save(None, given.markdown, title, columns, rows, [], TEXT)


if __name__ == "__main__":
    main()
