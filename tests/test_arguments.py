"""Arguments of another kind than a public function takes are refused by name, before anything is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
import bitwright.onnx
import bitwright.torch
from bitwright.errors import _KINDS, ConfigError, checks_arguments
from tests.support.signatures import callables


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
        "FloatFormat HealthReport Inputs IntFormat Loaded PerBlock PerChannel PerGate PerTensor Pictures "
        "PrecisionRequest Preset QuantSpec RangeMethod Result Rule "
        "Stabilized"
    ),
    "names a wrong source itself": "load_model",
    "made by a simulation": "Site SiteGroup SiteMap",
    "methods of what algorithms edit; only they call them": "OnnxView TorchView",
    "methods of objects that are handed out; they read what the object holds": (
        "QuantizationSimModel.to_json "
        "HealthReport Result Site SiteGroup SiteMap Stabilized PerBlock PerChannel PerGate PerTensor QuantSpec"
    ),
    "a tensor, in a loop of training": "TrainingGuard.step",
}
#: parameters of any kind, and why
ANYTHING: dict[str, str] = {
    "what the model takes": "batch dummy_input feeds args input_shapes labels",
    "of either front end, which says what it is not": "model",
    "read by a function that names the argument": ("config_file data reference value output times"),
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
    sim = bitwright.torch.QuantizationSimModel(MODEL, DATA[0])
    sim.compute_encodings(DATA, progress=False)
    with pytest.raises(ConfigError, match="path: None is a NoneType"):
        sim.export(None, "model", DATA[0])
