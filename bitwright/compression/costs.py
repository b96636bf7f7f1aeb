"""Costs of a model per operator: multiplications, bytes, activation memory, measured milliseconds."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from bitwright.core.graph.attention import active_shares, cached_numbers
from bitwright.core.graph.cost import as_bound, counts_bytes, lifetimes, multiplications, size
from bitwright.core.graph.graph import Graph, Op, Value
from bitwright.errors import ConfigError, checks_arguments, close_matches
from bitwright.methods.front_end import front_end_of
from bitwright.tables import Table, Tabular, html_table

#: name of a cost -> its unit
COSTS: dict[str, str] = {
    "macs": "multiplications",
    "bytes": "bytes of parameters",
    "params": "parameters",
    "active_params": "parameters that one token reads, of experts those that are chosen",
    "cache_bytes": "bytes of keys and values of attention",
    "activation_bytes": "bytes of activations at the peak",
    "memory": "bytes of parameters and of activations at the peak",
    "ms": "milliseconds in ONNX Runtime on one thread",
}


_HEADS = {"active_params": "active", "cache_bytes": "keys, values", "ms": "ms"}


@dataclass(frozen=True)
class OpCost:
    """Costs of one operator in the recorded run.

    Attributes:
        op, type: the operator.
        macs: multiplications.
        params, bytes: of the parameters that it is the first to read.
        active_params: those of them that one token reads, where it chooses among experts.
        cache_bytes: of the keys or values that it reads, as a product of attention.
        activation_bytes: of everything that is kept while it runs, its own outputs included.
        ms: measured in ONNX Runtime; ``None`` where it was not.
    """

    op: str
    type: str
    macs: float
    params: float
    bytes: float
    activation_bytes: float
    ms: float | None = None
    active_params: float = 0.0
    cache_bytes: float = 0.0


@dataclass(frozen=True)
class ModelCosts(Tabular):
    """One row per operator; a table when printed.

    Attributes:
        rows: in order of execution.
        samples: in the run that was recorded; all numbers are of this run.
        ms: of the whole model; ``None`` where it was not measured.
    """

    _rows = "rows"

    rows: tuple[OpCost, ...]
    samples: int = 1
    ms: float | None = None

    def __getitem__(self, cost: str) -> float:
        """The cost of the whole model: a key of :data:`COSTS`.

        Raises:
            ConfigError: there is no such cost, or it was not measured.
        """
        check_cost(cost)
        if cost == "activation_bytes":
            return max((row.activation_bytes for row in self.rows), default=0.0)
        if cost == "memory":
            return self["bytes"] + self["activation_bytes"]
        if cost == "ms":
            if self.ms is None:
                raise ConfigError("ms", "milliseconds were not measured", "call model_costs(..., milliseconds=True)")
            return self.ms
        return float(sum(getattr(row, cost) for row in self.rows))

    def totals(self) -> dict[str, float]:
        """All known costs."""
        return {name: self[name] for name in COSTS if name != "ms" or self.ms is not None}

    def table(self) -> Table:
        """Operators that multiply or hold parameters, then the whole model."""
        more = [name for name, shown in self._columns().items() if shown]
        head = ["operator", "type", "MACs", "params", "bytes", "activations", *(_HEADS[name] for name in more)]
        rows = [self._cells(row, more) for row in self.rows if row.macs or row.params or (row.ms or 0) > 0]
        whole = OpCost(
            "all", "", self["macs"], self["params"], self["bytes"], self["activation_bytes"], self.ms,
            self["active_params"], self["cache_bytes"],
        )  # fmt: skip
        title = f"Costs of a run of {self.samples} sample{'s' * (self.samples != 1)}"
        return Table(head, [*rows, self._cells(whole, more)], title, right=range(2, len(head)))

    def _columns(self) -> dict[str, bool]:
        """Columns beside those that every model has -> whether this one has them: experts, attention, measured times."""
        return {
            "active_params": self["active_params"] != self["params"],
            "cache_bytes": self["cache_bytes"] > 0,
            "ms": self.ms is not None,
        }

    def _cells(self, row: OpCost, more: Sequence[str]) -> list[str]:
        numbers = [f"{n:,.0f}" for n in (row.macs, row.params, row.bytes, row.activation_bytes)]
        others = {"active_params": f"{row.active_params:,.0f}", "cache_bytes": f"{row.cache_bytes:,.0f}"}
        others["ms"] = "" if row.ms is None else f"{row.ms:.3f}"
        return [row.op, row.type, *numbers, *(others[name] for name in more)]

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        found = self.table()
        return html_table(found.head, found.rows, found.title)


def check_cost(name: str) -> str:
    """``name`` itself.

    Raises:
        ConfigError: it is no key of :data:`COSTS`.
    """
    if name not in COSTS:
        raise ConfigError(
            "cost", f"there is no cost {name!r}{close_matches(str(name), COSTS)}", f"use {', '.join(COSTS)}"
        )  # fmt: skip
    return name


def check_target(target: Mapping[str, float | str]) -> dict[str, float | str]:
    """Cost -> the part of it that may be left; or bytes of it, as a text with a unit or a number above 1. ``target`` itself.

    Raises:
        ConfigError: it is empty, names an unknown cost, a part is not above 0 and 1 at most, or a text is not a number of bytes.
    """
    if not target:
        raise ConfigError("target", "it names no cost", 'write target={"macs": 0.5} for half of the multiplications')
    for name, part in target.items():
        check_cost(name)
        number = isinstance(part, (int, float)) and not isinstance(part, bool)
        bound = as_bound(name, part, "target") if number or isinstance(part, str) else math.nan
        if not 0 < bound < math.inf or (bound > 1 and not counts_bytes(name)):
            other = f', {{"{name}": "256KiB"}} for so many bytes' if counts_bytes(name) else ""
            raise ConfigError(
                "target",
                f"{part!r} of the {name} is not a part between 0 and 1",
                f'write target={{"{name}": 0.5}} for half{other}',
            )
    return dict(target)


def nearest_part(name: str, least: float, whole: float) -> str:
    """The smallest target of a cost that can be met, for messages; rounded up, so that it can be asked for.

    >>> nearest_part("macs", 300.0, 1000.0), nearest_part("memory", 300.0, 1000.0)
    ('0.300', '0.300 (300 bytes)')
    """
    part = f"{math.ceil(least / whole * 1000 - 1e-9) / 1000:.3f}"
    return f"{part} ({math.ceil(least):,} bytes)" if counts_bytes(name) else part


def parts_left(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Parts of each cost that are left, for the first line of a report.

    >>> parts_left({"macs": 200.0, "params": 40.0}, {"macs": 100.0, "params": 30.0})
    '50.0% of the macs, 75.0% of the params left'
    """
    return ", ".join(f"{after[n] / before[n]:.1%} of the {n}" for n in after if before[n]) + " left"


