"""``aimet_torch.quantsim``: the simulation under AIMET's names and signatures, its files, other quantizers for many modules.

Home of ``quantsim.config_utils``, ``aimet_torch.onnx``, ``onnx_utils`` and ``experimental.pgs``.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import save_model as save_tensors
from torch import nn

from bitwright import torch as front
from bitwright.aimet_common.defs import QuantizationDataType, QuantScheme, data_type, range_method
from bitwright.aimet_common.names import absent_attribute, differs, names_below
from bitwright.aimet_common.sites import ConnectedGraph, fit_products
from bitwright.aimet_common.utils import file_version
from bitwright.aimet_torch.float_quantizers import FloatQuantizeDequantize
from bitwright.aimet_torch.module_quantizers import (
    SiteQuantizer,
    attach,
    below,
    check_attached,
    fold_parameters,
    is_quantized,
    original_model,
    record_of,
    show_all_ends,
    switched_off,
    view_of,
)  # fmt: skip
from bitwright.aimet_torch.quantized_modules import (
    BaseQuantizationMixin,
    attach_calls,
    calibrate,
    calibrate_parameters,
    check_plain,
)
from bitwright.aimet_torch.quantizers import GroupedBlockQuantizeDequantize, QuantizeDequantize, core_encoding
from bitwright.core.graph.graph import Op
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.numerics.spec import RangeMethod
from bitwright.core.placement.aimet_config import written_kernels
from bitwright.core.simulation.sites import SiteMap
from bitwright.errors import ConfigError, EncodingsError, GranularityError, ModelError, with_article
from bitwright.export.artefacts import rename_ports
from bitwright.export.files.onnx_file import moved_model, save_model
from bitwright.export.qdq.write import to_qdq
from bitwright.torch.calls.inputs import as_example, evaluation, walk_modules
from bitwright.torch.quantizers.fake_quantize import Grid as TensorGrid
from bitwright.torch.simulation.export import exported_module
from bitwright.torch.simulation.simulate import mark
from bitwright.torch.training.oscillation import PivotGradient

__all__ = [
    "OnnxExportApiArgs", "QuantParams", "QuantScheme", "QuantizationDataType", "QuantizationSimModel",
    "clip_weights_to_7f7f", "compute_encodings_for_sims", "disable_pgs", "enable_pgs", "get_pgs_eps",
    "get_pgs_multiplier", "is_pgs_enabled", "load_checkpoint", "load_encodings_to_sim", "save_checkpoint",
    "set_activation_quantizers_to_float", "set_blockwise_quantization_for_weights",
    "set_grouped_blockwise_quantization_for_weights", "set_matmul_second_input_producer_to_8bit_symmetric",
]  # fmt: skip

__path__: list[str] = []  # its older submodules are rows of the table of aliases
__getattr__ = names_below(__name__)


# ------------------------------------------------------------------------------------ larger gradients close to thresholds


class _Current(threading.local):
    """The setting of a thread. ``torch.compile`` recompiles when it changes; it cannot read a context variable."""

    gradient: PivotGradient | None = None


_CURRENT = _Current()


def enable_pgs(eps: float = 0.05, multiplier: float = 3.0) -> None:
    """Multiply the gradients of values within ``eps / 2`` steps of a rounding threshold, in later forward passes of this thread.

    Raises:
        ConfigError: (a ValueError) ``eps`` is not above 0 and at most 1, or ``multiplier`` is 1 or has no meaning.
    """
    if multiplier == 1:
        raise ConfigError("multiplier", "it is 1, which changes nothing", "use another number, or call disable_pgs()")
    _CURRENT.gradient = PivotGradient(eps, multiplier)


def disable_pgs() -> None:
    """Undo :func:`enable_pgs` for this thread."""
    _CURRENT.gradient = None


def is_pgs_enabled() -> bool:
    """Whether this thread called :func:`enable_pgs` last."""
    return _CURRENT.gradient is not None


def get_pgs_eps() -> float:
    """Width of the zone in steps; 0 if disabled."""
    found = _CURRENT.gradient
    return 0.0 if found is None else found.eps


def get_pgs_multiplier() -> float:
    """Factor of the gradients; 1 if disabled."""
    found = _CURRENT.gradient
    return 1.0 if found is None else found.multiplier


def pivoted(x: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
    """``x`` with the gradient that this thread enabled; called by the quantizers of these simulations."""
    found = _CURRENT.gradient
    return x if found is None else found(x, grid)


# ------------------------------------------------------------------------------------ encodings files


def versioned(source: str | Path | dict[str, Any]) -> str | Path | dict[str, Any]:
    """``source`` with a version: encodings without one (dicts, files of older AdaRound) get that of their layout."""
    if isinstance(source, dict):
        document = source
    else:
        try:
            document = json.loads(Path(source).read_text())
        except (OSError, ValueError):
            return source  # the reader says what is wrong with it
    if not isinstance(document, dict) or "version" in document:
        return source
    sections = ("param_encodings", "activation_encodings")
    if "encodings" in document:
        return {"version": "2.0.0", **document}
    if not any(key in document for key in sections):
        return {"version": "0.6.1", "activation_encodings": {}, "param_encodings": document}
    is_list = any(isinstance(document.get(key), list) for key in sections)
    empty: Any = [] if is_list else {}
    return {"version": "1.0.0" if is_list else "0.6.1", **dict.fromkeys(sections, empty), **document}


def load_encodings(
    sim: front.QuantizationSimModel,
    source: str | Path | dict[str, Any],
    strict: bool,
    partial: bool,
    allow_overwrite: bool | None,
) -> tuple[str, ...]:
    """Load encodings; quantizers that are switched off stay off.

    Raises:
        EncodingsError: (a ValueError) ``strict``, and the file has encodings for places that are switched off; or as
            :meth:`bitwright.torch.QuantizationSimModel.load_encodings`. The simulation is as it was.
    """
    restore = sim.quantizers.remember()
    off = [name for name, site in sim.quantizers.items() if not site.enabled]
    try:
        found = front.QuantizationSimModel.load_encodings(sim, versioned(source), strict, partial=True)
        refused = [name for name in off if name in found] if strict else []
        if refused:
            raise _switched_off_error(source, refused)
    except BaseException:
        restore()
        raise
    for name in off if partial else [*off, *_without_encoding(sim, found)]:
        sim.quantizers[name].enabled = False
    if allow_overwrite is not None:
        for name in found:
            sim.quantizers[name].frozen = not allow_overwrite
    return found


def _switched_off_error(source: Any, names: Sequence[str]) -> EncodingsError:
    return EncodingsError(
        str(source) if isinstance(source, (str, Path)) else "encodings",
        f"it has encodings for quantizers that are switched off: {', '.join(names[:5])}",
        "switch them on before loading, or pass strict=False to leave them off",
    )


def train_ends(sim: front.QuantizationSimModel, names: Sequence[str], train: bool) -> None:
    """Let the ranges of places train, or not."""
    for name in names:
        core: Any = sim.quantizers[name].quantizer
        for parameter in () if core.ends is None else core.ends.parameters().values():
            parameter.requires_grad_(train and core.learned is not None)


def _without_encoding(sim: front.QuantizationSimModel, loaded: Sequence[str]) -> list[str]:
    """Places whose quantizer got no encoding and follows from no others."""
    served = {id(sim.quantizers[name].quantizer) for name in loaded}
    return [n for n, site in sim.quantizers.items() if not (site.quantizer.derived or id(site.quantizer) in served)]


# ------------------------------------------------------------------------------------ exported files


# torch.onnx.export's arguments that mean something and have no effect here
_IGNORED = ("opset_version", "training")


def onnx_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Options of Bitwright's export for keywords of ``torch.onnx.export``; a keyword without a counterpart warns."""
    found: dict[str, Any] = {}
    if arguments.get("dynamic_shapes"):
        found["dynamic_shapes"] = arguments["dynamic_shapes"]
    elif arguments.get("dynamic_axes"):
        found["dynamic_batch"] = "auto"  # an example of one sample would fix the axis
        differs("export(dynamic_axes=...)", "the first axis of every input varies; dynamic_shapes= names others")
    found.update({name: list(arguments[name]) for name in ("input_names", "output_names") if arguments.get(name)})
    ignored = [name for name in _IGNORED if arguments.get(name) not in (None, 21)]
    if ignored:
        differs(f"export({', '.join(ignored)})", "without effect: the opset is 21, in evaluation mode")
    return found


