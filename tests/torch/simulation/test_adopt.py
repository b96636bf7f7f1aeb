"""Models that other tools have wrapped, programmed or left unfinished are simulated like their plain selves."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import bitwright
from bitwright.aimet_torch.model_preparer import prepare_model
from bitwright.errors import ModelError
from bitwright.torch import QuantizationSimModel
from bitwright.torch.calls.inputs import walk_modules
from bitwright.torch.simulation.quantsim import copied
from tests.support.simulations import calibrated

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def simulate(model: nn.Module, x: Tensor = X) -> QuantizationSimModel:
    return calibrated(QuantizationSimModel(model, x), [x])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def sites(sim: QuantizationSimModel) -> set[str]:
    return {name for name, site in sim.quantizers.items() if site.enabled and site.encoding is not None}


# ---------------------------------------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_compiled_modules_are_unwrapped(part: bool) -> None:
    plain, compiled = mlp(), torch.compile(mlp(), backend="eager")
    compiled(X)
    sim = simulate(nn.Sequential(compiled) if part else compiled)
    expected = simulate(nn.Sequential(plain) if part else plain)
    assert sites(sim) == sites(expected)
    assert torch.equal(sim.model(X), expected.model(X))


def test_a_module_compiled_in_its_place_is_refused_in_place_and_copied_plain() -> None:
    model = mlp()
    model[0].compile(backend="eager")
    with pytest.raises(ModelError, match=r"^0: it is compiled \(torch\.compile\).*in_place=True"):
        QuantizationSimModel(model, X, in_place=True)
    assert torch.equal(simulate(model).model(X), simulate(mlp()).model(X))


# --------------------------------------------------------------------------------- weights that are computed


def _weight_norm(layer: nn.Module) -> nn.Module:
    return torch.nn.utils.weight_norm(layer)


def _spectral_norm(layer: nn.Module) -> nn.Module:
    return torch.nn.utils.spectral_norm(layer)


def _prune(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.5)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("wrap", [_weight_norm, _spectral_norm, _prune, parametrizations.weight_norm])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_computed_weights_are_copied_and_quantized(wrap: Callable[[nn.Module], nn.Module], used: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Linear(8, 4)), nn.ReLU()).eval()
    if used:
        model(X)
    sim = simulate(model)
    assert any(name.startswith("0.") and name.endswith("weight") for name in sites(sim))
    with torch.no_grad(), sim.in_float():
        assert torch.equal(sim.model(X), model(X))
    assert not torch.equal(sim.model(X), model(X))
    assert torch.equal(copy.deepcopy(sim).model(X), sim.model(X))


# ------------------------------------------------------------------------------------------------------ lazy modules


def test_lazy_modules_get_their_parameters_from_the_example() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).eval()
    sim = simulate(model, IMAGE)
    assert {"0.weight", "3.weight"} <= sites(sim)
    assert torch.nn.parameter.is_lazy(model[0].weight), "the user's model is left alone"
    with pytest.raises(ModelError, match=r"^0\.weight: this parameter of a lazy module does not exist yet.*fails"):
        QuantizationSimModel(model, torch.randn(3))


# ----------------------------------------------------------------------------------------------------- torch.export


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layer_norm, self.group_norm = nn.LayerNorm(8), nn.GroupNorm(2, 8)
        self.embedding, self.fc = nn.Embedding(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group_norm(F.gelu(self.norm(self.conv(x))))
        x = self.layer_norm(F.adaptive_avg_pool2d(x, 2).flatten(2).transpose(1, 2))
        x = F.scaled_dot_product_attention(x, x, x) + self.embedding(torch.arange(4))
        return torch.softmax(self.fc(x.mean(1)), -1)


def test_a_program_of_torch_export_has_the_quantizers_of_its_model() -> None:
    torch.manual_seed(0)
    model = Everything().eval()
    plain, program = simulate(model, IMAGE), simulate(torch.export.export(model, (IMAGE,)).module(), IMAGE)
    for kind in ("weight", "bias", "input", "output"):
        ours, theirs = (
            [s for s in sim.quantizers.values() if s.enabled and s.role == kind] for sim in (program, plain)
        )
        assert len(ours) == len(theirs), kind
    with torch.no_grad():
        assert torch.equal(program.model(IMAGE), plain.model(IMAGE))
        assert not program._simulator.unseen
        assert torch.equal(copy.deepcopy(program).model(IMAGE), plain.model(IMAGE)), "a copy of a program is simulated"


# -------------------------------------------------------------------------------------------------------- attention


class SeparateProjections(nn.Module):
    """As WavLM calls it: weights of their own, and an empty one in the place of the joint one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        bias = torch.cat((self.q.bias, self.k.bias, self.v.bias))
        found: Tensor = F.multi_head_attention_forward(
            x, x, x, 8, 2, torch.empty([0]), bias, None, None, False, 0.0, self.out.weight, self.out.bias,
            self.training, None, False, use_separate_proj_weight=True, q_proj_weight=self.q.weight,
            k_proj_weight=self.k.weight, v_proj_weight=self.v.weight,
        )[0]  # fmt: skip
        return found


def test_attention_with_separate_projections_and_an_empty_joint_weight() -> None:
    torch.manual_seed(0)
    model = SeparateProjections().eval()
    sim = simulate(model)
    assert {"q.weight", "k.weight", "v.weight"} <= sites(sim)
    with torch.no_grad(), sim.in_float():
        torch.testing.assert_close(sim.model(X), model(X))


