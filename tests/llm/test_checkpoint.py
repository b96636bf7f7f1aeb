"""Folders of language models: what is read, and what is refused before any work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig

from bitwright.errors import BitwrightError, ConfigError, ModelError
from bitwright.llm.checkpoint import INDEX, check_room, open_checkpoint
from tests.llm.models import saved


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    saved(folder, LlamaConfig)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def test_tensors_are_read_one_by_one_and_row_by_row(original: Path):
    opened = open_checkpoint(original)
    assert len({entry.file for entry in opened.entries.values()}) > 1
    for file in {entry.file for entry in opened.entries.values()}:
        for name, tensor in load_file(file).items():
            assert torch.equal(opened.read(name), tensor)
            assert torch.equal(opened.read(name, rows=slice(1, 3)), tensor[1:3])
    assert opened.read("model.norm.weight", torch.float64).dtype == torch.float64
    assert opened.nbytes == sum(entry.nbytes for entry in opened.entries.values())


def test_tied_and_prefixed_names_are_found(tmp_path: Path):
    saved(tmp_path, GPT2Config, n_embd=32, n_layer=2, n_head=4, shard="1GB")
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): t for name, t in load_file(path).items()}, path)
    opened = open_checkpoint(tmp_path)
    assert opened.parameters["lm_head.weight"] == opened.parameters["transformer.wte.weight"] == "wte.weight"


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(config))


def _first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def _drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _truncate(folder: Path) -> None:
    shard = _first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:-10])


def _cut_header(folder: Path) -> None:
    _first_shard(folder).write_bytes(b"\xff" * 12)


def _other_dtype(folder: Path) -> None:
    shard = _first_shard(folder)
    save_file({name: tensor.half() for name, tensor in load_file(shard).items()}, shard)


def _integers(folder: Path) -> None:
    shard = _first_shard(folder)
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(shard).items()}, shard)


def _other_tensor(folder: Path) -> None:
    shard = _first_shard(folder)
    tensors = load_file(shard)
    name = next(iter(tensors))
    save_file({**{n: t for n, t in tensors.items() if n != name}, "elsewhere": tensors[name]}, shard)


def _pickled(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def _edit_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    shard = _first_shard(folder)
    content = shard.read_bytes()
    size = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + size])
    change(table)
    header = json.dumps(table).encode()
    shard.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])


def _of_first(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda table: next(row for name, row in table.items() if name != "__metadata__").update(changes)


@pytest.mark.parametrize(
    "damage, message",
    [
        pytest.param(lambda f: (f / "config.json").unlink(), "config.json is missing", id="config-missing"),
        pytest.param(lambda f: (f / "config.json").write_text("{"), "config.json: it is not JSON", id="config-damaged"),
        pytest.param(
            lambda f: _edit_config(f, model_type="lama", auto_map={}),
            r"'lama' is not a language model .* \(did you mean 'llama'.*the code in the folder is not run",
            id="unknown-model",
        ),
        pytest.param(
            lambda f: _edit_config(f, quantization_config={"quant_method": "gptq"}),
            "quantized already, by gptq",
            id="quantized",
        ),
        pytest.param(_drop_tokenizer, "it has no tokenizer: none of tokenizer.json", id="tokenizer-missing"),
        pytest.param(
            lambda f: _first_shard(f).unlink(), r"1 of \d+ shards are missing: model-00001-of", id="shard-missing"
        ),
        pytest.param(
            _truncate, r"it is truncated: \d+ bytes, of the \d+ that its header announces", id="shard-truncated"
        ),
        pytest.param(_cut_header, "its 12 bytes are not a safetensors file, or it is truncated", id="header-truncated"),
        pytest.param(_other_dtype, "matrices are of dtype F16, those of the other shards of F32", id="shard-dtype"),
        pytest.param(_integers, "is of dtype I8, as of a model that is quantized already", id="integers"),
        pytest.param(_other_tensor, r"model-00001.* lacks .*, which the index places there", id="index"),
        pytest.param(lambda f: (f / INDEX).unlink(), "there is no model.safetensors", id="index-missing"),
        pytest.param(_pickled, "pytorch_model.bin may run code when opened and is not read", id="pickle"),
        pytest.param(
            lambda f: _edit_config(f, num_hidden_layers=3), r"\d+ of \d+ parameters are in no shard", id="layers"
        ),
        pytest.param(
            lambda f: _edit_config(f, intermediate_size=64), r"has shape \(.*where config.json makes it", id="shape"
        ),
        *(
            pytest.param(lambda f, c=change: _edit_header(f, c), "no dtype, shape and place of .* go together", id=name)
            for name, change in {
                "header-offsets": _of_first(data_offsets=[0]),
                "header-size": _of_first(shape=[2**40, 2**40]),
                "header-dtype": _of_first(dtype=3),
                "header-row": lambda table: table.update(x=None),
            }.items()
        ),
        pytest.param(lambda f: (f / INDEX).write_bytes(b"\xff{"), "index.json: it is not JSON", id="index-bytes"),
        pytest.param(lambda f: (f / INDEX).write_text("[]"), "it holds a list, not an object", id="index-list"),
        pytest.param(
            lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../other/model.safetensors"}}'),
            "weight_map does not name a file of the folder",
            id="index-elsewhere",
        ),
        pytest.param(
            lambda f: (f / INDEX).write_text('{"weight_map": {"a": "' + 300 * "m" + '"}}'),
            "1 of 1 shards are missing: m",
            id="index-long-name",
        ),
        pytest.param(
            lambda f: _edit_config(f, model_type=[]), r"model_type \[\] is not a language model", id="model-type"
        ),
        pytest.param(
            lambda f: _edit_config(f, num_hidden_layers=1 << 20),
            "num_hidden_layers is 1048576, and the files hold",
            id="layers",
        ),
        pytest.param(lambda f: _edit_config(f, hidden_size="wide"), "no model can be made from it", id="config-values"),
    ],
)
def test_a_damaged_folder_is_refused(folder: Path, damage: Callable[[Path], object], message: str):
    damage(folder)
    with pytest.raises(BitwrightError, match=message):
        open_checkpoint(folder)


def test_a_tokenizer_with_more_tokens_than_the_table_is_refused(folder: Path):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["zz"] = 500
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="the tokenizer has 501 tokens, the model's table 96 rows"):
        open_checkpoint(folder)
    assert open_checkpoint(folder, tokenizer=False).is_streamed


def test_names_of_a_hub_and_full_disks_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="meta/llama: it is not a folder; nothing is downloaded"):
        open_checkpoint("meta/llama")
    with pytest.raises(ModelError, match=r"writing takes 1073741824.00 GiB, and .* GiB of the disk are free"):
        check_room(tmp_path / "new", 1 << 60, "writing")
