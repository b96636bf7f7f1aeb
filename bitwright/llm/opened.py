"""Simulate folders quantized by this package or another tool, and convert them to files of other engines.

The codes stay what they are: a simulation computes with the numbers that they stand for, and files of another kind hold the
same codes and scales. Where a kind of files has smaller groups, a group becomes several with one scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.granularity import PerBlock, PerChannel
from bitwright.errors import ModelError, checks_arguments, some_of
from bitwright.llm.blocks import make_buffers
from bitwright.llm.checkpoint import assign, empty_model, is_converted, read_config, tied_parameters
from bitwright.llm.coded import with_codes
from bitwright.llm.files.common import FileFormat, tokenizer_files
from bitwright.llm.files.table import FILE_FORMATS, read_checkpoint, write_checkpoint
from bitwright.llm.packed import FloatWeight, PackedWeight, Weight
from bitwright.llm.simulated import GRAPHS, check_graph, check_kind, simulation_of, write_graph

_GROUPS = (256, 128, 64, 32, 16)  # sizes that files have


@checks_arguments
def simulate_quantized(folder: Any) -> Any:
    """A simulation of a folder whose weights are quantized already, by GPTQ, AWQ, llm-compressor, torchao or this package.

    Args:
        folder: with ``config.json`` and safetensors files of a kind of ``bitwright.llm.FILE_FORMATS``.

    Returns:
        A calibrated :class:`bitwright.torch.QuantizationSimModel`, float32. Its weights are the numbers that the codes stand
        for, their encodings are frozen, and activations are in float.

    Raises:
        ExportError: it holds no quantized checkpoint, or a damaged one.
        ModelError: transformers makes no model of its configuration, or tensors are missing or of another shape than the model's.
    """
    place = Path(folder)
    model = _empty(place)
    found: dict[str, Encoding] = {}
    for weight in _of_model(place, model):
        if isinstance(weight, PackedWeight):
            found[weight.name] = weight.encoding
            assign(model, weight.name, torch.from_numpy(weight.dequantize()))
        else:
            assign(model, weight.name, weight.values.float())
    return simulation_of(_finished(model), found)


def coded_model(folder: Path) -> nn.Module:
    """The model of a quantized folder, float32, whose linear layers hold the codes.

    Raises:
        ExportError, ModelError: see :func:`simulate_quantized`.
    """
    model = _empty(folder)
    return _finished(with_codes(model, _of_model(folder, model), in_place=True))


@checks_arguments
def convert(folder: Any, to: str, out: Any) -> None:
    """Convert a quantized folder to files of another kind, with the same codes and scales.

    Weights are read and written one at a time; ``genai``, ``onnx`` and ``openvino`` hold the model in memory.

    Args:
        folder: see :func:`simulate_quantized`.
        to: kind of files, a row of ``bitwright.llm.FILE_FORMATS``, or ``genai``, ``onnx`` or ``openvino``.
        out: a new or empty folder.

    Raises:
        ConfigError: there is no such kind of files.
        GranularityError, ExportError: the files cannot hold the codes, see :func:`bitwright.llm.write_checkpoint`.
        ModelError: see :func:`simulate_quantized`.
    """
    check_kind(to)
    place = Path(folder)
    if to in GRAPHS:
        model = _empty(place)
        check_graph(to, out, sum(parameter.numel() for parameter in model.parameters()))
        write_graph(simulate_quantized(place), to, Path(out), place if tokenizer_files(place) else None)
        return
    config = read_config(place)
    config.pop("quantization_config", None)
    row = FILE_FORMATS[to]

    def weights() -> Iterator[Weight]:
        for weight in _of_model(place, _empty(place)):
            yield _regrouped(weight, row) if isinstance(weight, PackedWeight) else weight

    plans = [weight.plan for weight in weights()]
    write_checkpoint(out, weights(), config, to=to, plans=plans, tokenizer=tokenizer_files(place))


def _empty(folder: Path) -> nn.Module:
    return empty_model(folder, read_config(folder)).float()


def _finished(model: nn.Module) -> nn.Module:
    """Make the buffers that no file holds, and tie what the configuration ties."""
    make_buffers(model)
    model.tie_weights()  # type: ignore[operator]
    return model.eval()


def _of_model(folder: Path, model: nn.Module) -> Iterator[Weight]:
    """The weights of a folder under the names and in the orientation of the model's parameters.

    Raises:
        ModelError: a tensor that the model has no place for, or one of another shape than its place; parameters that the
            folder lacks; tensors that transformers joins when it loads them.
    """
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    seen = set()
    for weight in read_checkpoint(folder):
        name = next(
            (n for n in (weight.name, prefix + weight.name, weight.name.removeprefix(prefix)) if n in state), None
        )
        if name is None:
            _refuse_unknown(folder, weight, model)
            continue
        weight = _oriented(weight, model, name)
        if weight.shape != state[name]:
            raise ModelError(
                str(folder), f"{weight.name} has shape {weight.shape}, where config.json makes it {state[name]}",
                "copy the shards and config.json of one and the same model",
            )  # fmt: skip
        seen.add(name)
        yield replace(weight, name=name)
    tied = tied_parameters(model)
    missing = [name for name in state if name not in seen and not seen.intersection(tied.get(name, ()))]
    if missing:
        raise ModelError(
            str(folder), f"{len(missing)} of {len(state)} parameters are in no shard: {some_of(missing)}",
            "copy the shards and config.json of one and the same model",
        )  # fmt: skip


def _refuse_unknown(folder: Path, weight: Weight, model: nn.Module) -> None:
    """Pass over tensors that older tools store beside the weights: biases of zeros, constants of positions.

    Raises:
        ModelError: it is something else.
    """
    if isinstance(weight, FloatWeight) and (weight.name.endswith("rotary_emb.inv_freq") or not weight.values.any()):
        return
    problem = f"the model that transformers makes of config.json has no place for {weight.name}"
    if is_converted(model, [weight.name]):
        problem += ", which transformers joins with others when it loads float models"
    raise ModelError(str(folder), problem, "quantize the float model here, or open the folder in its own engine")


def _oriented(weight: Weight, model: nn.Module, name: str) -> Weight:
    """A weight with outputs in rows, in the layer's orientation: layers of GPT-2 have outputs in columns."""
    from transformers.pytorch_utils import Conv1D

    if not isinstance(weight, PackedWeight) or not isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D):
        return weight
    encoding = weight.encoding
    axis = encoding.granularity.axis if isinstance(encoding.granularity, PerBlock | PerChannel) else None
    if axis != (1 if isinstance(encoding.granularity, PerBlock) else 0):
        return weight
    return replace(weight, codes=np.ascontiguousarray(weight.codes.T), encoding=encoding.permuted((1, 0)))


