"""Calibration by several processes: their statistics are merged, so that all ranks get the same encodings bit for bit.

Nothing here depends on which process saw what. Bounds are joined by minimum and maximum, and counts are integers. Bins of
histograms have widths that are powers of two: the ranks agree on the largest first, join their bins to that width, which
loses nothing, and add the counts.

A rank that fails says so where the others wait for it (:meth:`Ranks.meet`), and all of them end in an error that names it. One
that dies closes its connections, or keeps the others waiting until the timeout of the process group.

Ranges that are learned lie beside the model, where ``DistributedDataParallel`` and ``fully_shard`` do not see them:
:class:`SharedGradients` averages their gradients, as these do with those of the model.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from bitwright.core.graph.constant_channels import ChannelWatch, channels_within
from bitwright.core.numerics.statistics import Histogram, MinMax, from_arrays, kind_of, merge, start, to_arrays
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.core.simulation.simulation import Simulation
from bitwright.errors import CalibrationError, ConfigError, checks_arguments, with_article
from bitwright.torch.simulation.simulate import Simulator

_MOST_AXES = 8
_RELEASE = 1.0  # seconds to wait at most for a thread of gloo
_OPERATIONS = (
    {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX} if dist.is_available() else {}
)

# what ranks come together for, and what every one of them has to do
_STATISTICS = (
    "merge what it saw",
    "every rank must call compute_encodings as often as the others (distributed=False calibrates on one alone)",
)
_GRADIENTS = (
    "average the gradients of learned ranges",
    "every rank must run as many backward passes as the others (learn_ranges(distributed=False) trains each for itself)",
)
_STEPS = (
    "agree on whether to take a training step",
    "every rank must take as many steps as the others (TrainingGuard(distributed=False) decides for each alone)",
)
_DATA = ("exchange batches", "every rank must call gather_batches as often as the others, if only with an empty list")


class Ranks:
    """The ranks of the default process group, which calibrate one model together.

    Args:
        purpose: what :meth:`reduce` is called for and what every rank has to do, for the error of one that does not.

    Attributes:
        number, count: of this process, and of all.
    """

    def __init__(self, purpose: tuple[str, str] = _STATISTICS) -> None:
        self._purpose = purpose
        self.number, self.count = dist.get_rank(), dist.get_world_size()
        # a group for GPUs alone cannot carry what lies in host memory
        host = "cpu:" in dist.get_backend_config()
        self._device = torch.device("cpu") if host else torch.device("cuda", torch.cuda.current_device())
        self._over = False

    # -- failing together

    @contextmanager
    def together(self) -> Iterator[None]:
        """Report an error that leaves the block to the other ranks, which wait in :meth:`meet`."""
        try:
            yield
        except BaseException as error:
            if not self._over:
                self._exchange(f"{type(error).__name__}: {error}")
            raise

    def meet(self) -> None:
        """Wait for all ranks.

        Raises:
            CalibrationError: a rank failed before, with its number and its error; or one did not come.
        """
        failed = self._exchange("")
        if failed:
            first = min(failed)
            raise CalibrationError(
                f"rank {first} of {self.count}",
                f"calibration failed there: {failed[first]}",
                "repair that; no rank has new encodings",
            )

    def _exchange(self, problem: str) -> dict[int, str]:
        """Number -> problem of the ranks that have one."""
        length = int(self.reduce(np.array([len(problem.encode())]), "max")[0])
        if not length:
            return {}
        self._over = True
        content = np.zeros((self.count, length), np.int64)  # every rank fills its own row
        content[self.number, : len(problem.encode())] = np.frombuffer(problem.encode(), np.uint8)
        rows = self.reduce(content, "sum").astype(np.uint8)
        texts = {rank: row.tobytes().rstrip(b"\0").decode() for rank, row in enumerate(rows)}
        return {rank: text for rank, text in texts.items() if text}

    def reduce(self, values: NDArray[Any], operation: str) -> NDArray[Any]:
        """Minimum, maximum or sum over the ranks, element by element; shape and dtype (int64, float64) stay.

        Raises:
            CalibrationError: a rank ended, or did not come within the timeout of the process group.
        """
        tensor = torch.from_numpy(np.ascontiguousarray(values)).clone().to(self._device)
        self._carry(partial(dist.all_reduce, op=_OPERATIONS[operation]), tensor, *self._purpose)
        return np.asarray(tensor.cpu().numpy()).reshape(values.shape)

    def average(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks of a floating-point tensor, on its device.

        Raises:
            CalibrationError: as :meth:`reduce`.
        """
        # a tensor on a GPU stays there: gloo and NCCL take it
        tensor = (values if values.is_cuda else values.to(self._device)).clone()
        self._carry(dist.all_reduce, tensor, *_GRADIENTS)
        return (tensor / self.count).to(values.device)

    def with_bad_step(self, bad: bool) -> list[int]:
        """The ranks whose training step is ``bad``.

        Raises:
            CalibrationError: as :meth:`reduce`.
        """
        flags = torch.zeros(self.count, dtype=torch.int64, device=self._device)
        flags[self.number] = int(bad)
        self._carry(dist.all_reduce, flags, *_STEPS)
        return [rank for rank, flag in enumerate(flags.tolist()) if flag]

    def _carry(self, operation: Callable[[torch.Tensor], Any], tensor: torch.Tensor, purpose: str, rule: str) -> None:
        """Run a collective operation; ``purpose`` and ``rule`` are for the error of a rank that does not join."""
        gloo = f"{tensor.device.type}:gloo" in dist.get_backend_config()
        try:
            run_to_release(operation, tensor, _RELEASE if gloo else 0.0)
        except RuntimeError as error:  # what backends raise, each with a class and a text of its own
            self._over = True
            raise CalibrationError(
                f"rank {self.number} of {self.count}",
                f"another rank ended, or did not come to {purpose}: {error}",
                f"see the output of the others for the cause; {rule}, within the timeout of init_process_group(timeout=...)",
            ) from error

    def gather(self, contents: Sequence[bytes]) -> list[bytes]:
        """The values of all ranks, in rank order.

        Raises:
            CalibrationError: as :meth:`reduce`.
        """
        counts = np.zeros(self.count, np.int64)
        counts[self.number] = len(contents)
        counts = self.reduce(counts, "sum")
        lengths = np.zeros((self.count, max(1, int(counts.max()))), np.int64)
        lengths[self.number, : len(contents)] = [len(content) for content in contents]
        lengths = self.reduce(lengths, "sum")
        found = []
        for rank in range(self.count):
            sizes = lengths[rank, : counts[rank]].tolist()
            own = np.frombuffer(b"".join(contents), np.uint8) if rank == self.number else np.zeros(sum(sizes), np.uint8)
            tensor = torch.from_numpy(own.copy()).to(self._device)
            if sizes:
                self._carry(partial(dist.broadcast, src=rank), tensor, *_DATA)
            whole, start = tensor.cpu().numpy().tobytes(), 0
            for size in sizes:
                found.append(whole[start : start + size])
                start += size
        return found

    # -- agreeing

    def require_equal(self, rows: Mapping[str, bytes], problem: str, remedy: str) -> None:
        """Refuse rows whose bytes differ between ranks; the error names the first.

        Raises:
            CalibrationError: on every rank.
        """
        digests = np.array([_digest("\n".join(rows).encode()), *map(_digest, rows.values())], np.int64)
        sizes = np.array([len(digests), -len(digests)])
        place = "the model"  # of another length are those of another model
        if not self.total(int((self.reduce(sizes, "max") != sizes).any())):
            different = np.flatnonzero(self.reduce(digests, "min") != self.reduce(digests, "max"))
            if not different.size:
                return
            place = ["the model", *rows][different[0]]
        raise CalibrationError(place, problem, remedy)

    # -- merging

    def merge_statistics(self, quantizers: Sequence[Quantizer]) -> None:
        """Give each quantizer the merged statistics of all ranks, and the count of their empty tensors."""
        if not quantizers:
            return
        empty = self.reduce(np.array([q.empty for q in quantizers]), "sum")
        shapes = self._shapes([None if q.statistics is None else _shape(q.statistics) for q in quantizers])
        for quantizer, count, shape in zip(quantizers, empty.tolist(), shapes, strict=True):
            quantizer.empty = count
            if shape is not None:
                seen = quantizer.statistics
                quantizer.statistics = self._merged(start(quantizer.needs, shape) if seen is None else seen)

    def _shapes(self, own: list[tuple[int, ...] | None]) -> list[tuple[int, ...] | None]:
        """The shapes of the statistics of all ranks; ``None`` where no rank has any."""
        table = np.full((len(own), _MOST_AXES + 1), -1)
        for row, shape in zip(table, own, strict=True):
            if shape is not None:
                row[0], row[1 : len(shape) + 1] = len(shape), shape
        agreed = self.reduce(table, "max")
        wrong = [i for i, shape in enumerate(own) if shape is not None and (table[i] != agreed[i]).any()]
        if self.reduce(np.array([len(wrong)]), "max")[0]:
            raise CalibrationError(
                "compute_encodings",
                "an activation with a scale per channel has another number of channels on another rank",
                "feed every rank inputs of the same kind",
            )
        return [None if row[0] < 0 else tuple(row[1 : row[0] + 1].tolist()) for row in agreed]

    def _merged(self, seen: Any) -> Any:
        assert isinstance(seen, MinMax | Histogram)
        if isinstance(seen, Histogram):
            exponent = self.reduce(seen.exponent, "max")
            none = start("histogram", exponent.shape)
            assert isinstance(none, Histogram)
            # merged with no data in bins of that width, its bins are joined to that width
            seen = merge(seen, Histogram(none.counts, exponent, none.zeros, none.bounds))
        arrays = {
            name: self.reduce(values, {"lo": "min", "hi": "max", "exponent": "max"}.get(name, "sum"))
            for name, values in to_arrays(seen).items()
        }
        # of the two zeros the positive one, whichever came first
        arrays["lo"], arrays["hi"] = arrays["lo"] + 0.0, arrays["hi"] + 0.0
        return from_arrays(kind_of(seen), arrays)

    def merge_channels(self, watches: Sequence[ChannelWatch]) -> None:
        """Keep the channels that are constant with one value on every rank that saw data."""
        if not watches:
            return
        counts = self.reduce(np.array([0 if w.seen is None else w.seen.count for w in watches]), "max")
        varied = np.array([w.seen is not None and not w.seen.index.size for w in watches]).astype(np.int64)
        varied = self.reduce(varied, "max")
        reached = self.reduce(np.array([w.seen is not None for w in watches]).astype(np.int64), "max")
        for watch, count, none, seen in zip(watches, counts.tolist(), varied, reached, strict=True):
            if not seen:
                continue
            if none:
                watch.seen = channels_within(np.zeros(0), np.zeros(0))
                continue
            lo, hi = np.full(count, np.inf), np.full(count, -np.inf)
            if watch.seen is not None:
                lo, hi = np.full(count, -np.inf), np.full(count, np.inf)
                lo[watch.seen.index] = hi[watch.seen.index] = watch.seen.value
            lo, hi = self.reduce(lo, "min"), self.reduce(hi, "max")
            watch.seen = channels_within(lo, hi)

    def merge_largest(self, names: Iterable[str], found: dict[str, int]) -> None:
        """For each of ``names``, the same on all ranks, take the largest number of any rank."""
        order = list(names)
        merged = self.reduce(np.array([found.get(name, -1) for name in order], np.int64), "max")
        found.update((name, n) for name, n in zip(order, merged.tolist(), strict=True) if n >= 0)

    def merge_spans(self, names: Iterable[str], found: dict[str, tuple[float, float]]) -> None:
        """For each of ``names``, take the least and the largest number of any rank."""
        order, none = list(names), (np.inf, -np.inf)
        ends = np.array([found.get(name, none) for name in order], np.float64).reshape(-1, 2)
        lo, hi = self.reduce(ends[:, 0], "min"), self.reduce(ends[:, 1], "max")
        found.update(
            (name, (low, high)) for name, low, high in zip(order, lo.tolist(), hi.tolist(), strict=True) if low <= high
        )

    def total(self, number: int) -> int:
        """The sum over the ranks."""
        return int(self.reduce(np.array([number], np.int64), "sum")[0])


