"""Options are checked by the annotations of what takes them: every option of every step, in both front ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import bitwright.onnx
import bitwright.torch
from bitwright.errors import ConfigError
from bitwright.methods.options import check_options, keyword_options, phrase, takes
from bitwright.recipes.recipe import KINDS
from tests.support.simulations import calibrated

X = np.float32(np.random.default_rng(0).standard_normal((4, 6)))


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (float, [1, 0.5, np.float32(1)], [[1], "1", True, None, {}]),
        (int, [3, np.int64(3)], [3.0, True, "3", [3]]),
        (bool, [True, np.False_], [1, "yes", None]),
        (str, ["a"], [1, ["a"], None]),
        (float | None, [None, 2], ["a", [2]]),
        (str | Path | None, ["a", Path("a"), None], [1, ["a"]]),
        (tuple[float, float], [[20, 2], (20.0, 2.0)], [[20], 20, "ab", [20, "a"], {20: 2, 2: 1}]),
        (Iterable[str], [["a"], ("a",), iter("ab"), set()], ["a", [1], 3, {"a": 1}]),
        (Sequence[Sequence[str]] | None, [[["a"], ("b", "c")], None], [["a"], [[1]], iter([["a"]])]),
        (Literal["mse", "minmax"], ["mse"], ["max", 1]),
        (dict[str, Any] | None, [{}, None], [[]]),
        (Any, [object()], []),
    ],
    ids=lambda value: None if isinstance(value, list) else phrase(value),
)
def test_a_value_is_taken_or_not(annotation, good, bad):
    assert all(takes(annotation, value) for value in good)
    assert not any(takes(annotation, value) for value in bad)


def test_the_error_names_option_value_and_what_it_takes():
    def step(model: Any, *, amounts: tuple[float, float] = (1, 2), bound: int = 0) -> None: ...

    known = keyword_options(step, ["bound"])
    assert known == {"amounts": tuple[float, float]}
    with pytest.raises(ConfigError, match="step: the option 'amounts' is 'x'. .* a list of 2: a number, a number"):
        check_options("step", {"amounts": "x"}, known)
    with pytest.raises(ConfigError, match="there is no option 'amount' .did you mean 'amounts'"):
        check_options("step", {"amount": [1, 2]}, known)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()


def onnx_network() -> onnx.ModelProto:
    weight = onnx.numpy_helper.from_array(np.eye(6, dtype=np.float32), "w")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 6]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def quantize(front: str, recipe: Any) -> Any:
    if front == "torch":
        return bitwright.torch.quantize(network(), [torch.from_numpy(X)], recipe=recipe, progress=False)
    return bitwright.onnx.quantize(onnx_network(), [X], recipe=recipe, progress=False)


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_every_option_of_every_step_refuses_what_it_cannot_be(front):
    for step in KINDS:
        with pytest.raises(ConfigError) as found:
            quantize(front, [{step: {"": 0}}])
        if "it takes none" in str(found.value) or "an ONNX file has no" in str(found.value):
            continue
        for option in found.value.remedy.removeprefix("use ").split(", "):
            with pytest.raises(ConfigError, match=rf"^{step}: the option '{option}' is <object .*Remedy: give "):
                quantize(front, [{step: {option: object()}}])


def test_methods_called_on_their_own_check_alike():
    sim = calibrated(bitwright.torch.QuantizationSimModel(network(), torch.from_numpy(X)), [torch.from_numpy(X)])
    with pytest.raises(ConfigError, match=r"gptq: the option 'damping' is \[1\]. Remedy: give a number"):
        bitwright.torch.apply_gptq(sim, [torch.from_numpy(X)], damping=[1])
