"""What was kept comes back whole, a change that fails changes nothing, and a new spec needs no data; in both front ends."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright.core.health.diagnosis import Repair
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat, parse_format
from bitwright.core.numerics.granularity import PerBlock
from bitwright.core.numerics.spec import RangeMethod, weight_spec
from bitwright.core.numerics.statistics import Histogram, MinMax, bounds_of
from bitwright.core.simulation.simulation import all_or_nothing
from bitwright.errors import BitwrightError, CalibrationError, ConfigError, EncodingsError
from bitwright.torch import QuantizationSimModel
from tests.conformance.test_ptq import exported
from tests.support.simulations import calibrated


class Net(nn.Module):
    """Two layers with a mask between them, which is a large negative number in some data and small in other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(x))
        return self.b(h * torch.sigmoid(h + x))


def data(seed: int, *, masked: bool = False, nan: bool = False) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    x[0, 0] = float("nan") if nan else -1e9 if masked else x[0, 0]
    return x


@functools.cache
def net_onnx() -> Any:
    return exported(Net(), data(0))


@dataclass(frozen=True)
class FrontEnd:
    """One way to simulate the net."""

    make: Callable[[], Any]
    batch: Callable[[torch.Tensor], Any]
    stabilize: Callable[..., Any]
    run: Callable[[Any, Any], Any]


FRONT_ENDS = {
    "torch": FrontEnd(
        lambda: bt.QuantizationSimModel(Net(), data(0)),
        lambda x: x,
        bt.stabilize,
        lambda sim, x: sim.model(x).detach().numpy(),
    ),
    "onnx": FrontEnd(
        lambda: bo.QuantizationSimModel(net_onnx(), data(0).numpy()),
        lambda x: x.numpy(),
        bo.stabilize,
        lambda sim, x: sim.run(x)[0],
    ),
}


def seen(statistics: Any) -> Any:
    if not isinstance(statistics, MinMax | Histogram):
        return statistics
    bounds = bounds_of(statistics)
    return bounds.lo.tolist(), bounds.hi.tolist(), bounds.nan_count.tolist()


def state(sim: Any, front: FrontEnd) -> dict[str, Any]:
    """All that a user can see of a simulation, its answers among it."""
    found: dict[str, Any] = {}
    if sim.calibrated:
        try:
            found["output"] = front.run(sim, front.batch(data(99))).tolist()
        except BitwrightError as error:
            found["output"] = str(error)
    for name, site in sim.quantizers.items():
        q = site.quantizer
        found[name] = (q.spec, q.encoding, q.state, q.frozen, seen(q.statistics), q.empty, str(site.channels.seen))
    found["coverage"] = str(sim.coverage())
    found["sim"] = (sim.calibrated, sim.calibration_log, tuple(sim.repairs))
    return found


def interrupted(front: FrontEnd, first: list[torch.Tensor]) -> Any:
    yield from map(front.batch, first)
    raise KeyboardInterrupt


def narrow(sim: Any) -> dict[str, Any]:
    """An encodings file of which the last record fits no tensor."""
    records = [
        {"name": "a.weight", "y_scale": 0.5, "y_zero_point": 3, "output_dtype": "int8"},
        {"name": "b.weight", "y_scale": [0.5] * 5, "axis": 0, "output_dtype": "int8"},
    ]
    return {"version": "2.0.0", "encodings": records}


def change_spec(sim: Any, front: FrontEnd) -> None:
    sim.quantizers["*.weight"].spec = replace(sim.quantizers["a.weight"].quantizer.spec, format=parse_format("int4"))  # fmt: skip


def own_encoding(sim: Any, front: FrontEnd) -> None:
    sim.quantizers["a.weight"].encoding = Encoding(IntFormat(8), np.float32(0.25), np.int32(7))


