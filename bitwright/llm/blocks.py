"""A language model run block by block: one block's weights in memory, hidden states of every sample on disk.

The model's own forward makes what blocks read (embeddings, masks, positions) and what follows them (norm, output layer): it runs
with stand-ins in the places of the blocks. Between, each block is loaded, run on all samples, changed, and released.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.core.graph.roles import UNREAD, Use, roles_of
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import parse_format, parse_scale_format
from bitwright.core.numerics.serialize import granularity_from_json, granularity_to_json
from bitwright.errors import ConfigError, ModelError
from bitwright.export.files.manifest import hash_file
from bitwright.llm.checkpoint import Checkpoint, assign, materialize, release
from bitwright.llm.packed import PackedWeight
from bitwright.llm.roles import Part, Transformer, block_of, find_stack, require_stack
from bitwright.torch.interception.record import record

logger = logging.getLogger("bitwright")

_SMALL = 1 << 18  # numbers of a matrix that is read also where the structure of a block is looked at: a router

Read = Callable[[str], Tensor]


class _Entered(Exception):  # noqa: N818 - no error: it ends the forward when the blocks have been reached
    """The arguments that blocks read, recorded on entry."""


class Block(nn.Module):
    """A block as a function of hidden states alone.

    Args:
        module: the block.
        args, kwargs: what the model hands it beside the hidden states.
        keyword: name under which it takes hidden states; the first argument by default.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], keyword: str | None) -> None:
        super().__init__()
        self.block = module
        self.args, self.kwargs, self.keyword = tuple(args), dict(kwargs), keyword

    def forward(self, hidden: Tensor) -> Tensor:
        """``[1, T, D]`` to the same shape."""
        found = self.call(hidden)
        return found[0] if isinstance(found, tuple) else found

    def call(self, hidden: Tensor) -> Any:
        """Run the block and return its own result."""
        if self.keyword is None:
            return self.block(hidden, *self.args, **self.kwargs)
        return self.block(*self.args, **{**self.kwargs, self.keyword: hidden})


@dataclass(frozen=True)
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str | None


class States:
    """Hidden states of samples, float32 ``[1, T, D]`` each, in one file.

    Args:
        path: of the file; made when the first is written.
        shape: of one, without the leading 1.
    """

    def __init__(self, path: Path, shape: tuple[int, int]) -> None:
        self.path, self.shape = path, shape

    def write(self, index: int, state: Tensor) -> None:
        """Store the state of a sample."""
        values = np.ascontiguousarray(state.detach().float().reshape(self.shape).numpy())
        with open(self.path, "r+b" if self.path.exists() else "w+b") as file:
            file.seek(index * values.nbytes)
            file.write(values.tobytes())

    def read(self, index: int) -> Tensor:
        """The state of a sample."""
        count = self.shape[0] * self.shape[1]
        values = np.fromfile(self.path, np.float32, count, offset=index * count * 4)
        return torch.from_numpy(values.reshape(1, *self.shape))