def graph_costs(graph: Graph, samples: int = 1) -> ModelCosts:
    """The costs of a graph; linear in its operators and values."""
    kept = np.zeros(len(graph.ops) + 1)  # differences, summed up below
    for value, span in lifetimes(graph).items():
        amount = size(graph, value) * _width(graph.values[value].dtype)
        kept[span.start] += amount
        kept[min(span.stop, len(graph.ops))] -= amount
    live = np.cumsum(kept)[:-1]
    shares, cached, owned = active_shares(graph), cached_numbers(graph), _first_read(graph)
    rows = []
    for i, op in enumerate(graph.ops):
        own = owned[op.name]
        counts = {name: float(math.prod(v.shape)) for name, v in own.items()}
        params, active = sum(counts.values()), sum(n * shares.get(name, 1.0) for name, n in counts.items())
        stored = sum(n * _width(own[name].dtype) for name, n in counts.items())
        kept_numbers = _stored(graph, cached[op.name]) if op.name in cached else 0.0
        macs = operator_macs(graph, op)
        rows.append(OpCost(op.name, op.type, macs, params, stored, float(live[i]), None, active, kept_numbers))
    return ModelCosts(tuple(rows), samples)


def _first_read(graph: Graph) -> dict[str, dict[str, Value]]:
    """Operator -> parameters that it is the first to read."""
    seen: set[str] = set()
    found = {}
    for op in graph.ops:
        held = [graph.values[v] for _, v in op.sources() if graph.values[v].param is not None]
        found[op.name] = {str(v.param): v for v in held if v.param not in seen}
        seen.update(found[op.name])
    return found


