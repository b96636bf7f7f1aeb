"""The checkpoint layouts of GPTQ and AWQ, which transformers (with gptqmodel) and vLLM load.

Both hold, for a layer of ``n`` inputs and ``m`` outputs, ``qweight``, ``qzeros`` and ``scales`` of the transposed matrix; codes
are unsigned, and a weight is ``(code - zero) * scale``.

=====  ======  =====================================  ============================================  =====================
kind   bits    ``qweight`` (int32)                    ``qzeros`` (int32)                            ``g_idx`` (int32)
=====  ======  =====================================  ============================================  =====================
gptq   2 4 8   ``(n * bits / 32, m)``, neighbours     ``(groups, m * bits / 32)``; zero points,     ``(n,)``, the group
               along the inputs in one word           less one in the first version of the layout   of each input
awq    4       ``(n, m / 8)``, eight outputs in one   ``(groups, m / 8)`` in the same order         none
               word in the order 0 2 4 6 1 3 5 7
=====  ======  =====================================  ============================================  =====================

The second version of gptq stores zero points as they are, and is written where there are some; without, the first version,
which every program reads.

Source: the readers of AutoGPTQ / GPTQModel (``qlinear_torch``) and AutoAWQ (``packing_utils``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.affine import with_scale
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat, parse_scale_format
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel
from bitwright.errors import ExportError
from bitwright.llm.files.common import (
    Extras,
    FileFormat,
    Shards,
    StoredTensors,
    as_stored,
    asked_dtype,
    copy_tokenizer,
    dtype_name,
    is_table,
    read_json,
    refuse_inputs,
)
from bitwright.llm.packed import FloatWeight, Layout, PackedWeight, Weight, WeightPlan, signed

Words = NDArray[np.int32]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BITS = {"gptq": (2, 4, 8), "awq": (4,)}


def pack_columns(codes: NDArray[Any], bits: int, order: Sequence[int] | None = None) -> Words:
    """Unsigned codes packed along the last axis into int32, the first in the lowest bits; ``order`` of those of one word.

    >>> [hex(n) for n in pack_columns(np.uint8([[1, 2, 3, 4, 5, 6, 7, 8]]), 4)[0]]
    ['-0x789abcdf']
    """
    count = 32 // bits
    words = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, count)
    if order is not None:
        words = words[..., list(order)]
    packed = (words << (np.arange(count, dtype=np.uint32) * bits)).sum(-1, dtype=np.uint32)
    return packed.view(np.int32)


def unpack_columns(words: Words, bits: int, order: Sequence[int] | None = None) -> NDArray[np.uint8]:
    """The codes that :func:`pack_columns` packed."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    codes = ((words.view(np.uint32)[..., None] >> shifts) & ((1 << bits) - 1)).astype(np.uint8)
    if order is not None:
        codes = codes[..., np.argsort(order)]
    return codes.reshape(*words.shape[:-1], -1)


def refuses(plan: WeightPlan, *, kind: str) -> str:
    """Why the layout has no place for a weight; empty where it has."""
    layout = plan.layout
    if layout is None:
        return ""
    if len(plan.shape) != 2 or plan.axis != -1:
        return "only matrices of linear layers are quantized"
    if not isinstance(layout.format, IntFormat) or layout.bits not in _BITS[kind]:
        return f"its weights are integers of {' or '.join(map(str, _BITS[kind]))} bits"
    if layout.group == "tensor":
        return "scales are per group or per channel"
    if layout.scale_format not in ("float32", "float16", "bfloat16"):
        return f"scales of format {layout.scale_format} are not stored"
    rows, columns = plan.shape
    count = 32 // layout.bits
    if not is_table(plan.name) and (rows % count or columns % count):
        return f"{count} codes make a word, and {rows} outputs or {columns} inputs do not fill words"
    return ""


def write(folder: Path, weights: Iterable[Weight], extras: Extras, *, kind: str) -> None:
    """Fill ``folder`` with ``config.json``, shards, their index and the tokenizer's files.

    Raises:
        ExportError: layers differ in bits or in the size of their groups, which the configuration says once.
    """
    import torch

    shards = Shards(folder)
    config = {key: value for key, value in extras.config.items() if key not in ("_name_or_path", "torch_dtype")}
    layout: Layout | None = None
    floats: list[tuple[str, int]] = []
    for name, found in as_stored(weights, config, floats):
        if not isinstance(found, PackedWeight):
            shards.add(name, found)
            continue
        layer = name.rpartition(".")[0]
        if layout is not None and found.layout != layout:
            raise _unlike(layer, "the layers before it", kind)
        layout = found.layout
        kind_of_scales = getattr(torch, layout.scale_format)
        for part, array in _parts(found, kind, first=layout.symmetric).items():
            tensor = torch.from_numpy(array)
            shards.add(f"{layer}.{part}", tensor.to(kind_of_scales) if part == "scales" else tensor)
    shards.finish()
    own = _configuration(kind, layout or Layout(IntFormat(4), 128, True), floats)
    config["dtype"] = asked_dtype(extras.config)
    config["quantization_config"] = own
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "quantize_config.json").write_text(json.dumps(own, indent=2), encoding="utf-8")
    copy_tokenizer(extras.tokenizer, folder)


