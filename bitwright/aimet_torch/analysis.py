"""``aimet_torch.quant_analyzer``, ``layer_output_utils``, ``visualize_model`` and ``visualization_tools``; and, of what a model
should have before it is quantized, ``arch_checker`` and ``model_validator``.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright import torch as front
from bitwright.aimet_common.analyzer import QuantAnalyzerBase, RawFiles, Scores, checked, write_ranges
from bitwright.aimet_common.defs import CallbackFunc, QuantScheme
from bitwright.aimet_common.names import differs
from bitwright.aimet_torch.float_methods import fold_all_batch_norms
from bitwright.aimet_torch.module_quantizers import original_model, record_of
from bitwright.aimet_torch.quantsim import QuantizationSimModel
from bitwright.analysis.architecture import RULES, Finding, Rule, check_architecture
from bitwright.analysis.architecture import ArchitectureReport as ArchCheckerReport
from bitwright.analysis.layer_outputs import names_of_export
from bitwright.errors import ConfigError, ModelError, close_matches, with_article
from bitwright.report.page import ranges_chart, scores_chart, write_page
from bitwright.torch.calls.inputs import is_leaf, tensors_in, walk_modules

__all__ = [
    "RULES", "ArchChecker", "ArchCheckerReport", "CallbackFunc", "Finding", "LayerOutput", "LayerOutputUtil", "ModelValidator",
    "NamingScheme", "QuantAnalyzer", "Rule", "visualize_advanced_stats",
    "visualize_changes_after_optimization", "visualize_relative_weight_ranges_to_identify_problematic_layers",
    "visualize_stats", "visualize_weight_ranges",
]  # fmt: skip


# ------------------------------------------------------------------------------------ sensitivities


class QuantAnalyzer(QuantAnalyzerBase):
    """The sensitivity of a model to the quantization of each layer, measured by an evaluation function.

    Args:
        model: in float; left as it is.
        dummy_input: an example of its input.
        forward_pass_callback, eval_callback: functions of the model: one runs calibration data, one returns a number.
        modules_to_ignore: modules of ``model`` that are left in float.

    Raises:
        ConfigError: (a ValueError) a callback is not a function, or a module does not belong to ``model``.
    """

    def __init__(
        self,
        model: nn.Module,
        dummy_input: Any,
        forward_pass_callback: Callable[[nn.Module], Any],
        eval_callback: Callable[[nn.Module], float],
        modules_to_ignore: Sequence[nn.Module] | None = None,
    ) -> None:
        super().__init__(model, dummy_input, forward_pass_callback, eval_callback)
        names = {id(module): name for name, module in walk_modules(model)}
        self._ignored = []
        for module in modules_to_ignore or ():
            if id(module) not in names:
                problem = f"{with_article(type(module).__name__)} of it is not part of the model"
                raise ConfigError("modules_to_ignore", problem, "pass modules of the model that is analyzed")
            self._ignored.append(names[id(module)])

    def analyze(
        self,
        quant_scheme: QuantScheme = QuantScheme.post_training_tf_enhanced,
        default_param_bw: int = 8,
        default_output_bw: int = 8,
        config_file: str | None = None,
        results_dir: str = "./tmp/",
    ) -> None:
        """Do every step and write its files into ``results_dir``: pages, and their numbers as JSON."""
        sim = self._create_quantsim_and_encodings(quant_scheme, default_param_bw, default_output_bw, config_file)
        self._all_steps(sim, results_dir, histograms=quant_scheme == QuantScheme.post_training_tf_enhanced)

    def _create_quantsim_and_encodings(
        self, quant_scheme: Any, default_param_bw: int, default_output_bw: int, config_file: str | None
    ) -> QuantizationSimModel:
        """A calibrated simulation of a copy of the model, with its batch norms folded."""
        model = copy.deepcopy(self._model)
        fold_all_batch_norms(model, None, self._dummy_input)
        sim = QuantizationSimModel(
            model,
            self._dummy_input,
            quant_scheme,
            default_output_bw=default_output_bw,
            default_param_bw=default_param_bw,
            config_file=config_file,
            in_place=True,
        )
        for name in self._ignored:
            for site in sim.quantizers.values():
                if site.op == name or site.op.startswith(f"{name}."):
                    site.enabled = False
        sim.compute_encodings(self._forward_pass_callback)
        return sim

    def _float_score(self, subject: Any) -> float:
        return checked(self._eval_callback, self._model, "eval_callback")

    def perform_per_layer_analysis_by_enabling_quant_wrappers(self, sim: Any, results_dir: str) -> Scores:
        """Layer -> evaluation with only its quantizers; as ``per_layer_quant_enabled`` in ``results_dir``."""
        return self._per_layer(sim, results_dir, None, alone=True)

    def perform_per_layer_analysis_by_disabling_quant_wrappers(self, sim: Any, results_dir: str) -> Scores:
        """Layer -> evaluation with all quantizers but its own; as ``per_layer_quant_disabled`` in ``results_dir``."""
        return self._per_layer(sim, results_dir, None, alone=False)


# ------------------------------------------------------------------------------------ outputs of layers


class NamingScheme(Enum):
    """Names of output files: by modules, or by tensors of the exported model."""

    PYTORCH = 1
    ONNX = 2
    TORCHSCRIPT = 3


class LayerOutput:
    """Outputs of the leaf modules of a model, in float or simulated."""

    def __init__(
        self,
        model: nn.Module,
        dir_path: str,
        naming_scheme: NamingScheme = NamingScheme.PYTORCH,
        dummy_input: Any = None,
        onnx_export_args: Any = None,
    ) -> None:
        self._model = model
        self._leaves = [(name, m) for name, m in walk_modules(model) if is_leaf(m) and name]
        self._names = {} if naming_scheme is NamingScheme.PYTORCH else _tensors(model, naming_scheme, dummy_input)
        self._renames = naming_scheme is not NamingScheme.PYTORCH

    def get_outputs(self, input_instance: Any) -> dict[str, torch.Tensor]:
        """Name -> output of every leaf module that ran, in execution order; of one that ran several times the last."""
        found: dict[str, torch.Tensor] = {}
        handles = [m.register_forward_hook(_into(found, name)) for name, m in self._leaves]
        arguments = input_instance if isinstance(input_instance, tuple | list) else (input_instance,)
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        try:
            with torch.no_grad():
                self._model(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments))
        finally:
            for handle in handles:
                handle.remove()
        if self._renames:
            return {self._names[name]: value for name, value in found.items() if name in self._names}
        return found


class LayerOutputUtil:
    """Writes the outputs of every leaf module for inputs, one by one, as raw float32 files.

    Args:
        model: ``sim.model``, or a float model.
        dir_path: folder, created if missing.
        naming_scheme: ``PYTORCH`` calls files after modules, ``ONNX`` after tensors of the exported model, which is made for it;
            modules without a tensor of their own are left out then. ``TORCHSCRIPT`` is refused.
        dummy_input: for ``ONNX``; of a simulation its example by default.
        onnx_export_args: AIMET's argument; the export needs none.

    Raises:
        ConfigError: (a ValueError) ``TORCHSCRIPT``, or ``ONNX`` for a float model without ``dummy_input``.
    """

    def __init__(
        self,
        model: nn.Module,
        dir_path: str,
        naming_scheme: NamingScheme = NamingScheme.PYTORCH,
        dummy_input: Any = None,
        onnx_export_args: Any = None,
    ) -> None:
        self.layer_output = LayerOutput(model, dir_path, naming_scheme, dummy_input, onnx_export_args)
        self.save_input_output = RawFiles(dir_path)

    def generate_layer_outputs(self, input_instance: Any) -> None:
        """Run one input and write it with every layer's output."""
        self.save_input_output.save(input_instance, self.layer_output.get_outputs(input_instance))


