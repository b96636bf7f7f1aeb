"""Every reader on damaged files: what comes out is valid, or one ``BitwrightError`` of bounded length says why not.

Inputs are bounded in size, so that a reader whose time does not grow faster than its input answers at once.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from onnx import TensorProto, helper
from torch import nn
from typer.testing import CliRunner

import bitwright.onnx
from bitwright.cli import app
from bitwright.compare.verify import verify_folder
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.placement.aimet_config import shipped_config
from bitwright.core.placement.config import load_config
from bitwright.core.placement.rules import Rules
from bitwright.errors import BitwrightError
from bitwright.export.encodings.of_simulation import read_sites
from bitwright.export.encodings.read import read_encodings
from bitwright.export.files.atomic import FinishedLayers
from bitwright.export.files.manifest import read_manifest, write_manifest
from bitwright.export.samples import read_samples
from bitwright.onnx import load_data, load_model
from bitwright.onnx.model.data import InputSpec
from bitwright.recipes.recipe import Step, load_recipe
from bitwright.torch import QuantizationSimModel
from tests.support.damage import as_json, damaged_bytes, damaged_document, damaged_message
from tests.support.simulations import calibrated

_LONGEST = 13_000  # characters of a message: three parts of 4,000 and what joins them


class Tally:
    """Outcomes of one kind of file."""

    def __init__(self) -> None:
        self.accepted = self.refused = 0

    def note(self, read: Callable[[], Any], check: Callable[[Any], None], what: str) -> None:
        """Read once; anything but a valid value and a ``BitwrightError`` fails the test and names the input."""
        try:
            value = read()
        except BitwrightError as error:
            assert len(str(error)) <= _LONGEST, what
            str(error).encode()
            self.refused += 1
            return
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error!s:.300}") from error
        check(value)
        self.accepted += 1

    def is_balanced(self) -> bool:
        """Whether the damage was neither all harmless nor all caught at the first byte."""
        return self.refused > 0


# ------------------------------------------------------------------------------------------------ documents

CONFIG = {
    "preset": "w8a8",
    "rules": [
        {"match": "layer1.*", "op": "Conv", "weight": "int4"},
        {"match": "head", "weight": {"format": "int8", "granularity": {"per_channel": 0}}, "output": None},
        {"op": ["Conv", "Gemm"], "input": {"method": {"name": "percentile", "percentile": 99.9}, "fixed_range": [0, None]}},
        {"params": {"running_mean": None}, "bias": "derived", "all": {"symmetry": "asymmetric", "quantized": True}},
    ],
    "supergroups": ["default", ["Conv", "Silu"]],
    "recurrent": "inside",
}  # fmt: skip
RECIPE = {"recipe": ["fold", {"equalize": {}}, {"adaround": {"iterations": 2000, "batch_size": 4}}, "bias_correction"]}
_TOML = """preset = "w8a8"
supergroups = ["default", ["Conv", "Silu"]]
[[rules]]
match = "layer1.*"
weight = { format = "int8", granularity = { per_block = 32 }, fixed_range = [0.0, 1.5] }
[[rules]]
op = ["Conv", "Gemm"]
output = "float"
input.method = { name = "percentile", percentile = 99.9 }
"""
_ANCHORS = """preset: w8a8
rules:
  - &first {match: "layer1.*", weight: &w {format: int4, granularity: per_tensor}}
  - {<<: *first, op: Conv}
  - {match: head, output: *w, input: ~}