def _tell_fixed_batch(made: Any, options: dict[str, Any]) -> None:
    """Warn if the first axis could not be made dynamic."""
    for note in made.notes if options.get("dynamic_batch") else ():
        if note.startswith("batch:"):
            differs("export(dynamic_axes=...)", note)


class OnnxExporter:
    """``sim.onnx``."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim

    def export(
        self,
        args: Any,
        f: str | Path,
        *,
        encoding_version: str | None = None,
        export_int32_bias: bool | None = None,
        force_activation_as: str | None = "unsigned",
        **kwargs: Any,
    ) -> None:
        """Write the float model to ``f`` and its encodings beside it, with the suffix ``.encodings``.

        ``<stem>_sites.json`` says which of them are a simulation's own.

        Raises:
            TypeError: ``f`` is not a path.
        """
        made, work = _exported(
            self._sim, args, f, export_int32_bias, force_activation_as, file_version(encoding_version), kwargs
        )
        with work:
            target = Path(f)
            made.encodings.replace(target.with_suffix(".encodings"))
            made.sites.replace(target.with_name(f"{target.stem}_sites.json"))
            moved_model(made.float_model, target)


def export(
    model: Any,
    args: Any,
    f: Any,
    *,
    export_int32_bias: bool = True,
    prequantize_constants: bool = False,
    force_activation_as: str | None = "unsigned",
    **kwargs: Any,
) -> None:
    """Write one ONNX model with QuantizeLinear and DequantizeLinear to ``f``, a path or a binary file.

    Args:
        model: a simulation, or its model; or quantizers and quantized modules on their own, in any module.
        args: example input; a tuple holds positional arguments.
        prequantize_constants: weights are always stored as integers here.

    Raises:
        ModelError: a part of a simulated model, whose operators are quantized only inside of the whole.
        ExportError: ``torch.export`` cannot trace the module.
    """
    record = record_of(model)
    if record is None and not isinstance(model, front.QuantizationSimModel):
        _export_modules(model, args, f, export_int32_bias, force_activation_as, kwargs)
        return
    sim = model if record is None else record.sim
    if record is not None and model is not sim.model:
        raise ModelError(
            record.name, "it is a part of a simulated model, which is exported as a whole", "give the simulation itself"
        )
    made, work = _exported(sim, args, f, export_int32_bias, force_activation_as, "1.0.0", kwargs)
    with work:
        if isinstance(f, io.IOBase):
            f.write(made.qdq.read_bytes())
        else:
            moved_model(made.qdq, Path(f))


def _export_modules(model: Any, args: Any, f: Any, bias: bool, activation: str | None, kwargs: dict[str, Any]) -> None:
    """Write a module that holds quantizers outside of simulations: each becomes its pair, or its arithmetic.

    The arithmetic is written of quantizers that return codes, and of grids that are no number format of Bitwright.
    """
    forms = _forms(f, bias, activation)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a simulation or a module, not {with_article(type(model).__name__)}")
    named = {name or "quantizer": module for name, module in model.named_modules() if isinstance(module, _ON_GRID)}
    shapes: dict[str, tuple[int, ...]] = {}

    def see(name: str, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        if inputs[0].is_floating_point():
            shapes.setdefault(name, tuple(inputs[0].shape))

    call = args if isinstance(args, tuple) else (args,), kwargs.get("kwargs") or {}
    options = onnx_options(kwargs)
    with torch.no_grad(), evaluation(model):
        with ExitStack() as hooks:
            for name, module in named.items():
                hooks.callback(module.register_forward_hook(partial(see, name)).remove)
            model(*call[0], **call[1])
        found = {name: core_encoding(named[name].get_encodings(), shape) for name, shape in shapes.items()}
        encodings = {name: encoding for name, encoding in found.items() if encoding is not None}
        with _marking({name: named[name] for name in encodings}):
            marked = exported_module(
                model, *call, options.get("dynamic_shapes"), dynamic_batch="dynamic_batch" in options
            )
    rename_ports(marked, options.get("input_names", ()), options.get("output_names", ()))
    written = to_qdq(marked, encodings, **forms).model
    if isinstance(f, io.IOBase):
        with tempfile.TemporaryDirectory() as work:
            save_model(written, Path(work) / "model.onnx", external=False)
            f.write((Path(work) / "model.onnx").read_bytes())
    else:
        Path(f).resolve().parent.mkdir(parents=True, exist_ok=True)
        save_model(written, f)


#: quantizers that return values on a grid, on their own and of simulations
_ON_GRID = (QuantizeDequantize, FloatQuantizeDequantize, SiteQuantizer)


@contextmanager
def _marking(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Quantizers leave a mark of their names inside the block, and compute nothing."""
    for name, module in modules.items():
        vars(module)["forward"] = partial(mark, site=name)
    try:
        yield
    finally:
        for module in modules.values():
            del vars(module)["forward"]


