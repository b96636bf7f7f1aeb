"""Calls of AIMET 2.42 as its documentation writes them: names, and arguments by position and by keyword.

A name is here with these arguments, or importing it raises an error that says what to call instead.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from bitwright.aimet_common.names import ABSENT, reason
from bitwright.aimet_onnx import QuantizationSimModel as OnnxSim
from bitwright.aimet_torch import QuantizationSimModel as TorchSim
from bitwright.aimet_torch.nn import QuantizedLinear
from bitwright.aimet_torch.quantization.affine import QuantizeDequantize
from tests.aimet.nets import Net, batch
from tests.aimet.onnx_nets import feeds, folded

#: a function or class with its arguments; those after * by keyword alone
FUNCTIONS = """
aimet_torch.QuantizationSimModel(model, dummy_input, quant_scheme, default_output_bw, default_param_bw, in_place, config_file, default_data_type)
aimet_torch.quantsim.compute_encodings_for_sims(sim_list, forward_pass_callback, forward_pass_callback_args)
aimet_torch.quantsim.load_encodings_to_sim(quant_sim_model, pytorch_encoding_path)
aimet_torch.quantsim.save_checkpoint(quant_sim_model, file_path)
aimet_torch.quantsim.load_checkpoint(file_path)
aimet_torch.quantsim.check_accumulator_overflow
aimet_torch.quantsim.config_utils.set_blockwise_quantization_for_weights(sim, arg, bitwidth, symmetric, block_size)
aimet_torch.quantsim.config_utils.set_grouped_blockwise_quantization_for_weights(sim, arg, bitwidth, symmetric, decompressed_bw, block_size, block_grouping)
aimet_torch.quantsim.config_utils.set_activation_quantizers_to_float(sim, arg, exponent_bits, mantissa_bits, dtype)
aimet_torch.onnx.export(model, args, f, *, export_int32_bias, prequantize_constants, force_activation_as)
aimet_torch.nn.compute_encodings(model)
aimet_torch.nn.compute_param_encodings(model)
aimet_torch.nn.QuantizationMixin
aimet_torch.quantization.affine.Quantize(shape, bitwidth, symmetric, encoding_analyzer, block_size)
aimet_torch.quantization.affine.QuantizeDequantize(shape, qmin, qmax, symmetric, encoding_analyzer, block_size)
aimet_torch.quantization.affine.Dequantize
aimet_torch.quantization.affine.GroupedBlockQuantizeDequantize(shape, bitwidth, symmetric, decompressed_bw, encoding_analyzer, block_size, block_grouping)
aimet_torch.quantization.affine.quantize(tensor, scale, offset, *, bitwidth, signed, block_size)
aimet_torch.quantization.affine.dequantize(tensor, scale, offset, block_size)
aimet_torch.quantization.affine.quantize_dequantize(tensor, scale, offset, *, qmin, qmax, num_steps, block_size)
aimet_torch.quantization.float.FloatQuantizeDequantize(exponent_bits, mantissa_bits, finite, unsigned_zero, dtype, shape, block_size, encoding_analyzer)
aimet_torch.quantization.QuantizedTensorBase
aimet_torch.quantization.QuantizedTensor
aimet_torch.quantization.DequantizedTensor
aimet_torch.quantization.get_backend
aimet_torch.quantization.set_backend
aimet_torch.quantization.encoding_analyzer.MinMaxEncodingAnalyzer(shape, block_size)
aimet_torch.quantization.encoding_analyzer.PercentileEncodingAnalyzer(shape, num_bins, percentile, block_size)
aimet_torch.quantization.encoding_analyzer.SqnrEncodingAnalyzer(shape, num_bins, *, asymmetric_delta_candidates, symmetric_delta_candidates, offset_candidates, max_parallelism, gamma, block_size)
aimet_torch.quantization.encoding_analyzer.TfEnhancedEncodingAnalyzer
aimet_torch.batch_norm_fold.fold_all_batch_norms(model, input_shapes, dummy_input)
aimet_torch.batch_norm_fold.fold_given_batch_norms(model, layer_pairs)
aimet_torch.batch_norm_fold.find_standalone_batchnorm_ops(connected_graph)
aimet_torch.batch_norm_fold.fold_all_batch_norms_to_scale(sim)
aimet_torch.bn_reestimation.reestimate_bn_stats(model, dataloader, num_batches, forward_fn)
aimet_torch.cross_layer_equalization.equalize_model(model, input_shapes, dummy_input)
aimet_torch.cross_layer_equalization.equalize_bn_folded_model(model, input_shapes, folded_pairs, dummy_input)
aimet_torch.cross_layer_equalization.CrossLayerScaling.scale_model(model, input_shapes, dummy_input)
aimet_torch.cross_layer_equalization.CrossLayerScaling.scale_cls_sets(cls_sets)
aimet_torch.cross_layer_equalization.HighBiasFold.bias_fold(cls_set_info_list, bn_layers)
aimet_torch.bias_correction.correct_bias(model, quant_params, num_quant_samples, data_loader, num_bias_correct_samples, conv_bn_dict, perform_only_empirical_bias_corr, layers_to_ignore)
aimet_torch.adaround.adaround_weight.Adaround.apply_adaround(model, dummy_input, params, path, filename_prefix, default_param_bw, param_bw_override_list, ignore_quant_ops_list, default_quant_scheme, default_config_file)
aimet_torch.adaround.adaround_weight.AdaroundParameters(data_loader, num_batches, default_num_iterations, default_reg_param, default_beta_range, default_warm_start, forward_fn)
aimet_torch.seq_mse.apply_seq_mse
aimet_torch.seq_mse.SeqMseParams(num_batches, num_candidates, inp_symmetry, loss_fn)
aimet_torch.adascale.apply_adascale(qsim, data_loader, forward_fn, num_iterations, checkpoint_dir, *, loss_fn)
aimet_torch.spinquant.apply_spinquant(model, *, enable_r1, enable_r2)
aimet_torch.experimental.adascale.apply_adascale(qsim, data_loader, forward_fn, num_iterations)
aimet_torch.experimental.spinquant.apply_spinquant(model, *, enable_r1, enable_r2)
aimet_torch.experimental.omniquant.apply_omniquant(quant_sim, dataloader, forward_fn, num_iterations, output_path)
aimet_torch.experimental.omniquant.update_lora_weights
aimet_torch.adascale.adascale_optimizer.AdaScaleModelConfig
aimet_torch.spinquant.spinquant_optimizer.SUPPORTED_MODULE_DICT
aimet_torch.experimental.spinquant.spinquant_optimizer.SpinQuantConfig
aimet_torch.experimental.fptquant.fptquant_optimizer.FPTQuant
aimet_torch.gptvq.gptvq_weight.GPTVQ.apply_gptvq(model, dummy_input, gptvq_params, param_encoding_path, module_names_to_exclude, block_level_module_names, file_name_prefix, config_file_path)
aimet_torch.gptvq.defs.GPTVQParameters(data_loader, forward_fn, row_axis, col_axis, rows_per_block, cols_per_block, vector_dim, vector_bw, vector_stride, index_bw, num_of_kmeans_iterations, assignment_chunk_size)
aimet_torch.experimental.transforms.transform_ops.TransformOp
aimet_torch.mixed_precision.MixedPrecisionConfigurator(sim)
aimet_torch.mixed_precision.MixedPrecisionConfigurator.set_precision(arg, activation, param)
aimet_torch.mixed_precision.MixedPrecisionConfigurator.set_model_input_precision(activation)
aimet_torch.mixed_precision.MixedPrecisionConfigurator.set_model_output_precision(activation)
aimet_torch.mixed_precision.MixedPrecisionConfigurator.apply(log_file, strict)
aimet_torch.mixed_precision.choose_mixed_precision(sim, dummy_input, candidates, eval_callback_for_phase1, eval_callback_for_phase2, allowed_accuracy_drop, results_dir, clean_start, forward_pass_callback, use_all_amp_candidates, phase2_reverse, phase1_optimize, amp_search_algo)
aimet_torch.amp.mixed_precision_algo.EvalCallbackFactory(data_loader, forward_fn)
aimet_torch.quant_analyzer.QuantAnalyzer(model, dummy_input, forward_pass_callback, eval_callback, modules_to_ignore)
aimet_torch.quant_analyzer.QuantAnalyzer.analyze(quant_scheme, default_param_bw, default_output_bw, config_file, results_dir)
aimet_torch.quant_analyzer.QuantAnalyzer.enable_per_layer_mse_loss(unlabeled_dataset_iterable, num_batches)
aimet_torch.visualization_tools.visualize_stats(sim, dummy_input, save_path)
aimet_torch.visualization_tools.visualize_advanced_stats(sim, dummy_input, save_path)
aimet_torch.visualize_model.visualize_changes_after_optimization
aimet_torch.visualize_model.visualize_weight_ranges(model, results_dir, selected_layers)
aimet_torch.visualize_model.visualize_relative_weight_ranges_to_identify_problematic_layers(model, results_dir, selected_layers)
aimet_torch.layer_output_utils.LayerOutputUtil(model, dir_path, naming_scheme, dummy_input, onnx_export_args)
aimet_torch.layer_output_utils.LayerOutputUtil.generate_layer_outputs(input_instance)
aimet_torch.layer_output_utils.NamingScheme
aimet_torch.model_preparer.prepare_model(model, modules_to_exclude, module_classes_to_exclude, concrete_args)
aimet_torch.model_preparer.prepare_pt_transformer_for_quantsim
aimet_torch.model_validator.model_validator.ModelValidator.validate_model(model, model_input)
aimet_torch.arch_checker.arch_checker.ArchChecker.check_model_arch(model, dummy_input, result_dir)
aimet_torch.peft.replace_lora_layers_with_quantizable_layers(model)
aimet_torch.peft.track_lora_meta_data(model, path, filename_prefix)
aimet_torch.peft.PeftQuantUtils
aimet_torch.peft.AdapterMetaData
aimet_torch.lora.peft_utils.freeze_base_model
aimet_torch.lora.peft_utils.freeze_base_model_param_quantizers
aimet_torch.lora.peft_utils.freeze_base_model_activation_quantizers
aimet_torch.nn.lora.QuantizedLora
aimet_torch.experimental.pgs.enable_pgs(eps, multiplier)
aimet_torch.deepspeed_utils
aimet_torch.compress.ModelCompressor.compress_model(model, eval_callback, eval_iterations, input_shape, compress_scheme, cost_metric, parameters, trainer, visualization_url)
aimet_torch.defs.SpatialSvdParameters(mode, params, multiplicity)
aimet_torch.defs.WeightSvdParameters(mode, params, multiplicity)
aimet_torch.defs.ChannelPruningParameters(data_loader, num_reconstruction_samples, allow_custom_downsample_ops, mode, params, multiplicity)
aimet_torch.defs.SpatialSvdParameters.ManualModeParams
aimet_torch.defs.WeightSvdParameters.AutoModeParams
aimet_torch.defs.GreedySelectionParameters(target_comp_ratio, num_comp_ratio_candidates, use_monotonic_fit, saved_eval_scores_dict)
aimet_torch.defs.ModuleCompRatioPair(module, comp_ratio)
aimet_torch.visualize_serialized_data.VisualizeCompression
aimet_torch.experimental.export.export
aimet_torch.experimental.c_round.use_c_round
aimet_torch.experimental.propagate_output_encodings
aimet_torch.experimental.clip_weights_to_7f7f(sim)
aimet_torch.experimental.set_matmul_second_input_producer_to_8bit_symmetric(sim)
aimet_torch.blockwise_sampler.BlockwiseSampler
aimet_torch.utils.CachedDataset
aimet_torch.utils.remove_all_quantizers(modules)
aimet_torch.utils.remove_input_quantizers(modules)
aimet_torch.utils.remove_output_quantizers(modules)
aimet_torch.utils.remove_param_quantizers(modules)
aimet_torch.utils.remove_activation_quantizers(modules)
aimet_torch.auto_quant.AutoQuant
aimet_torch.nn.transformers.models.llama.modeling_llama.QuantizedLlamaRMSNorm
aimet_common.defs.QuantScheme
aimet_common.defs.QuantizationDataType
aimet_common.defs.CallbackFunc(func, func_callback_args)
aimet_common.amp.utils.AMPSearchAlgo
aimet_common.defs.qtype
aimet_common.quantsim_config.utils.get_path_for_per_channel_config()
aimet_common.quantsim_config.utils.get_path_for_per_tensor_config()
aimet_common.quantsim_config.utils.get_path_for_target_config
aimet_onnx.QuantizationSimModel(model, *, param_type, activation_type, quant_scheme, config_file, dummy_input, user_onnx_libs, providers, path)
aimet_onnx.compute_encodings(sim)
aimet_onnx.encodings_to_onnx_qdq(model, encodings, *, prequantize_constants, force_activation_as)
aimet_onnx.QSpec
aimet_onnx.quantsim.load_encodings_to_sim(quant_sim_model, onnx_encoding_path, strict, *, allow_overwrite, disable_missing_quantizers)
aimet_onnx.quantsim.set_param_type(sim, param_type, *, op_types, nodes_to_include, nodes_to_exclude, strict)
aimet_onnx.quantsim.set_blockwise_quantization_for_weights(sim, op_types, bitwidth, symmetric, block_size, strict, nodes_to_exclude)
aimet_onnx.quantsim.set_grouped_blockwise_quantization_for_weights(sim, op_types, bitwidth, decompressed_bw, block_size, strict, nodes_to_exclude)
aimet_onnx.quantsim.set_lpbq_for_params(sim, bitwidth, block_size, *, op_types, nodes_to_exclude, nodes_to_include, strict)
aimet_onnx.quantsim.clamp_activation_encodings(quant_sim, clamp_val)
aimet_onnx.batch_norm_fold.fold_all_batch_norms_to_weight(model)
aimet_onnx.batch_norm_fold.find_all_batch_norms_to_fold(connected_graph)
aimet_onnx.cross_layer_equalization.equalize_model(model)
aimet_onnx.cross_layer_equalization.CrossLayerScaling(model)
aimet_onnx.cross_layer_equalization.HighBiasFold(model)
aimet_onnx.apply_adaround(sim, inputs, num_iterations, nodes_to_include)
aimet_onnx.apply_seq_mse(sim, inputs, num_candidates, nodes_to_exclude)
aimet_onnx.adascale.AdaScale.apply_adascale(sim, inputs, adascale_model_config, num_iterations, *, topology, loss_fn)
aimet_onnx.adascale.AdaScaleModelConfig
aimet_onnx.spinquant.apply_spinquant(model, visual_model, embedding, *, enable_r1, enable_r2, enable_r3, topology)
aimet_onnx.llm_configurator.configure_llm(sim, topology, *, kv_cache_type, backbone_weight_type, lm_head_weight_type)
aimet_onnx.llm_topology.analyze_llm_topology(model, model_type, *, ir_model)
aimet_onnx.llm_topology.LlmTopology
aimet_onnx.mixed_precision.choose_mixed_precision
aimet_onnx.mixed_precision.analyze_mixed_precision_sensitivity(sim, precisions, eval_fn, calibration_input)
aimet_onnx.mixed_precision.apply_amp(sim, sensitivity_dict, acceptance_fn)
aimet_onnx.lite_mp.flip_layers_to_higher_precision(sim, layer_sensitivity_dict, percent_to_flip, override_precision)
aimet_onnx.quant_analyzer.QuantAnalyzer
aimet_onnx.analyze_per_layer_sensitivity(sim, eval_fn, filename)
aimet_onnx.analysis.analyze_per_quantizer_sensitivity(sim, metric, group_fn)
aimet_onnx.analysis.SensitivityMetric(name, eval_fn, higher_is_worse)
aimet_onnx.analysis.make_topk_logit_psnr_metric
aimet_onnx.analysis.save_sensitivity_results
aimet_onnx.analysis.load_sensitivity_results
aimet_onnx.analysis.save_sensitivity_plot
aimet_onnx.analysis.visualize_stats(sim, save_path)
aimet_onnx.layer_output_utils.LayerOutputUtil(model, dir_path, device)
aimet_onnx.utils.make_psnr_eval_fn(fp_session, inputs, output_indices)
aimet_onnx.utils.make_dummy_input(model, dynamic_size)
aimet_onnx.utils.duplicate_shared_initializers
aimet_onnx.utils.replace_relu6_with_relu(model)
aimet_onnx.prepare_passes.fix_node_names_pass
aimet_onnx.graph_passes
aimet_onnx.experimental.lora.prepare_lora_onnx
aimet_onnx.experimental.lora.export_peft_to_onnx
aimet_onnx.experimental.lora.set_lora_bitwidth
aimet_onnx.experimental.lora.freeze_base_param_quantizers
aimet_onnx.experimental.lora.load_adapter
aimet_onnx.experimental.lora.export_for_deployment
aimet_onnx.experimental.lora.write_lora_config
""".strip().splitlines()  # noqa: E501

#: methods and attributes of objects, with arguments
TORCH_SIM = """
compute_encodings(forward_pass_callback, forward_pass_callback_args)
export(path, filename_prefix, dummy_input, onnx_export_args, propagate_encodings, export_to_torchscript, use_embedded_encodings, export_model, filename_prefix_encodings)
load_encodings(encodings, strict, partial, requires_grad, allow_overwrite)
load_and_freeze_encodings
set_and_freeze_param_encodings(encoding_path)
save_encodings_to_json(path, filename_prefix)
quantizer_state_dict()
qmodules()
named_qmodules()
quantizers()
named_quantizers()
quantizer_parameters()
named_quantizer_parameters()
quant_wrappers()
exclude_layers_from_quantization(layers_to_exclude)
exclude_param_from_quantization(param_name_to_exclude)
fold_param_quantizers()
get_original_model(model, qdq_weights)
set_percentile_value(percentile_value)
get_supported_kernels()
get_activation_param_encodings()
export_weights_to_safetensors(path, filename_prefix)
run_modules_for_traced_custom_marker
prepare_sim_for_compute_encodings(sim)
""".strip().splitlines()  # noqa: E501
ONNX_SIM = """
compute_encodings(inputs)
export(path, filename_prefix, export_model, *, export_int32_bias, encoding_version, force_activation_as)
to_onnx_qdq(*, export_int32_bias, prequantize_constants, force_activation_as)
from_onnx_qdq(model, strict)
set_and_freeze_param_encodings(encoding_path)
get_qc_quantize_op()
get_op_quantizers(op)
get_all_quantizers()
set_quantizers(quantizer_dict)
set_tensor_precision(names, precision, *, strict)
fold_param_quantizers()
remove_quantizers(model)
get_supported_kernels()
build_session
save_model_graph
session
model
qc_quantize_op_dict
param_names
activation_names
""".strip().splitlines()
TORCH_QUANTIZER = """
get_min(dtype)
get_max(dtype)
get_scale(dtype)
get_offset(dtype)
set_range
get_encodings()
from_encodings(encodings)
get_legacy_encodings()
set_legacy_encodings(encodings)
compute_encodings()
allow_overwrite(mode)
is_overwrite_allowed
is_initialized()
bitwidth
signed
symmetric
min
max
""".strip().splitlines()
QUANTIZED_MODULE = """
param_quantizers
input_quantizers
output_quantizers
from_module(module)
get_original_module()
compute_encodings()
compute_param_encodings()
fold_param_quantizers()
wrap(module_cls)
implements(module_cls)
ignore(module_cls)
ignore_unknown_modules
set_default_kernel
set_kernel
set_weight_quantizer_to_mxfp4_int8(block_size)
set_weight_quantizer_to_nvfp4_int8
""".strip().splitlines()
QC_QUANTIZE_OP = """
set_precision(precision)
set_qspec(spec)
set_bitwidth(bitwidth)
set_quant_scheme(quant_scheme)
enable_per_channel_quantization
freeze_encodings()
is_encoding_frozen()
load_encodings(encoding)
get_encodings()
set_fixed_encoding_range(fixed_range)
clip_and_recompute_encodings(clamp_val)
set_zero_point_shift
export_encodings(encoding_version)
get_stats_histogram
reset_encoding_stats()
compute_encodings()
quantize_dequantize
enabled
bitwidth
data_type
use_symmetric_encodings
use_strict_symmetric
use_unsigned_symmetric
quant_info
""".strip().splitlines()


def check_arguments(found: Any, row: str) -> None:
    """The arguments of a row are those of ``found``: those before * also by position, in this order."""
    _, _, written = row.partition("(")
    if not written.removesuffix(")"):
        return
    places, _, keywords = written.removesuffix(")").partition("*, ")
    by_place = [name for name in places.split(", ") if name]
    by_name = [name for name in keywords.split(", ") if name]
    parameters = [p for p in inspect.signature(found).parameters.values() if p.name not in ("self", "cls")]
    kinds = {p.kind for p in parameters}
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        assert positional[: len(by_place)] == by_place, (row, positional)
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        assert {p.name for p in parameters} >= set(by_name), (row, parameters)


@pytest.mark.parametrize("row", FUNCTIONS, ids=lambda row: row.partition("(")[0])
def test_documented_call(row: str) -> None:
    name = row.partition("(")[0]
    path, found = name.split("."), None
    try:
        found = importlib.import_module(f"bitwright.{path[0]}")
        for length, part in enumerate(path[1:], 2):
            if not hasattr(found, part):
                importlib.import_module("bitwright." + ".".join(path[:length]))
            found = getattr(found, part)
    except ImportError as error:
        assert (why := reason(name)) is not None and why in str(error)
        return
    check_arguments(found, row)


def objects() -> dict[str, tuple[Any, list[str], str]]:
    """What documented methods are called on -> the object, its rows and its dotted name."""
    sim = TorchSim(Net().eval(), batch())
    sim.compute_encodings(lambda model: model(batch()))
    other = OnnxSim(folded())
    other.compute_encodings(feeds())
    return {
        "simulation": (sim, TORCH_SIM, "aimet_torch.quantsim.QuantizationSimModel"),
        "quantizer": (
            sim.model.conv1.param_quantizers["weight"],
            [row for row in TORCH_QUANTIZER if "from_encodings" not in row],
            "aimet_torch.quantization.base.QuantizerBase",
        ),
        "own quantizer": (
            QuantizeDequantize((), 8, True), TORCH_QUANTIZER, "aimet_torch.quantization.base.QuantizerBase",
        ),
        "module": (QuantizedLinear(3, 4), QUANTIZED_MODULE, "aimet_torch.nn.QuantizationMixin"),
        "ONNX simulation": (other, ONNX_SIM, "aimet_onnx.quantsim.QuantizationSimModel"),
        "ONNX quantizer": (
            other.qc_quantize_op_dict["conv1.weight"], QC_QUANTIZE_OP, "aimet_onnx.qc_quantize_op.QcQuantizeOp",
        ),
    }  # fmt: skip


def test_documented_methods() -> None:
    for thing, rows, owner in objects().values():
        for row in rows:
            name = row.partition("(")[0]
            try:
                found = getattr(thing, name)
            except AttributeError as error:
                assert ABSENT.get(f"{owner}.{name}", "no row") in str(error), (owner, name)
                continue
            check_arguments(found, row)
