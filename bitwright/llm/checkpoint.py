"""A language model as a folder: ``config.json``, tokenizer files and safetensors shards, whose tensors are read one by one.

Everything that can be wrong with a folder is found by :func:`open_checkpoint`, from the headers of the shards and a model without
memory (torch's ``meta`` device), before any weight is read. Nothing is downloaded, and no code of the folder runs.

Reference: https://huggingface.co/docs/safetensors for the layout of a shard.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from bitwright.errors import ConfigError, ModelError, close_matches, some_of, with_article

logger = logging.getLogger("bitwright")

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
#: any of them is enough to make a tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
#: names of safetensors -> torch, of what a float checkpoint holds
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_FLOATS = ("F64", "F32", "F16", "BF16")
_LONGEST_HEADER = 100 << 20  # bytes, the limit of the safetensors library


@dataclass(frozen=True)
class Entry:
    """Location of a tensor in the shards.

    Attributes:
        name: of the tensor.
        file: shard.
        dtype: as safetensors names it.
        shape: of the tensor.
        start: byte of the file at which its numbers begin.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder, see :func:`open_checkpoint`.

    Attributes:
        folder: where it lies.
        config: ``config.json``.
        entries: tensors by their names in the files, in the order of the files.
        parameters: name in the model -> name in the files. Tied parameters share an entry.
    """

    folder: Path
    config: Mapping[str, Any]
    entries: Mapping[str, Entry]
    parameters: Mapping[str, str] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def is_streamed(self) -> bool:
        """Whether every parameter is one tensor of the files, so that single blocks can be read."""
        return bool(self.parameters)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of ``transformers``.

        Raises:
            ModelError: its files are missing or cannot be read.
        """
        return open_tokenizer(self.folder)

    def skeleton(self) -> nn.Module:
        """The model on the ``meta`` device, in eval mode: its structure without memory for weights."""
        return empty_model(self.folder, self.config)

    def read(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> Tensor:
        """Read the tensor of a parameter or of the files, without loading the rest of the file.

        Args:
            name: of a parameter of the model, or of a tensor of the files.
            dtype: what it is converted to; as it is stored by default.
            rows: of axis 0, all by default.
        """
        entry = self.entries[self.parameters.get(name, name)]
        kind = DTYPES[entry.dtype]
        start, shape = entry.start, entry.shape
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            row = math.prod(shape[1:]) * kind.itemsize
            start, shape = start + first * row, (max(0, last - first), *shape[1:])
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype or kind)
        buffer = bytearray(count * kind.itemsize)
        with open(entry.file, "rb") as file:
            file.seek(start)
            if file.readinto(buffer) != len(buffer):
                raise ModelError(str(entry.file), f"it ends within {entry.name}", "copy the shard once more")
        tensor = torch.frombuffer(buffer, dtype=kind).reshape(shape)
        return tensor if dtype is None else tensor.to(dtype)

    def load(self) -> nn.Module:
        """The whole model in memory, in its own dtype and eval mode.

        Raises:
            ModelError: transformers refuses the folder.
        """
        from transformers import AutoModelForCausalLM

        try:
            found = AutoModelForCausalLM.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False, dtype="auto"
            )
        except Exception as error:  # whatever transformers makes of a file that it reads and open_checkpoint does not
            raise ModelError(
                str(self.folder),
                f"transformers cannot load it: {_first_line(error)}",
                "copy the folder of the original model",
            ) from error
        model: nn.Module = found.eval()
        return model


