import pytest
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

model, x = Net().eval(), batch()
sim = QuantizationSimModel(model, x)
record = {"bitwidth": 8, "dtype": "int", "is_symmetric": "False", "max": 4.0, "min": 0.0, "offset": 0, "scale": 4 / 255}
partial = {"activation_encodings": {"relu1": {"output": {"0": record}}}, "param_encodings": {}}
sim.load_encodings(partial, strict=True, partial=True, requires_grad=None, allow_overwrite=False)
assert sim.model.relu1.output_quantizers[0].get_max().isclose(sim.model.relu1.output_quantizers[0].max)
assert sim.model.relu2.output_quantizers[0] is not None, "quantizers without an encoding stay on"
sim.compute_encodings(lambda m: m(x))
assert abs(float(sim.model.relu1.output_quantizers[0].get_max()) - 4) < 1e-5
sim.load_encodings(partial, partial=False)
sim.model.relu1.output_quantizers[0] = None
with pytest.raises(ValueError):
    sim.load_encodings(partial, strict=True)
sim.load_encodings(partial, strict=False)
assert sim.model.relu1.output_quantizers[0] is None
with pytest.raises(ValueError):
    sim.load_encodings({"activation_encodings": {"nobody": {"output": {"0": record}}}, "param_encodings": {}})
