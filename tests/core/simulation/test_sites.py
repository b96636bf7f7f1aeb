"""Sites and their quantizers, threads that share a simulation, and parts of outputs that are judged apart."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import activation_spec, weight_spec
from bitwright.core.simulation.output_quality import noise_and_signal, parts_of, quality
from bitwright.core.simulation.quantizer import DerivedBias, Quantizer
from bitwright.core.simulation.simulation import Lock, Occupancy
from bitwright.errors import BusyError
from bitwright.torch import QuantizationSimModel


def test_a_bias_tells_which_of_its_scales_are_missing() -> None:
    sim = QuantizationSimModel(torch.nn.Sequential(torch.nn.Linear(4, 3)).eval(), torch.ones(2, 4))
    sim.quantizers["0.weight"].enabled = False
    assert sim.quantizers.changes(sim.plan)["0.bias"] == "disabled, because 0.weight is in float"
    sim.quantizers["0.input[0]"].enabled = False
    changed = sim.quantizers.changes(sim.plan)["0.bias"]
    assert changed == "disabled, because 0.input[0] and 0.weight are in float"


def quantizer(role: str, scale: float) -> Quantizer:
    """A quantizer with an encoding of 8 bits."""
    made = Quantizer(role, role, activation_spec() if role == "output" else weight_spec())  # type: ignore[arg-type]
    made.encoding = Encoding(IntFormat(8), np.float32(scale), np.int32(0))
    return made


def bias_of(weight: Quantizer, values: list[float]) -> DerivedBias:
    """The bias of a layer whose input has the scale 0.5."""
    bias = Quantizer("bias", "bias", weight_spec("int32"))
    return DerivedBias("bias", bias, quantizer("output", 0.5), weight, np.float32(values))


def test_what_is_brought_back_is_the_whole_state() -> None:
    for frozen in (False, True):
        made = quantizer("weight", 0.25)
        made.frozen, before = frozen, made.encoding
        restore = made.remember()
        made.frozen = not frozen
        made.encoding = Encoding(IntFormat(4), np.float32(1), np.int32(0))
        made.enabled = False
        restore()
        assert (made.frozen, made.enabled) == (frozen, True) and made.encoding is before


def test_a_weight_scale_that_is_raised_for_its_bias_is_the_weights_scale() -> None:
    weight = quantizer("weight", 1e-12)
    bias = bias_of(weight, [1.0, -3.0])
    bias.refresh()
    assert weight.encoding is not None and bias.quantizer.encoding is not None and bias.reason is None
    assert float(weight.encoding.scale) >= 3.0 / (0.5 * 2**30) * (1 - 1e-6)
    assert bias.quantizer.encoding.scale == np.float32(0.5) * weight.encoding.scale


def test_a_frozen_weight_keeps_its_scale_and_the_bias_stays_in_float() -> None:
    weight = quantizer("weight", 1e-12)
    weight.frozen, before = True, weight.encoding
    bias = bias_of(weight, [1.0, -3.0])
    bias.refresh()
    assert weight.encoding is before and bias.quantizer.encoding is None
    assert bias.reason == "it does not fit int32 in steps of input scale times the frozen weight scale"


def elsewhere(function: Callable[[], object]) -> Exception | None:
    """What ``function`` raises in another thread."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return errors[0] if errors else None


def test_many_run_and_one_changes() -> None:
    use = Occupancy("copy it")
    use.enter()
    assert elsewhere(lambda: (use.enter(), use.leave())) is None and not use.crowded
    assert isinstance(elsewhere(use.exclusive("calibration").__enter__), BusyError)
    with use.exclusive("calibration"), use.exclusive("recording"):  # within a run of its own
        error = elsewhere(use.enter)
        assert isinstance(error, BusyError)
        assert "(recording)" in error.problem and error.remedy.endswith("or copy it")
        assert elsewhere(copy.deepcopy(use).enter) is None
    use.leave()
    assert elsewhere(use.exclusive("calibration").__enter__) is None


def test_a_thread_that_ended_holds_nothing() -> None:
    use = Occupancy("copy it")
    elsewhere(use.enter)
    block = use.exclusive("calibration")
    assert elsewhere(block.__enter__) is None
    use.check()
    with use.exclusive("calibration"):
        pass


def test_copies_of_a_lock_are_free() -> None:
    lock = Lock()
    with lock, copy.deepcopy(lock) as _:
        assert elsewhere(copy.deepcopy(lock).__enter__) is None


RNG = np.random.default_rng(0)


def detections(axis):
    """[N, 84, 100]: boxes in pixels, then probabilities; with the slices along ``axis``."""
    boxes = RNG.uniform(0, 640, (2, 4, 100))
    scores = RNG.uniform(0, 1, (2, 80, 100)) ** np.linspace(1, 40, 80)[:, None]  # of rare and of frequent classes
    return np.moveaxis(np.concatenate([boxes, scores], 1), 1, axis).astype(np.float32)


