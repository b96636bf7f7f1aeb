"""Adapters beside a decoder in a file: inputs of the ONNX model, and what onnxruntime-genai generates with each."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from bitwright.errors import ConfigError
from bitwright.llm import export_decoder, open_engine
from bitwright.torch import QuantizationSimModel, export_adapters
from tests.llm.test_decoder_export import decoder
from tests.support.lora import PeftLinear
from tests.support.simulations import calibrated


@pytest.mark.engine
@pytest.mark.slow
@torch.no_grad()
def test_genai_generates_with_each_adapter_what_the_simulation_generates(tmp_path: Path) -> None:
    tokens = torch.randint(3, 48, (3, 8), generator=torch.Generator().manual_seed(0))
    model = decoder(num_hidden_layers=1, eos_token_id=None)
    attention = model.model.layers[0].self_attn
    for name in ("q_proj", "v_proj"):
        setattr(attention, name, PeftLinear(getattr(attention, name)))
        getattr(attention, name).add("first", 4, 8)
    attention.q_proj.add("second", 2, 16)
    adapted = (attention.q_proj, attention.v_proj)
    for layer in adapted:
        layer.set_adapter(["first"])
    sim = calibrated(
        QuantizationSimModel(model.eval(), {"input_ids": tokens[:1]}, preset="w4g32"), [{"input_ids": tokens}]
    )
    export_decoder(sim, tmp_path / "decoder", prefix="small", tokens=2)
    with pytest.raises(ConfigError, match="is the folder of the model.*name another folder"):
        export_adapters(sim, tmp_path / "decoder/small.onnx", tmp_path / "decoder")
    files = export_adapters(sim, tmp_path / "decoder/small.onnx", tmp_path / "out")
    assert set(files) == {"first", "second"}
    shutil.rmtree(tmp_path / "decoder")
    pytest.importorskip("onnxruntime_genai")
    engine = open_engine(tmp_path / "out")
    assert engine.adapters == ("first", "second")
    found = {}
    for engine.adapter in ("second", "first", None):
        for layer in (sim.model.model.layers[0].self_attn.q_proj, sim.model.model.layers[0].self_attn.v_proj):
            layer.set_adapter([engine.adapter or "first"])
        for row in tokens:
            expected = row[None]
            for _ in range(12):
                logits = sim.model(input_ids=expected, use_cache=False).logits
                expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
            made = engine.generate(row.tolist(), 12)
            wanted = [*expected[0, 8:].tolist(), 0]
            stop = wanted.index(0)  # the engine ends there
            assert made[:stop] == wanted[:stop], engine.adapter
        found[engine.adapter] = made
        logits = sim.model(input_ids=tokens[:1], use_cache=False).logits
        np.testing.assert_allclose(engine.logits(tokens[:1]).numpy(), logits.numpy(), atol=2e-3)
    assert found["first"] == found[None] != found["second"]
    engine.adapter = "thrid"
    with pytest.raises(ConfigError, match="the folder has no adapter 'thrid'.*use one of first, second"):
        engine.generate([3], 1)
