"""Cases of ``fuzz.py`` for readers of other files: folders that other tools quantized, adapters, programs, certificates, labels,
state of searches, profiles, LiteRT files, scripts, and what AIMET's names read.

Tensors are damaged as tensors, too: an archive whose header and bytes fit each other may hold other shapes, types and numbers.
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.damage import as_json, damaged_bytes, damaged_document

Random = np.random.Generator
Use = Callable[[], Any]
_NUMBERS = (0, 1, -1, 7, 255, 2**31 - 1, -(2**31))


def pick(values: Any, rng: Random) -> Any:
    """One of some values."""
    return values[int(rng.integers(len(values)))]


def copied(files: dict[str, bytes], folder: Path) -> Path:
    """The folder, made where it is missing, with these files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """All files of a folder, by their path in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---------------------------------------------------------------------------------------------- damage of tensors


def damaged_tensors(path: Path, rng: Random) -> None:
    """Exchange one or two tensors of a safetensors file by others; the file itself is as it should be."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    for _ in range(int(rng.integers(1, 3))):
        name = pick(sorted(tensors), rng)
        tensors[name] = _other(tensors[name], rng, torch)
        if rng.integers(8) == 0:
            del tensors[name]
        elif rng.integers(8) == 0:
            tensors[f"{name}.more"] = tensors[name].clone()
        if not tensors:
            break
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata)


def _other(tensor: Any, rng: Random, torch: Any) -> Any:
    kind, flat = int(rng.integers(9)), tensor.reshape(-1)
    if kind == 0:
        return flat.clone()
    if kind == 1:
        return flat[:0].clone()
    if kind == 2:
        return torch.cat((tensor, tensor)) if tensor.ndim else tensor[None].clone()
    if kind == 3:
        return tensor.T.clone() if tensor.ndim == 2 else tensor[None].clone()
    if kind == 4:
        return tensor.to(pick((torch.float16, torch.float64, torch.int64, torch.int8, torch.bool), rng))
    if kind == 5 and tensor.is_floating_point():
        value = pick((0.0, -1.0, float("nan"), float("inf"), 1e30), rng)
        return torch.full_like(tensor, value, dtype=torch.float64).to(tensor.dtype)  # float16 has no 1e30
    if kind == 6 and len(flat) > 1 and tensor.dtype != torch.bool:
        changed = flat.clone()
        changed[int(rng.integers(len(flat)))] = pick(_NUMBERS, rng) & 0x7F
        return changed.reshape(tensor.shape)
    if kind == 7 and not tensor.is_floating_point() and tensor.dtype != torch.bool:
        limits = torch.iinfo(tensor.dtype)
        return torch.full_like(tensor, max(limits.min, min(limits.max, pick(_NUMBERS, rng))))
    return tensor[:-1].clone() if tensor.ndim and len(tensor) else flat.clone()


def damage(path: Path, rng: Random) -> None:
    """Damage one file as its kind allows; it may be gone, or a folder."""
    content, how = path.read_bytes(), int(rng.integers(12))
    if how == 0:
        path.unlink()
    elif how == 1 and rng.integers(4) == 0:
        path.unlink()
        path.mkdir()
    elif path.suffix == ".safetensors" and how < 8:
        damaged_tensors(path, rng)
    elif path.suffix == ".safetensors" and how < 11:
        size = int.from_bytes(content[:8], "little")
        header = as_json(damaged_document(json.loads(content[8 : 8 + size]), rng))
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    elif path.suffix in (".json", ".encodings") and how < 9:
        path.write_bytes(as_json(damaged_document(json.loads(content), rng)))
    elif path.suffix == ".gguf" and how < 9:  # near its beginning, where the keys and shapes are
        path.write_bytes(damaged_bytes(content[:4000], rng) + content[4000:])
    else:
        path.write_bytes(damaged_bytes(content, rng))


