"""Certificates: repeated they agree, a changed byte of any file is named, and another machine's difference is explained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bitwright.torch
from bitwright.cli.app import app
from bitwright.compare.certificate import (
    _digest,
    _text,
    certify,
    check_certificate,
    compare_certificates,
    compare_manifests,
    read_certificate,
)
from bitwright.errors import ConfigError, ExportError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with its certificate."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)).eval()
    data = [torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    found = tmp_path_factory.mktemp("certified")
    options = {"recipe": ["fold"], "progress": False, "measure_speed": False, "filename_prefix": "net"}
    bitwright.torch.quantize(net, data, path=found, **options)  # type: ignore[arg-type]
    certify(found)
    return found


def rewritten(file: Path, to: Path, change) -> Path:
    """A certificate as another machine would have written it."""
    document = json.loads(file.read_text())
    change(document)
    document.pop("digest")
    to.write_text(_text({**document, "digest": _digest(document)}))
    return to


def test_repeated_here_every_answer_is_equal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = read_certificate(folder / "net_certificate.json")
    assert set(document["answers"]) >= {"ort_x64", "ort_x64_avx2", "onnxruntime"}
    assert set(document["files"]) >= {"net.onnx", "net.encodings", "net_samples.npz"}
    report = check_certificate(folder)
    assert report.ok and not report.differences and report.answers > 6
    app(["verify", str(folder), "--certificate"], standalone_mode=False)
    assert "all files are equal" in capsys.readouterr().out


def test_a_changed_byte_anywhere_is_found(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        for at in rng.integers(0, len(content), 3):
            changed = bytearray(content)
            changed[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(changed)
            try:
                report = check_certificate(folder)
            except ExportError as error:
                assert file.name in str(error)
            else:
                assert not report.ok and file.name == "net_manifest.json"
        file.write_bytes(content)
    assert check_certificate(folder).ok


@pytest.mark.parametrize(
    "key, value",
    [("answers", {"ort_x64": 3}), ("machine", {"system": "", "cpu": ""}), ("others", [{}]), ("files", "none")],
)
def test_entries_of_another_kind_are_refused_though_their_digest_is_right(
    folder: Path, tmp_path: Path, key: str, value: object
) -> None:
    changed = rewritten(folder / "net_certificate.json", tmp_path / "c.json", lambda found: found.update({key: value}))
    with pytest.raises(ExportError, match=f"{key} is not what a certificate holds there"):
        read_certificate(changed)


def test_a_name_that_is_no_text_is_a_change(folder: Path, tmp_path: Path) -> None:
    def rename(found) -> None:
        found["files"]["\ud800"] = found["files"].pop("net.onnx")

    changed = rewritten(folder / "net_certificate.json", tmp_path / "c.json", rename)
    with pytest.raises(ExportError, match="it was changed since it was written: .*surrogates not allowed"):
        read_certificate(changed)


def test_a_file_that_came_later_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner = folder / "parts"
    inner.mkdir()
    for late in (folder / "net.onnx.data", inner / "weights.bin"):
        late.write_bytes(b"not of this export")
        report = check_certificate(folder)
        name = late.relative_to(folder).as_posix()
        assert not report.ok
        assert [(d.what, d.name, d.first, d.second) for d in report.differences] == [
            ("other file", name, "absent", "present")
        ]
        assert app(["verify", str(folder), "--certificate"], standalone_mode=False) == 1
        assert f"other file {name} differs" in capsys.readouterr().out
        certify(folder)  # with the file, which is known from now on
        assert check_certificate(folder).ok
        late.unlink()
        report = check_certificate(folder)
        assert not report.ok and str(report).startswith(f"other file {name} differs")
        certify(folder)
    inner.rmdir()


def test_the_files_of_another_export_are_its_own(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(1)
    options = {"recipe": ["fold"], "progress": False, "measure_speed": False, "filename_prefix": "second"}
    data = [torch.randn(2, 3)]
    bitwright.torch.quantize(nn.Linear(3, 2).eval(), data, path=tmp_path, **options)  # type: ignore[arg-type]
    certify(tmp_path, "second")
    assert check_certificate(tmp_path, "net").ok and check_certificate(tmp_path, "second").ok


def test_two_machines_are_told_apart(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = folder / "net_certificate.json"

    def elsewhere(document) -> None:
        document["machine"]["features"] = [*document["machine"]["features"], "sme2"]
        document["versions"]["onnxruntime"] = "1.30.0"
        document["answers"]["onnxruntime"] = dict.fromkeys(document["answers"]["onnxruntime"], "0" * 64)

    other = rewritten(mine, tmp_path / "other_certificate.json", elsewhere)
    report = compare_certificates(mine, other)
    assert not report.ok
    assert [(d.what, d.name) for d in report.differences] == [
        ("version", "onnxruntime"), ("instruction set", "sme2"), ("answer of onnxruntime", "output"),
    ]  # fmt: skip
    first = str(report).splitlines()[0]
    assert first.startswith(
        "answer of onnxruntime differs, first at output; what differs besides: version onnxruntime, "
    )
    assert app(["diff", str(mine), str(other)], standalone_mode=False) == 1
    assert "instruction set sme2" in capsys.readouterr().out


def test_two_manifests_are_compared(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = folder / "net_manifest.json", tmp_path / "other_manifest.json"
    document = json.loads(mine.read_text())
    document["versions"]["onnxruntime"] = "1.30.0"
    other.write_text(json.dumps(document))
    report = compare_manifests(mine, other)
    assert report.ok and str(report).startswith("all files are equal; 1 facts of versions and machines differ")
    document["files"][0]["sha256"] = "0" * 64
    document["settings"]["target"] = "litert"
    other.write_text(json.dumps(document))
    assert app(["diff", str(mine), str(other)], standalone_mode=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file {document['files'][0]['name']} differs"
    assert [line.split()[:2] for line in lines[3:]] == [
        ["file", document["files"][0]["name"]], ["setting", "target"], ["version", "onnxruntime"],
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="both are .*Remedy: name two manifests"):
        compare_manifests(mine, mine)


def test_wrong_certificates_are_refused(folder: Path, tmp_path: Path) -> None:
    mine = folder / "net_certificate.json"
    later = rewritten(mine, tmp_path / "a_certificate.json", lambda document: document.__setitem__("version", 7))
    with pytest.raises(
        ExportError, match="certificate of version 7, and this Bitwright reads version 2.*certify the folder"
    ):
        read_certificate(later)
    with pytest.raises(ConfigError, match="both are .*Remedy: name two certificates"):
        compare_certificates(mine, mine)
    manifest = folder / "net_manifest.json"
    with pytest.raises(
        ConfigError, match="net_manifest.json is a manifest, not a certificate.*two manifests are compared"
    ):
        compare_certificates(mine, manifest)
    assert app(["diff", str(manifest), str(mine)], standalone_mode=False) == 2
    with pytest.raises(ExportError, match="there is no such file|cannot be read|No such file"):
        read_certificate(tmp_path / "none.json")
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file != mine:
            (bare / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ExportError, match="has no certificate. Remedy: write one: bitwright certify"):
        check_certificate(bare)
