"""Decompose fused torch calls into their operators, so that quantizers can be placed inside.

Each decomposition is the documented equivalent of the fused call; in float the two agree to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.torch.calls import recurrent


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(query @ key^T * scale + mask) @ value``, as documented for ``F.scaled_dot_product_attention``.

    Args:
        query: ``[..., L, E]``; key: ``[..., S, E]``; value: ``[..., S, Ev]``, floating point.
        attn_mask: boolean (True takes part) or float (added), broadcastable to ``[..., L, S]``; queries without a key get 0.
        dropout_p: probability of dropping a weight.
        is_causal: mask the upper triangle as well.
        scale: default ``1 / sqrt(E)``.
        enable_gqa: repeat the heads of key and value to those of the query.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    return _attended(scores, value, attn_mask, is_causal, dropout_p)[0]


def _attended(
    scores: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, dropout_p: float, empty: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention output and weights; fully masked queries get zeros, or NaN where ``empty`` allows it."""
    if empty:
        scores, dead = (scores if mask is None else scores + mask), None
    else:
        scores, dead = _masked(scores, mask, is_causal)
    weights = torch.softmax(scores, -1)
    dropped = F.dropout(weights, dropout_p, True) if dropout_p > 0.0 else weights
    out = torch.matmul(dropped, value)
    return (out if dead is None else out.masked_fill(dead, 0.0)), weights


def _masked(scores: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor | None]:
    """``scores [..., L, S]`` under a boolean or an additive mask, and the queries that may attend to nothing.

    Those get zeros in torch's kernels, and not the NaN of an empty softmax: their scores are left as they are here, and
    their result is filled with zeros.
    """
    if is_causal:
        seen = torch.ones(scores.size(-2), scores.size(-1), dtype=torch.bool, device=scores.device).tril()
        if mask is None:  # the first key is before every query
            return scores.masked_fill(seen.logical_not(), -math.inf), None
        boolean = mask.dtype == torch.bool
        mask = mask.logical_and(seen) if boolean else mask.masked_fill(seen.logical_not(), -math.inf)
    if mask is None:
        return scores, None
    if mask.dtype == torch.bool:
        blocked = mask.logical_not()
        dead = blocked.all(-1, keepdim=True)
        return scores.masked_fill(blocked.logical_xor(dead), -math.inf), dead
    dead = mask.isneginf().all(-1, keepdim=True)
    return scores + mask.masked_fill(dead, 0.0), dead


def _projected(
    operands: tuple[Tensor, Tensor, Tensor], weights: Tensor | tuple[Tensor | None, ...], bias: Tensor | None
) -> Iterable[Tensor]:
    """Queries, keys and values; ``weights`` are stacked in one tensor, or three tensors."""
    query, key, value = operands
    if isinstance(weights, Tensor) and query is key and key is value:
        return F.linear(query, weights, bias).chunk(3, -1)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    parts: Any = weights.chunk(3) if isinstance(weights, Tensor) else weights
    return (F.linear(x, w, b) for x, w, b in zip(operands, parts, biases, strict=True))  # one projection each


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Multi-head attention as three projections, two matrix products, a softmax and the output projection.

    Args: those of ``F.multi_head_attention_forward``; ``query [L, N, E]``, ``key`` and ``value [S, N, E]``, or without ``N``.

    Returns:
        Output ``[L, N, E]`` and the attention weights ``[N, L, S]`` (``[N, H, L, S]`` when not averaged) or ``None``.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.
    """
    batched = query.dim() == 3
    if not batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
    length, batch, embed = query.shape
    head = embed // num_heads
    own_weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    # callers pass an empty tensor beside weights of their own
    weights = own_weights if use_separate_proj_weight or in_proj_weight is None else in_proj_weight
    q, k, v = _projected((query, key, value), weights, in_proj_bias)
    if bias_k is not None and bias_v is not None:
        k, v = torch.cat([k, bias_k.repeat(1, batch, 1)]), torch.cat([v, bias_v.repeat(1, batch, 1)])
    if add_zero_attn:
        k, v = (torch.cat([t, torch.zeros(1, *t.shape[1:], dtype=t.dtype, device=t.device)]) for t in (k, v))
    source = k.size(0)
    q = q.reshape(length, batch, num_heads, head).permute(1, 2, 0, 3)
    k = k.reshape(source, batch, num_heads, head).permute(1, 2, 3, 0)
    v = v.reshape(source, batch, num_heads, head).permute(1, 2, 0, 3)
    mask = _joint_mask(attn_mask, key_padding_mask, batch, num_heads, source, q.dtype)
    scores = torch.matmul(q * (1.0 / math.sqrt(head)), k)
    hint = is_causal and key_padding_mask is None and not need_weights  # torch does not read the mask then
    dropout = dropout_p if training else 0.0
    out, probabilities = _attended(scores, v, None if hint else mask, hint, dropout, empty=need_weights)
    out = F.linear(out.permute(2, 0, 1, 3).reshape(length, batch, embed), out_proj_weight, out_proj_bias)
    shown = _shown(probabilities, average_attn_weights, batched) if need_weights else None
    return (out if batched else out.squeeze(1)), shown


def _shown(probabilities: Tensor, average: bool, batched: bool) -> Tensor:
    """The attention weights that the call returns."""
    shown = probabilities.mean(1) if average else probabilities
    return shown if batched else shown.squeeze(0)


def _joint_mask(
    attn_mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, source: int, dtype: torch.dtype
) -> Tensor | None:
    joint: Tensor | None = None
    if attn_mask is not None:
        joint = _additive(attn_mask, dtype)
        if joint.dim() == 3:
            joint = joint.reshape(batch, heads, *joint.shape[-2:])
    if padding is not None:
        keys = _additive(padding, dtype).reshape(batch, 1, 1, -1)
        joint = keys if joint is None else joint + keys
    if joint is not None and joint.size(-1) < source:  # positions appended by bias_k and add_zero_attn
        joint = F.pad(joint, (0, source - joint.size(-1)))
    return joint


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


@dataclass(frozen=True)
class Decomposition:
    """A fused call, the function that replaces it, and when it may.

    Attributes:
        label: of the call; its parts are named below it.
        run: what replaces it, with the same arguments.
        applies: whether it may, for the arguments of a call.
        owner: what the parts are named after instead: ``layers`` of the module that calls, or the ``module`` itself.
            Such a call is the place of the first parameter it is given, so that it has the same sites at every time step.
    """

    label: str
    run: Callable[..., Any]
    applies: Callable[[tuple[Any, ...], dict[str, Any]], bool] = lambda args, kwargs: True
    owner: Literal["", "layers", "module"] = ""


def _plain_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Refuse causal attention without a mask, as torch does."""
    refused = kwargs.get("is_causal") and kwargs.get("attn_mask") is None
    return not refused and kwargs.get("static_k") is None and kwargs.get("static_v") is None


