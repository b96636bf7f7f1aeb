"""Keys and values of attention, found from the graph, on the grids of a cache; in both front ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright import Preset
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.formats import parse_format
from bitwright.core.numerics.serialize import spec_from_json, spec_to_json
from bitwright.core.placement.kv_cache import CachePlace, KvCache, describe, parse_kv_cache
from bitwright.errors import ConfigError, ExportError
from tests.support.simulations import calibrated

FLOAT = Preset(None, None)
X = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Two query heads for each of two key heads, of 8 channels; ``fused`` calls the function of torch."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 32)
        self.fused = fused

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, t, _ = x.shape
        return tuple(y.view(b, t, -1, 8).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = torch.full((q.shape[2], k.shape[2]), float("-inf")).triu(1)
        return torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + mask, -1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attend(*self.heads(x))
        return self.o(y.transpose(1, 2).reshape(x.shape))


def quantized(x: torch.Tensor, sim: Any, site: str) -> torch.Tensor:
    found: torch.Tensor = fake_quantize(x, sim.quantizers[site].encoding)
    return found


@pytest.mark.parametrize("fused", [False, True], ids=["written out", "fused"])
@pytest.mark.parametrize(
    "kv_cache",
    [
        {"key": "int8", "value": "int8"},
        {"key": "int4", "value": "int4"},
        {"key": "fp8", "value": {"format": "fp8", "granularity": "per_head"}},
        {
            "key": {"format": "int8", "granularity": "per_token"},
            "value": {"format": "int8", "granularity": "per_tensor"},
        },
    ],
    ids=["int8", "int4", "fp8", "others"],
)
def test_what_attention_reads_is_on_the_grids_of_the_cache(fused: bool, kv_cache: dict[str, Any]) -> None:
    sim = calibrated(bt.QuantizationSimModel(Attention(fused), X, preset=FLOAT, kv_cache=kv_cache), [X])
    key, value = sim.quantizers
    assert key.endswith("matmul.input[1]") and value.endswith("matmul_1.input[1]")
    net = Attention(False)
    with torch.no_grad():
        q, k, v = net.heads(X)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        k = quantized(k.transpose(-1, -2), sim, key).transpose(-1, -2)
        y = F.scaled_dot_product_attention(q, k, quantized(v, sim, value), is_causal=True)
        wanted = net.o(y.transpose(1, 2).reshape(X.shape))
        torch.testing.assert_close(sim.model(X), wanted, rtol=1e-4, atol=1e-5)
        sim.model(X[:, :5])  # another length, with the calibrated scales
    scales = sim.quantizers[key].encoding.scale.shape
    assert scales == ((1, 4, 8, 1) if kv_cache["key"] in ("int8", "fp8") else ())


def test_the_newest_tokens_stay_in_float(tmp_path: Path) -> None:
    given = {"key": "int4", "value": "int4"}
    outputs = []
    for recent in (0, 5, 12):
        sim = bt.QuantizationSimModel(Attention(True), X, preset=FLOAT, kv_cache={**given, "recent": recent})
        sim.compute_encodings([X])
        taps = sim.capture(list(sim.quantizers), X)
        outputs.append([taps[name][0] for name in sim.quantizers])
    (key, value), (late_key, late_value), (float_key, float_value) = outputs
    assert torch.equal(late_key[..., -5:], float_key[..., -5:]) and torch.equal(
        late_value[:, :, -5:], float_value[:, :, -5:]
    )
    assert torch.equal(late_value[:, :, :-5], value[:, :, :-5]) and not torch.equal(value, float_value)
    assert not torch.equal(late_key[..., :-5], float_key[..., :-5]) and not torch.equal(key, float_key)
    with pytest.raises(ExportError, match=r"the last 12 tokens of the cache stay in float there.*without recent"):
        sim.export(tmp_path, "net", X)


def test_bytes_of_a_token_count_repeated_heads_once() -> None:
    sim = bt.QuantizationSimModel(Attention(True), X, preset="w8", kv_cache={"key": "int8", "value": "int8"})
    # 2 heads of 8 channels: 16 bytes of keys; 16 of values, and a scale and a zero point of 16 bits for each head
    assert "key-value cache: 40 bytes per token at 2 operands of attention, 64 in float16" in str(sim.coverage())


@pytest.mark.parametrize(
    "kv_cache",
    [
        {"key": "int8", "value": "int8"},
        {part: {"format": "fp8", "granularity": "per_tensor"} for part in ("key", "value")},
        {part: {"format": "fp8", "granularity": "per_token"} for part in ("key", "value")},
        {
            "key": {"format": "int8", "granularity": "per_head", "rotated": True},
            "value": {"format": "int4", "rotated": True},
        },
    ],
    ids=["int8", "fp8 calibrated", "fp8 at run time", "rotated"],
)
def test_both_front_ends_and_the_export_agree(kv_cache: dict[str, Any], tmp_path: Path) -> None:
    sim = calibrated(bt.QuantizationSimModel(Attention(False), X, preset="w8", kv_cache=kv_cache), [X])
    with torch.no_grad():
        y = sim.model(X).numpy()
    sim.export(tmp_path, "net", X)
    assert sim.verify(X).ok
    path = tmp_path / "float.onnx"
    torch.onnx.export(Attention(False).eval(), (X,), str(path), dynamo=False, opset_version=18)
    other = bo.QuantizationSimModel(str(path), preset="w8", kv_cache=kv_cache)
    name = other.graph.inputs[0]
    other.compute_encodings([{name: X.numpy()}])
    np.testing.assert_allclose(other.session.run(None, {name: X.numpy()})[0], y, rtol=1e-3, atol=2e-3)


def test_a_rotation_changes_nothing_in_float_and_spreads_a_large_channel() -> None:
    net = Attention(True).eval()
    with torch.no_grad():
        net.k.weight[3] *= 20.0
        y = net(X)

    def error(**facets: Any) -> float:
        kept = {"key": {"granularity": "per_token", **facets}}
        sim = calibrated(bt.QuantizationSimModel(net, X, preset=FLOAT, kv_cache=kept), [X])
        with torch.no_grad():
            return float((sim.model(X) - y).norm() / y.norm())

    assert error(format="int16", rotated=True) < 1e-4
    assert error(format="int4", rotated=True) < 0.8 * error(format="int4")


def test_a_rotation_is_named_with_its_matrix_and_stays_where_it_is() -> None:
    rotated = {"format": "int8", "rotated": True}
    sim = bt.QuantizationSimModel(Attention(True), X, preset=FLOAT, kv_cache={"key": rotated})
    assert "keys rotated by a Hadamard matrix of 8 channels" in str(sim.coverage())
    (site,) = sim.quantizers.values()
    assert site.spec is not None and spec_from_json(spec_to_json(site.spec)) == site.spec
    site.spec = replace(site.spec, format=parse_format("uint4"), rotation=None)
    assert "uint4 asymmetric per channel over all tokens, minmax, rotated" in str(sim.coverage())
    with pytest.raises(
        ConfigError, match=r"a rotation stands around the grid of keys and values only.*make the simulation"
    ):
        site.spec = replace(site.spec, rotation=-1)
    places = {("matmul", 1): CachePlace("key", "matmul", 1, replace(site.spec, rotation=-2), 6, 12, 96)}
    assert "by a random orthogonal matrix, as no Hadamard matrix has this size, of 6 channels" in describe(places)


def test_rules_ask_for_it_and_take_it_back() -> None:
    rules: dict[str, Any] = {"preset": "w8", "kv_cache": {"key": "int8", "value": "int8"}}
    sim = bt.QuantizationSimModel(Attention(True), X, config_file=rules)
    key, value = [name for name in sim.quantizers if ".input[" in name]
    rules["rules"] = [{"match": key, "input": None}]
    sim = bt.QuantizationSimModel(Attention(True), X, config_file=rules)
    assert key not in sim.quantizers and value in sim.quantizers


BAD: dict[str, tuple[Any, str]] = {
    "unknown": ({"keys": "int8"}, r"unknown key 'keys' \(did you mean 'key'\?\)"),
    "nothing": ({"key": None}, "it asks for neither keys nor values"),
    "format": ({"key": "int9x"}, "kv_cache.key: there is no number format of this name"),
    "granularity": ({"value": {"format": "int8", "granularity": "per_tokn"}}, "did you mean 'per_token'"),
    "group": ({"value": {"format": "int8", "group": 8}}, "group 8 does not go with per_token"),
    "recent": ({"key": "int8", "recent": -1}, "-1 is not a number of tokens"),
    "rotated": ({"key": {"format": "int8", "rotated": 1}}, "kv_cache.key: rotated is 1.*write true or false"),
    "no mapping": ("int8", 'it is a str.*write {"key": "int8", "value": "int8"}'),
}


@pytest.mark.parametrize("given, message", BAD.values(), ids=BAD)
def test_what_is_no_cache_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_kv_cache(given)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache: the model has no attention.*scaled_dot_product_attention"):
        bt.QuantizationSimModel(nn.Linear(4, 4), torch.randn(2, 4), kv_cache={"key": "int8"})
    assert parse_kv_cache(None) is None and isinstance(parse_kv_cache({"key": "int8"}), KvCache)