def _regrouped(weight: PackedWeight, row: FileFormat) -> PackedWeight:
    """A weight in the largest groups, at most its own, that a kind of files supports; unchanged where it supports none."""
    held, encoding = weight.granularity, weight.encoding
    if len(weight.shape) != 2 or encoding.common is not None or not row.refuses(weight.plan):
        return weight
    if isinstance(held, PerChannel) and held.axis is not None:
        channel = held.axis % 2
        whole = PerBlock(weight.shape[1 - channel], 1 - channel, channel)
    elif isinstance(held, PerBlock):
        whole = held
    else:
        return weight
    assert whole.axis is not None
    for size in _GROUPS:
        if size < whole.size and whole.size % size == 0 and weight.shape[whole.axis] % whole.size == 0:
            made = replace(weight, encoding=_split(encoding, whole, whole.size // size))
            if not row.refuses(made.plan):
                return made
    return weight


def _split(encoding: Encoding, whole: PerBlock, count: int) -> Encoding:
    """An equal encoding with each group split into ``count``."""
    axis = whole.axis
    assert axis is not None

    def split(values: NDArray[Any]) -> NDArray[Any]:
        grouped = np.expand_dims(values, axis) if isinstance(encoding.granularity, PerChannel) else values
        return grouped.repeat(count, axis)

    shift = None if encoding.shift is None else split(encoding.shift)
    granularity = replace(whole, size=whole.size // count)
    return replace(
        encoding,
        scale=split(encoding.scale),
        zero_point=split(encoding.zero_point),
        shift=shift,
        granularity=granularity,
    )
