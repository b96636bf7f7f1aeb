"""Shared parts of the checkpoint writers: table row, checks before any work, shards, tokenizer files."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright import __version__
from bitwright.core.files import read_document
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import QuantSpec
from bitwright.errors import ExportError, with_article
from bitwright.export.files.atomic import AnyPath, atomic_files, read_error, settle
from bitwright.llm.packed import FloatWeight, LayerInput, Layout, PackedWeight, Weight, WeightPlan, check_groups

if TYPE_CHECKING:
    import torch

MANIFEST = "bitwright_files.json"
#: files beside the weights that a model's folder has, where it has them
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
logger = logging.getLogger("bitwright")

_MAX_CONFIG = 64 << 20  # bytes of a JSON file that is read
_ROOM = 1.02  # of the bytes that are expected: headers, configuration


@dataclass(frozen=True)
class Extras:
    """Contents of a checkpoint other than the weights.

    Attributes:
        config: of the model, as ``config.json`` has it.
        tokenizer: paths of tokenizer files, which are copied or read.
        inputs: quantized inputs of layers, by the layer's name.
        cache: keys and values of attention, by the name of the attention module.
    """

    config: Mapping[str, Any]
    tokenizer: Sequence[Path] = ()
    inputs: Mapping[str, LayerInput] = field(default_factory=dict)
    cache: Mapping[str, tuple[Encoding, Encoding]] = field(default_factory=dict)


@dataclass(frozen=True)
class FileFormat:
    """One kind of checkpoint files.

    Attributes:
        name: of the row.
        engine: programs that load them.
        holds: formats in words, for tables and messages.
        refuses: why a weight of this plan cannot be stored; empty where it can.
        size: bytes that a weight takes.
        write: fills a folder that is there and empty; returns the names of the files.
        read: yields the weights that a folder holds.
        recognises: whether a folder holds files of this kind.
        check: refuses a model as a whole: an architecture, inputs, a cache that the files cannot say.
        fitted: a spec with the scales that the files store, where it asks for none in particular.
        free_zero_points: whether it stores some zero points that are real numbers.
    """

    name: str
    engine: str
    holds: str
    refuses: Callable[[WeightPlan], str]
    size: Callable[[WeightPlan], float]
    write: Callable[[Path, Iterable[Weight], Extras], None]
    read: Callable[[Path], Iterator[Weight]]
    recognises: Callable[[Path], bool]
    check: Callable[[Sequence[WeightPlan], Extras], None]
    fitted: Callable[[QuantSpec], QuantSpec] = lambda spec: spec
    free_zero_points: bool = False


def check_weight(plan: WeightPlan, row: FileFormat, others: Iterable[FileFormat]) -> None:
    """Refuse a weight that a kind of files cannot store.

    Raises:
        GranularityError: its groups do not divide the summed axis; names the sizes that do.
        ExportError: the format is not one of these files; names kinds of files that hold it, or of a stack of matrices the
            rule that leaves it in float.
    """
    layout = plan.layout
    if layout is None:
        return
    check_groups(plan)
    why = _why_not(plan, row)
    if not why:
        return
    able = [other.name for other in others if other is not row and any(not _why_not(p, other) for p in _fitted(plan))]
    instead = (
        f"write {' or '.join(able)}, which hold it" if able else "write a graph, which holds it (genai, onnx, openvino)"
    )
    remedy = f"{instead}; or quantize it to what {row.name} holds: {row.holds}"
    if len(plan.shape) > 2:
        remedy = (
            "leave stacks of experts in float with the rule --rule 'role:expert=float' (rules={'role:expert': None}); "
            "in a simulation, set enabled = False of the quantizers of such weights"
        )
    raise ExportError(plan.name, f"{layout} cannot be stored in {row.name} files ({row.engine}): {why}", remedy)


def _fitted(plan: WeightPlan) -> Iterator[WeightPlan]:
    """Yield the plan, and plans with the half scales that some files give to integers by themselves."""
    yield plan
    if plan.layout is not None and isinstance(plan.layout.format, IntFormat) and plan.layout.scale_format == "float32":
        name = "float16" if plan.layout.symmetric else "float12"
        yield replace(plan, layout=replace(plan.layout, scale_format=name))


def _why_not(plan: WeightPlan, row: FileFormat) -> str:
    """The reason why files of a kind have no place for a weight; empty where they have."""
    free = plan.layout is not None and plan.layout.float_zero_point
    return "it stores zero points as integers" if free and not row.free_zero_points else row.refuses(plan)


def check_room(folder: AnyPath, plans: Iterable[WeightPlan], row: FileFormat) -> None:
    """Refuse a disk without room for the files.

    Raises:
        ExportError: with the bytes that are needed and those that are free.
    """
    need = int(sum(row.size(plan) for plan in plans) * _ROOM)
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need:
        raise ExportError(
            str(folder),
            f"the {row.name} files take about {need / 1e6:.1f} MB, and the disk has {free / 1e6:.1f} MB free",
            "free some space or name a folder on another disk; nothing was written",
        )


def check_folder(folder: AnyPath) -> list[str]:
    """The names of files in ``folder`` that an earlier call wrote and the next one replaces.

    Raises:
        ExportError: it is a file, or holds a model that was not written here.
    """
    place = Path(folder)
    if place.is_file():
        raise ExportError(str(folder), "there is a file of this name", "name a folder, or move the file away")
    if not place.is_dir():
        return []
    settle(place)
    if (place / MANIFEST).is_file():
        listed = read_json(place / MANIFEST).get("files", [])
        return [name for name in listed if isinstance(name, str)]
    models = sorted(path.name for path in place.iterdir() if path.suffix in (".safetensors", ".gguf", ".bin"))
    if models:
        raise ExportError(
            str(folder),
            f"there is another model in it ({', '.join(models[:3])}), which the files would be mixed with",
            "name a new or an empty folder",
        )
    return []


@contextmanager
def whole_folder(folder: AnyPath, row: FileFormat) -> Iterator[Path]:
    """A hidden folder whose files move to ``folder`` when all are written; the manifest names them."""
    stale = check_folder(folder)
    with atomic_files(folder, name=MANIFEST, create=True, stale=stale) as staging:
        yield staging
        names = sorted(path.name for path in staging.iterdir())
        content = {"format": row.name, "engine": row.engine, "bitwright": __version__, "files": [*names, MANIFEST]}
        (staging / MANIFEST).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ExportError: there is none, it is damaged, or it holds something else.
    """
    document = read_document(path, ExportError, max_bytes=_MAX_CONFIG, unreadable=read_error)
    if not isinstance(document, dict):
        raise ExportError(
            str(path), f"it holds {with_article(type(document).__name__)}, not an object", "write the model again"
        )
    return document


