"""Statistics of batch norms move with what the norms read, in a number of runs that does not grow with the depth."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx.parser
import pytest
import torch
from torch import nn

from bitwright.compression.reconstruct import Original, estimate_batch_norms, reconstruct
from bitwright.onnx.model.view import OnnxView
from bitwright.torch.view import TorchView

DATA = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Norms behind the activation, so that no exporter folds them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8 if i else 3, 8, 3, padding=1) for i in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(depth))
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x).relu())
        return x


def pair(depth: int) -> tuple[Net, Net]:
    """A trained model, and one whose layers have lost weights."""
    torch.manual_seed(depth)
    original = Net(depth).train()
    for _ in range(40):
        original(torch.randn(64, 3, 6, 6))
    changed = copy.deepcopy(original.eval())
    for conv in changed.convs:
        conv.weight.data[:, ::3] = 0
    return original, changed


def one_after_the_other(original: Net, changed: Net) -> Net:
    """What is stated: every norm is moved by what it reads once all norms in front of it have been."""
    moved, inputs = copy.deepcopy(changed), dict[Any, torch.Tensor]()
    pairs = list(zip(original.norms, moved.norms, strict=True))
    for norm in (norm for both in pairs for norm in both):
        norm.register_forward_hook(lambda module, args, _: inputs.update({module: args[0].double()}))
    with torch.no_grad():
        original(DATA)
        for old, new in pairs:
            moved(DATA)
            (v, m), (v0, m0) = (torch.var_mean(inputs[n], (0, 2, 3), correction=0) for n in (new, old))
            new.running_mean += (m - m0).float()
            new.running_var *= torch.where(v0 > 0, v / v0, 1.0).float()
    return moved


NORM = {"s": "weight", "h": "bias", "m": "running_mean", "v": "running_var"}


def viewed(net: Net, form: str, batch: torch.Tensor) -> Any:
    if form == "torch":
        return TorchView(net, [batch])
    rows: list[tuple[str, Any]] = []
    for i, (conv, norm) in enumerate(zip(net.convs, net.norms, strict=True)):
        rows += [(f"{kind}{i}", t) for kind, t in zip("wb", (conv.weight, conv.bias), strict=True)]
        rows += [(f"{kind}{i}", getattr(norm, name)) for kind, name in NORM.items()]
    lines = [
        f"c{i} = Conv<pads=[1, 1, 1, 1]>({x}, w{i}, b{i})  r{i} = Relu(c{i})  "
        f"x{i} = BatchNormalization(r{i}, s{i}, h{i}, m{i}, v{i})"
        for i, x in enumerate(["x", *(f"x{i}" for i in range(len(net.convs) - 1))])
    ]
    text = f"g (float[n, 3, 6, 6] x) => (float[n, 8, 6, 6] x{len(lines) - 1}) {{ {'  '.join(lines)} }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(t.detach().numpy().copy(), name) for name, t in rows)
    return OnnxView(model)


def statistics(view: Any) -> list[Any]:
    graph = view.graph()
    norms = [op for op in graph.ops if op.type == "BatchNormalization"]
    return [view.param(str(graph.values[str(v)].param)) for op in norms for v in op.inputs[3:5]]


def moved(original: Net, changed: Net, form: str, batches: list[torch.Tensor]) -> list[Any]:
    data = [b.numpy() for b in batches] if form == "onnx" else batches
    views = [viewed(copy.deepcopy(net), form, batches[0]) for net in (original, changed)]
    before, undos = statistics(views[1]), []
    norms = [op.name for op in views[1].graph().ops if op.type == "BatchNormalization"]
    assert estimate_batch_norms(Original(views[0], data), views[1], dict.fromkeys(norms), undos) == len(norms)
    found = statistics(views[1])
    for undo in reversed(undos):
        undo()
    for old, back in zip(before, statistics(views[1]), strict=True):
        np.testing.assert_array_equal(old, back)
    return found


@pytest.mark.parametrize(("form", "parts"), [("torch", 1), ("torch", 16), ("onnx", 4)])
def test_norms_move_as_if_one_after_the_other(form: str, parts: int) -> None:
    """Exactly, where all data are known at once; near it, where they come in parts."""
    original, changed = pair(5)
    wanted = statistics(TorchView(one_after_the_other(original, changed), [DATA]))
    found = moved(original, changed, form, list(DATA.chunk(parts)))
    exact = form == "onnx" or parts == 1
    still = statistics(TorchView(changed, [DATA]))
    for want, have, was in zip(wanted, found, still, strict=True):
        if exact:
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
        else:
            assert np.linalg.norm(have - want) < 0.02 * np.linalg.norm(was - want)


def test_runs_do_not_grow_with_the_depth() -> None:
    """Norms: every batch three times; layers that are fitted: a single batch once for all of them."""
    runs, layers = [], []
    for depth in (2, 6):
        original, changed = pair(depth)
        for parts in (4, 1):
            views = [TorchView(net, [DATA[:16]]) for net in (original, changed)]
            ops = views[1].graph().ops
            norms = {op.name: None for op in ops if op.type == "BatchNormalization"}
            convs = {op.name: None for op in ops if op.type == "Conv"}
            whole = Original(views[0], list(DATA.chunk(parts)))
            changed.runs = 0
            estimate_batch_norms(whole, views[1], norms)
            runs.append(changed.runs)
        fits = reconstruct(whole, views[1], convs, progress=False)
        runs.append(changed.runs)
        layers.append([fit.kept for fit in fits])
    assert runs == [12, 1, 2] * 2 and layers == [[True] * 2, [True] * 6]


def test_a_layer_is_fitted_behind_those_in_front_of_it() -> None:
    """The rows that a layer is fitted to are those that it reads once the layers in front of it have been fitted."""
    original, changed = pair(3)
    whole, view = Original(TorchView(original, [DATA]), [DATA]), TorchView(changed, [DATA])
    convs = [op.name for op in view.graph().ops if op.type == "Conv"]
    at_once = copy.deepcopy(changed)
    reconstruct(whole, TorchView(at_once, [DATA]), dict.fromkeys(convs), progress=False)
    for name in convs:
        reconstruct(whole, view, {name: None}, progress=False)
    torch.testing.assert_close(at_once(DATA), changed(DATA))


class Gated(nn.Module):
    """Two layers that read the same value, as in gated networks, and one that reads their product."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.out = (
            nn.Conv2d(a, b, 1) for a, b in ((3, 8), (8, 16), (8, 16), (16, 8))
        )
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        x = self.stem(x).relu()
        return self.out(self.left(x).relu() * self.right(x))


def test_layers_that_do_not_read_each_other_are_fitted_in_one_run() -> None:
    """With several batches: the weights are those of one fit after the other, in fewer runs."""
    torch.manual_seed(0)
    original, batches = Gated(), list(DATA[:16].chunk(4))
    changed = copy.deepcopy(original)
    changed.stem.weight.data[::3] = 0
    one_by_one = copy.deepcopy(changed)
    whole = Original(TorchView(original, batches[:1]), batches)
    views = [TorchView(net, batches[:1]) for net in (changed, one_by_one)]
    names = [op.name for op in views[0].graph().ops if op.type == "Conv"][1:]
    for view in views:
        view.graph()
    changed.runs = one_by_one.runs = 0
    fits = reconstruct(whole, views[0], dict.fromkeys(names), progress=False)
    for name in names:
        reconstruct(whole, views[1], {name: None}, progress=False)
    assert (changed.runs, one_by_one.runs) == (8, 12) and any(fit.kept for fit in fits)
    for one, other in zip(changed.parameters(), one_by_one.parameters(), strict=True):
        assert torch.equal(one, other)
