"""``aimet_torch.peft``: PEFT models whose adapters have layers of their own names, and the quantizers of these layers.

Simulations of PEFT models need none of it: they leave adapters in float and quantize the base. AIMET's scripts replace the
layers of PEFT first, set the grids of base and adapters apart, and export the adapters alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from bitwright.aimet_common.names import absent_names, differs
from bitwright.aimet_torch.quantized_modules import Add, BaseQuantizationMixin, Multiply
from bitwright.aimet_torch.quantizers import QuantizeDequantize
from bitwright.errors import ConfigError, with_article
from bitwright.torch.calls.inputs import walk_modules

__all__ = [
    "AdapterMetaData", "LoraLayer", "PeftQuantUtils", "freeze_base_model", "freeze_base_model_activation_quantizers",
    "freeze_base_model_param_quantizers", "replace_lora_layers_with_quantizable_layers", "track_lora_meta_data",
]  # fmt: skip

__getattr__ = absent_names(__name__)


class LoraLayer(nn.Module):
    """A layer with adapters: ``base(x) + sum of B(A(x) * scaling)``, from a LoRA layer of PEFT with its parameters.

    All adapters are added, as in AIMET, so that a graph holds each of them; one whose B is zero has no effect.

    Attributes:
        lora_A, lora_B, lora_dropout: lists, in the order of the adapters.
        scaling: alpha over rank of every adapter.
        lora_alpha, r: by name of the adapter.
        index_to_adapter_name, adapter_name_to_index: the order.
        active_adapters: name -> whether PEFT had it switched on.

    Raises:
        ConfigError: the layer's adapters are computed otherwise (DoRA), or are not linear layers and convolutions.
    """

    lora_A: nn.ModuleList
    lora_B: nn.ModuleList
    lora_dropout: nn.ModuleList

    def __init__(self, lora_layer: Any) -> None:
        super().__init__()
        names = list(lora_layer.lora_A)
        _check(lora_layer, names)
        self.base_layer = lora_layer.base_layer
        self.lora_alpha, self.r = dict(lora_layer.lora_alpha), dict(lora_layer.r)
        self.in_features, self.out_features = lora_layer.in_features, lora_layer.out_features
        self.adapter_name_to_index = {name: index for index, name in enumerate(names)}
        self.index_to_adapter_name = dict(enumerate(names))
        self.active_adapters = {name: name in lora_layer.active_adapters for name in names}
        weight = self.base_layer.weight
        self.scaling = nn.ParameterList(
            nn.Parameter(torch.as_tensor(float(lora_layer.scaling[name]), device=weight.device), requires_grad=False)
            for name in names
        )
        for part in ("lora_A", "lora_B", "lora_dropout"):
            setattr(self, part, nn.ModuleList([getattr(lora_layer, part)[name] for name in names]))
        self.mul_scale, self.add_lora_to_res = Multiply(), Add()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The base layer's output with what the adapters add, in the dtype of the base layer's."""
        result = base = self.base_layer(x, *args, **kwargs)
        parts = zip(self.lora_A, self.lora_B, self.lora_dropout, self.scaling, strict=True)
        for lora_a, lora_b, dropout, scaling in parts:
            weight: Any = lora_a.weight
            reduced = lora_a(dropout(x.to(weight.dtype)))
            result = self.add_lora_to_res(result, lora_b(self.mul_scale(reduced, scaling)))
        return result.to(base.dtype)


def _check(layer: Any, names: list[str]) -> None:
    special = [name for name in names if getattr(layer, "use_dora", {}).get(name)]
    if special or not all(hasattr(layer, key) for key in ("in_features", "out_features", "scaling")):
        raise ConfigError(
            "replace_lora_layers_with_quantizable_layers",
            f"{with_article(type(layer).__name__)} {'with DoRA adapters ' + str(special) if special else ''} "
            "is not base + B(A(x))",
            "leave the layers as they are: simulations quantize the base of PEFT models",
        )
    idle = [n for n in names if n not in layer.active_adapters and bool(layer.lora_B[n].weight.any())]
    if idle:
        differs(
            "LoraLayer",
            f"adapters {idle} are not active in PEFT and are added too; disable_lora_adapters sets B to zero",
        )


def _is_lora(module: nn.Module) -> bool:
    """Whether it is a LoRA layer of PEFT, by its parts."""
    parts = (getattr(module, name, None) for name in ("lora_A", "lora_B", "base_layer"))
    return (
        not isinstance(module, LoraLayer) and all(isinstance(part, nn.Module) for part in parts) and bool(module.lora_A)
    )


