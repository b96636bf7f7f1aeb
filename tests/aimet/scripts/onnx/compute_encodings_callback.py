from aimet_onnx.quantsim import QuantizationSimModel

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
seen = []


def callback(session, args):
    seen.append(args)
    for feed in feeds():
        session.run(None, feed)


sim.compute_encodings(callback, None)
sim.compute_encodings(forward_pass_callback=callback, forward_pass_callback_args=7)
assert seen == [None, 7]
sim.compute_encodings(lambda session: session.run(["output"], feeds()[0]))
