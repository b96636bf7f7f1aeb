"""What takes another path on a GPU gives what the CPU gives: every test runs on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.distributed as dist
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from bitwright.core.numerics import affine
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import parse_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel, apply_reconstruction
from bitwright.torch.quantizers.fake_quantize import fake_quantize, is_fast, make_grid
from tests.support.simulations import calibrated

pytestmark = pytest.mark.gpu

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PROVIDERS = [p for p in ("CPUExecutionProvider", "CUDAExecutionProvider") if p in ort.get_available_providers()]


class Net(nn.Module):
    """Convolution, depthwise convolution, product and norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
        self.norm, self.last = nn.LayerNorm(128), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.second(self.first(x).relu()).relu().flatten(1)))


def simulated(device: str, **options: Any) -> tuple[QuantizationSimModel, list[Tensor]]:
    torch.manual_seed(0)
    model = Net().eval()
    batches = [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    model, batches = model.to(device), [batch.to(device) for batch in batches]
    sim = calibrated(QuantizationSimModel(model, batches[0], **options), batches)
    return sim, batches


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["int8", "uint8", "int4", "uint16", "float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("shared", [PerTensor(), PerChannel(0), PerBlock(16, 1, 0)], ids=str)
def test_fake_quantization_is_the_reference_arithmetic(device, dtype, form, shared):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).mul(5).to(dtype)
    x[0, :4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf], dtype=dtype)
    fmt = parse_format(form)
    shape = {PerTensor: (), PerChannel: (4, 1), PerBlock: (4, 4)}[type(shared)]
    scale = np.random.default_rng(0).uniform(0.02, 0.3, shape).astype(np.float32)
    encoding = Encoding(fmt, scale, np.full(shape, 7 if form.startswith("uint") else 0), shared)
    grid = make_grid(encoding, tuple(x.shape), torch.device(device)) if is_fast(encoding) else None
    found = fake_quantize(x.to(device), encoding, grid)
    assert found.device.type == device and found.dtype == dtype
    expected = torch.from_numpy(affine.fake_quantize(x.float().numpy(), encoding)).to(dtype)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", ["min_max", "tf_enhanced", "percentile"])
def test_calibration_is_that_of_the_cpu_and_the_same_again(device, scheme):
    """Bounds differ by sums in another order; counts of a histogram do not depend on the order of its additions."""
    one, again, cpu = (simulated(where, quant_scheme=scheme)[0] for where in (device, device, "cpu"))
    for name, site in one.quantizers.items():
        if site.encoding is not None:
            assert site.encoding == again.quantizers[name].encoding, name
            np.testing.assert_allclose(
                site.encoding.scale, cpu.quantizers[name].encoding.scale, rtol=0.02, err_msg=name
            )


def trained(sim: QuantizationSimModel, x: Tensor, *, autocast: bool = False, learned: bool = False) -> list[float]:
    sim.model.train()
    ranges = [{"params": sim.range_parameters(), "lr": 1e-4}] if learned else []
    optimizer = torch.optim.SGD([{"params": list(sim.model.parameters()), "lr": 1e-2}, *ranges])
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            loss = (sim.model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
def test_training_steps_are_those_of_the_cpu(device, autocast, learned):
    found = []
    for where in (device, "cpu"):
        sim, batches = simulated(where, preset="w4a8")
        if learned:
            sim.learn_ranges()
        found.append(trained(sim, batches[0], autocast=autocast, learned=learned))
    np.testing.assert_allclose(found[0], found[1], rtol=0.05 if autocast else 5e-3)
    assert found[0][-1] < found[0][0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("method", "options"), [("gptq", {}), ("adaround", {"iterations": 20}), ("seq_mse", {})], ids=lambda v: str(v)[:8]
)
def test_chosen_weights_stay_on_the_device_and_on_the_grid(device, method, options):
    sim, batches = simulated(device, preset="w4a8")
    apply_reconstruction(sim, batches, method=method, progress=False, **options)
    for name, parameter in sim.model.named_parameters():
        assert parameter.device.type == device, name
    x = batches[0]
    assert torch.equal(sim.model(x), sim.model(x)) and bool(torch.isfinite(sim.model(x)).all())
    if method != "seq_mse":  # which chooses ranges
        weight = sim.model.last.weight.detach().cpu().numpy()
        on_grid = affine.fake_quantize(weight, sim.quantizers["last.weight"].encoding)
        np.testing.assert_allclose(weight, on_grid, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_on_the_device_is_exported_as_it_computes(device, tmp_path):
    sim, batches = simulated(device)
    sim.export(tmp_path, "net", batches[0])
    assert sim.verify(batches[0]).ok
    session = ort.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    (name,) = (given.name for given in session.get_inputs())
    (found,) = session.run(None, {name: batches[0].cpu().numpy()})
    wanted = sim.model(batches[0]).detach().cpu().numpy()
    assert np.square(found - wanted).mean() < 0.05 * np.square(wanted).mean()


@pytest.mark.parametrize("device", DEVICES)
def test_one_rank_of_ddp_calibrates_and_trains_as_without(device, tmp_path):
    plain, batches = simulated(device)
    expected = trained(plain, batches[0])
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        sim, _ = simulated(device)
        for name, site in sim.quantizers.items():
            assert site.encoding == plain.quantizers[name].encoding, name
        sim.model.train()
        module = nn.parallel.DistributedDataParallel(sim.model)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = (module(batches[0]) - 1).square().mean()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    finally:
        dist.destroy_process_group()
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_that_moves_takes_its_grids_along(device):
    sim, batches = simulated("cpu")
    expected = sim.model(batches[0])
    moved = copy.deepcopy(sim)
    moved.model.to(device)
    found = moved.model(batches[0].to(device))
    assert found.device.type == device
    torch.testing.assert_close(found.cpu(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_onnx_models_are_simulated_by_the_provider(provider):
    random = np.random.default_rng(0)
    x = random.normal(size=(4, 16)).astype(np.float32)
    constants = [numpy_helper.from_array(random.normal(size=(16, 8)).astype(np.float32), "w")]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="a"), helper.make_node("Relu", ["h"], ["y"], name="b")]
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, k])] for n, k in (("x", 16), ("y", 8))]
    model: onnx.ModelProto = helper.make_model(
        helper.make_graph(nodes, "g", *ends, constants), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    found = []
    for providers in (None, [provider]):
        sim = calibrated(OnnxSim(model, {"x": x}, providers=providers, threads=1), [{"x": x}])
        found.append(sim.run({"x": x})[0])
    step = sim.quantizers["b.output[0]"].encoding.scale
    np.testing.assert_allclose(found[1], found[0], atol=1.01 * float(step))
