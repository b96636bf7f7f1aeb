import json

import onnx
import torch
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch


class Branches(Net):
    def forward(self, x):
        x = self.relu1(self.bn1(self.conv1(x)))
        a = self.pool(self.relu2(self.bn2(self.conv2(x))))
        return self.fc(torch.cat((a[:, :4], a[:, 4:]), 1).flatten(1)), a.transpose(1, 2).sigmoid()


model, x = Branches().eval(), batch()
sim = QuantizationSimModel(model, x)
sim.compute_encodings(lambda m: m(x))
sim.onnx.export((x,), "net.onnx", dynamo=False)
entries = {e["name"]: e for e in json.load(open("net.encodings"))["activation_encodings"]}
graph = onnx.load("net.onnx").graph
kinds = {node.op_type: node.output[0] for node in graph.node}
pool = next(node for node in graph.node if node.op_type == "MaxPool")
for kind in ("MaxPool", "Slice", "Concat", "Reshape", "Transpose"):
    assert entries[kinds[kind]]["scale"] == entries[pool.input[0]]["scale"], kind

other = QuantizationSimModel(model, x)
other.load_encodings("net.encodings")
assert torch.equal(other.model(x)[0], sim.model(x)[0])
