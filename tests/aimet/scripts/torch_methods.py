"""Methods that repair a torch model, and searches for a precision."""

import json
import os

import pytest
import torch
from torch import nn

from tests.aimet.nets import Mlp, Net, Separable, batch, images


def adaround():
    from aimet_common.defs import QuantScheme
    from aimet_torch import QuantizationSimModel
    from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters
    from aimet_torch.batch_norm_fold import fold_all_batch_norms

    model, loader = Net().eval(), images()
    dummy_input = next(iter(loader))[0]
    fold_all_batch_norms(model, tuple(dummy_input.shape))
    params = AdaroundParameters(data_loader=loader, num_batches=2, default_num_iterations=20)
    ada_model = Adaround.apply_adaround(
        model,
        dummy_input,
        params,
        path="./",
        filename_prefix="adaround",
        default_param_bw=4,
        ignore_quant_ops_list=[model.relu1],
        default_quant_scheme=QuantScheme.post_training_tf_enhanced,
    )
    with open("adaround.encodings") as file:
        encodings = json.load(file)
    assert set(encodings["param_encodings"]) == {"conv1.weight", "conv2.weight", "fc.weight"}
    assert encodings["param_encodings"]["conv1.weight"][0]["bitwidth"] == 4
    sim = QuantizationSimModel(
        ada_model, dummy_input, quant_scheme=QuantScheme.post_training_tf_enhanced, default_param_bw=4
    )
    sim.set_and_freeze_param_encodings(encoding_path="./adaround.encodings")
    sim.compute_encodings(lambda m, _: [m(x) for x, _ in loader], None)
    quantizer = sim.model.conv1.param_quantizers["weight"]
    assert quantizer.bitwidth == 4 and not quantizer.is_overwrite_allowed()
    assert (quantizer(sim.model.conv1.weight) - sim.model.conv1.weight).abs().max() < 1e-5


def adaround_overrides():
    from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters

    model = Net().eval()
    params = AdaroundParameters(
        images(), 1, 10, 0.01, (20, 2), 0.2, forward_fn=lambda module, inputs: module(inputs[0])
    )
    Adaround.apply_adaround(
        model,
        next(iter(images()))[0],
        params,
        ".",
        "ada",
        param_bw_override_list=[(model.conv1, 8)],
        ignore_quant_ops_list=[model.fc],
    )
    assert len(open("ada.encodings").read())


def adascale():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.adascale import apply_adascale

    data = [torch.randn(8, 16) for _ in range(2)]
    sim = QuantizationSimModel(Mlp(), data[0], default_param_bw=4)
    apply_adascale(sim, data, num_iterations=5)
    sim.compute_encodings(lambda model: [model(x) for x in data])


def gptvq_warns():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.gptvq.defs import GPTVQParameters
    from aimet_torch.gptvq.gptvq_weight import GPTVQ

    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(32, 16, generator=generator) for _ in range(2)]
    model = Mlp().eval()
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    params = GPTVQParameters(data_loader=data, forward_fn=lambda m, x: m(x), vector_dim=2, index_bw=4)
    sim = GPTVQ.apply_gptvq(
        model, data[0], params, param_encoding_path="./", module_names_to_exclude=linears[1:], file_name_prefix="vq"
    )
    with open("vq.encodings") as file:
        assert set(json.load(file)["param_encodings"]) == {f"{linears[0]}.weight"}
    layer = sim.model.get_submodule(linears[0])
    quantizer = layer.param_quantizers["weight"]
    codes = (layer.weight / quantizer.get_scale()).round().reshape(-1, 2)
    assert len(codes.unique(dim=0)) <= 16 and not quantizer.is_overwrite_allowed()
    again = QuantizationSimModel(sim.get_original_model(sim.model), data[0])
    again.set_and_freeze_param_encodings(encoding_path="./vq.encodings")
    for each in (sim, again):
        each.compute_encodings(lambda m: [m(x) for x in data])
    torch.testing.assert_close(sim.model(data[0]), again.model(data[0]))


def auto_quant_warns():
    """AutoQuant as in the versions of AIMET that had it."""
    from aimet_common.defs import QuantScheme
    from aimet_torch.adaround.adaround_weight import AdaroundParameters
    from aimet_torch.auto_quant import AutoQuant

    model = Net().eval()
    loader = images(16)
    unlabelled = torch.utils.data.DataLoader(loader.dataset.tensors[0], batch_size=4)
    with torch.no_grad():
        labels = torch.cat([model(x).argmax(1) for x, _ in loader])

    def eval_callback(model, num_samples=None):
        with torch.no_grad():
            found = torch.cat([model(x).argmax(1) for x, _ in loader])
        return float((found == labels).float().mean())

    auto_quant = AutoQuant(
        model,
        dummy_input=next(iter(unlabelled)),
        data_loader=unlabelled,
        eval_callback=eval_callback,
        param_bw=8,
        output_bw=8,
        quant_scheme=QuantScheme.post_training_tf_enhanced,
        results_dir="./autoquant",
    )
    sim, accuracy = auto_quant.run_inference()
    assert accuracy == eval_callback(sim.model)
    auto_quant.set_quant_scheme_candidates([("min_max", "min_max")])
    auto_quant.set_adaround_params(AdaroundParameters(unlabelled, num_batches=2, default_num_iterations=20))
    best, accuracy, encodings = auto_quant.optimize(allowed_accuracy_drop=0.1)
    assert accuracy >= 0.9 and accuracy == eval_callback(best.model if hasattr(best, "model") else best)
    assert os.path.isfile(encodings)


