"""Modules with quantizers: the classes of ``aimet_torch.nn``, methods on the modules of a simulation, functions as modules.

A ``QuantizedLinear`` is an ``nn.Linear`` whose parameters, inputs and outputs pass quantizers of ``aimet_torch.quantization``,
which lie in its ``state_dict`` and are trained with it. Modules of a simulation keep their own classes; the same methods are
attributes of the instances. Functions as modules (``nn.modules.custom``, ``elementwise_ops``) serve models that use them:
simulations quantize functional calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from bitwright.aimet_common.names import absence, absent_attribute, absent_names
from bitwright.aimet_common.sites import activations_in_float
from bitwright.aimet_common.utils import Handle
from bitwright.aimet_torch.module_quantizers import (
    METHODS,
    PUBLIC,
    REGISTERED,
    QuantizedModule,
    Record,
    below,
    detach,
    fold_parameters,
    is_quantized,
    record_of,
    twin,
)  # fmt: skip
from bitwright.aimet_torch.quantizers import DequantizedTensor, QuantizedTensor, with_encoding
from bitwright.errors import ModelError, with_article
from bitwright.torch.calls.inputs import walk_modules
from bitwright.torch.modularize import FUNCTION_MODULES, TENSORS, ComposedAttention

# ------------------------------------------------------------------------------------ quantized classes


#: class -> how many tensors it takes; one where it is not named
INPUTS = {
    name: count
    for count, names in enumerate((
        "Embedding",
        "EmbeddingBag NLLLoss",
        "Bilinear CosineSimilarity PairwiseDistance MSELoss L1Loss BCELoss BCEWithLogitsLoss CrossEntropyLoss KLDivLoss "
        "SmoothL1Loss HuberLoss CosineEmbeddingLoss MarginRankingLoss PoissonNLLLoss RNN GRU RNNCell GRUCell GatherNd",
        "TripletMarginLoss GaussianNLLLoss TripletMarginWithDistanceLoss LSTM LSTMCell DynamicConv2d ScatterND RoiAlign "
        "MultiheadAttention",
        "RotaryEmbedding",
    ))
    for name in names.split()
}  # fmt: skip
#: the same for outputs: recurrent modules return their states too
OUTPUTS = {"RNN": 2, "GRU": 2, "LSTM": 3, "LSTMCell": 2, "MultiheadAttention": 2}


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
            "there is no quantized class of it",
            f"write one, or quantize its sub-modules:\n{self.generate_code_example()}",
        )

    def generate_code_example(self) -> str:
        """Source code that defines a quantized class of the module."""
        name, mixin = self.module_cls.__name__, self.mixin_cls.__name__
        return (
            f"@{mixin}.implements({name})\nclass Quantized{name}({mixin}, {name}):\n"
            "    def forward(self, *args, **kwargs):\n        return super().forward(*args, **kwargs)\n"
        )

    def __reduce__(self) -> Any:
        return type(self), (self.module_cls, self.mixin_cls)


class _Kind(type):
    """Metaclass that makes modules of a simulation instances of the quantized classes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        plain = cls.__dict__.get("_plain")
        return is_quantized(instance) and (
            cls.__dict__.get("_abstract", False) or (plain is not None and type(instance) is plain)
        )


