"""A manifest says what made the files, and notices when they are no longer those."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bitwright
from bitwright.errors import ConfigError, ExportError
from bitwright.export.files.manifest import Fingerprint, fingerprint, read_manifest, write_manifest


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    (tmp_path / "net.onnx").write_bytes(b"model" * 1000)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "weights.bin").write_bytes(b"\0" * 10)
    (tmp_path / ".hidden").write_text("no")
    return tmp_path


def test_round_trip_keeps_everything(exported: Path) -> None:
    written = write_manifest(
        exported / "manifest.json",
        settings={"preset": "w8a8", "rules": [{"match": "conv*", "weight": None}], "größe": 1.5},
        seeds={"numpy": 7},
        data=fingerprint([np.ones(3)]),
        notes=["fc.bias: stays in float"],
        created="2030-01-01",
    )
    assert read_manifest(exported / "manifest.json", check=True) == written
    assert [f.name for f in written.files] == ["more/weights.bin", "net.onnx"]
    assert written.files[1].size == 5000
    assert written.versions["bitwright"] == bitwright.__version__ and "numpy" in written.versions


def test_equal_exports_give_equal_manifests(exported: Path) -> None:
    texts = []
    for _ in range(2):
        write_manifest(exported / "manifest.json", settings={"a": 1})
        texts.append((exported / "manifest.json").read_bytes())
    assert texts[0] == texts[1], "the manifest itself is not among its files, and no time is written"


def test_files_of_a_staging_folder_are_named_relative_to_it(
    exported: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other") / "manifest.json"
    written = write_manifest(other, folder=exported, files=["net.onnx"])
    assert [f.name for f in written.files] == ["net.onnx"]
    assert written.problems(exported) == [] and written.problems(other.parent) == ["net.onnx is missing"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(lambda p: p.unlink(), "net.onnx is missing", id="missing"),
        pytest.param(lambda p: p.write_bytes(b"m"), "net.onnx has 1 bytes instead of 5000", id="size"),
        pytest.param(
            lambda p: p.write_bytes(b"MODEL" * 1000), "net.onnx has another content than was written", id="content"
        ),
    ],
)
def test_changed_files_are_named(exported: Path, damage: Any, problem: str) -> None:
    write_manifest(exported / "manifest.json")
    damage(exported / "net.onnx")
    read_manifest(exported / "manifest.json")
    with pytest.raises(ExportError, match=f"manifest.json: {problem}. Remedy: export again"):
        read_manifest(exported / "manifest.json", check=True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("{", r"it is not JSON \(Expecting", id="broken-json"),
        pytest.param("[]", "the key 'version' is missing", id="no-mapping"),
        pytest.param('{"version": 2, "files": []}', "names another one", id="version"),
        pytest.param('{"version": 1, "files": [], "file": 1}', r"unknown keys \['file'\]", id="unknown-key"),
        pytest.param('{"version": 1}', "'files'", id="no-files"),
        pytest.param('{"version": 1, "files": [{"name": "a"}]}', "sha256", id="bad-entry"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ExportError, match=problem):
        read_manifest(tmp_path / "m.json")


def test_missing_manifest_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"m\.json: there is no such file"):
        read_manifest(tmp_path / "m.json")
    with pytest.raises(ExportError, match=r"gone\.onnx: there is no such file"):
        write_manifest(tmp_path / "m.json", files=["gone.onnx"])


@pytest.mark.parametrize("value", [np.float32(1), float("nan"), {1, 2}], ids=["numpy", "nan", "set"])
def test_settings_are_plain_json(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="manifest settings: they are not plain JSON"):
        write_manifest(tmp_path / "m.json", settings={"a": value})
    assert not (tmp_path / "m.json").exists()


@dataclasses.dataclass
class Pair:
    image: Any
    label: Any


def test_fingerprint_sees_values_types_shapes_order_and_nesting() -> None:
    a, b = np.arange(6, dtype=np.float32), np.ones(2, np.float32)
    variants = [
        [a, b], [b, a], [(a, b)], [{"x": a, "y": b}], [{"y": a, "x": b}], [a.reshape(2, 3), b],
        [a.astype(np.float64), b], [a + 1e-7, b], [Pair(a, b)], [a, b, None], [a, b, "label"],
        [np.concatenate([a, b])], [],
    ]  # fmt: skip
    assert len({fingerprint(v) for v in variants}) == len(variants)
    assert fingerprint(variants[0]).startswith("sha256:")


def test_fingerprint_is_the_same_for_numpy_and_torch_and_for_strided_views() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert fingerprint([torch.from_numpy(array)]) == fingerprint([array]) == fingerprint([array.T.copy().T])
    half = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    assert fingerprint([half]) == fingerprint([torch.ones(3)])


def test_deep_nesting_needs_no_recursion() -> None:
    deep: Any = np.ones(1)
    for _ in range(5000):
        deep = [deep]
    assert fingerprint([deep]).startswith("sha256:")


def test_watching_hashes_what_passes_and_reads_data_once() -> None:
    seen = Fingerprint()
    batches = [np.full(3, i) for i in range(4)]
    passed = list(seen.watch(iter(batches)))
    assert all(x is y for x, y in zip(passed, batches, strict=True)) and str(seen) == fingerprint(batches)


@pytest.mark.parametrize("thing", [object(), np.array([object()])], ids=["object", "object-array"])
def test_what_has_no_bytes_is_refused(thing: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be fingerprinted"):
        fingerprint([{"x": thing}])


def test_manifest_is_readable_text(exported: Path) -> None:
    write_manifest(exported / "manifest.json", notes=["größer"])
    text = (exported / "manifest.json").read_text(encoding="utf-8")
    assert "größer" in text and json.loads(text)["version"] == 1
