"""Compare the tokens of a decoder file with those of its simulation, one by one, in ONNX Runtime with the file's own cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bitwright.compare.runtime import EXACT_SUMS
from bitwright.errors import ExportError
from bitwright.export.generation import Generated, Generation, read_generation
from bitwright.runtimes.onnxruntime import new_session, refusals, session_options

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