def batch_norms_found():
    from aimet_torch.batch_norm_fold import find_all_batch_norms_to_fold, find_standalone_batchnorm_ops
    from aimet_torch.meta.connectedgraph import ConnectedGraph

    model, x = Net().eval(), torch.randn(1, 3, 12, 12)
    conv_bn, bn_conv = find_all_batch_norms_to_fold(model, (1, 3, 12, 12))
    assert conv_bn == [(model.conv1, model.bn1), (model.conv2, model.bn2)] and not bn_conv
    assert isinstance(model.bn1, nn.BatchNorm2d)  # found, not folded

    graph = ConnectedGraph(model, x)
    assert [op.type for op in graph.ordered_ops][:3] == ["Conv", "BatchNormalization", "Relu"]
    assert graph.get_op_from_module_name("conv1").get_module() is model.conv1
    assert not find_standalone_batchnorm_ops(graph)

    alone = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    (op,) = find_standalone_batchnorm_ops(ConnectedGraph(alone, x))
    assert op.get_module() is alone[1] and op.dotted_name == "1"


def bias_correction():
    from aimet_common.defs import QuantScheme
    from aimet_torch.batch_norm_fold import fold_all_batch_norms
    from aimet_torch.bias_correction import correct_bias
    from aimet_torch.quantsim import QuantParams

    model = Net().eval()
    pairs = fold_all_batch_norms(model, (1, 3, 12, 12))
    before = model.fc.bias.clone()
    params = QuantParams(
        weight_bw=4, act_bw=8, round_mode="nearest", quant_scheme=QuantScheme.post_training_tf_enhanced
    )
    correct_bias(
        model,
        params,
        num_quant_samples=8,
        data_loader=images(),
        num_bias_correct_samples=8,
        conv_bn_dict={conv: bn for conv, bn in pairs},
        perform_only_empirical_bias_corr=False,
        layers_to_ignore=[model.conv1],
    )
    assert not before.equal(model.fc.bias)


def cls_sets():
    from aimet_torch.cross_layer_equalization import ClsSetInfo, CrossLayerScaling, HighBiasFold

    model, x = Separable(), torch.randn(2, 3, 8, 8)
    before = model(x)
    factors = CrossLayerScaling.scale_cls_set_with_depthwise_layers((model.conv1, model.depthwise, model.conv3))
    assert len(factors) == 2 and torch.allclose(model(x), before, atol=1e-5)
    factor = CrossLayerScaling.scale_cls_set_with_conv_layers((model.depthwise, model.conv3))
    assert len(factor) == 6
    info = ClsSetInfo(ClsSetInfo.ClsSetLayerPairInfo(model.depthwise, model.conv3, factor, True))
    norm = torch.nn.BatchNorm2d(6)
    norm.bias.data.fill_(5.0)
    HighBiasFold.bias_fold([info], {model.depthwise: norm})
    assert torch.isfinite(model(x)).all()


def equalize():
    from aimet_torch.cross_layer_equalization import equalize_model

    model = Net().eval()
    before = model(batch())
    equalize_model(model, (1, 3, 12, 12))
    assert (model(batch()) - before).abs().max() < 0.2
    assert isinstance(model.bn1, torch.nn.Identity)


def equalize_bn_folded():
    from aimet_torch.batch_norm_fold import fold_all_batch_norms
    from aimet_torch.cross_layer_equalization import equalize_bn_folded_model

    model = Net().eval()
    folded_pairs = fold_all_batch_norms(model, [(1, 3, 12, 12)])
    before = model(batch())
    equalize_bn_folded_model(model, [(1, 3, 12, 12)], folded_pairs=list(folded_pairs))
    assert (model(batch()) - before).abs().max() < 0.2


