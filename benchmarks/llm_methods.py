"""What methods for language models leave of the perplexity, format by format, against rounding to nearest and other tools.

    make bench-llm                                                 # goes on where it stopped; under an hour on a quiet core
    python benchmarks/llm_methods.py --rows mxfp4 --methods gptq    # one format, one method
    python benchmarks/llm_methods.py --table                        # the table of what was measured

Models: ``stories260k`` on 128 stories, 32 to calibrate, as it is and with four channels of every norm 16 times larger and the
weights behind as much smaller (``outliers``: the same function); a mixture of experts (Mixtral, 8 experts, 2 for a token) and
a GPT-2, both of about a million parameters and trained here on stories of ``stories260k``, the GPT-2 on its probabilities; an
LSTM of characters as contrast. The matrices of the blocks are quantized, embedding and output layer are in float. Weights of
``int`` rows are asymmetric in groups of 32 unless they say otherwise, those of ``float zero`` rows have real zero points and
ranges of least squared error. Activations of ``a8`` and ``a4`` rows are quantized per token, with ranges chosen at run time,
where a matrix reads them; ``a4u`` with zero points. ``w8a8`` rows quantize every activation; ``kv`` rows the cache alone. Bits
per weight count scales, and zero points, as they are stored. The interval is that of the change from float, 95 %, from the
differences between rows of text. Memory is the largest anonymous memory beyond that before the methods. Rows are kept in
``build/llm_methods.jsonl``; ``--check`` ends with an error where a method leaves more than nearest rounding does. Rows of
other tools run where these are installed.
Needs the developer data set (see tests/support/data.py).
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import torch
from llm_memory import Anonymous
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from bitwright.core.numerics.granularity import PerBlock
from bitwright.core.numerics.spec import PRESETS, Preset, QuantSpec, RangeMethod, dynamic_spec, find_preset, weight_spec
from bitwright.torch import (
    Distillation,
    QuantizationSimModel,
    TrainingGuard,
    add_low_rank_branches,
    apply_reconstruction,
    awq_model,
    correct_errors,
    learn_scales,
    parameter_groups,
    rotate_model,
    transform_model,
)
from tests.methods.transformer import with_outliers
from tests.support import data

TEXT = """\
Rows of stories260k on 128 stories, 32 to calibrate; of `outliers`, the same function with four channels of every norm 16 times
larger and the weights behind as much smaller; of a mixture (Mixtral, 8 experts in each of 3 layers, 2 for a token, 14.1 in
float) and a GPT-2 (1.4 million parameters, 8.67 in float), trained here on stories of stories260k; of an LSTM of characters. A
GPT of 60 million parameters does not train on a CPU within the hour: 300 steps of 2,048 tokens are 2.2e14 operations. `above
float` has its 95 % interval, from the paired differences between rows of text; MiB is the largest memory beyond that before
the methods; rows without either were measured by the same calls, outside of the program. Bold: the best method of a format, at
its fewest bits.

`gptq` takes away half and more of what rounding to nearest costs stories260k in every format. The GPT-2 loses little above 2
bits, and at 2 bits `gptq` takes away four fifths. `awq` leaves MXFP4 and NVFP4 as they are, since the outputs of the whole
model would lose. Activations of 4 bits per token need the rotation at run time (`rotate+`). `transform` puts products by
fitted matrices in front of down projections, `transform+` in front of queries, keys, values and gates too. `branch4` has
low-rank branches of rank 4 beside the layers, whose bits (16 a number) are counted. Rows `float zero` have real zero points,
`a4u` activations with zero points; vectors (`vq`) are rounded to nearest by k-means. `w8a8 static` quantizes embedding and
output layer too. Other tools: hqq 0.2.8 has groups of 43 in the down projections, whose 172 inputs 32 does not divide, torchao
groups of 4 there, and ModelOpt no zero points. NNCF 3.4 has groups of 4 there too; its AWQ and scale estimation left more than
the row without (3.735 and 3.736 against 3.726 on 32 rows of 128 tokens), and its GPTQ takes no torch models. ModelOpt's NVFP4
runs with CUDA only. AutoRound 0.16 (50 steps) leaves layers in float whose sizes 32 does not divide: here its MLPs have zeros
for 20 more channels. `autoround` is level with it at the same steps, and `gptq` in an eighth of the time. `scales` are the
learned factors of OmniQuant, `clipping` its learned ranges, 50 steps a block each. `kv int4 rotated` has a Hadamard matrix in
front of the grids of keys. `distilled` trains the rounded weights towards the float outputs for 200 steps.

