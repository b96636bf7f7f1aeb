"""Both front ends plan, calibrate and compute alike: models of the zoo, recorded by one and exported to ONNX for the other.

Where the exporter keeps the operators, outputs differ by the rounding of sums: a code flips here and there, and what
follows from it stays below the noise of quantization itself. Where it rewrites them, the sites differ, and the two are
as far apart as two roundings of one model are; neither is worse than the other.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from bitwright.core.graph.graph import Graph
from bitwright.core.placement.config import load_config
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Plan
from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx import fold_all_batch_norms as fold_onnx
from bitwright.onnx import load_model
from bitwright.onnx.model.graph import build_graph
from bitwright.torch import Inputs, TorchView
from bitwright.torch import QuantizationSimModel as TorchSim
from bitwright.torch import fold_all_batch_norms as fold_torch
from bitwright.torch.calls.inputs import flatten_tensors
from tests.conformance.exported import NOT_EXPORTED, NOT_LOADED, NOT_RUN, PLANNED, REWRITTEN, RUN, exported
from tests.onnx.nets import run
from tests.support import data
from tests.support.cases import Call
from tests.support.simulations import calibrated
from tests.support.zoo import ZOO, Case

#: parameters that one of the two has no weight for
ONLY = {
    "rnn-projected-lstm": {"weight_hr_l0"},
    "masked-lm": {"positions.weight"},
    "masked-lm-sdpa": {"positions.weight"},
    "tuple-io": {"left.weight"},
}
FAST = {"chain-residual", "densenet", "functional", "mobilenet-v3-block", "shared-twice", "super-resolution", "vit-bmm"}
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PLANNED]


def torch_plan(case: Case) -> tuple[Plan, Graph]:
    call = case.example()
    sim = TorchSim(case.build(), Inputs(call.args, call.kwargs))
    return sim.plan, sim.graph


def onnx_plan(proto: onnx.ModelProto) -> tuple[Plan, Graph]:
    graph = build_graph(load_model(proto).model).graph
    return place(graph, load_config()), graph


def weights(plan: Plan, graph: Graph, names: dict[str, str]) -> dict[frozenset[str], set[tuple[str, str, int]]]:
    """Parameters that make up a weight -> its format, symmetry and number of scales; -1 where its shape is unknown."""
    found: dict[frozenset[str], set[tuple[str, str, int]]] = {}
    for site in plan.sites.values():
        if site.role != "weight":
            continue
        value = graph.values[site.value]
        sources = (value.param,) if value.param else value.sources
        key = frozenset(names[s] for s in sources if s in names)
        scales = math.prod(site.spec.granularity.param_shape(value.shape, site.name))
        found.setdefault(key, set()).add((site.spec.format.name, str(site.spec.symmetry), scales))
    return found


def first_names(model: torch.nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of that tensor."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def moving_sites(plan, graph):
    """Sites of activations, without constants that are watched as inputs are: PyTorch may make anew what the exporter stores."""
    sites = (s for s in plan.sites.values() if s.role in ("input", "output"))
    return sum(graph.values[s.value].kind != "constant" for s in sites)


@pytest.mark.parametrize("name", NAMES)
def test_both_front_ends_plan_alike(name):
    case = ZOO[name]
    names = first_names(case.build())
    (one, one_graph), (other, other_graph) = torch_plan(case), onnx_plan(exported(name))
    found, expected = weights(other, other_graph, names), weights(one, one_graph, names)
    for only in ONLY.get(name, ()):
        assert (frozenset([only]) in found) != (frozenset([only]) in expected)
        found.pop(frozenset([only]), None)
        expected.pop(frozenset([only]), None)
    unknown = {key for key, kinds in found.items() if any(scales < 0 for *_, scales in kinds)}
    for key in unknown:  # computed by the exporter: weights of recurrent layers, put together gate by gate
        found[key] = {(*kind[:2], -1) for kind in found[key]}
        expected[key] = {(*kind[:2], -1) for kind in expected[key]}
    assert found == expected
    sites = [moving_sites(one, one_graph), moving_sites(other, other_graph)]
    assert (sites[0] != sites[1]) == (name in REWRITTEN), f"{sites[0]} sites in torch, {sites[1]} in ONNX"


def test_the_same_batch_norms_fold():
    from bitwright.methods.folding.batch_norm_search import find_folds
    from bitwright.onnx import fold_all_batch_norms

    case = ZOO["mobilenet-v3-block"]
    call = case.example()
    one = TorchView(case.build(), [Inputs(call.args, call.kwargs)])
    folds, refusals = find_folds(one.graph(), one)
    report = fold_all_batch_norms(exported("mobilenet-v3-block"))
    assert (len(report), len(report.refused)) == (len(folds), len(refusals)) == (3, 0)


DATA = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(i)) * (1 + i) for i in range(3)]


class Net(nn.Module):
    """A convolution and a linear layer, with what comes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.nn.functional.max_pool2d(self.conv(x).relu(), 2).flatten(1))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, onnx.ModelProto]:
    """The model in both forms."""
    torch.manual_seed(0)
    model, path = Net().eval(), tmp_path_factory.mktemp("both") / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (DATA[0],), path, input_names=["x"], opset_version=21, dynamo=True, verbose=False)
    return model, onnx.load(path)


