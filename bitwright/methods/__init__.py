"""Methods on models and simulations of either front end: one function each, whatever the model is written in.

What lives here reads its arguments, opens the model through :mod:`bitwright.methods.front_end` and calls an algorithm; it
holds no algorithm and knows no framework. ``bitwright.torch`` and ``bitwright.onnx`` publish the same functions.
"""