def _configuration(kind: str, layout: Layout, in_float: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """``quantization_config``, which says once how all layers are stored but those of the matrices in float."""
    floats = [name.rpartition(".")[0] for name, axes in in_float if axes == 2]
    group = layout.group if isinstance(layout.group, int) else -1
    own: dict[str, Any] = {"quant_method": kind, "bits": layout.bits, "group_size": group}
    if kind == "awq":
        return own | {"zero_point": True, "version": "gemm", "modules_to_not_convert": sorted(floats) or None}
    own |= {
        "desc_act": False,
        "sym": layout.symmetric,
        "checkpoint_format": "gptq" if layout.symmetric else "gptq_v2",
        "lm_head": "lm_head" not in floats,
    }
    return own | ({"dynamic": {f"-:^{name}$": {} for name in floats if name != "lm_head"}} if floats else {})


def _parts(weight: PackedWeight, kind: str, *, first: bool) -> dict[str, NDArray[Any]]:
    """The tensors of one layer."""
    bits, (rows, columns) = weight.layout.bits, weight.shape
    middle = 1 << (bits - 1)
    codes, zero = signed(weight)
    unsigned = codes.astype(np.int16) + middle
    zeros = (zero.reshape(rows, -1).astype(np.int16) + middle).T
    scales = np.ascontiguousarray(weight.scale.reshape(rows, -1).T)
    if kind == "awq":
        return {
            "qweight": pack_columns(unsigned.T, bits, _AWQ_ORDER),
            "qzeros": pack_columns(zeros, bits, _AWQ_ORDER),
            "scales": scales,
        }
    return {
        "qweight": np.ascontiguousarray(pack_columns(unsigned, bits).T),
        "qzeros": pack_columns(zeros - 1 if first else zeros, bits),
        "scales": scales,
        "g_idx": (np.arange(columns) * scales.shape[0] // columns).astype(np.int32),
    }


def read(folder: Path, *, kind: str) -> Iterator[Weight]:
    """The weights of a folder in this layout.

    Raises:
        ExportError: groups are not of neighbours (``desc_act``).
    """
    own = read_json(folder / "config.json")["quantization_config"]
    bits = int(own["bits"])
    stored = StoredTensors(folder)
    for name in stored:
        layer, _, part = name.rpartition(".")
        if f"{layer}.qweight" not in stored or part == "bias":
            yield FloatWeight(name, stored[name])
        elif part == "qweight":
            yield _read_layer(layer, stored, bits, kind, first=own.get("checkpoint_format", "gptq") == "gptq")


def _read_layer(layer: str, stored: StoredTensors, bits: int, kind: str, *, first: bool) -> PackedWeight:
    words, zeros = (stored[f"{layer}.{part}"].numpy() for part in ("qweight", "qzeros"))
    raw = stored[f"{layer}.scales"]
    scale = np.ascontiguousarray(raw.float().numpy().T)
    order = _AWQ_ORDER if kind == "awq" else None
    codes = (
        unpack_columns(words, bits, order).T if kind == "awq" else unpack_columns(np.ascontiguousarray(words.T), bits)
    )
    found = unpack_columns(zeros, bits, order).T
    if kind == "gptq":
        index = stored[f"{layer}.g_idx"].numpy() if f"{layer}.g_idx" in stored else None
        if index is not None and (np.diff(index) < 0).any():
            raise ExportError(layer, "its groups are not of neighbours (desc_act)", "write it without desc_act")
        found = (found + np.uint8(1)) & np.uint8((1 << bits) - 1) if first else found
    middle = 1 << (bits - 1)
    rows, columns = codes.shape
    granularity: Granularity = PerChannel(0) if scale.shape[1] == 1 else PerBlock(columns // scale.shape[1], 1, 0)
    shape = (rows,) if scale.shape[1] == 1 else scale.shape
    zero = (found.astype(np.int32) - middle).reshape(shape)
    encoding = Encoding(IntFormat(bits), scale.reshape(shape), zero, granularity)
    encoding = with_scale(encoding, encoding.scale, parse_scale_format(dtype_name(raw.dtype)))
    return PackedWeight(f"{layer}.weight", (codes.astype(np.int16) - middle).astype(np.int8), encoding)


def _recognises(folder: Path, *, kind: str) -> bool:
    config = folder / "config.json"
    found = read_json(config).get("quantization_config") if config.is_file() else None
    return isinstance(found, dict) and found.get("quant_method") == kind


def _check(plans: Sequence[WeightPlan], extras: Extras, *, kind: str) -> None:
    refuse_inputs(extras, kind)
    layers = [plan for plan in plans if plan.layout is not None]
    for plan in layers:
        if plan.layout != layers[0].layout:
            raise _unlike(plan.name, layers[0].name, kind)


def _unlike(layer: str, other: str, kind: str) -> ExportError:
    return ExportError(
        layer,
        f"its width, group or symmetry is another than that of {other}, and {kind} says these once for all layers",
        "write compressed-tensors, or quantize all layers alike and leave the others in float",
    )


def _size(plan: WeightPlan) -> float:
    layout = plan.layout
    if layout is None or is_table(plan.name):
        return plan.elements * 4.0
    return plan.elements * (layout.bits / 8 + (4.5 / layout.group if isinstance(layout.group, int) else 0))


def _row(kind: str, engine: str, holds: str) -> FileFormat:
    return FileFormat(
        name=kind,
        engine=engine,
        holds=holds,
        refuses=partial(refuses, kind=kind),
        size=_size,
        write=partial(write, kind=kind),
        read=partial(read, kind=kind),
        recognises=partial(_recognises, kind=kind),
        check=partial(_check, kind=kind),
    )


FORMATS = (
    _row(
        "gptq", "vLLM, transformers with gptqmodel", "integers of 2, 4 or 8 bits per group or channel, one kind a model"
    ),
    _row("awq", "vLLM, transformers with gptqmodel", "integers of 4 bits per group or channel, one kind a model"),
)