def damage_one(folder: Path, rng: Random, wanted: str = "") -> None:
    """Damage one file of a folder; most often one whose name has ``wanted`` in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    chosen = [path for path in files if wanted in path.name] if rng.integers(3) else files
    damage(pick(chosen or files, rng), rng)


# ------------------------------------------------------------------------------------------------- language models


@cache
def foreign_folder(kind: str) -> dict[str, bytes]:
    """A folder as AutoGPTQ or AutoAWQ writes it."""
    from transformers import LlamaConfig

    from tests.llm.models import tiny
    from tests.llm.test_opened import foreign

    with tempfile.TemporaryDirectory() as folder:
        foreign(Path(folder), tiny(LlamaConfig, num_hidden_layers=1), kind, desc_act=kind == "gptq")
        return files_in(Path(folder))


def foreign_case(rng: Random, folder: Path) -> Use:
    """A damaged GPTQ or AWQ folder."""
    from bitwright.llm import convert, read_checkpoint, simulate_quantized

    place = copied(foreign_folder(pick(("gptq", "awq"), rng)), folder / "model")
    if rng.integers(3) == 0:
        path = place / "config.json"
        document = json.loads(path.read_bytes())
        document["quantization_config"] = damaged_document(document["quantization_config"], rng)
        path.write_bytes(as_json(document))
    else:
        damage_one(place, rng, ".safetensors")
    to = pick(("compressed-tensors", "gguf", "torchao"), rng)

    def read() -> None:
        for weight in read_checkpoint(place):
            weight.dequantize()

    return pick((read, lambda: simulate_quantized(place), lambda: convert(place, to, folder / "out")), rng)


@cache
def gguf_adapters() -> tuple[dict[str, bytes], dict[str, Any]]:
    """Files of llama.cpp's adapters, and the configuration of their model."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig

    from bitwright.llm import write_gguf_adapters
    from tests.llm.models import tiny

    model = get_peft_model(
        tiny(LlamaConfig, num_hidden_layers=1), LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    )
    with tempfile.TemporaryDirectory() as folder:
        write_gguf_adapters(model, Path(folder, "gguf"))
        model.save_pretrained(Path(folder, "peft"))
        return files_in(Path(folder)), model.get_base_model().config.to_dict()


