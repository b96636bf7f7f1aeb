"""From a simulation to ONNX: captured programs, translations of our own, marks of sites on their way."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch import library as definitions

import bitwright.torch
from bitwright.compare.verify import verify_folder, verify_layers
from bitwright.core.numerics.formats import IntFormat
from bitwright.errors import ExportError
from bitwright.export.qdq.markers import ATTRIBUTE, DOMAIN, OP_TYPE
from bitwright.torch import QuantizationSimModel
from bitwright.torch.simulation import exported_program as translations
from bitwright.torch.simulation.export import _in_memory as in_memory
from bitwright.torch.simulation.exported_program import TRANSLATIONS, by_public_function, takes_registry, to_onnx
from bitwright.torch.simulation.simulate import mark
from tests.support.simulations import calibrated


def squeezed(x: Tensor) -> Tensor:
    return x.squeeze(1).unsqueeze(-1).squeeze(-1)


def all_squeezed(x: Tensor) -> Tensor:
    return x[:, None].squeeze((1, 2))


def halves(x: Tensor) -> Tensor:
    return x.half().sort(dim=1, stable=True).values.float()


def ordered(x: Tensor) -> Tensor:
    order = x.detach()[0, :, 0].argsort(stable=True, descending=True)
    return x[:, order]


def ties(x: Tensor) -> Tensor:
    keys = torch.tensor([2, 1, 2, 1, 3]) + 0 * x.detach()[0, :, 0].long()
    return x[:, keys.sort(stable=True).indices] * (keys > 1).sort(stable=True).values[:, None]


def masked(x: Tensor) -> Tensor:
    seen = (x.detach() > 0).long()
    return x * (1.0 - seen) + torch.rsub(seen, 2.5, alpha=3)


def largest(x: Tensor) -> Tensor:
    return x / x.detach().abs().amax() + x.detach().amin() - x.amax((0, -1), keepdim=True) + x.amin(1)[:, None]


def frames(x: Tensor) -> Tensor:
    y = x.transpose(1, 2)
    (batch, channels, n), step = y.shape, y.stride()
    return y.as_strided((batch, channels, n - 1, 2), (step[0], step[1], step[2], step[2])) + 0


def products(x: Tensor) -> Tensor:
    return torch.cumprod(x, 1) + torch.cumprod(x.transpose(0, 1), -1, dtype=torch.float64).float().transpose(0, 1)


def distances(x: Tensor) -> list[Tensor]:
    # of which torch computes a product; none of them is a point of x, whose distance would be a rounding error
    many = x.repeat(1, 6, 1) + torch.linspace(0.2, 1, 30)[:, None]
    near = [torch.cdist(x, x.flip(1) + 1, p=p) for p in (0.0, 1.0, 2.0, 3.0, float("inf"))]
    return [*near, torch.cdist(many, x), torch.cdist(many, x, compute_mode="donot_use_mm_for_euclid_dist")]


def determinants(x: Tensor) -> list[Tensor]:
    """Also of matrices whose determinants are too large for float32, are negative, and are zero."""
    square = torch.tanh(x[:, :4, :4]) + 2 * torch.eye(4)
    large = (1e12 * square, square[:, [1, 0, 2, 3]])
    found = [part for matrices in (square, *large) for part in torch.linalg.slogdet(matrices)]
    sign, logarithm = torch.slogdet(square * torch.arange(4)[:, None])
    return [*found, sign, logarithm.exp(), torch.det(square), torch.logdet(square)]


def solved(x: Tensor) -> list[Tensor]:
    """Also a system whose powers below the diagonal are far larger than its inverse, which holds 0, 1 and -1."""
    below = torch.tanh(x[:, :5, :5]).tril(-1) + torch.diag(torch.arange(1.0, 6.0))
    ones, right = torch.ones(70, 70), torch.cat([x.flatten(1)] * 3, 1)[:, :70, None]
    return [
        torch.linalg.solve_triangular(below, x, upper=False),
        torch.linalg.solve_triangular(below, x, upper=False, unitriangular=True),
        torch.linalg.solve_triangular(below.mT, x, upper=True),
        torch.linalg.solve_triangular(below, x[:, :, :5], upper=False, left=False),
        torch.linalg.solve_triangular(ones.tril(), right, upper=False),
        torch.linalg.solve_triangular(ones, right, upper=True, unitriangular=True),
    ]


def scattered(x: Tensor) -> list[Tensor]:
    rows = torch.tensor([0, 2, 2, 0, 1])[None, :, None].expand_as(x)
    start = x.new_full((3, 4, 6), 0.5)
    whole = torch.ones_like(x).cumsum(1).long() * 3 % 7
    return [
        y
        for reduce in ("sum", "mean", "prod", "amax", "amin")
        for kept in (True, False)
        for y in (
            start.scatter_reduce(1, rows, x, reduce, include_self=kept),
            start.long().scatter_reduce(1, rows, whole, reduce, include_self=kept) + 0.0,
        )
    ]


def slopes(x: Tensor) -> Tensor:
    return torch.nn.functional.rrelu(x, 0.1, 0.5)


def mean_cubes(x: Tensor) -> Tensor:
    return torch.nn.functional.adaptive_avg_pool3d(x.expand(2, 3, 5, 6)[None, :, :, :4], (1, 2, 3))


class Net(nn.Module):
    """A layer, and what each function makes of its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> list[Tensor]:
        made = [squeezed, all_squeezed, halves, ordered, ties, masked, largest, frames, products, slopes, mean_cubes]
        return [
            *(f(self.fc(x)) for f in made),
            *distances(self.fc(x)),
            *determinants(self.fc(x)),
            *solved(self.fc(x)),
            *scattered(self.fc(x)),
        ]


