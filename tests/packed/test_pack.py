"""Models that hold codes: answers of the simulation, kernels of torch, memory, files, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT_FORMATS, IntFormat, parse_format
from bitwright.core.numerics.granularity import PerChannel, PerToken
from bitwright.errors import CalibrationError, ConfigError, ExportError, ModelError
from bitwright.llm.packed import PackedWeight
from bitwright.packed.layers import Fp8Linear, Grid, Int4WeightLinear, Int8WeightLinear, Parts, exact_products
from bitwright.packed.pack import DOCUMENT, TENSORS, _digest
from bitwright.torch import QuantizationSimModel, load_packed, pack
from tests.support.simulations import calibrated


class Residual(nn.Module):
    """Reads one activation on its grid in a layer and in a sum: both have to see the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8, dilation=2)
        self.point = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = x + self.point(nn.functional.relu6(self.depthwise(x)))
        return self.head(nn.functional.max_pool2d(x, 2).mean((2, 3)))


def simulated(model: nn.Module, x: torch.Tensor, preset: str = "w8a8") -> QuantizationSimModel:
    return calibrated(QuantizationSimModel(model.eval(), x, preset=preset), [x])


def perceptron(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).to(dtype)


def test_a_static_network_answers_within_a_code_and_loads_without_its_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    sim = simulated(Residual(), x)
    packed = pack(sim, tmp_path)
    loaded = load_packed(tmp_path)
    unseen = torch.randn(7, 3, 8, 8)  # another length of the free axis
    with torch.no_grad():
        expected = sim.model(unseen)
    step = float(sim.quantizers["head.output[0]"].encoding.scale)
    assert ((packed(unseen) - expected).abs() / step).max() <= 1.001
    assert torch.equal(loaded(unseen), packed(unseen))
    kernels = {row.layer: row.kernel for row in loaded.layers}
    assert kernels == {
        name: "int8" if exact_products("linear" if name == "head" else "conv2d") else "dequantized" for name in kernels
    }
    assert sorted(kernels) == ["depthwise", "head", "point", "stem"]
    weights = sum(p.numel() for n, p in sim.model.named_parameters() if "weight" in n)
    channels = sum(p.numel() for n, p in sim.model.named_parameters() if "bias" in n)
    assert packed.bytes <= weights + 16 * channels + 64  # codes, and per channel a scale, a zero point, a bias
    again = copy.deepcopy(packed.model)
    with torch.no_grad():
        assert torch.equal(again(unseen), packed(unseen))


@pytest.mark.parametrize(
    ("preset", "dtype", "kernel", "decibel"),
    [
        ("w8a8_dynamic", torch.float32, "int8", 100),
        ("w8a8_dynamic_tensor", torch.float32, "int8", 100),
        ("w8", torch.bfloat16, "int8 weights", 38),
        ("w4g32", torch.bfloat16, "int4 weights", 38),
        ("w3g32_asym", torch.bfloat16, "int4 weights", 38),
        ("w4_float_zero", torch.bfloat16, "int4 weights", 38),
        ("w4g32", torch.float32, "dequantized", 100),
        ("fp8", torch.float32, "dequantized", 100),
        ("nf4", torch.float32, "dequantized", 100),
        ("w4a8_dynamic", torch.float32, "dequantized", 100),
        ("mxfp4_dynamic", torch.float32, "dequantized", 100),
        ("w8a16", torch.float32, "dequantized", 100),
    ],
)
def test_formats_and_their_kernels(
    preset: str, dtype: torch.dtype, kernel: str, decibel: float, tmp_path: Path
) -> None:
    """In float32 no error but that of sums; in bfloat16 the answers differ by its rounding."""
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    sim = simulated(perceptron(dtype), x, preset)
    packed = pack(sim, tmp_path)
    with torch.no_grad():
        expected = sim.model(x).float()
    found = packed(x).float()
    assert 10 * np.log10(float((expected**2).sum() / ((found - expected) ** 2).sum().clamp(min=1e-30))) > decibel
    loaded = load_packed(tmp_path, perceptron() if packed.form == "modules" else None)
    assert torch.equal(loaded(x).float(), found)
    if kernel != "int8" or exact_products("linear"):
        assert {row.kernel for row in packed.layers if not row.reason.startswith("torch's int")} == {kernel}
    assert all((row.kernel == "dequantized") == bool(row.reason) for row in packed.layers)
    bits = parse_format(
        {"w8a16": "int8", "mxfp4_dynamic": "int4", "nf4": "int4", "fp8": "int8"}.get(preset, f"int{preset[1]}")
    ).bits
    row = packed.layers[0]
    held = max(bits, 4) / 8 * 64 * 96
    assert (
        held <= row.bytes <= held + 96 * 3 * 12
    )  # three groups a row at most of 32 elements, a scale and a zero point each