Command: `make bench-llm`, row by row on cores that other work shared."""
BUILD = Path(__file__).parent.parent / "build"


def _grouped(bits: int, group: int = 32) -> Preset:
    return Preset(weight_spec(f"uint{bits}", PerBlock(group), symmetry="asymmetric"), None)


def _with(preset: Preset, activation: str) -> Preset:
    return Preset(preset.weight, dynamic_spec(activation))


FLOAT_PRESET = Preset(None, None)
_PER_CHANNEL = {"granularity": "per_channel"}
_KV_TOKEN = {"format": "int4", "granularity": "per_token"}
#: name -> preset, or the formats of keys and values
FORMATS: dict[str, Any] = {
    "int4": _grouped(4),
    "int4 g128": _grouped(4, 128),
    "int3": _grouped(3),
    "int3 g64": _grouped(3, 64),
    "int2": _grouped(2),
    "int4 float zero": find_preset("w4g32_float_zero"),
    "int3 float zero": find_preset("w3g32_float_zero"),
    "int2 float zero": find_preset("w2g32_float_zero"),
    "int4 hqq": Preset(replace(find_preset("w4g32_float_zero").weight, method=RangeMethod("hqq")), None),
    "int3 hqq": Preset(replace(find_preset("w3g32_float_zero").weight, method=RangeMethod("hqq")), None),
    "mxfp4": PRESETS["mxfp4"],
    "nvfp4": PRESETS["nvfp4"],
    "nf4": PRESETS["nf4"],
    "lpbq": PRESETS["w4lpbq"],
    "fp8": Preset(PRESETS["fp8"].weight, None),
    "w8a8 static": PRESETS["w8a8"],
    "w8a8 dynamic": PRESETS["w8a8_dynamic"],
    "int4 a8": _with(_grouped(4), "int8"),
    "int4 a4": _with(_grouped(4), "int4"),
    "int4 float zero a8": _with(find_preset("w4g32_float_zero"), "int8"),
    "int4 float zero a4": _with(find_preset("w4g32_float_zero"), "int4"),
    "int4 float zero a4u": _with(find_preset("w4g32_float_zero"), "uint4"),
    "vq 3 bits": PRESETS["w8"],
    "kv int8": {"key": "int8", "value": "int8"},
    "kv int4": {"key": {"format": "int4", **_PER_CHANNEL}, "value": {"format": "int4", "granularity": "per_token"}},
    "kv int4 per token": dict.fromkeys(("key", "value"), _KV_TOKEN),
    "kv int4 rotated": {"key": {**_KV_TOKEN, "rotated": True}, "value": _KV_TOKEN},
    "kv fp8": {"key": "fp8", "value": "fp8"},
}
#: methods in order; "rotate" merges R1 and R2, "rotate+" puts R4 in front of down projections too; "transform" puts fitted
#: products there, "transform+" in front of queries, keys, values and gates too; "recipe" is the default recipe of quantize
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
#: "scales": learned factors between channels (OmniQuant's transformation), "clipping": its learned ranges
_LEARNED = {"clipping": ("clipping",), "scales": ("scales",), "scales, clipping": ("scales", "clipping")}
_LEARNED |= {"scales, gptq": ("scales", "gptq")}
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
_PLAIN = {"nearest": (), "gptq": ("gptq",)}
_PLAIN_AND_RANGES = _PLAIN | {"seq_mse, gptq": ("seq_mse", "gptq")}
#: without a stream that rotates, as that of layer norms
TRANSFORMED = _PLAIN | {"transform, gptq": ("transform", "gptq"), "transform+, gptq": ("transform+", "gptq")}
#: "distilled": all weights of the blocks are trained towards the float outputs, on stories that the model itself tells
_DISTILLED = {"gptq, distilled": ("gptq", "distilled")}
_STEPS = 50  # of AutoRound, here and in the tool of its authors
_NOISE = 0.02  # of two perplexities that mean the same
#: format -> percent above float of stories260k that was aimed at
GOALS = {
    "w8a8 static": 1.0, "w8a8 dynamic": 0.4, "int4": 3.0, "int4 float zero": 3.0, "int4 float zero a8": 4.0, "int4 a8": 4.0,
    "int4 float zero a4u": 10.0, "int3 float zero": 26.4, "mxfp4": 13.8, "nvfp4": 8.2, "kv int8": 0.5, "kv int4": 3.0,
}  # fmt: skip
#: model, format -> the same of other models
GOALS_OF = {("outliers", "w8a8 dynamic"): 2.9}


def methods_for(model: str, format: str) -> dict[str, tuple[str, ...]]:
    """The methods whose rows a format has: rotations where activations have 4 bits."""
    if format.startswith("kv"):
        return {"nearest": ()}
    if format.startswith("vq"):
        return {"nearest": ("k-means",), "gptvq": ("gptvq",)}
    if format == "w8a8 static":
        return {"nearest": (), "recipe": ("recipe",)} if model != "mixture" else {"nearest": ()}
    if model == "gpt":
        return TRANSFORMED if format.endswith("a4") else _PLAIN_AND_RANGES
    if model != "stories260k":
        return _PLAIN
    if " a4" in format:
        return ROTATED | (_LEARNED if format == "int4 a4" else {})
    if format == "int4 a8":
        return _PLAIN | _LEARNED
    if format in ("int3 float zero", "int2 float zero"):
        return METHODS | BRANCHED
    if format == "int4":
        return METHODS | {"autoround": ("autoround",)} | _DISTILLED
    if format == "int3":
        return METHODS | {"autoround": ("autoround",)}
    if format == "int4 float zero":
        return METHODS | _DISTILLED
    if format == "int2":
        return _PLAIN_AND_RANGES | _DISTILLED
    if format in ("int3 g64", "int4 g128"):
        return _PLAIN_AND_RANGES
    return _PLAIN if " a8" in format or "hqq" in format or "w8a8" in format else METHODS


#: of vectors of 2 and 64 entries of two bytes a layer, and a scale of 16 bits a row, for the 35 matrices
_VECTOR_BITS = 3 + 64 * 16 * 7 / 45312 + 16 * 600 / 45312

# ---- models


@dataclass(frozen=True)
class Subject:
    """A model of the table.

    Attributes:
        make: a fresh copy in float.
        calibration: batches.
        rows: tokens, ``[N, T + 1]``, that perplexity is measured on.
        ends: patterns of tables and output layers, which stay in float.
        formats: that its rows have.
    """

    make: Callable[[], nn.Module]
    calibration: Callable[[], list[Tensor]]
    rows: Callable[[], Tensor]
    ends: tuple[str, ...]
    formats: tuple[str, ...]


class Logits(nn.Module):
    """A model of transformers from tokens to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        """``[N, T]`` to ``[N, T, V]``."""
        return self.model(tokens, use_cache=False).logits