"""
ENTRIES = {
    "0.6.1": {
        "version": "0.6.1",
        "activation_encodings": {
            "x": [{"bitwidth": 8, "dtype": "int", "is_symmetric": "False", "max": 1.0, "min": -1.0, "offset": -128,
                   "scale": 0.01}],
            "c": {"input": {"0": [{"bitwidth": 16, "dtype": "float"}]}},
        },
        "param_encodings": {
            "w": [{"bitwidth": 8, "dtype": "int", "is_symmetric": "True", "max": 1.0, "min": -1.0, "offset": -128, "scale": s}
                  for s in (0.5, 0.25)],
        },
        "quantizer_args": {"param_bitwidth": 8},
        "excluded_layers": ["head"],
    },
    "1.0.0": {
        "version": "1.0.0",
        "activation_encodings": [{"name": "x", "bw": 8, "dtype": "INT", "enc_type": "PER_TENSOR", "is_sym": False,
             "offset": [-128], "scale": [0.1]}],
        "param_encodings": [
            {"name": "w", "bw": 8, "dtype": "INT", "enc_type": "PER_CHANNEL", "is_sym": True,
             "offset": [-128, -128], "scale": [0.1, 0.2]},
            {"name": "b", "bw": 4, "dtype": "INT", "enc_type": "PER_BLOCK", "block_size": 2, "is_sym": True,
             "offset": [-8] * 4, "scale": [0.1] * 4},
            {"name": "l", "bw": 8, "compressed_bw": 4, "dtype": "INT", "enc_type": "LPBQ", "block_size": 2, "is_sym": True,
             "offset": [-8, -8], "per_block_int_scale": [1, 2, 3, 4], "scale": [0.1, 0.2]},
        ],
        "producer": {"name": "x"},
    },
    "2.0.0": {
        "version": "2.0.0",
        "encodings": [
            {"name": "x", "output_dtype": "uint8", "y_scale": 0.1, "y_zero_point": 128},
            {"name": "w", "output_dtype": "int8", "y_scale": [0.1, 0.2], "axis": 0},
            {"name": "b", "output_dtype": "int4", "y_scale": [[0.1, 0.2], [0.3, 0.4]], "axis": 1, "block_size": 16},
            {"name": "l", "output_dtype": "int4", "per_block_int_scale": [[1, 2], [3, 4]],
             "per_channel_float_scale": [[0.1], [0.2]],
             "axis": 1, "block_size": 16},
        ],
    },
}  # fmt: skip


def check_encoding(encoding: Encoding) -> None:
    assert np.isfinite(encoding.scale).all() and (encoding.scale > 0).all()
    if isinstance(encoding.format, IntFormat):
        assert (encoding.format.qmin <= encoding.zero_point).all()
        assert (encoding.zero_point <= encoding.format.qmax).all()


def check_rules(rules: Rules) -> None:
    for rule in rules.rules:
        assert isinstance(rule.name, str) and all(isinstance(t, str) for t in rule.types)
        for end in rule.fixed_range or ():
            assert end is None or math.isfinite(end)
        if rule.method is not None:
            find_range_method(rule.method)
        assert rule.granularity is None or isinstance(rule.granularity, PerTensor | PerChannel | PerBlock)


def check_recipe(steps: tuple[Step, ...]) -> None:
    assert all(isinstance(step, Step) and str(step) for step in steps)


def check_file(file: Any) -> None:
    for record in file.records:
        check_encoding(record.encoding)


@dataclass(frozen=True)
class Documents:
    """A kind of document: valid ones, their suffix, their reader, and what holds of what is accepted."""

    valid: tuple[Any, ...]
    suffix: str
    read: Callable[[Path], Any]
    check: Callable[[Any], None]
    count: int

    def text(self, document: Any) -> bytes:
        """``document`` as the file would have it."""
        if isinstance(document, str):
            return document.encode("utf-8", "surrogatepass")
        if self.suffix == ".yaml":
            return yaml.safe_dump(document).encode("utf-8", "surrogatepass")
        return as_json(document)


DOCUMENTS = {
    "config-yaml": Documents((CONFIG,), ".yaml", load_config, check_rules, 130),
    "config-yaml-anchors": Documents((_ANCHORS,), ".yaml", load_config, check_rules, 100),
    "config-json": Documents((CONFIG,), ".json", load_config, check_rules, 130),
    "config-toml": Documents((_TOML,), ".toml", load_config, check_rules, 130),
    "config-aimet": Documents((shipped_config("htp_v73"), shipped_config("default")), ".json", load_config, check_rules, 130),
    "recipe-yaml": Documents((RECIPE,), ".yaml", load_recipe, check_recipe, 100),
    "recipe-json": Documents((RECIPE,), ".json", load_recipe, check_recipe, 60),
    **{f"encodings-{v}": Documents((d,), ".encodings", read_encodings, check_file, 130) for v, d in ENTRIES.items()},
}  # fmt: skip


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_documents(kind: str, tmp_path: Path) -> None:
    row, rng, tally = DOCUMENTS[kind], np.random.default_rng(list(kind.encode())), Tally()
    path = tmp_path / f"file{row.suffix}"
    for valid in row.valid:
        path.write_bytes(row.text(valid))
        row.check(row.read(path))
        for i in range(row.count // len(row.valid)):
            structured = not isinstance(valid, str) and i % 2 == 0
            content = row.text(damaged_document(valid, rng)) if structured else damaged_bytes(row.text(valid), rng)
            path.write_bytes(content)
            tally.note(lambda: row.read(path), row.check, f"{kind}, input {i}: {content[:2000]!r}")
    assert tally.is_balanced()


def test_odd_documents_of_every_kind(tmp_path: Path) -> None:
    tally = Tally()
    texts = [
        b"",
        b"\0",
        b"null",
        b"[]",
        b"{}",
        b'""',
        b"3",
        b"{" * 4000,
        b"[" * 100_000,
        b"\xef\xbb\xbf",
        b"a: *a",
        b"---\n---\n",
    ]
    for kind, row in DOCUMENTS.items():
        for text in texts:
            path = tmp_path / f"file{row.suffix}"
            path.write_bytes(text)
            tally.note(partial(row.read, path), row.check, f"{kind}: {text[:40]!r}")
    assert tally.is_balanced()


# ----------------------------------------------------------------------------------------------------- data

SPECS = (InputSpec("x", "float32", (None, 3, 4, 4)), InputSpec("m", "int64", (None,)))
IMAGE = (InputSpec("x", "float32", (None, 3, 4, 4)),)
SAMPLES = {"x": np.linspace(0, 1, 96, dtype=np.float32).reshape(2, 3, 4, 4), "m": np.arange(2)}


def _archive(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, **SAMPLES)
    return file.getvalue()


def _array() -> bytes:
    file = io.BytesIO()
    np.save(file, SAMPLES["x"])
    return file.getvalue()


def _picture(kind: str) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(file, kind)
    return file.getvalue()


DATA: dict[str, tuple[Callable[[], bytes], tuple[InputSpec, ...]]] = {
    "a.npz": (lambda: _archive(np.savez), SPECS),
    "b.npz": (lambda: _archive(np.savez_compressed), SPECS),
    "c.npy": (_array, IMAGE),
    "d.png": (lambda: _picture("png"), IMAGE),
    "e.jpg": (lambda: _picture("jpeg"), IMAGE),
    "f.webp": (lambda: _picture("webp"), IMAGE),
    "g.tiff": (lambda: _picture("tiff"), IMAGE),
    "h.bmp": (lambda: _picture("bmp"), IMAGE),
}


def check_feeds(feeds: list[dict[str, Any]]) -> None:
    for feed in feeds:
        assert feed["x"].dtype == np.float32 and feed["x"].shape[1:] == (3, 4, 4)
        assert "m" not in feed or feed["m"].dtype == np.int64


@pytest.mark.filterwarnings("ignore::UserWarning")  # of decoders, about damage that they put up with
@pytest.mark.parametrize("name", DATA)
def test_data(name: str, tmp_path: Path) -> None:
    make, specs = DATA[name]
    valid, rng, tally = make(), np.random.default_rng(list(name.encode())), Tally()
    path = tmp_path / name
    source = path if path.suffix in (".npz", ".npy") else tmp_path
    path.write_bytes(valid)
    check_feeds(list(load_data(source, specs, batch_size=2)))
    for i in range(60):
        path.write_bytes(damaged_bytes(valid, rng))
        tally.note(lambda: list(load_data(source, specs, batch_size=2)), check_feeds, f"{name}, input {i}")
    assert tally.is_balanced()


# ------------------------------------------------------------------------------------------- folders of a simulation


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).eval()


BATCH = torch.linspace(-1, 1, 32).reshape(2, 1, 4, 4)


def simulation() -> QuantizationSimModel:
    return calibrated(QuantizationSimModel(network(), BATCH), [BATCH])


@pytest.fixture(scope="module")
def sim() -> QuantizationSimModel:
    return simulation()


@pytest.fixture(scope="module")
def exported(sim: QuantizationSimModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    sim.export(folder, "net", BATCH)
    return folder


def damaged_folders(folder: Path, target: Path, count: int, rng: np.random.Generator) -> Iterator[str]:
    """``target`` as a copy of ``folder`` with one file damaged, or gone; a JSON file also as a document."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    for i in range(count):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        path = target / names[i % len(names)]
        how = int(rng.integers(8))
        if how == 0:
            path.unlink()
        elif path.suffix == ".json" and how < 6:
            path.write_bytes(as_json(damaged_document(json.loads(path.read_bytes()), rng)))
        else:
            path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        yield f"{path.name}, input {i}"