def _forms(f: Any, bias: bool | None, activation: str | None) -> dict[str, Any]:
    """How biases and activations are written to ``f``, as options of Bitwright's export."""
    if not isinstance(f, (str, os.PathLike, io.IOBase)):
        raise TypeError(f"f is a path, not {with_article(type(f).__name__)}")
    if activation not in ("unsigned", None):
        raise ConfigError("force_activation_as", f"{activation!r} grids are not written here", "use 'unsigned' or None")
    return {"bias": "float" if bias is False else "int32", "activation": activation or "as_is"}


def _exported(
    sim: Any, args: Any, f: Any, bias: bool | None, activation: str | None, version: str, kwargs: dict[str, Any]
) -> tuple[Any, tempfile.TemporaryDirectory[str]]:
    forms = _forms(f, bias, activation)
    folder = None if isinstance(f, io.IOBase) else Path(f).resolve().parent
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    work = tempfile.TemporaryDirectory(dir=folder)
    asked = onnx_options(kwargs)
    try:
        made = sim.write_artefacts(
            work.name, "model", args, encoding_version=version, samples=False, every_tensor=True, **forms, **asked
        )
    except BaseException:
        shutil.rmtree(work.name, ignore_errors=True)
        raise
    _tell_fixed_batch(made, asked)
    return made, work


# ------------------------------------------------------------------------------------ the simulation


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN = _NotGiven()


class Quantizers(SiteMap):
    """The mapping of sites, which can be called as AIMET's method: ``sim.quantizers()`` yields the quantizers in effect."""

    def __call__(self) -> Iterator[Any]:
        seen: set[int] = set()
        for site in self.values():
            if site.enabled and not site.quantizer.derived and id(site.quantizer) not in seen:
                seen.add(id(site.quantizer))
                yield view_of((site,))


