"""Networks of TensorFlow's exporter: channels last between convolutions, and channel counts of which four is no divisor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from bitwright.compare.verify import verify_folder
from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx import quantize
from tests.onnx.nets import Net, run


def mobile(excite: str) -> onnx.ModelProto:
    """Keras's MobileNetV3 in small: pictures of bytes, activations between Transposes, channels weighted by what they hold.

    Args:
        excite: operator that takes the mean of a channel.
    """
    net = Net(seed=3)

    def const(value: float) -> str:
        return net.const(np.float32(value))

    def gate(v: str) -> str:
        return net("Mul", net("Clip", net("Add", v, const(3)), const(0), const(6)), const(1 / 6))

    def hard_swish(v: str) -> str:
        last = net("Transpose", v, perm=[0, 2, 3, 1])
        return net("Transpose", net("Mul", last, gate(last)), perm=[0, 3, 1, 2])

    def conv(v: str, inputs: int, outputs: int, k: int = 1, **attrs: object) -> str:
        return net.conv(v, inputs, outputs, k=k, name=net._fresh("conv2d"), pads=[k // 2] * 4, **attrs)

    def weighted(v: str, channels: int, few: int) -> str:
        mean = net("GlobalAveragePool", v) if excite == "GlobalAveragePool" else net(excite, v, axes=[2, 3], keepdims=1)
        return net("Mul", v, gate(conv(net("Relu", conv(mean, channels, few)), few, channels)))

    x = net.input("x", ("n", 32, 32, 3))
    y = net("Transpose", net("Add", net("Mul", x, const(1 / 127.5)), const(-1)), perm=[0, 3, 1, 2])
    y = hard_swish(conv(y, 3, 16, 3, strides=[2, 2]))
    y = conv(weighted(net("Relu", conv(y, 16, 16, 3, group=16, strides=[2, 2])), 16, 6), 16, 18)
    z = hard_swish(conv(hard_swish(conv(y, 18, 54)), 54, 54, 5, group=54))
    y = net("Add", conv(weighted(z, 54, 10), 54, 18), y)
    y = hard_swish(conv(net("GlobalAveragePool", hard_swish(conv(y, 18, 45))), 45, 50))
    y = net("Transpose", conv(y, 50, 10), perm=[0, 2, 3, 1])
    return net.model(net("Softmax", net("Reshape", y, net.const(np.array([-1, 10]))), axis=-1, out="y"))


@pytest.mark.parametrize("excite", ["GlobalAveragePool", "ReduceMean"])
def test_its_file_runs_on_its_samples_and_agrees(excite: str, tmp_path: Path) -> None:
    proto, random = mobile(excite), np.random.default_rng(0)
    *data, unseen = ({"x": random.uniform(0, 255, (4, 32, 32, 3)).astype(np.float32)} for _ in range(4))
    options = {"recipe": ["fold"], "path": tmp_path, "progress": False, "measure_speed": False}
    result = quantize(proto, data, **options)
    report = verify_folder(tmp_path)
    assert report.ok and not report.unchecked, report.to_text()
    (wanted,), (found,) = run(proto, unseen), result.sim.run(unseen)
    assert 20 < sqnr(wanted, found) < 60
    assert sqnr(found, run(onnx.load(result.exported.qdq), unseen, optimize=True)[0]) > 20
