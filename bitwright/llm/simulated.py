"""Simulations of models with given codes, and files of whole graphs from them."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.spec import Preset, weight_spec
from bitwright.core.placement.config import make_rules
from bitwright.errors import ConfigError, close_matches
from bitwright.export.files.onnx_file import free_memory
from bitwright.llm.checkpoint import check_room
from bitwright.llm.files.table import FILE_FORMATS, GRAPHS

logger = logging.getLogger("bitwright")


def check_kind(to: str) -> None:
    """Refuse an unknown kind of files.

    Raises:
        ConfigError: there is none of this name.
    """
    known = (*FILE_FORMATS, *GRAPHS)
    if to not in known:
        raise ConfigError(
            "to", f"there is no kind of files {to!r}{close_matches(to, known)}", f"use one of {', '.join(known)}"
        )


def check_graph(to: str, out: Any, elements: int) -> None:
    """Refuse, before any work, files of a graph with ``elements`` numbers that cannot be made.

    Raises:
        ConfigError: the package that writes them is not installed.
        ModelError: the disk has too little room.
    """
    check_room(Path(out), 2 * elements, f"writing {to} files")
    check_room(Path(tempfile.gettempdir()), 2 * elements, f"making {to} files")
    if to == "openvino" and importlib.util.find_spec("openvino") is None:
        raise ConfigError("to", "openvino is not installed, and writes its files", "pip install 'bitwright[openvino]'")


def simulation_of(model: nn.Module, found: Mapping[str, Encoding]) -> Any:
    """A calibrated simulation with these codes, and all else in float.

    Args:
        model: has the numbers that the codes stand for, and becomes the simulated one.
        found: encodings of the quantized parameters.

    Raises:
        ConfigError: see :func:`_give_codes`.
    """
    from bitwright.torch.simulation.quantsim import QuantizationSimModel

    rules = replace(make_rules(None, Preset(weight_spec("int8"), None)), ends="as others")
    sim = QuantizationSimModel(model, {"input_ids": torch.arange(1, 9)[None]}, config_file=rules, in_place=True)
    _give_codes(sim, found)
    sim.compute_encodings(progress=False)
    return sim


def write_graph(sim: Any, to: str, out: Path, tokenizer: Path | None) -> None:
    """Write a simulated language model as a file of :data:`GRAPHS`.

    Its weights are on their grids and do not change, so that no copies of them are made. Samples of every place are left out,
    with a note in the log, where a session of the file, which computes all its weights in float32, would fill more than half of
    the free memory.
    """
    from bitwright.llm.decoder_export import export_decoder
    from bitwright.llm.openvino_export import export_openvino

    named = None if tokenizer is None else str(tokenizer)
    parameters = dict(sim.model.named_parameters())
    for name, (part, axes) in sim._read_parameters(sim.quantizers).items():
        if sim.quantizers[name].enabled:
            sim.quantizers[name].quantizer.hold(parameters[part].permute(axes))
    if to == "openvino":
        export_openvino(sim, out, tokenizer=named)
        return
    needed, free = 4 * sum(parameter.numel() for parameter in sim.model.parameters()), free_memory()
    options: dict[str, Any] = {}
    if 2 * needed > free:
        options["samples"] = False
        logger.info(
            "%s: without samples, because a session of the file takes %.2f GiB and %.2f GiB of memory are free; verify compares "
            "generated tokens", out, needed / 2**30, free / 2**30,
        )  # fmt: skip
    export_decoder(sim, out, tokenizer=named, attention="plain" if to == "onnx" else "auto", **options)


def _give_codes(sim: Any, found: Mapping[str, Encoding]) -> None:
    """Give the sites of weights the encodings of these codes, and leave all others in float.

    Raises:
        ConfigError: a parameter that no site reads whole.
    """
    reads = sim._read_parameters(sim.quantizers)
    for name, site in sim.quantizers.items():
        part, axes = reads.get(name, ("", ()))
        if part in found:
            site.quantizer.take(found[part].permuted(axes))
            site.frozen = True
        else:
            site.enabled = False
    left = found.keys() - {part for part, _ in reads.values()}
    if left:
        raise ConfigError(
            min(left),
            f"{len(left)} of {len(found)} quantized parameters are read in parts and would be in float in the file",
            f"leave them in float with a rule, --rule 'role:expert=float' for experts, or --rule '{min(left)}=float'",
        )