class QuantizationSimModel(front.QuantizationSimModel):
    """:class:`bitwright.torch.QuantizationSimModel` with AIMET's methods and quantizers on modules.

    Args:
        model, dummy_input, default_output_bw, default_param_bw, in_place: as there.
        quant_scheme: a :class:`QuantScheme`, or the name of a range method (AIMET's or Bitwright's).
        config_file: path, name or dict of a configuration; ``None`` is AIMET's default, one scale per channel.
        default_data_type: ``int`` or ``float``.
        options: as for :class:`bitwright.torch.QuantizationSimModel`; and ``rounding_mode="nearest"`` of older scripts.

    Raises:
        ConfigError: another rounding mode; and see there.

    Attributes:
        original_names: module of the model it was made from -> its path, as long as that module lives.
    """

    def __init__(
        self,
        model: nn.Module,
        dummy_input: Any,
        quant_scheme: str | QuantScheme | RangeMethod | None = None,
        default_output_bw: int = 8,
        default_param_bw: int = 8,
        in_place: bool = False,
        config_file: str | Path | dict[str, Any] | None = None,
        default_data_type: Any = QuantizationDataType.int,
        **options: Any,
    ) -> None:
        check_plain(model)
        rounding = options.pop("rounding_mode", None)
        if rounding not in (None, "nearest"):
            raise ConfigError("rounding_mode", f"{rounding!r} is not supported", "leave it out, or use 'nearest'")
        super().__init__(
            model,
            as_example(model, dummy_input),
            range_method(quant_scheme),
            default_output_bw=default_output_bw,
            default_param_bw=default_param_bw,
            in_place=in_place,
            config_file="default" if config_file is None else config_file,
            default_data_type=data_type(default_data_type),
            **options,
        )
        fit_products(self)
        self._scheme = quant_scheme
        self.quantizers: Quantizers
        self._simulator.stage = "simulate"  # every quantizer refuses on its own until it has a range, as in AIMET
        self.original_names: Any = WeakKeyDictionary({m: name for name, m in walk_modules(model)})
        self.show_quantizers()
        ignored = [m for _, m in walk_modules(self.model) if type(m) in BaseQuantizationMixin.ignored]
        self.exclude_layers_from_quantization([module for module in ignored if below(module)])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "original_names": {}}  # modules of another model

    @property
    def connected_graph(self) -> ConnectedGraph:
        """The operators of the model, functional calls included."""
        return ConnectedGraph(self.model, self.graph, dict(walk_modules(self.model)))

    def get_supported_kernels(self) -> dict[str, list[dict[str, Any]]]:
        """Kernels of the target by operator type, and ``defaults``, from the configuration in AIMET's form."""
        return written_kernels(self.rules, QuantizationDataType.__getitem__)

    def __str__(self) -> str:
        """Every layer with the formats of its quantizers, and what is not quantized with the reason."""
        return f"{self!r}\n{self.coverage()}"

    def show_quantizers(self) -> None:
        """Attach the quantizers of all sites to their modules."""
        self.quantizers = Quantizers(dict(self.quantizers), self._values_of)
        for site in self.quantizers.values():
            own: Any = site.quantizer
            own.pivot = pivoted
        attach(self)
        attach_calls(self)

    @property
    def calibrated(self) -> bool:
        """Whether every quantizer in effect has a range."""
        return all(
            site.encoding is not None
            for site in self.quantizers.values()
            if site.enabled and not site.quantizer.derived
        )

    def __getattr__(self, name: str) -> Any:
        raise absent_attribute("aimet_torch.quantsim.QuantizationSimModel", name)

    # -- calibration

    def compute_encodings(  # type: ignore[override]
        self, forward_pass_callback: Any = None, forward_pass_callback_args: Any = NOT_GIVEN, **options: Any
    ) -> None:
        """Find the encodings by running ``forward_pass_callback(model)``, or ``(model, args)`` where these are given.

        ``None`` counts as given. Batches instead of a callback, and our own keywords, are taken too.
        """
        check_attached(self)
        given = forward_pass_callback_args is not NOT_GIVEN
        if not callable(forward_pass_callback) or isinstance(forward_pass_callback, torch.Tensor):
            super().compute_encodings(forward_pass_callback, **options)
            return

        def callback(model: nn.Module) -> None:
            forward_pass_callback(model, forward_pass_callback_args) if given else forward_pass_callback(model)

        calibrate(self, callback, super().compute_encodings, options)

    def compute_param_encodings(self) -> None:
        """Find the encodings of the parameters alone; the others stay as they are."""
        calibrate_parameters(self, super().compute_encodings)

    def set_percentile_value(self, percentile_value: float) -> None:
        """Use this percentile, 50 to 100, at every quantizer that uses percentiles; a warning where none does."""
        method = find_range_method("percentile", {"percentile": float(percentile_value)})
        found = [s for s in self.quantizers.values() if s.quantizer.spec.method.name == "percentile"]
        if not found:
            differs("set_percentile_value", "without effect: no quantizer uses percentiles (quant_scheme='percentile')")
        for site in found:
            enabled = site.enabled
            site.spec = replace(site.quantizer.spec, method=method)
            site.enabled = enabled

    @staticmethod
    def prepare_sim_for_compute_encodings(sim: QuantizationSimModel) -> None:
        """Without effect: simulations need no preparation."""

    # -- modules and quantizers

    def qmodules(self) -> Iterator[nn.Module]:
        """The modules with quantizers: those without sub-modules."""
        return (module for _, module in self.named_qmodules())

    def named_qmodules(self) -> Iterator[tuple[str, nn.Module]]:
        """:meth:`qmodules` with their names."""
        return ((name, module) for name, module in self.model.named_modules() if is_quantized(module))

    def quant_wrappers(self) -> Iterator[tuple[str, nn.Module]]:
        """:meth:`named_qmodules` under its older name."""
        return self.named_qmodules()

    def named_quantizers(self) -> Iterator[tuple[str, Any]]:
        """Name and quantizer of everything in effect: ``conv1.param_quantizers.weight``.

        What is quantized inside of forwards (``x + y``) comes under the name of its site.
        """
        seen: set[int] = set()
        for record in below(self.model):
            for name, slot in record.slots():
                quantizer = slot.get()
                if quantizer is not None and id(slot.sites[0].quantizer) not in seen:
                    seen.update(id(site.quantizer) for site in slot.sites)
                    yield f"{record.name}.{name}", quantizer
        for name, site in self.quantizers.items():
            if site.enabled and not site.quantizer.derived and id(site.quantizer) not in seen:
                seen.add(id(site.quantizer))
                yield name, view_of((site,))

    def quantizer_parameters(self) -> Iterator[nn.Parameter]:
        """``min`` and ``max`` of all ranges, for the optimizer.

        Those of modules are in ``sim.model.parameters()``. What is quantized inside of forwards (``x + y``), where AIMET has no
        quantizer, is here alone, and trains from the first call on.
        """
        return (parameter for _, parameter in self.named_quantizer_parameters())

    def named_quantizer_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """:meth:`quantizer_parameters` with their names."""
        return show_all_ends(self)

    def quantizer_state_dict(self) -> dict[str, Any]:
        """Quantizer entries of ``sim.model.state_dict()``, for ``sim.model.load_state_dict(state, strict=False)``."""
        return {name: value for name, value in self.model.state_dict().items() if "_quantizers." in name}

    def exclude_layers_from_quantization(self, layers_to_exclude: Sequence[nn.Module]) -> None:
        """Leave these modules of ``sim.model`` and everything below them in float."""
        for module in layers_to_exclude:
            records = below(module)
            if not records:
                raise ModelError(
                    "layers_to_exclude",
                    f"{with_article(type(module).__name__)} in it is not a module of sim.model",
                    "name modules of sim.model, not of the model it was made from",
                )
            for record in records:
                switched_off(site for _, site in record.own())
                switched_off(record.inside)

    def exclude_param_from_quantization(self, param_name_to_exclude: str) -> None:
        """Leave every parameter of this name (``weight``) in float."""
        for record in below(self.model):
            if param_name_to_exclude in record.params:
                record.params.add_module(param_name_to_exclude, None)

    # -- files

    def export(
        self,
        path: str | Path,
        filename_prefix: str,
        dummy_input: Any = None,
        onnx_export_args: Any = None,
        propagate_encodings: bool = False,
        export_to_torchscript: bool = False,
        use_embedded_encodings: bool = False,
        export_model: bool = True,
        filename_prefix_encodings: str | None = None,
        **options: Any,
    ) -> Any:
        """Write AIMET's files: the float ``<prefix>.onnx``, ``<prefix>.encodings`` and ``<prefix>_torch.encodings``.

        Every tensor that lies on a grid has an entry; ``<prefix>_sites.json`` says which are a simulation's own.
        ``<prefix>_qdq.onnx``, with QuantizeLinear and DequantizeLinear, is what other runtimes load.

        Args:
            options: of :meth:`bitwright.torch.QuantizationSimModel.export`.

        Returns:
            The files.

        Raises:
            ConfigError: TorchScript is asked for.
        """
        if export_to_torchscript:
            raise ConfigError(
                "export_to_torchscript", "TorchScript is not written here", "leave it out: ONNX is written"
            )
        if use_embedded_encodings:
            differs(
                "export(use_embedded_encodings=True)", f"{filename_prefix}_qdq.onnx has the encodings embedded, always"
            )
        if onnx_export_args is not None:
            named = onnx_export_args if isinstance(onnx_export_args, dict) else vars(onnx_export_args)
            options = {**onnx_options(named), **options}
        prefix = filename_prefix_encodings or filename_prefix
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            version = file_version(options.get("encoding_version"))
            options = {"every_tensor": True, **options, "encoding_version": version}
            example = as_example(self.model, dummy_input)
            made = self.write_artefacts(work, filename_prefix, example, samples=False, **options)
            _tell_fixed_batch(made, options)
            target = folder / f"{prefix}_torch.encodings"
            self.save_encodings(target, version)
            files = [target, made.encodings.replace(folder / f"{prefix}.encodings")]
            files.append(made.sites.replace(folder / f"{prefix}_sites.json"))
            if export_model:
                files.append(moved_model(made.float_model, folder / f"{filename_prefix}.onnx"))
                files.append(moved_model(made.qdq, folder / f"{filename_prefix}_qdq.onnx"))
        return tuple(files)

    def write_artefacts(self, path: str | Path, filename_prefix: str, dummy_input: Any, **options: Any) -> Any:
        """:meth:`bitwright.torch.QuantizationSimModel.export`, as it is there."""
        return super().export(path, filename_prefix, dummy_input, **options)

    @property
    def onnx(self) -> Any:
        """``sim.onnx.export(args, f)``."""
        return OnnxExporter(self)

    def save_encodings_to_json(
        self, path: str | Path, filename_prefix: str, encoding_version: str | None = None
    ) -> None:
        """Write ``<path>/<filename_prefix>.json`` with every encoding under its site's name."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self.save_encodings(Path(path) / f"{filename_prefix}.json", file_version(encoding_version))

    def get_activation_param_encodings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Encodings of version 0.6.1: of activations by module, ``input`` or ``output``, and number; of parameters by name."""
        modules: dict[str, Any] = dict(self.named_qmodules())
        activations = {
            name: {
                "input": _single(m.export_input_encodings("0.6.1")),
                "output": _single(m.export_output_encodings("0.6.1")),
            }
            for name, m in modules.items()
        }
        parameters = {
            f"{name}.{parameter}".removeprefix("."): records
            for name, m in modules.items()
            for parameter, records in m.export_param_encodings("0.6.1").items()
            if records is not None
        }
        activations = {name: {k: v for k, v in sides.items() if v} for name, sides in activations.items()}
        return {name: sides for name, sides in activations.items() if sides}, parameters

    def export_weights_to_safetensors(self, path: str | Path, filename_prefix: str) -> None:
        """Write the float parameters and buffers of the model to ``<path>/<filename_prefix>.safetensors``, tied ones once."""
        Path(path).mkdir(parents=True, exist_ok=True)
        save_tensors(original_model(self.model, False), str(Path(path, f"{filename_prefix}.safetensors")))

    def load_encodings(  # type: ignore[override]
        self,
        encodings: str | Path | dict[str, Any],
        strict: bool = True,
        partial: bool = True,
        requires_grad: bool | None = None,
        allow_overwrite: bool | None = True,
    ) -> None:
        """Load the encodings of a file or dict.

        Args:
            encodings: path or dict, of versions 0.6.1, 1.0.0, 2.0.0, or without a version.
            strict: refuse names that the model does not have, and encodings of places that are switched off.
            partial: leave quantizers without an encoding as they are; otherwise they are switched off.
            requires_grad: whether the loaded ranges train; ``None`` leaves that as it is.
            allow_overwrite: whether calibration may change what was loaded; ``None`` leaves it as it is.

        Raises:
            EncodingsError: (a ValueError) see :meth:`bitwright.torch.QuantizationSimModel.load_encodings`.
        """
        found = load_encodings(self, encodings, strict, partial, allow_overwrite)
        if requires_grad is not None:
            train_ends(self, found, requires_grad)

    def load_and_freeze_encodings(
        self, encoding_path: str | Path | dict[str, Any], ignore_when_quantizer_disabled: bool = False
    ) -> None:
        """Load the encodings of a file and freeze them: neither calibration nor training changes them."""
        train_ends(self, load_encodings(self, encoding_path, not ignore_when_quantizer_disabled, True, False), False)

    def set_and_freeze_param_encodings(self, encoding_path: str | Path | dict[str, Any]) -> None:
        """Load the parameter encodings of a file and freeze them: neither calibration nor training changes them."""
        off, restore = [n for n, site in self.quantizers.items() if not site.enabled], self.quantizers.remember()
        super().set_and_freeze_param_encodings(encoding_path)
        if refused := [name for name in off if self.quantizers[name].enabled]:
            restore()
            raise _switched_off_error(encoding_path, refused)
        train_ends(self, [name for name, site in self.quantizers.items() if site.is_stored and site.frozen], False)

    # -- weights

    def fold_param_quantizers(self) -> None:
        """Write the quantized values into the parameters and switch their quantizers off."""
        fold_parameters(below(self.model))

    @staticmethod
    def get_original_model(model: nn.Module, qdq_weights: bool = False) -> nn.Module:
        """A float copy of a simulated model; with ``qdq_weights``, parameters have their quantized values."""
        return original_model(model, qdq_weights)