def run_to_release(operation: Callable[[torch.Tensor], Any], tensor: torch.Tensor, seconds: float) -> None:
    """Run a collective operation on ``tensor``, and wait at most ``seconds`` until no other thread holds the tensor.

    A thread of gloo keeps the tensor for a moment after the operation has returned, and drops it under the lock of the
    interpreter. C++ aborts a script that ends in this moment ("terminate called without an active exception").
    """
    references = sys.getrefcount(tensor)
    operation(tensor)
    end = time.monotonic() + seconds
    while sys.getrefcount(tensor) > references and time.monotonic() < end:
        time.sleep(0.0001)


@contextmanager
def merged(sim: Simulation, simulator: Simulator, ranks: Ranks | None) -> Iterator[None]:
    """Merge the statistics of all ranks before a block that computes encodings, and check after it that they are equal.

    Raises:
        CalibrationError: a rank failed, or has another model, other rules or other weights.
    """
    if ranks is None:
        yield
        return
    ranks.meet()
    quantizers = [q for q in sim.quantizers.unique() if q.role in ("input", "output") and not q.frozen]
    ranks.require_equal(
        {q.name: repr((q.spec, q.enabled)).encode() for q in quantizers},
        "another rank simulates another model, or by other rules",
        "build the same simulation on every rank before compute_encodings",
    )
    ranks.merge_statistics(quantizers)
    ranks.merge_channels([s.channels for s in sim.quantizers.values() if not s.frozen])
    ranks.merge_largest([op.name for op in sim.graph.ops], simulator.lengths)
    ranks.merge_spans(sim.quantizers, simulator.ranges)
    simulator.runs = ranks.total(simulator.runs)
    yield
    ranks.require_equal(
        {q.name: _content(q) for q in sim.quantizers.unique()},
        "it has another encoding on another rank, whose model has other weights",
        "give all ranks the same weights before compute_encodings: load one file on each, or send those of rank 0 with "
        "torch.distributed.broadcast",
    )
    ranks.meet()


