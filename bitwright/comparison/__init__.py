"""Two executions of one model side by side: where their values part, how that grows, and what causes it.

An execution is the float model, the simulation, the exported file with float kernels, or that file in a runtime.
"""