def _into(found: dict[str, torch.Tensor], name: str) -> Any:
    def note(_: nn.Module, __: Any, output: Any) -> None:
        first = next(iter(tensors_in(output)), None)
        if first is not None:
            found.pop(name, None)  # a later run is later in the order too
            found[name] = first.detach().clone()

    return note


def _tensors(model: nn.Module, scheme: NamingScheme, dummy_input: Any) -> dict[str, str]:
    """Module -> the tensor of the exported model that is its output."""
    if scheme is NamingScheme.TORCHSCRIPT:
        raise ConfigError("naming_scheme", "models are not exported as TorchScript", "use NamingScheme.ONNX")
    record = record_of(model) or next((r for _, m in walk_modules(model) if (r := record_of(m))), None)
    if record is None and dummy_input is None:
        raise ConfigError("dummy_input", "tensors are named by an export, which needs an input", "pass dummy_input=")
    example = record.sim.example() if record is not None and dummy_input is None else dummy_input
    plain = copy.deepcopy(model) if record is None else original_model(record.sim.model, False)
    sim = front.QuantizationSimModel(plain.eval(), example, in_place=True)
    sim._place_left_out()
    for site in sim.quantizers.values():
        site.enabled = site.role == "output"  # so that each has its name in the file
    sim.compute_encodings([example], progress=False)
    with tempfile.TemporaryDirectory() as folder:
        sim.export(folder, "model", example)
        return names_of_export(Path(folder), None)