def _content(quantizer: Quantizer) -> bytes:
    encoding = quantizer.encoding
    values = () if encoding is None else (encoding.scale.tobytes(), encoding.zero.tobytes())
    return b"".join((repr((quantizer.spec, quantizer.enabled)).encode(), *values))


def calibrating_ranks(wanted: bool, purpose: tuple[str, str] = _STATISTICS) -> Ranks | None:
    """The ranks to calibrate with: those of an initialised default process group with several processes."""
    if not wanted or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    return Ranks(purpose)


# ------------------------------------------------------------------------------------------------ data


@checks_arguments
def gather_batches(batches: Iterable[Any]) -> list[Any]:
    """The batches of all ranks, in an order that does not depend on their distribution; also for a single rank.

    For methods whose sums of products in floating point depend on the order of the data (GPTQ, AdaRound, bias correction,
    recipes): with all batches on every rank, all ranks find the same weights, bit for bit, however many there are.

    Args:
        batches: of this rank; tensors, or tuples, lists and dicts of tensors, text, numbers and ``None``.

    Raises:
        ConfigError: a batch holds something else.
        CalibrationError: another rank ended, or did not come.
    """
    return [_unpacked(content) for content in _of_all([_packed(i, batch) for i, batch in enumerate(batches)])]


def batches_of_ranks(batches: Iterable[Any]) -> Iterable[Any]:
    """:func:`gather_batches` where a process group is initialised; the batches of one rank where all have the same.

    Raises: as :func:`gather_batches`.
    """
    if not dist.is_available() or not dist.is_initialized():
        return batches
    own = [_packed(i, batch) for i, batch in enumerate(batches)]
    found, ranks = _of_all(own), calibrating_ranks(True, _DATA)
    if ranks is not None and not ranks.total(int(_in_order(own) != found[:: ranks.count])):
        found = found[:: ranks.count]
    return [_unpacked(content) for content in found]