@pytest.mark.parametrize("free", [False, True])
def test_the_file_computes_what_torch_does(free: bool, tmp_path: Path) -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    sim = calibrated(QuantizationSimModel(Net().eval(), x), [x])
    sim.export(tmp_path, "m", dynamic_batch=free)
    found = ort.InferenceSession(tmp_path / "m_float.onnx").run(None, {"x": x.numpy()})
    with sim.in_float():
        for one, other in zip(found, sim.model(x), strict=True):
            torch.testing.assert_close(torch.from_numpy(one), other, rtol=1e-5, atol=1e-5)
    assert verify_folder(tmp_path).ok


class Overlapping(nn.Module):
    """Reads memory in an order that its tensor, which is expanded, does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)[:, :1].expand(-1, 4, -1).as_strided((3, 2, 6), (6, 0, 1)) + 0


def test_memory_that_a_tensor_does_not_hold_in_its_order_is_refused_with_the_line(tmp_path: Path) -> None:
    x = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(1))
    sim = calibrated(QuantizationSimModel(Overlapping().eval(), x), [x])
    with pytest.raises(ExportError, match=r"test_exported_program.py:\d+, in forward: as_strided reads memory there"):
        sim.export(tmp_path, "m")


class Calling(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(8, 8), nn.Linear(8, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


def by_numpy(x: Tensor) -> Tensor:
    return x * float(np.sum(x.detach().numpy()))


def by_array(x: Tensor) -> Tensor:
    return x * float(np.asarray(x.detach()).mean())


def each_found(x: Tensor) -> Tensor:
    return torch.stack(x[x[:, 0] > 0].split(1)).sum(0)


def eigenvectors(x: Tensor) -> Tensor:
    return torch.linalg.eigh(x.T @ x)[1]


def eigenvectors_of_drawn_rows(x: Tensor) -> Tensor:
    """Numbers that Python reads are recorded in one run, of which the program is made."""
    return eigenvectors(x[[int(i) for i in torch.multinomial(torch.ones(6), 6)]])


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (
            eigenvectors_of_drawn_rows,
            r"aten._linalg_eigh, called at test_exported_program.py:\d+, in eigenvectors\. Remedy",
        ),
        (by_numpy, r"test_exported_program.py:\d+, in \w+: a number that Python reads there"),
        (by_array, r"test_exported_program.py:\d+, in \w+: a number that Python reads there"),
        (
            eigenvectors,
            r"no operator for aten._linalg_eigh, called at test_exported_program.py:\d+, in \w+\. Remedy: compute",
        ),
    ],
)
def test_an_export_that_is_refused_names_the_line(function: Any, problem: str, tmp_path: Path) -> None:
    """What numpy computes of a tensor was a constant of the example in the file, without a word."""
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    sim = simulated(Calling(function), (x,))
    with pytest.raises(ExportError, match=problem):
        sim.export(tmp_path, "m", x)


class Drawing(nn.Module):
    """Noise that operators of the file draw, and an order of rows that is drawn while it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x).relu()
        order = [int(i) for i in torch.multinomial(torch.ones(x.shape[1]), x.shape[1])]
        return self.b(h + torch.rand_like(h)), self.b(h[:, order] + 1)