def _configured(name: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    if name == "mixture":
        config = MixtralConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=256,
        )  # fmt: skip
        return MixtralForCausalLM(config)
    gpt = GPT2Config(
        vocab_size=512, n_embd=160, n_layer=4, n_head=4, n_positions=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(gpt)


def _trained(name: str, stories: int, taught: bool = False) -> nn.Module:
    """Train once, on stories that ``stories260k`` tells, or its probabilities for them where ``taught``; keep the weights."""
    path = BUILD / f"llm_{name}.safetensors"
    model = _configured(name)
    if not path.exists():
        BUILD.mkdir(exist_ok=True)
        _train(model, _told(stories), data.stories_of_transformers().eval() if taught else None)
        save_model(model, str(path))
    load_model(model, str(path))
    return Logits(model).eval()


@torch.no_grad()
def _told(count: int, length: int = 129) -> Tensor:
    """Stories that stories260k tells at temperature 1, kept for all models."""
    path = BUILD / f"llm_stories_{count}x{length}.safetensors"
    if path.exists():
        return load_file(path)["told"]
    model = data.stories_of_transformers()
    torch.manual_seed(0)
    rows = torch.ones(count, 1, dtype=torch.int64).split(320)
    told = [
        model.generate(part, do_sample=True, max_new_tokens=length - 1, min_new_tokens=length - 1, pad_token_id=0)
        for part in rows
    ]
    save_file({"told": torch.cat(told)}, path)
    return torch.cat(told)


def _train(model: Any, told: Tensor, teacher: Any, steps: int = 300) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    model.train()
    for step in range(steps):
        rows = told[torch.randint(0, len(told), (16,))]
        targets = rows[:, 1:].flatten()
        if teacher is not None:
            with torch.no_grad():
                targets = teacher(rows[:, :-1], use_cache=False).logits.softmax(-1).flatten(0, 1)
        logits = model(rows[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"training, step {step}: {float(loss.detach()):.3f}", file=sys.stderr, flush=True)


def _characters(split: str, count: int) -> Tensor:
    return data.shakespeare(split)[: count * 129].reshape(count, 129)


def _stories(split: str = "test", count: int = 128, length: int = 257) -> Tensor:
    return data.stories(split)[:count, :length]


def _calibration(length: int = 256) -> list[Tensor]:
    return list(data.stories("calib")[:, :length].split(8))


_MOST = (
    "int4", "int4 g128", "int3", "int3 g64", "int2", "int4 float zero", "int3 float zero", "mxfp4", "nvfp4", "lpbq",
    "w8a8 static", "w8a8 dynamic", "int4 a8", "int4 a4", "kv int8", "kv int4",
)  # fmt: skip
_FEW = ("int4", "int3", "int3 float zero", "mxfp4", "nvfp4", "w8a8 static", "w8a8 dynamic")
SUBJECTS: dict[str, Subject] = {
    "stories260k": Subject(
        lambda: data.trained("stories260k"), _calibration, _stories, ("tok_embeddings*", "output*"), tuple(FORMATS)
    ),
    "outliers": Subject(
        lambda: with_outliers(data.trained("stories260k"), _calibration()[0][:1]), _calibration, _stories,
        ("tok_embeddings*", "output*"), ("w8a8 dynamic",),
    ),
    "mixture": Subject(
        lambda: _trained("mixture", 320), lambda: _calibration(128), lambda: _stories(length=129),
        ("*embed_tokens*", "*lm_head*"), _FEW,
    ),
    "gpt": Subject(
        lambda: _trained("gpt", 1280, taught=True), lambda: _calibration(128), lambda: _stories(length=129),
        ("*wte*", "*wpe*", "*lm_head*"), _MOST,
    ),
    "lstm": Subject(
        lambda: data.trained("lstm_char"), lambda: list(_characters("train", 32)[:, :-1].split(8)),
        lambda: _characters("test", 128), ("*embed*", "*head*"), ("int4", "w8a8 static"),
    ),
}  # fmt: skip


@torch.no_grad()
def losses(model: Callable[[Tensor], Any], rows: Tensor) -> Tensor:
    """Mean loss of every row, ``[N]``, float64."""
    found = []
    for part in rows.split(32):
        logits = model(part[:, :-1])
        logits = logits if isinstance(logits, Tensor) else logits[0]
        each = nn.functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="none")
        found.append(each.view(len(part), -1).double().mean(1))
    return torch.cat(found)


@functools.cache
def float_losses(name: str) -> Tensor:
    """:func:`losses` of the float model."""
    subject = SUBJECTS[name]
    return losses(subject.make(), subject.rows())


# ---- measuring


def bits_per_weight(format: Any, group: int = 64) -> float:
    """Bits of a weight with its share of scales, 16 bits each where they are plain floats, and zero points."""
    spec: QuantSpec | None = format.weight if isinstance(format, Preset) else None
    if spec is None:
        return 32.0
    size = spec.granularity.size if isinstance(spec.granularity, PerBlock) else group
    scale = {"e8m0": 8, "e4m3": 8, "uint4": 4}.get(spec.scale_format.name, 16)
    zero = {"asymmetric": spec.format.bits, "float_zero_point": 16}.get(spec.symmetry, 0)
    return spec.format.bits + (scale + zero) / size


def bits_of_tool(tool: str, format: str, bits: float) -> float:
    """Bits per weight of a tool that has no zero points, or groups of 4 in the down projections."""
    if tool == "modelopt" and format == "int4":
        return 4 + 16 / 32
    if tool not in ("torchao", "nncf") or format not in ("int3", "int4"):
        return bits
    return bits + 64 * 172 / 45312 * (bits_per_weight(_grouped(int(format[-1]), 4)) - bits)


def branch_bits(methods: Sequence[str]) -> float:
    """Bits of branches per weight of the 35 matrices, 16 bits a number."""
    sides = ((64, 64), (64, 32), (64, 32), (64, 64), (64, 172), (172, 64), (64, 172))
    numbers = sum(min(rank, min(side) // 2) * sum(side) for rank in _ranks(methods) for side in sides)
    return 16 * numbers / sum(rows * columns for rows, columns in sides)


def _ranks(methods: Sequence[str]) -> list[int]:
    return [int(name.removeprefix("branch")) for name in methods if name.startswith("branch")]


def quantized(subject: Subject, format: Any, methods: Sequence[str], batches: list[Tensor]) -> Callable[[Tensor], Any]:
    """The simulation after the methods."""
    model = subject.make()
    if "recipe" in methods:
        import bitwright

        return bitwright.quantize(model, batches, preset=format, progress=False).sim.model  # type: ignore[no-any-return]
    if isinstance(format, dict):
        sim = QuantizationSimModel(model, batches[0][:1], preset=FLOAT_PRESET, kv_cache=format)
        sim.compute_encodings(batches, progress=False)
        return sim.model
    for rank in _ranks(methods):
        add_low_rank_branches(model, rank, layers="layers.*")
    for name in methods:
        if name.startswith("rotate"):
            rotate_model(model, None, batches[0][:1], online=name.endswith("+"), progress=False)
        elif name.startswith("transform"):
            transform_model(model, batches, shared=name.endswith("+"), progress=False)
        elif name == "awq":
            awq_model(model, batches, weight=format.weight, progress=False)
    sim = QuantizationSimModel(model, batches[0][:1], preset=format)
    static = format.activation is not None and not format.activation.dynamic
    _leave_ends(sim, () if static else subject.ends)
    sim.compute_encodings(batches if static else None, progress=False)
    if "scales" in methods:
        learn_scales(sim, batches, iterations=_STEPS, progress=False)
    for name in methods:
        if name not in ("awq", "scales") and not name.startswith(("rotate", "transform", "branch", "distilled")):
            options = {"k-means": {"rounds": 0, "match_float": False}, "autoround": {"iterations": _STEPS}}
            options["clipping"] = options["autoround"]
            method = {"k-means": "gptvq", "clipping": "learned_clipping"}.get(name, name)
            apply_reconstruction(sim, batches, method, progress=False, **options.get(name, {}))
    if _ranks(methods):
        correct_errors(sim, model, batches, progress=False)
    if "distilled" in methods:
        _distill(sim, model, torch.cat([*batches, _told(480, 257)[:, :-1]]))
    return sim.model


def _distill(sim: QuantizationSimModel, model: nn.Module, rows: Tensor, steps: int = 200, rate: float = 1e-3) -> None:
    """Train the weights of the blocks on their grids, 8 rows a step, towards the outputs of ``model``; no labels."""
    distillation = Distillation(sim, teacher=model)
    optimizer = torch.optim.Adam(parameter_groups(sim, layers="layers.*", lr=rate))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    guard, drawn = TrainingGuard(optimizer), torch.Generator().manual_seed(0)
    for _ in range(steps):
        guard.step(distillation(rows[torch.randint(0, len(rows), (8,), generator=drawn)])[0])
        schedule.step()


def _leave_ends(sim: QuantizationSimModel, patterns: Sequence[str]) -> None:
    from fnmatch import fnmatchcase

    for name, site in sim.quantizers.items():
        if site.role == "weight" and any(fnmatchcase(name, pattern) for pattern in patterns):
            site.enabled = False


# ---- other tools: the model with the weights that they make


def _matrices(model: nn.Module) -> Iterator[nn.Linear]:
    return (
        m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "output" not in n and "lm_head" not in n
    )


@torch.no_grad()
def _torchao(model: nn.Module, bits: int) -> nn.Module:
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    kind = getattr(torch, f"int{bits}")
    kept = set(_matrices(model))
    # groups of 32 do not divide the 172 inputs of the down projections, which torchao refuses: groups of 4 there
    for group, ours in ((32, lambda m: m.in_features % 32 == 0), (4, lambda m: m.in_features % 32 != 0)):
        config = IntxWeightOnlyConfig(
            weight_dtype=kind, granularity=PerGroup(group), mapping_type=MappingType.ASYMMETRIC
        )
        quantize_(model, config, lambda m, _, ours=ours: m in kept and ours(m))
    return model


@torch.no_grad()
def _torchao_per_token(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    kept = set(_matrices(model))
    quantize_(model, Int8DynamicActivationInt8WeightConfig(), lambda module, _: module in kept)
    return model


@torch.no_grad()
def _hqq(model: nn.Module, bits: int) -> nn.Module:
    from hqq.core.quantize import Quantizer

    for layer in _matrices(model):
        group = 32 if layer.in_features % 32 == 0 else 43  # of 172
        codes, meta = Quantizer.quantize(layer.weight.data, nbits=bits, group_size=group, axis=1, device="cpu",
                                         compute_dtype=torch.float32)  # fmt: skip
        layer.weight.data = Quantizer.dequantize(codes, meta).reshape(layer.weight.shape).float()
    return model


def _auto_round(_: nn.Module, bits: int) -> nn.Module:
    from auto_round import AutoRound

    model = _padded(data.stories_of_transformers())
    rows = [row[None] for row in data.stories("calib")[:, :256]]
    made = AutoRound(
        model, _NoTokenizer(), bits=bits, group_size=32, sym=False, iters=_STEPS, nsamples=32, seqlen=256, batch_size=8,
        dataset=[{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows], device_map="cpu",
        enable_torch_compile=False, amp=False,
    )  # fmt: skip
    found, _ = made.quantize()
    return Logits(found).eval()


@torch.no_grad()
def _padded(model: Any, multiple: int = 32) -> Any:
    """The same function with zeros for channels between the layers of an MLP: AutoRound leaves odd sizes in float."""
    for block in model.model.layers:
        more = -block.mlp.down_proj.in_features % multiple
        mlp, rows = block.mlp, (0, 0, 0, more)
        for layer, pads in ((mlp.gate_proj, rows), (mlp.up_proj, rows), (mlp.down_proj, (0, more))):
            layer.weight = nn.Parameter(nn.functional.pad(layer.weight, pads))
            layer.out_features, layer.in_features = layer.weight.shape
    model.config.intermediate_size = block.mlp.down_proj.in_features
    return model


class _NoTokenizer:
    """Stands for a tokenizer where the data are tokens."""


def _nncf(model: nn.Module, bits: int) -> nn.Module:
    import nncf

    mode = {4: nncf.CompressWeightsMode.INT4_ASYM, 8: nncf.CompressWeightsMode.INT8_ASYM}[bits]
    example = data.stories("calib")[:1, :256]
    four = nncf.AdvancedCompressionParameters(
        group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST, min_adjusted_group_size=4
    )
    found = nncf.compress_weights(
        model, mode=mode, group_size=32, ratio=1.0, dataset=nncf.Dataset([example]), all_layers=True, advanced_parameters=four,
        ignored_scope=nncf.IgnoredScope(patterns=[".*output.*", ".*embeddings.*"], validate=False),
    )  # fmt: skip
    return found  # type: ignore[no-any-return]


def _modelopt(model: nn.Module, config: str, group: int | None = None) -> nn.Module:
    import copy

    import modelopt.torch.quantization as mtq

    chosen = copy.deepcopy(getattr(mtq, config))
    for row in chosen["quant_cfg"]:
        if group and "block_sizes" in row.get("cfg", ()):
            row["cfg"]["block_sizes"][-1] = group
    batches = _calibration()
    return mtq.quantize(model, chosen, lambda m: [m(batch) for batch in batches])  # type: ignore[no-any-return]


#: tool, format -> the model with the weights, and the inputs, that the tool makes
PEERS: dict[tuple[str, str], Callable[[nn.Module], nn.Module]] = {
    ("torchao", "int4"): lambda model: _torchao(model, 4),
    ("torchao", "int3"): lambda model: _torchao(model, 3),
    ("torchao", "w8a8 dynamic"): _torchao_per_token,
    ("hqq", "int4 hqq"): lambda model: _hqq(model, 4),
    ("hqq", "int3 hqq"): lambda model: _hqq(model, 3),
    ("auto-round", "int4"): lambda model: _auto_round(model, 4),
    ("auto-round", "int3"): lambda model: _auto_round(model, 3),
    ("nncf", "int4"): lambda model: _nncf(model, 4),
    ("modelopt", "int4"): lambda model: _modelopt(model, "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", 32),
    ("modelopt", "nvfp4"): lambda model: _modelopt(model, "W4A16_NVFP4_CFG"),
    ("modelopt", "w8a8 static"): lambda model: _modelopt(model, "INT8_DEFAULT_CFG"),
}


# ---- rows


@dataclass(frozen=True)
class Row:
    """A row of the table; numbers are ``None`` where it failed, with the reason in ``note``."""

    model: str
    format: str
    tool: str
    method: str
    bits: float | None = None
    perplexity: float | None = None
    above: float | None = None
    interval: float | None = None
    seconds: float | None = None
    memory: float | None = None
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is a row of."""
        return self.model, self.format, self.tool, self.method


def wanted(options: argparse.Namespace) -> list[Row]:
    """The rows that were asked for, in the order of the table."""
    rows = []
    for model in options.models:
        subject = SUBJECTS[model]
        for format in subject.formats:
            rows += [Row(model, format, "bitwright", name) for name in methods_for(model, format)]
            peers = PEERS if model in ("stories260k", "outliers") else ()
            rows += [Row(model, format, tool, "") for tool, own in peers if own == format]
    chosen = [row for row in rows if row.format in options.rows]
    named = ("nearest", "", *(options.methods or ()))
    return [row for row in chosen if not options.methods or row.method in named]


def measured(row: Row) -> Row:
    """Make the model of a row and measure it."""
    subject, format = SUBJECTS[row.model], FORMATS[row.format]
    batches, base = subject.calibration(), float_losses(row.model)
    gc.collect()
    memory, start = Anonymous(), time.process_time()
    methods = methods_for(row.model, row.format).get(row.method, ())
    try:
        made = (
            PEERS[row.tool, row.format](subject.make())
            if row.tool != "bitwright"
            else quantized(subject, format, methods, batches)
        )
    except Exception as error:  # a row of another tool, or one that a model refuses, is not the end of the table
        memory.stop()
        return replace(row, note=f"{type(error).__name__}: {str(error).splitlines()[0][:150]}")
    seconds, beyond = time.process_time() - start, memory.stop()["beyond"]
    each = losses(made, subject.rows())
    value, change = math.exp(float(each.mean())), each - base
    factor = math.exp(float(change.mean()))
    half = 100 * factor * 1.96 * float(change.std()) / math.sqrt(len(change))
    bits = bits_per_weight(format) + branch_bits(methods) if row.format != "vq 3 bits" else _VECTOR_BITS
    bits = bits_of_tool(row.tool, row.format, bits)
    return replace(
        row,
        bits=bits,
        perplexity=value,
        above=100 * (factor - 1),
        interval=half,
        seconds=seconds,
        memory=beyond / 2**20,
    )


def stored(path: Path) -> dict[tuple[str, str, str, str], Row]:
    """The rows that earlier runs measured."""
    if not path.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    return {row.key: row for row in rows}


def best_of(rows: Sequence[Row]) -> set[tuple[str, str, str, str]]:
    """Keys of the rows with the least perplexity of a model and a format at its fewest bits, where there are several."""
    of: dict[tuple[str, str], list[tuple[float, float, Row]]] = {}
    for row in rows:
        if row.tool == "bitwright" and row.bits is not None and row.perplexity is not None:
            of.setdefault(row.key[:2], []).append((round(row.bits, 2), row.perplexity, row))
    return {min(some, key=lambda one: one[:2])[2].key for some in of.values() if len(some) > 1}


def _cells(row: Row, best: bool = False) -> list[str]:
    names = [row.model, row.format, row.tool, row.method]
    if row.perplexity is None:
        return [*names, "", row.note, "", "", "", ""]

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    goal = ""
    most = GOALS.get(row.format) if row.model == "stories260k" else GOALS_OF.get((row.model, row.format))
    if row.tool == "bitwright" and most is not None and row.above is not None:
        goal = f"{'reached' if row.above <= most else 'not'} ({most:+.1f} %)"
    change = f"{row.above:+.1f} %" + ("" if row.interval is None else f" ± {row.interval:.1f}")
    shown = number(row.perplexity, ".3f")
    shown = f"**{shown}**" if best else shown
    return [*names, number(row.bits, ".2f"), shown, change, goal, number(row.seconds, ".1f"), number(row.memory, ".0f")]


def worse_than_nearest(rows: Sequence[Row]) -> list[str]:
    """Rows of methods that leave more than rounding to nearest."""
    nearest = {row.key[:2]: row.perplexity for row in rows if row.method == "nearest"}
    return [
        f"{row.model}, {row.format}, {row.method}: {row.perplexity:.3f} against {nearest[row.key[:2]]:.3f}"
        for row in rows
        if row.perplexity is not None and row.tool == "bitwright"
        and row.perplexity > (nearest.get(row.key[:2]) or math.inf) + _NOISE
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--rows", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--methods", nargs="+", help="these alone, beside nearest rounding")
    parser.add_argument("--kept", type=Path, default=BUILD / "llm_methods.jsonl", help="where measured rows are kept")
    parser.add_argument("--again", action="store_true", help="measure rows anew that were measured")
    parser.add_argument("--table", action="store_true", help="measure nothing, show what was measured")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--check", action="store_true", help="fail where a method is worse than rounding to nearest")
    options = parser.parse_args(arguments)
    logging.getLogger("bitwright").setLevel(logging.ERROR)
    kept = stored(options.kept)
    options.kept.parent.mkdir(exist_ok=True)
    for row in [] if options.table else wanted(options):
        if row.key in kept and kept[row.key].perplexity is not None and not options.again:
            continue
        kept[row.key] = found = measured(row)
        with options.kept.open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        print(*_cells(found), sep="\t", file=sys.stderr, flush=True)
    rows = [kept[row.key] for row in wanted(options) if row.key in kept]
    title = "Perplexity of language models by format and method"
    columns = [
        "model",
        "format",
        "tool",
        "method",
        "bits per weight",
        "perplexity",
        "above float",
        "goal",
        "CPU s",
        "MiB",
    ]
    best = best_of(rows)
    table = [_cells(row, row.key in best) for row in rows]
    measure.show(title, columns, table)
    measure.save(options.json, options.markdown, title, columns, table, [asdict(row) for row in rows], TEXT)
    worse = worse_than_nearest(rows)
    if options.check and worse:
        sys.exit("worse than rounding to nearest: " + "; ".join(worse))


if __name__ == "__main__":
    main()
