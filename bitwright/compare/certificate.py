"""Certificates: the answers of an exported model on its stored samples, with everything they depend on.

A certificate lies beside the files of an export. It holds the hashes of these files, the names of the other files in the
folder, the versions of the packages that took part, what the CPU can do, and hashes of answers: every tensor of codes that
executors of a profile make of the stored input, and every output of the runtime. :func:`check_certificate` repeats all of it;
two certificates, from two machines, are compared by :func:`compare_certificates`. Every byte counts: the text of a
certificate is the only one with its content, and its last entry is a hash of the others. It is not a signature: anyone who
can write to the folder can certify it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.compare.target import open_target
from bitwright.core.files import read_bytes
from bitwright.errors import ConfigError, ExportError
from bitwright.executors.profile import find_profile, profile_names
from bitwright.export.files.atomic import atomic_write, read_error
from bitwright.export.files.manifest import files_in, installed_versions, read_manifest
from bitwright.export.samples import find_export, read_samples
from bitwright.export.targets import find_target
from bitwright.runtimes.adapters import open_file
from bitwright.tables import Tabular, html_table, text_table

Array = NDArray[Any]
Document = dict[str, Any]

VERSION = 2
_MAX_BYTES = 16 << 20
_AGAIN = "certify the folder anew: bitwright certify"
#: words of /proc/cpuinfo that decide which integer kernels runtimes take
_FEATURES = (
    "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip
#: differences that answers follow from
_DECIDES = ("file", "other file", "manifest", "setting", "data", "seed")
_KEYS = ("kind", "version", "files", "others", "manifest", "data", "seeds", "versions", "machine", "answers", "digest")


def cpu_features() -> list[str]:
    """Instruction sets of this CPU that decide which integer kernels runtimes choose; empty where the system hides them."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text(encoding="utf-8", errors="replace").split()) if info.is_file() else set()
    return [name for name in _FEATURES if name in words]


def certify(
    folder: str | os.PathLike[str], prefix: str | None = None, profiles: list[str] | None = None
) -> tuple[Path, Document]:
    """Write the certificate of an export.

    Args:
        folder: that an export wrote, with samples.
        prefix: stem of the files; needed only where a folder holds several exports.
        profiles: whose executors answer; by default all that read files for the export's target.

    Returns:
        The file, ``<prefix>_certificate.json``, and what it says.

    Raises:
        ExportError: a file is missing or was changed since the export, or there are no samples.
        ConfigError: there is no such profile, or a runtime is not installed.
    """
    place = Path(folder)
    stem = find_export(place, prefix)
    document = _made(place, stem, profiles)
    file = place / f"{stem}_certificate.json"
    with atomic_write(file) as temporary:
        temporary.write_text(_text(document), encoding="utf-8")
    return file, document


def _made(place: Path, stem: str, profiles: list[str] | None) -> Document:
    path = place / f"{stem}_manifest.json"
    manifest = read_manifest(path, check=True)
    target = str(manifest.settings.get("target", "ort_cpu"))
    names = profiles or [name for name in profile_names() if find_profile(name).target == target]
    samples = place / f"{stem}_samples.npz"
    _, inputs, _ = read_samples(samples)
    answers = {name: _executed(place, stem, name, inputs) for name in names}
    row = find_target(target)
    suffix = ".tflite" if row.format == "tflite" else ".onnx"
    session = open_file(row.runtime, place / f"{stem}{suffix}")
    answers[row.runtime] = {name: _hash(array) for name, array in sorted(session.run(inputs).items())}
    document: Document = {
        "kind": "bitwright certificate",
        "version": VERSION,
        "files": {entry.name: entry.sha256 for entry in manifest.files},
        "others": _others(place, stem, {entry.name for entry in manifest.files}),
        "manifest": hashlib.sha256(path.read_bytes()).hexdigest(),
        "data": manifest.data,
        "seeds": dict(manifest.seeds),
        "versions": installed_versions(),
        "machine": {"system": platform.system(), "cpu": platform.machine(), "features": cpu_features()},
        "answers": answers,
    }
    return {**document, "digest": _digest(document)}


def _others(place: Path, stem: str, files: set[str]) -> list[str]:
    """Names of the files in a folder that are neither of this export nor of another one, which has a manifest of its own."""
    names = files_in(place)
    own = {f"{stem}_manifest.json", f"{stem}_certificate.json"}
    for name in names:
        if is_manifest(place / name) and name not in own:
            others = read_manifest(place / name).files
            own |= {name, name.replace("_manifest.json", "_certificate.json"), *(entry.name for entry in others)}
    return [name for name in names if name not in files | own]


def _executed(place: Path, stem: str, profile: str, inputs: Mapping[str, Array]) -> dict[str, str]:
    session = open_target(place, profile, stem)
    found: dict[str, str] = {}
    outputs = session.run(None, inputs, lambda name, codes: found.__setitem__(name, _hash(codes)))
    return {**found, **{f"output {p.name}": _hash(a) for p, a in zip(session.get_outputs(), outputs, strict=True)}}


