"""Metrics by name: values of torchmetrics, a value per sample whose mean is the metric, data with labels, messages."""

from __future__ import annotations

import io
import itertools
import json

import numpy as np
import onnx
import pytest
import torch
import torchmetrics
from torch import nn

import bitwright
from bitwright.errors import ConfigError
from bitwright.metrics import detection
from bitwright.metrics.labels import read_labels, split_labels
from bitwright.metrics.metric import find_metric, influences, named_metric
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated

RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(40, 5)).astype(np.float32)
LABELS = RNG.integers(0, 5, 40)
MAPS, MASKS = RNG.normal(size=(6, 3, 8, 8)).astype(np.float32), RNG.integers(0, 3, (6, 8, 8))
MASKS[0, :2] = 255
PICTURES = RNG.random((4, 3, 24, 24)).astype(np.float32)
NOISY = np.clip(PICTURES + RNG.normal(size=PICTURES.shape) * 0.05, 0, 1).astype(np.float32)
TOKENS, NEXT = RNG.normal(size=(7, 9, 11)).astype(np.float32), RNG.integers(0, 11, (7, 9))
NEXT[2, 5:] = -100


_NO_LABELS = (
    ("g.npz", b"PK\x03\x04 and no archive", "it cannot be read as an archive of arrays"),
    ("h.json", b"[" * 100 + b"]" * 100, "nested too deeply"),
    ("i.json", b'{"categories": [], "images": [], "annotations": [3]}', "it holds no labels: AttributeError"),
    ("j.txt", b"\xff\xfe", "it holds no labels: UnicodeDecodeError"),
)


def of(metric, outputs, labels, parts: int = 2) -> np.ndarray:
    """A value per sample, from batches."""
    named = find_metric(metric)
    ys, ls = np.array_split(outputs, parts), np.array_split(labels, parts)
    return named.per_sample([named.values([y], [y], right) for y, right in zip(ys, ls, strict=True)])


def theirs(metric, outputs, labels) -> float:
    return float(metric(torch.from_numpy(outputs), torch.from_numpy(labels)))


of_classes = torchmetrics.classification


@pytest.mark.parametrize(
    "metric, outputs, labels, reference",
    [
        ("accuracy", SCORES, LABELS, of_classes.MulticlassAccuracy(5, average="micro")),
        ("top1", SCORES, LABELS, of_classes.MulticlassAccuracy(5, average="micro")),
        ("top3", SCORES, LABELS, of_classes.MulticlassAccuracy(5, top_k=3, average="micro")),
        ("f1", SCORES, LABELS, of_classes.MulticlassF1Score(5)),
        ("f1,average=micro", SCORES, LABELS, of_classes.MulticlassF1Score(5, average="micro")),
        ({"f1": {"average": "binary"}}, SCORES[:, :1], LABELS % 2, lambda x, y: of_classes.BinaryF1Score()(x[:, 0] > 0, y)),
        ("miou", MAPS, MASKS, of_classes.MulticlassJaccardIndex(3, ignore_index=255)),
        ("ssim", NOISY, PICTURES, torchmetrics.image.StructuralSimilarityIndexMeasure(data_range=1.0)),
        ("psnr", NOISY, PICTURES, torchmetrics.image.PeakSignalNoiseRatio(data_range=1.0, dim=(1, 2, 3))),
        ("perplexity", TOKENS, NEXT, torchmetrics.text.Perplexity(ignore_index=-100)),
    ],
)  # fmt: skip
def test_values_are_those_of_torchmetrics(metric, outputs, labels, reference):
    values = of(metric, outputs, labels)
    assert values.shape == (len(outputs),)
    assert float(values.mean()) == pytest.approx(theirs(reference, outputs, labels), rel=1e-4)


def test_an_object_of_torchmetrics_with_sums_and_with_lists():
    counted = of_classes.MulticlassF1Score(5)
    assert np.allclose(of(counted, SCORES, LABELS), of("f1", SCORES, LABELS), atol=1e-4)
    listed = of_classes.BinaryAveragePrecision()
    scores, right = 1 / (1 + np.exp(-SCORES[:, 0])), (LABELS % 2).astype(np.int64)
    assert float(of(listed, scores, right).mean()) == pytest.approx(theirs(listed, scores, right), rel=1e-5)


