"""What is said of an export's speed once it is written; no test looks at how long anything took."""

import logging
import math

import pytest
import torch
from torch import nn

from bitwright import quantize
from bitwright.compare import benchmark as deployed
from bitwright.compare.benchmark import brief_speed, measured_if_short
from bitwright.errors import ConfigError, ExportError
from bitwright.runtimes.timing import Ratio

X = [torch.randn(1, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def written(folder, **options):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).eval()
    return quantize(net, X, recipe=["fold"], path=folder, progress=False, **options).exported


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return written(tmp_path_factory.mktemp("plain"), measure_speed=False)


@pytest.mark.slow_variants("speed0-True")
@pytest.mark.parametrize(
    ("speed", "warned"), [(Ratio(0.5, 0.48, 0.53), True), (Ratio(0.5, 0.4, 0.6), False), (Ratio(2.0, 1.9, 2.1), False)]
)
def test_quantize_warns_where_the_file_it_wrote_is_slower_than_float(tmp_path, monkeypatch, caplog, speed, warned):
    monkeypatch.setattr(deployed, "brief_speed", lambda *_, **__: speed)
    assert written(tmp_path).speed == speed
    assert (
        "model.onnx: slower than float on this machine: 0.50x (0.48 to 0.53); `bitwright benchmark" in caplog.text
    ) == warned


def test_quantize_measures_what_it_wrote(tmp_path):
    assert 0 < written(tmp_path).speed.median < math.inf


def test_nothing_is_measured_where_that_is_not_asked_for(exported):
    assert exported.speed is None


def test_what_takes_long_to_run_is_not_measured(exported):
    assert brief_speed(exported, slowest=0.0) is None
    assert brief_speed(exported, slowest=60.0) is not None


def test_large_files_are_not_loaded_to_be_measured(exported, monkeypatch):
    monkeypatch.setattr(deployed, "_LARGE", exported.qdq.stat().st_size)
    assert measured_if_short(exported, "ort_cpu").speed is None


@pytest.mark.parametrize("target", ["packed", "litert"])
def test_files_for_what_does_not_run_onnx_are_not_measured(exported, target):
    assert measured_if_short(exported, target).speed is None


def test_a_file_that_its_runtime_refuses_is_a_warning_as_it_is_written(exported, monkeypatch, caplog):
    def refuse(*_, **__):
        raise ExportError("net.onnx", "onnxruntime refuses the file: no kernel", "leave it in float")

    monkeypatch.setattr(deployed, "open_file", refuse)
    assert measured_if_short(exported, "ort_cpu").speed is None
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert told.message.count("not compared with float") == 1
    assert "is complete, but onnxruntime refuses the file: no kernel" in told.message


def test_a_runtime_that_is_not_installed_is_no_warning(exported, monkeypatch, caplog):
    def missing(*_, **__):
        raise ConfigError("onnxruntime", "it is not installed", "pip install onnxruntime")

    monkeypatch.setattr(deployed, "open_file", missing)
    assert measured_if_short(exported, "ort_cpu").speed is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