def adapter_case(rng: Random, folder: Path) -> Use:
    """Damaged adapters: a file of llama.cpp, or a folder of PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig

    from bitwright.llm import read_gguf_adapter
    from bitwright.torch import QuantizationSimModel, load_adapter
    from tests.llm.models import prompts, tiny

    files, config = gguf_adapters()
    copied(files, folder)
    if rng.integers(2):
        path = pick(sorted((folder / "gguf").iterdir()), rng)
        damage(path, rng)
        return lambda: read_gguf_adapter(path, config)
    damage_one(folder / "peft", rng, "adapter")

    def load() -> None:
        base = tiny(LlamaConfig, num_hidden_layers=1)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "up_proj"])).eval()
        sim = QuantizationSimModel(model, {"input_ids": prompts(1)}, config_file={"preset": "w4"})
        sim.compute_encodings(progress=False)
        load_adapter(sim, folder / "peft", "other")

    return load


# ------------------------------------------------------------------------------------------------------ programs


@cache
def programs() -> dict[str, bytes]:
    """A program of ``torch.export`` and the folder of a packed model."""
    import torch
    from torch import nn

    from bitwright.torch import QuantizationSimModel, pack

    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval(),
        torch.randn(2, 3, 8, 8),
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.export.save(torch.export.export(net, (x,)), Path(folder, "net.pt2"))
        sim = QuantizationSimModel(net, x)
        sim.compute_encodings([x], progress=False)
        pack(sim, Path(folder, "packed"))
        return files_in(Path(folder))


def program_case(rng: Random, folder: Path) -> Use:
    """A damaged ``.pt2`` file or packed model."""
    import torch

    import bitwright
    from bitwright.torch import load_packed

    copied(programs(), folder)
    x = torch.randn(2, 3, 8, 8)
    if rng.integers(3) == 0:
        path = folder / "net.pt2"
        _damage_archive(path, rng)
        return lambda: bitwright.quantize(path, [x, x], recipe=["fold"], progress=False)
    damage_one(folder / "packed", rng)
    return lambda: load_packed(folder / "packed")(x)


def _damage_archive(path: Path, rng: Random) -> None:
    """Damage one entry of a zip archive, or the archive."""
    import zipfile

    if rng.integers(3) == 0:
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        return
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = pick(sorted(entries), rng)
    if name.endswith(".json") and rng.integers(4):
        entries[name] = as_json(damaged_document(json.loads(entries[name]), rng))
    else:
        entries[name] = damaged_bytes(entries[name], rng)
    if rng.integers(8) == 0:
        del entries[name]
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in entries.items():
            archive.writestr(entry, content)


# --------------------------------------------------------------------------------------- exports and what is beside


@cache
def certified() -> dict[str, bytes]:
    """An export with its certificate, and a LiteRT file."""
    import torch
    from torch import nn

    import bitwright.torch
    from bitwright.compare.certificate import certify

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)).eval()
    data = [torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        made = bitwright.torch.quantize(
            net, data, path=folder, recipe=["fold"], progress=False, measure_speed=False, filename_prefix="net"
        )
        certify(folder)
        made.sim.export(Path(folder, "flat"), "net", target="litert")
        return files_in(Path(folder))


def certificate_case(rng: Random, folder: Path) -> Use:
    """A damaged certificate, whose digest may be that of the damage, or a damaged LiteRT file."""
    from fuzz import command

    from bitwright.compare.certificate import _digest, _text, check_certificate, compare_certificates, read_certificate
    from bitwright.compare.executed_flat import FlatExecutor
    from bitwright.executors.profile import find_profile

    copied(certified(), folder)
    flat = folder / "flat" / "net.tflite"
    if rng.integers(2):
        flat.write_bytes(damaged_bytes(flat.read_bytes(), rng))
        uses: tuple[Use, ...] = (
            lambda: FlatExecutor(flat.read_bytes(), find_profile("xnnpack")),
            partial(command, "show", flat.parent),
            partial(command, "show", flat),
            partial(command, "verify", flat.parent, "--runtime", "litert"),
            partial(command, "verify", flat.parent, "--as", "xnnpack"),
        )
        return pick(uses, rng)
    path, whole = folder / "net_certificate.json", folder / "whole.json"
    whole.write_bytes(path.read_bytes())
    if rng.integers(3):
        document = damaged_document(json.loads(path.read_bytes()), rng)
        if isinstance(document, dict):
            document.pop("digest", None)
            try:
                document = {**document, "digest": _digest(document)}
                path.write_text(_text(document))
            except (ValueError, TypeError):
                path.write_bytes(as_json(document))
    else:
        damage(path, rng)
    return pick(
        (
            lambda: read_certificate(path),
            lambda: check_certificate(folder),
            lambda: compare_certificates(path, whole),
            partial(command, "verify", folder, "--certificate"),
            partial(command, "diff", path, whole),
        ),
        rng,
    )


# --------------------------------------------------------------------------------------- labels, profiles, scripts


def _labels() -> dict[str, bytes]:
    array, archive, table = io.BytesIO(), io.BytesIO(), io.StringIO()
    np.save(array, np.arange(4))
    np.savez(archive, y=np.arange(4))
    csv.writer(table).writerows([["name", "label"], *([f"{i}.png", i] for i in range(4))])
    coco = {
        "categories": [{"id": 1}, {"id": 7}],
        "images": [{"id": i, "file_name": f"{i}.jpg"} for i in range(4)],
        "annotations": [{"bbox": [1, 2, 3, 4.5], "category_id": 7, "image_id": i, "iscrowd": 0} for i in range(4)],
    }
    return {
        "a.npy": array.getvalue(), "a.npz": archive.getvalue(), "a.json": json.dumps([0, 1, 2, 3]).encode(),
        "coco.json": json.dumps(coco).encode(), "a.csv": table.getvalue().encode(), "a.txt": b"0\n1\n2\n3\n",
    }  # fmt: skip


def labels_case(rng: Random, folder: Path) -> Use:
    """Damaged labels, and vocabularies of a metric."""
    from bitwright.metrics.labels import read_labels
    from bitwright.metrics.metric import find_metric

    path = copied(_labels(), folder) / pick(sorted(_labels()), rng)
    damage(path, rng)
    if rng.integers(4) == 0 and path.suffix in (".json", ".txt"):
        return lambda: find_metric({"wer": {"vocabulary": str(path)}})
    return lambda: read_labels(path)


_SCRIPT = """import aimet_torch
from aimet_torch.quantsim import QuantizationSimModel as Sim
from aimet_onnx import batch_norm_fold
%matplotlib inline
sim = Sim(model, dummy_input=x, quant_scheme="tf_enhanced")
sim.compute_encodings(lambda m: m(x))
aimet_torch.v1.adaround.Adaround.apply_adaround(model, x)
"""


def script_case(rng: Random, folder: Path) -> Use:
    """A damaged script or notebook, a damaged profile, and settings of a metric."""
    from bitwright.executors.profile import FOLDER, find_profile
    from bitwright.migrate import migrate_file

    kind = int(rng.integers(3))
    if kind == 0:
        path = folder / "own.toml"
        content = pick(sorted(FOLDER.glob("*.toml")), rng).read_bytes()
        path.write_bytes(damaged_bytes(content, rng))
        return lambda: find_profile(path)
    if kind == 1:
        return lambda: migrate_file(damaged_bytes(_SCRIPT.encode(), rng), "a.py")
    cell = {"cell_type": "code", "source": _SCRIPT.splitlines(keepends=True), "metadata": {}, "outputs": []}
    document = {"cells": [cell, {**cell, "source": _SCRIPT}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    content = as_json(damaged_document(document, rng)) if rng.integers(4) else damaged_bytes(as_json(document), rng)
    return lambda: migrate_file(content, "a.ipynb")


# ------------------------------------------------------------------------------------------- state that is resumed


@cache
def resumed() -> dict[str, bytes]:
    """Folders of an automatic search, of measured times, of an analysis and of a language model's blocks."""
    with tempfile.TemporaryDirectory() as folder:
        for use in _long_runs(Path(folder)).values():
            use()
        return files_in(Path(folder))