def test_influences_have_the_spread_of_the_metric():
    # of a mean they are the samples themselves; of perplexity their spread is that over draws of the samples
    counts = np.stack([RNG.random(50), np.ones(50)], 1)
    assert np.allclose(influences(counts, lambda n: n[..., 0] / n[..., 1]), counts[:, 0])
    means = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        n = rng.integers(1, 20, 60)
        means.append(influences(np.stack([n * rng.random(60) * 3, n], 1), lambda c: np.exp(c[..., 0] / c[..., 1])))
    expected = np.mean([m.std(ddof=1) / np.sqrt(60) for m in means])
    assert np.std([m.mean() for m in means]) == pytest.approx(expected, rel=0.15)


def test_word_error_rate():
    vocabulary = ["", "a", "b", "|"]
    ids = np.array([[1, 1, 0, 1, 3, 2], [2, 3, 2, 3, 1, 1]])  # "aa b", "b b a"
    labels = np.array(["aa b", "b a"], object)
    outputs = np.eye(4, dtype=np.float32)[ids]
    named = find_metric({"wer": {"vocabulary": vocabulary}})
    found = named.per_sample([named.values([outputs], [outputs], labels)])
    expected = torchmetrics.text.WordErrorRate()(["aa b", "b b a"], labels.tolist())
    assert float(found.mean()) == pytest.approx(float(expected))  # one insertion, four words


def boxes_of(rng, n, classes=3):
    corner, size = rng.random((n, 2)) * 50, rng.random((n, 2)) * 40 + 4
    return np.concatenate([corner, corner + size], 1).astype(np.float32), rng.integers(0, classes, n)


def shaken(rng, boxes, classes):
    """Found boxes: right ones moved, and others."""
    extra, of_extra = boxes_of(rng, 4)
    moved = boxes + rng.normal(size=boxes.shape).astype(np.float32) * 3
    found, names = np.concatenate([moved, extra]), np.concatenate([classes, of_extra])
    return found, rng.random(len(found)).astype(np.float32), names


def plain_map(images, answers) -> float:
    """Mean average precision by the definition, box by box, without what the module does at once."""
    values = []
    for c, least in itertools.product(sorted({int(c) for _, names in answers for c in names}), detection.OVERLAPS):
        rows = [(s, i, b) for i, image in enumerate(images) for b, s, k in zip(*image, strict=True) if k == c]
        taken, hits = set(), []
        for _, i, box in sorted(rows, key=lambda row: -row[0]):
            wanted, names = answers[i]
            free = [j for j in np.flatnonzero(names == c) if (i, j) not in taken]
            best = max(((detection.overlaps(box[None], wanted[j : j + 1])[0, 0], j) for j in free), default=(0.0, -1))
            hits.append(best[0] >= least)
            taken |= {(i, best[1])} if hits[-1] else set()
        true = np.cumsum(hits)
        precision = true / np.arange(1, len(hits) + 1)
        recall = true / sum(int((names == c).sum()) for _, names in answers)
        values.append(np.mean([max(precision[recall >= at], default=0.0) for at in np.linspace(0, 1, 101)]))
    return float(np.mean(values))


def test_mean_average_precision():
    rng = np.random.default_rng(3)
    answers = [boxes_of(rng, int(rng.integers(0, 6))) for _ in range(8)]
    images = [shaken(rng, *answer) for answer in answers]
    labels = np.empty(8, object)
    labels[:] = [{"boxes": b, "labels": c} for b, c in answers]
    flat = [
        part for boxes, scores, classes in images for part in (boxes, classes, scores)
    ]  # as torchvision returns them
    named = find_metric("map")
    values = named.per_sample([named.values(flat[:12], [], labels[:4]), named.values(flat[12:], [], labels[4:])])
    expected = plain_map(images, answers)
    assert float(values.mean()) == pytest.approx(expected, rel=1e-9)
    assert 0.1 < expected < 0.9
    perfect = [part for b, c in answers for part in (b, c, np.ones(len(b), np.float32))]
    assert float(named.per_sample([named.values(perfect, [], labels)]).mean()) == pytest.approx(1.0)
    at_half = find_metric("map50")
    assert at_half.per_sample([at_half.values(flat, [], labels)]).mean() > expected


