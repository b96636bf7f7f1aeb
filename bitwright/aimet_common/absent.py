"""Names of AIMET that these packages lack, and what to use instead.

One table for all of it: module ``__getattr__`` functions, placeholder modules and ``bitwright migrate`` read it.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_LATER = "it is not in this version of Bitwright"

#: dotted name below ``bitwright`` (a module, or a name in one) -> what to do instead
ABSENT: dict[str, str] = {
    "aimet_torch.gptvq": "codebooks of vectors are not in this version of Bitwright; bitwright.torch.apply_gptq rounds "
    "weights of 2 and 3 bits with error feedback (presets w2g32_float_zero, w3g64_float_zero)",
    "aimet_torch.experimental.fptquant": "bitwright.torch.transform_model(model, data) fits transforms and merges those of "
    "values into weights, bitwright.torch.rotate_model(model, dummy_input) rotates the residual stream",
    **dict.fromkeys(
        (f"aimet_torch.experimental.omniquant{module}.update_lora_weights" for module in ("", ".omniquant_optimizer")),
        "no scales between channels are folded into weights, so that those of adapters stay as they are",
    ),
    "aimet_torch.experimental.c_round": "Bitwright rounds ties to even, as ONNX QuantizeLinear does",
    "aimet_torch.blockwise_sampler": "methods keep values between layers themselves: "
    "apply_reconstruction(sim, data, memory_budget=..., spill_dir=...)",
    "aimet_torch.deepspeed_utils": f"{_LATER}; simulations train under DDP and FSDP2 (docs/training-with.md)",
    "aimet_torch.visualize_serialized_data": "print the statistics that ModelCompressor.compress_model returns",
    "aimet_torch.winnow": "AIMET removed its public entry in 2.31; pruning is not in this version of Bitwright",
    "aimet_torch.svd": "its steps are AIMET's internals; call ModelCompressor.compress_model, or bitwright.torch.svd_model",
    "aimet_torch.channel_pruning": "its steps are AIMET's internals; call ModelCompressor.compress_model, or bitwright.compress",
    "aimet_torch.nn.lora": "simulations quantize the layers of PEFT as they are; "
    "aimet_torch.peft.replace_lora_layers_with_quantizable_layers(model) gives adapters layers of their own",
    "aimet_torch.nn.transformers.fast_generate_wrapper": "call sim.model.generate(...): nothing has to be wrapped",
    "aimet_torch.experimental.export": f"{_LATER}; sim.export and sim.onnx.export write ONNX",
    "aimet_torch.experimental.transforms": "bitwright.torch.rotate_model merges rotations into weights",
    "aimet_onnx.adaround.adaround_weight.AdaroundParameters": "AIMET took it away with the call on models; "
    "call apply_adaround(sim, inputs, num_iterations)",
    "aimet_onnx.prepare_passes": "models are prepared when they are loaded: give them to QuantizationSimModel as they are",
    "aimet_onnx.graph_passes": "supergroups are found by rules: sim.coverage() shows them",
    "aimet_torch.v1": "AIMET removed it in 2.30; use bitwright.aimet_torch itself",
    "aimet_torch.quantsim.check_accumulator_overflow": f"{_LATER} (AIMET announced its removal for 2.44); int32 biases are "
    "checked for overflow when they are derived",
    "aimet_torch.adascale.AdaScale.adascale_block": "its steps are AIMET's internals; call apply_adascale(sim, data_loader)",
    "aimet_torch.quantization.base.QuantizerBase.register_quantization_parameter": "ranges are the parameters min and max "
    "of the quantizers in quantization.affine: set_range(min, max) gives them values",
    **dict.fromkeys(
        (
            f"aimet_torch.nn.{mixin}.{name}"
            for mixin in ("BaseQuantizationMixin", "QuantizationMixin")
            for name in ("set_default_kernel", "get_default_kernel", "set_kernel", "get_kernel")
        ),
        "there are no kernels to plug in: run the exported model in ONNX Runtime",
    ),
    "aimet_torch.quantsim.QuantizationSimModel.run_modules_for_traced_custom_marker": "nothing is traced with markers: "
    "call sim.export",
    "aimet_onnx.quantsim.QuantizationSimModel.save_model_graph": "print sim.coverage()",
    "aimet_onnx.qc_quantize_op.QcQuantizeOp.get_stats_histogram": f"{_LATER}; sim.health() has the ranges seen",
    "aimet_onnx.qc_quantize_op.QcQuantizeOp.set_zero_point_shift": "codes between the integers are not supported",
    "aimet_onnx.qc_quantize_op.QcQuantizeOp.get_zero_point_shift": "codes between the integers are not supported",
    **dict.fromkeys(
        (f"aimet_onnx.qc_quantize_op.{name}" for name in ("ScaleQuantizer", "LPBQScaleQuantizer")),
        "block scales in two factors (LPBQ) are asked for with quantizer.set_qspec(QSpec.lpbq(...)), or decompressed_bw",
    ),
    **dict.fromkeys(
        (f"aimet_torch.nn.modules.custom.{quantized}NonMaxSuppression" for quantized in ("", "Quantized")),
        "call the function itself: simulations see it as it is",
    ),
    "aimet_torch.amp.quantizer_groups.QuantizerGroup": "groups follow from the graph: "
    "bitwright.mixed_precision(sim, ...) finds them",
    "aimet_torch.experimental.propagate_output_encodings": "values that an operator only joins or moves lie on one grid by "
    "rules: sim.coverage() shows whose (docs/rules.md)",
    **dict.fromkeys(
        (
            f"{package}.quantsim_config.quantsim_config.QuantSimConfigurator"
            for package in ("aimet_common", "aimet_torch")
        ),
        "configurations are read by the simulation: QuantizationSimModel(..., config_file=...)",
    ),
    "aimet_onnx.lpbq_utils": "its steps are AIMET's internals; call set_lpbq_for_params(sim, ...)",
    "aimet_onnx.experimental.lora": "quantize the model of PEFT before its export: bitwright.torch.place_adapters and "
    "export_adapters write adapters as inputs of the ONNX model",
}

#: AIMET's own parts, which documented scripts do not call: the call that does their work -> dotted prefixes below ``bitwright``.
_CALLS: dict[str, str] = {
    "call the methods of aimet_torch and aimet_onnx, or bitwright.torch and bitwright.onnx": "aimet_common",
    "call a documented method (docs/aimet.md has the list)": "aimet_torch aimet_onnx",
    "call choose_mixed_precision(sim, ...), or bitwright.mixed_precision": (
        "aimet_common.amp aimet_torch.amp aimet_torch.mixed_precision aimet_onnx.amp aimet_onnx.mixed_precision"
    ),
    "call AutoQuant.optimize(), or bitwright.auto_quantize": "aimet_common.auto_quant aimet_torch.auto_quant",
    "call fold_all_batch_norms(model, ...), or bitwright.torch.fold_all_batch_norms": (
        "aimet_common.batch_norm_fold aimet_torch.batch_norm_fold aimet_onnx.batch_norm_fold"
    ),
    "call equalize_model(model, ...), CrossLayerScaling.scale_model or HighBiasFold.bias_fold": (
        "aimet_common.cross_layer_equalization aimet_common.meta aimet_torch.cross_layer_equalization "
        "aimet_torch.meta aimet_onnx.cross_layer_equalization aimet_onnx.meta"
    ),
    "call ModelCompressor.compress_model, or bitwright.compress": (
        "aimet_common.channel_pruner aimet_common.comp_ratio_rounder aimet_common.comp_ratio_select "
        "aimet_common.compression_algo aimet_common.cost_calculator aimet_common.curve_fit "
        "aimet_common.layer_database aimet_common.layer_selector aimet_common.pruner aimet_common.statistics_util "
        "aimet_common.svd_pruner aimet_common.winnow aimet_common.input_match_search "
        "aimet_torch.compression_factory aimet_torch.cost_calculator aimet_torch.data_subsampler aimet_torch.defs "
        "aimet_torch.layer_database aimet_torch.layer_selector"
    ),
    "the graph of a simulation is sim.graph; ConnectedGraph(model, x).ordered_ops lists operators": (
        "aimet_common.connected_graph aimet_common.graph_pattern_matcher aimet_common.graph_searcher "
        "aimet_torch.cg_utils aimet_torch.translation_mapping"
    ),
    "make a simulation, QuantizationSimModel(model, ..., config_file=...), and set its quantizers": (
        "aimet_common.quantsim_config aimet_common.quantsim aimet_torch.quantsim_config aimet_torch.quantsim "
        "aimet_onnx.quantsim_config aimet_onnx.quantsim"
    ),
    "call visualize_stats(sim, path), QuantAnalyzer.analyze, or sim.report(path)": (
        "aimet_common.bokeh_plots aimet_common.plotting_utils aimet_common.quant_analyzer aimet_torch.plots "
        "aimet_torch.plotting_utils aimet_torch.quant_analyzer aimet_torch.visualization_tools aimet_onnx.analysis"
    ),
    "call LayerOutputUtil.generate_layer_outputs": "aimet_common.layer_output_utils aimet_common.save_utils",
    "call apply_spinquant(model), or bitwright.torch.rotate_model": (
        "aimet_common.hadamard aimet_torch.spinquant aimet_torch.experimental.spinquant aimet_onnx.spinquant "
        "aimet_onnx.experimental.spinquant"
    ),
    "call apply_adaround(sim, ...)": "aimet_torch.adaround aimet_common.adaround aimet_onnx.adaround",
    "call apply_adascale(sim, data_loader, ...)": (
        "aimet_torch.adascale aimet_torch.experimental.adascale aimet_onnx.adascale aimet_onnx.experimental.adascale"
    ),
    "call sim.export(path, prefix, dummy_input) or sim.onnx.export(args, path)": (
        "aimet_common.onnx aimet_torch.onnx aimet_torch.onnx_utils aimet_torch.save_utils aimet_torch.torchscript_utils"
    ),
    "call apply_seq_mse(sim, data_loader)": "aimet_torch.seq_mse",
    "call apply_omniquant(sim, data_loader, ...)": "aimet_torch.experimental.omniquant",
    "call analyze_llm_topology(model) and configure_llm(sim, topology, ...)": (
        "aimet_onnx.llm_topology aimet_onnx.llm_configurator aimet_onnx.experimental.llm_topology"
    ),
    "call prepare_model(model); simulations need no prepared model": "aimet_torch.model_preparer",
    "call ModelValidator.validate_model(model, inputs)": "aimet_torch.model_validator",
    "values that an operator only joins or moves lie on one grid by rules (docs/rules.md)": "aimet_torch.experimental",
    "use quantization.float.FloatQuantizeDequantize": "aimet_torch.fp_quantization",
    "use the quantizers of quantization.affine and quantization.float; there is one backend": (
        "aimet_torch.quantization"
    ),
    "call the function itself: simulations see it as it is": "aimet_torch.nn",
    "use onnx_ir, or the graph of the simulation, sim.graph": "aimet_onnx.ir_utils",
}
#: dotted prefix -> the call; a name of ``names.json`` that is not here gets that of its longest prefix
INSTEAD = {prefix: call for call, prefixes in _CALLS.items() for prefix in prefixes.split()}


def absence(name: str) -> str | None:
    """Why ``name`` (dotted, below ``bitwright``) is not there, by its own entry or that of a package above it."""
    while name:
        if name in ABSENT:
            return ABSENT[name]
        name = name.rpartition(".")[0]
    return None


@dataclass(frozen=True)
class Difference:
    """A row of the table of AIMET's documented names.

    Attributes:
        package: ``"aimet_torch"`` or ``"aimet_onnx"``.
        names: calls, as Markdown.
        status: ``"same"``, or what else they are.
        difference: what is different about them here, as Markdown.
        at: name that a script reads or calls -> the difference in short.
    """

    package: str
    names: str
    status: str
    difference: str
    at: Mapping[str, str]


def differences() -> tuple[Difference, ...]:
    """Differences from AIMET 2.42: the rows of ``differences.json``."""
    rows = json.loads(Path(__file__).with_name("differences.json").read_text("utf-8"))
    return tuple(Difference(**row) for row in rows)


@functools.cache
def names() -> dict[str, tuple[str, ...]]:
    """AIMET 2.42's public modules, dotted below ``bitwright``, and the public classes and functions of each."""
    table = json.loads(Path(__file__).with_name("names.json").read_text("utf-8"))
    return {module: tuple(line.split()) for module, line in table.items()}


