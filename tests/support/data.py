"""Real data and real trained models from the developer data set, which lies beside the repository.

The folder is ``../shared/data`` next to the repository, or what the environment variable ``BITWRIGHT_DATA``
names. Its pictures may not be copied into the project, so tests that need it ask for the fixture
``shared_data`` (or for one built on it: ``cifar``, ``imagenet``), which skips them where the folder is
absent. The loaders read plain arrays, text and ``.safetensors`` only.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.sources import load_script

DATA = Path(os.environ.get("BITWRIGHT_DATA") or Path(__file__).parents[3] / "shared" / "data")

#: ImageNet statistics of RGB in [0, 1], as the CIFAR models take them too
MEAN = np.array([0.485, 0.456, 0.406], np.float32).reshape(1, 3, 1, 1)
STD = np.array([0.229, 0.224, 0.225], np.float32).reshape(1, 3, 1, 1)


def have_shared_data() -> bool:
    """Whether the developer data set is there."""
    return (DATA / "README.md").is_file()


def why_not() -> str:
    """What a skipped test says."""
    return f"needs the developer data set, and {DATA} is not there; set BITWRIGHT_DATA to its folder"


# ------------------------------------------------------------------------------------------------------------
# data


@dataclass(frozen=True)
class Images:
    """Inputs ready for a model, [N, 3, H, W] float32, and class indices, [N] int64."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, part: slice) -> Images:
        return Images(self.x[part], self.y[part])

    def batches(self, size: int = 100) -> list[Tensor]:
        """The inputs in batches of ``size``, labels left out: what calibration takes."""
        return list(self.x.split(size))


def _nchw(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2), dtype=np.float32)


@cache
def cifar(split: str = "test") -> Images:
    """CIFAR-10, normalised for the two CIFAR models: 2000 ``test`` or 4000 ``train`` images."""
    with np.load(DATA / "cifar10_small.npz") as file:
        pixels, labels = file[f"{split}_x"], file[f"{split}_y"]
    return Images(torch.from_numpy((_nchw(pixels) / 255 - MEAN) / STD), torch.from_numpy(labels.astype(np.int64)))


@cache
def imagenet(split: str = "test") -> Images:
    """The ImageNet sample, scaled for ``mobilenet_v1_025``: 400 ``test``, 100 ``calibration``."""
    from PIL import Image

    with np.load(DATA / "imagenet_sample_dev.npz") as file:
        jpeg, offset, labels = file["jpeg"].tobytes(), file["offset"], file["label"].astype(np.int64)
    # the order that the reference numbers of the data set were measured in
    order = np.random.RandomState(0).permutation(len(labels))
    order = order[:100] if split == "calibration" else order[100:]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(jpeg[offset[i] : offset[i + 1]]))) for i in order])
    return Images(torch.from_numpy(_nchw(pixels) / 127.5 - 1), torch.from_numpy(labels[order]))


@cache
def shakespeare(split: str = "test") -> Tensor:
    """Ids of the 65 characters of tinyshakespeare, [N] int64: 90 % are ``train``, the rest ``test``."""
    text = (DATA / "tinyshakespeare.txt").read_text(encoding="ascii")
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([index[character] for character in text])
    cut = len(ids) * 9 // 10
    return ids[:cut] if split == "train" else ids[cut:]


@cache
def stories(split: str = "test") -> Tensor:
    """Token ids sampled from ``stories260k``: ``calib`` [32, 257] or ``test`` [128, 257], int64."""
    with np.load(DATA / "stories_tokens.npz") as file:
        return torch.from_numpy(file[split].astype(np.int64))


