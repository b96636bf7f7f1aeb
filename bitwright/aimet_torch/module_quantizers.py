"""Quantizers of a simulation as AIMET's scripts see them: on the modules of ``sim.model``, with ``bitwidth``, ``min``, ``max``.

A view of a quantizer is an ``nn.Module`` that holds no state of its own. It reads and writes the sites of one place, so that
two views of a place agree; its parameters ``min`` and ``max`` are those of the core quantizer
(:class:`bitwright.torch.quantizers.learned_range.RangeEnds`). ``param_quantizers``, ``input_quantizers`` and
``output_quantizers`` are sub-modules of the instances, set by simulations of this layer alone: classes stay as they are, and a
copy of the model has copies of them that belong to the copy's own quantizers. What Bitwright itself walks over is the model
without them (:class:`bitwright.torch.calls.inputs.NotOfModel`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.aimet_common.names import differs
from bitwright.aimet_common.sites import (
    SiteView,
    aimet_shape,
    granularity_of,
    grouped_bits,
    grouped_scale_format,
    int_format_of,
)  # fmt: skip
from bitwright.aimet_common.utils import Handle
from bitwright.aimet_torch.float_quantizers import FloatEncoding, FloatQuantizeDequantize
from bitwright.aimet_torch.quantizers import (
    AffineEncoding,
    AffineQuantizerBase,
    DequantizedTensor,
    Described,
    EncodingAnalyzer,
    GroupedBlockEncoding,
    GroupedBlockQuantizeDequantize,
    MinMaxEncodingAnalyzer,
    PercentileEncodingAnalyzer,
    QuantizeDequantize,
    QuantizerBase,
    SqnrEncodingAnalyzer,
    with_encoding,
)  # fmt: skip
from bitwright.core.numerics.affine import power_of_two_scale
from bitwright.core.numerics.formats import FLOAT32_SCALE, FLOAT_FORMATS, FloatFormat
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.simulation.sites import Site, values_on_grids
from bitwright.errors import ConfigError, EncodingsError, FormatError, GranularityError, ModelError, with_article
from bitwright.torch.calls.inputs import NotOfModel, is_leaf, model_device, walk_modules
from bitwright.torch.quantizers import functional
from bitwright.torch.quantizers.learned_range import RangeEnds

# ------------------------------------------------------------------------------------ views of single quantizers


class Snapshot(torch.Tensor):
    """A value read from a quantizer. Changing it in place would not change the quantizer and raises an error."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        changing = name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_")
        if (changing or name == "__setitem__") and args and isinstance(args[0], Snapshot):
            raise ConfigError(
                f"quantizer range, {name}",
                "ranges are read from the simulation, so that changing the tensor would change nothing",
                "call quantizer.set_range(min, max), or assign quantizer.min and quantizer.max",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class SiteQuantizer(Described, SiteView, NotOfModel, nn.Module):
    """The quantizer of one place of a simulation."""

    training = True
    #: the class of AIMET's that it is shown as
    shown_as = "QuantizeDequantize"

    def __init__(self, sites: tuple[Site, ...]) -> None:
        nn.Module.__init__(self)
        SiteView.__init__(self, sites)

    @property
    def _ends(self) -> RangeEnds | None:
        core: Any = self._site.quantizer
        ends: RangeEnds | None = core.ends
        return ends

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:
        return {} if self._ends is None else {**self._ends.parameters()}

    @_parameters.setter
    def _parameters(self, value: Any) -> None:
        """Of ``nn.Module.__init__``: the parameters are those of the core quantizer."""

    def __setattr__(self, name: str, value: Any) -> None:
        SiteView.__setattr__(self, name, value)

    # -- state

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Which of the parameters hold a range, as AIMET writes it."""
        if torch.onnx.is_in_onnx_export():  # which takes tensors alone
            return torch.tensor([])  # type: ignore[return-value]
        return dict.fromkeys(self._parameters, torch.tensor(self.is_initialized()))

    def _calls(self) -> Iterator[tuple[str, SiteQuantizer]]:
        """The quantizers of the module's later calls, numbered from 1, where each call has a range of its own."""
        several = {id(site.quantizer): site for site in self.sites}
        several.pop(id(self._site.quantizer))
        return ((f"calls.{number}", view_of((site,))) for number, site in enumerate(several.values(), 1))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _write_ranges(destination, prefix, self._calls())

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: Any, unexpected_keys: Any,
        error_msgs: Any,
    ) -> None:  # fmt: skip
        own: dict[str, Any] = self._parameters
        found = {name: state_dict[prefix + name] for name in own if prefix + name in state_dict}
        missing_keys.extend(prefix + name for name in own if name not in found)
        wrong = [name for name, value in found.items() if value.numel() not in (1, own[name].numel())]
        error_msgs.extend(
            f"size mismatch for {prefix}{name}: {tuple(found[name].shape)} in the state, {tuple(own[name].shape)} here"
            for name in wrong
        )
        if wrong or not own or len(found) != len(own):
            return
        state = state_dict.get(f"{prefix}_extra_state") or {}
        if all(bool(state.get(name, True)) for name in own):
            self.set_range(found["min"], found["max"])
            _read_ranges(state_dict, prefix, self._calls())

    # -- range

    def _shown(self, values: Any, dtype: torch.dtype | None) -> torch.Tensor:
        found = broadcastable(values, self._granularity, self._value_shape)
        return found.to(dtype or torch.float32).as_subclass(Snapshot)

    def _of_encoding(self, name: str, dtype: torch.dtype | None) -> torch.Tensor | None:
        encoding = self._site.encoding
        return None if encoding is None else self._shown(getattr(encoding, name), dtype)

    def get_scale(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Input units per step; ``None`` without a range."""
        return self._of_encoding("scale", dtype)

    def get_offset(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Minus the zero point; ``None`` without a range."""
        encoding = self._site.encoding
        return None if encoding is None else self._shown(0 - encoding.zero_point, dtype)

    def get_min(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Lowest representable value; ``None`` without a range."""
        return self._of_encoding("min", dtype)

    def get_max(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Highest representable value; ``None`` without a range."""
        return self._of_encoding("max", dtype)

    @property
    def min(self) -> torch.Tensor | None:
        """The parameter of the lower end, which may lie between codes (:meth:`get_min`); assign a tensor to move it."""
        return self.get_min() if self._ends is None else self._ends.min

    @min.setter
    def min(self, value: Any) -> None:
        self.set_range(value, None if value is None else self.get_max())

    @property
    def max(self) -> torch.Tensor | None:
        """The parameter of the upper end, which may lie between codes (:meth:`get_max`); assign a tensor to move it."""
        return self.get_max() if self._ends is None else self._ends.max

    @max.setter
    def max(self, value: Any) -> None:
        self.set_range(None if value is None else self.get_min(), value)

    def set_range(self, min: Any, max: Any) -> None:
        """Put the ends of the grid at ``min`` and ``max``; without one of them that end stays, without both the range is lost.

        Raises:
            ConfigError: there is no other end yet, or the shapes do not fit.
            RangeError: an end is not finite, or they are exchanged.
        """
        if min is None and max is None:
            for site in self.sites:
                site.encoding = None
            return
        if (min is None or max is None) and not self.is_initialized():
            raise ConfigError(self._site.name, "only one end of the range is known", "give set_range both ends")
        low, high = _array(self.min if min is None else min), _array(self.max if max is None else max)
        self.set_ends(low, high)
        for site in self.sites:
            core: Any = site.quantizer
            if core.ends is not None:
                count = core.ends.base.scale.size
                core.ends.show(*(np.broadcast_to(e.reshape(-1), count) for e in (low, high)))

    # -- encodings

    def get_encodings(self) -> Any:
        """The encoding; ``None`` without a range."""
        fmt, scale = self._format, self.get_scale()
        if scale is None:
            return None
        scale = scale.as_subclass(torch.Tensor)
        if isinstance(fmt, FloatFormat):
            finite = fmt.name == "float8_e4m3"
            return FloatEncoding(fmt.mantissa_bits, fmt.exponent_bits, finite, False, scale, self.block_size)
        offset = self.get_offset()
        assert offset is not None
        plain = offset.as_subclass(torch.Tensor)
        return self._affine_encoding(scale, plain)

    def _affine_encoding(self, scale: torch.Tensor, plain: torch.Tensor) -> AffineEncoding:
        fmt = self._format
        return AffineEncoding(scale, plain, fmt.qmin, fmt.qmax, self.symmetric, self.block_size)

    @property
    def encoding(self) -> Any:
        """:meth:`get_encodings` under its older name."""
        return self.get_encodings()

    def set_encodings(self, encodings: Any) -> None:
        """Take number format and range of an encoding."""
        if isinstance(encodings, FloatEncoding):
            self.assign(FloatQuantizeDequantize.from_encodings(encodings))
        else:
            self.assign(QuantizeDequantize.from_encodings(encodings))

    def assign(self, quantizer: Any) -> None:
        """Copy grid, range and fixedness of ``quantizer``, a module of ``quantization`` or the quantizer of another place.

        Raises:
            TypeError: it is not a quantizer.
            GranularityError: its shape or blocks have no counterpart at this place.
        """
        if isinstance(quantizer, SiteQuantizer):
            self._copy(quantizer)
            return
        spec = self._spec_for(quantizer)
        self._respec(spec, None)
        if quantizer.is_initialized() and not isinstance(quantizer, FloatQuantizeDequantize):
            self.set_ends(_array(quantizer.get_min()), _array(quantizer.get_max()))
        for site in self.sites:
            site.enabled, site.frozen = True, not quantizer.is_overwrite_allowed()
        quantizer.bind(self)

    def check(self, quantizer: Any) -> None:
        """Raise what :meth:`assign` would raise for this module of ``quantization``; change nothing.

        Raises:
            TypeError, GranularityError, ConfigError: see there.
        """
        self._spec_for(quantizer)

    def _copy(self, other: SiteQuantizer) -> None:
        if other.sites == self.sites:
            return
        if other._site.quantizer is not self._site.quantizer:
            differs(
                f"{self._site.name} = {other._site.name}",
                "the quantizer is copied; the two places keep quantizers of their own, which later calibration sets apart",
            )
        self._respec(other._spec, other._site.encoding)
        for site in self.sites:
            site.enabled, site.frozen = other._site.enabled, other._site.frozen

    def _spec_for(self, quantizer: Any) -> QuantSpec:
        if isinstance(quantizer, FloatQuantizeDequantize):
            return replace(self._spec, format=quantizer._format, symmetry="symmetric",
                           granularity=self._granularity_for(quantizer), scale_format=FLOAT32_SCALE)  # fmt: skip
        if not isinstance(quantizer, AffineQuantizerBase):
            raise TypeError(
                f"{self._site.name} takes None, a quantizer of quantization.affine or .float, or that of another place, "
                f"not {with_article(type(quantizer).__name__)}"
            )
        fmt = int_format_of(quantizer, self._site.name)
        symmetry: Any = "symmetric" if quantizer.symmetric else "asymmetric"
        symmetry = "strict_symmetric" if fmt.narrow else symmetry
        return replace(
            self._spec,
            format=fmt,
            symmetry=symmetry,
            granularity=self._granularity_for(quantizer),
            method=quantizer.encoding_analyzer.method,
            scale_format=self._scale_format_for(quantizer),
        )

    @property
    def encoding_analyzer(self) -> EncodingAnalyzer:
        """The range method as AIMET's class; read-only."""
        method, blocks = self._spec.method, self.block_size
        if method.name == "percentile":
            return PercentileEncodingAnalyzer(
                self.shape, percentile=dict(method.options).get("percentile", 100), block_size=blocks
            )
        return (MinMaxEncodingAnalyzer if method.name == "minmax" else SqnrEncodingAnalyzer)(
            self.shape, block_size=blocks
        )

    def _scale_format_for(self, quantizer: Any) -> Any:
        """The format in which the scales of ``quantizer`` are stored at this place.

        Raises:
            ConfigError: LPBQ whose blocks are not those of one channel together.
        """
        if not isinstance(quantizer, GroupedBlockQuantizeDequantize):
            return FLOAT32_SCALE
        granularity = self._granularity_for(quantizer)
        blocked = granularity.axis if isinstance(granularity, PerBlock) else None
        for at, (count, size) in enumerate(zip(quantizer.shape, quantizer.block_grouping, strict=True)):
            if size not in ((-1, count) if at == blocked else (1, -1) if count == 1 else (1,)):
                raise ConfigError(
                    self._site.name,
                    f"block_grouping {quantizer.block_grouping} for scales of shape {quantizer.shape}",
                    "let all blocks of a channel share its scale: -1 on the axis of the blocks, 1 on the others",
                )
        return grouped_scale_format(quantizer.bitwidth, quantizer.decompressed_bw, self._site.name)

    def _granularity_for(self, quantizer: Any) -> Any:
        found = granularity_of(quantizer.shape, quantizer.block_size, self._value_shape)
        if found is None:
            raise GranularityError(
                self._site.name,
                f"a quantizer of shape {quantizer.shape} with blocks {quantizer.block_size} does not fit its tensor of shape "
                f"{self._value_shape}, or has blocks along several axes",
                "use shape () per tensor, (n, 1, ...) per channel, or blocks along one axis",
            )
        return found

    # -- calibration and use

    @contextmanager
    def compute_encodings(self) -> Iterator[None]:
        """Find the range of the tensors that this quantizer gets inside the block."""
        for site in self.sites:
            site.encoding, site.quantizer.statistics = None, None
        self.__dict__["observing"] = True
        try:
            yield
        finally:
            self.__dict__["observing"] = False
        for site in self.sites:
            site.quantizer.freeze()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` on the grid.

        Raises:
            CalibrationError: (a RuntimeError) there is no range yet.
        """
        plain = input.as_subclass(torch.Tensor)
        if self.__dict__.get("observing"):
            self._site.quantizer.observe(plain.detach())
            return plain
        apply: Any = self._site.quantizer
        return with_encoding(DequantizedTensor, apply(plain), self.get_encodings())

    def extra_repr(self) -> str:
        """Place, shape, blocks and grid."""
        blocks = "" if self.block_size is None else f"block_size={self.block_size}, "
        return f"{self._site.name}: shape={self.shape}, {blocks}{self._shown_grid()}"

    def _shown_grid(self) -> str:
        return f"qmin={self.qmin}, qmax={self.qmax}, symmetric={self.symmetric}"

    def _get_name(self) -> str:
        return self.shown_as


class AffineSiteQuantizer(SiteQuantizer):
    """The affine quantizer of one place of a simulation."""


class GroupedSiteQuantizer(AffineSiteQuantizer):
    """The quantizer of one place of a simulation whose block scales are multiples of one per channel (LPBQ)."""

    shown_as = "GroupedBlockQuantizeDequantize"

    @property
    def decompressed_bw(self) -> int:
        """Bits of the product of code and integer block scale."""
        return self.bitwidth + (grouped_bits(self._spec.scale_format) or 0)

    @property
    def block_grouping(self) -> tuple[int, ...]:
        """Blocks that share one scale, per axis: ``-1`` (all) on the axis of the blocks, 1 elsewhere."""
        axis = getattr(self._granularity, "axis", None) if self.block_size is not None else None
        return tuple(-1 if at == axis else 1 for at in range(len(self.shape)))

    def get_per_channel_scale(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """The scale that those of the blocks are multiples of; ``None`` without a range."""
        encoding = self._site.encoding
        if encoding is None or encoding.common is None:
            return None
        return self._shown(encoding.common, dtype)

    def _affine_encoding(self, scale: torch.Tensor, plain: torch.Tensor) -> AffineEncoding:
        fmt, per_channel = self._format, self.get_per_channel_scale()
        return GroupedBlockEncoding(
            scale, plain, fmt.qmin, fmt.qmax, self.symmetric, self.block_size,
            block_grouping=self.block_grouping, decompressed_bw=self.decompressed_bw,
            per_channel_scale=None if per_channel is None else per_channel.as_subclass(torch.Tensor),
        )  # fmt: skip


class FloatSiteQuantizer(SiteQuantizer):
    """The float quantizer of one place of a simulation."""

    shown_as = "FloatQuantizeDequantize"

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:
        return {}  # as AIMET's without an encoding analyzer

    @_parameters.setter
    def _parameters(self, value: Any) -> None: ...

    def _shown_grid(self) -> str:
        return f"exponent_bits={self.exponent_bits}, mantissa_bits={self.mantissa_bits}"

    @property
    def exponent_bits(self) -> int:
        """Exponent bits of the format."""
        return int(self._format.exponent_bits)

    @property
    def mantissa_bits(self) -> int:
        """Mantissa bits of the format."""
        return int(self._format.mantissa_bits)

    def is_float16(self) -> bool:
        """Whether the format is IEEE half precision."""
        return bool(self._format.name == "float16")

    def is_bfloat16(self) -> bool:
        """Whether the format is bfloat16."""
        return bool(self._format.name == "bfloat16")


QuantizerBase.register(SiteQuantizer)
QuantizeDequantize.register(AffineSiteQuantizer)
GroupedBlockQuantizeDequantize.register(GroupedSiteQuantizer)
FloatQuantizeDequantize.register(FloatSiteQuantizer)


def view_of(sites: tuple[Site, ...]) -> SiteQuantizer:
    """The view of a place's sites, in the class of its number format."""
    spec = sites[0].quantizer.spec
    if isinstance(spec.format, FloatFormat):
        return FloatSiteQuantizer(sites)
    return AffineSiteQuantizer(sites) if grouped_bits(spec.scale_format) is None else GroupedSiteQuantizer(sites)


def _write_ranges(state: Any, prefix: str, quantizers: Iterable[tuple[str, SiteQuantizer]]) -> None:
    """Write both ends of the quantizers that have a range into a state."""
    for name, quantizer in quantizers:
        if quantizer.is_initialized():
            for end, value in (("min", quantizer.min), ("max", quantizer.max)):
                assert value is not None
                state[f"{prefix}{name}.{end}"] = value.detach().as_subclass(torch.Tensor)


def _read_ranges(state: Any, prefix: str, quantizers: Iterable[tuple[str, SiteQuantizer]]) -> None:
    """Set the ranges of quantizers from a state that :func:`_write_ranges` wrote; those that are not in it stay."""
    for name, quantizer in quantizers:
        low, high = (state.get(f"{prefix}{name}.{end}") for end in ("min", "max"))
        if low is not None and high is not None:
            quantizer.set_range(low, high)


def _array(value: Any) -> Any:
    """The values of a tensor, or of anything that converts to one, as float64."""
    tensor = torch.as_tensor(value, dtype=torch.float64).detach()
    return tensor.as_subclass(torch.Tensor).cpu().numpy()


# ------------------------------------------------------------------------------------ on modules


RECORD = "_bitwright_quantizers"
PUBLIC = ("param_quantizers", "input_quantizers", "output_quantizers")
#: torch module class -> its quantized class, as used so far or registered by a script
REGISTERED: dict[type, type] = {}
#: methods of quantized modules that the modules of a simulation have too
METHODS = (
    "compute_encodings", "compute_param_encodings", "export_input_encodings", "export_output_encodings",
    "export_param_encodings", "fold_param_quantizers", "get_original_module", "import_input_encodings",
    "import_output_encodings", "import_param_encodings", "set_weight_quantizer_to_mxfp4_int8",
    "set_weight_quantizer_to_nvfp4_int8",
)  # fmt: skip


class Slot:
    """One place of a module, with the sites of the simulation that it consists of; it may have none."""

    def __init__(self, sim: Any, name: str, sites: Sequence[Site], why_none: str) -> None:
        self.sim, self.name, self.sites, self.why_none = sim, name, tuple(sites), why_none
        self._view: SiteQuantizer | None = None

    def get(self) -> SiteQuantizer | None:
        """The quantizer in effect; ``None`` if the place has none or it is switched off."""
        if not any(site.enabled and not site.quantizer.derived for site in self.sites):
            return None
        made = view_of(self.sites)
        if type(self._view) is not type(made):
            self._view = made
        return self._view

    def set(self, quantizer: Any) -> None:
        """Switch the quantizer off (``None``), or copy ``quantizer``; also where the configuration has left the place out.

        Raises:
            ModelError: no quantizer can stand here.
        """
        if quantizer is None:
            for site in self.sites:
                site.enabled = False
            return
        if not self.sites:
            self.sim._place_left_out()
            self.sim.show_quantizers()
            records = below(self.sim.model)
            self.sites = next(s.sites for r in records for _, s in r.slots() if s.name == self.name)
        if not self.sites:
            raise ModelError(
                self.name,
                f"this place can have no quantizer: {self.why_none}",
                "set the quantizer of the place that sim.coverage() names for this value",
            )
        view_of(self.sites).assign(quantizer)


class _Slots(NotOfModel):
    """The quantizers of a module by place: a container of modules whose items are read and assigned, and whose places stay."""

    _slots: dict[str, Slot]

    @property
    def _modules(self) -> dict[str, Any]:
        return {name: slot.get() for name, slot in self.__dict__.get("_slots", {}).items()}

    @_modules.setter
    def _modules(self, value: Any) -> None:
        """Of ``nn.Module.__init__``: what is in the places is read from the simulation."""

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_slots", {}):
            return self._slots[name].get()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_slots", {}) or isinstance(value, nn.Module):
            self.add_module(name, value)
        else:
            object.__setattr__(self, name, value)

    def add_module(self, name: str, module: Any) -> None:
        """Put a quantizer in a place that there is.

        Raises:
            KeyError, IndexError: there is no such place.
        """
        if name not in self._slots:
            kind = IndexError if isinstance(self, nn.ModuleList) else KeyError
            raise kind(f"{name}: the places of quantizers stay: {', '.join(self._slots) or 'there are none here'}")
        self._slots[name].set(module)

    def __delitem__(self, name: Any) -> None:
        slot = self._slots[list(self._slots)[name] if isinstance(name, int) else name]
        raise ConfigError(slot.name, "the place of a quantizer stays", f"assign None: quantizers[{name!r}] = None")

    def pop(self, key: Any) -> Any:
        """Always an error: the place of a quantizer stays."""
        del self[key]

    def clear(self) -> None:
        """Always an error: the place of a quantizer stays."""
        del self[next(iter(self._slots))]


class QuantizerList(_Slots, nn.ModuleList):
    """The quantizers of a module's inputs or outputs."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.__dict__["_slots"] = {str(index): slot for index, slot in enumerate(slots)}
        super().__init__()

    def __getitem__(self, index: Any) -> Any:
        found = list(self._slots.values())[index]
        return [slot.get() for slot in found] if isinstance(index, slice) else found.get()

    def __setitem__(self, index: int, quantizer: Any) -> None:
        list(self._slots.values())[index].set(quantizer)


class QuantizerDict(_Slots, nn.ModuleDict):
    """The quantizers of a module's parameters by name."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self.__dict__["_slots"] = dict(slots)
        super().__init__()

    def get(self, name: str, default: Any = None) -> Any:
        """The quantizer of a parameter, or ``default``."""
        return self[name] if name in self else default


class Record:
    """The quantizers of a module of a simulated model.

    Attributes:
        sim: the simulation; a copy of the model has a copy of it.
        name: path of the module.
        params, inputs, outputs: the quantizers at its edge.
        inside: sites of calls in its forward that are at none of its edges.
    """

    def __init__(
        self,
        sim: Any,
        name: str,
        params: QuantizerDict,
        inputs: QuantizerList,
        outputs: QuantizerList,
        inside: tuple[Site, ...],
    ) -> None:
        self.sim, self.name, self.inside = sim, name, inside
        self.params, self.inputs, self.outputs = params, inputs, outputs

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Name and slot of all parameters, inputs and outputs of the module."""
        for name, slot in self.params._slots.items():
            yield f"param_quantizers.{name}", slot
        for kind, slots in (("input", self.inputs), ("output", self.outputs)):
            for index, slot in slots._slots.items():
                yield f"{kind}_quantizers.{index}", slot

    def own(self) -> Iterator[tuple[str, Site]]:
        """Kind and site of what stands at the module itself: no views of quantizers at other places."""
        for kind, slots in (("param", self.params), ("input", self.inputs), ("output", self.outputs)):
            sites = (site for slot in slots._slots.values() for site in slot.sites)
            yield from ((kind, s) for s in sites if kind == "param" or (s.role == "output") == (kind == "output"))


def record_of(module: Any) -> Record | None:
    """The record of a module; ``None`` outside the simulations of this package."""
    found = vars(module).get(RECORD) if isinstance(module, nn.Module) else None
    return found if isinstance(found, Record) else None


def is_quantized(module: Any) -> bool:
    """Whether a module shows quantizers."""
    return record_of(module) is not None and isinstance(module._modules.get(PUBLIC[0]), QuantizerDict)


def _grouped(ops: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for op in ops:
        found.setdefault(key(op), []).append(op)
    return found


def at_edges(kind: type) -> bool:
    """Whether a script's quantized class of modules with sub-modules says that they are quantized at their edges alone."""
    return kind in REGISTERED and getattr(REGISTERED[kind], "_at_edges", True)


def attach(sim: Any) -> None:
    """Set a record on every module of ``sim.model``, and the lists of quantizers on those without sub-modules."""
    modules = dict(walk_modules(sim.model))
    by_module = _grouped(sim.graph.ops, lambda op: op.module)
    below_module = _grouped(sim.graph.ops, lambda op: _nearest(op.module, modules))
    places = by_param, by_op, _ = _places(sim, modules)
    device = model_device(sim.model)
    whole = {path for path, m in modules.items() if not is_leaf(m) and at_edges(type(m))}
    below = tuple(f"{path}." for path in whole)
    for path, module in modules.items():
        inputs, outputs = QuantizerList(()), QuantizerList(())
        if path in whole:  # a class of a script's says that it is quantized at its edges
            inputs, outputs = _edges_of_whole(sim, path, places)
        elif is_leaf(module):  # what the forward of others computes lies between their sub-modules
            # a function's operands may be parameters of other modules
            inputs, outputs = _edges(sim, path, by_module.get(path, []), places, not module._parameters)
        own = chain(*(by_op.get(op.name, ()) for op in below_module.get(path, ())))
        params = _param_slots(sim, path, module, by_param)
        record = Record(sim, path, params, inputs, outputs, _not_among([*own], _edge_slots(inputs, outputs)))
        vars(module)[RECORD] = record
        _keep_inside(module, record)
        if not path.startswith(below) and (path in whole or is_leaf(module)):
            _show(module, record, device)


def _show(module: nn.Module, record: Record, device: torch.device | None) -> None:
    """Set the lists of quantizers on a module, unless its class has their names for something else."""
    if not any(hasattr(type(module), name) for name in PUBLIC):
        for _, slot in record.slots():
            _show_ends(slot.sites[:1], device)
        lists = (record.params, record.inputs, record.outputs)
        module._modules.update(zip(PUBLIC, lists, strict=True))


#: in keys of a state: quantizers of calls in a module's forward that are at none of its edges, which AIMET has none of
_INSIDE = "call_quantizers."


def _inside(module: nn.Module) -> Iterator[tuple[str, SiteQuantizer]]:
    """The quantizers of calls in the forward of a module (``x + y``), by their sites' names."""
    record = record_of(module)
    sites = () if record is None else record.inside
    return ((site.name, view_of((site,))) for site in sites if site.enabled and not site.quantizer.derived)


def _write_inside(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    _write_ranges(state, f"{prefix}{_INSIDE}", _inside(module))


def _read_inside(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    _read_ranges(state, f"{prefix}{_INSIDE}", _inside(module))
    for key in [key for key in state if key.startswith(f"{prefix}{_INSIDE}")]:
        del state[key]  # the module has no parameters of these names


def _keep_inside(module: nn.Module, record: Record) -> None:
    """Let the state of a module hold the ranges of calls in its forward."""
    if record.inside and _write_inside not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_write_inside)
        module.register_load_state_dict_pre_hook(_read_inside)


def _forget_inside(module: nn.Module) -> None:
    """Undo :func:`_keep_inside`."""
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        own = [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in (_write_inside, _read_inside)]
        for key in own:
            del hooks[key]


def _edge_slots(*lists: QuantizerList) -> list[Slot]:
    return [slot for each in lists for slot in each._slots.values()]


def _show_ends(sites: Iterable[Site], device: torch.device | None) -> None:
    """Show the ranges of ``sites`` as parameters, which train where the format lets them."""
    for site in sites:
        core: Any = site.quantizer
        if core.ends is None and not core.derived:
            shape_of = partial(aimet_shape, shape=site._graph.values[site.value].shape)
            core.ends = RangeEnds(core.name, shape_of, core.spec.granularity, device)
            if core.encoding is not None:
                core.encoding = core.encoding


def show_all_ends(sim: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of all ranges by name: of quantizers on modules as in the model's state, others by their sites.

    What is quantized inside of forwards trains from the first call on.
    """
    _show_ends(sim.quantizers.values(), model_device(sim.model))
    for name, quantizer in sim.named_quantizers():
        yield from ((f"{name}.{end}", parameter) for end, parameter in quantizer.named_parameters())


#: sites by parameter, by operator, and those elsewhere that AIMET puts at the module that reads or writes the value: of
#: functional calls (``x + y``), and of what operators read that a configuration gives quantizers at their inputs
_Places = tuple[Mapping[str, list[Site]], Mapping[str, list[Site]], Callable[[str, set[str]], list[Site]]]


def _places(sim: Any, modules: Mapping[str, nn.Module]) -> _Places:
    by_param: dict[str, list[Site]] = {}
    by_op: dict[str, list[Site]] = {}
    for site in sim.quantizers.values():
        param = sim.graph.values[site.value].param
        if site.role in ("weight", "bias", "constant") and param is not None:
            by_param.setdefault(param, []).append(site)
        else:
            by_op.setdefault(site.op, []).append(site)
    calls = [op for op in sim.graph.ops if not is_leaf(modules[_nearest(op.module, modules)])]
    between = _grouped(chain(*(by_op.get(op.name, ()) for op in calls)), lambda site: site.value)
    first = {id(site.quantizer): [site] for site in sim.quantizers.values() if site.role == "output"}
    grids = values_on_grids(sim.quantizers, sim.plan.shared).items()
    made = {value: first[key] for key, values in grids if key in first for value in values}
    wanted = {rule.op for rule in sim.rules.rules if rule.port == "input" and rule.quantized is True}
    return by_param, by_op, lambda value, types: (made if wanted & types else between).get(value, [])[:1]


def _edges_of_whole(sim: Any, path: str, places: _Places) -> tuple[QuantizerList, QuantizerList]:
    """Quantizers of what a module with sub-modules reads and returns; all others below it are switched off."""
    ops = [op for op in sim.graph.ops if f"{op.module}.".startswith(f"{path}.")]
    inputs, outputs = _edges(sim, path, ops, places, False)
    held = [site for op in ops for site in places[1].get(op.name, ())]
    held += [site for name, sites in places[0].items() if name.startswith(f"{path}.") for site in sites]
    for site in _not_among(held, _edge_slots(inputs, outputs)):
        site.enabled = False
    return inputs, outputs


def _not_among(sites: Sequence[Site], slots: Sequence[Slot]) -> tuple[Site, ...]:
    edge = {id(site) for slot in slots for site in slot.sites}
    return tuple(site for site in sites if id(site) not in edge)


def _param_slots(sim: Any, path: str, module: nn.Module, by_param: Mapping[str, list[Site]]) -> QuantizerDict:
    why_none = "the parameter is not quantized by the configuration"
    names = {name: f"{path}.{name}" if path else name for name, p in module._parameters.items() if p is not None}
    return QuantizerDict({name: Slot(sim, full, by_param.get(full, ()), why_none) for name, full in names.items()})


def _nearest(path: str, modules: Mapping[str, nn.Module]) -> str:
    """The innermost module at or above ``path``; calls that are recorded in parts (attention) have paths of their own."""
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path


def _edges(
    sim: Any, path: str, ops: Sequence[Any], places: _Places, with_params: bool
) -> tuple[QuantizerList, QuantizerList]:
    """Quantizers of what a module reads, also of parameters if told so, and returns."""
    by_param, by_op, elsewhere = places
    sites = [site for op in ops for site in by_op.get(op.name, ())]
    entering = _entering(sim.graph, ops, with_params)
    params = {param: by_param.get(param, ()) for v in entering if with_params and (param := sim.graph.values[v].param)}
    reads = _by_value(("input", "constant", "weight"), entering, [*sites, *chain(*params.values())])
    leaving = list(_leaving(sim.graph, ops))
    returns = _by_value(("output",), leaving, sites)
    reads = [own or elsewhere(value, {op.type for op in ops}) for value, own in zip(entering, reads, strict=True)]
    returns = [own or elsewhere(value, set()) for value, own in zip(leaving, returns, strict=True)]
    if len(ops) > 1 and len({(op.type, len(op.outputs)) for op in ops}) == 1 == len(ops[0].outputs):
        reads, returns = _by_port(ops, entering, reads), [list(chain(*returns))]  # one call, made several times
    return _slots(sim, f"{path}.input", reads, bool(ops)), _slots(sim, f"{path}.output", returns, bool(ops))


def _by_port(ops: Sequence[Any], values: Sequence[str], found: Sequence[list[Site]]) -> list[list[Site]]:
    """The sites of values that several calls read, by the port where they read them."""
    ports = {value: port for op in ops for port, value in op.sources()}
    at = _grouped(zip(values, found, strict=True), lambda pair: ports[pair[0]])
    return [list(chain(*(sites for _, sites in at[port]))) for port in sorted(at)]


def _by_value(roles: tuple[str, ...], values: Iterable[str], sites: Sequence[Site]) -> list[list[Site]]:
    """For each value the sites of these roles that hold it."""
    found: dict[str, list[Site]] = {value: [] for value in values}
    for site in sites:
        if site.role in roles and site.value in found:
            found[site.value].append(site)
    return list(found.values())


def _slots(sim: Any, place: str, found: Sequence[Sequence[Site]], computes: bool) -> QuantizerList:
    why = "its values lie on the grid of another place" if computes else "the module computes nothing that is quantized"
    return QuantizerList([Slot(sim, f"{place}[{i}]", sites, why) for i, sites in enumerate(found or [()])])


def _entering(graph: Any, ops: Sequence[Any], with_params: bool) -> list[str]:
    """The values that these operators read and do not compute themselves; parameters on demand, other constants never."""
    made = {value for op in ops for value in op.outputs}
    read = dict.fromkeys(value for op in ops for _, value in op.sources())
    kinds = {"input", "activation", *(("param",) if with_params else ())}
    return [value for value in read if value not in made and graph.values[value].kind in kinds]


def _leaving(graph: Any, ops: Sequence[Any]) -> Iterator[str]:
    """The values that operators of a module compute for other operators, or that nothing reads."""
    own = {op.name for op in ops}
    for value in (value for op in ops for value in op.outputs):
        readers = {reader.name for reader, _ in graph.consumers(value)}
        if graph.is_output(value) or not readers or not readers <= own:
            yield value


def check_attached(sim: Any) -> None:
    """Raise an error if a list of quantizers was replaced as a whole, which would have no effect.

    Raises:
        ModelError: with the module.
    """
    for path, module in walk_modules(sim.model):
        record = record_of(module)
        for name, own in zip(PUBLIC, (record.params, record.inputs, record.outputs) if record else (), strict=False):
            if getattr(module, name, own) is not own:
                raise ModelError(
                    f"{path}.{name}",
                    "it was replaced, so that the simulation does not see it",
                    f"assign its items: {path}.{name}[...] = quantizer",
                )


def below(modules: Any) -> list[Record]:
    """The records of one or several modules and of everything below them."""
    several = [modules] if isinstance(modules, nn.Module) else list(modules)
    found: dict[int, Record] = {}
    for top in several:
        for _, module in walk_modules(top):
            record = record_of(module)
            if record is not None:
                found[id(record)] = record
    return list(found.values())


def switched_off(sites: Iterable[Site]) -> Handle:
    """Switch sites off; removing the handle restores them."""
    kept = [(site, site.enabled) for site in sites]
    for site, _ in kept:
        site.enabled = False

    def restore() -> None:
        for site, enabled in kept:
            site.enabled = enabled

    return Handle(restore)


# ------------------------------------------------------------------------------------ parameters with their quantized values


def fold_parameters(records: Iterable[Record]) -> None:
    """Write the quantized values of parameters into them and switch their quantizers off."""
    by_name = {}
    for record in records:
        by_name[record.name] = record
    if not by_name:
        return
    sim = next(iter(by_name.values())).sim
    modules = dict(walk_modules(sim.model))
    for path, record in by_name.items():
        for name, slot in record.params._slots.items():
            quantizer = slot.get()
            if quantizer is not None and quantizer.is_initialized():
                parameter = modules[path]._parameters[name]
                assert parameter is not None
                with torch.no_grad():
                    parameter.copy_(quantizer(parameter.detach()))
                slot.set(None)


def original_model(model: nn.Module, qdq_weights: bool) -> nn.Module:
    """A float copy of a simulated model.

    Raises:
        ModelError: the model does not belong to a simulation.
    """
    record = record_of(model)
    if record is None:
        raise ModelError(
            "get_original_model",
            f"{with_article(type(model).__name__)} is not a simulated model",
            "pass sim.model of a bitwright.aimet_torch.QuantizationSimModel",
        )
    twin = copy.deepcopy(record.sim)
    made: nn.Module = twin.model
    if qdq_weights:
        fold_parameters(below(made))
    twin.remove()
    detach(made)
    return made


def twin(module: nn.Module, kind: type | None = None) -> Any:
    """A module of class ``kind``, its own by default, with the same parameters and sub-modules in lists of its own."""
    own: Any = kind or type(module)
    made = own.__new__(own)
    made.__dict__.update({k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(module).items()})
    return made


def detach(model: nn.Module) -> None:
    """Remove the attributes of this package from the modules of a model."""
    for _, module in walk_modules(model):
        for name in (RECORD, *METHODS):
            vars(module).pop(name, None)  # what the module's class has is not in vars
        for name in PUBLIC:
            if isinstance(module._modules.get(name), NotOfModel):
                del module._modules[name]
        _forget_inside(module)


# ------------------------------------------------------------------------------------ encodings of one module


#: what a place is called in an encodings file, its quantizer (``None``: none in effect), and how it is switched off
Place = tuple[str, Any, Callable[[], None]]


def places_of(quantizers: Any) -> list[Place]:
    """The places of a list or a dict of quantizers."""
    keys = quantizers.keys() if hasattr(quantizers, "keys") else range(len(quantizers))
    return [(str(key), quantizers[key], _switch(quantizers, key)) for key in keys]


def _switch(quantizers: Any, key: Any) -> Callable[[], None]:
    def off() -> None:
        quantizers[key] = None

    return off


def export_encodings(quantizers: Any, encoding_version: str) -> dict[str, Any]:
    """Encodings by place; ``None`` for a place without an encoding."""
    found = {name: None if q is None else q.get_encodings() for name, q, _ in places_of(quantizers)}
    return {name: None if one is None else one.to_qnn_encoding_dict(encoding_version) for name, one in found.items()}


def import_encodings(
    quantizers: Any,
    encodings: Mapping[str, Any],
    strict: bool,
    partial: bool,
    requires_grad: bool | None,
    allow_overwrite: bool,
) -> None:
    """Load records of version 0.6.1, by place; quantizers with a fixed range keep it.

    Args:
        encodings: records (a list, or one) by the name of a parameter, or the index of an input or output as text.
        strict: a record for a place without a quantizer is an error; else it is passed over.
        partial: quantizers without a record stay; else they are switched off.
        requires_grad: whether ranges train; ``None`` leaves that as it is.
        allow_overwrite: whether calibration may change what was taken.

    Raises:
        EncodingsError: (a ValueError) ``strict`` and no quantizer, or no record of version 0.6.1; nothing is changed.
    """
    found: list[tuple[Any, list[Any]]] = []
    dangling = []
    for name, quantizer, off in places_of(quantizers):
        if quantizer is not None and not quantizer.is_overwrite_allowed():
            continue
        given = encodings.get(name)
        if not given:
            dangling.append(off)
        elif quantizer is not None:
            found.append((quantizer, _records(name, given)))
        elif strict:
            raise EncodingsError(
                f"import of encodings, {name!r}",
                "there is a record and no quantizer to take it",
                "put a quantizer there first, or pass strict=False",
            )
    for quantizer, records in found:
        quantizer.set_legacy_encodings(records)
        if requires_grad is not None:
            quantizer.requires_grad_(requires_grad)
        quantizer.allow_overwrite(allow_overwrite)
    for off in dangling if not partial else ():
        off()


_KEYS = {"int": {"bitwidth", "is_symmetric", "min", "max"}, "float": {"bitwidth"}}


def _records(name: str, given: Any) -> list[Any]:
    records: Iterable[Any] = [given] if isinstance(given, Mapping) else list(given)
    for record in records:
        if not isinstance(record, Mapping) or not _KEYS.get(record.get("dtype", "int"), {""}) <= set(record):
            raise EncodingsError(
                f"import of encodings, {name!r}",
                f"no record of version 0.6.1: {record!r}",
                'give what export_..._encodings("0.6.1") returns, or load the whole file with sim.load_encodings',
            )
    return list(records)


# ------------------------------------------------------------------------------------ methods of modules with quantizers


def _encodings_of(kind: str, key: str) -> tuple[Callable[..., dict[str, Any]], Callable[..., None]]:
    """``export_<kind>_encodings`` and ``import_<kind>_encodings``, by ``key``."""

    def exported(self: Any, encoding_version: str) -> dict[str, Any]:
        return export_encodings(getattr(self, f"{kind}_quantizers"), encoding_version)

    def imported(self: Any, encodings: Mapping[str, Any], strict: bool, partial: bool, requires_grad: bool | None,
                 allow_overwrite: bool) -> None:  # fmt: skip
        import_encodings(
            getattr(self, f"{kind}_quantizers"), encodings, strict, partial, requires_grad, allow_overwrite
        )

    exported.__doc__ = f"Encodings of the {kind}s by {key}, as encodings files have them."
    imported.__doc__ = f"Take encodings of the {kind}s by {key} (:func:`import_encodings`)."
    for method, verb in ((exported, "export"), (imported, "import")):
        method.__name__ = f"{verb}_{kind}_encodings"  # by which pickle finds it
        method.__qualname__ = f"QuantizedModule.{method.__name__}"
    return exported, imported


class QuantizedModule:
    """Methods of modules with quantizers.

    Attributes:
        param_quantizers, input_quantizers, output_quantizers: the quantizers, ``None`` where there is none.
    """

    param_quantizers: Any
    input_quantizers: Any
    output_quantizers: Any

    @property
    def _parametrized(self) -> Any:
        """The module that holds the parameters."""
        return self

    def set_weight_quantizer_to_mxfp4_int8(self, block_size: int = 32) -> None:
        """Round the weight to MXFP4 and give it a symmetric int8 quantizer per channel; without a weight, do nothing.

        Args:
            block_size: input channels that share a power of two as their scale.

        Raises:
            FormatError: (a ValueError) no Linear or convolution.
            GranularityError: (a ValueError) blocks that do not divide its input channels.
        """
        self._round_weight(lambda weight: mxfp4_rounded(weight, block_size))

    def set_weight_quantizer_to_nvfp4_int8(self, scale_q: torch.Tensor, meta_scale: torch.Tensor | float) -> None:
        """Round the weight to NVFP4 with given scales and give it a symmetric int8 quantizer per channel.

        Args:
            scale_q: float8_e4m3fn, ``(out_channels, in_channels // 16, 1, ...)``: one scale per block of 16.
            meta_scale: what all of them are multiplied by.

        Raises:
            FormatError, GranularityError: (ValueErrors) as there; or scales of another dtype or shape.
        """
        self._round_weight(lambda weight: nvfp4_rounded(weight, scale_q, meta_scale))

    @torch.no_grad()
    def _round_weight(self, rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
        module = self._parametrized
        weight = getattr(module, "weight", None)
        if weight is None or "weight" not in self.param_quantizers:
            return
        if not isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            raise FormatError(type(module).__name__, "blocks are those of Linear and convolutions", "leave it out")
        values = rounded(weight.detach())
        quantizer = QuantizeDequantize((weight.shape[0], *(1,) * (weight.ndim - 1)), -128, 127, True)
        self.param_quantizers["weight"] = quantizer  # first: it refuses where the place has none
        weight.copy_(values)

    def compute_param_encodings(self) -> None:
        """Find the ranges of the parameters' quantizers."""
        for name, quantizer in self.param_quantizers.items():
            if quantizer is not None:
                with quantizer.compute_encodings():
                    quantizer(self._parametrized._parameters[name].detach())

    export_input_encodings, import_input_encodings = _encodings_of("input", "index")
    export_output_encodings, import_output_encodings = _encodings_of("output", "index")
    export_param_encodings, import_param_encodings = _encodings_of("param", "name")


def broadcastable(values: Any, granularity: Granularity, shape: tuple[int, ...]) -> torch.Tensor:
    """Parameters of an encoding in AIMET's shape, such as ``(8, 1, 1, 1)`` for 8 channels of a tensor of ``shape``."""
    values = np.asarray(values)
    if isinstance(granularity, PerChannel):
        values = values.reshape(granularity.broadcast_shape(shape))
    return torch.from_numpy(np.array(values, np.float32))


_FLOAT4 = FLOAT_FORMATS["float4_e2m1"]
_NVFP4_BLOCK = 16


def mxfp4_rounded(weight: torch.Tensor, block_size: int = 32) -> torch.Tensor:
    """A weight ``[O, I, ...]`` on the grid of MXFP4, whose blocks of input channels share a power of two.

    Raises:
        GranularityError: blocks that do not divide the input channels.
    """
    _check_blocks(weight, block_size, "mxfp4")
    return _rounded(weight, mxfp4_scales(weight, block_size), block_size)


def nvfp4_rounded(weight: torch.Tensor, scale_q: torch.Tensor, meta_scale: torch.Tensor | float) -> torch.Tensor:
    """A weight ``[O, I, ...]`` on the grid of NVFP4 with given scales.

    Args:
        weight: of a linear layer or a convolution.
        scale_q: float8_e4m3fn, ``[O, I / 16, 1, ...]``: one scale per block of 16.
        meta_scale: what all of them are multiplied by.

    Raises:
        FormatError: scales of another dtype.
        GranularityError: scales of another shape, or blocks that do not divide the input channels.
    """
    if scale_q.dtype != torch.float8_e4m3fn:
        raise FormatError("scale_q", f"it is {scale_q.dtype}", "give the scales as torch.float8_e4m3fn")
    _check_blocks(weight, _NVFP4_BLOCK, "nvfp4")
    wanted = (weight.shape[0], weight.shape[1] // _NVFP4_BLOCK, *(1 for _ in weight.shape[2:]))
    meta = torch.as_tensor(meta_scale, dtype=torch.float32, device=weight.device)
    if tuple(scale_q.shape) != wanted or meta.ndim:
        raise GranularityError(
            "scale_q",
            f"scales of shape {tuple(scale_q.shape)} and a meta scale of shape {tuple(meta.shape)}",
            f"give shape {wanted} and a single number",
        )
    return _rounded(weight, meta * scale_q.to(weight.device, torch.float32), _NVFP4_BLOCK)


def mxfp4_scales(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """The power of two of every block of ``block_size`` input channels: ``[O, I / block_size, 1, ...]``.

    Reference: OCP Microscaling Formats 1.0, section 6.3; a block of zeros has 1.
    """
    largest = weight.abs().flatten(2).amax(2) if weight.ndim > 2 else weight.abs()
    blocks = largest.reshape(largest.shape[0], -1, block_size).amax(2).double().cpu().numpy()
    scales = power_of_two_scale(np.where(blocks > 0, blocks, 4.0), _FLOAT4)
    shaped = np.asarray(scales, np.float32).reshape(*blocks.shape, *(1,) * (weight.ndim - 2))
    return torch.from_numpy(shaped).to(weight.device)


def _rounded(weight: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    return functional.float_quantize_dequantize(weight, _FLOAT4, scales, (1, size, *weight.shape[2:]))


def _check_blocks(weight: torch.Tensor, size: int, name: str) -> None:
    if size < 1 or weight.shape[1] % size:
        raise GranularityError(
            name, f"blocks of {size} do not divide {weight.shape[1]} input channels", "use another block size or layer"
        )
