"""Quantize a language model: a folder tensor by tensor or block by block, or a module in memory."""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.granularity import PerBlock, PerChannel, permuted
from bitwright.core.numerics.spec import Preset, QuantSpec, find_preset, weight_spec
from bitwright.core.placement.config import make_rules
from bitwright.core.placement.rules import Rule, Rules
from bitwright.errors import ConfigError, checks_arguments, close_matches
from bitwright.llm.blocks import Block, Runner, Spill, States, fingerprint, of_checkpoint, view_by_blocks
from bitwright.llm.checkpoint import Checkpoint, assign, check_room, mapped, open_checkpoint
from bitwright.llm.files.common import Extras, tokenizer_files
from bitwright.llm.files.table import FILE_FORMATS, check_checkpoint, write_checkpoint
from bitwright.llm.likelihood import Perplexity, Sums, split_tokens, text_tokens
from bitwright.llm.packed import FloatWeight, PackedWeight, Weight, WeightPlan, planned, stored_buffers
from bitwright.llm.roles import QUANTIZED, Part, Transformer, refuse_unused
from bitwright.llm.simulated import GRAPHS, check_graph, check_kind, simulation_of, write_graph
from bitwright.methods.rounding.table import METHODS
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular
from bitwright.torch.adapters import adapter_layers

logger = logging.getLogger("bitwright")

RECIPES = ("nearest", "awq", *METHODS)
_ACTIVATIONS = 256 << 20  # bytes of activations within a block that are held in memory
_AT_ONCE = 1 << 18  # numbers that are rounded at once
_TOGETHER = 8  # samples that a block is run on at once


@dataclass(frozen=True)
class Row:
    """A quantized parameter: its role and its storage format."""

    name: str
    role: str
    stored: str


@dataclass(frozen=True)
class Quantized(Tabular):
    """Result of :func:`quantize`.

    Attributes:
        rows: the quantized parameters.
        view: roles of all parameters.
        before, after: perplexity of the float and of the quantized model on text that no method saw; ``None`` without data.
        float_bytes, bytes: of all weights before and after.
        seconds: by stage.
        peak: largest resident memory of the process, bytes.
        folder: where the files are; ``None`` where none were asked for.
        model: the module with codes in the places of its weights, where a module was given; else ``None``.
        notes: what methods said of blocks.
    """

    _rows = "rows"

    rows: tuple[Row, ...]
    view: Transformer = field(repr=False)
    before: Perplexity | None
    after: Perplexity | None
    float_bytes: int
    bytes: int
    seconds: Mapping[str, float]
    peak: int
    folder: Path | None = None
    model: Any = field(default=None, repr=False)
    weights: tuple[Weight, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """Bits of an element on average, scales and float parameters included."""
        count = sum(part_elements(part) for part in self.view.parts)
        return 8 * self.bytes / max(1, count)

    def to_dict(self) -> dict[str, Any]:
        """Without the model and the weights."""
        found = super(Quantized, replace(self, model=None, weights=())).to_dict()
        return {key: value for key, value in found.items() if key not in ("model", "weights")}

    def __str__(self) -> str:
        lines = []
        if self.before is not None and self.after is not None:
            change = 100 * (self.after.value / self.before.value - 1)
            lines.append(f"perplexity {self.before.value:.4f} -> {self.after.value:.4f} ({change:+.2f} %)")
            lines.append(f"  float      {self.before}")
            lines.append(f"  quantized  {self.after}")
        size = f"{self.float_bytes / 1e6:.1f} MB -> {self.bytes / 1e6:.1f} MB"
        lines.append(f"{size}, {self.bits_per_weight:.2f} bits per weight; {len(self.rows)} parameters quantized")
        took = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in self.seconds.items())
        lines.append(f"time {sum(self.seconds.values()):.1f} s ({took}), peak memory {self.peak / 2**30:.2f} GiB")
        if self.folder is not None:
            lines.append(f"written to {self.folder}")
        lines += [
            f"  not recognised, quantized or left by shape: {part.name} ({part.why})"
            for part in self.view.unrecognised[:5]
        ]
        return "\n".join(lines)


def part_elements(part: Part) -> int:
    """Number of elements of a parameter."""
    count = 1
    for size in part.shape:
        count *= size
    return count


# ------------------------------------------------------------------------------------------ what is asked for


