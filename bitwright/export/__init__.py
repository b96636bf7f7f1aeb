"""What is written for others to read, and the check that it computes what the simulation computed.

Nothing here runs or changes a simulation; the front ends hand over graphs, encodings and samples.
"""
