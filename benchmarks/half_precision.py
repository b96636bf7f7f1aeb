"""Files of half precision of trained models, by Bitwright and by other converters: size, answers, and what stays in float32.

    python benchmarks/half_precision.py --markdown benchmarks/results/half_precision.md    # some minutes on one core

The models are the trained ones of the developer data set (`shared/data` beside the checkout, or `--data`), which the tests use
too; five ONNX files and three of PyTorch. ``ours`` is ``quantize(model, data, preset="fp16", recipe=["fold"])``; ``common`` is
``onnxconverter_common.float16.convert_float_to_float16(model, keep_io_types=True)`` of the float file of the same export,
``modelopt`` is ``modelopt.onnx.autocast.convert_to_mixed_precision`` of it, each where it is installed. Batches beyond those that
were calibrated on are run in ONNX Runtime, and answers compared with those of the float model.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import numpy as np
import onnx
import onnxruntime
import torch

import bitwright
from bitwright.core.simulation.float_model import sqnr
from bitwright.runtimes.onnxruntime import inputs_for

BATCHES, CALIBRATED = 12, 4
Feeds = dict[str, np.ndarray[Any, Any]]


def pictures(data: Path, name: str) -> np.ndarray[Any, Any]:
    """Real pictures, [N, H, W] or [N, H, W, 3], uint8."""
    key = {"mnist": "mnist_small.npz", "cifar": "cifar10_small.npz"}[name]
    return np.load(data / key)["test_x"][:BATCHES]


def resized(images: np.ndarray[Any, Any], height: int, width: int) -> np.ndarray[Any, Any]:
    """Pictures at another size, bilinear; [N, 3, H, W], float32, 0 to 255."""
    x = torch.from_numpy(images.transpose(0, 3, 1, 2).astype(np.float32))
    return torch.nn.functional.interpolate(x, (height, width), mode="bilinear").numpy()


def onnx_models(data: Path) -> Iterator[tuple[str, Path, list[Feeds]]]:
    """Name, file and feeds of each ONNX model."""
    digits, colours = pictures(data, "mnist").astype(np.float32)[:, None], pictures(data, "cifar")
    text = np.frombuffer((data / "tinyshakespeare.txt").read_bytes()[-20000:], np.uint8)
    folder = data / "onnx"
    yield "mnist_cntk", folder / "mnist_cntk.onnx", [{"Input3": x[None]} for x in digits]
    yield "mnist_pytorch", folder / "mnist_pytorch.onnx", [{"0": (x[None] / 255 - 0.1307) / 0.3081} for x in digits]
    faces = (resized(colours, 240, 320) - 127) / 128
    yield "face_slim_320", folder / "face_slim_320.onnx", [{"input": x[None]} for x in faces]
    small = (colours.transpose(0, 3, 1, 2) / 255 - np.array([0.485, 0.456, 0.406]).reshape(3, 1, 1)) / np.array(
        [0.229, 0.224, 0.225]
    ).reshape(3, 1, 1)
    yield "resnet20_aux", folder / "resnet20_aux.onnx", [{"input": x[None].astype(np.float32)} for x in small]
    shape = onnxruntime.InferenceSession(str(folder / "lstm_char.onnx")).get_inputs()[0].shape
    length = shape[1] if isinstance(shape[1], int) else 64
    letters = {c: i for i, c in enumerate(sorted(set((data / "tinyshakespeare.txt").read_bytes())))}
    tokens = np.array([letters[c] for c in text[: BATCHES * length]], np.int64).reshape(BATCHES, 1, length)
    yield "lstm_char", folder / "lstm_char.onnx", [{"tokens": x} for x in tokens]


def torch_models(data: Path) -> Iterator[tuple[str, torch.nn.Module, list[torch.Tensor]]]:
    """Name, module and batches of each PyTorch model."""
    sys.path.insert(0, str(data / "models"))
    from llama_tiny import LlamaTiny
    from mobilenet_v1 import MobileNetV1
    from mobilenet_v2_cifar import MobileNetV2Cifar
    from safetensors.torch import load_file

    def loaded(model: torch.nn.Module, name: str, strict: bool = True) -> torch.nn.Module:
        model.load_state_dict(load_file(data / "models" / f"{name}.safetensors"), strict=strict)
        return model.eval()

    colours = pictures(data, "cifar")
    large = [torch.from_numpy(x[None] / 127.5 - 1) for x in resized(colours, 224, 224)]
    yield "mobilenet_v1_025", loaded(MobileNetV1(), "mobilenet_v1_025"), large
    small = torch.from_numpy(colours.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1)
    yield "mobilenet_v2_cifar", loaded(MobileNetV2Cifar(), "mobilenet_v2_cifar"), list(small.split(1))
    tokens = np.load(data / "stories_tokens.npz")["test"][:BATCHES, :64].astype(np.int64)
    yield "stories260k", loaded(LlamaTiny(), "stories260k", strict=False), list(torch.from_numpy(tokens).split(1))


def by_common(source: Path, out: Path, _: list[Feeds]) -> None:
    """onnxconverter-common."""
    from onnxconverter_common import float16

    onnx.save(float16.convert_float_to_float16(onnx.load(source), keep_io_types=True), out)


def by_modelopt(source: Path, out: Path, _: list[Feeds]) -> None:
    """NVIDIA Model Optimizer."""
    from modelopt.onnx.autocast import convert_to_mixed_precision

    onnx.save(convert_to_mixed_precision(str(source), low_precision_type="fp16"), out)


PEERS: dict[str, tuple[str, Callable[[Path, Path, list[Feeds]], None]]] = {
    "common": ("onnxconverter_common", by_common),
    "modelopt": ("modelopt", by_modelopt),
}


def signal_of_crash(path: Path) -> int:
    """The signal that ends a process of its own in which ONNX Runtime loads a file; 0 where it does not end so."""
    load = "import onnxruntime, sys; onnxruntime.InferenceSession(sys.argv[1])"
    return max(0, -subprocess.run([sys.executable, "-c", load, str(path)], capture_output=True, check=False).returncode)


def facts(path: Path, whole: Path, feeds: list[Feeds]) -> list[str]:
    """Size against float, Casts, worst dB of an output, and whether all are finite."""
    size = f"{path.stat().st_size / whole.stat().st_size:.2f}"
    model = onnx.load(path)
    casts = sum(node.op_type == "Cast" for node in model.graph.node)
    if signal := signal_of_crash(path):
        return [size, str(casts), "crashes", f"ONNX Runtime ends with signal {signal} when it loads the file"]
    try:
        mine, reference = (onnxruntime.InferenceSession(str(p)) for p in (path, whole))
        pairs = [
            (y, z)
            for one in feeds
            for y, z in zip(reference.run(None, one), mine.run(None, inputs_for(mine, one)), strict=True)
            if y.dtype.kind == "f"
        ]
    except Exception as error:  # what a runtime refuses is a result of this table
        return [size, str(casts), "refused", str(error).strip().splitlines()[0][:60]]
    finite = all(np.isfinite(z).all() for y, z in pairs if np.isfinite(y).all())
    return [size, str(casts), f"{min(sqnr(y, z.astype(np.float32)) for y, z in pairs):.1f}", "yes" if finite else "NO"]


def rows(data: Path) -> Iterator[list[str]]:
    """One row per model and converter."""
    logging.getLogger("bitwright").setLevel(logging.ERROR)
    cases: list[tuple[str, Any, list[Any]]] = [*onnx_models(data), *torch_models(data)]
    for name, model, batches in cases:
        with tempfile.TemporaryDirectory() as folder:
            result = bitwright.quantize(
                model,
                batches[:CALIBRATED],
                preset="fp16",
                recipe=["fold"],
                path=folder,
                progress=False,
                measure_speed=False,
            )
            exported = result.exported
            feeds = batches
            if isinstance(batches[0], torch.Tensor):
                key = onnxruntime.InferenceSession(str(exported.qdq)).get_inputs()[0].name
                feeds = [{key: x.numpy()} for x in batches]
            kept = sum("in float32:" in note for note in exported.notes)
            yield [name, "ours", *facts(exported.qdq, exported.float_model, feeds), str(kept)]
            for peer, (module, convert) in PEERS.items():
                if importlib.util.find_spec(module) is None:
                    continue
                out = Path(folder, f"{peer}.onnx")
                try:
                    convert(exported.float_model, out, feeds)
                except Exception as error:  # noqa: BLE001  # a converter that fails is a result
                    yield [name, peer, "", "", "fails", f"{type(error).__name__}: {error}".splitlines()[0][:60], ""]
                    continue
                yield [name, peer, *facts(out, exported.float_model, feeds), ""]


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=measure.ROOT.parent / "shared" / "data")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    lines = [
        "| model | by | size / float | Casts | worst dB | all finite | in float32 |",
        "|---|---|---:|---:|---:|---|---:|",
    ]
    for row in rows(options.data):
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    if options.markdown is not None:
        versions = f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}, torch {torch.__version__}"
        text = (
            "# Half precision\n\n"
            "`python benchmarks/half_precision.py`, trained models, 12 batches of real data of which 4 were calibrated on, "
            f"run in ONNX Runtime on CPUs; {versions}.\n\n"
        )
        options.markdown.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
