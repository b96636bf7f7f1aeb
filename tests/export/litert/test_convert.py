"""LiteRT files: fixed point against rational arithmetic, and every layer of many nets against the simulation."""

from __future__ import annotations

from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

from bitwright.cli import app
from bitwright.compare.litert import FlatFile
from bitwright.compare.report import VerifyReport
from bitwright.compare.verify import verify_folder, verify_layers
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ConfigError, ExportError
from bitwright.executors.rounding import (
    high_product,
    quantize_multiplier,
    rescaled,
    rescaled_once,
    rescaled_wide,
    rescaling_error,
    rounded_shift,
    wide_rescaling_error,
)
from bitwright.export.samples import read_samples
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.runtimes.adapters import open_file
from bitwright.torch import quantize
from tests.support.simulations import calibrated


def images(count: int = 3, rows: int = 8, size: int = 12, channels: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, channels, size, size, generator=generator) for _ in range(count)]


def exported(model: nn.Module, batches: list[Any], path: Path, **options: Any) -> Any:
    """The result of ``quantize`` for LiteRT."""
    options = {"recipe": ["fold"], "target": "litert", **options}
    return quantize(model.eval(), batches, path=path, filename_prefix="net", progress=False, **options)


def kinds(path: Path) -> list[str]:
    """Operators of the file in a folder, in execution order."""
    file = FlatFile((path / "net.tflite").read_bytes())
    return [file.kinds[op.opcodeIndex] for op in file.graph.operators]