def _single(records: dict[str, Any]) -> dict[str, Any]:
    """The one record of every place that has an encoding."""
    return {place: several[0] for place, several in records.items() if several}


class QuantParams:
    """Quantization parameters of :func:`bitwright.aimet_torch.bias_correction.correct_bias`.

    Args:
        weight_bw, act_bw: bits of weights and activations.
        round_mode: ``nearest`` is the only one; kept for scripts that name it.
        quant_scheme, config_file: as for :class:`QuantizationSimModel`.

    Raises:
        ConfigError: (a ValueError) another ``round_mode``.
    """

    def __init__(
        self,
        weight_bw: int = 8,
        act_bw: int = 8,
        round_mode: str = "nearest",
        quant_scheme: Any = QuantScheme.post_training_tf_enhanced,
        config_file: str | None = None,
    ) -> None:
        if round_mode != "nearest":
            raise ConfigError("round_mode", f"it is {round_mode!r}", "use 'nearest', the only one")
        self.weight_bw, self.act_bw, self.round_mode = weight_bw, act_bw, round_mode
        self.quant_scheme = range_method(quant_scheme)
        self.config_file = "default" if config_file is None else config_file


def load_encodings_to_sim(quant_sim_model: QuantizationSimModel, pytorch_encoding_path: str | Path) -> None:
    """``quant_sim_model.load_encodings(pytorch_encoding_path)``; quantizers without an encoding are switched off.

    Raises:
        EncodingsError: (a RuntimeError) the file is of another model, or has encodings for quantizers that are switched off.
    """
    quant_sim_model.load_encodings(pytorch_encoding_path, strict=True, partial=False)