# ------------------------------------------------------------------------------------ pages


def visualize_stats(
    sim: QuantizationSimModel, dummy_input: Any, save_path: str = "./quant_stats_visualization.html"
) -> None:
    """Write the lowest and highest value of every quantizer's grid as a page with charts and tables.

    Args:
        sim: calibrated.
        dummy_input: AIMET's argument; nothing needs to be run.
        save_path: of the page; its suffix is ``.html``.

    Raises:
        ConfigError: (a ValueError) another suffix.
        CalibrationError: the simulation is not calibrated.
    """
    write_ranges(sim, save_path, "Ranges of the quantizers")


def visualize_advanced_stats(
    sim: QuantizationSimModel,
    dummy_input: Any,
    save_path: str = "./quant_advanced_stats_visualization.html",
    additional_percentiles: Sequence[float] = (1, 99),
) -> None:
    """As :func:`visualize_stats`, without the percentiles, which a warning says: ``sim.report(path)`` draws whole histograms."""
    differs("visualize_advanced_stats", "percentiles are not drawn; sim.report(path) draws histograms with their grids")
    write_ranges(sim, save_path, "Ranges of the quantizers")


Rows = list[dict[str, Any]]


def visualize_weight_ranges(model: nn.Module, results_dir: str, selected_layers: Sequence[str] | None = None) -> Rows:
    """Write the range of every output channel of the weights as ``visualize_weight_ranges.html``.

    Args:
        model: any module.
        results_dir: folder of the page.
        selected_layers: names of modules; all convolutions and linear layers by default.

    Returns:
        A mapping per layer: ``layer``, and ``min``, ``max``, ``mean``, ``std`` per channel.

    Raises:
        ConfigError: (a ValueError) a name is not a module with a weight.
    """
    rows = list(_layers(model, selected_layers))
    charts = [ranges_chart(_pairs(row), row["layer"]) for row in rows]
    write_page(Path(results_dir) / "visualize_weight_ranges.html", "Ranges of weights", *charts)
    return rows


def visualize_relative_weight_ranges_to_identify_problematic_layers(
    model: nn.Module, results_dir: str, selected_layers: Sequence[str] | None = None
) -> Rows:
    """Write how much wider each channel's range is than the narrowest of its layer, the most disparate layer first.

    The page is ``visualize_relative_weight_ranges_to_identify_problematic_layers.html``. Arguments, result and errors are those
    of :func:`visualize_weight_ranges`, with ``relative`` per channel.
    """
    rows = []
    for row in _layers(model, selected_layers):
        spans = np.asarray(row["max"]) - np.asarray(row["min"])
        narrowest = spans[spans > 0].min(initial=np.inf)
        relative = spans / narrowest if np.isfinite(narrowest) else np.ones_like(spans)
        rows.append({**row, "relative": relative.tolist()})
    rows.sort(key=lambda row: -max(row["relative"], default=0.0))
    widest = {row["layer"]: float(max(row["relative"], default=0.0)) for row in rows}
    charts = [scores_chart(widest, "widest over narrowest channel")]
    charts += [
        scores_chart({str(i): v for i, v in enumerate(row["relative"])}, "relative range", row["layer"])
        for row in rows[:20]
    ]
    name = "visualize_relative_weight_ranges_to_identify_problematic_layers"
    write_page(Path(results_dir) / f"{name}.html", "Relative ranges of weights", *charts)
    return rows


def visualize_changes_after_optimization(
    old_model: nn.Module, new_model: nn.Module, results_dir: str, selected_layers: Sequence[str] | None = None
) -> Rows:
    """Write the ranges of both models' weights, layer by layer, as ``visualize_changes_after_optimization.html``.

    Arguments, result and errors are those of :func:`visualize_weight_ranges`; the mappings have ``before`` and ``after``. Layers
    that one of the models lacks are left out.
    """
    before = {row["layer"]: row for row in _layers(old_model, selected_layers)}
    after = {row["layer"]: row for row in _layers(new_model, selected_layers)}
    rows, charts = [], []
    for name in (name for name in before if name in after):
        rows.append({"layer": name, "before": before[name], "after": after[name]})
        charts += [
            ranges_chart(_pairs(before[name]), f"{name}, before"),
            ranges_chart(_pairs(after[name]), f"{name}, after"),
        ]
    write_page(Path(results_dir) / "visualize_changes_after_optimization.html", "Changes of weights", *charts)
    return rows