class Runner:
    """A model and the source of its weights.

    Args:
        model: on the ``meta`` device, or with its weights.
        read: name of a parameter -> its float32 values; ``None`` where the model has them.
        tied: name of a parameter -> the name before it that stands for the same one.

    Raises:
        ModelError: the model's blocks are in no list.
    """

    def __init__(self, model: nn.Module, read: Read | None, tied: Mapping[str, str] | None = None) -> None:
        self.model, self.read, self.tied = model, read, dict(tied or {})
        self.blocks = require_stack(model)
        self.stack = find_stack(model)
        self._calls: list[_Call] = []
        self._is_tuple = False
        if read is not None:
            make_buffers(model)

    def names(self, index: int) -> list[str]:
        """Parameters of a block, without the name of the block."""
        return [name for name, _ in self.blocks[index].named_parameters()]

    def outside(self) -> list[str]:
        """Parameters outside of blocks."""
        named = self.model.named_parameters(remove_duplicate=False)
        return [name for name, _ in named if block_of(name, self.stack) is None]

    @contextmanager
    def loaded(self, index: int, *, sketch: bool = False) -> Iterator[nn.Module]:
        """Load a block's weights in float32, and release them at the end if they were read from files.

        Args:
            index: of the block.
            sketch: load numbers that repeat in place of large weights, which takes no memory: enough to see the structure.
        """
        block = self.blocks[index]
        if self.read is None:
            yield block
            return
        prefix = f"{self.stack}.{index}."

        def read(name: str) -> Tensor:
            parameter = block.get_parameter(name)
            large = sketch and parameter.dim() > 1 and parameter.numel() > _SMALL
            return _repeated(parameter.shape) if large else self._read(prefix + name)

        materialize(block, self.names(index), read)
        try:
            yield block
        finally:
            release(block)

    def _read(self, name: str) -> Tensor:
        assert self.read is not None
        return self.read(name)

    @contextmanager
    def ends(self, *left: nn.Module | None) -> Iterator[None]:
        """Load the parameters outside of blocks, except those of the modules ``left``; release them at the end."""
        if self.read is None:
            yield
            return
        names = {id(module): name for name, module in self.model.named_modules()}
        skipped = tuple(f"{names[id(module)]}." for module in left if module is not None)
        wanted = [name for name in self.outside() if not name.startswith(skipped)] if skipped else self.outside()
        materialize(self.model, wanted, self._read)
        try:
            yield
        finally:
            for name in wanted:
                assign(self.model, name, self.model.get_parameter(name).detach().to("meta"))

    @property
    def table(self) -> nn.Module | None:
        """The token embedding, if the model names it."""
        found: nn.Module | None = getattr(self.model, "get_input_embeddings", lambda: None)()
        return found

    @property
    def head(self) -> nn.Module | None:
        """The output layer, if the model names it."""
        found: nn.Module | None = getattr(self.model, "get_output_embeddings", lambda: None)()
        return None if found is self.table else found

    def block(self, index: int) -> Block:
        """The block with its recorded arguments other than hidden states; requires :meth:`enter`."""
        call = self._calls[index]
        return Block(self.blocks[index], call.args, call.kwargs, call.keyword)

    @torch.no_grad()
    def enter(self, samples: Iterable[Tensor], *, random: bool = False) -> Iterator[Tensor]:
        """Hidden states before the first block, of samples ``[1, T]`` of one length.

        Args:
            samples: rows of tokens.
            random: put random numbers in place of the table's rows, which is not read then.

        Raises:
            ModelError: a block is handed other things that depend on the tokens, or runs twice.
        """
        table = self.table if random and self.read is not None else None
        with (
            self.ends(self.head, table),
            _replaced([] if table is None else [table], lambda _: _rows_of(table, torch.randn)),
        ):
            for tokens in samples:
                yield self._entered(tokens)

    def _entered(self, tokens: Tensor) -> Tensor:
        calls: dict[int, tuple[_Call, Tensor]] = {}

        def stand_in(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                call, hidden = _taken_apart(args, kwargs)
                if index in calls:
                    self._refuse(index, "runs twice in one forward")
                calls[index] = call, hidden
                if not self._calls and index == 0:
                    self._is_tuple = self._first(call, hidden)
                if index == len(self.blocks) - 1:
                    raise _Entered
                return (hidden, None) if self._is_tuple else hidden

            return forward

        with _replaced(self.blocks, stand_in), suppress(_Entered):
            self.model(tokens, use_cache=False)
        found = [calls[index][0] for index in range(len(self.blocks))]
        self._calls = self._calls or found
        for index, (one, other) in enumerate(zip(self._calls, found, strict=True)):
            if not _same(one, other):
                self._refuse(index, "is handed tensors beside the hidden states that depend on the tokens")
        return calls[0][1].float()

    def _first(self, call: _Call, hidden: Tensor) -> bool:
        """Whether blocks return a tuple; runs the first block once to find out."""
        block = self.blocks[0]
        stand_in = block.forward  # which this call is in
        del block.forward
        try:
            with self.loaded(0, sketch=True):
                return isinstance(Block(block, call.args, call.kwargs, call.keyword).call(hidden.float()), tuple)
        finally:
            block.forward = stand_in

    def _refuse(self, index: int, problem: str) -> None:
        raise ModelError(
            f"{self.stack}.{index}", f"the block {problem}, so that blocks cannot be treated one by one",
            "load the model and use bitwright.quantize, which treats it as a whole",
        )  # fmt: skip

    @torch.no_grad()
    def run(self, index: int, source: States, target: States, samples: Sequence[int]) -> None:
        """Run a block, whose weights are loaded, on the states of samples."""
        block = self.block(index)
        for sample in samples:
            target.write(sample, block(source.read(sample)))

    @torch.no_grad()
    def leave(self, samples: Iterable[tuple[Tensor, Sequence[Tensor]]]) -> Iterator[list[Tensor]]:
        """Logits ``[1, T, V]`` of each hidden state after the last block, for tokens ``[1, T]`` and several such states."""
        table = self.table if self.read is not None else None
        left = table if self.head is not None else None  # a model may use the table for its logits
        with self.ends(left), _replaced([] if table is None else [table], lambda _: _rows_of(table, torch.zeros)):
            for tokens, states in samples:
                yield [self._left(tokens, state) for state in states]

    def _left(self, tokens: Tensor, state: Tensor) -> Tensor:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return (state, None) if self._is_tuple else state

        with _replaced(self.blocks, lambda _: stand_in):
            found = self.model(tokens, use_cache=False)
        logits: Tensor = getattr(found, "logits", found)
        return logits.float()


def _repeated(shape: Sequence[int]) -> Tensor:
    """A float32 matrix whose rows are one row in memory, or a stack whose matrices are one: kernels read these with strides."""
    row = torch.linspace(-1, 1, shape[-1]).div_(shape[-1] ** 0.5)
    return (row if len(shape) == 2 else row.repeat(shape[-2], 1)).expand(*shape)


def _rows_of(table: nn.Module | None, fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a table whose weights are not loaded."""
    assert table is not None
    width = int(table.get_parameter("weight").shape[1])
    return lambda tokens, *args, **kwargs: fill(*tokens.shape, width)


def view_by_blocks(runner: Runner) -> Transformer:
    """The roles of a model's parameters, found from one block of each structure and from the ends of the model."""
    tokens = torch.arange(1, 9)[None]
    hidden = next(iter(runner.enter([tokens], random=True)))
    known: dict[Any, dict[str, Use]] = {}
    roles: dict[str, Use] = {}
    for index, module in enumerate(runner.blocks):
        shape = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
        if shape not in known:
            with runner.loaded(index, sketch=True):
                graph = record(runner.block(index).eval(), [hidden]).graph()
            known[shape] = roles_of(graph, whole=False)
        for name, _ in shape:
            roles[f"{runner.stack}.{index}.{name}"] = known[shape].get(f"block.{name}", UNREAD)
    ends = {
        role: getattr(runner.model, which, lambda: None)()
        for role, which in (("embedding", "get_input_embeddings"), ("lm_head", "get_output_embeddings"))
    }
    parts = []
    for name, parameter in runner.model.named_parameters(remove_duplicate=False):
        if name in runner.tied:
            continue
        use = roles.get(name) or _of_end(runner.model, name, parameter, ends)
        parts.append(Part(name, use.role, tuple(parameter.shape), block_of(name, runner.stack), use.why, use.axis))
    runner._calls = []
    return Transformer(tuple(parts), stack=runner.stack)


def _of_end(model: nn.Module, name: str, parameter: Tensor, ends: Mapping[str, nn.Module | None]) -> Use:
    owner = model.get_submodule(name.rpartition(".")[0])
    for role, module in ends.items():
        if module is owner:
            return Use(role, axis=-1) if parameter.dim() > 1 else Use("bias")
    if isinstance(owner, nn.Embedding):
        return Use("position", axis=-1)
    if all(p.dim() == 1 for p in owner.parameters()):
        return Use("norm")
    return Use("other", f"parameter of {type(owner).__name__} outside of the blocks")


def _taken_apart(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Call, Tensor]:
    """Split the arguments of a block into its hidden states (the first float tensor) and the rest."""
    if args:
        return _Call(args[1:], dict(kwargs), None), args[0]
    name = next(key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point())
    return _Call((), {key: value for key, value in kwargs.items() if key != name}, name), kwargs[name]


def _same(one: _Call, other: _Call) -> bool:
    def flat(value: Any) -> Iterator[Any]:
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, (tuple, list)):
                waiting += item
            elif isinstance(item, Mapping):
                waiting += item.values()
            else:
                yield item

    pairs = zip(flat((one.args, one.kwargs)), flat((other.args, other.kwargs)), strict=False)
    return all(
        a is b or not isinstance(a, Tensor) or (isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b))
        for a, b in pairs
    )


