"""Learnable equivalent transformation: factors and shifts of channels, learned block by block through the quantizers.

What a norm hands to linear layers, or the values of an attention to its output projection, is shifted and divided per channel,
``x' = (x - d) / s``, and the layers that read it undo that: ``W' = W s``, ``b' = b + W d``. Queries are multiplied and keys
divided by factors where a quantizer stands in front of their product. All of it goes into parameters, so that the model
computes the same function; only what its quantizers make of it is another thing. ``s`` and ``d`` are learned by Adam towards the
outputs of the float block, on inputs from the quantized predecessor.

The gradient of a quantizer whose range follows its tensor: the codes are held, so that its error grows with the range.

Reference: Shao et al. 2023, arXiv:2308.13137, eqs. 3 to 5. Factors start at 1 or where SmoothQuant puts them, whichever leaves
less error, and stay there where learning does not lower it. Learned clipping, the other half of OmniQuant, is the method
``learned_clipping`` of :func:`~bitwright.methods.rounding.apply.apply_reconstruction`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerToken
from bitwright.core.numerics.ranges import on_grid
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.sites import Site
from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods.attention import Attention, find_attention
from bitwright.methods.front_end import Correctable
from bitwright.methods.layers import Array, Group, Layer, Layers, Refused, log_refused, sift
from bitwright.methods.rounding.driver import Run, Store, Walk
from bitwright.methods.rounding.program import (
    Program,
    Quantize,
    SimulatedModel,
    State,
    Step,
    Unit,
    block_units,
    run,
    run_step,
)
from bitwright.methods.scaling.awq import value_groups
from bitwright.methods.scaling.smooth import TIES, linear_groups, smoothing_factors
from bitwright.tables import Tabular, counted

logger = logging.getLogger("bitwright")

Fake = Callable[[Tensor], Tensor]
_TINY = 1e-8
_FINE = 16  # bits from which on rounding in front of factors does not matter


# ------------------------------------------------------------------------------------------------ arithmetic


def through(x: Tensor, fake_quantize: Fake, spec: QuantSpec) -> Tensor:
    """``fake_quantize(x)``, whose error grows with the range of the elements that share a scale, as its gradient has it.

    >>> x = torch.tensor([[0.4, 2.0]], requires_grad=True)
    >>> from bitwright.core.numerics.spec import dynamic_spec
    >>> through(x, torch.round, dynamic_spec("int4"))[0, 0].backward()
    >>> [round(float(g), 2) for g in x.grad[0]]
    [1.0, -0.2]
    """
    error = (fake_quantize(x.detach()) - x).detach()
    reach = _reach(x, spec)
    return x + error * (reach / reach.detach().clamp_min(_TINY))


def _reach(x: Tensor, spec: QuantSpec) -> Tensor:
    """Range of the elements that share a scale, in a shape that broadcasts against ``x``."""
    held = spec.granularity
    if isinstance(held, PerToken):
        return _of_blocks(x, held.axis, held.block, spec)
    if isinstance(held, PerBlock) and held.axis is not None:
        return _of_blocks(x, held.axis, held.size, spec)
    if isinstance(held, PerChannel) and held.axis is not None:
        axes = [axis for axis in range(x.dim()) if axis != held.axis % x.dim()]
        return _extent(x.movedim(held.axis, 0).flatten(1), spec).reshape(
            [1 if a in axes else -1 for a in range(x.dim())]
        )
    return _extent(x.flatten(), spec)


def _of_blocks(x: Tensor, axis: int, size: int | None, spec: QuantSpec) -> Tensor:
    rows = x.movedim(axis, -1)
    count = int(rows.shape[-1])
    size = min(size or count, count)
    padded = torch.nn.functional.pad(rows, (0, -count % size))
    wide = _extent(padded.unflatten(-1, (-1, size)), spec).repeat_interleave(size, -1)
    return wide[..., :count].movedim(-1, axis)


def _extent(x: Tensor, spec: QuantSpec) -> Tensor:
    """Length of the range of the last axis, with zero in it; half of it for symmetric grids."""
    if spec.has_zero_point:
        return x.amax(-1).clamp_min(0) - x.amin(-1).clamp_max(0)
    return x.abs().amax(-1)


# ------------------------------------------------------------------------------------------------ what is learned


@dataclass(frozen=True)
class _Scaling:
    """Factors of a group: ``log_s``, ``[channels]``, and the shift, where there is one."""

    group: Group
    log_s: Tensor
    shift: Tensor | None
    first: str  # the operator that names it

    def factors(self, repeat: int) -> Tensor:
        """One per input of a consumer, ``[channels * repeat]``."""
        return _spread(self.log_s.exp(), self.group, repeat)

    def shifts(self, repeat: int) -> Tensor | None:
        """As :meth:`factors`."""
        return None if self.shift is None else _spread(self.shift, self.group, repeat)

    def parameters(self) -> list[Tensor]:
        """What trains."""
        return [self.log_s] if self.shift is None else [self.log_s, self.shift]


@dataclass(frozen=True)
class _Balance:
    """Factors of an attention's keys and queries, ``[key heads, groups of channels]``; ``tie``: channel -> group."""

    heads: Attention
    log_s: Tensor
    tie: Array
    repeat: int
    first: str

    def factors(self) -> Tensor:
        """One per channel of each key head, ``[key heads, dim]``."""
        return self.log_s.exp()[:, torch.from_numpy(self.tie)]

    def parameters(self) -> list[Tensor]:
        """What trains."""
        return [self.log_s]


