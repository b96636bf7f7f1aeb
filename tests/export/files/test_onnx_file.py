"""What is written tensor by tensor is read back as the model that was written, and a manifest notices changes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

import bitwright
from bitwright.compare.runtime import Edit, Otherwise, computed_otherwise
from bitwright.errors import ConfigError, ExportError
from bitwright.export.files.manifest import Fingerprint, fingerprint, read_manifest, write_manifest
from bitwright.export.files.onnx_file import all_graphs, all_nodes, save_in_one_file, save_model

W = np.random.default_rng(0).standard_normal((160, 160)).astype(np.float32)


def model() -> ir.Model:
    int4 = helper.make_tensor("q", TensorProto.INT4, [160, 1025], np.arange(160 * 1025) % 15 - 7)
    weights = [
        numpy_helper.from_array(W, "large"),
        numpy_helper.from_array(W[0], "small"),
        int4,
        numpy_helper.from_array(W.astype(np.float16).repeat(2, 0), "half"),
        helper.make_tensor("names", TensorProto.STRING, [2], [b"a", b"b" * 70000]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 160]) for name in ("x", "y")]
    nodes = [helper.make_node("MatMul", ["x", "large"], ["h"]), helper.make_node("Add", ["h", "small"], ["y"])]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights, doc_string="what it is")
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def test_the_file_is_the_model(tmp_path: Path) -> None:
    written, path = model(), tmp_path / "m.onnx"
    lazy = ir.LazyTensor(lambda: ir.Tensor(W * 2), ir.DataType.FLOAT, ir.Shape(W.shape), name="large")
    written.graph.initializers["large"].const_value = lazy
    before = {name: value.const_value for name, value in written.graph.initializers.items()}
    save_in_one_file(written, path)
    assert {name: value.const_value for name, value in written.graph.initializers.items()} == before
    onnx.checker.check_model(path, full_check=True)
    found, expected = onnx.load(path), ir.to_proto(written)
    for proto in (found, expected):  # elements of four bits may lie in another field
        for tensor in proto.graph.initializer:
            if tensor.name != "names":
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    assert found == expected
    x = np.ones((2, 160), np.float32)
    (found,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(found, x @ (2 * W) + W[0], rtol=1e-4, atol=1e-4)


def test_a_model_that_cannot_be_written_keeps_its_tensors(tmp_path: Path) -> None:
    kept = model()
    with pytest.raises(OSError, match="absent"):
        save_in_one_file(kept, tmp_path / "absent" / "m.onnx")
    assert np.array_equal(kept.graph.initializers["large"].const_value.numpy(), W)


def branching() -> onnx.ModelProto:
    """A sum and a product of a body with weights of 40 bytes, as ``torch.onnx.export`` puts them into a second file."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [10]) for name in ("x", "y", "inside")]
    outer, inner = (numpy_helper.from_array(W[0, at : at + 10], name) for at, name in ((0, "w"), (10, "v")))
    body = [
        helper.make_graph([helper.make_node("Mul", ["h", "v"], ["inside"])], "then", [], values[2:], [inner]),
        helper.make_graph([helper.make_node("Identity", ["h"], ["inside"])], "else", [], values[2:]),
    ]
    nodes = [
        helper.make_node("Add", ["x", "w"], ["h"]),
        helper.make_node("If", ["take"], ["y"], then_branch=body[0], else_branch=body[1]),
    ]
    take = helper.make_tensor_value_info("take", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "g", [values[0], take], values[1:2], [outer])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("external", [False, True], ids=["one file", "two files"])
def test_small_tensors_of_another_file_come_along(tmp_path: Path, external: bool) -> None:
    given, path = tmp_path / "given", tmp_path / "written"
    for folder in (given, path):
        folder.mkdir()
    proto = branching()
    (body,) = (attribute.g for attribute in proto.graph.node[1].attribute if attribute.name == "then_branch")
    for tensor in (proto.graph.initializer[0], body.initializer[0]):
        set_external_data(tensor, "m.data")
    onnx.save(proto, given / "m.onnx")
    model = ir.load(given / "m.onnx")
    before = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    assert [type(tensor) for tensor in before] == [ir.ExternalTensor] * 2
    save_model(model, path / "m.onnx", external=external)
    after = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    shutil.rmtree(given)
    onnx.checker.check_model(path / "m.onnx", full_check=True)
    session = ort.InferenceSession(path / "m.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": W[1, :10], "take": np.array(True)})
    np.testing.assert_allclose(found, (W[1, :10] + W[0, :10]) * W[0, 10:20], rtol=1e-6)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    (tmp_path / "net.onnx").write_bytes(b"model" * 1000)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "weights.bin").write_bytes(b"\0" * 10)
    (tmp_path / ".hidden").write_text("no")
    return tmp_path


