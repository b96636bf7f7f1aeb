"""Arguments of another kind than a public function takes are refused by name, before anything is done."""

from __future__ import annotations

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
from bitwright.errors import ConfigError, checks_arguments


@checks_arguments
def example(
    data: Iterable[Any],
    samples: int | None = None,
    share: float = 0.5,
    path: str | Path | None = None,
    metric: str | Callable[[Any], float] | None = None,
    groups: str | slice = "all",
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
        {"share": torch.tensor(0.5), "data": Rows(), "groups": 3, "more": 4},
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


MODEL, DATA = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), [torch.ones(8, 4)]
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "quantize-data": (bitwright.quantize, (MODEL, None), {}),
    "quantize-path": (bitwright.quantize, (MODEL, DATA), {"path": 3}),
    "quantize-metric": (bitwright.torch.quantize, (MODEL, DATA), {"metric": "accuracy"}),
    "quantize-effort": (bitwright.onnx.quantize, (MODEL, DATA), {"effort": []}),
    "analyze-samples": (bitwright.analyze, (MODEL, DATA), {"samples": None}),
    "analyze-resume": (bitwright.analyze, (MODEL, DATA), {"resume": len}),
    "analyze-seed": (bitwright.analyze, (MODEL, DATA), {"seed": "x"}),
    "mixed-candidates": (bitwright.mixed_precision, (MODEL, DATA, len), {"min_sqnr": 10.0}),
    "mixed-deadline": (bitwright.mixed_precision, (MODEL, DATA), {"deadline": "x"}),
    "auto-evaluation_data": (bitwright.auto_quantize, (MODEL, DATA), {"evaluation_data": 3}),
    "simulate-config_file": (bitwright.torch.QuantizationSimModel, (MODEL, DATA[0]), {"config_file": 3}),
    "simulate-examples": (bitwright.torch.QuantizationSimModel, (MODEL, DATA[0]), {"examples": None}),
    "simulate-onnx-threads": (bitwright.onnx.QuantizationSimModel, ("m.onnx",), {"threads": "x"}),
    "smooth-alpha": (bitwright.torch.smooth_model, (MODEL, DATA), {"alpha": "x"}),
    "awq-data": (bitwright.torch.awq_model, (MODEL, 3), {}),
    "equalize-data": (bitwright.torch.equalize_model, (MODEL,), {"data": 3}),
    "bias-layers_to_ignore": (
        bitwright.torch.apply_bias_correction,
        (MODEL, DATA),
        {"layers_to_ignore": None},
    ),
    "reconstruct-method": (bitwright.torch.apply_reconstruction, (MODEL, DATA), {"method": None}),
    "reconstruct-exclude": (bitwright.onnx.apply_reconstruction, (MODEL, DATA), {"exclude": 3}),
    "progressive-threshold": (bitwright.torch.progressive, (MODEL, DATA), {"threshold": "x"}),
    "check-data": (bitwright.torch.check_model, (MODEL, 3), {}),
}


@pytest.mark.parametrize("call", CALLS)
def test_public_functions_name_the_argument(call: str) -> None:
    function, args, options = CALLS[call]
    with pytest.raises(ConfigError, match=f"^{call.rpartition('-')[2]}: .* Remedy: "):
        function(*args, **options)


def test_an_export_to_no_path_is_refused() -> None:
    sim = bitwright.torch.QuantizationSimModel(MODEL, DATA[0])
    sim.compute_encodings(DATA, progress=False)
    with pytest.raises(ConfigError, match="path: None is a NoneType"):
        sim.export(None, "model", DATA[0])
