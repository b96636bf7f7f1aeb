"""What all kinds of checkpoint files share: checks before any work, files that appear whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from bitwright.core.numerics.granularity import PerBlock
from bitwright.core.numerics.spec import QuantSpec
from bitwright.errors import ConfigError, ExportError, ModelError
from bitwright.llm import FILE_FORMATS, FloatWeight, PackedWeight, read_checkpoint, write_checkpoint, write_simulation
from bitwright.llm.files.common import Shards, StoredTensors, as_stored
from bitwright.torch import QuantizationSimModel
from tests.llm.models import tiny
from tests.support.simulations import calibrated

CONFIG = tiny(LlamaConfig).config.to_dict()


def _weights(count=3):
    spec = QuantSpec("int4", PerBlock(32), scale_format="float16")
    generator = torch.Generator().manual_seed(0)
    return [
        PackedWeight.nearest(f"model.layers.{i}.mlp.up_proj.weight", torch.randn(32, 64, generator=generator), spec)
        for i in range(count)
    ]


@pytest.mark.parametrize("kind", FILE_FORMATS)
def test_a_full_disk_is_refused_before_the_first_weight(kind, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1000))

    def weights():
        raise AssertionError("work was done")
        yield

    plans = [weight.plan for weight in _weights()]
    with pytest.raises(ExportError, match=rf"the {kind} files take about 0\.0 MB, and the disk has 0\.0 MB free"):
        write_checkpoint(tmp_path / "a/b", weights(), CONFIG, to=kind, plans=plans)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_kept(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="there is a file of this name"):
        write_checkpoint(tmp_path / "file", _weights(), CONFIG)
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ExportError, match=r"there is another model in it \(model.safetensors\).*an empty folder"):
        write_checkpoint(tmp_path, _weights(), CONFIG)
    with pytest.raises(
        ConfigError, match=r"no kind of checkpoint files of this name \(did you mean 'gguf'\?\).*use one of"
    ):
        write_checkpoint(tmp_path / "new", _weights(), CONFIG, to="ggufs")
    with pytest.raises(ExportError, match="it holds no quantized checkpoint of a kind that is read here"):
        read_checkpoint(tmp_path / "new")


@pytest.mark.parametrize("kind", FILE_FORMATS)
def test_files_appear_whole_or_not_at_all(kind, tmp_path):
    """A run that ends in the middle leaves the earlier files; the next one replaces them."""

    def ending():
        yield from _weights(2)
        raise KeyboardInterrupt

    write_checkpoint(tmp_path, _weights(1), CONFIG, to="gguf")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, ending(), CONFIG, to=kind)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_checkpoint(tmp_path, _weights(3), CONFIG, to=kind)
    assert (tmp_path / "model.gguf").exists() == (kind == "gguf")
    for found, weight in zip(read_checkpoint(tmp_path), _weights(3), strict=True):
        assert found.name == weight.name and np.array_equal(found.dequantize(), weight.dequantize())


def test_shards_are_named_by_an_index(tmp_path):
    shards = Shards(tmp_path, most=1000)
    tensors = {f"t{i}": torch.randn(100, generator=torch.Generator().manual_seed(i)) for i in range(5)}
    shards.metadata["key"] = "value"
    for name, tensor in tensors.items():
        shards.add(name, tensor)
    shards.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    stored = StoredTensors(tmp_path)
    assert {name for name in stored} == set(tensors) and stored.metadata()["key"] == "value"
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ExportError, match="model-00002-of-00003.safetensors: it is damaged"):
        StoredTensors(tmp_path)
    path.unlink()
    with pytest.raises(ExportError, match="this shard is named by the index and missing"):
        StoredTensors(tmp_path)


def test_a_model_without_configuration_names_the_other_call(tmp_path):
    sim = calibrated(QuantizationSimModel(torch.nn.Linear(32, 32), torch.randn(2, 32), preset="w4g32"))
    with pytest.raises(ModelError, match=r"Linear: it has no configuration of transformers.*write_checkpoint\("):
        write_simulation(tmp_path, sim)
    write_checkpoint(tmp_path, [FloatWeight("a.weight", torch.zeros(2))], {"model_type": "own"})
    assert next(iter(read_checkpoint(tmp_path))).name == "a.weight"


@pytest.mark.parametrize(
    ("name", "shape"),
    [("transformer.word_embeddings_layernorm.weight", (8,)), ("model.embed_positions.weight", (4, 8))],
)
def test_only_the_table_of_tokens_is_tied_to_the_output_layer(name, shape):
    config, floats = {"tie_word_embeddings": True}, []
    stored = dict(as_stored([FloatWeight(name, torch.ones(shape))], config, floats))
    assert list(stored) == [name] and not floats and config["tie_word_embeddings"]


def _changed_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def _changed_tensors(folder, **changes):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, change in changes.items():
        key = next(each for each in tensors if each.endswith(name))
        tensors[key] = change(tensors[key])
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    "kind, damage, problem",
    [
        ("compressed-tensors", lambda f: _changed_config(f, lambda c: c.update(config_groups=3)), "'int' object"),
        ("compressed-tensors", lambda f: _changed_config(f, lambda c: c["config_groups"]["group_0"].clear()), "targets"),
        ("compressed-tensors", lambda f: _changed_tensors(f, weight_scale=lambda t: t[:3]), "scales of shape"),
        ("gptq", lambda f: _changed_config(f, lambda c: c.update(bits="four")), "'four'"),
    ],
)  # fmt: skip
def test_fields_that_do_not_go_together_are_named(kind, damage, problem, tmp_path):
    write_checkpoint(tmp_path, _weights(2), CONFIG, to=kind)
    damage(tmp_path)
    with pytest.raises(ExportError, match=f"damaged {kind} files, found at the first weight: .*({problem})"):
        list(read_checkpoint(tmp_path))


def test_bit_patterns_beyond_their_format_are_refused():
    spec = QuantSpec("float4_e2m1", PerBlock(16), scale_format="e4m3")
    weight = PackedWeight.nearest("w", torch.randn(4, 32), spec)
    weight.check()
    with pytest.raises(ValueError, match="more than the 4 bits of float4_e2m1"):
        replace(weight, codes=weight.codes.astype(np.int32) + 200).check()
