"""``compress`` from end to end, on both front ends."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import re
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import onnx_ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

import bitwright
from bitwright.compression import compress, costs
from bitwright.compression.bits import BitSpace, JointSpace
from bitwright.compression.checks import checked_dependencies
from bitwright.compression.costs import Prices
from bitwright.compression.importance import Evidence, criterion
from bitwright.compression.prune import PruneOptions, Search, Selector, prune
from bitwright.compression.ratios import Tables, choose, sensitivities
from bitwright.compression.reconstruct import Original
from bitwright.compression.svd import svd_model
from bitwright.compression.widths import WidthSpace, few_batches
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.methods.front_end import front_end_of
from bitwright.onnx import load_model
from bitwright.precision.executors import in_process
from bitwright.torch import load_compressed, rebuild
from bitwright.torch.structure import save_compressed
from tests.support.processes import python


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = x + self.bn2(self.conv2(x)).relu()
        return self.fc(x.mean((2, 3)))


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad():
        model.conv1.weight[8:] = model.conv1.weight[:8] + 0.05 * torch.randn(8, 3, 3, 3)  # pairs of alike channels
        model.conv1.bias[8:] = model.conv1.bias[:8]
    return model


DATA = [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def given(net: Net, form: str, tmp_path: Path) -> tuple[Any, list[Any]]:
    if form == "torch":
        return net, DATA
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.onnx.export(net, (DATA[0],), str(tmp_path / "net.onnx"), dynamo=True, verbose=False)
    return str(tmp_path / "net.onnx"), [x.numpy() for x in DATA]


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_half_of_the_operations(net: Net, form: str, tmp_path: Path) -> None:
    """The target is met, fitting the layers brings the outputs nearer, and the result is quantized like any model."""
    model, data = given(net, form, tmp_path)
    reference = net(DATA[0]).detach().numpy()

    def error(candidate: Any) -> float:
        if isinstance(candidate, nn.Module):
            return float(np.square(candidate(DATA[0]).detach().numpy() - reference).mean())
        name = candidate.get_inputs()[0].name
        return float(np.square(candidate.run(None, {name: DATA[0].numpy()})[0] - reference).mean())

    result = bitwright.compress(model, data, {"macs": 0.5}, metric=error, lower_is_better=True, widths=2)
    assert result.after["macs"] <= 0.5 * result.before["macs"]
    assert result.metrics["compressed"] < 0.5 * result.metrics["pruned"]
    if form == "torch":
        noise = [((result.model(x) - net(x)) ** 2).sum() / (net(x) ** 2).sum() for x in DATA]
        assert result.sqnr == pytest.approx(-10 * float(torch.stack(noise).mean().log10()), abs=0.01)
    assert f"; outputs {result.sqnr:.1f} dB before training; metric" in result.headline
    assert str(result).startswith(result.headline + "\n") and "fc: the model returns it" in str(result).replace(
        "node_linear", "fc"
    )
    assert net.conv1.weight.shape == (16, 3, 3, 3)
    quantized = bitwright.quantize(result.model, data, recipe=["fold"])
    assert quantized.quality.worst.sqnr > 20
    files = result.save(tmp_path / "out")
    if form == "torch":
        again = load_compressed(Net().eval(), tmp_path / "out")
        torch.testing.assert_close(again(DATA[0]), result.model(DATA[0]))
        assert isinstance(json.loads(files[1].read_text())["steps"], list)
    else:
        onnx.checker.check_model(onnx.load(files[0]), full_check=True)
        before, after = (
            sum(np.prod(t.dims) for t in onnx.load(f).graph.initializer) for f in (tmp_path / "net.onnx", files[0])
        )
        assert after < 0.6 * before


def test_a_file_with_weights_beside_it_in_another_folder(net: Net, tmp_path: Path) -> None:
    """The result holds its weights: it is saved, quantized and run wherever the process works."""
    (tmp_path / "there").mkdir()
    torch.onnx.export(net, (DATA[0],), str(tmp_path / "m.onnx"), dynamo=False)
    path, data = tmp_path / "there" / "net.onnx", [x.numpy() for x in DATA]
    onnx.save(
        onnx.load(tmp_path / "m.onnx"), path, save_as_external_data=True, location="net.onnx.data", size_threshold=0
    )
    assert (tmp_path / "there" / "net.onnx.data").stat().st_size > 1000
    result = bitwright.compress(
        path, data, {"macs": 0.7}, widths=2, ranking="uniform", reconstruction=False, progress=False
    )
    files = result.save(tmp_path / "out")
    feeds = {result.model.graph.input[0].name: data[0]}
    one, other = (
        ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for model in (result.model.SerializeToString(), str(files[0]))
    )
    np.testing.assert_array_equal(one, other)


def test_factors_of_gemm_count_when_layers_are_fitted() -> None:
    """Half of the units are others times a tenth: they go, and the layer that reads them computes what it did."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]> g (float[N,8] x) => (float[N,6] y) {
        a = Gemm(x, W, b)
        r = Relu(a)
        y = Gemm<alpha=0.5,beta=2.0>(r, V, c)
    }""")
    W = rng.normal(size=(8, 8))
    weights = {"W": np.hstack([W, W / 10]), "b": np.zeros((1, 16)), "V": rng.normal(size=(16, 6)), "c": np.ones((1, 6))}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items())
    x = rng.normal(size=(64, 8)).astype(np.float32)
    small = bitwright.compress(model, [x], {"macs": 0.5}, ranking="uniform", widths=1, progress=False)
    assert small.sqnr > 100
    opened = load_model(model)
    svd_model(opened, [x], macs=0.9, exclude=["a"], progress=False)
    made = [
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for m in (model, onnx_ir.to_proto(opened.model))
    ]
    np.testing.assert_allclose(made[0].mean(0), made[1].mean(0), atol=1e-5)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np
import bitwright
batches = [np.random.default_rng(i).normal(size=(8, 3, 8, 8)).astype(np.float32) for i in range(2)]
print(bitwright.compress("net.onnx", batches, {"macs": 0.5}, widths=2).headline)
"""