@pytest.mark.parametrize("scheme", ["min_max", "percentile", "tf_enhanced", "entropy"])
@pytest.mark.parametrize("preset", ["w8a8", "w4a16"])
def test_encodings_of_both_front_ends(both, scheme, preset):
    model, proto = copy.deepcopy(both)
    ours, theirs = (
        OnnxSim(proto, None, scheme, preset=preset, threads=1),
        TorchSim(model, DATA[0], scheme, preset=preset),
    )
    ours.compute_encodings([{"x": x.numpy()} for x in DATA])
    theirs.compute_encodings(DATA, progress=False)
    roles = [sorted(site.role for site in sim.quantizers.values()) for sim in (ours, theirs)]
    assert roles[0] == roles[1]
    for name in ("conv.weight", "fc.weight"):
        assert ours.quantizers[name].encoding == theirs.quantizers[name].encoding
    (first,) = [s for s in ours.quantizers.values() if s.role == "input"]
    (other,) = [s for s in theirs.quantizers.values() if s.role == "input"]
    assert first.encoding == other.encoding, "the model's input is the same tensor in both"
    pairs = zip(
        *([s.encoding for s in sim.quantizers.values() if s.role == "output"] for sim in (ours, theirs)), strict=True
    )
    for one, two in pairs:  # behind a convolution, sums are rounded in another order
        assert one.format == two.format and np.allclose(one.scale, two.scale, rtol=0.01)


