"""Conformance tests of plug-ins, which the rows of this package pass as well.

A package that adds rows runs them in its own tests::

    import pytest
    from bitwright.testing import CHECKS, check

    @pytest.mark.parametrize("test", CHECKS["range_methods"])
    def test_conforms(test):
        check("range_methods", "mine", test)
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.graph.graph import Graph, Op, Value
from bitwright.core.graph.operators import OPS, OpRow
from bitwright.core.numerics.affine import fake_quantize, format_numbers
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT_FORMATS, SCALE_FORMATS, Format, IntFormat
from bitwright.core.numerics.granularity import PER_TENSOR, Granularity, PerBlock, PerChannel
from bitwright.core.numerics.ranges import RANGE_METHODS, choose_range
from bitwright.core.numerics.spec import QuantSpec, RangeMethod
from bitwright.core.numerics.statistics import measure, merge
from bitwright.core.placement.config import default_rules
from bitwright.core.placement.place import place
from bitwright.core.registry import table_of
from bitwright.errors import BitwrightError, ConfigError, close_matches

Array = NDArray[Any]


def _range(name: str, x: Array, granularity: Granularity = PER_TENSOR, parts: int = 1) -> tuple[Array, Array]:
    """The range of data that come in ``parts``."""
    kind = RANGE_METHODS[name].needs
    found: Any = None
    for piece in np.array_split(x, parts):
        one: Any = measure(kind, piece, granularity)
        found = one if found is None else merge(found, one)
    lo, hi = choose_range(found, QuantSpec(IntFormat(8), method=RangeMethod(name)), "conformance")
    return np.asarray(lo), np.asarray(hi)


def _draws() -> Iterator[tuple[str, Array]]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((64, 6, 5)).astype(np.float32)
    yield "normal values", normal
    yield "values above zero", np.abs(normal)
    yield "values below zero", -np.abs(normal)
    yield "an outlier", np.concatenate([normal.ravel(), [1e4]]).astype(np.float32)[:, None]
    yield "one value", np.full((8, 4), 0.5, np.float32)
    yield "zeros", np.zeros((8, 4), np.float32)
    yield "two values", np.repeat(np.array([[-1, 1]], np.float32), 32, 0)


def _ranges_are_finite(name: str) -> None:
    for what, x in _draws():
        lo, hi = _range(name, x)
        _require(bool(np.isfinite([lo, hi]).all() and lo <= hi), f"the range of {what} is {float(lo)} to {float(hi)}")


def _ranges_lie_inside(name: str) -> None:
    for what, x in _draws():
        lo, hi = _range(name, x)
        seen = float(x.min()), float(x.max())
        inside = min(seen[0], -abs(seen[1])) <= lo and hi <= max(seen[1], abs(seen[0]))
        _require(bool(inside), f"the range of {what} is {float(lo):g} to {float(hi):g}, and values are {seen}")


def _ranges_scale(name: str) -> None:
    for what, x in _draws():
        once, twice = np.array(_range(name, x)), np.array(_range(name, x * np.float32(4)))
        _require(
            np.allclose(once * 4, twice, rtol=1e-6), f"{what}, times 4, have the range {twice}, not 4 times {once}"
        )


def _ranges_do_not_depend_on_batches(name: str) -> None:
    for what, x in _draws():
        whole, parts, turned = _range(name, x), _range(name, x, parts=3), _range(name, x[::-1], parts=2)
        _require(np.array_equal(whole, parts) and np.array_equal(whole, turned), f"{what}: {whole}, in parts {parts}")


def _ranges_per_channel(name: str) -> None:
    x = next(_draws())[1] * np.arange(1, 7, dtype=np.float32)[:, None]
    lo, hi = _range(name, x, PerChannel(1))
    alone = [_range(name, x[:, i]) for i in range(6)]
    _require(lo.size == hi.size == 6, f"6 channels have ranges of shape {lo.shape}")
    _require(
        np.allclose(lo.ravel(), [a[0] for a in alone], rtol=0.05, atol=1e-3), "a channel has another range than alone"
    )


def _encoding(name: str) -> Encoding:
    fmt = FLOAT_FORMATS[name]
    return Encoding(fmt, np.array(0.25 if fmt.scaled else 1.0, np.float32), np.array(0, np.int32))


def _numbers(name: str) -> Array:
    fmt = FLOAT_FORMATS[name]
    if fmt.bits > 10:  # of wide formats some
        few = np.random.default_rng(0).standard_normal(500).astype(np.float32)
        return np.unique(fake_quantize(few, _encoding(name)))
    return np.unique(format_numbers(fmt)) * _encoding(name).scale


def _numbers_stay(name: str) -> None:
    numbers = _numbers(name)
    _require(np.array_equal(fake_quantize(numbers, _encoding(name)), numbers), "a number of the format is moved")


def _rounding_is_to_nearest(name: str) -> None:
    numbers = _numbers(name)
    x = np.random.default_rng(1).uniform(numbers[0], numbers[-1], 500).astype(np.float32)
    found = np.abs(fake_quantize(x, _encoding(name)) - x)
    nearest = np.abs(x[:, None] - numbers).min(1)
    _require(bool((found <= nearest * (1 + 1e-6)).all()), "a value is not rounded to the nearest number")


def _rounding_is_monotone(name: str) -> None:
    numbers = _numbers(name)
    x = np.sort(np.random.default_rng(2).uniform(3 * numbers[0], 3 * numbers[-1], 500).astype(np.float32))
    y = fake_quantize(x, _encoding(name))
    _require(bool((np.diff(y) >= 0).all()), "larger values become smaller numbers")
    zero = float(fake_quantize(np.zeros(1, np.float32), _encoding(name))[0])
    _require(zero == 0 or len(numbers) == 2, "zero is no number of the format")


def _torch_rounds_alike(name: str) -> None:
    torch = importlib.import_module("torch")
    x = np.random.default_rng(3).standard_normal(2000).astype(np.float32) * 3
    ours, theirs = fake_quantize(x, _encoding(name)), fake_quantize(torch.from_numpy(x), _encoding(name))
    _require(np.array_equal(ours, np.asarray(theirs)), "numpy and torch give other bits")


def _around(name: str, row: OpRow) -> Graph:
    """A graph of a convolution, the operator, and a convolution; every port of the operator that the row names is fed."""
    ports = {0, *(row.activations or ()), *row.params, *(p for p in (row.weight, row.bias) if p is not None)}
    stored = {*row.params, *(p for p in (row.weight, row.bias) if p is not None)} - {*(row.activations or ())}
    rank = max([2, *(axis + 1 for axis in row.axes or () if axis is not None)])
    image, values, operands = (1, 8, 8, 8), {"x": Value("x", "input", (1, 8, 8, 8))}, []
    for port in range(max(ports) + 1):
        operand = f"param{port}" if port in stored else "first.out" if port in ports else None
        operands.append(operand)
        if port in stored:
            shape = (8,) * rank if port == row.weight else (8,)
            values[f"param{port}"] = Value(f"param{port}", "param", shape, param=f"param{port}")
    for weight in ("first.weight", "last.weight"):
        values[weight] = Value(weight, "param", (8, 8, 1, 1), param=weight)
    values.update((made, Value(made, "activation", image)) for made in ("first.out", "op.out", "last.out"))
    ops = [
        Op("first", "Conv", ("x", "first.weight"), ("first.out",)),
        Op("op", name, tuple(operands), ("op.out",)),
        Op("last", "Conv", ("op.out", "last.weight"), ("last.out",)),
    ]
    return Graph(ops, values, ["x"], ["last.out"])


def _operators_are_placed(name: str) -> None:
    row = OPS[name]
    made = place(_around(name, row), default_rules())
    own = {site.value: site for site in made.sites.values() if site.op == "op"}
    quantized = row.integer and row.kind not in ("movement", "merge")
    _require("op.out" in own or not quantized, "integer kernels compute it, and its output has no grid")
    _require(row.kind != "float" or not own, f"it is computed in float, and these have a grid: {', '.join(own)}")
    moved = row.kind != "movement" or made.shared.get("op.out") == "first.output[0]"
    _require(moved, f"it moves data, and its output is not on the grid of what it moves: {made.floats.get('op.out')}")
    if row.kind == "compute" and row.weight is not None and row.weight not in (row.activations or ()):
        weight = own.get(f"param{row.weight}")
        _require(weight is not None, "its weight has no grid")
        axis = row.axes[0] if row.axes is not None else None
        scales = getattr(weight.spec.granularity, "axis", None) if weight is not None else None
        _require(axis is None or scales == axis, f"scales of its weight lie along axis {scales}, not {axis}")


#: layouts of weights, of which a kind of files stores some
_LAYOUTS: tuple[tuple[Format, Granularity, str, str], ...] = tuple(
    (IntFormat(bits), granularity, symmetry, scales)
    for bits in (4, 8, 2, 3)
    for granularity in (PerBlock(32), PerChannel(0), PER_TENSOR)
    for symmetry in ("symmetric", "asymmetric")
    for scales in ("float32", "float16", "bfloat16")
) + tuple(
    (fmt, granularity, "symmetric", scales)
    for fmt in (FLOAT_FORMATS["float8_e4m3"], FLOAT_FORMATS["float4_e2m1"])
    for granularity in (PerBlock(16), PerBlock(32), PerChannel(0))
    for scales in SCALE_FORMATS
)  # fmt: skip


def _stored_layouts(name: str) -> list[QuantSpec]:
    """Up to four layouts that files of a kind store."""
    packed, refuses = importlib.import_module("bitwright.llm.packed"), table_of("files")[name].refuses
    specs = (
        QuantSpec(fmt, granularity, symmetry, scale_format=scales)  # type: ignore[arg-type]
        for fmt, granularity, symmetry, scales in _LAYOUTS
    )
    return list(islice((spec for spec in specs if not refuses(packed.planned(_WEIGHT, (32, 64), spec))), 4))


_WEIGHT = "model.layers.0.mlp.up_proj.weight"
_CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 32, "vocab_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
_BESIDE = 65536  # bytes of headers and configuration


def _files_give_back(name: str) -> None:
    llm, torch = importlib.import_module("bitwright.llm"), importlib.import_module("torch")
    kinds = importlib.import_module("bitwright.llm.files.table")
    values = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    specs = _stored_layouts(name)
    _require(bool(specs), "it stores none of the layouts that are tried: 2 to 8 bits, float8, float4")
    for spec in specs:
        norm = llm.FloatWeight("model.layers.0.input_layernorm.weight", torch.linspace(0.5, 1.5, 64))
        given = [llm.PackedWeight.nearest(_WEIGHT, values, spec), norm]
        with tempfile.TemporaryDirectory() as folder:
            llm.write_checkpoint(folder, given, _CONFIG, to=name)
            kind = kinds.kind_of(Path(folder))
            _require(kind is not None and kind.name == name, f"its files are taken for {kind.name if kind else 'none'}")
            found = {weight.name: weight for weight in llm.read_checkpoint(folder)}
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
        _require(found.keys() == {weight.name for weight in given}, f"weights come back as {sorted(found)}")
        for weight in given:
            same = np.array_equal(found[weight.name].dequantize(), weight.dequantize())
            _require(same, f"{weight.name} ({weight.plan.layout or 'float'}) comes back as other numbers")
        told = sum(table_of("files")[name].size(weight.plan) for weight in given)
        _require(told > 0 and size < told + _BESIDE, f"files of {size} bytes are told to take {told:.0f}")


def _network() -> tuple[Any, list[Any]]:
    torch = importlib.import_module("torch")
    generator = torch.Generator().manual_seed(0)
    nn = torch.nn
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return net, [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(4)]


def _steps_run(name: str, options: Mapping[str, Any] | None = None) -> None:
    quantize = importlib.import_module("bitwright.recipes.quantize").quantize
    net, batches = _network()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    result = quantize(net, batches, recipe=["fold", {name: options}] if name != "fold" else ["fold"], progress=False)
    _require(result.sim.calibrated, "the simulation is not calibrated afterwards")
    outputs = result.model(batches[0]).detach().numpy()
    _require(bool(np.isfinite(outputs).all()), "outputs of the simulation are not finite")
    same = all(bool((before[key] == value).all()) for key, value in net.state_dict().items())
    _require(same, "the model that was given is changed")


def _targets_verify(name: str) -> None:
    module = importlib.import_module("bitwright.torch")
    net, batches = _network()
    sim = module.QuantizationSimModel(net, batches[0])
    sim.compute_encodings(batches, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        exported = sim.export(folder, "net", batches[0], target=name)
        _require(Path(exported.qdq).is_file(), "no file is written")
    report = sim.verify(batches[1], target=name)
    _require(report.ok, f"the file does not compute what the simulation does: {report}")


def _runtimes_compute(name: str) -> None:
    adapters = importlib.import_module("bitwright.runtimes.adapters")
    onnx = importlib.import_module("onnx")
    row = adapters.find_runtime(name)
    if row.suffix != ".onnx":
        return  # those of .tflite files are compared by verify
    weight = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    value, one = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["h"]), onnx.helper.make_node("Relu", ["h"], ["y"])]
    graph = onnx.helper.make_graph(
        nodes, "g", [value("x", one, [2, 5])], [value("y", one, [2, 3]), value("h", one, [2, 3])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    x = np.random.default_rng(1).standard_normal((2, 5)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.onnx")
        onnx.save(model, path)
        for reference in (True, False):
            found = row.open(path, 1, reference).run({"x": x, "not_there": x})
            _require(set(found) == {"y", "h"}, f"outputs are named {sorted(found)}, not h and y")
            _require(np.allclose(found["h"], x @ weight, atol=1e-5), "a product of matrices has other values")
            _require(np.allclose(found["y"], np.maximum(x @ weight, 0), atol=1e-5), "outputs are swapped or wrong")


def _metrics_have_a_value_per_sample(name: str) -> None:
    metric = table_of("metrics")[name]()
    rng = np.random.default_rng(0)
    outputs, labels = rng.standard_normal((24, 5)).astype(np.float32), rng.integers(0, 5, 24)
    whole = metric.per_sample([metric.values([outputs], [outputs], labels)])
    _require(
        np.shape(whole) == (24,) and bool(np.isfinite(whole).all()),
        f"24 samples have values of shape {np.shape(whole)}",
    )
    cuts = [metric.values([y], [y], right) for y, right in zip(np.split(outputs, 3), np.split(labels, 3), strict=True)]
    parts = metric.per_sample(cuts)
    _require(np.allclose(parts.mean(), whole.mean(), rtol=1e-6), "batches change its value")
    _require(metric.better in ("higher", "lower"), f"better is {metric.better!r}")
    right = np.eye(5, dtype=np.float32)[labels] * 9
    best = metric.per_sample([metric.values([right], [right], labels)]).mean()
    worse = best < whole.mean() if metric.better == "higher" else best > whole.mean()
    _require(not worse, f"right answers have {best:g}, random ones {whole.mean():g}, and {metric.better} is better")


def _rules_name_channels(name: str) -> None:
    rule = table_of("channel_rules")[name]
    names = {axis for term in rule.inputs for axis in term if axis != axis.lower()}
    _require(bool(names), "no axis of an input has a capital letter, so that nothing can be cut")


#: kind -> name of the check -> what runs it
_TESTS: dict[str, dict[str, Callable[..., None]]] = {
    "range_methods": {
        "finite": _ranges_are_finite, "inside": _ranges_lie_inside, "scale": _ranges_scale,
        "batches": _ranges_do_not_depend_on_batches, "channels": _ranges_per_channel,
    },
    "formats": {
        "numbers stay": _numbers_stay, "nearest": _rounding_is_to_nearest, "monotone": _rounding_is_monotone,
        "torch": _torch_rounds_alike,
    },
    "steps": {"runs": _steps_run},
    "operators": {"placed": _operators_are_placed},
    "files": {"gives back": _files_give_back},
    "targets": {"verifies": _targets_verify},
    "runtimes": {"computes": _runtimes_compute},
    "metrics": {"values": _metrics_have_a_value_per_sample},
    "channel_rules": {"names a channel": _rules_name_channels},
}  # fmt: skip
CHECKS: dict[str, tuple[str, ...]] = {kind: tuple(tests) for kind, tests in _TESTS.items()}
"""Kind of plug-in -> names of its checks. Those of metrics give scores of five classes, and labels."""


class _Broken(Exception):
    """A failed check."""


def _require(holds: bool, seen: str) -> None:
    if not holds:
        raise _Broken(seen)


def check(kind: str, name: str, test: str | None = None, *, options: Mapping[str, Any] | None = None) -> None:
    """Run conformance tests on a plug-in.

    Args:
        kind: a key of :data:`CHECKS`.
        name: of the row, registered or an entry point.
        test: one check; all of the kind by default.
        options: of a step that needs some.

    Raises:
        ConfigError: there is no such kind, row or check; or a check fails: the message names it, and what was seen.
    """
    table = table_of(kind)
    if name not in table:
        raise ConfigError(f"{kind} {name!r}", f"there is no such row{close_matches(name, table)}", "register it first")
    tests = _TESTS[kind]
    if test is not None and test not in tests:
        raise ConfigError(f"{kind} {name!r}", f"there is no check {test!r}", f"use {', '.join(tests)}")
    for which, run in tests.items():
        if test not in (None, which):
            continue
        try:
            run(name, options) if options is not None else run(name)
        except _Broken as broken:
            raise ConfigError(
                f"{kind} {name!r}", f"it breaks the conformance test {which!r}: {broken}", "repair the plug-in"
            ) from None
        except BitwrightError:
            raise
        except Exception as error:  # whatever the plug-in raises
            problem = f"it fails in the conformance test {which!r}: {type(error).__name__}: {error}"
            raise ConfigError(f"{kind} {name!r}", problem, "repair the plug-in") from error


__all__ = ["CHECKS", "check"]
