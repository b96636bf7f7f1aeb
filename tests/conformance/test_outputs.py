"""Both front ends compute alike: the simulations of one model, each on its own runtime, against each other.

Where the exporter keeps the operators, the two differ by the rounding of sums: a code flips here and there, and what
follows from it stays below the noise of quantization itself. Where it rewrites them, the sites differ, and the two are
as far apart as two roundings of one model are; neither is worse than the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx import fold_all_batch_norms as fold_onnx
from bitwright.onnx import load_model
from bitwright.torch import Inputs
from bitwright.torch import QuantizationSimModel as TorchSim
from bitwright.torch import fold_all_batch_norms as fold_torch
from bitwright.torch.calls.inputs import flatten_tensors
from tests.conformance.exported import NOT_EXPORTED, NOT_LOADED, NOT_RUN, REWRITTEN, RUN, exported
from tests.onnx.nets import run
from tests.support import data
from tests.support.cases import Call
from tests.support.zoo import ZOO

Array = NDArray[Any]
FAST = {"functional", "mobilenet-v3-block", "nested-names"}
UNROLLED = {name for name, why in REWRITTEN.items() if "over time unrolled" in why}
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in RUN]


def arrays(tree: Any) -> list[Array]:
    return [tensor.detach().numpy() for _, tensor in flatten_tensors(tree)]


def feeds_of(call: Call) -> tuple[Array, ...]:
    return tuple(arrays((call.args, call.kwargs)))


def distance(one: list[Array], other: list[Array]) -> float:
    """Signal-to-noise ratio of the worst floating-point output, in dB."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.dtype.kind == "f"]
    return min(sqnr(a.astype(np.float32), b.astype(np.float32)) for a, b in pairs)


def weight_encodings(sim: Any) -> dict[str, Any]:
    return {s.name: s.encoding for s in sim.quantizers.values() if s.role == "weight" and "@" not in s.name}


def seeds(name: str) -> range:
    """Of the examples: several where sites differ, as some twenty numbers tell noise to 3 dB only."""
    return range(6 if name in REWRITTEN else 1)


def pooled(name: str, run_on: Callable[[int], list[Array]]) -> list[Array]:
    """What is made of all examples, by output."""
    found = [run_on(seed) for seed in seeds(name)]
    return [np.concatenate([array.ravel() for array in arrays]) for arrays in zip(*found, strict=True)]


@pytest.mark.slow_variants("mobilenet-v3-block", "nested-names")
@pytest.mark.parametrize("name", NAMES)
def test_both_simulations_compute_alike(name):
    case = ZOO[name]
    call = case.example()
    feeds = feeds_of(call)
    plain = pooled(name, lambda seed: arrays(case.run(case.build(), seed)))

    ours = OnnxSim(exported(name), feeds, threads=1)
    calls = [case.example(seed) for seed in seeds(name)]
    ours.compute_encodings([feeds_of(call) for call in calls], progress=False)
    theirs = TorchSim(case.build(), Inputs(call.args, call.kwargs))
    theirs.compute_encodings([Inputs(call.args, call.kwargs) for call in calls], progress=False)

    one, other = weight_encodings(ours), weight_encodings(theirs)
    same = [site for site in one.keys() & other.keys() if one[site].granularity == other[site].granularity]
    assert all(one[site] == other[site] for site in same)
    found = pooled(name, lambda seed: ours.run(feeds_of(case.example(seed))))
    expected = pooled(name, lambda seed: arrays(case.run(theirs.model, seed)))
    noise = [distance(plain, found), distance(plain, expected)]
    # a loop has one grid for all its steps, and each step of its unrolled form one of its own: up to a bit finer
    assert abs(noise[0] - noise[1]) < (6 if name in UNROLLED else 3), "equally far from float"
    # two independent roundings are 3 dB further from each other than from float; a dB and a half for chance
    # (kernels for half precision add up in half or in float32, as the machine has them: their roundings are independent)
    halves = any(array.dtype == np.float16 for array in plain)
    apart = 3 if name in REWRITTEN or halves else 0
    assert distance(expected, found) > min(noise) - apart - 1.5


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_EXPORTED)
def test_what_the_exporter_refuses(name):
    with pytest.raises(Exception) as refused:
        exported(name)
    texts, cause = [], refused.value
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__
    assert NOT_EXPORTED[name] in "\n".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_LOADED)
def test_what_the_exporter_writes_wrongly(name):
    with pytest.raises(Exception, match=NOT_LOADED[name]):
        load_model(exported(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_RUN)
def test_what_the_runtime_refuses_in_float(name):
    """The sum of our parts cannot be better than the runtime: the exported model itself does not run there."""
    call = ZOO[name].example()
    names = [value.name for value in exported(name).graph.input]
    with pytest.raises(Exception, match=NOT_RUN[name]):
        run(exported(name), dict(zip(names, arrays((call.args, call.kwargs)), strict=True)))


# ------------------------------------------------------------------------------------------------ trained models


def export(model: torch.nn.Module, path: Path, x: torch.Tensor) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = {0: torch.export.Dim("n")}
        torch.onnx.export(
            model, (x,), path, input_names=["x"], dynamic_shapes=(batch,), opset_version=21, dynamo=True,
            optimize=False, verbose=False,
        )  # fmt: skip
    return onnx.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet20_aux", "mobilenet_v2_cifar"])
def test_trained_models_are_as_accurate_in_both(shared_data: Path, tmp_path: Path, name: str):
    calibration, test = data.cifar("train")[:200].batches(50), data.cifar()
    model = data.trained(name)
    plain = data.accuracy(model, test)

    loaded = load_model(export(model, tmp_path / "model.onnx", calibration[0]))
    fold_onnx(loaded, calibration[0].numpy())
    ours = OnnxSim(loaded.model, calibration[0].numpy(), threads=1)
    ours.compute_encodings([x.numpy() for x in calibration], progress=False)
    fold_torch(model, dummy_input=calibration[0])
    theirs = TorchSim(model, calibration[0])
    theirs.compute_encodings(calibration, progress=False)

    found = data.accuracy(lambda x: [torch.from_numpy(y) for y in ours.run(x.numpy())], test)
    expected = data.accuracy(theirs.model, test)
    assert abs(found - expected) <= 0.5, "ten pictures of 2000"
    assert found > plain - 1 and expected > plain - 1
