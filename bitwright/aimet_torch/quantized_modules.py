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
import torch.nn.functional as F
from torch import nn

from bitwright.aimet_common.absent import absence, absent_attribute, absent_names
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
from bitwright.errors import ModelError, with_article
from bitwright.torch.calls.inputs import walk_modules

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
            "it has sub-modules, so that there is no quantized class of it",
            f"write one under @{mixin_cls.__name__}.implements({module_cls.__name__}), or quantize its sub-modules",
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
            return quantized

        return register

    @classmethod
    def ignore(cls, module_cls: type[nn.Module]) -> None:
        """Without effect: simulations need no quantized classes."""

    @classmethod
    def ignore_unknown_modules(cls, ignore: bool = True) -> None:
        """Without effect: simulations quantize modules of every class."""

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
    if quantizer is None or not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return value
    found = quantizer(value)
    return value if quantizer.observing else found


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
    with _left_alone(site for site in sim.quantizers.values() if site.role in ("input", "output")):
        compute(None, progress=False)


@contextmanager
def _left_alone(sites: Iterator[Any]) -> Iterator[None]:
    kept = [(site.quantizer, site.quantizer.enabled, site.quantizer.frozen) for site in sites]
    for quantizer, _, _ in kept:
        quantizer.enabled, quantizer.frozen = False, True
    try:
        yield
    finally:
        for quantizer, enabled, frozen in kept:
            quantizer.enabled, quantizer.frozen = enabled, frozen


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
    own = {id(site.quantizer) for r in records for _, slot in r.slots() for site in slot.sites}
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


class CustomSiLU(nn.Module):
    """``x * sigmoid(x)``."""

    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x * sigmoid(x)``."""
        return x * self.sigmoid(x)


class ChannelShuffle(nn.Module):
    """Channels interleaved across groups."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """The first input with its channels shuffled."""
        return F.channel_shuffle(args[0], self.groups)


class DepthToSpaceCRDMode(nn.Module):
    """Channels moved into square blocks of space, column-row-depth."""

    def __init__(self, block_size: Any) -> None:
        super().__init__()
        self.block_size = block_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with fewer channels and larger images."""
        size = self.block_size if isinstance(self.block_size, int) else self.block_size[0]
        return F.pixel_shuffle(x, size)


