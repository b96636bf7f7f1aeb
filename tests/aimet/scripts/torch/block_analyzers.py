import pytest
import torch
from aimet_torch.quantization.encoding_analyzer import (
    MinMaxEncodingAnalyzer,
    PercentileEncodingAnalyzer,
    SqnrEncodingAnalyzer,
)

x = torch.randn(10000)
analyzer = MinMaxEncodingAnalyzer(shape=(1,))
with pytest.raises(RuntimeError):
    analyzer.compute_encodings(num_steps=255, is_symmetric=False)
analyzer.update_stats(x)
low, high = analyzer.compute_encodings(num_steps=2**8 - 1, is_symmetric=False)
assert torch.allclose(high - low, x.max() - x.min())
tail = PercentileEncodingAnalyzer(shape=(1,), num_bins=2048, percentile=99)
tail.update_stats(x)
assert tail.compute_encodings(255, False)[1] < high
best = SqnrEncodingAnalyzer(shape=())
best.update_stats(x)
assert best.compute_encodings(15, True)[1] < high
