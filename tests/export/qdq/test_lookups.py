"""Rows of quantized tables are gathered as codes: the numbers of the whole table dequantized, at the cost of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from bitwright.compare.drift import drift
from bitwright.compare.verify import verify_folder, verify_layers
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor
from bitwright.errors import ExportError
from bitwright.export.contents import contents
from bitwright.export.files.onnx_file import save_model
from bitwright.export.qdq.lookups import restore_lookups
from bitwright.export.qdq.write import to_qdq
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from tests.export.marked import Array, Graph, run_both, run_plain, simulate
from tests.support.sessions import integer_session
from tests.support.simulations import calibrated

INT64 = ir.DataType.INT64
IDS = np.array([[3, 0, -1], [5, 5, 2]])

FORMS = [
    ("int8", PerTensor()), ("int8", PerChannel(0)), ("int8", PerChannel(1)), ("int8", PerBlock(16, 1, 0)),
    ("uint8", PerTensor()), ("uint8", PerChannel(0)), ("int16", PerChannel(0)), ("int5", PerChannel(0)),
    ("int4", PerTensor()), ("int4", PerChannel(0)), ("int4", PerChannel(1)), ("int4", PerBlock(16, 1, 0)),
    ("uint4", PerTensor()), ("uint4", PerChannel(0)), ("uint4", PerBlock(16, 1, 0)), ("int3", PerChannel(0)),
    ("int2", PerBlock(8, 1, 0)),
]  # fmt: skip


def looked_up(
    fmt: str, granularity: Granularity, shape: tuple[int, ...] = (6, 32), axis: int = 0, opset: int = 21
) -> tuple[ir.Model, Graph, Array]:
    """Rows of a table with rows of different sizes, and something that computes after them."""
    g = Graph()
    data = g.rng.normal(size=shape).astype(np.float32)
    data *= np.arange(1, shape[0] + 1, dtype=np.float32).reshape(-1, *[1] * (len(shape) - 1))
    table = g.param("table", data)
    ids = g.input("ids", "n", "m", dtype=INT64)
    symmetry = "asymmetric" if fmt.startswith("u") else "symmetric"
    rows = g.op("Gather", g.mark(table, "table.site", fmt, data, granularity, symmetry), ids, axis=axis)  # type: ignore[arg-type]
    return g.model(g.op("Neg", rows, name="y"), opset=opset), g, data


def whole_tables(model: ir.Model) -> list[str]:
    """What is dequantized in every run although few rows of it are read."""
    return [
        str(node.name)
        for node in model.graph
        if node.op_type in ("DequantizeLinear", "Cast") and node.inputs[0] in model.graph.initializers.values()
    ]


def assert_moved(model: ir.Model, g: Graph, ids: Array = IDS) -> ir.Model:
    """No table is dequantized whole, and the outputs are those of the simulation, bit for bit; read back it is as it was."""
    result = to_qdq(model, g.encodings, target="ort_cpu")
    assert not whole_tables(result.model)
    wanted = simulate(model, g.encodings, {"ids": ids})[1]["y"]
    for found in (*run_both(result.model, {"ids": ids}).values(),):
        np.testing.assert_array_equal(found["y"], wanted)
    again, before = result.model.clone(), to_qdq(model, g.encodings, target="packed").model
    restore_lookups(again)
    assert [n.op_type for n in again.graph] == [n.op_type for n in before.graph]
    np.testing.assert_array_equal(run_plain(again, {"ids": ids})[0], wanted)
    assert len(again.graph.initializers) == 3
    return result.model


@pytest.mark.parametrize(("fmt", "granularity"), FORMS, ids=str)
def test_rows_are_bit_identical(fmt: str, granularity: Granularity, tmp_path: Path) -> None:
    model, g, _ = looked_up(fmt, granularity)
    written = assert_moved(model, g)
    save_model(written, tmp_path / "m.onnx")
    sim = OnnxSim(tmp_path / "m.onnx")
    encodings = [s.encoding for s in sim.quantizers.values() if s.role == "weight"]
    given = g.encodings["table.site"]
    assert len(encodings) == 1 and encodings[0] is not None and encodings[0].format == given.format
    np.testing.assert_array_equal(np.unique(encodings[0].scale), np.unique(given.scale))


@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerChannel(0), PerChannel(1), PerChannel(2), PerBlock(4, 2, 0)], ids=str
)
@pytest.mark.parametrize("axis", [0, 1, -2, -1])
@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_any_axis_of_any_table(fmt: str, axis: int, granularity: Granularity) -> None:
    model, g, _ = looked_up(fmt, granularity, (6, 7, 8), axis)
    if isinstance(granularity, PerBlock) and axis == -1:
        assert whole_tables(to_qdq(model, g.encodings, target="ort_cpu").model)  # indices may lie in any block
    else:
        assert_moved(model, g)


@pytest.mark.parametrize(
    "ids", [np.array(2), np.array([1, 4]), np.zeros((0, 3), np.int64)], ids=["scalar", "vector", "none"]
)
@pytest.mark.parametrize(
    ("fmt", "granularity"), [("int8", PerChannel(0)), ("int8", PerTensor()), ("int4", PerChannel(0))]
)
def test_any_shape_of_indices(fmt: str, granularity: Granularity, ids: Array) -> None:
    model, g, _ = looked_up(fmt, granularity)
    model.graph.inputs[0].shape = ir.Shape(ids.shape)
    assert_moved(model, g, ids)


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0)], ids=str)
def test_old_opsets_have_a_form(granularity: Granularity) -> None:
    model, g, _ = looked_up("int8", granularity, opset=13)
    assert_moved(model, g)


def test_four_bits_stay_packed_where_a_kernel_looks_them_up() -> None:
    wide, g, _ = looked_up("int4", PerChannel(0), (6, 48))
    narrow, h, _ = looked_up("int4", PerChannel(0), (6, 9))
    packed, plain = (to_qdq(m, one.encodings, target="ort_cpu").model for m, one in ((wide, g), (narrow, h)))
    (lookup,) = [n for n in packed.graph if n.op_type == "GatherBlockQuantized"]
    assert lookup.inputs[0] is not None and lookup.inputs[0].const_value is not None
    assert lookup.inputs[0].const_value.nbytes == 6 * 48 // 2
    assert [n.op_type for n in plain.graph][:2] == ["Gather", "Cast"]


@pytest.mark.parametrize("target", ["packed", "openvino_cpu", "litert"])
def test_other_targets_keep_the_form_that_compilers_look_for(target: str) -> None:
    model, g, _ = looked_up("int8", PerChannel(0))
    assert [n.op_type for n in to_qdq(model, g.encodings, target=target).model.graph] == [
        "DequantizeLinear",
        "Gather",
        "Neg",
    ]


def test_an_output_that_others_read_keeps_its_form() -> None:
    """Behind a Gather, ONNX Runtime could move Transposes across the DequantizeLinear that makes the output."""
    model, g, _ = looked_up("int8", PerTensor())
    model.graph.outputs.append(model.graph.node("node_1").outputs[0])
    written = to_qdq(model, g.encodings, target="ort_cpu").model
    assert whole_tables(written)


class Language(nn.Module):
    """A word table, positions, and an output layer that may have the weight of the word table."""

    def __init__(self, tied: bool, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(97, width), nn.Embedding(8, width)
        self.layer, self.head = nn.Linear(width, width), nn.Linear(width, 97, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(torch.relu(self.layer(x)))


def exported(tmp_path: Path, preset: str, tied: bool, **options: Any) -> tuple[Any, torch.Tensor, QuantizationSimModel]:
    torch.manual_seed(0)
    ids = torch.randint(0, 97, (2, 8))
    sim = calibrated(QuantizationSimModel(Language(tied).eval(), ids, preset=preset), [ids])
    return sim.export(tmp_path, "net", ids, **options), ids, sim


def shows_no_whole_table(path: Any) -> ir.Model:
    """The model in a file whose lookups all read codes."""
    model = ir.load(path)
    made = [
        node.inputs[0].producer() for node in model.graph if node.op_type == "Gather" and node.inputs[0] is not None
    ]
    assert all(maker is None or maker.op_type != "DequantizeLinear" for maker in made)
    return model


@pytest.mark.parametrize(("preset", "tied"), [("w8a8", True), ("w4a8", False), ("w4g32", True)])
def test_language_models_of_torch(tmp_path: Path, preset: str, tied: bool) -> None:
    files, ids, sim = exported(tmp_path, preset, tied)
    shows_no_whole_table(files.qdq)
    assert verify_folder(tmp_path).ok
    session = integer_session(files.qdq)
    wanted = sim.model(ids).detach().numpy()
    found = session.run(None, {"ids": ids.numpy()})[0]
    np.testing.assert_allclose(found, wanted, atol=2e-2 * np.abs(wanted).max())  # two codes of the output


def language_model(tied: bool) -> ir.Model:
    """The same in ONNX, as other exporters write it: the output layer reads the word table through a Transpose."""
    g = Graph()
    ids = g.input("ids", "n", "m", dtype=INT64)
    words = g.param("words", (97, 32))
    x = g.op("Gather", words, ids, name="rows")
    x = g.op("Relu", g.op("MatMul", x, g.param("layer", (32, 32)), name="product"), name="relu")
    head = g.op("Transpose", words if tied else g.param("head", (97, 32)), perm=[1, 0], name="turned")
    return g.model(g.op("MatMul", x, head, name="y"))


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("preset", ["w8a8", "w8a8_per_tensor", "w4a8", "w4", "w4g32", "w8", "w4lpbq", "fp8"])
def test_language_models_of_onnx(tmp_path: Path, preset: str, tied: bool) -> None:
    feeds = {"ids": np.random.default_rng(1).integers(0, 97, (2, 8))}
    sim = calibrated(OnnxSim(language_model(tied), preset=preset), [feeds])
    sim.export(tmp_path, "net")
    if preset != "fp8":  # Gather of float8 is no form of ONNX
        shows_no_whole_table(tmp_path / "net.onnx")
    assert sim.verify(feeds).ok
    assert verify_folder(tmp_path).ok
    again = OnnxSim(tmp_path / "net.onnx")
    found, given = (
        {str(s.encoding.format) for s in one.quantizers.values() if s.encoding and s.role == "weight"}
        for one in (again, sim)
    )
    assert found == given


@pytest.mark.parametrize("preset", ["w8a8", "w4a8", "w8a8_per_tensor"])
def test_a_shared_table_is_stored_once(tmp_path: Path, preset: str) -> None:
    sim = calibrated(OnnxSim(language_model(True), preset=preset), [{"ids": np.arange(12).reshape(2, 6)}])
    sim.export(tmp_path, "net")
    model = ir.load(tmp_path / "net.onnx")
    held = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    assert [t.size for t in held].count(97 * 32) == 1


def written(tmp_path: Path) -> tuple[onnx.ModelProto, OnnxSim]:
    """An export's file, to be changed."""
    sim = calibrated(OnnxSim(language_model(False)), [{"ids": np.arange(12).reshape(2, 6)}])
    sim.export(tmp_path, "net")
    return onnx.load(tmp_path / "net.onnx"), sim


