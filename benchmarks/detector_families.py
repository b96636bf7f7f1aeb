"""Detectors of public packages, built without stored weights and trained for minutes on drawn shapes.

Shared by ``detectors.py``. Each row of :data:`FAMILIES` makes a detector with the names and the loss of its package (ultralytics,
torchvision, transformers), and says how its answer is read. Images show one to four rectangles, ellipses and triangles, at any
angle where the family detects oriented boxes, on a texture of waves and noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SIZE, CLASSES, BATCH = 128, 3, 8
UPRIGHT, TURNED = 0.3, 0.7  # radians by which shapes are turned
NARROW = 0.125  # width of the models of ultralytics that are not the n models of the package, which have 0.25


@dataclass
class Drawn:
    """Images [n, 3, SIZE, SIZE] in 0..1 and, a row per shape: image, class, corners in pixels and what else can be found."""

    images: Tensor
    owners: Tensor
    kinds: Tensor
    boxes: Tensor  # x0, y0, x1, y1
    oriented: Tensor  # centre, width, height in pixels, angle in radians
    points: Tensor  # [shapes, 3, 2] in pixels: corners of a shape
    masks: Tensor  # [shapes, SIZE, SIZE], bool


def _outline(kind: int, w: float, h: float) -> np.ndarray:
    if kind == 0:
        return np.array([(-w, -h), (w, -h), (w, h), (-w, h)]) / 2
    if kind == 1:
        turn = np.linspace(0, 2 * np.pi, 24, endpoint=False)
        return np.stack([w / 2 * np.cos(turn), h / 2 * np.sin(turn)], 1)
    return np.array([(0, -h), (w, h), (-w, h)]) / 2


def drawn(count: int, seed: int, angles: float = UPRIGHT) -> Drawn:
    """``count`` images; shapes are turned by up to ``angles`` radians."""
    draw = np.random.default_rng(seed)
    images = np.zeros((count, SIZE, SIZE, 3), np.float32)
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float32) / SIZE
    owners, kinds, boxes, oriented, points, masks = [], [], [], [], [], []
    for i in range(count):
        canvas = np.zeros((SIZE, SIZE, 3), np.float32)
        for channel in range(3):
            a, b, phase = draw.normal(0, 12, 3)
            canvas[..., channel] = 0.45 + 0.12 * np.sin(a * x + b * y + phase)
        coarse = draw.normal(0, 0.12, (16, 16, 3)).astype(np.float32)
        canvas += coarse.repeat(SIZE // 16, 0).repeat(SIZE // 16, 1)
        taken: list[np.ndarray] = []
        for _ in range(draw.integers(1, 5)):
            w, h = draw.uniform(18, 52, 2)
            kind, angle = int(draw.integers(CLASSES)), draw.uniform(-angles, angles)
            turn = np.array([(np.cos(angle), np.sin(angle)), (-np.sin(angle), np.cos(angle))])
            shape = _outline(kind, w, h) @ turn
            reach = abs(shape).max(0)
            centre = draw.uniform(reach, SIZE - reach)
            shape = shape + centre
            low, high = shape.min(0), shape.max(0)
            if any((low < q[2:]).all() and (high > q[:2]).all() for q in taken):
                continue
            taken.append(np.concatenate([low, high]))
            plane = Image.new("1", (SIZE, SIZE))
            ImageDraw.Draw(plane).polygon([tuple(p) for p in shape], fill=1)
            inside = np.array(plane)
            colour = draw.uniform(0, 1, 3)
            colour[draw.integers(3)] = draw.choice((0.0, 1.0))
            canvas[inside] = colour + 0.05 * np.sin(20 * (x + y))[inside, None]
            owners.append(i)
            kinds.append(kind)
            boxes.append(taken[-1])
            oriented.append((*centre, w, h, angle))
            points.append(shape[[0, len(shape) // 3, 2 * len(shape) // 3]])
            masks.append(inside)
        images[i] = canvas
    images += draw.normal(0, 0.03, images.shape)
    return Drawn(
        torch.tensor(images.clip(0, 1), dtype=torch.float32).permute(0, 3, 1, 2).contiguous(),
        torch.tensor(owners),
        torch.tensor(kinds),
        torch.tensor(np.array(boxes), dtype=torch.float32),
        torch.tensor(oriented, dtype=torch.float32),
        torch.tensor(np.array(points), dtype=torch.float32),
        torch.tensor(np.array(masks)),
    )


@dataclass
class Found:
    """Detections of one image, best first; ``extra`` holds masks, points or oriented boxes for families that find them."""

    boxes: Tensor
    scores: Tensor
    kinds: Tensor
    extra: Tensor | None = None


def truths(data: Drawn, what: str) -> list[Found]:
    """What is to be found in each image."""
    extra = {"masks": data.masks, "points": data.points, "oriented": data.oriented}.get(what)
    rows = [data.owners == i for i in range(len(data.images))]
    return [
        Found(data.boxes[row], torch.ones(int(row.sum())), data.kinds[row], None if extra is None else extra[row])
        for row in rows
    ]


@dataclass(frozen=True)
class Family:
    """A detector.

    Attributes:
        make: the untrained network.
        loss: its training loss of a batch.
        read: the answer of a batch as detections.
        args: the positional arguments of a call with these images.
        what: what is matched: ``"boxes"``, ``"masks"``, ``"points"``, ``"oriented"``.
        steps, rate: of training.
        batched: whether a call takes a batch, not a list of images.
        exports: whether torch's exporter writes a file that runs on every image.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Drawn], Tensor]
    read: Callable[[Any], list[Found]]
    args: Callable[[Tensor], tuple[Any, ...]] = lambda images: (images,)
    what: str = "boxes"
    steps: int = 160
    rate: float = 2e-3
    batched: bool = True
    exports: bool = True


