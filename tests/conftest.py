"""What every test runs under: one thread, fixed seeds; and the fixtures of the developer data set.

The process that hands out tests to others loads this file too, and waits for what it imports: torch is imported inside.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support import data

# The same examples on every run, and no example fails because the machine was busy.
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# Two warnings of torch about its own speed, raised by models that are meant to be that way.
_EXPECTED = (
    "ignore:Using padding='same' with even kernel lengths:UserWarning",
    "ignore:LSTM with projections is not supported with oneDNN:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    # One thread: sums do not depend on the machine, and neighbouring test processes do not fight. Torch, our sessions
    # and child processes take it from the environment.
    os.environ["OMP_NUM_THREADS"] = "1"
    for line in _EXPECTED:
        config.addinivalue_line("filterwarnings", line)


# Tests that take more than 0.05 s of CPU time, as measured: tools/test_time.py writes the list.
_COSTLY = Path(__file__).with_name("costly.txt")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests of trained models and real pictures as slow, and those of the list as costly."""
    costly = {f"tests/{name}" for name in _COSTLY.read_text(encoding="utf-8").splitlines()}
    found = {item.nodeid.partition("[")[0] for item in items}
    for item in items:
        if "shared_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
        if item.nodeid.partition("[")[0] in costly:
            item.add_marker(pytest.mark.costly)
    files = {name.partition("::")[0] for name in found}
    gone = {name for name in costly - found if name.partition("::")[0] in files}
    if gone and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(
            f"{_COSTLY} names tests that do not exist: {sorted(gone)}. Remove these lines, or rename them."
        )


def pytest_collection_finish() -> None:
    import torch

    torch.set_num_threads(1)  # where something had imported it before
    # Modules and tests stay: the collector need not look at the million objects that they are again and again. The
    # exporter makes so many short-lived ones that its default threshold cost a tenth of the time of all tests.
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    # In each phase of a test pytest attaches two handlers to every logger that does not propagate, of which torch has 50:
    # 0.4 ms a test. Those that propagate reach the same handlers at the root.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _seeds(request: pytest.FixtureRequest) -> None:
    """Seeds that depend on the test's name only: neither on the order of tests nor on which of them run."""
    import numpy as np
    import torch

    seed = zlib.crc32(request.node.name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed queues a call for devices that are not there


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the developer data set; the test is skipped where there is none."""
    from tests.support import data

    if not data.have_shared_data():
        pytest.skip(data.why_not())
    return data.DATA


@pytest.fixture(scope="session")
def cifar(shared_data: Path) -> data.Images:
    """2000 CIFAR-10 test images, normalised."""
    from tests.support import data

    return data.cifar("test")


@pytest.fixture(scope="session")
def cifar_train(shared_data: Path) -> data.Images:
    """4000 CIFAR-10 training images, normalised: calibration data."""
    from tests.support import data

    return data.cifar("train")


@pytest.fixture(scope="session")
def imagenet(shared_data: Path) -> data.Images:
    """400 photographs of the ImageNet sample to test on."""
    from tests.support import data

    return data.imagenet("test")


@pytest.fixture(scope="session")
def imagenet_calibration(shared_data: Path) -> data.Images:
    """100 photographs of the ImageNet sample to calibrate on."""
    from tests.support import data

    return data.imagenet("calibration")


@pytest.fixture(autouse=True, scope="session")
def signed_weights() -> Iterator[None]:
    """Exports of tests store signed weights on every CPU: those of one without VNNI would be unsigned where sums saturate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bitwright.compare.verify._lost_to_saturation", lambda *args, **options: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_registry() -> Iterator[None]:
    """``torch.onnx.export`` reads the signatures of its 500 translations once for all tests: 0.7 s of every export."""
    import copy
    from functools import cache

    from torch.onnx._internal.exporter import _registration

    made = cache(_registration.ONNXRegistry.from_torchlib)

    def from_torchlib(**options: Any) -> _registration.ONNXRegistry:
        registry = copy.copy(made(**options))
        registry.functions = {target: list(rows) for target, rows in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_registration.ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        yield
