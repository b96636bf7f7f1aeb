"""Names of tensors and keys in GGUF, one row per architecture of transformers.

llama.cpp computes some models in another form than transformers, so tensors change form: rows of queries and keys of Llama
and Mistral are reordered (its rotary positions pair neighbours, not halves), norms of Gemma get their one added, and matrices
of GPT-2 are transposed. Each is undone when a file is read.

Source: ``convert_hf_to_gguf.py`` and ``src/llama-model.cpp`` of llama.cpp.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import ExportError
from bitwright.llm.packed import FloatWeight, Weight

logger = logging.getLogger("bitwright")

Config = Mapping[str, Any]

_COMMON = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.*.input_layernorm": "blk.*.attn_norm",
    "model.layers.*.post_attention_layernorm": "blk.*.ffn_norm",
    "model.layers.*.self_attn.q_proj": "blk.*.attn_q",
    "model.layers.*.self_attn.k_proj": "blk.*.attn_k",
    "model.layers.*.self_attn.v_proj": "blk.*.attn_v",
    "model.layers.*.self_attn.o_proj": "blk.*.attn_output",
    "model.layers.*.mlp.gate_proj": "blk.*.ffn_gate",
    "model.layers.*.mlp.up_proj": "blk.*.ffn_up",
    "model.layers.*.mlp.down_proj": "blk.*.ffn_down",
}
_HEAD_NORMS = {
    "model.layers.*.self_attn.q_norm": "blk.*.attn_q_norm",
    "model.layers.*.self_attn.k_norm": "blk.*.attn_k_norm",
}
_SANDWICH = {
    "model.layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "model.layers.*.pre_feedforward_layernorm": "blk.*.ffn_norm",
    "model.layers.*.post_feedforward_layernorm": "blk.*.post_ffw_norm",
}
_FUSED = {"model.layers.*.self_attn.qkv_proj": "blk.*.attn_qkv", "model.layers.*.mlp.gate_up_proj": "blk.*.ffn_up"}
_GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "transformer.h.*.ln_1": "blk.*.attn_norm",
    "transformer.h.*.ln_2": "blk.*.ffn_norm",
    "transformer.h.*.attn.c_attn": "blk.*.attn_qkv",
    "transformer.h.*.attn.c_proj": "blk.*.attn_output",
    "transformer.h.*.mlp.c_fc": "blk.*.ffn_up",
    "transformer.h.*.mlp.c_proj": "blk.*.ffn_down",
}


def with_defaults(config: Config) -> Config:
    """The configuration, with omitted fields set to the defaults of its class in transformers.

    Raises:
        ExportError: transformers has no class for it, or refuses a field.
    """
    from transformers import AutoConfig

    fields = {name: value for name, value in config.items() if name != "model_type"}
    try:
        return {**AutoConfig.for_model(config["model_type"], **fields).to_dict(), **config}
    except Exception as error:  # whatever a field makes of the constructor
        raise ExportError(
            "config.json",
            f"transformers makes no configuration of it: {' '.join(str(error).split())}",
            "copy it from the original model",
        ) from error


def _rope(config: Config) -> Config:
    """Rotary position settings, from a configuration of transformers 5 or older."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in found:  # per type of layer
        found = found["full_attention"]
    return {"rope_theta": config.get("rope_theta", 10000.0), **found}


def head_size(config: Config) -> int:
    """Elements of one attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rotary(arch: str, config: Config) -> dict[str, Any]:
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    keys: dict[str, Any] = {
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.rope.dimension_count": int(head_size(config) * part),
    }
    if kind == "linear":
        keys |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": float(rope["factor"])}
    elif kind not in ("default", "llama3"):
        raise ExportError(
            "config.json",
            f"rotary positions of type {kind!r} are not written to GGUF",
            "write compressed-tensors, or remove the scaling of positions for contexts of the original length",
        )
    return keys


def rope_factors(config: Config) -> NDArray[np.float32] | None:
    """Divisors of Llama 3.1's rotary frequencies, one per pair; ``None`` for other models."""
    rope = _rope(config)
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    size = head_size(config)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    length, factor = float(rope["original_max_position_embeddings"]), float(rope["factor"])
    wave = 2 * np.pi * float(rope["rope_theta"]) ** (np.arange(0, size, 2) / size)
    smooth = (length / wave - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wave < length / high, 1.0, np.where(wave > length / low, factor, between)).astype(np.float32)


