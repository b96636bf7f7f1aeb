"""Wrong uses of the public API: each is refused or reported at once, in Bitwright's words, with a remedy that works."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import bitwright
from bitwright.errors import CalibrationError, ConfigError, ExportError, ModelError, UnknownAttributeError
from bitwright.export.targets import find_target
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()


def onnx_net() -> onnx.ModelProto:
    return helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "net",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4])],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 2])],
            [onnx.numpy_helper.from_array(np.ones((4, 2), np.float32), "w")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("found, shown", [(None, "None"), ("high", "'high' (str)"), ([1, 2], "[1, 2] (list)")])
def test_a_metric_returns_a_number(found: object, shown: str) -> None:
    def accuracy(model: nn.Module) -> object:
        return found

    with pytest.raises(CalibrationError) as caught:
        bitwright.quantize(net(), [X], recipe=["fold"], metric=accuracy, progress=False)
    assert str(caught.value) == (
        f"metric accuracy: it returned {shown}, which is not a number. "
        "Remedy: end it with a return statement whose value is one number, for example an accuracy"
    )


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: (a,), lambda a: {"input": a}, lambda a: ([a],)])
def test_numpy_batches_for_a_module_are_named_in_one_sentence(wrap) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, input):
            return self.net(input[0] if isinstance(input, list) else input)

    sim = QuantizationSimModel(Takes(), X)
    with pytest.raises(CalibrationError) as caught:
        sim.compute_encodings([wrap(X.numpy())])
    assert str(caught.value) == (
        "batch 0: it holds numpy arrays, and PyTorch models take tensors. Remedy: convert them: torch.from_numpy(array)"
    )
    with pytest.raises(ModelError, match="^example input: it holds numpy arrays"):
        QuantizationSimModel(Takes(), wrap(X.numpy()))
    sim.compute_encodings([torch.from_numpy(X.numpy())])


def test_an_unknown_attribute_of_a_quantizer_is_refused() -> None:
    site = QuantizationSimModel(net(), X).quantizers["0.weight"]
    for target in (site, site.quantizer):
        with pytest.raises(
            UnknownAttributeError, match=r"quantizer 0\.weight: 'enabledd' .*did you mean 'enabled'.*Remedy"
        ):
            target.enabledd = False  # type: ignore[union-attr]
        with pytest.raises(AttributeError, match="bits are part of the spec"):
            target.bitz = 4  # type: ignore[union-attr]
        target.enabled = False
    assert not site.enabled


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_a_missing_encodings_file_to_read_is_not_answered_with_a_folder_to_create(front_end: str) -> None:
    sim = QuantizationSimModel(net(), X) if front_end == "torch" else OnnxSim(onnx_net())
    with pytest.raises(ExportError) as caught:
        sim.load_encodings("nope.encodings")
    assert caught.value.problem == "there is no such file or folder"
    assert caught.value.remedy == f"check the spelling; a relative path begins at the working directory, {Path.cwd()}"


def test_a_missing_folder_to_write_to_is_answered_with_a_folder_to_create(tmp_path: Path) -> None:
    sim = QuantizationSimModel(net(), X)
    sim.compute_encodings([X])
    with pytest.raises(ExportError, match="create the folder first"):
        sim.save_encodings(tmp_path / "missing" / "x.encodings")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_is_named_as_such(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "model.pt"
    torch.save(net().state_dict(), path, _use_new_zipfile_serialization=zipped)  # noqa: TID251 what users have
    with pytest.raises(ModelError, match="not an ONNX model. Remedy: a PyTorch model is quantized in Python"):
        bitwright.quantize(str(path), [{"x": X.numpy()}], progress=False)


def test_files_of_other_converters_are_named(tmp_path: Path) -> None:
    for name, content, what in (("m.tflite", b"\x1c\0\0\0TFL3" + bytes(20), "a LiteRT model"),
                                ("m.h5", b"\x89HDF\r\n\x1a\n" + bytes(20), "an HDF5 file")):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=f"it is {what}.*tf2onnx"):
            bitwright.quantize(str(tmp_path / name), [{"x": X.numpy()}], progress=False)


@pytest.mark.parametrize("name", ["tensorrt", "TensorRT", "qnn", "coreml"])
def test_a_runtime_without_a_target_is_not_taken_for_a_misspelling(name: str) -> None:
    with pytest.raises(ConfigError, match="files for it are not written yet.*target='packed'") as caught:
        find_target(name)
    assert "did you mean" not in str(caught.value)
    assert find_target("packed").name == "packed"


def test_the_former_name_of_a_runtime_leads_to_the_present_one() -> None:
    with pytest.raises(ConfigError, match="use target='litert'"):
        find_target("tflite")


def test_folding_a_model_in_training_mode_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for training in (False, True):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="bitwright"):
            fold_all_batch_norms(net().train(training), dummy_input=X)
        assert ("the model is in training mode" in caplog.text) == training


def test_the_error_of_an_example_that_does_not_fit_names_where_the_models_own_is() -> None:
    with pytest.raises(ModelError, match="the model's own error is the __cause__ of this one") as caught:
        QuantizationSimModel(net(), torch.randn(2, 5, 6, 6))
    assert isinstance(caught.value.__cause__, RuntimeError)