def copy_tokenizer(paths: Iterable[Path], folder: Path) -> None:
    """Copy tokenizer files.

    Raises:
        ExportError: one of them cannot be read.
    """
    for path in paths:
        try:
            shutil.copyfile(path, folder / path.name)
        except OSError as error:
            if error.filename == str(path):
                raise read_error(path, error) from error
            raise


def tokenizer_files(folder: AnyPath) -> list[Path]:
    """The tokenizer files that exist in a model's folder."""
    return [path for name in TOKENIZER_FILES if (path := Path(folder, name)).is_file()]


class Shards:
    """Tensors written to ``model-00001-of-00003.safetensors`` and so on, with their index, by shards of limited size.

    Args:
        folder: where they go.
        most: bytes of tensors that are held before a shard is written.
    """

    def __init__(self, folder: Path, most: int = 1 << 30) -> None:
        self.folder, self.most = folder, most
        self._held: dict[str, torch.Tensor] = {}
        self._bytes, self._total = 0, 0
        self._shards: list[list[str]] = []
        self.metadata: dict[str, str] = {}  # of every shard

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor."""
        tensor = tensor.detach().to("cpu").contiguous()
        if self._held and self._bytes + tensor.nbytes > self.most:
            self._flush()
        self._held[name] = tensor
        self._bytes += tensor.nbytes

    def _part(self, index: int) -> Path:
        return self.folder / f"part-{index}.safetensors"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._held, self._part(len(self._shards)), {"format": "pt"})
        self._shards.append(list(self._held))
        self._total += self._bytes
        self._held, self._bytes = {}, 0

    def finish(self) -> None:
        """Write the last shard, and the index where there are several."""
        from safetensors.torch import load_file, save_file

        self._flush()
        count = len(self._shards)
        if self.metadata:
            for i in range(count):  # known only now
                save_file(load_file(self._part(i)), self._part(i), {"format": "pt", **self.metadata})
        if count == 1:
            self._part(0).rename(self.folder / "model.safetensors")
            return
        where = {}
        for i, names in enumerate(self._shards):
            final = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._part(i).rename(self.folder / final)
            where.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total}, "weight_map": where}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


class StoredTensors:
    """The tensors of a folder's safetensors files, read one at a time.

    Raises:
        ExportError: there are none, a shard that the index names is missing, or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if single.is_file():
            files = [single]
        elif index.is_file():
            files = sorted({folder / str(name) for name in read_json(index).get("weight_map", {}).values()})
        elif len(files := sorted(folder.glob("*.safetensors"))) != 1:  # AutoGPTQ names it after bits and group
            raise ExportError(
                str(folder), "there is no model.safetensors in it, nor an index of shards", "name the folder of a model"
            )
        self._where: dict[str, Path] = {}
        for file in files:
            if not file.is_file():
                raise ExportError(
                    str(file), "this shard is named by the index and missing", "copy the whole folder again"
                )
            with self._opened(file) as opened:
                self._where.update(dict.fromkeys(opened.keys(), file))

    @contextmanager
    def _opened(self, file: Path) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, "pt") as opened:
                yield opened
        except SafetensorError as error:
            raise ExportError(str(file), f"it is damaged: {error}", "copy or write the file again") from error

    def metadata(self) -> dict[str, str]:
        """The metadata of all files together."""
        found: dict[str, str] = {}
        for file in dict.fromkeys(self._where.values()):
            with self._opened(file) as opened:
                found.update(opened.metadata() or {})
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._where:
            raise ExportError(str(self.folder), f"there is no tensor {name} in it", "write the model again")
        with self._opened(self._where[name]) as opened:
            found: torch.Tensor = opened.get_tensor(name)
            return found


