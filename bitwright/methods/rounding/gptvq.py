"""GPTVQ: neighbouring weights of a row become a vector of a codebook, chosen with error feedback; codebooks of single weights.

Van Baalen et al. 2024, arXiv:2402.15319. Letters of the paper: ``W [O, K]``, ``H [K, K]``, and ``U``, the upper Cholesky factor
of the inverse of ``H``. A codebook of ``k`` vectors of ``d`` codes is fitted to a layer by k-means in which every column weighs
what the layer's outputs feel of it (section 3.2); ``d`` columns at a time take the vectors nearest in the metric of ``U``, and
the columns still to come make up for the error (section 3.1); the vectors then move to the least squares of the outputs (section
3.3).

Entries are whole codes of the weight's own grid, so that the result is a weight on this grid like that of any other method, of at
most ``k`` different vectors: 8-bit integers for runtimes that know no codebooks, indices where a file can hold them.

``codebook`` is the same with ``d = 1``, by bits. Without rounds it is k-means in which a weight counts by its sensitivity, as in
SqueezeLLM (Kim et al. 2023, arXiv:2306.07629, section 4.1), with the diagonal of ``H`` in place of squared gradients: how much
the squared error of the layer's outputs grows with that of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock
from bitwright.errors import ConfigError
from bitwright.methods.rounding.driver import Choice, Task, check_finite, check_rows
from bitwright.methods.rounding.gptq import Settings as Rounded
from bitwright.methods.rounding.gptq import inverse_factor, least_squares, quadratic_error
from bitwright.methods.rounding.matrices import Grid, Layer

_POINTS = 1 << 15  # vectors that a codebook is fitted to at most, and that are compared with it at once
_SWEEPS = 25  # of k-means
_DESCENTS = 20  # steps of conjugate gradients
_MOST = 256  # entries: an index is a byte


@dataclass(frozen=True)
class Settings:
    """Options of GPTVQ.

    Attributes:
        vector: neighbouring weights of a row that one index stands for; fewer where they do not divide the inputs of a layer.
        entries: vectors of the codebook of a layer; ``log2(entries) / vector`` bits a weight.
        rounds: how often vectors are chosen, each time followed by a move of the codebook; 0: k-means and nearest vectors,
            every weight counted by its sensitivity where the outputs gain.
        damping, match_float, rows_per_input: as of ``gptq``.
    """

    vector: int = 2
    entries: int = 64
    rounds: int = 3
    damping: float = 0.01
    match_float: bool = True
    rows_per_input: int | None = None

    def __post_init__(self) -> None:
        for name, least, most in (("vector", 1, 8), ("entries", 2, _MOST), ("rounds", 0, 100)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(name, f"it is {value!r}", f"give a whole number from {least} to {most}")


@dataclass(frozen=True)
class ScalarSettings:
    """Options of ``codebook``.

    Attributes:
        bits: of an index; the codebook of a layer has ``2 ** bits`` numbers.
        rounds, damping, match_float, rows_per_input: as of :class:`Settings`.
    """

    bits: int = 4
    rounds: int = 3
    damping: float = 0.01
    match_float: bool = True
    rows_per_input: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or not 1 <= self.bits <= 8:
            raise ConfigError("bits", f"it is {self.bits!r}", "give a whole number from 1 to 8")
        self.of_vectors()  # which checks the others

    def of_vectors(self) -> Settings:
        """The same as options of GPTVQ."""
        return Settings(1, 1 << self.bits, self.rounds, self.damping, self.match_float, self.rows_per_input)


@dataclass(frozen=True)
class Matrix:
    """One matrix to be stored by vectors.

    Attributes:
        target: weights that are wanted, ``[O, K]``.
        scale: of each, as large.
        hessian: ``[K, K]`` float64.
        upper: ``U``, float32.
        ends: lowest and highest code.
        size: ``d``.
    """

    target: Tensor
    scale: Tensor
    hessian: Tensor
    upper: Tensor
    ends: tuple[float, float]
    size: int

    def vectors(self, values: Tensor) -> Tensor:
        """``[O, K]`` as ``[O * K / d, d]``."""
        return values.reshape(-1, self.size)

    def weight(self, book: Tensor, index: Tensor) -> Tensor:
        """The weights that indices ``[O, K / d]`` stand for."""
        return book[index].reshape(self.target.shape) * self.scale

    def error(self, weight: Tensor) -> float:
        """``(Q - W) H (Q - W)^T``."""
        return float(quadratic_error((weight - self.target)[None], self.hessian[None]).sum())

    def whole(self, book: Tensor) -> Tensor:
        """Entries as codes."""
        return book.round().clamp(*self.ends)


def fitted_book(points: Tensor, weights: Tensor, entries: int, generator: torch.Generator) -> Tensor:
    """Vectors that are nearest to ``points`` in the squared distance that ``weights`` multiply: k-means.

    Args:
        points, weights: ``[N, d]``.
        entries: how many, at most as many as there are points.
        generator: draws points, and the first vectors (k-means++).
    """
    if len(points) > _POINTS:
        drawn = torch.randperm(len(points), generator=generator)[:_POINTS].to(points.device)
        points, weights = points[drawn], weights[drawn]
    book = points[torch.randint(len(points), (1,), generator=generator)]
    nearest = (weights * (points - book) ** 2).sum(1)
    while len(book) < min(entries, len(points)):
        place = torch.searchsorted(nearest.cumsum(0), torch.rand((), generator=generator) * nearest.sum())
        book = torch.cat((book, points[place.clamp(max=len(points) - 1)][None]))
        nearest = torch.minimum(nearest, (weights * (points - book[-1]) ** 2).sum(1))
    for _ in range(_SWEEPS):
        index = (weights @ (book**2).t() - 2 * (weights * points) @ book.t()).argmin(1)
        mass = torch.zeros_like(book).index_add_(0, index, weights)
        moved = torch.zeros_like(book).index_add_(0, index, weights * points)
        book = torch.where(mass > 0, moved / mass.clamp(min=torch.finfo(mass.dtype).tiny), book)
    return book


def nearest_vectors(matrix: Matrix, book: Tensor, weights: Tensor | None = None) -> Tensor:
    """The nearest entry of every vector, ``[O, K / d]``, in the squared distance that ``weights`` multiply, by default 1."""
    ratio = matrix.vectors(matrix.target / matrix.scale)
    weights = torch.ones_like(ratio) if weights is None else weights
    parts = zip(ratio.split(_POINTS), weights.split(_POINTS), strict=True)
    found = [(w @ (book**2).t() - 2 * (w * part) @ book.t()).argmin(1) for part, w in parts]
    return torch.cat(found).view(len(matrix.target), -1)


def choose_vectors(matrix: Matrix, book: Tensor) -> Tensor:
    """Indices ``[O, K / d]``, chosen from column to column with error feedback."""
    w, d, upper = matrix.target.clone(), matrix.size, matrix.upper
    found = torch.empty(len(w), w.shape[1] // d, dtype=torch.int64, device=w.device)
    for at in range(found.shape[1]):
        here, behind = slice(at * d, (at + 1) * d), slice((at + 1) * d, None)
        metric = torch.linalg.inv(upper[here, here])  # of errors, as those of one column after the other
        entries = book @ metric
        ratio = (w[:, here] / matrix.scale[:, here]) @ metric
        found[:, at] = index = ((entries**2).sum(1) - 2 * ratio @ entries.t()).argmin(1)
        error = (w[:, here] - book[index] * matrix.scale[:, here]) @ metric
        w[:, behind] -= error @ upper[here, behind]
    return found


def moved_book(matrix: Matrix, book: Tensor, index: Tensor) -> Tensor:
    """The entries for which the error of fixed indices is least, by conjugate gradients, float64."""
    scale, flat = matrix.scale.double(), index.reshape(-1)

    def gathered(weights: Tensor) -> Tensor:
        """``weights H``, summed over the places of each entry."""
        each = matrix.vectors((weights @ matrix.hessian) * scale)
        return torch.zeros(book.shape, dtype=torch.float64, device=book.device).index_add_(0, flat, each)

    def spread(entries: Tensor) -> Tensor:
        return entries[index].reshape(scale.shape) * scale

    found = book.double()
    residual = gathered(matrix.target.double() - spread(found))
    direction, power = residual, float((residual**2).sum())
    for _ in range(_DESCENTS):
        if power <= 0:
            break
        image = gathered(spread(direction))
        curve = float((direction * image).sum())
        if curve <= 0:
            break
        found = found + power / curve * direction
        residual = residual - power / curve * image
        old, power = power, float((residual**2).sum())
        direction = residual + power / old * direction
    return found.float()


def stored_by_vectors(
    matrix: Matrix, entries: int, rounds: int, generator: torch.Generator
) -> tuple[Tensor, float, float]:
    """The weights, their error, and that of a codebook and of vectors that are nearest to the weights."""
    ratio, own = matrix.vectors(matrix.target / matrix.scale), matrix.vectors(matrix.scale**2)
    plain = matrix.whole(fitted_book(ratio, own, entries, generator))
    best = matrix.weight(plain, nearest_vectors(matrix, plain))
    before = least = matrix.error(best)
    if not rounds:
        sensitivity = own * matrix.vectors(matrix.hessian.diagonal().float().expand_as(matrix.target))
        book = matrix.whole(fitted_book(ratio, sensitivity, entries, generator))
        weight = matrix.weight(book, nearest_vectors(matrix, book, sensitivity))
        error = matrix.error(weight)
        return (weight, error, before) if error < before else (best, before, before)
    felt = matrix.upper.diagonal().square().reciprocal().expand_as(matrix.target)
    for book in (plain, matrix.whole(fitted_book(ratio, own * matrix.vectors(felt), entries, generator))):
        for _ in range(rounds):
            index = choose_vectors(matrix, book)
            moved = matrix.whole(moved_book(matrix, book, index))
            for candidate in (book, moved):
                weight = matrix.weight(candidate, index)
                error = matrix.error(weight)
                if error < least:
                    best, least = weight, error
            book = moved
    return best, least, before


def solve(task: Task, settings: Settings) -> list[Choice]:
    """Choose the weights of a layer; vectors nearest to the weights stay where they are as good."""
    (layer,) = task.layers.values()
    w, encoding = task.weight(layer), task.encoding(layer)
    grid = Grid.of(encoding, layer, w.device)
    _check_grid(layer, encoding, grid)
    found = task.moments(layer, settings.rows_per_input, weight=w if settings.match_float else None)
    check_finite(layer, found.matrix)
    check_rows(task.walk, layer, found.rows, int(w.shape[2]))
    seen = bool(found.matrix.any())
    target = least_squares(w, found, Rounded(settings.damping)) if settings.match_float and seen else w
    inputs = int(w.shape[2])
    size = max(d for d in range(1, settings.vector + 1) if inputs % d == 0)
    entries = max(2, round(settings.entries ** (size / settings.vector)))
    upper = inverse_factor(found.matrix, settings.damping).float()
    scale = grid.scale.expand(w.shape)
    ends = float(grid.lo.max()), float(grid.hi.min())
    made = [
        stored_by_vectors(
            Matrix(target[g], scale[g], found.matrix[g], upper[g], ends, size), entries, settings.rounds, task.generator
        )
        for g in range(len(w))
    ]
    weight = torch.stack([part[0] for part in made])
    after, before = (sum(errors) / found.rows for errors in ([part[1] for part in made], [part[2] for part in made]))
    several = "numbers" if size == 1 else f"vectors of {size}"
    note = f"{entries} {several}: {math.log2(entries) / size:.2f} bits a weight"
    unseen = int((found.matrix.diagonal(dim1=1, dim2=2).sum(1) == 0).sum())
    if unseen:
        note += f"; {unseen} of {len(w)} matrices saw no input"
    if len(w) == 1 and not isinstance(encoding.granularity, PerBlock):
        encoding = replace(encoding, vectors=(size, _axis(layer)))
    return [Choice(layer.name, layer.tensor(weight), encoding, before, after, note)]


def _check_grid(layer: Layer, encoding: Encoding, grid: Grid) -> None:
    """Refuse grids whose codes rows of one codebook cannot share."""
    whole = isinstance(encoding.format, IntFormat)
    if whole and not grid.steps and not grid.free:
        return
    why = "has zero points, and rows of a codebook share its entries" if whole else "has no codes that are integers"
    raise ConfigError(
        layer.name,
        f"its weight is quantized to {encoding.format.name}, which {why}",
        "quantize weights symmetrically to 8 bits per channel: preset='w8'",
    )


def _axis(layer: Layer) -> int:
    """-1 where neighbours of a row lie side by side in the tensor, -2 where they stand below each other."""
    numbers = torch.arange(math.prod(layer.shape)).reshape(layer.shape)
    row = layer.matrix(numbers)[0, 0]
    return -1 if len(row) < 2 or int(row[1] - row[0]) == 1 else -2


def method(settings: Settings) -> Callable[[Task], Sequence[Choice]]:
    """:func:`solve` for :func:`bitwright.methods.rounding.driver.apply`."""
    return lambda task: solve(task, settings)


def scalar_method(settings: ScalarSettings) -> Callable[[Task], Sequence[Choice]]:
    """:func:`solve` with codebooks of single weights."""
    return method(settings.of_vectors())
