"""A file of finished layers is what was put there, or it does not count."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bitwright.core import files as documents
from bitwright.errors import ExportError
from bitwright.export.files.atomic import FinishedLayers

KEY, OTHER = "a" * 64, "a" * 32 + "b" * 32  # of one file name
ARRAYS = {
    "0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "1.weight": np.arange(6, dtype=np.float32).reshape(3, 2).T,
    "0.scale": np.array(0.5, np.float32),
    "0.zero_point": np.zeros((), np.int64),
    "0.errors": np.array([1.0, 0.5]),
}


@pytest.fixture
def kept(tmp_path: Path) -> FinishedLayers:
    layers = FinishedLayers(tmp_path / "done")
    layers.put(KEY, ARRAYS)
    return layers


def the_file(layers: FinishedLayers) -> Path:
    (path,) = layers.folder.iterdir()
    return path


def test_what_was_put_comes_back(kept):
    found = kept.get(KEY)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert np.array_equal(found[name], array)
    assert kept.get("b" * 64) is None
    assert FinishedLayers(kept.folder / "absent").get(KEY) is None


def test_every_flipped_bit_is_found(kept, caplog):
    path, whole = the_file(kept), the_file(kept).read_bytes()
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        found = kept.get(KEY)
        # a bit of the header that means nothing, such as a blank, may change
        assert found is None or all(np.array_equal(found[name], ARRAYS[name]) for name in ARRAYS), at
    path.write_bytes(whole[: len(whole) // 2])
    caplog.clear()
    assert kept.get(KEY) is None
    assert f"{path}: it is damaged" in caplog.text and "its layers are computed anew" in caplog.text
    kept.put(KEY, ARRAYS)
    assert path.read_bytes() == whole, "the same bytes in every writing"


def test_numbers_that_were_exchanged_are_found(kept, caplog):
    save_file({**ARRAYS, "0.weight": np.full((2, 3), np.nan, np.float32)}, the_file(kept))
    assert kept.get(KEY) is None and "an earlier version wrote it" in caplog.text


def test_a_file_of_something_else_is_found(kept, caplog):
    assert kept.get(OTHER) is None
    assert "it was written for another model, other data or other options" in caplog.text


def test_what_the_system_refuses_is_an_error(kept, monkeypatch):
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), name)

    monkeypatch.setattr(documents, "_without_waiting", refuse)
    with pytest.raises(ExportError, match="permission was denied. Remedy: choose a path you have access to"):
        kept.get(KEY)


def test_a_full_disk_is_named_and_keeps_the_older_file(kept, monkeypatch):
    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ExportError, match="the disk is full. Remedy: free some space"):
        kept.put(KEY, {})
    assert kept.get(KEY) is not None and len(list(kept.folder.iterdir())) == 1