# name -> what it does to a simulation; some fail, which must not matter
CHANGES: dict[str, Callable[[Any, FrontEnd], Any]] = {
    "calibrate": lambda s, f: s.compute_encodings([f.batch(data(1))], progress=False),
    "masked": lambda s, f: s.compute_encodings([f.batch(data(2, masked=True))], progress=False),
    "resume": lambda s, f: s.compute_encodings([f.batch(data(3))], resume=True, progress=False),
    "nan": lambda s, f: s.compute_encodings([f.batch(data(4)), f.batch(data(4, nan=True))], progress=False),
    "none": lambda s, f: s.compute_encodings([], progress=False),
    "interrupted": lambda s, f: s.compute_encodings(interrupted(f, [data(5)]), progress=False),
    "at once": lambda s, f: s.compute_encodings(interrupted(f, []), progress=False),
    "off": lambda s, f: setattr(s.quantizers["*.output?0?"], "enabled", False),
    "on": lambda s, f: setattr(s.quantizers["*"], "enabled", True),
    "freeze": lambda s, f: setattr(s.quantizers["a.*"], "frozen", True),
    "thaw": lambda s, f: setattr(s.quantizers["*"], "frozen", False),
    "spec": change_spec,
    "encoding": own_encoding,
    "bad group": lambda s, f: setattr(s.quantizers["*"], "spec", weight_spec("int8", PerBlock(4))),
    "bad file": lambda s, f: s.load_encodings(narrow(s), strict=False),
    "bad params": lambda s, f: s.set_and_freeze_param_encodings(narrow(s)),
    "repair": lambda s, f: f.stabilize(s, repairs=[Repair(op_of(s, "Add"), "clamp", -1.0, 1.0)]),
    "float": lambda s, f: f.stabilize(s, repairs=[Repair(op_of(s, "Add"), "float")]),
}  # fmt: skip


def op_of(sim: Any, kind: str) -> str:
    return next(op.name for op in sim.graph.ops if op.type == kind)


def carry_out(sim: Any, front: FrontEnd, names: list[str]) -> None:
    for name in names:
        before = state(sim, front)
        try:
            CHANGES[name](sim, front)
        except BitwrightError:
            assert state(sim, front) == before, name
        except KeyboardInterrupt:
            assert name == "interrupted" or state(sim, front) == before, name


