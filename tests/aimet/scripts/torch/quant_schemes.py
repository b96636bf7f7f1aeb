import pytest
from aimet_common.defs import QuantizationDataType, QuantScheme
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

for scheme in (*QuantScheme, "tf", "tf_enhanced", "percentile"):
    sim = QuantizationSimModel(Net().eval(), batch(), quant_scheme=scheme, default_data_type=QuantizationDataType.int)
    sim.compute_encodings(lambda model: model(batch()))
assert QuantScheme.from_str("tf") is QuantScheme.min_max is QuantScheme.post_training_tf
with pytest.raises(ValueError):
    QuantizationSimModel(Net(), batch(), quant_scheme="unknown")