class Flat(nn.Module):
    """Functions whose range is known, of values that use little or much of it."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.fc = length, nn.Linear(8, 8)
        with torch.no_grad():
            self.fc.weight.mul_(0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.fc(x) @ x.transpose(-1, -2)
        return (scores.softmax(-1) @ x) * scores.sigmoid().mean(-1, keepdim=True)


@pytest.mark.parametrize("length", [8, 600])
@pytest.mark.parametrize("scheme", ["min_max", "mse"])
def test_a_fixed_range_that_the_data_contradict_is_observed(length, scheme, tmp_path):
    """Even rows of a softmax over 600 have values of 0.0017: on steps of 1/255 all of them are zero."""
    torch.manual_seed(0)
    model, data = Flat(length).eval(), [torch.randn(1, length, 8) for _ in range(2)]
    torch.onnx.export(model, (data[0],), tmp_path / "net.onnx", input_names=["x"], dynamo=True, verbose=False)
    theirs, ours = TorchSim(model, data[0], scheme), OnnxSim(str(tmp_path / "net.onnx"), None, scheme, threads=1)
    theirs.compute_encodings(data, progress=False)
    ours.compute_encodings([{"x": x.numpy()} for x in data])
    float_output = model(data[0]).detach().numpy()
    for sim, got in (
        (theirs, theirs.model(data[0]).detach().numpy()),
        (ours, ours.session.run(None, {"x": data[0].numpy()})[0]),
    ):
        rows = {row.op_type: row for row in sim.coverage() if row.op_type in ("Softmax", "Sigmoid")}
        (softmax,) = [s for s in sim.quantizers.values() if s.role == "output" and s.value == rows["Softmax"].name]
        if length == 8:
            assert float(softmax.encoding.scale) == np.float32(1 / 255) and "observed" not in rows["Softmax"].how
        else:
            assert float(softmax.encoding.max) < 0.02
            assert "codes of the fixed range 0 to 1, so the observed range is taken" in rows["Softmax"].how
        assert "observed" not in rows["Sigmoid"].how
        assert 10 * np.log10((float_output**2).sum() / ((float_output - got) ** 2).sum()) > 25
    found = (
        [q.encoding for q in ours.quantizers.unique() if q.range_note],
        [q.encoding for q in theirs.quantizers.unique() if q.range_note],
    )
    for one, two in zip(*found, strict=True):
        assert np.allclose(one.scale, two.scale, rtol=1e-5)


def test_a_range_of_another_calibration_is_decided_anew():
    torch.manual_seed(0)
    model, even = Flat(300).eval(), [torch.randn(1, 300, 8)]
    sim = calibrated(TorchSim(model, even[0]), even)
    (softmax,) = [q for q in sim.quantizers.unique() if q.name.startswith("softmax")]
    assert softmax.range_note and softmax.spec.fixed_range == (0.0, 1.0)
    softmax.refine(16, "asked for")
    assert not softmax.range_note and float(softmax.encoding.max) == pytest.approx(1.0), "16 bits tell the values apart"
    sim.quantizers[softmax.name].spec = None
    assert sim.coverage().find(sim.quantizers[softmax.name].value).status == "float"
    peaked = [x * 60 for x in even]
    sim = calibrated(TorchSim(model, peaked[0]), even)
    sim.compute_encodings(peaked, progress=False)
    (softmax,) = [q for q in sim.quantizers.unique() if q.name.startswith("softmax")]
    assert not softmax.range_note and float(softmax.encoding.scale) == np.float32(1 / 255)


def test_a_range_of_a_rule_stays_and_is_warned_of(caplog):
    torch.manual_seed(0)
    model, data = Flat(600).eval(), [torch.randn(1, 600, 8)]
    rules = {"preset": "w8a8", "rules": [{"op": "Softmax", "output": {"fixed_range": [0.0, 1.0]}}]}
    sim = calibrated(TorchSim(model, data[0], config_file=rules), data)
    (softmax,) = [q for q in sim.quantizers.unique() if q.name.startswith("softmax")]
    assert softmax.poor_range and float(softmax.encoding.max) == pytest.approx(1.0)
    assert "codes of the fixed range 0 to 1, which a rule gives" in caplog.text


def test_a_range_that_kernels_of_the_target_need_leaves_the_values_in_float():
    from bitwright.export.targets import rules_for

    torch.manual_seed(0)
    model, data = Flat(600).eval(), [torch.randn(1, 600, 8)]
    sim = calibrated(TorchSim(model, data[0], config_file=rules_for("litert", None)), data)
    row = next(row for row in sim.coverage() if row.op_type == "Softmax")
    assert row.status == "float" and "the only one that kernels of the target compute" in row.how


Array = NDArray[Any]
FAST_TO_COMPARE = {"functional", "mobilenet-v3-block", "nested-names"}
UNROLLED = {name for name, why in REWRITTEN.items() if "over time unrolled" in why}
COMPARED = [pytest.param(name, marks=() if name in FAST_TO_COMPARE else pytest.mark.slow) for name in RUN]


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


@pytest.mark.parametrize("name", COMPARED)
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
    ours = calibrated(OnnxSim(loaded.model, calibration[0].numpy(), threads=1), [x.numpy() for x in calibration])
    fold_torch(model, dummy_input=calibration[0])
    theirs = calibrated(TorchSim(model, calibration[0]), calibration)

    found = data.accuracy(lambda x: [torch.from_numpy(y) for y in ours.run(x.numpy())], test)
    expected = data.accuracy(theirs.model, test)
    assert abs(found - expected) <= 0.5, "ten pictures of 2000"
    assert found > plain - 1 and expected > plain - 1
