"""What AIMET has and these packages do not: where it went, or what to use instead.

One table for all of it: module ``__getattr__`` functions, placeholder modules and ``bitwright migrate`` read it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

_LATER = "it is not in this version of Bitwright"

#: dotted name below ``bitwright`` (a module, or a name in one) -> what to do instead
ABSENT: dict[str, str] = {
    "aimet_torch.peft": "simulations of PEFT models leave adapters in float and the base on its grid by themselves, and need no "
    "replaced layers; a rule quantizes adapters (docs/language-model-methods.md)",
    "aimet_torch.gptvq": f"{_LATER}; bitwright.torch.apply_gptq rounds weights with error feedback",
    "aimet_torch.experimental.omniquant": f"{_LATER}; apply_reconstruction(sim, data, 'learned_clipping') learns "
    "ranges, bitwright.torch.smooth_model moves outliers into weights",
    "aimet_torch.experimental.fptquant": f"{_LATER}; bitwright.torch.rotate_model merges rotations into weights",
    "aimet_torch.experimental.c_round": "Bitwright rounds ties to even, as ONNX QuantizeLinear does",
    "aimet_torch.blockwise_sampler": "methods keep values between layers themselves: "
    "apply_reconstruction(sim, data, memory_budget=..., spill_dir=...)",
    "aimet_torch.deepspeed_utils": f"{_LATER}; simulations train under DDP and FSDP2 (docs/training-with.md)",
    "aimet_torch.visualize_serialized_data": "print the statistics that ModelCompressor.compress_model returns",
    "aimet_torch.lora": "simulations of PEFT models leave adapters in float and the base on its grid by themselves",
    "aimet_torch.winnow": "AIMET removed its public entry in 2.31; pruning is not in this version of Bitwright",
    "aimet_torch.svd": "its steps are AIMET's internals; call ModelCompressor.compress_model, or bitwright.torch.svd_model",
    "aimet_torch.channel_pruning": "its steps are AIMET's internals; call ModelCompressor.compress_model, or bitwright.compress",
    "aimet_torch.nn.transformers": "no quantized classes are needed: simulations quantize "
    "what the modules of transformers compute",
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
    "aimet_torch.seq_mse.SequentialMse": "its steps are AIMET's internals; call apply_seq_mse(sim, data_loader)",
    **dict.fromkeys(
        (
            f"aimet_torch.nn.{mixin}.{name}"
            for mixin in ("BaseQuantizationMixin", "QuantizationMixin")
            for name in ("set_default_kernel", "get_default_kernel", "set_kernel", "get_kernel")
        ),
        "there are no kernels to plug in: run the exported model in ONNX Runtime",
    ),
    "aimet_onnx.quantsim.QuantizationSimModel.save_model_graph": "print sim.coverage()",
    "aimet_onnx.qc_quantize_op.QcQuantizeOp.get_stats_histogram": f"{_LATER}; sim.health() has the ranges seen",
    "aimet_onnx.qc_quantize_op.QcQuantizeOp.set_zero_point_shift": "codes between the integers are not supported",
    "aimet_onnx.qc_quantize_op.QcQuantizeOp.get_zero_point_shift": "codes between the integers are not supported",
    **dict.fromkeys(
        (f"aimet_onnx.qc_quantize_op.{name}" for name in ("ScaleQuantizer", "LPBQScaleQuantizer")),
        "block scales in two factors (LPBQ) are asked for with quantizer.set_qspec(QSpec.lpbq(...)), or decompressed_bw",
    ),
    **dict.fromkeys(
        (
            f"aimet_torch.nn.modules.custom.{quantized}{name}"
            for quantized in ("", "Quantized")
            for name in (
                "RoiAlign",
                "NonMaxSuppression",
                "ScatterND",
                "GatherNd",
                "HadamardRotation",
                "RotaryEmbedding",
            )
        ),
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
    "aimet_onnx.llm_configurator": _LATER,
    "aimet_onnx.llm_topology": "no topology is asked for: blocks are found in the graph",
    "aimet_onnx.experimental": _LATER,
}


def absence(name: str) -> str | None:
    """Why ``name`` (dotted, below ``bitwright``) is not there, by its own entry or that of a package above it."""
    while name:
        if name in ABSENT:
            return ABSENT[name]
        name = name.rpartition(".")[0]
    return None


def refuse(module: str) -> NoReturn:
    """Fail the import of a module that has no counterpart.

    Raises:
        ImportError: with what to do instead.
    """
    name = module.removeprefix("bitwright.")
    raise ImportError(f"{name} has no counterpart here: {absence(name) or _LATER}", name=module)


def absent_names(module: str) -> Callable[[str], Any]:
    """A module ``__getattr__`` that says where AIMET's names went.

    It raises ImportError for names of the table (Python hides the message of an AttributeError in
    ``from module import name``) and AttributeError for all others.
    """

    def missing(name: str) -> Any:
        reason = ABSENT.get(f"{module.removeprefix('bitwright.')}.{name}")
        if reason is not None:
            raise ImportError(
                f"{module.removeprefix('bitwright.')}.{name} has no counterpart here: {reason}", name=module
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


def absent_attribute(owner: str, name: str) -> AttributeError:
    """The error for an attribute that an object of AIMET's class ``owner`` (dotted) has and ours has not."""
    reason = ABSENT.get(f"{owner}.{name}")
    kind = owner.rpartition(".")[2]
    return AttributeError(f"{kind!r} object has no attribute {name!r}" + (f": {reason}" if reason else ""))


class DifferenceWarning(UserWarning):
    """Something is understood, and means less or something else than in AIMET."""


def differs(what: str, here: str) -> None:
    """Warn of a difference of meaning; Python's default filter shows each place of a script once."""
    warnings.warn(f"{what}: {here}", DifferenceWarning, stacklevel=3)
