import aimet_torch

from tests.aimet.nets import Net, batch, images

sim = aimet_torch.QuantizationSimModel(Net().eval(), batch())


def callback(model, count):
    for i, (image, _) in enumerate(images()):
        if i < count:
            model(image)


sim.compute_encodings(callback, forward_pass_callback_args=1)
one = sim.model.conv1.input_quantizers[0].get_max()
sim.compute_encodings(callback, 2)
assert sim.model.conv1.input_quantizers[0].get_max() >= one