def test_onnx_without_torch(net: Net, tmp_path: Path) -> None:
    given(net, "onnx", tmp_path)
    assert "of the macs" in python("-c", WITHOUT_TORCH, cwd=tmp_path).stdout


def test_a_plan_is_of_one_model(net: Net) -> None:
    plan = bitwright.compress(net, DATA, {"macs": 0.7}, widths=1, reconstruction=False, batch_norms=False).plan
    plan = json.loads(json.dumps(plan))
    assert rebuild(Net(), plan).conv1.weight.shape[0] < 16
    with pytest.raises(ConfigError, match="no such parameter.*rebuild the original class"):
        rebuild(nn.Linear(3, 3), plan)
    with pytest.raises(ConfigError, match="not a plan"):
        rebuild(Net(), {})


_LAYER = {"class": "Linear", "in": 16, "out": 2, "bias": False}


@pytest.mark.parametrize(
    "step, message",
    [
        (None, "a step None that is not known"),
        ({"kind": []}, r"a step \[\] that is not known"),
        ({"kind": "cut"}, "does not say what is kept"),
        ({"kind": "cut", "parameters": {"fc.weight": {"1": [-1]}}, "attributes": {}}, "does not say what is kept"),
        ({"kind": "cut", "parameters": {"fc.weight": {"1": []}}, "attributes": {}}, "does not say what is kept"),
        ({"kind": "cut", "parameters": {}, "attributes": {"fc": 3}}, "does not say what is kept"),
        ({"kind": "chain", "module": "fc", "layers": ["x"]}, "fc: the plan does not say its layers"),
        ({"kind": "chain", "module": "", "layers": ["x"]}, "^the model: the plan does not say its layers"),
        ({"kind": "chain", "module": "fc", "layers": [{**_LAYER, "class": "Upsample"}]}, "no layer can be made.*Upsample"),
        ({"kind": "chain", "module": "fc", "layers": [{**_LAYER, "out": 1 << 40}]}, "many more than the module has"),
    ],
)  # fmt: skip
def test_a_damaged_plan_is_refused(step: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rebuild(Net(), {"format": 1, "steps": [step]})


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("model.plan.json", b"[", "model.plan.json.*Remedy: copy the files"),
        ("model.plan.json", b"[]", "it holds a list, not a plan"),
        ("model.safetensors", b"no tensors", "it is no safetensors file, or damaged"),
    ],
)
def test_damaged_files_of_a_compressed_model_are_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    save_compressed(Net(), {"format": 1, "steps": []}, tmp_path, "model")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_compressed(Net(), tmp_path)


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_several_targets_at_once(net: Net, form: str, tmp_path: Path) -> None:
    """All of them are met, the peak of activations too, and milliseconds are those that were measured."""
    model, data = given(net, form, tmp_path)
    target = {"macs": 0.6, "params": 0.8, "activation_bytes": 0.75, "memory": 0.77, "ms": 0.99}
    result = bitwright.compress(model, data, target, widths=1, ranking="uniform", reconstruction=False)
    left = {name: result.after[name] / result.before[name] for name in target}
    assert all(left[name] <= part for name, part in target.items() if name != "ms")
    assert 0 < result.after["ms"] < 2 * result.before["ms"]


