"""Perplexities, their intervals and divergences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from bitwright.errors import CalibrationError, ConfigError
from bitwright.llm.engines import Transformers
from bitwright.llm.likelihood import perplexity, split_tokens, windows
from tests.llm.models import tiny


def _uniform(tokens: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*tokens.shape, 10)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
    found = perplexity(_uniform, range(9), context=4)
    assert found.value == pytest.approx(10) and found.low == pytest.approx(found.high)
    assert found.tokens == 6  # the first token of each of three windows has nothing before it


@pytest.mark.parametrize("engine", [False, True], ids=["module", "engine"])
def test_a_context_beyond_the_table_of_positions_is_refused(engine: bool):
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=16, vocab_size=32))
    compute = Transformers(model).logits if engine else model
    with pytest.raises(
        ConfigError, match=r"context: 20 tokens are more than the 16 positions of the model.* 16 or less"
    ):
        perplexity(compute, range(30), context=20)
    assert perplexity(compute, range(30), context=16).tokens == 28


def test_every_token_counts_once_with_overlapping_windows():
    tokens = torch.arange(23)
    for context, stride in ((8, 8), (8, 3), (30, 30), (8, 1)):
        seen = [w[first:].tolist() for w, first in windows(tokens, context, stride)]
        flat = [token for part in seen for token in part]
        lost = {0, 8, 16} if stride == 8 else {0}
        assert sorted(flat) == sorted(set(range(23)) - lost)


def test_a_model_of_transformers_agrees_with_its_own_loss():
    model = tiny(LlamaConfig)
    tokens = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(0))
    found = perplexity(model, tokens, reference=model)
    with torch.no_grad():
        loss = float(model(tokens, labels=tokens).loss)
    assert found.value == pytest.approx(math.exp(loss), rel=1e-5) and found.divergence == pytest.approx(0, abs=1e-9)


def test_the_interval_holds_the_truth_in_95_of_100_cases():
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125])
    truth = math.exp(-float((weights * weights.log()).sum()))
    held = 0
    for _ in range(200):
        tokens = torch.multinomial(weights, 400, replacement=True, generator=generator)
        found = perplexity(lambda t: weights.log().expand(*t.shape, 4), tokens, context=20)
        held += found.low <= truth <= found.high
    assert 180 <= held <= 198


def test_the_divergence_is_that_of_the_distributions():
    one, other = (torch.randn(5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    found = perplexity(lambda t: one.expand(*t.shape, 5), range(5), reference=lambda t: other.expand(*t.shape, 5))
    expected = F.kl_div(one.log_softmax(0), other.softmax(0), reduction="sum")
    assert found.divergence == pytest.approx(float(expected), rel=1e-5)


def test_rows_held_out_are_the_last_ones():
    calibration, held = split_tokens(torch.arange(105), 10)
    assert [int(row[0, 0]) for row in held] == [90] and len(calibration) == 9
    assert [int(row[0, 0]) for row in split_tokens(torch.arange(105), 10, most=3)[0]] == [0, 30, 60]


def test_texts_and_windows_that_do_not_do_are_refused():
    with pytest.raises(CalibrationError, match="fewer than two tokens"):
        perplexity(_uniform, [1])
    with pytest.raises(CalibrationError, match="its 15 tokens make 1 rows of 10. Remedy: .* context of at most 7"):
        split_tokens(torch.arange(15), 10)
    with pytest.raises(ConfigError, match="stride 9 and context 8 do not fit"):
        perplexity(_uniform, range(20), context=8, stride=9)
    with pytest.raises(CalibrationError, match="the logits are not finite"):
        perplexity(lambda t: torch.full((*t.shape, 4), np.nan), range(4))