class DepthToSpaceDCRMode(nn.Module):
    """Channels moved into square blocks of space, depth-column-row."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with fewer channels and larger images."""
        batch, channels, height, width = x.shape
        size = self.block_size
        blocks = x.reshape(batch, size, size, channels // size**2, height, width)
        return blocks.permute(0, 3, 4, 1, 5, 2).reshape(batch, -1, height * size, width * size)


class ScatterElements(nn.Module):
    """Values written to indices along an axis."""

    def __init__(self, dim: int, reduce: str | None = None) -> None:
        super().__init__()
        self.dim, self.reduce = dim, reduce

    def forward(self, x: torch.Tensor, index: torch.Tensor, src: Any) -> torch.Tensor:
        """``x`` with ``src`` at ``index``."""
        if self.reduce is None:
            return torch.scatter(x, self.dim, index, src)
        return torch.scatter(x, self.dim, index, src, reduce=self.reduce)


class OneHot(nn.Module):
    """One-hot vectors of indices."""

    def __init__(self, num_classes: int, off_value: Any, on_value: Any) -> None:
        super().__init__()
        self.num_classes, self.off_value, self.on_value = num_classes, off_value, on_value

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The vectors along a last axis."""
        hot = F.one_hot(inputs.to(torch.int64), self.num_classes)
        return self.off_value + hot * (self.on_value - self.off_value)


class CustomGather(nn.Module):
    """Slices picked by indices along an axis."""

    def forward(self, data: torch.Tensor, indices: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """The slices, in the shape of the indices; negative indices count from the end."""
        axis = axis % data.dim()
        picked = torch.index_select(data, axis, indices.flatten() % data.shape[axis])
        return picked.reshape(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])


class Cast(nn.Module):
    """A change of dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` in the dtype."""
        return x.type(self.dtype)


class GatherNd(nn.Module):
    """Elements, or slices, picked by tuples of indices, as ONNX GatherND.

    Args:
        batch_dim: leading axes that data and indices share.
    """

    def __init__(self, batch_dim: int) -> None:
        super().__init__()
        self.batch_dims = batch_dim

    def forward(self, data: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """``data`` at ``indices``, whose last axis holds the tuples: ``[*indices.shape[:-1], *rest of data]``."""
        rank = indices.dim() - 1
        shared = [
            torch.arange(data.shape[axis], device=data.device).reshape([-1 if i == axis else 1 for i in range(rank)])
            for axis in range(self.batch_dims)
        ]
        return data[(*shared, *indices.to(torch.int64).unbind(-1))]


class ScatterND(nn.Module):
    """Values written to tuples of indices, as ONNX ScatterND.

    Args:
        reduction: 0 replaces, 1 adds, 2 multiplies, once per place.
    """

    def __init__(self, reduction: int = 0) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, data: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        """``data`` with ``updates`` at ``indices``, whose last axis holds the tuples."""
        places, written = indices.to(torch.int64).unbind(-1), data.clone()
        if self.reduction:
            combine = torch.add if self.reduction == 1 else torch.mul
            updates = combine(data[places], updates)
        written[places] = updates
        return written


class RoiAlign(nn.Module):
    """Means of bilinear samples in the bins of boxes, as ONNX RoiAlign of mode ``output_half_pixel``.

    Source: He et al. 2017, arXiv:1703.06870, section 3; coordinates are not shifted by half a pixel.

    Args:
        output_size: rows and columns of bins, or one number for both.
        spatial_scale: pixels of the feature map per unit of the boxes.
        sampling_ratio: samples of a bin along each axis; 0 or less takes as many as cover its pixels.
    """

    def __init__(self, output_size: Any, spatial_scale: float, sampling_ratio: int) -> None:
        super().__init__()
        self.output_size, self.spatial_scale, self.sampling_ratio = output_size, spatial_scale, sampling_ratio

    def forward(self, inp: torch.Tensor, roi: torch.Tensor, batch_indices: torch.Tensor) -> torch.Tensor:
        """``[boxes, channels, rows, columns]`` of a feature map ``[batch, channels, height, width]``.

        Args:
            inp: the feature map.
            roi: boxes ``x1, y1, x2, y2``.
            batch_indices: sample of each box.
        """
        size = self.output_size
        rows, columns = (size, size) if isinstance(size, int) else size
        pooled = [
            torch.einsum(
                "ph,chw,qw->cpq",
                self._means(y1, y2, rows, inp.shape[2]),
                inp[index],
                self._means(x1, x2, columns, inp.shape[3]),
            )
            for index, (x1, y1, x2, y2) in zip(batch_indices.to(torch.int64), roi * self.spatial_scale, strict=True)
        ]
        return torch.stack(pooled) if pooled else inp.new_zeros(0, inp.shape[1], rows, columns)

    def _means(self, low: torch.Tensor, high: torch.Tensor, bins: int, pixels: int) -> torch.Tensor:
        """Weights of the pixels of an axis in each bin between two ends: ``[bins, pixels]``."""
        length = (high - low).clamp(min=1)
        count = self.sampling_ratio if self.sampling_ratio > 0 else int((length / bins).ceil())
        steps = torch.arange(bins * count, device=low.device, dtype=low.dtype) + 0.5
        at = low + steps * length / (bins * count)
        distance = at.clamp(0, pixels - 1)[:, None] - torch.arange(pixels, device=low.device)
        inside = ((at >= -1) & (at <= pixels))[:, None]
        return (F.relu(1 - distance.abs()) * inside).reshape(bins, count, pixels).mean(1)


class HadamardRotation(nn.Module):
    """Groups of the last axis times a Hadamard matrix of the largest power of two that divides it.

    Args:
        size: of the last axis.
        scale: factor of the products; by default the one that keeps lengths.
    """

    hadamard: torch.Tensor

    def __init__(self, size: int, scale: float | None = None) -> None:
        super().__init__()
        order = size & -size
        signs, twice = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        while len(signs) < order:  # Sylvester's construction
            signs = torch.kron(twice, signs)
        self.register_buffer("hadamard", signs)
        self.scale = scale or order**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with every group rotated."""
        groups = x.unflatten(-1, (-1, self.hadamard.shape[0]))
        return (F.linear(groups, self.hadamard) * self.scale).reshape(x.shape)


class RotaryEmbedding(nn.Module):
    """Pairs of the first elements of heads turned by angles of their positions, as ONNX RotaryEmbedding.

    Source: Su et al. 2021, arXiv:2104.09864.

    Args:
        interleaved: pairs are neighbours; otherwise the halves are paired.
        rotary_embedding_dim: elements that are turned.
        head_size: elements of a head; those after them stay.
    """

    def __init__(self, interleaved: bool, rotary_embedding_dim: int, head_size: int) -> None:
        super().__init__()
        self.interleaved, self.rotary_embedding_dim, self.head_size = interleaved, rotary_embedding_dim, head_size

    def forward(
        self,
        x: torch.Tensor,
        cos_cache: torch.Tensor,
        sin_cache: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x``, ``[batch, heads, length, head_size]``, turned.

        Args:
            x: the heads.
            cos_cache, sin_cache: ``[batch, length, rotary_embedding_dim / 2]``, or ``[positions, ...]`` with positions.
            position_ids: ``[batch, length]``.
        """
        if position_ids is not None:
            cos_cache, sin_cache = cos_cache[position_ids], sin_cache[position_ids]
        cos, sin = cos_cache.unsqueeze(1), sin_cache.unsqueeze(1)
        turned, rest = x.split([self.rotary_embedding_dim, self.head_size - self.rotary_embedding_dim], -1)
        pairs = (-1, 2) if self.interleaved else (2, -1)
        axis = -1 if self.interleaved else -2
        first, second = turned.unflatten(-1, pairs).unbind(axis)
        made = torch.stack((cos * first - sin * second, sin * first + cos * second), axis).flatten(-2)
        return torch.cat((made, rest), -1)


ALL = (
    CustomSiLU, ChannelShuffle, DepthToSpaceCRDMode, DepthToSpaceDCRMode, ScatterElements, OneHot, CustomGather, Cast,
    GatherNd, ScatterND, RoiAlign, HadamardRotation, RotaryEmbedding,
)  # fmt: skip


def _of(name: str, function: Callable[..., Any], inputs: int = 1) -> type[nn.Module]:
    """A module class that calls a function."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    made = type(name, (nn.Module,), {"forward": forward, "__module__": __name__, "__doc__": f"``{name}`` as a module."})
    INPUTS[name] = inputs
    return made


class Concat(nn.Module):
    """``torch.cat`` of its inputs along an axis."""

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self._axis = axis

    @property
    def axis(self) -> int:
        """The axis."""
        return self._axis

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """The inputs, one after the other."""
        return torch.cat(args, dim=self._axis)


class RmsNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, input_shape: Any, axes: Any, epsilon: float) -> None:
        super().__init__()
        self.epsilon, self.axes = epsilon, axes
        sizes = [input_shape[axis] for axis in axes]
        self.normalize_over_last_dim = list(axes)[-1] in (-1, len(input_shape) - 1)
        self.weight = nn.Parameter(torch.ones(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` by its root mean square over the axes, times the weight."""
        return x * torch.rsqrt(x.square().mean(tuple(self.axes), keepdim=True) + self.epsilon) * self.weight


class DynamicConv2d(nn.Module):
    """A convolution whose weight is an input."""

    def __init__(self, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> None:
        super().__init__()
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The convolution of ``x``."""
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


_UNARY: dict[str, Callable[..., Any]] = {
    "Sin": torch.sin, "Cos": torch.cos, "Asin": torch.asin, "Atan": torch.atan, "Erf": torch.erf,
    "Exponential": torch.exp, "Log": torch.log, "Abs": torch.abs, "Neg": torch.neg, "Round": torch.round,
    "Square": torch.square, "Sqrt": torch.sqrt, "RSqrt": torch.rsqrt, "Norm": torch.norm, "Normalize": F.normalize,
    "Max": torch.max, "AMax": torch.amax, "Min": torch.min, "AMin": torch.amin, "Argmin": torch.argmin,
    "Argmax": torch.argmax, "Mean": torch.mean, "Sum": torch.sum, "Prod": torch.prod, "CumSum": torch.cumsum,
    "Split": torch.split, "Reshape": torch.reshape, "Permute": torch.permute, "Select": torch.select,
    "Chunk": torch.chunk, "IndexSelect": torch.index_select, "Gather": torch.gather,
    "ElementwiseCeil": torch.ceil, "ElementwiseFloor": torch.floor, "Pad": F.pad, "Interpolate": F.interpolate,
    "MaxPool2d": F.max_pool2d, "AvgPool2d": F.avg_pool2d, "AdaptiveAvgPool2d": F.adaptive_avg_pool2d,
    "GroupNorm": F.group_norm, "LogicalNot": torch.logical_not, "Tile": torch.tile,
    "Squeeze": torch.squeeze, "Unsqueeze": torch.unsqueeze,
    "Expand": lambda tensor, *sizes: tensor.expand(*sizes),
    "StridedSlice": lambda tensor, ranges: tensor[tuple([slice(*one) for one in ranges])],
    "NullRequant": lambda tensor, shape: tensor,
}  # fmt: skip
_BINARY: dict[str, Callable[..., Any]] = {
    "Add": torch.add, "Subtract": torch.sub, "Multiply": torch.mul, "Divide": torch.div, "Pow": torch.pow,
    "FloorDivide": torch.floor_divide, "Remainder": torch.remainder, "Fmod": torch.fmod, "Outer": torch.outer,
    "MatMul": torch.matmul, "Bmm": torch.bmm, "Maximum": torch.maximum, "Minimum": torch.minimum,
    "LogicalOr": torch.logical_or, "LogicalAnd": torch.logical_and, "Greater": torch.gt, "Less": torch.lt,
    "GreaterEqual": torch.ge, "LessEqual": torch.le, "Equal": torch.eq, "NotEqual": torch.ne,
    "GridSample": F.grid_sample,
}  # fmt: skip
_TERNARY: dict[str, Callable[..., Any]] = {
    "Baddbmm": torch.baddbmm, "Addmm": torch.addmm, "Where": torch.where,
    "ScaledDotProductAttention": F.scaled_dot_product_attention,
    "IndexPut": torch.index_put, "MaskedFill": torch.masked_fill, "DynamicLinear": F.linear,
}  # fmt: skip

_MADE: dict[str, type[nn.Module]] = {
    name: _of(name, function, inputs)
    for inputs, table in ((1, _UNARY), (2, _BINARY), (3, _TERNARY), (5, {"BatchNorm": F.batch_norm}))
    for name, function in table.items()
}
_MADE.update(Concat=Concat, RmsNorm=RmsNorm, DynamicConv2d=DynamicConv2d)
_MADE.update({kind.__name__: kind for kind in ALL})
_missing = absent_names("bitwright.aimet_torch.nn.modules.custom")


@functools.cache
def _quantized_function(name: str) -> type:
    return quantized_class(_MADE[name])


@QuantizationMixin.implements(nn.MultiheadAttention)
class QuantizedMultiheadAttention(QuantizationMixin, nn.MultiheadAttention):
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
        taken = [self._swapped(x) if batched else x.unsqueeze(0) for x in taken]
        with self._patch_quantized_parameters():
            q, k, v = (self._heads(x) for x in self._projected(taken))
        mask = self._mask(attn_mask, key_padding_mask, k.shape[-2], q)
        scores = self.qk_matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
        weights = self.softmax(scores if mask is None else scores + mask)
        weights = F.dropout(weights, self.dropout, self.training)
        made = self.out_proj(self.av_matmul(weights, v).transpose(1, 2).flatten(2))
        made = _quantized(self.output_quantizers[0], self._swapped(made) if batched else made.squeeze(0))
        if not need_weights:
            return made, None
        shown = weights.mean(1) if average_attn_weights else weights
        return made, _quantized(self.output_quantizers[1], shown if batched else shown.squeeze(0))

    def _projected(self, taken: Any) -> list[torch.Tensor]:
        """Queries, keys and values, ``[batch, length, embed_dim]``, with the rows that the module adds."""
        own: Any = self
        several = own.in_proj_weight.chunk(3) if own.in_proj_weight is not None else (
            own.q_proj_weight, own.k_proj_weight, own.v_proj_weight)  # fmt: skip
        biases = (None,) * 3 if own.in_proj_bias is None else own.in_proj_bias.chunk(3)
        found = [F.linear(x, weight, bias) for x, weight, bias in zip(taken, several, biases, strict=True)]
        for i, extra in ((1, own.bias_k), (2, own.bias_v)):
            if extra is not None:
                found[i] = torch.cat([found[i], extra.expand(len(found[i]), 1, -1)], 1)
            if own.add_zero_attn:
                found[i] = F.pad(found[i], (0, 0, 0, 1))
        return found

    def _swapped(self, x: torch.Tensor) -> torch.Tensor:
        """The first two axes in the other order, unless the batch is first outside too."""
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, embed_dim]`` as ``[batch, heads, length, head_dim]``."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _mask(self, attn_mask: Any, padding: Any, length: int, q: torch.Tensor) -> torch.Tensor | None:
        """What is added to the product, ``[batch or 1, heads or 1, queries or 1, length]``; to rows of the module's own: 0."""
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        padding = None if padding is None else padding.reshape(-1, 1, 1, padding.shape[-1])
        found = None
        for mask in (mask for mask in (attn_mask, padding) if mask is not None):
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
            mask = F.pad(mask, (0, length - mask.shape[-1]))
            found = mask if found is None else found + mask
        return found


def __getattr__(name: str) -> Any:
    if name in _MADE:
        return _MADE[name]
    if name.startswith("Quantized") and name.removeprefix("Quantized") in _MADE:
        return _quantized_function(name.removeprefix("Quantized"))
    return _missing(name)
