"""The tokenizer of a model as GGUF holds it, from ``tokenizer.json``.

===================  =================================================================================================
in tokenizer.json    in GGUF
===================  =================================================================================================
BPE of bytes         ``gpt2``: tokens, their types, merges, and the name of the rule that cuts text into words
BPE with byte        ``llama``: tokens, types, and scores, by which llama.cpp merges; the score of a token is the negative
fallback             rank of the first merge that makes it, so that both merge in the same order
===================  =================================================================================================

Other models (Unigram, WordPiece) and unknown rules for words are refused: text would be cut in another way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitwright.errors import ExportError
from bitwright.llm.files.gguf_blocks import ARRAY, BOOL, F32, I32, STRING, U32, Typed

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_WORST = -1e9  # score of tokens that no merge makes

_WORDS_LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
    "|\\s+(?!\\S)|\\s+"
)
#: regular expression that cuts text into words -> name of the rule in llama.cpp
_RULES = {_WORDS_LLAMA3: "llama-bpe", _WORDS_LLAMA3.replace("{1,3}", ""): "qwen2"}


def tokenizer_keys(paths: Sequence[Path], config: Mapping[str, Any]) -> dict[str, Typed]:
    """GGUF keys of the tokenizer.

    Args:
        paths: of the tokenizer's files; ``tokenizer.json`` is among them.
        config: of the model, for the size of the vocabulary and the special tokens.

    Returns:
        The keys; with no files those of a model without a tokenizer, which takes token ids.

    Raises:
        ExportError: there is no ``tokenizer.json`` among the files, it is damaged or of another kind, or it has more tokens
            than the model.
    """
    size = int(config["vocab_size"])
    if not paths:
        return {"tokenizer.ggml.model": Typed("none", STRING)}
    found = {path.name: path for path in paths}
    if "tokenizer.json" not in found:
        raise ExportError(
            ", ".join(found),
            "there is no tokenizer.json among the tokenizer's files",
            "write it with the tokenizer's save_pretrained of transformers",
        )
    path = found["tokenizer.json"]
    document = _load(path)
    settings = _load(found["tokenizer_config.json"]) if "tokenizer_config.json" in found else {}
    model = document.get("model") or {}
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise ExportError(
            str(path),
            f"its model is {model.get('type', 'unknown')}, and only BPE is written to GGUF",
            "write compressed-tensors, which takes tokenizer files as they are",
        )
    tokens, types = _tokens(document, model, size, path)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    keys = {
        "tokenizer.ggml.tokens": Typed(tokens, ARRAY, STRING),
        "tokenizer.ggml.token_type": Typed(types, ARRAY, I32),
    }
    if model.get("byte_fallback"):
        keys |= {
            "tokenizer.ggml.model": Typed("llama", STRING),
            "tokenizer.ggml.pre": Typed("default", STRING),
            "tokenizer.ggml.scores": Typed(_scores(tokens, model["merges"]), ARRAY, F32),
            "tokenizer.ggml.add_space_prefix": Typed(_adds_space(document), BOOL),
        }
    else:
        keys |= {
            "tokenizer.ggml.model": Typed("gpt2", STRING),
            "tokenizer.ggml.pre": Typed(_rule(document, path), STRING),
            "tokenizer.ggml.merges": Typed(merges, ARRAY, STRING),
        }
    return keys | _special(document, settings, config, tokens) | _template(settings, found)


def _load(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(str(path), f"it cannot be read: {error}", "copy the tokenizer's files again") from error
    if not isinstance(document, dict):
        raise ExportError(str(path), "it holds no object", "copy the tokenizer's files again")
    return document


def _tokens(
    document: Mapping[str, Any], model: Mapping[str, Any], size: int, path: Path
) -> tuple[list[str], list[int]]:
    """Tokens by id and their types; ids that the tokenizer leaves out become unused tokens."""
    vocabulary: dict[str, int] = model["vocab"]
    added = {entry["content"]: entry for entry in document.get("added_tokens", [])}
    ids = {**vocabulary, **{text: entry["id"] for text, entry in added.items()}}
    largest = max(ids.values(), default=-1)
    if largest >= size:
        raise ExportError(
            str(path),
            f"the tokenizer has a token with id {largest}, and the model has {size} tokens",
            "use the tokenizer that belongs to the model",
        )
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for text, i in ids.items():
        tokens[i] = text
        entry = added.get(text)
        if entry is not None:
            types[i] = CONTROL if entry.get("special") else USER_DEFINED
        elif model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types[i] = BYTE
        else:
            types[i] = NORMAL
        if text == model.get("unk_token"):
            types[i] = UNKNOWN
    return tokens, types


def _scores(tokens: Sequence[str], merges: Sequence[Any]) -> list[float]:
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    return [float(-ranks[token]) if token in ranks else _WORST for token in tokens]


def _steps(document: Mapping[str, Any], part: str, inner: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, of which a sequence holds several."""
    step = document.get(part)
    if not step:
        return []
    return list(step[inner]) if step.get("type") == "Sequence" else [step]


def _adds_space(document: Mapping[str, Any]) -> bool:
    prepends = any(step.get("type") == "Prepend" for step in _steps(document, "normalizer", "normalizers"))
    first = [s for s in _steps(document, "pre_tokenizer", "pretokenizers") if s.get("type") == "Metaspace"]
    return prepends or any(step.get("prepend_scheme", "always") != "never" for step in first)


def _rule(document: Mapping[str, Any], path: Path) -> str:
    steps = _steps(document, "pre_tokenizer", "pretokenizers")
    patterns = [
        s["pattern"].get("Regex") for s in steps if s.get("type") == "Split" and isinstance(s.get("pattern"), dict)
    ]
    if not patterns and any(s.get("type") == "ByteLevel" and s.get("use_regex", True) for s in steps):
        return "gpt-2"
    for pattern in patterns:
        if pattern in _RULES:
            return _RULES[pattern]
    raise ExportError(
        str(path),
        f"the rule that cuts text into words is not one that llama.cpp is known to have: {patterns or steps}",
        f"write compressed-tensors; rules that are known: gpt-2, {', '.join(_RULES.values())}",
    )


def _token_id(short: str, settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int]) -> int | None:
    """The id of a special token such as ``bos``: the tokenizer's, else the model's, the first of several."""
    text = settings.get(f"{short}_token")
    text = text.get("content") if isinstance(text, Mapping) else text
    found = ids.get(text) if isinstance(text, str) else config.get(f"{short}_token_id")
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, int) else None


def _special(
    document: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any], tokens: Sequence[str]
) -> dict[str, Typed]:
    keys = {}
    ids = {text: i for i, text in enumerate(tokens)}
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for short, name in names.items():
        found = _token_id(short, settings, config, ids)
        if found is not None and 0 <= found < len(tokens):
            keys[f"tokenizer.ggml.{name}_token_id"] = Typed(found, U32)
    added = json.dumps(document.get("post_processor") or {})
    for short in ("bos", "eos"):
        index = keys.get(f"tokenizer.ggml.{short}_token_id")
        adds = settings.get(f"add_{short}_token")
        if adds is None:
            adds = index is not None and json.dumps(tokens[index.value]) in added
        keys[f"tokenizer.ggml.add_{short}_token"] = Typed(bool(adds), BOOL)
    return keys


def _template(settings: Mapping[str, Any], found: Mapping[str, Path]) -> dict[str, Typed]:
    text = settings.get("chat_template")
    if "chat_template.jinja" in found:
        text = found["chat_template.jinja"].read_text(encoding="utf-8")
    return {"tokenizer.chat_template": Typed(text, STRING)} if isinstance(text, str) else {}
