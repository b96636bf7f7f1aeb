"""Ranges that are chosen at run time: one arithmetic in numpy, torch, ONNX Runtime's own operators and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright.core.numerics.affine import dequantize, encode, fake_quantize, quantize_at_run_time
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import parse_format, parse_scale_format
from bitwright.core.numerics.granularity import PerChannel, PerTensor, PerToken
from bitwright.core.numerics.ranges import choose_range_of
from bitwright.core.numerics.spec import PRESETS, Preset, QuantSpec, dynamic_spec, weight_spec
from bitwright.errors import ConfigError, ExportError, FormatError
from bitwright.packed.layers import Grid
from tests.methods.transformer import with_outliers
from tests.support import data
from tests.support.simulations import calibrated

Array = NDArray[Any]
H = onnx.helper


def encoding_of(spec: QuantSpec) -> Encoding:
    one, zero = np.ones((), np.float32), np.zeros((), np.int64)
    return Encoding(spec.format, one, zero, spec.granularity, spec.scale_format, None, dynamic=True)


def tokens(rows: int = 40, width: int = 96) -> Array:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, rows, width)) * np.exp2(rng.integers(-20, 20, (2, rows, 1)))
    x[0, 0], x[0, 1], x[0, 2] = 0, np.abs(x[0, 1]), -np.abs(x[0, 2])
    x[1, :, 7] *= 1000
    return x.astype(np.float32)


def run(
    nodes: list[Any], feeds: dict[str, Array], outputs: list[str], constants: dict[str, Array] | None = None
) -> list[Array]:
    kinds = {np.dtype(np.float32): 1, np.dtype(np.uint8): 2, np.dtype(np.int8): 3}
    ins = [H.make_tensor_value_info(n, kinds[a.dtype], a.shape) for n, a in feeds.items()]
    outs = [H.make_empty_tensor_value_info(n) for n in outputs]
    held = [onnx.numpy_helper.from_array(a, n) for n, a in (constants or {}).items()]
    domains = [H.make_opsetid("", 21), H.make_opsetid("com.microsoft", 1)]
    model = H.make_model(H.make_graph(nodes, "g", ins, outs, held), opset_imports=domains, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def test_unsigned_bytes_per_tensor_are_dynamic_quantize_linear() -> None:
    enc = encoding_of(dynamic_spec("uint8", PerTensor()))
    nodes = [H.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])]
    for x in tokens().reshape(80, 96):
        q, s, z = run(nodes, {"x": x}, ["q", "s", "z"])
        codes, scale, zero = quantize_at_run_time(x, enc)
        assert np.array_equal(codes, q)
        if x.any():
            assert scale == s and zero == z
        static = Encoding(enc.format, s, z)
        if x.any():
            assert np.array_equal(fake_quantize(x, enc), dequantize(q, static))


@pytest.mark.parametrize("size", [16, 32, 128])
def test_blocks_of_tokens_are_those_of_matmulnbits_at_accuracy_level_4(size: int) -> None:
    """One code per weight: what the kernel returns is the value of a code of the activation, times that weight's."""
    x = np.random.default_rng(1).normal(size=(8, 128)) * np.exp2(np.arange(-4.0, 4.0))[:, None]
    x = x.astype(np.float32)
    k = x.shape[1]
    codes = np.full((k, k), 8, np.uint8)
    np.fill_diagonal(codes, 9)  # 1, in steps of 1 from 8
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(k, k // size, size // 2)
    node = H.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=k, N=k, bits=4, block_size=size, accuracy_level=4
    )  # fmt: skip
    (y,) = run([node], {"x": x}, ["y"], {"w": packed, "s": np.ones(k * k // size, np.float32)})
    wanted = fake_quantize(x, encoding_of(dynamic_spec("int8", PerToken(size))))
    step = np.abs(wanted.reshape(8, -1, size)).max(2) / 127  # the kernel's float sums lose a little, and no code
    assert (np.abs(y - wanted).reshape(8, -1, size) < 0.05 * step[..., None]).all()


def test_q8_0_is_the_block_of_llama_cpp() -> None:
    """``quantize_row_q8_0`` of ggml on x86: ``id = 127 / amax`` in float32, nearest even, the scale stored as float16."""
    x = np.random.default_rng(2).normal(size=(6, 96)).astype(np.float32)
    blocks = x.reshape(6, 3, 32)
    largest = np.abs(blocks).max(2, keepdims=True)
    d, inverse = (largest / np.float32(127)), np.float32(127) / largest
    wanted = np.rint(blocks * inverse) * d.astype(np.float16).astype(np.float32)
    spec = PRESETS["q8_0"].activation
    assert spec is not None
    np.testing.assert_array_equal(fake_quantize(x, encoding_of(spec)), wanted.reshape(x.shape))


def test_tokens_in_float8_and_float4_are_static_quantization_with_the_range_of_each() -> None:
    x = tokens()[0, :8]
    for fmt, scale_format in (("float8_e4m3", "float32"), ("float4_e2m1", "bfloat16")):
        spec = QuantSpec(fmt, PerChannel(0), scale_format=scale_format)
        static = encode(*choose_range_of(x[3:], spec, PerChannel(0)), spec, PerChannel(0))
        found = fake_quantize(x[3:], encoding_of(dynamic_spec(fmt, scale_format=parse_scale_format(scale_format))))
        np.testing.assert_allclose(found, fake_quantize(x[3:], static), rtol=2e-7)
    spec = PRESETS["mxfp4"].weight
    assert spec is not None
    from bitwright.core.numerics.granularity import PerBlock

    granularity = PerBlock(32, 1, 0)
    static = encode(*choose_range_of(x, spec, granularity), spec, granularity)
    activation = PRESETS["mxfp4_dynamic"].activation
    assert activation is not None
    np.testing.assert_array_equal(fake_quantize(x, encoding_of(activation)), fake_quantize(x, static))


@pytest.mark.engine
@pytest.mark.parametrize("bits, token", [(8, PerToken()), (8, PerToken(32)), (4, PerToken())])
def test_centred_integers_are_those_of_compressed_tensors(bits: int, token: PerToken) -> None:
    """The functions that transformers calls, bit for bit: the scale of 255 (or 15) steps from one end to the other."""
    library = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize as theirs
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    strategy: dict[str, Any] = (
        {"strategy": "group", "group_size": token.block} if token.block else {"strategy": "token"}
    )
    args = library.QuantizationArgs(num_bits=bits, type="int", symmetric=True, dynamic=True, **strategy)
    x = torch.from_numpy(tokens())
    scale, zero = compute_dynamic_scales_and_zp(x, args, nn.Identity())
    enc = encoding_of(dynamic_spec(f"int{bits}c", token))
    wanted = theirs(x, scale, zero, args)
    assert torch.equal(fake_quantize(x, enc), wanted) and torch.equal(Grid(enc)(x), wanted)
    codes = quantize_at_run_time(x, enc)[0]
    assert codes.min() == enc.format.qmin and codes.max() == enc.format.qmax  # type: ignore[union-attr]
    plain = encoding_of(dynamic_spec(f"int{bits}", token))
    assert not torch.equal(fake_quantize(x, plain), wanted)


def test_centred_integers_are_for_ranges_at_run_time_and_for_no_onnx_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int8c is a rule for ranges that are chosen at run time.*use int8"):
        QuantSpec("int8c")
    with pytest.raises(FormatError, match="only a signed grid with all of its codes can be centred"):
        parse_format("uint8c")
    preset = Preset(weight_spec("int8"), dynamic_spec("int8c"))
    path = tmp_path / "net.onnx"
    torch.onnx.export(nn.Linear(64, 8).eval(), (X[0],), str(path), dynamo=False, input_names=["x"])
    sims: list[Any] = [
        bt.QuantizationSimModel(nn.Linear(64, 8), X[0], preset=preset),
        bo.QuantizationSimModel(str(path), preset=preset),
    ]
    for sim, example in zip(sims, ([X[0]], []), strict=True):
        sim.compute_encodings()
        with pytest.raises(ExportError, match="border between two codes of int8c.*quantize it to int8"):
            sim.export(tmp_path / "out", "net", *example)


SPECS = {
    "int8c per token": dynamic_spec("int8c"),
    "int8c in blocks": dynamic_spec("int8c", PerToken(32)),
    "int8 per tensor": dynamic_spec("int8", PerTensor()),
    "int8 per token": dynamic_spec("int8"),
    "int4 along axis 1": dynamic_spec("int4", PerToken(axis=1)),
    "uint8 per token": dynamic_spec("uint8"),
    "uint8 per tensor": dynamic_spec("uint8", PerTensor()),
    "int8 in blocks": dynamic_spec("int8", PerToken(32)),
    "int8 in blocks that do not divide": dynamic_spec("int8", PerToken(40)),
    "q8_0": dynamic_spec("int8", PerToken(32), scale_format=parse_scale_format("float16")),
    "fp8": dynamic_spec("float8_e4m3"),
    "fp4": dynamic_spec("float4_e2m1", PerToken(32), scale_format=parse_scale_format("e8m0")),
    "fp4 per token": dynamic_spec("float4_e2m1", scale_format=parse_scale_format("bfloat16")),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_numpy_torch_and_the_operators_of_an_export_agree(spec: QuantSpec) -> None:
    import onnx_ir as ir

    from bitwright.export.qdq.markers import ATTRIBUTE, DOMAIN, OP_TYPE
    from bitwright.export.qdq.write import to_qdq

    x = np.clip(tokens(), -1e4, 1e4)
    enc = encoding_of(spec)
    wanted = fake_quantize(x, enc)
    np.testing.assert_array_equal(fake_quantize(torch.from_numpy(x), enc).numpy(), wanted)
    codes, *_ = quantize_at_run_time(x, enc)
    assert codes.shape == x.shape
    marker = H.make_node(OP_TYPE, ["x"], ["m"], domain=DOMAIN, **{ATTRIBUTE: "site"})
    nodes = [marker, H.make_node("Identity", ["m"], ["y"])]
    info = [H.make_tensor_value_info(n, 1, list(x.shape)) for n in "xy"]
    domains = [H.make_opsetid("", 21), H.make_opsetid(DOMAIN, 1)]
    model = H.make_model(H.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=domains, ir_version=10)
    written = ir.to_proto(to_qdq(ir.from_proto(model), {"site": enc}).model)
    onnx.checker.check_model(written, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(written.SerializeToString(), options, providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], wanted)


KERNELS = {"w8a8_dynamic": "MatMulInteger", "w8a8_dynamic_tensor": "MatMulInteger", "w4a8_dynamic": "MatMulNBits"}


@pytest.mark.parametrize("preset", KERNELS)
def test_kernels_in_integers_compute_what_is_simulated(preset: str, tmp_path: Path) -> None:
    """Codes of up to 255 and weights of up to 127: products of signed weights would saturate on CPUs without VNNI."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False), nn.Linear(32, 32))
    with torch.no_grad():
        net[0].weight.sign_().mul_(0.1)  # all codes are 127 or -127
    x = X.abs() if preset.endswith("tensor") else X
    sim = calibrated(bt.QuantizationSimModel(net, x, preset=preset))
    sim.export(tmp_path, "net", x, weight_only="fused")
    types = [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node]
    assert types.count(KERNELS[preset]) == 3 and ("DynamicQuantizeLinear" in types) == preset.endswith("tensor")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        wanted = sim.model(x).numpy()
    noise = np.abs(found - wanted)
    scale = np.abs(wanted).max()
    # a code of the second layer's input may fall on the other side of a border
    assert noise.max() < 0.02 * scale and np.median(noise) < 1e-5 * scale


class Net(nn.Module):
    """Two layers and an attention-like product, whose operands stay in float."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(self.up(x).relu())
        return h @ h.transpose(-1, -2)


X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
DYNAMIC = [name for name, preset in PRESETS.items() if preset.activation and preset.activation.dynamic]


@pytest.mark.parametrize("preset", DYNAMIC)
def test_both_front_ends_simulate_export_and_verify(preset: str, tmp_path: Path) -> None:
    sim = bt.QuantizationSimModel(Net(), X, preset=preset)
    assert not sim.needs_data
    sim.compute_encodings()
    sites = {name for name, site in sim.quantizers.items() if site.spec is not None and site.spec.dynamic}
    assert sites == {"up.input[0]", "down.input[0]"}
    with torch.no_grad():
        y = sim.model(X).numpy()
        token = sim.model(X[:, :1]).numpy()  # another length, another range
    sim.export(tmp_path, "net", X)
    assert sim.verify(X).ok
    assert "range at run time" in str(sim.coverage()) and "at run time, where products" in str(sim.coverage())
    plain = bt.QuantizationSimModel(Net(), X, preset="w8")
    float_path = tmp_path / "float.onnx"
    torch.onnx.export(
        Net().eval(), (X,), str(float_path), dynamo=False, input_names=["x"], output_names=["y"], opset_version=18
    )
    other = calibrated(bo.QuantizationSimModel(str(float_path), preset=preset))
    np.testing.assert_allclose(other.session.run(None, {"x": X.numpy()})[0], y, rtol=2e-3, atol=2e-3)
    assert np.isfinite(token).all() and plain.needs_data is False


def test_channels_of_outliers_cost_a_language_model_little_per_token(shared_data: object) -> None:
    """Four channels of every norm, 16 times larger, cost 2.4 % of perplexity per token, as in torchao, and more per tensor."""
    stories = data.stories()[:8, :129]
    model = with_outliers(data.trained("stories260k"), stories[:1, :-1])
    found = {}
    for preset in ("w8a8_dynamic", "w8a8_dynamic_tensor"):
        sim = calibrated(bt.QuantizationSimModel(model, stories[:1, :-1], preset=preset))
        found[preset] = data.perplexity(sim.model, stories) / data.perplexity(model, stories)
    assert 1 < found["w8a8_dynamic"] < min(1.029, found["w8a8_dynamic_tensor"])


def test_a_rule_asks_for_it() -> None:
    rules = {
        "preset": "w8",
        "rules": [{"match": "up", "input": {"format": "int8", "dynamic": True, "granularity": {"per_token": 32}}}],
    }
    sim = calibrated(bt.QuantizationSimModel(Net(), X, config_file=rules))
    assert sim.quantizers["up.input[0]"].spec == dynamic_spec("int8", PerToken(32))
    assert "down.input[0]" not in sim.quantizers
    rules = {
        "preset": "w8a8_dynamic",
        "rules": [{"match": "up", "input": None}, {"match": "down", "input": {"dynamic": False, "format": "uint8"}}],
    }
    sim = bt.QuantizationSimModel(Net(), X, config_file=rules)
    assert sim.needs_data and "up.input[0]" not in sim.quantizers
    sim.compute_encodings([X])
    assert sim.quantizers["down.input[0]"].encoding is not None and not sim.quantizers["down.input[0]"].encoding.dynamic


def test_gradients_pass_straight_through() -> None:
    sim = calibrated(bt.QuantizationSimModel(Net(), X, preset="w8a8_dynamic"))
    x = X.clone().requires_grad_()
    sim.model(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0 and torch.isfinite(x.grad).all()


def test_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    sim = calibrated(bt.QuantizationSimModel(Net(), X, preset="q8_0"))
    sim.save_checkpoint(tmp_path / "kept")
    fresh = bt.QuantizationSimModel(Net(), X, preset="q8_0")
    fresh.load_checkpoint(tmp_path / "kept")
    assert torch.equal(fresh.model(X), sim.model(X))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "per channel": ({"granularity": PerChannel(0)}, r"of a tensor or of a token, not per channel.*PerToken\(32\)"),
    "fixed": ({"fixed_range": (-1.0, 1.0)}, "has no fixed ends.*leave out fixed_range or dynamic"),
    "shared scales": ({"scale_format": "e4m3"}, "share no number, as those of e4m3 do.*use float32, float16"),
    "half": ({"format": "float16"}, "float16 has no range"),
    "sign": (
        {"format": "uint8", "symmetry": "symmetric"},
        "uint8 symmetric cannot be chosen.*uint2 to uint16 with asymmetric",
    ),
    "calibrated tokens": ({"dynamic": False, "granularity": PerToken()}, "follow from each run, and dynamic is False"),
}


@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_what_cannot_be_chosen_at_run_time_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"format": "int8", "granularity": PerTensor(), "dynamic": True, **changes}
    with pytest.raises(ConfigError, match=message):
        QuantSpec(**given)
