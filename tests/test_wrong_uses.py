"""Wrong uses of the public API: each is refused or reported at once, in Bitwright's words, with a remedy that works."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import bitwright
import bitwright.onnx
import bitwright.torch
from bitwright.errors import (
    _KINDS,
    CalibrationError,
    ConfigError,
    ExportError,
    ModelError,
    UnknownAttributeError,
    checks_arguments,
    with_article,
)
from bitwright.export.targets import find_target
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from tests.support.signatures import callables
from tests.support.simulations import calibrated


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


@pytest.mark.parametrize("search", [bitwright.mixed_precision, bitwright.auto_quantize])
@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_a_search_refuses_a_metric_without_a_return(front_end: str, search: Callable[..., Any]) -> None:
    model = net() if front_end == "torch" else onnx_net()
    data = [X] if front_end == "torch" else [{"x": np.ones((1, 4), np.float32)}]
    with pytest.raises(ConfigError, match="^metric: it returns None. Remedy: end it with a return statement"):
        search(model, data, metric=lambda model: None, allowed_drop=0.1)


def test_the_path_of_labels_is_not_taken_for_labels() -> None:
    with pytest.raises(ConfigError, match="^labels: 'labels.npy' is a text, .* read the file"):
        bitwright.quantize(onnx_net(), [{"x": np.ones((1, 4), np.float32)}], metric="accuracy", labels="labels.npy")


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
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda batch: bitwright.analyze(sim, [batch], progress=False),
        lambda batch: bitwright.torch.apply_gptq(sim, [batch], progress=False),
        lambda batch: sim.capture(["input"], batch),
        sim.verify,
    )
    for call in calls:
        with pytest.raises((CalibrationError, ExportError), match="it holds numpy arrays, .* torch.from_numpy"):
            call(wrap(X.numpy()))


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_an_empty_batch_is_refused_before_any_step_runs(front_end: str, caplog: pytest.LogCaptureFixture) -> None:
    full, empty = (X, X[:0]) if front_end == "torch" else ({"x": np.ones((1, 4))}, {"x": np.ones((0, 4))})
    shape = "input 0 is 0x3x6x6" if front_end == "torch" else "x is 0x4"
    with pytest.raises(CalibrationError, match=f"^batch 1: it holds no sample: {shape}"):
        bitwright.quantize(net() if front_end == "torch" else onnx_net(), [full, empty, full], progress=False)
    assert not caplog.records


def test_an_example_without_a_sample_is_not_exported(tmp_path: Path) -> None:
    sim = calibrated(QuantizationSimModel(net(), X), [X])
    with pytest.raises(ExportError, match="^example: the batch holds no sample: input is 0x3x6x6"):
        sim.export(tmp_path, "net", X[:0])


def test_a_data_set_of_samples_is_led_to_a_loader() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(32, 3, 8, 8))
    with pytest.raises(CalibrationError, match="data is a TensorDataset, not a list of batches") as caught:
        bitwright.quantize(nn.Conv2d(3, 4, 3), data, progress=False)
    assert "DataLoader(data, batch_size=32)" in caught.value.remedy


@pytest.mark.parametrize("noun", ["an Add", "a Conv", "an LSTM", "a GRU", "a ReLU", "an OrderedDict", "an ndarray"])
def test_nouns_of_messages_have_their_article(noun: str) -> None:
    assert with_article(noun.split()[1]) == noun


@pytest.mark.parametrize("front_end, name", [("torch", "0.weight"), ("onnx", "w")])
def test_an_unknown_attribute_of_a_quantizer_is_refused(front_end: str, name: str) -> None:
    sim = QuantizationSimModel(net(), X) if front_end == "torch" else OnnxSim(onnx_net())
    site = sim.quantizers[name]
    for target in (site, site.quantizer):
        with pytest.raises(UnknownAttributeError, match=rf"{name}: 'enabledd' .*did you mean 'enabled'.*Remedy"):
            target.enabledd = False  # type: ignore[union-attr]
        with pytest.raises(AttributeError, match="bits are part of the spec"):
            target.bitz = 4  # type: ignore[union-attr]
        target.enabled = False
    assert not site.enabled


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_a_rule_that_matches_nothing_is_said_at_construction(front_end: str, caplog: pytest.LogCaptureFixture) -> None:
    rules = {"rules": [{"match": "nothing_here", "output": None}]}
    QuantizationSimModel(net(), X, config_file=rules) if front_end == "torch" else OnnxSim(
        onnx_net(), config_file=rules
    )
    assert "name='nothing_here', port='output'): nothing in the model has this name and port" in caplog.text


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_a_missing_encodings_file_to_read_is_not_answered_with_a_folder_to_create(front_end: str) -> None:
    sim = QuantizationSimModel(net(), X) if front_end == "torch" else OnnxSim(onnx_net())
    with pytest.raises(ExportError) as caught:
        sim.load_encodings("nope.encodings")
    assert caught.value.problem == "there is no such file or folder"
    assert caught.value.remedy == f"check the spelling; a relative path begins at the working directory, {Path.cwd()}"


def test_a_missing_folder_to_write_to_is_answered_with_a_folder_to_create(tmp_path: Path) -> None:
    sim = calibrated(QuantizationSimModel(net(), X), [X])
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


@pytest.mark.parametrize("name", ["hailo", "TVM", "coreml"])
def test_a_runtime_without_a_target_is_not_taken_for_a_misspelling(name: str) -> None:
    with pytest.raises(ConfigError, match="files for it are not written yet.*target='packed'") as caught:
        find_target(name)
    assert "did you mean" not in str(caught.value)
    assert find_target("packed").name == "packed"


def test_the_former_name_of_a_runtime_leads_to_the_present_one() -> None:
    with pytest.raises(ConfigError, match="is not the name of a target. Remedy: use target='litert'"):
        find_target("tflite")
    with pytest.raises(ConfigError, match="is not the name of a target. Remedy: use target='tensorrt'"):
        find_target("TRT")
    assert find_target("tensorrt").name == "tensorrt"


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


@checks_arguments
def example(
    data: Iterable[Any],
    samples: int | None = None,
    share: float = 0.5,
    path: str | Path | None = None,
    metric: str | Callable[[Any], float] | None = None,
    anything: str | slice = "all",
    **options: Any,
) -> str:
    return "done"


class Rows:
    """A data set without ``__iter__``, as torch's are."""

    def __getitem__(self, i: int) -> int:
        return range(3)[i]


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 3, "share": 1, "path": Path("x"), "metric": len},
        {"samples": np.int64(3), "share": np.float32(0.5), "path": "x", "metric": "accuracy"},
        {"share": torch.tensor(0.5), "data": Rows(), "anything": 3, "more": 4},
        {"data": (i for i in range(3))},
    ],
)
def test_what_is_meant_passes(options: dict[str, Any]) -> None:
    assert example(**{"data": [1], **options}) == "done"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": None}, r"data: None is a NoneType. Remedy: give a list; see help\(example\)"),
        ({"samples": "many"}, "samples: 'many' is a str. Remedy: give an integer or None"),
        ({"share": [1]}, r"share: \[1\] is a list. Remedy: give a number"),
        ({"path": 3}, "path: 3 is an int. Remedy: give a string or a path or None"),
        ({"metric": 3}, "metric: 3 is an int. Remedy: give a string or a function or None"),
        ({"data": 10**70}, r"data: 10{59}\.\.\. is an int"),
    ],
)
def test_what_is_not_meant_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        example(**{"data": [1], **options})


