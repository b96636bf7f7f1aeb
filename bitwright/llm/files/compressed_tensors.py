"""Folders in the format of the compressed-tensors library, which transformers, vLLM and SGLang load.

================  =====================================================================================================
stored as         weights (``format`` in the configuration)
================  =====================================================================================================
pack-quantized    integers of 2 to 8 bits, packed without gaps into int32; scales per group, channel or tensor
int-quantized     int8 weights of layers whose inputs are quantized too
float-quantized   float8 weights of layers whose inputs are quantized too
naive-quantized   float8 weights alone
nvfp4-...         4-bit floats in groups of 16, scales float8 times one number per tensor
mxfp4-..., mxfp8  4- and 8-bit floats in groups of 32, scales powers of two
================  =====================================================================================================

Source: the library's own readers, ``compressed_tensors`` 0.20, and the configuration that vLLM documents.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.affine import scale_multiples, with_scale
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import (
    FLOAT4_E2M1,
    FLOAT8_E4M3,
    SCALE_FORMATS,
    FloatFormat,
    Format,
    IntFormat,
    parse_scale_format,
)
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor
from bitwright.core.placement.kv_cache import with_heads
from bitwright.errors import ExportError
from bitwright.llm.files.common import (
    Extras,
    FileFormat,
    Shards,
    StoredTensors,
    as_stored,
    bits_of,
    copy_tokenizer,
    dtype_name,
    is_table,
    read_json,
    stored_dtype,
)
from bitwright.llm.packed import FloatWeight, LayerInput, PackedWeight, Weight, WeightPlan, halves, signed, unhalved

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("bitwright")

_WORD = 32  # bits of the integers that codes are packed into
_E8M0_BIAS = 127
#: what the library unpacks to bfloat16 whatever the model computes in
_IN_BFLOAT16 = {"nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"}
_HALF = {"float16": "float16", "bfloat16": "bfloat16"}
#: how weights with scales of 8 bits are stored, by the size of their groups
_NARROW_SCALES: dict[tuple[Format, int | str, str], str] = {
    (FLOAT4_E2M1, 16, "e4m3"): "nvfp4-pack-quantized",
    (FLOAT4_E2M1, 32, "e8m0"): "mxfp4-pack-quantized",
    (FLOAT8_E4M3, 32, "e8m0"): "mxfp8-quantized",
}


def _stored_as(fmt: Format, group: int | str, scale_format: str, *, inputs: bool) -> str:
    """The library's name of the storage format for this layout; empty if it has none."""
    if scale_format not in ("float32", *_HALF):
        return _NARROW_SCALES.get((fmt, group, scale_format), "")
    if fmt == FLOAT8_E4M3:
        return "float-quantized" if inputs else "naive-quantized"
    if not isinstance(fmt, IntFormat) or not 2 <= fmt.bits <= 8:
        return ""
    return "int-quantized" if inputs and fmt.bits == 8 and not isinstance(group, int) else "pack-quantized"


def refuses(plan: WeightPlan) -> str:
    """The reason why the format cannot store a weight; empty where it can."""
    layout = plan.layout
    if layout is None:
        return ""
    if len(plan.shape) != 2:
        return f"only matrices of linear layers and tables are quantized, and it has {len(plan.shape)} axes"
    if plan.axis != -1:
        return "its layer multiplies with the transposed matrix (Conv1D of transformers), which is not a linear layer"
    if not _stored_as(layout.format, layout.group, layout.scale_format, inputs=False):
        return "the library has no such format"
    if layout.group == "tensor" and not layout.symmetric:
        return "zero points are stored per group or per channel"
    return ""