def spec_of(preset: str | Preset | QuantSpec, group_size: int | None = None) -> QuantSpec:
    """The spec of weights that a preset means.

    Args:
        preset: a name of the table of presets (``w4g32``, ``nvfp4``, ...), ``w<bits>``, ``w<bits>g<group>`` with or without
            ``_asym``, or a spec.
        group_size: another one than that of the preset; 0 for one scale per channel.

    Raises:
        ConfigError: there is no such preset, or it leaves weights in float.

    Example:
        >>> spec_of("w4g128").describe()
        'int4 symmetric per block of 128, minmax'
    """
    spec = preset if isinstance(preset, QuantSpec) else find_preset(preset).weight
    if spec is None:
        raise ConfigError(
            f"preset {preset!r}", "it leaves weights in float", "use w4g128, w8 or another preset of weights"
        )
    if group_size is not None:
        spec = replace(spec, granularity=PerBlock(group_size) if group_size else PerChannel())
    return spec


Rulings = Mapping[str, "str | Preset | QuantSpec | None"]


def specs_of(
    view: Transformer, spec: QuantSpec, rules: Rulings | None, embedding: Any = None, lm_head: Any = None,
    *, adapters: Iterable[str] = (),
) -> dict[str, QuantSpec]:  # fmt: skip
    """Parameter -> its spec; without those that stay in float.

    Args:
        view: of the model.
        spec: of the matrices of blocks.
        rules: pattern (``role:down``, or a glob of names) -> preset, spec, or ``None`` for float; later ones win.
        embedding, lm_head: presets of the table of tokens and of the output layer.
        adapters: names of layers with adapters of PEFT, which stay in float where no rule names them.

    Raises:
        ConfigError: a pattern that means no parameter.
        GranularityError: groups that do not divide a row; names those that would.
    """
    refuse_unused(rules or {}, view)
    asked: dict[str, QuantSpec | None] = dict.fromkeys(_matrices_of_blocks(view, adapters), spec)
    ends = {"embedding": embedding, "lm_head": lm_head}
    given = {f"role:{role}": preset for role, preset in ends.items() if preset is not None and view.of(role)}
    for pattern, preset in (*given.items(), *(rules or {}).items()):
        asked.update((part.name, _ruled(preset)) for part in view.matching(pattern) if len(part.shape) >= 2)
    shapes = {part.name: part for part in view.parts}
    found = {name: _resolved(wanted, shapes[name]) for name, wanted in asked.items() if wanted is not None}
    for name, wanted in found.items():
        wanted.granularity.param_shape(shapes[name].shape, name)
    return found


def _matrices_of_blocks(view: Transformer, adapters: Iterable[str]) -> Iterator[str]:
    """Yield the names of matrices that are quantized unless a rule says otherwise."""
    beside = tuple(f"{name}.lora_" for name in adapters)
    for part in view.parts:
        if (
            part.role in QUANTIZED
            and len(part.shape) >= 2
            and part.axis is not None
            and not part.name.startswith(beside)
        ):
            yield part.name


def _fitted(specs: dict[str, QuantSpec], to: str | None) -> dict[str, QuantSpec]:
    """Specs as files of a kind hold them."""
    if to is None or to not in FILE_FORMATS:
        return specs
    return {name: FILE_FORMATS[to].fitted(asked) for name, asked in specs.items()}


def _ruled(preset: str | Preset | QuantSpec | None) -> QuantSpec | None:
    return None if preset is None else spec_of(preset)


def _resolved(spec: QuantSpec, part: Part) -> QuantSpec:
    """Axes filled in: blocks lie along the axis that the product sums over."""
    rank = len(part.shape)
    summed = (rank - 1 if part.axis is None else part.axis) % rank
    channels = tuple(axis for axis in range(rank) if axis != summed)
    held = spec.granularity
    if isinstance(held, PerBlock):
        return replace(spec, granularity=held.resolve(channels if len(channels) > 1 else channels[0], summed))
    return replace(spec, granularity=held.resolve(channels[-1], summed))