def test_a_target_of_measured_milliseconds_that_is_missed_is_said_first(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other costs are computed and met, or refused before; milliseconds of small layers hardly follow their widths."""
    monkeypatch.setattr(
        "bitwright.compression.compress.compare_ms", lambda models, example: {"before": 1.0, "after": 0.9}
    )
    result = bitwright.compress(net, DATA, {"ms": 0.8}, widths=2, progress=False)
    assert result.headline.startswith("MISSED, 90.0% of the ms measured where 80.0% was asked; ")
    assert result.after["ms"] == 0.9


@pytest.mark.parametrize("form", ["torch", "onnx"])
@pytest.mark.parametrize("after", [0.9, 1.25])
def test_what_became_slower_says_so_first(
    net: Net, form: str, after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrower layers and factors alike; files are timed by default, modules where it is asked for."""
    model, data = given(net, form, tmp_path)
    timed = None if form == "onnx" else True
    monkeypatch.setattr(costs, "_compared", lambda *given: {"before": 1.0, "after": after})
    narrow = bitwright.compress(
        model, data, {"macs": 0.7}, ranking="uniform", reconstruction=False, milliseconds=timed, progress=False
    )
    work = copy.deepcopy(net) if form == "torch" else load_model(model)
    factors = svd_model(work, data, macs=0.9, milliseconds=timed, progress=False)
    for report in (narrow, factors):
        assert report.after["ms"] / report.before["ms"] == after
        assert report.summary.startswith("SLOWER, 125.0% of the ms measured; ") == (after > 1)
    assert "ms" not in svd_model(work, data, macs=0.99, milliseconds=False, progress=False).after


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_noise_that_hides_what_differs_between_samples_is_said(offset: float) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        layers[-1].bias += offset
    options = {"widths": 1, "cap": 0.95, "reconstruction": False, "progress": False}
    result = bitwright.compress(model, [torch.randn(64, 8)], {"macs": 0.05}, **options)
    said = "UNCERTAIN, the noise of an output is larger than what differs between samples; "
    assert result.headline.startswith(said) and (result.sqnr > 40) is (offset > 0)


def test_bytes_are_met_and_the_nearest_that_can_be_is_named(net: Net) -> None:
    """A bound in bytes is met together with others, for one sample whatever the batch; what the message names can be met."""

    def pruned(data: list[Any], **target: Any) -> Any:
        return bitwright.compress(
            net, data, target, widths=1, ranking="uniform", reconstruction=False, batch_norms=False, progress=False
        )

    found = pruned(DATA, memory="12KiB", params=0.9)
    assert found.after["memory"] <= 12 * 1024 < found.before["memory"]
    assert found.after["params"] <= 0.9 * found.before["params"]
    alone = pruned([x[:1] for x in DATA], memory=12 * 1024)
    assert alone.before == {**found.before, "macs": found.before["macs"] / 8} and alone.after["memory"] <= 12 * 1024
    assert pruned(DATA, memory="1MB", macs=0.8).after["macs"] > 0.6 * found.before["macs"]  # it fits as it is
    with pytest.raises(ConfigError, match=r"2,000 bytes\) of the memory cannot be met: .*least is 0\.\d+ \(") as raised:
        pruned(DATA, memory="2kB", params=0.9)
    least = int(re.search(r"least is \S+ \(([\d,]+) bytes", str(raised.value))[1].replace(",", ""))  # type: ignore[index]
    assert pruned(DATA, memory=f"{least}").after["memory"] == least
    with pytest.raises(ConfigError, match=r"macs cannot be met \(also missed: memory\)"):
        pruned(DATA, memory="2kB", macs=0.0001)


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_widths_and_bits_chosen_together(form: str, tmp_path: Path) -> None:
    """The bytes are those of the file's codes; the choice is quieter than with one number of bits; the rules give these bits."""
    torch.manual_seed(2)
    model, data = given(Net().eval(), form, tmp_path)
    target, options = {"bytes": 0.13, "macs": 0.95}, {"widths": 1, "cap": 0.3, "progress": False}
    both, four = (bitwright.compress(model, data, target, bits=bits, **options) for bits in [(4, 8), [4]])
    assert both.after["macs"] <= 0.95 * both.before["macs"]
    assert both.sqnr is not None and four.sqnr is not None and both.sqnr >= four.sqnr
    assert 4 in both.bits.values() and set(four.bits.values()) == {4}
    with pytest.raises(ConfigError, match=r"of the bytes cannot be met: with cap=0.3"):
        bitwright.compress(model, data, target, bits=(8,), **options)
    assert "weights: " in str(both)
    graph = front_end_of(both.model).structured(both.model, data[0], None).graph()
    sizes = {
        str(v.param): (math.prod(v.shape), np.dtype(v.dtype)) for v in graph.values.values() if v.param is not None
    }
    held = sum(n * both.bits.get(name, dtype.itemsize * 8) / 8 for name, (n, dtype) in sizes.items())
    assert both.after["bytes"] == held <= 0.13 * both.before["bytes"]
    assert json.loads(both.save(tmp_path)[-1].read_text()) == both.rules
    quantized = bitwright.quantize(both.model, data, recipe=[], config_file=both.rules, progress=False)
    sites = [site for site in quantized.sim.quantizers.values() if site.role == "weight"]
    assert {quantized.sim.graph.values[s.value].param: s.spec.format.bits for s in sites} == dict(both.bits)


def test_the_joint_choice_is_the_best_of_all() -> None:
    """Of all choices of widths and bits within the bytes, the one of least noise by the curves is found and measured."""
    torch.manual_seed(1)
    chain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    data = [torch.randn(64, 6)]
    structure = front_end_of(chain).structured(chain, data[0], None)
    found = checked_dependencies(structure, data[0])
    evidence = Evidence(found.graph, structure.param)
    scores = {g.name: criterion("l2")(g, evidence) for g in found.groups}
    selector = Selector(found, Prices(found.graph), found.groups, scores, ranking="exact", ratios=(0.5, 0.75))
    original = Original(front_end_of(chain).structured(chain, data[0], None).view(), data)
    space = JointSpace(WidthSpace(structure, selector, data, original, False), BitSpace(structure, (8, 4, 3)))
    whole = structure.outputs(data[0])[0]
    noise = {}
    for choice in itertools.product(*(range(len(part.options)) for part in space.parts)):
        tables = space.around(choice)  # of one choice: exact there
        for name, (rows, rest) in tables.items():
            assert rest + sum(r[k] for r, k in zip(rows, choice, strict=True)) == pytest.approx(
                space.costs_of(choice)[name]
            )
        if space.costs_of(choice)["bytes"] <= 0.18 * space.original_costs()["bytes"]:
            undo = space.apply(choice)
            noise[choice] = space.noise()
            undo()
    np.testing.assert_array_equal(structure.outputs(data[0])[0], whole)  # trials leave nothing behind
    estimates = sensitivities(space, progress=False)
    table = Tables(space).noise(estimates)
    start = [len(part.options) - 1 for part in space.parts]
    found = choose(space, {"bytes": 0.18}, start=start, sensitivity=estimates, progress=False)
    quietest = min(noise, key=lambda choice: sum(table[i, k] for i, k in enumerate(choice)))
    assert quietest in {one.choice for one in found.tried}  # of all within the bytes, by the noise of each part alone
    assert found.best.noise == noise[found.best.choice] < 2 * min(noise.values()) < np.median(list(noise.values()))
    assert found.best.costs["bytes"] <= 0.18 * space.original_costs()["bytes"]


def test_a_quantized_file_is_refused_with_the_way_out() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]> g (float[N,8] x) => (float[N,4] y)
        <float scale = {0.5}, int8 zero = {0}> {
        a = DequantizeLinear(W, scale, zero)
        q = QuantizeLinear(x, scale, zero)
        d = DequantizeLinear(q, scale, zero)
        h = MatMul(d, a)
        r = Relu(h)
        b = DequantizeLinear(V, scale, zero)
        y = MatMul(r, b)
    }""")
    rng = np.random.default_rng(0)
    for name, shape in (("W", (8, 16)), ("V", (16, 4))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.integers(-9, 9, shape, np.int8), name))
    x = [rng.normal(size=(4, 8)).astype(np.float32)]
    way_out = "Remedy: the model is quantized already: compress the float model, and quantize what that returns"
    with pytest.raises(ConfigError, match=f"nothing can be removed: .*{way_out}"):
        bitwright.compress(model, x, {"macs": 0.5}, widths=1, progress=False)
    with pytest.raises(ConfigError, match=f"no layer can be written as factors: .*{way_out}"):
        svd_model(load_model(model), x, macs=0.5, progress=False)


def test_bad_input(net: Net) -> None:
    with pytest.raises(ConfigError, match="'64KiB' of macs is no number"):
        bitwright.compress(net, DATA, {"macs": "64KiB"})
    with pytest.raises(ConfigError, match="'64 apples' is no number of bytes"):
        bitwright.compress(net, DATA, {"memory": "64 apples"})
    with pytest.raises(ConfigError, match=r'-1 of the memory is not a part between 0 and 1.*"256KiB"'):
        bitwright.compress(net, DATA, {"memory": -1})
    with pytest.raises(ConfigError, match=r"0.01 of the macs cannot be met: with cap=0.5 the least is 0\.\d+.*macs"):
        bitwright.compress(net, DATA, {"macs": 0.01}, cap=0.5)
    with pytest.raises(ConfigError, match="no cost 'mac'"):
        bitwright.compress(net, DATA, {"mac": 0.5})
    with pytest.raises(ConfigError, match="1.5 of the macs is not a part between 0 and 1"):
        bitwright.compress(net, DATA, {"macs": 1.5})
    with pytest.raises(ConfigError, match=r"nothing can be removed: 1: the model returns it"):
        bitwright.compress(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), [torch.randn(2, 3)], {"macs": 0.5})
    with pytest.raises(ConfigError, match=r"1 is not a number of bits from 2 to 16.*write bits=\(4, 8\)"):
        bitwright.compress(net, DATA, {"bytes": 0.1}, bits=(1, 8))
    with pytest.raises(ConfigError, match="ranking='uniform' chooses widths alone"):
        bitwright.compress(net, DATA, {"bytes": 0.1}, bits=(4, 8), ranking="uniform")
    with pytest.raises(ConfigError, match=r"0.001 .12 bytes. of the bytes cannot be met.*the least is 0.064 .748"):
        bitwright.compress(net, DATA, {"bytes": 0.001}, bits=(4, 8), cap=0.5)
    with pytest.raises(ConfigError, match="no criterion 'l3'"):
        bitwright.compress(net, DATA, {"macs": 0.5}, importance="l3")
    with pytest.raises(ConfigError, match="taylor needs a loss"):
        bitwright.compress(net, DATA, {"macs": 0.5}, importance="taylor")
    with pytest.raises(CalibrationError, match="held no batch"):
        bitwright.compress(net, [], {"macs": 0.5})
    with pytest.raises(CalibrationError, match="metric is NaN"):
        bitwright.compress(net, DATA, {"macs": 0.5}, metric=lambda model: float("nan"))
    with pytest.raises(CalibrationError, match="returned None"):
        bitwright.compress(net, DATA, {"macs": 0.5}, metric=lambda model: None)


@pytest.mark.parametrize(
    ("importance", "ranking"),
    [("l1", "global"), ("gamma", "global"), ("median", "uniform"), ("lamp", "global"), ("taylor", "uniform"),
     ("hessian", "uniform"),     ("activation", "global"), ("random", "uniform")],
)  # fmt: skip
def test_every_criterion(net: Net, importance: str, ranking: Any) -> None:
    result = bitwright.compress(
        net, DATA, {"macs": 0.6}, importance=importance, ranking=ranking, widths="any", reconstruction=False,
        batch_norms=False, loss=lambda model: model(DATA[0]).square().mean(),
        exclude=() if importance != "gamma" else ("fc",),
    )  # fmt: skip
    assert result.after["macs"] <= 0.6 * result.before["macs"]


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_pruned_then_quantized_by_one_recipe(net: Net, form: str, tmp_path: Path) -> None:
    """8 bits on half of the multiplications; the file has the widths of the simulation and agrees with it."""
    model, data = given(net, form, tmp_path)
    recipe = [{"prune": {"macs": 0.6, "widths": 2}}, "fold", {"sparsify": {"sparsity": 0.1, "method": "magnitude"}}]
    result = bitwright.quantize(model, data, recipe=recipe, path=tmp_path / "out", progress=False)
    assert "% of the macs" in result.report[0].note and "left" in result.report[0].note
    assert result.sim.verify(data[0]).ok
    costs = bitwright.model_costs(str(tmp_path / "out" / "model.onnx"), [data[0]])
    assert costs["macs"] <= 0.6 * bitwright.model_costs(model, [data[0]])["macs"] * 1.001
    assert net.conv1.weight.shape == (16, 3, 3, 3)


def _apart(form: str, tmp_path: Path) -> None:
    """Two processes have measured what one would, each its own parts, and the choice is the same."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()  # two groups
    chain: Any = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 4)).eval()
    model, data = given(chain, form, tmp_path)
    options: dict[str, Any] = {"widths": 2, "progress": False}
    alone = bitwright.compress(model, data, {"macs": 0.5}, **options)
    shared = bitwright.compress(model, data, {"macs": 0.5}, workers=2, resume=tmp_path / "kept", **options)
    assert shared.rows == alone.rows and shared.choice is not None and alone.choice is not None
    assert shared.choice.sensitivity == pytest.approx(alone.choice.sensitivity, rel=1e-6)
    files = [tmp_path / "kept" / f"share {i} of 2" / "compression.json" for i in (1, 2)]
    one, other, every = (
        json.loads(file.read_text())["measured"] for file in (*files, tmp_path / "kept" / "compression.json")
    )
    assert one and other and not one.keys() & other.keys() and (one | other).items() <= every.items()


