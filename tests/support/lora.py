"""A linear layer with adapters as PEFT builds it, for tests that run without PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class PeftLinear(nn.Module):
    """``base(x) + sum of B(A(x)) * scaling`` over the active adapters, with the parts and methods of PEFT's layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.r: dict[str, int] = {}
        self.lora_alpha: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.lora_A, self.lora_B, self.lora_dropout = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.active_adapters: list[str] = []
        self.merged_adapters: list[str] = []
        self.disable_adapters = False

    def add(self, name: str, rank: int, alpha: int) -> None:
        self.r[name], self.lora_alpha[name], self.scaling[name] = rank, alpha, alpha / rank
        self.lora_A[name] = nn.Linear(self.in_features, rank, bias=False)
        self.lora_B[name] = nn.Linear(rank, self.out_features, bias=False)
        self.lora_dropout[name] = nn.Identity()

    def set_adapter(self, names: list[str]) -> None:
        self.active_adapters = list(names)
        for part in (self.lora_A, self.lora_B):
            for name, layer in part.items():
                layer.requires_grad_(name in names)

    def enable_adapters(self, enabled: bool) -> None:
        self.disable_adapters = not enabled

    def _delta(self, name: str) -> Tensor:
        up: Any = self.lora_B[name].weight
        down: Any = self.lora_A[name].weight
        return up @ down * self.scaling[name]

    def merge(self) -> None:
        for name in self.active_adapters:
            if name in self.lora_A:
                self.base_layer.weight += self._delta(name)
                self.merged_adapters.append(name)

    def unmerge(self) -> None:
        while self.merged_adapters:
            self.base_layer.weight -= self._delta(self.merged_adapters.pop())

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name in self.active_adapters:
            if name in self.lora_A and not self.disable_adapters and not self.merged_adapters:
                result = result + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
        return result


class Multiplied(nn.Linear):
    """A layer that multiplies by the transpose of its weight itself, as that of Falcon."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Adapted(nn.Module):
    """Two such layers and one without, with the calls of a model of PEFT that simulations use.

    Args:
        kind: of the layers that have adapters.
    """

    def __init__(self, kind: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.last = PeftLinear(kind(32, 48)), PeftLinear(kind(48, 32)), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.down(torch.relu(self.up(x)))))

    def add_adapter(self, name: str, rank: int = 4, alpha: int = 8, layers: tuple[str, ...] = ("up", "down")) -> None:
        torch.manual_seed(len(name))
        for layer in layers:
            getattr(self, layer).add(name, rank, alpha)
        if len(self.up.lora_A) == 1:
            self.set_adapter(name)
        self.eval()

    def set_adapter(self, name: str) -> None:
        for layer in (self.up, self.down):
            layer.set_adapter([name])

    def save_adapter(self, folder: Path, name: str, **changes: Any) -> None:
        marked = f".{name}."
        tensors = {n.replace(marked, "."): t for n, t in self.state_dict().items() if "lora_" in n and marked in n}
        folder.mkdir(parents=True, exist_ok=True)
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors")
        config = {"r": self.up.r[name], "lora_alpha": self.up.lora_alpha[name], "peft_type": "LORA"} | changes
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def load_adapter(self, folder: str, name: str) -> None:
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        layers = {key.partition(".lora_")[0] for key in tensors}
        self.add_adapter(name, config["r"], config["lora_alpha"], tuple(sorted(layers)))
        for key, tensor in tensors.items():
            layer, _, part = key.partition(".")
            getattr(getattr(self, layer), part.partition(".")[0])[name].weight.data.copy_(tensor)
