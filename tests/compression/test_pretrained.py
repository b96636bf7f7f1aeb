"""Models of transformers are saved and loaded as their own class after pruning."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bitwright
from bitwright.errors import ConfigError, ExportError
from bitwright.torch import load_compressed

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
DATA = [{"input_ids": torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(i))} for i in range(2)]


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_saved_as_its_own_class(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made: Any = getattr(transformers, f"{name}ForCausalLM")
    model = made(made.config_class(**SIZES)).eval()
    result = bitwright.compress(model, DATA, {"macs": 0.75}, widths=2, reconstruction=False)
    config = result.model.config
    assert config.intermediate_size < 48 and config.num_attention_heads == 2 * config.num_key_value_heads
    assert model.config.intermediate_size == 48
    result.model.save_pretrained(tmp_path / "model")
    again = made.from_pretrained(tmp_path / "model").eval()
    torch.testing.assert_close(again(**DATA[0]).logits, result.model(**DATA[0]).logits)
    result.save(tmp_path / "plan")
    rebuilt = load_compressed(made(made.config_class(**SIZES)).eval(), tmp_path / "plan")
    torch.testing.assert_close(rebuilt(**DATA[0]).logits, result.model(**DATA[0]).logits)


def _small(name: str, **own: Any) -> Any:
    torch.manual_seed(0)
    made: Any = getattr(transformers, name)
    model = made(made.config_class(**{**SIZES, **own})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize(
    ("name", "key", "part", "own"),
    [("FalconForCausalLM", "ffn_hidden_size", 0.92, {}),  # computed from the hidden size where it is not given
     ("Dinov2Model", "mlp_ratio", 0.8, {"mlp_ratio": 2, "image_size": 8, "patch_size": 4}),  # a factor of the hidden size
     ("OPTForCausalLM", "ffn_dim", 0.92, {"ffn_dim": 48, "word_embed_proj_dim": 32})],
)  # fmt: skip
def test_numbers_that_are_not_the_width_itself(
    name: str, key: str, part: float, own: dict[str, Any], tmp_path: Path
) -> None:
    model = _small(name, initializer_range=0.03, **own)
    data = [{"pixel_values": torch.randn(2, 3, 8, 8)}] if "image_size" in own else DATA
    heads = ("*attention*", "*attn*")
    result = bitwright.compress(
        model, data, {"params": part}, widths=16, ranking="uniform", exclude=heads, reconstruction=False
    )
    assert result.not_in_config == "" and getattr(result.model.config, key) != getattr(model.config, key)
    changed = {k for k, v in vars(result.model.config).items() if vars(model.config).get(k) != v}
    assert changed == {key}  # and no number that happens to be equal
    result.model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**data[0])[0], result.model(**data[0])[0])


def _of_unlike_heads() -> tuple[Any, Any]:
    """BERT computes the width of a head from the number of heads, so that no configuration has fewer of the same width."""
    model = _small("BertForSequenceClassification", num_key_value_heads=None)
    result = bitwright.compress(model, DATA, {"macs": 0.7}, widths=1, ranking="uniform", reconstruction=False)
    heads = {row.after for row in result.rows if row.kind == "heads"}
    assert len(heads) == 1 and heads.pop() < 4
    return model, result


def test_what_no_configuration_can_say_is_refused(tmp_path: Path) -> None:
    model, result = _of_unlike_heads()
    assert result.model.config.num_attention_heads == 4
    assert result.model(**DATA[0]).logits.shape == (2, 2)
    assert "query.weight has the shape" in result.not_in_config and "save_pretrained refuses" in str(result)
    for compressed in (result.model, copy.deepcopy(result.model)):
        with pytest.raises(ExportError, match=r"could not load it: .*query.weight.*load_compressed"):
            compressed.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    result.save(tmp_path / "plan")
    rebuilt = load_compressed(copy.deepcopy(model), tmp_path / "plan")
    torch.testing.assert_close(rebuilt(**DATA[0]).logits, result.model(**DATA[0]).logits)
    with pytest.raises(ExportError, match="could not load it"):
        rebuilt.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")  # the original is as it was
    with pytest.raises(ConfigError, match="not_in_config is no text"):
        bitwright.torch.rebuild(copy.deepcopy(model), {**result.plan, "not_in_config": 3})


@pytest.mark.parametrize("name", ["BertModel", "GPT2LMHeadModel"])
def test_what_the_configuration_cannot_say_stays_where_asked(name: str, tmp_path: Path) -> None:
    model = _small(name, num_key_value_heads=None)
    result = bitwright.compress(
        model, DATA, {"params": 0.85}, widths=2, ranking="uniform", in_config=True, reconstruction=False
    )
    assert result.not_in_config == "" and not any(row.kind == "heads" for row in result.rows)
    assert any("the configuration cannot say another width of it" in refusal.reason for refusal in result.refused)
    result.model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**DATA[0])[0], result.model(**DATA[0])[0])


def test_a_trainer_goes_on_from_checkpoints_of_a_model_that_refuses(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    original, result = _of_unlike_heads()
    rows = [{"input_ids": DATA[0]["input_ids"][0], "labels": torch.tensor(1)}] * 4

    def trained(model: Any, steps: int, resume: bool) -> Any:
        options = transformers.TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
            logging_strategy="no", per_device_train_batch_size=2, learning_rate=1e-2,
            lr_scheduler_type="constant",
        )  # fmt: skip
        transformers.Trainer(model, options, train_dataset=rows).train(resume_from_checkpoint=resume)
        return model

    first = trained(result.model, 1, False)
    plan = json.loads((tmp_path / "checkpoint-1" / "model.plan.json").read_text())
    again = bitwright.torch.rebuild(copy.deepcopy(original), plan)
    trained(again, 2, True)
    assert not torch.equal(again.classifier.weight, first.classifier.weight)
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()


def test_factors_and_blocks(tmp_path: Path) -> None:
    model = _small("LlamaForCausalLM")
    report = bitwright.torch.svd_model(model, DATA, params=0.9, progress=False)
    with pytest.raises(ExportError, match="could not load it"):
        model.save_pretrained(tmp_path / "model")
    report.undo()
    model.save_pretrained(tmp_path / "model")
    bitwright.torch.drop_blocks(model, DATA, count=1, progress=False)
    model.save_pretrained(tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model").eval()
    torch.testing.assert_close(again(**DATA[0]).logits, model(**DATA[0]).logits)
