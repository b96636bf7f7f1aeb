"""GGUF files, which llama.cpp and the programs built on it load.

The codes and scales of the simulation are stored as they are; what llama.cpp unpacks are the simulation's numbers. It then
rounds the inputs of each layer with quantized weights to 8 bits in blocks while it computes (Q8_0, or Q8_K for types of 256
elements), which a weight-only simulation does not. One that does so too, as with the preset ``q8_0``, is written alike.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.core.numerics.formats import SCALE_FORMATS, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerToken
from bitwright.core.numerics.spec import QuantSpec
from bitwright.errors import ExportError
from bitwright.llm.files.common import Extras, FileFormat, refuse_inputs
from bitwright.llm.files.gguf_blocks import (
    BLOCKS,
    FLOATS,
    HALF_FORMATS,
    STRING,
    Reader,
    Typed,
    Writer,
    block_of,
    from_blocks,
    to_blocks,
    typed,
)
from bitwright.llm.files.gguf_models import (
    Config,
    architecture_of,
    from_file,
    name_in_file,
    rope_factors,
    to_file,
    with_defaults,
)
from bitwright.llm.files.gguf_tokenizer import tokenizer_keys
from bitwright.llm.packed import FloatWeight, PackedWeight, Weight, WeightPlan

FILE = "model.gguf"
_CONFIG = "bitwright.config"  # key: the configuration, so that a file can be read back
_MOSTLY = {
    "Q3_K": 11,
    "Q4_K": 14,
    "Q5_K": 16,
    "Q6_K": 18,
    "Q8_0": 7,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 8,
    "MXFP4": 38,
    "float16": 1,
    "bfloat16": 32,
    "float32": 0,
}


def refuses(plan: WeightPlan) -> str:
    """The reason why GGUF has no type for a weight; empty where it has."""
    layout = plan.layout
    if layout is None or layout.format in HALF_FORMATS:
        return ""
    row = block_of(layout)
    if row is not None:
        fits = plan.shape[plan.axis] % row.size == 0
        return (
            "" if fits else f"blocks of {row.name} have {row.size} elements, and it sums over {plan.shape[plan.axis]}"
        )
    if layout.float_zero_point:
        return "zero points that are real numbers need 4 or 5 bits in groups of 32 with q4_k or q5_k scales"
    if layout.group not in (16, 32):
        return "the blocks of its types have 32 elements, or groups of 16"
    halves = layout.scale_format in ("float32", "bfloat16", "float16")
    named = "float16" if layout.symmetric else "float12"
    if halves and block_of(dataclasses.replace(layout, scale_format=named)) is not None:
        return f"its scales are float16 numbers: quantize with scale_format={named!r}"
    return "it has no such type"


def write(folder: Path, weights: Iterable[Weight], extras: Extras) -> None:
    """Write ``model.gguf`` into ``folder``."""
    architecture = architecture_of(extras.config)
    config = with_defaults(extras.config)
    writer = Writer(folder / FILE)
    used: dict[str, int] = {}
    for weight in weights:
        stored = to_file(weight, architecture, config)
        kind = _add(writer, stored)
        if len(stored.shape) == 2:
            used[kind] = used.get(kind, 0) + stored.plan.elements
    factors = rope_factors(config)
    if factors is not None:
        writer.add("rope_freqs.weight", factors.shape, FLOATS["float32"][0], factors)
    tokenizer = tokenizer_keys(extras.tokenizer, config)
    name = Path(str(config.get("_name_or_path") or "")).name or "model"
    if "phi" in name.lower() and "<|endoftext|>" not in tokenizer.get("tokenizer.ggml.tokens", Typed((), 0)).value:
        name = "model"  # llama.cpp looks for tokens of Phi-3 by the name of the model
    mostly = max(used, key=lambda kind: used[kind], default="float32")
    writer.keys = {
        "general.architecture": Typed(architecture.name, STRING),
        "general.name": Typed(name, STRING),
        **typed({"general.file_type": _MOSTLY[mostly], "general.quantization_version": 2}),
        **typed(architecture.keys(architecture.name, config)),
        **tokenizer,
        _CONFIG: Typed(json.dumps(dict(extras.config)), STRING),
    }
    writer.finish()


def _add(writer: Writer, weight: Weight) -> str:
    """Store one tensor; returns the name of its type."""
    import torch

    if isinstance(weight, PackedWeight):
        if weight.format in HALF_FORMATS:
            kind = HALF_FORMATS[weight.format]
            writer.add(weight.name, weight.shape, FLOATS[kind][0], weight.codes)
            return kind
        row = block_of(weight.layout)
        assert row is not None, weight.layout  # checked before
        writer.add(weight.name, weight.shape, row.number, to_blocks(weight, row))
        return row.name
    values = weight.values.detach().to("cpu")
    if len(weight.shape) < 2 or str(values.dtype).removeprefix("torch.") not in FLOATS:
        values = values.float()  # llama.cpp adds and multiplies vectors in float32
    kind = str(values.dtype).removeprefix("torch.")
    raw = values.contiguous().view(torch.int32 if kind == "float32" else torch.int16)
    writer.add(weight.name, weight.shape, FLOATS[kind][0], raw.numpy())
    return kind


def read(folder: Path) -> Iterator[Weight]:
    """The weights of ``model.gguf``, under the names of transformers where the file says its configuration."""
    reader = Reader(_file(folder))
    config = _configuration(reader)
    architecture = architecture_of(config)
    for name in reader:
        if name == "rope_freqs.weight":
            continue
        yield from_file(_weight(reader, name), architecture, config)


def _weight(reader: Reader, name: str) -> Weight:
    import torch

    shape, row, data = reader.tensors[name][0], reader.block_type(name), reader.bytes_of(name)
    if row is not None:
        return from_blocks(name, data, shape, row)
    dtype: Any = getattr(torch, reader.dtype(name))
    return FloatWeight(name, torch.from_numpy(np.array(data)).view(dtype).reshape(shape))


def _configuration(reader: Reader) -> Config:
    if _CONFIG in reader.keys:
        found: Config = json.loads(reader.keys[_CONFIG])
        return found
    arch = reader.keys.get("general.architecture", "")
    kind = {"gemma3": "gemma3_text"}.get(arch, arch)
    heads = reader.keys.get(f"{arch}.attention.head_count", 0)
    return {
        "model_type": kind,
        "num_attention_heads": heads,
        "num_key_value_heads": reader.keys.get(f"{arch}.attention.head_count_kv", heads),
    }


def _file(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    raise ExportError(
        str(folder), f"it holds {len(found)} GGUF files, and one is read", "name the folder of a model that is one file"
    )


def check(plans: Sequence[WeightPlan], extras: Extras) -> None:
    """Refuse architectures, parameters and tokenizers that GGUF cannot store, before any work."""
    architecture = architecture_of(extras.config)
    config = with_defaults(extras.config)
    for plan in plans:
        name_in_file(plan.name, architecture)
        if plan.layout is not None and architecture.norm_offset and plan.name.endswith("norm.weight"):
            raise ExportError(plan.name, "a quantized norm is not written to GGUF", "leave norms in float")
    architecture.keys(architecture.name, config)
    tokenizer_keys(extras.tokenizer, config)
    _check_inputs(plans, extras)


def _check_inputs(plans: Sequence[WeightPlan], extras: Extras) -> None:
    """Quantized inputs of layers are those that llama.cpp itself makes, or the file would compute something else.

    Raises:
        ExportError: they are not, or a cache is quantized.
    """
    refuse_inputs(dataclasses.replace(extras, inputs={}), "GGUF")
    layouts = {plan.name: plan.layout for plan in plans}
    for layer, found in extras.inputs.items():
        layout, spec = layouts.get(f"{layer}.weight"), found.spec
        row = None if layout is None else block_of(layout)
        if row is None:
            raise ExportError(layer, "its input is quantized and its weight is in float", "leave its input in float")
        size, scales = row.inputs
        asked = isinstance(spec.granularity, PerToken) and spec.granularity.block == size
        if not (asked and spec.dynamic and spec.format == IntFormat(8) and spec.scale_format.name == scales):
            remedy = f"dynamic_spec('int8', PerToken({size}), scale_format=SCALE_FORMATS[{scales!r}]), or leave inputs in float"
            problem = f"its input is {spec.describe()}, and llama.cpp rounds inputs of {row.name} layers to int8"
            raise ExportError(layer, f"{problem} in blocks of {size} with {scales} scales at run time", remedy)


def _size(plan: WeightPlan) -> float:
    row = None if plan.layout is None else block_of(plan.layout)
    # the data are written to a spool and then to the file
    return 2 * plan.elements * (4 if row is None else row.bytes / row.size)


def fitted(spec: QuantSpec) -> QuantSpec:
    """``spec`` with the file's scale format, where it is an integer spec with default float32 scales.

    >>> fitted(QuantSpec("uint4", symmetry="asymmetric")).scale_format.name
    'float12'
    """
    if not isinstance(spec.format, IntFormat) or spec.scale_format.name != "float32":
        return spec
    if spec.symmetry == "float_zero_point":
        name = {4: "q4_k", 5: "q5_k"}.get(spec.format.bits, "float32")
        return dataclasses.replace(spec, scale_format=SCALE_FORMATS[name])
    name = "float12" if spec.symmetry == "asymmetric" else "float16"
    if isinstance(spec.granularity, PerBlock) and spec.granularity.size == 16 and name == "float16":
        name = {3: "q3_k", 6: "q6_k"}.get(spec.format.bits, name)
    return dataclasses.replace(spec, scale_format=SCALE_FORMATS[name])


FORMAT: FileFormat = FileFormat(
    name="gguf",
    engine="llama.cpp and programs built on it",
    holds=f"{', '.join(BLOCKS)} (groups of 32, of 16 in Q3_K and Q6_K; float16 scales), float16, bfloat16, float32",
    refuses=refuses,
    size=_size,
    write=write,
    read=read,
    recognises=lambda folder: bool(list(folder.glob("*.gguf"))),
    check=check,
    fitted=fitted,
    free_zero_points=True,
)
