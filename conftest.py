"""What pytest collects: examples in docstrings of the package, and tests of ``tests``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parent / "bitwright"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out modules without examples: they need no import here, and some of AIMET's names refuse theirs."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(_PACKAGE):
        return None
    return ">>> " not in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in the package only: a search through everything that tests import finds none.

    Packages are imported first. Where pytest imports a module whose package is not there yet, and the package imports the module,
    pytest makes a second copy, whose classes are others.
    """
    inside = file_path.is_relative_to(_PACKAGE)
    if inside and file_path.suffix == ".py":
        with suppress(ImportError):  # pytest reports it
            import_module(".".join(file_path.parent.relative_to(_PACKAGE.parent).parts))
    found = yield
    if inside:
        return found
    return [each for each in found if type(each) is pytest.Module]
