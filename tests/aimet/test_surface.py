"""Every name that the layer promises is there, by the object it belongs to; what has no counterpart says so."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from bitwright.aimet_common.names import ABSENT, ALIASES, INSTEAD, absence, names, reason
from bitwright.aimet_onnx import QuantizationSimModel as OnnxSim
from bitwright.aimet_torch import QuantizationSimModel as TorchSim
from tests.aimet.nets import Net, batch
from tests.aimet.onnx_nets import feeds, folded
from tests.support.processes import python

MODULES = {
    "aimet_torch.batch_norm_fold": "fold_all_batch_norms fold_given_batch_norms fold_all_batch_norms_to_scale "
    "find_standalone_batchnorm_ops find_all_batch_norms_to_fold",
    "aimet_torch.cross_layer_equalization": "equalize_model HighBiasFold CrossLayerScaling ClsSetInfo equalize_bn_folded_model",
    "aimet_torch.quantsim": "save_checkpoint load_checkpoint load_encodings_to_sim compute_encodings_for_sims QuantParams",
    "aimet_torch.quantsim.config_utils": "set_blockwise_quantization_for_weights "
    "set_grouped_blockwise_quantization_for_weights set_activation_quantizers_to_float",
    "aimet_torch.utils": "remove_all_quantizers remove_param_quantizers remove_activation_quantizers remove_input_quantizers "
    "remove_output_quantizers in_eval_mode place_model CachedDataset StopForwardException",
    "aimet_torch.quantization": "QuantizedTensor DequantizedTensor",
    "aimet_torch.quantization.affine": "Quantize QuantizeDequantize Dequantize GroupedBlockQuantizeDequantize AffineEncoding "
    "quantize dequantize quantize_dequantize",
    "aimet_torch.quantization.float": "FloatQuantizeDequantize",
    "aimet_torch.quantization.encoding_analyzer": "MinMaxEncodingAnalyzer PercentileEncodingAnalyzer SqnrEncodingAnalyzer",
    "aimet_torch.nn": "QuantizedLinear QuantizedConv2d QuantizationMixin compute_encodings compute_param_encodings",
    "aimet_torch.compress": "ModelCompressor CompressionStats",
    "aimet_torch.defs": "SpatialSvdParameters WeightSvdParameters ChannelPruningParameters GreedySelectionParameters "
    "ModuleCompRatioPair RankSelectScheme CompressionScheme CostMetric",
    "aimet_torch.gptvq.gptvq_weight": "GPTVQ",
    "aimet_torch.gptvq.defs": "GPTVQParameters",
    "aimet_torch.experimental.fptquant.fptquant_optimizer": "FPTQuant",
    "aimet_torch.experimental.fptquant.fptquant_config": "FPTQuantConfig",
    "aimet_torch.amp.mixed_precision_algo": "EvalCallbackFactory",
    "aimet_torch.amp.quantizer_groups": "",
    "aimet_torch.auto_quant": "AutoQuant AutoQuantWithAutoMixedPrecision",
    "aimet_torch.experimental.adascale.adascale_optimizer": "apply_adascale",
    "aimet_torch.experimental.spinquant.spinquant_optimizer": "apply_spinquant",
    "aimet_torch.quantsim_config.quantsim_config": "",
    "aimet_torch.v2": "quantsim nn quantization experimental visualization_tools mixed_precision",
    "aimet_torch.v2.adaround": "Adaround AdaroundParameters",
    "aimet_torch.v2.auto_quant": "AutoQuant",
    "aimet_torch.v2.experimental": "clip_weights_to_7f7f set_matmul_second_input_producer_to_8bit_symmetric",
    "aimet_torch.v2.mixed_precision": "MixedPrecisionConfigurator Precision SupportedDType choose_mixed_precision",
    "aimet_torch.v2.quantization.affine": "MinMaxQuantizer ScaleOffsetQuantizer AffineQuantizerBase",
    "aimet_common.quantsim": "encoding_version",
    "aimet_common.quantsim_config.quantsim_config": "",
    "aimet_onnx.amp.mixed_precision_algo": "",
    "aimet_onnx.amp.quantizer_groups": "",
    "aimet_onnx.utils": "ParamUtils CachedDataset disable_quantizers replace_relu6_with_relu make_dummy_input build_session",
    "aimet_onnx": "int4 int8 int16 float16 QuantizationSimModel apply_seq_mse apply_adaround analyze_per_layer_sensitivity",
    "aimet_onnx.quantsim": "encodings_to_onnx_qdq load_encodings_to_sim clamp_activation_encodings set_param_type "
    "set_lpbq_for_params set_blockwise_quantization_for_weights set_grouped_blockwise_quantization_for_weights",
}
TORCH_SIM = (
    "qmodules named_qmodules quant_wrappers quantizers named_quantizers compute_encodings load_encodings "
    "load_and_freeze_encodings save_encodings_to_json set_percentile_value exclude_layers_from_quantization "
    "exclude_param_from_quantization get_original_model fold_param_quantizers set_and_freeze_param_encodings "
    "get_supported_kernels export onnx quantizer_parameters named_quantizer_parameters quantizer_state_dict"
)
TORCH_QUANTIZER = (
    "bitwidth symmetric min max get_scale get_offset get_min get_max allow_overwrite is_overwrite_allowed enabled "
    "set_range get_encodings"
)
ONNX_SIM = (
    "qc_quantize_op_dict get_qc_quantize_op get_op_quantizers set_quantizers to_onnx_qdq from_onnx_qdq "
    "set_tensor_precision export session model get_supported_kernels set_and_freeze_param_encodings fold_param_quantizers"
)
ONNX_QUANTIZER = (
    "bitwidth set_bitwidth enabled use_symmetric_encodings use_strict_symmetric use_unsigned_symmetric "
    "set_fixed_encoding_range freeze_encodings is_encoding_frozen get_encodings load_encodings"
)


@pytest.mark.parametrize("module", MODULES)
def test_names_of_modules(module):
    found = importlib.import_module(f"bitwright.{module}")
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []


def test_names_of_simulations_and_quantizers():
    sim = TorchSim(Net().eval(), batch())
    sim.compute_encodings(lambda model, _: model(batch()), None)
    other = OnnxSim(folded(), param_type="int8", use_cuda=False, path="./")
    other.compute_encodings(feeds())
    weight = sim.model.conv1.param_quantizers["weight"]
    table = (
        (sim, TORCH_SIM),
        (weight, TORCH_QUANTIZER),
        (other, ONNX_SIM),
        (other.qc_quantize_op_dict["conv1.weight"], ONNX_QUANTIZER),
    )
    missing = [(type(o).__name__, name) for o, names in table for name in names.split() if not hasattr(o, name)]
    assert missing == []


@pytest.mark.parametrize(
    "path, home",
    [
        ("aimet_torch.v2.quantsim.config_utils", "aimet_torch.quantsim"),
        ("aimet_torch.v2.quantization.affine.backends", "aimet_torch.quantizers"),
        ("aimet_torch.v2.adaround.adaround_weight", "aimet_torch.rounding"),
        ("aimet_torch.batch_norm_fold", "aimet_torch.float_methods"),
        ("aimet_onnx.sequential_mse.seq_mse", "aimet_onnx.rounding"),
        ("aimet_torch.common.quantsim_config.utils", "aimet_common.utils"),
        ("aimet_onnx.common.defs", "aimet_common.defs"),
    ],
)
def test_a_second_path_of_a_module_has_the_names_of_its_home(path: str, home: str) -> None:
    found, wanted = (importlib.import_module(f"bitwright.{name}") for name in (path, home))
    names = [name for name in vars(wanted) if not name.startswith("_")]
    assert names and all(getattr(found, name) is getattr(wanted, name) for name in names)


@pytest.mark.parametrize("path", sorted(ALIASES))
def test_every_row_of_the_table_is_imported_and_reached_as_an_attribute(path: str) -> None:
    found = importlib.import_module(f"bitwright.{path}")
    package, _, name = f"bitwright.{path}".rpartition(".")
    assert getattr(importlib.import_module(package), name) is found
    for public in found.__all__ if ALIASES[path] else ():
        assert getattr(found, public) is getattr(importlib.import_module(f"bitwright.{ALIASES[path]}"), public)


def test_modules_are_reached_as_attributes_of_the_older_package() -> None:
    v2 = importlib.import_module("bitwright.aimet_torch.v2")
    assert v2.quantsim.QuantizationSimModel is TorchSim is v2.QuantizationSimModel
    assert v2.nn.QuantizedLinear.__name__ == "QuantizedLinear"


@pytest.mark.parametrize(
    "path", ["aimet_torch.v2.nonsense", "aimet_torch.quantsim.config_utils.nonsense", "aimet_torch.nonsense"]
)
def test_a_path_that_aimet_does_not_have_is_not_found(path: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="nonsense"):
        importlib.import_module(f"bitwright.{path}")


@pytest.mark.parametrize("name", sorted(name for name in ABSENT if name.split(".")[-2].islower()))
def test_what_is_absent_says_what_to_do_instead(name):
    module, _, last = name.rpartition(".")
    with pytest.raises(ImportError) as caught:
        found = importlib.import_module(f"bitwright.{module}")
        if not hasattr(found, last):
            importlib.import_module(f"bitwright.{name}")
    assert name in str(caught.value) and ABSENT[name] in str(caught.value)


@pytest.mark.parametrize("package", sorted({module.partition(".")[0] for module in names()}))
def test_every_public_name_is_here_or_says_what_to_call_instead(package: str) -> None:
    ours = "it is a part of AIMET that scripts do not call; "
    instead = {*ABSENT.values(), *(ours + call for call in INSTEAD.values())}
    for module in (module for module in names() if module.partition(".")[0] == package):
        for name in names()[module]:
            try:
                found = getattr(importlib.import_module(f"bitwright.{module}"), name)
            except ImportError as error:
                what, _, why = str(error).partition(" has no counterpart here: ")
                assert module.startswith(what) or what.endswith(f".{name}"), (module, name, str(error))
                assert why in instead, (module, name, str(error))
            else:
                assert found is not None, (module, name)


@pytest.mark.parametrize(
    "path", ["aimet_torch.nn.true_quant", "aimet_torch.nn.modules.custom", "aimet_torch.nn.fake_quant"]
)
def test_every_quantized_class_is_a_module_with_quantizers(path: str) -> None:
    module = importlib.import_module(f"bitwright.{path}")
    classes = [
        name for name in names()[path] if "Quantized" in name and reason(f"{path}.{name}") not in ABSENT.values()
    ]
    kinds = [getattr(module, name) for name in classes]
    mixin = importlib.import_module("bitwright.aimet_torch.nn").QuantizationMixin
    assert len(kinds) > 60
    assert [kind.__name__ for kind in kinds if not issubclass(kind, mixin)] == []


@pytest.mark.parametrize(
    "name, instead",
    [
        ("aimet_torch.v2.save_utils.SaveUtils", r"call sim.export\(path"),
        ("aimet_onnx.spinquant.passes.R1RotationPass", "call apply_spinquant"),
        ("aimet_torch.winnow.winnow_utils.ReShape", "bitwright.torch.prune_model removes channels"),
        ("aimet_torch.common.svd_pruner.SpatialSvdPruner", "call ModelCompressor.compress_model"),
    ],
)
def test_parts_of_aimet_name_the_call_that_does_their_work(name: str, instead: str) -> None:
    module, _, last = name.rpartition(".")
    with pytest.raises(ImportError, match=instead):
        getattr(importlib.import_module(f"bitwright.{module}"), last)


@pytest.mark.parametrize("name", ["aimet_onnx.mixed_precision", "aimet_torch.bn_reestimation", "aimet_onnx.quantsim"])
def test_modules_that_are_here_are_no_absent_names_of_their_package(name: str) -> None:
    package, _, last = name.rpartition(".")
    python("-c", f"from bitwright.{package} import {last}")


def test_calls_that_errors_name_exist() -> None:
    """Of the product as it is: a call that is renamed or removed is no remedy any more."""
    sim, other = TorchSim(Net().eval(), batch()), OnnxSim(folded())
    texts = "; ".join({*ABSENT.values(), *INSTEAD.values()})
    for name in set(re.findall(r"bitwright(?:\.\w+)+", texts)):
        found: Any = importlib.import_module("bitwright")
        for depth, part in enumerate(name.split(".")[1:], 2):
            if not hasattr(found, part):
                importlib.import_module(".".join(name.split(".")[:depth]))
            found = getattr(found, part)
    methods = set(re.findall(r"\bsim\.(\w+)", texts))
    assert len(methods) > 5
    assert [name for name in methods if not (hasattr(sim, name) or hasattr(other, name))] == []


def test_what_lies_below_an_absent_module_is_absent_for_the_same_reason():
    assert absence("aimet_torch.winnow.winnow_utils.ReShape") == ABSENT["aimet_torch.winnow"]
    assert absence("aimet_torch.quantsim") is None


def test_absent_methods_say_what_to_do_instead():
    import torch

    from bitwright.aimet_torch import QuantizationSimModel
    from bitwright.aimet_torch.nn import QuantizedLinear

    sim = QuantizationSimModel(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'$"):
        sim.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="no kernels to plug in"):
        QuantizedLinear(2, 2).set_kernel(None)