def test_export_folder(exported: Path, tmp_path: Path) -> None:
    tally, rng, copy = Tally(), np.random.default_rng(11), tmp_path / "copy"
    for i, what in enumerate(damaged_folders(exported, copy, 96, rng)):
        tally.note(lambda: read_manifest(copy / "net_manifest.json", check=True), lambda m: None, what)
        tally.note(lambda: read_samples(copy / "net_samples.npz"), lambda s: None, what)
        tally.note(lambda: read_sites(copy / "net_sites.json"), check_sites, what)
        tally.note(lambda: read_encodings(copy / "net.encodings"), check_file, what)
        if i % 5:  # the command reads all of them, so every file of the folder has its turn
            continue
        shown = CliRunner().invoke(app, ["show", str(copy)])
        assert shown.exit_code in (0, 2), (what, shown.output, shown.exception)
        assert isinstance(shown.exception, SystemExit | None) and "Traceback" not in shown.output
    assert tally.is_balanced()


def check_sites(saved: Any) -> None:
    for site in saved.sites.values():
        if site.encoding is not None:
            check_encoding(site.encoding)


def test_verify_opens_what_hashes_vouch_for(exported: Path, tmp_path: Path) -> None:
    """The manifest is written anew, so that its hashes do not keep the damage from the readers behind it."""
    tally, rng, copy = Tally(), np.random.default_rng(12), tmp_path / "copy"
    for what in damaged_folders(exported, copy, 60, rng):
        if (copy / "net_manifest.json").is_file() and "manifest" not in what:
            write_manifest(copy / "net_manifest.json")
        tally.note(lambda: verify_folder(copy), lambda report: report.to_text(), what)
    assert tally.is_balanced()