def compute_encodings_for_sims(
    sim_list: Sequence[QuantizationSimModel],
    forward_pass_callback: Callable[[list[nn.Module], Any], Any],
    forward_pass_callback_args: Any,
) -> None:
    """Calibrate several simulations in one callback, which gets the list of their models.

    The callback runs once per simulation; the others compute in float meanwhile.
    """
    models = [sim.model for sim in sim_list]
    for sim in sim_list:
        with ExitStack() as others:
            for other in sim_list:
                if other is not sim:
                    others.enter_context(other.in_float())
                    others.enter_context(evaluation(other.model))
            sim.compute_encodings(lambda _: forward_pass_callback(models, forward_pass_callback_args))


def save_checkpoint(quant_sim_model: QuantizationSimModel, file_path: str | Path) -> None:
    """Write parameters and quantizers into the folder ``file_path``; nothing is pickled."""
    quant_sim_model.save_checkpoint(file_path)


def load_checkpoint(file_path: str | Path) -> QuantizationSimModel:
    """Always an error: AIMET unpickles a whole model here, which runs code from the file.

    Raises:
        ModelError: always, with the two lines that do the same.
    """
    raise ModelError(
        f"load_checkpoint({str(file_path)!r})",
        "a checkpoint holds parameters and quantizers, not the model's code",
        "make the simulation as before, then call sim.load_checkpoint(file_path)",
    )


