"""GPTVQ: codebooks of vectors on the weight's own grid, in both front ends and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import bitwright.onnx as onnx_front
import bitwright.torch as torch_front
from bitwright.core.numerics.serialize import encoding_from_json, encoding_to_json
from bitwright.errors import ConfigError, EncodingsError
from bitwright.methods.rounding.gptq import inverse_factor, quadratic_error
from bitwright.methods.rounding.gptvq import (
    Matrix,
    choose_vectors,
    fitted_book,
    moved_book,
    nearest_vectors,
    stored_by_vectors,
)
from tests.conformance.test_reconstruct import exported
from tests.support.simulations import calibrated

VECTORS = {"vector": 2, "entries": 16}


def problem(inputs: int = 24, outputs: int = 20, size: int = 2) -> Matrix:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    w = torch.randn(outputs, inputs, generator=generator)
    hessian = (x.T @ x).double()
    scale = (w.abs().amax(1, keepdim=True) / 127).expand(w.shape)
    return Matrix(w, scale, hessian, inverse_factor(hessian[None], 0.01)[0].float(), (-128.0, 127.0), size)


def test_a_codebook_of_as_many_entries_as_points_is_the_points():
    points = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    found = fitted_book(points, torch.ones_like(points), 7, torch.Generator().manual_seed(1))
    assert torch.equal(found.sort(0).values, points.sort(0).values)


def test_the_weights_of_points_draw_entries():
    points, weights = torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0], [1.0]])
    assert fitted_book(points, weights, 1, torch.Generator().manual_seed(0)).item() == pytest.approx(0.25)


def test_vectors_of_one_weight_are_gptq_on_the_codebook():
    """Columns one after the other, each error handed on: the recursion of GPTQ written out."""
    matrix = problem(size=1)
    book = torch.linspace(-120, 120, 9)[:, None].round()
    w = matrix.target.clone()
    expected = torch.empty_like(w)
    for k in range(w.shape[1]):
        ratio = w[:, k] / matrix.scale[:, k]
        expected[:, k] = book[:, 0][(ratio[:, None] - book[:, 0]).abs().argmin(1)] * matrix.scale[:, k]
        w[:, k:] -= ((w[:, k] - expected[:, k]) / matrix.upper[k, k])[:, None] * matrix.upper[k, k:]
    torch.testing.assert_close(matrix.weight(book, choose_vectors(matrix, book)), expected)


def test_feedback_beats_the_nearest_vectors_and_moved_entries_are_the_least_squares():
    matrix = problem()
    book = fitted_book(
        matrix.vectors(matrix.target / matrix.scale), torch.ones(240, 2), 16, torch.Generator().manual_seed(0)
    )
    near, index = matrix.weight(book, nearest_vectors(matrix, book)), choose_vectors(matrix, book)
    chosen = matrix.weight(book, index)
    assert (chosen - matrix.target).square().sum() > (near - matrix.target).square().sum()
    assert matrix.error(chosen) < 0.9 * matrix.error(near)
    moved = moved_book(matrix, book, index)
    least = matrix.error(matrix.weight(moved, index))
    assert least < matrix.error(chosen)
    for entry in (0, 7):  # no entry moved by itself gains
        for step in (-0.5, 0.5):
            other = moved.clone()
            other[entry, 1] += step
            assert matrix.error(matrix.weight(other, index)) >= least * (1 - 1e-6)


def test_the_weights_are_codes_of_the_grid_and_never_worse_than_k_means():
    matrix = problem()
    weight, after, before = stored_by_vectors(matrix, 16, 2, torch.Generator().manual_seed(0))
    codes = (weight / matrix.scale).reshape(-1, 2)
    assert torch.allclose(codes, codes.round(), atol=1e-3) and len(codes.round().unique(dim=0)) <= 16
    assert after < before
    plain = stored_by_vectors(matrix, 16, 0, torch.Generator().manual_seed(0))
    assert plain[2] == before and after < plain[1] <= before  # no round: k-means and nearest vectors
    assert after == pytest.approx(float(quadratic_error((weight - matrix.target)[None], matrix.hessian[None]).sum()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(30, 40), nn.Linear(40, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list((torch.randn(256, 30, generator=generator) @ torch.randn(30, 30, generator=generator)).split(64))


def test_a_module_is_stored_by_vectors_and_its_file_looks_them_up(tmp_path: Path):
    model = Net().eval()
    sim = torch_front.QuantizationSimModel(model, batches()[0], preset="w8")
    report = torch_front.apply_reconstruction(sim, batches(), "gptvq", progress=False, **VECTORS)
    assert all(layer.after < layer.before for layer in report)
    assert "16 vectors of 2: 2.00 bits a weight" in str(report)
    held = {name: site.encoding.vectors for name, site in sim.quantizers.items() if site.role == "weight"}
    assert set(held.values()) == {(2, -1)}
    sim.compute_encodings(progress=False)
    made = sim.export(tmp_path, "model", batches()[0])
    graph = onnx.load(made.qdq).graph
    tables = [tensor for tensor in graph.initializer if tensor.name.endswith("_table")]
    assert len(tables) == 2 and all(tuple(tensor.dims) == (16, 2) for tensor in tables)
    report = sim.verify(batches()[0])
    assert report.ok, str(report)


def test_a_file_is_stored_by_vectors_along_its_inputs(tmp_path: Path):
    proto = exported(Net().eval(), batches()[0][:, None])  # products with weights [inputs, outputs]
    given = [{"x": batch[:, None].numpy()} for batch in batches()]
    sim = onnx_front.QuantizationSimModel(proto, given[0], preset="w8")
    report = onnx_front.apply_reconstruction(sim, given, "gptvq", progress=False, **VECTORS)
    assert all(layer.after < layer.before for layer in report)
    held = {site.encoding.vectors for site in sim.quantizers.values() if site.role == "weight"}
    assert held == {(2, -2)}
    sim.compute_encodings(progress=False)
    made = sim.export(tmp_path, "model")
    stored = [tensor for tensor in onnx.load(made.qdq).graph.initializer if tensor.name.endswith("_table")]
    assert len(stored) == 2
    assert sim.verify(given[0]).ok


def test_without_rounds_weights_count_by_their_sensitivity():
    """Two groups of columns with weights of their own; inputs of the second are a hundred times as large."""
    w = torch.cat((torch.randn(40, 12), 30 + torch.randn(40, 12)), 1)
    felt = torch.cat((torch.full((12,), 1e-4), torch.ones(12)))
    hessian = torch.diag(felt).double()
    matrix = Matrix(w, torch.ones_like(w), hessian, inverse_factor(hessian[None], 0.01)[0].float(), (-128.0, 127.0), 1)
    weight, after, before = stored_by_vectors(matrix, 4, 0, torch.Generator().manual_seed(0))
    assert after < 0.7 * before
    near = (weight - w).square().mean(0)
    assert near[12:].mean() < 0.7 * near[:12].mean()


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 12, 3), nn.Linear(12 * 36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)).flatten(1))


@pytest.mark.parametrize("bits, rounds", [(1, 3), (3, 0), (6, 3)])
def test_codebook_weights_are_indices_that_a_gather_looks_up(bits: int, rounds: int, tmp_path: Path):
    pictures = list(torch.randn(96, 3, 8, 8, generator=torch.Generator().manual_seed(1)).split(32))
    sim = torch_front.QuantizationSimModel(Pictures().eval(), pictures[0], preset="w8")
    report = torch_front.apply_reconstruction(
        sim, pictures, "codebook", bits=bits, rounds=rounds, progress=False, num_samples=64
    )
    assert f"{2**bits} numbers: {bits}.00 bits a weight" in str(report)
    assert all(layer.after <= layer.before for layer in report)
    sim.compute_encodings(progress=False)
    made = sim.export(tmp_path, "model", pictures[2])
    graph = onnx.load(made.qdq).graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    lookups = [node for node in graph.node if node.op_type == "Gather"]
    assert len(lookups) == 2 and not [node for node in graph.node if node.op_type == "DequantizeLinear"]
    stored = onnx.TensorProto.UINT4 if bits <= 4 else onnx.TensorProto.UINT8
    casts = {node.output[0]: held[node.input[0]].data_type for node in graph.node if node.op_type == "Cast"}
    for node in lookups:
        assert held[node.input[0]].dims[0] <= 2**bits
        assert casts[node.input[1]] == stored
    with torch.no_grad():
        wanted = sim.model(pictures[2])
    session = onnxruntime.InferenceSession(made.qdq)
    (found,) = session.run(None, {session.get_inputs()[0].name: pictures[2].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-5)
    assert sim.verify(pictures[2]).ok


def test_a_file_gets_codebook_weights_by_a_recipe(tmp_path: Path):
    proto = exported(Net().eval(), batches()[0][:, None])
    given = [{"x": batch[:, None].numpy()} for batch in batches()]
    steps = [{"codebook": {"bits": 3}}]
    result = onnx_front.quantize(proto, given, "w8", recipe=steps, path=tmp_path, progress=False)
    assert result.exported is not None
    graph = onnx.load(result.exported.qdq).graph
    assert [node.op_type for node in graph.node].count("Gather") == 2
    assert result.sim.verify(given[0]).ok


def test_with_quantized_activations_files_hold_integers(tmp_path: Path):
    sim = calibrated(torch_front.QuantizationSimModel(Net().eval(), batches()[0], preset="w8a8"), batches())
    torch_front.apply_reconstruction(sim, batches(), "gptvq", progress=False, **VECTORS)
    made = sim.export(tmp_path, "model", batches()[0])
    ops = [node.op_type for node in onnx.load(made.qdq).graph.node]
    assert "Gather" not in ops and ops.count("DequantizeLinear") >= 2


def test_encodings_keep_vectors():
    sim = torch_front.QuantizationSimModel(Net().eval(), batches()[0], preset="w8")
    torch_front.apply_reconstruction(sim, batches(), "gptvq", progress=False, **VECTORS)
    encoding = next(site.encoding for site in sim.quantizers.values() if site.role == "weight")
    assert encoding_from_json(encoding_to_json(encoding)) == encoding
    with pytest.raises(EncodingsError, match="vectors of 9 codes along axis -1 are none of a codebook"):
        encoding_from_json({**encoding_to_json(encoding), "vectors": [9, -1]})


@pytest.mark.parametrize(
    "preset, options, message",
    [
        ("w8", {"method": "codebook", "bits": 9}, "bits: it is 9.*a whole number from 1 to 8"),
        ("w8", {"method": "codebook", "rounds": -1}, "rounds: it is -1.*from 0 to 100"),
        ("w8", {"entries": 257}, "entries: it is 257.*a whole number from 2 to 256"),
        ("w8", {"vector": 0}, "vector: it is 0.*from 1 to 8"),
        ("w4g10_asym", {}, "uint4, which has zero points, and rows of a codebook share its entries.*preset='w8'"),
        ("nf4", {}, "nf4, which has no codes that are integers"),
    ],
)
def test_what_cannot_be_stored_by_vectors_is_refused(preset: str, options: dict[str, Any], message: str):
    sim = calibrated(torch_front.QuantizationSimModel(Net().eval(), batches()[0], preset=preset))
    with pytest.raises(ConfigError, match=message):
        torch_front.apply_reconstruction(sim, batches(), **{"method": "gptvq", "progress": False, **options})
