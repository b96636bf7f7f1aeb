"""Models that ``torch.export`` captured, and the ``.pt2`` files that hold them, as modules."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import fx, nn  # noqa: TID251, whose nodes a captured program holds
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from bitwright.errors import ModelError
from bitwright.torch.calls.inputs import Inputs, walk_modules

SUFFIX = ".pt2"
_GUARDS = "_guards_fn"  # what torch calls the module that checks the inputs of a program
_RECORDS = ("weights/", "constants/")  # folders of an archive whose entries may be pickles
_PICKLED = ("custom_obj_", "opaque_obj_")
_SAMPLES = "sample_inputs/"
_MODES = ("training", "train")  # what operators call the argument that says that a model learns
_CHANCES = ("p", "dropout")
# what zipfile, zlib and JSON raise for damaged entries, and reading what another content has not
_NO_ARCHIVE = (
    zipfile.BadZipFile, zlib.error, ValueError, KeyError, TypeError, AttributeError, EOFError, OSError, RuntimeError,
)  # fmt: skip
_CAPTURE = "torch.export.export(model.eval(), ...)"


def as_module(model: Any) -> Any:
    """A captured program, or a ``.pt2`` file, as a module in evaluation mode; other objects unchanged.

    The module has the program's parameters (the same tensors), and its inputs' names and shapes: other shapes are refused.

    Raises:
        ModelError: the file cannot be read, or the program computes what no simulation can show, see :func:`module_of`.
    """
    if isinstance(model, (str, Path)) and Path(model).suffix == SUFFIX:
        model = read_program(model)
    return module_of(model) if isinstance(model, ExportedProgram) else model


def read_program(path: str | Path) -> ExportedProgram:
    """Read a ``.pt2`` file, which ``torch.export.save`` wrote.

    Such an archive can hold pickles, which run code when they are read. Those are refused; tensors and the graph are not
    pickled. ``torch.export`` itself still interprets the graph: open files of people you trust.

    Raises:
        ModelError: there is no such file, it is no such archive, it holds pickled objects, or torch cannot read it.
    """
    path = Path(path)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ModelError(str(path), f"the model file {problem}", f"pass a {SUFFIX} file that torch.export.save wrote")
    _refuse_pickles(path)
    try:
        return torch.export.load(path)
    except Exception as error:  # of any kind: torch checks little of an archive
        raise ModelError(
            str(path),
            f"torch.export.load cannot read it with torch {torch.__version__}: {type(error).__name__}: {error}",
            "save it again with this version of torch: torch.export.save(program, path)",
        ) from error


def _refuse_pickles(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            found = next(_pickled(archive), None)
    except _NO_ARCHIVE as error:
        raise ModelError(
            str(path),
            f"it is no archive of torch.export: {error!r:.200}",
            "write it with torch.export.save(program, path); a state_dict or a pickled module holds no graph",
        ) from error
    if found is not None:
        raise ModelError(
            str(path),
            f"its entry {found} is a pickle, which runs code when it is read",
            "give the program itself in Python, quantize(torch.export.load(path), data), where you trust the file; or save it "
            "without objects of your own classes, on the CPU",
        )


def _pickled(archive: zipfile.ZipFile) -> Iterator[str]:
    """Entries of an archive that torch would unpickle without limits."""
    for name in archive.namelist():
        folder = next((part for part in (*_RECORDS, _SAMPLES) if f"/{part}" in name), None)
        last = PurePosixPath(name).name
        if folder == _SAMPLES:
            with archive.open(name) as file:
                try:
                    torch.load(file, weights_only=True)  # noqa: TID251, which makes tensors and containers only
                except Exception:  # what this reader refuses, torch.export.load reads without limits
                    yield name
        elif folder is not None and (last.startswith(_PICKLED) or last.endswith(".pt")):
            yield name
        elif folder is not None and last.endswith("_config.json"):
            entries = json.loads(archive.read(name)).get("config", {})
            yield from (f"{name}: {key}" for key, entry in entries.items() if entry.get("use_pickle"))


def module_of(program: ExportedProgram) -> nn.Module:
    """The module of a captured program, in evaluation mode.

    Raises:
        ModelError: it was captured for training; or a run changes a buffer or an input of it.
    """
    if program.graph_signature.backward_signature is not None:
        raise _for_training("the program", "it computes gradients too")
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule):
            _refuse_training(part)
    _refuse_changes(program)
    module = program.module()
    for _, part in walk_modules(module):
        part.training = False  # train() and eval() of a program are refused by torch
    guards = getattr(module, _GUARDS, None)
    if isinstance(guards, nn.Module):
        setattr(module, _GUARDS, _Guards(guards, _shapes(program)))
    return module


def input_shapes(program: ExportedProgram) -> list[tuple[str, str, tuple[int | None, ...]]]:
    """Name, type and shape of the inputs in order; ``None`` for a free length."""
    found: list[tuple[str, str, tuple[int | None, ...]]] = []
    for node in _inputs(program):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            shape = tuple(n if isinstance(n, int) else None for n in value.shape)
            found.append((node.name, str(value.dtype).removeprefix("torch."), shape))
    return found


def as_inputs(program: ExportedProgram, arrays: Mapping[str, Any]) -> Inputs:
    """Arrays by the names of :func:`input_shapes` as one call of the program; numbers keep their captured values."""
    nodes = _inputs(program)
    flat = [torch.as_tensor(arrays[n.name]) if n.name in arrays else n.meta["val"] for n in nodes]
    args, kwargs = pytree.tree_unflatten(flat, program.call_spec.in_spec)
    return Inputs(tuple(args), dict(kwargs))


def _inputs(program: ExportedProgram) -> list[fx.Node]:
    wanted = dict.fromkeys(program.graph_signature.user_inputs)
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted]


class _Guards(nn.Module):
    """The check of a program's inputs, whose message names the input, its shape and the shapes that the program takes."""

    def __init__(self, check: nn.Module, shapes: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.training = False
        self._check = check
        self._shapes = tuple(shapes)

    def forward(self, *inputs: Any) -> None:
        """Refuse inputs outside the shapes that the program was captured for."""
        try:
            self._check(*inputs)
        except AssertionError as error:
            given = ", ".join(
                f"{name}: {'x'.join(map(str, value.shape)) if isinstance(value, torch.Tensor) else repr(value)}"
                for (name, _), value in zip(self._shapes, inputs, strict=False)
            )
            wanted = ", ".join(f"{name}: {shape}" for name, shape in self._shapes)
            raise ModelError(
                "inputs of the exported program",
                f"it was captured for {wanted}, and gets {given} ({error})",
                "give batches of these shapes and leave a shorter last one out (drop_last=True of a DataLoader), or capture "
                "it with free lengths: torch.export.export(model, args, dynamic_shapes=({0: torch.export.Dim.AUTO},))",
            ) from error


def _shapes(program: ExportedProgram) -> list[tuple[str, str]]:
    """Names of the inputs, and their shapes with the bounds of free lengths."""

    def length(n: Any) -> str:
        if isinstance(n, int):
            return str(n)
        bounds = program.range_constraints.get(n.node.expr)
        return "?" if bounds is None else f"({bounds.lower} to {bounds.upper})".replace("int_oo", "any")

    values = ((node.name, node.meta["val"]) for node in _inputs(program))
    return [
        (name, "x".join(map(length, value.shape)) if isinstance(value, torch.Tensor) else repr(value))
        for name, value in values
    ]


def _for_training(where: str, problem: str) -> ModelError:
    return ModelError(where, f"{problem}: it was captured for training", f"capture it again for inference: {_CAPTURE}")


def _refuse_training(part: fx.GraphModule) -> None:
    """Refuse operators that draw random numbers or use batch statistics: the model was captured in training mode."""
    for node in part.graph.nodes:
        given = _arguments(node)
        if not any(given.get(name) is True for name in _MODES):
            continue
        if "running_mean" in given and given["running_mean"] is not None:
            raise _for_training(_place(node), "it normalises by the statistics of each batch")
        if any(isinstance(given.get(name), float) and given[name] > 0 for name in _CHANCES):
            raise _for_training(_place(node), "it drops values at random")
        if "noise" in given or "lower" in given:  # rrelu
            raise _for_training(_place(node), "it draws random slopes")


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of an operator by their names; empty for other nodes."""
    schema: Any = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return {}
    names = [argument.name for argument in schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _place(node: fx.Node) -> str:
    """The module that a node was captured in, or its own name."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path]
    return str(paths[-1] if paths else node.name)


def _refuse_changes(program: ExportedProgram) -> None:
    """Refuse a program of which a run changes buffers or inputs: what it answers depends on the runs before."""
    signature = program.graph_signature
    named = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    changed = [*signature.buffers_to_mutate.values(), *_written(program.graph, named)]
    if changed:
        raise ModelError(
            changed[0],
            "each run of the program changes this buffer, so that an answer depends on the runs before it",
            f"give it as an input and return its next value, and capture the model again; or, if it only counts while the "
            f"model learns, capture {_CAPTURE}",
        )
    given = {name: name for name in signature.user_inputs if isinstance(name, str)}
    changed = [*signature.user_inputs_to_mutate.values(), *_written(program.graph, given)]
    if changed:
        raise ModelError(
            changed[0],
            "the program writes into this input, so that a second run on the same batch would answer something else",
            "write y = x + 1 instead of x.add_(1) and x[...] = ... in forward, and capture the model again",
        )


def _written(graph: fx.Graph, named: Mapping[str, str]) -> Iterator[str]:
    """Names of the placeholders that operators write into, directly or through views."""
    memory: dict[fx.Node, fx.Node] = {}  # node -> whose memory it is a view of
    for node in graph.nodes:
        schema: Any = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        given = _arguments(node)
        for argument in schema.arguments:
            value = given.get(argument.name)
            if argument.alias_info is None or not isinstance(value, fx.Node):
                continue
            source = memory.get(value, value)
            memory[node] = source
            if argument.alias_info.is_write and source.op == "placeholder" and source.name in named:
                yield named[source.name]
