import pytest
from aimet_torch.seq_mse import SeqMseParams

SeqMseParams(num_batches=1, inp_symmetry="asym", loss_fn="l1")
with pytest.raises(ValueError):
    SeqMseParams(num_batches=1, loss_fn="huber")
