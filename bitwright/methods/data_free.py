"""Calibration data that the model makes by itself: pictures from the statistics of its batch norms, text from its own answers.

References: Cai et al. 2020, arXiv:2001.00281 (ZeroQ), section 3.1, for pictures; Liu et al. 2023, arXiv:2305.17888
(LLM-QAT), section 3.1, for text. Beyond the papers: the distance of a statistic counts relative to the spread of its channel,
so that layers and channels count alike; pictures begin as noise with the spectrum of photographs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.arrays import to_numpy
from bitwright.core.simulation.calibration import arrays_in, samples_in
from bitwright.errors import ConfigError, checks_arguments
from bitwright.methods.front_end import GivenModel, front_end_of
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular

Array = NDArray[Any]
GENERATE = "generate"  # in place of data
SAMPLES = 64
_BATCH = 32


@dataclass(frozen=True)
class GeneratedData(Tabular, Sequence[Any]):
    """Result of :func:`generate_data`: batches, as ``quantize`` and ``compute_encodings`` take them.

    Attributes:
        batches: in the form of the example.
        kind: ``"pictures"`` or ``"text"``.
        samples: rows of all batches.
        source: what they were made from.
        noise, distance: of pictures, how far the means and deviations in front of batch norms are from those that are stored, of
            the noise they began as and of these pictures: root mean square over channels, in standard deviations of the channel.
    """

    _rows = "batches"

    batches: tuple[Any, ...] = field(repr=False)
    kind: Literal["pictures", "text"]
    samples: int
    source: str
    noise: float | None = None
    distance: float | None = None

    def __getitem__(self, index: Any) -> Any:
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __str__(self) -> str:
        if self.kind == "text":
            return f"{self.samples} texts that the model wrote itself ({self.source})"
        return (
            f"{self.samples} pictures made from {self.source}: {self.distance:.2g} standard deviations from their statistics, "
            f"where noise is {self.noise:.2g} from them"
        )


@checks_arguments
def generate_data(
    model: Any,
    example: Any = None,
    *,
    samples: int = SAMPLES,
    batch_size: int = _BATCH,
    iterations: int = 200,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
    temperature: float = 1.0,
    start: int | None = None,
    seed: int = 0,
    providers: Any = None,
    progress: bool = True,
) -> GeneratedData:
    """Make calibration data without data: pictures from the batch norms of a model, or text that it writes itself.

    A model that reads floating-point numbers gets pictures: noise, changed by gradients until the means and standard deviations
    in front of all batch norms are those that they stored in training. A model that reads token ids and returns logits of the
    next token writes text: token after token drawn from its own distribution.

    Args:
        model: a PyTorch module or an ONNX model, with its batch norms not folded; left as it is.
        example: an input of the model, for its shape and for inputs of other kinds; its values do not matter where a picture or
            tokens are made. ONNX models whose lengths are fixed, but for the batch, need none.
        samples: how many pictures or texts.
        batch_size: how many are made together; that of the example, where the model takes no other.
        iterations: steps of the pictures.
        mean, std: of pictures as the model takes them, one number or one per channel: 0 and 1 after the usual normalisation.
        temperature: of the text: logits are divided by it.
        start: token id that texts begin with; by default each begins with one drawn at random.
        seed: of all random numbers.
        providers: where ONNX Runtime computes.
        progress: show a progress bar on a terminal.

    Returns:
        Batches; ``print`` tells what they were made from. ``quantize(model, generate_data(...))`` says so in its first line.

    Raises:
        ConfigError: the model has neither batch norms nor text to write; it has several inputs of the kind that is made; there is
            no example where one is needed; or a number is out of range.
        ModelError: the model cannot be read or run.
    """
    for name, value in (("samples", samples), ("batch_size", batch_size), ("iterations", iterations)):
        if value < 1:
            raise ConfigError(f"generate_data: {name}", f"{value} is below 1", "give a number above 0")
    if not temperature > 0:
        raise ConfigError(
            "generate_data: temperature", f"{temperature} is not above 0", "1 draws from the model's own distribution"
        )
    front_end = front_end_of(model)
    given = front_end.given(model, providers, None)
    example = given.example() if example is None else example
    source = _Source(given, example)
    source.grow(min(batch_size, samples))
    rng = np.random.default_rng(seed)
    if source.kind == "text":
        texts = [_text(source, rng, temperature, start, progress) for _ in range(-(-samples // source.rows))]
        from_what = f"{source.shape[1]} tokens each, temperature {temperature:g}"
        return GeneratedData(tuple(texts), "text", source.rows * len(texts), from_what)
    from bitwright.methods.batch_norm_pictures import pictures

    steppable = front_end.steppable(
        given.simulation(given.copy(source.example), source.example, {"config_file": {"preset": "w8a8"}}), None
    )
    noise = _noise(rng, source.shape, mean, std)
    made = [
        pictures(steppable, source.with_values, next(noise), iterations, progress)
        for _ in range(-(-samples // source.rows))
    ]
    before, after = (
        float(np.sqrt(np.mean([getattr(one, name) ** 2 for one in made]))) for name in ("noise", "distance")
    )
    norms = f"the statistics of {made[0].norms} batch norm{'s' * (made[0].norms != 1)}"
    batches = tuple(source.with_values(one.values) for one in made)
    return GeneratedData(batches, "pictures", source.rows * len(made), norms, before, after)


def generated_of(model: Any, data: Any, providers: Any, progress: bool) -> tuple[GeneratedData | None, Any]:
    """The generated data among the arguments of ``quantize``, and its data; ``data="generate"`` makes them.

    Raises:
        ConfigError: as :func:`generate_data`, or ``data`` is another word.
    """
    if isinstance(data, str):
        if data != GENERATE:
            raise ConfigError(
                "data", f"{data!r} is not data", f"give batches, or {GENERATE!r} for data that the model makes itself"
            )
        data = generate_data(model, providers=providers, progress=progress)
    return (data if isinstance(data, GeneratedData) else None), data


class _Source:
    """An example, and which of its arrays is made anew.

    Attributes:
        kind: what is made.
        shape: of the array.
    """

    def __init__(self, given: GivenModel, example: Any) -> None:
        self.given, self.example = given, example
        arrays = list(arrays_in(example))
        floats = [i for i, array in enumerate(arrays) if array.ndim > 1 and "float" in str(array.dtype)]
        tokens = [i for i, array in enumerate(arrays) if array.ndim == 2 and "int" in str(array.dtype)]
        named = [] if floats else _token_ids(example)
        places = floats or named or tokens
        if not places:
            shapes = ", ".join(f"{array.dtype} of shape {tuple(array.shape)}" for array in arrays) or "no array"
            problem = f"no input is a batch of pictures or of token ids: {shapes}"
            raise ConfigError("generate_data", problem, "calibrate on data of your own")
        if len(places) > 1:
            problem = f"the model has {len(places)} inputs of {'floating-point numbers' if floats else 'token ids'}"
            raise ConfigError("generate_data", problem, "calibrate on data of your own")
        self.kind: Literal["pictures", "text"] = "pictures" if floats else "text"
        self._place = places[0]
        self.shape = tuple(arrays[self._place].shape)

    @property
    def rows(self) -> int:
        """Samples of a batch."""
        return int(self.shape[0])

    def grow(self, rows: int) -> None:
        """Repeat the samples of the example up to ``rows``, where the model takes them."""
        have = samples_in(self.example)
        if rows == have:
            return
        counts = np.arange(rows) % have
        larger = _replaced(self.example, lambda i, array: array[counts] if array.ndim and len(array) == have else array)
        try:
            self.given.outputs(larger)
        except Exception:  # of the model's own code: a size that is written down in it
            return
        self.example, self.shape = larger, (rows, *self.shape[1:])

    def with_values(self, values: Array) -> Any:
        """The example with ``values`` in the place of what is made."""
        return _replaced(self.example, lambda i, array: values if i == self._place else array)


def _token_ids(example: Any) -> list[int]:
    """Place of ``input_ids`` among the arrays of a dict; empty otherwise."""
    return [i for i, name in enumerate(example) if name == "input_ids"] if isinstance(example, Mapping) else []


def _replaced(batch: Any, change: Callable[[int, Any], Any]) -> Any:
    """``batch`` with its arrays changed by ``change(number, array)``; tensors stay tensors of their dtype."""
    places = iter(range(len(list(arrays_in(batch)))))

    def one(item: Any) -> Any:
        if getattr(item, "shape", None) is None:
            return item
        found = change(next(places), item)
        return item if found is item else _like(item, found)

    if isinstance(batch, Mapping):
        return {name: one(item) for name, item in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(one, batch))
    if getattr(batch, "shape", None) is None:
        problem = f"the example is {type(batch).__name__}"
        raise ConfigError("generate_data", problem, "give an array, or a tuple or dict of arrays")
    return one(batch)


def _like(array: Any, values: Any) -> Any:
    """``values`` as an array or a tensor, as ``array`` is one."""
    if not hasattr(array, "detach"):
        return np.asarray(values).astype(array.dtype)
    return values if hasattr(values, "detach") else array.new_tensor(values)  # of its dtype, on its device


def _noise(rng: np.random.Generator, shape: Sequence[int], mean: Any, std: Any) -> Iterator[Array]:
    """Batches of noise with the given mean and deviation per channel."""
    channels = shape[1]
    each = [np.atleast_1d(np.asarray(value, np.float32)) for value in (mean, std)]
    for name, numbers in zip(("mean", "std"), each, strict=True):
        wrong = (
            numbers.size not in (1, channels)
            or not np.isfinite(numbers).all()
            or (name == "std" and (numbers <= 0).any())
        )
        if wrong:
            problem = f"{numbers.tolist()} for an input of {channels} channels"
            raise ConfigError(
                f"generate_data: {name}", problem, "give one finite number, or one per channel; std above 0"
            )
    middle, spread = (numbers.reshape(-1, *(1,) * (len(shape) - 2)) for numbers in each)
    while True:
        noise = _natural(rng.standard_normal(shape)) if len(shape) > 2 else rng.standard_normal(shape)
        yield (noise * spread + middle).astype(np.float32)


def _natural(noise: Array) -> Array:
    """``noise`` with amplitudes that fall as one over the frequency, as those of photographs; deviation 1 over the batch.

    Reference: Field 1987, "Relations between the statistics of natural images", J. Opt. Soc. Am. A 4.
    """
    axes = tuple(range(2, noise.ndim))
    frequencies = np.meshgrid(*(np.fft.fftfreq(noise.shape[axis]) for axis in axes), indexing="ij")
    size = np.sqrt(np.sum(np.square(frequencies), 0))
    least = 1 / max(noise.shape[2:])  # that of one period over the picture; its mean has the same
    found = np.fft.ifftn(np.fft.fftn(noise, axes=axes) / np.maximum(size, least), axes=axes).real
    return np.asarray(found / max(float(found.std()), 1e-12))


def _text(source: _Source, rng: np.random.Generator, temperature: float, start: int | None, progress: bool) -> Any:
    """One batch of text, token after token; every run is of the whole length, so that models of one length write too.

    Raises:
        ConfigError: the model returns no logits of its vocabulary, or those of a position depend on later tokens.
    """
    rows, length = source.shape
    tokens = np.zeros((rows, length), np.int64)
    logits = _logits(source, tokens)
    words = logits.shape[-1]
    if start is not None and not 0 <= start < words:
        raise ConfigError("generate_data: start", f"{start} is not one of the model's {words} tokens", "leave it out")
    tokens[:, 0] = rng.integers(words, size=rows) if start is None else start
    changed = tokens.copy()
    changed[:, -1] = (changed[:, -1] + 1) % words
    if length > 1 and not np.allclose(_logits(source, tokens)[:, :-1], _logits(source, changed)[:, :-1], atol=1e-3):
        raise ConfigError(
            "generate_data",
            "the logits of a position depend on tokens after it, so that the model cannot write text",
            "calibrate on data of your own",
        )
    for at in progress_bar(range(1, length), "writing text", progress):
        scores = np.asarray(_logits(source, tokens)[:, at - 1], np.float64) / temperature
        drawn = np.argmax(scores + rng.gumbel(size=scores.shape), -1)  # of softmax(scores), Gumbel 1954
        tokens[:, at] = drawn
    return source.with_values(tokens)


def _logits(source: _Source, tokens: Array) -> Array:
    for found in source.given.outputs(source.with_values(tokens)):
        array = to_numpy(found)
        if array.ndim == 3 and array.shape[:2] == tokens.shape and array.dtype.kind == "f":
            return array
    raise ConfigError(
        "generate_data",
        "no output holds logits of the next token, of shape [texts, tokens, vocabulary]",
        "calibrate on data of your own",
    )