class Prices:
    """Compute the costs of cut graphs of one model, by the names of :data:`COSTS`.

    Args:
        graph: of the whole model.
        names: costs that are wanted beside ``macs``, ``params`` and ``bytes``.
        times: operator -> milliseconds, for ``ms``: an operator takes as much less as it multiplies less, or where it does not
            multiply, as it makes less.
        samples: in the recorded run; ``activation_bytes``, ``memory`` and ``cache_bytes`` are of one sample.
    """

    def __init__(
        self, graph: Graph, names: Iterable[str] = (), times: Mapping[str, float] | None = None, samples: int = 1
    ) -> None:
        self._names, self._samples, self._bits = set(names), samples, dict[str, int]()
        self._ms = {op.name: (times or {}).get(op.name, 0.0) / max(_work(graph, op), 1.0) for op in graph.ops}
        self.whole = self(graph)

    def at(self, bits: Mapping[str, int]) -> Prices:
        """The same with ``bits`` per number of these parameters; :attr:`whole` stays that of the model in float."""
        found = copy.copy(self)
        found._bits = dict(bits)
        return found

    def __call__(self, graph: Graph) -> dict[str, float]:
        """The costs of a graph with the operators of the whole model."""
        found = size_costs(graph, self._bits)
        if self._names & {"activation_bytes", "memory"}:
            kept = graph_costs(graph)["activation_bytes"] / self._samples
            more = {"activation_bytes": kept, "memory": found["bytes"] + kept}
            found |= {name: more[name] for name in more if name in self._names}
        if "active_params" in self._names:
            shares = active_shares(graph)
            counts = {v.param: math.prod(v.shape) for v in graph.values.values() if v.param is not None}
            found["active_params"] = sum(n * shares.get(str(name), 1.0) for name, n in counts.items())
        if "cache_bytes" in self._names:
            found["cache_bytes"] = sum(_stored(graph, v) for v in cached_numbers(graph).values()) / self._samples
        if "ms" in self._names:
            found["ms"] = sum(_work(graph, op) * self._ms[op.name] for op in graph.ops)
        return found

    def parts(self, target: Mapping[str, float | str]) -> dict[str, float]:
        """A target in parts of the whole, bytes too; 1 where the whole is within it. Parts of ``ms`` stay as they are."""
        if "cache_bytes" in target and not self.whole["cache_bytes"]:
            problem = "the model has no attention, so that it keeps no keys and values"
            raise ConfigError("target", problem, "leave cache_bytes out")
        bounds = {name: as_bound(name, asked, "target") for name, asked in target.items()}
        return {n: min(b / self.whole[n], 1.0) if b > 1 or isinstance(target[n], str) else b for n, b in bounds.items()}

    def left(self, graph: Graph) -> dict[str, float]:
        """The remaining costs, as parts of the whole."""
        return {name: cost / self.whole[name] if self.whole[name] else 1.0 for name, cost in self(graph).items()}


def size_costs(graph: Graph, bits: Mapping[str, int] | None = None) -> dict[str, float]:
    """``macs``, ``params`` and ``bytes`` of a graph: the same as of :func:`graph_costs`, which also follows activations.

    Args:
        graph: whose shapes are known.
        bits: parameter -> bits of a number of it, where they are not those of its type.
    """
    stored = {name: n / 8 for name, n in (bits or {}).items()}
    held = {v.param: v for v in graph.values.values() if v.param is not None}
    counts = {name: float(math.prod(v.shape)) for name, v in held.items()}
    return {
        "macs": sum(operator_macs(graph, op) for op in graph.ops),
        "params": sum(counts.values()),
        "bytes": sum(n * (stored.get(name) or _width(held[name].dtype)) for name, n in counts.items()),
    }


def _stored(graph: Graph, value: str) -> float:
    """Bytes of a value."""
    return size(graph, value) * _width(graph.values[value].dtype)


def _work(graph: Graph, op: Op) -> float:
    return operator_macs(graph, op) or sum(size(graph, value) for value in op.outputs)


