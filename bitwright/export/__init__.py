"""Write files for runtimes and other tools.

Nothing here runs or changes a simulation; the front ends hand over graphs, encodings and samples.
"""