def test_round_trip_keeps_everything(exported: Path) -> None:
    written = write_manifest(
        exported / "manifest.json",
        settings={"preset": "w8a8", "rules": [{"match": "conv*", "weight": None}], "größe": 1.5},
        seeds={"numpy": 7},
        data=fingerprint([np.ones(3)]),
        notes=["fc.bias: stays in float"],
        created="2030-01-01",
    )
    assert read_manifest(exported / "manifest.json", check=True) == written
    assert [f.name for f in written.files] == ["more/weights.bin", "net.onnx"]
    assert written.files[1].size == 5000
    assert written.versions["bitwright"] == bitwright.__version__ and "numpy" in written.versions


def test_equal_exports_give_equal_manifests(exported: Path) -> None:
    texts = []
    for _ in range(2):
        write_manifest(exported / "manifest.json", settings={"a": 1})
        texts.append((exported / "manifest.json").read_bytes())
    assert texts[0] == texts[1], "the manifest itself is not among its files, and no time is written"


def test_files_of_a_staging_folder_are_named_relative_to_it(exported, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "manifest.json"
    written = write_manifest(other, folder=exported, files=["net.onnx"])
    assert [f.name for f in written.files] == ["net.onnx"]
    assert written.problems(exported) == [] and written.problems(other.parent) == ["net.onnx is missing"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(lambda p: p.unlink(), "net.onnx is missing", id="missing"),
        pytest.param(lambda p: p.write_bytes(b"m"), "net.onnx has 1 bytes instead of 5000", id="size"),
        pytest.param(
            lambda p: p.write_bytes(b"MODEL" * 1000), "net.onnx has another content than was written", id="content"
        ),
    ],
)
def test_changed_files_are_named(exported: Path, damage: Any, problem: str) -> None:
    write_manifest(exported / "manifest.json")
    damage(exported / "net.onnx")
    read_manifest(exported / "manifest.json")
    with pytest.raises(ExportError, match=f"manifest.json: {problem}. Remedy: export again"):
        read_manifest(exported / "manifest.json", check=True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("{", r"it is not JSON \(Expecting", id="broken-json"),
        pytest.param("[]", "the key 'version' is missing", id="no-mapping"),
        pytest.param('{"version": 2, "files": []}', "names another one", id="version"),
        pytest.param('{"version": 1, "files": [], "file": 1}', r"unknown keys \['file'\]", id="unknown-key"),
        pytest.param('{"version": 1}', "'files'", id="no-files"),
        pytest.param('{"version": 1, "files": [{"name": "a"}]}', "sha256", id="bad-entry"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ExportError, match=problem):
        read_manifest(tmp_path / "m.json")


def test_missing_manifest_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"m\.json: there is no such file"):
        read_manifest(tmp_path / "m.json")
    with pytest.raises(ExportError, match=r"gone\.onnx: there is no such file"):
        write_manifest(tmp_path / "m.json", files=["gone.onnx"])


@pytest.mark.parametrize("value", [np.float32(1), float("nan"), {1, 2}], ids=["numpy", "nan", "set"])
def test_settings_are_plain_json(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="manifest settings: they are not plain JSON"):
        write_manifest(tmp_path / "m.json", settings={"a": value})
    assert not (tmp_path / "m.json").exists()


@dataclasses.dataclass
class Pair:
    image: Any
    label: Any


def test_fingerprint_sees_values_types_shapes_order_and_nesting() -> None:
    a, b = np.arange(6, dtype=np.float32), np.ones(2, np.float32)
    variants = [
        [a, b], [b, a], [(a, b)], [{"x": a, "y": b}], [{"y": a, "x": b}], [a.reshape(2, 3), b],
        [a.astype(np.float64), b], [a + 1e-7, b], [Pair(a, b)], [a, b, None], [a, b, "label"],
        [np.concatenate([a, b])], [],
    ]  # fmt: skip
    assert len({fingerprint(v) for v in variants}) == len(variants)
    assert fingerprint(variants[0]).startswith("sha256:")


def test_fingerprint_is_the_same_for_numpy_and_torch_and_for_strided_views() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert fingerprint([torch.from_numpy(array)]) == fingerprint([array]) == fingerprint([array.T.copy().T])
    half = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    assert fingerprint([half]) == fingerprint([torch.ones(3)])


def test_deep_nesting_needs_no_recursion() -> None:
    deep: Any = np.ones(1)
    for _ in range(5000):
        deep = [deep]
    assert fingerprint([deep]).startswith("sha256:")


