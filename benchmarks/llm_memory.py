"""Memory and time of quantizing a language model that is larger than what is held of it: a generated Llama, block by block.

The folder is made shard by shard (random bfloat16 weights, norm weights scaled at random). Every row runs in its own process.
``peak`` is its resident memory, imports and pages of files included; ``beyond`` is the anonymous memory beyond that of the loaded
model (rows ``module`` and ``torchao``) or of the imports. ``torchao`` quantizes the loaded model, where it is installed.

With ``--onnx`` the model is an ONNX decoder in float32 with external data, and ``--free`` what the program takes for the free
memory: weights that fill more than half of it stay in their files, whose pages count to ``peak`` and not to ``beyond``. With it a
folder that is written as ``genai`` or ``onnx`` gets no samples where a session of the file would take more than half.

    python benchmarks/llm_memory.py --parameters 0.5 --to compressed-tensors --recipes nearest,gptq,awq
    python benchmarks/llm_memory.py --parameters 1.0 --blocks 4 --onnx --free 1.0 --recipes nearest
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# billions of parameters -> hidden size, intermediate size, layers, heads, heads of keys, vocabulary
SIZES = {
    0.1: (768, 2048, 12, 12, 4, 16000),
    0.3: (1024, 2816, 20, 16, 4, 32000),
    0.5: (1536, 4096, 16, 12, 4, 32000),
    1.0: (2048, 5632, 20, 16, 4, 32000),
    3.0: (3072, 8192, 28, 24, 8, 128256),
}


def make(folder: Path, parameters: float, blocks: int | None = None) -> int:
    """Write a Llama of that size, or of its widths with so many blocks, one block a shard; its number of parameters."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import BPE

    hidden, inner, layers, heads, keys, vocabulary = SIZES[parameters]
    layers = blocks or layers
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": vocabulary,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    letters = {chr(32 + code): code for code in range(90)}
    tokenizer = Tokenizer(BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).bfloat16()

    def norm() -> torch.Tensor:
        return (torch.rand(hidden, generator=generator) * 1.5 + 0.5).bfloat16()

    width = hidden // heads * keys
    weight_map: dict[str, str] = {}
    count = 0
    for index in range(layers + 2):
        name = f"model-{index + 1:05d}-of-{layers + 2:05d}.safetensors"
        if index == 0:
            tensors = {"model.embed_tokens.weight": matrix(vocabulary, hidden)}
        elif index == layers + 1:
            tensors = {"model.norm.weight": norm(), "lm_head.weight": matrix(vocabulary, hidden)}
        else:
            prefix = f"model.layers.{index - 1}."
            shapes = {
                "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (width, hidden), "self_attn.v_proj": (width, hidden),
                "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }  # fmt: skip
            tensors = {f"{prefix}{part}.weight": matrix(*shape) for part, shape in shapes.items()}
            tensors |= {f"{prefix}{part}.weight": norm() for part in ("input_layernorm", "post_attention_layernorm")}
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        count += sum(tensor.numel() for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return count


def make_onnx(folder: Path, parameters: float, blocks: int | None = None) -> int:
    """Write an ONNX decoder of these widths in float32, its weights one by one into a second file; its number of parameters."""
    import numpy as np
    import onnx
    from memory import Writer
    from onnx import TensorProto, helper

    hidden, inner, layers, heads, _, vocabulary = SIZES[parameters]
    folder.mkdir(parents=True)
    w = Writer(folder / "model.onnx")
    parts, whole = np.int64([0, 0, heads, hidden // heads]), np.int64([0, 0, hidden])
    split, join = w.constant("split", parts), w.constant("join", whole)
    root, later = w.constant("root", np.float32(np.sqrt(hidden // heads))), w.constant("later", np.float32(-1e9))
    length = w("Gather", w("Shape", "x", out="shape"), w.constant("one", np.int64([1])), out="length")
    square = w("Expand", later, w("Concat", length, length, out="square", axis=0), out="full")
    mask = w("Trilu", square, w.constant("first", np.int64(1)), out="mask", upper=1)

    def norm(x: str, name: str) -> str:
        scale = w.random.uniform(0.5, 2, hidden).astype(np.float32)
        return w("LayerNormalization", x, w.constant(f"{name}.weight", scale), out=name)

    def linear(x: str, name: str, *shape: int) -> str:
        return w("MatMul", x, w.weight(f"{name}.weight", *shape), out=name)

    x = w("Gather", w.weight("table", vocabulary, hidden), "x", out="embedded")
    for i in range(blocks or layers):
        found, turned = norm(x, f"{i}.norm"), {}
        for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            apart = w("Reshape", linear(found, f"{i}.{part}", hidden, hidden), split, out=f"{i}.{part}.heads")
            turned[part] = w("Transpose", apart, out=f"{i}.{part}.turned", perm=order)
        scores = w("Div", w("MatMul", turned["q"], turned["k"], out=f"{i}.product"), root, out=f"{i}.scores")
        share = w("Softmax", w("Add", scores, mask, out=f"{i}.masked"), out=f"{i}.share", axis=-1)
        mixed = w("MatMul", share, turned["v"], out=f"{i}.mixed")
        mixed = w("Reshape", w("Transpose", mixed, out=f"{i}.back", perm=[0, 2, 1, 3]), join, out=f"{i}.joined")
        x = w("Add", x, linear(mixed, f"{i}.o", hidden, hidden), out=f"{i}.attended")
        found = norm(x, f"{i}.norm2")
        gate = linear(found, f"{i}.gate", hidden, inner)
        gate = w("Mul", gate, w("Sigmoid", gate, out=f"{i}.sigmoid"), out=f"{i}.silu")
        product = w("Mul", gate, linear(found, f"{i}.up", hidden, inner), out=f"{i}.gated")
        x = w("Add", x, linear(product, f"{i}.down", inner, hidden), out=f"{i}.out")
    logits = linear(norm(x, "norm"), "lm_head", hidden, vocabulary)
    w.file.close()
    tokens = helper.make_tensor_value_info("x", TensorProto.INT64, ["n", "t"])
    found = helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["n", "t", vocabulary])
    graph = helper.make_graph(w.nodes, "model", [tokens], [found], w.tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), w.path)
    return w.data.stat().st_size // 4


_BUDGET = 64 << 20  # bytes of activations


class Anonymous:
    """The largest anonymous memory of this process, looked at 200 times a second."""

    def __init__(self) -> None:
        self.start = self.peak = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def _now() -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("RssAnon")))

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, self._now())

    def stop(self) -> dict[str, int]:
        """Bytes beyond the start: at most, and now."""
        self._over.set()
        self._thread.join()
        return {"beyond": self.peak - self.start, "held": self._now() - self.start}


def loaded(folder: Path) -> Any:
    """The model in memory of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _small() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=128,
        )
    ).bfloat16()  # fmt: skip


def run(folder: Path, recipe: str, to: str, out: Path, rows: int, context: int, free: float | None) -> dict[str, Any]:
    """Quantize in this process; what it took."""
    import torch

    from bitwright.llm import quantize, simulated

    if free is not None:
        simulated.free_memory = lambda: round(free * 2**30)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    in_memory = recipe in ("torchao", "module", "module_in_place")
    preset = "w4g32" if to == "gguf" else "w4g128"
    if recipe == "torchao":
        from torchao.quantization import IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerGroup
    elif in_memory:
        quantize(_small(), preset, in_place=True, progress=False)  # what is imported at the first call
    model: Any = loaded(folder) if in_memory else folder
    gc.collect()
    memory, start, cpu = Anonymous(), time.perf_counter(), time.process_time()
    more: dict[str, Any] = {}
    if recipe == "torchao":
        quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(128)))
    elif in_memory:
        result = quantize(model, preset, in_place=recipe.endswith("in_place"), progress=False)
        more = {"seconds": result.seconds}
    else:
        data = None
        if recipe != "nearest":
            data = torch.randint(0, 90, (rows * context,), generator=torch.Generator().manual_seed(1))
        result = quantize(
            folder, preset, recipe=recipe, data=data, context=context, samples=rows, to=to, out=out, progress=False
        )
        more = {"bytes": result.bytes, "seconds": result.seconds}
        if result.after is not None:
            more["divergence"] = result.after.divergence
    took = {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    return {"peak": _peak(), **memory.stop(), **took, **more}


def run_onnx(path: Path, recipe: str, out: Path, rows: int, context: int, free: float | None) -> dict[str, Any]:
    """Quantize the decoder in this process; what it took."""
    import numpy as np
    import torch

    import bitwright
    import bitwright.onnx.program
    from bitwright.onnx.model import session

    if free is not None:
        session.free_memory = lambda: round(free * 2**30)
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    data = [{"x": random.integers(0, 16000, (1, context))} for _ in range(1 if recipe == "nearest" else rows)]
    step: Any = "fold" if recipe == "nearest" else {recipe: {"memory_budget": _BUDGET}}
    gc.collect()
    memory, start, cpu = Anonymous(), time.perf_counter(), time.process_time()
    result = bitwright.quantize(
        path, data, "w4g128", recipe=[step], path=out, samples=False, measure_speed=False, memory_budget=_BUDGET,
        poor_below=-math.inf, progress=False,
    )  # fmt: skip
    took = {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    written = sum(file.stat().st_size for file in out.iterdir())
    return {"peak": _peak(), **memory.stop(), **took, "bytes": written, "answer": str(result.headline)}


def _peak() -> int:
    """Of this program: ``ru_maxrss`` is at least that of the process which started it."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM")))