def test_places_made_of_drawn_numbers_are_not_compared_and_constants_are_those_of_the_samples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    sim = simulated(Drawing(), (x,))
    state = torch.random.get_rng_state()
    sim.export(tmp_path, "m", x)
    assert torch.equal(torch.random.get_rng_state(), state)
    report = verify_folder(tmp_path)
    assert report.ok, report
    assert list(report.idle) == ["add.input[1]"]
    assert "not comparable: add.input[1]: its values are made of random numbers" in str(report)
    assert {"add_1.output[0]", "b.output[0]"} <= {row.site for row in report.rows}


class Guarded(nn.Module):
    """Constants next to zero and one: the guard of a division, factors, parameters of no axes."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.fc, self.eps = nn.Linear(8, 8), eps
        self.factor, self.shift = nn.Parameter(torch.tensor(1.000004)), nn.Parameter(torch.tensor(3e-9))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.fc(x).relu()
        guarded = y / (y * y + self.eps).sqrt()
        return guarded, (y * 0 + self.shift) * 1e8, (x * self.factor - x) * 1e4, (x / 1.000003 - x) * 1e4


@pytest.mark.parametrize("eps", [1e-15, 1e-8, 1e-3])
def test_no_constant_is_lost(eps: float, tmp_path: Path) -> None:
    """The exporter's rules take ``+ 1e-15`` for an addition of zero: the file divided zero by zero."""
    torch.manual_seed(0)
    model, x = Guarded(eps).eval(), torch.randn(16, 8)
    sim = calibrated(QuantizationSimModel(model, x), [x])
    sim.export(tmp_path, "m", x)
    session = ort.InferenceSession(tmp_path / "m_float.onnx")
    assert [i.name for i in session.get_inputs()] == ["x"]
    for got, wanted in zip(session.run(None, {"x": x.numpy()}), model(x), strict=True):
        np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=0.05, atol=1e-6)
    assert sim.verify(x).ok


class Twins(nn.Module):
    """Two layers and two activations whose parameters have equal values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act1, self.fc2, self.act2 = nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 4), nn.PReLU()
        self.fc2.load_state_dict(self.fc1.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act2(self.fc2(self.act1(self.fc1(x))))


def test_parameters_of_equal_values_keep_their_own_encodings(tmp_path: Path) -> None:
    """The exporter merged small tensors of equal content: a 4-bit and an 8-bit weight became one."""
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    sim = QuantizationSimModel(Twins().eval(), x, config_file="default")
    sim.quantizers["fc2.weight"].spec = replace(sim.quantizers["fc2.weight"].quantizer.spec, format=IntFormat(4))
    sim.compute_encodings([x], progress=False)
    files = sim.export(tmp_path, "m", x)
    records = {r["name"]: r["bw"] for r in json.loads(files.encodings.read_text())["param_encodings"]}
    assert records.items() >= {"fc1.weight": 8, "act1.weight": 8, "fc2.weight": 4, "act2.weight": 8}.items()
    names = {i.name for i in onnx.load(tmp_path / "m_float.onnx").graph.initializer}
    assert names >= set(sim.model.state_dict())
    assert sim.verify(x).ok


class Kept(nn.Module):
    """Layers, a free batch axis, and an operator with a translation of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(torch.relu(self.conv(x)).mean((2, 3)))
        return self.fc(y), torch.sort(y, stable=True)[0]


def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=2)
    return torch.export.export(Kept().eval(), (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: batch},))


def test_the_model_is_that_of_the_public_function() -> None:
    captured = program()
    found, wanted = (ir.to_proto(make(captured)) for make in (to_onnx, by_public_function))
    assert found.graph.node and found.SerializeToString() == wanted.SerializeToString()


def test_this_version_of_torch_takes_a_registry() -> None:
    """Otherwise exports are right and take twice the time: the arguments that are looked for have changed."""
    assert takes_registry()


def test_another_implementation_is_called_by_the_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(translations, "_NEEDED", {"an argument of the future"})
    monkeypatch.setattr(translations, "by_public_function", called.append)
    assert not takes_registry()
    to_onnx(captured := program())
    assert called == [captured]


def test_translations_are_looked_up_again_where_there_are_new_operators() -> None:
    captured = program()
    to_onnx(captured)
    before = translations._registry.cache_info()
    to_onnx(captured)
    assert translations._registry.cache_info().misses == before.misses
    operators = definitions.Library("bitwright_kept", "DEF")
    operators.define("twice(Tensor x) -> Tensor")
    to_onnx(captured)
    assert translations._registry.cache_info().misses == before.misses + 1


