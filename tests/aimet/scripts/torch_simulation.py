"""Making, calibrating, copying and training a simulation of a torch model."""

import copy
import itertools
import json

import pytest
import torch
from torch import tensor

from tests.aimet.nets import Mlp, Net, Residual, batch, images


def callback_runs_nothing():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.utils import remove_activation_quantizers

    sim = QuantizationSimModel(Net().eval(), batch(), default_param_bw=4)
    remove_activation_quantizers(sim.model)
    sim.compute_encodings(lambda model: None)
    sim.model(batch())


def compute_encodings_args():
    import aimet_torch

    sim = aimet_torch.QuantizationSimModel(Net().eval(), batch())

    def callback(model, count):
        for i, (image, _) in enumerate(images()):
            if i < count:
                model(image)

    sim.compute_encodings(callback, forward_pass_callback_args=1)
    one = sim.model.conv1.input_quantizers[0].get_max()
    sim.compute_encodings(callback, 2)
    assert sim.model.conv1.input_quantizers[0].get_max() >= one


def compute_encodings_callback_none():
    import aimet_torch
    from aimet_torch.v2.quantsim import QuantizationSimModel

    x = batch()
    sim = QuantizationSimModel(Net().eval(), x)
    seen = []

    def callback(model, args):
        seen.append(args)
        model(x)

    sim.compute_encodings(callback, None)
    assert seen == [None]
    sim.compute_encodings(lambda model: model(x))
    assert isinstance(sim, aimet_torch.QuantizationSimModel)


def compute_encodings_context():
    from aimet_torch import QuantizationSimModel
    from aimet_torch import nn as aimet_nn

    loader = images()
    sim = QuantizationSimModel(Net().eval(), next(iter(loader))[0])
    with torch.no_grad(), aimet_nn.compute_encodings(sim.model):
        for image, _ in loader:
            sim.model(image)
    inside = sim.model.relu2.output_quantizers[0].get_scale().clone()
    sim.compute_encodings(lambda model: [model(image) for image, _ in loader])
    assert torch.equal(inside, sim.model.relu2.output_quantizers[0].get_scale())


def compute_param_encodings():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.nn import compute_param_encodings

    sim = QuantizationSimModel(Net().eval(), batch())
    compute_param_encodings(sim.model)
    assert sim.model.conv1.param_quantizers["weight"].is_initialized()
    assert not sim.model.conv1.input_quantizers[0].is_initialized()
    with pytest.raises(RuntimeError):
        sim.model(batch())


def config_files():
    from aimet_common.quantsim_config.utils import get_path_for_per_channel_config, get_path_for_per_tensor_config
    from aimet_torch import QuantizationSimModel
    from aimet_torch.common.quantsim_config.config_utils import get_path_for_target_config

    for path, count in ((get_path_for_per_channel_config(), 8), (get_path_for_per_tensor_config(), 1)):
        sim = QuantizationSimModel(Net().eval(), batch(), config_file=path)
        sim.compute_encodings(lambda model: model(batch()))
        assert sim.model.conv1.param_quantizers["weight"].get_scale().numel() == count
    QuantizationSimModel(Net().eval(), batch(), config_file=get_path_for_target_config("htp_quantsim_config_v73"))
    with open(get_path_for_per_channel_config()) as file:
        config = json.load(file)
    config["model_output"] = {"is_output_quantized": "True"}
    with open("config.json", "w") as file:
        json.dump(config, file)
    QuantizationSimModel(Net().eval(), batch(), config_file="config.json")


def config_utils():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.quantsim.config_utils import (
        set_activation_quantizers_to_float,
        set_blockwise_quantization_for_weights,
    )

    x = torch.randn(4, 16)
    sim = QuantizationSimModel(Mlp(), x)
    set_blockwise_quantization_for_weights(sim, [torch.nn.Linear], bitwidth=4, symmetric=True, block_size=8)
    set_activation_quantizers_to_float(sim, lambda module: module is sim.model.act, dtype=torch.float16)
    sim.compute_encodings(lambda model: model(x))
    assert sim.model.fc1.param_quantizers["weight"].get_scale().shape == (32, 2)
    assert sim.model.act.output_quantizers[0].is_float16()


def copies():
    from aimet_torch import QuantizationSimModel

    model, x = Net().eval(), batch()
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings(lambda m: m(x))
    own = {name for name in sim.model.state_dict() if "_quantizers." not in name}
    assert own == model.state_dict().keys()
    twin = copy.deepcopy(sim.model)
    twin.conv1.param_quantizers["weight"].bitwidth = 2
    assert sim.model.conv1.param_quantizers["weight"].bitwidth == 8
    assert torch.equal(twin.conv1.weight, sim.model.conv1.weight) and not torch.equal(twin(x), sim.model(x))