def test_processes_share_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress, "find_executor", lambda name, workers: in_process)
    _apart("torch", tmp_path)


@pytest.mark.slow
def test_real_processes_measure_a_file(tmp_path: Path) -> None:
    _apart("onnx", tmp_path)


def test_processes_that_cannot_be(net: Net) -> None:
    with pytest.raises(ConfigError, match="0 is not a number of processes"):
        bitwright.compress(net, DATA, {"macs": 0.5}, workers=0)
    with pytest.raises(ConfigError, match="there is no executor 'rai' \\(did you mean 'ray'"):
        bitwright.compress(net, DATA, {"macs": 0.5}, executor="rai")
    with pytest.raises(ConfigError, match="ranking='uniform' measures nothing"):
        bitwright.compress(net, DATA, {"macs": 0.5}, workers=2, ranking="uniform")
    with pytest.raises(ConfigError, match="cannot be sent to another process.*use workers=1"):
        bitwright.compress(net, DATA, {"macs": 0.5}, workers=2, importance="taylor", loss=lambda m: m(DATA[0]).sum())


def test_the_page_of_a_compression(net: Net, tmp_path: Path) -> None:
    """Every group with its units before and after, the front, and what was not touched with its reason."""
    result = bitwright.compress(net, DATA, {"macs": 0.5}, metric=lambda model: 0.5, widths=2, progress=False)
    done = result.details()
    assert [row[0] for row in done["table"]["rows"]] == [row.name for row in result.rows]
    best = next(one for one in done["tried"] if one["chosen"])
    assert best["left"]["macs"] <= 0.5 and best["metric"] == 0.5
    page = result.report_html(tmp_path / "page.html", "Half of it").read_text()
    refused = result.refused[0]
    for words in ("Half of it", result.headline, result.rows[0].name, refused.name, refused.reason):
        assert escape(words) in page