class Marked(nn.Module):
    """A value that is marked twice and returned beside what is computed of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = mark(x.permute(0, 2, 1), "one.output[0]")
        return y, mark(y * 2, "two.output[0]")


def test_a_mark_is_an_identity_that_the_exporter_writes_with_its_name() -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(mark(x, "a"), x)
    program = torch.onnx.export(
        Marked().eval(), (x,), dynamo=True, verbose=False, custom_translation_table=TRANSLATIONS
    )
    assert program is not None
    nodes = [node for node in program.model_proto.graph.node if node.domain == DOMAIN]
    assert [node.op_type for node in nodes] == [OP_TYPE, OP_TYPE]
    assert [[a.s.decode() for a in node.attribute if a.name == ATTRIBUTE] for node in nodes] == [
        ["one.output[0]"], ["two.output[0]"],
    ]  # fmt: skip


def test_a_mark_of_a_view_is_no_alias_of_it() -> None:
    x = torch.zeros(2, 3)
    made = mark(x.t(), "a")
    made += 1
    assert not x.any() and (made == 1).all()


def test_a_mark_keeps_type_device_and_gradient_free_shape_under_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made = mark(torch.empty(2, 5, dtype=torch.float16), "a")
    assert made.shape == (2, 5) and made.dtype == torch.float16


class Permuted(nn.Module):
    """A Linear along the channels of an image, as in ConvNeXt and Swin."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 6, 3), nn.Linear(6, 5, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_a_linear_after_a_permutation_is_a_product_on_integers(tmp_path: Path, bias: bool) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    result = bitwright.torch.quantize(Permuted(bias).eval(), batches, recipe=["fold"], path=tmp_path, progress=False)
    report = result.sim.verify(batches[1])
    assert report.ok, str(report)
    kernels = {row.site: row.kernel for row in report.rows}
    assert kernels["linear.output[0]"] != "float", kernels
    model = onnx.load(tmp_path / "model.onnx")
    assert not [node for node in model.graph.node if node.domain == DOMAIN]
    named = {row.site for row in report.rows}
    assert {"conv.output[0]", "linear.output[0]"} <= named


def simulated(model: nn.Module, *batches: Any) -> QuantizationSimModel:
    model.eval()
    with torch.no_grad():
        model(*batches[0])  # it has run before
    return calibrated(QuantizationSimModel(model, batches[0]), list(batches))


def in_runtime(file: Any, *inputs: Tensor) -> np.ndarray:
    """The outputs of float kernels, which compute as the simulation does where the quantizers are in the right places."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(file), options)
    feeds = {found.name: given.numpy() for found, given in zip(session.get_inputs(), inputs, strict=True)}
    return session.run(None, feeds)[0]


class Cached(nn.Module):
    """A table that is computed once, and anew while the model is exported: with one product and one sigmoid more."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.kept = nn.Linear(8, 8), nn.Linear(8, 8), {}

    def table(self, n: int) -> Tensor:
        if n not in self.kept or torch.compiler.is_exporting():
            made = (torch.arange(2 * n, dtype=torch.float32) * 0.1)[:n].sigmoid()
            if torch.compiler.is_exporting():
                return made
            self.kept[n] = made
        return self.kept[n]

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b((h * self.table(x.shape[1])).sigmoid())


class Masked(nn.Module):
    """A mask that is only applied where something is masked, which a trace cannot tell."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.q, self.o = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        scores = self.q(x) @ x.transpose(1, 2) * 0.5
        if not bool(mask.all()):
            scores = scores + (mask[:, None].float() - 1) * 100
        return self.o(scores.softmax(-1) @ x)


class Extra(nn.Module):
    """Another call while it is traced, where no quantizer depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.b(h.nan_to_num() if torch.compiler.is_exporting() else h)


def test_quantizers_are_at_the_values_of_the_simulation_where_a_cache_is_passed_by_in_the_trace(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(16, 8),) for _ in range(3)]
    sim = simulated(Cached(), *batches)
    exported = sim.export(tmp_path, "m", batches[0])
    np.testing.assert_allclose(in_runtime(exported.qdq, *batches[1]), sim.model(*batches[1]).detach(), atol=1e-6)
    assert sim.verify(batches[1]).ok
    assert not [note for note in exported.notes if "not in the exported graph" in note]