def _of_all(own: list[bytes]) -> list[bytes]:
    """The contents of all ranks, in one order."""
    ranks = calibrating_ranks(True)
    return _in_order(own if ranks is None else ranks.gather(own))


def _in_order(contents: Iterable[bytes]) -> list[bytes]:
    return sorted(contents, key=lambda content: hashlib.sha256(content).digest())


def _packed(index: int, batch: Any) -> bytes:
    """A batch as the length of a JSON text, the text, and its tensors as safetensors."""
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_described(batch, tensors, f"batch {index}")).encode()
    return len(text).to_bytes(8, "little") + text + save(tensors)


def _described(item: Any, tensors: dict[str, torch.Tensor], site: str) -> Any:
    """``item`` as JSON with names in place of tensors, which are added to ``tensors``."""
    if isinstance(item, torch.Tensor):
        tensors[str(len(tensors))] = item.detach().cpu().contiguous().clone()
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(item, Mapping) and all(isinstance(key, str) for key in item):
        return {"dict": {key: _described(value, tensors, site) for key, value in item.items()}}
    if isinstance(item, list | tuple):
        kind = "list" if type(item) is list else "tuple"
        return {kind: [_described(value, tensors, site) for value in item]}
    if item is None or isinstance(item, str | bool | int | float):
        return {"value": item}
    raise ConfigError(
        site,
        f"it holds {with_article(type(item).__name__)}, which is not sent to other ranks",
        "give tensors, or tuples, lists and dicts of tensors, text, numbers and None",
    )