def _hash(array: Array) -> str:
    digest = hashlib.sha256(f"{array.dtype}:{array.shape};".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _digest(document: Mapping[str, Any]) -> str:
    held = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(_text(held).encode()).hexdigest()


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=True) + "\n"


def is_certificate(path: str | os.PathLike[str]) -> bool:
    """Whether a file calls itself a certificate."""
    place = Path(path)
    if not place.is_file() or place.suffix != ".json":
        return False
    with place.open("rb") as file:
        return b'"kind": "bitwright certificate"' in file.read(256)


def read_certificate(path: str | os.PathLike[str]) -> Document:
    """A certificate whose bytes are as they were written.

    Raises:
        ExportError: it is missing, is of another version, or a byte of it was changed.
    """
    site = os.fspath(path)
    content = read_bytes(path, _MAX_BYTES, ExportError, unreadable=read_error)
    try:
        document = json.loads(content)
        json.dumps(document, ensure_ascii=False).encode()  # a lone surrogate is no text
    except (ValueError, RecursionError) as error:
        raise ExportError(site, f"it was changed since it was written: {error}", _AGAIN) from error
    if not isinstance(document, dict) or document.get("kind") != "bitwright certificate":
        raise ExportError(site, "it is not a certificate, or was changed since it was written", _AGAIN)
    version = document.get("version")
    if version != VERSION:
        problem = f"it is a certificate of version {version!r}, and this Bitwright reads version {VERSION}"
        raise ExportError(site, problem, f"{_AGAIN}, or use the Bitwright that wrote it")
    if tuple(document) != _KEYS or _text(document).encode() != content or document["digest"] != _digest(document):
        raise ExportError(site, "a byte of it was changed since it was written: its digest does not match", _AGAIN)
    wrong = next(_misfits(document), None)
    if wrong is not None:
        raise ExportError(site, f"{wrong} is not what a certificate holds there", _AGAIN)
    return document


def _misfits(document: Document) -> Iterator[str]:
    """Entries of another kind than :func:`certify` writes; the digest of one who changed them may be right."""
    machine = document["machine"]
    if not isinstance(machine, dict) or not {"system", "cpu", "features"} <= machine.keys():
        yield "machine"
    else:
        yield from (f"{key} of machine" for key in ("system", "cpu") if not isinstance(machine[key], str))
    listed = (("others", document["others"]), ("features", machine["features"] if isinstance(machine, dict) else []))
    for key, names in listed:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            yield key
    mappings = [(key, document[key]) for key in ("files", "seeds", "versions", "answers")]
    answers = document["answers"]
    mappings += [(f"{key} of answers", value) for key, value in answers.items()] if isinstance(answers, dict) else []
    yield from (key for key, value in mappings if not isinstance(value, dict))


@dataclass(frozen=True)
class Difference:
    """One difference between two certificates, or between a certificate and its repetition.

    Attributes:
        what: ``file``, ``other file``, ``manifest``, ``setting``, ``data``, ``seed``, ``version``, ``instruction set``,
            ``machine``, or ``answer of <whom>``.
        name: of the file, the package, the instruction set or the first tensor that differs.
        first, second: what each says.
    """

    what: str
    name: str
    first: str
    second: str


@dataclass(frozen=True)
class CertificateReport(Tabular):
    """Result of :func:`check_certificate`, :func:`compare_certificates` or :func:`compare_manifests`.

    Attributes:
        first, second: what was compared.
        differences: in the order of the certificate.
        answers: how many answers were compared.
    """

    _rows = "differences"
    _also = ("ok",)

    first: str
    second: str
    differences: tuple[Difference, ...]
    answers: int

    @property
    def ok(self) -> bool:
        """Whether files and answers are the same; versions and machines may differ then."""
        return not any(one.what in _DECIDES or one.what.startswith("answer") for one in self.differences)

    def to_text(self) -> str:
        """The answer, and a table of what differs."""
        cells = [(d.what, d.name, d.first, d.second) for d in self.differences]
        return "\n".join([self._line(), *([text_table(self._head, cells)] if cells else [])])

    __str__ = to_text

    @property
    def _head(self) -> tuple[str, ...]:
        return "what", "name", self.first, self.second

    def _line(self) -> str:
        if self.ok:
            beside = f"; {len(self.differences)} facts of versions and machines differ" if self.differences else ""
            compared = f"all {self.answers} answers and " if self.answers else ""
            return f"{compared}all files are equal{beside}"
        answers = [d for d in self.differences if d.what.startswith("answer")]
        causes = [d for d in self.differences if d.what in _DECIDES]
        facts = [f"{d.what} {d.name}" for d in self.differences if d.what in ("instruction set", "version", "machine")]
        if causes:
            return f"{causes[0].what} {causes[0].name}".rstrip() + " differs"
        why = f"; what differs besides: {', '.join(facts)}" if facts else "; nothing else differs"
        return f"{answers[0].what} differs, first at {answers[0].name}{why}"

    def _repr_html_(self) -> str:
        cells = [(d.what, d.name, d.first, d.second) for d in self.differences]
        return html_table(self._head, cells, "Certificates", [self._line()])