# ------------------------------------------------------------------------------------ other quantizers for many modules at once


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _chosen(sim: Any, arg: Any) -> Iterator[tuple[str, Any]]:
    """The modules of a simulation that ``arg`` selects: by type, as modules, or by a condition."""
    condition = _condition(arg)
    return ((name, module) for name, module in sim.named_qmodules() if condition(module))


def _condition(arg: Any) -> Callable[[nn.Module], bool]:
    several = list(arg) if isinstance(arg, (list, tuple, set)) else [arg]
    if all(isinstance(item, type) for item in several):
        kinds = tuple(several)
        return lambda module: isinstance(module, kinds)
    if all(isinstance(item, nn.Module) for item in several):
        wanted = {id(module) for module in several}
        return lambda module: id(module) in wanted
    if callable(arg):
        condition: Callable[[nn.Module], bool] = arg
        return condition
    raise ModelError("arg", f"{arg!r} names no modules", "give module types, modules of sim.model, or a condition")


def set_activation_quantizers_to_float(
    sim: Any,
    arg: Any,
    exponent_bits: int | None = None,
    mantissa_bits: int | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Make the input and output quantizers that are in effect float.

    Args:
        arg: types of modules, modules of ``sim.model``, or a condition on a module.
        exponent_bits, mantissa_bits: of the format; or its ``dtype``.
    """
    for _, module in _chosen(sim, arg):
        for quantizers in (module.input_quantizers, module.output_quantizers):
            for index, quantizer in enumerate(quantizers):
                if quantizer is not None:
                    quantizers[index] = FloatQuantizeDequantize(exponent_bits, mantissa_bits, dtype=dtype)


def _blocks(name: str, module: nn.Module, block_size: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the scale, and block sizes axis by axis, for a weight."""
    weight: Any = module.weight
    transposed = isinstance(module, _TRANSPOSED)
    out_axis, in_axis = (1, 0) if transposed else (0, 1)
    if isinstance(block_size, int) and weight.dim() > 1:
        sizes = [-1] * weight.dim()
        sizes[out_axis], sizes[in_axis] = 1, block_size
    else:
        sizes = [block_size, 1] if isinstance(block_size, int) else list(block_size)
        if len(sizes) != weight.dim():
            raise GranularityError(
                f"{name}.weight", f"block_size {block_size} for a weight of shape {tuple(weight.shape)}",
                "give one size per axis",
            )  # fmt: skip
    whole = [n if size == -1 else size for n, size in zip(weight.shape, sizes, strict=True)]
    for axis, (n, size) in enumerate(zip(weight.shape, whole, strict=True)):
        if n % size:
            raise GranularityError(
                f"{name}.weight", f"axis {axis} has {n} elements, which blocks of {size} do not divide",
                "choose a size that divides it, or leave the layer out of arg",
            )  # fmt: skip
    return tuple(n // size for n, size in zip(weight.shape, whole, strict=True)), tuple(whole)


def _weights(sim: Any, arg: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in _chosen(sim, arg) if module.param_quantizers.get("weight") is not None]


def set_blockwise_quantization_for_weights(sim: Any, arg: Any, bitwidth: int, symmetric: bool, block_size: Any) -> None:
    """Give weights one scale per block.

    Args:
        arg: types of modules, modules of ``sim.model``, or a condition on a module.
        block_size: elements per block along the input channels; or one size per axis, ``-1`` for a whole axis.

    Raises:
        GranularityError: blocks that do not divide a weight; nothing is changed.
    """
    shapes = [(module, *_blocks(name, module, block_size)) for name, module in _weights(sim, arg)]
    for module, shape, blocks in shapes:
        module.param_quantizers["weight"] = QuantizeDequantize(shape, bitwidth, symmetric, block_size=blocks)


def set_grouped_blockwise_quantization_for_weights(
    sim: Any, arg: Any, bitwidth: int, symmetric: bool, decompressed_bw: int, block_size: Any, block_grouping: Any = -1
) -> None:
    """Give weights one scale per block that is an integer multiple of one per channel (LPBQ).

    Args:
        arg, block_size: as for :func:`set_blockwise_quantization_for_weights`.
        decompressed_bw: bits of code times multiple.
        block_grouping: blocks per channel's scale; ``-1``, all, is the only one.

    Raises:
        ConfigError: a ``block_grouping`` of less than all blocks, or widths without a scale format; nothing is changed.
        GranularityError: blocks that do not divide a weight; nothing is changed.
        ValueError: not symmetric.
    """
    made = []
    for name, module in _weights(sim, arg):
        shape, blocks = _blocks(name, module, block_size)
        grouping = block_grouping
        if isinstance(block_grouping, int):
            blocked = 0 if isinstance(module, _TRANSPOSED) else 1
            grouping = tuple(block_grouping if axis == blocked else 1 for axis in range(len(shape)))
        quantizer = GroupedBlockQuantizeDequantize(
            shape, bitwidth, symmetric, decompressed_bw, block_size=blocks, block_grouping=grouping
        )
        module.param_quantizers["weight"].check(quantizer)
        made.append((module, quantizer))
    for module, quantizer in made:
        module.param_quantizers["weight"] = quantizer


def clip_weights_to_7f7f(sim: QuantizationSimModel) -> None:
    """Clip symmetric 16-bit weights at code 0x7f7f, the largest that some accelerators take."""
    for _, module in sim.named_qmodules():
        own: Any = module
        quantizer = own.param_quantizers.get("weight")
        if quantizer is not None and quantizer.symmetric and quantizer.bitwidth == 16 and quantizer.is_initialized():
            largest = quantizer.get_scale().as_subclass(torch.Tensor).to(own.weight.device) * 0x7F7F
            with torch.no_grad():
                own.weight.copy_(torch.minimum(own.weight, largest))


def _sites_upstream(value: str, sites: Mapping[str, Sequence[Any]], made: Mapping[str, Op]) -> Sequence[Any]:
    """The sites of ``value`` or, where it has none, of the nearest value on the way of first inputs that has some."""
    while value not in sites and value in made and made[value].inputs[0] is not None:
        value = str(made[value].inputs[0])
    return sites.get(value, ())


def set_matmul_second_input_producer_to_8bit_symmetric(sim: QuantizationSimModel) -> None:
    """Give what products of two activations read second a symmetric grid of 8 bits, where its values are computed."""
    sites: dict[str, list[Any]] = {}
    for site in sim.quantizers.values():
        sites.setdefault(site.value, []).append(site)
    made = {value: op for op in sim.graph.ops for value in op.outputs}
    for op in sim.graph.ops:
        value = op.inputs[1] if op.type == "MatMul" and len(op.inputs) > 1 else None
        if value is None or sim.graph.values[value].is_static:
            continue
        found = tuple(site for site in _sites_upstream(value, sites, made) if site.enabled)
        if found:
            quantizer = view_of(found)
            quantizer.bitwidth, quantizer.symmetric = 8, True


@dataclass
class OnnxExportApiArgs:
    """Value of ``sim.export(onnx_export_args=...)``; the opset has no effect."""

    opset_version: int | None = None
    input_names: list[str] | None = None
    output_names: list[str] | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments as keywords."""
        return dict(vars(self))
