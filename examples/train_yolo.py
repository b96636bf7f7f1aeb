"""Quantization-aware training of a YOLO detector in the trainer of ultralytics, with mAP before and after.

    python examples/train_yolo.py best.pt data.yaml --imgsz 640 --epochs 3
    python examples/train_yolo.py --imgsz 64 --epochs 1    # a YOLOv8n and a few pictures that the script makes; a trial only

``best.pt`` is a trained detector of ultralytics, ``data.yaml`` its data set. Trainer, losses, augmentation, moving average of the
weights, checkpoints and validation are those of the package; the model that it trains is a simulation.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from torch import nn
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer, DetectionValidator

from bitwright.torch import QuantizationSimModel


def average_precision(model: nn.Module, settings: dict[str, Any]) -> float:
    """mAP at overlaps from 0.5 to 0.95 on the images of validation."""
    return float(DetectionValidator(args=settings)(model=model)["metrics/mAP50-95(B)"])


def drawn(folder: Path, size: int = 64) -> Path:
    """The YAML file of a data set of 24 pictures for training and 8 for validation, with a rectangle or an ellipse each."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 24), ("val", 8)):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            image = Image.new("RGB", (size, size), tuple(draw.integers(0, 96, 3).tolist()))
            w, h = draw.integers(size // 4, size // 2, 2).tolist()
            x, y = int(draw.integers(size - w)), int(draw.integers(size - h))
            pen = ImageDraw.Draw(image)
            (pen.ellipse if i % 2 else pen.rectangle)((x, y, x + w, y + h), tuple(draw.integers(160, 256, 3).tolist()))
            image.save(folder / "images" / part / f"{i}.png")
            box = ((x + w / 2) / size, (y + h / 2) / size, w / size, h / size)
            (folder / "labels" / part / f"{i}.txt").write_text(f"{i % 2} {' '.join(map(str, box))}\n")
    file = folder / "shapes.yaml"
    file.write_text(f"path: {folder.absolute()}\ntrain: images/train\nval: images/val\nnames: [rectangle, ellipse]\n")
    return file


def main() -> None:
    """Quantize, train, export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", nargs="?")
    parser.add_argument("data", nargs="?")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--preset", default="w4a8")
    parser.add_argument(
        "--bits", type=int, nargs=2, metavar=("WEIGHTS", "ACTIVATIONS"), help="in the place of a preset"
    )
    parser.add_argument("--out", type=Path, default=Path("yolo_quantized"))
    args = parser.parse_args()
    if args.weights and not args.data:
        parser.error(f"{args.weights} needs the YAML file of its data set as the second argument")
    args.data = args.data or str(drawn(args.out / "shapes", args.imgsz))
    settings: dict[str, Any] = {
        "data": args.data, "imgsz": args.imgsz, "batch": args.batch, "workers": 0, "plots": False, "rect": False,
        "amp": False, "project": str(args.out.absolute()), "exist_ok": True,
    }  # fmt: skip
    schedule = {"epochs": args.epochs, "optimizer": "AdamW", "lr0": args.rate, "warmup_epochs": 0, "mosaic": 0.0}

    if args.weights is None:
        first = DetectionTrainer(
            overrides={**settings, **schedule, "lr0": 2e-3, "model": "yolov8n.yaml", "name": "float"}
        )
        first.train()
        args.weights = str(first.last)
    model = YOLO(args.weights).model.float().eval().fuse(verbose=False)
    trainer = DetectionTrainer(overrides={**settings, **schedule, "model": args.weights})
    trainer.model = model  # what the loader asks for the strides
    loader = trainer.get_dataloader(trainer.data["train"], args.batch, mode="val")
    images = [trainer.preprocess_batch(batch)["img"] for batch, _ in zip(loader, range(8), strict=False)]

    bits = args.bits and {"default_param_bw": args.bits[0], "default_output_bw": args.bits[1]}
    sim = QuantizationSimModel(model, images[0], **(bits or {"preset": args.preset}))
    sim.compute_encodings(images)
    found = {"float": average_precision(model, settings), "quantized": average_precision(sim.model, settings)}
    trainer.model = sim.model
    trainer.train()
    sim.model.load_state_dict(trainer.ema.ema.state_dict())
    found["trained"] = average_precision(sim.model, settings)
    print(", ".join(f"mAP {name} {value:.3f}" for name, value in found.items()))
    print(sim.export(args.out, "yolo", images[0]).qdq)


if __name__ == "__main__":
    main()