def few_differ(report: VerifyReport) -> bool:
    """Whether at least 99 % of the codes of every layer are equal with either kind of kernels; of few, all but two."""
    found = [a for row in report.rows for a in (row.as_float, row.as_integer)]
    return all(round((1 - a.equal) * a.elements) <= max(2.0, 0.01 * a.elements) and a.lsb <= 1.005 for a in found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    path = tmp_path_factory.mktemp("exported")
    exported(model, images(), path)
    return path


def test_a_convolutional_net_runs_on_integers_and_agrees(folder: Path) -> None:
    report = verify_folder(folder, runtime="litert")
    assert report.ok, str(report)
    assert few_differ(report)
    assert all(row.kernel.endswith("int8") for row in report.rows[1:])
    _, inputs, outputs = read_samples(folder / "net_samples.npz")
    for reference in (True, False):
        found = open_file("litert", folder / "net.tflite", reference=reference).run(inputs)
        assert found.keys() == outputs.keys()
        np.testing.assert_allclose(found["output"], outputs["output"], atol=0.02)


def test_floats_are_converted_at_the_ends_only_and_axes_once(folder: Path) -> None:
    found = kinds(folder)
    assert found == [
        "QUANTIZE", "TRANSPOSE", "CONV_2D", "MAX_POOL_2D", "PAD", "DEPTHWISE_CONV_2D", "DEPTHWISE_CONV_2D", "RESHAPE",
        "FULLY_CONNECTED", "DEQUANTIZE",
    ]  # fmt: skip


def test_weights_are_symmetric_and_narrow(folder: Path) -> None:
    file = FlatFile((folder / "net.tflite").read_bytes())
    for tensor in file.graph.tensors:
        data = file.model.buffers[tensor.buffer].data
        if tensor.type == 9 and data is not None:  # INT8
            assert np.asarray(data).view(np.int8).min() >= -127
            assert not np.any(tensor.quantization.zeroPoint)


def test_a_changed_weight_is_seen(folder: Path) -> None:
    content = bytearray((folder / "net.tflite").read_bytes())
    file = FlatFile(bytes(content))
    weight = next(t for t in file.graph.tensors if t.type == 9 and list(t.shape) == [4, 8])
    place = content.index(bytes(file.model.buffers[weight.buffer].data))
    content[place : place + 8] = bytes(8)
    sites, inputs, outputs = read_samples(folder / "net_samples.npz")
    options: dict[str, Any] = {"outputs": outputs, "runtime": "litert", "flat": bytes(content)}
    report = verify_layers(folder / "net.onnx", sites, inputs, **options)
    assert [row.site for row in report.rows if not row.ok] == ["8.output[0]"]


@pytest.mark.parametrize("what", ["kind", "input", "output", "result of the graph", "buffer"])
def test_a_file_that_counts_beyond_what_it_holds_is_refused(folder: Path, what: str) -> None:
    file = FlatFile((folder / "net.tflite").read_bytes())
    graph = file.graph
    if what == "kind":
        graph.operators[1].opcodeIndex = 99
    elif what == "buffer":
        graph.tensors[1].buffer = 9999
    elif what == "result of the graph":
        graph.outputs = [9999]
    else:
        setattr(graph.operators[1], f"{what}s", [9999])
    builder = flatbuffers.Builder()
    builder.Finish(file.model.Pack(builder), b"TFL3")
    with pytest.raises(ExportError, match="the LiteRT file: it is not a LiteRT file with the notes of an export"):
        FlatFile(bytes(builder.Output()))


def test_the_batch_is_free(folder: Path, tmp_path: Path) -> None:
    sim = OnnxSim(folder / "net_float.onnx")
    rows = {name: array[:5] for name, array in read_samples(folder / "net_samples.npz")[1].items()}
    session = open_file("litert", folder / "net.tflite")
    assert session.run(rows)["output"].shape == (5, 4)
    assert session.run({k: v[:2] for k, v in rows.items()})["output"].shape == (2, 4)
    del sim, tmp_path


class Shifted(nn.Module):
    """A mask of every picture is repeated for its heads, as attention in windows does: lengths that stay are given as -1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.mask = nn.Parameter(torch.randn(1, 4, 1, 10, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.conv(x)
        return (found.unsqueeze(2) * self.mask.expand(x.shape[0], -1, -1, -1, -1)).sum((1, 2))


def test_what_is_repeated_for_every_row_keeps_its_other_lengths(tmp_path: Path) -> None:
    exported(Shifted(), images(), tmp_path)
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok, str(report)
    session = open_file("litert", tmp_path / "net.tflite")
    (found,) = session.run({"x": images(1, 5)[0].numpy()}).values()
    assert found.shape == (5, 10, 10)


def test_onnx_models_and_the_format_option(folder: Path, tmp_path: Path) -> None:
    _, inputs, _ = read_samples(folder / "net_samples.npz")
    sim = calibrated(OnnxSim(folder / "net_float.onnx"), [inputs])
    files = sim.export(tmp_path, "net", format="tflite")
    assert files.tflite == tmp_path / "net.tflite" and files.tflite in files.files
    assert verify_folder(tmp_path, runtime="litert").ok
    assert sim.verify(runtime="litert").ok
    with pytest.raises(ConfigError, match="files for openvino_cpu are onnx, not tflite.*target='litert'"):
        sim.export(tmp_path, "net", target="openvino_cpu", format="tflite")
    with pytest.raises(ConfigError, match="'tflit' is not a format.*did you mean 'tflite'"):
        sim.export(tmp_path, "net", format="tflit")  # type: ignore[arg-type]


def test_an_input_that_is_returned_as_it_is_has_one_name(folder: Path, tmp_path: Path) -> None:
    model = onnx.load(folder / "net_float.onnx")
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    tag = onnx.helper.make_tensor_value_info("tag", onnx.TensorProto.FLOAT, [batch, 4])
    model.graph.input.append(tag)
    model.graph.output.insert(0, tag)
    _, inputs, _ = read_samples(folder / "net_samples.npz")
    rows = len(next(iter(inputs.values())))
    given = {**inputs, "tag": np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)}
    sim = calibrated(OnnxSim(model), [given])
    sim.export(tmp_path, "net", format="tflite")
    session = open_file("litert", tmp_path / "net.tflite")
    assert np.array_equal(session.run(given)["tag"], given["tag"])
    assert verify_folder(tmp_path, runtime="litert").ok


def test_commands(folder: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    model = str(folder / "net_float.onnx")
    found = run(app, ["quantize", model, "--format", "tflite", "--out", str(tmp_path), "--prefix", "net"])
    assert found.exit_code == 0, found.output
    assert "net.tflite" in found.output
    found = run(app, ["verify", str(tmp_path), "--runtime", "litert"])
    assert found.exit_code == 0 and "equal (reference)" in found.output, found.output
    found = run(app, ["benchmark", str(folder), "--runtime", "litert", "--threads", "1", "--seconds", "0.05"])
    assert found.exit_code in (0, 1) and "In litert" in found.output, found.output


def test_a_folder_without_a_litert_file_says_how_to_get_one(folder: Path, tmp_path: Path) -> None:
    _, inputs, _ = read_samples(folder / "net_samples.npz")
    sim = calibrated(OnnxSim(folder / "net_float.onnx"), [inputs])
    sim.export(tmp_path, "net")
    with pytest.raises(ExportError, match="no LiteRT file net.tflite.*target='litert'"):
        verify_folder(tmp_path, runtime="litert")


def test_what_litert_cannot_say_names_the_site(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.atan(self.conv(x))

    with pytest.raises(ExportError, match=r"\(Atan\): it has no form in LiteRT files.*docs/litert.md"):
        exported(Odd(), images(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_refused_operator_is_named_by_the_site_behind_a_change_of_shape(tmp_path: Path) -> None:
    """A GRU has an axis of directions, which a Squeeze takes away in front of its quantizer."""
    with pytest.raises(ExportError, match=r"^0\.l0\.forward\.output\[0\] \(GRU\): it has no form in LiteRT files"):
        exported(nn.Sequential(nn.GRU(4, 4), First()), [torch.randn(3, 2, 4)], tmp_path)


class First(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0]


def test_operators_in_float_because_of_a_constant_are_noted(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Conv2d(4, 4, 1))
    notes = exported(model, images(), tmp_path).exported.notes
    assert "DEQUANTIZE" in kinds(tmp_path)[:-1]
    (told,) = [note for note in notes if note.startswith("1.output[0]: PRelu is computed in float")]
    assert told.endswith(" is in float") and "its constant" in told


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    sim = OnnxSim(folder / "net.onnx")
    with pytest.raises(ConfigError, match=r"not installed.*pip install 'bitwright\[litert\]'"):
        sim.export(tmp_path, "net", target="litert")
    with pytest.raises(ConfigError, match=r"not installed.*pip install 'bitwright\[litert\]'"):
        verify_folder(folder, runtime="litert")


def test_the_default_recipe_leaves_in_float_what_it_would_widen_with_a_zero_point(tmp_path: Path) -> None:
    """One input is 1000 times as large as the others: 8 bits for all of them drown the outputs in noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    with torch.no_grad():
        model[0].weight[:, 0] = 0.002
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([1000.0] + [1.0] * 7)
    batches = [sizes * (torch.rand(16, 8, generator=generator) - 0.25) for _ in range(3)]
    result = exported(model, batches, tmp_path, recipe=None, effort="quick")
    assert "float at 0.input[0]" in str(result.report)
    (made,) = open_file("litert", tmp_path / "net.tflite").run({"input": batches[0].numpy()}).values()
    assert result.plain is not None and result.quality.sqnr > result.plain.sqnr + 5
    assert sqnr(result.sim.model(batches[0]).detach().numpy(), made) > 60


FACTORS = [1e-6, 0.0113, 0.2, 0.25, 0.3, 0.4999, 0.5, 0.75, 0.999999999999, 1.0, 1.7, 5.0]


def away(value: Fraction) -> int:
    """To nearest, a half away from zero."""
    return floor(abs(value) + Fraction(1, 2)) * (1 if value >= 0 else -1)


def sums(bits: int = 24) -> np.ndarray:
    return np.random.default_rng(0).integers(-(1 << bits), 1 << bits, 500)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_is_its_mantissa_to_31_bits(factor: float) -> None:
    mantissa, shift = (int(part) for part in quantize_multiplier(factor))
    assert 1 << 30 <= mantissa < 1 << 31
    assert abs(Fraction(mantissa) * Fraction(2) ** (shift - 31) / Fraction(factor) - 1) <= Fraction(1, 1 << 31)


def test_a_factor_that_no_shift_reaches_is_zero() -> None:
    assert [int(part) for part in quantize_multiplier(2.0**-40)] == [0, 0]
    assert int(rescaled(1 << 30, *quantize_multiplier(2.0**-40))) == 0


@pytest.mark.parametrize("factor", FACTORS)
def test_halves_go_upwards_first_and_away_from_zero_then(factor: float) -> None:
    mantissa, shift = (int(part) for part in quantize_multiplier(factor))
    for x in sums().tolist():
        first = floor(Fraction(x * 2 ** max(shift, 0) * mantissa, 1 << 31) + Fraction(1, 2))
        assert int(rescaled(x, mantissa, shift)) == away(Fraction(first, 2 ** max(-shift, 0)))


def test_half_of_a_product_is_rounded_upwards() -> None:
    assert high_product([3, -3, 1, -1], 1 << 29).tolist() == [1, -1, 0, 0]
    assert high_product([2, -2], 1 << 29).tolist() == [1, 0]  # gemmlowp's nudge: a negative half goes to zero
    assert rounded_shift([1, -1, 3, -3, 5], 1).tolist() == [1, -1, 2, -2, 3]


@pytest.mark.parametrize("factor", [0.1301234567, 0.2612345678, 0.3012345678, 0.4912345678, 0.6012345678])
def test_the_error_bound_holds_and_is_reached(factor: float) -> None:
    x = np.arange(-40000, 40000)
    off = np.abs(rescaled(x, *quantize_multiplier(factor)) - x * factor) - 0.5
    assert off.max() <= rescaling_error(factor) + 1e-4
    assert off.max() >= 0.9 * rescaling_error(factor) - 1e-3
    once = np.abs(rescaled_once(x, *quantize_multiplier(factor)) - x * factor) - 0.5
    assert once.max() <= 1e-4


@pytest.mark.parametrize("factor", [1e-4, 0.0113, 0.3])
def test_wide_sums_are_rounded_once_with_a_short_mantissa(factor: float) -> None:
    x = np.random.default_rng(0).integers(-int(32000 / factor), int(32000 / factor), 20000)
    off = np.abs(rescaled_wide(x, *quantize_multiplier(factor)) - x * factor) - 0.5
    bound = wide_rescaling_error(factor, 32000)
    assert bound <= 1.0 and off.max() <= bound + 1e-3 and off.max() >= bound / 2 - 1e-3


class Pictures(nn.Module):
    """Convolutions of all kinds, joins, pools, resizing, changes of the order of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 8, 3, groups=2, padding=1)
        self.dilated = nn.Conv2d(8, 8, 3, dilation=2, padding=2)
        self.squeeze = nn.Conv2d(8, 8, 1)
        self.shuffled = nn.Conv2d(8, 16, 3, padding=1)
        self.joined = nn.Conv2d(17, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.grouped(x))
        y = x + F.relu(self.dilated(x))
        y = y * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
        y = y.reshape(y.shape[0], 2, 4, y.shape[2], y.shape[3]).transpose(1, 2).flatten(1, 2)
        left, right = y.chunk(2, 1)
        up = F.pixel_shuffle(self.shuffled(y), 2)
        near = F.interpolate(left - right, scale_factor=2.0, mode="nearest")
        pooled = F.avg_pool2d(F.pad(up, (1, 1, 1, 1)), 3, 1)
        joined = torch.cat([up, near, pooled, y.repeat_interleave(1, 1)[:, :5].amax((2, 3), keepdim=True).expand(
            -1, 5, up.shape[2], up.shape[3])], 1)  # fmt: skip
        return self.joined(joined).clamp(-0.5, 0.75)[:, :, ::2, 1:-1]


class Encoder(nn.Module):
    """Attention, norms and a linear layer on a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.head(self.layer(self.embedding(tokens)).mean(1)))


