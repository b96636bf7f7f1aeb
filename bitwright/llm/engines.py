"""Run written files in their engine: logits and greedy tokens.

=====================  ============================  ==========================================
folder holds           engine                        package
=====================  ============================  ==========================================
``*.gguf``             llama.cpp                     ``xllamacpp``
``genai_config.json``  ONNX Runtime GenAI            ``onnxruntime_genai``
``openvino_model.xml``  OpenVINO                      ``openvino``
``config.json``        transformers (what vLLM reads)  ``transformers``, ``compressed_tensors``
the same, gptq or awq  transformers, with layers of codes  ``transformers``
=====================  ============================  ==========================================
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bitwright.errors import ConfigError, ModelError
from bitwright.llm.files.table import FILE_FORMATS, kind_of
from bitwright.llm.openvino_export import AS_SIMULATED

_MOST_LISTED = 16_384  # tokens whose probabilities llama.cpp is asked for in one answer


class Engine(Protocol):
    """A language model in an engine."""

    name: str

    def logits(self, tokens: Tensor) -> Tensor:
        """``[1, T]`` to ``[1, T, V]``, up to a constant in each position."""
        ...

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """Greedy continuation of ``tokens`` by ``count`` tokens."""
        ...


@dataclass
class Transformers:
    """A module of ``transformers``."""

    model: Any
    name: str = "transformers"

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """See :class:`Engine`."""
        found: Tensor = self.model(tokens, use_cache=False).logits
        return found.float()

    @torch.no_grad()
    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """See :class:`Engine`."""
        start = torch.tensor([list(tokens)])
        found = self.model.generate(
            start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=count,
            pad_token_id=self.model.generation_config.pad_token_id or 0,
        )  # fmt: skip
        made: list[int] = found[0, len(tokens) :].tolist()
        return made


class GenAI:
    """A folder in ONNX Runtime GenAI."""

    name = "onnxruntime-genai"

    def __init__(self, folder: Path) -> None:
        self._package = _needed("onnxruntime_genai", "genai")
        self._model = self._package.Model(str(folder))

    def _generator(self, length: int) -> Any:
        params = self._package.GeneratorParams(self._model)
        params.set_search_options(max_length=length, do_sample=False)
        return self._package.Generator(self._model, params)

    def logits(self, tokens: Tensor) -> Tensor:
        """See :class:`Engine`; the engine hands out the logits of the last token, so that tokens go in one by one."""
        row = tokens.reshape(-1).numpy().astype(np.int32)
        generator = self._generator(len(row) + 1)
        found = []
        for token in row:
            generator.append_tokens(np.array([token], np.int32))
            found.append(np.array(generator.get_logits()).reshape(-1))
        return torch.from_numpy(np.stack(found))[None].float()

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """See :class:`Engine`."""
        generator = self._generator(len(tokens) + count)
        generator.append_tokens(np.array(list(tokens), np.int32))
        made: list[int] = []
        while len(made) < count and not generator.is_done():
            generator.generate_next_token()
            made.append(int(generator.get_next_tokens()[0]))
        return made


class LlamaCpp:
    """A GGUF file run by llama.cpp."""

    name = "llama.cpp"

    def __init__(self, path: Path) -> None:
        package = _needed("xllamacpp", "gguf")
        params = package.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup = 0, 1, False
        self._server = package.Server(params)

    def _ask(self, **question: Any) -> dict[str, Any]:
        answer = self._server.handle_completions({"temperature": 0, "cache_prompt": True, **question})
        found: dict[str, Any] = answer if isinstance(answer, dict) else json.loads(answer)
        if "error" in found or ("code" in found and "content" not in found):
            raise ModelError("llama.cpp", str(found)[:300], "see the message of the engine")
        return found

    def logits(self, tokens: Tensor) -> Tensor:
        """See :class:`Engine`; one call per token, since the engine returns only the last token's probabilities.

        Raises:
            ModelError: the vocabulary is too large to be listed for every token.
        """
        row = tokens.reshape(-1).tolist()
        found: list[dict[int, float]] = []
        for end in range(1, len(row) + 1):
            answer = self._ask(prompt=row[:end], n_predict=1, n_probs=_MOST_LISTED)
            (first,) = answer["completion_probabilities"]
            listed = {entry["id"]: entry["logprob"] for entry in first.get("top_logprobs") or first["probs"]}
            if len(listed) >= _MOST_LISTED:
                raise ModelError(
                    "llama.cpp", f"its vocabulary has more than {_MOST_LISTED} tokens, which it would list for every token",
                    "measure the files with llama-perplexity of llama.cpp",
                )  # fmt: skip
            found.append(listed)
        width = max(max(listed) for listed in found) + 1
        logits = torch.full((1, len(row), width), -1e4)
        for at, listed in enumerate(found):
            logits[0, at, list(listed)] = torch.tensor(list(listed.values()))
        return logits

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """See :class:`Engine`."""
        answer = self._ask(prompt=list(tokens), n_predict=count, return_tokens=True, ignore_eos=False, top_k=1)
        made: list[int] = answer["tokens"]
        return made


class OpenVINO:
    """A stateful model in OpenVINO."""

    name = "openvino"

    def __init__(self, path: Path) -> None:
        package = _needed("openvino", "openvino")
        self._compiled = package.Core().compile_model(str(path), "CPU", AS_SIMULATED)

    def logits(self, tokens: Tensor) -> Tensor:
        """See :class:`Engine`."""
        request = self._compiled.create_infer_request()
        request.reset_state()
        return self._run(request, tokens.numpy(), 0)

    def _run(self, request: Any, tokens: Any, past: int) -> Tensor:
        count = tokens.shape[1]
        known = {
            "input_ids": tokens,
            "attention_mask": np.ones((1, past + count), np.int64),
            "position_ids": np.arange(past, past + count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        wanted = {name for port in self._compiled.inputs for name in port.names}
        found = request.infer({name: value for name, value in known.items() if name in wanted})
        return torch.from_numpy(np.array(next(iter(found.values())))).float()

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """See :class:`Engine`."""
        request = self._compiled.create_infer_request()
        request.reset_state()
        made: list[int] = []
        new = np.array([list(tokens)], np.int64)
        past = 0
        while len(made) < count:
            logits = self._run(request, new, past)
            past += new.shape[1]
            made.append(int(logits[0, -1].argmax()))
            new = np.array([[made[-1]]], np.int64)
        return made


def open_engine(folder: str | os.PathLike[str]) -> Engine:
    """The engine of the files in a folder.

    Args:
        folder: what :func:`bitwright.llm.quantize` wrote, or a float model; a ``.gguf`` file, too.

    Raises:
        ConfigError: the folder holds no language model, or the engine's package is not installed.
        ModelError: the engine cannot open the files.
    """
    place = Path(folder)
    files = [place] if place.suffix == ".gguf" else sorted(place.glob("*.gguf"))
    if files:
        return LlamaCpp(files[0])
    if (place / "genai_config.json").is_file():
        return GenAI(place)
    found = [*sorted(place.glob("openvino_model.xml")), *sorted(place.glob("*.xml"))]
    if found:
        return OpenVINO(found[0])
    if not (place / "config.json").is_file():
        raise ConfigError(
            str(folder), "it holds no language model: no config.json, genai_config.json, *.gguf or openvino_model.xml",
            "name the folder that `bitwright llm quantize` wrote with --out",
        )  # fmt: skip
    kind = kind_of(place)
    if kind is not None and (kind.name in ("gptq", "awq") or kind.name not in FILE_FORMATS.own):
        from bitwright.llm.opened import coded_model

        return Transformers(coded_model(place), "bitwright, with the codes of the folder")
    config = json.loads((place / "config.json").read_text(encoding="utf-8")).get("quantization_config", {})
    if config.get("quant_method") == "compressed-tensors":
        _needed("compressed_tensors", "compressed-tensors")
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            place, local_files_only=True, trust_remote_code=False, dtype=torch.float32
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(
            str(folder), f"transformers cannot open it: {str(error).splitlines()[0][:300]}", "write the files again"
        ) from error
    return Transformers(model.eval())


def _needed(package: str, what: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigError(
            what, f"its engine, the package {package}, is not installed", f"pip install {package.replace('_', '-')}"
        ) from error
