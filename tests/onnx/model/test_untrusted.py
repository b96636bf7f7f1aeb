"""Model files nobody vouches for: tensors that do not fit their shapes, data that lie elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bitwright.errors import ModelError
from bitwright.onnx import load_model
from bitwright.onnx.model import untrusted
from bitwright.onnx.model.data import InputSpec, input_specs, random_feeds


def model(**weight: object) -> onnx.ModelProto:
    """``y = x @ w``; keyword arguments change fields of ``w``."""
    w = onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w")
    for key, value in weight.items():
        if key == "dims":
            del w.dims[:]
            w.dims.extend(value)  # type: ignore[arg-type]
        else:
            setattr(w, key, value)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [w],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"dims": (4, 4)}, r"its shape \[4, 4\] needs 64 bytes of data, and it has 48"),
        ({"dims": (4, -3)}, r"its shape \[4, -3\] has an axis of negative length"),
        ({"dims": (1 << 62, 1 << 62, 16)}, "needs 1361129467683753853853498429727072845824 bytes"),
        ({"raw_data": b"\0" * 47}, "needs 48 bytes of data, and it has 47"),
        ({"data_type": TensorProto.DOUBLE}, "needs 96 bytes of data, and it has 48"),
        ({"data_type": 99}, "its data type, number 99, is not one of ONNX"),
        ({"data_type": 0}, "its data type, number 0, is not one of ONNX"),
    ],
)
def test_data_that_do_not_fit_are_refused_in_front_of_everything(fields, problem, tmp_path: Path) -> None:
    onnx.save(model(**fields), tmp_path / "m.onnx")
    for source in (tmp_path / "m.onnx", model(**fields)):
        with pytest.raises(ModelError, match=f"^w: .*{problem}"):
            load_model(source)


@pytest.mark.parametrize(
    "name", ["FLOAT", "INT4", "UINT2", "FLOAT4E2M1", "FLOAT6E2M3", "BFLOAT16", "COMPLEX64", "INT8"]
)
def test_every_way_to_store_a_tensor_is_known(name: str) -> None:
    dtype = getattr(TensorProto, name)
    for values in ([1] * 5, []):
        proto = model()
        proto.graph.initializer.append(helper.make_tensor("spare", dtype, [len(values)], values))
        load_model(proto)
        proto.graph.initializer[-1].dims[0] = 12
        with pytest.raises(ModelError, match="^spare: .* needs"):
            load_model(proto)


def test_attributes_and_bodies_are_looked_at() -> None:
    proto = model()
    spoilt = onnx.numpy_helper.from_array(np.zeros(3, np.float32), "spoilt")
    spoilt.dims[0] = 5
    body = helper.make_graph([helper.make_node("Constant", [], ["c"], value=spoilt)], "body", [], [])
    proto.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=body, else_branch=body))
    with pytest.raises(ModelError, match="^spoilt: its shape"):
        load_model(proto)


def outside(folder: Path, location: str) -> Path:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    proto = model()
    w = proto.graph.initializer[0]
    w.ClearField("raw_data")
    w.data_location = TensorProto.EXTERNAL
    w.external_data.add(key="location", value=location)
    onnx.save(proto, home / "m.onnx")
    return home / "m.onnx"


def link(folder: Path) -> str:
    (folder / "home").mkdir()
    (folder / "home" / "w.data").symlink_to(folder / "secret")
    return "w.data"


@pytest.mark.parametrize(
    "location",
    [
        pytest.param(lambda folder: "../secret", id="parent"),
        pytest.param(lambda folder: str(folder / "secret"), id="absolute"),
        pytest.param(lambda folder: "a/../../secret", id="detour"),
        pytest.param(lambda folder: "C:\\secret", id="drive"),
        pytest.param(lambda folder: "..\\secret", id="backslash"),
        pytest.param(link, id="link"),
    ],
)
def test_data_outside_the_folder_are_not_read(location: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\0" * 48)
    with pytest.raises(ModelError, match="^w: its data lie in .*secret.*|^w: its data lie in .*, outside the folder"):
        load_model(outside(tmp_path, location(tmp_path)))


def test_a_cache_that_links_model_and_data_alike_is_read(tmp_path: Path) -> None:
    path = outside(tmp_path, "w.data")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "1234").write_bytes(np.arange(12, dtype=np.float32).tobytes())
    path.rename(blobs / "5678")
    path.symlink_to(blobs / "5678")
    path.with_name("w.data").symlink_to(blobs / "1234")
    tensor = load_model(path).model.graph.initializers["w"].const_value
    assert tensor is not None and tensor.numpy()[3, 2] == 11


@pytest.mark.parametrize("key, value", [("offset", "-8"), ("length", "48x"), ("length", "40"), ("offset", "9" * 30)])
def test_numbers_of_external_data_are_checked(key: str, value: str, tmp_path: Path) -> None:
    path = outside(tmp_path, "w.data")
    path.with_name("w.data").write_bytes(b"\0" * 48)
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].external_data.add(key=key, value=value)
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="^w: .*(is not a number of bytes|needs 48 bytes of data)"):
        load_model(path)


def test_axes_of_negative_length_are_open_and_huge_ones_have_no_random_data() -> None:
    proto = model()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert input_specs(load_model(proto).model)[0].shape == (None, 4)
    with pytest.raises(ModelError, match="too many for random data"):
        next(random_feeds([InputSpec("x", "float32", (1 << 62, 4))]))


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"m\.onnx"):
        load_model(tmp_path / "m.onnx")


def test_large_weights_leave_the_message_they_came_in(tmp_path: Path) -> None:
    proto = model()
    large = np.random.default_rng(0).standard_normal((4, 500)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(large, "spare"))
    onnx.save(proto, tmp_path / "m.onnx")
    tensor = load_model(tmp_path / "m.onnx").model.graph.initializers["spare"].const_value
    assert tensor is not None and np.array_equal(tensor.numpy(), large)
    assert np.shares_memory(tensor.numpy(), tensor.numpy()), "each look at the weight copies it"


def large(path: Path) -> bytes:
    """A file of several tensors, names, a function and fields out of their order; its content."""
    proto = model()
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.full((i, 5), i, np.float32), f"w{i}") for i in range(9)
    )
    proto.graph.doc_string = "text"
    proto.metadata_props.add(key="a", value="b")
    late = onnx.ModelProto(producer_name="late")  # a message may have its fields in any order, and graphs in parts
    late.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "last"))
    content = proto.SerializeToString() + late.SerializeToString()
    path.write_bytes(content)
    return content


def test_a_large_file_read_in_pieces_is_the_same_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = large(tmp_path / "m.onnx")
    monkeypatch.setattr(untrusted, "_WHOLE", 0)
    for piece in (1, 100, 1 << 20):
        monkeypatch.setattr(untrusted, "_PIECE", piece)
        found = untrusted.read_proto(tmp_path / "m.onnx")
        assert found == onnx.ModelProto.FromString(content) and len(found.graph.initializer) == 11


def test_a_damaged_file_is_refused_in_pieces_as_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, random, refused = tmp_path / "m.onnx", np.random.default_rng(0), 0
    content = large(path)
    monkeypatch.setattr(untrusted, "_PIECE", 64)
    for _ in range(300):
        damaged = bytearray(content)
        damaged[random.integers(0, 60) if random.random() < 0.5 else random.integers(len(content))] ^= (
            1 << random.integers(8)
        )
        del damaged[len(content) - int(random.integers(0, 2) * random.integers(1, 40)) :]
        path.write_bytes(damaged)
        outcomes = []
        for whole in (1 << 26, 0):
            monkeypatch.setattr(untrusted, "_WHOLE", whole)
            try:
                outcomes.append(untrusted.read_proto(path).SerializeToString(deterministic=True))
            except ModelError as error:
                assert "it is not an ONNX model, or it was cut off" in error.problem
                outcomes.append(b"")
        refused += outcomes[1] == b""
        assert outcomes[0] == outcomes[1] or outcomes[1] == b""
    assert 30 < refused < 270


def test_texts_that_are_not_utf8_are_refused() -> None:
    proto = model()
    proto.graph.node[0].op_type = "Pad"
    proto.graph.node[0].attribute.add(name="mode", type=onnx.AttributeProto.STRING, s=b"\xff")
    with pytest.raises(ModelError, match=r"the name or text b'\\xff' is not UTF-8. Remedy: export or download"):
        load_model(proto)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"op_type": "LSTM", "input": ["x", "w", "w"]}, "node 'n': it is a LSTM without hidden_size"),
        ({"op_type": "Concat"}, "node 'n': it is a Concat without axis"),
        ({"input": ["x"]}, "node 'n': it is a MatMul of 1 inputs, and takes 2 to 2"),
        ({"input": ["", "w"]}, "node 'n': it is a MatMul without its input A"),
    ],
)
def test_nodes_that_lack_what_their_operator_needs_are_named(change, problem) -> None:
    proto = model()
    node = proto.graph.node[0]
    node.name, node.op_type = "n", change.get("op_type", node.op_type)
    if "input" in change:
        del node.input[:]
        node.input.extend(change["input"])
    with pytest.raises(ModelError, match=problem):
        load_model(proto)