def errors_are_pythons():
    from aimet_torch import QuantizationSimModel

    sim = QuantizationSimModel(Net().eval(), batch())
    with pytest.raises(RuntimeError):
        sim.model(batch())
    with pytest.raises(ValueError):
        QuantizationSimModel(Net(), batch(), default_param_bw=1)
    with pytest.raises(RuntimeError):
        QuantizationSimModel.get_original_model(Net())


def exclude_layers():
    from aimet_torch import QuantizationSimModel

    sim = QuantizationSimModel(Net().eval(), batch())
    sim.exclude_layers_from_quantization([sim.model.conv1, sim.model.fc])
    assert sim.model.conv1.param_quantizers["weight"] is None and sim.model.fc.output_quantizers[0] is None
    assert sim.model.conv2.param_quantizers["weight"] is not None
    sim.exclude_param_from_quantization("weight")
    assert sim.model.conv2.param_quantizers["weight"] is None
    sim.compute_encodings(lambda model: model(batch()))


def fold_param_quantizers():
    from aimet_torch import QuantizationSimModel

    x = batch()
    sim = QuantizationSimModel(Net().eval(), x, default_param_bw=4)
    sim.compute_encodings(lambda m: m(x))
    weight = sim.model.fc.param_quantizers["weight"](sim.model.fc.weight).clone()
    sim.fold_param_quantizers()
    assert sim.model.fc.param_quantizers["weight"] is None and torch.equal(sim.model.fc.weight, weight)
    sim.model(x)


def helpers():
    from aimet_common.utils import AimetLogger, Handle
    from aimet_torch import utils

    model = Net()
    AimetLogger.get_area_logger(AimetLogger.LogAreas.Quant).debug("nothing")
    assert utils.get_layer_name(model, model.conv1) == "conv1"
    assert utils.get_module_to_name_dict(model)[model.fc] == "fc" and not utils.is_model_on_gpu(model)
    assert utils.is_leaf_module(model.fc) and utils.get_device(model) == torch.device("cpu")
    with utils.in_eval_mode(model):
        assert not model.training and not model.fc.training
    assert model.training
    assert utils.create_rand_tensors_given_shapes((1, 2), torch.device("cpu"))[0].shape == (1, 2)
    utils.replace_modules(model, lambda m: isinstance(m, torch.nn.ReLU), lambda m: torch.nn.ReLU6())
    assert isinstance(model.relu1, torch.nn.ReLU6)
    utils.default_forward_fn(model.eval(), [batch(), torch.zeros(4)])
    done = []
    with Handle(lambda: done.append(1)):
        pass
    assert done == [1]


def older_constructor():
    """Keywords of the constructor that scripts for older versions write."""
    from aimet_torch.common.defs import QuantScheme
    from aimet_torch.quantsim import QuantizationSimModel

    sim = QuantizationSimModel(
        Net().eval(),
        dummy_input=batch(),
        quant_scheme=QuantScheme.post_training_tf_enhanced,
        rounding_mode="nearest",
        default_output_bw=8,
        default_param_bw=8,
        in_place=False,
    )
    sim.compute_encodings(lambda model, _: model(batch()), None)
    try:
        QuantizationSimModel(Net().eval(), batch(), rounding_mode="stochastic")
    except ValueError as error:
        assert "nearest" in str(error)
    else:
        raise AssertionError("stochastic rounding was accepted")


def older_paths():
    from aimet_common.defs import CallbackFunc as Callback
    from aimet_common.utils import CallbackFunc
    from aimet_torch.amp.mixed_precision_algo import EvalCallbackFactory
    from aimet_torch.mixed_precision import EvalCallbackFactory as Factory
    from aimet_torch.quantization.affine import AffineEncoding

    assert CallbackFunc is Callback and EvalCallbackFactory is Factory
    assert AffineEncoding(tensor(0.1), tensor(0.0), 8).zero_point_shift == 0.0


def original_model():
    from aimet_torch import QuantizationSimModel

    model, x = Net().eval(), batch()
    sim = QuantizationSimModel(model, x, default_param_bw=4)
    sim.compute_encodings(lambda m: m(x))
    original = sim.get_original_model(sim.model)
    assert torch.equal(original(x), model(x)) and not hasattr(original.conv1, "param_quantizers")
    rounded = QuantizationSimModel.get_original_model(sim.model, qdq_weights=True)
    assert torch.equal(rounded.conv1.weight, sim.model.conv1.param_quantizers["weight"](sim.model.conv1.weight))
    assert sim.model.conv1.param_quantizers["weight"] is not None