@pytest.mark.parametrize("front", FRONT_ENDS)
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(list(CHANGES)), max_size=4), st.lists(st.sampled_from(list(CHANGES)), max_size=5))
def test_any_changes_are_taken_back(front: str, first: list[str], then: list[str]) -> None:
    end = FRONT_ENDS[front]
    sim = end.make()
    carry_out(sim, end, first)
    before, restore = state(sim, end), sim.remember()
    carry_out(sim, end, then)
    restore()
    assert state(sim, end) == before
    # what comes after is what would have come, too
    fresh = end.make()
    carry_out(fresh, end, first)
    for one in (sim, fresh):
        one.quantizers["*"].frozen = False
        one.compute_encodings([end.batch(data(8))], progress=False, allow_unreached=True)
    assert state(sim, end) == state(fresh, end)


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_parameters_come_back_where_they_were_kept(front: str) -> None:
    end = FRONT_ENDS[front]
    sim = end.make()
    CHANGES["calibrate"](sim, end)
    before = state(sim, end)
    with pytest.raises(ZeroDivisionError), all_or_nothing(sim, parameters=True):
        if front == "torch":
            with torch.no_grad():
                sim.model.a.weight.mul_(2)
        else:
            sim.set_parameter("a.weight", 2 * sim.constants["a.weight"])
        assert state(sim, end) != before
        raise ZeroDivisionError
    assert state(sim, end) == before


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_what_the_user_switched_off_stays_off_after_a_restore(front: str) -> None:
    end = FRONT_ENDS[front]
    sim = end.make()
    site = sim.quantizers[f"{op_of(sim, 'Add')}.output[0]"]
    site.enabled = False
    restore = sim.remember()
    site.enabled = True
    CHANGES["masked"](sim, end)
    assert not site.enabled and "because" in site.quantizer.state  # calibration did it, and may take it back
    restore()
    CHANGES["calibrate"](sim, end)
    assert not site.enabled and site.quantizer.state == "disabled"


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_what_the_user_switches_off_again_stays_off(front: str) -> None:
    end = FRONT_ENDS[front]
    sim = end.make()
    site = sim.quantizers[f"{op_of(sim, 'Add')}.output[0]"]
    CHANGES["masked"](sim, end)
    site.enabled = False
    CHANGES["calibrate"](sim, end)
    assert not site.enabled


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_a_failing_calibration_keeps_the_earlier_encodings(front: str) -> None:
    end = FRONT_ENDS[front]
    sim = end.make()
    CHANGES["calibrate"](sim, end)
    before = state(sim, end)
    with pytest.raises(CalibrationError, match="not finite"):
        CHANGES["nan"](sim, end)
    with pytest.raises(CalibrationError, match="no batch"):
        CHANGES["none"](sim, end)
    with pytest.raises(KeyboardInterrupt):
        CHANGES["at once"](sim, end)
    assert state(sim, end) == before


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_a_refused_file_changes_nothing(front: str, tmp_path: Any) -> None:
    end = FRONT_ENDS[front]
    sim = end.make()
    CHANGES["calibrate"](sim, end)
    before = state(sim, end)
    path = tmp_path / "bad.encodings"
    path.write_text(json.dumps(narrow(sim)))
    with pytest.raises((EncodingsError, ConfigError), match=r"b\.weight"):
        sim.load_encodings(path, strict=False)
    with pytest.raises((EncodingsError, ConfigError), match=r"b\.weight"):
        sim.set_and_freeze_param_encodings(path)
    with pytest.raises(BitwrightError, match="axis 1 does not exist"):
        CHANGES["bad group"](sim, end)
    assert state(sim, end) == before


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_a_spec_says_what_was_loaded(front: str) -> None:
    end = FRONT_ENDS[front]
    sim = end.make()
    assert sim.quantizers["a.weight"].spec.symmetry == "symmetric"
    records = [{"name": "a.weight", "y_scale": 0.5, "y_zero_point": 3, "output_dtype": "int8"}]
    sim.set_and_freeze_param_encodings({"version": "2.0.0", "encodings": records})
    assert sim.quantizers["a.weight"].spec.symmetry == "asymmetric"
    assert sim.coverage().find("a.weight").how.endswith("int8 asymmetric per tensor, minmax")
    own_encoding(sim, end)
    assert sim.quantizers["a.weight"].spec.symmetry == "asymmetric"


class Branch(nn.Module):
    """Two ways, of which the sign of the data chooses one."""

    def __init__(self, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), b

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


def test_eight_sites_are_named_and_the_others_counted(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(1, 2)
    sim = QuantizationSimModel(Branch(nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))), x, examples=[-x])
    with caplog.at_level(logging.WARNING, "bitwright"):
        sim.compute_encodings([x])
    assert re.search(r"never reached 10 site.*: b\.0\.output\[0\].*, b\.7\.output\[0\] and 2 more\n", caplog.text)


def test_sites_that_calibration_never_reached(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(1, 2)
    sim = QuantizationSimModel(Branch(nn.Linear(2, 2)), x, examples=[-x])
    with caplog.at_level(logging.WARNING, "bitwright"):
        sim.compute_encodings([x])
    assert re.search(r"never reached 1 site\(s\), without an encoding; using them is an error: b\.output", caplog.text)
    with pytest.raises(CalibrationError, match=r"b\.output\[0\]: the quantizer has no encoding: calibration never"):
        sim.model(-x)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "bitwright"):
        sim.compute_encodings([x], allow_unreached=True)
    assert re.search(r"never reached 1 site\(s\), left in float: b\.output", caplog.text)
    assert torch.isfinite(sim.model(-x)).all()


NEW_SPECS = {
    "4 bits": {"format": IntFormat(4, signed=False)},
    "16 bits": {"format": IntFormat(16, signed=False)},
    "symmetric": {"format": IntFormat(8), "symmetry": "symmetric"},
    "another method": {"method": RangeMethod("minmax")},
}