# ultralytics


def _yolo(file: str, task: str = "DetectionModel", narrow: bool = True, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from ultralytics import nn as networks
        from ultralytics.cfg import get_cfg

        shape = networks.tasks.yaml_model_load(f"{file}.yaml")
        if narrow and "scales" in shape:
            shape["scales"]["n"][1] = NARROW
        model: Any = getattr(networks.tasks, task)(shape, nc=CLASSES, verbose=False, **options)
        model.args = get_cfg()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.1
        return model

    return make


def _yolo_loss(model: Any, data: Drawn) -> Tensor:
    low, high = data.boxes[:, :2], data.boxes[:, 2:]
    batch = {
        "img": data.images,
        "cls": data.kinds.float().view(-1, 1),
        "bboxes": torch.cat([(low + high) / 2, high - low], 1) / SIZE,
        "batch_idx": data.owners.float(),
    }
    name = type(model).__name__
    if name == "OBBModel":
        batch["bboxes"] = data.oriented / torch.tensor([SIZE, SIZE, SIZE, SIZE, 1.0])
    elif name == "PoseModel":
        batch["keypoints"] = torch.cat([data.points / SIZE, torch.full((len(data.points), 3, 1), 2.0)], 2)
    elif name == "SegmentationModel":
        small = data.masks[:, ::4, ::4]
        planes = torch.zeros(len(data.images), *small.shape[1:])
        for i, owner in enumerate(data.owners.tolist()):
            planes[owner][small[i]] = float((data.owners[: i + 1] == owner).sum())
        batch["masks"] = planes
    answer = model.loss(batch)[0]
    total: Tensor = (sum(answer.values()) if isinstance(answer, dict) else answer.sum()) / len(data.images)
    return total


def suppressed(boxes: Tensor, scores: Tensor, kinds: Tensor, overlap: float = 0.6) -> list[int]:
    """Indices of the boxes that stay, best first."""
    hides = (overlaps(boxes, boxes) > overlap) & (kinds[:, None] == kinds[None])
    alive, kept = torch.ones(len(boxes), dtype=torch.bool), []
    for i in scores.argsort(descending=True).tolist():
        if alive[i]:
            kept.append(i)
            alive &= ~hides[i]
    return kept


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    """IoU of every box with every other."""
    low, high = torch.maximum(one[:, None, :2], other[None, :, :2]), torch.minimum(one[:, None, 2:], other[None, :, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(-1) for boxes in (one, other)]
    return both / (areas[0][:, None] + areas[1][None] - both).clamp(min=1e-9)


LEAST = 0.05  # scores below are dropped


def _read_yolo(answer: Any, what: str = "boxes") -> list[Found]:
    found = []
    protos = None
    if what == "masks":
        answer, protos = (answer[0] if isinstance(answer[0], (tuple, list)) else answer)[:2]
        if isinstance(protos, (tuple, list)):
            protos = protos[-1]
    while isinstance(answer, (tuple, list)):
        answer = answer[0]
    for i, one in enumerate(answer.float()):
        if one.shape[1] == 6:  # a head that needs no suppression
            rows = (one[:, 4] >= LEAST).nonzero()[:, 0]
            boxes, scores, kinds, extra = one[rows, :4], one[rows, 4], one[rows, 5].long(), None
        else:  # a box may show several classes, as in the validation of the package
            kinds, rows = (one[4 : 4 + CLASSES] >= LEAST).nonzero().T
            centre, size = one[:2].T[rows], one[2:4].T[rows]
            boxes, scores = torch.cat([centre - size / 2, centre + size / 2], 1), one[4 + kinds, rows]
            extra = one[4 + CLASSES :].T[rows]
            if what == "oriented":
                extra = torch.cat([centre, size, extra], 1)
        keep = suppressed(boxes, scores, kinds)[:50]
        boxes, scores, kinds = boxes[keep], scores[keep], kinds[keep]
        if what == "boxes":
            found.append(Found(boxes, scores, kinds))
            continue
        assert extra is not None
        extra = extra[keep]
        if what == "points":
            extra = extra.view(-1, 3, 3)[..., :2]
        elif what == "masks":
            assert protos is not None
            planes = torch.einsum("nc,chw->nhw", extra, protos[i].float()) if len(keep) else torch.zeros(0, 8, 8)
            planes = nn.functional.interpolate(planes[:, None], size=SIZE, mode="bilinear")[:, 0] > 0
            y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
            edges = boxes[:, :, None, None]
            extra = planes & (x >= edges[:, 0]) & (y >= edges[:, 1]) & (x <= edges[:, 2]) & (y <= edges[:, 3])
        found.append(Found(boxes, scores, kinds, extra))
    return found


def _yolo_family(file: str, task: str = "DetectionModel", what: str = "boxes", **options: Any) -> Family:
    return Family(_yolo(file, task, **options), _yolo_loss, lambda answer: _read_yolo(answer, what), what=what)


# torchvision


class _Levels(nn.Module):
    """A small residual-free backbone: feature maps at strides 8 and 16, with a feature pyramid if asked for."""

    def __init__(self, width: int = 32, pyramid: bool = True) -> None:
        super().__init__()

        def part(a: int, b: int, stride: int) -> list[nn.Module]:
            return [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

        self.start = nn.Sequential(
            *part(3, width, 2), *part(width, width, 2), *part(width, 2 * width, 2), *part(2 * width, 2 * width, 1)
        )
        self.next = nn.Sequential(*part(2 * width, 4 * width, 2), *part(4 * width, 4 * width, 1))
        self.pyramid: nn.Module | None = None
        self.out_channels: Any = [2 * width, 4 * width]
        if pyramid:
            from torchvision.ops import FeaturePyramidNetwork

            self.out_channels = 2 * width
            self.pyramid = FeaturePyramidNetwork([2 * width, 4 * width], self.out_channels)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.start(x)
        levels = {"0": first, "1": self.next(first)}
        return levels if self.pyramid is None else self.pyramid(levels)


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from torchvision.models import detection
        from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
        from torchvision.ops import MultiScaleRoIAlign

        size = {"min_size": SIZE, "max_size": SIZE}
        sizes = ((20, 28), (40, 56))
        if name == "FCOS":
            return detection.FCOS(
                _Levels(), CLASSES + 1, anchor_generator=AnchorGenerator(((8,), (16,)), ((1.0,),) * 2), **size
            )
        if name == "RetinaNet":
            return detection.RetinaNet(
                _Levels(), CLASSES + 1, anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 2), **size
            )
        if name == "SSD":
            boxes = DefaultBoxGenerator([[2], [2]], scales=[0.2, 0.35, 0.5], steps=[8, 16])
            return detection.ssd.SSD(_Levels(pyramid=False), boxes, (SIZE, SIZE), CLASSES + 1)
        options: dict[str, Any] = {
            "rpn_anchor_generator": AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 2),
            "box_roi_pool": MultiScaleRoIAlign(["0", "1"], 7, 2),
            "box_head": detection.faster_rcnn.TwoMLPHead(64 * 49, 128),
            "box_predictor": detection.faster_rcnn.FastRCNNPredictor(128, CLASSES + 1),
            "rpn_pre_nms_top_n_test": 100,
            "rpn_post_nms_top_n_test": 50,
            "rpn_post_nms_top_n_train": 100,
        }
        if name == "MaskRCNN":
            options |= {
                "mask_head": detection.mask_rcnn.MaskRCNNHeads(64, (48, 48), 1),
                "mask_predictor": detection.mask_rcnn.MaskRCNNPredictor(48, 48, CLASSES + 1),
            }
        if name == "KeypointRCNN":
            heads = detection.keypoint_rcnn
            options |= {
                "keypoint_head": heads.KeypointRCNNHeads(64, (48, 48)),
                "keypoint_predictor": heads.KeypointRCNNPredictor(48, 3),
            }
        if name != "FasterRCNN":
            options |= {
                "mask_roi_pool" if name == "MaskRCNN" else "keypoint_roi_pool": MultiScaleRoIAlign(["0", "1"], 14, 2)
            }
        return getattr(detection, name)(
            _Levels(), **({} if "box_predictor" in options else {"num_classes": CLASSES + 1}), **options, **size
        )

    return make


def _torchvision_loss(model: nn.Module, data: Drawn) -> Tensor:
    targets = []
    for i in range(len(data.images)):
        row = data.owners == i
        points = torch.cat([data.points[row], torch.ones(int(row.sum()), 3, 1)], 2)
        targets.append(
            {
                "boxes": data.boxes[row],
                "labels": data.kinds[row] + 1,
                "masks": data.masks[row].to(torch.uint8),
                "keypoints": points,
            }
        )
    return torch.stack(list(model(list(data.images), targets).values())).sum()


def _read_torchvision(answer: Any, what: str = "boxes") -> list[Found]:
    found = []
    for one in answer:
        keep = (one["scores"] >= LEAST).nonzero()[:50, 0]
        extra = None
        if what == "masks":
            extra = one["masks"][keep, 0] > 0.5
        elif what == "points":
            extra = one["keypoints"][keep][..., :2]
        found.append(Found(one["boxes"][keep], one["scores"][keep], one["labels"][keep] - 1, extra))
    return found


def _torchvision_family(name: str, what: str = "boxes", **options: Any) -> Family:
    return Family(
        _torchvision(name),
        _torchvision_loss,
        lambda answer: _read_torchvision(answer, what),
        lambda images: (list(images),),
        what,
        batched=False,
        **options,
    )


# transformers


def _resnet(out: list[str]) -> Any:
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=24, hidden_sizes=[32, 48, 64, 96], depths=[1, 1, 1, 1], layer_type="basic", out_features=out
    )