def _decoder(arch: str, config: Config) -> dict[str, Any]:
    """Keys that all but GPT-2 have."""
    size = head_size(config)
    return {
        f"{arch}.context_length": int(config["max_position_embeddings"]),
        f"{arch}.embedding_length": int(config["hidden_size"]),
        f"{arch}.block_count": int(config["num_hidden_layers"]),
        f"{arch}.feed_forward_length": int(config["intermediate_size"]),
        f"{arch}.attention.head_count": int(config["num_attention_heads"]),
        f"{arch}.attention.head_count_kv": int(config.get("num_key_value_heads") or config["num_attention_heads"]),
        f"{arch}.attention.key_length": size,
        f"{arch}.attention.value_length": size,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.vocab_size": int(config["vocab_size"]),
        **_rotary(arch, config),
    }


def _windowed(arch: str, config: Config) -> dict[str, Any]:
    """Keys of a decoder, with a sliding window if the configuration has one."""
    window = config.get("sliding_window")
    return _decoder(arch, config) | ({f"{arch}.attention.sliding_window": int(window)} if window else {})


def _full_attention(arch: str, config: Config) -> dict[str, Any]:
    """Keys for architectures whose sliding window llama.cpp lacks: the context is limited to the window."""
    keys, window = _decoder(arch, config), config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and window < keys[f"{arch}.context_length"]:
        logger.warning(
            "llama.cpp computes no sliding window for %s: the context is limited to its %d tokens", arch, window
        )
        keys[f"{arch}.context_length"] = int(window)
    return keys


def _phi3(arch: str, config: Config) -> dict[str, Any]:
    """Keys of Phi-3, whose window llama.cpp reads and does not apply (PR 13676)."""
    return _windowed(arch, config) | _full_attention(arch, config)


def _gemma2(arch: str, config: Config) -> dict[str, Any]:
    _own_query_scale(config)
    caps = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    keys = {f"{arch}.{key}": float(config[name]) for key, name in caps.items() if config.get(name)}
    return _windowed(arch, config) | keys


def _gemma3(arch: str, config: Config) -> dict[str, Any]:
    _own_query_scale(config)
    found = config.get("rope_parameters") or {}
    local = found.get("sliding_attention", {}).get("rope_theta", config.get("rope_local_base_freq", 10000.0))
    period = _period(config)
    keys = {f"{arch}.rope.freq_base_swa": float(local), f"{arch}.attention.sliding_window_pattern": period}
    return _windowed(arch, config) | keys


def _period(config: Config) -> int:
    """The period of layers with full attention."""
    kinds = config.get("layer_types") or []
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    period = full[0] + 1 if full else len(kinds) + 1
    if kinds and kinds != [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(len(kinds))
    ]:
        raise ExportError(
            "config.json", f"layer_types {kinds} have no period, which llama.cpp asks for", "write compressed-tensors"
        )
    return int(period if kinds else config.get("sliding_window_pattern", 6))


def _own_query_scale(config: Config) -> None:
    scalar = config.get("query_pre_attn_scalar")
    if scalar is not None and scalar != head_size(config):
        raise ExportError(
            "config.json",
            f"query_pre_attn_scalar is {scalar}, and llama.cpp scales queries of this architecture by the size of a head, "
            f"{head_size(config)}",
            "write compressed-tensors",
        )


def _gpt2(arch: str, config: Config) -> dict[str, Any]:
    width = int(config["n_embd"])
    return {
        "gpt2.context_length": int(config["n_positions"]),
        "gpt2.embedding_length": width,
        "gpt2.block_count": int(config["n_layer"]),
        "gpt2.feed_forward_length": int(config.get("n_inner") or 4 * width),
        "gpt2.attention.head_count": int(config["n_head"]),
        "gpt2.attention.layer_norm_epsilon": float(config["layer_norm_epsilon"]),
    }


@dataclass(frozen=True)
class Architecture:
    """Names and keys of one architecture.

    Attributes:
        name: in GGUF.
        names: of the modules of transformers (``*`` for the number of a block) -> names in GGUF.
        keys: name, configuration -> what the file says of the model.
        paired: whether rows of queries and keys are reordered.
        norm_offset: what is added to the weights of norms.
        transposed: whether matrices of blocks are stored the other way round.
    """

    name: str
    names: Mapping[str, str]
    keys: Callable[[str, Config], dict[str, Any]] = _decoder
    paired: bool = False
    norm_offset: float = 0.0
    transposed: bool = False
    back: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.back.update({new: old for old, new in self.names.items()})


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _COMMON, paired=True),
    "mistral": Architecture("llama", _COMMON, _full_attention, paired=True),
    "qwen2": Architecture("qwen2", _COMMON, _full_attention),
    "qwen3": Architecture("qwen3", {**_COMMON, **_HEAD_NORMS}, _full_attention),
    "gemma": Architecture("gemma", _COMMON, norm_offset=1.0),
    "gemma2": Architecture("gemma2", {**_COMMON, **_SANDWICH}, _gemma2, norm_offset=1.0),
    "gemma3_text": Architecture("gemma3", {**_COMMON, **_SANDWICH, **_HEAD_NORMS}, _gemma3, norm_offset=1.0),
    "phi3": Architecture("phi3", {**_COMMON, **_FUSED}, _phi3),
    "gpt2": Architecture("gpt2", _GPT2, _gpt2, transposed=True),
}