def check_certificate(folder: str | os.PathLike[str], prefix: str | None = None) -> CertificateReport:
    """Repeat everything that the certificate of an export says.

    Args:
        folder: that an export wrote, and :func:`certify` certified.
        prefix: stem of the files; needed only where a folder holds several exports.

    Raises:
        ExportError: there is no certificate, it is of another version, or a byte of it or of a file was changed: which one.
        ConfigError: a runtime that answered is not installed here.
    """
    place = Path(folder)
    stem = find_export(place, prefix)
    file = place / f"{stem}_certificate.json"
    if not file.is_file():
        raise ExportError(str(file), "the export has no certificate", "write one: bitwright certify")
    known = read_certificate(file)
    named = [name for name in known["answers"] if name in profile_names()]
    return _compared(known, _made(place, stem, named), "certificate", "here")


def compare_certificates(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> CertificateReport:
    """List the files, versions, instruction sets and answers in which two certificates differ.

    Raises:
        ExportError: one is missing, of another version, or was changed.
        ConfigError: both are the same file, or one is a manifest.
    """
    if Path(first).resolve() == Path(second).resolve():
        raise ConfigError("diff", f"both are {os.fspath(first)}", "name two certificates")
    for path in (first, second):
        if is_manifest(path):
            remedy = "name two certificates; two manifests are compared with each other"
            raise ConfigError("diff", f"{os.fspath(path)} is a manifest, not a certificate", remedy)
    return _compared(read_certificate(first), read_certificate(second), os.fspath(first), os.fspath(second))


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether a file is the manifest of an export, by its name."""
    place = Path(path)
    return place.is_file() and place.name.endswith("_manifest.json")


def compare_manifests(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> CertificateReport:
    """Compare the manifests of two exports: files, settings, data, seeds and versions.

    Raises:
        ExportError: one is missing or cannot be read.
        ConfigError: both are the same file.
    """
    if Path(first).resolve() == Path(second).resolve():
        raise ConfigError("diff", f"both are {os.fspath(first)}", "name two manifests")
    one, other = (read_manifest(Path(path)) for path in (first, second))
    hashes = [{file.name: file.sha256 for file in manifest.files} for manifest in (one, other)]
    found = list(_of_mapping("file", hashes[0], hashes[1]))
    found += _of_mapping("setting", one.settings, other.settings)
    if one.data != other.data:
        found.append(Difference("data", "", str(one.data)[:19], str(other.data)[:19]))
    found += _of_mapping("seed", one.seeds, other.seeds)
    found += _of_mapping("version", one.versions, other.versions)
    return CertificateReport(os.fspath(first), os.fspath(second), tuple(found), 0)


def _compared(one: Document, other: Document, first: str, second: str) -> CertificateReport:
    pairs = [(a, b) for a, b in zip(_answers(one), _answers(other), strict=False) if a == b]
    return CertificateReport(first, second, tuple(_differences(one, other)), len(pairs))


def _answers(document: Document) -> list[tuple[str, str]]:
    return [(whom, name) for whom, found in document["answers"].items() for name in found]


def _differences(one: Document, other: Document) -> Iterator[Difference]:
    for what, key in (("file", "files"), ("seed", "seeds"), ("version", "versions")):
        yield from _of_mapping(what, one[key], other[key])
    present = [dict.fromkeys(document["others"], "present") for document in (one, other)]
    yield from _of_mapping("other file", present[0], present[1], missing="absent")
    for key in ("manifest", "data"):
        if one[key] != other[key]:
            yield Difference(key, "", str(one[key])[:19], str(other[key])[:19])
    features = [dict.fromkeys(document["machine"]["features"], "yes") for document in (one, other)]
    yield from _of_mapping("instruction set", features[0], features[1], missing="no")
    systems = [{key: str(d["machine"][key]) for key in ("system", "cpu")} for d in (one, other)]
    yield from _of_mapping("machine", systems[0], systems[1])
    for whom in dict.fromkeys([*one["answers"], *other["answers"]]):
        given = [document["answers"].get(whom, {}) for document in (one, other)]
        # the first alone: what follows it follows from it
        yield from islice(_of_mapping(f"answer of {whom}", given[0], given[1]), 1)


def _of_mapping(
    what: str, one: Mapping[str, Any], other: Mapping[str, Any], missing: str = "missing"
) -> Iterator[Difference]:
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            yield Difference(what, name, *(str(m.get(name, missing))[:12] for m in (one, other)))
