"""Tensor subclasses of torchao in safetensors files, which transformers loads with torchao.

========================  ==============================================================================================
class                     weights that it holds
========================  ==============================================================================================
IntxUnpackedToInt8Tensor  integers of 2 to 8 bits per group, channel or tensor, with or without zero points; one byte each
Float8Tensor              float8_e4m3 per channel or tensor
========================  ==============================================================================================

Source: ``torchao.prototype.safetensors`` of torchao 0.18: the parts of a tensor stand under names of their own, and the
metadata of each file say how to put them together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.core.numerics.affine import with_scale
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT8_E4M3, Format, IntFormat, parse_scale_format
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor
from bitwright.errors import ExportError
from bitwright.llm.files.common import (
    Extras,
    FileFormat,
    Shards,
    StoredTensors,
    as_stored,
    copy_tokenizer,
    dtype_name,
    is_table,
    read_json,
    refuse_inputs,
    stored_dtype,
)
from bitwright.llm.packed import FloatWeight, PackedWeight, Weight, WeightPlan, signed

if TYPE_CHECKING:
    import torch

_HALF = ("float32", "float16", "bfloat16")


def refuses(plan: WeightPlan) -> str:
    """The reason why torchao has no class for a weight; empty where it has."""
    layout = plan.layout
    if layout is None:
        return ""
    if len(plan.shape) != 2 or plan.axis != -1:
        return "only matrices of linear layers are quantized"
    if layout.scale_format not in _HALF:
        return f"scales of format {layout.scale_format} are not stored"
    if isinstance(layout.format, IntFormat):
        return "" if 2 <= layout.format.bits <= 8 else "integers have 2 to 8 bits"
    if layout.format != FLOAT8_E4M3:
        return "the only float format is float8_e4m3"
    return "float8 has no groups" if isinstance(layout.group, int) else ""


def _block(weight: PackedWeight) -> list[int]:
    rows, columns = weight.shape
    group = weight.layout.group
    return [1, group] if isinstance(group, int) else [1 if group == "channel" else rows, columns]


def write(folder: Path, weights: Iterable[Weight], extras: Extras) -> None:
    """Write ``config.json``, shards, their index and the tokenizer's files into ``folder``."""
    import torch

    shards, dtypes, names = Shards(folder), set(), []
    config = {key: value for key, value in extras.config.items() if key != "_name_or_path"}
    in_float: list[tuple[str, int]] = []
    for name, found in as_stored(weights, config, in_float):
        names.append(name)
        if isinstance(found, PackedWeight):
            dtypes.add(getattr(torch, found.layout.scale_format))
            parts, shards.metadata[name] = _parts(found)
            module, _, parameter = name.rpartition(".")
            for part, tensor in parts.items():
                shards.add(f"{module}._{parameter}_{part}", tensor)
        else:
            dtypes.add(found.dtype)
            shards.add(name, found)
            shards.metadata[name] = json.dumps({"_type": "Tensor"})
    floats = [name.rpartition(".")[0] for name, _ in in_float]
    shards.metadata["tensor_names"] = json.dumps(names)
    shards.finish()
    config["dtype"] = stored_dtype(config, dtypes)
    config.pop("torch_dtype", None)
    # what each tensor is stands in the files; this names a method of torchao and the layers that it leaves out
    nominal = {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": {
        "weight_dtype": {"_type": "torch.dtype", "_data": "int8"},
        "granularity": {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}},
    }}  # fmt: skip
    config["quantization_config"] = {
        "quant_method": "torchao",
        "quant_type": {"default": nominal},
        "modules_to_not_convert": sorted(floats) or None,
        "include_input_output_embeddings": "lm_head" not in floats,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    copy_tokenizer(extras.tokenizer, folder)


def _parts(weight: PackedWeight) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of one weight, and their metadata."""
    import torch

    kind = getattr(torch, weight.layout.scale_format)
    data, rows = {"dtype": {"_type": "torch.dtype", "_data": dtype_name(kind)}}, _block(weight)
    scale = np.array(weight.scale.reshape(weight.shape[0] // rows[0], -1))
    codes, zero_point = signed(weight)
    parts = {"qdata": torch.from_numpy(np.ascontiguousarray(codes)), "scale": torch.from_numpy(scale).to(kind)}
    if isinstance(weight.format, IntFormat):
        parts["zero_point"] = torch.from_numpy(zero_point.reshape(scale.shape).astype(np.int8))
        own = {
            "target_dtype": {"_type": "torch.dtype", "_data": f"int{weight.format.bits}"},
            "block_size": rows, **data, "activation_quantization": None,
        }  # fmt: skip
        class_name = "IntxUnpackedToInt8Tensor"
    else:
        parts["qdata"] = parts["qdata"].view(torch.float8_e4m3fn)
        auto = {"_type": "KernelPreference", "_data": "AUTO"}
        own = {"block_size": rows, "mm_config": None, "act_quant_kwargs": None, "kernel_preference": auto, **data}
        class_name = "Float8Tensor"
    return parts, json.dumps({"_type": class_name, "_data": own, "_tensor_data_names": list(parts)})


def read(folder: Path) -> Iterator[Weight]:
    """The weights of a folder in this format."""
    stored = StoredTensors(folder)
    metadata = stored.metadata()
    if "tensor_names" not in metadata:
        raise ExportError(str(folder), "its files have no metadata of torchao", "write the model again")
    for name in json.loads(metadata["tensor_names"]):
        found = json.loads(metadata[name])
        if found["_type"] == "Tensor":
            yield FloatWeight(name, stored[name])
        else:
            yield _read_weight(name, found, stored)


def _read_weight(name: str, found: dict[str, Any], stored: StoredTensors) -> PackedWeight:
    import torch

    module, _, parameter = name.rpartition(".")
    parts = {part: stored[f"{module}._{parameter}_{part}"] for part in found["_tensor_data_names"]}
    data, codes = found["_data"], parts["qdata"]
    fmt: Format = FLOAT8_E4M3
    if "target_dtype" in data:
        fmt = IntFormat(int(data["target_dtype"]["_data"].removeprefix("int")))
    elif codes.dtype == torch.int8:
        fmt = IntFormat(8)
    rows, columns = codes.shape
    block = data["block_size"]
    granularity: Granularity = PerBlock(int(block[1]), 1, 0)
    scale = parts["scale"].float().numpy()
    if block[1] in (columns, -1):
        granularity = PerChannel(0) if block[0] == 1 else PerTensor()
        scale = scale.reshape((rows,) if block[0] == 1 else ())
    zero = parts.get("zero_point")
    zero_point = np.zeros(scale.shape, np.int32) if zero is None else zero.to(torch.int32).numpy().reshape(scale.shape)
    encoding = Encoding(fmt, scale, zero_point, granularity)
    encoding = with_scale(encoding, scale, parse_scale_format(dtype_name(parts["scale"].dtype)))
    numbers = (codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes).numpy()
    return PackedWeight(name, numbers, encoding)


def _recognises(folder: Path) -> bool:
    config = folder / "config.json"
    found = read_json(config).get("quantization_config") if config.is_file() else None
    return isinstance(found, dict) and found.get("quant_method") == "torchao"


def _check(plans: Sequence[WeightPlan], extras: Extras) -> None:
    refuse_inputs(extras, "torchao")


def _size(plan: WeightPlan) -> float:
    return plan.elements * (4.0 if plan.layout is None or is_table(plan.name) else 1.25)


FORMAT: FileFormat = FileFormat(
    name="torchao",
    engine="transformers with torchao",
    holds="integers of 2 to 8 bits per group, channel or tensor; float8_e4m3 per channel or tensor",
    refuses=refuses,
    size=_size,
    write=write,
    read=read,
    recognises=_recognises,
    check=_check,
)
