"""The quantized classes of ``aimet_torch.nn``: modules of their own, outside of any simulation.

A ``QuantizedLinear`` is an ``nn.Linear`` whose parameters, inputs and outputs pass quantizers of
``aimet_torch.quantization``, which lie in its ``state_dict`` and are trained with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from bitwright.aimet_common.absent import absence, absent_attribute
from bitwright.aimet_torch import _modules
from bitwright.aimet_torch._quantized_module import QuantizedModule
from bitwright.errors import ModelError

#: torch.nn class -> how many tensors it takes; one where it is not named
INPUTS = {
    "Embedding": 0,
    "EmbeddingBag": 0,
    "Bilinear": 2,
    "CosineSimilarity": 2,
    "PairwiseDistance": 2,
    "MSELoss": 2,
    "L1Loss": 2,
    "BCELoss": 2,
    "BCEWithLogitsLoss": 2,
    "CrossEntropyLoss": 2,
    "NLLLoss": 2,
    "KLDivLoss": 2,
    "SmoothL1Loss": 2,
    "HuberLoss": 2,
    "TripletMarginLoss": 3,
}


class UnknownModuleError(ModelError):
    """There is no quantized class for a class of modules; a RuntimeError.

    Attributes:
        module_cls: the class of modules.
        mixin_cls: the class whose ``implements`` registers a quantized class.
    """

    def __init__(self, module_cls: type[nn.Module], mixin_cls: type) -> None:
        self.module_cls, self.mixin_cls = module_cls, mixin_cls
        super().__init__(
            module_cls.__name__,
            "it has sub-modules, so that there is no quantized class of it",
            f"write one under @{mixin_cls.__name__}.implements({module_cls.__name__}), or quantize its sub-modules",
        )

    def __reduce__(self) -> Any:
        return type(self), (self.module_cls, self.mixin_cls)


class _Kind(type):
    """Modules of a simulation count as instances of the quantized classes too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        plain = cls.__dict__.get("_plain")
        return _modules.is_quantized(instance) and (
            cls.__dict__.get("_abstract", False) or (plain is not None and type(instance) is plain)
        )


