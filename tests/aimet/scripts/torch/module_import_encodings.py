"""Encodings of one module are moved to the same module of another simulation."""

import copy

import torch
from aimet_torch.nn import QuantizedLinear
from aimet_torch.quantization.affine import QuantizeDequantize
from aimet_torch.quantsim import QuantizationSimModel

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
x = torch.randn(32, 8)
sims = [QuantizationSimModel(copy.deepcopy(model), x[:1]) for _ in range(2)]
first, second = sims
first.compute_encodings(lambda m: m(x))
second.compute_encodings(lambda m: m(3 * x))

for kind in ("param", "input", "output"):
    for there, here in zip(first.model, second.model, strict=True):
        records = getattr(there, f"export_{kind}_encodings")("0.6.1")
        assign = getattr(here, f"import_{kind}_encodings")
        assign(
            {k: r for k, r in records.items() if r},
            strict=True,
            partial=True,
            requires_grad=None,
            allow_overwrite=False,
        )
with torch.no_grad():
    assert torch.equal(first.model(x), second.model(x))
assert not second.model[0].param_quantizers["weight"].is_overwrite_allowed()

# what is not there is an error; what is not said is switched off unless the import is partial
try:
    second.model[1].import_input_encodings(
        {"0": {"bitwidth": 8, "is_symmetric": "False", "min": -1, "max": 1}}, True, True, None, True
    )
    raise SystemExit("a record for a place without a quantizer was taken")
except (RuntimeError, ValueError):
    pass
third = QuantizationSimModel(copy.deepcopy(model), x[:1])
third.compute_encodings(lambda m: m(x))
third.model[2].import_output_encodings({}, strict=True, partial=False, requires_grad=None, allow_overwrite=True)
assert third.model[2].output_quantizers[0] is None

# a quantized module of its own has the same methods
linear = QuantizedLinear(8, 4)
linear.param_quantizers["weight"] = QuantizeDequantize((), bitwidth=8, symmetric=True)
records = first.model[0].export_param_encodings("0.6.1")
linear.param_quantizers["weight"] = QuantizeDequantize((16, 1), bitwidth=4, symmetric=True)
linear.import_param_encodings({"weight": records["weight"]}, True, True, True, True)
assert linear.param_quantizers["weight"].bitwidth == 8
torch.testing.assert_close(
    linear.param_quantizers["weight"].get_scale().flatten(),
    first.model[0].param_quantizers["weight"].get_scale().flatten(),
    rtol=1e-5,
    atol=0,
)
