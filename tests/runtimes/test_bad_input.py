"""What a user gives by mistake to ``verify``, ``drift`` and ``benchmark``: every answer names it and what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import bitwright
from bitwright.cli import app
from bitwright.errors import BitwrightError, ConfigError, ExportError
from bitwright.export.files.manifest import write_manifest
from bitwright.export.litert.flat import pack, schema
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx.benchmark import benchmark_path
from bitwright.runtimes.adapters import RUNTIMES, open_file, refusals_of
from bitwright.torch import QuantizationSimModel, quantize

pytest.importorskip("ai_edge_litert")
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuantizationSimModel, Path]:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("exported")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    result = quantize(model, [X], recipe=["fold"], path=path, filename_prefix="net", target="litert", progress=False)
    return result.sim, path


@pytest.fixture
def folder(sim: tuple[QuantizationSimModel, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(sim[1], tmp_path / "copy"))


def refused(*command: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in command])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (result.output, result.exception)
    return " ".join(result.output.split())


# ------------------------------------------------------------------------------------------- data of another model

OTHERS: dict[str, Any] = {
    "shape": torch.zeros(4, 3, 9, 9), "type": torch.zeros(4, 3, 8, 8, dtype=torch.int64), "name": {"pixels": X},
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("call", ["verify", "drift", "benchmark"])
def test_data_of_another_model_is_not_blamed_on_the_exporter(sim, call, what):
    calls: dict[str, Callable[[Any], Any]] = {
        "verify": lambda x: sim[0].verify(x, runtime="litert"),
        "drift": lambda x: sim[0].drift("float", "litert", x),
        "benchmark": lambda x: sim[0].benchmark(x, seconds=0.0),
    }
    with pytest.raises(ExportError, match="the model does not run on this example.*this model's own data"):
        calls[call](OTHERS[what])


@pytest.mark.parametrize("what", ["shape", "type", "name"])
def test_data_of_another_model_in_onnx(sim: tuple[QuantizationSimModel, Path], what: str) -> None:
    other = OnnxSim(sim[1] / "net.onnx")
    given = OTHERS[what]
    feeds = {"pixels": X.numpy()} if what == "name" else {"input": given.numpy()}
    for call in (other.verify, lambda x: other.drift("file", "litert", x)):
        with pytest.raises(BitwrightError, match="input|pixels"):
            call(feeds)


def test_a_batch_without_a_sample_agrees_with_nothing(sim: tuple[QuantizationSimModel, Path]) -> None:
    none = X[:0]
    with pytest.raises(ExportError, match="the batch holds no sample: input is 0x3x8x8.*at least one sample"):
        sim[0].verify(none)
    with pytest.raises(ExportError, match="the batch holds no sample"):
        bitwright.drift(f"{sim[1]}@file", "onnxruntime", {"input": none.numpy()})
    with pytest.raises(ExportError, match="example: the batch holds no sample"):
        sim[0].benchmark(none, seconds=0.0)


@pytest.mark.parametrize("runtime", ["onnxruntime", "litert"])
def test_nan_has_no_code(sim: tuple[QuantizationSimModel, Path], runtime: str) -> None:
    data = X.numpy().copy()
    data[0, 0, 0, :2] = np.nan
    with pytest.raises(ExportError, match="its input 'input' is quantized, and the data holds 2 NaN there.*leave"):
        bitwright.drift(f"{sim[1]}@file", runtime, {"input": data})


def test_an_input_that_is_not_given_is_named(sim: tuple[QuantizationSimModel, Path]) -> None:
    with pytest.raises(ExportError, match="net.tflite: litert refuses the file: input are missing.*data of this model"):
        open_file("litert", sim[1] / "net.tflite").run({"pixels": X.numpy()})


def test_an_error_of_the_code_around_a_runtime_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), refusals_of(RUNTIMES["litert"], tmp_path / "net.tflite"):
        raise KeyError(10)


# --------------------------------------------------------------------------------------------- files of another kind


def test_a_file_in_the_place_of_a_folder(folder: Path) -> None:
    for name in ("net.onnx", "net.tflite"):
        said = refused("verify", folder / name)
        assert "it is a file, and an export is a folder" in said and f"wrote: {folder}" in said


def test_benchmark_takes_the_litert_file_of_an_export(folder: Path, tmp_path: Path) -> None:
    report = benchmark_path(folder / "net.tflite", runtime="litert", threads=[1], seconds=0.0)
    assert [cost.name for cost in report.costs] == ["float", "quantized"]
    assert "onnxruntime reads .onnx files remedy: add runtime='litert'" in refused("benchmark", folder / "net.tflite")
    said = refused("benchmark", folder / "net.onnx", "--runtime", "litert")
    assert "net.onnx litert reads .tflite files, and this one is not converted here" in said
    assert "an export with target='litert'" in said
    alone = shutil.copy(folder / "net.tflite", tmp_path / "alone.tflite")
    assert "no export lies beside it" in refused("benchmark", alone, "--runtime", "litert")
    (folder / "net_float.onnx").unlink()
    report = benchmark_path(folder, runtime="litert", threads=[1], seconds=0.0)
    assert [cost.name for cost in report.costs] == ["quantized"], "there is no float file to compare with"


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino", "litert"])
@pytest.mark.parametrize("content", [b"", b"hello", "cut off"])
def test_a_damaged_file_is_not_blamed_on_layers(folder, tmp_path, runtime, content):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    name = "net.tflite" if runtime == "litert" else "net.onnx"
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else (folder / name).read_bytes()[:3000])
    with pytest.raises(ExportError, match=f"{runtime} refuses the file.*copy the file anew: it is damaged"):
        open_file(runtime, file)


def test_a_litert_operator_that_cannot_run_is_named(folder: Path) -> None:
    known = schema()
    model = known.ModelT.InitFromObj(known.Model.GetRootAsModel((folder / "net.tflite").read_bytes(), 0))
    conv = next(code for code in model.operatorCodes if code.builtinCode == known.BuiltinOperator.CONV_2D)
    conv.builtinCode, conv.deprecatedBuiltinCode = known.BuiltinOperator.GELU, 127
    (folder / "net.tflite").write_bytes(pack(model))
    assert "net.tflite has" in refused("verify", folder, "--runtime", "litert")
    write_manifest(folder / "net_manifest.json")
    for command in ("verify", "benchmark"):
        said = refused(command, folder, "--runtime", "litert")
        assert "(GELU) failed to prepare" in said and "remedy: update ai-edge-litert" in said


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("threads", [-3, 100_000])
def test_numbers_of_threads_that_are_none(folder: Path, threads: int) -> None:
    said = refused("benchmark", folder, "--threads", threads, "--seconds", "0")
    assert f"{threads} is not a number of threads for this process" in said and "or 0 for all" in said
    with pytest.raises(ConfigError, match="'1' is not a number of threads"):
        benchmark_path(folder, threads=["1"], seconds=0.0)  # type: ignore[list-item]


def test_the_name_of_a_runtime_in_capitals(folder: Path) -> None:
    assert "did you mean 'litert'?" in refused("verify", folder, "--runtime", "LITERT")
    assert "did you mean 'onnxruntime'?" in refused("benchmark", folder, "--runtime", "OnnxRuntime")


def test_a_runtime_of_tensors_alone_asks_for_tensors(tmp_path: Path) -> None:
    """What skl2onnx writes by default: the probabilities of every sample as a map."""
    pytest.importorskip("openvino")
    types = onnx.TensorProto
    maps = onnx.helper.make_sequence_type_proto(
        onnx.helper.make_map_type_proto(types.INT64, onnx.helper.make_tensor_type_proto(types.FLOAT, None))
    )
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])],
        "net",
        [onnx.helper.make_tensor_value_info("x", types.FLOAT, ["n", 2])],
        [onnx.helper.make_value_info("y", maps)],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "net.onnx")
    with pytest.raises(ExportError, match="openvino refuses the file.*the runtime takes tensors alone"):
        open_file("openvino", tmp_path / "net.onnx")


@pytest.mark.parametrize(
    ("runtime", "message", "remedy"),
    [
        ("onnxruntime", "Required inputs (['x']) are missing from input feed (['y']).", "give data of this model"),
        (
            "openvino",
            "Check 'in_out_elements_equal' failed at src/core/shape_inference/include/reshape_shape_inference.hpp:360",
            "fix the lengths of the inputs",
        ),
    ],
    ids=["inputs of another file", "free axes"],
)
def test_the_remedy_of_a_refusal_is_that_of_its_message(tmp_path, runtime, message, remedy):
    with pytest.raises(ExportError) as caught, refusals_of(RUNTIMES[runtime], tmp_path / "net.onnx"):
        raise RuntimeError(message)
    assert caught.value.problem.startswith(f"{runtime} refuses the file: ") and remedy in caught.value.remedy