def test_layouts_of_detectors_hold_the_same_boxes():
    rng = np.random.default_rng(4)
    boxes, classes = boxes_of(rng, 5)
    boxes[:, :2] += np.arange(5)[:, None] * 100  # none on another
    boxes[:, 2:] += np.arange(5)[:, None] * 100
    scores = np.linspace(0.9, 0.5, 5, dtype=np.float32)
    rows = np.concatenate([boxes, scores[:, None], classes[:, None]], 1)[None].astype(np.float32)
    raw = np.zeros((1, 4 + 3, 20), np.float32)
    raw[0, :2, :5], raw[0, 2:4, :5] = ((boxes[:, :2] + boxes[:, 2:]) / 2).T, (boxes[:, 2:] - boxes[:, :2]).T
    raw[0, 4 + classes, np.arange(5)] = scores
    raw[0, :, 5:10] = raw[0, :, :5] * np.array([1, 1, 1, 1, 0.9, 0.9, 0.9], np.float32)[:, None]  # the same again
    for outputs in ([rows], [boxes[None], scores[None], classes[None]], [raw], [boxes, classes, scores]):
        ((b, s, c),) = detection.decoded(outputs, 1, score=0.001, overlap=0.7)
        assert np.allclose(b, boxes, atol=1e-3) and np.allclose(s, scores) and (c == classes).all()
    with pytest.raises(ConfigError, match=r"shapes \[\(1, 7\)\] have no layout of boxes.*decode"):
        detection.decoded([np.zeros((1, 7), np.float32)], 1, score=0.1, overlap=0.7)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


@pytest.fixture(scope="module")
def loader():
    """Pairs of an input and what the float model says of most of them."""
    torch.manual_seed(1)
    x = torch.randn(64, 1, 8, 8)
    y = network()(x).argmax(1)
    y[::7] = 0
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 16)


def test_quantize_takes_pairs_with_an_interval(loader):
    result = bitwright.quantize(network(), loader, metric="top1", recipe=["fold"])
    row = result.metric
    assert row.name == "top1" and row.difference.n == 64 and row.difference.low is not None
    assert result.metrics == {"float": row.float, "quantized": row.quantized} and row.float > 0.8
    assert "metric: float 0.8" in str(result) and "; top1: " in str(result) and "95 % interval" in str(result)
    again = bitwright.quantize(
        network(), loader, metric="top1", recipe=["fold"], transform=lambda b: b[0], labels=lambda b: b[1]
    )
    assert again.metrics == result.metrics
    held = list(loader)
    apart = bitwright.quantize(network(), held[:2], metric="f1", recipe=["fold"], held_out=held[2:])
    assert apart.metric.difference.n == 32
    plain = bitwright.quantize(network(), loader, recipe=["fold"], transform=lambda batch: batch[0])
    assert plain.metric is None and plain.quality.worst is not None


def test_searches_analysis_and_compression_take_pairs(loader):
    options = {"metric": "top1", "allowed_drop": 0.5}
    mixed = bitwright.mixed_precision(network(), loader, ["w8a8", "w4a8"], evaluations=2, **options)
    assert mixed.met and mixed.metric["name"] == "top1"
    found = bitwright.auto_quantize(
        network(), loader, trials=[bitwright.precision.trials.Trial("w8a8", "w8a8")], **options
    )
    assert found.best is not None and found.best.metric > 0.7
    sim = calibrated(QuantizationSimModel(network(), next(iter(loader))[0]), [x for x, _ in loader])
    analysis = bitwright.analyze(sim, loader, {"f1": {"average": "micro"}}, mode="exact")
    assert analysis.metric.name == "f1" and analysis.metric.difference.n == 64
    assert all(0 <= row.metric_only <= 1 for row in analysis.sites if row.metric_only is not None)
    smaller = bitwright.compress(network(), loader, {"params": 0.7}, metric="top1")
    assert set(smaller.metrics) == {"float", "pruned", "compressed"} and smaller.metrics["float"] > 0.8


