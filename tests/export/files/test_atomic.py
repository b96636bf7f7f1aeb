"""A file is the old one or the new one; files of finished layers and of spooled arrays come back as they went."""

from __future__ import annotations

import errno
import fcntl
import inspect
import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from bitwright.core import files as documents
from bitwright.errors import ConfigError, ExportError
from bitwright.export.files import atomic as spooled
from bitwright.export.files.atomic import (
    FinishedLayers,
    Spool,
    Spooled,
    atomic_files,
    atomic_write,
    check_stem,
    file_error,
    settle,
)


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


atomic_set = partial(atomic_files, name="manifest.json")


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
    with pytest.raises(ExportError, match="a part of this path is a file, not a folder. Remedy: name a path whose"):
        write(tmp_path / "file" / "a.json")


def test_target_is_a_folder(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ExportError, match="there is a folder of this name. Remedy: name a file, or move the folder"):
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


@pytest.mark.parametrize("context, name", [(atomic_write, "out/a.json"), (atomic_set, "out")])
def test_an_error_about_another_file_is_not_ours(tmp_path, context, name):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileNotFoundError, match="weights.bin"), context(tmp_path / name):
        (tmp_path / "absent" / "weights.bin").read_bytes()
    assert names(tmp_path / "out") == []


def test_an_error_code_without_an_entry_keeps_its_text():
    error = file_error("a.json", OSError(errno.ENXIO, "No such device"))
    assert str(error) == "a.json: No such device. Remedy: check the path and its file system"


def test_a_set_of_files_moves_in_together(tmp_path):
    (tmp_path / "m.onnx").write_text("old")
    (tmp_path / "other").write_text("mine")
    with atomic_set(tmp_path) as staging:
        (staging / "m.onnx").write_text("new")
        (staging / "manifest.json").write_text("{}")
        assert (tmp_path / "m.onnx").read_text() == "old"
    assert names(tmp_path) == ["m.onnx", "manifest.json", "other"]
    assert (tmp_path / "m.onnx").read_text() == "new"


def test_the_file_that_names_the_set_moves_last(tmp_path, monkeypatch):
    order, replace = [], os.replace

    def watched(source: Path, destination: Path) -> None:
        order.append(destination.name)
        replace(source, destination)

    monkeypatch.setattr(os, "replace", watched)
    with atomic_files(tmp_path, name="a") as staging:
        for name in "abc":
            (staging / name).touch()
    assert order == ["b", "c", "a"]


def test_files_of_the_earlier_set_alone_are_removed(tmp_path):
    for name in ("a", "b", "mine"):
        (tmp_path / name).write_text("old")
    with atomic_set(tmp_path, stale=["a", "b", "gone", "../up", ".."]) as staging:
        (staging / "a").write_text("new")
    assert names(tmp_path) == ["a", "mine"] and (tmp_path / "a").read_text() == "new"


def test_a_failing_set_changes_nothing(tmp_path):
    (tmp_path / "m.onnx").write_text("old")
    with pytest.raises(ValueError, match="no"), atomic_set(tmp_path, stale=["m.onnx"]) as staging:
        (staging / "m.onnx").write_text("new")
        raise ValueError("no")
    assert names(tmp_path) == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_text() == "old"