def replace_lora_layers_with_quantizable_layers(model: nn.Module) -> None:
    """Make a :class:`LoraLayer` of every LoRA layer of PEFT, in place.

    Raises:
        ConfigError: (a ValueError) adapters that :class:`LoraLayer` does not compute; layers before it are replaced.
    """
    modules = dict(walk_modules(model))
    for name, module in modules.items():
        if _is_lora(module):
            holder, _, last = name.rpartition(".")
            setattr(modules[holder], last, LoraLayer(module).train(module.training))


class AdapterMetaData:
    """The modules of one adapter.

    Attributes:
        lora_A, lora_B, mul_scale: names of its modules.
        alpha: its ``lora_alpha``.
    """

    def __init__(self) -> None:
        self.lora_A: list[str] = []
        self.lora_B: list[str] = []
        self.mul_scale: list[str] = []
        self.alpha: Any = None


def track_lora_meta_data(
    model: nn.Module, path: str | Path, filename_prefix: str, replaced_module_type: type[nn.Module] | None = None
) -> dict[str, AdapterMetaData]:
    """Adapter -> the names of its modules, also written to ``<filename_prefix>.json`` (AIMET pickles).

    Args:
        model: a model of :class:`LoraLayer`.
        path: folder of the file.
        replaced_module_type: class that stands for linear layers and holds a convolution ``conv2d``.
    """
    found: dict[str, AdapterMetaData] = {}
    for name, module in walk_modules(model):
        if isinstance(module, LoraLayer):
            for adapter, index in module.adapter_name_to_index.items():
                data = found.setdefault(adapter, AdapterMetaData())
                for part, names in (("lora_A", data.lora_A), ("lora_B", data.lora_B)):
                    inner = replaced_module_type and isinstance(getattr(module, part)[index], replaced_module_type)
                    names.append(f"{name}.{part}.{index}{'.conv2d' if inner else ''}")
                data.mul_scale.append(f"{name}.mul_scale")
                data.alpha = module.lora_alpha[adapter]
    text = json.dumps({adapter: vars(data) for adapter, data in found.items()}, indent=1)
    Path(path, f"{filename_prefix}.json").write_text(text, "utf-8")
    return found


