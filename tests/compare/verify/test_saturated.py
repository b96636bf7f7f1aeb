"""What verification says on a CPU whose sums of uint8 times int8 saturate."""

from __future__ import annotations

from pathlib import Path

from tests.support.without_vnni import run_without_vnni

_NETS = """
import numpy as np, onnx_ir as ir, onnxruntime as ort, torch
from torch import nn
from bitwright.torch import QuantizationSimModel, quantize
from tests.onnx.nets import FLOAT, Net, body, feeds_for
torch.manual_seed(0)
x = torch.rand(8, 64)
def positive(net):
    with torch.no_grad():
        for p in net.parameters():
            p.abs_()
    return net.eval()
def simulated(net):
    sim = QuantizationSimModel(net, x)
    sim.compute_encodings([x])
    return sim
def deployed(path, **entries):
    options = ort.SessionOptions()
    for key, value in entries.items():
        options.add_session_config_entry("session." + key, value)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, {"input": x.numpy()})[0]
"""

_TOLD = f"""{_NETS}
sim = simulated(positive(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))))
report = sim.verify(x)
assert report.ok, str(report)
assert "0.output[0]" in report.saturated.places or "1.output[0]" in report.saturated.places, str(report)
text = str(report)
assert "this CPU has no VNNI: with the default settings of a session" in text, text
assert "open the session with session.x64quantprecision = 1, or quantize with repair='saturation'" in text, text
assert text in report._repr_html_() or "session.x64quantprecision = 1" in report._repr_html_()
path = sim.export(sys.argv[1], "net", x).qdq
step = float(max(e.scale for e in [sim.quantizers["2.output[0]"].encoding]))
expected = sim.model(x).detach().numpy()
assert np.abs(deployed(path) - expected).max() > 3 * step
assert np.abs(deployed(path, x64quantprecision="1") - expected).max() < 1.01 * step
"""

_SHARED = f"""{_NETS}
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
    def forward(self, x):
        return self.layer(torch.sigmoid(self.layer(x)))
net = positive(Twice())
sim = simulated(net)
report = sim.verify(x)
assert report.ok and report.saturated.refused, str(report)
assert "x64quantprecision" not in str(report) and "quantize with repair='saturation'" in str(report)
path = sim.export(sys.argv[1], "net", x).qdq
try:
    deployed(path, x64quantprecision="1")
except Exception as error:
    assert "Attempt to replace" in str(error), error
else:
    raise AssertionError("ONNX Runtime takes shared weights now: offer the setting for them too")
repaired = quantize(net, [x], repair="saturation", preset="w8a8")
report = repaired.sim.verify(x)
assert report.ok and report.saturated is None, str(report)
"""

_IN_A_BODY = f"""{_NETS}
from bitwright.onnx import QuantizationSimModel as OnnxSim
net = Net(seed=7)
rows = net.input("x", (2, 5, 16))
inner = Net(seed=8)
w = inner.const(np.abs(np.random.default_rng(0).standard_normal((16, 16))).astype(np.float32), "W")
h = inner("Tanh", inner("Add", inner("MatMul", "x_t", w, name="ih"), "h_in", name="sum"), name="tanh", out="h_out")
step = body(h, inner("Identity", h, name="copy", out="h_each"), net=inner,
            inputs=[("h_in", FLOAT, (2, 16)), ("x_t", FLOAT, (2, 16))])
last, each = net("Scan", net.const(np.zeros((2, 16)), "start"), rows, name="rnn", out=["last", "each"], body=step,
                 num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1])
proto = net.model(each, last)
data = [{{name: np.abs(value) for name, value in feeds_for(proto, seed).items()}} for seed in range(3)]
sim = OnnxSim(proto, data[0], threads=1)
sim.compute_encodings(data, progress=False)
report = sim.verify(data[0], target="packed")
assert report.ok, str(report)
assert report.saturated.refused and "ih.output[0]" in report.saturated.places, str(report)
report = sim.verify(data[0])  # whose codes are unsigned there
assert report.ok and report.saturated is None, str(report)
"""


def test_places_that_saturate_are_named_beside_the_verdict_and_the_remedy_works(tmp_path: Path) -> None:
    run_without_vnni(_TOLD, tmp_path, str(tmp_path / "out"))


def test_shared_weights_have_exact_sums_in_verification_and_another_remedy(tmp_path: Path) -> None:
    run_without_vnni(_SHARED, tmp_path, str(tmp_path / "out"))


def test_the_setting_is_not_offered_for_weights_of_a_body(tmp_path: Path) -> None:
    """ONNX Runtime leaves these as they are; files for it have codes there that need no setting."""
    run_without_vnni(_IN_A_BODY, tmp_path)