# ---------------------------------------------------------------------------------------------------- inference mode


def test_inference_mode_gives_the_same_bits() -> None:
    sim = simulate(mlp())
    with torch.no_grad():
        expected = sim.model(X)
    with torch.inference_mode():
        assert torch.equal(sim.model(X), expected)
        fresh = simulate(mlp())
        assert torch.equal(fresh.model(X), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda model: torch.vmap(model)(X), r"torch\.func transform.*whole batch"),
        (lambda model: torch.func.grad(lambda z: model(z).sum())(X), r"torch\.func transform.*loss\.backward"),
        (lambda model: torch.jit.trace(model, X), r"torch\.jit\.trace.*sim\.export"),
    ],
    ids=["vmap", "grad", "trace"],
)
def test_transforms_of_the_simulation_get_one_sentence(use: Callable[[nn.Module], object], message: str) -> None:
    sim = simulate(mlp())
    expected = sim.model(X)
    with pytest.raises(ModelError, match=message):
        use(sim.model)
    assert torch.equal(sim.model(X), expected)


@pytest.mark.slow
def test_compiling_the_simulation_warns_of_nothing_that_happened(caplog: pytest.LogCaptureFixture) -> None:
    sim = simulate(mlp())
    with torch.no_grad(), caplog.at_level(logging.WARNING, "bitwright"):
        assert torch.equal(torch.compile(sim.model, backend="eager")(X), sim.model(X))
    assert not caplog.records and not sim._simulator.unseen


# ------------------------------------------------------------------------------------------------------------ copying


class Tied(nn.Module):
    """Shares a weight, a buffer's memory, an empty list and a child, and refers to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.again = self.first
        self.register_buffer("table", torch.arange(8.0))
        self.view = self.table[2:4]
        self.log: list[str] = []
        self.same_log = self.log
        self.me = {"owner": [self]}

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.again(x)) * self.table


class Counted(nn.Linear):
    """Has a say in how it is copied."""

    def __deepcopy__(self, memo: dict[int, object]) -> Counted:
        new = Counted(self.in_features, self.out_features)
        memo[id(self)] = new
        return new


def test_a_copy_shares_inside_what_the_model_shares() -> None:
    model = Tied()
    model.first.register_forward_hook(lambda *_: None)
    new = copied(model)
    assert new.first is new.again and new.first is not model.first
    assert new.first.weight is new.second.weight is not model.first.weight
    assert new.log is new.same_log is not model.log
    assert new.me["owner"][0] is new
    new.table.fill_(0)
    assert new.view.tolist() == [0, 0] and model.view.tolist() == [2, 3]
    assert len(new.first._forward_hooks) == 1
    assert list(new.state_dict()) == list(model.state_dict()) == list(copy.deepcopy(model).state_dict())
    assert list(vars(new)) == list(vars(copy.deepcopy(model)))


def test_a_class_that_copies_itself_is_asked() -> None:
    model = nn.Sequential(Counted(8, 4), nn.ReLU())
    assert not torch.equal(copied(model)[0].weight, model[0].weight)


def test_models_as_deep_as_they_are_long_are_copied() -> None:
    model: nn.Module = nn.ReLU()
    for _ in range(2000):
        model = nn.Sequential(model)
    assert len(list(walk_modules(copied(model)))) == 2001


def test_a_copy_shares_storage_where_the_model_does() -> None:
    model = mlp()
    whole = torch.arange(12.0)
    model.register_buffer("whole", whole)
    model.register_buffer("part", whole[2:8].view(2, 3).t())
    model.register_buffer("again", whole)
    model.held = {"row": whole[4:]}
    model.register_buffer("marked", torch.ones(2))
    model.marked.note = "kept"
    new = copied(model)
    assert all(
        torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(new.buffers(), model.buffers(), strict=True)
    )
    assert new.again is new.whole and new.marked.note == "kept"
    with torch.no_grad():
        new.whole.zero_()
    assert not new.part.any() and not new.held["row"].any() and model.whole.any()


class Cached(nn.Module):
    """Keeps what it computed last, with its history."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), None

    def forward(self, x):
        self.kept = self.layer(x)
        return self.kept


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 4)), nn.ReLU())


def old_spectral_norm():
    return torch.nn.utils.spectral_norm(nn.Linear(4, 4))


def pruned():
    layer = nn.Linear(4, 4)
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


@pytest.mark.parametrize("make", [Cached, old_weight_norm, old_spectral_norm, pruned])
@pytest.mark.parametrize("recipe", [None, ["fold"]], ids=["default recipe", "fold"])
def test_a_module_that_keeps_a_tensor_with_a_history_is_quantized_as_it_is_simulated(make, recipe):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(2, 4)
    wanted = model(x)
    sim = calibrated(QuantizationSimModel(model, x), [x])
    result = bitwright.quantize(model, [x] * 6, recipe=recipe, progress=False)
    assert len(result.sim.quantizers) == len(sim.quantizers)
    assert torch.allclose(result.model(x), wanted, atol=0.1 * float(wanted.detach().abs().max()))
    assert torch.equal(prepare_model(model)(x), wanted)
    assert torch.equal(model(x), wanted)


def test_lazy_layers_are_made_for_the_copy_alone():
    model, x = nn.Sequential(nn.LazyLinear(4)).eval(), torch.randn(2, 4)
    result = bitwright.quantize(model, [x] * 2, recipe=["fold"], progress=False)
    assert result.sim.quantizers["0.weight"].enabled