def open_checkpoint(folder: str | os.PathLike[str], *, tokenizer: bool = True) -> Checkpoint:
    """Open a language model in the layout of ``transformers``, and check it.

    Args:
        folder: with ``config.json`` and ``model.safetensors``, or shards and their index.
        tokenizer: whether one is needed.

    Raises:
        ModelError: the folder, the configuration, the tokenizer or a shard is missing; a shard is truncated or of another
            dtype than the others; a parameter is missing or of another shape; the tokenizer has more tokens than the model.
        ConfigError: ``folder`` is a name of a hub, or the model is quantized already.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            str(folder), "it is not a folder; nothing is downloaded",
            "give a local folder with config.json, tokenizer files and safetensors shards",
        )  # fmt: skip
    config = read_config(path)
    _refuse_quantized(path, config)
    if tokenizer:
        check_tokenizer(path)
    entries = {entry.name: entry for file in _shards(path) for entry in header(file)}
    _check_index(path, entries)
    _check_dtypes(path, entries)
    _check_layers(path, config, entries)
    parameters = _match(path, empty_model(path, config), entries)
    opened = Checkpoint(path, config, entries, parameters)
    if tokenizer:
        _check_vocabulary(opened)
    return opened


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of ``transformers`` in a folder.

    Raises:
        ModelError: its files are missing or cannot be read.
    """
    check_tokenizer(folder)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each tokenizer has errors of its own
        raise ModelError(
            str(folder), f"its tokenizer cannot be opened: {_first_line(error)}",
            "copy the tokenizer files of the original model into the folder once more",
        ) from error  # fmt: skip


def check_tokenizer(folder: Path) -> None:
    """Refuse a folder without tokenizer files.

    Raises:
        ModelError: there are none.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            str(folder), f"it has no tokenizer: none of {', '.join(TOKENIZER_FILES[:3])} is there",
            "copy the tokenizer files of the original model into the folder, or give tokens in place of text",
        )  # fmt: skip


def check_room(folder: Path, needed: int, what: str) -> None:
    """Refuse to start where the disk lacks room for ``needed`` bytes.

    Raises:
        ModelError: it does.
    """
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ModelError(
            str(folder), f"{what} takes {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB of the disk are free",
            "free some, or choose a folder on another disk",
        )  # fmt: skip


def header(file: Path) -> Iterator[Entry]:
    """The tensors of a shard, from its header.

    Raises:
        ModelError: it is no safetensors file, or its length is not what the header says.
    """
    size = file.stat().st_size
    copy = "copy the shard from the original model once more"
    with open(file, "rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
            raise ModelError(str(file), f"its {size} bytes are not a safetensors file, or it is truncated", copy)
        try:
            table = json.loads(stream.read(length))
        except ValueError as error:
            raise ModelError(str(file), f"its header cannot be read: {_first_line(error)}", copy) from error
    if not isinstance(table, dict):
        raise ModelError(str(file), f"its header is {with_article(type(table).__name__)}, not a table of tensors", copy)
    table.pop("__metadata__", None)
    for name, row in table.items():
        if not _is_row(row):
            raise ModelError(str(file), f"its header has no dtype, shape and place of {name} that go together", copy)
    end = 8 + length + max((row["data_offsets"][1] for row in table.values()), default=0)
    if size < end:
        problem = f"it is truncated: {size} bytes, of the {end} that its header announces"
        raise ModelError(str(file), problem, copy)
    for name, row in table.items():
        if row["dtype"] not in DTYPES:
            raise ModelError(
                str(file), f"{name} is of dtype {row['dtype']}, which no float model has",
                "give the model before it was quantized",
            )  # fmt: skip
        yield Entry(name, file, row["dtype"], tuple(row["shape"]), 8 + length + row["data_offsets"][0])


def _is_row(row: Any) -> bool:
    """Whether a header row has a dtype, a shape and data offsets that span as many bytes as these need."""
    if not isinstance(row, dict) or not isinstance(row.get("dtype"), str):
        return False
    shape, places = row.get("shape"), row.get("data_offsets")
    if not (_are_sizes(shape) and _are_sizes(places) and len(places) == 2):
        return False
    kind = DTYPES.get(row["dtype"])
    return kind is None or places[1] - places[0] == math.prod(shape) * kind.itemsize


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of the model's folder.

    Raises:
        ModelError: it is no JSON object.
    """
    remedy = "copy it from the original model"
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(str(path), f"it is not JSON: {_first_line(error)}", remedy) from error
    if not isinstance(found, dict):
        raise ModelError(str(path), f"it holds {with_article(type(found).__name__)}, not an object", remedy)
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a language model.

    Raises:
        ModelError: it is missing, no JSON object, or of a model that transformers does not know.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            str(folder), "config.json is missing", "copy it from the original model; it says what the tensors belong to"
        )
    config = _json_object(path)
    kind = config.get("model_type")
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    if not isinstance(kind, str) or kind not in CONFIG_MAPPING or kind not in known:
        code = ", and the code in the folder is not run" if "auto_map" in config else ""
        raise ModelError(
            str(path), f"model_type {kind!r} is not a language model that transformers knows"
            f"{close_matches(str(kind), known)}{code}",
            "update transformers, or quantize the module itself: bitwright.llm.quantize(model, ...)",
        )  # fmt: skip
    return config