def operator_macs(graph: Graph, op: Op) -> float:
    """Multiplications of an operator in the recorded run; a table that is looked up makes none."""
    return 0.0 if op.type == "Embedding" else multiplications(graph, op) * op.calls


def _width(dtype: str) -> float:
    """Bytes of one element."""
    digits = "".join(c if c.isdigit() else " " for c in dtype.replace("bool", "8")).split()
    return int(digits[0]) / 8 if digits else 4.0


@checks_arguments
def model_costs(
    model: Any,
    data: Iterable[Any] | None = None,
    *,
    milliseconds: bool = False,
    rounds: int = 15,
    providers: Any = None,
) -> ModelCosts:
    """Compute the costs of a PyTorch or ONNX model per operator.

    Args:
        model: a module, an ONNX model, or the path of one; left as it is.
        data: batches, the first of which is run; an ONNX model can do without, on a random input.
        milliseconds: measure in ONNX Runtime on one thread. An ONNX model is profiled node by node; a module is exported for it,
            and the whole is measured.
        rounds: runs that are timed.
        providers: where ONNX Runtime computes while shapes are recorded.

    Returns:
        The table; ``costs["macs"]`` and so on is of the whole model.

    Raises:
        ModelError: the model cannot be read or run.
        ConfigError: a module without data.

    Example:
        >>> import torch
        >>> found = model_costs(torch.nn.Linear(8, 4), [torch.zeros(2, 8)])
        >>> found["macs"], found["params"]
        (64.0, 36.0)
    """
    from bitwright.core.simulation.calibration import samples_in

    first = next(iter(data), None) if data is not None else None
    is_module = hasattr(model, "state_dict")
    if is_module and first is None:
        raise ConfigError("data", "a module does not say the shapes of its inputs", "give a batch: data=[x]")
    opened = front_end_of(model).open_model(_loaded(model), None, first, "model_costs", providers)
    found = graph_costs(opened.view.graph(), 1 if first is None else max(samples_in(first), 1))
    if not milliseconds:
        return found
    times, whole = measure_ms(model, cast(Any, opened).example, [row.op for row in found.rows], rounds)
    times = _of_layers(opened.view.graph(), times)
    return replace(found, rows=tuple(replace(row, ms=times.get(row.op)) for row in found.rows), ms=whole)


def _of_layers(graph: Graph, times: Mapping[str, float]) -> Mapping[str, float]:
    """A layer that ONNX Runtime computes together with what follows it has its time under the name of the last operator."""
    found = dict(times)
    for op in graph.ops:
        last: Op | None = op
        while (
            last is not None and not found.get(last.name) and found.get(op.name) == 0.0 and multiplications(graph, op)
        ):
            last = graph.sole_consumer(last.outputs[0])
            if last is None or multiplications(graph, last):
                break
            found[op.name], found[last.name] = found.get(last.name, 0.0), 0.0
    return found


def _loaded(model: Any) -> Any:
    """Read a model given by its path into a copy that may be edited."""
    if isinstance(model, (str, Path)):
        from bitwright.onnx import load_model

        return load_model(model)
    return model


def untouched(model: Any) -> Any:
    """A copy of a model that is about to be changed, for :func:`changed_ms`; of an ONNX model it shares the weights."""
    if hasattr(model, "state_dict"):
        return copy.deepcopy(model)
    from bitwright.onnx.model.load import Loaded, clone_model, load_model

    return replace(model, model=clone_model(model.model)) if isinstance(model, Loaded) else load_model(model)


def measure_ms(model: Any, example: Any, ops: Iterable[str], rounds: int = 15) -> tuple[Mapping[str, float], float]:
    """Milliseconds of operators, and of the whole model, in ONNX Runtime on one thread.

    Args:
        model: a module, which is exported, or an ONNX model.
        example: the input that is run.
        ops: names of operators; those of a module have other names in its file and are not told.
        rounds: runs that are timed; the least counts.
    """
    ops = [] if hasattr(model, "state_dict") else list(ops)
    found = _timed(model, example, ops, rounds)
    return found.layers if ops else {}, float(found.whole)