def test_the_choice_goes_on_after_a_kill(net: Net, tmp_path: Path) -> None:
    """What was measured is not measured again, and other data is refused."""
    asked: list[int] = []

    def metric(model: nn.Module) -> float:
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return -float(np.square(model(DATA[0]).detach().numpy() - net(DATA[0]).detach().numpy()).mean())

    options: dict[str, Any] = {"metric": metric, "widths": 2, "resume": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        bitwright.compress(net, DATA, {"macs": 0.5}, **options)
    known = json.loads((tmp_path / "compression.json").read_text())["measured"]
    assert sum(name.startswith("noise") for name in known) >= 2
    result = bitwright.compress(net, DATA, {"macs": 0.5}, **options)
    again = json.loads((tmp_path / "compression.json").read_text())["measured"]
    assert known.items() <= again.items() and result.after["macs"] <= 0.5 * result.before["macs"]
    plain = bitwright.compress(net, DATA, {"macs": 0.5}, metric=lambda m: -metric(m), lower_is_better=True, widths=2)
    assert [row.removed for row in plain.rows] == [row.removed for row in result.rows]
    with pytest.raises(ConfigError, match="measurements of another model, other data"):
        bitwright.compress(net, DATA[1:], {"macs": 0.5}, **options)


def test_the_exact_choice_spares_the_group_that_matters() -> None:
    """The results of one layer are hardly read: it loses more channels than the other; the same part of both does worse."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1)
    ).eval()
    with torch.no_grad():
        net[2].weight[:, 4:] *= 0.02
    even = bitwright.compress(net, DATA, {"macs": 0.5}, ranking="uniform", widths=1, importance="activation")
    exact = bitwright.compress(net, DATA, {"macs": 0.5}, widths=1, importance="activation")

    def error(model: nn.Module) -> float:
        return float((model(DATA[0]) - net(DATA[0])).square().mean())

    assert exact.after["macs"] <= 0.5 * exact.before["macs"]
    assert error(exact.model) < 0.5 * error(even.model)
    assert exact.choice is not None and len(exact.choice.tried) >= 2
    assert list(exact.choice.sensitivity) == ["0", "2"]


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_trials_leave_nothing_behind(net: Net, form: str, tmp_path: Path) -> None:
    """Biases and statistics that are fitted to a trial are taken back with the cut."""
    model, data = given(net, form, tmp_path)
    front = front_end_of(model)
    structure = front.structured(model, data[0], None)
    found = checked_dependencies(structure, data[0])
    scores = {g.name: np.arange(g.units) + 1.0 for g in found.groups}
    selector = Selector(found, Prices(found.graph), found.groups, scores, ranking="exact")
    space = WidthSpace(structure, selector, data, Original(front.structured(model, data[0], None).view(), data), True)
    undo = space.apply([len(part.options) - 1 for part in space.parts])
    assert space.noise() > 1e-3
    undo()
    assert space.noise() == 0


def test_outputs_that_are_known_are_not_computed_again(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact choice makes the same cut from given outputs, with one run of the model less for each batch."""
    wanted = [front_end_of(net).structured(net, DATA[0], None).outputs(batch) for batch in few_batches(DATA)]

    def cut(known: Any) -> tuple[int, list[tuple[int, ...]]]:
        structure = front_end_of(net).structured(net, DATA[0], None)
        runs, outputs = [], structure.outputs

        def counted(batch: Any) -> Any:
            runs.append(batch)
            return outputs(batch)

        monkeypatch.setattr(structure, "outputs", counted)
        report = prune(
            structure, DATA, {"macs": 0.6}, PruneOptions(ranking="exact"), Search(wanted=known, progress=False)
        )
        return len(runs), [row.removed for row in report.rows]

    without, given_outputs = cut(None), cut(wanted)
    assert given_outputs[1] == without[1]
    assert any(without[1])
    assert without[0] - given_outputs[0] == len(wanted) == 3


def test_data_is_read_no_further_than_the_samples_that_choices_need() -> None:
    read: list[int] = []

    def endless() -> Iterator[Any]:
        while True:
            read.append(1)
            yield np.zeros((32, 2), np.float32)

    assert len(few_batches(endless())) == len(read) == 2


def blocked_convolutions(model: Any) -> int:
    """Convolutions that ONNX Runtime computes on blocks of channels."""
    options = ort.SessionOptions()
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder, "optimized.onnx"))
        options.log_severity_level = 3  # the file is for this machine
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        nodes = onnx.load(options.optimized_model_filepath).graph.node
    return sum(node.op_type == "Conv" and node.domain.endswith("nchwc") for node in nodes)


def test_widths_keep_the_blocks_of_the_kernels(tmp_path: Path) -> None:
    """A file is slower than before where convolutions leave their blocks: with the widths of ``cpu`` none does."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()]
    for width in (8, 24, 48):  # also narrow ones, of less than four blocks
        layers += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.ReLU(), nn.Conv2d(width, 2 * width, 1)]
        layers += [nn.ReLU(), nn.Conv2d(2 * width, {8: 24, 24: 48, 48: 10}[width], 1)]
    x = torch.randn(2, 3, 12, 12)
    torch.onnx.export(nn.Sequential(*layers).eval(), (x,), str(tmp_path / "m.onnx"), dynamo=True, verbose=False)
    before = blocked_convolutions(onnx.load(tmp_path / "m.onnx"))
    for ranking in ("uniform", "global", "exact"):
        result = bitwright.compress(
            str(tmp_path / "m.onnx"), [x.numpy()], {"macs": 0.5}, ranking=ranking, reconstruction=False, progress=False
        )
        assert all(row.after % 4 == 0 for row in result.rows) and result.after["macs"] < 0.5 * result.before["macs"]
        assert blocked_convolutions(result.model) == before
