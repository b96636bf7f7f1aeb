"""The state of a simulation: quantizers, sites, calibration, and the protocols of the front ends.

How a quantizer works on a tensor of a framework belongs to the front end.
"""
