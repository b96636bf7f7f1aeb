"""Adapters of PEFT as GGUF files, which llama.cpp loads beside a model (``--lora``).

A file holds the factors of every layer under the layer's name in GGUF, ``blk.0.attn_q.weight.lora_a`` of shape ``[r, I]`` and
``.lora_b`` of shape ``[O, r]``, and ``alpha``; llama.cpp adds ``alpha / r * B A x`` to the layer's result.

Source: ``convert_lora_to_gguf.py`` and ``src/llama-adapter.cpp`` of llama.cpp.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.errors import ConfigError, ExportError, checks_arguments
from bitwright.export.files.atomic import atomic_files
from bitwright.llm.files.gguf_blocks import FLOATS, STRING, Reader, Typed, Writer, typed
from bitwright.llm.files.gguf_models import Architecture, architecture_of, from_file, to_file
from bitwright.llm.packed import FloatWeight
from bitwright.torch.adapters import adapter_layers

_PREFIX = "base_model.model."  # which PEFT puts before the names of the model


@dataclass(frozen=True, eq=False)
class Adapter:
    """Factors of an adapter.

    Attributes:
        alpha: the sum of a layer is ``W x + alpha / r * B A x``.
        factors: layer, under its name in transformers -> A ``[r, I]`` and B ``[O, r]``, float32.
    """

    alpha: float
    factors: Mapping[str, tuple[Tensor, Tensor]]


@checks_arguments
def write_gguf_adapters(model: Any, out: str | os.PathLike[str]) -> dict[str, Path]:
    """Write every adapter of a model as a GGUF file that llama.cpp loads beside the model's own file.

    The factors are written in float32. Where layers of an adapter have scales ``alpha / r`` that no common ``alpha`` gives
    (patterns of ranks or alphas, rank-stabilized ones), the difference is multiplied into B.

    Args:
        model: a simulation, or a model of PEFT whose base is an architecture that GGUF is written for.
        out: folder of ``<adapter>.gguf``; created if missing.

    Returns:
        Name of an adapter -> its file.

    Raises:
        ConfigError: no layer has an adapter, or one is of a kind that llama.cpp does not add: an embedding, a convolution,
            DoRA, a bias in B.
        ExportError: the architecture or a layer has no name in GGUF.
    """
    model = getattr(model, "model", model) if not isinstance(model, nn.Module) else model
    layers = adapter_layers(model)
    names = list(dict.fromkeys(name for layer in layers.values() for name in _adapters_of(layer)))
    if not names:
        raise ConfigError(
            "write_gguf_adapters", "no layer of the model has an adapter of PEFT",
            "make one: model = peft.get_peft_model(model, LoraConfig(...))",
        )  # fmt: skip
    config = model.config.to_dict()
    architecture = architecture_of(config)
    made = {name: _adapter(layers, name) for name in names}
    with atomic_files(out, name=f"{names[-1]}.gguf", create=True) as staging:
        for name, adapter in made.items():
            _write(staging / f"{name}.gguf", name, adapter, architecture, config)
    return {name: Path(out) / f"{name}.gguf" for name in names}


@checks_arguments
def read_gguf_adapter(path: str | os.PathLike[str], config: Mapping[str, Any]) -> Adapter:
    """Read an adapter that :func:`write_gguf_adapters` or llama.cpp's converter wrote.

    Args:
        path: of the GGUF file.
        config: of the model beside which it is loaded, ``model.config.to_dict()``.

    Raises:
        ConfigError: the file holds no adapter of this kind, one for another architecture, or factors of different ranks.
        ExportError: the file is damaged, or the architecture is not one that GGUF is read for.
    """
    reader = Reader(Path(path))
    kind = reader.keys.get("general.type"), reader.keys.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise ConfigError(
            str(path),
            f"its general.type and adapter.type are {kind}, not ('adapter', 'lora')",
            "name an adapter's file",
        )
    architecture = architecture_of(config)
    told = reader.keys.get("general.architecture")
    if told != architecture.name:
        raise ConfigError(
            str(path), f"the adapter is for {told}, and the model is of type {architecture.name}",
            "load it beside the model that it was trained with",
        )  # fmt: skip
    factors = {}
    for name in reader:
        base, found, part = name.rpartition(".lora_")
        if not found or part != "b":
            continue
        a, b = _tensor(reader, f"{base}.lora_a"), _tensor(reader, name)
        if a.shape[0] != b.shape[1]:
            raise ConfigError(
                str(path), f"the factors of {base} have ranks {a.shape[0]} and {b.shape[1]}", "write the adapter again"
            )
        weight = from_file(FloatWeight(base, b), _untransposed(architecture), config)
        assert isinstance(weight, FloatWeight)
        factors[weight.name.removesuffix(".weight")] = a, weight.values
    return Adapter(float(reader.keys["adapter.lora.alpha"]), factors)


def _adapters_of(layer: Any) -> Iterator[str]:
    yield from layer.lora_A
    yield from getattr(layer, "lora_embedding_A", {})


def _adapter(layers: Mapping[str, Any], name: str) -> Adapter:
    """The factors of one adapter, with one alpha for all layers."""
    held = {key: layer for key, layer in layers.items() if name in _adapters_of(layer)}
    for key, layer in held.items():
        problem = _not_added(layer, name)
        if problem:
            raise ConfigError(
                key, f"adapter {name} {problem}, which llama.cpp does not add",
                "merge it into the layer: bitwright.torch.merge_adapters(sim), and write the model",
            )  # fmt: skip
    scales = {key: float(layer.scaling[name]) * len(layer.lora_A[name].weight) for key, layer in held.items()}
    alpha = next(iter(scales.values()))
    factors = {}
    for key, layer in held.items():
        a, b = (getattr(layer, part)[name].weight.detach().to("cpu", torch.float32) for part in ("lora_A", "lora_B"))
        factors[key.removeprefix(_PREFIX)] = a, b if scales[key] == alpha else b * (scales[key] / alpha)
    return Adapter(alpha, factors)


def _not_added(layer: Any, name: str) -> str:
    if name not in layer.lora_A:
        return "changes an embedding"
    if layer.lora_A[name].weight.dim() != 2:
        return "changes a convolution"
    if name in getattr(layer, "lora_magnitude_vector", {}):
        return "scales the sum (DoRA)"
    return "" if getattr(layer.lora_B[name], "bias", None) is None else "has a bias in B"


def _untransposed(architecture: Architecture) -> Architecture:
    """The architecture for factors, which have the same form beside a matrix and its transpose."""
    return Architecture(architecture.name, architecture.names, paired=architecture.paired)


def _write(path: Path, name: str, adapter: Adapter, architecture: Architecture, config: Mapping[str, Any]) -> None:
    writer = Writer(path)
    for layer, (a, b) in adapter.factors.items():
        stored = to_file(FloatWeight(f"{layer}.weight", b), _untransposed(architecture), config)
        assert isinstance(stored, FloatWeight)
        for part, factor in (("a", a), ("b", stored.values)):
            writer.add(
                f"{stored.name}.lora_{part}", tuple(factor.shape), FLOATS["float32"][0], factor.contiguous().numpy()
            )
    writer.keys = {
        "general.type": Typed("adapter", STRING),
        "general.architecture": Typed(architecture.name, STRING),
        "general.name": Typed(name, STRING),
        "adapter.type": Typed("lora", STRING),
        **typed({"adapter.lora.alpha": adapter.alpha, "general.file_type": 0, "general.quantization_version": 2}),
    }
    writer.finish()


def _tensor(reader: Reader, name: str) -> Tensor:
    if name not in reader.tensors:
        raise ExportError(str(reader.path), f"it has no {name}", "write the adapter again")
    shape = reader.tensors[name][0]
    if reader.block_type(name) is not None:
        raise ExportError(str(reader.path), f"{name} is quantized", "write its factors in float32 or float16")
    dtype: Any = getattr(torch, reader.dtype(name))
    return torch.from_numpy(np.array(reader.bytes_of(name))).view(dtype).reshape(shape).float()
