"""Architectures of transformers, timm and diffusers at a size of toys: random weights, nothing is downloaded.

A row makes a model and a batch. Configurations take what they know of the common sizes and the row's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99,
    "max_position_embeddings": 64, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
VIT = {"image_size": 32, "patch_size": 8, "num_labels": 3}
SPEECH = {
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "group",
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A row.

    Attributes:
        name: as in the table.
        package: what it comes from.
        build: the model, in eval mode.
        batch: seed -> keyword arguments of its forward.
        generates: whether ``generate`` is tried.
    """

    name: str
    package: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    generates: bool = False


def _of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _ids(seed: int, length: int = 10) -> torch.Tensor:
    return torch.randint(3, 99, (2, length), generator=_of(seed))


def text(seed: int) -> Batch:
    return {"input_ids": _ids(seed)}


def pairs(seed: int) -> Batch:
    return {"input_ids": _ids(seed), "decoder_input_ids": _ids(seed + 1, 6)}


def pixels(seed: int, size: int = 32) -> Batch:
    return {"pixel_values": torch.randn(2, 3, size, size, generator=_of(seed))}


def wave(seed: int) -> Batch:
    return {"input_values": torch.randn(2, 1600, generator=_of(seed))}


def _transformers(model: str, batch: Callable[[int], Batch], sizes: dict[str, Any], **own: Any) -> Architecture:
    def build() -> nn.Module:
        made = getattr(importlib.import_module("transformers"), model)
        nested = {key: value() if callable(value) else value for key, value in own.items()}
        return made(made.config_class(**{**sizes, **nested})).eval()

    generates = model.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel"))
    return Architecture(model, "transformers", build, batch, generates)


def _decoders(names: str, **own: Any) -> list[Architecture]:
    return [_transformers(name, text, SIZES, **own) for name in names.split()]


def _vision(name: str, size: int = 32, **own: Any) -> Architecture:
    return _transformers(name, lambda seed: pixels(seed, size), {**SIZES, **VIT, "image_size": size}, **own)


def _diffusers(name: str, batch: Callable[[int], Batch], **own: Any) -> Architecture:
    def build() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), name)(**own).eval()

    return Architecture(name, "diffusers", build, batch)


def _timm(name: str, size: int = 64, **own: Any) -> Architecture:
    def build() -> nn.Module:
        return importlib.import_module("timm").create_model(name, num_classes=5, **own).eval()

    return Architecture(name, "timm", build, lambda seed: {"x": pixels(seed, size)["pixel_values"]})


def _resnet() -> Any:
    return importlib.import_module("transformers").ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage1", "stage2"]
    )


def _clip(seed: int) -> Batch:
    return {**text(seed), **pixels(seed)}


def _noisy(channels: int = 4, size: int = 8, **more: Callable[[int], torch.Tensor]) -> Callable[[int], Batch]:
    def batch(seed: int) -> Batch:
        sample = torch.randn(1, channels, size, size, generator=_of(seed))
        return {"sample": sample, "timestep": torch.tensor([seed % 7 + 1]), **{k: f(seed) for k, f in more.items()}}

    return batch


def _states(width: int, length: int = 5) -> Callable[[int], torch.Tensor]:
    return lambda seed: torch.randn(1, length, width, generator=_of(seed + 5))


def _latent(batch: Callable[[int], Batch]) -> Callable[[int], Batch]:
    def renamed(seed: int) -> Batch:
        found = batch(seed)
        return {"hidden_states": found.pop("sample"), **found}

    return renamed


_BLOCKS = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
_SMALL = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}