def test_a_call_that_does_not_fit_the_signature_is_left_to_python() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'data'"):
        example()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bitwright.quantize(MODEL, DATA, bits=4), "^quantize: there is no argument 'bits'. Remedy: use model, "),
        (
            lambda: bitwright.torch.QuantizationSimModel(MODEL, DATA[0], default_param_bits=4),
            r"^QuantizationSimModel: there is no argument 'default_param_bits' \(did you mean 'default_param_bw' or ",
        ),
        (lambda: simulation().export("x", "n", op_set=17), r"^sim.export: there is no argument 'op_set' \(did you mean 'opset'"),
        (lambda: simulation().verify(run_time="openvino"), r"^sim.verify: there is no argument .* \(did you mean 'runtime'\?\)"),
        (lambda: simulation().coverage(all=True), "coverage: there is no argument 'all'. Remedy: it takes none"),
    ],
)  # fmt: skip
def test_an_unknown_argument_is_named_with_those_there_are(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert isinstance(caught.value, TypeError)  # as Python's own


def simulation() -> bitwright.torch.QuantizationSimModel:
    return bitwright.torch.QuantizationSimModel(MODEL, DATA[0])


class _Sim:
    quantizers: dict[str, Any] = {}

    def compute_encodings(self) -> None: ...


SIM = _Sim()
MODEL, DATA = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), [torch.ones(8, 4)]
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "quantize-data": (bitwright.quantize, (MODEL, None), {}),
    "quantize-path": (bitwright.quantize, (MODEL, DATA), {"path": 3}),
    "quantize-metric": (bitwright.torch.quantize, (MODEL, DATA), {"metric": "accuracy"}),
    "quantize-effort": (bitwright.onnx.quantize, (MODEL, DATA), {"effort": []}),
    "analyze-samples": (bitwright.analyze, (SIM, DATA), {"samples": None}),
    "analyze-resume": (bitwright.analyze, (SIM, DATA), {"resume": len}),
    "analyze-seed": (bitwright.analyze, (SIM, DATA), {"seed": "x"}),
    "mixed-candidates": (bitwright.mixed_precision, (MODEL, DATA, len), {"min_sqnr": 10.0}),
    "mixed-deadline": (bitwright.mixed_precision, (MODEL, DATA), {"deadline": "x"}),
    "auto-evaluation_data": (bitwright.auto_quantize, (MODEL, DATA), {"evaluation_data": 3}),
    "simulate-config_file": (bitwright.torch.QuantizationSimModel, (MODEL, DATA[0]), {"config_file": 3}),
    "simulate-examples": (bitwright.torch.QuantizationSimModel, (MODEL, DATA[0]), {"examples": None}),
    "simulate-onnx-threads": (bitwright.onnx.QuantizationSimModel, ("m.onnx",), {"threads": "x"}),
    "smooth-alpha": (bitwright.torch.smooth_model, (MODEL, DATA), {"alpha": "x"}),
    "awq-data": (bitwright.torch.awq_model, (MODEL, 3), {}),
    "equalize-data": (bitwright.torch.equalize_model, (MODEL,), {"data": 3}),
    "bias-layers_to_ignore": (bitwright.torch.apply_bias_correction, (SIM, DATA), {"layers_to_ignore": None}),
    "reconstruct-method": (bitwright.torch.apply_reconstruction, (SIM, DATA), {"method": None}),
    "reconstruct-exclude": (bitwright.onnx.apply_reconstruction, (SIM, DATA), {"exclude": 3}),
    "progressive-threshold": (bitwright.torch.progressive, (SIM, DATA), {"threshold": "x"}),
    "check-data": (bitwright.torch.check_model, (MODEL, 3), {}),
}


