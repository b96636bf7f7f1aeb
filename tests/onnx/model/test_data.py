"""Calibration data from files, pictures, Python code and chance; and the commands that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from bitwright.cli import app
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.onnx.model.data import InputSpec, Pictures, as_feeds, load_data, random_feeds
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