def pack_int32(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Signed codes of ``bits`` bits, packed along the last axis without gaps into int32, the first in the lowest bits.

    Args:
        codes: shape ``(rows, n)``.

    Returns:
        Shape ``(rows, ceil(n * bits / 32))``; what is left of the last word is zero.

    >>> [hex(n) for n in pack_int32(np.int8([[-8, -7, 7, 0]]), 4)[0]]
    ['0x8f10']
    """
    rows, count = codes.shape
    unsigned: NDArray[np.uint8] = (codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    stream = unsigned
    if bits == 4:
        even = np.pad(unsigned, ((0, 0), (0, count % 2)))
        stream = even[:, 0::2] + even[:, 1::2] * np.uint8(16)
    elif bits != 8:
        digits = np.unpackbits(unsigned[..., None], axis=-1, bitorder="little")[..., :bits]
        stream = np.packbits(digits.reshape(rows, count * bits), axis=-1, bitorder="little")
    words = -(-count * bits // _WORD)
    padded = np.zeros((rows, words * 4), np.uint8)
    padded[:, : stream.shape[1]] = stream
    return padded.view("<i4").astype(np.int32)


def unpack_int32(words: NDArray[np.int32], bits: int, count: int) -> NDArray[np.int8]:
    """The codes that :func:`pack_int32` packed, ``count`` of each row."""
    stream = np.ascontiguousarray(words.astype("<i4")).view(np.uint8).reshape(words.shape[0], -1)
    digits = np.unpackbits(stream, axis=-1, bitorder="little")[:, : count * bits]
    places = (1 << np.arange(bits)).astype(np.int16)
    unsigned = (digits.reshape(len(words), count, bits) * places).sum(-1, dtype=np.int16)
    return (unsigned - (1 << (bits - 1))).astype(np.int8)


@dataclass
class _Groups:
    """Layers by scheme, for the configuration."""

    layers: dict[str, list[str]] = field(default_factory=dict)
    floats: list[str] = field(default_factory=list)

    def configuration(self, cache: Any) -> dict[str, Any]:
        """``quantization_config``: the scheme of most layers is for all linear ones, the others name their layers."""
        by_size = sorted(self.layers, key=lambda scheme: -len(self.layers[scheme]))
        groups = {}
        for i, text in enumerate(by_size):
            groups[f"group_{i}"] = {"targets": ["Linear"] if i == 0 else self.layers[text], **json.loads(text)}
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision" if formats else "dense",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted(self.floats),
            "kv_cache_scheme": cache,
            "global_compression_ratio": None,
        }


def write(folder: Path, weights: Iterable[Weight], extras: Extras) -> None:
    """Write ``config.json``, shards, their index and the tokenizer's files into ``folder``."""
    import torch

    shards, groups, dtypes = Shards(folder), _Groups(), set()
    config = {key: value for key, value in extras.config.items() if key != "_name_or_path"}
    in_float: list[tuple[str, int]] = []
    for name, found in as_stored(weights, config, in_float):
        if not isinstance(found, PackedWeight):
            dtypes.add(found.dtype)
            shards.add(name, found)
            continue
        layer = name.removesuffix(".weight")
        tensors, scheme = _tensors(found, extras.inputs.get(layer), layer)
        dtypes.add(torch.bfloat16 if scheme["format"] in _IN_BFLOAT16 else tensors["weight_scale"].dtype)
        for key, tensor in tensors.items():
            shards.add(f"{layer}.{key}", tensor)
        groups.layers.setdefault(json.dumps(scheme), []).append(layer)
    groups.floats = [name.removesuffix(".weight") for name, _ in in_float]
    cache = None
    if extras.cache:
        cache = _add_cache(shards, extras, torch.float32 if len(dtypes) != 1 else next(iter(dtypes)))
    shards.finish()
    only = {json.loads(scheme)["format"] for scheme in groups.layers} & _IN_BFLOAT16
    why = f"compressed-tensors unpacks {', '.join(sorted(only))} weights to it" if only else ""
    config["dtype"] = stored_dtype(config, dtypes, why)
    config.pop("torch_dtype", None)
    config["quantization_config"] = groups.configuration(cache)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    copy_tokenizer(extras.tokenizer, folder)


def _input_args(found: LayerInput, name: str) -> dict[str, Any]:
    """Configuration entry for the input of a layer.

    Raises:
        ExportError: the library has no such way to quantize an input.
    """
    spec, granularity = found.spec, found.spec.granularity
    fmt, dynamic = spec.format, found.encoding is None
    token = type(granularity).__name__ == "PerToken"
    group = getattr(granularity, "size", None) if token else None
    known = (isinstance(fmt, IntFormat) and fmt.bits in (4, 8)) or fmt in (FLOAT8_E4M3, FLOAT4_E2M1)
    if not known or not (token or isinstance(granularity, PerTensor)):
        raise ExportError(
            f"{name}.input",
            f"compressed-tensors has no inputs that are {spec.describe()}",
            "use int8 or float8_e4m3, per tensor or, chosen at run time, per token",
        )
    symmetric = isinstance(fmt, FloatFormat) or (
        found.encoding.symmetric if found.encoding is not None else not spec.has_zero_point
    )
    return {
        "num_bits": fmt.bits, "type": "int" if isinstance(fmt, IntFormat) else "float", "symmetric": symmetric,
        "group_size": group, "strategy": "group" if group else "token" if token else "tensor", "dynamic": dynamic,
        "observer": None,
    }  # fmt: skip


def _add_input(tensors: dict[str, torch.Tensor], encoding: Encoding, kind: torch.dtype) -> None:
    """The scale and, where there is one, the zero point of an input, on the signed grid that the library computes on."""
    import torch

    tensors["input_scale"] = torch.from_numpy(np.array(encoding.scale).reshape(1)).to(kind)
    fmt = encoding.format
    if not encoding.symmetric:
        middle = 0 if not isinstance(fmt, IntFormat) or fmt.signed else 1 << (fmt.bits - 1)
        tensors["input_zero_point"] = torch.from_numpy((encoding.zero_point.reshape(1) - middle).astype(np.int8))


def _add_cache(shards: Shards, extras: Extras, kind: torch.dtype) -> dict[str, Any]:
    """Store the scales of keys and values, one or one for every head; returns their configuration entry."""
    import torch

    args: dict[str, Any] = {}
    heads = int(extras.config.get("num_key_value_heads") or extras.config.get("num_attention_heads") or 1)
    for module, pair in extras.cache.items():
        for letter, encoding in zip("kv", pair, strict=True):
            by_head = encoding.scale.ndim > 0
            scale = with_heads(encoding, heads).scale.reshape((-1, 1, 1) if by_head else 1)
            shards.add(f"{module}.{letter}_scale", torch.from_numpy(np.array(scale)).to(kind))
            args = {
                "num_bits": encoding.format.bits, "type": "int" if isinstance(encoding.format, IntFormat) else "float",
                "symmetric": True, "strategy": "attn_head" if by_head else "tensor", "dynamic": False, "group_size": None,
                "observer": None,
            }  # fmt: skip
    return args


def _tensors(
    weight: PackedWeight, found: LayerInput | None, name: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of one layer by the last part of their names, and its scheme in the configuration."""
    import torch

    layout, rows = weight.layout, weight.shape[0]
    fmt, encoding = weight.format, weight.encoding
    stored = _stored_as(fmt, layout.group, layout.scale_format, inputs=found is not None)
    scale = encoding.scale.reshape(rows, -1) if encoding.scale.size > 1 or layout.group != "tensor" else encoding.scale
    kind = getattr(torch, _HALF.get(layout.scale_format, "float32"))
    tensors = {
        "weight_scale": torch.from_numpy(np.array(scale.reshape(scale.shape or (1,)))).to(kind),
        **_stored_codes(weight, stored),
    }
    strategy = "group" if isinstance(layout.group, int) else layout.group
    args: dict[str, Any] = {
        "num_bits": fmt.bits, "type": "int" if isinstance(fmt, IntFormat) else "float", "symmetric": layout.symmetric,
        "group_size": layout.group if isinstance(layout.group, int) else None, "strategy": strategy, "dynamic": False,
        "observer": None,
    }  # fmt: skip
    if layout.scale_format == "e8m0":
        exponent = np.frexp(scale)[1] - 1 + _E8M0_BIAS
        tensors["weight_scale"] = torch.from_numpy(exponent.astype(np.uint8))
        args["scale_dtype"] = "torch.uint8"
    if layout.scale_format == "e4m3":
        multiples, common = scale_multiples(encoding), encoding.common
        assert multiples is not None and common is not None
        tensors["weight_scale"] = torch.from_numpy(multiples.reshape(rows, -1)).to(torch.float8_e4m3fn)
        tensors["weight_global_scale"] = torch.from_numpy(np.float32(1) / common.reshape(1))
        args |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    inputs = None
    if found is not None:
        inputs = _input_args(found, name)
        if found.encoding is not None:
            _add_input(tensors, found.encoding, kind)
    return tensors, {"weights": args, "input_activations": inputs, "output_activations": None, "format": stored}


def _stored_codes(weight: PackedWeight, stored: str) -> dict[str, torch.Tensor]:
    """The tensors of one layer that hold its codes and, where it has some, its zero points."""
    import torch

    (rows, columns), bits = weight.shape, weight.format.bits
    codes, zero_point = signed(weight)
    zeros = None if weight.layout.symmetric else zero_point.reshape(rows, -1)
    if stored == "pack-quantized":
        packed = {
            "weight_packed": torch.from_numpy(pack_int32(codes, bits)),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if zeros is not None:
            packed["weight_zero_point"] = torch.from_numpy(pack_int32(zeros.T, bits).T.copy())
        return packed
    if stored == "int-quantized":
        whole = {"weight": torch.from_numpy(np.ascontiguousarray(codes))}
        return whole if zeros is None else {**whole, "weight_zero_point": torch.from_numpy(zeros.astype(np.int8))}
    if weight.format == FLOAT8_E4M3:
        return {"weight": torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn)}
    return {"weight_packed": torch.from_numpy(halves(codes))}


def read(folder: Path) -> Iterator[Weight]:
    """The weights of a folder in this format, quantized ones as codes and scales."""
    config = read_json(folder / "config.json").get("quantization_config", {})
    schemes: list[Mapping[str, Any]] = list(config.get("config_groups", {}).values())
    stored = StoredTensors(folder)
    parts = {name.rpartition(".")[0] for name in stored if name.endswith(".weight_scale")}
    seen: set[str] = set()
    for name in stored:
        layer, _, key = name.rpartition(".")
        if key in ("k_scale", "v_scale", "input_scale", "input_zero_point"):
            continue
        if layer not in parts or not key.startswith("weight"):
            yield FloatWeight(name, stored[name])
        elif layer not in seen:
            seen.add(layer)
            yield _read_layer(layer, stored, _scheme_of(layer, schemes))


def _scheme_of(layer: str, schemes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The scheme that names the layer; else that of all linear layers."""
    for scheme in schemes:
        if layer in scheme["targets"]:
            return scheme
    for scheme in schemes:
        if "Linear" in scheme["targets"]:
            return scheme
    raise ExportError(layer, "no group of the configuration names it, though it has scales", "write the model again")


def _read_scale(layer: str, stored: StoredTensors) -> tuple[NDArray[np.float32], str, NDArray[np.float32] | None]:
    """The scales of a layer, the name of their format and, where they are multiples of a common number, that."""
    import torch

    raw = stored[f"{layer}.weight_scale"]
    if raw.dtype == torch.uint8:
        return np.ldexp(np.float32(1), raw.numpy().astype(np.int32) - _E8M0_BIAS), "e8m0", None
    if raw.dtype == torch.float8_e4m3fn:
        common = np.asarray(1 / stored[f"{layer}.weight_global_scale"].numpy(), np.float32).reshape(1, 1)
        return raw.float().numpy() * common, "e4m3", common
    return raw.float().numpy(), dtype_name(raw.dtype), None


def _read_codes(layer: str, stored: StoredTensors, fmt: Format) -> NDArray[Any]:
    import torch

    if f"{layer}.weight_packed" not in stored:
        held = stored[f"{layer}.weight"]
        return (held.view(torch.uint8) if held.dtype == torch.float8_e4m3fn else held).numpy()
    packed = stored[f"{layer}.weight_packed"].numpy()
    if isinstance(fmt, FloatFormat):
        return unhalved(packed, fmt)
    return unpack_int32(packed, fmt.bits, int(stored[f"{layer}.weight_shape"][1]))


def _read_layer(layer: str, stored: StoredTensors, scheme: Mapping[str, Any]) -> PackedWeight:
    args = scheme["weights"]
    bits, group = int(args["num_bits"]), args.get("group_size")
    fmt: Format = IntFormat(bits) if args["type"] == "int" else FLOAT4_E2M1 if bits == 4 else FLOAT8_E4M3
    scale, scale_name, common = _read_scale(layer, stored)
    codes = _read_codes(layer, stored, fmt)
    granularity: Granularity = PerTensor()
    if args["strategy"] == "channel":
        granularity, scale = PerChannel(0), scale.reshape(-1)
    elif args["strategy"] != "tensor":
        granularity = PerBlock(int(group), 1, 0)
    else:
        scale = scale.reshape(())
    zero_point = np.zeros(scale.shape, np.int32)
    if not args["symmetric"] and f"{layer}.weight_zero_point" in stored:
        held_zero = stored[f"{layer}.weight_zero_point"].numpy()
        if held_zero.dtype == np.int32:
            held_zero = unpack_int32(held_zero.T, bits, len(codes)).T
        zero_point = held_zero.astype(np.int32).reshape(scale.shape)
    encoding = Encoding(fmt, scale, zero_point, granularity)
    if scale_name in SCALE_FORMATS and scale_name != "float32":
        row = parse_scale_format(scale_name)
        encoding = (
            Encoding(fmt, scale, zero_point, granularity, row, common)
            if common is not None
            else with_scale(encoding, scale, row)
        )
    return PackedWeight(f"{layer}.weight", codes, encoding)


def _recognises(folder: Path) -> bool:
    config = folder / "config.json"
    if not config.is_file():
        return False
    found = read_json(config).get("quantization_config")
    return isinstance(found, dict) and found.get("quant_method") == "compressed-tensors"


def _check(plans: Sequence[WeightPlan], extras: Extras) -> None:
    for name, found in extras.inputs.items():
        _input_args(found, name)
    kinds = {(e.format, e.scale.ndim) for pair in extras.cache.values() for e in pair}
    for module, pair in extras.cache.items():
        if len(kinds) > 1 or not all(e.symmetric and not e.dynamic and e.scale.size == _heads(e) for e in pair):
            raise ExportError(
                module,
                "keys and values of the cache are not of one format, symmetric, with calibrated scales per tensor or per head, "
                "as compressed-tensors has them",
                'write kv_cache={part: {"format": "int8", "granularity": "per_tensor", "symmetric": True} for part in ("key", '
                '"value")}, or "fp8"',
            )
    tokens = [
        name for name, found in extras.inputs.items() if found.encoding is None and _divides_by_127(found.spec.format)
    ]
    if tokens:
        logger.info(
            "%s and %d others: transformers divides the largest magnitude of a token by 127.5, which the format int8c simulates; "
            "vLLM's kernel divides by 127, as int8 does", tokens[0], len(tokens) - 1,
        )  # fmt: skip


def _heads(encoding: Encoding) -> int:
    """How many scales keys or values have: one for each head, or one."""
    return encoding.scale.shape[1] if encoding.scale.ndim == 4 else 1


def _divides_by_127(fmt: Format) -> bool:
    return isinstance(fmt, IntFormat) and fmt.signed and not fmt.centred


FORMAT: FileFormat = FileFormat(
    name="compressed-tensors",
    engine="transformers, vLLM, SGLang",
    holds="integers of 2 to 8 bits per group, channel or tensor; float8_e4m3; NVFP4; MXFP4; MXFP8",
    refuses=refuses,
    size=lambda plan: plan.elements * (32 if is_table(plan.name) else bits_of(plan.layout)) / 8,
    write=write,
    read=read,
    recognises=_recognises,
    check=_check,
)