def _layers(model: nn.Module, selected: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """Statistics of the weight of every selected layer."""
    modules = dict(walk_modules(model))
    for name in selected or ():
        if name not in modules or getattr(modules[name], "weight", None) is None:
            problem = f"{name!r} is not a module with a weight{close_matches(name, modules)}"
            raise ConfigError("selected_layers", problem, "use names of model.named_modules()")
    wanted = selected or [n for n, m in modules.items() if isinstance(m, (nn.modules.conv._ConvNd, nn.Linear))]
    for name in wanted:
        module: Any = modules[name]
        values = module.weight.detach().cpu().float().numpy()
        axis = 1 if isinstance(module, nn.modules.conv._ConvTransposeNd) else 0
        rows = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1) if values.ndim > 1 else values[:, None]
        told = {"min": rows.min(1), "max": rows.max(1), "mean": rows.mean(1), "std": rows.std(1)}
        yield {"layer": name, **{key: numbers.tolist() for key, numbers in told.items()}}


def _pairs(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    return {str(i): pair for i, pair in enumerate(zip(row["min"], row["max"], strict=True))}


class ArchChecker:
    """Checks a model against :data:`RULES`, and for batch norms that cannot be folded."""

    @staticmethod
    def check_model_arch(
        model: nn.Module, dummy_input: Any, result_dir: str | None = None, *, rules: tuple[Rule, ...] = RULES
    ) -> ArchCheckerReport:
        """Check a model by the rules.

        Args:
            model: left as it is.
            dummy_input: an example of its input.
            result_dir: folder for ``arch_checker_report.html``; AIMET writes it in any case.
            rules: instead of the table of :mod:`bitwright.analysis.architecture`.
        """
        given = tuple(dummy_input) if isinstance(dummy_input, list) else dummy_input
        graph = front.QuantizationSimModel(model, given).graph
        folds = front.fold_all_batch_norms(copy.deepcopy(model), dummy_input=given, progress=False)
        report = check_architecture(graph, rules, folds.skipped)
        if result_dir is not None:
            report.export_to_html(result_dir)
        return report

    @staticmethod
    def add_node_check(check_target_type: Any, arch_check: Any) -> None:
        """AIMET keeps checks for the whole process; here they are given to :meth:`check_model_arch`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "ArchChecker.add_node_check",
            "checks are not kept for the process",
            "pass them: ArchChecker.check_model_arch(model, dummy_input, rules=(*RULES, Rule(...)))",
        )

    @staticmethod
    def add_pattern_check(arch_check: Any) -> None:
        """As :meth:`add_node_check`.

        Raises:
            ConfigError: always.
        """
        ArchChecker.add_node_check(None, arch_check)

    @staticmethod
    def set_export_dir(dir_path: str) -> None:
        """AIMET keeps one folder for the whole process; here it is given to :meth:`check_model_arch`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "ArchChecker.set_export_dir",
            "a folder is not kept for the process",
            f"pass it: ArchChecker.check_model_arch(model, dummy_input, result_dir={dir_path!r})",
        )


# ------------------------------------------------------------------------------------ what stands in the way of a simulation


class ModelValidator:
    """Reused modules and functional calls are not obstacles here; a model that cannot be recorded is one."""

    @staticmethod
    def validate_model(
        model: nn.Module, model_input: Any, checks: tuple[Callable[..., bool], ...] = (), **kwargs: Any
    ) -> bool:
        """Whether ``model`` runs on ``model_input`` and its operators can be seen; ``checks`` are asked as well.

        A check is ``check(model, model_input, **kwargs) -> bool``.
        """
        try:
            front.QuantizationSimModel(model, model_input)
        except ModelError:
            return False
        return all(check(model, model_input, **kwargs) for check in checks)

    @staticmethod
    def add_check(validation_check: Callable[..., bool]) -> None:
        """AIMET keeps checks for the whole process; here they are given to :meth:`validate_model`.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "ModelValidator.add_check",
            "checks are not kept for the process",
            "pass them: ModelValidator.validate_model(model, model_input, checks=(check,))",
        )