@pytest.mark.parametrize("call", CALLS)
def test_public_functions_name_the_argument(call: str) -> None:
    function, args, options = CALLS[call]
    with pytest.raises(ConfigError, match=f"^{call.rpartition('-')[2]}: .* Remedy: "):
        function(*args, **options)


#: public names without the check, and why
FREE: dict[str, str] = {
    "its values are data, checked where they are used": (
        "FloatFormat HealthReport Inputs IntFormat Loaded PerBlock PerChannel PerGate PerTensor PerToken Pictures "
        "PrecisionRequest PipelineResult Preset QuantSpec RangeMethod Result Rule "
        "Stabilized"
    ),
    "names a wrong source itself": "load_model",
    "made by a simulation": "Site SiteGroup SiteMap",
    "results, made by functions that check their arguments": "GeneratedData NcnnFile Packed",
    "methods of what algorithms edit; only they call them": "OnnxView TorchView",
    "methods of objects that are handed out; they read what the object holds": (
        "QuantizationSimModel.to_json "
        "HealthReport Result Site SiteGroup SiteMap Stabilized PerBlock PerChannel PerGate PerTensor PerToken QuantSpec"
    ),
    "a tensor, in a loop of training": "TrainingGuard.step",
}
#: parameters of any kind, and why
ANYTHING: dict[str, str] = {
    "what the model takes": "batch dummy_input example feeds args input_shapes labels",
    "of either front end, which says what it is not": "model",
    "read by a function that names the argument": ("config_file data reference value output times row"),
}


