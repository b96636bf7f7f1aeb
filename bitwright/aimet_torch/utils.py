"""``aimet_torch.utils``: quantizers removed for a while, and small helpers that scripts import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bitwright.aimet_common.names import absent_names
from bitwright.aimet_common.utils import CachedDataset as Batches
from bitwright.aimet_common.utils import Handle
from bitwright.aimet_common.utils import StopForwardException as StopForwardException
from bitwright.aimet_torch.module_quantizers import below, record_of, switched_off
from bitwright.errors import with_article
from bitwright.torch.calls.inputs import is_leaf, model_device, to_device, walk_modules

__getattr__ = absent_names(__name__)

__all__ = [
    "change_tensor_device_placement", "create_fake_data_loader", "create_rand_tensors_given_shapes",
    "default_forward_fn", "disable_all_quantizers", "get_all_named_parameters", "get_all_quantizers", "get_device",
    "get_layer_name", "get_module_to_name_dict", "has_no_quantizers", "in_eval_mode", "in_train_mode",
    "CachedDataset", "StopForwardException", "is_leaf_module", "place_model", "is_model_on_gpu",
    "remove_activation_quantizers", "remove_all_quantizers", "remove_input_quantizers", "remove_output_quantizers",
    "remove_param_quantizers", "replace_modules", "replace_modules_of_type1_with_type2",
]  # fmt: skip


def _removed(modules: Any, *kinds: str) -> Handle:
    records = below(modules)
    sites = [site for record in records for kind, site in record.own() if kind in kinds]
    return switched_off([*sites, *(site for r in records for site in r.inside if site.role in kinds)])


def remove_input_quantizers(modules: Any) -> Handle:
    """Switch off the input quantizers of modules and everything below them; they come back at the end of a ``with`` block."""
    return _removed(modules, "input")


def remove_output_quantizers(modules: Any) -> Handle:
    """Switch off the output quantizers of modules and everything below them; they come back at the end of a ``with`` block."""
    return _removed(modules, "output")


def remove_param_quantizers(modules: Any) -> Handle:
    """Switch off the parameter quantizers of modules and everything below; they come back at the end of a ``with`` block."""
    return _removed(modules, "param")


def remove_activation_quantizers(modules: Any) -> Handle:
    """Switch off all quantizers but those of parameters; they come back at the end of a ``with`` block."""
    return _removed(modules, "input", "output")


def remove_all_quantizers(modules: Any) -> Handle:
    """Switch off all quantizers of modules and everything below them; they come back at the end of a ``with`` block."""
    return _removed(modules, "input", "output", "param")


def get_all_quantizers(model: nn.Module) -> tuple[list[Any], list[Any], list[Any]]:
    """Parameter, input and output quantizers of a simulated model, ``None`` where one is off."""
    found: dict[str, list[Any]] = {"param": [], "input": [], "output": []}
    for record in below(model):
        if record.inside or record.params or len(record.inputs):
            for name, slot in record.slots():
                found[name.partition("_")[0]].append(slot.get())
    return found["param"], found["input"], found["output"]


disable_all_quantizers = remove_all_quantizers  # its older name


def has_no_quantizers(module: nn.Module, ignore_params: bool = False) -> bool:
    """Whether no quantizer of a module is in effect."""
    record = record_of(module)
    slots = () if record is None else record.slots()
    return not any(slot.get() for name, slot in slots if not (ignore_params and name.startswith("param")))


def default_forward_fn(model: nn.Module, inputs: Any) -> Any:
    """Run a model on a batch; of a pair, such as ``(images, labels)``, on the first."""
    return model(unlabelled(inputs))


def unlabelled(batch: Any) -> Any:
    """The batch; of a list or tuple of two the first, as AIMET takes the second for labels."""
    return batch[0] if isinstance(batch, (list, tuple)) and len(batch) == 2 else batch


class Unlabelled:
    """The batches of a loader without labels; gone through as often as the loader."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return (unlabelled(batch) for batch in self._loader)


def get_device(model: nn.Module) -> torch.device:
    """Device of the model's first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def is_model_on_gpu(model: nn.Module) -> bool:
    """Whether the model's first parameter is on a GPU."""
    return get_device(model).type == "cuda"


class CachedDataset(Batches):
    """:class:`bitwright.aimet_common.utils.CachedDataset` of tensors: one, or a tuple, list or dict of them."""

    def _array(self, value: Any) -> Any:
        return value.detach().cpu().numpy()

    def _value(self, array: Any) -> Any:
        return torch.from_numpy(array)


@contextmanager
def place_model(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Place a model on ``device`` inside the block."""
    before = model_device(model)
    try:
        model.to(device)
        yield
    finally:
        model.to(before)


def is_leaf_module(module: nn.Module) -> bool:
    """Whether a module has no sub-modules."""
    return is_leaf(module)


def get_module_to_name_dict(model: nn.Module, prefix: str = "") -> dict[nn.Module, str]:
    """Module -> its path below ``model``."""
    return {module: f"{prefix}.{name}" if prefix else name for name, module in walk_modules(model)}


def get_layer_name(model: nn.Module, layer: nn.Module) -> str:
    """Path of a module in a model.

    Raises:
        KeyError: it is not a module of the model.
    """
    for name, module in walk_modules(model):
        if module is layer:
            return name
    raise KeyError(f"{with_article(type(layer).__name__)} is not a module of this {type(model).__name__}")


def get_all_named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter with its path, tied ones under each of their names."""
    return model.named_parameters(remove_duplicate=False)


def replace_modules(
    model: nn.Module, condition: Callable[[nn.Module], bool], factory: Callable[[nn.Module], nn.Module]
) -> None:
    """Put ``factory(module)`` in place of every sub-module for which ``condition`` holds."""
    for _, parent in list(walk_modules(model)):
        for name, child in list(parent._modules.items()):
            if child is not None and condition(child):
                setattr(parent, name, factory(child))


def replace_modules_of_type1_with_type2(model: nn.Module, type1: type[nn.Module], type2: type[nn.Module]) -> None:
    """Put ``type2()`` in place of every sub-module of ``type1``."""
    replace_modules(model, lambda module: isinstance(module, type1), lambda _: type2())


def create_rand_tensors_given_shapes(input_shape: Any, device: torch.device) -> list[torch.Tensor]:
    """Random tensors of a shape, or of each of several."""
    shapes = input_shape if isinstance(input_shape, list) else [input_shape]
    return [torch.rand(tuple(shape), device=device) for shape in shapes]


def create_fake_data_loader(dataset_size: int, batch_size: int, image_size: Any = (1, 28, 28)) -> Any:
    """A DataLoader of random images and labels below 10."""
    data = torch.utils.data.TensorDataset(torch.rand(dataset_size, *image_size), torch.randint(0, 10, (dataset_size,)))
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def change_tensor_device_placement(input_data: Any, device: torch.device) -> Any:
    """Nested tuples, lists and dicts with their tensors on a device."""
    return to_device(input_data, device)


@contextmanager
def _mode(module: Any, training: bool) -> Iterator[None]:
    tops = [module] if isinstance(module, nn.Module) else list(module)
    kept = [(m, m.training) for top in tops for m in top.modules()]
    for m, _ in kept:
        m.training = training
    try:
        yield
    finally:
        for m, was in kept:
            m.training = was


def in_eval_mode(module: Any) -> Any:
    """Modules in evaluation mode inside a ``with`` block."""
    return _mode(module, False)


def in_train_mode(module: Any) -> Any:
    """Modules in training mode inside a ``with`` block."""
    return _mode(module, True)
