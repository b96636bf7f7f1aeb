"""Compare the tokens of a decoder file with those of its simulation, one by one, in ONNX Runtime with the file's own cache.

The tokens of the simulation are stored beside the file (:class:`Generation`).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.compare.runtime import EXACT_SUMS
from bitwright.core.files import read_document
from bitwright.errors import ExportError
from bitwright.runtimes.onnxruntime import new_session, refusals, session_options


@dataclass(frozen=True)
class Generated:
    """A prompt, and the simulation's continuation.

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
    """Inputs and outputs of a decoder file, and the tokens of its simulation.

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
    """Write a generation as JSON."""
    path.write_text(json.dumps(asdict(generation)) + "\n", encoding="utf-8")


def read_generation(path: str | os.PathLike[str]) -> Generation:
    """Read the file of :func:`write_generation`.

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


#: dtype of a cache -> its number in ONNX
_TYPES = {"float32": 1, "int8": 3, "float16": 10, "bfloat16": 16}
#: of the largest logit: a token whose logit is less than that ahead of the next one is decided by the order of sums
_CLOSE = {"float32": 1e-4, "int8": 1e-4}
_CLOSE_IN_HALF = 2e-2


@dataclass(frozen=True)
class GeneratedRow:
    """One prompt.

    Attributes:
        prompt: its number, from 0.
        tokens: how many the simulation generated.
        equal: how many of them the file generates, after the tokens of the simulation before each.
        close: how many others were decided by rounding: their logit is ahead of the next one by less than two orders of summation
            differ by.
        first: index of the first other token that was not; ``None`` if none.
    """

    prompt: int
    tokens: int
    equal: int
    close: int
    first: int | None

    _also = ("ok",)

    @property
    def ok(self) -> bool:
        """Every token is the simulation's, or was decided by rounding."""
        return self.first is None

    def __str__(self) -> str:
        close = f", {self.close} decided by rounding" if self.close else ""
        wrong = "" if self.first is None else f"; token {self.first} is the first that is not: FAILS"
        return f"prompt {self.prompt}: {self.equal} of {self.tokens} generated tokens are those of the simulation{close}{wrong}"


def verify_generation(path: Path) -> tuple[GeneratedRow, ...]:
    """Run the file that ``<prefix>_generation.json`` speaks of: a prefill of every prompt, then one token at a time.

    Args:
        path: of the JSON file; the model lies beside it.

    Raises:
        ExportError: a file is missing or damaged, or the runtime refuses the model.
    """
    generation = read_generation(path)
    model = path.with_name(generation.model)
    try:
        session = new_session(model, session_options(entries=EXACT_SUMS))
        return tuple(_row(session, generation, i, prompt) for i, prompt in enumerate(generation.prompts))
    except refusals() as error:
        problem = f"ONNX Runtime does not generate with it: {str(error).strip().splitlines()[0]}"
        raise ExportError(
            str(model), problem, "export the decoder again, with attention='plain' for other runtimes"
        ) from error


def _row(session: object, generation: Generation, number: int, generated: Generated) -> GeneratedRow:
    made = generate(session, generation, generated.prompt, generated.tokens)
    limit = _CLOSE.get(generation.dtype, _CLOSE_IN_HALF)
    other = [i for i, (one, two) in enumerate(zip(made, generated.tokens, strict=True)) if one != two]
    wrong = [i for i in other if generated.margins[i] >= limit]
    equal, close = len(made) - len(other), len(other) - len(wrong)
    return GeneratedRow(number, len(made), equal, close, wrong[0] if wrong else None)


def generate(session: object, generation: Generation, prompt: tuple[int, ...], follow: tuple[int, ...]) -> list[int]:
    """The most likely token after ``prompt``, then after it and each of the tokens of ``follow`` but the last.

    Args:
        session: of ONNX Runtime, of the file.
        generation: tells its inputs and outputs.
        prompt, follow: token ids.
    """
    import onnxruntime as ort

    kind = _TYPES[generation.dtype]
    cache = [
        ort.OrtValue.ortvalue_from_shape_and_type([1, heads, 0, size], kind, "cpu")
        for heads, size in generation.shapes
        for _ in ("key", "value")
    ]
    known = {i.name for i in session.get_inputs()}  # type: ignore[attr-defined]
    made: list[int] = []
    tokens, past = list(prompt), 0
    for i in range(len(follow)):
        new = len(tokens)
        feeds = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, past + new), np.int64),
            "position_ids": np.arange(past, past + new, dtype=np.int64)[None],
        }
        given = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items() if name in known}
        given |= {name: value for name, value in zip(generation.past, cache, strict=True) if name in known}
        logits, *cache = session.run_with_ort_values(["logits", *generation.present], given)  # type: ignore[attr-defined]
        made.append(int(np.argmax(logits.numpy()[0, -1])))
        tokens, past = [follow[i]], past + new
    return made
