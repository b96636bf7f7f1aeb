"""The kinds of checkpoint files, one row each, and the two calls that use them; other packages add kinds."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.registry import Registry
from bitwright.errors import ConfigError, ExportError, ModelError, close_matches
from bitwright.export.files.atomic import AnyPath, settle
from bitwright.llm.files import compressed_tensors, gguf, gptq_awq, torchao
from bitwright.llm.files.common import Extras, FileFormat, check_folder, check_room, check_weight, whole_folder
from bitwright.llm.packed import (
    LayerInput,
    PackedWeight,
    Weight,
    WeightPlan,
    cache_encodings,
    layer_inputs,
    packed_weights,
)
from bitwright.llm.packed import plans as planned_weights

#: files of a whole model in memory, which are made of a simulation
GRAPHS = ("genai", "onnx", "openvino")
_OWN = (compressed_tensors.FORMAT, gguf.FORMAT, torchao.FORMAT, *gptq_awq.FORMATS)


def _checked_row(name: str, row: Any) -> FileFormat:
    """A row of another package, or a function that returns it."""
    found = row() if callable(row) and not isinstance(row, FileFormat) else row
    if not isinstance(found, FileFormat) or found.name != name:
        raise ConfigError(
            f"files {name!r}", f"{found!r:.100} is not a FileFormat of that name", "register a FileFormat of that name"
        )
    if name in GRAPHS:
        problem = "files of that name are made of a simulation"
        raise ConfigError(f"files {name!r}", problem, f"give it a name other than {', '.join(GRAPHS)}")
    return found


FILE_FORMATS: Registry[FileFormat] = Registry("files", {row.name: row for row in _OWN}, _checked_row)


#: what numpy, torch and the interpreter raise where fields of damaged files do not go together
_MISFITS = (
    LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, AssertionError, struct.error,
)  # fmt: skip


def find_format(name: str) -> FileFormat:
    """Look up the format called ``name``.

    Raises:
        ConfigError: there is none; the message lists close names.
    """
    if name in FILE_FORMATS:
        return FILE_FORMATS[name]
    raise ConfigError(
        f"format {name!r:.100}",
        f"there is no kind of checkpoint files of this name{close_matches(str(name), FILE_FORMATS)}",
        f"use one of {', '.join(FILE_FORMATS)}",
    )


def check_checkpoint(folder: AnyPath, plans: Sequence[WeightPlan], *, to: str, extras: Extras) -> FileFormat:
    """Refuse weights and settings that cannot be written, before any work.

    Args:
        folder: where the files are to go.
        plans: of all weights, quantized or not.
        to: the kind of files, a row of :data:`FILE_FORMATS`.
        extras: what is stored beside the weights.

    Raises:
        ConfigError: there is no such kind of files.
        GranularityError: groups do not divide the rows of a weight; names the sizes that do.
        ExportError: the files cannot hold a weight or the model (names the kinds that can), the disk has too little
            room, or the folder holds another model.
    """
    row = find_format(to)
    for plan in plans:
        check_weight(plan, row, FILE_FORMATS.values())
    row.check(plans, extras)
    check_folder(folder)
    check_room(folder, plans, row)
    return row


def write_checkpoint(
    folder: AnyPath,
    weights: Iterable[Weight],
    config: Mapping[str, Any],
    *,
    to: str = "compressed-tensors",
    tokenizer: Iterable[AnyPath] = (),
    plans: Sequence[WeightPlan] | None = None,
    inputs: Mapping[str, LayerInput] | None = None,
    cache: Mapping[str, tuple[Encoding, Encoding]] | None = None,
) -> None:
    """Write a quantized language model as files that an engine loads; all files appear, or none.

    Args:
        folder: new, empty, or written by an earlier call.
        weights: every parameter of the model in turn, as :func:`bitwright.llm.packed_weights` yields them. They are taken
            one at a time; shards of 1 GiB are held.
        config: of the model, the content of its ``config.json``.
        to: the kind of files, a row of :data:`FILE_FORMATS`.
        tokenizer: paths of tokenizer files.
        plans: what ``weights`` will yield, so that everything is checked before the first is made; taken from ``weights``
            where these are a list.
        inputs: quantized inputs of layers, by the layer's name, as :func:`bitwright.llm.layer_inputs` finds them.
        cache: encodings of keys and values by the name of the attention module, as :func:`bitwright.llm.cache_encodings` finds
            them.

    Raises:
        ConfigError, GranularityError, ExportError: see :func:`check_checkpoint`; or the disk is full.
    """
    extras = Extras(dict(config), [Path(p) for p in tokenizer], dict(inputs or {}), dict(cache or {}))
    if plans is None and isinstance(weights, Sequence):
        plans = [weight.plan for weight in weights]
    row = check_checkpoint(folder, plans or (), to=to, extras=extras)
    with whole_folder(folder, row) as staging:
        row.write(staging, _checked(weights, row), extras)


def write_simulation(
    folder: AnyPath, sim: Any, *, to: str = "compressed-tensors", tokenizer: Iterable[AnyPath] = ()
) -> None:
    """Write the model of a simulation as files that an engine loads: its quantized weights, inputs of layers and cache.

    Args:
        folder: new, empty, or written by an earlier call.
        sim: a calibrated :class:`bitwright.torch.QuantizationSimModel` of a model of transformers.
        to: the kind of files, a row of :data:`FILE_FORMATS`.
        tokenizer: paths of tokenizer files.

    Raises:
        ModelError: the model has no configuration of transformers.
        ConfigError, GranularityError, ExportError: see :func:`write_checkpoint`; or the simulation quantizes activations
            other than inputs of layers and the cache.
    """
    config = getattr(sim.model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise ModelError(
            type(sim.model).__name__,
            "it has no configuration of transformers, which the files begin with",
            "use write_checkpoint(folder, packed_weights(sim), config)",
        )
    write_checkpoint(
        folder, packed_weights(sim), config.to_dict(), to=to, tokenizer=tokenizer, plans=planned_weights(sim),
        inputs=layer_inputs(sim), cache=cache_encodings(sim),
    )  # fmt: skip


def _fitting(weights: Iterator[Weight], place: Path, row: FileFormat) -> Iterator[Weight]:
    """Yield the weights; an error for a missing field or inconsistent arrays names the weight before it."""
    where = "at the first weight"
    while True:
        try:
            weight = next(weights, None)
            if isinstance(weight, PackedWeight):
                weight.check()
        except (ExportError, ConfigError, ModelError):
            raise
        except _MISFITS as error:
            problem = f"damaged {row.name} files, found {where}: {type(error).__name__}: {error}"
            raise ExportError(str(place), problem, "copy the whole folder again, or write the model again") from error
        if weight is None:
            return
        where = f"after {weight.name}"
        yield weight


def _checked(weights: Iterable[Weight], row: FileFormat) -> Iterator[Weight]:
    for weight in weights:
        check_weight(weight.plan, row, FILE_FORMATS.values())
        yield weight


def kind_of(folder: Path) -> FileFormat | None:
    """The kind of the files in a folder, ours before those of other packages; ``None`` where no row recognises them."""
    rows = (FILE_FORMATS[name] for name in FILE_FORMATS)
    return next((row for row in rows if folder.is_dir() and row.recognises(folder)), None)


def read_checkpoint(folder: AnyPath) -> Iterator[Weight]:
    """The weights of a folder that :func:`write_checkpoint` or another tool wrote, one at a time.

    Raises:
        ExportError: it is no kind of files that is known here, or is damaged; found where the weight is read.
    """
    place = Path(folder)
    settle(place)
    row = kind_of(place)
    if row is not None:
        return _fitting(row.read(place), place, row)
    raise ExportError(
        str(folder),
        "it holds no quantized checkpoint of a kind that is read here",
        f"name a folder with files of {', '.join(FILE_FORMATS)}",
    )