def percentile():
    from aimet_common.defs import QuantScheme
    from aimet_torch import QuantizationSimModel

    sim = QuantizationSimModel(Net().eval(), batch(), quant_scheme=QuantScheme.post_training_percentile)
    sim.compute_encodings(lambda model: model(batch()))
    widest = sim.model.relu2.output_quantizers[0].get_max()
    sim.set_percentile_value(99)
    sim.compute_encodings(lambda model: model(batch()))
    assert sim.model.relu2.output_quantizers[0].get_max() < widest


def qat():
    from aimet_torch import QuantizationSimModel

    loader = images()
    sim = QuantizationSimModel(Net().eval(), next(iter(loader))[0])
    sim.compute_encodings(lambda model: [model(x) for x, _ in loader])
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        for image, label in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(sim.model(image), label)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert losses[-1] < losses[0]


def quant_schemes():
    from aimet_common.defs import QuantizationDataType, QuantScheme
    from aimet_torch import QuantizationSimModel

    for scheme in (*QuantScheme, "tf", "tf_enhanced", "percentile"):
        sim = QuantizationSimModel(
            Net().eval(), batch(), quant_scheme=scheme, default_data_type=QuantizationDataType.int
        )
        sim.compute_encodings(lambda model: model(batch()))
    assert QuantScheme.from_str("tf") is QuantScheme.min_max is QuantScheme.post_training_tf
    with pytest.raises(ValueError):
        QuantizationSimModel(Net(), batch(), quant_scheme="unknown")


def range_learning_warns():
    """Quantization-aware training with learned ranges, new statistics of batch norms, and folding into scales."""
    from aimet_torch.batch_norm_fold import fold_all_batch_norms_to_scale
    from aimet_torch.bn_reestimation import reestimate_bn_stats
    from aimet_torch.common.defs import QuantScheme
    from aimet_torch.quantsim import QuantizationSimModel

    torch.manual_seed(0)
    loader = images(16)
    sim = QuantizationSimModel(
        Net().eval(),
        next(iter(loader))[0],
        quant_scheme=QuantScheme.training_range_learning_with_tf_init,
        default_param_bw=4,
        default_output_bw=8,
    )
    sim.compute_encodings(lambda model, _: [model(x) for x, _ in loader], None)
    before = sim.model.conv1.param_quantizers["weight"].get_scale().detach().clone()

    sim.model.train()
    parameters = list({id(p): p for p in itertools.chain(sim.model.parameters(), sim.quantizer_parameters())}.values())
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    losses = []
    for _ in range(6):
        for image, label in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(sim.model(image), label)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not torch.equal(sim.model.conv1.param_quantizers["weight"].get_scale().detach(), before)

    sim.model.eval()
    mean = sim.model.bn1.running_mean.clone()
    handle = reestimate_bn_stats(sim.model, loader, num_batches=2, forward_fn=lambda model, batch: model(batch[0]))
    assert not torch.equal(sim.model.bn1.running_mean, mean)
    handle.remove()
    assert torch.equal(sim.model.bn1.running_mean, mean)
    reestimate_bn_stats(sim.model, loader, num_batches=2, forward_fn=lambda model, batch: model(batch[0]))

    fold_all_batch_norms_to_scale(sim)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in sim.model.modules())


def remove_quantizers():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.utils import remove_all_quantizers, remove_param_quantizers
    from aimet_torch.v2.utils import remove_activation_quantizers, remove_output_quantizers

    model, x = Net().eval(), batch()
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings(lambda m: m(x))
    quantized = sim.model(x)
    with remove_all_quantizers(sim.model):
        assert torch.allclose(sim.model(x), model(x), atol=1e-6)
    assert torch.equal(sim.model(x), quantized)
    with remove_activation_quantizers([sim.model.conv1, sim.model.relu1]):
        assert sim.model.conv1.input_quantizers[0] is None and sim.model.fc.output_quantizers[0] is not None
    with remove_param_quantizers(sim.model), remove_output_quantizers(sim.model):
        assert sim.model.conv1.param_quantizers["weight"] is None
        assert sim.model.conv1.input_quantizers[0] is not None


def several_sims():
    from aimet_torch import QuantizationSimModel
    from aimet_torch.quantsim import compute_encodings_for_sims

    x = torch.randn(2, 3, 8, 8)
    sims = [QuantizationSimModel(Residual(), x), QuantizationSimModel(Residual(), x)]

    def callback(models, args):
        for model in models:
            model(args)

    compute_encodings_for_sims(sims, callback, x)
    assert all(sim.model.conv1.input_quantizers[0].is_initialized() for sim in sims)