def test_kernels_of_cpus_that_are_not_here() -> None:
    """Layers that are chosen by the CPU or by the type of the model compute the same as the codes say."""
    generator = torch.Generator().manual_seed(0)
    x, values = torch.randn(5, 64, generator=generator), torch.randn(32, 64, generator=generator).numpy()
    fp8, token = FLOAT_FORMATS["float8_e4m3"], PerToken()
    scale = np.abs(values).max(1) / np.float32(448)
    weight = PackedWeight.encoded("w", values, Encoding(fp8, scale, np.zeros(32, np.int32), PerChannel(0)))
    grid = Encoding(fp8, np.float32(1), np.int32(0), token, dynamic=True)
    bias = torch.randn(32, generator=generator)
    layer = Fp8Linear(Parts("linear", weight, bias, grid, {}, torch.float32))
    expected = Grid(grid)(x) @ torch.from_numpy(weight.dequantize()).t() + bias
    assert torch.allclose(layer(x), expected, rtol=1e-5, atol=1e-4)
    for bits, kind in ((8, Int8WeightLinear), (4, Int4WeightLinear)):
        top = np.float32((1 << (bits - 1)) - 1)
        ints = Encoding(IntFormat(bits), np.abs(values).max(1) / top, np.zeros(32, np.int32), PerChannel(0))
        held = PackedWeight.encoded("w", values, ints)
        made = kind(Parts("linear", held, bias, None, {}, torch.float32))(x[None])
        assert torch.allclose(made[0], x @ torch.from_numpy(held.dequantize()).t() + bias, rtol=1e-4, atol=1e-4)


def test_embeddings_and_tied_weights_hold_one_table_of_codes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50, bias=False))
    model[1].weight = model[0].weight
    tokens = torch.randint(0, 50, (2, 7))
    sim = simulated(model, tokens, "w4g32")
    packed = pack(sim, tmp_path)
    with torch.no_grad():
        assert torch.allclose(packed(tokens), sim.model(tokens), atol=1e-5)
    assert {row.layer: row.kernel for row in packed.layers} == {"1": "dequantized", "0": "rows"}
    assert (tmp_path / TENSORS).stat().st_size < 50 * 32  # bytes: half a byte an element, scales, and names


@pytest.mark.slow
def test_compiled_models_answer_the_same() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    given = ((Residual(), x, "w8a8", "inductor"), (perceptron(), torch.randn(4, 64), "w4a8_dynamic", "aot_eager"))
    for model, example, preset, backend in given:
        sim = simulated(model, example, preset)
        compiled = torch.compile(pack(sim).model, fullgraph=True, backend=backend)
        with torch.no_grad():
            found, expected = compiled(example), sim.model(example)
        assert (found - expected).abs().max() <= expected.abs().max() / 100


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    x = torch.randn(4, 3, 8, 8)
    sim = QuantizationSimModel(Residual().eval(), x)
    with pytest.raises(CalibrationError, match="no encodings yet.*compute_encodings"):
        pack(sim)
    sim.compute_encodings([x], progress=False)
    with pytest.raises(ConfigError, match="not the input of a linear layer.*form='graph'"):
        pack(sim, form="modules")
    with pytest.raises(ConfigError, match="'tree' is not a form.*auto, modules or graph"):
        pack(sim, form="tree")  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="steps of a recurrent layer.*quantized=False"):
        pack(simulated(nn.LSTM(4, 8), torch.randn(3, 2, 4)))


def test_damaged_folders_and_other_models_are_refused(tmp_path: Path) -> None:
    x = torch.randn(2, 64)
    folder = tmp_path / "packed"
    pack(simulated(perceptron(), x, "w8a8_dynamic"), folder)
    with pytest.raises(ConfigError, match="not the program that computes.*same class"):
        load_packed(folder)
    with pytest.raises(ModelError, match="the given Linear does not.*same class"):
        load_packed(folder, nn.Linear(64, 96))
    with pytest.raises(ModelError, match=r"no packed\.json in it.*pack\(sim, folder\)"):
        load_packed(tmp_path)
    document = json.loads((folder / DOCUMENT).read_text())
    for change in ({"kind": "other"}, {"version": 9}, {"dtype": "Tensor"}, {"grids": {}}, {"weights": {}}):
        (folder / DOCUMENT).write_text(json.dumps({**document, **change}))
        with pytest.raises(ModelError, match="not a packed model.*pack the simulation again"):
            load_packed(folder, perceptron())
    graph = tmp_path / "graph"
    pack(simulated(perceptron(), x), graph)
    document = json.loads((graph / DOCUMENT).read_text())
    document["program"]["nodes"][0] = {
        "name": "a",
        "op": "call_function",
        "target": "os.system",
        "args": ["x"],
        "kwargs": {},
    }
    (graph / DOCUMENT).write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"packed\.json, or a shape in packed\.safetensors, was changed since"):
        load_packed(graph)
    document["digest"] = _digest({key: v for key, v in document.items() if key != "digest"}, load_file(graph / TENSORS))
    (graph / DOCUMENT).write_text(json.dumps(document))
    with pytest.raises(ModelError, match="'os.system' is not an operator of torch"):
        load_packed(graph)


def test_a_tensor_of_another_shape_is_refused_when_the_folder_is_loaded(tmp_path: Path) -> None:
    x = torch.randn(2, 64)
    pack(simulated(perceptron(), x), tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    name = next(name for name in tensors if name.startswith("tensors/"))
    save_file({**tensors, name: tensors[name][:-1].clone()}, tmp_path / TENSORS)
    with pytest.raises(
        ModelError, match=r"a shape in packed\.safetensors, was changed since.*pack the simulation again"
    ):
        load_packed(tmp_path)