def test_a_mask_that_an_input_decides_on_is_that_of_the_example_and_noted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randint(0, 20, (2, 5)), torch.ones(2, 5, dtype=torch.bool)) for _ in range(3)]
    sim = simulated(Masked(), *batches)
    exported = sim.export(tmp_path, "m", batches[0])
    np.testing.assert_allclose(in_runtime(exported.qdq, *batches[1]), sim.model(*batches[1]).detach(), atol=1e-5)
    (note,) = [note for note in exported.notes if note.startswith("path:")]
    assert "test_exported_program.py" in note and "in forward" in note


def test_with_a_free_axis_another_path_is_refused_and_auto_fixes_the_axis(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    sim = simulated(Cached(), (x,))
    with pytest.raises(ExportError, match=r"mul: the forward makes other calls there while it is traced"):
        sim.export(tmp_path, "m", x, dynamic_batch=True)
    exported = sim.export(tmp_path, "m", x, dynamic_batch="auto")
    assert any("the size is fixed to 16" in note and "other calls" in note for note in exported.notes)
    assert sim.verify(x).ok


def test_a_call_that_moves_no_quantizer_keeps_the_trace(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    sim = simulated(Extra(), (x,))
    exported = sim.export(tmp_path, "m", x, dynamic_batch=True)
    more = torch.randn(5, 8)
    np.testing.assert_allclose(in_runtime(exported.qdq, more), sim.model(more).detach(), atol=1e-6)


class Longer(nn.Module):
    """One layer more while it is traced, which no quantizer of the simulation stands at."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.c(self.b(h) if torch.compiler.is_compiling() else h)


def test_a_layer_that_only_the_trace_has_is_not_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(16, 8),) for _ in range(3)]
    sim = simulated(Longer(), *batches)
    exported = sim.export(tmp_path, "m", batches[0])
    np.testing.assert_allclose(in_runtime(exported.qdq, *batches[1]), sim.model(*batches[1]).detach(), atol=1e-6)
    with pytest.raises(ExportError, match=r"c: the forward makes other calls there while it is traced"):
        sim.export(tmp_path, "m", batches[0], dynamic_batch=True)


class Asserting(nn.Module):
    """Conditions on computed values that can only stop the run, in every form."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all(), "the input is not finite"
        torch._assert(x.abs().max() < 1e6, "the input is large")
        h = self.a(x).relu()
        if torch.isnan(h).any():
            raise ValueError("the layer makes NaN")
        torch._check(int((h < 0).sum()) == 0)
        return self.b(h)


def test_what_can_only_raise_is_left_out_of_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(16, 8),) for _ in range(3)]
    sim = simulated(Asserting(), *batches)
    exported = sim.export(tmp_path, "m", batches[0])
    np.testing.assert_allclose(in_runtime(exported.qdq, *batches[1]), sim.model(*batches[1]).detach(), atol=1e-6)
    assert not [note for note in exported.notes if note.startswith("path:")]


@pytest.mark.parametrize("way", ["scatter", "scatter_add"])
def test_values_that_a_scatter_leaves_unread_are_cut(way: str, tmp_path: Path) -> None:
    class Scattered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            index = torch.tensor([[0, 3], [1, 7]])
            return self.c(getattr(self.a(x), way)(1, index, self.b(x)))

    torch.manual_seed(0)
    batches = [(torch.randn(4, 8),) for _ in range(3)]
    sim = simulated(Scattered(), *batches)
    exported = sim.export(tmp_path, "m", batches[0])
    np.testing.assert_allclose(in_runtime(exported.qdq, *batches[1]), sim.model(*batches[1]).detach(), atol=1e-6)
    assert sim.verify(batches[1]).ok


def test_a_path_that_activations_decide_on_is_refused_with_its_line() -> None:
    class Halting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.fc = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            while x.abs().sum() > 1:
                x = self.fc(x) * 0.1
            return x

    ids = torch.tensor([[1, 2, 3]])
    sim = simulated(Halting(), (ids,))
    with pytest.raises(ExportError, match=r"test_exported_program\.py:\d+, in forward: a number that Python reads"):
        sim.verify(ids)


def until_it_stays(function: nn.Module, x: Tensor) -> Tensor:
    """A solver as packages have them: turns until two differ little, in functions that are not called forward."""
    for _ in range(20):
        found = torch.tanh(function(x)) * 0.3
        if (found - x).abs().max() < 1e-3:
            break
        x = found
    return x