class PeftQuantUtils:
    """Quantizers of the base and of the adapters of a simulation.

    Args:
        adapater_name_to_meta_data: what :func:`track_lora_meta_data` returned.
        name_to_module_dict: AIMET's names of a prepared model; simulations take the model itself, whose names stay.
    """

    def __init__(self, adapater_name_to_meta_data: dict[str, AdapterMetaData], name_to_module_dict: Any = None) -> None:
        self.adapter_name_to_meta_data = adapater_name_to_meta_data
        data = adapater_name_to_meta_data.values()
        self.lora_layers = {name for one in data for name in (*one.lora_A, *one.lora_B)}
        if name_to_module_dict:
            differs(
                "PeftQuantUtils(name_to_module_dict=...)", "no prepared model is needed: names are those of the model"
            )

    def _layers(self, sim: Any, adapters: bool) -> Iterator[tuple[str, Any]]:
        for name, module in sim.model.named_modules():
            if isinstance(module, BaseQuantizationMixin) and (name in self.lora_layers) == adapters:
                yield name, module

    def get_quantized_lora_layer(self, sim: Any) -> Iterator[tuple[str, Any]]:
        """Names and modules of the adapters in a simulation."""
        return self._layers(sim, True)

    def get_fp_lora_layer(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Names and modules of the adapters in a float model."""
        return ((name, module) for name, module in model.named_modules() if name in self.lora_layers)

    def quantize_lora_scale_with_fixed_range(
        self, sim: Any, bitwidth: int, scale_min: float = 0, scale_max: float = 1e-5
    ) -> None:
        """Quantize the scaling of adapters on a grid from ``scale_min`` to ``scale_max``, through calibration."""
        for module in (m for m in sim.model.modules() if isinstance(m, LoraLayer)):
            quantizer = QuantizeDequantize((), bitwidth, False)
            quantizer.set_range(torch.tensor(float(scale_min)), torch.tensor(float(scale_max)))
            module.mul_scale.input_quantizers[1] = quantizer
            _freeze(module.mul_scale.input_quantizers[1])

    def freeze_base_model_param_quantizers(self, sim: Any) -> None:
        """Keep the ranges of the base's parameters through calibration and training."""
        for _, module in self._layers(sim, False):
            _freeze(*module.param_quantizers.values())

    def freeze_base_model_activation_quantizers(self, sim: Any) -> None:
        """Keep the ranges of the base's activations through calibration and training."""
        for _, module in self._layers(sim, False):
            _freeze(*module.input_quantizers, *module.output_quantizers)

    def freeze_base_model(self, sim: Any) -> None:
        """Keep all ranges of the base."""
        self.freeze_base_model_activation_quantizers(sim)
        self.freeze_base_model_param_quantizers(sim)

    def set_bitwidth_for_lora_adapters(self, sim: Any, output_bw: int, param_bw: int) -> None:
        """Use so many bits for outputs and parameters of the adapters."""
        for _, module in self._layers(sim, True):
            for quantizers, bits in (
                (module.output_quantizers, output_bw),
                (module.param_quantizers.values(), param_bw),
            ):
                for quantizer in (q for q in quantizers if q is not None):
                    quantizer.bitwidth = bits

    def _parameters(self, sim: Any) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{param}": value
            for name, module in sim.model.named_modules()
            if name in self.lora_layers
            for param, value in module.named_parameters(recurse=False)
            if param in ("weight", "bias")
        }

    def export_adapter_weights(
        self, sim: Any, path: str | Path, filename_prefix: str, onnx_model_path: str | None = None
    ) -> None:
        """Write weights and biases of the adapters to ``<filename_prefix>.safetensor``.

        Args:
            onnx_model_path: an argument of older scripts; names are those of the model.
        """
        tensors = {name: value.detach().contiguous() for name, value in self._parameters(sim).items()}
        save_file(tensors, os.path.join(path, f"{filename_prefix}.safetensor"))

    def enable_adapter_and_load_weights(
        self, sim: Any, adapter_weights_path: str | Path, use_safetensor: bool = True
    ) -> None:
        """Put the weights of adapters in a file into effect; ranges of their weights follow from the next calibration.

        Raises:
            ConfigError: (a ValueError) ``use_safetensor=False``: such files are pickles; or a tensor that is not one of
                the adapters, or of another shape; or the file cannot be read. Nothing is changed.
            KeyError: an adapter's weight is not in the file. Nothing is changed.
        """
        if not use_safetensor:
            raise ConfigError(
                "enable_adapter_and_load_weights", "files of torch.save are pickles, which run code when they are read",
                "write the weights with safetensors, for example by export_adapter_weights",
            )  # fmt: skip
        try:
            tensors, own = load_file(adapter_weights_path), self._parameters(sim)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{adapter_weights_path}", f"it cannot be read: {error}", "give a file of export_adapter_weights"
            ) from error
        wrong = sorted(n for n, value in tensors.items() if n not in own or own[n].shape != value.shape)
        if wrong:
            raise ConfigError(
                f"{adapter_weights_path}", f"{wrong[:5]} are not weights of the adapters, or have another shape",
                "load the file of these adapters",
            )  # fmt: skip
        missing = sorted(n for n in self.lora_layers if f"{n}.weight" not in tensors)
        if missing:
            raise KeyError(f"{adapter_weights_path} has no weights of {missing[:5]}")
        _write(own, tensors)

    def disable_lora_adapters(self, sim: Any) -> None:
        """Set weights and biases of all adapters to zero."""
        own = self._parameters(sim)
        _write(own, {name: torch.zeros_like(value) for name, value in own.items()})


@torch.no_grad()
def _write(own: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        own[name].copy_(value)


def _freeze(*quantizers: Any) -> None:
    for quantizer in (q for q in quantizers if q is not None):
        quantizer.allow_overwrite(False)
        quantizer.requires_grad_(False)


def _whole(sim: Any) -> PeftQuantUtils:
    """The quantizers of a simulation by the names of PEFT: what lies below ``lora_A`` and ``lora_B`` is an adapter."""
    found = PeftQuantUtils({})
    names = (name for name, _ in walk_modules(sim.model))
    found.lora_layers = {name for name in names if not {"lora_A", "lora_B"}.isdisjoint(name.split("."))}
    return found


def freeze_base_model(sim: Any) -> None:
    """Keep all ranges but those of adapters."""
    _whole(sim).freeze_base_model(sim)


def freeze_base_model_param_quantizers(sim: Any) -> None:
    """Keep the ranges of parameters but those of adapters."""
    _whole(sim).freeze_base_model_param_quantizers(sim)


def freeze_base_model_activation_quantizers(sim: Any) -> None:
    """Keep the ranges of activations but those of adapters."""
    _whole(sim).freeze_base_model_activation_quantizers(sim)