def test_a_folder_in_the_way_of_one_file_stops_all(tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(ExportError, match="there is a folder of this name") as caught:
        with atomic_set(tmp_path) as staging:
            (staging / "a").touch()
            (staging / "b").touch()
    assert caught.value.site == str(tmp_path / "b")
    assert names(tmp_path) == ["b"]


def test_a_missing_folder_is_made_on_request(tmp_path):
    with atomic_set(tmp_path / "x" / "y", create=True) as staging:
        (staging / "a").touch()
    assert names(tmp_path / "x" / "y") == ["a"]
    with pytest.raises(ExportError, match="there is no such file or folder"), atomic_set(tmp_path / "z"):
        pass


def stopped(folder: Path, at: int, monkeypatch: pytest.MonkeyPatch, text: str = "new") -> None:
    """Write a set of three files, and stop as a killed process does before the ``at``-th move."""
    left, replace = [at], os.replace

    def killed(*paths: Path) -> None:
        if not left[0]:
            raise SystemError
        left[0] -= 1
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(SystemError), atomic_set(folder, create=True) as staging:
            for name in ("a", "b", "manifest.json"):
                (staging / name).write_text(text)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_set_that_was_complete_is_moved_in_by_the_next_reader(tmp_path, monkeypatch, at):
    stopped(tmp_path, at, monkeypatch)
    assert ".manifest.json.bitwright-commit" in names(tmp_path)
    settle(tmp_path)
    assert names(tmp_path) == ["a", "b", "manifest.json"]
    assert {path.read_text() for path in tmp_path.iterdir()} == {"new"}
    settle(tmp_path)
    settle(tmp_path / "absent")


def test_a_set_that_was_complete_comes_before_the_next_one(tmp_path, monkeypatch):
    stopped(tmp_path, 1, monkeypatch, "first")
    with atomic_set(tmp_path) as staging:
        (staging / "a").write_text("second")
    assert names(tmp_path) == ["a", "b", "manifest.json"]
    assert [(tmp_path / name).read_text() for name in ("a", "b")] == ["second", "first"]


def test_two_writers_leave_the_set_of_one_of_them(tmp_path, monkeypatch):
    with atomic_set(tmp_path) as staging:
        for name in ("a", "b", "manifest.json"):
            (staging / name).write_text("late")
        stopped(tmp_path, 1, monkeypatch, "early")  # committed in the meantime, and killed
    assert names(tmp_path) == ["a", "b", "manifest.json"]
    assert {path.read_text() for path in tmp_path.iterdir()} == {"late"}


def test_a_set_that_cannot_be_moved_in_is_named(tmp_path, monkeypatch):
    stopped(tmp_path, 0, monkeypatch)

    def refuse(*paths: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(paths[0]))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ExportError, match="complete new files lie in .*: the file system is read-only.*next call"):
        settle(tmp_path)


def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path):
    for name, old in (("dead", True), ("young", False), ("living", True)):
        folder = tmp_path / f".manifest.json.{name}.bitwright-partial"
        folder.mkdir()
        (folder / "m.onnx").write_text("half")
        if old:
            os.utime(folder, (0, 0))
    lock = os.open(tmp_path / ".manifest.json.living.bitwright-partial", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with atomic_set(tmp_path) as staging:
        (staging / "a").touch()
    os.close(lock)
    assert names(tmp_path) == [".manifest.json.living.bitwright-partial", ".manifest.json.young.bitwright-partial", "a"]


@pytest.mark.parametrize("write_file", [True, False], ids=["one-file", "set"])
def test_a_file_beyond_the_limit_on_sizes_is_explained(tmp_path, write_file):
    (tmp_path / "a.json").write_text("old")
    code = f"""
import resource, sys
from bitwright.export.files.atomic import *
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with {'atomic_write("a.json")' if write_file else 'atomic_files(".", name="a.json")'} as path:
        {"path" if write_file else "(path / 'a.json')"}.write_bytes(bytes(5000))
except ExportError as error:
    print(error)
"""
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "too large for the file system or the limit of your account. Remedy: choose another disk" in child.stdout
    assert names(tmp_path) == ["a.json"] and (tmp_path / "a.json").read_text() == "old"


@pytest.mark.parametrize(
    "stem, problem",
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("../../up", "cannot have '/'"),
        ("/etc/up", "cannot have '/'"),
        ("a\\b", "cannot have"),
        ("C:up", "cannot have ':'"),
        ("a\0b", "cannot have"),
        ("a\nb", "cannot have"),
        ("what?", "cannot have '\\?'"),
        ("..", "starts with a dot"),
        (".hidden", "starts with a dot"),
        ("a ", "starts or ends with a space"),
        ("ä" * 100, "it has 200 bytes, more than 128"),
        (None, "it is a NoneType, not a string"),
    ],
    ids=repr,
)
def test_a_stem_that_leads_out_of_the_folder_is_refused(stem, problem):
    with pytest.raises(ConfigError, match=f"filename_prefix=.*{problem}.*Remedy: give the first part"):
        check_stem(stem)


