"""The checkpoint layouts of GPTQ and AWQ, which transformers (with gptqmodel) and vLLM load.

Both hold, for a layer of ``n`` inputs and ``m`` outputs, ``qweight``, ``qzeros`` and ``scales`` of the transposed matrix; codes
are unsigned, and a weight is ``(code - zero) * scale``.

=====  =======  =====================================  ============================================  =====================
kind   bits     ``qweight`` (int32)                    ``qzeros`` (int32)                            ``g_idx`` (int32)
=====  =======  =====================================  ============================================  =====================
gptq   2 3 4 8  ``(n * bits / 32, m)``, neighbours     ``(groups, m * bits / 32)``; zero points,     ``(n,)``, the group
                along the inputs in one word           less one in the first version of the layout   of each input
awq    4        ``(n, m / 8)``, eight outputs in one   ``(groups, m / 8)`` in the same order         none
                word in the order 0 2 4 6 1 3 5 7
=====  =======  =====================================  ============================================  =====================

Codes of 3 bits follow each other over the ends of words, 32 in three. The second version of gptq stores zero points as they
are, and is written where there are some; without, the first version, which every program reads.

What is read: the words say the bits of a layer, so that layers may differ (``dynamic`` of GPTQModel); ``g_idx`` says the groups,
whose inputs need not be neighbours (``desc_act``); configurations also lie in ``quantize_config.json`` (AutoGPTQ) or
``quant_config.json`` (AutoAWQ).

Source: the readers of AutoGPTQ / GPTQModel (``qlinear_torch``) and AutoAWQ (``packing_utils``).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    import torch

Words = NDArray[np.int32]
logger = logging.getLogger("bitwright")

_DTYPES = {"qweight": "int32", "qzeros": "int32", "g_idx": "int32", "scales": "floats"}
#: configurations of folders without ``quantization_config``, and their names of its fields
_OLDER = {"gptq": "quantize_config.json", "awq": "quant_config.json"}
_RENAMED = {"w_bit": "bits", "q_group_size": "group_size"}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}


def pack_columns(codes: NDArray[Any], bits: int, order: Sequence[int] | None = None) -> Words:
    """Unsigned codes packed along the last axis into int32, the first in the lowest bits; ``order`` of those of one word.

    >>> [hex(n) for n in pack_columns(np.uint8([[1, 2, 3, 4, 5, 6, 7, 8]]), 4)[0]]
    ['-0x789abcdf']
    """
    if order is not None:
        codes = codes.reshape(*codes.shape[:-1], -1, len(order))[..., list(order)].reshape(codes.shape)
    single = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, count=bits, bitorder="little")
    packed = np.packbits(single.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return packed.view("<i4").astype(np.int32, copy=False)


def unpack_columns(words: Words, bits: int, order: Sequence[int] | None = None) -> NDArray[np.uint8]:
    """The codes that :func:`pack_columns` packed."""
    packed = np.ascontiguousarray(words, "<i4").view(np.uint8)
    single = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*words.shape[:-1], -1, bits)
    codes = np.packbits(single, axis=-1, bitorder="little")[..., 0]
    if order is not None:
        codes = codes.reshape(*codes.shape[:-1], -1, len(order))[..., np.argsort(order)].reshape(codes.shape)
    return codes


def refuses(plan: WeightPlan, *, kind: str) -> str:
    """The reason why the layout cannot store a weight; empty where it can."""
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
    count = 32 // math.gcd(32, layout.bits)
    if not is_table(plan.name) and (rows % count or columns % count):
        words = f"{count} codes make {layout.bits} words" if count == 32 else f"{count} codes make a word"
        return f"{words}, and {rows} outputs or {columns} inputs do not fill words"
    return ""


def write(folder: Path, weights: Iterable[Weight], extras: Extras, *, kind: str) -> None:
    """Write ``config.json``, shards, their index and the tokenizer's files into ``folder``.

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
    """``quantization_config``: one scheme for all layers except float matrices."""
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
    scales = np.array(weight.scale.reshape(rows, -1).T, order="C")
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
        ExportError: another arrangement of the words than those above, or tensors of a layer that do not go together.
    """
    own = _own(folder, kind)
    _check_arrangement(folder, own, kind)
    stored = StoredTensors(folder)
    scattered = []
    for name in stored:
        layer, _, part = name.rpartition(".")
        if f"{layer}.qweight" not in stored or part == "bias":
            yield FloatWeight(name, stored[name])
        elif part == "qweight":
            found = _read_layer(_Layer(layer, stored, kind), own)
            if found.layout.group == 1:
                scattered.append(layer)
            yield found
    if scattered:
        logger.warning(
            "%s: groups of %d layers, first of %s, are not of neighbours (desc_act), so that every weight has a scale of its own",
            folder, len(scattered), scattered[0],
        )  # fmt: skip


def _own(folder: Path, kind: str) -> dict[str, Any]:
    """The folder's quantization settings, under the names of ``config.json``."""
    found = read_json(folder / "config.json").get("quantization_config")
    if isinstance(found, dict):
        return found
    older = read_json(folder / _OLDER[kind])
    return {_RENAMED.get(key, key): value for key, value in older.items()}


def _check_arrangement(folder: Path, own: Mapping[str, Any], kind: str) -> None:
    """Refuse packings for particular kernels.

    Raises:
        ExportError: the configuration names one.
    """
    key, known = ("checkpoint_format", ("gptq", "gptq_v2")) if kind == "gptq" else ("version", ("gemm",))
    found = str(own.get(key) or known[0]).lower()
    if found not in known:
        raise ExportError(
            str(folder),
            f"{key} is {found!r}, an arrangement for one kernel that is not read here",
            f"write the model again as {' or '.join(known)} with the tool that made it",
        )


