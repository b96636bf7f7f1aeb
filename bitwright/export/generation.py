"""What a simulated language model generated, kept beside its file, so that the file can be compared with it token by token."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bitwright.core.files import read_document
from bitwright.errors import ExportError


@dataclass(frozen=True)
class Generated:
    """A prompt, and what the simulation continues it with.

    Attributes:
        prompt, tokens: token ids.
        margins: for each of ``tokens``, by how much its logit is larger than the next one's, as a share of the largest logit:
            where it is below rounding, another order of summation may choose the other token.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class Generation:
    """How a decoder file is run, and what its simulation generated.

    Attributes:
        model: name of the file.
        inputs: of the file, without the cache.
        past, present: inputs and outputs that hold the cache, key and value of every layer in turn.
        shapes: per layer, heads and size of a head.
        dtype: of the cache: ``float32``, ``float16``, ``bfloat16``, ``int8``.
        prompts: what was generated.
    """

    model: str
    inputs: tuple[str, ...]
    past: tuple[str, ...]
    present: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    dtype: str
    prompts: tuple[Generated, ...]


def write_generation(path: Path, generation: Generation) -> None:
    """Write it as JSON."""
    path.write_text(json.dumps(asdict(generation)) + "\n", encoding="utf-8")


def read_generation(path: str | os.PathLike[str]) -> Generation:
    """Read what :func:`write_generation` wrote.

    Raises:
        ExportError: the file is missing or damaged.
    """
    document: Any = read_document(Path(path), ExportError)
    try:
        prompts = tuple(
            Generated(tuple(p["prompt"]), tuple(p["tokens"]), tuple(map(float, p["margins"])))
            for p in document["prompts"]
        )
        inputs, past, present = (tuple(map(str, document[key])) for key in ("inputs", "past", "present"))
        shapes = tuple((int(heads), int(size)) for heads, size in document["shapes"])
        return Generation(str(document["model"]), inputs, past, present, shapes, str(document["dtype"]), prompts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"it is not what export_decoder writes: {type(error).__name__}: {error}"
        raise ExportError(os.fspath(path), problem, "export the decoder again") from error
