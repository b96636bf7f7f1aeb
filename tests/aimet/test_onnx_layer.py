"""What the layer for ONNX refuses, and what it says then."""

from __future__ import annotations

import numpy as np
import pytest

from bitwright.aimet_onnx import QSpec, QuantizationSimModel, compute_encodings
from bitwright.aimet_onnx.quantsim import set_grouped_blockwise_quantization_for_weights, set_param_type
from bitwright.errors import ConfigError, ModelError
from tests.aimet.onnx_nets import feeds, folded


@pytest.fixture
def sim() -> QuantizationSimModel:
    return QuantizationSimModel(folded())


def test_tensor_without_a_quantizer_says_whose_grid_it_is(sim):
    with pytest.raises(ModelError, match="conv1.out: this tensor has no quantizer.*sim.coverage"):
        sim.qc_quantize_op_dict["conv1.out"].enabled = True
    sim.qc_quantize_op_dict["conv1.out"].enabled = False  # as it is


def test_precision_of_several_tensors_is_all_or_nothing(sim):
    with pytest.raises(ConfigError, match="no quantizer in effect at 'nothing'"):
        sim.set_tensor_precision(["input", "nothing"], "int16")
    assert sim.qc_quantize_op_dict["input"].bitwidth == 8


def test_what_cannot_be_simulated_is_refused(sim):
    with pytest.raises(ConfigError, match=r"LPBQ.*go with symmetric integer grids"):
        set_param_type(sim, QSpec.lpbq("float16", 8), strict=False)
    with pytest.raises(ConfigError, match=r"multiples of 1 bits"):
        set_grouped_blockwise_quantization_for_weights(sim, "Gemm", 4, 5, 8)
    with pytest.raises(ConfigError, match="shifted zero points"):
        set_param_type(sim, "int4", shift_zero_point=True)
    with pytest.raises(ConfigError, match="there are no nodes"):
        set_param_type(sim, "int4", nodes_to_include={"nobody"})
    with pytest.raises(ConfigError, match="there is no node 'nobody'"):
        sim.get_op_quantizers("nobody")


def test_session_is_the_simulation_again_after_the_block(sim):
    with compute_encodings(sim):
        inside = sim.session.run(None, feeds()[0])[0]
    outside = sim.session.run(None, feeds()[0])[0]
    assert inside.shape == outside.shape and not np.array_equal(inside, outside)
    with pytest.raises(ZeroDivisionError):
        with compute_encodings(sim):
            1 / 0  # noqa: B018
    assert np.array_equal(sim.session.run(None, feeds()[0])[0], outside)


def test_our_own_calls_work_on_the_layers_simulation(sim):
    from bitwright.onnx import apply_gptq

    sim.compute_encodings(feeds(), progress=False)
    apply_gptq(sim, feeds(), progress=False)
    assert sim.coverage() and sim.health() and sim.quantizers["conv1.weight"].frozen


def test_example_made_up_for_a_simulation_is_not_called_calibration(caplog):
    from bitwright.aimet_onnx.utils import make_dummy_input

    sim = QuantizationSimModel(folded())
    sim.example()
    make_dummy_input(folded())
    sim.compute_encodings(feeds())
    assert "random data" not in caplog.text