@cache
def mnist() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Part of the MNIST test set: [1000, 28, 28] uint8 and labels [1000] int64."""
    with np.load(DATA / "mnist_small.npz") as file:
        return file["test_x"], file["test_y"].astype(np.int64)


def onnx_file(name: str) -> Path:
    """The path of one of the ONNX models: ``mnist_cntk``, ``face_slim_320``, ..."""
    return DATA / "onnx" / f"{name}.onnx"


# ------------------------------------------------------------------------------------------------------------
# models


@dataclass(frozen=True)
class Trained:
    """A row of ``MODELS``: the file of the definition, how to build it, whether every weight is stored."""

    definition: str
    build: Callable[[Any], nn.Module]
    strict: bool = True


MODELS: dict[str, Trained] = {
    "mobilenet_v1_025": Trained("mobilenet_v1", lambda m: m.MobileNetV1()),
    "mobilenet_v2_cifar": Trained("mobilenet_v2_cifar", lambda m: m.MobileNetV2Cifar()),
    "resnet20_aux": Trained("resnet_cifar", lambda m: m.ResNetCifar(3, aux=True)),
    "lstm_char": Trained("lstm_lm", lambda m: m.LSTMLM()),
    "stories260k": Trained("llama_tiny", lambda m: m.LlamaTiny(), strict=False),
}


@cache
def _definition(name: str) -> ModuleType:
    return load_script(DATA / "models" / f"{name}.py")


def trained(name: str) -> nn.Module:
    """A new copy of the trained model ``name`` (a row of ``MODELS``), in eval mode."""
    row = MODELS[name]
    model = row.build(_definition(row.definition))
    model.load_state_dict(load_file(DATA / "models" / f"{name}.safetensors"), strict=row.strict)
    return model.eval()


# ------------------------------------------------------------------------------------------------------------
# metrics


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Any], images: Images, output: int = 0, batch: int = 100) -> float:
    """Top-1 accuracy in percent; of a model with several outputs, of the one with index ``output``."""
    hits = 0
    for x, y in zip(images.x.split(batch), images.y.split(batch), strict=True):
        logits = model(x)
        logits = logits if isinstance(logits, Tensor) else logits[output]
        hits += int((logits.argmax(1) == y).sum())
    return 100 * hits / len(images)


@torch.no_grad()
def confidence(model: Callable[[Tensor], Any], images: Images, batch: int = 100) -> float:
    """Mean probability of the right class in percent.

    Of 400 photographs its paired differences have a standard error of 0.1 to 0.2 points, those of the accuracy 0.7.
    """
    parts = zip(images.x.split(batch), images.y.split(batch), strict=True)
    return 100 * float(torch.cat([model(x).softmax(1).gather(1, y[:, None]) for x, y in parts]).mean())


@torch.no_grad()
def stories_of_transformers() -> Any:
    """``stories260k`` as a Llama of transformers, which pairs the halves of a head where the original pairs neighbours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    state = trained("stories260k").state_dict()
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    names = {
        "self_attn.q_proj": "wq", "self_attn.k_proj": "wk", "self_attn.v_proj": "wv", "self_attn.o_proj": "wo",
        "mlp.gate_proj": "w1", "mlp.down_proj": "w2", "mlp.up_proj": "w3", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    found = {"model.embed_tokens.weight": state["tok_embeddings.weight"], "model.norm.weight": state["norm.weight"]}
    for layer in range(5):
        for new, old in names.items():
            values = state[f"layers.{layer}.{old}.weight"]
            if old in ("wq", "wk"):
                values = values.view(-1, 4, 2, 64).transpose(1, 2).reshape(values.shape)
            found[f"model.layers.{layer}.{new}.weight"] = values
    model.load_state_dict(found, strict=False)
    return model


def perplexity(model: Callable[[Tensor], Any], tokens: Tensor, batch: int = 32) -> float:
    """Perplexity per token of rows of ids, [N, T + 1]: the first T predict the last T."""
    loss, count = 0.0, 0
    for rows in tokens.split(batch):
        logits = model(rows[:, :-1])
        logits = logits if isinstance(logits, Tensor) else logits[0]
        loss += float(nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
        count += rows[:, 1:].numel()
    return float(np.exp(loss / count))