def state_of(sim: QuantizationSimModel) -> dict[str, Any]:
    state = {name: (site.encoding, site.enabled, site.quantizer.spec) for name, site in sim.quantizers.items()}
    return state | {name: tensor.detach().clone().numpy().tobytes() for name, tensor in sim.model.state_dict().items()}


def test_checkpoints(sim: QuantizationSimModel, tmp_path: Path) -> None:
    tally, rng, copy = Tally(), np.random.default_rng(13), tmp_path / "copy"
    sim.save_checkpoint(tmp_path / "saved")
    again = simulation()
    before = state_of(again)
    for i, what in enumerate(damaged_folders(tmp_path / "saved", copy, 150, rng)):
        manifests = list(copy.glob("*manifest.json"))
        if i % 2 and manifests and "manifest" not in what:  # hashes that vouch for the damage
            write_manifest(manifests[0])
        refused = tally.refused
        tally.note(lambda: again.load_checkpoint(copy), lambda _: None, what)
        if tally.refused > refused:
            assert state_of(again) == before, f"{what}: refused, and yet the simulation is another"
        again.load_checkpoint(tmp_path / "saved")
        before = state_of(again)
    assert tally.is_balanced()


def test_encodings_of_a_simulation(sim: QuantizationSimModel, exported: Path, tmp_path: Path) -> None:
    tally, rng, again = Tally(), np.random.default_rng(14), simulation()
    for version in ENTRIES:
        sim.save_encodings(tmp_path / f"{version}.json", version)
        valid = json.loads((tmp_path / f"{version}.json").read_bytes())
        for i in range(40):
            before = state_of(again)
            (tmp_path / "damaged.json").write_bytes(as_json(damaged_document(valid, rng)))
            refused = tally.refused
            tally.note(lambda: again.load_encodings(tmp_path / "damaged.json"), lambda _: None, f"{version}, {i}")
            if tally.refused > refused:
                assert state_of(again) == before, f"{version}, {i}: refused, and yet the simulation is another"
            again.load_encodings(tmp_path / f"{version}.json")
    for what in damaged_folders(exported, tmp_path / "copy", 60, rng):
        path = tmp_path / "copy" / "net.encodings"
        tally.note(partial(again.load_encodings, path), lambda _: None, what)
    assert tally.is_balanced()


