import torch
from aimet_torch.experimental.spinquant import apply_spinquant


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.norm = torch.nn.RMSNorm(16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.head = torch.nn.Linear(16, 32)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


model, ids = Decoder().eval(), torch.arange(8).unsqueeze(0)
before = model(ids)
apply_spinquant(model, enable_r1=True)
assert torch.allclose(model(ids), before, atol=1e-4)
