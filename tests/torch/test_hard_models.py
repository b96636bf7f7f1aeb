"""Models that other people wrote: each of these once broke, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ExportError, ModelError
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms


class Two(nn.Module):
    """Two linear layers, and whatever a subclass does with them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 8)


def calibrated(model: nn.Module, x: Tensor, **options: Any) -> QuantizationSimModel:
    sim = QuantizationSimModel(model.eval(), x, **options)
    sim.compute_encodings([x], progress=False)
    return sim


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class DeadRows(Two):
    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :1] > x[:1, 0]  # the first row may attend to nothing
        q = self.l(x)[None]
        return self.m(F.scaled_dot_product_attention(q, q, q, attn_mask=mask.expand(4, 4)))


def test_a_query_that_may_attend_to_nothing_gets_zeros_as_in_torch() -> None:
    model = DeadRows().eval()
    sim = calibrated(model, X, default_output_bw=16, default_param_bw=16)
    with torch.no_grad():
        want = model(X)
        assert sqnr(want.numpy(), sim.model(X).numpy()) > 45
        with sim.in_float():
            torch.testing.assert_close(sim.model(X), want)
    sim.model(X).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in sim.model.parameters())


class OutArguments(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            joined, product = torch.empty(4, 16), torch.empty(4, 8)
            torch.cat([self.l(x), self.m(x)], 1, out=joined)
            torch.mul(x, 3.0, out=product)
        return joined[:, :8] + product


def test_results_written_to_out_are_quantized_under_that_name_too() -> None:
    sim = calibrated(OutArguments(), X)
    with torch.no_grad():
        for name in ("cat.output[0]", "mul.output[0]"):
            if name in sim.quantizers:
                scale = float(sim.quantizers[name].encoding.scale)
                codes = sim.capture([name], X)[name][0] / scale
                torch.testing.assert_close(codes, codes.round())
    assert sim.verify(X).ok


class Windows(Two):
    """The same norm and the same view three times, once with a roll between them, as in a shifted-window transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.k = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for shift, layer in ((0, self.l), (1, self.m), (0, self.k)):
            normed = self.norm(x)
            x = x + layer((torch.roll(normed, shift, 0) if shift else normed).view(2, 2, 8)).view(4, 8)
        return x


def test_a_movement_with_a_quantizer_of_its_own_is_calibrated_and_saved(tmp_path: Path) -> None:
    sim = calibrated(Windows(), X)
    site = sim.quantizers["view.output[0]"]  # one grid for what comes from the norm and from the roll
    assert site.encoding is not None
    with torch.no_grad():
        codes = sim.capture(["view.output[0]"], X)["view.output[0]"][0] / float(site.encoding.scale)
        torch.testing.assert_close(codes, codes.round())
        sim.save_encodings(tmp_path / "e.json")
        fresh = QuantizationSimModel(Windows().eval(), X)
        fresh.load_encodings(tmp_path / "e.json")
        assert torch.equal(fresh.model(X), sim.model(X))
    assert sim.verify(X).ok


def test_torchscript_parts_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.ReLU())))  # noqa: TID251
    for run in (lambda: QuantizationSimModel(model, X), lambda: fold_all_batch_norms(model, dummy_input=X)):
        with pytest.raises(ModelError, match="1: it is a TorchScript module") as caught:
            run()
        assert "eager module" in caught.value.remedy
    assert model(X).shape == (4, 8)


class Mapped(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.m(torch.vmap(lambda row: torch.tanh(row @ self.l.weight))(x))


def test_layers_inside_vmap_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="matmul: it is called inside a torch.func transform") as caught:
        QuantizationSimModel(Mapped(), X)
    assert "whole batch" in caught.value.remedy
    fold_all_batch_norms(Mapped(), dummy_input=X)  # which only looks at batch norms


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Opaque(Two):
    def forward(self, x: Tensor) -> Holder:
        return Holder(self.m(self.l(x).relu()))


def test_a_result_in_which_no_tensor_is_found_is_simulated_but_not_exported(tmp_path: Path) -> None:
    sim = calibrated(Opaque(), X)
    assert sim.model(X).tensor.shape == (4, 8)
    with pytest.raises(ExportError, match="Opaque: it returns no tensor that can be found") as caught:
        sim.export(tmp_path, "m", X)
    assert "dataclasses" in caught.value.remedy


class Yielding(Two):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield self.l(x)


def test_a_generator_is_named_as_the_reason_that_nothing_ran() -> None:
    with pytest.raises(ModelError, match="its forward made no torch call") as caught:
        QuantizationSimModel(Yielding(), X)
    assert "yield" in caught.value.remedy


class Autocast(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.m(self.l(x).relu()).float()


def test_layers_that_autocast_puts_in_bfloat16_are_simulated_but_not_exported() -> None:
    sim = calibrated(Autocast(), X)
    assert torch.isfinite(sim.model(X)).all()
    with pytest.raises(ExportError, match=r"l\.output\[0\]: it is computed in bfloat16") as caught:
        sim.verify(X)
    assert "without autocast" in caught.value.remedy


class HalfInside(nn.Module):
    """A part in bfloat16 that takes the type of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Linear(8, 5)
        self.body = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU()).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.stem(x).relu().to(self.body[0].weight.dtype))
        return self.head(y.to(self.head.weight.dtype).mean((2, 3)))


def test_parts_in_bfloat16_are_exported_when_they_were_converted() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    sim = calibrated(HalfInside(), x)
    with pytest.raises(ExportError, match=r"body\.0\.weight: it is bfloat16") as caught:
        sim.verify(x)
    assert "sim.model.float()" in caught.value.remedy
    encodings = {name: site.encoding for name, site in sim.quantizers.items()}
    sim.model.float()
    assert sim.verify(x).ok
    assert encodings == {name: site.encoding for name, site in sim.quantizers.items()}