@functools.cache
def packages() -> frozenset[str]:
    """AIMET 2.42's public modules and the packages above them, dotted below ``bitwright``."""
    return frozenset(module.rsplit(".", depth)[0] for module in names() for depth in range(module.count(".") + 1))


def reason(name: str) -> str | None:
    """Why a name of AIMET (a module, or a name in one; dotted, below ``bitwright``) is not here, and what to call instead.

    ``None`` for what AIMET does not have either. Whether the name is here is not looked up.

    Example:
        >>> reason("aimet_torch.adaround.AdaroundWrapper")
        'it is a part of AIMET that scripts do not call; call apply_adaround(sim, ...)'
        >>> reason("aimet_torch.nonsense") is None
        True
    """
    known = absence(name)
    module, _, last = name.rpartition(".")
    if known is not None or not (name in packages() or last in names().get(module, ())):
        return known
    while name not in INSTEAD:
        name = name.rpartition(".")[0]
    return f"it is a part of AIMET that scripts do not call; {INSTEAD[name]}"


def refuse(module: str) -> NoReturn:
    """Fail the import of a module that has no counterpart.

    Raises:
        ImportError: with what to do instead.
    """
    name = module.removeprefix("bitwright.")
    raise ImportError(f"{name} has no counterpart here: {reason(name) or _LATER}", name=module)


def absent_names(module: str) -> Callable[[str], Any]:
    """A module ``__getattr__`` that says where AIMET's names went.

    It raises ImportError for names of the table (Python hides the message of an AttributeError in
    ``from module import name``) and AttributeError for all others.
    """

    def missing(name: str) -> Any:
        here = module.removeprefix("bitwright.")
        full = f"{here}.{name}"
        told = full in ABSENT or name in names().get(here, ())  # submodules refuse for themselves
        why = reason(full) if told else None
        if why is not None:
            raise ImportError(f"{full} has no counterpart here: {why}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


def absent_attribute(owner: str, name: str) -> AttributeError:
    """The error for an attribute that an object of AIMET's class ``owner`` (dotted) has and ours has not."""
    why = ABSENT.get(f"{owner}.{name}")
    kind = owner.rpartition(".")[2]
    return AttributeError(f"{kind!r} object has no attribute {name!r}" + (f": {why}" if why else ""))


class DifferenceWarning(UserWarning):
    """Something is understood, and means less or something else than in AIMET."""


def differs(what: str, here: str) -> None:
    """Warn of a difference of meaning; Python's default filter shows each place of a script once."""
    warnings.warn(f"{what}: {here}", DifferenceWarning, stacklevel=3)