class BaseQuantizationMixin(QuantizedModule, metaclass=_Kind):
    """What quantized modules add to the class they are made from.

    Attributes:
        param_quantizers, input_quantizers, output_quantizers: the quantizers, ``None`` where there is none.
    """

    _abstract = True
    _plain: Any = None
    cls_to_qcls: dict[type, type] = {}
    qcls_to_cls: dict[type, type] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__quant_init__()

    def __quant_init__(self) -> None:
        """Make the lists of quantizers; a class with another number of inputs overrides it."""
        own: Any = self
        places: Any = {name: None for name, value in own._parameters.items() if value is not None}
        self.param_quantizers = nn.ModuleDict(places)
        count = INPUTS.get(getattr(type(self)._plain, "__name__", ""), 1)
        self.input_quantizers = nn.ModuleList([None] * count)  # type: ignore[list-item]
        self.output_quantizers = nn.ModuleList([None])  # type: ignore[list-item]

    # -- classes

    @classmethod
    def wrap(cls, module_cls: type[nn.Module]) -> type:
        """A quantized class made from ``module_cls``."""
        return quantized_class(module_cls)

    @classmethod
    def implements(cls, module_cls: type[nn.Module]) -> Callable[[type], type]:
        """Decorator: the class below it is the quantized form of ``module_cls``.

        Simulations need none: they quantize what any module computes. It serves modules of their own.
        """

        def register(quantized: type) -> type:
            quantized._plain, quantized._abstract = module_cls, False  # type: ignore[attr-defined]
            cls.cls_to_qcls[module_cls], cls.qcls_to_cls[quantized] = quantized, module_cls
            return quantized

        return register

    @classmethod
    def ignore(cls, module_cls: type[nn.Module]) -> None:
        """Accepted: simulations need no quantized class of any module."""

    @classmethod
    def ignore_unknown_modules(cls, ignore: bool = True) -> None:
        """Accepted: simulations know no unknown modules."""

    @classmethod
    def from_module(cls, module: nn.Module) -> Any:
        """The quantized form of a module, with the same parameters.

        Raises:
            UnknownModuleError: (a RuntimeError) it has sub-modules, and no class is registered for it.
        """
        kind = type(module)
        quantized = cls.cls_to_qcls.get(kind)
        if quantized is None and (module._modules or kind is nn.Module):
            raise UnknownModuleError(kind, cls)
        own: Any = quantized or quantized_class(kind)
        made: Any = own.__new__(own)
        made.__dict__.update({key: copy.copy(value) if isinstance(value, dict) else value
                              for key, value in module.__dict__.items()})  # fmt: skip
        made.__quant_init__()
        return made

    def __getattr__(self, name: str) -> Any:
        parent: Any = super()
        try:
            return parent.__getattr__(name)
        except AttributeError as error:
            if absence(f"aimet_torch.nn.BaseQuantizationMixin.{name}") is None:
                raise
            raise absent_attribute("aimet_torch.nn.BaseQuantizationMixin", name) from error

    def get_original_module(self) -> nn.Module:
        """The float module, with the same parameters."""
        own: Any = self
        plain: Any = type(self)._plain or type(self).__mro__[2]
        made: Any = plain.__new__(plain)
        made.__dict__.update({key: copy.copy(value) if isinstance(value, dict) else value
                              for key, value in own.__dict__.items()})  # fmt: skip
        for name in _modules.PUBLIC:
            made._modules.pop(name, None)
        return made

    # -- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The float module's forward with quantized inputs, parameters and outputs."""
        parent: Any = super()
        taken = [_quantized(quantizer, x) for quantizer, x in zip(self.input_quantizers, args, strict=False)] + list(
            args[len(self.input_quantizers) :]
        )
        with self._patch_quantized_parameters():
            output = parent.forward(*taken, **kwargs)
        if isinstance(output, tuple):
            several = [
                _quantized(self.output_quantizers[i] if i < len(self.output_quantizers) else None, x)
                for i, x in enumerate(output)
            ]
            return tuple(several)
        return _quantized(self.output_quantizers[0], output)

    @contextmanager
    def _patch_quantized_parameters(self) -> Iterator[None]:
        """The parameters have their quantized values inside the block."""
        own: Any = self
        values = {
            name: quantizer(own._parameters[name])
            for name, quantizer in self.param_quantizers.items()
            if quantizer is not None
        }
        if "_flat_weights_names" in vars(self) and values:  # recurrent modules read this list instead
            values["_flat_weights"] = [values.get(name, own._parameters.get(name)) for name in own._flat_weights_names]
        kept = {name: vars(self)[name] for name in values if name in vars(self)}
        vars(self).update(values)
        try:
            yield
        finally:
            for name in values:
                vars(self).pop(name, None)
            vars(self).update(kept)

    def _quantizers(self) -> list[Any]:
        several = [*self.param_quantizers.values(), *self.input_quantizers, *self.output_quantizers]
        return [quantizer for quantizer in several if quantizer is not None]

    @contextmanager
    def compute_encodings(self) -> Iterator[None]:
        """Find the ranges of this module's quantizers from what passes inside the block."""
        with ExitStack() as stack:
            for quantizer in self._quantizers():
                stack.enter_context(quantizer.compute_encodings())
            yield

    def compute_param_encodings(self) -> None:
        """Find the ranges of the parameters' quantizers."""
        own: Any = self
        for name, quantizer in self.param_quantizers.items():
            if quantizer is not None:
                with quantizer.compute_encodings():
                    quantizer(own._parameters[name])

    @torch.no_grad()
    def fold_param_quantizers(self) -> None:
        """Write the quantized values into the parameters and take their quantizers away."""
        own: Any = self
        for name, quantizer in list(self.param_quantizers.items()):
            if quantizer is not None:
                own._parameters[name].copy_(quantizer(own._parameters[name]))
                self.param_quantizers[name] = None


class QuantizationMixin(BaseQuantizationMixin):
    """:class:`BaseQuantizationMixin` under its usual name."""

    _abstract = True
    cls_to_qcls = BaseQuantizationMixin.cls_to_qcls
    qcls_to_cls = BaseQuantizationMixin.qcls_to_cls


def _quantized(quantizer: Any, value: Any) -> Any:
    tensor = isinstance(value, torch.Tensor) and value.is_floating_point()
    return quantizer(value) if quantizer is not None and tensor else value


def quantized_class(module_cls: type[nn.Module]) -> type:
    """The quantized class of ``module_cls``; made once."""
    known = BaseQuantizationMixin.cls_to_qcls.get(module_cls)
    if known is None:
        made: Any = _Kind(
            f"Quantized{module_cls.__name__}",
            (QuantizationMixin, module_cls),
            {
                "_plain": module_cls,
                "_abstract": False,
                "__module__": "bitwright.aimet_torch.nn",
                "__doc__": f"A quantized ``{module_cls.__name__}``.",
            },
        )
        known = BaseQuantizationMixin.cls_to_qcls[module_cls] = made
        BaseQuantizationMixin.qcls_to_cls[made] = module_cls
    return known


def check_plain(model: nn.Module) -> None:
    """Refuse modules that quantize on their own inside a model to be simulated.

    Raises:
        ModelError: with the first one.
    """
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.Module) and BaseQuantizationMixin in type(module).__mro__:
            own: Any = module
            if own._quantizers():
                raise ModelError(
                    name or type(module).__name__,
                    "it has quantizers of its own, which the simulation would come on top of",
                    "simulate the float model (get_original_module()), then set sim.model's quantizers",
                )