def methods_of(recipe: str | Iterable[str] | None) -> tuple[str, ...]:
    """The methods of a recipe, ``awq,gptq`` or a list, without ``nearest``.

    Raises:
        ConfigError: there is no such method.
    """
    names = recipe.split(",") if isinstance(recipe, str) else list(recipe or ())
    names = [name.strip() for name in names if name.strip()]
    for name in names:
        if name not in RECIPES:
            raise ConfigError(
                "recipe", f"there is no method {name!r} for language models{close_matches(name, RECIPES)}",
                f"use {', '.join(RECIPES)}, or several: awq,gptq",
            )  # fmt: skip
    return tuple(name for name in names if name != "nearest")


# ------------------------------------------------------------------------------------------ the model, from either place


@dataclass(frozen=True)
class _Source:
    """Source of the weights, and of the buffers that files hold: a folder or a module."""

    runner: Runner
    raw: Callable[..., Tensor]
    buffers: tuple[str, ...]
    nbytes: int
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None
    module: nn.Module | None
    identity: Callable[[], str]

    def plans(self, view: Transformer, specs: Mapping[str, QuantSpec]) -> list[WeightPlan]:
        """The plans of all parameters and buffers."""
        plans = [planned(part.name, part.shape, specs.get(part.name)) for part in view.parts]
        return plans + [planned(name, self.raw(name).shape, None) for name in self.buffers]


def _of_folder(checkpoint: Checkpoint) -> _Source:
    stamps = sorted(
        (e.file.name, e.file.stat().st_size, e.file.stat().st_mtime_ns) for e in checkpoint.entries.values()
    )
    described = fingerprint(sorted(set(stamps)), json.dumps(dict(checkpoint.config), sort_keys=True))

    def raw(name: str, rows: slice | None = None) -> Tensor:
        return checkpoint.read(name, rows=rows)

    runner = of_checkpoint(checkpoint)
    return _Source(
        runner,
        raw,
        _buffers_of(runner.model),
        checkpoint.nbytes,
        checkpoint.config,
        checkpoint,
        None,
        lambda: described,
    )


def _buffers_of(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in stored_buffers(model))


