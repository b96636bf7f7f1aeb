"""Documents and arrays from outside: what is accepted, and one short error for everything else."""

from __future__ import annotations

import os
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bitwright.core import files as array_files
from bitwright.core import files as documents
from bitwright.core.files import MAX_BYTES, MAX_DEPTH, read_archive, read_array, read_bytes, read_document
from bitwright.errors import CalibrationError, ConfigError, close_matches

LAUGHS = "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join(['*' + before] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def refused(folder: Path, name: str, text: str | bytes) -> ConfigError:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_document(path, ConfigError)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000
    return caught.value


@pytest.mark.parametrize(
    "name, text, problem",
    [
        pytest.param("a.yaml", LAUGHS, f"aliases written out it is longer than {MAX_BYTES}", id="billion-laughs"),
        pytest.param("a.yaml", MERGES, f"aliases written out it is longer than {MAX_BYTES}", id="merged-laughs"),
        pytest.param("a.yaml", "a: &a [*a]", "the alias *a stands for nothing in front of it", id="alias-of-itself"),
        pytest.param("a.yaml", "a: !!python/name:os.system", "it has the tag 'tag:yaml.org,2002:python", id="tag"),
        pytest.param("a.yaml", "[" * 100_000, f"nested too deeply, beyond {MAX_DEPTH}", id="deep-yaml"),
        pytest.param("a.yaml", "a: 1\nb: 2\na: 3", "line 1: the key 'a' occurs twice", id="repeated-key-yaml"),
        pytest.param("a.yaml", "a: 2001-99-99", "it is not YAML (month must be in 1..12", id="no-date"),
        pytest.param("a.yaml", "? [a]\n: 1", "found unhashable key", id="list-as-key"),
        pytest.param("a.yaml", "a: 0x" + "f" * 5000, "a whole number does not fit into 64 bits", id="hexadecimal"),
        pytest.param("a.json", "[" * 100_000, f"nested too deeply, beyond {MAX_DEPTH}", id="deep-json"),
        pytest.param("a.json", "[" * 70 + "]" * 70, f"nested too deeply, beyond {MAX_DEPTH}", id="70-lists"),
        pytest.param("a.json", '{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs twice", id="repeated-key-json"),
        pytest.param("a.json", '{"a": 1e5, "b": %s}' % ("9" * 30), "does not fit into 64 bits", id="large-number"),
        pytest.param("a.json", "9" * 5000, "it is not JSON (Exceeds the limit", id="number-of-5000-digits"),
        pytest.param("a.json", '["\\ud800"]', "surrogates not allowed", id="lone-surrogate"),
        pytest.param("a.json", b"\xff\xfe{", "it is not JSON ('utf-8' codec", id="not-utf8"),
        pytest.param("a.json", " " * (MAX_BYTES + 1), f"has {MAX_BYTES + 1} bytes, more than {MAX_BYTES}", id="huge"),
        pytest.param("a.toml", "a = " + "[" * 5000, f"nested too deeply, beyond {MAX_DEPTH}", id="deep-toml"),
        pytest.param("a.toml", "a." * 100 + "b = 1", f"nested too deeply, beyond {MAX_DEPTH}", id="dotted-keys"),
        pytest.param("a.toml", "a." * 100_000 + "b = 1", "it has 200005 characters, and at most 8192", id="long-line"),
    ],
)  # fmt: skip
def test_a_limit_that_is_passed_is_named(tmp_path: Path, name: str, text: str | bytes, problem: str) -> None:
    assert problem in str(refused(tmp_path, name, text))


def test_aliases_of_reasonable_size_are_values(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &w {format: int8}\nrules: [*w, {<<: *w, symmetry: symmetric}]\n")
    document = read_document(path, ConfigError)
    assert document["rules"] == [{"format": "int8"}, {"format": "int8", "symmetry": "symmetric"}]


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": [1, 2.5, null]}')
    assert read_document(path, ConfigError) == {"a": [1, 2.5, None]}


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ConfigError, match=r"pipe\.json: it is not a regular file\. Remedy: name a file"):
        read_document(tmp_path / "pipe.json", ConfigError)
    with pytest.raises(ConfigError, match="/dev/zero: it is not a regular file"):
        read_bytes("/dev/zero", 100, ConfigError)
    with pytest.raises(ConfigError, match="the file cannot be read: Is a directory"):
        read_bytes(tmp_path, 100, ConfigError)
    with pytest.raises(ConfigError, match="no file has such a name"):
        read_bytes("a\0b", 100, ConfigError)


def test_messages_are_short_and_can_be_written() -> None:
    error = ConfigError("a\ud800", "x" * 30_000_000, "y")
    assert len(str(error)) < 5_000 and "(29996000 characters left out)" in str(error)
    assert str(error).encode().startswith(b"a\\ud800: xxx")
    assert close_matches("z" * 1_000_000, ["int8" * 1000, "int4"]) == ""


def test_an_alias_stands_for_its_anchor_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before the anchor is not repeated with it."""
    monkeypatch.setattr(documents, "MAX_BYTES", 4000)
    path = tmp_path / "a.yaml"
    path.write_text(f"text: {'x' * 3000}\nbase: &b [1, 2]\nrows: [*b, *b, *b]\n")
    assert read_document(path, ConfigError)["rows"] == [[1, 2]] * 3


ARRAYS = {
    "a": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "fortran": np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
    "scalar": np.float64(2.5),
    "empty": np.zeros((0, 3), np.int8),
    "words": np.array(["one", "three"]),
}


def test_arrays_come_back(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **ARRAYS)
    np.savez_compressed(tmp_path / "b.npz", **ARRAYS)
    for name in ("a.npz", "b.npz"):
        found = read_archive(tmp_path / name, CalibrationError)
        assert list(found) == list(ARRAYS)
        for key, array in found.items():
            assert array.dtype == ARRAYS[key].dtype and array.flags.writeable
            assert np.array_equal(array, ARRAYS[key])
    for key, array in ARRAYS.items():
        np.save(tmp_path / "c.npy", array)
        assert np.array_equal(read_array(tmp_path / "c.npy", CalibrationError), ARRAYS[key]), key


def refused_arrays(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(CalibrationError) as caught:
        (read_array if path.suffix == ".npy" else read_archive)(path, CalibrationError)
    assert str(path) in str(caught.value)
    return caught.value.problem


def test_damaged_arrays_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ARRAYS["a"])
    whole = (tmp_path / "a.npy").read_bytes()
    assert "its header says float32 of shape (2, 3, 4), and 95 bytes follow" in refused_arrays(
        tmp_path / "b.npy", whole[:-1]
    )
    assert "and 97 bytes follow" in refused_arrays(tmp_path / "b.npy", whole + b"\0")
    assert "malformed node" in refused_arrays(tmp_path / "b.npy", whole.replace(b"(2, 3, 4)", b"(9**9**9)"))
    assert "Python objects" in refused_arrays(tmp_path / "b.npy", whole.replace(b"'<f4'", b"'|O' "))
    assert refused_arrays(tmp_path / "b.npy", b"") and refused_arrays(tmp_path / "b.npy", whole[:40])
    huge = whole.replace(b"(2, 3, 4), }   ", b"(99999999999,)}")
    assert huge != whole and "its header says float32 of shape (99999999999,)" in refused_arrays(
        tmp_path / "b.npy", huge
    )


def test_damaged_archives_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", **ARRAYS)
    whole = (tmp_path / "a.npz").read_bytes()
    at = whole.index(ARRAYS["a"].tobytes())
    flipped = whole[:at] + b"\x01" + whole[at + 1 :]
    assert "Bad CRC-32" in refused_arrays(tmp_path / "b.npz", flipped)
    assert "not a zip file" in refused_arrays(tmp_path / "b.npz", whole[:-30])
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        archive.writestr("notes.txt", "no array")
    assert "the magic string is not correct" in refused_arrays(tmp_path / "c.npz", (tmp_path / "c.npz").read_bytes())
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(1 << 20, np.int8))
    monkeypatch.setattr(array_files, "MAX_BEYOND", 1 << 10)
    bomb = (tmp_path / "bomb.npz").read_bytes()
    assert "it unpacks to 1048704 bytes, more than" in refused_arrays(tmp_path / "d.npz", bomb)


def test_reading_takes_no_memory_beside_the_array(tmp_path: Path) -> None:
    """A stream that unpacks hands over what it is asked for as one more copy."""
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1 << 25, np.int8))
    tracemalloc.start()
    try:
        assert read_archive(tmp_path / "a.npz", CalibrationError)["x"].nbytes == 1 << 25
        assert tracemalloc.get_traced_memory()[1] < (1 << 25) + (8 << 20)
    finally:
        tracemalloc.stop()


def test_an_array_file_that_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(CalibrationError, match="it is not a regular file"):
        read_archive(tmp_path / "pipe.npz", CalibrationError)
    with pytest.raises(CalibrationError, match="No such file"):
        read_array(tmp_path / "none.npy", CalibrationError)