@dataclass(frozen=True)
class _Layer:
    """The tensors of one quantized layer.

    Attributes:
        name: of the layer.
        stored: of the folder.
        kind: of the layout.
    """

    name: str
    stored: StoredTensors
    kind: str

    def part(self, name: str, axes: int) -> torch.Tensor:
        """One of its tensors.

        Raises:
            ExportError: it has another number of axes, or is of floats where it holds words.
        """
        found = self.stored[f"{self.name}.{name}"]
        if found.dim() != axes or found.is_floating_point() != (name == "scales"):
            what = f"{name} has shape {tuple(found.shape)} and dtype {dtype_name(found.dtype)}"
            raise self.unfit(f"{what}, where {self.kind} files have {axes} axes of {_DTYPES[name]}")
        return found

    def unfit(self, problem: str) -> ExportError:
        """The error for inconsistent tensors."""
        return ExportError(self.name, problem, "copy the whole folder again, or write the model again")


def _read_layer(layer: _Layer, own: Mapping[str, Any]) -> PackedWeight:
    kind = layer.kind
    words, zeros, raw = layer.part("qweight", 2).numpy(), layer.part("qzeros", 2).numpy(), layer.part("scales", 2)
    groups, outputs = raw.shape
    bits = _bits(layer, own, zeros.shape, outputs)
    order = _AWQ_ORDER if kind == "awq" else None
    codes = unpack_columns(words, bits, order).T if kind == "awq" else unpack_columns(words.T, bits)
    if zeros.shape[0] != groups or codes.shape[0] != outputs:
        shapes = f"qweight {words.shape}, qzeros {zeros.shape}, scales {tuple(raw.shape)}"
        raise layer.unfit(f"its tensors are of different layers or truncated: {shapes}")
    zero = unpack_columns(zeros, bits, order)
    if kind == "gptq" and own.get("checkpoint_format", "gptq") == "gptq":
        zero = (zero + np.uint8(1)) & np.uint8((1 << bits) - 1)
    size, index = _groups(layer, own, codes.shape[1], groups)
    whole = size >= codes.shape[1] != int(own.get("group_size", -1))
    scale, zero = raw.float().numpy()[index].T, zero[index].T
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise layer.unfit(f"a scale is {scale[~(np.isfinite(scale) & (scale > 0))][0]}, which no step of a grid is")
    middle = 1 << (bits - 1)
    granularity: Granularity = PerChannel(0) if whole else PerBlock(size, 1, 0)
    shape = (outputs,) if whole else scale.shape
    encoding = Encoding(
        IntFormat(bits), scale.reshape(shape), (zero.astype(np.int32) - middle).reshape(shape), granularity
    )
    encoding = with_scale(encoding, encoding.scale, parse_scale_format(dtype_name(raw.dtype)))
    return PackedWeight(f"{layer.name}.weight", (codes.astype(np.int16) - middle).astype(np.int8), encoding)


def _bits(layer: _Layer, own: Mapping[str, Any], zeros: tuple[int, ...], outputs: int) -> int:
    """Bits of a code, from the words of the zero points; those of the configuration where it says them for all layers."""
    bits, rest = divmod(32 * zeros[1], max(1, outputs))
    said = int(own["bits"])
    if rest or bits not in _BITS[layer.kind]:
        held = f"qzeros of shape {zeros} for {outputs} outputs"
        raise layer.unfit(f"{held} hold no codes of {' or '.join(map(str, _BITS[layer.kind]))} bits")
    if bits != said and not own.get("dynamic"):
        raise layer.unfit(f"its words hold codes of {bits} bits, and the configuration says {said} for all layers")
    return bits


def _groups(layer: _Layer, own: Mapping[str, Any], columns: int, groups: int) -> tuple[int, NDArray[np.int64]]:
    """Neighbouring inputs that share a scale, and the row of ``scales`` of each such run.

    Raises:
        ExportError: ``g_idx`` is not of these inputs and groups, or no size makes this number of groups.
    """
    if layer.kind == "gptq" and f"{layer.name}.g_idx" in layer.stored:
        index = layer.part("g_idx", 1).numpy().astype(np.int64)
        if index.shape != (columns,) or index.min() < 0 or index.max() >= groups:
            problem = f"g_idx has {index.size} entries from {index.min()} to {index.max()}"
            raise layer.unfit(f"{problem}, for {columns} inputs in {groups} groups")
        ends = np.flatnonzero(np.diff(index)) + 1
        size = int(np.gcd.reduce(ends)) if ends.size else columns
        return size, index[::size]
    asked = int(own.get("group_size", -1))
    size = columns if asked == -1 else asked
    if size < 1 or -(-columns // size) != groups:
        raise layer.unfit(
            f"groups of {asked} do not divide its {columns} inputs into {groups} groups, which scales has"
        )
    return size, np.arange(groups)


def _recognises(folder: Path, *, kind: str) -> bool:
    if not (folder / "config.json").is_file():
        return False
    found = read_json(folder / "config.json").get("quantization_config")
    if isinstance(found, dict):
        return found.get("quant_method") == kind
    return (folder / _OLDER[kind]).is_file()


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


FORMATS: tuple[FileFormat, ...] = (
    _row(
        "gptq",
        "vLLM, transformers with gptqmodel",
        "integers of 2, 3, 4 or 8 bits per group or channel, one kind a model",
    ),
    _row("awq", "vLLM, transformers with gptqmodel", "integers of 4 bits per group or channel, one kind a model"),
)
