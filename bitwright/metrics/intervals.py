"""Confidence intervals of the difference of two metrics over paired samples, and the number of samples that would show it.

Float and quantized model answer the same samples, so their values are compared pair by pair. Of right and wrong answers only
those count on which the two disagree: McNemar's test, in its exact form. Of other numbers the mean difference is taken, and
its interval by bootstrap over samples (BCa). Reference: McNemar 1947; Bonett and Price 2012 (interval); Efron 1987; Connor
1987 for the number of samples.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bitwright.errors import ConfigError, checks_arguments

Better = Literal["higher", "lower"]
_POWER = 0.8  # chance that as many samples as are named show a difference of the size seen
_RESAMPLES = 2000
_AT_ONCE = 1_000_000  # elements of resamples held in memory


@dataclass(frozen=True)
class Difference:
    """Quantized minus float, over paired samples.

    Attributes:
        estimate: mean of the differences, in units of the metric.
        low, high: ends of its interval; ``None`` where there is none.
        confidence: of the interval.
        n: samples; 0 where the metric is one number for all of them.
        test: ``mcnemar``, ``bootstrap`` or ``none``.
        distinguishable: whether the interval excludes zero; ``None`` where there is none.
        needed: how many samples would be needed to tell a difference of this size from zero (with a chance of 80 %); ``None``
            where it is told already, or no number is enough.
        text: all of it in one phrase.
    """

    estimate: float
    low: float | None
    high: float | None
    confidence: float
    n: int
    test: str
    distinguishable: bool | None
    needed: int | None
    text: str

    def __str__(self) -> str:
        return self.text


@checks_arguments
def compare(
    before: ArrayLike, after: ArrayLike, *, confidence: float = 0.95, better: Better = "higher", seed: int = 0
) -> Difference:
    """Compare two models sample by sample.

    Args:
        before, after: a value per sample of the float and of the quantized model: booleans (or 0 and 1) for right and wrong,
            else numbers.
        confidence: of the interval, 0.5 to 0.9999.
        better: which direction is an improvement, for the text.
        seed: of the bootstrap.

    Raises:
        ConfigError: different lengths, fewer than two samples, or a value that is not finite.

    >>> compare([1, 1, 1, 1, 0], [1, 1, 1, 0, 0]).text
    '-0.2, not distinguishable from zero with 5 samples (95 % interval -0.616 to 0.33); about 37 would be needed'
    """
    if not 0.5 <= confidence <= 0.9999:
        raise ConfigError("confidence", f"{confidence!r} is not between 0.5 and 0.9999", "use 0.95")
    x, y = _checked("float", before), _checked("quantized", after)
    if x.shape != y.shape:
        raise ConfigError(
            "metric",
            f"it gives {x.size} values of the float model and {y.size} of the quantized one",
            "return one value per sample, in the same order for both",
        )
    binary = bool(np.isin(x, (0.0, 1.0)).all() and np.isin(y, (0.0, 1.0)).all())
    found = _mcnemar(x, y, confidence) if binary else _bootstrap(y - x, confidence, seed)
    return _told(found, x.size, confidence, "mcnemar" if binary else "bootstrap", better)


def without_samples(before: float, after: float, better: Better = "higher") -> Difference:
    """The difference of two metrics that are one number each: there is no interval."""
    estimate = after - before
    text = (
        f"{_worse(estimate, better)} by {abs(estimate):.4g}; no interval, because the metric returns one number: "
        "return one value per sample to have one"
    )
    return Difference(estimate, None, None, 0.95, 0, "none", None, None, text)


@dataclass(frozen=True)
class _Found:
    estimate: float
    low: float
    high: float
    needed: float


def _checked(which: str, values: ArrayLike) -> NDArray[np.float64]:
    found = np.asarray(values)
    if found.dtype.kind not in "bifu":
        raise ConfigError(
            "metric", f"its values are of type {found.dtype}", "return numbers or booleans, one per sample"
        )
    found = found.astype(np.float64).ravel()
    if found.size < 2:
        raise ConfigError(
            "metric", f"{found.size} sample(s) have no interval", "give at least 2; some hundreds tell more"
        )
    bad = np.flatnonzero(~np.isfinite(found))
    if bad.size:
        raise ConfigError(
            "metric",
            f"of the {which} model it is {found[bad[0]]} for sample {bad[0]}, and not finite for {bad.size} in all",
            "leave such samples out, or find the cause with `bitwright doctor`",
        )
    return found


def _mcnemar(x: NDArray[np.float64], y: NDArray[np.float64], confidence: float) -> _Found:
    """Exact test: of the samples on which the two disagree, half are won by chance. Interval of Bonett and Price."""
    stats = scipy_stats()
    n, won, lost = x.size, int(((x == 0) & (y == 1)).sum()), int(((x == 1) & (y == 0)).sum())
    z, power = stats.norm.ppf((1 + confidence) / 2), stats.norm.ppf(_POWER)
    d, pairs = (won - lost) / n, (won + lost) / n
    middle, more = (won - lost) / (n + 2), (won + lost + 2) / (n + 2)  # one more pair of each kind
    half = float(z) * math.sqrt((more - middle**2) / (n + 2))
    low, high = max(-1.0, middle - half), min(1.0, middle + half)
    sure = bool(won + lost) and stats.binomtest(won, won + lost).pvalue < 1 - confidence
    if sure:  # the interval is approximate, the test is not: where they differ, the test is right
        low, high = (max(low, np.nextafter(0, 1)), high) if d > 0 else (low, min(high, -np.nextafter(0, 1)))
    else:
        low, high = min(low, 0.0), max(high, 0.0)
    needed = (z * math.sqrt(pairs) + power * math.sqrt(max(pairs - d * d, 0.0))) ** 2 / d**2 if d else math.inf
    return _Found(d, low, high, needed)


def _bootstrap(d: NDArray[np.float64], confidence: float, seed: int) -> _Found:
    stats = scipy_stats()
    mean, spread = float(d.mean()), float(d.std(ddof=1))
    if spread <= 1e-12 * max(abs(mean), 1e-300):  # every sample changed alike
        return _Found(mean, mean, mean, math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a distribution that is too skewed for BCa; handled below
        found = stats.bootstrap(
            (d,), np.mean, confidence_level=confidence, n_resamples=_RESAMPLES, batch=max(1, _AT_ONCE // d.size),
            method="BCa", rng=np.random.default_rng(seed),
        ).confidence_interval  # fmt: skip
    low, high = float(found.low), float(found.high)
    z, power = stats.norm.ppf((1 + confidence) / 2), stats.norm.ppf(_POWER)
    if not (math.isfinite(low) and math.isfinite(high)):
        half = float(stats.t.ppf((1 + confidence) / 2, d.size - 1)) * spread / math.sqrt(d.size)
        low, high = mean - half, mean + half
    return _Found(mean, low, high, ((z + power) * spread / mean) ** 2 if mean else math.inf)


def _told(found: _Found, n: int, confidence: float, test: str, better: Better) -> Difference:
    sure = found.low > 0 or found.high < 0
    interval = f"{100 * confidence:.4g} % interval {found.low:.3g} to {found.high:.3g}"
    needed = None
    if sure:
        text = f"{_worse(found.estimate, better)} by {abs(found.estimate):.4g} with {n} samples ({interval})"
    elif math.isinf(found.needed):
        text = f"no difference with {n} samples ({interval})"
    else:
        needed = max(n + 1, math.ceil(found.needed))
        text = (
            f"{found.estimate:+.3g}, not distinguishable from zero with {n} samples ({interval}); "
            f"about {_rounded(needed)} would be needed"
        )
    return Difference(found.estimate, found.low, found.high, confidence, n, test, sure, needed, text)


def _worse(estimate: float, better: Better) -> str:
    return "better" if (estimate > 0) == (better == "higher") else "worse"


def _rounded(n: int) -> str:
    """Round to two significant digits, which is what the estimate supports."""
    digits = 10 ** max(0, len(str(n)) - 2)
    return f"{math.ceil(n / digits) * digits:,}"


def scipy_stats() -> Any:
    """``scipy.stats``.

    Raises:
        ConfigError: scipy is not installed.
    """
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise ConfigError(
            "metric", "its interval is computed by scipy, which is not installed", "pip install 'bitwright[analysis]'"
        ) from error
    return stats