def _of_module(model: nn.Module, checkpoint: Checkpoint | None = None) -> _Source:
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    tied = {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}
    empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    buffers = {id(b): b for b in model.buffers()}
    skeleton = copy.deepcopy(model, {**empty, **buffers}).eval()

    def read(name: str) -> Tensor:
        return model.get_parameter(name).detach().to("cpu", torch.float32)

    def raw(
        name: str, rows: slice | None = None
    ) -> Tensor:  # asks the model each time, so that what it lets go of is freed
        held = model.get_buffer(name) if name in of_buffers else model.get_parameter(name).detach()
        return (held if rows is None else held[rows]).cpu()

    of_buffers = _buffers_of(model)
    config = getattr(model, "config", None)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())

    def identity() -> str:
        return fingerprint(*(float(p.detach().double().sum()) for p in model.parameters()))

    return _Source(
        Runner(skeleton, read, tied), raw, of_buffers, nbytes, {} if config is None else config.to_dict(),
        checkpoint, model, identity,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ one block


class _Inputs(Sequence[Tensor]):
    """States of samples, several at a time, read when they are asked for."""

    def __init__(self, states: States, samples: Sequence[int], together: int) -> None:
        self._states = states
        self._parts = [samples[i : i + together] for i in range(0, len(samples), together)]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return torch.cat([self._states.read(sample) for sample in self._parts[index]])


@torch.no_grad()
def _takes_batches(block: Block, one: Tensor, other: Tensor) -> bool:
    """Whether a batch of two gives the results of two single runs: the recorded arguments are for one sample."""
    alone = torch.cat([block(one), block(other)])
    try:
        both = block(torch.cat([one, other]))
    except RuntimeError:
        return False
    return both.shape == alone.shape and bool(torch.allclose(both, alone, rtol=1e-3, atol=1e-5))


def treat(
    block: Block, inputs: Sequence[Tensor], specs: Mapping[str, QuantSpec], methods: Sequence[str], *, seed: int = 0,
    spill_dir: Path | None = None, options: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[dict[str, PackedWeight | Tensor], list[str]]:  # fmt: skip
    """Quantize the weights of one block by methods, in their order.

    Args:
        block: with its weights, which are changed.
        inputs: hidden states, ``[N, T, D]`` each.
        specs: parameter of the block -> what it is quantized to.
        methods: rows of :data:`RECIPES`.
        seed: of the methods that draw rows.
        spill_dir: of activations.
        options: method -> its options.

    Returns:
        Every parameter by its name in the block, and what the methods say.
    """
    notes: list[str] = []
    options = options or {}
    rounding = [name for name in methods if name != "awq"]
    if "awq" in methods:
        from bitwright.methods.scaling.awq import awq_model

        own = dict(options.get("awq", {}))
        rules = _rules(block.block, specs)
        report = awq_model(block, inputs, config_file=rules, progress=False, memory_budget=_ACTIVATIONS, **own)
        notes.append(f"awq: output error x {report.gain:.3f}")
        del report
    encodings: dict[str, Any] = {}
    chosen: dict[str, Tensor] = {}
    if rounding and specs:
        given = {name: options.get(name, {}) for name in rounding}
        chosen, encodings, said = _reconstructed(block, inputs, specs, given, seed=seed, spill_dir=spill_dir)
        notes += said
    made: dict[str, PackedWeight | Tensor] = {}
    for name, parameter in block.block.named_parameters():
        values = chosen.get(f"block.{name}", parameter).detach()
        if name not in specs:
            made[name] = values
        elif f"block.{name}" in encodings:
            made[name] = PackedWeight.encoded(name, values, encodings[f"block.{name}"])
        else:
            made[name] = PackedWeight.nearest(name, values, specs[name])
    return made, notes


def _reconstructed(
    block: Block, inputs: Sequence[Tensor], specs: Mapping[str, QuantSpec],
    methods: Mapping[str, Mapping[str, Any]], *, seed: int, spill_dir: Path | None,
) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:  # fmt: skip
    """Parameters and encodings chosen by methods of rounding, each with its options, and the methods' notes."""
    from bitwright.methods.rounding.apply import apply_reconstruction
    from bitwright.torch.simulation.quantsim import QuantizationSimModel

    notes = []
    sim = QuantizationSimModel(block, inputs[0], preset=Preset(next(iter(specs.values())), None))
    parts = _give_specs(sim, {f"block.{name}": spec for name, spec in specs.items()})
    for name, own in methods.items():
        found = apply_reconstruction(
            sim, inputs, name, progress=False, seed=seed, memory_budget=_ACTIVATIONS, spill_dir=spill_dir, **own
        )
        notes.append(f"{name}: output error x {found.gain:.3f}")
    encodings = {}
    for site, (part, axes) in parts.items():
        encoding = sim.quantizers[site].quantizer.encoding
        if encoding is not None:  # a layer that a method left has none yet
            encodings[part] = encoding.permuted(tuple(axes.index(axis) for axis in range(len(axes))))
    return dict(sim.model.named_parameters()), encodings, notes


def _give_specs(sim: Any, specs: Mapping[str, QuantSpec]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Give weights the specs of their parameters, turned where a block reads them turned, as in ``x @ w.T``; others are in float.

    Returns:
        Site -> its parameter, and which of its axes each axis of the weight is.
    """
    reads, found = sim._read_parameters(sim.quantizers), {}
    for name, site in sim.quantizers.items():
        part, axes = reads.get(name, ("", ()))
        site.enabled = site.role == "weight" and part in specs
        if site.enabled:
            site.quantizer.spec = replace(specs[part], granularity=permuted(specs[part].granularity, axes))
            found[name] = part, axes
    if any(sim.graph.values[sim.quantizers[name].value].param is None for name in found):
        sim.compute_encodings(progress=False)
    return found


def _rules(block: nn.Module, specs: Mapping[str, QuantSpec]) -> Rules:
    """Rules of a simulation of :class:`Block` that quantizes these weights and nothing else."""
    first = next(iter(specs.values()), weight_spec("int8"))
    rules = []
    for name, parameter in block.named_parameters():
        spec = specs.get(name)
        if spec is None and parameter.dim() > 1:
            rules.append(Rule(f"block.{name}", port="param", quantized=False))
        elif spec is not None:
            rules.append(
                Rule(
                    f"block.{name}", port="weight", quantized=True, format=spec.format, granularity=spec.granularity,
                    symmetry=spec.symmetry, method=spec.method, scale_format=spec.scale_format,
                )
            )  # fmt: skip
    return make_rules(None, Preset(first, None)).extended(rules)


# ------------------------------------------------------------------------------------------ the call


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what is done inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@checks_arguments
def quantize(
    model: Any,
    preset: str | Preset | QuantSpec = "w4g128",
    *,
    recipe: Any = (),
    data: Any = None,
    to: str | None = None,
    out: Any = None,
    group_size: int | None = None,
    rules: Any = None,
    embedding: Any = None,
    lm_head: Any = None,
    context: int = 512,
    samples: int = 128,
    options: Any = None,
    in_place: bool = False,
    work_dir: Any = None,
    seed: int = 0,
    progress: bool = True,
) -> Quantized:
    """Quantize the weights of a language model and write the files that engines load.

    A folder is read tensor by tensor. Methods that need data work block by block: one block's weights are in memory, hidden
    states and finished blocks lie in ``work_dir``, and a run that was ended goes on at the block where it was.

    Args:
        model: a local folder in the layout of ``transformers``, or a module.
        preset: of the matrices of blocks: ``w4g128``, ``w4g32_asym``, ``nvfp4``, ... (see :func:`spec_of`).
        recipe: methods before nearest rounding: ``"awq,gptq"`` or a list of ``awq``, ``gptq``, ``seq_mse`` and the others of
            :func:`bitwright.torch.apply_reconstruction`. None rounds to nearest and needs no data.
        data: text (a string), the path of a text file, or tokens ``[T]``. The last tenth is held out for the perplexity.
        to: kind of files, a row of ``bitwright.llm.FILE_FORMATS``, or ``genai``, ``onnx`` or ``openvino``, for which the
            codes of all blocks are held in memory; with ``out``.
        out: folder of the files.
        group_size: in place of the preset's; 0 for one scale per channel.
        rules: pattern -> preset or ``None`` for float; a pattern is ``role:down`` or a glob of names. Later ones win.
        embedding, lm_head: presets of the table of tokens and the output layer, which stay in float by default.
        context: tokens of a row of data.
        samples: rows for the methods at most, and rows held out at most.
        options: method -> its options, ``{"gptq": {"damping": 0.05}}``.
        in_place: of a module: change it, instead of a copy.
        work_dir: of hidden states and finished blocks; a temporary folder by default, which a later run does not find.
        seed: of methods that draw.
        progress: show progress bars on a terminal.

    Returns:
        The result first: perplexity before and after, bytes per weight, time, memory. Of a module ``result.model`` computes
        with the codes.

    Raises:
        ConfigError: an unknown preset, method, rule or kind of files; a method without data; ``to`` without ``out``.
        GranularityError: groups that do not divide a row.
        ModelError: see :func:`bitwright.llm.open_checkpoint`; or blocks cannot be treated one by one.
        ExportError: the files cannot hold the model.
    """
    spec = spec_of(preset, group_size)
    methods = methods_of(recipe)
    _check_together(methods, data, to, out)
    clock = _Clock()
    with clock.stage("open"), torch.no_grad():
        source = _opened(model, tokenizer=isinstance(data, (str, os.PathLike)) or to is not None)
        view = view_by_blocks(source.runner)
        adapters = () if source.module is None else adapter_layers(source.module)
        specs = _fitted(specs_of(view, spec, rules, embedding, lm_head, adapters=adapters), to)
        plans = source.plans(view, specs)
        if to is not None:
            _check(source, plans, to, out)
        rows = _rows_of(source, data, context, samples)
    with _folder(work_dir) as folder, torch.no_grad():
        before = after = None
        notes: list[str] = []
        spill = None
        if rows is not None:
            key = fingerprint(
                source.identity(),
                sorted((k, repr(v)) for k, v in specs.items()),
                methods,
                options,
                seed,
                *rows[0],
                *rows[1],
            )
            _check_spill(folder, source, rows, context)
            spill = Spill(folder, key)
            before, after, notes = _walk(
                source.runner, spill, rows, specs, methods, options=options, seed=seed, clock=clock, progress=progress
            )
        made = _weights(source, view, specs, spill, buffers=to in FILE_FORMATS or (to, source.module) == (None, None))
        kept: list[Weight] = []
        result_model = None
        total = _Bytes()
        with clock.stage("quantize" if to is None else "write"):
            if to is not None:
                _write(source, total.over(made), plans, spec, to, Path(out), progress=progress)
            elif source.module is not None:
                result_model = _into_module(source.module, total.over(made), in_place=in_place)
            else:
                kept = list(total.over(made))
        if spill is not None:
            spill.clear()
    found = tuple(Row(part.name, part.role, specs[part.name].describe()) for part in view.parts if part.name in specs)
    return Quantized(
        found, view, before, after, source.nbytes, total.bytes, dict(clock.seconds), _peak(), None if out is None else Path(out),
        result_model, tuple(kept), tuple(notes),
    )  # fmt: skip


def _check_together(methods: Sequence[str], data: Any, to: str | None, out: Any) -> None:
    """Refuse an argument without the one that goes with it."""
    if methods and data is None:
        raise ConfigError(
            "data", f"{methods[0]} chooses codes by what the layers read, and no data was given",
            "give data='text.txt' (--data), some 100 KB of text like the model will see; or recipe=() for nearest rounding",
        )  # fmt: skip
    if (to is None) != (out is None):
        raise ConfigError(
            "to", "to and out go together", "give the kind of files and the folder: to='gguf', out='model-w4'"
        )


def _opened(model: Any, *, tokenizer: bool) -> _Source:
    if isinstance(model, nn.Module):
        return _of_module(model)
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model, tokenizer=tokenizer)
    if checkpoint.is_streamed:
        return _of_folder(checkpoint)
    logger.info("%s: transformers converts its tensors, so that the model is loaded as a whole", checkpoint.folder)
    return _of_module(checkpoint.load(), checkpoint)


def _tokenizer_files(source: _Source) -> list[Path]:
    return [] if source.checkpoint is None else tokenizer_files(source.checkpoint.folder)


def _check(source: _Source, plans: Sequence[WeightPlan], to: str, out: Any) -> None:
    """Refuse files that cannot be written, before any work."""
    if to in GRAPHS:
        check_graph(to, out, sum(plan.elements for plan in plans))
        return
    check_kind(to)
    extras = Extras(dict(source.config), _tokenizer_files(source))
    check_checkpoint(out, plans, to=to, extras=extras)


def _write(
    source: _Source, weights: Iterator[Weight], plans: Sequence[WeightPlan], spec: QuantSpec, to: str, out: Path,
    *, progress: bool,
) -> None:  # fmt: skip
    if to in GRAPHS:
        _write_graph(source, weights, to, out)
    else:
        shown = progress_bar(_Counted(weights, len(plans)), "writing", progress)
        write_checkpoint(out, shown, source.config, to=to, plans=plans, tokenizer=_tokenizer_files(source))


def _write_graph(source: _Source, weights: Iterable[Weight], to: str, out: Path) -> None:
    """Write the files of a simulation of the whole model that has these codes.

    Numbers of codes lie in files that the model's parameters are mapped from: as the tensors of the folder, they count as memory
    only until the system needs the pages.
    """
    if source.module is not None:
        model = copy.deepcopy(source.module).eval()
    else:
        assert source.checkpoint is not None
        model = source.checkpoint.load()
    found: dict[str, Encoding] = {}
    with tempfile.TemporaryDirectory(prefix="bitwright-", ignore_cleanup_errors=True) as room:
        for weight in weights:
            held = model.get_parameter(weight.name)
            if isinstance(weight, PackedWeight):
                values = torch.from_numpy(weight.dequantize()).to(held)
                held.data = mapped(values, Path(room, str(len(found)))) if values.device.type == "cpu" else values
                found[weight.name] = weight.encoding
            elif not torch.equal(held, values := weight.values.to(held)):  # a method changed it
                held.data = values
        tokenizer = None if source.checkpoint is None else source.checkpoint.folder
        write_graph(simulation_of(model, found), to, out, tokenizer)


def _check_spill(folder: Path, source: _Source, rows: Any, context: int) -> None:
    width = next(source.runner.enter([rows[0][0]])).shape[-1]
    states = 4 * context * width * (2 * len(rows[0]) + 4 * len(rows[1]))
    check_room(folder, source.nbytes + states, "working block by block")


def _rows_of(source: _Source, data: Any, context: int, samples: int) -> tuple[list[Tensor], list[Tensor]] | None:
    if data is None:
        return None
    if isinstance(data, os.PathLike) or (isinstance(data, str) and len(data) < 4096 and os.path.isfile(data)):
        data = Path(data).read_text(encoding="utf-8")
    if isinstance(data, str):
        if source.checkpoint is None:
            raise ConfigError(
                "data", "it is text, and a module has no tokenizer", "give tokens: tokenizer(text)['input_ids']"
            )
        data = text_tokens(source.checkpoint.tokenizer, data)
    tokens = torch.as_tensor(data, dtype=torch.int64).reshape(-1)
    most = next(
        (source.config[key] for key in ("max_position_embeddings", "n_positions") if source.config.get(key)), context
    )
    length = min(context, int(most))
    return split_tokens(tokens, length, most=samples)


@contextmanager
def _folder(work_dir: Any) -> Iterator[Path]:
    if work_dir is not None:
        yield Path(work_dir)
        return
    with tempfile.TemporaryDirectory(prefix="bitwright-") as name:
        yield Path(name) / "blocks"


def _walk(
    runner: Runner, spill: Spill, rows: tuple[list[Tensor], list[Tensor]], specs: Mapping[str, QuantSpec], methods: Sequence[str],
    *, options: Any, seed: int, clock: _Clock, progress: bool,
) -> tuple[Perplexity, Perplexity, list[str]]:  # fmt: skip
    """Run the blocks on two streams, of the float and of the quantized model.

    Rows of calibration run in the quantized stream alone, held out rows in both.
    """
    calibration, held = (rows[0] if methods else []), rows[1]
    every = [*held, *calibration]
    evaluated, used = range(len(held)), range(len(held), len(every))
    start = spill.done
    with clock.stage("enter"):
        shape = _enter(runner, spill, every, len(held))
    if start:
        logger.info("going on at block %d of %d", start, len(runner.blocks))
    together = 0
    for index in progress_bar(range(start, len(runner.blocks)), "blocks", progress):
        sources, targets = _streams(spill, index, shape), _streams(spill, index + 1, shape)
        for target in targets:
            target.path.unlink(missing_ok=True)
        with runner.loaded(index) as module:
            with clock.stage("run"):
                runner.run(index, sources[0], targets[0], evaluated)
            prefix = f"{runner.stack}.{index}."
            mine = {name.removeprefix(prefix): spec for name, spec in specs.items() if name.startswith(prefix)}
            block = runner.block(index)
            together = together or _at_once(block, sources[1], used)
            with clock.stage("+".join(methods) or "nearest"), torch.enable_grad():
                inputs = _Inputs(sources[1], used, together)
                weights, notes = treat(block, inputs, mine, methods, seed=seed, spill_dir=spill.folder, options=options)
            _assign_codes(module, weights)
            with clock.stage("run"):
                runner.run(index, sources[1], targets[1], range(len(every)))
            with clock.stage("spill"):
                spill.put(index, weights, [f"{prefix.rstrip('.')}: {note}" for note in notes])
            del weights
    with clock.stage("logits"):
        before, after = _perplexities(runner, held, _streams(spill, len(runner.blocks), shape))
    notes = [note for block_notes in spill.notes for note in block_notes or ()]
    return before, after, notes


def _streams(spill: Spill, index: int, shape: tuple[int, int]) -> tuple[States, States]:
    """Hidden states before a block, of the float and of the quantized model."""
    return spill.states("float", index, shape), spill.states("quantized", index, shape)


def _enter(runner: Runner, spill: Spill, samples: list[Tensor], held: int) -> tuple[int, int]:
    """Shape of a state; where no block is finished, states of samples are written: in the float stream of the ``held`` first."""
    fresh = spill.done == 0
    entered = runner.enter(samples if fresh else samples[:1])
    first = next(entered)
    shape = (int(first.shape[1]), int(first.shape[2]))
    real, made = _streams(spill, 0, shape)
    for index, state in enumerate((first, *entered) if fresh else ()):
        made.write(index, state)
        if index < held:
            real.write(index, state)
    entered.close()  # type: ignore[attr-defined]
    return shape


def _at_once(block: Block, states: States, samples: Sequence[int]) -> int:
    """Number of samples that a block is run on at once."""
    if len(samples) > 1 and _takes_batches(block, states.read(samples[0]), states.read(samples[1])):
        return _TOGETHER
    return 1


def _assign_codes(module: nn.Module, weights: Mapping[str, PackedWeight | Tensor]) -> None:
    """Set a block's parameters to its dequantized codes."""
    for name, weight in weights.items():
        if isinstance(weight, PackedWeight):
            assign(module, name, torch.from_numpy(weight.dequantize()))


def _perplexities(runner: Runner, held: list[Tensor], last: tuple[States, States]) -> tuple[Perplexity, Perplexity]:
    """Perplexity of the float and of the quantized model, from the states after the last block."""
    before, after = Sums(), Sums()
    states = ((row, [stream.read(index) for stream in last]) for index, row in enumerate(held))
    for row, (real_logits, made_logits) in zip(held, runner.leave(states), strict=True):
        before.add(real_logits[0], row[0])
        after.add(made_logits[0], row[0], reference=real_logits[0])
    return before.result(), after.result()


def _weights(
    source: _Source, view: Transformer, specs: Mapping[str, QuantSpec], spill: Spill | None, *, buffers: bool
) -> Iterator[Weight]:
    """Yield every parameter once, in the order of the model, one in memory at a time; then the buffers that files hold."""
    parts = view.parts
    at = 0
    while at < len(parts):
        part = parts[at]
        if part.block is None or spill is None:
            at += 1
            yield _nearest(part, source.raw, specs.get(part.name))
            continue
        prefix = f"{view.stack}.{part.block}."
        found = dict(spill.get(part.block))
        while at < len(parts) and parts[at].block == part.block:
            name = parts[at].name
            weight = found.pop(name.removeprefix(prefix))
            at += 1
            if isinstance(weight, PackedWeight):
                yield replace(weight, name=name)
            else:  # a method may have changed it, and a file holds the dtype of the model
                yield FloatWeight(name, weight.to(source.raw(name).dtype))
    if buffers:  # a graph and a module have those that they had
        yield from (FloatWeight(name, source.raw(name)) for name in source.buffers)


def _nearest(part: Part, raw: Callable[..., Tensor], spec: QuantSpec | None) -> Weight:
    """A parameter in stored form; a large matrix with row scales is rounded some rows at a time."""
    if spec is None:
        return FloatWeight(part.name, raw(part.name))
    own = (
        spec.scale_format.shared == "none"
        and len(part.shape) == 2
        and spec.granularity.param_shape(part.shape)[:1] == (part.shape[0],)
    )
    rows = max(1, _AT_ONCE // part.shape[-1])
    if not own or rows >= part.shape[0]:
        return PackedWeight.nearest(part.name, raw(part.name).float(), spec)
    codes = scale = zero_point = None
    shifts: list[Any] = []
    room = torch.empty(rows, part.shape[1])
    for start in range(0, part.shape[0], rows):
        piece = slice(start, start + rows)
        given = raw(part.name, piece)
        made = PackedWeight.nearest(part.name, room[: len(given)].copy_(given), spec)
        if codes is None or scale is None or zero_point is None:
            codes = np.empty(part.shape, made.codes.dtype)
            scale, zero_point = (
                np.empty((part.shape[0], *a.shape[1:]), a.dtype) for a in (made.scale, made.zero_point)
            )
        codes[piece], scale[piece], zero_point[piece] = made.codes, made.scale, made.zero_point
        shifts += [] if made.encoding.shift is None else [made.encoding.shift]
    assert codes is not None and scale is not None and zero_point is not None
    shift = np.concatenate(shifts) if shifts else None
    return PackedWeight(part.name, codes, replace(made.encoding, scale=scale, zero_point=zero_point, shift=shift))


class _Counted:
    """An iterator of known length, for a progress bar."""

    def __init__(self, items: Iterator[Weight], count: int) -> None:
        self._items, self._count = items, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Weight]:
        return self._items


class _Bytes:
    """Counts bytes of weights: codes at their width, scales at two bytes, floats at their dtype."""

    def __init__(self) -> None:
        self.bytes = 0

    def over(self, weights: Iterable[Weight]) -> Iterator[Weight]:
        """Pass the weights through and count their bytes."""
        for weight in weights:
            if isinstance(weight, PackedWeight):
                bits = weight.format.bits
                zero = 0 if weight.layout.symmetric else weight.scale.size * bits / 8
                self.bytes += round(weight.codes.size * bits / 8 + weight.scale.size * 2 + zero)
            else:
                self.bytes += weight.values.numel() * weight.values.element_size()
            yield weight


def _into_module(model: nn.Module, weights: Iterable[Weight], *, in_place: bool) -> nn.Module:
    from bitwright.llm.coded import with_codes

    return with_codes(model, weights, in_place=in_place)


def _peak() -> int:
    """Largest resident memory of this process so far, bytes; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
