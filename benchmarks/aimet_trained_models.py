"""Trained models: the same script under AIMET and under the layer, scales and accuracies side by side.

Run it in an environment that has ``aimet-torch`` and ``aimet-onnx`` beside Bitwright, with a folder of data and models::

    python benchmarks/aimet_trained_models.py DATA

It prints one row per model: places with a quantizer, the relative difference of the scales (weights; activations), and the
share of right answers in float, under AIMET and here. Ranges are min-max over the same images. Below a row stands why the scales
of weights differ that do, by what AIMET and the layer made of the scale that the weights alone ask for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.aimet_side_by_side import scales_of  # noqa: E402

Scales = dict[str, np.ndarray[Any, Any]]
Outcome = tuple[Scales, float]
EPS = 2.0**-23  # of float32


def share_right(predict: Callable[[Any], Any], x: Any, y: Any, size: int) -> float:
    """Right answers per hundred."""
    right = 0
    for start in range(0, len(x), size):
        logits = predict(x[start : start + size])
        logits = logits[0] if isinstance(logits, (tuple, list)) else logits
        right += int((np.asarray(logits).argmax(-1) == y[start : start + size]).sum())
    return 100 * right / len(x)


def torch_outcome(
    package: str, make: Callable[[], torch.nn.Module], seen: torch.Tensor, x: torch.Tensor, y: Any
) -> Outcome:
    """Scales by place and accuracy of a script for PyTorch."""
    folding = importlib.import_module(f"{package}.batch_norm_fold")
    quantsim = importlib.import_module(f"{package}.quantsim")
    defs = importlib.import_module(f"{package}.common.defs")
    model = make()
    folding.fold_all_batch_norms(model, tuple(seen[:1].shape))
    sim = quantsim.QuantizationSimModel(model, seen[:1], quant_scheme=defs.QuantScheme.min_max)
    with torch.no_grad():
        sim.compute_encodings(lambda m, _: [m(part) for part in seen.split(50)], None)
        return {name: scale.numpy() for name, scale in scales_of(sim).items()}, share_right(
            lambda part: _plain(sim.model(part)), x, y, 100
        )


def asked_scales(make: Callable[[], torch.nn.Module], shape: tuple[int, ...], scales: Scales) -> Scales:
    """What the weights alone ask for, with 8 symmetric bits and their granularity."""
    model = make()
    importlib.import_module("bitwright.aimet_torch.batch_norm_fold").fold_all_batch_norms(model, shape)
    found = {}
    for name, weight in model.named_parameters():
        if name in scales:
            axes = [axis for axis in range(weight.ndim) if scales[name].shape[axis : axis + 1] in ((), (1,))]
            lo, hi = weight.detach().amin(axes, True), weight.detach().amax(axes, True)
            found[name] = torch.maximum(-lo / 128, hi / 127).numpy()
    return found


def reasons(asked: Scales, theirs: Scales, ours: Scales) -> dict[str, int]:
    """Why scales of weights differ beyond 1e-6, counted."""
    counts: dict[str, int] = {}
    for place, wanted in asked.items():
        for raw, a, b in zip(wanted.ravel(), theirs[place].ravel(), ours[place].ravel(), strict=True):
            if abs(b / a - 1) > 1e-6:
                least = "adds epsilon" if abs((raw + EPS) / a - 1) < 1e-6 else "widens"
                own = "as asked" if abs(raw / b - 1) < 1e-6 else "widened for the int32 bias"
                key = f"AIMET {least}{' below epsilon' if raw < EPS else ''}, here {own}"
                counts[key] = counts.get(key, 0) + 1
    return counts


def _plain(outputs: Any) -> Any:
    first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    return first.as_subclass(torch.Tensor).numpy()


def onnx_outcome(package: str, path: Path, name: str, seen: Any, x: Any, y: Any) -> Outcome:
    """Scales by tensor and accuracy of a script for ONNX."""
    quantsim = importlib.import_module(f"{package}.quantsim")
    defs = importlib.import_module(f"{package}.common.defs")
    model = onnx.version_converter.convert_version(onnx.load(str(path)), 13)
    sim = quantsim.QuantizationSimModel(model, quant_scheme=defs.QuantScheme.min_max)
    sim.compute_encodings(lambda session, _: [session.run(None, {name: one[None]}) for one in seen], None)
    scales = {
        tensor: np.array([e.delta for e in quantizer.get_encodings()])
        for tensor, quantizer in sim.qc_quantize_op_dict.items()
        if quantizer.enabled and quantizer.get_encodings()
    }
    return scales, share_right(lambda part: sim.session.run(None, {name: part})[0], x, y, 1)


def compared(title: str, in_float: float, theirs: Outcome, ours: Outcome, is_weight: Any) -> str:
    """One row of the table."""
    both = sorted(theirs[0].keys() & ours[0].keys())
    lone = [", ".join(sorted(x - y)) or "-" for x, y in ((theirs[0].keys(), ours[0].keys()),
                                                        (ours[0].keys(), theirs[0].keys()))]  # fmt: skip
    cells = [
        title,
        len(both),
        *lone,
        *(
            scales_cell([p for p in both if bool(is_weight(p)) == wanted], theirs[0], ours[0])
            for wanted in (True, False)
        ),
    ]
    cells += [f"{in_float:.2f}", f"{theirs[1]:.2f}", f"{ours[1]:.2f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def scales_cell(places: list[str], theirs: Scales, ours: Scales) -> str:
    """Largest relative difference of the scales that agree to 1e-6, and how many do not, with their places."""
    gaps = {place: np.abs(ours[place].ravel() / theirs[place].ravel() - 1) for place in places}
    beyond = {place: int((gap > 1e-6).sum()) for place, gap in gaps.items() if (gap > 1e-6).any()}
    together = np.concatenate([*gaps.values(), np.zeros(1)])
    more = f"; {sum(beyond.values())} of {together.size - 1} beyond: {', '.join(beyond)}" if beyond else ""
    return f"{together[together <= 1e-6].max():.1e}{more}"


def rows(data: Path) -> Any:
    """The rows of the table."""
    sys.path[:0] = [str(data), str(data / "models")]
    load: Any = importlib.import_module("load_data")
    from safetensors.torch import load_file

    train, _, test, cifar = load.cifar10()
    photographs, classes = load.imagenet_sample()
    of_cifar = (*(torch.from_numpy(load.cifar_input(images)) for images in (train[:500], test)), cifar)
    of_imagenet = (
        *(torch.from_numpy(load.mobilenet_v1_input(part)) for part in (photographs[:100], photographs[100:])),
        classes[100:],
    )
    for name, module, build, (seen, x, labels) in (
        ("mobilenet_v1_025", "mobilenet_v1", lambda m: m.MobileNetV1(), of_imagenet),
        ("mobilenet_v2_cifar", "mobilenet_v2_cifar", lambda m: m.MobileNetV2Cifar(), of_cifar),
        ("resnet20_aux", "resnet_cifar", lambda m: m.ResNetCifar(3, aux=True), of_cifar),
    ):

        def make(name: str = name, module: str = module, build: Any = build) -> torch.nn.Module:
            model: torch.nn.Module = build(importlib.import_module(module))
            model.load_state_dict(load_file(str(data / "models" / f"{name}.safetensors")))
            return model.eval()

        with torch.no_grad():
            plain = make()
            in_float = share_right(lambda part, plain=plain: _plain(plain(part)), x, labels, 100)
        found = [torch_outcome(p, make, seen, x, labels) for p in ("aimet_torch", "bitwright.aimet_torch")]
        yield compared(name, in_float, *found, lambda place: "[" not in place)
        asked = asked_scales(make, tuple(seen[:1].shape), found[1][0])
        for why, count in reasons(asked, found[0][0], found[1][0]).items():
            yield f"{count} scales: {why}"
    images, digits = load.mnist()
    raw = images[:, None].astype(np.float32)
    for name, feed, pixels in (
        ("mnist_cntk", "Input3", raw),
        ("mnist_pytorch", "0", ((raw / 255 - 0.1307) / 0.3081).astype(np.float32)),
    ):
        path = data / "onnx" / f"{name}.onnx"
        session = onnxruntime.InferenceSession(str(path))
        in_float = share_right(lambda part, s=session, f=feed: s.run(None, {f: part})[0], pixels[200:], digits[200:], 1)
        found = [
            onnx_outcome(p, path, feed, pixels[:200], pixels[200:], digits[200:])
            for p in ("aimet_onnx", "bitwright.aimet_onnx")
        ]
        params = {i.name for i in onnx.load(str(path)).graph.initializer}
        yield compared(f"{name}.onnx", in_float, *found, params.__contains__)


def main(data: str) -> None:
    """Print the table."""
    print("| model | places | only AIMET | only here | weights | activations | float | AIMET | here |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows(Path(data)):
        print(row, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
