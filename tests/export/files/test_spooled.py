"""Arrays in a temporary file come back as they went, of any library, and a full disk is named."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from bitwright.errors import ExportError
from bitwright.export.files import atomic as spooled
from bitwright.export.files.atomic import Spool, Spooled


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
