"""What has no counterpart says so, and what to do instead."""

from __future__ import annotations

import importlib

import pytest

from bitwright.aimet_common.absent import ABSENT, absence


@pytest.mark.parametrize("name", sorted(name for name in ABSENT if name.split(".")[-2].islower()))
def test_what_is_absent_says_what_to_do_instead(name):
    module, _, last = name.rpartition(".")
    with pytest.raises(ImportError) as caught:
        found = importlib.import_module(f"bitwright.{module}")
        if not hasattr(found, last):
            importlib.import_module(f"bitwright.{name}")
    assert name in str(caught.value) and ABSENT[name] in str(caught.value)


def test_what_lies_below_an_absent_module_is_absent_for_the_same_reason():
    assert absence("aimet_torch.gptvq.gptvq_weight.GPTVQ") == ABSENT["aimet_torch.gptvq"]
    assert absence("aimet_torch.quantsim") is None


def test_absent_methods_say_what_to_do_instead():
    import torch

    from bitwright.aimet_torch import QuantizationSimModel
    from bitwright.aimet_torch.nn import QuantizedLinear

    sim = QuantizationSimModel(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(AttributeError, match="quantizer_state_dict.*save_checkpoint"):
        sim.quantizer_state_dict()
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'$"):
        sim.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="no kernels to plug in"):
        QuantizedLinear(2, 2).set_kernel(None)