def simulation(front: str, scheme: str) -> Any:
    if front == "torch":
        return bt.QuantizationSimModel(Net(), data(0), scheme)
    return bo.QuantizationSimModel(net_onnx(), data(0).numpy(), scheme)


def calibrate(sim: Any, front: str) -> Any:
    batches = [data(i) if front == "torch" else data(i).numpy() for i in (1, 2)]
    sim.compute_encodings(batches, progress=False)
    return sim


def change(sim: Any, facets: dict[str, Any], roles: tuple[str, ...]) -> None:
    for site in sim.quantizers.values():
        if site.role in roles:
            site.spec = replace(site.quantizer.spec, **facets)


@pytest.mark.parametrize("front", ["torch", "onnx"])
@pytest.mark.parametrize("scheme", ["min_max", "mse"])
@pytest.mark.parametrize("what", NEW_SPECS)
def test_activations_are_what_calibration_under_the_new_spec_gives(front: str, scheme: str, what: str) -> None:
    roles = ("input", "output")
    changed = calibrate(simulation(front, scheme), front)
    change(changed, NEW_SPECS[what], roles)
    fresh = simulation(front, scheme)
    change(fresh, NEW_SPECS[what], roles)
    calibrate(fresh, front)
    for name, site in changed.quantizers.items():
        if site.role in roles:
            assert site.encoding == fresh.quantizers[name].encoding, name


@pytest.mark.parametrize("front", ["torch", "onnx"])
@pytest.mark.parametrize("facets", [{"format": IntFormat(4)}, {"granularity": PerBlock(2)}], ids=str)
def test_weights_are_calibrated_on_their_values(front: str, facets: dict[str, Any]) -> None:
    changed, fresh = calibrate(simulation(front, "min_max"), front), simulation(front, "min_max")
    for sim in (changed, fresh):
        site = sim.quantizers["a.weight"]
        site.spec = replace(site.quantizer.spec, **facets)
    calibrate(fresh, front)
    found = changed.quantizers["a.weight"].encoding
    assert found is not None and np.array_equal(found.scale, fresh.quantizers["a.weight"].encoding.scale)


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_data_adds_to_the_statistics_kept(front: str) -> None:
    """A histogram goes on as one, though the new method reads its ends only."""
    sim = calibrate(simulation(front, "mse"), front)
    change(sim, {"method": RangeMethod("minmax")}, ("input", "output"))
    sim.compute_encodings([data(3) * 2 if front == "torch" else data(3).numpy() * 2], resume=True, progress=False)
    whole = simulation(front, "min_max")
    batches = [data(1), data(2), data(3) * 2]
    whole.compute_encodings([b if front == "torch" else b.numpy() for b in batches], progress=False)
    name = next(n for n, s in sim.quantizers.items() if s.role in ("input", "output") and s.enabled)
    assert sim.quantizers[name].encoding == whole.quantizers[name].encoding


def test_what_no_statistics_serve_needs_data() -> None:
    sim = calibrate(simulation("torch", "min_max"), "torch")
    change(sim, {"method": RangeMethod("mse")}, ("input", "output"))  # reads a histogram
    sites = [s for s in sim.quantizers.values() if s.role == "output" and not s.quantizer.is_fixed]
    assert sites and all(s.encoding is None for s in sites)


def test_a_copy_calibrates_on_its_own_weights() -> None:
    import copy

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x)

    sim = calibrated(bt.QuantizationSimModel(Linear(), torch.randn(2, 4)), [torch.randn(2, 4)])
    other = copy.deepcopy(sim)
    with torch.no_grad():
        other.model.a.weight.mul_(2)
    for one in (sim, other):
        one.quantizers["a.weight"].spec = replace(one.quantizers["a.weight"].spec, format=IntFormat(4))
    found, twice = (one.quantizers["a.weight"].encoding.scale for one in (sim, other))
    assert np.array_equal(found * 2, twice)