def _free(name: str) -> bool:
    owner, _, method = name.rpartition("bitwright.")[2].removeprefix("torch.").removeprefix("onnx.").partition(".")
    listed = {word for words in FREE.values() for word in words.split()}
    return owner in listed or f"{owner}.{method}" in listed


def checked_functions() -> dict[str, Any]:
    """Public functions, methods and classes that take arguments, but for those that :data:`FREE` lists."""
    found = {}
    for name, value in callables():
        if inspect.isclass(value) and issubclass(value, BaseException) or _free(name):
            continue
        function = value.__init__ if inspect.isclass(value) else value
        if function is object.__init__ or not [p for p in _parameters(function)]:
            continue
        found[name] = function
    return found


def _parameters(function: Any) -> list[inspect.Parameter]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self" and p.kind not in variable]


#: a value of every kind; each argument gets the first that fits and, one at a time, all that do not
VALUES: list[Any] = [
    None, True, 3, 0.5, "text", Path("x"), len, object(), [], {}, SIM, nn.Linear(1, 1), torch.ones(1), list,
    *(type(name, (), {"supergroups": ()})() for name in _KINDS),
]  # fmt: skip
FUNCTIONS = checked_functions()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_checks_every_argument(name: str) -> None:
    function = FUNCTIONS[name]
    kinds = getattr(function, "kinds", None)
    assert kinds is not None, f"decorate {name} with checks_arguments, or say in FREE why it needs no check"
    anything = {word for words in ANYTHING.values() for word in words.split()}
    left = [p.name for p in _parameters(function) if p.name not in kinds and p.name not in anything]
    assert not left, f"{name}: give {left} an annotation that errors.py knows, or say in ANYTHING why not"
    right = {
        p.name: next((v for v in VALUES if any(fits(v) for fits, _ in kinds.get(p.name, [(lambda _: True, "")]))), None)
        for p in _parameters(function)
        if p.default is p.empty
    }
    first = [SIM] if "self" in inspect.signature(function).parameters else []
    for argument, allowed in kinds.items():
        wrong = [v for v in VALUES if not any(fits(v) for fits, _ in allowed)]
        assert wrong, f"{name}: anything passes as {argument}"
        for value in wrong:
            with pytest.raises(ConfigError, match=rf"^{argument}: .* Remedy: give .*; see help\("):
                function(*first, **{**right, argument: value})


def test_what_is_excused_is_there() -> None:
    """A name that is gone or is checked by now leaves the tables."""
    names = {name.rpartition("bitwright.")[2].removeprefix("torch.").removeprefix("onnx.") for name, _ in callables()}
    listed = {word for words in FREE.values() for word in words.split()}
    assert not listed - names
    seen = {
        p.name
        for function in FUNCTIONS.values()
        for p in _parameters(function)
        if p.name not in getattr(function, "kinds", ())
    }
    assert {word for words in ANYTHING.values() for word in words.split()} == seen


def test_an_export_to_no_path_is_refused() -> None:
    sim = calibrated(bitwright.torch.QuantizationSimModel(MODEL, DATA[0]), DATA)
    with pytest.raises(ConfigError, match="path: None is a NoneType"):
        sim.export(None, "model", DATA[0])