def _transformers(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        common: dict[str, Any] = {"num_labels": CLASSES}
        model = getattr(transformers, f"{name}ForObjectDetection")
        config = getattr(transformers, f"{name}Config")
        if name == "Yolos":
            return model(
                config(
                    hidden_size=96,
                    num_hidden_layers=4,
                    num_attention_heads=4,
                    intermediate_size=192,
                    image_size=[SIZE, SIZE],
                    patch_size=16,
                    num_detection_tokens=20,
                    use_mid_position_embeddings=False,
                    **common,
                )
            )
        if name in ("Detr", "ConditionalDetr"):
            return model(
                config(
                    use_timm_backbone=False,
                    use_pretrained_backbone=False,
                    backbone=None,
                    backbone_config=_resnet(["stage3"]),
                    num_queries=20,
                    d_model=96,
                    encoder_layers=2,
                    decoder_layers=2,
                    encoder_ffn_dim=192,
                    decoder_ffn_dim=192,
                    encoder_attention_heads=4,
                    decoder_attention_heads=4,
                    dropout=0.0,
                    auxiliary_loss=True,
                    **common,
                )
            )
        sizes: dict[str, Any] = {
            "encoder_hidden_dim": 64,
            "encoder_in_channels": [48, 64, 96],
            "encoder_ffn_dim": 128,
            "encoder_attention_heads": 4,
            "d_model": 64,
            "num_queries": 30,
            "decoder_in_channels": [64, 64, 64],
            "decoder_ffn_dim": 128,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "num_denoising": 10,
            "hidden_expansion": 0.5,
            "freeze_backbone_batch_norms": False,
        }
        if name in ("RTDetr", "RTDetrV2"):
            sizes["backbone_config"] = transformers.RTDetrResNetConfig(
                embedding_size=32,
                hidden_sizes=[32, 48, 64, 96],
                depths=[1, 1, 1, 1],
                layer_type="basic",
                out_features=["stage2", "stage3", "stage4"],
            )
        else:
            sizes["backbone_config"] = transformers.HGNetV2Config(
                stem_channels=[3, 16, 24],
                stage_in_channels=[24, 32, 48, 64],
                stage_mid_channels=[16, 24, 32, 48],
                stage_out_channels=[32, 48, 64, 96],
                stage_num_blocks=[1, 1, 1, 1],
                stage_downsample=[False, True, True, True],
                stage_light_block=[False, False, True, True],
                stage_kernel_size=[3, 3, 5, 5],
                stage_numb_of_layers=[2, 2, 2, 2],
                hidden_sizes=[32, 48, 64, 96],
                depths=[1, 1, 1, 1],
                embedding_size=24,
                out_features=["stage2", "stage3", "stage4"],
            )
        return model(config(**sizes, **common))

    return make


def _transformers_loss(model: nn.Module, data: Drawn) -> Tensor:
    low, high = data.boxes[:, :2], data.boxes[:, 2:]
    boxes = torch.cat([(low + high) / 2, high - low], 1) / SIZE
    labels = [
        {"class_labels": data.kinds[data.owners == i], "boxes": boxes[data.owners == i]}
        for i in range(len(data.images))
    ]
    loss: Tensor = model(pixel_values=data.images * 4 - 2, labels=labels).loss
    return loss


def _read_transformers(answer: Any, softmax: bool) -> list[Found]:
    found = []
    for logits, boxes in zip(answer["logits"], answer["pred_boxes"], strict=True):
        scores, kinds = logits.softmax(-1)[:, :CLASSES].max(-1) if softmax else logits.sigmoid().max(-1)
        order = scores.argsort(descending=True)
        order = order[scores[order] >= LEAST]
        centre, size = boxes[order, :2] * SIZE, boxes[order, 2:] * SIZE
        found.append(Found(torch.cat([centre - size / 2, centre + size / 2], 1), scores[order], kinds[order]))
    return found


def _transformers_family(name: str, softmax: bool = False, **options: Any) -> Family:
    return Family(
        _transformers(name),
        _transformers_loss,
        lambda answer: _read_transformers(answer, softmax),
        lambda images: (images * 4 - 2,),
        **options,
    )


FAMILIES: dict[str, Family] = {
    **{name: _yolo_family(name, narrow=False) for name in ("yolov8n", "yolo12n")},
    **{name: _yolo_family(name) for name in ("yolov5n", "yolov9t", "yolov10n", "yolo11n", "yolo26n")},
    "yolov8n-seg": _yolo_family("yolov8n-seg", "SegmentationModel", "masks"),
    "yolov8n-pose": _yolo_family("yolov8n-pose", "PoseModel", "points", data_kpt_shape=(3, 3)),
    "yolo11n-obb": _yolo_family("yolo11n-obb", "OBBModel", "oriented"),
    "SSD": _torchvision_family("SSD"),
    "RetinaNet": _torchvision_family("RetinaNet"),
    "FCOS": _torchvision_family("FCOS", exports=False),  # ONNX Runtime stops where a level has no candidate
    "FasterRCNN": _torchvision_family("FasterRCNN"),
    "MaskRCNN": _torchvision_family("MaskRCNN", "masks"),
    "KeypointRCNN": _torchvision_family("KeypointRCNN", "points"),
    "RTDetr": _transformers_family("RTDetr", rate=1e-3, steps=400),
    "DFine": _transformers_family("DFine", rate=1e-3, steps=400),
    "Detr": _transformers_family("Detr", softmax=True, rate=1e-3, steps=900),
    "Yolos": _transformers_family("Yolos", softmax=True, rate=1e-3, steps=900),
}


def trained(name: str, cache: Path, steps: int | None = None, told: Callable[[str], Any] = print) -> nn.Module:
    """The detector of a family, trained, or as it lies in ``cache``."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.make()
    file = cache / f"{name}.safetensors"
    if file.exists():
        model.load_state_dict(load_file(file))
        return model.eval()
    steps = steps or family.steps
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), family.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, family.rate, steps)
    angles = TURNED if family.what == "oriented" else UPRIGHT
    for step in range(steps):
        loss = family.loss(model, drawn(BATCH, 1000 + step, angles))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            told(f"{name}: step {step} of {steps}, loss {float(loss):.3f}")
    cache.mkdir(parents=True, exist_ok=True)
    save_file({key: value.clone() for key, value in model.state_dict().items()}, file)
    return model.eval()


def _planes(oriented: Tensor) -> Tensor:
    """The pixels of oriented boxes, [n, SIZE, SIZE]."""
    y, x = torch.meshgrid(torch.arange(SIZE) + 0.5, torch.arange(SIZE) + 0.5, indexing="ij")
    cx, cy, w, h, angle = oriented.T[:, :, None, None]
    along = (x - cx) * angle.cos() + (y - cy) * angle.sin()
    across = (y - cy) * angle.cos() - (x - cx) * angle.sin()
    return (along.abs() < w / 2) & (across.abs() < h / 2)


def similarities(one: Found, other: Found, what: str) -> Tensor:
    """Overlap of every detection with every other: IoU of boxes, masks or oriented boxes; of key points, as COCO has it."""
    if what == "boxes" or one.extra is None or other.extra is None:
        return overlaps(one.boxes, other.boxes)
    if what == "points":
        apart = ((one.extra[:, None] - other.extra[None]) ** 2).sum(-1)
        area = (other.boxes[:, 2:] - other.boxes[:, :2]).clamp(min=1).prod(-1)
        return torch.exp(-apart / (2 * area[None, :, None] * 0.2**2)).mean(-1)
    planes = [
        (_planes(found.extra) if what == "oriented" else found.extra).flatten(1).float() for found in (one, other)
    ]
    both = planes[0] @ planes[1].T
    return both / (planes[0].sum(1)[:, None] + planes[1].sum(1)[None] - both).clamp(min=1)


CLEAR, NEAR, OVERLAP = 0.5, 0.3, 0.5


def kept(wanted: list[Found], found: list[Found], what: str) -> tuple[float, int]:
    """Share of the clear detections of either side that the other has, the lower of the two; and how many float has."""
    shares, counted = [], 0
    for one, other in ((wanted, found), (found, wanted)):
        clear = hits = 0
        for a, b in zip(one, other, strict=True):
            at = a.scores >= CLEAR
            near = (
                (b.scores >= NEAR) & (similarities(a, b, what)[at] >= OVERLAP) & (a.kinds[at][:, None] == b.kinds[None])
            )
            clear, hits = clear + int(at.sum()), hits + int(near.any(1).sum())
        shares.append(hits / clear if clear else 0.0)
        counted = counted or clear
    return min(shares), counted


def average_precision(found: list[Found], truth: list[Found], what: str) -> tuple[float, float]:
    """mAP at an overlap of 0.5, and its mean over 0.5 to 0.95: areas under precision and recall, mean over classes."""
    per_threshold = []
    tables = [similarities(a, b, what) for a, b in zip(found, truth, strict=True)]
    for threshold in np.arange(0.5, 0.96, 0.05):
        areas = []
        for kind in range(CLASSES):
            ranked, total = [], 0
            for a, b, table in zip(found, truth, tables, strict=True):
                total += int((b.kinds == kind).sum())
                free = b.kinds == kind
                for i in (a.kinds == kind).nonzero()[:, 0].tolist():
                    row = table[i] * free
                    best = int(row.argmax()) if len(row) else -1
                    hit = best >= 0 and float(row[best]) >= threshold
                    if hit:
                        free[best] = False
                    ranked.append((float(a.scores[i]), hit))
            hits = np.array([hit for _, hit in sorted(ranked, key=lambda pair: -pair[0])], bool)
            precision = hits.cumsum() / np.arange(1, len(hits) + 1)
            envelope = np.maximum.accumulate(precision[::-1])[::-1]
            areas.append(float(envelope[hits].sum()) / max(total, 1))
        per_threshold.append(float(np.mean(areas)))
    return per_threshold[0], float(np.mean(per_threshold))