def equalize_parts():
    from aimet_torch.batch_norm_fold import fold_all_batch_norms
    from aimet_torch.cross_layer_equalization import CrossLayerScaling, HighBiasFold

    model = Net().eval()
    folded_pairs = fold_all_batch_norms(model, (1, 3, 12, 12))
    before = model(batch())
    bn_dict = {conv: bn for conv, bn in folded_pairs}
    cls_set_info_list = CrossLayerScaling.scale_model(model, (1, 3, 12, 12))
    pair = cls_set_info_list[0].cls_pair_info_list[0]
    assert pair.layer1 is model.conv1 and pair.layer2 is model.conv2 and pair.relu_activation_between_layers
    first = pair.layer1.weight.detach().abs().amax(dim=(1, 2, 3))
    second = pair.layer2.weight.detach().abs().amax(dim=(0, 2, 3))
    assert torch.allclose(first, second, rtol=1e-3) and len(pair.scale_factor) == 8
    assert torch.allclose(model(batch()), before, atol=1e-5)
    HighBiasFold.bias_fold(cls_set_info_list, bn_dict)


def fold_given():
    from aimet_torch.batch_norm_fold import fold_given_batch_norms

    model = Net().eval()
    before = model(batch())
    fold_given_batch_norms(model, [(model.conv1, model.bn1), (model.conv2, model.bn2)])
    assert isinstance(model.bn2, torch.nn.Identity) and torch.allclose(model(batch()), before, atol=1e-5)
    with pytest.raises(RuntimeError):
        fold_given_batch_norms(model, [(model.conv1, model.relu1)])


def fold_pairs():
    from aimet_torch.batch_norm_fold import fold_all_batch_norms

    model = Net().eval()
    before, conv1, bn1 = model(batch()), model.conv1, model.bn1
    pairs = fold_all_batch_norms(model, (1, 3, 12, 12))
    assert (conv1, bn1) in pairs and len(pairs) == 2
    bn_dict = {}
    for conv_bn in pairs:
        bn_dict[conv_bn[0]] = conv_bn[1]
    assert bn_dict[model.conv1] is bn1
    assert isinstance(model.bn1, torch.nn.Identity) and torch.allclose(model(batch()), before, atol=1e-5)


def mixed_precision_automatic():
    """choose_mixed_precision: candidates, both callbacks, the Pareto list and its files."""
    from aimet_torch.amp.mixed_precision_algo import EvalCallbackFactory
    from aimet_torch.common.amp.utils import AMPSearchAlgo
    from aimet_torch.common.defs import CallbackFunc, QuantizationDataType
    from aimet_torch.mixed_precision import choose_mixed_precision
    from aimet_torch.quantsim import QuantizationSimModel

    model = Net().eval()
    loader = images(16)
    with torch.no_grad():
        labels = [model(x).argmax(1) for x, _ in loader]

    sim = QuantizationSimModel(model, next(iter(loader))[0], default_param_bw=16, default_output_bw=16)

    def forward_pass(model, _):
        with torch.no_grad():
            for x, _ in loader:
                model(x)

    def agreement(model, _):
        with torch.no_grad():
            right = [(model(x).argmax(1) == y).float().mean() for (x, _), y in zip(loader, labels, strict=True)]
        return float(sum(right) / len(right))

    sim.compute_encodings(forward_pass, None)
    kind = QuantizationDataType.int
    candidates = [((16, kind), (16, kind)), ((16, kind), (8, kind)), ((8, kind), (8, kind)), ((8, kind), (4, kind))]
    unlabelled = torch.utils.data.DataLoader(loader.dataset.tensors[0], batch_size=4)
    phase1 = EvalCallbackFactory(unlabelled, forward_fn=lambda model, x: model(x)).sqnr(8)
    pareto = choose_mixed_precision(
        sim,
        next(iter(loader))[0],
        candidates,
        phase1,
        CallbackFunc(agreement, None),
        0.1,
        "./amp",
        True,
        CallbackFunc(forward_pass, None),
        use_all_amp_candidates=True,
        amp_search_algo=AMPSearchAlgo.Interpolation,
    )
    assert pareto is None or all(len(entry) == 4 for entry in pareto)
    assert os.path.isdir("amp")
    assert agreement(sim.model, None) >= 0.9


def mixed_precision_manual():
    """MixedPrecisionConfigurator: precisions by module and by type of module."""
    from aimet_torch.mixed_precision import MixedPrecisionConfigurator
    from aimet_torch.quantsim import QuantizationSimModel

    model = Net().eval()
    sim = QuantizationSimModel(model, batch(), default_param_bw=8, default_output_bw=8)
    configurator = MixedPrecisionConfigurator(sim)
    configurator.set_precision(torch.nn.Conv2d, activation="int8", param={"weight": "int4"})
    configurator.set_precision(sim.model.fc, activation="int16", param={"weight": "int8"})
    configurator.set_precision(sim.model.relu1, activation="int8")
    configurator.set_model_input_precision("int16")
    configurator.set_model_output_precision("int16")
    with open("mmp_log.txt", "w") as log:
        configurator.apply(log_file=log, strict=False)
    assert os.path.getsize("mmp_log.txt") > 0
    configurator.set_precision(sim.model.fc, activation="int16", param={"weight": "int8"})
    configurator.apply(log_file="./again.txt", strict=False)

    sim.compute_encodings(lambda model: model(batch()))
    assert sim.model.conv2.param_quantizers["weight"].bitwidth == 4
    assert sim.model.fc.param_quantizers["weight"].bitwidth == 8
    assert sim.model.fc.output_quantizers[0].bitwidth == 16
    assert sim.model(batch()).shape == (4, 10)

    # half precision leaves no integer quantizer behind
    other = QuantizationSimModel(Net().eval(), batch())
    configurator = MixedPrecisionConfigurator(other)
    configurator.set_precision(other.model.conv1, "fp16", {"weight": "fp16"})
    configurator.apply()
    assert other.model.conv1.param_quantizers["weight"].is_float16()