def main() -> None:
    """Make the model, run every row, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=0.5, choices=sorted(SIZES), help="billions")
    parser.add_argument("--recipes", default="nearest,gptq,awq", help="rows; module, module_in_place and torchao, too")
    parser.add_argument("--to", default="compressed-tensors")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--blocks", type=int, help="of the model, in place of those of its size")
    parser.add_argument("--folder", type=Path, help="where the model is, or is made")
    parser.add_argument("--onnx", action="store_true", help="an ONNX decoder with external data")
    parser.add_argument("--free", type=float, help="GiB of memory that sessions find free")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch) / "model"
        if not folder.exists():
            count = (make_onnx if given.onnx else make)(folder, given.parameters, given.blocks)
            print(f"{count / 1e9:.2f} B parameters in {folder}", flush=True)
        if given.one and given.onnx:
            path, out = folder / "model.onnx", Path(scratch) / "out"
            print(json.dumps(run_onnx(path, given.one, out, given.rows, given.context, given.free)))
            return
        if given.one:
            print(
                json.dumps(
                    run(folder, given.one, given.to, Path(scratch) / "out", given.rows, given.context, given.free)
                )
            )
            return
        kind = "*.data" if given.onnx else "*.safetensors"
        size = sum(path.stat().st_size for path in folder.glob(kind))
        print(
            f"model {size / 2**30:.2f} GiB\nrow                 peak GiB     beyond       held   wall s    cpu s  by stage"
        )
        for recipe in given.recipes.split(","):
            command = [
                sys.executable,
                __file__,
                "--one",
                recipe.replace("+", ","),
                "--folder",
                str(folder),
                "--to",
                given.to,
            ]
            command += ["--rows", str(given.rows), "--context", str(given.context), *["--onnx"][: given.onnx]]
            command += [] if given.free is None else ["--free", str(given.free)]
            # memory that is freed goes back to the system at once, and is not counted again
            exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
            found = subprocess.run(command, capture_output=True, text=True, env=exact)
            if found.returncode:
                said = found.stderr.strip().splitlines() or [f"exit code {found.returncode}"]
                print(f"{recipe:18}  failed: {said[-1]}")
                continue
            row = json.loads(found.stdout.strip().splitlines()[-1])
            stages = ", ".join(f"{stage} {spent:.1f}" for stage, spent in row.get("seconds", {}).items())
            print(
                f"{recipe:18} {row['peak'] / 2**30:9.2f} {row['beyond'] / size:9.3f}x {row['held'] / size:9.3f}x "
                f"{row['wall']:8.1f} {row['cpu']:8.1f}  {stages}",
                flush=True,
            )
            shutil.rmtree(Path(scratch) / "out", ignore_errors=True)


if __name__ == "__main__":
    main()