def _unpacked(content: bytes) -> Any:
    from safetensors.torch import load

    end = 8 + int.from_bytes(content[:8], "little")
    tensors = load(content[end:])

    def rebuilt(item: Any) -> Any:
        ((kind, value),) = item.items()
        if kind == "tensor":
            return tensors[value]
        if kind == "dict":
            return {key: rebuilt(inner) for key, inner in value.items()}
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(rebuilt(inner) for inner in value)
        return value

    return rebuilt(json.loads(content[8:end]))


# ------------------------------------------------------------------------------------------------ training


class SharedGradients:
    """Gradients of parameters outside the model, averaged over the ranks at the end of every backward pass.

    Loops that clear ``model.zero_grad()`` alone do not reach them. A gradient that an optimizer has used, which is one that its
    parameter changed after, is dropped when the next one arrives.

    One call to the process group carries all of them, so that it does not matter in which order the ranks reach them; a parameter
    that a rank did not use counts as zero there, as in ``DistributedDataParallel``. Gradients that accumulate over several
    passes are averaged in each, which changes nothing in the sum: what was averaged before is equal on all ranks.

    Args:
        parameters: the names and parameters, equal on all ranks; asked for in every pass.
        contents: names and the bytes that must be equal on all ranks before the first pass.

    Attributes:
        wanted: ``False`` leaves every rank its own gradients.
    """

    def __init__(
        self, parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]], contents: Callable[[], Mapping[str, bytes]]
    ) -> None:
        self.wanted = True
        self._parameters, self._contents = parameters, contents
        self._due = False
        self._agreed: list[str] = []
        self._versions: dict[int, int] = {}  # id of a parameter -> its version when a gradient accumulated in it

    def arrive(self, parameter: torch.Tensor) -> None:
        """A hook before a gradient accumulates in ``parameter``."""
        with torch._C.DisableTorchFunction():
            if self._is_used(parameter):
                for _, other in self._parameters():
                    if self._is_used(other):
                        other.grad = None

    def _is_used(self, parameter: torch.Tensor) -> bool:
        version = parameter._version
        return parameter.grad is not None and self._versions.get(id(parameter), version) != version

    def note(self, parameter: torch.Tensor) -> None:
        """A hook after gradients accumulated in one of the parameters."""
        with torch._C.DisableTorchFunction():
            self._versions[id(parameter)] = parameter._version
        if calibrating_ranks(self.wanted) is not None:
            self._due = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        ranks = calibrating_ranks(self.wanted, _GRADIENTS)
        if not self._due or ranks is None:  # the first of the callbacks of a pass is for all
            return
        self._due = False
        found = dict(self._parameters())
        if self._agreed != list(found):
            self._require_equal(ranks)
            self._agreed = list(found)
        parameters = list(found.values())
        used = [float(p.grad is not None) for p in parameters]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([*(g.reshape(-1) for g in grads), torch.tensor(used, device=grads[0].device)])
        *means, reached = ranks.average(flat).split([*(g.numel() for g in grads), len(used)])
        unused = None if all(used) else reached.tolist()
        for i, (parameter, mean) in enumerate(zip(parameters, means, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.reshape(parameter.shape))
            elif unused is not None and unused[i]:
                parameter.grad = mean.reshape(parameter.shape).clone()
                self._versions[id(parameter)] = parameter._version

    def _require_equal(self, ranks: Ranks) -> None:
        ranks.require_equal(
            self._contents(),
            "its learned range is another one on another rank",
            "call compute_encodings and learn_ranges alike on every rank, or load one checkpoint on each, before the first "
            "training step; learn_ranges(distributed=False) trains every rank for itself",
        )


def _shape(statistics: Any) -> tuple[int, ...]:
    bounds = statistics.bounds if isinstance(statistics, Histogram) else statistics
    shape = tuple(bounds.lo.shape)
    assert len(shape) <= _MOST_AXES
    return shape


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)
