"""Every quantized class of AIMET 2.42: calibrated, run and exported, and the same answer in ONNX Runtime.

The classes of a group are exported in one file, each with inputs of its own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright import aimet_torch
from bitwright.aimet_common.names import absence, names
from bitwright.aimet_torch import nn as qnn
from bitwright.aimet_torch.nn.modules import custom
from bitwright.aimet_torch.quantization.affine import QuantizeDequantize
from bitwright.errors import ExportError

_DRAWS = torch.Generator().manual_seed(0)

#: a class without its prefix -> arguments of the class, and of a call
Calls = Mapping[str, tuple[tuple[Any, ...], tuple[Any, ...]]]


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_DRAWS)


def u(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=_DRAWS) + 0.1


def i(n: int, *shape: int) -> Tensor:
    return torch.randint(0, n, shape, generator=_DRAWS)


def b(*shape: int) -> Tensor:
    return r(*shape) > 0


def each(sizes: str, *arguments: Any, size: int = 4) -> Calls:
    """Classes for one, two and three dimensions: ``AvgPool`` stands for AvgPool1d, AvgPool2d and AvgPool3d."""
    return {f"{name}{d}d": (arguments, (r(2, 3, *[size] * d),)) for name in sizes.split() for d in (1, 2, 3)}


def alike(classes: str, arguments: tuple[Any, ...], *inputs: Any) -> Calls:
    return dict.fromkeys(classes.split(), (arguments, inputs))


def unpooled(d: int) -> tuple[Tensor, ...]:
    return getattr(F, f"max_pool{d}d")(r(1, 2, *[4] * d), 2, return_indices=True)


SIGNS = b(4, 3).float() * 2 - 1
TORCH: dict[str, Calls] = {
    "pools": {
        **each("AdaptiveAvgPool AdaptiveMaxPool", 2),
        **each("AvgPool MaxPool", 2),
        **each("LPPool", 2, 2),
        **{f"MaxUnpool{d}d": ((2,), unpooled(d)) for d in (1, 2, 3)},
    },
    "norms": {
        **each("BatchNorm InstanceNorm", 3),
        "SyncBatchNorm": ((3,), (r(2, 3, 4, 4),)),
        "GroupNorm": ((2, 4), (r(2, 4, 3, 3),)),
        "LayerNorm": ((6,), (r(4, 6),)),
        "LocalResponseNorm": ((2,), (r(2, 4, 3, 3),)),
    },
    "layers": {
        **each("Conv ConvTranspose", 3, 4, 3),
        **alike("Linear NonDynamicallyQuantizableLinear", (6, 5), r(4, 6)),
        "Bilinear": ((3, 4, 5), (r(2, 3), r(2, 4))),
        **alike("Embedding EmbeddingBag", (10, 6), i(10, 2, 5)),
        "MultiheadAttention": ((8, 2), (r(5, 2, 8), r(5, 2, 8), r(5, 2, 8))),
    },
    "recurrent": {**alike("GRU LSTM RNN", (4, 5), r(3, 2, 4)), **alike("GRUCell LSTMCell RNNCell", (4, 5), r(2, 4))},
    "pads": {
        **each("ConstantPad", 1, 0.5),
        **each("CircularPad ReflectionPad ReplicationPad ZeroPad", 1),
        **alike("AlphaDropout Dropout FeatureAlphaDropout Dropout1d", (0.5,), r(2, 3, 4)),
        "Dropout2d": ((0.5,), (r(2, 3, 4, 4),)),
        "Dropout3d": ((0.5,), (r(2, 3, 4, 4, 4),)),
    },
    "activations": {
        **alike(
            "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU RReLU ReLU ReLU6 SELU "
            "SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink",
            (),
            r(4, 6),
        ),
        **alike("LogSoftmax Softmax Softmin", (-1,), r(4, 6)),
        "Softmax2d": ((), (r(2, 3, 4, 4),)),
        "Threshold": ((0.1, 0.2), (r(4, 6),)),
    },
    "moves": {
        "ChannelShuffle": ((2,), (r(2, 4, 3, 3),)),
        "Flatten": ((), (r(2, 3, 4),)),
        "Fold": (((4, 4), 2, 1, 0, 2), (r(2, 12, 4),)),
        "Unfold": ((2,), (r(2, 3, 4, 4),)),
        "PixelShuffle": ((2,), (r(2, 8, 3, 3),)),
        "PixelUnshuffle": ((2,), (r(2, 2, 4, 4),)),
        "Unflatten": ((1, (2, 3)), (r(4, 6),)),
        **alike("Upsample UpsamplingBilinear2d UpsamplingNearest2d", (None, 2), r(2, 3, 4, 4)),
    },
    "losses": {
        **alike("BCELoss BCEWithLogitsLoss", (), u(4, 3) / 1.2, u(4, 3) / 1.2),
        **alike("CosineSimilarity PairwiseDistance", (), r(4, 6), r(4, 6)),
        **alike("HuberLoss L1Loss MSELoss SmoothL1Loss", (), r(4, 3), r(4, 3)),
        **alike("TripletMarginLoss TripletMarginWithDistanceLoss", (), r(4, 6), r(4, 6), r(4, 6)),
        **alike("HingeEmbeddingLoss SoftMarginLoss", (), r(4, 3), SIGNS),
        "CosineEmbeddingLoss": ((), (r(4, 6), r(4, 6), SIGNS[:, 0])),
        "MarginRankingLoss": ((), (r(4), r(4), SIGNS[:, 0])),
        "CrossEntropyLoss": ((), (r(4, 6), i(6, 4))),
        "NLLLoss": ((), (r(4, 6).log_softmax(-1), i(6, 4))),
        "NLLLoss2d": ((), (r(2, 3, 4, 4).log_softmax(1), i(3, 2, 4, 4))),
        "KLDivLoss": ((), (r(4, 3).log_softmax(-1), u(4, 3).softmax(-1))),
        "MultiLabelMarginLoss": ((), (r(2, 4), torch.tensor([[3, 0, -1, 1], [0, -1, 1, 2]]))),
        "MultiLabelSoftMarginLoss": ((), (r(4, 3), b(4, 3).float())),
        "MultiMarginLoss": ((), (r(4, 3), i(3, 4))),
        "PoissonNLLLoss": ((), (r(4, 3), u(4, 3) * 5)),
    },
}
CUSTOM: dict[str, Calls] = {
    "of one tensor": {
        **alike(
            "Abs Atan Cos CustomSiLU ElementwiseCeil ElementwiseFloor Erf Exponential Max Min Neg Norm Normalize Round Sin "
            "Square",
            (),
            r(4, 6),
        ),
        **alike("Log RSqrt Sqrt", (), u(4, 6)),
        "Asin": ((), (u(4, 6) * 1.8 - 1.1,)),
        **alike("AMax AMin Argmax Argmin CumSum Mean Prod Sum", (), r(4, 6), 1),
        "LogicalNot": ((), (b(4, 6),)),
        "RmsNorm": (((4, 6), [1], 1e-6), (r(4, 6),)),
        "HadamardRotation": ((8,), (r(4, 8),)),
    },
    "of several tensors": {
        **alike("Add Subtract Multiply Maximum Minimum", (), r(4, 6), r(4, 6)),
        **alike("Divide FloorDivide Fmod Pow Remainder", (), u(4, 6), u(4, 6) + 0.5),
        **alike("LogicalAnd LogicalOr", (), b(4, 6), b(4, 6)),
        **alike("MatMul Bmm", (), r(2, 4, 6), r(2, 6, 5)),
        "Outer": ((), (r(4), r(5))),
        "Addmm": ((), (r(4, 5), r(4, 6), r(6, 5))),
        "Baddbmm": ((), (r(2, 4, 5), r(2, 4, 6), r(2, 6, 5))),
        "BatchNorm": ((), (r(2, 3, 4, 4), r(3), u(3), r(3), r(3))),
        "GroupNorm": ((), (r(2, 4, 3, 3), 2)),
        "DynamicConv2d": ((), (r(2, 3, 6, 6), r(4, 3, 3, 3), r(4))),
        "DynamicLinear": ((), (r(4, 6), r(5, 6), r(5))),
        "MaskedFill": ((), (r(4, 6), b(4, 6), 0.0)),
        "RotaryEmbedding": ((False, 8, 8), (r(2, 2, 5, 8), u(2, 5, 4), u(2, 5, 4))),
    },
    "of places": {
        "AdaptiveAvgPool2d": ((), (r(2, 3, 6, 6), 3)),
        **alike("AvgPool2d MaxPool2d", (), r(2, 3, 6, 6), 2),
        "Interpolate": ((), (r(2, 3, 4, 4), None, 2.0)),
        "GridSample": ((), (r(1, 2, 4, 4), u(1, 3, 3, 2) * 2 - 1)),
        "RoiAlign": ((2, 1.0, 2), (r(1, 2, 8, 8), torch.tensor([[0.0, 0, 4, 4], [1, 2, 6, 7]]), torch.tensor([0, 0]))),
        "ChannelShuffle": ((2,), (r(2, 4, 3, 3),)),
        "Concat": ((1,), (r(4, 6), r(4, 5))),
        "CustomGather": ((), (r(4, 6), i(4, 3), 0)),
        "DepthToSpaceCRDMode": (((2, 2),), (r(2, 8, 3, 3),)),
        "DepthToSpaceDCRMode": ((2,), (r(2, 8, 3, 3),)),
        "Expand": ((), (r(4, 1), 4, 6)),
        "Gather": ((), (r(4, 6), 1, i(6, 4, 2))),
        "GatherNd": ((0,), (r(4, 6), i(4, 3, 1))),
        "IndexSelect": ((), (r(4, 6), 1, i(6, 3))),
        "NullRequant": ((), (r(4, 6), (4, 6))),
        "OneHot": ((5, 0.0, 1.0), (i(5, 4),)),
        "Pad": ((), (r(2, 3, 4), (1, 1))),
        "Permute": ((), (r(2, 3, 4), (2, 0, 1))),
        "Reshape": ((), (r(2, 3, 4), (6, 4))),
        "ScatterElements": ((1,), (r(4, 6), i(6, 4, 2), r(4, 2))),
        "ScatterND": ((0,), (r(6, 3), torch.tensor([[1], [4]]), r(2, 3))),
        "Select": ((), (r(4, 6), 1, 2)),
        "Split": ((), (r(4, 6), 3, 1)),
        "StridedSlice": ((), (r(4, 6), ((0, 4, 2), (1, 5, 1)))),
        "Tile": ((), (r(2, 3), (2, 2))),
    },
}
#: classes that run and have no file -> what the error says
REFUSED: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    "CTCLoss": (
        (),
        (r(10, 2, 5).log_softmax(-1), i(4, 2, 4) + 1, torch.tensor([10, 9]), torch.tensor([4, 3])),
        "_ctc_loss",
    ),
    "FractionalMaxPool2d": ((2, 3), (r(2, 3, 8, 8),), "fractional_max_pool2d"),
    "FractionalMaxPool3d": ((2, 3), (r(2, 3, 8, 8, 8),), "fractional_max_pool3d"),
    "GaussianNLLLoss": ((), (r(4, 3), r(4, 3), u(4, 3)), "decide nothing by their values"),
}
GROUPS = [("nn", group, calls) for group, calls in TORCH.items()] + [
    ("custom", group, calls) for group, calls in CUSTOM.items()
]


def flat(value: Any) -> list[Any]:
    several = value if isinstance(value, (tuple, list)) else (value,)
    return [y for x in several for y in (x if isinstance(x, (tuple, list)) else (x,)) if y is not None]


def quantized(home: str, name: str, arguments: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
    """A module with 8 bits wherever it has a place for a quantizer that sees floats, calibrated."""
    torch.manual_seed(0)
    module = getattr({"nn": qnn, "custom": custom}[home], f"Quantized{name}")(*arguments)
    for parameter in module.param_quantizers:
        module.param_quantizers[parameter] = QuantizeDequantize((), 8, True)
    places = [
        (several, n) for several in (module.input_quantizers, module.output_quantizers) for n in range(len(several))
    ]
    for several, n in places:
        several[n] = QuantizeDequantize((), 8, False)
    with torch.no_grad(), module.eval().compute_encodings():
        module(*inputs)
    for several, n in places:
        if not several[n].is_initialized():
            several[n] = None
    return module


class Several(nn.Module):
    """Modules beside each other, each with inputs of its own; those that are no tensors are the same in every call."""

    def __init__(self, home: str, calls: Calls) -> None:
        super().__init__()
        self.calls = calls
        self.parts = nn.ModuleDict({name: quantized(home, name, *call) for name, call in calls.items()})

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        given, outputs = iter(tensors), []
        for (_, inputs), module in zip(self.calls.values(), self.parts.values(), strict=True):
            outputs += flat(module(*[next(given) if isinstance(x, Tensor) else x for x in inputs]))
        return outputs


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning", "ignore:`NLLLoss2d` has been:FutureWarning")
@pytest.mark.parametrize("home, group, calls", [pytest.param(*row, id=row[1]) for row in GROUPS])
def test_file_of_a_quantized_class_computes_its_values(home: str, group: str, calls: Calls) -> None:
    model, buffer = Several(home, calls), io.BytesIO()
    tensors = [x for _, inputs in calls.values() for x in inputs if isinstance(x, Tensor)]
    aimet_torch.onnx.export(model, tuple(tensors), buffer, export_int32_bias=False)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(buffer.getvalue(), options)
    found = iter(
        session.run(None, {port.name: x.numpy() for port, x in zip(session.get_inputs(), tensors, strict=True)})
    )
    equal: list[bool] = []
    for name, (_, inputs) in calls.items():
        module: Any = model.parts[name]
        scales = [float(q.get_scale().detach()) for q in module.output_quantizers if q is not None]
        on_grid = [q for q in (*module.param_quantizers.values(), *module.input_quantizers) if q is not None]
        assert on_grid or scales or not any(isinstance(x, Tensor) and x.is_floating_point() for x in inputs), name
        with torch.no_grad():
            wanted = flat(module(*inputs))
        for want in wanted:
            got, value = next(found), want.as_subclass(Tensor).numpy()
            assert got.shape == value.shape and got.dtype == value.dtype, name
            # sums in another order may round to a neighbour
            np.testing.assert_allclose(got, value, rtol=1e-6, atol=1.01 * max(scales, default=1e-6), err_msg=name)
            equal += np.isclose(got, value, rtol=0, atol=1e-6).flatten().tolist()
    assert np.mean(equal) > 0.95 and next(found, None) is None


@pytest.mark.parametrize("name", REFUSED)
def test_class_that_onnx_has_no_operator_for_runs_and_says_so(name: str) -> None:
    arguments, inputs, why = REFUSED[name]
    module = quantized("nn", name, arguments, inputs)
    assert torch.isfinite(torch.as_tensor(module(*inputs))).all()
    with pytest.raises(ExportError, match=why):
        aimet_torch.onnx.export(module, inputs, io.BytesIO())


def test_every_quantized_class_is_tested() -> None:
    tested = {
        home: {name for where, _, calls in GROUPS if where == home for name in calls} for home in ("nn", "custom")
    }
    tested["nn"].update(REFUSED)
    for home, path in (("nn", "aimet_torch.nn.true_quant"), ("custom", "aimet_torch.nn.modules.custom")):
        known = {name.removeprefix("Quantized") for name in names()[path] if name.startswith("Quantized")}
        here = {name for name in known if absence(f"{path}.Quantized{name}") is None}
        assert here - tested[home] == set()