ARCHITECTURES: tuple[Architecture, ...] = (
    *_decoders("LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM PhiForCausalLM Phi3ForCausalLM GPTNeoXForCausalLM"),
    *_decoders("GPT2LMHeadModel GPTJForCausalLM CodeGenForCausalLM", rotary_dim=4),
    *_decoders("StableLmForCausalLM Starcoder2ForCausalLM CohereForCausalLM OlmoForCausalLM Olmo2ForCausalLM"),
    *_decoders("GraniteForCausalLM NemotronForCausalLM BioGptForCausalLM BloomForCausalLM FalconForCausalLM"),
    *_decoders("GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Qwen3ForCausalLM", head_dim=8),
    *_decoders("MixtralForCausalLM", num_local_experts=4),
    *_decoders("Qwen2MoeForCausalLM Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
               shared_expert_intermediate_size=16, head_dim=8),
    *_decoders("OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    *_decoders("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4),
    *_decoders("MambaForCausalLM", state_size=4, time_step_rank=4),
    *_decoders("BertModel RobertaModel ElectraModel MPNetModel RoFormerModel DebertaModel FNetModel LayoutLMModel"),
    *_decoders("DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    *_decoders("AlbertModel", embedding_size=16), *_decoders("ModernBertModel", cls_token_id=1, sep_token_id=2),
    *_decoders("DistilBertModel", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    *_decoders("ConvBertModel", embedding_size=32), *_decoders("SqueezeBertModel", embedding_size=32),
    *_decoders("MobileBertModel", embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32),
    *(_transformers(name, pairs, SEQ2SEQ) for name in (
        "BartForConditionalGeneration", "MarianMTModel", "PegasusForConditionalGeneration", "MBartForConditionalGeneration",
    )),
    _transformers("T5ForConditionalGeneration", pairs, SEQ2SEQ, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
    _transformers(
        "WhisperForConditionalGeneration",
        lambda s: {"input_features": torch.randn(1, 8, 32, generator=_of(s)), "decoder_input_ids": _ids(s, 6)[:1]},
        SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=32, suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    *(_vision(name) for name in ("ViTForImageClassification", "DeiTForImageClassification", "BeitForImageClassification")),
    _vision("Dinov2ForImageClassification"), _vision("YolosForObjectDetection", image_size=[32, 32], num_detection_tokens=4),
    _vision("SwinForImageClassification", embed_dim=16, depths=[1, 1], num_attention_heads=[2, 2], window_size=2, patch_size=4),
    _vision("Swinv2ForImageClassification", embed_dim=16, depths=[1, 1], num_attention_heads=[2, 2], window_size=2, patch_size=4),
    _vision("ConvNextForImageClassification", **_SMALL), _vision("ConvNextV2ForImageClassification", **_SMALL),
    _vision("ResNetForImageClassification", embedding_size=8, **_SMALL),
    _vision("MobileNetV1ForImageClassification", depth_multiplier=0.25),
    _vision("MobileNetV2ForImageClassification", depth_multiplier=0.25),
    _vision("MobileViTForImageClassification", 64, hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
            patch_size=2),
    _vision("PoolFormerForImageClassification", 64, depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 8, 8]),
    _vision("SegformerForSemanticSegmentation", 64, hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2],
            depths=[1, 1, 1, 1], decoder_hidden_size=16),
    _vision("EfficientNetForImageClassification", 64, width_coefficient=0.25, depth_coefficient=0.2, hidden_dim=320),
    _vision("FocalNetForImageClassification", embed_dim=16, depths=[1, 1], hidden_sizes=[16, 32], patch_size=4,
            focal_levels=[1, 1], focal_windows=[3, 3]),
    _vision("LevitForImageClassification", 64, hidden_sizes=[16, 16, 16], num_attention_heads=[2, 2, 2], depths=[1, 1, 1],
            key_dim=[8, 8, 8], patch_size=16),
    _vision("UperNetForSemanticSegmentation", backbone_config=_resnet, use_auxiliary_head=False, pool_scales=[1, 2],
            hidden_size=16),
    *(_transformers(name, wave, {**SIZES, **SPEECH}) for name in ("Wav2Vec2Model", "HubertModel", "WavLMModel",
                                                                  "UniSpeechModel")),
    _transformers("ASTModel", lambda s: {"input_values": torch.randn(1, 32, 16, generator=_of(s))}, SIZES, max_length=32,
                  num_mel_bins=16, patch_size=8, time_stride=8, frequency_stride=8),
    _transformers("CLIPModel", _clip, {}, projection_dim=16, text_config=SIZES, vision_config={**SIZES, **VIT}),
    _transformers("SiglipModel", _clip, {}, text_config={**SIZES, "max_position_embeddings": 10}, vision_config={**SIZES, **VIT}),
    _transformers("PatchTSTForPrediction", lambda s: {"past_values": torch.randn(2, 32, 3, generator=_of(s))}, {},
                  num_input_channels=3, context_length=32, patch_length=8, patch_stride=8, d_model=16, ffn_dim=32,
                  num_hidden_layers=1, num_attention_heads=2, prediction_length=4),
    _diffusers("UNet2DModel", _noisy(3, 16), sample_size=16, in_channels=3, out_channels=3, **_BLOCKS,
               down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    _diffusers("UNet2DConditionModel", _noisy(4, 8, encoder_hidden_states=_states(16)), sample_size=8, cross_attention_dim=16,
               attention_head_dim=8, **_BLOCKS, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
               up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
    _diffusers("AutoencoderKL", lambda s: {"sample": pixels(s, 16)["pixel_values"]}, sample_size=16, latent_channels=4, **_BLOCKS,
               down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
    _diffusers("AutoencoderTiny", lambda s: {"sample": pixels(s, 16)["pixel_values"]}, encoder_block_out_channels=(8, 8),
               decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)),
    _diffusers("VQModel", lambda s: {"sample": pixels(s, 16)["pixel_values"]}, sample_size=16, latent_channels=4,
               num_vq_embeddings=16, **_BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2,
               up_block_types=("UpDecoderBlock2D",) * 2),
    _diffusers("DiTTransformer2DModel", _latent(_noisy(4, 8, class_labels=lambda s: torch.tensor([s % 5]))),
               num_attention_heads=2, attention_head_dim=16, num_layers=1, sample_size=8, patch_size=2, in_channels=4,
               out_channels=4, num_embeds_ada_norm=10),
    _diffusers("PixArtTransformer2DModel", _latent(_noisy(4, 8, encoder_hidden_states=_states(16))), num_attention_heads=2,
               attention_head_dim=16, num_layers=1, sample_size=8, patch_size=2, out_channels=8, cross_attention_dim=32,
               caption_channels=16, use_additional_conditions=False),
    _diffusers("SD3Transformer2DModel",
               _latent(_noisy(4, 8, encoder_hidden_states=_states(16),
                              pooled_projections=lambda s: torch.randn(1, 16, generator=_of(s)))),
               sample_size=8, patch_size=2, num_layers=1, attention_head_dim=16, num_attention_heads=2,
               joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16, in_channels=4, out_channels=4),
    *(_timm(name) for name in ("resnet10t", "efficientnet_lite0", "mobilenetv3_small_050", "convnext_atto", "regnetx_002",
                               "ghostnet_050", "repvgg_a0")),
    _timm("mixer_s32_224", img_size=64),
)  # fmt: skip