def ptq_whole():
    from aimet_common.defs import QuantScheme
    from aimet_torch.batch_norm_fold import fold_all_batch_norms
    from aimet_torch.model_preparer import prepare_model
    from aimet_torch.quantsim import QuantizationSimModel

    loader = images()
    model = prepare_model(Net().eval())
    dummy_input = torch.randn(1, 3, 12, 12)
    fold_all_batch_norms(model, input_shapes=(1, 3, 12, 12))
    sim = QuantizationSimModel(
        model,
        quant_scheme=QuantScheme.post_training_tf_enhanced,
        dummy_input=dummy_input,
        default_output_bw=8,
        default_param_bw=8,
    )

    def pass_calibration_data(sim_model, args):
        with torch.no_grad():
            for image, _ in loader:
                sim_model(image)

    sim.compute_encodings(forward_pass_callback=pass_calibration_data, forward_pass_callback_args=None)
    with torch.no_grad():
        error = (sim.model(dummy_input) - model(dummy_input)).abs().max()
    assert 0 < error < 0.2
    sim.export(path=".", filename_prefix="net", dummy_input=dummy_input.cpu())


def seq_mse():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.seq_mse import apply_seq_mse

    model, loader = Net().eval(), images()
    sim = QuantizationSimModel(model, next(iter(loader))[0], default_param_bw=4)
    apply_seq_mse(sim, loader, num_candidates=5, modules_to_exclude=[model.conv1, sim.model.fc])
    assert not sim.model.conv2.param_quantizers["weight"].is_overwrite_allowed()
    assert sim.model.fc.param_quantizers["weight"].is_overwrite_allowed()
    sim.compute_encodings(lambda m: [m(x) for x, _ in loader])


def seq_mse_losses():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.seq_mse import SeqMseParams, apply_seq_mse

    model, loader = Net().eval(), images()
    found = {}
    for inp_symmetry in ("symqt", "symfp", "asym"):
        for loss_fn in ("mse", "l1", "sqnr"):
            sim = QuantizationSimModel(model, next(iter(loader))[0], default_param_bw=2)
            params = SeqMseParams(num_batches=2, num_candidates=20, inp_symmetry=inp_symmetry, loss_fn=loss_fn)
            apply_seq_mse(model, sim, loader, params)
            assert not sim.model.conv2.param_quantizers["weight"].is_overwrite_allowed()
            layers = (sim.model.conv1, sim.model.conv2, sim.model.fc)
            found[inp_symmetry, loss_fn] = torch.cat(
                [m.param_quantizers["weight"].get_scale().flatten() for m in layers]
            )
    for symmetry, loss in (("symqt", "l1"), ("symfp", "mse"), ("asym", "mse")):
        assert not torch.equal(found["symqt", "mse"], found[symmetry, loss])
    with pytest.raises(ValueError):
        SeqMseParams(num_batches=1, loss_fn="huber")


def seq_mse_older():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.v2.seq_mse import SeqMseParams, apply_seq_mse

    model, loader = Net().eval(), images()
    sim = QuantizationSimModel(model, next(iter(loader))[0], default_param_bw=4)
    params = SeqMseParams(num_batches=1, num_candidates=5, inp_symmetry="symqt", loss_fn="mse")
    apply_seq_mse(model, sim, loader, params, modules_to_exclude=[model.fc])
    assert not sim.model.conv1.param_quantizers["weight"].is_overwrite_allowed()


def spinquant_warnless():
    from aimet_torch.experimental.spinquant import apply_spinquant

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(32, 16)
            self.norm = torch.nn.RMSNorm(16)
            self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
            self.head = torch.nn.Linear(16, 32)

        def forward(self, ids):
            x = self.embed(ids)
            return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))

    model, ids = Decoder().eval(), torch.arange(8).unsqueeze(0)
    before = model(ids)
    apply_spinquant(model, enable_r1=True)
    assert torch.allclose(model(ids), before, atol=1e-4)