def compare_ms(models: Mapping[str, Any], example: Any, rounds: int = 15) -> dict[str, float]:
    """Name -> milliseconds of each model in ONNX Runtime on one thread, from interleaved runs; the least of each counts."""
    return _compared({name: (model, example) for name, model in models.items()}, rounds)


def _compared(runs: Mapping[str, tuple[Any, Any]], rounds: int) -> dict[str, float]:
    """:func:`compare_ms` of models that each have their own example."""
    from bitwright.runtimes.onnxruntime import whole_times

    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, f"{i}.onnx") for i, name in enumerate(runs)}
        feeds = {name: _saved(model, example, paths[name]) for name, (model, example) in runs.items()}
        return whole_times(paths, feeds, rounds=rounds)


_FEW, _MANY = 7, 15  # rounds: the fewer tell a model apart that became clearly faster
_CHANCE = 1.03  # two measurements of one file differ by as much on a busy machine


def changed_ms(before: Any, after: Any, example: Any, narrowed: Any = None) -> dict[str, float]:
    """Milliseconds of a model ``before`` and ``after`` a change; what seems slower is measured again, for longer.

    Args:
        before, after: modules, which are exported, or ONNX models.
        example: the input that is run.
        narrowed: that of the model ``after``, where its recurrent states are narrower.
    """
    runs = {"before": (before, example), "after": (after, example if narrowed is None else narrowed)}
    ms = _compared(runs, _FEW)
    if ms["after"] <= ms["before"]:
        return ms
    again = _compared(runs, _MANY)
    return {name: min(ms[name], again[name]) for name in ms}


def with_ms(before: Mapping[str, float], after: Mapping[str, float], ms: Mapping[str, float]) -> dict[str, Any]:
    """``before`` and ``after`` of a report, with their milliseconds."""
    return {"before": {**before, "ms": ms["before"]}, "after": {**after, "ms": ms["after"]}}


def slower(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """What a report says first where the milliseconds rose by more than chance; empty elsewhere.

    >>> slower({"macs": 2.0, "ms": 1.0}, {"macs": 1.0, "ms": 1.25})
    'SLOWER, 125.0% of the ms measured; '
    >>> slower({"macs": 2.0, "ms": 1.0}, {"macs": 1.0, "ms": 0.8})
    ''
    """
    if "ms" not in before or after["ms"] <= _CHANCE * before["ms"]:
        return ""
    return f"SLOWER, {after['ms'] / before['ms']:.1%} of the ms measured; "


def _timed(model: Any, example: Any, ops: Sequence[str], rounds: int) -> Any:
    from bitwright.runtimes.onnxruntime import layer_times

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        return layer_times({"model": path}, _saved(model, example, path), ops, rounds=rounds)["model"]


def _saved(model: Any, example: Any, path: Path) -> dict[str, Any]:
    """Write a model as one ONNX file, and return the feeds of a run."""
    from bitwright.export.files.onnx_file import save_in_one_file
    from bitwright.onnx import load_model
    from bitwright.onnx.model.data import as_feeds, input_specs

    if hasattr(model, "state_dict"):
        from bitwright.torch.simulation.export import export_float

        return dict(export_float(model, example, path))
    loaded = model if hasattr(model, "model") else load_model(model)
    save_in_one_file(loaded.model, path)
    return dict(as_feeds(example, input_specs(loaded.model)))


def operator_times(model: Any, graph: Graph, example: Any, rounds: int = 15) -> dict[str, float]:
    """Operator -> milliseconds; for a module, estimated from multiplications and output sizes."""
    times, whole = measure_ms(model, example, [op.name for op in graph.ops], rounds)
    if times:
        return dict(_of_layers(graph, times))
    work = {op.name: _work(graph, op) for op in graph.ops}
    total = max(sum(work.values()), 1.0)
    return {name: whole * amount / total for name, amount in work.items()}


def remedy_of(graph: Graph, otherwise: str) -> str:
    """What to do where nothing of a model can be made smaller: of a quantized one, to begin with the float model."""
    if any(op.type in ("QuantizeLinear", "DequantizeLinear") for op in graph.ops):
        return "the model is quantized already: compress the float model, and quantize what that returns"
    return otherwise