class BaseQuantizationMixin(QuantizedModule, metaclass=_Kind):
    """Base class of quantized modules.

    Attributes:
        param_quantizers, input_quantizers, output_quantizers: the quantizers, ``None`` where there is none.
    """

    _abstract = True
    _plain: Any = None
    _at_edges = True  # whether simulations quantize modules of the float class with sub-modules at their edges alone
    cls_to_qcls: dict[type, type] = REGISTERED
    qcls_to_cls: dict[type, type] = {}
    ignored: set[type] = set()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__quant_init__()

    def __quant_init__(self) -> None:
        """Create the lists of quantizers; override it for another number of inputs."""
        own: Any = self
        places: Any = {name: None for name, value in own._parameters.items() if value is not None}
        self.param_quantizers = nn.ModuleDict(places)
        kind = getattr(type(self)._plain, "__name__", "")
        self.input_quantizers = nn.ModuleList([None] * INPUTS.get(kind, 1))  # type: ignore[list-item]
        self.output_quantizers = nn.ModuleList([None] * OUTPUTS.get(kind, 1))  # type: ignore[list-item]

    # -- classes

    @classmethod
    def wrap(cls, module_cls: type[nn.Module]) -> type:
        """A quantized class made from ``module_cls``."""
        return quantized_class(module_cls)

    @classmethod
    def implements(cls, module_cls: type[nn.Module]) -> Callable[[type], type]:
        """Decorator: the class below it is the quantized form of ``module_cls``.

        Simulations quantize what any module computes; one that has sub-modules only at its edges, where it is registered here.
        """

        def register(quantized: type) -> type:
            quantized._plain, quantized._abstract = module_cls, False  # type: ignore[attr-defined]
            cls.cls_to_qcls[module_cls], cls.qcls_to_cls[quantized] = quantized, module_cls
            cls.ignored.discard(module_cls)
            return quantized

        return register

    @classmethod
    def ignore(cls, module_cls: type[nn.Module]) -> type[nn.Module]:
        """Leave modules of a class in float; also as a decorator."""
        cls.ignored.add(module_cls)
        return module_cls

    @classmethod
    def ignore_unknown_modules(cls, ignore: bool = True) -> None:
        """Without effect: simulations quantize modules of every class."""

    @classmethod
    def from_module(cls, module: nn.Module) -> Any:
        """The quantized form of a module, with the same parameters.

        Raises:
            UnknownModuleError: (a RuntimeError) no class is registered for it, and it is none of PyTorch without sub-modules.
        """
        kind = type(module)
        quantized = cls.cls_to_qcls.get(kind)
        if kind in cls.ignored:
            return module
        own_kind = kind.__module__.startswith(("torch.nn.", "bitwright."))
        if quantized is None and (module._modules or not own_kind or kind is nn.Module):
            raise UnknownModuleError(kind, cls)
        own: Any = quantized or quantized_class(kind)
        made = twin(module, own)
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
        made: nn.Module = twin(own, type(self)._plain or type(self).__mro__[2])
        for name in PUBLIC:
            made._modules.pop(name, None)
        return made

    # -- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The float module's forward with quantized inputs, parameters and outputs; states in a tuple follow one another."""
        parent: Any = super()
        quantizers: Iterator[Any] = iter(self.input_quantizers)
        taken = [_quantized_each(quantizers, x) for x in args]
        with self._patch_quantized_parameters():
            output = parent.forward(*taken, **kwargs)
        quantizers = iter(self.output_quantizers)
        if isinstance(output, tuple):
            return tuple([_quantized_each(quantizers, x) for x in output])
        return _quantized_each(quantizers, output)

    @contextmanager
    def _patch_quantized_parameters(self) -> Iterator[None]:
        """Replace the parameters by their quantized values inside the block."""
        own: Any = self
        values = {
            name: _quantized(quantizer, own._parameters[name])
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

    def _without(self, *kinds: str) -> Handle:
        """Take quantizers away; they come back at the end of a ``with`` block."""
        holders = [getattr(self, f"{kind}_quantizers") for kind in kinds]
        kept = [
            (holder, key, quantizer)
            for holder in holders
            for key, quantizer in (list(holder.items()) if isinstance(holder, nn.ModuleDict) else enumerate(holder))
        ]

        def put_back() -> None:
            for holder, key, quantizer in kept:
                holder[key] = quantizer

        for holder, key, _ in kept:
            holder[key] = None
        return Handle(put_back)

    _remove_input_quantizers = functools.partialmethod(_without, "input")
    _remove_output_quantizers = functools.partialmethod(_without, "output")
    _remove_param_quantizers = functools.partialmethod(_without, "param")
    _remove_activation_quantizers = functools.partialmethod(_without, "input", "output")
    _remove_all_quantizers = functools.partialmethod(_without, "input", "output", "param")

    @contextmanager
    def compute_encodings(self) -> Iterator[None]:
        """Find the ranges of this module's quantizers from the tensors that pass inside the block.

        Activations stay in float there and parameters are quantized, as in a simulation.
        """
        self.compute_param_encodings()
        activations = [q for q in (*self.input_quantizers, *self.output_quantizers) if q is not None]
        with ExitStack() as stack:
            for quantizer in activations:
                if quantizer.is_overwrite_allowed():
                    stack.enter_context(quantizer.compute_encodings())
            yield

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


def is_own(module: Any) -> bool:
    """Whether a module is one of these classes itself; modules of simulations are instances of them, and are not."""
    return BaseQuantizationMixin in type(module).__mro__


def _quantized(quantizer: Any, value: Any) -> Any:
    """The values of a tensor by a quantizer, where there is one: modules compute with values, not with codes."""
    value = value.dequantize() if isinstance(value, QuantizedTensor) else value
    if quantizer is None or not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return value
    found = quantizer(value)
    if quantizer.observing:
        return value
    return found.dequantize() if isinstance(found, QuantizedTensor) else found


def _quantized_each(quantizers: Iterator[Any], value: Any) -> Any:
    """A tensor, or a tuple of them, by the next quantizers."""
    if isinstance(value, tuple):
        return tuple([_quantized(next(quantizers, None), x) for x in value])
    return _quantized(next(quantizers, None), value)


def quantized_class(module_cls: type[nn.Module]) -> type:
    """The quantized class of ``module_cls``, created on first use."""
    known = BaseQuantizationMixin.cls_to_qcls.get(module_cls)
    if known is None:
        made: Any = _Kind(
            f"Quantized{module_cls.__name__}",
            (QuantizationMixin, module_cls),
            {
                "_plain": module_cls,
                "_abstract": False,
                "_at_edges": False,
                "__module__": "bitwright.aimet_torch.nn",
                "__doc__": f"A quantized ``{module_cls.__name__}``.",
            },
        )
        known = BaseQuantizationMixin.cls_to_qcls[module_cls] = made
        BaseQuantizationMixin.qcls_to_cls[made] = module_cls
    return known


def check_plain(model: nn.Module) -> None:
    """Raise an error for a model to be simulated that contains quantized modules.

    Raises:
        ModelError: with the first one.
    """
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if is_own(module):
            own: Any = module
            if own._quantizers():
                raise ModelError(
                    name or type(module).__name__,
                    "it has quantizers of its own, which the simulation would come on top of",
                    "simulate the float model (get_original_module()), then set sim.model's quantizers",
                )


# ------------------------------------------------------------------------------------ calibration


class _NothingRan(Exception):
    """The callback returned without running the model."""


def calibrate(
    sim: Any, callback: Callable[[nn.Module], Any], compute: Callable[..., None], options: dict[str, Any]
) -> None:
    """Calibrate by a callback. If it does not run the model, only encodings of parameters are found, as in AIMET."""
    ran: list[bool] = []
    handle = sim.model.register_forward_hook(lambda *_: ran.append(True))

    def counted(model: nn.Module) -> None:
        callback(model)
        if not ran:
            raise _NothingRan

    try:
        compute(counted, **options)
    except _NothingRan:
        calibrate_parameters(sim, compute)
    finally:
        handle.remove()


def calibrate_parameters(sim: Any, compute: Callable[..., None]) -> None:
    """Find the encodings of the parameters on the example input; all other quantizers keep theirs."""
    with activations_in_float(sim):
        compute(None, progress=False)


@contextmanager
def compute_encodings(model: nn.Module) -> Iterator[None]:
    """Calibrate on every call of a simulated model inside the block; the encodings are in effect at its end.

    With a part of the model (``sim.model.layer1``), the encodings of all other places are kept.

    Raises:
        ModelError: no model of a simulation of this layer.
    """
    record = record_of(model)
    own_modules: list[Any] = [m for m in model.modules() if is_own(m)]
    if record is not None:
        with _others_kept(record.sim, model), _observed(record.sim):
            yield
        return
    if not own_modules:
        raise ModelError(
            "compute_encodings",
            f"{with_article(type(model).__name__)} is not a module of a simulation",
            "pass sim.model of a bitwright.aimet_torch.QuantizationSimModel, or one of its modules",
        )
    with ExitStack() as stack:
        for module in own_modules:
            stack.enter_context(module.compute_encodings())
        yield


@contextmanager
def _others_kept(sim: Any, model: nn.Module) -> Iterator[None]:
    """Keep the encodings of all quantizers outside ``model`` inside the block."""
    records = list(below(model))
    own = {id(site.quantizer) for r in records for _, site in r.own()}
    own |= {id(site.quantizer) for r in records for site in r.inside}
    kept = [(q, q.frozen, q.enabled) for q in sim.quantizers.unique() if id(q) not in own]
    for quantizer, _, enabled in kept:  # what has no range yet cannot take part, and stays without one
        quantizer.frozen, quantizer.enabled = True, enabled and quantizer.encoding is not None
    try:
        yield
    finally:
        for quantizer, was, enabled in kept:
            quantizer.frozen, quantizer.enabled = was, enabled


@contextmanager
def _observed(sim: Any) -> Iterator[None]:
    """Calibrate on the calls inside the block; without any, find encodings of parameters only, as in AIMET."""
    ran: list[bool] = []
    handle = sim.model.register_forward_hook(lambda *_: ran.append(True))
    try:
        with sim.calibrating():
            yield
            if not ran:
                raise _NothingRan
    except _NothingRan:
        sim.compute_param_encodings()
    finally:
        handle.remove()


# ------------------------------------------------------------------------------------ methods on the modules of a simulation


class ModuleCalls(QuantizedModule):
    """The methods of one module of a simulated model; a copy of the model has its own."""

    def __init__(self, module: nn.Module, record: Record) -> None:
        self._module, self._record = module, record

    @property
    def _parametrized(self) -> nn.Module:
        return self._module

    @property
    def param_quantizers(self) -> Any:
        """By name of the parameter."""
        return self._record.params

    @property
    def input_quantizers(self) -> Any:
        """By index of the input."""
        return self._record.inputs

    @property
    def output_quantizers(self) -> Any:
        """By index of the output."""
        return self._record.outputs

    def compute_encodings(self) -> AbstractContextManager[None]:
        """Find the ranges of this module's quantizers from what passes inside the block; all others are kept."""
        return compute_encodings(self._module)

    def fold_param_quantizers(self) -> None:
        """Write the quantized values into the parameters and switch their quantizers off."""
        fold_parameters([self._record])

    def get_original_module(self) -> nn.Module:
        """The module without quantizers, outside of the simulation, with the same parameters."""
        plain: nn.Module = twin(self._module)
        detach(plain)
        return plain


def attach_calls(sim: Any) -> None:
    """Set the methods of quantized modules on the modules of ``sim.model`` that have quantizers.

    A name that a module's class or instance has already stays what it is.
    """
    for _, module in walk_modules(sim.model):
        record = record_of(module)
        if record is None or not is_quantized(module):
            continue
        calls = ModuleCalls(module, record)
        for name in METHODS:
            if not hasattr(type(module), name):
                vars(module)[name] = getattr(calls, name)


# ------------------------------------------------------------------------------------ functions as modules


INPUTS.update(TENSORS)
_missing = absent_names("bitwright.aimet_torch.nn.modules.custom")


@functools.cache
def _quantized_function(name: str) -> type:
    return quantized_class(FUNCTION_MODULES[name])


@QuantizationMixin.implements(nn.Embedding)
class QuantizedEmbedding(QuantizationMixin, nn.Embedding):
    """A table of which rows are picked: without a quantizer of its own, the output has the encoding of its rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of ``input``, indices."""
        output: torch.Tensor = super().forward(input)
        table = self.param_quantizers["weight"] if self.output_quantizers[0] is None else None
        encoding = None if table is None else table.get_encodings()
        if encoding is None:
            return output
        rows, width = encoding.scale.shape[:-1], encoding.block_size
        if encoding.scale.numel() > 1 and rows:  # one scale, or several, for each row or for each block of rows
            several = self.num_embeddings // rows[0]
            encoding = encoding.changed(lambda tensor: tensor.repeat_interleave(several, 0)[input])
            encoding.block_size = (
                None if width is None else (*[1] * input.dim(), self.embedding_dim // encoding.scale.shape[-1])
            )
        elif encoding.scale.numel() > 1:  # one for each column
            encoding.block_size = None
        return with_encoding(DequantizedTensor, output, encoding)


@QuantizationMixin.implements(nn.MultiheadAttention)
class QuantizedMultiheadAttention(QuantizationMixin, ComposedAttention):
    """Attention with quantizers inside too.

    Attributes:
        input_quantizers: of query, key and value.
        output_quantizers: of the result, and of the attention weights that are returned.
        param_quantizers: of the projections of the inputs; that of the outputs, ``out_proj``, has its own.
        qk_matmul: the product of queries and keys; its inputs are the projected queries, already scaled, and keys.
        softmax: of the product, with masks added.
        av_matmul: the product of attention weights and projected values.
    """

    _at_edges = False
    _parts = ("qk_matmul", "softmax", "av_matmul", "out_proj")
    out_proj: Any

    def __quant_init__(self) -> None:
        super().__quant_init__()
        self.qk_matmul, self.av_matmul = (_quantized_function("MatMul")() for _ in range(2))
        self.softmax = quantized_class(nn.Softmax)(-1)
        self.out_proj = self.out_proj if is_own(self.out_proj) else QuantizationMixin.from_module(self.out_proj)
        self._qkv_same_embed_dim = False  # or nn.TransformerEncoderLayer calls a kernel instead of this module

    def get_original_module(self) -> nn.Module:
        """The float module, with the same parameters."""
        made: Any = super().get_original_module()
        for name in self._parts[:-1]:
            del made._modules[name]
        made.out_proj = self.out_proj.get_original_module()
        made._qkv_same_embed_dim = made.in_proj_weight is not None
        return made

    @contextmanager
    def compute_encodings(self) -> Iterator[None]:
        """Find the ranges of all quantizers, those inside too, from the tensors that pass inside the block."""
        with ExitStack() as stack:
            for name in self._parts:
                stack.enter_context(getattr(self, name).compute_encodings())
            with super().compute_encodings():
                yield

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True, attn_mask: torch.Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """As :meth:`torch.nn.MultiheadAttention.forward`; ``is_causal`` says something about ``attn_mask``, and is not read."""
        batched = query.dim() == 3
        taken = [_quantized(q, x) for q, x in zip(self.input_quantizers, (query, key, value), strict=True)]
        taken = [self.swapped(x) if batched else x.unsqueeze(0) for x in taken]
        with self._patch_quantized_parameters():
            heads = self.heads_of(taken)
        made, weights = self.attended(*heads, attn_mask, key_padding_mask)
        made = _quantized(self.output_quantizers[0], self.swapped(made) if batched else made.squeeze(0))
        if not need_weights:
            return made, None
        shown = weights.mean(1) if average_attn_weights else weights
        return made, _quantized(self.output_quantizers[1], shown if batched else shown.squeeze(0))


def __getattr__(name: str) -> Any:
    if name in FUNCTION_MODULES:
        return FUNCTION_MODULES[name]
    if name.startswith("Quantized") and name.removeprefix("Quantized") in FUNCTION_MODULES:
        return _quantized_function(name.removeprefix("Quantized"))
    return _missing(name)
