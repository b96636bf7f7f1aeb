"""Models that generate: the example covers the calls on all tokens and those on one token and a cache."""

from __future__ import annotations

import logging

import pytest
import torch

from bitwright.torch import QuantizationSimModel

transformers = pytest.importorskip("transformers")


def recurrent_model() -> torch.nn.Module:
    """One layer of Mamba, whose forward on one token and a cache is another branch."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=48, hidden_size=16, state_size=4, num_hidden_layers=1, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    return transformers.MambaForCausalLM(config).eval()


@pytest.mark.parametrize("through", ["batches", "callback", "block"])
def test_generate_meets_no_call_without_quantizers(through: str, caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = recurrent_model(), torch.randint(3, 48, (2, 9))
    sim = QuantizationSimModel(model, {"input_ids": tokens})
    if through == "batches":
        sim.compute_encodings([{"input_ids": tokens}], progress=False)
    elif through == "callback":
        sim.compute_encodings(lambda model: model(input_ids=tokens), progress=False)
    else:
        with sim.calibrating() as observed:
            observed(input_ids=tokens)
    assert not sim.quantizers.unreached()
    with caplog.at_level(logging.INFO, "bitwright"):
        made = sim.model.generate(input_ids=tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert made.shape == (2, 12)
    assert "did not happen on the example" not in caplog.text
    decode = sim.examples[-1]
    first, again = (sim.model(*decode.args, **decode.kwargs).logits for decode in _copies(decode))
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def _copies(call: object) -> list[object]:
    from bitwright.torch.calls.inputs import Inputs, as_call

    return [Inputs(*as_call(call)) for _ in range(2)]


def test_an_example_that_reaches_all_calls_stays_the_only_one() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=48, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    sim = QuantizationSimModel(transformers.GPT2LMHeadModel(config).eval(), torch.randint(3, 48, (2, 9)))
    assert len(sim.examples) == 1


def test_a_model_that_cannot_generate_from_its_example_is_simulated_on_its_forward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

        def can_generate(self) -> bool:
            return True

        def generate(self, **options: object) -> torch.Tensor:
            raise ValueError("no tokens")

    with caplog.at_level(logging.INFO, "bitwright"):
        sim = QuantizationSimModel(Model().eval(), torch.randn(2, 4))
    assert len(sim.examples) == 1
    assert "generate fails on the example, whose forward alone is recorded: ValueError: no tokens" in caplog.text