@pytest.mark.parametrize(("axis", "names"), [(1, ["y[:, 0:4]", "y[:, 4:84]"]), (2, ["y[:, :, 0:4]", "y[:, :, 4:84]"])])
def test_boxes_and_probabilities_in_one_tensor_are_two_parts(axis, names):
    assert [part.name for part in parts_of([[detections(axis)]], ["y"])] == names


def test_slices_of_a_scale_need_not_be_neighbours():
    joints = np.tile([300.0, 200.0, 0.5], 17)  # x, y and a confidence of every joint
    array = RNG.uniform(0.5, 1, (1, 51, 40)) * joints[:, None]
    found = parts_of([[array]], ["pose"])
    assert [len(part.indices) for part in found] == [34, 17]
    assert found[1].name == "pose[:, 2+5+8+...]" and found[1].of(array).max() <= 1


@pytest.mark.parametrize(
    "array",
    [
        RNG.normal(size=(64, 10)),
        RNG.normal(size=(64, 10)) * np.geomspace(1, 300, 10),  # scales without a gap
        RNG.dirichlet(np.geomspace(1e-3, 10, 10), 64),  # probabilities
        RNG.normal(size=(1, 4000)),  # too few numbers in each slice to have a scale
        np.zeros((8, 30)),
        RNG.normal(size=200),
    ],
    ids=["alike", "gradual", "probabilities", "single values", "zeros", "one axis"],
)
def test_what_has_one_scale_is_one_part(array):
    assert [part.axis for part in parts_of([[array]])] == [None]


def test_a_slice_without_signal_is_judged_with_the_largest():
    array = RNG.normal(size=(64, 4)) * [100.0, 1.0, 0.0, 100.0]
    assert [part.indices for part in parts_of([[array]])] == [(0, 2, 3), (1,)]


def test_integers_are_no_part_and_names_may_be_missing():
    outputs = [np.arange(3), np.ones((2, 3), np.float32), np.ones(2, np.float32)]
    assert [(part.output, part.name) for part in parts_of([outputs])] == [(1, "output[1]"), (2, "output[2]")]


def test_lengths_that_differ_from_batch_to_batch_are_no_slices():
    batches = [[RNG.normal(size=(1, n, 6)) * [100, 100, 100, 100, 0.5, 0.5]] for n in (30, 40)]
    assert [part.indices for part in parts_of(batches)] == [(0, 1, 2, 3), (4, 5)]


def test_what_is_not_finite_in_float_is_left_out():
    assert noise_and_signal(np.array([3.0, np.inf, np.nan]), np.array([2.0, 0.0, 0.0])) == (1.0, 9.0)
    noise, signal = noise_and_signal(np.array([[3.0, np.inf], [1.0, 2.0]]), np.array([[2.0, 0.0], [1.0, 0.0]]))
    assert noise.tolist() == [1.0, 4.0] and signal.tolist() == [9.0, 5.0]


def test_the_interval_holds_the_true_ratio_as_often_as_it_says():
    inside = 0
    for _ in range(400):
        signal = RNG.gamma(20, 5, 8)
        noise = 0.01 * signal * RNG.gamma(6, 1 / 6, 8)
        found = quality("y", [noise], [signal])
        inside += found.low <= 20 <= found.high
    assert 0.90 <= inside / 400 <= 0.99


def test_one_sample_has_no_interval_and_no_signal_no_quality():
    def of(noise, signal):
        return quality("y", [np.array(noise)], [np.array(signal)])

    assert of([1.0], [100.0]).figure == "20.0 dB (one sample: no interval)"
    assert of([1.0], [0.0]) is None
    assert of([0.0, 0.0], [1.0, 1.0]).figure == "equal to float"
    broken = of([1.0, math.nan], [1.0, 1.0])
    assert broken.sqnr == -math.inf and broken.figure == "NaN or infinite"


def test_the_worst_sample_is_known_and_of_eight_batches_the_worst_batch():
    noise = [np.array([1.0, 10.0])] * 7
    assert quality("y", noise, [np.full(2, 100.0)] * 7).worst == pytest.approx(10.0)
    batches = quality("y", [*noise, np.array([20.0, 20.0])], [np.full(2, 100.0)] * 8)
    assert batches.units == 8 and batches.worst == pytest.approx(10 * math.log10(5))


def test_batches_that_differ_are_what_the_interval_is_over():
    """Ten recordings of 100 frames, between which the noise varies and inside which it does not."""
    noise = [np.full(100, level) for level in RNG.gamma(4, 0.25, 10)]
    found = quality("y", noise, [np.full(100, 100.0)] * 10)
    alike = quality("y", [np.concatenate(noise)], [np.full(1000, 100.0)])
    assert found.high - found.low > 5 * (alike.high - alike.low)
