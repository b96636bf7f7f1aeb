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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.affine import fake_quantize, format_numbers
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT_FORMATS, IntFormat
from bitwright.core.numerics.granularity import PER_TENSOR, Granularity, PerChannel
from bitwright.core.numerics.ranges import RANGE_METHODS, choose_range
from bitwright.core.numerics.spec import QuantSpec, RangeMethod
from bitwright.core.numerics.statistics import measure, merge
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


#: kind -> name of the check -> what runs it
def _rules_name_channels(name: str) -> None:
    rule = table_of("channel_rules")[name]
    names = {axis for term in rule.inputs for axis in term if axis != axis.lower()}
    _require(bool(names), "no axis of an input has a capital letter, so that nothing can be cut")


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