@contextmanager
def _replaced(modules: Sequence[nn.Module], make: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
    """Modules with other forwards."""
    for index, module in enumerate(modules):
        module.forward = make(index)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def make_buffers(model: nn.Module) -> None:
    """Compute the buffers that no file holds (angles of rotary positions), which a model on ``meta`` lacks.

    Parameters and buffers that have values keep them.
    """
    for module in model.modules():
        empty = {name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        if empty:
            _fill_buffers(model, module, empty)


def _fill_buffers(model: nn.Module, module: nn.Module, empty: Collection[str]) -> None:
    """Let the model fill buffers of a module, and drop what it draws for its other tensors (scaled tables of tokens)."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    for name, parameter in module.named_parameters(recurse=False):
        module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    model._init_weights(module)  # type: ignore[operator]
    module._parameters.update(parameters)
    module._buffers.update({name: buffer for name, buffer in buffers.items() if name not in empty})


def of_checkpoint(checkpoint: Checkpoint) -> Runner:
    """A runner that reads the weights of a folder, in float32."""
    model = checkpoint.skeleton()
    first: dict[str, str] = {}
    tied = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        stored = checkpoint.parameters[name]
        if first.setdefault(stored, name) != name:
            tied[name] = first[stored]
    runner = Runner(model, lambda name: checkpoint.read(name, torch.float32), tied)
    for name, _ in model.named_buffers():
        if name in checkpoint.parameters:
            assign(model, name, checkpoint.read(name))
    return runner


# ------------------------------------------------------------------------------------------ what is spilled


class Spill:
    """Finished blocks on disk, from which an interrupted run continues.

    Args:
        folder: made where it is missing; files of an earlier run with another ``key`` are removed.
        key: of everything that changes the result.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        folder.mkdir(parents=True, exist_ok=True)
        known = self._journal()
        if known.get("key") != key:
            if known.get("done"):
                logger.warning(
                    "%s: its finished blocks (%d) are of another model, other data or other options; starting anew",
                    folder, known["done"],
                )  # fmt: skip
            for path in folder.glob("block-*"):
                path.unlink()
            for path in folder.glob("states-*"):
                path.unlink()
            self._write({"key": key, "done": 0})

    def _journal(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / "journal.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found

    def _write(self, content: Mapping[str, Any]) -> None:
        part = self.folder / "journal.part"
        part.write_text(json.dumps(content), encoding="utf-8")
        os.replace(part, self.folder / "journal.json")

    @property
    def done(self) -> int:
        """The finished blocks."""
        return int(self._journal().get("done", 0))

    @property
    def notes(self) -> list[Any]:
        """Notes of the finished blocks."""
        return list(self._journal().get("notes", []))

    def states(self, name: str, index: int, shape: tuple[int, int]) -> States:
        """The states before block ``index``."""
        return States(self.folder / f"states-{name}-{index:04d}", shape)

    def put(self, index: int, tensors: Mapping[str, PackedWeight | Tensor], note: Any = None) -> None:
        """Store the weights of a finished block, and remove the states before it."""
        from safetensors.torch import save_file

        arrays: dict[str, Tensor] = {}
        encodings: dict[str, Any] = {}
        for name, weight in tensors.items():
            if isinstance(weight, Tensor):
                arrays[name] = weight.detach().contiguous()
                continue
            arrays[f"{name}:codes"] = torch.from_numpy(np.ascontiguousarray(weight.codes))
            for field in ("scale", "zero_point", "common", "shift"):
                values = getattr(weight.encoding, field)
                if values is not None:
                    arrays[f"{name}:{field}"] = torch.from_numpy(np.array(values))
            encodings[name] = _described(weight.encoding)
        part, path = self.folder / "block.part", self.folder / f"block-{index:04d}.safetensors"
        save_file(arrays, part, {"encodings": json.dumps(encodings)})
        known, digest = self._journal(), hash_file(part)
        os.replace(part, path)
        notes = [*known.get("notes", [])[:index], note]
        digests = [*known.get("sha256", [])[:index], digest]
        self._write({"key": self.key, "done": index + 1, "notes": notes, "sha256": digests})
        for old in self.folder.glob(f"states-*-{index:04d}"):
            old.unlink()

    def get(self, index: int) -> Iterator[tuple[str, PackedWeight | Tensor]]:
        """The weights of a finished block, one at a time.

        Raises:
            ConfigError: its file is missing or damaged.
        """
        from safetensors import safe_open

        with safe_open(self._block(index), "pt") as file:
            encodings = json.loads(file.metadata()["encodings"])
            for name in file.keys():  # noqa: SIM118 - not a mapping
                stem, _, field = name.partition(":")
                if not field:
                    yield name, file.get_tensor(name)
                elif field == "codes":
                    known = (f"{stem}:{f}" for f in ("scale", "zero_point", "common", "shift"))
                    parts = [file.get_tensor(f).numpy() if f in file.keys() else None for f in known]  # noqa: SIM118
                    codes = file.get_tensor(name).numpy()
                    yield stem, PackedWeight(stem, codes, _encoding(encodings[stem], *parts))

    def _block(self, index: int) -> Path:
        """The file of a finished block, with the content that was written."""
        path = self.folder / f"block-{index:04d}.safetensors"
        try:
            if hash_file(path) == self._journal()["sha256"][index]:
                return path
            problem = "its content is not what was written"
        except (OSError, LookupError) as error:
            problem = f"{error}"
        remedy = f"remove {self.folder}; the same call begins with the first block then"
        raise ConfigError(str(path), f"a finished block cannot be read: {problem}", remedy)

    def clear(self) -> None:
        """Remove the folder."""
        for path in (*self.folder.glob("block*"), *self.folder.glob("states-*"), *self.folder.glob("journal.*")):
            path.unlink()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


def _described(encoding: Encoding) -> dict[str, Any]:
    fmt = encoding.format
    return {
        "format": fmt.name, "granularity": granularity_to_json(encoding.granularity),
        "scale_format": encoding.scale_format.name,
    }  # fmt: skip


def _encoding(described: Mapping[str, Any], scale: Any, zero_point: Any, common: Any, shift: Any) -> Encoding:
    fmt, granularity = parse_format(described["format"]), granularity_from_json(described["granularity"])
    stored = parse_scale_format(described["scale_format"])
    return Encoding(fmt, scale, zero_point, granularity, stored, common, shift=shift)


def fingerprint(*parts: Any) -> str:
    """A key of arguments; tensors count with their values."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.numpy().tobytes() if isinstance(part, Tensor) else repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()