def is_table(name: str) -> bool:
    """Whether a parameter is a table that tokens or positions look up, by the names that transformers gives these."""
    layer = name.removesuffix(".weight").rpartition(".")[2]
    return ("embed" in layer and layer != "embed_out") or layer in ("wte", "wpe")


def is_table_of_tokens(name: str) -> bool:
    """Whether a parameter is the table of tokens, which an output layer may be tied to, and not that of positions."""
    layer = name.removesuffix(".weight").rpartition(".")[2]
    return is_table(name) and layer != "wpe" and "position" not in layer


def stored_table(weight: PackedWeight, config: Mapping[str, Any]) -> torch.Tensor:
    """A quantized table, dequantized to the model's dtype, since engines load no packed tables."""
    import torch

    logger.warning(
        "%s: stored in float, as the numbers that its %s codes stand for: engines load no packed tables",
        weight.name, weight.format.name,
    )  # fmt: skip
    kind = asked_dtype(config)
    return torch.from_numpy(weight.dequantize()).to(getattr(torch, kind))


def as_stored(
    weights: Iterable[Weight], config: dict[str, Any], floats: list[tuple[str, int]]
) -> Iterator[tuple[str, torch.Tensor | PackedWeight]]:
    """The weights as engines load them, with their names: numbers in float, or codes of a linear layer.

    Engines load no packed tables, so a quantized table is stored as the float numbers that its codes stand for; where it is
    tied to the output layer, that layer is stored apart, as codes, and ``config`` says so.

    Args:
        weights: of the model.
        config: of the model.
        floats: takes the name and the number of axes of each weight that leaves a linear layer in float.
    """
    tied = bool(config.get("tie_word_embeddings"))
    for weight in weights:
        table = is_table(weight.name)
        ties = tied and len(weight.shape) == 2 and is_table_of_tokens(weight.name)
        if isinstance(weight, FloatWeight):
            yield weight.name, weight.values
            if ties or (len(weight.shape) == 2 and not table):
                floats.append(("lm_head.weight" if ties else weight.name, len(weight.shape)))
            continue
        yield weight.name, stored_table(weight, config) if table else weight
        if ties:
            yield "lm_head.weight", weight
            config["tie_word_embeddings"] = False


def asked_dtype(config: Mapping[str, Any]) -> str:
    """Name of the dtype in a model's configuration."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def stored_dtype(config: Mapping[str, Any], dtypes: set[torch.dtype], only: str = "") -> str:
    """Name of the compute dtype in which an engine loads weights and scales without rounding.

    Args:
        config: of the model.
        dtypes: of its float weights and of its scales.
        only: why it is bfloat16 whatever these are, where it is.
    """
    if only:
        dtype, why = "bfloat16", only
    else:
        dtype = dtype_name(*dtypes) if len(dtypes) == 1 else "float32"
        why = "some weights or scales are stored so; scales of the model's own format keep it"
    if dtype != asked_dtype(config):
        logger.warning("the engine will compute in %s, not in %s: %s", dtype, asked_dtype(config), why)
    return dtype


def refuse_inputs(extras: Extras, name: str) -> None:
    """Refuse quantized inputs and caches for files that hold only weights.

    Raises:
        ExportError: there are some.
    """
    if extras.inputs or extras.cache:
        what = "inputs of layers" if extras.inputs else "the cache"
        raise ExportError(
            what,
            f"they are quantized, and {name} files say nothing of them",
            "write compressed-tensors, or quantize weights alone",
        )


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def bits_of(layout: Layout | None) -> float:
    """Bits per element with scales in float32 and without zero points; float weights count as 32."""
    if layout is None:
        return 32.0
    return layout.bits + (64.0 / layout.group if isinstance(layout.group, int) else 0.0)