def test_watching_hashes_what_passes_and_reads_data_once() -> None:
    seen = Fingerprint()
    batches = [np.full(3, i) for i in range(4)]
    passed = list(seen.watch(iter(batches)))
    assert all(x is y for x, y in zip(passed, batches, strict=True)) and str(seen) == fingerprint(batches)


@pytest.mark.parametrize("thing", [object(), np.array([object()])], ids=["object", "object-array"])
def test_what_has_no_bytes_is_refused(thing: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be fingerprinted"):
        fingerprint([{"x": thing}])


def test_manifest_is_readable_text(exported: Path) -> None:
    write_manifest(exported / "manifest.json", notes=["größer"])
    text = (exported / "manifest.json").read_text(encoding="utf-8")
    assert "größer" in text and json.loads(text)["version"] == 1


FEEDS = {"x": np.zeros((2, 3), np.float32)}


def model_of_quotients(batch: int | None) -> ir.Model:
    """``x -> QuantizeLinear -> DequantizeLinear -> Relu -> y``, and a weight of codes."""
    return ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{"N" if batch is None else batch}, 3] x) => (float[M, 3] y)
        <float s = {{0.1}}, uint8 z = {{0}}, int8[3] codes = {{1, 2, 3}}, int8 zero = {{0}}> {{
            q = QuantizeLinear(x, s, z)
            d = DequantizeLinear(q, s, z)
            w = DequantizeLinear(codes, s, zero)
            h = Mul(d, w)
            y = Relu(h)
        }}"""
    )


def found(batch: int | None, whole: float, **better: float) -> Otherwise | None:
    """The verdict on an output that is at ``whole`` dB, and at those of ``better`` after the edits."""

    def changed(edit: Edit) -> Callable[[str], float]:
        copied = model_of_quotients(batch)
        edit(copied)
        outputs = [value.name for value in copied.graph.outputs]
        assert outputs in (["y"], ["y", "d"]), "of quantized activations alone"
        return lambda name: better.get("observed" if "d" in outputs else "fixed", whole)

    return computed_otherwise(model_of_quotients(batch), [("y", whole)], FEEDS, changed, "openvino")


@pytest.mark.parametrize("batch", [2, None])
def test_what_is_right_while_it_is_observed_is_wrong_otherwise(batch: int | None) -> None:
    told = found(batch, 27.9, observed=150.0)
    assert told is not None and told.shapes is None and (told.whole, told.other) == (27.9, 150.0)
    assert "output y is 27.9 dB from the simulation, and 150.0 dB where every quantized value is an output too" in str(
        told
    )
    assert "make values in between outputs of the model, or use another runtime" in str(told)


def test_free_axes_are_tried_first_and_have_their_own_remedy() -> None:
    told = found(None, 27.9, observed=150.0, fixed=60.0)
    assert told is not None and told.other == 60.0
    assert "model.reshape({'x': [2, 3]})" in str(told) and "`bitwright drift` names the operator" in str(told)
    told = found(2, 27.9, fixed=60.0)
    assert told is None, "nothing is free"


@pytest.mark.parametrize(("whole", "observed"), [(61.0, 150.0), (40.0, 59.0), (40.0, -100.0)])
def test_outputs_that_are_near_or_come_no_nearer_are_not_told(whole: float, observed: float) -> None:
    assert found(2, whole, observed=observed) is None


def test_nothing_runs_where_all_outputs_are_near() -> None:
    def edits() -> Iterator[Edit]:
        raise AssertionError("a run")

    assert (
        computed_otherwise(model_of_quotients(None), [("y", 61.0)], FEEDS, lambda _: next(edits()), "openvino") is None
    )


def nested(depth: int) -> onnx.GraphProto:
    """An If in both branches of an If, and so on; every second node has no bodies."""
    inner = {"then_branch": nested(depth - 1), "else_branch": nested(depth - 1)} if depth else {}
    nodes = [helper.make_node("If", ["c"], [f"i{depth}"], **inner)] if depth else []
    nodes += [helper.make_node("Identity", ["c"], [f"o{depth}"], name=f"last {depth}")]
    made = helper.make_tensor_value_info(f"o{depth}", TensorProto.BOOL, [])
    return helper.make_graph(nodes, f"g{depth}", [], [made])


def test_walks_come_to_nodes_and_graphs_as_those_of_onnx_ir_do():
    graph = nested(3)
    graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    read = ir.from_proto(helper.make_model(graph))
    assert list(all_nodes(read.graph)) == list(read.graph.all_nodes()) and len(list(all_nodes(read.graph))) > 20
    assert all_graphs(read.graph) == list(read.graphs())