def _long_runs(folder: Path) -> dict[str, Use]:
    import bitwright
    from bitwright.precision.auto import auto_quantize
    from bitwright.precision.trials import Trial
    from tests.precision.nets import batches, model

    net, data = model("onnx"), batches("onnx")[:2]

    def simulated() -> Any:
        from bitwright.onnx import QuantizationSimModel

        sim = QuantizationSimModel(net, threads=1)
        sim.compute_encodings(data, progress=False)
        return sim

    return {
        "auto": lambda: auto_quantize(
            net,
            data,
            folder=folder / "auto",
            trials=(Trial("a", "w8a8", recipe=("fold",)),),
            min_sqnr=1,
            progress=False,
        ),
        "analyze": lambda: bitwright.analyze(simulated(), data, progress=False, resume=folder / "analyze"),
        "times": lambda: bitwright.measure_times(simulated(), data, ["w8a8"], path=folder / "times.json", rounds=1),
        "search": lambda: bitwright.mixed_precision(
            simulated(), data, ["w8a8", "w4a8"], budget=0.9, folder=folder / "search", evaluations=2, rounding=False
        ),
    }


def resume_case(rng: Random, folder: Path) -> Use:
    """A long run that goes on from a damaged file of its first part."""
    copied(resumed(), folder)
    kind = pick(sorted(_long_runs(folder)), rng)
    place = folder / kind
    if place.is_dir():
        damage_one(place, rng, ".json")
    elif (folder / "times.json").is_file():
        damage(folder / "times.json", rng)
    return _long_runs(folder)[kind]


# ------------------------------------------------------------------------------------------------- AIMET's names


@cache
def aimet_files() -> dict[str, bytes]:
    """Encodings and configurations as AIMET's functions write and read them."""
    with tempfile.TemporaryDirectory() as folder:
        sim, _ = _aimet_sim()
        sim.save_encodings_to_json(folder, "torch")
        sim.export(folder, "net", _input())
        return {name: content for name, content in files_in(Path(folder)).items() if not name.endswith(".npz")}


def _input() -> Any:
    import torch

    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def _aimet_sim(config: Any = None) -> tuple[Any, Any]:
    import torch
    from torch import nn

    from bitwright.aimet_torch.quantsim import QuantizationSimModel

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    sim = QuantizationSimModel(net, _input(), **({"config_file": str(config)} if config else {}))
    sim.compute_encodings(lambda model: model(_input()))
    return sim, net


def aimet_case(rng: Random, folder: Path) -> Use:
    """Damaged encodings and configurations, given to AIMET's functions."""
    from bitwright.aimet_common.utils import get_path_for_per_channel_config
    from bitwright.aimet_torch.quantsim import load_encodings_to_sim

    if rng.integers(3) == 0:
        path = folder / "config.json"
        document = json.loads(Path(get_path_for_per_channel_config()).read_bytes())
        path.write_bytes(as_json(damaged_document(document, rng)))
        return lambda: _aimet_sim(path)
    copied(aimet_files(), folder)
    path = pick(sorted(p for p in folder.iterdir() if p.suffix in (".json", ".encodings")), rng)
    damage(path, rng)
    sim, _ = _aimet_sim()
    return pick(
        (
            lambda: load_encodings_to_sim(sim, str(path)),
            lambda: sim.load_encodings(str(path), strict=False, partial=True),
            lambda: sim.set_and_freeze_param_encodings(str(path)),
        ),
        rng,
    )


_PEFT = find_spec("peft") is not None

KINDS: dict[str, Callable[[Random, Path], Use]] = {
    "foreign": foreign_case,
    "program": program_case,
    "certificate": certificate_case,
    "labels": labels_case,
    "script": script_case,
    "resume": resume_case,
    "aimet": aimet_case,
    **({"adapter": adapter_case} if _PEFT else {}),
}
#: kinds whose valid files take seconds to make
SLOW = ("foreign", "adapter", "program", "certificate", "resume", "aimet")
PREPARATIONS: dict[str, Callable[[], Any]] = {
    "foreign": lambda: [foreign_folder(kind) for kind in ("gptq", "awq")],
    "program": programs,
    "certificate": certified,
    "resume": resumed,
    "aimet": aimet_files,
    **({"adapter": gguf_adapters} if _PEFT else {}),
}