@pytest.mark.parametrize("stem", ["model", "mobilenet-v2.1", "a b", "größe", "net[0]", "x" * 128])
def test_a_stem_that_can_be_a_name_is_taken(stem):
    assert check_stem(stem) == stem


@pytest.mark.parametrize("error", [None, ValueError])
@pytest.mark.parametrize("writes", ["a file", "a set"])
def test_ctrl_c_at_any_moment_leaves_the_old_files_or_the_new_ones(tmp_path, writes, error):
    """Python acts on signals when a function begins and when one in C returns: each of these moments is tried in turn."""

    def write() -> None:
        if writes == "a file":
            with atomic_write(tmp_path / "a.json") as temporary:
                temporary.write_text("new")
                if error:
                    raise error
        else:
            with atomic_files(tmp_path, name="a.json") as folder:
                (folder / "a.json").write_text("new")
                (folder / "b.bin").write_text("new")
                if error:
                    raise error

    def stopped(moment: int) -> bool:
        moments = itertools.count()

        def press(frame: FrameType, event: str, called: object) -> None:
            # An error of this function in a generator ends it without its finally blocks; one of a signal does not.
            begins = event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR
            if (begins or event == "c_return") and next(moments) == moment:
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(press)
        try:
            write()
        except KeyboardInterrupt:
            return True
        except OSError as refused:  # shutil.rmtree closes a folder twice where it is stopped after the first time
            return isinstance(refused.__context__, KeyboardInterrupt)
        except ValueError:
            assert error
        finally:
            sys.setprofile(None)
        return False

    old = {"a.json": "old"} if writes == "a file" else {"a.json": "old", "b.bin": "old"}
    found = []
    for moment in itertools.count():
        for name, text in old.items():
            (tmp_path / name).write_text(text)
        again = stopped(moment)
        found.append({path.name: path.read_text() for path in tmp_path.iterdir()})
        assert found[-1] in (old, dict.fromkeys(old, "new")), (moment, found[-1])
        if not again:
            break
    assert len(found) > 50 and found[0] == old and found[-1] == (old if error else dict.fromkeys(old, "new"))


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


@pytest.mark.parametrize("held", [8, 1 << 20], ids=["in a file", "in memory"])
def test_arrays_come_back_as_they_went(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled, "HELD", held)
    spool = Spool()
    first, second = Spooled(spool), Spooled(spool)
    given = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 4), np.float32), np.full((1, 1), 7, np.float32)]
    for x in given:
        first.append(x)
        second.append(torch.from_numpy(x.copy()).half())
        second.append(torch.from_numpy(x.copy()).t() if x.ndim == 2 else torch.from_numpy(x.copy()))
    assert len(first) == 3 and first.nbytes == 28
    assert all(a.dtype == np.float32 and np.array_equal(a, b) for a, b in zip(first, given, strict=True))
    assert np.array_equal(first[-1], given[-1]) and first[0].flags.writeable
    assert np.array_equal(second[0], given[0]) and np.array_equal(second[1], given[0].T)
    last = second[-2:]
    assert len(last) == 2 and np.array_equal(last[1], given[2]) and len(second[6:]) == 0


def test_a_full_disk_is_named() -> None:
    spool = Spool()

    class Full:
        def seek(self, place: int) -> None:
            pass

        def write(self, content: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    spool._file = Full()
    with pytest.raises(ExportError, match="has no room"):
        Spooled(spool).append(np.zeros(3, np.float32))