_Learned = _Scaling | _Balance


def _places(learned: Sequence[_Learned]) -> dict[str, tuple[_Learned, Layer | None, int]]:
    """Operator -> what stands in front of it: at layers, at the Adds of their biases, and at products of attention."""
    found: dict[str, tuple[_Learned, Layer | None, int]] = {}
    for item in learned:
        if isinstance(item, _Balance):
            found[item.heads.scores] = item, None, 1
            continue
        for layer, repeat in item.group.consumers:
            found[layer.op] = item, layer, repeat
            if layer.adder is not None and item.shift is not None:
                found[layer.adder] = item, layer, repeat
    return found


def _spread(values: Tensor, group: Group, repeat: int) -> Tensor:
    return values.reshape(-1, group.block).repeat_interleave(repeat, 0).reshape(-1)


@dataclass(frozen=True)
class LearnedScales(Tabular):
    """Result of :func:`learn_scales`.

    Attributes:
        blocks: first and last layer of every block -> the error of its outputs before and after, over their power.
        groups: whose channels have learned factors.
        attentions: whose keys and queries have.
        shifted: how many of the groups are shifted too.
        refused: groups without, with the reasons.
        judged: error of the model's outputs over their power, before and after; ``None`` where activations have calibrated
            ranges. Nothing is changed where the latter is larger.
    """

    _rows = "groups"

    blocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    attentions: tuple[Attention, ...] = ()
    shifted: int = 0
    refused: tuple[Refused, ...] = ()
    judged: tuple[float, float] | None = None

    @property
    def changed(self) -> bool:
        """Whether the model was changed."""
        return bool(self.groups or self.attentions)

    def __str__(self) -> str:
        keys = f" and the keys of {counted(len(self.attentions), 'attention')}" if self.attentions else ""
        lines = [
            f"{counted(len(self.groups), 'group')}{keys} scaled, {self.shifted} of them shifted, {len(self.refused)} left",
            *(
                f"  block  {name}: error of its outputs {a:.3g} -> {b:.3g} of their power"
                for name, (a, b) in self.blocks.items()
            ),
            *(f"  scaled {group}" for group in self.groups),
            *(f"  left   {refused}" for refused in self.refused),
        ]
        if self.judged is not None:
            kept = "" if self.changed else ", so that NOTHING is scaled"
            lines.insert(
                1, f"  error of the model's outputs {self.judged[0]:.3g} -> {self.judged[1]:.3g} of their power{kept}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Settings:
    """Options of :func:`learn_scales`.

    Attributes:
        iterations: of Adam, per block.
        batch: samples of an iteration.
        lr: of the logarithms of factors; shifts have it times the largest magnitude of what they shift.
        shift: learn shifts too, where biases can hold them.
    """

    iterations: int = 100
    batch: int = 8
    lr: float = 2e-2
    shift: bool = True

    def __post_init__(self) -> None:
        for name in ("iterations", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"it is {getattr(self, name)}", "give 1 or more")
        if not 0 < self.lr < math.inf:
            raise ConfigError("lr", f"it is {self.lr}", "give a positive number; 0.02 is the usual choice")


class _Learner:
    """The search, on a simulation as reconstruction sees it."""

    def __init__(self, sim: Correctable, model: SimulatedModel, settings: Settings, seed: int) -> None:
        self.sim, self.model, self.settings = sim, model, settings
        self.layers = Layers(sim.graph)
        self.weights: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)
        self.sites: dict[tuple[str, int], Site] = {
            (s.op, s.port): s for s in model.sites().values() if s.role != "output"
        }
        made = [s for s in model.sites().values() if s.role == "output" and s.enabled and s.spec is not None]
        self.coarse = {s.value for s in made if s.spec is not None and s.spec.format.bits < _FINE}
        self.coarse |= {
            value
            for value, group in model.shared().items()
            if group in {s.group for s in made if s.value in self.coarse}
        }

    # -- what can be scaled

    def candidates(self) -> tuple[list[Group], list[Refused]]:
        """Groups whose consumers are linear layers with a quantizer at their weight or input."""
        groups, starts = linear_groups(self.layers)
        found, refused = [], []
        for group in [*groups, *value_groups(self.layers)]:
            reason = self._why_not(group)
            if reason is None:
                found.append(group)
            else:
                refused.append(Refused(group.producers[0].op, reason))
        treated = {layer.op for group in found for layer in group.layers} | {line.op for line in refused}
        return found, [*(line for line in starts if line.op not in treated), *refused]

    def _why_not(self, group: Group) -> str | None:
        consumers = [layer for layer, _ in group.consumers]
        other = next((layer for layer in consumers if layer.type not in ("Gemm", "MatMul")), None)
        if other is not None:
            return f"{other.op} ({other.type}) reads it, and is not a linear layer"
        inputs = {str(self.sim.graph.op(layer.op).inputs[0]) for layer in consumers}
        if inputs & self.coarse:
            return f"its values are quantized to fewer than {_FINE} bits where they are made, before layers read them"
        quantized = any(self._site(layer.op, port) for layer in consumers for port in (0, 1))
        return None if quantized else "nothing that reads it is quantized"

    def _site(self, op: str, port: int) -> Site | None:
        site = self.sites.get((op, port))
        return site if site is not None and site.enabled and site.spec is not None else None

    def _can_shift(self, group: Group) -> bool:
        """Whether biases take up a shift: of the one producer, and of all that read it without anything between."""
        if not self.settings.shift or len(group.producers) != 1 or any(layer.bias is None for layer in group.layers):
            return False
        (producer,) = group.producers
        direct = all(self.sim.graph.op(layer.op).inputs[0] == producer.output for layer, _ in group.consumers)
        return direct if producer.kind == "norm" else group.block > 1

    def balances(self, ties: Mapping[str, Array]) -> list[_Balance]:
        """Attentions whose queries or keys are quantized."""
        found = []
        for heads in find_attention(self.layers):
            if heads.scores in ties:
                assert heads.query is not None and heads.key is not None
                count = heads.key.axes.outputs // heads.dim
                tie = ties[heads.scores]
                log_s = torch.zeros(count, int(tie.max()) + 1, requires_grad=True)
                repeat = heads.query.axes.outputs // heads.key.axes.outputs
                found.append(_Balance(heads, log_s, tie, repeat, heads.scores))
        return found

    def scored(self) -> list[Attention]:
        """Attentions with a quantizer in front of the product of queries and keys, and a layer behind each."""
        found = []
        for heads in find_attention(self.layers):
            query, key = heads.query, heads.key
            if query is None or key is None or query.op == key.op or query.axes.outputs % key.axes.outputs:
                continue
            if any(self._site(heads.scores, port) for port in (0, 1)) and not any(
                self.layers.why_not_private(layer) for layer in (query, key)
            ):
                found.append(heads)
        return found

    # -- one block

    def forward(
        self, program: Program, i: int, state: State, learned: Sequence[_Learned], *, quantized: bool = True
    ) -> Sequence[Tensor]:
        """Results of step ``i`` with what was learned in force."""
        step = program.steps[i]
        if not quantized:
            return run_step(step, state, program.constants)
        given = self._given(step, state, program.constants, learned)
        return run_step(step, state, program.constants, self.fresh, given)

    def fresh(self, site: str, x: Tensor) -> Tensor:
        """``x`` as the quantizer of ``site`` leaves it, with the calibrated range where it has one."""
        return self.model.quantize(site, x)

    def _given(
        self, step: Step, state: State, constants: Mapping[int, Tensor], learned: Sequence[_Learned]
    ) -> dict[int, Tensor]:
        def read(port: int) -> Tensor:
            value = step.reads[step.ports[port]]
            return state[value] if value in state else constants[value]

        item, layer, repeat = _places(learned).get(step.op, (None, None, 1))
        if isinstance(item, _Balance):
            return self._balanced(step, item, read(0), read(1))
        if item is None or layer is None:
            return {}
        if layer.op == step.op:
            return self._scaled(step, item, layer, repeat, read)
        port = self._port_of_bias(layer)
        return {step.ports[port]: read(port).detach() + self._made_up(item, layer, repeat)}

    def _port_of_bias(self, layer: Layer) -> int:
        """The port at which the Add behind a layer reads its bias."""
        values = self.sim.graph.values
        inputs = self.sim.graph.op(str(layer.adder)).inputs
        return next(i for i, v in enumerate(inputs) if v is not None and layer.bias in (values[v].param, v))

    def _made_up(self, item: _Scaling, layer: Layer, repeat: int) -> Tensor:
        """What the bias of a layer is given for the shift of its input, ``[outputs]``."""
        d = item.shifts(repeat)
        assert d is not None
        if layer.weight not in self.weights:
            self.weights[layer.weight] = torch.from_numpy(np.asarray(self.sim.param(layer.weight), np.float32)).to(
                d.device
            )
        W = self.weights[layer.weight]
        return W @ d if layer.axes.outputs_first else d @ W

    def _scaled(
        self, step: Step, item: _Scaling, layer: Layer, repeat: int, read: Callable[[int], Tensor]
    ) -> dict[int, Tensor]:
        s, d = item.factors(repeat), item.shifts(repeat)
        x, W = read(0), read(1).detach()
        first = layer.axes.outputs_first
        given = {
            step.ports[0]: self._through(layer.op, 0, (x if d is None else x - d) / s),
            step.ports[1]: self._through(layer.op, 1, W * s if first else W * s[:, None]),
        }
        if d is not None and layer.adder is None:
            given[step.ports[2]] = read(2).detach() + self._made_up(item, layer, repeat)
        return given

    def _balanced(self, step: Step, item: _Balance, q: Tensor, k: Tensor) -> dict[int, Tensor]:
        """Queries ``[..., heads, tokens, dim]`` times factors, and keys ``[..., heads, dim, tokens]`` divided by them."""
        s = item.factors()
        of_query = s.repeat_interleave(item.repeat, 0)
        of_key = of_query if k.shape[-3] == len(of_query) else s
        return {
            step.ports[0]: self._through(step.op, 0, q * of_query[:, None, :]),
            step.ports[1]: self._through(step.op, 1, k / of_key[:, :, None]),
        }

    def _through(self, op: str, port: int, x: Tensor) -> Tensor:
        site = self._site(op, port)
        if site is None or site.spec is None:
            return x
        spec = site.spec
        name = site.name

        def fake_quantize(values: Tensor) -> Tensor:
            if spec.dynamic:
                return self.model.quantize(name, values)
            return torch.from_numpy(on_grid(values.cpu().numpy(), spec, name)).to(values)

        return through(x, fake_quantize, spec)

    def learn(self, walk: Walk, unit: Unit, learned: Sequence[_Learned]) -> tuple[float, float]:
        """Learn the factors of a block in place; returns its error before and after over the power of its outputs."""
        runs = [(r, span) for r in walk.runs if (span := r.program.span(unit.ops)) is not None]
        with torch.no_grad():
            wanted = [self._outputs(r, span, r.real, learned, quantized=False) for r, span in runs]
        power = sum(float(y.float().square().sum()) for out in wanted for y in out) or 1.0

        def error(rows: Tensor | None = None, which: Sequence[int] | None = None) -> Tensor:
            total = torch.zeros(())
            for i in range(len(runs)) if which is None else which:
                r, span = runs[i]
                found = self._outputs(r, span, r.quantized, learned)
                total = total + sum(
                    (f.float() - y.float()).square().sum() for f, y in zip(found, wanted[i], strict=True)
                )
            return total / power

        with torch.no_grad():
            before = float(error())
            best, kept = before, _values(learned)
            self._smoothed(runs, learned)
            start = float(error())
            if start < best:
                best, kept = start, _values(learned)
            else:
                _restore(learned, kept)
        parameters = [
            {"params": [t], "lr": self.settings.lr * (1.0 if i == 0 else _span(item))}
            for item in learned
            for i, t in enumerate(item.parameters())
        ]
        optimiser = torch.optim.Adam(parameters)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.settings.iterations)
        for _ in range(self.settings.iterations):
            which = torch.randperm(len(runs), generator=self.generator)[: max(1, self.settings.batch // _rows(runs))]
            loss = error(which=which.tolist())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        with torch.no_grad():
            after = float(error())
            if not after < best:
                _restore(learned, kept)
                after = best
        return before, after

    def _outputs(
        self, r: Run, span: tuple[int, int], state: State, learned: Sequence[_Learned], *, quantized: bool = True
    ) -> list[Tensor]:
        """Values that later steps read, from the steps of a block."""
        held, program = dict(state), r.program
        for i in range(*span):
            results = self.forward(program, i, held, learned, quantized=quantized)
            held.update(zip(program.steps[i].writes, results, strict=True))
        end = program.last_read
        made = [v for i in range(*span) for v in program.steps[i].writes]
        return [held[v] for v in dict.fromkeys(made) if end.get(v, -1) >= span[1] or v in program.outputs]

    def leave(self, walk: Walk, unit: Unit, learned: Sequence[_Learned]) -> None:
        """Run the block in both streams, the quantized one with what was learned."""
        for r in walk.runs:
            span = r.program.span(unit.ops)
            if span is None:
                continue
            run(r.program, r.real, r.real_at, span[1], None, walk.store.keep)
            with torch.no_grad():
                for i in range(*span):
                    r.program.settle(r.quantized, i, self.forward(r.program, i, r.quantized, learned))
            r.real_at = r.quantized_at = span[1]

    @torch.no_grad()
    def _smoothed(self, runs: Sequence[tuple[Run, tuple[int, int]]], learned: Sequence[_Learned]) -> None:
        """Set the factors of groups to those of SmoothQuant, and shifts to the middle of each channel."""
        read = {layer.op for item in learned if isinstance(item, _Scaling) for layer, _ in item.group.consumers}
        lows: dict[str, Tensor] = {}
        highs: dict[str, Tensor] = {}
        for r, span in runs:
            for op, x in self._inputs(r, span, read):
                rows = x.detach().flatten(0, -2)
                low, high = rows.amin(0), rows.amax(0)
                lows[op] = torch.minimum(lows.get(op, low), low)
                highs[op] = torch.maximum(highs.get(op, high), high)
        for item in learned:
            if isinstance(item, _Scaling):
                self._smooth_group(item, lows, highs)

    def _inputs(self, r: Run, span: tuple[int, int], ops: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """What ``ops`` read in a float run of a block on the quantized stream."""
        held = dict(r.quantized)
        for step in r.program.steps[slice(*span)]:
            if step.op in ops:
                value = step.reads[step.ports[0]]
                yield step.op, held[value] if value in held else r.program.constants[value]
            held.update(zip(step.writes, run_step(step, held, r.program.constants), strict=True))

    def _smooth_group(self, item: _Scaling, lows: Mapping[str, Tensor], highs: Mapping[str, Tensor]) -> None:
        group = item.group
        layer, repeat = group.consumers[0]
        low, high = (group.gathered(ends[layer.op].cpu().numpy(), repeat) for ends in (lows, highs))
        low, high = low.min(axis=1), high.max(axis=1)
        if item.shift is not None:
            middle = (low + high) / 2
            item.shift.copy_(torch.from_numpy(middle).to(item.shift))
            low, high = low - middle, high - middle
        weights = [
            group.gathered(c.input_range(self.sim.param(c.weight)), times).max(axis=1) for c, times in group.consumers
        ]
        s = smoothing_factors(np.maximum(np.abs(low), np.abs(high)), np.max(weights, axis=0))
        item.log_s.copy_(torch.from_numpy(np.log(s)).to(item.log_s))


def _rows(runs: Sequence[tuple[Run, tuple[int, int]]]) -> int:
    """Samples of a batch."""
    sizes = [int(t.shape[0]) for t in runs[0][0].quantized.values() if isinstance(t, Tensor) and t.dim()]
    return max(1, max(sizes, default=1))


def _span(item: _Learned) -> float:
    held = item.shift if isinstance(item, _Scaling) else None
    return 1.0 if held is None else max(1e-3, float(held.detach().abs().max()))


def _values(learned: Sequence[_Learned]) -> list[Tensor]:
    return [t.detach().clone() for item in learned for t in item.parameters()]


@torch.no_grad()
def _restore(learned: Sequence[_Learned], values: Sequence[Tensor]) -> None:
    for t, value in zip((t for item in learned for t in item.parameters()), values, strict=True):
        t.copy_(value)


# ------------------------------------------------------------------------------------------------ on a simulation


def learn(
    sim: Correctable, model: Callable[[], SimulatedModel], batches: Sequence[Any], settings: Settings, *,
    seed: int = 0, progress: Callable[[Sequence[Any]], Iterable[Any]] = lambda items: items,
) -> LearnedScales:  # fmt: skip
    """Learn factors and shifts and merge them into the parameters; see :func:`bitwright.torch.learn_scales`.

    Args:
        model: makes the simulation as reconstruction sees it, anew after parameters changed.
    """
    if not batches:
        raise CalibrationError("learn_scales", "the data held no batch", "give about 128 samples")
    stepped = model()
    learner = _Learner(sim, stepped, settings, seed)
    groups, refused = learner.candidates()
    check = _check(lambda: _outputs(model(), batches[0]))
    ties = _ties(sim, learner.scored(), check)
    items: list[_Learned] = [_scaling(group, learner._can_shift(group)) for group in groups]
    items += learner.balances(ties)
    walk = Walk(stepped, batches, Store())
    blocks: dict[str, tuple[float, float]] = {}
    done: list[_Learned] = []
    for unit in progress(block_units(sim.graph, _linear_ops(learner.layers), most=64)):
        inside = set(unit.ops)
        mine = [item for item in items if _ops(item) <= inside]
        walk.advance(unit.ops)
        if mine:
            blocks[unit.name] = learner.learn(walk, unit, mine)
            done += mine
        learner.leave(walk, unit, mine)
    kept, rejected = sift(done, lambda some: _merge(sim, some), check)
    judged = _put(sim, model, kept, batches)
    if judged is not None and not judged[1] <= judged[0]:
        rejected, kept = [*rejected, *((item, "the outputs of the model would lose") for item in kept)], []
    left = [Refused(item.first, "the layers that read it are in several blocks") for item in items if item not in done]
    report = _report(
        blocks, kept, [*refused, *left, *(Refused(item.first, reason) for item, reason in rejected)], judged
    )
    log_refused(report.refused, "scaled", changed=report.changed, without=", as nothing that layers share is quantized")
    return report


def _put(
    sim: Correctable, model: Callable[[], SimulatedModel], kept: Sequence[_Learned], batches: Sequence[Any]
) -> tuple[float, float] | None:
    """Merge what was learned, unless the outputs of the model lose; returns their error before and after."""
    stepped = model()
    judge = _judge(stepped, batches) if kept else None
    before = None if judge is None else judge(stepped)
    undo = _merge(sim, kept)
    _choose_ranges(stepped, kept)
    if judge is None or before is None:
        return None
    after = judge(model())
    if not after <= before:
        undo()
        _choose_ranges(stepped, kept)
    return before, after


def _report(
    blocks: Mapping[str, tuple[float, float]], kept: Sequence[_Learned], refused: Sequence[Refused],
    judged: tuple[float, float] | None,
) -> LearnedScales:  # fmt: skip
    scalings = [item for item in kept if isinstance(item, _Scaling)]
    attentions = tuple(item.heads for item in kept if isinstance(item, _Balance))
    shifted = sum(item.shift is not None for item in scalings)
    return LearnedScales(blocks, tuple(item.group for item in scalings), attentions, shifted, tuple(refused), judged)


def _linear_ops(layers: Layers) -> list[str]:
    return [op for op, layer in layers.of.items() if layer.kind == "layer"]


def _ops(item: _Learned) -> set[str]:
    return {item.heads.scores} if isinstance(item, _Balance) else {layer.op for layer, _ in item.group.consumers}


def _scaling(group: Group, shift: bool) -> _Scaling:
    log_s = torch.zeros(group.channels, requires_grad=True)
    return _Scaling(
        group, log_s, torch.zeros(group.channels, requires_grad=True) if shift else None, group.producers[0].op
    )


@torch.no_grad()
def _outputs(model: SimulatedModel, batch: Any, quantize: Quantize | None = None) -> list[Array]:
    """Outputs of the model, in float unless there are quantizers."""
    program, state = model.program(batch)
    held = dict(state)
    for i, step in enumerate(program.steps):
        program.settle(held, i, run_step(step, held, program.constants, quantize), program.outputs)
    return [held[v].float().cpu().numpy() for v in program.outputs if v in held]


def _judge(model: SimulatedModel, batches: Sequence[Any]) -> Callable[[SimulatedModel], float] | None:
    """The error of a simulation's outputs over their power; ``None`` where ranges of activations must be found anew first."""
    ends = [site for site in model.sites().values() if site.enabled and site.role in ("input", "output")]
    if any(site.spec is not None and not site.spec.dynamic for site in ends):
        return None
    wanted = [_outputs(model, batch) for batch in batches]
    power = sum(float(np.square(y, dtype=np.float64).sum()) for out in wanted for y in out) or 1.0

    def error(now: SimulatedModel) -> float:
        found = (_outputs(now, batch, now.quantize) for batch in batches)
        pairs = (pair for out, want in zip(found, wanted, strict=True) for pair in zip(out, want, strict=True))
        return sum(float(np.square(f - y, dtype=np.float64).sum()) for f, y in pairs) / power

    return error


def _check(outputs: Callable[[], list[Array]]) -> Callable[[], str | None]:
    first = outputs()

    def check() -> str | None:
        for before, after in zip(first, outputs(), strict=True):
            away = float(np.abs(after - before).max())
            if not away <= 1e-3 * max(float(np.abs(before).max()), 1e-30):
                return f"an output of the model is {away:.2g} away"
        return None

    return check


def _ties(sim: Correctable, open_heads: list[Attention], check: Callable[[], str | None]) -> dict[str, Array]:
    """Attention -> which channels of a head share a factor, the finest that keeps the function."""
    found: dict[str, Array] = {}
    random = np.random.default_rng(0)
    for of_dim in TIES.values():
        if not open_heads:
            break
        tried = []
        for heads in open_heads:
            tie = of_dim(heads.dim)
            assert heads.query is not None and heads.key is not None
            count = heads.key.axes.outputs // heads.dim
            log_s = torch.from_numpy(random.uniform(-0.5, 0.5, (count, int(tie.max()) + 1)).astype(np.float32))
            tried.append(_Balance(heads, log_s, tie, heads.query.axes.outputs // heads.key.axes.outputs, heads.scores))
        if not sift(tried[:1], lambda some: _merge(sim, some), check)[0]:
            continue
        good, _ = sift(tried, lambda some: _merge(sim, some), check)
        found.update({item.heads.scores: item.tie for item in good})
        open_heads = [heads for heads in open_heads if heads.scores not in found]
    return found


@torch.no_grad()
def _merge(sim: Correctable, items: Sequence[_Learned]) -> Undo:
    """Put what was learned into parameters; the function returned takes it back."""
    values: dict[str, Array] = {}
    first: dict[str, Array] = {}

    def now(name: str) -> Array:
        if name not in values:
            first[name] = values[name] = np.asarray(sim.param(name))
        return np.asarray(values[name], np.float64)

    for item in items:
        edit = _merge_balance if isinstance(item, _Balance) else _merge_scaling
        edit(item, now, values)  # type: ignore[arg-type]
    for name, value in values.items():
        sim.set_param(name, np.asarray(value, np.float32).reshape(first[name].shape))

    def undo() -> None:
        for name, value in first.items():
            sim.set_param(name, value)

    return undo


def _merge_scaling(item: _Scaling, now: Callable[[str], Array], values: dict[str, Array]) -> None:
    group, s = item.group, item.log_s.detach().double().exp().numpy()
    d = None if item.shift is None else item.shift.detach().double().numpy()
    for layer, repeat in group.consumers:
        W = now(layer.weight)
        if d is not None:
            assert layer.bias is not None
            wide = group.spread(d, repeat)
            values[layer.bias] = now(layer.bias) + (W @ wide if layer.axes.outputs_first else wide @ W)
        values[layer.weight] = layer.times_inputs(W, group.spread(s, repeat))
    for layer in group.producers:
        values[layer.weight] = layer.times_outputs(now(layer.weight), 1 / s)
        if layer.bias is not None:
            b = now(layer.bias)
            values[layer.bias] = ((b.reshape(-1) - (0.0 if d is None else d)) / s).reshape(b.shape)


def _merge_balance(item: _Balance, now: Callable[[str], Array], values: dict[str, Array]) -> None:
    query, key = item.heads.query, item.heads.key
    assert query is not None and key is not None
    s = item.factors().detach().double().numpy()
    for layer, factor in ((key, 1 / s.reshape(-1)), (query, np.repeat(s, item.repeat, 0).reshape(-1))):
        values[layer.weight] = layer.times_outputs(now(layer.weight), factor)
        if layer.bias is not None:
            b = now(layer.bias)
            values[layer.bias] = (b.reshape(-1) * factor).reshape(b.shape)


def _choose_ranges(model: SimulatedModel, items: Sequence[_Learned]) -> None:
    """Choose the ranges of the changed weights anew."""
    ops = {layer.op for item in items if isinstance(item, _Scaling) for layer in item.group.layers}
    ops |= {layer.op for item in items if isinstance(item, _Balance) for layer in item.heads.scored}
    for name, site in model.sites().items():
        if site.op in ops and site.role == "weight" and site.enabled and not site.quantizer.frozen:
            site.quantizer.encoding = None
            site.quantizer.observe_once(model.weight(name))
