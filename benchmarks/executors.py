"""Trained networks as each profile computes them.

One row per profile: the metric; the share of values that are those of the exported file, and of codes that are those of the
runtime where it is here, run from the input on; the first layer that differs from the file, and why; time of the metric.

    python benchmarks/executors.py resnet20_aux --samples 500

Needs the developer data set. Results: benchmarks/results/executors.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from bitwright.compare.drift import drift
from bitwright.compare.executed import CodeExecutor
from bitwright.compare.runtime import EXACT_SUMS
from bitwright.compare.sides import read_model
from bitwright.compare.target import TargetSession, open_target
from bitwright.errors import ExportError
from bitwright.executors.profile import find_profile
from bitwright.runtimes.adapters import session_of
from bitwright.runtimes.onnxruntime import FLOAT_KERNELS, new_session, session_options
from tests.support import data
from tests.support.deployed import first_output, quantized
from tests.support.tasks import TASKS
from tests.support.without_vnni import lacks_vnni

PROFILES = ("ort_x64", "ort_x64_avx2", "ort_arm", "litert_reference", "xnnpack", "cmsis_nn", "tensorrt", "htp")
#: samples that are compared tensor by tensor: those of a file with a fixed batch, else four
COMPARED = {"mnist_cntk": 1, "mnist_pytorch": 1, "face_slim_320": 1, "lstm_char": 16, "stories260k": 8}
FRONT_END = {"mnist_cntk": "onnx", "mnist_pytorch": "onnx", "face_slim_320": "onnx", "lstm_char": "onnx"}


def few(name: str, count: int) -> tuple[Tensor, Callable[[Any], float]]:
    """Some samples, and the metric of the first output on them."""
    if name in ("lstm_char", "stories260k"):
        rows = (
            data.shakespeare("test")[: count * 129].reshape(count, 129)
            if name == "lstm_char"
            else data.stories()[:count]
        )
        return rows[:, :-1], lambda run: data.perplexity(run, rows)
    if name.startswith("mnist"):
        pixels, labels = data.mnist()
        x = torch.from_numpy(pixels[:count].astype(np.float32)[:, None])
        x = (x / 255 - 0.1307) / 0.3081 if name == "mnist_pytorch" else x
        return x, lambda run: data.accuracy(run, data.Images(x, torch.from_numpy(labels[:count])), batch=1)
    if name == "face_slim_320":  # anchors that score above 0.7, against those of the float model: F1
        task = TASKS[name]()
        return task.samples()[:count], task.score
    images = (data.imagenet() if name == "mobilenet_v1_025" else data.cifar())[slice(0, count)]
    return images.x, lambda run: data.accuracy(run, images)


def compared(session: TargetSession, folder: Path, x: np.ndarray) -> tuple[str, str]:
    """Share of codes that are those of the runtime, and the first tensor that differs; empty where it is not here."""
    codes: dict[str, np.ndarray] = {}
    source, profile = session.get_inputs()[0].name, session.profile.name
    session.run(None, {source: x}, codes.__setitem__)
    if profile in ("litert_reference", "xnnpack"):
        content = (folder / "model.tflite").read_bytes()
        there = session_of(content, reference=profile == "litert_reference", keeps=True)
        there.run({source: x})
        places = {found["name"]: found["index"] for found in there.interpreter.get_tensor_details()}
        made = {name: there.interpreter.get_tensor(places[name]) for name in codes}
    elif profile == "ort_x64" or (profile == "ort_x64_avx2" and lacks_vnni()):
        model = read_model(folder / "model.onnx")
        kernels = CodeExecutor(model, session.profile).kernels
        values = [kernel.quantizer.outputs[0] for kernel in kernels if kernel.quantizer is not None]
        if not values and codes:  # kernels in the bodies of Scan alone, whose codes lead to the outputs
            values = list(model.graph.outputs)
            codes = dict(zip((str(v.name) for v in values), session.run(None, {source: x}), strict=True))
        model.graph.outputs.extend(v for v in values if not v.is_graph_output())
        entries = EXACT_SUMS if profile == "ort_x64" else {}
        opened = new_session(ir.to_proto(model).SerializeToString(), session_options(entries=entries))
        if not values:
            return "no integer kernel", ""
        names = [str(value.name) for value in values]
        made = dict(zip(names, opened.run(names, {source: x}), strict=True))
    else:
        return "", ""
    same = sum(int((made[name] == codes[name]).sum()) for name in made)
    total = sum(array.size for array in made.values())
    first = next((name for name in made if not np.array_equal(made[name], codes[name])), "none")
    return f"{same / max(total, 1):.4%}", first


def parted(folder: Path, profile: str, feeds: dict[str, np.ndarray]) -> tuple[str, str]:
    """Share of values that are those of the simulation, run from the input on; the first layer that differs, and why."""
    try:
        report = drift(f"{folder}@file", f"{folder}@{profile}", feeds, diagnoses=1)
    except ExportError as error:  # a part of the file that LiteRT does not have by itself
        return "", f"not cut: {error.problem}"
    count = sum(row.carried.elements for row in report.rows)
    equal = sum(row.carried.equal * row.carried.elements for row in report.rows) / max(count, 1)
    differs = next((row for row in report.rows if row.carried.equal < 1), None)
    if differs is None:
        return f"{equal:.2%}", "none"
    kernel = "" if differs.kernel == "float" else f" ({differs.kernel})"
    why = "" if report.first is None else f": {report.first.cause}"
    where = "" if report.first is None or report.first.name == differs.name else f" at {report.first.name}"
    return f"{equal:.2%}", f"{differs.name}{kernel}{why}{where}"


def rows(name: str, count: int, recurrent: str | None) -> Iterator[str]:
    task, begun = TASKS[name](), time.process_time()
    x, score = few(name, count)
    label = name if recurrent is None else f"{name} ({recurrent})"
    profiles = [p for p in PROFILES if recurrent != "inside" or find_profile(p).reads == "onnx"]
    rules = {} if recurrent is None else {"config_file": {"recurrent": recurrent}}
    with tempfile.TemporaryDirectory() as room:
        for target in dict.fromkeys(find_profile(profile).target for profile in profiles):
            folder, front_end = Path(room, target), FRONT_END.get(name, "torch")
            quantized(name, front_end, task, folder, target=target, measure_speed=False, samples=False, **rules)
            if target == "ort_cpu":
                for how, file in (("float", "model_float.onnx"), ("file", "model.onnx")):
                    run = first_output(new_session(folder / file, session_options(entries=FLOAT_KERNELS)))
                    yield f"| {label} | {how} | {score(run):.2f} | | | | |"
            for profile in (p for p in profiles if find_profile(p).target == target):
                session, start = open_target(folder, profile), time.process_time()
                found = score(first_output(session))
                seconds = time.process_time() - start
                part = x[: COMPARED.get(name, 4)].numpy()
                there, first = compared(session, folder, part)
                equal, why = parted(folder, profile, {session.get_inputs()[0].name: part})
                there = f"{there}, first {first}" if first not in ("", "none") else there
                yield f"| {label} | {profile} | {found:.2f} | {equal} | {there} | {why} | {seconds:.1f} |"
    yield f"| {label} | all | | | | | {time.process_time() - begun:.0f} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", choices=list(TASKS))
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--recurrent", choices=["inside", "boundary_only"], help="by default what the target has")
    given = parser.parse_args()
    print(
        "| model | computed as | metric | equal to the file | equal to the runtime | first layer that differs | CPU s |"
    )
    for name in given.names:
        for row in rows(name, given.samples, given.recurrent):
            print(row, flush=True)
