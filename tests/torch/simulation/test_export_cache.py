"""Export of models that continue a cache of transformers: caches are inputs and outputs, and their lengths vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitwright.compare.verify import verify_folder
from bitwright.errors import ExportError
from bitwright.torch import QuantizationSimModel
from bitwright.torch.calls.inputs import as_call, caches_in, flatten_tensors
from tests.support.sessions import integer_session
from tests.support.simulations import calibrated

transformers = pytest.importorskip("transformers")

KV, HEAD, VOCABULARY = 2, 8, 24
NAMES = ["past_key_values.0.key", "past_key_values.0.value"]


def model(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=KV, max_position_embeddings=64, **changes,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + torch.rand(parameter.shape))
    return made.to(dtype)


def inputs(batch: int, new: int, past: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(10 * new + past)
    states = [torch.randn(batch, KV, past, HEAD, generator=generator).to(dtype) for _ in range(2)]
    return {
        "input_ids": torch.randint(0, VOCABULARY, (batch, new), generator=generator),
        "attention_mask": torch.ones(batch, past + new, dtype=torch.int64),
        "past_key_values": transformers.DynamicCache([tuple(states)]),
    }


def test_a_cache_holds_tensors_and_is_copied_for_every_call() -> None:
    given = inputs(1, 2, 3)
    assert [name for name, _ in flatten_tensors(given, caches=True)][2:] == NAMES
    assert len(flatten_tensors(given)) == 2, "what a model returns is not searched for caches"
    (cache,) = caches_in(as_call(given))
    assert cache is not given["past_key_values"]
    assert cache.layers[0].keys is given["past_key_values"].layers[0].keys
    cache.update(torch.zeros(1, KV, 1, HEAD), torch.zeros(1, KV, 1, HEAD), 0)
    assert given["past_key_values"].get_seq_length() == 3


@pytest.mark.parametrize("preset", ["w4g32", "w8a8"])
def test_lengths_vary_whatever_the_example_is_of(preset: str, tmp_path: Path) -> None:
    """The example of one new token would fix that axis in ``torch.export``; a prefill has no past at all."""
    example = inputs(1, 1, 5)
    sim = calibrated(QuantizationSimModel(model(), example, preset=preset), [inputs(1, 4, 3), inputs(2, 6, 0)])
    exported = sim.export(tmp_path, "decoder", example)
    session = integer_session(exported.qdq)
    shapes = {i.name: i.shape for i in session.get_inputs()}
    assert shapes == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "total"],
        **dict.fromkeys(NAMES, ["batch", KV, "past", HEAD]),
    }
    assert [o.name for o in session.get_outputs()] == ["output.logits", *(f"output.{name}" for name in NAMES)]
    for lengths in ((1, 1, 5), (1, 7, 0), (2, 3, 2), (1, 1, 20)):
        feed = inputs(*lengths)
        layer = feed["past_key_values"].layers[0]
        with torch.no_grad():
            expected = sim.model(**as_call(feed)[1])
        given = {**feed, **dict(zip(NAMES, (layer.keys, layer.values), strict=True))}
        found = session.run(None, {name: given[name].numpy() for name in shapes})
        kept = expected.past_key_values.layers[0]
        assert found[1].shape == kept.keys.shape == (lengths[0], KV, lengths[1] + lengths[2], HEAD)
        for one, other in zip(found, (expected.logits, kept.keys, kept.values), strict=True):
            np.testing.assert_allclose(one, other.numpy(), atol=1e-5)
    assert verify_folder(tmp_path).ok
    assert example["past_key_values"].get_seq_length() == 5, "the example is as it was"


def test_a_window_that_counts_in_python_is_refused() -> None:
    given = inputs(1, 1, 5)
    config = model(sliding_window=4).config
    config.layer_types = ["sliding_attention"]
    window = transformers.DynamicCache(config=config)
    window.update(torch.randn(1, KV, 5, HEAD), torch.randn(1, KV, 5, HEAD), 0)
    given["past_key_values"] = window
    sim = calibrated(QuantizationSimModel(model(), inputs(1, 2, 3), preset="w4g32"), [inputs(1, 2, 3)])
    with pytest.raises(
        ExportError, match=r"DynamicCache: it has layers of the kind DynamicSlidingWindowLayer.*without a config"
    ):
        sim.export("nowhere", "decoder", given)