def test_cache_files(tmp_path: Path) -> None:
    rng, arrays = (np.random.default_rng(15), {"w": np.linspace(0, 1, 64, dtype=np.float32), "s": np.float32([0.5])})
    cache, tally = FinishedLayers(tmp_path), Tally()
    cache.put("k" * 40, arrays)
    (path,) = tmp_path.iterdir()
    valid = path.read_bytes()
    lost = 0

    def check(found: Any) -> None:
        nonlocal lost
        lost += found is None
        assert found is None or all(np.array_equal(found[name], array) for name, array in arrays.items())

    for i in range(100):
        path.write_bytes(damaged_bytes(valid, rng))
        tally.note(lambda: cache.get("k" * 40), check, f"input {i}")
    assert tally.refused + lost > 50, "damage is noticed"


# ----------------------------------------------------------------------------------------------------- ONNX


def onnx_model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal((2, 1, 3, 3)).astype(np.float32), "w"),
        onnx.numpy_helper.from_array(rng.standard_normal(2).astype(np.float32), "b"),
        onnx.numpy_helper.from_array(rng.standard_normal((8, 3)).astype(np.float32), "v"),
        helper.make_tensor("shape", TensorProto.INT64, [2], [0, 8]),
    ]
    result = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    branches = [helper.make_graph([helper.make_node(op, ["y"], ["z"])], op, [], [result]) for op in ("Neg", "Abs")]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv", kernel_shape=[3, 3]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Reshape", ["r", "shape"], ["f"], name="flat"),
        helper.make_node("MatMul", ["f", "v"], ["y"], name="fc"),
        helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("t", TensorProto.BOOL, [], [True])),
        helper.make_node("If", ["yes"], ["out"], name="if", then_branch=branches[0], else_branch=branches[1]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 1, 4, 4])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [2, 3])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def simulate(path: Path) -> Any:
    """Load, simulate, calibrate and run, as far as the damage lets it go."""
    sim = bitwright.onnx.QuantizationSimModel(path, threads=1)
    feeds = {"x": BATCH.numpy()}
    sim.compute_encodings([feeds], progress=False)
    return sim.run(feeds)


@pytest.mark.parametrize("external", [False, True], ids=["one-file", "external-data"])
def test_onnx_models(external: bool, tmp_path: Path) -> None:
    path, rng, tally = tmp_path / "m.onnx", np.random.default_rng(16 + external), Tally()
    onnx.save(onnx_model(), path, save_as_external_data=external, location="m.data", size_threshold=0)
    proto, content = onnx.load(path, load_external_data=False), path.read_bytes()
    load_model(path)
    simulate(path)
    for i in range(150):
        damaged = damaged_bytes(content, rng) if i % 3 == 0 else damaged_message(proto, rng).SerializeToString()
        path.write_bytes(damaged)
        tally.note(lambda: simulate(path), lambda _: None, f"input {i}")
    assert tally.is_balanced()
