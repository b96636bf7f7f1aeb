"""Perplexity of a language model with its interval, and the divergence of two models' next-token distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular

_Z = 1.96  # of a two-sided interval of 95 %


@dataclass(frozen=True)
class Perplexity(Tabular):
    """A perplexity with its confidence interval.

    Attributes:
        value: ``exp`` of the mean negative log-likelihood of a token.
        low, high: 95 % interval, from the differences between windows; equal to ``value`` where there is one window.
        tokens: how many were predicted.
        windows: mean negative log-likelihood of each window.
        divergence: mean Kullback-Leibler divergence of the next-token distribution from the reference's, in nats; ``None``
            without a reference.
    """

    _rows = "windows"

    value: float
    low: float
    high: float
    tokens: int
    windows: tuple[float, ...] = ()
    divergence: float | None = None

    def __str__(self) -> str:
        divergence = "" if self.divergence is None else f", KL {self.divergence:.4g} nats"
        return f"perplexity {self.value:.4f} ({self.low:.4f} to {self.high:.4f}) of {self.tokens} tokens{divergence}"


class Sums:
    """Sums over windows, from logits."""

    def __init__(self) -> None:
        self._losses: list[tuple[float, int]] = []
        self._divergence, self._count = 0.0, 0

    def add(self, logits: Tensor, tokens: Tensor, first: int = 1, reference: Tensor | None = None) -> None:
        """Add a window.

        Args:
            logits: ``[T, V]``.
            tokens: ``[T]``.
            first: index of the first token that counts; those before it are context.
            reference: logits of another model, ``[T, V]``.

        Raises:
            CalibrationError: a logit is NaN or infinite.
        """
        first = max(1, first)
        if first >= len(tokens):
            return
        log = F.log_softmax(logits[first - 1 : -1].float(), -1)
        loss = F.nll_loss(log, tokens[first:], reduction="none")
        total = float(loss.double().sum())
        if not math.isfinite(total):
            raise CalibrationError(
                "perplexity", "the logits are not finite",
                "compute in float32 or bfloat16, or look for the layer with bitwright.torch's check_model",
            )  # fmt: skip
        self._losses.append((total, len(loss)))
        if reference is not None:
            other = F.log_softmax(reference[first - 1 : -1].float(), -1)
            self._divergence += float((other.exp() * (other - log)).double().sum())
            self._count += len(loss)

    def result(self) -> Perplexity:
        """The perplexity of all windows.

        Raises:
            CalibrationError: there was none.
        """
        if not self._losses:
            raise CalibrationError("perplexity", "there are fewer than two tokens", "give a longer text")
        total, count = (np.array(column, np.float64) for column in zip(*self._losses, strict=True))
        mean = float(total.sum() / count.sum())
        n = len(total)
        spread = 0.0
        if n > 1:  # of a ratio of two sums
            spread = float(np.sqrt(np.square(total - mean * count).sum() * n / (n - 1)) / count.sum())
        low, high = math.exp(mean - _Z * spread), math.exp(min(700.0, mean + _Z * spread))
        divergence = self._divergence / self._count if self._count else None
        value = math.exp(min(700.0, mean))
        return Perplexity(value, low, high, int(count.sum()), tuple((total / count).tolist()), divergence)


def windows(tokens: Tensor, context: int, stride: int) -> Iterator[tuple[Tensor, int]]:
    """Windows of at most ``context`` tokens, ``stride`` apart, each with the index of its first token that none before it had.

    >>> [(w.tolist(), first) for w, first in windows(torch.arange(7), 4, 2)]
    [([0, 1, 2, 3], 1), ([2, 3, 4, 5], 2), ([4, 5, 6], 2)]
    """
    done, start, n = 1, 0, len(tokens)
    while done < n:
        stop = min(start + context, n)
        yield tokens[start:stop], max(1, done - start)
        done, start = stop, start + stride


@checks_arguments
def perplexity(
    model: Any,
    tokens: Any,
    *,
    stride: int | None = None,
    context: int = 512,
    reference: Any = None,
    progress: bool = True,
) -> Perplexity:
    """The perplexity of a model on tokens, with a 95 % interval.

    The text is cut in windows of ``context`` tokens, ``stride`` apart; each token counts once, predicted from those of its window
    before it.

    Args:
        model: a module (of ``transformers``, or any from tokens ``[1, T]`` to logits ``[1, T, V]``), or such a function.
        tokens: int64, ``[T]`` or ``[1, T]``; a list of numbers, too.
        stride: tokens between two windows; ``context`` by default, so that windows do not overlap. Smaller ones give every
            token at least ``context - stride`` tokens before it, and take longer.
        context: of a window.
        reference: a model whose next-token distributions are compared with.
        progress: show a progress bar on a terminal.

    Raises:
        ConfigError: ``context`` is below 2 or above the positions of a model that has a table of them, or ``stride`` is not
            between 1 and ``context``.
        CalibrationError: fewer than two tokens, or logits that are not finite.
    """
    flat = torch.as_tensor(tokens, dtype=torch.int64).reshape(-1)
    step = context if stride is None else stride
    if context < 2 or not 1 <= step <= context:
        raise ConfigError(
            "stride",
            f"stride {step} and context {context} do not fit",
            "give a context of 2 or more and 1 <= stride <= context",
        )
    compute, other = _logits(model), None if reference is None else _logits(reference)
    sums = Sums()
    parts = list(windows(flat, context, step))
    with torch.no_grad():
        for window, first in progress_bar(parts, "perplexity", progress):
            sums.add(compute(window[None])[0], window, first, None if other is None else other(window[None])[0])
    return sums.result()


def _logits(model: Any) -> Callable[[Tensor], Tensor]:
    """A model as a function from tokens to logits, in eval mode while it runs."""
    if not isinstance(model, nn.Module):
        return lambda tokens: torch.as_tensor(model(tokens))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def compute(tokens: Tensor) -> Tensor:
        check_positions(model, tokens.shape[1])
        training = model.training
        model.eval()
        try:
            found = model(tokens.to(device))
        finally:
            model.train(training)
        return getattr(found, "logits", found).cpu()

    return compute


def check_positions(model: Any, count: int) -> None:
    """Refuse more tokens than a model of ``transformers`` with a table of positions has rows for, as GPT-2.

    Raises:
        ConfigError: they are more.
    """
    most = getattr(getattr(model, "config", None), "n_positions", None)
    if isinstance(most, int) and count > most:
        raise ConfigError(
            "context", f"{count} tokens are more than the {most} positions of the model", f"give a context of {most} or less"
        )  # fmt: skip


def split_tokens(tokens: Tensor, length: int, held: float = 0.1, most: int = 128) -> tuple[list[Tensor], list[Tensor]]:
    """Rows ``[1, length]`` for calibration, and rows that are held out for the perplexity: the last tenth of the text.

    Args:
        tokens: ``[T]``.
        length: of a row.
        held: share of the rows that is held out, at least one row and at most ``most``.
        most: rows of calibration, drawn evenly.

    Raises:
        CalibrationError: fewer than two rows.
    """
    count = len(tokens) // length
    if count < 2:
        raise CalibrationError(
            "data", f"its {len(tokens)} tokens make {count} rows of {length}",
            f"give a longer text, or a context of at most {max(2, len(tokens) // 2)} (--context)",
        )  # fmt: skip
    rows = [tokens[i * length : (i + 1) * length][None] for i in range(count)]
    out = min(max(1, round(count * held)), most)
    return _evenly(rows[:-out], most), _evenly(rows[-out:], most)


def _evenly(rows: Sequence[Tensor], most: int) -> list[Tensor]:
    n = min(len(rows), most)
    return [rows[i * len(rows) // n] for i in range(n)]


def text_tokens(tokenizer: Any, text: str) -> Tensor:
    """Tokens ``[T]`` of a text, without special tokens inside."""
    found: Iterable[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(list(found), dtype=torch.int64)