def test_onnx_models_and_labels_of_the_user(loader):
    x = torch.cat([x for x, _ in loader])
    labels = torch.cat([y for _, y in loader]).numpy()
    file = io.BytesIO()
    torch.onnx.export(network(), (x[:16],), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "rows"}})
    model = onnx.load_from_string(file.getvalue())
    feeds = [{"x": x[i : i + 16].numpy()} for i in range(0, 64, 16)]
    result = bitwright.quantize(model, feeds, metric="top1", labels=labels, recipe=["fold"])
    torch_side = bitwright.quantize(network(), loader, metric="top1", recipe=["fold"])
    assert result.metrics["float"] == torch_side.metrics["float"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"metric": "top1"}, "metric: it compares with the right answers, and no labels are given.*labels=.*pairs"),
        ({"metric": "topp1"}, r"there is no metric 'topp1' \(did you mean 'top1'"),
        ({"metric": {"f1": {"averag": "micro"}}}, r"metric f1: it has no option 'averag' \(did you mean 'average'"),
        ({"metric": "f1,average=all"}, "there is no average 'all'. Remedy: use macro, micro or binary"),
        ({"metric": "wer"}, "no vocabulary is given"),
        ({"metric": "top1", "labels": [1, 2]}, "labels: there are 2 for 8 samples"),
        ({"metric": "top1", "labels": np.zeros((8, 3))}, r"shape \(4, 3\) for a batch whose answers have shape \(4,\)"),
        ({"metric": lambda m: 1.0, "labels": [0] * 8}, "the metric is a function, which has labels of its own"),
        ({"labels": [0] * 8}, "there is no metric that reads them"),
    ],
)
def test_messages(options, message):
    with pytest.raises(ConfigError, match=message):
        bitwright.quantize(network(), [torch.randn(4, 1, 8, 8) for _ in range(2)], recipe=["fold"], **options)


def test_a_metric_without_labels_is_refused_everywhere(loader):
    sim = QuantizationSimModel(network(), next(iter(loader))[0])
    inputs = [x for x, _ in loader]
    sim.compute_encodings(inputs, progress=False)
    for call in (
        lambda: bitwright.analyze(sim, inputs, "map"),
        lambda: bitwright.mixed_precision(sim, inputs, metric="map", allowed_drop=0.1),
        lambda: bitwright.auto_quantize(network(), inputs, "map"),
        lambda: bitwright.compress(network(), inputs, {"params": 0.7}, metric="map"),
        lambda: named_metric("map", None),
    ):
        with pytest.raises(ConfigError, match="compares with the right answers, and no labels are given"):
            call()


def test_labels_of_files(tmp_path):
    np.save(tmp_path / "a.npy", LABELS)
    (tmp_path / "b.csv").write_text("file,label\nx.png,3\ny.png,4\n")
    (tmp_path / "c.txt").write_text("one two\nthree\n")
    images = [{"id": 7, "file_name": "b.jpg"}, {"id": 3, "file_name": "a.jpg"}]
    boxes = [{"image_id": 7, "bbox": [1, 2, 3, 4], "category_id": 9}]
    coco = {"images": images, "annotations": boxes, "categories": [{"id": 5}, {"id": 9}]}
    (tmp_path / "d.json").write_text(json.dumps(coco))
    assert (read_labels(tmp_path / "a.npy") == LABELS).all()
    assert read_labels(tmp_path / "b.csv").tolist() == [3, 4]
    assert read_labels(tmp_path / "c.txt") == ["one two", "three"]
    first, second = read_labels(tmp_path / "d.json")  # in the order of file names
    assert len(first["boxes"]) == 0 and second["boxes"].tolist() == [[1, 2, 4, 6]] and second["labels"].tolist() == [1]
    assert [len(part) for part in split_labels([first, second], [np.zeros((1, 2)), np.zeros((1, 2))])] == [1, 1]
    (tmp_path / "e.json").write_text('{"images": 3}')
    with pytest.raises(ConfigError, match="e.json: it holds no labels"):
        read_labels(tmp_path / "e.json")
    for name, content, said in _NO_LABELS:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}: .*{said}"):
            read_labels(tmp_path / name)
    with pytest.raises(ConfigError, match="g.npy: it cannot be read as an array: No such file"):
        read_labels(tmp_path / "g.npy")
    with pytest.raises(ConfigError, match="vocabulary cannot be read.*give a list of tokens"):
        (tmp_path / "v.json").write_text('{"a": [1]}')
        find_metric({"wer": {"vocabulary": str(tmp_path / "v.json")}})
    with pytest.raises(ConfigError, match="not read from files of the kind '.xml'. Remedy: use .csv, .json"):
        read_labels(tmp_path / "f.xml")
