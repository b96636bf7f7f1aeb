"""Data for ONNX models, and files that nobody vouches for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from bitwright.cli import app
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.onnx import load_model
from bitwright.onnx.model import untrusted
from bitwright.onnx.model.data import InputSpec, Pictures, as_feeds, input_specs, load_data, random_feeds
from tests.onnx.nets import Net

IMAGE = (InputSpec("image", "float32", (None, 3, 8, 8)),)
PAIR = (InputSpec("ids", "int64", (None, 4)), InputSpec("mask", "float32", (None, 4)))
X = np.random.default_rng(0).standard_normal((5, 3, 8, 8)).astype(np.float32)


def stacked(source: Any, specs: Any = IMAGE, **options: Any) -> np.ndarray:
    return np.concatenate([feeds["image"] for feeds in load_data(source, specs, **options)])


def test_archive_is_cut_into_batches(tmp_path):
    np.savez(tmp_path / "d.npz", image=X, label=np.arange(5))
    found = list(load_data(tmp_path / "d.npz", IMAGE, batch_size=2))
    assert [len(f["image"]) for f in found] == [2, 2, 1]
    assert np.array_equal(stacked(tmp_path / "d.npz"), X)


def test_fixed_batch_sizes_are_kept(tmp_path):
    np.savez(tmp_path / "d.npz", image=X)
    spec = (InputSpec("image", "float32", (2, 3, 8, 8)),)
    assert [len(f["image"]) for f in load_data(tmp_path / "d.npz", spec)] == [2, 2]


def test_folder_of_arrays(tmp_path):
    for i, x in enumerate(X):
        np.save(tmp_path / f"{i}.npy", x)
    assert np.array_equal(stacked(tmp_path, batch_size=2), X)


def test_folder_of_batches(tmp_path):
    np.save(tmp_path / "a.npy", X[:2])
    np.save(tmp_path / "b.npy", X[2:])
    assert [len(f["image"]) for f in load_data(tmp_path, IMAGE)] == [2, 3]
    assert np.array_equal(stacked(tmp_path / "a.npy"), X[:2])


def test_one_array_is_cut_into_samples_like_an_archive(tmp_path):
    np.save(tmp_path / "all.npy", X)
    assert [len(f["image"]) for f in load_data(tmp_path / "all.npy", IMAGE)] == [1] * 5
    assert [len(f["image"]) for f in load_data(tmp_path / "all.npy", IMAGE, batch_size=2)] == [2, 2, 1]
    np.save(tmp_path / "one.npy", X[0])
    assert np.array_equal(stacked(tmp_path / "one.npy"), X[:1])


def test_folder_per_input(tmp_path):
    for name, dtype in (("ids", np.int64), ("mask", np.float32)):
        (tmp_path / name).mkdir()
        for i in range(3):
            np.save(tmp_path / name / f"{i}.npy", np.full(4, i, dtype))
    found = list(load_data(tmp_path, PAIR))
    assert len(found) == 3 and found[2]["ids"].tolist() == [[2] * 4] and found[2]["mask"].shape == (1, 4)


def test_folder_of_archives(tmp_path):
    for i in range(2):
        np.savez(tmp_path / f"{i}.npz", ids=np.zeros((1, 4), np.int64), mask=np.ones((1, 4), np.float32))
    assert len(list(load_data(tmp_path, PAIR))) == 2


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("colours, want", [("RGB", [1.0, 0.0, 0.2]), ("BGR", [0.2, 0.0, 1.0])])
def test_pictures(tmp_path, layout, colours, want):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (20, 10), (255, 0, 51)).save(tmp_path / "a.png")
    shape = (None, 3, 8, 8) if layout == "NCHW" else (None, 8, 8, 3)
    spec = (InputSpec("image", "float32", shape),)
    (feeds,) = load_data(tmp_path, spec, pictures=Pictures(layout, colours, mean=(0.5,), std=(0.5,)))
    axes = (0, 2, 3) if layout == "NCHW" else (0, 1, 2)
    assert np.allclose(feeds["image"].mean(axes), (np.array(want) - 0.5) / 0.5, atol=1e-5)


def feeds_of_this_file() -> Any:
    yield {"image": X[:1]}
    yield X[1:]


def test_python_function():
    assert np.array_equal(stacked(f"{__name__}:feeds_of_this_file"), X)


def test_random_values_are_of_the_declared_kinds():
    found = list(random_feeds(PAIR, 2))
    assert found[0]["ids"].dtype == np.int64 and found[0]["ids"].max() <= 1 and found[0]["mask"].shape == (1, 4)


@pytest.mark.parametrize(
    "source, error, problem",
    [
        ("nowhere.npz", CalibrationError, "nowhere.npz: it does not exist"),
        ("empty", CalibrationError, "it holds no .npy, .npz or picture file"),
        ("wrong.npz", ModelError, r"it holds 'imag', which is not an input of the model \(did you mean 'image'\?\)"),
        ("none.npz", CalibrationError, "it holds no sample"),
        ("shape.npz", ModelError, r"the input image \(float32, \?x3x8x8\) was given an array of shape 1x3x9x9"),
        ("broken.npy", CalibrationError, "it cannot be read as an array"),
        ("notes.txt", CalibrationError, "it is neither .npz nor .npy"),
        ("json:nothing", ConfigError, "it cannot be imported"),
        ("json:__doc__", ConfigError, "__doc__ is a str, not a function"),
    ],
)
def test_data_that_cannot_be_used(tmp_path, source, error, problem):
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "wrong.npz", imag=X, label=X)
    np.savez(tmp_path / "none.npz", image=X[:0])
    np.savez(tmp_path / "shape.npz", image=np.zeros((1, 3, 9, 9), np.float32))
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    (tmp_path / "notes.txt").write_text("no")
    path = source if ":" in source else tmp_path / source
    with pytest.raises(error, match=problem):
        list(load_data(path, IMAGE))


def test_several_inputs_need_names(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((1, 4)))
    with pytest.raises(ModelError, match="the model has 2 inputs, and files do not say which they are for"):
        list(load_data(tmp_path, PAIR))
    (tmp_path / "id").mkdir()
    with pytest.raises(ModelError, match=r"no folder for the input ids .*\(did you mean 'id'\?\)"):
        list(load_data(tmp_path, PAIR))
    np.savez(tmp_path / "d.npz", ids=np.zeros((2, 4), np.int64), mask=np.zeros((3, 4), np.float32))
    with pytest.raises(ModelError, match="different numbers of samples"):
        list(load_data(tmp_path / "d.npz", PAIR))


def test_plain_numbers_take_the_type_of_the_input():
    assert as_feeds([[[1, 2, 3, 4]], [[1, 1, 1, 1]]], PAIR)["ids"].dtype == np.int64


@pytest.mark.parametrize("options", [{"layout": "NWHC"}, {"colours": "RGBA"}, {"std": (0.0,)}])
def test_pictures_that_mean_nothing(options):
    with pytest.raises(ConfigError):
        Pictures(**options)


# ---------------------------------------------------------------------------------------------------- commands


@pytest.fixture()
def model(tmp_path: Path) -> Path:
    n = Net()
    y = n("Relu", n.bn(n.conv(n.input("image", ("n", 3, 8, 8)), name="c"), name="bn"), name="r", out="y")
    onnx.save(n.model(y), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", image=X)
    return tmp_path / "m.onnx"


def test_quantize_writes_what_verify_accepts(model, tmp_path):
    out = tmp_path / "out"
    found = CliRunner().invoke(app, ["quantize", str(model), "--data", str(tmp_path / "d.npz"), "--out", str(out)])
    assert found.exit_code == 0, found.output
    assert "steps: done: fold" in found.output and (out / "m.onnx").is_file()
    assert CliRunner().invoke(app, ["verify", str(out)]).exit_code == 0


def test_quantize_without_data_warns(model, tmp_path, caplog):
    found = CliRunner().invoke(app, ["quantize", str(model), "--out", str(tmp_path / "out"), "--preset", "w8a16"])
    assert found.exit_code == 0 and "ranges of activations will be wrong" in caplog.text


def test_inspect_says_what_and_why_not(model):
    found = CliRunner().invoke(app, ["inspect", str(model)])
    assert found.exit_code == 0
    for text in (
        "image (float32, ?x3x8x8)",
        "BatchNormalization",
        "c.weight",
        "normalisation parameters stay in float",
    ):
        assert text in found.output


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--data", "nowhere"], "it does not exist"),
        (["--preset", "w8a88"], "no preset of this name"),
        (["--mean", "a,b", "--data", "d.npz"], "is not a list of numbers"),
    ],
)
def test_commands_answer_mistakes(model, tmp_path, arguments, problem):
    found = CliRunner().invoke(app, ["quantize", str(model), "--out", str(tmp_path / "out"), *arguments])
    assert found.exit_code == 2 and problem in found.output
    assert not (tmp_path / "out").exists()


def test_int_dtype_is_named():
    assert str(InputSpec("i", "int64", (None, 2))) == "i (int64, ?x2)"


def test_an_array_of_another_name_is_not_taken_for_the_input(tmp_path: Path) -> None:
    for name in ("0", "imag", "label"):
        np.savez(tmp_path / "d.npz", **{name: X})
        with pytest.raises(ModelError, match=f"it holds '{name}', which is not an input of the model"):
            list(load_data(tmp_path / "d.npz", IMAGE))
    with pytest.raises(ModelError, match=r"\(did you mean 'image'\?\)"):
        np.savez(tmp_path / "d.npz", imag=X)
        list(load_data(tmp_path / "d.npz", IMAGE))
    np.savez(tmp_path / "d.npz", X)  # without a name
    assert np.array_equal(stacked(tmp_path / "d.npz"), X)


def test_damaged_pictures_are_named(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:-30])
    with pytest.raises(CalibrationError, match=r"a\.png: it cannot be read as a picture: "):
        list(load_data(tmp_path, IMAGE))
    with pytest.raises(ConfigError, match=r"mean: \(1.0, 2.0\) is not one finite number or 3"):
        Pictures(mean=(1.0, 2.0))


def test_pictures_of_more_pixels_than_memory_should_hold_are_refused_unread(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    Image.new("1", (30_000, 5_000)).save(tmp_path / "a.png")
    with pytest.raises(
        CalibrationError, match=r"a\.png: .* 30000 x 5000 pixels, and at most 120,000,000 are read.*smaller"
    ):
        list(load_data(tmp_path, IMAGE))


def test_scalars_beside_samples_are_given_whole(tmp_path: Path) -> None:
    specs = (*IMAGE, InputSpec("factor", "float32", ()))
    np.savez(tmp_path / "d.npz", image=X[:1], factor=np.float32(2))
    (feeds,) = load_data(tmp_path / "d.npz", specs)
    assert feeds["factor"].shape == () and feeds["image"].shape == (1, 3, 8, 8)


@pytest.mark.parametrize(
    "given", [[[1, 2], [3]], [["a", "b", "c", "d"]], [[None, 1, 2, 3]], [[10**400, 1, 2, 3]]],
    ids=["ragged", "words", "nothing", "huge"],
)  # fmt: skip
def test_lists_that_are_no_arrays_are_named(given: Any) -> None:
    with pytest.raises(ModelError, match="what the input ids .* was given is not an array"):
        as_feeds([given, [[1, 1, 1, 1]]], PAIR)


def test_samples_of_different_shapes_make_no_batch(tmp_path: Path) -> None:
    spec = (InputSpec("image", "float32", (None, None, 8, 8)),)
    np.save(tmp_path / "0.npy", X[0])
    np.save(tmp_path / "1.npy", X[0][:2])
    with pytest.raises(ModelError, match=r"file 1: it holds float32 of shape \(2, 8, 8\), and the first"):
        list(load_data(tmp_path, spec, batch_size=2))


def small_model(**weight: object) -> onnx.ModelProto:
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
    onnx.save(small_model(**fields), tmp_path / "m.onnx")
    for source in (tmp_path / "m.onnx", small_model(**fields)):
        with pytest.raises(ModelError, match=f"^w: .*{problem}"):
            load_model(source)


@pytest.mark.parametrize(
    "name", ["FLOAT", "INT4", "UINT2", "FLOAT4E2M1", "FLOAT6E2M3", "BFLOAT16", "COMPLEX64", "INT8"]
)
def test_every_way_to_store_a_tensor_is_known(name: str) -> None:
    dtype = getattr(TensorProto, name)
    for values in ([1] * 5, []):
        proto = small_model()
        proto.graph.initializer.append(helper.make_tensor("spare", dtype, [len(values)], values))
        load_model(proto)
        proto.graph.initializer[-1].dims[0] = 12
        with pytest.raises(ModelError, match="^spare: .* needs"):
            load_model(proto)


def test_attributes_and_bodies_are_looked_at() -> None:
    proto = small_model()
    spoilt = onnx.numpy_helper.from_array(np.zeros(3, np.float32), "spoilt")
    spoilt.dims[0] = 5
    body = helper.make_graph([helper.make_node("Constant", [], ["c"], value=spoilt)], "body", [], [])
    proto.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=body, else_branch=body))
    with pytest.raises(ModelError, match="^spoilt: its shape"):
        load_model(proto)


def outside(folder: Path, location: str) -> Path:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    proto = small_model()
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
    proto = small_model()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert input_specs(load_model(proto).model)[0].shape == (None, 4)
    with pytest.raises(ModelError, match="too many for random data"):
        next(random_feeds([InputSpec("x", "float32", (1 << 62, 4))]))


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"m\.onnx"):
        load_model(tmp_path / "m.onnx")


def test_large_weights_leave_the_message_they_came_in(tmp_path: Path) -> None:
    proto = small_model()
    large = np.random.default_rng(0).standard_normal((4, 500)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(large, "spare"))
    onnx.save(proto, tmp_path / "m.onnx")
    tensor = load_model(tmp_path / "m.onnx").model.graph.initializers["spare"].const_value
    assert tensor is not None and np.array_equal(tensor.numpy(), large)
    assert np.shares_memory(tensor.numpy(), tensor.numpy()), "each look at the weight copies it"


def large(path: Path) -> bytes:
    """A file of several tensors, names, a function and fields out of their order; its content."""
    proto = small_model()
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
    proto = small_model()
    proto.graph.node[0].op_type = "Pad"
    proto.graph.node[0].attribute.add(name="mode", type=onnx.AttributeProto.STRING, s=b"\xff")
    with pytest.raises(ModelError, match=r"the name or text b'\\xff' is not UTF-8. Remedy: export or download"):
        load_model(proto)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"op_type": "LSTM", "input": ["x", "w", "w"]}, "node 'n': it is an LSTM without hidden_size"),
        ({"op_type": "Concat"}, "node 'n': it is a Concat without axis"),
        ({"input": ["x"]}, "node 'n': it is a MatMul of 1 inputs, and takes 2 to 2"),
        ({"input": ["", "w"]}, "node 'n': it is a MatMul without its input A"),
    ],
)
def test_nodes_that_lack_what_their_operator_needs_are_named(change, problem) -> None:
    proto = small_model()
    node = proto.graph.node[0]
    node.name, node.op_type = "n", change.get("op_type", node.op_type)
    if "input" in change:
        del node.input[:]
        node.input.extend(change["input"])
    with pytest.raises(ModelError, match=problem):
        load_model(proto)
