"""Feed damaged files to the public functions and to the command line, and report what is not an answer.

An answer is a result, or a ``BitwrightError``: place, problem, remedy. Everything else is a finding: another exception, a crash
of the process, a case that takes longer than ``--limit`` seconds, or more memory than ``--memory`` MiB beyond its input. A case
is a kind and a number: the two decide the valid input, the damage and what is done with it, so that every finding can be run
again by itself::

    python tools/fuzz.py --seconds 600 --seed 1     # other numbers with another seed
    python tools/fuzz.py --kinds onnx,data          # some kinds only
    python tools/fuzz.py --case onnx:1234           # one case, here, with its traceback

Cases run in a second process, so that what one does to it ends no other. Exit code 1: there are findings.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import json
import logging
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import fuzz_readers  # noqa: E402

from tests.support.damage import as_json, damaged_bytes, damaged_document, damaged_message  # noqa: E402

_PATIENCE = 4  # how much longer a case may take that is run again
_FORK = multiprocessing.get_context("fork")
Random = np.random.Generator
Use = Callable[[], Any]


@dataclass(frozen=True)
class Finding:
    """A case that gave no answer: ``place`` is where, ``text`` what is known of it."""

    case: str
    what: str
    place: str
    text: str


# ---------------------------------------------------------------------------------------------- damage of models


def damaged_graph(proto: Any, rng: Random) -> Any:
    """A copy of an ONNX model that is still a well-formed message, with one to three things in it that do not fit."""
    copy = type(proto).FromString(proto.SerializeToString())
    for _ in range(int(rng.integers(1, 4))):
        _GRAPH_DAMAGE[int(rng.integers(len(_GRAPH_DAMAGE)))](copy, rng)
    return copy


def damaged_facts(proto: Any, rng: Random) -> Any:
    """A copy of an exported model in which what was noted on one quantizer is changed, or moved to another operator."""
    copy = type(proto).FromString(proto.SerializeToString())
    notes = [entry for node in copy.graph.node for entry in node.metadata_props if entry.key == "bitwright"]
    note = _pick(notes, rng)
    if note is None:
        return copy
    usual = {
        "role": "activation",
        "scale": "unknown",
        "entry": "x",
        "axis": 1,
        "perm": [1, 0],
        "pooled": 2,
        "format": "int4",
    }
    facts = {**{key: usual[key] for key in usual if rng.integers(4) == 0}, **json.loads(note.value)}
    if rng.integers(4) == 0:
        note.value = _pick(notes, rng).value
    else:
        note.value = as_json(damaged_document(facts, rng) if rng.integers(3) else facts).decode()
    return copy


def damaged_grids(proto: Any, rng: Random) -> Any:
    """A copy of an exported model of which one quantizer has other scales, zero points, axes or blocks."""
    import onnx

    copy = type(proto).FromString(proto.SerializeToString())
    nodes = [n for n in copy.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    tensors = {t.name: t for t in copy.graph.initializer}
    for node in (_pick(nodes, rng) for _ in range(int(rng.integers(1, 3)))):
        for name in node.input[1:]:
            if name not in tensors or rng.integers(4) == 0:
                continue
            array = onnx.numpy_helper.to_array(tensors[name])
            shape = _pick(((), (0,), (1,), (2,), (3,), (4,), (1, 1), (2, 3), (4, 1, 1, 1), array.shape), rng)
            value = _pick((0, 1, 100, -1, float("nan"), float("inf"), 1e-45, 1e38), rng)
            kind = _pick((array.dtype, array.dtype, np.float16, np.float64, np.int32, np.uint8), rng)
            with np.errstate(all="ignore"):
                made = np.full(shape, value, np.float64).astype(kind)
            tensors[name].CopyFrom(onnx.numpy_helper.from_array(made, name))
        del node.attribute[:]
        for key, values in {"axis": (0, 1, 3, -1, -9, 2**40), "block_size": (0, 1, 2, 3, 100, -1, 2**62)}.items():
            if rng.integers(2):
                node.attribute.append(onnx.helper.make_attribute(key, int(_pick(values, rng))))
    if rng.integers(2):
        copy.opset_import[0].version = 21
    return copy


def _pick(values: Any, rng: Random) -> Any:
    return values[int(rng.integers(len(values)))] if len(values) else None


def _names(proto: Any) -> list[str]:
    graph = proto.graph
    made = [name for node in graph.node for name in node.output]
    return [*made, *(v.name for v in graph.input), *(t.name for t in graph.initializer), "", "unknown"]


def _other_input(proto: Any, rng: Random) -> None:
    node = _pick(proto.graph.node, rng)
    if node is not None and node.input:
        node.input[int(rng.integers(len(node.input)))] = _pick(_names(proto), rng)


def _more_or_fewer(proto: Any, rng: Random) -> None:
    node = _pick(proto.graph.node, rng)
    if node is None:
        return
    values = node.input if rng.integers(3) else node.output
    if rng.integers(2) and values:
        del values[int(rng.integers(len(values)))]
    else:
        values.append(_pick(_names(proto), rng) if values is node.input else "added")


def _other_operator(proto: Any, rng: Random) -> None:
    node = _pick(proto.graph.node, rng)
    if node is not None:
        node.op_type = _pick(_OPERATORS, rng)


_OPERATORS = (
    "Conv", "Gemm", "MatMul", "Relu", "Softmax", "Concat", "Split", "Reshape", "Transpose", "LSTM", "GRU", "If", "Loop", "Scan",
    "QuantizeLinear", "DequantizeLinear", "BatchNormalization", "LayerNormalization", "Gather", "Slice", "Constant", "Identity",
    "Cast", "NonZero", "SequenceConstruct", "Optional", "ConvTranspose", "Einsum", "Pad", "Resize", "QLinearConv", "MaxPool",
    "ReduceMean", "Clip", "Where", "TopK", "Nonsense", "Dropout", "Expand", "Tile", "Shape", "Size", "ConstantOfShape",
)  # fmt: skip


def _other_attribute(proto: Any, rng: Random) -> None:
    found = [a for node in proto.graph.node for a in node.attribute if a.type in (1, 2, 3, 6, 7)]
    attribute = _pick(found, rng)
    if attribute is None:
        return
    number = int(_pick((0, 1, -1, 2, 3, 9, -9, 100, 2**31, -(2**63)), rng))
    if attribute.type == 2:
        attribute.i = number
    elif attribute.type == 1:
        attribute.f = float(_pick((0.0, -1.0, np.nan, np.inf, 1e30), rng))
    elif attribute.type == 3:
        attribute.s = _pick((b"", b"linear", b"SAME_UPPER", b"\xff", b"bidirectional"), rng)
    elif attribute.type == 7 and attribute.ints and rng.integers(2):
        attribute.ints[int(rng.integers(len(attribute.ints)))] = number
    elif attribute.type == 7 and attribute.ints and rng.integers(2):
        del attribute.ints[0]
    elif attribute.type == 7:
        attribute.ints.append(number)


def _without_attribute(proto: Any, rng: Random) -> None:
    node = _pick([node for node in proto.graph.node if node.attribute], rng)
    if node is not None:
        del node.attribute[int(rng.integers(len(node.attribute)))]


def _other_tensor(proto: Any, rng: Random) -> None:
    """Another shape or type of a constant, with data that fit it."""
    import onnx

    tensor = _pick(proto.graph.initializer, rng)
    if tensor is None or tensor.external_data:
        return
    try:
        array, name = onnx.numpy_helper.to_array(tensor), tensor.name
    except (ValueError, TypeError, KeyError):  # damaged before: its bytes are not those of its shape and type
        return
    kind = int(rng.integers(8))
    if kind == 0:
        array = array.reshape(-1)
    elif kind == 1:
        array = array.reshape(array.shape + (1,))
    elif kind == 2:
        array = array.reshape(-1)[:0]
    elif kind == 3:
        array = array.astype(_pick((np.float16, np.float64, np.int64, np.int32, np.int8, np.uint8, np.bool_), rng))
    elif kind == 4:
        array = np.concatenate((array, array)) if array.ndim else array[None]
    elif kind == 5:
        array = array.T
    elif kind == 6:
        array = np.full_like(array, _pick((0, -1, 100), rng)) if array.dtype.kind != "u" else np.zeros_like(array)
    else:
        array = array.reshape(-1)[0] if array.size else array
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(np.shape(array)), name))


def _other_interface(proto: Any, rng: Random) -> None:
    from onnx import TensorProto, helper

    values = proto.graph.input if rng.integers(2) else proto.graph.output
    value = _pick(values, rng)
    if value is None:
        return
    kind = int(rng.integers(6))
    if kind == 0:
        value.type.tensor_type.elem_type = int(rng.choice(TensorProto.DataType.values()))
    elif kind == 1:
        value.type.CopyFrom(helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2])))
    elif kind == 2:
        value.type.CopyFrom(helper.make_optional_type_proto(helper.make_tensor_type_proto(1, [2])))
    elif kind == 3:
        value.ClearField("type")
    elif kind == 4:
        value.type.tensor_type.ClearField("shape")
    elif value.type.tensor_type.shape.dim:
        dim = _pick(value.type.tensor_type.shape.dim, rng)
        dim.dim_value = int(_pick((0, -1, 1, 3, 2**31, 2**40), rng))


def _other_versions(proto: Any, rng: Random) -> None:
    if rng.integers(2) and proto.opset_import:
        entry = _pick(proto.opset_import, rng)
        entry.version = int(rng.choice([1, 6, 7, 9, 11, 13, 19, 21, 25, 99]))
    else:
        proto.ir_version = int(rng.choice([0, 1, 3, 8, 13, 99]))


def _node_again(proto: Any, rng: Random) -> None:
    node = _pick(proto.graph.node, rng)
    if node is None:
        return
    added = proto.graph.node.add()
    added.CopyFrom(node)
    if rng.integers(2):
        del added.output[:]
        added.output.extend(f"{name}_again" for name in node.output)


def _node_gone(proto: Any, rng: Random) -> None:
    if proto.graph.node:
        del proto.graph.node[int(rng.integers(len(proto.graph.node)))]


def _other_output(proto: Any, rng: Random) -> None:
    value = _pick(proto.graph.output, rng)
    if value is not None:
        value.name = _pick(_names(proto), rng)


def _cycle(proto: Any, rng: Random) -> None:
    """Let a node read what is computed from it."""
    nodes = [node for node in proto.graph.node if node.input and node.output]
    if nodes:
        at = int(rng.integers(len(nodes)))
        nodes[at].input[0] = _pick(nodes[at:], rng).output[0]


def _same_name(proto: Any, rng: Random) -> None:
    """Give two things one name: nodes, tensors, inputs or outputs."""
    graph = proto.graph
    kind = int(rng.integers(4))
    if kind == 0 and len(graph.node) > 1:
        _pick(graph.node, rng).name = _pick(graph.node, rng).name
    elif kind == 1 and graph.initializer:
        graph.initializer.add().CopyFrom(_pick(graph.initializer, rng))
    elif kind == 2 and graph.initializer:
        _pick(graph.initializer, rng).name = _pick(_names(proto), rng)
    elif kind == 3:
        values = graph.input if rng.integers(2) else graph.output
        values.add().CopyFrom(_pick(values, rng) or graph.output[0])


def _false_shape(proto: Any, rng: Random) -> None:
    """Dimensions of a constant that its bytes do not have: huge, negative, none, or of an overflowing product."""
    tensor = _pick(proto.graph.initializer, rng)
    if tensor is None:
        return
    shapes = ((2**40,), (2**31, 2**31, 4), (-1, 4), (-(2**62),), (), (0, 2**50), (1, 2**33, 0), (2**62, 2**62), (3, 5))
    del tensor.dims[:]
    tensor.dims.extend(_pick(shapes, rng))
    if rng.integers(3) == 0:
        tensor.data_type = int(_pick((0, 1, 2, 8, 9, 10, 14, 16, 21, 22, 23, 99), rng))
    if rng.integers(3) == 0:
        tensor.raw_data = tensor.raw_data[: int(rng.integers(1 + len(tensor.raw_data)))]


def _huge_result(proto: Any, rng: Random) -> None:
    """A constant that computes a tensor of many elements, read by some node.

    One of 256 MiB, which a model that is right may hold twice; others that take half of the memory and more.
    """
    import onnx

    node = _pick([node for node in proto.graph.node if node.input], rng)
    if node is None:
        return
    half = psutil.virtual_memory().total // 2**13  # rows of 4 KiB
    shape = _pick(((2**26,), (half, 2**10), (2**40,), (-5,), (0,)), rng)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(shape, np.int64), "huge_shape"))
    operator = _pick((("ConstantOfShape", ["huge_shape"]), ("Expand", [node.input[0], "huge_shape"])), rng)
    made = onnx.helper.make_node(*operator, ["huge"], name="huge")
    nodes = [made, *proto.graph.node]
    node.input[int(rng.integers(len(node.input)))] = "huge"
    kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(kept)


def _elsewhere(proto: Any, rng: Random) -> None:
    """Say that the bytes of a constant lie in another file, or far behind the end of one."""
    tensor = _pick(proto.graph.initializer, rng)
    if tensor is None:
        return
    tensor.ClearField("raw_data")
    tensor.data_location = 1
    facts = {
        "location": ("m.onnx", "none", "", "/dev/zero", "../m.onnx", "."),
        "offset": ("0", "-1", "x", str(2**62)),
        "length": ("16", "-1", "", str(2**62)),
    }
    for key, values in facts.items():
        if rng.integers(4):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, _pick(values, rng)


_GRAPH_DAMAGE: tuple[Callable[[Any, Random], None], ...] = (
    _other_input, _other_input, _more_or_fewer, _other_operator, _other_attribute, _other_attribute, _without_attribute,
    _other_tensor, _other_tensor, _other_tensor, _other_interface, _other_versions, _node_again, _node_gone, _other_output,
    _cycle, _same_name, _false_shape, _huge_result, _elsewhere,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ valid inputs


@cache
def valid_models() -> tuple[Any, ...]:
    """Plain models of many operators, with bodies, and models with quantizers."""
    from tests.conformance.test_damaged_files import onnx_model
    from tests.onnx.opset_cases import CASES, model_of, opsets_of

    plain = [model_of(name, min(17, opsets_of(name)[-1])) for name in CASES if opsets_of(name)[0] <= 17]
    return (onnx_model(), *plain)


def feeds_of(proto: Any) -> dict[str, np.ndarray]:
    """Random values for the inputs of a valid model."""
    from tests.onnx.nets import feeds_for

    return feeds_for(proto)


@cache
def exported(number: int) -> dict[str, bytes]:
    """The files that a simulation of the valid model ``number`` writes, by name."""
    import onnx

    from bitwright.onnx import QuantizationSimModel

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.onnx")
        onnx.save(valid_models()[number], path)
        feeds = feeds_of(valid_models()[number])
        sim = QuantizationSimModel(path, threads=1)
        sim.compute_encodings([feeds], progress=False)
        sim.export(Path(folder, "out"), "net")
        return {p.name: p.read_bytes() for p in Path(folder, "out").iterdir() if p.is_file()}


_EXPORTED = (0, 1, 5, 9, 20)


@cache
def checkpoint() -> dict[str, bytes]:
    """The files of a checkpoint of a small PyTorch simulation."""
    from tests.conformance.test_damaged_files import simulation

    with tempfile.TemporaryDirectory() as folder:
        simulation().save_checkpoint(folder)
        return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


# ------------------------------------------------------------------------------------------- what is done with them


def command(*words: object) -> None:
    """Run the command line; what it answers with is its own matter, another exception is raised."""
    from typer.testing import CliRunner

    from bitwright.cli import app

    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in (0, 1, 2):
        raise AssertionError(f"exit code {result.exit_code}")


def use_model(path: Path, feeds: dict[str, np.ndarray], rng: Random, folder: Path) -> Use:
    """One of what a user does with a model file."""
    import bitwright
    from bitwright.onnx import QuantizationSimModel, check_model, load_model, stabilize

    data, out = folder / "data.npz", folder / "out"
    np.savez(data, **feeds)

    def simulate() -> None:
        sim = QuantizationSimModel(path, threads=1)
        sim.compute_encodings([feeds], progress=False)
        sim.run(feeds)
        sim.coverage()
        if rng.integers(3) == 0:
            sim.export(out, "net")
        if rng.integers(3) == 0:
            bitwright.analyze(sim, [feeds], progress=False)

    quick = {"fold,equalize": 3, "fold": 2, "smooth,bias_correction": 1}
    steps = _pick([name for name, count in quick.items() for _ in range(count)], rng)
    uses: tuple[Use, ...] = (
        simulate,
        simulate,
        lambda: load_model(path),
        lambda: check_model(path, [feeds], progress=False),
        lambda: stabilize(path, [feeds]),
        lambda: bitwright.quantize(path, [feeds], recipe=steps.split(","), path=out, progress=False),
        lambda: bitwright.quantize(path, [feeds] * 4, path=out, effort="quick", progress=False),
        partial(command, "inspect", path),
        partial(command, "doctor", path, "--data", data),
        partial(command, "quantize", path, "--data", data, "--out", out, "--recipe", steps),
        partial(command, "analyze", path, "--data", data),
        partial(command, "drift", path, path, "--data", data),
        partial(command, "report", path, "--out", folder / "report.html"),
        partial(command, "benchmark", path, "--seconds", "0", "--threads", "1"),
    )
    return _pick(uses, rng)


def onnx_case(rng: Random, folder: Path) -> Use:
    """A damaged model file."""
    import onnx

    proto = _pick(valid_models(), rng)
    path, how = folder / "m.onnx", int(rng.integers(6))
    external = how == 5
    onnx.save(proto, path, save_as_external_data=external, location="m.data", size_threshold=0)
    if how == 0:
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
    elif external:
        victim = _pick([p for p in (path, folder / "m.data") if p.is_file()], rng)
        victim.write_bytes(damaged_bytes(victim.read_bytes(), rng))
    elif how == 1:
        path.write_bytes(damaged_message(proto, rng).SerializeToString())
    else:
        path.write_bytes(damaged_graph(proto, rng).SerializeToString())
    return use_model(path, feeds_of(proto), rng, folder)


def qdq_case(rng: Random, folder: Path) -> Use:
    """A damaged model file with quantizers."""
    import onnx

    number = _pick(_EXPORTED, rng)
    proto = onnx.ModelProto.FromString(exported(number)["net.onnx"])
    path = folder / "m.onnx"
    how = _pick((damaged_message, damaged_graph, damaged_graph, damaged_facts, damaged_grids), rng)
    path.write_bytes(how(proto, rng).SerializeToString())
    return use_model(path, feeds_of(valid_models()[number]), rng, folder)


def _damage_file(path: Path, rng: Random) -> None:
    how = int(rng.integers(8))
    if how == 0:
        path.unlink()
    elif path.suffix in (".json", ".encodings") and how < 6:
        path.write_bytes(as_json(damaged_document(json.loads(path.read_bytes()), rng)))
    else:
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))


def folder_case(rng: Random, folder: Path) -> Use:
    """A folder of an export, of which one file is damaged; its manifest may vouch for the damage."""
    import bitwright.onnx
    from bitwright.compare.verify import verify_folder
    from bitwright.export.files.manifest import write_manifest

    number = _pick(_EXPORTED, rng)
    there, whole = folder / "one", folder / "whole"
    for place in (there, whole):
        place.mkdir()
        for name, content in exported(number).items():
            (place / name).write_bytes(content)
    victim = _pick(sorted(there.iterdir()), rng)
    other = exported(_pick(_EXPORTED, rng))
    if rng.integers(4) == 0 and victim.name in other:  # a file of another model, or under another's name
        victim.write_bytes(other[_pick(sorted(other), rng) if rng.integers(3) == 0 else victim.name])
    else:
        _damage_file(victim, rng)
    manifest = there / "net_manifest.json"
    if rng.integers(2) and manifest.is_file() and victim != manifest:
        write_manifest(manifest)

    def load_encodings() -> None:
        path = folder / "m.onnx"
        path.write_bytes(valid_models()[number].SerializeToString())
        sim = bitwright.onnx.QuantizationSimModel(path, threads=1)
        sim.load_encodings(there / "net.encodings")

    uses: tuple[Use, ...] = (
        lambda: verify_folder(there),
        load_encodings,
        partial(command, "verify", there),
        partial(command, "show", there),
        partial(command, "report", there, "--out", folder / "report.html"),
        partial(command, "diff", there, whole),
        partial(command, "drift", f"{there}@simulation", f"{there}@file"),
        partial(command, "benchmark", there, "--seconds", "0", "--threads", "1"),
    )
    return _pick(uses, rng)


def checkpoint_case(rng: Random, folder: Path) -> Use:
    """A checkpoint of a PyTorch simulation of which one file is damaged."""
    from bitwright.export.files.manifest import write_manifest
    from tests.conformance.test_damaged_files import simulation

    for name, content in checkpoint().items():
        (folder / name).write_bytes(content)
    victim = _pick(sorted(folder.iterdir()), rng)
    _damage_file(victim, rng)
    manifests = list(folder.glob("*manifest.json"))
    if rng.integers(2) and manifests and victim not in manifests:
        write_manifest(manifests[0])
    return lambda: simulation().load_checkpoint(folder)


def config_case(rng: Random, folder: Path) -> Use:
    """A damaged configuration, read and then used to place quantizers."""
    import bitwright.onnx
    from bitwright.torch import QuantizationSimModel
    from tests.conformance.test_damaged_files import BATCH, DOCUMENTS, network

    name = _pick([name for name in DOCUMENTS if name.startswith("config")], rng)
    row = DOCUMENTS[name]
    path = folder / f"config{row.suffix}"
    valid = _pick(row.valid, rng)
    structured = not isinstance(valid, str) and rng.integers(4)
    path.write_bytes(row.text(damaged_document(valid, rng)) if structured else damaged_bytes(row.text(valid), rng))
    proto = _pick(valid_models(), rng)

    def on_torch() -> None:
        QuantizationSimModel(network(), BATCH, config_file=path).compute_encodings([BATCH], progress=False)

    def on_onnx() -> None:
        sim = bitwright.onnx.QuantizationSimModel(proto, threads=1, config_file=path)
        sim.compute_encodings([feeds_of(proto)], progress=False)

    return _pick((on_torch, on_onnx, partial(command, "check-config", path)), rng)


def recipe_case(rng: Random, folder: Path) -> Use:
    """A damaged recipe, read and then carried out."""
    import bitwright
    from tests.conformance.test_damaged_files import BATCH, network

    document = {
        "recipe": ["fold", {"equalize": {}}, {"smooth": {"strength": 0.5}}, {"adaround": {"iterations": 3}}, "gptq"]
    }
    path = folder / "recipe.yaml"
    content = json.dumps(document).encode()
    path.write_bytes(as_json(damaged_document(document, rng)) if rng.integers(4) else damaged_bytes(content, rng))
    return lambda: bitwright.quantize(network(), [BATCH, BATCH], recipe=path, progress=False)


def encodings_case(rng: Random, folder: Path) -> Use:
    """A damaged encodings file of any version, read and loaded into a simulation."""
    from tests.conformance.test_damaged_files import ENTRIES, simulation

    sim, version = simulation(), _pick(list(ENTRIES), rng)
    path = folder / "m.encodings"
    sim.save_encodings(path, version)
    document = json.loads(path.read_bytes()) if rng.integers(3) else ENTRIES[version]
    path.write_bytes(as_json(damaged_document(document, rng)))

    def load() -> None:
        sim.load_encodings(path, **({"strict": False} if rng.integers(2) else {}))
        sim.model(*[tensor()])

    from tests.conformance.test_damaged_files import BATCH

    tensor = lambda: BATCH  # noqa: E731
    return _pick((load, load, partial(command, "show", path)), rng)


def data_case(rng: Random, folder: Path) -> Use:
    """Damaged arrays and pictures, and archives that unpack to much more than they are."""
    import zipfile

    from bitwright.onnx import load_data
    from tests.conformance.test_damaged_files import DATA

    name = _pick([*DATA, "bomb.npz", "header.npz"], rng)
    path = folder / "data" / name
    path.parent.mkdir()
    if name == "header.npz":
        specs = DATA["a.npz"][1]
        path.write_bytes(_false_archive(rng))
    elif name == "bomb.npz":
        specs = DATA["a.npz"][1]
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "<f4", "fortran_order": False, "shape": (int(rng.choice([1 << 26, 1 << 29])), 3, 4, 4)}
        )
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
            archive.open("x.npy", "w") as file,
        ):
            file.write(header.getvalue())
            for _ in range(int(rng.integers(1, 700))):
                file.write(bytes(1 << 20))
    else:
        make, specs = DATA[name]
        path.write_bytes(damaged_bytes(make(), rng))
    source = path if path.suffix in (".npz", ".npy") else path.parent
    return lambda: list(load_data(source, specs, batch_size=2))


def _false_archive(rng: Random) -> bytes:
    """An .npz archive whose headers say other types, orders and shapes than the bytes have; members may repeat."""
    import zipfile

    content = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(content, "w") as archive:
        warnings.simplefilter("ignore")  # two members of one name
        for _ in range(int(rng.integers(1, 4))):
            kind = _pick(
                ("<f4", "<f8", "<f2", "|O", "<U7", "|S3", "<M8[s]", "|b1", "<c8", "|V9", "<i8", "nonsense", ">f4"), rng
            )
            shape = _pick(
                ((4, 3, 4, 4), (4, 3), (), (0, 3, 4, 4), (-1, 3, 4, 4), (2**40, 3, 4, 4), (2**62, 2**62), (4, 3, 5, 4)),
                rng,
            )
            header = {"descr": kind, "fortran_order": bool(rng.integers(2)), "shape": shape}
            if rng.integers(6) == 0:
                header = damaged_document({**header, "shape": list(shape)}, rng)
            text = repr(header).encode("utf-8", "replace") + b"\n"
            size = len(text) if rng.integers(5) else int(_pick((0, 1, 60000), rng))
            body = np.zeros(int(_pick((0, 16, 192, 5000), rng)), np.float32).tobytes()
            name = _pick(("x.npy", "x", "y.npy", ".npy", "../x.npy", "labels.npy"), rng)
            archive.writestr(name, b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + text + body)
    return content.getvalue()


@cache
def compressed() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of a pruned PyTorch model, and of one whose layers are divided: a plan and tensors."""
    import torch

    import bitwright
    from bitwright.compression.svd import svd_model
    from bitwright.torch.structure import save_compressed
    from tests.compression.test_compress import DATA, Net

    torch.manual_seed(0)
    pruned, divided = Net().eval(), Net().eval()
    plans = (
        bitwright.compress(pruned, DATA, {"macs": 0.5}, progress=False).plan,
        svd_model(divided, DATA, DATA[0], macs=0.6, progress=False).plan,
    )
    found = []
    for model, plan in zip((pruned, divided), plans, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            files = save_compressed(model, plan, Path(folder), "model")
            found.append({p.name: p.read_bytes() for p in files})
    return found[0], found[1]


def plan_case(rng: Random, folder: Path) -> Use:
    """A compressed model of which the plan or the tensors are damaged; and scores of layers."""
    from bitwright.compression.ratios import load_scores
    from bitwright.torch import load_compressed
    from tests.compression.test_compress import Net

    if rng.integers(5) == 0:
        path = folder / "scores.json"
        path.write_bytes(
            as_json(damaged_document({"format": 1, "scores": {"a": {"0.5": 0.9, "1": 1.0}, "b": {}}}, rng))
        )
        return lambda: load_scores(path, ["a", "b"])
    for name, content in _pick(compressed(), rng).items():
        (folder / name).write_bytes(content)
    _damage_any(_pick(sorted(folder.iterdir()), rng), rng)
    return lambda: load_compressed(Net().eval(), folder)


def _damage_any(path: Path, rng: Random) -> None:
    """Damage a JSON document, the header of safetensors, or bytes."""
    content, how = path.read_bytes(), int(rng.integers(9))
    if how == 0:
        path.unlink()
    elif path.suffix == ".safetensors" and how == 8:  # the length of the header, or an offset in it
        path.write_bytes(_false_lengths(content, rng))
    elif path.name == "config.json" and how == 8:
        path.write_bytes(as_json(_other_sizes(json.loads(content), rng)))
    elif path.suffix == ".json" and how < 6:
        document = json.loads(content)
        part = document.get("quantization_config") if rng.integers(4) else None  # the part of many that is read
        found = damaged_document(part or document, rng)
        path.write_bytes(as_json({**document, "quantization_config": found} if part else found))
    elif path.suffix == ".safetensors" and how < 6:
        size = int.from_bytes(content[:8], "little")
        header = as_json(damaged_document(json.loads(content[8 : 8 + size]), rng))
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    elif path.suffix == ".gguf" and how < 6:  # near its beginning, where the keys and shapes are
        begin = damaged_bytes(content[:4000], rng)
        path.write_bytes(begin + content[4000:])
    else:
        path.write_bytes(damaged_bytes(content, rng) if len(content) < 1 << 20 else content[: len(content) // 2])


def _false_lengths(content: bytes, rng: Random) -> bytes:
    size = int.from_bytes(content[:8], "little")
    if rng.integers(3) == 0:
        other = int(_pick((0, 1, size - 1, size + 1, len(content), 2**31, 2**63 - 1, 2**64 - 1), rng))
        return other.to_bytes(8, "little") + content[8:]
    header = json.loads(content[8 : 8 + size])
    entry = header[_pick(sorted(key for key in header if key != "__metadata__"), rng)]
    if rng.integers(2):
        entry["data_offsets"][int(rng.integers(2))] = int(_pick((0, 1, -4, 4, 2**40, 2**63), rng))
    else:
        entry["shape"] = _pick(
            ([], [0], [-1, 4], [2**40], [2**32, 2**32], [1, *entry["shape"]], entry["shape"][::-1]), rng
        )
    text = as_json(header)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _other_sizes(config: Any, rng: Random) -> Any:
    """Numbers of a model's configuration that its tensors do not have."""
    names = [key for key, value in config.items() if type(value) in (int, float, bool)]
    for name in (_pick(names, rng) for _ in range(int(rng.integers(1, 3)))):
        config[name] = _pick((0, 1, -1, 3, config[name] * 2, config[name] // 2, 2**20, 2**31, 1e-30, 0.5, True), rng)
    if rng.integers(4) == 0:
        config["architectures"] = [
            _pick(("MistralForCausalLM", "Qwen3ForCausalLM", "BertModel", "GPT2LMHeadModel", "Nonsense"), rng)
        ]
    if rng.integers(4) == 0:
        config["model_type"] = _pick(("mistral", "qwen3", "gemma3", "bert", "nonsense", "gpt2"), rng)
    return config


@cache
def language_model() -> dict[str, bytes]:
    """A folder of a tiny language model in shards."""
    from transformers import LlamaConfig

    from tests.llm.models import saved

    with tempfile.TemporaryDirectory() as folder:
        saved(Path(folder), LlamaConfig, num_hidden_layers=1)
        return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}


def language_case(rng: Random, folder: Path) -> Use:
    """A folder of a language model with a damaged file."""
    from bitwright.llm import open_checkpoint, quantize

    place = folder / "model"
    place.mkdir()
    for name, content in language_model().items():
        (place / name).write_bytes(content)
    _damage_any(_pick(sorted(place.iterdir()), rng), rng)
    to = _pick(("compressed-tensors", "gguf", "torchao"), rng)
    uses: tuple[Use, ...] = (
        lambda: open_checkpoint(place).load(),
        lambda: quantize(place, "w4g32", to=to, out=folder / "out"),
        partial(command, "llm", "quantize", place, "--preset", "w4g32", "--to", to, "--out", folder / "out"),
    )
    return _pick(uses, rng)


@cache
def packed(kind: str) -> dict[str, bytes]:
    """The files of a checkpoint of that kind."""
    from transformers import LlamaConfig

    from bitwright.llm import quantize
    from tests.llm.models import tiny

    with tempfile.TemporaryDirectory() as folder:
        quantize(tiny(LlamaConfig, num_hidden_layers=1), "w4g32", to=kind, out=Path(folder, "out"))
        return {p.name: p.read_bytes() for p in Path(folder, "out").iterdir() if p.is_file()}


def _packed_kinds() -> list[str]:
    from bitwright.llm import FILE_FORMATS

    return list(FILE_FORMATS)


def packed_case(rng: Random, folder: Path) -> Use:
    """A quantized checkpoint of some kind with a damaged file."""
    from bitwright.llm import read_checkpoint

    files = packed(_pick(_packed_kinds(), rng))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    victim = _pick(sorted(folder.iterdir()), rng)
    other = packed(_pick(_packed_kinds(), rng))
    if rng.integers(5) == 0 and victim.name in other:  # one file of another format
        victim.write_bytes(other[victim.name])
    else:
        _damage_any(victim, rng)

    def read() -> None:
        for weight in read_checkpoint(folder):
            weight.dequantize()

    return _pick((read, read, partial(command, "llm", "perplexity", folder, "--data", folder / "config.json")), rng)


KINDS: dict[str, Callable[[Random, Path], Use]] = {
    "onnx": onnx_case,
    "qdq": qdq_case,
    "folder": folder_case,
    "checkpoint": checkpoint_case,
    "config": config_case,
    "recipe": recipe_case,
    "encodings": encodings_case,
    "data": data_case,
    "plan": plan_case,
    "language": language_case,
    "packed": packed_case,
    **fuzz_readers.KINDS,
}
#: prepared before the first case, so that its time and memory are not a case's
_PREPARATIONS: dict[str, Callable[[], Any]] = {
    "qdq": lambda: [exported(n) for n in _EXPORTED],
    "folder": lambda: [exported(n) for n in _EXPORTED],
    "checkpoint": checkpoint,
    "plan": compressed,
    "language": language_model,
    "packed": lambda: [packed(kind) for kind in _packed_kinds()],
    **fuzz_readers.PREPARATIONS,
}


# ---------------------------------------------------------------------------------------------------- running


def run_case(kind: str, number: int, limits: Limits) -> Finding | None:
    """Run one case in this process."""
    from bitwright.errors import BitwrightError

    case, rng = f"{kind}:{number}", np.random.default_rng([zlib.crc32(kind.encode()), number])
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        use = KINDS[kind](rng, Path(folder))
        before = _peak_memory(reset=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                use()
        except BitwrightError as error:
            if not (error.site and error.problem and error.remedy):
                return Finding(case, "an error without place, problem or remedy", _place(error), str(error))
        except Exception as error:
            if limits.raises:
                raise
            return Finding(case, type(error).__name__, _place(error), f"{error!s:.300}")
        taken = _peak_memory() - before
        if taken > limits.memory:
            return Finding(case, "memory", kind, f"{taken} MiB beyond what it began with")
    return None


@dataclass(frozen=True)
class Limits:
    """Of one case: seconds, MiB, and whether an exception is raised instead of noted."""

    seconds: float = 60.0
    memory: int = 1024
    raises: bool = False


def _peak_memory(*, reset: bool = False) -> int:
    """MiB that this process held at most since the last reset."""
    if reset and sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
        text = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM")) >> 10
    if sys.platform == "linux":
        text = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM")) >> 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20


def _place(error: BaseException) -> str:
    """The innermost line of the package that an exception went through, or its innermost line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/bitwright/" in frame.filename]
    frame = (own or frames)[-1]
    where = frame.filename.partition("/bitwright/")[2] or frame.filename
    return f"{where}:{frame.lineno} in {frame.name}"


def _work(pipe: Any, kinds: list[str], seed: int, first: int, count: int, limits: Limits, log: str) -> None:
    """Run the cases from ``first`` on, in a process of its own, and say of each when it begins and how it ended."""
    sys.stdin = open(os.devnull)
    out = open(log, "w")
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    faulthandler.enable(out)
    logging.disable(logging.CRITICAL)
    for kind in kinds:
        _PREPARATIONS.get(kind, lambda: None)()
    for index in range(first, count):
        kind, number = case_of(kinds, seed, index)
        pipe.send(("begin", index))
        faulthandler.dump_traceback_later(limits.seconds, file=out)
        with redirect_stdout(out), redirect_stderr(out):
            finding = run_case(kind, number, limits)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(("end", finding))
    pipe.send(("done", None))


def case_of(kinds: list[str], seed: int, index: int) -> tuple[str, int]:
    """Kind and number of the case ``index`` of a run."""
    return kinds[index % len(kinds)], seed * 1_000_000 + index


def fuzz(kinds: list[str], seed: int, seconds: float, count: int, limits: Limits) -> Iterator[Finding | int]:
    """Findings of a run that ends after ``count`` cases or ``seconds``; its last item is the number of cases."""
    import tests.conformance.test_damaged_files  # noqa: F401  (what workers need, loaded once)

    end, index = time.monotonic() + seconds, 0
    late: Finding | None = None  # of a case that runs again by itself and for longer: the machine may be busy
    while index < count and time.monotonic() < end:
        with tempfile.TemporaryDirectory(prefix="fuzz") as room:
            log = str(Path(room, "log"))
            here, there = _FORK.Pipe()
            given = limits if late is None else replace(limits, seconds=_PATIENCE * limits.seconds)
            last = count if late is None else index + 1
            worker = _FORK.Process(target=_work, args=(there, kinds, seed, index, last, given, log), daemon=True)
            worker.start()
            there.close()
            done = begun = False
            try:
                while time.monotonic() < end:
                    word, value = _receive(here, end - time.monotonic())
                    if word == "done":
                        done, late = late is None, None
                        break
                    if word == "begin":
                        begun, index = True, value
                        word, value = _receive(here, given.seconds + 2)
                    if word == "end":
                        index += 1
                        if value is not None:
                            yield value
                        continue
                    kind, number = case_of(kinds, seed, index)
                    worker.join(1 if word == "gone" else 0)
                    if word == "late" and not begun and index:
                        break  # the time of the run ended while a new worker prepared
                    if not begun:
                        text = Path(log).read_text(errors="replace")[-3000:]
                        state = f"ended with {worker.exitcode}" if word == "gone" else "still prepares its cases"
                        raise RuntimeError(f"the worker of case {kind}:{number} {state}:\n{text}")
                    what = "hang" if word == "late" else f"crash, exit code {worker.exitcode}"
                    text = Path(log).read_text(errors="replace")[-3000:]
                    found = Finding(f"{kind}:{number}", what, _place_in(text), text)
                    if word == "late" and late is None:
                        late = found
                        break
                    late = None
                    yield found
                    index += 1
                    break
            finally:
                worker.kill()
                worker.join()
            if done:
                break
    if late is not None:
        yield late
    yield index


def _receive(pipe: Any, seconds: float) -> tuple[str, Any]:
    """What the worker says; ``late`` and ``gone`` where it says nothing."""
    try:
        return pipe.recv() if pipe.poll(max(0.1, seconds)) else ("late", None)
    except (EOFError, ConnectionResetError):
        return "gone", None


def _place_in(text: str) -> str:
    """The innermost line of the package in what :mod:`faulthandler` wrote."""
    lines = [line.strip() for line in text.splitlines() if "/bitwright/" in line and line.strip().startswith("File")]
    return lines[0].partition("/bitwright/")[2] if lines else "outside of the package"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="time of the run")
    parser.add_argument("--count", type=int, default=10**9, help="number of cases at most")
    parser.add_argument("--seed", type=int, default=0, help="which cases: another seed, other numbers")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of them, with commas between")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one case")
    parser.add_argument("--memory", type=int, default=1024, help="MiB of one case beyond what it began with")
    parser.add_argument("--case", help="KIND:NUMBER, run here, with its traceback")
    given = parser.parse_args()
    if given.case:
        kind, _, number = given.case.partition(":")
        found = run_case(kind, int(number), Limits(given.limit, given.memory, raises=True))
        print(found or "an answer")
        return int(found is not None)
    places: Counter[tuple[str, str]] = Counter()
    count = 0
    limits = Limits(given.limit, given.memory)
    for found in fuzz(given.kinds.split(","), given.seed, given.seconds, given.count, limits):
        if isinstance(found, int):
            count = found
            continue
        places[found.what, found.place] += 1
        if places[found.what, found.place] == 1:
            print(f"{found.case}  {found.what}  {found.place}\n    {found.text}", flush=True)
    print(f"{count} cases, {sum(places.values())} without an answer, at {len(places)} places")
    for (what, place), times in places.most_common():
        print(f"{times:6d}  {what}  {place}")
    return int(bool(places))


if __name__ == "__main__":
    sys.exit(main())
