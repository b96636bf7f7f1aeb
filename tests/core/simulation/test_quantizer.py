"""A quantizer's state: what is kept and brought back, and biases whose grid follows from two others."""

from __future__ import annotations

import numpy as np

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import activation_spec, weight_spec
from bitwright.core.simulation.quantizer import DerivedBias, Quantizer


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