class Recurrent(nn.Module):
    """A bidirectional LSTM whose last states are read, and one that returns its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(6, 5, batch_first=True)
        self.both = nn.LSTM(5, 4, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        sequence, (last, _) = self.both(self.first(x)[0])
        return self.head(torch.cat([sequence[:, -1], last.transpose(0, 1).flatten(1)], 1))


@pytest.mark.slow
def test_pictures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = exported(Pictures(), images(rows=4, channels=4), tmp_path)
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok and few_differ(report), str(report)
    inner = [row for row in report.rows if row.ops[-1] != "QUANTIZE"]
    assert len(inner) >= 12
    found = kinds(tmp_path)
    assert found.count("QUANTIZE") <= 3, (found, result.exported.notes)
    assert {"CONV_2D", "HARD_SWISH", "LOGISTIC", "DEPTH_TO_SPACE", "RESIZE_NEAREST_NEIGHBOR"} <= set(found)


def test_an_encoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = [torch.randint(0, 11, (4, 9)) for _ in range(3)]
    result = exported(Encoder(), tokens, tmp_path)
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok and few_differ(report), str(report)
    assert {row.specified for row in report.rows} <= {1.0, None}
    assert {"BATCH_MATMUL", "SOFTMAX", "GELU", "TANH", "FULLY_CONNECTED"} <= set(kinds(tmp_path))
    told = [note for note in result.exported.notes if "computed in float in the LiteRT file" in note]
    assert told and all("LayerNormalization" in note or "Mul is computed" in note for note in told)


@pytest.mark.slow
def test_lstm_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    result = exported(Recurrent(), batches, tmp_path)
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok, str(report)
    assert kinds(tmp_path).count("UNIDIRECTIONAL_SEQUENCE_LSTM") == 3
    assert any("the states of an LSTM have a fixed batch" in note for note in result.exported.notes)
    file = FlatFile((tmp_path / "net.tflite").read_bytes())
    weights = [t for t in file.graph.tensors if t.type == 9 and list(t.shape) == [5, 6]]
    assert len(weights) == 4  # of the gates, one byte per number


def test_activations_of_16_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Sigmoid(), nn.Flatten(),
        nn.Linear(200, 4),
    )  # fmt: skip
    exported(net, images(), tmp_path, preset="w8a16")
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok, str(report)
    assert all(row.kernel.endswith("int16") for row in report.rows[1:])
    assert min(min(end.as_float, end.as_integer) for end in report.outputs) > 70


@pytest.mark.parametrize("preset", ["w8a8", "w8a16", "w8"])
def test_convolutions_without_a_bias(tmp_path: Path, preset: str) -> None:
    """The runtime refuses a CONV_2D of two inputs, on integers too."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2, bias=False), nn.ConvTranspose2d(8, 4, 2, bias=False), nn.Flatten(),
        nn.Linear(4 * 49, 4, bias=False),
    )  # fmt: skip
    exported(net, images(), tmp_path, preset=preset)
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok, str(report)