def test_a_path_that_a_solver_decides_on_is_refused_with_the_solver_s_line_and_the_change_that_helps() -> None:
    class Implicit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return until_it_stays(self.fc, x)

    torch.manual_seed(0)
    x = torch.randn(3, 4)
    sim = simulated(Implicit(), (x,))
    line = inspect.getsourcelines(until_it_stays)[1] + 4
    with pytest.raises(ExportError) as info:
        sim.verify(x)
    assert f"test_exported_program.py:{line}, in until_it_stays: a number that Python reads" in info.value.problem
    assert "give a loop a fixed number of turns" in info.value.remedy


class Checked(nn.Module):
    """Checks on values, of which the exporter has no operator for all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, picture: Tensor) -> Tensor:
        h = self.words(ids)
        here = (ids == 3)[..., None].expand_as(h)
        torch._check_tensor_all(here.sum() == picture.numel())
        torch._assert_async((ids < 20).all())
        torch._check(bool((ids >= 0).all()))
        return self.layer(h.masked_scatter(here, picture))


def test_checks_on_values_are_left_out_of_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = (torch.tensor([[3, 3, 5, 6, 7, 8]]), torch.randn(2, 8))
    model = Checked().eval()
    sim = calibrated(QuantizationSimModel(model, batch), [batch], allow_unreached=True)
    exported = sim.export(tmp_path, "m", batch)
    np.testing.assert_allclose(in_runtime(exported.qdq, *batch), sim.model(*batch).detach(), atol=1e-6)
    assert sim.verify(batch).ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_buffer_of_another_type_that_is_cast_where_it_is_used_is_exported(dtype: torch.dtype, tmp_path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("positions", torch.randn(4, 8).to(dtype))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.positions.to(x.dtype))

    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    sim = simulated(Positions(), (x,))
    exported = sim.export(tmp_path, "m", x)
    np.testing.assert_allclose(in_runtime(exported.qdq, x), sim.model(x).detach(), atol=1e-6)
    assert sim.verify(x).ok


def test_runs_of_a_loop_that_no_output_depends_on_are_not_compared() -> None:
    class Last(nn.Module):
        """The result of the last turn of one layer is dropped; of another layer all are needed."""

        def __init__(self) -> None:
            super().__init__()
            self.step, self.read = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            made = []
            for _ in range(3):
                made.append(self.read(x))
                x = torch.relu(self.step(x))
            return torch.cat(made, -1)

    torch.manual_seed(0)
    x = torch.randn(2, 8)
    report = simulated(Last(), (x,)).verify(x)
    assert report.ok, report
    assert all(row.as_float == np.inf for row in report.outputs)


class Integrated(nn.Module):
    """Euler steps of about equal length; one line multiplies a step, which is a constant, and then a slope."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.tensor([0.0, 0.25, 0.5, 0.7501, 1.0])
        for i in range(4):
            change = self.slope(x)
            for factor in (times[i + 1] - times[i], change):
                change = factor * change
            x = x + change
        return x


def test_runs_are_paired_where_the_exporter_merges_constants_between_others() -> None:
    # Two of the four steps are equal, and all have one code: the file has seven of the eight factors.
    torch.manual_seed(0)
    batch = torch.randn(4, 8)
    sim = calibrated(QuantizationSimModel(Integrated().eval(), batch), [batch])
    report = sim.verify(batch)
    assert report.ok
    assert all(row.as_float.equal == row.as_integer.equal == 1.0 for row in report.rows)
    assert all(end.as_float >= 80 for end in report.outputs)


def test_verify_names_a_constant_that_a_file_lost() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.a(x))
            return self.b(y / torch.sqrt(y.pow(2).sum(-1, keepdim=True) + 0.1))

    torch.manual_seed(0)
    x = torch.randn(16, 8)
    result, _, kept = in_memory(simulated(Scaled(), (x,)), x, {})
    for value in result.model.graph.initializers.values():
        stored = value.const_value
        if stored is not None and stored.size == 1 and np.isclose(stored.numpy().item(), 0.1):
            value.const_value = ir.tensor(np.zeros(stored.shape, np.float32), name=value.name)
    report = verify_layers(result.model, kept.sites, kept.inputs, outputs=kept.outputs)
    (row,) = [row for row in report.rows if not row.ok]
    assert row.site == "b.input[0]"
    assert "a constant among them" in str(row.reason)
    assert "was dropped" in str(row.reason)