def test_verify_compares_tables_that_are_looked_up(tmp_path: Path) -> None:
    """A code that is changed in the file is found by its site."""
    model, sim = written(tmp_path)
    (table,) = [t for t in model.graph.initializer if t.name == "words_q"]
    encoding, weight = sim.quantizers["words"].encoding, language_model(False).graph.initializers["words"]
    assert encoding is not None and weight.const_value is not None
    values = {"words": np.asarray(fake_quantize(weight.const_value.numpy(), encoding))}
    feeds = {"ids": np.arange(12).reshape(2, 6)}
    assert verify_layers(tmp_path / "net.onnx", values, feeds).rows[0].as_integer.ok
    codes = onnx.numpy_helper.to_array(table).copy()
    codes[5] = -codes[5]
    table.CopyFrom(onnx.numpy_helper.from_array(codes, table.name))
    onnx.save(model, tmp_path / "changed.onnx")
    report = verify_layers(tmp_path / "changed.onnx", values, feeds)
    assert [row.site for row in report.rows if not row.as_integer.ok] == ["words"]


def test_changed_notes_are_told(tmp_path: Path) -> None:
    model, _ = written(tmp_path)
    for entry in (entry for node in model.graph.node for entry in node.metadata_props):
        if entry.key == "bitwright.table":
            entry.value = '{"name": 1}'
    onnx.save(model, tmp_path / "changed.onnx")
    with pytest.raises(ExportError, match="what the export wrote on this operator is damaged"):
        OnnxSim(tmp_path / "changed.onnx")


def test_show_lists_tables_that_are_looked_up(tmp_path: Path) -> None:
    written(tmp_path)
    (table,) = [table for table in contents(tmp_path / "net.onnx") if "Quantized tensors" in table.title]
    assert any("words" in str(row) for row in table.rows)


def test_drift_names_a_table_that_differs(tmp_path: Path) -> None:
    model, _ = written(tmp_path)
    (table,) = [t for t in model.graph.initializer if t.name == "words_scale_axis0"]
    scale = onnx.numpy_helper.to_array(table) * np.float32(1.5)
    table.CopyFrom(onnx.numpy_helper.from_array(scale, table.name))
    onnx.save(model, tmp_path / "changed.onnx")
    report = drift(tmp_path / "net.onnx", tmp_path / "changed.onnx", {"ids": np.arange(12).reshape(2, 6)})
    assert not report.ok and "node_0" in str(report.first)
