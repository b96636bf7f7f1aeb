import numpy as np
import onnxruntime as ort
from aimet_onnx.cross_layer_equalization import CrossLayerScaling
from aimet_onnx.meta.connectedgraph import ConnectedGraph
from onnx import TensorProto, helper, numpy_helper

from tests.aimet.onnx_nets import feeds, folded

model = folded()
before = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
ops = ConnectedGraph(model).get_all_ops()
factor = CrossLayerScaling(model).scale_cls_set_with_conv_layers((ops["conv1"], ops["conv2"]))
assert factor.shape == (8,) and abs(factor - 1).max() > 0.01
after = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
assert abs(after - before).max() < 1e-5

rng = np.random.default_rng(0)
weights = {"w1": (6, 3, 1, 1), "w2": (6, 1, 3, 3), "w3": (4, 6, 1, 1)}
graph = helper.make_graph(
    [
        helper.make_node("Conv", ["x", "w1"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["c"], "depthwise", group=6, kernel_shape=[3, 3]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "w3"], ["y"], "last"),
    ],
    "separable",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in weights.items()],
)
separable = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
nodes = {node.name: node for node in separable.graph.node}
s12, s23 = CrossLayerScaling(separable).scale_cls_set_with_depthwise_layers(
    (nodes["first"], nodes["depthwise"], nodes["last"])
)
assert s12.shape == s23.shape == (6,)
