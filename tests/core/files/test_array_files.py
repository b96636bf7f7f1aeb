"""Arrays from files nobody vouches for."""

from __future__ import annotations

import os
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bitwright.core import files as array_files
from bitwright.core.files import read_archive, read_array
from bitwright.errors import CalibrationError

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


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(CalibrationError) as caught:
        (read_array if path.suffix == ".npy" else read_archive)(path, CalibrationError)
    assert str(path) in str(caught.value)
    return caught.value.problem


def test_damaged_arrays_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ARRAYS["a"])
    whole = (tmp_path / "a.npy").read_bytes()
    assert "its header says float32 of shape (2, 3, 4), and 95 bytes follow" in refused(tmp_path / "b.npy", whole[:-1])
    assert "and 97 bytes follow" in refused(tmp_path / "b.npy", whole + b"\0")
    assert "malformed node" in refused(tmp_path / "b.npy", whole.replace(b"(2, 3, 4)", b"(9**9**9)"))
    assert "Python objects" in refused(tmp_path / "b.npy", whole.replace(b"'<f4'", b"'|O' "))
    assert refused(tmp_path / "b.npy", b"") and refused(tmp_path / "b.npy", whole[:40])
    huge = whole.replace(b"(2, 3, 4), }   ", b"(99999999999,)}")
    assert huge != whole and "its header says float32 of shape (99999999999,)" in refused(tmp_path / "b.npy", huge)


def test_damaged_archives_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", **ARRAYS)
    whole = (tmp_path / "a.npz").read_bytes()
    at = whole.index(ARRAYS["a"].tobytes())
    flipped = whole[:at] + b"\x01" + whole[at + 1 :]
    assert "Bad CRC-32" in refused(tmp_path / "b.npz", flipped)
    assert "not a zip file" in refused(tmp_path / "b.npz", whole[:-30])
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        archive.writestr("notes.txt", "no array")
    assert "the magic string is not correct" in refused(tmp_path / "c.npz", (tmp_path / "c.npz").read_bytes())
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(1 << 20, np.int8))
    monkeypatch.setattr(array_files, "MAX_BEYOND", 1 << 10)
    bomb = (tmp_path / "bomb.npz").read_bytes()
    assert "it unpacks to 1048704 bytes, more than" in refused(tmp_path / "d.npz", bomb)


def test_reading_takes_no_memory_beside_the_array(tmp_path: Path) -> None:
    """A stream that unpacks hands over what it is asked for as one more copy."""
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1 << 25, np.int8))
    tracemalloc.start()
    try:
        assert read_archive(tmp_path / "a.npz", CalibrationError)["x"].nbytes == 1 << 25
        assert tracemalloc.get_traced_memory()[1] < (1 << 25) + (8 << 20)
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(CalibrationError, match="it is not a regular file"):
        read_archive(tmp_path / "pipe.npz", CalibrationError)
    with pytest.raises(CalibrationError, match="No such file"):
        read_array(tmp_path / "none.npy", CalibrationError)