def _refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    if "quantization_config" in config:
        own = config["quantization_config"]
        method = own.get("quant_method", "another tool") if isinstance(own, dict) else "another tool"
        raise ConfigError(
            str(folder / "config.json"), f"the model is quantized already, by {method}",
            "give the float model that it was made from; bitwright.llm.convert writes these codes as other files, "
            "bitwright.llm.simulate_quantized simulates them",
        )  # fmt: skip


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        here = {path.name for path in folder.iterdir() if path.is_file()}  # a name may be longer than the system allows
        missing = [name for name in names if name not in here]
        if missing:
            raise ModelError(
                str(folder), f"{len(missing)} of {len(names)} shards are missing: {some_of(missing)}",
                "copy them from the original model",
            )  # fmt: skip
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    found = f"; {some_of(pickled)} may run code when opened and is not read" if pickled else ""
    raise ModelError(
        str(folder), f"there is no {SINGLE} and no {INDEX}{found}",
        "save the model as safetensors: model.save_pretrained(folder)",
    )  # fmt: skip


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file of the folder, from the index of shards.

    Raises:
        ModelError: it is no JSON object, or says that not for every tensor.
    """
    found = _json_object(index).get("weight_map")
    if not isinstance(found, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in found.values()
    ):
        raise ModelError(
            str(index),
            "its weight_map does not name a file of the folder for each tensor",
            "copy it from the original model",
        )
    return found


def _check_index(folder: Path, entries: Mapping[str, Entry]) -> None:
    index = folder / INDEX
    if not index.is_file():
        return
    wanted = _weight_map(index)
    lost = [name for name, file in wanted.items() if name not in entries or entries[name].file.name != file]
    if lost:
        raise ModelError(
            str(folder), f"{wanted[lost[0]]} lacks {some_of(lost)}, which the index places there",
            "copy the shard and the index of one and the same model",
        )  # fmt: skip


def _check_dtypes(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Integer matrices are of a quantized model; shards of different dtypes are of different models."""
    matrices = [entry for entry in entries.values() if len(entry.shape) >= 2]
    for entry in matrices:
        if entry.dtype not in _FLOATS:
            raise ModelError(
                str(entry.file), f"{entry.name} is of dtype {entry.dtype}, as of a model that is quantized already",
                "give the float model",
            )  # fmt: skip
    kinds: dict[Path, Counter[str]] = {}
    for entry in matrices:
        kinds.setdefault(entry.file, Counter())[entry.dtype] += 1
    usual = Counter(kind for counts in kinds.values() for kind in counts.elements()).most_common(1)
    for file, counts in kinds.items():
        if usual[0][0] not in counts:
            found = counts.most_common(1)[0][0]
            raise ModelError(
                str(file), f"its matrices are of dtype {found}, those of the other shards of {usual[0][0]}",
                "copy the shard from the original model once more",
            )  # fmt: skip