DECOMPOSITIONS: dict[Any, Decomposition] = {
    F.scaled_dot_product_attention: Decomposition("attention", scaled_dot_product_attention),
    F.multi_head_attention_forward: Decomposition("attention", multi_head_attention_forward, _plain_attention),
    **{
        function: Decomposition(function.__name__, run, owner="module" if is_cell else "layers")
        for function, run, is_cell in recurrent.decompositions()
    },
}


# ------------------------------------------------------------------------- calls the ONNX exporter has no words for


def adaptive_avg_pool(x: Tensor, output_size: int | tuple[int | None, ...]) -> Tensor:
    """Adaptive average pooling as plain pooling, where the input's size is a multiple of the output's; else unchanged.

    ``x``: ``[N, C, *spatial]`` or ``[C, *spatial]``; ``output_size`` per spatial axis, ``None`` keeps the size.
    """
    n = len(output_size) if isinstance(output_size, (tuple, list)) else {3: 1, 4: 2, 5: 3}.get(x.dim(), 0)
    wanted = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size,) * n
    sizes = tuple(int(s) for s in x.shape[-n:]) if n else ()
    target = tuple(size if want is None else int(want) for size, want in zip(sizes, wanted, strict=True))
    if not n or any(size % want for size, want in zip(sizes, target, strict=True)):
        return _ADAPTIVE.get(n, F.adaptive_avg_pool2d)(x, output_size)
    kernel = tuple(size // want for size, want in zip(sizes, target, strict=True))
    return (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1](x, kernel, kernel)


_ADAPTIVE: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}


def grouped_mm(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """``torch._grouped_mm`` of sorted rows as products with all matrices, from which each row keeps its own.

    Args:
        x: ``[S, K]``, rows sorted by group.
        weight: ``[E, K, N]``; offs: ``[E]``, where the rows of each group end. Rows after the last end become zero.
        bias: ``[N]`` or ``None``; out_dtype: of the result, that of ``x`` by default.

    Returns:
        ``[S, N]``.
    """
    if offs is None or x.dim() != 2 or weight.dim() != 3:
        out = torch.matmul(x, weight)
    else:
        row = torch.arange(x.size(0), device=x.device)
        ends = offs.to(row.dtype)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        own = (row >= starts.unsqueeze(1)) & (row < ends.unsqueeze(1))
        out = torch.where(own.unsqueeze(2), torch.matmul(x.unsqueeze(0), weight), 0.0).sum(0)
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.to(out_dtype)


EXPORTABLE: dict[str, Callable[..., Any]] = {
    "adaptive_avg_pool1d": adaptive_avg_pool,
    "adaptive_avg_pool3d": adaptive_avg_pool,
    "grouped_mm": grouped_mm,
}
