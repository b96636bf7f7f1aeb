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

from bitwright.errors import ConfigError, ModelError, close_matches
from bitwright.llm.files.gguf_blocks import Reader
from bitwright.llm.files.table import FILE_FORMATS, kind_of
from bitwright.llm.likelihood import check_positions
from bitwright.llm.openvino_export import AS_SIMULATED

_MOST_LISTED = 16_384  # tokens whose probabilities llama.cpp is asked for in one answer
_NORMAL = 1  # kind of a token of GGUF files that is neither a control token nor a single byte


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
        check_positions(self.model, tokens.shape[1])
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
    """A folder in ONNX Runtime GenAI, with the adapters that lie in it.

    Attributes:
        adapters: names of the files ``<adapter>.onnx_adapter``.
        adapter: the one that is active, of :attr:`adapters`; with ``None`` the file's own.
    """

    name = "onnxruntime-genai"

    def __init__(self, folder: Path) -> None:
        self._package = _needed("onnxruntime_genai", "genai")
        self._model = self._package.Model(str(folder))
        files = sorted(folder.glob("*.onnx_adapter"))
        self.adapters = tuple(path.stem for path in files)
        self.adapter: str | None = None
        self._held: Any = None
        if files:
            self._held = self._package.Adapters(self._model)
            for path in files:
                self._held.load(str(path), path.stem)

    def _generator(self, length: int) -> Any:
        params = self._package.GeneratorParams(self._model)
        params.set_search_options(max_length=length, do_sample=False)
        generator = self._package.Generator(self._model, params)
        if self.adapter is not None:
            if self.adapter not in self.adapters:
                near = close_matches(self.adapter, self.adapters)
                known = ", ".join(self.adapters) or "none: bitwright.torch.export_adapters writes them"
                raise ConfigError("adapter", f"the folder has no adapter {self.adapter!r}{near}", f"use one of {known}")
            generator.set_active_adapter(self._held, self.adapter)
        return generator

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
    """A GGUF file run by llama.cpp, with keys and values in float32."""

    name = "llama.cpp"

    def __init__(self, path: Path) -> None:
        self._package = _needed("xllamacpp", "gguf")
        self._path, self._server, self._room = path, None, 0
        keys = Reader(path).keys
        texts = keys.get("tokenizer.ggml.tokens", ())
        self._vocabulary = len(texts)
        self._last = keys.get("tokenizer.ggml.eos_token_id")
        kinds = keys.get("tokenizer.ggml.token_type", [_NORMAL] * len(texts))
        self._letters = next(
            (at for at, text in enumerate(texts) if kinds[at] == _NORMAL and text.isascii() and text.isalnum()), 0
        )

    def _open(self, length: int) -> Any:
        """The server, with room for ``length`` tokens: one for all that a model was trained for may take many GiB."""
        if length > self._room:
            params = self._package.CommonParams()
            params.model.path, params.n_ctx, params.n_parallel = str(self._path), -(-length // 512) * 512, 1
            params.warmup, params.fit_params, params.verbosity = False, False, -1
            params.cache_type_k = params.cache_type_v = self._package.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = self._package.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            self._server, self._room = None, 0  # the memory of the one before
            self._server, self._room = self._package.Server(params), params.n_ctx
        return self._server

    def _likeliest(self, tokens: list[int], count: int, length: int) -> dict[int, float]:
        """Log-probabilities of the ``count`` likeliest tokens after ``tokens``, the likeliest first.

        The server drops the list where a token ends the text or is a part of a letter, so that it is made to choose a whole word;
        the list is of the probabilities before that.

        Raises:
            ModelError: the engine refuses.
        """
        answer = self._open(length + 1).handle_completions(
            {
                "prompt": tokens, "n_predict": 1, "temperature": 0, "cache_prompt": True, "n_probs": count,
                "logit_bias": [[self._letters, 1e4]],
            }
        )  # fmt: skip
        found: dict[str, Any] = answer if isinstance(answer, dict) else json.loads(answer)
        if not found.get("choices"):
            raise ModelError("llama.cpp", str(found)[:300], "see the message of the engine")
        (first,) = found["choices"][0]["logprobs"]["content"]
        return {entry["id"]: entry["logprob"] for entry in first["top_logprobs"]}

    def logits(self, tokens: Tensor) -> Tensor:
        """See :class:`Engine`; one call per token, since the engine returns only the last token's probabilities.

        Of vocabularies above 16,384 tokens the likeliest ones are listed, among them the token that follows; the others share
        what is left of the probability.
        """
        row = tokens.reshape(-1).tolist()
        found = []
        for at in range(len(row)):
            listed = self._likeliest(row[: at + 1], _MOST_LISTED, len(row))
            if at + 1 < len(row) and row[at + 1] not in listed and len(listed) < self._vocabulary:
                listed = self._likeliest(row[: at + 1], self._vocabulary, len(row))
            values = torch.tensor(list(listed.values()), dtype=torch.float64)
            width = max(self._vocabulary, max(listed) + 1)
            rest = (1 - values.exp().sum()).clamp_min(1e-30) / max(1, width - len(listed))
            found.append(torch.full((width,), float(rest.log())))
            found[-1][list(listed)] = values.float()
        return torch.stack(found)[None]

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """See :class:`Engine`."""
        row = list(tokens)
        made: list[int] = []
        while len(made) < count and (not made or made[-1] != self._last):
            made.append(next(iter(self._likeliest(row + made, 1, len(row) + count))))
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
    options = {}
    if config.get("quant_method") == "compressed-tensors":
        _needed("compressed_tensors", "compressed-tensors")
        options = _unpacked(place, config)
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            place, local_files_only=True, trust_remote_code=False, dtype=torch.float32, **options
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(
            str(folder), f"transformers cannot open it: {str(error).splitlines()[0][:300]}", "write the files again"
        ) from error
    return Transformers(model.eval())


def _unpacked(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Let transformers unpack weights when it loads them, where no inputs of layers are quantized.

    Its layers of codes have no room for zero points (5.23), and models that draw weights of a class by themselves (Falcon, Mamba)
    find none there.
    """
    if any(group.get("input_activations") for group in config.get("config_groups", {}).values()):
        return {}
    from transformers import AutoConfig

    made = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    made.quantization_config["dequantize"] = True
    return {"config": made}


def _needed(package: str, what: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigError(
            what, f"its engine, the package {package}, is not installed", f"pip install {package.replace('_', '-')}"
        ) from error
