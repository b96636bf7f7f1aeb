"""A file is the old one or the new one, and a refused path is explained."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bitwright.errors import ExportError
from bitwright.export.atomic import atomic_files, atomic_write, file_error


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_file_appears_when_the_body_ends(tmp_path):
    target = tmp_path / "a.json"
    with atomic_write(target) as temporary:
        temporary.write_text("new")
        assert not target.exists()
        assert (temporary.parent, temporary.suffix) == (tmp_path, ".json")
    assert names(tmp_path) == ["a.json"]
    assert target.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failing_body_leaves_the_old_file_and_nothing_else(tmp_path, error):
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(type(error)), atomic_write(target) as temporary:
        temporary.write_text("half of the n")
        raise error
    assert names(tmp_path) == ["a.json"]
    assert target.read_text() == "old"


def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    with atomic_write(tmp_path / "ours") as temporary:
        temporary.write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_write(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_name_as_long_as_the_file_system_allows(tmp_path):
    target = tmp_path / ("n" * 240 + ".encodings")
    with atomic_write(target) as temporary:
        temporary.write_text("x")
    assert target.read_text() == "x"


def write(path: Path) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text("x")


def test_missing_folder(tmp_path):
    target = tmp_path / "absent" / "a.json"
    with pytest.raises(ExportError) as caught:
        write(target)
    assert str(caught.value) == (
        f"{target}: there is no such file or folder. Remedy: create the folder first, or check the spelling"
    )
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_parent_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ExportError, match="a part of this path is a file, not a folder. Remedy: name a path whose"
    ):
        write(tmp_path / "file" / "a.json")


def test_target_is_a_folder(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(
        ExportError, match="there is a folder of this name. Remedy: name a file, or move the folder"
    ):
        write(tmp_path / "a.json")
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    "code, message",
    [
        (errno.EACCES, "permission was denied. Remedy: choose a path you have access to"),
        (errno.EROFS, "the file system is read-only. Remedy: choose a folder on a writable file system"),
    ],
)
def test_refused_folder(tmp_path, monkeypatch, code, message):
    def refuse(self: Path, **_: object) -> None:
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "touch", refuse)  # the tests may run as root, whom no permission stops
    with pytest.raises(ExportError, match=message) as caught:
        write(tmp_path / "a.json")
    assert caught.value.site == str(tmp_path / "a.json")


def test_full_disk_keeps_the_old_file(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(ExportError, match="the disk is full. Remedy: free some space"):
        with atomic_write(target) as temporary:
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == ["a.json"]
    assert target.read_text() == "old"


@pytest.mark.parametrize("context, name", [(atomic_write, "out/a.json"), (atomic_files, "out")])
def test_an_error_about_another_file_is_not_ours(tmp_path, context, name):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileNotFoundError, match="weights.bin"), context(tmp_path / name):
        (tmp_path / "absent" / "weights.bin").read_bytes()
    assert names(tmp_path / "out") == []


def test_an_error_code_without_an_entry_keeps_its_text():
    error = file_error("a.json", OSError(errno.EIO, "Input/output error"))
    assert str(error) == "a.json: Input/output error. Remedy: check the path and its file system"


def test_a_set_of_files_moves_in_together(tmp_path):
    (tmp_path / "m.onnx").write_text("old")
    (tmp_path / "other").write_text("mine")
    with atomic_files(tmp_path, last="manifest.json") as staging:
        (staging / "m.onnx").write_text("new")
        (staging / "manifest.json").write_text("{}")
        (staging / "data").mkdir()
        (staging / "data" / "w.bin").write_text("w")
        assert (tmp_path / "m.onnx").read_text() == "old"
    assert names(tmp_path) == ["data", "m.onnx", "manifest.json", "other"]
    assert (tmp_path / "m.onnx").read_text() == "new"
    assert (tmp_path / "data" / "w.bin").read_text() == "w"


def test_the_file_named_last_moves_last(tmp_path, monkeypatch):
    order, replace = [], os.replace

    def watched(source: Path, destination: Path) -> None:
        order.append(destination.name)
        replace(source, destination)

    monkeypatch.setattr(os, "replace", watched)
    with atomic_files(tmp_path, last="a") as staging:
        for name in "abc":
            (staging / name).touch()
    assert order == ["b", "c", "a"]


def test_a_failing_set_changes_nothing(tmp_path):
    (tmp_path / "m.onnx").write_text("old")
    with pytest.raises(ValueError, match="no"), atomic_files(tmp_path) as staging:
        (staging / "m.onnx").write_text("new")
        raise ValueError("no")
    assert names(tmp_path) == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_text() == "old"


def test_a_folder_in_the_way_of_one_file_stops_all(tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(ExportError, match="there is a folder of this name") as caught:
        with atomic_files(tmp_path) as staging:
            (staging / "a").touch()
            (staging / "b").touch()
    assert caught.value.site == str(tmp_path / "b")
    assert names(tmp_path) == ["b"]


def test_a_missing_folder_is_made_on_request(tmp_path):
    with atomic_files(tmp_path / "x" / "y", create=True) as staging:
        (staging / "a").touch()
    assert names(tmp_path / "x" / "y") == ["a"]
    with pytest.raises(ExportError, match="there is no such file or folder"), atomic_files(tmp_path / "z"):
        pass