def architecture_of(config: Config) -> Architecture:
    """The row of a model's ``model_type``.

    Raises:
        ExportError: there is none; names those that there are.
    """
    kind = str(config.get("model_type"))
    if kind in ARCHITECTURES:
        return ARCHITECTURES[kind]
    raise ExportError(
        "config.json",
        f"model_type {kind!r} is not written to GGUF",
        f"write compressed-tensors; GGUF is written for {', '.join(ARCHITECTURES)}",
    )


def name_in_file(name: str, architecture: Architecture) -> str:
    """The name of a parameter in GGUF.

    Raises:
        ExportError: the architecture has no such parameter there.

    >>> name_in_file("model.layers.3.mlp.up_proj.weight", ARCHITECTURES["llama"])
    'blk.3.ffn_up.weight'
    """
    module, _, kind = name.rpartition(".")
    found = _mapped(module, architecture.names)
    if found is None or kind not in ("weight", "bias"):
        raise ExportError(
            name, f"llama.cpp has no tensor for it in models of type {architecture.name}", "write compressed-tensors"
        )
    return f"{found}.{kind}"


def _mapped(module: str, names: Mapping[str, str]) -> str | None:
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", module)
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", module, count=1)
    found = names.get(pattern)
    return found.replace("*", numbers[0]) if found and numbers else found


def to_file(weight: Weight, architecture: Architecture, config: Config) -> Weight:
    """A weight in the form and under the name of the file."""
    name = name_in_file(weight.name, architecture)
    weight = replace(weight, name=name)
    heads = _paired_heads(name, architecture, config)
    if heads:
        return take_rows(weight, _pairs(weight.shape[0], heads))
    if architecture.norm_offset and name.endswith("norm.weight"):
        assert isinstance(weight, FloatWeight), name
        return replace(weight, values=weight.values.float() + architecture.norm_offset)
    if architecture.transposed and name.startswith("blk.") and len(weight.shape) == 2:
        return transposed(weight)
    return weight


def from_file(weight: Weight, architecture: Architecture, config: Config) -> Weight:
    """A weight of the file in the form and under the name of transformers; inverse of :func:`to_file`."""
    module, _, kind = weight.name.rpartition(".")
    original = _mapped(module, architecture.back)
    name = weight.name
    weight = replace(weight, name=f"{original or module}.{kind}")
    heads = _paired_heads(name, architecture, config)
    if heads:
        return take_rows(weight, np.argsort(_pairs(weight.shape[0], heads)))
    if architecture.norm_offset and name.endswith("norm.weight"):
        assert isinstance(weight, FloatWeight), name
        return replace(weight, values=weight.values - architecture.norm_offset)
    if architecture.transposed and name.startswith("blk.") and len(weight.shape) == 2:
        return transposed(weight)
    return weight


def _paired_heads(name: str, architecture: Architecture, config: Config) -> int:
    """Heads of a tensor whose rows are reordered; 0 for others."""
    if not architecture.paired:
        return 0
    heads = int(config["num_attention_heads"])
    part = name.split(".")[-2]
    return {"attn_q": heads, "attn_k": int(config.get("num_key_value_heads") or heads)}.get(part, 0)


def _pairs(rows: int, heads: int) -> NDArray[np.intp]:
    """Row order that interleaves the two halves of each head: first of one half, first of the other, second, ..."""
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)


def take_rows(weight: Weight, rows: NDArray[np.intp]) -> Weight:
    """The weight with its rows in another order; each row keeps its codes and scales."""
    if isinstance(weight, FloatWeight):
        return replace(weight, values=weight.values[rows.tolist()])
    encoding = weight.encoding
    if encoding.scale.ndim:
        common = encoding.common
        if common is not None and common.shape == encoding.scale.shape:
            common = common[rows]
        shift = None if encoding.shift is None else encoding.shift[rows]
        scale, zero_point = encoding.scale[rows], encoding.zero_point[rows]
        encoding = replace(encoding, scale=scale, zero_point=zero_point, common=common, shift=shift)
    return replace(weight, codes=weight.codes[rows], encoding=encoding)


def transposed(weight: Weight) -> Weight:
    """The transposed matrix; blocks along one axis become blocks along the other."""
    if isinstance(weight, FloatWeight):
        return replace(weight, values=weight.values.T.contiguous())
    return replace(weight, codes=np.ascontiguousarray(weight.codes.T), encoding=weight.encoding.permuted((1, 0)))