def _check_layers(folder: Path, config: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    """Refuse more layers than there are tensors, before transformers makes each of them."""
    for key in ("num_hidden_layers", "n_layer"):
        count = config.get(key)
        if isinstance(count, int) and count > len(entries):
            raise ModelError(
                str(folder / "config.json"), f"{key} is {count}, and the files hold {len(entries)} tensors",
                "copy it from the original model",
            )  # fmt: skip


def empty_model(folder: Path, config: Mapping[str, Any]) -> nn.Module:
    """The model of a configuration on the ``meta`` device, in eval mode.

    Raises:
        ModelError: transformers makes none.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        made = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if hasattr(made, "quantization_config"):
            del made.quantization_config
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(made, trust_remote_code=False)
    except Exception as error:  # whatever a field of config.json makes of the constructor
        raise ModelError(
            str(folder / "config.json"), f"no model can be made from it: {_first_line(error)}",
            "copy it from the original model",
        ) from error  # fmt: skip
    return model.eval()


def _match(folder: Path, model: nn.Module, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Name of every parameter and saved buffer -> name in the files; empty where transformers must convert the tensors."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    state = model.state_dict()
    # the files may lack the prefix, or have one more; a name as it stands goes first
    spellings = {entry.removeprefix(prefix): entry for entry in entries}
    spellings |= {prefix + entry: entry for entry in entries} | dict(zip(entries, entries, strict=True))
    names = {name: spellings[name] for name in state if name in spellings}
    missing = [name for name in state if name not in names]
    tied = tied_parameters(model)
    for name in list(missing):
        source = next((names[other] for other in tied.get(name, ()) if other in names), None)
        if source is not None:
            names[name] = source
            missing.remove(name)
    if missing and is_converted(model, entries):
        return {}
    if missing:
        raise ModelError(
            str(folder), f"{len(missing)} of {len(state)} parameters are in no shard: {some_of(missing)}",
            "copy the shards and config.json of one and the same model",
        )  # fmt: skip
    _check_shapes(state, names, entries)
    return names


def _check_shapes(state: Mapping[str, Tensor], names: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    for name, found in names.items():
        if tuple(state[name].shape) != entries[found].shape:
            raise ModelError(
                str(entries[found].file), f"{found} has shape {entries[found].shape}, where config.json makes it "
                f"{tuple(state[name].shape)}", "copy the shards and config.json of one and the same model",
            )  # fmt: skip


def tied_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name -> other names of the same parameter.

    On the ``meta`` device tied parameters are not one object; the model says which ones will be.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    sets = [set(names) for names in groups.values() if len(names) > 1]
    config = getattr(model, "config", None)
    ends = [getattr(model, which, lambda: None)() for which in ("get_input_embeddings", "get_output_embeddings")]
    if getattr(config, "tie_word_embeddings", False) and all(end is not None for end in ends):
        of_module = {id(module): name for name, module in model.named_modules()}
        sets.append({f"{of_module[id(end)]}.weight" for end in ends})
    return {name: tuple(sorted(names - {name})) for names in sets for name in names}


def is_converted(model: nn.Module, names: Iterable[str]) -> bool:
    """Whether transformers joins, splits or renames tensors of these names when it loads a model of this architecture."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping: Any = get_model_conversion_mapping
    sources = [re.compile(pattern) for change in mapping(model) for pattern in change.source_patterns]
    return any(source.search(name) for name in names for source in sources)


def _check_vocabulary(opened: Checkpoint) -> None:
    """Refuse a tokenizer with more tokens than the embedding has rows, before any work."""
    rows = next((opened.config[key] for key in ("vocab_size", "n_vocab") if key in opened.config), None)
    if rows is None:
        return
    tokens = max(opened.tokenizer.get_vocab().values(), default=-1) + 1
    if tokens > rows:
        raise ModelError(
            str(opened.folder), f"the tokenizer has {tokens} tokens, the model's table {rows} rows",
            "copy the tokenizer files that belong to this model",
        )  # fmt: skip


def assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put ``tensor`` in place of the parameter or buffer ``name`` (dotted) of ``module``."""
    *parents, last = name.split(".")
    owner = module.get_submodule(".".join(parents))
    if last in owner._parameters:
        owner._parameters[last] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[last] = tensor


def mapped(tensor: Tensor, file: Path) -> Tensor:
    """``tensor`` as a memory map of ``file``, which is made: it counts as memory only while its pages are looked at.

    The file may be removed as soon as the map is not used any more.
    """
    flat = tensor.reshape(-1)
    with open(file, "wb") as stream:
        stream.write(flat.view(torch.uint8).numpy().data)
    found = torch.from_file(str(file), shared=True, size=flat.numel(), dtype=flat.dtype)
    return found.reshape(tensor.shape)


def materialize(module: nn.Module, names: Sequence[str], read: Any) -> None:
    """Fill the parameters ``names`` of ``module`` with ``read(name)``."""
    for name in names:
        assign(module, name, read(name))


def release(module: nn.Module) -> None:
    """Put every parameter of ``module`` on the ``meta`` device, which frees its memory."""
    for name, parameter in list(module.named_parameters()):
        assign(module, name, parameter.detach().to("meta"))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
