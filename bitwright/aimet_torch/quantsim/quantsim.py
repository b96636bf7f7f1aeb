"""``aimet_torch.quantsim``: the simulation under AIMET's names and signatures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from bitwright import torch as front
from bitwright.aimet_common.absent import absent_attribute, absent_names
from bitwright.aimet_common.defs import (
    QuantizationDataType,
    QuantScheme,
    data_type,
    learns_ranges,
    range_method,
    supported_kernels,
)
from bitwright.aimet_torch import _modules
from bitwright.aimet_torch._calibration import calibrate, calibrate_parameters
from bitwright.aimet_torch._core import RangeMethod, SiteMap, find_range_method, walk_modules
from bitwright.aimet_torch._encodings import load_encodings
from bitwright.aimet_torch._module_calls import attach_calls
from bitwright.aimet_torch._pgs import pivoted
from bitwright.aimet_torch._registry import check_plain
from bitwright.aimet_torch._sites import view_of
from bitwright.errors import ConfigError, ModelError

__all__ = [
    "QuantParams",
    "QuantScheme",
    "QuantizationDataType",
    "QuantizationSimModel",
    "compute_encodings_for_sims",
    "load_checkpoint",
    "load_encodings_to_sim",
    "save_checkpoint",
]

__getattr__ = absent_names("bitwright.aimet_torch.quantsim")


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN = _NotGiven()


class Quantizers(SiteMap):
    """Our mapping of sites, which is also AIMET's method: ``sim.quantizers()`` gives the quantizers in effect."""

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
        quant_scheme: a :class:`QuantScheme`, one of AIMET's names, or one of ours.
        config_file: path, name or dict of a configuration; ``None`` is AIMET's default, one scale per channel.
        default_data_type: ``int`` or ``float``.
        options: of ours; and ``rounding_mode`` of older scripts, which is ``"nearest"``.

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
            raise ConfigError("rounding_mode", f"there is no {rounding!r}", "leave it out, or use 'nearest'")
        if isinstance(dummy_input, list):
            dummy_input = tuple(dummy_input)
        super().__init__(
            model,
            dummy_input,
            range_method(quant_scheme),
            default_output_bw=default_output_bw,
            default_param_bw=default_param_bw,
            in_place=in_place,
            config_file="default" if config_file is None else config_file,
            default_data_type=data_type(default_data_type),
            **options,
        )
        self._scheme = quant_scheme
        self.quantizers: Quantizers
        self._simulator.stage = "simulate"  # every quantizer refuses on its own until it has a range, as in AIMET
        self.original_names: Any = WeakKeyDictionary({m: name for name, m in walk_modules(model)})
        self.show_quantizers()

    def get_supported_kernels(self) -> dict[str, list[dict[str, Any]]]:
        """What the configuration says the target runs: ``defaults`` and operator types, with AIMET's entries."""
        return supported_kernels(self.rules)

    def show_quantizers(self) -> None:
        """Put the quantizers of all sites on the modules they belong to."""
        self.quantizers = Quantizers(dict(self.quantizers), self._values_of)
        for site in self.quantizers.values():
            own: Any = site.quantizer
            own.pivot = pivoted
        _modules.attach(self)
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
        _modules.check_attached(self)
        given = forward_pass_callback_args is not NOT_GIVEN
        if not callable(forward_pass_callback) or isinstance(forward_pass_callback, torch.Tensor):
            super().compute_encodings(forward_pass_callback, **options)
            self._learn_if_asked()
            return

        def callback(model: nn.Module) -> None:
            forward_pass_callback(model, forward_pass_callback_args) if given else forward_pass_callback(model)

        calibrate(self, callback, super().compute_encodings, options)
        self._learn_if_asked()

    def _learn_if_asked(self) -> None:
        """The schemes ``training_range_learning_...`` train ranges from the calibrated ones on."""
        if learns_ranges(self._scheme):
            self.learn_ranges(["*"])

    def compute_param_encodings(self) -> None:
        """Find the encodings of the parameters alone; the others stay as they are."""
        calibrate_parameters(self, super().compute_encodings)

    def set_percentile_value(self, percentile_value: float) -> None:
        """Use this percentile, 50 to 100, at every activation quantizer that uses percentiles."""
        method = find_range_method("percentile", {"percentile": float(percentile_value)})
        from dataclasses import replace

        found = [s for s in self.quantizers.values() if s.quantizer.spec.method.name == "percentile"]
        if not found:
            raise ConfigError(
                "set_percentile_value",
                "no quantizer uses percentiles",
                "make the simulation with quant_scheme=QuantScheme.post_training_percentile",
            )
        for site in found:
            enabled = site.enabled
            site.spec = replace(site.quantizer.spec, method=method)
            site.enabled = enabled

    @staticmethod
    def prepare_sim_for_compute_encodings(sim: QuantizationSimModel) -> None:
        """Nothing is to be prepared."""

    # -- modules and quantizers

    def qmodules(self) -> Iterator[nn.Module]:
        """The modules that show quantizers: those without sub-modules."""
        return (module for _, module in self.named_qmodules())

    def named_qmodules(self) -> Iterator[tuple[str, nn.Module]]:
        """:meth:`qmodules` with their names."""
        return ((name, module) for name, module in self.model.named_modules() if _modules.is_quantized(module))

    def quant_wrappers(self) -> Iterator[tuple[str, nn.Module]]:
        """:meth:`named_qmodules` under its older name."""
        return self.named_qmodules()

    def named_quantizers(self) -> Iterator[tuple[str, Any]]:
        """Name and quantizer of everything in effect: ``conv1.param_quantizers.weight``.

        What is quantized inside of forwards (``x + y``) comes under the name of its site.
        """
        seen: set[int] = set()
        for record in _modules.below(self.model):
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
        """The parameters of all ranges, for the optimizer; they train from the first call on.

        AIMET's parameters are the ends of the ranges, and in ``sim.model.parameters()``; these are distances from the calibrated
        ranges (:meth:`learn_ranges`), and beside the model.

        Raises:
            CalibrationError: no encodings yet.
        """
        return (parameter for _, parameter in self.named_quantizer_parameters())

    def named_quantizer_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """:meth:`quantizer_parameters` with the names of their sites."""
        if not any(True for _ in self.named_range_parameters()):
            self.learn_ranges(["*"])
        return self.named_range_parameters()

    def exclude_layers_from_quantization(self, layers_to_exclude: Sequence[nn.Module]) -> None:
        """Leave these modules of ``sim.model`` and everything below them in float."""
        for module in layers_to_exclude:
            records = _modules.below(module)
            if not records:
                raise ModelError(
                    "layers_to_exclude",
                    f"a {type(module).__name__} in it is not a module of sim.model",
                    "name modules of sim.model, not of the model it was made from",
                )
            for record in records:
                _modules.switched_off(site for _, slot in record.slots() for site in slot.sites)
                _modules.switched_off(record.inside)

    def exclude_param_from_quantization(self, param_name_to_exclude: str) -> None:
        """Leave every parameter of this name (``weight``) in float."""
        for record in _modules.below(self.model):
            if param_name_to_exclude in record.params:
                record.params[param_name_to_exclude] = None

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
        """Write the artefacts of :meth:`bitwright.torch.QuantizationSimModel.export`; see there for ``options``."""
        from bitwright.aimet_torch._export import export

        return export(
            self,
            self.write_artefacts,
            (path, filename_prefix, dummy_input, onnx_export_args),
            {
                "propagate_encodings": propagate_encodings,
                "export_to_torchscript": export_to_torchscript,
                "use_embedded_encodings": use_embedded_encodings,
                "export_model": export_model,
                "filename_prefix_encodings": filename_prefix_encodings,
            },
            options,
        )

    def write_artefacts(self, path: str | Path, filename_prefix: str, dummy_input: Any, **options: Any) -> Any:
        """:meth:`bitwright.torch.QuantizationSimModel.export`, as it is there."""
        return super().export(path, filename_prefix, dummy_input, **options)

    @property
    def onnx(self) -> Any:
        """``sim.onnx.export(args, f)``."""
        from bitwright.aimet_torch._export import OnnxExporter

        return OnnxExporter(self)

    def save_encodings_to_json(self, path: str | Path, filename_prefix: str, encoding_version: str = "1.0.0") -> None:
        """Write ``<path>/<filename_prefix>.json`` with every encoding under its site's name."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self.save_encodings(Path(path) / f"{filename_prefix}.json", encoding_version)

    def load_encodings(  # type: ignore[override]
        self,
        encodings: str | Path | dict[str, Any],
        strict: bool = True,
        partial: bool = True,
        requires_grad: bool | None = None,
        allow_overwrite: bool | None = True,
    ) -> None:
        """Take the encodings of a file or dict.

        Args:
            encodings: path or dict, of versions 0.6.1, 1.0.0, 2.0.0, or without a version.
            strict: refuse names that the model does not have, and encodings of places that are switched off.
            partial: leave quantizers without an encoding as they are; otherwise they are switched off.
            requires_grad: train ranges from these on; ``False`` and ``None`` leave that as it is.
            allow_overwrite: whether calibration may change what was loaded; ``None`` leaves it as it is.

        Raises:
            EncodingsError: (a ValueError) see :meth:`bitwright.torch.QuantizationSimModel.load_encodings`.
        """
        load_encodings(self, encodings, strict, partial, allow_overwrite)
        if requires_grad:
            self.learn_ranges(["*"])

    def load_and_freeze_encodings(
        self, encoding_path: str | Path | dict[str, Any], ignore_when_quantizer_disabled: bool = False
    ) -> None:
        """Take the encodings of a file and keep them through calibration."""
        load_encodings(self, encoding_path, not ignore_when_quantizer_disabled, True, False)

    def set_and_freeze_param_encodings(self, encoding_path: str | Path | dict[str, Any]) -> None:
        """Take the parameter encodings of a file and keep them through calibration."""
        super().set_and_freeze_param_encodings(encoding_path)

    # -- weights

    def fold_param_quantizers(self) -> None:
        """Write the quantized values into the parameters and switch their quantizers off."""
        from bitwright.aimet_torch._weights import fold_parameters

        fold_parameters(_modules.below(self.model))

    @staticmethod
    def get_original_model(model: nn.Module, qdq_weights: bool = False) -> nn.Module:
        """A float copy of a simulated model; with ``qdq_weights``, parameters have their quantized values."""
        from bitwright.aimet_torch._weights import original_model

        return original_model(model, qdq_weights)


class QuantParams:
    """What :func:`bitwright.aimet_torch.bias_correction.correct_bias` simulates.

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
    """``quant_sim_model.load_encodings(pytorch_encoding_path)``; quantizers without an encoding are switched off."""
    quant_sim_model.load_encodings(pytorch_encoding_path, strict=False, partial=False)


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
        with _others_in_float(sim_list, sim):
            sim.compute_encodings(lambda _: forward_pass_callback(models, forward_pass_callback_args))


@contextmanager
def _others_in_float(sims: Sequence[QuantizationSimModel], calibrated: QuantizationSimModel) -> Iterator[None]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        for sim in sims:
            if sim is not calibrated:
                stack.enter_context(sim.in_float())
        yield


def save_checkpoint(quant_sim_model: QuantizationSimModel, file_path: str | Path) -> None:
    """Write parameters and quantizers into the folder ``file_path``; nothing is pickled."""
    quant_sim_model.save_checkpoint(file_path)


def load_checkpoint(file_path: str | Path) -> QuantizationSimModel:
    """AIMET unpickles a whole model here, which runs code from the file; Bitwright does not.

    Raises:
        ModelError: always, with the two lines that do the same.
    """
    raise ModelError(
        f"load_checkpoint({str(file_path)!r})",
        "a checkpoint holds parameters and quantizers, not the model's code",
        "make the simulation as before, then call sim.load_checkpoint(file_path)",
    )


def read_json(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """A dict of encodings, or what a file of them holds."""
    if isinstance(source, dict):
        return source
    found: dict[str, Any] = json.loads(Path(source).read_text())
    return found
